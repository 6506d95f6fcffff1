"""Private training steps beside steps without privacy: ours, plain PyTorch's and Opacus's, in one run.

A case is a batch of rows of tokens and a model, by default GPT-2 124M with an output layer of its own. Ours is measured
without privacy (TrainStep), privately with noise that is secure and with Philox's, and, where the case has parts, in
virtual steps. All begin with the same numbers and take the same tokens; AdamW updates in every step, and one without
privacy clips the mean gradient, as trainings do. A private row aims at a share of our own speed without privacy, and
at a multiple of its memory.

Masks are full: each draw has exactly the expected size, so that a share compares equal work. Draws of a Poisson sampler
vary by their square root. The ledger is a file, as a training's is; nobody asks it for epsilon here.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from accelerant.bench.ceilings import measure_ceilings
from accelerant.bench.journal import Journal
from accelerant.bench.pieces import Piece, measure_pieces
from accelerant.bench.record import Environment, Record, Row
from accelerant.errors import AccelerantError, ConfigError
from accelerant.nn import GPT, GPTConfig
from accelerant.runtime.provider import ComputeDevice
from benchmarks import dp_noise
from benchmarks.dp_peers import PEERS, peer_step
from benchmarks.dp_steps import (
    BOUND,
    MODEL,
    NOISE,
    WARM_UP,
    Batches,
    Case,
    Found,
    Kind,
    Make,
    Prepared,
    alone,
    in_turns,
    parse_case,
    precision_on,
    private_step,
    without,
)
from benchmarks.training import KernelShare, _flops, kernel_shares

__all__ = ["PEERS", "Case", "cases_on", "measure", "parse_case", "run", "step_by_kernel"]

_OURS = "accelerant"

_SHARES = {
    (64, 1024, "secure"): 0.9, (64, 1024, "Philox"): 0.9, (64, 1024, "parts"): 0.85,
    (16, 1024, "secure"): 0.8, (16, 1024, "Philox"): 0.9, (128, 128, "secure"): 0.75,
}  # fmt: skip
"""Asked on an H200 of GPT-2 124M: the share of our own speed without privacy."""

_CPU_SHARE = 1 / 1.25
_MEMORY, _PARTS_MEMORY = 1.8, 1.3
_OPACUS = "Opacus's noise is Philox's here: its secure mode needs torchcsprng"


def cases_on(where: torch.device) -> tuple[str, ...]:
    """The cases of a device, the most wanted first; "noise" among them."""
    if where.type == "cuda":
        return "64x1024/16", "noise", "16x1024", "128x128"
    return "tiny", "noise"


def run(device: ComputeDevice, **options: object) -> Record:
    """A record of its own; see measure."""
    record = Record(Environment.of(device))
    measure(record, device, **options)  # type: ignore[arg-type]  # its own names
    record.conclude()
    return record


def measure(
    record: Record,
    device: ComputeDevice,
    *,
    cases: Sequence[str] | None = None,
    model: GPTConfig = MODEL,
    draws: int | None = None,
    against: Sequence[str] = PEERS,
    budget_s: float = 2.0,
    journal: Journal | None = None,
    until: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure into a record: ours in the order of the cases, then the peers; on a CPU these take turns with ours.

    Args:
        record: gets ceilings and rows.
        device: where.
        cases: as `parse_case` takes them, or "noise"; by default those of the device.
        model: of the cases that name none; their lengths replace its context.
        draws: of the noise, as a power of two; by default 28 on a GPU and 22 on a CPU.
        against: the peers, of PEERS.
        budget_s: seconds behind each figure.
        journal: gets the rows of each piece as soon as they are there; those that it has are left out.
        until: the time of time.monotonic() after which no further piece is begun.
        progress: told what is measured next.

    Raises:
        ConfigError: a case or a peer that there is none of.
        AccelerantError: a loss that is not finite, or far from the one without privacy; noise of another spread.
    """
    unknown = [name for name in against if name not in PEERS]
    if unknown:
        raise ConfigError(f"no peer {unknown[0]!r} of a private step; there are {', '.join(PEERS)}")
    where = torch.device(device.torch_device)
    named = cases_on(where) if cases is None else cases
    parsed = {name: parse_case(name, model) for name in named if name != "noise"}
    if "matmul TFLOP/s" not in record.ceilings:
        progress("ceilings")
        record.ceilings |= measure_ceilings(where, budget_s=0.3)
    exponent = draws or (28 if where.type == "cuda" else 22)
    together = () if where.type == "cuda" else tuple(against)
    pieces = []
    for name in named:
        if name == "noise":
            pieces += dp_noise.pieces(exponent, where, device, min(budget_s, 0.5))
            continue
        case = parsed[name]
        beside = () if case.config.tied else together  # the peers' model is not
        parts = "" if case.part is None else f", in parts of {case.part} too"
        ours = functools.partial(_ours, case, where, device, budget_s, beside)
        pieces.append(Piece("dp", case.text(", ".join((f"ours{parts}", *beside)), precision_on(where)), ours))
    for case in parsed.values():
        for peer in () if case.config.tied or together else against:
            alone_there = functools.partial(_beside, peer, case, where, budget_s)
            pieces.append(Piece("dp", case.text(peer, precision_on(where)), alone_there))
    measure_pieces(record, pieces, where=where, journal=journal, until=until, progress=progress)
    if any(row.runner.startswith("opacus") for row in record.rows) and _OPACUS not in record.notes:
        record.notes.append(_OPACUS)


# --- ours ------------------------------------------------------------------------------------------------------------


def _ours(
    case: Case, where: torch.device, device: ComputeDevice, budget_s: float, beside: Sequence[str],
    record: Record, progress: Callable[[str], None],
) -> None:  # fmt: skip
    """A step without privacy, and the private ones as shares of it; the peers beside, where all is taken in turns."""
    kinds = [Kind(secure=True), Kind(secure=False)]
    if case.part is not None:
        kinds.insert(1, Kind(secure=True, part=case.part))
    makes: list[Make] = [functools.partial(without, case, where)]
    makes += [functools.partial(private_step, case, kind, where) for kind in kinds]
    peers = [peer for peer in beside if _works(peer, case, where, record)]
    makes += [functools.partial(_peer, peer, case, where) for peer in peers]
    plain: Found | None = None
    what: list[Kind | str | None] = [None, *kinds, *peers]
    for each, one in zip(what, _run(makes, case, where, budget_s, progress), strict=True):
        if isinstance(each, str):
            record.rows.append(_peer_row(each, case, where, one))
        elif each is None or plain is None:
            plain = one
            row = _row(case, "not private", where, plain, _OURS, "gpt step")
            record.rows.append(replace(row, note=_note(case, plain)))
        else:
            _check_losses(case, each, one.losses, plain.losses)
            record.rows.append(_private_row(case, each, where, device, one, plain))


def _run(
    makes: Sequence[Make], case: Case, where: torch.device, budget_s: float, progress: Callable[[str], None]
) -> Iterable[Found]:
    """Each step's figures: on a GPU as they are measured, one after the other; on a CPU in turns."""
    if where.type != "cuda":
        progress(f"{case.name}, in turns")
        yield from in_turns(makes, case, where, budget_s)
        return
    for i, make in enumerate(makes):
        progress(f"{case.name}, {i + 1} of {len(makes)}")
        yield alone(make, case, where, budget_s)


def _private_row(case: Case, kind: Kind, where: torch.device, device: ComputeDevice, found: Found, plain: Found) -> Row:
    how = kind.noise if kind.part is None else f"{kind.noise}, in parts of {kind.part}"
    row = _row(case, how, where, found, _OURS, "private gpt step")
    share = plain.timing.p50_ms / found.timing.p50_ms
    asked = _asked(case, kind, device)
    note = f"{share:.3f} of our speed without privacy" + (f" (asked: {asked:.2f})" if asked else "")
    if found.peak is not None and plain.peak is not None:
        more = _MEMORY if kind.part is None else _PARTS_MEMORY
        note += f", {found.peak / plain.peak:.2f}x its memory"
        if asked:
            note += f" (asked: {more:.2f}x)"
            row = replace(row, target_bytes=int(more * plain.peak))
    note += f"; {_note(case, found)}"
    return replace(row, note=note, target=plain.timing.p50_ms / asked if asked else None)


def _asked(case: Case, kind: Kind, device: ComputeDevice) -> float | None:
    """The share to reach, of what the figures are asked for."""
    if case.preset:
        return _CPU_SHARE if not device.torch_device.startswith("cuda") else None
    if "H200" not in device.name or case.config != replace(MODEL, context=case.config.context):
        return None
    return _SHARES.get((case.batch, case.config.context, kind.asked))


def _check_losses(case: Case, kind: Kind, losses: Sequence[float], plain: Sequence[float]) -> None:
    """That the first is the one without privacy (of virtual steps, that of the last part), and all are finite.

    Raises:
        AccelerantError: they are not.
    """
    near = 0.01 if kind.part is None else 0.1
    if not all(map(math.isfinite, losses)) or abs(losses[0] - plain[0]) > near:
        raise AccelerantError(f"{case.name} {kind.asked}: losses {list(losses)}, without privacy {list(plain)}")


# --- peers -----------------------------------------------------------------------------------------------------------


@contextmanager
def _peer(peer: str, case: Case, where: torch.device) -> Iterator[Prepared]:
    torch.manual_seed(0)
    model = GPT(case.config).to(where)
    step = peer_step(peer, model, precision=precision_on(where), noise=NOISE, bound=BOUND, batch=case.batch)
    del model  # the peer has a copy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus's hooks have torch warn in each step
        yield step, lambda: peer


def _beside(
    peer: str, case: Case, where: torch.device, budget_s: float, record: Record, progress: Callable[[str], None]
) -> None:
    """A peer's step on a GPU that holds nothing else."""
    progress(f"{case.name} {peer}")
    try:
        row = _peer_row(peer, case, where, alone(functools.partial(_peer, peer, case, where), case, where, budget_s))
    except Exception as error:  # noqa: BLE001 - whatever a peer raises, its row says so
        row = _failed(peer, case, where, error)
    record.rows.append(row)


def _works(peer: str, case: Case, where: torch.device, record: Record) -> bool:
    """Whether a peer makes a step; if not, its row says why."""
    try:
        with _peer(peer, case, where) as (step, _):
            step(*Batches.of(case, where).batch(0))
    except Exception as error:  # noqa: BLE001 - as above
        record.rows.append(_failed(peer, case, where, error))
        return False
    return True


def _peer_row(peer: str, case: Case, where: torch.device, found: Found) -> Row:
    op, how = _PLACES[peer == "torch"]
    return replace(_row(case, how, where, found, peer, op), note=_note(case, found))


def _failed(peer: str, case: Case, where: torch.device, error: Exception) -> Row:
    op, how = _PLACES[peer == "torch"]
    note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    return Row("dp", op, case.text(how, precision_on(where)), peer, peer, note=note)


_PLACES = {True: ("gpt step", "not private"), False: ("private gpt step", "Philox")}
"""Op and case of plain PyTorch's rows, and of Opacus's."""


# --- rows ------------------------------------------------------------------------------------------------------------


def _row(case: Case, how: str, where: torch.device, found: Found, runner: str, op: str) -> Row:
    timing, precision = found.timing, precision_on(where)
    return Row(
        "dp", op, case.text(how, precision), runner, found.implementation,
        p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms, samples=found.samples, peak_bytes=found.peak,
        flops=_flops(case.config, case.batch * case.config.context), ceiling="matmul",
        timing="" if where.type == "cuda" else "steps in turns",
    )  # fmt: skip


def _note(case: Case, found: Found) -> str:
    first = " ".join(f"{loss:.4f}" for loss in found.losses)
    return f"{1e3 * case.batch * case.config.context / found.timing.p50_ms:,.0f} tokens/s, first losses {first}"


# --- by kernel -------------------------------------------------------------------------------------------------------


def step_by_kernel(device: ComputeDevice, case: Case, *, secure: bool = True) -> list[KernelShare]:
    """A captured private step of ours on a GPU, by kernel."""
    where = torch.device(device.torch_device)
    with private_step(case, Kind(secure, case.part), where) as (step, _):
        data = Batches.of(case, where)
        for i in range(WARM_UP):
            step(*data.batch(i))
        return kernel_shares(lambda: step(*data.batch(0)))
