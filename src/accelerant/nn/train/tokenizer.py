"""Text to tokens and back: plain bytes, or a byte-level BPE trained by the `tokenizers` library.

A trained BPE is kept in the cache folder under the corpus's hash, the vocabulary's size and the library's
version, so that the second run on a corpus starts at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from accelerant.config import settings
from accelerant.errors import FormatError
from accelerant.nn.train.checkpoint import write_atomic
from accelerant.nn.train.corpus import Corpus, Document

__all__ = ["BPETokenizer", "ByteTokenizer", "Tokenizer", "load_bpe", "train_bpe"]

END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """What training needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    @property
    def byte_lengths(self) -> NDArray[np.int64]:
        """(vocab_size,), bytes of text that each token stands for; 0 for the end of a document."""

    def encode(self, documents: Sequence[Document]) -> NDArray[np.uint16 | np.uint32]:
        """All documents as one row of tokens, ends marked."""

    def encode_text(self, text: str) -> list[int]:
        """A prompt's tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; bytes that are no UTF-8 become U+FFFD."""

    def to_json(self) -> str | None:
        """The content of tokenizer.json, or None where there is nothing to keep."""


class ByteTokenizer:
    """Each byte is a token; a newline stands between documents."""

    vocab_size = 256
    byte_lengths: NDArray[np.int64] = np.ones(256, np.int64)

    def encode(self, documents: Sequence[Document]) -> NDArray[np.uint16 | np.uint32]:
        """All documents as one row of tokens."""
        text = b"\n".join(document.data for document in documents)
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def encode_text(self, text: str) -> list[int]:
        """A prompt's bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some bytes."""
        return bytes(tokens).decode("utf-8", "replace")

    def to_json(self) -> str | None:
        """Nothing to keep."""
        return None


class BPETokenizer:
    """A byte-level BPE; `<|endoftext|>` stands after each document."""

    def __init__(self, text: str) -> None:
        import tokenizers

        try:
            self._inner: Any = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001  the library raises bare Exception
            raise FormatError(f"not a tokenizer: {error}") from None
        self._end = self._inner.token_to_id(END_OF_TEXT)
        if self._end is None:
            raise FormatError(f"tokenizer has no {END_OF_TEXT} token")
        self.vocab_size = int(self._inner.get_vocab_size())
        self.byte_lengths = np.zeros(self.vocab_size, np.int64)
        for token, index in self._inner.get_vocab().items():
            # Byte-level BPE writes each byte as one character of its own alphabet.
            self.byte_lengths[index] = 0 if token == END_OF_TEXT else len(token)

    def encode(self, documents: Sequence[Document]) -> NDArray[np.uint16 | np.uint32]:
        """All documents as one row of tokens."""
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        rows = []
        for start in range(0, len(documents), 256):  # bounds the memory of the library's own objects
            texts = [document.data.decode("utf-8", "replace") for document in documents[start : start + 256]]
            rows += [np.array([*row.ids, self._end], dtype) for row in self._inner.encode_batch(texts)]
        return np.concatenate(rows) if rows else np.zeros(0, dtype)

    def encode_text(self, text: str) -> list[int]:
        """A prompt's tokens."""
        return list(self._inner.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=False))

    def to_json(self) -> str | None:
        """The library's own format."""
        return str(self._inner.to_str(pretty=True))


def load_bpe(path: Path) -> BPETokenizer:
    """Read a tokenizer.json.

    Raises:
        FormatError: it is not there or holds no byte-level BPE of ours.
    """
    try:
        return BPETokenizer(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"cannot read the tokenizer {path}: {error}") from None


def train_bpe(corpus: Corpus, vocab_size: int) -> BPETokenizer:
    """The BPE of a corpus's training part, from the cache where it was trained before.

    Args:
        corpus: its held-out part is not looked at.
        vocab_size: an upper bound; little text gives fewer tokens.
    """
    import tokenizers

    key = hashlib.sha256(f"1 {tokenizers.__version__} {corpus.sha256} {vocab_size}".encode()).hexdigest()[:32]
    path = settings().cache_dir / "tokenizers" / f"{key}.json"
    if path.is_file():
        try:
            return load_bpe(path)
        except FormatError:
            path.unlink(missing_ok=True)  # torn by another program: train again
    tokenizer = BPETokenizer(_trained(corpus.train, vocab_size))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (tokenizer.to_json() or "").encode())
    except OSError:
        pass  # an unwritable cache costs time only
    return tokenizer


def _trained(documents: Sequence[Document], vocab_size: int) -> str:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.data.decode("utf-8", "replace") for document in documents), trainer)
    return str(tokenizer.to_str())
