"""Bad disks by real means: mounts, limits, and system calls that the kernel refuses. Each costs rows, counted, at most.

All jobs run side by side, once, as most of their time they wait: the tests look at what they left.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import recorder
from recorder.upkeep.verify import verify
from tests.campaigns.faults import seccomp
from tests.rigs import jobs

from .disk_job import CASES, NUM_STEPS, RANKS

ROOT = Path(__file__).parents[2]
KEY = ["rank", "step", "module_path", "site", "name"]
SUMMARY = re.compile(r"recorder: ([\d,]+) rows?, .*")
DROPPED = re.compile(r"([\d,]+) ([a-z_]+(?::[A-Z0-9]+)?)(?=[,;]|$)")
NEVER_STARTS = "no_memory_for_pool"
IS_WARNED = {
    "full": "No space left on device",
    "full_at_start": "No space left on device",
    "inodes": "No space left on device",
    "file_size": "File too large",
    "file_size_tiny": "File too large",
    "own_quota": "used up their part of max_bytes",
    "read_only": "Read-only file system",
    "read_only_at_start": "Read-only file system",
    "removed": "No such file",
    "eio_write": "Input/output error",
    "eio_fsync": "Input/output error",
    "eio_ftruncate": "Input/output error",
    "eio_close": "Input/output error",
    "eio_everything": "Input/output error",
    "stale": "Stale file handle",
    "no_memory_for_writer": "Cannot allocate memory",
    "no_memory_for_pool": "no memory for the pool",
    "stall": "the pool",
    "stall_for_ever": "the pool",
    "read_only_for_good": "Read-only file system",
    "full_for_good": "No space left on device",
    "full_for_good_and_not_shown": "No space left on device",
    "eio_fsync_at_start": "Input/output error",
    "hung_fsync": "a sync has not returned within",
    "hung_fsync_at_start": "a sync has not returned within",
}
REASONS = {
    "full": {"disk_full"},
    "full_at_start": {"disk_full"},
    "inodes": {"disk_full"},
    "file_size": {"write_error:EFBIG"},
    "file_size_tiny": {"write_error:EFBIG"},
    "own_quota": {"quota"},
    "read_only": {"write_error:EROFS"},
    "read_only_at_start": {"write_error:EROFS"},
    "removed": {"write_error:ENOENT"},
    "eio_write": {"write_error:EIO"},
    "eio_everything": {"write_error:EIO"},
    "stale": {"write_error:ESTALE"},
    "descriptors": {"write_error:EMFILE"},
    "no_memory_for_writer": {"no_memory"},
    "stall": {"pool_full"},
    "stall_for_ever": {"pool_full", "abandoned_at_close"},
    "read_only_for_good": {"write_error:EROFS"},
    "full_for_good": {"disk_full"},
    "full_for_good_and_not_shown": {"disk_full"},
}
MUST_DROP = {"full", "file_size_tiny", "own_quota", "eio_write", "eio_everything", "stall", "stall_for_ever"}
MUST_DROP |= {"read_only_for_good", "full_for_good", "full_for_good_and_not_shown"}
NO_ACCOUNT = {"removed", "eio_everything", "eio_write", "stale", "stall_for_ever"}
"""Nothing at all can be written at the end, so that the last account is that of the last batch."""
WITHOUT_LINKS = ["eio_link", "eio_link_at_start", "no_links_at_start"]
SYNCS_FAIL = ["eio_fsync", "eio_fsync_at_start", "hung_fsync", "hung_fsync_at_start"]
RECOVERING = ["full", "full_at_start", "file_size", "file_size_tiny", "read_only", "read_only_at_start", "descriptors"]
RECOVERING += ["no_memory_for_writer", "stall"]

pytestmark = pytest.mark.skipif(
    not seccomp.is_possible() or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0,
    reason="needs x86_64 Linux with mount namespaces",
)


@dataclass(frozen=True)
class Left:
    """What a job left behind."""

    folder: Path
    code: int
    output: str

    def saved(self, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self.folder / f"rank{rank}.pt", weights_only=False)
        return found

    def end_s(self, rank: int = 0) -> float:
        """How long the end of the process took, seconds."""
        trained, ended = (float((self.folder / f"{name}.{rank}").read_text()) for name in ("trained", "ended"))
        return ended - trained

    @cached_property
    def run(self) -> recorder.Run:
        return recorder.open_run(self.folder / "run")

    @cached_property
    def rows(self) -> pd.DataFrame:
        frame = self.run.to_pandas(columns=[*KEY, "l2", "numel"])
        return frame.set_index(KEY).sort_index()

    @property
    def said(self) -> list[str]:
        """What the recorder had to say, but for the estimate at the start and the summary at the end."""
        lines = [line for line in self.output.splitlines() if line.startswith("recorder: ")]
        lines = [line for line in lines if not line.startswith("recorder: at these rules ")]
        return [line for line in lines if not SUMMARY.match(line) and "next: recorder" not in line]

    @property
    def accounts(self) -> tuple[int, dict[str, int]]:
        """Rows written and dropped, as the process itself said at its end."""
        (line,) = [line for line in self.output.splitlines() if SUMMARY.match(line)]
        found = SUMMARY.match(line)
        assert found is not None
        _, has_drops, rest = line.partition("; dropped ")
        drops = rest.partition(";")[0] if has_drops else ""
        return number(found[1]), {reason: number(count) for count, reason in DROPPED.findall(drops)}


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Left]]:
    folder = tmp_path_factory.mktemp("disks")
    command = ["unshare", "-rm", sys.executable, "-m", "tests.faults.disk_job"]
    forked = ["none-off", *CASES, "pair-none-off", "pair-eio_fsync", "pair-stall"]
    started = {"": jobs.Job([*command, *forked, f"--out={folder}"], folder / "all", {"PYTHONPATH": str(ROOT)})}
    launched, out = "full", folder / "pair-full"  # a launch costs seconds
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", *command[-1:]]
    words = [*command[:3], *torchrun, launched, f"--out={out}"]
    settings = {"PYTHONPATH": str(ROOT), "BAD_RANK": str(RANKS[launched])}
    started[f"pair-{launched}"] = jobs.Job(words, out, settings)
    finished = {name: job.wait(240) for name, job in started.items()}
    assert finished[""].returncode == 0, finished[""].output
    left = {name: Left(job.folder, job.returncode, job.output) for name, job in finished.items() if name}
    for name in forked:
        out = folder / name
        left[name] = Left(out, int((out / "code").read_text()), (out / "output.txt").read_text())
    yield left


Get = Callable[[str], Left]


@pytest.fixture
def get(everything: dict[str, Left]) -> Get:
    return everything.__getitem__


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("name", CASES)
def test_training_is_what_it_is_without_the_recorder_whatever_the_disk_does(get: Get, name: str) -> None:
    left, twin = get(name), get("none-off")
    assert (left.code, twin.code) == (0, 0), left.output
    assert_same(left.saved()["values"], twin.saved()["values"])
    assert "Traceback" not in left.output and "Exception" not in left.output, left.output


@pytest.mark.parametrize("name", [name for name in CASES if name != NEVER_STARTS])
def test_every_row_is_written_or_counted_with_its_reason(get: Get, name: str) -> None:
    whole = get("stall_reference" if name.startswith("stall") else "none")
    written, dropped = get(name).accounts
    assert written + sum(dropped.values()) == whole.accounts[0]
    assert set(dropped) <= REASONS.get(name, set())
    assert bool(dropped) or name not in MUST_DROP
    for writer in get(name).run.writers:
        assert writer.balance.num_missing == 0 or writer.state != "closed"


@pytest.mark.parametrize("name", [name for name in CASES if name not in (NEVER_STARTS, "removed")])
def test_what_counts_as_written_is_readable_and_right(get: Get, name: str) -> None:
    left = get(name)
    assert [finding.text for finding in verify(left.run) if finding.is_fault] == []
    retired = sum(writer.balance.retired_rows for writer in left.run.writers)
    assert len(left.rows) == left.accounts[0] - retired
    truth = get("stall_reference" if name.startswith("stall") else "none").rows
    assert left.rows.index.is_unique and len(left.rows) > 0
    pd.testing.assert_frame_equal(left.rows, truth.loc[left.rows.index])


@pytest.mark.parametrize("name", IS_WARNED)
def test_trouble_is_said_in_a_line_or_two(get: Get, name: str) -> None:
    said = [line for line in get(name).said if "the recording is incomplete" not in line]
    assert 1 <= len(said) <= 2, said
    assert any(IS_WARNED[name] in line for line in said), said


def test_nothing_is_said_where_nothing_is_wrong(get: Get) -> None:
    assert get("none").said == []


@pytest.mark.parametrize("name", RECOVERING)
def test_recording_goes_on_once_the_disk_is_well_again(get: Get, name: str) -> None:
    rows = get(name).rows
    assert rows.index.get_level_values("step").max() == NUM_STEPS - 1
    assert [writer.state for writer in get(name).run.writers] == ["closed"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in {NEVER_STARTS, *NO_ACCOUNT}])
def test_readers_give_the_account_that_the_process_gave_at_its_end(get: Get, name: str) -> None:
    (writer,) = get(name).run.writers
    assert writer.state == "closed"
    assert (writer.balance.written, writer.balance.dropped) == get(name).accounts
    assert writer.balance.num_missing == 0


@pytest.mark.parametrize("name", SYNCS_FAIL)
def test_where_only_syncs_fail_every_row_is_written_and_those_at_risk_are_counted(get: Get, name: str) -> None:
    left = get(name)
    (writer,) = left.run.writers
    assert left.accounts == (get("none").accounts[0], {})
    (suspect,) = re.findall(r"([\d,]+) rows that the disk may have lost", left.output)
    assert writer.balance.suspect == number(suspect)
    assert (writer.balance.suspect == left.accounts[0]) == name.endswith("_at_start")
    assert writer.balance.suspect > 0


@pytest.mark.parametrize("name", WITHOUT_LINKS)
def test_a_file_system_without_hard_links_costs_nothing(get: Get, name: str) -> None:
    left = get(name)
    (writer,) = left.run.writers
    assert left.accounts == (get("none").accounts[0], {})
    assert left.said == []
    assert [path.name for path in Path(str(writer.directory)).iterdir() if path.name.endswith(".open")] == []


def test_a_disk_that_hangs_for_ever_holds_the_end_no_longer_than_its_deadline(get: Get) -> None:
    assert get("stall_for_ever").end_s() < 1 + 14, "one second is the deadline; the others are for a busy machine"
    assert get("stall_for_ever").saved()["longest_s"] < 0.3 + 9


@pytest.mark.parametrize("name", RANKS)
def test_one_ranks_bad_disk_is_nothing_to_the_job(get: Get, name: str) -> None:
    left, twin = get(f"pair-{name}"), get("pair-none-off")
    assert left.code == twin.code == 0, left.output
    for rank in (0, 1):
        assert_same(left.saved(rank)["values"], twin.saved(rank)["values"])


@pytest.mark.parametrize("name", RANKS)
def test_the_ledger_balances_on_every_rank_though_one_has_a_bad_disk(get: Get, name: str) -> None:
    left = get(f"pair-{name}")
    assert left.run.ranks == [0, 1]
    assert [finding.text for finding in verify(left.run) if finding.is_fault] == []
    by_rank = {writer.rank: writer for writer in left.run.writers}
    bad, good = by_rank[RANKS[name]], by_rank[1 - RANKS[name]]
    assert good.state == "closed"
    assert good.balance.dropped == {}
    assert good.balance.written == good.balance.observed == good.num_rows > 0
    assert bad.state == "closed"
    assert bad.balance.observed == good.balance.observed
    assert set(bad.balance.dropped) <= REASONS.get(name, set())
    assert bad.balance.num_missing == 0
    assert bad.num_rows == bad.balance.written
