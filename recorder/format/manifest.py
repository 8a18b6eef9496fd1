"""The content of `_run.json` and `_writer.json`, each read once: `RunManifest`, `WriterManifest`. Opens no file.

A manifest is untrusted input, and only this module reads its members. A member whose type differs from FORMAT.md counts
as missing, and `problems` names the member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..config import RUN_NAME
from ..rules import Rule
from ..sites import FORMAT_VERSION, SITE_OF, Expected
from ..system.processes import runs
from .commands import Answer, rules_in_force
from .rundir import Members, Shared

MAX_RANKS = 1 << 14
_MAX_RANK = 1 << 24
MAX_STAGES = 1 << 14
_NEVER = 1 << 62


class Stage(NamedTuple):
    """One stage of a model that is cut into a pipeline."""

    number: int
    num_stages: int
    parts_of_loss: int = 1
    """The number by which the program divides the mean loss of a micro-batch; 0 if the loss is a sum, not a mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRanks:
    """Ranks that share the work of a root."""

    ranks: tuple[int, ...]
    """The ranks, in data-parallel order or row-major in a mesh; empty if the manifest's entries cannot be ranks."""
    kind: str = ""
    """``ddp``, ``fsdp1``, ``fsdp2`` or ``megatron``; empty for ranks that work on the same part of the batch."""
    broadcast_buffers: bool | None = None
    """Whether each forward first copies the first rank's buffers to all ranks; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """The perturbation of a root's values by the setting `jitter`."""

    moved: tuple[str, ...]
    """The kinds of values that were perturbed: ``inputs`` and ``embeddings``; empty if no value could be perturbed."""
    eps: float
    """The largest relative change of an element by the perturbation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedModule:
    """One module below a root, as its writer describes it."""

    path: str
    class_name: str = ""
    source: str = ""
    sites: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    """For each tied parameter, by its name in the module, the full name under which it is recorded."""
    non_persistent: tuple[str, ...] = ()
    """The buffers that `state_dict` leaves out."""
    foreign_hooks: tuple[str, ...] = ()
    """The program's own hooks on the module, each as a text: when the hook runs, its name and its source line."""
    hidden: str = ""
    """The reason why hooks cannot observe calls of the module; empty if they can."""
    tapped: tuple[str, ...] = ()
    """The sites at which only taps inside compiled graphs record the module."""
    has_dtensors: bool = False
    """Whether the module has parameters that are DTensors."""
    is_compiled: bool = False
    """True if the hooks do nothing, because the module is compiled."""
    disarmed: Mapping[str, int] = field(default_factory=dict)
    """For each site whose hooks kept failing, so that the recorder removed them: the first step without the hooks."""
    frozen: tuple[str, ...] = ()
    """The parameters that require no gradient."""
    rates: Mapping[str, str] = field(default_factory=dict)
    """For each parameter of an optimizer, the name of the scalar of its learning rate, such as ``lr.AdamW.0``."""
    untrained: tuple[str, ...] = ()
    """The parameters that have a gradient although no optimizer has them."""
    evaluated: int | None = None
    """The first known step at which the module was in evaluation mode while an optimizer stepped."""
    uncleared: int | None = None
    """The first known step whose gradients were added to the previous step's; in a root's first module alone."""
    members: Mapping[str, Any] = field(default_factory=dict)
    """All members of the module's entry in the writer's manifest, for code that writes the entry again."""

    @property
    def has_values(self) -> bool:
        """Whether any selected site can have values: a module without parameters has no parameter gradients."""
        kinds = {SITE_OF[site].expected for site in self.sites if site in SITE_OF}
        has_state = (Expected.PARAMETER in kinds and self.params) or (Expected.BUFFER in kinds and self.buffers)
        return bool(Expected.CALL in kinds or has_state)

    @classmethod
    def read(cls, members: Members) -> RecordedModule:
        raw = members.raw
        disarmed = {}
        if "disarmed" in raw and (inner := members.inner("disarmed")) is not None:
            disarmed = {site: step for site in list(inner.raw) if (step := inner.optional_count(site)) is not None}
        return cls(
            **members.plain(cls, "class_name", "has_dtensors", "is_compiled"),
            class_name=members.text("class"),
            tied=members.texts_of("tied") if "tied" in raw else {},
            rates=members.texts_of("rates") if "rates" in raw else {},
            has_dtensors=members.flag("dtensor"),
            is_compiled=members.flag("compiled"),
            disarmed={site: step for site, step in disarmed.items() if step < _NEVER},
            members=raw,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRoot:
    """One outermost module, as its writer describes it."""

    name: str
    class_name: str = ""
    modules: tuple[RecordedModule, ...] = ()
    data_parallel: ParallelRanks | None = None
    """The ranks among which the batch is divided; None without a data-parallel wrapper."""
    model_parallel: ParallelRanks | None = None
    """The ranks that work on the same part of the batch as this writer's rank; None if unknown."""
    stage: Stage | None = None
    unshared: Mapping[str, str] = field(default_factory=dict)
    """For each parameter of which every rank has its own values, by the parameter's full name: the reason."""
    jitter: Jitter | None = None
    members: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, members: Members) -> RecordedRoot:
        jitter = members.inner("jitter")
        unshared = members.inner("unshared")
        return cls(
            name=members.text("name"),
            class_name=members.text("class"),
            modules=tuple(map(RecordedModule.read, members.list_inner("modules"))),
            data_parallel=_ranks(members.inner("data_parallel")),
            model_parallel=_ranks(members.inner("model_parallel")),
            stage=_stage(members.inner("pipeline")),
            unshared={} if unshared is None else {name: unshared.text(name) for name in list(unshared.raw)},
            jitter=None if jitter is None else Jitter(moved=jitter.texts("moved"), eps=jitter.number("eps", below=1)),
            members=members.raw,
        )


def _ranks(members: Members | None) -> ParallelRanks | None:
    if members is None:
        return None
    return ParallelRanks(**members.plain(ParallelRanks), ranks=members.ranks("ranks", MAX_RANKS, _MAX_RANK))


def _stage(members: Members | None) -> Stage | None:
    if members is None:
        return None
    number, num_stages = members.optional_count("stage"), members.optional_count("num_stages")
    if number is None or num_stages is None or not number < num_stages <= MAX_STAGES:
        return None
    parts_of_loss = members.optional_count("parts_of_loss")
    return Stage(number, num_stages, 1 if parts_of_loss is None else parts_of_loss)


COUNTED = "counted"
"""The `step_source` in a manifest if the recorder counted the steps itself, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """One writer's row counts: `observed = written + sum of dropped + passed`, and the rows deleted by retention."""

    observed: int = 0
    written: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    passed: int = 0
    """The number of rows kept in memory only, because no trigger asked for their steps; they do not count as lost."""
    retired_rows: int = 0
    retired_bytes: int = 0
    suspect: int = 0
    """The number of written rows that may not be on the disk, because a sync of their file has failed."""
    synced: int = 0
    """The number of written rows that were surely on the disk when the rows were counted; 0 from an older writer."""

    @classmethod
    def read(cls, ledger: Members | None) -> RowCounts:
        """Return the numbers of rows in a ledger; all numbers are 0 without a ledger."""
        if ledger is None:
            return cls()
        retired = ledger.inner("retired")
        return cls(
            **ledger.plain(cls, "retired_rows", "retired_bytes"),
            dropped=ledger.counts_of("dropped"),
            retired_rows=retired.count("rows") if retired else 0,
            retired_bytes=retired.count("bytes") if retired else 0,
        )

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def num_missing(self) -> int:
        """The number of rows that were numbered, but neither written, dropped nor passed."""
        return self.observed - self.written - self.num_dropped - self.passed

    @property
    def is_possible(self) -> bool:
        """Whether the numbers of rows are consistent: no more rows were deleted than written."""
        return self.retired_rows <= self.written


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedFrom:
    """The run from which a merged run was made."""

    run_id: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunManifest:
    """The content of `_run.json`, the manifest of a run."""

    version: tuple[int, int] = FORMAT_VERSION
    run_id: str | None = None
    name: str | None = None
    world_size: int | None = None
    created_ns: int | None = None
    merged_from: MergedFrom | None = None
    """The run from which a merged run was made; None for other runs."""
    members: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """A sentence for each member of the manifest that has an unexpected type."""

    @classmethod
    def read(cls, raw: dict[str, Any]) -> RunManifest:
        """Read the untrusted JSON of a manifest that `check_version` has accepted."""
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
            merged_from=None if source is None else MergedFrom(**source.plain(MergedFrom)),
            members=raw,
            problems=tuple(problems),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """The members that a writer's manifest and its status have in common: the process's identity and state."""

    writer: str = ""
    attempt: int = 0
    state: str = ""
    """``recording``, ``closed``, or ``failed`` if the writer's thread has given up."""
    host: str = ""
    pid: int = 0
    process: str | None = None
    """A text that distinguishes processes with the same pid."""
    started_ns: int = 0

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Lifetime:
        return Lifetime(**Members(raw).plain(Lifetime))

    @property
    def is_running(self) -> bool | None:
        """Whether the process is still alive; None if this process cannot find out."""
        return runs(self.host, self.pid, self.process)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSetting:
    """A setting that was in force, and its source."""

    value: Any
    source: str


EXCEPTION = "exception"
"""The kind of event for an exception that ended the program; the event's message has the exception's type and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvent:
    """An event in a writer's manifest: a message of the recorder itself."""

    kind: str
    message: str
    members: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingDump:
    """One dump of the ring: the steps that a trigger asked a writer to write, and how much of them the writer wrote."""

    first_step: int
    last_step: int
    reason: str
    by: str
    """The text that names who asked for the dump: a rank, or a user and a host."""
    time_ns: int
    num_rows: int
    num_bytes: int
    missed: tuple[int, ...]
    """The steps of the dump that the writer no longer had in memory; of many, only the first ones."""
    num_missed: int

    @classmethod
    def read(cls, members: Members) -> RingDump:
        missed = members.raw.get("missed")
        steps = [step for step in missed if type(step) is int and step >= 0] if isinstance(missed, list) else []
        return cls(
            **members.plain(cls, "num_rows", "num_bytes", "num_missed"),
            num_rows=members.count("rows"),
            num_bytes=members.count("bytes"),
            missed=tuple(steps),
            num_missed=max(members.count("num_missed"), len(steps)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredEarlier:
    """The shards of a rank's earlier writer that a later writer of the rank has deleted."""

    shards: Mapping[str, RowCounts]
    """The rows and bytes, as `retired_rows` and `retired_bytes`, of each deleted shard, by the shard's sealed name."""
    balance: RowCounts
    """The earlier writer's ledger, if a deleted shard contained the ledger's newest state; else all numbers are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedWriter:
    """One writer of the run that a merged run was made from."""

    rank: int | None
    writer: str
    state: str
    ending: str
    balance: RowCounts

    @classmethod
    def read(cls, members: Members) -> MergedWriter:
        return cls(**members.plain(cls), balance=RowCounts.read(members))

    @property
    def has_lost(self) -> bool:
        """Whether the writer dropped or deleted rows, or was never closed."""
        return bool(self.balance.dropped or self.balance.retired_rows or self.state != "closed")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterManifest(Lifetime):
    """The content of `_writer.json`. Without arguments, the manifest of a writer that has not written one yet."""

    run_id: str | None = None
    local_rank: int | None = None
    node_rank: int | None = None
    world_size: int = 0
    """The number of ranks of the writer's launch; 0 if unknown."""
    step_source: str | None = None
    balance: RowCounts = field(default_factory=RowCounts)
    retired_earlier: Mapping[str, RetiredEarlier] = field(default_factory=dict)
    """The deleted shards of earlier writers, by the earlier writer's name."""
    restarted: str = ""
    """The error after which the writer restarted; empty if it never did."""
    roots: tuple[RecordedRoot, ...] = ()
    rules: tuple[str, ...] = ()
    settings: Mapping[str, RecordedSetting] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    events: tuple[RecordedEvent, ...] = ()
    commands: tuple[Answer, ...] = ()
    """The writer's answers, with the commands' numbers, to commands that were sent while the run was under way."""
    dumps: tuple[RingDump, ...] = ()
    autoload: bool = False
    """True if ``RECORDER=1`` started the recording, False if the program did."""
    merged_writers: tuple[MergedWriter, ...] = ()
    members: Mapping[str, Any] = field(default_factory=dict)
    """All members of the manifest, for code that writes the manifest again; empty without a manifest."""
    problems: tuple[str, ...] = ()
    """A sentence for each member of the manifest that has an unexpected type."""

    @classmethod
    def read(cls, raw: dict[str, Any], shared: Shared | None = None) -> WriterManifest:
        """Read the untrusted JSON of a manifest that `check_version` has accepted; the result keeps the JSON.

        `shared` lets the manifests of one run share equal members.
        """
        shared = shared or Shared()
        for key, value in raw.items():
            if isinstance(value, dict | list):
                raw[key] = shared.once(key, value)
        problems: list[str] = []
        members = Members(raw, problems)
        wrong: list[str] = []
        listed = Members(raw, wrong).list_inner
        roots, wrong = shared.made(raw.get("roots"), lambda: (tuple(map(RecordedRoot.read, listed("roots"))), wrong))
        earlier = members.all_inner("retired_earlier")
        settings = members.all_inner("settings")
        return cls(
            **members.plain(cls, "run_id", "problems"),
            run_id=_printable(members.optional_text("run_id")),
            balance=RowCounts.read(members.inner("ledger")),
            retired_earlier={name: _retired_earlier(one) for name, one in earlier.items()},
            roots=roots,
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
            merged_writers=tuple(map(MergedWriter.read, members.list_inner("merged_writers"))),
            members=raw,
            problems=(*problems, *wrong),
        )

    def in_force(self, rules: Sequence[Rule]) -> list[Rule]:
        """Return the writer's own and the commands' rules, each with its steps. ConfigError: a command's wrong rule."""
        return rules_in_force(rules, self.commands)

    def whole_setting(self, name: str) -> int:
        """Return the value of the setting `name` if the value is an integer; else 0."""
        value = self.settings[name].value if name in self.settings else 0
        return value if type(value) is int else 0


def _retired_earlier(members: Members) -> RetiredEarlier:
    shards = members.all_inner("shards")
    return RetiredEarlier(
        shards={
            name: RowCounts(retired_rows=one.count("rows"), retired_bytes=one.count("bytes"))
            for name, one in shards.items()
        },
        balance=RowCounts.read(members.inner("ledger")),
    )


def _printable(text: str | None) -> str | None:
    """Return a text without lone surrogates, which JSON allows and UTF-8 does not."""
    return None if text is None else text.encode(errors="backslashreplace").decode()
