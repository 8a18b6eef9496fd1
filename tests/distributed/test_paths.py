"""The same module has the same path in every layout of the same model."""

from __future__ import annotations

import pytest

from tests.rigs.jobs import Finished

from .conftest import Train
from .test_values import KEY

BLOCK = ["", ".norm", ".up", ".act", ".drop", ".down"]
PATHS = ["", "blocks", *(f"blocks.{i}{part}" for i in (0, 1) for part in BLOCK), "shared", "head"]
SHARDED = ["ddp", "fsdp1", "fsdp1 orig", "fsdp2"]
HOOKED = {
    "plain": ("--watch",),
    **dict.fromkeys(SHARDED, ("--watch",)),
    "compile": (),
    "checkpoint": ("--tap",),
}


def recorded(train: Train, layout: str) -> Finished:
    return train(layout, "everything", *HOOKED[layout])


@pytest.mark.parametrize("layout", HOOKED)
def test_modules_are_named_as_in_the_bare_model(train: Train, layout: str) -> None:
    for writer in recorded(train, layout).run.writers:
        (root,) = writer.manifest.members["roots"]
        assert [module["path"] for module in root["modules"]] == PATHS
        assert root["class"] == "Net"
        assert {module["class"] for module in root["modules"] if module["path"] in ("blocks.0", "blocks.1")} == {
            "Block"
        }


@pytest.mark.parametrize("layout", HOOKED)
def test_parameters_are_named_by_the_module_that_owns_them(train: Train, layout: str) -> None:
    frame = recorded(train, layout).run.to_pandas()
    found = frame[frame["site"] == "param"]
    names = set(zip(found["module_path"], found["name"], strict=True))
    layers = ["norm", "up", "down"]
    owners = [*(f"blocks.{i}.{layer}" for i in (0, 1) for layer in layers), "shared", "head"]
    assert names == {(owner, name) for owner in owners for name in ("weight", "bias")}


@pytest.mark.parametrize("layout", [*SHARDED, "checkpoint"])
def test_activations_lie_under_the_same_paths_as_in_a_plain_run(train: Train, layout: str) -> None:
    def values(finished: Finished) -> set[tuple[str, str, str]]:
        frame = finished.run.to_pandas()
        frame = frame[(frame["rank"] == 0) & frame["site"].isin(["input", "output", "grad_input", "grad_output"])]
        return set(zip(frame["site"], frame["module_path"], frame["name"], strict=True))

    assert values(recorded(train, layout)) == values(recorded(train, "plain"))


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp1 orig"])
def test_parameters_of_modules_are_listed_as_in_the_bare_model(train: Train, layout: str) -> None:
    def listed(finished: Finished) -> list[tuple[str, list[str], list[str]]]:
        (root,) = finished.run.writers[0].manifest.members["roots"]
        return [(module["path"], module["params"], module["buffers"]) for module in root["modules"]]

    assert listed(recorded(train, layout)) == listed(recorded(train, "plain"))


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp1 orig", "fsdp2"])
@pytest.mark.parametrize("site", ["param", "grad", "optim"])
def test_every_rank_has_every_tensor_of_a_parameter(train: Train, layout: str, site: str) -> None:
    """A rank with an empty slice is present; only numbers such as the step may be missing where nothing is updated."""

    def names(finished: Finished, rank: int) -> set[tuple[str, str]]:
        frame = finished.run.to_pandas()
        frame = frame[(frame["rank"] == rank) & (frame["site"] == site)]
        return {key for key in zip(frame["module_path"], frame["name"], strict=True) if not key[1].endswith(".step")}

    assert names(recorded(train, layout), 0) == names(recorded(train, layout), 1) == names(recorded(train, "plain"), 0)


def test_a_recompute_is_marked_and_doubles_nothing(train: Train) -> None:
    plain, checkpointed = recorded(train, "plain").run.to_pandas(), recorded(train, "checkpoint").run.to_pandas()
    assert not checkpointed.duplicated(KEY).any()
    forward = checkpointed[checkpointed["phase"] != "recompute"]
    sites = ["tap", "scalar"]  # the checkpointed job taps and the plain one does not
    assert len(forward[~forward["site"].isin(sites)]) == len(plain[~plain["site"].isin(sites)])
    recomputed = checkpointed[checkpointed["phase"] == "recompute"]
    assert set(recomputed["site"]) == {"input", "output", "tap"}
    again = recomputed[recomputed["module_path"] == "blocks.1.up"]
    first = forward[(forward["module_path"] == "blocks.1.up") & (forward["mode"] == "train")]
    first = first[first["site"].isin(["input", "output"])]
    key = ["site", "step", "micro_step", "call", "fingerprint"]
    assert len(again) > 0
    assert sorted(again[key].itertuples(index=False, name=None)) == sorted(
        first[key].itertuples(index=False, name=None)
    )


def test_a_compiled_model_says_what_it_hides(train: Train) -> None:
    finished = recorded(train, "compile")
    assert len(finished.lines("values inside compiled modules are not recorded")) == 1
    frame = finished.run.to_pandas()
    assert {"param", "grad", "optim", "buffer", "scalar"} <= set(frame["site"])
    assert sorted(set(frame["step"])) == [0, 1, 2]
