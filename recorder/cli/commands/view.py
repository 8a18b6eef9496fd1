from __future__ import annotations

import errno
import importlib.util
import logging
import socket
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from ...errors import LookupFailedError, not_installed
from ...run.finding import find_folder, find_run
from ...system.processes import is_loopback, tls_context
from ..options import run_argument
from ..output import say

EPILOG = "Examples: recorder view recordings    recorder view @-1 --port 8123"

_PORT = 8765
_NUM_PORTS = 20
_NEEDS = ("starlette", "uvicorn")


def command(
    path: Annotated[
        str | None, run_argument("RUN", "A run, or a folder or a store of runs. Default: the folder of runs here.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"Where to listen; without: {_PORT}, or the next one that is free."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Listen at an address that other machines reach, such as 0.0.0.0.")
    ] = "127.0.0.1",
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file with a certificate and its key: the pages speak TLS.")
    ] = None,
) -> int:
    """Watch runs in a browser while they record.

    It serves the page of recorder report, live: the page of one run, or a list of the runs of a folder with a page for
    each. The list may be empty at first. New steps appear about two seconds after they were recorded. Pictures can be
    kept as panes, under names; they are saved beside the run, and nothing else is ever written.

    It prints an address with a token in it, which is all that a browser needs: whoever has the address sees the runs.
    From another machine, forward the port: ssh -L 8765:localhost:8765 HOST. Ctrl-C ends it.
    """
    if lacking := [package for package in _NEEDS if importlib.util.find_spec(package) is None]:
        raise LookupFailedError(not_installed("recorder view", " with ".join(lacking), "view"))
    from ...view.server import ViewServer, Watching

    if certificate is not None:
        tls_context(certificate, f"--certificate {certificate}")
    folder = find_folder(path, may_be_empty=True)
    run = None if folder is not None else find_run(path)[0]
    logging.getLogger("uvicorn").addHandler(logging.NullHandler())  # hides uvicorn's log from the user
    with closing(listen(host, port)) as listener:
        bound = listener.getsockname()[1]
        if port is None and bound != _PORT:
            say(f"port {_PORT} is in use; this is port {bound}")
        watching = Watching(folder, run)
        server = ViewServer(watching, listener, host, certificate=certificate)
        say(f"{folder or run}: open {server.address}")
        if not is_loopback(host):
            open_to_all = "" if certificate is not None else "; the connection is not encrypted: --certificate"
            say(f"everybody who reaches {host} and has this address sees these runs{open_to_all}")
        say("Ctrl-C ends it")
        server.serve()
    return 0


def listen(host: str, port: int | None) -> socket.socket:
    """Return a socket bound to the given port, or to the first free port from 8765 on."""
    for one in [port] if port is not None else range(_PORT, _PORT + _NUM_PORTS):
        try:
            family = socket.getaddrinfo(host, one, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, one), family=family)
        except OSError as error:
            if port is None and error.errno == errno.EADDRINUSE:
                continue
            why = (
                "is in use; leave --port out to take another"
                if error.errno == errno.EADDRINUSE
                else str(error.strerror or error)
            )
            raise LookupFailedError(f"--host {host}, port {one}: {why}") from None
    raise LookupFailedError(f"ports {_PORT} to {_PORT + _NUM_PORTS - 1} are all in use; name another with --port")
