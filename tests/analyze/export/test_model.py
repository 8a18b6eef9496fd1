"""`recorder checkpoint`: which tensors make up a model, which are refused and why, files that torch and others load."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

import recorder
from recorder.analyze.export import model as model_module
from recorder.analyze.export.model import Model, write_model
from recorder.analyze.export.tensors import Entry, Span
from recorder.errors import CorruptError, LookupFailedError, UnsupportedError, WriteError
from recorder.globalview import assembler
from recorder.numerics.dtypes import ITEM_BYTES, numpy_dtype
from tests.rigs.command_line import Cli, cli
from tests.rigs.handmade import HandmadeWriter, Row, make_parts, make_row, make_run

__all__ = ["cli"]

DTYPES = [dtype for dtype in ITEM_BYTES if isinstance(getattr(torch, dtype, None), torch.dtype)]
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:ComplexHalf support:UserWarning"
)


def state_row(seq: int, name: str, values: npt.NDArray[Any], site: str = "param", **columns: Any) -> Row:
    path, _, own = name.rpartition(".")
    usual: dict[str, Any] = {"module_path": path, "site": site, "name": own, "phase": "optimizer", "micro_step": None}
    return make_row(seq, values, **usual | columns)


def module(path: str = "", *params: str, **more: Any) -> dict[str, Any]:
    return {
        "path": path,
        "class": "Net",
        "sites": ["param"],
        "aliases": [],
        "params": list(params),
        "buffers": [],
    } | more


def write(
    path: Path, *ranks: list[Row], modules: list[dict[str, Any]] | None = None, kind: str = "ddp"
) -> recorder.Run:
    run = make_run(path, world_size=len(ranks))
    facts = {"data_parallel": {"kind": kind, "ranks": list(range(len(ranks)))}} if len(ranks) > 1 else {}
    for rank, rows in enumerate(ranks):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([[row | {"rank": rank} for row in rows]])
        names = {row["root"]: modules or [] for rows in ranks for row in rows} or {"model": modules or []}
        roots = [{"name": name, "class": "Net", "modules": found, **facts} for name, found in names.items()]
        writer.finish(roots=roots, world_size=len(ranks))
    return recorder.open_run(run)


def load(path: Path) -> dict[str, torch.Tensor]:
    """By torch's own loader, or that of safetensors."""
    if path.is_dir():
        dcp_to_torch_save(path, path.with_suffix(".pt"))
        found: dict[str, torch.Tensor] = torch.load(path.with_suffix(".pt"))
        return found
    from safetensors.torch import load_file

    loaded: dict[str, torch.Tensor] = load_file(path)
    return loaded


def values(dtype: str, *shape: int) -> npt.NDArray[Any]:
    """Every bit pattern is a value; a flag has two."""
    data = np.random.default_rng(len(shape)).integers(0, 256, int(np.prod(shape)) * ITEM_BYTES[dtype], np.uint8)
    return (data % 2 if dtype == "bool" else data).view(numpy_dtype(dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_every_type_and_shape_is_loaded_bit_for_bit(tmp_path: Path, dtype: str, to: str) -> None:
    arrays = {f"a{len(shape)}.w{i}": values(dtype, *shape) for i, shape in enumerate([(), (0,), (3,), (2, 0), (3, 5)])}
    with np.errstate(all="ignore"):  # statistics of any bits
        rows = [state_row(i, name, array, dtype=dtype) for i, (name, array) in enumerate(arrays.items())]
    model = Model(write(tmp_path / "run", rows), "param")
    if to == "safetensors" and dtype in ("complex32", "complex128", "float4_e2m1fn_x2"):
        with pytest.raises(
            UnsupportedError, match=f"a0.w0 is of {dtype}, which safetensors cannot store; use --to dcp"
        ):
            write_model(model, tmp_path / "out", to)
        return
    assert write_model(model, tmp_path / "out", to) > 0
    if not loader_knows(to, getattr(torch, dtype)):
        return
    found = load(tmp_path / "out")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, tuple(found[name].shape)) == (getattr(torch, dtype), array.shape)
        assert found[name].reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()


def loader_knows(to: str, dtype: torch.dtype) -> bool:
    """Whether this version's loader does: torch 2.9 copies no 4-bit floats, which its loader does with each tensor."""
    if to == "safetensors":
        from safetensors import torch as loader

        return dtype in loader._TYPES.values()
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("dtype", ["float32", "bool", "bfloat16"])
def test_a_large_tensor_is_loaded_in_pieces(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "CHUNK_BYTES", 64)
    array = values(dtype, 5, 7, 3)
    run = write(tmp_path / "run", make_parts(0, array, 4, **columns_of("w"), dtype=dtype))
    write_model(Model(run, "param"), tmp_path / "out", "dcp")
    metadata = FileSystemReader(tmp_path / "out").read_metadata()
    assert len(metadata.state_dict_metadata["w"].chunks) > 1  # type: ignore[union-attr]
    assert load(tmp_path / "out")["w"].view(torch.uint8).numpy().tobytes() == array.tobytes()


def columns_of(name: str) -> dict[str, Any]:
    found = state_row(0, name, np.zeros(1))
    return {column: found[column] for column in ("module_path", "site", "name", "phase", "micro_step")}


@given(st.lists(st.integers(0, 6), max_size=4).map(tuple), st.integers(1, 40))
def test_boxes_are_the_tensor_in_its_order(shape: tuple[int, ...], max_numel: int) -> None:
    tensor = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    found = list(model_module.boxes(shape, max_numel))
    pieces = [tensor[tuple(map(slice, at, np.add(at, sizes)))] for at, sizes in found]
    assert np.concatenate([piece.reshape(-1) for piece in pieces]).tolist() == tensor.reshape(-1).tolist()
    assert all(piece.size <= max_numel for piece in pieces)
    assert len({at for at, _ in found}) == len(found)


class Torn:
    """Tensors whose bytes end too soon, or do not end."""

    def __init__(self, run: recorder.Run, error: Exception) -> None:
        self.model = Model(run, "param")
        self.error = error

    def spans(self, entry: Entry) -> Iterator[Span]:
        if entry is self.model.entries[-1]:
            raise self.error
        yield from Model.spans(self.model, entry)


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@pytest.mark.parametrize("error", [CorruptError("torn"), OSError(28, "no space"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(tmp_path: Path, to: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "run", [state_row(i, f"w{i}", np.ones(3)) for i in range(3)])
    torn = Torn(run, error)
    monkeypatch.setattr(torn.model, "spans", torn.spans)
    with pytest.raises(WriteError if isinstance(error, OSError) else type(error)):
        write_model(torn.model, tmp_path / "out", to)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_bytes_that_are_too_many_are_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "run", [state_row(0, "w", np.ones(3))])
    model = Model(run, "param")
    (entry,) = model.entries
    model.entries = [entry._replace(shape=(2,), payload_bytes=16)]
    for to in ("dcp", "safetensors"):
        with pytest.raises(CorruptError, match="w: 24 bytes are not a float64 tensor of"):
            write_model(model, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_kill_leaves_nothing_under_the_name(tmp_path: Path, to: str) -> None:
    write(tmp_path / "run", [state_row(i, f"w{i}", np.ones(3)) for i in range(3)])
    code = """
import os, signal, sys
from recorder.analyze.export import model
from recorder.run.run import open_run
found = model.Model(open_run("run"), "param")
spans, seen = found.spans, []
def torn(entry):
    seen.append(entry)
    if len(seen) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return spans(entry)
found.spans = torn
model.write_model(found, model.Path("out"), sys.argv[1])
"""
    done = subprocess.run([sys.executable, "-c", code, to], cwd=tmp_path, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    (left,) = (path for path in tmp_path.iterdir() if path.name != "run")
    assert left.name.startswith(".recorder-") and not (left / ".metadata").exists()


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_nothing_is_overwritten(tmp_path: Path, to: str) -> None:
    model = Model(write(tmp_path / "run", [state_row(0, "w", np.ones(3))]), "param")
    write_model(model, tmp_path / "out", to)
    with pytest.raises(WriteError, match=r"out: exists; choose another name$"):
        write_model(model, tmp_path / "out", to)
    with pytest.raises(WriteError, match="lies inside the run"):
        write_model(model, tmp_path / "run" / "out", to)
    with pytest.raises(WriteError, match="choose a folder that exists"):
        write_model(model, tmp_path / "nowhere" / "out", to)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WriteError, match="file: exists"):
        write_model(model, tmp_path / "file", to)
    (tmp_path / "empty").mkdir()
    if to == "dcp":
        write_model(model, tmp_path / "empty", to)
        assert load(tmp_path / "empty")["w"].tolist() == [1, 1, 1]


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(assembler, "PART_BYTES", 1 << 20)
    array = np.arange(2 << 20).reshape(1024, -1)
    writer = HandmadeWriter(make_run(tmp_path / "run"))
    for i in range(2):
        writer.add_shard([[row] for row in make_parts(16 * i, array, 16, **columns_of(f"w{i}"))])
    writer.finish()
    model = Model(recorder.open_run(tmp_path / "run"), "param")
    tracemalloc.start()
    try:
        write_model(model, tmp_path / "out", "dcp")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert model.total_bytes == 2 * array.nbytes
    assert peak < 6 << 20  # of 32; a part has one


def sharded(seq: int, name: str, whole: npt.NDArray[Any], rank: int, **columns: Any) -> Row:
    """A rank's half of a tensor, as FSDP2 has it."""
    half = len(whole) // 2
    layout = {
        "global_shape": json.dumps(list(whole.shape)),
        "offsets": json.dumps([rank * half, *[0] * (whole.ndim - 1)]),
        "placements": '[{"kind":"Shard","dim":0}]',
        "mesh": f'{{"shape":[2],"dim_names":["dp"],"coordinate":[{rank}]}}',
        "layout_source": "dtensor",
    }
    return state_row(seq, name, whole[rank * half :][:half], **layout | columns)


WHOLE = np.arange(12, dtype=np.float32).reshape(4, 3)


def broken_run(path: Path) -> recorder.Run:
    """One tensor is sound; of the others a piece is missing, replicas differ, values were not kept, or no row is."""
    ranks: list[list[Row]] = []
    for rank in (0, 1):
        rows = [sharded(0, "up.weight", WHOLE, rank), state_row(1, "differs", WHOLE + rank)]
        rows.append(sharded(2, "stats", WHOLE, rank, **({"encoding": None} if rank else {})))
        if rank == 0:
            rows.append(sharded(3, "half", WHOLE, rank))
        rows.append(state_row(4, "scaled._data", WHOLE))
        ranks.append(rows)
    modules = [module("", "differs", "stats", "half", "gone", "scaled"), module("up", "weight")]
    return write(path, *ranks, modules=modules, kind="fsdp2")


REFUSED = {
    "differs": "rank 1 differs from rank 0",
    "stats": "the values of some ranks were not recorded",
    "half": "no row of rank 1, which had a chunk of it",
    "gone": "it has no row at this step: no rule keeps it, it was dropped, or no optimizer has it",
    "scaled": "recorded as its parts scaled._data",
}


def test_what_cannot_be_given_is_named_and_nothing_is_written(cli: Cli, tmp_path: Path) -> None:
    run, out = broken_run(tmp_path / "run"), tmp_path / "out"
    found = cli("checkpoint", run.path, "--to", "dcp", "-o", out)
    assert found.exit_code == 1
    assert found.err.splitlines() == [f"finding: {name}: {why}" for name, why in REFUSED.items()]
    assert found.out == (
        f"{out}: not written: 5 of the parameters and buffers of 'model' at step 0 cannot be written; --partial "
        "writes the other 1 tensor\n"
    )
    assert not out.exists()


def test_the_rest_is_written_where_that_is_asked_for(cli: Cli, tmp_path: Path) -> None:
    run, out = broken_run(tmp_path / "run"), tmp_path / "out.safetensors"
    found = cli("checkpoint", run.path, "--to", "safetensors", "-o", out, "--partial", "--json")
    assert found.exit_code == 1
    assert {one["name"]: one["why"] for one in found.json["refused"]} == REFUSED
    assert (found.json["is_written"], found.json["tensors"]) == (True, 1)
    assert {name: value.tolist() for name, value in load(out).items()} == {"up.weight": WHOLE.tolist()}


def test_the_rest_of_a_checkpoint_is_loaded_by_a_planner_that_allows_it(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli("checkpoint", broken_run(tmp_path / "run").path, "--to", "dcp", "-o", out, "--partial").exit_code == 1
    state = {"up.weight": torch.zeros(WHOLE.shape), "gone": torch.zeros(3)}
    load_checkpoint(state, checkpoint_id=out, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert (state["up.weight"].tolist(), state["gone"].tolist()) == (WHOLE.tolist(), [0, 0, 0])


def staged(path: Path, *, name: str, num_stages: int) -> recorder.Run:
    """Stages on two ranks, the second of which calls its weight by that name."""
    run = make_run(path, world_size=2)
    for rank, own in enumerate(("0.w", name)):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([[state_row(0, own, WHOLE + rank, rank=rank)]])
        modules = [module(own.rpartition(".")[0], "w")]
        facts = {"pipeline": {"stage": rank, "num_stages": num_stages}}
        writer.finish(roots=[{"name": "model", "class": "Net", "modules": modules, **facts}], world_size=2)
    return recorder.open_run(run)


def test_stages_of_a_pipeline_are_one_model(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    found = cli("checkpoint", staged(tmp_path / "run", name="1.w", num_stages=2).path, "--to", "safetensors", "-o", out)
    assert found.exit_code == 0
    assert {name: value.tolist() for name, value in load(out).items()} == {
        "0.w": WHOLE.tolist(),
        "1.w": (WHOLE + 1).tolist(),
    }


@pytest.mark.parametrize(
    ("name", "num_stages", "said"),
    [
        ("0.w", 2, "finding: 0.w: stages 0, 1 of the pipeline each have one"),
        ("1.w", 3, "finding: stage 2: no rank of this pipeline stage left any file"),
    ],
)
def test_a_model_of_which_a_stage_is_missing_or_hidden_is_not_given(
    cli: Cli, tmp_path: Path, name: str, num_stages: int, said: str
) -> None:
    out = tmp_path / "out.safetensors"
    run = staged(tmp_path / "run", name=name, num_stages=num_stages)
    found = cli("checkpoint", run.path, "--to", "safetensors", "-o", out)
    assert (found.exit_code, found.err.splitlines(), out.exists()) == (1, [said], False)


def test_a_tie_that_came_apart_is_two_tensors(tmp_path: Path) -> None:
    modules = [module("", "a", "b", tied={"b": "a"})]
    run = write(tmp_path / "run", [state_row(0, "a", WHOLE), state_row(1, "b", WHOLE + 1)], modules=modules)
    write_model(Model(run, "param"), tmp_path / "out.safetensors", "safetensors")
    assert load(tmp_path / "out.safetensors")["b"].tolist() == (WHOLE + 1).tolist()


def test_a_sound_model_is_no_finding(cli: Cli, tmp_path: Path) -> None:
    run = write(tmp_path / "run", *([sharded(0, "w", WHOLE, rank)] for rank in (0, 1)), kind="fsdp2")
    out = tmp_path / "out.safetensors"
    found = cli("checkpoint", run.path, "--to", "safetensors", "-o", out)
    assert (found.exit_code, found.err) == (0, "")
    assert found.out.startswith(f"{out}: parameters and buffers of 'model' at step 0: 1 tensor, ")
    assert load(out)["w"].tolist() == WHOLE.tolist()


def test_a_replica_that_one_rank_recorded_is_whole_and_said(cli: Cli, tmp_path: Path) -> None:
    run = write(tmp_path / "run", [state_row(0, "w", WHOLE)], [])
    found = cli("checkpoint", run.path, "--to", "safetensors", "-o", tmp_path / "out.safetensors")
    assert found.exit_code == 0
    assert found.err == "note: 1 tensor recorded by ranks [0] alone, of [0,1]: whole, but not compared\n"


def test_buffers_that_differ_are_the_first_ranks(tmp_path: Path) -> None:
    rows = [[state_row(0, "w", WHOLE), state_row(1, "mean", WHOLE + rank, site="buffer")] for rank in (0, 1)]
    model = Model(write(tmp_path / "run", *rows, modules=[module("", "w", buffers=["mean"])]), "param")
    assert (model.refused, model.notes) == ([], ["mean: rank 1 differs from rank 0; the first rank's value is used"])
    write_model(model, tmp_path / "out.safetensors", "safetensors")
    assert load(tmp_path / "out.safetensors")["mean"].tolist() == WHOLE.tolist()


def test_names_are_those_of_the_state_dict(tmp_path: Path) -> None:
    names = ("embed.weight", "core.inner.weight", "late")
    rows = [state_row(i, name, WHOLE) for i, name in enumerate(names)]
    rows += [state_row(3, "core.seen", WHOLE, site="buffer"), state_row(4, "core.cache", WHOLE, site="buffer")]
    modules = [
        module("embed", "weight"),
        module("core", aliases=["again"], buffers=["seen", "cache"], non_persistent=["cache"]),
        module("core.inner", "weight", aliases=["core.other"]),
        module("head", "weight", tied={"weight": "embed.weight"}),
    ]
    model = Model(write(tmp_path / "run", rows, modules=modules), "param")
    inner = [f"{above}.{below}.weight" for above in ("core", "again") for below in ("inner", "other")]
    assert {entry.name for entry in model.entries} == {
        *("embed.weight", "head.weight", "core.seen", "again.seen", "late"), *inner
    }  # fmt: skip
    assert model.refused == []


def test_a_stranger_cannot_make_endless_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_MAX_NAMES", 1000)
    modules = [module("x", "w", aliases=[f"x.{i}" for i in range(40)])]
    with pytest.raises(UnsupportedError, match="more than 1000 names"):
        Model(write(tmp_path / "run", [state_row(0, "x.w", WHOLE)], modules=modules), "param")


def test_the_last_step_that_has_parameters_is_taken(tmp_path: Path) -> None:
    rows = [state_row(step, "w", WHOLE + step, step=step) for step in (1, 4)]
    rows.append(state_row(5, "w", WHOLE, step=6, encoding=None))
    rows.append(state_row(6, "w", WHOLE, "grad", step=5, scope="final"))
    run = write(tmp_path / "run", rows)
    assert [Model(run, what).step for what in ("param", "grad")] == [4, 5]
    assert Model(run, "param", step=1).step == 1
    with pytest.raises(LookupFailedError, match=r"step 6 of run has no parameter .* steps with some are 1, 4"):
        Model(run, "param", step=6)


def test_without_values_it_says_how_to_record_them(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [state_row(0, "w", WHOLE, encoding=None)])
    with pytest.raises(LookupFailedError, match=r"RECORDER_RULES='site=param,buffer keep=tensor steps=::100'"):
        Model(run, "param")


def test_of_several_gradients_of_a_step_the_last_one_is_taken(tmp_path: Path) -> None:
    rows = [state_row(i, "w", WHOLE + i, "grad", repeat=i, scope="final") for i in range(3)]
    model = Model(write(tmp_path / "run", rows), "grad")
    write_model(model, tmp_path / "out.safetensors", "safetensors")
    assert load(tmp_path / "out.safetensors")["w"].tolist() == (WHOLE + 2).tolist()


def test_where_the_last_step_is_cut_the_one_before_is_named(cli: Cli, tmp_path: Path) -> None:
    rows = [[sharded(2 * step, "w", WHOLE, rank, step=step) for step in (2, 5)] for rank in (0, 1)]
    rows[0] += [sharded(4, "v", WHOLE, 0, step=5)]
    run = write(tmp_path / "run", *rows, kind="fsdp2")
    found = cli("checkpoint", run.path, "--to", "safetensors", "-o", tmp_path / "out")
    assert found.exit_code == 1
    assert found.out.endswith("--partial writes the other 1 tensor, --step 2 takes the step before\n")
    assert cli("checkpoint", run.path, "--to", "safetensors", "-o", tmp_path / "out", "--step", 2).exit_code == 0


def test_gradients_that_the_optimizer_unscales_itself_are_noted(tmp_path: Path) -> None:
    row = state_row(0, "w", WHOLE, "grad", scope="final", note='{"grad":"scaled"}')
    model = Model(write(tmp_path / "run", [row]), "grad")
    assert model.notes == ["1 gradient still multiplied by the loss scale, as the optimizer got them"]


def test_gradients_are_those_that_there_are(tmp_path: Path) -> None:
    rows = [state_row(0, "w", WHOLE, "grad"), state_row(1, "embed.weight.values", WHOLE, "grad")]
    modules = [module("", "w", "frozen"), module("embed", "weight")]
    model = Model(write(tmp_path / "run", rows, modules=modules), "grad")
    assert [entry.name for entry in model.entries] == ["w"]
    assert model.refused == [("embed.weight", "recorded as its parts embed.weight.values")]


def test_gradients_that_a_kill_took_are_noted(tmp_path: Path) -> None:
    rows = [
        state_row(i, name, WHOLE, "grad", step=step) for i, (step, name) in enumerate(((0, "v"), (0, "w"), (1, "v")))
    ]
    run = write(tmp_path / "run", rows)
    assert Model(run, "grad").notes == ["1 parameter with a gradient at step 0 and none at step 1: w"]
    assert Model(run, "grad", step=0).notes == []


def test_of_several_models_one_is_named(tmp_path: Path) -> None:
    rows = [state_row(0, "w", WHOLE), state_row(1, "w", WHOLE + 1, root="critic")]
    run = write(tmp_path / "run", rows)
    with pytest.raises(LookupFailedError, match="has 2 models, and a file holds one: --root model or --root critic"):
        Model(run, "param")
    with pytest.raises(LookupFailedError, match="has no parameter of 'actor'; it has those of model, critic"):
        Model(run, "param", root="actor")
    model = Model(run, "param", root="critic")
    write_model(model, tmp_path / "out.safetensors", "safetensors")
    assert load(tmp_path / "out.safetensors")["w"].tolist() == (WHOLE + 1).tolist()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "onnx"], "format 'onnx': choose of dcp, safetensors"),
        (["--to", "dcp", "--what", "optim"], "'optim': choose of param, grad"),
        (["--to", "dcp", "--layout", "w"], "expected PATTERN=LAYOUT"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(cli: Cli, tmp_path: Path, options: list[str], said: str) -> None:
    run = write(tmp_path / "run", [state_row(0, "w", WHOLE)])
    found = cli("checkpoint", run.path, "-o", tmp_path / "out", *options)
    assert (found.exit_code, len(found.err.splitlines())) == (2, 1)
    assert said in found.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [["--jobs", "2"], ["--loss", "sum"], ["--scheduler", "tcp://127.0.0.1:1"]])
def test_options_of_a_merge_mean_nothing_to_a_checkpoint(cli: Cli, tmp_path: Path, options: list[str]) -> None:
    run = write(tmp_path / "run", [state_row(0, "w", WHOLE)])
    found = cli("checkpoint", run.path, "--to", "dcp", "-o", tmp_path / "out", *options)
    assert found.exit_code == 2 and f"No such option: {options[0]}" in found.err
    assert not (tmp_path / "out").exists()


def test_options_of_a_checkpoint_mean_nothing_to_a_merge(cli: Cli, tmp_path: Path) -> None:
    run = write(tmp_path / "run", [state_row(0, "w", WHOLE)])
    found = cli("merge", run.path, "-o", tmp_path / "out", "--step", "3", "--partial")
    assert found.exit_code == 2 and "No such option: --step" in found.err
    assert not (tmp_path / "out").exists()


def test_without_torch_safetensors_are_written_and_dcp_says_what_it_lacks(tmp_path: Path) -> None:
    write(tmp_path / "run", [state_row(0, "w", WHOLE)])
    code = """
import sys
class NoTorch:
    @staticmethod
    def find_spec(name, *_):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'")
sys.meta_path.insert(0, NoTorch)
from recorder.cli.app import run_command
run_command(sys.argv[1:])
"""
    for to, exit_code in (("safetensors", 0), ("dcp", 2)):
        typed = [sys.executable, "-c", code, "checkpoint", "run", "--to", to, "-o", f"out.{to}"]
        done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == exit_code, done.stderr
    assert "--to dcp needs torch, whose own classes are in such a checkpoint" in done.stderr
    assert "pip install torch, or use --to safetensors" in done.stderr
    assert len(done.stderr.splitlines()) == 1
