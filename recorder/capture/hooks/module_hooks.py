"""The hooks on one module: how they are put on, rest and come off, and what they pass on when they fire.

A hook has only a number, by which it finds its module. Nothing here may raise into training or keep a module alive.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
from torch import nn

from ...observe import tree
from ...taps.graphs import in_functorch, is_traced
from ...taps.module_taps import is_tapped
from .callbacks import NO_ROOM, CaptureForHooks, NumberedHook

_numbers = itertools.count(1)
_is_compiling = torch.compiler.is_compiling
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class CalledModule(Protocol):
    """The members of `HookedModule` that hooks need. `HookedModule` describes each."""

    capture: CaptureForHooks
    module: Callable[[], nn.Module | None]

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def usual_call(self, output: Any) -> bool: ...
    def after_forward(self, output: Any) -> None: ...
    def failed(self, site: str, error: Exception) -> None: ...


MODULES: dict[int, CalledModule] = {}


class BeforeForward(NumberedHook):
    """The forward pre-hook of a module. It is registered last, so that it gets the same arguments as the forward."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Pass the arguments to the hooked module. Torch gives no `kwargs` if the hook is removed during the call."""
        try:
            if _is_compiling():
                return
            hooked = MODULES.get(self.number)
            if hooked is None or hooked.module() is not module or is_traced():
                return
            hooked.before_forward(args, kwargs or {})
        except Exception as error:
            if (hooked := MODULES.get(self.number)) is None:
                return
            try:
                hooked.failed("input", error)
            except NO_ROOM:
                hooked.capture.lost()


class AfterForward(NumberedHook):
    """The forward hook of a module. It is registered first, so that it gets the output as the forward returned it."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        try:
            if _is_dynamo_compiling():  # which dynamo takes for True, and costs least
                return
            hooked = MODULES.get(self.number)
            if hooked is None or hooked.module() is not module or is_traced() or hooked.usual_call(output):
                return
            if _is_compiling():
                return
            if is_tapped(module) and in_functorch():
                return  # the op records the plain tensor inside this subclass
            hooked.after_forward(output)
        except Exception as error:
            if (hooked := MODULES.get(self.number)) is None:
                return
            try:
                hooked.failed("output", error)
            except NO_ROOM:
                hooked.capture.lost()


class ModuleHooks:
    """The hooks that are on one module, or were taken off to rest."""

    __slots__ = ("_handles", "_has_after", "_resting", "number", "pre_hook")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._handles: list[Any] = []
        self._resting: list[tuple[Any, tree.Hook]] = []
        """The hooks that were taken off because they have nothing to record now, each with its handle."""
        self.pre_hook: BeforeForward | None = None
        self._has_after = False

    def __bool__(self) -> bool:
        return bool(self._handles)

    def put(self, module: nn.Module, *, before: bool, after: bool) -> None:
        """Put the hooks on a module that it needs and does not have."""
        if before and self.pre_hook is None:
            self.pre_hook = BeforeForward(self.number)
            self._handles.append(tree.put_on(module.register_forward_pre_hook, self.pre_hook, with_kwargs=True))
        if after and not self._has_after:
            self._has_after = True
            hook = AfterForward(self.number)
            self._handles.append(tree.put_on(module.register_forward_hook, hook, prepend=True))
            tree.keep_first(module._forward_hooks)

    def lack(self, *, before: bool, after: bool) -> bool:
        """Whether a hook that the module needs is not on it."""
        return (before and self.pre_hook is None) or (after and not self._has_after)

    def stay_last(self, module: nn.Module | None) -> None:
        """Make our pre-hook the last one again if the program has registered pre-hooks after it."""
        if self.pre_hook is not None and module is not None:
            registered = cast("OrderedDict[int, Any]", module._forward_pre_hooks)
            number = next((key for key, hook in registered.items() if hook is self.pre_hook), None)
            if number is not None and next(reversed(registered)) != number:
                registered.move_to_end(number)

    def rest(self) -> None:
        """Remove the hooks until `wake` is called, because torch calls a module without hooks faster.

        The hooks are taken out of torch's dicts directly, at a tenth of the cost of handles, because modules may rest
        at every other step.
        """
        for handle in self._handles:
            registered = handle.hooks_dict_ref()
            if registered is not None and (hook := registered.get(handle.id)) is not None:
                # The hook is noted before it is removed, because an interrupt may come between the two lines.
                self._resting.append((handle, hook))
                registered.pop(handle.id, None)

    def wake(self) -> None:
        """Put the hooks back that `rest` removed. The forward hook becomes the first one, the pre-hook the last one."""
        for handle, hook in self._resting:
            registered = handle.hooks_dict_ref()
            if registered is not None:
                registered[handle.id] = hook
                if hook is not self.pre_hook:
                    registered.move_to_end(handle.id, last=False)
                    tree.keep_first(registered)
                if self.number not in MODULES:  # a signal handler or another thread has closed the module
                    registered.pop(handle.id, None)
        self._resting.clear()

    def remove(self) -> None:
        MODULES.pop(self.number, None)  # the entry is removed first, because `wake` checks it
        for handle in self._handles:
            handle.remove()


class GroupedHooks:
    """The hooks of the modules below a root's own, by the rule sets for which they record values."""

    def __init__(self, capture: CaptureForHooks) -> None:
        self._capture = capture
        self._groups: dict[frozenset[int], list[ModuleHooks]] = {}
        self._resting: set[frozenset[int]] = set()
        """The keys of `_groups` whose hooks are off."""

    def group(self, hooks: Iterable[tuple[frozenset[int], ModuleHooks]]) -> None:
        """Take the hooks of all modules, each with its rule sets, in place of the hooks so far."""
        self._groups = {}
        for rule_sets, one in hooks:
            if rule_sets:
                self._groups.setdefault(rule_sets, []).append(one)

    def clear(self) -> None:
        self._groups.clear()

    def wake_all(self) -> None:
        """Put the hooks of all modules back."""
        for each in self._groups.values():
            for hooks in each:
                hooks.wake()
        self._resting.clear()

    def rest_or_wake(self, *, may_rest: bool) -> None:
        """Remove the hooks of modules whose calls the new step does not record, and put other modules' hooks back.

        The root's own hooks stay, because they count the steps, and one of them has called this method.
        """
        masks = self._capture.selection.masks
        for rule_sets, each in self._groups.items():
            is_idle = may_rest and not any(masks[rule_set] for rule_set in rule_sets)
            if is_idle == (rule_sets in self._resting):
                continue
            # The key stays in the set until the last module is awake, so that the next call completes an interrupted
            # call.
            self._resting.add(rule_sets)
            for hooks in each:
                (hooks.rest if is_idle else hooks.wake)()
            if not is_idle:
                self._resting.discard(rule_sets)
