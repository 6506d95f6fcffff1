"""Qdrant's filter language, evaluated to one boolean a point over columns of payload values.

A filter is the JSON object of Qdrant's interface. Evaluated here: must, should, must_not, min_should, has_id, is_empty,
is_null, nested, and of a field match (value, any, except), range (numbers and times) and values_count. Text, geography
and what is newer is left to Qdrant, condition by condition, so that its indexes and tokenizers decide.

Payloads without an index are the rule that is followed. Where Qdrant's client compares true with 1, here it does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.errors import ConfigError
from accelerant.runtime.files import clipped

Mask = npt.NDArray[np.bool_]
Payload = Mapping[str, Any]

_SEGMENT = re.compile(r'(?:^|\.)(?:([\w-]+)|"([^"]*)")|\[(\d*)\]')
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)(?:[T ]\d\d:\d\d:\d\d(?:\.\d{1,6})?(?:Z|[+-]\d\d:\d\d)?)?")
_PERHAPS_TIME = re.compile(r"\s*[+-]?\d+\s*[-/]|\w{3}, ")
_BOUNDS: dict[str, Callable[[Any, Any], Any]] = {
    "gt": np.greater, "gte": np.greater_equal, "lt": np.less, "lte": np.less_equal,
}  # fmt: skip
_LARGEST = int(np.finfo(np.float64).max)
_DEPTH = 64
_NULL, _BOOL, _INTEGER, _FLOAT, _TEXT, _OTHER = range(6)
_OF_QDRANT = (
    "geo_bounding_box", "geo_radius", "geo_polygon", "text", "text_any", "phrase", "prefix", "substring",
)  # fmt: skip


class LeftToQdrant(Exception):  # noqa: N818  it is no error: the caller asks Qdrant
    """A condition that only Qdrant can answer as it would."""


def parse_path(key: object) -> tuple[str | int | None, ...]:
    """Return the steps of a JSON path: names, indices, None for each element; ConfigError for other texts."""
    steps: list[str | int | None] = []
    position = 0
    while isinstance(key, str) and (found := _SEGMENT.match(key, position)):
        name, quoted, index = found.groups()
        steps.append(name if name is not None else quoted if quoted is not None else int(index) if index else None)
        position = found.end()
    if not steps or not isinstance(steps[0], str) or position != len(str(key)):
        raise ConfigError(f"a filter's key is a path such as a.b[].c, got {clipped(key)}")
    return tuple(steps)


def values_at(value: Any, path: Sequence[str | int | None]) -> list[Any]:
    """Return the values at a path in JSON; an array is descended into where the path says so alone."""
    if not path:
        return [value]
    step, rest = path[0], path[1:]
    if isinstance(step, str):
        return values_at(value[step], rest) if isinstance(value, Mapping) and step in value else []
    if not isinstance(value, list):
        return []
    chosen = value if step is None else value[step : step + 1]
    return [found for each in chosen for found in values_at(each, rest)]


class Growing:
    """An array that is appended to; what a reader has taken of it stays as it is."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._data, self.size = np.empty(0, dtype), 0

    def append(self, values: Sequence[Any] | npt.NDArray[Any]) -> None:
        """Append values."""
        size = self.size + len(values)
        if size > len(self._data):
            grown = np.empty(max(size, 2 * len(self._data)), self._data.dtype)
            grown[: self.size] = self._data[: self.size]
            self._data = grown
        self._data[self.size : size] = values
        self.size = size

    @property
    def array(self) -> npt.NDArray[Any]:
        """The values, without a copy."""
        return self._data[: self.size]


class Column:
    """The values of a path, in rows that are appended to: an element of an array is a value of its own."""

    def __init__(self, key: str) -> None:
        self.path, self.size = parse_path(key), 0
        self.codes: dict[str, int] = {}
        self._times: list[float] = []
        self.row, self.kind = Growing(np.int32), Growing(np.uint8)
        self.number, self.integer, self.code = Growing(np.float64), Growing(np.int64), Growing(np.int32)
        self.count_row, self.count = Growing(np.int32), Growing(np.int64)
        self.null = Growing(np.bool_)
        """Whether a value is or has null, in rows `count_row`, which has every row, as `count` does."""
        self.object_row = Growing(np.int32)
        self.objects = Table()

    def extend(self, payloads: Sequence[Payload]) -> None:
        """Append the rows of payloads."""
        rows, elements, count_rows, counts, objects, object_rows = [], [], [], [], [], []
        null: list[bool] = []
        for row, payload in enumerate(payloads, self.size):
            values = values_at(payload, self.path)
            lists = [value if isinstance(value, list) else None for value in values]
            flat = [x for value, many in zip(values, lists, strict=True) for x in ([value] if many is None else many)]
            elements += flat
            rows += [row] * len(flat)
            sizes = [len(m) if m is not None else int(v is not None) for v, m in zip(values, lists, strict=True)]
            counts += sizes or [0]
            count_rows += [row] * max(1, len(sizes))
            null += [None in ([v] if m is None else m) for v, m in zip(values, lists, strict=True)] or [False]
            inner = values_at(payload, (*self.path, None)) if self.path[-1] is not None else values
            objects += (found := [x for x in inner if isinstance(x, Mapping)])
            object_rows += [row] * len(found)
        typed = [(x, _kind(x)) for x in elements]
        for growing, found_values in (
            (self.row, rows), (self.kind, [kind for _, kind in typed]), (self.count_row, count_rows),
            (self.count, counts), (self.null, null), (self.object_row, object_rows),
            (self.number, [float(x) if _BOOL <= kind <= _FLOAT else np.nan for x, kind in typed]),
            (self.integer, [x if kind == _INTEGER else 0 for x, kind in typed]),
            (self.code, [self._code(x) if kind == _TEXT else -1 for x, kind in typed]),
        ):  # fmt: skip
            growing.append(found_values)
        self.objects.extend(objects)
        self.size += len(payloads)

    def _code(self, text: str) -> int:
        return self.codes.setdefault(text, len(self.codes))

    def any(self, chosen: npt.NDArray[Any], rows: Growing | None = None) -> Mask:
        """Return the rows of which a chosen value is."""
        mask = np.zeros(self.size, np.bool_)
        mask[(rows or self.row).array[: len(chosen)][chosen]] = True
        return mask

    def match(self, values: Sequence[Any]) -> Mask:
        """Return which values are among some: texts, integers or booleans, each of its own kind."""
        kind, found = self.kind.array, np.zeros(self.kind.size, np.bool_)
        if codes := [self.codes[x] for x in values if isinstance(x, str) and x in self.codes]:
            found |= _among(self.code.array, codes)
        if flags := [float(x) for x in values if isinstance(x, bool)]:
            found |= (kind == _BOOL) & _among(self.number.array, flags)
        if whole := [x for x in values if isinstance(x, int) and not isinstance(x, bool)]:
            small = [x for x in whole if -(2**63) <= x < 2**63]
            found |= (kind == _INTEGER) & _among(self.integer.array, small)
        return found

    def numbers(self) -> npt.NDArray[np.float64]:
        """Return the numbers, NaN for other values."""
        numbers: npt.NDArray[np.float64] = np.where(self.kind.array == _BOOL, np.nan, self.number.array)
        return numbers

    def times(self) -> npt.NDArray[np.float64]:
        """Return the times in microseconds of 1970, NaN for other values; LeftToQdrant if a text is perhaps one."""
        for text in list(self.codes)[len(self._times) :]:
            self._times.append(_time_us(text))
        known = np.array([*self._times, np.nan])  # the last is that of code -1
        times: npt.NDArray[np.float64] = known[self.code.array]
        return times


def _kind(x: Any) -> int:
    if x is None or isinstance(x, bool):
        return _NULL if x is None else _BOOL
    if isinstance(x, int):
        return _INTEGER if -(2**63) <= x < 2**63 else _FLOAT
    return _TEXT if isinstance(x, str) else _FLOAT if isinstance(x, float) else _OTHER


def _among(array: npt.NDArray[Any], values: Sequence[Any]) -> npt.NDArray[Any]:
    return np.asarray(array == values[0]) if len(values) == 1 else np.isin(array, np.array(values, array.dtype))


def _time_us(text: str) -> float:
    """Return microseconds since 1970 of a time that each version of Qdrant reads alike, NaN of what is none."""
    if _TIME.fullmatch(text):
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise LeftToQdrant from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        passed = moment - datetime(1970, 1, 1, tzinfo=UTC)
        return float((passed.days * 86400 + passed.seconds) * 10**6 + passed.microseconds)
    if _PERHAPS_TIME.match(text):
        raise LeftToQdrant
    return float("nan")


class Table:
    """Payloads as columns, which are read when a filter first needs them.

    Args:
        read: returns the payloads' parts under a name, in the order of rows; without it the payloads are kept.
    """

    def __init__(self, read: Callable[[str], Sequence[Payload]] | None = None) -> None:
        self._kept: list[Payload] = []
        self._read = read or (lambda name: self._kept)
        self._keeps, self.size = read is None, 0
        self._columns: dict[str, Column] = {}

    def extend(self, payloads: Sequence[Payload]) -> None:
        """Append rows."""
        for column in self._columns.values():
            column.extend(payloads)
        if self._keeps:
            self._kept += payloads
        self.size += len(payloads)

    def column(self, key: str) -> Column:
        """Return the column of a path."""
        if key not in self._columns:
            column = Column(key)
            column.extend(self._read(str(column.path[0])))
            self._columns[key] = column
        return self._columns[key]


class Evaluator:
    """Evaluates filters over a table.

    Args:
        table: columns.
        rows_of: returns the rows of points by their ids, those that exist.
        ask: returns the mask of a condition from Qdrant; None where that cannot be, as inside of nested.
    """

    def __init__(
        self, table: Table, rows_of: Callable[[Sequence[Any]], Sequence[int]] | None = None,
        ask: Callable[[Mapping[str, Any]], Mask] | None = None, depth: int = 0,
    ) -> None:  # fmt: skip
        self._table, self._rows_of, self._ask, self._depth = table, rows_of, ask, depth

    def mask(self, condition: object) -> Mask:
        """Return which rows a filter or condition selects; ConfigError for what is neither."""
        if not isinstance(condition, Mapping):
            raise ConfigError(f"a filter is an object of Qdrant's filter language, got {clipped(condition)}")
        given = {name: value for name, value in condition.items() if value is not None}
        if self._depth == _DEPTH:
            raise ConfigError(f"a filter is nested at most {_DEPTH} levels deep")
        self._depth += 1
        try:
            if "key" in given:
                return self._field(given)
            for name, evaluate in (
                ("has_id", self._has_id), ("is_empty", self._is_empty), ("is_null", self._is_null),
                ("nested", self._nested),
            ):  # fmt: skip
                if name in given:
                    _only(given, name)
                    return evaluate(given[name])
            if set(given) & {"has_vector", "slice"}:
                raise LeftToQdrant
            return self._clauses(given)
        except LeftToQdrant:
            if self._ask is None:
                raise
            return self._ask(given)
        finally:
            self._depth -= 1

    def _clauses(self, given: Mapping[str, Any]) -> Mask:
        _only(given, "must", "should", "must_not", "min_should")
        mask = np.ones(self._table.size, np.bool_)
        for one in _conditions(given.get("must")):
            mask &= self.mask(one)
        for one in _conditions(given.get("must_not")):
            mask &= ~self.mask(one)
        should = _conditions(given.get("should"))
        if should or (self._ask is None and "should" in given):  # inside of nested no condition holds of none
            mask &= np.logical_or.reduce([self.mask(one) for one in should])
        if "min_should" in given:
            _only(given["min_should"], "conditions", "min_count")
            ones, least = _conditions(given["min_should"].get("conditions")), given["min_should"].get("min_count")
            if not isinstance(least, int) or not 0 <= least <= len(
                ones
            ):  # of more, Qdrant's answers contradict another
                raise ConfigError(
                    f"min_should.min_count must be 0 to {len(ones)}, its conditions; got {clipped(least)}"
                )
            found = np.zeros(self._table.size, np.int64)
            for one in ones:
                found += self.mask(one)
            mask &= found >= least
        return mask

    def _has_id(self, ids: object) -> Mask:
        if self._rows_of is None:
            raise LeftToQdrant
        mask = np.zeros(self._table.size, np.bool_)
        mask[list(self._rows_of(list(ids) if isinstance(ids, (list, tuple, set, frozenset)) else [ids]))] = True
        return mask

    def _is_empty(self, given: Any) -> Mask:
        column = self._column(given)
        return ~column.any(column.count.array > 0, column.count_row)

    def _is_null(self, given: Any) -> Mask:
        column = self._column(given)
        return column.any(column.null.array, column.count_row)

    def _column(self, given: Any) -> Column:
        _only(given, "key")
        return self._table.column(given.get("key"))

    def _nested(self, given: Any) -> Mask:
        _only(given, "key", "filter")
        column = self._table.column(given.get("key"))
        return column.any(Evaluator(column.objects, depth=self._depth).mask(given.get("filter")), column.object_row)

    def _field(self, given: Mapping[str, Any]) -> Mask:
        _only(given, "key", "match", "range", "values_count", "is_empty", "is_null", *_OF_QDRANT)
        if set(given) & set(_OF_QDRANT):
            raise LeftToQdrant
        column, found = self._table.column(given["key"]), []
        if "match" in given:
            found.append(column.any(_matched(column, given["match"])))
        if "range" in given:
            found.append(column.any(_within(column, given["range"])))
        if "values_count" in given:
            chosen = _bounded(column.count.array, given["values_count"], "values_count", (int,))
            found.append(column.any(chosen, column.count_row))
        for name in ("is_empty", "is_null"):  # of any value
            if name in given:
                states = column.count.array == 0 if name == "is_empty" else column.null.array
                found.append(column.any(states == bool(given[name]), column.count_row))
        if not found:
            raise ConfigError(f"the condition on {clipped(given['key'])} says nothing: give match, range or another")
        either: Mask = np.logical_or.reduce(found)  # as Qdrant, which takes the first that holds
        return either


def _only(given: object, *names: str) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"a filter has an object of {', '.join(names)} here, got {clipped(given)}")
    if unknown := [name for name in given if name not in names]:
        raise ConfigError(f"a filter cannot have {clipped(unknown[0])} beside {', '.join(names)}")


def _conditions(given: object) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def _matched(column: Column, match: Any) -> npt.NDArray[Any]:
    _only(match, "value", "any", "except", *_OF_QDRANT)
    given = {name: value for name, value in match.items() if value is not None}
    if len(given) != 1:
        raise ConfigError(f"match has one of value, any, except, text, got {clipped(match)}")
    [(name, values)] = given.items()
    if name in _OF_QDRANT:
        raise LeftToQdrant
    values = [values] if name == "value" else list(values) if isinstance(values, (list, tuple)) else [values]
    if wrong := [x for x in values if not isinstance(x, (str, int))]:
        raise ConfigError(f"match.{name} has texts, integers or booleans, got {clipped(wrong[0])}")
    found = column.match(values)
    return (column.kind.array != _NULL) & ~found if name == "except" else found


def _within(column: Column, given: Any) -> npt.NDArray[Any]:
    _only(given, *_BOUNDS)
    bounds: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if any(isinstance(value, str) for value in bounds.values()):
        moments = {name: _time_us(value) if isinstance(value, str) else np.nan for name, value in bounds.items()}
        if wrong := [name for name, moment in moments.items() if np.isnan(moment)]:
            raise ConfigError(f"range.{wrong[0]} must be as 2026-01-31T12:00:00Z, got {clipped(bounds[wrong[0]])}")
        return _bounded(column.times(), moments, "range", (float,))
    return _bounded(column.numbers(), bounds, "range", (int, float))


def _bounded(
    values: npt.NDArray[Any], given: Mapping[str, Any], name: str, kinds: tuple[type, ...]
) -> npt.NDArray[Any]:
    _only(given, *_BOUNDS)
    chosen = ~np.isnan(values) if values.dtype.kind == "f" else np.ones(len(values), np.bool_)
    for each, bound in given.items():
        if bound is None:
            continue
        if type(bound) not in kinds or bound != bound:
            raise ConfigError(f"{name}.{each} must be a number, got {clipped(bound)}")
        if values.dtype.kind == "f" and isinstance(bound, int):
            bound = float(max(min(bound, _LARGEST), -_LARGEST))
        chosen &= _BOUNDS[each](values, bound)
    return chosen
