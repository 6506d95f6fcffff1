"""`accelerant search`: collections of vectors in a folder, from files of NumPy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.cli.help import Group, JsonOutput, option
from accelerant.errors import ConfigError, FormatError, MissingFile, RangeError, ShapeError
from accelerant.runtime.files import decode_json, escaped, open_regular

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_Index = Annotated[str, typer.Option("--index", metavar="FOLDER", help="Folder of the collection.")]
_Device = Annotated[str | None, typer.Option(help="auto, cuda or cpu. Default: auto.")]
Kind = Annotated[
    str | None,
    typer.Option(help="flat (exact), or ivf or ivfpq for searches without a filter. Default: as saved, or flat."),
]
_EXAMPLES = """\
index vectors.npy --index papers
accelerant search index more.npy --index papers --payload more.jsonl --kind ivf"""
_QUERY_EXAMPLES = """\
query queries.npy --index papers
accelerant search query queries.npy --index papers --filter '{"must": [{"key": "year", "range": {"gte": 2020}}]}'"""


def index(
    vectors: Annotated[str, typer.Argument(metavar="VECTORS.npy", help="Vectors, one a row.")],
    index: _Index,
    payload: str | None = option("A JSON object for each vector, one a line.", metavar="FILE.jsonl"),
    metric: str | None = option("cosine, ip or l2, of a new collection. Default: cosine."),
    kind: Kind = None,
    json_output: JsonOutput = False,
) -> None:
    """Add vectors to a collection, which is made if there is none. Their ids are numbers that go on."""
    from accelerant.search import Collection

    rows = _array(vectors)
    payloads = None if payload is None else _objects(payload)
    folder = Path(index).expanduser()
    options = {"dim": rows.shape[1], "metric": metric, "kind": kind}
    with _bad_input(), Collection(folder.parent, folder.name, **options) as collection:
        first = 1 + max((i for i in collection.select().tolist() if isinstance(i, int)), default=-1)
        collection.upsert(range(first, first + len(rows)), rows, payloads)
        points = len(collection)
    if json_output:
        print(json.dumps({"index": index, "added": len(rows), "first_id": first, "points": points}))
        return
    print(f"{escaped(index)}: {len(rows):,} vectors added, {points:,} in all; the first id is {first:,}")


def query(
    queries: Annotated[str, typer.Argument(metavar="QUERIES.npy", help="Queries, one a row.")],
    index: _Index,
    results: int = option("Number of answers to each query.", min=1, default=10),
    filter: str | None = option("A filter of Qdrant's filter language.", metavar="JSON"),
    nprobe: int | None = option("Inverted lists to read. Default: an eighth of them.", min=1),
    device: _Device = None,
    json_output: JsonOutput = False,
) -> None:
    """Print the nearest vectors to each query, exactly under a filter."""
    from accelerant.cli.train import choose_device
    from accelerant.search import Collection

    try:
        condition = None if filter is None else decode_json(filter)
    except ValueError as error:
        raise ConfigError(f"--filter must be JSON: {error}") from None
    folder, place = Path(index).expanduser(), choose_device(device, "--device")
    if not folder.is_dir():
        raise MissingFile(f"no collection {index}: make one with accelerant search index VECTORS.npy --index {index}")
    with _bad_input(), Collection(folder.parent, folder.name, device=place) as collection:
        found = collection.search(_array(queries), results, filter=condition, nprobe=nprobe)
    if json_output:
        told = {"ids": found.ids, "scores": found.scores, "selected": found.selected, "exact": found.exact}
        print(json.dumps(told))
        return
    for number, (ids, scores) in enumerate(zip(found.ids, found.scores, strict=True)):
        listed = "  ".join(f"{i} ({score:.4f})" for i, score in zip(ids, scores, strict=True))
        print(f"{number}: {listed or 'no vector passes the filter'}")


@contextmanager
def _bad_input() -> Iterator[None]:
    """Report what is wrong with the vectors of a file as bad input."""
    try:
        yield
    except (ShapeError, RangeError) as error:
        raise ConfigError(str(error)) from None


def _array(path: str) -> npt.NDArray[np.generic]:
    import numpy as np

    file = Path(path).expanduser()
    os.close(open_regular(file))  # a pipe or a device would not end
    try:
        found = np.lib.format.open_memmap(file, mode="r")
    except ValueError as error:
        raise FormatError(f"{path} is no .npy file of NumPy's: {error}") from None
    if found.ndim != 2 or found.dtype.kind not in "fiu":
        raise FormatError(f"{path} must be an array (n, d) of numbers, got {found.dtype} of shape {found.shape}")
    return found


def _objects(path: str) -> list[Any]:
    with open(open_regular(Path(path).expanduser()), encoding="utf-8") as file:
        try:
            return [decode_json(line) for line in file if line.strip()]
        except ValueError as error:
            raise FormatError(f"{path} must have a JSON object in each line: {error}") from None


search = Group(
    "Search vectors exactly, under filters: collections in a folder.", {index: _EXAMPLES, query: _QUERY_EXAMPLES}
)
