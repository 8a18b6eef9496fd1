"""Selects rows by module, site, name, step and rank, and has the options for joining ranks' rows.

This module must never loop over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import LookupFailedError
from ..globalview.planner import check_overrides
from ..rules import Schedule, choose, did_you_mean, hint, parse_patterns
from ..sites import CALL, FORMAT_VERSION, SITES
from ..system.text import listed, steps_in_words
from .run import Run

PER_RANK = ("*=per_rank",)
"""The layout override that joins no rows: every row stays as its rank recorded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rows that a user selects. A field that is None does not restrict the rows."""

    module: str | None = None
    """Patterns of module paths, separated by commas, as in rules. ``''`` is the root."""
    site: str | None = None
    """One site (where in a step a value is seen, such as ``output``), or several sites separated by commas."""
    name: str | None = None
    """Patterns of the names at a site, separated by commas."""
    step: int | str | None = None
    """One step, or several steps as in rules: ``0:100``, ``::10``, ``0,5,7``, ``pow2``."""
    rank: int | str | None = None
    """One rank, or several ranks, written as for `step`."""
    root: str | None = None
    """Patterns of the names of models, separated by commas."""

    @property
    def columns(self) -> dict[str, int | str]:
        """The columns by which `narrow` filters, each with the text or number that the user gave for it."""
        asked = {"module_path": self.module, "site": self.site, "name": self.name, "step": self.step, "rank": self.rank}
        asked |= {"root": self.root}
        return {column: value for column, value in asked.items() if value is not None}

    def check(self, *runs: Run, more_sites: Sequence[str] = ()) -> None:
        """Raise an error for a selection that can match nothing in these runs. No rows are read.

        `more_sites` are sites that only the probe has.

        Raises LookupFailedError if a pattern, or the steps or ranks, cannot be parsed, or if a site is unknown. If a
        run has a later version of the format, any site may exist.
        """
        for column in self.columns:
            self.chosen(column, [])
        is_later = any(run.version > FORMAT_VERSION for run in runs)
        for site in self._sites:
            if site not in (*SITES, *more_sites) and not is_later:
                near = did_you_mean(site, SITES, f"; sites are {', '.join(SITES)}")
                raise LookupFailedError(f"no site {site!r}{near}")

    def narrow(self, table: Any) -> Any:
        """Return the selected rows of a `pa.Table`. Each distinct value is tested once."""
        hides_calls = self.site is None and "site" in table.column_names
        for column in (*self.columns, *(["site"] if hides_calls else [])):
            values = table.column(column)
            distinct = [value for value in values.unique().to_pylist() if value is not None]
            kept = self.chosen(column, distinct)
            if len(kept) < len(distinct) or values.null_count:
                kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
                table = table.filter(pc.is_in(values, pa.array(kept, kind)))
        return table

    def chosen(self, column: str, values: Sequence[Any]) -> list[Any]:
        """Return those of the distinct values of a column that are selected."""
        asked = self.columns.get(column)
        if column == "site":
            return [site for site in values if (site != CALL if asked is None else site in self._sites)]
        if asked is None:
            return list(values)
        try:
            if column in ("step", "rank"):
                schedule = Schedule.parse(str(asked))
                return [value for value in values if value in schedule]
            return choose(parse_patterns(str(asked)), values)
        except ValueError as error:
            examples = "; examples: 7  0:100  ::10  0,5,7" if column in ("step", "rank") else ""
            raise LookupFailedError(f"--{column.removesuffix('_path')} {asked}: {error}{examples}") from None

    def explain_nothing(self, table: Any, what: str, lost: str) -> LookupFailedError:
        """Return the error for a selection that matches no row of `table`, which must have the selected columns.

        `lost` is `RecordedRun.lost`, the reason why a run may have no rows at all.
        """
        for column, asked in self.columns.items() if table.num_rows else ():
            if self.only(column).narrow(table).num_rows:
                continue
            there = sorted(value for value in table.column(column).unique().to_pylist() if value is not None)
            verb = "is" if len(there) == 1 else "are"
            if column in ("step", "rank"):
                choices = f"; there {verb} {steps_in_words(there, column)}"
            else:
                choices = hint(str(asked), there, otherwise=f"; there {verb} {listed(map(repr, there))}")
            return LookupFailedError(f"{what} has no row with {column}={asked!r}{choices}")
        if not self.columns or not table.num_rows:
            return LookupFailedError(f"{what} has no rows{': ' * bool(lost)}{lost}")
        together = ", ".join(f"{column}={asked!r}" for column, asked in self.columns.items())
        elsewhere = ""
        if self.step is not None and (steps := replace(self, step=None).narrow(table).column("step").unique()):
            elsewhere = f"; there are rows of {steps_in_words(sorted(steps.to_pylist()))}"
        return LookupFailedError(
            f"{what} has no row with {together}; each of these occurs, but never together{elsewhere}"
        )

    def only(self, column: str) -> Selection:
        """Return a selection with the filter of one column alone."""
        return Selection(**{column.removesuffix("_path"): self.columns.get(column)})  # type: ignore[arg-type]

    @property
    def _sites(self) -> tuple[str, ...]:
        return tuple(self.site.split(",")) if self.site is not None else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalOptions:
    """Options for joining the rows of ranks into global tensors; see `Run.view`."""

    across_ranks: bool = False
    loss: str = "mean"
    layouts: Sequence[str] = ()
    partial: bool = False
    """True to compute a value that lacks ranks from the ranks present. False leaves out the value, with a note."""

    def check(self, *runs: Run) -> None:
        """Raise an error for options that would have no effect.

        Raises LookupFailedError if a loss or a layout is given although no global tensors are wanted, or although all
        runs are merged. It is also raised if no value matches a layout's pattern.
        """
        if self.loss == "mean" and not self.layouts:
            return
        if not self.across_ranks:
            raise LookupFailedError("a loss or a layout says how global tensors are made; add --global")
        if all(run.is_merged for run in runs):
            why = "is merged, and its tensors cannot change; give a loss or a layout to the run that was merged"
            raise LookupFailedError(f"{runs[0].path}: {why}")
        check_overrides(self.layouts, *(run for run in runs if not run.is_merged))


RANKS_OWN = GlobalOptions()
"""The options that do not join the rows of ranks."""
