"""Commands from the store reach the runs of a node; what is no command, old, sent again or unsigned does not."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from recorder.daemon.destination import Throttle, parse_destination
from recorder.daemon.errands import StoreCarrier, send_to_store, signature
from recorder.daemon.run_shipper import RunShipper
from recorder.daemon.settings import DaemonSettings
from recorder.daemon.shipped import Shipping
from recorder.errors import CommandError
from recorder.format.commands import PAUSE, SET, UNDO, Command, CommandFolder
from recorder.format.rundir import encode_manifest
from tests.daemon.support import at_work, ship
from tests.daemon.test_shipping import small_run
from tests.rigs.command_line import Cli
from tests.rigs.server import BUCKET, StoreServer
from tests.rigs.waiting import wait_until

KEY = b"0123456789abcdef"
RULE = "module=layers.* site=output keep=tensor"


class Site:
    """A run here and there, and a carrier between the two."""

    def __init__(self, tmp_path: Path, key: bytes = b"", there: str = "") -> None:
        self.run = small_run(tmp_path)
        there = there or str(tmp_path / "there")
        assert ship(tmp_path, there)[0] == 0
        (tmp_path / "key").write_bytes(key)
        self.there = tmp_path / "there" / "run-a"
        self.destination = parse_destination(there, Throttle(0))
        settings = DaemonSettings(to=there, key_file=str(tmp_path / "key") if key else "")
        self.shared = Shipping(destination=self.destination, settings=settings)
        shipper = RunShipper(str(self.run.parent), ("run-a",), self.shared)
        shipper.there.run_id = "run-a"
        self.carrier = StoreCarrier(shipper)
        shipper.close()

    def carried(self) -> tuple[dict[str, int], list[Command]]:
        self.carrier.carry()
        found = CommandFolder(self.run).look(is_told=True)
        return self.shared.counters.of("commands"), [one for one in found if isinstance(one, Command)]


def test_a_command_is_carried_once_and_its_undo_names_the_number_here(tmp_path: Path) -> None:
    site = Site(tmp_path)
    own = Command(kind=PAUSE, from_step=1, to_step=2)
    from recorder.format.commands import send

    send(site.run, own)
    sent = send_to_store(site.destination, "run-a", Command(kind=SET, from_step=9, rules=(RULE,)), b"")
    counts, here = site.carried()
    assert (counts, [one.number for one in here]) == ({"carried": 1}, [1, 2])
    assert here[1] == replace(sent, number=2)
    send_to_store(site.destination, "run-a", Command(kind=UNDO, from_step=20, undoes=sent.number), b"")
    counts, here = site.carried()
    assert (counts, here[2].undoes) == ({"carried": 2}, 2)
    again = StoreCarrier(site.carrier._run)
    again.carry()
    assert site.shared.counters.of("commands") == {"carried": 2}, "a new daemon finds them here"


@pytest.mark.parametrize("what", ["stale", "from the future", "oversized", "invalid", "replayed", "undoes nothing"])
def test_what_must_not_be_done_is_refused_and_counted(tmp_path: Path, what: str) -> None:
    site = Site(tmp_path)
    command = Command(kind=PAUSE, from_step=9)
    hour_ns = 3600 * 10**9
    if what == "stale":
        command = replace(command, created_ns=time.time_ns() - 2 * hour_ns)
    elif what == "from the future":
        command = replace(command, created_ns=time.time_ns() + hour_ns)
    elif what == "undoes nothing":
        command = Command(kind=UNDO, from_step=9, undoes=7)
    send_to_store(site.destination, "run-a", command, b"")
    path = site.there / "_commands" / "000001.json"
    if what == "oversized":
        path.write_bytes(path.read_bytes() + b" " * 5000)
    elif what == "invalid":
        path.write_text(json.dumps({"kind": "exec", "path": "/etc/shadow"}))
    elif what == "replayed":
        (path.parent / "000002.json").write_bytes(path.read_bytes())
    counts, here = site.carried()
    if what == "replayed":
        assert (counts, len(here)) == ({"carried": 1, "replayed": 1}, 1)
    else:
        word = {"from the future": "stale", "undoes nothing": "invalid"}.get(what, what)
        assert (counts, here) == ({word: 1}, [])


def test_with_a_key_only_what_is_signed_for_this_run_and_number_is_carried(tmp_path: Path) -> None:
    site = Site(tmp_path, KEY)
    command = Command(kind=PAUSE, from_step=9)
    send_to_store(site.destination, "run-a", command, b"")
    send_to_store(site.destination, "run-a", Command(kind=PAUSE, from_step=10), b"another key 1234")
    send_to_store(site.destination, "run-a", Command(kind=PAUSE, from_step=11), KEY)
    last = Command(kind=PAUSE, from_step=12)
    other = last.encode()
    (site.there / "_commands" / "000004.json").write_bytes(other)
    (site.there / "_commands" / f"000004-{last.id}.hmac").write_bytes(signature(KEY, "run-b", 4, other))
    counts, here = site.carried()
    assert counts == {"unsigned": 3, "carried": 1}
    assert [one.from_step for one in here] == [11]


def test_nobody_is_told_of_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no such run"):
        send_to_store(parse_destination(str(tmp_path), Throttle(0)), "run-a", Command(kind=PAUSE, from_step=9), b"")


def test_a_run_in_a_store_is_told_there_and_signed(tmp_path: Path, cli: Cli, store: StoreServer, to: str) -> None:
    site = Site(tmp_path, KEY, to)
    (writer,) = (site.run / "rank=00000").iterdir()
    members = {"state": "recording", "step": 100, "attempt": 0, "interval_s": 1.0, "changed_ns": 1}
    ((key_of_node, _),) = site.destination.listing("run-a/_nodes/")
    node = encode_manifest({"writers": {f"rank=00000/{writer.name}": members}})
    store.put(f"{to.partition(f'{BUCKET}/')[2]}/{key_of_node}", node)
    key = ("--key-file", tmp_path / "key")
    told = cli("set", f"{to}/run-a", "pause", "--at", "+200", "--timeout", "0", *key)
    assert told.exit_code == 1, told
    assert "command 1 of run-a: pause from step 300 on" in told.out
    assert "commands are carried by daemons that were started with --accept-commands" in told.out
    assert cli("set", f"{to}/run-a", "pause", "--at", "+300", "--timeout", "0").exit_code == 1, "and without a key"
    counts, here = site.carried()
    assert (counts, [one.from_step for one in here]) == ({"carried": 1, "unsigned": 1}, [300])
    late = cli("set", f"{to}/run-a", "pause", "--at", "100", *key)
    assert late.exit_code == 2 and "--at 100: that step has passed" in late.err
    ring = cli("dump", f"{to}/run-a", *key)
    assert ring.exit_code == 2 and "no rule of this run has keep=ring" in ring.err
    missing = cli("set", f"{to}/run-a", "pause", "--key-file", tmp_path / "none")
    assert missing.exit_code == 2 and "cannot be read" in missing.err


@pytest.mark.parametrize("has_key", [False, True])
def test_a_daemon_that_takes_unsigned_commands_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_key: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr("recorder.daemon.daemon.logger.warning", lambda text, *words: said.append(text % words))
    small_run(tmp_path)
    (tmp_path / "key").write_bytes(KEY)
    more = {"key_file": str(tmp_path / "key")} if has_key else {}
    with at_work(tmp_path, str(tmp_path / "there"), accept_commands=True, **more) as daemon:
        wait_until(lambda: any(run.is_settled for run in daemon.runs))
    assert any("accept_commands: everybody who can write to file:" in one for one in said) != has_key, said


def test_a_run_where_it_records_takes_no_key(tmp_path: Path, cli: Cli) -> None:
    found = cli("set", small_run(tmp_path), "pause", "--key-file", tmp_path / "key")
    assert found.exit_code == 2 and "lies where it records; what is sent there is not signed" in found.err


def test_a_signature_without_its_command_keeps_nobody_out(tmp_path: Path) -> None:
    """As a sender leaves it that is killed between the two."""
    site = Site(tmp_path, KEY)
    lost = Command(kind=PAUSE, from_step=5)
    send_to_store(site.destination, "run-a", lost, KEY)
    (site.there / "_commands" / "000001.json").unlink()
    send_to_store(site.destination, "run-a", Command(kind=PAUSE, from_step=9), KEY)
    counts, here = site.carried()
    assert (counts, [one.from_step for one in here]) == ({"carried": 1}, [9])
