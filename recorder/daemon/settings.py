"""The settings of the daemon: one TOML file, the environment, the command line; the latter wins.

The variables begin with ``RECORDERD_``, because a training refuses what begins with ``RECORDER_`` and is no setting.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError
from ..storage.clients import DESTINATIONS

PREFIX = "RECORDERD_"
KEEP_ALL = "all"
_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_SIZES = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_FIXED = ("watch", "to", "listen", "listen_certificate", "listen_password_file", "state", "log")
"""The settings that a reload cannot change, because locks, ports and ledgers depend on them."""


def _setting(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """Everything that can be set; each field's text says what it does, here and in the command's help."""

    watch: tuple[str, ...] = _setting((), "a folder of this node's runs; RECORDER_DIR, or recordings; repeatable")
    to: str = _setting("", f"where runs go: {DESTINATIONS} or file:///DIR")
    fresh_s: float = _setting(10.0, "statistics there are no older than so many seconds")
    status_s: float = _setting(5.0, "seconds between two statuses of a rank; each is one request")
    keep_local: str = _setting(KEEP_ALL, "how long an ended run stays here once it is there: 12h, or all")
    max_bytes_per_s: int = _setting(0, "bound on what is sent: 50MB; 0: none")
    threads: int = _setting(4, "uploads at once, of small and of large files each")
    listen: str = _setting("127.0.0.1:9436", "where /metrics, /healthz and /readyz are; empty: nowhere")
    listen_certificate: str = _setting("", "PEM file with certificate and key: the port speaks TLS")
    listen_password_file: str = _setting("", "file with USER:PASSWORD, which /metrics then asks for")
    log: str = _setting("text", "how lines are written to standard error: text or json")
    catalog_s: float = _setting(3600.0, "seconds between two catalogs of a run that grows; 0: none")
    check_s: float = _setting(0.0, "seconds between two checks of a run that grows; 0: none")
    webhook: str = _setting("", "a URL that is told of findings of severity error")
    accept_commands: bool = _setting(False, "carry commands from the store to the runs of this node")
    key_file: str = _setting("", "the file with the key that signs commands")
    recheck_s: float = _setting(3600.0, "seconds between two looks at what the store still has of a run")
    stop_s: float = _setting(10.0, "how long a stop waits for what is under way, seconds")
    deadline_s: float = _setting(600.0, "with --once: how long a store that fails is tried, seconds")
    state: str = _setting("", "the folder for the lock and the state")

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} = {getattr(self, name):g}: allowed is {low:g} to {high:g}")
        if self.log not in ("text", "json"):
            raise ConfigError(f"log = {self.log!r}: allowed is text or json")
        _ = self.keep_local_s
        if self.listen:
            _ = self.address
        if self.webhook and (
            urlsplit(self.webhook).scheme not in ("http", "https") or not urlsplit(self.webhook).hostname
        ):
            raise ConfigError("webhook: expected http://HOST/... or https://HOST/...")

    @property
    def keep_local_s(self) -> float:
        """Return how long an ended run stays, in seconds; infinite where nothing is removed."""
        return math.inf if self.keep_local == KEEP_ALL else duration_s("keep_local", self.keep_local)

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of `listen`."""
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or not 0 <= int(port) < 65536:
            raise ConfigError(f"listen = {self.listen!r}: expected HOST:PORT, such as 127.0.0.1:9436")
        return host.strip("[]"), int(port)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("fresh_s", 0.1, 86400),
    ("status_s", 0.1, 86400),
    ("max_bytes_per_s", 0, 1 << 50),
    ("threads", 1, 64),
    ("catalog_s", 0, 1e9),
    ("check_s", 0, 1e9),
    ("recheck_s", 1, 1e9),
    ("stop_s", 0, 3600),
    ("deadline_s", 0, 1e9),
)


def load_daemon_settings(
    file: str | None, arguments: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> DaemonSettings:
    """Read file, environment and arguments; arguments that are None were not given. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    known = {item.name: item for item in fields(DaemonSettings)}
    values: dict[str, Any] = {}
    if file := file or environ.get(f"{PREFIX}CONFIG"):
        for key, raw in _read_file(file).items():
            values[key] = _convert(known, key, raw, f"file {file}")
    for variable, raw in sorted(environ.items()):
        key = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and key != "config" and raw:
            values[key] = _convert(known, key, raw, f"{variable} of the environment")
    for key, raw in arguments.items():
        if raw is not None:
            values[key] = _convert(known, key, raw, f"--{key.replace('_', '-')}")
    return DaemonSettings(**values)


def reloaded(old: DaemonSettings, new: DaemonSettings) -> tuple[DaemonSettings, list[str]]:
    """Return the settings after a reload, and the names of those that need a restart and stay as they are."""
    kept = [name for name in _FIXED if getattr(old, name) != getattr(new, name)]
    return dataclasses.replace(new, **{name: getattr(old, name) for name in _FIXED}), kept


def duration_s(name: str, text: str) -> float:
    """Return the seconds of a text such as ``90``, ``15m``, ``12h`` or ``30d``; raises ConfigError for others."""
    return _quantity(name, text, _UNITS, "a time, such as 90s, 15m, 12h or 30d")


def num_bytes(name: str, text: str) -> int:
    """Return the bytes of a text such as ``1000000``, ``50MB`` or ``2TB``; raises ConfigError for others."""
    return int(_quantity(name, text, _SIZES, "bytes, such as 50MB, 2TB or 512MiB"))


def _quantity(name: str, text: str, units: Mapping[str, int], expected: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    number = float(match[1]) * units[match[2]] if match is not None and match[2] in units else math.inf
    if math.isinf(number):
        raise ConfigError(f"{name} = {text!r}: expected {expected}")
    return number


def _read_file(file: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits is a ValueError of Python's own
        raise ConfigError(f"{file}: is not TOML: {error}") from None


def _convert(known: Mapping[str, Any], key: str, raw: Any, source: str) -> Any:
    if key not in known:
        raise ConfigError(f"{key!r} ({source}) is no setting of the daemon; known are {', '.join(known)}")
    default = known[key].default
    try:
        return _as(key, raw, default)
    except ConfigError as error:
        raise ConfigError(f"{error} ({source})") from None


def _as(key: str, raw: Any, default: Any) -> Any:
    if any(isinstance(text, str) and "\0" in text for text in (raw if isinstance(raw, (list, tuple)) else (raw,))):
        raise ConfigError(f"{key} = {raw!r}: expected a text without a NUL")
    if isinstance(default, tuple):
        values = raw.split(os.pathsep) if isinstance(raw, str) else raw
        if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) and value for value in values):
            raise ConfigError(f"{key} = {raw!r}: expected folders")
        return tuple(values)
    if isinstance(default, bool):
        words = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
        if str(raw).lower() not in words:
            raise ConfigError(f"{key} = {raw!r}: expected true or false")
        return words[str(raw).lower()]
    if isinstance(default, (int, float)):
        if isinstance(raw, bool):
            raise ConfigError(f"{key} = {raw!r}: expected a number")
        if key.endswith("bytes_per_s") and isinstance(raw, str):
            return num_bytes(key, raw)
        try:
            value = type(default)(raw)
            float(value)  # which an integer of hundreds of digits has no room in
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if value != value or (isinstance(default, int) and isinstance(raw, float)):
            raise ConfigError(f"{key} = {raw!r}: expected a number")
        return value
    if not isinstance(raw, str):
        raise ConfigError(f"{key} = {raw!r}: expected text")
    return raw
