"""Every value of a golden run, worked out with numpy from what `train` does; neither torch nor the run is asked.

All numbers are sums of few powers of two, so every order of additions gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
WORLD_SIZE, NUM_STEPS, RATE, MOMENTUM = 2, 2, 0.5, 0.5


class Value(NamedTuple):
    """One tensor of the whole model."""

    site: str
    module_path: str
    name: str
    step: int
    phase: str
    array: Array
    """The global tensor."""
    layout: str
    """How ranks hold it: ``batch`` (rows), ``rows`` (a parameter's), ``same`` or ``mean``."""
    locals: tuple[Array, ...]
    """What each rank recorded."""

    @property
    def offsets(self) -> list[list[int] | None]:
        """Where each rank's piece begins, if its row says so."""
        if self.layout != "rows":
            return [None] * WORLD_SIZE
        rest = [0] * (self.array.ndim - 1)
        return [[0, *rest], [len(self.locals[0]), *rest]]


def _batch(array: Array, factor: float = 1) -> tuple[Array, ...]:
    halves = np.split(array, WORLD_SIZE)
    return tuple(half * array.dtype.type(factor) if factor != 1 else half for half in halves)


def _rows(array: Array) -> tuple[Array, ...]:
    first = -(-len(array) // WORLD_SIZE)
    return array[:first], array[first:]


def _exact(array: npt.ArrayLike, dtype: Any = np.float32) -> Array:
    wide = np.asarray(array, np.float64)
    narrow = wide.astype(dtype)
    assert np.array_equal(narrow.astype(np.float64), wide), "not a number that needs no rounding"
    return narrow


def values() -> Iterator[Value]:
    """In no particular order."""
    params = {
        ("gain", "weight"): np.array([1.0, 0.5, -0.25]),
        ("head", "weight"): np.array([[0.5, -1.0, 2.0]]),
        ("head", "bias"): np.array([0.125]),
    }
    momenta = {key: np.zeros_like(param) for key, param in params.items()}
    for step in range(NUM_STEPS):
        x = (np.arange(12.0).reshape(4, 3) - 2 * step) / 8
        gain, weight, bias = params.values()
        hidden = x * gain
        y = hidden @ weight.T + bias
        d_y = np.full((4, 1), 1 / 4)
        d_hidden = d_y @ weight
        grads = {
            ("gain", "weight"): (d_hidden * x).sum(0),
            ("head", "weight"): d_y.T @ hidden,
            ("head", "bias"): d_y.sum(0),
        }

        def same(site: str, path: str, name: str, array: Array, phase: str, step: int = step) -> Value:
            return Value(site, path, name, step, phase, array, "same", (array, array))

        def batch(site: str, path: str, name: str, array: Array, step: int = step) -> Value:
            if not site.startswith("grad_"):
                return Value(site, path, name, step, "forward", array, "batch", _batch(array))
            # Each rank's loss is the mean of its own samples.
            return Value(site, path, name, step, "backward", array, "batch", _batch(array, WORLD_SIZE))

        for path, argument in (("", "x"), ("gain", "x")):
            yield batch("input", path, argument, _exact(x))
        yield batch("input", "head", "input", _exact(hidden))
        yield batch("output", "gain", "", _exact(hidden))
        yield batch("tap", "", "half", _exact(x, ml_dtypes.bfloat16))
        yield batch("tap", "", "positive", x > 0)
        yield same("tap", "", "extremes", np.array([0, np.nan, np.inf, -np.inf, -2.5], np.float32), "forward")
        for path in ("", "head"):
            yield batch("output", path, "", _exact(y))
            yield batch("grad_output", path, "", _exact(d_y))
        yield batch("grad_input", "head", "input", _exact(d_hidden))
        yield batch("grad_output", "gain", "", _exact(d_hidden))
        yield same("buffer", "", "num_calls", np.array(step + 1), "optimizer")
        yield same("scalar", "", "lr.SGD.0", np.array(RATE), "forward")
        losses = tuple(_exact(half.mean()) for half in np.split(y, WORLD_SIZE))
        yield Value("scalar", "", "loss", step, "forward", _exact(y.mean()), "mean", losses)
        for (path, name), param in params.items():
            grad = grads[path, name]
            momentum = momenta[path, name] * MOMENTUM + grad
            for site, what, array in (
                ("param", name, param),
                ("grad", name, grad),
                ("optim", f"{name}.momentum_buffer", momentum),
            ):
                exact = _exact(array)
                yield Value(site, path, what, step, "optimizer", exact, "rows", _rows(exact))
            momenta[path, name] = momentum
            params[path, name] = param - RATE * momentum
