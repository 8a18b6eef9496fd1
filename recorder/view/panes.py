"""Saves the panes of a run beside it: the one thing that a page may change. Never writes anything but `_view.json`."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..format.rundir import encode_manifest
from ..report.panes import VIEW
from ..storage.locations import Location


def why_not_saved(run: Location) -> str | None:
    """Why panes cannot be saved with a run; None where they can."""
    if not isinstance(run, Path):
        return "the run lies in an object store, which recorder view never writes to"
    if not os.access(run, os.W_OK):
        return "the directory of the run may not be written to"
    return None


def save_panes(run: Location, panes: list[dict[str, Any]]) -> str | None:
    """Save the panes of a run, whole or not at all; why they could not be saved, else None."""
    why = why_not_saved(run)
    if why is not None:
        return why
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f"{VIEW}.", suffix=".tmp", dir=str(run))
        try:
            with open(descriptor, "wb") as file:
                file.write(encode_manifest({"panes": panes}))
            Path(temporary).replace(Path(str(run)) / VIEW)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        return f"they could not be written ({error.strerror})"
    return None
