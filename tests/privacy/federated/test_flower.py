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

from accelerant.errors import AccelerantError, ConfigError, ProtocolError, ShapeError, UnsupportedDtype
from accelerant.privacy import mpc
from accelerant.privacy.mpc.secagg.protocol import make_identities
from refusals import assert_raises

pytest.importorskip("flwr", reason="the extra federated is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from accelerant.privacy.federated.flower import secure_round
from requirements import free_ports

HERE = Path(__file__).parent
CLIENTS = 3
SETUP = {"clients": CLIENTS, "threshold": 2, "size": 8, "max_abs": 16.0, "step": 2.0**-10}


class Nodes:
    """A network of nodes in this process, with a ServerApp that may change what each of them gets."""

    def __init__(self, folder, changed=lambda node, message: message, trained=None, **options):
        from accelerant.privacy.federated.flower import secure_aggregation_mod

        self.setup, (self.signing, self.keys) = mpc.SecureAggregation(**SETUP), make_identities(CLIENTS)
        self.folder, self.changed, self.trained, self.errors = folder, changed, [], []
        self.train = trained or self.train
        folder.mkdir()
        self.mod = secure_aggregation_mod(
            lambda i: self.setup.client(i, self.signing[i], self.keys, state_path=self.folder / str(i)), **options
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
            except AccelerantError as error:
                self.errors.append((node, str(error)))
                yield Message(Error(0, "failed"), reply_to=message)


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """What Flower's runtime tells a process of itself."""
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def test_a_server_cannot_ask_one_node_for_something_else(tmp_path):
    """Other arrays, another learning rate, another type of message: no sum has the update of a node that got them."""
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
        server = nodes.setup.server(3, nodes.keys)
        found, report = secure_round(nodes, server, 3, arrays, config=config)
        assert report.survivors == ((0, 1, 2) if number == 4 else (0, 2))
        assert [each.tolist() for each in found.to_numpy_ndarrays()] == [[[0.5] * 3] * 2, [1.5] * 2]
        assert [node for node, text in nodes.errors if error in text] == ([2] if error else [])


MODEL = {"w": np.full((2, 3), 4.0, np.float32), "b": np.ones(2, np.float32)}


def named(arrays):
    return ArrayRecord({name: Array(np.asarray(each)) for name, each in arrays.items()})


def moved(arrays, by=1.0):
    return {name: each + np.asarray(by, each.dtype) for name, each in arrays.items()}


W, B = MODEL.values()
OTHERS = {
    "a number": ({"w": np.float32(5)}, ShapeError, "the 2 arrays that it got, got 1"),
    "a flat array": ({"w": np.concatenate([W.reshape(-1), B])}, ShapeError, "got 1"),
    "no arrays": ({}, ShapeError, "got 0"),
    "one array more": ({**MODEL, "c": B[:0]}, ShapeError, "got 3"),
    "transposed": ({"w": W.T, "b": B}, ShapeError, r"array 0 as it got it, 'w' \(2, 3\) float32, got 'w' \(3, 2\)"),
    "a scalar for an array": ({"w": W, "b": np.float32(1)}, ShapeError, r"got 'b' \(\) float32"),
    "one element for two": ({"w": W, "b": B[:1]}, ShapeError, r"got 'b' \(1,\)"),
    "flattened": ({"w": W.reshape(-1), "b": B}, ShapeError, r"got 'w' \(6,\)"),
    "an axis more": ({"w": W[None], "b": B}, ShapeError, r"got 'w' \(1, 2, 3\)"),
    "in another order": ({"b": B, "w": W}, ShapeError, "array 0 .*got 'b'"),
    "under other names": ({"w": W, "c": B}, ShapeError, "got 'c'"),
    "names exchanged": ({"b": W, "w": B}, ShapeError, "got 'b'"),
    "another precision": ({"w": W, "b": B.astype(np.float64)}, UnsupportedDtype, "'b' .* float32, got .*float64"),
    "half precision": ({"w": W.astype(np.float16), "b": B}, UnsupportedDtype, "got .*float16"),
    "another byte order": ({"w": W.astype(">f4"), "b": B}, UnsupportedDtype, "got .*>f4"),
    "integers": ({"w": W.astype(np.int32), "b": B}, UnsupportedDtype, "reply is int32: means are of floating-point"),
    "booleans": ({"w": W, "b": B > 0}, UnsupportedDtype, "reply is bool"),
    "complex numbers": ({"w": W + 1j, "b": B}, UnsupportedDtype, "reply is complex"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_arrays_of_another_form_do_not_leave_the_node(tmp_path, case):
    arrays, error, message = OTHERS[case]
    raised = []

    def train(asked, context):
        wrong = context == 1
        return Message(RecordDict({"arrays": named(arrays if wrong else moved(MODEL))}), reply_to=asked)

    nodes = Nodes(tmp_path / "a", trained=train)

    def mod(*args, plain=nodes.mod):
        try:
            return plain(*args)
        except AccelerantError as each:
            raised.append(each)
            raise

    nodes.mod = mod
    found, report = secure_round(nodes, nodes.setup.server(3, nodes.keys), 3, named(MODEL))
    assert report.survivors == (0, 2)
    assert {name: each.numpy().tolist() for name, each in found.items()} == {
        name: each.tolist() for name, each in moved(MODEL).items()
    }
    assert [type(each) for each in raised] == [error]
    with pytest.raises(error, match=message):
        raise raised[0]


def test_names_and_dtypes_of_the_mean_are_the_models(tmp_path):
    model = {"b": np.ones(1, np.float16), "a": np.zeros((2, 3)), "empty": np.zeros((0, 4)), "c": np.zeros(())}
    nodes = Nodes(
        tmp_path / "a", trained=lambda asked, i: Message(RecordDict({"x": named(moved(model, i))}), reply_to=asked)
    )
    found, _ = secure_round(nodes, nodes.setup.server(3, nodes.keys), 3, named(model))
    assert [(name, each.dtype, tuple(each.shape)) for name, each in found.items()] == [
        (name, str(each.dtype), each.shape) for name, each in model.items()
    ]
    assert (found["b"].numpy() == 2).all()


def test_the_server_compares_what_nodes_state_of_their_arrays(tmp_path):
    """A node without the check, or that states something else, leaves the round; so does one whose reply is no list."""
    for number, stated in enumerate([["'w' (6,) float32", "'b' (2,) float32"], [], [1.0, 2.0], 5, "text", None]):
        nodes = Nodes(
            tmp_path / str(number), trained=lambda asked, i: Message(RecordDict({"x": named(MODEL)}), reply_to=asked)
        )

        def mod(message, context, train, plain=nodes.mod, stated=stated):
            reply = plain(message, context, train)
            record = reply.content["secagg"]
            if context == 1 and "arrays" in record:
                del record["arrays"]
                if stated is not None:
                    record["arrays"] = stated
            return reply

        nodes.mod = mod
        _, report = secure_round(nodes, nodes.setup.server(3, nodes.keys), 3, named(MODEL))
        assert report.survivors == (0, 2)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_, np.complex64, "U2"])
def test_models_of_other_than_floats_are_refused_before_a_round(tmp_path, dtype):
    nodes = Nodes(tmp_path / "a")
    arrays = named({"w": np.zeros((2, 3)), "count": np.zeros(2, dtype)})
    with pytest.raises(UnsupportedDtype, match=r"array 'count' of the ArrayRecord is .*Leave it out"):
        secure_round(nodes, nodes.setup.server(3, nodes.keys), 3, arrays)
    assert not nodes.trained
    with pytest.raises(ConfigError, match="the arrays have 6 elements, the setup 8"):
        secure_round(nodes, nodes.setup.server(3, nodes.keys), 3, named({"w": np.zeros((2, 3))}))


def test_one_array_record_and_a_whole_weight(tmp_path):
    """Without them the node leaves the round, with an error that says what is missing."""

    def replies(records):
        return lambda asked, i: Message(
            RecordDict(records(i) if i == 1 else {"x": named(moved(MODEL, i)), "m": MetricRecord({"n": i + 1})}),
            reply_to=asked,
        )

    one = {"x": named(MODEL)}
    for number, (records, message) in enumerate([
        (lambda i: {}, "one ArrayRecord, got 0"),
        (lambda i: {**one, "y": named(MODEL)}, "one ArrayRecord, got 2"),
        (lambda i: one, r"one whole number 'n' in its metrics, got \[\]"),
        (lambda i: {**one, "m": MetricRecord({"n": 1.5})}, r"whole number 'n' .*got \[1.5\]"),
        (lambda i: {**one, "m": MetricRecord({"n": 0})}, "from 1 to max_weight = 4, got 0"),
        (lambda i: {**one, "m": MetricRecord({"n": 5})}, "from 1 to max_weight = 4, got 5"),
    ]):  # fmt: skip
        nodes = Nodes(tmp_path / str(number), trained=replies(records), weights="n")
        nodes.setup = mpc.SecureAggregation(**{**SETUP, "step": None, "max_weight": 4})
        found, report = secure_round(nodes, nodes.setup.server(3, nodes.keys), 3, named(MODEL))
        assert (report.survivors, report.weight) == ((0, 2), 4)
        assert np.allclose(found["b"].numpy(), 1 + 2 * 3 / 4)
        ((node, text),) = nodes.errors
        assert node == 2
        with pytest.raises(ValueError, match=message):
            raise ValueError(text)


def test_a_round_that_fails_names_its_nodes_and_their_reasons(tmp_path):
    """None connected, an old round number, a NaN in an update, and nodes that do not answer."""

    def train(asked, i):
        arrays = moved(MODEL, np.nan if i else 1.0)
        return Message(RecordDict({"x": named(arrays)}), reply_to=asked)

    class Grid(Nodes):
        nodes, mute = range(1, CLIENTS + 1), ()

        def get_node_ids(self):
            return self.nodes

        def send_and_receive(self, messages, *, timeout):
            heard = [each for each in messages if each.metadata.dst_node_id not in self.mute]
            for reply in super().send_and_receive(heard, timeout=timeout):
                if reply.has_error():
                    reply.error._reason = f"<class 'AnError'>:<'{self.errors[-1][1]}'>"  # as flwr words it
                yield reply

    grid = Grid(tmp_path / "a", trained=train)

    def run(number):
        return secure_round(grid, grid.setup.server(number, grid.keys), number, named(MODEL), timeout=3.0)

    for nodes in ((), (2,)):
        grid.nodes = nodes
        assert_raises(ProtocolError, rf"{len(nodes)} nodes are connected, and the threshold is 2 of 3 cl", run, 3)
    grid.nodes = (1, 2, 3)
    with pytest.raises(
        ProtocolError, match=r"1 clients sent .* mask, .*; node 2 in stage mask: .*NaN or.*; node 3 in "
    ):
        run(3)
    assert_raises(ProtocolError, r"0 clients sent .*; node 1 in .*round 2 is not above the last one, 3:", run, 2)
    grid.mute = (1, 3)
    assert_raises(ProtocolError, r"1 clients sent .*; node 1 in stage advertise: no reply in 3 s; node 3 ", run, 4)


def reachable(port):
    with socket.socket() as each:
        return each.connect_ex(("127.0.0.1", port)) == 0


def await_(condition, flower, seconds=400):
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
