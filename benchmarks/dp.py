"""Private training steps compared with steps without privacy, ours, plain PyTorch's and Opacus's; and noise alone.

    python -m benchmarks.dp --case 64x1024/16 --against torch --against opacus

A case is a batch of rows of tokens and a model, by default GPT-2 124M with an output layer of its own. Ours is
measured without privacy (TrainStep), privately with secure noise and with Philox's, and, where the case has parts, in
virtual steps. All start from the same weights and take the same tokens; AdamW updates in each step, and one without
privacy clips the mean gradient. The targets of a private row are a share of our own speed without privacy, and a
multiple of its memory. Masks are full: each draw has exactly the expected size, so that a share compares equal work.
Draws of a Poisson sampler vary by their square root. The ledger is a file, as in training; epsilon is not computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

import torch

from accelerant.bench.record import Row, failure_note
from accelerant.bench.suite import CpuColumn, Suite, SuiteCase, SuiteRun, option
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, ConfigError
from accelerant.nn import GPTConfig
from accelerant.runtime.provider import ComputeDevice
from benchmarks.dp_steps import (
    GPT2_UNTIED,
    PEERS,
    PrivateCase,
    PrivateKind,
    StepMaker,
    StepResult,
    parse_case,
    peer_step,
    precision_on,
    private_loop_step,
    private_step,
    run_alone,
    run_in_turns,
    step_without_privacy,
)
from benchmarks.gpt_steps import Step, TokenBatches, cpu_step_ms, step_flops
from benchmarks.noise import measure_noise

__all__ = ["DpSuite"]

_OURS = "accelerant"

_SHARES = {
    (64, 1024, "secure"): 0.9, (64, 1024, "Philox"): 0.9, (64, 1024, "parts"): 0.85,
    (16, 1024, "secure"): 0.8, (16, 1024, "Philox"): 0.9, (128, 128, "secure"): 0.75,
}  # fmt: skip
"""Targets of GPT-2 124M on an H200: the share of our own speed without privacy, by batch, length and kind."""

_LOOP_SHARES = {
    (64, 256, "secure"): 0.85, (64, 256, "Philox"): 0.9, (16, 1024, "secure"): 0.9, (16, 1024, "Philox"): 0.93,
}  # fmt: skip
"""The same of plain modules in a loop: the share of the same loop's speed without privacy."""

_CPU_SHARE = 1 / 1.25
_MEMORY, _PARTS_MEMORY = 1.8, 1.3

_OPACUS_NOTE = "Opacus's noise is Philox's here: its secure mode needs torchcsprng"


@dataclass(frozen=True)
class DpSuite(Suite):
    """Measure private steps of GPT-2 124M: time, memory, share of the speed without privacy; and noise alone."""

    name = "dp"
    examples = (
        "",
        "--case 64x1024/16 --against none",
        "--case noise",
        "--device cpu --out folder --max-seconds 120",
    )

    case: tuple[str, ...] | None = option(
        None, "BATCHxLENGTH, BATCHxLENGTH/PART with virtual batches of PART rows, 'BATCHxLENGTH loop' of plain modules "
        "in an ordinary loop, tiny (the preset), or noise; may be repeated. By default on a GPU 64x1024/16, noise, "
        "16x1024, 128x128, 64x256 loop, 16x1024 loop; on a CPU tiny, noise.",
    )  # fmt: skip
    against: tuple[str, ...] = option(
        ("torch", "opacus"), "Peers: torch (plain, not private), opacus (opacus ghost, opacus fast, opacus hooks), "
        "or none. One that is absent leaves a row that says so.", same=True,
    )  # fmt: skip
    layers: int = option(12, "Layers of the model; the defaults are GPT-2 124M's.", min=1, same=True)
    width: int = option(768, "Width of the model; a head has 64 of it.", min=1, same=True)
    vocab: int = option(50304, "Tokens that the model knows.", min=1, same=True)
    draws: int | None = option(None, "Draws of noise, as a power of two. By default 28; on a CPU 22.", min=10, max=32)
    budget_s: float = option(2.0, "Seconds of steps behind each figure.", min=0.0, same=True)

    @property
    def model(self) -> GPTConfig:
        """The model of cases that do not name one."""
        return GPTConfig(self.vocab, 1024, self.layers, max(1, self.width // 64), self.width, tied=False)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with the device's cases and single peers.

        Raises:
            ConfigError: an unknown peer, or a text that is not a case.
        """
        peers: list[str] = []
        for name in self.against:
            known = [peer for peer in PEERS if name in (peer, peer.split()[0])]
            if not known:
                raise ConfigError(f"--against: no peer {name!r}; there are {', '.join(PEERS)}")
            peers += [peer for peer in known if peer not in peers]
        gpu = device.torch_device.startswith("cuda")
        on_gpu = ("64x1024/16", "noise", "16x1024", "128x128", "64x256 loop", "16x1024 loop")
        case = self.case or (on_gpu if gpu else ("tiny", "noise"))
        for text in case:
            if text != "noise":
                parse_case(text, self.model)
        return replace(self, case=case, against=tuple(peers), draws=self.draws or (28 if gpu else 22))

    def prepare(self, run: SuiteRun) -> None:
        """Measure the ceilings."""
        run.require_ceiling("matmul")

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return ours in the order of the cases, then the peers; on a CPU peers are part of our cases."""
        precision, in_turns = precision_on(run.torch_device), not run.gpu
        parsed = {text: parse_case(text, self.model) for text in self.case or () if text != "noise"}
        cases = []
        for text in self.case or ():
            if text == "noise":
                budget = min(self.budget_s, 0.5)
                measure = functools.partial(measure_noise, 1 << (self.draws or 22), budget)
                cases.append(SuiteCase(f"noise 2^{self.draws}", measure))
                continue
            case = parsed[text]
            if case.loop:
                measure = functools.partial(_measure_loop, case, self.budget_s)
                cases.append(SuiteCase(case.text("with and without privacy", precision), measure))
                continue
            peers = self.against if in_turns and not case.config.tied else ()
            parts = "" if case.part is None else f", in parts of {case.part} too"
            key = case.text(", ".join((f"ours{parts}", *peers)), precision)
            measure = functools.partial(_measure_ours, case, self.budget_s, peers)
            cases.append(SuiteCase(key, measure, on_cpu=functools.partial(_on_cpu, case)))
        for case in parsed.values():
            for peer in () if case.config.tied or in_turns or case.loop else self.against:
                measure = functools.partial(_measure_peer, peer, case, self.budget_s)
                cases.append(SuiteCase(case.text(peer, precision), measure))
        return cases

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of one of the cases."""
        names = {parse_case(text).name for text in self.case or () if text != "noise"}
        noise = "noise" in (self.case or ()) and row.op in ("noise", "keystream")
        return row.suite == self.name and (noise or row.case.split()[0] in names)

    def measure(self, run: SuiteRun) -> None:
        """Measure all cases; a note says which noise Opacus has."""
        try:
            super().measure(run)
        finally:
            opacus = any(row.runner.startswith("opacus") for row in run.record.rows)
            if opacus and _OPACUS_NOTE not in run.record.notes:
                run.record.notes.append(_OPACUS_NOTE)


def _on_cpu(case: PrivateCase, run: SuiteRun) -> CpuColumn:
    """Return the CPU's times of a step without privacy and of private ones, extrapolated from few tokens."""
    where, column = run.torch_device, dict[tuple[str, str], tuple[float, str]]()
    kinds = (None, PrivateKind(secure=True), PrivateKind(secure=False))
    for kind in kinds:
        with ExitStack() as stack:

            def step_of(config: GPTConfig, kind: PrivateKind | None = kind, stack: ExitStack = stack) -> Step:
                small = replace(case, batch=1, config=config, part=None)
                made = step_without_privacy(small, where) if kind is None else private_step(small, kind, where)
                return stack.enter_context(made)[0]

            found = cpu_step_ms(step_of, case.config, case.batch)
        op, variant = ("gpt step", "not private") if kind is None else ("private gpt step", kind.noise)
        column[op, case.text(variant, torch.bfloat16)] = found
    return column


# --- steps -----------------------------------------------------------------------------------------------------------


def _measure_ours(case: PrivateCase, budget_s: float, peers: Sequence[str], run: SuiteRun) -> None:
    """Measure a step without privacy and the private ones; on a CPU in turns with the peers' steps.

    Raises:
        AccelerantError: a loss is not finite, or far from the one without privacy.
    """
    where = run.torch_device
    kinds = [PrivateKind(secure=True), PrivateKind(secure=False)]
    if case.part is not None:
        kinds.insert(1, PrivateKind(secure=True, part=case.part))
    working = [peer for peer in peers if _works(peer, case, run)]
    makers: list[StepMaker] = [functools.partial(step_without_privacy, case, where)]
    makers += [functools.partial(private_step, case, kind, where) for kind in kinds]
    makers += [functools.partial(peer_step, peer, case, where) for peer in working]
    results = iter(_results(makers, case, budget_s, run))
    plain = next(results)
    row = _row(case, "not private", where, plain, _OURS, "gpt step")
    run.add(replace(row, note=_note(case, plain)))
    for kind, result in zip(kinds, results, strict=False):
        _check_losses(case, kind, result.losses, plain.losses)
        run.add(_private_row(case, kind, run, result, plain))
    for peer, result in zip(working, results, strict=True):
        run.add(_peer_row(peer, case, where, result))


def _measure_loop(case: PrivateCase, budget_s: float, run: SuiteRun) -> None:
    """Measure an ordinary loop over plain modules, with privacy and without, in turns.

    Raises:
        AccelerantError: a loss is not finite, or far from the one without privacy.
    """
    where, kinds = run.torch_device, [PrivateKind(secure=True), PrivateKind(secure=False)]
    run.progress(f"{case.name}, a loop over plain modules, in turns")
    makers: list[StepMaker] = [functools.partial(peer_step, "torch", case, where)]
    makers += [functools.partial(private_loop_step, case, kind, where) for kind in kinds]
    plain, *private = run_in_turns(makers, case, where, budget_s)
    run.add(_peer_row("torch", case, where, plain))
    for kind, result in zip(kinds, private, strict=True):
        _check_losses(case, kind, result.losses, plain.losses)
        run.add(_private_row(case, kind, run, result, plain))


def _results(makers: Sequence[StepMaker], case: PrivateCase, budget_s: float, run: SuiteRun) -> Iterable[StepResult]:
    """Yield each step's figures: on a GPU as they are measured, one after the other; on a CPU in turns."""
    if not run.gpu:
        run.progress(f"{case.name}, in turns")
        yield from run_in_turns(makers, case, run.torch_device, budget_s)
        return
    for i, make in enumerate(makers):
        run.progress(f"{case.name}, {i + 1} of {len(makers)}")
        yield run_alone(make, case, run.torch_device, budget_s)


def _check_losses(case: PrivateCase, kind: PrivateKind, losses: Sequence[float], plain: Sequence[float]) -> None:
    near = 0.01 if kind.part is None else 0.1  # the loss of virtual steps is that of the last part
    if not all(map(math.isfinite, losses)) or abs(losses[0] - plain[0]) > near:
        raise AccelerantError(f"{case.name} {kind.target_key}: losses {losses}, without privacy {plain}")


def _private_row(case: PrivateCase, kind: PrivateKind, run: SuiteRun, result: StepResult, plain: StepResult) -> Row:
    variant = kind.noise if kind.part is None else f"{kind.noise}, in parts of {kind.part}"
    row = _row(case, variant, run.torch_device, result, _OURS, "private gpt step")
    share = plain.timing.p50_ms / result.timing.p50_ms
    target = _target_share(case, kind, run)
    whose = "torch's" if case.loop else "our"
    note = f"{share:.3f} of {whose} speed without privacy" + (f" (asked: {target:.2f})" if target else "")
    if result.peak is not None and plain.peak is not None:
        most = _MEMORY if kind.part is None else _PARTS_MEMORY
        note += f", {result.peak / plain.peak:.2f}x its memory"
        if target:
            note += f" (asked: {most:.2f}x)"
            row = replace(row, target_bytes=int(most * plain.peak))
    note += f"; {_note(case, result)}"
    return replace(row, note=note, target=plain.timing.p50_ms / target if target else None)


def _target_share(case: PrivateCase, kind: PrivateKind, run: SuiteRun) -> float | None:
    """Return the share of our own speed to reach, where there is a target."""
    if case.preset:
        return None if run.gpu else _CPU_SHARE
    if not run.is_model("H200") or case.config != replace(GPT2_UNTIED, context=case.config.context):
        return None
    shares = _LOOP_SHARES if case.loop else _SHARES
    return shares.get((case.batch, case.config.context, kind.target_key))


def _measure_peer(peer: str, case: PrivateCase, budget_s: float, run: SuiteRun) -> None:
    """Measure a peer's step on a GPU that holds nothing else."""
    run.progress(f"{case.name} {peer}")
    where = run.torch_device
    try:
        result = run_alone(functools.partial(peer_step, peer, case, where), case, where, budget_s)
        row = _peer_row(peer, case, where, result)
    except Exception as error:  # noqa: BLE001 - whatever a peer raises, its row says so
        row = _failed_row(peer, case, where, error)
    run.add(row)


def _works(peer: str, case: PrivateCase, run: SuiteRun) -> bool:
    """Return whether a peer makes a step; if not, add the row that says why."""
    where = run.torch_device
    try:
        with peer_step(peer, case, where) as (step, _):
            step(*TokenBatches.drawn(case.config, case.batch, where, contiguous=True).batch(0))
    except Exception as error:  # noqa: BLE001 - as above
        run.add(_failed_row(peer, case, where, error))
        return False
    return True


_PEER_ROW = {True: ("gpt step", "not private"), False: ("private gpt step", "Philox")}
"""Op and variant of the rows of plain PyTorch (True) and of Opacus."""


def _peer_row(peer: str, case: PrivateCase, where: torch.device, result: StepResult) -> Row:
    op, variant = _PEER_ROW[peer == "torch"]
    return replace(_row(case, variant, where, result, peer, op), note=_note(case, result))


def _failed_row(peer: str, case: PrivateCase, where: torch.device, error: Exception) -> Row:
    op, variant = _PEER_ROW[peer == "torch"]
    return Row("dp", op, case.text(variant, precision_on(where)), peer, peer, note=failure_note(error))


def _row(case: PrivateCase, variant: str, where: torch.device, result: StepResult, runner: str, op: str) -> Row:
    row = Row(
        "dp", op, case.text(variant, precision_on(where)), runner, result.implementation, peak_bytes=result.peak,
        flops=step_flops(case.config, case.batch * case.config.context), ceiling="matmul",
        timing="" if where.type == "cuda" else "steps in turns",
    )  # fmt: skip
    return replace(row.timed(result.timing), samples=result.samples)


def _note(case: PrivateCase, result: StepResult) -> str:
    first = " ".join(f"{loss:.4f}" for loss in result.losses)
    return f"{1e3 * case.batch * case.config.context / result.timing.p50_ms:,.0f} tokens/s, first losses {first}"


if __name__ == "__main__":
    run_command(DpSuite)
