"""What TensorBoard and Weights & Biases are given is what was recorded; their own programs read it."""

from __future__ import annotations

import builtins
import json
import re
import struct
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recorder
from recorder.analyze.export.boards import MAX_RANKS, BoardExport, is_picture, picture_of
from recorder.capture.staging.measure import measure
from recorder.errors import LookupFailedError, UnsupportedError, WriteError, install_line
from recorder.records import KEEP_HISTOGRAM, KEEP_STATS
from recorder.run.selection import GlobalOptions, Selection
from tests.rigs.command_line import Cli, cli
from tests.rigs.handmade import Row, make_row

from .test_export import write

__all__ = ["cli"]

HOSTILE = "a/../<b>\x00"
SPREAD = np.array([[0.0, 1.0, 1.5], [-3.0, 0.25, np.inf]], np.float32)


def counted(seq: int, array: Any, **columns: Any) -> Row:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    found = measure(data, "float32", array.shape, None, KEEP_STATS | KEEP_HISTOGRAM)
    return make_row(seq, array, histogram=found.histogram, **columns)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> recorder.Run:
    """Two ranks, two steps: an output with a histogram, a picture, a loss, and a module with a hostile name."""
    ranks: list[list[Row]] = [[], []]
    for step in range(2):
        for rank, rows in enumerate(ranks):
            common: dict[str, Any] = {"step": step, "rank": rank}
            loss = np.array(10 * rank + step, np.float32)
            state: dict[str, Any] = {"module_path": "", "site": "scalar", "name": "loss", **common}
            rows.append(counted(len(rows), SPREAD + step, module_path="up", encoding=None, **common))
            rows.append(
                make_row(len(rows), np.arange(64.0, dtype=np.float32).reshape(1, 4, 4, 4), module_path="conv", **common)
            )
            rows.append(make_row(len(rows), loss, **state))
            rows.append(make_row(len(rows), SPREAD, module_path=HOSTILE, encoding=None, **common))
    return write(tmp_path_factory.mktemp("boards") / "run", *ranks)


def export(run: recorder.Run, path: Path, to: str, rank: int | None = None, **options: Any) -> Any:
    return BoardExport(run, to, Selection(rank=rank), GlobalOptions(**options)).write(path)


def ask(url: str, page: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{url}data/plugin/{page}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
        return json.loads(answer.read())


@pytest.mark.filterwarnings("ignore")
def test_a_real_tensorboard_shows_scalars_histograms_and_pictures(run: recorder.Run, tmp_path: Path) -> None:
    from tensorboard import program

    done = export(run, tmp_path / "board", "tensorboard")
    assert done.is_whole and done.num_rows == 2 * 2 * (6 + 5 + 1 + 5)
    board = program.TensorBoard()
    board.configure(argv=[None, "--logdir", str(tmp_path / "board"), "--port", "0", "--load_fast", "false"])
    url = board.launch()
    names = [f"{run.name}/rank={rank:05}" for rank in (0, 1)]
    for _ in range(200):
        tags = ask(url, "scalars/tags")
        if all("scalar/loss" in tags.get(name, {}) for name in names):
            break
    assert {"output/up/mean", "output/up/absmax", "output/up/inf_count", "scalar/loss"} <= tags[names[1]].keys()
    losses = ask(url, "scalars/scalars", run=names[1], tag="scalar/loss")
    assert [(step, value) for _, step, value in losses] == [(0, 10.0), (1, 11.0)]
    (first, _) = ask(url, "histograms/histograms", run=names[0], tag="output/up/histogram")
    buckets = [bucket for bucket in first[2] if bucket[2]]
    assert [one for one in buckets if one[:2] != [-0.25, 0.25]][:3] == [
        [-4.0, -2.0, 1.0],
        [0.25, 0.5, 1.0],
        [1.0, 2.0, 2.0],
    ]
    pictures = ask(url, "images/images", run=names[0], tag="output/conv", sample="0")
    assert [one["step"] for one in pictures] == [0, 1]
    with urllib.request.urlopen(
        f"{url}data/plugin/images/individualImage?{pictures[0]['query']}", timeout=60
    ) as answer:
        assert struct.unpack(">II", answer.read()[16:24]) == (9, 9), "four tiles of 4 x 4, and lines between"


def test_the_whole_model_is_one_run(run: recorder.Run, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    export(run, tmp_path / "board", "tensorboard", across_ranks=True)
    (folder,) = {file.parent for file in (tmp_path / "board").rglob("events*")}
    found = EventAccumulator(str(folder))
    found.Reload()
    assert folder.name == run.name
    assert [one.value for one in found.Scalars("output/up/absmax")] == [3.0, 2.5]
    assert not any("/../" in tag or "\x00" in tag for tag in found.Tags()["scalars"])


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a file of W&B, which is a log of LevelDB behind seven bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.filterwarnings("ignore")
def test_wandb_reads_its_offline_run(run: recorder.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    export(run, tmp_path / "board", "wandb", rank=1)
    (file,) = (tmp_path / "board").rglob("*.wandb")
    rows: list[dict[str, Any]] = []
    for data in records_of(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            names = [one.key or "|".join(one.nested_key) for one in record.history.item]
            texts = [one.value_json for one in record.history.item]
            rows.append(dict(zip(names, map(json.loads, texts), strict=True)))
    assert [(row["_step"], row["scalar/loss"]) for row in rows] == [(0, 10.0), (1, 11.0)]
    bins, counts = (rows[0][f"output/up/histogram|{name}"] for name in ("bins", "values"))
    assert (bins[0], bins[-1], sum(counts)) == (-4.0, 4.0, 5)
    picture = file.parent / "files" / rows[0]["output/conv|path"]
    assert picture.read_bytes()[16:24] == struct.pack(">II", 9, 9)
    assert not any(one.is_symlink() for one in file.parent.parent.iterdir())


@pytest.mark.parametrize("to", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_the_line_to_type(
    run: recorder.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        level = kwargs.get("level", args[3] if len(args) > 3 else 0)
        if name.partition(".")[0] == to and not level:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnsupportedError, match=re.escape(install_line(to))):
        export(run, tmp_path / "board", to)
    assert not (tmp_path / "board").exists()


def test_what_cannot_be_is_refused_and_nothing_is_left(run: recorder.Run, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(WriteError, match="exists"):
        export(run, tmp_path / "taken", "tensorboard")
    with pytest.raises(LookupFailedError, match="leave it out"):
        BoardExport(run, "tensorboard", Selection(), GlobalOptions(), payload=True)
    with pytest.raises(LookupFailedError, match="--force"):
        BoardExport(run, "tensorboard", Selection(), GlobalOptions()).write(tmp_path / "new", force=True)
    assert cli("export", run.path, "-o", tmp_path / "new", "--to", "tensorboard", "--module", "nothing").exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]


def test_very_many_ranks_are_to_be_chosen_from(tmp_path: Path) -> None:
    many = write(tmp_path / "run", *([make_row(0, SPREAD, rank=rank)] for rank in range(MAX_RANKS + 1)))
    with pytest.raises(LookupFailedError, match="choose some with --rank, or --global"):
        export(many, tmp_path / "board", "tensorboard")


def test_pictures_are_filters_and_channels() -> None:
    assert (
        is_picture("output", (2, 3, 8, 8)) and not is_picture("output", (2, 8)) and not is_picture("grad", (2, 3, 8, 8))
    )
    colours = np.zeros((2, 3, 4, 4), np.float32)
    colours[0, 1] = np.nan
    colours[1, 0] = 5
    made = picture_of("param", colours)
    assert made is not None and made.shape == (4, 9, 3)
    assert made[0, 5].tolist() == [255, 0, 0] and made[0, 0].tolist() == [0, 0, 0] and made[0, 4].tolist() == [128] * 3
    assert picture_of("output", np.full((1, 1, 4, 4), np.nan, np.float32)) is None
