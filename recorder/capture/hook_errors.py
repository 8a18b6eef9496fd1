"""Counts the errors that the recorder raises in hooks, and ends what keeps failing. Training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..observe.clock import Clock
from ..records import ValuePlace
from ..sites import GRADIENT_OF, OF_CALLS, PROGRAM_SITES
from ..system.log import Events
from ..system.processes import comes_from_signal_handler
from .hooks.root import Root

_MAX_ERRORS = 20
"""After this many errors of the recorder at one site (such as `output`) of a module, the site is no longer recorded."""


class HookErrors:
    """The errors so far. Called on any thread."""

    def __init__(self, drop: Callable[[str, int], None], events: Events, clock: Clock, roots: Sequence[Root]) -> None:
        """Begin without errors. `drop` counts a number of values as dropped for a reason."""
        self._drop, self._events, self._clock, self._roots = drop, events, clock, roots
        self._errors: dict[tuple[str, str, str, str], int] = {}
        """By root, module path, site and name, the number of errors. The name is empty except for taps and scalars."""

    def hook_failed(self, where: str, error: Exception) -> None:
        """Count a value as dropped because the recorder raised an exception in a hook. Training goes on.

        Raises:
            Exception: `error` itself, if a signal handler of the user raised it.
        """
        if comes_from_signal_handler(error):
            raise error
        kind = "no_memory" if _is_out_of_memory(error) else "hook_error"
        self._drop(kind, 1)
        self._events.add(kind, f"recording {where} failed: {type(error).__name__}: {error}", key=where, exception=error)

    def site_failed(self, origin: ValuePlace, error: Exception) -> bool:
        """Count an error at a module's site (such as `output`). Return True if this error ends the site's recording."""
        where = f"{origin.module_path or origin.root}:{origin.site}"
        self.hook_failed(where, error)
        is_named = origin.site in PROGRAM_SITES
        key = (origin.root, "" if is_named else origin.module_path, origin.site, origin.name if is_named else "")
        self._errors[key] = num_errors = self._errors.get(key, 0) + 1
        if num_errors != _MAX_ERRORS:
            return False
        self._events.add(
            "disarmed",
            f"{where}{f':{origin.name}' if is_named else ''} is not recorded any more, from step {self._clock.step} on"
            f": {_MAX_ERRORS} errors of the recorder there; the last was {type(error).__name__}: {error}",
            key=repr(key),
        )
        for root in self._roots:
            if root.name == origin.root:
                # The hook that records a value also registers the hook on the value's gradient, so the recording of the
                # gradient ends, too.
                with_gradient = origin.site in OF_CALLS and origin.site in GRADIENT_OF
                sites = (origin.site, GRADIENT_OF[origin.site]) if with_gradient else (origin.site,)
                root.disarm(origin.module_path, sites, self._clock.step)
        return True

    def is_disarmed(self, site: str, name: str) -> bool:
        """Whether a tap (a tensor that the program names) or a scalar is no longer recorded after too many errors."""
        return bool(self._errors) and any(
            count >= _MAX_ERRORS and (key[2], key[3]) == (site, name) for key, count in list(self._errors.items())
        )


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory has run out. For host memory, torch raises only a `RuntimeError`."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
