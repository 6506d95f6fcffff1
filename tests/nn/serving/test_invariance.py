"""A request's tokens and log-probabilities do not depend, bit by bit, on what else the engine does."""

import pytest
import torch
from serving_models import VOCABULARY, drain, llama, read

from accelerant.nn import quantize
from accelerant.nn.serving import Engine, Sampling

KINDS = {
    "float32": lambda: llama(),
    "bfloat16": lambda: llama(torch.bfloat16),
    "tied, one key head, odd widths": lambda: llama(kv_heads=1, heads=3, width=27, head_width=10, hidden=45, tied=True),
    "int8": lambda: quantize(llama(), skip=()).model,
    "int4": lambda: quantize(llama(width=128, hidden=256), mode="int4", skip=()).model,
    "int8 in bfloat16": lambda: quantize(llama(torch.bfloat16)).model,
    "int4 in bfloat16": lambda: quantize(llama(torch.bfloat16, width=128, hidden=256), mode="int4").model,
}


def draw_sampling(rng):
    kind = rng.randrange(4)
    if kind == 0:
        return Sampling(temperature=0)
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1} if kind == 1 else {}
    return Sampling(
        rng.choice([0.3, 1.0, 3.0]), rng.choice([None, 1, 5, 70]), rng.choice([None, 0.5, 0.95]),
        min_p=rng.choice([0.0, 0.05]), **penalties,
    )  # fmt: skip


def draw_requests(rng):
    """Return prompts, some of which begin alike, with the arguments of their submission."""
    stems = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(5, 80))] for _ in range(2)]
    requests = []
    for _ in range(rng.randrange(2, 14)):
        ids = rng.choice([[], *stems]) + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 50))]
        ids += ids[-8:] * rng.randrange(3)  # something to propose
        options = {"max_tokens": rng.randrange(30), "seed": rng.randrange(-(1 << 40), 1 << 70), "logprobs": 2}
        options["prompt_logprobs"] = rng.choice([None, None, 0, 3])
        options["stop"] = rng.sample(range(VOCABULARY), rng.choice([0, 0, 0, 4, 20]))
        requests.append((ids, draw_sampling(rng), options))
    return requests


def alone(model, request):
    """Return what a request gets in an engine of its own."""
    with Engine(model, 20, 256, start=False) as engine:
        answer = engine.submit(request[0], request[1], **request[2])
        drain(engine)
        return read(answer)[:2]


def among_others(model, requests, rng):
    """Return what each request gets with the others, in an engine and an order that are drawn."""
    size = rng.choice([4, 16])
    least = max(-(-(len(ids) + options["max_tokens"]) // size) for ids, _, options in requests)
    budget = rng.choice([3, 16, 37, 256])
    blocks = least + rng.choice([0, 1, 3, 20, 300])
    engine = Engine(model, blocks, budget, block_size=size, speculate=rng.choice([0, 3]), start=False)
    if not engine._scheduler.speculate and rng.random() < 0.5:  # as on a GPU
        engine._ahead = True
    with engine:
        order = rng.sample(range(len(requests)), len(requests))
        answers = {}
        for at in order:
            ids, sampling, options = requests[at]
            answers[at] = engine.submit(ids, sampling, **options)
            for _ in range(rng.choice([0, 0, 1, 7])):
                engine.step()
        drain(engine)
        counts = engine.metrics()
        return [read(answers[at])[:2] for at in range(len(requests))], counts


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.sample(5)
@pytest.mark.search(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_gets_the_same_alone_and_among_others(kind, threads, rng, record_property):
    model, examples = KINDS[kind](), 0
    happened = dict.fromkeys(("preemptions", "prefix_hit_tokens", "drafts_accepted"), 0)
    for times in range(20):
        if times >= 1 and (kind != "float32" or all(happened.values())):  # others may repeat themselves too little
            break
        requests = draw_requests(rng)
        expected = [alone(model, request) for request in requests]
        for _ in range(2):
            results, counts = among_others(model, requests, rng)
            for at, (one, other) in enumerate(zip(expected, results, strict=True)):
                assert one == other, (at, requests[at])
            for name in happened:
                happened[name] += counts[name]
            examples += len(requests)
    assert kind != "float32" or all(happened.values()), happened
    record_property("examples", examples)
