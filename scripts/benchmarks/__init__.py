from __future__ import annotations

import argparse


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for the options of a benchmark, whose help shows its description as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m scripts.benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
