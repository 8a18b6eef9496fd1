"""Watches a program for ``recorder prove``: digests of its complete state after each optimizer step, and its output.

The start-up hook loads this module in all runs that are compared, with the recorder and without. So its own effect
cancels out. It imports nothing of the package, puts no hook on a module, issues no collective, and changes no state of
the program. It ends the program, with exit code 0, after the requested number of steps.
"""

import gc
import hashlib
import json
import os
import platform
import random
import socket
import sys
import time
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

FOLDER = "_RECORDER_PROBE"
"""The environment variable that names the folder for the results. `analyze.prove` sets the variable, and `STEPS`."""
STEPS = "_RECORDER_PROBE_STEPS"
RESUME = "_RECORDER_PROBE_RESUME"
"""The environment variable of ``prove --resume``: ``killed`` for the launch that is killed, otherwise ``resumed``."""
_WAIT_S = 60.0
"""The most seconds that a rank waits at the end for the other ranks. The launcher would end them if it left."""
_TRANSPARENT = frozenset(("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"))
_WRAPPERS = frozenset(("DistributedDataParallel", "DataParallel", "DeepSpeedEngine"))


def start() -> None:
    """Begin to watch this process, whose standard output goes to a file from now on."""
    folder, num_steps, resume = os.environ[FOLDER], int(os.environ[STEPS]), os.environ.get(RESUME)
    if resume == "killed" and any(name.endswith(".done") for name in os.listdir(folder)):
        resume, folder = "resumed", os.path.join(folder, "resumed")  # the launcher has restarted the ranks
        os.makedirs(folder, exist_ok=True)
    descriptor = os.open(os.path.join(folder, f"{os.getpid()}.out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    os.dup2(descriptor, 1)
    os.close(descriptor)
    if resume is None:
        ProgramProbe(folder, num_steps)
        return
    from recorder_resume_probe import ResumeProbe

    ResumeProbe(folder, num_steps, is_killed=resume == "killed")


class ProgramProbe:
    """Counts the steps of the program's first optimizer. Writes a line of digests after a step of any optimizer."""

    def __init__(self, folder: str, num_steps: int) -> None:
        self._folder = folder
        self._num_steps = num_steps
        self._pid = os.getpid()
        self._file: Any = None
        self._first: int | None = None
        """The `id` of the optimizer whose steps are counted."""
        self._num_done = 0
        self._others_awaited: set[int] = set()
        """The `id` of each other optimizer that stepped between the last two steps of the first optimizer."""
        self._others_stepped: set[int] = set()
        self._models: list[weakref.ref[Any]] = []
        """Weak references to models. A DDP module that outlives its process group can block the end of the process."""
        self._names: dict[int, str] = {}
        self._handle = register_optimizer_step_post_hook(self._after_step)
        register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Register the hook after a step again, so that it runs last and sees what other hooks have changed."""
        if not torch.compiler.is_compiling():
            self._handle.remove()
            self._handle = register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or os.getpid() != self._pid:  # steps in a forked child do not count
            return
        if self._first is None:
            self._first = id(optimizer)
        counts = id(optimizer) == self._first
        rank, world_size = _rank()
        step = self._num_done if counts else max(self._num_done - 1, 0)
        with torch.no_grad():
            seen = self._look(optimizer)
        if self._file is None:
            path = os.path.join(self._folder, f"{self._pid}.jsonl")
            self._file = open(path, "x", encoding="utf-8")  # noqa: SIM115 - open until the process ends
            self._write({"rank": rank, "pid": self._pid, "versions": _versions(), "machine": _machine()})
        self._write({"step": step, "digests": seen})
        if counts:
            self._num_done += 1
            self._others_awaited, self._others_stepped = self._others_stepped, set()
        else:
            self._others_stepped.add(id(optimizer))
        is_whole = self._others_awaited <= self._others_stepped or self._num_done > self._num_steps
        if self._num_done >= self._num_steps and is_whole:
            self._end(rank, world_size)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _end(self, rank: int, world_size: int) -> None:
        open(os.path.join(self._folder, f"{rank}.done"), "w").close()
        until_s = time.monotonic() + _WAIT_S
        while time.monotonic() < until_s:
            if all(os.path.exists(os.path.join(self._folder, f"{one}.done")) for one in range(world_size)):
                break
            time.sleep(0.01)
        self._leave()

    def _leave(self) -> None:
        raise SystemExit(0)

    def _look(self, optimizer: Any) -> dict[str, str]:
        """Return digests of the program's state. A key is the kind and the name of a value, separated by a space."""
        seen: dict[str, str] = {}
        self._see_models(seen, [optimizer])
        for reference in self._models:
            if (model := reference()) is not None:
                self._see_gradients(seen, model.parameters())
        for group, settings in enumerate(optimizer.param_groups):
            self._see_gradients(seen, settings["params"])
            _see_settings(seen, group, settings)
        _see_random_states(seen)
        return seen

    def _see_models(self, seen: dict[str, str], optimizers: list[Any]) -> None:
        """Add to `seen` digests of the models that these optimizers train, and of the optimizers' state."""
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        if any(id(parameter) not in self._names for group in groups for parameter in group):
            self._find_models(groups)
        for number, reference in enumerate(self._models):
            if (model := reference()) is None:
                continue
            for name, buffer in model.named_buffers():
                seen[f"buffer {_prefix(number)}{_canonical(model, name)}"] = _described(buffer)
            for name, parameter in model.named_parameters():
                seen[f"param {_prefix(number)}{_canonical(model, name)}"] = _described(parameter)
                seen[f"flag requires_grad of {_prefix(number)}{_canonical(model, name)}"] = (
                    f"= {parameter.requires_grad}"
                )
            for name, module in model.named_modules():
                path = f"{_prefix(number)}{_canonical(model, name)}" or type(model).__name__
                seen[f"flag training of {path}"] = f"= {module.training}"
        for optimizer in optimizers:
            for settings in optimizer.param_groups:
                for parameter in settings["params"]:
                    name = self._names[id(parameter)]
                    seen.setdefault(f"param {name}", _described(parameter))
                    _see(seen, f"optim {name}", optimizer.state.get(parameter, {}))

    def _see_gradients(self, seen: dict[str, str], parameters: Any) -> None:
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) in self._names:
                seen[f"grad {self._names[id(parameter)]}"] = _described(parameter.grad)

    def _find_models(self, groups: list[list[Any]]) -> None:
        # `isinstance` is not used: it reads a proxy's `__class__`, which may load the object behind the proxy.
        outer = _outermost([one for one in _objects() if issubclass(type(one), torch.nn.Module)])
        held = [{id(parameter): name for name, parameter in module.named_parameters()} for module in outer]
        for group, index, parameter in ((g, i, one) for g, some in enumerate(groups) for i, one in enumerate(some)):
            if id(parameter) in self._names:
                continue
            candidates = [number for number, names in enumerate(held) if id(parameter) in names]
            if candidates:
                best = max(candidates, key=lambda number: len(held[number]))
                model, model_number = outer[best], len(self._models)
                self._models.append(weakref.ref(model))
                for identity, name in held[best].items():
                    self._names.setdefault(identity, _prefix(model_number) + _canonical(model, name))
            else:
                self._names[id(parameter)] = f"(parameter {index} of group {group})"


def _objects() -> list[Any]:
    """Return the objects that the garbage collector knows, in an order that is the same in each launch."""
    return [one for generation in (2, 1, 0) for one in gc.get_objects(generation)]


def _outermost(instances: list[Any]) -> list[Any]:
    # Modules whose `__init__` still runs have no `_modules`.
    modules = [module for module in instances if "_modules" in vars(module)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in inner]


def _rank() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    for name in ("numpy", "transformers", "accelerate", "lightning", "pytorch_lightning"):
        if version := getattr(sys.modules.get(name), "__version__", ""):
            versions[name] = str(version)
    return versions


def _machine() -> str:
    device = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() and torch.cuda.is_initialized() else ""
    return f"{socket.gethostname()}, {platform.system()} on {platform.machine()}{device}"


def _prefix(number: int) -> str:
    return f"model_{number}." if number else ""


def _canonical(model: Any, name: str) -> str:
    parts = name.split(".")
    if type(model).__name__ in _WRAPPERS:
        parts = parts[1:]
    return ".".join(part for part in parts if part not in _TRANSPARENT)


def _see_settings(seen: dict[str, str], group: int | str, settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        if key != "params":
            _see(seen, f"setting {key} of group {group}", value)


def _see_random_states(seen: dict[str, str]) -> None:
    seen["rng cpu"] = _digest(torch.get_rng_state())
    seen["rng python"] = _hash(repr(random.getstate()).encode())
    if "numpy" in sys.modules:
        seen["rng numpy"] = _legacy_state(sys.modules["numpy"].random.get_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        seen["rng cuda"] = _digest(torch.cuda.get_rng_state())


def _see(seen: dict[str, str], name: str, value: Any) -> None:
    if isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _see(seen, f"{name}.{key}", inner)
    elif isinstance(value, (torch.Tensor, bool, int, float)):
        seen[name] = _described(value)


def _described(value: Any) -> str:
    """Describe a value: ``= 0.5`` for a single number, else by dtype, kind of content and digest.

    The kind is ``zero`` (all elements are 0), ``bfloat16`` (float32 elements that are bfloat16 numbers) or ``-``. A
    chunk of a DTensor is also described by the whole tensor's shape and by the chunk's offsets and sizes.
    """
    if not isinstance(value, torch.Tensor):
        return f"= {value!r}"
    try:
        whole: Any = value
        tensor = whole.to_local() if hasattr(whole, "to_local") else whole
        if tensor.is_meta or tensor.layout is not torch.strided:
            return f"{tensor.dtype} - {_digest(value)}"
        if not tensor.dim():
            return f"= {tensor.item()!r}"
        word = "-"
        if tensor.numel() and not tensor.any():
            word = "zero"
        elif tensor.dtype is torch.float32 and tensor.numel() > 1 and torch.equal(tensor.bfloat16().float(), tensor):
            word = "bfloat16"
        described = f"{str(tensor.dtype).removeprefix('torch.')} {word} {_digest(value)}"
        if tensor.shape != whole.shape:
            chunk = whole.__create_chunk_list__()[0]
            described += f" {[*whole.shape]} {[*chunk.offsets]} {[*chunk.sizes]}".replace(", ", ",")
        return described
    except Exception:
        return f"- - {_digest(value)}"


def _digest(tensor: torch.Tensor) -> str:
    """Return a 128-bit digest of a tensor's dtype, shape and elements, or a text that says why they cannot be read."""
    try:
        digest = hashlib.blake2b(digest_size=16)
        _add(digest, tensor.detach())
        return digest.hexdigest()
    except Exception as error:
        return f"unread: {type(error).__name__}"


def _add(digest: Any, tensor: Any) -> None:
    if hasattr(tensor, "to_local"):  # a DTensor has this method: take this rank's chunk
        tensor = tensor.to_local()
    if hasattr(tensor, "wait"):  # an AsyncCollectiveTensor has this method
        tensor = tensor.wait()
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode())
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            _add(digest, getattr(tensor, name))
        return
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        _add(digest, tensor.indices())
        _add(digest, tensor.values())
        return
    if tensor.is_meta or not tensor.numel():
        return
    needed = tensor.element_size() * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
    if tensor.untyped_storage().size() < needed:  # the storage was freed: reading it would crash the process
        return
    tensor = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy())


def _hash(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _legacy_state(state: Any) -> str:
    """Return a digest of what `get_state` of one of NumPy's older random generators returns."""
    return _hash(repr([part.tolist() if hasattr(part, "tolist") else part for part in state]).encode())
