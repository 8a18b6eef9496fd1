"""Lists every message by which the package refuses or complains, to be read as the person would who receives it.

    python -m scripts.messages              where it stands, of which kind it is, what it says
    python -m scripts.messages ConfigError  those of one kind alone

A message should say where, what, what was expected and what to do. What only the program knows stands in braces.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from recorder.errors import not_installed

ROOT = Path(__file__).parents[1]
_BUILT_IN = (
    "ValueError",
    "TypeError",
    "ImportError",
    "KeyError",
    "IndexError",
    "RuntimeError",
    "SystemExit",
    "BadParameter",
)
_CALLS = ("refuse", "_stop")
"""Functions that raise or stop with the text that they are given."""
_LEVELS = ("warning", "error", "critical")
"""Methods of a logger that a person sees without asking."""


class Message(NamedTuple):
    """One message of the package."""

    path: str
    line: int
    kind: str
    text: str


def error_names() -> frozenset[str]:
    """Return the names of the classes of `recorder.errors`."""
    tree = ast.parse((ROOT / "recorder" / "errors.py").read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.ClassDef))


def text_of(node: ast.expr) -> str:
    """Return a message as its reader sees it, as far as the code tells; what it puts in stands in braces."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) for part in parts)
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value) + "}"
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left) + text_of(right)
        case ast.Call(func=ast.Name(id="not_installed"), args=[what, package, extra]):
            return not_installed(*map(text_of, (what, package, extra)))
        case ast.IfExp(body=body, orelse=orelse):
            return f"[{text_of(body)} | {text_of(orelse)}]"
    return "{" + ast.unparse(node) + "}"


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def find_messages() -> Iterator[Message]:
    """Yield every message, file by file."""
    ours = error_names()
    kinds = ours | set(_BUILT_IN)
    for path in sorted((ROOT / "recorder").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = _name_of(node.func)
            of_log = isinstance(node.func, ast.Attribute) and name in _LEVELS
            is_ours = name in ours or (name in kinds and id(node) in raised) or name in _CALLS
            if is_ours or of_log:
                text = " ".join(" ".join(text_of(one) for one in node.args).split())
                yield Message(str(path.relative_to(ROOT)), node.lineno, f"log.{name}" if of_log else name, text)


def main(arguments: list[str]) -> int:
    """Print the messages."""
    wanted = set(arguments)
    found = [one for one in find_messages() if not wanted or one.kind in wanted]
    for one in found:
        print(f"{one.path}:{one.line}: {one.kind}: {one.text}")
    print(f"{len(found)} messages", file=sys.stderr)
    return 0 if found else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
