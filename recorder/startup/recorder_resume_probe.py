"""Watches a program for ``recorder prove --resume``: what each optimizer step begins with, reads, and computes.

A look at the state is taken as the first training forward of a step begins: at that moment a resumed process has
restored all that it will restore. The module imports nothing of the package, and changes no state of the program. It
puts global hooks on forward passes, in all launches that are compared.
"""

import gc
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import recorder_probe as base
import torch
from torch.nn.modules import module as hooks
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

_NOT_RESTORED = frozenset(("_step_count", "_is_initial", "_get_lr_called_within_step", "verbose"))
"""Members of a schedule that count calls and have no effect on the learning rate."""
_MODULE, _OPTIMIZER, _SCALER = torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler
_SCHEDULE, _LOADER = torch.optim.lr_scheduler.LRScheduler, _MultiProcessingDataLoaderIter
_KINDS: tuple[type, ...] = (_MODULE, _OPTIMIZER, _SCALER, _SCHEDULE, _LOADER)


class ResumeProbe(base.ProgramProbe):
    """Writes a line for each step of the first optimizer, with the state before the step, its batches and gradients."""

    def __init__(self, folder: str, num_steps: int, *, is_killed: bool) -> None:
        super().__init__(folder, num_steps)
        self._is_killed = is_killed
        self._thread = threading.get_ident()
        self._depth = 0
        self._trains = False
        """True while the outermost module that is being called has parameters and trains."""
        self._seen: dict[str, str] = {}
        """What was seen of the step that is under way."""
        self._num_batches = 0
        self._kind_of: dict[type, type | None] = {}
        """Which of `_KINDS` a type is, `object` for any other type with a `state_dict`, and None for the rest."""
        self._others: dict[int, str] = {}
        """The names of objects beside the model, such as a moving average of the weights, by identity."""
        self._generators: list[tuple[Any, int | None]] = []
        """The random generators at the last look, those of torch with their seeds."""
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
        is_again = torch._C._current_graph_task_id() != -1  # a forward that is computed again inside a backward
        has_parameters = any(parameter.requires_grad for parameter in module.parameters())
        self._trains = torch.is_grad_enabled() and module.training and not is_again and has_parameters
        if self._trains and not self._seen:
            with torch.no_grad():
                self._look_before()

    def _after_forward(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Take the digest of the batch, here because hooks before all modules do not get keyword arguments."""
        if self._is_elsewhere():
            return
        self._depth -= 1
        if self._depth == 0 and self._trains and (data := _data_of((args, kwargs))):
            self._seen[f"batch {self._num_batches}"] = _samples(data)
            self._num_batches += 1

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        super()._before_step(optimizer, args, kwargs)
        if not self._seen and not torch.compiler.is_compiling() and os.getpid() == self._pid:
            with torch.no_grad():  # the forward pass calls no module
                self._look_before()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        is_other = self._first is not None and self._first != id(optimizer)  # it ends the step of the first optimizer
        if is_other or (not self._num_batches and all(not group["lr"] for group in optimizer.param_groups)):
            self._seen, self._num_batches = {}, 0  # the latter makes an optimizer's state for torch's `get_state_dict`
            return
        super()._after_step(optimizer, args, kwargs)

    def _look(self, optimizer: Any) -> dict[str, str]:
        """Return what was seen of the step that has ended."""
        seen, self._seen, self._num_batches = self._seen, {}, 0
        for group, settings in enumerate(optimizer.param_groups):
            base._see_settings(seen, group, settings)
            self._see_gradients(seen, settings["params"])
        return seen

    def _leave(self) -> None:
        """End the program at once, as the loss of a machine does, or with exit code 0."""
        if self._is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._leave()

    def _look_before(self) -> None:
        seen = self._seen
        found: dict[type, list[Any]] = {}
        for one in gc.get_objects():
            if type(one) not in self._kind_of:
                self._kind_of[type(one)] = _kind(type(one))
            if kind := self._kind_of[type(one)]:
                found.setdefault(kind, []).append(one)
        optimizers = [one for one in found.get(_OPTIMIZER, []) if "param_groups" in vars(one)]  # else it wraps another
        self._see_models(seen, optimizers)
        models = {id(reference()) for reference in self._models}
        for module in base._outermost(found.get(_MODULE, [])):
            if id(module) not in models:
                _see_other(seen, self._other(module), [*module.named_parameters(), *module.named_buffers()])
        for schedule in found.get(_SCHEDULE, []):
            members = {key: value for key, value in schedule.state_dict().items() if key not in _NOT_RESTORED}
            base._see(seen, f"schedule {self._other(schedule)}", members)
        for scaler in found.get(_SCALER, []):
            base._see(seen, f"scaler {self._other(scaler)}", scaler.state_dict())
        for loader in found.get(_LOADER, []):
            seen["other DataLoader.num_workers"] = base._described(loader._num_workers)
        for stateful in found.get(object, []):
            tensors = [pair for key, value in _attributes(stateful).items() for pair in self._tensors(key, value)]
            _see_other(seen, self._other(stateful), tensors)
        base._see_random_states(seen)
        self._see_variables(seen)

    def _see_variables(self, seen: dict[str, str]) -> None:
        """See random generators and averages of weights that the running functions hold, or attributes of variables.

        A generator that was made or seeded since the last look has a mark besides its state.
        """
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
        """Return the name of an object: its type, with a number where an earlier object has the same type."""
        if id(one) not in self._others:
            plain = type(one).__name__
            number = sum(name.partition("#")[0] == plain for name in self._others.values())
            self._others[id(one)] = f"{plain}#{number + 1}" if number else plain
        return self._others[id(one)]

    def _tensors(self, name: str, value: Any) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that an object's member holds, without the model's own parameters."""
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


def _data_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments of a model that no computation with gradients has made."""
    if isinstance(value, torch.Tensor):
        return [] if value.requires_grad else [value]
    inner = value.values() if hasattr(value, "values") else value if isinstance(value, (list, tuple)) else ()
    return [tensor for one in inner for tensor in _data_of(one)]


def _samples(batch: list[torch.Tensor]) -> str:
    """Return the digests of the samples of a batch, which are the rows of its tensors, with spaces between.

    A tensor with another number of rows, such as a mask for all samples, belongs to each sample.
    """
    num_rows = max(len(tensor) if tensor.dim() else 1 for tensor in batch)
    has_rows = [tensor.dim() > 0 and len(tensor) == num_rows for tensor in batch]
    common = [base._digest(tensor) for tensor, is_cut in zip(batch, has_rows, strict=True) if not is_cut]
    cut = [tensor for tensor, is_cut in zip(batch, has_rows, strict=True) if is_cut]
    rows = ([*common, *(base._digest(tensor[row]) for tensor in cut)] for row in range(num_rows))
    return " ".join(base._hash(" ".join(row).encode()) for row in rows)


def _plain(name: str) -> str:
    """Return the name of a weight without the number of its model and without the names that wrappers add."""
    parts = name.split(".")
    added = {"module", *base._TRANSPARENT}
    return ".".join(one for one in parts if one not in added and not re.fullmatch(r"model_\d+", one))


def _variables() -> Iterator[tuple[str, Any, Any]]:
    """Yield the variables of the functions that are running and of the program's own module, then their attributes.

    The third value is the object that has an attribute, and None for a variable.
    """
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
