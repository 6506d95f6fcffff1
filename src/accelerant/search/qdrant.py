"""The two ways to a Qdrant collection: Qdrant Edge, which runs in this process on a folder, and a server's client."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.errors import AccelerantError, ConfigError, FormatError, MissingDependency
from accelerant.runtime.files import clipped, decode_json, read_regular
from accelerant.runtime.memory.limits import size_text

PointId = int | str
Vectors = npt.NDArray[np.float32]

_READ = 4096  # points of one request
_RESERVE_BYTES = 64 << 20  # of a disk, for what Qdrant allocates at once
_DISTANCES = {"cosine": "Cosine", "ip": "Dot", "l2": "Euclid"}
METRICS = {name: metric for metric, name in _DISTANCES.items()}


class StoreError(AccelerantError):
    """Qdrant did not do what it was asked to."""


class Store:
    """A collection as Qdrant holds it: what a folder and a server share."""

    dim: int
    metric: str
    _page: Callable[..., Any]
    retrieve: Callable[[Sequence[PointId]], list[Any]]
    filter: Callable[[Mapping[str, Any]], Any]

    def scroll(self, *, vectors: bool = False, payload: Any = False, filter: Any = None) -> Iterator[list[Any]]:
        """Yield the records of points in the order of their ids."""
        offset = None
        while True:
            records, offset = self._page(offset, filter, payload, vectors)
            yield records
            if offset is None:
                return

    def read(self) -> Iterator[tuple[list[PointId], Vectors]]:
        """Yield all points."""
        for records in self.scroll(vectors=True):
            rows = np.array([each.vector for each in records], np.float32)
            yield [_plain_id(each.id) for each in records], rows.reshape(len(records), self.dim)

    def parts(self, name: str) -> dict[PointId, Mapping[str, Any]]:
        """Return the parts of all payloads under a name."""
        return {_plain_id(each.id): each.payload or {} for some in self.scroll(payload=[f'"{name}"']) for each in some}

    def payloads(self, ids: Sequence[PointId]) -> dict[PointId, Mapping[str, Any]]:
        """Return the payloads of points."""
        return {_plain_id(each.id): each.payload or {} for each in self.retrieve(ids)}

    def select(self, condition: Mapping[str, Any]) -> list[PointId]:
        """Return the ids of the points that Qdrant selects."""
        return [_plain_id(each.id) for some in self.scroll(filter=self.filter(condition)) for each in some]


def point_id(value: object) -> PointId:
    """Return an id as it is mirrored: an integer, or a UUID in lower case; ConfigError for others."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 <= value < 2**64:
        return int(value)
    try:
        if isinstance(value, (str, uuid.UUID)):
            return str(uuid.UUID(str(value)))
    except ValueError:
        pass
    raise ConfigError(f"a point's id is an integer from 0 to 2^64 - 1 or a UUID, got {clipped(value)}")


def require_same(wanted: tuple[int | None, str | None], found: tuple[int, str], where: object) -> None:
    """Raise ConfigError where a collection is of another dimension or metric than asked for."""
    for name, asked, has in zip(("dimension", "metric"), wanted, found, strict=True):
        if asked is not None and asked != has:
            raise ConfigError(f"the collection {where} has the {name} {has}, not {asked}")


def distance_of(metric: str) -> str:
    """Return Qdrant's name of a metric."""
    if metric not in _DISTANCES:
        raise ConfigError(f"a collection's metric is {', '.join(_DISTANCES)}, got {clipped(metric)}")
    return _DISTANCES[metric]


def _metric_of(distance: object, where: object) -> str:
    name = str(getattr(distance, "value", distance))
    if name not in METRICS:
        raise FormatError(f"{where} has the distance {clipped(name)}: supported are {', '.join(METRICS)}")
    return METRICS[name]


# --- in process ------------------------------------------------------------------------------------------------------


class EdgeStore(Store):
    """A collection in a folder, by Qdrant Edge; one process has it open at a time."""

    def __init__(self, folder: Path, dim: int | None, metric: str | None) -> None:
        try:
            import qdrant_edge
        except ImportError:
            raise MissingDependency("qdrant-edge-py", "search", "a collection in a folder") from None
        self._folder = folder
        self._edge: Any = qdrant_edge
        described = folder / "edge_config.json"
        if described.is_file():
            self.dim, self.metric = self._described(described)
            require_same((dim, metric), (self.dim, self.metric), folder)
            self._shard = self._opened(lambda: qdrant_edge.EdgeShard.load(str(folder)))
            return
        if folder.exists() and any(folder.iterdir()):
            raise FormatError(f"{folder} is no collection: it has no edge_config.json, but other files")
        if dim is None:
            raise ConfigError(f"there is no collection {folder}: give dim to make one")
        if not isinstance(dim, int) or not 0 < dim <= 65536:
            raise ConfigError(f"dim must be 1 to 65,536, got {clipped(dim)}")
        self.dim, self.metric = dim, metric or "cosine"
        distance = getattr(qdrant_edge.Distance, distance_of(self.metric))
        config = qdrant_edge.EdgeConfig(vectors=qdrant_edge.EdgeVectorParams(size=dim, distance=distance))
        folder = folder.resolve()  # of a link, the folder that it is to name
        new = folder.with_name(f".{folder.name}.new")  # of a process that was killed meanwhile, it is no collection yet
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        self._opened(lambda: qdrant_edge.EdgeShard.create(str(new), config)).close()
        new.replace(folder)
        self._shard = self._opened(lambda: qdrant_edge.EdgeShard.load(str(folder)))

    @staticmethod
    def _described(path: Path) -> tuple[int, str]:
        try:
            vectors = decode_json(read_regular(path))["vectors"]
            [(name, only)] = vectors.items()
            dim = int(only["size"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FormatError(f"{path} does not describe a collection of one vector a point") from None
        if name or "multivector_config" in only:
            raise FormatError(f"{path}: the collection must have one unnamed vector a point, it has {clipped(name)}")
        return dim, _metric_of(only["distance"], path)

    def _opened(self, call: Any) -> Any:
        try:
            return call()
        except BaseException as error:  # the library raises bare Exception, and panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            if "WouldBlock" in str(error):
                advice = "one process has a folder open at a time: close it there, or run a Qdrant server"
                raise ConfigError(f"the collection {self._folder} is open in another process; {advice}") from None
            raise FormatError(f"cannot open the collection {self._folder}: {str(error)[:300]}") from None

    def _asked(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._shard, method)(*args)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise StoreError(f"Qdrant Edge did not {method} {self._folder}: {str(error)[:300]}") from None

    def stamp(self) -> object:
        """Return the versions of the segments, which each write raises."""
        return sorted((name, each["segment_version"]) for name, each in self._asked("snapshot_manifest").items())

    def upsert(self, ids: Sequence[PointId], vectors: Vectors, payloads: Sequence[Mapping[str, Any]]) -> None:
        """Write points to the log and the segments."""
        free, wanted = shutil.disk_usage(self._folder).free, 4 * (vectors.nbytes + len(json.dumps(payloads)))
        if free < _RESERVE_BYTES + wanted:  # Qdrant's maps of files would end the process, and every later one
            least = size_text(_RESERVE_BYTES + wanted)
            raise StoreError(
                f"the disk of {self._folder} is almost full: {size_text(free)} free, a write needs {least}"
            )
        rows = zip(ids, vectors.tolist(), payloads, strict=True)
        points = [self._edge.Point(i, vector, payload) for i, vector, payload in rows]
        self._asked("update", self._edge.UpdateOperation.upsert_points(points))

    def delete(self, ids: Sequence[PointId]) -> None:
        """Delete points."""
        self._asked("update", self._edge.UpdateOperation.delete_points(list(ids)))

    def _page(self, offset: Any, filter: Any, payload: Any, vectors: bool) -> Any:
        request = self._edge.ScrollRequest(
            offset=offset, limit=_READ, filter=filter, with_payload=payload, with_vector=vectors
        )
        return self._asked("scroll", request)

    def retrieve(self, ids: Sequence[PointId]) -> list[Any]:
        """Return the records of points, with their payloads."""
        return list(self._asked("retrieve", list(ids), True, False))

    def filter(self, condition: Mapping[str, Any]) -> Any:
        """Return a filter as Qdrant Edge's objects; ConfigError if it has none for the condition."""
        try:
            return edge_filter({"must": [condition]}, self._edge)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"Qdrant Edge does not take the condition {clipped(condition)}: {error}") from None

    def close(self) -> None:
        """Write what is pending and release the folder."""
        self._shard.close()


def _plain_id(value: Any) -> PointId:
    return value if isinstance(value, int) else str(value)


def edge_filter(given: Mapping[str, Any], edge: Any) -> Any:
    """Return a filter of Qdrant's interface as Qdrant Edge's objects."""

    def condition(one: Mapping[str, Any]) -> Any:
        if "key" in one:
            return field(one)
        if "has_id" in one:
            return edge.HasIdCondition(set(one["has_id"]))
        if "nested" in one:
            return edge.NestedCondition(one["nested"]["key"], edge_filter(one["nested"]["filter"], edge))
        for name, kind in (("is_empty", edge.IsEmptyCondition), ("is_null", edge.IsNullCondition)):
            if name in one:
                return kind(one[name]["key"])
        if "has_vector" in one:
            return edge.HasVectorCondition(one["has_vector"])
        return edge_filter(one, edge)

    def field(one: Mapping[str, Any]) -> Any:
        made = dict(one)
        if match := one.get("match"):
            [(name, value)] = match.items()
            kind = getattr(edge, "Match" + "".join(part.title() for part in name.split("_")))
            made["match"] = kind(np.bool_(value) if isinstance(value, bool) else value)  # Python's is taken for 1
        if bounds := one.get("range"):
            timed = any(isinstance(x, str) for x in bounds.values())
            kind = edge.RangeDateTime if timed else edge.RangeFloat
            made["range"] = kind(**{each: bounds.get(each) for each in ("gt", "gte", "lt", "lte")})
        if count := one.get("values_count"):
            made["values_count"] = edge.ValuesCount(**count)
        for name, points in (
            ("geo_bounding_box", ("top_left", "bottom_right")), ("geo_radius", ("center",)), ("geo_polygon", ()),
        ):  # fmt: skip
            if shape := one.get(name):
                kind = getattr(edge, "".join(part.title() for part in name.split("_")))
                made[name] = kind(**{each: point(x) if each in points else ring(x) for each, x in shape.items()})
        return edge.FieldCondition(**made)

    def point(x: Mapping[str, float]) -> Any:
        return edge.GeoPoint(lon=x["lon"], lat=x["lat"])

    def ring(x: Any) -> Any:
        if isinstance(x, Mapping):
            return [point(each) for each in x["points"]]
        return [ring(each) for each in x] if isinstance(x, list) else x

    def conditions(name: str) -> Any:
        ones = given.get(name)
        return None if ones is None else [condition(one) for one in ([ones] if isinstance(ones, Mapping) else ones)]

    least = given.get("min_should")
    made = least and edge.MinShould([condition(one) for one in least["conditions"]], least["min_count"])
    return edge.Filter(
        must=conditions("must"), should=conditions("should"), must_not=conditions("must_not"), min_should=made
    )


# --- a server --------------------------------------------------------------------------------------------------------


class ClientStore(Store):
    """A collection of a server, by qdrant-client. Nothing that it reports changes with every write of others."""

    def __init__(self, client: Any, name: str, dim: int | None, metric: str | None) -> None:
        try:
            from qdrant_client import QdrantClient, models
        except ImportError:
            raise MissingDependency("qdrant-client", "search", "a collection of a server") from None
        self._owns = isinstance(client, str)
        self._client: Any = QdrantClient(url=client, timeout=60) if isinstance(client, str) else client
        self._name, self._models = name, models
        if not self._asked("collection_exists", name):
            if dim is None:
                raise ConfigError(f"there is no collection {clipped(name)}: give dim to make one")
            distance = models.Distance(distance_of(metric or "cosine"))
            params = models.VectorParams(size=dim, distance=distance)
            self._asked("create_collection", name, vectors_config=params)
        params = self._asked("get_collection", name).config.params.vectors
        if not isinstance(params, models.VectorParams) or params.multivector_config is not None:
            raise FormatError(f"the collection {clipped(name)} must have one unnamed vector a point")
        self.dim, self.metric = params.size, _metric_of(params.distance, f"the collection {clipped(name)}")
        require_same((dim, metric), (self.dim, self.metric), clipped(name))

    def _asked(self, method: str, *args: Any, **options: Any) -> Any:
        try:
            return getattr(self._client, method)(*args, **options)
        except Exception as error:
            raise StoreError(f"Qdrant did not answer {method}: {type(error).__name__}: {str(error)[:300]}") from error

    def stamp(self) -> object:
        """Return None: counts of points and segments stay as they are when a point is replaced."""

    def upsert(self, ids: Sequence[PointId], vectors: Vectors, payloads: Sequence[Mapping[str, Any]]) -> None:
        """Write points, and wait until they are applied."""
        batch = self._models.Batch(ids=list(ids), vectors=vectors.tolist(), payloads=list(payloads))
        self._asked("upsert", self._name, points=batch, wait=True)

    def delete(self, ids: Sequence[PointId]) -> None:
        """Delete points, and wait until they are."""
        self._asked("delete", self._name, points_selector=self._models.PointIdsList(points=list(ids)), wait=True)

    def _page(self, offset: Any, filter: Any, payload: Any, vectors: bool) -> Any:
        options = {"scroll_filter": filter, "with_payload": payload, "with_vectors": vectors}
        return self._asked("scroll", self._name, limit=_READ, offset=offset, **options)

    def retrieve(self, ids: Sequence[PointId]) -> list[Any]:
        """Return the records of points, with their payloads."""
        return list(self._asked("retrieve", self._name, ids=list(ids), with_payload=True))

    def filter(self, condition: Mapping[str, Any]) -> Any:
        """Return a filter as the client's model; ConfigError if it has none for the condition."""
        try:
            return self._models.Filter.model_validate({"must": [condition]})
        except ValueError as error:
            raise ConfigError(f"Qdrant does not take the condition {clipped(condition)}: {error}") from None

    def close(self) -> None:
        """Close the connection, if this made it."""
        if self._owns:
            self._client.close()
