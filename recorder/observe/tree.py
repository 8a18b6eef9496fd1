"""The module tree of a recording: module paths, names of nested values, and hooks on modules.

A path is the name that ``named_modules()`` yields, without the parts that wrappers add. So a module has the same path
in a plain, DDP, FSDP, compiled or checkpointed run. If each rank has some of the layers or experts, they are numbered
as in the whole model, if the framework tells the numbers.

Hooks have no side effects. A copy of a hook does nothing, and hooks keep their positions among the program's hooks. So
a user may copy, pickle and compile a model with hooks. A `Hook` is copied and pickled as
`contextlib.nullcontext().__exit__`, which takes anything, returns None, and can be loaded without `recorder`. Code that
dynamo compiled before a hook was registered runs without the hook. The functions at the end return what dynamo has
compiled in this process. They never import dynamo, because a program that never imported it has compiled nothing.

Nothing here may run a module, read a tensor's values, or raise into training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

TRANSPARENT = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"}
_WRAPPERS = {
    "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "AveragedModel", "DeepSpeedEngine",
}  # fmt: skip
_NO_CONTAINERS = (str, bytes, int, float, complex)
_MAX_DEPTH = 32
"""The most levels of nesting that are searched for tensors. Deeper nesting is a cycle or a mistake."""
_MAX_OBJECTS_DEEP = 3
"""The most plain objects inside each other that are searched for tensors, as in a cache of two caches of layers."""
_MAX_ENTERED = 4096
"""After this many containers of a value, plain objects are no longer searched. A container with more entries than this
is skipped inside a plain object."""
_NO_DATA = (nn.Module, torch.optim.Optimizer, type, types.ModuleType, types.FunctionType, types.MethodType)
_NO_DATA_IN = ("torch.fx", "torch.distributed", "torch._")
"""Packages whose objects contain no data, such as the proxies of a symbolic trace."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Node:
    """One module of the model and its path."""

    path: str
    module: nn.Module
    """The module that gets the hooks: the innermost module of the path, or the compile wrapper around it."""
    owner: nn.Module
    """The module inside all wrappers. It has the parameters and buffers."""
    class_name: str
    is_leaf: bool
    is_callable: bool
    """False if hooks see no calls: containers without a forward (ModuleList), scripted and exported modules."""
    wrappers: list[nn.Module]
    """The transparent wrappers around the owner, outermost first."""
    aliases: list[str] = dataclasses.field(default_factory=list)
    is_compiled: bool = False
    is_expert: bool = False
    """True if a framework says that the module is in an expert. An expert computes only some rows of a batch."""
    first: int = 0
    """For a list of layers or experts, the number of its first member in the whole model; else 0."""
    hidden: str | None = None
    """Why hooks cannot observe calls of this kind of module: ``scripted``, ``inlined`` or ``fused``; else None."""


def own_class(module: nn.Module) -> type[Any]:
    """Return the class that the user wrote. `fully_shard` replaces it by a derived class, named ``FSDP...``."""
    cls = type(module)
    is_sharded = cls.__name__.startswith("FSDP") and len(cls.__bases__) == 2
    return cls.__bases__[1] if is_sharded and cls.__bases__[0].__name__ == "FSDPModule" else cls


def class_name(module: nn.Module) -> str:
    """Return the name of the class that the user wrote."""
    name = own_class(module).__name__
    return str(getattr(module, "original_name", name)) if isinstance(module, torch.jit.ScriptModule) else name


def source_line(module: nn.Module) -> str | None:
    """Return ``file:line`` of the forward of a module's class. Return None if the forward is not Python code."""
    code = getattr(inspect.unwrap(_forward(module)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


def _forward(module: nn.Module) -> Any:
    """Return the forward of a module's class. The `__getattr__` of a scripted class does not run."""
    return inspect.getattr_static(type(module), "forward")


def _has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. Containers cannot, nor modules that torch adds to an exported program."""
    if isinstance(module, torch.jit.ScriptModule):
        return bool(module._c._has_method("forward"))
    is_torchs_own = type(module).__name__ == "GuardsFn" and type(module).__module__.startswith("torch.export.")
    return _forward(module) is not nn.Module.forward and not is_torchs_own


def _hidden(module: nn.Module, above: Node | None) -> str | None:
    """Return why hooks cannot observe calls of this kind of module. Return None if they can."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted" if _has_forward(module) else None
    in_graph = above is not None and (above.hidden == "inlined" or isinstance(above.owner, torch.fx.GraphModule))
    if in_graph and type(module) is nn.Module:
        return "inlined"
    is_fused = above is not None and isinstance(above.owner, nn.MultiheadAttention) and module is above.owner.out_proj
    return "fused" if is_fused else None


def _inner_name(module: nn.Module) -> str | None:
    for name in TRANSPARENT:
        if name in module._modules:
            return name
    if "module" in module._modules and any(cls.__name__ in _WRAPPERS for cls in type(module).__mro__):
        return "module"
    return None


def innermost(model: nn.Module) -> nn.Module:
    """Return the module inside all wrappers. Its training flag is the model's; a wrapper's flag may differ.

    An engine of an unknown class counts as a wrapper if its only child is called ``module``.
    """
    while True:
        name = _inner_name(model)
        if name is None and [child for child, _ in model.named_children()] == ["module"]:
            has_tensors = any(True for _ in (*model.parameters(recurse=False), *model.buffers(recurse=False)))
            name = None if has_tensors else "module"
        if name is None or (inner := model._modules[name]) is None:
            return model
        model = inner


def unwrapped(module: nn.Module) -> list[nn.Module]:
    """Return the wrappers around a module, outermost first, and then the module inside them."""
    found = [module]
    while (inner := _inner_name(found[-1])) is not None and (child := found[-1]._modules[inner]) is not None:
        found.append(child)
    return found


def walk(model: nn.Module, skips: Callable[[nn.Module], bool] = lambda _: False) -> list[Node]:
    """Return a node for each module, parents first, as in ``named_modules()``. A node has all paths of its module.

    `skips` returns True for a module that is left out, with all modules below it.
    """
    nodes: list[Node] = []
    seen: dict[int, Node] = {}
    stack: list[tuple[str, nn.Module, Node | None, nn.Module | None]] = [("", model, None, None)]
    while stack:
        path, module, above, dealer = stack.pop()
        *wrappers, owner = unwrapped(module)
        hooked = next((wrapper for wrapper in wrappers if _inner_name(wrapper) == "_orig_mod"), None)
        if skips(owner):
            continue
        if (known := seen.get(id(owner))) is not None:
            known.aliases.append(path)
            continue
        children = [(name, child) for name, child in owner._modules.items() if child is not None]
        dealer = owner if isinstance(getattr(owner, "ep_group", None), _GROUP) else dealer
        first, are_experts = _first_of(owner, dealer)
        if first and children:
            children = [(str(first + int(name)), child) for name, child in children]
        hidden = _hidden(owner, above)
        node = Node(
            path=path,
            module=owner if hooked is None else hooked,
            owner=owner,
            class_name=class_name(owner),
            is_leaf=not children,
            is_callable=_has_forward(owner) and hidden != "scripted",
            hidden=hidden,
            is_compiled=hooked is not None or getattr(owner, "_compiled_call_impl", None) is not None,
            wrappers=wrappers,
            is_expert=are_experts or (above is not None and above.is_expert),
            first=first,
        )
        seen[id(owner)] = node
        nodes.append(node)
        prefix = path + "." if path else ""
        stack.extend((prefix + name, child, node, dealer) for name, child in reversed(children))
    return nodes


_GROUP: Any = getattr(torch.distributed, "ProcessGroup", ())


def _first_of(modules: nn.Module, dealer: nn.Module | None) -> tuple[int, bool]:
    """Return the number of a list's first module in the whole model, and whether the modules are experts.

    With expert parallelism of Megatron or DeepSpeed, each rank has the next `num_local_experts` experts. `dealer` is
    the innermost module around the list that names these ranks. A grouped linear of Transformer Engine has `num_gemms`
    experts in its parameters `weight0`, `weight1`, and so on. Stages of Megatron's pipelines number their layers in
    `layer_number`, from 1.
    """
    count = len(modules) if isinstance(modules, nn.ModuleList) else getattr(modules, "num_gemms", 0)
    if count and getattr(dealer, "num_local_experts", None) == count:
        return getattr(dealer, "ep_group").rank() * count, True  # noqa: B009  # to mypy it is a module
    if not isinstance(modules, nn.ModuleList) or not count:
        return 0, False
    layers = [unwrapped(layer)[-1] for layer in modules]
    firsts = {getattr(layer, "layer_number", 0) - 1 - number for number, layer in enumerate(layers)}
    num_stages = getattr(getattr(layers[0], "config", None), "pipeline_model_parallel_size", 1)
    return (max(firsts) if num_stages > 1 and len(firsts) == 1 and min(firsts) > 0 else 0), False


def tensor_leaves(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor inside nested containers with its path, such as ``0.hidden``. A bare tensor keeps ``name``.

    Tuples, lists, dicts, named tuples, dataclasses and registered pytree nodes are entered. Each container is entered
    only once, because parents and children that refer to each other would make endless paths. Other objects, such as a
    batch of images or a cache of keys and values, are searched by their attributes, a few objects deep.
    """
    if isinstance(value, torch.Tensor):
        yield name, value
    elif value is not None and not isinstance(value, _NO_CONTAINERS):
        yield from _nested_leaves(value, name, _MAX_DEPTH, 0, set())


def _nested_leaves(
    value: Any, name: str, depth: int, num_objects: int, entered: set[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    if depth == 0 or id(value) in entered or (num_objects and len(entered) >= _MAX_ENTERED):
        return
    children = _children(value)
    if children is None:
        num_objects += 1
        if num_objects > _MAX_OBJECTS_DEEP:
            return
        children = _attributes(value)
    elif num_objects and isinstance(value, (list, tuple, dict)) and len(value) > _MAX_ENTERED:
        return
    entered.add(id(value))
    for key, item in children:
        path = f"{name}.{key}" if name else str(key)
        if isinstance(item, torch.Tensor):
            yield path, item
        elif item is not None and not isinstance(item, _NO_CONTAINERS):
            yield from _nested_leaves(item, path, depth - 1, num_objects, entered)


def _children(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Return a container's items with their names. Return None if the value is no known container."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, (tuple, list)):
        return ((str(i), item) for i, item in enumerate(value))
    if isinstance(value, dict):
        return ((str(key), item) for key, item in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((item.name, getattr(value, item.name, None)) for item in dataclasses.fields(value))
    return _registered_children(value)


def _registered_children(value: Any) -> Iterator[tuple[str, Any]] | None:
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    if node.flatten_with_keys_fn is not None:
        pairs = node.flatten_with_keys_fn(value)[0]
        return ((str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))), item) for key, item in pairs)
    return ((str(i), item) for i, item in enumerate(node.flatten_fn(value)[0]))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes in an object's ``__dict__``. No property runs."""
    if _holds_no_data(type(value)):  # type: ignore[arg-type]  # to mypy a class is not hashable
        return
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return
    if isinstance(attributes, dict) and len(attributes) <= _MAX_ENTERED:
        yield from attributes.items()


@functools.lru_cache(maxsize=256)
def _holds_no_data(cls: type) -> bool:
    return issubclass(cls, _NO_DATA) or any(base.__module__.startswith(_NO_DATA_IN) for base in cls.__mro__)


class Signature:
    """The argument names of one module's forward."""

    __slots__ = ("_first", "_positional", "_rest")

    def __init__(self, module: nn.Module) -> None:
        self._positional: list[str] = []
        self._rest = "args"
        try:
            parameters = list(inspect.signature(module.forward).parameters.values())
            if "forward" in vars(module) and all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
                # A wrapper around this module's forward takes any arguments, and passes them to the class's forward.
                parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        except (TypeError, ValueError):
            parameters = []
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                self._positional.append(parameter.name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                self._rest = parameter.name
        self._first = self._positional[0] if self._positional else f"{self._rest}.0"

    def name_at(self, index: int) -> str:
        known = len(self._positional)
        return self._positional[index] if index < known else f"{self._rest}.{index - known}"

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return each tensor among the arguments with its path, such as ``input`` or ``args.0``."""
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # most modules are called with one tensor
            return ((self._first, args[0]),)
        return self._all_leaves(args, kwargs)

    def _all_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        for i, value in enumerate(args):
            name = self.name_at(i)
            if isinstance(value, torch.Tensor):
                yield name, value
            else:
                yield from tensor_leaves(value, name)
        for key, value in kwargs.items():
            yield from tensor_leaves(value, key)


_FIRST_NUMBER = (1 << 32) + (int.from_bytes(os.urandom(4), "little") << 32)
_DYNAMO_KNOWS_THE_ORDER = torch.__version__ >= "2.13"


class Hook:
    """A callable that the recorder registers as a hook. A copy of a hook does nothing."""

    __slots__ = ()
    _why_not_scripted = (
        "torch.jit.script cannot compile the hooks of a model that is being recorded; script it in a process without "
        "RECORDER=1, or before its first call"
    )

    @property
    def __name__(self) -> str:
        """Return the class's name. Raises RuntimeError if `torch.jit.script` asks, because it cannot compile a hook."""
        if sys._getframe(1).f_globals.get("__name__") == "torch.jit._recursive":
            raise RuntimeError(f"recorder: {self._why_not_scripted}")
        return str(type(self).__qualname__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def put_on(register: Callable[..., Any], hook: Hook, **options: bool) -> Any:
    """Register a hook of a module under a key that only this process uses, and return torch's handle.

    A pickle of the module keeps the keys of hooks, and which keys' hooks take kwargs or are always called. A process
    that loads the pickle numbers its own hooks from 0. If one of them got the recorder's key, it would be called as the
    recorder's hook is.
    """
    handle = register(hook, **options)
    theirs, handle.id = handle.id, _FIRST_NUMBER + handle.id
    registered = handle.hooks_dict_ref()
    for kind in (registered, *(reference() for reference in handle.extra_dict_ref)):
        if theirs in kind:
            kind[handle.id] = kind.pop(theirs)
    registered.move_to_end(handle.id, last=not options.get("prepend", False))
    return handle


def keep_first(registered: dict[int, Any]) -> None:
    """Make a hook that was registered with ``prepend`` the first entry of its dict for dynamo, too.

    Dynamo of torch 2.9 counts the entries in the order in which they were added. It then confuses the values of two
    hooks, and fails to compile.
    """
    if not _DYNAMO_KNOWS_THE_ORDER:
        others = list(registered.items())[1:]
        try:
            for number, _ in others:
                del registered[number]
        finally:
            registered.update(others)


def has_compiled(module: nn.Module, wrapper: nn.Module) -> bool:
    """Whether dynamo has compiled a module for `torch.compile` before its present hooks were registered.

    For torch's own classes, dynamo compiles a function around the forward. All these classes share that function.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    functions: list[Any] = [type(module).forward]
    if frames is not None and wrapper is not module:
        functions.append(frames.innermost_fn(wrapper.forward))
    return _have_code(functions)


def has_compiled_anything() -> bool:
    """Whether dynamo has made a graph in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters.get("stats"))


def is_compiled_already(model: nn.Module) -> bool:
    """Whether dynamo has compiled a forward of this model, so that hooks can no longer become part of the code."""
    return _have_code(type(module).forward for module in model.modules())


def _have_code(functions: Iterable[Any]) -> bool:
    frames = sys.modules.get("torch._dynamo.eval_frame")
    codes = {function.__code__ for function in functions if hasattr(function, "__code__")}
    return frames is not None and any(bool(frames._debug_get_cache_entry_list(code)) for code in codes)
