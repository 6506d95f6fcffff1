"""Launch parameters that are tuned: any plan of any op gives what its rule gives, and a kept result is used."""

import importlib
from pathlib import Path

import pytest
import torch

import accelerant.ops
from accelerant.config import override
from accelerant.ops import elementwise, norm
from accelerant.ops._launch import StreamKernel, launch_map
from accelerant.ops.attention import launch as attention
from accelerant.ops.cross_entropy import launch as cross_entropy
from accelerant.ops.decode import steps as decode
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import race
from accelerant.runtime.dispatch.race import CandidateTimes, Tuned, key_of

embedding = importlib.import_module("accelerant.ops.embedding")
gelu = importlib.import_module("accelerant.ops.gelu")
linear_gelu = importlib.import_module("accelerant.ops.linear_gelu")
rope = importlib.import_module("accelerant.ops.rope")
softmax = importlib.import_module("accelerant.ops.softmax")
swiglu = importlib.import_module("accelerant.ops.swiglu")

CPU = torch.device("cpu")
randn = torch.randn


def found_tuned():
    """Every Tuned of the ops: name -> it."""
    found = {}

    def visit(each):
        if isinstance(each, StreamKernel):
            each = each.plan
        if isinstance(each, Tuned):
            assert found.setdefault(each.name, each) is each, f"two are named {each.name}"
        elif isinstance(each, dict):
            for value in each.values():
                visit(value)

    for path in sorted(Path(accelerant.ops.__path__[0]).glob("[!_]*/*.py")):
        if path.stem in ("__init__", "launch", "op", "steps"):
            name = f"accelerant.ops.{path.parent.name}.{path.stem}".removesuffix(".__init__")
            for each in vars(importlib.import_module(name)).values():
                visit(each)
    return found


TUNED = found_tuned()


# --- a small sample of each: sizes as the launch gives them, and the launch with a plan or None ------------------
def norms(way, centre, adds):
    def sample(M, N):
        x, dy, other, weight = randn(M, N), randn(M, N), randn(M, N) if adds else None, randn(N)
        bias = randn(N) if centre else None

        def forward(plan=None):
            return norm.launch_forward(centre, x, weight, bias, 1e-5, True, other, plan=plan)

        statistics = forward(norm.RowTile(1, 4096, 4))[-1]

        def backward(plan):
            return norm.launch_backward(centre, dy, x, weight, bias, statistics, 1e-5, (1, 1, 1), other, plan)

        return (M, N), {"fwd": forward, "bwd": backward}[way]

    wide = [lambda: sample(3, 4096)] if way == "fwd" else []  # backward the interpreter takes too long
    return [lambda: sample(13, 768), lambda: sample(7, 50), *wide]


def softmaxes(way, log):
    def sample(M, N):
        x, dy = randn(M, N), randn(M, N)
        y = torch.log_softmax(x, 1) if log else torch.softmax(x, 1)
        if way == "fwd":
            return (M, N), lambda plan: softmax.launch("fwd", log, (x,), 1, plan)
        return (M, N), lambda plan: softmax.launch("bwd", log, (dy, y), 1, plan)

    return [lambda: sample(13, 768), lambda: sample(3, 4096)]


def stream(launched, count):
    """An elementwise launch of so many tensors of 3000 elements."""

    def sample():
        tensors = [randn(3, 1000) for _ in range(count)]
        return (3000,), lambda plan: launched(*tensors, plan)

    return [sample]


def of_rows(launched, *shapes, sizes):
    def sample():
        tensors = [randn(shape) for shape in shapes]
        return sizes, lambda plan: launched(*tensors, plan)

    return [sample]


def maps(kernel):
    name = kernel.name
    if name.endswith("_fwd"):
        return stream(lambda x, plan: launch_map(kernel, x, {}, plan), 1)
    return stream(lambda dy, saved, plan: launch_map(kernel, saved, {}, plan, dy), 2)


def ropes(transposed):
    def sample():
        x = randn(2, 9, 5, 14).transpose(1, 2) if transposed else randn(2, 5, 9, 14)
        cos, sin = randn(9, 7), randn(9, 7)
        return (18, 5, 7, int(transposed)), lambda plan: rope.launch(x, cos, sin, False, plan=plan)

    return sample


def embeddings(way):
    def sample():
        weight, dy, indices = randn(9, 300), randn(200, 300), torch.randint(9, (200,))
        if way == "fwd":
            return (200, 300), lambda plan: embedding.launch_forward(indices, weight, -1, plan)
        launched = {"atomic": embedding.launch_backward_atomic, "sorted": embedding.launch_backward_sorted}[way]
        return (200, 300), lambda plan: launched(dy, indices, weight, -1, (True,), plan)

    return [sample]


def losses(N, dtype, gradient):
    """Each row's loss and gradient."""

    def sample():
        rows, targets = randn(3, N).to(dtype), torch.tensor([0, N - 1, -100])

        def run(plan):
            found, dx = torch.empty(3), torch.empty(3, N, dtype=dtype) if gradient else None
            cross_entropy.launch_rows(rows, N, targets, -100, 0.1, losses=found, dx=dx, dx_stride=N, plan=plan)
            return found, dx

        holds = (int(gradient and dtype == torch.bfloat16),) if N > cross_entropy.WIDE_FROM else ()
        return (3, N, int(gradient), *holds), run

    return sample


def loss_gradients():
    logits, targets, dy = randn(5, 3000), torch.randint(3000, (5,)), randn(())
    _, statistics, counts = cross_entropy.launch_forward(logits, targets, -100, 0.0, "mean", False)

    def run(plan):
        return cross_entropy.launch_backward(
            dy, logits, targets, statistics, counts, -100, 0.0, "mean", None, plan
        )  # fmt: skip

    return (5, 3000), run


def products():
    x, weight, bias = randn(40, 24), randn(50, 24), randn(50)
    return (40, 50, 24, 0), lambda plan: linear_gelu.launch_forward(x, weight, bias, "tanh", True, plan)


def attentions(kernel):
    def sample():
        q, k, v, do = (randn(1, 2, 40, 20) for _ in range(4))
        sizes = (0, 2, 64, 64, 20, 1, 0, 0)
        if kernel == "fwd":
            return sizes, lambda plan: attention.launch_forward(q, k, v, True, 0.2, -1, plan)
        o, lse = attention.launch_forward(q, k, v, True, 0.2, -1)

        def run(plan):
            plans = (plan, None) if kernel == "bwd_q" else (None, plan)
            return attention.launch_backward(do, q, k, v, o, lse, True, 0.2, -1, plans)

        return sizes, run

    return [sample]


BOTH = (False, True)


def decoding(gated):
    def sample():
        x, weight = torch.randn(1, 96), torch.randn(24, 96)
        sizes = (24 // (1 + gated), 96, 4, int(gated))
        return sizes, lambda plan: decode.launch_linear(x, weight, None, None, 1e-5, None, gated, plan)

    return sample


def decoding_words():
    x, weight, scale = torch.randn(1, 96), torch.randint(-127, 128, (8, 96), dtype=torch.int8), torch.rand(8)
    return (8, 96, 0), lambda plan: decode.launch_words(x, weight, scale, None, 1e-5, None, False, plan)


SAMPLES = {
    **{norm.TUNED[key].name: norms(*key) for key in norm.TUNED},
    **{softmax.TUNED[key].name: softmaxes(*key) for key in softmax.TUNED},
    **{name: maps(kernel) for name, kernel in elementwise.STREAM_KERNELS.items() if name[:3] not in ("add", "mul")},
    "add_fwd": stream(lambda a, b, plan: elementwise.launch_binary("add", a, b, plan), 2),
    "mul_fwd": stream(lambda a, b, plan: elementwise.launch_binary("mul", a, b, plan), 2),
    "mul_bwd": stream(lambda dy, a, b, plan: elementwise.mul_backward(dy, a, b, (True, True), plan), 3),
    "add_row_bwd": of_rows(elementwise.add_row_backward, (700, 50), (50,), sizes=(700, 50)),
    "mul_row_bwd": of_rows(
        lambda dy, a, b, plan: elementwise.mul_row_backward(dy, a, b, (True, True), plan),
        (700, 50), (700, 50), (50,), sizes=(700, 50),
    ),
    "gelu_fwd": stream(lambda x, plan: launch_map(gelu.forward_kernel, x, {"TANH": True}, plan), 1),
    "gelu_bwd": stream(lambda dy, x, plan: launch_map(gelu.backward_kernel, x, {"TANH": True}, plan, dy), 2),
    "swiglu_fwd": stream(swiglu.launch_forward, 2),
    "swiglu_bwd": stream(swiglu.launch_backward, 3),
    "swiglu_packed_fwd": of_rows(lambda x, plan: swiglu.launch_forward(x, None, plan), (3, 2200), sizes=(3, 1100)),
    "swiglu_packed_bwd": of_rows(
        lambda dy, x, plan: swiglu.launch_backward(dy, x, None, plan), (3, 1100), (3, 2200), sizes=(3, 1100)
    ),
    "rope_fwd": [ropes(False), ropes(True)],
    "embedding_fwd": embeddings("fwd"),
    "embedding_bwd_atomic": embeddings("atomic"),
    "embedding_bwd": embeddings("sorted"),
    "cross_entropy_fwd": [losses(1000, torch.float32, each) for each in BOTH],
    "cross_entropy_fwd_wide": [
        losses(9000, torch.float32, False), losses(9000, torch.float32, True), losses(41000, torch.bfloat16, True),
    ],
    "cross_entropy_bwd": [loss_gradients],
    "linear_gelu_fwd": [products],
    "decode_linear": [decoding(False), decoding(True)],
    "decode_words": [decoding_words],
    **{f"attention_{kernel}": attentions(kernel) for kernel in attention.TUNED},
}  # fmt: skip
EACH = pytest.mark.parametrize(
    ("name", "sample"),
    [pytest.param(name, each, id=f"{name}-{i}") for name, all_of in SAMPLES.items() for i, each in enumerate(all_of)],
)


@pytest.fixture
def folder(tmp_path):
    with override(cache_dir=tmp_path):
        yield tmp_path


@pytest.fixture
def launches(monkeypatch):
    """What is launched, as it differs by plan."""
    seen, launch = [], TritonKernel.launch

    def spy(self, grid, args, constants, *, num_warps=4, num_stages=3):
        seen.append((self.name, grid, dict(constants), num_warps, num_stages))
        launch(self, grid, args, constants, num_warps=num_warps, num_stages=num_stages)

    monkeypatch.setattr(TritonKernel, "launch", spy)
    return seen


def plans_of(name, sizes):
    """The rule's plan, and all by their names."""
    tuned = TUNED[name]
    usual, candidates = tuned.default(*sizes), tuned.candidates(*sizes)
    known = {repr(plan): plan for plan in (usual, *candidates)}
    assert len(candidates) == len({repr(plan) for plan in candidates})
    assert len(known) > 1
    return usual, known


def flat(results):
    return [each for each in (results if isinstance(results, tuple) else (results,)) if each is not None]


def test_each_has_a_sample():
    assert set(SAMPLES) == set(TUNED)


@pytest.mark.sample(7)
@pytest.mark.slow
@EACH
def test_any_plan_gives_what_the_rule_gives(name, sample, interpreted):
    sizes, run = sample()
    usual, known = plans_of(name, sizes)
    expected = flat(run(usual))
    for label, plan in known.items():
        if plan != usual:
            for found, wanted in zip(flat(run(plan)), expected, strict=True):
                torch.testing.assert_close(
                    found, wanted, rtol=1e-4, atol=1e-4, msg=lambda text, at=label: f"{at}: {text}"
                )


@pytest.mark.sample(17, 3)
@pytest.mark.parametrize(
    ("name", "sample"),
    [
        pytest.param(name, each, id=f"{name}-{i}", marks=[pytest.mark.slow] if i or name.startswith("add_") else [])
        for name, all_of in SAMPLES.items()
        if not name.startswith("decode_")  # these have plans of their own off a GPU, small ones, for test_decode
        for i, each in enumerate(all_of)
    ],
)
def test_without_a_result_the_rule_and_with_one_the_best_is_launched(name, sample, interpreted, folder, launches):
    sizes, run = sample()
    usual, known = plans_of(name, sizes)
    best = next(plan for plan in reversed(known.values()) if plan != usual)

    def launched(plan):
        launches.clear()
        run(plan)
        return list(launches)

    by_rule, by_result = launched(usual), launched(best)
    TUNED[name].forget()
    assert launched(None) == by_rule
    assert not list(folder.iterdir())
    dtype = torch.bfloat16 if name == "cross_entropy_fwd_wide" and sizes[-1] else torch.float32
    key = key_of(f"plan {name}", dtype, TUNED[name]._bucket(*sizes))
    times = CandidateTimes({repr(usual): 1.0, repr(best): 0.5}, sources=TUNED[name]._sources())
    race.choices().keep(CPU, key, times)
    TUNED[name].forget()
    assert launched(None) == by_result
    assert by_result != by_rule


LONG = ("layer_norm_bwd", "rope_fwd", "linear_gelu_fwd")


@pytest.mark.parametrize(
    "name",
    ["softmax_fwd", "gelu_fwd", "swiglu_packed_fwd", *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)],
)
@pytest.mark.sample(3)
def test_tuning_times_every_plan(name, interpreted, folder):
    sizes, run = SAMPLES[name][-1]()
    with override(tune="first_use"):
        run(None)
    (entry,) = race.choices().entries(CPU).values()
    assert set(entry.ms) == set(plans_of(name, sizes)[1])
    assert not entry.failed


def test_a_loss_over_its_logits_is_not_repeated_to_be_timed(interpreted, folder):
    rows, targets = randn(3, 40), torch.tensor([0, 7, 39])
    expected = rows.softmax(1) - torch.nn.functional.one_hot(targets, 40)
    with override(tune="first_use"):
        cross_entropy.launch_rows(rows, 40, targets, -100, 0.0, losses=torch.empty(3), dx=rows, dx_stride=40)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)
    assert not list(folder.iterdir())


WIDTHS = (*range(1, 300), *range(500, 8193, 4), 8192)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in TUNED if name.split("_")[-2:] != ["fwd", "wide"] and "norm" in name])
def test_a_bucket_of_norms_has_one_set_of_plans(name):
    """So that what was measured for some columns can be launched for others."""
    sets = {}
    for N in WIDTHS:
        known = plans_of(name, (64, N))[1]
        assert all(plan.block_n * plan.chunks >= N for plan in known.values())
        assert sets.setdefault(TUNED[name]._bucket(64, N), set(known)) == set(known), N


@pytest.mark.parametrize(
    "name", ["softmax_fwd", "log_softmax_bwd", "cross_entropy_bwd", "mul_row_bwd", "embedding_fwd"]
)
def test_a_bucket_of_rows_has_one_set_of_plans(name):
    sets = {}
    for N in (*WIDTHS, 9000, 16384):
        known = set(plans_of(name, (64, N))[1])
        assert sets.setdefault(TUNED[name]._bucket(64, N), known) == known, N


def test_a_bucket_of_long_losses_has_one_set_of_plans():
    sets = {}
    for N in range(8193, 140_000, 501):
        known = set(plans_of("cross_entropy_fwd_wide", (64, N, 1, 1))[1])
        assert sets.setdefault(TUNED["cross_entropy_fwd_wide"]._bucket(64, N, 1, 1), known) == known, N


@pytest.mark.parametrize("family", range(5))
@pytest.mark.parametrize("kernel", attention.TUNED)
def test_attention_offers_what_fits(kernel, family):
    for width in (20, 64, 128, 256):
        plans = attention.plans_for(kernel, width, family)
        assert len(set(plans)) == len(plans)
        if width <= 128:
            assert plans
