"""`accelerant jobs`: the jobs of a running service."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.cli.help import Application
from accelerant.cli.terminal import print_table
from accelerant.errors import ConfigError
from accelerant.runtime.files import escaped

if TYPE_CHECKING:
    from accelerant.service.client import Client
    from accelerant.service.jobs.model import Job

_Url = Annotated[
    str | None, typer.Option("--url", help="The service; ACCELERANT_URL, or http://127.0.0.1:8080, by default.")
]
_KeyFile = Annotated[
    Path | None, typer.Option("--key-file", help="File with the API key; ACCELERANT_API_KEY holds it by default.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Id = Annotated[str, typer.Argument(metavar="ID", help="Id of a job, or the beginning of one of the latest 1,000.")]

_STATES = ("queued", "running", "succeeded", "failed", "cancelled")


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = Application(help="Jobs of a running service: list, show, cancel.", no_args_is_help=True)
    group.command("list", epilog="accelerant jobs list\naccelerant jobs list --state failed --json")(list_jobs)
    group.command("show", epilog="accelerant jobs show 4f1c\naccelerant jobs show 4f1c --json")(show)
    group.command("cancel", epilog="accelerant jobs cancel 4f1c")(cancel)
    app.add_typer(group, name="jobs", rich_help_panel="Service")


def list_jobs(
    state: Annotated[str | None, typer.Option(help=f"Only those of a state: {', '.join(_STATES)}.")] = None,
    max_rows: Annotated[int, typer.Option(min=1, max=1000, help="Jobs at most.")] = 50,
    url: _Url = None,
    key_file: _KeyFile = None,
    json_output: _Json = False,
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


def show(id: _Id, url: _Url = None, key_file: _KeyFile = None, json_output: _Json = False) -> None:
    """Show a job."""
    with _client(url, key_file) as client:
        _print(client.job(_whole(client, id)), json_output)


def cancel(id: _Id, url: _Url = None, key_file: _KeyFile = None, json_output: _Json = False) -> None:
    """Cancel a job: at once if it waits, else between its parts. One that has ended stays as it is."""
    with _client(url, key_file) as client:
        _print(client.cancel(_whole(client, id)), json_output)


@contextmanager
def _client(url: str | None, key_file: Path | None) -> Iterator[Client]:
    """Yield a client of the service."""
    from accelerant.service.client import Client

    key = None
    if key_file is not None:
        try:
            key = key_file.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            raise ConfigError(f"--key-file {key_file} is not text") from None
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
    took = "" if job.started is None else _span((job.finished or time.time()) - job.started)
    message = job.error or job.message
    return (
        job.id[:12], escaped(job.operation), job.state, f"{job.progress:.0%}", job.device or "-",
        _span(time.time() - job.created), took, escaped(message.splitlines()[0]) if message else "",
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


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.1f} s" if seconds < 10 else f"{seconds:.0f} s"
