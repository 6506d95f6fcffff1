import importlib
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import check_beside, counted
from torch.nn import functional

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops.linear_gelu import _refuses, _refuses_epilogue, _torch_forward
from accelerant.runtime.dispatch import Case

launch = importlib.import_module("accelerant.ops.linear_gelu")

APPROXIMATE = pytest.mark.parametrize("approximate", ["none", "tanh"])


def theirs(x, weight, bias=None, approximate="none"):
    return functional.gelu(functional.linear(x, weight, bias), approximate=approximate)


def drawn(M, K, N, dtype=torch.float32):
    return [torch.randn(*shape).to(dtype) for shape in ((M, K), (N, K), (N,))]


def leaves(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.sample(5)
@pytest.mark.slow
@APPROXIMATE
@pytest.mark.parametrize("plan", [
    launch.GeluTile(16, 32, 16, 4, 2),
    launch.GeluTile(32, 16, 32, 4, 2, group=2, parts=2),
    launch.GeluTile(16, 16, 16, 4, 2, persistent=True, group=3),
    launch.GeluTile(64, 64, 64, 4, 2, persistent=True, parts=4),
], ids=str)  # fmt: skip
@pytest.mark.parametrize(("M", "K", "N"), [(50, 32, 70), (64, 40, 64), (3, 5, 90), (130, 17, 1)])
def test_any_plan_gives_the_same(plan, M, K, N, approximate, interpreted):
    x, weight, bias = drawn(M, K, N)
    y, z = launch.launch_forward(x, weight, bias, approximate, True, plan)
    torch.testing.assert_close(z, functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, theirs(x, weight, bias, approximate), rtol=1e-5, atol=1e-5)
    again, empty = launch.launch_forward(x, weight, None, approximate, False, plan)
    assert empty.numel() == 0
    torch.testing.assert_close(again, theirs(x, weight, None, approximate), rtol=1e-5, atol=1e-5)


@pytest.mark.sample(3)
@APPROXIMATE
@pytest.mark.parametrize(("M", "N"), [(1, 1), (300, 130), (17, 257)])
def test_bias_gradient_over_many_parts(M, N, approximate, interpreted, monkeypatch):
    monkeypatch.setattr(launch, "_MIN_SPAN", 16)
    monkeypatch.setattr(launch, "_MAX_PARTS", 7)
    dy, z = torch.randn(M, N), torch.randn(M, N, requires_grad=True)
    functional.gelu(z, approximate=approximate).backward(dy)
    dz, _, dbias = launch.launch_dz(dy, z.detach(), approximate, torch.float32)
    torch.testing.assert_close(dz, z.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dbias, z.grad.sum(0), rtol=1e-5, atol=1e-4)


def test_writes_no_intermediate_without_gradient(interpreted):
    x, weight, bias = drawn(6, 8, 5)
    with torch.no_grad():
        ops.linear_gelu(x, weight.requires_grad_(), bias)
    ops.linear_gelu(x, weight, bias)
    cases = [row["case"] for row in counted()]
    assert cases == ["6x5x8 float32 none bias", "6x5x8 float32 none bias keep"]


@pytest.mark.parametrize("needed", [False, True])
def test_torchs_gelu_is_in_place_unless_autograd_keeps_its_input(needed):
    x, weight = torch.randn(64, 32), torch.randn(256, 32, requires_grad=needed)
    y, z = _torch_forward(x, weight, None, "none", keep=False)
    assert (y.data_ptr() == z.data_ptr()) is not needed
    torch.testing.assert_close(y, functional.gelu(functional.linear(x, weight)), rtol=0, atol=0)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_only_the_gradient_that_is_needed(which, interpreted):
    tensors = drawn(6, 8, 5)
    tensors[which].requires_grad_()
    ops.linear_gelu(*tensors).sum().backward()
    others = leaves(*tensors)
    theirs(*others).sum().backward()
    torch.testing.assert_close(tensors[which].grad, others[which].grad)
    assert sum(row["calls"] for row in counted("linear_gelu_matmul")) == (which < 2)


@APPROXIMATE
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite(value, approximate, interpreted):
    x, weight, bias = drawn(6, 8, 5)
    bias[2] = value
    expected = theirs(x.double(), weight.double(), bias.double(), approximate)  # in float32 on the CPU gelu(inf) is NaN
    y = ops.linear_gelu(x, weight, bias, approximate)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@APPROXIMATE
def test_far_from_0(approximate, interpreted):
    x, weight, bias = drawn(6, 8, 5)
    x *= 1e6
    torch.testing.assert_close(
        ops.linear_gelu(x, weight, bias, approximate), theirs(x, weight, bias, approximate), rtol=1e-5, atol=1e-5
    )


def test_any_layout(interpreted):
    x, weight, bias = torch.randn(8, 6).t(), torch.randn(8, 10).t()[::2], torch.randn(10)[::2]
    check_beside(ops.linear_gelu, theirs, x, weight, bias, near=(1e-5, 1e-5), dy=torch.randn(6, 1).expand(6, 5))


def test_autocast():
    x, weight, bias = leaves(*drawn(6, 8, 5))
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.linear_gelu(x, weight, bias)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert {each.grad.dtype for each in (x, weight, bias)} == {torch.float32}


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    M=st.integers(1, 40),
    K=st.integers(1, 40),
    N=st.integers(1, 40),
    bias=st.booleans(),
    approximate=st.sampled_from(["none", "tanh"]),
)
def test_any_shape(M, K, N, bias, approximate):
    tensors = drawn(M, K, N)[: 3 if bias else 2]
    both = (partial(of, approximate=approximate) for of in (ops.linear_gelu, theirs))
    check_beside(*both, *tensors, near=(1e-4, 1e-4), slopes=(1e-4, 1e-4))


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(("dtype", "shape", "words"), [
    (torch.float64, (8, 8, 8), "computes in float32"), (torch.float32, (8, 8, 8), "left to the library"),
    (torch.bfloat16, (8, 8, 9), "rows of 9 elements"), (torch.bfloat16, (8, 9, 8), None),
])  # fmt: skip
def test_kernel_leaves_to_the_library(dtype, shape, words):
    reason = _refuses(Case(CUDA, dtype, shape))
    assert words in reason if words else reason is None


@pytest.mark.parametrize(("dtype", "options", "words"), [
    (torch.float32, ("tanh", "bias", ""), "does not take float32"),
    (torch.bfloat16, ("none", "bias", ""), "tanh approximation"),
    (torch.bfloat16, ("tanh", "", ""), "only with a bias"),
    (torch.bfloat16, ("tanh", "bias", "keep"), "pre-activation"),
    (torch.bfloat16, ("tanh", "bias", ""), None),
])  # fmt: skip
def test_epilogue_says_what_it_does_not_do(dtype, options, words):
    reason = _refuses_epilogue(Case(CUDA, dtype, (8, 8, 8), options))
    assert words in reason if words else reason is None
    assert _refuses_epilogue(Case(torch.device("cpu"), dtype, (8, 8, 8), options)) == "cuBLASLt is NVIDIA's"


X, WEIGHT, BIAS = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)
REJECTED = {
    "a scalar": ((torch.tensor(1.0), WEIGHT, BIAS), {}, ShapeError, "x must be .*, got a scalar"),
    "weight": ((X, WEIGHT.t(), BIAS), {}, ShapeError, r"weight must be \(N, 4\), got \(4, 5\)"),
    "bias": ((X, WEIGHT, BIAS[:4]), {}, ShapeError, r"bias must be \(5,\), got \(4,\)"),
    "integers": ((X.int(), WEIGHT, BIAS), {}, UnsupportedDtype, "x is int32"),
    "dtypes": (
        (X, WEIGHT, BIAS.half()),
        {},
        UnsupportedDtype,
        "x and bias must have one dtype, got float32 and float16",
    ),
    "devices": ((X, WEIGHT.to("meta"), BIAS), {}, ShapeError, "x and weight must be on one device, got cpu and meta"),
    "approximate": ((X, WEIGHT, BIAS), {"approximate": "erf"}, ConfigError, "got 'erf'"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejects(name):
    tensors, options, error, words = REJECTED[name]
    with pytest.raises(error, match=words):
        ops.linear_gelu(*tensors, **options)
