"""Print the evidence that the global view is right: layout x world size x way to train x site.

    python -m tests.campaigns roundtrip                      # every case, some ten minutes on two cores
    python -m tests.campaigns roundtrip fsdp2 x2             # the cases whose name has all of these words
    python -m tests.campaigns roundtrip --merge ddp          # from the merged run instead

Each case trains on several ranks with the recorder, and in one process with plain hooks and the whole batch.
`expected` values were seen by the latter; each has to be in the global view, with equal bits (`equal`) or within the
bound that rounding has there (`within`; derived in `reference.py`). The exit code is 1 if any is not.
In the ways `dead` and `nan` ranks have values alike that are of the batch, and every other step has statistics alone:
there shape and statistics are compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .cases import Case, blank, matrix
from .compare import SITES, SiteResult, compare

_FORMAT = "{:<16} {:>5} {:<10} {:<11} {:>8} {:>6} {:>6} {:>7} {:>5} {:>5} {:>10} {:>8}"
_HEAD = (
    "layout",
    "ranks",
    "way",
    "site",
    "expected",
    "equal",
    "within",
    "missing",
    "wrong",
    "extra",
    "diff/bound",
    "bound",
)


def line(case: Case, site: str, result: SiteResult) -> str:
    numbers = (result.expected, result.equal, result.within, len(result.missing), len(result.wrong), len(result.extra))
    measures = (f"{result.worst:.2g}", f"{result.loosest:.1g}") if result.loosest else ("", "")
    return _FORMAT.format(case.layout, case.world_size, case.way or "plain", site, *numbers, *measures)


def total(results: list[SiteResult]) -> SiteResult:
    return SiteResult(
        expected=sum(r.expected for r in results),
        equal=sum(r.equal for r in results),
        within=sum(r.within for r in results),
        missing=[key for r in results for key in r.missing],
        wrong=[text for r in results for text in r.wrong],
        extra=[key for r in results for key in r.extra],
        worst=max(r.worst for r in results),
        loosest=max(r.loosest for r in results),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", help="parts of the names of the cases to run; default all")
    parser.add_argument("--merge", action="store_true", help="read the run that `recorder merge` makes of it")
    parser.add_argument("--by-case", action="store_true", help="one line a case, not one a site")


def main(asked: argparse.Namespace) -> int:
    every_case = [*matrix(), *blank()]
    cases = [case for case in every_case if all(word in str(case).split() or word == str(case) for word in asked.words)]
    if not cases:
        print(f"no case has all of {', '.join(asked.words)}; cases are:", *every_case, sep="\n  ", file=sys.stderr)
        return 2
    print(_FORMAT.format(*_HEAD), flush=True)
    every: list[SiteResult] = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            proof = case.start(Path(folder)).finished()
            results = compare(proof, proof.merged_tensor if asked.merge else None)
        every += results.values()
        shown = {"all": total(list(results.values()))} if asked.by_case else results
        for site in shown:
            print(line(case, site, shown[site]), flush=True)
        for problem in (p for site in SITES for r in [results[site]] for p in (*r.missing, *r.wrong, *r.extra)):
            print(f"    {problem}", file=sys.stderr)
    found = total(every)
    bad = f"{len(found.missing)} missing, {len(found.wrong)} wrong, {len(found.extra)} extra"
    good = f"{found.equal:,} bit-equal, {found.within:,} within their bound (at most {found.worst:.2g} of it)"
    print(f"\n{len(cases)} cases, {found.expected:,} values: {good}, {bad}")
    return 1 if found.missing or found.wrong or found.extra else 0
