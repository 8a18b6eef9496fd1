"""What the library says through `logging`: never on standard output, once on standard error, and to whoever asks."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from recorder.system import log
from tests.rigs import jobs

TRAIN = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
logging.getLogger().addHandler(logging.FileHandler("log.txt"))
model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)  # for which a rule may be
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
logging.info("result 7")
"""


def test_a_program_that_logs_to_standard_output_finds_its_own_lines_there_alone(tmp_path: Path) -> None:
    settings = {"RECORDER_RULES": "module=nowhere; site=output", "RECORDER": "1"}
    process = subprocess.run(
        [sys.executable, "-c", TRAIN], cwd=tmp_path, env=jobs.environment(settings), capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == "INFO root result 7\n"
    error, written, following = process.stderr.splitlines()
    assert error.startswith("ERROR recorder the rule 'module=nowhere")
    assert written.startswith("INFO recorder 3 rows, ")
    assert following.startswith("INFO recorder next: recorder check ")
    in_file = (tmp_path / "log.txt").read_text().splitlines()
    said = (line.partition(" recorder ")[2] for line in (error, written, following))
    assert sorted(in_file) == sorted([*said, "result 7"])


Said = pytest.CaptureFixture[str]


@pytest.fixture
def logger() -> logging.Logger:
    return logging.Logger("apart", logging.INFO)


def test_what_would_go_to_standard_output_goes_to_standard_error_in_the_handlers_own_format(
    logger: logging.Logger, capsys: Said
) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("<%(message)s>"))
    logger.addHandler(handler)
    log.log(logger, logging.INFO, "%d rows", 3)
    assert capsys.readouterr() == ("", "<3 rows>\n")


def test_a_line_stands_once_on_standard_error_where_another_handler_writes_it_there(
    logger: logging.Logger, capsys: Said
) -> None:
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.addHandler(logging.StreamHandler(sys.stderr))
    log.log(logger, logging.INFO, "once")
    assert capsys.readouterr() == ("", "once\n")


def test_a_handler_behind_a_console_counts_as_what_the_console_writes_to(logger: logging.Logger, capsys: Said) -> None:
    class Console:
        file = sys.stdout

    class OnConsole(logging.Handler):
        console = Console()

        def emit(self, record: logging.LogRecord) -> None:
            self.console.file.write(record.getMessage())

    logger.addHandler(OnConsole())
    log.log(logger, logging.INFO, "aside")
    assert capsys.readouterr() == ("", "aside\n")


def test_levels_and_filters_of_a_handler_on_standard_output_decide(logger: logging.Logger, capsys: Said) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: "secret" not in record.getMessage())
    logger.addHandler(handler)
    for level, text in ((logging.INFO, "low"), (logging.WARNING, "secret"), (logging.WARNING, "told")):
        log.log(logger, level, text)
    assert capsys.readouterr() == ("", "told\n")


def test_other_handlers_get_the_record_as_ever(logger: logging.Logger, capsys: Said) -> None:
    records: list[logging.LogRecord] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger.addHandler(Keeps())
    log.log(logger, logging.INFO, "alone")
    logger.addHandler(logging.StreamHandler(sys.stdout))
    log.log(logger, logging.WARNING, "beside %s", "stdout")
    assert [record.getMessage() for record in records] == ["alone", "beside stdout"]
    assert capsys.readouterr() == ("", "beside stdout\n")


def test_the_name_of_the_package_stands_once_whoever_formats_the_line(logger: logging.Logger, capsys: Said) -> None:
    logger.name = "recorder"
    log.log(logger, logging.WARNING, "%d rows", 3)
    log.log(logger, logging.INFO, "as Python has it, nobody sees this")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(name)s][%(levelname)s] - %(message)s"))
    logger.addHandler(handler)
    log.log(logger, logging.WARNING, "%d rows", 3)
    log.tell(logger, lambda: ["the last"], 0.0)
    assert capsys.readouterr().err.splitlines() == [
        "recorder: 3 rows",
        "[recorder][WARNING] - 3 rows",
        "[recorder][INFO] - the last",
    ]


BAR = """
import logging, sys
from tqdm import tqdm
from recorder.system import log
logger = logging.getLogger("recorder")
if "configured" in sys.argv:
    logging.basicConfig(format="%(name)s: %(message)s")
for i in tqdm(range(3), mininterval=0, ncols=40):
    if i == 1:
        log.log(logger, logging.WARNING, "in between")
log.log(logger, logging.WARNING, "behind it")
"""


@pytest.mark.parametrize("words", [[], ["configured"]])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_line_begins_at_the_beginning_of_a_line_while_tqdm_shows_a_bar(words: list[str], is_terminal: bool) -> None:
    command = [sys.executable, "-c", BAR, *words]
    if is_terminal:
        reader, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        process = subprocess.Popen(command, stderr=terminal)
        os.close(terminal)
        written = b""
        with contextlib.suppress(OSError), open(reader, "rb", buffering=0) as file:  # EIO at its end, on Linux
            while data := file.read(4096):
                written += data
        assert process.wait() == 0
    else:
        written = subprocess.run(command, stderr=subprocess.PIPE, check=True).stderr
    lines = [""]
    for text in re.split(r"(\r?\n|\r|\x1b\[K)", written.decode()):  # as a terminal shows it
        if text in ("\n", "\r\n"):
            lines.append("")
        elif text in ("\r", "\x1b[K"):
            lines[-1] = ""
        else:
            lines[-1] += text
    shown = [line for line in lines if "recorder" in line]
    assert shown == ["recorder: in between", "recorder: behind it"]
    assert "3/3" in written.decode()
