"""The job store on SQLite and PostgreSQL: claims, leases, fairness, bounds, two versions on one store."""

import json
import multiprocessing
import shutil
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from accelerant.errors import ConfigError
from accelerant.service.errors import JobNotFound, QueueFull
from accelerant.service.jobs import store as module
from accelerant.service.jobs.store import JobStore
from accelerant.service.jobs.wire import JobState
from processes import in_threads
from refusals import assert_raises

OPERATIONS = ("work", "train")


@pytest.fixture
def opened(state_url):
    """Return stores of the same URL, as of several servers."""
    made = []

    def make(owner="one", volume="v", lease_s=30.0):
        made.append(JobStore(state_url, owner=owner, volume=volume, resumable={"train"}, lease_s=lease_s))
        made[-1].upgrade()
        return made[-1]

    yield make
    for store in made:
        store.close()


def add(
    store, id, key="key", *, priority=0, size=10, operation="work", deadline=None, most_jobs=10_000, most_bytes=1 << 40
):
    row = {
        "id": id, "operation": operation, "parameters": json.dumps({"n": 1}), "key_id": key, "priority": priority,
        "request_id": "r", "deadline": deadline, "input_bytes": size,
    }  # fmt: skip
    return store.add(row, most_jobs=most_jobs, most_bytes=most_bytes, retry_after_s=3.0)


def claim(store, device="cpu", **options):
    found = store.claim(device, OPERATIONS, **options)
    return None if found is None else found.job


def test_the_life_of_a_job(opened):
    store = opened()
    assert store.claim("cpu", OPERATIONS) is None
    added = add(store, "a", deadline=time.time() + 100)
    assert store.get("a", "key") == store.get("a", None) == added
    assert_raises(JobNotFound, "no job 'a'", store.get, "a", "another")
    found = store.claim("cpu", OPERATIONS)
    job = found.job
    assert (found.parameters, found.request_id) == ({"n": 1}, "r")
    assert (job.state, job.attempts, job.device) == (JobState.RUNNING, 1, "cpu")
    assert claim(store) is None
    assert store.report(job, 0.5, "half")
    assert store.finish(job, JobState.SUCCEEDED, result_bytes=7)
    done = store.get("a", None)
    assert (done.state, done.progress, done.message, done.result_bytes) == (JobState.SUCCEEDED, 1.0, "half", 7)
    assert added.created <= done.started <= done.finished
    assert not store.report(job, 0.1, "")
    assert store.finish(job, JobState.SUCCEEDED, result_bytes=7)  # as where the connection was lost before the answer
    assert not store.finish(job, JobState.FAILED)
    with store.engine.connect() as connection:  # parameters may be secrets
        assert connection.execute(sa.text("SELECT parameters FROM accelerant_jobs")).scalar_one() == "{}"
    assert store.release(job) is None


def test_texts_that_postgresql_refuses(opened):
    store = opened()
    assert_raises(JobNotFound, "no job", store.get, "\0", None)
    add(store, "a")
    job = claim(store)
    assert store.report(job, 0.5, "half\0")
    assert store.finish(job, JobState.FAILED, error="no model 'a\0\ud800'")
    assert store.get("a", None).error == "no model 'a\ufffd?'"


def test_a_store_that_is_not_one(tmp_path):
    for url, message in {
        "mysql://host/name": "state_url must be of sqlite or postgresql, got 'mysql'",
        "jobs.db": "state_url is not a URL as sqlite:///PATH or postgresql://USER@HOST/NAME",
    }.items():
        assert_raises(ConfigError, message, JobStore, url, owner="one", volume="v")


@pytest.mark.parametrize("next_server", ["another", "the same"])  # which had lost the connection
def test_an_attempt_whose_lease_ended_is_taken_over_and_fenced(opened, next_server):
    gone, other, elsewhere = opened("gone"), opened("other"), opened("elsewhere", volume="w")
    add(gone, "a")
    first = claim(gone)
    assert other.take_over() == []
    # Another server cannot say anything about it.
    assert other.renew([first]) == (set(), set())
    assert not other.report(first, 0.9, "")
    assert not other.finish(first, JobState.RUNNING)
    assert other.release(first, lost="lost") is None
    gone.lease_s = -1.0  # this lease has ended when it is given
    assert gone.renew([first]) == ({"a"}, set())
    assert elsewhere.take_over() == []  # it does not have the job's files
    assert other.take_over() == [("a", JobState.QUEUED)]
    assert elsewhere.claim("cpu", OPERATIONS) is None
    gone.lease_s = 30.0
    claimer = other if next_server == "another" else gone
    second = claim(claimer)
    assert (second.attempts, second.message) == (2, "its server ended; it runs again")
    # What the first server still says about its attempt changes nothing.
    assert gone.renew([first]) == (set(), set())
    assert not gone.report(first, 0.9, "")
    for state in (JobState.SUCCEEDED, JobState.RUNNING):  # the second is the state that the job has
        assert not gone.finish(first, state, result_bytes=1)
    assert gone.release(first, lost="lost") is None
    assert other.get("a", None) == second
    assert claimer.release(second, lost="the worker ended") is JobState.FAILED
    assert other.get("a", None).error == "WorkerLost: the worker ended, for the second time"


def after_a_statement(store, call):
    """Call once, after the next statement of a store."""

    @sa.event.listens_for(store.engine, "after_cursor_execute", once=True)
    def called(*_):
        call()


def test_a_cancellation_is_seen_by_who_releases_the_job(opened):
    one, other = opened("one"), opened("other")
    add(one, "a")
    job = claim(one)
    states = []
    releases = threading.Thread(target=lambda: states.append(one.release(job, lost="the worker ended")))
    after_a_statement(other, lambda: (releases.start(), releases.join(0.5)))
    assert not other.cancel("a")
    releases.join()
    assert states == [JobState.CANCELLED]


def test_a_job_that_expires_is_not_claimed_meanwhile(opened):
    one, other = opened("one"), opened("other")
    add(one, "a", deadline=time.time() - 1)
    claimed = []
    claims = threading.Thread(target=lambda: claimed.append(claim(one)))
    after_a_statement(other, lambda: (claims.start(), claims.join(0.5)))
    assert other.expire() == ["a"]
    claims.join()
    assert claimed == [None]
    assert one.get("a", None).state is JobState.FAILED


def test_a_clock_that_was_ahead_starves_no_key(opened, monkeypatch):
    store = opened()
    for id, key in (("1", "a"), ("2", "b"), ("3", "a"), ("4", "b")):
        add(store, id, key)
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "time", lambda now=time.time: now() + 3600.0)
        assert claim(store).id == "1"
    assert [claim(store).id for _ in range(3)] == ["2", "3", "4"]  # not 4 before 3


def test_losses_of_a_resumable_job_count_anew_after_progress(opened):
    store = opened()
    for operation, end in (("work", JobState.FAILED), ("train", JobState.QUEUED)):
        add(store, operation, operation=operation)
        for progress, expected in ((0.2, JobState.QUEUED), (0.4, end), (0.4, JobState.FAILED)):
            if (job := claim(store)) is not None:
                store.report(job, progress, "")
                assert store.release(job, lost="lost") is expected
        assert store.get(operation, None).state is JobState.FAILED


def test_stops_and_excused_losses_fail_no_job(opened):
    store = opened()
    add(store, "a")
    for options in ({}, {}, {"lost": "lost", "counted": False}, {"lost": "lost", "counted": False}, {"lost": "lost"}):
        assert store.release(claim(store), **options) is JobState.QUEUED
    assert store.get("a", None).message == "lost; it runs again"
    assert store.release(claim(store)) is JobState.QUEUED
    assert store.get("a", None).message == "the server stopped; it runs again"
    assert store.release(claim(store), lost="lost") is JobState.FAILED


def test_a_device_that_lost_a_job_gets_it_again_only_if_it_is_alone(opened):
    store = opened()
    add(store, "a")
    store.release(claim(store, "cuda:0"), lost="lost")
    assert claim(store, "cuda:0", alone=False) is None
    assert claim(store, "cuda:1", alone=False).device == "cuda:1"
    add(store, "b")
    store.release(claim(store, "cuda:0"), lost="lost")
    assert claim(store, "cuda:0", alone=True).id == "b"


def test_cancel(opened):
    store = opened()
    for id in "ab":
        add(store, id)
    job = claim(store)
    assert store.cancel("b")
    assert not store.cancel("a")
    assert store.renew([job]) == ({"a"}, {"a"})
    assert store.release(job, lost="lost") is JobState.CANCELLED  # not repeated
    assert not store.cancel("a")
    assert [job.state for job in store.jobs(None)] == [JobState.CANCELLED] * 2


def test_unknown_operations_are_left_to_servers_that_know_them(opened):
    store = opened()
    add(store, "a", operation="newer")
    assert claim(store) is None
    assert store.claim("cpu", ["newer"]).job.id == "a"


@pytest.fixture
def store(tmp_path):
    store = JobStore(f"sqlite:///{tmp_path}/jobs.db", owner="one", volume="v")
    store.upgrade()
    yield store
    store.close()


@examples(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(jobs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2)), max_size=14))
def test_keys_take_turns_and_priorities_order_a_keys_own_jobs(store, jobs):
    with store.engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM accelerant_jobs"))
    for number, (key, priority) in enumerate(jobs):
        add(store, str(number), key, priority=priority)
    order = []
    while (job := claim(store)) is not None:
        order.append(job)
        store.finish(job, JobState.SUCCEEDED)
    waiting = Counter(key for key, _ in jobs)
    served = Counter()
    for job in order:
        # No key is served twice more often than one that waits still.
        assert all(served[job.key_id] <= served[key] for key, count in waiting.items() if count)
        waiting[job.key_id] -= 1
        served[job.key_id] += 1
    for key in "abc":
        own = [(-job.priority, int(job.id)) for job in order if job.key_id == key]
        assert own == sorted(own)
    assert len(order) == len(jobs)


@pytest.mark.slow
def test_bounds_hold_for_many_threads(opened):
    stores = [opened(f"server{number}") for number in range(2)]
    refused = []

    def submit(number):
        for job in range(15):
            try:
                add(
                    stores[number % 2],
                    f"{number}-{job}",
                    f"key{number}",
                    size=10,
                    most_jobs=20,
                    most_bytes=150 if number < 4 else 10_000,
                )
            except QueueFull as error:
                refused.append(error.retry_after_s)

    for first, count, size in ((0, 15, 150), (4, 20, 200)):
        in_threads(partial(submit, first + number) for number in range(4))
        assert stores[0].counts() == ({"queued": count}, size)
    assert refused == [3.0] * 100


def _claim_all(url, owner, queue):
    store = JobStore(url, owner=owner, volume="v")
    while (job := claim(store)) is not None:
        store.finish(job, JobState.SUCCEEDED)
        queue.put(job.id)
    queue.put(None)


@pytest.mark.slow
def test_two_servers_never_run_the_same_attempt(opened, state_url):
    store = opened()
    for number in range(40):
        add(store, str(number), key=f"key{number % 3}")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    servers = [context.Process(target=_claim_all, args=(state_url, f"server{n}", queue)) for n in range(2)]
    for server in servers:
        server.start()
    ids = []
    while servers:
        if (id := queue.get(timeout=60)) is None:
            servers.pop()
        else:
            ids.append(id)
    assert sorted(ids, key=int) == [str(number) for number in range(40)]
    assert all(job.attempts == 1 for job in store.jobs(None))


def test_expiry_and_retention(opened):
    store = opened()
    add(store, "late", deadline=time.time() - 1)
    add(store, "good", deadline=time.time() + 100)
    assert store.expire() == ["late"]
    assert store.get("late", None).error == "DeadlineExceeded: the deadline passed while the job was queued"
    job = claim(store)
    assert job.id == "good"
    store.finish(job, JobState.SUCCEEDED, result_bytes=100)
    assert store.states(["good", "late", "none"]) == {"good": JobState.SUCCEEDED, "late": JobState.FAILED}
    assert store.prune(100.0, 100) == ([], [])
    assert store.prune(100.0, 99) == ([], ["good"])
    assert store.get("good", None).result_bytes is None
    assert sorted(store.prune(0.0, 100)[0]) == ["good", "late"]
    assert store.states(["good", "late"]) == {}


# --- two versions ----------------------------------------------------------------------------------------------------
NEWER = '''
"""A newer version's revision."""
import sqlalchemy as sa
from alembic import op
revision, down_revision = "{revision}", "{down}"

def upgrade():
    {body}
'''


@pytest.fixture
def newer(tmp_path):
    """The migrations of a newer version of the service: one more column, and whatever else a test adds."""
    folder = tmp_path / "migrations"
    shutil.copytree(Path(module.__file__).parent / "migrations", folder)
    last = str(module.REVISION)

    def extend(body):
        nonlocal last
        number = str(int(last) + 1)
        (folder / "versions" / f"v{number}.py").write_text(NEWER.format(revision=number, down=last, body=body))
        last = number
        return folder

    return extend


def test_two_versions_work_on_one_store(opened, newer):
    older = opened("older")
    add(older, "a")
    column = 'sa.Column("weight", sa.Integer, nullable=False, server_default="1")'
    upgraded = opened("newer")
    upgraded.upgrade(newer(f'op.add_column("accelerant_jobs", {column})'))
    upgraded.upgrade(newer('op.create_table("accelerant_more", sa.Column("id", sa.Integer))'))
    # The older service goes on, and starts again.
    add(older, "b")
    assert claim(older).id == "a"
    again = opened("older again")
    assert claim(again).id == "b"
    assert add(again, "c").state is JobState.QUEUED
    with upgraded.engine.connect() as connection:
        assert connection.execute(sa.text("SELECT sum(weight) FROM accelerant_jobs")).scalar_one() == 3
    # A newer one that breaks with it says so.
    upgraded.upgrade(newer('op.execute("UPDATE accelerant_schema SET oldest_revision = 4")'), known=4)
    with pytest.raises(ConfigError, match="has schema 4, which needs a service of schema 4 or newer; this one has 1"):
        opened("too old")


def test_servers_that_start_together_upgrade_once(state_url):
    errors = []

    def start(number):
        store = JobStore(state_url, owner=str(number), volume="v")
        try:
            store.upgrade()
        except Exception as error:
            errors.append(error)
        store.close()

    in_threads(partial(start, number) for number in range(4))
    assert errors == []


def test_servers_that_create_the_file_together_wait_for_each_other(tmp_path):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    errors = []

    def connect(path, meet):
        store = JobStore(f"sqlite:///{path}", owner="a", volume="v")
        meet.wait()
        try:
            store.engine.connect().close()
        except Exception as error:
            errors.append(error)
        store.close()

    try:
        for number in range(60):  # each of them fails once in seven if one of two does not wait
            meet = threading.Barrier(4)
            in_threads(partial(connect, tmp_path / f"{number}.db", meet) for _ in range(4))
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_the_tables_are_those_of_the_migrations(opened):
    store = opened()
    made = sa.inspect(store.engine)
    for table in module._metadata.sorted_tables:
        assert {column["name"] for column in made.get_columns(table.name)} == {column.name for column in table.columns}


def queued(store):
    """Return the number of queued jobs by key."""
    return Counter(job.key_id for job in store.jobs(None, JobState.QUEUED))


def test_a_key_leaves_room_for_others(opened):
    store = opened()
    for number in range(3):
        add(store, str(number), "greedy", most_jobs=4)
    with pytest.raises(QueueFull, match="the queue holds 3 requests of this key, as many as it may"):
        add(store, "a", "greedy", most_jobs=4)
    with pytest.raises(QueueFull, match="holds 30 bytes of this key and may hold 37; the request has 10"):
        add(store, "a", "greedy", most_bytes=50)
    add(store, "b", "modest", most_jobs=4, most_bytes=50)
    add(store, "c", "large", size=960, most_bytes=1000)
    assert (store.counts(), queued(store)) == (({"queued": 5}, 1000), {"greedy": 3, "modest": 1, "large": 1})
    assert claim(store).id == "0"
    assert store.counts() == ({"queued": 4, "running": 1}, 990)
    assert queued(store) == {"greedy": 2, "modest": 1, "large": 1}


def test_bounds_of_the_queue_are_exact():
    for jobs, total, own, added, words in (
        (8, (7, 0), (0, 0), 1, None),
        (8, (8, 0), (0, 0), 1, "the queue holds 8 requests, as many"),
        (8, (1, 90), (0, 0), 10, None),
        (8, (1, 90), (0, 0), 11, "the queue holds 90 bytes and may hold 100; the request has 11"),
        (8, (5, 0), (5, 0), 1, None),
        (8, (6, 0), (6, 0), 1, "holds 6 requests of this key"),
        (7, (5, 0), (5, 0), 1, None),  # three quarters are 5.25
        (7, (6, 0), (6, 0), 1, "holds 6 requests of this key"),
        (8, (1, 65), (1, 65), 10, None),
        (8, (1, 65), (1, 65), 11, "holds 65 bytes of this key and may hold 75; the request has 11"),
        (8, (0, 0), (0, 0), 100, None),  # alone
    ):
        if words is None:
            module.check_bounds(total, own, added, jobs, 100, 3.0)
        else:
            caught = assert_raises(QueueFull, words, module.check_bounds, total, own, added, jobs, 100, 3.0)
            assert caught.retry_after_s == 3.0


def test_the_oldest_results_of_the_key_with_the_most_bytes_go(opened):
    results = [("1", "a", 30), ("2", "b", 20), ("3", "a", 10), ("4", "b", 30), ("5", "a", 5)]
    for most, gone in ((95, []), (94, ["2"]), (75, ["2"]), (74, ["2", "1"]), (45, ["2", "1"]), (44, ["2", "1", "4"]),
                       (0, ["2", "1", "4", "3", "5"])):  # fmt: skip
        assert module._over_limit(results, most) == gone
    store = opened()
    for id in "xyz":
        add(store, id)
        assert store.finish(claim(store), JobState.SUCCEEDED, result_bytes=50)
    assert store.prune(100.0, 149) == ([], ["x"])
    assert store.get("x", None).message == "the result was removed: stored results reached their limit"
    assert opened("other", volume="w").prune(-1.0, 0) == ([], [])  # it does not have the files
    assert store.prune(100.0, 100) == ([], [])


def test_a_page_of_jobs_has_a_hundred(store):
    for number in range(101):
        add(store, f"{number:03}")
    page = store.jobs("key")
    assert [job.id for job in page] == [f"{number:03}" for number in range(100, 0, -1)]
    assert [job.id for job in store.jobs(None, before="001")] == ["000"]
    assert store.jobs("key", JobState.RUNNING) == []
    assert [job.id for job in store.jobs(None, JobState.QUEUED, limit=1)] == ["100"]
    assert store.jobs("another") == []
    assert_raises(JobNotFound, "no job '001'", store.jobs, "another", before="001")


def test_old_jobs_go_in_slices(opened, monkeypatch):
    monkeypatch.setattr(module, "_SLICE", 4)
    monkeypatch.setattr(module, "_MOST_ENDED", 5)
    store = opened()
    ids = [f"{number:02}" for number in range(12)]
    for id in ids:
        add(store, id)
        store.cancel(id)
    assert set(store.states(ids)) == {*ids}
    assert [store.prune(1000.0, 10)[0] for _ in range(3)] == [ids[:4], ids[4:7], []]
    assert [store.prune(-1.0, 10)[0] for _ in range(3)] == [ids[7:11], ids[11:], []]


def test_a_file_is_written_ahead_and_flushed_at_each_commit(store):
    with store.engine.connect() as connection:
        found = {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                 for name in ("journal_mode", "synchronous", "busy_timeout")}  # fmt: skip
    assert found == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 30_000}  # 2 is FULL


def test_a_read_waits_for_no_writer(store):
    add(store, "a")
    begun = time.monotonic()
    with store.engine.begin():  # as a writer
        assert [store.get("a", None)] == store.jobs("key")
        assert (store.counts()[0], queued(store)) == ({"queued": 1}, {"key": 1})
        assert store.states(["a", "b"]) == {"a": JobState.QUEUED}
    assert time.monotonic() - begun < 25.0  # a writer's lock is waited for 30 s
