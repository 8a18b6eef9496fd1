"""``recorder daemon``: ships the runs of a node to a store, and keeps house there."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Annotated, Any

import typer

from ...daemon.settings import DaemonSettings, duration_s, load_daemon_settings, num_bytes
from ...errors import ConfigError, LookupFailedError, StoreError, not_installed
from ...run.finding import default_folder
from ...run.reply import Table, TableColumn
from ...system.text import counted, listed, moment, printable_line, size
from ..options import Json
from ..output import print_json, print_table, say

EPILOG = (
    "Examples: recorder daemon --once --watch recordings --to archive    "
    "recorder daemon prune --to archive --older-than 30d"
)

_DOCS = {item.name: (item.metadata["doc"], item.default) for item in fields(DaemonSettings)}
_ACTIONS = ("ship", "status", "prune", "keep", "unkeep")


def _setting(name: str, metavar: str | None = None) -> Any:
    """Return the option of a setting, whose help says its default where it has one."""
    doc, default = _DOCS[name]
    shown = f" ({default:g})" if isinstance(default, (int, float)) and default else f" ({default})" if default else ""
    return typer.Option(f"--{name.replace('_', '-')}", metavar=metavar, help=f"{doc[0].upper()}{doc[1:]}{shown}.")


def command(
    action: Annotated[str, typer.Argument(metavar="ACTION", help=f"One of {', '.join(_ACTIONS)}.")] = "ship",
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Of prune, keep and unkeep: names of runs below --to."),
    ] = None,
    watch: Annotated[list[str] | None, _setting("watch", "DIR")] = None,
    to: Annotated[str | None, _setting("to", "URL")] = None,
    once: Annotated[bool, typer.Option("--once", help="Ship what is here now, and end: for an epilog.")] = False,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="A TOML file of these settings, read again after SIGHUP.")
    ] = None,
    fresh_s: Annotated[float | None, _setting("fresh_s")] = None,
    status_s: Annotated[float | None, _setting("status_s")] = None,
    keep_local: Annotated[str | None, _setting("keep_local", "TIME")] = None,
    max_bytes_per_s: Annotated[str | None, _setting("max_bytes_per_s", "BYTES")] = None,
    threads: Annotated[int | None, _setting("threads")] = None,
    listen: Annotated[str | None, _setting("listen", "HOST:PORT")] = None,
    listen_certificate: Annotated[str | None, _setting("listen_certificate", "FILE")] = None,
    listen_password_file: Annotated[str | None, _setting("listen_password_file", "FILE")] = None,
    log: Annotated[str | None, _setting("log", "KIND")] = None,
    catalog_s: Annotated[float | None, _setting("catalog_s")] = None,
    check_s: Annotated[float | None, _setting("check_s")] = None,
    webhook: Annotated[str | None, _setting("webhook", "URL")] = None,
    recheck_s: Annotated[float | None, _setting("recheck_s")] = None,
    stop_s: Annotated[float | None, _setting("stop_s")] = None,
    deadline_s: Annotated[float | None, _setting("deadline_s")] = None,
    state: Annotated[str | None, _setting("state", "DIR")] = None,
    accept_commands: Annotated[bool | None, _setting("accept_commands")] = None,
    key_file: Annotated[str | None, _setting("key_file", "FILE")] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of prune: runs that changed longer ago: 30d.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", metavar="BYTES", help="Of prune: what may stay; the oldest go: 2TB.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Of prune: do it; without, it only says what it would do.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Ship the runs of this node to a store while they grow.

    Without an ACTION it ships until SIGTERM. Whoever reads at the destination sees whole runs at every moment.
    `status` says what a daemon of this node is at. `prune` removes runs there, and `keep` keeps them from it. Each
    setting can stand in the file, or in the environment as RECORDERD_NAME.

    Exit code 1: with --once, something is not there; with status, no daemon is at work.
    """
    if action not in _ACTIONS:
        raise LookupFailedError(f"{action}: expected one of {', '.join(_ACTIONS)}")
    if runs and action in ("ship", "status"):
        raise LookupFailedError(f"{action}: takes no RUN; folders are named with --watch")
    try:
        from ...daemon import daemon as _  # noqa: F401 # all that it needs is installed
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "prometheus_client":
            raise
        raise ConfigError(not_installed("recorder daemon", "prometheus_client", "daemon")) from None
    given = locals()
    arguments = {item.name: given.get(item.name) for item in fields(DaemonSettings)}
    settings = load_daemon_settings(config, arguments)
    if action == "status":
        return _status(settings, as_json=as_json)
    if action == "ship":

        def load() -> DaemonSettings:
            loaded = load_daemon_settings(config, arguments)
            return loaded if loaded.watch else replace(loaded, watch=(default_folder(),))

        return _ship(load(), load, once=once)
    return _keep_house(action, settings, runs or [], older_than, max_bytes, is_wanted=yes, as_json=as_json)


def _ship(settings: DaemonSettings, reload: Callable[[], DaemonSettings], *, once: bool) -> int:
    from ...daemon.daemon import Daemon
    from ...daemon.telemetry import log_to_stderr

    log_to_stderr(settings.log)
    daemon = Daemon(settings, reload)
    if once:
        code = daemon.run_once()
        num_uploads, num_bytes = (daemon.counters.total(name) for name in ("uploads", "uploaded_bytes"))
        news = f"{counted(num_uploads, 'upload')} with {size(num_bytes)}" if num_uploads else "nothing new"
        lacking = [f"{counted(daemon.left, 'file')} not there"] if daemon.left else []
        if daemon.unshipped:
            lacking.append(f"not shipped: {listed(map(printable_line, sorted(daemon.unshipped)))}")
        if num_pruned := sum(run.there.was_pruned for run in daemon.runs):
            lacking.append(f"{counted(num_pruned, 'run')} pruned there and not put again")
        rest = "; ".join(lacking) or ("not everything is there" if code else "all files are there")
        say(f"{counted(len(daemon.runs), 'run')}: {news}; {rest}")
    else:
        code = daemon.run()
    if daemon.is_parked:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an upload that hangs must not keep the process from its end
    return code


def _status(settings: DaemonSettings, *, as_json: bool) -> int:
    from ...daemon.node import running, state_folder

    daemons = running(state_folder(settings.state))
    if as_json:
        print_json({"daemons": daemons})
        return int(not daemons)
    if not daemons:
        say("no daemon is at work here")
    for one in daemons:
        num_left = counted(one.get("backlog_files", 0), "file")
        say(
            f"process {one.get('pid')} ships {', '.join(one.get('watch', ()))} to {one.get('to')}: "
            f"{counted(one.get('runs', 0), 'run')}, of which {one.get('settled', 0)} there as a whole; "
            f"{num_left} with {size(one.get('backlog_bytes', 0))} to go; "
            f"{counted(one.get('uploads', 0), 'upload')} with {size(one.get('uploaded_bytes', 0))} since it began"
        )
        if url := one.get("url"):
            say(f"metrics: {url}/metrics")
        if one.get("problem"):
            say(f"the store fails: {printable_line(one['problem'])}")
        if one.get("conflicts"):
            say(f"{counted(one['conflicts'], 'conflict')}: something else is there under the name of a file")
        if time.time() - one.get("time_s", 0) > 60:
            say(f"it has said nothing since {moment(int(one.get('time_s', 0) * 1e9))}")
    return int(not daemons)


def _keep_house(
    action: str,
    settings: DaemonSettings,
    runs: list[str],
    older_than: str | None,
    max_bytes: str | None,
    *,
    is_wanted: bool,
    as_json: bool,
) -> int:
    from ...daemon.destination import Throttle, parse_destination
    from ...daemon.keeping import find_key, plan_prune, prune, set_keep

    if not settings.to:
        raise ConfigError(f"{action}: needs --to, the URL below which the runs are")
    destination = parse_destination(settings.to, Throttle(0))
    if action != "prune" and not runs:
        raise LookupFailedError(f"{action}: name a run below {destination.url}")
    names = [find_key(destination, name.removeprefix(destination.url).strip("/")) for name in runs]
    if action != "prune":
        for name in names:
            set_keep(destination, name, is_kept=action == "keep")
        return 0
    if not (names or older_than or max_bytes):
        raise LookupFailedError("prune: say what goes: --older-than TIME, --max-bytes BYTES or RUN")
    plans = plan_prune(
        destination,
        older_than_s=duration_s("--older-than", older_than) if older_than else None,
        max_bytes=num_bytes("--max-bytes", max_bytes) if max_bytes else None,
        names=names,
    )
    rows, problems = [], 0
    for plan in plans:
        state = "stays" if not plan.goes else "would go"
        if plan.goes and is_wanted:
            try:
                state = "removed" if prune(destination, plan.run) else "stays: it has changed just now"
            except StoreError as error:
                state, problems = f"failed: {error}", 1
        rows.append([plan.run.key, size(plan.run.num_bytes), str(plan.run.num_objects), state, plan.why])
    if as_json:
        names_of_columns = ("run", "bytes", "objects", "state", "why")
        values = [
            (plan.run.key, plan.run.num_bytes, plan.run.num_objects, row[3], plan.why)
            for plan, row in zip(plans, rows, strict=True)
        ]
        print_json({"runs": [dict(zip(names_of_columns, value, strict=True)) for value in values]})
        return problems
    titles = ("run", "size", "objects", "what", "why")
    print_table(Table([TableColumn(title=title, is_number=title in ("size", "objects")) for title in titles], rows))
    if not is_wanted and any(plan.goes for plan in plans):
        say("nothing was removed: --yes does it")
    return problems
