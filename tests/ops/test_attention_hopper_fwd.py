"""Attention's forward kernel for Hopper: its code without a GPU, its results on one."""

import ctypes
import functools
import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hopper_cases import HALF, IDS, REFUSED, TAKEN, check_refusal, each_shape
from op_checks import disassembled
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelerant.errors import LaunchError
from accelerant.ops.attention import attention_reference
from accelerant.ops.attention.hopper_fwd import KINDS, PLANS, launch_hopper, plan_for, program, refuses
from accelerant.runtime.compilation.cuda import compile_cuda
from accelerant.runtime.providers.cuda_launch import LoadedKernel

pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")


@functools.cache
def compiled(plan, dtype=torch.bfloat16, causal=True):
    return compile_cuda(program(plan, dtype, causal).source(KINDS), "sm_90a")


# --- code ------------------------------------------------------------------------------------------------------------
@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", HALF, **IDS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_code_stays_in_its_budget(plan, dtype, causal):
    binary = compiled(plan, dtype, causal)
    resources = binary.resources["attention_fwd"]
    assert resources.spill_bytes == 0
    assert resources.stack_bytes == 0
    threads = 128 * (plan.warpgroups + 1)
    assert resources.registers * threads <= 65536
    assert 128 * (plan.warpgroups * plan.take + plan.give) <= resources.registers * threads
    assert binary.metadata["threads"] == threads
    assert binary.metadata["shared_bytes"] == plan.shared_bytes
    assert plan.shared_bytes <= 227 * 1024
    # C7510 to C7514: the compiler waits for each wgmma; C7508: it ignores setmaxnreg.
    assert not re.search(r"C75\d\d", binary.log)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_products_are_wgmma_and_copies_go_through_the_copy_engine(plan):
    text = disassembled(compiled(plan).code)
    found = set(re.findall(r"HGMMA\.(64x\d+x16)\.F32\.BF16", text))
    assert found == {f"64x{plan.block_n}x16", f"64x{plan.width}x16"}
    assert "UTMALDG.4D" in text
    assert "UTMASTG.4D" in text
    assert text.count("USETMAXREG") == 2
    # Descriptors are found by the uniform units: the loops' states are the same for a warp, and the compiler knows.
    assert text.count("R2UR") < 100


@pytest.mark.parametrize(("shape", "causal", "why"), REFUSED + TAKEN)
def test_refuses_and_takes(shape, causal, why, monkeypatch):
    check_refusal(refuses, shape, causal, why, monkeypatch)


def test_variants_by_length():
    assert plan_for(1024, 64) is plan_for(65536, 40) is PLANS["64"]
    assert plan_for(1024, 128) is PLANS["128"]
    assert plan_for(8192, 72) is PLANS["128 long"]


def test_a_packed_launch_has_structs_and_numbers_in_place():
    pytest.importorskip("cuda.bindings")
    kernel = LoadedKernel("k", 7, ("struct", "*f32", "i32", "f32"), shared_bytes=99, threads=64)
    x = torch.zeros(3)
    packed = kernel.pack((1, 2, 3), (b"\1\2\3", x, -5, 0.5), 0)
    pointers = (ctypes.c_void_p * 4).from_address(packed._where.address)
    assert ctypes.string_at(pointers[0], 3) == b"\1\2\3"
    assert ctypes.c_uint64.from_address(pointers[1]).value == x.data_ptr()
    assert ctypes.c_int32.from_address(pointers[2]).value == -5
    assert ctypes.c_float.from_address(pointers[3]).value == 0.5
    assert packed._shape[1:] == (1, 2, 3, 64, 1, 1, 99)
    with pytest.raises(LaunchError, match=r"wanted i32, got 1\.5"):
        kernel.pack((1, 1, 1), (b"", x, 1.5, 0.5), 0)


# --- results ---------------------------------------------------------------------------------------------------------


def inputs(shape, dtype=torch.bfloat16, device="cuda"):
    """Random tensors; heads inside rows, as a projection gives them."""
    B, Hq, Hkv, S, Skv, D = shape
    sizes = ((Hq, S), (Hkv, Skv), (Hkv, Skv))
    return [torch.randn(B, s, h, D, dtype=dtype, device=device).transpose(1, 2) for h, s in sizes]


def check(q, k, v, causal, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    expected, lse = attention_reference(q.double(), k.double(), v.double(), causal=causal, scale=scale, return_lse=True)
    share = q.shape[1] // k.shape[1]
    k_, v_ = (x.repeat_interleave(share, 1) for x in (k, v))
    with nullcontext() if scale > 0 else sdpa_kernel(SDPBackend.MATH):  # torch's fused kernels give NaN there
        theirs = F.scaled_dot_product_attention(q, k_, v_, is_causal=causal, scale=scale)
    found, found_lse = launch_hopper(q, k, v, causal, scale)
    assert found.dtype == q.dtype
    assert found.stride() == torch.empty_like(q).stride()
    size = expected.norm()
    bar = 2 * (theirs.double() - expected).norm() + 1e-4 * size
    assert (found.double() - expected).norm() <= bar
    assert (found_lse.double() - lse).abs().max() <= 1e-5 * (1 + lse.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, **IDS)
@pytest.mark.parametrize(("shape", "causal"), each_shape(4100, (1, 3, 3, 4200, 70, 128)), **IDS)
def test_matches_the_reference(shape, causal, dtype):
    check(*inputs(shape, dtype), causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, **IDS)
@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_grow_along_the_keys_or_against_them(causal, dtype):
    q, k, v = inputs((2, 4, 2, 512, 512, 64), dtype)
    for part in (slice(0, 256), slice(256, 512)):  # found where a row's reference must be raised, by more than 2^64 too
        for factor in (4, 100):
            grown = k.clone()
            grown[:, :, part] *= factor
            check(q, grown, v, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, -0.3, 3.0])
def test_scales(scale):
    check(*inputs((1, 2, 2, 200, 200, 64)), True, scale)


@pytest.mark.gpu
def test_layouts():
    qkv = torch.randn(2, 300, 3, 4, 64, dtype=torch.bfloat16, device="cuda")
    check(*(qkv[:, :, i].transpose(1, 2) for i in range(3)), True)
    check(*(qkv[:, :, i].transpose(1, 2).contiguous() for i in range(3)), True)
    odd = torch.randn(2, 4, 300, 65, dtype=torch.bfloat16, device="cuda")[..., 1:]
    check(odd, odd, odd, True)
    wide = torch.randn(2, 1, 300, 64, dtype=torch.bfloat16, device="cuda").expand(2, 4, 300, 64)
    check(qkv[:, :, 0].transpose(1, 2), wide, wide, True)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_what_torch_lets_them_reach(where, bad):
    tensors = dict(zip("qkv", inputs((1, 2, 2, 200, 200, 64)), strict=True))
    tensors[where][0, 1, 90, 3] = bad
    q, k, v = tensors.values()
    expected = attention_reference(q.double(), k.double(), v.double(), causal=True)
    found, _ = launch_hopper(q, k, v, True, 0.125)
    assert torch.equal(found[0, 1, 90:].isfinite(), expected[0, 1, 90:].isfinite())
    rest = found.isfinite()
    if where == "v":  # a weight of 0 times it: in torch and here NaN for rows before it too, in that column
        rest[0, 1, :, 3] = True
    rest[0, 1, 90:] = True
    assert rest.all()


@pytest.mark.gpu
def test_the_same_bits_each_time_on_streams_and_in_a_graph():
    q, k, v = inputs((4, 12, 12, 1024, 1024, 64))
    expected = launch_hopper(q, k, v, True, 0.125)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(launch_hopper(q, k, v, True, 0.125))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [launch_hopper(q, k, v, True, 0.125) for _ in range(2)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for o, lse in (*found, *captured):
        assert torch.equal(o, expected[0])
        assert torch.equal(lse, expected[1])
