"""Text to train on: its files, the part that is held out, and its tokens, in memory or in a token file.

Files are read in the order of their names, so that one machine always reads the same corpus. Whole files are held out
if there are enough of them, otherwise the end of the text.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from accelerant.errors import ConfigError, FormatError
from accelerant.nn.train.config import STDLIB, RunConfig
from accelerant.nn.train.data import require_windows
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
from accelerant.runtime.files import decode_json, escaped, is_virtual, open_regular, write_atomic

__all__ = [
    "Corpus", "Document", "TokenizedText", "Watcher", "load_corpus", "ngram_baselines", "prepare_tokens",
    "text_files", "tokenize", "tokenizer_hash", "tokenizer_path",
]  # fmt: skip

_HELD_OUT = 0.05  # of the bytes, when whole files are held out
_HELD_OUT_TAIL = 0.10  # of the text, when its end is
_MIN_FILES = 20  # for holding out whole files
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Document:
    """A text: its name, with forward slashes, and its bytes."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text in two disjoint parts, with its origin, for people, and the SHA-256 of all names and contents."""

    source: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    sha256: str

    @property
    def train_bytes(self) -> int:
        """Size of the training part."""
        return sum(len(document.data) for document in self.train)

    @property
    def held_out_bytes(self) -> int:
        """Size of the held-out part."""
        return sum(len(document.data) for document in self.held_out)


def load_corpus(data: Sequence[str]) -> Corpus:
    """Read a corpus.

    Args:
        data: ("stdlib",) for the source code of the running Python's standard library, or paths. A folder means the
            text files in it, except hidden ones. A file that is named twice is read once: otherwise its end could not
            be held out.

    Raises:
        ConfigError: a path does not exist or cannot be read, or there is no text.
    """
    if list(data) == [STDLIB]:
        root = Path(sysconfig.get_paths()["stdlib"])
        documents = [_read(path, path.relative_to(root).as_posix()) for path in _files(root) if path.suffix == ".py"]
        source = f"the standard library of Python {sysconfig.get_python_version()}"
    else:
        if not all(data):
            raise ConfigError("--data names an empty path: give stdlib, files or folders")
        documents = [_read(path, name) for path, name in _named_files(data)]
        source = escaped(", ".join(dict.fromkeys(data)))
    documents = [document for document in documents if document.data]
    if not documents:
        raise ConfigError(f"no text in {source}: give --data a file or folder with text")
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{len(document.name)} {document.name} {len(document.data)} ".encode("utf-8", "surrogateescape"))
        digest.update(document.data)
    train, held_out = _split(documents)
    return Corpus(source, tuple(train), tuple(held_out), digest.hexdigest())


def text_files(data: Sequence[str]) -> list[Path]:
    """Return the given files and the text files of folders, each once; raise ConfigError if one cannot be read."""
    return [path for path, _ in _named_files(data)]


def _named_files(data: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Iterate the files that paths name, each once, with the names of their documents."""
    seen: set[str] = set()
    for name in data:
        path = Path(name)
        if not path.exists():
            raise ConfigError(f"no file or folder {name!r}: name a path that exists (for --data, also stdlib)")
        if is_virtual(path):
            raise ConfigError(
                f"cannot read {path}: it is made by the system and not stored; copy its contents to a file"
            )
        for file in _files(path) if path.is_dir() else [path]:
            real = os.path.realpath(file)
            if real not in seen and (file == path or not _is_binary(file)):
                seen.add(real)
                yield file, path.name if file == path else file.relative_to(path).as_posix()


def _files(root: Path) -> Iterator[Path]:
    """Iterate the regular files below a folder in the order of their names; links to folders are not followed."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file() and not is_virtual(path):
                yield path


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(open_regular(path), "rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _is_binary(path: Path) -> bool:
    with _opened(path) as file:
        return b"\0" in file.read(8192)


def _read(path: Path, name: str) -> Document:
    with _opened(path) as file:
        return Document(name, file.read())


def _split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Hold out files in the order of their names' hashes, up to 5% of the bytes; or the last tenth of the text."""
    total = sum(len(document.data) for document in documents)
    if len(documents) >= _MIN_FILES:
        ranks = [hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest() for document in documents]
        chosen, size = set(), 0
        for index in sorted(range(len(documents)), key=lambda i: (ranks[i], i)):
            if size + len(documents[index].data) <= _HELD_OUT * total:
                chosen.add(index)
                size += len(documents[index].data)
        if size >= _HELD_OUT * total / 2:
            train = [document for i, document in enumerate(documents) if i not in chosen]
            return train, [documents[i] for i in sorted(chosen)]
    text = b"\n".join(document.data for document in documents)
    cut = int(len(text) * (1 - _HELD_OUT_TAIL))
    while cut < len(text) and text[cut] & 0xC0 == 0x80:  # inside a UTF-8 character
        cut += 1
    return [Document("beginning", text[:cut])], [Document("end", text[cut:])]


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

_HELD_OUT_TOKENS = 20, 1 << 24  # of a token file: one token in 20, from its end, and at most so many
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

    Attributes:
        sha256: of the text or the token file.
        description: for config.json: source, hash, sizes.
        baselines: returns the held-out loss of a unigram and a bigram model of bytes, in nats per byte.
    """

    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens
    sha256: str
    description: dict[str, Any]
    baselines: Callable[[], tuple[float, float]]


def tokenize(run: RunConfig, watcher: Watcher, *, tokenizer_from: Path | None) -> TokenizedText:
    """Read a run's text and tokenize it, or map its token file.

    Args:
        run: names the data and the tokenizer.
        watcher: receives the progress.
        tokenizer_from: a tokenizer.json to use instead of training one.

    Raises:
        ConfigError: the data cannot be read, or are too short.
        FormatError: a token file is torn, or its tokenizer missing.
    """
    watcher.phase("reading the text")
    paths = [Path(name) for name in run.data]
    token_files = [path for path in paths if is_token_file(path)]
    if token_files:
        if len(paths) > 1:
            raise ConfigError(f"{token_files[0]} is a token file: name it alone")
        text = _mapped(token_files[0], tokenizer_from)
    else:
        text = _encoded(run, watcher, tokenizer_from)
    require_windows(text.train, run.training.context, "training")
    require_windows(text.held_out, run.training.context, "held-out")
    return text


def _encoded(run: RunConfig, watcher: Watcher, tokenizer_from: Path | None) -> TokenizedText:
    corpus = load_corpus(run.data)
    tokenizer: Tokenizer
    if run.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    elif tokenizer_from is not None:
        tokenizer = load_bpe(tokenizer_from)
    else:
        tokenizer = train_bpe(corpus, run.vocab_size, phase=watcher.phase, watch=watcher.advance)
    watcher.phase("encoding the text")
    held_out = tokenizer.encode(corpus.held_out)
    train = tokenizer.encode(corpus.train, watcher.advance)
    description = {
        "source": corpus.source, "sha256": corpus.sha256,
        "train_documents": len(corpus.train), "train_bytes": corpus.train_bytes, "train_tokens": len(train),
        "held_out_documents": len(corpus.held_out), "held_out_bytes": corpus.held_out_bytes,
        "held_out_tokens": len(held_out),
    }  # fmt: skip
    baselines = partial(ngram_baselines, corpus.train, corpus.held_out)
    return TokenizedText(tokenizer, train, held_out, corpus.sha256, description, baselines)


def _mapped(path: Path, tokenizer_from: Path | None) -> TokenizedText:
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
    count = min(len(file) // _HELD_OUT_TOKENS[0], _HELD_OUT_TOKENS[1])
    train, held_out = file.tokens[: len(file) - count], file.tokens[len(file) - count :]
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

    return TokenizedText(tokenizer, train, held_out, file.info.sha256, description, baselines)


def tokenizer_path(tokens: Path) -> Path:
    """Return the path of a token file's tokenizer."""
    return tokens.with_name(f"{tokens.name}.tokenizer.json")


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
    data: Sequence[str | Path], out: str | Path, *, tokenizer: str = "bpe", vocab_size: int = 50257,
    text_field: str = "text", watch: Watch = lambda _phase, _share: None,
) -> TokenFileInfo:  # fmt: skip
    """Write a token file of texts, in one pass and in memory that does not grow with them.

    A file is read in parts that end where the tokenizer would end a word anyway: the tokens are those of the whole
    text. The token file gets its name when it is complete.

    Args:
        data: text files, JSONL files (.jsonl, .ndjson: one object per line, each a document), or folders of them, whose
            files are read in the order of their names.
        out: the token file; its tokenizer is written next to it, with ".tokenizer.json" appended to the name.
        tokenizer: "bytes"; "bpe", trained on a sample of the text; or the path of a tokenizer.json with the token
            <|endoftext|>.
        vocab_size: maximum number of tokens of a trained BPE.
        text_field: field of a JSONL object that contains the text.
        watch: receives the progress.

    Returns:
        The description in the file's header.

    Raises:
        ConfigError: a path does not exist, there is no text, or out cannot be written, or is one of the texts.
        FormatError: a line of a JSONL file has no text in that field; an unusable tokenizer.
    """
    out = Path(out)
    files = text_files([str(name) for name in data])
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name the token file to write")
    real = os.path.realpath(out)
    if not is_token_file(out) and real in map(os.path.realpath, files):
        raise ConfigError(f"{out} is one of the texts: name another file to write")
    files = [file for file in files if os.path.realpath(file) != real]  # an earlier result, in a folder of texts
    for file in files:
        if is_token_file(file):
            raise ConfigError(f"{file} is a token file already: name the texts")
    size = sum(file.stat().st_size for file in files)
    if not size:
        raise ConfigError(f"no text in {', '.join(map(str, data))}")
    chosen = _tokenizer(tokenizer, vocab_size, files, size, text_field, watch)
    count = _ReadCount(size, watch, "encoding the text")

    def write_tokenizer() -> None:
        path, text = tokenizer_path(out), chosen.to_json()
        if text is None:
            path.unlink(missing_ok=True)
        else:
            write_atomic(path, text.encode())

    source = [str(name) for name in data]
    with TokenWriter(out, vocab_size=chosen.vocab_size, tokenizer=tokenizer_hash(chosen), source=source) as writer:
        batch: list[tuple[str, bool]] = []  # enough parts at a time to keep the tokenizer's threads busy
        length = 0
        errors = "surrogateescape" if isinstance(chosen, ByteTokenizer) else "replace"  # each byte is a token
        for part in _parts(files, text_field, count, errors):
            batch.append(part)
            length += len(part[0])
            if length >= _READ:
                writer.append(chosen.encode_pieces(batch))
                batch, length = [], 0
        if batch:
            writer.append(chosen.encode_pieces(batch))
        return writer.finish(documents=count.documents, text_bytes=count.text_bytes, before=write_tokenizer)


def _tokenizer(
    name: str, vocab_size: int, files: Sequence[Path], size: int, text_field: str, watch: Watch
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


def _parts(
    files: Sequence[Path], text_field: str, count: _ReadCount, errors: str = "replace"
) -> Iterator[tuple[str, bool]]:
    """Iterate the parts of all documents, each with whether it is its document's last."""
    for path in files:
        lines = path.suffix.lower() in _JSON_LINES
        documents = _json_texts(path, text_field, count) if lines else iter([_text_parts(path, count, errors)])
        for document in documents:
            count.documents += 1
            part = next(document, "")
            for following in document:
                count.text_bytes += len(part.encode(errors=errors))
                yield part, False
                part = following
            count.text_bytes += len(part.encode(errors=errors))
            yield part, True


def _text_parts(path: Path, count: _ReadCount, errors: str) -> Iterator[str]:
    """Iterate a text file in parts that end between words."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
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


def _json_texts(path: Path, text_field: str, count: _ReadCount) -> Iterator[Iterator[str]]:
    """Iterate the texts of a JSONL file, each in one part."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
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
