"""A compiled circuit: its constraints (.r1cs) and the values of its wires (.wtns).

.r1cs version 1 holds the constraints (A w) (B w) = C w, row by row, as circom compiles them:

    1  u32 n8, r (n8 bytes), u32 nWires, nPubOut, nPubIn, nPrvIn, u64 nLabels, u32 mConstraints
    2  for each constraint three linear combinations, of A, B and C: u32 count, then {u32 wire, value (n8 bytes)}
    3  u64 label of each wire
    4  u32 count of custom gates, each: zero-terminated name, u32 count of parameters, n8 bytes each
    5  u32 count of custom gate uses, each: u32 gate, u32 count of wires, u64 each

Wire 0 is the constant 1, then outputs, public inputs, private inputs, others. Values are canonical. Source: iden3's
r1csfile/doc/r1cs_bin_format.md (commit 1e48416), files of circom 2.2.

.wtns version 2 holds a witness:

    1  u32 n8, r (n8 bytes), u32 number of values
    2  the values, canonical, n8 bytes each: w[0] = 1, the outputs, the public inputs, the other wires
"""

import struct
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.field.words import not_below
from accelerant.errors import ConfigError, OutOfMemory, ShapeError, UnsupportedDtype
from accelerant.zk.formats import container
from accelerant.zk.formats.container import U64, Cursor, FileFormat, FilePath, MappedFile, prime_bytes, read_family

Terms = npt.NDArray[np.void]

_HEADER, _CONSTRAINTS, _LABELS, _GATES, _USES = range(1, 6)
_NAMES = {
    _HEADER: "header", _CONSTRAINTS: "constraints", _LABELS: "labels", _GATES: "custom gates",
    _USES: "custom gate uses",
}  # fmt: skip
_LAYOUT = FileFormat("r1cs", b"r1cs", 1, _NAMES, (_HEADER, _CONSTRAINTS, _LABELS))

_IN_FILE = np.dtype([("wire", "<u4"), ("value", "<u8", (4,))])
_TERM_WORDS = _IN_FILE.itemsize // 4
TERM = np.dtype([("row", "<u4"), ("wire", "<u4"), ("value", "<u8", (4,))])
"""An entry of A, B or C; r takes four words in both supported families."""

_CHUNK = 1 << 16

_MAX_GATES = 1 << 16  # Upper bound on the custom gates of a file: a 5-byte entry becomes an object forty times as large


@dataclass(frozen=True, slots=True)
class CustomGate:
    """A custom PLONK gate (template name and parameters), which Groth16 cannot prove."""

    name: str
    parameters: tuple[int, ...]


class R1cs(MappedFile):
    """A memory-mapped .r1cs file.

    Attributes:
        family: "bn254" or "bls12_381", from r.
        n_wires: number of wires, including wire 0.
        n_pub_out, n_pub_in, n_prv_in: outputs, public inputs, private inputs. Private inputs that no constraint uses
            are counted but have no wire; like all signals, they have labels.
        n_labels: number of signals before circom's simplification.
        n_constraints: rows of A, B and C.
        custom_gates: custom gates declared by the circuit.
        n_custom_gate_uses: number of their uses.
    """

    layout = _LAYOUT

    def _read(self) -> None:
        cursor = self.cursor(_HEADER)
        family = read_family(cursor, "r")
        self.family, self._field = family.name, family.g1.scalars
        at = cursor.at
        numbers = map(cursor.number, ("nWires", "nPubOut", "nPubIn", "nPrvIn"))
        self.n_wires, self.n_pub_out, self.n_pub_in, self.n_prv_in = numbers
        self.n_labels, self.n_constraints = cursor.number("nLabels", 8), cursor.number("mConstraints")
        cursor.end()
        if self.n_public >= self.n_wires:
            raise cursor.error(f"{self.n_public} public signals and wire 0 exceed {self.n_wires} wires", at)
        if self.n_public + self.n_prv_in >= max(self.n_wires, self.n_labels):
            signals = f"{self.n_public} public signals, {self.n_prv_in} private inputs and wire 0"
            raise cursor.error(f"{signals} exceed {self.n_wires} wires and {self.n_labels} labels", at + 12)
        self.expect_size(_LABELS, 8 * self.n_wires, f"labels of {self.n_wires} wires")
        section = self.sections[_CONSTRAINTS]
        if section.size % 4 or section.size < 3 * 4 * self.n_constraints:
            message = f"{section.size} bytes; {self.n_constraints} constraints take whole u32 words, at least 3 each"
            raise self.error(_CONSTRAINTS, 0, message)
        self.custom_gates: tuple[CustomGate, ...] = ()
        self.n_custom_gate_uses = 0
        if _GATES in self.sections:
            self.custom_gates = self._read_gates(self.cursor(_GATES))
        if _USES in self.sections:
            self.n_custom_gate_uses = self._read_uses(self.cursor(_USES))

    @property
    def n_public(self) -> int:
        """Number of outputs and public inputs."""
        return self.n_pub_out + self.n_pub_in

    def _read_gates(self, cursor: Cursor) -> tuple[CustomGate, ...]:
        size, gates_read = self._field.size_bytes, []
        at, gates = cursor.at, cursor.number("the number of custom gates")
        if gates > _MAX_GATES:
            raise cursor.error(f"{gates} custom gates; at most {_MAX_GATES} are supported", at)
        for _ in range(gates):  # bounded by the section: each takes bytes of it
            name = cursor.until_zero("a custom gate's name").decode("utf-8", errors="replace")
            count = cursor.number("the number of a custom gate's parameters")
            data = cursor.take(count * size, "a custom gate's parameters")
            values = (int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size))
            gates_read.append(CustomGate(name, tuple(values)))
        cursor.end()
        return tuple(gates_read)

    def _read_uses(self, cursor: Cursor) -> int:
        uses = cursor.number("the number of uses")
        for _ in range(uses):
            at, gate = cursor.at, cursor.number("a use's gate")
            if gate >= len(self.custom_gates):
                raise cursor.error(f"custom gate {gate} of {len(self.custom_gates)}", at)
            cursor.take(8 * cursor.number("the number of a use's wires"), "a use's wires")
        cursor.end()
        return uses

    # --- sections ------------------------------------------------------------------------------------------------
    @property
    def labels(self) -> npt.NDArray[np.uint64]:
        """Labels of the wires, (n_wires,), a read-only view of the file."""
        labels: npt.NDArray[np.uint64] = self.array(_LABELS, "<u8", count=self.n_wires)
        return labels

    def matrices(self) -> tuple[Terms, Terms, Terms]:
        """Return copies of A, B and C, each (n,) of TERM in ascending row order.

        Raises:
            FormatError: the linear combinations do not fill the section, a wire is out of range, or a value is not
                below r; names the offset.
            OutOfMemory: the terms and 24 bytes per constraint cannot be allocated.
        """
        try:
            starts = self._combination_starts()
            a, b, c = (self._read_terms(starts[:-1][k::3], starts[1:][k::3]) for k in range(3))
        except MemoryError:
            message = f"the matrices of {self.n_constraints} constraints do not fit in memory"
            raise OutOfMemory(f"{self.path}: {message}; the file has {self.size_bytes} bytes") from None
        return a, b, c

    def check(self) -> None:
        """Validate the constraints; raises as matrices() does."""
        self.matrices()

    def _combination_starts(self) -> npt.NDArray[np.int64]:
        """Return the start of each linear combination and the end of the last, in 32-bit words of the section."""
        section, data = self.sections[_CONSTRAINTS], self.data
        starts = array("q", [0]) * (3 * self.n_constraints + 1)  # the section has 12 bytes for each constraint
        at = 0
        with (
            memoryview(data) as whole,
            whole[section.offset : section.offset + section.size] as part,
            part.cast("I") as words,
        ):
            try:
                for index in range(3 * self.n_constraints):
                    starts[index] = at
                    at += 1 + _TERM_WORDS * words[at]
            except IndexError:
                at = len(words) + 1  # also if the last combination claims more terms than the section has
            starts[-1] = at
            if at > len(words):
                message = f"the section ends within linear combination {index % 3} of constraint {index // 3} of "
                raise self.error(_CONSTRAINTS, 4 * starts[index], f"{message}{self.n_constraints}")
            if at < len(words):
                message = f"{4 * (len(words) - at)} bytes after the last of {self.n_constraints} constraints"
                raise self.error(_CONSTRAINTS, 4 * at, message)
        return np.frombuffer(starts, np.int64)

    def _read_terms(self, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Terms:
        section = self.sections[_CONSTRAINTS]
        counts = (ends - starts) // _TERM_WORDS
        before = np.cumsum(counts) - counts
        entries = np.empty(int(counts.sum()), TERM)
        entries["row"] = np.repeat(np.arange(self.n_constraints, dtype=np.uint32), counts)
        # An element at every 32-bit word, so that terms are gathered by their positions
        places = max(0, (section.size - _IN_FILE.itemsize) // 4 + 1)
        overlapping = np.ndarray((places,), _IN_FILE, self.data, section.offset, (4,))
        for begin in range(0, len(entries), _CHUNK):
            part = entries[begin : begin + _CHUNK]
            rows, index = part["row"], np.arange(begin, begin + len(part))
            positions = starts[rows] + 1 + _TERM_WORDS * (index - before[rows])
            terms = overlapping[positions]
            part["wire"], part["value"] = terms["wire"], terms["value"]
            wrong = terms["wire"] >= self.n_wires
            if wrong.any():
                first = int(wrong.argmax())
                at = 4 * int(positions[first])
                raise self.error(_CONSTRAINTS, at, f"wire {terms['wire'][first]} of {self.n_wires}")
            unreduced = not_below(terms["value"], self._field.modulus)
            if unreduced.size:
                at = 4 * int(positions[unreduced[0]]) + 4
                raise self.error(_CONSTRAINTS, at, f"a value is not below the modulus of {self._field.name}")
        return entries

    def facts(self) -> dict[str, Any]:
        """Return what formats.describe says of the circuit."""
        return {
            "constraints": self.n_constraints, "wires": self.n_wires, "public_inputs": self.n_public,
            "public_outputs": self.n_pub_out, "private_inputs": self.n_prv_in, "labels": self.n_labels,
            "terms": {name: len(terms) for name, terms in zip("ABC", self.matrices(), strict=True)},
            "custom_gates": [gate.name for gate in self.custom_gates], "custom_gate_uses": self.n_custom_gate_uses,
        }  # fmt: skip

    def __repr__(self) -> str:
        sizes = f"{self.n_constraints} constraints, {self.n_wires} wires, {self.n_public} public"
        return f"R1cs({str(self.path)!r}, {self.family}, {sizes})"


def write_r1cs(
    path: FilePath, family: str, *, n_wires: int, n_pub_out: int, n_pub_in: int, n_prv_in: int, n_constraints: int,
    a: Terms, b: Terms, c: Terms, labels: Any = None, n_labels: int | None = None,
) -> None:  # fmt: skip
    """Write an .r1cs file without custom gates, atomically; an existing one is replaced.

    Args:
        n_wires, n_pub_out, n_pub_in, n_prv_in: as for R1cs; the wires of outputs and inputs follow wire 0.
        a, b, c: (n,) of TERM in any order, canonical values, at most one entry per row and wire.
        labels: (n_wires,) uint64; 0, 1, 2, ... by default.
        n_labels: n_wires by default.

    Raises:
        ConfigError: unknown family, impossible sizes, a row or wire out of range, a value not below r, or path does not
            name a regular file.
        ShapeError, UnsupportedDtype: an array of another shape or dtype.
        OSError: the file cannot be written.
    """
    pairing = family_of(family)
    numbers = {"n_wires": n_wires, "n_pub_out": n_pub_out, "n_pub_in": n_pub_in, "n_prv_in": n_prv_in}
    last = {"n_labels": n_wires if n_labels is None else n_labels, "n_constraints": n_constraints}
    for name, value in (numbers | last).items():
        bits = 64 if name == "n_labels" else 32
        if not 0 <= value < 1 << bits:
            raise ConfigError(f"{name} must be 0 to 2^{bits} - 1, got {value}")
    if n_pub_out + n_pub_in >= n_wires:
        raise ConfigError(f"{n_pub_out + n_pub_in} public signals and wire 0 do not fit in {n_wires} wires")
    if n_pub_out + n_pub_in + n_prv_in >= max(n_wires, last["n_labels"]):
        signals = f"{n_pub_out + n_pub_in} public signals, {n_prv_in} private inputs and wire 0"
        raise ConfigError(f"{signals} do not fit in {n_wires} wires and {last['n_labels']} labels")
    wired = np.arange(n_wires, dtype=np.uint64) if labels is None else np.asarray(labels)
    if wired.dtype != np.uint64 or wired.shape != (n_wires,):
        raise ShapeError(f"labels must be ({n_wires},) of uint64, got {wired.shape} of {wired.dtype}")
    header = prime_bytes(pairing, "r") + struct.pack("<IIIIQI", *numbers.values(), *last.values())
    matrices = [
        _sorted_terms(name, terms, n_constraints, n_wires, pairing.r) for name, terms in (("a", a), ("b", b), ("c", c))
    ]
    combinations = _combinations(matrices, n_constraints)
    container.write_container(path, _LAYOUT, {_HEADER: [header], _CONSTRAINTS: [combinations], _LABELS: [wired]})


def _sorted_terms(name: str, terms: Terms, n_constraints: int, n_wires: int, modulus: int) -> Terms:
    """Validate terms and sort them by row, then by wire, as the format requires."""
    if terms.dtype != TERM:
        raise UnsupportedDtype(f"{name} must be {TERM}, got {terms.dtype}")
    if terms.ndim != 1:
        raise ShapeError(f"{name} must be (n,), got {terms.shape}")
    for field, bound in (("row", n_constraints), ("wire", n_wires)):
        if len(terms) and terms[field].max() >= bound:
            raise ConfigError(f"{name} has {field} {terms[field].max()}; they must be below {bound}")
    wrong = not_below(terms["value"], modulus)
    if wrong.size:
        raise ConfigError(f"{name}[{wrong[0]}] has a value that is not below r")
    return terms[np.lexsort((terms["wire"], terms["row"]))]


def _combinations(matrices: list[Terms], n_constraints: int) -> npt.NDArray[np.uint32]:
    """Return the contents of the constraints section as 32-bit words."""
    counts = np.stack([np.bincount(terms["row"], minlength=n_constraints) for terms in matrices], axis=1)
    sizes = 1 + _TERM_WORDS * counts.reshape(-1)
    starts = (np.cumsum(sizes) - sizes).reshape(-1, 3)
    words = np.zeros(int(sizes.sum()), "<u4")
    words[starts.reshape(-1)] = counts.reshape(-1)
    if len(words) <= _TERM_WORDS:  # no term at all
        return words
    overlapping: Terms = np.ndarray((len(words) - _TERM_WORDS + 1,), _IN_FILE, words.data, strides=(4,))
    for k, terms in enumerate(matrices):
        before, rows = np.cumsum(counts[:, k]) - counts[:, k], terms["row"]
        part = np.empty(len(terms), _IN_FILE)
        part["wire"], part["value"] = terms["wire"], terms["value"]
        overlapping[starts[rows, k] + 1 + _TERM_WORDS * (np.arange(len(terms)) - before[rows])] = part
    return words


# --- .wtns -----------------------------------------------------------------------------------------------------------
_WITNESS_HEADER, _VALUES = 1, 2
_WITNESS_LAYOUT = FileFormat(
    "wtns", b"wtns", 2, {_WITNESS_HEADER: "header", _VALUES: "values"}, (_WITNESS_HEADER, _VALUES)
)


class Witness(MappedFile):
    """A memory-mapped .wtns file. Values are secret and appear in no repr or message.

    Attributes:
        family: "bn254" or "bls12_381", from r.
        n_values: number of values, including w[0].
    """

    layout = _WITNESS_LAYOUT

    def _read(self) -> None:
        cursor = self.cursor(_WITNESS_HEADER)
        family = read_family(cursor, "r")
        at, count = cursor.at, cursor.number("the number of values")
        cursor.end()
        self.family, self._field, self.n_values = family.name, family.g1.scalars, count
        self.expect_size(_VALUES, count * self._field.size_bytes, f"{count} values")
        if not count:
            raise cursor.error("no values; expected at least w[0]", at)
        if not _begins_with_one(self.values):
            raise self.error(_VALUES, 0, "w[0] is not 1")

    @property
    def values(self) -> U64:
        """Canonical words (n_values, 4), a read-only view of the file, possibly unaligned."""
        return self.rows(_VALUES, self._field.limbs, count=self.n_values)

    def copy_values(self, first: int, to: U64) -> None:
        """Copy as many values as `to` has rows, from value `first` on; see `copy`."""
        self.copy(_VALUES, first * self._field.size_bytes, to)

    def check(self) -> None:
        """Check that all values are below r; call it before using them. The error names the first one's offset."""
        container.check_below(self, _VALUES, self._field, self.values)

    def facts(self) -> dict[str, Any]:
        """Return what formats.describe says of the witness, which is not its values."""
        return {"values": self.n_values}

    def __repr__(self) -> str:
        return f"Witness({str(self.path)!r}, {self.family}, {self.n_values} values)"


def _begins_with_one(words: U64) -> bool:
    return len(words) > 0 and words[0, 0] == 1 and not words[0, 1:].any()


def write_wtns(path: FilePath, family: str, values: Any) -> None:
    """Write the values (n, 4), uint64, canonical, w[0] = 1, to a .wtns file, atomically, readable by its owner only.

    Raises:
        ConfigError: unknown family, w[0] is not 1, or path does not name a regular file.
        ShapeError, UnsupportedDtype: values of another shape or dtype.
        OSError: the file cannot be written.
    """
    pairing = family_of(family)
    words = container.words_of(values, pairing.g1.scalars.limbs, len(values), "values")
    if not _begins_with_one(words):
        raise ConfigError("values[0] must be 1, the value of wire 0")
    header = prime_bytes(pairing, "r") + struct.pack("<I", len(words))
    container.write_container(path, _WITNESS_LAYOUT, {_WITNESS_HEADER: [header], _VALUES: [words]}, secret=True)
