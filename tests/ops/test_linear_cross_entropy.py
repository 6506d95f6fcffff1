import importlib
import math
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_checks import check_beside, check_sample, counted
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops.linear_cross_entropy.cases import SAMPLES, TOLERANCES
from accelerant.runtime.memory.limits import predicting

op = importlib.import_module("accelerant.ops.linear_cross_entropy")


@pytest.fixture
def small_chunks(monkeypatch):
    """A few rows at a time, whatever the shape."""
    real = op.chunk_rows
    monkeypatch.setattr(op, "chunk_rows", lambda M, V, itemsize, limit: real(M, V, itemsize, 100))


def theirs(hidden, weight, targets, **options):
    return functional.cross_entropy(hidden @ weight.T, targets, **options)


def leaves(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def drawn(M, K, V):
    return torch.randn(M, K), torch.randn(V, K), torch.randint(0, V, (M,))


@pytest.mark.sample(7, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_by_kernel_and_in_chunks(sample, dtype, interpreted, small_chunks):
    check_sample("linear_cross_entropy", sample, dtype, tolerances=TOLERANCES)
    ran = {row["op"]: row["implementation"] for row in counted()}
    assert ran["linear_cross_entropy_fwd"] == ran["linear_cross_entropy_bwd"] == "triton"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_by_torch_in_chunks(sample, dtype, uninterpreted, small_chunks):
    check_sample("linear_cross_entropy", sample, dtype, tolerances=TOLERANCES)


class FullMemory(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.new_empty.default and args[1] != [0]:  # Triton's interpreter makes empty ones
            raise torch.OutOfMemoryError("no memory")
        return func(*args, **(kwargs or {}))


def test_a_gradient_whose_rounded_copy_finds_no_memory_is_not_scaled(interpreted):
    """The error leaves the gradient as it was, so that the backward pass can be run again."""
    x = torch.ones(2, 3)
    with FullMemory(), pytest.raises(torch.OutOfMemoryError):
        op._scaled(x, torch.tensor(2.0), None, torch.bfloat16, True, True)
    assert torch.equal(x, torch.ones(2, 3))
    assert torch.equal(
        op._scaled(x, torch.tensor(2.0), None, torch.bfloat16, True, True), 2 * torch.ones(2, 3).bfloat16()
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_second_backward_pass(reduction, interpreted, small_chunks):
    """The gradients that were made ahead are given away by the first."""
    hidden, weight, targets = drawn(7, 4, 9)
    tensors = leaves(hidden, weight)
    loss = ops.linear_cross_entropy(*tensors, targets, reduction=reduction).sum() * -2
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    kept = [each.clone() for each in first]
    for each in first:
        each.zero_()
    torch.testing.assert_close(list(torch.autograd.grad(loss, tensors)), kept)


@pytest.mark.parametrize("which", [0, 1])
def test_only_the_gradient_that_is_needed(which, interpreted):
    hidden, weight, targets = drawn(7, 4, 9)
    tensors = [hidden, weight]
    tensors[which].requires_grad_()
    ops.linear_cross_entropy(*tensors, targets).backward()
    others = leaves(hidden, weight)
    theirs(*others, targets).backward()
    torch.testing.assert_close(tensors[which].grad, others[which].grad)
    assert tensors[1 - which].grad is None
    assert sum(row["calls"] for row in counted("linear_cross_entropy_matmul")) == 2


def test_no_gradient_no_gradients(interpreted):
    hidden, weight, targets = drawn(7, 4, 9)
    with torch.no_grad():
        ops.linear_cross_entropy(hidden.requires_grad_(), weight, targets)
    assert sum(row["calls"] for row in counted("linear_cross_entropy_matmul")) == 1


def test_all_ignored(interpreted, small_chunks):
    hidden, weight, _ = drawn(7, 4, 9)
    targets = torch.full((7,), -100)
    assert ops.linear_cross_entropy(hidden, weight, targets).isnan()
    tensors = leaves(hidden, weight)
    loss = ops.linear_cross_entropy(*tensors, targets, reduction="sum")
    loss.backward()
    assert loss == 0
    assert all((each.grad == 0).all() for each in tensors)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite(value, interpreted, small_chunks):
    hidden, weight, targets = drawn(7, 4, 9)
    hidden[3, 0] = value
    loss = ops.linear_cross_entropy(hidden, weight, targets, reduction="none")
    torch.testing.assert_close(loss, theirs(hidden, weight, targets, reduction="none"), equal_nan=True)


def test_master_weights_under_autocast(interpreted, small_chunks):
    """float32 parameters, products in bfloat16, the gradient of the weight never rounded to it."""
    hidden, weight, targets = drawn(40, 8, 12)
    tensors = leaves(hidden.bfloat16(), weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss = ops.linear_cross_entropy(*tensors, targets)
    assert loss.dtype == torch.float32
    loss.backward()
    assert [each.grad.dtype for each in tensors] == [torch.bfloat16, torch.float32]
    others = leaves(hidden.bfloat16().float(), weight.bfloat16().float())
    theirs(*others, targets).backward()
    for one, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=5e-2, atol=5e-3)


@pytest.mark.slow
def test_float16_gradients_survive_a_large_mean(interpreted):
    """Over the count they are below float16's least number; a loss scale is there to lift them."""
    hidden = torch.ones(4096, 2, dtype=torch.float16, requires_grad=True)
    weight = torch.full((256, 2), 0.5, dtype=torch.float16, requires_grad=True)
    (ops.linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.int64)) * 32768).backward()
    torch.testing.assert_close(weight.grad[1, 0].item(), 32768 / 256, rtol=2e-3, atol=0)


class Largest(TorchDispatchMode):
    """Sees the largest result of any of torch's functions, in bytes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.numel() * result.element_size())
        return result


def test_memory_is_predicted_where_chunks_are_summed_in_float32():
    """The shapes of a large vocabulary on a GPU, whose second chunk is added within its product."""
    with predicting():
        hidden, weight = (torch.empty(64, 8, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        total = torch.empty(64, 8, device="cuda")
        for first in (True, False):
            op._accumulate(hidden.new_empty(64, 64), weight, total, first)
    assert total.shape == (64, 8)


@pytest.mark.parametrize("V", [4000, 4001])
def test_logits_never_exist_whole(V, monkeypatch):
    monkeypatch.setitem(op.CHUNK_BYTES, "cpu", 1 << 20)
    hidden, weight, targets = drawn(2048, 16, V)
    with Largest() as largest:
        op.run_chunks(hidden, weight, targets, -100, 0.0, (True, True), own=False, losses=torch.empty(2048))
    aligned = -(-V // 64) * 64
    assert largest.bytes <= (1 << 20) * aligned / V + 1
    assert largest.bytes < 2048 * V * 4 / 20


@pytest.mark.parametrize("rows", [300, 64])
def test_bfloat16_on_a_cpu(rows, uninterpreted, monkeypatch):
    """Its products are of bfloat16, as torch's are; the sums over chunks are of float32."""
    real = op.chunk_rows
    monkeypatch.setattr(op, "chunk_rows", lambda M, V, itemsize, limit: min(rows, real(M, V, itemsize, limit)))
    hidden, weight, targets = (x.bfloat16() if x.is_floating_point() else x for x in drawn(300, 32, 4000))
    weight = weight / 4

    def found(call, dtype):
        tensors = leaves(hidden.to(dtype), weight.to(dtype))
        return torch.autograd.grad(call(*tensors, targets), tensors)

    exact = found(theirs, torch.float64)
    mine, torchs = found(ops.linear_cross_entropy, torch.bfloat16), found(theirs, torch.bfloat16)
    assert [x.dtype for x in mine] == [torch.bfloat16] * 2
    for one, other, reference in zip(mine, torchs, exact, strict=True):
        assert (one - reference).abs().max() <= 2 * (other - reference).abs().max()
    products = counted("linear_cross_entropy_matmul")
    assert products
    assert all("bfloat16" in row["case"] for row in products)


@pytest.mark.parametrize(
    ("M", "V", "limit", "rows"),
    [(100, 10, 1 << 20, 100), (32768, 50304, 512 << 20, 4864), (1000, 1000, 2000, 1), (0, 5, 100, 1), (9, 10, 50, 3)],
)
def test_chunk_rows(M, V, limit, rows):
    assert op.chunk_rows(M, V, 2, limit) == rows


@pytest.mark.slow
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    M=st.integers(1, 20),
    K=st.integers(1, 9),
    V=st.integers(1, 70),
    smoothing=st.sampled_from([0.0, 0.3]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    seed=st.integers(0, 99),
)
def test_any_shape(small_chunks, M, K, V, smoothing, reduction, seed):
    torch.manual_seed(seed)
    hidden, weight, targets = drawn(M, K, V)
    options = {"label_smoothing": smoothing, "reduction": reduction}
    both = (partial(of, targets=targets, **options) for of in (ops.linear_cross_entropy, theirs))
    check_beside(*both, hidden, weight, near=(1e-4, 1e-4), slopes=(1e-4, 1e-4))


def test_any_layout(interpreted, small_chunks):
    hidden, weight, targets = torch.randn(4, 6).t(), torch.randn(4, 9).t(), torch.randint(0, 9, (12,))[::2]
    both = (partial(of, targets=targets) for of in (ops.linear_cross_entropy, theirs))
    check_beside(*both, hidden, weight, slopes=(1.3e-6, 1e-5), dy=torch.tensor(1.0))


HIDDEN, WEIGHT, TARGETS = torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.int64)
REJECTED = {
    "a scalar": (torch.tensor(1.0), WEIGHT, TARGETS, {}, ShapeError, "hidden must be .*, got a scalar"),
    "weight's shape": (HIDDEN, WEIGHT.t(), TARGETS, {}, ShapeError, r"\(V, 4\), V at least 1, got \(4, 5\)"),
    "no class": (HIDDEN, WEIGHT[:0], TARGETS, {}, ShapeError, r"V at least 1, got \(0, 4\)"),
    "targets' shape": (HIDDEN, WEIGHT, TARGETS[:2], {}, ShapeError, r"targets must be \(3,\), got \(2,\)"),
    "integers": (HIDDEN.long(), WEIGHT, TARGETS, {}, UnsupportedDtype, "hidden is int64"),
    "dtypes": (HIDDEN, WEIGHT.half(), TARGETS, {}, UnsupportedDtype, "one dtype, got float32 and float16"),
    "float targets": (HIDDEN, WEIGHT, TARGETS.float(), {}, UnsupportedDtype, "targets must be .*, got float32"),
    "smoothing": (HIDDEN, WEIGHT, TARGETS, {"label_smoothing": -0.1}, ConfigError, r"in \[0, 1\], got -0\.1"),
    "reduction": (HIDDEN, WEIGHT, TARGETS, {"reduction": "max"}, ConfigError, "got 'max'"),
    "class": (HIDDEN, WEIGHT, TARGETS + 5, {}, ConfigError, r"in \[0, 5\) or ignore_index \(-100\), got 5"),
    "devices": (HIDDEN, WEIGHT.to("meta"), TARGETS, {}, ShapeError, "weight must be on cpu, .*; got meta"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejects(name):
    hidden, weight, targets, options, error, words = REJECTED[name]
    with pytest.raises(error, match=words):
        ops.linear_cross_entropy(hidden, weight, targets, **options)


def test_kernels_take_each_chunk_where_it_lies(interpreted):
    """Rows of the buffer are aligned: the gradient has the logits' own distance between rows."""
    launch = importlib.import_module("accelerant.ops.cross_entropy.launch")
    buffer = torch.randn(3, 64)
    logits = buffer[:, :9]
    expected = logits.clone().requires_grad_()
    targets = torch.tensor([0, 4, 8])
    functional.cross_entropy(expected, targets, reduction="sum").backward()
    rest = buffer[:, 9:].clone()
    launch.launch_rows(logits, 64, targets, -100, 0.0, dx=logits, dx_stride=64)
    torch.testing.assert_close(logits, expected.grad)
    assert torch.equal(buffer[:, 9:], rest)
