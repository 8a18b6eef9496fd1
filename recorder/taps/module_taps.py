"""Taps on modules: forward hooks that call the recorder's ops, so that a model in any form records values.

The hook is a plain function whose name encodes everything that it does. So it is pickled, packaged and copied by name,
and is made again from its name (`__getattr__`). It has source that `torch.jit.script` can compile. In eager code it
does nothing, because there the recorder's own hooks see the value, without a copy. Nothing here depends on a recording.
"""

from __future__ import annotations

import ast
import base64
import inspect
import itertools
import json
import linecache
import sys
import types
import typing
import weakref
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Union

import torch
from torch import nn

from ..errors import TapError
from ..sites import OBJECTIVE, VALUES_OF_CALLS
from ..system.text import one_line
from . import graphs, ops

_KEY = 0x7265636F72646572
"""The key of our hook in a module's dict of hooks. Torch numbers its own keys and never reaches this number. So no
other hook can replace ours when a model is loaded from a file.
"""
_PREFIX = "recorder_tap_"
MAX_NAME_LENGTH = 256
_MAX_HOOK_BYTES = 1 << 20
_SCRIPT_NAMES = {"Tensor", "int", "float", "bool", "str", "Tuple", "List", "Dict", "Optional"}


_models: dict[str, weakref.ref[nn.Module]] = {}
"""Maps each name to the last model of this process that was instrumented under the name."""


class Where(NamedTuple):
    """The module and site (output or input) of the value that a tap records. Its JSON text is an argument of the op."""

    root: str
    """The name under which the model was instrumented."""
    path: str
    site: str
    """``output`` or ``input``."""
    cls: str
    leaf: bool
    source: str
    """``file:line`` of the module's forward, or empty."""

    @property
    def text(self) -> str:
        return json.dumps(self._asdict(), separators=(",", ":"), ensure_ascii=True)

    @classmethod
    @lru_cache(maxsize=65536)
    def from_text(cls, text: str) -> Where:
        """Parse a text that `Where.text` has made. Raises ValueError for any other text."""
        try:
            parsed = cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(str(error)) from None
        is_typed = all(isinstance(value, bool if name == "leaf" else str) for name, value in parsed._asdict().items())
        if not is_typed or parsed.site not in VALUES_OF_CALLS:
            raise ValueError(f"not the address of a tap: {text[:200]!r}")
        return parsed


# -- hooks ----------------------------------------------------------------------------------------------------------


def tap_output_of(module: nn.Module, where: Where) -> None:
    """Put a tap on a module's output. A module has at most one tap on its output."""
    types = _script_types(module)
    hook: Any = OutputTap(where.text)
    if types is not None:
        content = json.dumps([where.text, *types], separators=(",", ":")).encode()
        name = _PREFIX + base64.b32encode(zlib.compress(content, 9)).decode().rstrip("=").lower()
        hook = getattr(sys.modules[__name__], name)
    module._forward_hooks[_KEY] = hook
    module._forward_hooks.move_to_end(_KEY, last=False)  # type: ignore[attr-defined]  # before hooks that change the output


def tap_inputs_of(module: nn.Module, where: Where) -> None:
    """Put a tap on a module's arguments."""
    module._forward_pre_hooks[_KEY] = InputTap(where.text)
    module._forward_pre_hooks_with_kwargs[_KEY] = True


def where_tapped(module: nn.Module) -> Iterator[Where]:
    """Yield the `Where` (model, module and site) of each tap on a module."""
    hooks: tuple[Any, ...] = (module._forward_hooks.get(_KEY), module._forward_pre_hooks.get(_KEY))
    yield from (Where.from_text(hook.where) for hook in hooks if hook is not None)


def name_for(model: nn.Module, name: str | None) -> str:
    """Return the name under which a model is instrumented.

    Raises:
        TapError: another live model has the name, or the name is no text of 1 to 256 letters.
    """
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH):
        raise TapError(f"instrument: name = {one_line(name)[:50]!r}: expected 1 to {MAX_NAME_LENGTH} letters")
    live = {known: held for known, reference in list(_models.items()) if (held := reference()) is not None}
    for known in set(_models) - set(live):
        del _models[known]
    if name is None:
        own = next((known for known, held in live.items() if held is model), None)
        names = (f"model_{i}" if i else "model" for i in itertools.count())
        name = own or next(known for known in names if known not in live)
    elif live.get(name, model) is not model:
        raise TapError(f"instrument: another model is instrumented as {name!r}; give this one another name")
    _models[name] = weakref.ref(model)
    return name


def model_of(where: str) -> nn.Module | None:
    """Return the live model that this process instrumented under the name `root` in `where`, or None."""
    reference = _models.get(Where.from_text(where).root) if where else None
    return reference() if reference is not None else None


def is_tapped(module: nn.Module) -> bool:
    """Return True if there is a tap on a module's output."""
    return _KEY in module._forward_hooks


def remove(module: nn.Module) -> None:
    """Remove the taps of one module."""
    module._forward_hooks.pop(_KEY, None)
    module._forward_pre_hooks.pop(_KEY, None)
    module._forward_pre_hooks_with_kwargs.pop(_KEY, None)


class _ObjectTap:
    """A hook that is an object, which `torch.jit.script` cannot compile."""

    __slots__ = ("where",)

    def __init__(self, where: str) -> None:
        self.where = where
        graphs.allow_in_graph()

    @property
    def __name__(self) -> str:
        """Raise if `torch.jit.script` asks for the hook's name, because it cannot compile this hook."""
        if sys._getframe(1).f_globals.get("__name__") == "torch.jit._recursive":
            where = Where.from_text(self.where)
            raise TapError(
                f"torch.jit.script cannot compile the tap on the {where.site} of {where.path or 'the model'!r} "
                f"({where.cls}): leave it out, as in "
                f"recorder.instrument(model, select='site=output class=!{where.cls}'), or strip the model"
            )
        return str(type(self).__qualname__)


class OutputTap(_ObjectTap):
    """A forward hook on a module whose types TorchScript cannot express."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return tap_output(module, args, output, self.where)


class InputTap(_ObjectTap):
    """A forward pre-hook with kwargs that taps the arguments."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_for_graph = graphs.is_for_graph((args, kwargs))
        if not is_for_graph and (ops.sink is None or not ops.sink.has_no_hook(self.where)):
            return None
        positional, rest = [], "args"
        for name, parameter in inspect.signature(module.forward).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                positional.append(name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                rest = name
        named = [positional[i] if i < len(positional) else f"{rest}.{i - len(positional)}" for i in range(len(args))]
        tap = graphs.tap_argument if is_for_graph else graphs.see_one
        tapped = tuple(tap(value, name, self.where) for name, value in zip(named, args, strict=True))
        return tapped, {name: tap(value, name, self.where) for name, value in kwargs.items()}


def tap_output(module: nn.Module, args: tuple[Any, ...], output: Any, where: str) -> Any:
    """Tap a module's output. Hooks call this outside of TorchScript."""
    if graphs.is_for_graph(output):
        return graphs.tap_output(module, args, output, where)
    if ops.sink is not None and ops.sink.has_no_hook(where):  # a compiler left this part of its model to Python
        return graphs.through(output, where)
    return output


def __getattr__(name: str) -> Any:
    """Make the hook of this name. Called when a tap is put on a module, and when a model with taps is loaded."""
    if not name.startswith(_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    packed = name.removeprefix(_PREFIX).upper()
    try:
        content = zlib.decompressobj().decompress(base64.b32decode(packed + "=" * (-len(packed) % 8)), _MAX_HOOK_BYTES)
        where, arguments, result = json.loads(content)
        Where.from_text(where)
        if not all(_is_script_type(kind) for kind in (*arguments, result)):
            raise ValueError("the name contains types that TorchScript does not have")
    except (ValueError, TypeError, RecursionError, zlib.error) as error:
        raise AttributeError(f"module {__name__!r} has no attribute {name[:100]!r}: {error}") from None
    taken = f"Tuple[{', '.join(arguments)}]" if arguments else "Tuple[()]"
    # TorchScript compiles only the branch under `is_scripting`.
    scripted = "".join(f"        {line}\n" for line in _scripted("output", result, "''", where))
    source = (
        f"def {name}(self, input: {taken}, output: {result}) -> {result}:\n"
        f"    if torch.jit.is_scripting():\n"
        f"{scripted}"
        f"        return output\n"
        f"    else:\n"
        f"        return tap_output(self, input, output, {where!r})\n"
    )
    file = f"<{name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec", dont_inherit=True), globals())
    graphs.allow_in_graph()
    made: Any = globals()[name]
    made.where = where
    return made


def _is_script_type(kind: object) -> bool:
    """Return True if `kind`, a text from a hook's name, is a type that the recorder writes for TorchScript."""
    try:
        tree = ast.parse(kind, mode="eval").body if isinstance(kind, str) else None
    except (SyntaxError, MemoryError):
        return False
    return tree is not None and all(
        node.id in _SCRIPT_NAMES
        if isinstance(node, ast.Name)
        else isinstance(node, (ast.Subscript, ast.Tuple, ast.Load))
        for node in ast.walk(tree)
    )


def _scripted(value: str, kind: str, name: str, where: str) -> list[str]:
    """Return lines of TorchScript that tap the tensors in variable `value` of type `kind`. `name` is an expression.

    Every tensor that a tap returns is put back into its place, because TorchScript drops calls whose result is unused.
    """
    if kind == "Tensor":
        return [f"{value} = torch.ops.recorder.see({value}, {name}, {where!r})"]
    if "Tensor" not in kind or "[" not in kind:
        return []

    def below(key: str) -> str:
        return key if name == "''" else f"{name} + '.' + {key}"

    parts, inner = _members(kind), f"{value}_"
    if kind.startswith("Tuple["):
        lines = []
        for i, part in enumerate(parts):
            lines += [f"{inner}{i} = {value}[{i}]", *_scripted(f"{inner}{i}", part, below(f"'{i}'"), where)]
        return [*lines, f"{value} = ({', '.join(f'{inner}{i}' for i in range(len(parts)))},)"]
    if kind.startswith("Optional["):
        lines = [f"{inner} = {value}", *_scripted(inner, parts[0], name, where), f"{value} = {inner}"]
        return [f"if {value} is not None:", *(f"    {line}" for line in lines)]
    key, keys = (
        (f"{value}_i", f"range(len({value}))") if kind.startswith("List[") else (f"{value}_k", f"list({value}.keys())")
    )
    lines = [f"{inner} = {value}[{key}]", *_scripted(inner, parts[-1], below(f"str({key})"), where)]
    return [f"for {key} in {keys}:", *(f"    {line}" for line in (*lines, f"{value}[{key}] = {inner}"))]


def _members(kind: str) -> list[str]:
    """Return the types inside the brackets of a type such as ``Tuple[Tensor, int]``."""
    inner = ast.parse(kind, mode="eval").body.slice  # type: ignore[attr-defined]  # it is a subscript
    return list(map(ast.unparse, inner.elts if isinstance(inner, ast.Tuple) else [inner]))


def _script_types(module: nn.Module) -> tuple[list[str], str] | None:
    """Return the types of a forward's arguments and result for TorchScript. An argument without a hint is a tensor.

    The result is None if TorchScript cannot express the types, or if there are several forwards.
    """
    if isinstance(module, nn.RNNBase):
        return None
    forward = inspect.unwrap(type(module).forward)
    try:
        hints = typing.get_type_hints(forward)
    except Exception:  # a type hint contains a name that only type checkers import
        hints = {}
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        parameters = []
    arguments = [
        _script_type(hints.get(parameter.name, torch.Tensor))
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    result = _script_type(hints.get("return", torch.Tensor))
    known = [kind for kind in arguments if kind is not None]
    return (known, result) if result is not None and len(known) == len(arguments) else None


def _script_type(hint: Any) -> str | None:
    if isinstance(hint, type) and issubclass(hint, torch.Tensor):
        return "Tensor"
    if hint in (int, float, bool, str):
        return str(hint.__name__)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType) and len(inner) == 2 and type(None) in inner:
        kind = _script_type(next(member for member in inner if member is not type(None)))
        return f"Optional[{kind}]" if kind else None
    name = {tuple: "Tuple", list: "List", dict: "Dict"}.get(origin) if origin is not None else None
    kinds = [_script_type(member) for member in inner]
    if name is None or not kinds or not all(kinds):
        return None
    return f"{name}[{', '.join(str(kind) for kind in kinds)}]"


# -- taps that the program calls -------------------------------------------------------------------------------------


def tap(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Record a tensor under ``name``, and its gradient. Returns the tensor itself when nothing is recording.

    In compiled, exported and traced code the call becomes an op of the graph, if the recorder is on when the graph is
    made. In TorchScript the call always becomes an op.

    Raises:
        TapError: the name is no text, is empty, or has more than 256 letters.
    """
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        return torch.ops.recorder.see(tensor, name)  # type: ignore[no-any-return]
    else:
        return _tap_by_hand(name, tensor)  # type: ignore[no-any-return]


def objective(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Hand a tensor that several objectives share to one of them, and record the gradient that comes back from it.

    The result is a view of the tensor, recording or not, so that training is the same with the recorder and without.
    The objective must read the shared tensor only through this view. The values are recorded under the name of the tap
    ``objective.NAME``. Where the gradients of several objectives come back to one tensor, the norm of each gradient and
    the cosine of each pair are recorded as scalars, which ``recorder check`` judges.

    A loss may be passed as well, before it is added to the total. Then the loss is recorded, and the gradient of the
    loss, which is its weight in the total. Only the shared tensor shows how strongly an objective pulls at a shared
    part of the model.

    Raises:
        TapError: the name is no text, is empty, has ``:`` or ``#``, or more than 246 letters.
    """
    if not isinstance(name, str):
        raise TapError(
            f"objective: the name is {type(name).__name__} {one_line(name)[:50]!r}; expected a constant text"
        )
    if not name or ":" in name or "#" in name:
        raise TapError(f"objective: the name is {name[:50]!r}; expected letters without ':' and '#', which name pairs")
    if not isinstance(tensor, torch.Tensor):
        raise TapError(f"objective {name[:50]!r}: expected the shared tensor, got {type(tensor).__name__}")
    return tap(f"{OBJECTIVE}{name}", tensor.view_as(tensor))


def _tap_by_hand(name: Any, tensor: Any) -> Any:
    if not isinstance(name, str):
        raise TapError(f"tap: the name is {type(name).__name__} {one_line(name)[:50]!r}; expected a constant text")
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise TapError(
            f"tap: the name {name[:50]!r} has {len(name)} letters; expected 1 to {MAX_NAME_LENGTH}, the same at every "
            "step"
        )
    if not ops.is_on:
        return tensor
    if graphs.is_for_graph(tensor):
        return graphs.tap_by_hand(tensor, name)
    program = sys.modules[__name__.partition(".")[0]]._program
    if program is not None:
        program.tap(name, tensor)
    return tensor


Tensor, Tuple, List, Dict, Optional = torch.Tensor, tuple, list, dict, typing.Optional
"""The names that the generated source of hooks uses."""
