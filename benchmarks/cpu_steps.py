"""Training steps of small GPTs on a CPU with one thread: ours and a plain torch loop's, in turns in one process.

    python -m benchmarks.cpu_steps [--steps 12]

A row for each dtype and cell (batch, length, width, layers): milliseconds of the process's CPU time, which other work
on the machine does not add to, in the fastest step of a plain torch loop with fused AdamW and of TrainStep; their
quotient; and the largest relative difference of losses.
"""

from __future__ import annotations

import argparse
import time

import torch

from accelerant.nn import GPT, GPTConfig
from benchmarks.gpt_steps import WARM_UP, PlainGPT, TokenBatches, own_step, plain_step

CELLS = (
    (1, 16, 64, 1), (1, 16, 64, 6), (8, 16, 64, 2), (32, 16, 64, 2), (1, 256, 64, 2), (8, 64, 128, 2), (32, 64, 64, 4),
    (2, 128, 256, 3), (1, 64, 384, 6), (4, 64, 384, 6), (8, 256, 128, 2), (32, 128, 192, 1),
)  # fmt: skip
"""Batch, length, width and layers; (8, 64, 128, 2) is the preset tiny."""


def measure(cell: tuple[int, int, int, int], precision: torch.dtype | None, steps: int) -> tuple[float, float, float]:
    """Return the milliseconds of the plain loop's step and of ours, and the largest relative difference of losses."""
    batch, length, width, layers = cell
    config = GPTConfig(vocab_size=256, context=length, layers=layers, heads=4, width=width)
    torch.manual_seed(0)
    model = GPT(config)
    runs = plain_step(PlainGPT.like(model), precision=precision), own_step(model, precision=precision)
    batches = TokenBatches.drawn(config, batch, torch.device("cpu"), contiguous=True)
    least, difference = [float("inf")] * 2, 0.0
    for number in range(WARM_UP + steps):
        losses = []
        for i, run in enumerate(runs):
            began = time.process_time()
            losses.append(run(*batches.batch(number)))
            if number >= WARM_UP:
                least[i] = min(least[i], (time.process_time() - began) * 1e3)
        difference = max(difference, float(abs(losses[1] / losses[0] - 1)))
    return least[0], least[1], difference


def main() -> None:
    """Print a row for each cell and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each")
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps must be at least 1, got {steps}")
    torch.set_num_threads(1)
    print(f"{'precision':>9} {'cell':>18} {'torch ms':>9} {'ours ms':>9} {'speed':>6} {'losses':>8}")
    for precision in (None, torch.bfloat16):
        for cell in CELLS:
            plain, ours, difference = measure(cell, precision, steps)
            name = "float32" if precision is None else "bfloat16"
            print(f"{name:>9} {cell!s:>18} {plain:9.2f} {ours:9.2f} {plain / ours:6.2f} {difference:8.1e}", flush=True)


if __name__ == "__main__":
    main()
