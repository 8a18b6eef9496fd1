"""Many trainings are compared with few sound ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.campaigns.diff import judging


@pytest.fixture(scope="module")
def read_once() -> Iterator[None]:
    """The rows and tensors of a training are read once for all tests of a file; none of them changes a file."""
    with judging.read_once():
        yield
