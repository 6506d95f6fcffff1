"""`accelerant zk`: Groth16 proofs with the files of circom and snarkjs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.cli.zk_files import Progress, shown, targets_of, text_of, warn, write_all
from accelerant.cli.zk_inspect import EPILOG as INSPECT_EPILOG
from accelerant.cli.zk_inspect import inspect
from accelerant.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from accelerant.zk.groth16 import Proof

__all__ = ["calldata", "export_vk", "prove", "register", "setup", "verify"]

_Zkey = Annotated[Path, typer.Argument(metavar="CIRCUIT.ZKEY", help="The proving key: a Groth16 .zkey file.")]
_Witness = Annotated[Path, typer.Argument(metavar="WITNESS.WTNS", help="The witness: a .wtns file.")]
_ProofOut = Annotated[Path, typer.Argument(metavar="PROOF.JSON", help="Where the proof goes.")]
_PublicOut = Annotated[Path, typer.Argument(metavar="PUBLIC.JSON", help="Where the public inputs go.")]
_Key = Annotated[Path, typer.Argument(metavar="VERIFICATION_KEY.JSON", help="The circuit's verification key.")]
_Public = Annotated[Path, typer.Argument(metavar="PUBLIC.JSON", help="The public inputs.")]
_Proof = Annotated[Path, typer.Argument(metavar="PROOF.JSON", help="The proof.")]
_KeyOut = Annotated[Path, typer.Argument(metavar="VERIFICATION_KEY.JSON", help="Where the verification key goes.")]
_R1cs = Annotated[Path, typer.Argument(metavar="CIRCUIT.R1CS", help="The constraints, as circom writes them.")]
_ZkeyOut = Annotated[Path, typer.Argument(metavar="CIRCUIT.ZKEY", help="Where the proving key goes.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and no progress.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(name="zk", help="Zero-knowledge proofs: Groth16 with snarkjs's files.", no_args_is_help=True)
    group.command("prove", epilog="Example:  accelerant zk prove circuit.zkey witness.wtns proof.json public.json")(
        prove
    )
    group.command(
        "verify", epilog="Example:  accelerant zk verify verification_key.json public.json proof.json && echo accepted"
    )(verify)
    group.command("inspect", epilog=INSPECT_EPILOG)(inspect)
    group.command("export-vk", epilog="Example:  accelerant zk export-vk circuit.zkey verification_key.json")(export_vk)
    group.command("calldata", epilog="Example:  accelerant zk calldata public.json proof.json")(calldata)
    group.command("setup", epilog="Example:  accelerant zk setup circuit.r1cs circuit.zkey --insecure-known-tau")(setup)
    app.add_typer(group)


# --- commands --------------------------------------------------------------------------------------------------------


def prove(
    zkey: _Zkey,
    witness: _Witness,
    proof: _ProofOut = Path("proof.json"),
    public: _PublicOut = Path("public.json"),
    self_verify: Annotated[
        bool, typer.Option("--self-verify/--no-self-verify", help="Verify the proof before it is written.")
    ] = True,
    device: Annotated[
        str,
        typer.Option(
            help="auto, cpu, cuda, cuda:1, opencl; cuda:0,cuda:1 share each sum. "
            "auto: a GPU for large circuits, if it is there."
        ),
    ] = "auto",
    json_output: _Json = False,
) -> None:
    """Prove: a key and a witness in, a proof that snarkjs accepts out.

    Nothing is written where the proof does not verify. Both files are on the disk before either takes its name.
    """
    from accelerant.cli.zk_prove import prove_files

    prove_files(zkey, witness, proof, public, self_verify=self_verify, device=device, json_output=json_output)


def verify(key: _Key, public: _Public, proof: _Proof, json_output: _Json = False) -> None:
    """Verify a proof: exit status 0 where it is valid, 1 where it is not, 2 where a file cannot be read.

    What is no proof at all (a point off its curve, a number that is not reduced, no JSON) is not valid either.
    """
    from accelerant.zk.groth16 import VerificationKey
    from accelerant.zk.groth16 import verify as verify_proof

    texts = [text_of(path) for path in (key, public, proof)]
    forgeable = None
    try:
        parsed = _proof(texts[2], texts[1], proof, public)
        trusted = VerificationKey.from_json(texts[0], name=str(key))
        forgeable = trusted.forgeable
        valid = verify_proof(trusted, parsed.public or (), parsed)
        reason = "" if valid else "the equation of the pairings does not hold"
    except (FormatError, ConfigError) as error:
        valid, reason = False, str(error)
    if json_output:
        print(json.dumps({"valid": valid, "reason": reason, "forgeable": forgeable}))
    else:
        warn(key, forgeable)
        print("valid" if valid else f"invalid: {shown(reason)}")
    if not valid:
        raise typer.Exit(1)


def export_vk(zkey: _Zkey, key: _KeyOut = Path("verification_key.json"), json_output: _Json = False) -> None:
    """Write the verification key that a proving key carries, as snarkjs does."""
    targets = targets_of([key], [zkey])
    from accelerant.zk.groth16 import VerificationKey

    found = VerificationKey.from_zkey(zkey)
    write_all({targets[0]: found.to_json()})
    if json_output:
        facts = {"key": str(key), "curve": found.family, "public_inputs": found.n_public, "forgeable": found.forgeable}
        print(json.dumps(facts))
    else:
        warn(zkey, found.forgeable)
        print(f"{shown(key)}: {found.n_public} public inputs, {found.family}")


def calldata(public: _Public, proof: _Proof, json_output: _Json = False) -> None:
    """Print the arguments of verifyProof in snarkjs's Solidity verifier."""
    text = _proof(text_of(proof), text_of(public), proof, public).to_calldata()
    print(json.dumps({"calldata": json.loads(f"[{text}]")}) if json_output else text)


def setup(
    r1cs: _R1cs,
    zkey: _ZkeyOut,
    insecure: Annotated[
        bool,
        typer.Option("--insecure-known-tau", help="Say that the key is for tests: its secrets were known in this run."),
    ] = False,
    json_output: _Json = False,
) -> None:
    """Make a proving key for tests and benchmarks, without a ceremony.

    Whoever runs it could prove anything with this key: for real use take a ceremony's key, by snarkjs. The file's
    contributions say how it was made.
    """
    if not insecure:
        raise ConfigError(
            "zk setup makes keys whose secrets are known, for tests and benchmarks: say --insecure-known-tau. "
            "For real use make the key by a ceremony: snarkjs groth16 setup, then zkey contribute"
        )
    targets_of([zkey], [r1cs])
    from accelerant.zk.groth16.setup import setup_with_known_tau

    with Progress(quiet=json_output) as progress:
        found = setup_with_known_tau(r1cs, zkey, progress=progress)
    if json_output:
        print(json.dumps({"zkey": str(zkey), **found}))
    else:
        print(f"{shown(zkey)}: {found['constraints']} constraints, {found['signals']} signals. For tests only")


def _proof(proof_text: bytes, public_text: bytes, proof: Path, public: Path) -> Proof:
    from accelerant.zk.groth16 import Proof

    return Proof.from_json(proof_text, public_text, name=str(proof), public_name=str(public))
