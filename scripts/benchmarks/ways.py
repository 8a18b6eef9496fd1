"""What is compared, and where: the recorders by the name in the table, and the settings that they are measured in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Setting(NamedTuple):
    """A workload on some threads."""

    workload: str
    """As `scripts.benchmarks.workloads` calls it."""
    num_threads: int
    """Of training, on each rank."""
    num_ranks: int
    text: str


SETTINGS = {
    "busy": Setting("demo", 2, 1, "the demo's GPT on two training threads; of two cores none is left for a writer"),
    "spare": Setting("demo", 1, 1, "the demo's GPT on one training thread"),
    "ddp": Setting("ddp", 1, 2, "the demo's GPT on two ranks of DDP, one training thread each"),
    "small": Setting("small", 1, 1, "a chain of 2,000 modules of a kilobyte each, on one training thread"),
}
"""The machine is taken to have two cores."""


class Way(NamedTuple):
    """One recorder."""

    recorder: str
    """As `scripts.benchmarks.recorders` calls it."""
    group: str = "others"
    """`base`, `others`, `peers`, `ours` or `sync`."""
    settings: tuple[str, ...] = tuple(SETTINGS)
    env: Mapping[str, str] = MappingProxyType({})
    every: int = 1
    """Only each so-many-th round."""
    keeps_tensors: bool = True
    """Whether what it writes has all bytes of what it saw."""
    keeps_rows: bool = True
    """Whether it writes a row of each value at these steps."""


DEMO = ("busy", "spare")


def _ours(keep: str, steps: str = "", **env: str) -> Way:
    keep += f" steps={steps}" if steps else ""
    rules = f"leaf=yes site=output keep={keep}; site=grad keep={keep}"
    settings = {"RECORDER": "1", "RECORDER_RULES": rules, **env}
    keeps_rows = keep not in ("probe", "ring") and not steps
    return Way("none", "ours", env=settings, keeps_tensors=keep == "tensor", keeps_rows=keeps_rows)


WAYS: dict[str, Way] = {
    "no recording": Way("none", "base", keeps_tensors=False),
    "no recording, again": Way("none", "base", keeps_tensors=False),
    "hooks that do nothing": Way("hooks", "base", keeps_tensors=False),
    "hooks that copy into a pool and drop": Way("pool", "base", keeps_tensors=False),
    "torch.save per step": Way("torch.save"),
    "safetensors per step": Way("safetensors"),
    "async_save, thread": Way("async_save thread", settings=DEMO),
    "async_save, staged": Way("async_save staged", settings=DEMO),
    "async_save, process": Way("async_save process", settings=DEMO),
    "TensorBoard histograms": Way("tensorboard", "peers", DEMO, every=3, keeps_tensors=False),
    "wandb histograms, offline": Way("wandb", "peers", DEMO, every=3, keeps_tensors=False),
    "TorchLens, every operation": Way("torchlens", "peers", DEMO, every=3),
    "nnsight trace, torch.save": Way("nnsight", "peers", DEMO, every=3),
    "msprobe, tensors": Way("msprobe tensor", "peers", DEMO, every=3),
    "msprobe, statistics": Way("msprobe statistics", "peers", DEMO, every=3, keeps_tensors=False),
    "nvdlfw-inspect statistics": Way("nvdlfw-inspect", "peers", DEMO, every=3, keeps_tensors=False),
    "recorder, tensors": _ours("tensor"),
    "recorder, tensors, no codec": _ours("tensor", RECORDER_CODEC="none"),
    "recorder, statistics": _ours("stats"),
    "recorder, probe": _ours("probe"),
    "recorder, histograms": _ours("histogram"),
    "recorder, units": _ours("units"),
    "recorder, fingerprints": _ours("fingerprint"),
    "recorder, ring": _ours("ring", RECORDER_POOL_BYTES="2GiB", RECORDER_RING_SHARE="0.75"),
    "recorder, nothing at these steps": _ours("tensor", steps="1000000000"),
    **{
        f"recorder, tensors, sync every {interval_s} s": _ours("tensor", RECORDER_SYNC_INTERVAL_S=interval_s)._replace(
            group="sync"
        )
        for interval_s in ("0", "0.1", "60")
    },
}
"""In the order of the table. The group `sync`, what surviving a loss of power costs, is measured where asked for."""
BASE, AGAIN, HOOKS, POOL = list(WAYS)[:4]


def chosen(setting: str, *, only: list[str], peers: bool, sync: bool) -> list[str]:
    """The ways of a setting; those without which no other can be judged are always among them."""
    groups = {"base", "others", "ours"} | ({"peers"} if peers else set()) | ({"sync"} if sync else set())
    needed = {BASE, AGAIN} | ({HOOKS, POOL} if setting == "small" else set())
    return [
        name
        for name, way in WAYS.items()
        if setting in way.settings and (name in needed or (name in only if only else way.group in groups))
    ]
