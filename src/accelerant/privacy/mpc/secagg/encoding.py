"""Updates as masked integers modulo 2^32: clipping, rounding, noise, its cost, and the sums of masks.

    q = w * round(clamp(x) / step) + Z           x scaled to max_norm first, then clamped to +-max_abs
    sum of q mod 2^32, read as -2^31 to 2^31 - 1, times step

With weights above 1 allowed, one more element is the sum of the weights. The settings guarantee that the sum of all
clients fits: n (W max_abs / step + 1) and 12 deviations of the noise are below 2^31. Where noise exceeds that, the sum
wraps, which costs accuracy and no privacy.

Each client adds a discrete Gaussian: docs/secure-computation.md says how wide it is, and what it costs.

Masks. Each row of `mask_sums` is the sum over its seeds of sign * PRG(seed) mod 2^32, where PRG(seed) is the keystream
of ChaCha20 under all 32 bytes of the seed, nonce 0, from block 0, as little-endian words (RFC 8439, section 2.3, with a
counter of 64 bits). The masks of all seeds are generated and summed in registers, so memory is written once, on the CPU
and on CUDA devices. Time does not depend on the seeds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError, DivergenceError, ShapeError, UnsupportedDtype
from accelerant.privacy import random
from accelerant.privacy.dp.ledger.accounting import PrivacyEvent
from accelerant.privacy.dp.noise import SecureSource
from accelerant.privacy.dp.noise.discrete import SMOOTH, WIDEST, charge, log_ratio
from accelerant.runtime.compilation.kernel import Builder, KernelSource
from accelerant.runtime.compilation.llvm import constant, lane_constants, vector
from accelerant.runtime.files import clipped
from accelerant.runtime.host import refuse_masked, refuse_without_values
from accelerant.runtime.ledger import RecordedLaunch, sole_record
from accelerant.tensors import DeviceTensor

# --- masks ------------------------------------------------------------------------------------------------------------
SignedSeed = tuple[bytes, int]  # A seed of 32 bytes and its sign, 1 or -1

_PAD = 16  # blocks: whole vectors on every CPU


@functools.cache
def mask_sums_source() -> KernelSource:
    """Return chacha20_mask_sums(states, starts, out, blocks, total, one) of masks.c."""
    text = random.chacha20_text() + Path(__file__).with_name("masks.c").read_text(encoding="utf-8")
    dialects: dict[str, str | Builder] = {"portable": text, "llvm": MaskSumsKernel()}
    arguments = ("*u32", "*i64", "*u32", "i64", "i64", "u32")
    return KernelSource("chacha20_mask_sums", dialects, {"chacha20_mask_sums": arguments})


@dataclass(frozen=True, slots=True)
class MaskSumsKernel(random.VectorKernel):
    """A Builder of masks.c for CPUs: an index is lanes() blocks of a row."""

    least_share = 1
    sources = ("privacy/random", "privacy/mpc/secagg/encoding.py")

    def build(self, target: str) -> str:
        """Return LLVM IR."""
        inputs = ("ptr noalias readonly %states", "ptr noalias readonly %starts", "ptr noalias %out")
        code = self.function("chacha20_mask_sums", *inputs, "i64 %blocks", "i64 %total", "i32 %one")
        blocks = random.KeystreamBlocks(code, self.vectors or random.host_vectors(), keyed=False)
        count = blocks.lanes
        kind, align = vector("i32", count), 4 * count
        sums = code.stack(f"[{random.BLOCK_WORDS} x {kind}]", align=align)
        with code.loop("%begin", "%end") as index:
            first = code.op("mul", index, count)
            row = code.op("sdiv", first, "%blocks")
            counters = blocks.counters(code.op("srem", first, "%blocks"), lane_constants("i64", range(count)))
            for j in range(random.BLOCK_WORDS):
                code.store(kind, constant(kind, 0), sums, j, align=align)
            stop = code.load("i64", "%starts", code.op("add", row, 1), align=8)
            with code.loop(code.load("i64", "%starts", row, align=8), stop) as seed:
                state = code.at("i32", "%states", code.op("mul", seed, 12))
                blocks.rekey(state)
                blocks.generate(counters)
                sign = code.broadcast(code.load("i32", state, 10, align=4), count)
                for j in range(random.BLOCK_WORDS):
                    added = code.op("add", code.load(kind, sums, j, align=align), code.op("mul", blocks.word(j), sign))
                    code.store(kind, added, sums, j, align=align)
            to = code.at("i32", "%out", code.op("mul", first, random.BLOCK_WORDS))
            for j in range(random.BLOCK_WORDS):
                word = code.load(kind, sums, j, align=align)
                for lane in range(count):
                    code.store("i32", code.lane(word, lane), to, random.BLOCK_WORDS * lane + j, align=4)
        code.ret()
        return blocks.program()


def mask_sums(rows: Sequence[Sequence[SignedSeed]], n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the sum of each row's masks of n words, (rows, n) int32 with the bits of integers modulo 2^32."""
    device = torch.device(device)
    states = np.zeros((sum(map(len, rows)), 12), np.uint32)
    if len(states):
        states[:, :8] = random.key_words(b"".join(seed for row in rows for seed, _ in row)).reshape(-1, 8)
        states[:, 10] = [sign & 0xFFFFFFFF for row in rows for _, sign in row]
    starts = torch.tensor([0, *np.cumsum([len(row) for row in rows])], dtype=torch.int64, device=device)
    held = torch.from_numpy(states.view(np.int32)).to(device)
    blocks = -(-n // (random.BLOCK_WORDS * _PAD)) * _PAD
    total = blocks * len(rows)
    out = torch.empty((len(rows), blocks * random.BLOCK_WORDS), dtype=torch.int32, device=device)
    if device.type == "cpu":
        grid, block = total // random.lanes(), 1
    else:
        grid, block = -(-total // random.KEYSTREAM_BLOCK), random.KEYSTREAM_BLOCK
    provider, kernel = random.compiled(mask_sums_source(), device)
    words = states.shape[0] * blocks * random.BLOCK_WORDS
    where = "cpu" if device.type == "cpu" else f"{device.type}:{random.index_of(device)}"
    record = sole_record("mask_sums", kernel.name, kernel.backend, where, f"{len(rows)} rows", size_bytes=4 * words)
    with RecordedLaunch(record, provider, kernel.device):
        provider.launch(kernel, (grid,), (block,), (held, starts, out, blocks, total, 1))
    held.zero_()
    return out[:, :n]


# --- encoding ---------------------------------------------------------------------------------------------------------
_HALF = 2**31
_TAIL = 12
_LEAST_STEPS = 4  # of a client's deviation, so that sums of the noise are smooth
_FINEST = 2.0**-100


@dataclass(frozen=True, slots=True)
class Encoding:
    """The map from updates of `size` elements to integers; `make_encoding` chooses it.

    The step is a power of two, std the deviation of each client's noise in the units of the values. The noise
    multiplier, the ledger's, is of the noise of `least` clients; delta is charged by a release.
    """

    size: int
    max_abs: float
    max_norm: float | None
    step: float
    std: float
    least: int
    noise_multiplier: float
    delta: float
    max_weight: int

    @property
    def words(self) -> int:
        """Elements of a masked input: those of an update, and the weight's if there are weights."""
        return self.size + (self.max_weight > 1)

    def encode(self, update: Any, weight: int, device: torch.device) -> Tensor:
        """Return an update as (words,) int32 on a device, with this client's noise.

        Raises:
            UnsupportedDtype, UnsupportedCase: as for real_tensor.
            ShapeError: another number of elements.
            DivergenceError: an element is NaN or infinite.
            ConfigError: a weight out of range.
        """
        x = real_tensor(update, "the update").reshape(-1).to(device, torch.float64)
        if x.numel() != self.size:
            raise ShapeError(f"an update has {self.size} elements, got {x.numel()}")
        whole = isinstance(weight, (int, np.integer)) and not isinstance(weight, bool)
        if not whole or not 1 <= weight <= self.max_weight:
            raise ConfigError(
                f"a weight must be a whole number from 1 to max_weight = {self.max_weight}, got {clipped(weight)}"
            )
        weight = int(weight)
        if not bool(x.isfinite().all()):
            raise DivergenceError("the update has elements that are NaN or infinite: it is not sent")
        if self.max_norm is not None:
            x = scaled_down(x, self.max_norm)
        q = (x.clamp(-self.max_abs, self.max_abs) / self.step).round_().to(torch.int64) * weight
        if self.max_weight > 1:
            q = torch.cat((q, torch.tensor([weight], device=device)))
        if self.std:
            q += SecureSource().integers(q.shape, self.std / self.step, device)
        return wrapped(q)

    def decode(self, total: Tensor) -> tuple[Tensor, int | None]:
        """Return the sum, (size,) float64, and the sum of the weights, None without weights."""
        values = total[: self.size].to(torch.float64) * self.step
        return values, int(total[self.size]) if self.max_weight > 1 else None

    def event(self) -> PrivacyEvent:
        """Return the release of one sum for the ledger."""
        return PrivacyEvent(
            "discrete_gaussian" if self.std else "gaussian", self.noise_multiplier, delta=self.delta,
            source=SecureSource.name if self.std else "", secure=True if self.std else None,
            note=f"secure aggregation: noise of at least {self.least} honest clients",
        )  # fmt: skip


def real_tensor(value: Any, name: str) -> Tensor:
    """Return a tensor, array, number or nested list of numbers as a tensor of integers, booleans or floats.

    Raises UnsupportedDtype for complex and quantized numbers, strings, objects and containers of arrays, ShapeError for
    lists of unequal length, UnsupportedCase for a sparse tensor or one without values; names `name`, never a value.
    """
    refuse_masked(value, name)
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise UnsupportedDtype(
            f"{name} must be a tensor or array of real numbers, got {kind} that torch does not read: flatten a model's "
            "parameters with torch.nn.utils.parameters_to_vector, convert other numbers to float64"
        ) from None
    if tensor.is_complex() or tensor.is_quantized:
        remedy = "take torch.view_as_real of it" if tensor.is_complex() else "take its dequantize()"
        raise UnsupportedDtype(f"{name} must be of real numbers, got {tensor.dtype}: {remedy}")
    refuse_without_values(tensor, name)
    return tensor.cpu() if isinstance(tensor, DeviceTensor) else tensor


def scaled_down(x: Tensor, max_norm: float) -> Tensor:
    """Return a float64 vector whose exact L2 norm is at most max_norm: the margin is four times the roundings."""
    largest = float(x.abs().max()) if x.numel() else 0.0
    if not largest:
        return x
    unit, bound = x / largest, max_norm * (1 - (x.numel() + 8) * 2.0**-52)
    norm = float(unit.norm())  # that of x may leave float64's range
    return x if norm * largest <= bound else unit * (bound / norm)


def wrapped(x: Tensor) -> Tensor:
    """Return int64 values modulo 2^32 as int32."""
    return ((x + _HALF) % 2**32 - _HALF).to(torch.int32)


def make_encoding(
    clients: int, least: int, fails: float, size: int, max_abs: float | None, max_norm: float | None,
    noise_multiplier: float, step: float | None, max_weight: int,
) -> Encoding:  # fmt: skip
    """Return the encoding of SecureAggregation's settings; ConfigError where a sum may not fit.

    `fails` bounds the probability that a sum with the noise of fewer than `least` clients is unmasked: part of
    delta.
    """
    if max_abs is None and max_norm is None:
        raise ConfigError("give max_abs, the largest magnitude of an element, or max_norm, the L2 norm of an update")
    bound = min(each for each in (max_abs, max_norm) if each is not None)
    if noise_multiplier and max_norm is None:
        raise ConfigError("noise needs max_norm, the L2 norm to which updates are scaled down")
    if noise_multiplier and max_weight > 1:
        raise ConfigError(f"noise is for sums without weights: max_weight must be 1, got {max_weight}")
    given = step

    def std_of(step: float) -> float:
        sensitivity = (max_norm or 0.0) + step * math.sqrt(size) / 2
        return math.hypot(noise_multiplier * sensitivity, SMOOTH * step) / math.sqrt(least)

    def room(step: float) -> float:
        noise = std_of(step) / step if noise_multiplier else 0.0
        fits = clients * max_weight * (bound / step + 1) + _TAIL * math.sqrt(clients) * noise
        return max(fits, noise / WIDEST * _HALF)

    if step is None:
        step = math.ldexp(1.0, max(math.frexp(bound)[1] - 32, round(math.log2(_FINEST))))
        while room(step) >= _HALF and step < bound:
            step *= 2
    if math.frexp(step)[0] != 0.5:
        raise ConfigError(f"step must be a power of two, got {step!r}")
    std = std_of(step) if noise_multiplier else 0.0
    if room(step) >= _HALF or step > bound:
        raise ConfigError(
            f"sums of {clients} clients do not fit 32 bits: max_abs {bound:g} in steps of {step:g}, weights up to "
            f"{max_weight} and noise of deviation {std:g} each need {2 * room(step):.3g} of 2^32 values: take a "
            f"{'larger step' if given else 'smaller max_abs, weight or noise'}"
        )
    if noise_multiplier and std < _LEAST_STEPS * step:
        raise ConfigError(
            f"noise of {std / step:.3g} steps for each client is too narrow: take a smaller step or max_abs"
        )
    delta = 0.0
    if std:
        delta = fails + clients * charge(std, grid=step, dimensions=size).delta
        delta += 2 * size * (clients - 1) * log_ratio(float(Fraction(std) / Fraction(step)) / math.sqrt(2))
        delta = min(1.0, 2.0 ** math.ceil(math.log2(delta))) if delta else 0.0
    return Encoding(size, bound, max_norm, step, std, least, float(noise_multiplier), delta, max_weight)
