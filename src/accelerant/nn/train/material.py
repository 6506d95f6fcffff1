"""What a GPT is trained on: a corpus turned into tokens in memory, or a token file prepared before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from accelerant.errors import ConfigError, FormatError
from accelerant.nn.train.batches import Tokens, require_windows
from accelerant.nn.train.corpus import Document, load_corpus, ngram_baselines
from accelerant.nn.train.presets import RunConfig
from accelerant.nn.train.tokenfile import BYTES, TokenFile, is_token_file
from accelerant.nn.train.tokenizer import ByteTokenizer, Tokenizer, load_bpe, train_bpe

__all__ = ["Material", "Watcher", "prepare_material", "tokenizer_hash", "tokenizer_path"]

_HELD_OUT = 20  # one part in so many, of a token file's end
_HELD_OUT_TOKENS = 1 << 24
_BASELINE_TOKENS = 1 << 22  # of a token file: n-grams of more bytes hardly change


class Watcher(Protocol):
    """Who watches the preparation."""

    def phase(self, text: str) -> None:
        """Something that takes a while begins."""

    def advance(self, share: float, text: str = "") -> None:
        """So much of the phase is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Material:
    """Tokens in two disjoint parts, and where they came from.

    Attributes:
        tokenizer: between text and tokens.
        train, held_out: to learn from, and to measure with.
        sha256: tells this material from others.
        description: for config.json: source, hash, sizes.
        baselines: held-out loss of a unigram and a bigram model of bytes, nats a byte.
    """

    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens
    sha256: str
    description: dict[str, Any]
    baselines: Callable[[], tuple[float, float]]


def prepare_material(run: RunConfig, watcher: Watcher, *, tokenizer_from: Path | None) -> Material:
    """Read a run's data.

    Args:
        run: names them.
        watcher: is told what takes long.
        tokenizer_from: a tokenizer.json to use instead of training one.

    Raises:
        ConfigError: they cannot be read, or are too short.
        FormatError: a token file is torn, or its tokenizer missing.
    """
    watcher.phase("reading the text")
    paths = [Path(name) for name in run.data]
    mapped = [path for path in paths if is_token_file(path)]
    if mapped:
        if len(paths) > 1:
            raise ConfigError(f"{mapped[0]} is a token file: name it alone")
        material = _mapped(mapped[0], tokenizer_from)
    else:
        material = _encoded(run, watcher, tokenizer_from)
    require_windows(material.train, run.recipe.context, "training")
    require_windows(material.held_out, run.recipe.context, "held-out")
    return material


def _encoded(run: RunConfig, watcher: Watcher, tokenizer_from: Path | None) -> Material:
    corpus = load_corpus(run.data)
    tokenizer: Tokenizer
    if run.recipe.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    elif tokenizer_from is not None:
        tokenizer = load_bpe(tokenizer_from)
    else:
        tokenizer = train_bpe(corpus, run.recipe.vocab_size, phase=watcher.phase, watch=watcher.advance)
    watcher.phase("encoding the text")
    held_out = tokenizer.encode(corpus.held_out)
    train = tokenizer.encode(corpus.train, watcher.advance)
    description = {
        "source": corpus.source,
        "sha256": corpus.sha256,
        "train_documents": len(corpus.train),
        "train_bytes": corpus.train_bytes,
        "train_tokens": len(train),
        "held_out_documents": len(corpus.held_out),
        "held_out_bytes": corpus.held_out_bytes,
        "held_out_tokens": len(held_out),
    }
    return Material(
        tokenizer,
        train,
        held_out,
        corpus.sha256,
        description,
        lambda: ngram_baselines(corpus.train, corpus.held_out),
    )


def tokenizer_path(tokens: Path) -> Path:
    """Where the tokenizer of a token file stands."""
    return tokens.with_name(f"{tokens.name}.tokenizer.json")


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """What a token file keeps of its tokenizer."""
    text = tokenizer.to_json()
    return BYTES if text is None else hashlib.sha256(text.encode()).hexdigest()


def _mapped(path: Path, tokenizer_from: Path | None) -> Material:
    file = TokenFile(path)
    tokenizer: Tokenizer = ByteTokenizer()
    if file.info.tokenizer != BYTES:
        beside = tokenizer_path(path) if tokenizer_from is None else tokenizer_from
        tokenizer = load_bpe(beside)
        if tokenizer_hash(tokenizer) != file.info.tokenizer:
            raise FormatError(f"{beside} is not the tokenizer that {path} was made with: prepare it again")
    held = min(len(file) // _HELD_OUT, _HELD_OUT_TOKENS)
    train, held_out = file.tokens[: len(file) - held], file.tokens[len(file) - held :]
    description = {
        "source": f"{path.name} ({file.info.source})",
        "sha256": file.info.sha256,
        "documents": file.info.documents,
        "text_bytes": file.info.text_bytes,
        "train_tokens": len(train),
        "held_out_tokens": len(held_out),
    }

    def baselines() -> tuple[float, float]:
        parts = [_decoded(tokenizer, tokens[:_BASELINE_TOKENS]) for tokens in (train, held_out)]
        return ngram_baselines([parts[0]], [parts[1]])

    return Material(tokenizer, train, held_out, file.info.sha256, description, baselines)


def _decoded(tokenizer: Tokenizer, tokens: Tokens) -> Document:
    if isinstance(tokenizer, ByteTokenizer):
        return Document("tokens", tokens.astype("uint8").tobytes())
    return Document("tokens", tokenizer.decode(tokens.tolist()).encode())
