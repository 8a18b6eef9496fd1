"""The page ``recorder`` of torch's debug server: what each rank records now, its findings, and a button for a dump.

    from torch.distributed.debug import start_debug_server
    from torch.distributed.debug._debug_handlers import default_handlers
    start_debug_server(handlers=[*default_handlers(), RecorderHandler()])  # on every rank

Each rank answers on a thread of torch's server, even while training hangs in a collective. No answer may wait or raise.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

from torch._C._distributed_c10d import _register_handler
from torch.distributed.debug._frontend import DebugHandler, HTTPRequestHandler, NavLink, Route, fetch_all

_package = sys.modules[__name__.partition(".")[0]]
_NAME = "recorder"
_PAGE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}recorder{% endblock %}</h1>{% endblock %}
{% block content %}
  <form method="get"><button name="dump" value="1">Write the last steps of all ranks (dump)</button></form>
  <pre>{{ text | e }}</pre>
{% endblock %}
"""


class RecorderHandler(DebugHandler):  # type: ignore[misc, unused-ignore] # torch has no types there
    """The recorder's page. Make a handler on every rank, because each rank answers. Rank 0 gathers the answers."""

    def __init__(self) -> None:
        # Torch drops a reference to `_answer` after the end of Python; dropping the last one would abort the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_answer))
        _register_handler(_NAME, _answer)

    def routes(self) -> list[Route]:
        return [Route(f"/{_NAME}", self._page)]

    def nav_links(self) -> list[NavLink]:
        return [NavLink(f"/{_NAME}", _NAME)]

    def templates(self) -> dict[str, str]:
        return {f"{_NAME}.html": _PAGE}

    def dump_filename(self) -> str:
        return _NAME

    def dump(self) -> str:
        return self._text()

    def _page(self, request: HTTPRequestHandler) -> bytes:
        text = self._text(is_dump=request.get_query_arg("dump") == "1")
        return bytes(request.frontend.render_template(f"{_NAME}.html", text=text))

    def _text(self, *, is_dump: bool = False) -> str:
        _, answers = fetch_all(_NAME, f"dump={int(is_dump)}", timeout=self.fetch_timeout)
        return "\n".join(
            line
            for rank, answer in enumerate(answers)
            for line in (_lines(rank, answer.json()) if answer.status_code == 200 else [f"rank {rank}: {answer.text}"])
        )


def _lines(rank: int, status: dict[str, Any]) -> list[str]:
    if "step" not in status:
        return [f"rank {rank}: not recording"]
    shown = ("observed", "written", "dropped", "waited_s", "pool_used_bytes")
    counts = ", ".join(f"{name} {status[name]}" for name in shown)
    asked = ["  asked for a dump; `recorder ls` shows it"] if status.get("has_asked") else []
    found = [f"  {one['rule']}: {one['text']}" for one in status["findings"]]
    return [f"rank {rank}: step {status['step']}, {counts}", f"  {status['run']}", *found, *asked]


def _answer(request: Any, response: Any) -> None:
    """Answer with this rank's status. If the page asks for a dump, rank 0 requests it and tells the other ranks."""
    active: Any = getattr(_package, "_active", None)
    status: dict[str, Any] = {} if active is None else active.status()
    if status.get("rank") == 0 and request.get_param("dump") == "1":
        active.ask("user", "the debug page of torch.distributed")
        status["has_asked"] = True
    response.set_content(json.dumps(status), "application/json")
    response.set_status(200)
