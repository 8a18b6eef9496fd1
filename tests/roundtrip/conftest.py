"""Each case trains once, however many tests look at it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.campaigns.roundtrip.roundtrip import Case, Proof

Prove = Callable[[Case], Proof]


@pytest.fixture(scope="session")
def prove(tmp_path_factory: pytest.TempPathFactory) -> Prove:
    """``prove(case)``: the recorded run and its reference, run to their ends the first time they are asked for."""
    done: dict[Case, Proof] = {}

    def prove(case: Case) -> Proof:
        if case not in done:
            done[case] = case.start(tmp_path_factory.mktemp("proof")).finished()
        return done[case]

    return prove
