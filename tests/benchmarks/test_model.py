"""The suites model, presets and noise: small ones for real, large ones predicted and refused."""

import json

import numpy as np
import pytest
import torch

from accelerant.bench import BenchmarkRecord, Environment
from accelerant.bench.suite import SuiteRun, run_suite
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, ConfigError
from accelerant.nn import GPT, GPTConfig
from accelerant.privacy.he import bfv, paillier
from accelerant.runtime import registry
from accelerant.runtime.memory.peak import ModelStep, PeakPrediction, measure_step
from benchmarks import model, noise
from benchmarks.he import HeSuite
from benchmarks.model import MODELS, ModelSuite, predict_model
from benchmarks.noise import NoiseSuite
from benchmarks.presets import PresetsSuite
from refusals import assert_raises
from requirements import require_module


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(MODELS, "0.5M", GPTConfig(64, 8, 1, 2, 16))
    monkeypatch.setattr(SuiteRun, "require_ceiling", lambda self, kind, budget_s=0.0: None)


@pytest.mark.parametrize("name", MODELS)
def test_models_have_about_the_parameters_of_their_names(name):
    with torch.device("meta"):
        count = GPT(MODELS[name]).parameter_count()
    number, unit = float(name[:-1]), {"M": 1e6, "B": 1e9}[name[-1]]
    assert count == pytest.approx(number * unit, rel=0.15)


@pytest.mark.slow
def test_a_model_that_is_not_allocated_is_predicted_as_one_that_is():
    config, where = GPTConfig(64, 8, 2, 2, 32), torch.device("cpu")
    tokens = torch.zeros(3, 8, dtype=torch.int64)
    measured = measure_step(ModelStep(GPT(config), GPT.loss, True), (tokens, tokens), where, model._optimizer)
    assert predict_model(config, 3, where).total == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
def test_a_model_is_measured_by_phases_and_as_a_whole(cpu, small):
    suite = ModelSuite(parameters=("0.5M",), batch=2, budget_s=0.0).resolve(cpu)
    forward, backward, update, step = rows = run_suite(suite, cpu).rows
    assert [row.case.split()[-1] for row in rows] == ["forward", "backward", "update", "step"]
    assert all(row.op == "gpt 0.5M" and row.wall_ms == row.p50 > 0 and suite.covers(row) for row in rows)
    assert forward.flops + backward.flops == step.flops
    assert step.peak_bytes > 0
    assert "parameters" in step.note
    assert "predicted" in step.note
    assert update.flops == 0


def test_a_model_that_does_not_fit_is_refused_before_it_is_allocated(cpu, small, monkeypatch):
    monkeypatch.setattr(model, "Steps", lambda *_: pytest.fail("the model was allocated"))
    predicted = PeakPrediction(0, 0, 0, 0, 0, 0, total=1 << 60, phase="backward")
    monkeypatch.setattr(model, "predict_model", lambda *_: predicted)
    (row,) = run_suite(ModelSuite(parameters=("0.5M",)).resolve(cpu), cpu).rows
    assert row.p50 is None
    assert row.lacked_memory
    assert "needs 1073741824.0 GiB by prediction" in row.note


@pytest.mark.slow
def test_a_tiny_net_trains_on_the_cpu_and_a_sentence_says_that_there_is_no_gpu(capsys):
    with pytest.raises(SystemExit) as exit_:
        run_command(PresetsSuite, ["--against", "cpu", "--device", "cpu", "--budget-seconds", "0", "--json"])
    assert not exit_.value.code
    table = json.loads(capsys.readouterr().out)
    (row,) = table["rows"]
    assert (row["op"], row["runner"]) == ("train tiny", "accelerant")
    assert table["notes"] == ["this run has no GPU that torch sees: the CPU alone was measured"]
    first, last = row["note"].split("losses ")[1].split(" to ")
    assert float(last) < float(first)


@pytest.mark.gpu
def test_a_gpu_trains_as_the_cpu_does():
    record = run_suite(PresetsSuite(budget_s=0.1), registry.find_device("cuda"))
    assert [row.runner for row in record.rows] == ["accelerant", "cpu"]
    assert record.rows[0].speedup > 0


@pytest.mark.gpu
def test_a_models_memory_on_a_gpu_is_near_its_prediction():
    gpu = registry.find_device("cuda")
    suite = ModelSuite(parameters=("14M",), batch=4, budget_s=0.1).resolve(gpu)
    *phases, step = run_suite(suite, gpu).rows
    assert [row.case.split()[-1] for row in phases] == ["forward", "backward", "update"]
    assert all(row.wall_ms for row in (*phases, step))
    assert step.peak_bytes > 3 * 4 * 14e6
    predicted = predict_model(MODELS["14M"], 4, torch.device(gpu.torch_device)).total
    assert step.peak_bytes < 2 * predicted


@pytest.mark.parametrize(("suite", "message"), [
    (ModelSuite(parameters=("2B",)), "no size '2B'; there are 0.5M"),
    (PresetsSuite(preset="huge"), "no preset 'huge'"),
    (PresetsSuite(against=("gpu",)), "no opponent 'gpu'; there are cpu"),
    (NoiseSuite(draws="many"), "wanted 1 to 2.45 draws"),
    (NoiseSuite(draws="0"), "got '0'"),
    (NoiseSuite(draws="1e99"), "got '1e99'"),
])  # fmt: skip
def test_wrong_options_are_refused(suite, message, cpu):
    assert_raises(ConfigError, message, lambda: suite.resolve(cpu))


# --- noise -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "count"), [("1e9", 10**9), ("2^28", 2**28), ("1,000", 1000), ("7", 7)])
def test_numbers_of_draws(text, count, cpu):
    assert NoiseSuite(draws=text).resolve(cpu).draws == str(count)


def test_more_draws_than_a_chunk_are_made_in_the_same_memory(cpu, monkeypatch):
    monkeypatch.setattr(noise, "_CPU_CHUNK", 4096)
    sizes = []
    monkeypatch.setattr(noise, "noise_calls", lambda n, device: [
        noise.NoiseCall("noise", "fill", "device", "fill_", lambda x: sizes.append((x.numel(), x.data_ptr())), 4 * n)
    ])  # fmt: skip
    run = SuiteRun(cpu, BenchmarkRecord(Environment.of(cpu)))
    noise.measure_noise(10_000, 0.0, run, suite="noise")
    assert [size for size, _ in sizes] == [4096, 4096, 4096, 1808]
    assert len({address for _, address in sizes}) == 1
    (row,) = run.record.rows
    assert (row.case, row.bytes) == ("10,000 fill", 40_000)
    assert row.timing.startswith("3 chunks of 2^12 in ")
    assert len(row.samples) == 2  # of the whole chunks


def test_kinds_of_noise_are_cases_and_are_checked(cpu, monkeypatch):
    suite = NoiseSuite(draws="2^12", budget_s=0.0).resolve(cpu)
    record = BenchmarkRecord(Environment.of(cpu), {"copy GB/s": 1.0})
    suite.measure(SuiteRun(cpu, record))
    assert [(row.case, row.runner) for row in record.rows][:3] == [
        ("2^12 secure", "accelerant"), ("2^12 Philox", "accelerant"), ("2^12 Philox", "torch"),
    ]  # fmt: skip
    assert all(suite.covers(row) and row.wall_ms for row in record.rows)
    column = suite.cases(SuiteRun(cpu, record))[0].on_cpu(SuiteRun(cpu, BenchmarkRecord(Environment.of(cpu))))
    assert column["noise", "2^12 secure"][0] > 0
    monkeypatch.setattr(noise, "_STD", 0.5)
    monkeypatch.setattr(noise, "noise_calls", lambda n, device: [
        noise.NoiseCall("noise", "secure", "accelerant", "wide", lambda x: x.normal_(), 8 * n)
    ])  # fmt: skip
    with pytest.raises(AccelerantError, match="wide: 4096 draws of deviation"):
        noise.measure_noise(4096, 0.0, SuiteRun(cpu, record))


# --- homomorphic encryption ------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_paillier_is_checked_and_compared_with_phe(cpu, monkeypatch):
    require_module("gmpy2", "privacy")
    require_module("phe")
    real = paillier.keygen
    monkeypatch.setattr(paillier, "keygen", lambda bits: real(1024, insecure=True))
    record = run_suite(HeSuite(bits=("2048",), slots=(), values=2, budget_s=0.0), cpu)
    ours = {row.op: row for row in record.rows if row.runner == "accelerant"}
    assert set(ours) == {"encrypt", "encrypt, fixed base", "encrypt, private key", "add", "decrypt"}
    assert all(row.p50 and row.speedup and row.target_x == 1.0 and "values/s" in row.note for row in ours.values())
    monkeypatch.setattr(paillier.PrivateKey, "decrypt", lambda key, c: torch.zeros(c.shape))
    with pytest.raises(AccelerantError, match="decrypted result is wrong"):
        run_suite(HeSuite(bits=("2048",), slots=(), values=2, budget_s=0.0), cpu)


@pytest.mark.slow
def test_bfv_is_checked_and_compared_with_tenseal(cpu, monkeypatch):
    require_module("tenseal")
    suite = HeSuite(bits=(), slots=("4096",), budget_s=0.0)
    ours = {row.op: row for row in run_suite(suite, cpu).rows if row.runner == "accelerant"}
    assert set(ours) == {f"bfv {op}" for op in ("encrypt", "add", "multiply", "rotate", "decrypt")}
    assert all(row.p50 and (row.speedup or op == "bfv rotate") for op, row in ours.items())
    monkeypatch.setattr(bfv.PrivateKey, "decrypt", lambda key, c: np.zeros(c.shape, int))
    with pytest.raises(
        AccelerantError, match="bfv encrypt of accelerant with 4096 slots: the decrypted result is wrong"
    ):
        run_suite(suite, cpu)


@pytest.mark.parametrize("bits", ["1024", "2049", "x", ""])
def test_sizes_of_paillier_keys_are_checked(bits, cpu):
    assert_raises(ConfigError, "--bits: wanted even numbers", lambda: HeSuite(bits=(bits,)).resolve(cpu))
    with pytest.raises(ConfigError, match="--slots: wanted 4096, 8192, 16384 or 32768, got"):
        HeSuite(slots=(bits,)).resolve(cpu)
