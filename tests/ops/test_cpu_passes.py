"""What runs on a CPU where torch's functions are slower or less exact: chunks of rows or positions, bags of rows."""

import math
import sys

import pytest
import torch
from torch.nn import functional

from accelerant import ops
from accelerant.errors import ConfigError
from accelerant.ops.rope import rope_tables

LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def _uninterpreted(uninterpreted):
    """Triton's interpreter would serve CPU tensors too."""


@pytest.fixture
def short_chunks(monkeypatch):
    """Three rows of logits at a time, and no call left to torch's autograd."""
    monkeypatch.setattr(sys.modules["accelerant.ops.cross_entropy"], "CHUNK", 30)
    monkeypatch.setattr(sys.modules["accelerant.ops.cross_entropy"], "_MANY", 0)


def learnt(call, logits, targets, **options):
    x = logits.clone().requires_grad_()
    y = call(x, targets, **options)
    return y.detach(), torch.autograd.grad(y, x, torch.full_like(y, -2.0))[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ending", ["plain", "ignored", "certain", "-inf", "inf", "nan", "all -inf"])
def test_a_loss_in_chunks(ending, reduction, smoothing, short_chunks):
    logits, targets = torch.randn(11, 10), torch.randint(0, 10, (11,))
    if ending == "ignored":
        targets[::2] = -100
    if ending == "certain":  # the class's own probability is below what float32 has digits for
        logits[4], logits[4, 2], targets[4] = -60.0, 60.0, 1
        logits[5], targets[5] = torch.arange(10.0) * 20, 9
    if ending in ("-inf", "inf", "nan"):
        logits[3, 4] = float(ending)
        logits[6, targets[6]] = float(ending)
    if ending == "all -inf":
        logits[3] = -math.inf
    options = {"reduction": reduction, "label_smoothing": smoothing}
    found, expected = (
        learnt(call, logits, targets, **options) for call in (ops.cross_entropy, functional.cross_entropy)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("layout", ["rows apart", "columns apart", "in place"])
def test_a_loss_in_chunks_of_any_layout(layout, short_chunks):
    wide = torch.randn(11, 10).mul_(3)
    logits = {"rows apart": torch.randn(11, 16)[:, :10], "columns apart": torch.randn(10, 11).t()}.get(layout, wide)
    targets = torch.randint(0, 10, (11,), dtype=torch.int32)
    leaf = logits.detach().requires_grad_()
    inside = leaf * 1.0 if layout == "in place" else leaf
    loss = ops.cross_entropy(inside, targets, inplace_backward=layout == "in place")
    (found,) = torch.autograd.grad(loss, leaf)
    _, expected = learnt(functional.cross_entropy, logits, targets.long())
    torch.testing.assert_close(found, expected / -2)


def test_a_loss_of_bfloat16_is_as_exact_as_torchs(short_chunks):
    logits, targets = (torch.randn(40, 10) * 4).bfloat16(), torch.randint(0, 10, (40,))
    exact = learnt(functional.cross_entropy, logits.double(), targets)
    mine, torchs = (learnt(call, logits, targets) for call in (ops.cross_entropy, functional.cross_entropy))
    for one, other, reference in zip(mine, torchs, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - reference).abs().max() <= 2 * (other - reference).abs().max()


@LOW
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_without_a_gradient_is_rounded_once(reduction, dtype, short_chunks):
    """Torch's own loss of bfloat16 is 0 for the surer half of these rows."""
    logits, targets = torch.randn(60, 10).to(dtype), torch.randint(0, 10, (60,))
    logits[torch.arange(60), targets] = torch.linspace(0, 12, 60).to(dtype)
    targets[::3] = -100
    y = ops.cross_entropy(logits, targets, reduction=reduction)
    expected = functional.cross_entropy(logits.double(), targets, reduction=reduction)
    torch.testing.assert_close(y, expected.to(dtype), rtol=8e-3 if dtype == torch.bfloat16 else 1e-3, atol=1e-6)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("rows", [3, 3000])
@pytest.mark.parametrize("wrong", [10, -1])
def test_no_such_class(wrong, rows, learns):
    logits, targets = torch.randn(rows, 100, requires_grad=learns), torch.zeros(rows, dtype=torch.int64)
    targets[1] = wrong * 10 if wrong > 0 else wrong
    with pytest.raises(ConfigError, match=rf"targets must be in \[0, 100\) .*got {int(targets[1])}"):
        ops.cross_entropy(logits, targets)
    with pytest.raises(ConfigError, match=rf"targets must be in \[0, 100\) .*got {int(targets[1])}"):
        ops.linear_cross_entropy(logits, torch.randn(100, 100), targets)


@pytest.mark.sample(5, 3)
@LOW
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(7, 300), (40_000,), (1,)])
def test_bags_are_sums_in_float32(shape, index, padding_idx, dtype, monkeypatch):
    monkeypatch.setattr(sys.modules["accelerant.ops.embedding"], "_FEW_ELEMENTS", 0)
    monkeypatch.setattr(sys.modules["accelerant.ops.embedding"], "_MANY_ELEMENTS", 0)
    table = torch.randn(9, 5).to(dtype).requires_grad_()
    indices, dy = torch.randint(0, 8, shape, dtype=index), torch.randn(*shape, 5).to(dtype)
    (found,) = torch.autograd.grad(ops.embedding(indices, table, padding_idx=padding_idx), table, dy)
    exact = torch.zeros(9, 5, dtype=torch.float64).index_add(0, indices.flatten().long(), dy.double().reshape(-1, 5))
    if padding_idx is not None:
        exact[padding_idx] = 0
    rtol = 4e-3 if dtype == torch.bfloat16 else 5e-4  # one rounding, and float32's own errors
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=2e-3)


@pytest.mark.parametrize("wrong", [9, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("learns", [False, True])
def test_no_such_row(wrong, dtype, learns):
    table = torch.randn(9, 5).to(dtype).requires_grad_(learns)
    with pytest.raises(ConfigError, match=rf"indices must be in \[0, 9\), got {wrong}"):
        ops.embedding(torch.tensor([0, wrong]), table)


@pytest.mark.sample(5, 3)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("chunk", [1, 40, 200])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rope_in_chunks(dtype, chunk, interleaved, own, monkeypatch):
    """Of some positions of a sequence, and of some sequences."""
    cos, sin = rope_tables(7, 8)
    if own:
        cos, sin = (torch.stack([table.roll(shift, 0) for shift in range(5)]) for table in (cos, sin))
    tables = [table.to(dtype) for table in (cos, sin)]
    x = torch.randn(5, 7, 2, 8).to(dtype).transpose(1, 2).requires_grad_()

    def found():
        y = ops.rope(x, *tables, interleaved=interleaved)
        return y, torch.autograd.grad(y, x, x.detach())[0]

    whole = found()
    monkeypatch.setattr(sys.modules["accelerant.ops.rope"], "_CHUNK", chunk)
    for one, other in zip(found(), whole, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-6 if dtype != torch.bfloat16 else 8e-3, atol=1e-6)
