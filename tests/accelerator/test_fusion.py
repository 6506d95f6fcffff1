"""`accelerant.fuse`: each function that it records against torch in float64, and what it refuses."""

import gc
import importlib.util
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import accelerant as acl
from accelerant.accelerator.fusion import code, function
from accelerant.accelerator.fusion.functions import FUNCTIONS
from accelerant.accelerator.fusion.graph import gradient_of
from accelerant.errors import CompileError, ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.runtime.compilation.host_c import c_compiler
from accelerant.runtime.compilation.kernel import CUDA_TARGETS
from accelerant.runtime.dispatch import operations
from accelerant.runtime.ledger import ledger
from processes import results
from refusals import assert_raises
from requirements import require_backend

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encount:RuntimeWarning")

# Relative and absolute. float32 as for the ops with several steps in float32; narrower dtypes are rounded once.
TOLERANCES = {torch.float32: (1e-5, 2e-6), torch.float16: (1e-3, 1e-3), torch.bfloat16: (8e-3, 8e-3)}

UNARY = [
    "neg", "abs", "exp", "expm1", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf", "exp2", "log",
    "log2", "log10", "square", "reciprocal", "erfc", "sign", "floor", "ceil",
]  # fmt: skip
POSITIVE = ("sqrt", "rsqrt", "log", "log1p", "log2", "log10", "reciprocal")
"""Functions whose arguments are made positive."""

CASES = {
    **{name: lambda x, name=name: getattr(torch, name)(x.abs() + 0.1 if name in POSITIVE else x) for name in UNARY},
    "operators": lambda x, y, r, c: (2 - x) * y / (c * c + 1) + r - x**2 + x**3 - 1 / (y**4 + 1) + abs(x) ** 0.5 * 2**y,
    "powers": lambda x, c: (x * x + 1) ** 1.5 + torch.pow(x, 0) + (c * c + 1) ** -0.5,
    "comparisons": lambda x, y: torch.where((x < y) & ~(x <= 0) | (y > 1) | (y >= 2) | (x != x) | (x == 7), x * 2, y),
    "maximum": lambda x, y, r: torch.maximum(x, y) + torch.minimum(x, r) + torch.max(y, r) + torch.min(x, y * 2),
    "clamp": lambda x: x.clamp(-0.5, 0.7) + torch.clamp(x, min=0.1) + x.clamp(max=0.2),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 3.0),
    "isfinite": lambda x: torch.where(torch.isfinite(x) & ~torch.isnan(x) & ~torch.isinf(x), x, 0.0),
    "gelu": lambda x, r: F.gelu(x) * r + 1,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "activations": lambda x: F.relu(x) + F.silu(x) * F.softplus(x) - F.logsigmoid(x) + F.leaky_relu(x, 0.2) + F.elu(x),
    "sums": lambda x, c: (x.sum(-1, keepdim=True) + c.sum(dim=-1, keepdim=True) * x, (x * c).sum(-1)),
    "means": lambda x, r: (x - x.mean(-1, keepdim=True)) * torch.mean(r * x, dim=-1, keepdim=True),
    "extremes": lambda x, y: x / x.amax(-1, keepdim=True) + torch.amin(y, dim=-1, keepdim=True),
    "max_pair": lambda x: x * x.max(dim=-1, keepdim=True).values + torch.min(x, -1, keepdim=True)[0],
    "variance": lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt(),
    "deviation": lambda x: x / torch.std(x, dim=-1, keepdim=True),
    "softmax": lambda x, r, c: F.softmax(x * c + r, dim=-1) * x.softmax(-1),
    "log_softmax": lambda x, y: (F.log_softmax(x, dim=-1) * y).sum(-1),
    "logsumexp": lambda x, y: x - torch.logsumexp(x + y, dim=-1, keepdim=True),
    "layer_norm": lambda x, r, s: F.layer_norm(x + s, (r.shape[0],), r, r + 1, 1e-6),
    "rms_norm": lambda x, r: F.rms_norm(x, (r.shape[0],), r, 1e-6),
    "gated": lambda x, y, s: F.silu(x) * y * s,
    "two_results": lambda x, r: (x + r, x.sum(-1), x > r),
    "unsqueezed": lambda x: x / x.sum(-1).unsqueeze(-1) + x.mean(-1)[..., None] + x.mean(-1)[:, None],
    "detached": lambda x, y: x.detach() * y + x,
    "casts": lambda x, y: x.to(torch.float16).float() * y + y.to(y.dtype),
    "same_twice": lambda x: x * x + x,
    "constants": lambda x: x * np.float64(2.0) + torch.tensor(0.5) - math.pi,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    for operation in operations().values():
        operation.forget()
    ledger().reset()
    torch.manual_seed(0)
    yield
    for operation in operations().values():
        operation.forget()


@pytest.fixture
def uninterpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The device of Triton's kernels: on the CPU they are interpreted."""


def arguments(name, M=5, N=7, dtype=torch.float32, device=DEVICE):
    shapes = {"x": (M, N), "y": (M, N), "r": (N,), "c": (M, 1), "s": ()}
    names = CASES[name].__code__.co_varnames[: CASES[name].__code__.co_argcount]
    return [torch.randn(shapes[n], dtype=dtype).to(device).requires_grad_() for n in names if n != "name"]


def tupled(y):
    return y if isinstance(y, tuple) else (y,)


def check(name, args, tolerance):
    """Compare results and gradients with torch's in float64."""
    wide = [x.detach().double().requires_grad_() for x in args]
    results, expected = tupled(acl.fuse(CASES[name])(*args)), tupled(CASES[name](*wide))
    rtol, atol = tolerance
    for y, wanted in zip(results, expected, strict=True):
        assert y.shape == wanted.shape
        torch.testing.assert_close(y.to(wanted.dtype), wanted, rtol=rtol, atol=atol)
    pairs = [pair for pair in zip(results, expected, strict=True) if pair[0].requires_grad]
    if not pairs:  # of steps alone
        return
    upstream = [torch.randn_like(y) for y, _ in pairs]
    own = torch.autograd.grad([y for y, _ in pairs], args, upstream, allow_unused=True)
    torchs = torch.autograd.grad([y for _, y in pairs], wide, [dy.double() for dy in upstream], allow_unused=True)
    for dx, wanted in zip(own, torchs, strict=True):
        if wanted is None or dx is None:
            assert wanted is None or not wanted.any()
        else:
            torch.testing.assert_close(dx.double(), wanted, rtol=10 * rtol, atol=10 * atol)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_torch_in_float64(name):
    check(name, arguments(name), TOLERANCES[torch.float32])
    ran = {row["implementation"] for row in ledger().to_dict()["ops"]}
    assert ran == {"triton"}


@pytest.mark.parametrize("name", CASES)
def test_torch_runs_the_same_graph(name, uninterpreted):
    check(name, arguments(name, device="cpu"), TOLERANCES[torch.float32])
    assert {row["implementation"] for row in ledger().to_dict()["ops"]} == {"torch"}


@pytest.fixture
def by_the_c_compiler(uninterpreted, monkeypatch):
    try:
        c_compiler()
    except CompileError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(function, "_LEAST", 0)
    monkeypatch.setattr(function, "_SCALAR", set())


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_portable_c_on_the_cpu(name, by_the_c_compiler):
    check(name, arguments(name, device="cpu"), TOLERANCES[torch.float32])
    ran = {row["implementation"] for row in ledger().to_dict()["ops"]}
    assert ran == {"torch" if name == "casts" else "portable"}


def test_portable_c_is_chosen_on_the_cpu(by_the_c_compiler, monkeypatch):
    x = torch.tensor([[math.nan, 1.0], [math.inf, -0.5], [-math.inf, -math.inf], [100.0, -200.0], [1e-30, 88.8]])
    softmax, others = acl.fuse(lambda x: (torch.softmax(x, -1), x.exp() + torch.erf(x) + x.tanh() + x.amax(-1, True)))(
        x
    )
    torch.testing.assert_close(softmax, torch.softmax(x, -1), equal_nan=True)
    torch.testing.assert_close(others, x.exp() + torch.erf(x) + x.tanh() + x.amax(-1, True), equal_nan=True)
    (row,) = ledger().to_dict()["ops"]
    assert row["implementation"] == "portable"
    monkeypatch.setattr(function, "_LEAST", 20)
    (decision,) = acl.explain(acl.fuse(torch.square), x.requires_grad_()).decisions
    reason = "fewer than 20 elements and a gradient: torch's calls take less than ours"
    assert ("portable", reason) in decision.refused


def test_every_function_has_a_case():
    tested = set().union(*(case.__code__.co_names for case in CASES.values()), UNARY)
    operators = {"add", "sub", "mul", "div", "pow", "lt", "le", "gt", "ge", "eq", "ne", "pos", "neg"}
    others = {"bitwise_and", "bitwise_or", "bitwise_not", "where", "half", "bfloat16", "double", "contiguous", "clone"}
    others |= {
        "round", "floor_divide", "remainder", "atan2", "bitwise_xor", "rint", "logical_and", "logical_or",
        "logical_not",
    }  # fmt: skip
    others |= {"int", "long", "permute", "transpose", "swapaxes", "diff"}  # of test_fusion_random and below
    assert set(FUNCTIONS) - tested - operators - others == set()


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 1), (0, 4), (4, 0), (33, 130)])
def test_odd_sizes(shape):
    check("gated", arguments("gated", *shape), TOLERANCES[torch.float32])
    if shape[1]:
        check("softmax", arguments("softmax", *shape), TOLERANCES[torch.float32])


def test_long_rows_are_looped_over(monkeypatch):
    monkeypatch.setattr(function, "_WHOLE_ROW", 4)
    monkeypatch.setattr(function, "_BLOCK", 4)
    for name in ("softmax", "sums"):
        check(name, arguments(name, 3, 13), TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_are_rounded_once(dtype, monkeypatch):
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        monkeypatch.delenv("TRITON_INTERPRET")  # the interpreter truncates to bfloat16
    for name in ("gelu", "softmax"):
        check(name, arguments(name, dtype=dtype), TOLERANCES[dtype])


def test_float64_is_torchs():
    args = arguments("softmax", dtype=torch.float64)
    check("softmax", args, (1e-12, 1e-12))
    (row, *_) = ledger().to_dict()["ops"]
    assert row["implementation"] == "torch"
    assert any(
        "float64" in reason for _, reason in acl.explain(acl.fuse(CASES["gelu"]), *args[:2]).decisions[0].refused
    )


@pytest.mark.parametrize("size", [65_535, 65_536])
def test_a_function_means_the_same_at_every_size(uninterpreted, size):
    """65,536 elements are where the cores share a kernel."""
    x = torch.full((size,), 2.3)
    x[:12] = torch.tensor(
        [math.nan, math.inf, -math.inf, 0.0, -0.0, 88.7, 88.73, -104.0, 1e-45, 3e38, -1e-40, 1e19]
    )  # fmt: skip

    def function(x):
        y = torch.maximum(x, x * 2) + torch.minimum(x, -x)
        return (
            x * 0, (x + 12582912.0) - 12582912.0, (x - x) * 2, x * x - 1.1 * x * x, x / 3 * 3, x + -0.0, y, x.exp(),
            torch.where(x == 0, 1 / x, x**-2), torch.tanh(x) * 0, F.relu(x), x.clamp(-1, 1), -torch.abs(x).sqrt(),
        )  # fmt: skip

    for number, (y, wanted) in enumerate(zip(acl.fuse(function)(x), function(x), strict=True)):
        torch.testing.assert_close(y, wanted, equal_nan=True, rtol=2e-7, atol=0, msg=f"result {number}")
        assert torch.equal(y[y == 0].signbit(), wanted[y == 0].signbit()), number
    sums = acl.fuse(lambda x: (x.sum(-1), x.amax(-1), torch.softmax(x, -1), torch.logsumexp(x, -1)))
    for at in (0, 1, 2):
        part = x[at].expand(size).clone()
        part[1:] = 1
        torch.testing.assert_close(sums(part)[:2], (part.sum(-1), part.amax(-1)), equal_nan=True)
        torch.testing.assert_close(sums(part)[2:], (part.softmax(-1), part.logsumexp(-1)), equal_nan=True)
    ran = {row["implementation"] for row in ledger().to_dict()["ops"]}
    assert ran == {"portable"}


ULPS = {"exp": 0.55, "tanh": 0.51, "erf": 0.51, "sigmoid": 2.5, "power": 0.51, "sqrt": 0.51, "gelu": None}
"""Errors in units of the last place; torch's are 0.56, 0.51 and 0.63, and 2.5 of the sigmoid, by MKL."""


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("name", ULPS)
def test_errors_of_functions_on_the_cpu(uninterpreted, name):
    functions = {"power": lambda x: x**-7, "sqrt": lambda x: torch.sqrt(abs(x)), "gelu": F.gelu}
    apply = functions.get(name) or (lambda x: getattr(torch, name)(x))
    x = torch.cat([torch.linspace(-87, 88.7, 66_000), torch.linspace(-2, 2, 9_999), torch.logspace(-20, -1, 999)])
    fused, wanted = acl.fuse(apply)(x).double(), apply(x.double())
    assert ledger().to_dict()["ops"][0]["implementation"] == "portable"
    if ULPS[name] is None:  # 1 + erf(x) cancels: absolute, and at most torch's
        assert (fused - wanted).abs().max() <= 1.01 * (apply(x).double() - wanted).abs().max()
        return
    normal = (wanted.abs() > 2.0**-126) & (wanted.abs() < 2.0**128)
    ulps = torch.ldexp((fused - wanted)[normal].abs(), 24 - torch.frexp(wanted[normal]).exponent)
    assert ulps.max() <= ULPS[name]


LONG = {
    "mean": lambda x: x.mean(-1),
    "sum": lambda x: (x * 3).sum(-1, keepdim=True),
    "variance": lambda x: (x + 1).var(-1) + 1,
    "norm": lambda x: (x * x).sum(-1).sqrt(),
    "softmax": lambda x: torch.softmax(x, -1)[..., :9] if not hasattr(x, "expr") else torch.softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]) + 1,
}


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("name", LONG)
def test_long_rows_lose_no_digits(uninterpreted, name):
    x = torch.full((1, 2_073_600), 0.1)
    got, wanted = acl.fuse(LONG[name])(x), LONG[name](x.double())
    torch.testing.assert_close(got.double()[..., :1], wanted[..., :1], rtol=2e-7, atol=0)
    assert {row["implementation"] for row in ledger().to_dict()["ops"]} == {"portable"}


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("least", [0, 65_536])
def test_gradients_where_torchs_have_an_edge(uninterpreted, monkeypatch, least):
    """Steps, NaN within a maximum, a clamp and an absolute value, and the small slope of elu."""
    monkeypatch.setattr(function, "_LEAST", least)
    functions = (
        lambda x: torch.floor(x) + torch.sign(x), lambda x: x.amax(-1), lambda x: x.clamp(-1, 1), lambda x: x.abs(),
        lambda x: F.elu(x) * 1e17, lambda x: F.relu(x),
    )  # fmt: skip
    values = [math.nan, -2.0, -37.0, -0.0, 0.0, 1.0, 3.0]
    for number, apply in enumerate(functions):
        x = torch.tensor([values, [0.0, *values[1:]]], requires_grad=True)
        own, torchs = (torch.autograd.grad(f(x).sum(), x)[0] for f in (acl.fuse(apply), apply))
        torch.testing.assert_close(own, torchs, equal_nan=True, msg=str(number))


@pytest.mark.slow
def test_long_rows_of_a_looped_kernel_lose_no_digits(monkeypatch):
    """Interpreted: as on a GPU, each element of a block adds up to 500 terms."""
    monkeypatch.setattr(function, "_WHOLE_ROW", 4)
    monkeypatch.setattr(function, "_BLOCK", 1)
    x = torch.full((1, 2000), 0.1, device=DEVICE)
    x[0, 5] = 1e7  # whose unit in the last place is 1
    total, spread = acl.fuse(lambda x: (x.sum(-1), (x * x).mean(-1)))(x)
    torch.testing.assert_close(total.double(), x.double().sum(-1), rtol=1e-7, atol=0)
    torch.testing.assert_close(spread.double(), (x.double() ** 2).mean(-1), rtol=1e-6, atol=0)
    x[0, 7] = math.inf
    assert acl.fuse(lambda x: x.sum(-1))(x).item() == math.inf


@pytest.mark.slow
def test_long_rows_and_specials_on_opencl():
    require_backend("opencl")
    x = np.full((2, 300_000), 0.1, np.float32)
    x[1, 3:8] = [math.inf, 1, 3e38, -0.0, 88.7]
    fused = acl.fuse(lambda x: (x.mean(-1), x * 0, (x + 12582912.0) - 12582912.0, x**5), device="opencl")
    mean, zero, rounded, power = fused(x)
    np.testing.assert_allclose(mean, [0.1, math.inf], rtol=1e-7)
    np.testing.assert_array_equal(zero, x * 0)
    np.testing.assert_array_equal(rounded, (x + np.float32(12582912)) - np.float32(12582912))
    np.testing.assert_allclose(power, (x.astype(np.float64) ** 5).astype(np.float32), rtol=2e-7)


IDENTITIES = {
    "clone": lambda a: a.clone(), "plus": lambda a: +a, "times one": lambda a: a * 1, "power": lambda a: a**1,
    "divided": lambda a: a / 1, "convert": lambda a: a.to(a.dtype), "detach": lambda a: a.detach(),
    "itself": lambda a: a, "copy": np.copy, "contiguous": lambda a: a.contiguous(),
}  # fmt: skip


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 5), (1, 65_536)])
def test_results_have_memory_of_their_own(uninterpreted, shape):
    for name, identity in IDENTITIES.items():
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x = torch.ones(shape, dtype=dtype)
            y = acl.fuse(identity)(x)
            y += 1
            assert (x == 1).all(), (name, dtype)
    a = np.ones(shape, np.float32)
    y = acl.fuse(lambda a: (a.astype(np.float32), +a, a * 2, a * 2))(a)
    for each in y[:3] if shape else ():
        each += 1
    assert (a == 1).all()
    assert (y[3] == 2).all()


SCALE, SCALES = 2.0, {"all": [2.0]}


class _Scaled:
    scale = 2.0

    def __init__(self):
        self.factor = 2.0

    @property
    def half(self):
        return self.factor / 2

    @acl.fuse
    def times(self, x):
        return x * self.factor


def _scaled(x):
    return x * SCALE


def test_what_is_read_from_outside_is_read_at_each_call(uninterpreted, monkeypatch):
    x, own, tensor, array = torch.ones(3), _Scaled(), torch.tensor(2.0), np.array(2.0)
    cell = 2.0

    def default(x, scale=torch.tensor(2.0), other=1.0):  # noqa: B008
        return x * scale * other

    functions = {
        "tensor": lambda x: x * tensor, "array": lambda x: array * x, "tensor within": lambda x: x * float(tensor),
        "global": _scaled, "helper": lambda x: _scaled(x) + 0, "items": lambda x: x * SCALES["all"][0],
        "cell": lambda x: x * cell, "attribute": lambda x: x * own.factor, "property": lambda x: x * own.half * 2,
        "class": lambda x: x * own.scale, "comprehension": lambda x: x * sum([each * 1 for each in (cell,)]),
        "bound": lambda x: x.clamp(max=tensor) * 0 + tensor, "made": lambda x: x * (torch.tensor(0.5) * 2) * cell,
    }  # fmt: skip
    fused = {name: acl.fuse(each) for name, each in functions.items()}
    fused["default"], fused["callable"], fused["argument"] = acl.fuse(default), own.times, lambda x: with_object(x, own)
    with_object = acl.fuse(lambda x, settings: x * settings.factor)
    for name, each in fused.items():
        for _ in range(2):
            assert each(x).tolist() == [2] * 3, name
    tensor.fill_(5.0)
    array[...] = cell = own.factor = 5.0
    monkeypatch.setattr(_Scaled, "scale", 5.0)
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    monkeypatch.setitem(SCALES, "all", [5.0])
    default.__defaults__[0].fill_(2.5)
    default.__defaults__ = (default.__defaults__[0], 2.0)
    for name, each in fused.items():
        for _ in range(2):
            assert each(x).tolist() == [5] * 3, name
    counter = acl.fuse(lambda x: x * next(numbers))
    numbers = iter((1.0, 2.0))
    assert [counter(x)[0].item(), counter(x)[0].item()] == [1, 2]
    inverse = acl.fuse(lambda x, sign: 1 / (x * sign))
    assert [inverse(x, sign)[0].item() for sign in (0.0, -0.0)] == [math.inf, -math.inf]
    trained = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(UnsupportedCase, match="an array from outside of the function: make it an argument"):
        acl.fuse(lambda x: x * trained)(x)


def test_a_number_from_outside_compiles_no_other_kernel(by_the_c_compiler):
    scale, x = torch.tensor(2.0), torch.ones(3)
    fused = acl.fuse(lambda x: x * scale)
    programs = set()
    for number in (2.0, 3.0, -0.0):
        scale.fill_(number)
        assert fused(x).tolist() == [number] * 3
        programs.add(fused.program(x))
    assert len(programs) == 1


RECORDS = np.zeros(5, dtype=[("tag", "u1"), ("value", "<f4")])
RECORDS["value"] = range(5)
GRID = np.arange(24, dtype=np.float32).reshape(4, 6)
STRIDED = {
    "one row": np.ones((1, 4), np.float32)[::-1], "rows": GRID[::-1], "columns": GRID[:, ::-1], "transposed": GRID.T,
    "one": np.ones((1, 1), np.float32)[::-1, ::-1], "none": np.ones((0, 4), np.float32)[::-1], "parts": GRID[1:, ::2],
    "fortran": np.asfortranarray(GRID), "zero": np.broadcast_to(np.float32(3), (3, 4)), "records": RECORDS["value"],
    "same rows": np.broadcast_to(GRID[:1], (5, 6)), "swapped": GRID.astype(">f4"), "both": GRID.astype(">f4").T[::-1],
    "one record": RECORDS["value"][1:2], "odd address": np.frombuffer(b"0" + GRID.tobytes(), np.float32, 24, 1),
    "no dimension": np.array(2.0, ">f4"), "float64": np.arange(3.0)[::-1], "float16": np.arange(3).astype(">f2"),
    "windows": np.lib.stride_tricks.sliding_window_view(np.arange(8, dtype=np.float32), 3),
}  # fmt: skip


@pytest.mark.parametrize("device", [None, pytest.param("opencl", marks=pytest.mark.slow)])
def test_arrays_of_any_strides(uninterpreted, device):
    if device:
        require_backend(device)
    fused = acl.fuse(lambda x: x * 2 + 1, device=device)
    for name, x in STRIDED.items():
        if device and x.dtype.newbyteorder("=") != np.float32:
            continue
        before, got = x.copy(), fused(x)
        np.testing.assert_array_equal(got, x * 2 + 1, err_msg=name)
        assert np.shape(got) == x.shape
        np.testing.assert_array_equal(x, before)
    for x in (torch.ones(3, 4).T, torch.ones(1).expand(3, 4), torch.ones(6)[::2], torch.tensor([1 + 2j]).conj().imag):
        assert torch.equal(acl.fuse(lambda x: x * 3)(x), x * 3)
    with pytest.raises(UnsupportedCase, match=r"takes dense arrays, got torch.sparse_coo: use .to_dense"):
        acl.fuse(lambda x: x * 3)(torch.ones(2, 3).to_sparse())


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_results_are_written_to_out(uninterpreted, make):
    """In any layout, and where it is an argument: as if it were assigned afterwards; from the second call on by C."""
    fused, sums = (acl.fuse(lambda x, y: x * 2 + y), acl.fuse(lambda x: (x.sum(0), x - x.sum(-1, keepdims=True))))
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    y, wanted = x[::-1].copy(), x * 2 + x[::-1]
    for _ in range(2):
        for out in (
            np.zeros((3, 4), np.float32),
            np.zeros((4, 3), np.float32).T,
            np.zeros((6, 8), np.float32)[::2, ::2],
        ):
            given = make(out)
            assert fused(make(x), make(y), out=given) is given
            np.testing.assert_array_equal(out, wanted)
        own = make(x.copy())
        fused(own, make(y), out=own)
        np.testing.assert_array_equal(own, wanted)
        line = np.arange(50, dtype=np.float32)
        after = line[1:] * 2 + line[:-1]
        fused(make(line[1:]), make(line[:-1]), out=make(line[1:]))
        np.testing.assert_array_equal(line[1:], after)
        total, rest = make(np.zeros(4, np.float32)), make(np.zeros((3, 4), np.float32))
        sums(make(x), out=(total, rest))
        np.testing.assert_array_equal(total, x.sum(0))
        np.testing.assert_array_equal(rest, x - x.sum(-1, keepdims=True))
    for out, error, match in (
        (make(np.zeros((3, 5), np.float32)), ShapeError, r"out\[0\] must have shape \(3, 4\), got \(3, 5\)"),
        (make(np.zeros((3, 4))), UnsupportedDtype, r"out\[0\] must be float32, got .*float64"),
        ([1.0], UnsupportedDtype, r"out\[0\] must be an array of .*, got list"),
    ):
        assert_raises(error, match, fused, make(x), make(y), out=out)
    assert_raises(ShapeError, "out must be 2 arrays, got 1", sums, make(x), out=(make(np.zeros(4, np.float32)),))
    assert_raises(ShapeError, "out must be 2 arrays, got 1", lambda: sums(make(x), out=make(np.zeros(4, np.float32))))
    with pytest.raises(UnsupportedCase, match="out= has no gradient"):
        fused(torch.ones(2, requires_grad=True), torch.ones(2), out=torch.ones(2))
    assert acl.fuse(lambda x, out: x + out)(make(x), out=1.0)[0, 0] == 1  # the function's own


def test_out_may_be_memory_of_an_argument(uninterpreted):
    """As if it were assigned afterwards: one of several results, numbers of another width, and negated views."""
    for size in (9, 70_000):
        line, column = np.arange(size, dtype=np.float32), np.arange(size, dtype=np.float32)[:, None].copy()
        wide = np.ones((size, 3), np.float32)
        short, long = np.ones(2 * size, np.float32), np.ones(size)
        for apply, args, out in (
            (lambda x, y: (y + 1, x * 2), (line, np.ones_like(line)), (line, np.empty_like(line))),
            (lambda x, y: (x + 1, x * y), (column, wide), (column, wide.copy())),
            (lambda x: x.astype(np.float64) * 2, (short[:size],), short.view(np.float64)),
            (lambda x: x.astype(np.float32) * 2, (long,), long.view(np.float32)[:size]),
        ):
            fused, wanted = acl.fuse(apply), apply(*args)
            fused(*args)
            fused(*args, out=out)
            for y, each in zip(tupled(out), tupled(wanted), strict=True):
                np.testing.assert_array_equal(y, each)
    x, negated = torch.arange(3.0), torch.zeros(3, dtype=torch.complex64).conj().imag
    double = acl.fuse(lambda x: x * 2)
    double(x)
    assert torch.equal(double(x, out=negated), x * 2)


def test_calls_of_small_arrays_are_counted_and_told_apart(uninterpreted):
    """From the second call of a kind on, C compares the arguments."""
    scale = 3.0

    def apply(x, y, power):
        return (x * scale + y) ** power

    fused, x = acl.fuse(apply), np.arange(6, dtype=np.float32).reshape(2, 3)
    kinds = [
        (x, x, 2), (x, x, 3), (x, x[0], 2), (x.astype(np.float64), x, 2), (x[:, ::2], x[:, :1], 2), (x[::-1], x, 2),
        (x.T, x.T, 2), (x.view(np.int32), x, 2), (x, x.reshape(1, 2, 3), 2), (x, x, 2.0), (x, x.astype(">f4"), 2),
        (np.array(2.0), x, 2), (np.frombuffer(b"0" + x.tobytes(), np.float32, 6, 1).reshape(2, 3), x, 2),
    ]  # fmt: skip
    for _ in range(7):
        for args in kinds:
            got, wanted = fused(*args), apply(*args)
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
            np.testing.assert_array_equal(got, wanted)
    assert sum(row["calls"] for row in ledger().to_dict()["ops"]) == 7 * len(kinds)
    several, alone = acl.fuse(lambda x: (x.sum(), x * 2, x + 1, x.max(0))), acl.fuse(lambda x: x.sum())
    for _ in range(7):
        total, twice, more, largest = several(x)
        assert type(total) is np.float32
        assert total == 15
        for got, wanted in ((twice, x * 2), (more, x + 1), (largest, x.max(0))):
            np.testing.assert_array_equal(got, wanted)
        assert type(alone(x)) is np.float32
    same = fused(x, x, 2)
    assert fused(x, x, 2) is not same
    scale = 4.0
    np.testing.assert_array_equal(fused(x, x, 2), apply(x, x, 2))
    assert type(fused(x.view(np.recarray), x, 2)) is np.ndarray


@pytest.mark.slow
def test_arrays_of_numpy_on_webgpu():
    require_backend("webgpu")
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    for apply in (lambda x: x[1:] - x[:-1] * 2, lambda x: x.T.sum(0), lambda x: np.round(x * 0.3) % 4 // 2):
        np.testing.assert_allclose(acl.fuse(apply, device="webgpu")(x), apply(x), rtol=1e-6)


@pytest.mark.gpu
def test_views_integers_and_sums_on_a_gpu():
    x = torch.randn(70, 90, device="cuda")
    i = torch.randint(-9, 9, (70, 90), device="cuda")
    functions = (
        lambda x, i: x[1:] - x[:-1] * 2, lambda x, i: (x * i).sum(0), lambda x, i: i * 3 + (x > 0),
        lambda x, i: torch.round(x * 3) + x // 0.3, lambda x, i: (x - x.mean(0)) / x.std(0), lambda x, i: x.T * 2,
        lambda x, i: i // 4 + i % 3, lambda x, i: torch.where(i > 2, x, -x).amax(), lambda x, i: x.abs() ** x,
    )  # fmt: skip
    for number, apply in enumerate(functions):
        got, wanted = acl.fuse(apply)(x, i), apply(x, i)
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5, msg=str(number))


SPECIAL = torch.tensor([[math.nan, 1.0, -2.0], [math.inf, 0.0, -0.0], [-math.inf, 3.0, 1e30], [-1e30, 1e-30, 90.0]])


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("interpret", [True, False])
def test_nan_and_infinity_are_kept(interpret, monkeypatch):
    if not interpret:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in (*UNARY, "clamp", "activations", "extremes", "softmax", "log_softmax", "gelu", "logsumexp"):
        args = arguments(name, *SPECIAL.shape, device="cpu")
        args[0] = SPECIAL
        if name in POSITIVE:
            continue
        exact = [each.double() for each in args]  # gelu of oneDNN in float32 is nan at infinity
        expected, got = tupled(CASES[name](*exact)), tupled(acl.fuse(CASES[name])(*args))
        for y, wanted in zip(got, expected, strict=True):
            assert torch.allclose(y, wanted.float(), rtol=2e-5, atol=1e-6, equal_nan=True), name


def test_broadcasting_of_leading_dimensions():
    x, y, r = torch.randn(2, 3, 5), torch.randn(3, 1), torch.randn(1, 1, 5)
    args = [each.requires_grad_() for each in (x, y, r)]
    fused = acl.fuse(lambda x, y, r: torch.softmax(x * y, -1) + r)
    got, wanted = fused(*args), torch.softmax(x * y, -1) + r
    torch.testing.assert_close(got, wanted)
    for dx, expected in zip(*(torch.autograd.grad(each.square().sum(), args) for each in (got, wanted)), strict=True):
        torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-5)
    t = torch.randn(5, 6, requires_grad=True)
    torch.testing.assert_close(acl.fuse(torch.tanh)(t.T), t.T.tanh())


def test_second_derivatives_are_torchs():
    args = [x.detach().requires_grad_() for x in arguments("gated", 2, 3)]
    fused = acl.fuse(CASES["gated"])
    for own, torchs in zip(
        *(
            torch.autograd.grad(torch.autograd.grad(f(*args).sum(), args[0], create_graph=True)[0].sum(), args)
            for f in (fused, CASES["gated"])
        ),
        strict=True,
    ):
        torch.testing.assert_close(own, torchs, rtol=1e-4, atol=1e-5)


def test_the_function_runs_once_for_each_class_of_shapes():
    runs = []

    @acl.fuse
    def fused(x, y, scale=2.0):
        """Scale."""
        runs.append(1)
        return x * scale + y

    assert fused.__doc__ == "Scale."
    for rows in (2, 3, 4):
        fused(torch.ones(rows, 5), torch.ones(5))
    assert len(runs) == 1
    fused(torch.ones(2, 5), torch.ones(2, 1))
    assert len(runs) == 2
    assert fused(torch.ones(2, 5), torch.ones(2, 1), scale=3.0)[0, 0] == 4
    assert fused(torch.ones(2, 5, dtype=torch.float16), torch.ones(5)).dtype == torch.float32
    assert len(runs) == 4


def test_a_shape_that_is_read_is_part_of_the_key():
    fused = acl.fuse(lambda x: x.sum(-1) / x.shape[-1] + len(x) + x.size(0) - x.size()[0])
    for shape in ((2, 3), (4, 5)):
        torch.testing.assert_close(fused(torch.ones(shape)), torch.full(shape[:1], 1.0 + shape[0]))


def test_arrays_of_numpy_and_functions_of_numpy():
    fused = acl.fuse(lambda x, y: np.exp(x - np.max(x, axis=-1, keepdims=True)) * y + np.add(x, 1) / np.sqrt(y))
    x, y = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32), np.float32([1, 2, 3, 4])
    got = fused(x, y)
    assert type(got) is np.ndarray
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.exp(x - x.max(-1, keepdims=True)) * y + (x + 1) / np.sqrt(y), rtol=2e-6)
    spread = acl.fuse(
        lambda x: (x.std(axis=-1), np.var(x, axis=-1, ddof=1), x.max(axis=-1), np.clip(x, 0, None).mean(-1))
    )
    for y, wanted in zip(spread(x), (x.std(-1), x.var(-1, ddof=1), x.max(-1), x.clip(0).mean(-1)), strict=True):
        np.testing.assert_allclose(y, wanted, rtol=3e-6)


def test_arrays_of_jax():
    jax = pytest.importorskip("jax")
    got = acl.fuse(lambda x: x * 2 + 1)(jax.numpy.arange(3.0))
    assert isinstance(got, jax.Array)
    assert got.tolist() == [1, 3, 5]


def test_explain_names_the_function_and_the_implementation(capsys):
    acl.explain(acl.fuse(CASES["gelu"]), *arguments("gelu"))
    shown = capsys.readouterr().out
    assert "fused_lambda_fwd  5x7 float32 array row" in shown
    assert "chosen   triton (own kernel)" in shown


def test_conditions_and_bool_arrays():
    mask, x = torch.tensor([[True, False, True]]), torch.tensor([[1.0, 2.0, math.nan]])
    keep, both = acl.fuse(lambda m, x: (torch.where(m, x, 0.0) * m, m & ~(x > 1)))(mask, x)
    torch.testing.assert_close(keep, torch.tensor([[1.0, 0.0, math.nan]]), equal_nan=True)
    assert both.tolist() == [[True, False, True]]


@pytest.mark.parametrize("n", [0, 65, 100])
def test_whole_powers_of_any_number(n):
    x = torch.tensor([[-1.01, 0.99, math.inf, -math.inf, math.nan]])
    torch.testing.assert_close(acl.fuse(lambda x: x**n)(x), x**n, equal_nan=True)


def test_results_of_smaller_shapes():
    x, y, r = torch.ones(2, 8), torch.ones(8), torch.ones(2, 1)
    got = acl.fuse(lambda x, y, r: (x + y, y * 2, r + 1, y.sum() + 1))(x, y, r)
    for each, wanted in zip(got, (x + y, y * 2, r + 1, y.sum() + 1), strict=True):
        assert torch.equal(each, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_default_eps_of_rms_norm_is_torchs(dtype):
    x = torch.linspace(-0.02, 0.02, 64).to(dtype)[None]
    torch.testing.assert_close(acl.fuse(lambda x: F.rms_norm(x, (64,)))(x), F.rms_norm(x, (64,)))


REFUSED = {
    "control": (lambda x: x if x.sum() > 0 else -x, "decides what the function does.*use torch.where.*line"),
    "chain": (lambda x: np.where(0 < x < 1, x, 0), "& and . for `and`"),
    "number": (lambda x: math.exp(x), "a number is wanted of an array.* in place of math's"),
    "shift": (lambda x: x.int() << 1, "lshift is not supported"),
    "misspelled": (lambda x: torch.add(x, 1).sigmoids(), "sigmoids of an array .*did you mean sigmoid"),
    "in place": (lambda x: x.__iadd__(1), "an argument.* would change in place; write x = x"),
    "in place of less": (lambda x: (x.int() * 1).__iadd__(0.5), "int32 cannot become float32 in place"),
    "item": (lambda x: x * x.amax(-1).item(), "item.. reads values"),
    "unknown": (lambda x: torch.cumsum(x, -1), "torch.cumsum is not supported .*test_fusion.py, line"),
    "method": (lambda x: x.cumsum(-1), "cumsum of an array is not supported"),
    "accumulate": (lambda x: np.add.accumulate(x), "numpy.add.accumulate is not supported"),
    "ufunc": (lambda x: np.hypot(x, x), "numpy.hypot is not supported"),
    "index": (lambda x: x[[0, 1]], "indexing with arrays is not supported"),
    "view": (lambda x: torch.softmax(x, -1)[1:], "a view of a value that is reduced"),
    "sizes": (lambda x: (x[:, 1:] * 2, x * 2), r"views of shapes \(2, 2\), \(2, 3\) in one function"),
    "dimension": (lambda x: x.sum(2), "dim=2 of 2 dimensions"),
    "bits": (lambda x: x & 1, "bits of numbers"),
    "integer power": (lambda x: x.int() ** x.int(), "a power of integers with an array"),
    "negative power": (lambda x: x.int() ** -1, "integers to negative powers"),
    "fraction": (lambda x: x.int().mean(), "the mean of int32"),
    "large number": (lambda x: x.int() + 2**40, "out of the range of int32"),
    "matmul": (lambda x: x @ x, "matmul is not supported"),
    "assignment": (lambda x: x.__setitem__(0, 1), "an assignment to elements is not supported"),
    "outside": (lambda x: x + torch.ones(3), "array from outside of the function"),
    "outside_numpy": (lambda x: np.ones(3) * x, "array from outside of the function"),
    "keepdim": (lambda x: x / x.sum(-1), "reduce with keepdim=True"),
    "option": (lambda x: x.clamp(lowest=1), "clamp with arguments that fuse does not know"),
    "indices": (lambda x: x.max(dim=-1)[1] + 1, "unsupported operand"),
    "indices_method": (lambda x: x.max(dim=-1).indices.float(), "indices of max and min"),
    "constant": (lambda x: 1.0, "result 0 is a float, not computed from the arguments"),
    "nothing": (lambda x: (), "returns nothing"),
    "conditions": (lambda x: ((x > 0) + (x > -1)) * x, "a sum of conditions"),
}


def _accumulated(x, y):
    n = y * 1
    for _ in range(3):
        n += x * x.size
    n -= 1.0
    return n


def test_what_is_computed_changes_in_place_and_keeps_its_dtype():
    x, y = np.arange(6.0).reshape(2, 3), np.ones((2, 3), np.float32)
    result = acl.fuse(_accumulated)(x, y)
    np.testing.assert_allclose(result, _accumulated(x, y))
    assert result.dtype == np.float32
    assert_raises(ShapeError, r"\(3,\) cannot become one of \(2, 3\) in place", lambda: acl.fuse(_accumulated)(x, y[0]))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused_by_name(name):
    refused, sentence = REFUSED[name]
    assert_raises((UnsupportedCase, TypeError), sentence, lambda: acl.fuse(refused)(torch.ones(2, 3)))


def test_bad_arguments_are_refused():
    double = acl.fuse(lambda x, y=1.0: x * y)
    assert_raises(UnsupportedDtype, r"int32, int64, got complex64", double, torch.ones(2, dtype=torch.complex64))
    assert_raises(UnsupportedDtype, "at least one array", double, 2.0)
    assert_raises(UnsupportedDtype, "got list", double, torch.ones(2), [1.0])
    assert_raises(ShapeError, r"\(2,\), \(3,\) do not broadcast", double, torch.ones(2), torch.ones(3))
    assert_raises(UnsupportedDtype, "does not multiply matrices", double, np.ones((2, 2), np.float32).view(np.matrix))
    assert_raises(ConfigError, "takes a function, got int", acl.fuse, 3)
    assert_raises(ConfigError, "nonsense", lambda: acl.fuse(device="nonsense")(torch.tanh))


@pytest.mark.slow
def test_decorated_methods_and_compile():
    class Scaled:
        @acl.fuse
        def __call__(self, x):
            return x * 2

    assert Scaled()(torch.ones(2)).tolist() == [2, 2]
    assert acl.fuse(lambda x: Scaled()(x) + 1)(torch.ones(2)).tolist() == [3, 3]
    assert torch.func.grad(lambda x: acl.fuse(torch.square)(x).sum())(torch.ones(2)).tolist() == [2, 2]


def test_programs_are_released_with_their_plans():
    first = acl.fuse(lambda x: x * 2 + 1).program(torch.ones(2, 3))
    second = acl.fuse(lambda x: x * 2 + 1).program(torch.ones(4, 3))
    assert first == second
    assert first != acl.fuse(lambda x: x * 3 + 1).program(torch.ones(2, 3))
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "activations", "two_results"])
def test_portable_c_on_opencl(name):
    require_backend("opencl")
    args = [x.detach() for x in arguments(name, device="cpu")]
    got = acl.fuse(CASES[name], device="opencl")(*(x.numpy() for x in args))
    for y, wanted in zip(tupled(got), tupled(CASES[name](*(x.double() for x in args))), strict=True):
        np.testing.assert_allclose(y, wanted.numpy(), rtol=1e-5, atol=2e-6)
    (row,) = ledger().to_dict()["ops"]
    assert (row["implementation"], row["backend"]) == ("portable", "opencl")


@pytest.mark.slow
def test_opencl_takes_numpy_alone():
    require_backend("opencl")
    with pytest.raises(
        UnsupportedDtype, match=r"takes NumPy arrays of float32, bool, .*, got a float64 array of numpy"
    ):
        acl.fuse(lambda x: x, device="opencl")(np.ones(3))
    with pytest.raises(UnsupportedCase, match="on opencl: portable C has no float16 here"):
        acl.fuse(lambda x: x.astype(np.float16) * 2, device="opencl")(np.ones(3, np.float32))


_TYPES = {torch.float32: "*fp32", torch.bool: "*i1"}


def compile_kernels(target, names):
    """Compile kernels of each schedule and direction; in a process that has interpreted none."""
    for name in names:
        program = acl.fuse(CASES[name]).program(*arguments(name))
        backward, _ = gradient_of(program, tuple(range(len(program.inputs))))
        parts = []

        def run(part, shape, *tensors, parts=parts):
            parts.append(part)
            return part.run_torch(shape, *tensors)

        for each in (program, backward):
            sizes = [(5 if x.by_row else 1, 7 if x.by_column else 1) for x in each.inputs]
            ones = [torch.ones(size, dtype=x.dtype) for size, x in zip(sizes, each.inputs, strict=True)]
            function._staged(run, each, (5, 7), ones)
        assert len(parts) >= 2
        for each in parts:
            for schedule in ("whole", "looped") if each.reduces else ("stream",):
                kernel = code.triton_kernel(each, schedule)
                types = {f"x{i}": _TYPES[each.inputs[i].dtype] for i in each.used} | {"M": "i32", "N": "i32"}
                types |= {f"y{i}": _TYPES[result.dtype] for i, result in enumerate(each.results)}
                constants = {"BLOCK": 1024} if schedule == "stream" else {"ROWS": 1, "BLOCK": 1024}
                assert kernel.source(types, constants).dialects["triton"].build(target).code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "names"),
    [(CUDA_TARGETS[0], ["comparisons", "layer_norm"]), ("sm_90", ["gated"]), ("gfx942", ["layer_norm"])],
)
def test_kernels_compile(target, names):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton has no wheel for this system")
    results(compile_kernels, (target, names))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["operators", "softmax", "layer_norm", "gelu", "activations", "extremes"])
def test_kernels_on_a_gpu(name, dtype):
    for shape in ((5, 7), (300, 1024), (3, 40000)):
        args = arguments(name, *shape, dtype=dtype, device="cuda")
        wide = [x.detach().double().requires_grad_() for x in args]
        results, expected = tupled(acl.fuse(CASES[name])(*args)), tupled(CASES[name](*wide))
        for y, wanted in zip(results, expected, strict=True):
            rtol, atol = TOLERANCES[dtype]
            torch.testing.assert_close(y.double(), wanted, rtol=10 * rtol, atol=10 * atol)
        sum(y.float().sum() for y in results).backward()
        sum(y.sum() for y in expected).backward()
        for x, wanted in zip(args, wide, strict=True):  # torch's slope of abs(x)**0.5 at 0 is no number either
            assert torch.equal(x.grad.isfinite(), wanted.grad.isfinite())
    assert {row["implementation"] for row in ledger().to_dict()["ops"]} == {"triton"}
