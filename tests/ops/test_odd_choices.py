"""What runs out of the box on an H200 at odd shapes: no race, the shipped table, each op's own rules."""

import importlib

import pytest
import torch

from accelerant.ops import _launch
from accelerant.runtime import registry
from accelerant.runtime.dispatch import Case, operation, operations, race

softmax = importlib.import_module("accelerant.ops.softmax")

DEVICE = torch.device("cuda", 0)
SOFTMAX = [f"{name}_{way}" for name in ("softmax", "log_softmax") for way in ("fwd", "bwd")]


@pytest.fixture(autouse=True)
def _h200(monkeypatch, tmp_path):
    """A device of that name, with its multiprocessors, and no local results."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(softmax, "multiprocessors", lambda device: 132)
    monkeypatch.setattr("accelerant.runtime.compilation.triton._version", lambda: "3.6.0")
    monkeypatch.setattr(race, "model_of", lambda device: "NVIDIA H200")
    store = race.Choices(tmp_path)
    monkeypatch.setattr(operation, "choices", lambda: store)
    cpu = registry.create("cpu")
    monkeypatch.setattr(registry, "provider_of", lambda device: cpu)


def chosen(op, shape, *options, dtype=torch.bfloat16):
    """The decision, and why others refused."""
    case = Case(DEVICE, dtype, shape, options)
    refusals = operations()[op].refusals(case)
    decision = operations()[op]._choose(case, {}, ()).decision
    return decision, {each.name: why for each, why in refusals if why}


@pytest.mark.parametrize("op", SOFTMAX)
@pytest.mark.parametrize(("shape", "options", "why"), [
    ((1_000_003, 3), (), "rows of 3 elements"),
    ((7, 8), (), "rows of 8 elements"),
    ((1, 7001, 3), ("dim 1",), "1 programs for 3 columns 7001 long"),
    ((5, 1000, 2, 4), ("dim 1",), "5 programs for 8 columns 1000 long"),
], ids=str)  # fmt: skip
def test_softmax_is_torchs(op, shape, options, why):
    choice, refused = chosen(op, shape, *options)
    assert choice.implementation == "torch"
    assert refused["triton"].startswith(why)


@pytest.mark.sample(5, 3)
@pytest.mark.parametrize("op", SOFTMAX)
@pytest.mark.parametrize(("shape", "options"), [
    ((1_000_003, 9), ()), ((65536, 768), ()), ((0, 3), ()), ((3, 1_000_003), ()), ((131, 50257), ()),
    ((265, 50257), ()), ((257, 16384), ()), ((129, 1025, 130), ("dim 1",)), ((1, 70001, 3), ("dim 1",)),
    ((132, 7001, 3), ("dim 1",)), ((1, 7001, 9), ("dim 1",)), ((1, 256, 3), ("dim 1",)),
], ids=str)  # fmt: skip
def test_softmax_is_ours(op, shape, options):
    choice, refused = chosen(op, shape, *options)
    assert choice.implementation == "triton"
    assert not refused


@pytest.mark.parametrize("M", [132, 257, 264])
def test_softmax_of_some_wide_rows(M):
    """One program a row from a row a multiprocessor on: the gradient of softmax is ahead there, the others behind."""
    for op in SOFTMAX:
        choice, refused = chosen(op, (M, 50257))
        if op == "softmax_bwd":
            assert choice.own
        else:
            assert choice.implementation == "torch"
            assert f"{M} rows of 50257 elements" in refused["triton"]


def test_softmax_keeps_what_the_table_says():
    choice, _ = chosen("softmax_fwd", (16384, 4096))
    assert choice.own
    assert "shipped table for NVIDIA H200" in choice.reason


@pytest.mark.parametrize("M", [1, 3, 100, 131])
@pytest.mark.parametrize("N", [16385, 50257, 1_000_003, 2**31 + 5])
def test_few_long_rows_are_shared(M, N, monkeypatch):
    monkeypatch.setattr(_launch, "multiprocessors", lambda device: 132)
    parts, span = _launch.split_rows(M, N, 4096, DEVICE)
    assert span % 4096 == 0
    assert (parts - 1) * span < N <= parts * span
    assert M * parts >= min(132, M * 5)
    assert parts <= 4 * 132
    assert _launch.split_rows(132, N, 4096, DEVICE)[0] == 1


def test_sum_of_short_rows_is_torchs():
    choice, refused = chosen("add_bwd", (1_000_003, 3), (3,))
    assert choice.implementation == "torch"
    assert "rows of 3 elements" in refused["triton"]
    for shape in ((1_000_003, 9), (3, 1_000_003)):
        assert chosen("add_bwd", shape, shape[1:])[0].own
    assert chosen("add_bwd", (5, 3), (1, 3))[0].implementation == "torch"
    assert chosen("mul_bwd", (1_000_003, 3), "row")[0].own


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_linear_gelu_of_one_row(approximate):
    choice, refused = chosen("linear_gelu_fwd", (1, 4096, 4096), approximate, "", "keep")
    assert choice.implementation == "torch"
    assert "one row" in refused["hopper"]
    assert "one row" in refused["triton"]
    assert chosen("linear_gelu_fwd", (2, 4096, 4096), approximate, "", "keep")[0].implementation == "hopper"


def test_linear_gelu_of_unaligned_rows():
    choice, refused = chosen("linear_gelu_fwd", (257, 999, 1111), "tanh", "bias", "")
    assert choice.implementation == "torch"
    assert all("rows of 1111 elements" in refused[name] for name in ("hopper", "triton", "cublaslt"))


@pytest.mark.parametrize(("op", "shape", "options"), [
    ("quantize_int8_fwd", (3, 1_000_003), ()),
    ("embedding_bwd", (1_000_003, 65), (torch.int64, torch.Size((3,)))),
    ("embedding_bwd", (1001, 129), (torch.int64, torch.Size((65537,)))),
])  # fmt: skip
def test_others_are_ours(op, shape, options):
    """Whose kernels share long rows, and do not sort few tokens."""
    assert chosen(op, shape, *options)[0].own


@pytest.mark.parametrize("op", [*SOFTMAX, "linear_gelu_fwd"])
def test_the_interpreter_runs_every_shape(op, interpreted):
    """The rules are a GPU's."""
    shape, options = ((1, 8, 8), ("none", "", "")) if op == "linear_gelu_fwd" else ((3, 3), ())
    case = Case(torch.device("cpu"), torch.float32, shape, options)
    assert "triton" in {each.name for each in operations()[op].candidates(case)}
