"""Tests that scripts start obey the rules of the suite: nothing of the caller's environment records."""

from __future__ import annotations

from tests.conftest import pytest_collection_finish, pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_collection_finish", "pytest_collection_modifyitems", "pytest_configure"]
