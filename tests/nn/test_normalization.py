import pytest
import torch

from accelerant.errors import ConfigError, ShapeError
from accelerant.nn import RMSNorm


def test_rms_norm_is_torchs():
    torch.manual_seed(0)
    layer, other = RMSNorm(8, eps=1e-3), torch.nn.RMSNorm(8, eps=1e-3)
    torch.nn.init.normal_(layer.weight)
    other.load_state_dict(layer.state_dict())
    x, y = (torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    torch.testing.assert_close(layer(x), other(y))
    layer(x).square().sum().backward()
    other(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(layer.weight.grad, other.weight.grad)


def test_rms_norm_follows_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert RMSNorm(8)(torch.randn(2, 8)).dtype == torch.bfloat16


def test_rms_norm_refuses():
    with pytest.raises(ConfigError, match="width of at least 1, got 0"):
        RMSNorm(0)
    with pytest.raises(ShapeError, match=r"RMSNorm takes \(\.\.\., 8\), got \(2, 7\)"):
        RMSNorm(8)(torch.zeros(2, 7))
