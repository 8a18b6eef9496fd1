"""Collects histograms and units (neurons or channels) of the drawn steps and ranks. Makes pictures of tensors.

Pictures are made of recorded tensors: first filters, then inputs, feature maps, attention maps, and the spectra of
weights. All but weights come from one rank. At most `_MAX_SERIES` tensors of a kind are drawn, at two steps each.

The histograms of the ranks' rows are added up. A replica counts once for each rank, which does not change the shares of
the bins. The size of a unit is its root mean square. The units of each rank are sorted on their own, from the largest
to the smallest. A position in that order shows the mean over ranks and calls. So the result is the same whether ranks
have different units, or different values of the same units.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..analyze.check.reading import shape_or_none
from ..columns import parse_shape
from ..errors import CorruptError, RunError
from ..numerics.histogram import Histogram
from ..numerics.keys import Integers, encode
from ..numerics.moments import integers
from ..numerics.units import Units
from ..run.run import Run
from .axes import keys_of
from .blocks import PageBlock

_MAX_RANKS = 8
_MAX_STEPS = 100
T = TypeVar("T")


class ThinnedSteps:
    """The steps that are drawn: at first all, later every second, then every fourth, and always the newest."""

    def __init__(self) -> None:
        self.num_seen, self._stride, self._last = 0, 1, -1
        self._kept: list[int] = []

    @property
    def steps(self) -> list[int]:
        return sorted({*self._kept, self._last} - {-1})

    def see(self, steps: Sequence[int]) -> None:
        """Add ascending steps. A step that is not later than all earlier steps is ignored."""
        for step in steps:
            if step <= self._last:
                continue
            self._last = step
            if self.num_seen % self._stride == 0:
                self._kept.append(step)
            self.num_seen += 1
            if len(self._kept) > _MAX_STEPS:
                self.halve()

    def halve(self) -> None:
        """Drop every second kept step, and from now on keep steps half as often."""
        self._kept, self._stride = self._kept[::2], 2 * self._stride


class StepsCollector(ABC, Generic[T]):
    """Collects the values of one column, for the steps and ranks that are drawn."""

    column: str
    """The column that is collected. Rows in which it is null are skipped."""
    max_collected: int
    """The most values that are kept, one for each series and step. More are thinned out by steps, down to two steps."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._thinned = ThinnedSteps()
        self.steps: list[int] = []
        self.ranks = list(ranks[:: -(-len(ranks) // _MAX_RANKS)]) if ranks else []
        self._collected: dict[tuple[int, int], T] = {}
        """The collected values by series and step."""

    def add(self, table: Any, number_of: Callable[[Any], Integers]) -> None:
        """Add rows of steps after all earlier rows. `number_of` returns the series index of each row, or -1."""
        some = table.filter(pc.is_valid(table.column(self.column)))
        self._thinned.see(sorted(pc.unique(some.column("step")).to_pylist()))
        self._keep(self._thinned.steps)
        wanted = pc.is_in(some.column("step"), pa.array(self.steps, pa.int64()))
        if self.ranks:
            ranks = some.column("rank")
            wanted = pc.and_(wanted, pc.or_(pc.is_null(ranks), pc.is_in(ranks, pa.array(self.ranks, ranks.type))))
        some = some.filter(wanted)
        if not some.num_rows:
            return
        numbers = number_of(some)
        self._take(some.filter(pa.array(numbers >= 0)), numbers[numbers >= 0].tolist())
        while len(self._collected) > self.max_collected and len(self.steps) > 2:
            self._thinned.halve()
            self._keep(self._thinned.steps)

    def _placed(self) -> tuple[dict[str, Any], Iterator[tuple[tuple[int, int], T]]]:
        """Return what a block says of its series, steps and ranks, and each value with its row and column there."""
        numbers = sorted({number for number, _ in self._collected})
        about = {"series": numbers, "steps": self.steps, "num_steps": self._thinned.num_seen, "ranks": self.ranks}
        row_of, column_of = ({value: index for index, value in enumerate(some)} for some in (numbers, self.steps))
        values = (((row_of[number], column_of[step]), one) for (number, step), one in self._collected.items())
        return about, values

    def _keep(self, steps: list[int]) -> None:
        if steps != self.steps:
            self.steps = list(steps)
            self._collected = {key: one for key, one in self._collected.items() if key[1] in steps}

    @abstractmethod
    def _take(self, table: Any, series: list[int]) -> None:
        """Collect the rows of a table. `series` has the series index of each row."""


_LOWEST, _HIGHEST = -60, 40
"""The exponents of the lowest and the highest power of two that have bins. These bins take all values beyond."""
_NUM_BINS = _HIGHEST - _LOWEST + 1
_NUM_LINE = 2 * _NUM_BINS + 2
_MAX_BIN_CELLS = 1_500_000
_LEAST_SHARE = 1e-6
_SHARE_LEVELS = 31


class HistogramCollector(StepsCollector[npt.NDArray[np.float64]]):
    """Collects histograms. Bins are in order: negative values from the largest magnitude, zero, positive, nonfinite."""

    column = "histogram"
    max_collected = _MAX_BIN_CELLS // _NUM_LINE

    def _take(self, table: Any, series: list[int]) -> None:
        steps, zeros = integers(table.column("step")), integers(table.column("zero_count"), 0)
        nonfinite = integers(table.column("nan_count"), 0) + integers(table.column("inf_count"), 0)
        packed = table.column("histogram").to_pylist()
        counts = zip(steps.tolist(), zeros.tolist(), nonfinite.tolist(), packed, strict=True)
        for number, (step, num_zeros, num_nonfinite, data) in zip(series, counts, strict=True):
            try:
                one = Histogram.from_bytes(data)
            except CorruptError:
                continue  # `recorder verify` reports the damage
            line = self._collected.setdefault((number, step), np.zeros(_NUM_LINE))
            at = np.clip(one.exponents, _LOWEST, _HIGHEST) - _LOWEST
            np.add.at(line, _NUM_BINS - 1 - at, one.counts[0])
            line[_NUM_BINS] += num_zeros
            np.add.at(line, _NUM_BINS + 1 + at, one.counts[1])
            line[-1] += num_nonfinite

    def block(self, name: str) -> PageBlock | None:
        """Return the block of the histograms, or None if no series has a histogram."""
        if not self._collected:
            return None
        about, lines = self._placed()
        shares = np.zeros((len(about["series"]), len(self.steps), _NUM_LINE), np.float32)
        for at, line in lines:
            shares[at] = line / max(line.sum(), 1.0)
        with np.errstate(divide="ignore"):
            level = 1 + np.rint((1 - np.log(shares) / np.log(_LEAST_SHARE)) * (_SHARE_LEVELS - 1))
        codes = np.where(shares > 0, np.clip(level, 1, _SHARE_LEVELS), 0).astype(np.uint8)
        nonfinite, codes = np.ascontiguousarray(codes[:, :, -1]), codes[:, :, :-1]
        used = np.flatnonzero(codes.any(axis=(0, 1)))
        first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (_NUM_BINS, _NUM_BINS + 1)
        codes = np.ascontiguousarray(codes[:, :, first:last])
        data = {
            **about, "levels": _SHARE_LEVELS, "least": _LEAST_SHARE, "shape": list(codes.shape), "first": first,
            "zero": _NUM_BINS, "lowest": _LOWEST,
        }  # fmt: skip
        return PageBlock(name=name, data=data, arrays={"codes": codes, "nonfinite": nonfinite})


_NUM_QUANTILES = 33
"""The number of drawn positions among the sorted units (neurons, channels), including both ends."""
_MAX_UNIT_CELLS = 1_000_000
_UNIT_LEVELS = 254


class _UnitsOfStep(NamedTuple):
    squares: list[npt.NDArray[np.float64]]
    """The mean squares of the units at the drawn positions, one array for each rank and call."""
    about: tuple[int, int, int, int]
    """Four integers from the first rank and call: the number of units, the number of dead units, the index of the
    largest unit, and the number of units without a finite nonzero value."""


class UnitsCollector(StepsCollector[_UnitsOfStep]):
    """Collects the sizes of units (channels, neurons) for the steps and ranks that the page draws."""

    column = "units"
    max_collected = _MAX_UNIT_CELLS // _NUM_QUANTILES

    def _take(self, table: Any, series: list[int]) -> None:
        columns = [table.column(name).to_pylist() for name in ("step", "units", "shape")]
        num_nonfinite = integers(table.column("nan_count"), 0) + integers(table.column("inf_count"), 0)
        for number, step, data, shape, is_nonfinite in zip(series, *columns, num_nonfinite > 0, strict=True):
            try:
                one = Units.from_bytes(data, parse_shape(shape))
            except RunError:
                continue  # `recorder verify` reports the damage
            if not len(one):
                continue
            squares = one.sum_sq / max(1, one.num_values)
            indices = np.rint(np.linspace(len(one) - 1, 0, _NUM_QUANTILES)).astype(int)
            num_dead = int((one.zero_count == one.num_values).sum()) if one.num_values else 0
            largest = int(np.argmax(squares))
            # The sums leave out nonfinite values.
            lacks = is_nonfinite & (one.sum_sq == 0) & (one.zero_count < one.num_values)
            squares = np.where(lacks, np.nan, squares)  # sorting treats NaN as the largest value
            about = len(one), num_dead, largest, int(lacks.sum())
            collected = self._collected.setdefault((number, step), _UnitsOfStep([], about))
            collected.squares.append(np.sort(squares)[indices])

    def block(self, name: str) -> PageBlock | None:
        """Return the block of the sorted sizes of units (channels, neurons), or None if no series has units."""
        if not self._collected:
            return None
        told, units = self._placed()
        sizes = np.full((len(told["series"]), len(self.steps), _NUM_QUANTILES), np.nan)
        about = np.zeros((*sizes.shape[:2], 4), np.int32)
        for at, one in units:
            sizes[at] = np.sqrt(np.mean(one.squares, axis=0))
            about[at] = one.about
        with np.errstate(divide="ignore", invalid="ignore"):
            exponents = np.log2(np.where(np.isfinite(sizes), sizes, np.nan))
        known = exponents[np.isfinite(exponents)]
        low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
        level = 2 + np.rint((exponents - low) / max(high - low, 1e-9) * (_UNIT_LEVELS - 1))
        codes = np.where(sizes == 0, 1, np.where(np.isfinite(level), level, 0)).astype(np.uint8)
        data = {**told, "shape": list(codes.shape), "low": low, "high": high, "levels": _UNIT_LEVELS}
        return PageBlock(name=name, data=data, arrays={"codes": codes, "about": about})


_MAX_SERIES = 12
_MAX_FILTERS, _MAX_MAPS, _MAX_HEADS = 64, 10, 8
_MAX_SIDE, _MAX_ATTENTION_SIDE = 40, 64
_MAX_TENSOR_BYTES = 64 << 20
_MAX_BYTES = 150_000
"""The most bytes of all pictures of tensors together, before deflation."""
_NOT_FINITE = 255
_KINDS = ("filters", "input", "feature maps", "attention", "spectrum")
_MAX_DENSE_SIDE, _NUM_ITERATIONS = 512, 30


Image = tuple[dict[str, Any], npt.NDArray[np.uint8]]
"""What a block says of a picture, and the picture's tiles."""


class Candidate(NamedTuple):
    """A recorded tensor that may be drawn as a picture."""

    kind: str
    where: dict[str, Any]
    """The arguments of `Run.array` that identify the tensor."""


class ImageFinder:
    """Finds tensors that may be drawn as pictures. Of each series, the first and the last recorded step are kept."""

    def __init__(self, run: Run) -> None:
        self._rank = min(run.ranks, default=None)
        self._found: dict[tuple[str, ...], list[Candidate]] = {}

    def add(self, table: Any) -> None:
        """Look for candidates in the rows of a range of steps."""
        of_rank = pc.is_null(table.column("rank")) if self._rank is None else pc.equal(table.column("rank"), self._rank)
        is_kept = pc.and_(pc.is_valid(table.column("encoding")), pc.fill_null(of_rank, False))
        shapes, texts = encode(table.column("shape"))
        dims = [shape_or_none(text) or () for text in texts]
        may_be = np.array([1 < len(sizes) < 5 and min(sizes[-2:]) > 2 for sizes in dims] + [False], bool)
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
            where = {name: some.column(name)[row].as_py() for name in names}
            where["rank"] = None if kind == "spectrum" else self._rank  # a rank may have only a chunk of a weight
            where |= {"module_path": key.module_path, "site": key.site, "name": key.name, "mode": key.mode}
            known[1:] = [Candidate(kind, where)]  # the first candidate and the latest one are kept

    def images(self, run: Run) -> list[Image]:
        """Read the tensors, and return their pictures."""
        images: list[Image] = []
        num_bytes = 0
        order = sorted(self._found.items(), key=lambda item: _KINDS.index(item[1][0].kind))
        num_series = dict.fromkeys(_KINDS, 0)
        for _, candidates in order:
            drawn = 0
            was_attention = False
            for candidate in candidates if num_series[candidates[0].kind] < _MAX_SERIES else ():
                try:
                    array = run.array(**candidate.where)
                except RunError:
                    continue  # `recorder doctor` reports damage
                made = _tiles(candidate.kind, array, was_attention)
                if made is None or num_bytes + made[1].nbytes > _MAX_BYTES:
                    continue
                kind, tiles, (low, high, num_nan, num_inf), total = made
                was_attention = kind == "attention"
                where = candidate.where
                num_bytes += tiles.nbytes
                drawn += 1
                about = {
                    "kind": kind, "module": where["module_path"], "shape": list(array.shape),
                    **{one: where[one] for one in ("site", "name", "mode", "step", "rank")}, "total": total,
                    "tiles": list(tiles.shape), "low": low, "high": high, "nan": num_nan, "inf": num_inf,
                }  # fmt: skip
                images.append((about, tiles))
            num_series[candidates[0].kind] += bool(drawn)
        return images


def images_block(images: Sequence[Image]) -> PageBlock:
    """Return the block of pictures of tensors."""
    arrays = {f"tiles{number}": tiles for number, (_, tiles) in enumerate(images)}
    named = [{**about, "array": name} for (about, _), name in zip(images, arrays, strict=True)]
    return PageBlock(name="images", data={"images": named}, arrays=arrays)


def _kind(site: str, sizes: tuple[int, ...]) -> str | None:
    if len(sizes) == 2:
        return "spectrum" if site == "param" else None
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
"""The values of the darkest and brightest pixel (NaN without finite values), and the numbers of NaN and infinities."""
_Made = tuple[str, npt.NDArray[np.uint8], _Range, int]


def _tiles(kind: str, array: npt.NDArray[Any], was_attention: bool) -> _Made | None:
    """Return a picture's kind, its tiles, their range of values, and how many tiles the whole tensor would make.

    Return None if nothing can be drawn. The tiles are uint8, of shape (tiles, rows, columns, colours). `was_attention`
    is True if the same series was drawn as attention at an earlier step.
    """
    if array.size == 0 or array.dtype.kind == "c":
        return None
    values = array.astype(np.float32)
    if kind == "spectrum":
        return kind, *_bytes(_singular_values(values)[None, None, :, None], _MAX_DENSE_SIDE), min(values.shape)
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


def _singular_values(matrix: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Return the singular values in descending order. Of a large matrix, return only the largest; NaN if not finite."""
    if not np.isfinite(matrix).all():
        return np.full(1, np.nan)
    if min(matrix.shape) <= _MAX_DENSE_SIDE:
        return np.linalg.svd(matrix, compute_uv=False)
    vector = np.random.default_rng(0).standard_normal(len(matrix[0]), np.float32)
    for _ in range(_NUM_ITERATIONS):
        vector = matrix.T @ (matrix @ (vector / max(float(np.linalg.norm(vector)), 1e-30)))
    return np.full(1, float(np.linalg.norm(vector)) ** 0.5)


def _is_attention(values: npt.NDArray[np.float32], was_attention: bool) -> bool:
    """Return True if each finite row sums to one. If no row is finite, return `was_attention`."""
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
