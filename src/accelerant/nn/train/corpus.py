"""Text to train on: its documents, the part that is held out, and its tokens, in memory or in a token file.

A file is text if it is UTF-8, UTF-16, UTF-32 or Windows-1252 and has hardly any control characters. All others are
skipped, so that binary content never enters a corpus. Files are read in the order of their names, so that one machine
always reads the same corpus. Blocks of all documents are held out: both parts have text of every large document.
"""

import codecs
import hashlib
import io
import itertools
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import numpy as np

from accelerant.errors import ConfigError, FormatError, MissingFile
from accelerant.nn.train.config import STDLIB, Paths, RunConfig, TrainConfig, paths_of
from accelerant.nn.train.data import permutation, require_windows
from accelerant.nn.train.history import RunFolder
from accelerant.nn.train.tokens import (
    BYTES,
    BPETokenizer,
    ByteTokenizer,
    Document,
    TokenFile,
    TokenFileInfo,
    Tokenizer,
    Tokens,
    TokenWriter,
    is_token_file,
    last_cut,
    load_bpe,
    train_bpe,
    train_bpe_on,
)
from accelerant.runtime.files import decode_json, escaped, is_virtual, open_regular, read_regular, write_atomic
from accelerant.runtime.memory.limits import size_text

_BLOCK = 1 << 22  # bytes at a time
_SKIPPED_FOLDERS = {
    "site-packages": "installed packages", "dist-packages": "installed packages", "__pycache__": "a cache",
}  # fmt: skip
_SHOWN = 5  # names in a note; the report has more
_REPORTED = 50
_DOMINANT = 0.8  # of the text, in one file
_SAME = "the same text as"
TOKENIZER_SUFFIX = ".tokenizer.json"  # appended to the name of a token file

T = TypeVar("T")


class NotTextError(Exception):
    """A file is not text; the message says what it is."""


@dataclass(slots=True)
class Reading:
    """Files that were read, with their bytes as UTF-8; skipped, with reasons; converted, with encodings."""

    read: list[tuple[str, int]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    converted: list[tuple[str, str]] = field(default_factory=list)
    without: Path | None = None  # a folder whose files are not read

    def files(self, data: Sequence[str]) -> Iterator[tuple[Path, str]]:
        """Iterate the files that paths name, each once, with the names of their documents."""
        seen: set[str] = set()
        without = None if self.without is None else self.without.resolve()
        for name in data:
            path = Path(name)
            if not path.exists():
                raise MissingFile(f"no file or folder {name!r}: name a path that exists (for --data, also stdlib)")
            if is_virtual(path):
                advice = "it is made by the system and not stored; copy its contents to a file"
                raise ConfigError(f"cannot read {path}: {advice}")
            for file in files_below(path, self.skipped) if path.is_dir() else [path]:
                real = os.path.realpath(file)
                if real not in seen and without not in Path(real).parents:
                    seen.add(real)
                    yield file, path.name if file == path else file.relative_to(path).as_posix()

    def documents(self, data: Sequence[str], *, distinct: bool = True, suffix: str = "") -> list[Document]:
        """Read the text files that paths name; with `distinct`, each text once."""
        found, texts = [], dict[bytes, str]()
        for name, _, text in self._texts(data, _text, suffix):
            digest = hashlib.sha256(text).digest()
            if distinct and digest in texts:
                self.skipped.append((name, f"{_SAME} {texts[digest]}"))
                continue
            texts[digest] = name
            found.append(Document(name, text))
            self.read.append((name, len(text)))
        return found

    def text_files(self, data: Sequence[str]) -> list[tuple[Path, str]]:
        """Return the text files that paths name, and the codec of each; they are read once to find it."""
        found = []
        for name, path, codec in self._texts(data, lambda file: encoding_of(iter(partial(file.read, _BLOCK), b""))):
            found.append((path, codec))
            self.read.append((name, path.stat().st_size))
        return found

    def _texts(
        self, data: Sequence[str], use: Callable[[BinaryIO], tuple[T, str]], suffix: str = ""
    ) -> Iterator[tuple[str, Path, T]]:  # fmt: skip
        """Iterate the text files as name, path and result of `use`, which also returns a remark on the encoding."""
        named = set(map(Path, data))
        for path, name in self.files(data):
            if not name.endswith(suffix):
                continue
            try:
                with open(open_regular(path), "rb") as file:
                    result, remark = use(file)
            except NotTextError as error:
                self.skipped.append((name, str(error)))
                continue
            except OSError as error:
                if path in named:
                    raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
                self.skipped.append((name, error.strerror or str(error)))
                continue
            if remark:
                self.converted.append((name, remark))
            yield name, path, result

    def require_text(self, source: str) -> None:
        """Raise ConfigError, which says why files were left out, if no text was read."""
        if not any(size for _, size in self.read):
            why = f": {escaped(_grouped(self.skipped))}" if self.skipped else ""
            raise ConfigError(f"no text in {source}{why}; give a file or folder with text")

    @property
    def title(self) -> str:
        """Number and size of the files that were read: "12 files, 3.4 MiB"."""
        count = len(self.read)
        return f"{count:,} file{'s' * (count != 1)}, {size_text(sum(size for _, size in self.read))}"

    def notes(self, *, trains: bool = True) -> list[str]:
        """Return notes for the user: files left out, files converted, and for training a file that dominates."""
        notes = []
        if self.skipped:
            notes.append(f"read {self.title}; left out {_grouped(self.skipped)}")
        if self.converted:
            notes.append(f"read {_grouped(self.converted)}")
        total = sum(size for _, size in self.read)
        name, largest = max(self.read, key=lambda each: each[1], default=("", 0))
        if trains and len(self.read) > 1 and largest > _DOMINANT * total:
            share = f"{min(largest / total, 0.99):.0%} of the text"
            notes.append(f"the file {name} is {share}: the model learns little else; leave it out unless you want that")
        return [escaped(note) for note in notes]

    def to_dict(self) -> dict[str, Any]:
        """Return what was read by kind of file, the largest files, and what was left out, as JSON values for people."""
        total = max(1, sum(size for _, size in self.read))
        kinds, sizes = Counter[str](), Counter[str]()
        for name, size in self.read:
            kind = Path(name).suffix.lower() or "no suffix"
            kinds[kind] += 1
            sizes[kind] += size
        largest = sorted(self.read, key=lambda each: -each[1])[:_SHOWN]
        return {
            "documents": len(self.read),
            "kinds": [escaped(f"{kind}: {kinds[kind]:,}, {size / total:.0%}") for kind, size in sizes.most_common(20)],
            "largest": [escaped(f"{name}: {size_text(size)}, {size / total:.0%}") for name, size in largest],
            "skipped": [escaped(text) for text in _groups(self.skipped, _REPORTED)],
            "converted": [escaped(text) for text in _groups(self.converted, _REPORTED)],
        }


def _text(file: BinaryIO) -> tuple[bytes, str]:
    """Return a file's text as UTF-8, and a remark on its encoding; NotTextError as `encoding_of`."""
    parts: list[bytes] = []

    def blocks() -> Iterator[bytes]:  # a large binary file is not read to its end
        while part := file.read(_BLOCK):
            parts.append(part)
            yield part

    codec, remark = encoding_of(blocks())
    data = b"".join(parts)
    return (data.decode(codec, "replace").encode() if remark else data), remark


def _groups(named: Sequence[tuple[str, str]], most: int) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in named:
        by_reason.setdefault("the same text as others" if reason.startswith(_SAME) else reason, []).append(name)
    groups = []
    for reason, names in by_reason.items():
        rest = f" and {len(names) - most:,} more" if len(names) > most else ""
        groups.append(f"{', '.join(names[:most])}{rest} ({reason})")
    return groups[:most] + ([f"{len(groups) - most:,} other kinds"] if len(groups) > most else [])


def _grouped(named: Sequence[tuple[str, str]]) -> str:
    return "; ".join(_groups(named, _SHOWN))


def files_below(root: Path, skipped: list[tuple[str, str]]) -> Iterator[Path]:
    """Iterate a folder's regular files by name; hidden ones, links to folders, packages and runs go to `skipped`."""

    def skip(path: Path, reason: str) -> None:
        skipped.append((path.relative_to(root).as_posix(), reason))

    def unreadable(error: OSError) -> None:
        skip(Path(str(error.filename)), error.strerror or str(error))

    for folder, folders, names in os.walk(root, onerror=unreadable):
        here = Path(folder)
        run = _is_run(here, names)
        if here != root and run:
            skip(here, "a run of accelerant train")
            folders.clear()
            continue
        kept = []
        for name in sorted(folders):
            reason = "hidden" if name.startswith(".") else _SKIPPED_FOLDERS.get(name)
            if reason := reason or ("a link to a folder" if (here / name).is_symlink() else None):
                skip(here / name, reason)
            else:
                kept.append(name)
        folders[:] = kept
        for name in sorted(names):
            path = here / name
            try:
                if name.startswith("."):
                    skip(path, "hidden")
                elif run and name in (*RunFolder.FILES, RunFolder.LEDGER):
                    skip(path, "of a run of accelerant train")
                elif not path.is_file():
                    skip(path, "a broken link" if path.is_symlink() else "no regular file")
                elif is_virtual(path):
                    skip(path, "made by the system")
                elif name.removesuffix(TOKENIZER_SUFFIX) in names and name.endswith(TOKENIZER_SUFFIX):
                    skip(path, "the tokenizer of a token file")
                else:
                    yield path
            except OSError as error:  # it vanished
                skip(path, error.strerror or str(error))


def _is_run(folder: Path, names: Sequence[str]) -> bool:
    if not {"config.json", "metrics.jsonl"} <= set(names):
        return False
    try:
        values = decode_json(read_regular(folder / "config.json"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and str(values.get("format", "")).startswith("accelerant-train")


# --- encodings -------------------------------------------------------------------------------------------------------
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32", "UTF-32"), (codecs.BOM_UTF32_BE, "utf-32", "UTF-32"),
    (codecs.BOM_UTF8, "utf-8-sig", "UTF-8 with a byte order mark"),
    (codecs.BOM_UTF16_LE, "utf-16", "UTF-16"), (codecs.BOM_UTF16_BE, "utf-16", "UTF-16"),
)  # fmt: skip
_KINDS = (
    (b"%PDF-", "PDF"), (b"PK", "ZIP, which docx, xlsx and epub are"), (b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"), (b"\x28\xb5\x2f\xfd", "Zstandard"), (b"7z\xbc\xaf", "7z"), (b"PAR1", "Parquet"),
    (b"\x89PNG", "an image"), (b"\xff\xd8\xff", "an image"), (b"GIF8", "an image"), (b"ACLTOKEN", "a token file"),
    (b"\xd0\xcf\x11\xe0", "an old Office document"), (b"SQLite format 3", "SQLite"), (b"\x7fELF", "a program"),
)  # fmt: skip
"""What files of other kinds begin with."""

_CONTROLS = bytes([*range(7), *range(14, 27), *range(28, 32), 127])
_PRINTABLE = bytes([9, 10, 13, *range(32, 127)])
_CONTROL = re.compile(r"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f\x80-\x84\x86-\x9f\ufffe\uffff]")
_HIGH = bytes(range(128, 256))
_NOT_1252 = bytes([0x81, 0x8D, 0x8F, 0x90, 0x9D])
_MOST_CONTROLS = 1 / 500  # of a text
_MOST_HIGH = 0.4  # of a text in Windows-1252: more are another language's letters
_HEAD = 1 << 16


def encoding_of(blocks: Iterable[bytes]) -> tuple[str, str]:
    """Return the codec in which a file's bytes are text, and a remark on it; "" for plain UTF-8.

    Raises NotTextError for others. The bytes come in parts of any size, of which the first has at least 64 KiB, or all.
    """
    stream = iter(blocks)
    if not (first := next(stream, b"")):
        raise NotTextError("empty")
    kind = next((kind for start, kind in _KINDS if first.startswith(start)), "binary")
    if kind == "PDF":  # whose beginning may be text
        raise NotTextError(kind)
    for mark, codec, name in _MARKS:
        if first.startswith(mark):
            return _decodable([first], stream, codec, name)
    if b"\0" in first[:_HEAD]:
        for codec, name in _WIDE:
            if _is_wide(first[:_HEAD], codec):
                return _decodable([first], stream, codec, name)
        raise NotTextError(kind)
    size = controls = high = bad = good = no_1252 = 0
    decoder, tail = codecs.getincrementaldecoder("utf-8")("replace"), b""
    for block in itertools.chain([first], stream):
        if b"\0" in block:
            raise NotTextError(kind)
        size += len(block)
        controls += len(block) - len(block.translate(None, _CONTROLS))
        if controls > 1 + _MOST_CONTROLS * max(size, _HEAD):
            raise NotTextError(kind)
        text = decoder.decode(block)
        if block.isascii() and not tail:
            continue
        above = len(block) - len(block.translate(None, _HIGH))
        replaced = text.count("\ufffd") - (tail + block).count(b"\xef\xbf\xbd")
        high, bad, good = high + above, bad + replaced, good + len(text) - (len(block) - above) - replaced
        no_1252 += len(block) - len(block.translate(None, _NOT_1252))
        tail = block[-2:]
    bad += len(decoder.decode(b"", True))
    if controls > max(1, _MOST_CONTROLS * size):  # one ends the texts of old DOS programs
        raise NotTextError(kind)
    if bad <= 0:
        return "utf-8", ""
    if good > bad:
        return "utf-8", f"with {bad:,} replaced characters: they are not UTF-8"
    if no_1252 or high > _MOST_HIGH * size:
        raise NotTextError("in an encoding that is not recognized: convert it to UTF-8" if kind == "binary" else kind)
    return "cp1252", "as Windows-1252"


_WIDE = (("utf-32-le", "UTF-32"), ("utf-32-be", "UTF-32"), ("utf-16-le", "UTF-16"), ("utf-16-be", "UTF-16"))


def _is_wide(head: bytes, codec: str) -> bool:
    """Return whether the beginning of a file without a byte order mark is text in UTF-16 or UTF-32."""
    try:
        text = codecs.getincrementaldecoder(codec)().decode(head)
    except UnicodeDecodeError:
        return False
    spaced = 50 * sum(map(str.isascii, text)) >= len(text)  # no text is without line ends, spaces and digits
    ascii = 10 * len(head.translate(None, _PRINTABLE)) < len(head)  # of bytes with a NUL among them
    return bool(text) and spaced and not ascii and not _CONTROL.search(text)


def _decodable(first: list[bytes], rest: Iterator[bytes], codec: str, name: str) -> tuple[str, str]:
    decoder, controls, length = codecs.getincrementaldecoder(codec)(), 0, 0
    try:
        for block in itertools.chain(first, rest, [b""]):
            text = decoder.decode(block, not block)
            controls, length = controls + len(_CONTROL.findall(text)), length + len(text)
    except UnicodeDecodeError as error:
        raise NotTextError(f"damaged {name}: {error.reason}") from None
    if not length:
        raise NotTextError("empty")
    if controls > _MOST_CONTROLS * length:
        raise NotTextError("binary")
    return codec, f"as {name}"


# --- a corpus --------------------------------------------------------------------------------------------------------
_HELD_OUT = 0.05  # share of the text
_HELD_OUT_OF_LITTLE, _LITTLE = 0.1, 1 << 20  # share of a text of fewer bytes, which has few windows
_BLOCKS, _LONGEST_BLOCK = 16, 1 << 16  # fewest held-out blocks, unless windows are long, and most bytes of a block
_HELD_OUT_DRAW = (1 << 64) - 1  # number of this permutation; those of the epochs count from 0


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
    """Read a corpus and hold out blocks of it; raise ConfigError for a path that cannot be read, or without any text.

    `data` is "stdlib" (the source code of Python's standard library), a path or several; a folder means its text files
    that are not hidden. A file that is named twice, or has the text of another, is read once: otherwise its held-out
    blocks would be trained on. `window_bytes` is about the length of a window, of which a block has at least two. With
    `fixed` the sizes of the documents alone decide what is held out, as private training needs it: blocks may end
    inside a character, and files with the same text are kept.
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
    """Hold out one block of each run of about 10 or 20, drawn by the seed; neighbours of a part stay one document."""
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
        """Begin a phase that takes a while."""

    def advance(self, share: float, text: str = "") -> None:
        """Report which share, 0 to 1, of the phase is done, or of the step of it that `text` names."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text's tokens in two disjoint parts, its origin, and `baselines`: held-out losses of n-gram models of bytes."""

    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens
    sha256: str
    description: dict[str, Any]
    baselines: Callable[[], tuple[float, float]]
    notes: Sequence[str] = ()


def tokenize(run: RunConfig, watcher: Watcher, *, tokenizer_from: Path | None, fixed: bool = False) -> TokenizedText:
    """Read and tokenize a run's text, or map its token file; ConfigError for unusable data, FormatError for damaged."""
    watcher.phase("reading the text")
    paths = [Path(name) for name in paths_of(run.data)]
    if token_files := [path for path in paths if is_token_file(path)]:
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
        tokenizer = train_bpe(corpus.train, corpus.sha256, run.vocab_size, phase=watcher.phase, watch=watcher.advance)
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


def _share_watch(total: int, watch: Watch, phase: str) -> Callable[[int], None]:
    """Return a function that takes the bytes of each read, and reports the share of the total in steps of 0.001."""
    read, reported = 0, -1.0

    def add(size: int) -> None:
        nonlocal read, reported
        read += size
        share = min(1.0, read / max(1, total))
        if share - reported >= 0.001 or share == 1.0:
            reported = share
            watch(phase, share)

    return add


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

    def write_tokenizer() -> None:
        path, text = tokenizer_path(out), chosen.to_json()
        if text is None:
            path.unlink(missing_ok=True)
        else:
            write_atomic(path, text.encode())

    with TokenWriter(out, vocab_size=chosen.vocab_size, tokenizer=tokenizer_hash(chosen), source=data) as writer:
        batch: list[tuple[str, bool]] = []  # enough parts at a time to keep the tokenizer's threads busy
        length = documents = text_bytes = 0
        for part, last in _parts(files, text_field, _share_watch(size, watch, "encoding the text")):
            batch.append((part, last))
            length, documents, text_bytes = length + len(part), documents + last, text_bytes + len(part.encode())
            if length >= _READ:
                writer.append(chosen.encode_pieces(batch))
                batch, length = [], 0
        if batch:
            writer.append(chosen.encode_pieces(batch))
        return writer.finish(documents=documents, text_bytes=text_bytes, before=write_tokenizer)


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
    parts = enumerate(_parts(files, text_field, _share_watch(size, watch, "training the tokenizer")))
    return train_bpe_on((part for number, (part, _) in parts if not number % stride), vocab_size)


def _parts(
    files: Sequence[tuple[Path, str]], text_field: str, add_read: Callable[[int], None]
) -> Iterator[tuple[str, bool]]:
    """Iterate the parts of all documents, each with whether it is its document's last."""
    for path, codec in files:
        if path.suffix.lower() in _JSON_LINES:
            yield from ((text, True) for text in _json_texts(path, codec, text_field, add_read))
        else:
            parts = itertools.chain(_text_parts(path, codec, add_read), [None])
            yield from ((part or "", following is None) for part, following in itertools.pairwise(parts))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(open_regular(path), "rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _text_parts(path: Path, codec: str, add_read: Callable[[int], None]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(codec)("replace")
    text, searched = "", 0
    with _opened(path) as file:
        while data := file.read(_READ):
            add_read(len(data))
            text += decoder.decode(data)
            if cut := last_cut(text, searched) or (len(text) if len(text) > _LONGEST else 0):
                yield text[:cut]
                text = text[cut:]
            searched = len(text)
    yield text + decoder.decode(b"", True)


def _json_texts(path: Path, codec: str, text_field: str, add_read: Callable[[int], None]) -> Iterator[str]:
    """Iterate the texts of a JSONL file."""
    with _opened(path) as file, io.TextIOWrapper(file, codec, "replace", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            add_read(len(line))
            if not line.strip():
                continue
            try:
                text = decode_json(line)[text_field]
            except (ValueError, KeyError, TypeError, IndexError) as error:
                reason = f"no JSON object with {text_field!r} ({type(error).__name__})"
                raise FormatError(f"{path}, line {number}: {reason}") from None
            if not isinstance(text, str):
                raise FormatError(f"{path}, line {number}: {text_field!r} is no text but {type(text).__name__}")
            yield text.encode("utf-8", "replace").decode()  # JSON may hold half a surrogate pair
