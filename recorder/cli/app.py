"""The command line: finds a command, runs it, and turns its result or error into an exit code.

Exit codes: 0 fine, 1 a finding, 2 misuse or unreadable input, 130 interrupted. An error of the package is printed as
one line on stderr, without a traceback. With --json, a document on stdout has the error, too.
"""

from __future__ import annotations

import inspect
import io
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..errors import RecorderError
from ..run.reply import Reply
from ..system.text import printable_line
from .commands import COMMANDS
from .options import Json
from .output import LineHandler, print_json, print_reply

_PACKAGE = (__package__ or "recorder").partition(".")[0]
_READER_GONE = 141
"""The exit code if the reader of the output is gone. A shell shows it for any program that SIGPIPE has ended."""
_MISUSE = 2
_INTERRUPTED = 130
_COMPLETION = ("--install-completion", "--show-completion")
_SHELL_IS_NAMED = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"
"""While this environment variable is set, typer's completion options take the name of a shell."""
_UsageError: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The base class of errors in the usage of commands. It comes from typer's own copy of click, or from click itself."""
_SETTINGS: dict[str, Any] = {"context_settings": {"help_option_names": ["-h", "--help"]}}


class _Commands(TyperGroup):
    """The group of all commands. Help and completion read `COMMANDS`. A call imports only the file of its command.

    Importing all commands takes half a second, most of it for pyarrow.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, help=summary) for name, (_, summary) in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Replace the placeholder of a command, which has only a summary, by the command in its file."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load_command(name), rest


def load_command(name: str) -> Any:
    """Import the file of a command, and make a typer command from it."""
    module = import_module(f".commands.{COMMANDS[name][0]}", __package__)
    single = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
    settings = _SETTINGS | getattr(module, "SETTINGS", {}).get(name, {})
    # The line with `\b` keeps typer from joining the lines below it.
    epilog = "\n".join(["\b", "Examples:", *(f"  {line}" for line in module.EXAMPLES[name])])
    single.command(name, epilog=epilog, **settings)(_printing(getattr(module, f"{name}_command")))
    return typer.main.get_command(single)


def _printing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that prints its `Reply`, with an added option ``--json``. Return other commands unchanged."""
    signature = inspect.signature(command, eval_str=True)
    if signature.return_annotation is not Reply:
        return command

    @wraps(command)
    def printing(*, as_json: bool, **arguments: Any) -> int:
        return print_reply(command(**arguments), as_json=as_json)

    option = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
    changed = signature.replace(parameters=[*signature.parameters.values(), option])
    printing.__signature__ = changed  # type: ignore[attr-defined] # typer reads it, and the annotations
    printing.__annotations__ = {name: one.annotation for name, one in changed.parameters.items()}
    return printing


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Look at what the recorder wrote while a model trained.",
    epilog="Record with: RECORDER=1 torchrun --nproc-per-node 2 train.py",
    **_SETTINGS,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"recorder {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Look at what the recorder wrote while a model trained."""


def run_command(arguments: list[str]) -> NoReturn:
    """Run one command and exit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without Unicode cannot print sparklines
    library = logging.getLogger(_PACKAGE)
    library.handlers = [LineHandler()]
    library.propagate = False
    stdout = sys.stdout
    if any(option in _COMPLETION and not word.startswith("-") for option, word in pairwise(arguments)):
        os.environ[_SHELL_IS_NAMED] = "1"
    try:
        sys.exit(app(arguments, prog_name="recorder", standalone_mode=False))
    except SystemExit:
        if sys.stdout is stdout:
            raise
        sys.exit(_READER_GONE)  # typer has replaced stdout, and would exit with 1, the code of a finding
    except typer.Abort:
        sys.exit(_INTERRUPTED)
    except _UsageError as error:
        error.show()
        message = error.format_message()
    except (RecorderError, OSError, MemoryError) as error:
        message = str(error) or "out of memory"
        print(f"recorder: {printable_line(message)}", file=sys.stderr)
    if "--json" in arguments:
        with suppress(OSError):  # if the disk is full, writing the message fails as well
            print_json({"error": {"message": message, "exit_code": _MISUSE}})
    sys.exit(_MISUSE)
