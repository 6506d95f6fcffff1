"""`accelerant sample`: text from a trained model."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.cli.help import examples
from accelerant.errors import ConfigError
from accelerant.runtime.files import escaped

if TYPE_CHECKING:
    import torch

    from accelerant.nn.text import TextModel

_EXAMPLES = """\
accelerant sample runs/tiny --prompt "def "
accelerant sample ./gpt2 --prompt "Once upon a time" --tokens 100 --seed 1
cat question.txt | accelerant sample ./llama --prompt -"""

_Folder = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder of a run of accelerant train, or of a GPT-2 or Llama model.")
]
_Prompt = Annotated[str, typer.Option(help="Text to continue; - reads it from the standard input. Default: none.")]
_Tokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
_Temperature = Annotated[float, typer.Option(help="0: always the likeliest token; 1: as the model predicts.")]
_TopK = Annotated[int, typer.Option(help="Draw from this many likeliest tokens; 0: from all.")]
_TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens whose probabilities reach this sum.")]
_Seed = Annotated[int | None, typer.Option(help="Seed of the draw. Default: another one each time.")]
_Device = Annotated[str | None, typer.Option(help="auto, cuda or cpu. Default: auto.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and no text before.")]


@examples(_EXAMPLES)
def sample(
    folder: _Folder, prompt: _Prompt = "", tokens: _Tokens = 200, temperature: _Temperature = 0.8, top_k: _TopK = 50,
    top_p: _TopP = 1.0, seed: _Seed = None, device: _Device = None, json_output: _Json = False,
) -> None:  # fmt: skip
    """Continue a prompt with a trained model.

    RUN is the folder of a run, finished or not, or a folder that transformers' save_pretrained wrote: GPT-2 or Llama,
    with its tokenizer. The text is printed while it is generated.
    """
    if top_k < 0:
        raise ConfigError(f"--top-k must be 0 or more, got {top_k}")
    if tokens >= 2**31:
        raise ConfigError(f"--tokens must be below 2**31, got {tokens}")
    if seed is not None and not 0 <= seed < 2**63:
        raise ConfigError(f"--seed must be 0 to 2**63 - 1, got {seed}")
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    except UnicodeDecodeError:
        raise ConfigError(f"the standard input is not text in {sys.stdin.encoding}") from None
    if any("\ud800" <= character <= "\udfff" for character in text):  # how Python shows bytes of other encodings
        raise ConfigError(f"the prompt is not UTF-8 text: {text!r}")
    from accelerant.cli.train import choose_device
    from accelerant.nn.models.language_model import Sampling
    from accelerant.nn.text import load_text_model

    Sampling(temperature, top_k or None, top_p)  # raises for other values before the model is loaded
    seed = secrets.randbelow(2**31) if seed is None else seed
    source = load_text_model(Path(folder).expanduser(), choose_device(device, "--device"))
    ids = source.prompt(text)
    shown = _Stream(source, text, len(ids), quiet=json_output)
    began = time.perf_counter()
    result = source.generate(
        ids, tokens, temperature=temperature, top_k=top_k or None, top_p=top_p if top_p < 1 else None, seed=seed,
        watch=shown,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    shown.end(result)
    if json_output:
        count = len(result) - len(ids)
        values = {
            "prompt": text, "text": shown.text(result), "tokens": count, "seed": seed, "temperature": temperature,
            "top_k": top_k, "top_p": top_p, "ended": count < tokens or result[-1] in source.stops, "model": folder,
            "device": str(source.device), "seconds": round(seconds, 3), "tokens_per_s": round(count / seconds, 1),
        }  # fmt: skip
        print(json.dumps(values))


class _Stream:
    """Prints the text of tokens as they come, after the prompt."""

    def __init__(self, source: TextModel, prompt: str, given: int, *, quiet: bool) -> None:
        self._source, self._given, self._quiet, self._printed = source, given, quiet, 0
        self._print(prompt)

    def __call__(self, tokens: torch.Tensor) -> None:
        if not self._quiet:
            text = self.text(tokens[0].tolist()).rstrip("\ufffd")  # the first bytes of a character
            self._print(text[self._printed :])
            self._printed = max(self._printed, len(text))

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text after the prompt, without what ends it."""
        return self._source.text(tokens, self._given)

    def end(self, tokens: Sequence[int]) -> None:
        """Print the rest and a line end."""
        self._print(self.text(tokens)[self._printed :] + "\n")

    def _print(self, text: str) -> None:
        if not self._quiet:
            print("".join(c if c in "\n\t" else escaped(c) for c in text), end="", flush=True)
