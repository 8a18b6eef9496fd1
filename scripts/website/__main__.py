"""Builds the site into a folder, or the manual page of the command.

    python -m scripts.website build/site
    python -m scripts.website build/man --man

The pages are laid out as they lie in the repository, so that their links to each other hold as they stand. Sphinx reads
them with MyST, and ends with exit code 1 where a link or an anchor leads nowhere.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import reference

ROOT = Path(__file__).parents[2]
_ELSEWHERE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "recorder/format/FORMAT.md",
    "scripts/benchmarks/MEASUREMENTS.md",
    "tests/faults/TABLE.md",
)
"""The pages outside of docs/ that are part of the site."""
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


class Chapter(NamedTuple):
    """A part of the table of contents, with its pages in order."""

    title: str
    pages: tuple[str, ...]


def read_chapters() -> list[Chapter]:
    """Return the table of contents: the pages of docs/ as their index orders them, and everything else around them."""
    deploy = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "deploy").rglob("*.md"))
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = [f"docs/{name}" for name in re.findall(r"^\| \[.*?\]\((\w[\w-]*\.md)\)", index, flags=re.MULTILINE)]
    jobs = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs" / "jobs").glob("*.md"))]
    architecture, rely = "docs/architecture.md", ("docs/missing.md", "docs/cost.md", "docs/limits.md")
    guide = [page for page in listed if page not in (architecture, *rely)]
    return [
        Chapter("Jobs", tuple(jobs)),
        Chapter("Guide", ("docs/README.md", *guide, *deploy)),
        Chapter("Reference", (*(f"reference/{page.name}" for page in reference.PAGES), "recorder/format/FORMAT.md")),
        Chapter("What to rely on", (*rely, "SECURITY.md", "scripts/benchmarks/MEASUREMENTS.md", "CHANGELOG.md")),
        Chapter("How it works", (architecture, "CONTRIBUTING.md", "tests/faults/TABLE.md")),
    ]


def lay_out(stage: Path) -> None:
    """Lay the pages, what they link to, and the pages made from the code into a folder for Sphinx."""
    pages = [ROOT / name for name in ("README.md", *_ELSEWHERE)]
    pages += [path for room in ("docs", "deploy") for path in sorted((ROOT / room).rglob("*.md"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        copied = stage / page.relative_to(ROOT)
        for linked in _files_linked(page, text):
            target = stage / linked.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(linked, target)
        if copied == stage / "README.md":
            copied, text = stage / "index.md", f"{text}\n{_contents()}"
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(_to_index(page, text), encoding="utf-8")
    (stage / "reference").mkdir()
    for made in reference.PAGES:
        (stage / "reference" / made.name).write_text(made.make(), encoding="utf-8")
    (stage / "_static").mkdir()
    for name, copied in (("conf.py", stage), ("site.css", stage / "_static")):
        shutil.copy(Path(__file__).parent / name, copied)


def _files_linked(page: Path, text: str) -> Iterator[Path]:
    """Yield what a page links to besides pages: pictures, programs, manifests."""
    for match in _LINK.finditer(text):
        path = (page.parent / match[1]).resolve()
        if path.suffix != ".md" and path.is_file():
            yield path


def _to_index(page: Path, text: str) -> str:
    """Return the text with links to README led to the site's first page, which is made of it."""

    def lead(match: re.Match[str]) -> str:
        is_readme = (page.parent / match[1]).resolve() == ROOT / "README.md"
        return f"]({match[1].removesuffix('README.md')}index.md{match[2] or ''})" if is_readme else match[0]

    return _LINK.sub(lead, text)


def _contents() -> str:
    """Return the tables of contents, which the first page holds and does not show."""
    parts = []
    for chapter in read_chapters():
        pages = "\n".join(page.removesuffix(".md") for page in chapter.pages)
        parts.append(f"```{{toctree}}\n:hidden:\n:caption: {chapter.title}\n\n{pages}\n```\n")
    return "\n".join(parts)


def lay_out_manual(stage: Path) -> None:
    """Lay the one page that is the manual page into a folder for Sphinx."""
    page = next(page for page in reference.PAGES if page.name == "commands.md")
    for folder in ("reference", "_static"):
        (stage / folder).mkdir()
    (stage / "reference" / page.name).write_text(page.make(), encoding="utf-8")
    shutil.copy(Path(__file__).parent / "conf.py", stage)


def _write_manual(out: Path) -> int:
    """Write `recorder.1` into a folder; the exit code is Sphinx's."""
    with tempfile.TemporaryDirectory() as name:
        stage, made = Path(name, "pages"), Path(name, "man")
        stage.mkdir()
        lay_out_manual(stage)
        command = [sys.executable, "-m", "sphinx", "-b", "man", "-W", "-q", "-D", "root_doc=reference/commands"]
        code = subprocess.run([*command, "-d", str(Path(name, "cache")), str(stage), str(made)], cwd=ROOT).returncode
        if code:
            return code
        out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made / "recorder.1", out / "recorder.1")
    print(f"{out / 'recorder.1'}: man -l {out / 'recorder.1'}")
    return 0


def main(arguments: list[str]) -> int:
    """Build the site, or the manual page; the exit code is Sphinx's."""
    parser = argparse.ArgumentParser(prog="scripts.website", description="Builds the site into a folder.")
    parser.add_argument(
        "out", type=Path, help="the folder (scripts/docs names build/site, or build/man); a site in it is replaced"
    )
    parser.add_argument("--man", action="store_true", help="write the manual page recorder.1 there, and no site")
    given = parser.parse_args(arguments)
    out = given.out
    if given.man:
        return _write_manual(out)
    if out.exists() and not (out / "searchindex.js").exists() and any(out.iterdir()):
        print(
            f"scripts.website: {out} holds something else than a site; name an empty or a new folder", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory() as name:
        stage, made = Path(name, "pages"), Path(name, "site")
        stage.mkdir()
        lay_out(stage)
        command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-j", "2"]
        code = subprocess.run([*command, "-d", str(Path(name, "cache")), str(stage), str(made)], cwd=ROOT).returncode
        if code:
            return code
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, out)
    print(f"{out / 'index.html'}: {len(list(out.rglob('*.html')))} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
