"""Tables at any width: nothing is broken, nothing is wider; a pipe has no width unless COLUMNS says one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder.cli.output import fitted
from recorder.columns import STATISTICS
from recorder.run.reply import Table
from tests.rigs.command_line import Cli, module, on_a_terminal
from tests.rigs.handmade import HandmadeWriter, make_row, make_run

MODULES = ["encoder.layers.0.self_attention.query_key_value", "encoder.layers.11.mlp.down_projection", "head"]
COMMANDS = [
    "ls FOLDER", "ls RUN", "show RUN", "show RUN *.down_projection", "show RUN head --step 3 --rank 1", "stats RUN",
    "stats RUN --by step,module", "stats RUN --global --by module", "diff RUN OTHER", "top RUN", "first RUN",
    "repair RUN --dry-run", "config",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of long names, with values of all kinds of columns; some of them summands, without statistics."""
    folder = tmp_path_factory.mktemp("widths")
    for number in range(2):
        run = make_run(folder / f"run-{number}", name=f"a-long-name-of-an-experiment-{number}", created_ns=number + 1)
        for rank in range(2):
            rows, rng = [], np.random.default_rng(number)
            for index in range(48):
                values = rng.standard_normal((2, 4)).astype(np.float32) * 10.0 ** (index % 9 - 4)
                more: dict[str, Any] = {"step": index // 6, "rank": rank, "module_path": MODULES[index % 3]}
                more |= {"phase": ("forward", "recompute")[index % 2], "micro_step": index // 2 % 3}
                more |= {"scope": "local"} if index % 4 == 0 else {}
                if index % 6 == 5:
                    more |= {"placements": '["partial(sum)"]', "mesh": '{"shape":[2],"ranks":[0,1],"dim_names":null}'}
                    more |= dict.fromkeys(STATISTICS)
                rows.append(make_row(index, values, **more))
            writer = HandmadeWriter(run, rank)
            writer.add_shard([rows])
            writer.finish(
                roots=[{"name": "model", "class": "Net", "modules": [module(path, "Linear") for path in MODULES]}],
            )
    return folder


def pieces(text: str) -> set[str]:
    """What stands between blanks and the joints of names."""
    return set(re.split(r"[\s./_,:=─-]+", text))


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_word_is_broken_and_no_table_is_wider(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, width: int
) -> None:
    paths = {"FOLDER": folder, "RUN": folder / "run-0", "OTHER": folder / "run-1"}
    words = [str(paths.get(word, word)) for word in command.split()]
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = cli(*words).out
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = cli(*words).out
    assert pieces(re.sub(r"left out: [^;]*; --json\s+has\s+all", "", narrow)) <= pieces(whole)
    said = {line for line in whole.splitlines() if "  " not in line}
    tables = [line for line in narrow.splitlines() if line not in said]
    assert max(map(len, tables), default=0) <= width
    assert not any(line != line.rstrip() for line in tables)


def test_a_pipe_has_no_width(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = cli("stats", folder / "run-0").out
    assert "left out" not in whole and max(map(len, whole.splitlines())) > 120
    monkeypatch.setenv("COLUMNS", "100000")
    assert cli("stats", folder / "run-0").out == whole
    monkeypatch.setenv("COLUMNS", "wide")
    assert cli("stats", folder / "run-0").out == whole


def test_a_terminal_and_a_pipe_of_its_width_show_the_same(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = on_a_terminal("show", str(folder / "run-0"), "head", width=80, is_plain=True)
    assert [line.rstrip() for line in shown.splitlines()] == cli("show", folder / "run-0", "head").out.splitlines()


@pytest.mark.parametrize("width", [1, 5, 20, 33])
def test_a_table_fits_any_terminal(width: int) -> None:
    from rich.console import Console

    console = Console(width=width, height=50)
    row = ["123456", "encoder.layers.self_attention", "0.123456"]
    table = Table(["rank", "a name", "l2"], [row], numbers=("rank", "l2"))
    with console.capture() as captured:
        for piece in fitted(table, width):
            console.print(piece)
    assert max(map(len, captured.get().splitlines())) <= width
    if width > 20:
        assert "rank" in captured.get() and "123456" in captured.get()
