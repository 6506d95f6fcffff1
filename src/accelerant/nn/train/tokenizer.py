"""Text to tokens and back: plain bytes, or a byte-level BPE trained by the `tokenizers` library.

A trained BPE is kept in the cache folder under the corpus's hash, the vocabulary's size and the library's
version, so that the second run on a corpus starts at once.
"""

from __future__ import annotations

import collections
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from accelerant.config import settings
from accelerant.errors import FormatError
from accelerant.runtime.files import write_atomic

if TYPE_CHECKING:
    from accelerant.nn.train.corpus import Corpus, Document

__all__ = ["BPETokenizer", "ByteTokenizer", "Tokenizer", "last_cut", "load_bpe", "train_bpe", "train_bpe_on"]

END_OF_TEXT = "<|endoftext|>"

Watch = Callable[[float], None]
"""Is told which part of a work is done, 0 to 1."""

_PIECE = 1 << 18  # characters: a long document's pieces keep all cores busy
_BATCH = 1 << 22  # characters at once: bounds the memory of the library's own objects
_SPACE = re.compile(r"(?<=[^\s\u180e]) (?=[^\s\u180e])")
_LINE = re.compile(r"(?<=[^\s\u180e])\n")
"""The pre-tokenizer ends a word there, whatever stands around it; what Python and older Unicode call white space is
more than what it does. A space between two words is the better place: every byte-level tokenizer ends a word there, and
none writes a space of its own before it. Text without spaces between words has line ends."""

_WINDOW = 1 << 16  # characters that are looked through for the last cut at a time
_LONGEST_WORD = 256  # characters; see _bounded
_LONG = re.compile(rf"\S{{{_LONGEST_WORD}}}|\s{{{_LONGEST_WORD}}}")


def _unwatched(_: float) -> None:
    """Nobody looks."""


class Tokenizer(Protocol):
    """What training needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    @property
    def byte_lengths(self) -> NDArray[np.int64]:
        """(vocab_size,), bytes of text that each token stands for; 0 for the end of a document."""

    def encode(self, documents: Sequence[Document], watch: Watch = ...) -> NDArray[np.uint16 | np.uint32]:
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

    def encode(self, documents: Sequence[Document], watch: Watch = _unwatched) -> NDArray[np.uint16 | np.uint32]:
        """All documents as one row of tokens."""
        text = b"\n".join(document.data for document in documents)
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> NDArray[np.uint16 | np.uint32]:
        """Parts of documents in a row, each with whether it is its document's last: a newline follows that."""
        text = "".join(piece + "\n" * last for piece, last in pieces)
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

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
        self._inner.encode_special_tokens = True  # "<|endoftext|>" in a text is text; only `encode` ends documents
        self._end = self._inner.token_to_id(END_OF_TEXT)
        if self._end is None:
            raise FormatError(f"tokenizer has no {END_OF_TEXT} token")
        self.vocab_size = int(self._inner.get_vocab_size())
        self.byte_lengths = np.zeros(self.vocab_size, np.int64)
        for token, index in self._inner.get_vocab().items():
            # Byte-level BPE writes each byte as one character of its own alphabet.
            self.byte_lengths[index] = 0 if token == END_OF_TEXT else len(token)

    def encode(self, documents: Sequence[Document], watch: Watch = _unwatched) -> NDArray[np.uint16 | np.uint32]:
        """All documents as one row of tokens; the library uses all cores."""
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        end = np.array([self._end], dtype)
        rows = []
        for batch, share in _batches(documents):
            texts = [text for text, _ in batch]
            for row, (_, last) in zip(self._inner.encode_batch_fast(texts), batch, strict=True):
                rows += [np.array(row.ids, dtype), end] if last else [np.array(row.ids, dtype)]
            watch(share)
        return np.concatenate(rows) if rows else np.zeros(0, dtype)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> NDArray[np.uint16 | np.uint32]:
        """Parts of documents in a row, each with whether it is its document's last; cut where a word ends anyway."""
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        small: list[tuple[str, bool]] = []
        for text, last in pieces:
            parts = list(_pieces(text))
            small += [(part, last and number == len(parts)) for number, part in enumerate(parts, 1)]
        rows = []
        for row, (_, last) in zip(self._inner.encode_batch_fast([text for text, _ in small]), small, strict=True):
            rows.append(np.array([*row.ids, self._end] if last else row.ids, dtype))
        return np.concatenate(rows)

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


def _pieces(text: str) -> Iterator[str]:
    """A text in parts that, encoded one by one, give the tokens of the whole."""
    start = 0
    while len(text) - start > _PIECE:
        at = start + _PIECE
        found = _SPACE.search(text, at, at + _PIECE) or _LINE.search(text, at)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def last_cut(text: str, since: int) -> int:
    """Where to cut a text that goes on so that the tokens stay those of the whole; 0 for nowhere.

    Args:
        text: what is there of it.
        since: how many characters of it were looked through before.
    """
    for place in (_SPACE, _LINE):
        end = len(text)
        while end > since:
            start = max(since - 1, end - _WINDOW, 0)
            found = collections.deque(place.finditer(text, start, min(end + 1, len(text))), maxlen=1)
            if found:
                return found[0].start()
            end = start
    return 0


def _batches(documents: Sequence[Document]) -> Iterator[tuple[list[tuple[str, bool]], float]]:
    """Pieces of documents, each with whether it is its document's last, and the part of the bytes done with them."""
    total, done, size = max(1, sum(len(document.data) for document in documents)), 0, 0
    batch: list[tuple[str, bool]] = []
    for document in documents:
        pieces = list(_pieces(document.data.decode("utf-8", "replace")))
        for number, piece in enumerate(pieces, 1):
            batch.append((piece, number == len(pieces)))
            size += len(piece)
            if size >= _BATCH:
                yield batch, min(1.0, (done + len(document.data) * number / len(pieces)) / total)
                batch, size = [], 0
        done += len(document.data)
    if batch:
        yield batch, 1.0


def train_bpe(
    corpus: Corpus, vocab_size: int, *, phase: Callable[[str], None] | None = None, watch: Watch = _unwatched
) -> BPETokenizer:
    """The BPE of a corpus's training part, from the cache where it was trained before.

    Args:
        corpus: its held-out part is not looked at.
        vocab_size: an upper bound; little text gives fewer tokens.
        phase: is told what is done, where the tokenizer is not in the cache.
        watch: is told which part of the text is read.
    """
    import tokenizers

    key = hashlib.sha256(f"2 {tokenizers.__version__} {corpus.sha256} {vocab_size}".encode()).hexdigest()[:32]
    path = settings().cache_dir / "tokenizers" / f"{key}.json"
    if path.is_file():
        try:
            return load_bpe(path)
        except FormatError:
            path.unlink(missing_ok=True)  # torn by another program: train again
    if phase is not None:
        phase("training the tokenizer (kept for the next run)")

    def advanced(share: float) -> None:
        watch(share)
        if share == 1.0 and phase is not None:
            phase(f"choosing up to {vocab_size:,} tokens")

    tokenizer = BPETokenizer(_trained(_texts(corpus.train, advanced), vocab_size))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (tokenizer.to_json() or "").encode())
    except OSError:
        pass  # an unwritable cache costs time only
    return tokenizer


def train_bpe_on(texts: Iterator[str], vocab_size: int) -> BPETokenizer:
    """The BPE of some texts, in memory that grows with their words alone."""
    return BPETokenizer(_trained(texts, vocab_size))


def _texts(documents: Sequence[Document], watch: Watch) -> Iterator[str]:
    for batch, share in _batches(documents):
        yield from (text for text, _ in batch)
        watch(share)


def _bounded(texts: Iterator[str]) -> Iterator[str]:
    """The texts, cut so that no word is longer than _LONGEST_WORD and a space.

    The library's training takes time by the square of a word's length: 156 s for one of 270 KB. Encoding does not.
    """
    for text in texts:
        start, found = 0, _LONG.search(text)
        while found is not None:
            yield text[start : found.end()]
            start = found.end()
            found = _LONG.search(text, start)
        yield text[start:]


def _trained(texts: Iterator[str], vocab_size: int) -> str:
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

    tokenizer.train_from_iterator(_bounded(texts), trainer)
    return str(tokenizer.to_str())
