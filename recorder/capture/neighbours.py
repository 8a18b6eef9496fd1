"""The places of plain tensors inside tensor parallel regions, learnt from DTensors that share their memory.

What a parallel style made local tells in its graph what it was; what another module takes for a piece of a DTensor is
known a moment later, so records wait for that, a few at a time. Identity is a weak reference to the tensor that owns
the memory, never an address. Nothing here may copy, issue a collective, or keep a tensor or a mesh alive.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from ..records import Chunk, Staged
from .hooks import GradientArrives
from .parallel import loaded
from .places import chunk_of
from .values import PLAIN

_MAX_KNOWN = 64
_MAX_WAITING = 16
"""A neighbour takes its tensor soon, or never. What waits holds memory of the pool."""


class _Place(NamedTuple):
    """A local tensor's memory, and what global tensor it is a piece of."""

    owner: Any
    """Weak reference to the tensor that is no view of another."""
    start: Any
    shape: torch.Size
    strides: tuple[int, ...]
    global_shape: tuple[int, ...]
    mesh: weakref.ref[Any]
    placements: tuple[Any, ...]


class Waiting:
    """A plain tensor whose place is not known yet: its record, and the hook on its gradient."""

    __slots__ = ("hook", "owner", "shape", "staged", "start", "strides")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.owner = TensorWeakRef(_owner(tensor))
        self.shape, self.strides, self.start = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.staged: Staged | None = None
        self.hook: GradientArrives | None = None

    def put(self, staged: Staged) -> None:
        """Take the record instead of the channel."""
        self.staged = staged


class Neighbours:
    """What was seen of late, and what waits for its neighbour."""

    def __init__(self, put: Callable[[Staged], None]) -> None:
        self._put = put
        self._known: deque[_Place] = deque(maxlen=_MAX_KNOWN)
        self._waiting: deque[Waiting] = deque()

    def saw(self, tensor: Any) -> None:
        """A DTensor goes by: what shares its memory is a piece of it, too."""
        self._learn(tensor._local_tensor, tensor._spec)

    def _learn(self, local: torch.Tensor, spec: Any) -> None:
        owner, mesh = TensorWeakRef(_owner(local)), weakref.ref(spec.mesh)
        place = _Place(
            owner, local.storage_offset(), local.shape, local.stride(), tuple(spec.shape), mesh, spec.placements
        )
        self._known.append(place)
        tensor = owner()
        for waiting in list(self._waiting):
            if waiting.owner() is tensor:
                chunk = _chunk_in(place, waiting.start, waiting.shape, waiting.strides)
                if chunk is not None:
                    self._release(waiting, chunk)

    def place_of(self, tensor: torch.Tensor) -> Chunk | None:
        """The place of a plain tensor; None where it is not known, or not yet."""
        spec = getattr(tensor.grad_fn, "dtensor_spec", None)  # a view that `to_local` made has a node that knows
        if spec is not None and tensor.dim() == len(spec.shape):
            self._learn(tensor, spec)
        owner = _owner(tensor)
        for place in reversed(self._known):
            if place.owner() is owner:
                if _was_changed(tensor) and any(placement.is_partial() for placement in place.placements):
                    return None
                return _chunk_in(place, tensor.storage_offset(), tensor.shape, tensor.stride())
        return None

    def wait(self, waiting: Waiting) -> None:
        """Keep a record back until its place is known, or nobody can know it any more."""
        self._waiting.append(waiting)
        if len(self._waiting) > _MAX_WAITING:
            self._release(self._waiting[0], None)

    def end(self) -> None:
        """A call of a root is over, and what its tensors were says nothing of later ones."""
        self.flush()
        self._known.clear()

    def flush(self) -> None:
        """Let every record go as it is."""
        for waiting in list(self._waiting):
            self._release(waiting, None)

    def _release(self, waiting: Waiting, chunk: Chunk | None) -> None:
        try:
            self._waiting.remove(waiting)
        except ValueError:  # another thread has released it
            return
        if chunk is not None and waiting.hook is not None:
            waiting.hook.chunk = chunk_of_gradient(chunk)
        if waiting.staged is not None:
            self._put(waiting.staged._replace(chunk=chunk) if chunk is not None else waiting.staged)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor; nobody can have one who never imported the class."""
    dtensor = loaded("torch.distributed.tensor", "DTensor")
    return dtensor is not None and isinstance(tensor, dtensor)


WRAPPED = "RegisterPostBackwardFunctionBackward"
"""The node that FSDP2 puts behind each input of what it shards, before any hook of ours sees it."""


def wrapped(tensor: torch.Tensor, node: Any) -> torch.Tensor | tuple[Any, int] | None:
    """What FSDP2 has put its node on: only there all of the gradient arrives, also that of a residual around a block.

    Args:
        tensor: what came out of it.
        node: its node, a `WRAPPED`.

    Returns:
        The tensor, where that is a leaf; else its node, and which output of the node it is; None where it is not known.
    """
    number = tensor.output_nr
    while type(node).__name__ == WRAPPED:
        if number >= len(node.next_functions):
            return None
        node, number = node.next_functions[number]
    if type(node).__name__ == "AccumulateGrad":
        return node.variable if type(node.variable) in PLAIN else None
    return None if node is None else (node, number)


def made_of(tensor: Any) -> tuple[Any, int, Chunk | None] | None:
    """Of a DTensor that was made for one module alone, the node of the tensor that it was made of.

    A gradient that arrives at such a DTensor is that module's share; all of it arrives at the node.

    Returns:
        The node, which of its outputs it is, and where the gradient lies, where that is a plain tensor; None where the
        DTensor itself is what others see.
    """
    node, number, chunk = tensor.grad_fn, 0, None
    while (kind := type(node).__name__) in ("RedistributeBackward", "_FromTorchTensorBackward"):
        if kind == "_FromTorchTensorBackward":
            chunk = _chunk_of_local_gradient(tensor, node)
        node, number = node.next_functions[0]
    return None if node is None or node is tensor.grad_fn else (node, number, chunk)


def _chunk_of_local_gradient(tensor: Any, node: Any) -> Chunk:
    """`DTensor.from_local` turns the gradient into what the local tensor was, and adds up what would be summands."""
    from torch.distributed.tensor import Replicate

    mesh = getattr(node, "forward_input_device_mesh", None) or node.previous_device_mesh
    placements = getattr(node, "forward_input_placements", None) or node.previous_placement
    wanted = getattr(node, "grad_placements", None) or [Replicate() if p.is_partial() else p for p in placements]
    return chunk_of(tuple(tensor.shape), mesh, wanted)


def has_owner(tensor: torch.Tensor) -> bool:
    """Whether it is of a kind that has memory, or will have as soon as a collective is over."""
    is_plain = type(tensor) in PLAIN or type(tensor).__name__ == "AsyncCollectiveTensor"
    return is_plain and tensor.layout is torch.strided


def chunk_of_gradient(chunk: Chunk) -> Chunk | None:
    """Where the gradient of a plain tensor lies, which is a piece as the tensor is; of a summand nobody knows."""
    return None if 'Partial"' in chunk.placements else chunk


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _chunk_in(place: _Place, start: Any, shape: torch.Size, strides: tuple[int, ...]) -> Chunk | None:
    """The place of a tensor in the memory of a piece: the piece itself, or all of it seen in another shape."""
    mesh = place.mesh()
    if mesh is None or start != place.start:
        return None
    if (shape, strides) == (place.shape, place.strides):
        return chunk_of(place.global_shape, mesh, place.placements)
    if shape.numel() != place.shape.numel():
        return None
    seen = _seen_as(place, mesh, shape, strides)
    return None if seen is None else chunk_of(*seen)


def _was_changed(tensor: torch.Tensor) -> bool:
    """Whether something was written into it since it was made: a summand may have become the sum."""
    return tensor.is_inference() or tensor._version > 0


def _seen_as(
    place: _Place, mesh: Any, shape: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], Any, tuple[Any, ...]] | None:
    """Of a view of a whole piece the global shape and placements; None where they cannot be told for sure.

    The dim that takes the place of a sharded one is the one that ends where that ended in memory: the other factors of
    the old dim, where it was split, lie inside it. Only even shards: of others, sizes differ between ranks. A dim of
    size 1 may be what is left of a sharded one, such as the one head of a rank.
    """
    from torch.distributed.tensor import Replicate, Shard

    global_shape, placements = list(shape), list(place.placements)
    if 1 in shape:
        return None
    for axis, placement in enumerate(place.placements):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:
            return None
        old = placement.dim
        num_shards = [mesh.size(a) for a, p in enumerate(place.placements) if p == placement]
        size, end = place.shape[old], place.shape[old] * place.strides[old]
        ends = [dim for dim, count in enumerate(shape) if count > 1 and count * strides[dim] == end]
        if len(ends) != 1 or size * torch.Size(num_shards).numel() != place.global_shape[old]:
            return None
        global_shape[ends[0]] *= mesh.size(axis)
        placements[axis] = Shard(ends[0])
    return tuple(global_shape), mesh, tuple(placements)
