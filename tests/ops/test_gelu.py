import math

import pytest
import torch
from op_checks import compiled_into

from accelerant import ops
from accelerant.errors import ConfigError, UnsupportedDtype

BOTH = pytest.mark.parametrize("approximate", ["none", "tanh"])


@BOTH
def test_values_at_the_ends(approximate, interpreted):
    x = torch.tensor([0.0, 20.0, -20.0, 1e4, -1e4, 3e38, -3e38, math.inf, math.nan])
    y = ops.gelu(x, approximate)
    assert y[:7].tolist() == [0.0, 20.0, 0.0, x[3].item(), 0.0, x[5].item(), 0.0]
    assert y[7] == math.inf
    assert y[8].isnan()


@BOTH
def test_slope_at_the_ends(approximate, interpreted):
    x = torch.tensor([0.0, 20.0, -20.0, 1e4, -1e4, 3e38, -3e38], requires_grad=True)
    ops.gelu(x, approximate).sum().backward()
    assert x.grad.tolist() == [0.5, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


@BOTH
def test_odd_part_is_half_of_x(approximate):
    x = torch.linspace(-6, 6, 1001)
    torch.testing.assert_close(ops.gelu(x, approximate) - ops.gelu(-x, approximate), x, rtol=2e-6, atol=1e-6)


def test_formulas_differ():
    x = torch.linspace(-3, 3, 50)
    gap = (ops.gelu(x) - ops.gelu(x, "tanh")).abs().max()
    assert 1e-4 < gap < 1e-3


@pytest.mark.parametrize("n", [4095, 4096, 4097, 3 * 4096 + 1])
def test_around_a_block(n, interpreted):
    x = torch.randn(n, requires_grad=True)
    y = ops.gelu(x, "tanh")
    y.sum().backward()
    z = x.detach().clone().requires_grad_()
    expected = torch.nn.functional.gelu(z, approximate="tanh")
    expected.sum().backward()
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(x.grad, z.grad, rtol=2e-6, atol=2e-6)


LAYOUTS = {
    "transposed": lambda: torch.randn(5, 7).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every second": lambda: torch.randn(6, 8)[:, ::2],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "part of a row": lambda: torch.randn(6, 8)[1:5, 3:6],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, interpreted):
    x = LAYOUTS[layout]()
    reference = torch.nn.functional.gelu(x.double()).float()
    y = ops.gelu(x)
    torch.testing.assert_close(y, reference, rtol=2e-6, atol=1e-6)
    assert y.stride() == torch.empty_like(x).stride()
    leaf = x.detach().requires_grad_()
    dy = torch.randn(x.shape[::-1]).permute(*range(x.dim() - 1, -1, -1))  # a layout of its own
    ops.gelu(leaf).backward(dy)
    expected = x.detach().double().requires_grad_()
    torch.nn.functional.gelu(expected).backward(dy.double())
    torch.testing.assert_close(leaf.grad, expected.grad.float(), rtol=2e-6, atol=2e-6)


def test_keeps_its_dtype_under_autocast():
    x = torch.randn(4)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.gelu(x).dtype == torch.float32
        assert ops.gelu(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.slow
def test_is_torchs_own_under_compile():
    assert compiled_into(ops.gelu, torch.randn(3)) == [torch._C._nn.gelu]


def test_refuses_integers():
    with pytest.raises(UnsupportedDtype, match="gelu takes bfloat16, float16, float32, float64; x is int32"):
        ops.gelu(torch.ones(3, dtype=torch.int32))


def test_refuses_another_formula():
    with pytest.raises(ConfigError, match="approximate must be 'none' or 'tanh', got 'sigmoid'"):
        ops.gelu(torch.ones(3), "sigmoid")
