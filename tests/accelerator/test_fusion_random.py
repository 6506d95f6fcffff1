"""Expressions drawn at random, fused and not: values, NaN, infinities and signs of zero are torch's on every device."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import accelerant as acl
from accelerant.accelerator.fusion import function
from accelerant.errors import UnsupportedCase
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


@pytest.mark.sample(3, 1)
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


LEAST = {np.int32: -(2**31), np.int64: -(2**63), np.uint8: 0}


def array(rng, dtype, shape, layout, *, zeros=True):
    """Return an array of numbers and edges, in a layout: C's order, Fortran's, every second element, or backwards."""
    generator = np.random.default_rng(rng.randrange(2**32))
    wide = tuple(2 * size for size in shape)
    if np.issubdtype(dtype, np.floating):
        x = (generator.normal(size=wide) * 10.0 ** generator.integers(-2, 3, size=wide)).astype(dtype)
        edges = [0.0, -0.0, 2.5, -3.5, 0.5, 1e6, np.inf, -np.inf, np.nan]
    elif dtype is np.bool_:
        return generator.integers(0, 2, size=shape).astype(bool)
    else:
        x = generator.integers(-9 if dtype is not np.uint8 else 0, 9, size=wide).astype(dtype)
        edges = [-1 % 256 if dtype is np.uint8 else -1, 0, LEAST[dtype], np.iinfo(dtype).max]
    x.reshape(-1)[:: 1 + x.size // 40] = np.array(edges, dtype)[
        generator.integers(0, len(edges), len(x.reshape(-1)[:: 1 + x.size // 40]))
    ]
    if not zeros:
        x = np.where((x == 0) | (x == x.dtype.type(-1 if dtype is not np.uint8 else 255)), x.dtype.type(3), x)
    x = np.ascontiguousarray(x)
    if layout == "backwards":
        return x[::-2, ::-2][: shape[0]] if len(shape) == 2 else x[::-2]
    whole = x[tuple(slice(0, size) for size in shape)]
    return {
        "c": whole.copy,
        "f": lambda: np.asfortranarray(whole),
        "second": lambda: x[(slice(0, None, 2),) * len(shape)],
    }[layout]()


def typed(rng, floats, as_torch, depth=3):
    """Return the text of an expression of x, y and r, whose result is exact, or rounded step by step."""
    if depth == 0:
        return rng.choice(["x", "x", "y", "r"])

    def inner():
        return typed(rng, floats, as_torch, rng.randrange(depth))

    library = "torch" if as_torch else "np"
    number = rng.choice(["2", "3", "-5", "7"] + ["2.5", "-0.5"] * floats)
    choices = [
        lambda: f"({inner()} {rng.choice('+-*')} {inner()})",
        lambda: f"({inner()} {rng.choice('+-*')} {number})",
        lambda: f"({rng.choice(['x', 'y'])} {rng.choice(['//', '%'])} {rng.choice(['y', 'r', number])})",
        lambda: f"{library}.where({inner()} {rng.choice(['<', '<=', '==', '!='])} {inner()}, {inner()}, {inner()})",
        lambda: f"{library}.{rng.choice(['maximum', 'minimum'])}({inner()}, {inner()})",
        lambda: f"abs({inner()})",
        lambda: f"(-{inner()})",
        lambda: f"{library}.{rng.choice(['square', 'sign'])}({inner()})",
        lambda: f"({inner()} / {number})",
        lambda: f"({inner()})**{rng.choice([0, 1, 2, 3])}",
    ]
    if floats:
        choices += [
            lambda: f"{library}.round({rng.choice(['x', 'y', 'x * 0.5'])})",
            lambda: f"{library}.{'atan2' if as_torch else 'arctan2'}(x, y)",
            lambda: f"abs(x)**{rng.choice(['r', '0.7', 'y', '-1.5'])}",
            lambda: f"{library}.sqrt(abs({inner()}))",
        ]
    else:
        choices += [
            lambda: f"({rng.choice(['x', 'y'])} {rng.choice('&|^')} {rng.choice(['x', 'y', '6'])})",
            lambda: "(~x)",
        ]
    return rng.choice(choices)()


def finished(rng, text, floats, as_torch):
    """Return the expression with a view or a reduction."""
    keep = "keepdim" if as_torch else "keepdims"
    views = ["[1:] - {0}[:-1]", "[1:-1, 2:]", "[:, ::2]", ".T", "[0]", "[..., 1]", "[2:, 1:] + {0}[:-2, :-1]"]
    axes = ["0", "-1", f"0, {keep}=True", f"-1, {keep}=True", ""]
    reductions = ["sum", "max" if not as_torch else "amax", "min" if not as_torch else "amin"] + ["mean"] * floats
    kind = rng.randrange(4)
    if kind == 0:
        return f"({text})" + rng.choice(views).format(f"({text})")
    if kind == 1:
        return f"({text}).{rng.choice(reductions)}({rng.choice(axes)})"
    return f"{text} + ({text}).{rng.choice(reductions)}({rng.choice(axes[2:4])})" if kind == 2 else text


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(48))
@pytest.mark.parametrize("library", ["numpy", "torch", pytest.param("opencl", marks=pytest.mark.slow)])
def test_random_expressions_of_any_dtype_and_strides(library, seed):
    """Dtype, shape and values are those of the library: integers exactly, and floats but for functions and sums."""
    rng, as_torch = random.Random(seed), library == "torch"
    dtypes = [np.float32, np.float64] if seed % 2 else [np.int32, np.int64, np.uint8 if seed % 4 else np.int32]
    if library == "opencl":
        require_backend("opencl")
        dtypes = [np.float32] if seed % 2 else [np.int32, np.int64]
    shape, floats = rng.choice([(1, 1), (4, 1), (1, 5), (7, 9), (33, 70)]), bool(seed % 2)
    layouts = ["c", "f", "second"] + ["backwards"] * (not as_torch)
    x, y = (array(rng, rng.choice(dtypes), shape, rng.choice(layouts), zeros=not as_torch or floats) for _ in range(2))
    r = array(rng, rng.choice(dtypes), shape[1:], "c", zeros=not as_torch or floats)
    text = (
        finished(rng, typed(rng, floats, as_torch), floats, as_torch)
        if min(shape) > 2
        else typed(rng, floats, as_torch)
    )
    apply = eval(f"lambda x, y, r: {text}", {"torch": torch, "np": np})  # our own text
    given = tuple(map(torch.from_numpy, (x, y, r))) if as_torch else (x, y, r)
    with np.errstate(all="ignore"):
        try:
            wanted = apply(*given)
        except (
            TypeError,
            RuntimeError,
            IndexError,
            OverflowError,
        ):  # not all of integers is there, and r has one dimension
            return
    if str(wanted.dtype) == "uint64" or (library == "opencl" and wanted.dtype == np.float64):
        return  # torch, and some devices, lack it
    try:
        got = acl.fuse(apply, device="opencl" if library == "opencl" else None)(*given)
    except UnsupportedCase as error:  # on the way to integers
        assert library == "opencl" and "float64" in str(error)  # noqa: PT017, PT018
        return
    assert (got.dtype, tuple(got.shape)) == (wanted.dtype, tuple(wanted.shape)), text
    got, wanted = np.asarray(got), np.asarray(wanted)
    if not np.issubdtype(wanted.dtype, np.floating):
        np.testing.assert_array_equal(got, wanted, text)
        return
    step = {np.dtype(np.float32): 4e-6, np.dtype(np.float64): 1e-14}[wanted.dtype]
    finite = wanted[np.isfinite(wanted)]
    np.testing.assert_allclose(got, wanted, rtol=step, atol=step * np.abs(finite).max(initial=0), err_msg=text)


def test_torch_raises_where_an_integer_is_divided_by_zero():
    for apply in (lambda x, y: x // y, lambda x, y: x % y):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            acl.fuse(apply)(torch.tensor([1, 2]), torch.tensor([1, 0]))
        assert acl.fuse(apply)(np.array([5, -7]), np.array([0, 2])).tolist() == [0, -4 if apply(-7, 2) == -4 else 1]


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int64])
def test_quotients_of_the_least_and_largest_integers_are_numpys(dtype):
    least, largest = np.iinfo(dtype).min, np.iinfo(dtype).max
    numbers = np.array(
        [least, least + 1, 2, 0, 1, -1 % 256 if dtype is np.uint8 else -1, 7, largest - 1, largest], dtype
    )
    x, y = numbers[:, None].repeat(len(numbers), 1), numbers[None].repeat(len(numbers), 0)
    for apply in (lambda x, y: (x // y, x % y), lambda x, y: (3 // y, 3 % y), lambda x, y: (np.rint(x), np.sign(x))):
        with np.errstate(all="ignore"):
            wanted = apply(x, y)
        for got, each in zip(acl.fuse(apply)(x, y), wanted, strict=True):
            assert got.dtype == each.dtype
            np.testing.assert_array_equal(got, each)


def test_signs_and_roots_of_specials_are_numpys():
    x = np.array([*SPECIAL, 4.0], np.float32)
    for apply in (np.sign, lambda x: np.maximum(x, -0.0) ** -0.5):
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(acl.fuse(apply)(x), apply(x), rtol=2e-7)
