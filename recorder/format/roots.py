"""What `_writer.json` says of outermost modules: their modules, and how ranks share the work on them. Knows no rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..sites import SITE_OF, Expected, values_of
from .members import Members

MAX_RANKS = 1 << 14
_MAX_RANK = 1 << 24
MAX_STAGES = 1 << 14
_NEVER = 1 << 62


class Stage(NamedTuple):
    """A part of a model that runs one after the others."""

    number: int
    num_stages: int

    def is_between(self, module_path: str, site: str) -> bool:
        """Whether a value comes from another stage or goes to one, and is no input or output of the model."""
        if module_path:
            return False
        is_first, is_last = self.number == 0, self.number == self.num_stages - 1
        return not is_first if values_of(site) == "input" else not is_last and values_of(site) == "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRanks:
    """Ranks that share a root."""

    ranks: tuple[int, ...]
    """In their order; none where they cannot be ranks."""
    kind: str = ""
    """``ddp``, ``fsdp1`` or ``fsdp2``; empty of ranks that work on the same part of the batch."""
    broadcast_buffers: bool | None = None
    """Whether each forward begins with the first rank's buffers on all ranks; None where nothing says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """What the setting `jitter` has moved of a root."""

    moved: tuple[str, ...]
    """``inputs``, ``embeddings``, or nothing."""
    eps: float
    """By which share of its value an element was moved at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedModule:
    """One module below a root, as its writer describes it."""

    path: str
    class_name: str = ""
    source: str = ""
    """File and line of its class."""
    sites: tuple[str, ...] = ()
    """Those that a rule selects."""
    params: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Further paths of it."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """For parameters with several names, by its own name the full one under which it is recorded."""
    non_persistent: tuple[str, ...] = ()
    """Buffers that no state dict has."""
    foreign_hooks: tuple[str, ...] = ()
    """Hooks of the program on it: when each runs, its name and its source line."""
    hidden: str = ""
    """Why hooks see no call of it; empty where they do."""
    tapped: tuple[str, ...] = ()
    """Sites at which graphs alone show it."""
    has_dtensors: bool = False
    """Whether it has parameters that are DTensors."""
    is_compiled: bool = False
    """Its hooks step aside."""
    disarmed: Mapping[str, int] = field(default_factory=dict)
    """By site, the step from which on its hooks were off, as they kept failing."""
    members: Mapping[str, Any] = field(default_factory=dict)
    """All that its writer says, also what no field holds, for whoever writes it again."""

    @property
    def has_values(self) -> bool:
        """Whether what is selected can exist: a module without parameters has no gradients of them to record."""
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
            path=members.text("path"),
            class_name=members.text("class"),
            source=members.text("source"),
            sites=members.texts("sites"),
            params=members.texts("params"),
            buffers=members.texts("buffers"),
            aliases=members.texts("aliases"),
            tied=members.texts_of("tied") if "tied" in raw else {},
            non_persistent=members.texts("non_persistent"),
            foreign_hooks=members.texts("foreign_hooks"),
            hidden=members.text("hidden"),
            tapped=members.texts("tapped"),
            has_dtensors=members.flag("dtensor"),
            is_compiled=members.flag("compiled"),
            disarmed={site: step for site, step in disarmed.items() if step < _NEVER},
            members=raw,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRoot:
    """One outermost module."""

    name: str
    class_name: str = ""
    modules: tuple[RecordedModule, ...] = ()
    data_parallel: ParallelRanks | None = None
    """Those that have other parts of the batch; None without a wrapper."""
    model_parallel: ParallelRanks | None = None
    """Those that work on the same part of the batch; None where nothing tells of any."""
    stage: Stage | None = None
    """Which part of a pipeline it is; None where it is none."""
    unshared: Mapping[str, str] = field(default_factory=dict)
    """Parameters that each rank has for itself, by full name, and why."""
    jitter: Jitter | None = None
    members: Mapping[str, Any] = field(default_factory=dict)
    """All that its writer says, also what no field holds, for whoever writes it again."""

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
    return ParallelRanks(
        ranks=members.ranks("ranks", MAX_RANKS, _MAX_RANK),
        kind=members.text("kind"),
        broadcast_buffers=members.optional_flag("broadcast_buffers"),
    )


def _stage(members: Members | None) -> Stage | None:
    if members is None:
        return None
    number, num_stages = members.optional_count("stage"), members.optional_count("num_stages")
    if number is None or num_stages is None or not number < num_stages <= MAX_STAGES:
        return None
    return Stage(number, num_stages)
