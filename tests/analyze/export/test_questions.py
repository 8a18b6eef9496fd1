"""The questions of docs/sql.md are answered rightly, about the runs of a folder and about a catalog of them."""

from __future__ import annotations

import contextlib
import math
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import recorder
from recorder.analyze.export.tables import RunTables, ask
from recorder.errors import LookupFailedError
from recorder.run.run import Run
from tests.rigs import jobs
from tests.rigs.merging import make_small_run

PAGE = Path(__file__).parents[3] / "docs" / "sql.md"
QUESTIONS = dict(re.findall(r"^([A-Z][^\n]*?\?).*?\n\n```sql\n(.*?)```", PAGE.read_text(), re.M | re.S))
_UNEVEN = """
import torch
import torch.distributed as dist
import recorder
from tests.rigs.leaving import leave

RULES = "site=scalar keep=stats; site=grad keep=probe"

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with recorder.attach(model, enabled=True, dir="recordings", rules=RULES):
        for step in range(12):
            loss = model(torch.randn(3, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if (step, dist.get_rank()) == (5, 1):
                model.module[0].weight.grad *= 2
            optimizer.step()
            recorder.scalar("loss", loss.detach())
    leave()
"""
"""A training of two ranks, one of which doubles a gradient at step 5."""


def train(folder: Path, *, bad_step: int | None) -> Run:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rules: Any = {"rules": "site=scalar keep=stats; site=output keep=stats; site=grad keep=probe", "min_free_bytes": 0}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("RECORDER_NAME", folder.name)
        stack.enter_context(recorder.attach(model, enabled=True, dir=str(folder), **rules))
        for step in range(12):
            loss = model(torch.full((4, 4), float("nan") if step == bad_step else 1.0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.scalar("loss", loss.detach())
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, 0.5)
    return recorder.open_run(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """A sound run, one with a NaN at step 8, one of handmade files, and one of two ranks that are uneven at step 5."""
    folder = tmp_path_factory.mktemp("runs")
    made = [train(folder / "sound", bad_step=None), train(folder / "bad", bad_step=8)]
    (folder / "uneven.py").write_text(_UNEVEN)
    jobs.succeeded(jobs.ranks(folder, folder / "uneven.py", RECORDER_NAME="uneven"))
    made.append(recorder.open_run(make_small_run(folder / "small" / "small")))
    return [*made, recorder.open_run(folder / "recordings")]


@pytest.fixture(scope="module", params=["runs", "catalog"])
def of(request: pytest.FixtureRequest, runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "runs":
        return runs
    catalog = str(tmp_path_factory.mktemp("catalog"))
    made = RunTables(catalog, is_new=True)
    for run in runs:
        made.register(run)
    return RunTables(catalog)


def test_there_are_ten() -> None:
    assert len(QUESTIONS) == PAGE.read_text().count("```sql") == 10


@pytest.mark.parametrize("question", ["delete from runs", "select 1; drop table runs", "copy runs to 'copied.csv'"])
def test_what_would_change_something_is_refused(
    of: Any, question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LookupFailedError, match=r"(DELETE|DROP|COPY): expected only SELECT"):
        ask(question, of)
    with pytest.raises(LookupFailedError, match=r"the query: 2 statements; ask one at a time"):
        ask("select 1; select 2", of)
    assert not list(tmp_path.iterdir())
    assert (
        ask("pivot (select name, state from runs) on state using count(*)", of).rows and ask("describe runs", of).rows
    )


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered(of: Any, runs: list[Run], question: str) -> None:
    answer = ask(QUESTIONS[question], of)
    sound, bad, small, uneven = "sound", "bad", "small", "uneven"
    assert [run.name for run in runs] == [sound, bad, small, uneven]
    rows = answer.rows
    host, today = os.uname().nodename, datetime.now(UTC).date()
    match question.split()[:4]:
        case ["Which", "runs", "had", *_]:
            assert rows == [(bad, 8)]
        case ["Which", "host", *_]:
            assert rows[0][0] == host and rows[0][2] >= 1
        case ["What", "was", "the", "gradient"]:
            assert {name for name, _ in rows} == {sound, bad, uneven} and all(norm > 0 for _, norm in rows)
            at_fault = ask(QUESTIONS[question].replace("step = 10", "step = 8"), of).rows
            assert {name for name, norm in at_fault if math.isnan(norm)} == {bad}
            frame = runs[0].probe().to_pandas().query("site == 'grad' and step == 10")
            assert dict(rows)[sound] == pytest.approx((frame.l2**2).sum() ** 0.5)
        case ["Where", "does", *_]:
            assert {(name, step) for name, _, step in rows} == {(sound, 11), (bad, 11), (small, 3), (uneven, 11)}
            table = runs[3].dataset().to_table().to_pandas()
            losses = table.query("site == 'scalar' and name == 'loss' and step == 11")["mean"]
            assert len(losses) == 2 and {row[0]: row[1] for row in rows}[uneven] == pytest.approx(losses.mean())
        case ["Which", "runs", "were", "killed", *_]:
            assert rows == []
        case ["Which", "modules", *_]:
            assert rows and {"nonfinite"} <= {row[1] for row in rows}
        case ["Which", "gradients", *_]:
            assert {row[0] for row in rows} == {sound, bad, uneven} and all(
                ".weight" in row[2] or ".bias" in row[2] for row in rows
            )
            assert [math.isnan(row[1]) for row in rows if row[0] == bad] == [True]
            assert [row[3] for row in rows if row[0] == bad] == [8]
        case ["At", "which", *_]:
            assert rows == [(uneven, 5, "0", "weight", pytest.approx(2))]
        case ["How", "many", *_]:
            assert [(day, number) for day, number, _ in rows][-1] == (today, 3)
        case ["Which", "runs", "are", "damaged,"]:
            assert rows == []
        case _:
            raise AssertionError(question)
