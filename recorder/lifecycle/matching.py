"""Finds the model around a module, rules that match nothing in it, and whether these could mean another model.

It looks at all live objects; nothing here may run a module or read a tensor's values.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Container, Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..capture.optimizer import find_live
from ..capture.parallel import topology
from ..capture.parallel.groups import find_data_parallel, wrappers_around
from ..observe import tree
from ..observe.selection import Selection
from ..rules import Rule


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: it would take seconds among the million small objects that 50,000 modules get."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def model_around(module: nn.Module) -> nn.Module:
    """Return the outermost live module that contains a module and is trained as a whole, or the module itself.

    So a module has one path, whether the program calls it or a model around it first, and on every rank. A model whose
    trainable parameters the optimizers hold only in part is not trained as a whole: it may be another rank's stage.
    Where two models share the module, neither counts. Transparent wrappers change no path and are not looked for.
    """
    live = gc.get_objects()
    trained = {
        id(p)
        for optimizer in live
        if issubclass(type(optimizer), Optimizer)
        for group in getattr(optimizer, "param_groups", ())  # its __init__ may have only begun
        for p in group["params"]
    }
    if not trained or isinstance(module, torch.jit.ScriptModule):
        return module
    holders: dict[int, list[nn.Module]] = {}
    for item in live:
        if issubclass(type(item), nn.Module) and not isinstance(item, torch.jit.ScriptModule):
            for child in vars(item).get("_modules", {}).values():
                holders.setdefault(id(child), []).append(item)
    around, outermost = {id(module): module}, []
    for inner in (waiting := [module]):
        above = [holder for holder in holders.get(id(inner), ()) if _is_trained_whole(holder, trained)]
        if not above:
            outermost.append(inner)
        for holder in above:
            if id(holder) not in around:
                around[id(holder)] = holder
                waiting.append(holder)
    if len(outermost) != 1:
        return module
    model = tree.unwrapped(outermost[0])[-1]
    return module if model is tree.unwrapped(module)[-1] else model


def _is_trained_whole(model: nn.Module, trained: Container[int]) -> bool:
    return all(id(p) in trained for p in model.parameters() if p.requires_grad)


def unmatched_rules(rules: Sequence[Rule], model: nn.Module) -> list[str]:
    """Return a sentence for each rule that matches no module of a model, whatever its ranks."""
    selection = Selection(rules, 0)
    nodes = tree.walk(model)
    for node in nodes:
        selection.rule_sets(node.path, node.class_name, node.is_leaf)
    return selection.unmatched([node.path for node in nodes])


def is_only_model(model: nn.Module) -> bool:
    """Whether no other model can become a root on any rank: each rank of a pipeline has its part, and a GAN has two."""
    num_ranks = topology.read().world_size
    data_parallel = find_data_parallel(model, wrappers_around(model)) if num_ranks > 1 else None
    if num_ranks > 1 and (data_parallel is None or len(data_parallel["ranks"]) < num_ranks):
        return False
    known = {id(parameter) for parameter in model.parameters()}
    optimizers = find_live()
    trained = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if not trained or not known.issuperset(trained):
        return False
    live_modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
    return all(id(p) in known for module in live_modules for p in module._parameters.values() if p is not None)
