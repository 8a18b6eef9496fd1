"""A command says what is recorded at which steps and nothing else; whatever else a file holds is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder.errors import CommandError
from recorder.format.commands import (
    COMMAND_BYTES,
    DUMP,
    MAX_COMMANDS,
    PAUSE,
    SET,
    UNDO,
    Command,
    command_name,
    parse_command_name,
    read_command,
    rules_of,
)
from recorder.format.rundir import parse_json

SOUND = Command(kind=SET, from_step=100, to_step=104, rules=("module=blocks.3.* site=* keep=tensor",), by="me@here")


def members_of(command: Command) -> dict[str, Any]:
    return parse_json(command.encode(), "it")


@pytest.mark.parametrize(
    "command",
    [
        SOUND,
        replace(SOUND, to_step=None),
        Command(kind=DUMP, from_step=7, to_step=7, reason="NaN in the loss", attempt=3),
        Command(kind=PAUSE, from_step=0),
        Command(kind=UNDO, from_step=2, undoes=1),
    ],
)
def test_a_command_reads_back_as_it_was_sent(command: Command) -> None:
    assert read_command(members_of(command), "it", 12) == replace(command, number=12)
    assert len(command.encode()) < 500


def test_the_rules_of_a_command_are_rules() -> None:
    assert [rule.module for rule in rules_of(SOUND)] == [("blocks.3.*",)]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"kind": "run"}, "unknown kind 'run'; this version knows set, undo"),
        ({"kind": ["set"]}, "kind is"),
        ({"version": [2, 0]}, "format version 2.0"),
        ({"format": "other"}, "its format is 'other'"),
        ({"from_step": None}, "from_step -1"),
        ({"from_step": -1}, "from_step is -1"),
        ({"from_step": 1 << 60}, "steps go from 0"),
        ({"from_step": True}, "from_step is True"),
        ({"to_step": 99}, "its last step, 99, lies before its first, 100"),
        ({"id": "../../etc"}, "its id is '../../etc'"),
        ({"rules": []}, "a set has 1 to 16 rules"),
        ({"rules": ["site=output"] * 17}, "this one has 17"),
        ({"rules": ["dir=/tmp"]}, "unknown key 'dir'"),
        ({"rules": ["site=nowhere"]}, "unknown site 'nowhere'"),
        ({"rules": ["module='re:(a+)+b'"]}, "regular expression"),
        ({"rules": ["module='!re:(a+)+b'"]}, "regular expression"),
        ({"rules": ["site=output keep=ring"]}, "keeps a ring"),
        ({"rules": [3]}, "rules is"),
        ({"undoes": 1}, "only an undo"),
        ({"kind": "undo", "rules": []}, "must name the command"),
        ({"kind": "pause"}, "only a set has rules"),
        ({"kind": "dump", "to_step": None}, "a dump needs a last step"),
    ],
)
def test_what_no_command_says_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(CommandError, match=r"000001\.json: ") as caught:
        read_command(members_of(SOUND) | changed, "000001.json", 1)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    st.dictionaries(
        st.sampled_from([*members_of(SOUND)]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=5,
        ),
    )
)
def test_whatever_members_are_they_make_a_sound_command_or_an_error_of_one_line(changed: dict[str, Any]) -> None:
    try:
        found = read_command(members_of(SOUND) | changed, "it", 1)
    except CommandError as error:
        assert str(error).startswith("it: ")
    else:
        assert read_command(json.loads(json.dumps(members_of(found))), "it", 1) == found


def test_a_command_that_no_writer_would_take_is_not_encoded() -> None:
    with pytest.raises(CommandError, match="unknown kind"):
        replace(SOUND, kind="stop").encode()
    long = tuple(f"module={'x' * 300}{number}" for number in range(16))
    with pytest.raises(CommandError, match=f"at most {COMMAND_BYTES} are read"):
        replace(SOUND, rules=long).encode()


@given(st.integers(1, MAX_COMMANDS))
def test_names_and_numbers_go_both_ways(number: int) -> None:
    assert parse_command_name(command_name(number)) == number


@pytest.mark.parametrize("name", ["000000.json", "1.json", "004097.json", "000001.json.tmp", "\u0660" * 5 + "1.json"])
def test_no_other_name_is_a_command(name: str) -> None:
    assert parse_command_name(name) is None
