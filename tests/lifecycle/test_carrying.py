"""Commands travel between the directories of nodes that share no file system, through the process group's store."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from recorder.capture.parallel import topology
from recorder.capture.parallel.topology import JobRank, open_job_store
from recorder.format.commands import COMMAND_BYTES, DUMP, SET, UNDO, Command, send
from recorder.format.rundir import RUN_MANIFEST
from recorder.lifecycle.commands import Carrier, _digest
from recorder.read.run import read_commands
from recorder.system.log import Events
from tests.rigs.forking import fork

RANK_0 = JobRank(rank=0, local_rank=0, node_rank=0, world_size=2, local_world_size=1, attempt=0, host="here")
SOON_S = 30.0


@pytest.fixture
def server() -> Iterator[int]:
    """The process that holds the store, which is also that of this process's group."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def hold() -> None:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        while store is not None:
            time.sleep(1)

    pid = fork(hold)
    listener.close()
    try:
        store = PrefixStore("of the job", TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        dist.destroy_process_group()


class Node:
    """A rank with a directory of its own."""

    def __init__(self, folder: Path, rank: int, dir_setting: str = "recordings") -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if not (self.run_dir / RUN_MANIFEST).exists():
            (self.run_dir / RUN_MANIFEST).write_text(f"made by {rank}")
        self.events = Events()
        self.carrier = Carrier(replace(RANK_0, rank=rank, local_rank=rank), self.events, dir_setting=dir_setting)
        self.carrier.start(self.run_dir)

    @property
    def is_carrying(self) -> bool:
        thread = self.carrier._thread
        return thread is not None and thread.is_alive()

    @property
    def commands(self) -> list[tuple[int, str, int | None]]:
        return [(one.number, one.kind, one.undoes) for one in read_commands(self.run_dir).sound]

    @property
    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events.as_list()]

    def send(self, kind: str = DUMP, **members: Any) -> Command:
        steps = {"from_step": 5, "to_step": 7} if kind != UNDO else {"from_step": 5}
        return send(self.run_dir, Command(kind=kind, **{**steps, **members}))


@pytest.fixture
def nodes(server: int, tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    pair = Node(tmp_path / "one", 0), Node(tmp_path / "two", 1)
    yield pair
    for node in pair:
        node.carrier.close()


def until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < until_s, "it never came to be so"
        time.sleep(0.02)


def test_what_one_node_is_told_the_other_is_told_once_and_both_say_that_they_are_apart(
    nodes: tuple[Node, Node],
) -> None:
    one, two = nodes
    one.send()
    until(lambda: len(two.commands) == 1)
    two.send(SET, rules=("site=grad keep=stats",))
    until(lambda: len(one.commands) == 2)
    one.send(UNDO, undoes=2)
    until(lambda: len(two.commands) == 3)
    for node in nodes:
        node.carrier.close()
        assert node.commands == [(1, DUMP, None), (2, SET, None), (3, UNDO, 2)]
        assert node.kinds == ["nodes_apart"]
    ids = [[command.id for command in read_commands(node.run_dir).sound] for node in nodes]
    assert ids[0] == ids[1]


def test_an_undo_means_the_same_command_where_its_number_is_another(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    for node in nodes:  # at once, so that both are the first of their own node
        node.send(SET, rules=("site=grad keep=stats",))
    until(lambda: len(one.commands) == len(two.commands) == 2)
    meant = read_commands(one.run_dir).sound[0]
    one.send(UNDO, undoes=meant.number)
    until(lambda: len(two.commands) == 3)
    there = read_commands(two.run_dir).sound
    assert [command.number for command in there if command.id == meant.id] == [there[2].undoes]


def test_what_is_sent_as_a_node_ends_is_carried_still(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    until(lambda: one.kinds == two.kinds == ["nodes_apart"])
    one.send()
    one.carrier.close()
    assert not one.is_carrying
    until(lambda: len(two.commands) == 1)


def test_ranks_of_one_directory_carry_nothing_and_their_threads_end(server: int, tmp_path: Path) -> None:
    one, two = Node(tmp_path, 0), Node(tmp_path, 1)
    until(lambda: not one.is_carrying and not two.is_carrying)
    assert one.kinds == two.kinds == []


def test_recordings_of_other_settings_are_other_runs(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    nodes[0].send()
    other = Node(tmp_path / "three", 0, "elsewhere")
    until(lambda: len(nodes[1].commands) == 1)
    other.carrier.close()
    assert other.commands == [] and other.kinds == []


def test_what_is_no_command_is_a_note_and_the_next_one_is_carried(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    until(lambda: one.kinds == two.kinds == ["nodes_apart"])
    store = open_job_store(f"recorder/commands/run/0/{_digest(b'recordings')}/")
    assert store is not None
    unknown = Command(kind=UNDO, from_step=1, undoes=9).encode()
    path = Command(kind=DUMP, from_step=1, to_step=2).encode().replace(b'"dump"', b'"exec"')
    wrong = (
        b"",
        b"\xff" * 30,
        b"\n[]",
        b"\n" + b" " * (COMMAND_BYTES + 1),
        b"0123456789abcdef\n" + unknown,
        b"\n" + path,
    )
    for text in wrong:
        store.put(f"text/{store.add('last', 1)}", text)
    store.close()
    one.send()
    until(lambda: len(two.commands) == 1)
    until(lambda: one.kinds == two.kinds == ["nodes_apart", *["uncarried"] * len(wrong)])
    assert len(one.commands) == 1
    assert "not done" in one.events.as_list()[1]["message"]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_is_stopped_or_gone_costs_a_note_and_no_time(
    server: int, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "_STORE_DEADLINE_S", 1.0)
    one, two = Node(tmp_path / "one", 0), Node(tmp_path / "two", 1)
    until(lambda: one.kinds == two.kinds == ["nodes_apart"])
    os.kill(server, number)
    until(lambda: not one.is_carrying and not two.is_carrying)
    assert one.kinds == two.kinds == ["nodes_apart", "uncarried"]
    assert "are not carried between nodes any more" in one.events.as_list()[-1]["message"]


def test_a_store_that_is_stopped_holds_the_end_up_for_a_moment_alone(nodes: tuple[Node, Node], server: int) -> None:
    until(lambda: all(node.kinds == ["nodes_apart"] for node in nodes))
    os.kill(server, signal.SIGSTOP)
    time.sleep(0.5)  # so that a call is under way
    nodes[0].carrier.close()
    assert not nodes[0].is_carrying, "a thread that comes back later would abort the process"
    assert nodes[0].kinds == ["nodes_apart"]


def test_without_a_process_group_nothing_begins(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    assert not node.is_carrying
    node.carrier.close()
