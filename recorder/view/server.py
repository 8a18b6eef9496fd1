"""The server of `recorder view`: pages, what is new of runs as server-sent events, and the panes that are saved.

Every address begins with a token that nobody can guess. Besides, `Host` has to be this machine, or an address in
numbers, so that no other site's name leads here, and `Origin`, where there is one, has to be this very server. Nothing
can be changed but the panes. Must never take a part of an address for a path.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
import socket
from collections.abc import AsyncIterator
from functools import partial
from urllib.parse import quote, urlsplit

import uvicorn
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import RecorderError
from ..report.collect import MAX_BYTES
from ..report.page import live_page, live_policy
from .watching import WatchedRun, Watching, listed_block

_ASK_S = 0.1
"""How often the server looks whether a run has news; a look compares two numbers."""
_ALIVE_S = 15.0
"""How often an empty line is sent: proxies cut silent connections, and the server learns that a browser has gone."""
_AGAIN_MS = 1000
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """Refuses what does not come from a page of this server, or has no token, before anything looks at it."""

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
            return "Refused: another site asked."
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
    """The server, from its socket to its end."""

    def __init__(self, watching: Watching, listener: socket.socket, host: str, token: str = "") -> None:
        """Prepare the server, and serve nothing yet.

        `listener` is bound to `host`. The token, by default a new one that nobody can guess, is the first part of every
        address.
        """
        self._watching, self._listener = watching, listener
        self.token = token or secrets.token_urlsafe(18)
        base = f"/{self.token}"
        routes = [
            Route(f"{base}/", self._front),
            Route(f"{base}/runs", self._runs),
            Route(f"{base}/side", self._side),
            Route(f"{base}/run/{{name}}/", self._page),
            Route(f"{base}/run/{{name}}/events", self._events),
            Route(f"{base}/run/{{name}}/panes", self._save, methods=["PUT"]),
        ]
        app = Guard(Starlette(routes=routes), self.token, host)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False)
        config.timeout_graceful_shutdown = 0
        self._server = uvicorn.Server(config)
        name = f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{listener.getsockname()[1]}{base}/"

    def serve(self) -> None:
        """Serve until Ctrl-C or `stop`."""
        try:
            self._server.run(sockets=[self._listener])
        except KeyboardInterrupt:
            pass  # how people leave it
        finally:
            self._watching.close()

    def stop(self) -> None:
        """End, from any thread."""
        self._server.should_exit = True

    async def _front(self, request: Request) -> Response:
        if self._watching.run is not None:
            return Response(status_code=307, headers={**_HEADERS, "Location": self._of_run(self._watching.run.name)})
        block = await run_sync(listed_block, self._watching)
        return _html(live_page("recorder view", [block], kind="runs"))

    def _of_run(self, name: str) -> str:
        return f"/{self.token}/run/{quote(name, safe='')}/"

    async def _runs(self, request: Request) -> Response:
        return JSONResponse(await run_sync(self._watching.listed), headers=_HEADERS)

    async def _side(self, request: Request) -> Response:
        return _html(live_page("recorder view", [], kind="side"))

    async def _page(self, request: Request) -> Response:
        run = await self._find(request)
        return _missing() if run is None else _html(live_page(f"{run.name} - recorder", [], kind="run"))

    async def _find(self, request: Request) -> WatchedRun | None:
        try:
            return await run_sync(self._watching.find, request.path_params["name"])
        except (RecorderError, OSError):
            return None

    async def _save(self, request: Request) -> Response:
        run = await self._find(request)
        if run is None:
            return _missing()
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
        if run is None:
            return _missing()
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


def _missing() -> Response:
    return PlainTextResponse("There is no such run here.\n", 404, headers=_HEADERS)
