"""Runs that earlier versions recorded stay readable: every row, payload and global tensor has the value it had.

One folder for each version of the format; `make` records a new one, and a committed one is never made again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recorder
from recorder.columns import COLUMN_OF, STATISTICS
from recorder.errors import LookupFailedError
from recorder.globalview.view import GlobalRows
from recorder.sites import FORMAT_VERSION
from tests.rigs.command_line import Cli, cli
from tests.rigs.fingerprints import fingerprint

from .values import WORLD_SIZE, Array, Value, values

__all__ = ["cli"]

RUNS = sorted(Path(__file__).parent.glob("v[0-9]*"))
VALUES = list(values())
COUNTED = ("nan_count", "inf_count", "zero_count")
KEY = ("site", "module_path", "name", "step", "phase")

every_run = pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def rows_by_key(run: recorder.Run, rank: int) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = [row for row in run.table().to_pylist() if row["rank"] == rank]
    assert len({key_of(row) for row in rows}) == len(rows)
    return {key_of(row): row for row in rows}


def global_rows(path: Path) -> tuple[GlobalRows, dict[tuple[Any, ...], int]]:
    rows = recorder.open_run(path).view().rows()
    return rows, {key_of(row): i for i, row in enumerate(rows.table.to_pylist()) if row["rank"] is None}


def same_bits(one: Array, two: Array) -> bool:
    return (one.dtype, one.shape, one.tobytes()) == (two.dtype, two.shape, two.tobytes())


def statistics(array: Array) -> dict[str, Any]:
    """As FORMAT.md, section 5, defines them."""
    wide = array.astype(np.float64).reshape(-1)
    finite = wide[np.isfinite(wide)]
    found: dict[str, Any] = dict.fromkeys(STATISTICS)
    found |= {"nan_count": int(np.isnan(wide).sum()), "inf_count": int(np.isinf(wide).sum())}
    found |= {"zero_count": int((wide == 0).sum())}
    if finite.size:
        found |= {"mean": finite.mean(), "std": finite.std(), "min": finite.min(), "max": finite.max()}
        found |= {"absmax": abs(finite).max(), "sum": finite.sum(), "sum_sq": (finite**2).sum()}
        found |= {"l2": np.sqrt(found["sum_sq"])}
        found |= {"sum_abs": abs(finite).sum(), "sum_fourth": (finite**4).sum()}
    return found


def assert_statistics(row: dict[str, Any], array: Array, minor: int = FORMAT_VERSION[1]) -> None:
    for name, value in statistics(array).items():
        if COLUMN_OF[name].since > minor:
            # A number that was added up over ranks is known itself, and with it all its statistics.
            assert row[name] is None or (not array.ndim and row["rank"] is None), (key_of(row), name)
        elif value is None or name in COUNTED:
            assert row[name] == value, (key_of(row), name)
        else:  # these numbers are exact but for the roots and divisions: one rounding each, of at most 12 numbers
            assert row[name] == pytest.approx(value, rel=12 * 2.0**-53, abs=12 * 2.0**-53), (key_of(row), name)


def test_there_is_a_run_of_every_version_that_was_released() -> None:
    assert [path.name for path in RUNS] == ["v1.0", "v1.1", "v1.2", "v1.3", "v1.4"]


@every_run
def test_its_version_is_that_of_its_folder(path: Path) -> None:
    run = recorder.open_run(path)
    assert f"v{run.version[0]}.{run.version[1]}" == path.name
    assert (run.ranks, run.steps, run.world_size) == (list(range(WORLD_SIZE)), [0, 1], WORLD_SIZE)


@every_run
def test_it_is_sound(path: Path, cli: Cli) -> None:
    verified = cli("verify", path, "--json")
    assert recorder.open_run(path).problems == []
    assert verified.exit_code == 0 and verified.json


@every_run
def test_every_row_is_there_and_no_other(path: Path) -> None:
    run = recorder.open_run(path)
    for rank in range(WORLD_SIZE):
        assert set(rows_by_key(run, rank)) == {value[:5] for value in VALUES}


@every_run
def test_every_payload_has_the_bits_that_were_recorded(path: Path) -> None:
    run = recorder.open_run(path)
    for value in VALUES:
        for rank, wanted in enumerate(value.locals):
            site, module_path, name, step, phase = value[:5]
            found = run.array(module_path, site, step, name, rank, phase=phase)
            assert same_bits(found, wanted), (value[:5], rank, found)


@every_run
def test_every_row_says_what_it_is(path: Path) -> None:
    run = recorder.open_run(path)
    for rank in range(WORLD_SIZE):
        rows = rows_by_key(run, rank)
        for value in VALUES:
            row, local = rows[value[:5]], value.locals[rank]
            assert row["dtype"] == str(local.dtype)
            assert json.loads(row["shape"]) == list(local.shape)
            assert row["numel"] == local.size
            assert row["payload_bytes"] == local.nbytes
            assert (row["root"], row["mode"], row["call"], row["repeat"], row["attempt"]) == ("model", "train", 0, 0, 0)
            assert row["micro_step"] == (None if value.phase == "optimizer" or value.site == "scalar" else 0)
            assert row["scope"] == ("final" if value.site == "grad" else None)
            assert (row["part"], row["flat_offset"]) == (0, 0)
            assert (row["offsets"] and json.loads(row["offsets"])) == value.offsets[rank]
            assert (row["global_shape"] and json.loads(row["global_shape"])) == (
                list(value.array.shape) if value.layout == "rows" else None
            )
            assert row["layout_source"] == ("dtensor" if value.layout == "rows" else None)


@every_run
def test_every_row_has_the_statistics_of_its_tensor(path: Path) -> None:
    run = recorder.open_run(path)
    for rank in range(WORLD_SIZE):
        rows = rows_by_key(run, rank)
        for value in VALUES:
            assert_statistics(rows[value[:5]], value.locals[rank], run.version[1])


@every_run
def test_every_fingerprint_is_that_of_its_tensor(path: Path) -> None:
    """Those of pieces that say where they lie add up to the whole's."""
    run = recorder.open_run(path)
    rows = [rows_by_key(run, rank) for rank in range(WORLD_SIZE)]
    num_checked = 0
    for value in VALUES:
        found = [of_rank[value[:5]]["fingerprint"] for of_rank in rows]
        if value.site == "scalar":
            continue  # a number, and its statistics are its value
        num_checked += 1
        if value.layout == "rows":
            assert f"{sum(int(text, 16) for text in found) % (1 << 64):016x}" == fingerprint(value.array)
        else:
            assert found == [fingerprint(local) for local in value.locals]
    assert num_checked == len(VALUES) - 4


@every_run
def test_the_global_view_has_the_tensors_of_the_whole_model(path: Path) -> None:
    rows, at = global_rows(path)
    assert set(at) == {value[:5] for value in VALUES}
    for value in VALUES:
        assert same_bits(rows.array(at[value[:5]]), value.array), value[:5]


@every_run
def test_the_global_view_has_their_statistics(path: Path) -> None:
    rows, at = global_rows(path)
    table = rows.table.to_pylist()
    for value in VALUES:
        row = table[at[value[:5]]]
        assert_statistics(row, value.array, recorder.open_run(path).version[1])
        assert row["ranks_present"] == row["ranks_expected"] == "[0,1]"
        assert row["layout_source"] == expected_source(value)
        assert row["scale"] == expected_scale(value)


def expected_source(value: Value) -> str:
    if value.layout == "rows":
        return "dtensor"
    if value.layout == "same":
        return "fsdp" if value.site == "buffer" else "inferred"
    return "assumed"


def expected_scale(value: Value) -> str | None:
    if value.site.startswith("grad_"):
        return "assumed_mean_loss"
    return "assumed_mean" if value.layout == "mean" else None


@every_run
def test_a_look_up_gives_the_tensors_of_the_whole_model(path: Path) -> None:
    run = recorder.open_run(path)
    for value in VALUES:
        site, module_path, name, step, phase = value[:5]
        assert same_bits(run.array(module_path, site, step, name, phase=phase), value.array), value[:5]


@every_run
def test_the_histogram_of_the_whole_tensor_is_the_sum_of_those_of_its_pieces(path: Path) -> None:
    """Scalars have none: a rule chooses whether they are kept, not how."""
    run = recorder.open_run(path)
    for value in (value for value in VALUES if value.site != "scalar"):
        site, module_path, name, step, phase = value[:5]
        for rank, array in ((None, value.array), *enumerate(value.locals)):
            asked: dict[str, Any] = {"site": site, "step": step, "name": name, "rank": rank, "phase": phase}
            if run.version[1] < COLUMN_OF["histogram"].since:
                with pytest.raises(LookupFailedError, match="keep=histogram"):
                    run.histogram(module_path, **asked)
                continue
            found, wide = run.histogram(module_path, **asked), array.astype(np.float64)
            _, exponents = np.frexp(wide[np.isfinite(wide) & (wide != 0)])
            assert dict(zip(*np.unique(exponents - 1, return_counts=True), strict=True)) == {
                exponent: count
                for exponent, count in zip(found.exponents.tolist(), found.counts.sum(axis=0).tolist(), strict=True)
                if count
            }, (value[:5], rank)
            assert found.counts.sum(axis=1).tolist() == [
                int((np.isfinite(wide) & (wide < 0)).sum()),
                int((np.isfinite(wide) & (wide > 0)).sum()),
            ]
            assert found.infinite.tolist() == [int((wide == -np.inf).sum()), int((wide == np.inf).sum())]
            assert (found.zero_count, found.nan_count) == (int((wide == 0).sum()), int(np.isnan(wide).sum()))
