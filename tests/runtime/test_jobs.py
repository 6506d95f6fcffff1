"""Jobs on local processes and on Ray: every item once, whoever dies."""

import collections
import functools
import json
import math
import os
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_functions import answer, dies_once, end, odd, refuse, square

from accelerant import Accelerator
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime import jobs
from accelerant.runtime.jobs import engine_of, run_jobs
from accelerant.zk.groth16 import Proof, VerificationKey, verify
from refusals import assert_raises

RANGE = Path(__file__).parents[1] / "vectors" / "groth16" / "range"


# --- the schedule ----------------------------------------------------------------------------------------------------
class RandomPool:
    """Workers that answer in any order and die at random, or always with some items, which are not run."""

    def __init__(self, rng, count, threads, deadly, share_of_deaths):
        self.rng, self.count, self.deadly, self.share_of_deaths = rng, count, deadly, share_of_deaths
        self.share = jobs._Share("cuda", count, None, False, threads, 99)
        self.queues, self.deaths = {}, collections.Counter()

    def start(self, worker):
        self.queues[worker] = [(-1, b"")]

    def send(self, worker, index, item):
        assert pickle.loads(item) == index * 10
        self.queues[worker].append((index, item))
        assert len(self.queues[worker]) <= self.share.concurrency + 1

    def wait(self):
        worker = self.rng.choice([worker for worker, queue in self.queues.items() if queue])
        queue = self.queues[worker]
        running = [index for index, _ in queue[: self.share.concurrency]]
        if any(index in self.deadly for index in running) or self.rng.random() < self.share_of_deaths:
            self.deaths.update(running)
            queue.clear()
            return [(worker, "it died")]
        index, item = queue.pop(self.rng.randrange(len(running)))
        value = None if index < 0 else pickle.loads(item) + 1
        return [(worker, jobs._Reply(index, True, pickle.dumps(value), self.rng.choice([0.001, 1.0])))]


@pytest.mark.search(1)
def test_every_item_has_one_outcome(rng, record_property):
    """Whatever dies; an item that ends its workers is given up after three, and takes no other with it."""
    examples = 60
    for _ in range(examples):
        count, threads, n = rng.randint(1, 4), rng.randint(1, 2), rng.randint(1, 12)
        deadly = set(rng.sample(range(n), rng.randint(0, min(3, n))))
        pool = RandomPool(rng, count, threads, deadly, 0.0)
        outcomes = list(jobs._Schedule(pool, [10 * i for i in range(n)]).outcomes())
        assert sorted(outcome.index for outcome in outcomes) == list(range(n))
        assert {outcome.index for outcome in outcomes if outcome.error} == deadly
        assert all(outcome.value == 10 * outcome.index + 1 for outcome in outcomes if not outcome.error)
        assert all(pool.deaths[index] == 3 for index in deadly)
    record_property("examples", examples)


def test_workers_that_die_at_random():
    for seed in range(40):
        rng = random.Random(seed)
        outcomes = list(jobs._Schedule(RandomPool(rng, 3, 1, (), 0.1), [10 * i for i in range(20)]).outcomes())
        assert sorted(outcome.index for outcome in outcomes) == list(range(20))


def test_workers_that_never_start():
    with pytest.raises(AccelerantError, match="workers die before they are ready: it died"):
        list(jobs._Schedule(RandomPool(random.Random(1), 2, 1, {-1}, 0.0), [0]).outcomes())


def test_arguments():
    assert_raises(ConfigError, 'engine must be "local", "ray" or None, got \'spark\'', engine_of, "spark")
    assert_raises(ConfigError, r"engine is local, and an address of Ray is given: 'auto'", engine_of, "local", "auto")
    with pytest.raises(ConfigError, match="workers must be a whole number of at least 1, got 0"):
        next(run_jobs(refuse, [1], workers=0))
    assert engine_of(None) == "local"
    assert engine_of(None, "10.0.0.1:6379") == "ray"
    assert list(run_jobs(refuse, [])) == []
    assert Accelerator("cpu").map(square, []) == []


@pytest.mark.slow
def test_an_address_without_a_cluster():
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"there is no Ray cluster at '127\.0\.0\.1:1'"):
        next(run_jobs(refuse, [1], engine="ray", address="127.0.0.1:1"))


# --- local processes -------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_local_processes(tmp_path):
    acc = Accelerator("cpu")
    assert acc.map(square, range(7), workers=2) == [square(x) for x in range(7)]
    outcomes = {one.index: one for one in run_jobs(functools.partial(functools.partial, odd), range(7), workers=2)}
    assert [outcomes[i].value for i in (0, 1, 6)] == [0, 1, 6]
    assert (type(outcomes[2].error), str(outcomes[2].error)) == (ValueError, "two")
    assert 'raise ValueError("two")' in outcomes[2].error.__notes__[0]
    assert str(outcomes[3].error).startswith("UnpicklableError: of a process")
    assert "cannot be sent to a worker: " in str(outcomes[4].error)
    assert "3 workers died with it; the last: process " in str(outcomes[5].error)
    assert "SIGKILL" in str(outcomes[5].error)
    assert acc.map(functools.partial(dies_once, str(tmp_path)), range(6), workers=2) == list(range(6))
    assert len(list(tmp_path.glob("3.*"))) == 2
    error = assert_raises(ValueError, "two", acc.map, odd, [0, 2], engine="local")
    assert error.item_index == 1
    assert error.__notes__[-1] == "of items[1]"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_items_that_leave_in_other_ways():
    items = ["exit", "read", "frozen", "textless", "child", "if __name__ == '__main__': f()"]
    outcomes = {one.index: one for one in run_jobs(functools.partial(functools.partial, answer), items, workers=2)}
    assert str(outcomes[0].error) == "SystemExit: 3"
    assert outcomes[1].value == b""
    assert str(outcomes[2].error).startswith("FrozenError")
    assert str(outcomes[3].error) == "TextlessError: its text cannot be made"
    assert "3 workers died with it" in str(outcomes[4].error)
    assert outcomes[5].value == items[5]


def test_a_text_with_the_name_of_the_main_program_is_not_of_it():
    assert not jobs._of_main(pickle.dumps("if __name__ == '__main__': f()"))
    assert jobs._of_main(b"\x80\x04\x8c\x08__main__\x8c\x01f\x93.")


@pytest.mark.slow
def test_a_start_that_fails():
    assert_raises(ConfigError, "no such key", lambda: next(run_jobs(refuse, [1])))
    with pytest.raises(AccelerantError, match=r"workers die before they are ready: process \d+ ended with status 7"):
        next(run_jobs(end, [1]))


# --- Ray -------------------------------------------------------------------------------------------------------------
@pytest.fixture
def cluster(monkeypatch):
    """A head without processors, and two nodes; each a raylet of its own."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    memory = {"object_store_memory": 80 << 20}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, **memory}
    )
    nodes = [cluster.add_node(num_cpus=1, num_gpus=0, **memory)]
    yield cluster, nodes
    cluster.shutdown()


@pytest.mark.slow
def test_a_node_of_ray_that_is_killed(cluster, tmp_path):
    """Proofs and a function on two nodes; one is killed in the middle. No job is lost, none is written twice."""
    ray_cluster, (node,) = cluster
    witnesses = [tmp_path / f"w{i:02}.wtns" for i in range(20)]
    for path in witnesses:
        path.symlink_to(RANGE / "witness.wtns")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "accelerant", "zk", "prove-many", RANGE / "circuit.zkey", *witnesses]
    running = subprocess.Popen(
        [*map(str, command), "--out", str(out), "--ray", ray_cluster.address, "--json"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    first = {}
    while len(first) < 4 and running.poll() is None:
        time.sleep(0.01)
        first = {path: path.stat().st_mtime_ns for path in out.glob("*.proof.json")}
    assert running.poll() is None, "it ended before the node was killed"
    ray_cluster.remove_node(node, allow_graceful=False)
    facts = json.loads(running.communicate(timeout=400)[0])
    assert running.returncode == 0
    assert sorted(one["witness"] for one in facts["proved"]) == sorted(map(str, witnesses))
    assert facts["failed"] == facts["present"] == []
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert len(list(out.iterdir())) == 40
    key = VerificationKey.from_json((RANGE / "verification_key.json").read_text())
    for path in out.glob("*.proof.json"):
        proof = Proof.from_json(path.read_text(), path.with_name(path.name.replace("proof", "public")).read_text())
        assert verify(key, proof.public, proof)

    acc = Accelerator("cpu")
    started = {"engine": "ray", "address": ray_cluster.address}
    marks = tmp_path / "marks"
    marks.mkdir()
    assert acc.map(functools.partial(dies_once, str(marks)), range(6), **started) == list(range(6))
    assert_raises(ValueError, "two", acc.map, odd, [0, 1, 2], **started)
    assert acc.map(lambda x: x + math.pi, [1], **started) == [1 + math.pi]
    with pytest.raises(ConfigError, match="the Ray cluster has no GPU"):
        next(run_jobs(refuse, [1], engine="ray", address=ray_cluster.address, backend="cuda"))
