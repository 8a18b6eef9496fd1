"""The part of a recording that hooks and taps need, as protocols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..records import Chunk, Moment, Origin, Staged
from .selection import RuleSelection


class Observer(Protocol):
    """The part of a recording that a hook needs. Any thread may call the methods."""

    @property
    def selection(self) -> RuleSelection: ...

    @property
    def masks(self) -> MaskByRuleSet:
        """The bits of KEEP_* of each rule set at the current step; all are 0 while recording is paused."""

    @property
    def is_open(self) -> bool:
        """Whether the recording has not been closed."""

    @property
    def is_in_stage(self) -> bool:
        """Whether the current call of a root, or else the last one, is a call of a pipeline stage."""

    @property
    def lost(self) -> Callable[[], object]:
        """A counter of values neither recorded nor counted as dropped. Calling it needs no stack and no memory."""

    def keep_of(self, rule_set: int, call: int) -> int:
        """Return bits of KEEP_* for a rule set at this step and call."""

    def observe(
        self,
        origin: Origin,
        moment: Moment,
        phase: str,
        call: int,
        repeat: int,
        keep: int,
        tensor: torch.Tensor,
        scope: str | None = None,
        chunk: Chunk | None = None,
        note: str | None = None,
        put: Callable[[Staged], None] | None = None,
    ) -> None:
        """Pass a tensor's values to the writer, or count them as dropped."""

    def site_failed(self, origin: Origin, error: Exception) -> bool:
        """Count an error of the recorder at a site of a module; return whether the site is disarmed now."""

    def keep_leaf_hook(self, handle: Any) -> None:
        """Take a hook on a leaf tensor, which would outlive the graph; the recording removes it at the next step."""


class MaskByRuleSet(Protocol):
    """The bits of KEEP_* of each rule set."""

    def __getitem__(self, rule_set: int, /) -> int: ...
