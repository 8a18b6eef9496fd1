"""Owns the choice of mutations: what a hostile file might say wherever the readers look."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recorder.columns import COUNTS, SCHEMA, STATISTICS
from recorder.format.encodings import ENCODINGS
from tests.campaigns.fuzz.recipe import Step, messages, read_rows

INTS = (-1, 0, 1, 2, 3, 7, 64, 255, 256, 65536, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 32, 1 << 40, 1 << 53, 1 << 61,
        1 << 62, (1 << 63) - 1, -(1 << 63), (1 << 63) - 8, 1 << 63, 1 << 64, 10**30)  # fmt: skip
TEXTS = ("", "x", "layers.0", "\x1b[2J\x1b]0;owned\x07", "a\nb\rc\t", "\u202eevil", "\x9b31m", "[red]x[/red]", "[/]",
         "</script><script>alert(1)</script>", "=cmd|' /C calc'!A0", "../../../../tmp/evil", "/etc/passwd", "\x00",
         "n" * 300,
         "`rm -rf`$(x)", "%s%n{0}{x}", "\ufeff\u200b", "\U0001f600", "a/b", ".", "..", "~root", "-rf", "--help",
         "CON", "|x|\n|-|", "grad", "output", "input", "param", "train", "backward")  # fmt: skip
_SHAPES = ("[]", "[0]", "[1]", "[2,4]", "[4,2]", "[8]", "[-1]", "[1.5]", "[null]", "[1e400]", "[true]", "[[1]]",
           "{}", "", "null",
           "[4611686018427387904,4]", "[0,9223372036854775807,9223372036854775807]", "[1125899906842624]",
           "[9223372036854775808]", "[99999999999999999999999999]", "[1000000000000000]", "[" + "1," * 70 + "1]",
           "[" * 3000,
           "[1099511627776,1099511627776]", "[2,2147483648,0]", "[1000000,1]", "[60,100]", "[100000,0]")  # fmt: skip
_MESHES = (None, "", "{}", "[]", "null", '{"shape":[2],"coordinate":[5]}', '{"shape":[1000000000],"coordinate":[1]}',
           '{"shape":[2,2],"coordinate":[0,0]}', '{"shape":[0],"coordinate":[0]}', '{"shape":[-2],"coordinate":[0]}',
           '{"shape":[2],"coordinate":[0],"dim_names":["\\u001b[2J"]}', '{"shape":"x","coordinate":{}}', "[" * 5000,
           '{"shape":[281474976710655],"coordinate":[281474976710654]}')  # fmt: skip
_KINDS = ("Shard", "StridedShard", "Replicate", "Partial", "FlatShard", "\x1b[2J", "", None, 3)
_DTYPES = ("float32", "bfloat16", "bool", "complex64", "complex32", "complex128", "float8_e4m3fn", "float4_e2m1fn_x2",
           "int8", "int64", "uint64", "float64", "object", "load", "", "float32\n", "V16", "\x1b[2J")  # fmt: skip
_ENCODINGS = (*ENCODINGS, "pickle", "", None)
_NOTES = (None, "", "{}", "[]", "null", "{", '{"partial":[1]}', '{"partial":"x"}', '{"batch_dim":5}',
          '{"batch_dim":-1}',
          '{"no_values":"\\u001b[2J"}', '{"no_statistics":[[[]]]}', '{"a":' * 2000, '{"grad":"scaled"}', '{"x":NaN}',
          '{"replicas_differ":[1]}', '{"batch":1e999}', '"\\ud800"', "[" * 90000)  # fmt: skip
_RANKS = (None, "", "[]", "[0]", "[0,1]", "[1,0]", "[0,0]", "[-1]", "null", '["a"]', "[1e9]",
          "[999999999999999999999]", "{}",
          json.dumps(list(range(5000))), "[" * 5000, "[[0]]", "3")  # fmt: skip
_FLOATS: tuple[Any, ...] = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e308,
    5e-324,
    1e-300,
    None,
    *({"$float": x} for x in ("nan", "inf", "-inf")),
)
_FINGERPRINTS = (None, "", "zz", "f" * 16, "0" * 17, "ffff", "g" * 16, "\x1b[2J", "F" * 16, "-" + "1" * 15)
_HISTOGRAMS = (None, b"", b"\1\0\0\0\1\2", b"\1\0\0\0\0\0\5\6", b"\3\0\0\0\1\2", b"\x08\0\xff\x7f" + b"\xff" * 32)
_UNITS = (None, b"", b"\1\1\0\0" + bytes(25), b"\1\0\1\0", b"\2\0\0\0" + b"\xff" * 52, b"\x08\xff\0\0" + b"\xff" * 32)
_JSON: tuple[Any, ...] = (
    None, True, False, 0, -1, 1e300, "x", [], {}, [[]], [{}], {"a": 1}, {"rows": "x"}, [None], "closed", "counted",
    {"$deep": 50}, {"$deep": 400}, {"$deep": 900}, {"$deep": 2000}, {"$repeat": "x", "times": 1 << 16},
    {"$float": "nan"}, {"$float": "inf"}, {"\x1b[2J": {"\n": "\x1b]0;x\x07"}}, *INTS, *TEXTS, "\ud800",
)  # fmt: skip
_RULES = ("site=output keep=tensor", "re:(a+)+$ site=output keep=stats",
          "site=output steps=0:99999999999999999999:1 keep=stats",
          "rank=0:999999999999 site=grad keep=tensor", "*" * 60 + "b site=output keep=tensor", "re:((((((((((x",
          "keep=",
          "site=* keep=stats steps=::1", "module=[ site=output keep=stats",
          "steps=pow2 site=output keep=tensor")  # fmt: skip
_MANIFEST_KEYS = ("format", "version", "run_id", "world_size", "created_ns", "asked", "merged_from",
                  "merged_writers", "writer", "rank", "host",
                  "pid", "attempt", "started_ns", "closed_ns", "state", "step_source", "ledger", "roots", "versions",
                  "settings", "rules", "optimizers", "events", "autoload", "merge", "retired_earlier",
                  "suspect")  # fmt: skip
_NAMES = ("tensors-000007.arrow", "stats-000001.arrow", "_tensors-000000.arrow.open", "tensors-999999999.arrow",
          "rank=99999",
          "rank=00002", "rank=999999999", "rank=00000 ", "global", "_writer.json", "_run.json", "x", "\x1b[2J",
          "a\nb", "\udcff\udcfe",
          "n" * 250, "_merging", "_merge.json", "\u202ex", "[red]", "</script>", "-rf", "_status.json",
          "_tensors-000000.index", "_stats-000000.index", "=1+1.arrow", "nul\u0085")  # fmt: skip


def propose(run: Path, chooser: random.Random) -> list[Step]:
    """Some steps over a run; files are named as they are before the first step."""
    files = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    ways: list[Callable[[Path, list[str], random.Random], Step]] = [
        _rows, _rows, _rows, _rows, _manifest, _manifest, _manifest, _header, _buffer, _buffer, _meta, _meta, _meta,
        _raw, _raw, _link,
    ]  # fmt: skip
    return [chooser.choice(ways)(run, files, chooser) for _ in range(chooser.choice((1, 1, 1, 2, 3, 5)))]


def _shards(files: list[str]) -> list[str]:
    return [name for name in files if name.endswith((".arrow", ".open"))]


def _tables(files: list[str]) -> list[str]:
    return [name for name in files if name.endswith((".arrow", ".open", ".index"))]


def _rows(run: Path, files: list[str], chooser: random.Random) -> Step:
    file = chooser.choice(_shards(files))
    batches = read_rows(run / file)
    step: Step = {"do": "rows", "file": file, "set": []}
    for _ in range(chooser.choice((1, 1, 2, 4))):
        number = chooser.randrange(max(len(batches), 1))
        row = chooser.randrange(max(len(batches[number]), 1)) if batches else 0
        own = batches[number][row] if batches and batches[number] else {}
        names = chooser.sample(SCHEMA.names, chooser.choice((1, 1, 2, 3)))
        if chooser.random() < 0.4:
            names = chooser.sample(("shape", "global_shape", "offsets", "placements", "mesh", "payload_bytes",
                                   "numel", "dtype",
                                    "data", "encoding", "part", "flat_offset", "ranks_present"), 3)  # fmt: skip
        values = {name: _value(name, own, chooser) for name in names}
        where = "index_set" if chooser.random() < 0.15 else "set"
        step.setdefault(where, []).append({"batch": number, "row": row, "values": values})
    if chooser.random() < 0.1:
        times = chooser.choice((1, 3, 300))
        step["repeat"] = [{"batch": chooser.randrange(4), "row": chooser.randrange(9), "times": times}]
    if chooser.random() < 0.1:
        step["drop"] = [{"batch": chooser.randrange(4), "row": chooser.randrange(9)}]
    if chooser.random() < 0.1:
        step["compression"] = chooser.choice((None, "zstd", "lz4"))
    if chooser.random() < 0.1:
        step["index"] = False
    return step


def _value(name: str, own: dict[str, Any], chooser: random.Random) -> Any:
    """A value for a column; sometimes a value of another column."""
    if name in ("shape", "global_shape", "offsets"):
        others = [own.get(other) for other in ("shape", "global_shape", "offsets")]
        return chooser.choice((*_SHAPES, *others, None))
    if name == "placements":
        return _placements(chooser)
    if name == "data":
        return _payload(own, chooser)
    choices: dict[str, tuple[Any, ...]] = {
        "mesh": _MESHES, "dtype": _DTYPES, "encoding": _ENCODINGS, "note": _NOTES, "ranks_present": _RANKS,
        "ranks_expected": _RANKS, "fingerprint": _FINGERPRINTS, **dict.fromkeys(STATISTICS, _FLOATS),
        **dict.fromkeys(COUNTS, (*INTS, None)), "histogram": _HISTOGRAMS, "units": _UNITS,
    }  # fmt: skip
    if name in choices:
        return chooser.choice(choices[name])
    if name == "payload_bytes":
        return chooser.choice(
            (*INTS, None, (own.get("payload_bytes") or 0) + chooser.choice((-4, 4, 1)), 1 << 25, 3 << 24)
        )
    return chooser.choice((*TEXTS, None)) if "string" in str(SCHEMA.field(name).type) else chooser.choice((*INTS, None))


def _placements(chooser: random.Random) -> str | None:
    if chooser.random() < 0.2:
        return chooser.choice((None, "", "[]", "{}", "[[]]", "[1]", "[" * 5000, '[{"kind":{}}]'))
    found = []
    for _ in range(chooser.choice((1, 1, 1, 2, 60))):
        one: dict[str, Any] = {"kind": chooser.choice(_KINDS)}
        for key in ("dim", "offset", "split_factor"):
            if chooser.random() < 0.6:
                one[key] = chooser.choice((0, 0, 1, 2, *INTS, "x", None, 1.5, [], True))
        if chooser.random() < 0.4:
            one["reduce_op"] = chooser.choice(("sum", "avg", "max", "product", "pickle", 3, None, []))
        found.append(one)
    return json.dumps(found)


def _payload(own: dict[str, Any], chooser: random.Random) -> Any:
    data = bytes(own.get("data") or b"")
    at = chooser.randrange(len(data) + 1)
    match chooser.randrange(7):
        case 0:
            return None
        case 1:
            return {"$hex": ""}
        case 2:
            return {"$hex": (data + data).hex()}
        case 3:
            return {"$hex": data[:at].hex()}
        case 4:
            return {"$hex": chooser.choice(INTS[:22]).to_bytes(16, "little", signed=True)[:8].hex()}
        case 5:  # zstd's header is in the first bytes
            at = chooser.randrange(min(len(data), 20) + 1)
    return {"$hex": (data[:at] + chooser.randbytes(chooser.choice((1, 2, 8))) + data[at + 1 :]).hex()}


def _manifest(run: Path, files: list[str], chooser: random.Random) -> Step:
    file = chooser.choice([name for name in files if name.endswith(".json")])
    path: list[Any] = []
    try:
        node = json.loads((run / file).read_text())
    except ValueError:
        node = {}
    while True:
        if isinstance(node, dict):
            key = chooser.choice((*node, *_MANIFEST_KEYS)) if not path else chooser.choice((*node, "x"))
            path.append(key)
            node = node.get(key)
        elif isinstance(node, list) and node:
            path.append(chooser.randrange(len(node)))
            node = node[path[-1]]
        if not isinstance(node, dict | list) or not node or chooser.random() < 0.35:
            break
    step: Step = {"do": "json", "file": file, "path": path, "value": chooser.choice(_JSON)}
    if path == ["rules"] or (path and path[0] == "rules"):
        step["value"] = chooser.choice((list(chooser.sample(_RULES, 2)), chooser.choice(_RULES)))
    if path[-1:] == ["ranks"]:
        step["value"] = chooser.choice(([0] * 50, list(range(9)), [1, 0], [0, 10**9], [-1, 0], "x", [[0]], [True, 0]))
    if path == ["version"]:
        step["value"] = chooser.choice(([1, 0], [1, 1], [1, 99], [2, 0], [1], "1.0", [1, True], [1, "x"], [1.0, 0]))
    if chooser.random() < 0.1:
        step["gone"] = True
    return step


def _header(run: Path, files: list[str], chooser: random.Random) -> Step:
    file = chooser.choice(_tables(files))
    path = chooser.choice((["number"], ["rows"], ["ledger"], ["crc32c"], ["num_batches"], ["ledger", "observed"],
                          ["ledger", "dropped"],
                           ["ledger", "retired"], ["crc32c", "step"], ["crc32c", "seq", 1], ["ledger", "retired",
                           "rows"],
                           ["ledger", "dropped", "\x1b[2J"], ["x"]))  # fmt: skip
    step: Step = {"do": "header", "file": file, "batch": chooser.randrange(4), "path": path}
    if chooser.random() < 0.1:
        texts = ("", "[]", "{", "null", "[" * 300, '{"number":0,"rows":0,"ledger":{},"crc32c":{}}', "1" * 400, "\ud800")
        return step | {"text": chooser.choice(texts)}
    if chooser.random() < 0.15:
        step["gone"] = True
    small = [one for one in _JSON if len(json.dumps(one)) < 300]
    return step | {"value": chooser.choice((*INTS, *small, {"$deep": 150}))}


def _buffer(run: Path, files: list[str], chooser: random.Random) -> Step:
    file = chooser.choice(_tables(files))
    step: Step = {"do": "buffer", "file": file, "batch": chooser.randrange(3), "buffer": chooser.randrange(80)}
    width = chooser.choice((1, 4, 8))
    at = chooser.choice((0, 4, 8, chooser.randrange(1 << 12)))
    return step | {"at": at, "hex": _number(width, chooser)}


def _number(width: int, chooser: random.Random) -> str:
    if chooser.random() < 0.3:
        return chooser.randbytes(width).hex()
    return (chooser.choice(INTS) % (1 << 8 * width)).to_bytes(width, "little").hex()


def _meta(run: Path, files: list[str], chooser: random.Random) -> Step:
    file = chooser.choice(_tables(files))
    number = chooser.choice((-1, 0, 1, 1, 1, 2, 3))
    try:
        size = messages(run / file)[number][0].metadata_bytes
    except (IndexError, OSError, ValueError):
        size = 2048
    width = chooser.choice((1, 2, 4, 4, 8, 8))
    at = chooser.randrange(min(size, 1 << 13))
    return {"do": "meta", "file": file, "batch": number, "at": at - at % min(width, 4), "hex": _number(width, chooser)}


def _raw(run: Path, files: list[str], chooser: random.Random) -> Step:
    file = chooser.choice(files)
    size = max(os.path.getsize(run / file), 1)
    at = chooser.randrange(size)
    match chooser.randrange(6):
        case 0:
            return {"do": "bit", "file": file, "bit": chooser.randrange(8 * size)}
        case 1:
            return {"do": "bytes", "file": file, "at": at, "cut": size}  # cut short
        case 2:
            return {"do": "bytes", "file": file, "at": at, "cut": chooser.choice((1, 4, 8, 64, 512))}
        case 3:
            return {
                "do": "bytes",
                "file": file,
                "at": at,
                "cut": 0,
                "hex": _number(8, chooser),
                "times": chooser.choice((1, 8, 500)),
            }
        case 4:
            times = chooser.choice((1, 8, 64))
            return {"do": "bytes", "file": file, "at": at - at % 8, "cut": 8 * times, "hex": "00" * 8, "times": times}
    return {"do": "bytes", "file": file, "at": at - at % 4, "cut": 4, "hex": _number(4, chooser)}


def _link(run: Path, files: list[str], chooser: random.Random) -> Step:
    folders = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_dir())
    file = chooser.choice((chooser.choice(files), chooser.choice(folders)))
    match chooser.randrange(8):
        case 0:
            return {
                "do": "link",
                "file": file,
                "to": chooser.choice(("/etc", "/dev/zero", "/proc/self/mem", "/", ".", "..", "nowhere")),
            }
        case 1:
            return {"do": "link", "file": file, "keep": True}
        case 2:
            return {"do": "fifo", "file": file}
        case 3:
            return {"do": "directory", "file": file}
        case 4:
            return {"do": "gone", "file": file}
        case 5:
            return {"do": "hard", "file": file, "to": chooser.choice(files)}
        case 6:
            folder = chooser.choice(folders)
            return {"do": "copy", "file": chooser.choice(files), "to": f"{folder}/{chooser.choice(_NAMES)}"}
    return {"do": "name", "file": file, "to": chooser.choice(_NAMES)}
