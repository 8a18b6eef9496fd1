"""How the parameters of a root (a model under hooks) are sharded, and with which ranks the root shares its work.

Nothing here may raise into training, keep a model alive, or read a tensor's values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from ...observe.clock import Slice
from ...sites import full_name
from ...system.processes import comes_from_signal_handler
from ..local_values import mesh_of
from ..parallel.groups import (
    EXPERT,
    DataParallel,
    ModelParallel,
    Pipeline,
    find_data_parallel,
    find_model_parallel,
    find_rank_local,
    wrappers_around,
)
from ..parallel.marks import marked_model_parallel, marked_ranks
from ..parallel.topology import is_distributed
from .callbacks import CaptureForHooks
from .module import HookedModule
from .module_facts import ids_of
from .parameter_rows import (
    FlatParameter,
    FsdpParameter,
    find_flat_parameters,
    find_megatron_parts,
    find_zero_parameters,
    meshes_of_flat,
)

_Flat = TypeVar("_Flat", bound=FlatParameter)


class RootParameters:
    """The parameters of a root, and the flat tensors that have their place in sharded training."""

    def __init__(
        self, capture: CaptureForHooks, root_name: str, module: Callable[[], nn.Module | None],
        path_of: Callable[[nn.Module], str | None],
    ) -> None:  # fmt: skip
        """Find the wrappers around the model. `module` gives the root's module, and `path_of` the path of an inner one.

        `install` gives the modules under hooks.
        """
        self._capture, self._root_name, self._module, self._path_of = capture, root_name, module, path_of
        self._hooked: Sequence[HookedModule] = ()
        self.flats: list[FsdpParameter] = []
        self._around: list[weakref.ref[nn.Module]] = []
        self._named: set[tuple[str, str]] | None = None
        """The pairs of module path and name under which parameters are recorded. None until they are first needed."""
        self._look_around()

    def __iter__(self) -> Iterator[tuple[HookedModule, str, nn.Parameter]]:
        """Yield every parameter except flat parameters once, with its module and its name in the module."""
        seen = ids_of(self.flats)
        for hooked in self._hooked:
            for name, parameter in hooked.own("_parameters"):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield hooked, name, parameter

    def is_first_use(self, path: str, name: str, parameter: torch.Tensor, slice_: Slice) -> bool:
        """Whether a micro-step uses a parameter for the first time. `path` and `name` must be those that rows use."""
        if self._named is None:
            self._named = {(owner.node_path, own) for owner, own, _ in self}
        is_first = (path, name) in self._named and id(parameter) not in slice_.used
        slice_.used.add(id(parameter))
        return is_first

    def install(self, hooked: Sequence[HookedModule]) -> None:
        """Take the modules of the root, which have hooks now."""
        self._hooked = hooked
        self._find_flats()

    def find_wrappers(self) -> None:
        """Look for wrappers again. A model that was wrapped after `attach` may have other parameters now."""
        self._look_around()
        self._find_flats()

    def wrappers(self) -> list[nn.Module]:
        """Return the wrappers around the model, such as DDP."""
        return [wrapper for reference in self._around if (wrapper := reference()) is not None]

    def _look_around(self) -> None:
        if (module := self._module()) is not None:
            self._around = [weakref.ref(wrapper) for wrapper in wrappers_around(module)]

    def _find_flats(self) -> None:
        if (module := self._module()) is None:
            return
        modules = {hooked.node_path: hooked for hooked in self._hooked}

        def module_of(owner: nn.Module) -> HookedModule | None:
            path = self._path_of(owner)
            return None if path is None else modules.get(path)

        flats = find_flat_parameters([*module.modules(), *self.wrappers()], module_of)
        self.flats = self._listed(flats, "are recorded whole")

    def updated_parts(self, updated: Iterable[torch.Tensor]) -> list[FlatParameter]:
        """Return the flat tensors of ZeRO and Megatron that optimizers update in place of the root's parameters.

        Args:
            updated: the tensors that the live optimizers have.
        """
        zero = self._listed(find_zero_parameters(self), "of ZeRO are not recorded")
        around = [*self.wrappers(), *(module.modules() if (module := self._module()) is not None else ())]
        parts = find_megatron_parts(around, self, updated)
        return [*zero, *self._listed(parts, "of Megatron's distributed optimizer are not recorded")]

    def _listed(self, flats: Iterator[_Flat], otherwise: str) -> list[_Flat]:
        """Return the flat parameters. If a framework's attributes are not as expected, report this and return none."""
        try:
            return list(flats)
        except Exception as error:
            text = f"{self._root_name}: flat parameters {otherwise}: {type(error).__name__}: {error}"
            self._capture.events.add("flat_parameters_unknown", text, key=self._root_name, exception=error)
            return []


class SharedWork:
    """The ranks with which a root shares its work, for the manifest."""

    def __init__(self, capture: CaptureForHooks, root_name: str, parameters: RootParameters) -> None:
        self._capture, self._root_name, self._parameters = capture, root_name, parameters
        self.data_parallel: DataParallel | None = None
        """The data-parallel group, which splits the batch, for the manifest. None if no wrapper or mark names it."""
        self.model_parallel: ModelParallel | None = None
        """The ranks with the same part of the batch, for the manifest. None if no parameter or mark names the ranks."""
        self.marked_ranks: tuple[int, ...] = ()
        """The ranks over which the model's plain parameters are cut, by a framework's marks. Empty without marks."""
        self.rank_local: dict[str, str] | None = None
        """By full parameter name, why the parameter differs between ranks with different batches, for the manifest."""
        self.pipeline: Pipeline | None = None
        """The pipeline stage that this root is, for the manifest. None if no stage was observed to call the root."""
        self.is_over_meshes = False
        """Whether parameters are or were DTensors."""

    def learn(self, module: nn.Module, modules: Sequence[HookedModule]) -> None:
        """Look for the groups of ranks. `module` is the root's, and `modules` are those under hooks."""
        if not is_distributed():
            return
        try:
            self.data_parallel = find_data_parallel(module, self._parameters.wrappers())
            around = [*module.modules(), *self._parameters.wrappers()]
            meshes = [mesh for parameter in module.parameters() if (mesh := mesh_of(parameter)) is not None]
            meshes += meshes_of_flat(around)
            of_meshes = find_model_parallel(meshes, self.data_parallel)
            self.is_over_meshes |= of_meshes is not None
            self.marked_ranks = marked_ranks(module)
            self.model_parallel = of_meshes or marked_model_parallel(self.marked_ranks) or self.model_parallel
            reasons = find_rank_local(around, self.data_parallel)
            self.rank_local = {
                full_name(hooked.node_path, name): reason
                for hooked in modules
                for name, parameter in hooked.own("_parameters")
                if (reason := EXPERT if hooked.is_expert else reasons.get(id(parameter)))
            } or None
        except Exception as error:
            if comes_from_signal_handler(error):
                raise
            text = f"{self._root_name}: the ranks that share its batch are not known: {type(error).__name__}: {error}"
            self._capture.events.add("data_parallel_unknown", text, key=self._root_name, exception=error)
