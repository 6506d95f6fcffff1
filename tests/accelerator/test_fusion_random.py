"""Expressions drawn at random, fused and not: values, NaN, infinities and signs of zero are torch's on every device."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import accelerant as acl
from accelerant.accelerator.fusion import function
from requirements import require_backend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SPECIAL = [
    math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 88.7, 88.8, 3e38, -3e38, -104.0, 1.0, -1.0, 12582912.0,
]  # fmt: skip
VECTORS = [
    "neg", "abs", "exp", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "floor", "ceil", "square", "reciprocal", "sign",
]  # fmt: skip
LIBRARY = ["exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "erfc"]
ACTIVATIONS = ["relu", "silu", "softplus", "logsigmoid", "elu", "leaky_relu"]
CONSTANTS = [0.0, 1.0, -1.0, 2.0, 0.1, 3.0, 12582912.0, 1e-3, 88.7, -0.0, 1e38]


def draw(rng, depth):
    """Return the text of an expression of x and y, of this depth at most."""
    if not depth:
        return rng.choice(["x", "y"])

    def inner():
        return draw(rng, rng.randrange(depth))

    number = repr(rng.choice(CONSTANTS))
    return rng.choice([
        lambda: f"torch.{rng.choice(VECTORS)}({inner()})",
        lambda: f"torch.{rng.choice(VECTORS)}({inner()})",
        lambda: f"torch.{rng.choice(LIBRARY)}({inner()})",
        lambda: f"F.{rng.choice(ACTIVATIONS)}({inner()})",
        lambda: f"({inner()} {rng.choice('+-*/')} {inner()})",
        lambda: f"({inner()} {rng.choice('+-*/')} {number})",
        lambda: f"({number} {rng.choice('+-*/')} {inner()})",
        lambda: f"torch.where({inner()} {rng.choice(['<', '<=', '==', '!='])} {inner()}, {inner()}, {number})",
        lambda: f"{inner()}**{rng.choice([0, 1, 2, 3, -1, -2, 0.5, -0.5, 4, 5, -3])}",
        lambda: f"({inner()}).clamp({rng.choice([-1, None])}, 2.5)",
        lambda: f"F.softmax({inner()}, -1)",
        lambda: f"({inner()}).{rng.choice(['sum', 'mean', 'amax', 'amin'])}(-1, keepdim=True)",
    ])()  # fmt: skip


def drawn(seed, shape):
    """Return an expression's text, its function, and its arguments."""
    rng = random.Random(seed)
    text = draw(rng, 4)
    apply = eval(f"lambda x, y: {text} + 0 * x", {"torch": torch, "F": F})  # our own text
    generator = torch.Generator().manual_seed(seed)
    arguments = []
    for _ in range(2):
        x = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 4 - 2)
        at = torch.randint(0, x.numel(), (max(1, min(x.numel() // 3, 30)),), generator=generator)
        x.view(-1)[at] = torch.tensor(rng.choices(SPECIAL, k=len(at)))
        arguments.append(x)
    return text, apply, arguments


def check(text, got, eager, exact):
    """Compare with torch's result, and the errors with those of torch, against float64."""
    got, eager = got.double(), eager.double()
    steps = text.count("(") + 3
    close = (got - eager).abs() <= steps * 4e-6 * torch.maximum(got.abs(), eager.abs()) + 1e-44
    close |= (got == eager) | (got.isnan() & eager.isnan()) | ((got - exact).abs() <= (eager - exact).abs())
    close |= (got.abs() > 3.3e38) & (eager.abs() > 3.3e38) & (got.sign() == eager.sign())  # at float32's end
    assert close.all(), (text, got[~close][:3], eager[~close][:3], exact[~close][:3])
    zero = (got == 0) & (eager == 0)
    assert torch.equal(got[zero].signbit(), eager[zero].signbit()), text


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("device", ["torch", *(pytest.param(x, marks=pytest.mark.slow) for x in ("cpu", "opencl"))])
def test_random_expressions_in_float32(device, seed, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    text, apply, (x, y) = drawn(seed, [(1, 1), (7, 1), (1, 7), (5, 33)][seed % 4])
    if device == "opencl":
        require_backend("opencl")
        got = torch.from_numpy(np.array(acl.fuse(apply, device="opencl")(x.numpy(), y.numpy())))
    else:
        monkeypatch.setattr(function, "_LEAST", 0 if device == "cpu" else 65_536)
        monkeypatch.setattr(function, "_SCALAR", set())
        got = acl.fuse(apply)(x, y)
    check(text, got, apply(x, y), apply(x.double(), y.double()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_random_expressions_of_narrow_dtypes_are_rounded_once(dtype, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for seed in range(12):
        text, apply, arguments = drawn(seed, (3, 9))
        x, y = (each.to(dtype) for each in arguments)
        got, wanted = acl.fuse(apply)(x, y), apply(x.float(), y.float()).to(dtype)
        least = torch.finfo(dtype).smallest_normal
        torch.testing.assert_close(got, wanted, rtol=torch.finfo(dtype).eps, atol=least, equal_nan=True, msg=text)
