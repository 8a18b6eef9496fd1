"""Finds rules that match nothing in a model, and tells whether they could mean another model of the process.

It looks at all live objects; nothing here may run a module or read a tensor's values.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence

from torch import nn

from ..capture.optimizer.hooks import find_live
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
