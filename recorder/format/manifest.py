"""What `_run.json` and `_writer.json` say, each read once: `RunManifest`, `WriterManifest`. Never opens a file.

A manifest is untrusted input. So what a member says is looked at here and nowhere else: one of another
kind than FORMAT.md wants counts as missing, and `problems` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import RUN_NAME
from ..rules import Rule
from ..sites import FORMAT_VERSION
from ..system.processes import runs
from .commands import Answer, rules_in_force
from .members import Members, Shared
from .roots import RecordedRoot

COUNTED = "counted"
"""The `step_source` of steps that merely count from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The accounts of one writer: `observed = written + sum of dropped + passed`, and what retention removed."""

    observed: int = 0
    written: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    passed: int = 0
    """Rows that waited in the ring for a trigger until their steps had passed; no loss."""
    retired_rows: int = 0
    retired_bytes: int = 0
    suspect: int = 0
    """Written rows of which nobody knows whether the medium has them: a sync of their file has failed."""
    synced: int = 0
    """Written rows that the medium had when the account was made; 0 where an older writer did not count them."""

    @classmethod
    def read(cls, ledger: Members | None) -> Balance:
        """Read the accounts from a ledger; empty ones where it is none."""
        if ledger is None:
            return cls()
        retired = ledger.inner("retired")
        return cls(
            observed=ledger.count("observed"),
            written=ledger.count("written"),
            dropped=ledger.counts_of("dropped"),
            passed=ledger.count("passed"),
            retired_rows=retired.count("rows") if retired else 0,
            retired_bytes=retired.count("bytes") if retired else 0,
            suspect=ledger.count("suspect"),
            synced=ledger.count("synced"),
        )

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def num_missing(self) -> int:
        """Rows that were numbered and are neither written nor counted as dropped or passed."""
        return self.observed - self.written - self.num_dropped - self.passed

    @property
    def is_possible(self) -> bool:
        """Whether no more was removed than was ever written."""
        return self.retired_rows <= self.written


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedFrom:
    """The run that a merged run was made from."""

    run_id: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunManifest:
    """`_run.json`."""

    version: tuple[int, int] = FORMAT_VERSION
    """Major and minor of the format."""
    run_id: str | None = None
    name: str | None = None
    """What people call the run; None where the manifest gives no name, or no text as one."""
    world_size: int | None = None
    """Ranks that the run was started with, where it says so."""
    created_ns: int | None = None
    merged_from: MergedFrom | None = None
    """None unless it is the output of a merge."""
    members: Mapping[str, Any] = field(default_factory=dict)
    """All that it says, also what no field holds."""
    problems: tuple[str, ...] = ()
    """Members that are something else than they should be; a sentence each."""

    @classmethod
    def read(cls, raw: dict[str, Any]) -> RunManifest:
        """From an object of unknown origin; `check_version` judges whether it is a manifest of ours at all."""
        problems: list[str] = []
        members = Members(raw, problems)
        name, source = members.optional_text("name"), members.inner("merged_from")
        match raw.get("version"):
            case [int(major), int(minor)]:
                version = major, minor
            case _:
                version = FORMAT_VERSION
        return cls(
            version=version,
            run_id=_printable(members.optional_text("run_id")),
            name=name if name is not None and RUN_NAME.fullmatch(name) else None,
            world_size=members.optional_count("world_size") or None,
            created_ns=members.optional_count("created_ns"),
            merged_from=None if source is None else MergedFrom(run_id=source.text("run_id"), path=source.text("path")),
            members=raw,
            problems=tuple(problems),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """What a writer's manifest and its status both say: which process it is, and how far it has come."""

    writer: str = ""
    """Its name, as it gives it."""
    attempt: int = 0
    state: str = ""
    """``recording``, ``closed``, or ``failed`` where its thread has given up."""
    host: str = ""
    pid: int = 0
    process: str | None = None
    """Which process of that number."""
    started_ns: int = 0

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Lifetime:
        return Lifetime(**_lifetime(Members(raw)))

    @property
    def is_running(self) -> bool | None:
        """Whether its process still runs; None where that cannot be told from here."""
        return runs(self.host, self.pid, self.process)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSetting:
    """A setting that was in force, and who gave it."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvent:
    """What the recorder itself had to say."""

    kind: str
    message: str
    members: Mapping[str, Any]
    """All of it, also what no field holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingDump:
    """The steps that a trigger asked a writer for, and what it wrote of them."""

    first_step: int
    last_step: int
    reason: str
    by: str
    """Who saw it: a rank, or a user and a host."""
    time_ns: int
    num_rows: int
    num_bytes: int
    """Bytes of the payloads, before they were encoded."""
    missed: tuple[int, ...]
    """The first of the steps that the writer had given up by then."""
    num_missed: int

    @classmethod
    def read(cls, members: Members) -> RingDump:
        """From an object of unknown origin."""
        missed = members.raw.get("missed")
        steps = [step for step in missed if type(step) is int and step >= 0] if isinstance(missed, list) else []
        return cls(
            first_step=members.count("first_step"),
            last_step=members.count("last_step"),
            reason=members.text("reason"),
            by=members.text("by"),
            time_ns=members.count("time_ns"),
            num_rows=members.count("rows"),
            num_bytes=members.count("bytes"),
            missed=tuple(steps),
            num_missed=max(members.count("num_missed"), len(steps)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredEarlier:
    """What a writer has deleted of an earlier one of its rank."""

    shards: Mapping[str, Balance]
    """By the sealed names of shards, how much they held as `retired_rows` and `retired_bytes`."""
    balance: Balance
    """The earlier one's accounts, where a deleted shard held the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedWriter:
    """In a merged run, what is left of a writer that it was merged from."""

    rank: int | None
    writer: str
    state: str
    ending: str
    balance: Balance

    @property
    def has_lost(self) -> bool:
        """Whether it dropped or deleted rows, or never closed."""
        return bool(self.balance.dropped or self.balance.retired_rows or self.state != "closed")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterManifest(Lifetime):
    """`_writer.json`. Without an argument it is that of a writer which has not yet said anything."""

    run_id: str | None = None
    local_rank: int | None = None
    node_rank: int | None = None
    world_size: int = 0
    """Ranks of the writer's launch; 0 where the manifest does not say."""
    step_source: str | None = None
    balance: Balance = field(default_factory=Balance)
    retired_earlier: Mapping[str, RetiredEarlier] = field(default_factory=dict)
    """By the name of an earlier writer."""
    restarted: str = ""
    """The error after which the writer began anew; empty where it did not."""
    roots: tuple[RecordedRoot, ...] = ()
    rules: tuple[str, ...] = ()
    settings: Mapping[str, RecordedSetting] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the package, of Python and of torch."""
    events: tuple[RecordedEvent, ...] = ()
    commands: tuple[Answer, ...] = ()
    """What became of the commands that the run was sent while it was under way, by number."""
    dumps: tuple[RingDump, ...] = ()
    """What triggers asked for."""
    autoload: bool = False
    """Whether the environment asked for the recording, and not the program."""
    merged_writers: tuple[MergedWriter, ...] = ()
    members: Mapping[str, Any] = field(default_factory=dict)
    """All that it says, also what no field holds, for whoever writes it again; empty where there is no manifest."""
    problems: tuple[str, ...] = ()
    """Members that are something else than they should be; a sentence each."""

    @classmethod
    def read(cls, raw: dict[str, Any], shared: Shared | None = None) -> WriterManifest:
        """From an object of unknown origin; `check_version` judges whether it is a manifest of ours at all.

        Args:
            raw: the object; it is the manifest's own from now on.
            shared: holds what manifests of one run say alike.
        """
        shared = shared or Shared()
        for key, value in raw.items():
            if isinstance(value, dict | list):
                raw[key] = shared.once(key, value)
        problems: list[str] = []
        members = Members(raw, problems)
        roots, wrong = shared.made(raw.get("roots"), lambda: _roots(raw))
        earlier = members.all_inner("retired_earlier")
        settings = members.all_inner("settings")
        return cls(
            **_lifetime(members),
            run_id=_printable(members.optional_text("run_id")),
            local_rank=members.optional_count("local_rank"),
            node_rank=members.optional_count("node_rank"),
            world_size=members.count("world_size"),
            step_source=members.optional_text("step_source"),
            balance=Balance.read(members.inner("ledger")),
            retired_earlier={name: _retired_earlier(one) for name, one in earlier.items()},
            restarted=members.text("restarted"),
            roots=roots,
            rules=members.texts("rules"),
            settings={
                name: RecordedSetting(value=one.raw.get("value"), source=one.text("source"))
                for name, one in settings.items()
            },
            versions=members.texts_of("versions"),
            events=tuple(
                RecordedEvent(kind=one.text("kind"), message=one.text("message"), members=one.raw)
                for one in members.list_inner("events")
            ),
            commands=tuple(map(Answer.read, members.list_inner("commands"))),
            dumps=tuple(map(RingDump.read, members.list_inner("dumps"))),
            autoload=members.flag("autoload"),
            merged_writers=tuple(map(_merged_writer, members.list_inner("merged_writers"))),
            members=raw,
            problems=(*problems, *wrong),
        )

    def in_force(self, rules: Sequence[Rule]) -> list[Rule]:
        """The writer's own rules, already read, and those that it was sent, each with the steps at which it held.

        Raises:
            ConfigError: a rule that it was sent is none.
        """
        return rules_in_force(rules, self.commands)

    def whole_setting(self, name: str) -> int:
        """The value of a setting that is a whole number; 0 where it is none."""
        value = self.settings[name].value if name in self.settings else 0
        return value if type(value) is int else 0


def _lifetime(members: Members) -> dict[str, Any]:
    return {
        "writer": members.text("writer"),
        "attempt": members.count("attempt"),
        "state": members.text("state"),
        "host": members.text("host"),
        "pid": members.count("pid"),
        "process": members.optional_text("process"),
        "started_ns": members.count("started_ns"),
    }


def _roots(raw: dict[str, Any]) -> tuple[tuple[RecordedRoot, ...], list[str]]:
    problems: list[str] = []
    return tuple(map(RecordedRoot.read, Members(raw, problems).list_inner("roots"))), problems


def _retired_earlier(members: Members) -> RetiredEarlier:
    shards = members.all_inner("shards")
    return RetiredEarlier(
        shards={
            name: Balance(retired_rows=one.count("rows"), retired_bytes=one.count("bytes"))
            for name, one in shards.items()
        },
        balance=Balance.read(members.inner("ledger")),
    )


def _merged_writer(members: Members) -> MergedWriter:
    return MergedWriter(
        rank=members.optional_count("rank"),
        writer=members.text("writer"),
        state=members.text("state"),
        ending=members.text("ending"),
        balance=Balance.read(members),
    )


def _printable(text: str | None) -> str | None:
    """A text without halves of characters, which JSON may hold and UTF-8 may not."""
    return None if text is None else text.encode(errors="backslashreplace").decode()
