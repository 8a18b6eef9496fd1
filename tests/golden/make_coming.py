"""Write the run of a version to come, out of the newest golden run. Done anew when the format has a new version.

    python -m tests.golden.make_coming

Beside the column, the site and the encoding of `coming`, it has a member in each manifest, a rule and a file that
today's package does not know.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recorder.capture.staging.measure import measure
from recorder.columns import PLAIN, SCHEMA, VERSION_KEY
from recorder.format.fingerprint import to_text
from recorder.format.rundir import encode_manifest, index_name, open_name, read_json
from recorder.records import KEEP_FINGERPRINT, KEEP_STATS, Chunk
from recorder.sites import FORMAT_VERSION
from recorder.write.file import Disk, PageMemory
from recorder.write.shard import BatchFile, Index, IpcFormat

from .coming import COLUMN, ENCODING, MINOR, MIRRORED, RUN, SITE, negative_count, updates
from .values import Array, values

Row = dict[str, Any]
NEWEST = Path(__file__).parent / f"v{FORMAT_VERSION[0]}.{FORMAT_VERSION[1]}"
_INDEX = SCHEMA.get_field_index("zero_count") + 1
COMING_SCHEMA = SCHEMA.insert(_INDEX, pa.field(COLUMN, pa.int64())).with_metadata(
    {VERSION_KEY: b"%d.%d" % (FORMAT_VERSION[0], MINOR)}
)
VERSION = {"version": [FORMAT_VERSION[0], MINOR]}


def make(out: Path) -> None:
    shutil.copytree(NEWEST, out, ignore=shutil.ignore_patterns("probe-*.arrow"))
    manifest = read_json(out / "_run.json")
    (out / "_run.json").write_bytes(encode_manifest({**manifest, **VERSION, "weather": {"wind_m_per_s": 3}}))
    (out / "_notes.json").write_text('{"of":"a later version"}')
    for rank, path in enumerate(sorted(out.glob("rank=*/*/_writer.json"))):
        _rewrite(path.parent, rank)


def _rewrite(writer: Path, rank: int) -> None:
    rows = _rows(writer, rank)
    ledger: dict[str, Any] = {"dropped": {}, "retired": {"rows": 0, "bytes": 0}, "observed": len(rows), "written": 0}
    for kind in ("stats", "tensors"):
        shard = writer / f"{kind}-000000.arrow"
        index = shard.with_name(index_name(shard.name))
        has_index = index.exists()
        shard.unlink()
        index.unlink(missing_ok=True)
        own = [row for row in rows if (row["site"] == "scalar") == (kind == "stats")]
        ledger["written"] += len(own)
        _write(shard, own, ledger, has_index=has_index, compression="zstd" if kind == "stats" else None)
    manifest: dict[str, Any] = read_json(writer / "_writer.json")
    manifest |= VERSION | {"ledger": ledger, "rules": [*manifest["rules"], f"site=param,{SITE} keep=stats"]}
    manifest["weather"] = {"wind_m_per_s": 3}
    for module in (module for root in manifest["roots"] for module in root["modules"]):
        module["sites"].append(SITE)
    (writer / "_writer.json").write_bytes(encode_manifest(manifest))
    (writer / "_notes.json").write_text('{"of":"a later version"}')


def _rows(writer: Path, rank: int) -> list[Row]:
    """All rows of a writer in their order, with the new column; the new site's behind those of the optimizer."""
    arrays = {value[:5]: value.locals[rank] for value in (*values(), *updates())}
    found: list[Row] = []
    for shard in writer.glob("*.arrow"):
        for row in pa.ipc.open_file(shard).read_all().to_pylist():
            found.append(_counted(row, arrays[_key(row)]))
            if (row["site"], row["module_path"], row["name"]) in MIRRORED:
                assert row["encoding"] == PLAIN
                found[-1] |= {"encoding": ENCODING, "data": row["data"][::-1]}
            if row["site"] == "optim":
                update = row | {"site": SITE, "name": row["name"].removesuffix(".momentum_buffer")}
                found.append(_counted(_filled(update, arrays[_key(update)]), arrays[_key(update)]))
    found.sort(key=lambda row: (row["seq"], row["site"] == SITE))
    return [row | {"seq": seq} for seq, row in enumerate(found)]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("site", "module_path", "name", "step", "phase"))


def _counted(row: Row, array: Array) -> Row:
    return row | {COLUMN: None if row["nan_count"] is None else negative_count(array)}


def _filled(row: Row, array: Array) -> Row:
    """A row with the statistics, fingerprint and payload of another float tensor of its shape."""
    data, offsets = np.frombuffer(array.tobytes(), np.uint8), tuple(json.loads(row["offsets"]))
    chunk = Chunk(tuple(json.loads(row["global_shape"])), offsets, row["placements"], row["mesh"], row["layout_source"])
    measured = measure(data, str(array.dtype), array.shape, chunk, KEEP_STATS | KEEP_FINGERPRINT)
    bits = measured.fingerprint or 0
    found = measured._asdict() | {"fingerprint": to_text(bits), "note": row["note"]}
    return row | found | {"encoding": PLAIN, "data": data.tobytes()}


def _write(shard: Path, rows: list[Row], ledger: dict[str, Any], *, has_index: bool, compression: str | None) -> None:
    disk, memory = Disk(), PageMemory(1 << 20)
    file = BatchFile(
        disk, shard.with_name(open_name(shard.name)), IpcFormat(COMING_SCHEMA, compression), memory, is_direct=False
    )
    batch = pa.RecordBatch.from_pylist(rows, schema=COMING_SCHEMA)
    file.append(batch, ledger)
    file.seal(shard, ledger)
    if has_index:
        index = Index(COMING_SCHEMA)
        index.add(batch)
        index.write(disk, shard, file.num_bytes, memory)


if __name__ == "__main__":
    shutil.rmtree(RUN, ignore_errors=True)
    make(RUN)
