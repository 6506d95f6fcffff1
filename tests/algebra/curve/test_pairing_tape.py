import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerant.algebra.curve.tape import ADD, MUL, SUB, Recorder, TapeProgram, kernel_source, run_tape
from accelerant.algebra.field import words as host
from accelerant.algebra.field.parameters import field_of
from accelerant.algebra.field.program import montgomery_radix
from accelerant.errors import ConfigError
from refusals import assert_raises

FIELDS = ["bn254_fq", "bls12_381_fq"]


def run_on_integers(tape, windows):
    """What a tape means: the registers after it, the windows' values put in before."""
    registers = [*tape.constants, *windows] + [0] * (tape.registers - len(tape.constants) - len(windows))
    code, limbs, p = tape.code.tolist(), tape.field.limbs, tape.field.modulus
    for at, end in tape.schedule.tolist():
        while at < end:
            operation, count = code[at : at + 2]
            at += 2
            for _ in range(count):
                z, x, y = (
                    registers[place // limbs] if i else place // limbs for i, place in enumerate(code[at : at + 3])
                )
                registers[z] = {ADD: x + y, SUB: x - y, MUL: x * y}[operation] % p
                at += 3
    first = len(tape.constants)
    return registers[first : first + len(windows)]


def run_on_the_cpu(tape, windows):
    """The same by the kernel, on rows of values."""
    p, radix = tape.field.modulus, montgomery_radix(tape.field)
    registers = np.zeros((len(windows), tape.registers, tape.field.limbs), np.uint64)
    first = len(tape.constants)
    registers[:, :first] = host.encode(tape.field, [value * radix % p for value in tape.constants])
    for i, row in enumerate(windows):
        registers[i, first : first + len(row)] = host.encode(tape.field, [value * radix % p for value in row])
    run_tape(tape, registers)
    inverse = pow(radix, -1, p)
    return [
        [value * inverse % p for value in host.decode(tape.field, registers[i, first : first + len(row)])]
        for i, row in enumerate(windows)
    ]


@st.composite
def formulas(draw):
    """Some operations on values before them, and which of all are kept where."""
    size, steps = draw(st.integers(1, 4)), draw(st.integers(0, 40))
    operations = []
    for i in range(steps):
        known = size + 4 + i
        operation = draw(st.sampled_from(["add", "sub", "mul", "neg"]))
        operations.append((operation, draw(st.integers(0, known - 1)), draw(st.integers(0, known - 1))))
    kept = draw(st.lists(st.integers(0, size + 3 + steps), min_size=1, max_size=6))
    return size, operations, kept


CONSTANTS = (0, 1, -1, 12345678901234567890)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(formula=formulas(), name=st.sampled_from(FIELDS), seed=st.integers(0, 1 << 32))
def test_a_segment_does_what_was_recorded(formula, name, seed):
    """Outputs go to the registers of inputs too, which are read before they are written."""
    size, operations, kept = formula
    field, rng = field_of(name), random.Random(seed)
    p = field.modulus
    recorder = Recorder(field)
    values = [*recorder.inputs("x", size), *map(recorder.constant, CONSTANTS)]
    inputs = [rng.choice([0, 1, p - 1, rng.randrange(p)]) for _ in range(size)]
    wanted = [*inputs, *(constant % p for constant in CONSTANTS)]
    for operation, a, b in operations:
        x, y = wanted[a], wanted[b]
        wanted.append({"add": x + y, "sub": x - y, "mul": x * y, "neg": -x}[operation] % p)
        operands = (values[a],) if operation == "neg" else (values[a], values[b])
        values.append(getattr(recorder, operation)(*operands))
    segment = recorder.segment({"x": [values[i] for i in kept], "y": [values[i] for i in reversed(kept)]})
    program = TapeProgram(field)
    x, y = program.window(6), program.window(6)
    program.call(segment, x=x, y=y)
    tape = program.assemble()
    before = [*inputs, *[7] * (12 - size)]
    expected = before.copy()
    expected[: len(kept)] = [wanted[i] for i in kept]
    expected[6 : 6 + len(kept)] = [wanted[i] for i in reversed(kept)]
    assert run_on_integers(tape, before) == expected
    assert run_on_the_cpu(tape, [before]) == [expected]
    assert tape.products == segment.products


@pytest.mark.parametrize("name", FIELDS)
def test_calls_on_other_windows_and_many_files(name):
    field = field_of(name)
    recorder = Recorder(field)
    a, b = recorder.inputs("to", 2)
    (c,) = recorder.inputs("by", 1)
    step = recorder.segment({"to": (recorder.mul(b, c), recorder.add(a, recorder.constant(5)))})
    program = TapeProgram(field)
    first, second, third = program.window(2), program.window(2), program.window(1)
    for to, by in ((first, third), (second, first), (first, third), (second, third)):
        program.call(step, to=to, by=by)
    tape = program.assemble()
    assert len(tape.schedule) == 4
    assert len(np.unique(tape.schedule[:, 0])) == 3  # the same windows again: the same code
    assert tape.products == 4
    edges = [0, 1, field.modulus - 1, 1 << 200]
    rows = [[edges[(i + j) % 4] for j in range(5)] for i in range(4)]
    assert run_on_the_cpu(tape, rows) == [run_on_integers(tape, row) for row in rows]
    p, (x, y, u, v, w) = field.modulus, rows[1]
    y1, x1 = (x + 5) % p, y * w % p
    v1, u1 = (u + 5) % p, v * x1 % p
    assert run_on_integers(tape, rows[1]) == [y1 * w % p, (x1 + 5) % p, v1 * w % p, (u1 + 5) % p, w]


def test_what_recording_leaves_out():
    recorder = Recorder(field_of("bn254_fq"))
    x, y = recorder.inputs("x", 2)
    zero, one = recorder.constant(0), recorder.constant(1)
    assert recorder.add(x, zero) == recorder.add(zero, x) == recorder.sub(x, zero) == x
    assert recorder.mul(x, one) == recorder.mul(one, x) == x
    assert recorder.mul(x, zero) == recorder.mul(zero, x) == zero
    assert recorder.mul(x, y) == recorder.mul(y, x)
    recorder.mul(recorder.mul(x, x), y)  # nobody asks for it
    segment = recorder.segment({"x": (recorder.mul(x, y), recorder.mul(y, x))})
    assert segment.products == 1


def test_runs_of_one_operation():
    """Independent products come together, whatever was recorded between them."""
    recorder = Recorder(field_of("bn254_fq"))
    x = recorder.inputs("x", 8)
    values = []
    for i in range(0, 8, 2):
        product = recorder.mul(x[i], x[i + 1])
        values.append(recorder.add(product, x[i]))
    segment = recorder.segment({"x": values})
    assert [(operation, len(instructions)) for operation, instructions in segment.runs][:2] == [(MUL, 4), (ADD, 4)]


def test_windows_of_a_call_are_the_segments():
    recorder = Recorder(field_of("bn254_fq"))
    segment = recorder.segment({"x": (recorder.neg(*recorder.inputs("x", 1)),)})
    program = TapeProgram(recorder.field)
    assert_raises(ValueError, "windows x, got y", lambda: program.call(segment, y=program.window(1)))


def test_a_program_of_nothing():
    tape = TapeProgram(field_of("bn254_fq")).assemble()
    assert run_on_the_cpu(tape, [[]]) == [[]]


def test_the_kernel_is_known_by_its_field():
    keys = {kernel_source(field_of(name)).dialects["llvm"].key for name in ("bn254_fq", "bls12_381_fq")}
    assert len(keys) == 2
    assert kernel_source(field_of("bn254_fq")) is kernel_source(field_of("bn254_fq"))
    assert_raises(ConfigError, "unknown field", lambda: kernel_source(field_of("bn254")))
