"""Sums of pseudorandom masks of secure aggregation, on the CPU and CUDA devices.

    out[row] = sum over the row's seeds of sign * PRG(seed)      mod 2^32

PRG(seed) is the keystream of ChaCha20 under all 32 bytes of the seed, nonce 0, from block 0, as little-endian words
(RFC 8439, section 2.3, with a counter of 64 bits). The masks of all seeds are generated and summed in registers, so
memory is written once. Time does not depend on the seeds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from accelerant.privacy.random.device import KEYSTREAM_BLOCK, chacha20_text, compiled, index_of
from accelerant.privacy.random.llvm_kernels import KeystreamBlocks, VectorKernel, host_vectors, lanes
from accelerant.privacy.random.stream import BLOCK_WORDS, key_words
from accelerant.runtime.compilation.kernel import Builder, KernelSource, builder_key
from accelerant.runtime.compilation.llvm import constant, lane_constants, vector
from accelerant.runtime.recorded_launch import RecordedLaunch, sole_record

SignedSeed = tuple[bytes, int]
"""A seed of 32 bytes and its sign, 1 or -1."""

_PAD = 16  # blocks: whole vectors on every CPU


@functools.cache
def mask_sums_source() -> KernelSource:
    """Return chacha20_mask_sums(states, starts, out, blocks, total, one) of masks.c."""
    text = chacha20_text() + Path(__file__).with_name("masks.c").read_text(encoding="utf-8")
    dialects: dict[str, str | Builder] = {"portable": text, "llvm": MaskSumsKernel()}
    arguments = ("*u32", "*i64", "*u32", "i64", "i64", "u32")
    return KernelSource("chacha20_mask_sums", dialects, {"chacha20_mask_sums": arguments})


@dataclass(frozen=True, slots=True)
class MaskSumsKernel(VectorKernel):
    """A Builder of masks.c for CPUs: an index is lanes() blocks of a row."""

    least_share = 1

    @property
    def key(self) -> str:
        """See builder_key."""
        builder = replace(self, vectors=self.vectors or host_vectors())
        return builder_key(builder, "privacy/random", "privacy/mpc/secagg/masks.py")

    def build(self, target: str) -> str:
        """Return LLVM IR."""
        inputs = ("ptr noalias readonly %states", "ptr noalias readonly %starts", "ptr noalias %out")
        code = self.function("chacha20_mask_sums", *inputs, "i64 %blocks", "i64 %total", "i32 %one")
        blocks = KeystreamBlocks(code, self.vectors or host_vectors(), keyed=False)
        count = blocks.lanes
        kind, align = vector("i32", count), 4 * count
        sums = code.stack(f"[{BLOCK_WORDS} x {kind}]", align=align)
        with code.loop("%begin", "%end") as index:
            first = code.op("mul", index, count)
            row = code.op("sdiv", first, "%blocks")
            counters = blocks.counters(code.op("srem", first, "%blocks"), lane_constants("i64", range(count)))
            for j in range(BLOCK_WORDS):
                code.store(kind, constant(kind, 0), sums, j, align=align)
            stop = code.load("i64", "%starts", code.op("add", row, 1), align=8)
            with code.loop(code.load("i64", "%starts", row, align=8), stop) as seed:
                state = code.at("i32", "%states", code.op("mul", seed, 12))
                blocks.rekey(state)
                blocks.generate(counters)
                sign = code.broadcast(code.load("i32", state, 10, align=4), count)
                for j in range(BLOCK_WORDS):
                    added = code.op("add", code.load(kind, sums, j, align=align), code.op("mul", blocks.word(j), sign))
                    code.store(kind, added, sums, j, align=align)
            to = code.at("i32", "%out", code.op("mul", first, BLOCK_WORDS))
            for j in range(BLOCK_WORDS):
                word = code.load(kind, sums, j, align=align)
                for lane in range(count):
                    code.store("i32", code.lane(word, lane), to, BLOCK_WORDS * lane + j, align=4)
        code.ret()
        return blocks.program()


def mask_sums(rows: Sequence[Sequence[SignedSeed]], n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the sum of each row's masks, (rows, n) int32 with the bits of integers modulo 2^32.

    Args:
        rows: seeds and signs; a row without seeds is 0.
        n: words of a mask, at least 1.
        device: the CPU or a CUDA device.
    """
    device = torch.device(device)
    states = np.zeros((sum(map(len, rows)), 12), np.uint32)
    if len(states):
        states[:, :8] = key_words(b"".join(seed for row in rows for seed, _ in row)).reshape(-1, 8)
        states[:, 10] = [sign & 0xFFFFFFFF for row in rows for _, sign in row]
    starts = torch.tensor([0, *np.cumsum([len(row) for row in rows])], dtype=torch.int64).to(device)
    held = torch.from_numpy(states.view(np.int32)).to(device)
    blocks = -(-n // (BLOCK_WORDS * _PAD)) * _PAD
    total = blocks * len(rows)
    out = torch.empty((len(rows), blocks * BLOCK_WORDS), dtype=torch.int32, device=device)
    if device.type == "cpu":
        grid, block = total // lanes(), 1
    else:
        grid, block = -(-total // KEYSTREAM_BLOCK), KEYSTREAM_BLOCK
    provider, kernel = compiled(mask_sums_source(), device)
    words = states.shape[0] * blocks * BLOCK_WORDS
    where = "cpu" if device.type == "cpu" else f"{device.type}:{index_of(device)}"
    record = sole_record("mask_sums", kernel.name, kernel.backend, where, f"{len(rows)} rows", size_bytes=4 * words)
    with RecordedLaunch(record, provider, kernel.device):
        provider.launch(kernel, (grid,), (block,), (held, starts, out, blocks, total, 1))
    held.zero_()
    return out[:, :n]
