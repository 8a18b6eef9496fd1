"""Records what a replay of a module's call needs besides the tensor arguments, if a rule asks for it.

The rows have the site ``call``. The row with the name ``""`` is a JSON document (FORMAT.md). The other rows are the
parameters and buffers as the call finds them. Nothing here may open a file, run a module, or change a random state.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import math
import platform
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...observe import tree
from ...records import KEEP_TENSOR, SeenValue
from ..local_values import is_dtensor
from .callbacks import CaptureForHooks

_MAX_DEPTH = 16
_FREED = "freed"
_NO_SETTINGS = frozenset(("self", "device", "dtype", "args", "kwargs", "mode", "_weight", "_freeze"))
_PLAIN = (bool, int, str, type(None))
_OF_PARAMETERS = {"bias": ("bias", "in_proj_bias"), "add_bias_kv": ("bias_k",)}
"""Maps constructor arguments of torch.nn to the parameters that exist only if the argument is set."""


def record_call(
    capture: CaptureForHooks, seen: SeenValue, module: nn.Module, signature: tree.Signature, args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:  # fmt: skip
    """Record a call that is about to begin: a JSON document (`seen`), and the module's parameters and buffers."""
    try:
        held: dict[str, torch.Tensor] = {}
        held |= {f"param.{_canonical(name)}": value for name, value in module.named_parameters(remove_duplicate=False)}
        held |= {f"buffer.{_canonical(name)}": value for name, value in module.named_buffers(remove_duplicate=False)}
        tensors: dict[str, Any] = {}
        first: dict[int, str] = {}
        for name, tensor in [
            *((f"input.{name}", leaf) for name, leaf in signature.leaves(args, kwargs)),
            *held.items(),
        ]:
            tensors[name] = _about(tensor)
            if (same := first.setdefault(id(tensor), name)) != name:
                tensors[name]["same_as"] = same
        facts = {**_facts(module), **signature_tree(signature, args, kwargs), "tensors": tensors}
        text = json.dumps(facts, separators=(",", ":"), allow_nan=False).encode()
        document = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    except Exception as error:
        capture.site_failed(seen.origin, error)
        return
    capture.observe(seen, KEEP_TENSOR, document)
    for name, tensor in held.items():
        if "same_as" not in tensors[name] and tensors[name].get("layout") != _FREED:
            origin = seen.origin._replace(name=name)
            capture.observe(seen._replace(origin=origin), KEEP_TENSOR, tensor.detach())


def signature_tree(signature: tree.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as JSON trees. A tensor is replaced by the name of its row at the site ``input``."""
    return {
        "args": [_tree(value, signature.name_at(i), 0) for i, value in enumerate(args)],
        "kwargs": [[key, _tree(value, key, 0)] for key, value in kwargs.items()],
    }


def _tree(value: Any, name: str, depth: int) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {"tensor": name}
    if type(value) in _PLAIN:
        return {"value": value}
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) in (tuple, list, torch.Size) and depth < _MAX_DEPTH:
        kind = "list" if type(value) is list else "tuple"
        return {kind: [_tree(item, f"{name}.{i}", depth + 1) for i, item in enumerate(value)]}
    if type(value) is dict and depth < _MAX_DEPTH and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _tree(item, f"{name}.{key}", depth + 1)] for key, item in value.items()]}
    return {"unknown": f"{type(value).__module__}.{type(value).__qualname__}"}


def _about(tensor: torch.Tensor) -> dict[str, Any]:
    if is_dtensor(tensor):
        return {"dtensor": True}
    if tensor.layout is not torch.strided:
        return {"layout": str(tensor.layout)}
    if tensor.numel() and not tensor.is_meta and not tensor.untyped_storage().size():
        return {"layout": _FREED}  # FSDP has freed the memory; a read of it would crash the process
    return {
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
        "requires_grad": tensor.requires_grad,
        "device": tensor.device.type,
    }


def _facts(module: nn.Module) -> dict[str, Any]:
    cls = tree.own_class(module)
    generators = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators["cuda"] = torch.cuda.get_rng_state()
    return {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "source": tree.source_line(module),
        "code": code_digest(cls),
        "constructor": _constructor(module, cls),
        "training": module.training,
        "other_mode": [name for name, inner in module.named_modules() if inner.training != module.training],
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": {
            kind: str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        },
        "rng": {kind: base64.b64encode(bytes(state.tolist())).decode() for kind, state in generators.items()},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _constructor(module: nn.Module, cls: type[Any]) -> dict[str, Any] | None:
    """Return the constructor arguments of a torch.nn module. Return None if only the program can make the module.

    Arguments are read from the module's attributes. Whether the module has a bias is read from its parameters.
    """
    is_made_of_others = bool(module._modules) and cls is not nn.MultiheadAttention
    if not cls.__module__.startswith("torch.nn.modules.") or is_made_of_others:
        return None
    held = {name for name, _ in module.named_parameters(recurse=False)}
    arguments: dict[str, Any] = {}
    parameters = list(inspect.signature(cls.__init__).parameters.values())
    if issubclass(cls, nn.RNNBase):
        parameters = list(inspect.signature(nn.RNNBase.__init__).parameters.values())
    for parameter in parameters:
        name = parameter.name
        if name in _NO_SETTINGS:
            continue
        if name in _OF_PARAMETERS and not isinstance(getattr(module, name, None), bool):
            arguments[name] = not held.isdisjoint(_OF_PARAMETERS[name])
        elif hasattr(module, name) and (node := _setting(getattr(module, name))) is not None:
            arguments[name] = node
        elif parameter.default is parameter.empty:
            return None
    if cls is nn.RNN:
        arguments["nonlinearity"] = module.nonlinearity
    if cls in (nn.RNN, nn.GRU):  # both classes refuse `proj_size`
        del arguments["proj_size"]
    return arguments


def _setting(value: Any) -> Any:
    """Return a setting as a JSON value. Return None for other values: the constructor's default is then used."""
    if type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, (tuple, list)) and all(type(item) in (bool, int, float, str) for item in value):
        return list(value)
    return None


def code_digest(cls: type[Any]) -> str:
    """Return a digest of the code of a class and its bases. Bases that belong to torch or Python are left out."""
    digest = hashlib.sha256()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc"):
            continue
        for name, member in sorted(vars(base).items()):
            function = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", None) or member))
            if isinstance(function, types.FunctionType):
                for part in _parts(function.__code__):
                    digest.update(f"{name} {part}\n".encode())
    return digest.hexdigest()


def _parts(code: types.CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)
        else:
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def _canonical(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in tree.TRANSPARENT)
