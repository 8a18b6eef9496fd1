"""Finds the roots (outermost modules that an optimizer trains) at their first call, without a line of user code.

A call of a module inside a root counts as a call of the root if the program calls the module directly.

One global forward pre-hook costs about 2 us a module call. The hook stays until the first optimizer step whose
parameters are all under a root. The hook stays for good if anything was compiled by then, because dynamo guards on the
number of global hooks, so that its removal would recompile every graph. Nothing here may raise into training.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as module_internals
from torch.nn.modules.module import register_module_forward_pre_hook

from ...taps.graphs import is_traced

_is_compiling = torch.compiler.is_compiling
_OTHER_HOOKS = ("_global_backward_pre_hooks", "_global_backward_hooks", "_global_forward_hooks")


class RecorderForDiscovery(Protocol):
    """The part of the recorder that discovery needs; the recorder may not have started yet."""

    def is_inside_root(self) -> bool:
        """Whether this thread is inside a root's call."""

    def wants(self, module: nn.Module) -> bool:
        """Whether an outermost module should become a root."""

    def make_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Make a module a root; return other arguments for the call that goes on, or None to keep these."""

    def discovery_failed(self, error: Exception) -> None:
        """Report an error of the recorder's own, once; training goes on."""


class Discovery:
    """The global forward pre-hook, which stays on while it is needed."""

    def __init__(self, recorder: RecorderForDiscovery) -> None:
        self._recorder = recorder
        self._rejected: dict[bool, weakref.WeakSet[nn.Module]] = {}
        """The rejected modules, by whether gradients were enabled: an evaluation may call a module before training."""
        self._handle: Any = None
        self.start()

    def start(self) -> None:
        self.reconsider()
        self._handle = register_module_forward_pre_hook(self._before_any_forward)  # type: ignore[arg-type]  # it may return arguments
        self._ask_torch: Any = getattr(module_internals, "_has_any_global_hook", None)
        if self._ask_torch is not None:
            module_internals._has_any_global_hook = self._has_other_global_hook

    def _has_other_global_hook(self) -> bool:
        """Suppress torch's warning of global hooks for our own hook, when a compiled module is called.

        The process may have turned the warning into an error. Torch still warns of the user's own global hooks.
        """
        hooks = module_internals._global_forward_pre_hooks
        ours = self._handle.id if self._handle is not None else None
        ours_alone = list(hooks) == [ours] and not any(getattr(module_internals, name) for name in _OTHER_HOOKS)
        return not ours_alone and bool(self._ask_torch and self._ask_torch())

    def _before_any_forward(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if _is_compiling():
            return None
        try:
            recorder = self._recorder
            if recorder.is_inside_root() or torch._C._current_graph_task_id() != -1:
                return None
            rejected = self._rejected[torch.is_grad_enabled()]
            if module in rejected:
                return None
            if is_traced():
                return None
            if not recorder.wants(module):
                # `functional_call` lends a module other tensors as its parameters for the length of one call.
                if all(isinstance(parameter, nn.Parameter) for parameter in module.parameters()):
                    rejected.add(module)
                return None
            # A global pre-hook is given no kwargs; they are a local of the frame that calls it.
            kwargs = sys._getframe(1).f_locals.get("kwargs")
            return recorder.make_root(module, args, kwargs if isinstance(kwargs, dict) else {})
        except Exception as error:
            self._recorder.discovery_failed(error)
            return None

    def reconsider(self) -> None:
        """Forget which modules were rejected, because with a new optimizer they may be roots."""
        self._rejected = {True: weakref.WeakSet(), False: weakref.WeakSet()}

    @property
    def is_on(self) -> bool:
        return self._handle is not None

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            if getattr(module_internals, "_has_any_global_hook", None) == self._has_other_global_hook:
                module_internals._has_any_global_hook = self._ask_torch
