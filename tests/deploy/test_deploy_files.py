"""The Dockerfile, the compose file, the alerts and the training jobs of deploy/."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from requirements import free_port, require, require_module

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = (DEPLOY / "compose.yml").read_text()
INDEXED, TRAIN_JOB = (
    list(yaml.safe_load_all((DEPLOY / "training" / name).read_text())) for name in ("indexed-job.yaml", "trainjob.yaml")
)


# --- the image -------------------------------------------------------------------------------------------------------
def test_the_dockerfile_has_no_finding():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    require("" if hadolint else "hadolint is not here; the extra dev has it on x86-64 Linux")
    done = subprocess.run([hadolint, "--no-color", DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_image_is_built_of_files_that_the_context_has():
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    copied = {name for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]}
    assert copied == kept
    for name in copied:
        assert (ROOT / name).exists()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for given in re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE):
        assert set(given.split(",")) <= set(extras)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_ends_as_a_user_without_rights(target):
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL))
    users = re.findall(r"^USER (\S+)$", stages["service"] + stages[target], re.MULTILINE)
    assert users[-1] == "10001:10001"
    assert "HEALTHCHECK" in stages["service"]


# --- compose ---------------------------------------------------------------------------------------------------------
def test_the_compose_file_follows_the_specification():
    require_module("compose_spec")
    from compose_spec import PyCompose

    merged = yaml.safe_dump(yaml.safe_load(COMPOSE))
    assert sorted(PyCompose.from_yaml(merged).service_names()) == ["cpu", "cuda", "postgres", "prometheus"]
    with pytest.raises(ValueError, match="restrat"):
        PyCompose.from_yaml(merged.replace("restart:", "restrat:"))


def test_services_of_compose():
    compose = yaml.safe_load(COMPOSE)
    for name in ("cpu", "cuda"):
        service = compose["services"][name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["build"]["target"] == name
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    for service in compose["services"].values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if not source.startswith("./secrets/"):
                assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]


# --- alerts ----------------------------------------------------------------------------------------------------------
def test_alerts_are_of_valid_expressions():
    require_module("promql_parser")
    import promql_parser

    groups = yaml.safe_load((DEPLOY / "helm" / "accelerant" / "files" / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {"AccelerantDeviceLost", "AccelerantQueueFull"} <= {rule["alert"] for rule in rules}
    exported = (ROOT / "src" / "accelerant" / "service" / "telemetry.py").read_text()
    for rule in rules:
        promql_parser.parse(rule["expr"])
        for metric in re.findall(r"accelerant_(\w+)", rule["expr"]):
            assert f'"{metric}"' in exported or f'"accelerant_{metric}"' in exported, metric
        assert {"summary", "description"} == set(rule["annotations"])


# --- training --------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_training_objects_follow_their_schemas():
    require_module("kubernetes_validate")
    require_module("kubeflow_trainer_api")
    import kubernetes_validate
    from kubeflow_trainer_api import models

    for item in INDEXED + TRAIN_JOB:
        if item["kind"] in ("TrainJob", "TrainingRuntime"):
            parsed = getattr(models, f"TrainerV1alpha1{item['kind']}").from_dict(item)
            assert parsed.to_dict() == item  # an unknown field would be lost
        else:
            kubernetes_validate.validate(item, "1.37", strict=True)


def test_the_two_jobs_are_of_the_same_pod():
    service, _, job = INDEXED
    runtime, train = TRAIN_JOB[1:]
    indexed = job["spec"]["template"]["spec"]
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    trainer = train["spec"]["trainer"]
    assert pod["securityContext"] == indexed["securityContext"]
    assert pod["containers"][0]["securityContext"] == indexed["containers"][0]["securityContext"]
    assert trainer["args"] == indexed["containers"][0]["args"]
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]

    environment = {item["name"]: item.get("value") for item in indexed["containers"][0]["env"]}
    assert environment["PET_NNODES"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert environment["PET_NPROC_PER_NODE"] == str(indexed["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert environment["PET_MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert environment["PET_MASTER_PORT"] == str(service["spec"]["ports"][0]["port"])
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < indexed["terminationGracePeriodSeconds"]


STEPS = 100


@pytest.fixture
def nodes(tmp_path):
    """Return a function that starts the Job's command as its pods do, on this machine and without GPUs."""
    container = INDEXED[2]["spec"]["template"]["spec"]["containers"][0]
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    flags = f"--preset tiny --device cpu --batch-size 2 --steps {STEPS} --data {tmp_path}/text.txt".split()
    command = [*container["command"], *container["args"][:2], *flags]
    started = []

    def start():
        environment = os.environ | {item["name"]: item.get("value", "") for item in container["env"]} | {
            "OUT": str(tmp_path / "run"), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(free_port()),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1", "ACCELERANT_CACHE_DIR": str(tmp_path / "cache"),
        }  # fmt: skip
        for rank in range(2):
            with open(tmp_path / f"{len(started)}.log", "w") as log:
                started.append(subprocess.Popen(
                    command, env=environment | {"PET_NODE_RANK": str(rank)}, stdout=log, stderr=log
                ))  # fmt: skip
        return started[-2:]

    yield start
    for process in started:
        process.terminate()
        process.wait(120)


@pytest.mark.slow
def test_the_job_trains_on_two_nodes_and_goes_on_after_an_eviction(tmp_path, nodes):
    first, second = nodes()
    metrics, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") > 10):
        assert first.poll() is None, (tmp_path / "0.log").read_text()
        assert time.monotonic() < end
        time.sleep(0.02)
    second.send_signal(signal.SIGTERM)
    assert first.wait(200) != 0
    assert second.wait(200) != 0
    assert 10 < metrics.read_text().count("\n") < STEPS
    assert [node.wait(240) for node in nodes()] == [0, 0], (tmp_path / "2.log").read_text()
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, STEPS + 1))
