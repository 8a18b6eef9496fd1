"""Owns how another process opens the very run that this one has opened: by its path, and what was found there.

Must never hand on rows: whoever opens it again reads its own.
"""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

from ..errors import RunError
from .run import Run, open_run


class ChangedError(RunError):
    """A run is not any more, or not yet, what it was where it was opened first: it is still recorded, most likely."""


class RunAsOpened(NamedTuple):
    """A run for another process."""

    path: str
    digest: str

    @classmethod
    def of(cls, run: Run) -> RunAsOpened:
        return cls(str(run.path.absolute()), digest(run))

    def open(self) -> Run:
        """The run.

        Raises:
            RunError: it cannot be opened here.
            ChangedError: it holds something else here.
        """
        run = open_run(self.path)
        if digest(run) != self.digest:
            raise ChangedError(f"{self.path}: is not what it was when it was opened")
        return run


def digest(run: Run) -> str:
    """Of what an opening of a run has found: its writers, what they say, and their files."""
    found = [
        [writer.rank, writer.name, writer.manifest, [[s.path.name, s.is_sealed, s.size_bytes] for s in writer.shards]]
        for writer in run.writers
    ]
    text = json.dumps([run.manifest, found], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()
