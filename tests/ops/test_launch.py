"""The eviction policy of kernels that read their input once: where it is asked for, and that it changes no result."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from accelerant import ops
from accelerant.ops import _launch
from accelerant.runtime.compilation.triton import TritonKernel


@pytest.fixture
def fresh():
    _launch._l2_bytes.cache_clear()
    yield
    _launch._l2_bytes.cache_clear()


@pytest.fixture
def policies(monkeypatch):
    """What each kernel that has the policy was launched with, by name."""
    found = {}
    launch = TritonKernel.launch

    def recording(self, grid, args, constants, **options):
        if "EVICTION" in constants:
            found[self.name] = constants["EVICTION"]
        return launch(self, grid, args, constants, **options)

    monkeypatch.setattr(TritonKernel, "launch", recording)
    return found


@pytest.mark.parametrize(("capability", "most"), [((9, 0), 4096.0), ((8, 0), float("inf"))])
def test_only_where_it_was_measured(capability, most, fresh, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=4096))
    assert _launch._l2_bytes(torch.device("cuda", 0)) == most
    assert _launch._l2_bytes(torch.device("cpu")) == float("inf")


def test_only_above_what_the_l2_holds(monkeypatch):
    monkeypatch.setattr(_launch, "_l2_bytes", lambda device: 4096.0)
    assert _launch.eviction(torch.empty(1024, dtype=torch.bfloat16), 2) == ""
    assert _launch.eviction(torch.empty(1025, dtype=torch.bfloat16), 2) == "evict_last"
    assert _launch.eviction(torch.empty(1024, dtype=torch.bfloat16), 3) == "evict_last"
    assert _launch.eviction(torch.empty(1024), 2) == "evict_last"


def _all(x, other):
    """Every op that has the policy, forward and backward where the gradient has it too: results by name."""
    width = x.shape[-1]
    weight, bias = torch.linspace(0.5, 2.0, width), torch.linspace(-1.0, 1.0, width)
    found = {
        "add": ops.add(x, other),
        "mul": ops.mul(x, other),
        "layer_norm": ops.layer_norm(x, weight, bias),
        "rms_norm": ops.rms_norm(x, weight),
        "add_layer_norm": ops.add_layer_norm(x, other, weight, bias)[0],
    }
    for name in ("relu", "sigmoid", "tanh", "silu", "gelu", "softmax", "log_softmax"):
        leaf = x.clone().requires_grad_()
        found[name] = getattr(ops, name)(leaf)
        (found[f"{name} gradient"],) = torch.autograd.grad(found[name], leaf, other)
    return {name: y.detach() for name, y in found.items()}


@pytest.mark.parametrize("shape", [(4, 96), (3, 1100)])
def test_the_policy_changes_no_result(shape, policies, interpreted, monkeypatch):
    x, other = torch.randn(shape), torch.randn(shape)
    usual = _all(x, other)
    assert set(policies.values()) == {""}
    monkeypatch.setattr(_launch, "_l2_bytes", lambda device: 0.0)
    found = _all(x, other)
    assert set(policies.values()) == {"evict_last"}
    unary = {f"{op}_{way}" for op in ("relu", "sigmoid", "tanh", "silu", "gelu") for way in ("fwd", "bwd")}
    assert set(policies) == unary | {"add_fwd", "mul_fwd", "norm_fwd", "softmax_fwd", "softmax_bwd"}
    for name, y in usual.items():
        assert torch.equal(found[name], y), name


def _every_bfloat16():
    """All finite numbers of bfloat16, in float32."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return x[x.isfinite()]


def test_tanh_of_every_bfloat16(interpreted):
    x = _every_bfloat16()
    wanted = x.double().tanh()
    y = ops.tanh(x)
    assert (((y.double() - wanted) / wanted).nan_to_num(0.0).abs()).max() < 2e-7  # three units of float32
    assert torch.equal(ops.tanh(-x), -y)


def test_gelu_of_every_bfloat16(interpreted):
    x = _every_bfloat16().requires_grad_()
    y = ops.gelu(x, "tanh")
    (slope,) = torch.autograd.grad(y.sum(), x)
    wide = x.detach().double().requires_grad_()
    wanted = F.gelu(wide, approximate="tanh")
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), wide)
    torch.testing.assert_close(y.double(), wanted, rtol=2e-6, atol=1e-6)
    bounded = x.detach().abs() < 1e6  # beyond, the reference's own x^3 makes NaN of some slopes
    torch.testing.assert_close(slope.double()[bounded], wanted_slope[bounded], rtol=2e-6, atol=2e-6)
