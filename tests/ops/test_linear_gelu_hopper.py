"""linear_gelu's forward kernel for Hopper: its code without a GPU, its results on one."""

import functools
import re

import pytest
import torch
from hopper_cases import HALF, IDS
from op_checks import disassembled, ran
from torch.nn import functional

from accelerant import ops
from accelerant.ops._hopper import refuses_product
from accelerant.ops.linear_gelu import CUDA_KINDS, CUDA_PLANS, cuda_plan, cuda_program, launch_hopper
from accelerant.runtime.compilation.cuda import compile_cuda
from accelerant.runtime.dispatch import Case, force
from accelerant.runtime.ledger import ledger

pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")

EACH_PLAN = pytest.mark.parametrize("plan", CUDA_PLANS, ids=str)


@functools.cache
def compiled(plan, dtype=torch.bfloat16, tanh=True, keep=False):
    return compile_cuda(cuda_program(plan, dtype, tanh, keep).source(CUDA_KINDS), "sm_90a")


# --- code ------------------------------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tanh", "keep"), [
    (torch.bfloat16, True, False), (torch.bfloat16, True, True), (torch.bfloat16, False, True),
    (torch.float16, True, False), (torch.float16, False, True),
], **IDS)  # fmt: skip
@EACH_PLAN
def test_code_stays_in_its_budget(plan, dtype, tanh, keep):
    binary = compiled(plan, dtype, tanh, keep)
    resources = binary.resources["linear_gelu"]
    assert resources.spill_bytes == resources.stack_bytes == 0
    assert resources.registers == 168  # 65536 over 384 threads; 40 and 232 once shared out
    assert plan.shared_bytes <= 227 * 1024
    # C7510 to C7514: the compiler waits for each wgmma; C7508: it ignores setmaxnreg.
    assert not re.search(r"C75\d\d", binary.log)


@pytest.mark.slow
@EACH_PLAN
def test_products_are_wgmma_and_copies_go_through_the_copy_engine(plan):
    text = disassembled(compiled(plan).code)
    assert set(re.findall(r"HGMMA\.(64x\d+x16)\.F32\.BF16", text)) == {f"64x{plan.width}x16"}
    assert "UTMALDG.4D" in text
    assert "UTMASTG.4D" in text
    assert text.count("USETMAXREG") == 2
    assert text.count("R2UR") < 60  # descriptors are found by the uniform units


def case(shape, dtype=torch.bfloat16, device="cuda"):
    return Case(torch.device(device), dtype, shape, ("tanh", "bias", ""))


@pytest.mark.parametrize(("shape", "dtype", "why"), [
    ((0, 8, 8), torch.bfloat16, "empty"), ((8, 12, 8), torch.bfloat16, "12 elements"),
    ((8, 8, 20), torch.bfloat16, "20 elements"), ((8, 8, 8), torch.float32, "not float32"),
])  # fmt: skip
def test_refuses(shape, dtype, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert why in refuses_product(case(shape, dtype))
    assert refuses_product(case((8, 8, 8))) is None
    assert "sm_90" in refuses_product(case(shape, dtype, "cpu"))


def test_refuses_other_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert "sm_90" in refuses_product(case((8, 8, 8)))


@pytest.mark.parametrize(
    ("M", "N", "width"),
    [(8192, 4096, 128), (16384, 3072, 192), (128, 128, 128), (4096, 192, 128), (128, 24 * 1024, 192)],
)
def test_tiles_by_what_they_waste(M, N, width):
    assert cuda_plan(M, N, 132).width == width


# --- results ---------------------------------------------------------------------------------------------------------
SHAPES = [  # M, N, K
    (1, 8, 8),
    (3, 4096, 64),
    (257, 264, 200),
    (1000, 1032, 520),
    (130, 72, 4096),
    (4097, 3072, 768),
]


def drawn(M, N, K, dtype=torch.bfloat16):
    x, bias = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((M, K), (N,)))
    return x, (torch.randn(N, K, device="cuda") * K**-0.5).to(dtype), bias


def check(x, weight, bias, approximate="tanh", keep=True, plan=None):
    z64 = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    expected = functional.gelu(z64, approximate=approximate)
    y, z = launch_hopper(x, weight, bias, approximate, keep, plan)
    step = torch.finfo(x.dtype).eps
    for found, exact in ((y, expected), *([(z, z64)] if keep else [])):
        assert found.shape == exact.shape
        assert found.dtype == x.dtype
        assert ((found.double() - exact).abs() <= step * exact.abs() + 2e-4).all()
    assert keep or not z.numel()
    return y, z


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", HALF, **IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@EACH_PLAN
def test_matches_float64(plan, shape, dtype, approximate):
    x, weight, bias = drawn(*shape, dtype)
    for b in (bias, None):
        for keep in (True, False):
            check(x, weight, b, approximate, keep, plan)


@pytest.mark.gpu
def test_layouts():
    wide = torch.randn(300, 3, 128, device="cuda").bfloat16()
    _, weight, bias = drawn(1, 256, 128)
    check(wide[:, 1], weight, bias)
    check(wide[:, 1].t().contiguous().t(), weight, bias)  # copied
    check(wide[:, 1, :64], weight[:, 32:96], bias)
    check(wide[:1, 1].expand(300, 128), weight, bias)
    check(wide[:, 1], weight, torch.randn(257, device="cuda").bfloat16()[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_large_and_not_finite(approximate):
    x, weight, _ = drawn(200, 64, 64)
    x[3, 5], x[70, 0], x[71, 0] = float("nan"), 1e30, -1e30
    x[90, 2] = float("inf")
    y, z = launch_hopper(x, weight, None, approximate)
    expected = functional.gelu(z.float(), approximate=approximate)
    assert torch.equal(y.isnan(), expected.isnan())
    sound = ~expected.isnan()
    torch.testing.assert_close(y.float()[sound], expected[sound], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@EACH_PLAN
def test_the_same_bits_each_time(plan):
    x, weight, bias = drawn(3001, 2056, 520)
    y, z = launch_hopper(x, weight, bias, "tanh", True, plan)
    for _ in range(50):
        again = launch_hopper(x, weight, bias, "tanh", True, plan)
        assert torch.equal(again[0], y)
        assert torch.equal(again[1], z)


@pytest.mark.gpu
def test_streams_and_graphs():
    x, weight, bias = drawn(1030, 512, 256)
    expected, _ = launch_hopper(x, weight, bias, "tanh", False)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(10):
            assert torch.equal(launch_hopper(x, weight, bias, "tanh", False)[0], expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = launch_hopper(x, weight, bias, "tanh", False)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


@pytest.mark.gpu
def test_the_op_reaches_it():
    x, weight, bias = drawn(512, 256, 128)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    ledger().reset()
    with force(linear_gelu_fwd="hopper"):
        ops.linear_gelu(*leaves, approximate="tanh").sum().backward()
    assert ran("linear_gelu_fwd") == {"hopper"}
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    functional.gelu(functional.linear(*exact), approximate="tanh").sum().backward()
    for leaf, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=3e-2, atol=3e-2 * other.grad.abs().max().item())
