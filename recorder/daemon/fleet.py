"""This node's document in the index of a fleet, which `read.fleet` reads: what it knows of the runs it has shipped."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from ..errors import RunError
from ..format.rundir import encode_manifest, parse_json
from ..run.finding import FLEET
from .destination import Destination, TakenError

PRUNED = "_pruned"
"""The folder of a destination in which each run that was pruned leaves its name."""
_CATALOG = "_catalog"


def node_name() -> str:
    """Return the name of this node in a key."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", os.uname().nodename)[:100] or "node"


def catalog_name() -> str:
    """Return the name, below a run, of the catalog of this node's part."""
    return f"{_CATALOG}/{node_name()}.parquet"


class FleetDocument:
    """This node's document, which keeps what was said of runs that are here no more."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._key = f"{FLEET}/{node_name()}.json"
        self._e_tag: str | None = None
        self._runs: dict[str, Any] = {}
        self._has_read = False

    def __contains__(self, run: str) -> bool:
        return run in self._runs

    def put(self, runs: Mapping[str, Any]) -> None:
        """Put what is known of the runs of this node, where it is news."""
        for _ in range(3):
            if not self._has_read:
                self._read()
            merged = {**self._runs, **runs}
            if merged == self._runs:
                return
            members = {"node": os.uname().nodename, "time_ns": time.time_ns(), "runs": merged}
            try:
                self._e_tag = self._destination.put_if(self._key, encode_manifest(members), self._e_tag)
            except TakenError:  # a prune has taken runs out
                self._has_read = False
                continue
            self._runs = merged
            return

    def _read(self) -> None:
        held = self._destination.get(self._key)
        self._e_tag, self._runs, self._has_read = None, {}, True
        if held is not None:
            self._e_tag = held[1]
            with contextlib.suppress(RunError):
                runs = parse_json(held[0], self._key).get("runs")
                self._runs = runs if isinstance(runs, dict) else {}


def remove_from_fleet(destination: Destination, run: str) -> None:
    """Take a run that was pruned out of every node's document."""
    for key, _ in destination.listing(f"{FLEET}/"):
        for _ in range(5):
            held = destination.get(key)
            if held is None:
                break
            try:
                members = parse_json(held[0], key)
            except RunError:
                break
            if run not in members.get("runs", {}):
                break
            del members["runs"][run]
            with contextlib.suppress(TakenError):
                destination.put_if(key, encode_manifest(members), held[1])
                break
