"""``recorder first``: names what went wrong first."""

from __future__ import annotations

from ...analyze.first.first import first
from ...analyze.first.reply import reply_of
from ...run.run import open_run
from ..options import Json, RunPath
from ..output import print_reply

EPILOG = "Examples: recorder first recordings    recorder first @-2 --json"


def command(path: RunPath = None, as_json: Json = False) -> int:
    """Name the first NaN or infinity, and the first unequal replica.

    Buffers that differ between ranks count where DDP was told not to broadcast them (broadcast_buffers=False) and they
    still differ at the end; elsewhere they are a note.

    Exit code 1: there is a NaN, an infinity or an unequal replica, or damage may hide one.
    """
    run = open_run(path)
    return print_reply(reply_of(run, first(run)), as_json=as_json)
