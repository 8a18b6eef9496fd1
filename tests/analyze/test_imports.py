"""What questions to a run load, and that the front door leads to them."""

from __future__ import annotations

import pytest

import recorder
from tests.test_walls import loaded_by


@pytest.mark.parametrize("module", ["diff.diff", "export.export", "first.first", "export.model", "stats"])
def test_a_question_loads_no_torch_no_pandas_and_no_ui(module: str) -> None:
    loaded = loaded_by(f"import recorder.analyze.{module}")
    assert loaded.isdisjoint({"duckdb", "pandas", "polars", "rich", "safetensors", "torch", "typer"})


@pytest.mark.parametrize("name", ["diff", "export", "first", "stats"])
def test_the_front_door_leads_to_it(name: str) -> None:
    assert name in recorder.__all__ and name in dir(recorder)
    assert getattr(recorder, name).__name__ == name
