"""Owns whether what the user says of layouts can be meant: of each override, that some value fits its pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import LookupFailedError
from ..patterns import hint, matches
from .groups import parse_overrides

if TYPE_CHECKING:
    from .run import Run

_LEAF = ["module_path", "site", "name"]


def check_overrides(layouts: Sequence[str], *runs: Run) -> None:
    """Refuse an override that would change nothing.

    Args:
        layouts: ``PATTERN=LAYOUT``; see `Run.view`.
        runs: of the values that are meant.

    Raises:
        LookupFailedError: one is of another form, or no value of any run fits its pattern; the message says which.
    """
    try:
        overrides = parse_overrides(layouts)
    except (ValueError, AttributeError, TypeError) as error:
        raise LookupFailedError(str(error)) from error
    if not overrides:
        return
    leaves = [leaf for run in runs for leaf in run.table(_LEAF).group_by(_LEAF).aggregate([]).to_pylist()]
    there = list(dict.fromkeys(":".join(leaf[name] or "" for name in _LEAF) for leaf in leaves))
    for patterns, wanted in overrides:
        if not any(matches(patterns, leaf) for leaf in there):
            pattern = ",".join(patterns)
            near = hint(patterns[0], there)
            raise LookupFailedError(
                f"--layout '{pattern}={wanted}': no value fits {pattern!r}, patterns over module_path:site:name{near}"
            )
