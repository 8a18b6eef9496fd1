from __future__ import annotations

from typing import Annotated, Any

import typer

from ...config import Explained, load_settings
from ...native import in_force
from ...run.reply import Reply, Table, table_of
from ...system.text import bytes_of_setting

EPILOG = "Examples: recorder config --show    RECORDER_MAX_BYTES=4GB recorder config --json"


def command(
    show: Annotated[bool, typer.Option("--show", help="Print the settings in force (the default).")] = True,
) -> Reply:
    """Print the settings in force, and where each comes from."""
    settings = load_settings().explain()
    return Reply(
        members=lambda: {item.name: {"value": item.value, "source": item.source, "doc": item.doc} for item in settings},
        parts=lambda: [_table(settings)],
    )


def _table(settings: list[Explained]) -> Table:
    rows = []
    for item in settings:
        first, *others = lines(item.value, item.name)
        rows.append([item.name, first, item.source, item.doc])
        rows += [["", other, "", ""] for other in others]
    what = "what it does"
    return table_of(("setting", "value", "source", what), rows, prose=("value", what), drops=(what,))


def lines(value: Any, name: str = "") -> list[str]:
    """Return the lines that print a value: a line for each rule of a list; bytes also in a larger unit."""
    if name.endswith("_bytes") and type(value) is int:
        return ["0 (automatic)" if value == 0 and name == "pool_bytes" else bytes_of_setting(value)]
    if isinstance(value, list):
        return [str(item) for item in value] or ["none"]
    if name == "native":
        return [in_force(bool(value))]
    return [str(value) if value != "" else "(empty)"]
