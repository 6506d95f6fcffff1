"""Generation: windows, stops, sampling, and that a cache changes nothing."""

import math

import pytest
import torch

from accelerant.errors import ConfigError, ShapeError
from accelerant.nn import GPT, GPTConfig, Llama, LlamaConfig
from accelerant.nn.models.language_model import Sampling
from modules import module
from refusals import assert_raises

CONFIG = GPTConfig(vocab_size=70, context=8, layers=2, heads=2, width=16)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = GPT(CONFIG)
    for parameter in model.parameters():  # larger than at the start, so that every part matters
        parameter.data[: CONFIG.vocab_size] += 0.3 * torch.randn_like(parameter.data[: CONFIG.vocab_size])
    return model


def tokens(*shape):
    return torch.randint(CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.sample(3)
@pytest.mark.parametrize("prompt", [1, 5, 8, 13])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_cache_changes_nothing(model, prompt, batch):
    idx = tokens(batch, prompt)
    cached = model.generate(idx, 25, temperature=0)
    assert torch.equal(cached, model.generate(idx, 25, temperature=0, use_cache=False))
    assert len(set(cached.flatten().tolist())) > 4  # it does not stand still


@pytest.mark.parametrize("context", [37, 100])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_context_that_is_no_multiple_of_the_caches_capacity(kind, context):
    """A cache's capacity is rounded up to 64 tokens, past the context."""
    torch.manual_seed(0)
    shape = {"vocab_size": 70, "context": context, "layers": 1, "heads": 2, "width": 16}
    model = GPT(GPTConfig(**shape)) if kind == "gpt" else Llama(LlamaConfig(**shape, kv_heads=1, hidden=32))
    idx = tokens(2, context - 5)
    assert torch.equal(model.generate(idx, 12, temperature=0), model.generate(idx, 12, temperature=0, use_cache=False))


def test_a_head_of_odd_width_is_cached_too():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=70, context=16, layers=2, heads=2, width=10))
    idx = tokens(2, 3)
    assert torch.equal(model.generate(idx, 12, temperature=0), model.generate(idx, 12, temperature=0, use_cache=False))


def test_parts_that_were_changed_are_heard(model):
    """A block with a hook, or of another kind, is not what decode knows: then there is no cache."""
    idx, before = tokens(2, 3), model.generate(tokens(2, 3), 12, temperature=0)
    handle = model.blocks[1].register_forward_hook(lambda module, args, y: y.flip(-1))
    hooked = model.generate(idx, 12, temperature=0)
    handle.remove()
    model.blocks[1] = module(lambda m, x: m.inner(x).flip(-1), inner=model.blocks[1])
    assert torch.equal(model.generate(idx, 12, temperature=0), hooked)
    assert torch.equal(hooked, model.generate(idx, 12, temperature=0, use_cache=False))
    assert not torch.equal(hooked, before)


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_window_is_cut_to_half_the_context(model, use_cache):
    """Written out: a token is the likeliest after the window, which grows to 8 and is cut to 4."""
    idx = tokens(1, 6)
    expected, begin = idx, 0
    for _ in range(15):
        if expected.shape[1] - begin > 8:
            begin = expected.shape[1] - 4
        chosen = model(expected[:, begin:])[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, chosen], 1)
    assert torch.equal(model.generate(idx, 15, temperature=0, use_cache=use_cache), expected)


def test_a_context_of_one_token():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=70, context=1, layers=1, heads=1, width=16))
    found = model.generate(tokens(2, 3), 5, temperature=0)
    for t in range(2, 7):
        assert torch.equal(model(found[:, t : t + 1])[:, 0].argmax(-1), found[:, t + 1])


def test_rows_end_at_a_stop_token(model):
    idx = tokens(3, 2)
    free = model.generate(idx, 40, temperature=0)
    stops = [int(free[0, 6]), int(free[1, 9])]
    ended = model.generate(idx, 40, temperature=0, stop=stops)
    longest = 0
    for row, whole in zip(ended.tolist(), free.tolist(), strict=True):
        first = next((t for t in range(2, 42) if whole[t] in stops), 41)
        longest = max(longest, first + 1)
        assert row[: first + 1] == whole[: first + 1]
        assert all(token == stops[0] for token in row[first + 1 :])
    assert ended.shape[1] == longest


def test_one_stop_token_ends_early(model):
    idx = tokens(1, 2)
    free = model.generate(idx, 60, temperature=0)
    stop = int(free[0, 5])
    first = free[0, 2:].tolist().index(stop) + 3
    assert torch.equal(model.generate(idx, 60, temperature=0, stop=stop), free[:, :first])


def test_nothing_to_add(model):
    assert torch.equal(model.generate(tokens(2, 3), 0), tokens(2, 3))
    assert model.generate(tokens(2, 3)[:0], 5).shape == (0, 3)
    assert model.generate(tokens(1, 3).int(), 2, seed=0).dtype == torch.int64


def test_a_seed_gives_the_same_with_and_without_the_cache(model):
    options = {"seed": 5, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    idx = tokens(4, 3)
    assert torch.equal(model.generate(idx, 5, **options), model.generate(idx, 5, use_cache=False, **options))


# --- sampling --------------------------------------------------------------------------------------------------------
def shares(sampling, logits, draws=40000):
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(0))
    drawn = sampling.choose(logits.expand(draws, -1), uniform)
    return torch.bincount(drawn, minlength=logits.shape[-1]) / draws


LOGITS = torch.tensor([[0.5, 2.0, -1.0, 1.0, -math.inf, 1.5]])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_probabilities(temperature):
    expected = (LOGITS[0] / temperature).softmax(-1)
    torch.testing.assert_close(shares(Sampling(temperature), LOGITS), expected, rtol=0, atol=0.01)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}])
@pytest.mark.parametrize("temperature", [1e-25, 1e-38, 5e-324])
def test_the_least_temperatures_take_the_likeliest(temperature, options):
    logits = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)) * 5
    assert torch.equal(Sampling(temperature, **options).choose(logits, torch.rand(4)), logits.argmax(-1))


def test_top_k_and_top_p_keep_the_likeliest():
    p = LOGITS[0].softmax(-1)
    kept = torch.tensor([False, True, False, True, False, True])
    expected = torch.where(kept, p, 0) / p[kept].sum()
    torch.testing.assert_close(shares(Sampling(top_k=3), LOGITS), expected, rtol=0, atol=0.01)
    reached = float(p[1] + p[5])  # 1.0 is left out: without it the sum is reached
    kept = torch.tensor([False, True, False, False, False, True])
    expected = torch.where(kept, p, 0) / p[kept].sum()
    torch.testing.assert_close(shares(Sampling(top_p=reached - 0.01), LOGITS), expected, rtol=0, atol=0.01)
    assert shares(Sampling(top_p=0.01), LOGITS)[1] == 1
    assert shares(Sampling(top_p=1.0), LOGITS)[4] == 0


def test_the_ends_of_the_uniform_numbers():
    for number, first in ((0.0, 0), (1 - 2**-24, 5)):
        assert Sampling().choose(LOGITS, torch.tensor([number]))[0] == first
    skewed = torch.full((1, 5000), -60.0)
    skewed[0, 7] = 0.0
    assert Sampling().choose(skewed, torch.tensor([1 - 2**-24]))[0] in (7, 4999)


@pytest.mark.parametrize(("options", "words"), [
    ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
    ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
    ({"top_p": math.nan}, "top_p must be above 0"),
    ({"stop": 70}, "stop must be tokens below 70, got 70"),
    ({"stop": [3, -1]}, "stop must be tokens below 70, got -1"),
])  # fmt: skip
def test_refuses(model, options, words):
    assert_raises(ConfigError, words, lambda: model.generate(tokens(1, 2), 3, **options))


def test_a_prompt_needs_two_dimensions(model):
    assert_raises(ShapeError, r"idx must be \(batch, time\)", lambda: model.generate(tokens(3), 3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_gives_the_eager_steps_tokens(model, dtype):
    """The graph's replays against steps run one by one; the ledger counts the graph."""
    from accelerant.nn.models.language_model import Decoding
    from accelerant.runtime.ledger import ledger

    model = model.to("cuda", dtype)
    idx = tokens(2, 3).cuda()
    found = []
    for graph in (True, False):
        with torch.no_grad():
            run = Decoding(model, idx, 40, Sampling(0.0), graph=graph)
            for _ in range(40):
                run.advance()
        found.append(run.tokens)
        graphs = [each["graph"] for each in ledger().to_dict()["graphs"]]  # of those that are alive
        assert ("decode" in graphs) == graph
        del run
    assert torch.equal(*found)


@pytest.mark.parametrize("size", [256, 1024, 1000])
def test_the_likeliest_is_the_first_of_the_largest(size):
    logits = torch.randint(50, (64, size), generator=torch.Generator().manual_seed(0)).float()
    expected = (logits == logits.amax(-1, keepdim=True)).long().argmax(-1)
    assert torch.equal(Sampling(0.0).choose(logits, torch.zeros(64)), expected)


def test_each_part_keeps_its_mode(model):
    """One that is frozen in eval mode inside a model that trains; also where generation fails."""
    model.train()
    frozen = model.blocks[0].eval()
    model.generate(tokens(1, 3), 2)
    assert_raises(ConfigError, "max_new_tokens", lambda: model.generate(tokens(1, 3), -1))
    assert model.training
    assert model.blocks[1].training
    assert not any(module.training for module in frozen.modules())
