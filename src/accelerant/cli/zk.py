"""`accelerant zk`: Groth16 proofs with the files of circom and snarkjs."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.cli.zk_inspect import EPILOG as INSPECT_EPILOG
from accelerant.cli.zk_inspect import inspect, shown
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

_MOST_BYTES = 64 << 20
"""Of a JSON file that is read: a verification key of 300,000 public inputs has as many."""


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(name="zk", help="Zero-knowledge proofs: Groth16 with snarkjs's files.", no_args_is_help=True)
    group.command(
        "prove",
        epilog="Example:  accelerant zk prove circuit.zkey witness.wtns proof.json public.json",
    )(prove)
    group.command(
        "verify",
        epilog="Example:  accelerant zk verify verification_key.json public.json proof.json && echo accepted",
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
    json_output: _Json = False,
) -> None:
    """Prove: a key and a witness in, a proof that snarkjs accepts out.

    Nothing is written where the proof does not verify. Both files are on the disk before either takes its name.
    """
    targets = _targets([proof, public], [zkey, witness])
    from accelerant.zk.groth16 import Prover

    with _Progress(quiet=json_output) as progress:
        prover = Prover(zkey, progress=progress)
        made = prover.prove(witness, verified=self_verify)
    _write_all(dict(zip(targets, (made.to_json(), made.public_json()), strict=True)))
    facts: dict[str, Any] = {
        "proof": str(proof),
        "public": str(public),
        "curve": prover.family,
        "public_inputs": prover.n_public,
        "signals": prover.n_vars,
        "domain": prover.domain_size,
        "verified": self_verify,
        "forgeable": prover.verification_key.forgeable,
        "seconds": prover.timings,
    }
    if json_output:
        print(json.dumps(facts))
        return
    _warn(zkey, prover.verification_key.forgeable)
    for stage, seconds in prover.timings.items():
        print(f"{stage:<18} {seconds * 1e3:9.1f} ms")
    print(f"{'all':<18} {sum(prover.timings.values()) * 1e3:9.1f} ms")
    checked = "verified, " if self_verify else ""
    print(f"{shown(proof)} and {shown(public)}: {checked}{prover.n_public} public inputs, {prover.family}")


def verify(key: _Key, public: _Public, proof: _Proof, json_output: _Json = False) -> None:
    """Verify a proof: exit status 0 where it is valid, 1 where it is not, 2 where a file cannot be read.

    What is no proof at all (a point off its curve, a number that is not reduced, no JSON) is not valid either.
    """
    from accelerant.zk.groth16 import VerificationKey
    from accelerant.zk.groth16 import verify as verify_proof

    texts = [_text(path) for path in (key, public, proof)]
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
        _warn(key, forgeable)
        print("valid" if valid else f"invalid: {shown(reason)}")
    if not valid:
        raise typer.Exit(1)


def export_vk(zkey: _Zkey, key: _KeyOut = Path("verification_key.json"), json_output: _Json = False) -> None:
    """Write the verification key that a proving key carries, as snarkjs does."""
    targets = _targets([key], [zkey])
    from accelerant.zk.groth16 import VerificationKey

    found = VerificationKey.from_zkey(zkey)
    _write_all({targets[0]: found.to_json()})
    if json_output:
        facts = {"key": str(key), "curve": found.family, "public_inputs": found.n_public, "forgeable": found.forgeable}
        print(json.dumps(facts))
    else:
        _warn(zkey, found.forgeable)
        print(f"{shown(key)}: {found.n_public} public inputs, {found.family}")


def calldata(public: _Public, proof: _Proof, json_output: _Json = False) -> None:
    """Print the arguments of verifyProof in snarkjs's Solidity verifier."""
    text = _proof(_text(proof), _text(public), proof, public).to_calldata()
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
    _targets([zkey], [r1cs])
    from accelerant.zk.groth16.setup import setup_with_known_tau

    with _Progress(quiet=json_output) as progress:
        found = setup_with_known_tau(r1cs, zkey, progress=progress)
    if json_output:
        print(json.dumps({"zkey": str(zkey), **found}))
    else:
        print(f"{shown(zkey)}: {found['constraints']} constraints, {found['signals']} signals. For tests only")


# --- files -----------------------------------------------------------------------------------------------------------


def _targets(targets: list[Path], sources: list[Path]) -> list[Path]:
    """The paths to write, symlinks followed; asked before any work.

    Raises:
        ConfigError: one is in no folder, is there and no regular file, or is another or a source.
    """
    from accelerant.zk.formats.writing import writable_target

    seen = {os.path.realpath(source): "is also to be read" for source in sources}
    for target in targets:
        resolved = str(writable_target(target))
        if resolved in seen:
            raise ConfigError(f"{target} is to be written, and {seen[resolved]}: give another name")
        seen[resolved] = "so is another file"
    return [Path(resolved) for resolved in list(seen)[-len(targets) :]]


def _text(path: Path) -> bytes:
    """What a JSON file has. A pipe that nobody writes to would hang; a device might never end.

    Raises:
        ConfigError: it cannot be read, or is no regular file.
        FormatError: it is larger than any that is read.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path} is no regular file; copy what it gives into one")
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > _MOST_BYTES:
        raise FormatError(f"{path} has more than {_MOST_BYTES >> 20} MiB, as no proof or verification key has")
    return text


def _warn(path: Path, forgeable: str | None) -> None:
    if forgeable is not None:
        print(f"accelerant: warning: {shown(path)}: {forgeable}", file=sys.stderr)


def _proof(proof_text: bytes, public_text: bytes, proof: Path, public: Path) -> Proof:
    from accelerant.zk.groth16 import Proof

    return Proof.from_json(proof_text, public_text, name=str(proof), public_name=str(public))


def _write_all(texts: Mapping[Path, str]) -> None:
    """Write files, each whole: all under other names and on the disk first, then renamed.

    Where a rename fails the files before it are already the new ones.

    Raises:
        OSError: a folder cannot be written, or the disk is full.
    """
    from accelerant.zk.formats.writing import temporary_beside

    temporaries = {path: temporary_beside(path) for path in texts}
    try:
        for path, text in texts.items():
            with temporaries[path].open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


class _Progress:
    """The stage at work, on one line of a terminal's stderr; nothing elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._live = sys.stderr.isatty() and not quiet

    def __call__(self, stage: str) -> None:
        self._show(stage)

    def __enter__(self) -> Callable[[str], None]:
        return self

    def __exit__(self, *_: object) -> None:
        self._show("")

    def _show(self, text: str) -> None:
        if self._live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
