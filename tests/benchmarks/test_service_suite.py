"""The suite service: a small one for real."""

import asyncio

import pytest

from accelerant.bench.record import BenchmarkRecord, Environment
from accelerant.bench.suite import SuiteRun
from accelerant.errors import AccelerantError
from accelerant.runtime import registry
from benchmarks.service import ServiceSuite
from benchmarks.service_load import connections, started
from requirements import require_module


@pytest.mark.slow
def test_a_small_run():
    for package in ("fastapi", "uvicorn", "sqlalchemy", "alembic"):
        require_module(package)
    cpu = registry.find_device("cpu")
    suite = ServiceSuite(requests=40, clients=8, minutes=0.05).resolve(cpu)
    record = BenchmarkRecord(Environment.of(cpu), {"copy GB/s": 1.0})
    suite.measure(SuiteRun(cpu, record))
    rows = {(row.op, row.runner): row for row in record.rows}
    assert rows["field_mul", "accelerant"].note.endswith("cores")
    assert "200 requests, no error" in rows["field_mul", "accelerant"].note
    assert rows["field_mul", "fastapi"].p50 > 0
    assert rows["memory", "accelerant"].p50 < 64
    assert "none lost" in rows["overload", "accelerant"].note
    assert "1 workers killed" in rows["faults", "accelerant"].note


def test_the_client_reads_answers_in_pieces():
    """Answers are split anywhere, and their own Content-Length counts, not that of another header."""

    async def main():
        answer = b"HTTP/1.1 202 Accepted\r\nInference-Header-Content-Length: 1\r\nContent-Length: 3\r\n\r\nabc"

        async def serve(reader, writer):
            for _ in range(2):
                await reader.readuntil(b"\r\n\r\n")
                for byte in answer:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0)
            await reader.readuntil(b"\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)

        class Stub:
            port = server.sockets[0].getsockname()[1]

        async with server, connections(Stub, 1) as (connection,):
            for _ in range(2):
                got = await connection.get("/")
                assert (got.status, got.body, got.headers[b"inference-header-content-length"]) == (202, b"abc", b"1")
            with pytest.raises(ConnectionError, match="the server closed the connection"):
                await connection.get("/")

    asyncio.run(main())


def test_a_server_that_does_not_start_is_an_error():
    require_module("fastapi")
    refused = pytest.raises(AccelerantError, match=r"the server does not start: .*port must be int, got 'none'")
    with refused, started("accelerant", port="none"):
        pass
