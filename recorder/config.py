"""The settings: where they come from, which values are allowed, and which are in force.

Precedence: default < file (``RECORDER_CONFIG``) < environment (``RECORDER_<NAME>``) < argument. The environment is read
here and in `capture.topology`, nowhere else. Nothing here may import torch or pyarrow: a wrong setting should stop a
launch before either is loaded.
"""

from __future__ import annotations

import os
import re
import threading
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from .errors import ConfigError
from .rules import OFF, ON, Rule, Schedule, did_you_mean, parse_rules, read_boolean, ring_window

FLAG = "RECORDER"
CONFIG_FILE = "RECORDER_CONFIG"
PREFIX = "RECORDER_"
CHECKED_MARK = "_RECORDER_CHECKED"
"""Set in the environment once a parent process has checked the settings. A wrong setting is then only logged."""

PLACEHOLDER = "SET_ME"
"""The text for a value that users must fill in, in the templates of `deploy/`."""

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,99}")
"""The allowed names of runs."""
LATEST = "latest"
"""The name that stands for the newest run in commands. No run may have it."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


_SPARSER = "0:5,10:100:10,100::50"
"""The steps of the default rules. They are few, because recording all modules makes a small program's step a third
longer, at worst twice as long. The probe has one number of each value at every step anyway. The model's inputs are
recorded at more steps, because `check` compares the batches of successive steps."""
_SPARSE = "0,100,1000,10000,100000"
DEFAULT_RULES = parse_rules(
    f"site=output,grad_output,tap steps={_SPARSER} micro_step=0:4 call=0:64 keep=stats;"
    f"site=param,grad,buffer steps={_SPARSER} keep=stats,fingerprint;"
    "module='' site=input steps=0:10,10:100:10,100::50 keep=stats,fingerprint;"
    f"site=output,grad,tap steps={_SPARSE} micro_step=0:4 call=0:4 keep=tensor;"
    "site=output,param,grad call=0:4 keep=probe;"
    "module='' site=input call=0:4 keep=probe;"
    "site=scalar keep=stats"
)
TRIGGERS = ("exception", "signal", "hang", "nonfinite", "spike", "jump")
"""The triggers that fire without a request: an exception, a signal, a hang, and three rules of `recorder check`."""
NO_TRIGGER = "none"
DEFAULT_TRIGGERS = ",".join(TRIGGERS)
TRIGGER_SIGNALS = ("SIGHUP", "SIGUSR1", "SIGUSR2")
NO_PRESET = "none"
PRESETS = {
    "default": DEFAULT_RULES,
    "light": parse_rules(
        "site=output,grad_output,tap steps=0:3,100::100 keep=stats;"
        "site=param,grad,buffer steps=0:3,100::100 keep=stats,fingerprint; site=scalar keep=stats"
    ),
    "nan": parse_rules(
        "site=output,grad_output,param,grad,buffer,optim,tap keep=stats; module='' site=input keep=stats;"
        "site=scalar keep=stats"
    ),
    "blackbox": parse_rules(
        "leaf=yes site=output,grad_output call=0:4 keep=ring; module='' site=input call=0:4 keep=ring;"
        "site=grad keep=ring; site=scalar keep=stats"
    ),
    "rollout": parse_rules(
        "module='' site=input,output name='!past_key_values*' keep=tokens;"
        "class=*Embedding,*Model,*CausalLM,Logits*,*Experts site=input name='!past_key_values*' keep=tokens;"
        "leaf=yes site=output name='!past_key_values*' steps=0:4,4::16 call=0:4 keep=tokens;"
        "site=param steps=0:4,4::64 keep=stats,fingerprint"
    ),
    "full": parse_rules("site=* keep=tensor,stats,fingerprint,histogram,units"),
    "twin": parse_rules("site=* steps=0:4 keep=tensor,stats,fingerprint; site=scalar keep=stats"),
}
"""The rules of each preset. ``light`` costs least. ``nan`` finds the first NaN at its step. ``blackbox`` writes the
steps before a trigger. ``rollout`` is for `align`: tokens and log-probabilities of each call, and modules and weights
now and then. ``full`` records everything. ``twin`` makes `diff` most certain."""


def _setting(default: object, doc: str, *choices: str) -> Any:
    return field(default=default, metadata={"doc": doc, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings. Each field's text says what it does and when to change it."""

    dir: str = _setting("recordings", "where run directories go; a fast local disk is best")
    name: str = _setting("", "the name of the run in commands; empty: made from the script and the time of its start")
    rules: tuple[Rule, ...] = _setting(DEFAULT_RULES, "the values that are recorded; docs/choose.md explains rules")
    preset: str = _setting(
        NO_PRESET, "rules by name, in place of the default ones; rules that are set are added to them",
        NO_PRESET, *PRESETS,
    )  # fmt: skip
    roots: str = _setting("optimizer", "watched modules: those that an optimizer trains, or any", "optimizer", "any")
    step_optimizer: str = _setting("", "class name of the optimizer that counts the steps; empty: the first to step")
    compiled: str = _setting(
        "skip", "code that is about to be compiled: left unchanged, or tapped in its graph", "skip", "tap"
    )
    local_gradients: bool = _setting(
        False, "where site=grad is recorded, also each rank's own gradients of parameters, before they are reduced"
    )
    jitter: int = _setting(
        0, "changes training: seed for changes of the model's inputs in the last place, for diff --noise; 0: none"
    )
    pool_bytes: int = _setting(0, "host memory for values on their way to disk, bytes; 0: 1 GiB, at most 5 % of memory")
    device_pool_bytes: int = _setting(
        256 << 20, "memory of each GPU for values on their way to the host, bytes; best: the size of a step's values"
    )
    ring_share: float = _setting(0.5, "the part of the pool in which values of keep=ring wait for a trigger")
    ring_hold_s: float = _setting(
        2.0, "how long steps stay in the ring if there is room, for triggers of other ranks, seconds"
    )
    triggers: str = _setting(
        DEFAULT_TRIGGERS, "the triggers of the ring: any of exception, signal, hang and rules of check; or none"
    )
    check_settings: str = _setting(
        "", "a file as `recorder check --settings` takes it: thresholds of triggers, and rules that are triggers"
    )
    trigger_signal: str = _setting("", "a signal that only writes the ring, such as SIGUSR2; empty: none")
    trigger_cooldown_s: float = _setting(60.0, "after a trigger, automatic triggers are ignored for this time, seconds")
    hang_s: float = _setting(300.0, "a hang, which is a trigger, is this time without a step, seconds; 0: never")
    dump_max_bytes: int = _setting(4 << 30, "limit on the bytes of all payloads that triggers write, for each rank")
    policy: str = _setting("wait", "when the pool is full: wait a bounded time, or drop at once", "wait", "drop")
    wait_s_per_step: float = _setting(1.0, "longest wait of one step for room in the pool, seconds")
    wait_s_stalled: float = _setting(10.0, "longest wait without a finished batch, as on a dead disk, seconds")
    wait_s_per_run: float = _setting(0.0, "limit on all waiting together, seconds; 0: none")
    flush_interval_s: float = _setting(1.0, "a record is in a file after at most this, seconds; a kill loses no more")
    sync_interval_s: float = _setting(1.0, "a record survives power loss after at most this, seconds")
    shard_bytes: int = _setting(256 << 20, "size at which a shard is sealed, bytes")
    seal_stats_s: float = _setting(
        0.0, "a shard of statistics is sealed after this time, seconds, for a daemon that ships shards; 0: if full"
    )
    codec: str = _setting(
        "auto",
        "auto: byte planes and zstd if they pay and a core is free; or no compression; or always zstd",
        "auto",
        "none",
        "zstd",
    )
    codec_level: int = _setting(1, "zstd level, -7 to 19")
    native: bool = _setting(True, "the compiled loops, where they were built; Python makes the same bits, more slowly")
    direct_io: str = _setting("auto", "write past the page cache where the file system can", "auto", "off")
    max_bytes: int = _setting(
        16 << 30, "disk quota of one rank over restarts, bytes; a quarter of it is for statistics"
    )
    keep_newest: int = _setting(
        0, "number of newest steps to keep; shards of older steps are deleted; 0: keep all that fit"
    )
    keep_steps: str = _setting("", "steps that are never deleted, such as ::1000 or pow2; each change ends a shard")
    permissions: str = _setting(
        "owner", "who may read the files: owner, also the group, or all", "owner", "group", "all"
    )
    min_free_bytes: int = _setting(2 << 30, "recording pauses while the file system has less than this free, bytes")
    on_quota: str = _setting(
        "retire", "at the quota: remove the oldest shards but the first, or stop", "retire", "stop"
    )
    close_deadline_s: float = _setting(5.0, "longest time that ending the process waits for the last bytes, seconds")
    status_interval_s: float = _setting(2.0, "how often a rank writes its status, s; 0: only at start and end")
    join_deadline_s: float = _setting(10.0, "longest wait of the writer for a run name agreed by all ranks, seconds")

    batch_bytes: ClassVar[int] = 8 << 20
    """A batch is written once it has this many payload bytes. Only tests change this."""
    shard_rows: ClassVar[int] = 65536
    """A shard is sealed once it has this many rows. Only tests change this."""

    def __post_init__(self) -> None:
        for name, low, high in RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                shown = [f"{end:g}" if isinstance(end, float) else f"{end}" for end in (low, high)]
                raise ConfigError(f"{name} = {value!r}: allowed is {' to '.join(shown)}")
        try:
            _ = self.keep_steps and Schedule.parse(self.keep_steps)
        except ValueError as error:
            raise ConfigError(f"keep_steps = {self.keep_steps!r}: {error}") from None
        ring_window(self.rules)
        for word in self.trigger_words:
            if word not in TRIGGERS:
                allowed = f"{NO_TRIGGER}, or a comma list of {', '.join(TRIGGERS)}"
                raise ConfigError(f"triggers = {self.triggers!r}: allowed is {allowed}{did_you_mean(word, TRIGGERS)}")
        if self.trigger_signal and self.trigger_signal not in TRIGGER_SIGNALS:
            allowed = f"nothing, or {', '.join(TRIGGER_SIGNALS)}"
            near = did_you_mean(self.trigger_signal, TRIGGER_SIGNALS)
            raise ConfigError(f"trigger_signal = {self.trigger_signal!r}: allowed is {allowed}{near}")

    @property
    def trigger_words(self) -> tuple[str, ...]:
        words = tuple(word.strip() for word in self.triggers.split(",") if word.strip())
        return () if words == (NO_TRIGGER,) else words


RANGES: tuple[tuple[str, float, float], ...] = (
    ("jitter", 0, 1 << 62),
    ("pool_bytes", 0, 1 << 44),
    ("device_pool_bytes", 0, 1 << 44),
    ("ring_share", 0.05, 0.9),
    ("ring_hold_s", 0, 3600),
    ("trigger_cooldown_s", 0, 1e9),
    ("hang_s", 0, 1e6),
    ("dump_max_bytes", 0, 1 << 60),
    ("wait_s_per_step", 0, 3600),
    ("wait_s_stalled", 0, 3600),
    ("wait_s_per_run", 0, 1e9),
    ("flush_interval_s", 0.01, 3600),
    ("sync_interval_s", 0, 3600),
    ("seal_stats_s", 0, 1e9),
    ("shard_bytes", 1 << 20, 1 << 40),
    ("codec_level", -7, 19),
    ("max_bytes", 1 << 20, 1 << 60),
    ("keep_newest", 0, 1 << 60),
    ("min_free_bytes", 0, 1 << 60),
    ("close_deadline_s", 0, 3600),
    ("status_interval_s", 0, 3600),
    ("join_deadline_s", 0, 3600),
)
"""The numeric settings: name, smallest and largest value."""
_LONGEST_LOOK_S = 2.0
_SMALLEST_POOL_BYTES = 1 << 20
_STORE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
"""The beginning of an object store's URL. It has one slash, because pathlib turns two slashes into one."""


@dataclass(frozen=True, slots=True)
class Explained:
    """A setting in force, as shown to people and written to the manifest."""

    name: str
    value: Any
    source: str
    doc: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings in force, and where each comes from."""

    settings: Settings
    sources: Mapping[str, str]

    def explain(self) -> list[Explained]:
        rows = []
        for item in fields(Settings):
            value = getattr(self.settings, item.name)
            shown = [rule.text for rule in value] if item.name == "rules" else value
            rows.append(Explained(item.name, shown, self.sources.get(item.name, "default"), item.metadata["doc"]))
        return rows


def is_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``RECORDER`` asks for recording. Raises ConfigError if it is neither on nor off."""
    value = (os.environ if environ is None else environ).get(FLAG, "").strip().lower()
    if value in OFF:
        return False
    if value in ON:
        return True
    raise ConfigError(f"{FLAG} = {value!r} (environment): allowed is 1 to record, 0 or unset not to")


def is_native_wanted() -> bool:
    """Whether a program that only reads runs may use the compiled loops. ``RECORDER_NATIVE=0`` forbids it."""
    return os.environ.get("RECORDER_NATIVE", "").strip().lower() not in OFF[1:]


def load_settings(arguments: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Loaded:
    """Read the settings from file, environment and arguments. Raises ConfigError for a wrong setting."""
    environ = os.environ if environ is None else environ
    known = {item.name: item for item in fields(Settings)}
    layers: list[tuple[str, Mapping[str, object]]] = []
    if path := environ.get(CONFIG_FILE):
        layers.append((f"file {path}", read_toml(path, f"{CONFIG_FILE} = {path!r}")))
    layers.append(("environment", _from_environment(environ, known)))
    layers.append(("argument", arguments or {}))

    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        for key, raw in layer.items():
            if key not in known:
                raise ConfigError(
                    f"{key!r} ({source}) is no setting{did_you_mean(key, tuple(known))}; "
                    "`recorder config --show` lists them all"
                )
            try:
                values[key] = _convert(known[key], raw)
            except ConfigError as error:
                shown = f"{PREFIX}{key.upper()}" if source == "environment" else key
                raise ConfigError(f"{shown} ({source}): {error}") from None
            sources[key] = source.split(" ")[0] if source in ("environment", "argument") else source
    if (preset := values.get("preset", NO_PRESET)) != NO_PRESET:
        values["rules"] = (*PRESETS[preset], *values.get("rules", ()))
        sources["rules"] = " and ".join([f"preset {preset}", *([sources["rules"]] if "rules" in sources else [])])
    try:
        settings = Settings(**values)
    except ConfigError as error:
        name = str(error).split(" ")[0].rstrip(":")
        raise ConfigError(f"{error} (it is from: {sources.get(name, 'default')})") from None
    if 0 < settings.pool_bytes < _SMALLEST_POOL_BYTES:
        raise ConfigError(f"pool_bytes = {settings.pool_bytes}: allowed is 0 (automatic) or at least 1 MiB")
    return Loaded(settings, sources)


def check_dir(loaded: Loaded) -> None:
    """Check that run directories can be made where the setting `dir` says. No directory is made.

    A file system that does not answer within two seconds passes the check. The writer will find the problem.

    Raises:
        ConfigError: no directory can ever be made there.
    """
    problems: list[str] = []
    text = loaded.settings.dir
    thread = threading.Thread(target=lambda: problems.extend(_problems_of_dir(Path(text).absolute())), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started; the writer needs one, too, and will report it
        return
    thread.join(_LONGEST_LOOK_S)
    if problems:
        source = loaded.sources.get("dir", "default")
        shown = f"{PREFIX}DIR" if source in ("environment", "default") else "dir"
        raise ConfigError(f"{shown} ({source}): dir = {text!r}: {problems[0]}; name a directory that can be written")


def _problems_of_dir(wanted: Path) -> Iterator[str]:
    path = wanted
    while (problem := _why_unusable(path)) is None and not path.exists():
        path = path.parent
    if problem:
        yield problem if path == wanted else f"{path} {problem}"


def _why_unusable(path: Path) -> str | None:
    """Return why no directory can be made at a path. Return None if one can, or if only a parent directory can tell."""
    try:
        if not path.is_dir():
            # The path may be a link without a target, through which a directory is never made. If it is a directory by
            # now, another rank has just made it.
            return "is no directory" if os.path.lexists(path) and not path.is_dir() else None
        if os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            return None
        return "is on a read-only file system" if os.statvfs(path).f_flag & os.ST_RDONLY else "cannot be written"
    except OSError as error:
        return f"cannot be used ({error.strerror})"


def read_toml(path: str, what: str) -> Mapping[str, Any]:
    """Read a TOML file, which messages call `what`. Raises ConfigError if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits makes Python raise a ValueError
        raise ConfigError(f"{what} is not TOML: {error}") from None


def _from_environment(environ: Mapping[str, str], known: Mapping[str, object]) -> Mapping[str, object]:
    values: dict[str, object] = {}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable == CONFIG_FILE:
            continue
        key = variable[len(PREFIX) :].lower()
        if key not in known or variable != variable.upper():
            near = did_you_mean(variable, tuple(PREFIX + name.upper() for name in known))
            raise ConfigError(
                f"{variable} = {environ[variable]!r} (environment) is no setting{near}; "
                "`recorder config --show` lists them all"
            )
        if environ[variable] != "":
            values[key] = environ[variable]
    return values


def _convert(item: Any, raw: object) -> object:
    name, default, choices = item.name, item.default, item.metadata["choices"]
    if name == "rules":
        return parse_rules(raw)
    if isinstance(default, bool):
        return read_boolean(name, raw)
    if isinstance(default, int):
        return read_bytes(name, raw) if name.endswith("_bytes") else read_number(name, raw, int)
    if isinstance(default, float):
        return read_number(name, raw, float)
    if not isinstance(raw, (str, os.PathLike)):
        raise ConfigError(f"{name} = {raw!r}: expected text")
    text = os.fspath(raw)
    if PLACEHOLDER in text:
        raise ConfigError(f"{name} = {text!r}: still has its placeholder; give it a value")
    if name == "dir" and _STORE.match(text):
        raise ConfigError(
            f"{name} = {text!r}: recording goes to a file system; name a directory, and copy the run up afterwards"
        )
    if name == "name" and text and (text == LATEST or not RUN_NAME.fullmatch(text)):
        raise ConfigError(
            f"name = {text!r}: allowed are up to 100 letters, digits and . _ = + -, the first a letter or a digit, "
            f"and not {LATEST!r}"
        )
    if choices and text not in choices:
        raise ConfigError(f"{name} = {text!r}: allowed is {' or '.join(choices)}{did_you_mean(text, choices)}")
    return text


def read_number(name: str, raw: object, kind: type[int] | type[float]) -> int | float:
    """Read an int or a float from a TOML value or a text. Raises ConfigError for NaN and for any other input."""
    try:
        if isinstance(raw, bool) or (kind is int and isinstance(raw, float)):
            raise ValueError
        number = kind(str(raw))
        if number != number:
            raise ValueError
        float(number)  # an integer of hundreds of digits does not fit
        return number
    except (OverflowError, ValueError):
        raise ConfigError(f"{name} = {raw!r}: expected {'a whole number' if kind is int else 'a number'}") from None


def read_bytes(name: str, raw: object) -> int:
    """Read a number of bytes, such as ``1000000``, ``50MB`` or ``512MiB``. Raises ConfigError for other input."""
    match = re.fullmatch(r"\s*(\d{1,30}(\.\d+)?)\s*([A-Za-z]*)\s*", str(raw))
    unit = None if isinstance(raw, bool) or match is None else _UNITS.get(match[3].upper())
    if match is None or unit is None:
        raise ConfigError(f"{name} = {raw!r}: expected bytes, such as 1073741824, 512MiB or 16GiB")
    return int(float(match[1]) * unit) if match[2] else int(match[1]) * unit
