"""Statistics of parts make those of the whole, whether the parts are pieces, chunks or rows."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from recorder.capture.staging.measure import measure
from recorder.columns import STATISTIC_COLUMNS, STATISTICS, Combine
from recorder.numerics.moments import Moments, join, measured, merge, norm_of_parts, sum_of_chunks
from recorder.records import KEEP_STATS, Measured

Floats = npt.NDArray[np.float64]


def measure_values(values: Floats) -> Measured:
    return measure(values.view(np.uint8), "float64", values.shape, None, KEEP_STATS)


def columns_of(rows: list[Measured]) -> dict[str, Floats]:
    def number(value: float | None) -> float:
        return math.nan if value is None else value

    return {name: np.array([number(getattr(row, name)) for row in rows]) for name in STATISTICS}


def num_finite(rows: list[Measured], values: list[Floats]) -> npt.NDArray[np.int64]:
    return np.array([int(np.isfinite(one).sum()) for one in values])


def merge_rows(values: list[Floats], starts: list[int]) -> dict[str, Floats]:
    rows = [measure_values(one) for one in values]
    counts = num_finite(rows, values)
    return merge(columns_of(rows), counts, counts > 0, np.array(starts))


@given(st.data())
def test_the_statistics_of_pieces_make_those_of_the_whole(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    shift = data.draw(st.sampled_from([0.0, 1e6, -1e3]))
    rng = np.random.default_rng(sum(sizes))
    values = [rng.normal(shift, 1.0, size) for size in sizes]
    if data.draw(st.booleans()):
        values[0][0] = np.inf
    found = merge_rows(values, [0])
    expected = measure_values(np.concatenate(values))
    for name in STATISTICS:
        wanted = getattr(expected, name)
        assert np.isnan(found[name][0]) if wanted is None else np.isclose(found[name][0], wanted, rtol=1e-9), name


def test_groups_are_merged_each_for_itself() -> None:
    found = merge_rows([np.array([1.0, 2.0]), np.array([3.0]), np.array([-8.0])], [0, 2])
    assert found["sum"].tolist() == [6.0, -8.0]
    assert found["mean"].tolist() == [2.0, -8.0]
    assert found["absmax"].tolist() == [3.0, 8.0]


def test_a_constant_has_its_value_as_mean_and_no_spread() -> None:
    found = merge_rows([np.full(3, 0.1), np.full(7, 0.1)], [0])
    assert (found["mean"][0], found["std"][0]) == (0.1, 0.0)


def test_what_overflows_is_infinite_and_what_no_row_has_is_null() -> None:
    found = merge_rows([np.array([1e308, 1.0]), np.array([1e308]), np.array([np.nan])], [0, 2])
    assert found["sum"][0] == found["sum_sq"][0] == math.inf
    assert all(np.isnan(found[name][1]) for name in STATISTICS)


def test_a_statistic_that_one_row_lacks_is_null_and_so_is_what_is_made_of_it() -> None:
    rows = columns_of([measure_values(np.array([1.0, 2.0])), measure_values(np.array([3.0, 5.0]))])
    rows["sum_sq"][1] = math.nan
    found = merge(rows, np.array([2, 2]), np.array([True, True]), np.array([0]))
    assert [name for name in STATISTICS if np.isnan(found[name][0])] == ["l2", "sum_sq"]


def test_lists_are_added_element_by_element() -> None:
    histograms = np.array([[1, 0, 2], [3, 1, 0], [5, 5, 5]])
    assert join(Combine.SUM, histograms, np.array([0, 2])).tolist() == [[4, 1, 2], [5, 5, 5]]
    without = join(Combine.SUM, histograms, np.array([0, 2]), np.array([True, False, True]))
    assert without.tolist() == [[1, 0, 2], [5, 5, 5]]


def test_every_statistic_says_in_the_registry_how_rows_make_one() -> None:
    made = {one.name for one in STATISTIC_COLUMNS if one.combine is Combine.MOMENTS}
    assert made == {"mean", "std", "l2"}
    assert {one.combine for one in STATISTIC_COLUMNS} == {Combine.SUM, Combine.MIN, Combine.MAX, Combine.MOMENTS}


def test_the_norm_of_parts_is_that_of_the_whole_and_unknown_without_one_of_them() -> None:
    norms = np.array([[3.0, 4.0], [1.0, math.nan]], np.float32)
    assert norm_of_parts(norms, axis=1).tolist()[0] == 5.0
    assert np.isnan(norm_of_parts(norms, axis=1)[1])


def test_chunks_are_added_where_all_of_the_tensor_are_there() -> None:
    values, numels, groups = np.array([1.0, 2.0, 4.0]), np.array([6.0, 4.0, 6.0]), np.array([0, 0, 1])
    np.testing.assert_equal(sum_of_chunks(values, numels, groups, np.array([10, 10])), [3.0, math.nan])


def test_nothing_finite_has_counts_alone() -> None:
    moments = Moments()
    moments.nan_count = 2
    assert measured(moments) == Measured(nan_count=2, inf_count=0, zero_count=0)
