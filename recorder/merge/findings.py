"""Owns what a merge has to say about its rows: counted by kind, the first few of each in full, as plain JSON values.

Must never grow with the number of rows: a broken run may have a finding for every one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..read.groups import Finding

CORRUPT = "corrupt"
"""Bytes of the source are not those that were written, or are gone."""
MAX_EXAMPLES = 5
_HARMLESS = ("per_rank", "inferred", "superseded", "buffers_differ", "between_stages")
_FIELDS = ("step", "module_path", "site", "name", "text")

Entry = dict[str, Any]
Summary = dict[str, Entry]
"""By kind: `count`, `num_problems` (those that make the exit code 1) and `first`, some examples."""


def is_problem(kind: str) -> bool:
    """Whether a finding means that the merged run is less than it should be, or that training was not as it should.

    Buffers are each rank's own until the next forward broadcasts them, so replicas of them may differ.
    """
    return kind not in _HARMLESS


def summarize(findings: Iterable[Finding]) -> Summary:
    """Findings by kind."""
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
    """What is damaged in the source, each text once, as corrupt."""
    texts = list(dict.fromkeys(texts))
    first = [dict.fromkeys(_FIELDS) | {"ranks": [], "text": text} for text in texts[:MAX_EXAMPLES]]
    return {CORRUPT: {"count": len(texts), "num_problems": len(texts), "first": first}} if texts else {}


def combine(summaries: Iterable[Summary]) -> Summary:
    """Several summaries, in their order, as one; examples that differ by their step alone once."""
    total: Summary = {}
    for summary in summaries:
        for kind, entry in summary.items():
            into = total.setdefault(kind, {"count": 0, "num_problems": 0, "first": []})
            into["count"] += entry["count"]
            into["num_problems"] += entry["num_problems"]
            known = [_content(one) for one in into["first"]]
            into["first"] += [one for one in entry["first"] if _content(one) not in known]
            del into["first"][MAX_EXAMPLES:]
    return total


def _content(example: Entry) -> Entry:
    return {name: value for name, value in example.items() if name != "step"}


def num_problems(summary: Summary) -> int:
    """Findings that make the exit code 1."""
    return sum(int(entry["num_problems"]) for entry in summary.values())
