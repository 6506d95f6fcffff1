"""The queue of short calls, by random sequences: bounds, fairness between keys, merging."""

import asyncio
from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from accelerant.errors import FormatError, UnsupportedDtype
from accelerant.service.errors import QueueFull
from accelerant.service.jobs import wire
from accelerant.service.jobs.queue import Call, CallQueue, launches_of
from accelerant.service.jobs.wire import JobRequest, merge_kind
from refusals import assert_raises


def call(
    key="key", *, rows=4, priority=0, cost_s=0.001, elementwise=True, operation="double", dtype=np.uint64, **parameters
):
    request = JobRequest(operation, parameters, {"x": np.zeros(rows, dtype)}, key, priority, cost_s=cost_s)
    future = asyncio.get_running_loop().create_future()
    return Call(request, 1e12, merge_kind(request) if elementwise else None, future, request.size_bytes)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 60)),
        st.tuples(st.just("take"), st.booleans()),
        st.tuples(st.just("give up"), st.integers(0, 100)),
    ),
    max_size=60,
)


@examples(max_examples=300, deadline=None)
@given(steps=steps)
def test_bounds_order_and_fairness(steps):
    async def main():
        queue = CallQueue(8, 1000, batch_s=0.003, batch_bytes=800)
        waiting, taken = [], []
        for step in steps:
            held = [one for one in [*waiting, *taken] if not one.future.done()]
            size = sum(one.size_bytes for one in held)
            if step[0] == "put":
                _, key, priority, rows = step
                new = call(key, rows=rows, priority=priority)
                own = [one for one in held if one.request.key_id == key]
                fits = len(held) < 8 and size + new.size_bytes <= 1000
                fits &= len(own) < 6 and (not own or sum(one.size_bytes for one in [*own, new]) <= 750)
                if fits:
                    queue.put(new)
                    waiting.append(new)
                else:
                    assert_raises(QueueFull, None, queue.put, new)
            elif step[0] == "give up" and held:
                held[step[1] % len(held)].future.cancel()
            elif step[0] == "take":
                for one in taken:
                    if not one.future.done():
                        one.future.set_result({})
                taken = queue.take("cpu", alone=True)
                waiting = [one for one in waiting if not one.future.done()]
                assert bool(taken) == bool(waiting)
                assert len(taken) == 1 or sum(one.size_bytes for one in taken) <= 800
                assert len(taken) <= 3
                counts = Counter(one.request.key_id for one in taken)
                for key in "abc":
                    own = [one for one in waiting if one.request.key_id == key]
                    left = [one for one in own if one not in taken]
                    # Of a key's own calls, those of the highest priority, then the oldest.
                    best = sorted(own, key=lambda one: (-one.request.priority, own.index(one)))
                    assert [one for one in taken if one.request.key_id == key] == best[: counts[key]]
                    # No key has two calls more in the batch than one that waits still.
                    assert not left or all(count <= counts[key] + 1 for count in counts.values())
                waiting = [one for one in waiting if one not in taken]
            await asyncio.sleep(0)  # futures' callbacks
            held = [one for one in [*waiting, *taken] if not one.future.done()]
            assert (queue.held, queue.held_bytes) == (len(held), sum(one.size_bytes for one in held))

    asyncio.run(main())


async def test_a_keys_turn_comes_between_batches():
    queue = CallQueue(1000, 1 << 20, batch_s=0.003)
    for _ in range(100):
        queue.put(call("greedy", priority=9))
    assert len(queue.take("cpu", alone=True)) == 3
    queue.put(call("modest"))
    assert "modest" in [one.request.key_id for one in queue.take("cpu", alone=True)]


async def test_a_call_waits_for_another_device_than_the_one_that_lost_it():
    queue = CallQueue(10, 1 << 20)
    one = call()
    one.avoid = "cuda:0"
    queue.put(one)
    assert queue.take("cuda:0", alone=False) == []
    assert queue.take("cuda:1", alone=False) == [one]
    queue.put_back(one)
    assert queue.take("cuda:0", alone=True) == [one]


async def test_a_call_that_lost_a_worker_runs_alone():
    queue = CallQueue(10, 1 << 20)
    first, second = call(), call()
    first.losses = second.losses = 1
    others = [call() for _ in range(3)]
    for one in [others[0], first, second, *others[1:]]:
        queue.put(one)
    batches = [queue.take("cpu", alone=True) for _ in range(4)]
    assert batches == [[others[0]], [first], [second], others[1:]]


async def test_calls_that_were_given_up_do_not_stay_behind_those_of_a_higher_priority():
    queue = CallQueue(100, 1 << 20, batch_calls=1)
    first = call(priority=1)
    queue.put(first)
    for _ in range(1000):
        given_up = call()
        queue.put(given_up)
        given_up.future.cancel()
        await asyncio.sleep(0)
        assert len(queue) <= 2 * queue.held
    assert queue.take("cpu", alone=True) == [first]
    first.future.set_result({})
    await asyncio.sleep(0)
    assert (len(queue), queue._waiting) == (0, {})


async def test_identical_elementwise_calls_are_one_launch():
    same = [call("a", rows=3, n=1), call("b", rows=0, n=1), call("c", rows=5, n=1)]
    others = [
        call(n=2), call(n=1, dtype=np.uint32), call(operation="triple", n=1), call(n=1, elementwise=False),
        call(n=1, elementwise=False),
    ]  # fmt: skip
    others[0].request.inputs["y"] = np.zeros(1, np.uint64)  # broadcasts
    others.append(call(n=2, rows=1))
    others[-1].request.inputs["y"] = np.zeros((1, 1), np.uint64)
    for one in (others[0], others[-1]):
        one.kind = merge_kind(one.request)
    launches = launches_of([same[0], *others[:3], same[1], *others[3:], same[2]])
    assert [launch.calls for launch in launches] == [same, *([one] for one in others)]
    assert launches[0].rows == [3, 0, 5]
    assert launches_of(same[:1])[0].rows == [0]


# --- arrays as bytes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "named"), [("datetime64[s]", r"datetime64\[s\]"), (object, "object"), ("S2", r"\|S2")]
)
def test_arrays_of_what_is_no_number_are_refused(dtype, named):
    assert_raises(UnsupportedDtype, f"array 'when' has dtype {named}", wire.described, {"when": np.zeros(2, dtype)})


def test_arrays_of_a_frame_are_aligned():
    """Its receiver has head and body in one buffer, and fields copy arrays that are not aligned."""
    for size in range(32):
        assert (len(wire.prefix({"a": "a" * size}, 0)) - wire.PREFIX.size) % 16 == 0


def test_a_file_that_cannot_be_written_leaves_no_part(tmp_path, monkeypatch):
    path = tmp_path / "file"
    with monkeypatch.context() as patch:
        patch.setattr(wire.os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        assert_raises(OSError, "No space", wire.write_file, path, {"x": np.arange(9)})
    assert not path.exists()
    wire.write_file(path, {"x": np.arange(9)})
    assert_raises(FileExistsError, None, wire.write_file, path, {})
    assert wire.read_file(path)["x"].size == 9  # what was there stays


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    path = tmp_path / "file"
    wire.write_file(path, {"x": np.arange(9)})
    content = path.read_bytes()
    for length in (0, 5, 30, len(content) - 1):
        path.write_bytes(content[:length])
        assert_raises(FormatError, f"file is cut short: it has {length} bytes", wire.read_file, path)


def test_wiped_files_are_overwritten(tmp_path):
    folder, kept = tmp_path / "folder", tmp_path / "kept"
    (folder / "inner").mkdir(parents=True)
    secret = folder / "inner" / "secret"
    secret.write_bytes(b"secret")
    kept.write_bytes(b"kept")
    (folder / "link").symlink_to(kept)
    (tmp_path / "same").hardlink_to(secret)
    wire.wipe(folder)
    wire.wipe(folder)
    assert not folder.exists()
    assert (tmp_path / "same").read_bytes() == bytes(6)
    assert kept.read_bytes() == b"kept"
