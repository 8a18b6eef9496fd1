"""Draws runs for a browser: as a file, or live while they record."""

from __future__ import annotations

import errno
import importlib.util
import logging
import socket
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ...analyze.align.align import align as compare_tokens_of
from ...errors import LookupFailedError, not_installed
from ...report.picture import PANELS
from ...report.report import PNG, page_reply, picture_reply
from ...report.tokens import tokens_block
from ...run.finding import find_folder, find_run
from ...run.reply import Reply
from ...run.run import open_run
from ...system.processes import is_loopback, tls_context
from .. import options
from ..output import progress, say
from ..paths import other_run

EXAMPLES = {
    "report": ("recorder report recordings -o report.html", "recorder report @-1 --png map -o map.png"),
    "view": ("recorder view recordings", "recorder view @-1 --port 8123"),
}


def report_command(
    path: options.RunPath = None,
    out: Annotated[Path | None, options.out_option("PATH", "The file; by default report.html.")] = None,
    against: Annotated[str | None, options.run_option(help="A second run, to be drawn beside the first.")] = None,
    align: Annotated[
        str | None,
        options.run_option(help="The run of the engine that wrote the tokens, or RUN: draws a token map."),
    ] = None,
    statistics: Annotated[
        str | None,
        typer.Option(
            help="Statistics, with commas: absmax, l2, mean, std, min, max; by default as many as there is room for."
        ),
    ] = None,
    png: Annotated[
        str | None,
        typer.Option(metavar="PANEL", help=f"Draw one panel, as PNG, without a browser: {', '.join(PANELS)}."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --png: the model to draw, if several (a GAN) have values of the same names."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> Reply:
    """Draw a run as one HTML file: the loss, maps, lines, ranks.

    The file needs no network and runs no scripts but its own: send it, or keep it beside the job's other results.

    It holds numbers and small pictures for drawing, and no tensors. In a long run, a column of the map stands for
    several steps. With many ranks, the file shows the lowest, the median and the highest rank, and ranks that are odd.

    Exit code 1: something of the run is damaged or missing, as recorder doctor says, or the second run is damaged.
    """
    run = open_run(path)
    run.keep_columns()
    if png is not None:
        if against is not None:
            raise LookupFailedError("--png draws one run; leave out --against, or leave out --png for the page of both")
        return picture_reply(run, png, out or Path(f"{png}.png"), model=model, force=force)
    if model is not None:
        raise LookupFailedError(f'--model {model} is for --png; on the page "model" chooses it')
    other = None if against is None else other_run(against, {"the run to draw": run}, "--against")
    more = []
    if align is not None:
        engine = open_run(align)
        more = [tokens_block(compare_tokens_of(run, None if str(engine.path) == str(run.path) else engine))]
    out = out or Path("report.html")
    if out.suffix.lower() == PNG:
        raise LookupFailedError(
            f"{out}: a page is HTML; name a file that ends in .html, or add --png {'|'.join(PANELS)}"
        )
    names = [name.strip() for name in statistics.split(",")] if statistics is not None else []
    if "" in names:
        raise LookupFailedError(f"--statistics {statistics}: expected names with commas between")
    counting = partial(progress, unit="rows")
    return page_reply(run, out, against=other, statistics=names, more=more, force=force, progress=counting)


_PORT = 8765
_NUM_PORTS = 20
_NEEDS = ("starlette", "uvicorn")


def view_command(
    path: Annotated[
        str | None,
        options.run_argument("RUN", "A run, or a folder or a store of runs. Default: the folder of runs here."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"The port to listen on; by default {_PORT}, or the next free one."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at, if other machines are to reach it, such as 0.0.0.0.")
    ] = "127.0.0.1",
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A PEM file with a certificate and its key, for TLS.")
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
    logging.getLogger("uvicorn").addHandler(logging.NullHandler())  # this hides uvicorn's log from the user
    with closing(listen(host, port)) as listener:
        bound = listener.getsockname()[1]
        if port is None and bound != _PORT:
            say(f"port {_PORT} is in use; this is port {bound}")
        server = ViewServer(Watching(folder, run), listener, host, certificate=certificate)
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
            is_in_use = error.errno == errno.EADDRINUSE
            if port is None and is_in_use:
                continue
            why = "is in use; leave --port out to take another" if is_in_use else str(error.strerror or error)
            raise LookupFailedError(f"--host {host}, port {one}: {why}") from None
    raise LookupFailedError(f"ports {_PORT} to {_PORT + _NUM_PORTS - 1} are all in use; name another with --port")
