"""The store of the session, also for the daemon's tests, and a proxy before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.command_line import cli as cli
from tests.rigs.command_line import recorded as recorded
from tests.rigs.proxy import FaultyProxy
from tests.rigs.server import BUCKET, StoreServer
from tests.rigs.stores import server as server
from tests.rigs.stores import store as store


@pytest.fixture
def to(store: StoreServer, request: pytest.FixtureRequest) -> str:
    """A destination of one test's own."""
    return f"s3://{BUCKET}/{Path(request.node.name).name[:40].replace('[', '-').replace(']', '')}"


@pytest.fixture
def proxy(store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """The store, through a proxy that does no harm until it is told to."""
    proxy = FaultyProxy(store.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    try:
        yield proxy
    finally:
        proxy.close()
