"""Streams, events, futures, staged copies and arrays in chunks: on the CPU, and on a GPU where there is one."""

import asyncio
import math
import os
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from accelerant import ops
from accelerant.config import override, settings
from accelerant.errors import (
    AccelerantError,
    ConfigError,
    DeviceLost,
    ShapeError,
    TimeLimitExceeded,
    UnsupportedCase,
    UnsupportedDtype,
)
from accelerant.runtime.dispatch import explain_quietly
from accelerant.runtime.provider import ComputeDevice
from accelerant.runtime.streams import stream as stream_module
from accelerant.runtime.streams import transfer as chunks
from accelerant.runtime.streams.stream import Event, Future, Stream, submit
from accelerant.runtime.streams.transfer import StagingPool, copy_async, stream_chunks
from clock import Clock
from refusals import assert_raises

gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


# --- streams and events ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
def test_work_in_a_stream_is_timed_between_events(device):
    stream = Stream(device)
    with stream:
        x = torch.full((1 << 16,), 2.0, device=device)
        start = stream.record()
        y = x * x
        stop = stream.record()
    stop.synchronize(10)
    assert start.done()
    assert stop.done()
    assert stream.done()
    assert start.elapsed_ms(stop) >= 0
    stream.synchronize()
    assert (y == 4).all()
    assert isinstance(start, Event)
    assert stream.device.backend == device


@pytest.mark.parametrize("device", DEVICES)
def test_one_stream_waits_for_another(device):
    first, second = Stream(device), Stream(device)
    with first:
        x = torch.zeros(1 << 20, device=device)
        for _ in range(20):
            x += 1
    second.wait_stream(first)
    with second:
        y = x.sum()
    second.synchronize()
    assert y.item() == 20 * (1 << 20)


def test_a_host_stream_keeps_the_order_and_direct_work_comes_after():
    stream, gate = Stream("cpu"), threading.Event()
    seen = []
    for i in range(5):
        submit(lambda i=i: (gate.wait(), seen.append(i)), stream=stream)
    mark = stream.record()
    assert not mark.done()
    assert_raises(TimeLimitExceeded, r"0\.0 s", mark.synchronize, 0.0)
    threading.Timer(0.1, gate.set).start()  # while the host waits for the stream
    with stream:
        seen.append("direct")
    assert mark.done()
    assert seen == [0, 1, 2, 3, 4, "direct"]


def test_host_events_wait_across_streams():
    first, second = Stream("cpu"), Stream("cpu")
    gate = threading.Event()
    submit(gate.wait, stream=first)
    second.wait(first.record())
    after = submit(lambda: gate.is_set(), stream=second)
    assert not after.done()
    gate.set()
    assert after.result(60) is True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_the_shared_host_stream_works_after_a_fork():
    assert submit(lambda: 1, stream=Stream.current("cpu")).result(60) == 1
    gate = threading.Event()
    pending = submit(gate.wait, stream=Stream.current("cpu"))
    child = os.fork()
    if child == 0:
        assert_raises(AccelerantError, "submitted before this process was forked", pending.result)
        Stream.current("cpu").synchronize(60)
        os._exit(0 if submit(lambda: 7, stream=Stream.current("cpu")).result(60) == 7 else 1)
    gate.set()
    assert os.waitpid(child, 0)[1] == 0


def test_streams_of_what_has_none_are_refused(monkeypatch):
    assert_raises(ConfigError, "unknown backend 'abacus'", Stream, "abacus")
    assert_raises(ConfigError, "there is no number 3", Stream, "cpu:3")
    monkeypatch.setattr(stream_module, "find_device", lambda _: ComputeDevice("opencl", 0, "some device"))
    assert_raises(UnsupportedCase, "opencl", Stream, "opencl")


# --- futures ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
def test_a_future_gives_the_result(device):
    x = torch.arange(8.0, device=device)
    future = submit(torch.mul, x, 3, stream=Stream(device))
    assert future.result(60).tolist() == [3.0 * i for i in range(8)]
    assert future.done()
    assert future.value_on(Stream.current(device)).sum().item() == 84
    assert "done" in repr(future)
    assert submit(torch.mul, x, 2).result().device == x.device


@pytest.mark.parametrize("device", DEVICES)
def test_a_future_raises_what_the_function_raised(device):
    future = submit(Mock(side_effect=TimeoutError("the function's own")), stream=Stream(device))
    caught = assert_raises(TimeoutError, "the function's own", future.result, 60)
    assert not isinstance(caught, TimeLimitExceeded)


def test_a_wait_ends_at_its_limit_and_the_work_goes_on():
    gate = threading.Event()
    future = submit(gate.wait, 5.0, stream=Stream("cpu"))
    assert_raises(TimeLimitExceeded, r"0\.01 s", future.result, 0.01)
    assert issubclass(TimeLimitExceeded, TimeoutError)
    gate.set()
    assert future.result(60) is True
    assert_raises(ConfigError, "-1", future.result, -1)
    assert_raises(ConfigError, "wanted a function, got int", submit, 3)


STATES = {
    "settings": (lambda: override(fallback="forbid"), lambda: settings().fallback),
    "a forced implementation": (
        lambda: override(implementation={"softmax_fwd": "torch"}),
        lambda: explain_quietly(ops.softmax, torch.ones(3, 3)).decisions[0].reason,
    ),
    "autocast": (
        lambda: torch.autocast("cpu", torch.float16),
        lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
    ),
    "inference mode": (torch.inference_mode, lambda: torch.ones(1).is_inference()),
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "a context variable": (lambda: _variable_set(5), lambda: VARIABLE.get()),
}
VARIABLE = ContextVar("variable", default=0)


@contextmanager
def _variable_set(value):
    token = VARIABLE.set(value)
    yield
    VARIABLE.reset(token)


@pytest.mark.parametrize("state", STATES)
def test_submitted_work_runs_under_its_callers_state_even_after_the_block(state):
    enter, look = STATES[state]
    stream, gate = Stream("cpu"), threading.Event()
    submit(gate.wait, 5.0, stream=stream)
    with enter():
        wanted = look()
        inside = submit(look, stream=stream)
    outside = submit(look, stream=stream)
    assert look() != wanted
    gate.set()
    assert inside.result(60) == wanted
    assert outside.result(60) == look()


def test_results_may_be_nested():
    stream = Stream("cpu")

    def tree(depth):
        return 1 if not depth else sum(submit(tree, depth - 1, stream=stream).result(60) for _ in range(2))

    assert submit(tree, 4, stream=stream).result(60) == 16
    assert submit(lambda: stream.synchronize(60) or stream.record().done(), stream=stream).result(60)
    assert submit(lambda: asyncio.run(awaited(submit(tree, 1, stream=stream))), stream=stream).result(60) == 2
    with pytest.raises(ValueError, match="inner"):
        submit(lambda: submit(int, "inner", stream=stream).result(60), stream=stream).result(60)


async def awaited(future):
    return await future


def test_a_wait_without_an_end_is_an_error():
    first, second, gate = Stream("cpu"), Stream("cpu"), threading.Event()
    later = []
    behind = submit(lambda: gate.wait(60) and later[0].result(), stream=first)
    later.append(submit(int, stream=first))
    gate.set()
    assert_raises(AccelerantError, "waits for itself, or for work that is queued behind it", behind.result, 60)
    both = threading.Barrier(2)  # each of two streams waits for work queued on the other

    def cross(other):
        both.wait(60)
        return submit(int, stream=other).result()

    outcomes = [submit(cross, second, stream=first), submit(cross, first, stream=second)]
    errors = []
    for outcome in outcomes:
        try:
            outcome.result(60)
        except AccelerantError as error:
            errors.append(error)
    assert len(errors) == 1


def test_asyncio_awaits_many_futures_at_once_and_its_loop_goes_on():
    count = 24
    meeting, beaten = threading.Barrier(count), threading.Event()  # all run at once, and end after the loop's beats

    async def heart():
        for _ in range(3):
            await asyncio.sleep(0.005)
        beaten.set()

    async def main():
        pulse = asyncio.create_task(heart())
        futures = [
            submit(lambda i=i: (meeting.wait(60), beaten.wait(60), i), stream=Stream("cpu")) for i in range(count)
        ]
        ends = await asyncio.gather(*futures)
        await pulse
        return ends

    ends = asyncio.run(main())
    assert [i for _, _, i in ends] == list(range(count))
    assert all(beats for _, beats, _ in ends)


def test_asyncio_sees_errors_and_cancelling_the_wait_leaves_the_work():
    async def main():
        with pytest.raises(ValueError, match="broken"):
            await submit(Mock(side_effect=ValueError("broken")), stream=Stream("cpu"))
        gate = threading.Event()
        slow = submit(lambda: (gate.wait(60), 5)[1], stream=Stream("cpu"))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(awaited(slow), 0.005)
        gate.set()
        return await slow

    assert asyncio.run(main()) == 5


def test_futures_that_wait_on_an_event_are_polled_without_blocking(monkeypatch):
    """The CUDA path of await, with an event of the host in the place of the device's."""

    gate = threading.Event()

    class Late(Event):
        def done(self):
            return gate.is_set()

        def elapsed_ms(self, later):
            raise NotImplementedError

        def synchronize(self, timeout=None):
            assert self.done(), "the loop would block here"

    async def main():
        futures = []
        for i in range(50):
            task = stream_module.Task()
            task.set_result(i)
            futures.append(Future(Stream("cpu"), task, Late()))
        assert not futures[0].done()
        asyncio.get_running_loop().call_later(0.03, gate.set)
        return await asyncio.gather(*futures)

    monkeypatch.setattr(stream_module, "_used_on", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    assert asyncio.run(main()) == list(range(50))


# --- copies ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("array", [
    np.arange(1000, dtype=np.int64),
    np.linspace(0, 1, 24).reshape(4, 6)[::2, ::3],
    np.zeros((0, 3), np.float32),
    np.array(7, np.uint8),
    np.array([True, False]),
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
    torch.tensor([1 + 2j]),
], ids=["long", "strided", "empty", "scalar", "bool", "bfloat16 transposed", "complex"])  # fmt: skip
def test_copies_arrive_whole_and_are_the_devices_own(device, array):
    future = copy_async(array, device)
    expected = array.clone() if isinstance(array, torch.Tensor) else torch.from_numpy(array.copy())
    if isinstance(array, np.ndarray) and array.size and array.flags.writeable:
        array[...] = 0
    got = future.result(60)
    assert got.device.type == device
    assert torch.equal(got.cpu(), expected)


def test_staging_takes_arrays_larger_than_its_buffers_and_each_buffer_in_turn():
    pool = StagingPool(1000, 2, pinned=False)
    source = torch.randint(0, 256, (12_345,), dtype=torch.uint8)
    target = torch.empty_like(source)
    pool.copy(source, target, Stream("cpu"))
    assert torch.equal(source, target)
    assert_raises(ConfigError, "2 of 0 bytes", StagingPool, 0)


def test_bad_arrays_are_refused():
    assert_raises(ConfigError, "wanted a NumPy array or a tensor, got list", copy_async, [1, 2], "cpu")
    assert_raises(UnsupportedDtype, "datetime64", copy_async, np.zeros(2, "datetime64[s]"), "cpu")
    assert_raises(UnsupportedDtype, ">f4", copy_async, np.zeros(2, ">f4"), "cpu")
    assert_raises(ConfigError, "on meta", copy_async, torch.zeros(2, device="meta"), "cpu")


# --- chunks ----------------------------------------------------------------------------------------------------------
def product_and_sine(x, y):
    """Elementwise, and one result a row: exact on a GPU too, where a reduction's order may depend on the shape."""
    return (x * y).tanh(), x[:, 0].sin()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 1000, 1003])
@pytest.mark.parametrize("chunk_bytes", [1, 997, 1 << 20, None])
def test_chunked_is_exactly_the_whole(device, rows, chunk_bytes):
    if chunk_bytes == 1 and rows > 100:
        rows = 100
    rng = np.random.default_rng(rows)
    x, y = rng.standard_normal((rows, 5), np.float32), rng.standard_normal((rows, 5), np.float32)
    run = stream_chunks(product_and_sine, (x, y), device=device, chunk_bytes=chunk_bytes)
    whole = product_and_sine(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device))
    for got, expected in zip(run.result, whole, strict=True):
        assert isinstance(got, np.ndarray)
        np.testing.assert_array_equal(got, expected.cpu().numpy())
    assert run.rows == rows
    assert run.bytes_in == x.nbytes + y.nbytes
    assert run.chunks == max(1, math.ceil(rows / max(1, (chunk_bytes or 1 << 30) // 40)))


@pytest.mark.parametrize("device", DEVICES)
def test_views_read_only_and_mapped_arrays(device, tmp_path):
    base = np.random.default_rng(0).standard_normal((64, 9))
    path = tmp_path / "array.bin"
    base.tofile(path)
    mapped = np.memmap(path, base.dtype, "r", shape=base.shape)
    frozen = base.copy()
    frozen.flags.writeable = False
    backwards = base[::-1]
    strided = base[1::3, ::2]
    for array in (mapped, frozen, backwards, strided, torch.from_numpy(base).t()):
        run = stream_chunks(lambda x: x * 2 + 1, array, device=device, chunk_bytes=200)
        np.testing.assert_array_equal(np.asarray(run.result), np.asarray(array) * 2 + 1)
        assert isinstance(run.result, torch.Tensor) == isinstance(array, torch.Tensor)
    np.testing.assert_array_equal(frozen, base)


@pytest.mark.parametrize("device", DEVICES)
def test_functions_that_return_or_change_their_input(device):
    """The device's buffers are used again: what fn keeps of them must be away before."""
    x = torch.arange(1000.0)
    assert torch.equal(stream_chunks(lambda t: t, x, device=device, chunk_bytes=64).result, x)
    assert torch.equal(
        stream_chunks(lambda t: t.mul_(2), x, device=device, chunk_bytes=64).result, torch.arange(1000.0) * 2
    )
    assert x[-1] == 999


@pytest.mark.parametrize("atomic", [True, False])
def test_out_is_written_and_returned(atomic):
    x, out = np.arange(10.0), np.full(10, -1.0)
    assert stream_chunks(torch.neg, x, device="cpu", chunk_bytes=24, out=out, atomic=atomic).result is out
    np.testing.assert_array_equal(out, -x)
    pair = (np.empty(10), np.empty(10))
    stream_chunks(lambda t: (t, t + 1), x, device="cpu", out=pair, atomic=atomic)
    np.testing.assert_array_equal(pair[1], x + 1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_time_out_between_chunks_leaves_out_as_it_was(device, monkeypatch):
    monkeypatch.setattr(chunks, "time", clock := Clock())
    out = np.full(100, 7.0)
    seen = []

    def slow(x):
        clock.sleep(0.01)
        seen.append(len(x))
        return x + 1

    with pytest.raises(TimeLimitExceeded, match=r"0\.03 s are over after \d+ of 100 rows"):
        stream_chunks(slow, np.zeros(100), device=device, chunk_bytes=8, out=out, timeout=0.03)
    assert 0 < len(seen) < 50
    assert (out == 7.0).all()
    assert (stream_chunks(slow, np.zeros(2), device=device, out=out[:2], timeout=30).result == 1).all()


def test_an_error_in_fn_or_progress_leaves_nothing_under_way():
    out = np.full(100, 7.0)

    def fails(x):
        if x[0] >= 50:
            raise ValueError("row 50")
        return x

    def stop(done, rows):
        if done >= 30:
            raise KeyboardInterrupt

    assert_raises(ValueError, "row 50", stream_chunks, fails, np.arange(100.0), device="cpu", chunk_bytes=8, out=out)
    with pytest.raises(KeyboardInterrupt):
        stream_chunks(lambda x: x, np.arange(100.0), device="cpu", chunk_bytes=8, out=out, progress=stop)
    assert (out == 7.0).all()
    assert not any(thread.name.startswith("accelerant-unstage") for thread in threading.enumerate())


@pytest.mark.parametrize("device", DEVICES)
def test_progress_is_told_in_order(device):
    told = []
    run = stream_chunks(
        torch.relu, torch.zeros(10, 4), device=device, chunk_bytes=48, progress=lambda *pair: told.append(pair)
    )
    assert told == [(3, 10), (6, 10), (9, 10), (10, 10)]
    assert run.chunks == 4
    assert run.elapsed_s > 0
    assert run.overlap > 0
    assert "4 chunks" in str(run)


def test_staged_results_come_home(monkeypatch):
    """The way of pageable memory on CUDA, with the CPU in the device's place."""
    monkeypatch.setattr(chunks, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    x = torch.randn(1003, 3)
    pipeline = chunks._Pipeline(torch.sin, [x], "cpu", 120, None)
    pipeline.cuda = True
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    run = pipeline.run(None, None)
    assert torch.equal(pipeline.results[0], torch.sin(x))
    assert run.chunks == 101


def test_bad_calls_are_refused_before_anything_runs():
    x = np.zeros((4, 2), np.float32)

    def never(*_):
        raise AssertionError

    for arguments, error, text in [
        ({"chunk_bytes": 0}, ConfigError, "chunk_bytes must be at least 1, got 0"),
        ({"chunk_bytes": -5}, ConfigError, "-5"),
        ({"timeout": 0}, ConfigError, "timeout must be above 0.* got 0"),
        ({"device": "abacus"}, ConfigError, "abacus"),
        ({"device": "cpu:x"}, ConfigError, "cpu:x"),
    ]:
        assert_raises(error, text, stream_chunks, never, x, **{"device": "cpu", **arguments})
    assert_raises(ConfigError, "at least one array", stream_chunks, never, [], device="cpu")
    assert_raises(ShapeError, r"\(4, 2\), \(3, 2\)", lambda: stream_chunks(never, [x, x[:3]], device="cpu"))
    assert_raises(ShapeError, r"\(\)", stream_chunks, never, np.array(1.0), device="cpu")
    frozen = np.zeros((4, 2), np.float32)
    frozen.flags.writeable = False
    assert_raises(ConfigError, "out 0 is read-only", stream_chunks, never, x, device="cpu", out=frozen)


def test_results_that_do_not_fit_are_refused():
    x = np.zeros((4, 2), np.float32)
    with pytest.raises(ShapeError, match="given 4 rows and must return as many; result 0 is \\(2,\\)"):
        stream_chunks(lambda t: t.sum(0), x, device="cpu")
    assert_raises(ShapeError, "result 0 is NoneType", stream_chunks, lambda t: (None,), x, device="cpu")
    with pytest.raises(ShapeError, match=r"out must be \(4, 2\) float32, got \(4, 3\) float64"):
        stream_chunks(torch.neg, x, device="cpu", out=np.zeros((4, 3)))
    with pytest.raises(ShapeError, match="now is"):
        stream_chunks(
            lambda t: t[:, : 1 + int(t.shape[0] == 1)], np.zeros((5, 2), np.float32), device="cpu", chunk_bytes=16
        )
    assert_raises(UnsupportedDtype, "bfloat16", lambda: stream_chunks(lambda t: t.bfloat16(), x, device="cpu"))


# --- on the GPU ------------------------------------------------------------------------------------------------------
@gpu
def test_pinned_arrays_in_chunks_are_exact():  # how far copies and work overlap is a row of `bench runtime`
    x = torch.randn(1 << 24).pin_memory()
    out = torch.empty(1 << 24).pin_memory()
    run = stream_chunks(lambda t: t.mul(2).add_(1), x, device="cuda", out=out, atomic=False, chunk_bytes=4 << 20)
    assert run.chunks == 16
    assert torch.equal(out, x * 2 + 1)


@gpu
def test_pageable_arrays_give_the_same():
    x = np.random.default_rng(0).standard_normal((1 << 20, 7), np.float32)
    run = stream_chunks(torch.sin, x, device="cuda", chunk_bytes=3_000_001)
    np.testing.assert_array_equal(run.result, torch.sin(torch.from_numpy(x).cuda()).cpu().numpy())


@gpu
def test_pinned_copies_keep_no_host_waiting_and_those_through_staging_are_exact():
    x = torch.randn(1 << 22)
    for _ in range(3):
        assert torch.equal(copy_async(x, "cuda").result(60).cpu(), x)
    assert torch.equal(copy_async(x.pin_memory(), "cuda").result(60).cpu(), x)
    assert torch.equal(copy_async(x.numpy(), "cuda").result(60).cpu(), x)


@gpu
def test_asyncio_awaits_the_device():
    x = torch.randn(2048, 2048, device="cuda")

    def work():
        y = x
        for _ in range(20):
            y = y @ x / 50
        return y

    async def main():
        return await asyncio.gather(*[submit(work, stream=Stream("cuda")) for _ in range(8)])

    results = asyncio.run(main())
    assert all(torch.equal(result, results[0]) for result in results)


@gpu
def test_a_wait_for_the_device_ends_at_its_limit():
    stream = Stream("cuda")
    with stream:
        torch.cuda._sleep(400_000_000)
    assert_raises(TimeLimitExceeded, r"0\.01 s", lambda: stream.record().synchronize(0.01))
    stream.synchronize(30)


def test_a_lost_device_is_named(monkeypatch):
    class Broken:
        def query(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        synchronize = query

    event = stream_module._CudaEvent.__new__(stream_module._CudaEvent)
    event.event = Broken()
    assert_raises(DeviceLost, "illegal memory access", event.done)
    assert_raises(DeviceLost, "start a new one", event.synchronize)
