"""The CPU's kernel that runs tapes (tape.py): one loop over instructions, which are data.

    tape_run    (registers *u64, code *i32, schedule *i64, parts i64, words i64, n i64)

Index i does the parts of the code that the schedule lists, on the registers from word i `words` on. A register is an
element in Montgomery form, R of algebra.field.program.montgomery_radix. Time depends on the tape alone.

An instruction is three loads of a place, two of elements, and the operation: some 2 ns on top of a product's 20 to 40.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.tape import ADD, MUL, SUB, Tape
from accelerant.algebra.field.llvm_limbs import Limbs
from accelerant.algebra.field.llvm_text import Body, builder_key, function
from accelerant.algebra.field.parameters import Field, field_of
from accelerant.algebra.field.places import HOST
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel, KernelSource

__all__ = ["TapeKernel", "kernel_source", "run_tape"]

_ENTRY = "tape_run"
_OPERATIONS = {ADD: "add", SUB: "sub", MUL: "mul"}
_ARGUMENTS = ("*u64", "*i32", "*i64", "i64", "i64", "i64")


@dataclass(frozen=True, slots=True)
class TapeKernel:
    """A Builder (see runtime/compilation/kernel.py) of tape_run; field: its name."""

    field: str

    written_out = True
    """LLVM has little to do: see runtime/providers/cpu.py."""

    @property
    def least_share(self) -> int:
        """An index is a millisecond of work: two are worth two threads."""
        return 1

    @property
    def key(self) -> str:
        """See builder_key; the text depends on the target in nothing else."""
        return builder_key(self)

    def build(self, target: str) -> str:
        """LLVM IR."""
        return _text(self.field)


@functools.cache
def _text(name: str) -> str:
    form = Limbs(field_of(name))
    body = Body()
    body.do(f"%stop = {_smin('%end', '%n')}")
    body.do("br label %next_index")
    body.label("next_index")
    body.do("%i = phi i64 [ %begin, %0 ], [ %i_next, %index_done ]")
    body.do("br i1 " + body("icmp slt i64 %i, %stop") + ", label %index, label %done")
    body.label("index")
    body.do(f"%file = getelementptr inbounds i64, ptr %registers, i64 {body('mul i64 %i, %words')}")
    body.do("br label %next_part")
    body.label("next_part")
    body.do("%part = phi i64 [ 0, %index ], [ %part_next, %next_run ]")
    body.do("br i1 " + body("icmp slt i64 %part, %parts") + ", label %begin_part, label %index_done")
    body.label("begin_part")
    bounds = body("getelementptr inbounds [2 x i64], ptr %schedule, i64 %part")
    first = body(f"load i64, ptr {bounds}, align 8")
    last = body(f"load i64, ptr {body(f'getelementptr inbounds i64, ptr {bounds}, i64 1')}, align 8")
    body.do(f"%code_end = getelementptr inbounds i32, ptr %code, i64 {last}")
    body.do(f"%code_begin = getelementptr inbounds i32, ptr %code, i64 {first}")
    body.do("%part_next = add nsw i64 %part, 1")
    body.do("br label %next_run")
    body.label("next_run")
    after = ", ".join(f"[ %{name}_next, %{name} ]" for name in _OPERATIONS.values())
    body.do(f"%head = phi ptr [ %code_begin, %begin_part ], {after}")
    body.do("br i1 " + body("icmp ult ptr %head, %code_end") + ", label %run, label %next_part")
    body.label("run")
    body.do("%operation = load i32, ptr %head, align 4")
    count = body(f"load i32, ptr {body('getelementptr inbounds i32, ptr %head, i64 1')}, align 4")
    body.do("%first = getelementptr inbounds i32, ptr %head, i64 2")
    body.do(f"%run_end = getelementptr inbounds [3 x i32], ptr %first, i64 {body(f'sext i32 {count} to i64')}")
    cases = " ".join(f"i32 {number}, label %{name}" for number, name in _OPERATIONS.items() if number != MUL)
    body.do(f"switch i32 %operation, label %mul [ {cases} ]")
    for name in _OPERATIONS.values():
        _loop(form, body, name)
    body.label("index_done")
    body.do("%i_next = add nsw i64 %i, 1")
    body.do("br label %next_index")
    body.label("done")
    body.do("ret void")
    arguments = ["i64 %begin", "i64 %end", "ptr %registers", "ptr %code", "ptr %schedule"]
    arguments += ["i64 %parts", "i64 %words", "i64 %n"]
    declared = "declare i64 @llvm.smin.i64(i64, i64)\n"
    return declared + form.functions() + function(_ENTRY, "void", arguments, body, "", "nounwind")


def _loop(form: Limbs, body: Body, name: str) -> None:
    """A run of one operation, an instruction at least."""
    body.label(name)
    body.do(f"%{name}_at = phi ptr [ %first, %run ], [ %{name}_next, %{name} ]")
    pointers = []
    for k in range(3):
        place = body(f"getelementptr inbounds i32, ptr %{name}_at, i64 {k}")
        offset = body(f"sext i32 {body(f'load i32, ptr {place}, align 4')} to i64")
        pointers.append(body(f"getelementptr inbounds i64, ptr %file, i64 {offset}"))
    x, y = (body(f"load {form.type}, ptr {pointer}, align 8") for pointer in pointers[1:])
    body.do(f"store {form.type} {form.call(body, name, x, y)}, ptr {pointers[0]}, align 8")
    body.do(f"%{name}_next = getelementptr inbounds i32, ptr %{name}_at, i64 3")
    more = body(f"icmp ult ptr %{name}_next, %run_end")
    body.do(f"br i1 {more}, label %{name}, label %next_run")


def _smin(x: str, y: str) -> str:
    return f"call i64 @llvm.smin.i64(i64 {x}, i64 {y})"


@functools.cache
def kernel_source(field: Field) -> KernelSource:
    """The kernel for a field of several limbs."""
    return KernelSource(
        name=f"{_ENTRY}_{field.name}",
        dialects={"llvm": TapeKernel(field.name)},
        entries={_ENTRY: _ARGUMENTS},
        targets=(),
    )


@functools.cache
def _kernel(field: Field) -> Kernel:
    return registry.create("cpu").compile(kernel_source(field))


def run_tape(tape: Tape, registers: npt.NDArray[np.uint64]) -> None:
    """Run a tape on the CPU.

    Args:
        tape: what to do.
        registers: (n, tape.registers, limbs), contiguous: each of the n is run by itself, in place. The constants are
            in, in Montgomery form.
    """
    pointers = [HOST.pointer(array) for array in (registers, tape.code, tape.schedule)]
    sizes = (len(tape.schedule), tape.registers * tape.field.limbs, len(registers))
    HOST.provider.launch(_kernel(tape.field), (len(registers),), (1,), (*pointers, *sizes))
