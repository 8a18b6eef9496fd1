"""Draws a run while it grows. New rows keep the blocks (named data) of the run's page up to date.

The cost of a scan depends on the data that is new since the last scan, not on the size of the run. Rows of steps that
may be incomplete are drawn, and are removed again before the steps are drawn anew. This module must never keep rows. It
keeps only the data that the page draws.
"""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import __version__
from ..analyze.check.check import check, installed_rules
from ..analyze.check.reading import RecordedColumns, RunRows
from ..analyze.doctor.reply import Check, checks_of
from ..checks.book import RULES, make_rules
from ..checks.causes import with_causes
from ..checks.engine import Engine
from ..checks.rows import Catalog
from ..checks.rule import Finding
from ..errors import NotARunError, RunError
from ..format.manifest import RunManifest
from ..format.rundir import RUN_MANIFEST
from ..globalview.leaves import Leaves
from ..report.axes import Axes, SeriesValues, modules_block, probe_values, step_rows
from ..report.blocks import PageBlock
from ..report.collect import layouts_of, ranks_block
from ..report.distributions import Image, ImageFinder, images_block
from ..report.statistics import StatisticsBlocks
from ..report.top import facts_of, gaps_block, told_by_check, top_block
from ..run.finding import shortest_text_of
from ..run.growing import NEVER, GrowingRun
from ..run.run import Run
from ..run.status import RankNow
from ..run.step_ranges import cut_evenly
from ..storage.locations import Location, store_of
from ..system.text import counted, size

_READ_ROWS = 120_000
"""The number of rows that are found and drawn at a time while a long run is read for the first time."""
_WINDOW_ROWS = 20000
"""The approximate number of rows that are in memory together while they are drawn."""
_CUT_ROWS = 40_000
"""The rows in memory while batches of many steps are cut into ranges. This needs less memory per row than drawing."""
_WHOLE_AFTER_S = 1.5
"""A step is complete this many seconds after a later one was seen. Both kinds of shard are flushed every second."""
_LOOKS_APART = 10
"""The pause between listings while much is to be read, in durations of a listing (seconds for 4,096 ranks)."""
_MAX_OPEN_ROWS = 60_000
"""The most rows of steps that may be incomplete. With more, a rank is far behind, and is not waited for."""
_MAX_TOGETHER_ROWS = 40_000
"""The most rows, over all ranks, of the batches that are read to assemble global values. The small batches of a live
run are below the limit. The full batches of a long history are not."""
_MAX_GLOBAL_STEP_ROWS = 5_000
"""A run with more rows in a step gets no global values. Assembling them would take longer than a training step."""
_SLOW_S = 4.0
"""The seconds between updates of blocks that are computed anew from everything: ranks, histograms, images."""
_PROBE_APART = 20
"""The pause between readings of the probe, in durations of a reading. Each reading reads the whole probe."""
_FOUND_NOTHING = "The rules found nothing in what is recorded so far"
_MAX_DOCTOR_ROWS = 300_000
"""A run that has ended is checked by `recorder doctor` only if it has at most this many rows."""
_MAX_TOLD = 200
_BAD_STATES = ("killed", "failed", "silent")


class Drawing:
    """The blocks of one run's page. One thread calls `refresh`. The caller locks `refresh` and `blocks_since`."""

    def __init__(self, location: Location, manifest: RunManifest) -> None:
        """Prepare, without reading the run yet."""
        self.location = location
        self.name = manifest.name or location.name
        self._typed = shortest_text_of(location, self.name) if isinstance(location, Path) else str(location)
        self.epoch = 0
        """Counts up whenever every column has changed. A page then needs all blocks again."""
        self.version = 0
        """Counts up with each change of the blocks."""
        self._rules = [*RULES, *installed_rules()[0]]
        self._columns = [name for rule in self._rules for name in rule.columns]
        self._begin(manifest)

    def _begin(self, manifest: RunManifest) -> None:
        self.manifest = manifest
        self.state = "reading"
        """What is known of the run: ``reading`` (for the first time), ``live``, ``over``, or ``gone`` (deleted)."""
        self._looking: Generator[None, None, bool] | None = None
        """The generator of a paused scan. None if no scan is under way."""
        self._look_at_s = 0.0
        """The monotonic time of the next listing of the run. While there is much to read, listings are delayed."""
        self._checked: list[Check] | None = None
        self.growing = GrowingRun(self.location, manifest)
        self.axes = Axes()
        self.collected: StatisticsBlocks | None = None
        self._modules: Mapping[str, int] = {}
        self._leaves: Leaves | None = None
        self._has_global: bool | None = None
        self._num_global_steps = 0
        self._is_global_partial = False
        self._catalog: Catalog | None = None
        self._engine: Engine | None = None
        self._found: list[Finding] = []
        """The findings of rules in the rows that were drawn."""
        self._judged: Sequence[Finding] = ()
        """The findings when all rows and the probe were last judged together. The next judging replaces them."""
        self._num_judged = 0
        """The number of findings in `_found` when all rows and the probe were last judged together."""
        self._num_unjudged = ""
        """In words, how many rules could not be judged when all rows and the probe were last judged together."""
        self._probe_at_s = 0.0
        self._probe_seen: object = ()
        """The state of the probe, and the number of rows, when the probe was last read."""
        self._first_images: list[Image] = []
        self._last_images: list[Image] = []
        self._layouts: list[dict[str, Any]] = []
        self._kinds_seen: set[tuple[str, ...]] = set()
        self._seen: deque[tuple[float, int]] = deque()
        self._kept: dict[str, tuple[int, bytes]] = {}
        """The version and the bytes of each block that does not grow with steps, by the name of the block."""
        self._slow_at_s, self._slow_version = -_SLOW_S, -1
        self._is_checked = False
        self._num_series = -1
        self.epoch += 1

    def refresh(self) -> bool:
        """Scan the run, or continue a paused scan. Return True if there is more to do at once."""
        try:
            if self.state == "gone":
                return self._is_another()
            looking, self._looking = self._looking or self._look(), None
            next(looking)
        except StopIteration as done:
            return bool(done.value)
        except NotARunError:
            return self._is_another()
        self._looking = looking
        return True

    def _look(self) -> Generator[None, None, bool]:
        """Scan the run and draw new rows. Yield between large pieces. Return True if there are more rows to read."""
        began_s, is_new = time.monotonic(), False
        if began_s >= self._look_at_s:
            is_new = self.growing.look()
            self._look_at_s = time.monotonic() + _LOOKS_APART * (time.monotonic() - began_s)
        has_more = self.growing.advance(_READ_ROWS)
        if not has_more:
            self._look_at_s = 0.0
        goes_on = self.state == "over" and not self.growing.is_over
        has_other_ranks = self.collected is not None and self._run((0, 0)).ranks != self.collected.lanes.ranks
        if self.growing.has_again or goes_on or has_other_ranks:
            self._begin(self.manifest)
            return True
        yield from self._draw_new(is_new, has_more)
        return has_more

    def _is_another(self) -> bool:
        with suppress(RunError, OSError):
            store = store_of(self.location)
            store.refresh()
            manifest = RunManifest.read(store.read_json(self.location / RUN_MANIFEST))
            self._begin(manifest)
            return True
        if self.state != "gone":
            self.version += 1
            self.state = "gone"
            self._keep_top()
        return False

    def _draw_new(self, is_new: bool, has_more: bool) -> Iterator[None]:
        growing = self.growing
        first, end = growing.first_pending, min(self._whole_until(has_more), growing.end_pending)
        state = "reading" if has_more else "over" if growing.is_over else "live"
        is_grown = is_new or end > max(growing.done_before, first)
        if is_grown or state != self.state or has_more or self._is_probe_due:
            self._begin_version()
            for _ in self._draw_final(first, end):
                self.state = "reading"
                self._keep_top()
                self._keep_slow_if_due()
                yield
                self._begin_version()
            if not has_more:
                self._look_at_probe(is_due=state == "over" or self._is_probe_due)
            if not has_more and growing.end_pending > growing.first_pending:
                self._draw_open(growing.first_pending, growing.end_pending)
            if state == "over" and not self._is_checked:
                self._keep_top()
                self._keep_slow_if_due()
                yield  # `recorder doctor` takes seconds, so it runs only once
                self._finish()
            self.state = state
            self._keep_top()
        self._keep_slow_if_due()

    @property
    def _probe_now(self) -> object:
        has_any = any(self.growing.probe) and self.collected is not None
        return (self.growing.probe, self.growing.num_rows) if has_any else ()

    @property
    def _is_probe_due(self) -> bool:
        return self._probe_now != self._probe_seen and time.monotonic() >= self._probe_at_s

    def _whole_until(self, has_more: bool) -> int:
        now_s, horizon = time.monotonic(), self.growing.horizon
        if has_more or horizon >= NEVER:
            return horizon
        if self.growing.num_pending > _MAX_OPEN_ROWS:
            return max(horizon, self.growing.end_pending - 1)
        self._seen.append((now_s, horizon))
        whole = 0
        while self._seen and self._seen[0][0] <= now_s - _WHOLE_AFTER_S:
            whole = self._seen.popleft()[1]
        if whole:
            self._seen.appendleft((now_s - _WHOLE_AFTER_S, whole))
        return whole

    def _begin_version(self) -> None:
        """Begin a version. Pages get the changes from now on. Remove all values that were not final."""
        self.version += 1
        if self.collected is not None:
            for cube in self.collected.growing_cubes:
                cube.restore()
                cube.version = self.version

    def _draw_final(self, first: int, end: int) -> Iterator[None]:
        if end <= first:
            return
        pieces = cut_evenly(first, end, self.growing.num_pending, _WINDOW_ROWS)
        run, further, num_rows = self._run((first, end)), RecordedColumns(self._columns).names, 0
        rests_after = _WINDOW_ROWS if self.state == "reading" else _READ_ROWS
        if self.state == "reading" and self.growing.num_pending > _WINDOW_ROWS:
            yield  # the page shows how much is left to draw
        judged: RunRows | None = None
        with step_rows(run, pieces, further=further, max_pending_rows=_CUT_ROWS) as rows:
            for steps, table in zip(pieces, rows, strict=True):
                if table.num_rows:
                    self._draw(run, steps, table)
                    judged = judged or RunRows(run, self._columns, steps, self._catalog)
                    self._check(judged, table)
                    num_rows += table.num_rows
                self.growing.done(steps[1])
                if num_rows >= rests_after:
                    num_rows = 0
                    yield

    def _look_at_probe(self, is_due: bool) -> None:
        """If it `is_due`, draw the probe's numbers at the steps that are drawn, and judge the whole run with them."""
        began_s, self._probe_seen = time.monotonic(), self._probe_now if is_due else self._probe_seen
        run = Run(self.location, self.manifest) if is_due and self.growing.num_rows <= _MAX_DOCTOR_ROWS else None
        if run is None or self.collected is None or not any(writer.probe_shards for writer in run.writers):
            return
        probe, last = probe_values(run, self.axes), self.collected.cube.last_step or 0
        self._make_room(run, [])
        for one in probe:
            is_drawn = one.steps <= last
            numbers = {name: column[is_drawn] for name, column in one.numbers.items()}
            drawn = SeriesValues(one.series[is_drawn], one.steps[is_drawn], one.ranks[is_drawn], numbers)
            self.collected.add_probe([drawn])
        checked = check(run)
        self._judged, self._num_judged, self._num_unjudged = checked.findings, len(self._found), checked.num_unjudged
        self._probe_at_s = time.monotonic() + max(_PROBE_APART * (time.monotonic() - began_s), _SLOW_S)

    def _draw_open(self, first: int, end: int) -> None:
        run = self._run((first, end))
        with step_rows(run, [(first, end)]) as rows:
            (table,) = rows
        if not table.num_rows:
            return
        self._grow(run, table)
        assert self.collected is not None
        for cube in self.collected.growing_cubes:
            cube.save_from(first)
        self.collected.add(table, is_final=False)
        self._add_global(run, (first, end), table, is_final=False)

    def _draw(self, run: Run, steps: tuple[int, int], table: Any) -> None:
        self._grow(run, table)
        assert self.collected is not None
        self.collected.add(table)
        self._add_global(run, steps, table, is_final=True)
        self._look_for_images(run, table)
        if len(run.ranks) > 1 and not run.is_merged and self._can_put_together(steps):
            firsts = self.axes.first_steps
            keys = [key for key, number in self.axes.index.items() if steps[0] <= firsts[number] < steps[1]]
            self._layouts += layouts_of(self._run(steps), self.axes, keys, self._kinds_seen)

    def _run(self, steps: tuple[int, int]) -> Run:
        return Run(self.location, self.manifest, self.growing.writers(steps))

    def _grow(self, run: Run, table: Any) -> None:
        self.axes.add(table)
        steps = sorted({int(step) for step in table.column("step").unique().to_pylist()})
        if self._has_global is None:
            self._has_global = table.num_rows <= _MAX_GLOBAL_STEP_ROWS * max(len(steps), 1)
        self._make_room(run, steps)

    def _make_room(self, run: Run, steps: Sequence[int]) -> None:
        """Make room for new series and steps. If there is a probe, which has all steps, all steps get columns."""
        axes = self.axes
        if self.collected is None or len(axes.index) != self._num_series:
            self._num_series = len(axes.index)
            older = self.collected
            self.collected = StatisticsBlocks(run, axes, steps=(), is_growing=True, has_global=self._has_global)
            if older is not None:
                self.collected.adopt(older)
            self.epoch += 1
            block, self._modules = modules_block(run, list(axes.index))
            self._keep(block)
            for cube in self.collected.growing_cubes:
                cube.version = self.version
        halved = self._num_halved
        is_probed = any("probe" in rule for writer in run.writers for rule in writer.manifest.rules)
        of_tensors = steps if is_probed else [step for step in steps if step in axes.steps]
        self.collected.add_steps(of_tensors, [step for step in steps if step in axes.scalar_steps])
        if self._num_halved != halved:
            self.epoch += 1

    @property
    def _num_halved(self) -> int:
        return 0 if self.collected is None else sum(cube.num_halved for cube in self.collected.growing_cubes)

    def _add_global(self, run: Run, steps: tuple[int, int], table: Any, *, is_final: bool) -> None:
        """Add the values of all ranks together at these steps. Do nothing if the steps' batches have too many rows."""
        assert self.collected is not None
        if not self.collected.lanes.has_global or run.is_merged:
            return
        if not self._can_put_together(steps):
            self._is_global_partial = True
            return
        view = self._run(steps).view()
        if self._leaves is None:
            self._leaves = view.leaves
        view.leaves = self._leaves
        with suppress(RunError):
            self.collected.add_global(view, *steps)
        if is_final:
            self._num_global_steps += len(table.column("step").unique())
        self.collected.global_steps = self._num_global_steps if self._is_global_partial else None

    def _can_put_together(self, steps: tuple[int, int]) -> bool:
        return self.growing.num_rows_of(steps) <= _MAX_TOGETHER_ROWS

    def _look_for_images(self, run: Run, table: Any) -> None:
        finder = ImageFinder(run)
        finder.add(table)
        images = finder.images(run)
        if not self._first_images:
            self._first_images = images
        elif images:
            self._last_images = images

    def _check(self, rows: RunRows, table: Any) -> None:
        if self._engine is None:
            self._catalog = rows.catalog
            self._engine = Engine(make_rules(self._rules, self._catalog, {}), self._catalog)
        self._engine.add_complete(rows.of_table(table))
        self._found += self._engine.take()

    def _finish(self) -> None:
        self._is_checked = True
        if self._engine is not None:
            self._found += self._engine.finish().findings
        if self.growing.num_rows <= _MAX_DOCTOR_ROWS and self.collected is not None:
            with suppress(RunError, OSError):
                self._checked = list(checks_of(Run(self.location, self.manifest)))

    def _keep(self, block: PageBlock) -> None:
        data = block.encoded()
        if block.name not in self._kept or self._kept[block.name][1] != data:
            self.version += 1
            self._kept[block.name] = self.version, data

    def _keep_top(self) -> None:
        ranks = self.growing.ranks
        run = self._run((0, 0))
        first, last, steps = self.axes.first_step, self.axes.last_step, ""
        if first is not None:
            steps = str(first) if first == last else f"{first} to {last} ({self.axes.num_steps})"
        used = run.size_bytes if self.state == "over" else sum(rank.status.used_bytes for rank in ranks)
        states = [rank.state for rank in ranks] or [writer.state for writer in run.writers]
        rows = f"{self.growing.num_rows:,}" + (f", {size(used)}" if used else "")
        facts = list(facts_of(run, steps=steps, states=states, rows=rows))
        bad = [rank for rank in ranks if rank.state in _BAD_STATES or rank.status.num_dropped]
        checks = self._checked if self._checked is not None else list(_told(ranks))
        numbers = {
            "version": __version__,
            "against": None,
            "live": {"state": self.state, "step": last, "found": self._found_text()},
            "verdict": None if self._checked is not None else self._verdict(bad),
        }
        judged_values = {one[:1] + one[3:8] for one in self._judged}  # this key is the rule, the value and the ranks
        newer = (one for one in self._found[self._num_judged :] if one[:1] + one[3:8] not in judged_values)
        found = [*self._judged, *newer]
        found = with_causes(found, self._catalog) if self._catalog is not None else []
        judged, is_growing = told_by_check(run, found, self._typed, self._num_unjudged), self.state == "live"
        if not found and self._checked is None:
            judged = [judged[0]._replace(text=_FOUND_NOTHING)]
        self._keep(top_block(run, checks, judged, self.collected, numbers, facts, is_growing=is_growing))

    def _verdict(self, bad: Sequence[RankNow]) -> str:
        ranks = self.growing.ranks
        if self.state == "gone":
            return "The run was deleted; what it showed stays here until this page is closed."
        if not ranks:
            return "No rank has written a status yet."
        if bad:
            return f"{counted(len(bad), 'rank')} of {len(ranks)} dropped values, or did not end well"
        doctor = "looks closer once it is over"
        if self.growing.num_rows > _MAX_DOCTOR_ROWS:
            doctor = f"is not asked of a run of more than {_MAX_DOCTOR_ROWS:,} rows"
        return f"{counted(len(ranks), 'rank')}, and none has dropped anything; `recorder doctor` {doctor}"

    def _found_text(self) -> str:
        num_rows = self.growing.num_rows
        written = sum(rank.status.written for rank in self.growing.ranks)
        if self.state != "reading" or not num_rows:
            return ""
        if num_rows < written:
            return f"{num_rows:,} of {written:,} rows are found"
        num_drawn = self.axes.num_rows if self.growing.num_pending else num_rows  # some rows are superseded
        return f"{num_drawn:,} of {num_rows:,} rows are drawn"

    def _keep_slow_if_due(self) -> None:
        is_due = self.state == "over" or time.monotonic() - self._slow_at_s >= _SLOW_S
        if not is_due or self.collected is None or self.version == self._slow_version:
            return
        self._slow_at_s = time.monotonic()
        for block in self.collected.further_blocks():
            self._keep(block)
        run = self._run((0, 0))
        self._keep(ranks_block(run, self.axes, self.collected, self.growing.ranks, self._layouts))
        images = [*self._first_images, *self._last_images]
        images.sort(key=lambda image: [image[0][name] for name in ("kind", "module", "step")])
        self._keep(images_block(images))
        self._keep(gaps_block(self._checked or (), self._modules))
        self._slow_version = self.version

    def blocks(self) -> dict[str, str]:
        """Return all blocks of the page by name, as base64."""
        packed = {name: _packed(data) for name, (_, data) in self._kept.items()}
        if self.collected is not None:
            packed |= packed_blocks(self.collected.step_blocks(self._modules))
        return packed

    def blocks_since(self, version: int) -> dict[str, str]:
        """Return the blocks that changed after a version of the same epoch."""
        packed = {name: _packed(data) for name, (changed, data) in self._kept.items() if changed > version}
        if self.collected is not None:
            cube, scalar_cube = self.collected.growing_cubes[:2]
            grown = [*cube.grown("values", version), *scalar_cube.grown("scalars", version)]
            if grown:
                known = {**self.collected.steps_known(), "global_steps": self.collected.global_steps}
                grown.append(PageBlock(name="steps", data=known))
            packed |= packed_blocks(grown)
        return packed


def packed_blocks(blocks: Iterable[PageBlock]) -> dict[str, str]:
    """Return blocks by name, as base64, as `Drawing.blocks` does."""
    return {block.name: _packed(block.encoded()) for block in blocks}


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _told(ranks: Sequence[RankNow]) -> Iterator[Check]:
    for rank in ranks[:_MAX_TOLD]:
        dropped = ", ".join(f"{count} dropped: {reason}" for reason, count in rank.status.dropped.items())
        is_bad = rank.state in _BAD_STATES or rank.status.num_dropped
        step = f", step {rank.status.step}" if rank.status.has_step and is_bad else ""
        text = f"rank {rank.rank}: {rank.state}{step}" + (f"; {dropped}" if dropped else "")
        yield Check("missing" if is_bad else "ok", text)
