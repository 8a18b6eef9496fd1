"""`decode` takes the row of any reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from recorder.columns import SCHEMA
from recorder.errors import CorruptError, LookupFailedError, UnsupportedError
from recorder.read.payload import decode
from recorder.run.run import open_run
from tests.rigs.handmade import make_parts, make_ref, make_row

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
ROW = make_row(0, VALUES, encoding="compressed")
TABLE = pa.Table.from_pylist([ROW], schema=SCHEMA)


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        TABLE,
        TABLE.to_batches()[0],
        TABLE.to_struct_array().chunk(0)[0],
        TABLE.to_pandas().iloc[0],
        next(TABLE.to_pandas().itertuples()),
        pl.DataFrame([pl.Series(name, [ROW[name]]) for name in SCHEMA.names]).row(0, named=True),
    ],
    ids=["dict", "table", "batch", "struct", "series", "tuple", "polars"],
)
def test_a_row_of_any_reader_decodes(row: Any) -> None:
    found = decode(row)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, VALUES)


def test_rows_as_pandas_reads_them_decode(run_path: Path) -> None:
    shard = next(run_path.glob("rank=00001/*/tensors-000000.arrow"))
    frame = pd.read_feather(shard)
    run = open_run(run_path)
    for _, row in frame[(frame.part == 0) & (frame.encoding != "ref") & (frame.step < 7)].iterrows():
        np.testing.assert_array_equal(decode(row), run.array("layers.0", step=row["step"], rank=1))


def test_the_array_may_be_changed() -> None:
    decode(make_row(0, VALUES))[0, 0] = 7


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 1, 1)])
def test_small_shapes_decode(shape: tuple[int, ...]) -> None:
    assert decode(make_row(0, np.zeros(shape))).shape == shape


@pytest.mark.parametrize(
    "row, error, message",
    [
        (make_row(0), LookupFailedError, "carries no payload"),
        (pd.Series(make_row(0)), LookupFailedError, "carries no payload"),
        ({"data": b""}, LookupFailedError, "lacks the column 'encoding'"),
        (make_ref(3, ROW), LookupFailedError, "refers to row seq=0"),
        (make_parts(0, VALUES, 2)[0], LookupFailedError, "joins the parts"),
        (make_parts(0, VALUES, 2)[1], LookupFailedError, "joins the parts"),
        (pa.concat_tables([TABLE, TABLE]), LookupFailedError, "here are 2"),
        (3, LookupFailedError, "not a int"),
        (ROW | {"encoding": "zip"}, UnsupportedError, "'zip'"),
        (ROW | {"payload_bytes": 48}, CorruptError, "expected 48"),
        (ROW | {"data": "text"}, CorruptError, "wants bytes"),
        (make_row(0, VALUES) | {"shape": "[2]"}, CorruptError, "24 bytes are not a float32 tensor"),
    ],
)
def test_a_row_that_cannot_be_decoded_says_why(row: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decode(row)
