"""Runs that somebody looks at: a thread for each, which draws what is new while a page is open.

Must never let a run that cannot be read, or a slow store, hold up the others.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from ..errors import RecorderError, RunError
from ..format.manifest import RunManifest
from ..report.blocks import PageBlock
from ..report.collect import checked_panes, panes_block, read_panes, save_panes, why_not_saved
from ..run.finding import ListedRun, find_run, runs_in
from ..run.status import RunWatch
from ..storage.locations import Location, store_of
from .drawing import Doctor, Drawing, Judge

_LOOK_S = 0.5
"""How often a run in a directory is looked at: with a flush a second, a step is seen within two seconds of its end."""
_STORE_LOOK_S = 5.0
"""How often a run in an object store is looked at: each look is several requests, and each request costs."""
_OVER_LOOK_S = 5.0
"""How often a run that is over or gone is looked at: the run may begin again."""
_AT_MOST = 0.5
"""The largest share of a core that the thread of a run takes."""
_CLOSE_S = 0.3
_MAX_LISTED = 500
_logger = logging.getLogger("recorder")


class WatchedRun:
    """One run, and the thread that follows it."""

    def __init__(self, location: Location, manifest: RunManifest, judge: Judge, doctor: Doctor) -> None:
        self.name = manifest.name or location.name
        self.location = location
        self._boot = secrets.token_hex(4)
        self._drawing = Drawing(location, manifest, judge, doctor)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._wanted = threading.Event()
        self._num_watching = 0
        self._panes = read_panes(location)
        self._panes_version = 1
        self._why_not_saved = why_not_saved(location)
        self.problem = ""
        """Why the run cannot be drawn; empty where the run can be drawn."""
        self._thread = threading.Thread(target=self._follow, name=f"recorder-view {location.name}", daemon=True)
        self._thread.start()

    def opened(self) -> None:
        """Note that one more page shows the run."""
        with self._lock:
            self._num_watching += 1
            self._wanted.set()

    def closed(self) -> None:
        """Note that one page less shows the run."""
        with self._lock:
            self._num_watching -= 1
            if not self._num_watching:
                self._wanted.clear()

    def close(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._wanted.set()
        self._thread.join(_CLOSE_S)

    @property
    def now(self) -> str:
        """The knowledge of a page that has everything; the text changes with every news."""
        drawing = self._drawing
        return f"{self._boot}-{drawing.epoch}-{drawing.version}-{self._panes_version}"

    def news(self, known: str) -> tuple[str, bool, dict[str, str]]:
        """Return what a page that knows `known` is sent: its new knowledge, whether that is all, and blocks."""
        with self._lock:
            now, drawing = self.now, self._drawing
            parts, of_now = known.split("-"), now.split("-")
            is_all = parts[:2] != of_now[:2] or len(parts) != len(of_now) or not all(map(str.isdigit, parts[1:]))
            blocks = drawing.blocks() if is_all else drawing.blocks_since(int(parts[2]))
            if is_all or parts[3] != of_now[3]:
                blocks |= drawing.packed(panes_block(self._panes, self._why_not_saved))
        return now, is_all, blocks

    def save(self, panes: Any) -> str | None:
        """Keep the panes that a page has now; why they are not saved with the run, else None."""
        with self._lock:
            self._panes = checked_panes(panes)
            self._panes_version += 1
            self._why_not_saved = save_panes(self.location, self._panes)
            return self._why_not_saved

    def _follow(self) -> None:
        while not self._stopped.is_set():
            self._wanted.wait()
            if self._stopped.is_set():
                return
            began_s = time.thread_time()
            has_more = False
            try:
                with self._lock:
                    has_more = self._drawing.refresh()
                self.problem = ""
            except (RecorderError, OSError) as error:
                self.problem = str(error)
            except Exception as error:  # the page says it, and goes on with what it has
                _logger.exception("recorder view: %s cannot be drawn", self.name)
                self.problem = f"{type(error).__name__}: {error}"
            self._stopped.wait(0.01 if has_more and not self.problem else self._pause_s(time.thread_time() - began_s))

    def _pause_s(self, took_s: float) -> float:
        pause_s = _LOOK_S if isinstance(self.location, Path) else _STORE_LOOK_S
        if self._drawing.state in ("over", "gone"):
            pause_s = _OVER_LOOK_S
        return max(pause_s, took_s * (1 / _AT_MOST - 1))


class Watching:
    """All runs of a folder, or the one run that was asked for."""

    def __init__(self, folder: Location | None, run: Location | None, judge: Judge, doctor: Doctor) -> None:
        self.folder, self.run = folder, run
        self._judge, self._doctor = judge, doctor
        self._watched: dict[str, WatchedRun] = {}
        self._status: dict[str, RunWatch] = {}
        self._lock = threading.Lock()

    def find(self, name: str) -> WatchedRun | None:
        """Return the run whose directory has this name; None where there is none."""
        with self._lock:
            if name in self._watched:
                return self._watched[name]
            location = next((one for one in self._locations() if one.name == name), None)
            if location is None:
                return None
            watched = self._watched[name] = WatchedRun(*find_run(location), self._judge, self._doctor)
            return watched

    def _locations(self) -> list[Location]:
        if self.run is not None:
            return [self.run]
        return [one.location for one in self._runs()]

    def _runs(self) -> list[ListedRun]:
        if self.folder is None or not store_of(self.folder).is_directory(self.folder):
            return []
        return runs_in(self.folder)

    def listed(self) -> list[dict[str, Any]]:
        """The runs of the folder for people, the newest first."""
        with self._lock:
            runs = self._runs()[-_MAX_LISTED:]
            return [self._describe(run) for run in reversed(runs)]

    def _describe(self, run: ListedRun) -> dict[str, Any]:
        watch = self._status.setdefault(run.location.name, RunWatch(run.location))
        try:
            ranks = watch.look()
        except (RunError, OSError):
            ranks = []
        states: dict[str, int] = {}
        for rank in ranks:
            states[rank.state] = states.get(rank.state, 0) + 1
        steps = [rank.status.step for rank in ranks if rank.status.has_step]
        return {
            "directory": run.location.name, "name": run.name, "created_s": run.created_ns / 1e9, "ranks": len(ranks),
            "states": states, "step": max(steps, default=None),
        }  # fmt: skip

    def close(self) -> None:
        """End all threads."""
        for run in self._watched.values():
            run.close()


def listed_block(watching: Watching) -> PageBlock:
    """The list of runs as a block of its page."""
    return PageBlock(name="runs", data={"folder": str(watching.folder), "runs": watching.listed()})
