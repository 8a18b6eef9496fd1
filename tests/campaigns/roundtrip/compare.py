"""The comparison: what one process saw against the global tensors of a recorded run, or what is kept of these."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from recorder.errors import RecorderError

from .cases import Proof
from .reference import KEY, Key

SITES = ("input", "output", "grad_input", "grad_output", "param", "grad", "buffer", "optim", "scalar", "tap")


@dataclass
class SiteResult:
    expected: int = 0
    equal: int = 0
    """Bit-equal."""
    within: int = 0
    """Not bit-equal, and within the bound that rounding has there."""
    missing: list[Key] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    extra: list[Key] = field(default_factory=list)
    worst: float = 0.0
    """The largest difference, as a part of its bound."""
    loosest: float = 0.0
    """The largest bound, as a part of the largest magnitude in its tensor."""


def key_of(row: dict[str, object]) -> Key:
    return tuple(row[name] for name in KEY)  # type: ignore[return-value]


def compare(proof: Proof, look_up: Callable[[Key], torch.Tensor] | None = None) -> dict[str, SiteResult]:
    """Results by site.

    Args:
        proof: run and reference.
        look_up: how to get a global tensor; by default `Proof.tensor`.
    """
    found = {site: SiteResult() for site in SITES}
    measured = {}
    for row in proof.table:
        if row["rank"] is None and key_of(row) not in proof.values:
            found[str(row["site"])].extra.append(key_of(row))
        if row["rank"] is None and row["encoding"] is None:
            measured[key_of(row)] = row
    for key, value in proof.values.items():
        result = found[key[0]]
        result.expected += 1
        if key in measured:
            _judge_statistics(result, measured[key], value, proof.bounds[key])
            continue
        try:
            recorded = look_up(key) if look_up is not None else proof.tensor(key)
        except RecorderError:
            result.missing.append(key)
            continue
        if proof.is_early(key) and recorded.dtype == torch.float32:
            recorded = recorded.to(value.dtype)
        _judge(result, key, recorded, value, proof.bounds[key])
    return found


def _judge(result: SiteResult, key: Key, recorded: torch.Tensor, value: torch.Tensor, bound: float) -> None:
    if (recorded.dtype, recorded.shape) != (value.dtype, value.shape):
        result.wrong.append(f"{key}: {recorded.dtype} {list(recorded.shape)}, not {value.dtype} {list(value.shape)}")
        return
    magnitude = float(value.double().abs().nan_to_num(0).max()) if value.numel() else 0.0
    if bound and magnitude:
        result.loosest = max(result.loosest, bound / magnitude)
    if is_same(recorded, value):
        result.equal += 1
        return
    if bool((recorded.isfinite() != value.isfinite()).any()):
        result.wrong.append(f"{key}: finite elsewhere")
        return
    difference = float((recorded.double() - value.double()).abs().nan_to_num(0).max())
    if difference > bound:
        result.wrong.append(
            f"{key}: differs by {difference:.3g}, the bound is {bound:.3g}, the largest {magnitude:.3g}"
        )
        return
    result.within += 1
    result.worst = max(result.worst, difference / bound)


def _judge_statistics(result: SiteResult, row: dict[str, Any], value: torch.Tensor, bound: float) -> None:
    """Judge a row without values by its shape and its statistics, which sums over ranks do not have."""
    wanted: dict[str, Any] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    found: dict[str, Any] = {"dtype": row["dtype"], "shape": json.loads(row["shape"])}
    if found == wanted and value.is_floating_point() and "no_statistics" not in (row["note"] or ""):
        wide = value.double()
        finite = wide[wide.isfinite()]
        wanted |= {"nan_count": int(wide.isnan().sum()), "inf_count": int(wide.isinf().sum())}
        found |= {name: row[name] for name in ("nan_count", "inf_count")}
        for name in ("min", "max", "mean") if finite.numel() else ():
            number = float(getattr(finite, name)())
            is_near = row[name] is not None and abs(row[name] - number) <= bound + 1e-12 * float(finite.abs().max())
            wanted[name], found[name] = number, number if is_near else row[name]
    if found != wanted:
        result.wrong.append(f"{key_of(row)}: {found}, not {wanted}")
    elif bound:
        result.within += 1
    else:
        result.equal += 1


def is_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors are bit-equal, but for the sign of a zero or a NaN."""
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(_plain(one), _plain(two))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in a type that can be compared, without NaNs, which equal nothing."""
    return tensor.double().nan_to_num(nan=1e300) if tensor.is_floating_point() else tensor
