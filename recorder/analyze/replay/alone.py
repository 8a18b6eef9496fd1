"""Runs one recorded call of a module again, and compares the results with the recorded ones.

This file lies in the folder that `recorder replay` writes, as replay.py, and needs nothing but torch:

    python replay.py                                  # a module of torch.nn
    python replay.py --factory my_model:make          # a class of your own, or a whole model that holds the module
    python replay.py --dtype float64                  # how far is the recorded result from the exact one?
    python replay.py --device cuda --compile # on another device, or compiled

Exit code 0: everything was reproduced, bit by bit or within rounding. 1: something differs. 2: it cannot be run.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import importlib
import inspect
import json
import struct
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

VERSION = 1
ROUNDING = 64
"""A difference counts as rounding up to this many units in the last place of the tensor's largest element."""
EQUAL, ROUNDED, TOTAL, DIFFERENT = "bit-equal", "within rounding", "not judged", "different"
_TYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip


class CannotReplay(Exception):
    """The call cannot be run on this machine. The message says why, and what the user can do."""


class Compared(NamedTuple):
    """The comparison of one replayed tensor with the recorded tensor."""

    name: str
    verdict: str
    largest: float
    scale: float
    num_differing: int
    numel: int


class Options(NamedTuple):
    """The options of a replay."""

    factory: str = ""
    anyway: bool = False
    dtype: str = ""
    device: str = ""
    compile: bool = False


def main(words: Sequence[str] | None = None) -> int:
    """Run the call in the folder of this file, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factory", default="", metavar="MODULE:FUNCTION", help="makes the module, or the whole model")
    parser.add_argument("--anyway", action="store_true", help="run it although the class's code has changed")
    parser.add_argument("--dtype", default="", choices=["float64", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="", help="such as cuda or cuda:1; by default cpu")
    parser.add_argument("--compile", action="store_true", help="under torch.compile")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args(words)
    sys.path.insert(0, str(Path.cwd()))
    try:
        options = Options(given.factory, given.anyway, given.dtype, given.device, given.compile)
        compared, notes = replay(Path(__file__).parent, options)
    except CannotReplay as error:
        sys.stderr.write(f"replay: {error}\n")
        return 2
    is_different = any(one.verdict == DIFFERENT for one in compared)
    if given.json:
        sys.stdout.write(json.dumps({"compared": [one._asdict() for one in compared], "notes": notes}) + "\n")
        return int(is_different)
    for note in notes:
        sys.stdout.write(f"note: {note}\n")
    width = max(len(one.name) for one in compared)
    for one in compared:
        line = f"{one.name:{width}}  {one.verdict}"
        if one.verdict != EQUAL:
            line += f": {one.num_differing} of {one.numel} elements, by {one.largest:.3g} at most, of {one.scale:.3g}"
        sys.stdout.write(line + "\n")
    return int(is_different)


def replay(folder: Path, options: Options) -> tuple[list[Compared], list[str]]:
    """Run a call again, and return the comparisons with the recorded tensors, and notes on these.

    Raises CannotReplay if the folder is damaged, or the module cannot be made or run here.
    """
    try:
        return _replay(folder, options)
    except CannotReplay:
        raise
    except Exception as error:  # a damaged folder may cause any error
        raise CannotReplay(f"{folder}: {type(error).__name__}: {error}; write the folder again") from error


def _replay(folder: Path, options: Options) -> tuple[list[Compared], list[str]]:
    try:
        bundle = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
        tensors = _read_tensors(folder / "tensors.safetensors")
        call = bundle["facts"]
        if bundle["bundle"] != VERSION:
            raise CannotReplay(f"{folder}: a bundle of version {bundle['bundle']}; write it anew with this recorder")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise CannotReplay(f"{folder}: cut short or damaged ({type(error).__name__}: {error}); write it anew") from None
    if bundle["lacks"]:
        raise CannotReplay("cannot be run, something is missing: " + "; ".join(bundle["lacks"][:4]))
    odd = [name for name, about in call["tensors"].items() if "dtensor" in about or "layout" in about]
    if odd:
        raise CannotReplay(f"{', '.join(odd[:4])}: a part of a distributed or sparse tensor, which cannot be replayed")
    notes = list(_other_versions(call))
    one = _Call(call, tensors, _device(options.device), getattr(torch, options.dtype) if options.dtype else None)
    with _settings(call):
        module = make_module(bundle, options, notes)
        if options.factory:  # without a factory the parameters have no memory yet
            module = module.to(one.device, one.dtype)
        _load(module, one)
        inputs = _inputs(one)
        args = [_value(node, inputs) for node in call["args"]]
        kwargs = {key: _value(node, inputs) for key, node in call["kwargs"]}
        called = torch.compile(module) if options.compile else module
        _seed(one)
        try:
            outputs = _forward(called, args, kwargs, one)
            replayed = {name: output.detach().clone() for name, output in outputs.items()}
            replayed |= _backward(outputs, inputs, tensors)
        except Exception as error:
            raise CannotReplay(f"the call fails on this machine: {type(error).__name__}: {error}") from error
    replayed |= {f"grad.{name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    compared = [_compare(_shown(name), tensors[name], replayed[name]) for name in tensors if name in replayed]
    missing = [name for name in tensors if name.startswith("output.") and name not in replayed]
    if missing or not compared:
        named = ", ".join(map(_shown, missing)) or "output"
        raise CannotReplay(f"the module returned something else than was recorded: no {named}")
    return sorted(compared, key=lambda one: (not one.name.startswith("output"), one.name)), notes


class _Call(NamedTuple):
    """A recorded call, with the device and the dtype in which it is run (None: the recorded dtypes)."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    device: torch.device
    dtype: torch.dtype | None

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        is_cast = self.dtype is not None and tensor.is_floating_point()
        return tensor.to(self.device, self.dtype if is_cast else tensor.dtype)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name or "cpu")
        torch.empty(0, device=device)
    except (AssertionError, ImportError, RuntimeError) as error:  # torch raises any of them for a missing device
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise CannotReplay(f"--device {name}: {why}; name a device of this machine, or leave --device out") from None
    return device


def make_module(bundle: Mapping[str, Any], options: Options, notes: list[str]) -> nn.Module:
    """Make the module: a class of torch.nn from its settings, any other class with the factory."""
    call = bundle["facts"]
    where, _, qualified = call["class"].partition(":")
    if options.factory:
        made = _from_factory(options.factory)
        names = {name.partition(".")[2] for name in call["tensors"] if name.startswith("param.")}
        is_itself = type(made).__qualname__ == qualified and names <= {name for name, _ in made.named_parameters()}
        if not is_itself:
            try:
                made = made.get_submodule(bundle["module"])
            except AttributeError:
                what = f"which is no {qualified} and has no submodule {bundle['module']!r}"
                raise CannotReplay(f"{options.factory} made a {type(made).__name__}, {what}") from None
        if type(made).__qualname__ != qualified:
            what = f"{bundle['module']!r} is a {type(made).__qualname__}, not {qualified}"
            raise CannotReplay(f"{options.factory}: {what}")
        code, python = code_digest(type(made)), call["python"]
        if python.split(".")[:2] != sys.version.split()[0].split(".")[:2]:
            notes.append(f"it is unknown whether the code of {qualified} has changed: it ran in Python {python}")
        elif code != call["code"]:
            changed = f"the code of {type(made).__qualname__} is not the recorded code ({call['source']})"
            if not options.anyway:
                raise CannotReplay(f"{changed}; --anyway runs the call anyway")
            notes.append(changed)
        return made
    if call["constructor"] is None or not where.startswith("torch.nn.modules."):
        how = "that can be made from its settings: give --factory MODULE:FUNCTION"
        raise CannotReplay(f"{qualified} is no module {how}")
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in call["constructor"].items()}
    try:
        cls = getattr(importlib.import_module(where), qualified)
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise CannotReplay(f"{call['class']} is no module")
        with torch.device("meta"):  # recorded tensors replace the parameters later
            return cls(**settings)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise CannotReplay(f"this torch makes no {qualified} of {settings}: {error}; give --factory") from None


def _from_factory(text: str) -> nn.Module:
    where, _, name = text.partition(":")
    try:
        factory = getattr(importlib.import_module(where), name)
    except (Exception, SystemExit) as error:
        is_unknown = not where or not name or (isinstance(error, AttributeError) and error.name == name)
        if is_unknown or (isinstance(error, ModuleNotFoundError) and f"{where}.".startswith(f"{error.name}.")):
            raise CannotReplay(
                f"--factory {text}: {type(error).__name__}: {error}; expected MODULE:FUNCTION"
            ) from error
        guard = "a program that trains when it is imported needs the guard: if __name__ == '__main__':"
        said = f"importing {where} raised {type(error).__name__}: {error}"
        raise CannotReplay(f"--factory {text}: {said}; {guard}") from error
    try:
        made = factory()
    except Exception as error:
        said = f"{name}() raised {type(error).__name__}: {error}"
        raise CannotReplay(f"--factory {text}: {said}; expected a function without arguments") from error
    if not isinstance(made, nn.Module):
        raise CannotReplay(f"--factory {text}: made a {type(made).__name__}, expected a torch.nn.Module")
    return made


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    data = path.read_bytes()
    (num_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + num_bytes])
    body = memoryview(bytearray(data[8 + num_bytes :]))
    tensors = {}
    for name, one in header.items():
        if name == "__metadata__":
            continue
        start, stop = one["data_offsets"]
        if not 0 <= start <= stop <= len(body):
            raise ValueError(f"{name} ends after the end of {path.name}")
        dtype = getattr(torch, _TYPES[one["dtype"]])
        flat = torch.frombuffer(body[start:stop], dtype=dtype) if stop > start else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(one["shape"])
    return tensors


def _other_versions(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["torch"] != torch.__version__:
        yield f"recorded with torch {facts['torch']}, run with {torch.__version__}: the last bits may differ"
    devices = sorted({about["device"] for about in facts["tensors"].values() if "device" in about} - {"cpu"})
    if devices:
        yield f"recorded on {', '.join(devices)}: on another device the last bits differ"


@contextlib.contextmanager
def _settings(facts: Mapping[str, Any]) -> Iterator[None]:
    was_deterministic, state = torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    precision, num_threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    is_other = was_deterministic != facts["deterministic"]
    if is_other:  # the call would import torch's compiler, which takes seconds
        torch.use_deterministic_algorithms(facts["deterministic"], warn_only=True)
    torch.set_float32_matmul_precision(facts["matmul_precision"])
    torch.set_num_threads(facts["num_threads"])
    try:
        yield
    finally:
        if is_other:
            torch.use_deterministic_algorithms(was_deterministic)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(num_threads)
        torch.set_rng_state(state)


def _load(module: nn.Module, call: _Call) -> None:
    facts, tensors = call.facts, call.tensors
    held: dict[str, torch.Tensor] = {}
    held |= {f"param.{name}": value for name, value in module.named_parameters(remove_duplicate=False)}
    held |= {f"buffer.{name}": value for name, value in module.named_buffers(remove_duplicate=False)}
    wanted = [name for name in facts["tensors"] if not name.startswith("input.")]
    if sorted(held) != sorted(wanted):
        differing = sorted(set(held) ^ set(wanted))
        raise CannotReplay(f"the module that was made has other parameters or buffers: {', '.join(differing[:4])}")
    parts = [name for name in tensors if name in held and tensors[name].shape != held[name].shape]
    if parts:
        named = ", ".join(parts[:4])
        raise CannotReplay(f"{named}: another shape than in the module; is it a rank's chunk, as of FSDP?")
    made: dict[str, torch.Tensor] = {}
    for name in wanted:
        about = facts["tensors"][name]
        source = about.get("same_as", name)
        if source not in made:
            made[source] = _strided(call.tensor(source), about)
        kind, _, path = name.partition(".")
        owner_path, _, own = path.rpartition(".")
        owner = module.get_submodule(owner_path)
        if kind == "param":
            if not isinstance(made[source], nn.Parameter):
                made[source] = nn.Parameter(made[source], requires_grad=about["requires_grad"])
            owner._parameters[own] = made[source]  # type: ignore[assignment]
        else:
            owner._buffers[own] = made[source]
    module.train(facts["training"])
    for path in facts["other_mode"]:
        module.get_submodule(path).training = not facts["training"]


def _strided(tensor: torch.Tensor, about: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor of these values with the memory layout of the recorded tensor."""
    strides = about["stride"]
    if not tensor.numel() or len(strides) != tensor.dim():
        return tensor.clone()
    offset = about["offset"] % 64  # of the offset, only the alignment matters
    needed = offset + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    if needed > 16 * tensor.numel() + 64:  # the tensor is a view of a small part of a large one
        return tensor.clone()
    storage = torch.zeros(needed, dtype=tensor.dtype, device=tensor.device)
    once = tensor
    for dim, stride in enumerate(strides):
        if stride == 0:
            once = once.narrow(dim, 0, 1)
    storage.as_strided(once.shape, strides, offset).copy_(once)
    # This is not a view: a module must not change in place a view that a custom autograd function returned.
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage.untyped_storage(), offset, tensor.shape, strides
    )


class _Enter(torch.autograd.Function):
    """Makes a non-leaf tensor of a leaf tensor, for the module, which may change it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, about: Mapping[str, Any]) -> torch.Tensor:
        return _strided(leaf, about)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


_Inputs = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Maps an argument's name to two tensors: the leaf that gets the gradient, and the tensor that the module gets."""


def _inputs(call: _Call) -> _Inputs:
    inputs: _Inputs = {}
    for name, about in call.facts["tensors"].items():
        if not name.startswith("input."):
            continue
        source = about.get("same_as", name)
        if source in inputs:
            inputs[name] = inputs[source]
            continue
        leaf = call.tensor(name)
        if about["requires_grad"] and call.facts["grad"] and not call.facts["inference"]:
            leaf = leaf.clone().requires_grad_()
            inputs[name] = leaf, _Enter.apply(leaf, about)  # type: ignore[no-untyped-call]
        else:
            inputs[name] = leaf, _strided(leaf, about)
    return inputs


def _value(node: Mapping[str, Any], inputs: _Inputs) -> Any:
    (kind, content), *_ = node.items()
    if kind == "tensor":
        return inputs[f"input.{content}"][1]
    if kind == "value":
        return content
    if kind == "float":
        return float.fromhex(content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device("cpu")
    if kind in ("tuple", "list"):
        items = [_value(item, inputs) for item in content]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {key: _value(item, inputs) for key, item in content}
    raise CannotReplay(f"an argument is a {content}, which is not recorded")


def _seed(call: _Call) -> None:
    for kind, text in call.facts["rng"].items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if kind == "cpu":
            torch.set_rng_state(state)
        elif call.device.type == kind:
            torch.cuda.set_rng_state(state, call.device)


def _forward(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: _Call) -> dict[str, torch.Tensor]:
    with contextlib.ExitStack() as stack:
        if call.dtype is None:
            for kind, name in call.facts["autocast"].items():
                stack.enter_context(torch.autocast(kind, dtype=getattr(torch, name)))
        stack.enter_context(torch.set_grad_enabled(call.facts["grad"]))
        if call.facts["inference"]:
            stack.enter_context(torch.inference_mode())
        return dict(_leaves(module(*args, **kwargs), "output."))


def _backward(
    outputs: Mapping[str, torch.Tensor], inputs: _Inputs, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    pairs = [
        (output, tensors[gradient].to(output.device, output.dtype))
        for name, output in outputs.items()
        if (gradient := f"grad_{name}") in tensors and output.requires_grad
    ]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
    return {f"grad_{name}": leaf.grad for name, (leaf, _) in inputs.items() if leaf.grad is not None}


def _leaves(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    items: Mapping[Any, Any] = value if isinstance(value, dict) else {}
    if isinstance(value, (tuple, list)):
        items = dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    for key, item in items.items():
        yield from _leaves(item, f"{name}{'' if name.endswith('.') else '.'}{key}")


def _shown(name: str) -> str:
    """Return a tensor's name for people, without the final dot that the name of a single output has."""
    return name.removesuffix(".")


def _compare(name: str, recorded: torch.Tensor, replayed: torch.Tensor) -> Compared:
    replayed = replayed.detach().cpu()
    if tuple(replayed.shape) != tuple(recorded.shape):
        return Compared(name, DIFFERENT, float("nan"), float("nan"), recorded.numel(), recorded.numel())
    is_equal = replayed.dtype == recorded.dtype and torch.equal(_bits(replayed), _bits(recorded))
    if is_equal or not recorded.numel():
        return Compared(name, EQUAL, 0.0, 0.0, 0, recorded.numel())
    if not (recorded.is_floating_point() or recorded.is_complex()):
        num_differing = int((recorded != replayed).sum())
        verdict = DIFFERENT if num_differing else EQUAL
        return Compared(name, verdict, float("nan"), float("nan"), num_differing, recorded.numel())
    wide = torch.complex128 if recorded.is_complex() else torch.float64
    a, b = recorded.to(wide), replayed.to(wide)
    is_finite = a.isfinite() & b.isfinite()
    apart = (a - b).abs()[is_finite]
    largest, scale = (float(x.max()) if x.numel() else 0.0 for x in (apart, a.abs()[is_finite]))
    is_same_elsewhere = bool(((a == b) | (a.isnan() & b.isnan()))[~is_finite].all())
    narrowest = max(torch.finfo(recorded.dtype).eps, torch.finfo(replayed.dtype).eps)
    is_rounding = is_same_elsewhere and largest <= ROUNDING * narrowest * scale
    verdict = ROUNDED if is_rounding else TOTAL if name.startswith("grad_input") else DIFFERENT
    num_differing = int((a != b).sum()) - int((a.isnan() & b.isnan()).sum())
    return Compared(name, verdict, largest, scale, num_differing, recorded.numel())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def code_digest(cls: type[Any]) -> str:
    """Return the digest of a class's code, as the recorder makes it (`recorder/capture/hooks/calls.py`)."""
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


if __name__ == "__main__":
    sys.exit(main())
