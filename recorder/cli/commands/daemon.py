"""Ships the runs of this node to a store, and prunes or protects runs there."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ...config import read_bytes
from ...daemon.settings import DaemonSettings, duration_s, load_daemon_settings
from ...errors import ConfigError, LookupFailedError, StoreError, not_installed
from ...run.finding import default_folder
from ...run.reply import Part, Reply, table_of
from ...system.text import counted, listed, moment, printable_line, size
from ..output import say

if TYPE_CHECKING:
    from ...daemon.destination import Destination

EXAMPLES = {
    "daemon": (
        "recorder daemon --once --watch recordings --to archive",
        "recorder daemon prune --to archive --older-than 30d",
    ),
}

_SILENT_S = 60
"""A daemon's state that is older than this many seconds is printed with its time."""
_ACTIONS = ("ship", "status", "prune", "keep", "unkeep")


def daemon_command(
    action: Annotated[str, typer.Argument(metavar="ACTION", help=f"One of {', '.join(_ACTIONS)}.")] = "ship",
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Of prune, keep and unkeep: names of runs below --to.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Ship what is here now, and end: for an epilog.")] = False,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="A TOML file of these settings, read again after SIGHUP.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of prune: runs that changed longer ago: 30d.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", metavar="BYTES", help="Of prune: what may stay; the oldest go: 2TB.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Of prune: do it; without, it only says what it would do.")
    ] = False,
    **given: Any,
) -> Reply:
    """Ship the runs of this node to a store while they grow.

    Without an ACTION the daemon ships until SIGTERM. Readers at the destination see complete runs at any time. `status`
    shows what the daemons of this node are doing. `prune` removes runs from the destination, and `keep` protects runs
    from that. Each setting can be set in the file, or in the environment as RECORDERD_NAME.

    Exit code 1: with --once, not all files are at the destination, or a run here is damaged or holds files that are
    none of its own; with status, no daemon is running.
    """
    if action not in _ACTIONS:
        raise LookupFailedError(f"{action}: expected one of {', '.join(_ACTIONS)}")
    if runs and action in ("ship", "status"):
        raise LookupFailedError(f"{action}: takes no RUN; folders are named with --watch")
    try:
        from ...daemon import daemon as _  # noqa: F401 # ImportError if a package of the daemon is missing
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "prometheus_client":
            raise
        raise ConfigError(not_installed("recorder daemon", "prometheus_client", "daemon")) from None
    settings = load_daemon_settings(config, given)
    if action == "status":
        return _status_reply(settings)
    if action == "ship":

        def load() -> DaemonSettings:
            loaded = load_daemon_settings(config, given)
            return loaded if loaded.watch else replace(loaded, watch=(default_folder(),))

        _ship(load(), load, once=once)
    if action == "prune":
        return _prune_reply(settings, runs or [], older_than, max_bytes, is_wanted=yes)
    return _mark_reply(action, settings, runs or [])


def _option(item: Field[Any]) -> inspect.Parameter:
    """Return the command-line option for a setting of the daemon. An option that is not given is None."""
    doc, metavar, default = item.metadata["doc"], item.metadata["metavar"], item.default
    kind = list[str] if isinstance(default, tuple) else str if metavar else type(default)
    shown = f" ({default:g})" if isinstance(default, (int, float)) and default else f" ({default})" if default else ""
    text = f"{doc[0].upper()}{doc[1:]}{shown}."
    option = typer.Option(f"--{item.name.replace('_', '-')}", metavar=metavar, help=text)
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_signature = inspect.signature(daemon_command, eval_str=True)
daemon_command.__signature__ = _signature.replace(  # type: ignore[attr-defined] # typer reads it
    parameters=[*list(_signature.parameters.values())[:-1], *map(_option, fields(DaemonSettings))]
)


def _ship(settings: DaemonSettings, reload: Callable[[], DaemonSettings], *, once: bool) -> NoReturn:
    """Ship until the daemon ends. End this process with the daemon's exit code. The daemon logs what it does."""
    from ...daemon.daemon import Daemon
    from ...daemon.telemetry import log_to_stderr

    log_to_stderr(settings.log)
    daemon = Daemon(settings, reload)
    if once:
        code = daemon.run_once()
        num_uploads, num_bytes = (daemon.counters.total(name) for name in ("uploads", "uploaded_bytes"))
        news = f"{counted(num_uploads, 'upload')} with {size(num_bytes)}" if num_uploads else "nothing new"
        left = sorted(map(printable_line, daemon.left))
        lacking = [f"{counted(len(left), 'file')} not there: {listed(left)}"] if left else []
        if daemon.unshipped:
            lacking.append(f"not shipped: {listed(map(printable_line, sorted(daemon.unshipped)))}")
        if daemon.strangers:
            lacking.append(f"part of no run, and not shipped: {listed(map(printable_line, daemon.strangers))}")
        lacking += [f"damaged here: {printable_line(why)}" for why in daemon.damaged]
        if num_pruned := sum(run.there.was_pruned for run in daemon.runs):
            lacking.append(f"{counted(num_pruned, 'run')} pruned at the destination, and not uploaded again")
        rest = "; ".join(lacking) or ("not everything is there" if code else "all files are there")
        removed = daemon.counters.total("removed_runs")
        gone = f"; {counted(removed, 'run')} removed here" if removed else ""
        say(f"{counted(len(daemon.runs), 'run')}: {news}; {rest}{gone}")
    else:
        code = daemon.run()
    if daemon.is_parked:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an upload that hangs must not delay the end of the process
    raise typer.Exit(code)


def _status_reply(settings: DaemonSettings) -> Reply:
    from ...daemon.telemetry import running, state_folder

    daemons = running(state_folder(settings.state))
    return Reply(
        members=lambda: {"daemons": daemons},
        parts=lambda: [line for one in daemons for line in _status_lines(one)] or ["no daemon is at work here"],
        exit_code=int(not daemons),
    )


def _status_lines(one: dict[str, Any]) -> Iterator[str]:
    runs = f"{counted(one.get('runs', 0), 'run')}, of which {one.get('settled', 0)} there completely"
    left = f"{counted(one.get('backlog_files', 0), 'file')} with {size(one.get('backlog_bytes', 0))} to go"
    done = f"{counted(one.get('uploads', 0), 'upload')} with {size(one.get('uploaded_bytes', 0))} since it began"
    yield f"process {one.get('pid')} ships {', '.join(one.get('watch', ()))} to {one.get('to')}: {runs}; {left}; {done}"
    if url := one.get("url"):
        yield f"metrics: {url}/metrics"
    if problem := one.get("problem"):
        yield f"the store fails: {problem}"
    if one.get("conflicts"):
        yield f"{counted(one['conflicts'], 'conflict')}: something else is there under the name of a file"
    if time.time() - one.get("time_s", 0) > _SILENT_S:
        yield f"it has said nothing since {moment(int(one.get('time_s', 0) * 1e9))}"


def _destination(action: str, settings: DaemonSettings) -> Destination:
    from ...daemon.destination import parse_destination

    if not settings.to:
        raise ConfigError(f"{action}: needs --to, the URL below which the runs are")
    destination = parse_destination(settings.to)
    if destination.path is not None and not destination.path.is_dir():
        raise LookupFailedError(f"{action}: {destination.path}: no such directory; --to names where the runs are")
    return destination


def _keys(destination: Destination, runs: list[str]) -> list[str]:
    from ...daemon.fleet import find_key

    return [find_key(destination, name.removeprefix(destination.url).strip("/")) for name in runs]


def _mark_reply(action: str, settings: DaemonSettings, runs: list[str]) -> Reply:
    """Set or remove the marks that protect runs from every prune."""
    from ...daemon.fleet import set_keep

    destination = _destination(action, settings)
    if not runs:
        raise LookupFailedError(f"{action}: name a run below {destination.url}")
    keys = _keys(destination, runs)
    for key in keys:
        set_keep(destination, key, is_kept=action == "keep")
    said = f"{listed(keys)}: {'kept: no prune removes it' if action == 'keep' else 'a prune may remove it again'}"
    return Reply(members=lambda: {"runs": keys, "is_kept": action == "keep"}, parts=lambda: [said])


def _prune_reply(
    settings: DaemonSettings, runs: list[str], older_than: str | None, max_bytes: str | None, *, is_wanted: bool
) -> Reply:
    from ...daemon.fleet import plan_prune, prune, run_names

    if not (runs or older_than or max_bytes):
        raise LookupFailedError("prune: say what goes: --older-than TIME, --max-bytes BYTES or RUN")
    destination = _destination("prune", settings)
    names = _keys(destination, runs)
    plans = plan_prune(
        destination,
        older_than_s=duration_s("--older-than", older_than) if older_than else None,
        max_bytes=read_bytes("--max-bytes", max_bytes) if max_bytes else None,
        names=names,
    )
    called = run_names(destination, [plan.run.key for plan in plans])
    entries: list[dict[str, Any]] = []
    exit_code = 0
    for run, goes, why in plans:
        state = "would go" if goes else "stays"
        if goes and is_wanted:
            try:
                state = "removed" if prune(destination, run) else "stays: was changed or marked meanwhile"
            except StoreError as error:
                state, exit_code = f"failed: {error}", 1
        facts = {"run": run.key, "name": called[run.key], "bytes": run.num_bytes, "objects": run.num_objects}
        entries.append({**facts, "state": state, "why": why})

    def parts() -> Iterator[Part]:
        titles = ["run", "all files", "size of all", "what", "why", "directory"]
        rows = [
            [one["name"], str(one["objects"]), size(one["bytes"]), one["state"], one["why"], one["run"]]
            for one in entries
        ]
        if all(row[0] == row[-1] for row in rows):
            titles, rows = titles[:-1], [row[:-1] for row in rows]
        yield table_of(titles, rows, numbers=("all files", "size of all"))
        done = "removed" if is_wanted else "would go"
        gone = [one for one in entries if one["state"] == done]
        files, num_bytes = (sum(one[name] for one in gone) for name in ("objects", "bytes"))
        said = (
            f"{counted(len(gone), 'run')} of {len(entries):,} {done}: {counted(files, 'file')} with {size(num_bytes)}"
        )
        yield f"{said}; nothing was removed: --yes does it" if gone and not is_wanted else said

    nothing = [f"{destination.url}: holds no runs; nothing to remove"]
    return Reply(members=lambda: {"runs": entries}, parts=parts if entries else lambda: nothing, exit_code=exit_code)
