"""TrainStep on a GPU: the graph's step beside the eager one, memory, and losses beside plain PyTorch's."""

import gc
from collections import Counter
from functools import partial

import pytest
import torch

from accelerant.errors import FallbackWarning
from accelerant.nn import GPT, GPTConfig, optim
from accelerant.nn.train.step import LossScale, TrainStep
from accelerant.runtime.ledger import ledger
from benchmarks.gpt_steps import PlainGPT, own_step, plain_step

pytestmark = pytest.mark.gpu

SMALL = GPTConfig(context=256, layers=2)
"""Two of GPT-2's blocks: the same kernels."""


def model(config=SMALL):
    torch.manual_seed(0)
    return GPT(config).cuda()


def tokens(config, batch, count, seed=0):
    """Rows drawn as words are: the n-th likeliest 1/n as often as the first."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, config.vocab_size + 1, dtype=torch.float32)
    size = batch * (config.context + 1)
    rows = [torch.multinomial(weights, size, True, generator=generator).view(batch, -1).cuda() for _ in range(count)]
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def trained(graph, steps=8, make=optim.AdamW, rate=1e-3, **options):
    one = model()
    optimizer = make(one.parameters(), weight_decay=0.1)
    step = TrainStep(
        one, optimizer, one.loss, max_grad_norm=1.0, precision=torch.bfloat16, graph=graph, **options
    )  # fmt: skip
    batches = tokens(SMALL, 4, steps * step.accumulate)
    results = []
    for number in range(steps):
        part = batches[number * step.accumulate : (number + 1) * step.accumulate]
        results.append(step(part, rate * (number + 1)))
    return one, step, [[float(value) for value in result] for result in results]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_graphs_step_is_the_eager_step(accumulate):
    """With changing data and learning rates; by SGD, whose steps follow the gradients."""
    begun = torch.nn.utils.parameters_to_vector(model().parameters()).detach()
    eager, plain, expected = trained(False, make=optim.SGD, rate=0.02, accumulate=accumulate)
    captured, step, found = trained(True, make=optim.SGD, rate=0.02, accumulate=accumulate)
    assert step.captured
    assert not plain.captured
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-3, atol=2e-3)
    one, other = (torch.nn.utils.parameters_to_vector(each.parameters()).detach() for each in (captured, eager))
    assert float((one - other).norm()) < 0.02 * float((other - begun).norm())


def test_a_graphs_step_is_the_eager_step_bit_for_bit_where_sums_have_an_order(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        eager, _, expected = trained(False)
        captured, step, found = trained(True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert step.captured
    assert found == expected
    assert all(map(torch.equal, captured.parameters(), eager.parameters()))


@pytest.mark.parametrize("make", [optim.AdamW, partial(torch.optim.AdamW, capturable=True)], ids=["ours", "torch's"])
def test_after_a_captured_step_the_rate_is_a_number(make):
    _, step, _ = trained(True, steps=6, make=make)
    assert step.captured
    saved = step.optimizer.state_dict()["param_groups"]
    assert [group["lr"] for group in saved] == [torch.tensor(6e-3, dtype=torch.float32).item()] * len(saved)
    assert all(type(group["lr"]) is float for group in saved)


def test_a_captured_float16_step_skips_overflows_and_adapts_its_scale_on_the_device():
    one = model()
    scale = LossScale(torch.device("cuda", 0), initial=2.0**40, interval=4)
    step = TrainStep(one, optim.AdamW(one.parameters()), one.loss, precision=torch.float16, loss_scale=scale)
    before = torch.nn.utils.parameters_to_vector(one.parameters()).detach().clone()
    (batch,) = tokens(SMALL, 4, 1)
    for _ in range(8):  # captured in the fourth
        step([batch], 1e-3)
    assert step.captured
    assert torch.equal(before, torch.nn.utils.parameters_to_vector(one.parameters()))
    assert (float(scale.value), int(scale.skipped)) == (2.0**32, 8)
    losses = [float(step([batch], 1e-3).loss) for _ in range(60)]
    assert losses[-1] < losses[0] - 1
    assert 8 < int(scale.skipped) < 60


def test_the_ledger_counts_what_replays_do():
    _, step, _ = trained(True, steps=4)
    ledger().reset()
    for _ in range(5):
        step(tokens(SMALL, 4, 1), 1e-3)
    calls = Counter()  # a record a case: the first block's first norm has nothing to sum
    for row in ledger().to_dict()["ops"]:
        calls[row["op"]] += row["calls"]
    assert calls["block_norm_bwd"] == 5 * 2 * SMALL.layers
    assert calls["adamw_step"] == 5


def test_another_shape_runs_eagerly_and_the_graph_goes_on():
    one, step, _ = trained(True, steps=5)
    (batch,) = tokens(SMALL, 2, 1)
    assert step([batch], 1e-3).loss.isfinite()
    before = [param.detach().clone() for param in one.parameters()]
    (batch,) = tokens(SMALL, 4, 1)
    norm = step([batch], 1e-3).grad_norm
    assert step.captured
    assert not all(map(torch.equal, before, one.parameters()))
    of_this_step = torch.stack([param.grad.norm() for param in one.parameters()]).norm()
    torch.testing.assert_close(of_this_step, norm, rtol=1e-3, atol=0)


def test_a_loaded_optimizer_state_is_seen():
    _, step, _ = trained(True, steps=5)
    step.optimizer.load_state_dict(step.optimizer.state_dict())
    (batch,) = tokens(SMALL, 4, 1)
    assert step([batch], 1e-3).loss.isfinite()
    assert not step.captured
    for _ in range(4):
        step([batch], 1e-3)
    assert step.captured


def test_a_loss_that_waits_for_the_device_runs_eagerly():
    one = model()

    def loss(*batch):
        value = one.loss(*batch)
        return value if float(value.detach()) > 0 else -value

    step = TrainStep(one, optim.AdamW(one.parameters()), loss, precision=torch.bfloat16)
    batches = tokens(SMALL, 4, 6)
    with pytest.warns(FallbackWarning, match="no CUDA graph, steps run eagerly"):
        losses = [float(step([batch], 1e-3).loss) for batch in batches]
    assert not step.captured
    assert losses[-1] < losses[0]


def test_memory_at_batch_32():
    """GPT-2 124M: parameters, moments and gradients are 2 GiB of it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    config = GPTConfig()
    step = own_step(model(config))
    for batch in tokens(config, 32, 5):
        step(*batch)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 10 << 30


def test_200_steps_beside_plain_pytorch():
    """The same numbers at first, the same data: curves that differ by what rounding does to them."""
    config = GPTConfig(context=256)
    ours, plain = model(config), PlainGPT.like(model(config))
    steps = own_step(ours), plain_step(plain)
    batches = tokens(config, 4, 200)
    curves = torch.tensor([[float(step(*batch)) for batch in batches] for step in steps])
    assert curves.isfinite().all()
    first, last = (curves[:, :20] - curves[:, :20].flip(0)).abs(), curves[:, -50:].mean(1)
    assert float(first.max()) < 0.05
    assert float((last[0] - last[1]).abs()) < 0.03
