"""Files and terminal output of the `accelerant zk` commands, and `zk prove` without typer.

Half the time of a cold proof is start-up: typer and pydantic take 0.15 s of about 0.8. app.py therefore asks `plain`
first whether the arguments are file names and flags, which need no parser; typer (zk.py) handles everything else.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerant.cli.app import write
from accelerant.cli.terminal import COMPILING, ProgressLine
from accelerant.errors import ConfigError
from accelerant.runtime.files import AtomicFile, escaped, read_regular

_MAX_JSON_BYTES = 64 << 20
"""Largest JSON file that is read: a verification key of 300,000 public inputs has that size."""

_HEAD_BYTES = 1024
"""Bytes in which the first character of a JSON text is looked for."""

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
    from accelerant.zk.groth16.precompile import precompile_kernels

    with StageDisplay(quiet=json_output) as progress, watch_compilation(progress.compiling):
        with Zkey.open(zkey) as opened:
            precompile_kernels(opened.family, opened.domain_size)
            where: Any = {"devices": device} if len(device) > 1 else {"device": device[0]}
            prover = Prover(opened, **where, progress=progress)
        result = prover.prove(witness, verify=verify)
    write_all(dict(zip(targets, (result.to_json(), result.public_json()), strict=True)))
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
    """Return the files to write, with symlinks resolved.

    ConfigError if a target's folder does not exist, or it is not a regular file, or a source or another target.
    """
    from accelerant.zk.formats.container import writable_target

    used = {os.path.realpath(source): "is also to be read" for source in sources}
    for target in targets:
        resolved = str(writable_target(target))
        if resolved in used:
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
    """Return the contents of JSON files, given with their kind: a verification key, public inputs or a proof.

    ConfigError as read_json, and where a file is evidently of another kind; it says which order the command takes.
    """
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


def write_all(texts: Mapping[Path, str]) -> None:
    """Write files atomically: all are on the disk under temporary names before the first is renamed.

    If a rename fails, the files before it have been replaced, and OSError is raised.
    """
    with contextlib.ExitStack() as files:
        for path, text in texts.items():
            file = files.enter_context(AtomicFile(path))
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())


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
