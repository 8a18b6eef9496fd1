"""Element types are torch's, by name and size, and numpy can hold each."""

from __future__ import annotations

import pytest
import torch

from recorder.errors import UnsupportedError
from recorder.numerics.dtypes import ITEM_BYTES, item_bytes, numpy_dtype


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_sizes_are_those_of_torch_and_numpy(name: str) -> None:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    assert item_bytes(name) == dtype.itemsize == numpy_dtype(name).itemsize


@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "complex64", "uint16", "bool"]
)
def test_values_are_those_of_torch(name: str) -> None:
    tensor = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float32).to(getattr(torch, name))
    values = tensor.view(torch.uint8).numpy().view(numpy_dtype(name))
    assert values.astype("complex128").tolist() == tensor.to(torch.complex128).tolist()


def test_an_unknown_type_is_refused_by_name() -> None:
    for function in (item_bytes, numpy_dtype):
        with pytest.raises(UnsupportedError, match="'float3'"):
            function("float3")
