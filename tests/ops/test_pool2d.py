import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import check_beside, compiled_into, counted, ran

from accelerant import ops
from accelerant.config import override
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops.pool2d import Window, _refuses, launch_backward, launch_forward
from accelerant.runtime.dispatch import Case, force, operations
from accelerant.runtime.ledger import ledger
from refusals import assert_raises

TORCH = {"avg_pool2d": F.avg_pool2d, "max_pool2d": F.max_pool2d}
BOTH = pytest.mark.parametrize("op", TORCH)


def against_torch(op, x, *args, **options):
    both = (lambda x, of=of: of(x, *args, **options) for of in (getattr(ops, op), TORCH[op]))
    y, expected = check_beside(*both, x, near=(0, 0), slopes=(2e-6, 2e-6))
    assert y.stride() == expected.stride()


numbers = st.one_of(st.integers(1, 3), st.tuples(st.integers(1, 3), st.integers(1, 3)))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 7), st.integers(1, 7)),
    kernel=numbers,
    stride=st.one_of(numbers, st.none()),
    padding=st.integers(0, 1),
    ceil=st.booleans(),
    other=st.integers(1, 2),
)
def test_any_settings(shape, kernel, stride, padding, ceil, other):
    x = torch.randn(shape)
    for op, extra in (
        ("max_pool2d", {"dilation": other}),
        ("avg_pool2d", {"count_include_pad": other == 1, "divisor_override": other - 1 or None}),
    ):
        settings_ = {"kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil, **extra}
        try:
            getattr(ops, op)(x, **settings_)
        except (ShapeError, ConfigError) as error:
            if "has no element" in str(error):  # torch reads and writes outside the image
                continue
            assert_raises(RuntimeError, None, TORCH[op], x, **settings_)
        else:
            against_torch(op, x, **settings_)


@BOTH
@pytest.mark.sample(2)
def test_any_layout(op):
    against_torch(op, torch.randn(2, 3, 6, 5).to(memory_format=torch.channels_last), 2)
    against_torch(op, torch.randn(2, 3, 6, 10)[..., ::2], 2)
    against_torch(op, torch.randn(1, 3, 6, 5).expand(2, 3, 6, 5), 2)


@pytest.mark.sample(3)
@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_a_number_as_torch(op, value):
    x = torch.randn(1, 2, 6, 6)
    x[0, 1, :2, :3] = value
    against_torch(op, x, 3, 2, 1)


def test_indices():
    for x in (torch.randn(2, 3, 7, 8), torch.randn(3, 7, 8)):
        y, places = ops.max_pool2d(x, 2, return_indices=True)
        expected = F.max_pool2d(x, 2, return_indices=True)
        assert torch.equal(y, expected[0])
        assert torch.equal(places, expected[1])
    leaf = x.requires_grad_()
    y, places = ops.max_pool2d(leaf, 2, return_indices=True)
    assert y.requires_grad
    assert not places.requires_grad
    y.sum().backward()
    assert leaf.grad.sum() == y.numel()


def test_cost_in_the_ledger(interpreted):
    for op in TORCH:
        ledger().reset()
        getattr(ops, op)(torch.randn(2, 3, 8, 8, requires_grad=True), 2).sum().backward()
        rows = {row["op"]: row for row in counted()}
        assert set(rows) == {f"{op}_fwd", f"{op}_bwd"}
        for row in rows.values():
            assert (row["bytes"], row["flops"], row["own"]) == (4 * (384 + 96), 4 * 96, True)


@pytest.mark.parametrize("shape", [(2, 3, 7, 8), (3, 7, 8)], ids=str)
def test_deterministic_without_our_kernels(shape, uninterpreted):
    x = torch.randn(shape)
    for last in (False, True):
        if last and x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        with override(deterministic=True):
            against_torch("max_pool2d", x, 3, 2, 1)
    assert ran("max_pool2d_bwd") == {"torch-sorted"}


# --- our kernels, and what falls back from them ----------------------------------------------------------------------
RUNNERS = ("triton", "torch", "torch-sorted")


def backward_of(name, dy, x, settings, places):
    return operations()["max_pool2d_bwd"].run(name, dy, x, *settings, places)


def windows_and_dtypes():
    """(kernel, stride, padding, dilation, dtype): two windows and dtypes are quick, the rest is slow."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    windows = (
        ((3, 3), (2, 2), (1, 1), (1, 1)), ((2, 3), (1, 1), (0, 1), (2, 3)), ((1, 2), (3, 2), (0, 1), (1, 2)),
        ((4, 2), (3, 4), (2, 0), (1, 3)),
    )  # fmt: skip
    for place, window in enumerate(windows):
        for dtype in dtypes:
            marks = [] if place % 2 == 0 and dtype == dtypes[place] else [pytest.mark.slow]
            yield pytest.param(*window, dtype, marks=marks, id=f"{window}-{dtype}")


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("last", [False, True], ids=["", "channels_last"])
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "dtype"), list(windows_and_dtypes()))
def test_places_in_both_forms(kernel, stride, padding, dilation, dtype, last, interpreted):
    """Bytes and torch's indices say the same, and each implementation of the gradient reads both."""
    x = torch.randn(2, 2, 7, 8).round(decimals=1).to(dtype)  # so that windows have equal elements
    x = x.to(memory_format=torch.channels_last) if last else x
    x[1, 1, 3:6, 2:4] = math.nan
    settings = (list(kernel), list(stride), list(padding), list(dilation), True)
    forward = operations()["max_pool2d_fwd"]
    (y, by_torch), (mine, indices) = (forward.run(name, x, *settings, True) for name in ("torch", "triton"))
    torch.testing.assert_close(mine, y, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(indices, by_torch)
    assert indices.stride() == by_torch.stride()
    places, same = (forward.run(name, x, *settings, False)[1] for name in ("triton", "torch"))
    assert places.dtype == same.dtype == torch.uint8
    assert torch.equal(places, same)
    assert forward.run("triton", x, *settings, None)[1] is None
    dy = torch.randn_like(y)
    expected = backward_of("torch", dy.double(), x.double(), settings, by_torch)
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for name in RUNNERS:
        for kept in (places, indices):
            dx = backward_of(name, dy, x, settings, kept)
            assert dx.stride() == x.stride()
            torch.testing.assert_close(dx.double(), expected, rtol=tolerance, atol=tolerance)


def test_pairs_of_columns_are_the_same(interpreted):
    """Stored side by side or one by one; odd widths end in half a pair."""
    window = Window((3, 3), (2, 2), (1, 1), largest=True)
    for shape in ((1, 2, 5, 7), (2, 1, 4, 8), (1, 1, 1, 1)):
        x = torch.randn(shape)
        size = tuple(-(-n // 2) for n in shape[2:])
        y, places = launch_forward(x, size, window, positions=torch.uint8)
        dy = torch.randn_like(y)
        found = [launch_backward(dy, x, window, places, pairs=pairs) for pairs in (False, True)]
        assert torch.equal(*found)


@pytest.mark.slow
@BOTH
def test_the_same_bits_each_time(op, interpreted):
    x = torch.randn(2, 2, 6, 7, requires_grad=True)
    with override(deterministic=True):
        gradients = [torch.autograd.grad(getattr(ops, op)(x, 3, 1, 1).square().sum(), x)[0] for _ in range(3)]
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])
    assert ran(f"{op}_bwd") == {"triton"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize("last", [False, True], ids=["", "channels_last"])
@pytest.mark.parametrize("op", TORCH)
def test_gradients_on_a_gpu_are_those_of_a_cpu(op, last, name):
    """In both layouts: torch's gradient of the average, with the channels last, is another on a GPU."""
    x = torch.randn(4, 64, 17, 19).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    exact = x.double().contiguous().requires_grad_()
    expected = TORCH[op](exact, 3, 2, 1)
    dy = torch.randn(expected.shape)
    expected.backward(dy.double())
    leaf = x.cuda().requires_grad_()
    with force(**{f"{op}_bwd": name}):
        y = getattr(ops, op)(leaf, 3, 2, 1)
        y.backward(dy.cuda().contiguous(memory_format=torch.channels_last) if last else dy.cuda())
    assert leaf.grad.stride() == x.stride()
    torch.testing.assert_close(leaf.grad.cpu().double(), exact.grad, rtol=2e-6, atol=2e-6)


def test_keeps_a_byte_for_each_element(interpreted):
    saved = []
    x = torch.randn(1, 2, 6, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.dtype, t.shape)) or t, lambda t: t):
        y = ops.max_pool2d(x, 2)
        assert (torch.uint8, y.shape) in saved
        saved.clear()
        ops.max_pool2d(x, 2, 9)
        assert all(dtype != torch.uint8 for dtype, _ in saved)


@pytest.mark.parametrize(("dtype", "shape", "settings", "words"), [
    (torch.float64, (1, 1, 9, 9), ((3, 3), (1, 1)), "computes in float32"),
    (torch.float32, (1, 1, 99, 99), ((9, 8), (1, 1)), "windows of 9 x 8 are left to the library"),
    (torch.float32, (1, 1, 99, 99), ((1, 1), (8, 9)), "strides of 8 x 9 are left to the library"),
    (torch.float32, (1, 1, 2**16, 2**15), ((3, 3), (1, 1)), "2147483648 rows or pixels"),
    (torch.float32, (1, 1, 2, 2**21 + 1), ((1, 2), (1, 2)), "2097153 columns or channels"),
    (torch.float32, (1, 2**21 + 1, 2, 2), ((2, 2), (2, 2)), "2097153 columns or channels"),
    (torch.bfloat16, (1, 2**15, 34, 2**12), ((34, 1), (1, 1)), "windows over 4697620480 elements"),
    (torch.bfloat16, (1, 1, 99, 99), ((8, 8), (8, 8)), None),
    (torch.bfloat16, (1, 2**12, 99, 2**12), ((3, 3), (2, 2)), None),
])  # fmt: skip
def test_kernel_leaves_to_the_library(dtype, shape, settings, words):
    cuda = torch.device("cuda", 0)
    maximum = Case(cuda, dtype, shape, ((), *settings, (0, 0), (1, 1), False))
    for reason in (
        _refuses(Case(cuda, dtype, shape, ((), *settings, (0, 0), False, True, None))),
        _refuses(maximum),
    ):
        assert words in reason if words else reason is None
    dilated = Case(cuda, torch.float32, (1, 1, 99, 99), ((), (3, 3), (1, 1), (0, 0), (4, 4), False))
    assert "windows of 9 x 9" in _refuses(dilated)


@BOTH
def test_is_torchs_own_under_compile(op):
    names = [*map(str, compiled_into(lambda x: getattr(ops, op)(x, 2), torch.randn(1, 2, 4, 4)))]
    assert any(op in name for name in names)
    assert not any("accelerant" in name for name in names)


X = torch.ones(1, 1, 4, 4)


@BOTH
@pytest.mark.parametrize(("x", "settings", "error", "words"), [
    (torch.ones(4, 4), (3,), ShapeError, r"takes x of shape \(B, C, H, W\) or \(C, H, W\), got \(4, 4\)"),
    (torch.ones(1, 1, 2, 4), (3,), ShapeError, r"3 .*fit into height 2 with padding 0; x is \(1, 1, 2, 4\)"),
    (torch.ones(1, 1, 4, 0), (3,), ShapeError, "a kernel of 3 .*does not fit into width 0"),
    (X, (0,), ConfigError, "kernel_size must be at least 1, got 0"),
    (X, ((1, 2, 3),), ConfigError, r"kernel_size must be one or two integers, got \(1, 2, 3\)"),
    (X, (2, 0), ConfigError, "stride must be at least 1, got 0"),
    (X, (2, None, -1), ConfigError, "padding must be at least 0, got -1"),
    (X, (2, None, 2), ConfigError, "padding must be at most half of kernel_size 2, got 2"),
    (X.long(), (2,), UnsupportedDtype, "{op} takes .*; x is int64"),
], ids=lambda value: "")  # fmt: skip
def test_refuses(op, x, settings, error, words):
    assert_raises(error, words.replace("{op}", op), lambda: getattr(ops, op)(x, *settings))


def test_refuses_windows_in_the_padding():
    with pytest.raises(ShapeError, match="dilation 2 and padding 1 a window has no element of height 1; x is"):
        ops.max_pool2d(torch.ones(1, 1, 1, 5), 2, 1, (1, 0), (2, 1))
    against_torch("max_pool2d", torch.randn(1, 1, 5, 5), 3, 1, 1, 2)


def test_refuses_settings_of_one():
    assert_raises(ConfigError, "dilation must be at least 1, got 0", ops.max_pool2d, X, 2, dilation=0)
    assert_raises(ConfigError, "divisor_override must not be 0, got 0", ops.avg_pool2d, X, 2, divisor_override=0)
