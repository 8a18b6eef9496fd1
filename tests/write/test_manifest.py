"""Manifests reach the disk whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from recorder.format.rundir import RUN_MANIFEST, WRITER_MANIFEST, read_json
from recorder.write.file import Disk
from recorder.write.manifest import create_manifest, replace_manifest
from tests.rigs.fakes import FaultyDisk
from tests.rigs.writer import Rig


def test_a_manifest_is_replaced_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / WRITER_MANIFEST
    for state in ("recording", "closed"):
        replace_manifest(Disk(), path, {"state": state})
        assert read_json(path) == {"state": state}
    assert os.listdir(tmp_path) == [WRITER_MANIFEST]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_first_run_manifest_stays(tmp_path: Path) -> None:
    path = tmp_path / RUN_MANIFEST
    assert create_manifest(Disk(), path, {"rank": 0})
    assert not create_manifest(Disk(), path, {"rank": 1})
    assert read_json(path) == {"rank": 0}
    assert os.listdir(tmp_path) == [RUN_MANIFEST]


@pytest.mark.parametrize("method", ["create", "write", "sync", "close", "replace"])
def test_a_failed_replacement_leaves_the_old_manifest(tmp_path: Path, method: str) -> None:
    path = tmp_path / WRITER_MANIFEST
    disk = FaultyDisk()
    disk.spares_manifests = False
    replace_manifest(disk, path, {"state": "recording"})
    disk.fail(method, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        replace_manifest(disk, path, {"state": "closed"})
    assert read_json(path) == {"state": "recording"}
    assert os.listdir(tmp_path) == [WRITER_MANIFEST]


class WithoutDirect(Disk):
    """Of a file system that takes no direct writes."""

    def set_direct(self, descriptor: int, wanted: bool) -> bool:
        return False


class FineBlocks(Disk):
    """Of one that says it does, and then refuses each."""

    is_on = False

    def set_direct(self, descriptor: int, wanted: bool) -> bool:
        self.is_on = wanted
        return True

    def write(self, descriptor: int, data: memoryview, offset: int, *behind: memoryview) -> int:
        if self.is_on:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().write(descriptor, data, offset, *behind)


@pytest.mark.parametrize(
    ("disk", "direct_io", "io"),
    [
        (WithoutDirect(), "auto", "page cache (no direct writes here)"),
        (FineBlocks(), "auto", "page cache (no direct writes here)"),
        (Disk(), "off", "page cache (direct_io = off)"),
    ],
    ids=["none", "refused", "off"],
)
def test_the_manifest_says_how_writes_went(tmp_path: Path, disk: Disk, direct_io: str, io: str) -> None:
    rig = Rig(tmp_path / "run", disk=disk, direct_io=direct_io).start()
    rig.put()
    assert rig.drain()
    rig.close()
    assert rig.manifest()["io"] == io
    assert len(rig.rows()) == 1


def test_the_manifest_says_where_writes_went_past_the_page_cache(tmp_path: Path) -> None:
    probe = Disk()
    descriptor = probe.create(tmp_path / "probe")
    can = probe.set_direct(descriptor, True)
    probe.close(descriptor)
    if not can:
        pytest.skip("no direct writes in the folder for temporary files")
    rig = Rig(tmp_path / "run").start()
    rig.put()
    rig.close()
    assert rig.manifest()["io"] == "direct"
