"""The findings of the rules that run in training, for the log, the rank's status and the last line.

Only the writer thread changes the findings of a rank.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from ..capture.nonfinite import NonFiniteValue
from ..capture.parallel.topology import JobRank
from ..checks.causes import kind_of, with_causes
from ..checks.live import judge_program
from ..checks.rows import Catalog
from ..checks.rule import Finding, Severity
from ..checks.rules.leaps import Jump, Spike
from ..checks.rules.values import NonFinite
from ..format.rundir import STATUS
from ..sites import SITE_OF
from ..system import log
from ..system.text import counted, listed

MAX_RANKS = 64
"""The most other ranks whose findings are read for the last line."""
_MAX_KEPT = 64
"""The most findings of a rule that are kept for the last line."""
_MAX_FINDINGS = 8
"""The most pairs of rule and module in a status, and so in labels of metrics. More findings count without a module."""

_OF_SUMS = (Spike.name, Jump.name)
"""The rules on losses and norms, which may be sums over the calls of a model."""
_NONFINITE, NOT_FINITE = "nonfinite", "not finite"
_PLACE = attrgetter("rule", "root", "module_path", "site", "name")
_LOOK_S = 0.05
"""The seconds between two looks at the statuses of the other ranks."""

_logger = logging.getLogger("recorder")


class LiveFindings:
    """The findings of one rank that are worse than notes."""

    def __init__(self) -> None:
        self.rank = 0
        self._found: dict[str, list[Finding]] = {}
        """By rule, the first findings."""
        self._uneven: set[str] = set()
        """The models whose number of calls before a backward varies."""
        self.has_models = False
        """Whether several models are recorded, so that a finding is told with its model."""
        self._of_program: list[Finding] = []
        """What the rules on the program find at present."""
        self._early: list[Finding] = []
        """What the rules on the run so far have found."""
        self._at_end: list[Finding] = []
        """All findings after the last step."""
        self.num_notes = 0
        """The number of kinds of notes after the last step that follow from no other finding."""
        self._told: dict[tuple[str, str], dict[str, Any]] = {}
        """The findings for the rank's status, by rule and module."""
        self._unsaid: list[Finding] = []
        """The first findings of rules, until they are logged."""

    @property
    def worst(self) -> Finding | None:
        """The finding that `recorder check` puts first. NaN and infinities are reported elsewhere."""
        found = self._at_end or with_causes(self._all, Catalog())
        return next((one for one in found if not one.cause), None)

    @property
    def _all(self) -> list[Finding]:
        of_rules = (one for found in self._found.values() for one in found if not self._is_noted(one))
        return [*self._of_program, *self._early, *of_rules]

    def add(self, finding: Finding) -> None:
        """Add the finding of a rule, which is logged if it is the first of the rule.

        A loss or gradient of a model that is called unevenly may be a sum over the calls: the finding is only a note.
        """
        if self._is_noted(finding):
            return
        found = self._found.setdefault(finding.rule, [])
        if len(found) < _MAX_KEPT or finding.severity > max(one.severity for one in found):
            found.append(finding)
        self._count(finding, is_logged=True)

    def judge_early(self, found: Sequence[Finding], catalog: Catalog) -> None:
        """Take what rules find in the run so far. Each value is counted once, and a rule is logged once, on rank 0.

        `catalog` has the values of the rank.
        """
        known = set(map(_PLACE, self._early))
        found = [one for one in with_causes(found, catalog) if one.severity > Severity.NOTE and not one.cause]
        for one in found:
            if _PLACE(one) not in known:
                self._early.append(one)
                self._count(one, is_logged=self.rank == 0)

    def end(
        self, revised: Callable[[Finding], Finding], whole: Sequence[Finding] | None, catalog: Catalog
    ) -> None:  # fmt: skip
        """Keep the findings as they are after the last step, with those of the whole run, which nothing logs.

        Args:
            revised: returns a finding as it is after the last step. A spike that came with other data for good is a
                note.
            whole: the findings of the rules that judge the whole run; None if these could not be applied.
            catalog: the values of the rank.
        """
        if whole is not None:  # it has these, too
            self._of_program, self._early = [], []
        for rule, found in self._found.items():
            self._found[rule] = [one for one in found if revised(one).severity > Severity.NOTE]
        found = with_causes([*self._all, *(whole or ())], catalog)
        severities = {kind_of(one): one.severity for one in reversed(found) if not one.cause}  # the first one is worst
        self.num_notes = list(severities.values()).count(Severity.NOTE)
        self._at_end = [one for one in found if one.severity > Severity.NOTE and one.rule != NonFinite.name]
        before, self._told = self._told, {}
        for one in self._at_end:
            if not one.cause:
                self._count(one, is_logged=False)
        for place, told in self._told.items():
            told["number"] = max(told["number"], before.get(place, told)["number"])

    def told(self, one: Finding) -> str:
        """Return a finding in words, with the number of further modules of which its rule says the same."""
        found = self._at_end or self._all
        alike = {(other.root, other.module_path) for other in found if (other.rule, other.what) == (one.rule, one.what)}
        num = len(alike - {(one.root, one.module_path)})
        return one.told(has_models=self.has_models) + f" (and in {counted(num, 'more module')})" * bool(num)

    def _is_noted(self, finding: Finding) -> bool:
        return bool(self._uneven) and finding.root in ("", *self._uneven) and finding.rule in _OF_SUMS

    def judge_program(self, roots: Sequence[Mapping[str, Any]]) -> None:
        """Take what the manifest says of the models. Wrong modes, arguments and optimizers are findings, each once.

        Most ranks find the same, so only rank 0 logs it.
        """
        first = {root["name"]: root["modules"][0] for root in roots if root["modules"]}
        self.has_models = len(first) > 1
        self._uneven = {name for name, module in first.items() if module.get("has_uneven_calls")}
        known = set(self._of_program)
        self._of_program = [one for one in judge_program(roots) if one.severity > Severity.NOTE]
        for finding in self._of_program:
            if finding not in known:
                self._count(finding, is_logged=self.rank == 0)

    def _count(self, finding: Finding, *, is_logged: bool) -> None:
        """Add a finding to those of the status. The first one of each rule has its module there, and may be logged."""
        module, is_first = finding.module_path, all(rule != finding.rule for rule, _ in self._told)
        if is_first and is_logged:
            self._unsaid.append(finding)
        if not is_first and (finding.rule, module) not in self._told and len(self._told) >= _MAX_FINDINGS:
            module = ""
        first = {"rule": finding.rule, "severity": finding.severity.word, "module": module, "step": finding.step}
        words = {"text": finding.told(has_models=self.has_models), "site": finding.site}
        told = self._told.setdefault((finding.rule, module), {**first, "number": 0, **words})
        told["number"] += 1

    def for_status(self, nonfinite: NonFiniteValue | None) -> list[dict[str, Any]]:
        """Return the findings for the rank's status, with the first non-finite value at the top.

        The first finding of each rule comes before all others, because a status may have room for a few only.
        """
        firsts = {rule: told for (rule, _), told in reversed(self._told.items())}
        found = sorted(self._told.values(), key=lambda told: told is not firsts[told["rule"]])
        if nonfinite is not None:
            text = f"step {nonfinite.step}, {nonfinite.where}: {NOT_FINITE} ({nonfinite.counts})"
            first = {"rule": _NONFINITE, "severity": Severity.ERROR.word, "module": nonfinite.module_path}
            found.insert(0, {**first, "step": nonfinite.step, "number": 1, "text": text, "site": nonfinite.site})
        return found

    def say(self) -> None:
        """Log the first finding of each rule."""
        while self._unsaid and log.can_say(_logger):
            log.say(_logger, logging.WARNING, "rank %d: %s", self.rank, self.told(self._unsaid.pop(0)))


def worst_of_others(run_dir: Path, own: Mapping[str, Any], *, job: JobRank, world_size: int, until_s: float) -> str:
    """Return a sentence on the worst finding of other ranks by a rule that found nothing on this rank, or "".

    Parameters that DDP keeps equal and that are unlike those of this rank stand above all other findings.

    A value that is not finite counts if it was computed before that of this rank: a gradient brings a NaN everywhere.
    The other ranks are known by the statuses that they wrote into the folder of the run; those of other nodes may not
    be there. Ranks end at about the same time, so this waits until all have ended, but at most until `until_s`.

    Args:
        run_dir: the folder of the run.
        own: `findings` and `replicas` of this rank's status.
        job: this rank and its attempt. Statuses of earlier attempts do not count.
        world_size: the number of ranks of the job. At most `MAX_RANKS` of them are read.
        until_s: a time of the monotonic clock.
    """
    statuses: list[dict[str, Any]] = []
    while sum("replicas" in status for status in statuses) < min(world_size, MAX_RANKS) - 1:
        statuses = []
        for path in itertools.islice(run_dir.glob(f"rank=*/*/{STATUS}"), MAX_RANKS):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it may be written at this moment
                status = json.loads(path.read_bytes())
                if status["rank"] != job.rank and status["attempt"] == job.attempt:
                    statuses.append(status)
        if time.monotonic() >= until_s:
            break
        time.sleep(_LOOK_S)
    for root_name, mine in own["replicas"].items():
        pairs = ((status["rank"], status.get("replicas", {}).get(root_name)) for status in statuses)
        apart = sorted(rank for rank, theirs in pairs if theirs and theirs[:2] == mine[:2] and theirs != mine)
        if apart:
            ranks = listed([str(job.rank), *map(str, apart)])
            return f"ranks {ranks} have different parameters of {root_name} after step {mine[0]}, which DDP keeps equal"
    known = {one["rule"]: one for one in own["findings"]}
    words = [severity.word for severity in sorted(Severity, reverse=True)]
    bad = known.pop(_NONFINITE, None)
    found = [
        (status["rank"], one)
        for status in statuses
        for one in status["findings"]
        if one["rule"] not in known and (one["rule"] != _NONFINITE or bad is None or _order(one) < _order(bad))
    ]
    worst = min(found, key=lambda of: (words.index(of[1]["severity"]), of[1]["step"]), default=None)
    return "" if worst is None else f"rank {worst[0]}: {worst[1]['text']}"


def _order(one: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the step of a finding in a status, and whether the backward made its value."""
    known = SITE_OF.get(one["site"])
    return one["step"], known is not None and known.is_gradient
