"""Shows whether a checkpoint holds the state of a training. `prove_checkpoint` runs a program and reads its checkpoint.

Files of `torch.save`, `torch.distributed.checkpoint` and safetensors are read, whatever names a program gives its
state. torch is imported where a checkpoint is read, and only there. A class that a file names is never imported.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import LookupFailedError
from ...numerics.keys import by_key
from ...run.status import CHANGED, UNCHANGED, UNKNOWN, Proof
from ...system.text import counted, listed
from .launches import GENERATORS, MAX_LISTED, RESUMED, Launches, Observed, Proven, RankSeen, count_kinds, values_named
from .resume import LEFTOVER, OLD, BothLaunches, Pair, is_leftover, votes_of

_NUMPY = re.compile(r"numpy\.(_core|core)\.multiarray\.(_reconstruct|scalar)|numpy\.(ndarray|dtype)")
"""The only names of numpy that a file may use. They rebuild arrays, for example those of a random state."""
_GENERATOR_BYTES = {5056: "cpu", 16: "cuda"}
"""The kind of generator, by the size in bytes of a random state of torch."""
_CLOCKS_APART_NS = 1_000_000_000
"""By how many nanoseconds a file system's clock may be behind that of this process."""
_MOVED = "moved"
"""Stands for a random state in the checkpoint that the run did not have at the beginning of any step."""
_HELD = ("param", "buffer", "optim", "schedule", "scaler", "other", "rng")
"""The kinds of values that a checkpoint should hold. The kind is the first word of a value's key."""


class _StandIn:
    """Stands for an object of a program's own class, which is never imported. Has the object's attributes."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


@dataclass(slots=True)
class _SavedValue:
    path: str
    """The keys that lead to the value, joined by dots. A ``#`` stands before a parameter's number in an optimizer."""
    value: Any
    _described: dict[str, str] = field(default_factory=dict)

    def described(self, like: str) -> str:
        """Return the value's description as the probe makes it. If `like` describes a chunk, take only that chunk."""
        part = like.partition("[")[2]
        if part not in self._described:
            value = self.value
            if part:
                shape, offsets, sizes = (
                    [int(number) for number in re.findall(r"\d+", one)] for one in part.split("] [")
                )
                if shape == list(getattr(value, "shape", ())):
                    spans = zip(offsets, sizes, strict=True)
                    value = value[tuple(slice(at, at + size) for at, size in spans)]
            plain = import_module("recorder_probe")._described(value)
            self._described[part] = f"{plain} [{part}" if part else plain
        return self._described[part]


@dataclass(slots=True)
class Contents:
    """The values and the random states in a checkpoint."""

    leaves: dict[str, list[_SavedValue]] = field(default_factory=dict)
    """The values by their paths. A path has several values if the files of several ranks have this path."""
    random_states: list[tuple[str, str]] = field(default_factory=list)
    """For each random state, the kind of generator (``cpu``, ``cuda``, ``python``, ``numpy``), and its digest."""
    saved_ns: int = 0
    """The time at which the newest file was written, in nanoseconds since 1970."""
    unread: list[str] = field(default_factory=list)
    """The names of the files that could not be read, each with the reason."""

    def add(self, value: Any, path: str = "", *, by_number: bool = False) -> None:
        """Add all values in a tree of dicts, lists and objects."""
        inner: Mapping[Any, Any] | None = None
        if (state := _random_state(value)) is not None:
            self.random_states.append(state)
        elif isinstance(value, _StandIn):
            inner = vars(value)
        elif isinstance(value, Mapping):
            inner = value
        elif isinstance(value, (list, tuple)):
            inner = dict(enumerate(value))
        elif hasattr(value, "untyped_storage") or isinstance(value, (bool, int, float)):
            self.leaves.setdefault(path, []).append(_SavedValue(path, value))
        is_optimizer = inner is not None and {"state", "param_groups"} <= inner.keys()
        for key, one in (inner or {}).items():
            mark = "#" if by_number and str(key).isdigit() else ""
            self.add(one, f"{path}.{mark}{key}" if path else f"{mark}{key}", by_number=is_optimizer and key == "state")


def _random_state(value: Any) -> tuple[str, str] | None:
    """Return a random state's kind of generator, and its digest as the probe makes it. Return None for other values."""
    probe = import_module("recorder_probe")
    if hasattr(value, "untyped_storage"):
        is_state = str(value.dtype) == "torch.uint8" and value.dim() == 1 and value.numel() in _GENERATOR_BYTES
        return (_GENERATOR_BYTES[value.numel()], probe._digest(value)) if is_state else None
    if isinstance(value, Mapping) and "bit_generator" in value:
        return "numpy", probe._hash(repr(dict(value)).encode())
    if not isinstance(value, (list, tuple)):
        return None
    if len(value) == 5 and value[0] == "MT19937":
        return "numpy", probe._legacy_state(value)
    if len(value) == 3 and isinstance(value[1], (list, tuple)) and len(value[1]) == 625:
        return "python", probe._hash(repr((value[0], tuple(value[1]), value[2])).encode())
    return None


def read_contents(place: Path, since_ns: int, num_ranks: int) -> Contents:
    """Read the newest checkpoint: `place` itself, or one in it. Files older than `since_ns` do not count."""
    every = {path: time_ns for path in (place, *place.rglob("*")) if (time_ns := _saved_at(path)) >= 0}
    times = {path: time_ns for path, time_ns in every.items() if time_ns >= since_ns}
    if not times:
        old = f" ({max(every, key=every.__getitem__).name} is {OLD})" if every else ""
        raise LookupFailedError(
            f"{place}: the program has saved no checkpoint there before it was ended{old}; raise --steps, or name the "
            "folder in which it saves (files of torch.save, torch.distributed.checkpoint and safetensors are read)"
        )
    newest = max(times, key=times.__getitem__)
    folder = newest if newest.is_dir() else newest.parent
    files = [one for one in sorted(times, key=times.__getitem__, reverse=True) if folder in (one, one.parent)]
    contents = Contents(saved_ns=times[newest])
    for path in _of_one_checkpoint(files, num_ranks):
        try:
            contents.add(_load(path))
        except Exception as error:  # a file of the program may raise any error
            contents.unread.append(f"{path.name} ({type(error).__name__})")
    return contents


def _saved_at(path: Path) -> int:
    """Return when the checkpoint in this file or folder was saved, in nanoseconds since 1970; -1 if there is none."""
    metadata = path / ".metadata"
    if metadata.is_file():
        return metadata.stat().st_mtime_ns
    is_file = path.is_file() and path.suffix != ".distcp"
    is_read = is_file and (path.suffix == ".safetensors" or zipfile.is_zipfile(path))
    return path.stat().st_mtime_ns if is_read else -1


def _of_one_checkpoint(files: Sequence[Path], num_ranks: int) -> Iterator[Path]:
    """Yield the newest step's files. The names of older steps' files differ in a number that is not a rank."""
    newest: dict[str, list[int]] = {}
    for path in files:
        numbers = [int(number) for number in re.findall(r"\d+", path.name)]
        latest = newest.setdefault(re.sub(r"\d+", "#", path.name), numbers)
        others = [pair for pair in zip(numbers, latest, strict=True) if pair[0] != pair[1]]
        if "-of-" in path.name or (len(others) < 2 and all(max(pair) < num_ranks for pair in others)):
            yield path


def _load(path: Path) -> Any:
    import torch

    if path.suffix == ".safetensors":
        return import_module("safetensors.torch").load_file(path)
    if path.is_dir():
        convert = import_module("torch.distributed.checkpoint.format_utils").dcp_to_torch_save
        with tempfile.TemporaryDirectory(prefix="recorder-prove-") as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            convert(path, os.path.join(folder, "checkpoint.pt"))
            return _load(Path(folder, "checkpoint.pt"))
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    types = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
    with torch.serialization.safe_globals([*types, *((_real_or_stand_in(name), name) for name in names)]):
        return torch.load(path, map_location="cpu", weights_only=True)


def _real_or_stand_in(name: str) -> Any:
    if _NUMPY.fullmatch(name) or name == "_codecs.encode":
        module, _, attribute = name.rpartition(".")
        return getattr(import_module(module), attribute)
    return _StandIn


class _Match:
    """Matches one rank's values with the values in a checkpoint, by name or else by content."""

    def __init__(self, seen: RankSeen, contents: Contents) -> None:
        self.now: dict[str, str] = {}
        self.used: set[str] = set()
        """The paths of the checkpoint's values that were matched with values of the rank."""
        self._leaves = contents.leaves
        self._looked: dict[str, list[str]] = {}
        """For each key, the digests that the probe saw as steps began, the last step first."""
        for look in reversed(seen.looks):
            for key, digest in look.digests.items():
                if key.partition(" ")[0] in _HELD:
                    self._looked.setdefault(key, []).append(digest)
        self._paths = by_key((name.rpartition(".")[2], (path, name)) for path, name in self._with_names().items())
        """By the last part of a path: the path, and the path with parameters' names in place of parameters' numbers."""
        self._match(
            sorted((key for key in self._looked if not key.startswith("rng ")), key=lambda key: -key.count("."))
        )
        self._match_random_states(contents.random_states)

    def _with_names(self) -> dict[str, str]:
        """Return, by path, the path with a parameter's name in place of the parameter's number in an optimizer."""
        parameters = {key.removeprefix("param ") for key in self._looked}
        owners: dict[str, None] = {}
        owner_of: dict[str, str] = {}
        """By the digest of an optimizer state, the name of its parameter."""
        for key, digests in self._looked.items():
            parts = key.removeprefix("optim ").split(".")
            if key.startswith("optim "):
                prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
                owner = next((name for name in prefixes if name in parameters), "")
                owners.setdefault(owner)
                owner_of |= {digest: owner for digest in digests if " - " in digest}
        numbered = {path: found[0] for path in self._leaves if (found := re.match(r".*#\d+", path))}
        in_order = sorted(set(numbered.values()), key=lambda prefix: int(prefix.rpartition("#")[2]))
        names = dict(zip(in_order, owners, strict=True)) if len(in_order) == len(owners) else {}
        for path, prefix in numbered.items():  # each optimizer counts its parameters from 0
            named = (owner_of.get(leaf.described("")) for leaf in self._leaves[path])
            names[prefix] = next(filter(None, named), names.get(prefix, prefix))
        return {path: re.sub(r".*#\d+", lambda found: names.get(found[0], found[0]), path) for path in self._leaves}

    def _named(self, key: str) -> Iterator[str]:
        kind, _, name = key.partition(" ")
        if kind in ("schedule", "scaler", "other"):
            name = name.partition(".")[2]  # the name begins with the object's class
        for path, with_names in self._paths.get(name.rpartition(".")[2], []):
            if path not in self.used and f".{with_names}".endswith(f".{name}"):
                yield path

    def _match(self, keys: Sequence[str]) -> None:
        """Match keys with paths. Longer names come first, since ``average.0.weight`` also ends with ``0.weight``."""
        contents = {leaf.described(""): path for path, leaves in self._leaves.items() for leaf in leaves}
        for key in keys:
            paths = list(self._named(key))
            pairs = ((digest, path) for digest in self._looked[key] for path in paths)
            same = (p for p in pairs if any(leaf.described(p[0]) == p[0] for leaf in self._leaves[p[1]]))
            self._use(key, next(same, None))
        for key in keys:
            is_tensor = not self._looked[key][0].startswith("=")
            pairs = ((digest, contents.get(digest, "")) for digest in self._looked[key] if is_tensor)
            self._use(key, next((pair for pair in pairs if pair[1] and pair[1] not in self.used), None))
        for key in keys:
            if path := next(self._named(key), ""):
                self._use(key, (self._leaves[path][0].described(self._looked[key][0]), path))

    def _use(self, key: str, found: tuple[str, str] | None) -> None:
        if found is not None and key not in self.now:
            self.now[key] = found[0]
            self.used.add(found[1])

    def _match_random_states(self, states: Sequence[tuple[str, str]]) -> None:
        digests = {digest for _, digest in states}
        for key, looked in self._looked.items():
            if key.startswith("rng ") and (found := next((one for one in looked if one in digests), "")):
                self.now[key] = found
        others = {generator for generator, digest in states if digest not in self.now.values()}
        for key in self._looked:
            name = key.removeprefix("rng ")
            is_there = name in others or (others and name not in GENERATORS)
            if key.startswith("rng ") and key not in self.now and is_there:
                self.now[key] = _MOVED


def judge_checkpoint(run: Observed, contents: Contents) -> Proof:
    """Judge whether a checkpoint holds the state that the run had at the beginning of one of its steps."""
    notes = [f"not read: {listed(contents.unread, MAX_LISTED)}"] if contents.unread else []
    pairs: list[Pair] = []

    def tell(verdict: str, text: str, first_step: int | None = None) -> Proof:
        return Proof(
            subject="checkpoint", verdict=verdict, text=f"{verdict}: {text}", steps=len(pairs[:1]),
            ranks=len(run.ranks), first_step=first_step, notes=tuple(notes),
            compared=dict(count_kinds(key for pair in pairs for key in pair.then)),
        )  # fmt: skip

    matches = {rank: _Match(seen, contents) for rank, seen in run.ranks.items()}
    if not contents.leaves:
        return tell(UNKNOWN, "the checkpoint holds no values")
    start = _start_of(run, matches)
    if start is None:
        text = f"no value in the checkpoint is the result of one of the {run.num_steps} steps that were seen"
        return tell(UNKNOWN, f"{text}; was it saved later, as at the program's end?")
    step = run.steps[start]
    notes += [LEFTOVER] if is_leftover(run) else []
    looks_of_ranks = zip(*(seen.looks for seen in run.ranks.values()), strict=False)
    began_ns = [max(int(look.digests.get("began", contents.saved_ns)) for look in looks) for looks in looks_of_ranks]
    if sum(time_ns < contents.saved_ns for time_ns in began_ns) > start:
        why = "the checkpoint is stale, unless it is saved in the background or in the middle of the step"
        notes.append(f"the checkpoint was written after step {step} had begun: {why}")
    aside: dict[str, dict[str, None]] = {}
    for rank, match in matches.items():
        pairs.append(_pair(step, rank, run.ranks[rank].looks[start].digests, match.now, aside))
    comparison = BothLaunches(run, [pairs], notes)
    findings = comparison.state_findings(0)
    notes += comparison.suspects
    notes += [f"{values_named(keys)} {why}" for why, keys in aside.items()]
    held = {digest for seen in run.ranks.values() for digest in seen.looks[start].digests.values()}
    if extra := _extra(contents, matches, held):
        notes.append(f"the checkpoint also holds values that the run did not have: {listed(extra, MAX_LISTED)}")
    after = f"after {counted(step, 'step')}"
    if findings:
        is_unsure = contents.unread and all(" missing" in text for text in findings)
        return tell(UNKNOWN if is_unsure else CHANGED, f"in the checkpoint {after}, {'; '.join(findings)}", step)
    values = f"{sum(len(pair.then) for pair in pairs):,} values of {counted(len(pairs), 'rank')}"
    return tell(UNCHANGED, f"the checkpoint holds the state of the run {after}: {values}, bit by bit")


def _start_of(run: Observed, matches: Mapping[int, _Match]) -> int | None:
    """Return the index of the update before which the run had the checkpoint's state. Return None if there is none."""
    votes = votes_of(run, {rank: match.now for rank, match in matches.items()})
    firsts = {kind: update for update in sorted(votes, reverse=True) for kind in votes[update]}
    return max(firsts.values(), default=None)  # no value of the checkpoint is from a later step


def _pair(
    step: int, rank: int, digests: Mapping[str, str], now: Mapping[str, str], aside: dict[str, dict[str, None]]
) -> Pair:
    """Pair a rank's values at the beginning of a step with the values in the checkpoint (`now`).

    Random states that need not be those of the step are not paired. They are added to `aside`, by the reason in words.
    """
    then: dict[str, str] = {}
    for key, digest in digests.items():
        kind, is_there = key.partition(" ")[0], key in now
        if kind not in _HELD or (kind == "other" and not is_there and digest.startswith("=")):
            continue
        if now.get(key, _MOVED) == _MOVED and f"seeded {key.removeprefix('rng ')}" in digests:
            why = f"was seeded anew before step {step}, and need not be saved"
        elif kind == "rng" and is_there and now[key] != digest:
            why = f"changed before step {step} began: --resume shows whether it is restored"
        else:
            then[key] = digest
            continue
        aside.setdefault(why, {})[key] = None
    return Pair(step, rank, then, {key: now[key] for key in then if key in now})


def _extra(contents: Contents, matches: Mapping[int, _Match], held: set[str]) -> list[str]:
    used = {path for match in matches.values() for path in match.used}
    return [
        path
        for path, leaves in contents.leaves.items()
        if path not in used and hasattr(leaves[0].value, "shape") and leaves[0].described("") not in held
    ]


def prove_checkpoint(launches: Launches, command: Sequence[str], place: Path) -> Proven:
    """Run a program for some steps, and judge whether its last checkpoint holds the state of the run.

    Raises LookupFailedError if the program has saved no checkpoint.
    """
    since_ns = time.time_ns() - _CLOCKS_APART_NS
    run = launches.launch(f"ends after step {launches.num_steps - 1}", command, resume=RESUMED)
    if not run.ranks:
        text = f"{UNKNOWN}: no step of an optimizer was seen before the program ended with exit code {run.exit_code}"
        return launches.proven(Proof(subject="checkpoint", verdict=UNKNOWN, text=text))
    return launches.proven(judge_checkpoint(run, read_contents(place, since_ns, len(run.ranks))), run)
