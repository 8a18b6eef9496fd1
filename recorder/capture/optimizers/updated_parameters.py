"""Finds, for each tensor that an optimizer may update, the module and the name under which its rows are recorded.

Called on training threads. Nothing here may keep a parameter alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch.optim.optimizer import Optimizer

from ..core import Capture
from ..hooks.parameter_rows import ModuleParameter, ParameterRows
from ..hooks.root import Root
from ..parallel.marks import main_parameter
from .known_optimizers import KnownOptimizers
from .update_looks import parameters_of


class UpdatedParameters:
    """The rows of the tensors that optimizers may update, by the tensors' ids."""

    def __init__(self, capture: Capture, known: KnownOptimizers) -> None:
        self._capture, self._known = capture, known
        self._rows: dict[int, ParameterRows] = {}
        self._unknown: dict[int, weakref.ref[torch.Tensor]] = {}
        self._late: dict[int, weakref.ref[torch.Tensor]] = {}
        """By id, parameters first seen after this step's scan of the modules. The next scan looks for their modules."""
        self.may_learn = True
        """Whether this step has had no scan of the modules yet: all modules are scanned at most once a step."""
        self.has_rescanned = False

    def have_all(self, optimizer: Optimizer) -> bool:
        """Whether every parameter of an optimizer is in a root (a model under hooks)."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                rows = self._rows.get(id(parameter))  # repeats `rows_of`, whose call costs time at every step
                if (rows is None or rows.reference() is not parameter) and self.rows_of(parameter) is None:
                    return False
        return True

    def rows_of(self, parameter: torch.Tensor) -> ParameterRows | None:
        """Return the rows of a tensor that an optimizer updates. Return None if it is in no root."""
        rows = self._rows.get(id(parameter))
        if rows is not None and rows.reference() is parameter:
            return rows
        unknown = self._unknown.get(id(parameter))
        if unknown is not None and unknown() is parameter:
            return None
        if not self.may_learn:  # all modules are scanned at most once a step
            self._late[id(parameter)] = weakref.ref(parameter)
            return None
        self._learn()
        rows = self._rows.get(id(parameter))
        if rows is not None and rows.reference() is parameter:
            return rows
        self._unknown[id(parameter)] = weakref.ref(parameter)
        return None

    def _learn(self) -> None:
        self.may_learn = False
        self._unknown |= self._late  # `rows_of` looks at `_rows` before it looks here
        self._late.clear()
        roots = self._capture.roots
        names = {root.name for root in roots}
        # DDP removes the DTensor parameters of tensor parallel modules when these first run. So rows that are known are
        # kept.
        kept = {key: o for key, o in self._rows.items() if o.root_name in names and id(o.reference()) == key}
        updated = [one for live in self._known.live() for one in parameters_of(live)]
        self._rows = kept | {id(parameter): rows for root in roots for parameter, rows in parameter_rows(root, updated)}

    def rescan(self) -> None:
        """Find the module of every parameter again, because there is a new root (a model under hooks)."""
        self._unknown.clear()
        self._learn()
        self.has_rescanned = False

    def rescan_after_first_step(self) -> None:
        """Look for wrappers at the first step after a new root. The model may have been wrapped after `attach`."""
        self.has_rescanned = True
        for root in self._capture.roots:
            root.parameters.find_wrappers()
        self._unknown.clear()
        self._learn()

    def copied(self) -> list[torch.Tensor]:
        """Return all roots' parameters if the optimizers hold only copies of parameters, otherwise an empty list."""
        is_own_thread = all(root.thread in (None, threading.get_ident()) for root in self._capture.roots)
        if not is_own_thread or self._known.hold(set(self._rows)):
            return []
        return [one for rows in self._rows.values() if (one := rows.reference()) is not None and one.numel()]


def parameter_rows(root: Root, updated: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ParameterRows]]:
    """Yield each tensor that an optimizer may update, with its rows. If a tensor comes twice, the last rows count."""
    for hooked, name, parameter in root.parameters:
        yield parameter, ModuleParameter(parameter, hooked, name)
        main = main_parameter(parameter)
        if main is not None:
            yield main, ModuleParameter(main, hooked, name)
    for flat in (*root.parameters.updated_parts(updated), *root.parameters.flats):
        rows: ParameterRows
        for rows in flat.originals if flat.uses_original else (flat,):
            if (tensor := rows.reference()) is not None:
                yield tensor, rows
