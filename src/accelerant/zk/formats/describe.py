"""Summaries of files as JSON values."""

from __future__ import annotations

from typing import Any

from accelerant.errors import FormatError
from accelerant.zk.formats.circuit import R1cs, Witness
from accelerant.zk.formats.container import FilePath, MappedFile, regular_file
from accelerant.zk.formats.elements import KINDS, U64, Label, count_infinities
from accelerant.zk.formats.ptau import Ptau
from accelerant.zk.formats.zkey import Zkey

__all__ = ["describe", "open_file"]

_FORMATS: tuple[type[MappedFile], ...] = (Zkey, Witness, R1cs, Ptau)


def open_file(path: FilePath) -> MappedFile:
    """Map a file of any supported format, detected by its magic number.

    Raises:
        FormatError: unknown format, or an inconsistent file.
    """
    source = regular_file(path)
    try:
        with source.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise FormatError(f"cannot read {source}: {error.strerror or error}") from None
    for file_class in _FORMATS:
        if file_class.layout.magic == magic:
            return file_class.open(source)
    kinds = ", ".join(f".{known.layout.kind}" for known in _FORMATS)
    raise FormatError(f"{source} begins with {magic!r}, which is the magic number of none of {kinds}")


def describe(path: FilePath, *, check: bool = False) -> dict[str, Any]:
    """Summarise a file of any supported format; the values of a witness are not included.

    Args:
        path: file to read; all of it is read.
        check: also call the file's check().

    Returns:
        JSON values: file, kind, size_bytes, curve, checked, and by kind sizes, contributions and, for each section of
        points, the number of points and of points at infinity. For a key, `forgeable` says why its proofs can be
        forged, if they can (Zkey.forgeable). Public inputs are those of the proof, which include the outputs of the
        circuit.

    Raises:
        FormatError: unknown format, or an inconsistent file.
    """
    with open_file(path) as file:
        if check:
            file.check()
        return {
            "file": str(file.path),
            "kind": file.layout.kind,
            "size_bytes": file.size_bytes,
            "curve": file.family,
            **_facts(file),
            "checked": check,
        }


def _facts(file: MappedFile) -> dict[str, Any]:
    if isinstance(file, Zkey):
        return _zkey(file)
    if isinstance(file, Ptau):
        return _ptau(file)
    if isinstance(file, R1cs):
        return _r1cs(file)
    return {"values": file.n_values} if isinstance(file, Witness) else {}


def _zkey(key: Zkey) -> dict[str, Any]:
    return {
        "protocol": "groth16",
        "constraints": key.n_constraints,
        "signals": key.n_vars,
        "public_inputs": key.n_public,
        "domain_size": key.domain_size,
        "coefficients": key.n_coefficients,
        "points": _points(key.points),
        "circuit_hash": key.circuit_hash.hex(),
        "forgeable": key.forgeable,
        "contributions": [_label(contribution.label) for contribution in key.contributions],
    }


def _ptau(powers: Ptau) -> dict[str, Any]:
    return {
        "power": powers.power,
        "ceremony_power": powers.ceremony_power,
        "most_constraints": 1 << powers.power,
        "prepared": powers.prepared,
        "points": _points(powers.points),
        "contributions": [_label(contribution.label) for contribution in powers.contributions],
    }


def _r1cs(circuit: R1cs) -> dict[str, Any]:
    matrices = circuit.matrices()
    return {
        "constraints": circuit.n_constraints,
        "wires": circuit.n_wires,
        "public_inputs": circuit.n_public,
        "public_outputs": circuit.n_pub_out,
        "private_inputs": circuit.n_prv_in,
        "labels": circuit.n_labels,
        "terms": {name: len(terms) for name, terms in zip("ABC", matrices, strict=True)},
        "custom_gates": [gate.name for gate in circuit.custom_gates],
        "custom_gate_uses": circuit.n_custom_gate_uses,
    }


def _points(sections: dict[str, U64]) -> dict[str, dict[str, int]]:
    return {name: {"points": len(words), "infinite": count_infinities(words)} for name, words in sections.items()}


def _label(label: Label) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": KINDS[label.kind], "name": label.name}
    if label.beacon is not None:
        facts["beacon"] = label.beacon.hex()
    if label.iterations_exp is not None:
        facts["iterations_exp"] = label.iterations_exp
    return facts
