"""A round of secure aggregation between a real SuperLink and real SuperNodes on loopback, one of them killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from accelerant.errors import ProtocolError
from accelerant.privacy import mpc
from accelerant.privacy.mpc.secagg.setup import make_identities

pytest.importorskip("flwr", reason="the extra federated is not installed")

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from accelerant.privacy.federated.flower import secure_round

HERE = Path(__file__).parent
CLIENTS = 3
SETUP = {"clients": CLIENTS, "threshold": 2, "size": 8, "clip": 16.0, "step": 2.0**-10}


class Nodes:
    """A network of nodes in this process, with a ServerApp that may change what each of them gets."""

    def __init__(self, folder, changed):
        from accelerant.privacy.federated.flower import secure_aggregation_mod

        self.setup, (self.signing, self.keys) = mpc.SecureAggregation(**SETUP), make_identities(CLIENTS)
        self.folder, self.changed, self.trained, self.errors = folder, changed, [], []
        self.mod = secure_aggregation_mod(
            lambda i: self.setup.client(i, self.signing[i], self.keys, state_path=self.folder / str(i))
        )

    def get_node_ids(self):
        return range(1, CLIENTS + 1)

    def train(self, message, context):
        self.trained.append(context)
        arrays = message.content["arrays"].to_numpy_ndarrays()
        rate = message.content["config"]["rate"]
        return Message(RecordDict({"arrays": ArrayRecord([each + rate for each in arrays])}), reply_to=message)

    def send_and_receive(self, messages, *, timeout):
        for message in messages:
            node = message.metadata.dst_node_id
            try:
                yield self.mod(self.changed(node, message), node - 1, self.train)
            except ProtocolError as error:
                self.errors.append((node, str(error)))
                yield Message(Error(0, "failed"), reply_to=message)


def test_a_server_cannot_ask_one_node_for_something_else(tmp_path, monkeypatch):
    """Other arrays, another learning rate, another type of message: no sum has the update of a node that got them."""
    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    arrays, config = ArrayRecord([np.zeros((2, 3)), np.ones(2)]), ConfigRecord({"rate": 0.5, "names": ["a", "b"]})

    def lying(stage, **records):
        def changed(node, message):
            if node == 2 and message.content["secagg"]["stage"] == stage:
                for name, record in records.items():
                    message.content[name] = record
            return message

        return changed

    other = {"about": bytes(32), "stage": "advertise", "round": 3, "answer": b""}
    for number, (changed, error) in enumerate([
        (lying("mask", arrays=ArrayRecord([np.zeros((2, 3)), np.zeros(2)])), "not the one"),
        (lying("mask", arrays=ArrayRecord([np.zeros((3, 2)), np.ones(2)])), "not the one"),
        (lying("mask", config=ConfigRecord({"rate": 0.0, "names": ["a", "b"]})), "not the one"),
        (lying("advertise", secagg=ConfigRecord(other)), None),
        (lambda node, message: message, None),
    ]):  # fmt: skip
        nodes = Nodes(tmp_path / str(number), changed)
        nodes.folder.mkdir()
        server = nodes.setup.server(3, nodes.keys)
        found, report = secure_round(nodes, server, 3, arrays, config=config)
        assert report.survivors == ((0, 1, 2) if number == 4 else (0, 2))
        assert [each.tolist() for each in found.to_numpy_ndarrays()] == [[[0.5] * 3] * 2, [1.5] * 2]
        assert [node for node, text in nodes.errors if error in text] == ([2] if error else [])


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def reachable(port):
    with socket.socket() as each:
        return each.connect_ex(("127.0.0.1", port)) == 0


def await_(condition, flower, seconds=150):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, flower.log.read_text()[-6000:]
        time.sleep(0.2)


@pytest.fixture
def flower(tmp_path):
    """Start Flower's commands by fork; all of them end with the test."""
    sock, started, log = tmp_path / "socket", [], (tmp_path / "log").open("wb")
    scripts = tmp_path / "bin"
    scripts.mkdir()
    for name in ("flower-superexec", "flwr-serverapp", "flwr-clientapp"):
        script = scripts / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {HERE / "warm_start.py"} {sock} {name} "$@"\n')
        script.chmod(0o755)
    environment = {
        **os.environ, "FLWR_HOME": str(tmp_path / "home"), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1",
        "PATH": f"{scripts}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{HERE / 'flower_app'}:{os.environ.get('PYTHONPATH', '')}",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }  # fmt: skip
    warm = subprocess.Popen(
        [sys.executable, HERE / "warm_start.py", sock], env=environment, stdout=log, stderr=log, start_new_session=True
    )

    def start(*command):
        while not sock.exists():
            assert warm.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        asked = [sys.executable, "-S", "-E", HERE / "warm_start.py", sock, *map(str, command)]
        started.append(int(subprocess.run(asked, capture_output=True, check=True, text=True).stdout))
        return started[-1]

    start.log = tmp_path / "log"
    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    time.sleep(0.2)
    os.killpg(warm.pid, signal.SIGKILL)
    warm.wait()
    log.close()


@pytest.mark.slow
def test_a_round_on_flower_with_a_node_killed(flower, tmp_path):
    signing, verification = make_identities(CLIENTS)
    parties = {
        "setup": SETUP, "folder": str(tmp_path), "timeout_s": 20.0,
        "signing": [key.private_bytes_raw().hex() for key in signing],
        "verification": [key.hex() for key in verification],
    }  # fmt: skip
    (tmp_path / "parties.json").write_text(json.dumps(parties))
    link, *ports = free_ports(1 + CLIENTS)
    flower("flower-superlink", "--insecure", "--port", link, "--disable-runtime-dependency-installation")
    for i, port in enumerate(ports):
        command = ("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{link}", "--port", port)
        process = flower(*command, "--node-config", f"partition-id={i}")
        (tmp_path / f"supernode{i}").write_text(str(process))
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    )
    await_(lambda: reachable(link), flower)
    run = ("flwr", "run", str(HERE / "flower_app"), "local", "-c", f"parties='{tmp_path / 'parties.json'}'")
    flower(*run)
    await_((tmp_path / "result.json").exists, flower)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["survivors"] == [0, 2]
    assert result["arrays"] == [[[2.0] * 3] * 2, [12.0] * 2]
