"""The dispatcher ops that record a value wherever a graph goes: compiled, exported, traced, scripted, differentiated.

``recorder::tap`` hands ``x`` to the recorder, if one is on, and returns a copy, because compilers keep only functional
ops. The gradient of ``x`` passes through ``recorder::tap_grad``, which does the same. ``recorder::see`` returns ``x``
itself, for graphs that run as they are, such as TorchScript's. ``recorder::watch`` returns an empty tensor, for
compilers that require a result, and the program goes on with ``x`` itself. A tensor hook records the total gradient of
``x``. If the graph includes the backward, it does so by ``recorder::watch_grad``. Importing this module registers the
ops. It imports torch alone, and must never raise out of an op for a reason of the recorder's own.

Every op has a ``name`` and a ``where``, as in `recorder.taps.module_taps`. ``number`` distinguishes the taps of one
graph, so that a gradient finds its value. ``with_grad`` is True if the graph was made with gradients enabled. Compiled
code no longer knows this when it runs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.fx.node import has_side_effect

_ARGUMENTS = 'str name, str where="", int number=0, bool with_grad=False'


class Sink(Protocol):
    """Receives values and gradients from the ops, on the thread that runs the graph. Never raises."""

    def tapped(self, value: torch.Tensor, name: str, where: str, number: int, with_grad: bool) -> None: ...

    def tapped_gradient(
        self, gradient: torch.Tensor, name: str, where: str, number: int, *, is_total: bool = False
    ) -> None: ...

    def has_no_hook(self, where: str) -> bool:
        """Return True if the module of the tap `where` has no hooks. Then the tap records even eager calls."""


_numbers = itertools.count(1)
sink: Sink | None = None
is_on = False
"""True if there is a sink. Dynamo guards on this flag: once it changes, dynamo compiles again, with or without taps."""


def set_sink(new: Sink | None) -> None:
    """Set the sink of the ops, or None for no sink."""
    global sink, is_on
    sink, is_on = new, new is not None


def _tap(x: torch.Tensor, name: str, where: str = "", number: int = 0, with_grad: bool = False) -> torch.Tensor:
    if sink is not None:
        sink.tapped(x, name, where, number, with_grad)
    return x.clone()


def _tap_grad(x: torch.Tensor, name: str, where: str = "", number: int = 0, with_grad: bool = False) -> torch.Tensor:
    if sink is not None:
        sink.tapped_gradient(x, name, where, number)
    return x.clone()


def _see(x: torch.Tensor, name: str, where: str = "") -> torch.Tensor:
    if sink is not None:
        number = next(_numbers)
        sink.tapped(x.detach(), name, where, number, torch.is_grad_enabled() and x.requires_grad)
        if x.requires_grad and torch.is_grad_enabled():
            x.register_hook(partial(_gradient_arrived, name, where, number))
    return x


def _gradient_arrived(name: str, where: str, number: int, gradient: torch.Tensor) -> None:
    if sink is not None:
        sink.tapped_gradient(gradient, name, where, number, is_total=True)


def _watch(x: torch.Tensor, name: str, where: str = "", number: int = 0, with_grad: bool = False) -> torch.Tensor:
    if sink is not None:
        # Compiled code runs with gradients disabled. So `requires_grad` is set on its inputs only.
        has_gradient = x.requires_grad and (with_grad or torch.is_grad_enabled())
        number = next(_numbers) if has_gradient else number
        sink.tapped(x.detach(), name, where, number, with_grad)
        if has_gradient:
            x.register_hook(partial(_gradient_arrived, name, where, number))
    return x.new_empty(0)


def _watch_grad(x: torch.Tensor, name: str, where: str = "", number: int = 0, with_grad: bool = False) -> torch.Tensor:
    if sink is not None:
        sink.tapped_gradient(x, name, where, number, is_total=True)
    return x.new_empty(0)


def _gradient_in_graph(name: str, where: str, number: int, gradient: torch.Tensor) -> None:
    """Record a gradient in a graph that contains both the forward and the backward."""
    torch.ops.recorder.watch_grad(gradient.detach(), name, where, number)


@contextlib.contextmanager
def _next_level() -> Iterator[None]:
    """Run the block below autograd. In `torch.func` transforms, enable the gradients that a forward disables."""
    with contextlib.ExitStack() as stack:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        yield


class _Tap(_SingleLevelFunction):
    """The autograd formula of ``recorder::tap``. The dispatcher calls it once for each functorch transform."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *key: Any) -> torch.Tensor:
        ctx.key = key
        with _next_level():
            return torch.ops.recorder.tap(x, *key)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        passed = None if gradient is None else torch.ops.recorder.tap_grad(gradient, *ctx.key)
        return passed, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor | None, *key: Any) -> torch.Tensor | None:
        return None if tangent is None else tangent.clone()


class _TapGrad(_Tap):
    """The autograd formula of ``recorder::tap_grad``, for gradients of gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *key: Any) -> torch.Tensor:
        with _next_level():
            return torch.ops.recorder.tap_grad(x, *key)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        return gradient, None, None, None, None


def _register() -> torch.library.Library:
    library = torch.library.Library("recorder", "FRAGMENT")
    if hasattr(torch.ops.recorder, "tap"):  # another copy of this package has registered the ops already
        return library
    for name, kernel, autograd, fake, dim in (
        ("tap", _tap, partial(_differentiable, _Tap), _like, 0),
        ("tap_grad", _tap_grad, partial(_differentiable, _TapGrad), _like, 0),
        ("watch", _watch, _watching, _empty, None),
        ("watch_grad", _watch_grad, _watching, _empty, None),
    ):
        library.define(f"{name}(Tensor x, {_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        op = getattr(torch.ops.recorder, name)
        library.impl(name, kernel, "CompositeExplicitAutograd")
        library.impl(name, autograd(op), "Autograd")
        torch.library.register_fake(f"recorder::{name}", fake, lib=library)
        torch.library.register_vmap(f"recorder::{name}", _batched(op, dim), lib=library)
        has_side_effect(op.default)  # otherwise compilers remove an op whose result is unused
    library.define('see(Tensor(a) x, str name, str where="") -> Tensor(a)', tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("see", _see, "CompositeImplicitAutograd")
    return library


def _like(x: torch.Tensor, name: str, where: str = "", number: int = 0, with_grad: bool = False) -> torch.Tensor:
    return torch.empty_like(x)


def _empty(x: torch.Tensor, name: str, where: str = "", number: int = 0, with_grad: bool = False) -> torch.Tensor:
    return x.new_empty(0)


def _watching(op: Any) -> Any:
    def apply(x: torch.Tensor, name: str, where: str = "", number: int = 0, with_grad: bool = False) -> torch.Tensor:
        number = number or next(_numbers)
        # An input of the graph is a leaf while the graph is made, but may get a gradient when the graph runs.
        has_gradient = op is torch.ops.recorder.watch and torch.is_grad_enabled() and x.requires_grad and not x.is_leaf
        if has_gradient and _becomes_graph(x):
            with torch._C.DisableTorchFunctionSubclass():
                x.register_hook(partial(_gradient_in_graph, name, where, number))
        with torch._C._AutoDispatchBelowAutograd():
            return op(x, name, where, number, with_grad)  # type: ignore[no-any-return]

    return apply


def _becomes_graph(x: torch.Tensor) -> bool:
    """Return True if the running code is made into a graph that includes the backward of ``x``."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return (
        isinstance(x, FunctionalTensor) or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


def _differentiable(function: Any, op: Any) -> Any:
    # The formula is written by hand. `torch.func` refuses one made by `torch.library.register_autograd`.
    functorch = torch._C._functorch

    def apply(x: torch.Tensor, name: str, where: str = "", number: int = 0, with_grad: bool = False) -> torch.Tensor:
        number = number or next(_numbers)
        is_forward_mode = forward_ad._current_level >= 0 or functorch.peek_interpreter_stack() is not None
        if not is_forward_mode and not (torch.is_grad_enabled() and x.requires_grad):
            with torch._C._AutoDispatchBelowAutograd():
                return op(x, name, where, number, with_grad)  # type: ignore[no-any-return]
        before = functorch.get_single_level_autograd_function_allowed()
        try:
            functorch.set_single_level_autograd_function_allowed(True)
            return function.apply(x, name, where, number, with_grad)  # type: ignore[no-any-return]
        finally:
            functorch.set_single_level_autograd_function_allowed(before)

    return apply


def _batched(op: Any, dim: int | None) -> Any:
    """Return the vmap rule of ``op``, which records the batch as one value, with the batch dim first."""

    def batched(info: Any, in_dims: Any, x: torch.Tensor, *key: Any) -> tuple[torch.Tensor, int | None]:
        return op(x.movedim(in_dims[0], 0), *key), dim

    return batched


_library = _register()
"""The reference that keeps the registered ops alive."""
