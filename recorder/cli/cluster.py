"""Owns the option ``--scheduler``: pieces worked on in this process, or by a Dask cluster that sees the same runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..analyze.pieces import Spread, here
from ..cluster import open_cluster
from ..read.run import Run


@contextmanager
def spread_by(scheduler: str | None, *runs: Run) -> Iterator[Spread]:
    """What works on the pieces of some runs.

    Raises:
        ClusterError: the cluster at this address cannot do it.
    """
    if scheduler is None:
        yield here
        return
    with open_cluster(scheduler) as cluster:
        cluster.check_sees([run.path for run in runs])
        yield cluster.spread
