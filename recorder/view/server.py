"""The server of `recorder view`. It sends pages and news of runs (server-sent events), and saves panes (pictures).

Each run that a page shows has a thread, which draws the run's new rows while a page is open. A run that cannot be read,
or a slow store, must never hold up other runs.

Every address begins with a secret token. `Host` must be this machine or a numeric address, which stops DNS rebinding.
`Origin`, if sent, must be this server. Only panes can be changed. No part of an address is used as a path.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import uvicorn
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..analyze.check.check import check
from ..errors import RecorderError, RunError
from ..format.manifest import RunManifest
from ..report.blocks import PageBlock
from ..report.collect import MAX_BYTES, checked_panes, panes_block, read_panes, save_panes, why_not_saved
from ..report.page import live_page, live_policy
from ..report.top import told_by_check
from ..run.finding import FLEET, ListedRun, find_run, fleet_runs, runs_in
from ..run.run import Run
from ..run.status import ENDED, RunWatch
from ..storage.locations import Location, ObjectPath, location_of, store_of
from .drawing import Drawing, packed_blocks

_ASK_S = 0.1
"""The seconds between checks whether a run has news. A check only compares two texts."""
_ALIVE_S = 15.0
"""A comment is sent after so many silent seconds, as proxies cut silent connections. It also finds closed browsers."""
_AGAIN_MS = 1000
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """Refuses requests that lack the token or come from other sites. It runs before all other code of the server."""

    def __init__(self, app: ASGIApp, token: str, host: str) -> None:
        self._app, self._token = app, token
        self._names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = self._refusal(Request(scope))
        answer: ASGIApp = self._app if refusal is None else PlainTextResponse(refusal + "\n", 403, headers=_HEADERS)
        await answer(scope, receive, send)

    def _refusal(self, request: Request) -> str | None:
        host = request.headers.get("host", "")
        if not self._is_here(host):
            return "This address is none of recorder view: its host is not this machine."
        origin = request.headers.get("origin")
        is_own = origin is not None and origin == f"{request.url.scheme}://{host}"
        if (origin is not None or request.method not in ("GET", "HEAD")) and not is_own:
            return "Refused: the request comes from another site."
        given = request.url.path.split("/")[1]
        if not secrets.compare_digest(given.encode(), self._token.encode()):
            return "The address lacks its token: open the whole address that recorder view printed."
        return None

    def _is_here(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True


class ViewServer:
    """The HTTP server of `recorder view`, from its socket to its end."""

    def __init__(
        self, watching: Watching, listener: socket.socket, host: str, token: str = "", certificate: Path | None = None
    ) -> None:
        """Prepare the server, and serve nothing yet.

        `listener` is a socket bound to `host`. `token` is the first part of every address. By default, a new secret
        token is made. `certificate` is a PEM file with a certificate and its key, for TLS.
        """
        self._watching, self._listener = watching, listener
        self.token = token or secrets.token_urlsafe(18)
        base = f"/{self.token}"
        routes = [
            Route(f"{base}/", self._front),
            Route(f"{base}/runs", self._runs),
            Route(f"{base}/side", self._side),
            Route(f"{base}/ranks", self._side),
            Route(f"{base}/run/{{name:path}}/ranks", self._ranks),
            Route(f"{base}/run/{{name:path}}/events", self._events),
            Route(f"{base}/run/{{name:path}}/panes", self._save, methods=["PUT"]),
            Route(f"{base}/run/{{name:path}}/", self._page),
        ]
        app = Guard(Starlette(routes=routes), self.token, host)
        pem = None if certificate is None else str(certificate)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False, ssl_certfile=pem
        )
        config.timeout_graceful_shutdown = 0
        self._server = uvicorn.Server(config)
        name = f"[{host}]" if ":" in host else host
        self.address = f"{'http' if certificate is None else 'https'}://{name}:{listener.getsockname()[1]}{base}/"

    def serve(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except KeyboardInterrupt:
            pass  # Ctrl-C is the usual way to end the server
        finally:
            self._watching.close()

    def stop(self) -> None:
        """Make the server end. Any thread may call this."""
        self._server.should_exit = True

    async def _front(self, request: Request) -> Response:
        if self._watching.run is not None:
            location = f"/{self.token}/run/{quote(self._watching.run.name, safe='')}/"
            return Response(status_code=307, headers={**_HEADERS, "Location": location})
        data = {"folder": str(self._watching.folder), "runs": await run_sync(self._watching.listed)}
        return _html(live_page("recorder view", [PageBlock(name="runs", data=data)], kind="runs"))

    async def _runs(self, request: Request) -> Response:
        return JSONResponse(await run_sync(self._watching.listed), headers=_HEADERS)

    async def _side(self, request: Request) -> Response:
        return _html(live_page("recorder view", [], kind=request.url.path.rpartition("/")[2]))

    async def _ranks(self, request: Request) -> Response:
        run = await self._find(request)
        try:
            ranks = await run_sync(run.ranks)
        except RecorderError as error:
            return PlainTextResponse(f"{error}\n", 502, headers=_HEADERS)
        found, is_judging = self._watching.found(run)
        members = [rank.members() for rank in ranks]
        told = {"name": run.name, "found": found, "is_judging": is_judging, "ranks": members}
        return JSONResponse(told, headers=_HEADERS)

    async def _page(self, request: Request) -> Response:
        run = await self._find(request)
        return _html(live_page(f"{run.name} - recorder", [], kind="run"))

    async def _find(self, request: Request) -> WatchedRun:
        """Return the run that an address names. Raise an HTTPException, which is the answer, if there is none."""
        with suppress(RecorderError, OSError):
            if (run := await run_sync(self._watching.find, request.path_params["name"])) is not None:
                return run
        raise HTTPException(404, "There is no such run here.\n", headers=_HEADERS)

    async def _save(self, request: Request) -> Response:
        run = await self._find(request)
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BYTES:
                return PlainTextResponse("too large\n", 413, headers=_HEADERS)
        try:
            panes = json.loads(body)
        except (ValueError, RecursionError):
            return PlainTextResponse("expected JSON\n", 400, headers=_HEADERS)
        return JSONResponse({"why_not_saved": await run_sync(run.save, panes)}, headers=_HEADERS)

    async def _events(self, request: Request) -> Response:
        run = await self._find(request)
        known = request.headers.get("last-event-id") or request.query_params.get("known", "")
        return StreamingResponse(self._news(run, known), media_type="text/event-stream", headers=_HEADERS)

    async def _news(self, run: WatchedRun, known: str) -> AsyncIterator[str]:
        run.opened()
        try:
            yield f"retry: {_AGAIN_MS}\n\n"
            silent_s, problem = 0.0, ""
            while not self._server.should_exit:
                if run.now != known:
                    known, is_all, blocks = await run_sync(partial(run.news, known))
                    yield f"event: {'all' if is_all else 'more'}\nid: {known}\ndata: {json.dumps(blocks)}\n\n"
                    silent_s = 0.0
                if run.problem != problem:
                    problem = run.problem
                    yield f"event: problem\ndata: {json.dumps(problem)}\n\n"
                await asyncio.sleep(_ASK_S)
                silent_s += _ASK_S
                if silent_s >= _ALIVE_S:
                    yield ": nothing new\n\n"
                    silent_s = 0.0
        finally:
            run.closed()


def _html(text: bytes) -> Response:
    headers = {**_HEADERS, "Content-Security-Policy": live_policy()}
    return Response(text, media_type="text/html; charset=utf-8", headers=headers)


_LOOK_S = 0.5
"""The seconds between scans of a run in a directory. With a flush a second, a step is drawn 2 s after its end."""
_STORE_LOOK_S = 5.0
"""The seconds between scans of a run in an object store. A scan needs several requests, which cost money."""
_OVER_LOOK_S = 5.0
"""The seconds between scans of a run that is over or gone, because it may begin again."""
_AT_MOST = 0.5
"""The largest fraction of one core that a run's thread uses."""
_CLOSE_S = 0.3
_INDEX_S = 10.0
_MAX_LISTED = 500
_MAX_GLANCED, _MAX_GLANCED_ROWS = 60, 300_000
"""How many of the newest runs are read for the list of runs, and the most rows that such a run may have."""
_GLANCE_S = 10.0
"""The seconds between two readings of a recording run's losses for the list of runs."""
_MAX_LOSSES = 60
_logger = logging.getLogger("recorder")


class WatchedRun:
    """One run that pages may show, and the thread that draws its new rows."""

    def __init__(self, location: Location, manifest: RunManifest, ranks: RunWatch | None = None) -> None:
        self.name = manifest.name or location.name
        self.location = location
        self._boot = secrets.token_hex(4)
        self._drawing = Drawing(location, manifest)
        self._lock = threading.Lock()
        self.ranks = (ranks or RunWatch(location_of(str(location)))).look  # a store of its own: each look refreshes it
        self._stopped = threading.Event()
        self._wanted = threading.Event()
        self._num_watching = 0
        self._panes = read_panes(location)
        self._panes_version = 1
        self._why_not_saved = why_not_saved(location)
        self.problem = ""
        """Why the run cannot be drawn. Empty if it can be drawn."""
        self._thread = threading.Thread(target=self._follow, name=f"recorder-view {location.name}", daemon=True)
        self._thread.start()

    def opened(self) -> None:
        with self._lock:
            self._num_watching += 1
            self._wanted.set()

    def closed(self) -> None:
        with self._lock:
            self._num_watching -= 1
            if not self._num_watching:
                self._wanted.clear()

    def close(self) -> None:
        self._stopped.set()
        self._wanted.set()
        self._thread.join(_CLOSE_S)

    @property
    def now(self) -> str:
        """A text that identifies the present state of the run's page. Each update changes the text."""
        drawing = self._drawing
        return f"{self._boot}-{drawing.epoch}-{drawing.version}-{self._panes_version}"

    def news(self, known: str) -> tuple[str, bool, dict[str, str]]:
        """Return the news for a page in the state `known`: the new state, whether all blocks are sent, and blocks."""
        with self._lock:
            now, drawing = self.now, self._drawing
            parts, of_now = known.split("-"), now.split("-")
            is_all = parts[:2] != of_now[:2] or len(parts) != len(of_now) or not all(map(str.isdigit, parts[1:]))
            blocks = drawing.blocks() if is_all else drawing.blocks_since(int(parts[2]))
            if is_all or parts[3] != of_now[3]:
                blocks |= packed_blocks([panes_block(self._panes, self._why_not_saved)])
        return now, is_all, blocks

    def save(self, panes: Any) -> str | None:
        """Keep the panes that a page has now. Return None, or why the panes cannot be saved with the run."""
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
            except Exception as error:  # the page shows the error and keeps its panes
                _logger.exception("recorder view: %s cannot be drawn", self.name)
                self.problem = f"{type(error).__name__}: {error}"
            self._stopped.wait(0.01 if has_more and not self.problem else self._pause_s(time.thread_time() - began_s))

    def _pause_s(self, took_s: float) -> float:
        pause_s = _LOOK_S if isinstance(self.location, Path) else _STORE_LOOK_S
        if self._drawing.state in ("over", "gone"):
            pause_s = _OVER_LOOK_S
        return max(pause_s, took_s * (1 / _AT_MOST - 1))


class Watching:
    """The runs that the server shows: all runs of a folder, or the one run that the user named."""

    def __init__(self, folder: Location | None, run: Location | None) -> None:
        self.folder, self.run = folder, run
        self._watched: dict[str, WatchedRun] = {}
        self._status: dict[str, RunWatch] = {}
        self._glances: dict[str, tuple[object, dict[str, Any]]] = {}
        """By a run's directory, the run's state when it was last read, and its losses and findings for the list."""
        self._glancing: threading.Thread | None = None
        self._judging: set[str] = set()
        """The directories of ended runs whose rows are still to be read for the list of runs."""
        self._index: dict[str, dict[str, Any]] = {}
        self._index_at_s = 0.0
        self._is_closed = False
        self._lock = threading.Lock()

    def find(self, name: str) -> WatchedRun | None:
        """Return the run whose directory has this name, or None if there is no such run."""
        with self._lock:
            if name in self._watched:
                return self._watched[name]
            location = self._location(name)
            if location is None:
                return None
            # The list of runs has read the status already.
            ranks = self._status.get(name) if isinstance(location, Path) else None
            watched = self._watched[name] = WatchedRun(*find_run(location), ranks)
            return watched

    def _location(self, name: str) -> Location | None:
        if self.run is not None:
            return self.run if self.run.name == name else None
        if name in self._fleet():
            return location_of(f"{self.folder}/{name}")
        return next((one.location for one in self._runs() if one.location.name == name), None)

    def _fleet(self) -> dict[str, dict[str, Any]]:
        """Return a fleet's summaries, kept for 10 s. Reading costs a request per node. They change twice a minute."""
        if isinstance(self.folder, ObjectPath) and time.monotonic() >= self._index_at_s:
            self.folder = self.folder.anew()
            self._index, self._index_at_s = fleet_runs(self.folder), time.monotonic() + _INDEX_S
        return self._index

    def _runs(self) -> list[ListedRun]:
        if self.folder is None or not store_of(self.folder).is_directory(self.folder):
            return []
        return runs_in(self.folder, without={FLEET, *(path.partition("/")[0] for path in self._fleet())})

    def listed(self) -> list[dict[str, Any]]:
        """Return the runs of the folder as JSON for the list, the newest first."""
        with self._lock:
            known = [_listed_of_fleet(path, summary) for path, summary in self._fleet().items()]
            runs = self._runs()[-_MAX_LISTED:]
            described = [self._describe(run) for run in reversed(runs)]
            for one, run in zip(described[:_MAX_GLANCED], reversed(runs), strict=False):
                one["is_reading"] = isinstance(run.location, Path) and one["directory"] not in self._glances
            if described and not (self._glancing and self._glancing.is_alive()):
                locations = {run.location.name: run.location for run in runs if isinstance(run.location, Path)}
                arguments = described[:_MAX_GLANCED], locations
                self._judging = {one["directory"] for one in arguments[0] if _is_over(one)} & locations.keys()
                self._glancing = threading.Thread(target=self._glance, args=arguments, daemon=True)
                self._glancing.start()
            return sorted(known + described, key=lambda one: -one["created_s"])[:_MAX_LISTED]

    def _glance(self, described: Sequence[Mapping[str, Any]], locations: Mapping[str, Path]) -> None:
        """Read the losses of runs, and what the rules of `recorder check` find in runs that are over.

        Runs in an object store are left out, because reading them costs requests.
        """
        for one in described:
            name, is_over = one["directory"], _is_over(one)
            state = one["written"] if is_over else int(time.monotonic() / _GLANCE_S)
            if self._is_closed or self._glances.get(name, (None, {}))[0] == state or name not in locations:
                self._judging.discard(name)
                continue
            began_s, glance = time.thread_time(), dict[str, Any]()
            with suppress(RecorderError, OSError):
                run = Run(*find_run(locations[name]))
                if run.num_rows <= _MAX_GLANCED_ROWS:
                    glance["loss"] = _losses(run)
                    told = told_by_check(run, check(run).findings, run.name) if is_over else []
                    for mark, part in (("wrong", "found"), ("note", "notes")) if is_over else ():
                        glance[part] = [one.text for one in told if one.mark == mark and one.rule]
            self._glances[name] = state, glance
            self._judging.discard(name)
            time.sleep(min(time.thread_time() - began_s, 1.0))  # this thread uses half a core at most

    def found(self, run: WatchedRun) -> tuple[list[str] | None, bool]:
        """Return the rules' findings in a run that is over, as texts, and True if the rules have not run yet.

        The findings are None if the rules did not run.
        """
        found: list[str] | None = self._glances.get(run.location.name, (None, {}))[1].get("found")
        return found, found is None and run.location.name in self._judging

    def _describe(self, run: ListedRun) -> dict[str, Any]:
        watch = self._status.setdefault(run.location.name, RunWatch(run.location))
        try:
            ranks = watch.look()
        except (RunError, OSError):
            ranks = []
        states = dict(Counter(rank.state for rank in ranks))
        steps = [rank.status.step for rank in ranks if rank.status.has_step]
        in_training = [f"{one.rule}: {one.text}" for rank in ranks for one in rank.status.findings]
        glance = self._glances.get(run.location.name, (None, {}))[1]
        return {
            "directory": run.location.name, "name": run.name, "created_s": run.created_ns / 1e9, "ranks": len(ranks),
            "states": states, "step": max(steps, default=None), "written": sum(rank.status.written for rank in ranks),
            "bytes": sum(rank.status.used_bytes for rank in ranks),
            **glance, "found": glance.get("found") or in_training or glance.get("found"),
        }  # fmt: skip

    def close(self) -> None:
        self._is_closed = True
        for run in self._watched.values():
            run.close()


def _is_over(described: Mapping[str, Any]) -> bool:
    return set(described["states"]) <= set(ENDED)


def _listed_of_fleet(path: str, summary: dict[str, Any]) -> dict[str, Any]:
    # The page uses the words of the ranks' states.
    state = "killed or silent" if summary["state"] == "unclosed" else summary["state"]
    return {
        "directory": path, "name": summary["name"], "created_s": summary["created_ns"] / 1e9,
        "ranks": len(summary["ranks"]), "states": {state: len(summary["ranks"])},
        "step": summary["last_step"], "written": summary["rows"], "bytes": summary["bytes"],
        "found": sorted(summary["findings"]) or None, "problems": sorted(summary["problems"]),
    }  # fmt: skip


def _losses(run: Run) -> list[float | None]:
    """Return the first writer's losses at a few dozen steps. A nonfinite loss is None. Empty without any loss."""
    names, losses = ("site", "name", "mode", "mean"), list[float]()
    for batch in (batch for writer in run.writers[:1] for shard in writer.shards for batch in shard.columns(names)):
        is_loss = (pc.field("site") == "scalar") & (pc.field("mode") == "train") & (pc.field("name") == "loss")
        losses += pa.Table.from_batches([batch]).filter(is_loss).column("mean").to_pylist()
    chosen = losses[:: -(-len(losses) // _MAX_LOSSES) or 1]
    return [None if one is None or not math.isfinite(one) else float(f"{one:.4g}") for one in chosen]
