"""Rules that compare ranks with each other, and a run with sound runs or with runs at other widths.

With mu-parametrisation, the outputs of a wide and of a narrow model are equally large at the beginning and after a few
steps. As a result one learning rate is best for all widths. The rule `width` checks that the outputs are equally large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

import numpy as np

from ...system.text import number
from ..given import are_first_arguments, holds_labels, is_of_batch, number_the_samples
from ..normal import HELD, STATISTICS, Measures, Numbers, Sizes, phase_of, steps_of
from ..rows import Flags, Floats, Integers, Memory, Rows, SeriesKey, Spells, Streaks, began, grouped, previous
from ..rule import CALIBRATED, CheckRule, Finding, PartsRule, Setting, Severity, StreakRule, WaitingFindings

_SAME_RATE, _RATES = 1e-6, 3
"""The relative distance up to which learning rates are equal, and the steps in a row for which they must differ."""
_SOON = 50
"""An output differs at most this many steps after the input from which it follows, as noise may hide it at first."""
_GRID = 10
"""Inputs may be recorded at one of so many steps, and so be seen later than the outputs that follow from them."""
_INPUT_RATIO = 1.2
"""The ratio of sizes from which on inputs count as unlike each other. Outputs may be further apart than they are."""
_ALWAYS = 32
"""Batches of equal ranks are not so many times in a row larger, or smaller, by this ratio on one of them."""
_OF_INPUT = "compare how these ranks load and scale their data"
NEVER_HERE = "it exists in the sound runs, and never in this run"
OTHER_RATE = "the learning rate is "
_LEAST_DEVIATION = 0.01
"""The least standard deviation assumed for the logarithms of peers. Peers agree to better than 1 % only by chance."""


class ComparedRule(CheckRule):
    """The base of rules that report what the caller found by comparing values of a whole run with each other."""

    columns = ()

    def add(self, rows: Rows) -> Iterable[Finding]:
        """Report nothing. `finish` reports the caller's comparison."""
        return ()

    def finish(self) -> Iterable[Finding]:
        if self.compared is None:
            self.why_not_judged = f"{self.needs}, and only the rows of a whole run were compared"
            return ()
        self.why_not_judged = self.compared.why_not_compared
        return self.compared.findings


class Restart(ComparedRule):
    name = "restart"
    sentence = "A restart did not restore parameters, the state of the optimizer or the learning rate."
    sites = ("param", "scalar")
    needs = (
        "it needs another attempt of the run, or a run in this folder that it continues; see recorder prove --resume"
    )
    advice = "load what the checkpoint has before the first step"


class Replica(ComparedRule):
    name = "replica"
    sentence = "A parameter, gradient, optimizer state or replicated activation differs between ranks that share it."
    severity = Severity.ERROR
    sites = ("param", "grad", "optim", "buffer")
    needs = "it needs parameters, gradients or optimizer states of several ranks"
    advice = "find what one rank did without the others; `recorder first` shows what each rank holds"
    advice_unreduced = (
        "nothing reduces the gradients over these ranks: call the wrapper, `ddp(x)` and not `ddp.module(x)`, and run "
        "the last forward and backward before each update outside of `no_sync()`"
    )
    advice_unsharded = (
        "nothing reduces this gradient: `fully_shard` of the whole model does, unless it ignores the parameter"
    )
    advice_unwrapped = (
        "if the ranks are to train one model, wrap it in DDP or FSDP, or give all ranks equal parameters and average "
        "the gradients"
    )


class OutlierRank(StreakRule):
    name = "outlier_rank"
    sentence = "One rank's batch, activations, local gradients, loss or learning rate are unlike those of its peers."
    sites, columns = ("input", "output", "grad_output", "grad", "scalar"), ("sum_sq", "numel")
    more_columns = ("min", "max", "sum")
    reads_probe = True
    settings = (
        Setting("z", 8, "robust standard deviations", CALIBRATED),
        Setting("ratio", 1.5, "times the median", CALIBRATED),
        Setting("ranks", 4, "ranks", "of fewer, the measure is how far apart they usually move"),
        Setting("records", 8, "records", CALIBRATED),
    )
    what = "the rank is unlike its data-parallel peers"
    measure, limit = "robust z", "z"
    advice = "compare this rank's data, weights and hardware with those of another"

    def set_up(self) -> None:
        self._most_ranks = self._most_changes = 0
        self._distance, self._total, self._num = Memory(), Memory(0.0), Memory(0.0)
        """By value and rank, for few ranks: the last distance from the peers, the sum and number of its changes."""
        self._far, self._larger, self._smaller = Streaks(), Streaks(), Streaks()
        self._judged: tuple[Rows, Floats, Floats, Floats, Integers] | None = None
        """The rows that were judged last, by lane and step. For each row: since which step it is far from its peers,
        its size and theirs, and of two ranks the other one."""
        self._rates = Streaks()
        self._no_classes = Memory(0.0)
        """By series, 1 for labels that number the samples, as those of a contrastive loss over the ranks do, and for
        labels of which the loss ignores some: -100 for a prompt, for example."""
        self._odd_inputs: list[Finding] = []
        self._effects: list[Finding] = []
        """The findings on other values, of which an input may be the cause."""

    def wants(self, key: SeriesKey) -> bool:
        is_input = is_of_batch(key) and key.root in self.catalog.parallel_roots
        return is_input or key.differs_by_batch or (key.root, key.name) in self.catalog.shared_rates

    def add(self, rows: Rows) -> Iterator[Finding]:
        is_rate = rows.where("rate", attrgetter("is_rate"))
        yield from self._judge_rates(rows.take(is_rate).by_lane())
        is_label = rows.where("labels of a batch", lambda key: is_of_batch(key) and holds_labels(key))
        are_others = number_the_samples(rows) | ((rows["min"] < 0) & ~rows.are_float())
        self._no_classes[rows.series[is_label & are_others]] = 1.0
        is_label &= self._no_classes[rows.series] == 0
        is_judged = ~is_rate & (rows.ranks >= 0) & (~rows.at("input") | are_first_arguments(rows) | is_label)
        if is_judged.any():
            for one in super().add(_of_steps(rows.take(is_judged))):
                if one.site == "input":
                    self._odd_inputs.append(one)
                else:
                    self._effects.append(one)
                    yield one

    def _judge_rates(self, rows: Rows) -> Iterator[Finding]:
        """Report learning rates that differ between data-parallel ranks, once for each group of an optimizer."""
        ids, rates = grouped(rows.series, self.catalog.peers_of[rows.lanes], rows.steps)[0], rows["mean"]
        usual = medians(ids, rates)[ids] if len(rows) else rates
        is_odd = np.abs(rates - usual) > _SAME_RATE * np.abs(usual)
        for index, _, since in self._rates.reached(rows.lanes, rows.steps, is_odd, _RATES):
            what = f"{OTHER_RATE}{number(rates[index])}, and that of its data-parallel peers is {number(usual[index])}"
            ranks = sorted(rows.ranks[ids == ids[index]].tolist())
            if len(ranks) == 2:  # either may be wrong
                own, other = (number(rates[(ids == ids[index]) & (rows.ranks == rank)][0]) for rank in ranks)
                what = f"{OTHER_RATE}{own} on rank {ranks[0]} and {other} on rank {ranks[1]}, which are data-parallel"
            one = self.finding(int(rows.lanes[index]), int(rows.steps[index]), what, "", np.nan, np.nan, since=since)
            one = one._replace(advice="set one learning rate on all ranks, and step one scheduler on each")
            yield one._replace(ranks=tuple(ranks)) if len(ranks) == 2 else one

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by the distance from the median of the peers, in units of the peers' usual distance.

        With fewer ranks than `ranks`, the unit is the usual change of the distance from one record to the next. Two
        ranks are judged by the distance from each other, and both are named. An input that is larger in each record, or
        smaller, is unlike those of the peers however much it varies.
        """
        peers = self.catalog.peers_of[rows.lanes]
        ids, firsts = grouped(rows.series, peers, rows.steps)
        num_ranks = num_distinct(ids, rows.ranks, len(firsts))
        self._most_ranks = max(self._most_ranks, int(num_ranks.max(initial=0)))
        z, is_far, is_larger = np.zeros(len(rows)), np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
        of_peers, others = np.full(len(rows), np.nan), np.full(len(rows), -1)
        sizes = rows.rms
        (known,) = np.nonzero((num_ranks > 1)[ids] & (np.nan_to_num(sizes) > 0))
        if len(known):
            logs, groups, num = np.log(sizes[known]), grouped(ids[known])[0], num_ranks[ids[known]]
            means = np.bincount(groups, logs) / np.bincount(groups)
            distance = np.where(num == 2, 2 * (logs - means[groups]), logs - medians(groups, logs)[groups])
            usual = 1.4826 * medians(groups, np.abs(distance))[groups]
            few = np.flatnonzero(num < self.thresholds["ranks"])
            usual[few] = self._usual_change(rows.lanes[known[few]], distance[few])
            z[known] = np.abs(distance) / np.maximum(usual, _LEAST_DEVIATION)
            is_input = rows.at("input")[known]
            is_far[known] = np.abs(distance) > np.log(np.where(is_input, _INPUT_RATIO, self.thresholds["ratio"]))
            is_larger[known] = distance > 0
            of_peers[known] = np.exp(logs - distance)
            others[known] = np.where(num == 2, np.bincount(groups, rows.ranks[known])[groups] - rows.ranks[known], -1)
        self._judged = rows, self._far.lengths(rows.lanes, rows.steps, is_far)[1], sizes, of_peers, others
        sides = (self._larger, is_far & is_larger), (self._smaller, is_far & ~is_larger)
        longest = np.maximum(*(streaks.lengths(rows.lanes, rows.steps, flags)[0] for streaks, flags in sides))
        return is_far & ((z > self.thresholds["z"]) | (rows.at("input") & (longest >= _ALWAYS))), z

    def _usual_change(self, lanes: Integers, distance: Floats) -> Floats:
        """Return the mean change of the distance from record to record so far; infinite after too few changes."""
        changes = np.abs(distance - previous(lanes, distance, self._distance))
        num = self._num.sums(lanes, np.isfinite(changes).astype(np.float64))
        self._most_changes = max(self._most_changes, int(num.max(initial=0)))
        total = self._total.sums(lanes, np.nan_to_num(changes))
        return np.where(num >= self.records, total / np.maximum(num, 1), np.inf)

    def what_of(self, lane: int) -> str:
        key, both = self.catalog.key_of(lane), "the two data-parallel ranks are unlike each other"
        if key.site != "input":
            return both if self._most_ranks == 2 else self.what
        given = "labels" if holds_labels(key) else "inputs"
        if self._most_ranks == 2:
            return f"the {given} of {both}"
        return f"the {given} of the rank are unlike those of its data-parallel peers"

    def finding(
        self, lane: int, step: int, what: str, measure: str, value: float, threshold: float,
        severity: Severity | None = None, since: int | None = None,
    ) -> Finding:  # fmt: skip
        """Return a finding that says the sizes on the ranks. It begins where the sizes were first far from each other.

        With few ranks, the rule is certain only once it knows how far they usually move.
        """
        one = super().finding(lane, step, what, measure, value, threshold, severity, since)
        if self._judged is None or not measure:  # a learning rate
            return one
        rows, far_since, sizes, of_peers, others = self._judged
        first, end = np.searchsorted(rows.lanes, [lane, lane + 1])
        index = int(first + np.searchsorted(rows.steps[first:end], step))
        (rank,), other = one.ranks, int(others[index])
        size = "root mean square " * (one.site != "scalar")
        told = f"{size}{number(sizes[index])} on rank {rank}, and {number(of_peers[index])} in the middle of its peers"
        if other >= 0:
            both = sorted([(rank, sizes[index]), (other, of_peers[index])])
            told = f"{size}{', '.join(f'{number(size)} on rank {its_rank}' for its_rank, size in both)}"
        return one._replace(since=int(far_since[index]) if self.records > 1 else since, detail=told)

    def finish(self) -> Iterator[Finding]:
        super().finish()
        for one in self._odd_inputs:  # a norm may take such a difference away
            has_effect = any(is_effect_of_input(one, other) for other in self._effects)
            yield one._replace(severity=self.severity if has_effect else Severity.NOTE, advice=_OF_INPUT)
        if self._most_ranks < self.thresholds["ranks"] and self._most_changes < self.records:
            needed = f"it needs {self.thresholds['ranks']:.0f} data-parallel ranks, or more records, and there are"
            is_alone = self._most_ranks < 2
            self.why_not_judged = "it needs data-parallel ranks" if is_alone else f"{needed} {self._most_ranks}"


def is_effect_of_input(cause: Finding, one: Finding) -> bool:
    """Return whether ranks are unlike each other by a value that follows from an input by which they already are."""
    is_near = one.root == cause.root and -_GRID <= one.first_step - cause.first_step <= _SOON
    return cause.site == "input" and one.site != "input" and is_near and bool({*cause.ranks} & {*one.ranks})


def _of_steps(rows: Rows) -> Rows:
    """Return one row for each value, rank and step, of all calls of the step together, as the probe has it."""
    ids, firsts = grouped(rows.lanes, rows.steps)
    columns = {name: np.nan_to_num(rows[name]) for name in ("numel", "nan_count", "inf_count")}
    sums = {
        name: np.bincount(ids, one).astype(np.float64) for name, one in {**columns, "sum_sq": rows["sum_sq"]}.items()
    }
    return Rows(rows.catalog, rows.steps[firsts], rows.lanes[firsts], sums)


def num_distinct(ids: Integers, ranks: Integers, num_groups: int) -> Integers:
    """Return the number of different ranks in each group."""
    _, firsts = grouped(ids, ranks)
    return np.bincount(ids[firsts], minlength=num_groups)


def medians(groups: Integers, values: Floats) -> Floats:
    """Return the median of each group. For an even number of values, it is the lower of the two in the middle."""
    order = np.lexsort((values, groups))
    counts = np.bincount(groups)
    starts = np.cumsum(counts) - counts
    return np.asarray(values[order][starts + (counts - 1) // 2])


RUNNING_VARIANCE = "running_var"
"""The end of the name of a batch norm's buffer that has the variances of the channels."""


class _Variance(CheckRule):
    name = "running_statistics"
    sentence = "The running variance of a batch norm never changes, leaps, or differs between ranks."
    sites, columns = ("buffer",), ("mean",)
    settings = (
        Setting("drift", 0.5, "of the value before", CALIBRATED),
        Setting("ratio", 2, "times the median of ranks", CALIBRATED),
        Setting("after", 20, "records; steps for ranks", "momentum 0.1 forgets the beginning by then"),
        Setting("records", 3, "records", CALIBRATED),
        Setting("momentum", 0.5, "of the value before", "one batch then counts more than all before it"),
    )
    advice = "evaluation will not be like training: look at the inputs of this norm, and at its momentum"

    def set_up(self) -> None:
        super().set_up()
        self._num, self._value = Memory(0.0), Memory()

    def wants(self, key: SeriesKey) -> bool:
        return key.site == "buffer" and key.name.endswith(RUNNING_VARIANCE)

    def is_late(self, rows: Rows) -> Flags:
        return np.asarray(self._num.sums(rows.lanes, np.ones(len(rows))) > self.thresholds["after"])


class _Leaping(_Variance, StreakRule):
    what = "the running variance leaps from record to record"
    measure, limit = "change from the record before", "drift"

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        values = rows["mean"]
        before = previous(rows.lanes, values, self._value)
        with np.errstate(all="ignore"):
            change = np.nan_to_num(np.abs(values - before) / np.minimum(np.abs(values), np.abs(before)))
        return (change > self.thresholds["drift"]) & self.is_late(rows), change


class _Apart(_Variance, StreakRule):
    what = "the running variance is not that of the other ranks"
    measure, limit = "times above or below the median of ranks", "ratio"

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        first_steps = began(rows.lanes, rows.steps.astype(np.float64), self._value)
        is_late, ratio = rows.steps - first_steps >= self.thresholds["after"], np.ones(len(rows))
        (known,) = np.nonzero(rows["mean"] > 0)
        if len(known):
            ids, firsts = grouped(rows.series[known], self.catalog.peers_of[rows.lanes[known]], rows.steps[known])
            logs = np.log(rows["mean"][known])
            is_compared = num_distinct(ids, rows.ranks[known], len(firsts))[ids] > 1
            ratio[known] = np.where(is_compared, np.exp(np.abs(logs - medians(ids, logs)[ids])), 1.0)
        return (ratio > self.thresholds["ratio"]) & is_late, ratio


class _Still(_Variance, StreakRule):
    what = "the running variance still has its first value, although the norm counts batches: is its momentum 0?"
    measure, limit = "records without a change", "records"

    def set_up(self) -> None:
        super().set_up()
        self._first, self._batches, self._still = Memory(), Memory(), Streaks()

    def wants(self, key: SeriesKey) -> bool:
        return super().wants(key) or (key.site == "buffer" and key.name.endswith("num_batches_tracked"))

    def batches(self, rows: Rows) -> tuple[Flags, Floats, Floats]:
        """Return which rows are variances, and by row the batches counted so far, and since the previous record."""
        norms: dict[tuple[str, str], int] = {}
        series, own = np.unique(rows.series, return_inverse=True)
        keys = [self.catalog.series[number] for number in series]
        is_variance = np.array([super(_Still, self).wants(key) for key in keys])[own]
        numbers = np.array([norms.setdefault(key[:2], len(norms)) for key in keys])[own]
        ids, firsts = grouped(numbers, rows.ranks, rows.steps)
        counts = np.full(len(firsts), np.nan)
        counts[ids[~is_variance]] = rows["mean"][~is_variance]
        return is_variance, counts[ids], counts[ids] - previous(rows.lanes, counts[ids], self._batches)

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by how many records in a row the norm's counter has grown while its variance kept its first value."""
        values, (is_variance, _, num_new) = rows["mean"], self.batches(rows)
        is_still = is_variance & (num_new > 0) & (values > 0) & (values == began(rows.lanes, values, self._first))
        return is_still, self._still.lengths(rows.lanes, rows.steps, is_still)[0].astype(np.float64)


class _Forgetful(_Still):
    what = "a batch takes away most of the running variance, so that it is that of the last batch: is its momentum 1?"
    measure, limit, records = "momentum, at least", "momentum", 1

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by how far the variance falls: a batch keeps at least the fraction 1 - momentum of the previous value.

        A norm that averages over all batches has a momentum of 1/3 at the third batch.
        """
        values, (is_variance, num, num_new) = rows["mean"], self.batches(rows)
        with np.errstate(all="ignore"):
            left = np.minimum(values / previous(rows.lanes, values, self._value), 1) ** (1 / num_new)
        is_judged = is_variance & (num_new > 0) & (num - num_new >= 2)
        return is_judged & (1 - left > self.thresholds["momentum"]), 1 - left


class RunningStatistics(PartsRule, _Variance):
    """The running statistics of a batch norm, if they would make evaluation differ from training."""

    parts = (_Leaping, _Apart, _Still, _Forgetful)


_NEEDED = "needs --baseline SOUND_RUN: a run of the same training that went well"
_SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.WARNING, Severity.WARNING)
"""The severity of each condition of `HELD`. Replicas that differ are an error."""
_LEAST_STEPS = 3
_LEAST_SPAN = 2.0
"""The least ratio between the widths of the widest and the narrowest run."""


class BaselineRule(CheckRule):
    """The base of rules that compare a run with the normal values of sound runs."""

    def set_up(self) -> None:
        self.measures = Measures(self.catalog)
        self._series: Integers = np.zeros(0, np.int64)
        self._is_known = False

    def numbers(self, rows: Rows) -> Integers:
        """Return, for each row, the index of its series in `Normal`."""
        assert self.normal is not None
        new = self.catalog.series[len(self._series) :]
        if new:
            self._series = np.append(self._series, self.normal.numbers(new))
        numbers = self._series[rows.series]
        self._is_known |= bool((numbers >= 0).any())
        return numbers

    def finish(self) -> Iterable[Finding]:
        if self.normal is None:
            self.why_not_judged = _NEEDED
        elif not self._is_known:
            self.why_not_judged = "no value of this run is in the sound runs: not the same model, or not the same sites"
        return ()


class Unusual(BaselineRule):
    """A statistic that is far from its normal range at this phase of training.

    All sound trainings pass through the same phases, but one may lag behind another. So a finding must last for a share
    of the training so far, and a finding on a statistic that came back to normal is only a note.
    """

    name = "unusual"
    sentence = "A statistic is far outside its range at these steps of the sound runs."
    sites, columns = ("output", "grad_output", "param", "grad", "buffer", "scalar", "tap"), ("sum_sq", "numel")
    settings = (
        Setting("spreads", 4, "spreads outside the range", CALIBRATED),
        Setting("records", 3, "records", CALIBRATED),
        Setting("lasting", 0.1, "of the steps so far", CALIBRATED),
    )  # fmt: skip
    advice = "compare this value with that of the sound run"

    def set_up(self) -> None:
        super().set_up()
        self._spells = [Spells() for _ in STATISTICS]
        self._waiting = WaitingFindings(lambda _: ", and returned to normal", self._spells)
        self._first_step: int | None = None

    def add(self, rows: Rows) -> Iterator[Finding]:
        if self.normal is None:
            return
        if self._first_step is None:
            self._first_step = int(rows.steps[0])
        rows = rows.by_lane()
        series = self.numbers(rows)
        for numbers in self.measures.numbers(rows):
            order = np.argsort(rows.lanes[numbers.rows], kind="stable")
            own = Numbers(numbers.statistic, numbers.rows[order], numbers.values[order])
            if len(own.rows):
                for lane, one in self._judge(rows, series, own):
                    yield from self._waiting.keep(lane, one, own.statistic)

    def finish(self) -> Iterator[Finding]:
        super().finish()
        yield from self._waiting.finish()

    def _judge(self, rows: Rows, series: Integers, own: Numbers) -> Iterator[tuple[int, Finding]]:
        assert self.normal is not None
        statistic = STATISTICS[own.statistic]
        lanes, steps = rows.lanes[own.rows], rows.steps[own.rows]
        ranges = self.normal.ranges(series[own.rows], own, steps, rows["numel"][own.rows])
        above, below = (own.values - ranges.high) / ranges.spread, (ranges.low - own.values) / ranges.spread
        far = above if statistic.only_above else np.fmax(above, below)
        with np.errstate(invalid="ignore"):
            flags = far > self.thresholds["spreads"]
        lasting = np.asarray(self.thresholds["lasting"] * (steps - (self._first_step or 0)), np.float64)
        begun = self._spells[own.statistic].begun(lanes, steps, flags, self.thresholds["records"], lasting)
        for index, since in begun:
            side, lane, step = "above" if above[index] > 0 else "below", int(lanes[index]), int(steps[index])
            one = self.finding(
                lane, step, f"{statistic.name} is {side} its range in the sound runs",
                "spreads", far[index], self.thresholds["spreads"], since=since,
            )  # fmt: skip
            low, high = steps_of(int(phase_of(np.array([step]))[0]))
            value, least, most = (
                f"{10 ** float(number) if statistic.is_log else float(number):.4g}"
                for number in (own.values[index], ranges.low[index], ranges.high[index])
            )
            yield lane, one._replace(detail=f"{value} here, {least} to {most} there at steps {low} to {high}")


class Invariant(BaselineRule):
    name = "invariant"
    sentence = "A condition of all sound runs is violated: equal replicas, batches of their own, values that change."
    sites, columns = ("input", "param", "buffer", "optim", "grad", "grad_output"), ("sum", "sum_sq", "min", "max")
    settings = (Setting("records", 3, "records", "calibrated on sound trainings; TrainCheck"),)
    advice = "it held in every record of the sound runs"

    def set_up(self) -> None:
        super().set_up()
        self._streaks = [Streaks() for _ in HELD]
        self._steps: set[int] = set()

    def add(self, rows: Rows) -> Iterator[Finding]:
        if self.normal is None:
            return
        if len(self._steps) < _LEAST_STEPS:
            self._steps |= set(np.unique(rows.steps).tolist())
        rows = rows.by_lane()
        series = self.numbers(rows)
        for what, indices, holds in self.measures.held(rows):
            lanes, steps = rows.lanes[indices], rows.steps[indices]
            is_broken = self.normal.always(series[indices], what) & ~holds
            words = HELD[what] if HELD[what].startswith(("changes", "never")) else f"is {HELD[what]}"
            for index, num, since in self._streaks[what].reached(lanes, steps, is_broken, self.thresholds["records"]):
                yield self.finding(
                    int(lanes[index]), int(steps[index]), f"in the sound runs it {words}",
                    "records in which it does not", num, self.thresholds["records"], _SEVERITIES[what], since,
                )  # fmt: skip

    def finish(self) -> Iterator[Finding]:
        """Report gradients that this run lacks, although every sound run has them and the recording asks for them."""
        super().finish()
        if self.normal is None or len(self._steps) < _LEAST_STEPS:
            return
        recorded = set(self.catalog.series)
        for key in self.normal.in_every_run():
            module = self.catalog.modules.get((key.root, key.module_path))
            is_asked = key.site in ("grad", "grad_output") and module is not None and key.site in module.sites
            if is_asked and key not in recorded:
                yield Finding(
                    self.name, Severity.WARNING, 0, *key[:4], ranks=(),
                    what=NEVER_HERE,
                    measure="records", value=0.0, threshold=1.0, advice=self.advice,
                )  # fmt: skip


class Width(CheckRule):
    name = "width"
    sentence = "After a few steps an output is larger the wider the model is."
    sites, columns = ("output", "param"), ("sum_sq", "numel")
    settings = (
        Setting("exponent", 0.3, "of the width", "mup's coordinate check asks for 0"),
        Setting("steps", 10, "steps", "mup's coordinate check looks at the first few"),
    )
    advice = "scale the learning rate and the initialisation of this layer with its width, as mu-parametrisation does"

    def set_up(self) -> None:
        self._sizes = Sizes(self.catalog, int(self.thresholds["steps"]))

    def add(self, rows: Rows) -> Iterable[Finding]:
        if self.other_widths:
            self._sizes.add(rows)
        return ()

    def finish(self) -> Iterator[Finding]:
        if not self.other_widths:
            self.why_not_judged = "needs --width RUN: runs of the same training at other widths, two at least"
            return
        runs = [self._sizes, *self.other_widths]
        widths = np.array([one.width(self._sizes) for one in runs])
        if widths.max() / widths.min() < _LEAST_SPAN:
            self.why_not_judged = (
                f"it needs runs whose widths are {_LEAST_SPAN:g} times apart, and these widths are alike"
            )
            return
        outputs = [one.outputs for one in runs]
        detail = f"widths {', '.join(f'{width:g}' for width in sorted(widths))} times this"
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
                yield one._replace(ranks=(), detail=detail)
