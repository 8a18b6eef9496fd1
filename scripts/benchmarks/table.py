"""Makes the tables and the picture of the benchmark `overhead` from what its `--json` left. No measurements.

python -m scripts.benchmarks table bench.json
python -m scripts.benchmarks table bench.json --settings busy --picture overhead.svg
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks import parser_of

from .machine import LIMITS
from .pairs import Spread, is_distinguishable, noise_of, spread
from .picture import Bar, Panel, draw
from .stopwatch import THREADS
from .ways import HOOKS, POOL, WAYS

Sample = dict[str, Any]
HEAD = (
    "",
    "step time, ratio",
    "quartiles",
    "min to max",
    "CPU ms a step, beyond: training",
    "writer",
    "others",
    "at the end",
    "MB a step",
    "saved",
    "drain s",
    "peak MB",
    "drops",
    "training",
)
FLOORS = {"recorder, tensors": ("codec", "crc32c"), "recorder, tensors, no codec": ("copy", "crc32c")}
"""What the writer thread cannot do without, each byte once."""


def paired(
    setting: dict[str, Any], name: str, base: str, figure: Callable[[Sample], float]
) -> list[tuple[float, float]]:
    """A figure of one recorder and of another in each round in which both took part."""
    samples = setting["samples"]
    both = zip(samples[name], samples[base], strict=True)
    return [(figure(own), figure(other)) for own, other in both if own is not None and other is not None]


def beyond(setting: dict[str, Any], name: str, base: str, figure: Callable[[Sample], float]) -> float:
    """The median over rounds of how much more it was."""
    return statistics.median(own - other for own, other in paired(setting, name, base, figure))


def ratio_of(setting: dict[str, Any], name: str, base: str) -> Spread:
    return spread([own / other for own, other in paired(setting, name, base, lambda sample: float(sample["step_s"]))])


def cells(setting: dict[str, Any], name: str, base: str, noise: float) -> list[str]:
    """One line of the table."""
    own = [sample for sample in setting["samples"][name] if sample is not None]
    ratio = ratio_of(setting, name, base)

    def median(key: str) -> float:
        return float(statistics.median(sample[key] for sample in own))

    cpu_ms = [1e3 * beyond(setting, name, base, lambda one, thread=thread: one["cpu_s"][thread]) for thread in THREADS]  # type: ignore[misc]
    cpu_ms.append(1e3 * beyond(setting, name, base, lambda one: float(one["exit_cpu_s"])))
    written_mb = median("written_bytes") / 1e6
    saved = 1 - median("written_bytes") / setting["seen"]["num_bytes"]
    is_noise = (len(setting["samples"][base]) < 2 or not is_distinguishable(ratio, noise)) and name != base
    is_same = all(
        sample["digest"] == other["digest"]
        for sample, other in zip(setting["samples"][name], setting["samples"][base], strict=True)
        if sample is not None
    )
    return [
        name,
        "" if name == base else f"{ratio.median:.2f}{' (noise)' if is_noise else ''}",
        "" if name == base else f"{ratio.low:.2f} to {ratio.high:.2f}",
        "" if name == base else f"{ratio.least:.2f} to {ratio.most:.2f}",
        *(["", "", "", ""] if name == base else [f"{value:+.0f}" for value in cpu_ms]),
        f"{written_mb:.1f}" if written_mb >= 0.05 else "",
        f"{round(saved, 2) + 0.0:.0%}" if name in setting["keeps_tensors"] else "",
        f"{max(0.0, beyond(setting, name, base, lambda one: float(one['drain_s']))):.1f}",
        f"{median('peak_rss_bytes') / 1e6:.0f}",
        str(sum(sum(sample["drops"].values()) for sample in own)) if "drops" in own[0] else "",
        "equal" if is_same else "DIFFERS",
    ]


def records(setting: dict[str, Any]) -> list[str]:
    """What a record costs the training thread beyond its copy, where the pool was measured, too."""
    samples, num_tensors = setting["samples"], setting["seen"]["num_tensors"]
    if POOL not in samples:
        return []
    found = []
    for name in samples:
        if WAYS[name].group == "ours":
            cpu_s = beyond(setting, name, POOL, lambda one: float(one["cpu_s"]["training"]))
            found.append(
                f"- {name}: {1e6 * cpu_s / num_tensors:+.1f} us a record on the training thread beyond the copy"
            )
    return found


def fractions(setting: dict[str, Any], base: str) -> list[str]:
    """The speed of ours as a part of what the machine allows."""
    samples, limits, num_bytes = setting["samples"], setting["limits"], setting["seen"]["num_bytes"]
    found = []
    for name, parts in FLOORS.items():
        if name not in samples:
            continue
        floor_s = sum(num_bytes / 1e9 / limits[part] for part in parts)
        all_s = beyond(setting, name, base, lambda one: float(sum(one["cpu_s"].values()) + one["exit_cpu_s"]))
        found.append(
            f"- {name}: all threads take {all_s * 1e3:.0f} ms of CPU a step beyond no recording; {' and '.join(parts)} "
            f"alone {floor_s * 1e3:.0f} ms, {floor_s / max(all_s, 1e-9):.2f} of it"
        )
        if HOOKS in samples:
            thread_s = beyond(setting, name, HOOKS, lambda one: float(one["cpu_s"]["training"]))
            copy_s = num_bytes / 1e9 / limits["copy"]
            found.append(
                f"- {name}: the training thread {thread_s * 1e3:.1f} ms of CPU a step beyond hooks that do nothing; "
                f"copying alone {copy_s * 1e3:.1f} ms"
            )
    return found


def markdown(report: dict[str, Any], settings: Sequence[str] = ()) -> str:
    """Everything, as it can be put into a page."""
    base, again = report["base"]
    lines = [f"{report['machine']}; `import recorder` {report['import_ms']:.0f} ms, without torch."]
    for name, peer in report["peers"].items():
        said = f"left out ({peer['reason']})" if "reason" in peer else peer["version"]
        lines.append(f"- {name}, {peer['package']}: {said}")
    for key, setting in report["settings"].items():
        if settings and key not in settings:
            continue
        seen, samples = setting["seen"], setting["samples"]
        noise = noise_of(ratio_of(setting, again, base))
        lines += [
            "",
            f"`{key}`: {setting['text']}; {seen['num_tensors']:.0f} tensors, {seen['num_bytes'] / 1e6:.1f} MB a step; "
            f"{len(samples[base])} round(s) of {report['steps']} steps, the first {report['warmup']} not counted. Two "
            f"trainings without a recorder differed by up to {noise:.1%}; (noise) is what differs by no more.",
            "",
            _row(HEAD),
            _row(["---"] * len(HEAD)),
            *[_row(cells(setting, name, base, noise)) for name in samples],
            "",
            "- the machine in the same rounds, GB/s: "
            + ", ".join(
                f"{text} {setting['limits'][name]:.2f}" for name, text in LIMITS.items() if name in setting["limits"]
            ),
            *fractions(setting, base),
            *records(setting),
            *[f"- FINDING {line}" for line in setting["findings"]],
        ]
    return "\n".join(lines)


def _row(columns: Sequence[str]) -> str:
    return "| " + " | ".join(columns) + " |"


def panels(report: dict[str, Any], settings: Sequence[str] = ()) -> list[Panel]:
    """What the picture shows: a panel for each setting, a bar for each recorder but the base."""
    base, again = report["base"]
    found = []
    for key, setting in report["settings"].items():
        if not settings or key in settings:
            bars = [
                Bar(name, ratio_of(setting, name, base), WAYS[name].group in ("ours", "sync"))
                for name in setting["samples"]
                if name != base
            ]
            found.append(Panel(f"{key}: {setting['text']}", noise_of(ratio_of(setting, again, base)), bars))
    return found


def main(arguments: list[str]) -> int:
    parser = parser_of("table", __doc__)
    parser.add_argument("file", type=Path, help="what `--json` of the bench wrote")
    parser.add_argument("--settings", nargs="+", default=[], metavar="SETTING", help="only these")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="also draw the ratios")
    args = parser.parse_args(arguments)
    try:
        report = json.loads(args.file.read_text())
        known = report["settings"]
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{args.file} is not what `python -m scripts.benchmarks overhead --json` writes ({error})")
    if unknown := set(args.settings) - set(known):
        parser.error(f"{args.file} has no setting {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    print(markdown(report, args.settings))
    if args.picture:
        args.picture.write_text(draw(panels(report, args.settings)))
    return 0
