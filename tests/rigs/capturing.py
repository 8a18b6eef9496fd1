"""Recording in this process as the flag would, and reading it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import recorder
from recorder.lifecycle import active as recording_side

EVERYTHING = "site=* keep=tensor,stats,fingerprint"


class Recording:
    """A run under a directory of its own; readable once the ``with`` block is over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def run(self) -> recorder.Run:
        return recorder.open_run(self.folder)

    def rows(self, **equal: Any) -> pd.DataFrame:
        """Metadata columns of all rows that match, in the order they were observed."""
        frame = self.run.to_pandas()
        for column, value in equal.items():
            frame = frame[frame[column].isna() if value is None else frame[column] == value]
        return frame.sort_values("seq").reset_index(drop=True)

    def array(self, module_path: str, **key: Any) -> np.ndarray[Any, Any]:
        return self.run.array(module_path, **key)

    @property
    def manifest(self) -> dict[str, Any]:
        (writer,) = self.run.writers
        return dict(writer.manifest.members)

    def events(self, kind: str) -> list[str]:
        return [event["message"] for event in self.manifest["events"] if event["kind"] == kind]


@contextmanager
def flagged(tmp_path: Path, rules: str = EVERYTHING, **settings: object) -> Iterator[Recording]:
    """Record what happens inside, started as ``RECORDER=1`` starts it."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path / "recordings"
    patch.setenv("RECORDER", "1")
    patch.setenv("RECORDER_DIR", str(folder))
    patch.setenv("RECORDER_RULES", rules)
    # A disk that others keep busy may take longer than the seconds for which a program waits at its end.
    for name, value in {"close_deadline_s": 60, **settings}.items():
        patch.setenv(f"RECORDER_{name.upper()}", str(value))
    patch.setenv("_RECORDER_CHECKED", "")
    recording_side.start_from_environment()
    current = recording_side._current
    assert current is not None
    try:
        yield Recording(folder)
    finally:
        current.close()
        patch.undo()


class Tiny(nn.Module):
    """Two layers and an activation that works in place."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, 8)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))  # type: ignore[no-any-return]


def batch(seed: int = 0, width: int = 4) -> torch.Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(seed))
