"""Attention's backward kernels for Hopper: their code without a GPU, their results on one."""

import functools
import re

import pytest
import torch
from hopper_cases import HALF, IDS, REFUSED, TAKEN, check_refusal, each_shape
from op_checks import disassembled

from accelerant.ops.attention import hopper_bwd
from accelerant.ops.attention.hopper_bwd import (
    KINDS,
    PARTS,
    HopperBwdConfig,
    Shares,
    launch_hopper,
    plan_for,
    program,
    refuses,
    shares_for,
)
from accelerant.runtime.compilation.cuda import compile_cuda

pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")

SUMS = ("added", "shared", "whole")
PLANS = [HopperBwdConfig(width, sums) for width in (64, 128) for sums in SUMS]
SPILLS = {64: 0, 128: 20}
"""Bytes by width. At 128 the thread that starts the copies keeps a few words in memory, outside of any inner loop."""


@functools.cache
def compiled(plan, dtype=torch.bfloat16, causal=True, part=PARTS[0]):
    return compile_cuda(program(plan, dtype, causal, part).source(KINDS), "sm_90a")


# --- code ------------------------------------------------------------------------------------------------------------
@pytest.mark.sample(11)
@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", HALF, **IDS)
@pytest.mark.parametrize("plan", PLANS, **IDS)
def test_code_stays_in_its_budget(plan, dtype, causal):
    binary = compiled(plan, dtype, causal)
    resources = binary.resources["attention_bwd"]
    assert resources.spill_bytes <= SPILLS[plan.width]
    assert resources.registers * 384 <= 65536
    assert 128 * (2 * plan.take + plan.give) <= resources.registers * 384
    assert binary.metadata["threads"] == 384
    assert binary.metadata["shared_bytes"] == plan.shared_bytes
    assert plan.shared_bytes <= 227 * 1024
    # C7510 to C7515: the compiler waits for each wgmma; C7508: it ignores setmaxnreg.
    assert not re.search(r"C75\d\d", binary.log)


@pytest.mark.sample(5)
@pytest.mark.parametrize("part", PARTS[1:])
@pytest.mark.parametrize("plan", PLANS, **IDS)
def test_small_kernels_do_not_spill(plan, part):
    resources = compiled(plan, torch.float16, True, part).resources[part]
    assert resources.spill_bytes == resources.stack_bytes == 0
    assert resources.registers <= 128


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, **IDS)
def test_products_are_wgmma_and_copies_go_through_the_copy_engine(plan):
    text = disassembled(compiled(plan).code)
    found = re.findall(r"HGMMA\.64x(\d+)x16\.F32\.BF16", text)
    steps = plan.width // 16
    tiles = plan.tile_q // 16
    assert len(found) == 2 * 2 * steps + 2 * tiles + 8  # S and dP twice (before and in the loop), dV, dK; dQ
    assert "UTMALDG.4D" in text
    assert "UBLKRED" in text
    assert ("UBLKCP.G.S" in text) is (plan.sums != "added")  # the first part of a sum is stored
    assert text.count("USETMAXREG") == 2
    assert text.count("R2UR") < 100  # descriptors are found by the uniform units


def test_variants():
    def variant(B, H, S, D, causal=True, deterministic=False):
        return plan_for((B, H, H, S, S, D), 132, causal, deterministic)

    assert variant(32, 12, 1024, 64) == HopperBwdConfig(64, "shared")  # 4 blocks a head, 33 heads at a time
    assert variant(16, 12, 2048, 64) == HopperBwdConfig(64, "shared")  # 8 blocks, 16 heads: 12 rounds of 128, as of 132
    assert variant(2, 8, 8192, 72) == HopperBwdConfig(128, "added")
    assert variant(1, 12, 4096, 64, causal=False) == HopperBwdConfig(64, "added")
    assert variant(4, 32, 1600, 64) == HopperBwdConfig(64, "added")  # 7 blocks, 18 heads at a time: 8 rounds for 7
    assert variant(2, 8, 8192, 64, deterministic=True) == HopperBwdConfig(64, "whole")
    assert variant(64, 12, 384, 64) == HopperBwdConfig(64, "whole")  # 768 heads fill 6 rounds of 132
    assert variant(64, 12, 512, 64) == HopperBwdConfig(64, "shared")  # but are too long for a block
    assert variant(1, 12, 512, 64) == HopperBwdConfig(64, "shared")  # 12 do not fill one
    assert plan_for((1, 1, 1, 9000, 9000, 64), 8, True, False) == HopperBwdConfig(64, "added")


def shares(shape, causal=True, plan=(64, "shared"), multiprocessors=132):
    return shares_for(HopperBwdConfig(*plan), shape, multiprocessors, causal)


def test_shares():
    # 12 rounds of 32 heads of 4 blocks; the 4 blocks over find 24 heads in a round, the rows kernel 32 and 88 more
    assert shares((32, 12, 12, 1024, 1024, 64)) == Shares(128, 4, 120)
    # 12 rounds of 16 heads of 8 blocks, 4 over
    assert shares((16, 12, 12, 2048, 2048, 64)) == Shares(128, 4, 16)
    # groups of 4 query heads
    assert shares((16, 48, 12, 2048, 2048, 64)) == Shares(128, 4, 64)
    # one round, rows of lse that are no multiple of 16 bytes, other plans: nobody helps
    assert shares((2, 12, 12, 1024, 1024, 64)) == Shares(96, 0, 24)
    assert shares((32, 12, 12, 1022, 1022, 64)) == Shares(132, 0, 384)
    assert shares((32, 12, 12, 1024, 1024, 128), plan=(128, "shared")) == Shares(132, 0, 384)
    assert shares((2, 12, 12, 8192, 8192, 64), plan=(64, "added")) == Shares(132, 0, 24)
    assert shares((64, 12, 12, 512, 512, 64), plan=(64, "whole")) == Shares(132, 0, 768)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("S", [4, 128, 132, 500, 1024, 1500, 2048])
def test_shares_fill_the_device_and_no_round_comes_too_early(S, causal):
    for heads in (1, 7, 33, 34, 100, 384, 1000):
        for count in (16, 78, 114, 132):
            grid, helpers, first = shares((heads, 2, 1, S, S, 64), causal, multiprocessors=count)
            chunks = -(-S // 128) if not causal else -(-S // 256)
            assert grid % chunks == 0
            assert 0 < grid <= grid + helpers <= count
            assert -(-heads // (grid // chunks)) == -(-heads // (count // chunks))  # as many rounds as ever
            assert first == 2 * heads if helpers == 0 else 2 * grid // chunks <= first < 2 * heads


@pytest.mark.parametrize(("shape", "causal", "why"), [*REFUSED, *TAKEN, ((1, 1, 1, 2**29, 2**29, 64), True, "32 bits")])
def test_refuses_and_takes(shape, causal, why, monkeypatch):
    check_refusal(refuses, shape, causal, why, monkeypatch)


# --- results ---------------------------------------------------------------------------------------------------------


def inputs(shape, dtype=torch.bfloat16):
    """Random do, q, k, v; heads inside rows, as a projection gives them."""
    B, Hq, Hkv, S, Skv, D = shape
    sizes = ((Hq, S), (Hq, S), (Hkv, Skv), (Hkv, Skv))
    return [torch.randn(B, s, h, D, dtype=dtype, device="cuda").transpose(1, 2) for h, s in sizes]


def expected(do, q, k, v, causal, scale):
    """By the formulas at the head of hopper_bwd.cu, in float64."""

    def rounded(x):
        return x.to(dtype).double()

    dtype = q.dtype
    do, q, k, v = (x.double() for x in (do, q, k, v))
    share = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(share, 1) for x in (k, v))
    scores = q @ wide_k.mT * scale
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp()
    o = p @ wide_v
    dp = do @ wide_v.mT

    def gradients(p, ds):
        dk, dv = (x.unflatten(1, (-1, share)).sum(2) for x in (ds.mT @ q * scale, p.mT @ do))
        return ds @ wide_k * scale, dk, dv

    exact = gradients(p, p * (dp - (do * o).sum(-1, keepdim=True)))
    ds = p * (dp - (do * rounded(o)).sum(-1, keepdim=True))
    return o, lse, exact, [rounded(x) for x in gradients(rounded(p), rounded(ds))]


def check(do, q, k, v, causal, scale=None, deterministic=False):
    """Ours is as near as the roundings that the formulas ask for allow. Returns the arguments and what was found."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, lse, wanted, allowed = expected(do, q, k, v, causal, scale)
    args = (do, q, k, v, o.to(q.dtype), lse.float(), causal, scale, deterministic)
    found = launch_hopper(*args)
    for x, ours, with_rounding, want in zip((q, k, v), found, allowed, wanted, strict=True):
        assert ours.dtype == x.dtype
        assert ours.shape == x.shape
        assert ours.stride() == torch.empty_like(x).stride()
        bar = 1.25 * (with_rounding - want).norm() + 1e-4 * (want.norm() + want.numel() ** 0.5)
        assert (ours.double() - want).norm() <= bar
    return args, found


@pytest.fixture(params=SUMS)
def each_plan(request, monkeypatch):
    """Every test with each way of summing dq."""
    monkeypatch.setattr(
        hopper_bwd, "plan_for", lambda shape, *_: HopperBwdConfig(64 if shape[-1] <= 64 else 128, request.param)
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("each_plan")
@pytest.mark.parametrize("dtype", HALF, **IDS)
@pytest.mark.parametrize(("shape", "causal"), each_shape(2100, (1, 3, 3, 1200, 70, 128)), **IDS)
def test_matches_the_reference(shape, causal, dtype):
    check(*inputs(shape, dtype), causal)


@pytest.mark.gpu
@pytest.mark.usefixtures("each_plan")
def test_more_heads_than_multiprocessors():
    check(*inputs((5, 60, 30, 270, 270, 64)), True)


HELPED = [  # more heads than run at a time, blocks left over
    ((5, 60, 30, 272, 272, 64), True),
    ((5, 60, 30, 272, 272, 64), False),
    ((10, 10, 5, 1000, 1000, 32), True),
    ((20, 2, 2, 900, 900, 8), True),
    ((13, 20, 20, 132, 1100, 64), False),
    ((7, 12, 12, 1024, 1024, 64), True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, **IDS)
@pytest.mark.parametrize(("shape", "causal"), HELPED, **IDS)
def test_helped_heads_have_the_same_bits(shape, causal, dtype, monkeypatch):
    plan, count = HopperBwdConfig(64, "shared"), torch.cuda.get_device_properties(0).multi_processor_count
    monkeypatch.setattr(hopper_bwd, "plan_for", lambda *_: plan)
    assert shares_for(plan, shape, count, causal).helpers > 0
    args, helped = check(*inputs(shape, dtype), causal)
    again = launch_hopper(*args)
    monkeypatch.setattr(hopper_bwd, "shares_for", lambda plan, shape, count, causal: _alone(shape, count, causal))
    hopper_bwd._launches.clear()
    alone = launch_hopper(*args)
    hopper_bwd._launches.clear()
    for x, y, z in zip(helped[1:], again[1:], alone[1:], strict=True):  # dq is summed in an order that changes
        assert torch.equal(x, y)
        assert torch.equal(x, z)
    assert (helped[0].double() - alone[0].double()).norm() <= 1e-4 * alone[0].double().norm()


def _alone(shape, count, causal):
    """Shares where nobody helps."""
    B, Hq, Hkv, _, Skv, _ = shape
    chunks = -(-Skv // (256 if causal else 128))
    grid = min(count, B * Hkv * chunks)
    return Shares(grid - grid % chunks, 0, B * Hq)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, -0.3, 3.0])
def test_scales(scale):
    check(*inputs((1, 2, 2, 200, 200, 64)), True, scale)


@pytest.mark.gpu
def test_layouts():
    qkv = torch.randn(2, 300, 4, 4, 64, dtype=torch.bfloat16, device="cuda")
    check(*(qkv[:, :, i].transpose(1, 2) for i in range(4)), True)
    check(*(qkv[:, :, i].transpose(1, 2).contiguous() for i in range(4)), True)
    odd = torch.randn(2, 4, 300, 65, dtype=torch.bfloat16, device="cuda")[..., 1:]
    check(odd, odd, odd, odd, True)
    one = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(2, 4, 300, 64)
    check(one, *(qkv[:, :, i].transpose(1, 2) for i in range(3)), True)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 12, 12, 1024, 1024, 64), (1, 4, 2, 777, 777, 128)], **IDS)
def test_repeats_agree(shape):
    args, first = check(*inputs(shape), True)
    for _ in range(50):
        for x, y in zip(first, launch_hopper(*args), strict=True):
            assert (x.double() - y.double()).norm() <= 1e-4 * x.double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 12, 12, 1024, 1024, 64), (1, 4, 2, 777, 777, 128)], **IDS)
def test_deterministic_repeats_have_the_same_bits(shape):
    args, first = check(*inputs(shape), True, deterministic=True)
    for _ in range(50):
        assert all(torch.equal(x, y) for x, y in zip(first, launch_hopper(*args), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False], ids=["whole", "shared"])
def test_on_streams_and_in_a_graph(deterministic):
    shape = (4, 12, 12, 512, 512, 64)
    assert plan_for(shape, 132, True, False).sums == "shared"
    args, first = check(*inputs(shape), True, deterministic=deterministic)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(launch_hopper(*args))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.append(launch_hopper(*args))
    graph.replay()
    torch.cuda.synchronize()
    for each in found:
        for x, y in zip(first, each, strict=True):
            assert torch.equal(x, y) or not deterministic
            assert (x.double() - y.double()).norm() <= 1e-4 * x.double().norm()


@pytest.mark.gpu
@pytest.mark.usefixtures("each_plan")
@pytest.mark.parametrize("batch", [4, 8])  # 8: with blocks that help
@pytest.mark.parametrize("branches", [1, 2])
def test_replays_follow_their_inputs(branches, batch):
    """A graph's counts and sums begin anew in each replay, also beside another backward in the same graph."""
    shape, scale = (batch, 12, 12, 512, 512, 64), 0.125

    def arguments(seed):
        torch.manual_seed(seed)
        do, q, k, v = inputs(shape)
        o, lse, wanted, _ = expected(do, q, k, v, True, scale)
        return [do, q, k, v, o.to(q.dtype), lse.float()], wanted

    held = [arguments(branch)[0] for branch in range(branches)]
    for args in held:
        launch_hopper(*args, True, scale)
    streams = [torch.cuda.Stream() for _ in held]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        begin = torch.cuda.current_stream()
        found = []
        for stream, args in zip(streams, held, strict=True):
            stream.wait_stream(begin)
            with torch.cuda.stream(stream):
                found.append(launch_hopper(*args, True, scale))
        for stream in streams:
            begin.wait_stream(stream)
    for replay in range(3):
        wants = []
        for branch, args in enumerate(held):
            new, wanted = arguments(10 + 10 * replay + branch)
            for to, x in zip(args, new, strict=True):
                to.copy_(x)
            wants.append(wanted)
        graph.replay()
        for args, gradients, wanted in zip(held, found, wants, strict=True):
            eager = launch_hopper(*args, True, scale)
            for x, y, want in zip(gradients, eager, wanted, strict=True):
                assert (x.double() - y.double()).norm() <= 1e-4 * y.double().norm()
                assert (x.double() - want).norm() <= 0.01 * want.norm()
