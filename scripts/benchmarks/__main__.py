"""Measurements, by name.

python -m scripts.benchmarks                  their names
python -m scripts.benchmarks overhead         what recording costs against other ways to record
python -m scripts.benchmarks NAME --help      the options of each
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

BENCHMARKS = {
    "blocks": "recording and not recording in one process, in turn",
    "clusters": "merging on a Dask and on a Ray cluster",
    "curves": "how the cost grows with tensor size, records, modules, ranks, and the length of a run",
    "daemon": "what the daemon costs its node: start, memory, idling, `ls` of a store, training beside it",
    "diff": "comparing two equal runs",
    "gpu": "recording on a GPU",
    "keep": "what a record costs in counts that hold on a busy machine, against stored ones",
    "kernels": "the inner loops of the writer",
    "merge": "merging, against decompressing and copying",
    "model": "what a step with the recorder takes, predicted from the number of its values and bytes",
    "objectives": "what the gradients of two and of three objectives cost a step",
    "overhead": "what recording costs, against other ways to record; an hour",
    "programs": "what the flag alone costs small programs, from their start to their end",
    "records": "what one record costs the training thread, by site",
    "read": "opening, listing, reading one tensor, verifying",
    "report": "the page of a run: its bytes, and how soon a browser draws it",
    "scale": "very many ranks, modules and steps",
    "storage": "what one rank asks of a network file system or an object store",
    "store_requests": "what each command asks of an object store",
    "synthetic": "runs of any size without a training, for `scale`; no measurement",
    "table": "the tables and the picture of what `--json` of `overhead` left",
    "taps": "taps in a compiled graph",
    "view": "the live page of a run: from a flush to the browser, and the server's memory",
}
"""Each is a module of this package with `main(arguments) -> exit code`."""


def main(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name not in BENCHMARKS:
        is_asked = name in ("-h", "--help")
        out = sys.stdout if is_asked else sys.stderr
        if not is_asked:
            print(f"scripts.benchmarks: no benchmark is called {name!r}; there are:", file=out)
        for known, text in BENCHMARKS.items():
            print(f"  {known:14} {text}", file=out)
        return 0 if is_asked else 2
    if importlib.util.find_spec(f"scripts.benchmarks.{name}") is None:
        print(
            f"scripts.benchmarks: {name} ({BENCHMARKS[name]}) is not in this copy: scripts/benchmarks/{name}.py",
            file=sys.stderr,
        )
        return 2
    code: int = importlib.import_module(f"scripts.benchmarks.{name}").main(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
