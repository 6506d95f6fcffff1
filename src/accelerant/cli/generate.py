"""`accelerant generate` and `sample`: text from the models of folders."""

from __future__ import annotations

import json
import queue
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.cli.help import examples, option
from accelerant.errors import AccelerantError, ConfigError, UnsupportedCase
from accelerant.runtime.files import clipped, escaped

if TYPE_CHECKING:
    import torch

    from accelerant.nn.models.language_model import Sampling
    from accelerant.nn.models.llama import Llama
    from accelerant.nn.models.tokenizer import ModelTokenizer
    from accelerant.nn.serving.engine import Event

_Tokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
_Temperature = Annotated[float, typer.Option(help="0: always the likeliest token; 1: as the model predicts.")]
_TopK = Annotated[int, typer.Option(help="Draw from this many likeliest tokens; 0: from all.")]
_TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens whose probabilities reach this sum.")]
_Seed = Annotated[int | None, typer.Option(help="Seed of the draw. Default: another one each time.")]
_Device = Annotated[str | None, typer.Option(help="auto, cuda or cpu. Default: auto.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and no text before.")]


def _drawing(tokens: int, temperature: float, top_k: int, top_p: float, seed: int | None) -> tuple[int, Sampling]:
    """Return the seed, drawn if there is none, and the distribution; ConfigError for an option out of range."""
    if top_k < 0:
        raise ConfigError(f"--top-k must be 0 or more, got {top_k}")
    if tokens >= 2**31:
        raise ConfigError(f"--tokens must be below 2**31, got {tokens}")
    if seed is not None and not 0 <= seed < 2**63:
        raise ConfigError(f"--seed must be 0 to 2**63 - 1, got {seed}")
    from accelerant.nn.models.language_model import Sampling

    sampling = Sampling(temperature, top_k or None, top_p if top_p != 1 else None)
    return secrets.randbelow(2**31) if seed is None else seed, sampling


def _prompt_text(prompt: str) -> str:
    """Return the prompt, or the standard input in place of -; ConfigError if it is not text."""
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    except UnicodeDecodeError:
        raise ConfigError(f"the standard input is not text in {sys.stdin.encoding}") from None
    if any("\ud800" <= character <= "\udfff" for character in text):  # how Python shows bytes of other encodings
        raise ConfigError(f"the prompt is not UTF-8 text: {clipped(text)}")
    return text


def _print(text: str) -> None:
    """Print text of a model, whose control characters are escaped, without a line end."""
    print("".join(c if c in "\n\t" else escaped(c) for c in text), end="", flush=True)


# --- accelerant generate ---------------------------------------------------------------------------------------------
_EXAMPLES = """\
accelerant generate ./llama "Once upon a time"
accelerant generate ./llama "What is a prime number?" --chat --int8 --seed 1
accelerant generate ./llama "def add(" --temperature 0 --stop "def "
cat question.txt | accelerant generate ./llama - --chat"""

_BLOCK = 16  # tokens of a block of keys and values


@examples(_EXAMPLES)
def generate(
    call: typer.Context,
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder of a Llama, Qwen2, Qwen3 or Mistral, or a GGUF file.")
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads the standard input.")],
    chat: bool = option("The prompt is a message, which the model answers by its chat template.", default=False),
    tokens: _Tokens = 256,
    temperature: _Temperature = 0.8,
    top_p: _TopP = 1.0,
    top_k: _TopK = 50,
    seed: _Seed = None,
    stop: list[str] | None = option("Text that ends the answer; several.", metavar="TEXT"),
    int8: bool = option("Linear layers in 8-bit integers.", default=False),
    int4: bool = option("Linear layers in 4-bit integers, in groups of 128.", default=False),
    device: _Device = None,
    gpus: int | None = option(
        "Split the model over N GPUs of this machine; with --device cpu, processes.", min=1, metavar="N"
    ),
    json_output: _Json = False,
) -> None:
    """Continue a prompt, or answer a message, with a model in Hugging Face's format; the text comes as it is generated.

    FOLDER has config.json, safetensors and tokenizer.json, as transformers writes them. Nothing is downloaded.
    """
    if int8 and int4:
        raise ConfigError("--int8 and --int4 exclude each other")
    quantize = "int8" if int8 else "int4" if int4 else None
    text = _prompt_text(prompt)
    seed, sampling = _drawing(tokens, temperature, top_k, top_p, seed)
    from accelerant.cli.train import choose_device, joined, rank, spawn, world_size

    if gpus is not None and gpus > 1 and world_size() == 1:
        if prompt == "-":
            raise ConfigError("--gpus takes the prompt as an argument, not from the standard input")
        spawn(gpus, device, [*call.obj, "--seed", str(seed)], restarts=0, kept=str, advice=str)
    place = choose_device(device, "--device")
    try:
        with joined(place):
            values = _answered(
                folder, text, chat, place, quantize, (tokens, sampling, seed, stop or []), quiet=json_output
            )
    except UnsupportedCase as error:
        raise ConfigError(str(error)) from None
    if json_output and rank() == 0:
        print(json.dumps({**values, "top_k": top_k, "top_p": top_p, "model": folder}))


def _answered(
    folder: str, text: str, chat: bool, place: torch.device, quantize: str | None,
    drawing: tuple[int, Sampling, int, list[str]], *, quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    """Load the model, print its answer as it comes unless `quiet`, and return it with its figures."""
    from accelerant.cli.train import rank
    from accelerant.nn.serving import Finished, Token

    model, tokenizer = _loaded(folder, place, quantize)
    ids = tokenizer.apply_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    ids = ids or [tokenizer.bos_id or 0]
    shown, began = not quiet and rank() == 0, time.perf_counter()
    answer, finished, first_s = "", None, None
    for event in answer_events(model, tokenizer, ids, *drawing):
        if isinstance(event, Finished):
            finished = event
        elif isinstance(event, Token):
            first_s = time.perf_counter() - began if first_s is None else first_s
            answer += event.text_delta or ""
            if shown:
                _print(event.text_delta or "")
    assert finished is not None  # for the type checker: it is the last event
    if finished.error is not None:
        raise AccelerantError(f"the model failed: {finished.error}")
    if shown:
        print()
    seconds, count = time.perf_counter() - began, finished.usage.completion_tokens
    return {
        "prompt": text, "text": answer, "tokens": count, "prompt_tokens": len(ids), "finish_reason": finished.reason,
        "seed": drawing[2], "temperature": drawing[1].temperature, "device": str(place), "seconds": round(seconds, 3),
        "first_token_s": round(first_s or seconds, 3), "tokens_per_s": round(count / seconds, 1),
    }  # fmt: skip


def _loaded(folder: str, place: torch.device, quantize: str | None) -> tuple[Llama, ModelTokenizer]:
    """Return the model, or this process's part of it where several have joined, and its tokenizer."""
    from accelerant.cli.train import world_size
    from accelerant.nn.models.llama import load_model

    path = Path(folder).expanduser()
    if world_size() == 1:
        return load_model(path, device=place, quantize=quantize)
    from accelerant.distributed.tensor_parallel import load_split_model

    return load_split_model(path, place, quantize=quantize)


def answer_events(
    model: Llama, tokenizer: ModelTokenizer, ids: list[int], tokens: int, sampling: Sampling, seed: int,
    stops: Sequence[str],
) -> Iterator[Event]:  # fmt: skip
    """Yield the events of an answer, of as many tokens as the context has room for."""
    from accelerant.nn.serving import Engine

    if (room := model.config.context - len(ids)) < 1:
        raise ConfigError(f"the prompt has {len(ids):,} tokens, and the model reads {model.config.context:,}")
    tokens = min(tokens, room)
    blocks = -(-(len(ids) + tokens) // _BLOCK)
    split = hasattr(model, "mesh")  # every process then takes the same steps
    with Engine(model, blocks, block_size=_BLOCK, tokenizer=tokenizer, start=not split) as engine:
        answer = engine.submit(ids, sampling, max_tokens=tokens, seed=seed, stop=stops)
        while split and engine.step():
            with suppress(queue.Empty, StopIteration):
                while True:
                    yield answer.get(timeout=0)
        yield from answer


# --- accelerant sample -----------------------------------------------------------------------------------------------
_SAMPLE_EXAMPLES = """\
accelerant sample runs/tiny --prompt "def "
accelerant sample ./gpt2 --prompt "Once upon a time" --tokens 100 --seed 1
cat question.txt | accelerant sample ./llama --prompt -"""

_Folder = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder of a run of accelerant train, or of a GPT-2 or Llama model.")
]
_Prompt = Annotated[str, typer.Option(help="Text to continue; - reads it from the standard input. Default: none.")]


@examples(_SAMPLE_EXAMPLES)
def sample(
    folder: _Folder, prompt: _Prompt = "", tokens: _Tokens = 200, temperature: _Temperature = 0.8, top_k: _TopK = 50,
    top_p: _TopP = 1.0, seed: _Seed = None, device: _Device = None, json_output: _Json = False,
) -> None:  # fmt: skip
    """Continue a prompt with a trained model.

    RUN is the folder of a run, finished or not, or a folder that transformers' save_pretrained wrote: GPT-2 or Llama,
    with its tokenizer. The text is printed while it is generated.
    """
    text = _prompt_text(prompt)
    from accelerant.cli.train import choose_device
    from accelerant.nn.models.tokenizer import load_text_model

    seed, _ = _drawing(tokens, temperature, top_k, top_p, seed)
    source = load_text_model(Path(folder).expanduser(), choose_device(device, "--device"))
    ids = source.prompt(text)
    shown = ""

    def show(tokens: Sequence[int], last: bool = False) -> str:
        """Print what is new of the text, of whose last character some bytes may be missing, and return it whole."""
        nonlocal shown
        found = source.text(tokens, len(ids))
        new = found if last else found.rstrip("\ufffd")
        if not json_output:
            _print(new[len(shown) :] + "\n" * last)
        shown = max(shown, new, key=len)
        return found

    def watch(tokens: torch.Tensor) -> None:
        if not json_output:
            show(tokens[0].tolist())

    if not json_output:
        _print(text)
    began = time.perf_counter()
    result = source.generate(
        ids, tokens, temperature=temperature, top_k=top_k or None, top_p=top_p if top_p < 1 else None, seed=seed,
        watch=watch,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    answer = show(result, last=True)
    if json_output:
        count = len(result) - len(ids)
        values = {
            "prompt": text, "text": answer, "tokens": count, "seed": seed, "temperature": temperature,
            "top_k": top_k, "top_p": top_p, "ended": count < tokens or result[-1] in source.stops, "model": folder,
            "device": str(source.device), "seconds": round(seconds, 3), "tokens_per_s": round(count / seconds, 1),
        }  # fmt: skip
        print(json.dumps(values))
