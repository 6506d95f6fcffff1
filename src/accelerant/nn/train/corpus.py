"""Text to train on: which files, in which order, and what is held out.

The order is that of the names, so one machine always sees one corpus. Whole files are held out where there
are enough of them; otherwise the end of the text is.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accelerant.errors import ConfigError
from accelerant.nn.train.presets import STDLIB

__all__ = ["Corpus", "Document", "load_corpus", "ngram_baselines", "text_files"]

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
