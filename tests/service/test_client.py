"""The Python clients against a running service."""

import asyncio
import inspect
import json
import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest

import accelerant as acl
from accelerant import errors
from accelerant.privacy.he import paillier
from accelerant.service import AsyncClient, Client
from accelerant.service.errors import Cancelled, JobNotFound, QueueFull, Refused, ServiceError
from accelerant.service.operations import OPERATIONS
from refusals import assert_raises

PAGE = (Path(__file__).parents[2] / "docs" / "service.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def client(server):
    with Client(server.url, trust_env=False) as found:
        yield found


def test_field_operations_are_the_librarys(client):
    for name in ("goldilocks", "babybear", "bn254_fr"):
        field = acl.zk.field(name)
        x, y = field.random(5), field.random(5)
        for operation in ("add", "sub", "mul"):
            found = getattr(client, f"field_{operation}")(x, y, field=name)
            np.testing.assert_array_equal(found, getattr(field, operation)(x, y))
            assert found.dtype == x.dtype
        np.testing.assert_array_equal(client.field_inv(x, field=name), field.inv(x))
        assert field.decode(client.field_add([1, field.modulus - 1], [2, 1], field=name)) == [3, 0]


def test_a_number_is_an_array_of_no_dimension(client):
    assert client.field_mul(np.uint64(3), np.uint64(4), field="goldilocks").shape == ()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_connections_of_its_own(client):
    x = np.arange(4, dtype=np.uint64)
    client.field_mul(x, x, field="goldilocks")
    mine = client._http
    child = os.fork()
    if not child:
        try:
            client.field_mul(x, x, field="goldilocks")
        finally:
            os._exit(int(client._http is mine))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.field_mul(x, x, field="goldilocks")
    assert client._http is mine


def test_transforms_and_sums_are_the_librarys(client):
    x = acl.zk.field("goldilocks").random((3, 8))
    np.testing.assert_array_equal(client.ntt(x, coset=7), acl.zk.ntt(x, field="goldilocks", coset=7))
    curve = acl.zk.curve("bn254_g1")
    points = curve.mul(curve.generator, acl.zk.field("bn254_fr").encode([1, 2, 3]))
    np.testing.assert_array_equal(client.msm([5, 0, 7], points), curve.mul(curve.generator, 26))


def test_arguments_are_what_the_library_takes(client):
    """Lists, FieldArrays, lists of arrays, Python points, tensors that record gradients, numbers."""
    torch = pytest.importorskip("torch")
    goldilocks, curve = acl.zk.field("goldilocks"), acl.zk.curve("bn254_g1")
    words = goldilocks.encode([2, 3])
    tensor, big = torch.from_numpy(words), words.astype(">u8")
    for x in ([2, 3], (2, 3), np.array([2, 3], object), goldilocks.array([2, 3]), [words[0], words[1]], tensor, big):
        np.testing.assert_array_equal(client.field_mul(x, [5, 7]), [10, 21])
    assert (client.gelu(torch._neg_view(torch.ones(2))) == client.gelu([-1, -1])).all()
    np.testing.assert_array_equal(client.ntt([[1, 2], [3, 4]]), acl.zk.ntt([[1, 2], [3, 4]], field="goldilocks"))
    point = curve.encode([(1, 2)])[0]
    scalars = acl.zk.field("bn254_fr")
    three = acl.zk.msm([1, 2], [(1, 2), (1, 2)], curve="bn254_g1")
    for given in ([1, 2], scalars.encode([1, 2]), list(scalars.encode([1, 2])), scalars.array([1, 2])):
        for points in ([(1, 2), (1, 2)], ((1, 2), (1, 2)), [point, point], np.stack([point, point])):
            np.testing.assert_array_equal(client.msm(given, points), three)
    np.testing.assert_array_equal(
        client.msm([[1, 2], [0, 3]], [(1, 2), None]), acl.zk.msm([[1, 2], [0, 3]], [(1, 2), None], curve="bn254_g1")
    )
    x = torch.tensor([[0.5, -1.0]], requires_grad=True)
    for given in (x, x.detach().numpy(), [[0.5, -1.0]]):
        np.testing.assert_array_equal(client.gelu(given), acl.Accelerator("cpu").gelu(x.detach().numpy()))
    assert client.matmul([[1, 2]], np.ones((2, 1))).dtype == np.float64
    assert_raises(errors.UnsupportedDtype, "send float32", lambda: client.gelu(x.bfloat16()))
    with pytest.raises(errors.ConfigError, match="FieldArray of babybear"):
        client.field_mul(acl.zk.field("babybear").array([1]), [1])


@pytest.mark.slow
def test_neural_operations_and_epsilon_are_the_librarys(client):
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    accelerator = acl.Accelerator("cpu")
    for call in (
        lambda of: of.gelu(x, approximate="tanh"),
        lambda of: of.softmax(x, dim=0),
        lambda of: of.layer_norm(x, np.ones(6, np.float32), np.zeros(6, np.float32), eps=1e-3),
        lambda of: of.matmul(x, np.ascontiguousarray(x.T)),
        lambda of: of.attention(*[x.reshape(1, 1, 2, 6)] * 3, causal=True),
    ):
        np.testing.assert_array_equal(call(client), call(accelerator))
    epsilon = client.privacy_epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=10, delta=1e-5)
    assert 0 < epsilon < 2
    assert client.privacy_epsilon(sigma=1.0, q=0.01, steps=10, delta=1e-5) == epsilon


def test_other_names_of_arguments_are_understood_once(client):
    x = np.random.default_rng(0).standard_normal((1, 1, 2, 6)).astype(np.float32)
    found = client.attention(query=x, key=x, value=x, is_causal=True)
    np.testing.assert_array_equal(found, client.attention(x, x, x, causal=True))
    np.testing.assert_array_equal(client.softmax(input=x), client.softmax(x))
    with pytest.raises(TypeError, match="causal= and is_causal=, which are the same: give one"):
        client.attention(x, x, x, causal=True, is_causal=True)
    for names in ({"is_causal": True}, {"causal": True}):  # of the operation, as other programs call it
        np.testing.assert_array_equal(client.call("attention", {"q": x, "k": x, "v": x}, **names)["y"], found)
    with pytest.raises(Refused, match="is_causal: Extra inputs are not permitted"):
        client.call("attention", {"q": x, "k": x, "v": x}, causal=True, is_causal=True)


def test_the_path_of_the_protocol_may_be_given_and_another_is_named(server):
    with Client(f"{server.url}/v2/", trust_env=False) as client:
        assert client.field_add([1], [2]).tolist() == [3]
        assert repr(client) == f"Client({server.url!r})"
    with Client(f"{server.url}/docs", trust_env=False) as client:
        with pytest.raises(
            Refused, match=r"/docs/v2/models is not there \(Not Found\): the service's URL is like http"
        ):
            client.operations()
        assert_raises(Refused, "without a page's path", client.field_add, [1], [2])


def test_sums_of_encrypted_numbers(client):
    public, private = paillier.keygen(bits=2048)
    a, b = (client.paillier_encrypt(public, np.array(values)) for values in ([1.5, -2.0], [0.25, 4.0]))
    np.testing.assert_array_equal(private.decrypt(client.paillier_add(a, b)), [1.75, 2.0])


def test_proofs_of_inference_come_verified(client):
    folder = Path(__file__).parents[1] / "vectors" / "inference"
    x = np.load(folder / "input.npy")
    y, proof, commitment = client.prove_inference(folder / "network", x)
    assert y.tolist() == [[-47, -31, -8]]
    assert commitment.network.widths == "8-16-3"
    assert not acl.zk.inference.verify(commitment, -x, y, proof)
    assert_raises(errors.ShapeError, r"x must be \(batch, 8\)", client.prove_inference, folder / "network", x[:, :5])
    assert_raises(errors.FormatError, "an integer network begins with", client.prove_inference, b"weights", x)


def images(channels, side, layers):
    """Return the file of a network of convolutions of images, and an input of zeros."""
    layer = acl.zk.inference.Layer(channels, channels, 1000, bytes(256), image=(side, side), kernel=(3, 3), padding=1)
    weights = [np.ones((channels, channels, 3, 3), np.int8)] * layers
    public = acl.zk.inference.Network((layer,) * layers)
    network = acl.zk.inference.IntegerNetwork(public, weights, [[0] * channels] * layers)
    return network.to_bytes(), np.zeros((1, channels, side, side), np.int8)


@pytest.mark.slow
def test_a_proof_of_inference_as_a_job(client):
    """One that ends, one that is cancelled while it runs, and one that waits."""
    data, x = images(1, 32, 2)
    job = client.submit("prove_inference", {"network": data, "x": x})
    found = client.result(job.id)
    acl.zk.inference.check(acl.zk.inference.ModelCommitment(found["commitment"]), x, found["y"], found["proof"])
    data, x = images(16, 96, 6)
    jobs = [client.submit("prove_inference", {"network": data, "x": x}) for _ in range(2)]
    while client.job(jobs[0].id).state == "queued":
        time.sleep(0.02)
    began = time.monotonic()
    for job in jobs[::-1]:
        client.cancel(job.id)
        assert_raises(Cancelled, None, client.result, job.id)
        assert client.job(job.id).state == "cancelled"
    assert time.monotonic() - began < OPERATIONS["prove_inference"].cost(
        {"network": np.frombuffer(data, np.uint8), "x": x}, None
    )
    assert client.prove_inference(*images(1, 4, 1))[0].shape == (1, 1, 4, 4)


def test_too_large_a_proof_of_inference_is_refused_before_it_is_a_job(client, monkeypatch):
    """By the memory that is free and by the layout; the cost grows with images and batches of one network's file."""
    operation, jobs = OPERATIONS["prove_inference"], client.jobs(limit=1)
    data, x = images(1, 8, 1)
    with pytest.raises(errors.ShapeError, match="x has 65536 inputs: the batch is too large for this network"):
        client.submit("prove_inference", {"network": data, "x": np.repeat(x, 1 << 16, 0)})
    with pytest.raises(errors.FormatError, match="the integer network is malformed"):
        client.submit("prove_inference", {"network": data[:200], "x": x})
    assert client.jobs(limit=1) == jobs
    costs = [
        operation.cost({"network": np.frombuffer(file, np.uint8), "x": np.repeat(x, batch, 0)}, None)
        for side, batch in ((8, 1), (64, 1), (64, 4), (256, 1))
        for file, x in [images(1, side, 1)]
    ]
    assert costs == sorted(costs)
    assert costs[3] > 4 * costs[0]
    monkeypatch.setattr(acl.zk.inference.proofs, "host_memory", lambda: {"MemAvailable": 128 << 20})
    data, x = images(4, 256, 1)
    with pytest.raises(
        errors.OutOfMemory, match=r"a proof of 1 inputs takes about \d+ MiB of memory, and 128 MiB are free"
    ):
        operation.check({"network": np.frombuffer(data, np.uint8), "x": x}, None)


def test_every_operation_has_a_method_with_its_defaults():
    """`call` alone has decryption, whose key leaves the machine, and training, whose outputs are files."""
    names = {"groth16_prove": "prove", "groth16_verify": "verify"}
    for name in OPERATIONS.keys() - {"paillier_decrypt", "train"}:
        method = inspect.signature(getattr(Client, names.get(name, name))._steps)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in method.parameters.values()):
            continue
        for option, given in OPERATIONS[name].parameters.model_fields.items():
            default = method.parameters[option].default
            assert default == given.default or (default is inspect.Parameter.empty and given.is_required()), option


@pytest.mark.slow
def test_a_job_reports_and_ends_with_the_result(server):
    seen = []
    with Client(server.url, progress=seen.append, trust_env=False) as client:
        x = acl.zk.field("goldilocks").random(1 << 12)
        job = client.submit("ntt", {"x": x}, field="goldilocks", priority=5)
        assert (job.operation, job.priority, job.state.final) == ("ntt", 5, False)
        np.testing.assert_array_equal(client.result(job.id)["y"], acl.zk.ntt(x, field="goldilocks"))
        assert seen[-1].state == "succeeded"
        assert seen[-1].id == job.id
        assert client.jobs(limit=1)[0].id == job.id
        assert client.jobs(limit=1, before=job.id) != client.jobs(limit=1)
        assert client.cancel(job.id).state == "succeeded"  # as it is


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda c: c.field_mul([1, 2], [3, 4, 5]), errors.ShapeError, "do not broadcast"),
    (lambda c: c.field_mul(np.array([2**64 - 1], np.uint64), [1]), errors.FormatError, "not below the modulus"),
    (lambda c: c.call("ntt", {"x": np.zeros(4)}, field="goldilocks"), errors.FormatError, "must be UINT64"),
    (lambda c: c.call("field_inv", {"x": [1]}, fields="babybear"), Refused, "fields"),
    (lambda c: c.call("no such", {}), Refused, "no model"),
    (lambda c: c.job("0" * 32), JobNotFound, "no job"),
])  # fmt: skip
def test_errors_are_the_librarys_with_the_requests_id(client, call, error, message):
    caught = assert_raises(error, message, call, client)
    assert re.search(r": 4\d\d, request \w{16}$", caught.__notes__[0])


def test_wrong_arguments_are_refused_before_anything_is_sent():
    for make, message in (
        (lambda: Client("localhost:8080"), "must begin with http"),
        (lambda: Client(timeout=0), "timeout must be above 0"),
        (lambda: Client().field_add([1], [2], field="nope"), "unknown field"),
        (lambda: Client().job(""), "'' is not the name"),
        (lambda: Client().job("../x"), "'../x' is not the name"),
        (lambda: Client(key="acl_1\nacl_2"), "the API key must be one line of ASCII, as"),
        (lambda: Client("http://127.0.0.1:99999"), "must be 1 to 65535, got 'http://127.0.0.1:99999'"),
    ):
        assert_raises(errors.ConfigError, message, make)
    for numbers, message in (
        (None, "wanted real numbers, got NoneType"), ([1.0, None], "got NoneType"), ("1.5", "wanted real numbers"),
        ([1j], "got complex128"), ([[1.0], [2.0, 3.0]], "cannot take this list"), ({1.0}, "x must be an array or"),
    ):  # fmt: skip
        with pytest.raises(errors.UnsupportedDtype, match=message):
            Client().gelu(numbers)
    for kind in (Client, AsyncClient):
        with pytest.raises(
            TypeError, match=rf"{kind.__name__}\(\) has no argument timeout_s= any more: it is timeout="
        ):
            kind(timeout_s=3)


async def test_many_calls_at_once(server):
    async with AsyncClient(server.url, trust_env=False) as client:
        x = np.arange(64, dtype=np.uint64)
        found = await asyncio.gather(*(client.field_add(x, x + i) for i in range(32)))
        for i, z in enumerate(found):
            np.testing.assert_array_equal(z, 2 * x + i)
        job = await client.submit("field_mul", {"x": x, "y": x}, field="goldilocks")
        np.testing.assert_array_equal((await client.result(job.id))["z"], x * x)
        with pytest.raises(errors.ShapeError):
            await client.field_add(x, x[:3])


@pytest.fixture
def answering():
    """A server that gives the answers of a list, one after the other, and records the requests."""
    servers = []

    def start(*answers):
        left, seen = list(answers), []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                seen.append((self.path, self.headers.get("authorization")))
                if (answer := left.pop(0)) is None:  # the connection ends
                    self.close_connection = True
                    return
                status, headers, body = answer
                self.send_response(status)
                for name, value in {**headers, "Content-Length": len(body)}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_DELETE = do_GET  # noqa: N815 - named by the base class

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}", seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def refusal(kind):
    return json.dumps({"type": kind, "error": "not now", "request_id": "r1"}).encode()


DEVICES = (200, {}, b'{"devices": []}')


def test_an_answer_that_names_a_time_is_repeated(answering):
    later = {"Retry-After": "0"}
    url, seen = answering((429, later, refusal("QueueFull")), (503, later, refusal("Draining")), DEVICES)
    with Client(url, key="acl_x", trust_env=False) as client:
        assert client.devices() == []
    assert seen == [("/devices", "Bearer acl_x")] * 3


@pytest.mark.parametrize(("status", "headers", "kind", "error"), [
    (429, {}, "QueueFull", QueueFull),
    (429, {"Retry-After": "3600"}, "QueueFull", QueueFull),  # after the call's limit
    (500, {"Retry-After": "0"}, "InternalError", Refused),
    (409, {}, "Cancelled", Cancelled),
    (409, {}, "SystemExit", Refused),  # no name of an error of ours
])  # fmt: skip
def test_others_are_not_repeated(answering, status, headers, kind, error):
    url, seen = answering((status, headers, refusal(kind)))
    with Client(url, timeout=5, trust_env=False) as client, pytest.raises(error, match="not now") as caught:
        client.devices()
    assert len(seen) == 1
    assert caught.value.__notes__ == [f"GET {url}/devices: {status}, request r1"]


def test_what_is_no_service_is_said_so(answering):
    url, _ = answering((502, {}, b"<html>"), (200, {}, b"<html>"))
    with Client(url, trust_env=False) as client:
        assert_raises(ServiceError, "502 Bad Gateway", client.devices)
        assert_raises(errors.FormatError, "without JSON", client.devices)
    with (
        Client("http://127.0.0.1:9", trust_env=False) as client,
        pytest.raises(ConnectionError, match="is `accelerant serve`"),
    ):
        client.devices()


def test_a_read_is_repeated_while_the_service_starts_again(answering, monkeypatch):
    """Those of a client that has had an answer, also where a proxy answers meanwhile; no request that may do work."""
    monkeypatch.setattr("accelerant.service.client._POLL_S", (0.001, 0.01))
    url, seen = answering(DEVICES, None, None, (502, {}, b"<html>"), (503, {}, b"<html>"), DEVICES, None)
    with Client(url, trust_env=False) as client:
        assert [client.devices(), client.devices()] == [[], []]
        assert len(seen) == 6
        assert_raises(ConnectionError, None, client.cancel, "a")
    assert len(seen) == 7
    url, seen = answering(None, DEVICES, None)

    async def ask():
        async with AsyncClient(url, trust_env=False) as client:
            return await client.devices()

    assert asyncio.run(ask()) == []
    assert len(seen) == 2


def test_what_does_not_reach_a_service_that_drained_is_repeated():
    def steps():
        return Client("http://127.0.0.1:1", trust_env=False)._answered("POST", "/x", time.monotonic() + 600.0)

    unanswered, steps = steps(), steps()
    assert next(steps).method == "POST"
    assert steps.send(httpx.Response(503, headers={"retry-after": "5"})) == 5.0
    assert next(steps).method == "POST"
    assert steps.throw(httpx.ConnectError("refused")) < 1.0
    assert next(steps).method == "POST"
    with pytest.raises(httpx.ReadError):  # it may have come to work
        steps.throw(httpx.ReadError("reset"))
    next(unanswered)
    with pytest.raises(httpx.ConnectError):  # of an address that never answered
        unanswered.throw(httpx.ConnectError("refused"))


def test_url_and_key_come_from_the_environment(monkeypatch, answering):
    url, seen = answering(DEVICES)
    monkeypatch.setenv("ACCELERANT_URL", f"{url}/")
    monkeypatch.setenv("ACCELERANT_API_KEY", "acl_secret\n")  # as a file has it
    with Client(trust_env=False) as client:
        client.devices()
        assert "acl_secret" not in repr(client)
    assert seen == [("/devices", "Bearer acl_secret")]


def test_the_pages_program_runs(server, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERANT_URL", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    program = re.search(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[1]
    exec(compile(program, "service.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "[ 4 10 18]", "(1024,)", "{'z': array([9223372034707292161], dtype=uint64)}", "(65536,)",
    ]  # fmt: skip
