"""Whether the process that a manifest names still runs: a number alone does not tell."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest

from recorder.format.manifest import Lifetime
from recorder.system.processes import live_instances, own_process


def runs(said: dict[str, Any]) -> bool | None:
    """Whether the process runs of which a manifest says this."""
    return Lifetime.read(said).is_running


def of_another() -> tuple[dict[str, Any], subprocess.Popen[str]]:
    """A process that waits, and what its manifest would say."""
    imports = "import json, sys; from recorder.system.processes import own_process"
    code = f"{imports}; print(json.dumps(own_process()), flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return json.loads(process.stdout.readline()), process


def test_a_process_runs_until_it_has_ended_and_also_before_anyone_asks_how() -> None:
    said, process = of_another()
    with process:
        assert runs(said) is True
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
        assert runs(said) is False
    assert runs(said) is False


def test_another_process_of_the_same_number_is_another() -> None:
    own = own_process()
    assert runs(own) is True
    realm, _, started = own["process"].rpartition(":")
    assert runs(own | {"process": f"{realm}:{int(started) - 1}"}) is False


@pytest.mark.parametrize(
    "changes", [{"host": "elsewhere"}, {"process": "other-boot:1:7"}, {"pid": None}, {"pid": -1}, {"pid": True}]
)
def test_what_is_out_of_sight_cannot_be_told(changes: dict[str, Any]) -> None:
    assert runs(own_process() | changes) is None


@pytest.mark.parametrize("process", [[], 7, {}, "", ":", "x" * 100_000])
def test_nonsense_of_a_stranger_tells_nothing(process: Any) -> None:
    assert runs(own_process() | {"process": process}) is None


def test_version_1_0_names_a_number_alone() -> None:
    own = own_process()
    del own["process"]
    assert runs(own) is True
    assert runs(own | {"pid": 2**22 + 1}) is False


def test_a_process_in_a_namespace_of_its_own_is_out_of_sight() -> None:
    if subprocess.run(["unshare", "-rpf", "true"], capture_output=True).returncode != 0:
        pytest.skip("no namespaces here")
    code = "import json; from recorder.system.processes import own_process; print(json.dumps(own_process()))"
    inside = subprocess.run(
        ["unshare", "-rpf", "--mount-proc", sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert runs(json.loads(inside.stdout)) is None


def test_objects_of_a_class_are_found_whatever_the_classes_of_others_refuse() -> None:
    class Refuses(type):
        __hash__ = None  # type: ignore[assignment]

        def __instancecheck__(cls, instance: Any) -> bool:
            raise AssertionError("asked a class that is not the program's to ask")

    class Other(metaclass=Refuses):
        pass

    class Base:
        pass

    class Below(Base):
        pass

    base, below, other = Base(), Below(), Other()
    assert {id(found) for found in live_instances(Base)} == {id(base), id(below)}
    assert live_instances(Other) == [other]


def test_a_search_for_instances_disturbs_no_other_thread_that_makes_a_tuple() -> None:
    """CPython refuses to finish a tuple that anything else refers to, such as the list of all objects."""
    errors: list[SystemError] = []
    is_over = threading.Event()

    def make_tuples() -> None:
        while not is_over.is_set():
            try:
                tuple(number for number in range(50))
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=make_tuples) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        live_instances(threading.Thread)
    is_over.set()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_search_for_instances_leaves_no_object_behind() -> None:
    class Kept:
        pass

    gc.collect()
    one = Kept()
    is_gone = weakref.ref(one)
    assert live_instances(Kept) == [one]
    gc.disable()
    try:
        del one
        assert is_gone() is None
    finally:
        gc.enable()
