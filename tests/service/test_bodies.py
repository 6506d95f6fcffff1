"""Arrays as bytes and back, in this process: every format and dtype, and what strangers may send instead."""

import contextlib
import json

import numpy as np
import pytest

from accelerant.errors import AccelerantError, FormatError
from accelerant.service.bodies import (
    ARROW,
    DATATYPES,
    NPY,
    SAFETENSORS,
    read_kserve,
    read_tensors,
    write_kserve,
    write_tensors,
)
from refusals import assert_raises

SHAPES = ((3,), (2, 3), (0,), (0, 4), (1, 1, 1, 2))


def sample(dtype, shape):
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(dtype)


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("format", [SAFETENSORS, NPY, ARROW, "binary", "json"])
def test_what_is_written_is_read(format, datatype):
    if format == ARROW:
        pytest.importorskip("pyarrow")
        if datatype == "BOOL":
            pytest.skip("Arrow's bits are no bytes")
    for shape in SHAPES + ((),) * (format != ARROW):
        arrays = {"x": sample(DATATYPES[datatype], shape), "y": sample(DATATYPES[datatype], shape)}
        if format in ("binary", "json"):
            body, size = write_kserve({"id": "a"}, "inputs", arrays, binary=format == "binary")
            head, found = read_kserve(body, size, "inputs")
            assert head["id"] == "a"
        else:
            found = read_tensors(format, write_tensors(format, arrays), ["x", "y"])
        same(found, arrays)


def test_numbers_that_json_has_not_and_bytes():
    values = {"x": np.array([np.nan, np.inf, -np.inf, 1.5]), "file": b"\xff\x00"}
    body, size = write_kserve({}, "outputs", values, binary={"file"})
    found = read_kserve(body, size, "outputs")[1]
    np.testing.assert_array_equal(found["x"], values["x"])
    assert found["file"] == b"\xff\x00"
    assert_raises(FormatError, "file is no text: ask for bytes", write_kserve, {}, "outputs", values, binary=False)


GOOD = {"name": "x", "shape": [2], "datatype": "UINT8", "data": [1, 2]}


@pytest.mark.parametrize(("changed", "message"), [
    ({"name": 7}, "is an object with a name"),
    ({"datatype": "BF16"}, "no bfloat16; send float32"),
    ({"datatype": "COMPLEX"}, "must be BYTES or one of"),
    ({"parameters": 3}, "parameters must be an object"),
    ({"parameters": {"region": 1}}, "has no parameter 'region'"),
    ({"parameters": {"binary_data_size": True}}, "must be a whole number"),
    ({"parameters": {"binary_data_size": -1}}, "must be a whole number"),
    ({"parameters": {"binary_data_size": 9}}, "binary_data_size is 9, 2 bytes are left"),
    ({"shape": [1] * 9}, "at most 8 whole numbers"),
    ({"shape": [-1]}, "at most 8 whole numbers"),
    ({"shape": [2.0]}, "at most 8 whole numbers"),
    ({"shape": [0, 1 << 25]}, "is too large"),
    ({"shape": [3]}, "has 3 elements, got 2"),
    ({"shape": [1 << 40]}, "elements, got 2"),  # nothing of that size is made
    ({"data": "ab"}, "data must be a list"),
    ({"data": [1, None]}, "None is not a number of UINT8"),
    ({"data": [1, True]}, "True is not a number of UINT8"),
    ({"data": [1, 256]}, "a number is beyond UINT8"),
    ({"data": [1, -1]}, "a number is beyond UINT8"),
    ({"data": [[1], [2, 3]], "shape": [2, 1]}, "flat, or nested as its shape"),
    ({"datatype": "FP32", "data": [1, "infinity"]}, "'infinity' is not a number of FP32"),
    ({"datatype": "BYTES", "data": ["a", "b"]}, "BYTES is one element here"),
    ({"datatype": "BYTES", "shape": [1], "data": ["\ud800"]}, "is not Unicode text"),
    ({"datatype": "BYTES", "parameters": {"binary_data_size": 2}}, "BYTES is one element here, of shape"),
    ({"datatype": "BOOL", "parameters": {"binary_data_size": 2}}, "a byte of BOOL is 0 or 1"),
    ({"datatype": "UINT16", "parameters": {"binary_data_size": 2}}, "takes 4 bytes, got 2"),
])  # fmt: skip
def test_what_is_no_tensor_is_named(changed, message):
    text = json.dumps({"inputs": [GOOD | changed]}).encode()
    assert_raises(FormatError, message, lambda: read_kserve(text + b"\x01\x02", len(text), "inputs"))


@pytest.mark.parametrize(("body", "size", "message"), [
    (b"{}", 3, "is 3, the body has 2 bytes"),
    (b"{}", -1, "is -1, the body has 2 bytes"),
    (b"[1]", None, "must be a JSON object"),
    (b"{", None, "is not JSON"),
    (b'{"inputs": {}}', None, "a list of at most 64 tensors"),
    (json.dumps({"inputs": [GOOD, GOOD]}).encode(), None, "'x' occurs twice"),
    (b"{}rest", 2, "4 bytes follow the last tensor"),
    (b" " * 100 + b"{}", None, "the JSON has 102 bytes, more than 64"),
])  # fmt: skip
def test_what_is_no_request_is_refused(body, size, message):
    with pytest.raises(FormatError, match=message):
        read_kserve(body, size, "inputs", most_json=64 if "more than" in message else 1 << 20)


@pytest.mark.parametrize("format", [SAFETENSORS, NPY, ARROW, "kserve"])
def test_damaged_bodies_are_refused_or_read(format, rng):
    """Cut, or with a byte changed: an error of ours or arrays, and nothing else."""
    if format == ARROW:
        pytest.importorskip("pyarrow")
    arrays = {"x": np.arange(6.0), "y": np.arange(6, dtype=np.uint8)}
    body, size = write_kserve({}, "inputs", arrays) if format == "kserve" else (write_tensors(format, arrays), None)
    for _ in range(200):
        changed = bytearray(body)
        if rng.random() < 0.3:
            del changed[rng.randrange(len(changed)) :]
        else:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        with contextlib.suppress(AccelerantError):
            if format == "kserve":
                read_kserve(bytes(changed), size, "inputs")
            else:
                read_tensors(format, bytes(changed), ["x", "y"])


def test_headers_are_bounded():
    arrays = {f"tensor {i}": np.zeros(1) for i in range(50)}
    for format, message in ((SAFETENSORS, "the header has"), (ARROW, "the metadata have more than")):
        if format == ARROW:
            pytest.importorskip("pyarrow")
        body = write_tensors(format, arrays)
        assert len(read_tensors(format, body, (), most_json=1 << 20)) == 50
        assert_raises(FormatError, message, read_tensors, format, body, (), most_json=256)
    with pytest.raises(FormatError, match="follow the arrays x"):
        read_tensors(NPY, write_tensors(NPY, {"x": np.zeros(1), "y": np.zeros(1)}), ["x"])
