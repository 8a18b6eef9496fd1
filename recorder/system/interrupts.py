"""Tells exceptions of the program's signal handlers, which must not be caught here, from the recorder's own errors."""

from __future__ import annotations

import signal


def comes_from_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the user raised this error while the recorder's code happened to run."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {code for handler in handlers if (code := getattr(handler, "__code__", None)) is not None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
