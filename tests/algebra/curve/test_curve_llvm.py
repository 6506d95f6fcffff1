"""The CPU's curve kernels: the machine code of multiples by secrets, public digits, refusals."""

import functools
import platform
import re

import llvmlite.binding as llvm
import pytest

from accelerant.algebra.curve.launch import ENTRIES
from accelerant.algebra.curve.llvm_kernels import curve_kernels, public_digits
from accelerant.errors import ConfigError
from accelerant.runtime.providers.cpu import _LEVEL, _PASSES
from refusals import assert_raises

FORMS = ("scalar", "vector")


@functools.cache
def built(name, form, cpu):
    """Optimized IR and machine code of curve_mul for an x86 processor, by the options of the CPU's provider."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, opt=_LEVEL, reloc="pic", codemodel="default"
    )
    module = llvm.parse_assembly(curve_kernels(name, "curve_mul", form).build(""))
    module.triple, module.data_layout = target.triple, str(target.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=_LEVEL)
    for option in _PASSES:
        setattr(options, option, True)
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)
    return str(module), target.emit_assembly(module)


def each_build(test):
    builds = [("scalar", "x86-64"), ("scalar", "znver4"), ("vector", "znver4"), ("vector", "icelake-server")]
    cases = [("bn254_g1", *build) for build in builds]
    for number, build in enumerate(builds):
        mark = pytest.mark.soak if number % 2 else pytest.mark.slow
        cases.append(pytest.param("bls12_381_g2", *build, marks=mark))
    test = pytest.mark.parametrize(("name", "form", "cpu"), cases)(test)
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return pytest.mark.skipif(not is_x86, reason="reads x86's instructions")(test)


@pytest.mark.sample(2, 1)
@each_build
def test_multiples_branch_on_no_scalar_and_no_point(name, form, cpu):
    """The machine code has no conditional jump but those of five loops: the digits of the inversion's exponent, packs,
    the table, the digits, the choice. LLVM may unroll the last one wholly, with a volatile mask for each entry.
    """
    text, code = built(name, form, cpu)
    unrolled = text.count("store volatile") == 16
    jumps = re.findall(r"^\s+(j(?!mp)\w+)", code, re.MULTILINE)
    assert len(jumps) == 5 - unrolled, jumps


@each_build
def test_multiples_read_no_memory_under_a_mask(name, form, cpu):
    """But for constants of the program: what is read does not depend on the lanes that a digit chooses."""
    lines = [line.split("#")[0].strip() for line in built(name, form, cpu)[1].splitlines()]
    masked = [line for line in lines if ("{%k" in line and "(" in line) or re.match(r"v?p?maskmov|vp?gather", line)]
    assert [line for line in masked if not re.search(r"\.LCPI\w+\(%rip\)", line)] == []


@pytest.mark.parametrize("number", [1, 2, 7, 0xD201000000010000, (1 << 127) - 1, 0x5A3B_91C7_0000_FFFF_1234_5678])
def test_public_digits(number):
    digits, odd = public_digits(number)
    assert sum(digit << j for j, digit in enumerate(digits)) == number
    assert all(digit == 0 or (digit % 2 and abs(digit) < 2 * odd) for digit in digits)
    assert odd in (1, 4)
    assert odd == 1 or sum(map(bool, digits)) + odd < sum(map(bool, public_digits_without_table(number)))


def public_digits_without_table(number):
    """The non-adjacent form."""
    digits = []
    while number:
        digit = 2 - number % 4 if number % 2 else 0
        digits.append(digit)
        number = (number - digit) // 2
    return digits


def test_what_a_builder_refuses():
    with pytest.raises(ConfigError, match=r"unknown entry 'curve_sub'; known are curve_add, "):
        curve_kernels("bn254_g1", "curve_sub").build("")
    assert_raises(ConfigError, "unknown curve 'bn255_g1'", lambda: curve_kernels("bn255_g1", "curve_add").build(""))
    assert_raises(ConfigError, "unknown form 'wide'", lambda: curve_kernels("bn254_g1", "curve_add", "wide").build(""))


def test_the_key_is_the_program():
    keys = {curve_kernels(name, "curve_add", form).key for name in ("bn254_g1", "bn254_g2") for form in FORMS}
    assert len(keys) == 4
    assert curve_kernels("bn254_g1", "curve_add", "scalar").key == curve_kernels("bn254_g1", "curve_add", "scalar").key


def test_a_source_may_have_all_entries():
    text = curve_kernels("bn254_g1", form="scalar").build("")
    assert all(f"define  void @{entry}(" in text for entry in ENTRIES if entry != "curve_inward")  # for devices
