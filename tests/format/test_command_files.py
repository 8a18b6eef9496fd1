"""Commands are published whole under numbers of their own; what lies in their place and is none is refused."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from recorder.errors import CommandError
from recorder.format.commands import (
    COMMAND_BYTES,
    COMMANDS,
    MAX_COMMANDS,
    PAUSE,
    SET,
    Command,
    CommandFolder,
    Refusal,
    command_name,
    send,
)


class Clock:
    """A clock that moves when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def pause(step: int = 5) -> Command:
    return Command(kind=PAUSE, from_step=step, by="me")


def test_commands_are_numbered_in_their_order_and_found_once(tmp_path: Path) -> None:
    folder = CommandFolder(tmp_path)
    assert folder.look() == []
    first, second = send(tmp_path, pause(1)), send(tmp_path, pause(2))
    assert (first.number, second.number) == (1, 2)
    assert folder.look() == [first, second]
    assert folder.look(is_told=True) == []
    third = send(tmp_path, pause(3))
    assert folder.look() == [third]
    assert sorted(os.listdir(tmp_path / COMMANDS)) == ["000001.json", "000002.json", "000003.json"]


def test_commands_that_are_sent_at_once_all_get_numbers_of_their_own(tmp_path: Path) -> None:
    sent: list[Command] = []
    threads = [threading.Thread(target=lambda: sent.append(send(tmp_path, pause()))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.number for one in sent) == list(range(1, 17))
    found = CommandFolder(tmp_path).look()
    assert {one.number: one for one in sent} == {one.number: one for one in found}


def test_a_look_that_finds_nothing_new_is_one_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    folder = CommandFolder(tmp_path, clock)
    send(tmp_path, pause())
    assert len(folder.look()) == 1
    clock.now_s = 4.0
    folder.look()
    listed = []
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path))
    clock.now_s = 4.9
    assert folder.look() == []
    assert not listed


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{}", "its format is None"),
        (b"\x00" * 100, "not JSON"),
        (b"[" * 3000, "not JSON"),
        (b" " * (COMMAND_BYTES + 1), "larger than"),
        (b'{"crc32c":"00000000","format":"recorder"}', "checksum"),
    ],
)
def test_a_file_that_holds_no_command_is_refused_once_it_must_be_whole(
    tmp_path: Path, content: bytes, why: str
) -> None:
    clock = Clock()
    folder = CommandFolder(tmp_path, clock)
    (tmp_path / COMMANDS).mkdir()
    (tmp_path / COMMANDS / command_name(1)).write_bytes(content)
    second = send(tmp_path, pause())
    found = folder.look()
    clock.now_s = 6.0
    found += folder.look()
    assert second in found
    (refusal,) = [one for one in found if isinstance(one, Refusal)]
    assert refusal.number == 1 and why in refusal.why and "\n" not in refusal.why
    clock.now_s = 20.0
    assert folder.look() == []


def test_a_file_that_is_not_whole_yet_is_taken_once_it_is(tmp_path: Path) -> None:
    (tmp_path / COMMANDS).mkdir()
    text = pause().encode()
    path = tmp_path / COMMANDS / command_name(1)
    folder = CommandFolder(tmp_path)
    for cut in (0, 1, len(text) // 2, len(text) - 1):
        path.write_bytes(text[:cut])
        assert folder.look() == []
    path.write_bytes(text)
    (found,) = folder.look()
    assert isinstance(found, Command) and found.kind == PAUSE


def test_links_pipes_and_directories_in_the_place_of_commands_are_refused_without_waiting(tmp_path: Path) -> None:
    clock = Clock()
    folder = CommandFolder(tmp_path, clock)
    (tmp_path / COMMANDS).mkdir()
    outside = tmp_path / "outside.json"
    outside.write_bytes(pause().encode())
    (tmp_path / COMMANDS / command_name(1)).symlink_to(outside)
    os.mkfifo(tmp_path / COMMANDS / command_name(2))
    (tmp_path / COMMANDS / command_name(3)).mkdir()
    found = folder.look()
    assert [type(one) for one in found] == [Refusal] * 3


def test_a_link_in_the_place_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / command_name(1)).write_bytes(pause().encode())
    run = tmp_path / "run"
    run.mkdir()
    (run / COMMANDS).symlink_to(elsewhere)
    assert CommandFolder(run).look(is_told=True) == []
    with pytest.raises(CommandError, match="no directory"):
        send(run, pause())


def test_a_disk_without_links_still_takes_commands_exclusively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    send(tmp_path, pause(1))
    monkeypatch.setattr(os, "link", refuse)
    second = send(tmp_path, pause(2))
    assert second.number == 2
    assert CommandFolder(tmp_path).look()[-1] == second
    assert len(os.listdir(tmp_path / COMMANDS)) == 2


def test_a_command_that_cannot_be_sent_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommandError, match="unknown site"):
        send(tmp_path, Command(kind=SET, from_step=1, rules=("site=nowhere",)))
    assert os.listdir(tmp_path) == []
    with pytest.raises(CommandError, match="No such file"):
        send(tmp_path / "gone", pause())
    send(tmp_path, pause())
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:10]))  # a disk that is full
    with pytest.raises(CommandError, match="No space left"):
        send(tmp_path, pause())
    assert os.listdir(tmp_path / COMMANDS) == ["000001.json"]


def test_a_run_takes_a_bounded_number_of_commands(tmp_path: Path) -> None:
    send(tmp_path, pause())
    os.rename(tmp_path / COMMANDS / command_name(1), tmp_path / COMMANDS / command_name(MAX_COMMANDS))
    with pytest.raises(CommandError, match="has had 4096 commands"):
        send(tmp_path, pause())


def test_commands_may_be_read_by_whoever_may_read_the_run(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o750)
    send(tmp_path, pause())
    assert (tmp_path / COMMANDS).stat().st_mode & 0o777 == 0o750
    assert (tmp_path / COMMANDS / command_name(1)).stat().st_mode & 0o777 == 0o640
