"""The roots (models under hooks) of a recording: which model becomes one, under which name, and in whose place."""

from __future__ import annotations

import itertools

from torch import nn

from ..observe import tree
from ..sites import OF_PARAMETERS
from .hooks.callbacks import CaptureForHooks
from .hooks.root import Root
from .nonfinite import FirstNonFinite
from .staging.pool import HostMemory


class Roots(list[Root]):
    """The roots under hooks now. Changed on training threads."""

    def __init__(self, capture: CaptureForHooks, nonfinite: FirstNonFinite, memory: HostMemory) -> None:
        super().__init__()
        self._capture, self._nonfinite, self._memory = capture, nonfinite, memory
        self.past: list[Root] = []
        """The roots whose hooks were removed. The manifest keeps their descriptions."""

    def add(self, module: nn.Module, name: str | None) -> Root:
        """Put hooks on a model, which may contain roots (models under hooks) already.

        If the model wraps a root, as DDP does, and leaves the paths of modules unchanged, the new root replaces that
        root and takes the name. Every other root stays. The new root leaves out modules that are in another root,
        unless the model itself lies inside another root.
        """
        for gone in [root for root in self if root.module() is None]:
            self.end(gone)
        inside, wrapped = {id(m) for m in module.modules()}, tree.unwrapped(module)[-1]
        contained = {root: inner for root in self if (inner := root.module()) is not None and id(inner) in inside}
        taken = next((root for root, inner in contained.items() if tree.unwrapped(inner)[-1] is wrapped), None)
        if taken is not None:
            self.end(taken)
            self.past.remove(taken)
        if name is None:
            name = taken.name if taken is not None else self._free_name()
        others = (*self, *self.past)
        earlier = taken or next((root for root in others if root.name == name), None)
        is_part = self.root_of(wrapped) is not None
        root = Root(
            self._capture, module, name, clock=earlier.clock if earlier is not None else None,
            is_elsewhere=lambda own, inner: not is_part and self._is_elsewhere(own, inner),
            inner_roots=[root for root in contained if root is not taken],
        )  # fmt: skip
        if taken is not None:
            root.go_on_from(taken)
        self.append(root)
        self._nonfinite.has_models = len({one.name for one in (*others, root)}) > 1
        if self._capture.selection.asks_for(*OF_PARAMETERS):
            self._memory.say_if_too_large(module.named_parameters())
        return root

    def renew_grown(self) -> bool:
        """Put hooks on modules that were added to a model after its first call. Return whether there were any."""
        grown = [root for root in self if root.has_grown()]
        for root in grown:
            root.renew()
        return bool(grown)

    def end(self, root: Root) -> None:
        """Remove the hooks of a root (a model under hooks). The manifest keeps the root's description."""
        root.remove()
        self.remove(root)
        self.past.append(root)

    def _free_name(self) -> str:
        used = {root.name for root in self + self.past}
        return next(n for i in itertools.count() if (n := f"model_{i}" if i else "model") not in used)

    def root_of(self, module: nn.Module) -> Root | None:
        """Return the root (a model under hooks) that contains a module. Return None if no root contains it."""
        return next((root for root in self if root.path_of(module) is not None), None)

    def _is_elsewhere(self, root: Root, module: nn.Module) -> bool:
        return any(other is not root and other.path_of(module) is not None for other in self)
