"""Shows whether a resumed program is the one that was interrupted: `prove_resume` kills it, resumes it and compares.

The launch that is killed runs some steps past its last checkpoint. So it also shows how the program goes on without an
interruption. `judge_resume` compares the two launches, without any process or file. torch is never imported here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...run.status import CHANGED, UNCHANGED, UNKNOWN, Proof
from ...system.text import counted, listed, named
from .launches import MAX_LISTED, Launches, Observed, Proven, count_kinds, on_ranks, values_named

_STATE = ("param", "buffer", "optim", "setting", "schedule", "scaler", "other", "variable", "rng")
"""The kinds of state, causes before effects."""
_ALIGNING = ("param", "optim", "schedule", "buffer", "batch")
"""The kinds of values that show at which step the resumed run goes on."""
_WORKERS = "other DataLoader.num_workers"
"""The key by which the probe says that worker processes load the data; their random states are not seen."""
_Digests = Mapping[str, str]


class Pair(NamedTuple):
    """One step of one rank in both launches."""

    step: int
    rank: int
    then: _Digests
    """The digests in the launch that was killed."""
    now: _Digests
    """The digests in the launch that was resumed."""


class _Finding(NamedTuple):
    step: int
    text: str


def judge_resume(killed: Observed, resumed: Observed, *, num_steps: int) -> Proof:
    """Return whether the resumed launch goes on as the killed launch did.

    Steps are those of the killed launch, which was killed at the end of its step ``num_steps - 1``.
    """
    notes: list[str] = []
    steps: list[list[Pair]] = []
    compared: Counter[str] = Counter()

    def tell(verdict: str, text: str, first_step: int | None = None) -> Proof:
        return Proof(
            subject="resume", verdict=verdict, text=f"{verdict}{text}", steps=len(steps), ranks=len(killed.ranks),
            first_step=first_step, notes=tuple(notes), compared=dict(compared),
        )  # fmt: skip

    if problem := _incomparable(killed, resumed, num_steps):
        return tell(UNKNOWN, f": {problem}")
    start = start_of(killed, resumed)
    if start is None:
        text = f"no checkpoint was saved before step {num_steps - 1} began, or none was loaded"
        return tell(CHANGED, f": the resumed run starts anew: {text}")
    notes.append(f"the resumed run goes on with step {start}, from a checkpoint of {counted(start, 'step')}")
    if resumed.exit_code:
        notes.append(f"the resumed launch ended with exit code {resumed.exit_code}")
    steps = [
        [
            Pair(start + i, rank, seen.looks[start + i].digests, resumed.ranks[rank].looks[i].digests)
            for rank, seen in killed.ranks.items()
        ]
        for i in range(min(resumed.num_steps, killed.num_steps - start))
    ]
    compared += count_kinds(key for step in steps for pair in step for key in pair.then)
    course = BothLaunches(killed, steps)
    findings = list(course.state_findings(0))
    findings += [one for one in course.batch_findings() if not findings or one.step == start]  # later ones may follow
    notes += course.notes
    for i in range(len(steps)):
        if findings:
            break
        findings = list(course.state_findings(i))
        if not findings and (text := course.gradients(i)):
            why = "the program does not repeat itself, as prove without --resume shows, or has state that is not seen"
            text = f" from step {start + i} on: {text}, although the state and the batches are equal: {why}"
            return tell(UNKNOWN, text, start + i)
    if findings:
        first = min(finding.step for finding in findings)
        text = "; ".join(finding.text for finding in findings)
        return tell(CHANGED, f" from step {first} on: {text}", first)
    text = f"{counted(len(steps), 'step')} of {counted(len(killed.ranks), 'rank')}, {compared.total():,} values"
    return tell(UNCHANGED, f": the resumed run goes on as the interrupted one did: {text}, bit by bit")


def _incomparable(killed: Observed, resumed: Observed, num_steps: int) -> str:
    if not killed.ranks:
        return f"no step of an optimizer was seen before the program ended with exit code {killed.exit_code}"
    if killed.num_steps < num_steps:
        ended = f"the program ended by itself after {counted(killed.num_steps, 'step')} of {num_steps}"
        return f"{ended}, and was not interrupted; ask for fewer with --steps, remove old checkpoints"
    if not resumed.num_steps:
        return f"the resumed launch took no step, and ended with exit code {resumed.exit_code}"
    if killed.ranks.keys() != resumed.ranks.keys():
        ranks = f"{named('rank', sorted(killed.ranks))} trained, then {named('rank', sorted(resumed.ranks))}"
        return f"{ranks}; resume it on as many ranks"
    return ""


def start_of(killed: Observed, resumed: Observed) -> int | None:
    """Return the step of the killed launch with which the resumed launch goes on; None if it starts anew."""
    votes = votes_of(killed, resumed)
    if all(kinds == ["batch"] for kinds in votes.values()):  # no sign of a restored state
        return None
    return max(votes, key=lambda step: (len(votes[step]), "param" in votes[step], step))


def votes_of(killed: Observed, resumed: Observed) -> dict[int, list[str]]:
    """Return at which steps of the killed launch most values of a kind were what the resumed launch begins with.

    A kind that was most equal at step 0 has no vote: it was not restored, or never changes.
    """
    votes: dict[int, list[str]] = {}
    for kind in _ALIGNING:
        num_equal = [0] * killed.num_steps
        for rank, seen in resumed.ranks.items():
            first = of_kind(seen.looks[0].digests, kind)
            for step, look in enumerate(killed.ranks[rank].looks[: killed.num_steps]):
                num_equal[step] += sum(look.digests.get(key) == digest for key, digest in first.items())
        most = max(num_equal)
        if num_equal[0] < most:
            for step in range(killed.num_steps):
                if num_equal[step] == most:
                    votes.setdefault(step, []).append(kind)
    return votes


class BothLaunches:
    """The steps that both launches have made."""

    def __init__(self, killed: Observed, steps: Sequence[Sequence[Pair]]) -> None:
        self._killed = killed
        self._steps = steps
        self.notes: list[str] = []
        """Notes on random states that differ, and that no step draws from."""

    def state_findings(self, i: int) -> Iterator[_Finding]:
        """Yield a finding for each way in which a kind of state differs at the beginning of a step."""
        num_findings = 0
        for kind in _STATE:
            groups: dict[tuple[str, bool], list[tuple[str, int]]] = {}
            """Keys and ranks, by the words that say how the values differ, and by whether no step changes them."""
            for pair in self._steps[i]:
                for key, then in of_kind(pair.then, kind).items():
                    now = pair.now.get(key, "")
                    if now != then and (now or kind != "variable"):  # a later line may make the variable
                        is_idle = (kind == "rng" or not now) and self._is_idle(key, pair.rank)
                        groups.setdefault((self._how(key, pair.rank, then, now), is_idle), []).append((key, pair.rank))
            for (how, is_idle), places in groups.items():
                text = self._sentence(i, kind, how, places)
                if is_idle:
                    self._note(f"{text}, and no step {'draws from' if kind == 'rng' else 'changes'} it")
                    continue
                num_findings += 1
                if kind == "rng" and num_findings == 1 and not any(map(_has_other_batches, self._steps[i])):
                    drops = {"rng cpu", "rng cuda"} & {key for key, _ in places}
                    what = "dropout, a new iterator of a DataLoader, whatever else" if drops else "whatever"
                    text = f"{text}, nothing else: {what} draws from it"
                yield _Finding(self._steps[i][0].step, text)

    def _is_idle(self, key: str, rank: int) -> bool:
        """Return whether no step of the killed launch has moved a value."""
        return len({look.digests.get(key) for look in self._killed.ranks[rank].looks}) == 1

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _how(self, key: str, rank: int, then: str, now: str) -> str:
        """Return in words how a value differs from what it was."""
        if not now:
            return "is missing"
        if key.startswith("rng "):
            return "differs"
        (type_then, *word_then), (type_now, *word_now) = then.split(" ")[:2], now.split(" ")[:2]
        if type_then == type_now == "=":
            return f"is {word_now[0]} and not {word_then[0]}"
        if type_then != type_now:
            return f"is {type_now} and not {type_then}"
        if word_now == ["zero"] != word_then:
            return "is zero"
        looks = self._killed.ranks[rank].looks
        if steps := [look.step for look in looks if look.digests.get(key) == now]:
            return f"is as at step {steps[-1]}"
        if word_now == ["bfloat16"] != word_then:
            return "is rounded to bfloat16"
        return "has other values"

    def _sentence(self, i: int, kind: str, how: str, places: Sequence[tuple[str, int]]) -> str:
        keys = dict.fromkeys(key for key, _ in places)
        ranks = {rank for _, rank in places}
        on = on_ranks(ranks if len(ranks) < len(self._steps[i]) else ())
        if kind == "optim":
            owners = {key.rpartition(".")[0] for key in keys}
            members = dict.fromkeys(key.rpartition(".")[2] for key in keys)
            what = f"optimizer state of {counted(len(owners), 'parameter')}"
            return f"{what} {how}{on}: {listed(members, MAX_LISTED)}"
        if len(keys) > 1 and kind not in ("other", "rng"):
            how = how.replace("is ", "are ", 1).replace("has ", "have ", 1)
        return f"{values_named(keys)} {how}{on}"

    def batch_findings(self) -> Iterator[_Finding]:
        """Yield a finding for each way in which ranks read other batches, at the first step at which they do."""
        ranks_of: dict[_Finding, list[int]] = {}
        for rank, seen in self._killed.ranks.items():
            read_at: dict[str, tuple[int, int]] = {}
            for look in seen.looks:
                for number, digest in enumerate(of_kind(look.digests, "batch").values()):
                    read_at.setdefault(digest, (look.step, number))
            pairs = [pair for step in self._steps for pair in step if pair.rank == rank]
            if (other := next(filter(_has_other_batches, pairs), None)) is not None:
                ranks_of.setdefault(_Finding(other.step, _reading(other, read_at)), []).append(rank)
        for finding, ranks in ranks_of.items():
            text = f"the resumed run {finding.text} ({named('rank', ranks)}, step {finding.step})"
            yield _Finding(finding.step, text)

    def gradients(self, i: int) -> str:
        """Return which gradients of a step differ, on which ranks; empty if none do."""
        places = [
            (key, pair.rank)
            for pair in self._steps[i]
            for key, digest in of_kind(pair.then, "grad").items()
            if pair.now.get(key) != digest
        ]
        keys = dict.fromkeys(key for key, _ in places)
        on = on_ranks({rank for _, rank in places})
        return f"{values_named(keys)} {'differs' if len(keys) == 1 else 'differ'}{on}" if places else ""


def _reading(pair: Pair, read_at: Mapping[str, tuple[int, int]]) -> str:
    """Return in words which batches a resumed step reads in place of its own.

    `read_at` gives for each batch the step that read it in the killed launch, and the batch's number in the step.
    """
    then, now = (list(of_kind(digests, "batch").values()) for digests in (pair.then, pair.now))
    if now and len(now) < len(then) and then[-len(now) :] == now:
        return f"makes the step from {len(now)} of its {len(then)} batches: the gradients accumulated before are lost"
    wrong = next((number for number, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), None)
    if wrong is None:
        return f"makes the step from {counted(len(now), 'batch')} and not from {len(then)}"
    if (at := read_at.get(now[wrong])) is None:
        cause = ": the random states of its DataLoader's workers began anew" if _WORKERS in pair.now else ""
        return f"reads a batch that the interrupted run did not read in its steps{cause}"
    step, number = at
    if at == (0, 0):
        return "reads the batch of step 0 again: the sampler started anew"
    if (step, number) < (pair.step, wrong):
        return f"reads the batch of step {step} again"
    return f"leaves out batches: it reads that of step {step} already"


def of_kind(digests: _Digests, kind: str) -> dict[str, str]:
    """Return the digests of one kind, in their order."""
    return {key: digest for key, digest in digests.items() if key.startswith(f"{kind} ")}


def _has_other_batches(pair: Pair) -> bool:
    return of_kind(pair.then, "batch") != of_kind(pair.now, "batch")


def prove_resume(launches: Launches, command: Sequence[str], resumed_command: Sequence[str]) -> Proven:
    """Run a program until it has made some steps, kill it, resume it, and judge whether it goes on as it did."""
    killed, resumed = launches.launch_to_resume(command, "resumed", resumed_command)
    return launches.proven(judge_resume(killed, resumed, num_steps=launches.num_steps), killed, resumed)
