import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import LAYOUTS

from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops._launch import RowTile
from accelerant.ops.quantize_int8 import quantize_int8_reference, torch_quantize

launch = importlib.import_module("accelerant.ops.quantize_int8")

WIDTHS = pytest.mark.parametrize("width", [33, 768, 20000])
BOTH = pytest.mark.parametrize("run", [launch.launch, torch_quantize], ids=["triton", "torch"])


def exact(x, dim=-1):
    q, scale = quantize_int8_reference(x.double(), dim=dim)
    return q.to(torch.int8), scale.float()


@WIDTHS
def test_error_is_at_most_half_a_step(width, interpreted):
    x = torch.randn(5, width) * torch.tensor([1e-20, 1e-3, 1.0, 1e3, 1e20])[:, None]
    q, scale = ops.quantize_int8(x)
    assert (q.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (5,))
    assert ((q.double() * scale.double()[:, None] - x.double()).abs() <= 0.5000001 * scale.double()[:, None]).all()
    assert (q.abs().amax(-1) == 127).all()


@BOTH
@WIDTHS
def test_integers_up_to_127_are_kept(width, run, interpreted):
    x = torch.randint(-127, 128, (4, width))
    x[:, 0] = torch.tensor([127, -127, 127, -127])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, scale = run(x.to(dtype) * 0.25, 1)
        assert torch.equal(q, x.to(torch.int8))
        assert torch.equal(scale, torch.full((4,), 0.25))


@BOTH
def test_halves_to_even(run, interpreted):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    assert run(x, 1)[0].tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


@BOTH
@WIDTHS
def test_zeros_have_scale_1(width, run, interpreted):
    x = torch.zeros(3, width)
    x[1, 0] = -2.0
    x[2, 0] = 1e-45
    q, scale = run(x, 1)
    assert torch.equal(scale, torch.tensor([1.0, 2.0, 1.0]) / torch.tensor([1.0, 127.0, 1.0]))
    assert q[:, 0].tolist() == [0, -127, 0]
    assert not q[:, 1:].any()


@pytest.mark.sample(3, 3)
@BOTH
@WIDTHS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite_marks_its_row(width, value, run, interpreted):
    x = torch.randn(3, width)
    before = exact(x)
    x[1, width // 2] = value
    q, scale = run(x, 1)
    assert not q[1].any()
    assert math.isnan(scale[1]) if math.isnan(value) else scale[1] == math.inf
    assert (q[1] * scale[1]).isnan().all()
    for row in (0, 2):
        assert torch.equal(q[row], before[0][row])
        assert scale[row] == before[1][row]


def test_nan_beside_infinity(interpreted):
    assert ops.quantize_int8(torch.tensor([math.inf, math.nan, 1.0]))[1].isnan()


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_largest_and_smallest(dtype, run, interpreted):
    info = torch.finfo(dtype)
    x = torch.tensor([[info.max, info.min, 1.0], [info.tiny, -info.tiny / 4, 0.0]], dtype=dtype)
    q, scale = run(x, 1)
    assert torch.equal(q, exact(x)[0])
    assert torch.equal(scale, exact(x)[1])


@pytest.mark.parametrize("plan", [RowTile(1, 64, 1), RowTile(4, 64, 2), RowTile(8, 128, 4)], ids=str)
def test_any_plan_gives_the_same(plan, interpreted):
    x = torch.randn(37, 50)
    torch.testing.assert_close(launch.launch(x, 1, plan), exact(x), rtol=0, atol=0)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, dim, interpreted):
    x = LAYOUTS[layout]()
    q, scale = ops.quantize_int8(x, dim=dim)
    assert q.is_contiguous()
    torch.testing.assert_close((q, scale), exact(x, dim), rtol=0, atol=0)


@settings(max_examples=30, deadline=None)
@given(
    M=st.integers(1, 9), N=st.integers(1, 300), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
)
def test_any_shape(M, N, dtype):
    x = torch.randn(M, N).to(dtype)
    torch.testing.assert_close(ops.quantize_int8(x), exact(x), rtol=0, atol=0)


@pytest.mark.usefixtures("uninterpreted")
def test_carries_no_gradient_by_torch():
    assert not any(each.requires_grad for each in ops.quantize_int8(torch.randn(3, 4, requires_grad=True)))


def test_carries_no_gradient(interpreted):
    x = torch.randn(3, 4, requires_grad=True)
    assert not any(each.requires_grad for each in ops.quantize_int8(x))
    assert torch.func.grad(lambda x: (x * ops.quantize_int8(x)[1].sum()).sum())(x.detach()).shape == x.shape


def test_compiles_to_one_graph():
    x = torch.randn(3, 40)
    compiled = torch.compile(lambda x: ops.quantize_int8(x * 2, dim=0), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), ops.quantize_int8(x * 2, dim=0), rtol=0, atol=0)


def test_opcheck():
    for dim in (0, 1):
        result = torch.library.opcheck(torch.ops.accelerant.quantize_int8.default, (torch.randn(3, 5), dim))
        assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dim", [2, -3])
def test_refuses_a_dimension_that_is_not_there(dim):
    with pytest.raises(ShapeError, match=rf"dim must be in \[-2, 1\] for x of shape \(3, 4\), got {dim}"):
        ops.quantize_int8(torch.ones(3, 4), dim=dim)


def test_refuses_integers():
    with pytest.raises(UnsupportedDtype, match=r"quantize_int8 takes .*; x is int64"):
        ops.quantize_int8(torch.ones(3, 4, dtype=torch.int64))
