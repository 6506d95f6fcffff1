"""`accelerant zk prove-many`: proofs of many witnesses with one key, on the devices of this host or a Ray cluster.

Workers keep the key and return proofs; this process alone writes them, each once. A run that was interrupted goes on
where it ended: proofs that are there, and valid for the key and the witness's public inputs, are not made again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerant.cli.app import InvalidProofError, write
from accelerant.cli.terminal import ProgressLine
from accelerant.cli.zk_prove import read_json, resolve_targets, warn_forgeable, write_all
from accelerant.config import settings
from accelerant.errors import AccelerantError, ConfigError, FormatError, MissingFile
from accelerant.runtime.files import escaped

if TYPE_CHECKING:
    from accelerant.zk.groth16 import VerificationKey

_LARGEST = 1 << 27
_SUFFIXES = (".proof.json", ".public.json")


def prove_many_files(
    zkey: Path, witnesses: Sequence[Path], out: Path, *, ray: str | None, workers: int | None, device: str,
    json_output: bool,
) -> None:  # fmt: skip
    """Write the proofs of witnesses and print a summary; see zk.prove_many."""
    from accelerant.runtime.jobs import run_jobs
    from accelerant.zk.formats import Zkey
    from accelerant.zk.groth16 import VerificationKey

    start = time.perf_counter()
    if device not in ("auto", "cpu", "cuda", "opencl"):
        raise ConfigError(f"--device must be auto, cpu, cuda or opencl, got {device!r}")
    for witness in witnesses:
        if not witness.is_file():
            raise MissingFile(f"{witness}: no such file")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is not a folder")
    with Zkey.open(zkey) as opened:
        key = VerificationKey.from_zkey(opened)
    if not json_output:
        warn_forgeable(zkey, key.forgeable)
    out.mkdir(parents=True, exist_ok=True)
    names = [out / (witness.name.removesuffix(".wtns") + suffix) for witness in witnesses for suffix in _SUFFIXES]
    targets = resolve_targets(names, [zkey, *witnesses])
    pairs = list(zip(targets[::2], targets[1::2], strict=True))
    backend, devices = _devices(device, on_ray=ray is not None)
    show = (lambda text: None) if json_output else ProgressLine()
    show("checking the proofs that are there")
    todo = [i for i, pair in enumerate(pairs) if not _is_proved(key, witnesses[i], *pair)]
    proved: list[int] = []
    failed: dict[int, str] = {}
    prepare = functools.partial(_prover, str(zkey.absolute()), key.to_json())
    jobs = run_jobs(
        prepare, [str(witnesses[i].absolute()) for i in todo], engine="local" if ray is None else "ray", address=ray,
        backend=backend, devices=devices, workers=workers, whole_host=True, threads=2,
    )  # fmt: skip
    show(f"starting workers for {len(todo)} witnesses" if todo else "")
    with contextlib.redirect_stdout(sys.stderr), contextlib.closing(jobs):  # Ray prints when a node ends
        for outcome in jobs:
            i = todo[outcome.index]
            if outcome.error is None:
                write_all(dict(zip(pairs[i][::-1], outcome.value[::-1], strict=True)))  # renames the proof last
                proved.append(i)
            else:
                failed[i] = str(outcome.error) or type(outcome.error).__name__
            ended, seconds = len(proved) + len(failed), time.perf_counter() - start
            show(f"{ended} of {len(todo)} witnesses, {len(failed)} failed, {ended / seconds:.1f}/s")
    show("")
    skipped = sorted(set(range(len(witnesses))) - set(todo))
    seconds = time.perf_counter() - start
    if json_output:
        files = [
            {"witness": str(witnesses[i]), "proof": str(pair[0]), "public": str(pair[1])}
            for i, pair in enumerate(pairs)
        ]
        errors = [{"witness": str(witnesses[i]), "reason": reason} for i, reason in sorted(failed.items())]
        facts: dict[str, Any] = {"key": str(zkey), "device": backend, "engine": "local" if ray is None else "ray"}
        facts |= {"proved": [files[i] for i in sorted(proved)], "present": [files[i] for i in skipped]}
        write(json.dumps(facts | {"failed": errors, "seconds": seconds, "forgeable": key.forgeable}))
    else:
        for i, reason in sorted(failed.items()):
            write(f"{escaped(witnesses[i])}: {escaped(reason)}")
        there = f", {len(skipped)} were there" if skipped else ""
        write(f"{escaped(out)}: {len(proved)} proofs in {seconds:.1f} s{there}, {len(failed)} failed")
    if failed:
        raise InvalidProofError


def _devices(device: str, *, on_ray: bool) -> tuple[str, int]:
    """Return the backend of the workers, and its devices on this host."""
    if on_ray:  # whose nodes have the devices
        return (settings().backend if device == "auto" else device), 1
    from accelerant.zk.groth16.keys import spaces_of

    (space,) = spaces_of(device, _LARGEST)
    return space.backend, len(space.provider.devices())


def _is_proved(key: VerificationKey, witness: Path, proof: Path, public: Path) -> bool:
    """Return whether there is a valid proof of a witness's public inputs."""
    from accelerant.zk.formats import Witness
    from accelerant.zk.groth16 import Proof, verify

    try:
        if not proof.exists() or not public.exists():
            return False
        with Witness.open(witness) as opened:
            inputs = tuple(int.from_bytes(row.tobytes(), "little") for row in opened.values[1 : 1 + key.n_public])
        parsed = Proof.from_json(read_json(proof), read_json(public), n_public=key.n_public)
        return parsed.public == inputs and verify(key, inputs, parsed)
    except (AccelerantError, OSError):  # made again, or refused by the prover with the reason
        return False


def _prover(zkey: str, verification_key: str) -> Callable[[str], tuple[str, str]]:
    """Return the function of a worker: proof.json and public.json of a witness."""
    from accelerant.zk.groth16 import Prover

    prover = Prover(zkey, device=settings().backend)
    if prover.verification_key.to_json() != verification_key:
        raise FormatError(f"{zkey} is another key on the worker's host")

    def prove(witness: str) -> tuple[str, str]:
        proof = prover.prove(witness)
        return proof.to_json(), proof.public_json()

    return prove
