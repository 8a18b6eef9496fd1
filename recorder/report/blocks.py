"""A block: a named piece of what the page draws, as JSON and typed arrays, and its bytes. Never reads a run.

The page of a file holds its blocks as base64; a server would send the bytes as they are.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

VERSION = 1
"""Raised where a page of an older version could not read a block."""
_LEVEL = 9
_ALIGN_BYTES = 8
_TYPES = {"uint8", "uint16", "int16", "uint32", "int32", "float32", "float64"}
"""Those that have a typed array in a browser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A named piece of what is drawn."""

    name: str
    """Letters, digits, ``-``, ``.`` and ``/``: ours, and never a text from a run."""
    data: Mapping[str, Any]
    """What becomes JSON; numbers that are not finite become null."""
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Its bytes, deflated without a header (`deflate-raw` of a browser).

        Inside: the length of a JSON document as a little-endian uint32, the document, zeros up to a multiple of 8, and
        the arrays one after the other, each from such a multiple on, where the document says.
        """
        entries, pieces, at = [], [], 0
        for name, array in self.arrays.items():
            assert array.dtype.name in _TYPES, f"{self.name}: {name} is {array.dtype}, which browsers do not have"
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            entries.append({"name": name, "type": array.dtype.name, "shape": list(array.shape), "offset": at})
            pieces.append(little.tobytes() + bytes(-little.nbytes % _ALIGN_BYTES))
            at += len(pieces[-1])
        head = {"version": VERSION, "name": self.name, "data": _finite(self.data), "arrays": entries}
        text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
        start = len(text).to_bytes(4, "little") + text
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        whole = start + bytes(-len(start) % _ALIGN_BYTES) + b"".join(pieces)
        return packer.compress(whole) + packer.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
