"""AMD without a GPU: hiprtc compiles the portable kernels, and HIP refuses to load them."""

import subprocess

import pytest

from accelerant.algebra.bigint import kernel_source as bigint_source
from accelerant.algebra.curve.launch import kernel_source as curve_source
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.field.parameters import field_of
from accelerant.algebra.field.program import kernel_source as field_source
from accelerant.algebra.msm import device_plan as msm
from accelerant.algebra.ntt.rns import rns_source
from accelerant.errors import CompileError
from accelerant.privacy.random import keystream_source
from accelerant.runtime.compilation.cuda import compile_hip, hip_key, hiprtc_version
from accelerant.runtime.compilation.kernel import CompileOptions, KernelSource
from accelerant.runtime.host import python_child
from accelerant.runtime.provider import self_test_source
from requirements import require

TARGET = "gfx90a"
CURVE = curve_of("bn254_g1")
SOURCES = {
    "keystream": keystream_source,
    "msm_sort": msm.sort_source,
    "rns_forward": lambda: rns_source("forward"),
    "field_mul": lambda: field_source(field_of("bn254_fr"), "field_mul"),
    "bigint": lambda: bigint_source(64, 1),
    "curve_add": lambda: curve_source(CURVE, "curve_add"),
    "msm_accumulate": lambda: msm.accumulate_source(CURVE),
    "msm_affine": lambda: msm.affine_source(CURVE),
    "msm_fold": lambda: msm.fold_source(CURVE),
}
DIVIDE = "ACL_KERNEL ACL_BLOCK(128) void divide(ACL_GLOBAL float *x) {\n    x[acl_global_id()] /= VALUE;\n}\n"


@pytest.fixture(autouse=True)
def hiprtc():
    try:
        hiprtc_version()
    except CompileError as error:
        require(str(error))


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SOURCES)
def test_hiprtc_compiles_portable_kernels(name):
    source = SOURCES[name]()
    code = compile_hip(source, TARGET).code
    assert code[:4] == b"\x7fELF"
    assert f"amdgcn-amd-amdhsa--{TARGET}".encode() in code
    for entry in source.entries:
        assert f"\0{entry}.kd\0".encode() in code, entry


def test_options_and_targets_change_the_key_and_the_code():
    def source(value):
        return KernelSource(
            "divide", {"portable": DIVIDE}, {"divide": ("*f32",)}, options=CompileOptions(defines={"VALUE": value})
        )

    one, other = source("2.0f"), source("x[0]")
    assert len({hip_key(one, TARGET), hip_key(other, TARGET), hip_key(one, "gfx908")}) == 3
    assert compile_hip(one, TARGET).code != compile_hip(other, TARGET).code


def test_what_does_not_compile_is_an_error_with_the_log():
    source = KernelSource("divide", {"portable": DIVIDE}, {"divide": ("*f32",)})
    with pytest.raises(CompileError, match="'divide' does not compile for gfx90a") as caught:
        compile_hip(source, TARGET)
    assert "divide:2:27: error: use of undeclared identifier 'VALUE'" in caught.value.log
    with pytest.raises(CompileError, match="for gfx9"):  # hiprtc 5.2 crashes its process
        compile_hip(self_test_source(), "gfx9")
    with pytest.raises(CompileError, match="'cuda_only' has no dialect of portable"):
        compile_hip(KernelSource("cuda_only", {"cuda": ""}, {"k": ()}), TARGET)


@pytest.mark.slow
def test_hip_refuses_to_load_without_a_device(tmp_path):
    """In a child process, since HIP's LLVM and PoCL's cannot share one."""
    (tmp_path / "code").write_bytes(compile_hip(self_test_source(), "gfx600").code)
    program = """
import sys
from accelerant.errors import CompileError
from accelerant.runtime.providers.torch_devices import _LoadedFunction
try:
    _LoadedFunction(open(sys.argv[1], "rb").read(), "self_test", "the self-test")
except CompileError as error:
    print(error, error.log)
"""
    with python_child(program, str(tmp_path / "code"), stdout=subprocess.PIPE) as child:
        shown, _ = child.communicate(timeout=100)
    assert (child.returncode, "the self-test does not load" in shown, "(hipError " in shown) == (0, True, True)
