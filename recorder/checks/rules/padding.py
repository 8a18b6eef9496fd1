"""The part of the rule `data` on padding: whether the attention mask and the labels of a model leave it out.

The names of arguments, what a mask means, and the label that the loss ignores are those of Hugging Face's models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ...system.text import number
from ..given import IGNORED, is_of_batch
from ..rows import Flags, Floats, Integers, Rows
from ..rule import Finding, Severity

_NAMES = ("attention_mask", "input_ids", "labels")
_ENOUGH = 3
"""The number of records that must agree, while no record contradicts them."""
_INVERTED = "the mask is inverted: it is 0 where a token stands, and 1 where padding stands"
_INVERT = "the model attends to padding alone: give it 1 for each token, and 0 for padding"
_COUNTED = f"the loss counts padding: the attention mask leaves places out, and no label is {IGNORED}"
_IGNORE = f"set the labels of padding to {IGNORED}; nothing is wrong if the loss leaves padding out by itself"


class Padding:
    """Compares the attention mask of each model with its tokens and its labels, on the lowest rank of the model."""

    def __init__(self, finding: Callable[..., Finding]) -> None:
        """Take the method of the rule that makes its findings."""
        self._finding = finding
        self._ranks: dict[str, int] = {}
        """By model, the lowest rank on which it has such arguments."""
        self._lanes: dict[tuple[str, str], int] = {}
        """By model and name of an argument, its lane (a series on one rank)."""
        self._seen: dict[tuple[str, str], list[tuple[Integers, Flags, Floats]]] = {}
        """By model and finding: the steps of records that tell, whether they agree, and the fraction of padding."""

    def add(self, rows: Rows) -> None:
        """Take rows with statistics."""
        rows = rows.take(rows.where("padding", lambda key: is_of_batch(key) and key.name in _NAMES))
        for lane in np.unique(rows.lanes).tolist():
            key, rank = rows.catalog.key_of(lane), int(rows.catalog.rank_of[lane])
            if self._ranks.setdefault(key.root, rank) == rank:
                self._lanes[key.root, key.name] = lane
        for root in self._ranks:
            self._compare(root, rows)

    def _compare(self, root: str, rows: Rows) -> None:
        mask, tokens, labels = (rows.take(rows.lanes == self._lanes.get((root, name), -1)) for name in _NAMES)
        steps = np.unique(mask.steps)

        def of_steps(some: Rows, column: str) -> Floats:
            """Return the sum of a column over the calls of each step with a mask."""
            own = some.take(np.isin(some.steps, steps))
            return np.bincount(np.searchsorted(steps, own.steps), own[column], len(steps)).astype(np.float64)

        if not len(steps):
            return
        numel, left_out = of_steps(mask, "numel"), of_steps(mask, "zero_count")
        with np.errstate(invalid="ignore"):
            share = left_out / numel
        is_padded = (left_out > 0) & (left_out < numel)
        zeros, are_tokens = of_steps(tokens, "zero_count"), of_steps(tokens, "numel") == numel
        is_right, is_inverted = zeros == left_out, zeros == numel - left_out
        self._note(root, _INVERTED, steps, is_padded & are_tokens & (is_right != is_inverted), is_inverted, share)
        are_ignored = np.isin(steps, labels.steps[labels["min"] < 0])
        are_labels = of_steps(labels, "numel") == numel
        self._note(root, _COUNTED, steps, is_padded & are_labels, ~are_ignored, share)

    def _note(
        self, root: str, what: str, steps: Integers, is_told: Flags, agrees: Flags, share: Floats
    ) -> None:  # fmt: skip
        if is_told.any():
            self._seen.setdefault((root, what), []).append((steps[is_told], agrees[is_told], share[is_told]))

    def finish(self) -> Iterator[Finding]:
        """Yield the findings on which all records agree. An inverted mask stands for both."""
        inverted = set()
        for (root, what), pieces in sorted(self._seen.items(), key=lambda one: one[0][1] != _INVERTED):
            steps, agrees, share = (np.concatenate(some) for some in zip(*pieces, strict=True))
            if len(steps) < _ENOUGH or not agrees.all() or root in inverted:
                continue
            is_inverted = what == _INVERTED
            inverted |= {root} if is_inverted else set()
            lane, severity = self._lanes[root, _NAMES[0 if is_inverted else 2]], Severity(int(is_inverted))
            one = self._finding(lane, int(steps[-1]), what, "", 0.0, 0.0, severity, int(steps[0]))
            part = 1 - float(share.mean()) if is_inverted else float(share.mean())
            yield one._replace(
                detail=f"{number(100 * part)} % of the places are padding", advice=_INVERT if is_inverted else _IGNORE
            )
