"""`export`: what other programs read is what was recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest

import recorder
from recorder.analyze.export import tensors
from recorder.analyze.export.export import export
from recorder.analyze.export.tensors import tensor_name
from recorder.columns import METADATA_COLUMNS
from recorder.errors import CorruptError, LookupFailedError, WriteError
from recorder.merge.merge import merge_run
from recorder.numerics.dtypes import ITEM_BYTES, numpy_dtype
from tests.rigs.handmade import HandmadeWriter, Row, make_parts, make_ref, make_row, make_run

DTYPES = [dtype for dtype in ITEM_BYTES if dtype != "complex32"]
DDP = {"kind": "ddp", "ranks": [0, 1]}


def write(path: Path, *ranks: list[Row], **changes: Any) -> recorder.Run:
    run = make_run(path, world_size=len(ranks))
    for rank, rows in enumerate(ranks):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([rows])
        roots: list[Any] = [{"name": "model", "modules": [], "data_parallel": DDP if len(ranks) == 2 else None}]
        writer.finish(roots=roots, world_size=len(ranks), **changes)
    return recorder.open_run(run)


def values(dtype: str, *shape: int) -> npt.NDArray[Any]:
    count = int(np.prod(shape))
    kind = numpy_dtype(dtype)
    if dtype == "bool":
        return (np.arange(count) % 2).astype(kind).reshape(shape)
    return (np.arange(count) % 5 + 1).astype(kind).reshape(shape)


@pytest.fixture
def run(tmp_path: Path) -> recorder.Run:
    """Two ranks, two steps: an input, an output of the batch, a replicated parameter, a gradient without values."""
    ranks: list[list[Row]] = [[], []]
    for step in range(2):
        for rank, rows in enumerate(ranks):
            common: dict[str, Any] = {"step": step, "rank": rank}
            x = np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * step + 100 * rank
            rows.append(make_row(len(rows), x, module_path="", site="input", name="x", encoding="compressed", **common))
            rows.append(make_row(len(rows), x * 2, module_path="up", **common))
            state: dict[str, Any] = {"phase": "optimizer", "micro_step": None, "module_path": "up", "name": "weight"}
            rows.append(make_row(len(rows), np.full(4, step, np.float64), site="param", **state, **common))
            rows.append(make_row(len(rows), np.ones(4), site="grad", scope="final", encoding=None, **state, **common))
    return write(tmp_path / "run", *ranks)


VALUES = ("(root)/input/x", "up/output", "up/param/weight")
GLOBAL_NAMES = [f"step={step}/{name}" for step in (0, 1) for name in VALUES]
NAMES = [f"{name}/rank={rank}" for name in GLOBAL_NAMES for rank in (0, 1)]


def load(path: Path) -> dict[str, npt.NDArray[Any]]:
    """By the formats' own libraries."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as found:
            return {name: found[name] for name in found.files if name != "index.json"}
    from safetensors.numpy import load_file

    loaded: dict[str, npt.NDArray[Any]] = load_file(path)
    return loaded


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_tensors_of_every_rank_under_their_names(run: recorder.Run, tmp_path: Path, suffix: str) -> None:
    done = export(run, tmp_path / f"out{suffix}")
    found = load(done.path)
    assert sorted(found) == sorted(NAMES)
    assert (done.num_rows, done.num_bytes) == (12, done.path.stat().st_size)
    for rank in (0, 1):
        expected = run.array("up", step=1, rank=rank)
        np.testing.assert_array_equal(found[f"step=1/up/output/rank={rank}"], expected)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_the_global_tensors(run: recorder.Run, tmp_path: Path, suffix: str) -> None:
    found = load(export(run, tmp_path / f"out{suffix}", across_ranks=True).path)
    assert sorted(found) == sorted(GLOBAL_NAMES)
    np.testing.assert_array_equal(found["step=1/up/output"], run.array("up", step=1))
    assert found["step=0/up/output"].shape == (4, 3)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_selection(run: recorder.Run, tmp_path: Path, suffix: str) -> None:
    found = load(export(run, tmp_path / f"out{suffix}", "u*", site="output,param", step="1", rank=0).path)
    assert sorted(found) == ["step=1/up/output/rank=0", "step=1/up/param/weight/rank=0"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_in_safetensors(tmp_path: Path, dtype: str) -> None:
    array = values(dtype, 2, 3)
    source = write(tmp_path / "run", [make_row(0, np.zeros(3, np.int16), name="a"), make_row(1, array, dtype=dtype)])
    path = export(source, tmp_path / "out.safetensors").path
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    entry = header["step=0/layers.0/output/rank=0"]
    begin, end = (8 + int.from_bytes(raw[:8], "little") + offset for offset in entry["data_offsets"])
    assert raw[begin:end] == array.tobytes()
    assert begin % ITEM_BYTES[dtype] == 0


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float64", "bool", "complex64"]
)
def test_torch_reads_its_own_types_from_safetensors(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    source = write(tmp_path / "run", [make_row(0, values(dtype, 2, 3), dtype=dtype)])
    (found,) = load_file(export(source, tmp_path / "out.safetensors").path).values()
    assert found.dtype == getattr(torch, dtype)
    assert torch.equal(found.view(torch.uint8), source.tensor("layers.0").view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_in_npz(tmp_path: Path, dtype: str) -> None:
    array = values(dtype, 2, 3)
    path = export(write(tmp_path / "run", [make_row(0, array, dtype=dtype)]), tmp_path / "out.npz").path
    (found,) = load(path).values()
    is_widened = dtype.startswith("float8") or dtype == "bfloat16"
    assert found.dtype == (np.float32 if is_widened else numpy_dtype(dtype))
    np.testing.assert_array_equal(found, array.astype(found.dtype))
    with ZipFile(path) as archive:
        (entry,) = json.loads(archive.read("index.json"))
    assert (entry["tensor"], entry["dtype"], entry["step"]) == ("step=0/layers.0/output/rank=0", dtype, 0)


def test_half_complex_numbers(tmp_path: Path) -> None:
    array = np.array([(1, 2), (3, 4)], numpy_dtype("complex32"))
    source = write(tmp_path / "run", [make_row(0, array, dtype="complex32")])
    (found,) = load(export(source, tmp_path / "out.safetensors").path).values()
    np.testing.assert_array_equal(found, [[1, 2], [3, 4]])
    (found,) = load(export(source, tmp_path / "out.npz").path).values()
    assert found["imag"].tolist() == [2, 4]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_parts_references_scalars_and_empty_tensors(tmp_path: Path, suffix: str) -> None:
    large = np.arange(12, dtype=np.float32).reshape(3, 4)
    rows = make_parts(0, large, 3, name="parts")
    rows.append(make_row(3, np.array([7.0]), name="plain"))
    rows += [make_ref(4, rows[3], name="ref"), make_row(5, np.float64(3), name="scalar")]
    rows.append(make_row(6, np.zeros((0, 5), np.int32), name="empty"))
    found = load(export(write(tmp_path / "run", rows), tmp_path / f"out{suffix}").path)
    assert {name.split("/")[3]: array.shape for name, array in found.items()} == {
        "parts": (3, 4),
        "plain": (1,),
        "ref": (1,),
        "scalar": (),
        "empty": (0, 5),
    }
    np.testing.assert_array_equal(found["step=0/layers.0/output/parts/rank=0"], large)
    assert found["step=0/layers.0/output/ref/rank=0"] == 7


HOSTILE = [
    "../../etc/x",
    "..",
    ".",
    "a/b",
    "a\\b",
    "/abs",
    "x=1",
    "call=1",
    "\x00\n\x1b[2J",
    "ü\u202e",
    "n" * 5000,
    "(root)",
    "",
]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_names_of_strangers_never_become_paths(tmp_path: Path, suffix: str) -> None:
    rows = [make_row(2 * i, [float(i)], module_path=text) for i, text in enumerate(HOSTILE)]
    rows += [make_row(2 * i + 1, [float(i)], name=text, module_path="m") for i, text in enumerate(HOSTILE[:-1])]
    found = load(export(write(tmp_path / "run", rows), tmp_path / f"out{suffix}").path)
    assert len(found) == len(rows)
    for name in found:
        pieces = name.split("/")
        assert pieces[0] == "step=0" and pieces[-1] == "rank=0" and 4 <= len(pieces) <= 5
        assert not {"", ".", ".."} & set(pieces) and name.isascii() and name.isprintable() and "\\" not in name


def test_a_name_depends_on_the_row_alone_and_tells_every_key_apart() -> None:
    usual = {
        "step": 3,
        "module_path": "mlp",
        "site": "grad",
        "name": "weight",
        "micro_step": None,
        "call": 0,
        "repeat": 0,
    }
    usual |= {"mode": "train", "phase": "optimizer", "root": "model", "scope": "final", "rank": None}
    changes: list[dict[str, Any]] = [{}, {"rank": 0}, {"call": 1}, {"repeat": 1}, {"micro_step": 2}, {"mode": "eval"}]
    changes += [{"phase": "forward"}, {"root": "net"}, {"scope": "local"}, {"name": ""}, {"site": "param"}, {"step": 4}]
    names = [tensor_name(usual | change) for change in changes]
    assert len(set(names)) == len(names)
    assert names[:2] == ["step=3/mlp/grad/weight", "step=3/mlp/grad/weight/rank=0"]


def test_parquet_has_the_rows_as_they_are(run: recorder.Run, tmp_path: Path) -> None:
    done = export(run, tmp_path / "out.parquet")
    found = pq.read_table(done.path)
    assert found.column_names == list(METADATA_COLUMNS) and done.num_rows == 16
    assert found.to_pylist() == run.table().to_pylist()
    grads = pq.read_table(export(run, tmp_path / "grads.parquet", site="grad", rank="1").path)
    assert set(zip(grads.column("site").to_pylist(), grads.column("rank").to_pylist(), strict=True)) == {("grad", 1)}


def test_parquet_of_the_global_view(run: recorder.Run, tmp_path: Path) -> None:
    found = pq.read_table(export(run, tmp_path / "out.parquet", across_ranks=True).path)
    assert found.num_rows == 8 and found.column("rank").null_count == 8
    assert found.to_pylist() == run.view().rows().table.to_pylist()


def test_parquet_with_values_can_be_decoded(run: recorder.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorder.analyze.export.tensors.BATCH_BYTES", 60)
    path = export(run, tmp_path / "out.parquet", payload=True).path
    assert pq.ParquetFile(path).num_row_groups > 3
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == 16
    for row in rows:
        if row["site"] == "grad":
            assert row["data"] is row["encoding"] is row["payload_bytes"] is None
        else:
            question = {name: row[name] for name in ("site", "step", "name", "rank")}
            np.testing.assert_array_equal(recorder.decode(row), run.array(row["module_path"], **question))


NOTE = "partial: 1 of 2 values lack rank 1, step 1: they are of the other ranks alone"
LEFT_OUT = "partial: 1 of 2 values lack rank 1, step 1: they are left out; --partial takes what there is"


@pytest.fixture
def partial(tmp_path: Path) -> recorder.Run:
    """Of its second step, one rank is missing."""
    x = np.ones((2, 3), np.float32)
    rows = [[make_row(step, x, step=step, rank=rank, module_path="up") for step in range(2 - rank)] for rank in (0, 1)]
    return write(tmp_path / "run", *rows)


@pytest.mark.parametrize("payload", [False, True])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".parquet"])
def test_missing_ranks_are_told(partial: recorder.Run, tmp_path: Path, suffix: str, payload: bool) -> None:
    if payload and suffix != ".parquet":
        return
    path = tmp_path / f"out{suffix}"
    whole = [
        export(partial, path, across_ranks=True, payload=payload, step=0, force=True),
        export(partial, path, payload=payload, force=True),
    ]
    assert [(done.notes, done.is_whole) for done in whole] == [([], True)] * 2
    merge_run(partial, tmp_path / "merged")
    merged = recorder.open_run(tmp_path / "merged")
    for source, across_ranks in ((partial, True), (merged, False), (merged, True)):
        options: dict[str, Any] = {"across_ranks": across_ranks, "payload": payload, "force": True}
        left_out, taken = export(source, path, **options), export(source, path, **options, partial=True)
        assert (left_out.notes, left_out.is_whole) == ([LEFT_OUT], False)
        assert (taken.notes, taken.is_whole) == ([NOTE], False)
        assert taken.num_rows == 2
        assert left_out.num_rows == (2 if suffix == ".parquet" else 1)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_tensor_that_lacks_ranks_is_refused_as_array_refuses_it(
    partial: recorder.Run, tmp_path: Path, suffix: str
) -> None:
    with pytest.raises(LookupFailedError):
        partial.array("up", step=1)
    with pytest.raises(LookupFailedError, match="--partial takes what there is"):
        export(partial, tmp_path / f"out{suffix}", across_ranks=True, step=1)
    assert export(partial, tmp_path / f"out{suffix}", across_ranks=True, step=1, partial=True).num_rows == 1


@pytest.mark.parametrize("payload", [False, True])
def test_in_parquet_a_value_that_lacks_ranks_has_no_numbers_and_no_bytes(
    partial: recorder.Run, tmp_path: Path, payload: bool
) -> None:
    done = export(partial, tmp_path / "out.parquet", across_ranks=True, payload=payload)
    whole, lacking = pq.read_table(done.path).to_pylist()
    assert whole["mean"] is not None and lacking["mean"] is None and lacking["fingerprint"] is None
    if payload:
        assert whole["data"] is not None and lacking["data"] is None


def test_each_tensor_says_what_it_was_made_of(partial: recorder.Run, tmp_path: Path) -> None:
    notes = [json.loads(note) for note in partial.view().rows().table.column("note").to_pylist()]
    assert [note.get("partial") for note in notes] == [None, [1]]
    where = {"ranks_expected": [0, 1], "layout_source": "assumed"}
    expected = [
        where | {"ranks_present": present, "note": note} for present, note in zip(([0, 1], [0]), notes, strict=True)
    ]
    with ZipFile(export(partial, tmp_path / "out.npz", across_ranks=True, partial=True).path) as archive:
        index = json.loads(archive.read("index.json"))
    assert [{name: entry[name] for name in expected[0]} for entry in index] == expected
    assert [entry["scale"] for entry in index] == [None, None]
    data = export(partial, tmp_path / "out.safetensors", across_ranks=True, partial=True).path.read_bytes()
    told = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert [json.loads(told[f"origin of step={step}/up/output"]) for step in (0, 1)] == expected
    rows = pq.read_table(export(partial, tmp_path / "out.parquet", across_ranks=True, partial=True).path).to_pylist()
    assert [json.loads(row["ranks_present"]) for row in rows] == [[0, 1], [0]]


def test_a_stranger_s_note_is_told_as_it_is(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [make_row(0, [1.0], note="{not JSON", ranks_present="[")])
    with ZipFile(export(run, tmp_path / "out.npz").path) as archive:
        (entry,) = json.loads(archive.read("index.json"))
    assert (entry["note"], entry["ranks_present"]) == ("{not JSON", "[")


def test_a_large_tensor_has_several_rows_in_parquet(tmp_path: Path) -> None:
    large = np.arange(12, dtype=np.float32)
    source = write(tmp_path / "run", make_parts(0, large, 3))
    rows = pq.read_table(export(source, tmp_path / "out.parquet", payload=True).path).to_pylist()
    assert [(row["part"], row["flat_offset"], row["mean"] is None) for row in rows] == [
        (0, 0, False),
        (1, 4, True),
        (2, 8, True),
    ]
    assert b"".join(row["data"] for row in rows) == large.tobytes()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".parquet"])
def test_windows_make_the_same_file(
    run: recorder.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    payload = suffix == ".parquet"
    whole = export(run, tmp_path / f"whole{suffix}", across_ranks=True, payload=payload).path
    monkeypatch.setattr("recorder.run.step_ranges.MAX_ROWS", 1)
    cut = export(run, tmp_path / f"cut{suffix}", across_ranks=True, payload=payload).path
    if payload:
        assert pq.read_table(whole) == pq.read_table(cut)
    else:
        assert whole.read_bytes() == cut.read_bytes()


@pytest.mark.parametrize("to", ["npz", "safetensors", "parquet"])
def test_an_existing_file_is_replaced_only_by_force(run: recorder.Run, tmp_path: Path, to: str) -> None:
    path = tmp_path / "out"
    path.write_text("mine")
    with pytest.raises(WriteError, match="exists"):
        export(run, path, to=to)
    assert path.read_text() == "mine"
    export(run, path, to=to, force=True)
    assert path.read_bytes()[:4] != b"mine"
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def test_a_device_or_a_pipe_is_never_replaced(run: recorder.Run, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(WriteError, match="never replaced"):
        export(run, path, to="npz", force=True)
    assert path.is_fifo() and sorted(os.listdir(tmp_path)) == ["pipe", "run"]


@pytest.mark.parametrize("folder", ["run", "run/rank=00000", "other", "link"])
def test_a_run_is_never_written_into(run: recorder.Run, tmp_path: Path, folder: str) -> None:
    make_run(tmp_path / "other")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    before = sorted(os.listdir(tmp_path / folder))
    with pytest.raises(WriteError, match="lies inside the run"):
        export(run, tmp_path / folder / "out.npz", force=True)
    assert sorted(os.listdir(tmp_path / folder)) == before


def test_what_comes_while_it_is_written_is_kept(
    run: recorder.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.npz"
    real = tensors.row_spans

    def meanwhile(*args: Any) -> Any:
        path.write_text("theirs")
        return real(*args)

    monkeypatch.setattr(tensors, "row_spans", meanwhile)
    with pytest.raises(WriteError, match="exists now"):
        export(run, path)
    assert path.read_text() == "theirs" and sorted(os.listdir(tmp_path)) == ["out.npz", "run"]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".parquet"])
def test_a_value_that_cannot_be_read_is_left_out_and_named(tmp_path: Path, suffix: str) -> None:
    rows = [make_row(0, [1.0]), make_row(1, [2.0], name="x") | {"data": b"short"}]
    done = export(write(tmp_path / "run", rows), tmp_path / f"out{suffix}", payload=suffix == ".parquet")
    assert not done.is_whole
    (problem,) = done.problems
    assert "output/x/rank=0, which cannot be read: plain payload of 5 bytes" in problem
    if suffix == ".parquet":
        found = pq.read_table(done.path).to_pylist()
        assert [row["data"] is not None for row in found] == [True, False]
        assert [row["mean"] for row in found] == [row["mean"] for row in rows]
    else:
        assert done.num_rows == 1


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_where_nothing_can_be_read_there_is_no_file(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(CorruptError):
        export(write(tmp_path / "run", [make_row(0, [1.0]) | {"data": b"short"}]), tmp_path / f"out{suffix}")
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": "upp"}, "module_path='upp'; nearest is 'up'"),
        ({"site": "grad"}, "none of the 4 selected rows has values, only statistics: export them with --to parquet"),
        ({"to": "csv"}, "format 'csv': choose of parquet, npz, safetensors"),
        ({"rank": 0, "across_ranks": True}, "the global view has no ranks"),
        ({"payload": True}, "payload is for parquet"),
        ({"step": 9, "to": "parquet"}, "step=9; there are steps 0 to 1"),
        ({"step": 9, "to": "parquet", "payload": True}, "step=9; there are steps 0 to 1"),
    ],
)
def test_what_cannot_be_exported_says_why(
    run: recorder.Run, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(LookupFailedError, match=message):
        export(run, tmp_path / "out.npz", **arguments)
    assert os.listdir(tmp_path) == ["run"]


def test_a_file_that_cannot_be_made_says_so(run: recorder.Run, tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="cannot be written"):
        export(run, tmp_path / "none" / "out.npz")
    with pytest.raises(LookupFailedError, match="does not say which format"):
        export(run, tmp_path / "out")


_HALFWAY = """
import sys, time
from pathlib import Path
from recorder.analyze.export.export import Export
from recorder.run.selection import GlobalOptions, Selection
from recorder.run.run import open_run

def halfway(done):
    print("halfway", flush=True)
    time.sleep(120)

run, out = open_run(sys.argv[1]), sys.argv[2]
Export(run, "npz", Selection(), GlobalOptions()).write(Path(out), report=halfway)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_halfway_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    run = make_run(tmp_path / "run", world_size=1)
    writer = HandmadeWriter(run, 0)
    writer.add_shard([[make_row(0, [1.0, 2.0])]])
    writer.finish()
    words = [sys.executable, "-c", _HALFWAY, str(run), str(tmp_path / "out")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "halfway\n"
            assert any(name.startswith(".recorder-") for name in os.listdir(tmp_path))
            child.send_signal(number)
            ended = child.wait(timeout=60)
        finally:
            child.kill()
    assert ended == (143 if number == signal.SIGTERM else -signal.SIGINT)
    assert os.listdir(tmp_path) == ["run"]
