"""Every op on a real GPU: compiled kernels against the float64 reference, at sizes that matter."""

import gc

import pytest
import torch
from op_checks import (
    DIFFERENTIABLE,
    DTYPES,
    bound,
    check_beside,
    check_sample,
    close,
    counted,
    each_sample,
    parts,
    results,
    wants_gradient,
)
from test_contract import WITH_KERNELS, middling

import accelerant.ops
from accelerant import ops
from accelerant.config import override
from accelerant.runtime.dispatch import force, operations
from accelerant.runtime.ledger import ledger

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error::accelerant.errors.FallbackWarning")]
IDS = {"ids": lambda dtype: str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("dtype", DTYPES, **IDS)
@pytest.mark.parametrize(("op", "sample"), each_sample())
def test_matches_the_reference(op, sample, dtype):
    check_sample(op, sample, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES[1:], **IDS)
@pytest.mark.parametrize(("op", "sample"), each_sample(of="LARGE"))
def test_large_matches_the_reference(op, sample, dtype):
    check_sample(op, sample, dtype, "cuda")


@pytest.mark.parametrize("op", WITH_KERNELS)
def test_own_kernels_run(op):
    """By default, unless a shipped table has a library as faster for this shape: then when they are forced."""
    sample = parts(op).cases.BENCHMARKS[0].sample
    check_sample(op, sample, torch.bfloat16, "cuda")
    ran = {row["op"]: row for row in counted()}
    directions = [name for name in (f"{op}_fwd", f"{op}_bwd") if name in ran]
    slower = [name for name in directions if not ran[name]["own"] and ran[name]["reason"].startswith("shipped table")]
    if slower:
        assert not ledger().to_dict()["fallbacks"]
        ledger().reset()
        with force(**{name: _own_implementation(name) for name in slower}):
            check_sample(op, sample, torch.bfloat16, "cuda")
        ran = {row["op"]: row for row in counted()}
    assert ran[f"{op}_fwd"]["own"]
    assert op not in DIFFERENTIABLE or ran[f"{op}_bwd"]["own"]
    assert not ledger().to_dict()["fallbacks"]


def _own_implementation(operation):
    """The first of our own that is not for float32 alone."""
    own = [each.name for each in operations()[operation].implementations if each.own]
    return next(name for name in own if name != "triton_fp16x3")


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_same_bits_twice(op):
    for sample in (parts(op).cases.LARGE[0], parts(op).cases.BENCHMARKS[0].sample):
        found = []
        with override(deterministic=True):
            for _ in range(2):
                it = bound(op, sample, torch.bfloat16, "cuda")
                tensors = [each.requires_grad_() for each in it.tensors]
                y = it.call(*tensors)
                y.backward(torch.ones_like(y))
                found.append([y, *(each.grad for each in tensors)])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_inductor_compiles_to_one_graph(op):
    it = bound(op, middling(op), torch.float32)
    tensors = [each.cuda() for each in it.tensors]
    torch._dynamo.reset()
    compiled = torch.compile(it.call, fullgraph=True)
    check_beside(it.call, compiled, *tensors, near=(1e-4, 1e-5), slopes=(1e-4, 1e-4))


@pytest.mark.parametrize("op", WITH_KERNELS)
def test_beside_another_stream(op):
    """Launches go to torch's current stream: a result made on a side stream is there once that stream is done."""
    it = parts(op)
    sample = it.cases.LARGE[0]
    tensors = sample.tensors(torch.float32, "cuda")
    expected = it.call(*tensors, **sample.options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        y = it.call(*[each * 1.0 if wants_gradient(each) else each for each in tensors], **sample.options)
    stream.synchronize()
    for one, other in zip(results(y), results(expected), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("op", WITH_KERNELS)
def test_captured_in_a_graph(op):
    it = parts(op)
    sample = it.cases.LARGE[0]
    tensors = sample.tensors(torch.bfloat16, "cuda")
    expected = it.call(*tensors, **sample.options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = it.call(*tensors, **sample.options)
    for each in results(y):
        each.zero_()
    graph.replay()
    for one, other in zip(results(y), results(expected), strict=True):
        assert torch.equal(one, other)


def _needs(gibibytes):
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gibibytes:
        pytest.skip(f"needs {gibibytes} GiB of GPU memory, {free:.0f} are free")


@pytest.mark.parametrize("op", ["gelu", "layer_norm", "softmax"])
def test_more_than_2_31_elements(op):
    """The last rows lie beyond the reach of 32-bit offsets; rows are independent, so they are checked alone."""
    _needs(30)
    it = parts(op)
    M, N = 2**31 // 4096 + 3, 4096
    x = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)
    vectors = [torch.randn(N, device="cuda"), torch.randn(N, device="cuda")] if op == "layer_norm" else []
    x.requires_grad_()
    y = it.call(x, *vectors)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    for rows in (slice(0, 2), slice(M - 2, M)):
        part = x[rows].detach().double().requires_grad_()
        expected = it.reference(part, *(vector.double() for vector in vectors))
        close(y[rows].detach(), expected.detach(), it.cases.TOLERANCES[torch.bfloat16])
        expected.backward(dy[rows].double())
        close(dx[rows], part.grad, it.cases.TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_matmul_is_counted_once_and_autograd_makes_its_gradients(dtype):
    a = torch.randn(64, 128, device="cuda", requires_grad=True)
    b = torch.randn(128, 32, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype):
        y = ops.matmul(a, b)
    assert y.dtype == dtype
    y.sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32
    assert sum(row["calls"] for row in counted("matmul")) == 1  # the rest is torch's


def test_only_the_bias_wants_a_gradient(monkeypatch):
    """A launch whose first argument is absent goes through the provider too, never through Triton's own launcher."""
    import triton

    def refuse(*_, **__):
        raise AssertionError("Triton's own launcher ran")

    monkeypatch.setattr(triton.runtime.JITFunction, "run", refuse)
    x = torch.randn(64, 96, device="cuda", dtype=torch.bfloat16)
    bias = torch.zeros(96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = accelerant.ops.layer_norm(x, None, bias)
    y.backward(torch.ones_like(y))
    assert torch.equal(bias.grad, torch.full_like(bias, 64))
