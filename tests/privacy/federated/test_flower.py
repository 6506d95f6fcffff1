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

import pytest

from accelerant.privacy.mpc.secagg.setup import make_identities

pytest.importorskip("flwr", reason="the extra federated is not installed")
HERE = Path(__file__).parent
CLIENTS = 3
SETUP = {"clients": CLIENTS, "threshold": 2, "size": 8, "clip": 16.0, "step": 2.0**-10}


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
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1",
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
        "setup": SETUP, "folder": str(tmp_path), "timeout_s": 30.0,
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
