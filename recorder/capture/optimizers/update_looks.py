"""Looks, at some updates, at what the program does with its models: modes, gradients, and what optimizers have.

Called on training threads, before an optimizer's step and before a backward. Nothing here may wait for a device.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from ...taps.graphs import is_traced
from ..core import Capture
from ..hooks.training_notes import Optimized

IDLE_UPDATES = 2
"""After so many updates of an optimizer without a gradient, models to record are searched again."""
_EARLY_LOOKS = (1, 2, 4, 8)
_LOOK_EVERY = 16
"""The number of steps between two looks. The steps in `_EARLY_LOOKS` are looked at, too."""
_FEW_BACKWARDS, _MANY_BACKWARDS = 16, 64
"""After how many backwards without an update some parameters are watched, and from how many on an update is missed."""
_MANY_ANEW = 16
"""So many updates in a row, each by an optimizer that has never stepped before, are no chance."""
_MOST_UNMOVED, _FIRST_ELEMENTS = 16, 64
_LONG = 128
"""An optimizer may wait for so many updates of another one before it steps, as in the warm-up of an adversary."""
_SMALL = 4096
"""A gradient with more elements than this is not compared with the same gradient at the next update."""
_ALIKE = 0.9
"""The cosine above which two gradients look alike. Adding a gradient to a sum hardly turns the sum."""
_LEAST_ADDED = 0.1
"""The least norm of what a backward has added to a gradient, as a fraction of the norm of the gradient before."""


class LastGradient(NamedTuple):
    """A copy of a gradient with few elements, made at an update and compared with the gradient at the next update."""

    parameter: weakref.ref[torch.Tensor]
    gradient: weakref.ref[torch.Tensor]
    values: torch.Tensor
    next_version: int
    """The gradient's version counter after one more backward, if nothing else changes the gradient."""
    version: int
    """The gradient's version counter at the update."""
    thread: int
    """The thread of the update. No other thread may read the gradient, since a backward may be setting it."""
    has_stood: bool | None = None
    """Whether the gradient was there, and not zero, before each backward since the update; None without a backward."""

    @classmethod
    def of(cls, parameters: Iterator[torch.Tensor], *, in_ddp: bool) -> LastGradient | None:
        """Copy the first gradient that has few elements and lies in host memory. Return None if there is none.

        Args:
            parameters: the parameters of one optimizer.
            in_ddp: whether DDP averages the gradients, and copies the average into the gradient after each backward.
        """
        for parameter in parameters:
            gradient = parameter.grad
            if type(gradient) is not torch.Tensor or not gradient.is_cpu or gradient.is_sparse:
                continue
            if in_ddp and gradient._is_view():
                continue  # the version is that of DDP's bucket, which every gradient in the bucket counts up
            if 1 < gradient.numel() <= _SMALL:
                version, values = gradient._version, gradient.detach().clone()
                references = weakref.ref(parameter), weakref.ref(gradient)
                return cls(*references, values, version + (2 if in_ddp else 1), version, threading.get_ident())
        return None

    def after_other_step(self) -> LastGradient:
        """Return the gradient as it is now if one backward was added to it, else itself."""
        now = self.gradient()
        if now is None or now._version != self.next_version or not now.any():
            return self
        return self._replace(values=now.detach().clone(), next_version=self.next_version + 1)

    def before_backward(self) -> LastGradient:
        """Return this, with whether the gradient still stands as a backward begins. Called on any thread."""
        if self.thread != threading.get_ident() or self.has_stood is False:
            return self
        parameter, now = self.parameter(), self.gradient()
        stands = parameter is not None and now is not None and parameter.grad is now and bool(now.any())
        return self._replace(has_stood=stands)

    @property
    def has_stood_through(self) -> bool:
        """Whether the gradient stood before each backward since the update, and was changed by one, or by a clip.

        This does not hold for the gradient of a copy of a parameter, to which programs copy the parameter's gradient.
        """
        now = self.gradient()
        return self.has_stood is True and now is not None and now._version > self.version

    def stands_uncleared(self) -> bool:
        """Whether one backward was added to the gradient since the last update, and nothing else changed the gradient.

        A gradient that was set to zero in place has another version. A gradient that was set to zero without autograd's
        notice does not look like the last gradient any more. If the batch is the same, it is about equal to the last
        and not longer.
        """
        now = self.gradient()
        if now is None or now._version != self.next_version:
            return False
        present, last = now.detach().flatten(), self.values.flatten()
        added = present - last
        is_longer = torch.dot(added, last) >= 0 and added.norm() >= _LEAST_ADDED * last.norm()
        return bool(is_longer and torch.cosine_similarity(present, last, dim=0) > _ALIKE)


def _keeps_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps a tensor as large as a parameter, such as a moment, for the next update."""
    states = [(one, state) for one, state in optimizer.state.items() if isinstance(state, dict)]
    return any(
        isinstance(value, torch.Tensor) and value.numel() == one.numel() > 1
        for one, state in states[:1]
        for value in state.values()
    )


def _may_be_kept(parameter: torch.Tensor) -> bool:
    """Whether elements of a parameter may be copied now. A copy must not become part of a graph that is captured."""
    is_plain = type(parameter) is torch.nn.Parameter and parameter.requires_grad and parameter.numel() > 0
    return is_plain and not (parameter.is_cuda and torch.cuda.is_current_stream_capturing())


def _first_elements(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().reshape(-1)[:_FIRST_ELEMENTS]


def _bytes_of(parameter: torch.Tensor) -> bytes:
    """Return the first bytes of a parameter in host memory. Return no bytes if it is elsewhere or freed."""
    num = min(parameter.numel(), _FIRST_ELEMENTS) * parameter.itemsize
    is_there = parameter.is_cpu and parameter.untyped_storage().size() >= num and parameter.is_contiguous()
    return ctypes.string_at(parameter.data_ptr(), num) if is_there and not parameter.storage_offset() else b""


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Return the parameters of an optimizer, group by group."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class UpdateLooks:
    """Looks at updates, and notes in the inventories of the models what is wrong with the program."""

    def __init__(self, capture: Capture, holds: Callable[[set[int]], bool]) -> None:
        """Begin without an update. `holds` says whether a live optimizer has a parameter with one of some ids."""
        self._capture = capture
        self._holds = holds
        self._is_looking = False
        """Whether the step under way is one at which to look."""
        self._updates_without: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        """By optimizer id, the optimizer, and how many updates it has made since the last one with a gradient."""
        self._last_gradients: dict[int, LastGradient] = {}
        """By optimizer id, a gradient at the optimizer's last step, if that step was looked at."""
        self._num_backwards = 0
        """How many backwards there were before the first update."""
        self._unmoved: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        """Some parameters, with their first elements, if there were many backwards before the first update."""
        self._last_looks: list[tuple[int, bytes]] = []
        """Of these parameters, the version counters and the first bytes, as the last backward began or a step began."""
        self._first_seen: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        """By optimizer id, the optimizer, and the number of updates at the first look that saw it."""
        self._num_anew = 0
        """How many of the last updates were made by optimizers that had never stepped with a gradient before."""
        self._is_anew = False
        """Whether the inventories say that optimizers are made anew for each update."""
        self._evaluated: set[str] = set()
        """The roots that were in evaluation mode at an update."""

    def at_gradients(self, optimizer: Optimizer) -> None:
        """Count the updates that an optimizer makes without any gradient since it had some."""
        num = self.num_idle(optimizer)
        if num is None:  # a new optimizer: the program may make one at each step
            self._updates_without = {key: one for key, one in self._updates_without.items() if one[0]() is not None}
        if any(parameter.grad is not None for parameter in parameters_of(optimizer)):
            self._updates_without[id(optimizer)] = weakref.ref(optimizer), 0
            self._num_anew = self._num_anew + 1 if num is None else 0
        elif num is not None:
            self._updates_without[id(optimizer)] = weakref.ref(optimizer), num + 1

    def num_idle(self, optimizer: Optimizer) -> int | None:
        """Return the number of updates of an optimizer without a gradient since it had some. None if it had none."""
        reference, num = self._updates_without.get(id(optimizer), (None, 0))
        return num if reference is not None and reference() is optimizer else None

    def backward_begins(self) -> None:
        """Look whether the gradients of the last updates still stand. Called on the thread of the backward."""
        if not self._capture.clock.num_optimizer_steps:
            self._num_backwards += 1
            if self._num_backwards == _FEW_BACKWARDS:
                parameters = [one for root in self._capture.roots for _, _, one in root.parameters]
                some = list(filter(_may_be_kept, parameters))
                some = [*some[: _MOST_UNMOVED // 2], *some[_MOST_UNMOVED // 2 :][-_MOST_UNMOVED // 2 :]]
                self._unmoved = [(weakref.ref(one), _first_elements(one).clone()) for one in some]
                if not self._holds(set(map(id, parameters))):
                    self._capture.before_forward = self._look_for_update_by_hand
            if self._capture.before_forward is not None:  # what a forward changes, as `max_norm` does, is no update
                self._last_looks = self._looks_now()
        if self._last_gradients:
            self._last_gradients = {key: one.before_backward() for key, one in list(self._last_gradients.items())}

    def _look_for_update_by_hand(self) -> None:
        """Let a forward begin a step if the program has changed the parameters since the last backward began."""
        if is_traced():
            return
        clock = self._capture.clock
        try:
            looks = self._looks_now()
        except Exception as error:  # the forward has its step in any case
            self._capture.before_forward = None
            self._capture.hook_failed("the parameters", error)
            return
        if clock.num_optimizer_steps or self._holds(set(map(id, self._watched()))):
            self._capture.before_forward = None
        elif looks != self._last_looks:
            self._last_looks = looks
            clock.updated_by_hand()

    def _looks_now(self) -> list[tuple[int, bytes]]:
        """Return what an update changes. No operation of torch is called: the program may trace them or count them."""
        with torch._C.DisableTorchFunction():
            return [(one._version, _bytes_of(one)) for one in self._watched()]

    def _watched(self) -> list[torch.Tensor]:
        return [one for reference, _ in self._unmoved if (one := reference()) is not None]

    def are_unmoved(self) -> bool:
        """Whether parameters with many backwards have never changed, by any kind of update. May wait for a device."""
        known = [(one, values) for reference, values in self._unmoved if (one := reference()) is not None]
        is_same = all(torch.equal(_first_elements(one), values) for one, values in known)
        return self._num_backwards >= _MANY_BACKWARDS and bool(known) and is_same

    def after_update(self, optimizer: Optimizer) -> None:
        """Note if optimizers that keep state, such as moments, are made anew for each update."""
        is_anew = self._num_anew >= _MANY_ANEW and (self._is_anew or _keeps_state(optimizer))
        if is_anew != self._is_anew:
            self._is_anew = is_anew
            for root in self._capture.roots:
                since = self._capture.clock.step if is_anew else None  # None: they are not made anew any more
                root.notes.note(optimizer_anew=type(optimizer).__name__, optimizer_anew_since=since)

    def before_update(self, optimizer: Optimizer, *, is_counting: bool, live: Callable[[], list[Optimizer]]) -> None:
        """At some steps, note parameters without an optimizer, modules in evaluation mode, and uncleared gradients.

        Args:
            optimizer: the optimizer that is about to step.
            is_counting: whether its steps are the steps of the recording.
            live: gives all optimizers that there are.
        """
        capture, last = self._capture, self._last_gradients.pop(id(optimizer), None)
        is_copied = last is not None and last.has_stood is not False and last.stands_uncleared()
        if last is not None and (is_copied or last.has_stood_through):
            for root in capture.roots:
                root.notes.note_uncleared(last.parameter(), capture.clock.step, is_copied)
        self._last_gradients = {key: one.after_other_step() for key, one in list(self._last_gradients.items())}
        if is_counting:
            num, roots = capture.clock.num_optimizer_steps, [root for root in capture.roots if root.clock.is_trained]
            evaluated = {root.name for root in roots if not root.is_training}
            self._is_looking = num in _EARLY_LOOKS or num % _LOOK_EVERY == 0 or not evaluated <= self._evaluated
            self._evaluated |= evaluated
        if self._is_looking:
            in_ddp = all((root.work.data_parallel or {}).get("kind") == "ddp" for root in capture.roots)
            if gradient := LastGradient.of(parameters_of(optimizer), in_ddp=in_ddp):
                self._last_gradients[id(optimizer)] = gradient
            if is_counting:
                self._look_at_models(optimizer, live(), num)

    def _look_at_models(self, optimizer: Optimizer, live: list[Optimizer], num_updates: int) -> None:
        capture, before = self._capture, self._first_seen
        self._first_seen = {}
        for one in live:
            reference, first = before.get(id(one), (None, 0))
            is_known = reference is not None and reference() is one
            self._first_seen[id(one)] = weakref.ref(one), first if is_known else num_updates
        is_early = [num_updates - first < _LONG for _, first in self._first_seen.values()]
        updates = [(self.num_idle(one), {id(parameter) for parameter in parameters_of(one)}) for one in live]
        # After some updates, an optimizer that has not stepped with a gradient yet does not count. Programs that make
        # an optimizer anew for each update, or for a few, always have one that has not stepped.
        without = {id(parameter) for parameter in parameters_of(optimizer) if parameter.grad is None}
        fed = set[int]().union(*(ids for idle, ids in updates if idle is not None)) - without
        trained = set[int]().union(
            *(ids for (idle, ids), early in zip(updates, is_early, strict=True) if idle is not None or early)
        )
        unstepped = set[int]().union(*(ids for _, ids in updates)) - trained
        idle = set[int]().union(*(ids for idle, ids in updates if (idle or 0) >= IDLE_UPDATES))
        of_roots = [(root, {id(parameter) for _, _, parameter in root.parameters}) for root in capture.roots]
        own = set[int]().union(*(ids for _, ids in of_roots))
        of_stepping = [ids for idle, ids in updates if idle is not None]
        common = {one for one, num in Counter(itertools.chain(*of_stepping)).items() if num > 1}
        optimized = Optimized(trained, fed - idle, unstepped, has_copies=not fed <= own)
        last_common, last_trained = (
            max((root.last_call for root, ids in of_roots if not ids.isdisjoint(some)), default=0)
            for some in (common, trained)
        )
        for root, ids in of_roots:
            # A thread that reads `.grad` while another thread's backward sets it corrupts the process's memory.
            if root.thread in (None, threading.get_ident()):
                is_before = 0 < root.last_call < last_common
                feeds_trained = ids.isdisjoint(trained) and 0 < root.last_call < last_trained
                root.notes.look_at_update(
                    optimized, capture.clock.step, root.clock.is_trained, is_before, feeds_trained
                )
