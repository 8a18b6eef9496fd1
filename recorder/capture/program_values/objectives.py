"""Records the norms and cosines of the gradients that several objectives (terms of the loss) send to one tensor.

Nothing here may raise into training.
"""

from __future__ import annotations

import weakref

import torch

from ...observe.selection import scalar_keep
from ...records import SeenValue, StepPosition, ValuePlace
from ...sites import OBJECTIVE, OBJECTIVE_COSINE, OBJECTIVE_NORM
from ..hooks.callbacks import CaptureForHooks
from ..local_values import UnsupportedKind, plain

_MAX_SHARED = 8
"""The most shared tensors per module and micro-step that get names of their own. All further tensors share one name."""


class SharedTensor:
    """A tensor that several objectives (terms of the loss) share, and the directions of its gradients so far."""

    __slots__ = ("__weakref__", "_arrived", "_keep", "_moment", "_names", "_number", "_origin", "_owner")

    def __init__(self, owner: SharedTensors, origin: ValuePlace, moment: StepPosition, keep: int) -> None:
        self._owner, self._origin, self._moment, self._keep = owner, origin, moment, keep
        self._names: list[str] = []
        self._number = ""
        self._arrived: dict[str, torch.Tensor] = {}
        """By objective, the gradient divided by its norm. Cleared once every objective has a gradient."""

    def add(self, name: str) -> bool:
        """Add an objective by name. Return False if the tensor already has an objective of this name."""
        if name in self._names:
            return False
        self._names.append(name)
        if len(self._names) == 2:
            self._number = self._owner.number(self._moment, self._origin)
        return True

    def gradient(self, name: str, gradient: torch.Tensor | None) -> None:
        """Record the norm of an objective's gradient, and its cosine with each gradient that came before."""
        try:
            self._owner.came_back[name] |= gradient is not None
            if gradient is not None and len(self._names) > 1 and self._owner.is_open:
                with torch.no_grad():
                    self._measure(name, gradient)
        except UnsupportedKind:
            pass
        except Exception as error:
            self._owner.capture.site_failed(self._origin, error)

    def _measure(self, name: str, gradient: torch.Tensor) -> None:
        local, chunk = plain(gradient)
        if chunk is not None or (local.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        flat = local.reshape(-1).to(torch.float64 if local.dtype == torch.float64 else torch.float32)
        norm = torch.linalg.vector_norm(flat)
        unit = flat / norm.clamp_min(1e-30)
        self._record(f"{OBJECTIVE_NORM}{name}", norm)
        for other in self._names:
            if other != name and (known := self._arrived.get(other)) is not None and known.shape == unit.shape:
                pair = sorted((name, other))  # sorted, so that all steps, ranks and runs use one name
                self._record(f"{OBJECTIVE_COSINE}{pair[0]}:{pair[1]}", torch.dot(known, unit))
        self._arrived[name] = unit
        if len(self._arrived) == len(self._names):
            self._arrived.clear()

    def _record(self, name: str, value: torch.Tensor) -> None:
        origin, moment = self._origin._replace(name=name + self._number), self._moment._replace(micro_step=None)
        repeat = self._owner.repeat(moment.step, origin)
        self._owner.capture.observe(SeenValue(origin, moment, "forward", 0, repeat), self._keep, value)


class SharedTensors:
    """Finds the tensors that several objectives (terms of the loss) share. This needs no rule that records taps."""

    def __init__(self, capture: CaptureForHooks) -> None:
        self.capture = capture
        self._shared: weakref.WeakValueDictionary[tuple[object, ...], SharedTensor] = weakref.WeakValueDictionary()
        self._repeats: dict[ValuePlace, int] = {}
        self._num_shared: dict[tuple[ValuePlace, int | None], int] = {}
        """By module and micro-step, the number of tensors so far that several objectives share."""
        self._step = -1
        self.came_back: dict[str, bool] = {}
        """For each objective by name, whether a gradient has come back from it."""

    @property
    def is_open(self) -> bool:
        return self.capture.is_open

    def repeat(self, step: int, origin: ValuePlace) -> int:
        """Count a row of a scalar. Return how often the scalar was recorded before at this step."""
        self._at(step)
        number = self._repeats.get(origin, 0)
        self._repeats[origin] = number + 1
        return number

    def number(self, moment: StepPosition, origin: ValuePlace) -> str:
        """Return the suffix for scalars about a module's next shared tensor: ``#2`` and so on, empty for the first."""
        self._at(moment.step)
        key = origin, moment.micro_step
        self._num_shared[key] = number = min(self._num_shared.get(key, 0) + 1, _MAX_SHARED)
        return f"#{number}" if number > 1 else ""

    def _at(self, step: int) -> None:
        if step != self._step:
            self._step = step
            self._repeats.clear()
            self._num_shared.clear()

    def say_if_unused(self) -> None:
        """Report each objective from which no gradient has come back, if another objective has had a gradient."""
        if any(self.came_back.values()):
            for name in [name for name, has_come in self.came_back.items() if not has_come]:
                text = f"no gradient came back from the objective {name[:50]!r}, so it has no norm and no cosine"
                self.capture.events.add("objective", f"{text}: add its loss to one that has a backward", key=name)

    def shared(
        self, tap: ValuePlace, moment: StepPosition, phase: str, tensor: torch.Tensor, *, is_kept: bool
    ) -> SharedTensor | None:
        """Return a tensor's `SharedTensor`. Return None if the tap is no objective, for a loss, or no rule asks."""
        if not tap.name.startswith(OBJECTIVE) or tensor.numel() < 2:
            return None
        mask = self.capture.masks[self.capture.selection.rule_set_of_name("scalar", OBJECTIVE_COSINE)]
        keep = scalar_keep(mask or int(is_kept))
        try:
            local, chunk = plain(tensor)
        except UnsupportedKind:
            return None
        if not keep or chunk is not None:
            return None
        key = (tap.root, moment.step, moment.micro_step, local.data_ptr(), local.shape)
        known = self._shared.get(key)
        if known is None:
            origin = ValuePlace(tap.root, tap.module_path, "scalar", "")
            known = SharedTensor(self, origin, StepPosition(moment.step, moment.micro_step, "train"), keep)
            self._shared[key] = known
        name = tap.name.removeprefix(OBJECTIVE)
        self.came_back.setdefault(name, False)
        if not known.add(name) and phase == "forward":
            text = f"step {moment.step}: one tensor was given twice to objectives named {name[:50]!r}"
            advice = "call recorder.objective once for each, and let all of its losses read what that returns"
            what = "the norm is a mean of both, and a cosine is of one alone"
            self.capture.events.add("objective", f"{text}: {what}; {advice}", key=f"{name}:twice")
        return known
