"""`accelerant serve`, `keys` and `jobs`: the library over HTTP, its API keys, and the jobs of a running service."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.cli.help import Group, JsonOutput, examples, option
from accelerant.cli.terminal import print_table, span_text
from accelerant.errors import ConfigError, MissingDependency, MissingFile
from accelerant.runtime.files import escaped

if TYPE_CHECKING:
    from accelerant.service.client import Client
    from accelerant.service.jobs.wire import Job
    from accelerant.service.keys import KeyStore

_EXAMPLES = """\
accelerant serve
accelerant serve --model ./llama --model mini=./all-MiniLM-L6-v2
accelerant keys create --name ci --scope field --scope zk
accelerant serve --host 0.0.0.0 --tls-certificate cert.pem --tls-key key.pem --config service.toml"""

_Config = Annotated[Path | None, typer.Option(help="TOML file; accelerant.service.settings lists the settings.")]
_Days = Annotated[float | None, typer.Option(min=0, max=36500, help="Days until the secret expires. Default: never.")]
_Url = Annotated[str | None, typer.Option(help="The service; ACCELERANT_URL, or http://127.0.0.1:8080, by default.")]
_KeyFile = Annotated[Path | None, typer.Option(help="File with the API key; ACCELERANT_API_KEY holds it by default.")]
_Id = Annotated[str, typer.Argument(metavar="ID", help="Id of a job, or the beginning of one of the latest 1,000.")]

_DAY_S = 86400.0
_LAST_S = 32503680000.0  # the year 3000, after which time.localtime may overflow
_STATES = ("queued", "running", "succeeded", "failed", "cancelled")


def _service(module: str) -> Any:
    """Import a module of the service; MissingDependency without its extra."""
    try:
        return import_module(f"accelerant.service.{module}")
    except ImportError as error:
        raise MissingDependency(error.name or "a package", "service", "the service") from None


@examples(_EXAMPLES)
def serve(
    host: str | None = option("Address; any but 127.0.0.1 needs API keys."),
    port: int | None = option("Port; 0 for a free one."),
    config: _Config = None,
    directory: Path | None = option("Private folder of jobs and keys."),
    state_url: str | None = option("Job store: sqlite:///PATH or postgresql://..."),
    device: list[str] | None = option(
        "A device with a worker of its own, as cuda:0; may be repeated. Default: automatic."
    ),
    model: list[str] | None = option(
        "Folder or GGUF file of a model behind OpenAI's routes, or NAME=FOLDER; may be repeated."
    ),
    int8: bool = option("Weights of --model in 8-bit integers.", default=False),
    int4: bool = option("Weights of --model in 4-bit integers.", default=False),
    gpus: int | None = option(
        "Split each language model over N GPUs; with --device cpu, processes.", min=1, metavar="N"
    ),
    fast: bool = option("Answers of --model may differ, in rounding, by what else is served.", default=False),
    tls_certificate: str | None = option("PEM file of the certificate and its chain."),
    tls_key: str | None = option("PEM file of the certificate's private key."),
    log: str | None = option("json or text."),
    engine: str = option("local, or ray: a replica for each GPU of a Ray cluster.", default="local"),
    address: str | None = option("With --engine ray: the cluster, as HOST:PORT."),
    replicas: int | None = option("With --engine ray. Default: a GPU or node each."),
) -> None:
    """Serve the library over HTTP.

    Field operations, transforms, proofs, neural operations, generation, encryption and training, with a dashboard at /
    and the API's documentation at /docs. Ends on SIGTERM when running jobs have ended or saved a checkpoint.
    """
    from accelerant.service.settings import load

    if int8 and int4:
        raise ConfigError("--int8 and --int4 exclude each other")
    settings = load(
        config, host=host, port=port, directory=directory, state_url=state_url, devices=device or None,
        served=_named_folders(model or []) or None, quantize="int8" if int8 else "int4" if int4 else None,
        gpus=gpus, fast=fast or None, tls_certificate=tls_certificate, tls_key=tls_key, log=log,
    )  # fmt: skip
    if engine not in ("local", "ray"):
        raise ConfigError(f"--engine must be local or ray, got {engine!r}")
    if engine == "local" and (address is not None or replicas is not None):
        raise ConfigError("--address and --replicas belong to --engine ray")
    if engine == "ray":
        _service("ray_engine").run(settings, address=address, replicas=replicas)
    else:
        _service("app").run(settings)


def _named_folders(given: list[str]) -> dict[str, Path]:
    """Return folders and files by the name that clients give: their own, unless NAME= stands before it."""
    found: dict[str, Path] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        path = Path(folder if equals and "/" not in name else text)
        if not equals or "/" in name:
            name = path.stem if path.is_file() else path.resolve().name
        if name in found:
            raise ConfigError(f"--model: two models are called {name!r}: write NAME=FOLDER")
        if not path.exists():
            raise MissingFile(f"--model: there is no folder or file {path}")
        found[name] = path
    return found


# --- keys -------------------------------------------------------------------------------------------------------------
def create(
    name: Annotated[str, typer.Option(help="For people, such as the key's user.")],
    scope: Annotated[list[str], typer.Option(help="What it allows; may be repeated. admin allows everything.")],
    rate: float | None = option("Requests a second on average. Default: no limit."),
    burst: int | None = option("Requests at once. Default: those of two seconds."),
    days: _Days = None,
    config: _Config = None,
    json_output: JsonOutput = False,
) -> None:
    """Create a key and print it, once: only its hash is kept."""
    if burst is not None and rate is None:
        raise ConfigError(f"--burst {burst} goes with --rate")
    lifetime_s = None if days is None else days * _DAY_S
    key, token = _store(config).create(name, scope, rate=rate, burst=burst, lifetime_s=lifetime_s)
    print(json.dumps(key.public() | {"token": token}) if json_output else token)


def list_keys(config: _Config = None, json_output: JsonOutput = False) -> None:
    """List the keys, without their secrets."""
    keys = [key.public() for key in _store(config).read()]
    if json_output:
        print(json.dumps(keys))
        return
    if not keys:
        print("no keys")
    for key in keys:
        end = key["until"]
        until = "" if end is None else f"  until {time.strftime('%Y-%m-%d %H:%M', time.localtime(min(end, _LAST_S)))}"
        rate = "" if key["rate"] is None else f"  {key['rate']:g} requests/s"
        print(f"{key['id']}  {key['name']}  {','.join(key['scopes'])}{rate}{until}")


def revoke(id: Annotated[str, typer.Argument(help="Id of the key.")], config: _Config = None) -> None:
    """Remove a key. A running service refuses it within a second."""
    _store(config).revoke(id)


def rotate(
    id: Annotated[str, typer.Argument(help="Id of the key.")],
    grace_days: float = option("Days that the old secret stays valid.", min=0, max=36500, default=1.0),
    days: _Days = None,
    config: _Config = None,
    json_output: JsonOutput = False,
) -> None:
    """Give a key a new secret and print it; its id and its jobs stay."""
    lifetime_s = None if days is None else days * _DAY_S
    key, token = _store(config).rotate(id, grace_s=grace_days * _DAY_S, lifetime_s=lifetime_s)
    print(json.dumps(key.public() | {"token": token}) if json_output else token)


def _store(config: Path | None) -> KeyStore:
    from accelerant.service.settings import load

    store: KeyStore = _service("keys").KeyStore(load(config).keys_file)
    return store


# --- jobs -------------------------------------------------------------------------------------------------------------
def list_jobs(
    state: str | None = option(f"Only those of a state: {', '.join(_STATES)}."),
    max_rows: int = option("Jobs at most.", min=1, max=1000, default=50),
    url: _Url = None,
    key_file: _KeyFile = None,
    json_output: JsonOutput = False,
) -> None:
    """List the jobs of the key, the newest first; of all keys if its scope is admin."""
    if state is not None and state not in _STATES:
        raise ConfigError(f"--state must be one of {', '.join(_STATES)}, got {state!r}")
    with _client(url, key_file) as client:
        jobs = client.jobs(state=state, limit=max_rows)
    if json_output:
        print(json.dumps([asdict(job) for job in jobs], indent=1))
        return
    if not jobs:
        print("no jobs")
        return
    titles = ("job", "operation", "state", "done", "device", "age", "took", "message")
    print_table(titles, [_cells(job) for job in jobs], right=("done", "age", "took"), prose=True)


def show(id: _Id, url: _Url = None, key_file: _KeyFile = None, json_output: JsonOutput = False) -> None:
    """Show a job."""
    with _client(url, key_file) as client:
        _print(client.job(_whole(client, id)), json_output)


def cancel(id: _Id, url: _Url = None, key_file: _KeyFile = None, json_output: JsonOutput = False) -> None:
    """Cancel a job: at once if it waits, else between its parts. One that has ended stays as it is."""
    with _client(url, key_file) as client:
        _print(client.cancel(_whole(client, id)), json_output)


@contextmanager
def _client(url: str | None, key_file: Path | None) -> Iterator[Client]:
    from accelerant.service.client import Client

    key = None
    if key_file is not None:
        with key_file.open(encoding="latin-1") as file:
            key = file.read(1000).strip()  # a device has no end
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"--key-file {key_file} is not text")
        if not key:
            raise ConfigError(f"--key-file {key_file} is empty")
    with Client(url, key=key, timeout=30.0) as client:
        yield client


def _whole(client: Client, id: str) -> str:
    """Return the id that begins so; as it is if none of the latest does."""
    if len(id) >= 32:
        return id
    found = [job.id for job in client.jobs(limit=1000) if job.id.startswith(id)]
    if len(found) > 1:
        raise ConfigError(f"{len(found)} jobs begin with {id!r}: {', '.join(found[:5])}")
    return found[0] if found else id


def _cells(job: Job) -> tuple[str, ...]:
    took = "" if job.started is None else span_text((job.finished or time.time()) - job.started)
    message = job.error or job.message
    return (
        job.id[:12], escaped(job.operation), job.state, f"{job.progress:.0%}", job.device or "-",
        span_text(time.time() - job.created), took, escaped(message.splitlines()[0]) if message else "",
    )  # fmt: skip


def _print(job: Job, json_output: bool) -> None:
    if json_output:
        print(json.dumps(asdict(job), indent=1))
        return
    rows: dict[str, Any] = asdict(job)
    for name in ("created", "started", "finished"):
        if rows[name] is not None:
            rows[name] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(rows[name]))
    rows["progress"] = f"{job.progress:.0%}"
    width = max(map(len, rows))
    for name, value in rows.items():
        if value not in (None, ""):
            print(f"{name.replace('_', ' '):{width}}  {escaped(str(value))}")


keys = Group(
    "API keys of the service.",
    {
        create: "create --name ci --scope field --scope zk --rate 50",
        list_keys: "list --json",
        revoke: "revoke 3f2a9c0d1e4b",
        rotate: "rotate 3f2a9c0d1e4b --grace-days 2",
    },
)
jobs = Group(
    "Jobs of a running service: list, show, cancel.",
    {
        list_jobs: "list\naccelerant jobs list --state failed --json",
        show: "show 4f1c\naccelerant jobs show 4f1c --json",
        cancel: "cancel 4f1c",
    },
)
