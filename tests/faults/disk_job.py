"""A training on one or two ranks whose disk goes bad on the way, by real means; what it left is copied out at its end.

As a script it is what `torchrun` launches; with several cases it forks a process for each. The fault must never touch
anything but the recorder's files, and neither training nor its random numbers know of it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import faulthandler
import gc
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

RUN_ID = "5eed0000-0000-4000-8000-000000000001"
NUM_STEPS, GOES_BAD, RECOVERS = 40, 12, 22
HANGS_S = 120.0
SETTINGS = {
    "RECORDER_RULES": "site=output,grad keep=tensor,stats; site=scalar keep=stats",
    "RECORDER_MIN_FREE_BYTES": "0",
    "RECORDER_FLUSH_INTERVAL_S": "0.05",
    "RECORDER_SYNC_INTERVAL_S": "0.05",
    "RECORDER_CLOSE_DEADLINE_S": "20",
    "RECORDER_STATUS_INTERVAL_S": "0",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way for a disk to go bad, in the rank's own directory."""

    before: Callable[[Path], None] = lambda folder: None
    """Before the recorder starts."""
    begin: Callable[[Path], None] = lambda folder: None
    """Before step `GOES_BAD`."""
    end: Callable[[Path], None] | None = None
    """Before step `RECOVERS`; None where nothing gets better."""
    settings: tuple[tuple[str, str], ...] = ()
    every_thread: bool = True


def shell(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, stderr=subprocess.DEVNULL)


def mount_tmpfs(options: str) -> Callable[[Path], None]:
    return lambda folder: shell("mount", "-t", "tmpfs", "-o", options, "none", folder)


def fill_up(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def make_room(folder: Path) -> None:
    (folder / "ballast").unlink()


def shell_where_busy(*command: str | Path) -> None:
    """Run a command of a mount, which is busy while the writer has a file open that it has just made through it."""
    for _ in range(200):
        with contextlib.suppress(subprocess.CalledProcessError):
            return shell(*command)
        time.sleep(0.01)
    raise TimeoutError(f"busy: {' '.join(map(str, command))}")


def make_read_only(folder: Path) -> None:
    shell("mount", "--bind", folder, folder)
    shell_where_busy("mount", "-o", "remount,bind,ro", folder)


def make_writable(folder: Path) -> None:
    shell_where_busy("umount", folder)


def remove(folder: Path) -> None:
    for each in folder.iterdir():
        shutil.rmtree(each)


def limit_file_size(nbytes: int) -> Callable[[Path], None]:
    hard = resource.RLIM_INFINITY
    return lambda folder: resource.setrlimit(resource.RLIMIT_FSIZE, (hard if nbytes < 0 else nbytes, hard))


def unlimit_file_size(folder: Path) -> None:
    flush()  # so that the limit was met, however busy the machine
    limit_file_size(-1)(folder)


def limit_descriptors(folder: Path) -> None:
    """Below the lowest that is free: not one more can be had."""
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def free_descriptors(folder: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit_memory(megabytes: int) -> Callable[[Path], None]:
    """What is there already, and so much more: no larger piece can be had."""

    def limit(folder: Path) -> None:
        import torch

        torch.nn.Linear(64, 64)(torch.ones(64, 64)).sum().backward()  # torch takes what it needs, and its threads
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        soft = pages * resource.getpagesize() + (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))

    return limit


def free_memory(folder: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def fail(**calls: int) -> Callable[[Path], None]:
    def begin(folder: Path) -> None:
        from tests.campaigns.faults import seccomp

        seccomp.fail(calls)

    return begin


def fail_on_writer_thread(**calls: int) -> Callable[[Path], None]:
    """For calls that training makes, too: the filter is put in place by the writer itself, at its next record."""

    def begin(folder: Path) -> None:
        from recorder.write.writer import Writer
        from tests.campaigns.faults import seccomp

        plain = Writer._handle
        is_done: list[bool] = []

        def handle(self: Writer, item: Any) -> None:
            if item is not None and not is_done:
                is_done.append(True)
                seccomp.fail(calls, every_thread=False)
            plain(self, item)

        Writer._handle = handle  # type: ignore[method-assign]

    return begin


_stalls: list[Any] = []


def prepare_stall(*calls: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        from tests.campaigns.faults import seccomp

        _stalls.append(seccomp.Stall(calls))

    return prepare


def stall(folder: Path) -> None:
    _stalls[0].begin()


def stall_at_once(*calls: str) -> Callable[[Path], None]:
    def begin(folder: Path) -> None:
        prepare_stall(*calls)(folder)
        stall(folder)

    return begin


SMALL_SHARDS = (("RECORDER_KEEP_NEWEST", "16"),)
SHOWN = (("RECORDER_STATUS_INTERVAL_S", "0.05"),)
"""A `_status.json` that is open before the disk goes bad."""
WRITES = ("pwritev", "pwritev2", "fsync", "ftruncate")
STALLED = (
    ("RECORDER_RULES", "site=* keep=tensor,stats"),
    ("RECORDER_POOL_BYTES", "1MiB"),
    ("RECORDER_WAIT_S_PER_STEP", "0.3"),
    ("RECORDER_WAIT_S_STALLED", "0.6"),
    ("RECORDER_CLOSE_DEADLINE_S", "1"),
)
CASES = {
    "none": Case(),
    "full": Case(before=mount_tmpfs("size=2m"), begin=fill_up, end=make_room),
    "full_at_start": Case(
        before=lambda folder: (mount_tmpfs("size=2m")(folder), fill_up(folder))[0],  # type: ignore[func-returns-value]
        end=make_room,
    ),
    "inodes": Case(before=mount_tmpfs("size=64m,nr_inodes=10"), settings=(*SMALL_SHARDS, *SHOWN)),
    "file_size": Case(begin=limit_file_size(40_000), end=unlimit_file_size),
    "file_size_tiny": Case(begin=limit_file_size(1_000), end=unlimit_file_size),
    "own_quota": Case(settings=(("RECORDER_MAX_BYTES", "1MiB"), ("RECORDER_ON_QUOTA", "stop"))),
    "read_only": Case(begin=make_read_only, end=make_writable, settings=SMALL_SHARDS),
    "read_only_at_start": Case(before=make_read_only, end=make_writable),
    "removed": Case(begin=remove),
    "eio_write": Case(begin=fail(pwritev=errno.EIO, pwritev2=errno.EIO)),
    "eio_fsync": Case(begin=fail(fsync=errno.EIO)),
    "eio_ftruncate": Case(begin=fail(ftruncate=errno.EIO)),
    "eio_link": Case(begin=fail(linkat=errno.EIO, link=errno.EIO)),
    "eio_close": Case(begin=fail_on_writer_thread(close=errno.EIO), settings=SMALL_SHARDS),
    "eio_everything": Case(
        begin=fail(pwritev=errno.EIO, pwritev2=errno.EIO, fsync=errno.EIO, ftruncate=errno.EIO, linkat=errno.EIO)
    ),
    "stale": Case(begin=fail(pwritev=errno.ESTALE, pwritev2=errno.ESTALE, fsync=errno.ESTALE, statfs=errno.ESTALE)),
    "descriptors": Case(begin=limit_descriptors, end=free_descriptors, settings=SMALL_SHARDS),
    "no_memory_for_pool": Case(before=limit_memory(32), settings=(("RECORDER_POOL_BYTES", "512MiB"),)),
    "no_memory_for_writer": Case(before=limit_memory(60), end=free_memory, settings=(("RECORDER_POOL_BYTES", "1MiB"),)),
    "stall_reference": Case(settings=STALLED[:1]),
    "stall": Case(
        before=prepare_stall(*WRITES),
        begin=stall,
        end=lambda folder: _stalls[0].end(),
        settings=STALLED,
    ),
    "stall_for_ever": Case(before=prepare_stall(*WRITES), begin=stall, settings=STALLED),
    "read_only_for_good": Case(begin=make_read_only, settings=(*SMALL_SHARDS, *SHOWN)),
    "full_for_good": Case(before=mount_tmpfs("size=2m"), begin=fill_up, settings=SHOWN),
    "full_for_good_and_not_shown": Case(
        before=mount_tmpfs("size=2m"), begin=fill_up, settings=(("RECORDER_STATUS_INTERVAL_S", "0"),)
    ),
    "eio_fsync_at_start": Case(before=fail(fsync=errno.EIO)),
    "eio_link_at_start": Case(before=fail(linkat=errno.EIO, link=errno.EIO)),
    "no_links_at_start": Case(before=fail(linkat=errno.EPERM, link=errno.EPERM, renameat2=errno.EINVAL)),
    "hung_fsync": Case(before=prepare_stall("fsync"), begin=stall),
    "hung_fsync_at_start": Case(before=stall_at_once("fsync")),
}


RANKS = {"full": 1, "eio_fsync": 0, "stall": 1}
"""Which rank has the bad disk in the jobs of two."""


def train(rank: int, world_size: int, case: Case, folder: Path) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from tests.campaigns.faults.training import batch, make

    if world_size > 1:
        dist.init_process_group("gloo", os.environ.get("STORE"), timedelta(seconds=60), world_size, rank)
    net, optimizer = make(rank)
    model = torch.nn.parallel.DistributedDataParallel(net) if world_size > 1 else net
    losses, longest_s = [], 0.0
    for step in range(NUM_STEPS):
        if step == GOES_BAD:
            flush()
            case.begin(folder)
        if step == RECOVERS and case.end is not None:
            case.end(folder)
        began = time.monotonic()
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        if step >= GOES_BAD:
            longest_s = max(longest_s, time.monotonic() - began)
        if step >= GOES_BAD and not (case.end is None and step > GOES_BAD + 10):
            time.sleep(0.02 if step < RECOVERS else 0.05)  # the writer looks again after 0.5 s
    del model, loss
    gc.collect()  # DDP that outlives its process group can block the end of the process
    if world_size > 1:
        dist.destroy_process_group()
    parameters = {name: p.detach().clone() for name, p in net.named_parameters()}
    return {
        "values": {**parameters, "losses": torch.stack(losses), "random": torch.get_rng_state()},
        "longest_s": longest_s,
    }


def flush() -> None:
    """So that what was recorded is on the disk, or was refused there, however busy the machine."""
    if "RECORDER" in os.environ:
        from recorder.lifecycle import active as training_side

        if training_side._current is not None:  # it may not have had the memory to begin
            training_side._current.flush(30)


def copy_out(out: Path, recordings: Path, rank: int) -> None:
    """Runs after the recorder's own end: a file system of this process's own goes with it."""
    source, target = recordings / RUN_ID, out / "run"
    target.mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.copy(source / "_run.json", target)
    name = f"rank={rank:05d}"
    with contextlib.suppress(FileNotFoundError):
        shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns("ballast"))
    (out / f"ended.{rank}").write_text(str(time.monotonic()))


def run(name: str, out: Path, *, is_recorded: bool) -> None:
    """One rank of one case in this process."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    is_bad = int(os.environ.get("BAD_RANK", "0")) == rank
    case = CASES[name] if is_bad else CASES["none"]
    recordings = out / "recordings"
    folder = recordings / RUN_ID / f"rank={rank:05d}"
    if is_recorded:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.update(SETTINGS | dict(CASES[name].settings) | {"RECORDER_DIR": str(recordings), "RECORDER": "1"})
        os.environ.update({"TORCHELASTIC_RUN_ID": RUN_ID, "RANK": str(rank), "WORLD_SIZE": str(world_size)})
        atexit.register(copy_out, out, recordings, rank)
        mount_tmpfs("size=256m")(folder)  # so that the disk of the machine, which others share, plays no part
    else:
        case = CASES["none"]
    case.before(folder)
    import torch

    if is_recorded:
        from recorder.lifecycle import active as training_side
        from recorder.write import ledger as accounts

        accounts._LONGEST_PAUSE_S = accounts._FIRST_PAUSE_S  # nobody waits here for half a minute
        training_side.start_from_environment()  # where torch was there before the flag was
    saved = train(rank, world_size, case, folder)
    torch.save(saved, out / f"rank{rank}.pt")
    (out / f"trained.{rank}").write_text(str(time.monotonic()))


def fork(name: str, out: Path, *, is_recorded: bool, ranks: dict[str, str]) -> int:
    """One rank of a case in a forked child, which ends as an interpreter does."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(ranks)
        with (out / "output.txt").open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        faulthandler.dump_traceback_later(HANGS_S, exit=True, file=2)  # one that hangs says where, and ends
        run(name, out, is_recorded=is_recorded)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if "RANK" in os.environ:
        (name,) = options.cases
        run(name, options.out, is_recorded=True)
        return 0
    import pyarrow  # noqa: F401  # loaded once, for all children
    import torch._dynamo  # noqa: F401  # by the first optimizer

    import recorder.lifecycle.active
    import recorder.write.writer  # noqa: F401

    pids: list[tuple[str, int]] = []
    for name in options.cases:
        out = options.out / name
        out.mkdir(parents=True)
        is_recorded, case = not name.endswith("-off"), name.removesuffix("-off").removeprefix("pair-")
        ranks: list[dict[str, str]] = [{}]
        if name.startswith("pair-"):
            shared = {"WORLD_SIZE": "2", "STORE": f"file://{out.resolve()}/store", "BAD_RANK": str(RANKS.get(case, 0))}
            ranks = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
        pids += [(name, fork(case, out, is_recorded=is_recorded, ranks=rank)) for rank in ranks]
    codes = dict.fromkeys(options.cases, 0)
    for name, pid in pids:
        _, status = os.waitpid(pid, 0)
        codes[name] = codes[name] or os.waitstatus_to_exitcode(status)
    for name, code in codes.items():
        (options.out / name / "code").write_text(str(code))
    return 0


if __name__ == "__main__":
    sys.exit(main())
