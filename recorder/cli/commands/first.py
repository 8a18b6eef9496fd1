from __future__ import annotations

from ...analyze.first.first import first, reply_of
from ...run.reply import Reply
from ...run.run import open_run
from ..options import RunPath

EPILOG = "Examples: recorder first recordings    recorder first @-2 --json"


def command(path: RunPath = None) -> Reply:
    """Name the first NaN or infinity, and the first unequal replica.

    Buffers that differ between ranks count where DDP does not broadcast them (broadcast_buffers=False) and they
    still differ at the end; elsewhere they are a note.

    Exit code 1: there is a NaN, an infinity or an unequal replica, or damage may hide one.
    """
    run = open_run(path)
    return reply_of(run, first(run))
