"""The kernel for Hopper that forms per-example gradients, and their norms: its code without a GPU, results on one."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from accelerant.ops._hopper.launch import readable
from accelerant.privacy.dp.clipping import launch
from accelerant.privacy.dp.clipping.launch import KINDS, launch_form, program, refuses
from accelerant.runtime.compilation.cuda import compile_cuda
from accelerant.runtime.dispatch import Case
from accelerant.runtime.ledger import ledger

pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


# --- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@HALF
@pytest.mark.sample(2)
def test_code_stays_in_its_budget_and_reads_both_operands_across_the_sum(dtype):
    text = program(dtype)
    binary = compile_cuda(text.source(KINDS), "sm_90a")
    resources = binary.resources["clip_form"]
    assert resources.spill_bytes == resources.stack_bytes == 0
    assert resources.registers == 168  # 65536 over 384 threads; 40 and 232 once shared out
    assert text.shared_bytes <= 227 * 1024
    # C7510 to C7514: the compiler waits for each wgmma; C7508: it ignores setmaxnreg.
    assert not re.search(r"C75\d\d", binary.log)
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.code)
        file.flush()
        text = subprocess.run([str(tool), "-sass", file.name], capture_output=True, text=True, check=True).stdout
    products = re.findall(r"HGMMA\.(\S+) R\d+, gdesc\[UR\d+\](\S*),", text)
    assert set(products) == {("64x192x16.F32" + ".BF16" * (dtype == torch.bfloat16), ".tnspA.tnspB")}
    assert text.count("UTMALDG.4D") == 2 + 3  # panels of 64 of g and a
    assert text.count("UTMASTG.4D") == 2 * 3
    assert text.count("USETMAXREG") == 2
    assert not re.search(r"\b(ATOM|ATOMG|RED)\b", text)  # the same bits each time


def case(shape, dtype=torch.bfloat16, device="cuda"):
    return Case(torch.device(device), dtype, shape)


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ((0, 8, 8, 8), torch.bfloat16, "empty"),
        ((2, 0, 8, 8), torch.bfloat16, "empty"),
        ((2, 8, 12, 8), torch.bfloat16, "12 elements"),
        ((2, 8, 8, 50257), torch.float16, "50257 elements"),
        ((2, 8, 8, 8), torch.float32, "bfloat16 and float16, not float32"),
        ((2**20, 8, 1024, 1024), torch.bfloat16, "32 bits"),
    ],
)
def test_refuses(shape, dtype, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert why in refuses(case(shape, dtype))
    assert refuses(case((2, 7, 8, 16))) is None
    assert "sm_90" in refuses(case(shape, dtype, "cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert "sm_90" in refuses(case((2, 7, 8, 16)))


def test_what_the_copy_engine_cannot_read_is_copied():
    x = torch.zeros(3, 5, 64, dtype=torch.bfloat16)
    wide = torch.zeros(3, 5, 4, 64, dtype=torch.bfloat16)
    for view in (x, wide[:, :, 1], x[:, 1:], x[:1].expand(1, 5, 64), x.transpose(0, 1)):
        assert readable(view) is view
    for view in (x[..., 1:9], x.mT, x[:1].expand(3, 5, 64), x[:, :, :60].contiguous()):
        copy = readable(view)
        assert copy is not view
        assert copy.is_contiguous()
        assert torch.equal(copy, view)


# --- results ---------------------------------------------------------------------------------------------------------

SHAPES = [  # B, T, N, K
    (1, 1, 8, 8),
    (3, 65, 200, 136),
    (2, 100, 768, 776),
    (5, 63, 64, 264),
    (7, 130, 128, 192),
    (150, 64, 256, 384),
    (3, 300, 1160, 72),
    (1, 4096, 2304, 768),
]


def whole(*shape, dtype=torch.bfloat16):
    return torch.randint(-2, 3, shape, device="cuda").to(dtype)


def check_norms(each, parts):
    expected = each.double().square().sum((1, 2))
    torch.testing.assert_close(parts.sum(1).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.gpu
@HALF
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_numbers_exactly(shape, dtype):
    B, T, N, K = shape
    a, g = whole(B, T, K, dtype=dtype), whole(B, T, N, dtype=dtype)
    each, parts = launch_form(a, g)
    assert torch.equal(each, torch.bmm(g.double().mT, a.double()).to(dtype))
    check_norms(each, parts)


@pytest.mark.gpu
@HALF
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(shape, dtype):
    B, T, N, K = shape
    a, g = (torch.randn(B, T, width, device="cuda").to(dtype) for width in (K, N))
    each, parts = launch_form(a, g)
    exact = torch.bmm(g.double().mT, a.double())
    step = torch.finfo(dtype).eps
    assert ((each.double() - exact).abs() <= step * exact.abs() + 1e-6 * T).all()
    check_norms(each, parts)


@pytest.mark.gpu
def test_layouts():
    wide, g = whole(3, 100, 3, 128), whole(3, 100, 72)
    across, shared = wide[:, :, 1].mT.contiguous().mT, wide[:1, :, 1].expand(3, 100, 128)  # both are copied
    for a in (wide[:, :, 1], wide[:, :, 1, :64], across, shared):
        each, parts = launch_form(a, g)
        assert torch.equal(each, torch.bmm(g.double().mT, a.double()).to(a.dtype))
        check_norms(each, parts)


@pytest.mark.gpu
def test_what_is_not_finite_stays_in_its_example():
    a, g = whole(6, 90, 64), whole(6, 90, 264)
    sound, _ = launch_form(a, g)
    a[1, 5, 7], g[4, 80, 3] = float("nan"), float("inf")
    each, squares = launch.form(a, g)
    assert torch.isfinite(squares.sum(1)).tolist() == [True, False, True, True, False, True]
    kept = [0, 2, 3, 5]
    assert torch.equal(each[kept], sound[kept])


@pytest.mark.gpu
def test_the_same_bits_each_time_and_the_op_reaches_it():
    a, g = torch.randn(9, 333, 768, device="cuda").bfloat16(), torch.randn(9, 333, 392, device="cuda").bfloat16()
    ledger().reset()
    first = launch.form(a, g)
    ran = {row["implementation"] for row in ledger().to_dict()["ops"] if row["op"] == "clip_form"}
    assert ran == {"hopper"}
    for _ in range(50):
        for one, other in zip(first, launch.form(a, g), strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
def test_streams_and_graphs():
    a, g = whole(4, 70, 128), whole(4, 70, 256)
    expected, _ = launch_form(a, g)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(10):
            assert torch.equal(launch_form(a, g)[0], expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, squares = launch.form(a, g)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    torch.testing.assert_close(squares.sum(1).double(), expected.double().square().sum((1, 2)), rtol=1e-5, atol=0)
