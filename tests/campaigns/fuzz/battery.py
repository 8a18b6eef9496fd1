"""Owns what is done to a run of a stranger: every command and every door of the Python API, and what none may answer.

Allowed is a right or wrong answer, and an error of ours. A finding is any other exception, an exit code that is none of
ours, a control character in the output, or an allocation that only the memory limit has stopped.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import random
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import typer
import typer.main

from recorder.analyze.export.export import export
from recorder.cli import app as command_line
from recorder.errors import RecorderError, RunError
from recorder.globalview.view import GlobalRows
from recorder.read.payload import decode
from recorder.run.run import Run, open_run
from recorder.upkeep.verify import verify
from tests.campaigns.fuzz.child import reaching

_OUT_OF_MEMORY = re.compile(r"out of memory|Unable to allocate|(malloc|realloc) of size|bad_alloc|MemoryError")
_OUR_CODES = re.compile(r"\x1b\[[0-9;]*[mKAG]|\x1b\[\?25[lh]")
_MAX_TENSORS = 6
_UNKNOWN_EXIT = (0, 1, 2)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def commands(run: Path, other: Path, out: Path, module: str) -> list[list[str]]:
    """Every command over a run. The run is not changed; what is written goes to `out`."""
    at, to, there = str(run), str(other), str(out)
    found = [["ls", at], ["ls", str(run.parent)], ["show", at], ["show", at, "--site", "grad"], ["first", at]]
    found += [["stats", at], ["stats", at, "--by", "module,site"], ["stats", at, "--by", "step", "--global"]]
    found += [["verify", at], ["doctor", at], ["doctor", at, "--strict"], ["diff", at, to], ["diff", to, at]]
    if not module.startswith("-"):
        found += [["show", at, module], ["show", at, module, "--last", "0"], ["stats", at, module]]
    found += [[*words, "--json"] for words in found]
    for name, more in (("a.parquet", ["--payload"]), ("b.parquet", ["--global"]), ("c.npz", []), ("d.npz",
                       ["--global"]),
                       ("e.safetensors", ["--global"]), ("f.parquet", ["--payload", "--global"])):  # fmt: skip
        found.append(["export", at, "-o", f"{there}/{name}", *more])
    found.append(["merge", at, "-o", f"{there}/merged", "--jobs", "1"])
    return found


def examine(run: Path, other: Path, out: Path, chooser: random.Random, share: float = 1.0) -> list[str]:
    """Do everything that is done with a run of a stranger; return what is wrong, with where it came from.

    `other` is a sound run to compare it with. All that may be written to is `out`, an empty folder. `chooser` chooses a
    `share` of the commands, and which of them see a terminal.
    """
    if isinstance(
        command_line.app, typer.Typer
    ):  # which makes its commands anew in each call, and takes longer than these
        command_line.app = typer.main.get_command(command_line.app)  # type: ignore[assignment]
    with reaching(out) as broken:
        findings = list(use_api(run, chooser, share))
        for words in commands(run, other, out, _some_module(run, chooser)):
            if chooser.random() < share:
                findings += run_words(words, is_terminal=chooser.random() < 0.3)
        if (out / "merged" / "_run.json").exists():
            for words in (["verify", str(out / "merged")], ["ls", str(out / "merged")]):
                findings += run_words(words, is_terminal=False)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    return findings + [f"REACH: {text}" for text in dict.fromkeys(broken)]


def run_words(words: Sequence[str], *, is_terminal: bool) -> Iterator[str]:
    """Run a command line in this process; yields what is wrong with its ending or its output."""
    streams = Terminal() if is_terminal else io.StringIO(), Terminal() if is_terminal else io.StringIO()
    before = sys.stdout, sys.stderr
    library = logging.getLogger("recorder")
    handlers, propagate = library.handlers, library.propagate
    code: Any = None
    problem = ""
    try:
        sys.stdout, sys.stderr = streams
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            command_line.run_command(list(words))
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        problem = traceback.format_exc(limit=-5)[-3000:]
    finally:
        sys.stdout, sys.stderr = before
        library.handlers, library.propagate = handlers, propagate
    out, err = (stream.getvalue() for stream in streams)
    where = f"recorder {' '.join(map(repr, words))}{' on a terminal' if is_terminal else ''}"
    if problem:
        yield f"{where}: {problem}"
    elif code not in _UNKNOWN_EXIT:
        yield f"{where}: exit code {code!r}\n{err[-1000:]}"
    if found := _OUT_OF_MEMORY.search(out + err):
        yield f"{where}: MEMORY: {(out + err)[max(found.start() - 300, 0) : found.end() + 200]}"
    for name, text in (("stdout", out), ("stderr", err)):
        if bad := harmful(text, is_terminal=is_terminal):
            yield f"{where}: {name} holds {bad}"
    if "--json" in words and code in (0, 1):
        try:
            json.loads(out, parse_constant=_refuse)
        except ValueError as error:
            yield f"{where}: its output is no JSON: {error}"


def harmful(text: str, *, is_terminal: bool) -> str:
    """The first character that a terminal would obey, with its surroundings; empty for none."""
    plain = _OUR_CODES.sub("", text) if is_terminal else text
    if is_terminal:
        plain = plain.replace("\r", "")
    for at, char in enumerate(plain):
        if char != "\n" and not char.isprintable():
            return f"{char!r} in {plain[max(at - 40, 0) : at + 40]!r}"
    return ""


def use_api(run: Path, chooser: random.Random, share: float = 1.0) -> Iterator[str]:
    """Every door of the Python API, or rather more than a share of them."""
    library = logging.getLogger("recorder")
    library.addHandler(logging.NullHandler())
    library.propagate = False
    found: list[Run] = []
    yield from _tried("open_run", lambda: found.append(open_run(run)))
    if not found:
        return
    opened = found[0]
    simple: dict[str, Callable[[], Any]] = {
        "repr": lambda: (repr(opened), opened._repr_html_(), opened.run_id, opened.world_size, opened.is_merged),
        "lists": lambda: (opened.ranks, opened.steps, opened.module_paths, opened.modules, opened.problems),
        "keys": lambda: [repr(opened[path]._repr_html_()) for path in opened._ipython_key_completions_()[:5]],
        "endings": lambda: (opened.endings, [(w.balance, w.state, w.ending, w.size_bytes) for w in opened.writers]),
        "table": opened.table,
        "filter": lambda: opened.table(["step", "module_path"], pc.field("step") < 5),
        "to_pandas": opened.to_pandas,
        "to_long": opened.to_long,
        "decode": lambda: _decode_all(opened),
        "verify": lambda: list(verify(opened)),
        "export": lambda: export(opened, run.parent / "never-written.csv", to="nothing"),
    }
    for name, use in simple.items():
        if chooser.random() < 3 * share:
            yield from _tried(name, use)
    if chooser.random() < 4 * share:
        yield from _use_tensors(opened, chooser)
    if chooser.random() < 4 * share:
        yield from _use_view(opened)
    for problem in opened.problems:
        if _OUT_OF_MEMORY.search(problem):
            yield f"problems: MEMORY: {problem}"


def _use_tensors(opened: Run, chooser: random.Random) -> Iterator[str]:
    columns = ["module_path", "site", "step", "name", "rank", "micro_step", "call", "phase", "mode"]
    rows: list[dict[str, Any]] = []
    yield from _tried("rows", lambda: rows.extend(opened.table([*columns, "encoding"]).to_pylist()))
    chosen = [row for row in rows if row.pop("encoding") is not None]
    chooser.shuffle(chosen)
    for row in chosen[:_MAX_TENSORS]:
        question = row if chooser.random() < 0.5 else row | {"rank": None}
        path = question["module_path"]
        rest = {name: value for name, value in question.items() if name != "module_path"}
        yield from _tried(f"array {question}", partial(opened.array, path, **rest))
        yield from _tried(f"tensor {question}", partial(opened.tensor, path, **rest))


def _use_view(opened: Run) -> Iterator[str]:
    yield from _tried("windows", lambda: opened.view().windows(10))
    found: list[GlobalRows] = []
    yield from _tried("view", lambda: found.extend([opened.view().rows()]))
    for rows in found:
        for i in range(min(len(rows), _MAX_TENSORS)):
            yield from _tried(f"view row {i}", partial(rows.array, i))
            yield from _tried(f"view parts {i}", partial(_use_parts, rows, i))


def _use_parts(rows: GlobalRows, i: int) -> None:
    for _ in rows.parts(i):
        pass


def _decode_all(opened: Run) -> None:
    table = opened.table(["encoding", "data", "payload_bytes", "dtype", "shape", "part"])
    for number in range(min(table.num_rows, 4 * _MAX_TENSORS)):
        with contextlib.suppress(RunError):
            decode(table.slice(number, 1))


def _tried(what: str, use: Callable[[], Any]) -> Iterator[str]:
    """The problem with how a call ended; empty where there is none."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            use()
    except RecorderError as error:
        if _OUT_OF_MEMORY.search(str(error)):
            yield f"{what}: MEMORY: {error}"
    except Exception:
        yield f"{what}: {traceback.format_exc(limit=-5)[-3000:]}"


def _some_module(run: Path, chooser: random.Random) -> str:
    try:
        paths = open_run(run).module_paths
    except Exception:  # that is for the API to show
        paths = []
    return chooser.choice(paths) if paths else "layers.0"


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
