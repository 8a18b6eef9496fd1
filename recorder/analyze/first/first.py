"""Finds the first NaN or infinity of a run and the first replica that differs; makes the output of `recorder first`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...checks.rows import HARMLESS
from ...numerics.keys import by_key
from ...run.notes import damage, layout_problems, left_out, raised, superseded
from ...run.reply import Reply, Table, plain
from ...run.run import Run
from ...run.step_ranges import Attempts, cut_rows
from ...sites import GIVEN_SITES, NUMBERS
from ...system.text import MODEL, counted, listed, nonfinite_in_words, number, steps_in_words, value_in_words
from .nonfinite import NonFiniteFinder, NonFiniteTensor, probed_health
from .replica_groups import BROADCAST, NEVER, OWN, Differing, RankValue, factor_of, named_ranks, ranks_in_words
from .replicas import FINDINGS, RANGE_ROWS, ApartByProbe, ReplicaFinder, apart_by_probe
from .timeline import FirstRows, RecordedValue, Timeline, whole_rows

_NOUNS = {"param": "parameter", "grad": "gradient", "optim": "optimizer state"}


class First(NamedTuple):
    """What went wrong first in a run: the first value that is not finite, and the first replica that differs."""

    nonfinite: NonFiniteTensor | None
    """The first NaN or infinity; None if all values are finite."""
    num_nonfinite: int
    num_nonfinite_modules: int
    num_known: int
    """The number of recorded values that were checked for NaN and infinity."""
    has_masks: bool
    """Whether some values are infinite as masks are. Infinities of masks are not counted."""
    steps: list[int]
    replica: Differing | None
    """The first parameter, gradient or optimizer state that should be equal on several ranks and is not."""
    replica_probed: ApartByProbe | None
    """The first value that differs in the probe (one number per value and step) before replicas differ in rows."""
    differing: list[tuple[str, str, str]]
    """The module, site and name of every value whose replicas differ, in the order of their first differences."""
    buffers: list[Differing]
    """The buffers that differ between ranks. Only a buffer with `is_stale` counts as something that went wrong."""
    num_compared: int
    """The number of values whose replicas were compared, including buffers."""
    num_compared_of: dict[str, int]
    """The number of values whose replicas were compared, by site."""
    steps_compared: list[int]
    """The steps at which replicas of parameters, gradients or optimizer states were compared."""
    not_recorded: list[str]
    """The sites in `FINDINGS` (parameters, gradients, optimizer states) of which the run has no row."""
    why_none_compared: str
    """The reason why only buffers were compared; empty if other replicas were compared, too."""
    notes: list[str]
    """Notes on values that the search did not count, and on values that it could not read."""

    @property
    def is_found(self) -> bool:
        """Whether something went wrong in the run."""
        has_replica = self.replica is not None or self.replica_probed is not None
        return self.nonfinite is not None or has_replica or any(one.is_stale for one in self.buffers)

    @property
    def all_finite(self) -> str:
        """A sentence that says how many values are known to be finite; empty if a value is not finite."""
        if self.nonfinite is not None:
            return ""
        if not self.num_known:
            return "no value was judged for NaN or infinity: no row has statistics (recorder check reads keep=probe)"
        what = "no NaN, and no value turned infinite," if self.has_masks else ""
        what = "no NaN, and no infinity that reached a later value," if HARMLESS in "".join(self.notes) else what
        where = f" of {steps_in_words(self.steps)}" if self.steps else ""
        return f"{what or 'no NaN or infinity'} in {counted(self.num_known, 'recorded value')}{where}"

    @property
    def replicas_agree(self) -> str:
        """A sentence that names the replicas that agree and the sites without rows; empty unless all replicas agree."""
        numbers = {site: self.num_compared_of[site] for site in FINDINGS if site in self.num_compared_of}
        if self.replica is not None or not numbers:
            return ""
        *nouns, last = (_NOUNS[site] for site in numbers)
        what = f"{', '.join(nouns)} or {last}" if nouns else last
        missing = " and ".join(f"{_NOUNS[site]}s" for site in self.not_recorded)
        rest = f"; {missing} not recorded" if missing else ""
        at = None if self.nonfinite is None else self.nonfinite.value.step
        if at is not None and at not in self.steps_compared:
            rest += f"; replicas were not compared at step {at}, because none was recorded"
        of = f"{counted(sum(numbers.values()), 'value')} of {steps_in_words(self.steps_compared)}"
        return f"no {what} differs between its replicas ({of} compared{rest})"


def first(run: Run) -> First:
    """Return the first value that is not finite, and the first replica that differs.

    Values are ordered by step, then by the order of execution on each rank. A value that is infinite from its first
    record on, with no more infinities later, or whose infinities reach no later value of the step, is taken for a mask
    and only noted. NaN always counts. Replicas are parameters, gradients and optimizer states of data-parallel ranks.
    Buffers are reported apart, because a forward may update each rank's buffer until DDP broadcasts the first rank's
    buffer. Buffers that differ count only if DDP was told not to broadcast them, and nothing else makes them equal.
    """
    attempts = Attempts(run)
    nonfinite, replicas = NonFiniteFinder(), ReplicaFinder(run)
    firsts: FirstRows | None = None
    seen: set[int] = set()
    num_superseded = 0
    ranges = run.view().windows(RANGE_ROWS)
    with cut_rows(run, ranges, whole_rows) as tables_of:
        for steps in ranges:
            timeline = Timeline(run, attempts, steps, tables_of(steps), firsts)
            firsts = nonfinite.add(timeline)
            replicas.add(timeline)
            num_superseded += timeline.num_superseded
            seen |= set(timeline.table.column("step")[timeline.num_firsts :].unique().to_pylist())
            del timeline  # this frees the rows before the next timeline is made
    bad = nonfinite.found()
    if bad is not None:
        bad = bad._replace(probed=probed_health(run, bad.value))
    until = math.inf if replicas.first is None else replicas.first.value.step
    probed = [one for one in apart_by_probe(run, replicas.equal_values) if one.step < until]
    notes = [*nonfinite.notes(), *replicas.notes(), *_hooks_behind(run, bad)]
    notes += [f"not compared: {problem}" for problem in layout_problems(run) or ()]
    if num_superseded:
        notes.append(f"{num_superseded} rows were left out, because a restart repeated their steps")
    notes += [*filter(None, [left_out(run)]), *run.endings, *raised(run), *superseded(run)]
    return First(
        nonfinite=bad,
        num_nonfinite=nonfinite.num_values,
        num_nonfinite_modules=len(nonfinite.modules),
        num_known=nonfinite.num_known,
        has_masks=bool(nonfinite.masks),
        steps=sorted(seen),
        replica=replicas.first,
        replica_probed=min(probed, key=lambda one: one.step, default=None),
        differing=[(one.module_path, one.site, one.name) for one in replicas.values.values()],
        buffers=replicas.buffers,
        num_compared=sum(replicas.num_compared.values()),
        num_compared_of=dict(replicas.num_compared),
        steps_compared=sorted(replicas.steps),
        not_recorded=replicas.not_recorded,
        why_none_compared=replicas.why_none(),
        notes=notes,
    )


def first_nonfinite(run: Run, until: int) -> NonFiniteTensor | None:
    """Return the first value up to step `until` that is not finite. Gradients of skipped updates do not count."""
    finder, attempts = NonFiniteFinder(), Attempts(run)
    firsts: FirstRows | None = None
    ranges = [steps for steps in run.view().windows(RANGE_ROWS) if steps[0] <= until]
    with cut_rows(run, ranges, whole_rows) as tables_of:
        for steps in ranges:
            firsts = finder.add(Timeline(run, attempts, steps, tables_of(steps), firsts))
            if finder.first is not None:
                break
    return finder.first if finder.first is not None and finder.first.value.step <= until else None


def sentence(bad: NonFiniteTensor) -> str:
    """Return a sentence that says where the first value that is not finite was seen."""
    where = "in the global tensor" if bad.value.rank is None else f"rank {bad.value.rank}"
    return f"first NaN or infinity: step {bad.value.step}, {_value(bad.value)}, {where}"


def _hooks_behind(run: Run, bad: NonFiniteTensor | None) -> list[str]:
    if bad is None:
        return []
    module = None if bad.before is None else run.modules.get((bad.before.root, bad.before.module_path))
    if module is not None and module.foreign_hooks:
        hooks = f"hooks of the program on {module.path!r} ({', '.join(module.foreign_hooks)})"
        what = "their changes of a value are not recorded there, and first show here"
        return [f"between the last healthy value and this one ran {hooks}: {what}"]
    if listed := run.foreign_hooks:
        return [f"the program's own hooks may change these modules' values after they were recorded: {listed}"]
    return []


_LIBRARY = "site-packages/torch/"
_MAX_LISTED = 5
_MAX_RANKS = 8
_BUFFERS = {
    BROADCAST: "no finding: the forward updates each rank's own, and DDP broadcasts the first rank's before the next",
    OWN: "no finding: FSDP does not broadcast buffers, and keeps each rank's own buffers",
    None: "no finding: a forward may update each rank's own buffers, and it is unknown whether they are broadcast",
}
_STALE = "in no later record are they equal: DDP has broadcast_buffers=False"
_HEALED = "no finding: DDP has broadcast_buffers=False, but in their last record they are equal again"


def reply_of(run: Run, answer: First) -> Reply:
    """Return the output of `recorder first`. The exit code is 1 if it found something, or damage or a kill hides it."""
    return Reply(
        members=lambda: {"run": str(run.path), "found": answer.is_found, "problems": run.problems, **plain(answer)},
        parts=lambda: _parts(run, answer),
        exit_code=int(answer.is_found or bool(run.problems or run.lost)),
    )


def _parts(run: Run, answer: First) -> Iterator[str | Table]:
    if run.lost:
        yield f"{run.name}: nothing was judged, because there are no rows"
    else:
        yield _nonfinite_part(run, answer)
        yield from _replica_parts(run, answer)
        yield from _buffer_lines(run, answer.buffers)
    for note in answer.notes:
        yield f"note: {note}"
    if run.problems:
        yield f"note: the run is damaged, and what cannot be read was not looked at: {damage(run)}"


def _nonfinite_part(run: Run, answer: First) -> str | Table:
    bad = answer.nonfinite
    if bad is None:
        return f"{run.name}: {answer.all_finite}"
    affected = f"{counted(answer.num_nonfinite, 'value')} of {counted(answer.num_nonfinite_modules, 'module')}"
    rows = [*_nonfinite_rows(bad), ("affected", f"{affected}, NaN or infinite")]
    source = run.manifest.merged_from
    if bad.value.rank is None and source is not None:
        rows.append(("which rank", f"ask the run that was merged: recorder first {source.path}"))
    return _pairs_table(f"{run.name}: {sentence(bad)}", rows)


def _nonfinite_rows(bad: NonFiniteTensor) -> Iterator[tuple[str, str]]:
    yield from _where(bad.value)
    at_least = "at least " if bad.is_counted_at_least else ""
    yield "counts", f"{at_least}{bad.nan_count} NaN, {bad.inf_count} infinite of {counted(bad.numel, 'element')}"
    if bad.is_skipped:
        yield "update", "skipped by GradScaler at this step, as it does where scaled gradients overflow"
    if bad.num_gradients > 1:
        what = f"{bad.num_gradients} gradients of parameters are not finite at this step"
        yield "order", f"{what}; only site=grad_output at this step would show which the backward made first"
    yield "values before it", f"{bad.num_before} of this step on its rank"
    before = bad.before
    healthy = "nothing" if before is None else f"{_value(before)}, step {before.step}{_when(before)}"
    is_early = before is None or before.step < bad.value.step or (before.site, before.module_path) == ("input", "")
    if bad.probed is not None and bad.probed.before and is_early:
        before_it = bad.probed.model + value_in_words(*bad.probed.before)
        healthy = f"{before_it}, step {bad.value.step} (by keep=probe{bad.probed.calls})"
    elif bad.probed is not None and bad.value.phase != "forward" and before is not None:
        healthy += " (the last that has a row; the order of a backward is not known)"
    yield "last healthy value", healthy
    for other in bad.beside:
        name = f"{other.site} {other.name}" if other.site in GIVEN_SITES and other.name else other.name or other.site
        name = name if other.site in NUMBERS else f"its {name}"
        yield "at the same step", f"{name} holds {nonfinite_in_words(other.nan_count, other.inf_count)}"
    if bad.objectives:
        yield "objective", f"{listed(map(repr, bad.objectives), 4)} alone: the gradient of each other one is finite"
    probed = None if bad.probed is None else bad.probed.last_step
    if probed is not None and (bad.last_healthy is None or bad.last_healthy.step < probed):
        yield "last healthy", f"step {probed} (by keep=probe, which has one number of it at every step)"
    elif bad.last_healthy is None:
        yield "last healthy record", "none: no earlier record is healthy"
    else:
        steps = counted(bad.num_steps_healthy, "step")
        last, born = bad.last_healthy.step, bad.value.step
        between = f"step {last + 1}" if born == last + 2 else f"steps {last + 1} to {born - 1}"
        unknown = f"; no record of it at {between}" if born > last + 1 else ""
        yield "last healthy record", f"step {last} (recorded healthy at {steps}{unknown})"


def _replica_parts(run: Run, answer: First) -> Iterator[str | Table]:
    differing, probed = answer.replica, answer.replica_probed
    if probed is not None:
        ranks = named_ranks(probed.ranks) + (" unlike the other ranks" if probed.is_odd else " hold different ones")
        value = f"{probed.key[0]}: " * run.has_models + value_in_words(*probed.key[1:])
        title = f"first replica that differs: step {probed.step}, {value}, {ranks}"
        factor = f"; {probed.factor}" if probed.factor else ""
        alone, unseen = (" alone", "; no recorded step shows it") if differing is None else ("", "")
        title += f", by the probe{alone} (equal at step {probed.equal_step}{unseen})"
        yield f"{run.name}: {title}{factor}"
    elif differing is None:
        why = answer.why_none_compared or "there is no parameter, gradient or optimizer state to compare"
        yield f"{run.name}: {answer.replicas_agree or f'replicas: not compared, because {why}'}"
    if differing is not None:
        recorded = "first replica that differs" if probed is None else "first replica that differs in the rows"
        title = f"{recorded}: step {differing.value.step}, {_value(differing.value)}"
        yield _pairs_table(f"{run.name}: {title}, ranks {_groups(differing)}", _replica_rows(answer, differing))
        if differing.ranks:
            yield _ranks_table(differing.ranks)


def _buffer_lines(run: Run, buffers: Sequence[Differing]) -> Iterator[str]:
    in_order = sorted(buffers, key=lambda buffer: not buffer.is_stale)
    meanings = (_STALE if one.is_stale else _HEALED if one.sync == NEVER else _BUFFERS[one.sync] for one in in_order)
    for meaning, some in by_key(zip(meanings, in_order, strict=True)).items():
        yield f"{run.name}: {counted(len(some), 'buffer')} of which ranks hold different values"
        yield f"  {meaning}"
        for buffer in some[:_MAX_LISTED]:
            ranks = f"ranks {_groups(buffer)} (by {buffer.by})"
            yield f"  {_value(buffer.value)}: first at step {buffer.value.step}, {ranks}"
        if len(some) > _MAX_LISTED:
            yield f"  and {len(some) - _MAX_LISTED} more; --json has all"


def _replica_rows(answer: First, differing: Differing) -> Iterator[tuple[str, str]]:
    yield from _where(differing.value)
    yield "seen by", differing.by
    if differing.is_assumed:
        yield "replicas", "assumed: neither DDP nor FSDP was seen around this model"
    equal = differing.last_equal
    yield "last equal", "no earlier record shows them equal" if equal is None else f"step {equal.step}"
    if told := factor_of(differing):
        yield "factor", told
    names = [value_in_words(*one) for one in answer.differing]
    more = f" and {len(names) - _MAX_LISTED} more; --json has all" if len(names) > _MAX_LISTED else ""
    yield "differ at any step", f"{counted(len(names), 'value')}: {', '.join(names[:_MAX_LISTED])}{more}"


def _ranks_table(values: Sequence[RankValue]) -> Table:
    numbers, whole = ("rank", "mean", "l2", "absmax"), ("shape", "fingerprint")
    rows = [[str(v.rank), *map(number, v[2:5]), v.shape, v.fingerprint or ""] for v in values[:_MAX_RANKS]]
    more = f" (the first {_MAX_RANKS} of {len(values)} ranks; --json has all)" if len(values) > _MAX_RANKS else ""
    return Table((*numbers, *whole), rows, numbers=numbers, whole=whole, title=f"what each rank holds{more}")


def _pairs_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    return Table(("what", "found"), list(rows), prose=("found",), title=title)


def _where(value: RecordedValue) -> Iterator[tuple[str, str]]:
    source = "" if _LIBRARY in value.source.replace("\\", "/") else value.source
    info = " ".join(filter(None, (value.module_class, source)))
    yield "module", f"{value.model}{value.module_path or MODEL}{', ' if info else ''}{info}"
    named = f", {value.name}" if value.name else ""
    yield "value", f"{value.site}{named}: {value.dtype} {value.shape}, {value.phase}, {value.mode}"
    yield "when", f"step {value.step}{_when(value)}"


def _value(value: RecordedValue) -> str:
    return value.model + value_in_words(value.module_path, value.site, value.name)


def _when(value: RecordedValue) -> str:
    micro_step = "" if value.micro_step is None else f", micro_step {value.micro_step}"
    repeat = f", repeat {value.repeat}" if value.repeat else ""
    attempt = f", attempt {value.attempt}" if value.attempt else ""
    return f"{micro_step}, call {value.call}{repeat}{attempt}"


def _groups(differing: Differing) -> str:
    shown = [ranks_in_words(ranks) for ranks in differing.groups[:_MAX_LISTED]]
    return " | ".join(shown) + (" | ..." if len(differing.groups) > _MAX_LISTED else "")
