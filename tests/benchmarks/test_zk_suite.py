"""The suite zk on a CPU with small sizes, its inputs, and the multiplier's microbenchmark without a GPU."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from accelerant import zk
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.curve.weierstrass import multiply
from accelerant.algebra.field.parameters import field_of
from accelerant.algebra.ntt.plan import bit_reversed
from accelerant.bench.record import BenchmarkRecord, Environment
from accelerant.bench.suite import SuiteRun, run_suite
from accelerant.bench.timer import Timing
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime import registry
from accelerant.runtime.compilation.cuda import compile_cuda
from accelerant.runtime.provider import ComputeDevice
from benchmarks import zk as suite
from benchmarks import zk_first_call, zk_inputs, zk_multiplier
from benchmarks.zk import CPU_CASES, GPU_CASES, ZkCase, ZkSuite
from refusals import assert_raises

sys.path.append(str(Path(__file__).parents[1] / "algebra"))
import vectors

SMALL = (
    ZkCase("field_mul", "bn254_fr", 6, 1.0, 2.0, peers="another 3 ms"),
    ZkCase("ntt", "goldilocks", 6),
    ZkCase("msm", "bn254_g1", 6, 1e6, 1e6),
    ZkCase("pairing", "bn254"),
)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(suite, "CPU_CASES", SMALL)
    monkeypatch.setattr(suite, "_FIRST_CALLS", 1)


# --- the suite -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_every_case_is_measured_and_right(cpu, small):
    record = run_suite(ZkSuite(budget_s=0.0), cpu)
    assert [(row.op, row.case, row.runner) for row in record.rows] == [
        ("field_mul", "bn254_fr 2^6", "accelerant"),
        ("field_mul", "bn254_fr 2^6, kernel alone", "accelerant"),
        ("field_mul", "bn254_fr 2^6", "python (naive)"),
        ("ntt", "goldilocks 2^6", "accelerant"),
        ("ntt", "goldilocks 2^6", "python (naive)"),
        ("msm", "bn254_g1 2^6", "accelerant"),
        ("msm", "bn254_g1 2^6, points prepared", "accelerant"),
        ("msm", "bn254_g1 2^6, with multiples", "accelerant"),
        ("pairing", "bn254, product of 4", "accelerant"),
    ]
    assert all(0 < row.p20 <= row.p50 <= row.p80 for row in record.rows)
    mul, ntt, msm = (next(row for row in record.rows if row.op == op) for op in ("field_mul", "ntt", "msm"))
    assert mul.target is None
    assert record.rows[1].target in (1.0, 2.0)
    assert mul.speedup is None  # Python's integers are no peer
    assert mul.bytes == 3 * 32 * 64
    assert mul.note == f"{mul.p50 * 1e6 / 64:.3g} ns a field product; measured apart: another 3 ms"
    assert ntt.bytes == 2 * 8 * 64
    assert ntt.note == f"{ntt.p50 * 1e6 / (6 * 32):.3g} ns a field product"
    assert msm.reached
    assert ["with multiples" in row.reason for row in record.rows if row.op == "msm"] == [False, False, True]


@pytest.mark.parametrize(("name", "only", "said"), [
    ("ntt", "ntt gold", "ntt goldilocks 2^6: output 0 is"),
    ("msm", "msm", "msm bn254_g1 2^6: the sum is None, not"),
])  # fmt: skip
def test_a_wrong_answer_is_an_error(name, only, said, cpu, small, monkeypatch):
    zero = {"ntt": lambda x, **_: x - x, "msm": lambda s, p, *_, **__: np.zeros_like(p[0])}
    monkeypatch.setattr(suite, name, zero[name])
    record = BenchmarkRecord(Environment.of(cpu), ceilings={"copy GB/s": 1.0})
    with pytest.raises(AccelerantError, match=re.escape(said)):
        ZkSuite((only,), budget_s=0.0).measure(SuiteRun(cpu, record))
    assert [(row.case, row.p50) for row in record.rows] == [("failed", None)]


def test_one_wrong_output_among_all_is_found(cpu, small, monkeypatch):
    monkeypatch.setattr(suite, "_sampled", lambda n: [])
    monkeypatch.setattr(suite, "ntt", lambda x, **options: spoilt(zk_ntt(x, **options)))
    zk_ntt = sys.modules["accelerant.zk.multi_scalar"].ntt

    def spoilt(y):
        words = y.words.copy()
        words[-2] ^= np.uint64(1)
        return zk.FieldArray(y.field, y.space, words)

    record = BenchmarkRecord(Environment.of(cpu), ceilings={"copy GB/s": 1.0})
    with pytest.raises(AccelerantError, match="an output is not the one of the closed form"):
        ZkSuite(("ntt gold",), budget_s=0.0).measure(SuiteRun(cpu, record))


def test_a_product_that_is_wrong_is_found(cpu, small, monkeypatch):
    monkeypatch.setattr(zk.FieldArray, "__mul__", lambda x, y: x + y)
    record = BenchmarkRecord(Environment.of(cpu), ceilings={"copy GB/s": 1.0})
    with pytest.raises(AccelerantError, match="field_mul bn254_fr 2\\^6: product 0 is"):
        ZkSuite(("field_mul",), budget_s=0.0).measure(SuiteRun(cpu, record))


@pytest.mark.slow
def test_first_calls_are_made_in_new_processes_with_and_without_a_cache(cpu, small, monkeypatch):
    monkeypatch.setattr(suite, "CPU_CASES", (ZkCase("first call", "field_mul"),))
    record = run_suite(ZkSuite(budget_s=0.0), cpu)
    assert [(row.case, row.target) for row in record.rows] == [
        ("field_mul, cold cache", 3000.0),
        ("field_mul, second process, warm cache", 20.0),
    ]
    assert record.rows[1].p50 < record.rows[0].p50
    monkeypatch.setattr(suite, "zk_first_call", json)
    assert_raises(AccelerantError, "first call field_mul: ", lambda: run_suite(ZkSuite(budget_s=0.0), cpu))


def test_products_of_arrays_beside_bare_launches(cpu):
    record = BenchmarkRecord(Environment.of(cpu), ceilings={"copy GB/s": 1.0})
    suite._field_array(suite._ZkRun(ZkCase("field_array", "goldilocks", 4), SuiteRun(cpu, record), 0.0))
    array, bare = record.rows
    assert (array.case, bare.case) == ("goldilocks 2^4", "goldilocks 2^4, bare launches")
    assert array.target == bare.p50 / 0.95
    assert array.note == f"{bare.p50 / array.p50:.3f} of the speed of bare launches (asked: 0.95)"


@pytest.mark.parametrize("op", ["field_mul", "ntt", "msm"])
@pytest.mark.sample(3)
def test_the_first_calls_answers_are_checked(op, capsys, monkeypatch):
    zk_first_call.main(op, "cpu")
    assert json.loads(capsys.readouterr().out)["right"] is True
    call, right = zk_first_call._CALLS[op](lambda words: words)
    wrong = call()
    wrong[0] ^= 1
    assert right(wrong) is False


@pytest.mark.parametrize(("case", "device", "multiplies", "share", "target"), [
    (GPU_CASES[0], "NVIDIA H200", 0, "", 0.41),
    (GPU_CASES[2], "NVIDIA H200", 4 * 10**9, "50% of the carry-chain multiply rate; ", 3.8),
    (GPU_CASES[2], "NVIDIA L4", 8 * 10**9, "100% of the carry-chain multiply rate; ", None),
])  # fmt: skip
def test_on_a_gpu_arithmetic_is_compared_with_the_multipliers_rate(case, device, multiplies, share, target):
    device = ComputeDevice("cuda", 0, device, architecture="sm_90", torch_type="cuda")
    run = SuiteRun(device, BenchmarkRecord(Environment.of(device), ceilings={zk_multiplier.CARRY: 8.0}))
    this = suite._ZkRun(case, run, 0.0)
    row = this.noted(this.row().timed(Timing(0.9, 1.0, 1.1, 3)), multiplies, 1)
    assert row.note == (f"{share}measured apart: {case.peers}" if case.peers else "")
    assert row.target == target
    assert ZkSuite().chosen(gpu=True) == list(GPU_CASES)


def test_cases_are_chosen_by_parts_of_their_names():
    assert [case.key for case in ZkSuite(("MSM bls", "ntt goldilocks 2^2")).chosen(gpu=True)] == [
        "ntt goldilocks 2^20", "ntt goldilocks 2^24", "msm bls12_381_g1 2^20", "msm bls12_381_g1 2^22",
    ]  # fmt: skip
    for gpu, cases in ((False, CPU_CASES), (True, GPU_CASES)):
        assert ZkSuite().chosen(gpu) == list(cases)
        assert len({case.key for case in cases}) == len(cases)
    with pytest.raises(ConfigError, match="no case has 'stark' in its name; there are field_mul bn254_fr 2\\^14, ntt"):
        ZkSuite(("msm", "stark")).resolve(registry.find_device("cpu"))


@pytest.mark.slow
def test_the_command(tmp_path, capsys, small):
    folder = tmp_path / "run"
    arguments = ["--device", "cpu", "--only", "pairing", "--budget-seconds", "0", "--out", str(folder)]
    assert_raises(SystemExit, "0", run_command, ZkSuite, [*arguments, "--json"])
    assert [row["op"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["pairing"]
    assert_raises(SystemExit, "0", run_command, ZkSuite, [*arguments, "--only", "ntt gold", "--resume"])
    assert [row.op for row in BenchmarkRecord.load(folder / "record.json").rows] == ["pairing", "ntt", "ntt"]
    assert {each.name for each in folder.iterdir()} == {"record.json", "record.csv", "report.html", "rows.jsonl"}
    capsys.readouterr()
    assert_raises(SystemExit, "0", run_command, ZkSuite, ["--device", "cpu", "--list", "--only", "ntt"])
    assert capsys.readouterr().out.splitlines() == ["ntt goldilocks 2^6", "1 cases"]
    assert_raises(SystemExit, "2", run_command, ZkSuite, ["--device", "cpu", "--only", "stark"])
    assert "--only: no case has 'stark' in its name" in capsys.readouterr().err


# --- inputs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bn254_g1", "bls12_381_g1"])
def test_points_scalars_and_sums_are_those_of_the_known_answers(name):
    curve, n = zk.curve(name), 40
    parameters = curve_of(name)
    scalars = zk_inputs.msm_scalars(curve.scalar_field.parameters, 1 << 16)
    assert curve.scalar_field.decode(scalars[:n]) == vectors.msm_scalars(parameters, n)
    points = curve.decode(zk_inputs.msm_points(curve, n, None))
    assert points == [multiply(parameters, k, parameters.generator) for k in vectors.msm_multipliers(n)]
    for k in (14, 16):
        assert zk_inputs.msm_answer(curve, scalars[: 1 << k]) == vectors.MSM_ANSWERS[name, k]


@pytest.mark.parametrize("name", ["goldilocks", "babybear", "bls12_381_fr"])
@pytest.mark.parametrize("log_n", [1, 5])
def test_sequences_are_those_of_pythons_integers(name, log_n):
    field, n = zk.field(name), 1 << log_n
    p, w = field.modulus, field_of(name).root_of_unity(n)
    found = zk_inputs.geometric(field, p - 5, 7, log_n, "cpu").ints()
    assert found == [(p - 5) * pow(7, i, p) % p for i in range(n)]
    powers = zk_inputs.power_table(field, log_n, "cpu").ints()
    assert powers == [pow(w, bit_reversed(t, log_n), p) for t in range(n)]


# --- the multiplier --------------------------------------------------------------------------------------------------
def test_multiplies_are_counted_by_the_formulas():
    bn254, bls = field_of("bn254_fq"), field_of("bls12_381_fq")
    assert (zk_multiplier.product_multiplies(bn254), zk_multiplier.product_multiplies(bls)) == (136, 300)
    assert (zk_multiplier.square_multiplies(bn254), zk_multiplier.square_multiplies(bls)) == (108, 234)
    assert zk_multiplier.ntt_multiplies(field_of("bn254_fr"), 20) == 10 * 2**20 * 136
    g1, n = curve_of("bn254_g1"), 2**20
    windows, buckets = 16, 16 * 2**15  # of 16 bits
    products, squares = 8 * windows * n + 24 * buckets, 2 * windows * n + 4 * buckets
    assert zk_multiplier.msm_products(g1, n) == (products, squares)
    assert zk_multiplier.msm_multiplies(g1, n) == 136 * products + 108 * squares
    fixed = zk_multiplier.msm_multiplies(g1, n, precomputed=True)
    assert fixed < zk_multiplier.msm_multiplies(g1, n)
    n, r = 2**22, 2  # affine rounds of a device
    entries, buckets = 16 * n, 16 * 2**15
    units = entries // 2**r + buckets * (2**r - 1) // 2 ** (r + 1)
    products = 5 * (entries - units) + 8 * units + 24 * buckets, (entries - units) + 2 * units + 4 * buckets
    assert zk_multiplier.msm_products(curve_of("bls12_381_g1"), n) == products


def interpreted(text, operands):
    """What a statement of PTX leaves in its operands: integers of 64 or 32 bits by their numbers."""
    text = re.sub(r"\.reg[^;]*;", "", text.strip("{}"))
    registers, carry = dict(operands), 0

    def value(name):
        return registers[name]

    for line in filter(None, (each.strip() for each in text.split(";"))):
        name, _, rest = line.partition(" ")
        words = [word.strip(" {}") for word in rest.split(",")]
        if name == "mov.b64":
            if rest.strip().startswith("{"):
                low, high, source = words
                registers[low], registers[high] = value(source) % 2**32, value(source) >> 32
            else:
                target, low, high = words
                registers[target] = value(low) | value(high) << 32
            continue
        kind, part, *_ = name.split(".")
        target, *sources = words
        x, y = value(sources[0]), value(sources[1])
        if kind.startswith("mad"):
            product = x * y
            total = (product % 2**32 if part == "lo" else product >> 32) + value(sources[2])
        else:
            total = x + y
        total += carry * kind.endswith("c")
        registers[target] = total % 2**32
        if ".cc" in name:
            carry = total >> 32
    return registers


def test_the_kernels_statements_do_what_pythons_integers_do():
    thread, rounds, count = 1000003, 3, zk_multiplier._SUMS
    x, step = zk_multiplier._factors(thread)
    sums, chains = [0] * count, [[0] * count, [0] * count]
    for i in range(1, 2 * rounds + 1):
        y = (thread + i * step) % 2**32
        if i <= rounds:
            for k in range(count):
                sums[k] = interpreted(zk_multiplier.wide_text(), {"%0": sums[k], "%1": x[k], "%2": y})["%0"]
        state = chains[(i - 1) % 2]
        numbered = enumerate([*state, *x, y])
        found = interpreted(zk_multiplier.chain_text(), {f"%{k}": value for k, value in numbered})
        chains[(i - 1) % 2] = [found[f"%{k}"] for k in range(count)]
    assert zk_multiplier.wide_state(thread, rounds) == np.bitwise_xor.reduce(np.array(sums, np.uint64))
    flat = np.array(chains, np.uint64).reshape(-1)
    assert zk_multiplier.chain_state(thread, rounds) == np.bitwise_xor.reduce(flat)


def test_the_kernels_fit_the_registers():
    pytest.importorskip("cuda.core")
    binary = compile_cuda(zk_multiplier.multiplier_source(), "sm_90a")
    assert set(binary.resources) == {"multiply_wide", "multiply_carry"}
    for resources in binary.resources.values():
        assert resources.spill_bytes == 0
        assert resources.registers <= 64  # four blocks of 256 threads have room


class Interpreting:
    """A provider whose launches leave what the kernels would, for the threads that are looked at."""

    def __init__(self, states):
        self.states, self.launched = states, []

    def compile(self, source, *, entry, device):
        assert entry in source.entries
        return entry

    def launch(self, kernel, grid, block, args):
        out, rounds = args
        assert grid[0] * block[0] == len(out) == 2 * 16 * 256
        self.launched.append((kernel, rounds))
        if rounds < 10:
            for thread in (0, 1, 259, len(out) - 1):
                out[thread] = int(np.uint64(self.states[kernel](thread, rounds)).view(np.int64))


def test_rates_are_of_kernels_whose_answers_were_compared(monkeypatch):
    states = {"multiply_wide": zk_multiplier.wide_state, "multiply_carry": zk_multiplier.chain_state}
    device = ComputeDevice("cpu", 0, "imitated", properties={"multiprocessors": 2}, torch_type="cpu")
    provider = Interpreting(states)
    monkeypatch.setattr(zk_multiplier.registry, "create", lambda backend: provider)
    monkeypatch.setattr(zk_multiplier, "time_ms", lambda call, *_, **__: call() or Timing(1.0, 2.0, 3.0, 3))
    rates = zk_multiplier.measure_multiplier(device)
    threads = 2 * 16 * 256
    assert rates == {zk_multiplier.WIDE: threads * 8 * 8192 / 2e9, zk_multiplier.CARRY: threads * 16 * 8192 / 2e9}
    assert provider.launched[1::2] == [("multiply_wide", 8192), ("multiply_carry", 8192)]
    states["multiply_carry"] = zk_multiplier.wide_state
    assert_raises(AccelerantError, "multiply_carry: thread 0 gave 0x", zk_multiplier.measure_multiplier, device)


@pytest.mark.gpu
def test_the_rates_are_those_of_a_gpu():
    rates = zk_multiplier.measure_multiplier(registry.find_device("cuda"), budget_s=0.05)
    assert set(rates) == {zk_multiplier.WIDE, zk_multiplier.CARRY}
    assert rates[zk_multiplier.WIDE] >= 0.9 * rates[zk_multiplier.CARRY] > 0


# --- sizes, and the CPU column ---------------------------------------------------------------------------------------
def test_sizes_replace_those_of_the_chosen_cases(cpu):
    chosen = ZkSuite(only=("msm", "goldilocks"), size=("2^4..2^5",)).resolve(cpu).chosen(False)
    assert [case.key for case in chosen] == [
        "ntt goldilocks 2^4", "ntt goldilocks 2^5", "msm bn254_g1 2^4", "msm bn254_g1 2^5",
    ]  # fmt: skip
    assert all(case.target_ms is None and not case.peers for case in chosen)
    for size in ("3", "2^4x2", "1"):
        with pytest.raises(ConfigError, match="wanted powers of two from"):
            ZkSuite(size=(size,)).resolve(cpu)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in SMALL if case.op != "pairing"], ids=lambda case: case.op)
def test_the_cpu_column_is_scaled_from_fewer_and_names_the_rows_of_the_device(case, cpu, monkeypatch):
    monkeypatch.setattr(suite, "_COLUMN_LOG_N", 5)
    column = suite._on_cpu(case, SuiteRun(cpu, BenchmarkRecord(Environment.of(cpu))))
    assert (case.op, case.name) in column
    assert all(ms > 0 and note.endswith(", scaled from 2^5") for ms, note in column.values())
    run = SuiteRun(cpu, BenchmarkRecord(Environment.of(cpu)))
    suite._MEASURES[case.op](suite._ZkRun(case, run, 0.0, column=True))
    assert all(row.runner == "accelerant" and row.operations > 0 and row.gop_s > 0 for row in run.record.rows)
