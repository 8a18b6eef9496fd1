"""Renamed modules: the file that pairs them, and what is wrong with one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recorder
from recorder.analyze.diff.diff import diff
from recorder.analyze.diff.renames import Renames, read_renames
from recorder.errors import LookupFailedError

from .test_diff import row, write

PATHS = {"": "", "encoder.layers.0.ff1": "blocks.0.mlp.up", "encoder.layers.0.ff2": "blocks.0.down", "encoder": "trunk"}


def run(path: Path, names: dict[str, str], broken: str = "") -> recorder.Run:
    rows: list[Any] = []
    for number, module in enumerate(names.values()):
        rows.append(row(len(rows), np.full(3, number + (module == broken != ""), np.float32), module_path=module))
    return write(path, rows)


def renames(folder: Path, text: str) -> Renames:
    (folder / "names.txt").write_text(text)
    return read_renames(folder / "names.txt")


def test_renamed_modules_are_paired_by_the_longest_name(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {path: path for path in PATHS})
    b = run(tmp_path / "b", PATHS, broken="blocks.0.down")
    text = "# ours = theirs\nencoder.layers = blocks  # all of them\n\nencoder = trunk\n"
    each = "encoder.layers.0.ff1 = blocks.0.mlp.up\nencoder.layers.0.ff2 = blocks.0.down\n"
    names = renames(tmp_path, text + each)
    found = diff(a, b, renames=names)
    assert found.num_compared == 4 and not found.unpaired_a and not found.unpaired_b
    assert found.table.column("module_path").to_pylist() == ["encoder.layers.0.ff2"]
    assert found.culprits[0].module_path == "encoder.layers.0.ff2"


def test_modules_without_a_partner_are_listed(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", {path: path for path in PATHS}), run(tmp_path / "b", PATHS)
    found = diff(a, b, renames=renames(tmp_path, "encoder.layers = blocks\n"))
    assert found.unpaired_a == ["encoder.layers.0.ff1", "encoder.layers.0.ff2", "encoder"]
    assert found.unpaired_b == ["blocks.0.mlp.up", "blocks.0.down", "trunk"]


def test_a_root_may_be_a_part(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {"model": "model", "model.up": "model.up"})
    b = run(tmp_path / "b", {"": "", "up": "up"})
    assert diff(a, b, renames=renames(tmp_path, "model = ''\n")).num_compared == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("up = a\ndown\n", "names.txt:2: 'down' is no line such as encoder.layers = blocks"),
        ("up = a\n\nup = b\n", "names.txt:3: 'up' is also in .*names.txt:1, as up = a"),
        ("up = a\ndown = a\n", "names.txt:2: 'a' is also in .*names.txt:1"),
        ("# nothing\n", "names.txt: has no line of the form"),
        ("a = b = c\n", "names.txt:1: 'a = b = c' is no line"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(LookupFailedError, match=why):
        renames(tmp_path, text)


def test_a_name_that_no_module_has_is_named(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {"up": "up"})
    with pytest.raises(
        LookupFailedError, match=re.escape("names.txt:1: the second run has no module 'updown'; it has 'up'")
    ):
        diff(a, a, renames=renames(tmp_path, "up = updown\n"))


def test_two_modules_of_one_name_are_refused(tmp_path: Path) -> None:
    a, b = (run(tmp_path / name, {"up": "up", "down": "down"}) for name in "ab")
    why = "names.txt: 'down' and 'up' of the second run would both be 'down'; rename the other one too"
    with pytest.raises(LookupFailedError, match=re.escape(why)):
        diff(a, b, renames=renames(tmp_path, "down = up\n"))
    swapped = renames(tmp_path, "down = up\nup = down\n")
    assert diff(a, b, renames=swapped).num_compared == 2


def test_a_noise_run_of_another_model_is_refused(tmp_path: Path) -> None:
    a, b = (run(tmp_path / name, {"up": "up"}) for name in "ab")
    twin = run(tmp_path / "twin", {"other": "other"})
    with pytest.raises(LookupFailedError, match=r"twin.*with the same rules; it lacks 'up'"):
        diff(a, b, noise=[twin])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LookupFailedError, match="nowhere: the file of renamed modules cannot be read"):
        read_renames(tmp_path / "nowhere")
