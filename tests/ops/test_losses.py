"""The losses' weights, edges and rejections; test_contract.py has the rest."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from op_checks import check_beside, ran

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.ops import losses as op
from refusals import assert_raises

LOSSES = (ops.mse_loss, ops.l1_loss, ops.binary_cross_entropy, ops.binary_cross_entropy_with_logits)
ALL = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)


def pair(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(shape, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(33,), (9, 1), ()], ids=str)
def test_weights_are_torchs(way, reduction, shape):
    """Rows repeat in the kernel; columns are expanded."""
    x, t = pair(9, 33)
    weight, positive = 2 * torch.rand(shape), 3 * torch.rand(shape)
    calls = {
        "binary_cross_entropy": {"weight": weight},
        "binary_cross_entropy_with_logits": {"weight": weight, "pos_weight": positive},
    }
    for name, options in calls.items():
        check_beside(*(partial(getattr(of, name), target=t, **options, reduction=reduction) for of in (ops, F)), x)


def test_the_ends_of_probabilities_and_logits(way):
    p = torch.tensor([0.0, 1.0, 1e-12, 1.0 - 2**-24, 0.5])
    for t in (0.0, 1.0, 0.25):
        both = (partial(of.binary_cross_entropy, target=torch.full_like(p, t), reduction="none") for of in (ops, F))
        check_beside(*both, p, near=(2e-6, 0), slopes=(1e-5, 0), dy=torch.ones(5))
    x = torch.tensor([-200.0, -30.0, -1e-9, 0.0, 30.0, 200.0, math.nan])
    y = ops.binary_cross_entropy_with_logits(x, torch.zeros_like(x), reduction="none")
    expected = torch.logaddexp(x.double(), torch.zeros(7, dtype=torch.float64)).float()
    # Torch's sum cancels at -30; at -200 exp is 0 in float32.
    absolute = 4e-6 if way == "torch" else 1e-38
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=absolute, equal_nan=True)


@ALL
def test_the_mean_of_nothing_is_nan_and_its_sum_0(loss, way):
    x, t = pair(0, 3)
    assert loss(x, t).isnan()
    assert loss(x, t, reduction="sum") == 0
    x.requires_grad_()
    loss(x, t).backward()
    assert x.grad.shape == (0, 3)


@ALL
def test_sums_take_one_order_and_are_exact_to_float32(loss, interpreted, monkeypatch):
    """More blocks than programs: each program has several, and a second kernel adds the programs' sums."""
    monkeypatch.setattr(op, "PARTS", 4)
    x, t = pair(9 * 1024 + 5)
    y = loss(x, t)
    assert y == loss(x, t)
    torch.testing.assert_close(y.double(), loss(x.double(), t.double()), rtol=1e-6, atol=0)
    assert ran() == {"triton", "torch"}  # torch in float64


@ALL
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_summed_in_float32_and_autocast_gives_float32(loss, way, dtype):
    x, t = (each.to(dtype) for each in pair(50, 41))
    exact = loss(x.double(), t.double()).float()
    y = loss(x, t)
    assert y.dtype == dtype
    torch.testing.assert_close(y, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        y = loss(x, t)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, exact, rtol=1e-5, atol=0)


@ALL
def test_layouts_that_are_not_contiguous(loss, interpreted):
    x, t = pair(6, 8)
    x.requires_grad_()
    loss(x.t(), t.t(), reduction="sum").backward()
    other = x.detach().clone().requires_grad_()
    loss(other, t, reduction="sum").backward()
    torch.testing.assert_close(x.grad, other.grad)


@ALL
def test_rejections(loss):
    x, t = pair(3, 4)
    assert_raises(ShapeError, r"target must be \(3, 4\), the shape of input, got \(4,\)", loss, x, t[0])
    with pytest.raises(UnsupportedDtype, match="input and target must have one dtype, got float32 and float64"):
        loss(x, t.double())
    assert_raises(UnsupportedDtype, "input is int64", lambda: loss(x.long(), t.long()))
    assert_raises(TypeError, "target is a list", loss, x, [1.0])
    with pytest.raises(ConfigError, match="reduction must be one of mean, sum, none, got 'batchmean'"):
        loss(x, t, reduction="batchmean")


def test_rejections_of_weights_and_probabilities(uninterpreted):
    x, t = pair(3, 4)
    with pytest.raises(ShapeError, match=r"pos_weight must broadcast to \(3, 4\), got \(3,\)"):
        ops.binary_cross_entropy_with_logits(x, t, pos_weight=torch.ones(3))
    with pytest.raises(ShapeError, match=r"weight must broadcast to \(3, 4\), got \(2, 3, 4\)"):
        ops.binary_cross_entropy(x, t, torch.ones(2, 3, 4))
    with pytest.raises(UnsupportedCase, match="binary_cross_entropy has no gradient for weight: detach it"):
        ops.binary_cross_entropy(x, t, torch.ones(4, requires_grad=True))
    for _ in range(6):  # the fast path too
        with pytest.raises(ConfigError, match=r"input must be probabilities, 0 to 1; its range is 1\.\d+ to 1\.\d+"):
            ops.binary_cross_entropy(x + 1, t)


def test_a_probability_out_of_range_is_nan_in_the_kernel(interpreted):
    y = ops.binary_cross_entropy(torch.tensor([-0.1, 0.5, 1.1]), torch.ones(3), reduction="none")
    assert y.isnan().tolist() == [True, False, True]
