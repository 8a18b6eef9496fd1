"""The settings of the daemon, from a TOML file, the environment and the command line.

The environment overrides the file, and the command line overrides both. The variables begin with ``RECORDERD_``,
because a training refuses unknown variables that begin with ``RECORDER_``.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from ..config import read_bytes, read_number, read_toml
from ..errors import ConfigError
from ..rules import read_boolean
from ..storage.clients import DESTINATIONS

PREFIX = "RECORDERD_"
KEEP_ALL = "all"
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_FIXED = ("watch", "to", "listen", "listen_certificate", "listen_password_file", "state", "log")
"""The settings that a reload cannot change. Locks, ports and ledgers (lists of shipped files) depend on them."""


def _setting(default: Any, doc: str, metavar: str | None = None, *, allowed: tuple[float, float] | None = None) -> Any:
    """Return the field of a setting. `metavar` stands for a text in the command's help. `allowed` bounds a number."""
    return field(default=default, metadata={"doc": doc, "metavar": metavar, "allowed": allowed})


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """All settings of the daemon. The text of each field explains the setting, here and in the command's help."""

    watch: tuple[str, ...] = _setting((), "a folder of this node's runs; RECORDER_DIR or recordings; repeatable", "DIR")
    to: str = _setting("", f"where runs go: {DESTINATIONS} or file:///DIR", "URL")
    fresh_s: float = _setting(10.0, "the greatest age of statistics at the destination, seconds", allowed=(0.1, 86400))
    status_s: float = _setting(
        5.0, "seconds between two uploads of a node's statuses; each upload is one request", allowed=(0.1, 86400)
    )
    keep_local: str = _setting(KEEP_ALL, "how long an ended run stays on this disk once shipped: 12h, or all", "TIME")
    max_bytes_per_s: int = _setting(0, "limit on bytes sent per second: 50MB; 0: none", "BYTES", allowed=(0, 1 << 50))
    threads: int = _setting(4, "uploads at once, for small and for large files each", allowed=(1, 64))
    listen: str = _setting("127.0.0.1:9436", "the address of /metrics, /healthz and /readyz; empty: none", "HOST:PORT")
    listen_certificate: str = _setting("", "PEM file with certificate and key: the port speaks TLS", "FILE")
    listen_password_file: str = _setting("", "file with USER:PASSWORD, which /metrics then requires", "FILE")
    log: str = _setting("text", "how lines are written to standard error: text or json", "KIND")
    check_s: float = _setting(0.0, "seconds between two checks of a run that grows; 0: none", allowed=(0, 1e9))
    webhook: str = _setting("", "a URL to which new findings are posted: Slack's, or one that takes JSON", "URL")
    page_url: str = _setting("", "the address of `recorder view` of the destination, for links in messages", "URL")
    accept_commands: bool = _setting(False, "carry commands from the store to the runs of this node")
    key_file: str = _setting("", "the file with the key that signs commands", "FILE")
    recheck_s: float = _setting(3600.0, "seconds between two listings of a run in the store", allowed=(1, 1e9))
    stop_s: float = _setting(10.0, "how long a stop waits for jobs under way, seconds", allowed=(0, 3600))
    deadline_s: float = _setting(600.0, "with --once: how long to retry a failing store, seconds", allowed=(0, 1e9))
    state: str = _setting("", "the folder for the lock and the state", "DIR")

    def __post_init__(self) -> None:
        for item in fields(self):
            allowed, value = item.metadata["allowed"], getattr(self, item.name)
            if allowed and not allowed[0] <= value <= allowed[1]:
                raise ConfigError(f"{item.name} = {value:g}: allowed is {allowed[0]:g} to {allowed[1]:g}")
        if self.log not in ("text", "json"):
            raise ConfigError(f"log = {self.log!r}: allowed is text or json")
        _ = self.keep_local_s
        if self.listen:
            _ = self.address
        for name in ("webhook", "page_url"):
            url = getattr(self, name)
            if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
                raise ConfigError(f"{name}: expected http://HOST/... or https://HOST/...")

    @property
    def keep_local_s(self) -> float:
        """The seconds for which an ended run stays on this disk after it was shipped. Infinite if all runs stay."""
        return math.inf if self.keep_local == KEEP_ALL else duration_s("keep_local", self.keep_local)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or not 0 <= int(port) < 65536:
            raise ConfigError(f"listen = {self.listen!r}: expected HOST:PORT, such as 127.0.0.1:9436")
        return host.strip("[]"), int(port)


def load_daemon_settings(
    file: str | None, arguments: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> DaemonSettings:
    """Read the settings. An argument that is None was not given. Raise ConfigError if a setting cannot be used."""
    environ = os.environ if environ is None else environ
    known = {item.name: item for item in fields(DaemonSettings)}
    values: dict[str, Any] = {}
    if file := file or environ.get(f"{PREFIX}CONFIG"):
        for key, raw in read_toml(file, f"{file}:").items():
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
    """Return the settings after a reload, and the names of changed settings that take effect only after a restart."""
    kept = [name for name in _FIXED if getattr(old, name) != getattr(new, name)]
    return dataclasses.replace(new, **{name: getattr(old, name) for name in _FIXED}), kept


def duration_s(name: str, text: str) -> float:
    """Return the seconds of a text such as ``15m`` or ``30d``. Raise ConfigError for any other text, such as ``15``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match is not None and match[2] in _UNITS else math.inf
    if math.isinf(seconds):
        raise ConfigError(f"{name} = {text!r}: expected a time with a unit: 30d, 12h, 45min, 30s")
    return seconds


def _convert(known: Mapping[str, Any], key: str, raw: Any, source: str) -> Any:
    if key not in known:
        raise ConfigError(f"{key!r} ({source}) is no setting of the daemon; known are {', '.join(known)}")
    try:
        return _as(key, raw, known[key].default)
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
        return read_boolean(key, raw)
    if key.endswith("bytes_per_s"):
        return read_bytes(key, raw)
    if isinstance(default, (int, float)):
        return read_number(key, raw, type(default))
    if not isinstance(raw, str):
        raise ConfigError(f"{key} = {raw!r}: expected text")
    return raw
