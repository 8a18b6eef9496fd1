"""Records the parameters and gradients of one optimizer with one call, where the probe can measure each of them.

Called on training threads. Nothing here may keep a parameter alive.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from ...observe.selection import NOTHING
from ...records import KEEP_PROBE, KEEP_TOKENS, StepPosition
from ..core import Capture
from ..local_values import PLAIN, are_plain
from ..probe.probe import Probe
from ..probe.probed_groups import ProbedGroup
from .updates import Updates

_MAX_PROBED = 64
_gradient = operator.attrgetter("grad")


class _GroupKey(NamedTuple):
    """The key of a group of parameters and gradients that can be recorded with one call."""

    whose: Hashable
    """The id of each parameter, and whether the gradient of the parameter is None."""
    note: str | None
    masks: tuple[int, ...]
    """For each rule set, what to keep at the step, as bits of KEEP_*."""


class _Probed(NamedTuple):
    """The values of one optimizer that the probe can measure together."""

    optimizer: weakref.ref[Optimizer]
    groups: dict[_GroupKey, ProbedGroup | None]
    """The groups of values that the probe measures with one call. None if the values must be measured one by one."""
    updates: Updates


class ProbedOptimizers:
    """What the probe knows of each optimizer: the groups of values that it can measure with one call."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._probed: dict[int, _Probed] = {}
        """By optimizer id, what the probe knows of the optimizer, which may have no hash and so cannot be a key."""
        self.measured_whole = 0
        """The id of the optimizer of the step under way if every parameter of it was measured with one call, else 0."""

    def clear(self) -> None:
        """Forget all optimizers, because there is a new root (a model under hooks)."""
        self._probed.clear()

    def end_update(self, optimizer: Optimizer) -> None:
        """Measure how far the update that ends has moved the parameters of a known optimizer."""
        probed = self._probed.get(id(optimizer))
        if probed is not None:
            probed.updates.end(StepPosition(self._capture.clock.step, None, "train"))

    @contextlib.contextmanager
    def known(
        self, optimizer: Optimizer, parameters: list[torch.Tensor], note: str | None, moment: StepPosition,
        repeats: dict[int, int],
    ) -> Iterator[bool]:  # fmt: skip
        """Try to record parameters and gradients with one call, and yield whether they are recorded.

        If they are not, the `with` block must record them one by one, and the probe learns them as a group. A later
        step records the group with one call, if the probe can then measure each value of the group.
        """
        capture = self._capture
        probe, selection = capture.probe, capture.selection
        if probe is None or not parameters or capture.masks is not selection.masks:
            yield False
            return
        gradients = list(map(_gradient, parameters))
        whose = tuple(map(id, parameters)), tuple(map(operator.is_, gradients, itertools.repeat(None)))
        masks = selection.masks_of_first_call()
        groups, updates = self._probed_of(optimizer, probe)
        key = _GroupKey(whose, note, masks)
        locals_ = list(itertools.chain.from_iterable(zip(parameters, gradients, strict=True)))
        if not are_plain(locals_):
            locals_ = [
                one if type(one) in PLAIN else getattr(one, "_local_tensor", one) for one in locals_ if one is not None
            ]
        tensors = list(filter(torch.Tensor.numel, locals_))  # the probe skips tensors without local elements
        if key not in groups and (group := self._with_other_masks(key, groups)) is not None:
            groups[key] = group
        group = groups.get(key)
        at = None if group is None else group.addresses(tensors)
        if group is not None and at is not None:
            is_known = False
            if group.may_record(tensors) and (len(tensors) == len(locals_) or not any(group.keeps)):
                is_known = probe.saw_group(group, tensors, at, moment)
            if is_known:
                self.measured_whole = id(optimizer)
                counts = next_repeats(repeats, parameters, len(locals_))
                if any(group.keeps):
                    capture.observe_known(group, tensors, counts, moment)
            updates.begin(group, tensors, at)
            yield is_known
            return
        with probe.learning() as seen:
            yield False
        if key not in groups:
            if len(groups) >= _MAX_PROBED:
                groups.clear()
            groups[key] = probe.group(seen, tensors, groups.values())
        # An update is measured where rules probe gradients, too.
        is_whole = all(whose[1]) or any(one.value.origin.site == "grad" for one in seen)
        updates.begin_alone(seen if is_whole else (), tensors)

    def _with_other_masks(self, key: _GroupKey, groups: dict[_GroupKey, ProbedGroup | None]) -> ProbedGroup | None:
        """Return a group of the same values that was learned under other masks, with this step's keep bits.

        Return None if there is no such group, or if the probe does not measure each of its values at this step.
        """
        rule_set_of = self._capture.selection.rule_set_of
        for (whose, note, masks), group in groups.items():
            if group is not None and (whose, note, len(masks)) == (key.whose, key.note, len(key.masks)):
                keeps = [key.masks[rule_set_of.get(value.origin, NOTHING)] for value in group.values]
                if all(keep & KEEP_PROBE for keep in keeps):
                    return group._replace(keeps=[keep & ~(KEEP_PROBE | KEEP_TOKENS) for keep in keeps])
        return None

    def _probed_of(self, optimizer: Optimizer, probe: Probe) -> tuple[dict[_GroupKey, ProbedGroup | None], Updates]:
        known = self._probed.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            self._probed = {key: one for key, one in self._probed.items() if one.optimizer() is not None}
            known = self._probed[id(optimizer)] = _Probed(weakref.ref(optimizer), {}, Updates(probe))
        return known.groups, known.updates


def next_repeat(repeats: dict[int, int], parameter: torch.Tensor) -> int:
    """Count a row of a parameter. Return its index among the rows of the step that have an otherwise equal key."""
    repeats[id(parameter)] = repeat = repeats.get(id(parameter), -1) + 1
    return repeat


def next_repeats(repeats: dict[int, int], parameters: Sequence[torch.Tensor], num_values: int) -> Sequence[int]:
    """Return the next `repeat` for each of `num_values` values: each parameter, and its gradient if there is one."""
    first = dict.fromkeys(map(id, parameters), 0)
    if not repeats and len(first) == len(parameters):  # nearly always true; the loop below is slow
        repeats |= first
        return [0] * num_values
    each = ((next_repeat(repeats, parameter), parameter.grad) for parameter in parameters)
    return [repeat for repeat, gradient in each for _ in range(1 if gradient is None else 2)]
