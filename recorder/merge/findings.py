"""The findings of a merge about its rows: counts by kind, with the first few of each in full, as plain JSON values.

Must never grow with the number of rows: a broken run may have a finding for every one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..globalview.row_groups import Finding

CORRUPT = "corrupt"
"""The kind of finding where bytes of the source are not those that were written, or are gone."""
UNKNOWN_ENCODING = "unknown_encoding"
"""The kind where a later version encoded the payload, or named the element type, so that it cannot be read here."""
UNKNOWN_COLUMN = "unknown_column"
"""The kind where a later version has a column, which merged rows do without."""
MAX_EXAMPLES = 5
_HARMLESS = ("per_rank", "inferred", "superseded", "buffers_differ", "between_stages", UNKNOWN_COLUMN)
_FIELDS = ("step", "module_path", "site", "name", "text")

Entry = dict[str, Any]
Summary = dict[str, Entry]
"""The summary of each kind: `count`, `num_problems` (findings that make the exit code 1) and `first`, some examples."""


def is_problem(kind: str) -> bool:
    """Whether a finding means that the merged run is less than it should be, or that training was not as it should.

    Buffers are each rank's own until the next forward broadcasts them, so replicas of them may differ.
    """
    return kind not in _HARMLESS


def summarize(findings: Iterable[Finding]) -> Summary:
    """Count findings by kind."""
    summary: Summary = {}
    for finding in findings:
        entry = summary.setdefault(finding.kind, {"count": 0, "num_problems": 0, "first": []})
        entry["count"] += finding.num_rows
        entry["num_problems"] += finding.num_rows * is_problem(finding.kind)
        if len(entry["first"]) < MAX_EXAMPLES:
            example = {name: getattr(finding, name) for name in _FIELDS}
            entry["first"].append(example | {"ranks": list(finding.ranks)})
    return summary


def of_damage(texts: Iterable[str]) -> Summary:
    """Summarize texts about damage in the source, each once, under the kind `CORRUPT`."""
    texts = list(dict.fromkeys(texts))
    first = [dict.fromkeys(_FIELDS) | {"ranks": [], "text": text} for text in texts[:MAX_EXAMPLES]]
    return {CORRUPT: {"count": len(texts), "num_problems": len(texts), "first": first}} if texts else {}


def of_unknown_columns(rows_of: Mapping[str, int]) -> Summary:
    """Summarize the columns that merged rows do without, from the number of rows that have each."""
    if not rows_of:
        return {}
    texts = [f"column {name!r}: this version of recorder does not know it" for name in rows_of]
    first = [dict.fromkeys(_FIELDS) | {"ranks": [], "text": text} for text in texts[:MAX_EXAMPLES]]
    return {UNKNOWN_COLUMN: {"count": max(rows_of.values()), "num_problems": 0, "first": first}}


def combine(summaries: Iterable[Summary]) -> Summary:
    """Add up summaries; of examples that differ in nothing but their step, the first is kept."""
    total: Summary = {}
    for summary in summaries:
        for kind, entry in summary.items():
            into = total.setdefault(kind, {"count": 0, "num_problems": 0, "first": []})
            into["count"] += entry["count"]
            into["num_problems"] += entry["num_problems"]
            known = [_content(example) for example in into["first"]]
            into["first"] += [example for example in entry["first"] if _content(example) not in known]
            del into["first"][MAX_EXAMPLES:]
    return total


def _content(example: Entry) -> Entry:
    return {name: value for name, value in example.items() if name != "step"}


def num_problems(summary: Summary) -> int:
    """Return the number of findings that make the exit code 1."""
    return sum(int(entry["num_problems"]) for entry in summary.values())
