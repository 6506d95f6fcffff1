"""The LLVM IR builder: its text compiles and computes what was written, and names what kernels depend on."""

import ctypes
import re
import shutil

import llvmlite.binding as llvm
import numpy as np
import pytest

from accelerant.algebra.curve import tape
from accelerant.algebra.field.llvm_kernels import FORMS, field_kernels
from accelerant.algebra.field.parameters import FIELDS, Field
from accelerant.runtime.compilation import kernel as kernel_module
from accelerant.runtime.compilation.llvm import (
    ROUNDS,
    WEYL,
    FunctionBuilder,
    Value,
    constant,
    lane_constants,
    philox,
    program,
    suffix,
    vector,
)


def compiled(functions, entry, result, *arguments):
    """The entry of a program, with LLVM's code as its owner."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(program(functions))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine())
    function = ctypes.CFUNCTYPE(result, *arguments)(engine.get_function_address(entry))
    function.engine = engine
    return function


def entry(name, arguments, result="void"):
    return FunctionBuilder(name, arguments, result, linkage="", attributes="nounwind")


I64, POINTER, DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


def test_the_example_of_the_module():
    code = entry("dot", ["ptr %x", "ptr noalias readonly %y", "i64 %n"], "double")
    total = code.variable("double", 0.0)
    with code.loop(0, "%n") as i:
        x, y = (code.load("double", array, i) for array in ("%x", "%y"))
        total.set(code.op("fadd", total.get(), code.op("fmul", x, y)))
    code.ret(total.get())
    dot = compiled([code], "dot", DOUBLE, POINTER, POINTER, I64)
    x, y = np.arange(7.0), np.arange(3.0, 10.0)
    assert dot(x.ctypes.data, y.ctypes.data, 7) == x @ y
    assert dot(x.ctypes.data, y.ctypes.data, 0) == 0


def test_branches_switch_and_loops():
    code = entry("steps", ["i64 %n", "i64 %kind"], "i64")
    total = code.variable("i64", 0)
    with code.countdown("%n") as i:
        for even in code.branches(code.compare("eq", code.op("and", i, 1), 0)):
            total.set(code.op("add" if even else "sub", total.get(), code.op("mul", i, 10)))
    for case in code.switch("%kind", (2, 5)):
        total.set(code.op("add", total.get(), case * 1000))
    with code.when(code.compare("sgt", total.get(), 900)):
        total.set(code.smin(total.get(), 4000))
    code.ret(total.get())
    steps = compiled([code], "steps", I64, I64, I64)
    for n, kind in ((0, 0), (5, 0), (6, 2), (6, 5), (1, 5)):
        expected = sum(10 * i * (-1) ** i for i in range(n)) + {2: 2000, 5: 5000}.get(kind, 0)
        assert steps(n, kind) == (min(expected, 4000) if expected > 900 else expected)


def test_vectors_masks_and_calls():
    """z[i] = max(x[i], 0) + 3 below n, by a called function on arrays of vectors."""
    lanes = 4
    t = f"[2 x {vector('i64', lanes)}]"
    clamp = FunctionBuilder("clamp", [f"{t} %x"], t)
    clamp.ret(clamp.array(t, [clamp.select(clamp.compare("sgt", x, 0), x, 0) for x in clamp.parts("%x")]))
    code = entry("kernel", ["ptr %x", "ptr %z", "i64 %n"])
    kind = vector("i64", lanes)
    masks, halves = [], []
    for half in range(2):
        index = lane_constants("i64", range(lanes * half, lanes * (half + 1)))
        masks.append(code.compare("slt", index, code.broadcast("%n", lanes)))
        halves.append(code.masked_load(kind, code.at(kind, "%x", half), masks[half], 8))
    for half, part in enumerate(code.parts(code.call(t, "clamp", code.array(t, halves)))):
        turned = code.shuffle(code.op("add", part, 3), None, [3, 2, 1, 0])
        back = code.shuffle(turned, turned, [3, 6, 1, 4])
        code.masked_store(back, code.at(kind, "%z", half), masks[half], 8)
    code.ret()
    text = program([clamp, code])
    assert len(re.findall("declare .*masked.load", text)) == 1
    kernel = compiled([clamp, code], "kernel", None, POINTER, POINTER, I64)
    x = np.array([5, -1, 7, -(2**60), 9, 11, -3, 2], np.int64)
    for n in (0, 3, 4, 6, 8):
        z = np.full(8, -7, np.int64)
        kernel(x.ctypes.data, z.ctypes.data, n)
        np.testing.assert_array_equal(z, np.where(np.arange(8) < n, np.maximum(x, 0) + 3, -7))


def test_tables_and_joined_vectors():
    code = entry("pick", ["i64 %i"], "i64")
    table = code.table("numbers", "i64", [11, 22, 33], align=8)
    loaded = [code.load("i64", table, i, align=8) for i in (0, "%i")]
    joined = code.join([*loaded, constant("i64", 1), constant("i64", 2)])
    total = code.intrinsic("i64", "llvm.vector.reduce.add.v4i64", joined)
    code.ret(total)
    assert compiled([code], "pick", I64, I64)(2) == 11 + 33 + 3


def test_constants_and_types():
    assert constant("<4 x i32>", 7) == "<i32 7, i32 7, i32 7, i32 7>"
    assert constant("<4 x i32>", 0) == "zeroinitializer"
    assert constant("i1", True) == "true"
    assert constant("float", 0.5) == "0x3fe0000000000000"
    assert constant("i64", -1).type == "i64"
    assert [suffix(kind) for kind in ("i64", "<8 x i16>", "<4 x float>", "<2 x ptr>")] == [
        "i64", "v8i16", "v4f32", "v2p0",
    ]  # fmt: skip
    assert (vector("i64", 1), vector("i64", 8)) == ("i64", "<8 x i64>")


def test_an_operand_without_a_type_is_refused():
    code = FunctionBuilder("some", ["i64 %n"])
    with pytest.raises(ValueError, match="some: no type is known of %m, 1"):
        code.op("add", "%m", 1)
    assert code.op("add", "%n", 1).type == "i64"


def test_philox_is_that_of_random123():
    """Known answers of Random123's kat_vectors, philox4x32 with 10 rounds."""
    answers = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in answers:
        code = entry("words", ["ptr %z"])
        kind = vector("i64", 2)
        keys = [[(key[s] + r * WEYL[s]) % 2**32 for s in (0, 1)] for r in range(ROUNDS)]
        start = [Value(constant(kind, word), kind) for word in counter]
        for i, word in enumerate(philox(code, start, lambda r, s, keys=keys, kind=kind: constant(kind, keys[r][s]))):
            code.store(kind, word, "%z", i, align=8)
        code.ret()
        z = np.zeros((4, 2), np.uint64)
        compiled([code], "words", None, POINTER)(z.ctypes.data)
        assert [tuple(lane) for lane in (z % 2**32).T.tolist()] == [expected] * 2


def test_a_kernels_key_has_the_fields_parameters(monkeypatch):
    """A field registered by another process under the same name has another modulus."""
    keys = set()
    for modulus, generator in ((2**127 - 1, 3), (2**107 - 1, 3)):
        monkeypatch.setitem(FIELDS, "some", Field("some", modulus, generator))
        keys |= {field_kernels("some", "field_mul", form).key for form in FORMS}
        keys.add(tape.kernel_source(FIELDS["some"]).dialects["llvm"].key)
    assert len(keys) == 6


@pytest.mark.parametrize("edited", ["runtime/compilation/llvm.py", "algebra/field/llvm_packed.py"])
def test_a_kernels_key_changes_with_the_code_that_writes_it(edited, tmp_path, monkeypatch):
    package = kernel_module._PACKAGE
    for folder in ("algebra", "runtime/compilation"):
        shutil.copytree(package / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    kernel = field_kernels("bn254_fr", "field_mul", "scalar")
    own = kernel.key
    monkeypatch.setattr(kernel_module, "_PACKAGE", tmp_path)
    kernel_module.sources_hash.cache_clear()
    try:
        assert kernel.key == own
        with (tmp_path / edited).open("a") as file:
            file.write("# edited\n")
        kernel_module.sources_hash.cache_clear()
        assert kernel.key != own
    finally:
        kernel_module.sources_hash.cache_clear()
