"""Train a text GPT privately: the preset tiny, 256 windows a step in parts of 32, by PrivateStep.

    python examples/private_text.py --epsilon 8                 300 steps; 6 minutes on one core
    python examples/private_text.py --epsilon 8 --steps 20

Data: the standard library's sources as bytes, cut into windows of 65 that do not overlap. The unit of privacy is one
window. Needs accelerant[privacy]. Initial weights follow the seed; noise and draws are the system's randomness.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accelerant.nn import GPT, GPTConfig
from accelerant.nn.optim import AdamW
from accelerant.nn.train import Document, load_corpus, preset
from accelerant.privacy import dp
from accelerant.privacy.dp import PrivateStep

DELTA = 1e-6  # below one over the number of windows
BATCH, PART = 256, 32
Data = tuple[Tensor, Tensor]


def windows(documents: Sequence[Document], context: int) -> Data:
    """Return tokens (N, context) and the byte after each, for all documents concatenated."""
    text = np.frombuffer(b"".join(document.data for document in documents), np.uint8)
    count = len(text) // (context + 1)
    rows = torch.from_numpy(text[: count * (context + 1)].astype(np.int64)).view(count, context + 1)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def learn(learn_from: Data, epsilon: float, steps: int, seed: int = 0) -> tuple[GPT, dp.PrivateTraining]:
    """Train; return the model and the closed training."""
    run = preset("tiny")
    config = run.training
    torch.manual_seed(seed)
    model = GPT(GPTConfig(256, config.context, run.layers, run.heads, run.width))
    optimizer = AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
    with dp.make_private(
        model,
        optimizer,
        target_epsilon=epsilon,
        delta=DELTA,
        steps=steps,
        max_grad_norm=1.0,
        sample_rate=BATCH / len(learn_from[0]),
        microbatch=PART,
    ) as private:
        step = PrivateStep(private, model.loss)
        for batch in private.batches(learn_from):
            done = private.optimizer.steps / steps
            step(batch, config.learning_rate * min(1.0, 20 * done + 0.05) * (0.51 + 0.49 * math.cos(math.pi * done)))
    return model, private


def held_out_loss(model: GPT, data: Data, rows: int = 1024) -> float:
    """Return nats a byte over so many windows. For other people's text this is no release; for the same people's it is.

    They are spread evenly: neighbours are of one file, and the first ones of the standard library's are hard.
    """
    chosen = torch.linspace(0, len(data[0]) - 1, min(rows, len(data[0]))).long()
    with torch.no_grad():
        return float(model.loss(data[0][chosen], data[1][chosen]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print epsilon, noise multiplier and the loss on text that was held out."""
    parser = argparse.ArgumentParser(description="A private text GPT.")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args(arguments)
    corpus = load_corpus(["stdlib"])
    context = preset("tiny").context
    model, private = learn(windows(corpus.train, context), given.epsilon, given.steps)
    loss = held_out_loss(model, windows(corpus.held_out, context))
    print(f"| {given.epsilon:g} | {private.noise_multiplier:.3f} | {loss:.3f} |")


if __name__ == "__main__":
    main()
