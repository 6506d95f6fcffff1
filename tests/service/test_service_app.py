import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from accelerant.algebra.field.field import prime_field
from accelerant.service.bodies import (
    ARROW,
    BINARY,
    JSON,
    NPY,
    SAFETENSORS,
    read_kserve,
    read_tensors,
    write_kserve,
    write_tensors,
)

MUL = "/v2/models/field_mul/infer"


def elements(n=1024, field="goldilocks"):
    prime = prime_field(field)
    return {"x": prime.random(n), "y": prime.random(n)}


def product(inputs, field="goldilocks"):
    return prime_field(field).mul(inputs["x"], inputs["y"])


def kserve(inputs, parameters=None, binary=True):
    body, length = write_kserve({"parameters": parameters or {}}, "inputs", inputs, binary)
    headers = {"content-type": BINARY if length else JSON}
    return {"content": body, "headers": headers | ({"inference-header-content-length": str(length)} if length else {})}


def outputs(response):
    assert response.status_code == 200, response.text
    length = response.headers.get("inference-header-content-length")
    return read_kserve(response.content, int(length) if length else None, "outputs")[1]


@pytest.mark.parametrize("field", ["goldilocks", "babybear", "bn254_fr"])
@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
def test_products_of_elements(http, field, binary):
    inputs = elements(100, field)
    answer = http.post(MUL, **kserve(inputs, {"field": field, "binary_data_output": binary}, binary))
    assert answer.headers["content-type"] == (BINARY if binary else JSON)
    np.testing.assert_array_equal(outputs(answer)["z"], product(inputs, field))


def test_calls_that_list_their_inputs_otherwise_are_not_confused(http):
    """Equal heads are read once, and calls at the same time may be one launch."""
    url, calls = "/v2/models/field_sub/infer", [elements(4) for _ in range(24)]

    def difference(number):
        names = "xy" if number % 2 else "yx"
        return outputs(http.post(url, **kserve({name: calls[number][name] for name in names})))["z"]

    for number in (0, 0, 1, 1):
        difference(number)
    with ThreadPoolExecutor(len(calls)) as pool:
        found = list(pool.map(difference, range(len(calls))))
    for inputs, z in zip(calls, found, strict=True):
        np.testing.assert_array_equal(z, prime_field("goldilocks").sub(inputs["x"], inputs["y"]))


@pytest.mark.parametrize("format", [SAFETENSORS, NPY, ARROW])
def test_other_formats_in_and_out(http, format):
    inputs = elements(100, "bn254_fr")
    answer = http.post(
        MUL, params={"field": "bn254_fr"}, content=write_tensors(format, inputs), headers={"content-type": format}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == format
    np.testing.assert_array_equal(read_tensors(format, answer.content, ["z"])["z"], product(inputs, "bn254_fr"))


def test_accept_chooses_the_format(http):
    inputs = elements(10)
    body = kserve(inputs, binary=False)["content"]
    answer = http.post(MUL, content=body, headers={"accept": f"text/html, {NPY};q=0.5", "content-type": JSON})
    np.testing.assert_array_equal(np.load(io.BytesIO(answer.content)), product(inputs))
    assert http.post(MUL, content=body, headers={"accept": "image/png", "content-type": JSON}).status_code == 406


def test_curl_without_a_content_type(http):
    body = kserve(elements(4), binary=False)["content"]
    answer = http.post(MUL, content=body, headers={"content-type": "application/x-www-form-urlencoded"})
    assert answer.headers["content-type"] == JSON
    assert outputs(answer)["z"].shape == (4,)


def test_metadata(http):
    assert http.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    names = [model["name"] for model in http.get("/v2/models").json()["models"]]
    assert {"field_mul", "ntt", "msm"} <= {*names}
    model = http.get("/v2/models/field_mul").json()
    assert [spec["name"] for spec in model["inputs"]] == ["x", "y"]
    assert "field" in model["parameters"]["properties"]
    assert http.get("/v2/health/live").status_code == http.get("/v2/health/ready").status_code == 200
    assert http.get("/v2/models/field_mul/versions/1").json() == model
    assert http.get("/v2/models/field_mul/versions/1/ready").status_code == 200
    assert http.post(f"{MUL.removesuffix('/infer')}/versions/1/infer", **kserve(elements(2))).status_code == 200
    for path in ("nothing", "nothing/versions/1", "field_mul/versions/2"):
        assert http.get(f"/v2/models/{path}").status_code == 404


@pytest.mark.parametrize(("name", "shape", "data", "why"), [
    ("x", [2], [1, 2**64 - 1], "not below the modulus"),
    ("x", [2], [1, -1], "beyond UINT64"),
    ("x", [2], [1, 1.5], "not a number of UINT64"),
    ("x", [2], [1, True], "not a number of UINT64"),
    ("x", [2], [[1], [2]], "not a number of UINT64"),
    ("x", [3], [1, 2], "3 elements, got 2"),
    ("x", [-1], [1], "whole numbers"),
    ("x", [2**40, 2**40], [1], "elements, got 1"),
    ("q", [1], [1], "no input 'q'"),
])  # fmt: skip
def test_bad_tensors_are_named(http, name, shape, data, why):
    tensors = [{"name": name, "shape": shape, "datatype": "UINT64", "data": data}]
    tensors.append({"name": "y", "shape": [1], "datatype": "UINT64", "data": [1]})
    answer = http.post(MUL, json={"inputs": tensors})
    assert answer.status_code == 400
    assert why in answer.json()["error"]
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_parameters_are_checked(http):
    for parameters, why in (
        ({"field": "none"}, "field"),
        ({"fields": "x"}, "no parameter 'fields'; it has field, priority, timeout, binary_data_output"),
        ({"sequence_id": 7}, "no parameter 'sequence_id'"),
        ({"priority": 1000}, "priority"),
    ):
        answer = http.post(MUL, **kserve(elements(2), parameters))
        assert answer.status_code in (400, 422)
        assert why in answer.json()["error"]


def test_what_is_asked_of_outputs_and_tensors_exists(http):
    x = {"name": "x", "shape": [1], "datatype": "UINT64", "data": [3]}
    inputs = [x, x | {"name": "y"}]
    for body, why in (
        ({"outputs": [{"name": "nonexist"}]}, "no output 'nonexist'; it has z"),
        ({"outputs": [{"name": "z"}, {"name": "z"}]}, "asks twice for output 'z'"),
        ({"outputs": [{"name": "z", "parameters": {"classification": 2}}]}, "no parameter 'classification'"),
        ({"outputs": {"name": "nonexist"}}, "no output"),
        ({"outputs": 7}, "must be a list"),
        ({"inputs": [x | {"parameters": {"shared_memory_region": "a"}}, inputs[1]]}, "shared_memory_region"),
    ):
        answer = http.post(MUL, json={"inputs": inputs} | body)
        assert answer.status_code == 400, body
        assert why in answer.json()["error"]
    for _ in range(2):  # the second time its head is known
        assert http.post(f"{MUL}?field=babybear", **kserve(elements(2), {})).status_code == 400
        assert http.post(MUL, **kserve(elements(2), {})).status_code == 200
    for options in ({}, {"binary_data": True}):
        answer = http.post(MUL, json={"inputs": inputs, "outputs": [{"name": "z", "parameters": options}]})
        assert outputs(answer)["z"] == [9]
        assert ("inference-header-content-length" in answer.headers) == bool(options)
    two = {"id": "a", "inputs": [], "parameters": {"model": "none"}, "outputs": [{"name": "seed"}, {"name": "text"}]}
    assert "no output" not in http.post("/v2/models/generate/infer", json=two).text


def test_request_ids_are_kept_and_logged(http, server):
    answer = http.get("/v2", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    other = http.get("/v2", headers={"x-request-id": "not mine\t!"})
    assert other.headers["x-request-id"] != "not mine\t!"
    record = server.record("mine-1")
    assert (record["method"], record["path"], record["status"], record["key_id"]) == ("GET", "/v2", 200, "anonymous")


@pytest.mark.slow
def test_neither_the_server_nor_a_worker_of_integers_loads_torch():
    """Its import takes seconds, in which a worker that was killed answers nothing."""
    program = """if True:
        import sys
        import types
        import numpy as np
        import accelerant.service.app
        from accelerant.service import operations, telemetry
        from accelerant.service.jobs import worker
        operations.warm(worker.find_devices("cpu")[0])
        x, context = np.arange(1, 9, dtype=np.uint64), types.SimpleNamespace(device="cpu")
        for name, inputs in (("field_inv", {"x": x}), ("ntt", {"x": x})):
            operation = operations.OPERATIONS[name]
            operation.run(inputs, operation.parameters(), context)
        from accelerant.runtime.monitoring.monitor import sample
        sample(*telemetry._present(["cpu:0"]))
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", program], check=True)
