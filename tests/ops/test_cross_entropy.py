import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import counted
from torch.nn import functional

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.ops.cross_entropy import launch
from refusals import assert_raises

WIDTHS = pytest.mark.parametrize("V", [5, 1000, 9001, 16384])


def both(logits, targets, dy=None, **options):
    """Loss and gradient, ours and torch's."""
    found = []
    for call in (ops.cross_entropy, functional.cross_entropy):
        x = logits.clone().requires_grad_()
        y = call(x, targets, **options)
        y.backward(torch.ones_like(y) if dy is None else dy)
        found.append((y.detach(), x.grad))
    return zip(*found, strict=True)


def same(*args, rtol=1e-5, atol=1e-6, **options):
    for ours, theirs in both(*args, **options):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.sample(5, 3)
@WIDTHS
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_as_torch(V, reduction, smoothing, interpreted):
    logits, targets = torch.randn(5, V) * 3, torch.randint(0, V, (5,))
    targets[2] = -100
    dy = torch.randn(5 if reduction == "none" else ())
    same(logits, targets, dy, rtol=2e-5, atol=1e-5, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize(
    "dy",
    [torch.zeros(4), torch.tensor(0.7).expand(4), 1e4 * torch.randn(4, 2)[:, 0]],
    ids=["zeros", "expanded", "strided"],
)
def test_gradients_of_rows_after_others(dy, interpreted):
    """Upstream gradients of any layout, in the second of two backward passes."""
    logits, targets = torch.randn(4, 1000), torch.tensor([3, -100, 999, 0])
    found = []
    for call in (ops.cross_entropy, functional.cross_entropy):
        x = logits.clone().requires_grad_()
        losses = call(x, targets, reduction="none", label_smoothing=0.1)
        torch.autograd.grad(losses, x, torch.ones(4), retain_graph=True)
        found += torch.autograd.grad(losses, x, dy)
    torch.testing.assert_close(*found, rtol=2e-5, atol=1e-5)


@WIDTHS
def test_all_ignored(V, interpreted):
    logits, targets = torch.randn(3, V, requires_grad=True), torch.full((3,), -100)
    loss = ops.cross_entropy(logits, targets)
    assert loss.isnan()
    assert ops.cross_entropy(logits, targets, reduction="sum") == 0
    ops.cross_entropy(logits, targets, reduction="sum").backward()
    assert (logits.grad == 0).all()


@WIDTHS
@pytest.mark.sample(2)
def test_far_from_0(V, interpreted):
    """The maximum is kept apart from the logarithm: a shift of 10000 costs the loss nothing."""
    logits = torch.randint(-8, 9, (4, V)).float()
    targets = torch.randint(0, V, (4,))
    for x in (logits + 10000, logits - 10000):
        same(x, targets)
        a, b = (each.requires_grad_() for each in (logits.clone(), x.clone()))
        ops.cross_entropy(a, targets).backward()
        ops.cross_entropy(b, targets).backward()
        assert torch.equal(a.grad, b.grad)


@pytest.mark.sample(5, 3)
@WIDTHS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_not_finite(V, value, reduction, interpreted):
    logits, targets = torch.randn(4, V), torch.tensor([0, 1, 2, 3])
    logits[0, 0] = value  # the class
    logits[1, 4] = value  # another
    same(logits, targets, torch.ones(4) if reduction == "none" else None, reduction=reduction)
    logits[2] = -math.inf
    loss = ops.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(loss, functional.cross_entropy(logits, targets, reduction="none"), equal_nan=True)


@WIDTHS
def test_no_such_class_is_nan_in_the_kernels(V, interpreted, monkeypatch):
    module = importlib.import_module("accelerant.ops.cross_entropy")
    monkeypatch.setattr(module, "check_targets", lambda *_: None)
    logits, targets = torch.randn(4, V, requires_grad=True), torch.tensor([0, V, -1, 2**40])
    loss = ops.cross_entropy(logits, targets, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, True]
    loss.sum().backward()
    assert logits.grad.isnan().all(1).tolist() == [False, True, True, True]


@pytest.mark.sample(3)
@WIDTHS
@pytest.mark.parametrize("factor", [1.0, -3.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_upstream_gradient(V, factor, inplace, interpreted):
    logits, targets = torch.randn(4, V), torch.randint(0, V, (4,))
    x, z = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (ops.cross_entropy(x * 2, targets, inplace_backward=inplace) * factor).backward()
    (functional.cross_entropy(z * 2, targets) * factor).backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_second_backward_pass(reduction, interpreted):
    """The gradient that was made ahead is given away by the first: what becomes of it does not matter."""
    logits, targets = torch.randn(4, 9, requires_grad=True), torch.randint(0, 9, (4,))
    loss = ops.cross_entropy(logits, targets, reduction=reduction).sum() * 2
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    kept = first.clone()
    first.zero_()
    (second,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(second, kept)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_few_logits_are_one_launch(reduction, interpreted, monkeypatch):
    """Several steps of the program over the rows; the result is that of a program for each."""
    logits, targets = torch.randn(41, 1000), torch.randint(0, 1000, (41,))
    targets[::5] = -100
    launched = []
    for name, kernel in launch.KERNELS.items():
        run = kernel.launch
        monkeypatch.setattr(kernel, "launch", lambda *a, run=run, name=name, **o: launched.append(name) or run(*a, **o))
    args = logits, targets, -100, 0.1, reduction, False
    loss, statistics, counts, dx = launch.launch_forward(*args, gradient=True)
    assert launched == ["few"]
    assert statistics.numel() == counts.numel() == 0
    monkeypatch.setattr(launch, "FEW", 0)
    same_loss, statistics, _, same_dx = launch.launch_forward(*args, gradient=True)
    assert launched[1:] == (["count"] if reduction == "mean" else []) + ["fwd", "reduce"]
    assert statistics.shape == (2, 41)
    torch.testing.assert_close((loss, dx), (same_loss, same_dx), rtol=1e-6, atol=1e-7)


def test_in_place_takes_no_more_memory(interpreted):
    logits, targets = torch.randn(4, 9), torch.randint(0, 9, (4,))
    x = logits.clone().requires_grad_()
    inner = x * 1
    ops.cross_entropy(inner, targets, inplace_backward=True)
    z = logits.clone().requires_grad_()
    functional.cross_entropy(z, targets).backward()
    torch.testing.assert_close(inner.detach(), z.grad)


@pytest.mark.parametrize("change", [torch.t, lambda x: x[:, :7]], ids=["transposed", "rows with gaps"])
def test_in_place_leaves_logits_with_gaps(change, way):
    leaf = torch.randn(9, 9, requires_grad=True)
    logits = change(leaf * 1)
    kept = logits.detach().clone()
    loss = ops.cross_entropy(logits, torch.randint(0, 7, (9,)), inplace_backward=True)
    assert torch.equal(logits, kept)
    loss.backward()


def test_in_place_once(interpreted):
    x, targets = torch.randn(4, 9, requires_grad=True), torch.randint(0, 9, (4,))
    loss = ops.cross_entropy(x * 1, targets, inplace_backward=True)
    loss.backward(retain_graph=True)
    assert_raises(UnsupportedCase, "there can be one backward pass", loss.backward)
    with pytest.raises(UnsupportedCase, match="create_graph=True"):
        torch.autograd.grad(ops.cross_entropy(x * 1, targets, inplace_backward=True), x, create_graph=True)


def test_in_place_is_seen_by_autograd(interpreted):
    x, targets = torch.randn(4, 9, requires_grad=True), torch.randint(0, 9, (4,))
    y = x.exp()
    loss = ops.cross_entropy(y, targets, inplace_backward=True)
    assert_raises(RuntimeError, "modified by an inplace operation", loss.backward)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_in_place_is_only_leave_to(dtype, reduction, interpreted):
    x, targets = torch.randn(4, 9, dtype=dtype), torch.randint(0, 9, (4,))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    ops.cross_entropy(a * 1, targets, reduction=reduction, inplace_backward=True).sum().backward()
    ops.cross_entropy(b, targets, reduction=reduction).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_float16_survives_a_large_mean(interpreted):
    """A gradient over the count is below float16's least number; a loss scale is there to lift it."""
    x, targets = torch.zeros(16, 256, dtype=torch.float16), torch.zeros(16, dtype=torch.int64)
    x[:, 1] = -10
    x.requires_grad_()
    (ops.cross_entropy(x, targets).float() * 32768).backward()
    gradient = x[0].detach().double().softmax(0)[1].item() / 16
    assert 0 < gradient < 2.0**-25
    torch.testing.assert_close(x.grad[0, 1].item(), 32768 * gradient, rtol=1e-3, atol=0)


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("plan", [*launch.WIDE_PLANS, *launch.HELD_PLANS], ids=str)
@pytest.mark.parametrize(
    ("V", "stride"), [(9001, 9001), (9001, 9008), (8200, 8205), (12288, 12288), (20001, 20001), (41000, 41001)]
)
def test_any_plan_gives_the_same(plan, V, stride, interpreted):
    dtype = torch.bfloat16 if plan.held else torch.float32
    rows = torch.randn(4, stride).to(dtype)[:, :V]
    targets = torch.tensor([0, V - 1, -100, 4097])
    expected = rows.double().requires_grad_()
    losses = functional.cross_entropy(expected, targets, reduction="none", label_smoothing=0.1)
    losses.sum().backward()
    for out_stride in (stride, V + 3):
        found, dx = torch.empty(4), torch.empty(4, out_stride, dtype=dtype)[:, :V]
        launch.launch_rows(
            rows, stride, targets, -100, 0.1, losses=found, dx=dx, dx_stride=out_stride, plan=plan
        )  # fmt: skip
        torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dx.double(), expected.grad, rtol=2e-2 if plan.held else 1e-4, atol=1e-5)


@pytest.mark.slow
def test_many_rows_are_summed_in_two_steps(interpreted):
    logits, targets = torch.randn(70000, 2), torch.randint(0, 2, (70000,))
    torch.testing.assert_close(ops.cross_entropy(logits, targets), functional.cross_entropy(logits, targets))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_layouts(dtype, interpreted):
    targets = torch.randint(0, 9, (12,), dtype=dtype)[::2]
    for logits in (torch.randn(9, 6).t(), torch.randn(6, 20)[:, 3:12], torch.randn(1, 9).expand(6, 9)):
        leaf = logits.detach().requires_grad_()
        ops.cross_entropy(leaf, targets).backward()
        same = logits.detach().clone().requires_grad_()
        functional.cross_entropy(same, targets.long()).backward()
        torch.testing.assert_close(leaf.grad, same.grad)


def test_autocast_widens_the_loss():
    logits, targets = torch.randn(4, 9).bfloat16().requires_grad_(), torch.randint(0, 9, (4,))
    assert ops.cross_entropy(logits, targets).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        loss = ops.cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    loss.backward()
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, functional.cross_entropy(logits.float(), targets))


def test_one_pass_where_a_gradient_is_to_come(interpreted):
    logits, targets = torch.randn(4, 9, requires_grad=True), torch.randint(0, 9, (4,))
    ops.cross_entropy(logits, targets).backward()
    with torch.no_grad():
        ops.cross_entropy(logits, targets)
    cases = [(row["op"], row["case"]) for row in counted()]
    assert sorted(cases) == [
        ("cross_entropy_bwd", "4x9 float32 scale"),
        ("cross_entropy_fwd", "4x9 float32"),
        ("cross_entropy_fwd", "4x9 float32 gradient"),
    ]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    M=st.integers(1, 9),
    V=st.integers(1, 70),
    smoothing=st.sampled_from([0.0, 0.3]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    ignore=st.integers(-2, 5),
    seed=st.integers(0, 99),
)
def test_any_shape(M, V, smoothing, reduction, ignore, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(M, V, generator=generator)
    targets = torch.randint(0, V, (M,), generator=generator)
    same(
        logits,
        targets,
        torch.randn(M, generator=generator) if reduction == "none" else None,
        label_smoothing=smoothing,
        reduction=reduction,
        ignore_index=ignore,
    )


LOGITS, TARGETS = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)
REJECTED = {
    "a scalar": (torch.tensor(1.0), TARGETS, {}, ShapeError, r"logits must be \(\.\.\., V\).*got \(\)"),
    "no class": (torch.ones(3, 0), TARGETS, {}, ShapeError, r"V at least 1, got \(3, 0\)"),
    "shape": (LOGITS, TARGETS[:2], {}, ShapeError, r"targets must be \(3,\), got \(2,\)"),
    "integer logits": (LOGITS.long(), TARGETS, {}, UnsupportedDtype, "logits is int64"),
    "float targets": (LOGITS, TARGETS.float(), {}, UnsupportedDtype, "targets must be int64 or int32, got float32"),
    "smoothing": (LOGITS, TARGETS, {"label_smoothing": 1.5}, ConfigError, r"in \[0, 1\], got 1\.5"),
    "reduction": (LOGITS, TARGETS, {"reduction": "max"}, ConfigError, "mean, sum, none, got 'max'"),
    "class": (LOGITS, TARGETS + 4, {}, ConfigError, r"in \[0, 4\) or ignore_index \(-100\), got 4"),
    "negative class": (LOGITS, TARGETS - 1, {}, ConfigError, "got -1"),
    "devices": (LOGITS, TARGETS.to("meta"), {}, ShapeError, "targets must be on cpu, .*; they are on meta"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejects(name):
    logits, targets, options, error, words = REJECTED[name]
    assert_raises(error, words, ops.cross_entropy, logits, targets, **options)


def test_a_gradient_with_gaps_is_scaled_to_its_end(interpreted):
    memory = torch.arange(1.0, 61.0)
    dx = memory.as_strided((5, 9), (12, 1))
    expected = dx * 3.0
    assert launch.scale_(dx, torch.tensor(3.0)) is dx
    assert torch.equal(dx, expected)


def test_no_rows_at_all_are_not_overwritten(interpreted):
    logits = torch.zeros(0, 7, requires_grad=True)
    loss = ops.cross_entropy(logits * 1.0, torch.zeros(0, dtype=torch.int64), reduction="sum")
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert logits.grad.shape == (0, 7)
