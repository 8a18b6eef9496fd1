"""Counts and lists as people read them."""

from __future__ import annotations

import pytest

from recorder.system.text import counted, fewer_clauses, listed, named, shortened, steps_in_words


@pytest.mark.parametrize(("number", "text"), [(0, "0 rows"), (1, "1 row"), (2000, "2,000 rows")])
def test_one_thing_has_no_plural(number: int, text: str) -> None:
    assert counted(number, "row") == text


@pytest.mark.parametrize(
    ("num_items", "text"),
    [(0, ""), (1, "0"), (3, "0, 1, 2"), (4, "0, 1, 2 and 1 more"), (2003, "0, 1, 2 and 2,000 more")],
)
def test_a_long_list_says_how_much_more_there_is(num_items: int, text: str) -> None:
    assert listed(range(num_items), 3) == text


def test_several_numbers_are_named_in_the_plural() -> None:
    assert (named("rank", [3]), named("rank", [1, 2])) == ("rank 3", "ranks 1, 2")


def test_numbers_are_said_by_their_ends_and_what_lies_between() -> None:
    said = [steps_in_words(steps) for steps in ([], [3], [0, 1, 2], [0, 10, 20], [0, 10, 25])]
    assert said == ["no step", "step 3", "steps 0 to 2", "steps 0 to 20 (one in 10)", "steps 0 to 25 (3 of them)"]
    assert steps_in_words([0, 1], "rank") == "ranks 0 to 1"


def test_a_long_text_keeps_its_ends() -> None:
    assert [fewer_clauses("one; two; three", most) for most in (15, 14, 8)] == [
        "one; two; three",
        "one; three",
        "one...ree",
    ]
    assert shortened("abcdefghij", 10) == "abcdefghij" and shortened("abcdefghijk", 10) == "abcd...hijk"
