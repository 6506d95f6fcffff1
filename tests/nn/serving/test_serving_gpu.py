"""The engine on a GPU: CUDA graphs of decoding steps, and the same bits in any company."""

import pytest
import torch
from serving_models import GREEDY, drain, generated, llama, prompt, read
from test_invariance import KINDS, alone, among_others, draw_requests

from accelerant.nn.serving import Engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_gets_the_same_alone_and_among_others_on_a_gpu(kind, rng):
    model = KINDS[kind]().cuda()
    for _ in range(3):
        requests = draw_requests(rng)
        expected = [alone(model, request) for request in requests]
        for _ in range(2):
            results, _ = among_others(model, requests, rng)
            for at, (one, other) in enumerate(zip(expected, results, strict=True)):
                assert one == other, (at, requests[at])


@pytest.mark.parametrize("fast", [False, True])
def test_greedy_answers_on_a_gpu_are_those_of_the_cpu(fast):
    model = llama()
    prompts = [prompt(length, length) for length in (1, 16, 17, 100)]
    expected = [generated(model, ids, 12) for ids in prompts]
    with Engine(model.cuda(), 64, 32, fast=fast) as engine:
        engine.warm((2, 16, 17, 32))
        answers = [engine.submit(ids, GREEDY, max_tokens=12) for ids in prompts]
        assert [read(answer)[0] for answer in answers] == expected


def test_steps_of_single_tokens_are_graphs():
    model = llama().cuda()
    with Engine(model, 64, 64, start=False) as engine:
        answers = [engine.submit(prompt(9, seed), GREEDY, max_tokens=20, account=True) for seed in range(5)]
        drain(engine)
        assert len(engine._graphs) == 2  # of one block and of two, for five rows
        found = read(answers[0])[2][0].ledger
    calls = {row["op"]: row["calls"] for row in found["ops"]}
    assert calls["attention_paged_fwd"] >= 2 * 20  # replays count


def test_a_step_is_queued_before_the_tokens_of_the_last_one_are_read():
    """Nothing but the end of the copy of those is waited for, on an event of its own."""
    model = llama().cuda()
    with Engine(model, 64, 64, start=False) as engine:
        answers = [engine.submit(prompt(9, seed), max_tokens=20, logprobs=2) for seed in range(5)]
        for _ in range(3):
            engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                engine.step()
                rows, drawn = engine._unread
                assert "ids" not in vars(drawn)
                assert all(row.sequence.drawn is not None for row in rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        drain(engine)
        assert {read(answer)[2][0].reason for answer in answers} == {"length"}
