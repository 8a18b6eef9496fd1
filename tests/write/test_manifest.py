"""Manifests reach the disk whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from recorder.format.rundir import RUN_MANIFEST, WRITER_MANIFEST, read_json
from recorder.write.file import Disk
from recorder.write.manifest import create_manifest, replace_manifest
from tests.fakes import FaultyDisk


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
