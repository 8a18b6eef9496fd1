"""The option ``--scheduler``: ranges are worked on in this process, or by a Dask cluster that sees the same runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..run.spreading import spread_over
from ..run.step_ranges import Mapper, map_serially
from ..system.executors import open_dask


@contextmanager
def mapper_for(scheduler: str | None) -> Iterator[Mapper]:
    """Yield the mapper that works on the ranges of a question.

    Raises:
        ClusterError: the cluster at this address cannot do it.
    """
    if scheduler is None:
        yield map_serially
        return
    with open_dask(scheduler) as (executor, num_workers):
        yield spread_over(executor, num_workers)
