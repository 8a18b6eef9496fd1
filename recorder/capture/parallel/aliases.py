"""Finds the chunks of plain tensors in tensor parallel regions, from DTensors that use the same memory.

A chunk is a rank's part of a global tensor. If a tensor parallel style has made a DTensor local, the plain tensor's
autograd node has the DTensor's spec. Otherwise only the next module turns the plain tensor into a DTensor, so a
few records wait until their chunks are known. Memory is recognised by a weak reference to the tensor that owns it,
never by an address. Nothing here may copy, issue a collective, or keep a tensor or a mesh alive.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from ...records import Chunk, Staged
from ..local_values import PLAIN, chunk_of

_MAX_KNOWN = 64
_MAX_WAITING = 16
"""The most records that wait for their chunk. A chunk becomes known soon or never, and each record uses pool memory."""


class _KnownMemory(NamedTuple):
    """The memory of a DTensor's local values, with the DTensor's global shape, mesh and placements."""

    owner: Any
    """A weak reference to the tensor that owns the memory; the owner is not a view of another tensor."""
    start: Any
    shape: torch.Size
    strides: tuple[int, ...]
    global_shape: tuple[int, ...]
    mesh: weakref.ref[Any]
    placements: tuple[Any, ...]


class Waiting:
    """A plain tensor whose chunk is not known yet, with its record."""

    __slots__ = ("learn", "owner", "shape", "staged", "start", "strides")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.owner = TensorWeakRef(_owner(tensor))
        self.shape, self.strides, self.start = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.staged: Staged | None = None
        self.learn: Callable[[Chunk | None], None] | None = None
        """Takes the gradient's chunk, for the tensor's gradient hook. Called once the tensor's chunk is known."""

    def put(self, staged: Staged) -> None:
        """Keep the record. `Capture.observe` calls this method instead of the channel's `put`."""
        self.staged = staged


class Aliases:
    """Remembers the memory of recent DTensors, and the plain tensors that wait for a DTensor in the same memory."""

    def __init__(self, put: Callable[[Staged], None]) -> None:
        self._put = put
        self._known: deque[_KnownMemory] = deque(maxlen=_MAX_KNOWN)
        self._waiting: deque[Waiting] = deque()

    def saw(self, tensor: Any) -> None:
        """Remember a DTensor's memory. A plain tensor in the same memory has the same chunk of the global tensor."""
        self._learn(tensor._local_tensor, tensor._spec)

    def _learn(self, local: torch.Tensor, spec: Any) -> None:
        owner, mesh = TensorWeakRef(_owner(local)), weakref.ref(spec.mesh)
        known = _KnownMemory(
            owner, local.storage_offset(), local.shape, local.stride(), tuple(spec.shape), mesh, spec.placements
        )
        self._known.append(known)
        tensor = owner()
        for waiting in list(self._waiting):
            if waiting.owner() is tensor:
                chunk = _chunk_in(known, waiting.start, waiting.shape, waiting.strides)
                if chunk is not None:
                    self._release(waiting, chunk)

    def chunk_of_alias(self, tensor: torch.Tensor) -> Chunk | None:
        """Return the chunk of a plain tensor. Return None if the chunk is not known yet."""
        spec = getattr(tensor.grad_fn, "dtensor_spec", None)  # the node of a view that `to_local` made has the spec
        if spec is not None and tensor.dim() == len(spec.shape):
            self._learn(tensor, spec)
        owner = _owner(tensor)
        for known in reversed(self._known):
            if known.owner() is owner:
                # An in-place all-reduce may have turned the partial sum into the total.
                was_changed = tensor.is_inference() or tensor._version > 0
                if was_changed and any(placement.is_partial() for placement in known.placements):
                    return None
                return _chunk_in(known, tensor.storage_offset(), tensor.shape, tensor.stride())
        return None

    def wait(self, waiting: Waiting) -> None:
        """Hold a record back until its chunk is known. At a flush, or if too many wait, it goes on without a chunk."""
        self._waiting.append(waiting)
        if len(self._waiting) > _MAX_WAITING:
            self._release(self._waiting[0], None)

    def end(self) -> None:
        """Release the waiting records and forget all DTensors as a model's call ends, because memory is reused then."""
        self.flush()
        self._known.clear()

    def flush(self) -> None:
        """Put every waiting record on the channel without a chunk."""
        for waiting in list(self._waiting):
            self._release(waiting, None)

    def _release(self, waiting: Waiting, chunk: Chunk | None) -> None:
        try:
            self._waiting.remove(waiting)
        except ValueError:  # another thread has released the record
            return
        if chunk is not None and waiting.learn is not None:
            waiting.learn(chunk_of_gradient(chunk))
        if waiting.staged is not None:
            self._put(waiting.staged._replace(chunk=chunk) if chunk is not None else waiting.staged)


WRAPPED = "RegisterPostBackwardFunctionBackward"
"""The name of the autograd node that FSDP2 adds to a sharded module's inputs, before any hook of ours sees them."""


def wrapped(tensor: torch.Tensor, node: Any) -> torch.Tensor | tuple[Any, int] | None:
    """Return the tensor or autograd node before the node that FSDP2 adds to a module's input.

    The complete gradient arrives there; at the input, only the gradient through this module arrives. `node` is the
    input's node, whose class is named `WRAPPED`. Return the tensor if it is a leaf. Otherwise return its node, with the
    index of the node's output. Return None if the source is unknown.
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
    """Return the autograd node of the tensor from which a DTensor was made for a single module.

    Only this module's part of the gradient arrives at the DTensor. The complete gradient arrives at the node. The
    result is the node, the index of its output, and the gradient's chunk if the gradient is a plain tensor. Return None
    if neither `from_local` nor a redistribution made the DTensor, because other modules may then use the DTensor, too.
    """
    node, number, chunk = tensor.grad_fn, 0, None
    while (kind := type(node).__name__) in ("RedistributeBackward", "_FromTorchTensorBackward"):
        if kind == "_FromTorchTensorBackward":
            chunk = _chunk_of_local_gradient(tensor, node)
        node, number = node.next_functions[0]
    return None if node is None or node is tensor.grad_fn else (node, number, chunk)


def _chunk_of_local_gradient(tensor: Any, node: Any) -> Chunk:
    """Return the chunk of the gradient that `from_local` passes back. A partial sum has a replicated gradient."""
    from torch.distributed.tensor import Replicate

    mesh = getattr(node, "forward_input_device_mesh", None) or node.previous_device_mesh
    placements = getattr(node, "forward_input_placements", None) or node.previous_placement
    wanted = getattr(node, "grad_placements", None) or [Replicate() if p.is_partial() else p for p in placements]
    return chunk_of(tuple(tensor.shape), mesh, wanted)


def has_owner(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain and strided, or will be once a pending collective is over."""
    is_plain = type(tensor) in PLAIN or type(tensor).__name__ == "AsyncCollectiveTensor"
    return is_plain and tensor.layout is torch.strided


def chunk_of_gradient(chunk: Chunk) -> Chunk | None:
    """Return the chunk of a tensor's gradient, given the tensor's chunk. Return None for a partial sum."""
    return None if 'Partial"' in chunk.placements else chunk


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _chunk_in(known: _KnownMemory, start: Any, shape: torch.Size, strides: tuple[int, ...]) -> Chunk | None:
    """Return the chunk of a tensor that fills a known DTensor's memory, also as a view; None for other tensors."""
    mesh = known.mesh()
    if mesh is None or start != known.start:
        return None
    if (shape, strides) == (known.shape, known.strides):
        return chunk_of(known.global_shape, mesh, known.placements)
    if shape.numel() != known.shape.numel():
        return None
    seen = _seen_as(known, mesh, shape, strides)
    return None if seen is None else chunk_of(*seen)


def _seen_as(
    known: _KnownMemory, mesh: Any, shape: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], Any, tuple[Any, ...]] | None:
    """Return global shape, mesh and placements of a view of a chunk. Return None if they are not certain.

    The view's sharded dim is the dim with the same extent in memory (size times stride) as the chunk's sharded dim. If
    the view splits the sharded dim, it is the outermost new dim. Only even shards are accepted, because the sizes of
    uneven shards differ between ranks. A view with a dim of size 1 is never certain: that dim may be all that is left
    of a sharded dim, such as the one head of a rank.
    """
    from torch.distributed.tensor import Replicate, Shard

    global_shape, placements = list(shape), list(known.placements)
    if 1 in shape:
        return None
    for axis, placement in enumerate(known.placements):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:
            return None
        old = placement.dim
        num_shards = [mesh.size(a) for a, p in enumerate(known.placements) if p == placement]
        size, end = known.shape[old], known.shape[old] * known.strides[old]
        ends = [dim for dim, count in enumerate(shape) if count > 1 and count * strides[dim] == end]
        if len(ends) != 1 or size * torch.Size(num_shards).numel() != known.global_shape[old]:
            return None
        global_shape[ends[0]] *= mesh.size(axis)
        placements[axis] = Shard(ends[0])
    return tuple(global_shape), mesh, tuple(placements)
