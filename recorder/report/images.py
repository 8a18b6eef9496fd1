"""Finds pictures among the recorded tensors: first filters, inputs, feature maps, attention maps. Small and few.

Reads the payloads of one rank, of no more than `_MAX_SERIES` tensors at two steps each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ..columns import parse_shape
from ..errors import RunError
from ..numerics.keys import encode
from ..numerics.moments import integers
from ..run.run import Run
from .axes import keys_of
from .blocks import PageBlock

_MAX_SERIES = 12
_MAX_FILTERS, _MAX_MAPS, _MAX_HEADS = 64, 10, 8
_MAX_SIDE, _MAX_ATTENTION_SIDE = 40, 64
_MAX_TENSOR_BYTES = 64 << 20
_MAX_BYTES = 150_000
"""The most bytes of all tiles together, before the tiles are deflated."""
_NOT_FINITE = 255
_KINDS = ("filters", "input", "feature maps", "attention")


class Candidate(NamedTuple):
    """A recorded tensor that may be a picture."""

    kind: str
    where: dict[str, Any]
    """The arguments of `Run.array` that name the tensor."""


class ImageFinder:
    """Finds candidates among the rows, range by range: of each series the first and the last step with kept values."""

    def __init__(self, run: Run) -> None:
        self._rank = min(run.ranks, default=None)
        self._found: dict[tuple[str, ...], list[Candidate]] = {}

    def add(self, table: Any) -> None:
        """Look for candidates in the rows of a range of steps."""
        of_rank = pc.is_null(table.column("rank")) if self._rank is None else pc.equal(table.column("rank"), self._rank)
        is_kept = pc.and_(pc.is_valid(table.column("encoding")), pc.fill_null(of_rank, False))
        shapes, texts = encode(table.column("shape"))
        dims = [_dims(text) for text in texts]
        may_be = np.array([len(sizes) in (3, 4) and sizes[-1] > 2 and sizes[-2] > 2 for sizes in dims] + [False], bool)
        chosen = np.flatnonzero(is_kept.to_numpy(zero_copy_only=False) & may_be[shapes])
        if not len(chosen):
            return
        some = table.take(chosen)
        ids, keys, _ = keys_of(some)
        steps, calls, sizes = (integers(some.column(name)) for name in ("step", "call", "payload_bytes"))
        for row in np.lexsort([calls, steps]).tolist():
            key = keys[ids[row]]
            kind = _kind(key.site, dims[shapes[chosen[row]]])
            if kind is None or sizes[row] > _MAX_TENSOR_BYTES:
                continue
            known = self._found.setdefault(key, [])
            if known and known[-1].where["step"] == steps[row]:
                continue
            names = ("step", "micro_step", "call", "repeat", "phase", "attempt")
            where = {name: some.column(name)[row].as_py() for name in names} | {"rank": self._rank}
            where |= {"module_path": key.module_path, "site": key.site, "name": key.name, "mode": key.mode}
            known[1:] = [Candidate(kind, where)]  # the first stays, and the last so far

    @property
    def has_any(self) -> bool:
        """Whether there is anything that may be a picture."""
        return bool(self._found)

    def block(self, run: Run) -> PageBlock:
        """Return the block of the pictures."""
        images: list[dict[str, Any]] = []
        arrays: dict[str, npt.NDArray[np.uint8]] = {}
        num_bytes = 0
        order = sorted(self._found.items(), key=lambda item: _KINDS.index(item[1][0].kind))
        num_series = 0
        for _, candidates in order:
            drawn = 0
            was_attention = False
            for candidate in candidates if num_series < _MAX_SERIES else ():
                try:
                    array = run.array(**candidate.where)
                except RunError:
                    continue  # doctor tells of damage
                made = _tiles(candidate.kind, array, was_attention)
                if made is None or num_bytes + made[1].nbytes > _MAX_BYTES:
                    continue
                kind, tiles, (low, high, num_nan, num_inf), total = made
                was_attention = kind == "attention"
                where = candidate.where
                name = f"tiles{len(images)}"
                arrays[name] = tiles
                num_bytes += tiles.nbytes
                drawn += 1
                images.append(
                    {
                        "kind": kind, "module": where["module_path"], "site": where["site"], "name": where["name"],
                        "mode": where["mode"], "step": where["step"], "rank": where["rank"], "array": name,
                        "shape": list(array.shape), "tiles": list(tiles.shape), "low": low, "high": high,
                        "nan": num_nan, "inf": num_inf, "total": total,
                    }
                )  # fmt: skip
            num_series += bool(drawn)
        return PageBlock(name="images", data={"images": images}, arrays=arrays)


def _dims(text: str) -> tuple[int, ...]:
    try:
        return tuple(parse_shape(text))
    except RunError:
        return ()


def _kind(site: str, sizes: tuple[int, ...]) -> str | None:
    if site == "param":
        return "filters" if len(sizes) == 4 and sizes[1] in (1, 3) and max(sizes[2:]) <= _MAX_SIDE else None
    if site == "input" and len(sizes) == 4 and sizes[1] in (1, 3):
        return "input"
    if site in ("output", "tap"):
        if sizes[-1] == sizes[-2]:
            return "attention" if len(sizes) == 3 else "feature maps"
        return "feature maps" if len(sizes) == 4 else None
    return None


_Range = tuple[float, float, int, int]
"""The values of the darkest and the brightest pixel (NaN without finite values), and the counts of NaN and infinity."""
_Made = tuple[str, npt.NDArray[np.uint8], _Range, int]


def _tiles(kind: str, array: npt.NDArray[Any], was_attention: bool) -> _Made | None:
    """Return the kind, pictures by number, row, column and colour, the range of their values, and how many there were.

    `was_attention`: the same value was attention at an earlier step.
    """
    if array.size == 0 or array.dtype.kind == "c":
        return None
    values = array.astype(np.float32)
    if kind in ("attention", "feature maps") and _is_attention(values, was_attention):
        maps = values[0] if values.ndim == 4 else values[:_MAX_HEADS]
        return "attention", *_bytes(maps[:_MAX_HEADS, :, :, None], _MAX_ATTENTION_SIDE), len(maps)
    if kind == "attention":
        return None
    if kind == "feature maps":
        maps = values[0]
        return kind, *_bytes(maps[:_MAX_MAPS, :, :, None], _MAX_SIDE), len(maps)
    pictures = np.moveaxis(values[: _MAX_FILTERS if kind == "filters" else 4], 1, -1)
    return kind, *_bytes(pictures, _MAX_SIDE), len(values)


def _is_attention(values: npt.NDArray[np.float32], was_attention: bool) -> bool:
    """Whether each row sums to one; where no row is finite, whether the rows did so at an earlier step."""
    some = values.reshape(-1, *values.shape[-2:])[:4]
    if some.shape[-1] != some.shape[-2]:
        return False
    rows = some.reshape(-1, some.shape[-1])
    rows = rows[np.isfinite(rows).all(axis=-1)]
    if not len(rows):
        return was_attention
    return bool(rows.min() >= 0 and np.allclose(rows.sum(axis=-1), 1.0, atol=1e-2))


def _shrunk(pictures: npt.NDArray[np.float32], side: int) -> npt.NDArray[np.float32]:
    for axis in (1, 2):
        size = pictures.shape[axis]
        if size > side:
            starts = np.arange(side) * size // side
            counts = np.diff(np.r_[starts, size]).astype(np.float32)
            summed = np.add.reduceat(pictures, starts, axis=axis)
            pictures = summed / counts.reshape([-1 if index == axis else 1 for index in range(4)])
    return pictures


def _bytes(pictures: npt.NDArray[np.float32], side: int) -> tuple[npt.NDArray[np.uint8], _Range]:
    num_nan, num_inf = int(np.isnan(pictures).sum()), int(np.isinf(pictures).sum())
    pictures = _shrunk(pictures, side)
    is_finite = np.isfinite(pictures)
    known = pictures[is_finite]
    low, high = (float(known.min()), float(known.max())) if known.size else (np.nan, np.nan)
    scaled = (np.where(is_finite, pictures, low) - low) / ((high - low) or 1.0) * (_NOT_FINITE - 1)
    return np.where(is_finite, np.rint(scaled), _NOT_FINITE).astype(np.uint8), (low, high, num_nan, num_inf)
