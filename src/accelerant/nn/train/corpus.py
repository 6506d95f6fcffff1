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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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
from accelerant.runtime.files import decode_json, write_atomic

__all__ = [
    "Corpus",
    "Document",
    "TokenizedText",
    "Watcher",
    "load_corpus",
    "ngram_baselines",
    "prepare_tokens",
    "text_files",
    "tokenize",
    "tokenizer_hash",
    "tokenizer_path",
]

_HELD_OUT = 0.05  # of the bytes, when whole files are held out
_HELD_OUT_TAIL = 0.10  # of the text, when its end is
_ENOUGH_FILES = 20
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Document:
    """One file's name, with forward slashes, and content."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text in two disjoint parts.

    Attributes:
        source: where it comes from, for people.
        train: documents to learn from.
        held_out: documents to measure with.
        sha256: of all names and contents, in hexadecimal.
    """

    source: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    sha256: str

    @property
    def train_bytes(self) -> int:
        """Size of the part to learn from."""
        return sum(len(document.data) for document in self.train)

    @property
    def held_out_bytes(self) -> int:
        """Size of the part to measure with."""
        return sum(len(document.data) for document in self.held_out)


def load_corpus(data: Sequence[str]) -> Corpus:
    """Read a corpus.

    Args:
        data: ("stdlib",) for the source of the running Python's standard library, or paths. A folder stands
            for the text files in it, hidden ones left out. A file that is named twice is read once: its end could
            not be held out otherwise.

    Raises:
        ConfigError: a path is not there or cannot be read, or there is no text.
    """
    if list(data) == [STDLIB]:
        root = Path(sysconfig.get_paths()["stdlib"])
        documents = [_read(path, path.relative_to(root).as_posix()) for path in _files(root) if path.suffix == ".py"]
        source = f"the standard library of Python {sysconfig.get_python_version()}"
    else:
        if not all(data):
            raise ConfigError("--data names an empty path: give stdlib, files or folders")
        seen: set[str] = set()
        documents = [document for name in data for document in _documents(Path(name), seen)]
        source = ", ".join(dict.fromkeys(data))
    documents = [document for document in documents if document.data]
    if not documents:
        raise ConfigError(f"no text in {source}: give --data a file or folder with text")
    train, held_out = _split(documents)
    return Corpus(source, tuple(train), tuple(held_out), _digest(documents))


def _files(root: Path) -> Iterator[Path]:
    """Regular files below root in the order of their names; links to folders are not followed."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def text_files(data: Sequence[str]) -> list[Path]:
    """The files that paths stand for, each once, without reading them whole; a folder stands for its text files.

    Raises:
        ConfigError: a path is not there or cannot be read.
    """
    seen: set[str] = set()
    found: list[Path] = []
    for name in data:
        path = Path(name)
        if not path.exists():
            raise ConfigError(f"no file or folder {name!r}: name a path that is there")
        for file in _files(path) if path.is_dir() else [path]:
            real = os.path.realpath(file)
            if real not in seen and (file == path or not _is_binary(file)):
                seen.add(real)
                found.append(file)
    return found


def _is_binary(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(8192)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _read(path: Path, name: str) -> Document:
    try:
        return Document(name, path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _documents(path: Path, seen: set[str]) -> Iterator[Document]:
    """A file, or those of a folder, without those in `seen`; adds them to it."""
    if path.is_dir():
        for file in _files(path):
            real = os.path.realpath(file)
            if real in seen:
                continue
            document = _read(file, file.relative_to(path).as_posix())
            if b"\0" not in document.data[:8192]:  # a NUL byte: not text
                seen.add(real)
                yield document
    elif path.exists():
        real = os.path.realpath(path)
        if real not in seen:
            seen.add(real)
            yield _read(path, path.name)
    else:
        raise ConfigError(f"no file or folder {str(path)!r}: give --data stdlib or a path that is there")


def _digest(documents: Sequence[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{len(document.name)} {document.name} {len(document.data)} ".encode())
        digest.update(document.data)
    return digest.hexdigest()


def _split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Hold out files in the order of their names' hashes, up to 5% of the bytes; or the last tenth of the text."""
    total = sum(len(document.data) for document in documents)
    if len(documents) >= _ENOUGH_FILES:
        chosen, size = set(), 0
        for index in sorted(range(len(documents)), key=lambda i: (_rank(documents[i].name), i)):
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


def _rank(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def ngram_baselines(train: Sequence[Document], held_out: Sequence[Document]) -> tuple[float, float]:
    """Held-out loss of a unigram and a bigram model of bytes, in nats a byte.

    unigram p(b) = (n(b) + 1) / (n + 256);  bigram p(b | a) = (n(ab) + p(b)) / (n(a) + 1)

    Args:
        train: what to count in.
        held_out: what to score, not empty.
    """
    seen = np.frombuffer(b"\n".join(document.data for document in train), np.uint8)
    text = np.frombuffer(b"\n".join(document.data for document in held_out), np.uint8)
    count = np.bincount(seen, minlength=256).astype(np.float64)
    unigram = (count + 1) / (count.sum() + 256)
    pairs = np.bincount(_pairs(seen), minlength=65536).reshape(256, 256).astype(np.float64)
    bigram = (pairs + unigram) / (pairs.sum(axis=1, keepdims=True) + 1)
    unigram_loss = float(-np.log(unigram)[text].mean())
    bigram_loss = float(-np.log(bigram).reshape(-1)[_pairs(text)].mean()) if len(text) > 1 else unigram_loss
    return unigram_loss, bigram_loss


def _pairs(text: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    return text[:-1].astype(np.uint16) * np.uint16(256) + text[1:]


# --- tokens to train on ----------------------------------------------------------------------------------------------


_HELD_OUT_SHARE = 20  # one part in so many, of a token file's end
_HELD_OUT_TOKENS = 1 << 24
_BASELINE_TOKENS = 1 << 22  # of a token file: n-grams of more bytes hardly change


class Watcher(Protocol):
    """Who watches the preparation."""

    def phase(self, text: str) -> None:
        """Something that takes a while begins."""

    def advance(self, share: float, text: str = "") -> None:
        """So much of the phase is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Tokens in two disjoint parts, and where they came from.

    Attributes:
        tokenizer: between text and tokens.
        train, held_out: to learn from, and to measure with.
        sha256: tells this text from others.
        description: for config.json: source, hash, sizes.
        baselines: held-out loss of a unigram and a bigram model of bytes, nats a byte.
    """

    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens
    sha256: str
    description: dict[str, Any]
    baselines: Callable[[], tuple[float, float]]


def tokenize(run: RunConfig, watcher: Watcher, *, tokenizer_from: Path | None) -> TokenizedText:
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
        text = _mapped(mapped[0], tokenizer_from)
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
        "source": corpus.source,
        "sha256": corpus.sha256,
        "train_documents": len(corpus.train),
        "train_bytes": corpus.train_bytes,
        "train_tokens": len(train),
        "held_out_documents": len(corpus.held_out),
        "held_out_bytes": corpus.held_out_bytes,
        "held_out_tokens": len(held_out),
    }
    return TokenizedText(
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


def _mapped(path: Path, tokenizer_from: Path | None) -> TokenizedText:
    file = TokenFile(path)
    tokenizer: Tokenizer = ByteTokenizer()
    if file.info.tokenizer != BYTES:
        beside = tokenizer_path(path) if tokenizer_from is None else tokenizer_from
        tokenizer = load_bpe(beside)
        if tokenizer_hash(tokenizer) != file.info.tokenizer:
            raise FormatError(f"{beside} is not the tokenizer that {path} was made with: prepare it again")
    held = min(len(file) // _HELD_OUT_SHARE, _HELD_OUT_TOKENS)
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

    return TokenizedText(tokenizer, train, held_out, file.info.sha256, description, baselines)


def _decoded(tokenizer: Tokenizer, tokens: Tokens) -> Document:
    if isinstance(tokenizer, ByteTokenizer):
        return Document("tokens", tokens.astype("uint8").tobytes())
    return Document("tokens", tokenizer.decode(tokens.tolist()).encode())


# --- preparing a token file ------------------------------------------------------------------------------------------


_READ = 1 << 22  # bytes at once
_LONGEST = 1 << 26  # characters without a place to cut: cut anyway, so that memory stays bounded
_JSON_LINES = (".jsonl", ".ndjson")
_SAMPLE_BYTES = 1 << 28  # of text that a BPE is trained on

Watch = Callable[[str, float], None]
"""Is told what is done, and which part of it, 0 to 1."""


@dataclass(slots=True)
class _Progress:
    """Bytes of the files that were read, and what came of them."""

    total: int
    watch: Watch
    what: str
    read: int = 0
    documents: int = 0
    text_bytes: int = 0
    told: float = field(default=-1.0)

    def add(self, size: int) -> None:
        self.read += size
        share = min(1.0, self.read / max(1, self.total))
        if share - self.told >= 0.001 or share == 1.0:
            self.told = share
            self.watch(self.what, share)


def prepare_tokens(
    data: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str = "bpe",
    vocab_size: int = 50257,
    text_field: str = "text",
    watch: Watch = lambda _what, _share: None,
) -> TokenFileInfo:
    """Write a token file of some texts.

    Args:
        data: text files, JSONL files (.jsonl, .ndjson: an object a line, a document each), or folders of them, whose
            files are taken in the order of their names.
        out: the token file; the tokenizer comes beside it, with ".tokenizer.json" after the name.
        tokenizer: "bytes"; "bpe", trained on a sample of the text; or the path of a tokenizer.json with the token
            <|endoftext|>.
        vocab_size: the most tokens that a trained BPE may have.
        text_field: of a JSONL object, what holds the text.
        watch: is told how far it is.

    Returns:
        What the file says of itself.

    Raises:
        ConfigError: a path is not there, there is no text, or out cannot be written, or is one of the texts.
        FormatError: a line of a JSONL file holds no text under that name; an unusable tokenizer.
    """
    out = Path(out)
    files = text_files([str(name) for name in data])
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name the token file to write")
    real = os.path.realpath(out)
    if not is_token_file(out) and real in map(os.path.realpath, files):
        raise ConfigError(f"{out} is one of the texts: name another file to write")
    files = [file for file in files if os.path.realpath(file) != real]  # an older result, in a folder of texts
    for file in files:
        if is_token_file(file):
            raise ConfigError(f"{file} is a token file already: name the texts")
    size = sum(file.stat().st_size for file in files)
    if not size:
        raise ConfigError(f"no text in {', '.join(map(str, data))}")
    chosen = _tokenizer(tokenizer, vocab_size, files, size, text_field, watch)
    source = [str(name) for name in data]
    progress = _Progress(size, watch, "encoding the text")
    hashed = tokenizer_hash(chosen)
    with TokenWriter(out, vocab_size=chosen.vocab_size, tokenizer=hashed, source=source) as writer:
        for batch in _batched(_document_parts(files, text_field, progress)):
            writer.append(chosen.encode_pieces(batch))
        info = writer.finish(
            documents=progress.documents,
            text_bytes=progress.text_bytes,
            before=lambda: _write_tokenizer(chosen, tokenizer_path(out)),
        )
    return info


def _write_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    text = tokenizer.to_json()
    if text is None:
        path.unlink(missing_ok=True)
    else:
        write_atomic(path, text.encode())


def _tokenizer(
    name: str, vocab_size: int, files: Sequence[Path], size: int, text_field: str, watch: Watch
) -> ByteTokenizer | BPETokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if name != "bpe":
        return load_bpe(Path(name))
    if vocab_size < 257:
        raise ConfigError(f"vocab_size must be 257 or more (bytes, and the end of a text), got {vocab_size}")
    stride = max(1, -(-size // _SAMPLE_BYTES))
    progress = _Progress(size, watch, "training the tokenizer")
    pieces = (
        piece for number, (piece, _) in enumerate(_document_parts(files, text_field, progress)) if not number % stride
    )
    return train_bpe_on(pieces, vocab_size)


def _document_parts(files: Sequence[Path], text_field: str, progress: _Progress) -> Iterator[tuple[str, bool]]:
    """Every document's pieces in turn, and whether each is its document's last."""
    for path in files:
        lines = path.suffix.lower() in _JSON_LINES
        documents = _json_texts(path, text_field, progress) if lines else iter([_read_in_parts(path, progress)])
        for text in documents:
            progress.documents += 1
            for piece, last in _marked(text):
                progress.text_bytes += len(piece.encode())
                yield piece, last


def _batched(pieces: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces together, so that the tokenizer's threads have enough to do."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= _READ:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _marked(pieces: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Each piece, and whether it is the last."""
    held = next(pieces, "")
    for piece in pieces:
        yield held, False
        held = piece
    yield held, True


def _read_in_parts(path: Path, progress: _Progress) -> Iterator[str]:
    """A text file in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    held, seen = "", 0
    try:
        with path.open("rb") as file:
            while data := file.read(_READ):
                progress.add(len(data))
                held += decoder.decode(data)
                place = last_cut(held, seen) or (len(held) if len(held) > _LONGEST else 0)
                if place:
                    yield held[:place]
                    held = held[place:]
                seen = len(held)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    yield held + decoder.decode(b"", True)


def _json_texts(path: Path, text_field: str, progress: _Progress) -> Iterator[Iterator[str]]:
    """The texts of a JSONL file, each in one piece."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                progress.add(len(line))
                if not line.strip():
                    continue
                try:
                    text = decode_json(line)[text_field]
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    raise FormatError(
                        f"{path}, line {number}: no JSON object with {text_field!r} ({type(error).__name__})"
                    ) from None
                if not isinstance(text, str):
                    raise FormatError(f"{path}, line {number}: {text_field!r} is no text but {type(text).__name__}")
                yield iter([text.encode("utf-8", "replace").decode()])  # JSON may hold half a surrogate pair
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
