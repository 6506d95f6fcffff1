"""Text to train on: its files, the part that is held out, and its tokens, in memory or in a token file.

Files are read in the order of their names, so that one machine always reads the same corpus. Blocks of all documents
are held out: both parts have text of every large document.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np

from accelerant.errors import ConfigError, FormatError
from accelerant.nn.train.config import STDLIB, Paths, RunConfig, TrainConfig, paths_of
from accelerant.nn.train.data import permutation, require_windows
from accelerant.nn.train.documents import TOKENIZER_SUFFIX, Document, Reading
from accelerant.nn.train.tokenfile import BYTES, TokenFile, TokenFileInfo, Tokens, TokenWriter, is_token_file
from accelerant.nn.train.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    last_cut,
    load_bpe,
    train_bpe,
    train_bpe_on,
)
from accelerant.runtime.files import decode_json, escaped, open_regular, write_atomic

__all__ = [
    "Corpus", "Document", "TokenizedText", "Watcher", "load_corpus", "ngram_baselines", "prepare_tokens",
    "tokenize", "tokenizer_hash", "tokenizer_path",
]  # fmt: skip

_HELD_OUT = 0.05  # of the text; of a short one, which has few windows, the second
_HELD_OUT_OF_LITTLE, _LITTLE = 0.1, 1 << 20
_BLOCKS, _LONGEST_BLOCK = 16, 1 << 16  # held-out blocks at least, where the windows allow it, and their bytes at most
_HELD_OUT_DRAW = (1 << 64) - 1  # the number of the draw, beside those of the epochs


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text in two disjoint parts, with its origin, for people, and the SHA-256 of all names and contents.

    The documents of the parts are blocks of those that `reading` lists.
    """

    source: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    sha256: str
    reading: Reading = field(default_factory=Reading)

    def __repr__(self) -> str:
        return f"Corpus({self.source!r}: {self.train_bytes:,} bytes to train on, {self.held_out_bytes:,} held out)"

    @property
    def train_bytes(self) -> int:
        """Size of the training part."""
        return sum(len(document.data) for document in self.train)

    @property
    def held_out_bytes(self) -> int:
        """Size of the held-out part."""
        return sum(len(document.data) for document in self.held_out)


def load_corpus(data: Paths, *, seed: int = 0, window_bytes: int = 1024, fixed: bool = False) -> Corpus:
    """Read a corpus and hold out blocks of it.

    Args:
        data: "stdlib" for the source code of the running Python's standard library, or a path, or several. A folder
            means the text files in it, except hidden ones. A file that is named twice, or has the text of another, is
            read once: otherwise its held-out blocks would be trained on. What is no text is left out.
        seed: of the held-out blocks.
        window_bytes: about the length of a window; a block has at least two.
        fixed: whether the sizes of the documents alone decide what is held out, as private training needs it: then
            blocks may end inside a character, and files with the same text are kept.

    Raises:
        ConfigError: a path does not exist or cannot be read, or there is no text.
    """
    names, reading = list(paths_of(data)), Reading()
    if names == [STDLIB]:
        root = Path(sysconfig.get_paths()["stdlib"])
        documents = reading.documents([str(root)], distinct=not fixed, suffix=".py")
        reading.skipped, reading.converted = [], []
        source = f"the standard library of Python {sysconfig.get_python_version()}"
    else:
        if not all(names):
            raise ConfigError("--data names an empty path: give stdlib, files or folders")
        documents = reading.documents(names, distinct=not fixed)
        source = escaped(", ".join(dict.fromkeys(names)))
    reading.require_text(source)
    digest = hashlib.sha256(b"blocks ")  # runs of an earlier version held out other parts
    for document in documents:
        digest.update(f"{len(document.name)} {document.name} {len(document.data)} ".encode("utf-8", "surrogateescape"))
        digest.update(document.data)
    train, held_out = _split(documents, seed, window_bytes, fixed)
    return Corpus(source, tuple(train), tuple(held_out), digest.hexdigest(), reading)


def _split(
    documents: Sequence[Document], seed: int, window_bytes: int, fixed: bool
) -> tuple[list[Document], list[Document]]:
    """Cut the documents into blocks, and hold out one of each run of about 10 or 20, drawn by the seed.

    Blocks of one document that follow each other stay together.
    """
    total = sum(len(document.data) for document in documents)
    share = _HELD_OUT if total > _LITTLE else _HELD_OUT_OF_LITTLE
    if len(documents) > 1 and total < 8 * window_bytes:  # both parts must have a window
        documents = [Document("text", b"\n".join(document.data for document in documents))]
    size = max(2 * window_bytes, min(_LONGEST_BLOCK, int(share * total) // _BLOCKS))
    size = max(window_bytes, min(size, total // 4))
    edges = [_edges(document.data, max(1, len(document.data) // size), fixed) for document in documents]
    sizes = np.concatenate([np.diff(each) for each in edges])
    chosen, order = _drawn(len(sizes), round(share * len(sizes)), seed)
    held, rest = sizes[sorted(chosen)].sum(), iter(order)
    while held < window_bytes and 2 * held < total and (block := next(rest, None)) is not None:  # documents are short
        held += 0 if block in chosen else sizes[block]
        chosen.add(block)
    parts: tuple[list[Document], list[Document]] = ([], [])
    number = 0
    for document, cuts in zip(documents, edges, strict=True):
        begin, last = 0, len(cuts) - 2
        for k in range(last + 1):
            out = number in chosen
            number += 1
            if k == last or (number in chosen) != out:
                parts[out].append(Document(document.name, document.data[cuts[begin] : cuts[k + 1]]))
                begin = k + 1
    return parts


def _drawn(count: int, groups: int, seed: int) -> tuple[set[int], list[int]]:
    """Return a drawn block of each of so many runs of consecutive ones, and all blocks in the order of the draw."""
    order = permutation(seed, _HELD_OUT_DRAW, count)
    place = np.argsort(order)
    runs = np.array_split(np.arange(count), max(1, groups))
    return {int(run[place[run].argmin()]) for run in runs}, order.tolist()


def _edges(data: bytes, count: int, fixed: bool) -> list[int]:
    """Return where `count` blocks of about the same size begin, and the end; between characters unless `fixed`."""
    edges = [len(data) * k // count for k in range(count + 1)]
    for k in range(1, 0 if fixed else count):
        while edges[k] < len(data) and data[edges[k]] & 0xC0 == 0x80:  # inside a UTF-8 character
            edges[k] += 1
    return edges


def ngram_baselines(train: Sequence[Document], held_out: Sequence[Document]) -> tuple[float, float]:
    """Return the loss on `held_out` of a unigram and a bigram model of the bytes of `train`, in nats per byte.

    unigram p(b) = (n(b) + 1) / (n + 256);  bigram p(b | a) = (n(ab) + p(b)) / (n(a) + 1)
    """

    def pairs(text: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
        return text[:-1].astype(np.uint16) * np.uint16(256) + text[1:]

    counted = np.frombuffer(b"\n".join(document.data for document in train), np.uint8)
    text = np.frombuffer(b"\n".join(document.data for document in held_out), np.uint8)
    count = np.bincount(counted, minlength=256).astype(np.float64)
    unigram = (count + 1) / (count.sum() + 256)
    pair_count = np.bincount(pairs(counted), minlength=65536).reshape(256, 256).astype(np.float64)
    bigram = (pair_count + unigram) / (pair_count.sum(axis=1, keepdims=True) + 1)
    unigram_loss = float(-np.log(unigram)[text].mean())
    bigram_loss = float(-np.log(bigram).reshape(-1)[pairs(text)].mean()) if len(text) > 1 else unigram_loss
    return unigram_loss, bigram_loss


# --- tokens to train on ----------------------------------------------------------------------------------------------

_HELD_OUT_TOKENS = 1 << 24  # of a token file, at most: they are read into memory
_BASELINE_TOKENS = 1 << 22  # of a token file: n-grams of more bytes hardly change


class Watcher(Protocol):
    """Receives the progress of reading and tokenizing, or of another phase of a run."""

    def phase(self, text: str) -> None:
        """Something that takes a while begins."""

    def advance(self, share: float, text: str = "") -> None:
        """The phase, or what `text` names, is done to this share, 0 to 1."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokens of a text in two disjoint parts, and their origin.

    `sha256` is that of the text or the token file, `description` goes to config.json, and `baselines` returns the
    held-out loss of a unigram and a bigram model of bytes, in nats per byte.
    """

    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens
    sha256: str
    description: dict[str, Any]
    baselines: Callable[[], tuple[float, float]]
    notes: Sequence[str] = ()


def tokenize(run: RunConfig, watcher: Watcher, *, tokenizer_from: Path | None, fixed: bool = False) -> TokenizedText:
    """Read a run's text and tokenize it, with the tokenizer.json `tokenizer_from` if given, or map its token file.

    Raises ConfigError for data that cannot be read or are too short, FormatError for a damaged token file or tokenizer.
    """
    watcher.phase("reading the text")
    paths = [Path(name) for name in paths_of(run.data)]
    token_files = [path for path in paths if is_token_file(path)]
    if token_files:
        if len(paths) > 1:
            raise ConfigError(f"{token_files[0]} is a token file: name it alone")
        text = _mapped(token_files[0], tokenizer_from, run.training)
    else:
        text = _encoded(run, watcher, tokenizer_from, fixed)
    count, window = len(text.train) + len(text.held_out), run.training.context + 1
    if count < 2 * window:
        raise ConfigError(
            f"not enough data: the text has {count:,} tokens, one window for training and one that is held out need "
            f"{2 * window:,}; give --data more text, or a smaller --context"
        )
    require_windows(text.train, run.training.context, "training")
    require_windows(text.held_out, run.training.context, "held-out")
    return text


_TOKEN_BYTES = {"bytes": 1, "bpe": 5}  # about


def _encoded(run: RunConfig, watcher: Watcher, tokenizer_from: Path | None, fixed: bool) -> TokenizedText:
    window = (run.training.context + 1) * _TOKEN_BYTES[run.tokenizer]
    corpus = load_corpus(run.data, seed=run.training.seed, window_bytes=window, fixed=fixed)
    tokenizer: Tokenizer
    if run.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    elif tokenizer_from is not None:
        tokenizer = load_bpe(tokenizer_from)
    else:
        tokenizer = train_bpe(corpus, run.vocab_size, phase=watcher.phase, watch=watcher.advance)
    watcher.phase(f"encoding the text: {corpus.reading.title}")
    held_out = tokenizer.encode(corpus.held_out)
    train = tokenizer.encode(corpus.train, watcher.advance)
    description = {
        "source": corpus.source, "sha256": corpus.sha256, "train_bytes": corpus.train_bytes,
        "train_tokens": len(train), "held_out_blocks": len(corpus.held_out),
        "held_out_bytes": corpus.held_out_bytes, "held_out_tokens": len(held_out), **corpus.reading.to_dict(),
    }  # fmt: skip
    baselines = partial(ngram_baselines, corpus.train, corpus.held_out)
    return TokenizedText(tokenizer, train, held_out, corpus.sha256, description, baselines, corpus.reading.notes())


class _Remaining:
    """The tokens of a file without blocks of `size` that begin at `starts`, in order; indexed like an array."""

    def __init__(self, tokens: Tokens, starts: np.ndarray[Any, np.dtype[np.int64]], size: int) -> None:
        self._tokens, self._size, self._removed = tokens, size, size * len(starts)
        self._before = starts - size * np.arange(len(starts))

    def __len__(self) -> int:
        return len(self._tokens) - self._removed

    def __getitem__(self, index: Any) -> Tokens:
        numbers = np.arange(len(self))[index] if isinstance(index, slice) else index
        return cast("Tokens", self._tokens[numbers + self._size * np.searchsorted(self._before, numbers, side="right")])


def _blocks_held_out(tokens: Tokens, training: TrainConfig) -> tuple[Tokens, Tokens]:
    """Return the training tokens and the held-out ones, blocks of about one token in 20, drawn by the seed."""
    total = min(int(_HELD_OUT * len(tokens)), _HELD_OUT_TOKENS)
    size = max(2 * (training.context + 1), min(_LONGEST_BLOCK, total // _BLOCKS))
    count = len(tokens) // size
    if count < 2:  # too few tokens: the caller says so
        return tokens, tokens[:0]
    starts = size * np.array(sorted(_drawn(count, round(total / size), training.seed)[0]))
    held_out = np.concatenate([tokens[start : start + size] for start in starts])
    return cast("Tokens", _Remaining(tokens, starts, size)), held_out


def _mapped(path: Path, tokenizer_from: Path | None, training: TrainConfig) -> TokenizedText:
    file = TokenFile(path)
    tokenizer: Tokenizer = ByteTokenizer()
    if file.info.tokenizer != BYTES:
        source = tokenizer_path(path) if tokenizer_from is None else tokenizer_from
        tokenizer = load_bpe(source)
        if tokenizer_hash(tokenizer) != file.info.tokenizer:
            raise FormatError(f"{source} is not the tokenizer that {path} was made with: prepare it again")
    if file.info.vocab_size != tokenizer.vocab_size:
        sizes = f"{file.info.vocab_size:,} tokens, its tokenizer {tokenizer.vocab_size:,}"
        raise FormatError(f"token file {path} has a vocabulary of {sizes}: prepare it again")
    train, held_out = _blocks_held_out(file.tokens, training)
    info = file.info
    description = {
        "source": escaped(f"{path.name} ({info.source})"), "sha256": info.sha256, "documents": info.documents,
        "text_bytes": info.text_bytes, "train_tokens": len(train), "held_out_tokens": len(held_out),
    }  # fmt: skip

    def decoded(tokens: Tokens) -> Document:
        if isinstance(tokenizer, ByteTokenizer):
            return Document("tokens", tokens.astype("uint8").tobytes())
        return Document("tokens", tokenizer.decode(tokens.tolist()).encode())

    def baselines() -> tuple[float, float]:
        return ngram_baselines([decoded(train[:_BASELINE_TOKENS])], [decoded(held_out[:_BASELINE_TOKENS])])

    fingerprint = hashlib.sha256(f"blocks {info.sha256}".encode()).hexdigest()
    return TokenizedText(tokenizer, train, held_out, fingerprint, description, baselines)


def tokenizer_path(tokens: Path) -> Path:
    """Return the path of a token file's tokenizer."""
    return tokens.with_name(tokens.name + TOKENIZER_SUFFIX)


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return the name of a tokenizer in a token file's header: the SHA-256 of its JSON text, or "bytes"."""
    text = tokenizer.to_json()
    return BYTES if text is None else hashlib.sha256(text.encode()).hexdigest()


# --- preparing a token file ------------------------------------------------------------------------------------------

_READ = 1 << 22  # bytes at a time
_LONGEST = 1 << 26  # characters without a word boundary: cut anyway, so that memory stays bounded
_JSON_LINES = (".jsonl", ".ndjson")
_SAMPLE_BYTES = 1 << 28  # of text that a BPE is trained on

Watch = Callable[[str, float], None]
"""Receives the name of a phase and the share of it that is done, 0 to 1."""


@dataclass(slots=True)
class _ReadCount:
    """Counts what was read of the files, and reports the share of their bytes."""

    total: int
    watch: Watch
    phase: str
    read: int = 0
    documents: int = 0
    text_bytes: int = 0
    reported: float = -1.0

    def add(self, size: int) -> None:
        self.read += size
        share = min(1.0, self.read / max(1, self.total))
        if share - self.reported >= 0.001 or share == 1.0:
            self.reported = share
            self.watch(self.phase, share)


def prepare_tokens(
    data: Paths, out: str | os.PathLike[str], *, tokenizer: str = "bpe", vocab_size: int = 50257,
    text_field: str = "text", watch: Watch = lambda _phase, _share: None,
    note: Callable[[str], None] = lambda _text: None,
) -> TokenFileInfo:  # fmt: skip
    """Write a token file of texts, in memory that does not grow with them.

    A file is read in parts that end where the tokenizer would end a word anyway: the tokens are those of the whole
    text. The token file gets its name when it is complete.

    Args:
        data: the path, or several, of text files, JSONL files (.jsonl, .ndjson: one object per line, each a document),
            or folders of them, whose files are read in the order of their names.
        out: the token file; its tokenizer is written next to it, with ".tokenizer.json" appended to the name.
        tokenizer: "bytes"; "bpe", trained on a sample of the text; or the path of a tokenizer.json with the token
            <|endoftext|>.
        vocab_size: maximum number of tokens of a trained BPE.
        text_field: field of a JSONL object that contains the text.
        watch: receives the progress.
        note: receives remarks on files that were left out, converted, or outweigh the others.

    Returns:
        The description in the file's header.

    Raises:
        ConfigError: a path does not exist, there is no text, or out cannot be written, or is one of the texts.
        FormatError: a line of a JSONL file has no text in that field; an unusable tokenizer.
    """
    data, out, reading = paths_of(data), Path(out), Reading()
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name the token file to write")
    for name in data:
        if is_token_file(Path(name)) and os.path.realpath(name) != os.path.realpath(out):
            raise ConfigError(f"{name} is a token file already: name the texts")
    files = reading.text_files(data)
    if not is_token_file(out) and os.path.realpath(out) in (os.path.realpath(path) for path, _ in files):
        raise ConfigError(f"{out} is one of the texts: name another file to write")
    reading.require_text(", ".join(data))
    for text in reading.notes():
        note(text)
    size = sum(size for _, size in reading.read)
    chosen = _tokenizer(tokenizer, vocab_size, files, size, text_field, watch)
    count = _ReadCount(size, watch, "encoding the text")

    def write_tokenizer() -> None:
        path, text = tokenizer_path(out), chosen.to_json()
        if text is None:
            path.unlink(missing_ok=True)
        else:
            write_atomic(path, text.encode())

    with TokenWriter(out, vocab_size=chosen.vocab_size, tokenizer=tokenizer_hash(chosen), source=data) as writer:
        batch: list[tuple[str, bool]] = []  # enough parts at a time to keep the tokenizer's threads busy
        length = 0
        for part in _parts(files, text_field, count):
            batch.append(part)
            length += len(part[0])
            if length >= _READ:
                writer.append(chosen.encode_pieces(batch))
                batch, length = [], 0
        if batch:
            writer.append(chosen.encode_pieces(batch))
        return writer.finish(documents=count.documents, text_bytes=count.text_bytes, before=write_tokenizer)


def _tokenizer(
    name: str, vocab_size: int, files: Sequence[tuple[Path, str]], size: int, text_field: str, watch: Watch
) -> ByteTokenizer | BPETokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if name != "bpe":
        return load_bpe(Path(name))
    if not 257 <= vocab_size <= 2**32:
        raise ConfigError(f"vocab_size must be 257 (bytes, and the end of a text) to 2^32, got {vocab_size}")
    stride = max(1, -(-size // _SAMPLE_BYTES))
    parts = enumerate(_parts(files, text_field, _ReadCount(size, watch, "training the tokenizer")))
    return train_bpe_on((part for number, (part, _) in parts if not number % stride), vocab_size)


def _parts(files: Sequence[tuple[Path, str]], text_field: str, count: _ReadCount) -> Iterator[tuple[str, bool]]:
    """Iterate the parts of all documents, each with whether it is its document's last."""
    for path, codec in files:
        lines = path.suffix.lower() in _JSON_LINES
        documents = _json_texts(path, codec, text_field, count) if lines else iter([_text_parts(path, codec, count)])
        for document in documents:
            count.documents += 1
            part = next(document, "")
            for following in document:
                count.text_bytes += len(part.encode())
                yield part, False
                part = following
            count.text_bytes += len(part.encode())
            yield part, True


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(open_regular(path), "rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _text_parts(path: Path, codec: str, count: _ReadCount) -> Iterator[str]:
    """Iterate a text file in parts that end between words."""
    decoder = codecs.getincrementaldecoder(codec)("replace")
    text, searched = "", 0
    with _opened(path) as file:
        while data := file.read(_READ):
            count.add(len(data))
            text += decoder.decode(data)
            cut = last_cut(text, searched) or (len(text) if len(text) > _LONGEST else 0)
            if cut:
                yield text[:cut]
                text = text[cut:]
            searched = len(text)
    yield text + decoder.decode(b"", True)


def _json_texts(path: Path, codec: str, text_field: str, count: _ReadCount) -> Iterator[Iterator[str]]:
    """Iterate the texts of a JSONL file, each in one part."""
    with _opened(path) as file, io.TextIOWrapper(file, codec, "replace", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            count.add(len(line))
            if not line.strip():
                continue
            try:
                text = decode_json(line)[text_field]
            except (ValueError, KeyError, TypeError, IndexError) as error:
                reason = f"no JSON object with {text_field!r} ({type(error).__name__})"
                raise FormatError(f"{path}, line {number}: {reason}") from None
            if not isinstance(text, str):
                raise FormatError(f"{path}, line {number}: {text_field!r} is no text but {type(text).__name__}")
            yield iter([text.encode("utf-8", "replace").decode()])  # JSON may hold half a surrogate pair
