"""Makes the tables `runs`, `rows`, `probe` and `findings` of many runs, for SQL queries or an Iceberg catalog.

`rows` has a row for each recorded value, without the value's bytes. Memory holds one range of steps at a time. A
catalog takes each table of a run as a whole, in one transaction, and `runs` last. So a run whose registration was
killed is registered again later. pyiceberg and duckdb are imported where a caller asks for them.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from ...columns import METADATA_COLUMNS, SCHEMA
from ...errors import CorruptError, LookupFailedError, RecorderError, RunError, UnsupportedError, not_installed
from ...run.finding import find_folder, find_run, runs_in
from ...run.listing import state_of
from ...run.notes import strays
from ...run.probe import PROBE_SCHEMA, probe_tables
from ...run.reply import Aside, Reply, Table
from ...run.run import Run, open_run
from ...run.step_ranges import Attempts, Mapper, map_serially
from ...system.text import counted
from ..check.check import check

_MAX_ROWS = 1 << 19
"""The most rows in memory at once, at 1 to 2 kB each; a single step may have more rows."""
_OF_RUN = [("run_id", pa.string()), ("day", pa.date32())]
TABLES: dict[str, pa.Schema] = {
    "rows": pa.schema([*_OF_RUN, *((n, SCHEMA.field(n).type) for n in METADATA_COLUMNS)]),
    "probe": pa.schema(
        [*_OF_RUN, *((f.name, getattr(f.type, "value_type", f.type)) for f in PROBE_SCHEMA)]
    ),
    "findings": pa.schema(
        [
            *_OF_RUN,
            *((name, pa.string()) for name in ("rule", "severity", "root", "module_path", "site", "name", "text")),
            *((name, pa.int64()) for name in ("step", "first_step")),
            *((name, pa.float64()) for name in ("value", "threshold")),
            *(("ranks", pa.list_(pa.int64())), ("hosts", pa.list_(pa.string())), ("cause", pa.string())),
        ]
    ),
    "runs": pa.schema(
        [
            *_OF_RUN,
            *((name, pa.string()) for name in ("name", "path", "state")),
            ("created", pa.timestamp("us", "UTC")),
            *((name, pa.int64()) for name in ("world_size", "num_ranks", "first_step", "last_step", "num_rows")),
            *((name, pa.int64()) for name in ("num_probe_rows", "size_bytes", "num_problems")),
            ("hosts", pa.list_(pa.string())),
        ]
    ),
}  # fmt: skip
"""The schemas of the tables, `runs` last. `day` is the day in UTC on which a run was created."""


def tables_of(
    run: Run, names: Collection[str] = tuple(TABLES), *, max_rows: int = _MAX_ROWS, mapper: Mapper = map_serially
) -> Iterator[tuple[str, Any]]:
    """Yield the tables of a run in parts, as (table's name, part). A part has at most about `max_rows` rows."""
    makers: dict[str, Callable[[Run], Iterator[Any]]]
    makers = {"probe": _probe, "findings": partial(_findings, mapper=mapper), "runs": _run}
    makers["rows"] = partial(_rows, max_rows=max_rows)
    created = datetime.fromtimestamp((run.manifest.created_ns or 0) / 1e9, UTC)
    for name in (one for one in TABLES if one in names):
        for part in makers[name](run):
            known = {column: part.column(column) for column in part.column_names}
            known |= {"run_id": pa.repeat(run.run_id, len(part)), "day": pa.repeat(created.date(), len(part))}
            if "created" in TABLES[name].names:
                known["created"] = pa.repeat(created, len(part))
            yield name, pa.table([known[field.name].cast(field.type) for field in TABLES[name]], TABLES[name])


def _run(run: Run) -> Iterator[Any]:
    steps, hosts = run.steps, sorted({writer.manifest.host or "" for writer in run.writers})
    yield pa.Table.from_pylist(
        [
            {
                "name": run.name, "path": str(run.path), "world_size": run.world_size, "num_ranks": len(run.ranks),
                "state": state_of(run),
                "first_step": steps[0] if steps else None, "last_step": steps[-1] if steps else None,
                "num_rows": run.num_all_rows, "num_probe_rows": run.num_all_rows - run.num_rows,
                "size_bytes": run.opened_bytes, "num_problems": len(run.problems) + sum(1 for _ in strays(run)),
                "hosts": hosts,
            }
        ],
        pa.schema([field for field in TABLES["runs"] if field.name not in ("run_id", "day", "created")]),
    )  # fmt: skip


def _findings(run: Run, *, mapper: Mapper) -> Iterator[Any]:
    hosts = {writer.rank: writer.manifest.host or "" for writer in run.writers}
    found = [
        {
            **one._asdict(), "severity": one.severity.word, "first_step": one.first_step, "text": one.text,
            "ranks": list(one.ranks), "hosts": sorted({hosts[rank] for rank in one.ranks if rank in hosts}),
        }
        for one in check(run, mapper=mapper).findings
    ]  # fmt: skip
    yield pa.Table.from_pylist(found, pa.schema(list(TABLES["findings"])[2:]))


def _probe(run: Run) -> Iterator[Any]:
    for writer in run.writers:
        with suppress(CorruptError):  # the error counts as damage of the run from now on
            yield from probe_tables([writer])


def _rows(run: Run, *, max_rows: int) -> Iterator[Any]:
    attempts = Attempts(run)
    for steps in run.view().windows(max_rows):
        yield attempts.counting(run.table(list(METADATA_COLUMNS), steps=steps))


CONFIGURED = "recorder"
"""The name of the catalog that is used without `--catalog`, if pyiceberg's configuration has a catalog of this name."""
_BY_RUN = ("rows", "probe")
"""The tables with many rows for each run; their files are partitioned by run and day."""
_MAX_FILES = 64
"""The most files of a table that is not partitioned; a table with more files is rewritten as one."""
_KEPT = timedelta(days=1)
"""How long files that a later registration has replaced are kept for their readers."""


def is_configured(name: str) -> bool:
    """Return whether pyiceberg is configured for a catalog of this name. Raise UnsupportedError without pyiceberg."""
    try:
        from pyiceberg.utils.config import Config
    except ImportError:
        raise UnsupportedError(not_installed("a catalog", "pyiceberg", "catalog")) from None
    return name in Config().get_known_catalogs()


class RunTables:
    """The tables in an Iceberg catalog."""

    def __init__(self, where: str, *, is_new: bool = False) -> None:
        """Open the catalog that pyiceberg has configured as `where`, or else the SQLite catalog in the folder `where`.

        Raises LookupFailedError if the folder has no catalog. With `is_new`, a new catalog is made instead.
        """
        is_folder = not is_configured(where)
        from pyiceberg.catalog import load_catalog

        if is_folder and not is_new and not (Path(where) / "catalog.db").exists():
            raise LookupFailedError(f"{where}: no catalog; `recorder catalog --catalog {where}` makes one")
        if is_folder:
            folder = Path(where).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            sqlite = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
            self._catalog = load_catalog(CONFIGURED, **sqlite)
        else:
            self._catalog = load_catalog(where)
        self._catalog.create_namespace_if_not_exists(CONFIGURED)
        self._tables = {name: self._open(name, schema) for name, schema in TABLES.items()}
        known = self._tables["runs"].scan(selected_fields=("run_id", "size_bytes", "state")).to_arrow().to_pylist()
        self._registered = {row["run_id"]: (row["size_bytes"], row["state"]) for row in known}

    def _open(self, name: str, schema: Any) -> Any:
        table = self._catalog.create_table_if_not_exists(
            f"{CONFIGURED}.{name}", schema, properties={"write.metadata.delete-after-commit.enabled": "true"}
        )
        if name in _BY_RUN and not table.spec().fields:
            with table.update_spec() as update:
                update.add_identity("run_id")
                update.add_identity("day")
        # The table is of an older version.
        if missing := set(schema.names) - {field.name for field in table.schema().fields}:
            with table.update_schema() as evolution:
                evolution.union_by_name(pa.schema([field for field in schema if field.name in missing]))
        return table

    def has(self, run: Run) -> bool:
        """Return whether the tables have the run in its present size and state."""
        return self._registered.get(run.run_id) == (run.opened_bytes, state_of(run))

    def register(self, run: Run, mapper: Mapper = map_serially) -> int:
        """Write the run into the tables, in place of its earlier rows. Return how many rows it has in `rows`."""
        from pyiceberg.expressions import EqualTo

        num_rows = 0
        for name, parts in groupby(tables_of(run, mapper=mapper), lambda part: part[0]):
            with self._tables[name].transaction() as change, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Delete operation did not match any records")
                change.delete(EqualTo("run_id", run.run_id))  # type: ignore[call-arg, arg-type] # its checker needs a plugin
                for _, part in parts:
                    num_rows += len(part) * (name == "rows")
                    if len(part):
                        change.append(part)
        return num_rows

    def tidy(self) -> None:
        """Join the files of tables with many files. Delete files that only table versions older than a day use."""
        for name, table in self._tables.items():
            if name not in _BY_RUN and len(table.inspect.files()) > _MAX_FILES:
                table.overwrite(table.scan().to_arrow())
            before = set(table.inspect.all_data_files().column("file_path").to_pylist())
            table.maintenance.expire_snapshots().older_than(datetime.now() - _KEPT).commit()
            for path in before - set(table.refresh().inspect.all_data_files().column("file_path").to_pylist()):
                table.io.delete(path)

    def dataset(self, name: str) -> Any:
        """Return a table as a pyarrow dataset. DuckDB reads from it only the columns and files that a query needs."""
        import pyarrow.dataset as ds
        from pyiceberg.io.pyarrow import PyArrowFileIO

        table = self._tables[name]
        schema = table.schema().as_arrow()
        tasks = list(table.scan().plan_files())
        if any(task.delete_files for task in tasks):
            raise UnsupportedError(f"{name}: another program has deleted rows; read the table with that program")
        if not tasks:
            return schema.empty_table()
        io = PyArrowFileIO(table.io.properties)
        places = [io.parse_location(task.file.file_path) for task in tasks]
        filesystem = io.fs_by_scheme(*places[0][:2])
        return ds.dataset([path for *_, path in places], schema, format="parquet", filesystem=filesystem)


@contextmanager
def opened_tables(where: str, *, is_new: bool = False) -> Iterator[RunTables]:
    """Open `RunTables`. Raise LookupFailedError if the catalog's database is locked or stops answering in the block."""
    is_configured(where)  # this raises UnsupportedError without pyiceberg, which installs SQLAlchemy
    from sqlalchemy.exc import OperationalError

    try:
        yield RunTables(where, is_new=is_new)
    except OperationalError as error:
        raise LookupFailedError(
            f"{where}: the catalog's database does not answer ({error.orig}); where it is locked, another program holds"
            " it, such as a `recorder catalog` at work: try again once that has ended"
        ) from None


class Answered(NamedTuple):
    """The columns and rows that an SQL query returns."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def ask(question: str, of: Iterable[Run] | RunTables) -> Answered:
    """Run an SQL query with DuckDB on a catalog, or on those tables of some runs that the query names.

    Raises LookupFailedError if the query does more than read. If the query is wrong, the message is DuckDB's own.
    """
    try:
        import duckdb
    except ImportError:
        raise UnsupportedError(not_installed("recorder sql", "duckdb", "catalog")) from None
    with duckdb.connect() as connection:
        try:
            statements = duckdb.extract_statements(question)
            if not statements:
                raise LookupFailedError("the query is empty; an example: select name, state, last_step from runs")
            kinds = {one.type.name for one in statements} - {"SELECT", "EXPLAIN", "MULTI"}
            if kinds:  # DuckDB calls a PIVOT statement MULTI
                raise LookupFailedError(f"the query: {', '.join(sorted(kinds))}: expected only SELECT")
            if len(statements) > 1:
                raise LookupFailedError(f"the query: {len(statements)} statements; ask one at a time")
            for name, schema in TABLES.items():
                connection.register(f"_{name}", schema.empty_table())
                connection.execute(f"create table {name} as from _{name}")
            names = {name for name in TABLES if re.search(rf"\b{name}\b", question, re.IGNORECASE)}
            if isinstance(of, RunTables):
                for name in names:
                    connection.execute(f"drop table {name}")
                    connection.register(name, of.dataset(name))
            else:
                for name, part in (one for run in of for one in tables_of(run, names)):
                    connection.register("_part", part)
                    connection.execute(f"insert into {name} from _part")
            connection.execute("set enable_external_access = false")  # queries may read the tables, but no files
            asked = connection.execute(question)
            return Answered([column[0] for column in asked.description or ()], asked.fetchall())
        except duckdb.Error as error:
            text = "; ".join(line.strip() for line in str(error).splitlines()[:2])
            raise LookupFailedError(f"the query: {text}") from None


def _opened_runs(path: str | None, problems: list[str]) -> Iterator[Run]:
    """Yield the run, or each run of the folder, that `path` names. Add texts to `problems` for unreadable runs.

    Merged runs are left out, because their values are those of the runs that they were merged from.
    """
    folder = find_folder(path)
    if folder is None:
        yield open_run(path)
        return
    for found in runs_in(folder):
        try:
            if found.run_id or not find_run(found.location)[1].merged_from:
                yield open_run(found.location)
        except RunError as error:
            problems.append(str(error))


def sql_reply(question: str, path: str | None, catalog: str | None) -> Reply:
    """Return the reply of `recorder sql` on a catalog, or else on the run, or the runs of the folder, `path`."""
    problems: list[str] = []

    def opened() -> Iterator[Run]:
        for run in _opened_runs(path, problems):
            yield run
            problems.extend(run.problems)

    with opened_tables(catalog) if catalog else nullcontext(opened()) as tables:
        answer = ask(question, tables)
    rows = [["" if value is None else str(value) for value in row] for row in answer.rows]
    columns = zip(answer.columns, *answer.rows, strict=True)
    numbers = [name for name, *cells in columns if all(isinstance(cell, (int, float)) for cell in cells)]
    nonfinite = [
        {"row": number, "column": column, "value": repr(value)}
        for number, row in enumerate(answer.rows)
        for column, value in zip(answer.columns, row, strict=True)
        if isinstance(value, float) and not math.isfinite(value)
    ]
    plain = json.loads(json.dumps(answer.rows, default=str))
    return Reply(
        members=lambda: {"columns": answer.columns, "rows": plain, "nonfinite": nonfinite, "problems": problems},
        parts=lambda: [*(Aside(f"note: {one}") for one in problems), Table(answer.columns, rows, numbers=numbers)],
        exit_code=int(bool(problems)),
    )


def catalog_reply(path: str | None, catalog: str | None, mapper: AbstractContextManager[Mapper]) -> Reply:
    """Register runs in a catalog, and return the reply of `recorder catalog`. `mapper` is entered once for all."""
    where = catalog or (CONFIGURED if is_configured(CONFIGURED) else None)
    if where is None:
        where = str((find_folder(path) or find_run(path)[0].parent) / "_catalog")
        if "://" in where:
            raise LookupFailedError(f"--catalog: name a folder of this machine, or a catalog of pyiceberg, for {path}")
    registered: dict[str, int] = {}
    problems: list[str] = []
    num_known = 0

    def lines() -> Iterator[str | Aside]:
        yield from (Aside(f"finding: {problem}") for problem in problems)
        rows = counted(sum(registered.values()), "row")
        yield f"{where}: {counted(len(registered), 'run')} registered, {rows}; {num_known} were registered already"

    with mapper as each, opened_tables(where, is_new=True) as tables:
        for run in _opened_runs(path, problems):
            try:
                if tables.has(run):
                    num_known += 1
                    continue
                registered[str(run.path)] = tables.register(run, each)
                problems.extend(run.problems)
            except RecorderError as error:
                problems.append(str(error))
        tables.tidy()
    return Reply(
        members=lambda: {"catalog": where, "registered": registered, "unchanged": num_known, "problems": problems},
        parts=lines,
        exit_code=int(bool(problems)),
    )
