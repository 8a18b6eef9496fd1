"""The state of a run while it is recorded, from the newest `_status.json` of each rank.

This module opens no shard. A status is untrusted: a member that should be a number but is none in range becomes 0, and
a member that should be a text but is none becomes empty.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from threading import Lock
from typing import Any

from ..errors import RunError
from ..format.commands import Answer
from ..format.manifest import Lifetime, RowCounts
from ..format.rundir import (
    RUN_MANIFEST,
    STATUS,
    STATUS_BYTES,
    WRITER_MANIFEST,
    Members,
    encode_manifest,
    parse_rank_dir,
)
from ..read.writers import list_writers, size_of, writer_folders
from ..storage.locations import Location, store_of

PROOF = "_prove.json"
PROOF_BYTES = 1 << 20
"""The size of the largest proof file that is read. The recorder writes no larger file."""
UNCHANGED, CHANGED, UNKNOWN = "unchanged", "changed", "cannot tell"
_MAX_REASONS = 64
_MAX_ANSWERS = 64
_MAX_FINDINGS = 16
_MAX_TEXT = 300
_MAX_SMALL_MANIFEST_BYTES = 1 << 20
"""The size of the largest manifest that is read if there is no status. Thousands of larger ones would take minutes."""
_GRACE_S = 3.0
"""How late a status may be, in seconds, before its writer counts as silent."""
_BEGIN_S = 60.0
"""A writer without a status counts as silent when its directory is this many seconds old."""

_SETTLED_NS = 2_000_000_000
"""If a file was unchanged for this long when it was read, any later change gives it another time stamp."""

ENDED = ("closed", "killed", "failed")
"""The states of writers that have ended. A writer never leaves them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFinding:
    """What one rule found during training, in one module on one rank."""

    rule: str
    severity: str
    module: str
    """The path of the module. Empty for the whole model, and for modules for which the status has no room."""
    step: int
    """The step of the first finding."""
    number: int
    text: str
    """The text of the first finding. It is shown as a part of a line."""
    site: str = ""
    """The site of the first finding. Empty in statuses of earlier versions."""

    @classmethod
    def read_all(cls, raw: dict[str, Any]) -> tuple[LiveFinding, ...]:
        found = [cls(**one.plain(cls)) for one in Members(raw).list_inner("findings")[:_MAX_FINDINGS]]
        names = ("rule", "severity", "module", "text", "site")
        return tuple(replace(one, **{name: getattr(one, name)[:_MAX_TEXT] for name in names}) for one in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Lifetime):
    """The latest status that a writer wrote about itself, such as its step and its counts of rows."""

    interval_s: float = 0.0
    step: int = 0
    has_step: bool = True
    """False if `step` and the counts have no meaning: the writer left no status, or only its first one."""
    observed: int = 0
    written: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    written_bytes: int = 0
    used_bytes: int = 0
    """The bytes that the writer has on the disk now. It wrote more if retention has removed shards."""
    max_bytes: int = 0
    free_bytes: int | None = None
    pool_bytes: int = 0
    pool_used_bytes: int = 0
    pool_peak_bytes: int = 0
    waited_s: float = 0.0
    longest_wait_s: float = 0.0
    queue_length: int = 0
    recent_s: float = 0.0
    """The time that `recent_steps` and `recent_bytes` cover, in seconds."""
    recent_steps: int = 0
    recent_bytes: int = 0
    commands: tuple[Answer, ...] = ()
    findings: tuple[LiveFinding, ...] = ()
    num_commands_refused: int = 0
    """The number of command files that the writer refused because they hold no valid command."""

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def steps_per_s(self) -> float:
        return self.recent_steps / self.recent_s if self.recent_s > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.recent_bytes / self.recent_s if self.recent_s > 0 else 0.0


_STATUS_MEMBERS = tuple(one.name for one in fields(Status))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNow:
    """The present state of one rank, from its newest writer."""

    rank: int
    state: str
    """The state in `status`, or ``killed`` (the process is gone), ``silent`` (no status for too long), ``starting``."""
    silent_s: float
    status: Status
    num_writers: int
    """The number of processes that have written for this rank in the run."""
    num_alive: int
    """The number of the rank's writers that are recording. If it is above 1, two jobs use the same directory."""

    def members(self) -> dict[str, Any]:
        """Return the rank's state, status and rates per second as the members of a JSON object."""
        status: dict[str, Any] = {name: getattr(self.status, name) for name in _STATUS_MEMBERS}
        status |= {name: [asdict(one) for one in status[name]] for name in ("commands", "findings")}
        step = self.status.step if status.pop("has_step") else None
        own = {name: getattr(self, name) for name in ("rank", "state", "silent_s", "num_writers", "num_alive")}
        rates = {"steps_per_s": self.status.steps_per_s, "bytes_per_s": self.status.bytes_per_s}
        return {**status, **rates, **own, "step": step, "is_ended": self.state in ENDED}


@dataclass(slots=True)
class _StatusFile:
    directory: Location
    status: Status
    is_shown: bool = False
    """False if there is no status and only the manifest was read."""
    changed_ns: int = 0
    inode: int = 0
    read_ns: int = 0
    """When the status was last read. After a change just before that, a later change may have the same time stamp."""
    members: dict[str, Any] | None = None
    """The status in the document of the writer's node (host). None if no node has such a document."""


class RunWatch:
    """Looks repeatedly at the ranks of a run. Ranks may begin, restart and end meanwhile."""

    def __init__(self, run: Location) -> None:
        self.run = run
        self._store = store_of(run)
        self._seen: dict[tuple[str, str], _StatusFile] = {}
        self._lock = Lock()

    def look(self) -> list[RankNow]:
        """Return the present state of every rank, sorted by rank.

        Raises NotARunError if the run's directory can no longer be listed. Called on any thread.
        """
        with self._lock:
            self._store.refresh()
            ranks = (self._describe(rank, writers) for rank, writers in (self._shown() or self._listed()).items())
            return sorted((one for one in ranks if one is not None), key=lambda one: one.rank)

    def _shown(self) -> dict[int, list[_StatusFile]]:
        """Return the writers by rank, from the documents of the nodes that ship the run. The run is not listed."""
        of_rank: dict[int, list[_StatusFile]] = {}
        for key, (changed_ns, members) in self._store.shown_statuses(self.run).items():
            folder, _, name = key.partition("/")
            if (rank := parse_rank_dir(folder)) is not None:
                seen = self._seen_file(folder, name)
                if seen.members is not members:  # otherwise the node's document has not changed
                    seen.status, seen.is_shown, seen.members = _parse(name, members), True, members
                seen.changed_ns = changed_ns
                of_rank.setdefault(rank, []).append(seen)
        return of_rank

    def _listed(self) -> dict[int, list[_StatusFile]]:
        of_rank = {
            rank: [self._seen_file(folder, name) for name in list_writers(self.run / folder)]
            for folder, rank in writer_folders(self.run)
            if rank is not None
        }
        for _ in self._store.each(self._refresh, [one for files in of_rank.values() for one in files]):
            pass
        return of_rank

    def _seen_file(self, folder: str, name: str) -> _StatusFile:
        if (seen := self._seen.get((folder, name))) is None:
            status = Status(writer=name, has_step=False)
            seen = self._seen[folder, name] = _StatusFile(self.run / folder / name, status)
        return seen

    def _describe(self, rank: int, writers: list[_StatusFile]) -> RankNow | None:
        if not writers:
            return None
        states = [self._state(seen) for seen in writers]
        best = max(range(len(writers)), key=lambda i: (writers[i].status.attempt, writers[i].status.started_ns))
        seen = writers[best]
        return RankNow(
            rank=rank, state=states[best], silent_s=self._silent_s(seen), status=seen.status,
            num_writers=len(writers), num_alive=sum(state not in ENDED for state in states),
        )  # fmt: skip

    def _refresh(self, seen: _StatusFile) -> None:
        """Read a writer's status, or else its manifest, if the file has changed. Ignore a torn or invalid file."""
        if seen.status.state != "closed" and not self._read_status(seen) and not seen.is_shown:
            self._read_manifest(seen)

    def _read_status(self, seen: _StatusFile) -> bool:
        path, read_ns = seen.directory / STATUS, time.time_ns()
        try:
            stat = self._store.look_at(path)
            is_settled = seen.read_ns - stat.changed_ns > _SETTLED_NS
            if seen.is_shown and is_settled and (stat.changed_ns, stat.inode) == (seen.changed_ns, seen.inode):
                return True
            members = self._store.read_json(path, STATUS_BYTES)
        except (OSError, RunError):
            return False
        seen.status, seen.is_shown, seen.read_ns = _parse(seen.directory.name, members), True, read_ns
        seen.changed_ns, seen.inode = stat.changed_ns, stat.inode
        return True

    def _read_manifest(self, seen: _StatusFile) -> None:
        path = seen.directory / WRITER_MANIFEST
        try:
            stat = self._store.look_at(path)
            if (stat.changed_ns, stat.inode) == (seen.changed_ns, seen.inode):
                return
            members = self._store.read_json(path, _MAX_SMALL_MANIFEST_BYTES)
            ledger = Members(members).inner("ledger") or Members({})
            used_bytes = size_of(seen.directory)  # there is no status if a setting turns it off, or in older versions
            seen.status = replace(_parse(seen.directory.name, members | ledger.raw), used_bytes=used_bytes)
        except (OSError, RunError):
            return
        seen.changed_ns, seen.inode = stat.changed_ns, stat.inode

    def _silent_s(self, seen: _StatusFile) -> float:
        """Return the seconds since the status file changed, by its time stamp: the writer's clock may differ."""
        changed_ns = seen.changed_ns
        if not changed_ns:
            with suppress(OSError):
                changed_ns = self._store.look_at(seen.directory).changed_ns
        return max((time.time_ns() - changed_ns) / 1e9, 0.0) if changed_ns else 0.0

    def _state(self, seen: _StatusFile) -> str:
        status = seen.status
        if status.state in ENDED:
            return status.state
        if not seen.changed_ns:
            return "starting" if self._silent_s(seen) < _BEGIN_S else "silent"
        if status.is_running is False:
            return "killed"
        if seen.is_shown and status.interval_s and self._silent_s(seen) > 2 * status.interval_s + _GRACE_S:
            return "silent"
        return "recording"


def find_silent(folder: Location, paths: Sequence[str]) -> list[str]:
    """Return those of `paths` whose run has a silent rank. Runs in an object store are read in parallel."""

    def is_silent(path: str) -> bool:
        try:
            return any(rank.state == "silent" for rank in RunWatch(folder / path).look())
        except RunError:  # the run was just pruned
            return False

    return [path for path, is_one in zip(paths, store_of(folder).each(is_silent, paths), strict=True) if is_one]


def _parse(writer: str, raw: dict[str, Any]) -> Status:
    members, identity = Members(raw), _identity(writer, raw)
    others = ("has_step", "recent_s", "recent_steps", "recent_bytes", "num_commands_refused")
    read = members.plain(Status, *identity, *others)
    recent, dropped = members.inner("recent") or Members({}), RowCounts.read(members).dropped
    return Status(
        **identity,
        **read,
        has_step="step" in raw and (bool(read["interval_s"]) or identity["state"] in ENDED),
        dropped={reason[:_MAX_TEXT]: count for reason, count in list(dropped.items())[:_MAX_REASONS]},
        recent_s=recent.number("seconds"),
        recent_steps=recent.count("steps"),
        recent_bytes=recent.count("bytes"),
        commands=tuple(map(Answer.read, members.list_inner("commands")[-_MAX_ANSWERS:])),
        findings=LiveFinding.read_all(raw),
        num_commands_refused=members.count("commands_refused"),
    )


def _identity(writer: str, raw: dict[str, Any]) -> dict[str, Any]:
    identity = Members(raw).plain(Lifetime)
    for name in ("host", "process"):
        identity[name] = identity[name] and identity[name][:_MAX_TEXT]
    state = identity["state"] if identity["state"] in ENDED else "recording"
    return identity | {"writer": writer, "state": state}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What `recorder prove` found out about a program, and what it compared."""

    verdict: str
    """`UNCHANGED`, `CHANGED` or `UNKNOWN`. A verdict of a later version counts as ``cannot tell`` for exit codes."""
    text: str
    """The verdict as a sentence."""
    steps: int = 0
    ranks: int = 0
    first_step: int | None = None
    """The first step that differs, counted from 0 at the start of the program. None if no step differs."""
    notes: tuple[str, ...] = ()
    """What could not be compared, and why."""
    time_ns: int = 0
    """When the verdict was reached, in nanoseconds since the epoch."""
    subject: str = "recording"
    """What was tested: ``recording`` (does it change the training?), ``resume``, ``checkpoint`` or ``world``."""
    compared: Mapping[str, int] = field(default_factory=dict)
    """The number of values that were compared, by kind, such as ``parameters``."""
    commands: tuple[str, ...] = ()
    """The command lines that were launched. There are two if another command resumed the program."""
    commit: str = ""
    """The git commit of the program, with ``, changed`` if files differ from it. Empty if unknown."""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    """The host, the operating system and the processor of rank 0."""

    @property
    def circumstances(self) -> str:
        """What was compared, of which program and where, as one line of text. Empty for a file of an old version."""
        compared = ", ".join(f"{number:,} {kind}" for kind, number in self.compared.items())
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        commit = self.commit and f"commit {self.commit}"
        return "; ".join(part for part in (compared, *self.commands, commit, versions, self.machine) if part)

    def encode(self) -> bytes:
        return encode_manifest({**asdict(self), "notes": list(self.notes), "commands": list(self.commands)})

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Proof:
        members = Members(raw)
        read = members.plain(cls) | {"compared": members.counts_of("compared")}
        return cls(**read | {"verdict": read["verdict"] or UNKNOWN})


def keep_proof(proof: Proof, run: Path) -> None:
    """Write the verdict into the run's directory, with the permissions of the run's manifest."""
    temporary = run / f"{PROOF}.tmp"
    temporary.write_bytes(proof.encode())
    temporary.chmod((run / RUN_MANIFEST).stat().st_mode & 0o777)
    temporary.replace(run / PROOF)
