"""Token files: a header and then the tokens of a corpus, read through a memory map, so that it may exceed memory.

    bytes 0 to 7       b"ACLTOKEN"
    bytes 8 to 15      version and length of the description, uint32 each, little endian
    bytes 16 to 47     SHA-256 of the description
    bytes 48 to ...    the description: JSON, UTF-8
    bytes 4096 to ...  the tokens, uint16 or uint32, little endian

The description says `dtype`, `count`, `vocab_size`, `tokenizer` (the SHA-256 of its tokenizer.json; "bytes" for plain
bytes), `documents`, `text_bytes`, `source` and `sha256` (of the tokens).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from accelerant.errors import ConfigError, FormatError, MissingFile
from accelerant.runtime.files import AtomicFile, decode_json, open_regular, typed

Tokens = NDArray[np.uint16 | np.uint32]

_MAGIC = b"ACLTOKEN"
_VERSION = 1
_HEADER = 4096
_FIXED = struct.Struct("<8sII32s")
_CHUNK = 1 << 22  # bytes at a time in verify

BYTES = "bytes"  # replaces the tokenizer's hash if tokens are bytes


@dataclass(frozen=True, slots=True)
class TokenFileInfo:
    """The description in a token file's header; every token is below `vocab_size`, `source` is for people."""

    dtype: Literal["uint16", "uint32"]
    count: int
    vocab_size: int
    tokenizer: str
    documents: int
    text_bytes: int
    source: str
    sha256: str


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smaller dtype that holds every token of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def is_token_file(path: Path) -> bool:
    """Return whether a file begins like a token file."""
    try:
        with open(open_regular(path), "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


class TokenFile:
    """An open token file; `tokens` (count,) is a memory map, of which slices and gathers read what they need.

    Raises:
        FormatError: it is missing, torn, of another version, or no token file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.info = _read_info(self.path)
        tokens = np.memmap(self.path, np.dtype(self.info.dtype).newbyteorder("<"), "r", offset=_HEADER)
        self.tokens: Tokens = np.asarray(tokens)

    def __len__(self) -> int:
        return self.info.count

    def __repr__(self) -> str:
        info = self.info
        return f"TokenFile({str(self.path)!r}: {info.count:,} tokens of {info.vocab_size:,}, {info.dtype})"

    def verify(self, watch: Callable[[float], None] = lambda _share: None) -> None:
        """Read all tokens; raise FormatError unless they are in the vocabulary and have their checksum."""
        digest, done, size = hashlib.sha256(), 0, self.tokens.nbytes
        largest = np.zeros(1, self.tokens.dtype)
        with open(open_regular(self.path), "rb") as file:  # not the map, whose pages count as this process's memory
            file.seek(_HEADER)
            while data := file.read(_CHUNK):
                digest.update(data)
                np.maximum(largest, np.frombuffer(data, self.tokens.dtype).max(), out=largest)
                done += len(data)
                watch(min(1.0, done / size))
        if digest.hexdigest() != self.info.sha256:
            raise FormatError(f"{self.path} is damaged: its tokens do not match their checksum; prepare it again")
        require_tokens(largest, self.info.vocab_size, str(self.path))


def _read_info(path: Path) -> TokenFileInfo:
    try:
        with open(open_regular(path), "rb") as file:
            header = file.read(_HEADER)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise MissingFile(f"no token file {path}") from None
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from None
    if header[: len(_MAGIC)] != _MAGIC:
        raise FormatError(f"{path} is no token file: make one with accelerant data prepare")
    if len(header) < _HEADER:
        raise FormatError(f"token file {path} is torn: {len(header)} bytes, the header alone has {_HEADER}")
    _, version, length, digest = _FIXED.unpack_from(header)
    if version != _VERSION:
        raise FormatError(f"token file {path} is of version {version}, this program reads version {_VERSION}")
    text = header[_FIXED.size : _FIXED.size + length]
    if hashlib.sha256(text).digest() != digest:
        raise FormatError(f"token file {path} is damaged: its header does not match its checksum")
    try:
        info: TokenFileInfo = typed(TokenFileInfo, decode_json(text), "the header")
    except ValueError as error:
        raise FormatError(f"token file {path} describes itself in another way: {error}") from None
    bounds = {"count": (1, 1 << 62), "vocab_size": (1, 1 << 32), "documents": (0, 1 << 62), "text_bytes": (0, 1 << 62)}
    for name, (least, most) in bounds.items():
        if not least <= getattr(info, name) <= most:
            raise FormatError(f"token file {path}: {name} must be {least} to {most}, got {getattr(info, name)}")
    wanted = _HEADER + info.count * np.dtype(info.dtype).itemsize
    if size != wanted:
        raise FormatError(f"token file {path} is torn: {size:,} bytes, {info.count:,} tokens need {wanted:,}")
    return info


def require_tokens(tokens: NDArray[Any], vocab_size: int, origin: str) -> None:
    """Raise FormatError unless every token is in the vocabulary: an embedding would read memory beyond its rows."""
    if tokens.size and int(tokens.max()) >= vocab_size:
        outside = f"token {int(tokens.max())} is not below its vocabulary's size, {vocab_size}"
        raise FormatError(f"{origin} is damaged: {outside}")


class TokenWriter:
    """Writes a token file in parts, under a temporary name until `finish`; a context manager.

    Leaving without `finish` removes the file: a reader never sees an incomplete one. A process that is killed (SIGTERM,
    SIGKILL) leaves its temporary file, which the next writer of the path removes.
    """

    def __init__(self, path: Path, *, vocab_size: int, tokenizer: str, source: Sequence[str]) -> None:
        self._path = path
        self._dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._source = ", ".join(source)[:1000]  # the header has one page
        self._digest = hashlib.sha256()
        self.count = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._atomic = AtomicFile(path)
            self._file = self._atomic.file
            self._file.write(bytes(_HEADER))
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror or error}") from None

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._atomic.discard()

    def append(self, tokens: Tokens) -> None:
        """Append tokens; raise ConfigError if one is not below vocab_size, OSError if the disk is full."""
        if len(tokens) and int(tokens.max()) >= self._vocab_size:
            raise ConfigError(f"token {int(tokens.max())} is not below the vocabulary's size, {self._vocab_size}")
        data = np.ascontiguousarray(tokens, self._dtype)
        self._digest.update(data.data)
        with self._named():
            self._file.write(data.data)
        self.count += len(data)

    def finish(self, *, documents: int, text_bytes: int, before: Callable[[], None] = lambda: None) -> TokenFileInfo:
        """Write the header and rename the file; raise ConfigError if no token was written, OSError if the disk is full.

        `before` is called when everything is written, before the file is renamed.
        """
        if not self.count:
            raise ConfigError(f"no text in {self._source}: nothing to write to {self._path}")
        info = TokenFileInfo(
            token_dtype(self._vocab_size), self.count, self._vocab_size, self._tokenizer, documents, text_bytes,
            self._source, self._digest.hexdigest(),
        )  # fmt: skip
        text = json.dumps(asdict(info)).encode()
        if len(text) > _HEADER - _FIXED.size:  # names of few letters and many escapes
            text = json.dumps({**asdict(info), "source": ""}).encode()
        with self._named():
            self._file.seek(0)
            self._file.write(_FIXED.pack(_MAGIC, _VERSION, len(text), hashlib.sha256(text).digest()) + text)
            self._file.flush()
        before()
        self._atomic.commit()
        return info

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the file's name to errors of a write."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None
