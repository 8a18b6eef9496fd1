"""Bombs and forged lengths: one clear line, and no more memory than is in proportion to the bytes on disk."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
import zstandard

from recorder.records import PART_BYTES
from tests.campaigns.fuzz import bases, battery
from tests.campaigns.fuzz.child import contain, reaching
from tests.campaigns.fuzz.recipe import write_manifest
from tests.rigs.handmade import HandmadeWriter, Row, make_row, make_run

_MIB = 1 << 20
_SLACK_BYTES = 120 * _MIB
"""What readers take for a run of any size: batches of payload, a merge's page memory."""


class Bomb(NamedTuple):
    """A run that wants more than it has."""

    build: Callable[[Path], None]
    ratio: int = 40
    """Bytes of memory for each on disk that are in proportion: JSON's lists take 30."""
    slack_bytes: int = _SLACK_BYTES
    has_arrays: bool = True
    """Whether whole tensors are asked for."""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A sound run to compare with; and what forked children should not have to import."""
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    path, out = tmp_path_factory.mktemp("other") / "run", tmp_path_factory.mktemp("out")
    bases.make_handmade(path)
    assert _some(path, path, out, Bomb(bases.make_handmade)) == []
    yield path


def _with_rows(*rows: Row) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        writer = HandmadeWriter(make_run(path))
        writer.add_shard([list(rows)])
        writer.finish()

    return build


def _frame(declared_bytes: int, num_blocks: int) -> bytes:
    """A zstd frame of zeros by runs: 4 bytes for each 128 KiB. It declares what it likes."""
    blocks = [(131072 << 3 | 1 << 1 | (n == num_blocks - 1)).to_bytes(3, "little") + b"\0" for n in range(num_blocks)]
    return struct.pack("<IBQ", 0xFD2FB528, 0xE4, declared_bytes) + b"".join(blocks) + bytes(4)


def _raw(seq: int, data: bytes, payload_bytes: int, **more: Any) -> Row:
    return make_row(seq, [1.0]) | {"encoding": "raw", "data": data, "payload_bytes": payload_bytes} | more


def _zeros(num_bytes: int) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(bytes(num_bytes))


def _parts(payload: bytes, encoding: str) -> list[Row]:
    """A tensor of 6 GiB of which each part has next to nothing."""
    items = PART_BYTES // 4
    shape = json.dumps([200 * items])
    claims = {"encoding": encoding, "data": payload, "payload_bytes": PART_BYTES, "dtype": "float32", "shape": shape}
    return [
        make_row(n, np.zeros(1, np.float32)) | claims | {"part": n, "flat_offset": n * items, "numel": 200 * items}
        for n in range(200)
    ]


def _many_ranks(path: Path, rows_of: Callable[[int], list[Row]]) -> None:
    make_run(path, world_size=2)
    for rank in (0, 1):
        writer = HandmadeWriter(path, rank)
        writer.add_shard([rows_of(rank)])
        writer.finish()


def _forged_placements(path: Path) -> None:
    """Pieces of a tensor of 2^47 elements, which payloads of a few bytes say that they are."""
    mesh = '{"shape":[2],"coordinate":[%d]}'

    def rows_of(rank: int) -> list[Row]:
        half = 1 << 46
        shape = f"[{half}]"
        forged = {"rank": rank, "shape": shape, "numel": half, "global_shape": f"[{2 * half}]", "mesh": mesh % rank}
        forged |= {"payload_bytes": 4 * half, "site": "param", "phase": "optimizer"}
        shard = {"name": "shard", "offsets": f"[{rank * half}]", "placements": '[{"kind":"Shard","dim":0}]'}
        flat = {"name": "flat", "placements": json.dumps([{"kind": "FlatShard", "offset": rank * half}])}
        summed = {"name": "sum", "placements": '[{"kind":"Partial","reduce_op":"sum"}]', "global_shape": shape}
        rows = [make_row(n, np.zeros(2, np.float32)) | forged | own for n, own in enumerate((shard, flat, summed))]
        batch = {"shape": f"[{half}]", "numel": half, "payload_bytes": 4 * half, "rank": rank}
        return [*rows, make_row(9, np.zeros(2, np.float32)) | batch]

    _many_ranks(path, rows_of)


def _forged_strides(path: Path) -> None:
    """Placements that cut three dims into thousands of stripes, and combine these."""
    strided = [{"kind": "StridedShard", "dim": dim, "split_factor": 4096} for dim in range(3)]
    one = [{"kind": "StridedShard", "dim": 0, "split_factor": 4096}]

    def rows_of(rank: int) -> list[Row]:
        own = {"rank": rank, "site": "param", "phase": "optimizer", "encoding": None, "data": None}
        own |= {"payload_bytes": None, "shape": "[4096,4096,4096]", "global_shape": "[8192,8192,8192]"}
        rows = []
        for n, placements in enumerate((strided, one, one * 12)):
            mesh = {"shape": [2] * len(placements), "coordinate": [rank] * len(placements)}
            rows.append(
                make_row(n) | own | {"name": str(n), "placements": json.dumps(placements), "mesh": json.dumps(mesh)}
            )
        return rows

    _many_ranks(path, rows_of)


def _compressed_columns(path: Path) -> None:
    """Statistics with a long text in each row, always the same: 40 MB that take a few KB on disk."""
    writer = HandmadeWriter(make_run(path))
    note = json.dumps({"x": "x" * 40_000})
    writer.add_shard([[make_row(n, encoding=None, note=note) for n in range(1000)]], kind="stats", with_index=False)
    writer.finish()


def _deep(path: Path) -> None:
    deep = "[" * 100_000
    row = make_row(0, [1.0], note=deep, global_shape=deep, placements=deep, mesh=deep, ranks_present=deep, offsets=deep)
    _many_ranks(path, lambda rank: [row | {"rank": rank, "seq": 0}, make_row(1, [1.0], rank=rank, site="input")])
    for manifest in path.rglob("_writer.json"):
        write_manifest(manifest, json.loads(manifest.read_text()) | {"roots": _nested(900), "settings": _nested(900)})


def _nested(depth: int) -> Any:
    found: Any = 0
    for _ in range(depth):
        found = {"x": found}
    return found


def _big_manifest(path: Path) -> None:
    writer = HandmadeWriter(make_run(path))
    writer.add_shard([[make_row(0, [1.0])]])
    writer.finish(events=[[] for _ in range(100_000)])


def _many_entries(path: Path) -> None:
    writer = HandmadeWriter(make_run(path, world_size=10**9))
    writer.add_shard([[make_row(0, [1.0])]])
    writer.finish(world_size=10**9)
    for number in range(500):
        (writer.directory / f"tensors-{number}x.arrow").touch()
        (path / f"rank={number + 1:05d}").mkdir()
    (path / "rank=999999999" / "w").mkdir(parents=True)


def _tiny_shards(path: Path) -> None:
    writer = HandmadeWriter(make_run(path))
    for number in range(30):
        writer.add_shard([[make_row(number, [1.0], step=number)]], with_index=False)
    writer.finish()


def _many_ranks_in_json(path: Path) -> None:
    writer = HandmadeWriter(make_run(path, world_size=10**9))
    writer.add_shard([[make_row(0, [1.0])]])
    parallel = {"kind": "ddp", "ranks": list(range(100_000))}
    writer.finish(roots=[{"name": "model", "class": "Net", "modules": [], "data_parallel": parallel}])


def _many_rules(path: Path) -> None:
    """Rules and steps whose product is what is large."""
    writer = HandmadeWriter(make_run(path))
    writer.add_shard([[make_row(0, [1.0]), make_row(1, [1.0], step=499_000)]])
    modules = [{"path": f"layers.{n}", "sites": ["output", "grad"], "params": ["w"]} for n in range(300)]
    rules = [f"layers.{n} site=output,grad steps={n}: keep=stats" for n in range(3000)]
    writer.finish(roots=[{"name": "model", "class": "Net", "modules": modules}], rules=rules)


BOMBS = {
    "a frame that declares a terabyte": Bomb(_with_rows(_raw(0, _frame(1 << 40, 2), 8))),
    "a frame that declares a terabyte, as the row does": Bomb(_with_rows(_raw(0, _frame(1 << 40, 2), 1 << 40))),
    "a frame that declares nothing": Bomb(
        _with_rows(_raw(0, zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 26)), 8))
    ),
    "a frame that holds more than the row says": Bomb(_with_rows(_raw(0, _zeros(1 << 27), 8))),
    "a frame whose blocks hold more than it declares": Bomb(_with_rows(_raw(0, _frame(8, 4096), 8))),
    "payload_bytes of 2^62": Bomb(_with_rows(_raw(0, b"", 1 << 62))),
    "payload_bytes of 2^52": Bomb(_with_rows(_raw(0, b"", 1 << 52))),
    "a shape of 10^15 elements": Bomb(_with_rows(make_row(0, [1.0]) | {"shape": "[1000000000000000]"})),
    "a shape of 10^15 elements, and its bytes": Bomb(
        _with_rows(make_row(0, [1.0]) | {"shape": "[1000000000000]", "numel": 10**12, "payload_bytes": 4 * 10**12})
    ),
    "pieces of a tensor of 2^47 elements": Bomb(_forged_placements),
    "parts that hold nothing": Bomb(_with_rows(*_parts(b"", "plain"))),
    "parts of frames that hold nothing": Bomb(_with_rows(*_parts(_frame(PART_BYTES, 1), "raw"))),
    "200 parts of zeros": Bomb(_with_rows(*_parts(_zeros(PART_BYTES), "raw")), 40, 400 * _MIB, has_arrays=False),
    "stripes of stripes of stripes": Bomb(_forged_strides),
    "compressed columns": Bomb(_compressed_columns),
    "JSON of 100,000 levels": Bomb(_deep),
    "a manifest of 100,000 lists": Bomb(_big_manifest),
    "hundreds of names, a billion ranks": Bomb(_many_entries),
    "30 shards of one row": Bomb(_tiny_shards),
    "100,000 ranks in a list": Bomb(_many_ranks_in_json),
    "thousands of rules over half a million steps": Bomb(_many_rules, 40, 700 * _MIB),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_what_its_bytes_are_worth(tmp_path: Path, other: Path, name: str) -> None:
    bomb = BOMBS[name]
    run, out = tmp_path / "strange" / "run", tmp_path / "out"
    run.parent.mkdir()
    out.mkdir()
    bomb.build(run)
    disk_bytes = sum(os.path.getsize(path) for path in run.rglob("*"))

    def check(case: int) -> str:
        with reaching(out) as broken:
            findings = _some(run, other, out, bomb)
        return "\n".join(findings + broken)

    (verdict,) = contain(check, [0], limit_s=60)
    assert not verdict.finding, verdict.finding
    assert verdict.max_bytes < bomb.slack_bytes + bomb.ratio * disk_bytes


def _some(run: Path, other: Path, out: Path, bomb: Bomb) -> list[str]:
    """What looks at everything, without what would only look at it again."""
    chooser = random.Random(0)
    at = str(run)
    words = [
        ["ls", at],
        ["verify", at],
        ["doctor", at],
        ["show", at],
        ["first", at],
        ["stats", at, "--by", "step", "--global"],
    ]
    words += [["merge", at, "-o", str(out / "merged"), "--jobs", "1"]]
    findings = [text for one in words for text in battery.run_words(one, is_terminal=False)]
    if bomb.has_arrays:
        findings += battery.use_api(run, chooser)
        findings += battery.run_words(["diff", at, str(other)], is_terminal=False)
        findings += battery.run_words(["export", at, "-o", str(out / "a.npz"), "--global"], is_terminal=False)
    return findings
