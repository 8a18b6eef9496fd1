"""What a model was given in its last calls in training: tokens, and whether its first argument was given before.

Nothing here may read a tensor's values.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch

from ...sites import is_labels

SHIFT_STEPS = 3
"""At so many first steps, labels are compared with the tokens of the model's first argument."""
_MOST_GIVEN = 4
"""The most tensors that a model is given by turns where they are told from tensors that are new at each call."""


class GivenArguments:
    """The arguments of one model. Only its tokens of the first steps are kept alive, until its next call."""

    __slots__ = ("_before", "first", "since", "times", "tokens")

    def __init__(self) -> None:
        self.first: Callable[[], torch.Tensor | None] = lambda: None
        """A weak reference to the first tensor of the last call."""
        self.tokens: dict[str, torch.Tensor] = {}
        """By name, the arguments of the last call with rows of whole numbers, if it was at the first steps."""
        self._before: tuple[tuple[Callable[[], torch.Tensor | None], tuple[int, torch.Size] | None], ...] = ()
        """The last first arguments that were new: each tensor, or the one that it is a view of and its place there."""
        self.times, self.since = 0, 0
        """For how many calls, in a row, the first argument has been one of a few tensors, and since which step."""

    def note(self, leaves: list[tuple[str, torch.Tensor]], step: int) -> None:
        """Take the tensors of a call that begins, by name."""
        self.tokens = {}
        if step < SHIFT_STEPS:
            tokens = ((name, tensor) for name, tensor in leaves if _are_tokens(tensor))
            self.tokens = dict(itertools.islice(tokens, _MOST_GIVEN))
        if not leaves:
            return
        tensor = leaves[0][1]
        self.first = weakref.ref(tensor)
        # The slices of one tensor, which a program makes anew for each call, are one tensor if their elements are.
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
        base = tensor._base if is_plain else None
        owner, place = (tensor, None) if base is None else (base, (int(tensor.storage_offset()), tensor.shape))
        if any(known() is owner and at == place for known, at in self._before):
            self.times += 1
        else:
            self.times, self.since = 1, step
            self._before = (*self._before[1 - _MOST_GIVEN :], (weakref.ref(owner), place))

    def forget_labels(self, output: torch.Tensor) -> None:
        """Forget the tokens that may be the labels of `output`, a loss or one for each token."""
        if self.tokens:
            self.tokens = {
                name: tensor
                for name, tensor in self.tokens.items()
                if not is_labels(name) or (output.dim() and output.numel() != tensor.numel())
            }


def _are_tokens(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32)
