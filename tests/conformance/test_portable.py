"""One C text for CUDA, OpenCL and HIP: each portable kernel compiles unchanged on all, and runs right where it can."""

import dataclasses
import itertools
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.program import INVERSES, entries, field_add_source, kernel_source
from accelerant.errors import ConfigError, UnsupportedCase, UnsupportedDtype
from accelerant.ops.gelu import gelu_on, gelu_reference
from accelerant.ops.gelu import source as gelu_source
from accelerant.privacy.random import keystream_source
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import CUDA_TARGETS, portable_header
from accelerant.runtime.ledger import ledger
from refusals import assert_raises
from requirements import require, require_backend

SOURCES = {"field_add": field_add_source, "gelu": gelu_source}
REGISTERS = {"field_add": 16, "gelu_none": 24, "gelu_tanh": 24}
"""The most a thread may take: far below what would cost occupancy (32), near what the compilers use today (7 to 16)."""


@pytest.mark.parametrize("name", SOURCES)
def test_the_text_asks_for_no_compiler(name):
    """Whatever differs between the three stands in the header."""
    text = SOURCES[name]().dialects["portable"]
    assert "ACL_KERNEL" in text
    assert not re.search(r"#\s*if|#\s*el|defined|__\w+|get_global_id|threadIdx", text)


FIELD_REGISTERS = {1: 64, 4: 80, 6: 96}
"""The same for the kernels of a field, by its words: four, three and two blocks of 256 on an NVIDIA multiprocessor,
eight, six and five waves on an AMD one. The compilers use 50, 68 and 93 at most."""

QUICK = {("babybear", "field_unreduced"), ("bn254_fq", "field_mul_montgomery"), ("bn254_fq", "field_inv")}
"""Field and entry that are compiled in each run, for QUICK_TARGETS; the others are slow, and those for another NVIDIA
device soak."""
QUICK_TARGETS = ("sm_90", "gfx90a")


def targets_of(field, dialect):
    """All for what CUDA runs, once for each number of words; elsewhere one."""
    runs = (dialect == "cuda") == (field.limbs > 1)
    return CUDA_TARGETS if runs and field.name in ("goldilocks", "babybear", "bn254_fq", "bls12_381_fq") else ("sm_90",)


def kernels_of(fields, targets, dialect):
    """Each entry of each field as (target, dialect, field, entry)."""
    for field in fields:
        for target, entry in itertools.product(targets(field, dialect), entries(field)):
            quick = (field.name, entry) in QUICK
            marks = [[], [pytest.mark.slow], [pytest.mark.slow, pytest.mark.soak]][
                not quick if target in QUICK_TARGETS else 2
            ]
            values = (target, dialect, field, entry)
            name = "-".join((target, dialect, field.name, entry))
            yield pytest.param(*values, marks=marks, id=name)


BY_NVRTC = [
    *kernels_of(FIELDS.values(), targets_of, "portable"),
    *kernels_of([field for field in FIELDS.values() if field.limbs > 1], targets_of, "cuda"),
]
BY_CLANG = list(kernels_of(FIELDS.values(), lambda field, dialect: ("gfx90a",), "portable"))


def stack_of(field, entry):
    """The partial products of an inversion lie in the thread's memory; nothing else does."""
    return INVERSES * field.size_bytes if entry.startswith("field_inv") else 0


@pytest.mark.sample(3, 3)
@pytest.mark.parametrize("target", CUDA_TARGETS)
@pytest.mark.parametrize("name", SOURCES)
def test_nvrtc_compiles_it_for_each_target(name, target):
    pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")
    from accelerant.runtime.compilation.cuda import compile_cuda

    source = SOURCES[name]()
    assert target in source.targets
    assert source.pick(("cuda", "portable", "triton"))[0] == "portable"
    binary = compile_cuda(source, target)
    assert binary.code[:4] == b"\x7fELF"
    for entry in source.entries:
        resources = binary.resources[entry]
        assert 0 < resources.registers <= REGISTERS[entry]
        assert resources.spill_bytes == resources.stack_bytes == resources.shared_bytes == 0


@pytest.mark.sample(11, 3)
@pytest.mark.parametrize(("target", "dialect", "field", "entry"), BY_NVRTC)
def test_nvrtc_compiles_the_fields(target, dialect, field, entry):
    """In C and with carry chains: the second is what CUDA runs, the first what HIP and OpenCL do."""
    pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")
    from accelerant.runtime.compilation.cuda import compile_cuda

    source = kernel_source(field, entry)
    assert target in source.targets
    assert source.pick(("cuda", "portable", "triton"))[0] == ("cuda" if field.limbs > 1 else "portable")
    binary = compile_cuda(dataclasses.replace(source, dialects={dialect: source.dialects[dialect]}), target)
    resources = binary.resources[entry]
    assert 0 < resources.registers <= FIELD_REGISTERS[field.limbs]
    assert resources.spill_bytes == 0
    assert resources.stack_bytes <= stack_of(field, entry)


@pytest.mark.parametrize("name", SOURCES)
def test_clang_compiles_it_for_amd(name, tmp_path):
    source = SOURCES[name]()
    for entry, kernel in compiled_for_amd(source, tmp_path).items():
        assert 0 < int(kernel["vgpr_count"]) <= REGISTERS[entry]
        assert int(kernel["private_segment_fixed_size"]) == 0


@pytest.mark.sample(11, 3)
@pytest.mark.parametrize(("target", "dialect", "field", "entry"), BY_CLANG)
def test_clang_compiles_the_fields_for_amd(target, dialect, field, entry, tmp_path):
    ((_, kernel),) = compiled_for_amd(kernel_source(field, entry), tmp_path).items()
    assert 0 < int(kernel["vgpr_count"]) <= FIELD_REGISTERS[field.limbs]
    assert int(kernel["private_segment_fixed_size"]) <= stack_of(field, entry) + 16  # and the frame's own words


def compiled_for_amd(source, folder):
    """gfx90a (MI200), without any part of ROCm; the assembler's notes say what a thread takes: entry -> its notes."""
    clang = shutil.which("clang-19")
    if clang is None:
        require("clang-19 is not installed; scripts/ci-setup installs it from Debian")
    text, assembly, code = folder / "text.hip", folder / "text.s", folder / "text.o"
    text.write_text(f"{portable_header()}\n{source.dialects['portable']}")
    for_device = ["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "--offload-arch=gfx90a"]
    alone = ["-nogpuinc", "-nogpulib", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    run(clang, *for_device, *alone, "-O3", "-S", text, "-o", assembly)
    run(clang, "-x", "assembler", "--target=amdgcn-amd-amdhsa", "-mcpu=gfx90a", "-c", assembly, "-o", code)
    assert code.read_bytes()[:4] == b"\x7fELF"
    notes = assembly.read_text().partition("amdhsa.kernels:")[2]
    kernels = {kernel["name"]: kernel for kernel in map(facts, notes.split("  - .agpr_count:")[1:])}
    assert set(kernels) == set(source.entries)
    for kernel in kernels.values():
        assert int(kernel["vgpr_spill_count"]) == int(kernel["sgpr_spill_count"]) == 0
    return kernels


def run(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def facts(notes):
    """The kernel's own lines of its notes, not those of its arguments."""
    return dict(re.findall(r"^    \.(\w+): +(\S+)$", notes, re.MULTILINE))


# --- running ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def device(provider):
    if "portable" not in provider.dialects:
        pytest.skip(f"{provider.name} compiles no portable C")
    return provider.devices()[0]


@pytest.mark.sample(5)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(1,), (255,), (257,), (3, 5, 7), (100_003,)], ids=str)
def test_gelu_is_the_references(device, shape, approximate):
    x = (3 * np.random.default_rng(7).standard_normal(shape)).astype(np.float32)
    y = gelu_on(device, x, approximate)
    assert (y.shape, y.dtype) == (shape, np.float32)
    expected = gelu_reference(torch.from_numpy(x).double(), approximate)
    torch.testing.assert_close(torch.from_numpy(y).double(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_at_its_edges(device, approximate):
    """Where the error function's two polynomials meet, where it becomes 1, and where floats end."""
    root = np.sqrt(np.float32(2))
    seams = [sign * at * root * (1 + shift) for sign in (1, -1) for at in (1, 4) for shift in (-1e-7, 0, 1e-7)]
    ends = [0.0, -0.0, 1e-45, -1e-45, 1e-30, 12.0, -12.0, 88.0, -88.0, 1e30, -1e30, 3.4e38, np.inf, -np.inf, np.nan]
    x = np.array([*seams, *ends, *np.linspace(-6, 6, 20_001)], np.float32)
    y = gelu_on(device, x, approximate)
    expected = gelu_reference(torch.from_numpy(x).double(), approximate)
    torch.testing.assert_close(torch.from_numpy(y).double(), expected, rtol=2e-6, atol=1e-6, equal_nan=True)


def test_gelu_of_nothing_and_of_a_view(device):
    assert gelu_on(device, np.empty((0, 3), np.float32)).shape == (0, 3)
    x = np.arange(24, dtype=np.float32).reshape(4, 6) - 12
    np.testing.assert_array_equal(gelu_on(device, x[::2, ::-3]), gelu_on(device, x[::2, ::-3].copy()))


def test_gelu_enters_the_ledger(device):
    ledger().reset()
    gelu_on(device, np.ones((2, 8), np.float32), "tanh")
    (row,) = ledger().to_dict()["ops"]
    assert (row["op"], row["implementation"], row["backend"]) == ("gelu", "portable", device.backend)
    assert (row["case"], row["own"], row["calls"], row["bytes"]) == ("2x8 float32 tanh", True, 1, 128)


def test_gelu_refuses_what_it_does_not_take(device):
    assert_raises(UnsupportedDtype, "float64", gelu_on, device, np.ones(3))
    assert_raises(ConfigError, "'sigmoid'", gelu_on, device, np.ones(3, np.float32), "sigmoid")


def test_a_backend_without_portable_c_says_so(monkeypatch):
    monkeypatch.setattr(type(registry.create("cpu")), "dialects", ("llvm",))
    with pytest.raises(UnsupportedCase, match="the cpu backend compiles no portable C"):
        gelu_on(registry.find_device("cpu"), np.ones(3, np.float32))


def keystream(provider):
    """Words of ChaCha20: no barrier."""
    source = keystream_source()
    kernel = provider.compile(dataclasses.replace(source, dialects={"portable": source.dialects["portable"]}))
    state, first = (provider.copy_to_device(x) for x in (np.arange(10, dtype=np.uint32), np.array([7], np.uint64)))
    words = provider.copy_to_device(np.zeros(4090, np.uint32))
    provider.launch(kernel, (2,), (128,), (state, first, words, 4090, 1))
    return provider.copy_to_host(words, np.uint32, (4090,)).tolist()


def sums(provider):
    """Sums in a field, of chunks of 1,000: barriers and local memory."""
    source = kernel_source(FIELDS["goldilocks"], "field_sum")
    kernel = provider.compile(dataclasses.replace(source, dialects={"portable": source.dialects["portable"]}))
    x = provider.copy_to_device(np.arange(2**62, 2**62 + 5000, dtype=np.uint64))
    partial = provider.copy_to_device(np.zeros(5, np.uint64))
    provider.launch(kernel, (5,), (256,), (x, partial, 5000, 1000))
    return provider.copy_to_host(partial, np.uint64, (5,)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("run_on", [keystream, sums])
def test_the_c_compiler_of_the_cpu_gives_the_integers_of_opencl(run_on):
    """The fields' other functions: tests/algebra/field/test_field_kernels.py."""
    found = run_on(registry.create("cpu"))
    assert found == run_on(registry.create(require_backend("opencl")))
    if run_on is sums:
        p = FIELDS["goldilocks"].modulus
        assert found == [sum(range(2**62 + first, 2**62 + first + 1000)) % p for first in range(0, 5000, 1000)]
