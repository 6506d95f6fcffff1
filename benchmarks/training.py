"""A training step of GPT-2 124M: ours, plain PyTorch eagerly, and plain PyTorch under torch.compile, in one run.

All three take the same tokens, start from the same numbers in shape and spread, compute under bfloat16 autocast with
float32 parameters, clip the gradient and update with AdamW. A row has the time of a step, the most memory that was
allocated and, in its note, tokens a second, the memory reserved, and the losses of the first steps. Where the device
has fp8, ours is measured in it too, as a case of its own without peers.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerant.bench.ceilings import measure_ceilings
from accelerant.bench.journal import Journal
from accelerant.bench.pieces import Piece, measure_pieces
from accelerant.bench.record import Environment, Record, Row
from accelerant.bench.timer import Timing
from accelerant.errors import AccelerantError, ConfigError
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.optim import AdamW
from accelerant.nn.train.step import TrainStep
from accelerant.ops.linear_fp8.op import refuses_device
from accelerant.runtime.provider import ComputeDevice

__all__ = [
    "KINDS",
    "RUNNERS",
    "KernelShare",
    "PlainGPT",
    "kernel_shares",
    "kernel_table",
    "measure",
    "own_step",
    "plain_step",
    "run",
    "step_by_kernel",
]

RUNNERS = ("torch", "compile")
"""The peers: plain PyTorch eagerly and under torch.compile."""

_OURS = "accelerant"
_TARGETS_OF = "H200"
_TOKENS_PER_S, _PEAK_BYTES = 640_000, {32: 10 << 30}
"""What to reach on an H200: the speed, and by batch size the memory."""

_CONFIG = GPTConfig(vocab_size=50304)
"""GPT-2 124M with its vocabulary rounded up: ours pads it inside, plain PyTorch is at its best so."""

_WARM_UP = 6
_RATE, _BETAS, _DECAY, _CLIP = 6e-4, (0.9, 0.95), 0.1, 1.0
_Step = Callable[[Tensor, Tensor], Tensor]


class PlainGPT(nn.Module):
    """GPT-2 as one writes it in plain PyTorch: the peer, and the reference of a training step.

    Names of parameters and their order are those of nn.GPT, so that a state_dict goes from one to the other.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        width, bias = config.width, config.bias
        self.wte = nn.Embedding(config.padded_vocab_size, width)
        self.wpe = nn.Embedding(config.context, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_1": nn.LayerNorm(width, eps=config.eps, bias=bias),
                    "attention": nn.ModuleDict(
                        {"qkv": nn.Linear(width, 3 * width, bias), "projection": nn.Linear(width, width, bias)}
                    ),
                    "norm_2": nn.LayerNorm(width, eps=config.eps, bias=bias),
                    "mlp": nn.ModuleDict(
                        {"up": nn.Linear(width, 4 * width, bias), "down": nn.Linear(4 * width, width, bias)}
                    ),
                }
            )
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(width, eps=config.eps, bias=bias)

    @classmethod
    def like(cls, model: GPT) -> PlainGPT:
        """With the numbers of a model of ours, on its device."""
        plain = cls(model.config).to(model.wte.weight.device)
        with torch.no_grad():
            for to, given in zip(plain.parameters(), model.parameters(), strict=True):
                to.copy_(given)
        return plain

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of targets (B, T)."""
        B, T = tokens.shape
        heads = self.config.heads
        x = self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device))
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)  # for the type checker: ModuleList is untyped
            attention, mlp = block["attention"], block["mlp"]
            assert isinstance(attention, nn.ModuleDict) and isinstance(mlp, nn.ModuleDict)  # noqa: PT018  as above
            qkv = attention["qkv"](block["norm_1"](x)).view(B, T, 3, heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + attention["projection"](mixed.transpose(1, 2).reshape(B, T, -1))
            hidden = functional.gelu(mlp["up"](block["norm_2"](x)), approximate="tanh")
            x = x + mlp["down"](hidden)
        logits = functional.linear(self.norm(x), self.wte.weight)[..., : self.config.vocab_size]
        return functional.cross_entropy(logits.reshape(B * T, -1).float(), targets.reshape(-1))


def _groups(model: nn.Module) -> list[dict[str, object]]:
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    return [{"params": matrices, "weight_decay": _DECAY}, {"params": vectors, "weight_decay": 0.0}]


def plain_step(model: PlainGPT, *, compiled: bool = False, precision: torch.dtype | None = torch.bfloat16) -> _Step:
    """A step of the plain model with torch's fused AdamW: called with tokens and targets, gives the loss."""
    device = model.wte.weight.device
    optimizer = torch.optim.AdamW(_groups(model), lr=_RATE, betas=_BETAS, fused=device.type == "cuda")
    if compiled:
        torch.compiler.reset()  # else a second size of batch is compiled for any size, which is slower
    loss_of = torch.compile(model) if compiled else model

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=precision or torch.bfloat16, enabled=precision is not None):
            loss: Tensor = loss_of(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        return loss.detach()

    return step


def own_step(model: GPT, *, precision: torch.dtype | None = torch.bfloat16, graph: bool | None = None) -> _Step:
    """The same of ours."""
    optimizer = AdamW(_groups(model), lr=_RATE, betas=_BETAS)
    step = TrainStep(model, optimizer, model.loss, max_grad_norm=_CLIP, precision=precision, graph=graph)
    return lambda tokens, targets: step([(tokens, targets)], _RATE).loss


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
    batches: Sequence[int] = (32, 64),
    config: GPTConfig | None = None,
    budget_s: float = 2.0,
    against: Sequence[str] = RUNNERS,
    journal: Journal | None = None,
    until: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure into a record.

    Args:
        record: gets ceilings and rows.
        device: where.
        batches: sequences in a step.
        config: of the model; by default GPT-2 124M with a vocabulary of 50304, on a CPU a small one.
        budget_s: seconds of steps behind each figure.
        against: the peers, of RUNNERS.
        journal: gets the rows of a batch size as soon as they are there; those that it has are left out.
        until: the time of time.monotonic() after which no further batch size is begun.
        progress: told what is measured next.

    Raises:
        ConfigError: a peer that there is none of.
        AccelerantError: a loss that is not finite, or far from plain PyTorch's.
    """
    unknown = [name for name in against if name not in RUNNERS]
    if unknown:
        raise ConfigError(f"no peer {unknown[0]!r} of a training step; there are {', '.join(RUNNERS)}")
    where = torch.device(device.torch_device)
    gpu = where.type == "cuda"
    config = config or (_CONFIG if gpu else GPTConfig(512, 64, 2, 4, 128))
    if "matmul TFLOP/s" not in record.ceilings:
        progress("ceilings")
        record.ceilings |= measure_ceilings(where, budget_s=0.3)
    pieces = [
        Piece(
            "training",
            f"batch of {batch}, {', '.join((_OURS, *against))}",
            functools.partial(_batch, batch, config, where, device, budget_s, against),
        )
        for batch in batches
    ]
    measure_pieces(record, pieces, where=where, journal=journal, until=until, progress=progress)


def _batch(
    batch: int, config: GPTConfig, where: torch.device, device: ComputeDevice, budget_s: float, against: Sequence[str],
    record: Record, progress: Callable[[str], None],
) -> None:  # fmt: skip
    """A step of ours and of the peers, on one batch size."""
    losses: dict[str, list[float]] = {}
    for runner in (_OURS, *against):
        progress(f"training step, {batch} x {config.context}: {runner}")
        try:
            row, losses[runner] = _row(runner, config, batch, where, device, budget_s)
        except Exception as error:  # whatever a peer raises, its row says so
            if runner == _OURS:
                raise
            note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
            row = replace(_untimed(runner, config, batch, device), note=note)
        record.rows.append(row)
    if refuses_device(where) is None:
        progress(f"training step, {batch} x {config.context}: {_OURS}, fp8")
        row, found = _row(_OURS, config, batch, where, device, budget_s, float8=True)
        record.rows.append(row)
        _check_losses({_OURS: found, "bf16": losses[_OURS]}, first=0.03, last=0.3)
    _check_losses(losses)


@dataclass(slots=True)
class _Data:
    """Tokens of a corpus that is none, drawn as words are: the n-th likeliest 1/n as often as the first."""

    rows: list[Tensor]

    @classmethod
    def drawn(cls, config: GPTConfig, batch: int, where: torch.device) -> _Data:
        generator = torch.Generator().manual_seed(0)
        weights = 1.0 / torch.arange(1, config.vocab_size + 1, dtype=torch.float32)
        size = batch * (config.context + 1)
        rows = [torch.multinomial(weights, size, True, generator=generator) for _ in range(4)]
        return cls([row.view(batch, -1).to(where) for row in rows])

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        rows = self.rows[step % len(self.rows)]
        return rows[:, :-1], rows[:, 1:]


def _row(
    runner: str, config: GPTConfig, batch: int, where: torch.device, device: ComputeDevice, budget_s: float, *,
    float8: bool = False,
) -> tuple[Row, list[float]]:  # fmt: skip
    tokens = batch * config.context
    row = _untimed(runner, config, batch, device, float8=float8)
    gc.collect()
    gpu = where.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(where)
    torch.manual_seed(0)
    model = GPT(config).to(where)
    if runner == _OURS:
        step = own_step(model, precision=torch.float8_e4m3fn if float8 else torch.bfloat16)
    else:
        step = plain_step(PlainGPT.like(model), compiled=runner == "compile")
    del model
    data = _Data.drawn(config, batch, where)
    losses = [step(*data.batch(i)) for i in range(_WARM_UP)]
    times = _times(step, data, where, budget_s)
    timing = Timing.of(times)
    note = f"{1e3 * tokens / timing.p50_ms:,.0f} tokens/s"
    peak = None
    if gpu:
        peak = torch.cuda.max_memory_allocated(where)
        note += f", {torch.cuda.max_memory_reserved(where) / 2**30:.2f} GiB reserved"
    first = [float(loss) for loss in losses]
    note += f", first losses {' '.join(f'{loss:.4f}' for loss in first)}"
    row = replace(
        row, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms, peak_bytes=peak, note=note, samples=tuple(times)
    )
    return row, first


def _untimed(runner: str, config: GPTConfig, batch: int, device: ComputeDevice, *, float8: bool = False) -> Row:
    """A runner's row without what is measured."""
    tokens = batch * config.context
    on_target = _TARGETS_OF in device.name and config == _CONFIG and runner == _OURS and not float8
    case = f"{batch}x{config.context} {config.layers} layers of {config.width} {'fp8' if float8 else 'bf16 autocast'}"
    return Row(
        "training", "gpt step", case, runner, "TrainStep" if runner == _OURS else runner,
        flops=_flops(config, tokens), ceiling="" if float8 else "matmul",
        target=1e3 * tokens / _TOKENS_PER_S if on_target else None,
        target_bytes=_PEAK_BYTES.get(batch) if on_target else None,
    )  # fmt: skip


def _times(step: _Step, data: _Data, where: torch.device, budget_s: float) -> list[float]:
    """Milliseconds of steps one after the other, between events on a GPU."""
    if where.type != "cuda":
        found: list[float] = []
        began = time.perf_counter()
        while len(found) < 3 or (time.perf_counter() - began < budget_s and len(found) < 100):
            start = time.perf_counter()
            step(*data.batch(len(found)))
            found.append(1e3 * (time.perf_counter() - start))
        return found
    torch.cuda.synchronize(where)
    began = time.perf_counter()
    step(*data.batch(0))
    torch.cuda.synchronize(where)
    count = max(10, min(500, math.ceil(budget_s / (time.perf_counter() - began))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for i in range(count):
        step(*data.batch(i))
        events[i + 1].record()
    torch.cuda.synchronize(where)
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


def _flops(config: GPTConfig, tokens: int) -> int:
    """Of products and attention (causal: half the pairs), forward and twice that backward."""
    matrices = 12 * config.layers * config.width**2 + config.vocab_size * config.width
    attention = config.layers * 2 * config.width * config.context
    return tokens * 6 * (matrices + attention // 2)


def _check_losses(losses: dict[str, list[float]], *, first: float = 0.01, last: float = 0.1) -> None:
    """That ours begin where the peers' do, and are finite.

    Args:
        losses: by runner.
        first, last: how far ours may lie from a peer's in the first step, and in the last.

    Raises:
        AccelerantError: they do not.
    """
    ours = losses.pop(_OURS)
    if not all(map(math.isfinite, ours)):
        raise AccelerantError(f"training step: the losses are {ours}")
    for runner, theirs in losses.items():
        if abs(ours[0] - theirs[0]) > first or abs(ours[-1] - theirs[-1]) > last:
            raise AccelerantError(f"training step: losses {ours}, {runner} has {theirs}")


# --- by kernel -------------------------------------------------------------------------------------------------------

KINDS = ("matmul", "attention", "own", "other")
"""Products (ours with an epilogue among them), attention, our other kernels, what is left."""

_MATMUL = re.compile(r"gemm|nvjet|cutlass|splitK|cublas|linear_gelu$|linear_gelu\b|transformer_dz", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|flash|fmha", re.IGNORECASE)
_OWN = re.compile(
    r"^(norm|transformer|multi_tensor|cross_entropy|embedding|gelu|linear_gelu|linear_fp8|elementwise|softmax|swiglu|"
    r"rope)_"
)


@dataclass(frozen=True, slots=True)
class KernelShare:
    """A kernel's part of a step.

    Attributes:
        name: as the profiler has it.
        kind: of KINDS.
        ms, calls: in one step.
    """

    name: str
    kind: str
    ms: float
    calls: int

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def step_by_kernel(
    device: ComputeDevice, batch: int, config: GPTConfig | None = None, *, float8: bool = False
) -> list[KernelShare]:
    """A captured step of ours, GPT-2 124M by default, in bfloat16 or fp8, by kernel."""
    config = config or _CONFIG
    where = torch.device(device.torch_device)
    torch.manual_seed(0)
    step = own_step(GPT(config).to(where), precision=torch.float8_e4m3fn if float8 else torch.bfloat16)
    data = _Data.drawn(config, batch, where)
    for i in range(_WARM_UP):
        step(*data.batch(i))
    return kernel_shares(lambda: step(*data.batch(0)))


def kernel_table(shares: Sequence[KernelShare]) -> str:
    """The kernels that take most, the sums by kind, and our share of what is neither product nor attention."""
    total = sum(share.ms for share in shares)
    lines = [f"{share.ms:8.3f} ms {share.calls:5d} x  {share.kind:9s}  {share.name[:90]}" for share in shares[:40]]
    by_kind = {kind: sum(share.ms for share in shares if share.kind == kind) for kind in KINDS}
    lines += [f"{ms:8.3f} ms {100 * ms / total:5.1f} %  {kind}" for kind, ms in by_kind.items()]
    rest = by_kind["own"] + by_kind["other"]
    lines.append(f"{total:8.3f} ms in all; of {rest:.3f} ms beside products and attention")
    lines[-1] += f" {by_kind['own'] / rest:.1%} are ours"
    return "\n".join(lines)


def kernel_shares(step: Callable[[], object]) -> list[KernelShare]:
    """The kernels of one call on a CUDA device by torch.profiler, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    shares = [
        KernelShare(event.key, _kind(event.key), event.self_device_time_total / 1e3, event.count)
        for event in found.key_averages()
        if str(event.device_type).endswith("CUDA") and event.self_device_time_total > 0
    ]
    return sorted(shares, key=lambda share: -share.ms)


def _kind(name: str) -> str:
    if _ATTENTION.search(name):
        return "attention"
    if _OWN.match(name):
        return "matmul" if name.startswith("transformer_dz") else "own"
    return "matmul" if _MATMUL.search(name) else "other"
