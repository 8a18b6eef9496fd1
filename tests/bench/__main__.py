"""Measurements, by name; without a name, what recording costs against other ways to record.

python -m tests.bench list             their names
python -m tests.bench --help           what recording costs
python -m tests.bench NAME --help      each of the others
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

BENCHES = {
    "blocks": "recording and not recording in one process, in turn",
    "curves": "how the cost grows with tensor size, records, modules, ranks, and the length of a run",
    "dask": "merging on a Dask cluster",
    "diff": "comparing two equal runs",
    "gpu": "recording on a GPU",
    "keep": "what a record costs in counts that hold on a busy machine, against stored ones",
    "kernels": "the inner loops of the writer",
    "merge": "merging, against decompressing and copying",
    "overhead": "what recording costs against other ways; what runs without a name",
    "programs": "what the flag alone costs small programs, from their start to their end",
    "records": "what one record costs the training thread, by site",
    "read": "opening, listing, reading one tensor, verifying",
    "scale": "very many ranks, modules and steps",
    "storage": "network file systems and object stores",
    "table": "the tables and the picture of what `--json` of `overhead` left",
    "taps": "taps in a compiled graph",
}
"""Each is a module of this package with `main(arguments) -> exit code`."""


def main(arguments: list[str]) -> int:
    name = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if name is None:
        name, arguments = "overhead", ["", *arguments]
    if name not in BENCHES:
        out = sys.stdout if name == "list" else sys.stderr
        if name != "list":
            print(f"tests.bench: no bench is called {name!r}; there are:", file=out)
        for known, text in BENCHES.items():
            print(f"  {known:10} {text}", file=out)
        return 0 if name == "list" else 2
    if importlib.util.find_spec(f"tests.bench.{name}") is None:
        print(f"tests.bench: {name} ({BENCHES[name]}) is not in this copy: tests/bench/{name}.py", file=sys.stderr)
        return 2
    code: int = importlib.import_module(f"tests.bench.{name}").main(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
