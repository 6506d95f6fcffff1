"""Train a small GPT on text from Python, save it, load it again, and continue a prompt.

    python examples/train_from_python.py [FILE ...]

Without files it learns from the sources of Python's standard library's json package. About 10 seconds on one core.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

import accelerant as acl
from accelerant.nn.train import TrainConfig, fit, prepare_tokens


def main(*paths: str) -> None:
    """Print the losses and a continuation."""
    sources = list(paths) or [str(Path(json.__file__).parent)]
    with tempfile.TemporaryDirectory() as folder:
        tokens = f"{folder}/text.tokens"
        info = prepare_tokens(sources, tokens, tokenizer="bytes")
        print(f"{info.count:,} tokens")

        torch.manual_seed(0)
        model = acl.nn.GPT(acl.nn.GPTConfig(vocab_size=256, context=64, layers=2, heads=4, width=64))
        config = TrainConfig(
            steps=200, batch_size=16, context=64, learning_rate=5e-3, schedule="cosine", warmup=0.05,
            out=f"{folder}/run",  # checkpoints; the same call with resume=True continues after Ctrl-C
        )  # fmt: skip
        history = fit(model, tokens, None, config)
        print(history)
        if history.losses[-1] >= history.losses[0]:
            raise SystemExit("the loss did not fall")

        model.save_pretrained(f"{folder}/model")  # safetensors, as transformers reads them
        loaded = acl.nn.GPT.from_pretrained(f"{folder}/model")
        prompt = torch.tensor([list(b"def ")])
        text = loaded.generate(prompt, 80, temperature=0.5, seed=0)
        print(bytes(text[0].tolist()).decode("utf-8", "replace"))


if __name__ == "__main__":
    main(*sys.argv[1:])
