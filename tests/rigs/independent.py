"""A second reader, written from FORMAT.md alone with numpy, zstandard and pyarrow: it must not import the package.

Slow and short on purpose. Payloads are decoded by the page's own lines of Python.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

PAGE = Path(__file__).parents[2] / "recorder" / "format" / "FORMAT.md"


def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text between a heading and the next one of the same or a higher level."""
    match = re.search(rf"^(#+) (?:\d+\. )?{re.escape(title)}\n(.*?)(?=^#{{1,3}} |\Z)", page(), re.MULTILINE | re.DOTALL)
    assert match is not None, f"FORMAT.md has no section {title!r}"
    return match[2]


def table(text: str) -> list[list[str]]:
    """The body rows of every table in a piece of the page, cell by cell."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {i for i, row in enumerate(rows) if i + 1 < len(rows) and set(rows[i + 1][0]) == {"-"}}
    return [row for i, row in enumerate(rows) if i not in heads and set(row[0]) != {"-"}]


def words(text: str) -> list[str]:
    """What stands in `code marks`."""
    return re.findall(r"`([^`\n]+)`", text)


def decoders() -> dict[str, Any]:
    """The page's lines of Python, run."""
    code = re.search(r"```python\n(.*?)```", section("Payloads"), re.DOTALL)
    assert code is not None, "FORMAT.md shows no Python for payloads"
    names: dict[str, Any] = {"np": np, "zstandard": zstandard}
    exec(code[1], names)
    return names


def payload(row: dict[str, Any], rows: list[dict[str, Any]], item_bytes: int) -> bytes:
    """The decoded bytes of a row."""
    decode = decoders()
    if row["encoding"] == "ref":
        row = decode["ref"](row["data"], rows)
    decoded: bytes = decode[row["encoding"]](row["data"], item_bytes)
    assert len(decoded) == row["payload_bytes"]
    return decoded


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def header(metadata: Any) -> dict[str, Any]:
    """The header of a batch, its checksum verified."""
    text = metadata[b"recorder_batch"]
    assert metadata[b"recorder_batch_crc32c"] == b"%08x" % crc32c(text)
    fields: dict[str, Any] = json.loads(text)
    return fields


def checksums(column: Any) -> list[int | None]:
    """The list that the header must hold for a column of at least one row."""
    validity, *buffers = column.buffers()
    num_rows = len(column)
    if str(column.type) in ("string", "binary", "large_binary"):
        width = 8 if str(column.type) == "large_binary" else 4
        offsets = buffers[0].to_pybytes()[: (num_rows + 1) * width]
        num_bytes = int.from_bytes(offsets[-width:], "little")
        used = [offsets, buffers[1].to_pybytes()[:num_bytes] if num_bytes else b""]
    else:
        width = {"int32": 4, "int64": 8, "double": 8}[str(column.type)]
        used = [buffers[0].to_pybytes()[: num_rows * width]]
    is_null = [value is None for value in column.to_pylist()]
    first = crc32c(validity.to_pybytes()[: -(-num_rows // 8)]) if any(is_null) else None
    return [first, *[crc32c(data) for data in used]]


def constant(dim: int) -> int:
    """C_d by the page's formula."""
    size = 1 << 64
    z = (dim + 1) * 0x9E3779B97F4A7C15 % size
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % size
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % size
    z = z ^ (z >> 31)
    return z >> 3 << 3 | 0b101


def fingerprint(data: bytes, item_bytes: int, shape: tuple[int, ...], offsets: tuple[int, ...] | None = None) -> int:
    """The page's sum, element by element."""
    offsets = offsets or (0,) * len(shape)
    width = min(item_bytes, 4)
    if item_bytes > 4:
        shape, offsets = (*shape, item_bytes // 4), (*offsets, 0)
    values: npt.NDArray[Any] = np.frombuffer(data, f"<i{width}").reshape(shape)
    total = 0
    for index in np.ndindex(shape):
        term = int(values[index])
        for dim in range(len(shape)):
            term *= pow(constant(dim), index[-1 - dim] + offsets[-1 - dim], 1 << 64)
        total += term
    return total % (1 << 64)
