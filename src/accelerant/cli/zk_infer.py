"""`accelerant zk infer`: proofs that a committed network maps an input to an output."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.cli.app import InvalidProofError, write
from accelerant.cli.help import Group
from accelerant.cli.zk_prove import StageDisplay, resolve_targets
from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.files import clipped, escaped, npy_header, read_regular, write_together

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from accelerant.zk.inference import IntegerNetwork, ModelCommitment

_MOST_BYTES = 1 << 30  # largest file that is read


def file_arg(metavar: str, text: str) -> Any:
    """Return the declaration of an argument that is a file."""
    return typer.Argument(metavar=metavar, help=text)


_Network = Annotated[Path, file_arg("NETWORK", "Network with its weights, a file of IntegerNetwork.save.")]
_Commitment = Annotated[Path, file_arg("COMMITMENT", "Commitment to the network, which has no weights.")]
_Input = Annotated[
    Path,
    file_arg("INPUT.NPY", "Input, an int8 array (batch, inputs), or of images (batch, channels, height, width)."),
]
_Output = Annotated[Path, file_arg("OUTPUT.NPY", "Output, an int8 array (batch, outputs), or of images as the input.")]
_Proof = Annotated[Path, file_arg("PROOF", "Proof.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and no progress.")]


def commit(network: _Network, commitment: _Commitment = Path("commitment"), json_output: _Json = False) -> None:
    """Write the commitment to a network, which verifiers need. It is not hiding: small networks can be guessed."""
    (target,) = resolve_targets([commitment], [network])
    from accelerant.zk.inference import Prover

    with StageDisplay(quiet=json_output) as progress:
        loaded = _network(network)
        progress(_committing(loaded))
        published = Prover(loaded).commitment
    write_together({target: published.to_bytes()})
    if json_output:
        write(json.dumps({"commitment": str(commitment), **_facts(published)}))
    else:
        write(f"{escaped(commitment)}: {published.network.widths}, digest {published.digest.hex()}")


def prove(
    network: _Network,
    x: _Input,
    y: _Output = Path("output.npy"),
    proof: _Proof = Path("proof"),
    json_output: _Json = False,
) -> None:
    """Write the output of a network for an input, and the proof of it, which is not zero-knowledge.

    The proof is verified before both are written.
    """
    targets = resolve_targets([y, proof], [network, x])
    import numpy as np

    from accelerant.zk.inference import Prover, check, proof_memory_bytes

    with StageDisplay(quiet=json_output) as progress:
        loaded = _network(network)
        array = _array(x, loaded.network.layers[0].input_shape)
        progress(_committing(loaded))
        prover = Prover(loaded)
        progress(f"prove: {proof_memory_bytes(loaded.network, len(array)) >> 20:,} MiB of memory")
        output, data = prover.prove(array)
        progress("verify")
        check(prover.commitment, array, output, data)
    file = io.BytesIO()
    np.save(file, output, allow_pickle=False)
    write_together(dict(zip(targets, (file.getvalue(), data), strict=True)))
    if json_output:
        facts = {"output": str(y), "proof": str(proof), "proof_bytes": len(data), **_facts(prover.commitment)}
        write(json.dumps(facts))
    else:
        write(f"{escaped(y)} and {escaped(proof)}: verified, {len(data):,} bytes, {loaded.network.widths}")


def verify(commitment: _Commitment, x: _Input, y: _Output, proof: _Proof, json_output: _Json = False) -> None:
    """Verify that the committed network maps the input to the output.

    Exit status 0 if the proof shows it, 1 if it does not, 2 if that could not be found out: a file that cannot be read,
    or a commitment, input or output that is malformed.
    """
    from accelerant.zk.inference import ModelCommitment, RejectedProofError, check

    published = _read(commitment)
    try:
        trusted = ModelCommitment(published)
    except FormatError as error:
        raise FormatError(f"{commitment}: {error}") from None
    layers = trusted.network.layers
    arrays = _array(x, layers[0].input_shape), _array(y, layers[-1].output_shape)
    reason = ""
    try:
        check(trusted, *arrays, _read(proof))
    except RejectedProofError as error:
        reason = str(error)
    if json_output:
        statement = {"input": arrays[0].tolist(), "output": arrays[1].tolist()}
        write(json.dumps({"valid": not reason, "reason": reason, **_facts(trusted), **statement}))
    elif reason:
        write(f"invalid: {reason}")
    else:
        x_text, y_text = (_shown(array) for array in arrays)
        write(
            f"valid: the network {trusted.network.widths} with digest {trusted.digest.hex()} maps {x_text} to {y_text}"
        )
    if reason:
        raise InvalidProofError


def _committing(network: IntegerNetwork) -> str:
    """Return the text of a stage, with the memory that it is predicted to take."""
    from accelerant.zk.inference import commitment_memory_bytes

    return f"commit to the weights: {commitment_memory_bytes(network.network) >> 20:,} MiB of memory"


def _facts(commitment: ModelCommitment) -> dict[str, Any]:
    return {"network": commitment.network.widths, "digest": commitment.digest.hex(), "zero_knowledge": False}


def _shown(array: npt.NDArray[np.int8], most: int = 16) -> str:
    """Return an array as text: the first numbers of the first row, and its shape where that is not all."""
    text = ", ".join(map(str, array[0].reshape(-1)[:most].tolist()))
    if array.size <= most and len(array) == 1:
        return f"[{text}]"
    return f"[{text}, ...] of shape {'x'.join(map(str, array.shape))}"


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _network(path: Path) -> IntegerNetwork:
    from accelerant.zk.inference import IntegerNetwork

    data = _read(path)
    try:
        return IntegerNetwork.from_bytes(data)
    except (ConfigError, FormatError) as error:
        raise FormatError(f"{path}: {error}") from None


def _array(path: Path, shape: tuple[int, int, int]) -> npt.NDArray[np.int8]:
    """Read an int8 array (batch, *shape) or (batch, numbers) of a .npy file; its size is that of the file."""
    import numpy as np

    data = _read(path)
    file = io.BytesIO(data)
    try:
        announced, fortran, dtype = npy_header(file)
    except ValueError as error:
        raise FormatError(f"{path} is no .npy file: {str(error).splitlines()[0]}") from None
    if dtype != np.int8:
        raise FormatError(
            f"{path} has {str(dtype)[:80]}, not int8: divide real numbers by the network's input_scale and round"
        )
    array, numbers = np.frombuffer(data, np.int8, offset=file.tell()), math.prod(shape)
    if math.prod(announced) != len(array):
        raise FormatError(f"{path} announces the shape {clipped(announced)}, and has {len(array)} numbers")
    if not announced or announced[0] < 1 or announced[1:] not in ((numbers,), shape):
        either = "" if shape[1:] == (1, 1) else f" or (batch, {', '.join(map(str, shape))})"
        raise FormatError(
            f"{path} has the shape {clipped(announced)}; this network needs (batch, {numbers}){either}"
            ", with a batch of at least 1"
        )
    return array.reshape(announced, order="F" if fortran else "C")


infer = Group(
    "Proofs that a committed network of 8-bit integers maps an input to an output; not zero-knowledge.",
    {
        commit: "commit network commitment",
        prove: "prove network input.npy output.npy proof",
        verify: "verify commitment input.npy output.npy proof && echo accepted",
    },
)
