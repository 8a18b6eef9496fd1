"""Shows whether a resumed program continues as the interrupted one. `prove_resume` kills a program, and resumes it.

The launch that is killed runs some steps past its last checkpoint. So it also shows how the program goes on without an
interruption. `judge_resume` compares the two launches, without any process or file. torch is never imported here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile
from typing import NamedTuple

from ...run.status import CHANGED, UNCHANGED, UNKNOWN, Proof
from ...system.text import counted, listed, named
from .launches import MAX_LISTED, Launches, Look, Observed, Proven, count_kinds, on_ranks, values_named

_STATE = ("param", "buffer", "optim", "update", "setting", "schedule", "scaler", "flag", "other", "variable", "rng")
"""The kinds of state. A difference of one kind causes differences of the later kinds."""
_BESIDE = ("other", "variable", "rng")
"""The kinds of state of which a resumed process may hold more values, such as the checkpoint that it loaded."""
_ALIGNING = ("param", "optim", "schedule", "buffer", "batch")
"""The kinds of values that show with which step the resumed run continues."""
_WORKERS = "other DataLoader.num_workers"
"""The probe's key that tells that worker processes load the data. The workers' random states are not seen."""
_Digests = Mapping[str, str]


class Pair(NamedTuple):
    """The digests of one rank's values at one update, in both launches."""

    step: int
    rank: int
    then: _Digests
    """The digests in the launch that was killed."""
    now: _Digests
    """The digests in the launch that was resumed."""


OLD = "from before this run started"
_OTHER_OPTIMIZER = "optimizer of the step is "
LEFTOVER = f"the first launch already began from a checkpoint that is {OLD}; its steps are counted from there"


def judge_resume(killed: Observed, resumed: Observed, *, num_steps: int) -> Proof:
    """Judge whether the resumed launch continues as the killed launch did.

    Step numbers are those of the killed launch, which was killed at the end of its step ``num_steps - 1``.
    """
    notes: list[str] = []
    updates: list[list[Pair]] = []
    compared: Counter[str] = Counter()

    def tell(verdict: str, text: str, first_step: int | None = None) -> Proof:
        num_steps_compared = len({pair.step for update in updates for pair in update})
        return Proof(
            subject="resume", verdict=verdict, text=f"{verdict}{text}", steps=num_steps_compared,
            ranks=len(killed.ranks), first_step=first_step, notes=tuple(notes), compared=dict(compared),
        )  # fmt: skip

    if problem := _incomparable(killed, resumed, num_steps):
        return tell(UNKNOWN, f": {problem}")
    start = start_of(killed, resumed)
    if start is None:
        text = f"no checkpoint was saved before step {num_steps - 1} began"
        if is_leftover(killed) and is_leftover(resumed):
            return tell(UNKNOWN, f": {text}; both launches continued from a checkpoint that is {OLD}: remove it")
        why = "the resumed run starts anew, or both launches start from an older checkpoint"
        return tell(CHANGED, f": {why}: {text}, or none was loaded")
    notes += [LEFTOVER] if is_leftover(killed) else []
    step = killed.steps[start]
    notes.append(f"the resumed run goes on with step {step}, from a checkpoint of {counted(step, 'step')}")
    updates = [
        [
            Pair(killed.steps[start + i], rank, seen.looks[start + i].digests, resumed.ranks[rank].looks[i].digests)
            for rank, seen in killed.ranks.items()
        ]
        for i in range(min(len(resumed.steps), len(killed.steps) - start))
    ]
    compared += count_kinds(key for update in updates for pair in update for key in pair.then)
    course = BothLaunches(killed, updates, notes)
    batches = list(course.batch_findings())
    for i, update in enumerate(updates):
        step = update[0].step
        texts = [*course.state_findings(i), *(text for at, text in batches if at == step)]
        # The other differences follow from another optimizer.
        texts = [text for text in texts if text.startswith(_OTHER_OPTIMIZER)] or texts
        gradients = "" if texts else course.gradients(i)
        if gradients and not course.suspects:
            text = f" from step {step} on: {gradients}, although the state and the batches are equal: the program"
            why = "does not repeat itself, as prove without --resume shows, or has state that prove does not see"
            return tell(UNKNOWN, f"{text} {why}", step)
        if texts or gradients:
            text = "; ".join([*texts, *course.suspects, *filter(None, [gradients])])
            return tell(CHANGED, f" from step {step} on: {text}", step)
        for suspect in course.suspects:
            course.note(f"{suspect}, and no gradient differs")
    if resumed.exit_code and len(resumed.steps) < len(killed.steps) - start:
        text = f"the resumed launch ended with exit code {resumed.exit_code} after {counted(resumed.num_steps, 'step')}"
        return tell(UNKNOWN, f": {text}, which equal those of the interrupted run")
    makers = [look.digests.get("update of the step", "")[2:] for look in next(iter(killed.ranks.values())).looks]
    if rare := {*makers} - {*makers[start:]}:
        text = f"the steps that both launches made have no update by {listed(sorted(rare), MAX_LISTED)}"
        return tell(UNKNOWN, f": {text}; ask for more with --steps")
    text = f"{counted(step - killed.steps[start] + 1, 'step')} of {counted(len(killed.ranks), 'rank')}"
    text = f"{text}, {compared.total():,} values, bit by bit"
    return tell(UNCHANGED, f": the resumed run goes on as the interrupted one did: {text}")


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
    if len({len(seen.looks) for seen in killed.ranks.values()}) > 1:
        return "the ranks have not made the same number of updates by all their optimizers"
    return ""


def is_leftover(launch: Observed) -> bool:
    """Return whether a launch began from a checkpoint: its optimizers have a nonzero state before any step."""
    first = [item for seen in launch.ranks.values() for item in seen.looks[0].digests.items()]
    return any(key.startswith("optim ") and digest[0] != "=" and " zero " not in digest for key, digest in first)


def start_of(killed: Observed, resumed: Observed) -> int | None:
    """Return the index of the killed launch's update that the resumed one makes first; None for a new start."""
    votes = votes_of(killed, {rank: seen.looks[0].digests for rank, seen in resumed.ranks.items()})
    if all(kinds == ["batch"] for kinds in votes.values()):  # nothing shows a restored state
        return None
    return max(votes, key=lambda update: (len(votes[update]), "param" in votes[update], update))


def votes_of(killed: Observed, starts: Mapping[int, _Digests]) -> dict[int, list[str]]:
    """Return, by update of the killed launch, the kinds whose values agree best there with a resumed launch's start.

    `starts` has the digests of the start by rank. A kind whose values agree most at update 0 is left out: it was not
    restored, or it never changes.
    """
    votes: dict[int, list[str]] = {}
    for kind in _ALIGNING:
        num_equal = [0] * len(killed.steps)
        for rank, digests in starts.items():
            first = of_kind(digests, kind)
            for update, look in enumerate(killed.ranks[rank].looks[: len(killed.steps)]):
                num_equal[update] += sum(look.digests.get(key) == digest for key, digest in first.items())
        most = max(num_equal)
        if num_equal[0] < most:
            for update, num in enumerate(num_equal):
                if num == most:
                    votes.setdefault(update, []).append(kind)
    return votes


class BothLaunches:
    """Compares the updates that both launches have made."""

    def __init__(self, killed: Observed, updates: Sequence[Sequence[Pair]], notes: list[str]) -> None:
        """Take the updates that both launches have made.

        Differences that do not matter, such as random states that no step draws from, are added to `notes`.
        """
        self._killed = killed
        self._updates = updates
        self._notes = notes
        self.suspects: list[str] = []
        """Differences before the last compared update that count as lost state only if gradients differ, too."""

    def state_findings(self, i: int) -> list[str]:
        """Say how each kind of state differs before update `i`. Values that differ in the same way share a text."""
        texts: list[str] = []
        self.suspects = []
        for kind in _STATE:
            groups: dict[tuple[str, bool, bool], list[tuple[str, int]]] = {}
            """Keys and ranks, by how values differ, whether no step changes them, and whether gradients decide."""
            for pair in self._updates[i]:
                then, now = of_kind(pair.then, kind), of_kind(pair.now, kind)
                for key in then if kind in _BESIDE else {**then, **now}:
                    if now.get(key) == then.get(key) or (key not in now and kind == "variable"):
                        continue  # the program may set the variable later
                    is_idle = (kind == "rng" or key not in now) and self._is_idle(key, pair.rank)
                    is_suspect = kind == "flag" or key not in then
                    how = self._how(key, pair)
                    groups.setdefault((how, is_idle, is_suspect or "DataLoader" in how), []).append((key, pair.rank))
            for (how, is_idle, is_suspect), places in groups.items():
                text = self._sentence(i, kind, how, places)
                if is_idle:
                    self.note(f"{text}, and no step {'draws from' if kind == 'rng' else 'changes'} it")
                elif is_suspect:
                    self.suspects.append(text)
                else:
                    texts.append(text)
        is_alone = len(texts) == 1 and not self.suspects
        if is_alone and texts[0].startswith("random") and not any(map(_has_other_batches, self._updates[i])):
            drops = "of the CPU" in texts[0] or "of the GPU" in texts[0]
            what = "dropout, a new iterator of a DataLoader, or anything else" if drops else "whatever"
            texts = [f"{texts[0]}, nothing else: {what} draws from it"]
        return texts

    def _is_idle(self, key: str, rank: int) -> bool:
        return len({look.digests.get(key) for look in self._killed.ranks[rank].looks}) == 1

    def note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _how(self, key: str, pair: Pair) -> str:
        then, now = pair.then.get(key, ""), pair.now.get(key, "")
        if not now or not then:
            return "is new" if now else "is missing"
        if key.startswith("rng "):
            ahead, behind = (_distance(*pair[2:]), _distance(pair.now, pair.then)) if key == "rng cpu" else (0, 0)
            where = f"{counted(ahead or behind, 'number')} {'ahead' if ahead else 'behind'}"
            return f"is {where}: each new iterator of a DataLoader draws one" if ahead or behind else "differs"
        (type_then, *word_then), (type_now, *word_now) = then.split(" ")[:2], now.split(" ")[:2]
        if type_then == type_now == "=":
            return f"is {word_now[0]} and not {word_then[0]}"
        if type_then != type_now:
            return f"is {type_now} and not {type_then}"
        if word_now == ["zero"] != word_then:
            return "is zero"
        looks = self._killed.ranks[pair.rank].looks
        if steps := [look.step for look in looks if look.digests.get(key) == now]:
            return f"is as at step {steps[-1]}"
        if word_now == ["bfloat16"] != word_then:
            return "is rounded to bfloat16"
        return "has other values"

    def _sentence(self, i: int, kind: str, how: str, places: Sequence[tuple[str, int]]) -> str:
        keys = dict.fromkeys(key for key, _ in places)
        ranks = {rank for _, rank in places}
        on = on_ranks(ranks if len(ranks) < len(self._updates[i]) else ())
        if kind == "optim":
            owners = {key.rpartition(".")[0] for key in keys}
            members = dict.fromkeys(key.rpartition(".")[2] for key in keys)
            what = f"optimizer state of {counted(len(owners), 'parameter')}"
            return f"{what} {how}{on}: {listed(members, MAX_LISTED)}"
        if len(keys) > 1 and kind not in ("other", "rng"):
            how = how.replace("is ", "are ", 1).replace("has ", "have ", 1)
        return f"{values_named(keys)} {how}{on}"

    def batch_findings(self) -> Iterator[tuple[int, str]]:
        """Yield each way in which the resumed run's batches differ, in words, with the first step of the difference."""
        ranks_of: dict[tuple[int, str], list[int]] = {}
        for rank, seen in self._killed.ranks.items():
            pairs = [pair for update in self._updates for pair in update if pair.rank == rank]
            later = [*dropwhile(lambda pair: not _has_other_batches(pair), pairs)]
            if later:
                ranks_of.setdefault((later[0].step, _reading(later, seen.looks)), []).append(rank)
        for (step, text), ranks in ranks_of.items():
            yield step, f"the resumed run {text} ({named('rank', ranks)}, step {step})"

    def gradients(self, i: int) -> str:
        """Return in words which gradients of update `i` differ, and on which ranks. Empty if no gradient differs."""
        places = [
            (key, pair.rank)
            for pair in self._updates[i]
            for key in {**of_kind(pair.then, "grad"), **of_kind(pair.now, "grad")}
            if pair.now.get(key) != pair.then.get(key)
        ]
        keys = dict.fromkeys(key for key, _ in places)
        on = on_ranks({rank for _, rank in places})
        return f"{values_named(keys)} {'differs' if len(keys) == 1 else 'differ'}{on}" if places else ""


def _reading(pairs: Sequence[Pair], looks: Sequence[Look]) -> str:
    """Say which batches a resumed run reads instead of the right ones. `looks` are of the killed launch."""
    then, now = (list(of_kind(digests, "batch").values()) for digests in (pairs[0].then, pairs[0].now))
    if now and len(now) < len(then) and then[-len(now) :] == now:
        return f"makes the step from {len(now)} of its {len(then)} batches: the gradients accumulated before are lost"
    wrong = next((number for number, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), None)
    if wrong is None:
        return f"makes the step from {counted(len(now), 'batch')} and not from {len(then)}"
    read = [(look.step, digest) for look in looks for digest in of_kind(look.digests, "batch").values()]
    following = [digest for pair in pairs for digest in of_kind(pair.now, "batch").values()][wrong:]
    places = [at for at, (_, digest) in enumerate(read) if digest == following[0]]
    places = [at for at in places if all(a == b for (_, a), b in zip(read[at:], following, strict=False))] or places
    steps = sorted({read[at][0] for at in places})
    if not places:
        cause = ": the random states of its DataLoader's workers began anew" if _WORKERS in pairs[0].now else ""
        return f"reads a batch that the interrupted run did not read in its steps{cause}"
    if places[0] == 0:
        return "reads the batch of step 0 again: the sampler started anew"
    if len(steps) > 1 or pairs[0].step in steps:
        return f"reads its batches in another order, here a batch of {named('step', steps)}"
    if steps[0] < pairs[0].step:
        return f"reads the batch of step {steps[0]} again"
    return f"leaves out batches: it reads the batch of step {steps[0]} already"


def _distance(earlier: _Digests, later: _Digests) -> int:
    """Return how many new DataLoader iterators turn the CPU's earlier random state into the later one, or 0."""
    return next((int(key[6:]) for key, state in of_kind(earlier, "ahead").items() if state == later["rng cpu"]), 0)


def of_kind(digests: _Digests, kind: str) -> dict[str, str]:
    """Return the digests of the values of one kind, in their order."""
    return {key: digest for key, digest in digests.items() if key.startswith(f"{kind} ")}


def _has_other_batches(pair: Pair) -> bool:
    return of_kind(pair.then, "batch") != of_kind(pair.now, "batch")


def prove_resume(launches: Launches, command: Sequence[str], resumed_command: Sequence[str]) -> Proven:
    """Run a program for some steps, kill it, resume it, and judge whether it continues as the killed one did."""
    killed, resumed = launches.launch_to_resume(command, "resumed", resumed_command)
    return launches.proven(judge_resume(killed, resumed, num_steps=launches.num_steps), killed, resumed)
