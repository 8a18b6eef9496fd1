"""The ring of a rank (values of the last steps, in memory), and the triggers that have it written to disk.

`RingWatch` owns the memory, the `Triggers`, and the rules of `recorder check` that run in training. A finding of these
rules may be a trigger. Code that finds a reason to write the ring only asks `Triggers`, on any thread. The writer
thread then determines the window of steps, has its own ring write them, and sends the other ranks a command. No rank
waits. A rank that receives the command too late reports the steps that it no longer has. Nothing here may touch a
tensor, wait, or raise into training.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..capture.core import Capture
from ..capture.staging.pool import Pool, RingMemory
from ..checks.book import check_settings
from ..checks.live import EARLY_RULES, LIVE_RULES, LiveChecks
from ..checks.rule import Finding, Severity
from ..checks.rules.data import EmptyBatch
from ..config import Loaded, Settings
from ..errors import CommandError
from ..format.commands import DUMP, ENDED, IN_FORCE, MISSED, Command
from ..records import Measured, ProbedStep, Staged
from ..rules import RingWindow, ring_window
from ..system import log
from ..system.log import Events
from ..system.text import counted, one_line, site_in_words, size
from ..write.ring import MAX_DUMPS, Dump
from .commands import Commands
from .findings import LiveFindings

if TYPE_CHECKING:
    from ..write.writer import Writer  # the import loads pyarrow, which no recording needs before its first root call


class RingWatch:
    """Finds reasons to write one rank's ring, the values of the last steps, to disk.

    Any thread may `ask`; the writer thread does the rest.
    """

    def __init__(self, loaded: Loaded) -> None:
        """Do nothing before `start`.

        Raises:
            ConfigError: the settings name a file of rules that is wrong.
        """
        self._settings = loaded.settings
        self._thresholds, self._own_rules = check_settings(loaded)
        self._triggers: Triggers | None = None
        """The triggers that have the ring written; None if no rule keeps a ring."""
        self._has_ring = False
        """True if this rank has a ring, and `Triggers.turn_off` was not called."""
        self._checks: LiveChecks | None = None
        self.findings = LiveFindings()
        self._current_step: Callable[[], int | None] = lambda: None
        self._on_trouble: Callable[[str], None] = lambda text: None

    @property
    def has_triggers(self) -> bool:
        """True if a rule keeps a ring on some rank."""
        return self._triggers is not None

    def start(
        self,
        *,
        rank: int,
        world_size: int,
        pool: Pool,
        writer: Writer,
        commands: Commands,
        events: Events,
        current_step: Callable[[], int | None],
        on_trouble: Callable[[str], None],
    ) -> RingMemory | None:
        """Prepare for triggers if a rule keeps a ring on some rank. Return this rank's memory for its ring, or None.

        The ring takes a share of `pool`. `writer` keeps the ring's records, and writes them. A trigger that writes less
        than it should is reported as an event. `current_step` returns the step under way, or None before there is one.
        `on_trouble` takes a sentence about each finding that is worse than a note, on the writer thread.
        """
        settings, self.findings.rank, self._on_trouble = self._settings, rank, on_trouble
        window = ring_window(settings.rules)
        wanted = settings.trigger_words if window is not None else ("spike", "jump")  # NaN is reported without a rule
        rules = [rule for rule in LIVE_RULES if rule.name in (*wanted, EmptyBatch.name)]
        if rules or self._own_rules:
            self._checks = LiveChecks(
                rank=rank, on_finding=self._found, rules=rules, thresholds=self._thresholds, own=self._own_rules,
                in_batches=window is None,
            )  # fmt: skip
        if window is None:
            return None
        has_ring = ring_window(rule for rule in settings.rules if rank in rule.rank) is not None
        self._current_step = current_step
        self._triggers = Triggers(
            settings=settings,
            rank=rank,
            world_size=world_size,
            window=window,
            channel=writer if has_ring else None,
            sender=commands,
            events=events,
        )
        commands.on(DUMP, self._triggers.take)
        return self._make_memory(pool, window, writer) if has_ring else None

    def ask(self, kind: str, reason: object, *, step: int | None = None) -> None:
        """Request that the steps around `step`, by default the current step, are written; see `Triggers.ask`."""
        if self._triggers is not None:
            self._triggers.ask(kind, reason, step=self._current_step() if step is None else step)

    def saw(self, records: Sequence[Staged], measured: Sequence[Measured]) -> None:
        """Pass records with their statistics to the rules that run in training. Writer thread."""
        if self._checks is not None:
            for staged, its in zip(records, measured, strict=True):
                self._checks.saw(staged, its)

    def probed(self, numbers: ProbedStep) -> None:
        """Pass the probe (one number of each value) of a finished step to the rules in training. Training thread."""
        if self._checks is not None:
            self._checks.probed(numbers)

    def look(self, capture: Capture) -> None:
        """Have the requested steps written, notify the other ranks, and log new findings. Writer thread."""
        if self._checks is not None:
            self._checks.look()
        self.findings.say()
        if self._triggers is not None:
            self._look_whether_off(capture)
            self._triggers.look(capture.clock.step)

    def end(self, capture: Capture, commands: Commands) -> None:
        """Look for triggers a last time, before the ring gives up its values. Writer thread."""
        if self._checks is not None:
            self._checks.finish()
        self.findings.say()
        if self._triggers is None:
            return
        self._look_whether_off(capture)
        commands.look()
        self._triggers.end(capture.clock.step)

    def is_judgement_due(self) -> bool:
        """Return whether `judge_early` is to be called. Writer thread."""
        return self._checks is not None and self._checks.is_due()

    def judge_early(self, roots: Sequence[Mapping[str, Any]]) -> None:
        """Judge the run so far. `roots` is what the manifest says of the models. Writer thread."""
        if self._checks is not None:
            self.findings.judge_early(self._checks.judge_whole(roots, EARLY_RULES) or (), self._checks.catalog)
            self.findings.say()

    def judge_whole(self, roots: Sequence[Mapping[str, Any]]) -> None:
        """Judge the run as a whole, after `end`. `roots` is what the manifest says of the models. Writer thread."""
        if self._checks is not None:
            self.findings.end(self._checks.revised, self._checks.judge_whole(roots), self._checks.catalog)

    def replicas(self, roots: Sequence[Mapping[str, Any]], world_size: int) -> dict[str, list[Any]]:
        """Return what must be equal on all ranks after the last step; see `LiveChecks.replicas`."""
        return {} if self._checks is None else self._checks.replicas(roots, world_size)

    def _make_memory(self, pool: Pool, window: RingWindow, writer: Writer) -> RingMemory:
        from ..write.ring import Room

        self._has_ring = True
        part = pool.split(int(self._settings.ring_share * pool.capacity_bytes))
        writer.hold(window, Room(part.capacity_bytes, lambda: part.used_bytes))
        return RingMemory(part, window, is_wanted=writer.is_wanted)

    def _found(self, finding: Finding) -> None:
        if finding.rule != "nonfinite" and finding.severity > Severity.NOTE:
            self.findings.add(finding)
            self._on_trouble(f"{finding.rule} at step {finding.step}")
        where = f"{finding.module_path} {site_in_words(finding.site, finding.name)}".strip()
        kind = OWN_RULE if any(rule.name == finding.rule for rule in self._own_rules) else finding.rule
        self.ask(kind, f"{finding.rule}: {where}: {finding.what}", step=finding.step)

    def _look_whether_off(self, capture: Capture) -> None:
        """Turn the triggers off if the ring was found too small and was turned off, perhaps after the first step."""
        if self._has_ring and not capture.selection.has_ring and self._triggers is not None:
            self._has_ring = False
            self._triggers.turn_off()


_logger = logging.getLogger("recorder")
_MAX_TEXT = 200
_MAX_ASKED = 64
"""The most triggers that wait for the writer thread, which looks five times a second. More are only counted."""
_DUE = ("exception", "signal", "user")
"""The kinds of trigger that count even soon after another trigger: the process ends, or a person requests a dump."""
_TURNS_PER_S, _LONGEST_TURNS_S, _GOLDEN = 256, 4.0, 0.6180339887
"""Ranks that find a reason for a dump at once notify the other ranks at different times. The times are fractional parts
of multiples of the golden ratio. So most ranks hear of the dump before their turn: about 20 of 4,096 send, within 4 s.
"""
MISSED_EVENT = "trigger_missed"
PASSED_EVENT = "trigger_passed"
OWN_RULE = "own rule"
"""The kind of trigger for a finding of any rule that the user wrote."""
_ALWAYS = ("program", "user", OWN_RULE)


class _Asked(NamedTuple):
    kind: str
    reason: str
    step: int | None
    """The step to write; None for the step that is running when the writer thread looks."""


class _Unsent(NamedTuple):
    due_s: float
    command: Command
    dump: Dump


class _Answered(NamedTuple):
    """A dump command that this rank has answered. It is answered again once the command's window is over."""

    command: Command
    dump: Dump


@dataclass(eq=False, kw_only=True)
class Triggers:
    """The triggers of one rank: reasons to write its ring, the values of the last steps.

    Any thread may `ask`; the writer thread does the rest. A trigger that writes less than it should is an event.
    """

    settings: Settings
    rank: int
    world_size: int
    window: RingWindow
    """How many steps are written before and after the step of a trigger."""
    channel: Writer | None
    """The writer, with the ring. None if only other ranks keep a ring, or once the ring is off."""
    sender: Commands
    """The commands of the run, through which the other ranks are notified."""
    events: Events
    clock: Callable[[], float] = time.monotonic
    """A monotonic clock, in seconds."""

    def __post_init__(self) -> None:
        self._words = self.settings.trigger_words
        self._by = f"rank {self.rank}"
        self._turn_s = min(self.world_size / _TURNS_PER_S, _LONGEST_TURNS_S) * (self.rank * _GOLDEN % 1)
        self._why_nothing = "no rule keeps a ring on this rank"
        """The reason why this rank writes nothing while `channel` is None."""
        self._asked: deque[_Asked] = deque()
        self._unsent: list[_Unsent] = []
        self._dumps: list[Dump] = []
        self._answered: list[_Answered] = []
        self._quiet_until_s = float("-inf")
        self._step: int | None = None
        self._stepped_s: float | None = None
        """When the step last changed. None before the first change, because a first step compiles and may be slow."""

    def ask(self, kind: str, reason: object, *, step: int | None = None) -> None:
        """Request that the steps around `step` are written, by default the step under way. Any thread; never waits.

        `kind` is one of `config.TRIGGERS` or `OWN_RULE`. For a deliberate request it is ``program`` or ``user``.
        `reason` is for people: any object, even one that cannot be printed.
        """
        if kind not in _ALWAYS and kind not in self._words:
            return
        if len(self._asked) >= _MAX_ASKED and kind not in _DUE:
            self._count()
            return
        self._asked.append(_Asked(kind, one_line(reason)[:_MAX_TEXT] or kind, step))

    def turn_off(self) -> None:
        """Write nothing from now on: the ring has no room for its steps. Other ranks are still notified."""
        self.channel = None
        self._why_nothing = "the ring is off, because it cannot hold its steps"

    def look(self, step: int) -> None:
        """Determine the windows of new triggers, and notify the other ranks. `step` is under way. Writer thread."""
        self._look_for_hang(step)
        while self._asked:
            asked = self._asked.popleft()
            self._begin(asked, step if asked.step is None else asked.step)
        self._send_due(self.clock())
        self._look_at_dumps()

    def take(self, command: Command) -> None:
        """Carry out a dump command that another rank or a person has sent. Writer thread.

        Raises:
            CommandError: the window is larger than the ring's, or there were too many dumps. The text is the answer.
        """
        assert command.to_step is not None, "a dump needs a last step"
        num_steps, most = command.to_step - command.from_step + 1, sum(self.window) + 1
        if num_steps > most:
            raise CommandError(
                f"the dump asks for {num_steps} steps, and the ring holds {most} (before={self.window.before}, "
                f"after={self.window.after}, and the step itself)"
            )
        dump = self._known(command.from_step, command.to_step)
        if dump is None:
            if len(self._dumps) >= MAX_DUMPS:
                raise CommandError(f"this launch has made {MAX_DUMPS} dumps, which is the most")
            dump = Dump(first_step=command.from_step, last_step=command.to_step, reason=command.reason, by=command.by)
            self._write(dump)
        if dump.command is None:
            dump.command = command.number
        if self.channel is None:
            self.sender.answer(command, ENDED, why=self._why_nothing)
            return
        self._answered.append(_Answered(command, dump))
        self.sender.answer(command, IN_FORCE, since=dump.first_step, until=dump.last_step)

    def end(self, step: int) -> None:
        """Look for triggers a last time. Called before and after the ring releases its steps."""
        self.look(step)
        self._send_due(float("inf"))
        self._look_at_dumps(is_last=True)

    def _begin(self, asked: _Asked, step: int) -> None:
        now = self.clock()
        if now < self._quiet_until_s and asked.kind not in _DUE:
            self._count()
            return
        if len(self._dumps) >= MAX_DUMPS:
            text = f"{counted(MAX_DUMPS, 'dump')} were made; further triggers write nothing"
            self.events.add("trigger_refused", text)
            return
        before, after = self.window
        first, last = max(step - before, 0), step + after
        if self._known(first, last) is not None:
            return
        dump = Dump(first_step=first, last_step=last, reason=asked.reason, by=self._by)
        self._write(dump)
        command = Command(kind=DUMP, from_step=first, to_step=last, reason=asked.reason, by=self._by)
        self._unsent.append(_Unsent(now + self._turn_s, command, dump))

    def _count(self) -> None:
        self.events.add(PASSED_EVENT, "triggers soon after another trigger are only counted", level=logging.INFO)

    def _send_due(self, now: float) -> None:
        """Notify the other ranks of each due dump. Skip a dump if another rank has sent a command for its steps."""
        due = [unsent for unsent in self._unsent if unsent.due_s <= now]
        self._unsent = [unsent for unsent in self._unsent if unsent.due_s > now]
        for _, command, dump in due:
            self.sender.look()
            if dump.command is None:
                try:
                    self.sender.send(command)  # `take` receives the command on this rank, too
                except CommandError as error:
                    text = f"the other ranks did not receive the command for a dump: {error}"
                    self.events.add("trigger_unsent", text, key=str(dump.time_ns))

    def _known(self, first: int, last: int) -> Dump | None:
        return next((dump for dump in self._dumps if dump.first_step <= first and last <= dump.last_step), None)

    def _write(self, dump: Dump) -> None:
        if self._step is None or dump.first_step <= self._step:  # a window that begins later starts no cooldown
            self._quiet_until_s = self.clock() + self.settings.trigger_cooldown_s
        self._dumps.append(dump)
        if self.channel is not None:
            self.channel.dump(dump)
        steps = f"steps {dump.first_step} to {dump.last_step} are written"
        if log.can_say(_logger):
            said = steps if self.channel is not None else f"nothing is written, for {self._why_nothing}"
            log.say(_logger, logging.WARNING, "%s: %s: %s (%s)", self._by, said, dump.reason, dump.by)

    def _look_at_dumps(self, *, is_last: bool = False) -> None:
        for answered in list(self._answered):
            command, dump = answered
            if not dump.has_begun or dump.num_due or not (dump.is_over or is_last):
                continue
            self._answered.remove(answered)
            is_missed = bool(dump.missed) and not dump.num_rows
            missed = f"; {dump.missed_text} had been dropped from the ring already" if dump.missed else ""
            why = f"{counted(dump.num_rows, 'row')}, {size(dump.num_bytes)}{missed}"
            state = MISSED if is_missed else ENDED
            self.sender.answer(command, state, since=dump.first_step, until=dump.last_step, why=why)
        for dump in self._dumps:
            if dump.missed and not dump.is_said:
                dump.is_said = True
                text = f"{dump.missed_text} had been dropped when this rank learned of: {dump.reason} ({dump.by})"
                self.events.add(MISSED_EVENT, text, key=f"{dump.first_step} {dump.time_ns}")

    def _look_for_hang(self, step: int) -> None:
        now = self.clock()
        if step != self._step:
            self._stepped_s = None if self._step is None else now
            self._step = step
        elif self._stepped_s is not None and 0 < self.settings.hang_s <= now - self._stepped_s:
            self._stepped_s = None  # each hanging step is counted once
            self.ask("hang", f"hang: step {step} has not ended in {self.settings.hang_s:g} s", step=step)
