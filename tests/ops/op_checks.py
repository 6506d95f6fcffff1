"""What the tests of ops share: the op folders, and the comparison with a reference."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import accelerant.ops
from accelerant.ops._cases import draw

FOLDER = Path(accelerant.ops.__file__).parent
OPS = sorted(path.name for path in FOLDER.iterdir() if (path / "__init__.py").is_file())
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def parts(op):
    """An op's function, reference and cases."""
    return SimpleNamespace(
        name=op,
        call=getattr(accelerant.ops, op),
        reference=getattr(importlib.import_module(f"accelerant.ops.{op}.reference"), f"{op}_reference"),
        cases=importlib.import_module(f"accelerant.ops.{op}.cases"),
    )


def each_sample(*, of="SAMPLES"):
    """(op, sample) with a readable identifier, for parametrize."""
    return [pytest.param(op, sample, id=f"{op}-{sample.name}") for op in OPS for sample in getattr(parts(op).cases, of)]


def small_samples(limit):
    """Samples that finite differences can afford."""
    return [param for param in each_sample() if max(map(_numel, param.values[1].shapes)) <= limit]


def _numel(shape):
    return 0 if shape is None else torch.Size(shape).numel()


def close(actual, expected, tolerance):
    """Fail unless within the tolerance, its absolute part times the largest element if that is above 1."""
    assert actual.shape == expected.shape
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.to(torch.float64),
        expected,
        rtol=tolerance.relative,
        atol=tolerance.absolute * max(1.0, largest),
    )


def check_sample(op, sample, dtype, device="cpu", tolerances=None):
    """Forward and backward against the reference in float64."""
    it = parts(op)
    tolerance = (tolerances or it.cases.TOLERANCES)[dtype]
    tensors = sample.tensors(dtype, device)
    for tensor in tensors:
        if tensor is not None:
            tensor.requires_grad_()
    exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in tensors]
    y = it.call(*tensors, **sample.options)
    expected = it.reference(*exact, **sample.options)
    assert y.dtype == dtype
    assert y.device == tensors[0].device
    close(y.detach(), expected.detach(), tolerance)
    dy = draw(y.shape, dtype, device, seed=99)  # drawn apart from x, or the sums below grow with the rows
    y.backward(dy)
    expected.backward(dy.double())
    for tensor, reference in zip(tensors, exact, strict=True):
        if tensor is not None:
            assert tensor.grad.dtype == dtype
            close(tensor.grad, reference.grad, tolerance)
