"""Knows the optimizers of the process: their names, their parameter groups, and which of them counts the steps.

An optimizer may have no hash, so it is found by its id and a weak reference. Nothing here may keep an optimizer alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim.optimizer import Optimizer

from ...system.processes import loaded
from .update_looks import parameters_of

_A_TRAINING = 10
"""An optimizer that has counted so many updates was a training, and the name is not given to the next optimizer."""


def updating(optimizer: Any) -> Any:
    """Return this rank's optimizer inside torch's ZeroRedundancyOptimizer. Return any other optimizer itself.

    Return None for a ZeroRedundancyOptimizer that has not made its own optimizer yet.
    """
    kind = loaded("torch.distributed.optim", "ZeroRedundancyOptimizer")
    return getattr(optimizer, "optim", None) if kind is not None and isinstance(optimizer, kind) else optimizer


class KnownOptimizers:
    """The optimizers that were seen. Called on training threads."""

    def __init__(self, step_optimizer: str) -> None:
        """Begin without optimizers. `step_optimizer` is the name or class that counts the steps; empty for any."""
        self._step_optimizer = step_optimizer
        self.by_id: dict[int, tuple[weakref.ref[Optimizer], str]] = {}
        """By optimizer id, the optimizer and its name."""
        self._groups: dict[int, tuple[weakref.ref[Optimizer], list[int]]] = {}
        """By optimizer id, the optimizer and the ids of its parameter groups when it had the most groups."""
        self.has_noted_rates = False
        """Whether the manifest has the learning rates of all groups in `_groups`."""
        self.num_named = 0
        self.firsts: dict[int, int] = {}
        """By optimizer id, the id of the first parameter that the optimizer updated in this step."""
        self._counting: Callable[[], Optimizer | None] | None = None
        self.counted = ("", 0)
        """The name of the optimizer that counted the last updates, and the number of these updates."""
        self._made_late: dict[int, weakref.ref[Optimizer]] = {}
        """By id, the optimizers that were made after the first update."""
        self.waiting: int | None = None
        """The id of the first optimizer of `_made_late` that has stepped since the one that counts. Otherwise None."""

    def described(self) -> list[dict[str, str]]:
        """Return the name and the class of every live optimizer that was seen, for the manifest."""
        return [
            {"name": name, "class": type(optimizer).__name__}
            for reference, name in self.by_id.values()
            if (optimizer := reference()) is not None
        ]

    def live(self) -> list[Optimizer]:
        """Return the live optimizers that were seen."""
        return [optimizer for reference, _ in self.by_id.values() if (optimizer := reference()) is not None]

    def hold(self, parameters: set[int]) -> bool:
        """Whether a live optimizer updates a parameter with one of these ids."""
        return any(id(parameter) in parameters for live in self.live() for parameter in parameters_of(live))

    def have_common_parameters(self) -> bool:
        """Return whether two optimizers have a parameter in common: one of them may have the parameters by mistake."""
        parameters = [id(one) for optimizer in self.live() for one in parameters_of(optimizer)]
        return len(parameters) > len(set(parameters))

    def name_of(self, optimizer: Optimizer) -> str:
        """Return an optimizer's name: the class name, with a number if several live optimizers share the class name.

        An optimizer that the program makes anew at each step keeps the name of the previous optimizer. An optimizer
        for another training does not. A ZeroRedundancyOptimizer has the name of the optimizer inside it.
        """
        known = self.by_id.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        self.by_id = {key: known for key, known in self.by_id.items() if known[0]() is not None}
        inside = updating(optimizer)
        for key, (reference, name) in self.by_id.items():
            if updating(reference()) is optimizer:
                return name
            if reference() is inside:
                del self.by_id[key]
                break
        else:
            base, used = type(inside or optimizer).__name__, {name for _, name in self.by_id.values()}
            used |= {self.counted[0]} if self.counted[1] >= _A_TRAINING else set()
            name, i = base, 0
            while name in used:
                i += 1
                name = f"{base}_{i}"
        self.by_id[id(optimizer)] = weakref.ref(optimizer), name
        self.groups_of(optimizer)
        self.firsts.pop(id(optimizer), None)
        self.num_named += 1
        return name

    def groups_of(self, optimizer: Optimizer) -> list[int]:
        """Return the ids of all parameter groups of an optimizer. ZeRO 1 and 2 step with one group at a time."""
        known = self._groups.get(id(optimizer))
        if known is not None and known[0]() is optimizer and len(known[1]) >= len(optimizer.param_groups):
            return known[1]
        self._groups = {key: one for key, one in self._groups.items() if one[0]() is not None}
        self._groups[id(optimizer)] = weakref.ref(optimizer), [id(group) for group in optimizer.param_groups]
        self.has_noted_rates = False
        return self._groups[id(optimizer)][1]

    def numbers_of(self, optimizer: Optimizer) -> Sequence[int]:
        """Return the index of each of an optimizer's present parameter groups among all groups that it has had."""
        groups, ids = optimizer.param_groups, self.groups_of(optimizer)
        if len(groups) == len(ids):
            return range(len(ids))
        return [ids.index(id(group)) if id(group) in ids else i for i, group in enumerate(groups)]

    def made_late(self, optimizer: Optimizer) -> None:
        """Note an optimizer that was made after the first update."""
        self._made_late = {key: one for key, one in list(self._made_late.items()) if one() is not None}
        self._made_late[id(optimizer)] = weakref.ref(optimizer)

    def counts(self, optimizer: Optimizer) -> bool:
        """Whether the steps of an optimizer are the steps of the recording. The first one that may count them does."""
        if self._counting is None or self._counting() is None:  # no optimizer counts the steps now
            wanted = self._step_optimizer
            if wanted and wanted not in (self.name_of(optimizer), type(optimizer).__name__):
                return False
            self._counting = weakref.ref(optimizer)
        return self._counting() is optimizer

    def takes_over(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer counts the steps from now on, while the one that has counted is alive.

        It was made after the first update, and steps for the second time since the optimizer that counts, as in another
        training. Or it is the second one that is made for the parameters of the optimizer that counts, and that steps
        since then: a program may make one for each step, and a schedule may keep the first one alive.
        """
        reference = self._made_late.get(id(optimizer))
        if reference is None or reference() is not optimizer or self._step_optimizer:
            return False
        if self.waiting is None:
            self.waiting = id(optimizer)
            return False
        if self.waiting != id(optimizer):
            counting = None if self._counting is None else self._counting()
            first = None if counting is None else next(parameters_of(counting), None)
            if first is None or next(parameters_of(optimizer), None) is not first:
                return False
        self._counting = weakref.ref(optimizer)
        return True
