"""What a page of `recorder report` holds, read back without a browser; and runs to draw."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recorder.report.blocks import FIRST, NO_NUMBER, NO_ROW
from tests.rigs.command_line import module
from tests.rigs.handmade import HandmadeWriter, make_row, make_run

HOSTILE = [
    "<script>document.title='owned'</script>", "</script><img src=x onerror=alert(1)>", "<!--", "a\"b'c&amp;",
    "{{7*7}}",
    "\u202eevil", "n" * 300, "__proto__", "constructor", "a..b", ".", "é\x00ü",
]  # fmt: skip


class Read(NamedTuple):
    """A block as a page holds it."""

    data: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]


def read_page(path: Path) -> dict[str, Read]:
    """The blocks of a page by name."""
    text = path.read_text(encoding="utf-8")
    found = {}
    for name, packed in re.findall(r'<script type="application/x-recorder-block" data-name="([^"]+)">([^<]*)<', text):
        found[name] = unpacked(base64.b64decode(packed), name)
    return found


def unpacked(data: bytes, name: str | None = None) -> Read:
    """A block, of its bytes; `name` is what it should be called."""
    whole = zlib.decompress(data, -zlib.MAX_WBITS)
    length = int.from_bytes(whole[:4], "little")
    head = json.loads(whole[4 : 4 + length])
    assert head["version"] == 1 and name in (None, head["name"])
    start = -(-(4 + length) // 8) * 8
    arrays = {
        one["name"]: np.frombuffer(
            whole, np.dtype(one["type"]), int(np.prod(one["shape"])), start + one["offset"]
        ).reshape(one["shape"])
        for one in head["arrays"]
    }
    return Read(head["data"], arrays)


def values_of(block: Read) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """The numbers of a cube as the page's own script reads them, NaN for none, and the codes."""
    shape = tuple(block.data["shape"])
    size = int(np.prod(shape))
    raw = block.arrays["codes"].astype(np.int64)
    is_fine = raw.size == 2 * size and size > 0
    codes = (raw[:size] + (raw[size:] << 8) if is_fine else raw).reshape(shape)
    mask = 0xFFFF if is_fine else 0xFF
    codes = np.cumsum(np.cumsum(codes, axis=2) & mask, axis=1) & mask
    low, high, unit = (block.arrays[name].astype(np.float64)[:, None, None] for name in ("low", "high", "unit"))
    scaled = low + (codes - FIRST) * (high - low) / (block.data["levels"] - 1)
    numbers = np.where(unit > 0, unit * np.sinh(np.where(unit > 0, scaled, 0.0)), scaled)
    return np.where((codes == NO_ROW) | (codes == NO_NUMBER), np.nan, numbers), codes


def hostile_run(path: Path) -> Path:
    """A run in which every text that a stranger may choose is meant to harm a page."""
    run = make_run(path, name=HOSTILE[0])
    writer = HandmadeWriter(run)
    rows = [
        make_row(2 * i + step, [1.0 + i, 2.0], step=step, module_path=name, name=name, root=HOSTILE[0])
        for i, name in enumerate(HOSTILE)
        for step in range(2)
    ]
    writer.add_shard([rows])
    modules = [module(name, name, source=name) for name in HOSTILE]
    writer.finish(
        host=HOSTILE[1], roots=[{"name": HOSTILE[0], "class": HOSTILE[1], "modules": modules}], rules=HOSTILE[:3],
        events=[{"kind": HOSTILE[0], "message": HOSTILE[1]}], versions={HOSTILE[0]: HOSTILE[1]},
    )  # fmt: skip
    return run


def run_of(
    path: Path, values: dict[tuple[int, int], float], *, keep: str = "stats", dumps: Any = (), **columns: Any
) -> Path:
    """A run of one layer; `values` by rank and step are what all four elements of its output are."""
    run = make_run(path)
    ranks = sorted({rank for rank, _ in values})
    for rank in ranks:
        writer = HandmadeWriter(run, rank)
        rows = []
        for seq, ((_, step), value) in enumerate(
            (key, value) for key, value in sorted(values.items()) if key[0] == rank
        ):
            row = make_row(seq, np.full(4, value, np.float32), step=step, rank=rank, module_path="net.fc", **columns)
            rows.append(row | {"encoding": None, "payload_bytes": None, "data": None} if keep == "stats" else row)
        writer.add_shard([rows])
        writer.finish(
            roots=[{"name": "model", "class": "Net", "modules": [module("", "Net"), module("net.fc", "Linear")]}],
            dumps=list(dumps),
        )
    return run


def run_of_two_models(path: Path) -> Path:
    """Two models as of a GAN: at each step a loss and the step of one optimizer, and then those of the other."""
    run, rows = make_run(path), list[dict[str, Any]]()
    of_second, of_first = ("model_1", "lr.Adam_1.0", 3.0), ("model", "lr.Adam.0", 1.0)
    for step in range(4):
        for repeat, (root, rate, loss) in enumerate((of_second, of_first)):
            common: dict[str, Any] = {"step": step, "site": "scalar", "module_path": "", "encoding": None}
            rows.append(make_row(0, np.float64(loss), **common, root="model", name="loss", repeat=repeat))
            rows.append(make_row(0, np.float64(0.1), **common, root=root, name=rate))
            for path_of in ("last", "first"):  # the optimizer's groups do not go by the order of modules
                of = {"root": root, "module_path": path_of, "step": step, "encoding": None}
                if not step:
                    rows.insert(0, make_row(0, np.ones(4, np.float32), site="output", **of))
                of |= {"site": "grad", "name": "weight", "phase": "optimizer"}
                rows.append(make_row(0, np.full((4, 4), loss, np.float32), **of))
    first_losses = [row for row in rows if row["step"] == 0 and row["name"] == "loss"]
    for row in first_losses:  # those of the first step wait for its end
        rows.remove(row)
        rows.insert(next(at for at, one in enumerate(rows) if one["step"] == 1), row)
    writer = HandmadeWriter(run)
    writer.add_shard([[row | {"seq": seq} for seq, row in enumerate(rows)]], kind="stats")
    roots = []
    for root, rate, _ in (of_first, of_second):
        layers = [module(path, "Linear", rates={"weight": rate}) for path in ("first", "last")]
        roots.append({"name": root, "class": "Net", "modules": [module("", "Net"), *layers]})
    writer.finish(roots=roots)
    return run
