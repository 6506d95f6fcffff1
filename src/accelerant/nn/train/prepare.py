"""Text and JSONL files to a token file, in one pass and in memory that does not grow with them.

A file is read in pieces that end between words, where the tokenizer would end one anyway: the tokens are those of the
whole text. The result appears under its name when it is whole.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accelerant.errors import ConfigError, FormatError
from accelerant.nn.train.corpus import text_files
from accelerant.nn.train.material import tokenizer_hash, tokenizer_path
from accelerant.nn.train.tokenfile import TokenFileInfo, TokenWriter, is_token_file
from accelerant.nn.train.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, last_cut, load_bpe, train_bpe_on
from accelerant.runtime.files import decode_json, write_atomic

__all__ = ["prepare_tokens"]

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
        for batch in _batches(_pieces(files, text_field, progress)):
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
    pieces = (piece for number, (piece, _) in enumerate(_pieces(files, text_field, progress)) if not number % stride)
    return train_bpe_on(pieces, vocab_size)


def _pieces(files: Sequence[Path], text_field: str, progress: _Progress) -> Iterator[tuple[str, bool]]:
    """Every document's pieces in turn, and whether each is its document's last."""
    for path in files:
        lines = path.suffix.lower() in _JSON_LINES
        documents = _json_texts(path, text_field, progress) if lines else iter([_read(path, progress)])
        for text in documents:
            progress.documents += 1
            for piece, last in _marked(text):
                progress.text_bytes += len(piece.encode())
                yield piece, last


def _batches(pieces: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
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


def _read(path: Path, progress: _Progress) -> Iterator[str]:
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
