"""Owns which steps of a run are asked about its leaves: all of a small one, else a few that tell most.

Must never depend on what is asked, nor look at more than one rank's rows: ranks record alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .light import text_keys
from .writers import RecordedWriter

MAX_ROWS = 50_000
"""Rows of a run, of all ranks, of which every step is asked: half a second."""
_COLUMNS = ("step", "site", "mode", "payload_bytes", "min", "max", "nan_count")
_SITES = ("input", "output", "tap")
_NUM_STEPS = 4
"""Of each site in each mode."""
_MAX_STEPS = 12


def choose_steps(writers: Sequence[RecordedWriter]) -> list[int] | None:
    """The steps to be asked, ascending; None for all."""
    if sum(writer.num_rows for writer in writers) <= MAX_ROWS:
        return None
    ranks = [writer.rank for writer in writers if writer.rank is not None and writer.num_rows]
    shards = [shard for writer in writers if writer.rank == min(ranks, default=None) for shard in writer.shards]
    batches = [batch for shard in shards for batch in shard.columns(_COLUMNS)]
    if not batches:
        return []
    columns = {name: pa.chunked_array([batch.column(name) for batch in batches]) for name in _COLUMNS}
    steps = columns["step"].to_numpy()
    sites, modes = text_keys(columns["site"]), text_keys(columns["mode"])
    low, high = (columns[name].fill_null(np.nan).to_numpy() for name in ("min", "max"))
    is_telling = (low < high) & (columns["nan_count"].fill_null(0).to_numpy() == 0)
    is_unmeasured = columns["nan_count"].is_null().to_numpy()
    has_values = columns["payload_bytes"].is_valid().to_numpy()
    found: dict[int, None] = {}
    for mode in range(len(modes.texts or ())):
        for site in _SITES:
            of_stream = (modes.codes == mode) & (sites.codes == sites.code(site))
            found |= dict.fromkeys(_choose(steps, of_stream & (is_telling | is_unmeasured), has_values))
    return sorted(list(found)[:_MAX_STEPS] or steps[:1].tolist())


def _choose(
    steps: npt.NDArray[np.int64], is_telling: npt.NDArray[np.bool_], has_values: npt.NDArray[np.bool_]
) -> list[int]:
    """Of the steps with the most values that tell something: two with most payloads, the first and the last of all."""
    known, places = np.unique(steps[is_telling], return_inverse=True)
    if not len(known):
        return []
    num = np.bincount(places.reshape(-1), minlength=len(known))
    num_values = np.bincount(places.reshape(-1), weights=has_values[is_telling], minlength=len(known))
    best = np.lexsort([known, -num, -num_values])[: _NUM_STEPS - 2]
    full = np.flatnonzero(2 * num >= num.max())
    return list(dict.fromkeys(known[[*best, full[0], full[-1]]].tolist()))
