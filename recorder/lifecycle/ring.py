"""The ring of a rank, from the rules that keep one to the triggers that have it written.

`RingWatch` puts together what these need: memory for the ring out of the pool, `Triggers`, and the rules of
`recorder check` that may be triggers. Nothing here may raise into training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..capture.core import Capture
from ..capture.staging.pool import Pool
from ..capture.staging.ring_memory import RingMemory
from ..checks.live import LIVE_RULES, LiveChecks
from ..checks.rule import Finding
from ..checks.settings_file import check_settings
from ..config import Loaded
from ..format.commands import DUMP
from ..records import Measured, Staged
from ..rules import RingWindow, ring_window
from ..system.events import Events
from .commands import Commands
from .triggers import OWN_RULE, Triggers


class RingWatch:
    """What the ring of one rank is written for. Any thread may `ask`; the writer thread does the rest."""

    def __init__(self, loaded: Loaded) -> None:
        """Do nothing before `start`.

        Raises:
            ConfigError: the settings name a file of rules that is wrong.
        """
        self._settings = loaded.settings
        self._thresholds, self._own_rules = check_settings(loaded)
        self._triggers: Triggers | None = None
        """What the ring is written for; None where no rule keeps one."""
        self._has_ring = False
        """Whether this rank has a ring, and the triggers were not told that it is off."""
        self._checks: LiveChecks | None = None
        self._current_step: Callable[[], int | None] = lambda: None

    @property
    def has_triggers(self) -> bool:
        """Whether a rule keeps a ring on some rank."""
        return self._triggers is not None

    def start(
        self,
        *,
        rank: int,
        world_size: int,
        pool: Pool,
        writer: Any,
        commands: Commands,
        events: Events,
        current_step: Callable[[], int | None],
    ) -> RingMemory | None:
        """Prepare for triggers where a rule keeps a ring on some rank; return this rank's own memory for one.

        Args:
            rank: this rank.
            world_size: how many ranks there are.
            pool: the memory of all records, of which the ring takes a share.
            writer: holds the ring's records, and writes them.
            commands: tell the other ranks, and are told by them.
            events: takes a line for each trigger that leaves less than it should.
            current_step: returns the step under way; None before there is one.
        """
        settings = self._settings
        window = ring_window(settings.rules)
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
        rules = [rule for rule in LIVE_RULES if rule.name in settings.trigger_words]
        if rules or self._own_rules:
            self._checks = LiveChecks(
                rank=rank, on_finding=self._found, rules=rules, thresholds=self._thresholds, own=self._own_rules
            )
        return self._make_memory(pool, window, writer) if has_ring else None

    def ask(self, kind: str, reason: object, *, step: int | None = None) -> None:
        """Ask for the steps around one, by default the one under way, to be written; see `Triggers.ask`."""
        if self._triggers is not None:
            self._triggers.ask(kind, reason, step=self._current_step() if step is None else step)

    def saw(self, staged: Staged, measured: Measured) -> None:
        """Look at a record that has its statistics. Writer thread."""
        if self._checks is not None:
            self._checks.saw(staged, measured)

    def look(self, capture: Capture) -> None:
        """Have what was asked for written, and tell the other ranks. Writer thread."""
        if self._triggers is not None:
            self._look_whether_off(capture)
            self._triggers.look(capture.clock.step)

    def end(self, capture: Capture, commands: Commands) -> None:
        """Look for the last time: what waits in the ring goes otherwise. Writer thread."""
        if self._triggers is None:
            return
        if self._checks is not None:
            self._checks.finish()
        self._look_whether_off(capture)
        commands.look()
        self._triggers.end(capture.clock.step)

    def _make_memory(self, pool: Pool, window: RingWindow, writer: Any) -> RingMemory:
        from ..write.ring import Room

        self._has_ring = True
        part = pool.split(int(self._settings.ring_share * pool.capacity_bytes))
        writer.hold(window, Room(part.capacity_bytes, lambda: part.used_bytes))
        return RingMemory(part, window, is_wanted=writer.is_wanted)

    def _found(self, finding: Finding) -> None:
        """Ask for the steps around what a rule of `recorder check` finds. Writer thread."""
        where = " ".join(filter(None, (finding.module_path, finding.site, finding.name)))
        kind = OWN_RULE if any(rule.name == finding.rule for rule in self._own_rules) else finding.rule
        self.ask(kind, f"{finding.rule}: {where}: {finding.what}", step=finding.step)

    def _look_whether_off(self, capture: Capture) -> None:
        """Tell triggers that the ring is off, as capture finds out when the first step is over."""
        if self._has_ring and not capture.selection.has_ring and self._triggers is not None:
            self._has_ring = False
            self._triggers.turn_off()
