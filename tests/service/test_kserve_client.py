"""NVIDIA's client of KServe's protocol, for Triton, against this service."""

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferenceServerException, InferInput, InferRequestedOutput

from accelerant.algebra.field.field import prime_field
from refusals import assert_raises


@pytest.fixture
def triton(server):
    with InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


def tensors(count, binary):
    given = [prime_field("goldilocks").random(count) for _ in range(2)]
    inputs = []
    for name, array in zip("xy", given, strict=True):
        inputs.append(InferInput(name, list(array.shape), "UINT64"))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    return given, inputs


@pytest.mark.parametrize("sent", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("asked", [None, True, False], ids=["default", "binary", "json"])
def test_infer(triton, sent, asked):
    (x, y), inputs = tensors(1000, sent)
    outputs = None if asked is None else [InferRequestedOutput("z", binary_data=asked)]
    result = triton.infer("field_mul", inputs, outputs=outputs, request_id="7", priority=1, timeout=60_000_000)
    np.testing.assert_array_equal(result.as_numpy("z"), prime_field("goldilocks").mul(x, y))
    assert result.get_response()["id"] == "7"


def test_health_and_metadata(triton):
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("field_mul")
    assert triton.get_server_metadata()["name"] == "accelerant"
    assert triton.get_model_metadata("msm")["outputs"][0]["name"] == "sum"
    assert_raises(InferenceServerException, "no model 'none'", triton.get_model_metadata, "none")


def test_errors_and_compression(triton):
    _, inputs = tensors(3, True)
    with pytest.raises(InferenceServerException, match="do not broadcast"):
        triton.infer("field_mul", [inputs[0], tensors(4, True)[1][1]])
    with pytest.raises(InferenceServerException, match="compressed bodies are not read"):
        triton.infer("field_mul", inputs, request_compression_algorithm="gzip")


def test_text_is_one_element(triton):
    key = InferInput("public_key", [1], "BYTES")
    key.set_data_from_numpy(np.array([b"no key"], dtype=object))
    x = InferInput("x", [1], "FP64")
    x.set_data_from_numpy(np.ones(1))
    assert_raises(InferenceServerException, "7 bytes wanted", triton.infer, "paillier_encrypt", [key, x])
