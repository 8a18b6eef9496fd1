"""The registry of columns: their types, versions and roles, and how the values of several rows are combined.

All code that reads, merges, groups or prints rows uses this registry. The columns `shape` and `note` are parsed here.
To add a column in a minor version, add an entry to `COLUMNS` and a line to FORMAT.md. Readers give nulls for an older
file, and ignore unknown columns.
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
"""The key of the format's version, such as ``1.2``, in the metadata of a shard's schema."""

MODES = ("train", "eval", "no_grad")
PHASES = ("forward", "recompute", "backward", "optimizer")
PLAIN = "plain"
"""The encoding whose payload is the tensor's bytes, unchanged."""
SCOPES = ("local", "reduced", "unsharded", "final")


class Role(Enum):
    """The purpose of a column."""

    KEY = "key"
    """The column is part of the key of a value of one rank in one attempt."""
    LAYOUT = "layout"
    """The column says which piece the row has: of a global tensor, or of a large tensor written in parts."""
    STATISTIC = "statistic"
    """The column is a float64 computed from the elements."""
    COUNT = "count"
    """The column counts elements with some property, such as NaN."""
    DETAIL = "detail"
    """The column describes the elements in encoded bytes, in more detail than single numbers."""
    PAYLOAD = "payload"
    """The column contains the elements, or says how they are encoded."""
    ABOUT = "about"
    """The column states another fact about the value or the row."""


class Combine(Enum):
    """How values of a column are combined into one, for rows of several pieces, ranks or steps."""

    FIRST = "first"
    """The combined value is that of the first row."""
    NOTHING = "nothing"
    """The combined value is null, or 0 in a column without nulls. The column means nothing for a global tensor."""
    ANEW = "anew"
    """The combined value depends on more than this column. `globalview.view` computes it for global rows."""
    SUM = "sum"
    """The values of the rows are added. Lists are added element by element."""
    MIN = "min"
    MAX = "max"
    MOMENTS = "moments"
    """The combined value follows from several statistics, by a formula in `numerics.moments`."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of shards."""

    name: str
    type: Any
    """The type, a flat Arrow type."""
    role: Role
    combine: Combine
    _: KW_ONLY
    since: int = 0
    """The minor version of the format that added the column. For earlier files, readers give nulls."""
    is_required: bool = False
    """True if the column is never null. A column that a minor version adds cannot be required."""
    lowest: int | None = 0
    """The least allowed value of an integer column. None if the column has no bounds."""
    highest: int = MAX_COUNT - 1
    degree: int = 1
    """The exponent k of a statistic. If all elements are multiplied by f, the statistic is multiplied by f ** k."""
    has_sign: bool = True
    """If elements are multiplied by f, the statistic is multiplied by f**degree (True) or abs(f)**degree (False)."""
    is_nonfinite: bool = False
    """True if the column counts NaN or infinite elements. Statistics leave these elements out."""

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The least and the greatest allowed value of an integer column. None for other types and without bounds."""
        if self.lowest is None or not pa.types.is_integer(self.type):
            return None
        return self.lowest, min(self.highest, (1 << self.type.bit_width - 1) - 1)


_INT32, _INT64, _FLOAT64, _TEXT = pa.int32(), pa.int64(), pa.float64(), pa.string()
_KEY, _LAYOUT, _STATISTIC, _COUNT = Role.KEY, Role.LAYOUT, Role.STATISTIC, Role.COUNT
_DETAIL, _PAYLOAD, _ABOUT = Role.DETAIL, Role.PAYLOAD, Role.ABOUT

COLUMNS = (
    Column("seq", _INT64, _ABOUT, Combine.FIRST, is_required=True),
    Column("attempt", _INT32, _ABOUT, Combine.FIRST, is_required=True),
    Column("step", _INT64, _KEY, Combine.FIRST, is_required=True, lowest=-MAX_COUNT),  # a program may set step -1
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
"""All columns, in the order of shards. FORMAT.md defines their meanings."""

COLUMN_OF: Mapping[str, Column] = {column.name: column for column in COLUMNS}
STATISTIC_COLUMNS = tuple(column for column in COLUMNS if column.role is Role.STATISTIC)
STATISTICS = tuple(column.name for column in STATISTIC_COLUMNS)
COUNTS = tuple(column.name for column in COLUMNS if column.role is Role.COUNT)
DETAILS = tuple(column.name for column in COLUMNS if column.role is Role.DETAIL)
NONFINITE = tuple(column.name for column in COLUMNS if column.is_nonfinite)
PAYLOAD = tuple(column.name for column in COLUMNS if column.role is Role.PAYLOAD)
KEY = ("root", "module_path", "site", "name", "phase", "mode", "step", "micro_step", "call", "repeat")
"""The columns of `Role.KEY`. They identify a value of one rank in one attempt (FORMAT.md, section "Time")."""
MEASURED = "nan_count"
"""The column that is null exactly when the row's elements were not read. Other columns may be, too."""
TIME_ORDER = ("attempt", "step", "rank", "seq")
"""The columns that order rows in time. Rows in a file may be in another order."""
NOT_OF_BATCH = "its parameters are the rank's own, as experts' are: which rows of the batch it was given is not known"
HANDED_ON = "between_stages"
"""The key in a row's `note` (JSON) for a value passed between pipeline stages, with [stage, number of stages]."""
BATCH_OR_ONE = "batch_or_one"
"""The key in a row's `note` if ranks with one sample each have equal values: either a batch, or one shared value."""
_MAX_SHAPE_TEXT = 4096
_MAX_NUMEL = 1 << 48
"""The largest product of a shape's nonzero sizes. Sums of such products over many ranks still fit in int64."""
OF_FIRST_PART = frozenset((*STATISTICS, *COUNTS, *DETAILS, "fingerprint"))
"""The columns that describe the complete local tensor. If its payload is in parts, only part 0's row has them."""


def schema_of(minor: int) -> pa.Schema:
    """Return the schema of the shards of a minor version of the format."""
    fields = [pa.field(one.name, one.type, nullable=not one.is_required) for one in COLUMNS if one.since <= minor]
    return pa.schema(fields, metadata={VERSION_KEY: b"%d.%d" % (FORMAT_VERSION[0], minor)})


SCHEMA = schema_of(FORMAT_VERSION[1])
"""The schema of the newest version. A row is one observed tensor, or one part of a large tensor."""
SCHEMAS = tuple(
    schema_of(minor)
    for minor in range(FORMAT_VERSION[1], -1, -1)
    if minor == FORMAT_VERSION[1] or any(column.since == minor + 1 for column in COLUMNS)
)
"""The schemas of all versions of the format, newest first. Versions with equal columns share one schema."""

METADATA_COLUMNS = tuple(name for name in SCHEMA.names if name != "data")
"""The columns of a shard's index: all but `data`, the payload."""


def lacks_rightly(schema: pa.Schema, column: Column) -> bool:
    """Return whether a file with this schema may lack the column, because the file's version is older."""
    version: bytes = (schema.metadata or {}).get(VERSION_KEY, b"")
    minor = version.partition(b".")[2]
    return column.since > (int(minor) if minor.isdigit() else 0)


def parse_shape(text: Any) -> tuple[int, ...]:
    """Parse the column `shape` of a row. Raises CorruptError if the text is no JSON list of sizes."""
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
        raise CorruptError(f"shape {text[:80]} has more elements than any memory can hold")
    return tuple(sizes)


def note_members(note: str | None) -> dict[str, Any]:
    """Parse a row's note, which is untrusted input. Return an empty dict if it is no JSON object."""
    try:
        parsed = json.loads(note) if note else {}
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


@lru_cache(maxsize=4096)
def stage_of(note: str | None) -> tuple[int | None, bool]:
    """Return the pipeline stage in a row's note (None without one), and whether the value is passed between stages."""
    members = note_members(note)
    stage, mark = members.get("stage"), members.get(HANDED_ON)
    if isinstance(mark, list) and len(mark) == 2 and type(mark[0]) is int:
        return mark[0], True
    return (stage if type(stage) is int else None), False
