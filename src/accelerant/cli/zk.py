"""`accelerant zk`: proofs of Groth16 and their files; `zk infer`: proofs of a committed network."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.cli.app import InvalidProofError, write
from accelerant.cli.help import Group, option
from accelerant.cli.zk_prove import (
    StageDisplay,
    prove_files,
    prove_many_files,
    read_texts,
    resolve_targets,
    warn_forgeable,
)
from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.files import clipped, escaped, npy_header, read_regular, write_together

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from accelerant.zk.groth16 import Proof
    from accelerant.zk.inference import IntegerNetwork, ModelCommitment

_MOST_BYTES = 1 << 30  # largest file that is read


def file_arg(metavar: str, text: str) -> Any:
    """Return the declaration of an argument that is a file."""
    return typer.Argument(metavar=metavar, help=text)


_NetworkFile = Annotated[Path, file_arg("NETWORK", "Network with its weights, a file of IntegerNetwork.save.")]
_Commitment = Annotated[Path, file_arg("COMMITMENT", "Commitment to the network, which has no weights.")]
_Input = Annotated[
    Path,
    file_arg("INPUT.NPY", "Input, an int8 array (batch, inputs), or of images (batch, channels, height, width)."),
]
_Output = Annotated[Path, file_arg("OUTPUT.NPY", "Output, an int8 array (batch, outputs), or of images as the input.")]
_InferenceProof = Annotated[Path, file_arg("PROOF", "Proof.")]


def commit(network: _NetworkFile, commitment: _Commitment = Path("commitment"), json_output: _Json = False) -> None:
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


def prove_inference(
    network: _NetworkFile,
    x: _Input,
    y: _Output = Path("output.npy"),
    proof: _InferenceProof = Path("proof"),
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


def verify_inference(
    commitment: _Commitment, x: _Input, y: _Output, proof: _InferenceProof, json_output: _Json = False
) -> None:
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
        prove_inference: "prove network input.npy output.npy proof",
        verify_inference: "verify commitment input.npy output.npy proof && echo accepted",
    },
)


_Zkey = Annotated[Path, file_arg("CIRCUIT.ZKEY", "Proving key, a Groth16 .zkey file.")]
_Witness = Annotated[Path, file_arg("WITNESS.WTNS", "Witness, a .wtns file.")]
_ProofOut = Annotated[Path, file_arg("PROOF.JSON", "Proof to write.")]
_PublicOut = Annotated[Path, file_arg("PUBLIC.JSON", "Public inputs to write.")]
_Key = Annotated[Path, file_arg("VERIFICATION_KEY.JSON", "Verification key of the circuit.")]
_Public = Annotated[Path, file_arg("PUBLIC.JSON", "Public inputs.")]
_Proof = Annotated[Path, file_arg("PROOF.JSON", "Proof.")]
_KeyOut = Annotated[Path, file_arg("VERIFICATION_KEY.JSON", "Verification key to write.")]
_R1cs = Annotated[Path, file_arg("CIRCUIT.R1CS", "Constraints, as written by circom.")]
_ZkeyOut = Annotated[Path, file_arg("CIRCUIT.ZKEY", "Proving key to write.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and no progress.")]


def prove(
    zkey: _Zkey,
    witness: _Witness,
    proof: _ProofOut = Path("proof.json"),
    public: _PublicOut = Path("public.json"),
    verify: bool = option("Verify the proof before it is written.", default=True),
    device: list[str] | None = option(
        "auto, cpu, cuda, cuda:1, opencl; devices of a repeated option share each sum. Default: auto, which "
        "takes a GPU for large circuits, if there is one."
    ),
    json_output: _Json = False,
) -> None:
    """Prove: a key and a witness in, a proof that snarkjs accepts out.

    Nothing is written if the proof does not verify. Both files are on the disk before either takes its name.
    """
    prove_files(zkey, witness, proof, public, verify=verify, device=device or ["auto"], json_output=json_output)


def prove_many(
    zkey: _Zkey,
    witnesses: Annotated[list[Path], file_arg("WITNESS.WTNS...", "Witnesses, .wtns files with different names.")],
    out: Path = option("Folder for NAME.proof.json and NAME.public.json; made if absent.", default=Path()),
    ray: str | None = option("Prove on a Ray cluster: HOST:PORT, ray://HOST:PORT, or auto.", metavar="ADDRESS"),
    workers: int | None = option("Processes; by default one a GPU, or one a host without GPUs.", min=1),
    device: str = option("auto, cpu, cuda or opencl. auto takes GPUs, if there are any.", default="auto"),
    json_output: _Json = False,
) -> None:
    """Prove many witnesses with one key, on all GPUs of this host or of a Ray cluster.

    Each proof is verified and written whole. Valid proofs in the folder are kept, so that a run which was interrupted
    goes on when it is started again. A witness that fails is named with the reason, and the others are proved. What a
    process or node that dies had not finished is proved by another one. On a cluster, key and witnesses must be in a
    folder that all nodes share; proofs are written by this process.

    Exit status 0 if all have a proof, 1 if some witness failed, 2 if nothing could be done.
    """
    prove_many_files(zkey, witnesses, out, ray=ray, workers=workers, device=device, json_output=json_output)


def verify(key: _Key, public: _Public, proof: _Proof, json_output: _Json = False) -> None:
    """Verify a proof: exit status 0 if it is valid, 1 if it is not, 2 if that could not be found out or printed.

    A malformed key, proof or input (no JSON, a number that is not reduced, a point off its curve) is 2.
    """
    from accelerant.zk.groth16 import VerificationKey
    from accelerant.zk.groth16 import verify as verify_proof

    texts = read_texts((key, "a verification key"), (public, "public inputs"), (proof, "a proof"))
    trusted = VerificationKey.from_json(texts[0], name=str(key))
    parsed = _parse_proof(texts[2], texts[1], proof, public, trusted.n_public)
    valid = verify_proof(trusted, parsed.public or (), parsed)
    reason = "" if valid else "the equation of the pairings does not hold"
    if json_output:
        write(json.dumps({"valid": valid, "reason": reason, "forgeable": trusted.forgeable}))
    else:
        warn_forgeable(key, trusted.forgeable)
        write("valid" if valid else f"invalid: {reason}")
    if not valid:
        raise InvalidProofError


def export_vk(zkey: _Zkey, key: _KeyOut = Path("verification_key.json"), json_output: _Json = False) -> None:
    """Write the verification key contained in a proving key, as snarkjs does."""
    (target,) = resolve_targets([key], [zkey])
    from accelerant.zk.groth16 import VerificationKey

    trusted = VerificationKey.from_zkey(zkey)
    write_together({target: trusted.to_json().encode()})
    if json_output:
        sizes = {"curve": trusted.family, "public_inputs": trusted.n_public}
        write(json.dumps({"key": str(key), **sizes, "forgeable": trusted.forgeable}))
    else:
        warn_forgeable(zkey, trusted.forgeable)
        write(f"{escaped(key)}: {trusted.n_public} public inputs, {trusted.family}")


def calldata(public: _Public, proof: _Proof, json_output: _Json = False) -> None:
    """Print the arguments of verifyProof in snarkjs's Solidity verifier."""
    texts = read_texts((public, "public inputs"), (proof, "a proof"))
    text = _parse_proof(texts[1], texts[0], proof, public).to_calldata()
    write(json.dumps({"calldata": json.loads(f"[{text}]")}) if json_output else text)


def verifier(
    key: _Key,
    out: Path = option("Contract to write.", metavar="VERIFIER.SOL", default=Path("verifier.sol")),
    name: str = option("Name of the contract.", default="Groth16Verifier"),
    json_output: _Json = False,
) -> None:
    """Write a Solidity contract that verifies proofs of a circuit, with the interface of snarkjs's verifier.

    Its verifyProof takes what `zk calldata` prints. For BN254 only: Ethereum's precompiled contracts of EIP-196 and
    EIP-197 do the arithmetic.
    """
    (target,) = resolve_targets([out], [key])
    from accelerant.zk.groth16 import VerificationKey

    (text,) = read_texts((key, "a verification key"))
    trusted = VerificationKey.from_json(text, name=str(key))
    write_together({target: trusted.to_solidity(name).encode()})
    if json_output:
        facts = {"contract": str(out), "name": name, "curve": trusted.family, "public_inputs": trusted.n_public}
        write(json.dumps(facts | {"forgeable": trusted.forgeable}))
    else:
        warn_forgeable(key, trusted.forgeable)
        write(f"{escaped(out)}: contract {name}, {trusted.n_public} public inputs, {trusted.family}")


def setup(
    r1cs: _R1cs,
    zkey: _ZkeyOut,
    insecure: bool = option(
        "Confirm that the key is for tests: this run knows its secrets.", "--insecure-known-tau", default=False
    ),
    json_output: _Json = False,
) -> None:
    """Make a proving key for tests and benchmarks, without a ceremony.

    Whoever runs it could prove anything with this key: for real use make a key by a ceremony with snarkjs. The file's
    contributions state how it was made.
    """
    if not insecure:
        raise ConfigError(
            "zk setup makes keys whose secrets are known, for tests and benchmarks: say --insecure-known-tau. "
            "For real use make the key by a ceremony: snarkjs groth16 setup, then zkey contribute"
        )
    resolve_targets([zkey], [r1cs])
    from accelerant.zk.groth16.setup import setup_with_known_tau

    with StageDisplay(quiet=json_output) as progress:
        summary = setup_with_known_tau(r1cs, zkey, progress=progress)
    if json_output:
        write(json.dumps({"zkey": str(zkey), **summary}))
    else:
        write(f"{escaped(zkey)}: {summary['constraints']} constraints, {summary['signals']} signals. For tests only")


def inspect(
    file: Annotated[Path, file_arg("FILE", "A .zkey, .wtns, .r1cs or .ptau file.")],
    check: bool = option(
        "Also check that numbers are reduced and points on their curve and in the subgroup.", default=False
    ),
    json_output: _Json = False,
) -> None:
    """Describe a file of circom or snarkjs: curve, sizes, public inputs, points at infinity, contributions.

    Exit status 2 if the file is malformed; the message names section and offset. Contributions of a ceremony are not
    verified: see snarkjs zkey verify and powersoftau verify.
    """
    from accelerant.zk.formats import describe

    with StageDisplay(quiet=json_output) as progress:
        progress("checking the file" if check else "reading the file")
        facts = describe(file, check=check)
    if json_output:
        write(json.dumps(facts))
        return
    for name, value in facts.items():
        title = name.removesuffix("_bytes").replace("_", " ")
        for i, line in enumerate(_lines(name, value)):
            write(f"{title if i == 0 else '':<18} {line}")


def _lines(name: str, value: Any) -> list[str]:
    match name, value:
        case "points", _:
            return [
                f"{key:<18} {counts['points']:>12,}" + f", {counts['infinite']:,} infinite" * (counts["infinite"] > 0)
                for key, counts in value.items()
            ]
        case "contributions", _:
            return [_contribution(i + 1, **contribution) for i, contribution in enumerate(value)] or ["none"]
        case "size_bytes", _:
            return [f"{value:,} bytes"]
        case _, None:
            return ["no"]
        case _, bool():
            return ["yes" if value else "no"]
        case _, int():
            return [f"{value:,}"]
        case _, dict():
            return [", ".join(f"{key} {count:,}" for key, count in value.items())]
        case _, list():
            return [", ".join(map(escaped, value)) or "none"]
    return [escaped(value) or "none"]


def _contribution(index: int, kind: str, name: str, beacon: str = "", iterations_exp: int | None = None) -> str:
    line = f"{index}  {escaped(name) or '(no name)'}"
    if kind == "beacon":
        line += f"  beacon {beacon}" + ("" if iterations_exp is None else f", hashed 2^{iterations_exp} times")
    return line


def _parse_proof(
    proof_text: bytes, public_text: bytes, proof: Path, public: Path, n_public: int | None = None
) -> Proof:
    from accelerant.zk.groth16 import Proof

    return Proof.from_json(proof_text, public_text, n_public=n_public, name=str(proof), public_name=str(public))


zk = Group(
    "Proofs: Groth16 with snarkjs's files, and proofs of inference.",
    {
        prove: "prove circuit.zkey witness.wtns proof.json public.json",
        prove_many: "prove-many circuit.zkey witnesses/*.wtns --out proofs\n"
        "accelerant zk prove-many circuit.zkey witnesses/*.wtns --out proofs --ray 10.0.0.1:6379",
        verify: "verify verification_key.json public.json proof.json && echo accepted",
        inspect: "inspect circuit.zkey\naccelerant zk inspect circuit.r1cs --json\n"
        "accelerant zk inspect downloaded.zkey --check",
        export_vk: "export-vk circuit.zkey verification_key.json",
        calldata: "calldata public.json proof.json",
        verifier: "verifier verification_key.json --out verifier.sol",
        setup: "setup circuit.r1cs circuit.zkey --insecure-known-tau",
        infer: "infer",
    },
)
