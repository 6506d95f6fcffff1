"""Whether private training refuses ordinary models, finds those that mix examples, and what looking costs a step.

    python -m benchmarks.private_separation > benchmarks/results/separation-h200.txt

Each trial is a first forward pass of a model with seeds of its own: 14 models that keep their examples apart, in
several shapes of the batch, in float32 and under autocast in bfloat16, none of which may be refused; then models that
mix examples, each of which must be. Last come steps of GPT-2 at 16x1024 with the time that the checks take of each. On
a CPU the models are small: it then only shows that they run. The exit status is 1 after a false refusal or a miss.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant.errors import UnsupportedCase
from accelerant.nn import GPT, GPTConfig
from accelerant.privacy import dp

__all__ = ["main"]

_WORDS = 97


class Block(nn.Module):
    """A transformer's block of torch's functions, before-norm."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_up, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_up(x))))
        return result


class Transformer(nn.Module):
    """A GPT, or an encoder that averages over positions; between its first two blocks `mix` changes all rows."""

    def __init__(
        self,
        layers: int,
        width: int,
        *,
        words: int = _WORDS,
        causal: bool = True,
        mix: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(2048, width)
        self.blocks = nn.ModuleList([Block(width, max(1, width // 64), causal) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.causal, self.mix = causal, mix

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device)[None])
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 0 and self.mix is not None:
                x = self.mix(x)
        x = self.norm(x)
        result: Tensor = self.head(x if self.causal else x.mean(1))
        return result


class Words(nn.Module):
    """Embedding, a layer over positions, and the mean of its results."""

    def __init__(self, inner: Callable[[], nn.Module], width: int = 64) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(_WORDS, width), inner(), nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.inner(self.embed(tokens))
        result: Tensor = self.head((h[0] if isinstance(h, tuple) else h).mean(1))
        return result


class Adapted(nn.Module):
    """A frozen layer beside one of low rank whose second matrix is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(64, 64), nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        nn.init.zeros_(self.up.weight)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


@dataclass(frozen=True)
class Model:
    """A model, the shapes of its batches, and whether they are of tokens."""

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    tokens: bool = True

    def inputs(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return torch.randint(_WORDS, shape, device=device) if self.tokens else torch.randn(shape, device=device)


def _ordinary(large: bool) -> dict[str, Model]:
    """Return the models that keep their examples apart."""
    rows, length = (64, 1024) if large else (8, 16)
    texts = (*([(8, 16)] if large else []), (rows, length), (4, 2 * length))
    flat, pictures = ((8, 64), (256, 64)), ((8, 3, 16, 16), (rows, 3, 32, 32))
    deep = ((16, length), (4, 2 * length))
    layers, width = (12, 768) if large else (2, 32)
    config = GPTConfig(vocab_size=_WORDS, context=2 * length, layers=4, heads=4, width=256 if large else 32)

    def picture(*body: nn.Module) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))

    def vectors(*body: nn.Module) -> Model:
        return Model(lambda: nn.Sequential(*body, nn.Linear(64, 10)), flat, tokens=False)

    return {
        "mlp": vectors(nn.Linear(64, 64), nn.Tanh()),
        "mlp with dropout": vectors(nn.Linear(64, 64), nn.Dropout(0.3), nn.GELU()),
        "low rank": vectors(Adapted(), nn.ReLU()),
        "layer norm": vectors(nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU()),
        "convolution": Model(picture(nn.Conv2d(3, 16, 3), nn.ReLU()), pictures, tokens=False),
        "convolution, group norm": Model(
            picture(nn.Conv2d(3, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=4)),
            pictures, tokens=False,
        ),
        "words": Model(lambda: Words(lambda: nn.LayerNorm(64)), texts),
        "GRU": Model(lambda: Words(lambda: nn.GRU(64, 64, batch_first=True)), (*texts[:1], (8, 64))),
        "LSTM": Model(lambda: Words(lambda: nn.LSTM(64, 64, batch_first=True)), (*texts[:1], (8, 64))),
        "attention": Model(lambda: Words(lambda: Block(64, 4, causal=False)), texts),
        "encoder": Model(lambda: Transformer(3, 128 if large else 32, causal=False), texts),
        "small GPT": Model(lambda: Transformer(3, 128 if large else 32), texts),
        "Accelerant's GPT": Model(lambda: GPT(config), texts),
        f"GPT of {layers} layers of {width}": Model(
            lambda: Transformer(layers, width, words=50304 if large else _WORDS), deep
        ),
    }  # fmt: skip


def _leaking(share: float, h: Tensor) -> Tensor:
    return h + share * h.mean(0)


_MIXTURES: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"x + {a} mean(x)": functools.partial(_leaking, a) for a in (1e-3, 1e-2, 0.03, 0.1)},
    "x - mean(x)": lambda h: h - h.mean(0),
    "x - x[0]": lambda h: h - h[:1],
    "x + x[-1]": lambda h: h + h[-1:],
    "running sum": lambda h: h.cumsum(0),
    "x / std(x)": lambda h: h / h.std(),
    "x + 0.01 of the row before": lambda h: h + 0.01 * h.roll(1, 0),
    "sign of the row before": lambda h: h * h.roll(1, 0)[:, :1, :1].sign(),
    "reversed": lambda h: h.flip(0),
    "last two exchanged": lambda h: torch.cat([h[:-2], h[-2:].flip(0)]),
}


def _outcome(make: Callable[[], nn.Module], x: Tensor, precision: torch.dtype | None) -> str:
    """Return "passes", "refused", or the warning that a model could not be checked."""
    model = make().to(x.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "delta": 1e-6, "sample_rate": 0.01}
    with (
        dp.make_private(model, optimizer, expected_batch_size=len(x), **options),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        try:
            with torch.autocast(x.device.type, precision or torch.bfloat16, enabled=precision is not None):
                model(x)
        except UnsupportedCase:
            return "refused"
    unchecked = [str(each.message) for each in said if "not checked" in str(each.message)]
    return unchecked[0] if unchecked else "passes"


def _trials(large: bool) -> Iterator[tuple[str, Model, tuple[int, ...], torch.dtype | None]]:
    while True:
        for name, model in _ordinary(large).items():
            for shape in model.shapes:
                for precision in (torch.bfloat16, None):
                    yield name, model, shape, precision


def _false_refusals(device: torch.device, budget_s: float, least: int) -> int:
    """Print and return how many ordinary models were refused, or could not be checked."""
    began, counted, failed, times = time.perf_counter(), 0, 0, dict[str, list[float]]()
    for seed, (name, model, shape, precision) in enumerate(_trials(device.type == "cuda")):
        if counted >= least and time.perf_counter() - began > budget_s:
            break
        torch.manual_seed(seed)
        at = time.perf_counter()
        outcome = _outcome(model.make, model.inputs(shape, device), precision)
        times.setdefault(name, []).append(time.perf_counter() - at)
        counted += 1
        if outcome != "passes":
            failed += 1
            print(f"  {name}, {shape}, {precision or torch.float32}, seed {seed}: {outcome}", flush=True)
    for name, each in times.items():
        print(f"  {name}: {len(each)} trials, at most {max(each):.2f} s, median {statistics.median(each):.2f} s")
    print(
        f"ordinary models: {failed} of {counted} refused or not checked, {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return failed


def _misses(device: torch.device, seeds: int) -> int:
    """Print and return how many models that mix examples passed."""
    missed = counted = 0
    length = 128 if device.type == "cuda" else 16
    for name, mix in _MIXTURES.items():
        for precision in (torch.bfloat16, None):
            for seed in range(seeds):
                torch.manual_seed(seed)
                x = torch.randint(_WORDS, (16, length), device=device)
                outcome = _outcome(lambda mix=mix: Transformer(2, 64, mix=mix), x, precision)  # type: ignore[misc]  # bound
                counted += 1
                if outcome != "refused":
                    missed += 1
                    print(f"  {name}, {precision or torch.float32}, seed {seed}: {outcome}", flush=True)
    print(f"mixtures: {missed} of {counted} missed", flush=True)
    return missed


def _share(device: torch.device, steps: int) -> float:
    """Print the times of the first ten steps and of later ones with checks; return the checks' share of the later."""
    large = device.type == "cuda"
    batch, length, words = (16, 1024, 50304) if large else (4, 16, _WORDS)
    torch.manual_seed(0)
    model = Transformer(12 if large else 2, 768 if large else 32, words=words).to(device)
    training = dp.make_private(
        model, torch.optim.AdamW(model.parameters(), 1e-4), noise_multiplier=1.0, max_grad_norm=1.0, delta=1e-6,
        sample_rate=0.01, expected_batch_size=batch,
    )  # fmt: skip
    spent = [0.0]
    check = training.optimizer.separation

    def timed(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            _wait(device)
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                _wait(device)
                spent[0] += time.perf_counter() - began

        return call

    for owner, name in ((check, "before_forward"), (check, "before_backward"), (training.optimizer.losses, "check")):
        setattr(owner, name, timed(getattr(owner, name)))
    shares, times = [], []
    for number in range(steps):
        x = torch.randint(words, (batch, length + 1), device=device)
        spent[0] = 0.0
        _wait(device)
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(x[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten()).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # batches of its own, without amplification
            training.optimizer.step()
        training.optimizer.zero_grad()
        _wait(device)
        times.append(time.perf_counter() - began)
        shares.append(spent[0])
        if number < 10 or shares[-1] > 0.1 * times[-1]:
            print(f"  step {number + 1}: {times[-1] * 1e3:.1f} ms, checks {spent[0] * 1e3:.2f} ms", flush=True)
    training.close()
    share = sum(shares[10:]) / sum(times[10:])
    print(f"GPT of {batch}x{length}: the checks take {share:.2%} of steps 11 to {steps}")
    return share


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    """Run all parts; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget-seconds", type=float, default=75.0, help="seconds of trials of ordinary models")
    parser.add_argument("--least", type=int, default=200, help="trials of ordinary models at least")
    parser.add_argument("--seeds", type=int, default=2, help="trials of each mixture and precision")
    parser.add_argument("--steps", type=int, default=1500, help="timed steps; on a GPU about one in 400 is checked")
    given = parser.parse_args()
    device = torch.device(given.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC", flush=True)
    failed = _false_refusals(device, given.budget_seconds, given.least)
    missed = _misses(device, given.seeds)
    share = _share(device, given.steps)
    return int(failed > 0 or missed > 0 or share > 0.01)


if __name__ == "__main__":
    sys.exit(main())
