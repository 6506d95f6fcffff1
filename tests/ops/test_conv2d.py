import importlib
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from op_checks import check_beside, compiled_into, counted

from accelerant import ops
from accelerant.config import override
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops._images import to_channels_first, to_channels_last
from accelerant.runtime.compilation.kernel import CUDA_TARGETS
from accelerant.runtime.dispatch import Case, force, operations
from processes import printed
from refusals import assert_raises

algorithms = importlib.import_module("accelerant.ops.conv2d")


def against_torch(*tensors, **options):
    y, expected = check_beside(
        partial(ops.conv2d, **options), partial(F.conv2d, **options), *tensors, near=(1e-5, 1e-5)
    )
    assert y.stride() == expected.stride()


pairs = st.one_of(st.integers(1, 3), st.tuples(st.integers(1, 3), st.integers(1, 3)))


@settings(max_examples=12, deadline=None)
@given(
    batch=st.integers(0, 3),
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    groups=st.integers(1, 2),
    bias=st.booleans(),
    stride=pairs,
    dilation=pairs,
    padding=st.one_of(pairs, st.just(0), st.just("same"), st.just("valid")),
)
def test_any_settings(batch, sizes, kernel, groups, bias, stride, dilation, padding):
    if padding == "same":
        stride = 1
    tensors = [torch.randn(batch, 2 * groups, *sizes), torch.randn(3 * groups, 2, *kernel)]
    if bias:
        tensors.append(torch.randn(3 * groups))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    try:
        y = ops.conv2d(*tensors, **options)
    except ShapeError:
        assert_raises(RuntimeError, None, F.conv2d, *tensors, **options)
        assume(False)
    torch.testing.assert_close(y, F.conv2d(*tensors, **options), rtol=1e-5, atol=1e-5)
    if batch:
        against_torch(*tensors, **options)


LAYOUTS = {
    "channels last": lambda: torch.randn(2, 3, 6, 5).to(memory_format=torch.channels_last),
    "every second": lambda: torch.randn(2, 3, 6, 10)[..., ::2],
    "expanded": lambda: torch.randn(1, 3, 6, 5).expand(2, 3, 6, 5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout):
    against_torch(LAYOUTS[layout](), torch.randn(4, 3, 3, 3), torch.randn(4), padding=1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_a_number_as_torch(value):
    x = torch.randn(1, 2, 5, 5)
    x[0, 1, 2, 2] = value
    against_torch(x, torch.randn(3, 2, 3, 3), padding=1)


def test_cost_in_the_ledger():
    x, weight = torch.randn(2, 4, 8, 8, requires_grad=True), torch.randn(6, 2, 3, 3, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)
    with force(conv2d_fwd="torch"):  # or the backward pass is torch's own, and not counted
        ops.conv2d(x, weight, bias, padding=1, groups=2).sum().backward()
    products, tensors = 2 * 6 * 8 * 8 * 2 * 9, (x.numel(), weight.numel(), 2 * 6 * 8 * 8)
    ((forward,), (backward,)) = counted("conv2d_fwd"), counted("conv2d_bwd")
    assert (forward["flops"], forward["bytes"], forward["own"]) == (2 * products, 4 * sum(tensors), False)
    assert (backward["flops"], backward["own"]) == (4 * products, False)


def test_no_convolution_for_an_unwanted_gradient():
    weight = torch.randn(2, 1, 3, 3, requires_grad=True)
    with force(conv2d_fwd="torch"):
        ops.conv2d(torch.randn(1, 1, 5, 5), weight).sum().backward()
    (row,) = counted("conv2d_bwd")
    assert row["flops"] == 2 * 2 * 9 * 9


def test_deterministic():
    with override(deterministic=True):
        against_torch(torch.randn(2, 3, 6, 5), torch.randn(4, 3, 3, 3), torch.randn(4), padding=1)
    assert {row["implementation"] for row in counted("conv2d_bwd")} == {"torch-deterministic"}
    assert not torch.backends.cudnn.deterministic


def test_autocast_casts_as_torch_does():
    x, weight = torch.randn(1, 2, 4, 4, requires_grad=True), torch.randn(3, 2, 2, 2, requires_grad=True)
    bias = torch.randn(3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = ops.conv2d(x, weight, bias), F.conv2d(x, weight, bias)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    y.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32


def test_is_torchs_own_under_compile():
    assert compiled_into(ops.conv2d, torch.randn(1, 2, 4, 4), torch.randn(3, 2, 2, 2)) == [torch.conv2d]


X, W = torch.ones(1, 4, 5, 5), torch.ones(2, 4, 3, 3)


@pytest.mark.parametrize(("args", "options", "error", "words"), [
    ((torch.ones(5, 5), W), {}, ShapeError, r"x of shape \(B, C, H, W\) or \(C, H, W\), got \(5, 5\)"),
    ((X, torch.ones(4, 3, 3)), {}, ShapeError, r"weight must be \(O, C / groups, K, L\).*got \(4, 3, 3\)"),
    ((X, torch.ones(2, 4, 0, 3)), {}, ShapeError, r"weight must be .*got \(2, 4, 0, 3\)"),
    ((X, torch.ones(2, 3, 3, 3)), {}, ShapeError, r"x has 4 channels, weight \(2, 3, 3, 3\) in 1 groups takes 3"),
    ((X, W), {"groups": 3}, ShapeError, "groups must divide the channels, 4 of x and 2 of y, got 3"),
    ((X, W, torch.ones(3)), {}, ShapeError, r"bias must be \(2,\), got \(3,\)"),
    ((X, torch.ones(2, 4, 6, 3)), {}, ShapeError, "6 with dilation 1 does not fit into height 5 with padding 0"),
    ((X, W), {"dilation": (1, 4)}, ShapeError, "a kernel of 3 with dilation 4 does not fit into width 5"),
    ((X, W.to("meta")), {}, ShapeError, "x and weight must be on one device, got cpu and meta"),
    ((X, W), {"stride": 0}, ConfigError, "stride must be at least 1, got 0"),
    ((X, W), {"stride": (1, 2, 3)}, ConfigError, r"stride must be one or two integers, got \(1, 2, 3\)"),
    ((X, W), {"stride": 1.5}, ConfigError, "stride must be one or two integers, got 1.5"),
    ((X, W), {"padding": -1}, ConfigError, "padding must be at least 0, got -1"),
    ((X, W), {"padding": "full"}, ConfigError, "padding must be numbers, 'valid' or 'same', got 'full'"),
    ((X, W), {"padding": "same", "stride": 2}, ConfigError, "padding 'same' takes stride 1, got 2"),
    ((X, W), {"dilation": 0}, ConfigError, "dilation must be at least 1, got 0"),
    ((X, W), {"groups": 0}, ConfigError, "groups must be at least 1, got 0"),
    ((X.long(), W.long()), {}, UnsupportedDtype, r"conv2d takes .*; x is int64"),
    ((X, W.half()), {}, UnsupportedDtype, "x and weight must have one dtype, got float32 and float16"),
    ((X, W, torch.ones(2).double()), {}, UnsupportedDtype, "x and bias must .*, got float32 and float64"),
], ids=lambda value: "")  # fmt: skip
def test_refuses(args, options, error, words):
    assert_raises(error, words, ops.conv2d, *args, **options)


# --- other algorithms to the library ---------------------------------------------------------------------------------
PATCHES = [
    ((2, 3, 8, 12), (5, 3, 4, 3), (4, 3)),
    ((1, 2, 9, 7), (3, 2, 2, 3), (2, 3)),  # a row and a column in no patch
    ((3, 1, 4, 4), (2, 1, 4, 4), (4, 4)),
]


@pytest.mark.sample(7)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("name", "x", "weight", "stride", "padding"),
    [("patches", x, weight, stride, (0, 0)) for x, weight, stride in PATCHES]
    + [
        ("channels-last", (2, 8, 5, 7), (16, 8, 3, 3), (1, 1), (1, 1)),
        ("channels-last", (1, 40, 6, 6), (8, 40, 1, 1), (2, 2), (0, 0)),
    ],
    ids=str,
)
def test_ways_give_the_same(name, x, weight, stride, padding, bias, interpreted):
    """Forward and each gradient alone and together, with the layout that torch gives."""
    x, weight = torch.randn(x), torch.randn(weight)
    bias = torch.randn(weight.shape[0]) if bias else None
    settings = (list(stride), list(padding), [1, 1], 1)
    forward, backward = operations()["conv2d_fwd"], operations()["conv2d_bwd"]
    y, expected = (forward.run(each, x, weight, bias, *settings) for each in (name, "torch"))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert y.is_contiguous()
    for dy in (torch.randn_like(y), torch.randn(1).expand_as(y)):
        for needs in ((True, True, bias is not None), (True, False, False), (False, True, False)):
            found, wanted = (backward.run(each, dy, x, weight, bias, *settings, needs) for each in (name, "torch"))
            for one, other, need in zip(found, wanted, needs, strict=True):
                assert (one is not None) == need
                if need:
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
                    assert one.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "x", "weight", "stride", "padding"), [
    ("patches", (64, 3, 225, 230), (192, 3, 16, 16), 16, 0),
    ("channels-last", (8, 64, 57, 55), (128, 64, 3, 3), 1, 1),
])  # fmt: skip
def test_ways_on_a_gpu(name, x, weight, stride, padding, dtype):
    tensors = [torch.randn(x).to(dtype), torch.randn(weight).to(dtype) / 16, torch.randn(weight[0]).to(dtype)]
    found = []
    for device, kind in (("cuda", dtype), ("cuda", torch.float64)):
        leaves = [each.to(device, kind).requires_grad_() for each in tensors]
        forced = {f"conv2d_{way}": name if kind == dtype else "torch" for way in ("fwd", "bwd")}
        with force(**forced):
            y = ops.conv2d(*leaves, stride=stride, padding=padding)
            torch.manual_seed(0)
            dy = torch.randn(y.shape).to(dtype)
            y.backward(dy.to(device, kind))
        assert y.is_contiguous()
        found.append([y.detach().double(), *(each.grad.double() for each in leaves)])
    for one, exact in zip(*found, strict=True):
        assert (one - exact).abs().max() <= 1.6e-2 * exact.abs().max()


LARGE = (64, 256, 56, 56)
SAME = ((256, 256, 3, 3), (64, 256, 56, 56), (1, 1), (1, 1), (1, 1), 1)
CUT = ((768, 3, 16, 16), (256, 768, 14, 14), (16, 16), (0, 0), (1, 1), 1)


@pytest.mark.parametrize(("refuses", "dtype", "shape", "options", "words"), [
    (algorithms.refuses_channels_last, torch.bfloat16, LARGE, (*SAME, "contiguous"), None),
    (algorithms.refuses_channels_last, torch.bfloat16, LARGE, (*SAME, (True, True, False), "contiguous"), None),
    (algorithms.refuses_channels_last, torch.float32, LARGE, (*SAME, "contiguous"), "bfloat16 and float16"),
    (algorithms.refuses_channels_last, torch.bfloat16, LARGE, (*SAME, "strided"), "contiguous x and weight"),
    (algorithms.refuses_channels_last, torch.bfloat16, LARGE, (*SAME[:5], 2, "contiguous"), "groups"),
    (algorithms.refuses_channels_last, torch.bfloat16, (256, 3, 224, 224), (*CUT, "contiguous"), "multiples of 8"),
    (algorithms.refuses_patches, torch.float16, (256, 3, 224, 224), (*CUT, "contiguous"), None),
    (algorithms.refuses_patches, torch.float16, LARGE, (*SAME, "contiguous"), "windows overlap"),
    (algorithms.refuses_patches, torch.float16, LARGE,
     ((256, 256, 2, 2), (64, 256, 28, 28), (2, 2), *CUT[3:], "contiguous"), "less than 8 columns"),
    (algorithms.refuses_patches, torch.float16, (1, 3, 16, 16),
     ((768, 3, 16, 16), (1, 768, 1, 1), *CUT[2:], "contiguous"), "larger images"),
])  # fmt: skip
def test_where_the_ways_are_taken(refuses, dtype, shape, options, words, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    reason = refuses(Case(torch.device("cuda", 0), dtype, torch.Size(shape), options))
    assert words in reason if words else reason is None
    assert "NVIDIA" in algorithms.refuses_patches(
        Case(torch.device("cpu"), torch.float16, torch.Size((256, 3, 224, 224)), CUT)
    )


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 40, 4, 5), (3, 17, 1, 33), (0, 2, 3, 4)], ids=str)
def test_layouts_turn_there_and_back(shape, interpreted):
    x = torch.randn(shape)
    there = to_channels_last(x)
    assert there.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(there, x)
    back = to_channels_first(there)
    assert back.is_contiguous()
    assert torch.equal(back, x)


def test_what_a_library_left_with_the_channels_first_is_not_turned(interpreted):
    """Without cuDNN torch's convolutions on a GPU give contiguous results, whatever comes."""
    x = torch.randn(2, 3, 5, 7)
    assert torch.equal(to_channels_first(x), x)
    strided = torch.randn(2, 5, 3, 7).transpose(1, 2)
    found = to_channels_first(strided)
    assert found.is_contiguous()
    assert torch.equal(found, strided)


@pytest.mark.parametrize(("x", "weight", "layout"), [
    (torch.ones(2, 1, 9, 8), torch.ones(4, 1, 3, 3), "contiguous"),
    (torch.ones(2, 9, 8, 1).permute(0, 3, 1, 2), torch.ones(4, 1, 3, 3), "strided"),
    (torch.ones(2, 1, 9, 8), torch.ones(4, 3, 3, 1).permute(0, 3, 1, 2), "strided"),
    (torch.ones(2, 8, 9, 8), torch.ones(4, 8, 1, 1), "contiguous"),
], ids=["first", "x last", "weight last", "1 x 1"])  # fmt: skip
def test_one_channel_with_the_channels_last_is_not_contiguous(x, weight, layout):
    """Torch calls both contiguous, and gives a result with the channels last; ours would give the other layout."""
    assert x.is_contiguous()
    assert weight.is_contiguous()
    y = ops.conv2d(x, weight)
    assert y.stride() == F.conv2d(x, weight).stride()
    (row,) = counted("conv2d_fwd")
    assert row["case"].endswith(f" {layout}")


@pytest.mark.slow
def test_layout_kernel_compiles():
    """For every target."""
    code = f"""
from accelerant.ops._images import KERNEL
types = {{"x_ptr": "*bf16", "y_ptr": "*bf16", "M": "i32", "N": "i32"}}
source = KERNEL.source(types, {{"BLOCK_M": 64, "BLOCK_N": 64}})
for target in {[*CUDA_TARGETS, "gfx942"]!r}:
    assert source.dialects["triton"].build(target).code, target
"""
    printed(code)
