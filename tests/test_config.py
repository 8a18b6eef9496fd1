"""Settings: where they come from, what is allowed, and how a mistake is told."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder import config
from recorder.config import DEFAULT_RULES, PRESETS, Loaded, check_dir, is_enabled, is_native_wanted, load_settings
from recorder.daemon.settings import load_daemon_settings
from recorder.errors import ConfigError
from recorder.rules import Schedule, parse_rules


def explained(loaded: Loaded) -> dict[str, tuple[object, str]]:
    return {row.name: (row.value, row.source) for row in loaded.explain()}


def test_an_argument_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "recorder.toml"
    file.write_text('pool_bytes = "512MiB"\ncodec_level = 3\npolicy = "drop"\n')
    environ = {"RECORDER_CONFIG": str(file), "RECORDER_CODEC_LEVEL": "4", "RECORDER_POLICY": "wait"}
    rows = explained(load_settings({"policy": "drop"}, environ))
    assert rows["pool_bytes"] == (512 << 20, f"file {file}")
    assert rows["codec_level"] == (4, "environment")
    assert rows["policy"] == ("drop", "argument")
    assert rows["on_quota"] == ("retire", "default")


def test_rules_read_the_same_from_text_and_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "recorder.toml"
    file.write_text(
        "[[rules]]\nmodule = ['layers.*.mlp', '!layers.0.*']\nsite = ['output', 'grad']\nkeep = 'tensor,stats'\n"
        "steps = '0:1000:100'\n[[rules]]\nclass = 'Linear'\nrank = 0\nleaf = true\n"
    )
    from_file = load_settings({}, {"RECORDER_CONFIG": str(file)}).settings.rules
    text = "module=layers.*.mlp,!layers.0.* site=output,grad keep=tensor,stats steps=0:1000:100"
    text += "; class=Linear rank=0 leaf=yes"
    assert from_file == parse_rules(text)


def test_the_text_of_a_rule_reads_back_as_the_rule() -> None:
    rules = [
        *DEFAULT_RULES,
        *parse_rules("module='a b','' class=re:(Linear|Conv).* rank=0,4:8 name=x.*; leaf=yes site=*"),
        *parse_rules("keep=ring,stats before=7 after=0"),
    ]
    assert list(parse_rules("; ".join(rule.text for rule in rules))) == rules


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RECORDER_RULS": "x"}, r"RECORDER_RULS = 'x' .*did you mean 'RECORDER_RULES'"),
        ({"RECORDER_dir": "x"}, r"RECORDER_dir = 'x' .*is no setting"),
        (
            {"RECORDER_PRESET": "twn"},
            r"preset = 'twn': allowed is none or default or light or .* \(did you mean 'twin'\?\)",
        ),
        ({"RECORDER_POLICY": "wat"}, r"policy = 'wat': allowed is wait or drop"),
        ({"RECORDER_POOL_BYTES": "big"}, r"RECORDER_POOL_BYTES .*expected bytes, such as"),
        ({"RECORDER_POOL_BYTES": "12"}, r"pool_bytes = 12: allowed is 0 .* at least 1 MiB"),
        ({"RECORDER_MAX_BYTES": "1MB"}, r"max_bytes = 1000000: allowed is 1048576 to 1152921504606846976 "),
        ({"RECORDER_CODEC_LEVEL": "99"}, r"codec_level = 99: allowed is -7 to 19 .*environment"),
        ({"RECORDER_DIR": "/data/SET_ME"}, r"dir = '/data/SET_ME': still has its placeholder"),
        ({"RECORDER_NAME": "latest"}, r"name = 'latest': allowed are up to 100 letters, digits and .* not 'latest'"),
        ({"RECORDER_NAME": "../x"}, r"name = '../x': allowed are"),
        ({"RECORDER_CODEC_LEVEL": "1.5"}, r"expected a whole number"),
        ({"RECORDER_CLOSE_DEADLINE_S": "nan"}, r"expected a number"),
        ({"RECORDER_CONFIG": "/no/such/file.toml"}, r"RECORDER_CONFIG = '/no/such/file.toml' cannot be read: No such"),
        ({"RECORDER_RULES": "site=otput"}, r"unknown site 'otput' \(did you mean 'output'\?\); allowed: input"),
        ({"RECORDER_RULES": "sites=output"}, r"unknown key 'sites' \(did you mean 'site'\?\)"),
        ({"RECORDER_RULES": "output"}, r"'output' in 'output' is not of the form key=value"),
        ({"RECORDER_RULES": "site=grad site=output"}, r"'site' stands twice"),
        ({"RECORDER_RULES": "steps=1:2:0"}, r"stride of 0"),
        ({"RECORDER_RULES": "steps=often"}, r"'often' is no number.*examples: 0:1000:100"),
        ({"RECORDER_RULES": "module=re:("}, r"not a regular expression"),
        ({"RECORDER_RULES": "keep=everything"}, r"unknown keep 'everything'.*tensor, stats, fingerprint"),
        ({"RECORDER_RULES": "module='a"}, r"cannot be split into words"),
        ({"RECORDER_RULES": "keep=ring,tensor"}, r"keep = 'ring,tensor': tensor and replay are written at once, ring"),
        ({"RECORDER_RULES": "keep=ring before=-1"}, r"before = '-1': expected a number of steps, 0 to 100000"),
        ({"RECORDER_RULES": "keep=ring after=1.5"}, r"after = '1.5': expected a number of steps"),
        ({"RECORDER_RULES": "site=grad before=3"}, r"before = '3': it needs keep=ring; add keep=ring, or leave it out"),
        (
            {"RECORDER_RULES": "keep=ring; site=grad keep=ring before=8"},
            r"before=4 after=2 and before=8 after=2: all ru",
        ),
        ({"RECORDER_TRIGGERS": "nan"}, r"triggers = 'nan': allowed is none, or a comma list of exception, signal, ha"),
        ({"RECORDER_TRIGGERS": "none,hang"}, r"triggers = 'none,hang': allowed is none, or"),
        ({"RECORDER_TRIGGER_SIGNAL": "SIGKILL"}, r"trigger_signal = 'SIGKILL': allowed is nothing, or SIGHUP, SIGUS"),
        ({"RECORDER_RING_SHARE": "1"}, r"ring_share = 1.0: allowed is 0.05 to 0.9"),
    ],
)
def test_a_mistake_is_told_with_key_value_and_what_is_allowed(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings({}, environ)


@pytest.mark.parametrize("value", ["9" * 5_000, "[" * 10_000])
def test_a_file_beyond_what_python_takes_is_refused(tmp_path: Path, value: str) -> None:
    file = tmp_path / "recorder.toml"
    file.write_text(f"pool_bytes = {value}")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_settings({}, {"RECORDER_CONFIG": str(file)})
    with pytest.raises(ConfigError, match="is not TOML"):
        load_daemon_settings(str(file), {}, {})


def test_a_file_that_is_no_toml_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "recorder.toml"
    file.write_text("pool_bytes = = 3")
    with pytest.raises(ConfigError, match=r"is not TOML: .*line 1"):
        load_settings({}, {"RECORDER_CONFIG": str(file)})


def test_the_flag_is_on_or_off_or_a_mistake() -> None:
    assert [is_enabled({"RECORDER": value}) for value in ("1", "true", "on")] == [True] * 3
    assert [is_enabled({"RECORDER": value}) for value in ("", "0", "off")] == [False] * 3
    assert not is_enabled({})
    with pytest.raises(ConfigError, match="RECORDER = 'maybe'"):
        is_enabled({"RECORDER": "maybe"})


@given(st.integers(0, 60), st.none() | st.integers(0, 60), st.integers(1, 7), st.integers(0, 80))
def test_a_slice_holds_what_range_holds(start: int, stop: int | None, stride: int, number: int) -> None:
    schedule = Schedule.parse(f"{start}:{'' if stop is None else stop}:{stride}")
    assert (number in schedule) == (number in range(start, 1000 if stop is None else stop, stride))


def test_powers_of_two_begin_with_zero_and_one() -> None:
    schedule = Schedule.parse("pow2,11")
    assert [n for n in range(20) if n in schedule] == [0, 1, 2, 4, 8, 11, 16]


def test_importing_the_package_loads_neither_torch_nor_pyarrow_nor_numpy() -> None:
    script = "import sys, recorder; print(sorted({'torch', 'pyarrow', 'numpy', 'pandas', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_rules_are_added_to_those_of_a_preset() -> None:
    alone = load_settings({}, {"RECORDER_PRESET": "nan"})
    assert (alone.settings.rules, alone.sources["rules"]) == (PRESETS["nan"], "preset nan")
    both = load_settings({"rules": "site=grad keep=tensor"}, {"RECORDER_PRESET": "nan"})
    assert both.settings.rules == (*PRESETS["nan"], *parse_rules("site=grad keep=tensor"))
    assert both.sources["rules"] == "preset nan and argument"


def test_a_preset_is_set_by_file_environment_and_argument(tmp_path: Path) -> None:
    file = tmp_path / "recorder.toml"
    file.write_text("preset = 'light'\n")
    from_file = {"RECORDER_CONFIG": str(file)}
    assert load_settings({}, from_file).settings.rules == PRESETS["light"]
    assert load_settings({}, {**from_file, "RECORDER_PRESET": "full"}).settings.rules == PRESETS["full"]
    assert load_settings({"preset": "twin"}, from_file).settings.rules == PRESETS["twin"]
    assert load_settings({"preset": "none"}, from_file).settings.rules == DEFAULT_RULES


def check(directory: object) -> None:
    check_dir(load_settings({"dir": directory}, {}))


def test_a_directory_for_runs_may_be_missing_and_is_not_made(tmp_path: Path) -> None:
    check(tmp_path / "not" / "yet" / "there")
    check(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path)
    check(tmp_path / "linked" / "recordings")
    assert [path.name for path in tmp_path.iterdir()] == ["linked"]


@pytest.mark.parametrize("below", ["", "recordings", "deep/er"])
def test_a_directory_for_runs_that_is_or_lies_below_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"dir \(argument\): dir = '.*file.* is no directory; name a directory that"):
        check(tmp_path / "file" / below)


def test_a_link_that_leads_nowhere_is_no_directory_for_runs(tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is no directory"):
        check(tmp_path / "linked" / "recordings")


def test_the_source_of_a_wrong_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^RECORDER_DIR \(environment\): dir = '/dev/null/runs': /dev/null is no"):
        check_dir(load_settings({}, {"RECORDER_DIR": "/dev/null/runs"}))


def test_two_windows_of_the_ring_name_the_preset_that_brought_one() -> None:
    environ = {"RECORDER_PRESET": "blackbox", "RECORDER_RULES": "site=grad keep=ring before=5"}
    with pytest.raises(ConfigError, match=r"same numbers \(it is from: preset blackbox and environment\)$"):
        load_settings(environ=environ)


def test_a_file_system_that_does_not_answer_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(config, "_LONGEST_LOOK_S", 0.05)
    monkeypatch.setattr(config, "_problems_of_dir", lambda wanted: iter([f"never answers {goes_on.wait(60)}"]))
    check(tmp_path)
    goes_on.set()


_READ_ONLY = """
import subprocess, sys
from recorder.config import check_dir, load_settings
subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", sys.argv[1]], check=True)
check_dir(load_settings({"dir": sys.argv[1] + "/runs"}, {}))
"""


def test_a_read_only_file_system_is_refused_also_for_root(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine gives no mount namespace")
    command = ["unshare", "-rm", sys.executable, "-c", _READ_ONLY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert f"/runs': {tmp_path} is on a read-only file system; name a directory" in done.stderr


_FORBIDDEN = """
import os, sys
from recorder.config import check_dir, load_settings
if os.getuid() == 0:
    os.setuid(65534)
check_dir(load_settings({"dir": sys.argv[1] + "/runs"}, {}))
"""


def test_a_directory_that_this_user_may_not_write_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir()
    for each in (directory, *tmp_path.parents[:3], tmp_path):
        if os.getuid() == 0 and str(each).startswith(str(Path(tempfile.gettempdir()))):
            each.chmod(0o755)
    directory.chmod(0o555)
    done = subprocess.run([sys.executable, "-c", _FORBIDDEN, str(directory)], capture_output=True, text=True)
    assert "ConfigError" in done.stderr and "cannot be " in done.stderr, done.stderr


@pytest.mark.parametrize(("value", "is_wanted"), [(None, True), ("", True), ("1", True), ("0", False), (" No ", False)])
def test_readers_do_without_compiled_loops_where_the_environment_says_so(
    value: str | None, is_wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECORDER_NATIVE", raising=False)
    if value is not None:
        monkeypatch.setenv("RECORDER_NATIVE", value)
    assert is_native_wanted() is is_wanted
