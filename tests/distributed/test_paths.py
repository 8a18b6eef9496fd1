"""The same module has the same path in every layout of the same model."""

from __future__ import annotations

import pytest

from .conftest import Train
from .jobs import Finished
from .test_values import KEY

BLOCK = ["", ".norm", ".up", ".act", ".drop", ".down"]
PATHS = ["", "blocks", *(f"blocks.{i}{part}" for i in (0, 1) for part in BLOCK), "shared", "head"]
HOOKED = {"plain": ("--watch",), "ddp": ("--watch",), "fsdp2": ("--watch",), "compile": (), "checkpoint": ("--tap",)}


def recorded(train: Train, layout: str) -> Finished:
    return train(layout, "everything", *HOOKED[layout])


@pytest.mark.parametrize("layout", HOOKED)
def test_modules_are_named_as_in_the_bare_model(train: Train, layout: str) -> None:
    for writer in recorded(train, layout).run.writers:
        (root,) = writer.manifest["roots"]
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


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "checkpoint"])
def test_activations_lie_under_the_same_paths_as_in_a_plain_run(train: Train, layout: str) -> None:
    def places(finished: Finished) -> set[tuple[str, str, str]]:
        frame = finished.run.to_pandas()
        frame = frame[(frame["rank"] == 0) & frame["site"].isin(["input", "output", "grad_input", "grad_output"])]
        return set(zip(frame["site"], frame["module_path"], frame["name"], strict=True))

    assert places(recorded(train, layout)) == places(recorded(train, "plain"))


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
