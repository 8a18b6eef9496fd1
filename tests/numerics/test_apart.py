"""Histograms side by side: in the same bins, with how far they are apart, in `diff`, `show` and `stats`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from recorder.capture.staging.measure import measure
from recorder.numerics.distributions import (
    bins_of,
    extent,
    histogram_line,
    share_apart,
    subnormal_count,
)
from recorder.numerics.histogram import Histogram
from recorder.numerics.moments import added_by_group
from recorder.records import KEEP_HISTOGRAM, KEEP_STATS, KEEP_UNITS
from tests.rigs.command_line import Cli, cli
from tests.rigs.handmade import HandmadeWriter, make_row, make_run

__all__ = ["cli"]

Array = npt.NDArray[Any]
TINY = np.array([[0.0, 6e-5, 1.0, -3.0], [1e-6, np.inf, 0.5, np.nan]], np.float16)
"""Two values below the least normal number of float16 among them."""
PLAIN = np.array([[0.0, 0.25, 1.0, -3.0], [0.125, 2.0, 0.5, 8.0]], np.float16)

ACT = np.maximum(PLAIN, 0) * np.array([1, 0, 1, 1], np.float16)
"""With one unit that is always zero."""


def counted(array: Array, dtype: str | None = None) -> dict[str, bytes | None]:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    keep = KEEP_STATS | KEEP_HISTOGRAM | KEEP_UNITS
    found = measure(data, dtype or str(array.dtype), array.shape, None, keep)
    return {"histogram": found.histogram, "units": found.units}


def of(array: Array) -> Histogram:
    data = counted(array)["histogram"]
    assert data is not None
    return Histogram.from_bytes(data, zero_count=int((array == 0).sum()), nan_count=int(np.isnan(array).sum()))


def write(path: Path, arrays: dict[str, Array], **columns: Any) -> Path:
    """One step with an output of each module, of which the last has no histogram."""
    run, rows = make_run(path), []
    for seq, (module, array) in enumerate(arrays.items()):
        details = counted(array) if module != "plain" else {}
        rows.append(make_row(seq, array, encoding=None, module_path=module, **(details | columns)))
    writer = HandmadeWriter(run)
    writer.add_shard([rows])
    writer.finish()
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("histograms")
    same = {"act": ACT, "plain": PLAIN}
    a = write(folder / "a", {"up": PLAIN, **same})
    return a, write(folder / "b", {"up": TINY, "act": same["act"], "plain": TINY})


def test_shares_are_in_the_same_bins_and_add_up() -> None:
    a, b = of(np.array([1.0, 1.5, -2.0, 0.0], np.float32)), of(np.array([0.25, np.nan], np.float32))
    bins = bins_of([a, b, of(np.zeros(3, np.float32))], 24)
    assert (bins.first, bins.last, bins.exponents_per_bin) == (-2, 1, 1)
    assert bins.shares == [[0, 0, 0.5, 0.25], [0.5, 0, 0, 0], [0, 0, 0, 0]]
    wide = bins_of([a, b], 2)
    assert (wide.first, wide.exponents_per_bin, wide.shares) == (-2, 2, [[0, 0.75], [0.5, 0]])
    assert extent(bins) == "|x| from 2^-2 to 2^2"
    assert extent(wide) == "|x| from 2^-2 to 2^2, 2 powers of two a character"
    nothing = bins_of([of(np.zeros(3, np.float32))], 24)
    assert nothing.shares == [[]] and extent(nothing) == "of no finite value but zero"


def test_bins_stay_few_over_the_whole_range_of_float64() -> None:
    bins = bins_of([of(np.array([5e-324, 1.0])), of(np.array([1.7e308]))], 24)
    assert len(bins.shares[0]) == len(bins.shares[1]) <= 24
    assert [sum(shares) for shares in bins.shares] == [1, 1]


def test_how_far_two_are_apart_is_a_share() -> None:
    one = np.array([1.0, 1.5, -2.0, 0.0], np.float32)
    assert share_apart(of(one), of(np.tile(one, 3))) == 0
    assert share_apart(of(one), of(-one)) == 0.75
    assert share_apart(of(one), of(one * 1e30)) == 0.75
    assert share_apart(of(one), of(np.array([np.nan], np.float32))) == 1
    assert share_apart(of(one), Histogram()) is None


def test_what_is_below_the_least_normal_number_is_counted() -> None:
    assert (subnormal_count(of(TINY), "float16"), subnormal_count(of(PLAIN), "float16")) == (2, 0)
    assert subnormal_count(of(np.array([1e-40, 1.0], np.float32)), "float32") == 1
    assert subnormal_count(of(np.array([1, 2], np.int32)), "int32") is None


def test_a_single_outlier_shows_and_an_empty_bin_is_a_gap() -> None:
    assert histogram_line([1e-9, 1e-6, 0.0, 0.01, 1.0]) == "▁▁ ▆█"


def test_diff_lays_histograms_side_by_side(runs: tuple[Path, Path], cli: Cli) -> None:
    found = cli("diff", *runs)
    assert found.exit_code == 1
    lines = found.out.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("histograms of values that differ (1)")]
    assert lines[at].endswith("|x| from 2^-20 to 2^4")
    assert lines[at + 1].startswith("apart: the share of values that would have to change")
    assert lines[at + 2].split() == ["step", "module", "value", "A", "B", "apart", "zero", "subnormal", "infinite"]
    assert "up" in lines[at + 3] and lines[at + 3].split()[-4:] == ["50.0%", "1|1", "0|2", "0|1"]
    assert "histograms of" not in cli("diff", *runs, "--brief").out
    assert "histograms of" not in cli("diff", *runs, "--module", "plain").out


def test_json_has_the_shares(runs: tuple[Path, Path], cli: Cli) -> None:
    up, plain = cli("diff", *runs, "--json").json["differing"]
    assert plain["histogram"] is None and "histogram_a" not in plain
    found = up["histogram"]
    assert (found["first_exponent"], found["exponents_per_bin"], found["apart"]) == (-20, 1, 0.5)
    assert sum(found["share_a"]) == 7 / 8 and sum(found["share_b"]) == 5 / 8
    assert (found["subnormal_count_a"], found["subnormal_count_b"]) == (0, 2)
    assert (up["zero_count_b"], up["inf_count_b"], up["nan_count_b"]) == (1, 1, 1)


def test_diff_compares_units(runs: tuple[Path, Path], cli: Cli) -> None:
    found = cli("diff", *runs)
    lines = found.out.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("units of values that differ (1)")]
    assert lines[at + 1].startswith("dead: units with no value but zero;")
    assert lines[at + 2].split() == ["step", "module", "value", "units", "differ", "dead", "farthest", "its", "rms"]
    units = cli("diff", *runs, "--json").json["differing"]
    assert units[1]["units"] is None
    (up,) = [row["units"] for row in units if row["module_path"] == "up"]
    finite = np.where(np.isfinite(TINY), TINY, 0).astype(np.float64)
    rms = [np.sqrt((array**2).mean(axis=0)) for array in (PLAIN.astype(np.float64), finite)]
    farthest = int(np.abs(rms[0] - rms[1]).argmax())
    assert (up["units_a"], up["units_b"], up["unit"]) == (4, 4, farthest)
    assert (up["unit_rms_a"], up["unit_rms_b"]) == pytest.approx((rms[0][farthest], rms[1][farthest]))
    assert up["units_apart"] == int(((PLAIN != TINY) & ~(np.isnan(PLAIN) & np.isnan(TINY))).any(axis=0).sum())
    assert lines[at + 3].split()[-5:-2] == ["4", str(up["units_apart"]), f"{up['units_dead_a']}|{up['units_dead_b']}"]


def test_units_of_other_shapes_are_counted_and_damaged_ones_are_none(tmp_path: Path, cli: Cli) -> None:
    dead = ACT[:, :2] * np.array([1, 0], np.float16)
    a, b = write(tmp_path / "a", {"act": ACT}), write(tmp_path / "b", {"act": dead})
    (act,) = cli("diff", a, b, "--json").json["differing"]
    known = {name: value for name, value in act["units"].items() if value is not None}
    assert known == {"units_a": 4, "units_b": 2, "units_dead_a": 1, "units_dead_b": 1}
    c = write(tmp_path / "c", {"act": TINY}, units=b"\x07")
    assert cli("diff", a, c, "--json").json["differing"][0]["units"] is None
    assert "units of values" not in cli("diff", a, c).out


def test_damaged_bytes_are_no_histogram(tmp_path: Path, cli: Cli) -> None:
    a, b = write(tmp_path / "a", {"up": PLAIN}), write(tmp_path / "b", {"up": TINY}, histogram=b"\x07")
    found = cli("diff", a, b)
    assert found.exit_code == 1 and "histograms of" not in found.out
    assert cli("diff", a, b, "--json").json["differing"][0]["histogram"] is None


def test_show_draws_the_last_histogram_of_each_value(runs: tuple[Path, Path], cli: Cli) -> None:
    lines = cli("show", runs[1], "up").out.splitlines()
    assert lines[2].startswith(
        "histogram: the last of each, |x| from 2^-20 to 2^2; the lowest block is one in a million"
    )
    assert lines[3].split()[-2:] == ["trend", "histogram"]
    assert lines[4].endswith(f"!      {histogram_line(bins_of([of(TINY)], 24).shares[0])}")
    assert "dead units  values" in lines[6] and lines[7].split()[-2:] == ["0/4", "no"]
    assert cli("show", runs[1], "act").out.splitlines()[-1].split()[-2:] == ["1/4", "no"]
    plain = cli("show", runs[1], "plain").out
    assert "dead units" not in plain
    assert "histogram:" not in plain and "  histogram" not in plain
    (series,) = cli("show", runs[1], "up", "--json").json["series"]
    assert "histogram" not in series["rows"][0]


def test_stats_draws_histograms_and_adds_those_of_a_group(runs: tuple[Path, Path], cli: Cli) -> None:
    titles, up, act, plain = cli("stats", runs[1]).out.splitlines()[2:]
    assert titles.split()[-2:] == ["histogram", "subnormal"]
    assert (up.split()[-1], act.split()[-1], plain.split()[-2:]) == ("2", "0", ["-", "-"])
    a, b = Histogram.from_bytes(of(TINY).to_bytes()), Histogram.from_bytes(of(ACT).to_bytes())
    lines = cli("stats", runs[1], "--by", "site").out.splitlines()
    assert "of the values that are not zero, |x| from 2^-20 to 2^4;" in lines[1]
    assert lines[-1].endswith(histogram_line(bins_of([a + b], 24).shares[0]))
    assert "histogram" not in cli("stats", runs[1], "plain").out.replace(str(runs[1]), "")
    assert "histogram" not in cli("stats", runs[1], "--json").json["rows"][0]
    assert cli("stats", runs[1], "--sort", "histogram").exit_code == 2


def test_groups_of_groups_add_up_like_groups_of_rows() -> None:
    data = [of(TINY).to_bytes(), None, of(PLAIN).to_bytes(), b"damaged", of(-PLAIN).to_bytes()]
    column = pa.chunked_array([pa.array(data, pa.binary())])
    once = added_by_group(column, np.array([0, 1, 0, 1, 0]), 3)
    assert once[1:] == [None, None]
    two = added_by_group(column, np.array([0, 2, 0, 2, 1]), 3)
    assert added_by_group(pa.chunked_array([pa.array(two, pa.binary())]), np.zeros(3, int), 1) == once[:1]
