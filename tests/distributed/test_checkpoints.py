"""`recorder checkpoint`: what torch loads is what training had, bit for bit, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

from recorder.analyze.export.model import Model, write_model
from recorder.merge.merge import merge_run
from recorder.run.run import open_run
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS, Finished

from .conftest import Train
from .scripts.checkpoints import LAYOUTS as TIED
from .scripts.checkpoints import Tied
from .scripts.train import Net

LAYOUTS = {"ddp": "ddp", "fsdp1": "fsdp1", "fsdp2": "fsdp2", "mixed": "fsdp2 mixed"}
LAST_STEP = 2
Tensors = dict[str, Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def expected(finished: Finished, site: str) -> Tensors:
    """What plain reads saw at the last step, of all ranks: whole where they gathered it, else of rank 0."""
    found: Tensors = {}
    first = finished.saved[0]
    for key, value in first["values"].items():
        if (key[0], key[3], key[-1]) == (site, LAST_STEP, "optimizer"):
            name = f"{key[1]}.{key[2]}" if key[1] else key[2]
            layout = first["layouts"].get(key, {})
            if layout.get("full") is not None:
                value = layout["full"]
            elif "start" in layout:  # a gradient of FSDP1, which nobody gathers
                value = torch.cat([rank["values"][key] for rank in finished.saved]).reshape(layout["shape"])
            found[name] = value
    return found


@pytest.fixture(scope="module")
def written(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each layout, with checkpoints and files of its last step."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, layout in LAYOUTS.items():
        run = train(layout, "everything", "--watch").run
        (root / name).mkdir()
        for what in ("param", "grad"):
            model = Model(run, what)
            assert (model.step, model.refused) == (LAST_STEP, [])
            write_model(model, root / name / what, "dcp")
            write_model(model, root / name / f"{what}.safetensors", "safetensors")
    return root


@pytest.fixture(scope="module")
def loaded(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks made of all of them, and the runs of the tied models that they trained."""
    folder = tmp_path_factory.mktemp("loaded")
    jobs.succeeded(jobs.ranks(folder, SCRIPTS / "checkpoints.py", written, folder))
    return folder


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert [name for name in wanted if found[name].dtype != wanted[name].dtype] == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plain_model_loads_the_checkpoint(train: Train, written: Path, name: str) -> None:
    finished = train(LAYOUTS[name], "everything", "--watch")
    model = Net()
    state = model.state_dict()
    load_checkpoint(state, checkpoint_id=written / name / "param")
    model.load_state_dict(state)
    assert_same(dict(model.state_dict()), expected(finished, "param") | expected(finished, "buffer"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_load_the_checkpoint_into_a_sharded_model(
    train: Train, written: Path, loaded: Path, name: str
) -> None:
    finished = train(LAYOUTS[name], "everything", "--watch")
    found: dict[str, Tensors] = torch.load(written / name / "loaded.pt")
    assert_same(found["param"], expected(finished, "param") | expected(finished, "buffer"))
    assert_same(found["grad"], expected(finished, "grad"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_safetensors_hold_the_same(train: Train, written: Path, name: str) -> None:
    from safetensors.torch import load_file

    finished = train(LAYOUTS[name], "everything", "--watch")
    found: Any = load_file(written / name / "param.safetensors")
    Net().load_state_dict(found)
    assert_same(found, expected(finished, "param") | expected(finished, "buffer"))
    assert_same(load_file(written / name / "grad.safetensors"), expected(finished, "grad"))


def test_a_checkpoint_becomes_a_file_of_torch_save(written: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(written / "fsdp2" / "param", tmp_path / "state.pt")
    state = Net().state_dict()
    load_checkpoint(state, checkpoint_id=written / "fsdp2" / "param")
    assert_same(torch.load(tmp_path / "state.pt"), state)


def test_a_merged_run_gives_the_same_file(train: Train, written: Path, tmp_path: Path) -> None:
    merge_run(train("fsdp2", "everything", "--watch").run, tmp_path / "merged")
    model = Model(open_run(tmp_path / "merged"), "param")
    write_model(model, tmp_path / "again.safetensors", "safetensors")
    again = (tmp_path / "again.safetensors").read_bytes()
    assert again == (written / "fsdp2" / "param.safetensors").read_bytes()


@pytest.mark.parametrize("layout", TIED)
def test_tied_and_shared_weights_have_all_their_names(loaded: Path, layout: str) -> None:
    state: Tensors = torch.load(loaded / f"tied-{layout}.pt")
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    load_checkpoint(found, checkpoint_id=loaded / f"tied-{layout}.dcp")
    assert {"embed.weight", "head.weight", "first.bias", "second.bias", "norm.num_batches_tracked"} < found.keys()
    assert "cache" not in found
    assert_same(found, state)
    Tied().load_state_dict(found)


@pytest.mark.parametrize("layout", TIED)
def test_gradients_have_the_names_of_named_parameters(loaded: Path, layout: str) -> None:
    model = Model(open_run(loaded / f"tied-{layout}"), "grad")
    assert [entry.name for entry in model.entries] == [name for name, _ in Tied().named_parameters()]
