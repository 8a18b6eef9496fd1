"""How another process opens the very run that this one has opened, and what makes that process unfit for it.

Must never hand on rows: whoever opens the run reads its own.
"""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

from ..errors import ClusterError, RecorderError, RunError
from ..system.executors import check_versions, versions, worker_name
from .run import Run, open_run

SEES_AS_HERE = "every worker has to see runs and output as the process does that hands out the work"


class ChangedError(RunError):
    """A run is not any more, or not yet, what it was where it was opened first: it is still recorded, most likely."""


class RunAsOpened(NamedTuple):
    """A run for another process, and the versions that this process has to have."""

    path: str
    identity: tuple[object, ...]
    digest: str
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, run: Run) -> RunAsOpened:
        return cls(str(run.path.absolute()), _identity(run), digest(run), tuple(versions().items()))

    def open(self) -> Run:
        """The run, as it is now.

        Raises:
            ClusterError: this process has other versions, or sees no run or another run under this path.
        """
        check_versions(worker_name(), versions(), dict(self.versions))
        try:
            run = open_run(self.path)
        except (RecorderError, OSError) as error:
            raise ClusterError(f"{worker_name()}: does not see the run ({error}); {SEES_AS_HERE}") from error
        if _identity(run) != self.identity:
            raise ClusterError(f"{worker_name()}: sees another run at {self.path}; {SEES_AS_HERE}")
        return run

    def open_unchanged(self) -> Run:
        """The run, as it was when it was opened first.

        Raises:
            ClusterError: as of `open`.
            ChangedError: it holds something else by now.
        """
        run = self.open()
        if digest(run) != self.digest:
            raise ChangedError(f"{self.path}: is not what it was when it was opened")
        return run


def digest(run: Run) -> str:
    """A digest of what the opening of a run has found: its writers, what they say, and their files."""
    writers = [
        [one.rank, one.name, one.manifest.members, [[s.path.name, s.is_sealed, s.size_bytes] for s in one.shards]]
        for one in run.writers
    ]
    text = json.dumps([run.manifest.members, writers], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()


def _identity(run: Run) -> tuple[object, ...]:
    return run.manifest.run_id, run.manifest.created_ns
