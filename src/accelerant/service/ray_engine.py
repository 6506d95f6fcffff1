"""The service on a Ray cluster: Ray Serve runs the application of `create_app`, one replica for each GPU or CPU node.

    client -> Ray Serve's HTTP proxy of any node -> replica: the application, its JobService, one worker process

A replica is a whole server. Its worker process keeps keys and models between calls, as it does without Ray. Jobs are
rows of a PostgreSQL database, and their arrays files of a directory that all nodes mount: any replica answers for any
job, and when a node dies, the others take over its jobs as their leases expire. Ray Serve starts replicas again, sends
requests to those that live, and waits for a drain before it stops one.

Ray Serve's proxy reads the requests, so its limits apply to headers and connections, and those of the settings to
bodies and concurrency.
"""

import importlib
import logging
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI

from accelerant.errors import AccelerantError, ConfigError, MissingDependency
from accelerant.runtime.jobs import connect_ray, ray_module
from accelerant.service.app import create_app, require_keys
from accelerant.service.jobs.service import open_directory
from accelerant.service.jobs.store import JobStore
from accelerant.service.settings import ServiceSettings
from accelerant.service.telemetry import Telemetry, log_to

_LOG = logging.getLogger("accelerant.service")
_NAME = "accelerant"


class _Replica:
    """The replica's side, besides the application."""

    app: ClassVar[FastAPI | None] = None

    def check_health(self) -> None:
        """Let Ray Serve replace this replica once its workers cannot be started any more."""
        workers = [] if _Replica.app is None else _Replica.app.state.jobs.stats().workers
        if workers and all(not worker.alive and worker.restarts >= _LOST_AFTER for worker in workers):
            raise RuntimeError("no worker process can be started on this node's devices")


_STREAM_S = 5.0
"""Longest stream of events. Ray Serve drains a replica when its requests have ended, and says nothing before."""

_LOST_AFTER = 10  # starts of a worker process after which a replica without one is replaced


def _application(settings: ServiceSettings, volume: str) -> FastAPI:
    """Return the application in a replica; ConfigError if the replica's node does not share the directory."""
    requests = log_to(sys.stderr, settings.log)
    Telemetry.stream_s = _STREAM_S
    if open_directory(Path(settings.directory)) != volume:
        raise ConfigError(f"{settings.directory} on this node is another directory: mount one on all nodes")
    _Replica.app = create_app(settings)
    _Replica.app.state.observers.append(requests)
    return _Replica.app


def run(settings: ServiceSettings, address: str | None = None, replicas: int | None = None) -> None:
    """Serve on a Ray cluster, by default RAY_ADDRESS's, this host's or a new one, until a signal ends it."""
    require_keys(settings)
    if not settings.state_url.startswith("postgresql"):
        raise ConfigError("--engine ray needs state_url=postgresql://USER:PASSWORD@HOST/NAME, which all replicas share")
    if settings.gpus > 1:
        raise ConfigError("--engine ray splits no model: leave gpus out, a replica has one GPU")
    if settings.tls_certificate:
        raise ConfigError("--engine ray has no TLS: leave tls_certificate out, and let a proxy in front of it do it")
    store = JobStore(settings.state_url, owner="", volume="")
    try:
        store.upgrade()  # the error of a replica would say less, and later
    finally:
        store.close()
    volume = open_directory(Path(settings.directory))
    ray, serve = ray_module(), _serve_module()
    log_to(sys.stderr, settings.log)
    connected = not ray.is_initialized()
    if connected:
        connect_ray(address)
    try:
        count, resources, device = _placement(ray, replicas)
        served = replace(settings, devices=settings.devices or (device,))
        try:
            _deploy(ray, serve, served, volume, count, resources)
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            _LOG.info("%d replicas are listening on http://%s:%d", count, host, settings.port)
            _until_signal()
            _LOG.info("stopping")
        finally:
            if serve.status().applications.keys() - {_NAME}:  # other people's
                serve.delete(_NAME)
            else:
                serve.shutdown()
    finally:
        if connected:
            ray.shutdown()


def _serve_module() -> Any:
    try:
        return importlib.import_module("ray.serve")
    except ImportError as error:
        raise MissingDependency(error.name or "a package", "ray", "--engine ray") from None


def _placement(ray: Any, replicas: int | None) -> tuple[int, dict[str, Any], str]:
    """Return the number of replicas, the resources of each, and its device."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if gpus:
        most, what, resources, device = gpus, "GPUs", {"num_gpus": 1, "num_cpus": 0}, "cuda:0"
    else:
        most, what, resources, device = sum(node.get("CPU", 0) >= 1 for node in nodes), "nodes", {"num_cpus": 1}, "cpu"
    count = most if replicas is None else replicas
    if not 1 <= count <= most:
        raise ConfigError(f"--replicas must be 1 to {most}, the cluster's {what}, got {count}")
    return count, resources, device


def _deploy(
    ray: Any, serve: Any, settings: ServiceSettings, volume: str, count: int, resources: dict[str, Any]
) -> None:  # fmt: skip
    """Start the replicas and the proxies, and wait until they are ready; AccelerantError if Ray Serve gives up."""

    def build() -> FastAPI:
        return _application(settings, volume)

    options: dict[str, Any] = {} if "num_gpus" in resources else {"max_replicas_per_node": 1}
    deployment = serve.deployment(
        name=_NAME,
        num_replicas=count,
        ray_actor_options=resources,
        max_ongoing_requests=settings.concurrency,
        graceful_shutdown_timeout_s=_STREAM_S + settings.drain_s + 10.0,
        health_check_period_s=5.0,
        **options,
    )
    try:
        serve.start(
            http_options={"host": settings.host, "port": settings.port, "location": "EveryNode"},
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )
        serve.run(deployment(serve.ingress(build)(_Replica)).bind(), name=_NAME, route_prefix="/")
    except ray.exceptions.RayError as error:
        raise AccelerantError(
            f"Ray Serve did not start: {error}\nOn busy nodes, where it kills a proxy that is not ready in 5 s, start "
            "Ray with RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=60"
        ) from error
    except RuntimeError as error:
        found = serve.status().applications.get(_NAME)
        reasons = [deployment.message for deployment in found.deployments.values()] if found else []
        raise AccelerantError("\n".join([f"the service did not start: {error}", *reasons])) from error


def _until_signal() -> None:
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    ended.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
