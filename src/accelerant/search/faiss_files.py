"""FAISS's files of flat, inverted-list and product-quantized indexes, read and written.

A file is a tree of records, each a name of four letters and its fields, little-endian; an array is its length
in 64 bits and its elements. `Index` reads these and keeps what its search needs:

    IxFI IxF2 IxFl   vectors, under inner product or squared distance
    IBxF             bits, under the Hamming distance
    IxMp IxM2 IBMp IBM2   ids of another index's vectors
    IwFl             lists of vectors        ilar  lists of ids and codes, all of them or those that are not empty
    IwPQ IwPf        lists of codes          ilbl  the same in blocks of 32, halves of bytes interleaved (fast scan)
    IxPq             codes in no lists
    IxRF             codes with the vectors that score their answers

No size in a file is trusted: each is compared with the bytes that are left before memory is allocated.

Source: the files that FAISS 1.15 writes, faiss/impl/index_write.cpp.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import FormatError, MissingFile, UnsupportedCase
from accelerant.runtime.files import AtomicFile, open_regular
from accelerant.search.index import Index, Lists, State, list_numbers
from accelerant.search.lists import ProductQuantizer
from accelerant.search.llvm_kernels import LANES

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

_INNER, _L2 = 0, 1
_FLAT = {b"IxFI", b"IxF2", b"IxFl"}
_NAMED = {b"IxMp", b"IxM2", b"IBMp", b"IBM2"}
_DEPTH = 6
_COSINE = b"accelerant cosine"
"""What follows the records of an index whose vectors were normalized; FAISS does not read so far."""


def faiss_read(path: str | Path, *, device: Any = "cpu") -> Index:
    """Return the index of one of FAISS's files, of the kinds that this module lists.

    Raises:
        MissingFile: no such file.
        FormatError: a truncated or malformed file; sizes that contradict each other or the file's length.
        UnsupportedCase: an index of another kind.
    """
    try:
        with open(open_regular(path), "rb") as file:
            reader = _Reader(file, os.fstat(file.fileno()).st_size, str(path))
            index = reader.index(device)
            if file.read(len(_COSINE) + 1) == _COSINE:
                if index.metric != "ip":
                    raise reader.wrong(f"vectors of {index.metric} are not normalized")
                index.metric = "cosine"
            return index
    except FileNotFoundError:
        raise MissingFile(f"no such file: {path}") from None
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from None


class _Reader:
    """The records of an open file, with a count of the bytes that are left."""

    def __init__(self, file: BinaryIO, size: int, path: str) -> None:
        self.file, self.left, self.path = file, size, path

    def wrong(self, text: str) -> FormatError:
        """Return the error of a malformed file."""
        return FormatError(f"{self.path} is not an index of FAISS, or is damaged: {text}")

    def take(self, count: int) -> bytes:
        """Return so many bytes."""
        if not 0 <= count <= self.left:
            raise self.wrong(f"{count:,} bytes are promised, {self.left:,} are left")
        self.left -= count
        found = self.file.read(count)
        if len(found) != count:
            raise self.wrong("it ended while it was read")
        return found

    def fields(self, kinds: str) -> tuple[Any, ...]:
        """Return fields by the letters of `struct`."""
        return struct.unpack("<" + kinds, self.take(struct.calcsize("<" + kinds)))

    def array(self, dtype: DTypeLike, count: int | None = None) -> NDArray[Any]:
        """Return so many elements, by default as many as the file says here."""
        count = self.fields("Q")[0] if count is None else count
        kind = np.dtype(dtype)
        return np.frombuffer(bytearray(self.take(count * kind.itemsize)), kind)

    def floats(self, rows: int, width: int, count: int | None = None) -> Tensor:
        """Return finite float32 vectors."""
        x = self.array(np.float32, count)
        if len(x) != rows * width:
            raise self.wrong(f"{rows} x {width} numbers are expected, {len(x)} are there")
        return self.finite(torch.from_numpy(x).view(rows, width))

    def finite(self, x: Tensor) -> Tensor:
        """Return vectors whose squares float32 holds."""
        if len(x) and not bool((torch.linalg.vector_norm(x, dim=1) < 1e19).all()):
            raise self.wrong("its vectors have NaN, infinity, or norms above 1e19")
        return x

    def header(self) -> tuple[int, int, str]:
        """Return dimension, count and metric of an index."""
        d, count, _, _, trained, metric = self.fields("iqqq?i")
        if not 1 <= d <= 1 << 24 or not 0 <= count < 1 << 48:
            raise self.wrong(f"dimension {d} and {count} vectors")
        if metric not in (_INNER, _L2) or not trained:
            raise UnsupportedCase(f"{self.path} has metric {metric}, trained {trained}: wanted inner product or L2")
        return d, count, "ip" if metric == _INNER else "l2"

    def index(self, device: Any, depth: int = 0) -> Index:
        """Return the index that begins here."""
        name = self.take(4)
        if depth > _DEPTH:
            raise self.wrong("its records are nested too deeply")
        if name in _NAMED:
            return self._named(name, device, depth)
        if name == b"IxRF":
            return self._refined(device, depth)
        if name == b"IBxF":
            return self._bits(device)
        if name in _FLAT:
            d, count, metric = self.header()
            index = Index(d, metric, device=device)
            x = self.floats(count, d)  # the count is of four bytes each
            return _filled(index, torch.arange(count, device="cpu"), x)
        if name in (b"IwFl", b"IwPQ", b"IwPf"):
            return self._lists(name, device)
        if name in (b"IxPq", b"IxPo"):
            return self._codes(device)
        raise UnsupportedCase(f"{self.path} has an index {name!r}: flat, IVF, PQ and their refinements are read")

    def _named(self, name: bytes, device: Any, depth: int) -> Index:
        if name[1:2] == b"B":
            self.fields("iiq?i")
        else:
            self.header()
        index = self.index(device, depth + 1)
        ids = self.array(np.int64)
        state = index._state
        if len(ids) != len(state.ids) or len(np.unique(ids)) != len(ids) or (len(ids) and ids.min() < 0):
            raise self.wrong(f"{len(ids)} ids of {len(state.ids)} vectors, which must be unique and not negative")
        inner = state.ids.cpu()
        if len(inner) and int(inner.max()) >= len(ids):
            raise self.wrong(f"an id for vector {int(inner.max())}, of {len(ids)}")
        return _filled(index, torch.from_numpy(ids)[inner], state.vectors, state.codes, state)

    def _bits(self, device: Any) -> Index:
        d, size, count, _, _ = self.fields("iiq?i")
        x = self.array(np.uint8)
        if d < 8 or d != 8 * size or len(x) != count * size:
            raise self.wrong(f"{count} vectors of {d} bits in {len(x)} bytes")
        return _filled(
            Index(d, "hamming", device=device), torch.arange(count, device="cpu"), torch.from_numpy(x).view(count, size)
        )

    def _refined(self, device: Any, depth: int) -> Index:
        d, count, _ = self.header()
        base = self.index(device, depth + 1)
        exact = self.index(device, depth + 1)
        factor = self.fields("f")[0] if self.left >= 4 else 1.0
        if not abs(factor) < 1 << 62:
            raise self.wrong(f"{factor} candidates an answer")
        x, state = exact._state.vectors, base._state
        if x is None or exact.kind != "flat" or exact.dim != base.dim or d != base.dim or count != len(x):
            raise self.wrong("its vectors do not belong to its codes")
        if len(state.ids) and not bool(
            (state.ids.sort().values == torch.arange(len(x), device=state.ids.device)).all()
        ):
            raise self.wrong("its codes are not those of its vectors")
        base.rerank = min(max(int(factor), 1), 1 << 16)
        return _filled(base, state.ids, x[state.ids], state.codes, state)

    def _quantizer(self, d: int) -> ProductQuantizer:
        width, parts, bits = self.fields("QQQ")
        if width != d or not 1 <= parts <= d or d % parts:
            raise self.wrong(f"{parts} parts of {width} elements, of {d}")
        if bits not in (4, 8):
            raise UnsupportedCase(f"{self.path} has codes of {bits} bits: 4 and 8 are read")
        return ProductQuantizer(self.floats(parts << bits, d // parts).view(parts, 1 << bits, d // parts), bits)

    def _codes(self, device: Any) -> Index:
        d, count, metric = self.header()
        quantizer = self._quantizer(d)
        codes = self.array(np.uint8)
        self.fields("i?i")
        if len(codes) != count * quantizer.code_bytes:
            raise self.wrong(f"{len(codes)} bytes of {count} codes")
        lists = Lists(torch.zeros(1, d, dtype=torch.float32, device="cpu"), quantizer, False, quantizer.tables())
        return _of_lists(lists, metric, [count], torch.arange(count, device="cpu"), torch.from_numpy(codes), device)

    def _lists(self, name: bytes, device: Any) -> Index:
        d, count, metric = self.header()
        number, _ = self.fields("QQ")
        coarse = self.index("cpu", _DEPTH)
        centroids = coarse._state.vectors
        if centroids is None or coarse.kind != "flat" or coarse.dim != d or len(centroids) != number or not number:
            raise self.wrong(f"{number} lists have {len(coarse)} centroids")
        if self.fields("B")[0]:
            if self.array(np.int64).size < 0 or self._skipped_table():
                raise self.wrong("its direct map")
        else:
            self.array(np.int64)
        quantizer, residual, size = None, True, 4 * d
        if name != b"IwFl":
            residual, size = self.fields("?Q")
            if name == b"IwPf":
                self.fields("iQiQ")
            quantizer = self._quantizer(d)
            if size != quantizer.code_bytes:
                raise self.wrong(f"codes of {size} bytes, of {quantizer.code_bytes}")
        sizes, ids, codes = self._inverted(number, size)
        if len(ids) != count:
            raise self.wrong(f"{len(ids)} vectors in lists, of {count}")
        if len(np.unique(ids)) != len(ids) or (len(ids) and ids.min() < 0):
            raise self.wrong("its ids are not unique, or negative")
        tables = None if quantizer is None else quantizer.tables()
        lists = Lists(centroids, quantizer, residual, tables)
        if quantizer is None:
            codes = codes.view(np.float32)
            self.finite(torch.from_numpy(codes).view(-1, d))
        return _of_lists(lists, metric, sizes, torch.from_numpy(ids), torch.from_numpy(codes), device)

    def _skipped_table(self) -> bool:
        self.array(np.int64, 2 * self.fields("Q")[0])
        return False

    def _inverted(self, number: int, size: int) -> tuple[list[int], NDArray[Any], NDArray[Any]]:
        """Return the sizes of the lists, and their ids and codes one after another."""
        name = self.take(4)
        if name not in (b"ilar", b"ilbl"):
            raise UnsupportedCase(f"{self.path} has lists {name!r}: those in one file are read")
        lists, code_size = self.fields("QQ")
        if lists != number or (name == b"ilar" and code_size != size):
            raise self.wrong(f"{lists} lists of codes of {code_size} bytes, of {number} and {size}")
        ids, codes = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
        if name == b"ilbl":
            rows, block = self.fields("QQ")
            if rows != 32 or block != 32 * size:
                raise UnsupportedCase(f"{self.path} has blocks of {rows} codes in {block} bytes: 32 are read")
            for _ in range(number):
                ids.append(self.array(np.int64))
                packed = self.array(np.uint8)
                if len(packed) != -(-len(ids[-1]) // 32) * block:
                    raise self.wrong(f"{len(packed)} bytes of {len(ids[-1])} codes in blocks")
                codes.append(_unpacked(packed, size)[: len(ids[-1])].reshape(-1))
        else:
            for count in self._sizes(number):
                codes.append(self.array(np.uint8, count * size))
                ids.append(self.array(np.int64, count))
        return [len(each) for each in ids[1:]], np.concatenate(ids), np.concatenate(codes)

    def _sizes(self, number: int) -> list[int]:
        kind, given = self.take(4), self.array(np.uint64).tolist()
        if kind == b"full" and len(given) == number:
            return [int(each) for each in given]
        if kind != b"sprs" or len(given) % 2 or any(at >= number for at in given[::2]):
            raise self.wrong("the sizes of its lists")
        sizes = [0] * number
        for at, size in zip(given[::2], given[1::2], strict=True):
            sizes[at] = size
        return sizes


def _unpacked(packed: NDArray[Any], size: int) -> NDArray[Any]:
    """Return codes (n, bytes) of two halves a byte from blocks of 32 vectors.

    For each byte of a code a block has 32: 16 for its low halves, then 16 for its high halves. Of byte i of 16 the low
    half is that of vector LANES[i], the high half that of the vector 16 further.
    """
    blocks = packed.reshape(-1, size, 2, 16)
    codes = np.empty((len(blocks), 32, size), np.uint8)
    for first, half in ((0, blocks & 15), (16, blocks >> 4)):
        both = half[:, :, 0] | half[:, :, 1] << 4
        codes[:, first + np.array(LANES)] = both.transpose(0, 2, 1)
    return codes.reshape(-1, size)


def _filled(
    index: Index, ids: Tensor, x: Tensor | None, codes: Tensor | None = None, like: State | None = None
) -> Index:
    """Return the index with these contents, and the lists of a state."""
    x = None if x is None else x.to(index.device)
    norms = None if x is None or x.dtype == torch.uint8 else torch.linalg.vector_norm(x, dim=1)
    starts, lists = ((), None) if like is None else (like.starts, like.lists)
    index._state = State(ids.to(index.device), x, norms, codes, starts, lists)
    return index


def _of_lists(lists: Lists, metric: str, sizes: list[int], ids: Tensor, codes: Tensor, device: Any) -> Index:
    """Return an index with lists of these sizes, whose codes are vectors where there is no quantizer."""
    quantizer, d = lists.quantizer, lists.centroids.shape[1]
    kind = "ivf" if quantizer is None else "ivfpq"
    parts, bits = (None, 8) if quantizer is None else (len(quantizer.centroids), quantizer.bits)
    index = Index(d, metric, kind, lists=len(sizes), parts=parts, bits=bits, rerank=0, device=device)
    starts = (0, *np.cumsum(sizes, dtype=np.int64).tolist())
    on = index.device
    moved = Lists(lists.centroids.to(on), None, lists.residual)
    if quantizer is not None:
        assert lists.tables is not None
        there = ProductQuantizer(quantizer.centroids.to(on), quantizer.bits)
        moved = Lists(lists.centroids.to(on), there, lists.residual, lists.tables.to(on))
        like = State(ids, None, None, None, starts, moved)
        return _filled(index, ids, None, codes.view(len(ids), quantizer.code_bytes).to(on), like)
    return _filled(index, ids, codes.view(-1, d), None, State(ids, None, starts=starts, lists=moved))


def faiss_write(index: Index, path: str | Path) -> None:
    """Write an index as a file that faiss.read_index reads (read_index_binary for bits).

    The vectors of metric "cosine" are normalized, and their metric in FAISS is the inner product. The old file stays
    until the new one is whole.

    Raises:
        OSError: the file cannot be written; the old one is as it was.
    """
    state = index._sorted(index._state, fully=True)
    with AtomicFile(Path(path)) as file:
        _Writer(file).index(index, state)
        if index.metric == "cosine":
            file.write(_COSINE)


class _Writer:
    """The records of a new file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def fields(self, kinds: str, *values: Any) -> None:
        """Write fields by the letters of `struct`."""
        self.file.write(struct.pack("<" + kinds, *values))

    def array(self, x: Tensor, *, each: int | None = None) -> None:
        """Write the elements of a tensor; their number first, in units of so many bytes, the element's by default."""
        data = np.ascontiguousarray(x.cpu().numpy())
        self.fields("Q", data.nbytes // (each or data.itemsize))
        self.raw(data)

    def raw(self, data: NDArray[Any]) -> None:
        """Write the elements alone."""
        self.file.write(data.tobytes())

    def header(self, name: bytes, d: int, count: int, metric: str) -> None:
        """Write the fields that every index begins with."""
        self.file.write(name)
        self.fields("iqqq?i", d, count, 1 << 20, 1 << 20, True, _L2 if metric == "l2" else _INNER)

    def flat(self, x: Tensor, metric: str) -> None:
        """Write a flat index."""
        self.header(b"IxF2" if metric == "l2" else b"IxFI", x.shape[1], len(x), metric)
        self.array(x)

    def index(self, index: Index, state: State) -> None:
        """Write the records of an index."""
        metric, x, ids = index.metric, state.vectors, state.ids
        count, codes, lists = len(ids), state.codes, state.lists
        if lists is not None and not state.starts:
            raise UnsupportedCase("an index without vectors is saved once vectors were added")
        plain = bool((ids == torch.arange(count, device=ids.device)).all())
        if lists is None:
            assert x is not None
            if not plain:
                if metric == "hamming":
                    self._bits_header(b"IBMp", x)
                else:
                    self.header(b"IxMp", index.dim, count, metric)
            if metric == "hamming":
                self._bits_header(b"IBxF", x)
                self.array(x)
            else:
                self.flat(x, metric)
            if not plain:
                self.array(ids)
        elif codes is not None and x is not None:  # FAISS counts refined vectors from 0
            order = ids.argsort()
            ranks = torch.empty_like(order)
            ranks[order] = torch.arange(count, device=order.device)
            named = not bool((ids[order] == torch.arange(count, device=ids.device)).all())
            if named:
                self.header(b"IxMp", index.dim, count, metric)
            self.header(b"IxRF", index.dim, count, metric)
            self._lists(index, state, ranks)
            self.flat(x[order], metric)
            self.fields("f", float(index.rerank))
            if named:
                self.array(ids[order])
        else:
            self._lists(index, state, ids)

    def _bits_header(self, name: bytes, x: Tensor) -> None:
        self.file.write(name)
        self.fields("iiq?i", 8 * x.shape[1], x.shape[1], len(x), True, _L2)

    def _lists(self, index: Index, state: State, ids: Tensor) -> None:
        lists = state.lists
        assert lists is not None
        codes = state.codes if state.codes is not None else state.vectors
        assert codes is not None
        number = len(state.starts) - 1
        self.header(b"IwFl" if lists.quantizer is None else b"IwPQ", index.dim, len(ids), index.metric)
        self.fields("QQ", number, max(number // 8, 1))
        self.flat(lists.centroids, index.metric)
        self.fields("BQ", 0, 0)
        if lists.quantizer is not None:
            self.fields("?Q", lists.residual, lists.quantizer.code_bytes)
            parts = len(lists.quantizer.centroids)
            self.fields("QQQ", index.dim, parts, lists.quantizer.bits)
            self.array(lists.quantizer.centroids)
        raw = np.ascontiguousarray(codes.cpu().numpy())
        names = np.ascontiguousarray(ids.cpu().numpy())
        self.file.write(b"ilar")
        self.fields("QQ", number, raw[:1].nbytes if len(raw) else raw.shape[1] * raw.itemsize)
        self.file.write(b"full")
        self.array(torch.bincount(list_numbers(state.starts, torch.device("cpu")), minlength=number))
        for at in range(number):
            rows = state.rows_of(at)
            self.raw(raw[rows.start : rows.stop])
            self.raw(names[rows.start : rows.stop])
