"""Tokens are drawn from the distribution of a row's rules, each row by itself; proposals change no distribution."""

import numpy as np
import pytest
import torch
from serving_models import drain, llama, read

from accelerant.errors import ConfigError
from accelerant.nn.serving import Engine, Sampling
from accelerant.nn.serving.sampling import draw_tokens, uniform


def chi_square_bound(degrees):
    """The value that chi-square passes with probability 1e-6, by Wilson and Hilferty's approximation."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.7534 * part**0.5) ** 3


def probabilities(logits, rules, tokens, prompt):
    """The distribution in float64, (V,), and the order in which it is inverted."""
    logits = logits.double().clone()
    for token in set(tokens.tolist()):
        factor = rules.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in tokens[prompt:].tolist():
        logits[token] -= rules.frequency_penalty
    for token in set(tokens[prompt:].tolist()):
        logits[token] -= rules.presence_penalty
    if rules.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double(), torch.arange(len(logits))
    p = torch.softmax(logits / rules.temperature, 0)
    if rules.top_k is None and rules.top_p is None and not rules.min_p:
        return p, torch.arange(len(logits))
    order = p.argsort(descending=True)
    p[order[rules.top_k or len(p) :]] = 0
    p /= p.sum()
    before = p[order].cumsum(0) - p[order]
    if rules.top_p is not None:
        p[order[before >= rules.top_p]] = 0
    p[p < rules.min_p * p.max()] = 0
    return p / p.sum(), order


def drawn_rules(rng):
    return Sampling(
        rng.choice([0.0, 1e-30, 0.4, 1.0, 5.0]), rng.choice([None, None, 1, 7, 64, 65, 5000]),
        rng.choice([None, None, 0.3, 0.9, 1.0]), min_p=rng.choice([0.0, 0.0, 0.1, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 0.8, 1.7]), presence_penalty=rng.choice([0.0, 0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, -0.2]),
    )  # fmt: skip


@pytest.mark.search(0.02)
def test_a_token_is_where_the_cumulative_distribution_passes_the_number(rng, record_property):
    examples = 0
    for _ in range(12):
        rows, vocabulary = rng.randrange(1, 40), rng.choice([5, 67, 1500])
        logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
        rules = [drawn_rules(rng) for _ in range(rows)]
        numbers = [rng.choice([0.0, rng.random(), 1 - 2**-24]) for _ in range(rows)]
        texts = []
        for _ in range(rows):
            count = rng.randrange(1, 30)
            tokens = np.array([rng.randrange(vocabulary) for _ in range(count)])
            texts.append((tokens, rng.randrange(count + 1)))
        found = draw_tokens(logits, rules, numbers, texts, None).ids
        for row, token in enumerate(found):
            p, order = probabilities(logits[row], rules[row], *texts[row])
            cumulative = p[order].cumsum(0)
            at = int((order == token).nonzero())
            example = (rules[row], numbers[row], texts[row])
            assert p[token] > 0, example
            # float32 sums of up to 1500 terms
            assert float(cumulative[at] - p[token]) <= numbers[row] + 1e-5, example
            assert numbers[row] <= float(cumulative[at]) + 1e-5, example
        examples += rows
        mixed = [
            draw_tokens(logits[r : r + 1], rules[r : r + 1], numbers[r : r + 1], texts[r : r + 1], 3)
            for r in range(rows)
        ]
        together = draw_tokens(logits, rules, numbers, texts, 3)
        assert [one.ids[0] for one in mixed] == together.ids == found
        assert [one.logprobs[0] for one in mixed] == together.logprobs
        assert [one.top[0] for one in mixed] == together.top
    record_property("examples", examples)


def test_equal_logits_are_taken_in_order():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [-1.0, -2.0, -2.0, -2.0, -9.0]])
    rules = [Sampling(top_k=2)] * 2
    for number, expected in ((0.0, [1, 0]), (0.75, [2, 1])):
        assert draw_tokens(logits, rules, [number] * 2, [(np.array([0]), 1)] * 2, None).ids == expected
    assert draw_tokens(logits[:1], rules[:1], [0.0], [(np.array([0]), 1)], 4).top[0][3][0] == 0


def test_a_row_that_is_not_finite_has_no_token():
    logits = torch.randn(4, 9)
    logits[1, 3], logits[2, 0] = float("nan"), float("inf")
    for rules in (Sampling(), Sampling(temperature=0), Sampling(top_p=0.9)):
        ids = draw_tokens(logits, [rules] * 4, [0.5] * 4, [(np.array([0]), 1)] * 4, 1).ids
        assert [token < 0 for token in ids] == [False, True, True, False]


def test_numbers_are_uniform_and_differ():
    numbers = np.array([uniform(seed, 0, position) for seed in range(100) for position in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, 50, (0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < chi_square_bound(49)
    assert len(set(numbers)) > 9990
    assert len({uniform(1, 0, 5), uniform(1, 1, 5), uniform(1, 5, 0), uniform(-1, 0, 5)}) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("min_p", 1.1), ("min_p", -0.1), ("repetition_penalty", 0.0), ("presence_penalty", float("nan")),
     ("frequency_penalty", float("inf")), ("presence_penalty", 1e39), ("repetition_penalty", 1e-45),
     ("repetition_penalty", 1e39)],
)  # fmt: skip
def test_rules_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        Sampling(**{field: value})


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("rules", [Sampling(1.3), Sampling(top_p=0.8)], ids=["plain", "top_p"])
def test_proposals_change_no_distribution(rules):
    """Chi-square of the two tokens after a prompt that proposes them, against the model's probabilities."""
    model, vocabulary, count = llama(vocab_size=5, layers=1, width=8, hidden=8), 5, 2000
    ids = torch.randint(vocabulary, (150,), generator=torch.Generator().manual_seed(0)).tolist()  # most triples occur
    nothing = np.array([], dtype=np.int64)

    def following(tokens):
        logits = model(torch.tensor([tokens]))[0, -1].detach()
        return probabilities(logits, rules, nothing, 0)[0]

    first = following(ids)
    expected = torch.stack([first[token] * following([*ids, token]) for token in range(vocabulary)]).flatten().numpy()
    observed = np.zeros(vocabulary**2)
    with Engine(model, 5000, 2**14, speculate=4, start=False) as engine:
        answers = [engine.submit(ids, rules, max_tokens=4, seed=seed) for seed in range(count)]
        drain(engine)
        for answer in answers:
            one, two = read(answer)[0][:2]
            observed[one * vocabulary + two] += 1
        counts = engine.metrics()
    assert counts["drafts"] > 500
    assert 0 < counts["drafts_accepted"] < counts["drafts"]
    possible = expected > 0
    assert observed[~possible].sum() == 0
    statistic = ((observed - count * expected)[possible] ** 2 / (count * expected[possible])).sum()
    assert statistic < chi_square_bound(possible.sum() - 1)
    unlike = np.roll(expected, 1) + 1e-3  # the test notices another distribution
    assert ((observed - count * unlike) ** 2 / (count * unlike)).sum() > 10 * chi_square_bound(len(expected) - 1)
