"""`accelerant serve`: the library over HTTP."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from accelerant.errors import ConfigError, MissingDependency

_EXAMPLES = """\
accelerant serve
accelerant keys create --name ci --scope field --scope zk
accelerant serve --host 0.0.0.0 --tls-certificate cert.pem --tls-key key.pem --config service.toml"""

_Config = Annotated[Path | None, typer.Option(help="TOML file; accelerant.service.settings lists the settings.")]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("serve", epilog=_EXAMPLES, rich_help_panel="Service")(serve)


def serve(
    host: Annotated[str | None, typer.Option(help="Address; any but 127.0.0.1 needs API keys.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 for a free one.")] = None,
    config: _Config = None,
    directory: Annotated[Path | None, typer.Option(help="Private folder of jobs and keys.")] = None,
    state_url: Annotated[str | None, typer.Option(help="Job store: sqlite:///PATH or postgresql://...")] = None,
    device: Annotated[list[str] | None, typer.Option(help="One worker each, as cuda:0. Default: automatic.")] = None,
    tls_certificate: Annotated[str | None, typer.Option(help="PEM file of the certificate and its chain.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file of the certificate's private key.")] = None,
    log: Annotated[str | None, typer.Option(help="json or text.")] = None,
    engine: Annotated[str, typer.Option(help="local, or ray: a replica for each GPU of a Ray cluster.")] = "local",
    address: Annotated[str | None, typer.Option(help="With --engine ray: the cluster, as HOST:PORT.")] = None,
    replicas: Annotated[int | None, typer.Option(help="With --engine ray. Default: a GPU or node each.")] = None,
) -> None:
    """Serve the library over HTTP.

    Field operations, transforms, proofs, neural operations, generation, encryption and training, with a dashboard at /
    and the API's documentation at /docs. Ends on SIGTERM when running jobs have ended or saved a checkpoint.
    """
    from accelerant.service.settings import load

    settings = load(
        config, host=host, port=port, directory=directory, state_url=state_url, devices=device or None,
        tls_certificate=tls_certificate, tls_key=tls_key, log=log,
    )  # fmt: skip
    if engine not in ("local", "ray"):
        raise ConfigError(f"--engine must be local or ray, got {engine!r}")
    if engine == "local" and (address is not None or replicas is not None):
        raise ConfigError("--address and --replicas belong to --engine ray")
    try:
        if engine == "ray":
            from accelerant.service import ray_engine

            start = partial(ray_engine.run, address=address, replicas=replicas)
        else:
            from accelerant.service import server

            start = partial(server.run)
    except ImportError as error:
        raise MissingDependency(error.name or "a package", "service", "the service") from None
    start(settings)
