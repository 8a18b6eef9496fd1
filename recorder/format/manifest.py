"""The manifests `_run.json` and `_writer.json`, as the classes `RunManifest` and `WriterManifest`. Opens no file.

A manifest is untrusted input, and only this module reads its members. A member whose type differs from FORMAT.md counts
as missing, and `problems` names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """The number by which the program divides a micro-batch's mean loss; 0 if the loss is a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRanks:
    """Ranks that share the work of a root (a recorded model)."""

    ranks: tuple[int, ...]
    """The ranks in data-parallel order, or row-major in a mesh. Empty if the manifest's list is invalid."""
    kind: str = ""
    """``ddp``, ``fsdp1``, ``fsdp2`` or ``megatron`` if the ranks divide the batch, else empty."""
    broadcast_buffers: bool | None = None
    """Whether each forward begins by copying the first rank's buffers to all ranks. None if unknown."""
    joins: bool = False
    """Whether the first call was inside of DDP's ``join()``, so that ranks may make unequal numbers of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """The small perturbation of a model's values that the setting `jitter` asked for."""

    moved: tuple[str, ...]
    """The kinds of perturbed values: ``inputs`` and ``embeddings``. Empty if no value could be perturbed."""
    eps: float
    """The largest relative change of an element."""


FACTS = (
    "frozen", "untrained", "untrained_since", "evaluated", "loss_argument", "loss_argument_since", "uncleared",
    "optimizer_anew", "optimizer_anew_since", "validated_in_training", "batch_as_time",
)  # fmt: skip
"""The members of `RecordedModule` that say what a program does with a module, and may be so on one rank alone."""
_NO_FACT = (None, (), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedModule:
    """One module of a model, as a writer describes it."""

    path: str
    class_name: str = ""
    source: str = ""
    sites: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    """For each tied parameter of the module: the full name under which it is recorded."""
    non_persistent: tuple[str, ...] = ()
    """The names of buffers that `state_dict` leaves out."""
    foreign_hooks: tuple[str, ...] = ()
    """The program's own hooks on the module. Each text says when the hook runs, its name and its source line."""
    hidden: str = ""
    """The reason why hooks cannot observe the module's calls. Empty if they can."""
    tapped: tuple[str, ...] = ()
    """The sites (such as ``output``) that are recorded only by taps: nodes added to a compiled graph."""
    has_dtensors: bool = False
    """Whether the module has parameters that are DTensors."""
    is_compiled: bool = False
    """True if the module is compiled, so that hooks on it do nothing."""
    disarmed: Mapping[str, int] = field(default_factory=dict)
    """For each site whose hooks were removed because they kept failing: the first step without them."""
    frozen: tuple[str, ...] = ()
    """The parameters that require no gradient."""
    rates: Mapping[str, str] = field(default_factory=dict)
    """For each parameter of an optimizer, the scalar that records its learning rate, such as ``lr.AdamW.0``."""
    untrained: tuple[str, ...] = ()
    """The parameters that get a gradient although no optimizer updates them."""
    untrained_since: int | None = None
    """The first known step at which the module had such a parameter."""
    feeds_trained: bool = False
    """Whether no optimizer had anything of the model then, but of a model that was called after it."""
    unfrozen: int | None = None
    """The last step at which a parameter was seen to require a gradient that had required none before."""
    evaluated: int | None = None
    """The first step at which the module was seen in evaluation mode while an optimizer stepped."""
    loss_argument: str = ""
    """Of the first module: the function of the loss that got an argument which it does not expect, and the function
    that made the argument, by autograd's names: ``LogSoftmax of Softmax``. ``Neg of NllLoss`` is a negated loss.
    ``Shift of 2 of tokens`` says that each label is the token two places after that of the input `tokens` at its
    place, and ``Shift of 0 of tokens`` that it is this token. Earlier versions do not name the input."""
    loss_argument_since: int | None = None
    """The step at which this argument was seen first."""
    labels_of: str = ""
    """Of the first module: the function of the loss that has the labels, by autograd's name: ``NllLoss of 10 classes``
    or ``MseLoss`` where it is the whole loss, ``MseLoss of Sigmoid`` where it gets what a function with bounds returns,
    ``Add of MseLoss`` where the loss is a sum, with ``summed`` or ``by element`` behind it where it takes no mean.
    Empty if it is not known, or not always the same."""
    has_many_labels: bool = False
    """Of the first module: whether a loss was the sum of losses of several whole-numbered labels."""
    has_uneven_calls: bool = False
    """Of the first module: whether the number of calls before a backward varies by a factor of two and more."""
    whole_sets: tuple[int, ...] = ()
    """Of the first module: the numbers of samples of the data loaders that gave all their samples in one batch."""
    uncleared: int | None = None
    """The first step seen to add a gradient of the module to the previous step's."""
    optimizer_anew: str = ""
    """Of the first module: the class of the optimizers that are made anew for each update."""
    optimizer_anew_since: int | None = None
    """The step at which this was seen. None if it is not so, or not any more."""
    validated_in_training: int | None = None
    """Of the first module: the first step with many calls of the model without gradients, in training mode, as of a
    validation. None if there was none, or if the model was ever called in evaluation mode."""
    batch_as_time: int | None = None
    """The step at which the module was seen to take a dim as long as the labels, so perhaps the batch, for the time."""
    graphless: bool = False
    """Whether all calls of the module so far were made with gradients disabled, as under ``torch.no_grad``."""
    given_again: int | None = None
    """The step since which the root's first argument is one of at most four tensors, if it is so for 16 calls."""
    members: Mapping[str, Any] = field(default_factory=dict)
    """The module's JSON in the manifest, for code that writes it again."""

    def with_facts_of(self, other: RecordedModule) -> RecordedModule:
        """Return this module, with what the program does with it on another rank where it is not so on this rank."""
        if other is self:
            return self
        facts = {name: getattr(other, name) for name in FACTS if other.has_fact(name) and not self.has_fact(name)}
        return replace(self, **facts) if facts else self

    def has_fact(self, name: str) -> bool:
        """Whether a member of `FACTS` says something about this module."""
        return getattr(self, name) not in _NO_FACT

    @property
    def has_values(self) -> bool:
        """Whether at least one selected site can have values. For example, only parameters have parameter gradients."""
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
            has_dtensors=members.flag("dtensor"),
            is_compiled=members.flag("compiled"),
            disarmed={site: step for site, step in disarmed.items() if step < _NEVER},
            members=raw,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRoot:
    """One recorded model (an outermost module), as a writer describes it."""

    name: str
    class_name: str = ""
    modules: tuple[RecordedModule, ...] = ()
    data_parallel: ParallelRanks | None = None
    """The ranks among which the batch is divided; None without a data-parallel wrapper."""
    model_parallel: ParallelRanks | None = None
    """The ranks that work on the same samples as this writer's rank. None if unknown."""
    stage: Stage | None = None
    unshared: Mapping[str, str] = field(default_factory=dict)
    """The parameters of which every rank has its own values, by full name, each with the reason."""
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
    return ParallelRanks(**members.plain(ParallelRanks, "ranks"), ranks=members.ranks("ranks", MAX_RANKS, _MAX_RANK))


def _stage(members: Members | None) -> Stage | None:
    if members is None:
        return None
    number, num_stages = members.optional_count("stage"), members.optional_count("num_stages")
    if number is None or num_stages is None or not number < num_stages <= MAX_STAGES:
        return None
    parts_of_loss = members.optional_count("parts_of_loss")
    return Stage(number, num_stages, 1 if parts_of_loss is None else parts_of_loss)


COUNTED = "counted"
"""The value of `step_source` in a manifest if the recorder itself counted the steps from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """One writer's ledger of rows: `observed` = `written` + all `dropped` + `passed`. Retired rows are deleted."""

    observed: int = 0
    written: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    passed: int = 0
    """The number of rows kept in memory only, because no trigger asked for their steps. They do not count as lost."""
    retired_rows: int = 0
    retired_bytes: int = 0
    suspect: int = 0
    """The number of written rows that may be missing on the disk, because a sync of their file failed."""
    synced: int = 0
    """The number of written rows known to be on the disk when the rows were counted. 0 from an older writer."""

    @classmethod
    def read(cls, ledger: Members | None) -> RowCounts:
        """Read row counts from a ledger. Without a ledger all of them are 0."""
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
        """The number of observed rows that were neither written, dropped nor passed."""
        return self.observed - self.written - self.num_dropped - self.passed

    @property
    def is_possible(self) -> bool:
        """Whether no more rows were deleted than written."""
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
    """The identity and state of a writer's process, which its manifest and its status file both contain."""

    writer: str = ""
    attempt: int = 0
    state: str = ""
    """``recording``, ``closed``, or ``failed`` if the writer thread gave up."""
    host: str = ""
    pid: int = 0
    process: str | None = None
    """A text that differs between processes with the same pid."""
    started_ns: int = 0

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Lifetime:
        return Lifetime(**Members(raw).plain(Lifetime))

    @property
    def is_running(self) -> bool | None:
        """Whether the process is still alive. None if this process cannot find out."""
        return runs(self.host, self.pid, self.process)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSetting:
    """The value of a setting, and where the value came from."""

    value: Any
    source: str


EXCEPTION = "exception"
"""The kind of an event for an exception that ended the program. Its message is the exception's type and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvent:
    """A message of the recorder itself, kept in a writer's manifest."""

    kind: str
    message: str
    members: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingDump:
    """One dump of the ring (a buffer of recent steps in memory): the steps requested, and the rows written."""

    first_step: int
    last_step: int
    reason: str
    by: str
    """The sender of the request: a rank, or a user and a host."""
    time_ns: int
    num_rows: int
    num_bytes: int
    missed: tuple[int, ...]
    """The requested steps that were no longer in memory. Of many, only the first ones."""
    num_missed: int

    @classmethod
    def read(cls, members: Members) -> RingDump:
        missed = members.raw.get("missed")
        steps = [step for step in missed if type(step) is int and step >= 0] if isinstance(missed, list) else []
        return cls(
            **members.plain(cls, "num_rows", "num_bytes", "missed", "num_missed"),
            num_rows=members.count("rows"),
            num_bytes=members.count("bytes"),
            missed=tuple(steps),
            num_missed=max(members.count("num_missed"), len(steps)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredEarlier:
    """The shards of an earlier writer that a later writer of the same rank has deleted."""

    shards: Mapping[str, RowCounts]
    """For each deleted shard, by its sealed name: its rows and bytes, as `retired_rows` and `retired_bytes`."""
    balance: RowCounts
    """The earlier writer's latest row counts if only a deleted shard had them; else all 0."""


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
    """The content of `_writer.json`. Without arguments, stands for a manifest that is not written yet."""

    run_id: str | None = None
    local_rank: int | None = None
    node_rank: int | None = None
    world_size: int = 0
    """The number of ranks of the writer's launch; 0 if unknown."""
    step_source: str | None = None
    balance: RowCounts = field(default_factory=RowCounts)
    retired_earlier: Mapping[str, RetiredEarlier] = field(default_factory=dict)
    """For each earlier writer of the rank, by its name: its shards that this writer has deleted."""
    restarted: str = ""
    """The error after which the writer restarted; empty if it never did."""
    roots: tuple[RecordedRoot, ...] = ()
    rules: tuple[str, ...] = ()
    settings: Mapping[str, RecordedSetting] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    events: tuple[RecordedEvent, ...] = ()
    commands: tuple[Answer, ...] = ()
    """The writer's answers to commands that were sent during the run."""
    dumps: tuple[RingDump, ...] = ()
    autoload: bool = False
    """True if ``RECORDER=1`` started the recording, and False if the program did."""
    merged_writers: tuple[MergedWriter, ...] = ()
    members: Mapping[str, Any] = field(default_factory=dict)
    """The manifest's JSON, for code that writes it again. Empty without a manifest."""
    problems: tuple[str, ...] = ()
    """A sentence for each member of the manifest that has an unexpected type."""

    @classmethod
    def read(cls, raw: dict[str, Any], shared: Shared | None = None) -> WriterManifest:
        """Read the untrusted JSON of a manifest that `check_version` has accepted. Keeps `raw`.

        With `shared`, the manifests of one run keep a single copy of members that are equal.
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
        """Return `rules` and commands' rules, each with its steps. Raises ConfigError if a command's rule is wrong."""
        return rules_in_force(rules, self.commands)

    def whole_setting(self, name: str) -> int:
        """Return the setting `name`. Return 0 if its value is no integer."""
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
    """Escape lone surrogates, which JSON allows and UTF-8 does not."""
    return None if text is None else text.encode(errors="backslashreplace").decode()
