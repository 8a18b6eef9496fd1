"""The options that several commands share, the completions for a shell, and the workers of `--scheduler`.

Completions are names of runs and paths of modules. Completing opens no shard. A word is offered only if it is harmless
to every shell, because the name of a module is untrusted input. The code that finds runs is imported when the shell
asks for completions.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import LookupFailedError, RecorderError

if TYPE_CHECKING:
    from ..run.step_ranges import Mapper


_HARMLESS = re.compile(r"[A-Za-z0-9._=+@/-]+")
_MAX_BACK = 9
"""The number of newest runs that are offered as ``@-1``, ``@-2`` and so on."""


def complete_run(incomplete: str) -> list[str]:
    """Offer runs by name, runs by age if ``@`` was typed, and folders."""
    return _offered(incomplete, _runs)


def _complete_run_or_module(incomplete: str) -> list[str]:
    return _offered(incomplete, _runs) + _offered(incomplete, lambda _: _modules(None))


def _complete_module(context: typer.Context, incomplete: str) -> list[str]:
    return _offered(incomplete, lambda _: _modules(context.params.get("path")))


def _offered(incomplete: str, words: Callable[[str], Iterable[str]]) -> list[str]:
    before = logging.root.manager.disable
    logging.disable()  # a log line would break the line that the user is typing
    try:
        candidates = dict.fromkeys(words(incomplete))
    except (RecorderError, OSError):
        return []
    finally:
        logging.disable(before)
    return [word for word in candidates if word.startswith(incomplete) and _HARMLESS.fullmatch(word)]


def _runs(incomplete: str) -> Iterator[str]:
    from ..run.finding import default_folder, has_manifest, runs_in, scheme_of

    if scheme_of(incomplete) is not None:
        return  # to list a folder in a store costs a request
    folder, slash, _ = incomplete.rpartition("/")
    typed = folder + slash
    for folder_path in dict.fromkeys([Path(typed)] if typed else [Path(default_folder()), Path()]):
        if folder_path.is_dir():
            runs = runs_in(folder_path)[::-1]
            yield from (f"{typed}{run.name}" for run in runs)
            if incomplete.startswith(f"{typed}@"):
                yield from (f"{typed}@-{number + 1}" for number in range(min(len(runs), _MAX_BACK)))
            if runs:
                yield f"{typed}latest"
    yield from (f"{typed}{path.name}/" for path in Path(typed).iterdir() if path.is_dir() and not has_manifest(path))


def _modules(run: str | None) -> Iterator[str]:
    from ..run.finding import find_run, first_modules

    path_of_run, _ = find_run(run)
    if isinstance(path_of_run, Path):
        yield from first_modules(path_of_run)


def run_argument(metavar: str, help: str) -> Any:
    """Return an argument that names a run."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=complete_run)


def run_option(*names: str, help: str) -> Any:
    """Return an option that names a second run."""
    return typer.Option(*names, metavar="RUN", help=help, autocompletion=complete_run)


def out_option(metavar: str, help: str) -> Any:
    """Return the option for the file or the folder that a command writes."""
    return typer.Option("-o", "--out", metavar=metavar, help=help, parser=local_path)


def path_option(metavar: str, help: str) -> Any:
    """Return an option that names a file or a folder on a disk."""
    return typer.Option(metavar=metavar, help=help, parser=local_path)


def local_path(text: str) -> Path:
    """Return the path of a file or directory on a disk. Raise LookupFailedError for a path in an object store."""
    from ..run.finding import scheme_of

    if not text:
        raise LookupFailedError("an empty text is no path; name a file or a directory")
    if text == "-":
        raise LookupFailedError("-: name a file; no command writes one to standard output (./- is a file of that name)")
    if (scheme := scheme_of(text)) is not None:
        where = f"{scheme}:// is only read from; name a path on a disk, and copy it up afterwards"
        raise LookupFailedError(f"{text}: {where}")
    return Path(text)


_RUNS = (
    "A run's path or name, or its beginning; latest, @-2 (the last but one), FOLDER/@-1; also s3://... A folder means "
    "its newest run, and without RUN it is RECORDER_DIR."
)
RunPath = Annotated[str | None, run_argument("RUN", _RUNS)]  # a pathlib path would turn s3://bucket into s3:/bucket
RunsPath = Annotated[
    str | None,
    typer.Argument(metavar="RUNS", help="A folder or a store of runs, or one run. Default: the folder of runs here."),
]
CatalogPlace = Annotated[
    str | None,
    typer.Option(
        "--catalog", metavar="WHERE", help="A folder for a catalog in SQLite, or one that pyiceberg is configured for."
    ),
]
RunOrModule = Annotated[str | None, typer.Argument(metavar="RUN", help=_RUNS, autocompletion=_complete_run_or_module)]
KeyFile = Annotated[
    str | None, typer.Option("--key-file", metavar="FILE", help="For a run in a store: its daemons' key.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
_MODULES = "a path, globs or re:... with commas, !... to leave out; '' is the root"
ModulePatterns = Annotated[
    str | None,
    typer.Argument(metavar="MODULE", help=f"Modules: {_MODULES}. By default all.", autocompletion=_complete_module),
]
ModuleOption = Annotated[
    str | None, typer.Option(help=f"Only these modules: {_MODULES}.", autocompletion=_complete_module)
]
SiteOption = Annotated[str | None, typer.Option(help="Only these sites: output, grad, param,... with commas.")]
NameOption = Annotated[
    str | None, typer.Option(help="Only these names at the site, written like modules: weight, *.exp_avg.")
]
StepOption = Annotated[str | None, typer.Option(help="Steps: 7, 0:100, ::10, 0,5,7 or pow2.")]
RootOption = Annotated[
    str | None, typer.Option(help="Only these models, if a run has several: model, model_1,... written like modules.")
]
RankOption = Annotated[str | None, typer.Option(help="Ranks, written like steps.")]
LossOption = Annotated[
    str,
    typer.Option(
        help="How a rank's loss follows from its batch: mean (activation gradients are divided by the ranks), "
        "sum (they are taken as they are) or weighted (mean over ragged batches)."
    ),
]
LayoutOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=LAYOUT",
        help="The layout of some values over ranks, instead of the inferred one: PATTERN is written like modules, and "
        "matches module_path:site:name; LAYOUT is shard(DIM), replicate, partial(sum), "
        "partial(avg) or per_rank. Repeatable; if several fit a value, the last one is used.",
    ),
]
PartialOption = Annotated[bool, typer.Option("--partial", help="Compute values that lack ranks from the other ranks.")]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Use the workers of a Dask or Ray cluster: the address of its scheduler, such as tcp://host:8786 "
        "or ray://host:10001. They need the same file system and the same versions; the result is the same to the "
        "last byte.",
    ),
]


@contextmanager
def mapper_for(scheduler: str | None) -> Iterator[Mapper]:
    """Yield a function that maps over ranges of steps, either in this process or on the workers of a cluster."""
    from ..run.step_ranges import map_serially, spread_over
    from ..system.executors import open_cluster

    if scheduler is None:
        yield map_serially
        return
    with open_cluster(scheduler) as (executor, num_workers):
        yield spread_over(executor, num_workers)


def refuse(why: str, **options: object) -> None:
    """Raise LookupFailedError if an option was given that would have no effect. The message ends with `why`."""
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise LookupFailedError(f"{' and '.join(given)}: {why}")
