"""Limits of the service against hostile requests, over raw connections."""

import asyncio
import contextlib
import gzip
import io
import json
import logging
import re
import socket
import ssl
import struct
import time
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import uvicorn
from uvicorn.server import ServerState

from accelerant.service.bodies import ARROW, BINARY, JSON, NPY, SAFETENSORS
from accelerant.service.errors import Refused
from accelerant.service.guard import Guard, GuardedProtocol, _OneWrite, guarded_protocol, read_body
from accelerant.service.infer import Answer, Inference, answer_format
from accelerant.service.keys import KeyStore
from accelerant.service.operations import OPERATIONS, NoParameters
from accelerant.service.settings import ServiceSettings
from accelerant.service.telemetry import RequestLog, RequestRecord, _Formatter
from refusals import assert_raises

MUL = "/v2/models/field_mul/infer"


class Raw:
    """A connection to the server."""

    def __init__(self, server):
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=120)

    def send(self, data):
        self.socket.sendall(data)

    def answer(self):
        """All bytes until the server closes the connection, or keeps it open after a whole answer."""
        received = b""
        while b"\r\n\r\n" not in received and (part := self.socket.recv(65536)):
            received += part
        return received.decode("latin-1")

    def closed_after(self):
        """Seconds until the server closes the connection."""
        begun = time.monotonic()
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return time.monotonic() - begun


@pytest.fixture
def raw(server):
    connection = Raw(server)
    with connection.socket:
        yield connection


def alive(http):
    return http.get("/v2/health/ready").status_code == 200


def test_headers_that_do_not_end_close_the_connection(raw, http):
    raw.send(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n")
    assert raw.answer().startswith("HTTP/1.1 408")
    assert raw.closed_after() < 25  # of the 30 s of one that was served
    assert alive(http)


def test_a_silent_connection_is_closed(raw):
    assert raw.closed_after() < 25  # of the 30 s of one that was served


@pytest.mark.parametrize("at_once", [True, False])
def test_floods_of_headers_are_refused(raw, http, at_once):
    lines = [b"x-%d: %s\r\n" % (i, b"a" * 100) for i in range(300)]
    raw.send(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n")
    if at_once:
        raw.send(b"".join(lines) + b"\r\n")
    else:
        try:
            for line in lines:
                raw.send(line)
                time.sleep(0.001)
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert raw.answer().startswith("HTTP/1.1 431")
    assert alive(http)


def test_a_declared_body_beyond_the_limit_is_refused_before_it_is_sent(raw):
    raw.send(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n" % MUL.encode())
    assert raw.answer().startswith("HTTP/1.1 413")


def test_a_chunked_body_beyond_the_limit_is_refused_while_it_streams(raw):
    raw.send(b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % MUL.encode())
    sent = 0
    try:
        while sent < 100_000_000:
            raw.send(b"10000\r\n" + b"0" * 65536 + b"\r\n")
            sent += 65536
    except (BrokenPipeError, ConnectionResetError, TimeoutError):
        pass
    assert sent < 50_000_000


def test_headers_after_a_chunked_body_are_forgotten():
    protocol = GuardedProtocol.__new__(GuardedProtocol)
    protocol.headers, protocol._in_headers = [], True
    protocol.on_header(b"a", b"b")
    protocol._in_headers = False
    protocol.on_header(b"c", b"d")
    assert protocol.headers == [(b"a", b"b")]


def test_a_log_that_cannot_be_written_keeps_no_lines():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    log = RequestLog(Full(), "json")
    log._lines.append("one\n")
    log.flush()
    assert log._lines == []


@pytest.mark.parametrize(
    ("accept", "format"),
    [("application/x-npy;q=0, application/json", JSON), ("application/x-npy; q=0.5", NPY), ("*/*", SAFETENSORS)],
)
def test_what_a_client_does_not_accept_is_not_sent(accept, format):
    assert answer_format(accept, SAFETENSORS) == format
    assert_raises(Refused, None, answer_format, "*/*;q=0", SAFETENSORS)


def test_the_cost_of_a_product_counts_the_batches_that_broadcast():
    inputs = {"a": np.zeros((1, 8, 4), np.float32), "b": np.zeros((512, 4, 1), np.float32)}
    wide = {"a": np.zeros((512, 8, 4), np.float32), "b": np.zeros((512, 4, 1), np.float32)}
    product = OPERATIONS["matmul"]
    assert product.cost(inputs, NoParameters()) == product.cost(wide, NoParameters()) > 0


def test_all_bodies_together_are_bounded(server, raw, http):
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 7500000\r\n\r\n" % MUL.encode()
    other = Raw(server)
    with other.socket:
        for connection in (other, raw):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send(head + bytes(7_000_000))
        assert raw.answer().startswith("HTTP/1.1 503")
    raw.socket.close()
    end = time.monotonic() + 120
    body, headers = kserve([entry([500_000], 4_000_000), entry([500_000], 4_000_000, "y")], bytes(8_000_000)[:-200])
    while http.post(MUL, content=body, headers=headers).status_code == 503:
        assert time.monotonic() < end


def test_a_slow_body_is_refused(raw, http):
    raw.send(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n" % MUL.encode())
    raw.send(b"{")
    assert raw.answer().startswith("HTTP/1.1 408")
    assert alive(http)


def test_lengths_that_are_no_numbers_are_refused(raw):
    raw.send(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n" % MUL.encode())
    assert raw.answer().startswith("HTTP/1.1 400")


def kserve(entries, tail=b""):
    text = json.dumps({"inputs": entries}).encode()
    return text + tail, {"inference-header-content-length": str(len(text))}


def entry(shape, size, name="x"):
    return {"name": name, "shape": shape, "datatype": "UINT64", "parameters": {"binary_data_size": size}}


def test_declared_sizes_are_compared_with_the_bytes(http):
    for shape, size, why in (
        ([2**40], 16, "takes"),
        ([2**40, 2**40], 16, "takes"),
        ([2], 2**60, "bytes are left"),
        ([2], 8, "takes 16 bytes, got 8"),
        ([-2], 16, "whole numbers"),
        ([2.0], 16, "whole numbers"),
        ([1] * 9, 8, "at most 8"),
        ([2], -1, "whole number"),
        ([2**30, 0], 0, "is too large"),  # no bytes, and work for each row
        ([2**47, 2**47, 0], 0, "is too large"),
    ):
        body, headers = kserve([entry(shape, size)], bytes(16))
        answer = http.post(MUL, content=body, headers=headers)
        assert answer.status_code == 400
        assert why in answer.json()["error"]
    body, headers = kserve([entry([2], 16), entry([2], 16, "y")], bytes(40))
    assert "follow the last tensor" in http.post(MUL, content=body, headers=headers).json()["error"]
    answer = http.post(MUL, content=body, headers={"inference-header-content-length": "999999"})
    assert answer.status_code == 400


def npy(header):
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def test_crafted_arrays_are_refused(http, tmp_path):
    pickled = tmp_path / "object.npy"
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    zipped = tmp_path / "arrays.npz"
    np.savez_compressed(zipped, x=np.zeros(10**6, np.uint64))
    huge = b'{"x":{"dtype":"U64","shape":[1099511627776],"data_offsets":[0,16]}}'
    for format, body in (
        (NPY, pickled.read_bytes()),
        (NPY, zipped.read_bytes()),
        (NPY, npy("{'descr': '<u8', 'fortran_order': False, 'shape': (1099511627776,)}") + bytes(16)),
        (NPY, npy("{'descr': '<u8', 'fortran_order': False, 'shape': (-1,)}") + bytes(16)),
        (NPY, npy("{'descr': [('a', '<u8')], 'fortran_order': False, 'shape': (2,)}") + bytes(16)),
        (NPY, npy("__import__('os').system('true')")),
        (NPY, npy("{'descr': '<u8', 'fortran_order': False, 'shape': (2,")),
        (SAFETENSORS, struct.pack("<Q", len(huge)) + huge + bytes(16)),
        (SAFETENSORS, struct.pack("<Q", 2**62) + b"{}"),
        (SAFETENSORS, struct.pack("<Q", 2**20) + b"{}" + b" " * (2**20 - 2)),  # a header of more than json_bytes
        (ARROW, b"\xff\xff\xff\xff\x10\x00\x00\x00" + bytes(16)),
        (ARROW, bytes(range(256)) * 4),
        (SAFETENSORS, b""),
    ):
        answer = http.post(MUL, content=body, headers={"content-type": format})
        assert answer.status_code == 400, (format, answer.text)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_decompression_bombs_are_refused(http, codec):
    arrow = pytest.importorskip("pyarrow")
    batch = arrow.record_batch([arrow.array(np.zeros(10**6, np.uint64))], names=["x"])
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, batch.schema, options=arrow.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)
    body = bytes(sink.getvalue())
    assert len(body) < 100_000
    answer = http.post(MUL, content=body, headers={"content-type": ARROW})
    assert answer.status_code == 400
    assert "compression" in answer.json()["error"]
    bomb = gzip.compress(bytes(10**7))
    assert http.post(MUL, content=bomb, headers={"content-encoding": "gzip"}).status_code == 415


def test_results_that_would_be_huge_are_refused_before_they_are_computed(http):
    body, headers = kserve(
        [
            entry([100_000, 1], 800_000) | {"datatype": "FP64", "name": "a"},
            entry([1, 100_000], 800_000) | {"datatype": "FP64", "name": "b"},
        ],
        bytes(1_600_000),
    )
    answer = http.post("/v2/models/matmul/infer", content=body, headers=headers)
    assert answer.status_code == 413
    body, headers = kserve([entry([100_000, 1], 800_000), entry([1, 100_000], 800_000, "y")], bytes(1_600_000))
    assert http.post(MUL, content=body, headers=headers).status_code == 413


def test_large_or_deep_json_is_refused(http):
    deep = b'{"inputs":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    for body in (
        deep, b'{"inputs": [' + b"0," * 150_000 + b"0]}", b"\xff\xfe", b"[]", b"7", b'{"inputs": 7}', b'{"id": 1}',
    ):  # fmt: skip
        answer = http.post(MUL, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
    for shape, data in (([2, 3], [[1, 2], [3, 4], [5, 6]]), ([2, 2], [[1, 2, 3], [4]])):
        inputs = [{"name": name, "shape": shape, "datatype": "UINT64", "data": data} for name in "xy"]
        answer = http.post(MUL, json={"inputs": inputs})
        assert (answer.status_code, "nested as its shape" in answer.text) == (400, True)
    long = b'{"inputs":[{"name":"x","shape":[1],"datatype":"UINT64","data":[' + b"9" * 5000 + b"]}]}"
    assert http.post(MUL, content=long, headers={"content-type": "application/json"}).status_code == 400


def test_bfloat16_is_refused_with_what_to_send(http):
    body, headers = kserve([entry([2], 4) | {"datatype": "BF16"}], bytes(4))
    answer = http.post(MUL, content=body, headers=headers)
    assert (answer.status_code, "send float32" in answer.json()["error"]) == (400, True)


def test_paths_do_not_leave_their_folders(http):
    for path in (
        "/dashboard/../../etc/passwd", "/dashboard/%2e%2e/%2e%2e/etc/passwd", "/jobs/..%2f..%2fetc", "/jobs/%00",
    ):  # fmt: skip
        answer = http.get(path)
        assert answer.status_code in (400, 404), path
        assert "root:" not in answer.text


def test_pages_of_other_sites_and_other_names_of_the_host_are_refused(http):
    for origin in ("https://evil.example", "http://[", "null"):
        assert http.get("/v2", headers={"origin": origin}).status_code == 403
    assert http.get("/v2", headers={"host": "evil.example"}).status_code == 403
    port = http.base_url.port
    for header in ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"):
        assert http.get("/v2", headers={header: "10.0.0.1"}).status_code == 403
    same = http.get("/v2", headers={"origin": f"http://127.0.0.1:{port}", "host": f"127.0.0.1:{port}"})
    assert (same.status_code, same.headers["cache-control"]) == (200, "no-store")


HOST = b"Host: localhost\r\n"
VALUES = json.dumps(
    {"inputs": [{"name": name, "shape": [1], "datatype": "UINT64", "data": [3]} for name in "xy"]}
).encode()
LENGTH = b"Content-Length: %d\r\n" % len(VALUES)
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(VALUES), VALUES)


def get(target=b"/v2", lines=HOST, version=b"1.1", method=b"GET"):
    return b"%s %s HTTP/%s\r\n%s\r\n" % (method, target, version, lines)


def post(lines, body=VALUES, version=b"1.1"):
    return get(MUL.encode(), HOST + lines, version, b"POST") + body


REQUESTS = {
    "head": (get(b"/", method=b"HEAD"), [200]),
    "head of a stream": (get(b"/events", method=b"HEAD") + get(method=b"HEAD"), [200, 200]),
    "head of health": (get(b"/v2/health/live", method=b"HEAD"), [200]),
    "head of post": (get(MUL.encode(), method=b"HEAD"), [405]),
    "options": (get(MUL.encode(), method=b"OPTIONS"), [204]),
    "options of all": (get(b"*", method=b"OPTIONS"), [204]),
    "trace": (get(method=b"TRACE"), [405]),
    "longest target": (get(b"/v2?" + b"a" * 8188), [200]),
    "long target": (get(b"/v2?" + b"a" * 8189), [414]),
    "very long target": (get(b"/v2?" + b"a" * 50_000), [414]),
    "long path": (get(b"/" + b"a" * 50_000), [414]),
    "target without end": (b"GET /" + b"a" * 9000, [414]),
    "two hosts": (get(lines=b"Host: evil.example\r\n" + HOST), [400]),
    "one host twice": (get(lines=HOST + HOST), [400]),
    "no host": (get(lines=b""), [400]),
    "host with a space": (get(lines=b"Host: localhost x\r\n"), [400]),
    "host with a path": (get(lines=b"Host: localhost/x\r\n"), [400]),
    "http/1.0": (get(version=b"1.0"), [200]),
    "http/1.2": (get(version=b"1.2"), [400]),
    "absolute target": (get(b"http://localhost/v2", b"Host: evil.example\r\n"), [200]),
    "absolute target of another host": (get(b"http://evil.example/v2"), [403]),
    "absolute target without a path": (get(b"http://localhost"), [200]),
    "absolute target, two hosts": (get(b"http://localhost/v2", HOST + HOST), [400]),
    "target of another scheme": (get(b"ftp://localhost/v2"), [400]),
    "target with a user": (get(b"http://a@localhost/v2"), [400]),
    "target without a slash": (get(b"v2"), [400]),
    "percent": (get(b"/%762"), [200]),
    "percent and no digits": (get(b"/v2/%zz"), [400]),
    "percent at the end": (get(b"/v2%"), [400]),
    "line feeds": (b"GET /v2 HTTP/1.1\nHost: localhost\n\n", [400]),
    "carriage return": (get(lines=b"Host: localhost\rX: y\r\n"), [400]),
    "folded header": (get(lines=HOST + b"X: a\r\n b\r\n"), [400]),
    "space before the colon": (get(lines=b"Host : localhost\r\n"), [400]),
    "empty lines before": (b"\r\n\r\n" + get(), [200]),
    "connection: Close": (get(lines=HOST + b"Connection: Close\r\n"), [200]),
    "length": (post(LENGTH), [200]),
    "length twice": (post(LENGTH + LENGTH), [400]),
    "two lengths": (post(LENGTH + b"Content-Length: 5\r\n"), [400]),
    "length with a sign": (post(LENGTH.replace(b": ", b": +")), [400]),
    "length and chunks": (post(LENGTH + b"Transfer-Encoding: chunked\r\n", CHUNKS), [400]),
    "chunks": (post(b"Transfer-Encoding: Chunked\r\n", CHUNKS), [200]),
    "chunks twice": (post(b"Transfer-Encoding: chunked\r\n" * 2, CHUNKS), [400]),
    "chunks of gzip": (post(b"Transfer-Encoding: gzip, chunked\r\n", CHUNKS), [501]),
    "chunks without a size": (post(b"Transfer-Encoding: chunked\r\n", b"zz\r\n"), [400]),
    "identity": (post(LENGTH + b"Content-Encoding: Identity\r\n"), [200]),
    "gzip": (post(LENGTH + b"Content-Encoding: GZIP\r\n"), [415]),
    "gzip and identity": (post(LENGTH + b"Content-Encoding: gzip\r\nContent-Encoding: identity\r\n"), [415]),
    "expect": (post(LENGTH + b"Expect: 100-continue\r\n"), [100, 200]),
    "expect of http/1.0": (post(LENGTH + b"Expect: 100-continue\r\n", version=b"1.0"), [200]),
    "expect what is refused": (get(b"/x", HOST + LENGTH + b"Expect: 100-continue\r\n", method=b"POST"), [404]),
    "offer of http/2": (post(LENGTH + b"Connection: Upgrade\r\nUpgrade: h2c\r\n") + get(), [200, 200]),
    "offer of http/2, chunks": (
        post(b"Transfer-Encoding: chunked\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n", CHUNKS), [200]
    ),
    "17 requests": (get() * 17, [200] * 17),
    "18 requests": (get() * 18, [200] * 17 + [503]),
    "many requests": (get() * 500, [200] * 17 + [503]),
    "no request after one": (get() + b"JUNK\r\n\r\n", [200, 400]),
    "no chunk after a request": (get() + post(b"Transfer-Encoding: chunked\r\n", b"zz\r\n"), [200, 400]),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_has_its_answer(raw, name):
    """As RFC 9112 has it, in order, and with a status; what proxies may read in two ways is refused."""
    request, statuses = REQUESTS[name]
    raw.send(request)
    raw.socket.shutdown(socket.SHUT_WR)  # who has asked may end their side
    received = b""
    while part := raw.socket.recv(65536):
        received += part
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)] == statuses
    refused = {"413", "414", "431", "408", "501", "503"}
    assert not refused & {str(statuses[-1])} or b'"type": ' in received


def test_a_path_says_which_methods_it_has(http):
    answers = [http.request(method, path) for method in ("OPTIONS", "PUT") for path in ("/v2", MUL, "/jobs/a")]
    allowed = ["GET, HEAD, OPTIONS", "OPTIONS, POST", "DELETE, GET, HEAD, OPTIONS"]
    assert [answer.headers["allow"] for answer in answers] == allowed * 2
    for path in ("/", "/v2/health/ready", "/metrics", "/v2/nothing"):
        whole, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        if path != "/metrics":
            assert head.headers["content-length"] == whole.headers["content-length"]


@contextlib.asynccontextmanager
async def listening(tmp_path, app=None, **changes):
    """Serve by the guard and its protocol in this process; yields the port and the protocol."""
    settings = ServiceSettings(directory=tmp_path, **changes)
    guard = Guard(app or empty, settings=settings, keys=KeyStore(tmp_path / "keys.json"), observers=[])
    protocol = guarded_protocol(settings)
    certificate, key = settings.tls_certificate or None, settings.tls_key or None
    config = uvicorn.Config(guard, http=protocol, ws="none", log_config=None, ssl_certfile=certificate, ssl_keyfile=key)
    config.load()
    protocol.tls = config.ssl
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], protocol


async def status(port, path="/v2/health/live", tls=None, **options):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, **options)
    writer.write(b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode())
    answer = await reader.read()
    writer.close()
    return answer[9:12].decode()


START = {
    "silent": b"",
    "headers": b"GET /v2/hea",
    "public": get(b"/"),
    "body": get(MUL.encode(), HOST + b"Content-Length: 100\r\n", method=b"POST") + b"{",
}


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("addresses", [1, 50])
@pytest.mark.parametrize("sent", START)
def test_strangers_cannot_take_all_connections(tmp_path, sent, addresses, tls, certificate):
    """They come again whenever a connection of theirs ends."""
    KeyStore(tmp_path / "keys.json").create("a", ["field"])
    attackers, came = set(), 0

    async def stranger(port, number):
        nonlocal came
        while True:
            with contextlib.suppress(OSError):
                local = f"127.0.0.{number % addresses + 1}", 0
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=local)
                came += 1
                writer.write(START[sent])
                await reader.read()
                while await reader.read(1000):
                    pass
                writer.close()

    async def attack():
        files = {"tls_certificate": str(certificate[0]), "tls_key": str(certificate[1])} if tls else {}
        async with listening(tmp_path, connections=20, connections_per_address=15, **files) as (port, protocol):
            attackers.update(asyncio.create_task(stranger(port, number)) for number in range(30))
            while came < 30:
                await asyncio.sleep(0.005)
            context = ssl.create_default_context(cafile=certificate[0]) if tls else None
            names = {"server_hostname": "localhost"} if tls else {}
            found = [await status(port, tls=context, **names) for _ in range(10)]
            assert len(protocol.open) <= 20 + protocol.open.reserve
            for attacker in attackers:
                attacker.cancel()
            await asyncio.gather(*attackers, return_exceptions=True)
            return found

    assert asyncio.run(attack()) == ["200"] * 10


def test_beyond_the_connections_strangers_get_health_and_keys_get_all(tmp_path, monkeypatch):
    monkeypatch.setattr("accelerant.service.guard._SETTLED_S", 1000.0)
    _, token = KeyStore(tmp_path / "keys.json").create("a", ["field"])

    async def ask():
        async with listening(tmp_path, connections=4) as (port, protocol):
            others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            found = [await status(port, path) for path in ("/", "/v2/health/live", "/v2/health/ready")]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get(lines=HOST + b"X-Api-Key: %s\r\n" % token.encode()))
            found.append((await reader.readuntil(b"\r\n"))[9:12].decode())
            monkeypatch.setattr("accelerant.service.guard._SETTLED_S", 0.0)
            found.append(await status(port))  # for which the first of the silent ones goes
            assert await others[0][0].read() == b""
            for _, other in (*others, (reader, writer)):
                other.close()
            while len(protocol.open):
                await asyncio.sleep(0.001)
            return found

    assert asyncio.run(ask()) == ["503", "200", "200", "200", "200"]


@pytest.mark.parametrize("parts", [
    [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50],
    [b"GET / HTTP/1.1\r\n", *[b"x: " + b"a" * 1000 + b"\r\n"] * 50],
], ids=["requests", "headers"])  # fmt: skip
def test_what_follows_a_request_in_progress_is_bounded(raw, http, parts):
    raw.send(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    raw.answer()
    end = time.monotonic() + 60
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for part in parts:
            raw.send(part)
            time.sleep(0.005)
        while raw.socket.recv(65536):
            assert time.monotonic() < end
    assert alive(http)


def test_requests_that_follow_a_body_in_one_packet_are_served(raw):
    """The packet is larger than the limit of headers, and ends within those of the second request."""
    post = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30000\r\n\r\n" % MUL.encode() + bytes(30_000)
    raw.send(post + b"GET /v2 HTTP/1.1\r\nHost: local")
    assert raw.answer().startswith("HTTP/1.1 400")
    raw.send(b"host\r\nConnection: close\r\n\r\n")
    assert "HTTP/1.1 200" in raw.answer()


def test_head_and_body_are_one_write():
    """Not one of writelines, which in Python 3.12 buffers without a limit and writes to closed connections."""
    proceed, written = b"HTTP/1.1 100 Continue\r\n\r\n", []
    ended = []
    answer = _OneWrite(
        SimpleNamespace(write=written.append, is_closing=lambda: bool(ended), close=lambda: written.append(None))
    )
    for part in (proceed, b"head", proceed, b"more"):
        answer.write(part)
    assert written == [proceed, b"head" + proceed, b"more"]
    answer = _OneWrite(answer._transport)
    answer.write(b"head")
    answer.close()
    assert written[3:] == [b"head", None]
    ended.append(True)  # TLS of asyncio raises where something is written then
    _OneWrite(answer._transport).write(proceed)
    assert written[5:] == []


async def empty(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def asked(guard, requests):
    """Answers of (method, path, headers) of a guard in this process."""

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://127.0.0.1") as client:
            return [await client.request(method, path, headers=headers) for method, path, headers in requests]

    return asyncio.run(ask())


def test_health_and_metrics_are_answered_under_overload(tmp_path):
    guard = Guard(empty, settings=ServiceSettings(concurrency=1), keys=KeyStore(tmp_path / "keys.json"), observers=[])
    guard._running = 1
    paths = ("/v2", "/v2/health/live", "/v2/health/ready", "/metrics")
    answers = asked(guard, [("GET", path, {}) for path in paths])
    assert [answer.status_code for answer in answers] == [503, 200, 200, 200]
    assert answers[0].headers["retry-after"] == "1"
    assert ServiceSettings().concurrency > ServiceSettings().queue_jobs  # a full queue answers 429


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_who_needs_a_key(tmp_path, host):
    keys = KeyStore(tmp_path / "keys.json")
    guard = Guard(empty, settings=ServiceSettings(host=host), keys=keys, observers=[])
    public = [("GET", path, {}) for path in ("/", "/v2/health/live", "/v2/health/ready", "/dashboard/x")]
    private = [("GET", "/v2", {}), ("GET", "/metrics", {}), ("GET", "/dashboard", {}), ("POST", "/", {})]
    without = [answer.status_code for answer in asked(guard, public + private)]
    assert without == [200] * 4 + [200 if host == "127.0.0.1" else 401] * 4
    key, token = keys.create("ci", ["field"])
    keys._looked = -10.0  # else it looks at the file once in a while
    assert [answer.status_code for answer in asked(guard, public + private)] == [200] * 4 + [401] * 4
    assert asked(guard, [("GET", "/v2", {"authorization": f"Basic {token}"})])[0].status_code == 401
    wrong = [{"authorization": f"Bearer {token[:-3]}abc"}, {"x-api-key": "acl_"}]
    for answer in asked(guard, [("GET", path, headers) for headers in wrong for path in ("/v2", "/")]):
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    right = [{"authorization": f"bearer {token} "}, {"x-api-key": token}, {"x-api-key": token, "via": "1.1 proxy"}]
    assert [each.status_code for each in asked(guard, [("GET", "/v2", headers) for headers in right])] == [200] * 3
    keys.revoke(key.id)
    keys._looked = -10.0
    assert asked(guard, [("GET", "/v2", right[0])])[0].status_code == 401


def test_a_key_that_asks_too_often_is_told_when_to_come_back(tmp_path):
    keys = KeyStore(tmp_path / "keys.json")
    _, token = keys.create("ci", ["field"], rate=0.01, burst=2)
    guard = Guard(empty, settings=ServiceSettings(), keys=keys, observers=[])
    answers = asked(guard, [("GET", "/v2", {"x-api-key": token})] * 3)
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 90 <= int(answers[2].headers["retry-after"]) <= 100
    assert "0.01 requests a second" in answers[2].json()["error"]


def test_headers_and_requests_at_once_are_bounded_exactly(tmp_path):
    keys = KeyStore(tmp_path / "keys.json")
    guard = Guard(empty, settings=ServiceSettings(header_bytes=4096, concurrency=2), keys=keys, observers=[])

    def status(padding):
        headers = [(b"host", b"127.0.0.1"), (b"x", b"a" * (4096 - 14 + padding))]
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/v2", "headers": headers}
        asyncio.run(guard(scope, None, send))
        return sent[0]["status"]

    assert [status(padding) for padding in (0, 1)] == [200, 431]
    guard._running = 1
    assert status(0) == 200
    guard._running = 2
    assert status(0) == 503


class Clock(asyncio.SelectorEventLoop):
    """A loop in which nothing is waited for: its clock goes to the next event."""

    def __init__(self, monkeypatch):
        super().__init__()
        select, self.now_s = self._selector.select, 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)  # the guard's clock, and that of time()
        self._selector.select = lambda wait_s: self._advance(wait_s) or select(0)

    def _advance(self, wait_s):
        self.now_s += wait_s or 0.0


def body_of(monkeypatch, parts, *, declared=None, **settings):
    """Read a body whose parts come after so many seconds each: bytes, or the status of the refusal and its time."""

    async def receive():
        wait_s, part = coming.pop(0)
        await asyncio.sleep(wait_s)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(coming)}

    coming, held = list(parts), []
    fields = {} if declared is None else {b"content-length": declared}
    state = {"fields": fields, "record": RequestRecord("a", "POST", "/")}
    clock = Clock(monkeypatch)
    try:
        body = clock.run_until_complete(read_body({"state": state}, receive, ServiceSettings(**settings), held.append))
        assert sum(held) == len(body)
        return body
    except Refused as refused:
        return refused.status, clock.now_s
    finally:
        clock.close()


def test_a_body_is_refused_when_its_average_rate_is_too_low(monkeypatch):
    limits = {"body_timeout_s": 10.0, "body_rate_bytes_s": 100}
    steady = [(0.9, b"x" * 100)] * 30  # 27 s, of which body_timeout_s alone allows 10
    assert body_of(monkeypatch, steady, **limits) == b"x" * 3000
    assert body_of(monkeypatch, [(9.9, b"")], **limits) == b""
    assert body_of(monkeypatch, [(10.1, b"")], **limits) == (408, 10.0)
    # 500 bytes allow 5 s more, counted from the beginning of the body and not from its last part
    assert body_of(monkeypatch, [(6.0, b"x" * 500), (8.9, b"y")], **limits) == b"x" * 500 + b"y"
    assert body_of(monkeypatch, [(6.0, b"x" * 500), (9.1, b"y")], **limits) == (408, 15.0)
    assert body_of(monkeypatch, [(0.0, b"x"), (1.0, None)], **limits) == (400, 1.0)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_has_at_most_so_many_bytes(monkeypatch, declared):
    for size, wanted in ((1000, b"x" * 1000), (1001, (413, 0.0))):
        parts = [(0.0, b"x" * 400), (0.0, b"x" * (size - 400))]
        length = str(size).encode() if declared else None
        assert body_of(monkeypatch, parts, declared=length, body_bytes=1000) == wanted
        assert body_of(monkeypatch, [(0.0, b"x" * size)], declared=length, body_bytes=1000) == wanted


@pytest.mark.parametrize("reads", [True, False])
def test_a_long_answer_is_sent_in_parts_and_counted_until_it_is_read(tmp_path, reads):
    settings = ServiceSettings(body_timeout_s=0.5, body_rate_bytes_s=1 << 30, bodies_bytes=4_000_000)
    inference, size, seen = Inference(settings, {}, None), 3 << 20, []

    async def answer(name, scope, receive):
        inference.hold(scope["state"]["record"], size)
        return Answer(bytes(size), [(b"content-type", BINARY.encode())])

    async def send(message):
        if message["type"] == "http.response.body":
            seen.append((len(message["body"]), message["more_body"], inference.held_bytes))
            await asyncio.sleep(0.0 if reads else 5.0)

    inference.answer = answer
    keys = KeyStore(tmp_path / "keys.json")
    guard = Guard(None, settings=settings, keys=keys, observers=[], inference=inference)
    scope = {"type": "http", "method": "POST", "path": MUL, "headers": [(b"host", b"localhost")]}
    if reads:
        asyncio.run(guard(scope, None, send))
        assert seen == [(1 << 20, True, size), (1 << 20, True, size), (1 << 20, False, size)]
    else:
        with pytest.raises(Refused, match="was not read") as caught:  # uvicorn closes the connection, and logs it
            asyncio.run(guard(scope, None, send))
        record = logging.LogRecord("uvicorn.error", 40, "", 0, "Exception\n", (), caught._excinfo)
        assert _Formatter("text").format(record).count("\n") == 0
        assert json.loads(_Formatter("json").format(record))["message"].startswith("Exception: the answer was not read")
    assert inference.held_bytes == 0


def test_results_of_others_are_counted_with_bodies():
    inference = Inference(ServiceSettings(bodies_bytes=100), {}, None)
    first, second = (RequestRecord(name, "GET", "/") for name in "ab")
    inference.hold(first, 1000)  # alone
    assert_raises(Refused, "of others", inference.hold, second, 1)
    inference.release(first)
    inference.release(second)
    assert inference.held_bytes == 0


def test_large_results_are_not_written_as_json(http):
    body, headers = kserve([entry([30_000], 240_000), entry([1], 8, "y")], bytes(240_008))
    assert http.post(MUL, content=body, headers=headers | {"accept": BINARY}).status_code == 200
    answer = http.post(MUL, content=body, headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (413, "ResultTooLarge")
    assert "Accept: application/octet-stream" in answer.json()["error"]
    job = http.post(MUL, content=body, headers=headers | {"prefer": "respond-async"}).headers["location"]
    while http.get(job).json()["state"] in ("queued", "running"):
        time.sleep(0.02)
    assert http.get(f"{job}/result").status_code == 413
    accept = [("accept", "text/html"), ("accept", BINARY)]  # which is one list
    assert len(http.get(f"{job}/result", headers=accept).content) > 240_000
    assert http.get("/jobs").json()["jobs"][0] == http.get(job).json()
