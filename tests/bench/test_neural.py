"""The neural suite: every op has its subject, sizes of a sweep, peers that are absent, the CSV and the roofline."""

import csv
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import accelerant.ops
from accelerant.bench import neural, neural_cases, subjects, suites
from accelerant.bench.neural import NeuralSuite
from accelerant.bench.neural_cases import CaseWork, OpCase, Oracle, _relative, _upstream, leaves_of
from accelerant.bench.record import NAIVE, NUMPY, OWN, UNFUSED, BenchmarkRecord, Environment, Journal, Row
from accelerant.bench.report import build_report, roofline
from accelerant.bench.suite import SuiteRun, measure_cases
from accelerant.bench.suites import groups_of, precompile
from accelerant.bench.timer import rotated_ms, time_in_turns
from accelerant.errors import AccelerantError, ConfigError, FormatError, UnsupportedCase
from accelerant.ops.registry import Benchmark, Indices, SampleInput, public_op
from accelerant.runtime import registry
from clock import Clock
from refusals import assert_raises

CEILINGS = {"copy GB/s": 10.0, "matmul TFLOP/s": 1.0}
LARGE_CEILINGS = {"copy GB/s": 1000.0, "matmul TFLOP/s": 10.0}


def environment():
    return Environment.of(registry.find_device("cpu"))


def test_every_op_has_a_subject():
    assert set(accelerant.ops.__all__) <= set(subjects.OPS)


def test_an_unknown_peer_is_refused():
    with pytest.raises(ConfigError, match=r"no peer 'torhc'; there are torch, compile.*benchmarks\.neural"):
        NeuralSuite(against=("torch", "torhc")).resolve(registry.find_device("cpu"))


# --- the plan --------------------------------------------------------------------------------------------------------
def planned(*names, **options):
    options = {"against": ("torch", "compile", "liger"), "budget_s": 0.1, "gpu": True, **options}
    return neural_cases.plan(names, **options)


def test_the_first_dtype_has_all_peers_and_a_further_16_bit_one_the_libraries():
    tables = planned("softmax", dtypes=(torch.bfloat16, torch.float16))
    assert [each.against for each in tables] == [("torch", "compile", "liger"), ("torch", "liger")]
    assert planned("softmax", dtypes=(torch.float32,))[0].against == ("torch", "compile", "liger")


def test_a_sweep_has_odd_sizes_and_both_ends():
    sizes = neural_cases.sweep_sizes()
    assert (sizes[0], sizes[-1]) == (2**10, 2**28)
    assert sum(size % 2 for size in sizes) >= 5
    assert max(neural_cases.sweep_sizes(12)) == 2**12


def test_a_case_of_another_size_keeps_its_rows():
    sample = SampleInput("loss", ((64, 16), Indices((64,), 16)))
    found = neural_cases._resized(Benchmark(sample, torch.float32), 128)
    assert found.sample.shapes == ((8, 16), (8,))
    odd = neural_cases._resized(Benchmark(SampleInput("norm", ((64, 16), (16,), None)), torch.float32), 127)
    assert odd is None or odd.sample.shapes == ((1, 127), (127,), None)
    assert neural_cases._resized(Benchmark(SampleInput("product", ((64, 16), (16, 8))), torch.float32), 128) is None


def test_a_row_that_is_cut_short_has_fewer_classes():
    found = neural_cases._resized(Benchmark(SampleInput("loss", ((64, 300), Indices((64,), 300))), torch.float32), 128)
    assert found.sample.shapes == ((1, 128), (1,))
    assert found.sample.arguments[1].high == 128
    kept = neural_cases._resized(Benchmark(SampleInput("loss", ((64, 300), Indices((64,), 300))), torch.float32), 1024)
    assert kept.sample.shapes == ((3, 300), (3,))


def test_the_tables_come_first_in_their_own_dtype_with_all_peers():
    found = planned("gelu", "softmax", dtypes=(torch.bfloat16, torch.float32), odd=True, sweep=(2**14, 2**14 - 1))
    parts = [(each.part, each.dtype) for each in found]
    order = [("", torch.bfloat16), ("odd", torch.bfloat16), ("", torch.float32), ("sweep", torch.bfloat16)]
    assert list(dict.fromkeys(parts)) == order
    assert parts == sorted(parts, key=order.index)
    assert (found[0].dtype, found[0].deterministic, found[0].race) == (torch.bfloat16, True, True)
    tables = [each for each in found if each.part == ""]
    assert {each.against for each in tables if each.dtype == torch.bfloat16} == {("torch", "compile", "liger")}
    assert {each.against for each in tables if each.dtype == torch.float32} == {("torch",)}
    assert all(each.budget_s < 0.1 for each in found if each.dtype == torch.float32 or each.part)
    assert {each.against for each in found if each.part == "odd"} == {("torch",)}
    sweep = [each for each in found if each.part == "sweep"]
    assert {each.against for each in sweep} == {("torch", "compile"), ("torch",)}
    assert len({each.key for each in found}) == len(found)
    assert all(each.estimate_s > 0 for each in found)


def test_without_the_tables_the_other_parts_are_the_same():
    options = {"dtypes": (torch.bfloat16, torch.float32), "odd": True, "sweep": (2**14,)}
    whole, rest = planned("gelu", "softmax", **options), planned("gelu", "softmax", **options, tables=False)
    assert rest == [each for each in whole if each.part]
    assert {each.part for each in rest} == {"odd", "sweep"}


def test_what_names_something_to_reach_comes_first_in_whatever_dtype():
    found = planned(dtypes=(torch.bfloat16, torch.float32))
    aims = [neural_cases.has_target(each.benchmark) and each.dtype == each.benchmark.dtype for each in found]
    assert sum(aims) > 10
    assert aims == sorted(aims, reverse=True)
    assert torch.float32 in {each.dtype for each in found[: sum(aims)]}  # attention's memory


def test_a_cpu_has_each_op_with_fewer_rows_and_whole_weights():
    found = {each.op: each for each in reversed(planned(gpu=False))}
    assert set(found) == set(subjects.OPS)
    assert all(neural_cases._elements(each.benchmark.sample) <= neural_cases._CPU_MOST for each in found.values())
    assert found["gelu"].benchmark.sample.shapes == ((256, 4096),)
    assert found["linear_gelu"].benchmark.sample.shapes[1] == (4096, 1024)
    assert found["attention"].benchmark.sample.shapes == ((1, 4, 256, 64),) * 3
    square = Benchmark(SampleInput("square", ((4096, 4096), (4096,), (4096,))), torch.bfloat16)
    assert neural_cases.for_cpu("layer_norm", square).sample.shapes == ((256, 4096), (4096,), (4096,))


def test_every_op_has_a_case_in_the_plan():
    assert {each.op for each in planned()} == set(subjects.OPS)
    assert {each.op for each in planned(odd=True) if each.part == "odd"} == set(subjects.OPS)


def test_odd_sizes_are_those_that_torch_takes_too():
    options = [each.benchmark.sample.options for each in planned("attention", odd=True) if each.part == "odd"]
    assert options
    assert all("window" not in each for each in options)


# --- sizes and baselines ---------------------------------------------------------------------------------------------
def test_sizes_are_numbers_powers_and_ranges_by_doubling():
    assert neural_cases.parse_sizes(["128..1000", "2^3x5", "4..8x1..2"]) == [
        (128,), (256,), (512,), (8, 5), (4, 1), (4, 2), (8, 1), (8, 2),
    ]  # fmt: skip
    for text in ("", "4x", "0", "8..4", "-1", "4.5", "2^", "9" * 13, "2..2^40x1..2^40"):
        assert_raises(ConfigError, "--size: ", neural_cases.parse_sizes, [text])


@pytest.mark.parametrize(("op", "size", "shapes"), [
    ("gelu", (64,), [(64, 64)]),
    ("add", (4, 8), [(4, 8), (4, 8)]),
    ("layer_norm", (4, 8), [(4, 8), (8,), (8,)]),
    ("matmul", (4, 8), [(4, 8), (8, 8)]),
    ("matmul", (4, 8, 3), [(4, 8), (8, 3)]),
    ("linear_gelu", (16,), [(16, 16), (16, 16), (16,)]),
    ("linear_cross_entropy", (4, 8, 16), [(4, 8), (16, 8), (4,)]),
    ("attention", (1, 2, 8, 4), [(1, 2, 8, 4)] * 3),
    ("attention", (1, 4, 8, 16, 2, 32), [(1, 4, 8, 16), (1, 2, 32, 16), (1, 2, 32, 16)]),
    ("rope", (1, 2, 8, 4), [(1, 2, 8, 4), (8, 2), (8, 2)]),
    ("conv2d", (2, 4, 8, 8), [(2, 4, 8, 8), (4, 4, 3, 3)]),
])  # fmt: skip
def test_the_other_arguments_follow_a_size_as_in_the_samples(op, size, shapes):
    assert [shape for shape in neural_cases.sized(op, size).sample.shapes if shape is not None] == shapes


def test_every_op_without_stated_positions_takes_a_size():
    stated = {"attention_decode", "attention_paged", "attention_varlen"}
    for op in set(subjects.OPS) - stated:
        rank = len(neural_cases.sized(op, (2,) if len(first_shape(op)) <= 2 else first_shape(op)).sample.shapes[0])
        assert rank == len(first_shape(op))
    assert neural_cases.sized("cross_entropy", (4, 8)).sample.arguments[1].high == 8
    probabilities, targets = neural_cases.sized("binary_cross_entropy", (4, 8)).sample.tensors(torch.float32)
    assert float(probabilities.min()) > 0
    assert float(targets.max()) < 1
    for op in stated:
        assert_raises(ConfigError, "state positions of its rows", neural_cases.sized, op, (4,))
    with pytest.raises(ConfigError, match="matmul takes 2 numbers, or 3, for example 8192x4096; got 1x2x3x4"):
        neural_cases.sized("matmul", (1, 2, 3, 4))


def first_shape(op):
    return neural_cases.benchmarks_of(op)[0].sample.shapes[0]


@pytest.mark.parametrize("op", sorted(subjects.COMPOSITIONS))
def test_baselines_compute_what_the_reference_does(op):
    size = {"attention": (1, 2, 6, 4), "rope": (1, 2, 6, 4)}.get(op, (6, 8))
    sample = neural_cases.sized(op, size).sample
    inputs = sample.tensors(torch.float32)
    options = {**sample.options, "causal": True} if op == "attention" else dict(sample.options)
    exact = neural_cases.as_tuple(public_op(op).reference(*[x.double() for x in inputs], **options))
    found = {
        "unfused": neural_cases.as_tuple(subjects.unfused(op)(*inputs, **options)),
        "numpy": neural_cases.as_tuple(subjects.numpy_call(op, inputs, options)()),
    }
    if op not in subjects.NOT_BY_ROWS:
        rows = subjects.naive(op, inputs, options)()
        found["naive"] = tuple(zip(*rows, strict=True)) if isinstance(rows[0], tuple) else (rows,)
    for results in found.values():
        for y, expected in zip(results, exact, strict=True):
            y = torch.tensor([list(row) for row in y]) if isinstance(y, (list, tuple)) else torch.as_tensor(y)
            torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_large_weights_are_not_made_into_lists():
    with pytest.raises(UnsupportedCase, match="weights of more than"):
        subjects.naive("matmul", [torch.zeros(2, 4096), torch.zeros(4096, 2048)], {})
    assert_raises(UnsupportedCase, "rows of a matrix", subjects.naive, "gelu", [torch.zeros(2, 3, 4)], {})


@pytest.mark.slow
def test_a_size_is_measured_whole_with_labelled_baselines():
    device = registry.find_device("cpu")
    suite = NeuralSuite(op=("softmax",), size=("5000x4",), budget_s=0.0).resolve(device)
    record = BenchmarkRecord(Environment.of(device), {"matmul TFLOP/s": 1.0, "copy GB/s": 1.0})
    suite.measure(SuiteRun(device, record))
    ours, *others = [row for row in record.rows if row.case == "5000x4 float32 dim -1 forward"]
    assert [row.runner for row in others] == ["torch", UNFUSED, NUMPY, NAIVE]
    assert all(row.p50 and row.error < 1e-5 and row.part == "size" for row in (ours, *others))
    assert ours.cold_ms > 0
    assert ours.peak_bytes == 5000 * 4 * 4
    assert others[1].peak_bytes > 2 * ours.peak_bytes
    assert suite.covers(ours)
    assert not suite.covers(replace(ours, case="50x4 float32 dim -1 forward"))
    record.conclude()
    assert record.rows[0].speedup == pytest.approx(others[0].p50 / ours.p50)


@pytest.mark.gpu
def test_scores_in_memory_take_more_of_it_than_fused_attention():
    gpu = registry.find_device("cuda")
    suite = NeuralSuite(op=("attention",), size=("1x4x1024x64",), budget_s=0.01, cpu=True).resolve(gpu)
    record = BenchmarkRecord(Environment.of(gpu), {"matmul TFLOP/s": 1.0, "copy GB/s": 1.0})
    suite.measure(SuiteRun(gpu, record))
    rows = {row.runner: row for row in record.rows if row.case.endswith(" forward")}
    assert set(rows) >= {"accelerant", "torch", UNFUSED, NUMPY}
    assert rows[UNFUSED].peak_bytes > 10 * rows["accelerant"].peak_bytes
    assert rows["accelerant"].cpu_ms > 0
    assert "one core" not in rows[NUMPY].note


@pytest.mark.parametrize(("options", "message"), [
    ({"size": ("8",)}, "the sizes of which op"),
    ({"op": ("gelu",), "size": ("2^20",)}, r"gelu 1048576 needs at least 16384.0 GiB; .* free"),
    ({"op": ("gelu",), "size": ("8", "x")}, "got 'x'"),
])  # fmt: skip
def test_a_size_that_cannot_be_measured_is_refused_before_anything_is_made(options, message):
    assert_raises(ConfigError, message, lambda: NeuralSuite(**options).resolve(registry.find_device("cpu")))


# --- results beside the reference ------------------------------------------------------------------------------------
def case_of(name, *arguments, **options):
    benchmark = Benchmark(SampleInput("x", arguments, options), torch.float32)
    return OpCase.of(name, benchmark, registry.find_device("cpu"), torch.float32)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_results_and_gradients_are_compared(direction):
    oracle = Oracle(case_of("silu", (8, 64)))
    error, wrong = oracle.wrong(accelerant.ops.silu, direction)
    assert error < 1e-5
    assert wrong == ""
    error, wrong = oracle.wrong(lambda x: torch.relu(x), direction)
    assert error > 0.05
    assert wrong.startswith("wrong: relative error")
    assert "allowed 0.002" in wrong


def test_a_right_result_with_a_wrong_gradient_is_wrong():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.relu(x)

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy * (ctx.saved_tensors[0] > 0)

    oracle = Oracle(case_of("relu", (8, 64)))
    assert oracle.wrong(Doubled.apply, "forward")[1] == ""
    assert "relative error 1 " in oracle.wrong(Doubled.apply, "backward")[1]
    assert oracle.wrong(lambda x: x * float("nan"), "forward")[0] == float("inf")


def test_gradients_are_asked_of_what_is_learned_only():
    rope = leaves_of("rope", case_of("rope", (1, 2, 8, 4), (8, 2), (8, 2)).inputs)
    assert [x.requires_grad for x in rope] == [True, False, False]
    weight = Indices((4, 8), 128, -127, torch.int8)
    quantized = leaves_of("linear_int8", case_of("linear_int8", (2, 8), weight, (4,), (4,)).inputs)
    assert [x.requires_grad for x in quantized] == [True, False, False, True]


def test_a_loss_that_writes_over_its_logits_is_compared_on_copies():
    case = case_of("cross_entropy", (8, 32), Indices((8,), 32), inplace_backward=True)
    before = case.inputs[0].clone()
    error, wrong = Oracle(case).wrong(accelerant.ops.cross_entropy, "both")
    assert wrong == ""
    assert error < 1e-4
    assert torch.equal(case.inputs[0], before)


def test_the_upstream_gradient_is_no_argument():
    """With dy = x the gradient of a norm is next to nothing, its weight's a sum of squares beyond float16's range."""
    case = case_of("layer_norm", (64, 16), (16,), (16,))
    for x in case.inputs:
        for seed in range(4):
            assert not torch.equal(_upstream(x, torch.float32, seed), x)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_sums_over_many_rows_stay_in_the_range_of_float16(op):
    weights = [(8,)] * (2 if op == "layer_norm" else 1)
    benchmark = Benchmark(SampleInput("x", ((65536 + 8192, 8), *weights)), torch.float16)
    device = registry.find_device("cpu")
    drawn = benchmark.sample.tensors(torch.float16)
    case = OpCase(op, "x", tuple(drawn), {}, benchmark, False)
    assert case.device.type == device.torch_device
    assert Oracle(case).wrong(getattr(accelerant.ops, op), "backward")[1] == ""


def test_a_reference_of_attention_in_parts_is_the_whole(monkeypatch):
    q, k = (3, 4, 10, 8), (3, 2, 10, 8)
    case = case_of("attention", q, k, k, causal=True)
    for direction in ("forward", "backward"):
        whole = Oracle(case)._reference(direction)
        monkeypatch.setattr(neural_cases, "_MOST_SCORES", 1)
        parts = Oracle(case)._reference(direction)
        monkeypatch.undo()
        assert len(parts) == len(whole) == (1 if direction == "forward" else 3)
        for part, one in zip(parts, whole, strict=True):
            assert torch.allclose(part, one, rtol=1e-12, atol=1e-14)
        assert Oracle(case).wrong(accelerant.ops.attention, direction)[1] == ""


def test_a_cut_keeps_weights_whole_and_sizes_that_products_take(monkeypatch):
    monkeypatch.setattr(neural_cases, "_MOST_ELEMENTS", 300 * 256)
    weight = Indices((512, 256), 128, -127, torch.int8)
    oracle = Oracle(case_of("linear_int8", (512, 256), weight, (512,), None, dynamic=True))
    assert not oracle.whole
    assert [None if x is None else tuple(x.shape) for x in oracle.inputs] == [(128, 256), (512, 256), (512,), None]
    assert oracle.wrong(accelerant.ops.linear_int8, "forward")[1] == ""


def test_a_reference_without_memory_has_fewer_rows(monkeypatch):
    from accelerant.ops import norm as reference

    whole = reference.rms_norm_reference

    def lacking(x, *rest, **options):
        return whole(x, *rest, **options) if len(x) <= 64 else lacks_memory()

    monkeypatch.setattr(reference, "rms_norm_reference", lacking)
    oracle = Oracle(case_of("rms_norm", (256, 256), (256,)))
    assert oracle.whole
    assert oracle.wrong(accelerant.ops.rms_norm, "backward")[1] == ""
    assert [tuple(x.shape) for x in oracle.inputs] == [(64, 256), (256,)]
    assert not oracle.whole
    monkeypatch.undo()
    oracle = Oracle(case_of("rms_norm", (256, 256), (256,)))
    with pytest.raises(torch.OutOfMemoryError):  # a runner's own lack is its result, and cuts nothing for the others
        oracle.wrong(lacks_memory, "forward")
    assert oracle.whole


# --- measuring -------------------------------------------------------------------------------------------------------
def small(op, *arguments, **options):
    fields = {"against": ("torch",), "budget_s": 0.0, "dtype": torch.float32, "part": ""}
    benchmark = {name: options.pop(name) for name in ("rotated",) if name in options}
    bench = Benchmark(SampleInput("small", arguments, {}), torch.float32, **benchmark)
    return neural_cases.PlannedCase(op=op, benchmark=bench, **{**fields, **options})


def measure(record, cases, **options):
    run = SuiteRun(registry.find_device("cpu"), record, **options)
    measure_cases("neural", neural.neural_cases(cases, 0.0), run)


def measured(*cases, journal=None, **options):
    record = BenchmarkRecord(environment(), CEILINGS)
    measure(record, cases, journal=journal, **options)
    return record


def test_a_wrong_peer_has_a_row_without_a_time():
    rows = measured(small("relu", (4, 32), against=("liger",), makers={"liger": lambda: torch.sigmoid})).rows
    assert [(row.runner, row.wrong, row.p50 is None) for row in rows] == [
        ("accelerant", False, False), ("liger", True, True), ("accelerant", False, False), ("liger", True, True),
    ]  # fmt: skip
    assert all(row.error < 1e-6 for row in rows if row.runner == "accelerant")


def replace_relu(monkeypatch, function):
    """Let another function be the op that is measured."""

    def relu(x):
        return function(x)

    relu.__module__ = accelerant.ops.relu.__module__
    monkeypatch.setattr(accelerant.ops.elementwise, "relu", relu)


def test_ours_that_is_wrong_ends_the_run_after_the_other_cases(monkeypatch):
    replace_relu(monkeypatch, torch.sigmoid)
    record = BenchmarkRecord(environment(), CEILINGS)
    cases = [small("relu", (4, 32)), small("tanh", (4, 32))]
    assert_raises(AccelerantError, "relu 4x32 float32 forward: wrong: relative error", measure, record, cases)
    assert {row.op for row in record.rows} == {"relu", "tanh"}
    assert "wrong result" in record.table()


def test_a_run_that_goes_on_still_ends_as_the_cases_before_it_say(tmp_path, monkeypatch):
    path, cases = tmp_path / "rows.jsonl", [small("relu", (4, 32)), small("tanh", (4, 32))]
    record = BenchmarkRecord(environment(), CEILINGS)
    journal = Journal(path, record, resume=False)
    with monkeypatch.context() as patched:
        replace_relu(patched, torch.sigmoid)
        assert_raises(AccelerantError, "wrong: relative error", lambda: measure(record, cases[:1], journal=journal))
    again = BenchmarkRecord(environment())
    journal = Journal(path, again, resume=True)
    with pytest.raises(AccelerantError, match="relu 4x32 float32 forward: wrong: relative error"):
        measure(again, cases, journal=journal)
    assert {row.op for row in again.rows} == {"relu", "tanh"}


def lacks_memory(*args, **options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 TiB.")


def test_a_peer_without_memory_has_a_row_that_says_so():
    record = measured(small("relu", (4, 32), against=("torch", "liger"), makers={"liger": lambda: lacks_memory}))
    lacking = [row for row in record.rows if row.runner == "liger"]
    assert len(lacking) == 2
    assert all(row.lacked_memory and row.p50 is None and "7.00 TiB" in row.note for row in lacking)
    assert all(row.p50 for row in record.rows if row.runner != "liger")
    assert "out of memory" in record.table()


def test_ours_without_memory_is_a_loss_and_no_failure(monkeypatch, tmp_path):
    replace_relu(monkeypatch, lacks_memory)
    record = BenchmarkRecord(environment(), CEILINGS)
    journal = Journal(tmp_path / "rows.jsonl", record, resume=False)
    cases = [small("tanh", (4, 32)), small("relu", (4, 32))]
    measure(record, cases, journal=journal)
    record.conclude()
    rows = [row for row in record.rows if row.op == "relu"]
    assert {row.runner for row in rows} == {"accelerant", "torch"}
    assert all(row.lacked_memory for row in rows)  # what says how much work it is calls ours first
    assert record.ordered()[0].op == "relu"
    Journal(tmp_path / "rows.jsonl", again := BenchmarkRecord(environment()), resume=True)
    measure(again, [])  # a lack of memory is a result, no failure


def test_arguments_without_memory_leave_a_row_for_each_runner(monkeypatch):
    monkeypatch.setattr(neural.OpCase, "of", lacks_memory)
    case = small("softmax", (4, 32), against=("torch", "compile", "liger"), makers={"liger": lambda: torch.softmax})
    rows = measured(case).rows
    assert [row.runner for row in rows] == ["accelerant", "torch", "torch.compile", "liger"]
    assert all(row.lacked_memory for row in rows)


def test_a_size_of_the_sweep_and_of_a_table_are_two_cases():
    table = [Row("neural", "gelu", "16384x4096 bfloat16 forward", "accelerant", "own", p50=1.0, p20=1.0, p80=1.0)]
    table.append(replace(table[0], runner="torch", p50=2.0))
    sweep = [replace(row, part="sweep", p50=3.0) for row in table]
    record = BenchmarkRecord(environment(), {}, [*table, replace(sweep[1], p50=1.5), sweep[0]])
    record.conclude()
    assert [row.speedup for row in record.rows if row.runner == "accelerant"] == [2.0, 0.5]
    assert record.ordered()[0].part == "sweep"
    assert len({row.key for row in record.rows}) == 4


def test_what_is_compared_on_a_cpu_takes_turns(monkeypatch):
    monkeypatch.setattr("accelerant.bench.timer.time", clock := Clock())
    calls = []
    first, second = time_in_turns(
        [lambda: (calls.append("a"), clock.sleep(1e-5)), lambda: (calls.append("b"), clock.sleep(1e-3))]
    )
    assert first.p50_ms < second.p50_ms
    assert first.repeats == second.repeats >= 10
    turns = "".join(calls).replace("aa", "a")
    while "aa" in turns:
        turns = turns.replace("aa", "a")
    assert "abba" in turns  # each round begins with another


def test_a_rotated_case_says_so():
    each = small("relu", (4, 32), rotated=True)
    case = OpCase.of("relu", each.benchmark, registry.find_device("cpu"), torch.float32)
    bench, row = (
        neural._CaseRun(
            each, case, Oracle(case), SuiteRun(registry.find_device("cpu"), BenchmarkRecord(environment()))
        ),
        Row("neural", "relu", "x", "torch", ""),
    )
    for direction, how in (("forward", "64 copies in turn"), ("backward", "")):
        work = CaseWork(direction, 1, 0)
        timed = neural._timed(neural._checked(row, lambda: torch.relu, work, bench), work, bench)
        assert timed.timing == how
        assert timed.p50 > 0
    assert set(bench.run.clock.seconds) == {"first calls, races", "checks", "timed calls"}


def test_the_time_of_one_of_several_calls(monkeypatch):
    monkeypatch.setattr("accelerant.bench.timer.time", clock := Clock())
    timing, how = rotated_ms([lambda: clock.sleep(0.004)] * 4, torch.device("cpu"), budget_s=0.0)
    assert timing.p50_ms == pytest.approx(4, rel=1e-3)
    assert how == "4 copies in turn"


def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path):
    path = tmp_path / "rows.jsonl"
    cases = [small("relu", (4, 32)), small("tanh", (4, 32)), small("silu", (4, 32))]
    record = BenchmarkRecord(environment(), CEILINGS)
    measure(record, cases[:2], journal=Journal(path, record, resume=False))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    assert_raises(ConfigError, "--resume goes on with it", Journal, path, record, resume=False)
    again = BenchmarkRecord(environment())
    journal = Journal(path, again, resume=True)
    assert journal.done == {cases[0].key}
    assert again.ceilings == CEILINGS
    kept = list(again.rows)
    measure(again, cases, journal=journal)
    assert again.rows[: len(kept)] == kept
    assert [row.op for row in again.rows[::4]] == ["relu", "tanh", "silu"]
    assert any("continued" in note for note in again.notes)
    assert Journal(path, BenchmarkRecord(environment()), resume=True).done == {case.key for case in cases}


def test_another_devices_journal_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    record = BenchmarkRecord(replace(environment(), device="abacus"))
    Journal(path, record, resume=False).begin(record)
    with pytest.raises(FormatError, match="of a run with device 'abacus'"):
        Journal(path, BenchmarkRecord(environment()), resume=True)
    path.write_text("[]\n")
    assert_raises(FormatError, "is no journal", lambda: Journal(path, BenchmarkRecord(environment()), resume=True))


def test_a_limit_begins_no_further_case():
    record = measured(small("relu", (4, 32)), small("tanh", (4, 32)), until=time.monotonic())
    assert not record.rows
    assert "2 of 2 cases not measured" in record.notes[0]


def test_progress_counts_the_cases_and_a_note_says_where_the_time_went():
    said = []
    (note,) = measured(small("relu", (4, 32)), small("tanh", (4, 32)), progress=said.append).notes
    assert said[0].startswith("[1/2, about ")
    assert said[-1].startswith("[2/2, about ")
    assert note.startswith("2 cases took ")
    assert "timed calls" in note


@pytest.mark.slow
def test_cases_are_compiled_ahead_in_processes(tmp_path):
    said = []
    cases = groups_of([small("relu", (4, 32)), small("tanh", (4, 32))])
    assert precompile(cases, registry.find_device("cpu"), 1, limit_s=120.0, progress=said.append) == ""
    assert said[-1] == "precompiled: 2 of 2 groups of cases"
    late = precompile(cases, registry.find_device("cpu"), 1, limit_s=0.0)
    assert late == "2 of 2 groups of cases were not precompiled"


@pytest.mark.parametrize("name", suites._PRELOADED)
def test_what_compiling_processes_share_is_there(name):
    assert find_spec(name)  # multiprocessing's server process passes over what it does not find


# --- what is left ----------------------------------------------------------------------------------------------------
def rows():
    ours = Row("neural", "matmul", "8x8 forward", "accelerant", "torch (library)", p20=1.0, p50=2.0, p80=3.0,
               bytes=10**6, flops=10**9, ceiling="matmul", target_x=1.5, samples=(2.0, 2.5))  # fmt: skip
    return [ours, replace(ours, runner=OWN, implementation="triton (own)", p50=4.0, target_x=None),
            replace(ours, runner="torch", p50=3.0, target_x=None)]  # fmt: skip


def test_speed_is_aimed_at_beside_the_fastest_peer():
    record = BenchmarkRecord(environment(), LARGE_CEILINGS, rows())
    record.conclude()
    ours, own, _ = record.rows
    assert (ours.speedup, own.speedup) == (1.5, 0.75)
    assert ours.reached is True
    assert own.reached is None
    assert "1.50x the best" in record.table()


@pytest.mark.parametrize(
    ("ours", "level"),
    [((1.9, 2.1, 2.2), True), ((2.2, 2.3, 2.4), True), ((2.2, 2.5, 2.7), False), ((1.5, 1.9, 2.5), False)],
)
def test_slower_by_less_than_the_spread_is_level(ours, level):
    """The peer takes 1.9, 2.0, 2.4."""
    row = Row("neural", "gelu", "x", "accelerant", "own", p20=ours[0], p50=ours[1], p80=ours[2])
    peers_ = [replace(row, runner="torch", p20=1.9, p50=2.0, p80=2.4), replace(row, runner="slow", p50=9.0, p80=9.0)]
    record = BenchmarkRecord(environment(), {}, [row, *peers_])
    record.conclude()
    assert record.rows[0].level is level
    slower = ours[1] > 2.0
    assert record.rows[0].slower is (slower and not level)
    kind = "level (slower within the spread of the samples)" if level else "slower"
    said = f"in 0 of 1 cases, {kind} in 1"
    assert record.verdict() == f"at least as fast as the fastest peer {said if slower else 'in 1 of 1 cases'}"
    assert record.verdict() in record.table()
    build_report(record)


def test_naive_python_integers_are_no_peer():
    row = Row("zk", "ntt", "x", "accelerant", "own", p20=1.0, p50=1.0, p80=1.0)
    record = BenchmarkRecord(environment(), {}, [row, replace(row, runner=NAIVE, p20=800.0, p50=800.0, p80=800.0)])
    record.conclude()
    assert record.rows[0].speedup is None
    assert record.verdict() == ""
    assert "python (naive)" in record.table()


def test_csv_has_every_row_without_samples(tmp_path):
    record = BenchmarkRecord(environment(), {}, rows())
    record.save_csv(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["runner"] for row in found] == ["accelerant", OWN, "torch"]
    assert float(found[0]["tflop_s"]) == pytest.approx(0.5)
    assert "samples" not in found[0]


def test_roofline_draws_each_row_once():
    record = BenchmarkRecord(environment(), LARGE_CEILINGS, rows())
    drawn = roofline(record)
    assert drawn.count("<circle") == 3
    assert drawn.count('class="peer-dot"') == 1
    assert roofline(BenchmarkRecord(environment(), {}, rows())) == ""


def test_a_record_of_many_rows_is_small_and_reads_back(tmp_path):
    ours, *_ = rows()
    many = [replace(ours, case=f"{i}x8 forward", samples=tuple([0.1234] * 20), error=1e-4) for i in range(1000)]
    record = BenchmarkRecord(environment(), {}, many)
    record.save(tmp_path / "rows.json")
    assert (tmp_path / "rows.json").stat().st_size < 500_000
    assert BenchmarkRecord.load(tmp_path / "rows.json").rows == many


def test_memory_is_something_to_reach():
    ours = replace(rows()[0], target_x=None, target_bytes=100, peak_bytes=90)
    assert ours.reached is True
    assert replace(ours, peak_bytes=110).reached is False
    assert replace(ours, peak_bytes=None).reached is False


def test_the_sweep_stands_apart_in_the_page():
    ours = Row("neural", "gelu", "1x1024 bfloat16 forward", "accelerant", "triton (own)", p20=1.0, p50=2.0, p80=3.0,
               bytes=10**6, ceiling="copy", part="sweep")  # fmt: skip
    swept = [
        replace(ours, case=f"{2**i}x1024 bfloat16 forward", runner=runner, p20=p50, p50=p50, p80=p50)
        for i in range(4)
        for runner, p50 in (("accelerant", 2.0 + i), ("torch", 3.0))
    ]
    record = BenchmarkRecord(environment(), LARGE_CEILINGS, [*rows(), *swept])
    record.conclude()
    page = build_report(record)
    assert page.index("Lost in the sweep") < page.index("Neural: compared with the peers")
    assert "2 of 4 sizes" in page  # 4.0 and 5.0 against 3.0
    assert "Rate by size" in page
    assert "8x1024" not in page[page.index("All rows") :]


def test_an_infinity_of_float16_beyond_its_range_is_right_and_within_it_wrong():
    exact = torch.tensor([7e4, -8e4, 1.0], dtype=torch.float64)
    assert _relative(torch.tensor([float("inf"), -float("inf"), 1.0], dtype=torch.float16), exact) < 1e-3
    assert _relative(torch.tensor([float("inf"), -float("inf"), float("inf")], dtype=torch.float16), exact) > 0.5
    assert _relative(torch.tensor([float("inf"), -float("inf"), float("nan")], dtype=torch.float16), exact) > 0.5


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_of_each_element_is_measured_forward_and_backward_apart(reduction):
    probabilities, targets = torch.rand(4, 8), torch.rand(4, 8)
    options = {"reduction": reduction}
    benchmark = neural_cases.benchmarks_of("binary_cross_entropy")[0]
    case = OpCase("binary_cross_entropy", "x", (probabilities, targets), options, benchmark, False)
    directions = [work.direction for work in neural_cases.work_of(case)]
    assert directions == (["forward", "backward"] if reduction == "none" else ["both"])
    for direction in directions:
        neural_cases.call_of(accelerant.ops.binary_cross_entropy, case, direction)()
