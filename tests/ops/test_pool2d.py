import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerant import ops
from accelerant.config import override
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.runtime.ledger import ledger

TORCH = {"avg_pool2d": F.avg_pool2d, "max_pool2d": F.max_pool2d}
BOTH = pytest.mark.parametrize("op", TORCH)


def against_torch(op, x, *args, **options):
    mine, theirs = x.detach().requires_grad_(), x.detach().requires_grad_()
    y, expected = getattr(ops, op)(mine, *args, **options), TORCH[op](theirs, *args, **options)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert y.stride() == expected.stride()
    dy = torch.randn_like(expected)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-6, atol=2e-6, equal_nan=True)


numbers = st.one_of(st.integers(1, 3), st.tuples(st.integers(1, 3), st.integers(1, 3)))


@settings(max_examples=30, deadline=None)
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
            with pytest.raises(RuntimeError):
                TORCH[op](x, **settings_)
        else:
            against_torch(op, x, **settings_)


@BOTH
def test_any_layout(op):
    against_torch(op, torch.randn(2, 3, 6, 5).to(memory_format=torch.channels_last), 2)
    against_torch(op, torch.randn(2, 3, 6, 10)[..., ::2], 2)
    against_torch(op, torch.randn(1, 3, 6, 5).expand(2, 3, 6, 5), 2)


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


def test_cost_in_the_ledger():
    for op in TORCH:
        ledger().reset()
        getattr(ops, op)(torch.randn(2, 3, 8, 8, requires_grad=True), 2).sum().backward()
        rows = {row["op"]: row for row in ledger().to_dict()["ops"]}
        assert set(rows) == {f"{op}_fwd", f"{op}_bwd"}
        for row in rows.values():
            assert (row["bytes"], row["flops"], row["own"]) == (4 * (384 + 96), 4 * 96, False)


@pytest.mark.parametrize("shape", [(2, 3, 7, 8), (3, 7, 8)], ids=str)
def test_deterministic(shape):
    x = torch.randn(shape)
    for last in (False, True):
        if last and x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        with override(deterministic=True):
            against_torch("max_pool2d", x, 3, 2, 1)
    ran = {row["implementation"] for row in ledger().to_dict()["ops"] if row["op"] == "max_pool2d_bwd"}
    assert ran == {"torch-sorted"}


@BOTH
def test_is_torchs_own_under_compile(op):
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(lambda x: getattr(ops, op)(x, 2), fullgraph=True, backend=keep)(torch.randn(1, 2, 4, 4))
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any(op in name for name in names)
    assert not any("accelerant" in name for name in names)


@BOTH
def test_keeps_its_dtype_under_autocast(op):
    with torch.autocast("cpu", torch.bfloat16):
        assert getattr(ops, op)(torch.randn(1, 1, 4, 4), 2).dtype == torch.float32


X = torch.ones(1, 1, 4, 4)


@BOTH
@pytest.mark.parametrize(
    ("x", "options", "words"),
    [
        (torch.ones(4, 4), {}, r"takes x of shape \(B, C, H, W\) or \(C, H, W\), got \(4, 4\)"),
        (torch.ones(1, 1, 2, 4), {}, r"a kernel of 3 .*does not fit into height 2 with padding 0; x is \(1, 1, 2, 4\)"),
        (torch.ones(1, 1, 4, 0), {}, "does not fit into width 0"),
    ],
    ids=lambda value: "",
)
def test_refuses_shapes(op, x, options, words):
    with pytest.raises(ShapeError, match=words):
        getattr(ops, op)(x, 3, **options)


@BOTH
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernel_size": 0}, "kernel_size must be at least 1, got 0"),
        ({"kernel_size": (1, 2, 3)}, r"kernel_size must be one or two integers, got \(1, 2, 3\)"),
        ({"kernel_size": 2, "stride": 0}, "stride must be at least 1, got 0"),
        ({"kernel_size": 2, "padding": -1}, "padding must be at least 0, got -1"),
        ({"kernel_size": 2, "padding": 2}, "padding must be at most half of kernel_size 2, got 2"),
    ],
    ids=str,
)
def test_refuses_settings(op, options, words):
    with pytest.raises(ConfigError, match=words):
        getattr(ops, op)(X, **options)


def test_refuses_windows_in_the_padding():
    with pytest.raises(ShapeError, match="dilation 2 and padding 1 a window has no element of height 1; x is"):
        ops.max_pool2d(torch.ones(1, 1, 1, 5), 2, 1, (1, 0), (2, 1))
    against_torch("max_pool2d", torch.randn(1, 1, 5, 5), 3, 1, 1, 2)


def test_refuses_settings_of_one():
    with pytest.raises(ConfigError, match="dilation must be at least 1, got 0"):
        ops.max_pool2d(X, 2, dilation=0)
    with pytest.raises(ConfigError, match="divisor_override must not be 0, got 0"):
        ops.avg_pool2d(X, 2, divisor_override=0)


@BOTH
def test_refuses_integers(op):
    with pytest.raises(UnsupportedDtype, match=rf"{op} takes .*; x is int64"):
        getattr(ops, op)(X.long(), 2)
