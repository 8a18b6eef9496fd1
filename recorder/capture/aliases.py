"""Learns the chunks of plain tensors inside tensor parallel regions from DTensors that share their memory.

A tensor that a tensor parallel style has made local carries its DTensor's spec in its autograd node. Where only the
next module turns a tensor into a DTensor, the tensor's chunk is known a moment later; so a few records wait for their
chunks. Memory is recognised by a weak reference to the tensor that owns it, never by an address. Nothing here may copy,
issue a collective, or keep a tensor or a mesh alive.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from ..records import Chunk, Staged
from .local_values import PLAIN, chunk_of

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
        """Tells the hook on the tensor's gradient the gradient's chunk; called once the tensor's chunk is known."""

    def put(self, staged: Staged) -> None:
        """Keep the record; `Capture.observe` calls this method in place of the channel's `put`."""
        self.staged = staged


class Aliases:
    """Remembers the memory of recent DTensors, and plain tensors whose chunk a DTensor in the same memory may show."""

    def __init__(self, put: Callable[[Staged], None]) -> None:
        self._put = put
        self._known: deque[_KnownMemory] = deque(maxlen=_MAX_KNOWN)
        self._waiting: deque[Waiting] = deque()

    def saw(self, tensor: Any) -> None:
        """Remember a DTensor's memory: a plain tensor in the same memory is a chunk of the same global tensor."""
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
        """Return the chunk of a plain tensor; None while the chunk is not known."""
        spec = getattr(tensor.grad_fn, "dtensor_spec", None)  # the node of a view that `to_local` made has the spec
        if spec is not None and tensor.dim() == len(spec.shape):
            self._learn(tensor, spec)
        owner = _owner(tensor)
        for known in reversed(self._known):
            if known.owner() is owner:
                # An all-reduce in place may have completed the partial sum.
                was_changed = tensor.is_inference() or tensor._version > 0
                if was_changed and any(placement.is_partial() for placement in known.placements):
                    return None
                return _chunk_in(known, tensor.storage_offset(), tensor.shape, tensor.stride())
        return None

    def wait(self, waiting: Waiting) -> None:
        """Hold a record back until its chunk is known, the records are flushed, or too many records wait."""
        self._waiting.append(waiting)
        if len(self._waiting) > _MAX_WAITING:
            self._release(self._waiting[0], None)

    def end(self) -> None:
        """Pass waiting records on and forget all DTensors as a root's call ends: later tensors may reuse the memory."""
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
    """Return where a module's input comes from, before FSDP2 added its node: the complete gradient arrives there.

    At the input, only the gradient through the module arrives. `node` is the tensor's node, of the kind `WRAPPED`. The
    result is the source if it is a leaf; else its node and the index of the node's output; None if it is unknown.
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

    At the DTensor only this module's part of the gradient arrives; the complete gradient arrives at the node. The
    result is the node, the index of its output, and the gradient's chunk if the gradient is a plain tensor; or None if
    neither `from_local` nor a redistribution made the DTensor: other modules may then take the DTensor, too.
    """
    node, number, chunk = tensor.grad_fn, 0, None
    while (kind := type(node).__name__) in ("RedistributeBackward", "_FromTorchTensorBackward"):
        if kind == "_FromTorchTensorBackward":
            chunk = _chunk_of_local_gradient(tensor, node)
        node, number = node.next_functions[0]
    return None if node is None or node is tensor.grad_fn else (node, number, chunk)


def _chunk_of_local_gradient(tensor: Any, node: Any) -> Chunk:
    """Return the chunk of a gradient that leaves `DTensor.from_local`; a partial sum has a replicated gradient."""
    from torch.distributed.tensor import Replicate

    mesh = getattr(node, "forward_input_device_mesh", None) or node.previous_device_mesh
    placements = getattr(node, "forward_input_placements", None) or node.previous_placement
    wanted = getattr(node, "grad_placements", None) or [Replicate() if p.is_partial() else p for p in placements]
    return chunk_of(tuple(tensor.shape), mesh, wanted)


def has_owner(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a kind that has memory, or will have memory once a collective is over."""
    is_plain = type(tensor) in PLAIN or type(tensor).__name__ == "AsyncCollectiveTensor"
    return is_plain and tensor.layout is torch.strided


def chunk_of_gradient(chunk: Chunk) -> Chunk | None:
    """Return the chunk of a plain tensor's gradient: the tensor's chunk, or None where the tensor is a partial sum."""
    return None if 'Partial"' in chunk.placements else chunk


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _chunk_in(known: _KnownMemory, start: Any, shape: torch.Size, strides: tuple[int, ...]) -> Chunk | None:
    """Return the chunk of a tensor that fills all of a known memory, perhaps as a view of another shape; else None."""
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
    """Return global shape, mesh and placements of a view of a complete chunk; None where they are not certain.

    The view's sharded dim is the dim with the same extent in memory (size times stride) as the chunk's sharded dim. If
    the view splits the sharded dim, this is the outermost new dim. Only even shards count, because the sizes of uneven
    shards differ between ranks. A view with a dim of size 1 is never certain: the dim may be all that is left of a
    sharded dim, such as the one head of a rank.
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
