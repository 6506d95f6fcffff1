import importlib
import math
import sys
import timeit

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import compiled_into, counted, ran
from torch.utils.checkpoint import checkpoint

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops.dropout import GROUP, keep_reference, launch_llvm, refuses_llvm, threshold, torch_dropout
from accelerant.ops.dropout.llvm_kernels import DropoutKernel, MaskKernel
from accelerant.runtime.dispatch import force
from accelerant.runtime.dispatch.plan import Case

op = importlib.import_module("accelerant.ops.dropout")

# kat_vectors of Random123 1.09 (D. E. Shaw Research), philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, (2**32 - 1,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_reference_gives_the_known_answers(counter, key, expected):
    assert [
        int(word[0]) for word in op.philox_reference([np.array([word], np.uint64) for word in counter], key)
    ] == expected


def kept(y):
    return (y != 0).flatten().numpy()


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_mask_is_the_references(seed, interpreted):
    for n in (1, 511, 4 * GROUP - 1, 4 * GROUP, 4 * GROUP + 1, 9000):
        expected = keep_reference(n, 0.3, seed)
        assert (kept(ops.dropout(torch.ones(n), 0.3, seed=seed)) == expected).all()
        signed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
        assert (kept(torch_dropout(torch.ones(n), signed, 0.3)) == expected).all()
        assert (kept(ops.dropout(torch.ones(n), 0.3, seed=signed)) == expected).all()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    shape=st.lists(st.integers(0, 40), max_size=3),
    p=st.floats(0, 1, exclude_min=True, exclude_max=True),
    seed=st.integers(0, 2**64 - 1),
)
def test_mask_for_any_shape(shape, p, seed):
    x = torch.ones(shape)
    assert (kept(ops.dropout(x, p, seed=seed)) == keep_reference(x.numel(), p, seed)).all()


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.99])
def test_share_and_mean(p):
    n = 1 << 16
    y = ops.dropout(torch.ones(n), p, seed=7)
    spread = math.sqrt(p * (1 - p) / n)
    assert abs((y == 0).double().mean().item() - p) < 5 * spread
    assert abs(y.double().mean().item() - 1) < 5 * spread / (1 - p)


def test_seeds_and_places_are_independent():
    masks = [keep_reference(1 << 14, 0.5, seed).astype(float) * 2 - 1 for seed in (0, 1, 2**32)]
    for at, one in enumerate(masks):
        for other in [*masks[at + 1 :], np.roll(one, 1), np.roll(one, GROUP), np.roll(one, 4 * GROUP)]:
            assert abs((one * other).mean()) < 5 / math.sqrt(len(one))


def test_backward_has_the_mask_of_forward(interpreted):
    x = torch.randn(3, 1000, requires_grad=True)
    y = ops.dropout(x, 0.4)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad != 0, y != 0)
    assert x.grad.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert ran() == {"triton"}


def test_keeps_a_seed_and_no_mask(interpreted):
    y = ops.dropout(torch.randn(1000, requires_grad=True))  # torch 2.11 frees what it kept with y
    (kept_,) = y.grad_fn.saved_tensors
    assert (kept_.shape, kept_.dtype) == ((), torch.int64)


def test_torchs_generator_makes_it_reproducible(way):
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append([ops.dropout(torch.ones(100)) for _ in range(2)])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])
    assert not torch.equal(found[0][0], found[2][0])


def test_without_kernel_and_seed_it_is_torchs(uninterpreted, monkeypatch):
    monkeypatch.setattr(sys.modules["accelerant.ops.dropout"], "refuses_llvm", lambda case: "as on a GPU in float64")
    x = torch.randn(50, 3).t().requires_grad_()  # contiguous ones have torch's own gradient, see the next test
    torch.manual_seed(3)
    y = ops.dropout(x, 0.3)
    assert y.is_contiguous()
    torch.manual_seed(3)
    expected = torch.nn.functional.dropout(x.detach().contiguous(), 0.3)
    assert torch.equal(y, expected)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(dx, (y != 0) / 0.7)
    x.grad = None
    ops.dropout(x, 0.3).sum().backward()
    assert {row["op"] for row in counted()} >= {"dropout_native_fwd", "dropout_native_bwd"}


@pytest.mark.parametrize("n", [2049, 8192, 8193])
def test_a_reentrant_checkpoint_draws_one_mask(n, uninterpreted):
    x = torch.ones(n, requires_grad=True)
    y = checkpoint(lambda x: ops.dropout(x, 0.5), x, use_reentrant=True)
    y.sum().backward()
    assert torch.equal(x.grad, y)


@pytest.mark.parametrize("learns", [False, True])
def test_few_elements_on_a_cpu_are_torchs(learns, uninterpreted):
    most = 8192

    def found(call, n):
        x = torch.arange(1.0, n + 1).requires_grad_(learns)
        torch.manual_seed(6)
        y = call(x, 0.3)
        return (y, *torch.autograd.grad(y.sum(), x)) if learns else (y,)

    for one, other in zip(found(ops.dropout, most), found(torch.nn.functional.dropout, most), strict=True):
        assert torch.equal(one, other)
    assert [(row["op"], row["implementation"]) for row in counted()] == [
        ("dropout_native_fwd", "torch"),
        ("dropout_native_bwd", "torch"),
    ][: 1 + learns]
    found(ops.dropout, most + 1)
    with force(dropout_fwd="llvm"):
        found(ops.dropout, most)
    own = {row["op"] for row in counted() if row["implementation"] == "llvm"}
    assert own >= ({"dropout_masked_fwd", "dropout_fwd"} if learns else {"dropout_fwd"})


@pytest.mark.sample(5, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("n", [1, 7, 511, 513, 2047, 2048, 2049, 9001, 600_000])
def test_processors_kernel_has_torchs_bits(dtype, n):
    if reason := refuses_llvm(Case(torch.device("cpu"), dtype, (n,))):
        pytest.skip(reason)
    x = (torch.randn(n) * 3).to(dtype)
    x[n // 2], x[-1] = math.inf, math.nan
    for seed in (0, -5, 2**40 + 3):
        y, expected = (run(x, torch.tensor(seed), 0.3) for run in (launch_llvm, torch_dropout))
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


def test_processors_kernel_writes_inside_alone():
    for n in (1, 9, 600, 2049):
        memory = torch.full((n + 64,), 7.0)
        y = memory[32 : 32 + n]
        provider, compiled = op._compiled(DropoutKernel(torch.float32))
        args = (torch.ones(n), torch.tensor(3), y, n, threshold(0.5), 2.0)
        provider.launch(compiled, (-(-n // 2048) * 64,), (1,), args)
        assert (memory[:32] == 7).all()
        assert (memory[32 + n :] == 7).all()
        assert (y != 7).all()


def test_draws_and_differentiates_without_triton(uninterpreted):
    x = torch.randn(9000, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(4)
    y = ops.dropout(x, 0.3)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, (y != 0).double() * (1 / 0.7))
    torch.manual_seed(4)
    assert torch.equal(ops.dropout(x, 0.3), y)
    assert {row["op"] for row in counted()} == {"dropout_masked_fwd", "dropout_masked_bwd"}
    assert ran() == {"llvm"}


@pytest.mark.sample(5, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 7, 31, 33, 511, 2047, 2048, 2049, 9001, 600_000])
def test_mask_in_bits_gives_the_gradient_of_the_seed(dtype, n):
    if reason := refuses_llvm(Case(torch.device("cpu"), dtype, (n,))):
        pytest.skip(reason)
    x, dy, seed = torch.randn(n).to(dtype), (torch.randn(n) * 3).to(dtype), torch.tensor(2**40 + n)
    if n:
        dy[n // 2], dy[-1] = math.inf, math.nan
    y, mask = op.launch_llvm_masked(x, seed, 0.3)
    assert torch.equal(y, launch_llvm(x, seed, 0.3))
    dx = op.launch_llvm_backward(dy, seed, mask, 0.3)
    torch.testing.assert_close(dx, launch_llvm(dy, seed, 0.3), rtol=0, atol=0, equal_nan=True)
    _, expected = op.torch_masked(x, seed, 0.3)
    assert mask.shape == expected.shape
    bits, wanted = ((each[:, None] >> torch.arange(8)) & 1 for each in (mask, expected))
    assert torch.equal(bits.flatten()[:n], wanted.flatten()[:n])


def test_kernel_of_the_mask_writes_inside_alone():
    for n in (1, 31, 33, 600):
        memory = torch.full((n + 64,), 7.0)
        provider, compiled = op._compiled(MaskKernel(torch.float32))
        mask = torch.full((256,), 255, dtype=torch.uint8)
        provider.launch(compiled, (-(-n // 32),), (1,), (torch.ones(n), mask, memory[32 : 32 + n], n, 2.0))
        assert (memory[:32] == 7).all()
        assert (memory[32 + n :] == 7).all()
        assert (memory[32 : 32 + n] == 2).all()


def test_on_a_cpu_it_keeps_a_bit_an_element(uninterpreted):
    y = ops.dropout(torch.randn(16384, requires_grad=True))
    seed, mask = y.grad_fn.saved_tensors
    assert (seed.shape, mask.shape, mask.dtype) == ((), (2048,), torch.uint8)


def test_without_the_processors_kernel_the_mask_is_torchs(uninterpreted):
    x, seed = torch.randn(3000, requires_grad=True), 11
    y = ops.dropout(x, 0.4, seed=seed)
    (dx,) = torch.autograd.grad(y.sum(), x)
    with force(dropout_masked_fwd="torch", dropout_masked_bwd="torch"):
        again = ops.dropout(x, 0.4, seed=seed)
        assert torch.equal(again, y)
        assert torch.equal(torch.autograd.grad(again.sum(), x)[0], dx)


def test_twice_with_a_mask(uninterpreted):
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: ops.dropout(x, 0.4, seed=3), x)


@pytest.mark.slow
def test_is_no_slower_than_torchs_on_a_cpu(uninterpreted):
    """It takes about a tenth on AVX-512: twice torch's time would be a broken kernel, not a busy machine."""
    x = torch.randn(1 << 22)

    def least_s(call):
        call()
        return min(timeit.repeat(call, number=1, repeat=5))

    theirs = least_s(lambda: torch.nn.functional.dropout(x, 0.1))
    assert least_s(lambda: ops.dropout(x, 0.1, seed=3)) < 2 * theirs
    assert least_s(lambda: ops.dropout(x, 0.1)) < 2 * theirs


def test_layout_changes_nothing(interpreted):
    x = torch.randn(30, 40)
    expected = ops.dropout(x, seed=5)
    for same in (x.t().contiguous().t(), torch.stack([x, x], -1)[..., 0]):
        y = ops.dropout(same, seed=5)
        assert torch.equal(y, expected)
        assert y.is_contiguous()
    low = ops.dropout(x.bfloat16(), seed=5)
    assert torch.equal(low != 0, expected != 0)


def test_ends_of_p(interpreted):
    x = torch.randn(9)
    assert ops.dropout(x, 0.0) is x
    assert ops.dropout(x, training=False) is x
    assert not ops.dropout(x, 1.0).any()
    assert not ops.dropout(x, 1 - 1e-16 if 1 - 1e-16 < 1 else math.nextafter(1, 0), seed=1).isnan().any()
    leaf = x.clone().requires_grad_()
    ops.dropout(leaf, 1.0).sum().backward()
    assert not leaf.grad.any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_a_number_as_torch(value, interpreted):
    y = ops.dropout(torch.full((200,), value), seed=1)
    stays = torch.from_numpy(keep_reference(200, 0.5, 1))
    assert y[~stays].isnan().all()
    assert (y[stays].isnan() if math.isnan(value) else y[stays] == value).all()


def test_large_values_that_are_dropped_do_not_overflow(interpreted):
    x = torch.full((200,), 60000.0, dtype=torch.float16)
    stays = torch.from_numpy(keep_reference(200, 0.5, 1))
    for y in (ops.dropout(x, seed=1), torch_dropout(x, torch.tensor(1), 0.5)):
        assert (y[~stays] == 0).all()
        assert (y[stays] == math.inf).all()


def test_is_torchs_own_under_compile():
    assert compiled_into(lambda x: ops.dropout(x, 0.1), torch.randn(3)) == [torch.nn.functional.dropout]


def test_vmap_draws_as_torch_does():
    x = torch.ones(4, 100)
    y = torch.func.vmap(ops.dropout, randomness="different")(x)
    assert not torch.equal(y[0], y[1])


X = torch.ones(3)


@pytest.mark.parametrize(("x", "p", "seed", "error", "words"), [
    (X, -0.1, None, ConfigError, r"p must be in \[0, 1\], got -0.1"),
    (X, 1.1, None, ConfigError, r"p must be in \[0, 1\], got 1.1"),
    (X, math.nan, None, ConfigError, r"p must be in \[0, 1\], got nan"),
    (X, 0.5, -1, ConfigError, r"seed must be in \[0, 2\^64\), got -1"),
    (X, 0.5, 2**64, ConfigError, r"seed must be in \[0, 2\^64\), got 18446744073709551616"),
    (X, 0.5, torch.tensor(1, dtype=torch.int32), UnsupportedDtype, "the seed must be int64, got int32"),
    (X, 0.5, torch.tensor([1, 2]), ShapeError, r"the seed must be one number, got shape \(2,\)"),
    (X, 0.5, torch.tensor(1, device="meta"), ShapeError, "x and the seed must be on one device, got cpu and meta"),
    (X.long(), 0.5, None, UnsupportedDtype, r"dropout takes .*; x is int64"),
])  # fmt: skip
def test_refuses(x, p, seed, error, words):
    with pytest.raises(error, match=words):
        ops.dropout(x, p, seed=seed)


def test_seeded_is_the_same_without_triton(uninterpreted):
    assert (kept(ops.dropout(torch.ones(5000), 0.3, seed=9)) == keep_reference(5000, 0.3, 9)).all()
    assert ran() == {"llvm"}
