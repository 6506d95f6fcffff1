"""The kernels, in Triton's interpreter where there is no GPU, against torch's functions in float64."""

import importlib.util
import json
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from clip_checks import MODES, Chain, check, loss_of
from torch import nn

from accelerant.ops._hopper import readable
from accelerant.privacy.dp.clipping import launch
from accelerant.privacy.dp.clipping.backward_pass import Rows
from accelerant.privacy.dp.clipping.launch import KINDS, launch_form, program, refuses
from accelerant.runtime.compilation.cuda import compile_cuda
from accelerant.runtime.dispatch import Case
from accelerant.runtime.ledger import ledger
from processes import printed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton has no wheel for this system"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encount:RuntimeWarning"),
]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(launch, "SPAN", 128)  # several programs for an example, and several steps in each
    monkeypatch.setattr(launch, "BLOCK", 32)
    ledger().reset()
    torch.manual_seed(0)


def served(op):
    """By what an op was served last."""
    return {row["op"]: row["implementation"] for row in ledger().to_dict()["ops"]}.get(op)


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.sample(3)
@dtypes
@pytest.mark.parametrize("shape", [(3, 7), (2, 128), (2, 5, 60), (1, 1), (4, 0), (0, 3)])
def test_squares(shape, dtype):
    x = drawn(*shape, dtype=dtype)
    expected = x.double().square().flatten(1).sum(1) if x.numel() else x.new_zeros(shape[0]).double()
    found = launch.squares(x)
    assert found.dtype == torch.float32
    assert served("clip_squares") == "triton"
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.sample(3)
@dtypes
@pytest.mark.parametrize("shape", [(3, 7), (9, 300), (17, 5, 13), (1, 1), (2, 0), (0, 3)])
def test_weighted_sum(shape, dtype):
    x, weights = drawn(*shape, dtype=dtype), torch.rand(shape[0], device=DEVICE)
    if shape[0] > 2:
        weights[1] = 0
        x[1] = float("nan")
    drop = weights == 0
    used = torch.nan_to_num(x.double()) * weights.double().view(-1, *[1] * (x.dim() - 1))
    found = launch.weighted_sum(x, weights, drop)
    assert found.dtype == torch.float32
    assert served("clip_sum") == "triton"
    torch.testing.assert_close(found.double(), used.sum(0), rtol=1e-6, atol=1e-6)
    into = drawn(*shape[1:])
    expected = into.double() + used.sum(0)
    assert launch.weighted_sum(x, weights, drop, into) is into
    torch.testing.assert_close(into.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.sample(3)
@dtypes
@pytest.mark.parametrize("shape", [(3, 7), (4, 6, 40), (1, 1), (2, 0)])
def test_scaled_and_cleared(shape, dtype):
    x, weights = drawn(*shape, dtype=dtype), torch.rand(shape[0], device=DEVICE)
    if shape[0] > 2:
        weights[1] = 0
        x[1] = float("inf")
    drop = weights == 0
    expected = torch.where(drop.view(-1, *[1] * (x.dim() - 1)), 0, x.float() * weights.view(-1, *[1] * (x.dim() - 1)))
    for out in (dtype, torch.float32):
        found = launch.scaled(x, weights, drop, out)
        # The interpreter cuts bfloat16 where a GPU rounds it.
        rounding = 1e-2 if out != torch.float32 else 1e-6
        torch.testing.assert_close(found.float(), expected.to(out).float(), rtol=rounding, atol=1e-7)
        assert served("clip_scale") == "triton"
    for shape in ((2, 3), (41, 5), (1, 70)):  # fewer and more spans than x has
        g = drawn(x.shape[0], *shape, dtype=x.dtype)
        g[drop] = float("nan")
        kept = g.clone()
        again, cleared = launch.factors(x, g, weights, drop, dtype, consumed=True)
        assert torch.equal(again, launch.scaled(x, weights, drop, dtype))
        assert cleared is g
        assert torch.equal(g[~drop], kept[~drop])
        assert int((g[drop] != 0).sum()) == 0
        assert served("clip_factors") == "triton"


@pytest.mark.sample(3)
@dtypes
@pytest.mark.parametrize(("B", "T", "K", "N"), [(2, 2, 3, 5), (3, 17, 70, 20), (2, 40, 33, 65), (1, 130, 8, 8)])
def test_ghost(B, T, K, N, dtype):
    a, g = drawn(B, T, K, dtype=dtype), drawn(B, T, N, dtype=dtype)
    expected = torch.bmm(g.double().mT, a.double()).square().sum((1, 2))
    squares, masses = launch.ghost_terms(a, g)
    torch.testing.assert_close(squares.sum(1).double(), expected, rtol=1e-5, atol=0)
    lengths = a.double().norm(dim=2) * g.double().norm(dim=2)
    torch.testing.assert_close(masses.sum(1).double(), lengths.sum(1), rtol=1e-5, atol=0)
    assert served("clip_ghost") == "triton"


def test_bound():
    squares, masses = drawn(5, 700).abs(), drawn(5, 9).abs()
    squares[1], masses[2], squares[3, 0], squares[4, 1] = -1.0, 1e6, float("nan"), float("inf")
    few, roundoff = (drawn(5, 1).abs(), drawn(5, 1).abs()), 1e-4 - 8 * 2.0**-24
    grams = [launch.Gram.of(squares, masses, (8, 20, 16), roundoff), launch.Gram.of(*few, (1, 20, 16), roundoff)]
    grams += [launch.Gram.of(squares * 2, masses, (8, 84, 16), roundoff)]
    S, m = squares.double().sum(1), masses.double().sum(1)

    def expected(S, width):
        norms = (S + (width + 64) * 2.0**-24 * m**2).clamp(min=0).sqrt() + 1e-4 * m
        return torch.maximum(norms, m / 64).square()

    alone = (few[1].double()[:, 0] * (1 + 100 * 2.0**-24 + roundoff + min(roundoff, 2.0**-24))).square()
    wanted = torch.stack([expected(S, 36), expected(2 * S, 100), alone], 1)
    found = launch.bounded(grams)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0, equal_nan=True)
    assert torch.isfinite(found[:, :2]).all(1).tolist() == [True, True, True, False, False]


@dtypes
def test_form(dtype):
    a, g = drawn(5, 6, 10, dtype=dtype), drawn(5, 6, 12, dtype=dtype)
    each, squares = launch.form(a, g)
    torch.testing.assert_close(each, torch.bmm(g.mT, a))
    torch.testing.assert_close(squares.sum(1).double(), each.double().square().sum((1, 2)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("norms", MODES)
@pytest.mark.skipif(DEVICE != "cpu", reason="models are compared on the CPU")
def test_a_model_by_the_kernels(norms):
    model = Chain(nn.Embedding(7, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    # The kernel's Gram products are in float32: a bound adds (K + N + 64) 2^-24 of the squared mass.
    tolerance = 2e-6 if norms == "instantiate" else 3e-5
    check(model, [torch.randint(7, (4, 5))], loss_of, norms=norms, dtype=torch.float32, tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_example_left_out_leaves_nothing(dtype):
    a, g = drawn(3, 4, 5, dtype=dtype), drawn(3, 4, 6, dtype=dtype)
    weights = torch.tensor([0.5, 0.0, 2.0], device=DEVICE)
    expected = torch.einsum("b,btn,btk->nk", weights.double(), g.double(), a.double())
    a[1, 0], g[1, 1] = float("nan"), float("inf")
    found = Rows(a, g).total(weights, weights == 0, torch.Size((6, 5)))
    rounding = 5e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=rounding)


_COMPILE = """
import json, re, subprocess, tempfile, pathlib, triton
from accelerant.privacy.dp.clipping.launch import KERNELS
wide = {"SPAN": 16384, "BLOCK": 2048}
cases = [
    ("squares", {"x_ptr": "*bf16", "parts_ptr": "*fp32", "P": "i32", "chunks": "i32"}, wide, 4),
    ("scale", {"x_ptr": "*bf16", "weights_ptr": "*fp32", "y_ptr": "*bf16", "g_ptr": "*bf16", "drop_ptr": "*u8",
               "P": "i32", "Q": "i32", "chunks": "i32"}, wide, 4),
    ("sum", {"x_ptr": "*bf16", "weights_ptr": "*fp32", "y_ptr": "*fp32", "B": "i32", "P": "i32"},
     {"ADDS": True, "BLOCK_P": 1024, "UNROLL": 8}, 4),
    ("ghost", {"a_ptr": "*bf16", "g_ptr": "*bf16", "parts_ptr": "*fp32", "masses_ptr": "*fp32", "T": "i32", "K": "i32",
               "N": "i32", "tiles": "i32"}, {"BLOCK_T": 128, "BLOCK_K": 64, "WIDEN": False}, 8),
    ("ghost", {"a_ptr": "*fp32", "g_ptr": "*fp32", "parts_ptr": "*fp32", "masses_ptr": "*fp32", "T": "i32", "K": "i32",
               "N": "i32", "tiles": "i32"}, {"BLOCK_T": 64, "BLOCK_K": 32, "WIDEN": False}, 4),
]
tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
for name, types, constants, warps in cases:
    binary = KERNELS[name].source(types, constants, num_warps=warps).dialects["triton"].build("sm_90")
    row = {"kernel": name, "bytes": len(binary.code), "shared": binary.metadata["shared_bytes"]}
    if tool.is_file():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.code); file.flush()
            text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True).stdout
        row["registers"], row["stack"] = (int(re.search(key + r":(\\d+)", text)[1]) for key in ("REG", "STACK"))
    print(json.dumps(row))
"""


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_spills():
    rows = [json.loads(line) for line in printed(_COMPILE).splitlines()]
    assert len(rows) == 5
    assert all(row.get("stack", 0) == 0 for row in rows), rows


# --- the Hopper kernel that forms gradients: its code without a GPU, its results on one ------------------------------
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


@pytest.mark.parametrize(("shape", "dtype", "why"), [
    ((0, 8, 8, 8), torch.bfloat16, "empty"),
    ((2, 0, 8, 8), torch.bfloat16, "empty"),
    ((2, 8, 12, 8), torch.bfloat16, "12 elements"),
    ((2, 8, 8, 50257), torch.float16, "50257 elements"),
    ((2, 8, 8, 8), torch.float32, "bfloat16 and float16, not float32"),
    ((2**20, 8, 1024, 1024), torch.bfloat16, "32 bits"),
])  # fmt: skip
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
