"""The facts of a module that its attributes tell, for the manifest: ties, foreign hooks, and whether the mode matters.

Nothing here keeps a module alive, reads a tensor's values, or calls a hook of the program.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...sites import full_name
from .module import HookedModule
from .module_hooks import AfterForward
from .parameter_rows import FsdpParameter

_RATES = ("dropout", "drop_prob", "dropout_p", "attention_dropout", "attn_dropout")
"""The attributes in which a module keeps the rate of a dropout that the module applies itself."""


def unregistered(module: nn.Module, known: Container[int], seen: set[int]) -> dict[str, weakref.ref[torch.Tensor]]:
    """Return the parameters of modules that a module has in lists or dicts of Python, as ``blocks[0].weight``.

    Such a list may name parts of the model once more: `known` are the ids of the parameters of the whole model. `seen`
    are the ids of the modules that need no search, as those of the model. The modules that are searched are added.
    """
    found: dict[str, weakref.ref[torch.Tensor]] = {}
    for name, value in list(vars(module).items()):
        if type(value) not in _OF_PYTHON or name in _OF_TORCH:
            continue
        held = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in list(itertools.islice(held, _MAX_HELD)):
            if not isinstance(one, nn.Module) or id(one) in seen:
                continue
            seen.add(id(one))
            for path, parameter in nn.Module.named_parameters(one):
                if id(parameter) not in known:
                    found[f"{name}[{key!r}].{path}"] = weakref.ref(parameter)
    return found


_OF_PYTHON = (list, tuple, dict)
_OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that every module has, such as `_modules`."""
_MAX_HELD = 1_000
"""How many elements of a list of Python are searched for modules."""


def depends_on_mode(module: nn.Module | None) -> bool:
    """Whether a module computes something else in evaluation mode than in training: a dropout, or a batch norm.

    So does a module with a rate of dropout of its own, such as `MultiheadAttention`, `LSTM` and `DropPath`. A module
    with frozen parameters is left out, because its statistics are frozen on purpose, too.
    """
    rates = [vars(module).get(name) for name in (*_RATES, "p" if "Drop" in type(module).__name__ else "")]
    depends = any(isinstance(rate, (int, float)) and rate is not True and 0 < rate <= 1 for rate in rates)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        depends = module.running_mean is not None
    own = list(module.parameters()) if depends and module is not None else []
    return depends and (not own or any(parameter.requires_grad for parameter in own))


def ids_of(flats: Iterable[FsdpParameter]) -> set[int]:
    """Return the ids of flat parameters and of the original parameters inside them."""
    references = [reference for flat in flats for reference in (flat.reference, *(o.reference for o in flat.originals))]
    return {id(parameter) for reference in references if (parameter := reference()) is not None}


Ties = dict[str, dict[str, str]]
"""Maps module path and name of a tied parameter to the full name under which the parameter is recorded."""


def find_ties(modules: Iterable[HookedModule], flats: Iterable[FsdpParameter]) -> Ties:
    """Return the further names of tied parameters. Each maps to the parameter's first name, which the rows use."""
    ties: Ties = {}
    first_names: dict[int, str] = {}
    for hooked in modules:
        for name, parameter in hooked.own("_parameters"):
            full = full_name(hooked.node_path, name)
            first = first_names.setdefault(id(parameter), full)
            if first != full:
                ties.setdefault(hooked.node_path, {})[name] = first
    for flat in flats:
        for hooked, name, first_watch, first_name in flat.ties:
            ties.setdefault(hooked.node_path, {})[name] = full_name(first_watch.node_path, first_name)
    return ties


def about_state(module: nn.Module, tied: Mapping[str, str] | None) -> dict[str, Any]:
    """Return a module's manifest entries about its state dict: tied parameters, and buffers that are not saved."""
    unsaved = getattr(module, "_non_persistent_buffers_set", ())  # TorchScript and torch.package may lack this set
    left_out = sorted(name for name in unsaved if name in module._buffers)
    return {**({"tied": dict(tied)} if tied else {}), **({"non_persistent": left_out} if left_out else {})}


_KNOWN = ("torch", "torchao", "torch_xla", "contextlib", __name__.partition(".")[0])
"""The packages whose hooks are not the program's. `contextlib` is here for the recorder's own disabled hooks."""


def foreign_hooks(module: nn.Module) -> list[str]:
    """Describe each hook of the program on a module: when the hook runs, its name, and its code's file and line."""
    if isinstance(module, torch.jit.ScriptModule):
        return []  # TorchScript modules have TorchScript's hooks and no Python hooks
    after = list(module._forward_hooks.values())
    ours = [i for i, hook in enumerate(after) if isinstance(hook, AfterForward)]
    after = after[ours[0] + 1 :] if ours else after
    backward = [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
    return [*_descriptions("forward", after), *_descriptions("backward", backward)]


def _descriptions(when: str, registered: list[Any]) -> Iterator[str]:
    for hook in registered:
        function = _function(hook)
        home = str(getattr(function, "__module__", None) or type(function).__module__)
        if home.partition(".")[0] in _KNOWN:
            continue
        code = getattr(function, "__code__", None)
        source = f" {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        yield f"{when} {getattr(function, '__qualname__', type(function).__qualname__)}{source}"


def _function(hook: Any) -> Any:
    """Return the function inside a hook, which may be a partial, a method, or an object with a ``__call__``."""
    while isinstance(hook, (functools.partial, types.MethodType)):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    if isinstance(hook, (types.FunctionType, types.BuiltinFunctionType)):
        return hook
    return type(hook).__call__
