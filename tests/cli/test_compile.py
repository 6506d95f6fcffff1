"""accelerant compile: real NVRTC compiles, no device."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import accelerant
from accelerant.cli.cache import TEMPLATES
from accelerant.errors import ConfigError
from accelerant.runtime import registry
from accelerant.runtime.compilation.cuda import LIMITS, inspect_cuda, known_targets, occupancy, read_messages
from accelerant.runtime.compilation.kernel import CUDA_TARGETS, KernelSource
from requirements import require

pytest.importorskip("cuda.bindings", reason="cuda-bindings is for Linux and Windows")

FOLDER = Path(accelerant.__file__).parent / "templates"
VECTORS = Path(__file__).parents[1] / "vectors"
KERNEL = """\
template <typename T> __global__ void scale(T *x, T by) { x[threadIdx.x] *= by; }
template __global__ void scale<float>(float *, float);

extern "C" __global__ void __launch_bounds__(128, 2) reverse(float *x) {
    __shared__ float tile[100];
    int unused;
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[99 - threadIdx.x];
}
"""


@pytest.fixture
def accelerant_cli(command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return command_line


def report(accelerant_cli, *arguments):
    status, output, errors = accelerant_cli("compile", *arguments, "--json")
    assert errors == ""
    return status, json.loads(output)


def test_entry_points_are_found_and_described(accelerant_cli):
    Path("mine.cu").write_text(KERNEL)
    status, found = report(accelerant_cli, "mine.cu", "--arch", "sm_90")
    assert status == 0
    assert found["file"] == "mine.cu"
    (target,) = found["targets"]
    entries = {entry["name"]: entry for entry in target["entries"]}
    assert entries.keys() == {"void scale<float>(float*, float)", "reverse"}
    reverse, scale = entries["reverse"], entries["void scale<float>(float*, float)"]
    assert scale["symbol"].startswith("_Z5scale")
    assert (reverse["max_threads"], scale["max_threads"]) == (128, None)
    assert (reverse["shared_bytes"], scale["shared_bytes"]) == (400, 0)
    assert (reverse["barriers"], scale["barriers"]) == (1, 0)
    assert 0 < reverse["registers"] <= 64
    assert reverse["spill_bytes"] == reverse["stack_bytes"] == 0
    assert reverse["occupancy"]["threads"] == 128
    assert scale["occupancy"]["threads"] == 256
    (warning,) = target["messages"]
    assert (warning["severity"], warning["line"]) == ("warning", 6)
    assert '"unused"' in warning["text"]


def test_the_table_has_a_row_for_each_architecture_and_entry(accelerant_cli):
    Path("mine.cu").write_text(KERNEL)
    status, output, errors = accelerant_cli("compile", "mine.cu", "--arch", "sm_80", "--arch", "sm_90a")
    assert status == 0
    assert [line.split()[0] for line in output.splitlines()] == ["arch", "sm_80", "sm_80", "sm_90a", "sm_90a"]
    assert errors.count("mine.cu:6: warning") == 1  # once, not for each architecture


def test_block_and_shared_memory_change_the_occupancy(accelerant_cli):
    Path("mine.cu").write_text(KERNEL)
    _, plain = report(accelerant_cli, "mine.cu", "--arch", "sm_80")
    _, asked = report(accelerant_cli, "mine.cu", "--arch", "sm_80", "--block", 64, "--shared", 40000)
    fits = [found["targets"][0]["entries"][0]["occupancy"] for found in (plain, asked)]
    assert fits[0]["percent"] == 100.0
    assert (fits[1]["threads"], fits[1]["blocks"], fits[1]["limited_by"]) == (64, 4, "shared memory")


def test_options_reach_the_compiler(accelerant_cli):
    Path("mine.cu").write_text("template <typename T> __global__ void k(T *x) { x[0] = x[1] / x[2] + VALUE; }\n")
    common = ("compile", "mine.cu", "--arch", "sm_90", "--ptx", "--entry", "k<float>", "-D", "VALUE=x[3]*x[4]")
    status, precise, _ = accelerant_cli(*common, "--no-fmad")
    assert status == 0
    assert "div.rn.f32" in precise
    assert "fma.rn.f32" not in precise
    _, fast, _ = accelerant_cli(*common, "--fast-math", "--no-ftz", "-O1", "--nvrtc=--generate-line-info")
    assert "div.approx.f32" in fast
    assert ".loc" in fast
    _, found = report(
        accelerant_cli, "mine.cu", "--arch", "sm_90", "--entry", "k<float>", "-DVALUE", "--ptxas=--nonsense"
    )
    assert "Unknown option '-nonsense'" in found["targets"][0]["log"]


def test_host_code_is_listed_with_its_lines(accelerant_cli):
    Path("host.cu").write_text("__global__ void k() {}\nint main() { k<<<1, 1>>>(); cudaDeviceSynchronize(); }\n")
    status, _, errors = accelerant_cli("compile", "host.cu", "--arch", "sm_90")
    assert status == 1
    for what in ("int main()", "<<<", "cudaDeviceSynchronize"):
        assert f"host.cu:2: error: {what} is code for the host: take it out" in errors


PORTABLE = """ACL_KERNEL void divide(ACL_GLOBAL float *x) {
    x[acl_global_id()] = x[acl_global_id()] / VALUE;
}
"""


def test_portable_c_compiles_for_amd(accelerant_cli):
    if not any(map(shutil.which, ("amdclang", "clang", "clang-19"))):
        require("clang is not installed; scripts/ci-setup installs it from Debian")
    Path("mine.c").write_text(PORTABLE)
    common = ("mine.c", "--arch", "gfx90a", "-D", "VALUE=x[0]")
    status, found = report(accelerant_cli, *common)
    (target,) = found["targets"]
    (entry,) = target["entries"]
    assert (status, target["target"], entry["name"], entry["spill_bytes"]) == (0, "gfx90a", "divide", 0)
    assert 0 < entry["registers"] <= 16
    assert entry["occupancy"] is None
    _, precise, _ = accelerant_cli("compile", *common, "--ptx")
    _, fast, _ = accelerant_cli("compile", *common, "--ptx", "--fast-math")
    assert "v_div_fixup_f32" in precise
    assert "v_div_fixup_f32" not in fast
    status, _, errors = accelerant_cli("compile", "mine.c", "--arch", "gfx90a")
    assert status == 1
    assert errors.startswith("mine.c:2: error: use of undeclared identifier 'VALUE'\n")
    status, _, errors = accelerant_cli("compile", *common, "--prec-div", "--no-prec-sqrt")
    assert (status, errors) == (
        1,
        "mine.c: error: prec_div, prec_sqrt: for AMD they are one option; state them alike\n",
    )
    Path("mine.cu").write_text(KERNEL)
    assert accelerant_cli("compile", "mine.cu", "--arch", "gfx90a")[2].count("portable C is compiled (ACL_KERNEL)") == 1
    assert "does not compile for 'gfx9'" in accelerant_cli("compile", *common[:1], "--arch", "gfx9")[2]


def test_ptx_is_printed_alone(accelerant_cli):
    Path("mine.cu").write_text(KERNEL)
    status, output, _ = accelerant_cli("compile", "mine.cu", "--arch", "sm_90", "--ptx")
    assert status == 0
    assert output.startswith("//")
    assert ".entry reverse" in output
    assert ".target sm_90" in output


def test_all_are_the_architectures_that_our_ops_serve(accelerant_cli):
    Path("mine.cu").write_text('extern "C" __global__ void k() {}')
    _, found = report(accelerant_cli, "mine.cu", "--arch", "all")
    assert [target["target"] for target in found["targets"]] == list(CUDA_TARGETS)


def test_headers_of_cuda_and_of_the_file_are_found(accelerant_cli):
    Path("folder").mkdir()
    Path("folder/mine.h").write_text("#define FACTOR 3\n")
    Path("other").mkdir()
    Path("other/other.h").write_text("#define OFFSET 1\n")
    Path("folder/mine.cu").write_text(
        '#include <cuda_fp16.h>\n#include "mine.h"\n#include "other.h"\n'
        "__global__ void k(__half *x) { x[0] = __float2half(__half2float(x[0]) * FACTOR + OFFSET); }"
    )
    status, found = report(accelerant_cli, "folder/mine.cu", "--arch", "sm_90", "-I", "other")
    assert status == 0, found
    assert found["targets"][0]["entries"][0]["name"] == "k(__half*)"


def test_portable_kernels_compile_too(accelerant_cli):
    Path("mine.c").write_text("\nACL_KERNEL void twice(ACL_GLOBAL u64 *x) { x[acl_global_id()] *= 2; }")
    status, found = report(accelerant_cli, "mine.c", "--arch", "sm_90")
    assert status == 0
    assert found["targets"][0]["entries"][0]["name"] == "twice"
    Path("mine.c").write_text("\nACL_KERNEL void twice() { oops; }")
    status, _, errors = accelerant_cli("compile", "mine.c", "--arch", "sm_90")
    assert status == 1
    assert errors.startswith('mine.c:2: error: identifier "oops" is undefined\n')


def test_an_error_names_file_and_line_and_shows_it(accelerant_cli):
    Path("bad.cu").write_text("__global__ void k(float *x) {\n    x[0] = undeclared; // \x1b[31m\n}\n")
    status, output, errors = accelerant_cli("compile", "bad.cu")
    assert (status, output) == (1, "")
    lines = errors.splitlines()
    assert lines[0] == 'bad.cu:2: error: identifier "undeclared" is undefined'
    assert lines[1].strip() == r"x[0] = undeclared; // \x1b[31m"
    assert lines[2].index("^") == lines[1].index("undeclared")
    assert len(lines) == 3  # once, for all architectures
    status, found = report(accelerant_cli, "bad.cu", "--arch", "sm_90")
    assert status == 1
    assert (found["targets"][0]["compiled"], found["targets"][0]["messages"][0]["line"]) == (False, 2)


def test_an_error_of_one_architecture_leaves_the_others(accelerant_cli):
    Path("hopper.cu").write_text('__global__ void k() { asm volatile("wgmma.fence.sync.aligned;"); }')
    status, output, errors = accelerant_cli("compile", "hopper.cu", "--arch", "sm_80", "--arch", "sm_90a")
    assert status == 1
    assert errors.startswith("for sm_80: hopper.cu: error: Instruction 'wgmma.fence' not supported")
    assert [line.split()[0] for line in output.splitlines()] == ["arch", "sm_90a"]


def test_a_file_without_entry_points_says_so(accelerant_cli):
    Path("empty.cu").write_text("// nothing\n")
    status, _, errors = accelerant_cli("compile", "empty.cu", "--arch", "sm_90")
    assert status == 0
    assert "empty.cu: no entry point" in errors


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "name a file to compile"),
    (["absent.cu"], "no file absent.cu"),
    (["."], "cannot read .: Is a directory"),
    (["/dev/zero"], "/dev/zero has more than 64 MiB"),
    (["binary.cu"], "binary.cu is not text in UTF-8"),
    (["mine.cu", "--arch", "sm_1"], "unknown architecture 'sm_1'; known are all, sm_"),
    (["mine.cu", "--arch", "sm_75a"], "unknown architecture 'sm_75a'"),
    (["mine.cu", "--arch", "90"], "unknown architecture '90'"),
    (["mine.cu", "--block", "0"], "--block must be 1 to 1024 threads, got 0"),
    (["mine.cu", "--shared", "-1"], "--shared must be at least 0 bytes, got -1"),
    (["mine.cu", "--include", "nowhere"], "--include nowhere: no such folder"),
    (["mine.cu", "-O", "4"], "optimize must be 0, 1, 2 or 3, got 4"),
    (["mine.cu", "-D", "3D=1"], "defines: wanted the name of a macro, got '3D'"),
    (["mine.cu", "--arch", "sm_90", "--nvrtc", "--nonsense"], "refuses an option: nvrtc: error: unrecognized option"),
    (["mine.cu", "--out", "x.cu"], "--out goes with --template"),
    (["--template", "fft"], "unknown template 'fft'; known are matmul, relu, attention"),
    (["mine.cu", "--template", "relu"], "--template takes no file to compile, got mine.cu"),
    (["--template", "relu", "--out", "mine.cu"], "--out mine.cu: the file exists already"),
    (["--template", "relu", "--out", "nowhere/mine.cu"], "--out nowhere/mine.cu: No such file"),
])  # fmt: skip
def test_bad_input_is_one_line_and_status_2(accelerant_cli, arguments, message):
    Path("mine.cu").write_text(KERNEL)
    Path("binary.cu").write_bytes(b"\xff\xfe\x00")
    status, output, errors = accelerant_cli("compile", *arguments)
    assert (status, output) == (2, "")
    assert errors.startswith("accelerant: ")
    assert message in errors
    assert errors.count("\n") == 1


def test_an_architecture_that_the_compiler_refuses_is_a_config_error():
    with pytest.raises(ConfigError, match="sm_61"):
        inspect_cuda("", "sm_61", name="x.cu")
    assert "sm_90" in known_targets()


def test_messages_keep_their_words_and_drop_the_notes():
    log = (
        'a b.cu(3): error: no instance of overloaded function "g" matches the argument list\n'
        "            argument types are: (double *)\n"
        "  g(x);\n"
        "  ^\n"
        'a b.cu(2): note #3326-D: function "g(int *)" does not match\n'
        "  void g(int*){}\n"
        "       ^\n"
        "\n"
        "ptxas info    : 0 bytes gmem\n"
        "\0ptxas error   : Entry function 'k' uses too much shared data\n"
        "ptxas application ptx input, line 22; error   : Instruction 'wgmma.fence' not supported\n"
        "ptxas fatal   : Ptx assembly aborted due to errors\n"
    )
    found = read_messages(log, "a b.cu")
    assert [(each.line, each.text) for each in found] == [
        (3, 'no instance of overloaded function "g" matches the argument list argument types are: (double *)'),
        (None, "Entry function 'k' uses too much shared data"),
        (None, "Instruction 'wgmma.fence' not supported"),
    ]
    assert found[0].excerpt == "  g(x);\n  ^"


# --- occupancy -------------------------------------------------------------------------------------------------------
def test_occupancy_agrees_with_nvidias_calculator():
    rows = np.loadtxt(VECTORS / "occupancy.csv", int, delimiter=",", skiprows=1).tolist()
    for capability, threads, registers, shared, barriers, blocks in rows:
        fits = occupancy(f"sm_{capability}", threads, registers=registers, shared_bytes=shared, barriers=barriers)
        assert fits.blocks == blocks, (capability, threads, registers, shared, barriers, fits)
        assert fits.warps == blocks * -(-threads // 32)


def test_occupancy_says_what_binds_and_what_it_does_not_know():
    assert occupancy("sm_90a", 1024, registers=32).limited_by == "warps and registers"
    assert occupancy("sm_90", 32, registers=16).limited_by == "blocks"
    assert occupancy("sm_90", 128, registers=255).limited_by == "registers"
    assert occupancy("sm_90", 128, registers=16, shared_bytes=232448).blocks == 1
    assert occupancy("sm_90", 128, registers=16, shared_bytes=232449).blocks == 0
    assert occupancy("sm_90", 1025, registers=16).blocks == 0
    assert occupancy("sm_61", 128, registers=16) is None
    assert occupancy("gfx942", 128, registers=16) is None
    assert {f"sm_{number}" for number in LIMITS} >= set(CUDA_TARGETS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TEMPLATES)
def test_occupancy_agrees_with_the_driver(name):
    from cuda.bindings import driver

    provider = registry.create("cuda")
    kernel = provider.compile(KernelSource(name, {"cuda": template(name)}, {name: KINDS[name]}))
    (entry,) = inspect_cuda(template(name), kernel.target, name=name).entries
    for threads in (32, 96, 128, 256):
        _, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function_of(kernel), threads, 0)
        fits = occupancy(
            kernel.target,
            threads,
            registers=entry.resources.registers,
            shared_bytes=entry.resources.shared_bytes,
            barriers=entry.barriers,
        )
        assert fits.blocks == blocks, (threads, fits)


def function_of(kernel):
    from cuda.bindings import driver

    _, function = driver.cuKernelGetFunction(kernel.handle.function)
    return function


# --- templates -------------------------------------------------------------------------------------------------------
KINDS = {
    "relu": ("*f32", "*f32", "i64"),
    "matmul": ("*f32", "*f32", "*f32", "i32", "i32", "i32"),
    "attention": ("*f32", "*f32", "*f32", "*f32", "i32", "i32", "f32", "i32"),
}


def template(name):
    return (FOLDER / f"{name}.cu").read_text()


def test_every_template_is_offered():
    assert {path.stem for path in FOLDER.glob("*.cu")} == set(TEMPLATES) == KINDS.keys()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_types_of_a_template_are_found(name):
    assert tuple(each.kind for each in accelerant.kernel(FOLDER / f"{name}.cu").parameters) == KINDS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_compile_for_every_target_without_spills(name):
    for target in CUDA_TARGETS:
        found = inspect_cuda(template(name), target, name=f"{name}.cu")
        (entry,) = found.entries
        assert entry.name == name
        assert entry.resources.spill_bytes == entry.resources.stack_bytes == 0, (target, entry)
        assert entry.occupancy.blocks > 0
        assert found.warnings == ()


def test_a_template_is_written_and_compiles(accelerant_cli):
    status, output, _ = accelerant_cli("compile", "--template", "relu")
    assert (status, output) == (0, template("relu"))
    status, output, errors = accelerant_cli("compile", "--template", "relu", "--out", "mine.cu")
    assert (status, output) == (0, "")
    assert "accelerant compile mine.cu" in errors
    assert Path("mine.cu").read_text() == template("relu")


@pytest.fixture
def launch():
    """Launches a template on torch tensors, as its header says."""
    return lambda name, grid, block, *args: accelerant.kernel(FOLDER / f"{name}.cu", name)(grid, block, *args)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 3, 4, 1000, 1 << 20, (1 << 20) + 3])
@pytest.mark.parametrize("offset", [0, 1])
def test_relu_template(launch, n, offset):
    x = torch.randn(n + offset, device="cuda")
    x[-1] = float("nan")
    x = x[offset:]
    y = torch.empty(n + offset, device="cuda")[offset:]
    launch("relu", (min(-(-n // 1024), 4096),), (256,), x, y, n)
    torch.testing.assert_close(y, torch.relu(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 1, 1), (64, 64, 16), (65, 63, 17), (200, 333, 77), (512, 512, 512), (5, 7, 0)]
)
def test_matmul_template(launch, M, N, K):
    a, b = torch.randn(M, K, device="cuda"), torch.randn(K, N, device="cuda")
    c = torch.full((M, N), float("nan"), device="cuda")
    launch("matmul", (-(-N // 64), -(-M // 64)), (256,), a, b, c, M, N, K)
    expected = a.double() @ b.double()
    # Sums of K products of magnitude about 1 in float32: rounding grows with the square root of K.
    torch.testing.assert_close(c.double(), expected, rtol=0, atol=1e-6 * max(1, K))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("heads", "queries", "keys"), [(1, 1, 1), (2, 64, 32), (3, 65, 33), (2, 200, 200), (1, 130, 77)]
)
def test_attention_template(launch, heads, queries, keys, causal):
    q = torch.randn(heads, queries, 64, device="cuda")
    k, v = torch.randn(2, heads, keys, 64, device="cuda")
    q[0, 0] *= 30  # one query whose scores span a large range
    o = torch.full_like(q, float("nan"))
    launch("attention", (-(-queries // 64), heads), (256,), q, k, v, o, queries, keys, 0.125, int(causal))
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    # Scores reach some hundreds here, whose float32 rounding of 1e-5 stands in the exponent.
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=2e-4)


@pytest.mark.gpu
def test_attention_template_without_keys_gives_zeros(launch):
    q = torch.randn(1, 5, 64, device="cuda")
    o = torch.full_like(q, float("nan"))
    launch("attention", (1, 1), (256,), q, q, q, o, 5, 0, 0.125, 0)
    assert (o == 0).all()
