"""Compares two runs value by value, in bounded memory. The runs may split their tensors over ranks differently.

Payloads are not read where fingerprints are equal. Statistics are compared only where a payload is missing.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ...columns import note_members
from ...errors import LookupFailedError
from ...numerics.keys import holds
from ...run.finding import shortest_text_of
from ...run.run import RecordedModule, Run
from ...run.selection import GlobalOptions, Selection
from ...run.step_ranges import MAX_ROWS, Mapper, global_step_ranges, map_serially
from ...system.text import listed
from ..first.first import first_nonfinite, sentence
from .compare import Tolerance
from .culprit_findings import Culprit, CulpritFinder
from .culprit_search import PHASES
from .noise import BeyondNoise
from .pairs import PairedSteps, Verdicts
from .probe_culprit import ProbesCompared, compare_probes
from .renames import NO_RENAMES, RenameHint, Renames, rename_hints
from .step_range import Diff, DiffOptions, LackingRanks, LeftOut, PayloadReport, RangeComparer, RangeResult, SideTotals

_SUMMANDS = (
    "the values are sums over ranks, whose values were not kept; the ranks that add to them are not the same in both "
    "runs, or have no statistics"
)
_PRINTS = "the values have only fingerprints, which noise changes: record statistics or tensors"
_ON_OTHER_PARTS = "the values are of single ranks, which worked on different parts of the batch"
_IN_OTHER_MICRO_STEPS = "the runs divide the same batch into different numbers of micro-steps (gradient accumulation)"
_FOUND_LOSS = (
    "the recorder found the loss by itself; such a loss is compared only if it is that of an evaluation, at the same "
    "steps and ranks of both runs; a loss that the program gives to recorder.scalar is always compared"
)
_MAX_LISTED = 6


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
    mapper: Mapper = map_serially,
) -> Diff:
    """Compare two runs value by value, as global tensors: the ranks' chunks of a tensor put together.

    Values are paired by root, step, module path, site, name, micro-step, call, repeat, mode and phase. Two elements
    count as equal if they are equal (NaN equals NaN) or within any of the tolerances. Different types are compared in
    the wider type.

    Args:
        a: the first run, from `open_run`; results are in the order of execution of this run.
        b: the second run, from `open_run`.
        module: a module's path, or a glob over paths.
        site: one site, or several with commas.
        name: a name at the site, or a glob.
        step: a step, or several as in rules: ``"0:100"``, ``"::10"``.
        rtol: the allowed difference relative to the larger magnitude, as in `math.isclose`.
        atol: the allowed absolute difference.
        ulp: the allowed number of representable numbers between two floats of one type.
        noise: runs that differ from `a` by noise alone: repeats, or repeats with the setting `jitter` (twin runs). A
            value counts as different only if it differs by more than `drift.MARGIN` times as much as in these runs.
            `drift` describes the exception for parameters whose update rounding decides.
        renames: the names that modules of `b` have in `a`, from `read_renames`. All results use the names of `a`.
        common: True to ignore values, and data of values, that only one run has.
        loss: how activation gradients of the ranks are scaled, in both runs; see `Run.view`.
        layouts: how the ranks' chunks of some values lie in the global tensor, in both runs; see `Run.view`.
        report: called with the number of payload bytes done since its last call.
        mapper: runs the ranges of steps, in this process or in others.

    Raises:
        LookupFailedError: nothing is selected; the runs have no value in common (the message says why); `loss`,
            `layouts` or a tolerance is invalid; a rename fits no module; or a noise run is of another model, or does
            not differ from the first run.
    """
    options = DiffOptions(
        selection=Selection(module=module, site=site, name=name, step=step),
        tolerance=Tolerance(rtol, atol, ulp),
        global_view=GlobalOptions(across_ranks=True, loss=loss, layouts=layouts),
        noise=noise,
        renames=renames,
        common=common,
    )
    return compare_runs(a, b, options, report=report, mapper=mapper)


def compare_runs(
    a: Run, b: Run, options: DiffOptions, *, report: Callable[[int], None] = lambda num_bytes: None,
    mapper: Mapper = map_serially,
) -> Diff:  # fmt: skip
    """Compare two runs as `diff` does, and raise the same errors. `options` has the arguments of `diff`."""
    selection, renames, noise = options.selection, options.renames, options.noise
    selection.check(a, b)
    options.global_view.check(a, b)
    names = {path: renames.old(path) for path in _module_paths(b)}
    renames.check_used(names)
    own_names = _unpaired_names(_module_paths(a), names)
    sides = SideTotals(selection, own_names[0]), SideTotals(selection, own_names[1])
    _check_twins(a, b, noise)
    arguments = (a, b, options, own_names, PayloadReport(report))
    comparer = RangeComparer(*arguments)
    # The noise of a small tensor is its largest noise at any step of a range. So with noise runs the ranges are as long
    # as possible.
    windows = [view.windows(MAX_ROWS) if noise else global_step_ranges(view) for view in comparer.views]
    comparison = _Comparison(comparer, report, sides)
    for compared in mapper(RangeComparer, arguments, _ranges(*windows)):
        comparison.add(compared)
        del compared  # this frees the rows before the next rows are read
    unpaired = sides[0].unpaired, sides[1].unpaired
    hints = rename_hints(*unpaired, renames, names)
    comparison.refuse_nothing(a, b, options, hints)
    comparison.refuse_still(a, noise)
    shards = (shard for run in (a, b, *noise) for writer in run.writers for shard in writer.shards)
    damage = [text for shard in shards for text in shard.damage]
    total = comparison.result(common=options.common, damage=damage)._replace(hints=hints)
    total = _with_probe(total, compare_probes(a, b, options), a)
    if hints:  # both runs probably have these modules, under different names
        unpaired_names = {name for one in unpaired for name in one.own_names}
        culprits = [one for one in total.culprits if one.alone_in is None or one.seen_at not in unpaired_names]
        total = total._replace(culprits=culprits)
    modules_b = {(root, renames.old(path)): one for (root, path), one in b.modules.items()}
    lacking = {"a": modules_b, "b": a.modules}
    total = total._replace(culprits=[_explained(one, lacking.get(one.alone_in or "", {})) for one in total.culprits])
    if total.verdict == "different":
        total = total._replace(culprits=_with_nonfinite(total, {"a": a, "b": b}, sides, options))
    if not renames:
        return total
    return total._replace(unpaired_a=[*unpaired[0].own_names], unpaired_b=[*unpaired[1].own_names.values()])


def _explained(culprit: Culprit, lacking: Mapping[tuple[str, str], RecordedModule]) -> Culprit:
    """Add to a culprit why one run lacks a gradient, if known. `lacking` are the modules of the run that lacks it."""
    module = lacking.get((culprit.root, culprit.seen_at))
    if module is None or culprit.module_path is None or culprit.site != "grad":
        return culprit
    other = "B" if culprit.alone_in == "a" else "A"
    if culprit.name in module.untrained:
        steps = f"the optimizer of {other} that has {culprit.name} never steps"
        return culprit._replace(
            why=steps if culprit.name in module.rates else f"no optimizer of {other} has {culprit.name}"
        )
    if culprit.name in module.frozen:
        return culprit._replace(why=f"{culprit.name} requires no gradient in {other}")
    return culprit


def _with_probe(total: Diff, probes: ProbesCompared, a: Run) -> Diff:
    """Add the computation whose number of the probe differs first to the culprits, if it is before all of them.

    The rows of a step tell more, if there are rows of the site, or of what the same computation was given.
    """
    total = total._replace(num_probed=probes.num_compared, num_probes_differing=probes.num_differing)
    if (culprit := probes.culprit) is None:
        return total
    first = min(map(_time, total.culprits), default=(culprit.step + 1, 0))
    is_first = _time(culprit) < first
    if is_first and culprit.step == first[0]:
        step = culprit.step
        is_first = not a.table(["site"], pc.field("site") == culprit.site, steps=(step, step + 1)).num_rows
    culprits = [culprit, *total.culprits] if is_first else total.culprits
    return total._replace(culprits=culprits, verdict="different", is_equal=False)


def _time(culprit: Culprit) -> tuple[int, int]:
    return culprit.step, PHASES.index(culprit.phase)


def _with_nonfinite(
    total: Diff, runs: Mapping[str, Run], sides: tuple[SideTotals, SideTotals], options: DiffOptions
) -> list[Culprit]:
    """Put a run's first NaN or infinity before the culprits, if it comes first and only this run has recorded it.

    The probe, which checks every value, records a value when it is not finite. The other run, where the value is
    finite, has no record to compare.
    """
    culprits, steps = total.culprits, {name: side.steps for name, side in zip("ab", sides, strict=True)}
    later = culprits[0] if culprits else None
    for name, only, own_steps in (("a", total.only_a, total.steps_only_a), ("b", total.only_b, total.steps_only_b)):
        other = "b" if name == "a" else "a"
        last = max(steps[other], default=-1) if later is None else later.step
        candidates = [step for step in (*own_steps, *only.column("first_step").to_pylist()) if step <= last]
        bad = first_nonfinite(runs[name], last) if candidates else None
        if bad is None or bad.value.step < min(candidates):
            continue
        value, path = bad.value, bad.value.module_path if name == "a" else options.renames.old(bad.value.module_path)
        names: dict[str, Any] = {"step": value.step, "module_path": path, "site": value.site, "name": value.name}
        is_open = later is None or value.step < later.step or later.site == "scalar" or later.alone_in == name
        next_step = min((step for step in steps[other] if step >= value.step), default=None)
        if not is_open or next_step is None or first_nonfinite(runs[other], next_step) is not None:
            continue
        if not options.selection.narrow(pa.table({column: [one] for column, one in names.items()})).num_rows:
            continue
        ranks = [] if value.rank is None else [value.rank]
        phase = "update" if value.site in ("param", "optim") else value.phase.replace("optimizer", "reduction")
        command = shlex.join(["recorder", "first", shortest_text_of(runs[name].path, runs[name].name)])
        figures: dict[str, Any] = {f"nonfinite_{name}": bad.nan_count + bad.inf_count}
        told = Culprit(
            **names, phase=phase, root=value.root, seen_at=path, micro_step=value.micro_step, call=value.call,
            rank=value.rank, ranks=ranks, why="", alone_in=name, **figures,
            hint=f"{name.upper()} has its {sentence(bad)}; the healthy values before it: {command}",
        )  # fmt: skip
        same = [one for one in culprits if (one.step, one.seen_at, one.alone_in) == (value.step, path, name)]
        return [told, *(one for one in culprits if one not in same)]
    return culprits


def payload_bytes(run: Run) -> int:
    """Return the payload bytes of a run. The numbers that `report` receives add up to this sum for each run."""
    column = run.table(["payload_bytes"]).column("payload_bytes")
    return int(pc.sum(column).as_py() or 0)


def _check_twins(a: Run, b: Run, noise: Sequence[Run]) -> None:
    for run in noise:
        if run.path.resolve() in (a.path.resolve(), b.path.resolve()):
            raise LookupFailedError(f"{run.path}: is one of the two compared runs; --noise needs a third run")
        lost = [path for path in a.module_paths if path not in set(run.module_paths)]
        if lost:
            what = f"a twin has the modules of {a.path}, with the same rules"
            raise LookupFailedError(f"{run.path}: {what}; it lacks {listed(map(repr, lost))}")


def _module_paths(run: Run) -> list[str]:
    """Return the paths of the modules with rows. Reads shard by shard, because all rows need too much memory."""
    paths: dict[str, None] = {}
    for writer in run.writers:
        for shard in writer.shards:
            for batch in shard.columns(["module_path"]):
                paths |= dict.fromkeys(batch.column("module_path").unique().to_pylist())
    return list(paths)


def _unpaired_names(paths: Sequence[str], names: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return, for each run, the modules that only it has: a map from the name after renaming to the run's own name."""
    there, theirs = set(paths), set(names.values())
    alone_a = {path: path for path in paths if path not in theirs}
    return alone_a, {name: own for own, name in names.items() if name not in there}


def _ranges(*windows: list[tuple[int, int]]) -> Iterator[tuple[int | None, int | None]]:
    """Yield ranges of steps that cover all runs, cut wherever a range in the `windows` of some run begins."""
    starts = sorted({first for some in windows for first, _ in some})
    yield from pairwise([None, *starts[1:], None])


class _Comparison:
    """Joins the results of ranges of steps into the result of the comparison. The ranges come in the order of steps."""

    def __init__(
        self, comparer: RangeComparer, report: Callable[[int], None], sides: tuple[SideTotals, SideTotals]
    ) -> None:
        self._comparer, self._report, self._sides = comparer, report, sides
        self._judged: list[Verdicts] = []
        self._compared: list[Any] = []
        self._counts: Counter[str] = Counter()
        self._finder = CulpritFinder(comparer.rows)
        self._beyond_noise = BeyondNoise(comparer.jitter_eps)
        self._moved: list[set[str]] = []

    def add(self, result: RangeResult) -> None:
        """Add the result of the next range. Rows that another process read are read again if a culprit needs them."""
        if result.rows is None:
            self._report(result.num_bytes)
        for side, later in zip(self._sides, result.sides, strict=True):
            side.join(later)
        self._counts[_ON_OTHER_PARTS] += result.num_on_other_parts
        self._counts[_IN_OTHER_MICRO_STEPS] += result.num_in_other_micro_steps
        if result.judged is None or result.steps is None:
            return

        @cache
        def rows() -> PairedSteps:
            return self._comparer.rows(result.first, result.last) if result.rows is None else result.rows

        self._moved = [
            one | two for one, two in zip(self._moved or [set[str]() for _ in result.moved], result.moved, strict=True)
        ]
        beyond = self._beyond_noise.of(result.judged, result.measured, rows)
        self._finder.add(result.steps, beyond, rows)
        self._judged.append(beyond._replace(kinds=beyond.kinds[:0].copy()))  # this would make an object for each pair
        self._compared.append(result.compared)

    def refuse_nothing(self, a: Run, b: Run, options: DiffOptions, hints: Sequence[RenameHint]) -> None:
        if self._compared:
            return
        selection = options.selection
        tables = [run.table(["step", "root", "module_path", "site", "name", "note"]) for run in (a, b)]
        tables[1] = options.renames.apply(tables[1])
        for run, table in zip((a, b), tables, strict=True):
            if not table.num_rows:
                typed = shlex.join(["recorder", "doctor", shortest_text_of(run.path, run.name)])
                raise LookupFailedError(f"{run.path}: has no rows, so there is nothing to compare; why: {typed}")
            if not selection.narrow(table).num_rows and not self._counts[_IN_OTHER_MICRO_STEPS]:
                raise selection.explain_nothing(table, f"{run.path}", run.lost)
        lines = ", ".join(hint.line for hint in hints[:_MAX_LISTED])
        renamed = f"; if modules were renamed, --rename takes a file, such as of these lines: {lines}" if hints else ""
        reason = self._reason(selection, tables)
        raise LookupFailedError(f"{a.path} and {b.path} have no value in common: {reason}{renamed}")

    def refuse_still(self, a: Run, noise: Sequence[Run]) -> None:
        """Raise LookupFailedError if a noise run equals the first run, as then every rounding would be an error."""
        for run, roots in zip(noise, self._moved, strict=True):
            if not roots:
                jitter = " although it was recorded with RECORDER_JITTER" if run.jitter else ""
                raise LookupFailedError(
                    f"{run.path}: the --noise twin moved nothing{jitter}: all its values are equal to those of "
                    f"{a.path}; record it with RECORDER_JITTER=1 on inputs that are floating or go through an "
                    "embedding, or leave --noise out"
                )

    def _reason(self, selection: Selection, tables: Sequence[Any]) -> str:
        for column, what in (("step", "steps"), ("root", "roots"), ("module_path", "modules"), ("site", "sites")):
            distinct = (pa.table({column: table.column(column).unique()}) for table in tables)
            chosen = (selection.only(column).narrow(t) if column in selection.columns else t for t in distinct)
            one, two = (sorted(table.column(column).to_pylist()) for table in chosen)
            if not set(one) & set(two):
                return f"{what} are {listed(map(repr, one))} in one run, {listed(map(repr, two))} in the other"
        notes = [selection.narrow(table).column("note") for table in tables]
        if any(holds(note, lambda text: "found" in note_members(text)).all() for note in notes):
            return _FOUND_LOSS
        if self._counts[_ON_OTHER_PARTS]:
            return f"of the common values, {_ON_OTHER_PARTS}"
        if self._counts[_IN_OTHER_MICRO_STEPS]:
            return f"{_IN_OTHER_MICRO_STEPS}, and values that do not depend on it were not recorded"
        return "no step has the same module, site, name, phase and mode in both"

    def result(self, *, common: bool, damage: list[str]) -> Diff:
        table = pa.concat_tables([one.differing for one in self._judged])
        counts = sum((one.counts for one in self._judged), self._counts)
        unread = sum((one.unread for one in self._judged), Counter[str]())
        partial = sum((one.partial for one in self._judged), Counter[tuple[str, str]]())
        bare_modules = list(dict.fromkeys(path for one in self._judged for path in one.bare_modules))
        a, b = self._sides
        only = [side.only_here() for side in (a, b)]
        lacks = sum(tables.num_rows for tables in only)
        why = {_SUMMANDS: counts["summands"], _PRINTS: counts["by_print_alone"]}
        not_paired = {text: counts[text] for text in (_ON_OTHER_PARTS, _IN_OTHER_MICRO_STEPS)}
        modules = {_SUMMANDS: bare_modules}
        left_out = [LeftOut(num, text, modules.get(text, ())) for text, num in (why | not_paired).items() if num]
        compared = pa.concat_tables(self._compared)
        paths = [set(one.column("module_path").to_pylist()) - {""} for one in (compared, *only)]
        has_common_modules = bool(paths[0]) or not (paths[1] and paths[2])
        by_nothing, still = counts["by_nothing"], set(table.column("root").to_pylist()).difference(*self._moved)
        differs = bool(table.num_rows or (lacks and not common))
        is_open = bool(unread or damage or (by_nothing and not common) or not has_common_modules)
        so_far = "equal as far as compared" if is_open or left_out else "equal"
        return Diff.of(
            table,
            compared,
            is_equal=not differs and not is_open,
            verdict="different" if differs else so_far,
            culprits=self._finder.in_order() if differs else [],
            only_a=only[0],
            only_b=only[1],
            num_compared=counts["num_pairs"] + sum(not_paired.values()),
            num_by_fingerprint=counts["by_fingerprint"],
            num_by_values=counts["by_values"],
            num_by_statistics=counts["by_statistics"],
            num_incomparable=by_nothing,
            num_bare=counts["bare"] - counts["summands"],
            left_out=left_out,
            unread=dict(unread),
            damage=damage,
            partial=[LackingRanks(run, json.loads(ranks), num) for (run, ranks), num in sorted(partial.items())],
            steps_only_a=sorted(a.steps - b.steps),
            steps_only_b=sorted(b.steps - a.steps),
            has_common_modules=has_common_modules,
            problems_a=a.problems.texts(),
            problems_b=b.problems.texts(),
            num_handed_on_a=a.num_handed_on,
            num_handed_on_b=b.num_handed_on,
            num_recomputed_a=a.num_recomputed,
            num_recomputed_b=b.num_recomputed,
            drifted=self._beyond_noise.drifted,
            loud_noise=self._beyond_noise.loud,
            still_roots=sorted(still) if self._moved else (),
        )
