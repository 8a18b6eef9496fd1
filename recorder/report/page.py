"""The HTML of the page: the package's own styles and scripts, with the blocks of a run. Never reads a run.

The content security policy allows exactly these scripts and styles by their hashes. It allows no network access, and no
script that could come from a text in a run. In a file the scripts are deflated, which saves 0.1 MB of 0.3 MB.
"""

from __future__ import annotations

import base64
import hashlib
import html
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources

from .blocks import PageBlock

_SCRIPTS = (
    "vendor/uPlot.iife.min.js", "blocks.js", "format.js", "data.js", "state.js", "ui.js", "dumps.js", "axis.js",
    "heat.js", "map.js", "lines.js", "numbers.js", "depth.js", "graph.js", "ranks.js", "images.js", "series.js",
    "histograms.js", "units.js", "tokens.js", "against.js", "top.js", "panes.js", "live.js", "take.js", "main.js",
)  # fmt: skip
"""The scripts in the order in which they stand on the page. Each script uses definitions of earlier scripts."""
_STYLES = ("vendor/uPlot.min.css", "page.css")
BLOCK_TYPE = "application/x-recorder-block"
"""The type of the script elements that contain data. Browsers do not run scripts of this type."""
_LINE_BYTES = 3 << 16
_SCRIPTS_TYPE = "application/x-recorder-scripts"
_LOADER = f"""\
(async () => {{
  const packed = document.querySelector('script[type="{_SCRIPTS_TYPE}"]').textContent;
  const bytes = Uint8Array.from(atob(packed), (one) => one.charCodeAt(0));
  const script = document.createElement("script");
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  script.textContent = await new Response(inflated).text();
  document.body.append(script);
}})().catch((error) => {{
  document.getElementById("page").textContent =
    `This page could not be drawn: ${{error.message}}. It needs a browser of 2023 or later (DecompressionStream).`;
}});
"""
"""The script that inflates and runs the scripts of a file. The policy allows them by hash, like inline scripts."""
_SERVER_ALONE = "; connect-src 'self'; frame-src 'self'"
"""The part of the content security policy that lets a served page make requests to its own server only."""


@cache
def script() -> str:
    """Return all scripts of the page as one text."""
    return "\n".join(_asset(name) for name in _SCRIPTS)


@cache
def style() -> str:
    """Return all styles of the page as one text."""
    return "\n".join(_asset(name) for name in _STYLES)


def policy(extra: str = "") -> str:
    """Return the content security policy of the page. `extra` is what a server adds for its own page."""
    own = f"script-src {_hash(script())} {_hash(_LOADER)}; style-src {_hash(style())}; img-src data:"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'{extra}"


def _head(title: str, *, extra_policy: str = "", given: Mapping[str, str] | None = None) -> bytes:
    data = "".join(f' data-{name}="{html.escape(value, quote=True)}"' for name, value in (given or {}).items())
    text = (
        "<!doctype html>\n"
        f'<html{data} lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(extra_policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style()}</style></head>\n"
        '<body><div id="page"></div><noscript>This page draws with scripts of its own, which are switched off here.'
        "</noscript>\n"
    )
    return text.encode()


def _end(last_script: str) -> bytes:
    return f"<script>{last_script}</script>\n</body></html>\n".encode()


def page(title: str, blocks: Iterable[PageBlock], *, address: str = "", panels: Sequence[str] = ()) -> Iterator[bytes]:
    """Yield the complete HTML file, piece by piece.

    The page begins at the view that `address` names, unless the address in the browser names one. `panels` names the
    panels to draw if they have content. Empty draws all panels.
    """
    given = {"address": address, "panels": " ".join(panels)}
    yield _head(title, given={name: value for name, value in given.items() if value})
    for block in blocks:
        yield from _packed(block)
    yield from _base64(f'type="{_SCRIPTS_TYPE}"', _deflated_script())
    yield _end(_LOADER)


def _packed(block: PageBlock) -> Iterator[bytes]:
    return _base64(f'type="{BLOCK_TYPE}" data-name="{block.name}"', block.encoded())


def _base64(attributes: str, data: bytes) -> Iterator[bytes]:
    yield f"<script {attributes}>".encode()
    for start in range(0, len(data), _LINE_BYTES):  # 3 bytes become 4 letters, so pieces can be joined
        yield base64.b64encode(data[start : start + _LINE_BYTES])
    yield b"</script>\n"


@cache
def _deflated_script() -> bytes:
    return zlib.compress(script().encode(), 9, -zlib.MAX_WBITS)


def live_policy() -> str:
    """Return the content security policy of a live page, which may make requests to its own server only."""
    return policy(f"{_SERVER_ALONE}; frame-ancestors 'self'")


def live_page(title: str, blocks: Iterable[PageBlock], *, kind: str) -> bytes:
    """Return the page that a server sends. Its script gets news from the server, as events or by polling.

    `kind` is ``run``, ``runs`` (the list of runs), ``ranks`` (the ranks of a run) or ``side`` (runs side by side).
    """
    head = _head(title, extra_policy=_SERVER_ALONE, given={"live": kind})
    # An empty icon keeps the browser from requesting /favicon.ico.
    head = head.replace(b"<title>", b'<link rel="icon" href="data:,">\n<title>', 1)
    pieces = [piece for block in blocks for piece in _packed(block)]
    return b"".join([head, *pieces, _end(script())])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    text = resources.files(__package__).joinpath("assets", *name.split("/")).read_text(encoding="utf-8")
    assert "</script" not in text.lower() and "</style" not in text.lower() and "<!--" not in text, name
    return text
