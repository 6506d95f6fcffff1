"""Hopper's kernel of linear_int8 for one row: compiled here within its budget, run on a GPU against float64."""

import importlib.util

import pytest
import torch

from accelerant.errors import LaunchError
from accelerant.ops import linear_int8
from accelerant.ops.linear_int8 import op
from accelerant.ops.linear_int8.op import linear_int8_reference
from accelerant.runtime.dispatch import Case, force
from accelerant.runtime.ledger import ledger

needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="no NVRTC on this system")


@pytest.mark.sample(5)
@needs_nvrtc
@pytest.mark.parametrize("plan", op.ROW_CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(4, 0), (2, 4), (4, 2)])
def test_compiles_without_spills(plan, dtype, sizes):
    binary = op.row_program(plan, dtype, *sizes).build("sm_90a")
    (used,) = binary.resources.values()
    assert used.spill_bytes == used.stack_bytes == 0
    assert used.registers * 32 * plan.warps <= 65536 // 4  # four blocks a multiprocessor
    assert binary.metadata["overlaps"] is True


@pytest.mark.sample(5)
@needs_nvrtc
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("gated", "bias_bytes"), [(True, 0), (False, 2), (False, 4)])
def test_products_of_planes_compile_without_spills(bits, dtype, gated, bias_bytes):
    binary = op.planes_program(bits, dtype, gated, not gated, bias_bytes, 2**15).build("sm_90a")
    (used,) = binary.resources.values()
    assert used.spill_bytes == used.stack_bytes == 0
    assert binary.metadata["overlaps"] is True


@needs_nvrtc
@pytest.mark.parametrize("columns", [16, 4096, op.MOST_COLUMNS])
def test_conversions_to_planes_compile_without_spills(columns):
    for program in (
        op.planes_program(4, torch.bfloat16, True, False, 0, 2**15, max(columns, 128), True),
        op.planes_program(8, torch.float16, False, True, 0, 2**15, columns),
        op.to_planes_program(torch.bfloat16, columns, True),
    ):
        binary = program.build("sm_90a")
        (used,) = binary.resources.values()
        assert used.spill_bytes == used.stack_bytes == 0
        assert binary.metadata["overlaps"] is True


@pytest.mark.parametrize("file", ["hopper.cu", "planes.cu"])
def test_reads_nothing_as_unchanging(file):
    """It may begin while the kernel before it still writes the weight: no load may be of the kind for constants."""
    planes = op.planes_program(4, torch.bfloat16, True, True, 4, 2**15, 4096, True)
    text = (planes if file == "planes.cu" else op.row_program(op.ROW_CONFIGS[0], torch.bfloat16, 4, 4)).text
    assert ".nc" not in text[text.index(f'#line 1 "{file}"') :].replace("Not ld.global.nc, which", "")
    assert "__restrict__" not in text[text.index(f'#line 1 "{file}"') :]


@pytest.mark.parametrize(("shape", "dtype", "options", "words"), [
    ((1, 64, 64), torch.bfloat16, (), "sm_90"),
    ((2, 64, 64), torch.bfloat16, (), "one row"),
    ((1, 64, 64), torch.float32, (), "bfloat16 and float16"),
    ((1, 64, 64), torch.bfloat16, ("dynamic",), "quantize x"),
    ((1, 64, 72), torch.bfloat16, (), "16-byte"),
    ((1, 64, 0), torch.bfloat16, (), "empty"),
    ((1, 64, 64), torch.bfloat16, ("", "", op.UNALIGNED), "x or weight does not begin"),
])  # fmt: skip
def test_says_what_it_cannot_do(shape, dtype, options, words, monkeypatch):
    device = "cpu" if words == "sm_90" else "cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert words in op.refuses_row(Case(torch.device(device), dtype, shape, options))


@pytest.mark.parametrize("which", ["x", "weight"])
def test_a_view_that_begins_anywhere_is_another_case(which):
    x, weight, scale = torch.randn(1, 32).bfloat16(), torch.ones(5, 32, dtype=torch.int8), torch.rand(5)
    expected = linear_int8(x, weight, scale)
    moved = {"x": x, "weight": weight}
    memory = torch.empty(moved[which].numel() + 1, dtype=moved[which].dtype)
    memory[1:] = moved[which].flatten()
    moved[which] = memory[1:].view(moved[which].shape)
    assert not op.is_aligned(**moved)
    assert torch.equal(linear_int8(**moved, scale=scale), expected)
    cases = [each["case"] for each in ledger().to_dict()["ops"] if each["op"] == "linear_int8_fwd"]
    assert sorted(cases) == ["1x5x32 bfloat16", "1x5x32 bfloat16 unaligned"]
    with pytest.raises(LaunchError, match="must be multiples of 16"):
        op.launch_hopper(moved["x"], moved["weight"], scale, None)
    assert op.is_aligned(torch.randn(32, 2).t()[1:], weight)  # copied before it is read


def test_weights_of_few_rows_take_a_row_a_warp(monkeypatch):
    monkeypatch.setattr(op, "multiprocessors", lambda device: 132)
    op.row_config.cache_clear()
    found = {N: op.row_config(N, torch.device("cuda", 0)) for N in (1, 4096, 8192, 14336)}
    op.row_config.cache_clear()
    assert found == {1: op.ROW_CONFIGS[1], 4096: op.ROW_CONFIGS[1], 8192: op.ROW_CONFIGS[0], 14336: op.ROW_CONFIGS[0]}


def drawn(N, K, dtype=torch.bfloat16):
    torch.manual_seed(N + K)
    x = torch.randn(1, K, device="cuda").to(dtype)
    weight = torch.randint(-128, 128, (N, K), device="cuda", dtype=torch.int8)
    return x, weight, torch.rand(N, device="cuda") / 100


def close(y, x, weight, scale, bias=None):
    wide = [None if each is None else each.double() for each in (x, scale, bias)]
    exact = linear_int8_reference(wide[0], weight, *wide[1:])
    relative = 8e-3 if y.dtype == torch.bfloat16 else 1e-3
    assert (y.double() - exact).abs().max() <= relative * exact.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("plan", op.ROW_CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("N", "K"), [(1, 16), (3, 48), (999, 1040), (1001, 4112), (8192, 8192), (4096, 14336), (5, 512)]
)
def test_matches_the_reference(plan, N, K, dtype):
    x, weight, scale = drawn(N, K, dtype)
    close(op.launch_hopper(x, weight, scale, None, plan=plan), x, weight, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_both_dtypes_of_scale_and_bias(scale_dtype, bias_dtype):
    x, weight, scale = drawn(1000, 4096)
    scale, bias = scale.to(scale_dtype), torch.randn(1000, device="cuda").to(bias_dtype)
    before = ledger().to_dict()["ops"]
    with force(linear_int8_fwd="hopper"):
        close(linear_int8(x, weight, scale, bias), x, weight, scale, bias)
    assert ledger().to_dict()["ops"] != before


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value):
    x, weight, scale = drawn(64, 512)
    x[0, 3] = value
    weight[:, 3] = 1
    assert not torch.isfinite(op.launch_hopper(x, weight, scale, None)).any()


@pytest.mark.gpu
def test_views_that_begin_anywhere():
    x, weight, scale = drawn(64, 512)
    memory = torch.empty(513, device="cuda", dtype=x.dtype)
    memory[1:] = x[0]
    close(linear_int8(memory[1:].view(1, 512), weight, scale), x, weight, scale)
    (ran,) = (each for each in ledger().to_dict()["ops"] if each["op"] == "linear_int8_fwd")
    assert ran["implementation"] == "triton"
    refused = {each["implementation"]: each["reason"] for each in ran["refused"]}
    assert refused["hopper"] == "x or weight does not begin on a 16-byte boundary"


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_waits_for_what_the_kernels_before_it_write(captured):
    """A chain where each call reads what the one before wrote, and the weight is written just before it is read."""
    N = 4096
    x, first, scale = drawn(N, N)
    sources = [torch.randint(-128, 128, (N, N), device="cuda", dtype=torch.int8) for _ in range(3)]
    weight, scale = torch.empty_like(first), scale * 0.02

    def chain():
        y = x
        for source in sources * 4:
            torch.add(source, 0, out=weight)  # by a kernel
            y = op.launch_hopper(y, weight, scale, None)
            y = op.launch_hopper(y, source, scale, None)
        return y

    expected = x
    for source in sources * 4:
        for _ in range(2):
            expected = op.launch_hopper(expected, source, scale, None)
            torch.cuda.synchronize()
    run = chain
    if captured:
        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = chain()

        def run():
            graph.replay()
            return made

    for _ in range(20):
        assert torch.equal(run(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [16, 48, 1152, 4096, 28672])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normed", [False, True])
def test_planes_represent_rows(K, dtype, normed):
    torch.manual_seed(K)
    x = (torch.randn(5, K, device="cuda") * torch.tensor([[1e-3], [1], [30], [0], [1]], device="cuda")).to(dtype)
    x[4, 3] = float("nan")
    gain = torch.rand(K, device="cuda").to(dtype) if normed else None
    planes, units = op.to_planes(x, gain, 1e-5)
    wide = x.double()
    exact = wide if gain is None else torch.rms_norm(wide, (K,), gain.double(), 1e-5)
    digits = planes.double() * torch.tensor([65536.0, 256.0, 1.0], device="cuda", dtype=torch.float64)[:, None]
    found = digits.sum(1) * units[:, None]
    assert ((found - exact).abs().amax(1) <= 5e-7 * exact.abs().amax(1))[:4].all()
    assert found[4].isnan().all()
    moved = torch.empty(K + 1, device="cuda", dtype=dtype)[1:].copy_(x[2])
    assert torch.equal(op.to_planes(moved[None], gain, 1e-5)[0], planes[2:3])


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("N", "K"), [(1, 128), (999, 1152), (6144, 4096), (5, 16), (999, 1040), (777, 28672)])
@pytest.mark.parametrize(("gated", "normed"), [(False, False), (True, True)])
def test_a_product_converts_its_row_to_the_same_planes(bits, N, K, gated, normed):
    torch.manual_seed(N)
    if bits == 4 and K % 128:
        K = 256
    rows = 2 * N if gated else N
    x, gain = torch.randn(1, K, device="cuda").bfloat16(), torch.rand(K, device="cuda").bfloat16() if normed else None
    weight = torch.randint(0, 256, (rows, K * bits // 8), device="cuda", dtype=torch.uint8)
    weight = weight if bits == 4 else weight.view(torch.int8)
    scale = torch.rand(rows, K // 128, device="cuda") if bits == 4 else torch.rand(rows, device="cuda")
    residual, bias = torch.randn(1, N, device="cuda").bfloat16(), torch.randn(rows, device="cuda")
    assert op.takes_row(x, gain, weight) or K > op.FEW_COLUMNS
    y = op.launch_row(x, gain, 1e-5, weight, scale, bias, residual, gated)
    planes, units = op.to_planes(x, gain, 1e-5)
    assert torch.equal(y, op.launch_planes_row(planes, units, weight, scale, bias, residual, x.dtype, gated))
