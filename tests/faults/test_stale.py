"""Storage of many machines: a name that is there and means nothing any more is looked up again, a few times."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recorder.errors import RunError
from recorder.run.run import open_run
from tests.rigs.handmade import HandmadeWriter, make_row, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    writer = HandmadeWriter(make_run(tmp_path / "run"))
    writer.add_shard([[make_row(0, [1.0])]], is_sealed=False)
    writer.add_shard([[make_row(1, [1.0], step=1)]])
    return tmp_path / "run"


def _failing(real: Callable[..., Any], times: int, is_meant: Callable[..., bool]) -> Callable[..., Any]:
    left = [times]

    def call(*arguments: Any, **more: Any) -> Any:
        if left[0] and is_meant(*arguments):
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*arguments, **more)

    return call


@pytest.mark.parametrize("name", ["open", "preadv", "scandir"])
def test_a_stale_handle_is_looked_up_again(run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    is_meant: Callable[..., bool] = lambda *arguments: name != "open" or ".arrow" in str(arguments[0])  # noqa: E731
    monkeypatch.setattr(os, name, _failing(getattr(os, name), 2, is_meant))
    assert open_run(run).num_rows == 2


@pytest.mark.parametrize("name", ["open", "preadv", "scandir"])
def test_a_handle_that_stays_stale_is_one_error(run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    is_meant: Callable[..., bool] = lambda *arguments: name != "open" or ".arrow" in str(arguments[0])  # noqa: E731
    monkeypatch.setattr(os, name, _failing(getattr(os, name), 1000, is_meant))
    with pytest.raises(RunError):
        open_run(run)
