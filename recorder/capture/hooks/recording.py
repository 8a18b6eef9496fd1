"""The part of a recording that roots need beyond `Observer`, and the depth of a thread inside calls of roots."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from ...config import Settings
from ...observe.clock import Clock
from ...observe.observer import Observer
from ...system.log import Events
from ..parallel.aliases import Aliases


class Nesting(threading.local):
    """The depth of this thread inside calls of roots."""

    depth = 0
    outermost: Any = None
    """The `Root` of the outermost call, or of the last one."""


class Recording(Observer, Protocol):
    """The part of a recording that its roots need; training thread."""

    is_in_stage: bool
    """Whether the current or last call of a root is that of a pipeline stage."""
    has_seen_forward: bool
    """Whether a root was ever seen to run with gradients; under compile its hooks may be compiled away."""

    @property
    def settings(self) -> Settings: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def events(self) -> Events: ...

    @property
    def nesting(self) -> Nesting: ...

    @property
    def aliases(self) -> Aliases: ...

    @property
    def every_call_is_a_step(self) -> bool:
        """True in inference, where no optimizer counts the steps."""

    @property
    def is_step_in_force(self) -> bool:
        """Whether `step_changed` has run to its end for this step."""

    def step_changed(self) -> None:
        """Work out what is kept at the new step."""

    def call_begins(self) -> None:
        """Let stagers hand over what has arrived, as a call of a root begins."""

    def forward_without_root(self) -> None:
        """Move the step with a module that runs, where no root was ever seen to run."""

    def pause(self) -> None:
        """Keep nothing until `resume`."""

    def resume(self) -> None:
        """Keep what the rules select."""
