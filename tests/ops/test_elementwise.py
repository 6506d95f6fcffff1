import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import check_beside, compiled_into, counted, ran

from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedDtype

UNARY = {"relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "silu": torch.nn.functional.silu}
PAIR = {"add": torch.add, "mul": torch.mul}
WITH_GELU = {**UNARY, "gelu": torch._C._nn.gelu}
EACH_AND_GELU = pytest.mark.parametrize("op", WITH_GELU)
BOTH = pytest.mark.parametrize("op", PAIR)
X = torch.ones(3)


# --- of one tensor ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", UNARY)
def test_ends_as_torch(op, interpreted):
    x = torch.tensor([0.0, -0.0, 1e-30, 30.0, -30.0, 200.0, -200.0, 3e38, -3e38, math.inf, -math.inf, math.nan])
    leaf, same = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = getattr(ops, op)(leaf), UNARY[op](same)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-30, equal_nan=True)
    y.backward(torch.ones_like(y))
    expected.backward(torch.ones_like(y))
    torch.testing.assert_close(leaf.grad, same.grad, rtol=1e-5, atol=1e-12, equal_nan=True)
    assert ran(f"{op}_fwd") | ran(f"{op}_bwd") == {"triton"}


def test_relu_lets_no_gradient_through_where_it_is_0(interpreted):
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    ops.relu(x).backward(torch.tensor([math.nan, math.inf]))
    assert x.grad.tolist() == [0.0, math.inf]


def test_tanh_is_as_exact_for_small_numbers_as_for_large(interpreted):
    x = torch.cat([torch.logspace(-30, 1, 2000), torch.linspace(0.55, 0.65, 1000)])
    x = torch.cat([x, -x])
    exact = torch.tanh(x.double())
    assert ((ops.tanh(x) - exact).abs() / exact.abs()).max() < 4e-7


@pytest.mark.sample(3)
@EACH_AND_GELU
@pytest.mark.parametrize("n", [1023, 1024, 1025, 3 * 1024 + 1])
def test_around_a_block(op, n, interpreted):
    check_beside(getattr(ops, op), WITH_GELU[op], torch.randn(n), near=(2e-6, 1e-6), slopes=(2e-6, 2e-6))


LAYOUTS = {
    "transposed": lambda: torch.randn(5, 7).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every second": lambda: torch.randn(6, 8)[:, ::2],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "part of a row": lambda: torch.randn(6, 8)[1:5, 3:6],
}


@EACH_AND_GELU
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(op, layout, interpreted):
    x = LAYOUTS[layout]().requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, expected = getattr(ops, op)(x), WITH_GELU[op](wide)
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=1e-6)
    assert y.stride() == expected.stride()
    dy = torch.randn(x.shape[::-1]).permute(*range(x.dim() - 1, -1, -1))  # a layout of its own
    (dx,), gradients = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, wide, dy.double())
    torch.testing.assert_close(dx.double(), *gradients, rtol=2e-6, atol=2e-6)


@EACH_AND_GELU
def test_is_torchs_own_under_compile(op):
    assert compiled_into(getattr(ops, op), torch.randn(3)) == [WITH_GELU[op]]


@EACH_AND_GELU
def test_refuses_integers(op):
    with pytest.raises(UnsupportedDtype, match=f"{op} takes bfloat16, float16, float32, float64; x is int32"):
        getattr(ops, op)(torch.ones(3, dtype=torch.int32))


# --- of two tensors --------------------------------------------------------------------------------------------------
def steps(y):
    """The strides that matter."""
    return [stride for size, stride in zip(y.shape, y.stride(), strict=True) if size > 1 and y.numel()]


def against_torch(op, a, b, tolerance=2e-6):
    """Values, layout and gradients are torch's."""
    y, expected = check_beside(getattr(ops, op), PAIR[op], a, b, near=(0, 0), slopes=(tolerance, tolerance))
    assert steps(y) == steps(expected)


BROADCASTS = [
    ((3, 1), (3, 5)), ((3, 1), (1, 5)), ((2, 3, 4), (3, 1)), ((2, 3, 4), ()), ((), (3,)), ((5,), (1, 5)),
    ((3, 5), (1,)), ((2, 1, 4), (3, 4)), ((0, 1), (1, 3)),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize(("a", "b"), BROADCASTS, ids=str)
def test_other_broadcasts_are_torchs(op, a, b, interpreted):
    against_torch(op, torch.randn(a), torch.randn(b))


@BOTH
def test_the_ledger_says_why(op, interpreted):
    f = getattr(ops, op)
    f(torch.randn(3, 1), torch.randn(1, 5))
    f(torch.randn(3, 5), 2)
    f(torch.randn(3, 5), torch.randn(5, 3).t())
    rows = counted(f"{op}_fwd")
    assert [row["implementation"] for row in rows] == ["torch"] * 3
    reasons = str([row["refused"] for row in rows])
    for words in ("has a kernel for a row of the other tensor", "takes two tensors", "dense tensors of one layout"):
        assert words in reasons


@BOTH
@pytest.mark.parametrize(
    ("a", "b"),
    [((6, 5), (5,)), ((5,), (6, 5)), ((2, 3, 4), (3, 4)), ((2, 3, 4), (1, 3, 4)), ((2, 3, 1), (3, 1)), ((1, 5), (5,))],
    ids=str,
)
def test_rows_are_ours(op, a, b, interpreted):
    against_torch(op, torch.randn(a), torch.randn(b))
    assert ran(f"{op}_fwd") | ran(f"{op}_bwd") == {"triton"}


@settings(max_examples=25, deadline=None)
@given(shape=st.lists(st.integers(0, 6), max_size=3), data=st.data())
def test_any_shapes_that_broadcast(shape, data):
    other = [data.draw(st.sampled_from([1, size])) for size in shape][data.draw(st.integers(0, len(shape))) :]
    pair = [torch.randn(shape), torch.randn(other)]
    if data.draw(st.booleans()):
        pair.reverse()
    for op in PAIR:
        against_torch(op, *pair)


@pytest.mark.sample(7)
@BOTH
@pytest.mark.parametrize(("M", "N"), [(256, 3), (257, 3), (1000, 40), (270, 513), (2, 1025)])
@pytest.mark.slow
def test_sums_over_many_rows(op, M, N, interpreted):
    against_torch(op, torch.randn(M, N), torch.randn(N), tolerance=1e-4)


@BOTH
def test_only_one_gradient(op, interpreted):
    for shape in ((3, 5), (5,)):
        a, b = torch.randn(3, 5), torch.randn(shape)
        for wanted, other in ((a, b), (b, a)):
            y = getattr(ops, op)(wanted.requires_grad_(), other)
            (slope,) = torch.autograd.grad(y, wanted, torch.ones_like(y))
            expected = torch.ones(3, 5) if op == "add" else other.expand(3, 5)
            torch.testing.assert_close(slope, expected.sum_to_size(wanted.shape))
            wanted.requires_grad_(False)


@BOTH
def test_numbers(op):
    x = torch.randn(3, 4, requires_grad=True)
    for number in (2, -0.5, True, math.inf, math.nan):
        y = getattr(ops, op)(x, number)
        torch.testing.assert_close(y, PAIR[op](x, number), rtol=0, atol=0, equal_nan=True)
    (slope,) = torch.autograd.grad(getattr(ops, op)(x, 3).sum(), x)
    assert slope.unique().tolist() == [1.0 if op == "add" else 3.0]
    exact = x.detach().double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: getattr(ops, op)(x, 0.1), exact)
    low = getattr(ops, op)(x.detach().bfloat16(), 0.1)
    assert torch.equal(low, PAIR[op](x.detach().bfloat16(), 0.1))


def kept_by(y):
    """The tensors that a result's gradient holds, ours or torch's."""
    node = y.grad_fn
    if hasattr(node, "saved_tensors"):
        return node.saved_tensors
    saved = (getattr(node, name, None) for name in ("_saved_self", "_saved_other"))
    return [each for each in saved if isinstance(each, torch.Tensor) and each.dim()]  # torch keeps a number as a scalar


def test_add_keeps_nothing_for_its_gradient(way):
    a, b = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    assert not kept_by(ops.add(a, b))
    assert not kept_by(ops.mul(a, 2.0))


@pytest.mark.parametrize("shape", [(3, 5), (5,), (3, 1)], ids=str)
def test_mul_keeps_only_what_a_gradient_needs(shape, interpreted):
    a, b = torch.randn(3, 5, requires_grad=True), torch.randn(shape)
    for y in (ops.mul(a, b), ops.mul(b, a)):
        if shape == (3, 5) or kept_by(y)[0].numel() == b.numel():
            assert [each.data_ptr() for each in kept_by(y)] == [b.data_ptr()]
        (slope,) = torch.autograd.grad(y, a, torch.ones_like(y), create_graph=True)
        torch.testing.assert_close(slope, b.expand(3, 5))


def test_constant_of_another_layout(interpreted):
    a, b = torch.randn(3, 5), torch.randn(5, 3).t()
    for one, other in ((a, b), (b, a)):
        leaf = one.detach().requires_grad_()
        for y, expected in ((ops.mul(leaf, other), leaf * other), (ops.mul(other, leaf), other * leaf)):
            assert y.stride() == expected.stride()
            (slope,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
            assert torch.equal(slope, other)


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pair_in_any_layout(op, layout, interpreted):
    a, b = LAYOUTS[layout](), LAYOUTS[layout]()
    against_torch(op, a, b)
    against_torch(op, a, torch.randn(a.shape))
    against_torch(op, a, torch.randn(a.shape[-1]))


@BOTH
def test_pair_not_a_number_as_torch(op, interpreted):
    odd = torch.tensor([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 3e38])
    against_torch(op, odd.repeat_interleave(7), odd.repeat(7))


@BOTH
@pytest.mark.parametrize(("a", "b", "error", "words"), [
    (X, X.bfloat16(), UnsupportedDtype, "a and b must have one dtype, got float32 and bfloat16"),
    (X.long(), 1, UnsupportedDtype, "{op} takes bfloat16, float16, float32, float64; a is int64"),
    (X, 1j, UnsupportedDtype, "b must be a tensor or a real number, got complex"),
    (X, "1", UnsupportedDtype, "b must be a tensor or a real number, got str"),
    (X, None, UnsupportedDtype, "b must be a tensor or a real number, got NoneType"),
    (X, [1.0], UnsupportedDtype, "b must be a tensor or a real number, got list"),
    (torch.ones(3, 4), X, ShapeError, r"shapes \(3, 4\) and \(3,\) do not broadcast"),
    (X, X.to("meta"), ShapeError, "a and b must be on one device, got cpu and meta"),
])  # fmt: skip
def test_refuses(op, a, b, error, words):
    with pytest.raises(error, match=words.replace("{op}", op)):
        getattr(ops, op)(a, b)


def test_gradient_of_relu_at_0(interpreted):
    x = torch.tensor([-1.0, -0.0, 0.0, 1.0], requires_grad=True)
    ops.relu(x).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 0.0, 1.0]
