"""Owns where two runs differ: value by value, whatever their layouts, in bounded memory. Never prints.

Equal fingerprints spare the payloads; statistics are asked only where there is no payload.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import LookupFailedError
from ..read.run import Run
from .align import align
from .boundaries import comparable, without_recomputed
from .compare import Tolerance
from .hints import Lonely, RenameHint, rename_hints
from .keys import VALUE_KEY, Integers, group_rows
from .moments import Floats, integers, numbers
from .naming import Culprit, Naming, Steps
from .noise import BeyondNoise, Drifted, LoudNoise, Measured, measure
from .pairs import Compared, Judged, Side, judge, moved_roots
from .pieces import MAX_ROWS, Spread, global_pieces, here
from .problems import Problems
from .renames import NO_RENAMES, Renames
from .selection import GlobalOptions, Selection

_MODULE = ["root", "module_path"]
_VALUE = [*_MODULE, "site", "name"]
_COUNTED = (
    "num_pairs", "by_fingerprint", "by_values", "by_statistics", "by_nothing", "bare", "summands", "by_print_alone",
)  # fmt: skip
_SUMMANDS = "the values are sums over ranks, whose values were not kept, and which have no statistics of their own"
_PRINTS = "the values have fingerprints alone, which noise changes: statistics or tensors would tell"
_APART = "the values are of single ranks, which worked on other parts of the batch"
_ONLY = [*_VALUE, "rows", "first_step", "last_step"]
_MAX_LISTED = 6


class Difference(NamedTuple):
    """One value that differs."""

    step: int
    module_path: str
    site: str
    name: str
    kind: str
    """``values``, ``statistics`` (no values to compare), ``fingerprint`` (nothing else to compare), ``shape``,
    ``dtype`` (the values are equal), ``after_tap`` (a gradient that one run took behind the module, of the uses outside
    it alone), or ``partial``: one run lacks ranks of it, so that it had to differ."""
    micro_step: int | None
    call: int
    rank_a: int | None
    """None: of all ranks."""
    rank_b: int | None
    max_abs: float | None
    of_max: float | None
    """`max_abs` relative to the largest magnitude in either tensor."""
    max_rel: float | None
    max_ulp: int | None
    nonfinite_a: int | None
    nonfinite_b: int | None
    statistic: str | None
    """Where only statistics could be compared, the one that is farthest apart."""
    statistic_a: float | None
    statistic_b: float | None
    statistic_rel: float | None
    """By how much, of the largest magnitude; of a norm the larger one. None for a count."""
    noise: float | None
    """How far noise moves it, in the same measure; None without noise runs, or where they lack the value."""
    lacks_a: str | None
    """Ranks that the first run lacks of it, as JSON."""
    lacks_b: str | None


class Partial(NamedTuple):
    """Values of which one run lacks ranks that the other has."""

    run: str
    """``a`` or ``b``."""
    ranks: list[int]
    num_values: int


class LeftOut(NamedTuple):
    """Values that both runs have and that could not be compared."""

    num_values: int
    why: str


class Diff(NamedTuple):
    """How two runs compare."""

    is_equal: bool
    """Within the tolerance; all could be read; and unless only common values were asked for, neither has a value, or
    something of a value, at a common step that the other lacks. What is `left_out` does not count."""
    verdict: str
    """``equal``, ``different``, or ``equal as far as compared`` where something that both have could not be."""
    first: Difference | None
    """The first value that differs, in the order of execution of the first run."""
    culprits: list[Culprit]
    """The stages that differ although all that they are made from agrees, the first on top; what else differs inherits.
    Of the first steps with differences."""
    table: Any
    """`pa.Table` of the values that differ, in that order: place, kind, dtypes, shapes and distances."""
    modules: Any
    """`pa.Table`: a row for each module that differs, the first that does so on top."""
    only_a: Any
    """`pa.Table`: values of common steps that the second run lacks, by root, module_path, site, name."""
    only_b: Any
    num_compared: int
    num_by_fingerprint: int
    """Pairs that are equal by fingerprint; their payloads were not read."""
    num_by_values: int
    num_by_statistics: int
    num_incomparable: int
    """Pairs of which one side has something that the other lacks, and nothing that could be compared."""
    num_bare: int
    """Pairs of which neither run kept values, statistics or a fingerprint; they make no difference."""
    left_out: list[LeftOut]
    """What else could not be compared, by why; `num_compared` counts it."""
    unread: dict[str, int]
    """Values that could not be read and so were compared by their statistics, if at all: how many, by what the reading
    said."""
    damage: list[str]
    """What else is damaged in one of the runs, or in one of the noise: its rows are not there."""
    partial: list[Partial]
    """Pairs of which one run lacks ranks, however they compare."""
    steps_only_a: list[int]
    steps_only_b: list[int]
    unpaired_a: Sequence[str] = ()
    """Where modules were renamed: those of the first run that the second has under no name."""
    unpaired_b: Sequence[str] = ()
    """By its own names."""
    problems_a: Sequence[str] = ()
    """What contradicts itself in the rows of the first run, or in the layouts that were given."""
    problems_b: Sequence[str] = ()
    hints: Sequence[RenameHint] = ()
    """Modules that each run has alone and that look alike: what a file of renamed modules would say of them."""
    num_handed_on_a: int = 0
    """Rows of what pipeline stages of the first run hand to each other, where the second is not cut alike: no
    difference."""
    num_handed_on_b: int = 0
    num_recomputed_a: int = 0
    """Rows that the first run alone made again for its backward, at steps at which the second did so nowhere: no
    difference."""
    num_recomputed_b: int = 0
    drifted: Drifted | None = None
    """Parameters that rounding drove apart, which hides errors smaller than what that does."""
    loud_noise: LoudNoise | None = None
    """Set where the noise runs differ from the first run by more than roundings do."""
    still_roots: Sequence[str] = ()
    """Roots with differences in which no noise run differs from the first run: any difference counts there."""

    @property
    def num_left_out(self) -> int:
        """Values that both runs have and that could not be compared."""
        return sum(one.num_values for one in self.left_out) + self.num_incomparable + self.num_bare


def diff(
    a: Run,
    b: Run,
    module: str | None = None,
    *,
    site: str | None = None,
    name: str | None = None,
    step: int | str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    ulp: int = 0,
    noise: Sequence[Run] = (),
    renames: Renames = NO_RENAMES,
    common: bool = False,
    loss: str = "mean",
    layouts: Sequence[str] = (),
    report: Callable[[int], None] = lambda num_bytes: None,
    spread: Spread = here,
) -> Diff:
    """Compare two runs value by value: the global tensors, whatever the layouts.

    Values are paired by root, step, module path, site, name, micro-step, call, repeat, mode and phase. Elements are
    equal if their values are (a NaN equals a NaN), or within any of the tolerances; types are compared in the wider.

    Args:
        a: from `open_run`; its order of execution counts.
        b: from `open_run`.
        module: a module's path, or a glob over paths.
        site: one site, or several with commas.
        name: a name at the site, or a glob.
        step: a step, or several as in rules: ``"0:100"``, ``"::10"``.
        rtol: difference allowed, relative to the larger magnitude, as in `math.isclose`.
        atol: absolute difference allowed.
        ulp: representable numbers allowed between two floats of one type.
        noise: runs that differ from `a` by noise alone: repeats of it, or twins with the setting `jitter`. A difference
            counts only where it is more than `drift.MARGIN` times what they show at that tensor and step; of updates
            that rounding left open, and of what they do, see `drift`.
        renames: what the modules of `b` are called in `a`, whose names all answers use; from `read_renames`.
        common: what only one of them has, or has values or statistics of, does not count.
        loss: how activation gradients of the ranks are scaled, in both runs; see `Run.view`.
        layouts: how the ranks' values of some leaves lie, in both runs; see `Run.view`.
        report: called with payload bytes done.
        spread: works on the pieces, ranges of steps.

    Raises:
        LookupFailedError: nothing is selected, or the runs have no value in common; the message says why. Or a loss,
            a layout or a tolerance is none, a rename fits no module, or a noise run is of another model or does not
            differ from the first run.
    """
    selection = Selection(module=module, site=site, name=name, step=step)
    selection.check()
    GlobalOptions(across_ranks=True, loss=loss, layouts=layouts).check(a, b)
    names = {path: renames.old(path) for path in _module_paths(b)}
    renames.check_used(names)
    lonely = _lonely(_module_paths(a), names)
    tolerance = Tolerance(rtol, atol, ulp)
    _check_twins(a, b, noise)
    views = [run.view(loss=loss, layouts=layouts) for run in (a, b, *noise)]
    # What noise does to a small tensor is looked up over the steps of a piece: these stay as long as they can be.
    windows = [view.windows(MAX_ROWS) if noise else global_pieces(view) for view in views]
    own_names = lonely[0].own_names, lonely[1].own_names
    shared = (selection, tolerance, renames, own_names, loss, tuple(layouts))
    arguments = ((a, b, *noise), *shared, _Report(report))
    comparison = _Comparison(_Pieces(*arguments), report, lonely, selection)
    for piece in spread(_Pieces, arguments, _ranges(*windows)):
        comparison.add(piece)
        del piece  # with its rows, before the next ones are read
    hints = rename_hints(*lonely, renames, names)
    comparison.refuse_nothing(a, b, selection, hints)
    comparison.refuse_still(a, noise)
    found = comparison.result(common=common, damage=[text for run in (a, b, *noise) for text in _damage(run)])._replace(
        hints=hints
    )
    if hints:  # most likely they are there, under other names
        lonely_names = {name for one in lonely for name in one.own_names}
        culprits = [one for one in found.culprits if one.alone_in is None or one.seen_at not in lonely_names]
        found = found._replace(culprits=culprits)
    if not renames:
        return found
    return found._replace(unpaired_a=[*lonely[0].own_names], unpaired_b=[*lonely[1].own_names.values()])


def payload_bytes(run: Run) -> int:
    """How many bytes all payloads of a run come to: what `report` is called with in sum, for each of the two."""
    column = run.table(["payload_bytes"]).column("payload_bytes")
    return int(pc.sum(column).as_py() or 0)


def _check_twins(a: Run, b: Run, noise: Sequence[Run]) -> None:
    """Refuse a noise run of another model, and the run that is to be judged.

    Raises:
        LookupFailedError: one of them has not the modules of the first run, or is one of the two.
    """
    for run in noise:
        if run.path.resolve() in (a.path.resolve(), b.path.resolve()):
            raise LookupFailedError(f"{run.path}: is one of the two runs that are compared; noise is a third one")
        lost = [path for path in a.module_paths if path not in set(run.module_paths)]
        if lost:
            few = _listed(lost)
            raise LookupFailedError(
                f"{run.path}: a twin has the modules of {a.path}, with the same rules; it lacks {few}"
            )


def _damage(run: Run) -> list[str]:
    """What of its rows cannot be read."""
    return [text for writer in run.writers for shard in writer.shards for text in shard.damage]


def _module_paths(run: Run) -> list[str]:
    """Modules with rows, shard by shard: the names of all rows at once would take more memory than the comparison."""
    found: dict[str, None] = {}
    for writer in run.writers:
        for shard in writer.shards:
            for batch in shard.columns(["module_path"]):
                found |= dict.fromkeys(batch.column("module_path").unique().to_pylist())
    return list(found)


def _lonely(paths: Sequence[str], names: Mapping[str, str]) -> tuple[Lonely, Lonely]:
    """The modules of each run that the other has not; `names` are those of the second, by its own."""
    there, theirs = set(paths), set(names.values())
    alone_a = {path: path for path in paths if path not in theirs}
    return Lonely(alone_a), Lonely({name: own for own, name in names.items() if name not in there})


def _ranges(*windows: list[tuple[int, int]]) -> Iterator[tuple[int | None, int | None]]:
    """Ranges of steps that cover both runs, none larger than a window of either."""
    starts = sorted({first for some in windows for first, _ in some})
    bounds = [None, *starts[1:], None]
    yield from pairwise(bounds)


class _Seen:
    """What one run has."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_selected = 0
        self.steps: set[int] = set()
        """Of what is selected."""
        self._values: dict[str, dict[Any, None]] = {name: {} for name in ("step", *_VALUE)}

    def add(self, side: Side) -> None:
        self.num_rows += side.rows.table.num_rows
        self.num_selected += side.table.num_rows
        self.steps.update(side.table.column("step").unique().to_pylist())
        for name, known in self._values.items():
            known.update(dict.fromkeys(side.rows.table.column(name).unique().to_pylist()))

    def join(self, other: _Seen) -> None:
        self.num_rows += other.num_rows
        self.num_selected += other.num_selected
        self.steps |= other.steps
        for name, known in self._values.items():
            known.update(other._values[name])

    def table(self) -> Any:
        """Its distinct values, each column by itself: the rows mean nothing."""
        length = max(map(len, self._values.values()))
        return pa.table({name: [*known, *[None] * (length - len(known))] for name, known in self._values.items()})

    def known(self, column: str, selection: Selection) -> list[Any]:
        """The values of a column that are selected."""
        table = pa.table({column: list(self._values[column])})
        narrowed = selection.narrow(table) if column in selection.columns else table
        return sorted(narrowed.column(column).to_pylist())


class _Report:
    """Tells of bytes done, and counts them; in another process it only counts."""

    def __init__(self, report: Callable[[int], None] = lambda num_bytes: None) -> None:
        self._report = report
        self.num_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _Report, ()

    def __call__(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._report(num_bytes)


@dataclass
class _Piece:
    """What came of a range of steps."""

    first: int | None
    last: int | None
    num_bytes: int
    problems: tuple[Problems, Problems]
    handed_on: tuple[int, int]
    recomputed: tuple[int, int]
    seen: tuple[_Seen, _Seen]
    lonely: tuple[Lonely, Lonely]
    only: tuple[Any, Any]
    steps: Steps | None
    """With the next three: where there are pairs."""
    judged: Judged | None
    measured: Measured | None
    moved: list[set[str]]
    """Of each noise run, the roots in which it differs from the first run."""
    compared: Any
    """How many pairs of each module there are."""
    num_apart: int
    """Values of single ranks that both runs have and that are of other parts of the batch."""
    rows: Compared | None
    """Where they were read in this process."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"rows": None}


class _Pieces:
    """Compares ranges of steps."""

    def __init__(
        self,
        runs: tuple[Run, ...],
        selection: Selection,
        tolerance: Tolerance,
        renames: Renames,
        own_names: tuple[Mapping[str, str], Mapping[str, str]],
        loss: str,
        layouts: Sequence[str],
        report: _Report,
    ) -> None:
        self._views = [run.view(loss=loss, layouts=layouts) for run in runs]
        self.jitter_eps = max((run.jitter_eps for run in runs[2:]), default=0.0)
        """By which share the inputs of the noise runs were moved."""
        self._selection = selection
        self._tolerance = tolerance
        self._renames = renames
        self._own_names = own_names
        self._report = report

    def rows(self, first: int | None, last: int | None) -> Compared:
        """What is compared of a range of steps."""
        return self._read(first, last)[0]

    def __call__(self, first: int | None, last: int | None) -> _Piece:
        before = self._report.num_bytes
        compared, handed_on, recomputed = self._read(first, last)
        a, b, pairs = compared
        problems = Problems(self._selection), Problems(self._selection)
        seen, only = (_Seen(), _Seen()), []
        lonely = Lonely(self._own_names[0]), Lonely(self._own_names[1])
        steps = pc.unique(a.table.column("step")), pc.unique(b.table.column("step"))
        for number, (side, others, places) in enumerate(
            zip((a, b), reversed(steps), (pairs.only_a, pairs.only_b), strict=True)
        ):
            problems[number].add(side.rows.findings)
            seen[number].add(side)
            lonely[number].add(side.table)
            alone = side.table.take(pa.array(places))
            only.append(_by_value(alone.filter(pc.is_in(alone.column("step"), others))))
            self._report(side.payload_bytes(places))
        judged = measured = counts = known = None
        moved: list[set[str]] = []
        if len(pairs.a):
            judged = judge(a, b, pairs, self._tolerance, self._report)
            noise = [Side.read(view, self._selection, first, last) for view in self._views[2:]]
            measured = measure(judged, compared, noise)
            moved = [moved_roots(a, side) for side in noise]
            counts = a.table.select(_MODULE).take(pa.array(pairs.a)).group_by(_MODULE).aggregate([([], "count_all")])
            known = Steps.of(compared)
        return _Piece(
            first=first,
            last=last,
            num_bytes=self._report.num_bytes - before,
            problems=problems,
            handed_on=handed_on,
            recomputed=recomputed,
            seen=seen,
            lonely=lonely,
            only=(only[0], only[1]),
            steps=known,
            judged=judged,
            measured=measured,
            moved=moved,
            num_apart=group_rows(a.table.take(pa.array(pairs.apart)), VALUE_KEY).num_groups,
            compared=counts,
            rows=compared,
        )

    def _read(self, first: int | None, last: int | None) -> tuple[Compared, tuple[int, int], tuple[int, int]]:
        a = Side.read(self._views[0], self._selection, first, last)
        b = Side.read(self._views[1], self._selection, first, last, self._renames)
        a, b, handed_on = comparable(a, b)
        a, b, recomputed = without_recomputed(a, b)
        return Compared(a, b, align(a.table, b.table)), handed_on, recomputed


class _Comparison:
    """What is found, range by range of steps in their order."""

    def __init__(
        self, pieces: _Pieces, report: Callable[[int], None], lonely: tuple[Lonely, Lonely], selection: Selection
    ) -> None:
        self._pieces = pieces
        self._report = report
        self._lonely = lonely
        self._problems = (Problems(selection), Problems(selection))
        self._differing: list[Any] = []
        self._compared: list[Any] = []
        self._only: tuple[list[Any], list[Any]] = ([], [])
        self._seen = (_Seen(), _Seen())
        self._counts = np.zeros(len(_COUNTED), np.int64)
        self._partial: Counter[tuple[str, str]] = Counter()
        self._naming = Naming(pieces.rows)
        self._handed_on, self._recomputed = np.zeros(2, np.int64), np.zeros(2, np.int64)
        self._beyond_noise = BeyondNoise(pieces.jitter_eps)
        self._moved: list[set[str]] = []
        self._unread: Counter[str] = Counter()
        self._num_apart = 0

    def add(self, piece: _Piece) -> None:
        """The next range. Of rows that were read elsewhere those are read again that a culprit, or a drift, is in."""
        if piece.rows is None:
            self._report(piece.num_bytes)
        for side in (0, 1):
            self._problems[side].join(piece.problems[side])
            self._seen[side].join(piece.seen[side])
            self._lonely[side].join(piece.lonely[side])
            self._only[side].append(piece.only[side])
        self._handed_on += piece.handed_on
        self._recomputed += piece.recomputed
        self._num_apart += piece.num_apart
        if piece.judged is None or piece.steps is None:
            return

        @cache
        def rows() -> Compared:
            return self._pieces.rows(piece.first, piece.last) if piece.rows is None else piece.rows

        self._moved = [
            one | two for one, two in zip(self._moved or [set[str]() for _ in piece.moved], piece.moved, strict=True)
        ]
        found = self._beyond_noise.of(piece.judged, piece.measured, rows)
        self._naming.add(piece.steps, found, rows)
        self._differing.append(found.differing)
        self._counts += np.array([getattr(found, name) for name in _COUNTED])
        self._partial += found.partial
        self._unread += found.unread
        self._compared.append(piece.compared)

    def refuse_nothing(self, a: Run, b: Run, selection: Selection, hints: Sequence[RenameHint]) -> None:
        """Say why there is nothing to compare, if there is not.

        Raises:
            LookupFailedError: nothing is selected, or the runs have nothing in common.
        """
        if self._compared:
            return
        for run, seen in zip((a, b), self._seen, strict=True):
            if not seen.num_rows:
                raise LookupFailedError(f"{run.path}: has no rows, so there is nothing to compare")
            if not seen.num_selected:
                raise selection.explain_nothing(seen.table(), f"{run.path}")
        lines = ", ".join(hint.line for hint in hints[:_MAX_LISTED])
        renamed = f"; if modules were renamed, --rename takes a file, such as of these lines: {lines}" if hints else ""
        raise LookupFailedError(f"{a.path} and {b.path} have no value in common: {self._reason(selection)}{renamed}")

    def refuse_still(self, a: Run, noise: Sequence[Run]) -> None:
        """Refuse a noise run that has no noise: it would make an error of every rounding.

        Raises:
            LookupFailedError: one is equal to the first run.
        """
        for run, roots in zip(noise, self._moved, strict=True):
            if not roots:
                jitter = " although it was recorded with RECORDER_JITTER" if run.jitter else ""
                raise LookupFailedError(
                    f"{run.path}: the --noise twin moved nothing{jitter}: all its values are equal to those of "
                    f"{a.path}; record it with RECORDER_JITTER=1 on inputs that are floating or go through an "
                    "embedding, or leave --noise out"
                )

    def _reason(self, selection: Selection) -> str:
        for column, what in (("step", "steps"), ("root", "roots"), ("module_path", "modules"), ("site", "sites")):
            one, two = (seen.known(column, selection) for seen in self._seen)
            if not set(one) & set(two):
                return f"{what} are {_listed(one)} in the one, {_listed(two)} in the other"
        if self._num_apart:
            return f"of what both have, {_APART}"
        return "no step has the same module, site, name, phase and mode in both"

    def result(self, *, common: bool, damage: list[str]) -> Diff:
        """All of it, once every range is in."""
        table = pa.concat_tables(self._differing)
        steps = [seen.steps for seen in self._seen]
        only = [_joined(found) for found in self._only]
        lacks = sum(found.num_rows for found in only)
        counts = dict(zip(_COUNTED, map(int, self._counts), strict=True))
        why = {_SUMMANDS: counts["summands"], _PRINTS: counts["by_print_alone"], _APART: self._num_apart}
        by_nothing, still = counts["by_nothing"], set(table.column("root").to_pylist()).difference(*self._moved)
        left_out = [LeftOut(num, text) for text, num in why.items() if num]
        differs = bool(table.num_rows or (lacks and not common))
        is_open = bool(self._unread or damage or (by_nothing and not common))
        so_far = "equal as far as compared" if is_open or left_out else "equal"
        return Diff(
            is_equal=not differs and not is_open,
            verdict="different" if differs else so_far,
            first=_first(table),
            culprits=self._naming.culprits,
            table=table,
            modules=_by_module(table, pa.concat_tables(self._compared)),
            only_a=only[0],
            only_b=only[1],
            num_compared=counts["num_pairs"] + self._num_apart,
            num_by_fingerprint=counts["by_fingerprint"],
            num_by_values=counts["by_values"],
            num_by_statistics=counts["by_statistics"],
            num_incomparable=by_nothing,
            num_bare=counts["bare"] - counts["summands"],
            left_out=left_out,
            unread=dict(self._unread),
            damage=damage,
            partial=[Partial(run, json.loads(ranks), num) for (run, ranks), num in sorted(self._partial.items())],
            steps_only_a=sorted(steps[0] - steps[1]),
            steps_only_b=sorted(steps[1] - steps[0]),
            problems_a=self._problems[0].texts(),
            problems_b=self._problems[1].texts(),
            num_handed_on_a=int(self._handed_on[0]),
            num_handed_on_b=int(self._handed_on[1]),
            num_recomputed_a=int(self._recomputed[0]),
            num_recomputed_b=int(self._recomputed[1]),
            drifted=self._beyond_noise.drifted,
            loud_noise=self._beyond_noise.loud,
            still_roots=sorted(still) if self._moved else (),
        )


def _by_value(rows: Any) -> Any:
    """How many rows each value has, and at which steps, in their order."""
    aggregates = [([], "count_all"), ("step", "min"), ("step", "max")]
    return rows.group_by(_VALUE, use_threads=False).aggregate(aggregates).rename_columns(_ONLY)


def _joined(pieces: Sequence[Any]) -> Any:
    """The same of several ranges."""
    aggregates = [("rows", "sum"), ("first_step", "min"), ("last_step", "max")]
    return pa.concat_tables(pieces).group_by(_VALUE, use_threads=False).aggregate(aggregates).rename_columns(_ONLY)


def _by_module(table: Any, compared: Any) -> Any:
    """Differing modules in the order in which they first differ."""
    groups = group_rows(table, _MODULE)
    firsts = table.take(pa.array(groups.firsts))
    order = np.argsort(groups.ids, kind="stable")
    starts = np.searchsorted(groups.ids[order], np.arange(groups.num_groups))
    columns = {name: firsts.column(name) for name in (*_MODULE, "step", "site", "name", "kind")}
    columns["differing"] = pa.array(np.bincount(groups.ids, minlength=groups.num_groups))
    totals = compared.group_by(_MODULE).aggregate([("count_all", "sum")]).to_pylist()
    of_module = {tuple(total[name] for name in _MODULE): total["count_all_sum"] for total in totals}
    keys = zip(*(firsts.column(name).to_pylist() for name in _MODULE), strict=True)
    columns["compared"] = pa.array([of_module[key] for key in keys], pa.int64())
    for name in ("max_abs", "of_max", "max_rel", "max_ulp", "statistic_rel"):
        values = numbers(table.column(name))
        columns[name] = _extreme(np.fmax, values, order, starts)
    by_statistics = np.bincount(groups.ids, table.column("statistic").is_valid().to_numpy(), groups.num_groups)
    columns["by_statistics"] = pa.array(by_statistics.astype(np.int64))
    columns["min_cosine"] = _extreme(np.fmin, numbers(table.column("cosine")), order, starts)
    for name in ("nonfinite_a", "nonfinite_b"):
        counts = integers(table.column(name), 0)
        columns[name] = pa.array(np.add.reduceat(counts[order], starts) if len(starts) else counts)
    return pa.table(columns).rename_columns(
        ["first_step" if n == "step" else f"first_{n}" if n in ("site", "name", "kind") else n for n in columns]
    )


def _extreme(function: np.ufunc, values: Floats, order: Integers, starts: Integers) -> Any:
    """Of each group, without nulls; null where there is nothing else."""
    found = function.reduceat(values[order], starts) if len(starts) else values
    return pa.array(found, mask=np.isnan(found))


def _first(table: Any) -> Difference | None:
    if not table.num_rows:
        return None
    row = table.slice(0, 1).to_pylist()[0]
    return Difference(**{name: row[name] for name in Difference._fields})


def _listed(values: Sequence[Any]) -> str:
    shown = [repr(value) for value in values]
    if len(shown) > _MAX_LISTED:
        shown = [*shown[: _MAX_LISTED - 1], "...", shown[-1]]
    return ", ".join(shown)
