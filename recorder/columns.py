"""The registry of columns: type, version and role of each, and how the values of several rows are combined into one.

All code that reads, merges, groups or prints rows uses this registry, and its parsers of the columns `shape` and
`note`. A column that a minor version adds is one entry of `COLUMNS` and one line of FORMAT.md: readers give nulls for
an older file, and ignore a column that they do not know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import pyarrow as pa

from .errors import CorruptError, UnsupportedError
from .records import PART_BYTES
from .sites import FORMAT_VERSION, MAX_COUNT

VERSION_KEY = b"recorder_format"
"""The key of the schema's metadata whose value is the version of the file, such as ``1.2``."""

MODES = ("train", "eval", "no_grad")
PHASES = ("forward", "recompute", "backward", "optimizer")
PLAIN = "plain"
"""The encoding of a payload that consists of the tensor's bytes."""
SCOPES = ("local", "reduced", "unsharded", "final")


class Role(Enum):
    """The purpose of a column."""

    KEY = "key"
    """The column is part of the key that identifies one value of a rank in an attempt."""
    LAYOUT = "layout"
    """The column says which piece of a global tensor, or of a large tensor written in parts, the row has."""
    STATISTIC = "statistic"
    """The column is a number of type float64 that is computed from the elements."""
    COUNT = "count"
    """The column is the number of elements that have a property."""
    DETAIL = "detail"
    """The column has bytes that describe the elements in more detail than single numbers."""
    PAYLOAD = "payload"
    """The column contains the elements, or says how they are encoded."""
    ABOUT = "about"
    """The column states another fact about the value or the row."""


class Combine(Enum):
    """How the rows of several pieces, ranks or steps are combined into one value of a column."""

    FIRST = "first"
    """The value is that of the first row."""
    NOTHING = "nothing"
    """The value is null, or 0 in a column without nulls: the column has no meaning for a global tensor."""
    ANEW = "anew"
    """The value is computed from more than this column, by the code that makes global rows (`globalview.view`)."""
    SUM = "sum"
    """The values are added. Lists are added element by element."""
    MIN = "min"
    MAX = "max"
    MOMENTS = "moments"
    """The value is computed by a formula over several statistics, in `numerics.moments`."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a shard."""

    name: str
    type: Any
    """The type of the column, a flat Arrow type."""
    role: Role
    combine: Combine
    _: KW_ONLY
    since: int = 0
    """The minor version that added the column. Earlier files lack it, and readers give nulls."""
    is_required: bool = False
    """True if the column is never null. A column that a minor version adds cannot be required."""
    lowest: int | None = 0
    """The least value of an integer column; None for a column that is no count."""
    highest: int = MAX_COUNT - 1
    degree: int = 1
    """The exponent k: if all elements are multiplied by a factor, the statistic grows by the factor's k-th power."""
    has_sign: bool = True
    """Whether a negative factor changes the sign of a statistic."""
    is_nonfinite: bool = False
    """Whether the column counts elements that the statistics leave out."""

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The least and greatest allowed value of an integer column that counts; None for other columns."""
        if self.lowest is None or not pa.types.is_integer(self.type):
            return None
        return self.lowest, min(self.highest, (1 << self.type.bit_width - 1) - 1)


_INT32, _INT64, _FLOAT64, _TEXT = pa.int32(), pa.int64(), pa.float64(), pa.string()
_KEY, _LAYOUT, _STATISTIC, _COUNT = Role.KEY, Role.LAYOUT, Role.STATISTIC, Role.COUNT
_DETAIL, _PAYLOAD, _ABOUT = Role.DETAIL, Role.PAYLOAD, Role.ABOUT

COLUMNS = (
    Column("seq", _INT64, _ABOUT, Combine.FIRST, is_required=True),
    Column("attempt", _INT32, _ABOUT, Combine.FIRST, is_required=True),
    Column("step", _INT64, _KEY, Combine.FIRST, is_required=True, lowest=-MAX_COUNT),  # a user may name a step -1
    Column("micro_step", _INT32, _KEY, Combine.FIRST),
    Column("call", _INT32, _KEY, Combine.FIRST, is_required=True),
    Column("repeat", _INT32, _KEY, Combine.FIRST, is_required=True),
    Column("mode", _TEXT, _KEY, Combine.FIRST, is_required=True),
    Column("phase", _TEXT, _KEY, Combine.FIRST, is_required=True),
    Column("rank", _INT32, _ABOUT, Combine.NOTHING),
    Column("root", _TEXT, _KEY, Combine.FIRST, is_required=True),
    Column("module_path", _TEXT, _KEY, Combine.FIRST, is_required=True),
    Column("site", _TEXT, _KEY, Combine.FIRST, is_required=True),
    Column("name", _TEXT, _KEY, Combine.FIRST, is_required=True),
    Column("scope", _TEXT, _ABOUT, Combine.FIRST),
    Column("dtype", _TEXT, _ABOUT, Combine.ANEW, is_required=True),
    Column("shape", _TEXT, _ABOUT, Combine.ANEW, is_required=True),
    Column("numel", _INT64, _ABOUT, Combine.ANEW, is_required=True),
    Column("global_shape", _TEXT, _LAYOUT, Combine.NOTHING),
    Column("offsets", _TEXT, _LAYOUT, Combine.NOTHING),
    Column("placements", _TEXT, _LAYOUT, Combine.NOTHING),
    Column("mesh", _TEXT, _LAYOUT, Combine.NOTHING),
    Column("part", _INT32, _LAYOUT, Combine.NOTHING, is_required=True),
    Column("flat_offset", _INT64, _LAYOUT, Combine.NOTHING, is_required=True),
    Column("layout_source", _TEXT, _ABOUT, Combine.ANEW),
    Column("scale", _TEXT, _ABOUT, Combine.ANEW),
    Column("ranks_present", _TEXT, _ABOUT, Combine.ANEW),
    Column("ranks_expected", _TEXT, _ABOUT, Combine.ANEW),
    Column("note", _TEXT, _ABOUT, Combine.ANEW),
    Column("mean", _FLOAT64, _STATISTIC, Combine.MOMENTS),
    Column("std", _FLOAT64, _STATISTIC, Combine.MOMENTS, has_sign=False),
    Column("min", _FLOAT64, _STATISTIC, Combine.MIN),
    Column("max", _FLOAT64, _STATISTIC, Combine.MAX),
    Column("absmax", _FLOAT64, _STATISTIC, Combine.MAX, has_sign=False),
    Column("l2", _FLOAT64, _STATISTIC, Combine.MOMENTS, has_sign=False),
    Column("sum", _FLOAT64, _STATISTIC, Combine.SUM),
    Column("sum_sq", _FLOAT64, _STATISTIC, Combine.SUM, degree=2),
    Column("sum_abs", _FLOAT64, _STATISTIC, Combine.SUM, since=2, has_sign=False),
    Column("sum_fourth", _FLOAT64, _STATISTIC, Combine.SUM, since=2, degree=4),
    Column("nan_count", _INT64, _COUNT, Combine.SUM, is_nonfinite=True),
    Column("inf_count", _INT64, _COUNT, Combine.SUM, is_nonfinite=True),
    Column("zero_count", _INT64, _COUNT, Combine.SUM),
    Column("histogram", pa.binary(), _DETAIL, Combine.ANEW, since=2),
    Column("units", pa.binary(), _DETAIL, Combine.ANEW, since=3),
    Column("fingerprint", _TEXT, _ABOUT, Combine.ANEW),
    Column("encoding", _TEXT, _PAYLOAD, Combine.ANEW),
    Column("payload_bytes", _INT64, _PAYLOAD, Combine.ANEW, highest=PART_BYTES),
    Column("data", pa.large_binary(), _PAYLOAD, Combine.ANEW),
    Column("time_ns", _INT64, _ABOUT, Combine.FIRST, is_required=True, lowest=None),
)
"""All columns, in the order of the files. FORMAT.md defines the meaning of each column."""

COLUMN_OF: Mapping[str, Column] = {column.name: column for column in COLUMNS}
STATISTIC_COLUMNS = tuple(column for column in COLUMNS if column.role is Role.STATISTIC)
STATISTICS = tuple(column.name for column in STATISTIC_COLUMNS)
COUNTS = tuple(column.name for column in COLUMNS if column.role is Role.COUNT)
DETAILS = tuple(column.name for column in COLUMNS if column.role is Role.DETAIL)
NONFINITE = tuple(column.name for column in COLUMNS if column.is_nonfinite)
PAYLOAD = tuple(column.name for column in COLUMNS if column.role is Role.PAYLOAD)
KEY = ("root", "module_path", "site", "name", "phase", "mode", "step", "micro_step", "call", "repeat")
"""The columns of `Role.KEY`, which identify a value of one rank in one attempt (FORMAT.md, section "Time")."""
MEASURED = "nan_count"
"""The column that is null exactly in rows whose elements were not read; other columns may be null for other reasons."""
TIME_ORDER = ("attempt", "step", "rank", "seq")
"""The columns by which rows are ordered in time, because the order of rows in a file is not the order of time."""
NOT_OF_BATCH = "its parameters are the rank's own, as experts' are: which rows of the batch it was given is not known"
HANDED_ON = "between_stages"
"""The member of a note that has the stage and the number of stages of a value passed between pipeline stages."""
BATCH_OR_ONE = "batch_or_one"
"""The member of a note of a value that all ranks have alike where each has one sample: a batch, or one for all."""
_MAX_SHAPE_TEXT = 4096
_MAX_NUMEL = 1 << 48
"""The bound on the product of the nonzero sizes, so that the elements of many ranks together fit an int64."""
OF_FIRST_PART = frozenset((*STATISTICS, *COUNTS, *DETAILS, "fingerprint"))
"""The columns that describe the complete local tensor, so that only part 0 has them."""


def schema_of(minor: int) -> pa.Schema:
    """Return the schema that files of a minor version have."""
    fields = [pa.field(one.name, one.type, nullable=not one.is_required) for one in COLUMNS if one.since <= minor]
    return pa.schema(fields, metadata={VERSION_KEY: b"%d.%d" % (FORMAT_VERSION[0], minor)})


SCHEMA = schema_of(FORMAT_VERSION[1])
"""The schema of the newest version, with one row per observed tensor (or per part of a large tensor)."""
SCHEMAS = tuple(
    schema_of(minor)
    for minor in range(FORMAT_VERSION[1], -1, -1)
    if minor == FORMAT_VERSION[1] or any(column.since == minor + 1 for column in COLUMNS)
)
"""The schemas of all versions that differ in their columns, newest first."""

METADATA_COLUMNS = tuple(name for name in SCHEMA.names if name != "data")
"""The columns of an index, which are all columns except the payload."""


def lacks_rightly(schema: pa.Schema, column: Column) -> bool:
    """Whether a file of this schema may lack the column, because its version came before the one that added it."""
    version: bytes = (schema.metadata or {}).get(VERSION_KEY, b"")
    minor = version.partition(b".")[2]
    return column.since > (int(minor) if minor.isdigit() else 0)


def parse_shape(text: Any) -> tuple[int, ...]:
    """Return the shape in a column's text; raises CorruptError if the text is no JSON list of sizes."""
    if not isinstance(text, str) or len(text) > _MAX_SHAPE_TEXT:
        raise CorruptError("shape is no short text")
    try:
        sizes = json.loads(text)
    except (ValueError, RecursionError):
        sizes = None
    if not isinstance(sizes, list) or not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        raise CorruptError(f"shape {text[:80]!r} is no JSON list of sizes")
    if len(sizes) > 64:
        raise UnsupportedError(f"a shape of {len(sizes)} dims; numpy has at most 64")
    if math.prod([size for size in sizes if size]) > _MAX_NUMEL:
        raise CorruptError(f"shape {text[:80]} is of more elements than any memory holds")
    return tuple(sizes)


def note_members(note: str | None) -> dict[str, Any]:
    """Return the members of a row's note, which is untrusted input; none if the text is no JSON object."""
    try:
        parsed = json.loads(note) if note else {}
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


@lru_cache(maxsize=4096)
def stage_of(note: str | None) -> tuple[int | None, bool]:
    """Return the pipeline stage in a row's note, or None, and whether the row's value is passed between stages."""
    members = note_members(note)
    stage, mark = members.get("stage"), members.get(HANDED_ON)
    if isinstance(mark, list) and len(mark) == 2 and type(mark[0]) is int:
        return mark[0], True
    return (stage if type(stage) is int else None), False
