"""Files and terminal output of the `accelerant zk` commands, and `zk prove` without typer.

Half the time of a cold proof is start-up, so app.py asks `plain` first whether the arguments need no parser. Workers of
`zk prove-many` return proofs; this process alone writes them. A run that was interrupted goes on where it ended.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerant.cli.app import InvalidProofError, write
from accelerant.cli.terminal import COMPILING, ProgressLine
from accelerant.config import settings
from accelerant.errors import AccelerantError, ConfigError, FormatError, MissingFile
from accelerant.runtime.files import escaped, read_regular, write_together

if TYPE_CHECKING:
    from accelerant.zk.groth16 import VerificationKey

_MAX_JSON_BYTES = 64 << 20  # largest JSON file that is read: a verification key of 300,000 public inputs has that size
_HEAD_BYTES = 1024  # bytes in which the first character of a JSON text is looked for

_FLAGS = {
    "--verify": ("verify", True),
    "--no-verify": ("verify", False),
    "--json": ("json_output", True),
}
_DEFAULT_FILES = ("proof.json", "public.json")
_MIN_FILES, _MAX_FILES = 2, 4


def plain(arguments: Sequence[str]) -> Callable[[], None] | None:
    """Return the proof that the arguments after `zk prove` request; None where typer must parse them."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    files = [Path(argument) for argument in arguments if not argument.startswith("-")]
    if not _MIN_FILES <= len(files) <= _MAX_FILES or "" in arguments or not all(flag in _FLAGS for flag in flags):
        return None
    zkey, witness, proof, public = [*files, *map(Path, _DEFAULT_FILES[len(files) - _MIN_FILES :])]
    options: dict[str, Any] = dict(map(_FLAGS.__getitem__, flags))
    return partial(prove_files, zkey, witness, proof, public, **options)


def prove_files(
    zkey: Path, witness: Path, proof: Path, public: Path, *, verify: bool = True, json_output: bool = False,
    device: Sequence[str] = ("auto",),
) -> None:  # fmt: skip
    """Write a proof and its public inputs, and print a summary; see zk.prove."""
    targets = resolve_targets([proof, public], [zkey, witness])
    from accelerant.runtime.compilation.cache import watch_compilation
    from accelerant.zk.formats import Zkey
    from accelerant.zk.groth16 import Prover
    from accelerant.zk.groth16.prover import precompile_kernels

    with StageDisplay(quiet=json_output) as progress, watch_compilation(progress.compiling):
        with Zkey.open(zkey) as opened:
            precompile_kernels(opened.family, opened.domain_size)
            where: Any = {"devices": device} if len(device) > 1 else {"device": device[0]}
            prover = Prover(opened, **where, progress=progress)
        result = prover.prove(witness, verify=verify)
    texts = result.to_json(), result.public_json()
    write_together({target: text.encode() for target, text in zip(targets, texts, strict=True)})
    facts: dict[str, Any] = {
        "proof": str(proof),
        "public": str(public),
        "curve": prover.family,
        "public_inputs": prover.n_public,
        "signals": prover.n_vars,
        "domain": prover.domain_size,
        "device": prover.device,
        "verified": verify,
        "forgeable": prover.verification_key.forgeable,
        "seconds": prover.timings,
        "device_seconds": prover.spans,
    }
    if json_output:
        write(json.dumps(facts))
        return
    warn_forgeable(zkey, facts["forgeable"])
    stages = {stage: seconds for stage, seconds in prover.timings.items() if not stage.endswith("compile")}
    kernels = sum(seconds for stage, seconds in prover.timings.items() if stage.endswith("compile"))
    for stage, seconds in {progress.kernels: kernels, **stages, "all": kernels + sum(stages.values())}.items():
        write(f"{stage:<24} {seconds * 1e3:9.1f} ms")
    for part, seconds in prover.spans.items():
        write(f"{f'  on {prover.device}, {part}':<24} {seconds * 1e3:9.1f} ms")
    checked = "verified, " if verify else ""
    write(f"{escaped(proof)} and {escaped(public)}: {checked}{prover.n_public} public inputs, {prover.family}")


def resolve_targets(targets: list[Path], sources: list[Path]) -> list[Path]:
    """Return the files to write, with symlinks resolved; ConfigError for one without a folder, or named twice."""
    from accelerant.zk.formats.container import writable_target

    used = {os.path.realpath(source): "is also to be read" for source in sources}
    for target in targets:
        if (resolved := str(writable_target(target))) in used:
            raise ConfigError(f"{target} is to be written, and {used[resolved]}: give another name")
        used[resolved] = "so is another file"
    return [Path(resolved) for resolved in list(used)[-len(targets) :]]


def read_json(path: Path) -> bytes:
    """Return the contents of a JSON file; ConfigError if it cannot be read, or has more than 64 MiB."""
    try:
        return read_regular(path, _MAX_JSON_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def read_texts(*files: tuple[Path, str]) -> list[bytes]:
    """Return the contents of JSON files, given with their kind; ConfigError for one of another kind names the order."""
    texts = [read_json(path) for path, _ in files]
    for (path, wanted), text in zip(files, texts, strict=True):
        is_of = {
            "public inputs": text[:_HEAD_BYTES].lstrip().startswith(b"["),
            "a verification key": b'"vk_alpha_1"' in text,
            "a proof": b'"pi_a"' in text,
        }
        found = next((kind for kind, fits in is_of.items() if fits), wanted)
        if found != wanted and not is_of[wanted]:
            order = ", ".join(kind.removeprefix("a ") for _, kind in files)
            remedy = f": the command takes, in this order, {order}" if len(files) > 1 else ""
            raise ConfigError(f"{path} has {found}, not {wanted}{remedy}")
    return texts


def warn_forgeable(path: Path, reason: str | None) -> None:
    """Warn on stderr that anyone can forge proofs for a key, if a reason is given."""
    if reason is not None:
        print(f"accelerant: warning: {escaped(path)}: {reason}", file=sys.stderr)


class StageDisplay:
    """The current stage, on one line of stderr if it is a terminal."""

    def __init__(self, quiet: bool) -> None:
        self._show: Callable[[str], None] = (lambda text: None) if quiet else ProgressLine(every_s=math.inf)
        self._stage = ""
        self.kernels = "loading kernels"

    def __call__(self, stage: str) -> None:
        """Show the stage that begins."""
        self._stage = stage
        self._show(stage)

    def compiling(self, begins: bool) -> None:
        """Show that a kernel is compiled, instead of the stage; the disk cache has it afterwards."""
        if begins:
            self.kernels = COMPILING
        self._show(COMPILING if begins else self._stage)

    def __enter__(self) -> StageDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self("")


# --- many witnesses ---------------------------------------------------------------------------------------------------
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
                proof, public = (text.encode() for text in outcome.value)
                write_together({pairs[i][1]: public, pairs[i][0]: proof})  # renames the proof last
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
