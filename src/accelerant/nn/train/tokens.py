# ruff: noqa: D102  ByteTokenizer documents the methods of both tokenizers
"""Text to tokens and back: plain bytes, or a byte-level BPE trained by the `tokenizers` library; and files of tokens.

A trained BPE is cached under the corpus's hash, the vocabulary size and the library's version, so that the second run
on a corpus does not train it again. A token file is a header and then the tokens of a corpus, read through a memory
map, so that it may exceed memory:

    bytes 0 to 7       b"ACLTOKEN"
    bytes 8 to 15      version and length of the description, uint32 each, little endian
    bytes 16 to 47     SHA-256 of the description
    bytes 48 to ...    the description: JSON, UTF-8
    bytes 4096 to ...  the tokens, uint16 or uint32, little endian

The description says `dtype`, `count`, `vocab_size`, `tokenizer` (the SHA-256 of its tokenizer.json; "bytes" for plain
bytes), `documents`, `text_bytes`, `source` and `sha256` (of the tokens).
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import re
import struct
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from accelerant.config import settings
from accelerant.errors import ConfigError, FormatError, MissingFile
from accelerant.nn.models.tokenizer import BYTE_PIECES
from accelerant.runtime.files import AtomicFile, clipped, decode_json, open_regular, read_regular, typed, write_atomic

Tokens = NDArray[np.uint16 | np.uint32]

END_OF_TEXT = "<|endoftext|>"

Watch = Callable[[float], None]
"""Receives the share of the work that is done, 0 to 1."""

_PIECE = 1 << 18  # characters in a piece: those of a long document keep all cores busy
_BATCH = 1 << 22  # characters at a time: bounds the memory of the library's own objects
_SPACE = re.compile(r"(?<=[^\s\u180e]) (?=[^\s\u180e])")
_LINE = re.compile(r"(?<=[^\s\u180e])\n")
"""Where the pre-tokenizer ends a word, whatever the context. Python and older Unicode count more characters as white
space than it does. A space between two words is the better cut: every byte-level tokenizer ends a word there, and none
inserts a space before it. Text without spaces between words has line ends."""

_WINDOW = 1 << 16  # characters searched for the last cut at a time
_LONGEST_WORD = 256  # characters; see _bounded
_LONG = re.compile(rf"\S{{{_LONGEST_WORD}}}|\s{{{_LONGEST_WORD}}}")


@dataclass(frozen=True, slots=True)
class Document:
    """A text: its name, with forward slashes, and its bytes, UTF-8."""

    name: str
    data: bytes

    def __repr__(self) -> str:
        return f"Document({self.name!r}, {len(self.data):,} bytes)"


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smaller dtype that holds every token of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class ByteTokenizer:
    """Each byte is a token, and a newline separates documents.

    `byte_lengths` (vocab_size,) counts the bytes of text in each token; `end` follows each document, None for none.
    """

    vocab_size = 256
    end: int | None = None
    byte_lengths: NDArray[np.int64] = np.ones(256, np.int64)

    def __repr__(self) -> str:
        return "ByteTokenizer()"

    def encode(self, documents: Sequence[Document], watch: Watch = lambda _share: None) -> Tokens:
        """Return the tokens of all documents, with their ends marked."""
        text = b"\n".join(document.data for document in documents)
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> NDArray[np.uint16 | np.uint32]:
        """Return the tokens of consecutive parts of documents, each with whether it is its document's last."""
        text = "".join(piece + "\n" * last for piece, last in pieces)
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return bytes(tokens).decode("utf-8", "replace")

    def to_json(self) -> str | None:
        """Return the content of tokenizer.json, or None if there is nothing to save."""
        return None

    def save_pretrained(self, out: str | os.PathLike[str]) -> None:
        """Write the files from which transformers' AutoTokenizer makes a tokenizer with the same tokens."""
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers

        tokenizer: Any = Library(models.BPE(BYTE_PIECES, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        _save_pretrained(Path(out), tokenizer.to_str(pretty=True), None)


class BPETokenizer:
    """A byte-level BPE; `<|endoftext|>` follows each document."""

    def __init__(self, text: str) -> None:
        import tokenizers

        _require_bpe(text)
        try:
            self._inner: Any = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001  the library raises bare Exception
            raise FormatError(f"not a tokenizer: {str(error)[:300]}") from None
        self._inner.encode_special_tokens = True  # "<|endoftext|>" in a text is text; only `encode` ends documents
        self._inner.no_truncation()  # a setting for prompts, which would drop the rest of each piece of a corpus
        self._inner.no_padding()
        self.end = self._inner.token_to_id(END_OF_TEXT)
        if self.end is None:
            raise FormatError(f"tokenizer has no {END_OF_TEXT} token")
        vocabulary = self._inner.get_vocab()
        self.vocab_size = len(vocabulary)
        if set(vocabulary.values()) != set(range(self.vocab_size)):
            last = self.vocab_size - 1
            raise FormatError(f"the tokenizer's {self.vocab_size:,} tokens are not numbered 0 to {last:,}")
        self.byte_lengths = np.zeros(self.vocab_size, np.int64)
        for token, index in vocabulary.items():
            # Byte-level BPE writes each byte as one character of its own alphabet.
            self.byte_lengths[index] = 0 if token == END_OF_TEXT else len(token)
        given, found = (unicodedata.normalize("NFKC", each) for each in (_PROBE, self.decode(self.encode_text(_PROBE))))
        if found.removeprefix(" ") != given:  # which some tokenizers begin with
            raise FormatError("the tokenizer does not give every text back: training needs a byte-level BPE")

    def __repr__(self) -> str:
        return f"BPETokenizer({self.vocab_size:,} tokens)"

    def encode(self, documents: Sequence[Document], watch: Watch = lambda _share: None) -> Tokens:
        parts: list[Tokens] = [np.zeros(0, token_dtype(self.vocab_size))]
        for batch, share in _batches(documents):
            parts.append(self._encoded(batch))
            watch(share)
        return np.concatenate(parts)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> NDArray[np.uint16 | np.uint32]:
        small: list[tuple[str, bool]] = []
        for text, last in pieces:
            parts = list(_pieces(text))
            small += [(part, last and number == len(parts)) for number, part in enumerate(parts, 1)]
        return self._encoded(small)

    def _encoded(self, pieces: Sequence[tuple[str, bool]]) -> Tokens:
        dtype = token_dtype(self.vocab_size)
        rows = self._inner.encode_batch_fast([text for text, _ in pieces], add_special_tokens=False)  # on all cores
        ids = ([*row.ids, self.end] if last else row.ids for row, (_, last) in zip(rows, pieces, strict=True))
        return np.concatenate([np.array(tokens, dtype) for tokens in ids])

    def encode_text(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._inner.decode(list(tokens), skip_special_tokens=False))

    def to_json(self) -> str | None:
        return str(self._inner.to_str(pretty=True))

    def save_pretrained(self, out: str | os.PathLike[str]) -> None:
        _save_pretrained(Path(out), self.to_json() or "", END_OF_TEXT)


Tokenizer = ByteTokenizer | BPETokenizer


def _save_pretrained(folder: Path, tokenizer: str, end: str | None) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        **({} if end is None else {"bos_token": end, "eos_token": end, "unk_token": end}),
    }  # fmt: skip
    write_atomic(folder / "tokenizer.json", tokenizer.encode())
    write_atomic(folder / "tokenizer_config.json", (json.dumps(config, indent=2) + "\n").encode())


_PROBE = "a word, 2 Words\n" + "".join(
    map(chr, [*range(0x800), *range(0x800, 0xD800, 0x800), 0xFFFD, *range(1 << 16, 0x110000, 1 << 16)])
)
"""A text that has every byte of UTF-8."""


def _require_bpe(text: str) -> None:
    """Raise FormatError unless a tokenizer.json has a BPE of the text alone: with other models the library panics."""
    try:
        model = typed(dict[str, Any], typed(dict[str, Any], decode_json(text)).get("model"), "model")
    except ValueError as error:
        raise FormatError(f"not a tokenizer: {error}") from None
    if model.get("type", "BPE") != "BPE":
        raise FormatError(f"not a BPE but a tokenizer of type {clipped(model['type'])}")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise FormatError(f"the tokenizer's {name} must be absent, got {clipped(model[name])}")


def load_bpe(path: Path) -> BPETokenizer:
    """Read a tokenizer.json; raise FormatError unless it is a byte-level BPE with an end-of-text token."""
    try:
        return BPETokenizer(read_regular(path, 1 << 28).decode())
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"cannot read the tokenizer {path}: {error}") from None


def load_exported(path: Path) -> Tokenizer:
    """Read the tokenizer.json of a model for transformers: that of an exported run of bytes, or as `load_bpe`."""
    try:
        model = decode_json(read_regular(path, 1 << 28))["model"]
        if model["vocab"] == BYTE_PIECES and not model["merges"]:
            return ByteTokenizer()
    except (OSError, ValueError, KeyError, TypeError):
        pass  # load_bpe says why
    return load_bpe(path)


def _pieces(text: str) -> Iterator[str]:
    """Iterate pieces of a text whose tokens, concatenated, are those of the whole."""
    start = 0
    while len(text) - start > _PIECE:
        at = start + _PIECE
        if (found := _SPACE.search(text, at, at + _PIECE) or _LINE.search(text, at)) is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def last_cut(text: str, since: int) -> int:
    """Return the last place, not before `since`, where cutting an unfinished text keeps its tokens; or 0."""
    for boundary in (_SPACE, _LINE):
        end = len(text)
        while end > since:
            start = max(since - 1, end - _WINDOW, 0)
            found = collections.deque(boundary.finditer(text, start, min(end + 1, len(text))), maxlen=1)
            if found:
                return found[0].start()
            end = start
    return 0


def _batches(documents: Sequence[Document]) -> Iterator[tuple[list[tuple[str, bool]], float]]:
    """Iterate batches of pieces, each with whether it is its document's last, and the share of the bytes after each."""
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
    documents: Sequence[Document], sha256: str, vocab_size: int, *, phase: Callable[[str], None] = lambda _text: None,
    watch: Watch = lambda _share: None,
) -> BPETokenizer:  # fmt: skip
    """Train a BPE of at most `vocab_size` tokens on a corpus's training part, or load it from the cache."""
    import tokenizers

    key = hashlib.sha256(f"2 {tokenizers.__version__} {sha256} {vocab_size}".encode()).hexdigest()[:32]
    path = settings().cache_dir / "tokenizers" / f"{key}.json"
    if os.path.isfile(path):  # False, too, in a folder that is closed to this user
        try:
            return load_bpe(path)
        except FormatError:
            pass  # torn by another program: train again
    phase("training the tokenizer (cached for the next run)")

    def texts() -> Iterator[str]:
        for batch, share in _batches(documents):
            yield from (text for text, _ in batch)
            watch(share)
            if share == 1.0:
                phase(f"choosing up to {vocab_size:,} tokens")

    tokenizer = train_bpe_on(texts(), vocab_size)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (tokenizer.to_json() or "").encode())
    except OSError:
        pass  # an unwritable cache costs time only
    return tokenizer


def _bounded(texts: Iterator[str]) -> Iterator[str]:
    """Cut words longer than _LONGEST_WORD: the library's time of training grows with the square of their length."""
    for text in texts:
        start, found = 0, _LONG.search(text)
        while found is not None:
            yield text[start : found.end()]
            start = found.end()
            found = _LONG.search(text, start)
        yield text[start:]


def train_bpe_on(texts: Iterator[str], vocab_size: int) -> BPETokenizer:
    """Train a BPE on texts, in memory that grows with the number of different words alone."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_bounded(texts), trainer)
    return BPETokenizer(str(tokenizer.to_str()))


# --- token files -----------------------------------------------------------------------------------------------------
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
    """Writes a token file under a temporary name until `finish`, so that no reader sees an incomplete one."""

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
        """Write the header, call `before`, and rename the file; ConfigError without a token, OSError on a full disk."""
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
