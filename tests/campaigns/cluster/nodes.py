"""Several machines on one: nodes with a network, a host name, processes and scratch of their own, and Slurm over them.

All of it lives in namespaces of the calling process, which `scripts/test-cluster` gives a private network, file system
and process table. So nothing is left behind, however the tests end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SUBNET = "10.77.0"
LOGIN = f"{SUBNET}.254"
"""The address of this process's own namespace: where Slurm's controller runs and jobs are submitted."""


def command(*words: str | Path, **settings: str) -> str:
    """Run a command that must succeed, and return what it printed."""
    done = subprocess.run(
        [*map(str, words)], env={**os.environ, **settings}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def wait_for(what: str, condition: Callable[[], bool], deadline_s: float = 120.0, pause_s: float = 0.25) -> None:
    """Wait until ``condition()`` is true; an AssertionError that names ``what`` was awaited if it never is."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"in vain awaited for {deadline_s:.0f} s: {what}"
        time.sleep(pause_s)


def child(pid: int) -> int:
    (found,) = command("ps", "-o", "pid=", "--ppid", str(pid)).split()
    return int(found)


class Node:
    """One machine: until it is `kill`ed, all its processes at once, as when the power fails."""

    def __init__(self, number: int, names: Sequence[str], folder: Path) -> None:
        self.name = names[0]
        self.names = names
        self.address = f"{SUBNET}.{number}"
        self.folder = folder / self.name
        """Where the node's daemon logs."""
        self._link = f"node{number}"
        self._init: subprocess.Popen[bytes] | None = None
        self.scratch = folder / "scratch"
        """The path of a file system that every node has for itself."""

    def start(self, daemon: str = "sleep infinity") -> None:
        self.folder.mkdir(exist_ok=True)
        self.scratch.mkdir(exist_ok=True)
        command("ip", "netns", "add", self.name)
        command("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        command("ip", "link", "set", self._link, "master", "switch", "up")
        inside = ("ip", "netns", "exec", self.name)
        command(*inside, "ip", "link", "set", "lo", "up")
        command(*inside, "ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        command(*inside, "ip", "link", "set", "eth0", "up")
        # A process of its own stays in front of the daemon: it reaps what the daemon leaves.
        script = f"hostname {self.name}; mount -t tmpfs tmpfs {self.scratch}; touch {self.folder}/up; {daemon} & wait"
        with (self.folder / "daemon.log").open("ab") as log:
            self._init = subprocess.Popen(
                [
                    *("nsenter", f"--net=/run/netns/{self.name}"),  # `ip netns exec` would hide the control groups
                    *("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("bash", "-c", script),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(f"node {self.name}", (self.folder / "up").exists)

    def popen(self, words: Sequence[str | Path], env: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
        """Start a command on the node, outside of Slurm, its standard output and standard error in a file."""
        assert self._init is not None
        inside = ("nsenter", "--target", str(child(self._init.pid)), "--net", "--uts", "--mount", "--pid")
        with output.open("wb") as file:
            return subprocess.Popen(
                [*inside, *map(str, words)],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        if self._init is not None:
            self._init.send_signal(signal.SIGKILL)
            self._init.wait()
            self._init = None
            with contextlib.suppress(AssertionError):  # it may have gone with its other end
                command("ip", "link", "delete", self._link)
            command("ip", "netns", "delete", self.name)
            (self.folder / "up").unlink()


def network(folder: Path, names: Sequence[Sequence[str]]) -> list[Node]:
    """Nodes of these names, not started, on one switch; all know each other. Once in a process."""
    command("ip", "link", "set", "lo", "up")
    command("mount", "-t", "tmpfs", "tmpfs", "/run")  # named network namespaces and Munge's socket are kept there
    nodes = [Node(number, given, folder) for number, given in enumerate(names, 1)]
    hosts = folder / "hosts"
    lines = [f"{node.address} {' '.join(node.names)}" for node in nodes]
    hosts.write_text("\n".join(["127.0.0.1 localhost", f"{LOGIN} login", *lines, ""]))
    command("mount", "--bind", hosts, "/etc/hosts")
    command("hostname", "login")
    command("ip", "link", "add", "switch", "type", "bridge")
    command("ip", "address", "add", f"{LOGIN}/24", "dev", "switch")
    command("ip", "link", "set", "switch", "up")
    return nodes


CONFIGURATION = """\
ClusterName=recorder
SlurmctldHost=login({login})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait={kill_wait_s}
InactiveLimit=0
MinJobAge=3600
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,defer_batch,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed.txt
NodeName=n[1-{num_nodes}] CPUs=4 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


class Slurm:
    def __init__(self, folder: Path, nodes: Sequence[Node], kill_wait_s: int = 30) -> None:
        self.folder = folder
        self.nodes = {node.name: node for node in nodes}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._kill_wait_s = kill_wait_s

    def __enter__(self) -> Slurm:
        conf = self.folder / "slurm.conf"
        text = CONFIGURATION.format(
            login=LOGIN, folder=self.folder, num_nodes=len(self.nodes), kill_wait_s=self._kill_wait_s
        )
        conf.write_text(text)
        os.environ["SLURM_CONF"] = str(conf)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self._start(
            *("munged", "--foreground", "--force", f"--key-file={key}", "--socket=/run/munge.socket"),
            *(f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munged.seed", "--num-threads=2"),
            f"--log-file={self.folder}/munged.log",
        )
        wait_for("munged", Path("/run/munge.socket").exists)
        self._start("slurmctld", "-D", "-f", str(conf))
        for node in self.nodes.values():
            self.boot(node)
        wait_for("all nodes idle", lambda: self.idle() == sorted(self.nodes))
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.kill()
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def boot(self, node: Node) -> None:
        node.start(f"slurmd -D -f {self.folder}/slurm.conf")

    def idle(self) -> list[str]:
        return sorted(
            command("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N", "--partition=low").split()
        )

    def state(self, job: str) -> str:
        return self.shown(job)["JobState"]

    def shown(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says, by its names."""
        text = command("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def ended(self, job: str, deadline_s: float = 240.0) -> str:
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
        wait_for(f"the end of job {job}", lambda: self.state(job) in over, deadline_s)
        return self.state(job)

    def _start(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.out").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            )
