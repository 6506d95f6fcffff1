"""Accelerator.batch(): what merges, equal bits, order, aliasing, errors, gradients, and the host's time of a call."""

import gc
import sys

import numpy as np
import pytest
import torch

from accelerant import Accelerator, AcceleratorConfig, zk
from accelerant.accelerator.batch import Batch
from accelerant.accelerator.methods import METHODS
from accelerant.errors import AccelerantError, ConfigError, FormatError, OutOfMemory, ShapeError, UnsupportedCase
from refusals import assert_raises
from requirements import require_backend

SIZES = (1, 7, 64, 33, 100, 16, 5)


@pytest.fixture
def acc():
    with Accelerator("cpu") as acc:
        yield acc


def _rows(width, dtype=torch.float32, lead=(1, 3, 8, 3)):
    return [torch.randn(n, width).to(dtype) for n in lead]


def _same(answer, single):
    for y, z in zip(*(x if isinstance(x, tuple) else (x,) for x in (answer, single)), strict=True):
        assert y.shape == z.shape
        assert y.dtype == z.dtype
        assert torch.equal(y, z)


def _equal_to_single_calls(acc, name, calls, options=None, launches=1):
    options = options or {}
    with acc.batch() as batch:
        answers = [getattr(batch, name)(*arrays, **options) for arrays in calls]
    assert batch.launches == launches
    for answer, arrays in zip(answers, calls, strict=True):
        _same(answer.result(), getattr(acc, name)(*arrays, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "relu", "sigmoid", "silu", "tanh", "add", "mul", "swiglu"])
def test_elementwise_calls_of_any_size_become_one_with_equal_bits(acc, name, dtype):
    count = 2 if name in ("add", "mul", "swiglu") else 1
    shapes = [(n,) for n in SIZES] if name != "swiglu" else [(n, 6) for n in SIZES]
    _equal_to_single_calls(acc, name, [tuple(torch.randn(s).to(dtype) for _ in range(count)) for s in shapes])


ROWS = {  # arguments of every call, and those that all calls share
    "softmax": (1, 0), "log_softmax": (1, 0), "layer_norm": (1, 2), "rms_norm": (1, 1), "add_layer_norm": (2, 2),
    "add_rms_norm": (2, 1), "quantize_int8": (1, 0), "add": (1, 1), "mul": (1, 1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_row_calls_become_one_with_equal_bits(acc, name, dtype):
    own, shared = ROWS[name]
    rest = [torch.randn(24).to(dtype) for _ in range(shared)]
    columns = zip(*[_rows(24, dtype) for _ in range(own)], strict=True)
    calls = [(*arrays, *rest) for arrays in columns]
    _equal_to_single_calls(acc, name, calls)
    other = [torch.randn(24).to(dtype) for _ in range(shared)]
    if shared:  # other weights are another launch
        _equal_to_single_calls(acc, name, [*calls, (*calls[0][:own], *other)], launches=2)


def test_calls_that_split_along_the_first_dimension_become_one(acc):
    image, weight = [torch.randn(n, 2, 6, 6) for n in (1, 2, 1)], torch.randn(3, 2, 3, 3)
    _equal_to_single_calls(acc, "max_pool2d", [(x,) for x in image], {"kernel_size": 2})
    _equal_to_single_calls(acc, "max_pool2d", [(x,) for x in image], {"kernel_size": 2, "return_indices": True})
    table = torch.randn(10, 4)
    _equal_to_single_calls(acc, "embedding", [(torch.randint(10, (n,)), table) for n in (1, 5, 2)])
    angles = torch.randn(5, 4), torch.randn(5, 4)
    _equal_to_single_calls(acc, "rope", [(torch.randn(n, 2, 5, 8), *angles) for n in (1, 3)])
    with acc.batch() as batch:
        answers = [batch.conv2d(x, weight, padding=1) for x in image]
    assert batch.launches == 1
    for answer, x in zip(answers, image, strict=True):
        torch.testing.assert_close(answer.result(), acc.conv2d(x, weight, padding=1))


def test_attention_of_equal_heads_becomes_one_call(acc):
    calls = [tuple(torch.randn(n, 2, 5, 8) for _ in range(3)) for n in (1, 2, 1)]
    other = tuple(torch.randn(1, 4, 5, 8) for _ in range(3))
    with acc.batch() as batch:
        answers = [batch.attention(*qkv, causal=True) for qkv in (*calls, other)]
    assert batch.launches == 2
    for answer, qkv in zip(answers, (*calls, other), strict=True):
        torch.testing.assert_close(answer.result(), acc.attention(*qkv, causal=True))


def test_exact_calls_become_one(acc):
    rng = np.random.default_rng(0)
    flat = [rng.integers(0, 2**62, 8, np.uint64) for _ in range(3)]
    with acc.batch() as batch:
        transforms = [batch.ntt(x) for x in flat]
        products = [batch.field_mul(x, x) for x in flat]
    assert batch.launches == 2
    for x, transform, product in zip(flat, transforms, products, strict=True):
        np.testing.assert_array_equal(transform.result(), acc.ntt(x))
        np.testing.assert_array_equal(product.result(), acc.field_mul(x, x))


def test_sums_over_the_same_points_become_one(acc):
    group = zk.curve("bn254_g1")
    points, others = (group.mul(group.generator, list(range(k, k + 3))) for k in (1, 9))
    rows = [[1, 2, 3], [0, 0, 5], [7, 7, 7]]
    with acc.batch() as batch:
        answers = [batch.msm(row, points) for row in rows]
        last = batch.msm(rows[0], others)
    assert batch.launches == 2
    for row, answer in zip(rows, answers, strict=True):
        np.testing.assert_array_equal(answer.result(), acc.msm(row, points))
    np.testing.assert_array_equal(last.result(), acc.msm(rows[0], others))


def test_kinds_dtypes_and_options_are_kept_apart(acc):
    x = torch.randn(5)
    with acc.batch() as batch:
        answers = [
            batch.relu(x), batch.relu(x.double()), batch.relu(x.numpy()), batch.relu([1.0, -1.0]),
            batch.add(x, 0.0), batch.add(x, -0.0), batch.add(x, 1), batch.softmax(x[None], axis=0),
        ]  # fmt: skip
    assert batch.launches == 7  # lists and NumPy arrays are one kind
    assert [type(a.result()).__name__ for a in answers] == ["Tensor", "Tensor", "ndarray", "ndarray", *["Tensor"] * 4]
    assert answers[1].result().dtype == torch.float64
    zero = torch.tensor([-0.0])
    with acc.batch() as batch:
        plus, minus = batch.add(zero, 0.0), batch.add(zero, -0.0)
    assert [torch.signbit(a.result()).item() for a in (plus, minus)] == [False, True]


def test_an_unmerged_call_and_layouts(acc):
    x = torch.randn(6, 4)
    with acc.batch() as batch:
        answers = [batch.relu(x.T), batch.relu(x[::2]), batch.relu(x.T)]
        columns = batch.softmax(x, 0)
        large = [batch.relu(torch.full((20_000,), -1.0)) for _ in range(2)]  # joining would cost more than it saves
    assert batch.launches == 4
    for answer, each in zip(answers, (x.T, x[::2], x.T), strict=True):
        assert torch.equal(answer.result(), each.relu())
    assert torch.equal(columns.result(), acc.softmax(x, 0))
    assert not any(a.result().any() for a in large)


def test_a_call_takes_the_results_of_earlier_ones(acc):
    x, w = torch.randn(3, 4), torch.randn(4)
    with acc.batch() as batch:
        first = [batch.relu(x + i) for i in range(3)]
        second = [batch.layer_norm(y, w) for y in first]
        third = batch.add(second[0], first[2])
        scaled = batch.rms_norm(x, batch.relu(w))
    assert batch.launches == 4  # relu, layer_norm, add and rms_norm
    normed = [acc.layer_norm(acc.relu(x + i), w) for i in range(3)]
    for answer, y in zip(second, normed, strict=True):
        assert torch.equal(answer.result(), y)
    assert torch.equal(third.result(), normed[0] + acc.relu(x + 2))
    assert torch.equal(scaled.result(), acc.rms_norm(x, acc.relu(w)))


def test_a_call_fails_whose_argument_failed(acc):
    x = torch.randn(3, 4)
    batch = acc.batch()
    bad = batch.layer_norm(x, x[:, 0])
    after = batch.relu(bad)
    pair = batch.add_rms_norm(x, x)
    taken = batch.relu(pair)
    good = batch.relu(x)
    with pytest.raises(ShapeError) as raised, batch:
        pass
    assert raised.value.__notes__ == [
        "raised by call 0 of the batch, layer_norm", "3 of the batch's 5 calls failed; this is the first"
    ]  # fmt: skip
    assert_raises(AccelerantError, "the result of call 0, layer_norm, which failed", after.result)
    assert_raises(ConfigError, "the result of call 2, add_rms_norm, which returns 2 arrays", taken.result)
    assert torch.equal(good.result(), x.relu())


def test_the_call_that_makes_a_group_fail_is_named_and_the_others_run(acc):
    values = [[1], [2], [2**64 - 1], [4]]
    batch = acc.batch()
    answers = [batch.field_add(v, [0]) for v in values]
    with pytest.raises(FormatError, match="not below the modulus") as raised, batch:
        pass
    assert raised.value.__notes__ == ["raised by call 2 of the batch, field_add"]
    assert [a.error is None for a in answers] == [True, True, False, True]
    assert answers[3].result().tolist() == [4]


def test_results_are_independent_of_each_other_and_may_change_in_place(acc):
    weight = torch.ones(4, requires_grad=True)
    with acc.batch() as batch:
        answers = [batch.relu(torch.ones(4)) for _ in range(3)]
    one, two, three = (a.result() for a in answers)
    one.mul_(weight)  # a view that autograd knew would refuse this
    two.zero_()
    assert one.requires_grad
    assert three.tolist() == [1.0] * 4
    assert answers[0].result() is one


def test_gradients_are_refused_by_a_sentence(acc):
    x, w = torch.randn(2, 3), torch.randn(3, requires_grad=True)
    batch = acc.batch()
    bad = [batch.rms_norm(x, w) for _ in range(2)]
    good = batch.relu(x)
    with pytest.raises(UnsupportedCase, match="rms_norm: a batch records no gradient, which an argument requires"):
        batch.__exit__(None, None, None)
    assert all(isinstance(a.error, UnsupportedCase) for a in bad)
    assert torch.equal(good.result(), x.relu())
    with torch.no_grad(), acc.batch() as batch:
        answer = batch.rms_norm(x, w)
    assert torch.equal(answer.result(), acc.rms_norm(x, w))


def test_a_batch_ends_once(acc):
    batch = acc.batch()
    answer = batch.relu([1.0])
    with pytest.raises(ZeroDivisionError), batch:
        raise ZeroDivisionError
    assert not answer.done()
    assert_raises(AccelerantError, "relu: its batch was left by an error before this call ran", answer.result)
    assert_raises(AccelerantError, "gelu: this batch has ended; make a new one", batch.gelu, [1.0])
    with acc.batch() as other:
        late = other.relu(answer)
        assert_raises(AccelerantError, "has not ended yet", late.result)
        other._calls.clear()


def test_a_batch_under_a_limit_runs_in_parts_that_give_the_same(acc):
    xs = [np.full(250, i, np.float32) for i in range(6)]
    with Accelerator("cpu", config=AcceleratorConfig(memory_limit_bytes=4000)) as limited:
        with limited.batch() as batch:
            answers = [batch.add(x, x) for x in xs]
        assert batch.launches == 6  # 2,000 bytes and as many to join them
        batch = limited.batch()
        batch.add(xs[0], xs[0])
        batch.relu(np.zeros(600, np.float32))
        with pytest.raises(OutOfMemory) as raised, batch:
            pass
    assert raised.value.__notes__ == ["raised by call 1 of the batch, relu"]
    assert [a.result()[0] for a in answers] == [2 * i for i in range(6)]


def test_a_recorded_call_costs_few_python_calls(acc):
    """The host's time is what a batch costs on a GPU: at most 6 calls of Python functions for a call."""
    xs = list(torch.randn(128, 16).unbind())
    count = [0]

    def traced(frame, event, argument):
        count[0] += event == "call"

    def calls_of(xs):
        count[0] = 0
        gc.disable()
        sys.setprofile(traced)
        try:
            with acc.batch() as batch:
                answers = [batch.relu(x) for x in xs]
            for answer in answers:
                answer.result()
        finally:
            sys.setprofile(None)
            gc.enable()
        return count[0]

    calls_of(xs)
    assert calls_of(xs) - calls_of(xs[:64]) <= 6 * 64


def test_every_elementwise_and_row_operation_merges():
    unmerged = {name for name, method in METHODS.items() if method.merge is None} - {"leaky_relu"}  # of tests/ops
    # draws, sums over a whole call, and sequences of one packed tensor
    losses = {"cross_entropy", "linear_cross_entropy", "mse_loss", "l1_loss"}
    losses |= {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
    assert unmerged == {"dropout", *losses, "attention_varlen", "attention_paged"}
    assert Batch.gelu is Accelerator.gelu


@pytest.mark.slow
def test_a_batch_on_a_device_without_tensors_merges_too():
    require_backend("opencl")
    xs = [np.linspace(-3, 3, n, dtype=np.float32) for n in (5, 64, 7)]
    with Accelerator("opencl", fallback=False) as acc:
        with acc.batch() as batch:
            answers = [batch.gelu(x) for x in xs]
        assert batch.launches == 1
        for answer, x in zip(answers, xs, strict=True):
            np.testing.assert_array_equal(answer.result(), acc.gelu(x))


@pytest.mark.gpu
def test_a_batch_on_a_gpu_has_the_bits_of_single_calls():
    """Its time beside torch's is a target of `accelerant bench runtime`: half, on a host with nothing else to do."""
    xs = list(torch.randn(256, 4096, device="cuda").unbind())
    with Accelerator("cuda") as acc:

        def batched():
            with acc.batch() as batch:
                answers = [batch.gelu(x) for x in xs]
            assert batch.launches == 1
            return [answer.result() for answer in answers]

        for y, x in zip(batched(), xs, strict=True):
            assert torch.equal(y, acc.gelu(x))
        for name in ("softmax", "rms_norm"):
            _equal_to_single_calls(acc, name, [(x[None],) for x in xs[:8]])
        with acc.batch() as batch:
            home = [batch.gelu(x.cpu().numpy()) for x in xs[:4]]
        assert batch.launches == 1
        np.testing.assert_array_equal(home[3].result(), acc.gelu(xs[3].cpu().numpy()))
