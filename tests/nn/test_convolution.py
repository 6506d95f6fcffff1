import pytest
import torch

from accelerant.errors import ConfigError, ShapeError
from accelerant.nn import AvgPool2d, Conv2d, MaxPool2d, RMSNorm
from refusals import assert_raises


def test_conv2d_is_drawn_as_torchs():
    torch.manual_seed(0)
    bound = 1 / (16 * 3 * 3) ** 0.5
    weight = Conv2d(16, 64, 3).weight
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_conv2d_follows_autocast():
    layer = Conv2d(3, 4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(1, 3, 5, 5)).dtype == torch.bfloat16


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Conv2d(0, 4, 3), "needs channels"),
    (lambda: Conv2d(3, 4, 3, groups=2), "groups must divide the channels"),
    (lambda: Conv2d(3, 4, 0), "kernel_size must be at least 1"),
    (lambda: Conv2d(3, 4, 3, padding="full"), "'valid' or 'same', got 'full'"),
    (lambda: MaxPool2d(0), "kernel_size must be at least 1"),
    (lambda: AvgPool2d(2, stride=0), "stride must be at least 1"),
])  # fmt: skip
def test_a_setting_out_of_range_is_refused(make, words):
    assert_raises(ConfigError, words, make)


def test_other_channels_are_refused():
    with pytest.raises(ShapeError, match=r"takes \(B, 3, H, W\), got \(1, 4, 5, 5\)"):
        Conv2d(3, 4, 3)(torch.zeros(1, 4, 5, 5))


def test_rms_norm_follows_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert RMSNorm(8)(torch.randn(2, 8)).dtype == torch.bfloat16


def test_rms_norm_refuses():
    assert_raises(ConfigError, "width of at least 1, got 0", RMSNorm, 0)
    assert_raises(ShapeError, r"RMSNorm takes \(\.\.\., 8\), got \(2, 7\)", lambda: RMSNorm(8)(torch.zeros(2, 7)))
