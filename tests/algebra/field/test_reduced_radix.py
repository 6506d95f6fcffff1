"""Arithmetic in a reduced radix, held against Python's integers: on PoCL, on NVIDIA where there is a GPU."""

import os
import random

import numpy as np
import pytest

from accelerant.algebra.field.parameters import FIELDS, field_of
from accelerant.algebra.field.program import field_text, montgomery_radix
from accelerant.algebra.field.reduced_radix import reduced_radix, reduced_radix_text
from accelerant.errors import ConfigError
from accelerant.runtime import registry
from accelerant.runtime.kernel import KernelSource
from accelerant.runtime.portable import portable_header


@pytest.fixture
def provider(request):
    reason = registry.reason_absent(request.param)
    if reason:
        pytest.fail(reason) if os.environ.get("CI") == "true" and request.param == "opencl" else pytest.skip(reason)
    return registry.create(request.param)


WHERE = [
    pytest.param(backend, name, id=f"{backend}-{name}", marks=marks)
    for backend, marks in (("opencl", []), ("cuda", [pytest.mark.gpu]))
    for name in ("bn254_fq", "bls12_381_fq")
]

BOUNDS = {"x": 6, "y": 8, "v": 2, "w": 4}
"""Multiples of p that the operands of CALLS are below."""

CALLS = {
    "F_lazy_mul(x, y)": (2, lambda x, y, v, w, one, back: x * y * back),
    "F_lazy_dot2(x, y, v, w)": (2, lambda x, y, v, w, one, back: (x * y + v * w) * back),
    "F_lazy_dot4(x, y, v, w, y, v, w, v)": (2, lambda x, y, v, w, one, back: (x * y + v * w + y * v + w * v) * back),
    "F_lazy_square(y)": (2, lambda x, y, v, w, one, back: y * y * back),
    "F_lazy_add(x, y)": (14, lambda x, y, v, w, one, back: x + y),
    "F_lazy_sub(x, y, 9)": (15, lambda x, y, v, w, one, back: x - y),
    "F_lazy_sub(F_lazy_zero(), v, 3)": (3, lambda x, y, v, w, one, back: -v),
    "F_lazy_select(F_lazy_is_plain_zero(v), F_lazy_one(), w)": (4, lambda x, y, v, w, one, back: w if v else one),
}
"""What a call gives: the multiple of p it is at most, and what it is mod p."""


def operands(field, bound, generator):
    """Values below bound p: the least, the largest, near multiples of p, with few bits, random."""
    p = field.modulus
    edges = [0, 1, p - 1, p, p + 1, bound * p - 1, (bound - 1) * p, 7 << 29 | 5, 1 << field.bits - 1]
    return edges + [generator.randrange(bound * p) for _ in range(40)]


def digits_of(cut, value, lent):
    """Digits of a value; where `lent` has a bit and the digit is small, it has borrowed a unit from the one above."""
    digits = [value >> cut.bits * i & (1 << cut.bits) - 1 for i in range(cut.digits)]
    for i in range(cut.digits - 1):
        if lent >> i & 1 and digits[i] < 8 and digits[i + 1] > 0:
            digits[i] += 1 << cut.bits
            digits[i + 1] -= 1
    return digits


def value_of(cut, digits):
    return sum(int(digit) << cut.bits * i for i, digit in enumerate(digits))


def run(provider, field, operand, calls, given, *, functions=""):
    """The digits of every call, (calls, threads, digits); thread i has given[k, i] as the k-th operand."""
    digits, count = reduced_radix(field).digits, given.shape[1]
    each = f"for (int d = 0; d < (int)sizeof({operand}) / 4; d++)"
    gets = "".join(
        f"{operand} {name}; {each} {{ ((u32 *)&{name})[d] = given[({k} * n + i) * {digits} + d]; }} "
        for k, name in enumerate("xyvw"[: len(given)])
    )
    puts = "".join(
        f"{{ F_lazy z = {call}; "
        f"for (int d = 0; d < {digits}; d++) {{ found[({k} * n + i) * {digits} + d] = z.digit[d]; }} }} "
        for k, call in enumerate(calls)
    )
    head = "ACL_KERNEL void probe(ACL_GLOBAL const u32 *given, ACL_GLOBAL u32 *found, i64 n)"
    kernel = f"{head} {{ i64 i = acl_global_id(); if (i < n) {{ {gets} {puts} }} }}"

    def text(dialect):
        return field_text(field, "F", dialect) + reduced_radix_text(field, "F") + functions + kernel

    dialects = {"portable": text("portable")}
    if provider.name == "cuda":
        dialects["cuda"] = portable_header() + text("cuda")
    compiled = provider.compile(KernelSource("probe", dialects, {"probe": ("*u32", "*u32", "i64")}), entry="probe")
    shape = (len(calls), count, digits)
    out = provider.allocate(4 * int(np.prod(shape)))
    provider.launch(compiled, (-(-count // 64),), (64,), (provider.copy_to_device(given), out, count))
    provider.synchronize()
    return provider.copy_to_host(out, np.uint32, shape)


@pytest.mark.parametrize(("provider", "name"), WHERE, indirect=["provider"])
def test_digits_are_exact(provider, name):
    field, generator = field_of(name), random.Random(7)
    cut, p = reduced_radix(field), field.modulus
    back = pow(cut.radix, -1, p)
    columns = [operands(field, bound, generator) for bound in BOUNDS.values()]
    rows = [tuple(generator.choice(column[:9]) for column in columns) for _ in range(100)]
    rows += [tuple(generator.choice(column) for column in columns) for _ in range(100)]
    lent = generator.getrandbits
    given = np.array([[digits_of(cut, row[k], lent(cut.digits)) for row in rows] for k in range(4)], np.uint32)
    assert given.max() >= 1 << cut.bits
    found = run(provider, field, "F_lazy", list(CALLS), given)
    for (call, (bound, wanted)), results in zip(CALLS.items(), found, strict=True):
        for row, digits in zip(rows, results, strict=True):
            value = value_of(cut, digits)
            assert value % p == wanted(*row, cut.radix, back) % p, (call, row)
            assert value <= bound * p, (call, row)
            assert max(map(int, digits[:-1])) < (1 << cut.bits) + 8, (call, row)


BACK = """
ACL_DEVICE F_lazy F_as_digits(F x) {
    F_lazy z = F_lazy_zero();
    for (int i = 0; i < F_LIMBS; i++) { z.digit[i] = x.limb[i]; }
    return z;
}
"""


@pytest.mark.parametrize(("provider", "name"), WHERE, indirect=["provider"])
def test_limbs_become_digits_and_limbs_again(provider, name):
    """Loaded they are x L, and what is stored is below p; 0 and p alone are zero products."""
    field, generator = field_of(name), random.Random(3)
    cut, p = reduced_radix(field), field.modulus
    words = 2 * field.limbs
    values = [0, 1, 2, p - 1, p - 2, p >> 1, *(generator.randrange(p) for _ in range(20))]
    given = np.zeros((1, len(values), cut.digits), np.uint32)
    given[0, :, :words] = [field.words(value, 32, words) for value in values]
    loaded = "F_lazy_load(x)"
    is_zero = f"F_lazy_product_is_zero(F_lazy_mul({loaded}, F_lazy_one()))"
    calls = [
        loaded,
        f"F_as_digits(F_lazy_store({loaded}))",
        f"F_lazy_select({is_zero}, F_lazy_one(), F_lazy_zero())",
    ]
    found = run(provider, field, "F", calls, given, functions=BACK)
    scale = cut.radix // montgomery_radix(field)
    for i, value in enumerate(values):
        assert value_of(cut, found[0, i]) == value * scale
        assert tuple(map(int, found[1, i, :words])) == field.words(value, 32, words)
        assert value_of(cut, found[2, i]) == (0 if value else cut.radix % p)


@pytest.mark.parametrize("name", [name for name in FIELDS if FIELDS[name].limbs > 1])
def test_sums_of_digit_products_fit(name):
    field = field_of(name)
    cut = reduced_radix(field)
    assert cut.bits * cut.digits >= field.bits + 7
    assert 5 * cut.digits * ((1 << cut.bits) + 8) ** 2 < 1 << 64


def test_a_field_of_one_word_needs_no_digits():
    with pytest.raises(ConfigError, match="goldilocks has elements of one word"):
        reduced_radix(field_of("goldilocks"))
