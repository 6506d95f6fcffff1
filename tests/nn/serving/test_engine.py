"""The engine: answers equal those of `generate`, and do not depend on what else is served."""

import pytest
from serving_models import GREEDY, generated, llama, prompt, read

from accelerant.errors import AccelerantError, ConfigError, ShapeError, UnsupportedCase
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.serving import Engine


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("budget", [4, 32, 200])
def test_greedy_answers_are_those_of_generate(model, fast, budget):
    prompts = [prompt(length, length) for length in (1, 5, 16, 17, 40, 100)]
    with Engine(model, 64, budget, fast=fast) as engine:
        answers = [engine.submit(ids, GREEDY, max_tokens=12) for ids in prompts]
        for ids, answer in zip(prompts, answers, strict=True):
            tokens, _, (end,) = read(answer)
            assert tokens == generated(model, ids, 12)
            assert end.reason == "length"
            assert end.usage.prompt_tokens == len(ids)
            assert end.usage.completion_tokens == 12
        counts = engine.metrics()
    assert counts["running"] == counts["waiting"] == counts["blocks_used"] == 0


def test_what_can_never_fit_is_refused_with_the_numbers(model):
    with Engine(model, 4, 32) as engine:
        with pytest.raises(ConfigError, match="50 tokens and 20 more need 5 blocks of 16 tokens; the engine has 4"):
            engine.submit(prompt(50), max_tokens=20)
        with pytest.raises(ConfigError, match="250 tokens and 7 more do not fit the context of 256 tokens"):
            engine.submit(prompt(250), max_tokens=7)
        with pytest.raises(ConfigError, match="from 0 to 100, got 101"):
            engine.submit([3, 101])
        with pytest.raises(ConfigError, match="from 0 to 100, got -1"):
            engine.submit([-1])
        with pytest.raises(ShapeError, match="at least one token"):
            engine.submit([])
        for wrong in ({"max_tokens": 0}, {"n": 0}, {"logprobs": 21}, {"logprobs": -1}):
            with pytest.raises(ConfigError, match=next(iter(wrong))):
                engine.submit([1], **wrong)
        with pytest.raises(UnsupportedCase, match="tokenizer"):
            engine.submit([1], stop="end")
        ids, _, (end,) = read(engine.submit(prompt(44), GREEDY, max_tokens=20))  # 64 tokens: all of them
        assert (len(ids), end.reason) == (20, "length")
    with pytest.raises(AccelerantError, match="closed"):
        engine.submit([1])


def test_options_of_an_engine(model):
    for wrong in ({"blocks": 0}, {"blocks": 4, "max_batch_tokens": 0}, {"blocks": 4, "block_size": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            Engine(model, **wrong)
    with pytest.raises(ConfigError, match="speculate"):
        Engine(model, 4, speculate=-1)
    with pytest.raises(UnsupportedCase, match="GPT has no forward_paged"):
        Engine(GPT(GPTConfig(vocab_size=70, context=8, layers=1, heads=2, width=16)), 4)
