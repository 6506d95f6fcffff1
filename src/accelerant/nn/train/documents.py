"""The documents of files and folders: which files are text, in which encoding, and what is left out and why.

A file is text if it is UTF-8, UTF-16, UTF-32 or Windows-1252 and has hardly any control characters. All others are
skipped, so that binary content never enters a corpus.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from accelerant.errors import ConfigError, MissingFile
from accelerant.nn.train.folder import RunFolder
from accelerant.runtime.files import decode_json, escaped, is_virtual, open_regular, read_regular
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


@dataclass(frozen=True, slots=True)
class Document:
    """A text: its name, with forward slashes, and its bytes, UTF-8."""

    name: str
    data: bytes

    def __repr__(self) -> str:
        return f"Document({self.name!r}, {len(self.data):,} bytes)"


class NotTextError(Exception):
    """A file is not text; the message says what it is."""


@dataclass(slots=True)
class Reading:
    """Files that were read, with their bytes as UTF-8; skipped, with reasons; converted, with encodings."""

    read: list[tuple[str, int]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    converted: list[tuple[str, str]] = field(default_factory=list)

    def files(self, data: Sequence[str]) -> Iterator[tuple[Path, str]]:
        """Iterate the files that paths name, each once, with the names of their documents."""
        seen: set[str] = set()
        for name in data:
            path = Path(name)
            if not path.exists():
                raise MissingFile(f"no file or folder {name!r}: name a path that exists (for --data, also stdlib)")
            if is_virtual(path):
                advice = "it is made by the system and not stored; copy its contents to a file"
                raise ConfigError(f"cannot read {path}: {advice}")
            for file in files_below(path, self.skipped) if path.is_dir() else [path]:
                real = os.path.realpath(file)
                if real not in seen:
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
        """Iterate the text files: name, path and what `use` makes of each, which also returns a remark."""
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
            raise ConfigError(f"no text in {source}{why}; give --data a file or folder with text")

    @property
    def title(self) -> str:
        """Number and size of the files that were read: "12 files, 3.4 MiB"."""
        count = len(self.read)
        return f"{count:,} file{'s' * (count != 1)}, {size_text(sum(size for _, size in self.read))}"

    def notes(self) -> list[str]:
        """Return what a user should know: what was left out and why, what was converted, what outweighs all else."""
        notes = []
        if self.skipped:
            notes.append(f"read {self.title}; left out {_grouped(self.skipped)}")
        if self.converted:
            notes.append(f"read {_grouped(self.converted)}")
        total = sum(size for _, size in self.read)
        name, largest = max(self.read, key=lambda each: each[1], default=("", 0))
        if len(self.read) > 1 and largest > _DOMINANT * total:
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
    """Iterate the regular files below a folder in the order of their names; links to folders are not followed.

    What is left out is appended to `skipped`: hidden files and folders, installed packages, folders of runs of
    `accelerant train`, and what is no regular file.
    """

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
            reason = reason or ("a link to a folder" if (here / name).is_symlink() else None)
            if reason:
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
    first = next(stream, b"")
    if not first:
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
    return bool(text) and spaced and not _CONTROL.search(text)


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
