"""The soak finds growth where there is some and none where there is none; and a short one is clean."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.campaigns.faults import soak, support


def series(growth_per_hour: float, *, seed: int, wave: float = 3.0) -> tuple[list[float], list[float]]:
    """An hour of samples that hang together: neighbours are alike, as memory in use is."""
    source = random.Random(seed)
    times_s, values, drift = [], [], 0.0
    for i in range(1500):
        drift = 0.9 * drift + source.gauss(0, wave / 4)
        times_s.append(2.4 * i)
        values.append(300 + growth_per_hour * times_s[-1] / 3600 + drift)
    return times_s, values


@pytest.mark.parametrize("seed", range(10))
def test_a_leak_of_five_an_hour_under_noise_is_certain_and_noise_alone_is_not(seed: int) -> None:
    assert soak.slope(*series(5.0, seed=seed)).certain > 1.0
    assert soak.slope(*series(0.0, seed=seed)).certain < 1.0


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="soak for longer"):
        soak.slope([0.0, 1.0], [1.0, 2.0])


def test_a_leak_is_told_and_a_full_disk_too(capsys: pytest.CaptureFixture[str]) -> None:
    samples = [
        soak.Sample(time_s=6.0 * i, rss_bytes=300 * soak.MIB + i * 100_000, descriptors=9, threads=4,
                    shards=30, disk_bytes=soak.QUOTA_BYTES)
        for i in range(600)
    ]  # fmt: skip
    (problem,) = soak.judge(samples, warm_up_s=300)
    assert problem.startswith("rss, MiB grows by 57.")
    full = [one._replace(rss_bytes=1, disk_bytes=soak.QUOTA_BYTES + 1) for one in samples]
    (problem,) = soak.judge(full, warm_up_s=300)
    assert "the quota is" in problem
    assert "descriptors" in capsys.readouterr().out


def rising(seconds: float, num_samples: int = 60) -> list[soak.Sample]:
    """Memory that still settles, fast and in steps; a descriptor that comes and stays."""
    source = random.Random(0)
    return [
        soak.Sample(time_s=seconds * i / num_samples,
                    rss_bytes=int(300 * soak.MIB + i * 500_000 + source.gauss(0, 2e5)),
                    descriptors=9 + (i > num_samples // 2), threads=4, shards=30, disk_bytes=soak.QUOTA_BYTES)
        for i in range(num_samples)
    ]  # fmt: skip


def test_what_a_short_soak_cannot_tell_is_neither_growth_nor_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.judge(rising(30.0), warm_up_s=6.0) == []
    said = capsys.readouterr().out
    assert [line.split(" (")[0] for line in said.splitlines() if "too short" in line] == [
        "too short to judge: rss, MiB",
        "too short to judge: descriptors",
    ]
    assert soak.judge(rising(30.0, num_samples=10), warm_up_s=6.0) == soak.judge([], warm_up_s=6.0) == []
    assert capsys.readouterr().out.count("too short to judge: ") == 2
    full = [one._replace(disk_bytes=soak.QUOTA_BYTES + 1) for one in rising(30.0)]
    (problem,) = soak.judge(full, warm_up_s=6.0)
    assert "the quota is" in problem


def test_in_a_long_soak_what_certainly_grows_is_growth_however_much_it_swings() -> None:
    source = random.Random(1)
    swinging = [
        one._replace(rss_bytes=one.rss_bytes + int(source.gauss(0, 2e7)), descriptors=9)
        for one in rising(3600.0, num_samples=400)
    ]
    warm = [one for one in swinging if one.time_s >= 300]
    assert soak.slope([one.time_s for one in warm], [float(one.rss_bytes) for one in warm]).margin > 4 * soak.MIB
    (problem,) = soak.judge(swinging, warm_up_s=300)
    assert problem.startswith("rss, MiB grows by ")


def test_a_soak_shows_where_it_is_once_a_minute_where_nobody_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    progress = support.Progress(300, "seconds")
    for one in rising(300.0, num_samples=300):
        now_s = one.time_s
        progress.show(round(one.time_s), str(one))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" of ")[0].split()[-1] for line in lines] == ["60", "120", "180", "240"]
    assert all("MiB on disk" in line for line in lines)


def test_a_short_soak_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    samples, said = soak.watch(folder, 6.0, 3, 0.1)
    assert '"attachments": ' in said
    assert soak.accounts(folder, said) == []
    assert max(one.disk_bytes for one in samples) <= soak.QUOTA_BYTES
    capsys.readouterr()
