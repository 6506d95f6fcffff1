"""Calls drawn at random, and the arguments that torch refuses: the result or the error is that of torch's CPU."""

import math

import pytest
import torch
import torch.nn.functional as F

import accelerant as acl
from accelerant.errors import UnsupportedCase, UnsupportedDtype
from accelerant.tensors import DeviceTensor, tensor_device
from requirements import require_backend

AT = torch.tensor([0, 1])
ALONG = {
    "cat": lambda x, d: torch.cat((x, x), d),
    "stack": lambda x, d: torch.stack((x, x), d),
    "index_select": lambda x, d: x.index_select(d, AT),
    "index_add": lambda x, d: x.index_add(d, AT, x),
    "index_fill": lambda x, d: x.index_fill(d, AT, 1),
    "index_copy": lambda x, d: x.index_copy(d, AT, x),
    "gather": lambda x, d: x.gather(d, torch.zeros(x.shape, dtype=torch.int64)),
    "scatter": lambda x, d: x.scatter(d, torch.zeros(x.shape, dtype=torch.int64), 1.0),
    "scatter_add": lambda x, d: x.scatter_add(d, torch.zeros(x.shape, dtype=torch.int64), x),
    "take_along_dim": lambda x, d: torch.take_along_dim(x, torch.zeros(x.shape, dtype=torch.int64), d),
    "norm": lambda x, d: x.norm(dim=d),
    "mean of two": lambda x, d: x.mean((0, d)),
    "split": lambda x, d: x.split(1, d),
    "chunk": lambda x, d: x.chunk(2, d),
    "narrow": lambda x, d: x.narrow(d, 0, 1),
    "select": lambda x, d: x.select(d, 0),
    "roll": lambda x, d: x.roll(1, d),
    "repeat_interleave": lambda x, d: x.repeat_interleave(2, d),
    "transpose": lambda x, d: x.transpose(0, d),
    "movedim": lambda x, d: x.movedim(0, d),
    "topk": lambda x, d: x.topk(1, d),
    "glu": lambda x, d: F.glu(x, d),
    "normalize": lambda x, d: F.normalize(x, dim=d),
} | {
    name: lambda x, d, name=name: getattr(torch, name)(x, d)
    for name in (
        "softmax", "log_softmax", "sum", "prod", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "any", "all",
        "var", "std", "logsumexp", "cumsum", "cumprod", "unsqueeze", "squeeze", "unbind", "flatten", "sort", "median",
    )
}  # fmt: skip
"""Name -> a call along a dimension."""

INT = torch.int64
ROWS = torch.arange(6.0).reshape(2, 3)
SHAPES = {
    "cat": lambda to: torch.cat((to(ROWS), to(torch.ones(2, 2)))),
    "cat of 0": lambda to: torch.cat((to(torch.ones(())), to(torch.ones(())))),
    "stack": lambda to: torch.stack((to(ROWS), to(ROWS[:1]))),
    "gather": lambda to: to(ROWS).gather(0, to(torch.zeros(2, 4, dtype=INT))),
    "gather by floats": lambda to: to(ROWS).gather(0, to(torch.zeros(2, 3))),
    "scatter": lambda to: to(ROWS).scatter(0, to(torch.zeros(2, 4, dtype=INT)), 1.0),
    "scatter of a source": lambda to: to(ROWS).scatter(0, to(torch.zeros(2, 3, dtype=INT)), to(ROWS[:1])),
    "scatter in place": lambda to: to(ROWS).scatter_(1, to(torch.zeros(3, 3, dtype=INT)), to(torch.ones(3, 3))),
    "scatter_add": lambda to: to(ROWS).scatter_add(0, to(torch.zeros(2, 3, dtype=INT)), to(ROWS[:1])),
    "scatter_add of vectors": lambda to: to(ROWS).scatter_add(0, to(torch.zeros(2, dtype=INT)), to(ROWS)),
    "index_add": lambda to: to(ROWS).index_add(0, to(torch.zeros(3, dtype=INT)), to(ROWS)),
    "index_add of other rows": lambda to: to(ROWS).index_add(0, to(torch.zeros(2, dtype=INT)), to(ROWS[:, :2])),
    "index_select": lambda to: to(ROWS).index_select(0, to(torch.zeros(2, 1, dtype=INT))),
    "index_select by floats": lambda to: to(ROWS).index_select(0, to(torch.zeros(2))),
    "too many indices": lambda to: to(ROWS)[(to(torch.zeros(2, dtype=INT)),) * 3],
    "indices of floats": lambda to: to(ROWS)[to(torch.zeros(2))],
    "index_put of another dtype": lambda to: to(ROWS).index_put((to(AT),), to(torch.ones(2, 3, dtype=INT))),
    "embedding": lambda to: F.embedding(to(AT), to(ROWS[None])),
    "classes": lambda to: F.nll_loss(to(ROWS), to(torch.zeros(3, dtype=INT))),
    "layer_norm": lambda to: F.layer_norm(to(ROWS), (3,), to(torch.ones(1))),
    "layer_norm of another shape": lambda to: F.layer_norm(to(ROWS), (2,)),
    "batch_norm": lambda to: F.batch_norm(to(ROWS[0]), None, None, training=True),
    "bias": lambda to: F.linear(to(ROWS), to(torch.ones(4, 3)), to(torch.ones(3))),
    "mm": lambda to: to(ROWS) @ to(ROWS),
    "bmm": lambda to: torch.bmm(to(ROWS), to(ROWS)),
    "mv": lambda to: torch.mv(to(ROWS), to(ROWS)),
    "dot": lambda to: torch.dot(to(ROWS[0]), to(ROWS[0, :2])),
    "bool product": lambda to: to(torch.ones(2, 2, dtype=torch.bool)) @ to(torch.ones(2, 2, dtype=torch.bool)),
    "tril": lambda to: to(ROWS[0]).tril(),
    "repeated dims": lambda to: to(ROWS).sum((0, -2)),
    "bits of floats": lambda to: to(ROWS) & 1,
    "less a bool": lambda to: to(ROWS > 0) - to(ROWS > 1),
    "ceil of bool": lambda to: to(ROWS > 0).ceil(),
    "var of integers": lambda to: to(torch.ones(3, dtype=INT)).var(),
    "lerp of integers": lambda to: to(ROWS).lerp(to(ROWS.long()), 0.5),
    "float alpha": lambda to: torch.add(to(ROWS.long()), to(ROWS.long()), alpha=1.5),
    "clamp without bounds": lambda to: to(ROWS).clamp(),
    "uniform": lambda to: to(ROWS.clone()).uniform_(2, 1),
    "normal": lambda to: to(ROWS.clone()).normal_(0, -1),
    "dropout": lambda to: torch.native_dropout(to(ROWS), 1.5, True),
    "in place, smaller": lambda to: to(ROWS[0].clone()).add_(to(ROWS)),
    "in place, empty": lambda to: to(torch.zeros(0)).add_(to(ROWS)),
    "fill": lambda to: to(ROWS.clone()).fill_(1e39),
    "clamp": lambda to: to(ROWS).clamp(max=-1e39),
    "masked_fill": lambda to: to(ROWS.half()).masked_fill(to(ROWS > 1), 70000.0),
}  # fmt: skip
"""Name -> a call that torch refuses, given a function that moves a tensor."""


@pytest.fixture(scope="module")
def webgpu():
    return require_backend("webgpu")


def outcome(call):
    """Return the result of a call, or the type of its error."""
    try:
        return call()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("shape", [(2, 2), ()])
def test_dimensions_out_of_range_are_torchs_error(webgpu, shape):
    x = torch.ones(shape)
    moved, last = acl.to(x, webgpu), max(len(shape), 1)
    for name, call in ALONG.items():
        for dim in (last + 1, -last - 2, 7):
            expected = outcome(lambda: call(x, dim))  # noqa: B023
            assert expected is IndexError if shape else isinstance(expected, type), name
            assert outcome(lambda: call(moved, dim)) is expected, name  # noqa: B023


@pytest.mark.parametrize("name", SHAPES)
def test_what_torch_refuses_is_refused(webgpu, name):
    expected = outcome(lambda: SHAPES[name](torch.clone))
    assert isinstance(expected, type)
    assert outcome(lambda: SHAPES[name](lambda x: acl.to(x, webgpu))) is expected


def test_numbers_beyond_float32_are_infinite(webgpu):
    x = torch.tensor([1.0, -math.inf, math.nan])
    moved = acl.to(x, webgpu)
    for n in (1e39, -1e39, 1e300, 3.4028235e38, 2**63 - 1, math.inf, math.nan):
        for call in (torch.lt, torch.eq, torch.mul, torch.add):
            assert torch.equal(call(moved, n).cpu().nan_to_num(7.0), call(x, n).nan_to_num(7.0)), (call, n)
    assert (acl.to(x.half(), webgpu) < 1e39).tolist() == [True, True, False]


# --- at random -------------------------------------------------------------------------------------------------------
FORMS = ((), (1,), (0,), (5,), (1, 5), (5, 1), (3, 5), (2, 3, 5), (0, 3))
NUMBERS = (0, 1, -1, 2, 3, 0.5, -0.5, 1e39, -1e39, math.inf, -math.inf, math.nan, 2**31, -(2**31), 300, True, 65520.0)
UNARY = (
    "exp", "log", "sqrt", "rsqrt", "reciprocal", "tanh", "sigmoid", "erf", "log2", "log1p", "neg", "abs", "relu",
    "square", "floor", "ceil", "trunc", "round", "sign", "isnan", "isinf", "logical_not",
    "bitwise_not", "isfinite", "clone",
)  # fmt: skip
BINARY = (
    "eq", "ne", "lt", "le", "gt", "ge", "mul", "add", "sub", "div", "maximum", "minimum", "logical_and", "logical_or",
    "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor",
)  # fmt: skip
IN_PLACE = ("mul_", "add_", "sub_", "div_", "lt_", "clamp_min_", "fill_", "copy_")


def drawn(rng, dtypes, shape=None):
    """Return a tensor of some dtype, shape, strides and offset; a dimension may be expanded."""
    dtype, shape = rng.choice(dtypes), rng.choice(FORMS) if shape is None else shape
    special = (0.0, -0.0, 1.0, -2.5, math.nan, math.inf, -math.inf) if dtype.is_floating_point else (0, 1, 2, 5)
    values = [rng.choice([rng.randint(0, 5), rng.choice(special)]) for _ in range(math.prod(shape))]
    x = torch.tensor(values, dtype=dtype).reshape(shape)
    form = rng.randrange(6)
    if form == 0 and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if form == 1 and x.dim() and x.shape[-1]:
        return x.repeat_interleave(2, -1)[..., ::2]
    if form == 2 and x.dim() and x.shape[0]:
        return x[:1].expand(x.shape)
    return torch.cat((x[:1], x))[1:] if form == 3 and x.dim() and x.shape[0] else x


def call_of(rng, dtypes):
    """Return a name, a function and its arguments."""
    x = drawn(rng, dtypes)
    other = rng.choice([rng.choice(NUMBERS), drawn(rng, dtypes, rng.choice([tuple(x.shape), (), (5,), (1,)]))])
    dim = rng.choice([*range(-max(x.dim(), 1), max(x.dim(), 1)), x.dim() + 1])
    kind = rng.randrange(9)
    if kind == 0:
        name = rng.choice(UNARY)
        return name, lambda x: getattr(torch, name)(x), [x]
    if kind < 3:
        name = rng.choice(BINARY)
        return name, getattr(torch, name), [x, other]
    if kind == 3:
        name = rng.choice(IN_PLACE if torch.is_tensor(other) else IN_PLACE[:-1])
        return name, lambda x, y: getattr(x, name)(y), [x, other]
    if kind < 6:
        name = rng.choice([*ALONG])
        return name, ALONG[name], [x, dim]
    if kind == 6:
        name, mask = rng.choice(["where", "masked_fill", "clamp"]), drawn(rng, [torch.bool], tuple(x.shape))
        call = {
            "where": torch.where,
            "masked_fill": lambda mask, x, y: x.masked_fill(mask, y),
            "clamp": lambda _, x, y: x.clamp(y),
        }
        return name, call[name], [mask, x, other]
    if kind == 7:
        dtype = rng.choice(dtypes)
        return f"to {dtype}", lambda x: x.nan_to_num(0.0, 0.0, 0.0).to(dtype), [x]
    name, x = rng.choice(["softmax", "sum", "mean", "amax", "index_select", "norm"]), drawn(rng, [torch.float32])

    def gradient(x, dim):
        leaf = x.detach().clone().requires_grad_()
        ALONG[name](leaf, dim).square().sum().backward()
        return leaf.grad

    return f"gradient of {name}", gradient, [x, dim]


def laid_out(x, device):
    """Return a tensor on a device with the same strides and offset, in memory of its own; by None on the host."""
    if not isinstance(x, torch.Tensor):
        return x
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).clone()
    return (whole if device is None else acl.to(whole, device)).as_strided(x.shape, x.stride(), x.storage_offset())


def settled(result, device):
    """Return a result after a copy to the host, which raises for indices that were out of range."""
    acl.to(torch.ones(1), device).cpu()
    return result


def differs(found, expected, place):
    """Return what differs in a result; None where nothing does."""
    if isinstance(expected, (tuple, list)):
        return next((text for a, b in zip(found, expected, strict=True) if (text := differs(a, b, place))), None)
    if expected.dtype in place.dtypes and not isinstance(found, DeviceTensor):
        return "it left the device"
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{found.dtype} {tuple(found.shape)}"
    a, b = found.cpu().double(), expected.double()
    loose = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(expected.dtype, 2e-5)  # one rounding of the last sum
    return None if torch.allclose(a, b, rtol=loose, atol=loose, equal_nan=True) else f"{a.tolist()}"


@pytest.mark.slow  # compiles a kernel for most
@pytest.mark.search(60)
@pytest.mark.filterwarnings("ignore::accelerant.errors.FallbackWarning")
def test_calls_at_random_are_torchs(device, rng, record_property):
    place = tensor_device(device)
    dtypes = [torch.float32] * 4 + sorted(place.dtypes - {torch.float32}, key=str)
    served = 0
    for _ in range(150):
        name, call, args = call_of(rng, dtypes)
        host, moved = ([laid_out(x, where) for x in args] for where in (None, device))
        shown = f"{name} {[(x.dtype, x.shape, x.stride(), x.tolist()) if torch.is_tensor(x) else x for x in args]}"
        expected, found = outcome(lambda: call(*host)), outcome(lambda: settled(call(*moved), device))  # noqa: B023
        if isinstance(expected, type):
            assert isinstance(found, type), f"{shown}: no error, torch has {expected}"
        elif isinstance(found, type):
            assert found in (UnsupportedCase, UnsupportedDtype), f"{shown}: {found}"
        else:
            assert not (text := differs([found, *moved[:1]], [expected, *host[:1]], place)), (
                f"{shown}: {text}, not {expected}"
            )
            served += 1
    assert served > 75
    record_property("calls", 150)
