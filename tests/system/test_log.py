"""What the library says through `logging`: never on standard output, once on standard error, and to whoever asks."""

from __future__ import annotations

import logging
import subprocess
import sys
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
    assert error.startswith("ERROR recorder recorder: the rule 'module=nowhere")
    assert written.startswith("INFO recorder recorder: 3 rows, ")
    assert following.startswith("INFO recorder recorder: next: recorder show ")
    assert [line.partition(": ")[0] for line in (tmp_path / "log.txt").read_text().splitlines()].count("recorder") == 3


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
