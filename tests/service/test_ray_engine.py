"""The service on two nodes of Ray, one of which is killed under load."""

import contextlib
import threading
import time

import httpx
import numpy as np
import psutil
import pytest
import sqlalchemy as sa
from serving import Server

from accelerant import zk
from accelerant.errors import AccelerantError, ConfigError
from accelerant.service import ray_engine
from accelerant.service.bodies import SAFETENSORS, read_tensors, write_tensors
from accelerant.service.settings import ServiceSettings
from refusals import assert_raises
from requirements import free_port, require_module

NODES = [{"Alive": True, "Resources": resources} for resources in ({"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 1.0})]


class FakeRay:
    """A cluster as `ray.nodes` describes it."""

    def __init__(self, nodes):
        self.nodes = lambda: nodes


def test_placement():
    assert ray_engine._placement(FakeRay(NODES), None) == (3, {"num_gpus": 1, "num_cpus": 0}, "cuda:0")
    cpus = FakeRay([{"Alive": alive, "Resources": {"CPU": 4.0}} for alive in (True, True, False)])
    assert ray_engine._placement(cpus, None) == (2, {"num_cpus": 1}, "cpu")
    assert ray_engine._placement(cpus, 1)[0] == 1
    for wrong in (0, 3):
        assert_raises(ConfigError, f"1 to 2, the cluster's nodes, got {wrong}", ray_engine._placement, cpus, wrong)


def test_settings_that_do_not_fit_are_refused(tmp_path):
    assert_raises(ConfigError, "needs state_url=postgresql", ray_engine.run, ServiceSettings(directory=tmp_path))
    url = "postgresql://user@localhost/name"
    with pytest.raises(ConfigError, match="has no TLS"):
        ray_engine.run(ServiceSettings(directory=tmp_path, state_url=url, tls_certificate="a", tls_key="b"))
    with pytest.raises(ConfigError, match="splits no model"):
        ray_engine.run(ServiceSettings(directory=tmp_path, state_url=url, gpus=2))
    with pytest.raises(ConfigError, match="has no API keys"):
        ray_engine.run(ServiceSettings(directory=tmp_path, state_url=url, host="0.0.0.0"))
    url = "postgresql://user:secret@127.0.0.1:1/name"
    with pytest.raises(AccelerantError, match=r"cannot use postgresql.*://user:\*\*\*@127.0.0.1:1/name: "):
        ray_engine.run(ServiceSettings(directory=tmp_path, state_url=url))
    assert not list(tmp_path.iterdir())


def test_a_node_with_another_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="mount one on all nodes"):
        ray_engine._application(ServiceSettings(directory=tmp_path / "own"), "the volume of the others")


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes, each a raylet of its own."""
    require_module("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    memory = {"object_store_memory": 80 << 20, "num_gpus": 0}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **memory})
    node = cluster.add_node(num_cpus=1, **memory)
    yield cluster, node
    cluster.shutdown()


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def applications(cluster, port):
    """The names of all applications that the cluster serves, of which one is not ours."""
    import ray
    from ray import serve

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Greeter:
        def __call__(self, request):
            return "hello"

    ray.init(address=cluster[0].address, log_to_driver=False)
    try:  # a driver that stays connected keeps the cluster from being shut down
        serve.start(http_options={"port": port, "location": "EveryNode"})
        serve.run(Greeter.bind(), name="other", route_prefix="/other")
        yield lambda: set(serve.status().applications)
    finally:
        ray.shutdown()


_WAITING = 4
"""Jobs in the queue at which the clients pause: a slow machine would be given more of them than it ever ends."""


class Load:
    """Clients that submit the same sum as a job again and again, and note the jobs that are accepted."""

    def __init__(self, url, body, headers):
        self.url, self.body, self.headers = url, body, headers
        self.accepted, self.errors = [], 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self):
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as client:
            while not self._stop.wait(0.5):
                try:
                    queued = client.get("/jobs", params={"state": "queued"})
                    if queued.status_code == 200 and len(queued.json()["jobs"]) >= _WAITING:
                        continue
                    answer = client.post("/v2/models/msm/infer", content=self.body, headers=self.headers)
                except httpx.TransportError:
                    self.errors += 1
                    continue
                if answer.status_code == 202:
                    self.accepted.append(answer.json()["job"]["id"])
                else:
                    assert answer.status_code in (429, 500, 502, 503, 504), answer.text
                    self.errors += 1


def wait_for(found, seconds):
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)
    return value


def kill(cluster, node):
    """End all processes of a node at once: Ray's workers outlive their raylet by a second, in which a job could end."""
    for process in psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow
def test_a_node_dies_under_load_and_no_accepted_job_is_lost(cluster, applications, port, tmp_path, postgres_url):
    ray_cluster, node = cluster
    settings = tmp_path / "service.toml"
    settings.write_text("drain_s = 30\nlease_s = 20\n")  # a lease outlasts the stalls of a machine with other work
    environment = {"ACCELERANT_SERVE_STATE_URL": postgres_url, "RAY_USAGE_STATS_ENABLED": "0"}
    group = zk.curve("bn254_g1")
    scalars = np.random.default_rng(7).integers(
        0, 2**60, (6, 60_000, 4), np.uint64
    )  # for longer than a node takes to die
    few = group.mul(group.generator, list(range(1, 65)))
    points = np.ascontiguousarray(np.resize(few, (60_000, *few.shape[1:])))
    body = write_tensors(SAFETENSORS, {"scalars": scalars, "points": points})
    headers = {"content-type": SAFETENSORS, "prefer": "respond-async"}

    def asked(query):
        with contextlib.suppress(httpx.TransportError), server.client() as client:
            answer = client.get("/jobs", params=query)
            return [answer.json()["jobs"]] if answer.status_code == 200 else []

    def listed(**query):
        return wait_for(lambda: asked(query), 120)[0]

    server = Server(
        tmp_path / "private", "--port", str(port), "--engine", "ray", "--address", ray_cluster.address,
        "--config", str(settings), env=environment, wait_s=240,
    )  # fmt: skip
    try:
        with Load(server.url, body, headers) as load:
            wait_for(lambda: len(listed(state="running")) == 2, 240)
            kill(ray_cluster, node)
            before = len(load.accepted)
            wait_for(lambda: len(load.accepted) > before + 5, 240)
        with server.client() as client:
            # One list: between two, the dead node's job may go from running back to queued.
            wait_for(lambda: not {"queued", "running"} & {job["state"] for job in listed(limit=1000)}, 240)
            jobs = {job["id"]: job for job in listed(limit=1000)}
            assert {jobs[id]["state"] for id in load.accepted} == {"succeeded"}
            # The dead node's ran once more, and so did another if the database was out of reach for its lease.
            assert {1, 2} == {job["attempts"] for job in jobs.values()}
            wanted = zk.msm(scalars, points)
            for id in load.accepted:
                answer = client.get(f"/jobs/{id}/result", headers={"accept": SAFETENSORS})
                np.testing.assert_array_equal(read_tensors(SAFETENSORS, answer.content, ["sum"])["sum"], wanted)
            with client.stream("GET", "/events") as events:  # of an open dashboard, for which the drain waits
                assert next(events.iter_lines()) == "event: start"
                last = client.post("/v2/models/msm/infer", content=body, headers=headers).json()["job"]["id"]
                stopped = time.monotonic()
                assert server.stop() == 0
                assert time.monotonic() - stopped < 45  # Ray Serve kills after 55
            assert applications() == {"other"}
        engine = sa.create_engine(postgres_url.replace("://", "+pg8000://"))
        with engine.connect() as connection:
            query = sa.text("SELECT state, attempts FROM accelerant_jobs WHERE id = :id")
            assert connection.execute(query, {"id": last}).one() == ("succeeded", 1)
        engine.dispose()
    finally:
        server.process.kill()
