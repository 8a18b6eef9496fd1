"""The row of format version 1: column names, Arrow types, and the words that columns may hold."""

from __future__ import annotations

import pyarrow as pa

FORMAT_NAME = "recorder"
FORMAT_VERSION = (1, 1)
"""Major, minor. Readers refuse another major and accept any minor."""

SITES = ("input", "output", "grad_input", "grad_output", "param", "grad", "buffer", "optim", "tap", "scalar")
MODES = ("train", "eval", "no_grad")
PHASES = ("forward", "recompute", "backward", "optimizer")
SCOPES = ("local", "reduced", "unsharded", "final")
STATISTICS = ("mean", "std", "min", "max", "absmax", "l2", "sum", "sum_sq")
COUNTS = ("nan_count", "inf_count", "zero_count")

_REQUIRED = {"nullable": False}

SCHEMA = pa.schema(
    [
        pa.field("seq", pa.int64(), **_REQUIRED),
        pa.field("attempt", pa.int32(), **_REQUIRED),
        pa.field("step", pa.int64(), **_REQUIRED),
        pa.field("micro_step", pa.int32()),
        pa.field("call", pa.int32(), **_REQUIRED),
        pa.field("repeat", pa.int32(), **_REQUIRED),
        pa.field("mode", pa.string(), **_REQUIRED),
        pa.field("phase", pa.string(), **_REQUIRED),
        pa.field("rank", pa.int32()),
        pa.field("root", pa.string(), **_REQUIRED),
        pa.field("module_path", pa.string(), **_REQUIRED),
        pa.field("site", pa.string(), **_REQUIRED),
        pa.field("name", pa.string(), **_REQUIRED),
        pa.field("scope", pa.string()),
        pa.field("dtype", pa.string(), **_REQUIRED),
        pa.field("shape", pa.string(), **_REQUIRED),
        pa.field("numel", pa.int64(), **_REQUIRED),
        pa.field("global_shape", pa.string()),
        pa.field("offsets", pa.string()),
        pa.field("placements", pa.string()),
        pa.field("mesh", pa.string()),
        pa.field("part", pa.int32(), **_REQUIRED),
        pa.field("flat_offset", pa.int64(), **_REQUIRED),
        pa.field("layout_source", pa.string()),
        pa.field("scale", pa.string()),
        pa.field("ranks_present", pa.string()),
        pa.field("ranks_expected", pa.string()),
        pa.field("note", pa.string()),
        *[pa.field(name, pa.float64()) for name in STATISTICS],
        *[pa.field(name, pa.int64()) for name in COUNTS],
        pa.field("fingerprint", pa.string()),
        pa.field("encoding", pa.string()),
        pa.field("payload_bytes", pa.int64()),
        pa.field("data", pa.large_binary()),
        pa.field("time_ns", pa.int64(), **_REQUIRED),
    ],
    metadata={b"recorder_format": b"%d.%d" % FORMAT_VERSION},
)
"""One row per observed tensor (or per part of a large one). FORMAT.md says what each column means."""

LIGHT_COLUMNS = tuple(name for name in SCHEMA.names if name != "data")
"""Everything but the payload: what an index holds."""
