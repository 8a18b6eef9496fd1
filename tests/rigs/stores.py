"""A store for the session, and the environment in which this process finds it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.command_line import cli as cli
from tests.rigs.server import StoreServer


@pytest.fixture(scope="session")
def server() -> Iterator[StoreServer]:
    server = StoreServer()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def store(server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    """The session's store, in the environment of one test."""
    wanted = server.environment(os.environ, tmp_path)
    for name in set(os.environ) - set(wanted):
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    try:
        yield server
    finally:
        server.delay_s, server.before = 0.0, lambda method, path: None
