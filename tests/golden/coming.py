"""A version of the format to come: the column, the site and the encoding that it adds, as an example of each.

`patched_package` adds them to a copy of the package, each by one entry in its registry, as somebody who adds one in
earnest would. `make_coming` writes a run of that version, which today's package must read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recorder.sites import FORMAT_VERSION

from .values import RATE, Array, Value, values

REPOSITORY = Path(__file__).parents[2]
RUN = Path(__file__).parent / "coming"
MINOR = FORMAT_VERSION[1] + 1
COLUMN, SITE, ENCODING = "negative_count", "curvature", "mirrored"
MIRRORED = (("tap", "", "half"), ("grad", "head", "bias"))
"""Site, module and name of the values whose payloads have the encoding."""

ENTRIES = {
    "columns.py": (
        '    Column("fingerprint",',
        f'    Column("{COLUMN}", _INT64, _COUNT, Combine.SUM, since={MINOR}),\n',
    ),
    "sites.py": (
        '    Site(name="tap",',
        f'    Site(name="{SITE}", kind=Kind.STATE, phase="optimizer", expected=Expected.PARAMETER, since={MINOR}),\n',
    ),
    "format/encodings.py": (
        "    Encoding(name=REF,",
        f'    Encoding(name="{ENCODING}", since={MINOR}, check=_check_plain,\n'
        "             read=lambda *payload: _read_plain(*payload)[::-1].copy()),\n",
    ),
}
"""By registry: the line before which the entry stands, and the entry."""


def patched_package(folder: Path) -> Path:
    """The package with the entries, in a folder that is to be the first on the path."""
    copy = folder / "recorder"
    shutil.copytree(REPOSITORY / "recorder", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (before, entry) in ENTRIES.items():
        text = (copy / name).read_text()
        assert text.count(before) == 1, f"{name} has not one line {before!r}"
        (copy / name).write_text(text.replace(before, entry + before))
    module, version = copy / "sites.py", "FORMAT_VERSION = ({}, {})"
    text = module.read_text()
    assert text.count(version.format(*FORMAT_VERSION)) == 1
    module.write_text(text.replace(version.format(*FORMAT_VERSION), version.format(FORMAT_VERSION[0], MINOR)))
    return folder


def negative_count(array: Array) -> int:
    return int((array.astype(np.float64) < 0).sum())


def updates() -> Iterator[Value]:
    """What each step of the optimizer adds to a parameter, and how the ranks hold it: as they hold the parameter."""
    for value in values():
        if value.site == "optim":
            name = value.name.removesuffix(".momentum_buffer")
            pieces = [np.asarray(-RATE * array, np.float32) for array in (value.array, *value.locals)]
            yield value._replace(site=SITE, name=name, array=pieces[0], locals=tuple(pieces[1:]))
