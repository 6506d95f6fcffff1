"""The engine: answers equal those of `generate`, and do not depend on what else is served."""

import codecs
import copy
import itertools
import math
import queue
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from serving_models import GREEDY, drain, generated, llama, prompt, read

from accelerant.errors import AccelerantError, ConfigError, DeviceLost, ShapeError, UnsupportedCase
from accelerant.nn import GPT, GPTConfig, quantize
from accelerant.nn.serving import Engine, Finished, PromptLogprobs, Sampling, scheduler
from accelerant.nn.serving.engine import StoppingText
from refusals import assert_raises


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("budget", [4, 32, 200])
def test_greedy_answers_are_those_of_generate(model, fast, budget):
    prompts = [prompt(length, length) for length in (1, 5, 16, 17, 40, 100)]
    with Engine(model, 64, budget, fast=fast) as engine:
        engine.warm((2, 16, 17, 40))  # of padding, which nothing keeps
        answers = [engine.submit(ids, GREEDY, max_tokens=12) for ids in prompts]
        for ids, answer in zip(prompts, answers, strict=True):
            tokens, _, (end,) = read(answer)
            assert tokens == generated(model, ids, 12)
            assert end.reason == "length"
            assert end.usage.prompt_tokens == len(ids)
            assert end.usage.completion_tokens == 12
        counts = engine.metrics()
    assert counts["running"] == counts["waiting"] == counts["blocks_used"] == 0


def test_prompts_are_cut_where_others_wait_for_their_next_token(model, monkeypatch):
    pace, rows = scheduler.Pace(), [SimpleNamespace(count=1, sequence=SimpleNamespace(drafts=0))] * 2
    pace.note(rows, 0.02)
    pace.note([*rows, SimpleNamespace(count=9, sequence=SimpleNamespace(drafts=0))], 0.029)
    pace.note([SimpleNamespace(count=4, sequence=SimpleNamespace(drafts=3))], 0.02)  # proposed tokens are no prompt
    assert (pace.single_s, pace.token_s) == pytest.approx((0.02, 0.001))
    assert [pace.prompt_tokens(2, others, 200) for others in (0, 1, 50)] == [20, 40, 200]
    assert pace.prompt_tokens(0, 3, 200) == 200  # nobody waits for a token
    assert scheduler.Pace(0.001, 0.001).prompt_tokens(2, 0, 200) == 200  # too short to be felt
    assert scheduler.Pace(0.02, 1.0).prompt_tokens(2, 0, 200) == 16
    with Engine(model, 64, 200, start=False) as engine:
        engine._scheduler.pace = pace
        monkeypatch.setattr(scheduler.Pace, "note", lambda *_: None)
        answers = [engine.submit(prompt(5), GREEDY, max_tokens=30)]
        engine.step()
        answers.append(engine.submit(prompt(100), GREEDY, max_tokens=5))
        computed = [engine.step() and engine.metrics()["tokens_computed"] for _ in range(7)]
        assert [after - before for before, after in itertools.pairwise(computed)] == [21, 21, 21, 21, 2, 2]
        while engine.step():
            pass
        assert read(answers[0])[0] == generated(model, prompt(5), 30)
        assert read(answers[1])[0] == generated(model, prompt(100), 5)


def test_what_can_never_fit_is_refused_with_the_numbers(model):
    with Engine(model, 4, 32) as engine:
        with pytest.raises(ConfigError, match="50 tokens and 20 more need 5 blocks of 16 tokens; the engine has 4"):
            engine.submit(prompt(50), max_tokens=20)
        with pytest.raises(ConfigError, match="250 tokens and 7 more do not fit the context of 256 tokens"):
            engine.submit(prompt(250), max_tokens=7)
        assert_raises(ConfigError, "from 0 to 100, got 101", engine.submit, [3, 101])
        assert_raises(ConfigError, "from 0 to 100, got -1", engine.submit, [-1])
        for wrong in ([1.5], [10**30], ["1"], [True]):
            assert_raises(ConfigError, "tokens must be integers from 0 to 100, got ", engine.submit, wrong)
        assert_raises(ShapeError, "at least one token", engine.submit, [])
        for wrong in ({"max_tokens": -1}, {"n": 0}, {"logprobs": 21}, {"logprobs": -1}, {"prompt_logprobs": 21}):
            assert_raises(ConfigError, next(iter(wrong)), engine.submit, [1], **wrong)
        assert_raises(UnsupportedCase, "tokenizer", engine.submit, [1], stop="end")
        ids, _, (end,) = read(engine.submit(prompt(44), GREEDY, max_tokens=20))  # 64 tokens: all of them
        assert (len(ids), end.reason) == (20, "length")
    assert_raises(AccelerantError, "closed", engine.submit, [1])


def test_options_of_an_engine(model):
    for wrong in ({"blocks": 0}, {"blocks": 4, "max_batch_tokens": 0}, {"blocks": 4, "block_size": 0}):
        assert_raises(ConfigError, "at least 1", Engine, model, **wrong)
    assert_raises(ConfigError, "speculate", Engine, model, 4, speculate=-1)
    with pytest.raises(UnsupportedCase, match="GPT has no forward_paged"):
        Engine(GPT(GPTConfig(vocab_size=70, context=8, layers=1, heads=2, width=16)), 4)


@pytest.mark.parametrize("mode", [None, "int8"])
def test_torchs_default_device_is_not_that_of_the_engine(mode):
    model, ids = llama(), prompt(20)
    model = model if mode is None else quantize(model, mode=mode, skip=()).model
    expected = generated(model, ids, 8)
    with torch.device("meta"), Engine(model, 8, start=False) as engine:
        answer = engine.submit(ids, GREEDY, max_tokens=8, logprobs=1)
        drain(engine)
        assert read(answer)[0] == expected


# --- faults ----------------------------------------------------------------------------------------------------------
def test_one_request_whose_logits_are_not_finite_ends_alone(model):
    clean = [prompt(20, seed) for seed in range(4)]
    expected = [generated(model, ids, 6) for ids in clean]
    nan = next(token for token in range(101) if not any(token in ids for ids in (*clean, *expected)))
    poisoned = copy.deepcopy(model)
    poisoned.embed.weight.data[nan] = math.nan
    with Engine(poisoned, 14, 32, start=False) as engine:
        answers = [engine.submit(ids, GREEDY, max_tokens=6) for ids in clean]
        bad = [engine.submit([*clean[0], *ids], GREEDY, max_tokens=6) for ids in ([nan], [nan, 3], [3] * 40 + [nan])]
        drain(engine)
        for answer in bad:
            ids, _, (end,) = read(answer)
            assert (ids, end.reason, end.error) == ([], "error", "the model's logits are not finite")
        again = [engine.submit(ids, GREEDY, max_tokens=6) for ids in clean * 2]  # in the blocks that held NaN
        drain(engine)
        for ids, answer in zip(expected * 3, [*answers, *again], strict=True):
            assert read(answer)[0] == ids
        assert engine.metrics()["blocks_used"] == 0


def test_an_error_in_a_step_ends_the_requests_that_were_in_it(model, monkeypatch):
    with Engine(model, 40, 32, start=False) as engine:
        first = [engine.submit(prompt(8, seed), GREEDY, max_tokens=8) for seed in range(2)]
        engine.step()
        late = engine.submit(prompt(40), GREEDY, max_tokens=4)  # its step comes
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_logits", lambda *_: 1 / 0)
            engine.step()
        for answer in (*first, late):
            _, _, (end,) = read(answer)
            assert (end.reason, end.error) == ("error", "ZeroDivisionError: division by zero")
        assert engine.metrics()["blocks_used"] == 0
        after = engine.submit(prompt(40), GREEDY, max_tokens=4)
        drain(engine)
        assert read(after)[0] == generated(model, prompt(40), 4)


def test_a_text_that_fails_ends_its_own_request_alone(model):
    class Tokenizer:
        eos_ids = ()

        def stream(self):
            stream = SimpleNamespace(push=lambda token: 1 / 0 if stream is streams[0] else "a", flush=str)
            streams.append(stream)
            return stream

    streams = []
    with Engine(model, 40, 32, tokenizer=Tokenizer(), start=False) as engine:
        answers = [engine.submit(prompt(8, seed), GREEDY, max_tokens=4) for seed in range(2)]
        drain(engine)
        assert [read(each)[2][0].reason for each in answers] == ["error", "length"]
        assert engine.metrics()["blocks_used"] == 0


def test_a_receiver_that_raises_ends_its_own_request_alone(model):
    class Broken:
        def put(self, event):
            raise OSError("gone")

    with Engine(model, 40, 32, start=False) as engine:
        kept = [engine.submit(prompt(8), GREEDY, max_tokens=8, events=Broken()), engine.submit([1, 2], GREEDY)]
        drain(engine)
        assert len(read(kept[1])[0]) == 16
        assert engine.metrics()["tokens_generated"] < 20


def test_close_ends_every_answer_with_an_error(model):
    engine = Engine(model, 40, 8)
    answers = [engine.submit(prompt(100, seed), GREEDY, max_tokens=100) for seed in range(6)]
    next(answers[0])
    engine.close()
    for answer in answers:
        _, _, (end,) = read(answer)
        assert (end.reason, end.error) == ("error", "the engine was closed")
    assert_raises(StopIteration, None, lambda: next(answers[0]))
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_answer_waits_for_a_thread_that_failed(model, monkeypatch):
    monkeypatch.setattr(Engine, "_accept_all", lambda *_: 1 / 0)
    with Engine(model, 40, 8) as engine:
        _, _, (end,) = read(engine.submit([1, 2]))
        assert (end.reason, end.error) == ("error", "the engine failed: ZeroDivisionError: division by zero")
        assert_raises(AccelerantError, "closed", engine.submit, [1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [torch.AcceleratorError("CUDA error: an illegal address"), DeviceLost("it fell off")])
def test_an_error_of_the_device_ends_every_answer_and_the_engine(model, monkeypatch, error):
    """No later call would succeed: the thread ends, and with it a worker's process, which is started again."""

    with Engine(model, 40, 8, start=False) as engine:
        answers = [engine.submit(prompt(20, seed), max_tokens=4) for seed in range(3)]  # the last ones wait
        engine.step()
        monkeypatch.setattr(engine, "_logits", Mock(side_effect=error))
        assert_raises(type(error), None, engine.run)
        for answer in answers:
            _, _, (end,) = read(answer)
            assert end.reason == "error"
            assert str(error) in end.error
        assert_raises(AccelerantError, "closed", engine.submit, [1])


def test_cancelling_frees_the_blocks(model):
    with Engine(model, 40, 64, start=False) as engine:
        answers = [engine.submit(prompt(30, seed), GREEDY, max_tokens=60) for seed in range(9)]
        engine.step()
        assert engine.metrics()["running"]
        assert engine.metrics()["waiting"]
        for answer in answers[1:]:
            answer.close()
        engine.step()
        assert engine.metrics()["blocks_used"] <= 3
        drain(engine)
        assert read(answers[0])[0] == generated(model, prompt(30, 0), 60)
        assert read(answers[5])[2][0].reason == "cancelled"
        assert_raises(queue.Empty, None, lambda: engine.submit([1]).get(timeout=0))


def test_a_thousand_disconnects_leave_nothing(model):
    with Engine(model, 40, 64) as engine:
        for seed in range(1000):
            answer = engine.submit(prompt(3, seed % 7), max_tokens=50)
            if seed % 100 == 0:
                next(answer)
            del answer  # without close
        read(engine.submit([1], max_tokens=1))
        while (now := engine.metrics())["running"] + now["waiting"]:
            time.sleep(0.01)
        assert now["blocks_used"] == now["running"] == now["waiting"] == 0


# --- what a request asks for -----------------------------------------------------------------------------------------
def test_log_probabilities_are_those_of_the_model(model):
    ids = prompt(30)
    with Engine(model, 40, 16, speculate=2) as engine:
        events = list(engine.submit(ids, Sampling(0.7, top_k=20, repetition_penalty=1.3), logprobs=4, seed=3))[:-1]
        assert all(event.logprob is None for event in list(engine.submit(ids))[:-1])
        assert all(event.top == [] for event in list(engine.submit(ids, logprobs=0))[:-1])
    tokens = torch.tensor([[*ids, *(event.id for event in events)]])
    expected = torch.log_softmax(model(tokens)[0, len(ids) - 1 : -1].detach().double(), -1)
    for event, row in zip(events, expected, strict=True):
        assert event.logprob == pytest.approx(float(row[event.id]), abs=1e-5)
        best = row.topk(4)
        assert [token for token, _ in event.top] == best.indices.tolist()
        assert [value for _, value in event.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize(("length", "budget"), [(1, 16), (2, 16), (16, 5), (100, 7), (100, 400), (200, 16)])
def test_log_probabilities_of_the_prompt_are_those_of_the_model(model, monkeypatch, length, budget, tokens):
    """Whatever is in the cache, in any parts, once for several answers; the answer itself is the one without them."""
    monkeypatch.setattr("accelerant.nn.serving.scheduler._MOST_SCORED", 9)
    ids = prompt(length)
    expected = torch.log_softmax(model(torch.tensor([ids]))[0, :-1].detach().double(), -1)
    with Engine(model, 60, budget, speculate=2) as engine:
        plain = [read(engine.submit(ids, GREEDY, max_tokens=tokens))[0] for _ in range(2)]  # fills the cache
        events = list(engine.submit(ids, GREEDY, max_tokens=tokens, prompt_logprobs=3, n=2))
        assert engine.metrics()["blocks_used"] == 0
    found = [event for event in events if isinstance(event, PromptLogprobs)]
    assert [event.begin for event in found] == [1, *(event.begin + len(event.top) for event in found)][: len(found)]
    assert events[: len(found)] == found
    assert [each for event in found for each in event.logprobs] == pytest.approx(
        expected[range(length - 1), ids[1:]].tolist(), abs=1e-5
    )
    for row, best in zip(
        [each for event in found for each in event.top], expected.topk(3).values.tolist(), strict=True
    ):
        assert [value for _, value in row] == pytest.approx(best, abs=1e-5)
    answers, reasons = [[], []], []
    for event in events[len(found) :]:
        if isinstance(event, Finished):
            reasons.append(event.reason)
        else:
            answers[event.index].append(event.id)
    assert answers == plain
    assert reasons == ["length"] * 2


def test_several_answers_share_the_prompt(model):
    with Engine(model, 60, 64, start=False) as engine:
        answer = engine.submit(prompt(70), n=3, seed=5, max_tokens=20)
        drain(engine)
        several = [result[0] for result in read(answer, n=3)]
        assert engine.metrics()["prefix_hit_tokens"] == 2 * 64
        one = engine.submit(prompt(70), seed=5, max_tokens=20)
        drain(engine)
        assert read(one)[0] == several[0]
        assert len({tuple(ids) for ids in several}) == 3


def test_prefixes_are_shared_only_within_a_salt(model):
    with Engine(model, 60, 64, start=False) as engine:
        hits = []
        salts = [{"salt": "a" * 64 + end} for end in ("", "b", "\ud800", "b")]  # as different as others
        for options in ({}, {"salt": "a"}, {"prefix_cache": False}, {"salt": "a"}, {}, *salts):
            answer = engine.submit(prompt(64), GREEDY, max_tokens=2, **options)
            drain(engine)
            hits.append(read(answer)[2][0].usage.cached_tokens)
        assert hits == [0, 0, 0, 48, 48, 0, 0, 0, 48]


def test_blocks_are_found_until_others_need_them(model):
    with Engine(model, 8, 128, start=False) as engine:
        for seed, cached in ((0, 0), (1, 0), (0, 48), (2, 0), (3, 0), (0, 16)):  # the ends go first
            answer = engine.submit(prompt(60, seed), GREEDY, max_tokens=2)
            drain(engine)
            assert read(answer)[2][0].usage.cached_tokens == cached
            assert engine.metrics()["blocks_used"] == 0


class Characters:
    """A tokenizer whose tokens are bytes of UTF-8."""

    eos_ids = (0,)

    def stream(self):
        return self

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token):
        return self._decoder.decode(bytes([token]))

    def flush(self):
        return self._decoder.decode(b"", True)


def test_stop_strings_and_tokens(model):
    class Letters(Characters):
        def push(self, token):
            return chr(97 + token % 26)

        def flush(self):
            return ""

    with Engine(model, 40, 32, tokenizer=Letters()) as engine:

        def run(**options):
            events = list(engine.submit(prompt(9), GREEDY, max_tokens=30, ignore_eos=True, **options))
            return "".join(event.text_delta for event in events[:-1]), events[-1], [e.id for e in events[:-1]]

        text, end, ids = run()
        assert (len(text), end.reason) == (30, "length")
        for stop in (text[12:15], text[5], [text[20:25], "no such text"]):
            first = stop if isinstance(stop, str) else stop[0]
            cut, end, _ = run(stop=stop)
            assert (cut, end.reason) == (text[: text.index(first)], "stop")
        cut, end, tokens = run(stop=ids[6])
        assert (cut, tokens, end.reason) == (text[: ids.index(ids[6])], ids[: ids.index(ids[6]) + 1], "stop")
        assert_raises(ConfigError, "at least one character", run, stop=["", "a"])


@pytest.mark.search(0.02)
def test_the_text_ends_before_the_first_stop_string(rng, record_property):
    record_property("examples", 300)
    for _ in range(300):
        whole = "".join(rng.choice(["a", "b", "ä", "€", "😀"]) for _ in range(rng.randrange(30)))
        stops = ["".join(rng.choice(["a", "b", "ä", "€"]) for _ in range(rng.randrange(1, 5))) for _ in range(2)]
        text, parts = StoppingText(Characters(), stops), []
        for token in whole.encode():
            delta, stopped = text.push(token)
            parts.append(delta)
            if stopped:
                break
        else:
            parts.append(text.finish()[0])
        found = [whole.index(stop) for stop in stops if stop in whole]
        begun = "".join(parts)
        if not found:
            assert begun == whole
        else:  # of two, the one that is complete first
            ends = min(whole.index(stop) + len(stop) for stop in stops if stop in whole)
            assert begun == whole[: min(whole.index(s) for s in stops if s in whole[:ends])]


def test_an_answer_can_say_what_computed_it(model):
    with Engine(model, 40, 32) as engine:
        found = list(engine.submit(prompt(9), max_tokens=3, account=True))[-1].ledger
        assert list(engine.submit(prompt(9), max_tokens=3))[-1].ledger is None
    assert found["invariant"]
    assert found["fallbacks"] == []
    calls = {row["op"]: row["calls"] for row in found["ops"]}
    assert calls["attention_paged_fwd"] == calls["swiglu_fwd"] == 2 * 3  # layers and steps
    assert calls["rms_norm_fwd"] == (2 * 2 + 1) * 3
    assert calls["linear_invariant"] == (2 * 4 + 1) * 3  # of each layer qkv, output, gate and up, down
    assert len(found["weights_sha256"]) == 64
    other = copy.deepcopy(model)
    other.embed.weight.data[3, 5] += 1e-3
    with Engine(other, 4) as engine:
        assert engine.weights_sha256 != found["weights_sha256"]
