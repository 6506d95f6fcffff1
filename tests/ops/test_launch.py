"""The eviction policy of kernels that read their input once: where it is asked for, and that it changes no result."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from accelerant import ops
from accelerant.ops import _launch
from accelerant.runtime.compilation.triton import TritonKernel, recorders
from accelerant.runtime.dispatch.race import Tuned


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


# --- repeated launches -----------------------------------------------------------------------------------------------
class Prepared:
    """A launch that writes down its pointers, in the list that a TritonKernel adds it to."""

    def __init__(self):
        self.started = []

    def start(self, pointers):
        self.started.append(list(pointers))
        recorders.get(threading.get_ident(), []).append((self, tuple(pointers)))


def test_launches_are_repeated_with_other_pointers_in_their_order():
    plans = Tuned("repeated_probe", default=lambda n: n, candidates=lambda n: (n,))
    repeats, one, two = _launch.Repeats(plans), Prepared(), Prepared()
    assert not repeats.start("key", [1, 2, 3])
    with repeats.recorded("key", [1, 2, 3]):
        one.start((3, 1))
        two.start((2,))
    assert not recorders
    assert repeats.start("key", [10, 20, 30])
    assert (one.started, two.started) == ([[3, 1], [30, 10]], [[2], [20]])
    assert not repeats.start("another", [10, 20, 30])
    plans.forget()
    assert not repeats.start("key", [10, 20, 30])


@pytest.mark.parametrize(
    ("key", "pointers", "used"),
    [("key", [1, 2], (9,)), ("key", [1, 1], (1,)), ("key", [1, 2], None), (None, [1, 2], (1,))],
    ids=["a temporary", "one address", "no launch", "no key"],
)
def test_what_other_calls_could_not_repeat_is_not_kept(key, pointers, used):
    repeats, one = _launch.Repeats(), Prepared()
    with repeats.recorded(key, pointers):
        if used is not None:
            one.start(used)
    assert not repeats.start(key, [3, 4])


def test_failed_calls_and_those_of_other_threads_are_not_kept():
    repeats, one, other = _launch.Repeats(), Prepared(), Prepared()
    with pytest.raises(ValueError, match="refused"), repeats.recorded("failed", [1]):  # noqa: PT012 - both, in this order
        one.start((1,))
        raise ValueError("refused")
    assert not repeats.start("failed", [2])
    with repeats.recorded("key", [1]):
        one.start((1,))
        thread = threading.Thread(target=other.start, args=((1,),))
        thread.start()
        thread.join()
    assert repeats.start("key", [5])
    assert other.started == [[1]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeated_calls_on_a_gpu_are_the_first(dtype):
    """The results of other tensors, aligned otherwise, and with one tensor in two places."""

    def losses(x, y, mean=True, smoothing=0.0):
        loss = ops.cross_entropy(x, y, reduction="mean" if mean else "sum", label_smoothing=smoothing)
        return loss, torch.autograd.grad(loss, x, torch.full_like(loss, 2.0))[0]

    def norms(x, w, b):
        y, s = ops.add_layer_norm(x, x, w, b)
        return y, *torch.autograd.grad((y, s), (x, w, b), (y.detach(), y.detach() if w[0] > 1 else s.detach()))

    torch.manual_seed(0)
    for i in range(6):
        x = torch.randn(65, 48, device="cuda", dtype=dtype)
        x = (x if i % 2 else x.flatten()[1:-47].view(64, 48)).requires_grad_()
        y = torch.randint(48, (x.shape[0],), device="cuda")
        y[i] = -100
        for mean, smoothing in ((True, 0.0), (False, 0.0), (True, 0.1)):
            found = losses(x, y, mean, smoothing)
            wide = x.detach().double().requires_grad_()
            tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
            for one, other in zip(found, losses(wide, y, mean, smoothing), strict=True):
                torch.testing.assert_close(one.double(), other, **tolerance)
        w, b = (torch.randn(48, device="cuda", dtype=dtype).add_(3 * (i > 2)).requires_grad_() for _ in range(2))
        doubles = [each.detach().double().requires_grad_() for each in (x, w, b)]
        for one, other in zip(norms(x, w, b), norms(*doubles), strict=True):
            error = float((one.double() - other).detach().norm() / other.norm().detach())
            assert error < (2e-2 if dtype == torch.bfloat16 else 1e-5)
