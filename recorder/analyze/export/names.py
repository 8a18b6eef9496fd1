"""The names of tensors in files of other formats: a function of the row alone. Never a path upwards."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from ...sites import SITE_OF

_MAX_CHARS = 200
_DEFAULTS: dict[str, Any] = {
    "micro_step": 0, "call": 0, "repeat": 0, "mode": "train", "root": "model", "scope": None, "rank": None
}  # fmt: skip
ROOT = "(root)"
"""Stands for the empty path; a module of that name would be spelled %28root%29."""
NAMING = (*_DEFAULTS, "phase", "site", "name", "module_path", "step")
"""Columns that make a name."""


def tensor_name(row: Mapping[str, Any]) -> str:
    """``step=3/layers.0.mlp/output``, then the name at the site, then ``key=value`` for what is not the usual case.

    Args:
        row: the columns of `NAMING`.
    """
    levels = [f"step={row['step']}", as_level(row["module_path"]) or ROOT, as_level(row["site"])]
    if row["name"]:
        levels.append(as_level(row["name"]))
    return "/".join([*levels, *unusual_levels(row)])


def unusual_levels(row: Mapping[str, Any]) -> list[str]:
    """``key=value`` for what is not the usual case in a row, which has the columns of `NAMING`."""
    levels = []
    for column, usual in _DEFAULTS.items():
        # Of gradients and parameters the final ones are usual.
        if row[column] not in (usual, None) and (column, row[column]) != ("scope", "final"):
            levels.append(f"{column}={as_level(row[column])}")
    if row["site"] not in SITE_OF or row["phase"] != SITE_OF[row["site"]].phase:
        levels.append(f"phase={as_level(row['phase'])}")
    return levels


def as_level(value: Any) -> str:
    """Return an untrusted text without anything that separates or climbs; a long one ends with its digest."""
    text = quote(str(value), safe="", errors="surrogatepass")
    if text.strip(".") == "":
        text = text.replace(".", "%2E")
    if len(text) > _MAX_CHARS:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        text = f"{text[: _MAX_CHARS - 17]}~{digest}"
    return text
