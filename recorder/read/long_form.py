"""Statistics in long form, one value a row: as `pivot_table` and plotting libraries want them.

Imports pandas only inside the function that makes a frame.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ..columns import COUNTS, STATISTICS
from ..errors import LookupFailedError, not_installed

if TYPE_CHECKING:
    import pandas

LONG_KEY = (
    "step", "rank", "root", "module_path", "site", "name", "micro_step", "call", "repeat", "mode", "phase",
)  # fmt: skip
"""Columns that, with `statistic`, tell the values of a long frame apart."""
_MEASURES = (*STATISTICS, *COUNTS)


def choose_statistics(names: Sequence[str] | None) -> tuple[str, ...]:
    """The columns of a long frame, each once; all statistics and counts by default.

    Raises:
        LookupFailedError: there is no such statistic.
        ImportError: pandas is not installed.
    """
    chosen = tuple(dict.fromkeys(_MEASURES if names is None else names))
    for name in chosen:
        if name not in _MEASURES:
            near = difflib.get_close_matches(str(name), _MEASURES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; choose of {', '.join(_MEASURES)}"
            raise LookupFailedError(f"no statistic {name!r}{hint}")
    if importlib.util.find_spec("pandas") is None:
        raise ImportError(not_installed("to_long", "pandas", "analysis"))
    return chosen


def to_long(wide: Any, statistics: Sequence[str]) -> pandas.DataFrame:
    """A frame of `LONG_KEY`, `statistic` and `value`, out of a table with these columns and a column a statistic."""
    tables = []
    for name in statistics:
        some = wide.filter(wide.column(name).is_valid())
        value = some.column(name).cast(pa.float64())
        statistic = pa.array([name], pa.string()).take(pa.array([0] * some.num_rows, pa.int32()))
        tables.append(some.select(LONG_KEY).append_column("statistic", statistic).append_column("value", value))
    if not tables:
        tables = [wide.select(LONG_KEY).slice(0, 0).append_column("statistic", pa.array([], pa.string()))]
        tables[0] = tables[0].append_column("value", pa.array([], pa.float64()))
    frame: pandas.DataFrame = pa.concat_tables(tables).to_pandas()
    return frame
