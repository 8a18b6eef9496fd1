"""The files of deploy/ for the daemon: systemd and Prometheus have nothing against them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from recorder import open_run
from recorder.analyze.export.tables import CONFIGURED
from recorder.daemon.settings import load_daemon_settings
from tests.rigs.merging import make_small_run
from tests.rigs.programs import needs

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCUMENTED = set(re.findall(r"`((?:recorder|process)_\w+)`", (ROOT / "docs" / "daemon-reference.md").read_text()))
OF_PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"}


def test_promtool_takes_the_alert_rules() -> None:
    needs("promtool")
    done = subprocess.run(
        ["promtool", "check", "rules", DEPLOY / "prometheus" / "alerts.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def expressions() -> list[str]:
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    dashboard = json.loads((DEPLOY / "prometheus" / "dashboard.json").read_text())
    found = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    return found + [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_alerts_and_dashboard_ask_for_metrics_that_there_are() -> None:
    named = {name for text in expressions() for name in re.findall(r"\b(?:recorder|process)_\w+", text)}
    assert named <= DOCUMENTED | OF_PROCESS
    assert len(named) > 20


def test_systemd_takes_the_unit_and_calls_it_safe(tmp_path: Path) -> None:
    needs("systemd-analyze")
    unit = (DEPLOY / "systemd" / "recorder-daemon.service").read_text()
    program = tmp_path / "recorder"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = tmp_path / "recorder-daemon.service"
    path.write_text(unit.replace("/opt/recorder/bin/recorder", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60)
    own = [line for line in done.stderr.splitlines() if "recorder-daemon" in line]
    assert (done.returncode, own) == (0, [])
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", path], capture_output=True, text=True, timeout=60
    )
    (level,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", judged.stdout)
    assert float(level) < 3.0, judged.stdout


def test_the_example_of_a_settings_file_is_one() -> None:
    path = DEPLOY / "systemd" / "daemon.toml"
    assert load_daemon_settings(str(path), {}, {}).fresh_s == 10
    assert "SET_ME" in tomllib.loads(path.read_text())["to"]


@pytest.mark.parametrize(("name", "key"), [("daemonset.yaml", "containers"), ("sidecar.yaml", "initContainers")])
def test_the_options_of_a_manifest_are_those_of_the_daemon(name: str, key: str) -> None:
    (document,) = yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())
    container = document["spec"]["template"]["spec"][key][0]
    assert container["command"] == ["recorder", "daemon"]
    words = container["args"]
    options = {words[at][2:].replace("-", "_"): words[at + 1] for at in range(0, len(words), 2)}
    options["watch"] = [options["watch"]]
    assert load_daemon_settings(None, options, {}).watch == ("/recordings",)
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_the_catalog_is_made_by_one_job_with_the_options_of_its_command() -> None:
    (document,) = yaml.safe_load_all((DEPLOY / "kubernetes" / "catalog.yaml").read_text())
    assert document["spec"]["concurrencyPolicy"] == "Forbid", "commits of one table exclude each other"
    (container,) = document["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    program, command, path, option, name = container["command"]
    assert (program, command, path) == ("recorder", "catalog", "s3://SET_ME/runs")
    assert option in commands_help("catalog") and name == CONFIGURED
    names = {one["name"] for one in container["env"]}
    assert {f"PYICEBERG_CATALOG__{CONFIGURED.upper()}__{word}" for word in ("TYPE", "URI")} < names


def commands_help(command: str) -> str:
    words = [sys.executable, "-m", "recorder", command, "--help"]
    return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout


def run_epilog(folder: Path, **values: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("recorder")
    environment = {"PATH": os.environ["PATH"], "RECORDER_BIN": str(program), "TMPDIR": str(folder), **values}
    script = DEPLOY / "slurm" / "epilog.sh"
    return subprocess.run(["bash", script], capture_output=True, text=True, timeout=120, env=environment)


def test_an_epilog_ships_what_a_job_has_left(tmp_path: Path) -> None:
    run = make_small_run(tmp_path / "scratch" / "recorder-7" / "run-a")
    there = tmp_path / "there"
    values = {"SCRATCH": str(tmp_path / "scratch"), "SHIP_TO": str(there), "SLURM_JOB_ID": "7"}
    done = run_epilog(tmp_path, **values)
    assert done.returncode == 0, done.stderr
    assert "all files are there" in done.stderr
    assert open_run(there / "7" / "run-a").num_rows == open_run(run).num_rows
    assert run_epilog(tmp_path, **values | {"SLURM_JOB_ID": "8"}).returncode == 0, "a job that recorded nothing"


def test_an_epilog_with_wrong_values_says_so(tmp_path: Path) -> None:
    assert "is still SET_ME" in run_epilog(tmp_path).stderr
    assert "no epilog of a Slurm job" in run_epilog(tmp_path, SHIP_TO=str(tmp_path)).stderr
