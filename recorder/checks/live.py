"""Runs rules on the writer thread: cheap ones during training, and those of one rank at its end.

`LiveChecks` takes the statistics of one record at a time, which the writer measures anyway, and the numbers of the
probe (one number of each value) of one step at a time. It passes each finding to `on_finding` once, on the thread that
calls `saw`, at the first record of a later step. Rules need complete steps, because whether `GradScaler` skips a step
is known only at the end of the step. The writer thread calls `finish` when no record follows, to judge the last step,
too. The last step of a training that is killed is not judged. After `finish`, `judge_whole` applies the rules that need
more of the run to the steps that were kept of it.

`book.read_table(table, where)` makes `thresholds` and `own` from a TOML table. A rule that raises an error is reported
as a finding, and the other rules continue. The rules are those of `recorder check`. This module must never raise an
error, read a tensor or a file, or keep more than a fixed number of statistics. A record without statistics costs one
comparison. Rules from installed packages are left out: nothing could stop a rule that does not end, and the writer
would wait.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..format.manifest import RecordedModule
from ..records import Measured, ProbedStep, Staged
from ..sites import SITES, UPDATE
from ..system import log
from .book import Thresholds, make_rules
from .causes import order_of
from .engine import Engine
from .rows import Catalog
from .rule import CheckRule, Finding
from .rules.activations import Attention, Dead, Saturated
from .rules.comparing import RunningStatistics
from .rules.data import Data, EmptyBatch
from .rules.evaluation import EvaluationOutput
from .rules.gradients import Exploding, Flip, Objectives, Vanishing
from .rules.leaps import Jump, Spike
from .rules.losses import LossStuck
from .rules.no_gradient import NoGradient
from .rules.parameters import Initialisation, Unchanged
from .rules.programs import PROGRAM_RULES, Clipping, EvaluationMode
from .rules.updates import Update
from .rules.validations import Overfitting
from .rules.values import NonFinite, Skipped
from .seen_steps import NO_RECORDS, KeptSteps, SeenStep, SeenSteps

LIVE_RULES: tuple[type[CheckRule], ...] = (NonFinite, Spike, Jump, EmptyBatch)
"""The cheap rules: a rule costs a few additions per record, and remembers a few numbers per value."""
WHOLE_RULES: tuple[type[CheckRule], ...] = (
    NonFinite, Skipped, LossStuck, Overfitting, Vanishing, Exploding, NoGradient, Unchanged, Update, Clipping,
    *PROGRAM_RULES, EvaluationOutput, Initialisation, Dead, Saturated, Attention, Objectives, Flip, Data,
    RunningStatistics,
)  # fmt: skip
"""The rules that judge a training as a whole by statistics of one rank."""
EARLY_RULES: tuple[type[CheckRule], ...] = (NoGradient, Unchanged, Data)
"""Those of the whole rules that also judge a training under way: what they find is there from the first step on."""
_FIRST_EARLY, _EARLY_AGAIN = 256, 4
"""The number of steps after which the early rules judge, and the factor by which it grows each time."""
_MAX_PROBED = 1024
"""The most steps whose numbers from the probe wait for the writer thread. Older steps are dropped."""
_MOST_REPLICAS = 4
"""The most models whose parameters are compared over ranks at the end. A status has room for a few."""
_MOST_DUE, _JUDGE_EVERY_S = 64, 2.0
"""Waiting steps are judged as soon as there are this many, or this many seconds after the last judgement."""

_FACTS = [one.name for one in fields(RecordedModule)]

_log = logging.getLogger("recorder")


class LiveChecks:
    """Applies rules to the records of one rank, step by step. Only one thread may call it, except for `probed`."""

    def __init__(
        self, *, rank: int, on_finding: Callable[[Finding], None], rules: Sequence[type[CheckRule]] = LIVE_RULES,
        thresholds: Thresholds | None = None, own: Sequence[type[CheckRule]] = (), in_batches: bool = False,
    ) -> None:  # fmt: skip
        """Take the user's own rules (`own`), each a statistic and a limit. Thresholds of unused rules are ignored.

        With `in_batches`, the steps of some seconds are judged together, which takes a fifth of the time. Otherwise
        each step is judged at once.
        """
        self._on_finding = on_finding
        self._thresholds = thresholds or {}
        self.catalog = Catalog()
        self._rules = make_rules([*rules, *own], self.catalog, self._thresholds)
        self._engine = Engine(self._rules, self.catalog)
        self._seen = SeenSteps(rank, self.catalog)
        self._kept = KeptSteps()
        self._sites = tuple(dict.fromkeys(site for rule in self._rules for site in rule.sites))
        self._step = 0
        self._is_off = False
        self._in_batches = in_batches
        self._has_scalars = False
        self._num_steps, self._next_early = 0, _FIRST_EARLY
        self._probed: deque[ProbedStep] = deque(maxlen=_MAX_PROBED)
        """The probe's numbers of steps that the writer thread has not reached yet."""
        self._last: ProbedStep | None = None
        """The probe's numbers of the last step that is over."""
        self._due: list[SeenStep] = []
        """The finished steps that are not judged yet, in order."""
        self._judged_s = time.monotonic()

    def probed(self, numbers: ProbedStep) -> None:
        """Take the probe's numbers of a step that is over. Called on the training thread."""
        if not self._is_off:
            self._probed.append(numbers)
            self._last = numbers

    def saw(self, staged: Staged, measured: Measured) -> None:
        """Take the statistics of a record. The first record of a later step makes the rules judge the step before."""
        if measured.nan_count is None or self._is_off:
            return
        self._has_scalars |= staged.origin.site == "scalar"
        try:
            self._add(staged, measured)
        except Exception as error:  # an error here must not end the recording
            self._turn_off(error)

    def look(self) -> None:
        """Judge the probe's steps in a training without records of scalars. Called on the thread that calls `saw`."""
        if self._is_off or not self._in_batches or self._has_scalars or len(self._probed) < _MOST_DUE:
            return
        try:
            self._step = self._probed[-1].step
            self._end_steps()
            self._judge()
        except Exception as error:  # an error here must not end the recording
            self._turn_off(error)

    def finish(self) -> None:
        """Judge the last step. `CheckRule.finish` is not called, because it expects a complete run."""
        if self._is_off:
            return
        try:
            self._end_steps()
            if self._probed:
                self._step = self._probed[-1].step
                self._end_steps()
            self._judge()
        except Exception as error:  # an error here must not end the recording
            self._turn_off(error)

    def is_due(self) -> bool:
        """Return whether `EARLY_RULES` are to judge the run now. True once after 256 steps, 1,024 steps, and so on."""
        is_due = self._num_steps >= self._next_early
        while self._num_steps >= self._next_early:
            self._next_early *= _EARLY_AGAIN
        return is_due

    def judge_whole(
        self, roots: Sequence[Mapping[str, Any]], rules: Sequence[type[CheckRule]] = WHOLE_RULES
    ) -> list[Finding] | None:
        """Return what rules find in the steps that were kept of the run so far, notes among them. None: no judgement.

        `roots` is what the writer's manifest says of the models.
        """
        if self._is_off or not self._kept.steps:
            return None
        try:
            catalog = self._seen.copied_catalog(_modules_of(roots))
            engine = Engine(make_rules(rules, catalog, self._thresholds), catalog)
            engine.add(self._seen.rows_of(self._kept.steps, catalog, (*SITES, UPDATE)))
            return engine.finish().findings
        except Exception as error:  # an error here must not end the recording
            self._turn_off(error)
            return None

    def replicas(self, roots: Sequence[Mapping[str, Any]], world_size: int) -> dict[str, list[Any]]:
        """Return, for each model that DDP keeps equal on all ranks, the last step, and digests of names and of norms.

        Both are of the model's parameters as the step ended. Ranks are compared if the first two and the names agree.
        """
        found: dict[str, list[Any]] = {}
        for root in roots[:_MOST_REPLICAS]:
            ranks = root.get("data_parallel") or {}
            is_alike = ranks.get("kind") == "ddp" and len(ranks["ranks"]) == world_size and not ranks.get("joins")
            if is_alike and not root.get("unshared") and (digests := self._digests(self._last, root["name"])):
                found[root["name"]] = digests
        return found

    @staticmethod
    def _digests(last: ProbedStep | None, root_name: str) -> list[Any]:
        if last is None:
            return []
        numbers = zip(last.series, last.sums.tolist(), last.numels.tolist(), strict=False)
        parameters = sorted(
            (*one.origin[1:4], numel, total)
            for one, total, numel in numbers
            if one.origin.site == "param" and one.origin.root == root_name and numel
        )
        columns = [one[:-1] for one in parameters], [one[-1] for one in parameters]
        digests = [hashlib.sha256(repr(column).encode()).hexdigest()[:12] for column in columns]
        return [last.step, *digests] if parameters else []

    def revised(self, one: Finding) -> Finding:
        """Return a finding as its rule judges it after the last step: it may be a note."""
        rule = next((rule for rule in self._rules if rule.name == one.rule), None)
        try:
            return one if rule is None or self._is_off else rule.revised(one)
        except Exception as error:  # an error here must not end the recording
            self._turn_off(error)
            return one

    def _add(self, staged: Staged, measured: Measured) -> None:
        step = staged.moment.step
        if step > self._step:
            self._end_steps()
            self._step = step
            is_early = len(self._due) < _MOST_DUE and time.monotonic() - self._judged_s < _JUDGE_EVERY_S
            if not (self._in_batches and is_early):
                self._judge()
        elif step < self._step:
            return  # the rules have judged this step already, and steps must be in order
        self._seen.add(staged, measured)

    def _end_steps(self) -> None:
        """Let the current step wait to be judged, and earlier steps that only the probe has measured."""
        while self._probed and self._probed[0].step < self._step:
            self._due.append(SeenStep(self._probed.popleft(), NO_RECORDS))
        is_probed = bool(self._probed) and self._probed[0].step == self._step
        if (one := self._seen.end(self._probed.popleft() if is_probed else None, self._step)) is not None:
            self._due.append(one)

    def _judge(self) -> None:
        due, self._due, self._judged_s = self._due, [], time.monotonic()
        if due:
            self._num_steps += len(due)
            self._kept.add(due)
            self._engine.add_complete(self._seen.rows_of(due, self.catalog, self._sites))
        for finding in sorted(self._engine.take(), key=lambda one: order_of(one.step, one.site, one.rule)):
            self._on_finding(finding)

    def _turn_off(self, error: Exception) -> None:
        self._is_off = True
        self._due, self._kept = [], KeptSteps()
        problem = f"{type(error).__name__}: {error}"
        log.say(_log, logging.WARNING, "live checks ended by an error (%s); the recording goes on", problem)


def judge_program(roots: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Apply the rules on the program to the models in a writer's manifest: wrong modes, arguments, optimizers.

    Of modules in evaluation mode, only those of a model that is in evaluation mode as a whole are found.
    """
    facts = _modules_of(roots)
    catalog = Catalog(facts)
    found = [one for rule in PROGRAM_RULES for one in rule(catalog).finish()]
    # Whether some modules are in evaluation mode on purpose is known once all modules were trained.
    evaluated = {root for (root, path), one in facts.items() if not path and one.evaluated is not None}
    return [one for one in found if one.rule != EvaluationMode.name or one.root in evaluated]


def _modules_of(roots: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], RecordedModule]:
    modules = {}
    for root in roots:
        for one in root["modules"]:
            facts = {name: one[name] for name in _FACTS if name in one}
            modules[root["name"], one["path"]] = RecordedModule(class_name=one["class"], **facts)
    return modules
