"""A throwaway PostgreSQL cluster, services whose operations are those of served.py, and a server process."""

import asyncio
import contextlib
import inspect
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from serving import Server

from accelerant.service.jobs.service import JobService
from accelerant.service.settings import ServiceSettings
from requirements import free_port, require

sys.path.insert(0, str(Path(__file__).parent))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run asynchronous tests in an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in given}))
    return True


def _programs():
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))  # Debian's, which are not on the path
    found = shutil.which("initdb", path=os.pathsep.join([*map(str, folders[::-1]), os.environ["PATH"]]))
    require("" if found else "PostgreSQL is not here: scripts/ci-setup installs it")
    return Path(found).parent


@pytest.fixture(scope="session")
def postgres():
    """The URL of a running server, without a database; it does not run as root."""
    programs = _programs()
    user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="accelerant-postgres-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        password = folder / "password"
        password.write_text(secrets.token_hex(16))
        if user:
            for path in (folder, password):
                shutil.chown(path, "postgres", "postgres")
        command = [
            programs / "initdb", "--pgdata", folder / "data", "--username", "accelerant", "--auth", "scram-sha-256",
        ]  # fmt: skip
        subprocess.run(
            [*command, "--pwfile", password, "--no-sync"], check=True, stdout=subprocess.DEVNULL, cwd=folder, **user
        )
        port = free_port()
        options = ["-c", f"port={port}", "-c", "fsync=off", "-c", f"unix_socket_directories={folder}"]
        server = subprocess.Popen(
            [programs / "postgres", "-D", folder / "data", "-c", "listen_addresses=127.0.0.1", *options],
            stderr=subprocess.DEVNULL,
            cwd=folder,
            **user,
        )
        stack.callback(server.wait)
        stack.callback(server.send_signal, signal.SIGINT)  # does not wait for clients
        ready = [programs / "pg_isready", "--host=127.0.0.1", f"--port={port}", "--timeout=30", "--quiet"]
        while subprocess.run(ready).returncode:
            assert server.poll() is None, "PostgreSQL did not start"
        yield f"postgresql://accelerant:{password.read_text()}@127.0.0.1:{port}"


@pytest.fixture
def postgres_url(postgres):
    """The URL of a new database."""
    import sqlalchemy as sa

    name = f"test_{secrets.token_hex(8)}"
    engine = sa.create_engine(postgres.replace("://", "+pg8000://") + "/postgres", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return f"{postgres}/{name}"


@pytest.fixture(params=["sqlite", "postgresql"])
def state_url(request, tmp_path):
    if request.param == "postgresql":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path}/jobs.db"


@pytest.fixture
def settings(tmp_path):
    return ServiceSettings(
        state_url=f"sqlite:///{tmp_path}/jobs.db", directory=tmp_path / "private", devices=("cpu",), lease_s=4.0
    )


@pytest.fixture
def running(settings, monkeypatch):
    """Start services: `async with running(devices=..., ...) as service`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)

    @contextlib.asynccontextmanager
    async def start(**changes):
        service = JobService(replace(settings, **changes), operations="served:OPERATIONS")
        await service.start()
        try:
            yield service
        finally:
            await service.drain(0.0)

    return start


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """The folder of the service's models; `mine` is to be put there."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def server(tmp_path_factory, models):
    """A service on loopback, without keys."""
    settings = tmp_path_factory.mktemp("settings") / "service.toml"
    settings.write_text(
        "body_bytes = 8_000_000\nbodies_bytes = 12_000_000\n"
        "json_bytes = 200_000\nresult_bytes = 8_000_000\nheader_timeout_s = 3.0\n"
        "body_timeout_s = 3.0\nheader_bytes = 16_384\n"
        f'[models]\nmine = "{models / "mine"}"\n[collections]\npapers = "{models / "papers"}"\n'
    )
    running = Server(tmp_path_factory.mktemp("service"), "--device", "cpu", "--config", str(settings))
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def http(server):
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """The PEM files of a certificate of localhost, and of its key."""
    folder = tmp_path_factory.mktemp("certificate")
    files = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
    ]  # fmt: skip
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-out", files[0], "-keyout", files[1]]
    subprocess.run([*command, *names], check=True, capture_output=True)
    return files
