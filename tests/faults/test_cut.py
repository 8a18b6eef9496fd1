"""A sample of the campaign `python -m tests.campaigns cut`: all boundaries, and some cuts between them."""

from __future__ import annotations

import pytest

from tests.campaigns.faults import cut


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> dict[str, cut.Victim]:
    return {victim.name: victim for victim in cut.record(tmp_path_factory.mktemp("cut"))}


NAMES = (
    "sealed tensors-000000.arrow",
    "sealed stats-000000.arrow",
    "open tensors-000000.arrow",
    "open stats-000000.arrow",
    "open, with zeros after it",
    "index",
    "_writer.json",
    "_run.json",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_file_gives_the_whole_batches_before_the_cut_and_says_what_follows(
    victims: dict[str, cut.Victim], name: str
) -> None:
    assert set(victims) == set(NAMES)
    ((victim, cuts),) = cut.sample([victims[name]], 25, seed=1)
    assert len(cuts) >= 35
    assert cut.problems_of(victim, cuts) == []


def test_a_batch_that_is_missing_or_another_would_be_noticed(victims: dict[str, cut.Victim]) -> None:
    victim = victims["open stats-000000.arrow"]
    swapped = victim._replace(batches=victim.batches[::-1])
    shorter = victim._replace(ends=victim.ends[:-1], batches=victim.batches[:-1])
    whole = [len(victim.content)]
    assert cut.problems_of(victim, whole) == []
    assert len(cut.problems_of(swapped, whole)) == len(cut.problems_of(shorter, whole)) == 1
