"""A process's first sum on a device: programs known by what they are made of, no text written, LLVM not loaded."""

import functools
import itertools
import json
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import accelerant
from accelerant.algebra.curve.launch import ENTRIES as CURVE_ENTRIES
from accelerant.algebra.curve.launch import kernel_source as curve_source
from accelerant.algebra.curve.parameters import CURVES, curve_of
from accelerant.algebra.curve.weierstrass import encode_points, multiply
from accelerant.algebra.field.parameters import FIELDS, Field
from accelerant.algebra.field.program import CudaProgram, montgomery_radix
from accelerant.algebra.field.program import entries as field_entries
from accelerant.algebra.field.program import kernel_source as field_source
from accelerant.algebra.msm import device
from accelerant.algebra.msm.device import canonical, reduce_by_kernel, reduce_by_python, reduce_windows
from accelerant.algebra.msm.device_plan import accumulate_source, affine_source, fold_source, multiples_source

# --- a process without a device --------------------------------------------------------------------------------------
PROGRAM = """
import json, sys
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from accelerant import zk
from accelerant.algebra.field import program
from accelerant.algebra.field.memory_space import HOST, MemorySpace
from accelerant.runtime import registry
from accelerant.runtime.compilation import cuda as cuda_compile
from accelerant.zk import multi_scalar as op
from accelerant.algebra.field.memory_space import ArrayOperand

keys, texts, launched = {}, [], []
plain = program.field_text
program.field_text = lambda *args: texts.append(args) or plain(*args)
cuda_compile._nvrtc_version = lambda: "nvrtc"

class Provider:
    dialects = ("cuda", "portable", "triton")
    def compile(self, source, *, entry=None, device=0):
        keys[source.name] = cuda_compile.cuda_key(source, "sm_90")
        return SimpleNamespace(name=entry or next(iter(source.entries)))
    def launch(self, kernel, grid, block, args):
        launched.append(kernel.name)
    def record_event(self, device):
        return None
    def lost(self, error):
        return None
    def devices(self):
        return [SimpleNamespace(properties={})]

@dataclass(frozen=True)
class Nowhere(MemorySpace):
    backend: str = "cuda"
    index: int = 0
    def empty(self, shape, dtype):
        return np.zeros(shape, dtype)
    def load(self, words):
        return words
    def store(self, words):
        return words
    def minimum(self, numbers):
        return 1 << 62
for name, method in vars(type(HOST)).items():
    if callable(method) and name not in vars(Nowhere):
        setattr(Nowhere, name, method)
Nowhere.__abstractmethods__ = frozenset()

registry._reasons["cuda"], registry._created["cuda"] = "", Provider()
group, space, n = zk.curve("bn254_g1"), Nowhere(), 1 << 12
curve = group.parameters
scalars, points = np.zeros((n, 4), np.uint64), np.zeros((n, 2, 4), np.uint64)
operand = ArrayOperand(points, space, (n,))
op.DeviceVerdict = SimpleNamespace(of=lambda space: SimpleNamespace(is_set=lambda: False))
rows = [scalars] * int(sys.argv[1])
start, check = op._inward_by_one(curve, operand, scalars, lambda: None)
total = op.run_sums(space, curve, rows, start, check)
total = op.sums_outward(curve, total, space, (len(rows),), operand)
heavy = sorted(name for name in sys.modules if name in ("llvmlite", "torch", "accelerant.runtime.providers.cpu"))
print(json.dumps({"keys": keys, "texts": len(texts), "launched": launched, "heavy": heavy, "zero": not total.any()}))
"""


@functools.cache
def first_sums(count):
    """What a process does that makes so many sums on a device whose kernels are in the cache, and do nothing."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(count)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_first_sum_writes_no_text_and_loads_no_llvm():
    found = first_sums(1)
    assert found["texts"] == 0
    assert found["heavy"] == []
    assert found["zero"]
    assert len(found["keys"]) == 4
    assert found["launched"][0] == "curve_inward"
    assert found["launched"].count("msm_accumulate") == 1


@pytest.mark.slow
def test_a_process_of_many_sums_takes_the_kernel():
    """The counterpart: the stand-in sees LLVM where it is loaded."""
    found = first_sums(device._PYTHON_SUMS + 1)
    assert "llvmlite" in found["heavy"]
    assert "torch" not in found["heavy"]
    assert found["zero"]


# --- programs and their keys -----------------------------------------------------------------------------------------
def programs():
    """Every CUDA program of fields, curves and sums, and some that differ in one option."""
    for field in FIELDS.values():
        if field.limbs > 1:
            yield from (field_source(field, entry) for entry in (None, *field_entries(field)))
    for curve in map(curve_of, CURVES):
        yield from (curve_source(curve, entry) for entry in (None, *CURVE_ENTRIES))
        yield from (make(curve) for make in (accumulate_source, fold_source, multiples_source))
        for inlined in (True, False):
            yield from (accumulate_source(curve, inlined, 320, rows) for rows in (True, False))
        if curve.coordinates.degree == 1:
            yield from (affine_source(curve, inlined, 320) for inlined in (None, True, False))
        yield fold_source(curve, True)


@pytest.mark.slow
def test_programs_of_one_key_have_one_text():
    built = [source.dialects["cuda"] for source in programs()]
    assert all(isinstance(program, CudaProgram) for program in built)
    pairs = {(program.key, program.build("sm_90")) for program in built}
    assert len(pairs) == len({key for key, _ in pairs}) == len({text for _, text in pairs}) > 130


def test_a_field_of_the_same_name_has_another_key():
    field = FIELDS["bn254_fr"]
    other = Field(field.name, FIELDS["bn254_fq"].modulus, FIELDS["bn254_fq"].generator)
    one, two = (field_source(each, "field_mul").dialects["cuda"] for each in (field, other))
    assert one.key != two.key


def test_a_key_is_of_every_text_that_is_read(monkeypatch):
    """What a program reads lies in the folders that its key is of, or is the header, which the key holds."""
    package, plain = Path(accelerant.__file__).parent, Path.read_text
    read = []
    monkeypatch.setattr(Path, "read_text", lambda path, **options: read.append(path) or plain(path, **options))
    for source in (field_source.__wrapped__(FIELDS["bn254_fq"]), multiples_source.__wrapped__(curve_of("bn254_g2"))):
        program = source.dialects["cuda"]
        read.clear()
        program.build("sm_90")
        folders = {path.parent.relative_to(package).as_posix() for path in read if path.name != "portable.h"}
        assert folders == set(program.folders)


# --- the sums of windows ---------------------------------------------------------------------------------------------
def window_sums(curve, pieces, windows, draw):
    """Logarithms (pieces, windows), infinity and equal and opposite points among them, and their projective words."""
    k, p = curve.coordinates, curve.coordinates.base.modulus
    some = [draw.randrange(curve.order) for _ in range(2)]
    logs = [[draw.choice([0, 1, curve.order - 1, *some]) for _ in range(windows)] for _ in range(pieces)]
    radix, words = montgomery_radix(k.base), []
    for log in itertools.chain(*logs):
        point, z = multiply(curve, log, curve.generator), k.join([draw.randrange(1, p) for _ in range(k.degree)])
        x, y = (k.zero, k.one) if point is None else point
        for value in (k.mul(x, z), k.mul(y, z), k.zero if point is None else z):
            parts = (part * radix % p for part in k.parts(value))
            words += [word for part in parts for word in k.base.words(part, 64, k.base.limbs)]
    return logs, np.array(words, np.uint64).reshape(pieces, windows, -1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("add_up", [reduce_by_python, reduce_by_kernel])
@pytest.mark.parametrize("name", CURVES)
def test_sums_of_windows(name, add_up):
    curve, draw = curve_of(name), random.Random(name)
    k, p = curve.coordinates, curve.coordinates.base.modulus
    for pieces, windows, window in ((1, 1, 15), (3, 1, 15), (1, 17, 15), (2, 5, 3), (3, 4, 1)):
        logs, sums = window_sums(curve, pieces, windows, draw)
        total = sum(log << window * w for row in logs for w, log in enumerate(row))
        expected = multiply(curve, total % curve.order, curve.generator)
        scaled = (0,) * 2 * k.degree if expected is None else [part for c in expected for part in k.parts(c)]
        parts = [part * montgomery_radix(k.base) % p for part in scaled]
        found = add_up(curve, window, sums)
        assert found.tolist() == [word for part in parts for word in k.base.words(part, 64, k.base.limbs)]


@pytest.mark.parametrize("name", CURVES)
def test_canonical_form(name):
    curve = curve_of(name)
    k, p = curve.coordinates, curve.coordinates.base.modulus
    edges = [0, 1, p - 1, montgomery_radix(k.base) % p, random.Random(name).randrange(p)]
    points = [None, *((k.join([x] * k.degree), k.join([y] * k.degree)) for x, y in itertools.product(edges, edges[1:]))]
    radix = montgomery_radix(k.base) % p
    scaled = [point and (k.times(point[0], radix), k.times(point[1], radix)) for point in points]
    assert canonical(curve, encode_points(curve, scaled)).tolist() == encode_points(curve, points).tolist()
    assert canonical(curve, encode_points(curve, [])).shape == (0, *curve.shape)


@pytest.mark.parametrize("windows", [1, 3])
def test_the_kernel_comes_after_a_few_sums(windows, monkeypatch):
    """But for one window, where Python has next to nothing to do."""
    calls = []
    for name in ("reduce_by_python", "reduce_by_kernel"):
        monkeypatch.setattr(device, name, lambda *args, name=name: calls.append(name))
    monkeypatch.setattr(device, "_sums_so_far", defaultdict(itertools.count))
    for _ in range(6):
        reduce_windows(curve_of("bn254_g1"), 4, np.zeros((1, windows, 12), np.uint64))
    assert calls == (["reduce_by_python"] * 6 if windows == 1 else ["reduce_by_python"] * 4 + ["reduce_by_kernel"] * 2)
