"""deploy/kubernetes and deploy/container: manifests against schemas, and pods as they say. `scripts/test-cluster`.

There is no Kubernetes here. A pod is what its manifest describes: a host of its own in the network, a file system that
is read-only but for its volumes, a user without rights, the environment, and the entry point as process 1.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubeflow.training.models
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

import recorder
from tests.campaigns.cluster.nodes import Node, child, wait_for
from tests.rigs.schemas import lost

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
PROGRAM = "tests/campaigns/cluster/train.py"
Nodes = Callable[..., list[Node]]


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def kind(path: Path, name: str) -> dict[str, Any]:
    (found,) = [document for document in documents(path) if document["kind"] == name]
    return found


# Manifests.


def unknown_to_kubeflow(document: dict[str, Any]) -> list[str]:
    """Fields that the published model of this kind does not have. A value of another type raises."""
    if document["kind"] == "TrainJob":
        model = TrainerV1alpha1TrainJob.from_dict(document)
        assert model is not None
        return lost(document, json.loads(model.to_json()))
    return unknown_to_operator(document, "KubeflowOrgV1PyTorchJob")


def unknown_to_operator(said: Any, model: str, at: str = "") -> list[str]:
    """Fields that the Training Operator's models do not have, which these models do not report themselves."""
    inner = re.fullmatch(r"dict\(str, (\w+)\)|list\[(\w+)\]", model)
    if inner:
        items = said.items() if inner[1] else enumerate(said)
        return [hole for key, item in items for hole in unknown_to_operator(item, inner[1] or inner[2], f"{at}{key}.")]
    if model == "V1PodTemplateSpec":
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "any"}, "template": said}
        kubernetes_validate.validate(template, "1.28", strict=True)
    if not model.startswith("Kubeflow"):
        assert model not in ("int", "str", "bool") or type(said).__name__ == model, f"{at} is no {model}: {said!r}"
        return []
    described = getattr(kubeflow.training.models, model)
    types = {described.attribute_map[name]: kind for name, kind in described.openapi_types.items()}
    known = [
        hole for name in said if name in types for hole in unknown_to_operator(said[name], types[name], f"{at}{name}.")
    ]
    return known + [f"{at}{name}" for name in said if name not in types]


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_manifests_fit_the_published_schemas(version: str) -> None:
    kinds = []
    for path, document in [(manifest, document) for manifest in MANIFESTS for document in documents(manifest)]:
        kinds.append(document["kind"])
        if "kubeflow" in document["apiVersion"]:
            assert unknown_to_kubeflow(document) == []
            print(f"{path.name}: {document['kind']} fits the model of {document['apiVersion']}")
        else:
            used = kubernetes_validate.validate(document, version, strict=True)
            print(f"{path.name}: {document['kind']} fits Kubernetes {used}, strictly")
    jobs = ["Job", "Job", "Job", "PersistentVolumeClaim", "PyTorchJob", "Service", "Service", "TrainJob"]
    assert sorted(kinds) == ["ConfigMap", "CronJob", "DaemonSet", "Deployment", "Deployment", *jobs]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_misspelt_field_is_found(path: Path) -> None:
    for document in documents(path):
        document["specs"] = {}
        if "kubeflow" in document["apiVersion"]:
            assert unknown_to_kubeflow(document) == ["specs"]
        else:
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(document, "1.28", strict=True)


# Pods.

UID = str(uuid.uuid4())
"""Of the Job that a pod belongs to."""
TORCHRUN = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_PORT": "29500"}
SCRIPT = """\
set -euo pipefail
new=$1; shift
give() { mkdir -p "$new$1"; mount --bind "${2:-$1}" "$new$1"; mount -o "remount,bind,${3:-ro}" "$new$1"; }
mount -t tmpfs -o mode=755 image "$new"
mkdir -p "$new/proc" "$new/dev" "$new/etc"
cp /etc/hosts /etc/passwd /etc/group /etc/ld.so.cache "$new/etc"
mount --rbind /dev "$new/dev"
mount -t proc proc "$new/proc"
%s
mount -o remount,ro "$new"
exec /usr/sbin/chroot "$new" setpriv --reuid %d --regid %d --groups %d --no-new-privs \\
  --bounding-set=-all --inh-caps=-all env --chdir=%s "$@"
"""


class Pod:
    """The pod that a manifest describes, on a node: a host, a user and a file system of its own."""

    def __init__(self, node: Node, template: dict[str, Any], index: int, folder: Path, **operators: str) -> None:
        self.node = node
        self._folder = folder
        self._spec = template["spec"]
        (self._container,) = self._spec["containers"]
        about = {
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
            "metadata.labels['batch.kubernetes.io/controller-uid']": UID,
        }
        image = re.findall(r"^ENV (.*)$", (DEPLOY / "container" / "Containerfile").read_text(), re.MULTILINE)
        self._env = dict(word.split("=", 1) for word in image[0].split())
        self._env |= {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        for variable in self._container.get("env", []):
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            self._env[variable["name"]] = about[field] if field else variable["value"]
        if "PET_NPROC_PER_NODE" in self._env:
            self._env["PET_NPROC_PER_NODE"] = "2"
        self._env |= operators
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        return (self._folder / f"{self.node.name}.out").read_text(errors="replace")

    def start(self, *args: str) -> None:
        volumes = {volume["name"]: volume for volume in self._spec["volumes"]}
        mounts = []
        for mount in self._container["volumeMounts"]:
            volume, path = volumes[mount["name"]], mount["mountPath"]
            if "emptyDir" in volume:
                mounts.append(f'mkdir -p "$new{path}"; mount -t tmpfs -o mode=1777 empty "$new{path}"')
            elif "configMap" in volume:
                mounts.append(f"give {path} {self._folder / volume['configMap']['name']}")
            else:
                mounts.append(f"give {path} {self._folder / volume['persistentVolumeClaim']['claimName']} rw")
        system = ["/usr", "/bin", "/sbin", "/lib", "/lib64"]
        image = dict.fromkeys(
            [*(path for path in system if Path(path).exists()), sys.base_prefix, sys.prefix, str(ROOT)]
        )
        mounts += [f"give {path}" for path in image]
        context, own = self._spec["securityContext"], self._container["securityContext"]
        assert context["runAsNonRoot"] and own["readOnlyRootFilesystem"] and own["capabilities"]["drop"] == ["ALL"]
        ids = context["runAsUser"], context["runAsGroup"], context["fsGroup"]
        new = self._folder / "image"
        new.mkdir(exist_ok=True)
        script = SCRIPT % ("\n".join(mounts), *ids, ROOT)
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", script, "pod", str(new)]
        entry = str(DEPLOY / "container" / "entrypoint.sh")
        output = self._folder / f"{self.node.name}.out"
        self._process = self.node.popen([*words, entry, *args], self._env, output)

    def ended(self, deadline_s: float = 240) -> int:
        assert self._process is not None
        return self._process.wait(deadline_s)

    def terminate(self) -> None:
        """SIGTERM to process 1 of the pod, as the kubelet sends it."""
        assert self._process is not None
        os.kill(child(child(self._process.pid)), signal.SIGTERM)


@pytest.fixture
def volumes(folder: Path) -> Path:
    """Where the volumes lie: the recordings, which belong to the group that `fsGroup` names, and the config map."""
    recordings = folder / "recordings"
    recordings.mkdir()
    os.chown(recordings, 0, 1000)
    recordings.chmod(0o2775)
    settings = folder / "recorder-settings"
    settings.mkdir()
    for name, text in kind(DEPLOY / "kubernetes" / "settings.yaml", "ConfigMap")["data"].items():
        (settings / name).write_text(text)
    return folder


@pytest.fixture
def nodes(machines: dict[str, Node]) -> Iterator[Nodes]:
    """Nodes by name, started when asked for."""
    started: list[Node] = []

    def start(*names: str) -> list[Node]:
        for name in names:
            machines[name].start()
            started.append(machines[name])
        return [machines[name] for name in names]

    yield start
    for node in started:
        node.kill()


def job_template(name: str = "indexed-job.yaml") -> dict[str, Any]:
    template: dict[str, Any] = kind(DEPLOY / "kubernetes" / name, "Job")["spec"]["template"]
    return template


def pods_of_the_job(nodes: Nodes, volumes: Path) -> list[Pod]:
    return [Pod(node, job_template(), i, volumes) for i, node in enumerate(nodes("train-0", "train-1"))]


def merged(volumes: Path, nodes: Nodes) -> tuple[int, str]:
    """Exit code and log of the Job that merges, on a node that is there already or is started."""
    (node,) = nodes("train-node-0-0")
    pod = Pod(node, job_template("merge.yaml"), 0, volumes)
    pod.start("merge")
    return pod.ended(), pod.output


def test_an_indexed_job_leaves_one_run_that_merges(nodes: Nodes, volumes: Path) -> None:
    pods = pods_of_the_job(nodes, volumes)
    for pod in pods:
        pod.start("train", PROGRAM, "--steps=5")
    assert [pod.ended() for pod in pods] == [0, 0], pods[0].output + pods[1].output
    run = recorder.open_run(volumes / "recordings")
    assert (run.run_id, run.ranks, run.steps) == (UID, [0, 1, 2, 3], [0, 1, 2, 3, 4])
    writers = [json.loads(path.read_text()) for path in volumes.glob("recordings/*/*/*/_writer.json")]
    assert sorted((writer["rank"], writer["host"]) for writer in writers) == [
        *((0, "train-0"), (1, "train-0"), (2, "train-1"), (3, "train-1"))
    ]
    code, said = merged(volumes, nodes)
    print(said)
    assert (code, "no findings" in said) == (0, True), said
    assert recorder.open_run(volumes / "recordings" / "merged").steps == run.steps


@pytest.mark.slow
def test_a_pod_that_is_deleted_has_flushed(nodes: Nodes, volumes: Path) -> None:
    pods = pods_of_the_job(nodes, volumes)
    for pod in pods:
        pod.start("train", PROGRAM, "--steps=5000", "--pause=0.2")
    wait_for("step 3", lambda: pods[0].output.count("step 3 is over") == 2)
    for pod in pods:
        pod.terminate()
    assert all(pod.ended() for pod in pods)
    code, said = merged(volumes, nodes)
    assert (code, "no findings" in said) == (0, True), said


@pytest.mark.slow
def test_pods_that_start_again_after_the_death_of_a_node_go_on_in_the_same_run(nodes: Nodes, volumes: Path) -> None:
    program = ("train", PROGRAM, "--steps=14", "--pause=0.5", "--checkpoint=/recordings/checkpoint.pt")
    pods = pods_of_the_job(nodes, volumes)
    for pod in pods:
        pod.start(*program)
    wait_for("step 3", lambda: pods[0].output.count("step 3 is over") == 2)
    pods[1].node.kill()
    assert pods[1].ended() != 0
    pods[0].terminate()  # its ranks may wait for the others for half an hour, in a collective
    assert pods[0].ended() != 0
    pods[1].node.start()
    for pod in pods:
        pod.start(*program)
    assert [pod.ended() for pod in pods] == [0, 0], pods[0].output + pods[1].output
    run = recorder.open_run(volumes / "recordings")
    assert (run.run_id, run.ranks, run.steps) == (UID, [0, 1, 2, 3], list(range(14)))
    code, said = merged(volumes, nodes)
    assert code == 1 and "the record ends in step" in said, said  # what the dead ranks had not flushed is lost


@pytest.mark.slow
def test_the_run_of_skypilot_leaves_one_run(nodes: Nodes, folder: Path) -> None:
    task = documents(DEPLOY / "skypilot" / "train.yaml")[0]
    assert "/recordings" in task["file_mounts"]
    run = task["run"].replace("SET_ME ", f"{ROOT / PROGRAM} ", 1).replace("/recordings/\n", f"{folder}/bucket/\n")
    (folder / "bucket").mkdir()
    hosts = nodes("train-0", "train-1")
    started = []
    for rank, node in enumerate(hosts):
        env = {
            **{"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            # What SkyPilot sets.
            **{"SKYPILOT_NODE_IPS": "\n".join(host.address for host in hosts), "SKYPILOT_NODE_RANK": str(rank)},
            **{"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "2", "SKYPILOT_TASK_ID": "sky-1"},
            "HOME": str(node.scratch),
        }
        started.append(node.popen(["bash", "-c", run], env, folder / f"{node.name}.out"))
    said = [process.wait(240) for process in started], [(folder / f"{node.name}.out").read_text() for node in hosts]
    assert said[0] == [0, 0], said[1]
    found = recorder.open_run(folder / "bucket" / "sky-1")
    assert (found.ranks, found.steps) == ([0, 1, 2, 3], [0, 1, 2, 3, 4])


@pytest.mark.slow
def test_a_trainjob_leaves_one_run(nodes: Nodes, volumes: Path) -> None:
    spec = kind(DEPLOY / "kubernetes" / "trainjob.yaml", "TrainJob")["spec"]
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = job["template"]["spec"]["template"]
    assert spec["trainer"]["command"] == ["recorder-entrypoint"]
    template["spec"]["containers"][0]["env"] = spec["trainer"]["env"]
    # What Kubeflow Trainer sets in the pods of its runtime torch-distributed.
    master = {**TORCHRUN, "PET_MASTER_ADDR": "train-node-0-0.train"}
    pods = [
        Pod(node, template, i, volumes, **master, PET_NODE_RANK=str(i))
        for i, node in enumerate(nodes("train-node-0-0", "train-node-0-1"))
    ]
    for pod in pods:
        pod.start("train", PROGRAM, "--steps=3")
    assert [pod.ended() for pod in pods] == [0, 0], pods[0].output + pods[1].output
    run = recorder.open_run(volumes / "recordings")
    assert (run.run_id, run.ranks, run.steps) == (UID, [0, 1, 2, 3], [0, 1, 2])


@pytest.mark.slow
def test_a_pytorchjob_leaves_one_run(nodes: Nodes, volumes: Path) -> None:
    replicas = kind(DEPLOY / "kubernetes" / "pytorchjob.yaml", "PyTorchJob")["spec"]["pytorchReplicaSpecs"]
    # What the Training Operator sets: also the rank of a pod under the name that torchrun gives to that of a process.
    master = {**TORCHRUN, "PET_MASTER_ADDR": "train-master-0", "MASTER_ADDR": "train-master-0", "WORLD_SIZE": "4"}
    pods = [
        Pod(node, replicas[name]["template"], i, volumes, **master, PET_NODE_RANK=str(i), RANK=str(i))
        for i, (name, node) in enumerate(zip(replicas, nodes("train-master-0", "train-worker-0"), strict=True))
    ]
    for pod in pods:
        pod.start("train", PROGRAM, "--steps=3")
    assert [pod.ended() for pod in pods] == [0, 0], pods[0].output + pods[1].output
    run = recorder.open_run(volumes / "recordings")
    assert (run.ranks, run.steps) == ([0, 1, 2, 3], [0, 1, 2])


def test_a_value_that_was_not_set_ends_the_pod(nodes: Nodes, volumes: Path) -> None:
    (node,) = nodes("train-0")
    pod = Pod(node, job_template(), 0, volumes)
    (container,) = job_template()["spec"]["containers"]
    pod.start(*container["args"])
    assert pod.ended() == 2
    assert "the argument 'SET_ME' is still SET_ME: give it a value in the manifest" in pod.output


def test_a_volume_that_may_not_be_written_ends_the_pod(nodes: Nodes, volumes: Path) -> None:
    (volumes / "recordings").chmod(0o755)
    (node,) = nodes("train-0")
    pod = Pod(node, job_template(), 0, volumes)
    pod.start("train", PROGRAM)
    assert pod.ended() == 2
    assert "user 1000 may not write to RECORDER_DIR '/recordings': see fsGroup" in pod.output
