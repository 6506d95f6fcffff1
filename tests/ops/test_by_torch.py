"""On a CPU, where dispatch finds that torch alone serves a call, torch's own autograd differentiates it."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelerant import ops
from accelerant.config import override
from accelerant.errors import UnsupportedCase
from accelerant.runtime.dispatch import force
from accelerant.runtime.dispatch.decisions import explain_quietly
from accelerant.runtime.ledger import ledger

TARGETS = torch.tensor([1, 4, -100, 0])
CALLS = {
    "add": lambda x, w: ops.add(x, x),
    "add row": lambda x, w: ops.add(x, w[0]),
    "add number": lambda x, w: ops.add(x, 2.0),
    "mul": lambda x, w: ops.mul(x, x),
    "mul row": lambda x, w: ops.mul(x, w[0]),
    "relu": lambda x, w: ops.relu(x),
    "sigmoid": lambda x, w: ops.sigmoid(x),
    "tanh": lambda x, w: ops.tanh(x),
    "silu": lambda x, w: ops.silu(x),
    "gelu": lambda x, w: ops.gelu(x, "tanh"),
    "swiglu": lambda x, w: ops.swiglu(x, x),
    "swiglu packed": lambda x, w: ops.swiglu(x),
    "softmax": lambda x, w: ops.softmax(x),
    "log_softmax": lambda x, w: ops.log_softmax(x, 0),
    "layer_norm": lambda x, w: ops.layer_norm(x, w[0], w[1]),
    "rms_norm": lambda x, w: ops.rms_norm(x, w[0]),
    "add_layer_norm": lambda x, w: ops.add_layer_norm(x, x, w[0])[0],
    "add_rms_norm": lambda x, w: ops.add_rms_norm(x, x, w[0])[0],
    "linear_gelu": lambda x, w: ops.linear_gelu(x, w),
    "embedding": lambda x, w: ops.embedding(TARGETS.clamp(0), x),
    "conv2d": lambda x, w: ops.conv2d(x[None, None], w[None, None, :3, :3]),
    "max_pool2d": lambda x, w: ops.max_pool2d(x[None, None], 2),
    "avg_pool2d": lambda x, w: ops.avg_pool2d(x[None, None], 2),
    "rope": lambda x, w: ops.rope(x[None, None], w[:, :3], w[:, 3:]),
    "rope interleaved": lambda x, w: ops.rope(x[None, None], w[:, :3], w[:, 3:], interleaved=True),
    "cross_entropy": lambda x, w: ops.cross_entropy(x, TARGETS),
    "linear_cross_entropy": lambda x, w: ops.linear_cross_entropy(x, w, TARGETS),
}


@pytest.fixture(autouse=True)
def _uninterpreted(uninterpreted):
    """Triton's interpreter would serve CPU tensors too."""


def tensors(dtype=torch.float32):
    make = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=make).to(dtype).requires_grad_() for shape in ((5, 6), (5, 6))]


def is_ours(y):
    return isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)


@pytest.mark.parametrize("name", CALLS)
def test_gradient_is_torchs_and_the_ledger_says_so(name):
    x, w = tensors()
    x = x[: len(TARGETS)] if "cross" in name else x
    y = CALLS[name](x, w)
    assert not is_ours(y)
    y.sum().backward()
    (row,) = ledger().to_dict()["ops"]
    assert row["calls"] == 1
    assert row["implementation"] == "torch"
    assert "torch on the CPU: its own autograd" in row["reason"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_it_is_what_the_own_way_gives(name, dtype):
    def found():
        x, w = tensors(dtype)
        y = CALLS[name](x[: len(TARGETS)] if "cross" in name else x, w)
        # One of the leaves may have no part in the result.
        return y, *torch.autograd.grad(y.float().square().sum(), [x, w], allow_unused=True, materialize_grads=True)

    by_torch = found()
    with force(dropout_fwd="torch"):  # whatever is forced, calls take the own way
        own = found()
        assert is_ours(own[0])
    for one, other in zip(by_torch, own, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        torch.testing.assert_close(one, other, **({} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}))


def test_a_forced_backward_pass_is_not_passed_over():
    x, _ = tensors()
    with force(gelu_bwd="triton"), pytest.raises(UnsupportedCase, match="gelu_bwd is forced to 'triton'"):
        ops.gelu(x).sum().backward()
    with force(gelu_bwd="torch"):
        ops.gelu(x).sum().backward()
    assert [(row["op"], row["calls"]) for row in ledger().to_dict()["ops"]] == [("gelu_fwd", 2), ("gelu_bwd", 1)]


@pytest.mark.parametrize("name", ["embedding", "cross_entropy", "layer_norm"])
def test_the_same_bits_each_time(name):
    def found():
        table = torch.randn(300, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
        places = torch.arange(4000) % 7  # many sums into few rows
        with override(deterministic=True):
            y = {
                "embedding": lambda: ops.embedding(places, table),
                "cross_entropy": lambda: ops.cross_entropy(table[places], places),
                "layer_norm": lambda: ops.layer_norm(table[places], table[0], table[1]),
            }[name]()
        assert not is_ours(y)
        return torch.autograd.grad(y.square().sum(), table)[0]

    first = found()
    assert all(torch.equal(first, found()) for _ in range(3))


def test_with_a_kernel_that_serves_the_call_is_ours(monkeypatch):
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert is_ours(ops.gelu(tensors()[0]))


def test_a_mode_sees_the_op():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        ops.gelu(tensors()[0])
    assert torch.ops.accelerant.gelu.default in seen


def test_inplace_gradient_of_a_loss_is_still_inplace():
    logits = torch.randn(4, 6, requires_grad=True)
    inside = logits * 1.0
    loss = ops.cross_entropy(inside, TARGETS, inplace_backward=True)
    (dx,) = torch.autograd.grad(loss, inside)
    assert dx.data_ptr() == inside.data_ptr()


def test_what_torch_cannot_do_as_well_is_ours():
    weight = torch.randn(5, 6, requires_grad=True)
    assert is_ours(ops.embedding(torch.empty(0, dtype=torch.int64), weight))
    low = torch.randn(300, 64).bfloat16().requires_grad_()
    assert is_ours(ops.embedding(TARGETS.clamp(0), low))  # torch would add in bfloat16


def test_few_rows_of_low_precision_are_added_in_float32():
    table, dy = torch.zeros(3, 64), torch.randn(5000, 64)
    low, places = table.bfloat16().requires_grad_(), torch.arange(5000) % 3
    y = ops.embedding(places, low)
    assert not is_ours(y)
    (found,) = torch.autograd.grad(y, low, dy.bfloat16())
    exact = torch.zeros(3, 64).index_add(0, places, dy.bfloat16().float())
    torch.testing.assert_close(found, exact.bfloat16(), rtol=8e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_of_many_logits_makes_its_gradient_itself(dtype):
    few, many = (torch.zeros(rows, 1024, dtype=dtype).requires_grad_() for rows in (255, 256))
    assert not is_ours(ops.cross_entropy(few, torch.zeros(255, dtype=torch.int64)))
    targets = torch.zeros(256, dtype=torch.int64)
    assert is_ours(ops.cross_entropy(many, targets))
    assert is_ours(ops.cross_entropy(many, targets, reduction="none")) == (dtype == torch.bfloat16)
    assert not ops.cross_entropy(many.detach(), targets).requires_grad
    assert {row["implementation"] for row in ledger().to_dict()["ops"]} == {"torch"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_under_autocast_as_the_own_way(name, dtype):
    def found():
        x, w = tensors(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            y = CALLS[name](x[: len(TARGETS)] if "cross" in name else x, w)
            return y, *torch.autograd.grad(y.float().sum(), [x, w], allow_unused=True, materialize_grads=True)

    by_torch = found()
    with force(dropout_fwd="torch"):
        own = found()
    assert [each.dtype for each in by_torch] == [each.dtype for each in own]
    for one, other in zip(by_torch, own, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_explain_tells():
    (decision,) = explain_quietly(ops.gelu, tensors()[0]).decisions
    assert "torch on the CPU: its own autograd" in str(decision)


def calls_of(run):
    """How many Python functions a call enters."""
    entered = []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(entered)


@pytest.mark.parametrize(
    ("name", "most"), [("relu", 9), ("gelu", 10), ("add", 11), ("softmax", 13), ("layer_norm", 16)]
)
def test_a_small_call_enters_few_functions(name, most):
    """What an eager call costs beside torch's own is what Python does; the second call looks everything up."""
    x, w = tensors()
    for _ in range(4):
        CALLS[name](x, w)  # the second to fourth calls are timed

    assert calls_of(lambda: CALLS[name](x, w)) <= most + 2  # the two lambdas
