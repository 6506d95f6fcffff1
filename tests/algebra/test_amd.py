"""Portable C for AMD: what the integer kernels take there, and that they do not depend on the size of a wave."""

import functools
import re
import subprocess

import pytest

from accelerant.algebra.bigint import kernel_source as bigint_source
from accelerant.algebra.curve.launch import kernel_source as curve_source
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.field.parameters import field_of
from accelerant.algebra.field.program import kernel_source as field_source
from accelerant.algebra.msm import device_plan as msm
from accelerant.algebra.ntt.plan import powers_source
from accelerant.algebra.ntt.rns import rns_source
from accelerant.errors import ConfigError
from accelerant.privacy.random import keystream_source
from accelerant.runtime.compilation.cuda import amd_compiler, inspect_amd
from accelerant.runtime.compilation.kernel import portable_header
from accelerant.runtime.provider import self_test_source
from requirements import require

CURVE = curve_of("bn254_g1")
SOURCES = {
    "self_test": self_test_source,
    "keystream": keystream_source,
    "msm_sort": msm.sort_source,
    "ntt_powers": functools.partial(powers_source, field_of("bn254_fr")),
    "rns_forward": functools.partial(rns_source, "forward"),
    "field_mul": functools.partial(field_source, field_of("bn254_fr"), "field_mul"),
    "bigint": functools.partial(bigint_source, 64, 1),
    "curve_add": functools.partial(curve_source, CURVE, "curve_add"),
    "curve_mul": functools.partial(curve_source, CURVE, "curve_mul"),
    "msm_accumulate": functools.partial(msm.accumulate_source, CURVE),
    "msm_affine": functools.partial(msm.affine_source, CURVE),
    "msm_fold": functools.partial(msm.fold_source, CURVE),
    "msm_multiples": functools.partial(msm.multiples_source, CURVE),
}
QUICK = ("self_test", "keystream", "msm_sort")
WAVES = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32}
MOST_REGISTERS = {"gfx90a": 512, "gfx942": 512, "gfx1100": 256}
"""Vector registers of a thread, accumulators included."""

SPILLS = {
    ("bigint_pow", "gfx942"): 80, ("bigint_pow", "gfx1100"): 800, ("bigint_mul", "gfx1100"): 8,
    ("bigint_fixed_vartime", "gfx1100"): 16,
}  # fmt: skip
"""Most bytes that a thread spills; no other kernel spills."""


@pytest.fixture(scope="module")
def clang():
    try:
        return amd_compiler()
    except ConfigError as error:
        require(str(error))


def cases():
    """Every kernel for every target; in each run the quick ones, and the others for one target of 64 threads."""
    for i, name in enumerate(SOURCES):
        for target in WAVES:
            slow = [] if name in QUICK and target != "gfx1100" else [pytest.mark.slow]
            repeats = name not in QUICK and target != ("gfx90a", "gfx942")[i % 2]
            yield pytest.param(name, target, marks=[*slow, *[pytest.mark.soak] * repeats], id=f"{name}-{target}")


@pytest.mark.sample(2, 1)
@pytest.mark.usefixtures("clang")
@pytest.mark.parametrize(("name", "target"), list(cases()))
def test_registers_and_spills_of_every_portable_kernel(name, target, record_property):
    source = SOURCES[name]()
    found = inspect_amd(source.dialects["portable"], target, name=name)
    assert {entry.name for entry in found.entries} == set(source.entries)
    assert set(re.findall(r"\.wavefront_size: +(\d+)", found.ptx)) == {str(WAVES[target])}
    for entry in found.entries:
        resources = entry.resources
        record_property(f"{entry.name} {target} registers", resources.registers)
        record_property(f"{entry.name} {target} spilled bytes", resources.spill_bytes)
        assert 0 < resources.registers <= MOST_REGISTERS[target]
        assert resources.spill_bytes <= SPILLS.get((entry.name, target), 0), entry.name
        assert resources.shared_bytes <= 64 << 10


@pytest.mark.parametrize("name", SOURCES)
def test_no_kernel_knows_its_wave(name, clang):
    """What clang sees for AMD has no operation between the threads of a wave, and no size of one."""
    text = f"{portable_header()}\n{SOURCES[name]().dialects['portable']}"
    options = ["-x", "hip", "--cuda-device-only", "--offload-arch=gfx90a", "-nogpuinc", "-nogpulib", "-E", "-P", "-"]
    done = subprocess.run([clang, *options], input=text, capture_output=True, text=True, timeout=300, check=True)
    assert "amdgpu_flat_work_group_size" in done.stdout or "__attribute__((global))" in done.stdout
    between = r"__shfl\w*|__ballot\w*|__any\w*|__all\w*|__\w*warp\w*|warpSize|sub_group\w*|__activemask\w*"
    assert re.findall(between, done.stdout) == []
    builtins = set(re.findall(r"__builtin_amdgcn_(\w+)", done.stdout))
    assert builtins <= {"workitem_id_x", "workgroup_size_x", "workgroup_id_x", "fence", "s_barrier"}
