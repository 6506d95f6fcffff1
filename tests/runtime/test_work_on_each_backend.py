"""Streaming, batches and futures on every backend here: one runtime, whatever the device."""

import asyncio

import numpy as np
import pytest
import torch

from accelerant import Accelerator
from accelerant.algebra.field.parameters import field_of
from accelerant.errors import ShapeError, TimeLimitExceeded
from accelerant.runtime.streams.transfer import stream_chunks
from requirements import require_backend

P = field_of("goldilocks").modulus


@pytest.fixture(params=["cpu", "opencl", "webgpu"])
def backend(request):
    return require_backend(request.param)


def test_futures_have_the_results_of_calls_in_any_order(backend):
    with Accelerator(backend, fallback=False) as acc:
        xs = [np.arange(n, n + 50, dtype=np.uint64) for n in range(6)]
        answers = [acc.submit(acc.field_mul, x, x) for x in xs]
        for x, answer in reversed(list(zip(xs, answers, strict=True))):
            assert answer.result(timeout=60).tolist() == [int(v) ** 2 % P for v in x]
        broken = acc.submit(acc.field_mul, xs[0], xs[0][:3])
        with pytest.raises(ShapeError):
            broken.result(timeout=60)

        async def both():
            return await asyncio.gather(*(acc.submit(acc.gelu, torch.ones(n)) for n in (1, 2)))

        assert [len(y) for y in asyncio.run(both())] == [1, 2]


def test_a_batch_has_the_results_of_single_calls_in_one_launch(backend):
    with Accelerator(backend, fallback=False) as acc:
        xs = [np.arange(1, n, dtype=np.uint64) for n in (3, 40, 9)]
        with acc.batch() as batch:
            sums = [batch.field_add(x, x) for x in xs]
            chained = batch.field_add(sums[1], xs[1])  # of a recorded call
        assert batch.launches == 2
        for answer, x in zip(sums, xs, strict=True):
            np.testing.assert_array_equal(answer.result(), 2 * x)
        np.testing.assert_array_equal(chained.result(), 3 * xs[1])


def test_arrays_stream_through_a_device_in_chunks(backend):
    x = np.random.default_rng(3).standard_normal((1000, 7)).astype(np.float32)
    done = []
    run = stream_chunks(torch.exp, x, device=backend, chunk_bytes=28 * 300, progress=lambda rows, _: done.append(rows))
    assert (run.chunks, run.rows, done) == (4, 1000, [300, 600, 900, 1000])
    np.testing.assert_allclose(run.result, np.exp(x), rtol=1e-6)
    two = stream_chunks(lambda a, b: (a + b, a.sum(dim=1)), [x, x], device=backend, chunk_bytes=1 << 12)
    np.testing.assert_array_equal(two.result[0], 2 * x)
    np.testing.assert_allclose(two.result[1], x.sum(axis=1), rtol=1e-5, atol=1e-5)


def test_an_error_in_a_chunk_leaves_the_output_as_it_was(backend):
    x, out, calls = np.ones((100, 4), np.float32), np.full((100, 4), 7, np.float32), []

    def fails_in_the_third(part):
        calls.append(part)
        return part.exp() if len(calls) < 3 else part[:1]

    with pytest.raises(ShapeError, match="must return as many"):
        stream_chunks(fails_in_the_third, x, device=backend, chunk_bytes=16 * 20, out=out)
    assert (out == 7).all()
    with pytest.raises(TimeLimitExceeded):
        stream_chunks(torch.exp, x, device=backend, chunk_bytes=16, out=out, timeout=1e-9)
    assert (out == 7).all()
