import importlib.util
import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import counted, ran

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops.attention import attention_reference, backends, launch
from accelerant.runtime import registry
from accelerant.runtime.dispatch import Case, operations
from processes import printed
from refusals import assert_raises

module = importlib.import_module("accelerant.ops.attention")  # whose name is the function's in accelerant.ops


def tensors(B=1, Hq=2, S=33, D=16, Hkv=None, Skv=None, dtype=torch.float32):
    keys = (B, Hkv or Hq, S if Skv is None else Skv, D)
    return [torch.randn(shape).to(dtype) for shape in ((B, Hq, S, D), keys, keys)]


def exact(function, q, k, v, do=None, **options):
    """The reference in float64: o, and the gradients if do is given."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o = function(*leaves, **options)
    return o.detach() if do is None else torch.autograd.grad(o, leaves, do.double())


def check(q, k, v, do, **options):
    """Fail unless o and the gradients are the reference's; return o."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = ops.attention(*leaves, **options)
    torch.testing.assert_close(o.double(), exact(attention_reference, q, k, v, **options), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(o, leaves, do)
    for one, other in zip(gradients, exact(attention_reference, q, k, v, do, **options), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    return o


def at_most_twice(run, leaves, do, mask):
    """Fail unless errors, of the result and the gradients, are at most twice those of torch's function with a mask."""
    wide = mask if mask.dtype == torch.bool else mask.double()
    expected = attention_reference(*(x.detach().double() for x in leaves), mask=wide)
    slopes = exact(attention_reference, *leaves, do, mask=wide)
    errors = []
    for function in (run, lambda *qkv: F.scaled_dot_product_attention(*qkv, attn_mask=mask)):
        y = function(*leaves)
        pairs = zip((y, *torch.autograd.grad(y, leaves, do)), (expected, *slopes), strict=True)
        errors.append([float((one.double() - other).nan_to_num().abs().max()) for one, other in pairs])
    atol = 1e-5 if do.dtype == torch.float32 else 2e-3
    assert all(ours <= 2 * theirs + atol for ours, theirs in zip(*errors, strict=True)), errors


# --- as torch's, and as good -----------------------------------------------------------------------------------------
INPUTS = {
    "random": lambda x: x,
    "large": lambda x: x * 30,
    "tiny": lambda x: x * 1e-4,
    "constant": lambda x: torch.ones_like(x),
    "one key stands out": lambda x: torch.cat([x[:, :, :1] * 20, x[:, :, 1:]], 2),
}


@pytest.mark.sample(11, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", INPUTS)
def test_error_is_at_most_twice_that_of_torch(kind, causal, dtype, interpreted):
    if dtype == torch.bfloat16 and kind not in ("random", "tiny"):
        pytest.skip("the interpreter cuts to bfloat16 instead of rounding: an o just below v[j] becomes another number")
    q, k, v = (INPUTS[kind](x).to(dtype) for x in tensors(S=45, D=32))
    do = torch.randn(q.shape).to(dtype)
    reference = exact(attention_reference, q, k, v, causal=causal)
    slopes = exact(attention_reference, q, k, v, do, causal=causal)
    errors = []
    for function in (
        lambda *args: ops.attention(*args, causal=causal),
        lambda *args: F.scaled_dot_product_attention(*args, is_causal=causal),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = function(*leaves)
        gradients = torch.autograd.grad(o, leaves, do)
        errors.append(
            [(o - reference).abs().max(), *((g - s).abs().max() for g, s in zip(gradients, slopes, strict=True))]
        )
    # One unit in the last place of the largest number, two where the interpreter cuts to bfloat16 rather than round;
    # and a score rounded to float32 changes its weight by as much (torch's error for "large" depends on the CPU).
    steps = 2 if dtype == torch.bfloat16 else 1
    scores = torch.finfo(torch.float32).eps * (q.double() @ k.double().mT).abs().max() * q.shape[-1] ** -0.5
    for ours, theirs, exactly in zip(*errors, (reference, *slopes), strict=True):
        units = steps * torch.finfo(dtype).eps + scores
        assert ours <= 2 * theirs + units * exactly.abs().max().clamp(min=1e-3)
    assert ran() == {"triton"}


def apart(x, by, dim=-1):
    """Numbers whose scales spread over four orders of magnitude between columns, or rows."""
    steps = torch.linspace(-by, by, x.shape[dim], device=x.device)
    return x * 100**steps if dim == -1 else x * 100 ** steps[torch.randperm(len(steps))][:, None]


SCALES = {
    "random": lambda q, k, v, do: (q, k, v, do),
    "large queries": lambda q, k, v, do: (q * 1e25, k * 1e-25, v, do),
    "large values": lambda q, k, v, do: (q, k, v * 1e20, do * 1e-18),
    "rows apart": lambda q, k, v, do: (q, k, apart(v, 1, -2), apart(do, 1, -2)),
    "columns apart": lambda q, k, v, do: (apart(q, 1), apart(k, -1), apart(v, 1), apart(do, -1)),
    "cancelling": lambda q, k, v, do: (q, torch.cat([k, k[:, :, 1:]], 2), torch.cat([v, -v[:, :, 1:]], 2), do),
}


def errors_of(inputs, *functions, causal=False):
    """The errors of o, dq, dk and dv by each function, in the norm."""
    *leaves, do = (x.double().requires_grad_() for x in inputs)
    o = attention_reference(*leaves, causal=causal)
    exactly = (o.detach(), *torch.autograd.grad(o, leaves, do.detach()))
    return [
        [(one.detach().double() - of).norm() / of.norm() for one, of in zip(function(*inputs), exactly, strict=True)]
        for function in functions
    ]


def launched(split, causal=False):
    def run(q, k, v, do):
        args = causal, q.shape[-1] ** -0.5, -1
        o, lse = launch.launch_forward(q, k, v, *args, split=split)
        return (o, *launch.launch_backward(do, q, k, v, o, lse, *args, split=split))

    return run


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("kind", SCALES)
def test_split_products_are_as_exact_as_float32(kind, interpreted):
    inputs = SCALES[kind](*tensors(Hq=1, S=24), torch.randn(1, 1, 24, 16))
    split, whole = errors_of(inputs, launched(True), launched(False))
    for ours, theirs in zip(split, whole, strict=True):
        assert ours <= 2 * theirs + 1e-7, (split, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", SCALES)
def test_error_in_float32_is_at_most_that_of_torch(kind, causal):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("products are split on sm_90")

    def torch_run(q, k, v, do):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        return (o, *torch.autograd.grad(o, leaves, do))

    drawn = (torch.randn(2, 3, 700, 64, device="cuda") for _ in range(4))
    inputs = SCALES[kind](*drawn) if kind != "cancelling" or not causal else tuple(drawn)
    ours, theirs = errors_of(inputs, launched(True, causal), torch_run, causal=causal)
    assert all(one <= other for one, other in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("S", [1, 2, 31, 32, 33])
def test_causal_is_that_of_torch_for_as_many_keys_as_queries(S, interpreted):
    q, k, v = tensors(S=S)
    torch.testing.assert_close(
        ops.attention(q, k, v, causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    )


def test_queries_stand_beside_the_last_keys(way):
    """The last rows of the whole are what the last queries alone find."""
    q, k, v = tensors(S=50)
    for options in ({"causal": True}, {"causal": True, "window": 5}, {"window": 7}):
        whole = ops.attention(q, k, v, **options)
        torch.testing.assert_close(ops.attention(q[:, :, 30:], k, v, **options), whole[:, :, 30:])


def test_rows_that_see_nothing_give_zeros(way):
    q, k, v = (x.requires_grad_() for x in tensors(S=40, Skv=17))
    o, lse = ops.attention(q, k, v, causal=True, return_lse=True)
    assert (o[:, :, : 40 - 17] == 0).all()
    assert (lse[:, :, : 40 - 17] == -math.inf).all()
    assert lse[:, :, 40 - 17 :].isfinite().all()
    o.sum().backward()
    assert (q.grad[:, :, : 40 - 17] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("Skv", [0, 9])
def test_log_sum_exp(Skv, way):
    q, k, v = tensors(S=20, Skv=Skv)
    o, lse = ops.attention(q.requires_grad_(), k, v, scale=0.7, return_lse=True)
    torch.testing.assert_close(lse, (0.7 * q @ k.transpose(-1, -2)).logsumexp(-1).detach())
    assert lse.dtype == torch.float32
    assert o.requires_grad
    assert not lse.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("Hkv", [1, 2])
def test_shared_keys_are_keys_repeated(Hkv, way):
    q, k, v = (x.requires_grad_() for x in tensors(B=1, Hq=6, Hkv=Hkv, S=19, Skv=21))
    repeated = [x.repeat_interleave(6 // Hkv, 1) for x in (k, v)]
    do = torch.randn(q.shape)
    found, expected = (ops.attention(q, *others, causal=True) for others in ((k, v), repeated))
    torch.testing.assert_close(found, expected)
    for one, other in zip(*(torch.autograd.grad(o, (q, k, v), do) for o in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_not_a_number_stays_in_its_rows(interpreted):
    q, k, v = tensors(S=40)
    q[0, 0, 3, 0] = math.nan
    o = ops.attention(q, k, v)
    assert o[0, 0, 3].isnan().all()
    assert o.isnan().sum() == o.shape[-1]
    k[0, 1, 20, 0] = math.nan
    o = ops.attention(q, k, v, causal=True)
    assert not o[0, 1, :20].isnan().any()
    assert o[0, 1, 20:].isnan().all()


# --- tiles, layouts, shapes ------------------------------------------------------------------------------------------
@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("options", [(False, -1), (True, -1), (True, 11), (False, 20)], ids=str)
@pytest.mark.parametrize(
    "plan",
    [launch.AttentionTile(16, 16, 4, 1), launch.AttentionTile(64, 16, 4, 1), launch.AttentionTile(16, 64, 4, 1)],
    ids=str,
)
def test_any_plan_gives_the_same(plan, options, interpreted):
    causal, window = options
    q, k, v = tensors(S=70, Skv=90)
    do = torch.randn(q.shape)
    named = {"causal": causal, "window": None if window < 0 else window, "scale": 0.3}
    o, lse = launch.launch_forward(q, k, v, causal, 0.3, window, plan)
    torch.testing.assert_close(o.double(), exact(attention_reference, q, k, v, **named), rtol=1e-5, atol=1e-5)
    found = launch.launch_backward(do, q, k, v, o, lse, causal, 0.3, window, (plan, plan))
    for one, other in zip(found, exact(attention_reference, q, k, v, do, **named), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


LAYOUTS = {
    "(B, S, H, D) transposed": lambda B, H, S, D: torch.randn(B, S, H, D).transpose(1, 2),
    "a third of a packed projection": lambda B, H, S, D: torch.randn(B, S, 3, H, D).select(2, 1).transpose(1, 2),
    "(B, H, D, S) transposed": lambda B, H, S, D: torch.randn(B, H, D, S).transpose(2, 3),
    "(S, B, H, D) permuted": lambda B, H, S, D: torch.randn(S, B, H, D).permute(1, 2, 0, 3),
    "every second column": lambda B, H, S, D: torch.randn(B, H, S, 2 * D)[..., ::2],
    "expanded heads": lambda B, H, S, D: torch.randn(B, 1, S, D).expand(B, H, S, D),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, way):
    o = check(*(LAYOUTS[layout](2, 3, 21, 8) for _ in range(4)), causal=True)
    if layout.startswith(("(B, S", "a third")):
        assert o.transpose(1, 2).is_contiguous()


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    B=st.integers(1, 2),
    Hkv=st.integers(1, 2),
    group=st.integers(1, 3),
    S=st.integers(1, 40),
    Skv=st.integers(0, 50),
    D=st.integers(1, 20),
    causal=st.booleans(),
    window=st.none() | st.integers(0, 45),
)
def test_any_shape(B, Hkv, group, S, Skv, D, causal, window):
    q, k, v = tensors(B, Hkv * group, S, D, Hkv, Skv)
    check(q, k, v, torch.randn(q.shape), causal=causal, window=window)


# --- choice ----------------------------------------------------------------------------------------------------------
def test_autocast_casts_as_torch_does(interpreted):
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.attention(q, k, v).dtype == F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        assert ops.attention(q, k.bfloat16(), v).dtype == torch.bfloat16
        assert ops.attention(q.double(), k.double(), v.double()).dtype == torch.float64


def test_wide_heads_are_left_to_torch(interpreted):
    q, k, v = tensors(S=5, D=300)
    torch.testing.assert_close(ops.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    row = counted()[0]
    assert row["implementation"] == "torch"
    assert "takes heads up to 256 wide, not 300" in str(row["refused"])


@pytest.mark.parametrize(("options", "S", "said"), [
    ({"causal": True}, 1, ""),
    ({"causal": True}, 2, " causal"),
    ({"window": 8}, 3, ""),
    ({"window": 7, "causal": True}, 3, " causal window 7"),
])  # fmt: skip
def test_a_mask_that_hides_nothing_is_none(options, S, said, interpreted):
    q, k, v = tensors(S=S, Skv=9)
    o = ops.attention(q, k, v, **options)
    torch.testing.assert_close(o.double(), exact(attention_reference, q, k, v, **options), rtol=1e-5, atol=1e-5)
    assert counted()[0]["case"] == f"1x2x2x{S}x9x16 float32{said}"


CUDA = torch.device("cuda", 0)


def case(*sizes, dtype=torch.bfloat16, options=()):
    return Case(CUDA, dtype, sizes, options)


HOPPER_REFUSALS = [
    ("cudnn", case(1, 2, 2, 64, 64, 64), None),
    ("cudnn", case(1, 4, 2, 64, 64, 64, options=("causal",)), None),
    ("cudnn", case(1, 2, 2, 64, 64, 64, dtype=torch.float32), "takes bfloat16 and float16, not float32"),
    ("cudnn", case(1, 2, 2, 64, 64, 136), "up to 128 wide, not 136"),
    ("cudnn", case(1, 2, 2, 64, 64, 20), "multiple of 8 up to 128 wide, not 20"),
    ("cudnn", case(1, 2, 2, 64, 80, 64, options=("causal",)), "top left corner"),
    ("cudnn", case(1, 2, 2, 64, 64, 64, options=("causal", "window 9")), "no window"),
    ("flash", case(1, 2, 2, 64, 80, 64, options=("causal", "window 9")), None),
    ("flash", case(1, 2, 2, 80, 64, 64, options=("causal",)), "queries that see no key"),
    ("flash", case(1, 2, 2, 0, 64, 64), "empty"),
    ("efficient", case(1, 2, 2, 64, 64, 64, dtype=torch.float32), None),
    ("efficient", case(1, 4, 2, 64, 64, 64), None),
    ("efficient", case(1, 2, 2, 64, 80, 64, options=("causal",)), "top left corner"),
    ("flash_attn_4", case(1, 2, 2, 64, 64, 72), "64, 96 or 128 wide, not 72"),
    ("hopper", case(1, 2, 2, 64, 64, 64, options=("window 3",)), "no window"),
    ("hopper", case(1, 2, 2, 64, 64, 64, dtype=torch.float32), "not float32"),
]


@pytest.mark.parametrize(("name", "case", "reason"), HOPPER_REFUSALS)
def test_libraries_say_what_they_refuse(name, case, reason, monkeypatch):
    monkeypatch.setattr(backends, "nvidia_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for operation in ("attention_fwd", "attention_bwd"):
        (one,) = (each for each in operations()[operation].implementations if each.name == name)
        found = one.refuses(case)
        assert found is None if reason is None else reason in found


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)], ids=str)
def test_float32_goes_to_torch_where_ours_was_not_measured_faster(capability, monkeypatch):
    monkeypatch.setattr(backends, "nvidia_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(registry, "reason_without_kernels", lambda _: None)
    for sizes in ((8, 12, 12, 2048, 2048, 64), (2, 8, 8, 4096, 4096, 128), (1, 8, 2, 100, 100, 20)):
        for options in ((), ("causal",)):
            for operation in ("attention_fwd", "attention_bwd"):
                found = operations()[operation].candidates(case(*sizes, dtype=torch.float32, options=options))
                split = ["triton_fp16x3"] * (capability == (9, 0) and sizes[-1] % 16 == 0)
                assert [each.name for each in found] == [*split, "efficient", "triton", "torch"]


def test_sm_75_has_no_room_for_the_widest_heads_in_float32(monkeypatch):
    monkeypatch.setattr(backends, "nvidia_capability", lambda _: (7, 5))
    (triton,) = (each for each in operations()["attention_bwd"].implementations if each.name == "triton")
    assert "64 KiB" in triton.refuses(case(1, 1, 1, 9, 9, 256, dtype=torch.float32))
    assert "64 KiB" not in (triton.refuses(case(1, 1, 1, 9, 9, 256, dtype=torch.float16)) or "")


def test_only_ours_and_the_formulas_have_a_deterministic_backward_pass():
    fixed = {each.name: each.deterministic for each in operations()["attention_bwd"].implementations}
    assert {name for name, same in fixed.items() if same} == {"hopper", "triton_fp16x3", "triton", "torch"}


def test_formulas_of_the_dense_backward_pass():
    """What a device without any of the libraries runs."""
    for options in ((False, -1), (True, -1), (True, 3)):
        q, k, v = (x.double() for x in tensors(Hq=4, Hkv=2, S=9, Skv=7))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o, lse = backends.attend(*leaves, options[0], 0.4, options[1])
        do = torch.randn_like(o)
        expected = torch.autograd.grad(o, leaves, do)
        found = backends.dense_backward(
            do, q, k, v, o, lse.masked_fill(lse == -math.inf, 0), options[0], 0.4, options[1]
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


# --- rejections ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("shapes", "words"), [
    (((2, 3, 4), (2, 3, 4), (2, 3, 4)), r"takes q \(B, Hq, S, D\) .*\(2, 3, 4\)"),
    (((1, 2, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8)), r"same B and D.* got \(1, 2, 3, 8\) and \(2, 2, 3, 8\)"),
    (((1, 2, 3, 8), (1, 2, 3, 9), (1, 2, 3, 9)), r"same B and D.* got \(1, 2, 3, 8\) and \(1, 2, 3, 9\)"),
    (((1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 4, 8)), r"v must be \(1, 2, 3, 8\), .* got \(1, 2, 4, 8\)"),
    (((1, 3, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8)), "must divide those of q, got 2 and 3"),
    (((1, 3, 3, 8), (1, 0, 3, 8), (1, 0, 3, 8)), "must divide those of q, got 0 and 3"),
])  # fmt: skip
def test_refuses_shapes(shapes, words):
    assert_raises(ShapeError, words, lambda: ops.attention(*map(torch.zeros, shapes)))


def test_refuses_dtypes_devices_and_windows():
    x = torch.zeros(1, 1, 2, 8)
    assert_raises(UnsupportedDtype, r"attention takes .*; k is int64", lambda: ops.attention(x, x.long(), x))
    assert_raises(UnsupportedDtype, "one dtype, got float32, float16, float32", lambda: ops.attention(x, x.half(), x))
    assert_raises(ShapeError, "one device; they are on cpu, cpu and meta", lambda: ops.attention(x, x, x.to("meta")))
    assert_raises(ConfigError, "window must be at least 0, got -2", ops.attention, x, x, x, window=-2)


# --- packed sequences ------------------------------------------------------------------------------------------------
def packed(lengths, Hq=4, Hkv=2, D=8):
    """q, k, v, their bounds and the longest lengths of sequences of (queries, keys)."""
    bounds = [torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0, dtype=torch.int32) for i in (0, 1)]
    q, k, v = (torch.randn(int(bounds[i][-1]), heads, D) for i, heads in ((0, Hq), (1, Hkv), (1, Hkv)))
    return q, k, v, *bounds, *(max(pair[i] for pair in lengths) for i in (0, 1))


PACKED = ((20, 20), (1, 33), (0, 4), (37, 9), (3, 0), (16, 16))


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 4}, {"window": 6}], ids=str)
def test_packed_sequences_are_each_attended_alone(options, way):
    q, k, v, *rest = packed(PACKED)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = ops.attention_varlen(*leaves, *rest, **options, return_lse=True)
    do = torch.randn(o.shape)
    gradients = torch.autograd.grad(o, leaves, do)
    at_q = at_k = 0
    for queries, keys in PACKED:
        rows, columns = slice(at_q, at_q + queries), slice(at_k, at_k + keys)
        at_q, at_k = at_q + queries, at_k + keys
        parts = [x[where].detach().transpose(0, 1)[None] for x, where in ((q, rows), (k, columns), (v, columns))]
        expected, of_rows = attention_reference(*(x.double() for x in parts), **options, return_lse=True)
        torch.testing.assert_close(o[rows].transpose(0, 1)[None].double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[None, :, rows].double(), of_rows, rtol=1e-5, atol=1e-5)
        slopes = exact(attention_reference, *parts, do[rows].transpose(0, 1)[None], **options)
        for gradient, where, slope in zip(gradients, (rows, columns, columns), slopes, strict=True):
            torch.testing.assert_close(gradient[where].transpose(0, 1)[None].double(), slope, rtol=1e-5, atol=1e-5)


def test_packed_heads_of_a_projection(interpreted):
    """q, k and v as views of one (total, 3, H, D) tensor."""
    whole = torch.randn(30, 3, 2, 8, requires_grad=True)
    cu = torch.tensor([0, 11, 30], dtype=torch.int32)
    o = ops.attention_varlen(*whole.unbind(1), cu, cu, 19, 19, causal=True)
    expected = torch.cat(
        [
            F.scaled_dot_product_attention(*part.permute(1, 2, 0, 3), is_causal=True).transpose(0, 1)
            for part in whole.split([11, 19])
        ]
    )
    torch.testing.assert_close(o, expected)
    do = torch.randn(o.shape)
    for one, other in zip(*(torch.autograd.grad(y, whole, do, retain_graph=True) for y in (o, expected)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("change", "error", "words"), [
    ({0: torch.zeros(1, 2, 3, 8)}, ShapeError, r"takes q \(total_q, Hq, D\)"),
    ({0: torch.zeros(5, 4, 16)}, ShapeError, "same D of at least 1, got 16 and 8"),
    ({0: torch.zeros(5, 3, 8)}, ShapeError, "must divide those of q, got 2 and 3"),
    ({2: torch.zeros(5, 1, 8)}, ShapeError, r"v must be \(5, 2, 8\)"),
    ({3: torch.tensor([0, 2, 5])}, UnsupportedDtype, "cu_seqlens_q must be int32, got int64"),
    ({3: torch.zeros(2, 2, dtype=torch.int32)}, ShapeError, r"cu_seqlens_q must be \(sequences \+ 1,\)"),
    ({4: torch.zeros(4, dtype=torch.int32)}, ShapeError, r"cu_seqlens_k must be \(3,\) .* got \(4,\)"),
    ({4: torch.zeros(3, dtype=torch.int32, device="meta")}, ShapeError, "on cpu, where q is; it is on meta"),
    ({5: -1}, ConfigError, "max_seqlen_q must be at least 0, got -1"),
])  # fmt: skip
def test_refuses_packed(change, error, words):
    args = [change.get(at, x) for at, x in enumerate(packed(((2, 2), (3, 3))))]
    assert_raises(error, words, ops.attention_varlen, *args)


# --- what the kernels need -------------------------------------------------------------------------------------------
LIMITS = {"sm_75": 64 << 10, "sm_86": 99 << 10, "sm_100": 99 << 10, "sm_90": 227 << 10}

SIZES = """
import sys
from accelerant.ops.attention.cases import compilation
for kernel in ("fwd", "bwd_q", "bwd_kv"):
    for target, kind, width in (part.split(":") for part in sys.argv[1:]):
        capability = divmod(int(target.removeprefix("sm_")), 10)
        split, kind = kind == "split", kind.replace("split", "*fp32")
        compiled = compilation(kernel, kind, int(width), capability, split=split)
        binary = compiled.source().dialects["triton"].build(target)
        print(target, kernel, width, binary.resources["attention_" + kernel].shared_bytes)
"""


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton has no wheel for this system")
@pytest.mark.parametrize("part", [
    "sm_90:*bf16:128", "sm_90:split:128", "sm_75:*fp32:128", "sm_75:*fp16:256", "sm_86:*bf16:64", "sm_86:*bf16:256",
    "sm_100:*bf16:128",
])  # fmt: skip
def test_tiles_fit_shared_memory(part):
    """The widest heads of each kind of device."""
    rows = [line.split() for line in printed(SIZES, part).splitlines()]
    assert len(rows) == 3
    too_big = [row for row in rows if int(row[3]) > LIMITS[row[0]]]
    assert not too_big


# --- on a GPU --------------------------------------------------------------------------------------------------------
ON_GPU = [
    ({"B": 2, "S": 300, "D": 64}, {"causal": True}),
    ({"B": 2, "Hq": 8, "Hkv": 2, "S": 256, "D": 128}, {"causal": True}),
    ({"S": 200, "Skv": 333, "D": 64}, {}),
    ({"S": 200, "Skv": 333, "D": 96}, {"causal": True, "window": 50}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sizes", "options"), ON_GPU, ids=str)
def test_any_forward_pass_goes_with_any_backward_pass(sizes, options, dtype):
    """Their lse is one and the same; and the error of each is at most twice that of torch's own in the same dtype."""
    q, k, v = (x.to("cuda") for x in tensors(**sizes, dtype=dtype))
    do = torch.randn(q.shape, device="cuda").to(dtype)
    D, causal, window = q.shape[3], options.get("causal", False), options.get("window", -1)
    args = (causal, D**-0.5, window)
    expected, of_rows = attention_reference(*(x.double() for x in (q, k, v)), **options, return_lse=True)
    slopes = exact(attention_reference, q, k, v, do, **options)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    if window < 0:
        repeated = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in leaves]
        theirs = F.scaled_dot_product_attention(*repeated, is_causal=causal)
    else:
        theirs = attention_reference(*leaves, **options)
    exactly = (expected, *slopes)
    gradients = torch.autograd.grad(theirs, leaves, do)
    errors = [one.detach() - of for one, of in zip((theirs, *gradients), exactly, strict=True)]

    def check(found, names):
        # In the norm; and, to see a single element gone astray, in the largest one, which chance moves more.
        for one, of, error in zip(found, exactly, errors, strict=True):
            ours, largest = one - of, torch.finfo(dtype).eps * of.abs().max()
            assert ours.norm() <= 2 * error.norm(), names
            assert ours.abs().max() <= 4 * error.abs().max() + largest, names

    B, Hq, S, _ = q.shape
    words = (("causal",) if causal else ()) + ((f"window {window}",) if window >= 0 else ())
    where = Case(q.device, dtype, (B, Hq, k.shape[1], S, k.shape[2], D), words)
    ran = set()
    for forward in operations()["attention_fwd"].candidates(where):
        o, lse = forward.run(q, k, v, *args)
        torch.testing.assert_close(lse.double(), of_rows, rtol=1e-4, atol=1e-3, msg=forward.name)
        for backward in operations()["attention_bwd"].candidates(where):
            check((o, *backward.run(do, q, k, v, o, lse, *args)), (forward.name, backward.name))
            ran.add((forward.name, backward.name))
    assert ("triton", "triton") in ran


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 4}], ids=str)
def test_packed_implementations_agree(options):
    q, k, v, cu_q, cu_k, *longest = (x.to("cuda") if isinstance(x, torch.Tensor) else x for x in packed(PACKED, D=64))
    q, k, v = q.half(), k.half(), v.half()
    do = torch.randn_like(q)
    args = (cu_q, cu_k, *longest, options.get("causal", False), 0.125, options.get("window", -1))
    forward, backward = (operations()[f"attention_varlen_{part}"] for part in ("fwd", "bwd"))
    expected, lse = forward.run("torch", q, k, v, *args)
    slopes = backward.run("torch", do, q, k, v, expected, lse, *args)
    for name in ("triton", "flash"):
        o, of_rows = forward.run(name, q, k, v, *args)
        torch.testing.assert_close(o, expected, rtol=1e-2, atol=5e-3, msg=name)
        torch.testing.assert_close(of_rows, lse, rtol=1e-3, atol=1e-3, msg=name)
        for gradient, slope in zip(backward.run(name, do, q, k, v, o, of_rows, *args), slopes, strict=True):
            torch.testing.assert_close(gradient, slope, rtol=1e-2, atol=1e-2, msg=name)


@pytest.mark.gpu
def test_memory_is_linear_in_the_sequence():
    q, k, v = (torch.randn(8, 12, 2048, 64, device="cuda") for _ in range(3))
    ops.attention(q, k, v)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o = ops.attention(q, k, v)
    torch.cuda.synchronize()
    assert o.shape == q.shape
    assert torch.cuda.max_memory_allocated() - before <= 52 << 20


# --- masks -----------------------------------------------------------------------------------------------------------


def mask_of(shape, kind, dtype=torch.float32):
    """A mask that hides some pairs, and all keys of a few queries."""
    hidden = torch.rand(shape) < 0.3
    if len(shape) > 1:
        hidden[..., 3 % shape[-2], :] = True
    if kind == "bool":
        return ~hidden
    return torch.randn(shape).masked_fill(hidden, -math.inf if kind == "-inf" else torch.finfo(dtype).min).to(dtype)


@pytest.mark.sample(11, 4)
@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest"])
@pytest.mark.parametrize("shape", [(20, 23), (2, 1, 1, 23), (2, 4, 20, 23), (1, 4, 20, 1), (1,)], ids=str)
@pytest.mark.parametrize(("Hkv", "options"), [(4, {}), (2, {"causal": True}), (4, {"causal": True, "window": 5})])
def test_masks(way, kind, shape, Hkv, options):
    q, k, v = (x.requires_grad_() for x in tensors(2, 4, 20, 8, Hkv=Hkv, Skv=23))
    mask, do = mask_of(shape, kind), torch.randn(2, 4, 20, 8)
    wide = mask if kind == "bool" else mask.double()
    o, lse = ops.attention(q, k, v, mask=mask, return_lse=True, **options)
    reference = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected, sums = attention_reference(*reference, mask=wide, return_lse=True, **options)
    found = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
    slopes = torch.autograd.grad(expected, reference, do.double(), create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in found), q)[0]
    curved = torch.autograd.grad(sum(x.square().sum() for x in slopes), reference[0])[0]
    for one, other in zip((o, lse, *found, second), (expected, sums, *slopes, curved), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    ran = {(row["op"], row["implementation"]) for row in counted()}
    assert ("attention_masked_fwd", way) in ran


@pytest.mark.parametrize("kind", ["bool", "-inf"])
def test_queries_without_a_key_give_zeros_and_zero_gradients(way, kind):
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 5, 8))
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    mask = mask if kind == "bool" else torch.zeros(5, 5).masked_fill(~mask, -math.inf)
    o, lse = ops.attention(q, k, v, mask=mask, return_lse=True)
    o.sum().backward()
    assert o[:, :, 2].eq(0).all()
    assert lse[:, :, 2].eq(-math.inf).all()
    assert q.grad[:, :, 2].eq(0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    nothing = ops.attention(q, k, v, mask=torch.zeros(1, dtype=torch.bool))
    assert nothing.eq(0).all()


def test_a_mask_that_learns_gets_its_gradient_and_the_ledger_says_how():
    q, k, v = tensors(2, 4, 9, 8, Hkv=2)
    ours, theirs = (torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in "ab")
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    do = torch.randn_like(q)
    ops.attention(q, k, v, mask=ours).backward(do)
    F.scaled_dot_product_attention(q, keys, values, attn_mask=theirs).backward(do)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    (row,) = counted("attention_mask_gradient")
    assert "gives a mask no gradient" in {each["reason"] for each in row["refused"]}


@pytest.mark.slow
def test_masks_under_transforms_compile_and_autocast(interpreted):
    q, k, v = tensors(2, 2, 6, 4)
    mask = torch.rand(2, 1, 6, 6) > 0.3
    mask[..., 0] = True
    expected = attention_reference(q, k, v, mask=mask)
    whole = torch.func.grad(lambda q: ops.attention(q, k, v, mask=mask).square().sum())(q)
    leaf = q.clone().requires_grad_()
    ops.attention(leaf, k, v, mask=mask).square().sum().backward()
    torch.testing.assert_close(whole, leaf.grad)
    compiled = torch.compile(lambda q: ops.attention(q, k, v, mask=mask), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), expected)
    with torch.autocast("cpu", torch.bfloat16):
        low = ops.attention(q, k, v, mask=torch.zeros(6, 6).masked_fill(~mask[0, 0], -math.inf))
    assert low.dtype == torch.bfloat16


@pytest.mark.parametrize(("mask", "error", "message"), [
    (torch.ones(5, 4), ShapeError, r"mask must broadcast to \(B, Hq, S, Skv\) = \(1, 2, 5, 5\), got \(5, 4\)"),
    (torch.ones(1, 1, 1, 1, 5), ShapeError, "mask must broadcast"),
    (torch.ones(5, 5, dtype=torch.int64), UnsupportedDtype, "mask must be bool, float32 .*; got int64"),
    (torch.ones(5, 5, device="meta"), ShapeError, "mask must be on cpu, where q is; it is on meta"),
    ([[True]], TypeError, "mask is a list"),
])  # fmt: skip
def test_masks_that_do_not_fit_are_refused(mask, error, message):
    assert_raises(error, message, lambda: ops.attention(*tensors(1, 2, 5, 8), mask=mask))


# --- segments --------------------------------------------------------------------------------------------------------
SEGMENTS = ("right", "left", "both", "holes", "packed", "packed and padded", "any")


def segments_of(kind, B, S, Skv, draw):
    """The segments of queries and of keys; padding is a key of none that a query has."""
    of_queries, of_keys = (torch.zeros(B, length, dtype=torch.int64) for length in (S, Skv))
    for b in range(B):
        n, m = sorted(draw.randint(0, Skv) for _ in "ab")
        if kind in ("right", "both"):
            of_keys[b, m:] = -1
        if kind in ("left", "both"):
            of_keys[b, :n] = -1
        if kind == "holes":
            of_keys[b, [i for i in range(Skv) if draw.random() < 0.3]] = -1
        for x in (of_queries[b], of_keys[b]):
            if kind == "any":
                x.copy_(torch.tensor([draw.randint(-1, 1) for _ in x], dtype=torch.int64))
            elif kind.startswith("packed"):
                x.copy_(torch.tensor([draw.random() < 0.1 for _ in x], dtype=torch.int64).cumsum(0))
        if kind == "packed and padded":
            of_keys[b, m:] = -1
    return of_queries, of_keys


@pytest.mark.sample(9)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", SEGMENTS)
def test_segments(kind, seed, way, monkeypatch):
    """Drawn shapes and patterns: results, logarithms, gradients, and the ranges that let kernels skip keys."""
    draw = random.Random(f"{kind} {seed}")
    B, Hkv, group, S, D = (draw.randint(low, high) for low, high in ((1, 3), (1, 2), (1, 2), (1, 70), (4, 20)))
    Skv = draw.choice([S, draw.randint(1, 80)])
    options = {
        "causal": draw.random() < 0.5,
        "window": draw.choice([None, 0, 5, 30]),
        "scale": draw.choice([None, 0.3]),
    }
    dtype, bound = draw.choice([(torch.float32, 1e-5), (torch.float32, 1e-5), (torch.float16, 5e-3)])
    q, k, v = (x.requires_grad_() for x in tensors(B, Hkv * group, S, D, Hkv, Skv, dtype))
    segments = segments_of(kind, B, S, Skv, draw)
    tables, original = [], module.segments_mask
    monkeypatch.setattr(module, "segments_mask", lambda *args: tables.append(original(*args)) or tables[-1])
    o, lse = ops.attention(q, k, v, segments=segments, return_lse=True, **options)
    do = torch.randn(o.shape).to(dtype)
    reference = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected, sums = attention_reference(*reference, segments=segments, return_lse=True, **options)
    found, slopes = torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(expected, reference, do.double())
    for one, other in zip((o, lse, *found), (expected, sums, *slopes), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=bound, atol=bound)
    if way == "triton":
        seen = segments[0][:, :, None] == segments[1][:, None, :]
        for rows, same in ((tables[0][:, :, :S], seen), (tables[0][:, :, S:], seen.mT)):
            length, i = same.shape[2], torch.arange(same.shape[2])
            first = torch.where(same, i, length).amin(2)
            assert torch.equal(rows[:, 1], first.int())
            assert torch.equal(rows[:, 2], torch.where(same, i + 1, 0).amax(2).int())
            assert torch.equal(rows[:, 3], torch.where(~same & (i > first[..., None]), i, length).amin(2).int())
    ran = {(row["op"], row["implementation"]) for row in counted()}
    assert {("attention_masked_fwd", way), ("attention_masked_bwd", way), ("attention_segments", way)} <= ran


def test_one_tensor_of_segments_is_that_of_queries_and_keys(way):
    q, k, v = tensors(S=9)
    segments = torch.tensor([[4, 4, 4, 4, 7, 7, 7, 1, 1]], dtype=torch.int32)
    o = ops.attention(q, k, v, causal=True, segments=segments)
    parts = [ops.attention(*(x[:, :, a:b] for x in (q, k, v)), causal=True) for a, b in ((0, 4), (4, 7), (7, 9))]
    torch.testing.assert_close(o, torch.cat(parts, 2))


def test_segments_under_transforms_and_compile():
    q, k, v = tensors(1, 2, 6, 4)
    segments = torch.tensor([[0, 0, 0, 1, 1, 2]])
    leaf = q.clone().requires_grad_()
    ops.attention(leaf, k, v, segments=segments).square().sum().backward()
    whole = torch.func.grad(lambda q: ops.attention(q, k, v, segments=segments).square().sum())(q)
    torch.testing.assert_close(whole, leaf.grad)
    compiled = torch.compile(lambda q: ops.attention(q, k, v, segments=segments), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), attention_reference(q, k, v, segments=segments))


@pytest.mark.parametrize(("segments", "options", "error", "message"), [
    (torch.zeros(1, 4, dtype=torch.int64), {}, ShapeError, r"segments of queries must be \(1, 5\), got \(1, 4\)"),
    (torch.zeros(1, 5), {}, UnsupportedDtype, "segments must be integers, got float32"),
    (torch.zeros(1, 5, dtype=torch.int64, device="meta"), {}, ShapeError, "segments must be on cpu"),
    ((torch.zeros(1, 5, dtype=torch.int64), [[0] * 5]), {}, TypeError, "segments of keys is a list"),
    (torch.zeros(1, 5, dtype=torch.int64), {"mask": torch.ones(5, 5)}, ConfigError, "mask or segments, not both"),
    ((torch.zeros(1, 5, dtype=torch.int64),), {}, ConfigError, "a tensor, or a pair of tensors"),
    (3, {}, ConfigError, "a tensor, or a pair of tensors, got 3"),
    (torch.arange(5)[None] << 32, {}, ConfigError, r"segments of queries must be below 2\^31"),
])  # fmt: skip
def test_segments_that_do_not_fit_are_refused(segments, options, error, message):
    assert_raises(error, message, lambda: ops.attention(*tensors(1, 2, 5, 8), segments=segments, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", SEGMENTS)
def test_segments_on_a_gpu(kind, causal, dtype):
    """The error is at most twice that of torch's function with a mask in the same dtype."""
    leaves = [x.to("cuda").requires_grad_() for x in tensors(3, 4, 500, 64, dtype=dtype)]
    segments = [x.cuda() for x in segments_of(kind, 3, 500, 500, random.Random(kind))]
    do = torch.randn(3, 4, 500, 64, device="cuda").to(dtype)
    mask = (segments[0][:, :, None] == segments[1][:, None, :])[:, None]
    mask = mask.tril() if causal else mask
    at_most_twice(lambda *qkv: ops.attention(*qkv, causal=causal, segments=segments), leaves, do, mask)


# --- masks on a gpu --------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest"])
@pytest.mark.parametrize("shape", [(300, 333), (2, 1, 1, 333), (2, 4, 300, 333)], ids=str)
def test_masks_on_a_gpu(shape, kind, dtype):
    """Compiled, with several tiles; the error is at most twice that of torch's own function in the same dtype."""
    leaves = [x.to("cuda").requires_grad_() for x in tensors(2, 4, 300, 64, Skv=333, dtype=dtype)]
    mask, do = mask_of(shape, kind, dtype).cuda(), torch.randn(2, 4, 300, 64, device="cuda").to(dtype)
    at_most_twice(lambda *qkv: ops.attention(*qkv, mask=mask), leaves, do, mask)
    split = dtype == torch.float32 and torch.cuda.get_device_capability() == (9, 0)
    ran = {(row["op"], row["implementation"]) for row in counted()}
    assert ran == {(f"attention_masked_{way}", "triton_fp16x3" if split else "triton") for way in ("fwd", "bwd")}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [None, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_half_precision_by_torch_on_a_cpu_is_computed_in_float32(dtype, masked, autocast, monkeypatch):
    monkeypatch.setattr(module, "has_matrix_tiles", lambda: False)
    heads = torch.randn(2, 6, 3, 2, 8).to(dtype).requires_grad_()
    mask = None if masked is None else torch.rand(6, 6) > 0.3 if masked is torch.bool else torch.randn(6, 6)
    do = torch.randn(2, 2, 6, 8)

    def attended(run, x):
        q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
        o = run(q, k, v)
        return o, torch.autograd.grad(o, x, do.to(o.dtype))[0]

    with torch.autocast("cpu", dtype, enabled=autocast):
        o, dx = attended(lambda q, k, v: module.attend_by_torch(q, k, v, causal=mask is None, mask=mask), heads)
    assert (o.dtype, dx.dtype) == (dtype, dtype)
    added = None if mask is None else mask if masked is torch.bool else mask.to(dtype).double()
    do = do.to(dtype)
    exact = attended(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, added, is_causal=mask is None),
        heads.detach().double().requires_grad_(),
    )
    for one, other in zip((o, dx), exact, strict=True):
        # Rounded once: half a unit in the last place of the largest.
        torch.testing.assert_close(one.double(), other, rtol=torch.finfo(dtype).eps, atol=1e-4 + torch.finfo(dtype).eps)


def test_long_sequences_of_bfloat16_and_tiles_keep_torchs_own_kernel(monkeypatch):
    def wide(dtype, keys, width=64):
        return module._is_faster_wide(
            torch.empty(1, 1, 1, width, dtype=dtype), torch.empty(1, 1, keys, width, dtype=dtype)
        )

    monkeypatch.setattr(module, "has_matrix_tiles", lambda: False)
    cases = (
        (torch.bfloat16, 256), (torch.bfloat16, 257), (torch.bfloat16, 256, 65), (torch.float16, 4096),
        (torch.float32, 16),
    )  # fmt: skip
    assert [wide(*case) for case in cases] == [True, False, False, True, False]
    monkeypatch.setattr(module, "has_matrix_tiles", lambda: True)
    assert [wide(*case) for case in cases] == [False, False, False, True, False]
