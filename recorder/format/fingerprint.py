"""The fingerprint of a tensor: a 64-bit hash that is the sum of the hashes of the tensor's chunks, however it is cut.

F = sum over elements of (bits as a signed integer) * product over dims of C_d ** (index along d), modulo 2**64. Dims
are counted from the last one, and indices are positions in the global tensor. FORMAT.md specifies the fingerprint in
section "Fingerprint".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..native import Kernels, Weights
from ..numerics.dtypes import flat_boxes

MODULUS = 1 << 64
_WORD_BYTES = 4
"""The most bytes of a word. Words are the integers that are added up, and wider elements are split into words: in a sum
of 64-bit elements, the sign bits that a negation flips would cancel."""
_BLOCK_ITEMS = 1 << 15
"""The number of words that are multiplied at a time. Words and weights together fit in the second-level cache."""

_COMPILED_BLOCK_ITEMS = 1 << 12
"""The number of words in a block of the compiled loops. A block's weights fit in the first-level cache."""

_UInt64s = npt.NDArray[np.uint64]


def fingerprint(
    data: npt.NDArray[np.uint8],
    item_bytes: int,
    shape: tuple[int, ...],
    offsets: tuple[int, ...] | None = None,
    kernels: Kernels | None = None,
) -> int:
    """Return the fingerprint of a tensor, or of its chunk at `offsets`, as an unsigned 64-bit integer.

    `data` are the contiguous little-endian C-order bytes of the tensor or chunk, and `shape` is its shape. `kernels`
    are the compiled loops, or None.
    """
    if kernels is not None and len(data):
        weights = compiled_weights(item_bytes, shape)
        words = len(data) // weights.word_bytes
        if words != weights.num_words:
            raise ValueError(f"{len(data)} bytes are no tensor of shape {shape} with {item_bytes} bytes an element")
        at_origin = kernels.fingerprint(data, words, weights)
        assert at_origin is not None, "a fingerprint exists if there are weights"
    else:
        word_bytes = min(item_bytes, _WORD_BYTES)
        at_origin = _fingerprint_at_origin(data.view(np.dtype(f"<i{word_bytes}")), _word_shape(item_bytes, shape))
    return moved(at_origin, item_bytes, offsets) if offsets else at_origin


@lru_cache(maxsize=128)
def compiled_weights(item_bytes: int, shape: tuple[int, ...]) -> Weights:
    """Return the weights that the compiled loops use for a non-empty tensor at the origin. About 4 MiB are cached."""
    plan = _plan(_word_shape(item_bytes, shape), _COMPILED_BLOCK_ITEMS)
    return Weights(
        _weights(plan.block_shape, 0),
        _weights(plan.outer_shape, plan.first_outer_dim),
        run_words=plan.run_items,
        block_step=plan.block_step,
        word_bytes=min(item_bytes, _WORD_BYTES),
    )


def _word_shape(item_bytes: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if item_bytes <= _WORD_BYTES else (*shape, item_bytes // _WORD_BYTES)


def moved(value: int, item_bytes: int, offsets: tuple[int, ...]) -> int:
    """Return the fingerprint of a chunk at `offsets`. `value` is the fingerprint of the same chunk at the origin."""
    if item_bytes > _WORD_BYTES:
        offsets = (*offsets, 0)
    return value * _product_of_powers(offsets) % MODULUS


def to_text(value: int) -> str:
    """Return the text in the column `fingerprint`: 16 lowercase hexadecimal digits."""
    return f"{value % MODULUS:016x}"


@lru_cache(maxsize=128)
def constant(dim: int) -> int:
    """Return C_d, the constant whose powers weight the indices along dim d (counted from the last dim).

    C_d is an output of the finaliser of splitmix64 (Steele et al., 2014), made 5 modulo 8. The powers of such a
    constant have the longest possible cycle. A sum of n powers contains the factor 2 no more often than n does. So a
    change of one high bit in all elements still changes the fingerprint.
    """
    z = (dim + 1) * 0x9E3779B97F4A7C15 % MODULUS
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    z = (z ^ z >> 27) * 0x94D049BB133111EB % MODULUS
    z ^= z >> 31
    return z & ~7 | 5


class _Plan(NamedTuple):
    """How words are cut into blocks for summing. Each index of the outer dims has a run of words, cut into blocks."""

    block_shape: tuple[int, ...]
    outer_shape: tuple[int, ...]
    first_outer_dim: int
    """The index of the innermost outer dim, counted from the tensor's last dim (0)."""
    run_items: int
    block_step: int
    """The ratio of the weights of a block to the weights of the block before it in the run."""


def _plan(shape: tuple[int, ...], block_items: int) -> _Plan:
    num_inner_dims = 0
    while num_inner_dims < len(shape) and math.prod(shape[len(shape) - num_inner_dims - 1 :]) <= block_items:
        num_inner_dims += 1
    if num_inner_dims == len(shape):
        return _Plan(shape, (), num_inner_dims, math.prod(shape), 1)
    split = len(shape) - num_inner_dims - 1
    inner_shape = shape[split + 1 :]
    num_rows = block_items // math.prod(inner_shape)
    block_step = pow(constant(num_inner_dims), num_rows, MODULUS)
    return _Plan(
        (num_rows, *inner_shape), shape[:split], num_inner_dims + 1, shape[split] * math.prod(inner_shape), block_step
    )


def _fingerprint_at_origin(words: npt.NDArray[np.signedinteger], shape: tuple[int, ...]) -> int:
    """Sum the weighted words in blocks. A block has some indices of one dim, and all of the dims after it."""
    if not words.size:
        return 0
    plan = _plan(shape, _BLOCK_ITEMS)
    scratch = np.empty(min(words.size, _BLOCK_ITEMS), np.int64)
    weights = _block_weights(plan.block_shape)
    total = 0
    outer_weights = _weights(plan.outer_shape, plan.first_outer_dim)
    for outer_weight, run in zip(outer_weights.tolist(), words.reshape(len(outer_weights), -1), strict=True):
        for start in range(0, len(run), len(weights)):
            total += outer_weight * _dot(run[start : start + len(weights)], weights, scratch)
            outer_weight = outer_weight * plan.block_step % MODULUS
    return total % MODULUS


def _dot(words: npt.NDArray[np.signedinteger], weights: _UInt64s, scratch: npt.NDArray[np.int64]) -> int:
    wide = scratch[: len(words)]
    np.copyto(wide, words)
    return int(np.einsum("i,i->", wide.view(np.uint64), weights[: len(words)]))


@lru_cache(maxsize=32)
def _block_weights(shape: tuple[int, ...]) -> _UInt64s:
    """Return the weights of a block of at most `_BLOCK_ITEMS` words. The weights of 32 shapes (8 MiB) are cached."""
    return _weights(shape, 0)


def _weights(shape: tuple[int, ...], first_dim: int) -> _UInt64s:
    """Return the weight of each element of `shape` in C order. The last dim of `shape` counts as `first_dim`."""
    weights = np.ones(1, np.uint64)
    for dim, length in enumerate(reversed(shape), first_dim):
        powers = np.full(length, constant(dim), np.uint64)
        powers[:1] = 1
        np.multiply.accumulate(powers, out=powers)
        weights = np.multiply.outer(powers, weights).reshape(-1)
    return weights


def _product_of_powers(indices: tuple[int, ...]) -> int:
    product = 1
    for dim, index in enumerate(reversed(indices)):
        product = product * pow(constant(dim), index, MODULUS) % MODULUS
    return product


def flat_fingerprint(
    data: npt.NDArray[np.uint8],
    item_bytes: int,
    global_shape: tuple[int, ...],
    start: int,
    kernels: Kernels | None = None,
) -> int:
    """Return the fingerprint of the elements from index `start` on of a flattened (C order) global tensor.

    `data` are the contiguous little-endian bytes of these elements. Their weights depend on their global positions.
    """
    total = done = 0
    for offsets, shape in flat_boxes(global_shape, start, start + len(data) // item_bytes):
        num_bytes = math.prod(shape) * item_bytes
        total += fingerprint(data[done : done + num_bytes], item_bytes, shape, offsets, kernels)
        done += num_bytes
    return total % MODULUS


def combine_fingerprints(
    fingerprints: Sequence[str | None], moves: Sequence[tuple[int, ...] | None], item_bytes: int
) -> str | None:
    """Return a tensor's fingerprint from those of its chunks; None if a chunk has no valid fingerprint.

    `moves` has None for a chunk whose fingerprint already counts the chunk's position. For a chunk whose fingerprint
    was computed as if at the origin, it has the chunk's offsets.
    """
    total = 0
    for text, offsets in zip(fingerprints, moves, strict=True):
        if text is None:
            return None
        try:
            value = int(text, 16)
        except ValueError:
            return None
        total += moved(value, item_bytes, offsets) if offsets is not None else value
    return to_text(total % MODULUS)
