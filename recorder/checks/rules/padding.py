"""The part of the rule `data` on padding: whether the attention mask and the labels of a model leave it out.

The names of arguments, what a mask means, and the label that the loss ignores are those of Hugging Face's models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ...system.text import number
from ..given import IGNORED, is_of_batch
from ..rows import Catalog, Flags, Floats, Integers, Rows, SeriesKey
from ..rule import Finding, Severity

_MASK, _TOKENS, _LABELS = _NAMES = "attention_mask", "input_ids", "labels"
_ENOUGH = 3
"""The number of records that must agree, while no record contradicts them."""
_INVERTED = "the mask is 0 where a token stands, and 1 where padding stands"
_IS_INVERTED = "the mask is inverted: it is"
_INVERT = "give the mask 1 for each token, and 0 for padding"
_OTHER_MEANING = "; nothing is wrong if the model takes 1 for padding, as nn.MultiheadAttention does"
_COUNTED = f"the attention mask leaves out more places than labels are {IGNORED}, so that the loss may count padding"
_IGNORE = f"set the labels of padding to {IGNORED}; nothing is wrong if the loss leaves padding out by itself"
_OF_LIBRARY = re.compile("For[A-Z]|LMHead")
"""What the names of Hugging Face's models have, in which 1 in a mask stands for a token."""


@dataclass(eq=False, slots=True)
class _Seen:
    """The records of a model that tell of one finding."""

    first: int
    last: int = 0
    num: int = 0
    share: float = 0.0
    """The sum of the fractions of zeros in the masks."""
    all_agree: bool = True


class Padding:
    """Compares the attention mask of each model with its tokens and its labels, on the first rank that has them."""

    def __init__(self, catalog: Catalog, finding: Callable[..., Finding]) -> None:
        """Take the catalog of the rule, and the method that makes its findings."""
        self._catalog, self._finding = catalog, finding
        self._ranks: dict[str, int] = {}
        """By model, the rank that is judged."""
        self._lanes: dict[tuple[str, str], int] = {}
        """By model and name of an argument, its lane (a series on one rank)."""
        self._seen: dict[tuple[str, str], _Seen] = {}
        """By model and finding."""

    def add(self, rows: Rows) -> None:
        """Take rows with statistics."""
        rows = rows.take(rows.where("padding", lambda key: is_of_batch(key) and _argument(key) in _NAMES))
        for lane in np.unique(rows.lanes).tolist():
            key, rank = self._catalog.key_of(lane), int(self._catalog.rank_of[lane])
            if self._ranks.setdefault(key.root, rank) == rank:
                self._lanes[key.root, _argument(key)] = lane
        for root in self._ranks if len(rows) else ():
            self._compare(root, rows)

    def _compare(self, root: str, rows: Rows) -> None:
        mask, tokens, labels = (rows.take(rows.lanes == self._lanes.get((root, name), -1)) for name in _NAMES)
        steps = np.unique(mask.steps)
        if not len(steps):
            return

        def of_steps(some: Rows, column: str) -> Floats:
            """Return the sum of a column over the calls of each step with a mask."""
            own = some.take(np.isin(some.steps, steps))
            return np.bincount(np.searchsorted(steps, own.steps), own[column], len(steps)).astype(np.float64)

        numel, left_out = of_steps(mask, "numel"), of_steps(mask, "zero_count")
        num_ones = numel - left_out
        # All elements that are not 0 are 1. The sums of whole numbers and of booleans are rounded, too.
        is_padded = (left_out > 0) & (num_ones > 0)
        is_padded &= np.isclose(of_steps(mask, "sum"), num_ones) & np.isclose(of_steps(mask, "sum_sq"), num_ones)
        share = left_out / np.maximum(numel, 1)
        zeros, are_tokens = of_steps(tokens, "zero_count"), of_steps(tokens, "numel") == numel
        is_right, is_inverted = zeros == left_out, zeros == num_ones
        self._note(root, _INVERTED, steps, is_padded & are_tokens & (is_right != is_inverted), is_inverted, share)
        if self._are_of_mask(root):
            # Of labels below zero, there are at most as many as the sum of squares allows.
            may_ignore = np.isin(steps, labels.steps[~(labels["min"] >= 0)])
            most_ignored = np.where(may_ignore, of_steps(labels, "sum_sq") / IGNORED**2, 0)
            is_told = is_padded & (of_steps(labels, "numel") == numel)
            self._note(root, _COUNTED, steps, is_told, most_ignored < left_out, share)

    def _are_of_mask(self, root: str) -> bool:
        """Return whether the labels are those of the tokens that the mask is of, and may be `IGNORED`.

        The mask of an encoder leaves out nothing of what a decoder makes.
        """
        lanes = [self._lanes.get((root, name)) for name in (_MASK, _LABELS)]
        if None in lanes:
            return False
        mask, labels = (self._catalog.about_of(lane) for lane in lanes if lane is not None)
        paths = {part for of, path in self._catalog.modules if of == root for part in path.split(".")}
        return labels.dtype in ("int64", "int32") and mask.shape == labels.shape and not {"encoder", "decoder"} <= paths

    def _note(self, root: str, what: str, steps: Integers, is_told: Flags, agrees: Flags, share: Floats) -> None:
        if is_told.any():
            steps = steps[is_told]
            seen = self._seen.setdefault((root, what), _Seen(int(steps[0])))
            seen.last, seen.num, seen.share = int(steps[-1]), seen.num + len(steps), seen.share + share[is_told].sum()
            seen.all_agree &= bool(agrees[is_told].all())

    def finish(self) -> Iterator[Finding]:
        """Yield the findings on which all records agree. An inverted mask stands for both."""
        for root in self._ranks:
            if one := self._found(root, _INVERTED, _MASK):
                module = self._catalog.modules.get((root, ""))
                is_sure = module is not None and _OF_LIBRARY.search(module.class_name)
                if is_sure:
                    what = one.what.replace("the mask is", _IS_INVERTED)
                    yield one._replace(severity=Severity.WARNING, what=what, advice=_INVERT)
                else:
                    yield one._replace(severity=Severity.NOTE, advice=_INVERT + _OTHER_MEANING)
            elif one := self._found(root, _COUNTED, _LABELS):
                yield one._replace(severity=Severity.NOTE, advice=_IGNORE)

    def _found(self, root: str, what: str, name: str) -> Finding | None:
        seen = self._seen.get((root, what))
        if seen is None or seen.num < _ENOUGH or not seen.all_agree:
            return None
        share = seen.share / seen.num
        part = number(100 * (1 - share if what == _INVERTED else share))
        one = self._finding(self._lanes[root, name], seen.last, what, "", 0.0, 0.0, since=seen.first)
        return one._replace(detail=f"{part} % of the places are padding")


def _argument(key: SeriesKey) -> str:
    """Return the name of an argument. A model may take a dict with its arguments."""
    return key.name.rpartition(".")[2]
