"""The question what went wrong first in a run. Nothing here prints."""

from __future__ import annotations

from typing import NamedTuple

from ...run.notes import layout_problems, left_out
from ...run.run import Run
from ...run.step_ranges import Attempts, cut_rows
from ...system.text import counted, steps_in_words
from .nonfinite import NonFiniteFinder, NonFiniteTensor
from .replica_groups import Differing
from .replicas import FINDINGS, RANGE_ROWS, ReplicaFinder
from .timeline import FirstRows, Timeline, whole_rows

_NOUNS = {"param": "parameter", "grad": "gradient", "optim": "optimizer state"}


class First(NamedTuple):
    """What went wrong first."""

    nonfinite: NonFiniteTensor | None
    """The first NaN or infinity."""
    num_nonfinite: int
    """How many values are not finite, from the first on."""
    num_nonfinite_modules: int
    num_known: int
    """Recorded values of which it is known whether they are finite."""
    has_masks: bool
    """Whether some of them are infinite from their first record on, and so excused."""
    steps: list[int]
    """Steps of the values that were recorded."""
    replica: Differing | None
    """The first parameter, gradient or optimizer state that ranks should share and do not."""
    differing: list[tuple[str, str, str]]
    """Module, site and name of every value that does so, in the order in which each first did."""
    buffers: list[Differing]
    """Buffers that differ between ranks; a finding of its own if one is stale."""
    num_compared: int
    """Replicas that were compared, buffers among them."""
    num_compared_of: dict[str, int]
    """By site, how many."""
    steps_compared: list[int]
    """Steps at which replicas of parameters, gradients or optimizer state were compared."""
    not_recorded: list[str]
    """Of the sites at which replicas that differ are a finding, those of which there is no row."""
    why_none_compared: str
    """Why none were but buffers; empty where some were."""
    notes: list[str]
    """What the search saw and does not count, or could not look at."""

    @property
    def is_found(self) -> bool:
        """Whether something went wrong."""
        return self.nonfinite is not None or self.replica is not None or any(one.is_stale for one in self.buffers)

    @property
    def all_finite(self) -> str:
        """Of which values it is known that they are finite, as a sentence; empty where some are not."""
        if self.nonfinite is not None:
            return ""
        what = "no NaN, and no infinity that was not there from the first record on," if self.has_masks else ""
        where = f" of {steps_in_words(self.steps)}" if self.steps else ""
        return f"{what or 'no NaN or infinity'} in {counted(self.num_known, 'recorded value')}{where}"

    @property
    def replicas_agree(self) -> str:
        """Which replicas agree, at which steps, and what was not recorded, as a sentence.

        It is empty where some differ or none are known.
        """
        numbers = {site: self.num_compared_of[site] for site in FINDINGS if site in self.num_compared_of}
        if self.replica is not None or not numbers:
            return ""
        *nouns, last = (_NOUNS[site] for site in numbers)
        what = f"{', '.join(nouns)} or {last}" if nouns else last
        missing = " and ".join(f"{_NOUNS[site]}s" for site in self.not_recorded)
        rest = f"; {missing} not recorded" if missing else ""
        at = None if self.nonfinite is None else self.nonfinite.value.step
        if at is not None and at not in self.steps_compared:
            rest += f"; replicas were not compared at step {at}, at which none was recorded"
        of = f"{counted(sum(numbers.values()), 'value')} of {steps_in_words(self.steps_compared)}"
        return f"no {what} differs between its replicas ({of} compared{rest})"


def first(run: Run) -> First:
    """The first value that is not finite, and the first replica that differs.

    Time is the step, then the order of execution on each rank. Infinities that were there from a value's first record
    on and do not grow, as in an attention mask, are a note; NaN always counts. Replicas are parameters, gradients and
    optimizer state of data-parallel ranks; buffers are told apart, because a forward may update each rank's own until
    DDP broadcasts the first rank's. They are a finding where DDP was told not to, and nothing else makes them equal.
    """
    attempts = Attempts(run)
    nonfinite_finder, replica_finder = NonFiniteFinder(), ReplicaFinder(run)
    firsts: FirstRows | None = None
    seen: set[int] = set()
    num_superseded = 0
    ranges = run.view().windows(RANGE_ROWS)
    with cut_rows(run, ranges, whole_rows) as tables_of:
        for steps in ranges if len(ranges) > 1 else [None]:
            timeline = Timeline(run, attempts, steps, firsts, tables_of(steps) if steps else None)
            firsts = nonfinite_finder.add(timeline)
            replica_finder.add(timeline)
            num_superseded += timeline.num_superseded
            seen |= set(timeline.table.column("step")[timeline.num_firsts :].unique().to_pylist())
            del timeline  # before the next one is made
    nonfinite, replicas = nonfinite_finder.found(), replica_finder.found()
    notes = [*nonfinite.notes, *replicas.notes, *_hooks_behind(run, nonfinite.first)]
    notes += [f"not compared: {problem}" for problem in layout_problems(run) or ()]
    if num_superseded:
        notes.append(f"{num_superseded} rows of steps that a restart did again were left out")
    if lost := left_out(run):
        notes.append(lost)
    return First(
        nonfinite=nonfinite.first,
        num_nonfinite=nonfinite.num_values,
        num_nonfinite_modules=nonfinite.num_modules,
        num_known=nonfinite.num_known,
        has_masks=nonfinite.has_masks,
        steps=sorted(seen),
        replica=replicas.first,
        differing=[(one.module_path, one.site, one.name) for one in replicas.values],
        buffers=replicas.buffers,
        num_compared=sum(replicas.num_compared.values()),
        num_compared_of=replicas.num_compared,
        steps_compared=replicas.steps,
        not_recorded=replicas.not_recorded,
        why_none_compared=replicas.why_none,
        notes=notes,
    )


def _hooks_behind(run: Run, bad: NonFiniteTensor | None) -> list[str]:
    """What may have made the first value that is not finite and is no module: hooks of the program."""
    if bad is None:
        return []
    module = None if bad.before is None else run.modules.get((bad.before.root, bad.before.module_path))
    if module is not None and module.foreign_hooks:
        hooks = ", ".join(module.foreign_hooks)
        return [
            f"between the last healthy value and this one ran hooks of the program on {module.path!r} ({hooks}): "
            "what they make of a value is not recorded there, and first seen here"
        ]
    listed = run.foreign_hooks
    return [f"hooks of the program run after what is recorded of their modules: {listed}"] if listed else []
