"""Arrays as bytes and back: KServe v2 (JSON and its binary tensor extension), safetensors, .npy and Arrow IPC.

Bytes come from strangers: readers compare the declared dtype and shape with the bytes that are there before they make
arrays, as views. A value is an array of one of DATATYPES, or bytes, an element of KServe's datatype BYTES.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.errors import FormatError, MissingDependency, UnsupportedDtype
from accelerant.runtime.files import clipped, decode_json, npy_header

JSON = "application/json"
BINARY = "application/octet-stream"
SAFETENSORS = "application/x-safetensors"
NPY = "application/x-npy"
ARROW = "application/vnd.apache.arrow.stream"

DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("bool"),
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
"""KServe's names of dtypes."""

_NAMES = {dtype: name for name, dtype in DATATYPES.items()}
_NO_BF16 = ": NumPy, in whose arrays the service keeps tensors, has no bfloat16; send float32"
_DIMENSIONS_MOST, _TENSORS_MOST = 8, 64
_EMPTY_MOST = 1 << 24  # largest product of the other dimensions of a tensor without elements
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_NON_FINITE = ("NaN", "Infinity", "-Infinity")
"""Strings for these numbers, as in the JSON form of Protocol Buffers: JSON itself has none."""

Value = npt.NDArray[Any] | bytes
Values = dict[str, Value]


def datatype_of(value: Value) -> str:
    """Return KServe's name of a value's dtype; UnsupportedDtype for others."""
    if isinstance(value, bytes):
        return "BYTES"
    try:
        return _NAMES[value.dtype]
    except KeyError:
        raise UnsupportedDtype(f"dtype {value.dtype} is none of {', '.join(DATATYPES)}") from None


# --- KServe v2 -------------------------------------------------------------------------------------------------------
def read_kserve(
    body: bytes, json_bytes: int | None, key: str, *, most_json: int = 1 << 62
) -> tuple[dict[str, Any], Values]:
    """Return the JSON object of a request or response, and its tensors, those of "inputs" or "outputs", by name.

    The bytes of tensors follow the JSON, whose size is `json_bytes` (header Inference-Header-Content-Length); None: the
    whole body is JSON. FormatError names the tensor and what is wrong with it.
    """
    size = len(body) if json_bytes is None else json_bytes
    if not 0 <= size <= len(body):
        raise FormatError(f"Inference-Header-Content-Length is {size}, the body has {len(body):,} bytes")
    if size > most_json:
        raise FormatError(f"the JSON has {size:,} bytes, more than {most_json:,}: send large tensors as bytes")
    try:
        head = decode_json(body[:size] if json_bytes is not None else body)
    except ValueError as error:
        raise FormatError(f"the body is not JSON: {clipped(str(error))}") from None
    if not isinstance(head, dict):
        raise FormatError(f"the body must be a JSON object, got {clipped(head)}")
    tensors = head.get(key, [])
    if not isinstance(tensors, list) or len(tensors) > _TENSORS_MOST:
        raise FormatError(f'"{key}" must be a list of at most {_TENSORS_MOST} tensors, got {clipped(tensors)}')
    values: Values = {}
    for entry in tensors:
        name, shape, datatype, sent = _declared(entry, key)
        if name in values:
            raise FormatError(f"tensor {name!r} occurs twice")
        if sent is None:
            values[name] = _from_list(name, entry.get("data"), shape, datatype)
            continue
        if sent > len(body) - size:
            raise FormatError(f"tensor {name!r}: binary_data_size is {sent:,}, {len(body) - size:,} bytes are left")
        values[name] = _from_bytes(name, body, size, sent, shape, datatype)
        size += sent
    if json_bytes is not None and size != len(body):
        raise FormatError(f"{len(body) - size:,} bytes follow the last tensor")
    return head, values


def _declared(entry: Any, key: str) -> tuple[str, tuple[int, ...], str, int | None]:
    """Return a tensor's name, shape, datatype and bytes (None: its data are in the JSON)."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise FormatError(f'each of "{key}" is an object with a name, got {clipped(entry)}')
    name, shape, datatype = entry["name"], entry.get("shape"), entry.get("datatype")
    parameters = entry.get("parameters", {})
    if not isinstance(parameters, dict):
        raise FormatError(f"tensor {clipped(name)}: parameters must be an object, got {clipped(parameters)}")
    if datatype not in DATATYPES and datatype != "BYTES":
        raise FormatError(
            f"tensor {clipped(name)}: datatype must be BYTES or one of {', '.join(DATATYPES)}; got {clipped(datatype)}"
            f"{_NO_BF16 if datatype == 'BF16' else ''}"
        )
    if unknown := parameters.keys() - {"binary_data_size"}:
        raise FormatError(f"tensor {clipped(name)} has no parameter {clipped(min(unknown))}; it has binary_data_size")
    sent = parameters.get("binary_data_size")
    if sent is not None and (type(sent) is not int or sent < 0):
        raise FormatError(f"tensor {clipped(name)}: binary_data_size must be a whole number, got {clipped(sent)}")
    return name, _shape(name, shape), datatype, sent


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    good = isinstance(shape, (list, tuple)) and len(shape) <= _DIMENSIONS_MOST
    if not good or not all(type(n) is int and 0 <= n < 2**48 for n in shape):
        raise FormatError(
            f"tensor {clipped(name)}: shape must be at most {_DIMENSIONS_MOST} whole numbers, got {clipped(shape)}"
        )
    if 0 in shape and math.prod(max(1, n) for n in shape) > _EMPTY_MOST:  # no bytes are sent that would bound the rows
        raise FormatError(f"tensor {clipped(name)}: shape {clipped(shape)} is too large")
    return tuple(shape)


def _from_bytes(
    name: str, body: bytes, start: int, size: int, shape: tuple[int, ...], datatype: str
) -> npt.NDArray[Any] | bytes:
    """Return the view of a tensor's bytes; its size must be that of its shape."""
    if datatype == "BYTES":
        length = int.from_bytes(body[start : start + 4], "little")
        if math.prod(shape) != 1 or size != length + 4:
            raise FormatError(
                f"tensor {clipped(name)}: BYTES is one element here, of shape [1], after its length (4 bytes)"
            )
        return body[start + 4 : start + size]
    return _viewed(name, memoryview(body)[start : start + size], shape, DATATYPES[datatype])


def _viewed(
    name: str, data: memoryview, shape: tuple[int, ...], dtype: np.dtype[Any], order: Any = "C"
) -> npt.NDArray[Any]:
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != len(data):
        raise FormatError(
            f"tensor {clipped(name)}: shape {list(shape)} of {dtype.name} takes {wanted:,} bytes, got {len(data):,}"
        )
    if dtype.kind == "b" and wanted and np.frombuffer(data, np.uint8).max() > 1:
        raise FormatError(f"tensor {clipped(name)}: a byte of BOOL is 0 or 1")
    return (np.frombuffer(data, dtype) if wanted else np.empty(0, dtype)).reshape(shape, order=order)


def _from_list(name: str, data: Any, shape: tuple[int, ...], datatype: str) -> Value:
    """Return the value of JSON's numbers, flat or nested."""
    if not isinstance(data, list):
        raise FormatError(f"tensor {clipped(name)}: data must be a list, got {clipped(data)}")
    if datatype == "BYTES":
        while isinstance(data, list) and len(data) == 1:
            data = data[0]
        if not isinstance(data, str) or math.prod(shape) != 1:
            raise FormatError(f"tensor {clipped(name)}: BYTES is one element here, a string of shape [1]")
        try:
            return data.encode()
        except UnicodeEncodeError:
            raise FormatError(f"tensor {clipped(name)}: the string is not Unicode text") from None
    dtype = DATATYPES[datatype]
    flat: list[Any] = data
    for axis, size in enumerate(shape[1:], 1):
        if flat and isinstance(flat[0], list):
            even = len(flat) == math.prod(shape[:axis])
            if not (even and all(isinstance(row, list) and len(row) == size for row in flat)):
                raise FormatError(f"tensor {clipped(name)}: data must be flat, or nested as its shape {list(shape)}")
            flat = [value for row in flat for value in row]
    allowed: tuple[type, ...] = {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,))
    if not {*map(type, flat)} <= {*allowed}:
        if dtype.kind == "f":
            flat = [float(value) if value in _NON_FINITE else value for value in flat if not isinstance(value, list)]
        wrong = next((value for value in flat if type(value) not in allowed), None)
        if wrong is not None or dtype.kind != "f":
            raise FormatError(f"tensor {clipped(name)}: {clipped(wrong)} is not a number of {datatype}")
    if len(flat) != math.prod(shape):
        raise FormatError(
            f"tensor {clipped(name)}: shape {list(shape)} has {math.prod(shape):,} elements, got {len(flat):,}"
        )
    try:
        with np.errstate(over="ignore"):
            return np.array(flat, dtype).reshape(shape)
    except (OverflowError, ValueError):
        raise FormatError(f"tensor {clipped(name)}: a number is beyond {datatype}") from None


def write_kserve(
    head: Mapping[str, Any], key: str, values: Mapping[str, Value], binary: bool | Collection[str] = True
) -> tuple[bytes, int | None]:
    """Return the body of a request or response, and the bytes of its JSON (None: all of it, as no tensor is binary).

    `head` has the other entries of the JSON, `key` is the tensors'. `binary`: whether tensors follow as bytes, or the
    names of those that do.
    """
    tensors, parts = [], []
    for name, value in values.items():
        entry: dict[str, Any] = {"name": name, "datatype": datatype_of(value)}
        entry["shape"] = [1] if isinstance(value, bytes) else list(value.shape)
        if binary if isinstance(binary, bool) else name in binary:
            part = len(value).to_bytes(4, "little") + value if isinstance(value, bytes) else value.tobytes()
            entry["parameters"] = {"binary_data_size": len(part)}
            parts.append(part)
        else:
            entry["data"] = _listed(name, value)
        tensors.append(entry)
    text = _ENCODER.encode({**head, key: tensors}).encode()
    return b"".join((text, *parts)), len(text) if parts else None


def _listed(name: str, value: Value) -> list[Any]:
    if isinstance(value, bytes):
        try:
            return [value.decode()]
        except UnicodeDecodeError:
            raise FormatError(f"{name} is no text: ask for bytes (Accept: {BINARY})") from None
    numbers: list[Any] = value.ravel().tolist()
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        return [
            x if math.isfinite(x) else "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity" for x in numbers
        ]
    return numbers


# --- other formats ---------------------------------------------------------------------------------------------------
def read_tensors(format: str, body: bytes, names: Collection[str], *, most_json: int = 1 << 62) -> Values:
    """Return a body's arrays by name, of .npy in the order of `names`; headers have `most_json` bytes at most."""
    if format == NPY:
        return _read_npy(body, names)
    return {SAFETENSORS: _read_safetensors, ARROW: _read_arrow}[format](body, most_json)


def write_tensors(format: str, values: Mapping[str, Value]) -> bytes:
    """Return arrays as a body; bytes become arrays of uint8."""
    arrays = {
        name: np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value, order="C")
        for name, value in values.items()
    }
    if format == SAFETENSORS:
        from safetensors.numpy import save

        return bytes(save(arrays))
    if format == NPY:
        out = io.BytesIO()
        for array in arrays.values():
            np.lib.format.write_array(out, array, allow_pickle=False)
        return out.getvalue()
    return _write_arrow(arrays)


def _read_safetensors(body: bytes, most_json: int) -> Values:
    from safetensors import SafetensorError, deserialize

    names = {"F16": "FP16", "F32": "FP32", "F64": "FP64", "BOOL": "BOOL"}
    names |= {f"{kind[0]}{bits}": f"{kind}{bits}" for kind in ("UINT", "INT") for bits in (8, 16, 32, 64)}
    if (size := int.from_bytes(body[:8], "little")) > most_json:
        raise FormatError(f"the header has {size:,} bytes, more than {most_json:,}")
    values: Values = {}
    try:
        entries = deserialize(body)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError) as error:
        raise FormatError(f"the body is not safetensors: {clipped(str(error))}") from None
    for name, entry in entries:
        if entry["dtype"] not in names:
            hint = _NO_BF16 if entry["dtype"] == "BF16" else ""
            raise FormatError(f"tensor {clipped(name)}: dtype {entry['dtype']} is none of {', '.join(names)}{hint}")
        dtype = DATATYPES[names[entry["dtype"]]]
        values[name] = _viewed(name, memoryview(entry["data"]), _shape(name, entry["shape"]), dtype)
    return values


def _read_npy(body: bytes, names: Collection[str]) -> Values:
    stream, values = io.BytesIO(body), Values()
    for name in names:
        if stream.tell() == len(body):
            break
        try:
            shape, fortran, dtype = npy_header(stream)
        except ValueError as error:
            raise FormatError(f"array {name!r} is not .npy: {clipped(str(error))}") from None
        if dtype.newbyteorder("<") not in _NAMES:
            raise FormatError(f"array {name!r}: dtype {clipped(str(dtype))} is none of {', '.join(DATATYPES)}")
        shape = _shape(name, shape)
        start = stream.tell()
        end = start + math.prod(shape) * dtype.itemsize
        array = _viewed(name, memoryview(body)[start:end], shape, dtype, "F" if fortran else "C")
        values[name] = np.asarray(array, dtype.newbyteorder("<"), order="C")  # ascontiguousarray makes 0-d arrays 1-d
        stream.seek(end)
    if stream.tell() != len(body):
        raise FormatError(f"{len(body) - stream.tell():,} bytes follow the arrays {', '.join(names)}")
    return values


# --- Arrow IPC: one record batch, a column for each tensor; an axis of fixed-size lists is a second dimension -------
def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise MissingDependency("pyarrow", "service", "Arrow IPC") from None
    return pyarrow


def _read_arrow(body: bytes, most_json: int) -> Values:
    arrow = _arrow()
    values: Values = {}
    described = 0
    try:
        for message in arrow.ipc.MessageReader.open_stream(body):
            described += message.metadata.size
            if described > most_json:
                raise FormatError(f"the metadata have more than {most_json:,} bytes")
            if message.type == "dictionary" or (message.type == "record batch" and _is_compressed(message.metadata)):
                raise FormatError("Arrow IPC with dictionaries or compression is not read: write plain columns")
        table = arrow.ipc.open_stream(body).read_all()
        table.validate(full=True)
    except FormatError:
        raise
    except (arrow.ArrowException, OSError, ValueError, TypeError, StopIteration) as error:
        raise FormatError(f"the body is not an Arrow IPC stream: {clipped(str(error))}") from None
    if len(set(table.column_names)) != table.num_columns:
        raise FormatError("columns of the Arrow stream have the same name")
    for name, column in zip(table.column_names, table.columns, strict=True):
        array = column.combine_chunks()
        shape: tuple[int, ...] = (len(array),)
        while arrow.types.is_fixed_size_list(array.type):
            shape = (*shape, array.type.list_size)
            if array.null_count or len(shape) > _DIMENSIONS_MOST:
                raise FormatError(f"column {clipped(name)}: lists are null, or nested too deeply")
            array = array.flatten()
        if array.null_count or not (arrow.types.is_integer(array.type) or arrow.types.is_floating(array.type)):
            raise FormatError(f"column {clipped(name)} must have integers or floats and no nulls, got {array.type}")
        values[name] = array.to_numpy(zero_copy_only=False).reshape(_shape(name, shape))
    return values


def _is_compressed(metadata: Any) -> bool:
    """Return whether a record batch's buffers are compressed: field 3 of the table RecordBatch (Message.fbs)."""
    data = bytes(metadata)

    def number(at: int, size: int = 4) -> int:
        return int.from_bytes(data[at : at + size], "little", signed=size == 4)

    def entry(table: int, index: int) -> int:
        """Return the position of a table's field, 0 if it is absent."""
        vtable = table - number(table)
        offset = number(vtable + 4 + 2 * index, 2) if number(vtable, 2) > 4 + 2 * index else 0
        return table + offset if offset else 0

    header = entry(number(0), 2)
    return not header or bool(entry(header + number(header), 3))


def _write_arrow(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    arrow = _arrow()
    columns = []
    for name, array in arrays.items():
        if array.ndim == 0:
            array = array.reshape(1)
        column = arrow.array(array.reshape(-1))
        for size in reversed(array.shape[1:]):
            if size == 0:
                raise FormatError(f"{name} has shape {list(array.shape)}, which Arrow's columns cannot express")
            column = arrow.FixedSizeListArray.from_arrays(column, size)
        columns.append(column)
    if len({len(column) for column in columns}) > 1:
        raise FormatError("Arrow's columns have one length; these results do not: ask for another format")
    batch = arrow.record_batch(columns, names=list(arrays))
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())
