"""The rule that checks coordinates over widths: outputs that grow with the width of the model, after a few steps.

In a training that is scaled as mu-parametrisation has it, outputs are as large in a wide model as in a narrow one, at
the beginning and after a few steps, and so the best learning rate stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from ..rows import Catalog, Rows
from ..rule import Finding, Rule, Setting
from ..sizes import Sizes

_LEAST_SPAN = 2.0
"""Between the narrowest and the widest."""


class Width(Rule):
    """Outputs that grow with the width of the model: another width needs another learning rate."""

    name: ClassVar[str] = "width"
    sentence: ClassVar[str] = "After a few steps an output is larger the wider the model is."
    sites: ClassVar[tuple[str, ...]] = ("output", "param")
    columns: ClassVar[tuple[str, ...]] = ("sum_sq", "numel")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="exponent", default=0.3, unit="of the width", source="mup's coordinate check asks for 0"),
        Setting(name="steps", default=10, unit="steps", source="mup's coordinate check looks at the first few"),
    )
    advice: ClassVar[str] = (
        "scale the learning rate and the initialisation of this layer with its width, as mu-parametrisation does"
    )

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._sizes = Sizes(catalog, int(self.thresholds["steps"]))

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Take in the sizes."""
        if self.other_widths:
            self._sizes.add(rows)
        yield from ()

    def finish(self) -> Iterator[Finding]:
        """Fit a power of the width to the sizes of each output."""
        if not self.other_widths:
            self.why_not_judged = "needs --width RUN: runs of the same training at other widths, two at least"
            return
        runs = [self._sizes, *self.other_widths]
        widths = np.array([one.width(self._sizes) for one in runs])
        if widths.max() / widths.min() < _LEAST_SPAN:
            self.why_not_judged = f"it needs runs whose widths are {_LEAST_SPAN:g} times apart, and these are alike"
            return
        outputs = [one.outputs for one in runs]
        for series, key in enumerate(self.catalog.series):
            if not all(key in some for some in outputs):
                continue
            slope = float(np.polyfit(np.log2(widths), [some[key] for some in outputs], 1)[0])
            if slope > self.thresholds["exponent"]:
                lane = int(np.flatnonzero(self.catalog.series_of == series)[0])
                one = self.finding(
                    lane, int(self.thresholds["steps"]) - 1, "the output grows with the width of the model",
                    "exponent of the width", slope, self.thresholds["exponent"],
                )  # fmt: skip
                yield one._replace(
                    ranks=(), detail=f"widths {', '.join(f'{width:g}' for width in sorted(widths))} times this"
                )
