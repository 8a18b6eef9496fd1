"""A short run of the fuzzer, and its corpus; `python -m tests.campaigns fuzz --minutes 60` does more."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.fuzz.child import contain, reaching
from tests.campaigns.fuzz.fuzz import Sandbox, corpus, fuzz

NUM_CASES = 8


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    yield Sandbox(tmp_path_factory.mktemp("fuzz"), seed=20260101)


def test_mutated_runs_are_answered_or_refused(sandbox: Sandbox) -> None:
    found = [(verdict.case, verdict.finding) for verdict in fuzz(sandbox, range(NUM_CASES)) if verdict.finding]
    assert not found, f"case {found[0][0]}, {sandbox.recipe(found[0][0])}: {found[0][1]}"


def test_what_was_found_once_stays_mended(sandbox: Sandbox) -> None:
    recipes = [json.loads(path.read_text()) for path in corpus()]
    assert len(recipes) >= 8

    def check(case: int) -> str:
        return sandbox.try_recipe(recipes[case], random.Random(case), recipes[case].get("share", 0.1))

    for verdict in contain(check, range(len(recipes))):
        assert not verdict.finding, f"{corpus()[verdict.case].name}: {verdict.finding}"


def test_sound_runs_have_no_findings(sandbox: Sandbox) -> None:
    def check(case: int) -> str:
        return sandbox.try_recipe({"base": list(sandbox.bases)[case], "steps": []}, random.Random(0), 0.2)

    assert [verdict.finding for verdict in contain(check, range(3))] == ["", "", ""]


def test_the_fuzzer_sees_crashes_hangs_bombs_and_writes_elsewhere(tmp_path: Path) -> None:
    def check(case: int) -> str:
        if case == 0:
            os.kill(os.getpid(), 11)
        elif case == 1:
            while True:
                pass
        elif case == 2:
            bytearray(1 << 33)
        elif case == 3:
            with reaching(tmp_path / "out") as broken:
                (tmp_path / "elsewhere").write_text("x")
            return "\n".join(broken)
        return ""

    verdicts = list(contain(check, range(5), limit_s=0.5))
    said = ["ended by -11", "took longer than allowed", "MemoryError", "elsewhere", ""]
    assert [verdict.case for verdict in verdicts] == [0, 1, 2, 3, 4]
    for verdict, text in zip(verdicts, said, strict=True):
        assert text in verdict.finding
    assert verdicts[4].finding == ""
