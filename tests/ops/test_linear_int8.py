import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops.linear_int8 import op as launch
from accelerant.ops.linear_int8.op import _integer_product, _refuses, _refuses_backward, linear_int8_reference
from accelerant.runtime.dispatch import Case, operations
from accelerant.runtime.ledger import ledger

DYNAMIC = pytest.mark.parametrize("dynamic", [False, True])


def integers(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def drawn(M, K, N, dtype=torch.float32):
    return torch.randn(M, K).to(dtype), integers(N, K), torch.rand(N) / 100, torch.randn(N).to(dtype)


def expected(x, weight, scale, bias=None, **options):
    wide = [None if each is None else each.double() for each in (x, scale, bias)]
    return linear_int8_reference(wide[0], weight, wide[1], wide[2], **options)


def close(y, reference, relative):
    assert (y.double() - reference).abs().max() <= relative * max(1e-30, reference.abs().max())


# --- weight alone ----------------------------------------------------------------------------------------------------
STRIPS = [
    launch.StripTile(1, 4, 16, 4, 2), launch.StripTile(2, 1, 32, 4, 3), launch.StripTile(4, 2, 16, 1, 1),
    launch.StripTile(2, 8, 64, 4, 1, stages=3),
]  # fmt: skip
TILES = [
    launch.Int8Tile(16, 32, 16, 4, 2),
    launch.Int8Tile(32, 16, 32, 4, 2, group=2),
    launch.Int8Tile(64, 64, 64, 4, 2),
]


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "M", "K", "N"),
    [(plan, *sizes) for plan in STRIPS for sizes in ((1, 128, 64), (1, 40, 7), (3, 5, 12))]
    + [(plan, *sizes) for plan in TILES for sizes in ((1, 40, 7), (3, 5, 90), (50, 70, 33))],
    ids=str,
)
def test_any_plan_gives_the_same(plan, M, K, N, interpreted):
    x, weight, scale, bias = drawn(M, K, N)
    y = launch.launch_forward(x, weight, scale, bias, plan=plan)
    close(y, expected(x, weight, scale, bias), 1e-6)
    bare = launch.launch_forward(x.half(), weight, None, None, wide=True, plan=plan)
    assert bare.dtype == torch.float32
    close(bare, x.half().double() @ weight.double().T, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("plan", TILES, ids=str)
@pytest.mark.parametrize(("M", "K", "N"), [(1, 9, 1), (50, 70, 33), (17, 16, 130)])
def test_any_plan_gives_the_same_gradient(plan, M, K, N, interpreted):
    _, weight, scale, _ = drawn(M, K, N)
    dy = torch.randn(M, N)
    close(launch.launch_dx(dy, weight, scale, plan), dy.double() @ (weight * scale.double()[:, None]), 1e-6)


@pytest.mark.sample(3)
@pytest.mark.parametrize("parts", [1, 2, 5, 99])
@pytest.mark.parametrize(("M", "K", "N"), [(1, 40, 70), (16, 33, 160), (3, 16, 5), (2, 8, 0)])
def test_any_parts_give_the_same_gradient(parts, M, K, N, interpreted):
    """Of the sum over the outputs: the last may be shorter, and there may be more than the outputs fill."""
    _, weight, scale, _ = drawn(M, K, N)
    dy = torch.randn(M, N)
    found = launch.launch_dx(dy, weight, scale, launch.Int8Tile(16, 16, 32, 4, 2), parts)
    torch.testing.assert_close(found.double(), dy.double() @ (weight * scale.double()[:, None]), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_float32_has_its_accuracy_and_keeps_what_is_not_finite(interpreted):
    _, weight, scale, _ = drawn(4, 40, 70)
    dy = torch.randn(4, 70)
    dy[1, 3], dy[2, 3], weight[3] = torch.inf, torch.nan, 5
    found, wanted = launch.launch_dx(dy, weight, scale), dy @ (weight * scale[:, None])
    exact = dy.double() @ (weight * scale.double()[:, None])
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert (found - exact)[[0, 3]].abs().max() <= 2 * (wanted - exact)[[0, 3]].abs().max()


def test_few_rows_have_enough_programs():
    plan = launch.FEW_BACKWARD_PLANS[0]
    for N, K in ((8192, 8192), (14336, 4096), (4096, 14336)):
        tiles = -(-K // plan.block_k)
        parts = launch._parts(1, N, tiles, plan)
        assert 192 <= tiles * parts <= 256
        assert parts * 4 * plan.block_n <= N
    assert launch._parts(17, 8192, 64, plan) == launch._parts(1, 8, 64, plan) == 1


@pytest.mark.parametrize("rows", [1, 4])
def test_every_integer_is_itself(rows, interpreted):
    """-128 too, which quantize_int8 does not make."""
    weight = torch.arange(-128, 128, dtype=torch.int8).repeat(2, 1)
    x = torch.eye(256)[torch.tensor([[0, 127, 128, 255]]).T.flatten()[:rows]]
    y = ops.linear_int8(x, weight, torch.ones(2))
    assert torch.equal(y, weight.float().T[x.argmax(1)])


@pytest.mark.parametrize("implementation", ["triton", "torch"])
@DYNAMIC
def test_large_sums_do_not_overflow_in_float16(dynamic, implementation, interpreted):
    x, weight = torch.full((1, 512), 60.0).half(), torch.full((3, 512), 127, dtype=torch.int8)
    y = operations()["linear_int8_fwd"].run(implementation, x, weight, torch.full((3,), 1e-3), None, dynamic)
    close(y, torch.full((1, 3), 60.0 * 127 * 512 * 1e-3, dtype=torch.float64), 2e-3)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite(rows, value, interpreted):
    x, weight, scale, bias = drawn(rows, 40, 6)
    weight[:, 3] = torch.tensor([1, 2, -3, 4, 5, -6])
    x[-1, 3] = value
    y = ops.linear_int8(x, weight, scale, bias)
    torch.testing.assert_close(y.double(), expected(x, weight, scale, bias), equal_nan=True, rtol=1e-5, atol=1e-5)


def test_both_dtypes_of_scale_and_bias(interpreted):
    x, weight, scale, bias = drawn(3, 40, 6, torch.bfloat16)
    for s in (scale, scale.bfloat16()):
        for b in (bias, bias.float(), None):
            y = ops.linear_int8(x, weight, s, b)
            assert y.dtype == torch.bfloat16
            close(y, expected(x, weight, s, b), 8e-3)


def test_quantized_linear_is_close_to_the_linear(interpreted):
    x, weight, bias = torch.randn(4, 300), torch.randn(200, 300), torch.randn(200)
    q, scale = ops.quantize_int8(weight)
    y = functional.linear(x, weight, bias)
    for dynamic in (False, True):
        error = ops.linear_int8(x, q, scale, bias, dynamic=dynamic) - y
        assert error.norm() < 0.02 * y.norm()


# --- integers alone --------------------------------------------------------------------------------------------------
@pytest.mark.sample(5, 3)
@pytest.mark.parametrize("plan", [*TILES, launch.Int8Tile(16, 16, 128, 4, 2)], ids=str)
@pytest.mark.parametrize("cores", [True, False])
@pytest.mark.parametrize(("M", "K", "N"), [(1, 128, 64), (50, 70, 33), (17, 1000, 20)])
def test_integer_sums_are_exact(plan, cores, M, K, N, interpreted, monkeypatch):
    monkeypatch.setattr(launch, "integer_cores", lambda device: cores)
    q, weight = integers(M, K), integers(N, K)
    sums = q.int() @ weight.int().T
    assert sums.abs().max() < 2**24
    ones = torch.ones(M), torch.ones(N)
    y = launch.launch_dynamic(q, ones[0], weight, ones[1], None, torch.float32, plan)
    assert torch.equal(y.int(), sums)
    bias = torch.arange(N).float()
    y = launch.launch_dynamic(q, ones[0] * 2, weight, ones[1] / 4, bias, torch.float32, plan)
    assert torch.equal(y, sums / 2 + bias)


@pytest.mark.parametrize("implementation", ["triton", "torch"])
def test_largest_sums_are_exact(implementation, interpreted):
    """Beyond 2^24, where float32 sums would lose the last bits."""
    K = 4097
    x = torch.full((20, K), 127.0)
    x[:, 0] = torch.arange(20)
    weight = torch.full((3, K), 127, dtype=torch.int8)
    weight[1], weight[2, ::2] = -127, 126
    y = operations()["linear_int8_fwd"].run(implementation, x.double().float(), weight, torch.ones(3), None, True)
    sums = x.int() @ weight.int().T
    assert sums.abs().max() > 2**24
    assert torch.equal(y, sums.float())
    assert torch.equal(_integer_product(x.to(torch.int8), weight), sums)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("M", "K", "N"), [(1, 33, 5), (40, 64, 48), (3, 0, 4), (0, 4, 5), (4, 3, 0)])
def test_dynamic_by_both_implementations(M, K, N, dtype, interpreted):
    x, weight, scale, bias = drawn(M, K, N, dtype)
    q, x_scale = ops.quantize_int8(x)
    sums = (q.long() @ weight.long().T).double()
    wanted = sums * x_scale.double()[:, None] * scale.double() + bias.double()
    found = [operations()["linear_int8_fwd"].run(name, x, weight, scale, bias, True) for name in ("triton", "torch")]
    for y in found:
        assert (y.dtype, y.shape) == (dtype, (M, N))
        if y.numel():
            close(y, wanted, {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype])


def test_dynamic_row_that_is_not_finite(interpreted):
    x, weight, scale, bias = drawn(3, 40, 6)
    x[1, 5] = math.inf
    y = ops.linear_int8(x, weight, scale, bias, dynamic=True)
    assert y[1].isnan().all()
    close(y[::2], expected(x[::2], weight, scale, bias, dynamic=True), 1e-6)


def test_dynamic_in_float64(uninterpreted):
    x, weight, scale, bias = drawn(5, 40, 6)
    y = ops.linear_int8(x.double(), weight, scale.double(), bias.double(), dynamic=True)
    assert y.dtype == torch.float64
    close(y, expected(x, weight, scale, bias, dynamic=True), 1e-6)


# --- gradients -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("create_graph", [False, True])
@DYNAMIC
@pytest.mark.parametrize("which", [0, 1, 2])
def test_only_the_gradient_that_is_needed(which, dynamic, create_graph, interpreted):
    x, weight, scale, bias = drawn(6, 8, 5)
    leaf = (x, scale, bias)[which].requires_grad_()
    dy = torch.randn(6, 5)
    y = ops.linear_int8(x, weight, scale, bias, dynamic=dynamic)
    (found,) = torch.autograd.grad(y, leaf, dy, create_graph=create_graph)
    d = dy.double()
    wanted = (
        d @ (weight * scale.double()[:, None]),
        (d * (x.double() @ weight.double().T)).sum(0),
        d.sum(0),
    )[which].detach()
    torch.testing.assert_close(found.double().detach(), wanted, rtol=1e-5, atol=1e-5)
    rows = {row["op"]: row["case"] for row in ledger().to_dict()["ops"]}
    assert create_graph or rows["linear_int8_bwd"] == f"6x5x8 float32 {('x', 'scale', 'bias')[which]}"


def test_keeps_no_input_without_need(interpreted):
    x, weight, scale, bias = drawn(6, 8, 5)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        ops.linear_int8(x.requires_grad_(), weight, scale, bias)
        assert (6, 8) not in saved
        ops.linear_int8(x, weight, scale.requires_grad_(), bias)
        assert (6, 8) in saved


@pytest.mark.slow
@DYNAMIC
def test_compiles_with_a_gradient_for_x_alone(dynamic, interpreted):
    x, weight, scale, bias = drawn(6, 8, 5)
    one, other = (x.clone().requires_grad_() for _ in range(2))
    call = torch.compile(
        lambda x: ops.linear_int8(x, weight, scale, bias, dynamic=dynamic), fullgraph=True, backend="aot_eager"
    )
    y, z = call(one), ops.linear_int8(other, weight, scale, bias, dynamic=dynamic)
    torch.testing.assert_close(y, z)
    y.square().sum().backward()
    z.square().sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


def test_dynamic_under_transforms():
    x, weight, scale, bias = drawn(6, 8, 5)

    def call(x):
        return ops.linear_int8(x, weight, scale, bias, dynamic=True)

    torch.testing.assert_close(torch.func.vmap(call)(x[:, None])[:, 0], call(x), rtol=1e-5, atol=1e-5)
    tangent = torch.randn(6, 8)
    _, dy = torch.func.jvp(call, (x,), (tangent,))
    torch.testing.assert_close(dy, tangent @ (weight * scale[:, None]).T, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@DYNAMIC
def test_opcheck(dynamic):
    x, weight, scale, bias = drawn(3, 8, 5)
    op = torch.ops.accelerant.linear_int8.default
    for args in ((x.requires_grad_(), weight, scale, bias, dynamic), (x.detach(), weight, scale, None, dynamic)):
        assert set(torch.library.opcheck(op, args).values()) == {"SUCCESS"}
    backward = torch.ops.accelerant.linear_int8_backward.default
    args = (torch.randn(3, 5), None, weight, scale, None, dynamic, [True, False, False])
    assert set(torch.library.opcheck(backward, args).values()) == {"SUCCESS"}


# --- inputs ----------------------------------------------------------------------------------------------------------
@DYNAMIC
def test_any_layout(dynamic, interpreted):
    x, weight = torch.randn(8, 6).t(), integers(8, 10).t()[::2]
    scale, bias = torch.rand(10)[::2], torch.randn(10)[::2]
    y = ops.linear_int8(x, weight, scale, bias, dynamic=dynamic)
    close(y, expected(x, weight, scale, bias, dynamic=dynamic), 1e-6)


@DYNAMIC
def test_autocast(dynamic, interpreted):
    x, weight, scale, bias = drawn(6, 8, 5)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.linear_int8(x.requires_grad_(), weight, scale, bias, dynamic=dynamic)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32


@settings(max_examples=12, deadline=None)
@given(M=st.integers(1, 40), K=st.integers(1, 80), N=st.integers(1, 40), bias=st.booleans(), dynamic=st.booleans())
def test_any_shape(M, K, N, bias, dynamic):
    x, weight, scale, b = drawn(M, K, N)
    b = b if bias else None
    y = ops.linear_int8(x, weight, scale, b, dynamic=dynamic)
    torch.testing.assert_close(y.double(), expected(x, weight, scale, b, dynamic=dynamic), rtol=1e-5, atol=1e-4)


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(("refuses", "dtype", "shape", "options", "words"), [
    (_refuses, torch.float64, (8, 8, 16), (), "computes in float32"),
    (_refuses, torch.float32, (17, 8, 16), (), "left to the library"),
    (_refuses, torch.bfloat16, (8, 8, 24), (), "rows of 24 integers"),
    (_refuses, torch.bfloat16, (513, 8, 16), (), "more than 512 rows"),
    (_refuses, torch.bfloat16, (513, 8, 16), ("dynamic",), None),
    (_refuses, torch.float32, (1, 8, 16), (), None),
    (_refuses, torch.bfloat16, (512, 8, 16), (), None),
    (_refuses_backward, torch.float64, (8, 8, 16), (), "computes in float32"),
    (_refuses_backward, torch.float32, (17, 8, 16), (), "left to the library"),
    (_refuses_backward, torch.bfloat16, (513, 8, 16), (), "more than 512 rows"),
    (_refuses_backward, torch.bfloat16, (512, 8, 16), (), None),
])  # fmt: skip
def test_kernel_leaves_to_the_library(refuses, dtype, shape, options, words):
    reason = refuses(Case(CUDA, dtype, shape, options))
    assert words in reason if words else reason is None


X, WEIGHT, SCALE, BIAS = torch.ones(3, 4), integers(5, 4), torch.ones(5), torch.ones(5)
LONG = (torch.ones(1, 132105), torch.ones(1, 132105, dtype=torch.int8), torch.ones(1))
REJECTED = {
    "a scalar": ((torch.tensor(1.0), WEIGHT, SCALE), {}, ShapeError, "x must be .*, got a scalar"),
    "weight": ((X, integers(4, 5), SCALE), {}, ShapeError, r"weight must be \(N, 4\), got \(4, 5\)"),
    "scale": ((X, WEIGHT, SCALE[:4]), {}, ShapeError, r"scale must be \(5,\), got \(4,\)"),
    "bias": ((X, WEIGHT, SCALE, BIAS[None]), {}, ShapeError, r"bias must be \(5,\), got \(1, 5\)"),
    "integers": ((X.int(), WEIGHT, SCALE), {}, UnsupportedDtype, "x is int32"),
    "floating weight": ((X, WEIGHT.float(), SCALE), {}, UnsupportedDtype, "weight must be int8, got float32"),
    "dtype of scale": ((X, WEIGHT, SCALE.half()), {}, UnsupportedDtype, "scale must be float32; got float16"),
    "dtype of bias": (
        (X.half(), WEIGHT, SCALE, BIAS.bfloat16()), {}, UnsupportedDtype, "must be float32 or float16; got bfloat16"
    ),
    "devices": ((X, WEIGHT, SCALE.to("meta")), {}, ShapeError, "x and scale must be on one device, got cpu and meta"),
    "device of weight": (
        (X, WEIGHT.to("meta"), SCALE), {}, ShapeError, "x and weight must be on one device, got cpu and meta"
    ),
    "no scale": ((X, WEIGHT, None), {}, TypeError, "scale is a NoneType"),
    "too long": (LONG, {"dynamic": True}, ShapeError, "at most 132104 products in int32, got 132105"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_rejects(name):
    tensors, options, error, words = REJECTED[name]
    with pytest.raises(error, match=words):
        ops.linear_int8(*tensors, **options)
