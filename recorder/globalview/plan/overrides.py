"""Whether what the user says of layouts can be meant: of each override, that some value fits its pattern."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import LookupFailedError
from ...layout.rules import parse_override
from ...read.run import RecordedRun
from ...rules import hint, matches, parse_patterns
from .decisions import Override

Overrides = list[tuple[tuple[str, ...], str]]
"""Patterns over ``module_path:site:name``, and the layout of what fits them; the last that fits wins."""
_LEAF = ["module_path", "site", "name"]


def check_overrides(layouts: Sequence[str], *runs: RecordedRun) -> None:
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


def parse_overrides(layouts: Sequence[str]) -> Overrides:
    """``PATTERN=LAYOUT`` as patterns over ``module_path:site:name`` and layout; without a colon all of a module's.

    Raises:
        ValueError: one of them is not of this form.
    """
    overrides = []
    for layout in layouts:
        pattern, equals, wanted = layout.rpartition("=")
        if not equals or not pattern:
            raise ValueError(f"layout {layout!r}: expected PATTERN=LAYOUT, such as 'layers.*:output:=shard(1)'")
        parse_override(wanted)
        overrides.append((tuple(one if ":" in one else f"{one}:*" for one in parse_patterns(pattern)), wanted))
    return overrides


def find_override(overrides: Overrides, module_path: str, site: str, name: str) -> Override | None:
    """The last override that fits a value; None where none does."""
    for patterns, wanted in reversed(overrides):
        if matches(patterns, f"{module_path}:{site}:{name}"):
            return Override(wanted, f"{','.join(patterns)}={wanted}")
    return None
