"""What is WebGPU's own in the aten table: functions that WGSL lacks, narrow dtypes, int64, and products."""

import math

import numpy as np
import pytest
import torch

import accelerant as acl
from accelerant.config import override
from accelerant.errors import UnsupportedDtype
from accelerant.tensors.tensor import tensor_device
from accelerant.tensors.webgpu import matmul_source
from requirements import require_backend

EDGES = [0.0, -0.0, 1e-30, 1e-4, -0.29, 0.3, 0.31, 1.0, -1.0, 2.5, -2.5, 3.0, 8.0, -20.0, 90.0, -1e4, 3e38]
ENDS = [math.inf, -math.inf, math.nan]


@pytest.fixture
def place():
    return tensor_device(require_backend("webgpu"))


def computed(place, expression, *values, dtype=torch.float32, result=None, integers=(), count=None):
    tensors = [place.upload(torch.tensor(each, dtype=dtype)) for each in values]
    out = place.empty((count or len(values[0]),), result or dtype)
    place.map(out, expression, tensors, (), integers, compute=dtype)
    return out.cpu()


@pytest.mark.parametrize(
    ("expression", "reference"),
    [("tanh(x0)", torch.tanh), ("erf(x0)", torch.erf), ("rint(x0)", torch.round), ("abs(x0)", torch.abs)],
)
def test_functions_of_one_value(place, expression, reference):
    x = [*EDGES, *np.linspace(-5, 5, 101).tolist()] + ([math.nan] if "tanh" not in expression else [])
    expected = reference(torch.tensor(x, dtype=torch.float32).double()).float()
    torch.testing.assert_close(computed(place, expression, x), expected, rtol=1e-6, atol=4e-7, equal_nan=True)


@pytest.mark.parametrize(("expression", "reference"), [
    ("max(x0, x1)", torch.maximum), ("min(x0, x1)", torch.minimum), ("rem_floor(x0, x1)", torch.remainder),
    ("div_floor(x0, x1)", torch.floor_divide),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_functions_of_two_values(place, expression, reference, dtype):
    some = [-7, -3, -1, 1, 2, 5, 100] if dtype == torch.int32 else [-7.5, -3.0, -0.5, 1.0, 2.25, 100.0]
    some += [math.nan] * (dtype == torch.float32)
    pairs = [(a, b) for a in some for b in some]
    x, y = ([pair[at] for pair in pairs] for at in range(2))
    expected = reference(torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype))
    torch.testing.assert_close(computed(place, expression, x, y, dtype=dtype), expected, equal_nan=True)


def test_powers(place):
    bases, exponents = [-2.0, -1.0, 0.0, 0.5, 1.0, 3.0, math.nan], [-3.0, -0.5, 0.0, 0.5, 2.0, 5.0]
    pairs = [(a, b) for a in bases for b in exponents]
    x, y = ([pair[at] for pair in pairs] for at in range(2))
    expected = torch.pow(torch.tensor(x), torch.tensor(y))
    torch.testing.assert_close(computed(place, "pow(x0, x1)", x, y), expected, equal_nan=True)


def test_nan_and_infinity_are_told_by_their_bits(place):
    x = [*EDGES, *ENDS]
    host = torch.tensor(x)
    for name in ("isnan", "isinf"):
        found = computed(place, f"is_{name[2:]}(x0)", x, result=torch.bool)
        assert found.tolist() == getattr(torch, name)(host).tolist()
    moved = acl.to(host.reshape(4, 5), "webgpu")
    assert torch.equal(moved.max(dim=1).values.cpu().isnan(), host.reshape(4, 5).max(dim=1).values.isnan())
    assert moved.argmax(1).tolist() == host.reshape(4, 5).argmax(1).tolist()


def test_random_values_are_those_of_philox(place):
    """Salmon et al.: the known answer for counter and key of zeros, and uniform's 24 bits of it."""
    found = computed(place, "uniform(i, n0, n1)", count=1, integers=(0, 0))
    assert found.item() == (0x6627E8D5 >> 8) * 2.0**-24
    many = computed(place, "normal(i, n0, n1)", count=4000, integers=(7, 9))
    assert abs(many.mean()) < 4 / math.sqrt(4000)
    assert abs(many.std() - 1) < 4 / math.sqrt(2 * 4000)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16])
def test_elements_that_share_a_word(place, dtype):
    """Written one by one through views, beside others that stay."""
    host = torch.arange(24).remainder(5).to(dtype).reshape(4, 6)
    moved = acl.to(host.clone(), "webgpu")
    for x in (host, moved):
        x[1:, 1::2] = 1
        x[:, 3] = x[:, 0]
        x.t()[5, ::3] = 0
    assert torch.equal(moved.cpu(), host)
    index = torch.tensor([[3, 0, 5, 1], [2, 2, 4, 0]])
    source = torch.ones(2, 4, dtype=dtype)
    if dtype != torch.bool:
        host.scatter_add_(1, index, source)
        moved.scatter_add_(1, acl.to(index, "webgpu"), acl.to(source, "webgpu"))
    assert torch.equal(moved.cpu(), host)


def test_rounding_to_bfloat16_is_to_even(place):
    x = torch.tensor([1.0, 1.00390625, 1.01171875, 1e-40, 3.4e38, math.inf, math.nan, -2.7182818])
    found = acl.to(x, "webgpu").bfloat16().cpu()
    torch.testing.assert_close(found, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


BIG = [0, 1, -1, 7, -8, 2**31, -(2**31), 2**32, 2**40 + 3, -(2**45) + 1, 2**62 + 12345, -(2**62), 2**63 - 1, -(2**63)]


@pytest.mark.parametrize(("expression", "function"), [
    ("x0 + x1 * 3 - 5", lambda x, y: x + y * 3 - 5),
    ("-x0 * x1", lambda x, y: -x * y),
    ("div_trunc(x0, x1)", lambda x, y: torch.div(x, y, rounding_mode="trunc")),
    ("div_floor(x0, x1)", torch.floor_divide),
    ("rem_floor(x0, x1)", torch.remainder),
    ("select(min(x0, x1), abs(x0), x0 > x1)", lambda x, y: torch.where(x > y, x.abs(), torch.minimum(x, y))),
    ("(~x0 & x1) | (x0 ^ 77)", lambda x, y: (~x & y) | (x ^ 77)),
    ("max(x0, x1)", torch.maximum),
])  # fmt: skip
def test_int64_is_exact_in_all_its_bits(place, expression, function):
    pairs = [(a, b) for a in BIG for b in BIG if b or ("div" not in expression and "rem" not in expression)]
    pairs = [pair for pair in pairs if pair != (-(2**63), -1)]  # whose quotient C++ leaves open
    x, y = ([pair[at] for pair in pairs] for at in range(2))
    expected = function(torch.tensor(x), torch.tensor(y))
    assert computed(place, expression, x, y, dtype=torch.int64).tolist() == expected.tolist()


@pytest.mark.parametrize("sign", ["==", "!=", "<", "<=", ">", ">="])
def test_comparisons_of_int64(place, sign):
    pairs = [(a, b) for a in BIG for b in BIG]
    x, y = ([pair[at] for pair in pairs] for at in range(2))
    found = computed(place, f"x0 {sign} x1", x, y, dtype=torch.int64, result=torch.bool)
    assert found.tolist() == [eval(f"a {sign} b", {"a": a, "b": b}) for a, b in pairs]


def test_conversions_and_sums_of_int64(place):
    host = torch.tensor(BIG[:12])
    moved = acl.to(host, "webgpu")
    with override(fallback="forbid"):
        assert moved.sum().item() == sum(BIG[:12])
        assert (moved.amax().item(), moved.argmin().item()) == (max(BIG[:12]), host.argmin().item())
        torch.testing.assert_close(moved.float().cpu(), host.float(), rtol=2e-7, atol=0)
        assert torch.equal(moved.int().cpu(), host.int())
        assert torch.equal(moved.bool().cpu(), host.bool())
        floats = torch.tensor([0.0, -0.9, 1.5, -3e9, 2.0**40, -(2.0**62)])
        assert torch.equal(acl.to(floats, "webgpu").long().cpu(), floats.long())
        a, b = torch.randint(-(2**33), 2**33, (3, 4)), torch.randint(-(2**28), 2**28, (4, 2))
        assert torch.equal((acl.to(a, "webgpu") @ acl.to(b, "webgpu")).cpu(), a @ b)


def test_double_precision_is_refused(place):
    with pytest.raises(UnsupportedDtype, match=r"webgpu:0 has no tensors of torch\.float64"):
        acl.to(torch.ones(2, dtype=torch.float64), "webgpu")


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 5, 17, 3), (1, 70, 33, 65), (1, 2, 20_000, 1)])
def test_both_kernels_of_products(place, shape):
    """The tiled one that GPUs run, and the one for CPUs; with transposed operands and a result within a larger one."""
    batch, rows, inner, columns = shape
    a, b = torch.randn(batch, inner, rows).transpose(1, 2), torch.randn(batch, inner, columns)
    if inner > 1000:
        a, b = torch.full_like(a, 0.1), torch.full_like(b, 0.1)
    expected = a.double() @ b.double()
    x0, x1 = (acl.to(each, "webgpu") for each in (a, b))
    for is_cpu in (True, False):
        whole = acl.to(torch.full((batch, rows + 1, columns + 2), 7.0), "webgpu")
        out = whole[:, 1:, 1:-1]
        kernel = place.provider.compile(matmul_source(), entry="matmul_blocked" if is_cpu else "matmul")
        place._kernels["matmul_blocked" if is_cpu else "matmul"] = kernel
        known, place.is_cpu = place.is_cpu, is_cpu
        try:
            place.matmul(out, x0, x1)
        finally:
            place.is_cpu = known
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1.5e-6 if inner > 1000 else 1e-5, atol=1e-5)
        frame = whole.cpu()
        assert (frame[:, 0] == 7).all()
        assert (frame[:, :, [0, -1]] == 7).all()


def test_long_rows_are_reduced_by_several_threads(place, monkeypatch):
    monkeypatch.setattr(place, "is_cpu", False)
    x = torch.randn(3, 1000)
    moved = acl.to(x, "webgpu")
    torch.testing.assert_close(moved.sum(1).cpu(), x.double().sum(1).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(moved.amax(1).cpu(), x.amax(1))
    assert torch.equal(moved.amin().cpu(), x.amin())


def test_tensors_above_the_binding_limit(place, monkeypatch):
    opened = place.provider._devices[0]
    x, y, index = torch.randn(40, 100), torch.randn(40, 100), torch.randint(40, (90, 100))
    a, b, at = acl.to(x, "webgpu"), acl.to(y, "webgpu"), acl.to(index, "webgpu")
    for each in (opened, place):
        monkeypatch.setattr(each, "binding_bytes", 4096)
    calls = {
        "elementwise": lambda x, y, at: (x + y, x > y, x.t() * y.reshape(100, 40), x + y[:1]),
        "by the place of an element": lambda x, y, at: (x.reshape(100, 40).tril(), x.tril(3)),
        "reductions": lambda x, y, at: (x.sum(0), x.amax(1), x.std(), (x > y).any(), x.argmax(1), x.logsumexp(1)),
        "products": lambda x, y, at: (x @ y.t(), x.t() @ y, y.t().contiguous().t() @ x.t(), x[:, :50] @ y[:, 50:].t()),
        "gather": lambda x, y, at: (x.gather(0, at), x[at[0]], x.t()[:, at[0]], y.gather(0, at[:7, 3:9])),
        "scatter": lambda x, y, at: (
            x.new_zeros(40, 100).scatter_add_(0, at, x.repeat(3, 1)[:90]), x.index_add(0, at[0], y.repeat(3, 1)[:100]),
        ),
        "copies": lambda x, y, at: (torch.cat([x, y], 1), x.half(), x.long(), x.t().contiguous(), at[::2, ::3].clone()),
    }  # fmt: skip
    with override(fallback="forbid"):
        for function in calls.values():
            for found, expected in zip(function(a, b, at), function(x, y, index), strict=True):
                torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-4)
        torch.manual_seed(1)
        parts = torch.empty_like(a).uniform_()
        for each in (opened, place):
            monkeypatch.setattr(each, "binding_bytes", 1 << 20)
        torch.manual_seed(1)
        assert torch.equal(parts.cpu(), torch.empty_like(a).uniform_().cpu())
        with pytest.raises(IndexError, match="index 40 is out of bounds for a dimension of size 40"):
            a[acl.to(torch.tensor([40]), "webgpu")].cpu()


F = torch.nn.functional
NEURAL = {
    "linear": (lambda x, w, b: F.linear(x, w, b), [(2, 5, 7), (3, 7), (3,)]),
    "softmax": (lambda x: x.softmax(1), [(3, 4, 5)]),
    "log_softmax": (lambda x: x.log_softmax(-1), [(3, 70)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [(2, 3, 6), (6,), (6,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), [(4, 6), (6,)]),
    "gelu": (F.gelu, [(33,)]),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), [(33,)]),
    "attention": (F.scaled_dot_product_attention, [(2, 3, 5, 4)] * 3),
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(1, 2, 6, 4)] * 3),
    "ours": (lambda q, k, v: acl.ops.attention(q, k, v, causal=True), [(1, 2, 6, 4)] * 3),
}


@pytest.mark.parametrize("name", NEURAL)
def test_results_and_gradients_of_neural_operations(place, name):
    function, shapes = NEURAL[name]
    torch.manual_seed(3)
    hosts = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    moved = [acl.to(x.detach().float(), "webgpu").requires_grad_() for x in hosts]
    expected = function(*hosts)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    with override(fallback="forbid"):
        y = function(*moved)
        y.backward(acl.to(dy.float(), "webgpu"))
    torch.testing.assert_close(y.detach().cpu(), expected.detach().float(), rtol=1e-5, atol=2e-6)
    for x, reference in zip(moved, hosts, strict=True):
        torch.testing.assert_close(x.grad.cpu(), reference.grad.float(), rtol=1e-5, atol=5e-6)
