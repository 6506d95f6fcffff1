"""Summaries of files as JSON values."""

from __future__ import annotations

from typing import Any

from accelerant.errors import FormatError
from accelerant.zk.formats.circuit import R1cs, Witness
from accelerant.zk.formats.container import KINDS, U64, FilePath, Label, MappedFile, count_infinities, regular_file
from accelerant.zk.formats.ptau import Ptau
from accelerant.zk.formats.zkey import Zkey

_FORMATS: tuple[type[MappedFile], ...] = (Zkey, Witness, R1cs, Ptau)


def open_file(path: FilePath) -> MappedFile:
    """Map a file of any supported format, found by its magic number; raises FormatError as describe does."""
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
    """Summarize a file of any supported format; the values of a witness are not included.

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
    match file:
        case Zkey():
            return {
                "protocol": "groth16",
                "constraints": file.n_constraints,
                "signals": file.n_vars,
                "public_inputs": file.n_public,
                "domain_size": file.domain_size,
                "coefficients": file.n_coefficients,
                "points": _points(file.points),
                "circuit_hash": file.circuit_hash.hex(),
                "forgeable": file.forgeable,
                "contributions": [_label(contribution.label) for contribution in file.contributions],
            }
        case Ptau():
            return {
                "power": file.power,
                "ceremony_power": file.ceremony_power,
                "most_constraints": 1 << file.power,
                "prepared": file.prepared,
                "points": _points(file.points),
                "contributions": [_label(contribution.label) for contribution in file.contributions],
            }
        case R1cs():
            return {
                "constraints": file.n_constraints,
                "wires": file.n_wires,
                "public_inputs": file.n_public,
                "public_outputs": file.n_pub_out,
                "private_inputs": file.n_prv_in,
                "labels": file.n_labels,
                "terms": {name: len(terms) for name, terms in zip("ABC", file.matrices(), strict=True)},
                "custom_gates": [gate.name for gate in file.custom_gates],
                "custom_gate_uses": file.n_custom_gate_uses,
            }
        case Witness():
            return {"values": file.n_values}
    return {}


def _points(sections: dict[str, U64]) -> dict[str, dict[str, int]]:
    return {name: {"points": len(words), "infinite": count_infinities(words)} for name, words in sections.items()}


def _label(label: Label) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": KINDS[label.kind], "name": label.name}
    if label.beacon is not None:
        facts["beacon"] = label.beacon.hex()
    if label.iterations_exp is not None:
        facts["iterations_exp"] = label.iterations_exp
    return facts
