"""Taps in code that becomes a graph: decides which tensors go through the op ``recorder::tap``.

The op returns a copy. If a tensor shares memory with another tensor that the program can reach, a copy would separate
the two: an in-place change of one tensor would no longer show in the other. Such a tensor is recorded without a copy,
and its gradient is the total over all its uses. Nothing here may change what a model computes.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import _symbolic_trace

from ..sites import full_name
from . import ops

_tracing_state = torch._C._get_tracing_state
# FX's private flag (since torch 2.14 one for each thread) is read, because `is_fx_tracing` logs a warning at each call.
_is_fx_tracing = getattr(_symbolic_trace, "_get_is_fx_tracing", lambda: _symbolic_trace._is_fx_tracing_flag)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_PLAIN = (str, bytes, int, float, bool, complex)
_LISTS_ATTRIBUTES = torch.__version__ >= "2.13"
"""True if dynamo can list a module's attributes. In torch 2.9 it can only look them up by name."""


def is_for_graph(value: Any) -> bool:
    """Return True if the running code becomes a graph, or is differentiated or batched by `torch.func`."""
    if torch.compiler.is_compiling():
        return ops.is_on or _is_exporting()
    return is_traced() or is_proxy(value) or (ops.is_on and in_functorch()) or _is_made_into_fx()


def _is_exporting() -> bool:
    # `torch.compiler.is_exporting()` is not used, because dynamo of torch 2.9 takes it for true in every compilation.
    return torch.compiler._is_exporting_flag


def is_traced() -> bool:
    """Return True if `torch.jit.trace` or `torch.fx` is running the code, to make a graph of it."""
    return _tracing_state() is not None or _is_fx_tracing()


def in_functorch() -> bool:
    """Return True if `torch.func` transforms the code that runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_proxy(value: Any) -> bool:
    """Return True if a value is an FX proxy or contains one."""
    if torch.compiler.is_compiling():
        return False
    if isinstance(value, torch.fx.Proxy):
        return True
    if isinstance(value, (tuple, list)):
        return any(is_proxy(item) for item in value)
    return isinstance(value, dict) and any(is_proxy(item) for item in value.values())


def _is_made_into_fx() -> bool:
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


def leave_uncompiled(function: _Function, *, with_callees: bool = True) -> _Function:
    """Keep dynamo from compiling a function of the recorder where code of a compiled program calls it between graphs.

    Dynamo still traces the function if it becomes a part of a graph.
    """
    dynamo: Any = torch._C._dynamo.eval_frame
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    strategy = dynamo._FrameExecStrategy(skip, skip if with_callees else default)
    dynamo.set_code_exec_strategy(function.__code__, strategy)
    return function


def allow_in_graph() -> None:
    """Let dynamo put `pass_tap` into its graph untraced. Only running code knows which tensors share memory."""
    import torch._dynamo

    torch._dynamo.allow_in_graph(pass_tap)
    torch._dynamo.assume_constant_result(_stored_names)


def _stored_names(kind: type[nn.Module]) -> list[str]:
    names: set[str] = set()
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for value in vars(base).values():
            code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
            if code is not None:
                names.update(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
    return sorted(names)


def tap_output(module: nn.Module, args: tuple[Any, ...], output: Any, where: str) -> Any:
    """Tap (record) the tensors of a module's output. Return `output` itself if no tensor could be tapped."""
    if not torch.compiler.is_compiling():
        if isinstance(output, torch.fx.Proxy):  # FX does not say whether the proxy is a tensor or a tuple
            return output.tracer.create_proxy("call_function", through, (output, where), {})
        if is_traced():
            return through(output, where)
    given = [] if getattr(module, "inplace", False) else list(args)
    if isinstance(output, (list, dict)) and any(value is output for value in given if type(value) is type(output)):
        return output  # the container is changed in place, because the caller uses it
    if _LISTS_ATTRIBUTES or not torch.compiler.is_compiling():
        attributes = list(module.__dict__.values())
    else:
        attributes = [module.__dict__[key] for key in _stored_names(type(module)) if key in module.__dict__]
    others = [*_tensors(given), *_tensors(list(module._buffers.values())), *_tensors(attributes)]
    leaves = list(_tensors([output]))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def visit(tensor: torch.Tensor, name: str) -> torch.Tensor:
        for known, tapped in seen:
            if known is tensor:  # a tensor that is twice in an output stays one tensor
                return tapped
        if not _is_tappable(tensor):
            return tensor
        rest = others + [leaf for leaf in leaves if leaf is not tensor]
        tapped = pass_tap(tensor, rest, name, where, _with_grad())
        seen.append((tensor, tapped))
        return tapped

    return _map(output, "", visit)


def tap_argument(value: Any, name: str, where: str) -> Any:
    """Tap (record) the tensors of a module's argument, and return the argument."""
    if not torch.compiler.is_compiling() and (is_proxy(value) or is_traced()):
        return see_one(value, name, where)
    return _map(value, name, lambda tensor, at: _watched(tensor, at, where))


def _watched(tensor: torch.Tensor, name: str, where: str) -> torch.Tensor:
    """Record a tensor without a copy, as its module may change it in place. Its gradient sums up all its uses."""
    if _is_tappable(tensor):
        torch.ops.recorder.watch(tensor, name, where, 0, _with_grad())
    return tensor


def tap_by_hand(tensor: Any, name: str) -> Any:
    """Tap a tensor for a call of `recorder.tap` in code that becomes a graph."""
    if is_proxy(tensor):
        return torch.ops.recorder.see(tensor, name)
    if not isinstance(tensor, torch.Tensor) or not _is_tappable(tensor):
        return tensor
    if not torch.compiler.is_compiling() and is_traced():
        return torch.ops.recorder.see(tensor, name)
    return torch.ops.recorder.tap(tensor, name, "", 0, _with_grad())


def through(output: Any, where: str) -> Any:
    """Record a module's output in a graph that runs without compilation. Return the output itself."""
    if not torch.compiler.is_compiling() and is_proxy(output):
        return _map(output, "", lambda value, name: _see_proxy(value, name, where))
    return _map(output, "", lambda tensor, name: torch.ops.recorder.see(tensor, name, where))


def _see_proxy(value: Any, name: str, where: str) -> Any:
    if isinstance(value, torch.fx.Proxy):
        return value.tracer.create_proxy("call_function", see_one, (value, name, where), {})
    return value


def see_one(value: Any, name: str, where: str) -> Any:
    """Pass each tensor of a value to the op `see`. Return the value with the op's results in their place."""
    return _map(value, name, lambda tensor, at: torch.ops.recorder.see(tensor, at, where))


def pass_tap(
    tensor: torch.Tensor, others: Sequence[torch.Tensor], name: str, where: str, with_grad: bool
) -> torch.Tensor:
    """Return the op's copy of a tensor. Return the tensor itself if it shares memory with one of `others`."""
    if any(_shares_memory(tensor, other) for other in others):
        torch.ops.recorder.watch(tensor, name, where, 0, with_grad)
        return tensor
    return torch.ops.recorder.tap(tensor, name, where, 0, with_grad)  # type: ignore[no-any-return]


def _shares_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(first):
        first = functorch.get_unwrapped(first)
    while functorch.is_functorch_wrapped_tensor(second):
        second = functorch.get_unwrapped(second)
    try:
        return first is second or first.untyped_storage()._cdata == second.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # the tensor has no memory of its own: its sharing is unknown
        return True


def _with_grad() -> bool:
    """Return True if code is compiled, not exported, with gradients enabled. Exports run in their caller's mode."""
    return torch.compiler.is_compiling() and not _is_exporting() and torch.is_grad_enabled()


def _is_tappable(value: torch.Tensor) -> bool:
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return False
    return not hasattr(type(value), "__tensor_flatten__")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _map(value: Any, name: str, visit: Callable[[Any, str], Any]) -> Any:
    """Return a nested value with every tensor replaced. Return the same object if nothing was replaced."""
    return _mapped(value, name, visit)[0]


def _mapped(value: Any, name: str, visit: Callable[[Any, str], Any]) -> tuple[Any, bool]:
    """Return a nested value with every tensor replaced, and True if a tensor was replaced.

    The flag is needed because dynamo does not compare containers by identity.
    """
    if isinstance(value, torch.Tensor) or (not torch.compiler.is_compiling() and isinstance(value, torch.fx.Proxy)):
        new = visit(value, name)
        return new, new is not value
    if isinstance(value, (tuple, list)):
        keys = value._fields if hasattr(value, "_fields") else range(len(value))
        mapped_items = [_mapped(item, full_name(name, str(key)), visit) for key, item in zip(keys, value, strict=True)]
        if not any(is_new for _, is_new in mapped_items):
            return value, False
        items = [item for item, _ in mapped_items]
        if hasattr(value, "_fields"):
            return type(value)(*items), True
        return (type(value)(items), True) if type(value) in (tuple, list) else (value, False)
    if type(value) is dict:
        pairs = {key: _mapped(item, full_name(name, str(key)), visit) for key, item in value.items()}
        is_changed = any(is_new for _, is_new in pairs.values())
        return ({key: item for key, (item, _) in pairs.items()}, True) if is_changed else (value, False)
    if value is None or isinstance(value, _PLAIN):
        return value, False
    return _mapped_node(value, name, visit)


def _mapped_node(value: Any, name: str, visit: Callable[[Any, str], Any]) -> tuple[Any, bool]:
    """Map a container that was registered with torch's pytree, such as the outputs of `transformers`."""
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return value, False
    children, context = node.flatten_fn(value)
    if node.flatten_with_keys_fn is not None:
        keys = [key for key, _ in node.flatten_with_keys_fn(value)[0]]
        names = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys]
    else:
        names = [str(i) for i in range(len(children))]
    mapped_children = [_mapped(child, full_name(name, key), visit) for key, child in zip(names, children, strict=True)]
    if not any(is_new for _, is_new in mapped_children):
        return value, False
    return node.unflatten_fn([item for item, _ in mapped_children], context), True
