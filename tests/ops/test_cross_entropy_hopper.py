"""Hopper's kernel of cross_entropy: compiled here within its budget, run on a GPU against Triton's and float64."""

import importlib.util

import pytest
import torch
from op_checks import ran

from accelerant.errors import LaunchError
from accelerant.ops import cross_entropy, linear_cross_entropy
from accelerant.ops.cross_entropy import cross_entropy_reference, launch
from accelerant.runtime.dispatch import Case, force


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="no NVRTC on this system")
@pytest.mark.parametrize("plan", launch.SHARED_ROW_CONFIGS)
@pytest.mark.parametrize(("mean", "smooth", "alike"), [(True, False, True), (False, True, False)])
def test_compiles_within_its_budget(plan, mean, smooth, alike):
    binary = launch.shared_row_program(plan, plan.max_columns(), mean, smooth, alike).build("sm_90a")
    (used,) = binary.resources.values()
    assert used.registers <= 65536 // (plan.threads * plan.blocks)
    assert used.spill_bytes == used.stack_bytes == 0
    assert plan.blocks * (plan.shared_bytes(plan.max_columns()) + used.shared_bytes + 1024) <= 228 << 10


def test_says_what_it_cannot_do():
    case = Case(torch.device("cpu"), torch.bfloat16, (4, 50304), ("gradient",))
    assert "sm_90" in launch.refuses_shared_rows(case)


@pytest.mark.parametrize("N", [8192, 26900, 50304, 57400, 100000, 128256, 152064, 262144])
def test_longer_rows_leave_room_for_fewer_blocks(N):
    plan = launch.shared_row_config(N)
    before = launch.SHARED_ROW_CONFIGS[: launch.SHARED_ROW_CONFIGS.index(plan)]
    assert all(other.max_columns() < N for other in before)
    assert plan.max_columns() >= N


@pytest.mark.parametrize("plan", launch.SHARED_ROW_CONFIGS)
@pytest.mark.parametrize("lead", range(8))
def test_the_parts_of_a_row_fit_in_their_blocks(plan, lead):
    """As hopper.cu divides a row: each part in its block's shared memory, the last one up to the row's end."""
    for N in (launch.MIN_SHARED_COLUMNS, 50257, plan.max_columns() - 1, plan.max_columns()):
        groups, share = -(-(lead + N) // 8), -(-((N + 14) // 8) // plan.parts)
        assert share * plan.parts >= groups
        warps = plan.threads // 32
        for block in range(plan.cluster):
            first, last = min(block * warps * share, groups), min((block + 1) * warps * share, groups)
            assert 16 * (last - first) <= plan.shared_bytes(N)


def test_a_row_that_does_not_fit_has_no_plan():
    assert launch.shared_row_config(launch.SHARED_ROW_CONFIGS[-1].max_columns() + 1) is None


def test_a_device_without_room_for_clusters_says_so(monkeypatch):
    """A part of a device may have too few multiprocessors beside each other; a grid of no blocks says nothing."""
    monkeypatch.setattr(launch, "_shared_row_kernel", lambda *variant: None)
    monkeypatch.setattr(launch, "_max_clusters", lambda *variant: 0)
    x, targets = torch.zeros(2, 128256, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    out = torch.empty(3, 2)
    with pytest.raises(LaunchError, match="no room for clusters of 4 blocks, which hold 128256 columns"):
        launch.launch_shared_rows(
            x, 128256, targets, -100, 0.0,
            losses=out[0], statistics=out[1:], dx=torch.empty_like(x), dx_stride=128256, counts=None,
        )  # fmt: skip


def made(M, N, *, offset=0, seed=0, scale=2.0):
    """Logits that begin `offset` elements after a 16-byte boundary, and their classes, some of them ignored."""
    torch.manual_seed(seed)
    memory = torch.empty(M * N + offset, device="cuda", dtype=torch.bfloat16)
    x = memory[offset:].view(M, N)
    x.copy_(torch.randn(M, N, device="cuda") * scale)
    targets = torch.randint(0, N, (M,), device="cuda")
    targets[1 :: max(3, M // 4)] = -100
    return x, targets


def close_to_float64(x, targets, *, smoothing=0.0, reduction="mean"):
    leaf = x.detach().requires_grad_()
    with force(cross_entropy_fwd="hopper"):
        loss = cross_entropy(leaf, targets, label_smoothing=smoothing, reduction=reduction)
    loss.backward()
    exact = x.detach().double().requires_grad_()
    expected = cross_entropy_reference(exact, targets, label_smoothing=smoothing, reduction=reduction)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-2, atol=1e-2)
    largest = exact.grad.abs().max()
    assert (leaf.grad.double() - exact.grad).abs().max() <= 8e-3 * largest
    assert ran("cross_entropy_fwd") == {"hopper"}


@pytest.mark.gpu
@pytest.mark.parametrize("N", [8192, 9001, 16379, 16384, 50257, 50304, 57073, 100003, 128256, 151937, 262145])
@pytest.mark.parametrize("offset", [0, 3])
def test_matches_the_reference(N, offset):
    close_to_float64(*made(300, N, offset=offset))


@pytest.mark.gpu
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_smoothing_and_reductions(smoothing, reduction):
    close_to_float64(*made(131, 50257), smoothing=smoothing, reduction=reduction)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 2, 263, 1000])
def test_any_number_of_rows(M):
    close_to_float64(*made(M, 10000))


@pytest.mark.gpu
@pytest.mark.parametrize("plan", launch.SHARED_ROW_CONFIGS, ids=str)
def test_every_row_has_the_triton_kernels_results(plan):
    x, targets = made(500, 20001)
    targets[7], targets[11] = 20001, -1  # no classes
    x[13, 17], x[19, 23], x[29] = float("nan"), float("inf"), float("-inf")
    x[31] = -1e30
    counts = launch.count(targets, -100)
    found = []
    for kernel in (launch.launch_shared_rows, None):
        losses, statistics = (torch.full((n, 500), 7.0, device="cuda") for n in (1, 2))
        dx, stride = launch._aligned_gradient(x, x.stride(0))
        dx.fill_(7.0)
        if kernel:
            kernel(x, x.stride(0), targets, -100, 0.0, losses=losses[0], statistics=statistics, dx=dx,
                   dx_stride=stride, counts=counts, plan=plan)  # fmt: skip
        else:
            launch.launch_rows(x, x.stride(0), targets, -100, 0.0, losses=losses[0], statistics=statistics, dx=dx,
                               dx_stride=stride, counts=counts)  # fmt: skip
        found.append((losses[0], dx))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-6, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [50304, 128256])
def test_in_place_gives_the_same_bits(N):
    x, targets = made(400, N)
    leaf = x.clone().requires_grad_()
    cross_entropy(leaf, targets).backward()
    over = x.clone().requires_grad_()
    logits = over * 1.0
    cross_entropy(logits, targets, inplace_backward=True).backward()
    assert torch.equal(leaf.grad, over.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [16379, 50304, 128256])  # of 16379 columns rows differ in their number of groups
def test_same_bits_each_time(N):
    x, targets = made(700, N)
    first = None
    for _ in range(50):
        leaf = x.detach().requires_grad_()
        loss = cross_entropy(leaf, targets)
        loss.backward()
        first = first or (loss.detach(), leaf.grad)
        assert torch.equal(loss, first[0])
        assert torch.equal(leaf.grad, first[1])


@pytest.mark.gpu
def test_linear_cross_entropy_uses_it():
    torch.manual_seed(0)
    hidden = torch.randn(600, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(50257, 64, device="cuda", dtype=torch.bfloat16) / 8).requires_grad_()
    targets = torch.randint(0, 50257, (600,), device="cuda")
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(h @ w.t(), targets)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-2, atol=1e-2)
    for one, other in ((hidden.grad, h.grad), (weight.grad, w.grad)):
        assert (one.double() - other).norm() <= 1.2e-2 * other.norm()
