"""configure_math sets torch's modes, and restores them."""

import pytest
import torch

import accelerant as acl
from accelerant.errors import ConfigError


def torchs_settings():
    return (
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cudnn.rnn.fp32_precision, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark,
    )  # fmt: skip


def test_math_modes_are_set_and_restored():
    before = torchs_settings()
    with acl.configure_math(tf32=True, cudnn_benchmark=True) as mode:
        assert repr(mode) == "MathMode(tf32=True, cudnn_benchmark=True)"
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.benchmark
        with acl.configure_math(tf32=False) as inner:
            assert (inner.tf32, inner.cudnn_benchmark) == (False, True)
            assert not torch.backends.cuda.matmul.allow_tf32
            assert not torch.backends.cudnn.allow_tf32
        assert acl.configure_math().tf32
    assert torchs_settings() == before
    with acl.configure_math():
        acl.configure_math(cudnn_benchmark=True)
        assert acl.configure_math().cudnn_benchmark
    assert torchs_settings() == before


@pytest.mark.parametrize(("name", "value"), [("tf32", "yes"), ("cudnn_benchmark", 1)])
def test_a_mode_that_is_no_bool_changes_nothing(name, value):
    before = torchs_settings()
    with pytest.raises(ConfigError, match=f"{name} must be True, False or None, got {value!r}"):
        acl.configure_math(**{"tf32": True, name: value})
    assert torchs_settings() == before


@pytest.mark.gpu
def test_tf32_changes_what_the_gpu_computes():
    x = torch.randn(512, 512, device="cuda")
    exact = (x.double() @ x.double()).float()
    with acl.configure_math(tf32=False):
        plain = (x @ x - exact).abs().max()
    with acl.configure_math(tf32=True):
        rounded = (x @ x - exact).abs().max()
    assert rounded > 10 * plain
