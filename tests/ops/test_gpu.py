"""Every op on a real GPU: compiled kernels against the float64 reference, at sizes that matter."""

import gc

import pytest
import torch
from op_checks import DTYPES, OPS, check_sample, close, each_sample, parts
from test_contract import differentiable, public_kernels

import accelerant.ops
from accelerant import ops
from accelerant.runtime.ledger import ledger

pytestmark = pytest.mark.gpu
KERNEL_OPS = [op for op in OPS if public_kernels(op)]
IDS = {"ids": lambda dtype: str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("dtype", DTYPES, **IDS)
@pytest.mark.parametrize(("op", "sample"), each_sample())
def test_matches_the_reference(op, sample, dtype):
    check_sample(op, sample, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES[1:], **IDS)
@pytest.mark.parametrize(("op", "sample"), each_sample(of="LARGE"))
def test_large_matches_the_reference(op, sample, dtype):
    check_sample(op, sample, dtype, "cuda")


@pytest.mark.parametrize("op", KERNEL_OPS)
def test_own_kernels_run(op):
    sample = parts(op).cases.BENCHMARKS[0].sample
    check_sample(op, sample, torch.bfloat16, "cuda")
    ran = {row["op"]: row["implementation"] for row in ledger().to_dict()["ops"]}
    assert ran == {f"{op}_fwd": "triton", f"{op}_bwd": "triton"}
    assert not ledger().to_dict()["fallbacks"]


@pytest.mark.parametrize("op", OPS)
def test_same_bits_twice(op):
    it = parts(op)
    for sample in (it.cases.LARGE[0], it.cases.BENCHMARKS[0].sample):
        results = []
        for _ in range(2):
            tensors = [
                None if each is None else each.requires_grad_() for each in sample.tensors(torch.bfloat16, "cuda")
            ]
            y = it.call(*tensors, **sample.options)
            y.backward(torch.ones_like(y))
            results.append([y, *(each.grad for each in tensors if each is not None)])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("op", OPS)
def test_inductor_compiles_to_one_graph(op):
    it = parts(op)
    sample = next(
        each for each in it.cases.SAMPLES if len(each.shapes[0]) > 1 and torch.Size(each.shapes[0]).numel() > 1
    )
    eager = [
        None if each is None else each.cuda().detach().requires_grad_()
        for each in differentiable(sample, torch.float32)
    ]
    traced = [None if each is None else each.detach().clone().requires_grad_() for each in eager]
    torch._dynamo.reset()
    compiled = torch.compile(it.call, fullgraph=True)
    y, z = it.call(*eager, **sample.options), compiled(*traced, **sample.options)
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(y)
    y.backward(dy)
    z.backward(dy)
    for one, other in zip(eager, traced, strict=True):
        if one is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", KERNEL_OPS)
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
        y = it.call(*[None if each is None else each * 1.0 for each in tensors], **sample.options)
    stream.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("op", KERNEL_OPS)
def test_captured_in_a_graph(op):
    it = parts(op)
    sample = it.cases.LARGE[0]
    tensors = sample.tensors(torch.bfloat16, "cuda")
    expected = it.call(*tensors, **sample.options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = it.call(*tensors, **sample.options)
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)


def _needs(gibibytes):
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gibibytes:
        pytest.skip(f"needs {gibibytes} GiB of GPU memory, {free:.0f} are free")


@pytest.mark.parametrize("op", KERNEL_OPS)
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
def test_autocast_matmul_is_counted_forward_and_backward(dtype):
    a = torch.randn(64, 128, device="cuda", requires_grad=True)
    b = torch.randn(128, 32, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype):
        y = ops.matmul(a, b)
    assert y.dtype == dtype
    y.sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32
    assert sum(row["calls"] for row in ledger().to_dict()["ops"] if row["op"] == "matmul") == 3


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
