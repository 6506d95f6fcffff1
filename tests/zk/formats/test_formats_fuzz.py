"""Damaged files of every format: each opens, and holds what it says, or raises FormatError; never anything else."""

import os
import struct
import sys
import tracemalloc

import pytest
from parts import EXTENSIONS, FAMILIES, VECTORS, put_together, take_apart

from accelerant.errors import FormatError
from accelerant.zk import formats
from accelerant.zk.formats import describe, open_file

LONGEST = 1 << 16
"""Bytes of a file that is damaged further."""

FILES = 200

MOST_FACTOR, MOST_BYTES = 24, 1 << 20
"""Of the file's size, and more: what interpreter, arrays of offsets and messages take."""

LIMITS = [0, 1, 2, 3, 31, 32, 33, 48, 64, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF]
LIMITS64 = [*LIMITS, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 13, 2**64 - 12, 2**64 - 1]


def patched(data, at, new):
    return data[:at] + new + data[at + len(new) :]


def near_the_start(rng, size):
    """Headers are short and at the start of what they head."""
    return rng.randrange(min(size, 1 << rng.randrange(3, max(4, size.bit_length() + 1))))


def change_bytes(rng, data):
    """Bits turned, words at the ends of their range, or garbage, anywhere."""
    at = near_the_start(rng, len(data))
    kind = rng.randrange(4)
    if kind == 0:
        return patched(data, at, bytes([data[at] ^ 1 << rng.randrange(8)]))
    if kind == 1:
        return patched(data, at, struct.pack("<I", rng.choice(LIMITS)))[: len(data)]
    if kind == 2:
        return patched(data, at, struct.pack("<Q", rng.choice(LIMITS64)))[: len(data)]
    return patched(data, at, rng.randbytes(rng.randrange(1, 64)))[: len(data)]


def change_length(rng, data):
    if rng.random() < 0.7:
        return data[: rng.randrange(len(data))]
    return data + rng.randbytes(rng.randrange(1, 100))


def change_sections(rng, sections):
    """Sections lost, doubled, exchanged, renamed, cut, lengthened; what the file will say of their sizes is right."""
    i, j = rng.randrange(len(sections)), rng.randrange(len(sections))
    number, payload = sections[i]
    kind = rng.choice(["lost", "doubled", "exchanged", "renamed", "cut", "longer", "inside", "inside", "inside"])
    if kind == "lost" and len(sections) > 1:
        del sections[i]
    elif kind == "doubled":
        sections.insert(j, sections[i])
    elif kind == "exchanged":
        sections[i], sections[j] = (number, sections[j][1]), (sections[j][0], payload)
    elif kind == "renamed":
        sections[i] = rng.choice([*range(16), *LIMITS]), payload
    elif kind == "cut":
        sections[i] = number, payload[: rng.randrange(len(payload) + 1)]
    elif kind == "longer":
        sections[i] = number, payload + rng.randbytes(rng.randrange(1, 200))
    elif payload:
        sections[i] = number, change_bytes(rng, bytes(payload))


def change_size(rng, data, sections):
    """What the file says of a section's size is wrong."""
    chosen = rng.randrange(len(sections))
    at = 12 + sum(12 + len(payload) for _, payload in sections[:chosen])
    near = len(sections[chosen][1]) + rng.randrange(-20, 20) & 2**64 - 1
    return patched(data, at + 4, struct.pack("<Q", rng.choice([*LIMITS64, near])))


def damaged(rng, data):
    try:
        magic, version, sections = take_apart(data)
    except (struct.error, OverflowError):  # damaged before
        sections = []
    changes = rng.choice(
        ["sections", "sections", "sections", "size", "bytes", "length", "all"] if sections else ["bytes", "length"]
    )
    if changes in ("sections", "all"):
        for _ in range(rng.choice([1, 1, 2, 3])):
            change_sections(rng, sections)
    if sections:
        data = put_together(magic, version, sections)
    if changes in ("size", "all"):
        data = change_size(rng, data, sections)
    if changes in ("bytes", "all"):
        data = change_bytes(rng, data)
    return change_length(rng, data) if changes == "length" else data


def examine(path):
    """Open, look at everything, check; whether it was refused."""
    try:
        with open_file(path):
            pass
        describe(path)
        describe(path, check=True)
    except FormatError as error:
        if str(path) not in str(error):
            raise
        return True
    return False


class Coverage:
    """The steps from line to line, within one function of the package `formats`, that were ever made."""

    def __init__(self):
        self.steps = set()

    def new(self, call):
        """Return whether a call makes a step that none before it made, and its result."""
        before = len(self.steps)
        sys.settrace(self._entered)
        try:
            result = call()
        finally:
            sys.settrace(None)
        return len(self.steps) > before, result

    def _entered(self, frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(formats.__path__[0]):
            return None
        last = 0

        def at_line(frame, event, argument):
            nonlocal last
            if event == "line":
                self.steps.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return at_line

        return at_line


def descriptors():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.fixture(scope="module")
def corpora():
    """By format, the coverage and the files to damage further, with which a search goes on."""
    return {}


@pytest.mark.slow
@pytest.mark.search(30)
@pytest.mark.parametrize("kind", EXTENSIONS)
def test_damaged_files_are_refused_or_hold_what_they_say(kind, corpora, tmp_path, rng, record_property):
    path = tmp_path / f"damaged.{kind}"
    originals = [(VECTORS / family / EXTENSIONS[kind]).read_bytes() for family in FAMILIES]
    if kind == "r1cs":
        originals.append((VECTORS / "bn254" / "gates.r1cs").read_bytes())
    coverage, further = corpora.setdefault(kind, (Coverage(), []))
    for data in originals:  # also compiles the kernels
        path.write_bytes(data)
        assert coverage.new(lambda: examine(path))[1] is False
    before, refused = descriptors(), 0
    tracemalloc.start()
    try:
        for _ in range(FILES):
            data = damaged(rng, rng.choice(further if further and rng.random() < 0.5 else originals))
            path.write_bytes(data)
            start, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            new, wrong = coverage.new(lambda: examine(path))
            peak = tracemalloc.get_traced_memory()[1] - start
            assert peak <= MOST_FACTOR * len(data) + MOST_BYTES, f"{peak} bytes for {path}"
            refused += wrong
            if new and len(data) < LONGEST:
                further.append(data)
    finally:
        tracemalloc.stop()
    assert descriptors() == before
    assert refused
    record_property("files", FILES)
    record_property("files refused", refused)
    record_property("largest number of steps covered", float(len(coverage.steps)))
