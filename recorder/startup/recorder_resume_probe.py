"""Watches a program for ``recorder prove --resume``: what each optimizer step begins with, reads, and computes.

The state is read when the first training forward of a step begins. At that moment a resumed process has restored all
that it will restore. The module imports nothing of the package, and changes no state of the program. It puts global
hooks on forward passes, in all launches that are compared.
"""

import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import recorder_probe as base
import torch
from torch.nn.modules import module as hooks
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

_NOT_RESTORED = frozenset(("_step_count", "_is_initial", "_get_lr_called_within_step", "verbose"))
"""Members of a learning-rate schedule's state that count calls and have no effect on the learning rate."""
_MODULE, _OPTIMIZER, _SCALER = torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler
_SCHEDULE, _LOADER = torch.optim.lr_scheduler.LRScheduler, _MultiProcessingDataLoaderIter
_KINDS: tuple[type, ...] = (_MODULE, _OPTIMIZER, _SCALER, _SCHEDULE, _LOADER)
_FLUSHED_S = 2.0
"""The seconds that a process waits before it kills itself, so that the recorder's writer can bring rows to the disk."""


class ResumeProbe(base.ProgramProbe):
    """Writes a line for each update by an optimizer: the state before it, the batches and the gradients."""

    def __init__(self, folder: str, num_steps: int, *, is_killed: bool) -> None:
        super().__init__(folder, num_steps)
        self._is_killed = is_killed
        self._thread = threading.get_ident()
        self._depth = 0
        self._learns = False
        """True while the outermost module that is being called has parameters that may get gradients."""
        self._seen: dict[str, str] = {}
        """The digests of the update that is under way, by kind and name of the value."""
        self._num_calls = 0
        self._batches: dict[int, str] = {}
        """The digests of the batches of the update that is under way, by the number of the forward call."""
        self._kind_of: dict[type, type | None] = {}
        """Maps a type to its base class in `_KINDS`, to `object` for another type with a `state_dict`, or to None."""
        self._others: dict[int, str] = {}
        """The names of objects beside the model, such as a moving average of the weights, by the objects' `id`."""
        self._generators: list[tuple[Any, int | None]] = []
        """The random generators found last, each with its initial seed, or with None if it is not torch's."""
        hooks.register_module_forward_pre_hook(self._before_forward)
        hooks.register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True)

    def _is_elsewhere(self) -> bool:
        return torch.compiler.is_compiling() or threading.get_ident() != self._thread or os.getpid() != self._pid

    def _before_forward(self, module: Any, args: Any) -> None:
        if self._is_elsewhere():
            return
        self._depth += 1
        if self._depth > 1:
            return
        is_again = torch._C._current_graph_task_id() != -1  # this forward is a recompute inside a backward
        has_parameters = any(parameter.requires_grad for parameter in module.parameters())
        self._learns = torch.is_grad_enabled() and not is_again and has_parameters
        if self._learns and not self._seen:
            with torch.no_grad():
                self._look_before()

    def _after_forward(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Take the digest of the batch. Done after the forward: global hooks before it get no keyword arguments."""
        if self._is_elsewhere():
            return
        self._depth -= 1
        data = [one for one in _tensors_in((args, kwargs)) if not one.requires_grad]
        if self._depth or not self._learns or not data:
            return
        self._num_calls += 1
        batch = {self._num_calls: _samples(data)}
        if module.training:
            self._batches |= batch
            return
        for one in _tensors_in(output):
            if one.grad_fn is not None:  # the batch of a module in evaluation mode counts if a backward pass needs it
                one.grad_fn.register_prehook(lambda _: self._batches.update(batch))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        super()._before_step(optimizer, args, kwargs)
        if not self._seen and not torch.compiler.is_compiling() and os.getpid() == self._pid:
            with torch.no_grad():  # the forward pass calls no module
                self._look_before()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        is_first = self._first in (None, id(optimizer))
        if is_first and not self._batches and all(not group["lr"] for group in optimizer.param_groups):
            self._seen = {}  # this step makes the optimizer's state for torch's `get_state_dict`
        if self._seen:  # otherwise another optimizer wraps this one, and the wrapper's update was seen
            super()._after_step(optimizer, args, kwargs)

    def _look(self, optimizer: Any) -> dict[str, str]:
        seen, batches = self._seen, sorted(self._batches.items())
        self._seen, self._batches = {}, {}
        seen |= {f"batch {number}": digest for number, (_, digest) in enumerate(batches)}
        names = (self._names.get(id(one), "") for settings in optimizer.param_groups for one in settings["params"])
        by = f"{type(optimizer).__name__}({next(names, '')},...)"
        seen["update of the step"] = f"= {by}"
        for group, settings in enumerate(optimizer.param_groups):
            base._see_settings(seen, f"{group} of {by}", settings)
            self._see_gradients(seen, settings["params"])
        return seen

    def _leave(self) -> None:
        if self._is_killed:
            time.sleep(_FLUSHED_S)
            os.kill(os.getpid(), signal.SIGKILL)
        super()._leave()

    def _look_before(self) -> None:
        seen = self._seen
        seen["began"] = str(time.time_ns())
        found: dict[type, list[Any]] = {}
        for one in base._objects():
            if type(one) not in self._kind_of:
                self._kind_of[type(one)] = _kind(type(one))
            if kind := self._kind_of[type(one)]:
                found.setdefault(kind, []).append(one)
        # An optimizer without `param_groups` wraps another optimizer.
        optimizers = [one for one in found.get(_OPTIMIZER, []) if "param_groups" in vars(one)]
        self._see_models(seen, optimizers)
        models = {id(reference()) for reference in self._models}
        for module in base._outermost(found.get(_MODULE, [])):
            if id(module) not in models:
                _see_other(seen, self._other(module), [*module.named_parameters(), *module.named_buffers()])
        schedules = found.get(_SCHEDULE, [])
        inner = {id(one) for schedule in schedules for one in getattr(schedule, "_schedulers", ())}
        members: dict[str, str] = {}
        for schedule in (one for one in schedules if id(one) not in inner):
            base._see(members, f"schedule {self._other(schedule)}", schedule.state_dict())
        seen |= {key: value for key, value in members.items() if key.rpartition(".")[2] not in _NOT_RESTORED}
        for scaler in found.get(_SCALER, []):
            base._see(seen, f"scaler {self._other(scaler)}", scaler.state_dict())
        for loader in found.get(_LOADER, []):
            seen["other DataLoader.num_workers"] = base._described(loader._num_workers)
        for stateful in found.get(object, []):
            tensors = [pair for key, value in _attributes(stateful).items() for pair in self._tensors(key, value)]
            _see_other(seen, self._other(stateful), tensors)
        base._see_random_states(seen)
        generator = torch.Generator()  # for the next states, if new iterators of DataLoaders draw one number each
        generator.set_state(torch.get_rng_state())
        for number in range(1, 5):  # more iterators are not expected to begin between two updates
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
            seen[f"ahead {number}"] = base._digest(generator.get_state())
        self._see_variables(seen)

    def _see_variables(self, seen: dict[str, str]) -> None:
        """Add to `seen` digests of generators and weight averages, and which generators are new or newly seeded."""
        types: tuple[type, ...] = (torch.Generator, random.Random)
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"]
            types += (numpy.random.Generator, numpy.random.RandomState)
        generators: dict[str, Any] = {"cpu": torch.default_generator, "python": random._inst}
        if "rng cuda" in seen:
            generators["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
        weights = {_plain(key.partition(" ")[2]) for key in seen if key.startswith(("param ", "buffer "))}
        known = set(map(id, generators.values()))
        for path, one, owner in _variables():
            if not issubclass(type(one), (dict, *types)) or id(one) in known:
                continue
            known.add(id(one))
            if issubclass(type(one), types):
                number = sum(name.partition("#")[0] == path for name in generators)
                name = f"{path}#{number + 1}" if number else path
                generators[name], seen[f"rng {name}"] = one, _state_of(one)
            elif not self._kind_of.get(type(owner)) and all(_plain(str(key)) in weights for key in one):
                for key, tensor in self._tensors(path, one):
                    seen.setdefault(f"variable {key}", base._described(tensor))
        made = {
            name: (one, one.initial_seed() if isinstance(one, torch.Generator) else None)
            for name, one in generators.items()
        }
        if self._generators:
            seen |= {f"seeded {name}": "= True" for name, one in made.items() if one not in self._generators}
        self._generators = [*made.values()]

    def _other(self, one: Any) -> str:
        """Return the name of an object: its type, with a number if an earlier object has the same type."""
        if id(one) not in self._others:
            plain = type(one).__name__
            number = sum(name.partition("#")[0] == plain for name in self._others.values())
            self._others[id(one)] = f"{plain}#{number + 1}" if number else plain
        return self._others[id(one)]

    def _tensors(self, name: str, value: Any) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors in a member of an object, with their names. The model's own parameters are left out."""
        if isinstance(value, torch.Tensor):
            return [] if id(value) in self._names else [(name, value)]
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [pair for key, one in inner for pair in self._tensors(f"{name}.{key}", one)]


def _kind(of_type: type) -> type | None:
    is_stateful = hasattr(of_type, "state_dict") and hasattr(of_type, "load_state_dict")
    return next((kind for kind in _KINDS if issubclass(of_type, kind)), object if is_stateful else None)


def _attributes(one: Any) -> dict[str, Any]:
    attributes = getattr(one, "__dict__", None)
    return dict(attributes) if type(attributes) is dict and type(one) is not ModuleType else {}


def _see_other(seen: dict[str, str], name: str, tensors: list[tuple[str, torch.Tensor]]) -> None:
    for key, tensor in tensors:
        seen[f"other {name}.{key}"] = base._described(tensor)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if hasattr(value, "values") else value if isinstance(value, (list, tuple)) else ()
    return [tensor for one in inner for tensor in _tensors_in(one)]


def _samples(batch: list[torch.Tensor]) -> str:
    """Return a digest of each sample (row) of a batch. A tensor with another number of rows counts in each sample."""
    num_rows = max(len(tensor) if tensor.dim() else 1 for tensor in batch)
    has_rows = [tensor.dim() > 0 and len(tensor) == num_rows for tensor in batch]
    common = [base._digest(tensor) for tensor, is_cut in zip(batch, has_rows, strict=True) if not is_cut]
    cut = [tensor for tensor, is_cut in zip(batch, has_rows, strict=True) if is_cut]
    rows = ([*common, *(base._digest(tensor[row]) for tensor in cut)] for row in range(num_rows))
    return " ".join(base._hash(" ".join(row).encode()) for row in rows)


def _plain(name: str) -> str:
    """Return a weight's name without the number of the model and without the names that wrappers add."""
    parts = name.split(".")
    added = {"module", *base._TRANSPARENT}
    return ".".join(one for one in parts if one not in added and not re.fullmatch(r"model_\d+", one))


def _variables() -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, owner) for variables of running functions and the main module, and for their attributes."""
    found: list[dict[str, Any]] = []
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") not in (__name__, base.__name__):
            found.append(dict(frame.f_locals))
        frame = frame.f_back
    for variables in (*found, dict(vars(sys.modules["__main__"]))):
        for name, value in variables.items():
            yield name, value, None
            yield from ((f"{name}.{key}", held, value) for key, held in _attributes(value).items())


def _state_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return base._digest(generator.get_state())
    if isinstance(generator, random.Random):
        return base._hash(repr(generator.getstate()).encode())
    if hasattr(generator, "get_state"):
        return base._legacy_state(generator.get_state())
    return base._hash(repr(generator.bit_generator.state).encode())
