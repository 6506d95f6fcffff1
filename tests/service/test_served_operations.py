"""Every operation over HTTP, beside the library's own call."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import accelerant
from accelerant import zk
from accelerant.config import settings
from accelerant.errors import ConfigError, ShapeError
from accelerant.ops.registry import public_ops
from accelerant.privacy.he import paillier
from accelerant.service import Client, operations
from accelerant.service.bodies import BINARY, read_kserve, write_kserve
from accelerant.service.operations import OPERATIONS, op_spec
from refusals import assert_raises

VECTORS = Path(__file__).parent.parent / "vectors/groth16/poseidon"


def post(http, name, inputs=None, parameters=None):
    body, length = write_kserve({"parameters": parameters or {}}, "inputs", inputs or {})
    headers = {"accept": BINARY} | ({"inference-header-content-length": str(length)} if length else {})
    return http.post(f"/v2/models/{name}/infer", content=body, headers=headers)


def call(http, name, inputs=None, parameters=None, wait_s=120):
    """Return the outputs of a call, which may become a job."""
    answer = post(http, name, inputs, parameters)
    if answer.status_code == 202:
        path, end = answer.headers["location"], time.monotonic() + wait_s
        while (job := http.get(path).json())["state"] in ("queued", "running") and time.monotonic() < end:
            time.sleep(0.05)
        assert job["state"] == "succeeded", job["error"]
        answer = http.get(f"{path}/result", headers={"accept": BINARY})
    assert answer.status_code == 200, answer.text
    size = answer.headers.get("inference-header-content-length")
    return read_kserve(answer.content, int(size) if size else None, "outputs")[1]


def test_many_small_sums_are_no_short_call():
    msm, verify = OPERATIONS["msm"], OPERATIONS["groth16_verify"]
    points, options = np.zeros((0, 2, 4), np.uint64), msm.parameters()
    most = {"scalars": np.zeros((4096, 0, 4), np.uint64), "points": points}
    msm.check(most, options)
    assert msm.cost(most, options) > 4.0
    with pytest.raises(ShapeError, match=r"at most 4,096 sums, got shape \(4097, 0, 4\)"):
        msm.check({"scalars": np.zeros((4097, 0, 4), np.uint64), "points": points}, options)
    texts = {"public": np.zeros(10**8, np.uint8)}
    assert verify.cost(texts, verify.parameters()) > 10.0


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", public_ops())
def test_every_public_op_can_be_served(name):
    """Its first samples, as the server describes and checks them, and as a worker runs them."""
    spec, context = op_spec(name), SimpleNamespace(device="cpu")
    reference = public_ops()[name].function
    for sample in public_ops()[name].cases.SAMPLES[:3]:
        tensors = sample.tensors(torch.float32)
        inputs = {one.name: x.numpy() for one, x in zip(spec.inputs, tensors, strict=False) if x is not None}
        options = spec.parameters(**sample.options)
        spec.check(inputs, options)
        found = spec.run(inputs, options, context)
        assert spec.result_bytes(inputs, options) == sum(y.nbytes for y in found.values())
        if name != "dropout":
            wanted = reference(*tensors, **sample.options)
            for y, like in zip(found.values(), wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
                np.testing.assert_array_equal(y, like.numpy())


def test_what_an_op_refuses_the_server_refuses_too():
    conv2d, swiglu = op_spec("conv2d"), op_spec("swiglu")
    image, kernel = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 2, 2), np.float32)
    assert conv2d.result_bytes({"x": image, "weight": kernel}, conv2d.parameters(padding=10**6)) > 10**13  # no memory
    with pytest.raises(ShapeError, match="up must have the shape of gate"):
        swiglu.check({"gate": image, "up": kernel}, swiglu.parameters())
    assert_raises(ValidationError, "extra", swiglu.parameters, scale=2)
    assert_raises(ConfigError, r"ops: there is no op 'swigul' \(did you mean 'swiglu'", op_spec, "swigul")


@pytest.mark.parametrize("name", ["add", "sub", "mul", "inv"])
@pytest.mark.parametrize("field", ["goldilocks", "bls12_381_fr"])
def test_field_operations(http, name, field):
    prime = zk.field(field)
    given = [prime.random(33) for _ in range(1 if name == "inv" else 2)]
    found = call(http, f"field_{name}", dict(zip("xy", given, strict=False)), {"field": field})["z"]
    np.testing.assert_array_equal(found, getattr(prime, name)(*given))


def test_transforms_and_sums(http):
    x = zk.field("bn254_fr").random(64)
    y = call(http, "ntt", {"x": x}, {"field": "bn254_fr", "coset": 5})["y"]
    np.testing.assert_array_equal(y, zk.ntt(x, "bn254_fr", coset=5))
    back = call(http, "ntt", {"x": y}, {"field": "bn254_fr", "coset": 5, "inverse": True})["y"]
    np.testing.assert_array_equal(back, x)
    for name in ("bn254_g1", "bls12_381_g2"):
        curve = zk.curve(name)
        points = curve.mul(curve.generator, list(range(1, 20)))
        scalars = curve.scalar_field.random(19)
        found = call(http, "msm", {"scalars": scalars, "points": points}, {"curve": name})["sum"]
        np.testing.assert_array_equal(found, zk.msm(scalars, points, name))


def test_neural_operations(http):
    torch.manual_seed(0)
    x, weight, q = (torch.randn(shape) for shape in ((5, 8), (8,), (1, 2, 4, 8)))
    ops = accelerant.ops
    for name, inputs, parameters, wanted in (
        ("gelu", {"x": x}, {"approximate": "tanh"}, ops.gelu(x, approximate="tanh")),
        ("softmax", {"x": x}, {"dim": 0}, ops.softmax(x, dim=0)),
        ("layer_norm", {"x": x, "weight": weight, "bias": weight}, {}, ops.layer_norm(x, weight, weight)),
        ("layer_norm", {"x": x, "weight": weight}, {}, ops.layer_norm(x, weight)),
        ("matmul", {"a": x, "b": x.T.contiguous()}, {}, ops.matmul(x, x.T.contiguous())),
        ("attention", {"q": q, "k": q, "v": q}, {"causal": True}, ops.attention(q, q, q, causal=True)),
    ):
        found = call(http, name, {key: value.numpy() for key, value in inputs.items()}, parameters)["y"]
        torch.testing.assert_close(torch.from_numpy(found.copy()), wanted)


def test_a_proof_from_uploaded_files_verifies(http):
    key, zkey, witness = (
        (VECTORS / name).read_bytes() for name in ("verification_key.json", "circuit.zkey", "witness.wtns")
    )
    found = call(http, "groth16_prove", {"zkey": zkey, "witness": witness})
    proof = zk.groth16.Proof.from_json(found["proof"], found["public"])
    assert zk.groth16.verify(zk.groth16.VerificationKey.from_json(key), proof.public, proof)
    given = {"verification_key": key, "public": found["public"], "proof": found["proof"]}
    assert call(http, "groth16_verify", given)["valid"].tolist() == [True]
    other = json.dumps([str(int(value) + 1) for value in json.loads(found["public"])]).encode()
    assert call(http, "groth16_verify", given | {"public": other})["valid"].tolist() == [False]
    answer = post(http, "groth16_verify", given | {"public": b" " * 2000 + other})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("public: a list of 2 public inputs has at most 1,536 bytes, got 2,0")
    answer = post(http, "groth16_prove", {"zkey": zkey[:-7], "witness": witness})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("zkey: section 10")


def test_encrypted_sums(http):
    public, private = paillier.keygen(2048)
    x, y = np.array([1.5, -2.0]), np.array([10.0, 20.0])
    key, sealed = public.to_bytes(), private.to_bytes("a passphrase")
    a = call(http, "paillier_encrypt", {"public_key": key, "x": x})["ciphertext"]
    b = call(http, "paillier_encrypt", {"public_key": key, "x": y})["ciphertext"]
    total = call(http, "paillier_add", {"public_key": key, "a": a, "b": b})["ciphertext"]
    given = {"private_key": sealed, "passphrase": b"a passphrase", "ciphertext": total}
    np.testing.assert_allclose(call(http, "paillier_decrypt", given)["x"], x + y)
    answer = post(http, "paillier_decrypt", given | {"passphrase": b"another"})
    assert answer.status_code == 400
    assert "another" not in answer.text


def test_epsilon(http):
    parameters = {"noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1000, "delta": 1e-5, "method": "rdp"}
    epsilon = call(http, "privacy_epsilon", parameters=parameters)["epsilon"]
    assert 1 < epsilon[0] < 3
    assert call(http, "privacy_epsilon", parameters=parameters | {"noise_multiplier": 0})["epsilon"].tolist() == [
        np.inf
    ]
    answer = http.post("/v2/models/privacy_epsilon/infer", json={"parameters": parameters | {"noise_multiplier": 0}})
    assert answer.json()["outputs"][0]["data"] == ["Infinity"]


def test_the_tokenizer_of_an_uploaded_text_goes_with_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(operations, "_trained", lambda inputs, parameters, context: settings().cache_dir)
    context = SimpleNamespace(directory=tmp_path)
    assert OPERATIONS["train"].run({"text": np.zeros(1, np.uint8)}, None, context) == tmp_path / "cache"
    assert OPERATIONS["train"].run({}, None, context) == settings().cache_dir != tmp_path / "cache"


@pytest.mark.slow
def test_training_then_generation(http, models):
    text = b"the cat sat on the mat. " * 400
    found = call(http, "train", {"text": text}, {"preset": "tiny", "steps": 3, "batch_size": 2, "seed": 1})
    summary = json.loads(found["summary"])
    assert summary["status"] == "done"
    assert summary["steps"] == 3
    assert "/" not in {str(value)[:1] for value in summary.values()}
    folder = models / "mine"
    folder.mkdir()
    for name, file in (("config", "config.json"), ("model", "model.safetensors")):
        (folder / file).write_bytes(found[name])
    if "tokenizer" in found:
        (folder / "tokenizer.json").write_bytes(found["tokenizer"])
    parameters = {"model": "mine", "tokens": 5, "seed": 3}
    texts = [call(http, "generate", {"prompt": b"the cat"}, parameters)["text"] for _ in range(2)]
    assert texts[0] == texts[1]
    for name in ("../mine", "other", str(folder)):
        answer = http.post("/v2/models/generate/infer", json={"parameters": {"model": name}})
        assert answer.status_code == 422
        assert "there is no" in answer.json()["error"]


def test_a_collection_of_the_settings_is_searched(server, http, models):
    pytest.importorskip("qdrant_edge", reason="needs qdrant-edge-py, of the extra search")
    rows = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    with accelerant.search.Collection(models, "papers", dim=8) as papers:
        papers.upsert(range(50), rows, [{"n": i} for i in range(50)])
        condition = {"must": [{"key": "n", "range": {"gte": 20}}]}
        expected = papers.search(rows[:2], 3, filter=condition, payloads=True)
    with Client(server.url, trust_env=False) as client:
        found = client.search("papers", rows[:2], 3, filter=condition, payloads=True)
    assert (found["ids"], found["payloads"], found["selected"]) == (expected.ids, expected.payloads, 30)
    np.testing.assert_array_equal(found["scores"], np.array(expected.scores, np.float32))
    for parameters, inputs, status, text in (
        ({"collection": "others"}, {"queries": rows[:1]}, 422, "there is no 'others'"),
        ({"collection": "papers", "k": 0}, {"queries": rows[:1]}, 422, "k"),
        ({"collection": "papers", "filter": "["}, {"queries": rows[:1]}, 422, "filter"),
        ({"collection": "papers", "filter": "{\"mist\": []}"}, {"queries": rows[:1]}, 422, "mist"),
        ({"collection": "papers"}, {"queries": rows[:1, :3]}, 422, "queries must be"),
        ({"collection": "papers"}, {"queries": np.full((1, 8), np.nan, np.float32)}, 422, "NaN"),
    ):  # fmt: skip
        answer = post(http, "search", inputs, parameters)
        assert (answer.status_code, text in answer.text) == (status, True), answer.text
