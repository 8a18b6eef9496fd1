"""Rules that are declared and wait for columns which no version of the format has yet: `not judged` until then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ..rows import Rows
from ..rule import Finding, Rule, Setting


class _Waiting(Rule):
    """A rule whose columns are not recorded by any version of the format."""

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Is never called: the engine asks only rules of which there are all columns."""
        raise NotImplementedError(f"{self.name} reads {', '.join(self.columns)}, which no rule judges yet")


class DeadUnits(_Waiting):
    """Units of a layer that no sample activates."""

    name: ClassVar[str] = "dead_units"
    sentence: ClassVar[str] = "More than half of the units of a layer are active in less than 1 % of the samples."
    sites: ClassVar[tuple[str, ...]] = ("output",)
    columns: ClassVar[tuple[str, ...]] = ("units",)
    keep: ClassVar[str] = "units"
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="share", default=0.5, unit="of the units", source="smdebug's DeadRelu"),
    )
    advice: ClassVar[str] = "look at the bias and the scale of what comes before"


class OutlierUnits(_Waiting):
    """Units far larger than the others: massive activations."""

    name: ClassVar[str] = "outlier_units"
    sentence: ClassVar[str] = "A unit is many times larger than the median of the units of its layer."
    sites: ClassVar[tuple[str, ...]] = ("output",)
    columns: ClassVar[tuple[str, ...]] = ("units",)
    keep: ClassVar[str] = "units"
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="ratio", default=1000, unit="times the median", source="massive activations; LLM.int8"),
    )
    advice: ClassVar[str] = "keep this layer out of low precision, or look where the unit begins to grow"
