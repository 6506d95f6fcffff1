"""`accelerant sample`: text from a trained model."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.files import clipped, decode_json, escaped, read_regular

if TYPE_CHECKING:
    import torch

    from accelerant.nn.models.language_model import LanguageModel
    from accelerant.nn.train.tokenizer import Tokenizer

__all__ = ["register", "sample"]

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


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("sample", epilog=_EXAMPLES, rich_help_panel="Training")(sample)


def sample(
    folder: _Folder, prompt: _Prompt = "", tokens: _Tokens = 200, temperature: _Temperature = 0.8, top_k: _TopK = 50,
    top_p: _TopP = 1.0, seed: _Seed = None, device: _Device = None, json_output: _Json = False,
) -> None:  # fmt: skip
    """Continue a prompt with a trained model.

    RUN is the folder of a run, finished or not, or a folder that transformers' save_pretrained wrote: GPT-2 or Llama,
    with its tokenizer. The text is printed while it is generated.
    """
    if not folder:
        raise ConfigError("RUN must not be empty: name a folder")
    if top_k < 0:
        raise ConfigError(f"--top-k must be 0 or more, got {top_k}")
    if tokens >= 2**31:
        raise ConfigError(f"--tokens must be below 2**31, got {tokens}")
    if seed is not None and not 0 <= seed < 2**63:
        raise ConfigError(f"--seed must be 0 to 2**63 - 1, got {seed}")
    from accelerant.nn.models.generation import Sampling

    Sampling(temperature, top_k or None, top_p)  # raises for other values before the model is loaded
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    except UnicodeDecodeError:
        raise ConfigError(f"the standard input is not text in {sys.stdin.encoding}") from None
    if any("\ud800" <= character <= "\udfff" for character in text):  # how Python shows bytes of other encodings
        raise ConfigError(f"the prompt is not UTF-8 text: {text!r}")
    seed = secrets.randbelow(2**31) if seed is None else seed
    source = _load(Path(folder).expanduser(), device)
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


@dataclass(frozen=True)
class _Source:
    """A model on its device, its tokenizer, and the tokens that end a text.

    Attributes:
        threads: maximum number on the CPU; 0 for one per core.
        start: tokens that begin a text without a prompt.
    """

    model: LanguageModel
    tokenizer: Tokenizer | _HubTokenizer
    device: torch.device
    stops: tuple[int, ...]
    start: tuple[int, ...]
    threads: int = 0

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt; raise FormatError if the model does not have them."""
        ids = self.tokenizer.encode_text(text) or list(self.start)
        size = self.model.config.vocab_size
        if ids and max(ids) >= size:
            raise FormatError(f"the tokenizer gives token {max(ids):,}, but the model has {size:,} tokens")
        return ids

    def generate(self, ids: list[int], tokens: int, **options: Any) -> list[int]:
        """Return the tokens of the prompt and its continuation."""
        import torch

        from accelerant.nn.train.config import TrainConfig
        from accelerant.nn.train.environment import numerics
        from accelerant.nn.train.objective import autocast, precision_of

        given = torch.tensor([ids], device=self.device)
        precision = precision_of(TrainConfig(), self.device)
        with numerics(deterministic=False, cpu_threads=self.threads), autocast(self.device, precision):
            return list(self.model.generate(given, tokens, stop=self.stops, **options)[0].tolist())


class _Stream:
    """Prints the text of tokens as they come, after the prompt."""

    def __init__(self, source: _Source, prompt: str, given: int, *, quiet: bool) -> None:
        self._source, self._given, self._quiet, self._printed = source, given, quiet, 0
        self._print(prompt)

    def __call__(self, tokens: torch.Tensor) -> None:
        if not self._quiet:
            text = self.text(tokens[0].tolist()).rstrip("\ufffd")  # the first bytes of a character
            self._print(text[self._printed :])
            self._printed = max(self._printed, len(text))

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text after the prompt, without what ends it."""
        stops = self._source.stops
        new = list(tokens[self._given :])
        ends = [index for index, token in enumerate(new) if token in stops]
        return self._source.tokenizer.decode(new[: ends[0]] if ends else new)

    def end(self, tokens: Sequence[int]) -> None:
        """Print the rest and a line end."""
        self._print(self.text(tokens)[self._printed :] + "\n")

    def _print(self, text: str) -> None:
        if not self._quiet:
            print("".join(c if c in "\n\t" else escaped(c) for c in text), end="", flush=True)


def _load(folder: Path, backend: str | None) -> _Source:
    """Load a run's model, or one of Hugging Face's format; raise ConfigError or FormatError if there is none."""
    from accelerant.cli.train import choose_device
    from accelerant.nn import GPT, Llama
    from accelerant.nn.models.hugging_face import read_object

    device = choose_device(backend, "--device")
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}: name a run's, or one with config.json and model.safetensors")
    if not (folder / "config.json").is_file():
        raise FormatError(f"{folder} holds no model: there is no config.json")
    config = read_object(folder / "config.json")
    if "format" in config:
        from accelerant.nn.train import load_run
        from accelerant.nn.train.config import RunConfig

        model, tokenizer = load_run(folder, device)
        end = tokenizer.end
        threads = RunConfig.from_dict(config.get("run")).cpu_threads  # type: ignore[arg-type]  # it raises for others
        start = tokenizer.encode_text("\n") if end is None else [end]
        return _Source(model, tokenizer, device, () if end is None else (end,), tuple(start), threads)
    kind = config.get("model_type")
    kinds: dict[str, type[LanguageModel]] = {"gpt2": GPT, "llama": Llama}
    if not isinstance(kind, str) or kind not in kinds:
        raise FormatError(f"{folder / 'config.json'}: model_type must be {' or '.join(kinds)}, got {clipped(kind)}")
    hub = _HubTokenizer(folder)
    loaded = kinds[kind].from_pretrained(folder, device=device)
    generation = folder / "generation_config.json"
    ends = {**config, **(read_object(generation) if generation.is_file() else {})}.get("eos_token_id")
    size = loaded.config.vocab_size
    stops = [
        token for token in (ends if isinstance(ends, list) else [ends]) if type(token) is int and 0 <= token < size
    ]
    begin = [token for token in (config.get("bos_token_id"), *stops) if type(token) is int and 0 <= token < size]
    return _Source(loaded, hub, device, tuple(stops), tuple(begin[:1] or hub.encode_text("\n")))


class _HubTokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, or vocab.json and merges.txt of a byte-level BPE."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        path, parts = folder / "tokenizer.json", (folder / "vocab.json", folder / "merges.txt")
        try:
            if path.is_file():
                text = read_regular(path, 1 << 28).decode()
                if not isinstance(decode_json(text), dict):
                    raise ValueError("it must hold an object")
                self._inner: Any = tokenizers.Tokenizer.from_str(text)
            elif all(part.is_file() for part in parts):
                self._inner = tokenizers.ByteLevelBPETokenizer(*map(str, parts))
            else:
                raise FileNotFoundError("there is none")
        except Exception as error:  # noqa: BLE001  the library raises bare Exception
            raise FormatError(
                f"cannot read the tokenizer {path}: {str(error)[:300]}; write it with transformers: "
                f"AutoTokenizer.from_pretrained(NAME).save_pretrained({str(folder)!r})"
            ) from None

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with those that begin a text."""
        return list(self._inner.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=True))
