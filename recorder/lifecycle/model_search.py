"""Finds the roots at their first call, the model around a module, and the rules that match no module.

A root is an outermost module that an optimizer trains. No line of user code is needed. A call of a module inside a root
counts as a call of the root if the program calls the module directly.

One global forward pre-hook costs about 2 us a module call. The hook stays until the first optimizer step whose
parameters are all under a root. If anything was compiled by then, the hook stays for good: dynamo guards on the number
of global hooks, so removing the hook would recompile every graph.

The search uses the live objects of the process, and optimizers that were made before the first root. Nothing here may
run a module, read the elements of a tensor, or raise into training.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules import module as module_internals
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..capture.parallel import topology
from ..capture.parallel.groups import find_data_parallel, wrappers_around
from ..capture.wrappers import wrap_closure
from ..observe import tree
from ..observe.selection import RuleSelection
from ..rules import Rule
from ..system.log import Events
from ..system.processes import live_instances, loaded
from ..taps.graphs import is_traced

_is_compiling = torch.compiler.is_compiling
_OTHER_HOOKS = ("_global_backward_pre_hooks", "_global_backward_hooks", "_global_forward_hooks")


class Discovery:
    """Owns the global forward pre-hook that finds roots (models to record). It stays on while it is needed."""

    def __init__(
        self,
        *,
        is_inside_root: Callable[[], bool],
        wants: Callable[[nn.Module], bool],
        make_root: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Start to look for models to record. `Recorder` describes the functions."""
        self._is_inside_root, self._wants, self._make_root, self._failed = is_inside_root, wants, make_root, failed
        self._rejected: dict[bool, weakref.WeakSet[nn.Module]] = {}
        """The modules not to record. Calls with and without gradients have their own: evaluation may come first."""
        self._handle: Any = None
        self.start()

    def start(self) -> None:
        self.reconsider()
        self._handle = register_module_forward_pre_hook(self._before_any_forward)  # type: ignore[arg-type]  # it may return arguments
        self._ask_torch: Any = getattr(module_internals, "_has_any_global_hook", None)
        if self._ask_torch is not None:
            module_internals._has_any_global_hook = self._has_other_global_hook

    def _has_other_global_hook(self) -> bool:
        """Return True if there is a global hook besides ours. Torch calls this to decide whether to warn.

        Torch warns of global hooks in compiled modules, and the process may have turned the warning into an error.
        Torch still warns of the user's own global hooks.
        """
        hooks = module_internals._global_forward_pre_hooks
        ours = self._handle.id if self._handle is not None else None
        ours_alone = list(hooks) == [ours] and not any(getattr(module_internals, name) for name in _OTHER_HOOKS)
        return not ours_alone and bool(self._ask_torch and self._ask_torch())

    def _before_any_forward(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if _is_compiling():
            return None
        try:
            if self._is_inside_root() or torch._C._current_graph_task_id() != -1:
                return None
            rejected = self._rejected[torch.is_grad_enabled()]
            if module in rejected:
                return None
            if is_traced():
                return None
            if not self._wants(module):
                # A module is not rejected for good if `functional_call` lends it tensors as parameters for one call.
                if all(isinstance(parameter, nn.Parameter) for parameter in module.parameters()):
                    rejected.add(module)
                return None
            # A global pre-hook is given no kwargs. They are a local variable of the function that calls the hook.
            kwargs = sys._getframe(1).f_locals.get("kwargs")
            return self._make_root(module, args, kwargs if isinstance(kwargs, dict) else {})
        except Exception as error:
            self._failed(error)
            return None

    def reconsider(self) -> None:
        """Forget which modules were rejected. With a new optimizer, rejected modules may be models to record."""
        self._rejected = {True: weakref.WeakSet(), False: weakref.WeakSet()}

    @property
    def is_on(self) -> bool:
        return self._handle is not None

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            if getattr(module_internals, "_has_any_global_hook", None) == self._has_other_global_hook:
                module_internals._has_any_global_hook = self._ask_torch


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector. It takes seconds among a million small objects, when 50,000 modules get hooks."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def model_around(module: nn.Module, *, of_any: bool = False) -> tuple[nn.Module, list[Optimizer], list[int]]:
    """Return the outermost live model around `module`, or `module` itself, and the list of all live optimizers.

    The third value has the numbers of samples of data loaders, each of which gives all its samples in one batch.

    The model must be completely trained: if optimizers have only some of its trainable parameters, it may hold another
    rank's stage. In a process without other ranks, it is enough that optimizers train one of the model's parameters
    outside of `module`, because a parameter may be in no optimizer by mistake. With `of_any`, a model need not be
    trained if no optimizer trains anything. A module thus has the same path on every rank, whether the program calls
    the module or a model around it first. If two outermost models contain the module, `module` itself is returned.
    Transparent wrappers change no path and are skipped.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return module, live_instances(Optimizer), []
    optimizers: list[Optimizer] = []
    trained: set[int] = set()
    holders: dict[int, list[Any]] = {}
    loaders: list[Any] = []
    kind = loaded("torch.utils.data", "DataLoader")
    of_loaders: tuple[type, ...] = () if kind is None else (kind,)
    for item in live_instances(Optimizer, nn.Module, *of_loaders):  # one scan of all objects finds all of them
        if issubclass(type(item), Optimizer):
            optimizers.append(cast(Optimizer, item))
            groups = getattr(item, "param_groups", ())  # the object's __init__ may still be running
            trained |= {id(p) for group in groups for p in group["params"]}
        elif issubclass(type(item), of_loaders):
            loaders.append(item)
        elif not isinstance(item, torch.jit.ScriptModule):
            for child in vars(item).get("_modules", {}).values():
                holders.setdefault(id(child), []).append(item)
    whole_sets = sorted({num for loader in loaders if (num := _whole_set(loader)) is not None})
    if not trained and not of_any:
        return module, optimizers, whole_sets
    others = trained.difference(map(id, module.parameters())) if topology.read().world_size == 1 else set()

    def is_model(holder: nn.Module) -> bool:
        parameters = [id(p) for p in holder.parameters() if p.requires_grad]
        return not trained or trained.issuperset(parameters) or not others.isdisjoint(parameters)

    around, outermost = {id(module): module}, []
    for inner in (waiting := [module]):
        above = [holder for holder in holders.get(id(inner), ()) if is_model(holder)]
        if not above:
            outermost.append(inner)
        for holder in above:
            if id(holder) not in around:
                around[id(holder)] = holder
                waiting.append(holder)
    model = tree.unwrapped(outermost[0])[-1] if len(outermost) == 1 else module
    return module if model is tree.unwrapped(module)[-1] else model, optimizers, whole_sets


def _whole_set(loader: Any) -> int | None:
    """Return the number of samples of a data loader that gives all of them in one batch. None for any other loader.

    No code of the program runs here: its own data sets and samplers are not asked.
    """
    data, its = sys.modules["torch.utils.data"], vars(loader)  # the loader's __init__ may still be running
    dataset, batch_size = its.get("dataset"), its.get("batch_size")
    is_plain = type(loader) is data.DataLoader and type(dataset) is data.TensorDataset
    is_plain = is_plain and type(its.get("batch_sampler")) is data.BatchSampler
    if not is_plain or type(its.get("sampler")) not in (data.SequentialSampler, data.RandomSampler):
        return None
    first = next(iter(dataset.tensors), None)
    num = first.shape[0] if type(first) is torch.Tensor else 0
    return num if isinstance(batch_size, int) and 0 < num <= batch_size else None


def unmatched_rules(rules: Sequence[Rule], model: nn.Module) -> list[str]:
    """Return a sentence for each rule that matches no module of a model, whatever the rule's ranks."""
    selection = RuleSelection(rules, 0)
    nodes = tree.walk(model)
    for node in nodes:
        selection.rule_sets(node.path, node.class_name, node.is_leaf)
    return selection.unmatched([node.path for node in nodes])


def is_only_model(model: nn.Module) -> bool:
    """Return True if no other model can be recorded on any rank. Pipeline stages and GANs have other models."""
    num_ranks = topology.read().world_size
    data_parallel = find_data_parallel(model, wrappers_around(model)) if num_ranks > 1 else None
    if num_ranks > 1 and (data_parallel is None or len(data_parallel["ranks"]) < num_ranks):
        return False
    known = {id(parameter) for parameter in model.parameters()}
    optimizers = live_instances(Optimizer)
    trained = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if not trained or not known.issuperset(trained):
        return False
    modules = live_instances(nn.Module)
    return all(id(p) in known for module in modules for p in module._parameters.values() if p is not None)


_MAX_LIVE_SCANS = 5
"""The most scans of all objects that find no optimizer. Then scanning stops. (0.03 s for 361,000 objects.)"""


class EarlyOptimizers:
    """The optimizers that exist before the first root (a model under hooks). Called on training threads."""

    def __init__(self, events: Events, *, closure_returned: Callable[[Optimizer], None]) -> None:
        """Prepare, without a search yet. An optimizer step before anything was recorded is reported as an event.

        `closure_returned` is called when the closure of an optimizer's step returns. The first recorded call may have
        been in the closure.
        """
        self.has_stepped = False
        self.live: list[Optimizer] = []
        """The optimizers that the last scan has found; empty after `take`."""
        self._events = events
        self._closure_returned = closure_returned
        self._num_scans = 0
        self._pid = os.getpid()
        self._handles: list[Any] = []

    def watch_steps(self) -> None:
        """Put hooks on the steps of all optimizers, until `unwatch_steps`."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._stepped),
        ]

    def unwatch_steps(self) -> None:
        """Remove the hooks. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def hold(self, parameters: Collection[int]) -> bool:
        """Return True if a live optimizer trains a parameter whose `id` is in `parameters`."""
        if not self.live and self._num_scans < _MAX_LIVE_SCANS:
            self._num_scans += 1
            self.live = live_instances(Optimizer)
        return any(id(p) in parameters for o in self.live for group in o.param_groups for p in group["params"])

    def take(self) -> list[Optimizer]:
        """Return the live optimizers. From now on this object holds no reference to them."""
        live, self.live = self.live or live_instances(Optimizer), []
        return live

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrap the closure of a step, because the first forward may run in the closure."""
        if _is_compiling() or os.getpid() != self._pid:
            return None
        return wrap_closure(args, kwargs, lambda: self._closure_returned(optimizer))

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_compiling() or self.has_stepped or not self._handles or os.getpid() != self._pid:
            return
        if all(not group["lr"] for group in optimizer.param_groups):
            return  # this is no training step: torch's `get_state_dict` calls `step` to make the optimizer's state
        self.has_stepped = True  # the hooks stay, because torch is iterating over them, and raises if a hook is removed
        self._events.add(
            "no_root",
            f"not recording: {type(optimizer).__name__} stepped, but no module with its parameters was seen to run "
            "(compiled in place or inside a function, or called through .forward()); recorder.instrument(model) before "
            "it is compiled, or recorder.attach(model) before the first step; a program without a torch.nn.Module "
            "cannot be recorded, not even with recorder.scalar: make its tensors the parameters of a module",
        )
        self._events.say()


def is_data_worker() -> bool:
    """Return True if this process is a worker of a data loader."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None
