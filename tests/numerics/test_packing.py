"""Columns of whole numbers become one number a row, whatever their range."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from recorder.numerics.keys import group, mix, pack

HUGE = [0, 1 << 62, (1 << 63) - 1, 1 << 62, 5]
COLUMNS: dict[str, list[list[int]]] = {
    "one": [[3, 1, 3, 2, 1]],
    "negative": [[-1, 4, -1, 4, -1], [0, 0, 1, 0, 0]],
    "constant first": [[7, 7, 7, 7, 7], [2, 1, 2, 0, 1]],
    "huge first": [HUGE, [1, 0, 0, 0, 1]],
    "huge second": [[1, 0, 0, 0, 1], HUGE],
    "huge twice": [HUGE, [-number for number in HUGE], [1, 0, 0, 0, 1]],
}


def arrays(name: str) -> list[npt.NDArray[np.int64]]:
    return [np.array(column, np.int64) for column in COLUMNS[name]]


@pytest.mark.parametrize("name", COLUMNS)
def test_rows_have_equal_numbers_where_all_columns_are_equal_and_keep_their_order(name: str) -> None:
    rows = list(zip(*COLUMNS[name], strict=True))
    mixed, dense = mix(arrays(name)).tolist(), pack(arrays(name)).tolist()
    in_order = sorted(set(rows))
    assert dense == [in_order.index(row) for row in rows]
    assert sorted(range(5), key=lambda i: (mixed[i], i)) == sorted(range(5), key=lambda i: (rows[i], i))


@pytest.mark.parametrize("name", ["one", "constant first", "huge first", "huge second"])
def test_groups_are_numbered_in_the_order_in_which_they_appear(name: str) -> None:
    rows = list(zip(*COLUMNS[name], strict=True))
    groups = group(arrays(name))
    appear = list(dict.fromkeys(rows))
    assert groups.ids.tolist() == [appear.index(row) for row in rows]
    assert groups.firsts.tolist() == [rows.index(row) for row in appear]


def test_no_rows_have_no_numbers() -> None:
    assert pack([np.zeros(0, np.int64), np.zeros(0, np.int64)]).tolist() == []
