"""Every entry of the aten table against torch on the CPU, for several layouts, dtypes and shapes."""

import pytest
import torch

import accelerant as acl
from accelerant.config import override
from accelerant.errors import UnsupportedCase, UnsupportedDtype
from accelerant.tensors import (
    DeviceTensor,
    kernels,  # noqa: F401  it fills the table
    tensor_device,
)
from accelerant.tensors.tensor import TABLE, aten

X, Y = torch.manual_seed(0) and torch.randn(3, 5), torch.randn(3, 5)
POSITIVE, BOOLS, INTS = X.abs() + 0.1, torch.randn(3, 5) > 0, torch.randint(-4, 5, (3, 5))
WIDE, ROW, COLUMN, SCALAR, EMPTY = torch.randn(2, 3, 5), torch.randn(5), torch.randn(3, 1), torch.tensor(0.7), X[:0]
TURNED, SPREAD, LONG = torch.randn(5, 3).t(), torch.randn(3, 1).expand(3, 5), torch.randn(3, 700)
LAYOUTS = (X, TURNED, SPREAD, WIDE[:, 1:, ::2], SCALAR, EMPTY, LONG[:, ::3])
PAIRS = ((X, Y), (X, TURNED), (WIDE, X), (X, ROW), (ROW, COLUMN), (SCALAR, X), (X, SCALAR), (EMPTY, Y[:0]), (X, INTS))
SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 0.5, 1.5, 2.5, -0.5, 1e-30, -7.25])
Q, K, V = (torch.randn(2, 3, 7, 4).transpose(1, 2) for _ in range(3))
INDEX = torch.tensor([[0, 2, 1], [1, 1, 2]])
LOGITS, TARGETS = torch.randn(6, 9), torch.tensor([3, -100, 8, 0, 3, 5])
IMAGE, A, B = torch.randn(2, 3, 4), torch.randn(4, 19, 33), torch.randn(4, 33, 21)


def layer_norm(x, shape, *weights):
    dims = list(range(x.dim() - len(shape), x.dim()))
    mean = x.mean(dims, keepdim=True)
    return x, shape, mean, (x.var(dims, unbiased=False, keepdim=True) + 1e-5).rsqrt(), *weights


ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
CAUSAL = ATTENTION(Q, K, V, 0.0, True)
MASK = torch.randn(3, 3)

CASES = {}
"""Name of an operation without overload -> the arguments of its calls; one dict in the end has keyword arguments."""
CASES["exp"] = [(x,) for x in LAYOUTS]
for name in ("tanh", "sigmoid", "sin", "cos", "erf", "exp2", "silu", "neg", "abs", "relu", "square", "log1p"):
    CASES[name] = [(X,), (LONG[:, ::3],)]
for name in ("log", "sqrt", "rsqrt", "reciprocal", "log2", "log10"):
    CASES[name] = [(POSITIVE,), (torch.tensor([1, 4, 9]),)]
for name in ("floor", "ceil", "trunc", "round", "sign", "isnan", "isinf", "relu", "abs", "logical_not"):
    CASES[name] = [(SPECIAL,), (INTS,), (X,)]
CASES["bitwise_not"] = [(INTS,), (BOOLS,)]
for name in ("mul", "maximum", "minimum", "add", "sub", "eq", "ne", "lt", "le", "gt", "ge"):
    CASES[name] = [(X, Y), (SCALAR, X), (X, INTS)]
CASES["mul"] = list(PAIRS)
for name in ("mul", "eq"):  # of promoted dtype, and of bools
    CASES[name] += [(X, 2), (INTS, 3), (X, 0.5), (INTS, 0.5), (INTS, INTS.t().reshape(3, 5)), (INTS, X)]
CASES["add"] += [(X, Y, {"alpha": 2}), (INTS, INTS, {"alpha": -3}), (BOOLS, BOOLS.flip(0))]
CASES["sub"] += [(X, Y, {"alpha": 0.5})]
CASES["maximum"] += [(SPECIAL, SPECIAL.flip(0))]
CASES["minimum"] += [(SPECIAL, SPECIAL.flip(0))]
CASES["rsub"] = [(X, 1), (X, 1, 2), (X, Y)]
CASES["div"] = [
    (X, Y), (SCALAR, X), (X, INTS), (X, 3), (INTS, 2), (X, Y, {"rounding_mode": "floor"}),
    (X, 0.3, {"rounding_mode": "trunc"}),
]  # fmt: skip
CASES["div"] += [(INTS, 3, {"rounding_mode": mode}) for mode in ("floor", "trunc")]
CASES["remainder"] = [(X, Y), (X, 0.3), (INTS, 3), (INTS, -3), (INTS.int(), INTS.abs().int() + 1)]
CASES["floor_divide"] = [(X, Y), (INTS, 3), (INTS, -2)]
for name in ("logical_and", "logical_or", "logical_xor"):
    CASES[name] = [(BOOLS, BOOLS.flip(0)), (INTS, X.round()), (BOOLS, BOOLS[0])]
for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    CASES[name] = [(INTS, 6), (INTS, INTS.flip(0)), (BOOLS, BOOLS.flip(0))]
CASES["pow"] = [(POSITIVE, n) for n in (2, 3, 0.5, -1, -0.5, 1.7)] + [(POSITIVE, X), (X, 2), (INTS, 2), (2.0, X)]
CASES["clamp"] = [(X, -0.5, 0.5), (X, None, 0.1), (INTS, -1), (X, Y - 1, Y + 1), (SPECIAL, -1, 2)]
CASES["clamp_min"], CASES["clamp_max"] = [(X, 0.2), (X, ROW)], [(X, 0.2), (X, ROW)]
CASES["where"] = [(BOOLS, X, Y), (BOOLS, X, ROW), (BOOLS[0], WIDE, SCALAR), (BOOLS, INTS, X)]
CASES["masked_fill"] = [(X, BOOLS, -1), (WIDE, BOOLS, float("-inf")), (X, BOOLS, SCALAR)]
CASES["lerp"] = [(X, Y, 0.1), (X, Y, 0.9), (X, Y, Y.abs())]
CASES["addcmul"] = [(X, Y, ROW), (X, Y, TURNED, {"value": -0.3})]
CASES["addcdiv"] = [(X, Y, POSITIVE), (X, Y, POSITIVE, {"value": 0.1})]
CASES["copy_"] = [(X.clone(), TURNED), (X.clone(), ROW), (INTS.clone(), X), (X.clone(), INTS), (BOOLS.clone(), X)]
CASES["clone"] = [(x,) for x in LAYOUTS]
CASES["_to_copy"] = [(X, {"dtype": d}) for d in (torch.float64, torch.int32, torch.float16, torch.bfloat16, torch.bool)]
CASES["_to_copy"] += [(INTS, {"dtype": torch.uint8}), (INTS.clamp(0), {"dtype": torch.float32}), (X.t(), {})]
CASES["fill_"], CASES["zero_"] = [(X.clone(), 3), (INTS.t().clone(), 2), (X.clone(), SCALAR)], [(X.clone(),)]
for name in ("zeros_like", "ones_like"):
    CASES[name] = [(X,), (X, {"dtype": torch.int64}), (EMPTY,)]
CASES["full_like"], CASES["new_full"] = [(X, 2.5), (BOOLS, True)], [(X, (2, 2), 7)]
CASES["new_zeros"], CASES["new_ones"] = [(X, (4,)), (X, ())], [(X, (2, 3), {"dtype": torch.bool})]
CASES["_local_scalar_dense"] = [(SCALAR,), (X[1:2, 3:4],), (INTS[0, 1],), (BOOLS[0, 0],)]
CASES["equal"] = [(X, X.clone()), (X, Y), (X, ROW), (EMPTY, EMPTY)]
CASES["tril"] = CASES["triu"] = [(X,), (WIDE, 1), (X.t(), -1)]
CASES["cat"] = [([X, Y],), ([X, TURNED, EMPTY],), ([X, ROW[:3, None]], 1), ([X, INTS], -1)]
CASES["repeat"] = [(X, (2, 3)), (X.t(), (2, 1, 3)), (ROW, (0,)), (EMPTY, (1,) * EMPTY.dim())]
CASES["unsafe_split"] = [(X, 2), (WIDE, 2, 1)]
CASES["stack"] = [([X, Y],), ([X, TURNED], 1), ([SCALAR, SCALAR],), ([X, Y], -1)]
reductions = [(x,) for x in (*LAYOUTS, INTS)] + [(WIDE, [d], k) for d in (0, 1, -1) for k in (False, True)]
CASES["sum"] = [
    *reductions, (WIDE, [0, 2]), (BOOLS,), (X, [1], False, {"dtype": torch.float64}), (LONG, [1]), (LONG.t(), [0]),
]  # fmt: skip
CASES["prod"] = [(X,), (WIDE, 1), (INTS,), (EMPTY,)]
CASES["mean"] = [(X,), (WIDE, [0, 2], True), (LONG, [1]), (TURNED, [0])]
for name in ("amax", "amin"):
    CASES[name] = [(X,), (WIDE, [0, 2]), (LONG, [1], True), (INTS, [0])]
for name in ("max", "min"):
    CASES[name] = [(X,), (WIDE, 1), (X, 0, True), (X, Y), (SPECIAL,), (INTS, 1)]
CASES["argmax"] = CASES["argmin"] = [(X,), (WIDE, 1), (TURNED,), (X, 0, True), (INTS, 1), (SCALAR, 0)]
CASES["any"] = CASES["all"] = [(BOOLS,), (BOOLS, 1), (X, [0], True), (EMPTY,), (INTS > -9,)]
CASES["var"] = CASES["std"] = CASES["var_mean"] = [
    (X, [1]),
    (WIDE, [0, 2], {"correction": 0, "keepdim": True}),
    (LONG, None),
]
CASES["linalg_vector_norm"] = [(X,), (WIDE, 1, [1]), (X, float("inf"), None, True), (LONG, 2, [1]), (SCALAR,)]
CASES["logsumexp"] = [(X, [1]), (WIDE, [0, 2], True), (torch.full((2, 3), -float("inf")), [1])]
CASES["native_dropout_backward"] = [(X, BOOLS, 1.25)]
CASES["mm"] = [
    (A[0], B[0]), (A[0].t(), A[0]), (X[:, :0], X.t()[:0]), (X, torch.ones(5, 0)), (A[0].double(), B[0].double()),
    (A[0, :, ::2], B[0, ::2]), (torch.randn(1, 70), torch.randn(70, 3)),
]  # fmt: skip
CASES["mm"] += [(A[0].half(), B[0].half()), (A[0].bfloat16(), B[0].bfloat16()), (INTS, INTS.t())]
CASES["bmm"] = [(A, B), (B.transpose(1, 2), A.transpose(1, 2)), (A[:1].expand(4, 19, 33), B), (A[:0], B[:0])]
CASES["addmm"] = [(torch.randn(21), A[0], B[0]), (torch.randn(19, 21), A[0], B[0], {"beta": 0.5, "alpha": 2})]
CASES["addmm"] += [(torch.randn(21), A[0], B[0], {"beta": 0})]
CASES["baddbmm"] = [(torch.randn(4, 1, 21), A, B, {"alpha": 0.5}), (torch.randn(21), A, B, {"beta": 0})]
CASES["mv"], CASES["dot"] = [(A[0], torch.randn(66)[::2])], [(ROW, ROW.flip(0)), (torch.randn(5000), torch.randn(5000))]
CASES["gelu"] = [(X, {"approximate": a}) for a in ("none", "tanh")]
CASES["gelu_backward"] = [(Y, X, {"approximate": a}) for a in ("none", "tanh")]
CASES["silu_backward"], CASES["threshold_backward"] = [(Y, X)], [(Y, X, 0), (Y, TURNED, 0.3)]
CASES["sigmoid_backward"] = CASES["tanh_backward"] = [(Y, X.sigmoid())]
CASES["_softmax"] = [(x, -1, False) for x in (X, TURNED, EMPTY, LONG, X * 60)] + [(WIDE, 0, False)]
CASES["_log_softmax"] = [(X * 60, -1, False), (WIDE, 0, False)]
for name, y in (("_softmax_backward_data", WIDE.softmax(1)), ("_log_softmax_backward_data", WIDE.log_softmax(1))):
    CASES[name] = [(torch.randn(2, 3, 5), y, 1, torch.float32), (EMPTY, EMPTY, 1, torch.float32)]
CASES["native_layer_norm"] = [
    (X, [5], ROW, ROW.flip(0), 1e-5),
    (WIDE, [3, 5], None, None, 1e-5),
    (LONG, [700], None, LONG[0], 1e-5),
]
CASES["native_layer_norm_backward"] = [
    (Y, *layer_norm(X, [5], ROW, ROW), [True, True, True]),
    (
        torch.randn(2, 3, 5).transpose(0, 1).contiguous().transpose(0, 1),
        *layer_norm(WIDE, [3, 5], None, None),
        [True, False, False],
    ),
]
CASES["_scaled_dot_product_flash_attention_for_cpu"] = [
    (Q, K, V),
    (Q, K, V, 0.0, True),
    (Q, K, V, 0.0, False, {"attn_mask": MASK, "scale": 0.3}),
]
CASES["_scaled_dot_product_flash_attention_for_cpu_backward"] = [(V, Q, K, V, *CAUSAL, 0.0, True)]
CASES["nll_loss_forward"] = [(LOGITS, TARGETS, None, reduction, -100) for reduction in (0, 1, 2)] + [
    (LOGITS[0], TARGETS[0], None, 1, -100)
]
CASES["nll_loss_backward"] = [(SCALAR, LOGITS, TARGETS, None, r, -100, torch.tensor(5.0)) for r in (1, 2)]
CASES["nll_loss_backward"] += [(torch.randn(6), LOGITS, TARGETS, None, 0, -100, torch.tensor(5.0))]
CASES["mse_loss"] = [(X, Y, reduction) for reduction in (0, 1, 2)]
CASES["mse_loss_backward"] = [(SCALAR, X, Y, 1), (Y, X, TURNED, 0)]
CASES["index_select"] = [
    (WIDE, 1, torch.tensor([2, 0, 2])),
    (TURNED, -1, torch.tensor([4])),
    (INTS, 0, torch.tensor([1])),
]
CASES["embedding"] = [(X, INDEX), (TURNED, INDEX), (X, INDEX.t().int()), (X, INDEX[:, :0])]
CASES["embedding_dense_backward"] = [(torch.randn(2, 3, 5), INDEX, 4, p, False) for p in (-1, 1)]
CASES["gather"] = [(X, 1, INDEX), (TURNED, 0, INDEX.t()), (WIDE, 2, INDEX.expand(2, 2, 3))]
CASES["scatter"] = [(X, 1, INDEX, Y), (X, 1, INDEX, 7.0)]
CASES["scatter_add"] = [(X, 0, INDEX, Y), (WIDE, 2, INDEX.expand(2, 2, 3), torch.randn(2, 3, 4))]
CASES["index_add"] = [(X, 0, INDEX[1], Y), (WIDE, 2, INDEX[1], torch.randn(2, 3, 3))]
CASES["index"] = [
    (X, [INDEX]), (WIDE, [None, INDEX[0], INDEX[1]]), (WIDE, [INDEX[1] % 2, INDEX[0] - 3]), (TURNED, [None, INDEX]),
]  # fmt: skip
CASES["index_put"] = [
    (X, [INDEX[0]], Y),
    (WIDE, [None, INDEX[1]], torch.randn(2, 3, 5), True),
    (X, [INDEX[0], INDEX[0]], SCALAR),
]
CASES["select_backward"] = [(Y, (3, 2, 5), 1, 1), (ROW, (4, 5), 0, -1), (SCALAR, (3,), 0, 1)]
CASES["slice_backward"] = [(Y, (3, 11), 1, 1, 11, 2), (Y, (7, 5), 0, -4, 6, 1)]
CASES["diagonal_backward"] = [(ROW, (5, 6), 1, 0, 1)]
GROUPS = torch.randn(2, 6, 5)
GROUP_STATISTICS = aten.native_group_norm(GROUPS, None, None, 2, 6, 5, 3, 1e-5)[1:]
BATCH_STATISTICS = aten._native_batch_norm_legit(GROUPS, None, None, True, 0.1, 1e-5)[1:]
CHANNELS = torch.randn(6)
CASES["native_group_norm"] = [(GROUPS, CHANNELS, -CHANNELS, 2, 6, 5, 3, 1e-5), (GROUPS, None, None, 2, 6, 5, 2, 1e-5)]
CASES["native_group_norm_backward"] = [
    (GROUPS.cos(), GROUPS, *GROUP_STATISTICS, CHANNELS, 2, 6, 5, 3, [True, True, True])
]
CASES["_native_batch_norm_legit"] = [
    (GROUPS, CHANNELS, -CHANNELS, torch.zeros(6), torch.ones(6), training, 0.1, 1e-5) for training in (True, False)
] + [(GROUPS, CHANNELS, -CHANNELS, True, 0.1, 1e-5)]
CASES["native_batch_norm_backward"] = [
    (GROUPS.cos(), GROUPS, CHANNELS, None, None, *BATCH_STATISTICS, True, 1e-5, [True, True, True])
]
RANDOM = {"uniform_", "normal_", "bernoulli_", "bernoulli", "rand_like", "randn_like", "native_dropout"}
UNDEFINED = {"empty_like", "new_empty", "new_empty_strided"}
SAME_AS = {"_index_put_impl": "index_put", "_unsafe_index_put": "index_put"}


def moved(value, device):
    if isinstance(value, torch.Tensor):  # strides and offsets are kept
        whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        return acl.to(whole, device).as_strided(value.shape, value.stride(), value.storage_offset())
    return (
        [moved(x, device) for x in value]
        if isinstance(value, list) and any(isinstance(x, torch.Tensor) for x in value)
        else value
    )


def check(found, expected):
    if isinstance(expected, torch.Tensor):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        loose = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(expected.dtype, 2e-5)  # one rounding of the last sum
        torch.testing.assert_close(found.cpu(), expected, rtol=loose, atol=loose, equal_nan=True)
    elif isinstance(expected, (tuple, list)):
        for one, other in zip(found, expected, strict=True):
            check(one, other)
    else:
        assert found == pytest.approx(expected)


def copied(args):
    return [x.clone() if isinstance(x, torch.Tensor) and not x._is_view() else x for x in args]


def dtypes_of(args, options):
    return {x.dtype for x in args if isinstance(x, torch.Tensor)} | {options[k] for k in ("dtype",) if k in options}


def base_name(name):
    return SAME_AS.get(name.rstrip("_"), name if name in CASES or name in RANDOM else name.removesuffix("_"))


def test_every_entry_has_a_case():
    names = {op._schema.name.removeprefix("aten::") for op in TABLE}
    names.remove("_fused_adamw_")  # in tests/runtime/test_failure_everywhere.py
    assert {name for name in names if base_name(name) not in {*CASES, *RANDOM, *UNDEFINED}} == set()


@pytest.mark.slow  # compiles a kernel or more each
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_torchs(device, name):
    op = getattr(aten, name)
    for case in CASES[name]:
        *args, options = case if isinstance(case[-1], dict) else (*case, {})
        expected = op(*copied(args), **options)
        if not dtypes_of(args, options) <= tensor_device(device).dtypes:  # no float64 on WebGPU
            with (
                override(fallback="forbid"),
                pytest.raises((UnsupportedCase, UnsupportedDtype), match=r"no kernel|no ten"),
            ):
                op(*(moved(x, device) for x in args), **options)
            continue
        with override(fallback="forbid"):
            found = op(*(moved(x, device) for x in args), **options)
        check(found, expected)


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "name",
    sorted(
        {base_name(op._schema.name[6:]) for op in TABLE if op._schema.name.endswith("_")}
        & {*CASES} - {"copy_", "fill_", "zero_"}
    ),
)
def test_an_operation_in_place_is_torchs(device, name):
    op, base = getattr(aten, f"{name}_"), torch.zeros(7, 7)
    served = 0
    for case in CASES[name]:
        *args, options = case if isinstance(case[-1], dict) else (*case, {})
        if not isinstance(args[0], torch.Tensor) or args[0].dim() != 2 or args[0].numel() > 35 or 0 in args[0].shape:
            continue
        host = base.to(args[0].dtype)[1 : 1 + args[0].shape[0], 1 : 1 + args[0].shape[1]]
        host.copy_(args[0])
        target = moved(host, device)
        whole = target.as_strided((7, 7), (7, 1), 0)
        try:
            op(host, *args[1:], **options)
        except RuntimeError:  # a result of another dtype or shape, which torch does not write in place
            continue
        assert op(target, *(moved(x, device) for x in args[1:]), **options) is target
        check(whole, torch.as_strided(host, (7, 7), (7, 1), 0))
        served += 1
    assert served


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.uint8, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_values_come_back(device, dtype, shape):
    x = torch.randint(0, 2, shape).to(dtype)
    moved = acl.to(x, device)
    assert isinstance(moved, DeviceTensor)
    assert (moved.shape, moved.dtype) == (x.shape, x.dtype)
    assert torch.equal(moved.cpu(), x)
    assert torch.equal(acl.to(moved, "cpu"), x)


def test_random_values_have_their_distribution_and_follow_the_seed(device):
    x = acl.to(torch.empty(100, 500), device)
    torch.manual_seed(3)
    first = x.normal_(2.0, 3.0).cpu()
    assert abs(first.mean() - 2) < 0.06  # four standard errors
    assert abs(first.std() - 3) < 0.04
    torch.manual_seed(3)
    assert torch.equal(x.normal_(2.0, 3.0).cpu(), first)
    assert not torch.equal(x.normal_(2.0, 3.0).cpu(), first)
    uniform = x.uniform_(-1, 1).cpu()
    assert -1 <= uniform.min() < -0.99 < 0.99 < uniform.max() < 1
    assert abs(uniform.var() - 1 / 3) < 0.01
    kept = torch.nn.functional.dropout(torch.ones_like(x), 0.25).cpu()
    assert set(kept.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert abs((kept == 0).float().mean() - 0.25) < 0.01
