"""Writes a `torch.distributed.checkpoint`: a folder with the tensors in chunks, and a pickle that lists them.

This module imports torch, so import it only for such an export. The pickle contains torch's own classes, and
`torch.save` writes each chunk.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ...errors import UnsupportedError
from ...numerics.dtypes import item_bytes
from .tensors import Entry, Span, SpansOf

CHUNK_BYTES = 16 << 20
"""The size of the largest chunk. A rank that loads the checkpoint reads only the chunks that it needs."""
_DATA = "__0_0.distcp"
_METADATA = ".metadata"
_VERSION = "1.0.0"
"""The version that torch writes into the metadata. Readers that do not know this member ignore it."""


def write_checkpoint(folder: Path, spans_of: SpansOf, entries: Sequence[Entry], report: Callable[[int], None]) -> None:
    """Write tensors into an empty folder. The metadata file is written last, because it makes the folder a checkpoint.

    Raises UnsupportedError if this torch does not have an element type.
    """
    dtypes = {entry.name: _torch_dtype(entry) for entry in entries}
    entries_by_name: dict[str, Any] = {}
    storage_infos: dict[MetadataIndex, _StorageInfo] = {}
    with (folder / _DATA).open("xb") as file:
        for entry in entries:
            chunks = list(boxes(entry.shape, CHUNK_BYTES // item_bytes(entry.dtype)))
            sizes = [math.prod(sizes) * item_bytes(entry.dtype) for _, sizes in chunks]
            data = regrouped(spans_of(entry), sizes)
            for number, ((offsets, shape), values) in enumerate(zip(chunks, data, strict=True)):
                dtype, begin = dtypes[entry.name], file.tell()
                tensor = torch.from_numpy(values).view(dtype) if values.size else torch.empty(0, dtype=dtype)
                torch.save(tensor.reshape(shape), file)
                info = _StorageInfo(_DATA, begin, file.tell() - begin)
                storage_infos[MetadataIndex(entry.name, offsets, number)] = info
                report(values.nbytes)
            entries_by_name[entry.name] = TensorStorageMetadata(
                TensorProperties(dtype=dtypes[entry.name]),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)) for offsets, shape in chunks],
            )
        _sync(file)
    metadata = Metadata(entries_by_name, {name: (name,) for name in entries_by_name}, storage_infos, StorageMeta())
    metadata.version = _VERSION
    with (folder / _METADATA).open("xb") as file:
        pickle.dump(metadata, file)
        _sync(file)


def boxes(shape: tuple[int, ...], max_numel: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of boxes of at most `max_numel` elements that follow each other in a tensor's memory."""
    dim, inner = 0 if 0 in shape else len(shape), 1
    while dim and inner * shape[dim - 1] <= max_numel:
        dim, inner = dim - 1, inner * shape[dim - 1]
    if dim == 0:
        yield (0,) * len(shape), shape
        return
    rest, step = len(shape) - dim, max_numel // inner
    for outer in np.ndindex(shape[: dim - 1]):
        for start in range(0, shape[dim - 1], step):
            size = min(step, shape[dim - 1] - start)
            yield (*outer, start, *(0,) * rest), (*(1,) * (dim - 1), size, *shape[dim:])


def regrouped(spans: Iterable[Span], sizes: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of some spans, end to end, in arrays of these sizes. Each array is overwritten by the next.

    All arrays share one buffer, because `torch.save` may keep its argument until a garbage collection (torch 2.9).
    """
    source = iter(spans)
    span, used = np.empty(0, np.uint8), 0
    buffer = np.empty(max(sizes, default=0), np.uint8)
    for size in sizes:
        out, done = buffer[:size], 0
        while done < size:
            if used == len(span):
                span, used = next(source).data, 0
            num = min(size - done, len(span) - used)
            out[done : done + num] = span[used : used + num]
            done, used = done + num, used + num
        yield out
    for _ in source:  # reads to the end, where `spans` raises if there are too many bytes
        pass


def _torch_dtype(entry: Entry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"{entry.name}: this torch has no dtype {entry.dtype!r}; --to safetensors needs none")
    return dtype


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
