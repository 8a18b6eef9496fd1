"""Describes a recording: manifests and status for the disk, and the first and last lines of its log.

After the first recorded step an estimate predicts how many bytes will have been written by later steps. It counts the
records of the first step on the writer thread. Rank 0 logs the lines, from its own data. All else may run on any
thread. Nothing here may call a collective, touch a file, or read the elements of a tensor.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..capture.core import Capture
from ..capture.hooks.root import Root
from ..capture.nonfinite import NonFiniteValue
from ..capture.optimizers.optimizer_hooks import OptimizerHooks
from ..capture.parallel.marks import process_groups
from ..capture.parallel.topology import JobRank
from ..config import Loaded
from ..native import in_force
from ..numerics.units import sides_of
from ..records import KEEP_HISTOGRAM, KEEP_PROBE, KEEP_TENSOR, KEEP_TOKENS, KEEP_UNITS, Staged
from ..rules import Rule, Schedule
from ..system.log import Events
from ..system.text import counted, size
from .commands import Commands
from .findings import NOT_FINITE


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The facts that a recording keeps from its start, and the manifests made from these facts."""

    version: str
    topology: JobRank
    loaded: Loaded
    process: Mapping[str, Any]
    """The members that identify this process in a manifest, from `processes.own_process`."""
    started_ns: int
    by_flag: bool
    """True if ``RECORDER=1`` asked for the recording, False if the program did."""

    def run(self, run_id: str) -> dict[str, Any]:
        return {
            "run_id": run_id,
            "name": self.loaded.settings.name or _default_name(self.started_ns),
            "world_size": self.topology.world_size,
            "created_ns": self.started_ns,
            "asked": {item.name: item.value for item in self.loaded.explain() if item.source != "default"},
        }

    def writer(
        self, capture: Capture, optimizers: OptimizerHooks | None, events: Events, commands: Commands
    ) -> dict[str, Any]:
        """Return the content of `_writer.json`, to which the writer adds its own members."""
        topology = self.topology
        return {
            **self._identity(),
            "local_rank": topology.local_rank,
            "node_rank": topology.node_rank,
            "world_size": topology.world_size,
            "versions": {"recorder": self.version, "python": platform.python_version(), "torch": torch.__version__},
            "step_source": capture.clock.source,
            "settings": {e.name: {"value": e.value, "source": e.source} for e in self.loaded.explain()},
            "native": in_force(self.loaded.settings.native),
            "rules": [rule.text for rule in self.loaded.settings.rules],
            "pool_bytes": capture.pool.region_bytes,
            **({"ring_bytes": capture.ring.pool.capacity_bytes} if capture.ring is not None else {}),
            "pool_peak_bytes": sum(pool.peak_bytes for pool in capture.memory.pools),
            "waited_s": round(capture.pool.waited_s, 3),
            "roots": [_describe_root(root) for root in capture.roots.past + capture.roots],
            **({"groups": groups} if (groups := process_groups()) else {}),
            "optimizers": optimizers.known.described() if optimizers is not None else [],
            **self.news(events, commands),
            "autoload": self.by_flag,
        }

    def news(self, events: Events, commands: Commands) -> dict[str, Any]:
        """Return the members of `_writer.json` that may change while the recording runs."""
        return {"events": events.as_list(), "commands": [answer.members() for answer in commands.answers()]}

    def status(self, capture: Capture, commands: Commands, findings: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the content of `_status.json`, to which the writer adds its own members."""
        pool = capture.pool
        return {
            **self._identity(),
            "interval_s": self.loaded.settings.status_interval_s,
            "step": capture.clock.step,
            "pool_bytes": pool.region_bytes,
            "pool_used_bytes": sum(part.used_bytes for part in capture.memory.pools),
            "pool_peak_bytes": sum(part.peak_bytes for part in capture.memory.pools),
            "waited_s": round(pool.waited_s, 3),
            "longest_wait_s": round(pool.longest_wait_s, 3),
            "commands": [answer.short_members() for answer in commands.newest_answers()],
            "commands_refused": commands.num_refused,
            "findings": findings,
        }

    def _identity(self) -> dict[str, Any]:
        topology = self.topology
        return {"rank": topology.rank, **self.process, "attempt": topology.attempt, "started_ns": self.started_ns}


def _default_name(started_ns: int) -> str:
    """Return a name from the program and the local time of its start, such as ``train-20261123-051423``."""
    script = Path(next(iter(sys.argv), ""))
    stem = script.parent.name if script.stem == "__main__" else script.stem
    plain = re.sub(r"[^A-Za-z0-9._=+-]+", "-", stem).lstrip("._=+-")[:60]
    return f"{plain or 'python'}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(started_ns / 1e9))}"


def _describe_root(root: Root) -> dict[str, Any]:
    shared_work = {name: value for name, value in root.shared_work.items() if value is not None}
    return {"name": root.name, "class": root.class_name, **shared_work, "modules": root.inventory.described}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The facts that rank 0 has at the end of a recording."""

    run: str
    """The name of the run in a command, quoted for a shell."""
    world_size: int
    last_step: int | None
    ledger: Mapping[str, Any]
    nonfinite: NonFiniteValue | None
    """The first value of rank 0 that is not finite."""
    written_bytes: int
    waited_s: float
    longest_wait_s: float
    is_asked_for: bool
    """True if a rule applies to rank 0."""
    finding: str = ""
    """The worst finding of the rules that ran in training, on rank 0 or else on another rank; empty without one."""
    num_notes: int = 0
    """The number of notes on rank 0. The last line says it where there is nothing worse."""
    is_judged: bool = True
    """False if there was no time to judge the run as a whole."""
    never_moved: str = ""
    """Why all values are of one step; empty if an optimizer or the program has counted steps."""
    num_dumps: int = 0
    """The number of triggers that made rank 0 write its ring, the values of the last steps."""

    @property
    def lines(self) -> tuple[str, str]:
        """A line with the result, and a line with the next commands to type."""
        ledger = self.ledger
        of_rank = f" of rank 0 (of {self.world_size})" if self.world_size > 1 else ""
        rows = counted(ledger["written"], "row")
        until = "" if self.last_step is None else f", up to step {self.last_step}"
        written = f"{rows}{of_rank}, {size(self.written_bytes)}{until}"
        dropped = [f"{count:,} {reason}" for reason, count in ledger["dropped"].items()]
        clauses = []
        if self.nonfinite is not None:
            view = " (of rank 0; recorder first looks at all ranks)" if self.world_size > 1 else ""
            clauses.append(f"not finite since step {self.nonfinite.step}, {self.nonfinite.where}{view}")
        is_elsewhere = f": {NOT_FINITE} (" in self.finding  # on another rank, and before that of rank 0
        if self.finding:
            clauses.insert(0 if is_elsewhere else len(clauses), self.finding)
        if self.num_notes and not clauses:
            clauses.append(counted(self.num_notes, "note"))
        if not self.is_judged:
            clauses.append("not judged as a whole, for lack of time")
        if self.never_moved:
            clauses.append(self.never_moved)
        clauses.append(f"dropped {', '.join(dropped)}" if dropped else "nothing dropped")
        if not ledger["observed"]:
            clauses = ["no value was seen that the rules select" if self.is_asked_for else "no rule is for rank 0"]
        if self.waited_s >= 0.05:
            clauses.append(f"training waited {self.waited_s:.1f} s, at most {self.longest_wait_s:.1f} s at once")
        if self.num_dumps:
            clauses.append(counted(self.num_dumps, "dump"))
        if passed := ledger.get("passed", 0):
            clauses.append(f"{counted(passed, 'row')} passed the ring")
        if retired := ledger["retired"]["rows"]:
            clauses.append(f"{counted(retired, 'row')} retired")
        if suspect := ledger.get("suspect", 0):
            clauses.append(f"{counted(suspect, 'row')} that the disk may have lost")
        is_odd = dropped or suspect or self.never_moved or not ledger["observed"]
        commands = ["first"] * (self.nonfinite is not None) + ["check"] * bool(
            self.finding and not (is_elsewhere and self.nonfinite is not None)
        )
        commands += ["doctor"] * bool(is_odd and self.is_asked_for)
        more = {"check": " (it compares the ranks, too)"} if self.world_size > 1 else {}
        typed = [f"recorder {one} {self.run}{more.get(one, '')}" for one in commands or ["check", "show"]]
        return (f"{written}; {'; '.join(clauses)}", f"next: {'; '.join(typed)}")


def name_in_commands(run_dir: Path, name: str, folder: Path, *, is_default: bool) -> str:
    """Return the name of a run for a command that is typed where the program was started.

    The name is replaced by the run's path if another run in the folder of runs has the same name. `is_default` is True
    for the folder that commands search by default.
    """
    others = [run_dir.parent / name] + [run_dir.parent.parent / name] * is_default
    if any(path != run_dir and os.path.lexists(path) for path in others):
        return quoted(run_dir)
    return quoted(Path(name) if is_default else folder / name)


def quoted(path: Path) -> str:
    """Return a path quoted for a shell, without control characters that a terminal would obey."""
    text = str(path)
    if text.isprintable():
        return shlex.quote(text)
    plain = text.replace("\\", "\\\\").replace("'", "\\'")
    shown = (char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char)) for char in plain)
    return f"$'{''.join(shown)}'"


ROW_BYTES = 100
"""The bytes of a row of statistics on disk. 85 to 110 were measured."""
HISTOGRAM_BYTES = 40
"""The bytes that a histogram adds to a row on disk. 37 to 46 were measured."""
UNIT_BYTES = 19
"""The bytes that the sums of one unit (channel or neuron) add to a row on disk."""
PROBE_BYTES = 5
"""The bytes on disk for the probe of a value at one step. The probe is one number of each value at every step."""
_AHEAD = (100, 1000)
"""The estimate says how many bytes will have been written this many steps after the first."""


class Estimate:
    """Estimates the bytes that a rank will write. All methods are called on the writer thread."""

    def __init__(self, rules: Sequence[Rule], *, rank: int, world_size: int, max_bytes: int) -> None:
        from ..write.quota import probe_bytes  # imported late, because the module loads pyarrow

        self._rules = [rule for rule in rules if rank in rule.rank]
        self._whose = f"rank {rank} (of {world_size}) writes " if world_size > 1 else ""
        self._max_bytes = max_bytes
        keeps_tokens = any(rule.keep & KEEP_TOKENS for rule in rules)
        has_probe = any(rule.keep & (KEEP_PROBE | KEEP_TOKENS) for rule in self._rules)
        self._probe_bytes = probe_bytes(max_bytes, keeps_tokens=keeps_tokens) if has_probe else 0
        self._first: int | None = None
        self._num_rows: Counter[str] = Counter()
        self._num_bytes: Counter[tuple[str, int]] = Counter()
        """The bytes of the first step's rows beyond `ROW_BYTES` a row, by site (such as output) and bit of `keep`."""
        self._num_looked_at = 0
        """The number of rows at the last call of `look`."""
        self._is_over = False

    def saw(self, records: Sequence[Staged]) -> None:
        if self._is_over:
            return
        if self._first is None:
            self._first = records[0].moment.step
        for staged in records:
            if staged.moment.step == self._first:
                self._count(staged)

    def _count(self, staged: Staged) -> None:
        site = staged.origin.site
        self._num_rows[site] += 1
        if staged.keep & KEEP_TENSOR:
            self._num_bytes[site, KEEP_TENSOR] += staged.block.data.nbytes
        if staged.keep & KEEP_HISTOGRAM:
            self._num_bytes[site, KEEP_HISTOGRAM] += HISTOGRAM_BYTES
        if staged.keep & KEEP_UNITS:
            sides = sides_of(staged.shape, staged.origin.unit_dim)
            self._num_bytes[site, KEEP_UNITS] += 0 if isinstance(sides, str) else UNIT_BYTES * sides.num

    def look(self, step: int) -> str | None:
        """Return the estimate, once, when the first step has no more records to come. Otherwise return None."""
        if self._is_over or self._first is None or step <= self._first:
            return None
        num_rows = self._num_rows.total()
        if num_rows != self._num_looked_at:
            self._num_looked_at = num_rows
            return None
        self._is_over = True
        first = self._first
        is_least = any(self._begins_later(site, first) for rule in self._rules for site in rule.site)
        until = [f"{size(self.num_bytes(first, ahead + 1))} by step {first + ahead:,}" for ahead in _AHEAD]
        how = "at least" if is_least else "about"
        bound = f"{size(self._max_bytes)}{' a rank' if self._whose else ''} (max_bytes)"
        if self._probe_bytes:
            bound += f", of which {size(self._probe_bytes)} are for the numbers of every step"
        at_first = f"{size(self.num_bytes(first, 1))} at step {first:,}"
        return f"at these rules {self._whose}{how} {at_first}, {' and '.join(until)}; at most {bound}"

    def num_bytes(self, first: int, num_steps: int) -> int:
        """Estimate from the first step the bytes that `num_steps` steps from step `first` on will write."""

        @cache
        def times(schedules: frozenset[Schedule]) -> int:
            return sum(any(step in schedule for schedule in schedules) for step in range(first, first + num_steps))

        of_rows = sum(
            ROW_BYTES * num * times(self._schedules(site, ~KEEP_PROBE)) for site, num in self._num_rows.items()
        )
        of_probes = sum(  # the probe has a second number for a parameter: the size of its update
            PROBE_BYTES * (2 if site == "param" else 1) * num * times(self._schedules(site, KEEP_PROBE))
            for site, num in self._num_rows.items()
        )
        of_kept = sum(num * times(self._schedules(*kept)) for kept, num in self._num_bytes.items())
        return of_rows + min(of_probes, self._probe_bytes) + of_kept

    def _schedules(self, site: str, keep: int) -> frozenset[Schedule]:
        return frozenset(rule.steps for rule in self._rules if site in rule.site and rule.keep & keep)

    def _begins_later(self, site: str, first: int) -> bool:
        """Return True if rules keep no tensors of a site (such as output) at the first step, but will soon."""
        schedules = self._schedules(site, KEEP_TENSOR)
        soon = range(first, first + _AHEAD[-1] + 1)
        return not any(first in schedule for schedule in schedules) and any(
            step in schedule for schedule in schedules for step in soon
        )
