"""Ships the runs of this node to a store, and prunes or protects runs there."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import Field, fields, replace
from typing import Annotated, Any, NoReturn

import typer

from ...daemon.settings import DaemonSettings, load_daemon_settings
from ...errors import ConfigError, LookupFailedError, not_installed
from ...run.finding import default_folder
from ...run.reply import Reply
from ...system.text import counted, listed, printable_line, size
from ..output import say

EXAMPLES = {
    "daemon": (
        "recorder daemon --once --watch recordings --to archive",
        "recorder daemon prune --to archive --older-than 30d",
    ),
}

_ACTIONS = ("ship", "status", "prune", "keep", "unkeep")


def daemon_command(
    action: Annotated[str, typer.Argument(metavar="ACTION", help=f"One of {', '.join(_ACTIONS)}.")] = "ship",
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="For prune, keep and unkeep: names of runs below --to.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Ship this node's files and end: for an epilog.")] = False,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="TOML file of these settings; SIGHUP reloads the file.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="For prune: the least age of runs: 30d.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", metavar="BYTES", help="For prune: limit on what stays: 2TB.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="For prune: remove the runs. Without --yes, prune only lists them.")
    ] = False,
    **given: Any,
) -> Reply:
    """Ship the runs of this node to a store while they grow.

    Without an ACTION the daemon ships until SIGTERM. Readers at the destination see complete runs at any time. `status`
    shows what the daemons of this node are doing. `prune` removes runs from the destination, and `keep` protects runs
    from that. Each setting can be set in the file, or in the environment as RECORDERD_NAME.

    Exit code 1: with --once, not all files are at the destination, or a run on this node is damaged or holds foreign
    files; with status, no daemon is running.
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
    from ...daemon.fleet import keep_reply, prune_reply
    from ...daemon.telemetry import status_reply

    settings = load_daemon_settings(config, given)
    if action == "status":
        return status_reply(settings.state)
    if action == "ship":

        def load() -> DaemonSettings:
            loaded = load_daemon_settings(config, given)
            return loaded if loaded.watch else replace(loaded, watch=(default_folder(),))

        _ship(load(), load, once=once)
    if action == "prune":
        return prune_reply(settings.to, runs or [], older_than, max_bytes, is_wanted=yes)
    return keep_reply(settings.to, runs or [], is_kept=action == "keep")


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
        told = {"not shipped": sorted(daemon.unshipped), "part of no run, and not shipped": daemon.strangers}
        lacking += [f"{what}: {listed(map(printable_line, some))}" for what, some in told.items() if some]
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
