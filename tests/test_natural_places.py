"""What a newcomer touches: an op, a backend, a curve, a Hugging Face family and a job type of another package."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from refusals import assert_raises

sys.path.append(str(Path(__file__).parent / "service"))
from serving import Server

import accelerant
from accelerant import nn
from accelerant.errors import ConfigError
from accelerant.nn.patching import forms, register_form
from accelerant.runtime import registry
from accelerant.service.client import Client
from requirements import require_backend

ROOT = Path(__file__).parents[1]
MODULE = '''\
"""A backend and a job type."""

from accelerant.service.operations import OpSpec, Parameters, TensorSpec
from accelerant.testing import FakeProvider


class NewcomerProvider(FakeProvider):
    name = "newcomer"

    @classmethod
    def probe(cls):
        return ""


class CountParameters(Parameters):
    """How high to count."""

    to: int


def _count(arrays, parameters, context):
    for i in range(parameters.to):
        context.progress(i / parameters.to, f"at {i}")
    return {"count": arrays["x"] + parameters.to}


count = OpSpec(
    "count", "Counting up from numbers", "neural", (TensorSpec("x", ("INT64",)),), (TensorSpec("count", ("INT64",)),),
    CountParameters, _count, cost=lambda arrays, parameters: float(parameters.to),
)
'''
MODELS = """\
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class NewcomerRMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(size)), eps

    def forward(self, x):
        scale = (x.float().square().mean(dim=-1, keepdim=True) + self.variance_epsilon) ** -0.5
        return (x.float() * scale).to(x.dtype) * self.weight


class NewcomerConfig(PretrainedConfig):
    model_type = "newcomer"


class NewcomerModel(PreTrainedModel):
    config_class = NewcomerConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding, self.norm, self.head = nn.Embedding(11, 32), NewcomerRMSNorm(32), nn.Linear(32, 11)
        self.post_init()

    def forward(self, input_ids):
        return self.head(self.norm(self.embedding(input_ids)))
"""
ENTRY_POINTS = """\
[accelerant.ops]
newcomer_op = newcomer_op
[accelerant.providers]
newcomer = newcomer:NewcomerProvider
[accelerant.operations]
count = newcomer:count
"""
PROGRAM = """\
import json
import sys

import numpy as np
import torch

import accelerant as acl
from accelerant import zk
from accelerant.ops.registry import public_op
from accelerant.runtime import registry

x = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
wanted = np.where(x > 0, x, 0.5 * x)

# The op is that of any array library and provider, and has its row.
assert public_op("newcomer_op").row == "| `newcomer_op` | Scale negative elements by a slope | Triton | torch |"
with acl.Accelerator("cpu") as acc:
    np.testing.assert_array_equal(acc.newcomer_op(x, slope=0.5), wanted)
    assert torch.equal(acc.newcomer_op(torch.from_numpy(x), 0.5), torch.from_numpy(wanted))
    assert acc.metrics()["newcomer_op"]["calls"] == 2
    with acc.batch() as batch:
        result = batch.newcomer_op(x, slope=0.5)
    np.testing.assert_array_equal(result.result(), wanted)
np.testing.assert_array_equal(registry.create("cpu").newcomer_op(x, slope=0.5), wanted)

# The backend is listed, and runs kernels, arrays of it and the op.
assert [device.label for device in acl.devices() if device.backend == "newcomer"] == ["newcomer:0"]
with acl.Accelerator("newcomer", fallback=False) as acc:
    assert acc.field_mul([3], [5]).tolist() == [15]
    assert acc.provider.counts["launch field_mul"] == 1
    assert acc.provider.field_add([1], [2]).tolist() == [3]
with acl.Accelerator("newcomer") as acc:
    np.testing.assert_array_equal(acc.newcomer_op(x, slope=0.5), wanted)  # torch has no tensors there: by the CPU

# The curve has arithmetic, sums and pairings.
parameters = json.loads(sys.argv[1])
g1, g2 = zk.register_family(
    "newcomer", **parameters, g1_generator=(1, 2), g2_generator=tuple(map(tuple, json.loads(sys.argv[2])))
)
total = zk.msm([2, 3], [g1.generator, g1.generator], curve="newcomer_g1")
assert g1.decode(total) == g1.decode(g1.mul(g1.generator, 5))
points = g1.mul(g1.generator, [6, -1 % g1.order]), g2.mul(g2.generator, [7, 42])
assert zk.pairing_product_is_one(*points, "newcomer")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment of a process in which the newcomer's package is installed."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "newcomer.py").write_text(MODULE)
    (folder / "newcomer_models.py").write_text(MODELS)
    shutil.copytree(ROOT / "tests/ops/leaky_relu", folder / "newcomer_op")
    for path in (folder / "newcomer_op").glob("*.py"):  # the smallest complete op, by another name
        path.write_text(re.sub(r"(?<!F\.)leaky_relu", "newcomer_op", path.read_text()))
    info = folder / "newcomer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: newcomer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(environment, *command):
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_op_a_backend_and_a_curve(installed):
    family = {"kind": "bn", "parameter": -0x400000000000120F, "b": 3, "nonresidue": (3, 1), "twist": "divide"}
    generator = (
        (
            0x50109035DCBA0AD7BF7D1239258E197FD23E5E248FE89F40039A4933A3362D1,
            0x1C31E5EDA57F7A8D33E87E46F95E6A3C8E8DAE4961CA6F524EF2D4F401ADB131,
        ),
        (
            0x121F18DF876E0BBBB382E24CBB6E288A0E06C71D138E23AAC7561AF88F30F3CA,
            0x19C1A6C9D3D7F88DBAA7D6A8D5EF266CE63FB1B8E24C060CFC6101CD4F9F6EFD,
        ),
    )
    run(installed, "-c", PROGRAM, json.dumps(family), json.dumps(generator))


def test_a_family_of_models(installed, monkeypatch):
    """The family's norm is replaced once its form is known."""
    pytest.importorskip("transformers", reason="patch is for models of transformers, an optional package")
    monkeypatch.syspath_prepend(installed["PYTHONPATH"].partition(os.pathsep)[0])
    monkeypatch.setattr(forms, "_FORM_OF", {**forms._FORM_OF})
    models = importlib.import_module("newcomer_models")
    model, ids = models.NewcomerModel(models.NewcomerConfig()).eval(), torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        before = model(ids)
        assert not [each for each in nn.patch(model).changed if each.name == "norm"]
        nn.patching.unpatch(model)
        register_form("rms_norm", models.NewcomerRMSNorm.forward)
        assert [each.name for each in nn.patch(model).changed if each.name == "norm"]
        torch.testing.assert_close(model(ids), before)


@pytest.mark.slow
def test_the_op_is_benchmarked_by_its_name(installed, tmp_path):
    printed = run(
        installed, "-m", "accelerant", "bench", "newcomer_op", "--size", "64x64", "--against", "torch",
        "--budget-seconds", "0.01", "--device", "cpu", "--out", str(tmp_path / "record.json"),
    )  # fmt: skip
    assert "newcomer_op" in printed
    rows = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert {row["op"] for row in rows} == {"newcomer_op"}


@pytest.mark.slow
def test_the_op_and_the_job_type_over_http(installed, tmp_path):
    server = Server(tmp_path, "--device", "cpu", env={**installed, "ACCELERANT_SERVE_OPS": "newcomer_op, swiglu"})
    try:
        with Client(server.url) as client:
            x = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
            np.testing.assert_array_equal(
                client.call("newcomer_op", {"x": x}, slope=0.5)["y"], np.where(x > 0, x, 0.5 * x)
            )
            assert client.describe("newcomer_op")["inputs"][0]["name"] == "x"
            job = client.submit("count", {"x": np.array([1, 2])}, to=3)
            assert client.call("count", {"x": np.array([1, 2])}, to=3)["count"].tolist() == [4, 5]
            assert client.result(job.id)["count"].tolist() == [4, 5]
            assert client.job(job.id).state == "succeeded"
    finally:
        server.stop()


def test_what_does_not_load_is_left_out_with_a_warning(tmp_path):
    """A package with broken entry points, beside which the library works as without it."""
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (tmp_path / "broken.py").write_text("__all__ = ['gelu']\ngelu = count = 5\n")
    points = "[accelerant.ops]\nno = no_such_package\ntaken = broken\n"
    (info / "entry_points.txt").write_text(f"{points}[accelerant.operations]\ncount = broken:count\n")
    program = (
        "from accelerant.ops.registry import public_op\n"
        "from accelerant.service.operations import OPERATIONS\n"
        "assert public_op('gelu').package == 'accelerant.ops.gelu' and 'count' not in OPERATIONS"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    for text in (
        "ops of the entry point 'no' (no_such_package) are left out: ModuleNotFoundError",
        "ops of the entry point 'taken' (broken) are left out: ConfigError: register: broken exports gelu, which is",
        "operation 'count' (broken:count) is left out: TypeError: wanted an OpSpec of this name",
    ):
        assert text in done.stderr


def test_a_form_that_cannot_be_registered_says_why():
    assert_raises(ConfigError, r"there is no form 'rms_norn' \(did you mean 'rms_norm'", register_form, "rms_norn", run)
    assert_raises(ConfigError, "has no source to compare", register_form, "rms_norm", len)
    activations = pytest.importorskip("transformers.activations", reason="transformers is optional")
    with pytest.raises(ConfigError, match="has the form 'gelu_new', not 'rms_norm'"):
        register_form("rms_norm", activations.NewGELUActivation.forward)


@pytest.mark.slow
def test_a_backend_with_a_dialect_has_tensors(monkeypatch):
    """The dialect is a class, here OpenCL's; models and their gradients run on the backend's device."""
    require_backend("opencl")
    from accelerant.runtime.providers.opencl import OpenclProvider
    from accelerant.tensors.tensor import TENSOR_DEVICES

    class OtherProvider(OpenclProvider):
        name = "other"

    registry.register(OtherProvider)
    monkeypatch.setitem(TENSOR_DEVICES, "other", ("accelerant.tensors.opencl", "OpenclTensors"))
    try:
        model, x = torch.nn.Linear(6, 3), torch.randn(4, 6)
        wanted = torch.softmax(model(x), -1).square().sum()
        (gradient,) = torch.autograd.grad(wanted, [model.weight])
        model = accelerant.to(model, "other")
        found = torch.softmax(model(accelerant.to(x, "other")), -1).square().sum()
        found.backward()
        torch.testing.assert_close(accelerant.to(found, "cpu"), wanted)
        torch.testing.assert_close(accelerant.to(model.weight.grad, "cpu"), gradient)
    finally:
        registry.unregister("other")
