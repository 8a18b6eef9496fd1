"""The panes that somebody put together of a run's pictures: what each shows, its name, and in which order they stand.

They lie in `_view.json` beside the run, the one file that a page may change. Text in that file is untrusted: what is no
pane is left out.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..format.rundir import encode_manifest
from ..storage.locations import Location, store_of
from .blocks import PageBlock

VIEW = "_view.json"
KINDS = ("map", "lines", "numbers", "histograms", "units", "graph")
MAX_PANES = 40
MAX_BYTES = 256 << 10
_MAX_NAME = 200
_STATES = ("site", "mode", "name", "stat", "lane", "axes", "log", "each", "from", "to", "step", "module")
_LISTS = ("pins", "open", "shut")


def read_panes(run: Location) -> list[dict[str, Any]]:
    """The panes of a run; none where there are none, or nobody can read them."""
    store = store_of(run)
    with suppress(RunError, OSError):
        if store.is_file(run / VIEW):
            return checked_panes(store.read_json(run / VIEW, MAX_BYTES).get("panes"))
    return []


def checked_panes(document: object) -> list[dict[str, Any]]:
    """What of a JSON value are panes: name, kind, width and state each."""
    panes: list[dict[str, Any]] = []
    for one in document if isinstance(document, list) else ():
        if not isinstance(one, Mapping) or one.get("kind") not in KINDS or len(panes) >= MAX_PANES:
            continue
        name, state = one.get("name"), one.get("state")
        panes.append(
            {
                "name": name[:_MAX_NAME] if isinstance(name, str) else "",
                "kind": one["kind"],
                "wide": one.get("wide") is True,
                "state": _state(state if isinstance(state, Mapping) else {}),
            }
        )
    return panes


def _state(pane: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: pane[name] for name in _STATES if isinstance(pane.get(name), (str, int, float))}
    lists = {name: pane[name] for name in _LISTS if isinstance(pane.get(name), list)}
    return {name: value for name, value in (plain | lists).items() if len(json.dumps(value)) < MAX_BYTES // 8}


def panes_block(panes: list[dict[str, Any]], why_not_saved: str | None = None) -> PageBlock:
    """The block of the panes.

    Args:
        panes: all of them.
        why_not_saved: why changes are not kept with the run; None where they are, or there is no server to save them.
    """
    return PageBlock(name="panes", data={"panes": panes, "why_not_saved": why_not_saved})


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
