"""`accelerant zk prove`: what it does, and its arguments where they are plain.

Half of a cold proof's time is start: typer, and pydantic behind it, take 0.15 s of some 0.8. So app.py asks here first
whether the arguments are files and flags, which need no parser; all others, and all mistakes, are typer's (zk.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerant.cli.zk_files import Progress, shown, targets_of, warn, write_all

__all__ = ["plain", "prove_files"]

_FLAGS = {
    "--self-verify": ("self_verify", True),
    "--no-self-verify": ("self_verify", False),
    "--json": ("json_output", True),
}
_FILES = ("circuit.zkey", "witness.wtns", "proof.json", "public.json")
"""What there is of them where fewer are given: the last two have defaults, the first two must be given."""

_LEAST_FILES = 2


def plain(arguments: Sequence[str]) -> Callable[[], None] | None:
    """The proof that arguments ask for, those after `zk prove`; None where typer must read them."""
    flags = [each for each in arguments if each.startswith("-")]
    files = [Path(each) for each in arguments if not each.startswith("-")]
    if not _LEAST_FILES <= len(files) <= len(_FILES) or not all(flag in _FLAGS for flag in flags):
        return None
    zkey, witness, proof, public = [*files, *map(Path, _FILES[len(files) :])]
    given = dict(map(_FLAGS.__getitem__, flags))
    self_verify, json_output = given.get("self_verify", True), given.get("json_output", False)
    return partial(prove_files, zkey, witness, proof, public, self_verify=self_verify, json_output=json_output)


def prove_files(
    zkey: Path,
    witness: Path,
    proof: Path,
    public: Path,
    *,
    self_verify: bool = True,
    json_output: bool = False,
    device: str = "auto",
) -> None:
    """Write a proof and its public inputs, and say what was done; see zk.prove.

    Args:
        zkey, witness: to read.
        proof, public: to write.
        self_verify: verify the proof first.
        json_output: print one JSON object.
        device: as Prover has it; several with commas between.
    """
    targets = targets_of([proof, public], [zkey, witness])
    from accelerant.zk.formats import Zkey
    from accelerant.zk.groth16 import Prover
    from accelerant.zk.groth16.precompile import precompile_kernels

    with Progress(quiet=json_output) as progress:
        with Zkey.open(zkey) as opened:
            precompile_kernels(opened.family, opened.domain_size)
            prover = Prover(opened, device=_devices(device), progress=progress)
        made = prover.prove(witness, verified=self_verify)
    write_all(dict(zip(targets, (made.to_json(), made.public_json()), strict=True)))
    facts: dict[str, Any] = {
        "proof": str(proof),
        "public": str(public),
        "curve": prover.family,
        "public_inputs": prover.n_public,
        "signals": prover.n_vars,
        "domain": prover.domain_size,
        "device": prover.device,
        "verified": self_verify,
        "forgeable": prover.verification_key.forgeable,
        "seconds": prover.timings,
        "device_seconds": prover.spans,
    }
    if json_output:
        print(json.dumps(facts))
        return
    warn(zkey, prover.verification_key.forgeable)
    for stage, seconds in prover.timings.items():
        print(f"{stage:<18} {seconds * 1e3:9.1f} ms")
    print(f"{'all':<18} {sum(prover.timings.values()) * 1e3:9.1f} ms")
    for part, seconds in prover.spans.items():
        print(f"  on {prover.device}, {part:<10} {seconds * 1e3:9.1f} ms")
    checked = "verified, " if self_verify else ""
    print(f"{shown(proof)} and {shown(public)}: {checked}{prover.n_public} public inputs, {prover.family}")


def _devices(text: str) -> str | list[str]:
    names = [name.strip() for name in text.split(",")]
    return names if len(names) > 1 else text
