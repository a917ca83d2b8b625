"""The manifests in examples/kubernetes are valid and complete, and hvkeras interprets them as intended.

The core kinds are validated with Kubernetes's own schemas. The fields of the operators' kinds are listed here, as far
as the manifests use them. Sources: the documentation of the MPI operator (v2beta1), the training operator (v1) and
Trainer (v2).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvkeras.control.launch_environments import detect_launch
from hvkeras.settings import Settings

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
VERSIONS = ("1.28", "1.34")
# Fields by kind; None allows any content (pod templates are checked as pods).
_METADATA = {"name": None, "labels": None}
_RUN_POLICY = {"cleanPodPolicy": None, "backoffLimit": None, "ttlSecondsAfterFinished": None}
_REPLICAS = {"replicas": None, "restartPolicy": None, "template": None}
FIELDS: dict[tuple[str, str], dict[str, Any]] = {
    ("kubeflow.org/v2beta1", "MPIJob"): {
        "slotsPerWorker": None, "sshAuthMountPath": None, "mpiImplementation": None, "launcherCreationPolicy": None,
        "runPolicy": _RUN_POLICY, "mpiReplicaSpecs": {"Launcher": _REPLICAS, "Worker": _REPLICAS}},
    ("kubeflow.org/v1", "TFJob"): {
        "runPolicy": _RUN_POLICY, "tfReplicaSpecs": {"Chief": _REPLICAS, "Worker": _REPLICAS}},
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "mlPolicy": {"numNodes": None, "torch": {"numProcPerNode": None}},
        "template": {"spec": {"failurePolicy": {"maxRestarts": None}, "replicatedJobs": None}}},
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "runtimeRef": {"apiGroup": None, "kind": None, "name": None},
        "trainer": {"numNodes": None, "image": None, "command": None, "env": None, "resourcesPerNode": None}},
}
CHOICES = {"mpiImplementation": {"OpenMPI", "Intel", "MPICH"}, "cleanPodPolicy": {"None", "Running", "All"},
           "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
           "restartPolicy": {"Never", "OnFailure", "Always", "ExitCode"}}


def documents(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((FOLDER / name).read_text()) if document]


def everything() -> list[Any]:
    return [pytest.param(document, id=f"{path.name}-{document['kind']}")
            for path in sorted(FOLDER.glob("*.yaml")) for document in documents(path.name)]


def pod_templates(tree: Any) -> list[dict[str, Any]]:
    """Return all pod templates in a document."""
    if isinstance(tree, list):
        return [found for each in tree for found in pod_templates(each)]
    if not isinstance(tree, dict):
        return []
    if "containers" in tree.get("spec", {}):
        return [tree]
    return [found for each in tree.values() for found in pod_templates(each)]


def unknown(tree: Any, known: dict[str, Any] | None, path: str) -> list[str]:
    if known is None or not isinstance(tree, dict):
        return []
    wrong = [f"{path}.{name}" for name in tree if name not in known]
    return wrong + [each for name, value in tree.items() if name in known
                    for each in unknown(value, known[name], f"{path}.{name}")]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", everything())
def test_core_kinds_and_pods_match_kubernetess_schemas(document, version):
    validate = pytest.importorskip("kubernetes_validate")
    core = [document] if document["apiVersion"] in ("v1", "batch/v1") else []
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one", **each.get("metadata", {})},
             "spec": each["spec"]} for each in pod_templates(document)]
    assert core or pods or document["kind"] == "TrainJob"
    for each in core + pods:
        validate.validate(each, version, strict=True)


@pytest.mark.parametrize("document", everything())
def test_fields_of_the_operators_kinds_are_documented_ones(document):
    known = FIELDS.get((document["apiVersion"], document["kind"]))
    assert known is not None or document["apiVersion"] in ("v1", "batch/v1")
    assert not unknown(document["spec"], known, "spec")
    assert not unknown(document["metadata"], _METADATA, "metadata")
    text = yaml.safe_dump(document)
    for name, choices in CHOICES.items():
        assert set(re.findall(rf"{name}: ['\"]?(\w+)", text)) <= choices


def test_pods_have_what_training_needs():
    for path in sorted(FOLDER.glob("*.yaml")):
        for template in (found for document in documents(path.name) for found in pod_templates(document)):
            spec = template["spec"]
            (container,) = spec["containers"]
            assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
            if container["name"] == "launcher":
                continue
            assert "livenessProbe" in container
            assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/backup"}
            assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in spec["volumes"]}
            assert next(one["emptyDir"]["medium"] for one in spec["volumes"] if "emptyDir" in one) == "Memory"


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables that the kubelet sets, with placeholders for secrets."""
    return {one["name"]: one["value"] if "value" in one else "the content of {name}/{key}".format(
        **one["valueFrom"]["secretKeyRef"]) for one in container.get("env", ())}


def test_hvkeras_reads_the_indexed_job_as_it_is_meant():
    service, _, job = documents("indexed-job.yaml")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    environ = variables(pod["containers"][0]) | {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "train-3"}
    launch = detect_launch(environ)
    assert (launch.rank, launch.size) == (3, spec["completions"])
    assert launch.rendezvous.address == "train-0.train:29400"
    assert pod["containers"][0]["ports"][0]["containerPort"] == 29400
    settings = Settings({name: value for name, value in environ.items() if name.startswith("HVKERAS_")})
    assert settings.start_timeout == 900
    assert settings.secret == "the content of train/secret"


def test_hvkeras_reads_the_train_job_as_it_is_meant():
    runtime, job = documents("trainjob.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (template,) = pod_templates(runtime)
    (container,) = template["spec"]["containers"]
    shell = [*container["command"][:2], re.sub(r"exec .*", "exec env", container["command"][2])]
    pet = {"PET_NNODES": str(job["spec"]["trainer"]["numNodes"]), "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1",
           "PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29500"}
    done = subprocess.run(shell, env={"PATH": os.environ["PATH"], **pet}, capture_output=True, text=True, timeout=10,
                          check=True)
    environ = dict(line.split("=", 1) for line in done.stdout.splitlines())
    launch = detect_launch(environ | {"JOB_COMPLETION_INDEX": "1"})
    assert (launch.rank, launch.size, launch.rendezvous.address) == (1, 2, "train-node-0-0.train:29500")


def test_hvkeras_reads_the_tfjob_as_it_is_meant():
    (job,) = documents("tfjob.yaml")
    worker = job["spec"]["tfReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "tensorflow"
    assert container["ports"] == [{"name": "tfjob-port", "containerPort": 2222}]
    workers = [f"train-worker-{number}.default.svc:2222" for number in range(worker["replicas"])]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}, "environment": "cloud"}
    launch = detect_launch({"TF_CONFIG": json.dumps(config), **variables(container)})
    assert (launch.rank, launch.size, launch.cluster[0]) == (1, 2, workers[0])


def test_the_mpi_jobs_command_fills_its_slots():
    (job,) = documents("mpijob.yaml")
    spec = job["spec"]
    command = pod_templates(spec["mpiReplicaSpecs"]["Launcher"])[0]["spec"]["containers"][0]["command"]
    ranks = int(command[command.index("-np") + 1])
    assert ranks == spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    port = re.search(r"^Port (\d+)$", (FOLDER / "sshd_config").read_text(), re.MULTILINE)
    (worker,) = pod_templates(spec["mpiReplicaSpecs"]["Worker"])
    (container,) = worker["spec"]["containers"]
    assert port is not None and container["readinessProbe"]["tcpSocket"]["port"] == int(port[1])
    assert f"Port {port[1]}" in (FOLDER / "Dockerfile").read_text()


def test_what_the_image_copies_is_there():
    copied = re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    assert "kubernetes/hvkeras-*.whl" in copied  # which `make wheels` builds
    for pattern in (each for each in " ".join(copied).split() if not each.endswith(".whl")):
        assert list(FOLDER.parent.glob(pattern)), pattern
    scripts = {part for path in FOLDER.glob("*.yaml") for part in re.findall(r"[\w/]+\.py", path.read_text())}
    assert {Path(script).name for script in scripts} == {"resuming.py"}
