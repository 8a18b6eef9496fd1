"""Assembles the payload of a global tensor from the rows of several ranks, as the tensor's plan says.

Payloads whose elements only have to be concatenated are never decoded. Only a few parts are in memory at a time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import native
from ..columns import parse_shape
from ..config import is_native_wanted
from ..errors import CorruptError, RunError
from ..format.codec import EncodedPayload, Encoder, check_size, concatenate, decode, max_encoded_bytes
from ..layout.placement import Fill, Plan
from ..layout.regions import Ints, Items, Source, assemble
from ..numerics.dtypes import item_bytes, numpy_dtype
from ..numerics.keys import by_key
from ..read.metadata import NONE, MetadataRows, Positions
from ..read.payload import Payloads, decode_payload
from ..records import PART_BYTES

_CACHE_BYTES = 512 << 20
"""The most bytes of decoded parts in the cache. A tensor cut along an inner dim needs a part of every rank."""

_BLOCK_ITEMS = 1 << 15
"""The number of elements that are reduced at a time: a float64 block fits the processor's cache."""


class PayloadPart(NamedTuple):
    """A part of a tensor's encoded payload, as stored in one row. The buffers in `data` are to be concatenated."""

    encoding: str
    data: list[memoryview]
    payload_bytes: int
    flat_offset: int

    def decoded(self, dtype: str) -> npt.NDArray[np.uint8]:
        """Decode this part, and return the bytes of its elements in a new, writable array."""
        data = self.data[0] if len(self.data) == 1 else b"".join(self.data)
        return decode_payload(self.encoding, data, self.payload_bytes, dtype)


class Tensor(NamedTuple):
    """The recorded tensor of one rank. A large tensor is in several rows, one for each part."""

    dtype: str
    shape: Ints
    positions: tuple[int, ...]
    ends: tuple[int, ...]
    """For each part: the index, in the flattened tensor, after the last element of the part."""


class Assembler:
    """Reads the payloads of loaded rows and assembles global tensors from them. Not thread-safe."""

    def __init__(self, rows: MetadataRows, payloads: Payloads) -> None:
        self._rows = rows
        self._payloads = payloads
        self._tensors: dict[int, Tensor | None] = {}
        self._decoded: OrderedDict[int, npt.NDArray[np.uint8]] = OrderedDict()
        self._further = self._find_further_parts()

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder("auto", kernels=native.load(is_native_wanted()))

    def tensor(self, position: int) -> Tensor | None:
        """Return the tensor whose part 0 is in the row at `position`. None if a part's payload was not recorded."""
        if position not in self._tensors:
            self._tensors[position] = self._find_tensor(position)
        return self._tensors[position]

    def has_payload(self, plan: Plan, positions: Sequence[int]) -> bool:
        """Return True if every chunk that the plan needs has a payload, or if an equal chunk of another rank does."""
        return plan.is_complete and all(
            self.tensor(self._held(plan, positions, term.chunk)) is not None
            for fill in plan.fills
            for term in fill.terms
        )

    def _held(self, plan: Plan, positions: Sequence[int], chunk: int) -> int:
        """Return the position of a chunk's row. If that row has no payload, use a replica's row that has one."""
        if self.tensor(positions[chunk]) is None:
            for copies in plan.copies:
                if copies[0] == chunk:
                    return next(
                        (positions[i] for i in copies if self.tensor(positions[i]) is not None), positions[chunk]
                    )
        return positions[chunk]

    def dtype(self, plan: Plan, positions: Sequence[int]) -> str:
        return plan.dtype or self._rows.text("dtype", positions[0]) or ""

    def array(self, plan: Plan, positions: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return all bytes of a global tensor, little-endian, in C order. Raise RunError if a part cannot be read."""
        dtype = self.dtype(plan, positions)
        self._check_claims(plan, positions)
        out = np.empty(math.prod(plan.global_shape) * item_bytes(dtype), np.uint8)
        try:
            self._fill(out.view(_items(dtype)), 0, plan, positions, dtype)
        finally:
            self._decoded.clear()  # the next value needs no part of this value
        return out

    def local(self, position: int) -> npt.NDArray[np.uint8]:
        """Return all decoded bytes of one rank's tensor, whose part 0 is in the row at `position`."""
        chunks = [self._decode(part) for part in self._whole(position).positions]
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def local_parts(self, position: int) -> Iterator[PayloadPart]:
        """Yield the stored (encoded) payload of one rank's tensor, one part at a time."""
        tensor = self._whole(position)
        for part, start in zip(tensor.positions, (0, *tensor.ends), strict=False):
            encoded = self._payloads.encoded(part)
            yield PayloadPart(encoded.encoding, [memoryview(encoded.data)], encoded.payload_bytes, start)

    def parts(self, plan: Plan, positions: Sequence[int]) -> Iterator[PayloadPart]:
        in_order = _as_runs(plan)
        if in_order is None:
            self._payloads.prepare(self._sources(plan, positions))
            try:
                yield from self._computed(plan, positions)
            finally:
                self._decoded.clear()
            return
        chunks = [self.tensor(self._held(plan, positions, fill.terms[0].chunk)) for fill in in_order]
        sources = [position for tensor in chunks if tensor is not None for position in tensor.positions]
        self._payloads.prepare(sources)
        width = item_bytes(self.dtype(plan, positions))
        start, waiting = 0, list[EncodedPayload]()
        for position in sources:
            payload = self._payloads.encoded(position)
            if waiting and _num_bytes(waiting) + payload.payload_bytes > PART_BYTES:
                yield from self._joined(waiting, start, width)
                start, waiting = start + _num_bytes(waiting) // width, []
            waiting.append(payload)
        if waiting:
            yield from self._joined(waiting, start, width)

    def _joined(self, payloads: list[EncodedPayload], start: int, width: int) -> Iterator[PayloadPart]:
        num_bytes = _num_bytes(payloads)
        joined = concatenate(payloads, width)
        if joined is None:
            data = np.concatenate([decode(p.encoding, p.data, p.payload_bytes, width) for p in payloads])
            yield self._encoded(data, width, start)
        else:
            yield PayloadPart(joined[0], joined[1], num_bytes, start)

    def _computed(self, plan: Plan, positions: Sequence[int]) -> Iterator[PayloadPart]:
        dtype, num_items = self.dtype(plan, positions), math.prod(plan.global_shape)
        width = item_bytes(dtype)
        step = PART_BYTES // width
        for low in range(0, max(num_items, 1), step):
            out = np.empty((min(num_items, low + step) - low) * width, np.uint8)
            self._fill(out.view(_items(dtype)), low, plan, positions, dtype)
            yield self._encoded(out, width, low)

    def _encoded(self, data: npt.NDArray[np.uint8], width: int, start: int) -> PayloadPart:
        out = np.empty(max_encoded_bytes(len(data)), np.uint8)
        encoding, num_bytes = self._encoder.encode(data, width, out)
        return PayloadPart(encoding, [out[:num_bytes].data], len(data), start)

    def _fill(self, out: Items, start: int, plan: Plan, positions: Sequence[int], dtype: str) -> None:
        sources = []
        for fill in plan.fills:
            if fill.is_copy:
                fetch = partial(self._fetch, self._held(plan, positions, fill.terms[0].chunk))
            else:
                fetch = partial(self._reduce, fill, plan.op, positions, dtype)
            sources.append(Source(fill.region, fetch))
        assemble(out, start, plan.global_shape, sources)

    def _fetch(self, position: int, low: int, high: int) -> Items:
        tensor = self._whole(position)
        items = _items(tensor.dtype)
        chunks = [
            self._decoded_part(part).view(items)[max(low - start, 0) : high - start]
            for part, start, end in zip(tensor.positions, (0, *tensor.ends), tensor.ends, strict=False)
            if low < end and start < high
        ]
        return chunks[0] if len(chunks) == 1 else np.concatenate([*chunks, np.empty(0, items)])

    def _reduce(self, fill: Fill, op: str, positions: Sequence[int], dtype: str, low: int, high: int) -> Items:
        """Reduce elements of several ranks in float64, and round once. Integers are reduced as integers."""
        terms = []
        for chunk, factor in fill.terms:
            tensor = self._whole(positions[chunk])
            values = self._fetch(positions[chunk], low, high).view(numpy_dtype(tensor.dtype))
            terms.append((values, tensor.dtype, factor))
        out = np.empty(high - low, numpy_dtype(dtype))
        _, of_first, factor = terms[0]
        # A factor that is a power of two changes only the exponent, so float32 gives the same product as float64.
        is_exact = len(terms) == 1 and of_first in ("float32", "bfloat16", "float16")
        is_exact &= math.frexp(factor)[0] == 0.5 and 2**-16 <= factor < 1
        with np.errstate(all="ignore"):  # an overflow gives inf, and a signalling NaN becomes a quiet NaN
            for start in range(0, len(out), _BLOCK_ITEMS):
                total: npt.NDArray[Any] | None = None
                for values, kind, factor in terms:
                    block = values[start : start + _BLOCK_ITEMS]
                    block = block.astype(np.float32) if is_exact else _widened(block, kind, is_scaled=factor != 1.0)
                    if factor != 1.0:
                        block *= factor
                    total = block if total is None else _OPS[op](total, block)
                assert total is not None
                _put(out[start : start + _BLOCK_ITEMS], total)
        return out.view(_items(dtype))

    def _decoded_part(self, position: int) -> npt.NDArray[np.uint8]:
        decoded = self._decoded.get(position)
        if decoded is None:
            decoded = self._decoded[position] = self._decode(position)
            while len(self._decoded) > 1 and sum(map(len, self._decoded.values())) > _CACHE_BYTES:
                self._decoded.popitem(last=False)
        else:
            self._decoded.move_to_end(position)
        return decoded

    def _check_claims(self, plan: Plan, positions: Sequence[int]) -> None:
        """Compare the sizes in the rows with the headers of the encoded parts, before memory is allocated."""
        sources = self._sources(plan, positions)
        self._payloads.prepare(sources)
        for position in sources:
            payload = self._payloads.encoded(position)
            dtype = self._rows.text("dtype", position) or ""
            try:
                check_size(payload.encoding, payload.data, payload.payload_bytes, item_bytes(dtype))
            except RunError as error:
                raise type(error)(f"{self._where(position)}: {error}") from error

    def _sources(self, plan: Plan, positions: Sequence[int]) -> list[int]:
        terms = [term for fill in plan.fills for term in fill.terms]
        return [
            position for term in terms for position in self._whole(self._held(plan, positions, term.chunk)).positions
        ]

    def _decode(self, position: int) -> npt.NDArray[np.uint8]:
        """Decode a part. Raise CorruptError if its length is not the row's `payload_bytes`: the index is wrong."""
        decoded = self._payloads.decoded(position)
        if len(decoded) != self._rows.numbers("payload_bytes")[position]:
            raise CorruptError(f"{self._where(position)}: its payload is not as long as its index says")
        return decoded

    def _whole(self, position: int) -> Tensor:
        """Return the tensor of a row. Raise CorruptError if its parts are missing or contradict each other."""
        tensor = self.tensor(position)
        if tensor is None:
            raise CorruptError(f"{self._where(position)}: some of its parts are missing, or contradict each other")
        return tensor

    def _where(self, position: int) -> str:
        return f"{self._rows.shard_of(position)[0].path}, row seq={int(self._rows.numbers('seq')[position])}"

    def _find_further_parts(self) -> dict[tuple[int, int], list[int]]:
        rows = self._rows
        parts = rows.numbers("part")
        at: Positions = np.flatnonzero(parts > 0)
        writers = rows.writer_numbers(at).tolist()
        bases = (rows.numbers("seq")[at] - parts[at]).tolist()
        return by_key(zip(zip(writers, bases, strict=True), at.tolist(), strict=True))

    def _find_tensor(self, position: int) -> Tensor | None:
        rows = self._rows
        num_bytes = int(rows.numbers("payload_bytes")[position])
        if num_bytes == NONE:
            return None
        dtype, shape = rows.text("dtype", position) or "", parse_shape(rows.text("shape", position))
        width, total = item_bytes(dtype), math.prod(shape)
        positions, ends = [position], [num_bytes // width]
        if ends[-1] < total:
            writer = int(rows.writer_numbers(np.array([position]))[0])
            further = self._further.get((writer, int(rows.numbers("seq")[position])), [])
            for part in sorted(further, key=lambda at: int(rows.numbers("part")[at])):
                if int(rows.numbers("part")[part]) != len(positions) or rows.numbers("payload_bytes")[part] == NONE:
                    return None
                positions.append(part)
                ends.append(ends[-1] + int(rows.numbers("payload_bytes")[part]) // width)
        if ends[-1] < total:
            return None
        if ends[-1] > total or num_bytes % width:
            raise CorruptError(f"{self._where(position)}: payload and shape do not agree")
        return Tensor(dtype, shape, tuple(positions), tuple(ends))


_OPS: dict[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}


def _as_runs(plan: Plan) -> list[Fill] | None:
    """Return the fills (copied regions) in order if they are consecutive runs of the flattened tensor; else None."""
    if not all(fill.is_copy for fill in plan.fills):
        return None
    runs = []
    for fill in plan.fills:
        run = fill.region.as_run(plan.global_shape)
        if run is None:
            return None
        runs.append((run, fill))
    runs.sort(key=lambda pair: pair[0])
    end = 0
    for (start, stop), _ in runs:
        if start != end and start != stop:
            return None
        end = max(end, stop)
    return [fill for _, fill in runs] if end == math.prod(plan.global_shape) else None


def _widened(values: npt.NDArray[Any], dtype: str, *, is_scaled: bool) -> npt.NDArray[Any]:
    if values.dtype.names:  # complex32 is a record of two halves
        return values["real"].astype(np.float64) + 1j * values["imag"].astype(np.float64)
    if dtype.startswith("complex"):
        return values.astype(np.complex128)
    if dtype.startswith(("float", "bfloat")) or is_scaled:
        return values.astype(np.float64)
    return values.astype(np.uint64 if dtype.startswith("uint") else np.int64)


def _items(dtype: str) -> np.dtype[Any]:
    """Return a dtype as wide as the tensor's elements, for copying and comparing them as plain bits."""
    width = item_bytes(dtype)
    return np.dtype(f"<u{width}") if width <= 8 else np.dtype(f"V{width}")


def _put(out: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
    if out.dtype.names:
        out["real"], out["imag"] = values.real, values.imag
    else:
        out[...] = values


def as_items(data: npt.NDArray[np.uint8], dtype: str) -> Items:
    """Return a view of bytes as plain elements as wide as the dtype, which can be compared bit by bit."""
    return data.view(_items(dtype))


def _num_bytes(payloads: Sequence[EncodedPayload]) -> int:
    return sum(payload.payload_bytes for payload in payloads)
