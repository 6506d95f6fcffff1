"""OpenAI's routes, by the client that OpenAI writes, in front of small random models."""

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from browser import open_page
from serving import Server
from test_dashboard import CONTRAST, PICTURES
from tiny_served import write_encoder, write_llama

from accelerant.cli.service import _named_folders
from accelerant.errors import ConfigError, MissingFile
from accelerant.nn import Encoder
from accelerant.nn.models.llama import load_model
from accelerant.service.keys import KeyStore
from accelerant.service.served_models.admission import FairQueue
from accelerant.service.served_models.routes import _Streamed
from accelerant.service.served_models.worker import ChildOfModel, Waiting, _end_process
from accelerant.service.settings import ServiceSettings
from processes import in_threads
from refusals import assert_raises
from requirements import require_module

try:
    import openai
except ImportError:
    openai = None  # the fixture `served` says so

HELLO = {"model": "tiny", "prompt": "hello world", "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("served")
    write_llama(base / "tiny")
    write_encoder(base / "encoder")
    return base


@pytest.fixture(scope="module")
def served(tmp_path_factory, folders):
    """A service with a language model and an encoder; its queue and cache are small."""
    require_module("openai")
    settings = tmp_path_factory.mktemp("settings") / "service.toml"
    settings.write_text("queue_jobs = 4\ncache_tokens = 4096\njson_bytes = 100_000\n")
    given = [text for name in ("tiny", "encoder") for text in ("--model", str(folders / name))]
    running = Server(tmp_path_factory.mktemp("service"), "--device", "cpu", "--config", str(settings), *given)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


@pytest.fixture(scope="module")
def reference(folders):
    """The model and tokenizer in this process."""
    return load_model(folders / "tiny")


def greedy(reference, ids, tokens):
    """The text that plain generation gives."""
    model, tokenizer = reference
    import torch

    found = model.generate(torch.tensor([ids]), tokens, temperature=0, stop=tokenizer.eos_ids)[0].tolist()[len(ids) :]
    return tokenizer.decode([token for token in found if token not in tokenizer.eos_ids])


def gauges(served, name):
    with served.client() as http:
        text = http.get("/metrics").text
    return {found[1]: float(found[2]) for found in re.finditer(rf'^{name}{{model="(\w+)"}} (\S+)$', text, re.M)}


def eventually(what, seconds=60):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


# --- answers ---------------------------------------------------------------------------------------------------------
def test_models_are_listed_with_what_they_do(client):
    found = {model.id: model for model in client.models.list()}
    assert {name: model.task for name, model in found.items()} == {"tiny": "generate", "encoder": "embed"}
    assert client.models.retrieve("tiny").context == 2048
    assert client.models.retrieve("tiny").chat is True
    assert_raises(openai.NotFoundError, None, client.models.retrieve, "other")


def test_a_completion_is_that_of_plain_generation_streamed_or_not(client, reference):
    ids = reference[1].encode("hello world")
    whole = client.completions.create(**HELLO, max_tokens=24)
    assert whole.choices[0].text == greedy(reference, ids, 24)
    assert whole.usage.prompt_tokens == len(ids)
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (24, "length")
    assert client.completions.create(**HELLO | {"prompt": ids}, max_tokens=24).choices == whole.choices
    chunks = list(
        client.completions.create(**HELLO, max_tokens=24, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert len(chunks) > 2
    assert chunks[-1].choices == []
    assert chunks[-1].usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )


def test_a_conversation_goes_through_the_chat_template(client, reference):
    ids = reference[1].apply_chat(CHAT["messages"])
    whole = client.chat.completions.create(**CHAT, max_completion_tokens=16)
    assert whole.choices[0].message.content == greedy(reference, ids, 16)
    assert whole.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    assert client.chat.completions.create(**CHAT | {"messages": parts}, max_tokens=16).choices == whole.choices
    chunks = list(client.chat.completions.create(**CHAT, max_tokens=16, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    talk = [*CHAT["messages"], whole.choices[0].message, {"role": "user", "content": "more"}]  # with refusal: null
    again = client.chat.completions.create(**CHAT | {"messages": talk}, max_tokens=4)
    talk[1] = {**talk[1].model_dump(), "tool_calls": []}  # with every field that the client knows
    assert client.chat.completions.create(**CHAT | {"messages": talk}, max_tokens=4).choices == again.choices
    with pytest.raises(openai.BadRequestError, match=r"'messages\.1\.tool_calls' is not supported"):
        client.chat.completions.create(**CHAT | {"messages": [talk[0], {**talk[1], "tool_calls": [{}]}]})


def test_refusals_do_not_tell_where_the_server_keeps_its_models():
    child, sent = object.__new__(ChildOfModel), []
    child.folder, child.send = os.path.join(os.sep, "srv", "llama"), sent.append
    template = os.path.join(child.folder, "chat_template.jinja")
    child._refuse(1, 400, "FormatError", f"{template} cannot be rendered: {child.folder} is wrong")
    assert sent[0]["message"] == "chat_template.jinja cannot be rendered: the model's folder is wrong"


def test_several_prompts_and_answers_are_numbered(client):
    options = {"temperature": 1.0, "max_tokens": 8, "seed": 5}
    whole = client.completions.create(model="tiny", prompt=["hello", "quick fox"], n=3, **options)
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert len({choice.text for choice in whole.choices}) > 2
    again = client.completions.create(model="tiny", prompt=["hello", "quick fox"], n=3, **options)
    assert again.choices == whole.choices
    second = client.completions.create(model="tiny", prompt="quick fox", n=3, **options)
    assert [choice.text for choice in second.choices] == [choice.text for choice in whole.choices[3:]]
    texts = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(model="tiny", prompt=["hello", "quick fox"], n=3, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [choice.text for choice in whole.choices]


def test_stop_strings_echo_and_penalties(client):
    text = client.completions.create(**HELLO, max_tokens=24).choices[0].text
    stop = text[5:8]
    cut = client.completions.create(**HELLO, max_tokens=24, stop=[stop, "never there"]).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
    chunks = client.completions.create(**HELLO, max_tokens=24, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.text
    echoed = client.completions.create(**HELLO, max_tokens=4, echo=True).choices[0].text
    assert echoed == "hello world" + client.completions.create(**HELLO, max_tokens=4).choices[0].text
    for penalty in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"extra_body": {"repetition_penalty": 5.0}}):
        assert client.completions.create(**HELLO, max_tokens=24, **penalty).choices[0].text != text


def test_logprobs_are_those_of_the_model(client, reference):
    import torch

    model, tokenizer = reference
    found = client.completions.create(**HELLO, max_tokens=6, logprobs=3).choices[0].logprobs
    ids = tokenizer.encode("hello world")
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids]))[0, -1].float(), -1)
    assert found.token_logprobs[0] == pytest.approx(expected.max().item(), abs=1e-4)
    assert found.tokens[0] == tokenizer.token_text(expected.argmax().item())
    assert all(len(top) == 3 for top in found.top_logprobs)
    assert max(found.top_logprobs[0].values()) == found.token_logprobs[0]
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 6
    chat = (
        client.chat.completions.create(**CHAT, max_tokens=6, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    )
    assert [len(entry.top_logprobs) for entry in chat] == [2] * 6
    content = b"".join(bytes(entry.bytes) for entry in chat).decode(errors="replace")
    assert content == client.chat.completions.create(**CHAT, max_tokens=6).choices[0].message.content
    streamed = client.chat.completions.create(**CHAT, max_tokens=6, logprobs=True, top_logprobs=2, stream=True)
    assert [entry for chunk in streamed for entry in chunk.choices[0].logprobs.content] == chat


@pytest.mark.parametrize("most", [0, 1, 4])
def test_prompts_have_their_log_probabilities_with_echo(client, reference, most):
    """As harnesses of evaluation read them: the sum of a continuation's, and whether it is the likeliest."""
    import torch

    model, tokenizer = reference
    texts = ["hello world, how are you", "a", "the quick brown fox" * 30]
    found = client.completions.create(
        model="tiny", prompt=texts, max_tokens=most, echo=True, logprobs=2, n=2, seed=4, temperature=1
    )
    for index, choice in enumerate(found.choices):
        ids, got = tokenizer.encode(texts[index // 2]), choice.logprobs
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([ids]))[0, :-1].float(), -1)
        assert got.tokens[: len(ids)] == [tokenizer.token_text(token) for token in ids]
        assert (got.token_logprobs[0], got.top_logprobs[0], got.text_offset[0]) == (None, None, 0)
        assert got.token_logprobs[1 : len(ids)] == pytest.approx(
            expected[range(len(ids) - 1), ids[1:]].tolist(), abs=1e-4
        )
        best = [max(each.values()) for each in got.top_logprobs[1 : len(ids)]]
        assert best == pytest.approx(expected.amax(-1).tolist(), abs=1e-4)
        assert [a == b for a, b in zip(best, got.token_logprobs[1:], strict=False)] == [
            a == b for a, b in zip(expected.argmax(-1).tolist(), ids[1:], strict=True)
        ]
        assert len(got.tokens) == len(got.top_logprobs) == len(got.text_offset) == len(ids) + most
        assert "".join(got.tokens[: len(ids)]) == texts[index // 2]
        assert choice.text.startswith(texts[index // 2])
        assert choice.finish_reason == "length"
    chunks = client.completions.create(
        model="tiny", prompt=texts, max_tokens=most, echo=True, logprobs=2, n=2, seed=4, temperature=1, stream=True
    )
    pieces = [("", [], []) for _ in found.choices]
    for choice in (chunk.choices[0] for chunk in chunks):
        text, tokens, logprobs = pieces[choice.index]
        pieces[choice.index] = (
            text + choice.text, tokens + choice.logprobs.tokens, logprobs + choice.logprobs.token_logprobs
        )  # fmt: skip
    assert pieces == [(one.text, one.logprobs.tokens, one.logprobs.token_logprobs) for one in found.choices]


def test_a_token_that_ends_an_answer_is_listed_with_echo(client, reference):
    """Harnesses ask for one token and drop the last entry, whatever it is."""
    import torch

    model, tokenizer = reference
    pairs = torch.cartesian_prod(torch.arange(2, 40), torch.arange(2, 300))
    with torch.no_grad():
        prompt = pairs[model(pairs)[:, -1].argmax(-1) == 1][0].tolist()
    found = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=1)
    assert found.choices[0].logprobs.tokens == [tokenizer.token_text(token) for token in [*prompt, 1]]
    assert found.choices[0].finish_reason == "stop"


def test_an_answer_can_carry_its_ledger(client, reference):
    """The kernels that ran and the hash of the weights, which is that of the folder's model here."""
    import hashlib

    digest = hashlib.sha256()
    for name, tensor in sorted(reference[0].state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode() + tensor.numpy().tobytes())
    ask = {"extra_body": {"ledger": True}, "max_tokens": 3}
    assert not hasattr(client.completions.create(**HELLO, max_tokens=3), "ledger")
    whole = client.completions.create(**HELLO, **ask).ledger
    assert (whole["weights_sha256"], whole["invariant"], whole["fallbacks"]) == (digest.hexdigest(), True, [])
    for row in whole["ops"]:
        assert set(row) == {"op", "implementation", "device", "calls"}
    calls = {row["op"]: row["calls"] for row in whole["ops"]}
    assert calls["attention_paged_fwd"] == 2 * 3  # layers and steps
    assert client.chat.completions.create(**CHAT, **ask).ledger["ops"] == whole["ops"]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        for create, body in ((client.completions.create, HELLO), (client.chat.completions.create, CHAT)):
            *others, last = create(**body, **ask, stream=True, **options)
            assert (last.choices, last.ledger, last.usage is None) == ([], whole, not options)
            assert not any(hasattr(chunk, "ledger") for chunk in others)


def test_embeddings_are_the_encoders(client, folders):
    texts = ["a b c", "d", "a b c d e f g h i j"]
    expected = Encoder(folders / "encoder").encode(texts).numpy()
    found = client.embeddings.create(model="encoder", input=texts)  # as base64
    np.testing.assert_allclose([row.embedding for row in found.data], expected, atol=1e-6)
    assert found.usage.prompt_tokens == 14 + 6
    floats = client.embeddings.create(model="encoder", input=[2, 4, 5, 6, 3], encoding_format="float", dimensions=32)
    np.testing.assert_allclose(floats.data[0].embedding, expected[0], atol=1e-6)


def test_models_have_the_names_of_their_folders_or_those_given(tmp_path):
    (tmp_path / "llama").mkdir()
    (tmp_path / "tiny.gguf").touch()
    given = [f"{tmp_path}/llama", f"{tmp_path}/tiny.gguf", f"a=b={tmp_path}/llama"]
    assert_raises(MissingFile, "no folder or file", _named_folders, [*given, "nothing"])
    given[2] = f"other={tmp_path}/llama"
    assert list(_named_folders(given)) == ["llama", "tiny", "other"]
    assert_raises(ConfigError, "two models are called 'llama'", _named_folders, [*given, given[0]])
    with pytest.raises(ConfigError, match=r"setting served: .*llama needs a name: write NAME=FOLDER"):
        ServiceSettings(served=_named_folders([f"={tmp_path}/llama"]))


# --- refusals --------------------------------------------------------------------------------------------------------
WRONG = [
    ("completions", {"prompt": ""}, "prompt", "not empty|empty"),
    ("completions", {"prompt": []}, "prompt", "empty"),
    ("completions", {"prompt": [10**6]}, "prompt", "1,000,000"),
    ("completions", {"prompt": [-1]}, "prompt", "tokens"),
    ("completions", {"prompt": {"a": 1}}, "prompt", "must be"),
    ("completions", {"prompt": "hello", "best_of": 3}, "best_of", "not supported"),
    ("completions", {"prompt": "hello", "suffix": "x"}, "suffix", "not supported"),
    ("completions", {"prompt": "hello", "logit_bias": {"5": 1.0}}, "logit_bias", "not supported"),
    ("completions", {"prompt": "hello", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ("completions", {"prompt": "hello", "temperature": "hot"}, "temperature", "number"),
    ("completions", {"prompt": "hello", "max_tokens": 0}, "max_tokens", "belongs to 'echo'"),
    ("chat/completions", {"messages": CHAT["messages"], "max_tokens": 0}, "max_tokens", "greater"),
    ("completions", {"prompt": "hello", "n": 1000}, "n", "128"),
    ("completions", {"prompt": ["hello"] * 100, "n": 2}, "n", "128"),
    ("completions", {"prompt": "hello", "seed": 2**64}, "seed", "less"),
    ("completions", {"prompt": "hello", "unheard": 1}, "unheard", "not supported"),
    ("completions", {"prompt": "hello", "a[0]": 1}, "a[0]", r"'a\[0\]' is not supported"),
    ("completions", {"prompt": "hello", "stream": True, "stream_options": {"[x": 1}}, "stream_options.[x",
     r"'stream_options\.\[x' is not supported$"),
    ("completions", {"prompt": "hello", "repetition_penalty": 1e-45}, "repetition_penalty", "greater"),
    ("chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages", "'messages.0.content' is"),
    ("completions", {"prompt": [5] * 1400, "n": 128, "echo": True, "logprobs": 5}, "echo", "1,075,200"),
    ("completions", {"prompt": [5] * 3000}, "prompt", "2,048.*3,000"),
    ("completions", {"prompt": "hello", "max_tokens": 2048}, "max_tokens", "2,048"),
    ("chat/completions", {"messages": []}, "messages", "at least 1"),
    ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "user"),
    ("chat/completions", {"messages": CHAT["messages"], "tools": [{}]}, "tools", "not supported"),
    ("chat/completions", {"messages": CHAT["messages"], "top_logprobs": 2}, "top_logprobs", "logprobs"),
    ("chat/completions", {"messages": CHAT["messages"], "response_format": {"type": "json_object"}}, "response_format",
     "not supported"),
    ("chat/completions", {}, "messages", "required"),
    ("embeddings", {"model": "encoder", "input": []}, "input", "empty"),
    ("embeddings", {"model": "encoder", "input": "a " * 100}, "input", "40"),
    ("embeddings", {"model": "encoder", "input": [[2, 99]]}, "input", "99"),
    ("embeddings", {"model": "encoder", "input": "a", "dimensions": 8}, "dimensions", "32"),
    ("embeddings", {"model": "tiny", "input": "a"}, "model", "language model"),
    ("completions", {"model": "encoder", "prompt": "a"}, "model", "encoder"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "param", "match"), WRONG)
def test_what_is_not_supported_is_refused_by_name(served, route, body, param, match):
    with served.client() as http:
        answer = http.post(f"/v1/{route}", json={"model": "tiny"} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"].split(".")[0]) == (
        400,
        "invalid_request_error",
        param.split(".")[0],
    )
    assert re.search(match, error["message"])
    assert error["code"]


def test_bodies_that_are_not_read(served, client):
    with served.client() as http:
        wrong = (
            b"",
            b"[" * 50_000,
            b'{"a":' * 5000,
            b'{"model": "tiny", "model": "tiny", "prompt": "a"}',
            b"\xff",
            b'{"model": "tiny", "prompt": "a", "\\ud800": 1}',
        )
        for content, status in (*((content, 400) for content in wrong), (b"{" + b" " * 200_000, 413)):
            answer = http.post("/v1/completions", content=content)
            assert (answer.status_code, set(answer.json()["error"])) == (
                status, {"message", "type", "param", "code", "request_id"}
            )  # fmt: skip
        answer = http.post("/v1/embeddings", content=b'{"model": "encoder", "input": ["a", "\\ud800"]}')
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
        assert http.get("/v1/nothing").json()["error"]["code"] == "http_error"
        assert http.get("/v1/completions").status_code == 405
    found = assert_raises(openai.NotFoundError, None, lambda: client.completions.create(**HELLO | {"model": "other"}))
    assert (found.code, found.param) == ("model_not_found", "model")


# --- faults ----------------------------------------------------------------------------------------------------------
def test_one_answer_that_is_not_finite_ends_alone(client, folders):
    last = json.loads((folders / "tiny" / "config.json").read_text())["vocab_size"] - 1
    good = {}

    def ask():
        good["text"] = (
            client.completions.create(model="tiny", prompt="hello", max_tokens=40, temperature=0).choices[0].text
        )

    other = threading.Thread(target=ask)
    other.start()
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.completions.create(model="tiny", prompt=[5, last, 6], max_tokens=5)
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.completions.create(model="tiny", prompt=[5, last, 6], max_tokens=5, stream=True))
    other.join()
    assert (
        good["text"]
        == client.completions.create(model="tiny", prompt="hello", max_tokens=40, temperature=0).choices[0].text
    )


def leave(served, body, after=1):
    """Send a request and disconnect after so many bytes of the answer."""
    host, port = served.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        if after:
            connection.recv(after)


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, 1000])
def test_disconnections_leak_no_blocks(served, count):
    names = "accelerant_model_generated_tokens_total", "accelerant_model_prefix_lookup_tokens"
    generated, looked_up = (gauges(served, name) for name in names)
    for number in range(count):
        body = HELLO | {"max_tokens": 1500, "ignore_eos": True, "stream": number % 3 > 0}
        leave(served, body, after=number % 3 - 1 if number % 3 else 0)
    eventually(lambda: gauges(served, names[1]) != looked_up)  # the worker has reported
    eventually(lambda: gauges(served, "accelerant_model_running") == {"tiny": 0})
    eventually(lambda: gauges(served, "accelerant_model_blocks_used") == {"tiny": 0})
    assert gauges(served, "accelerant_model_queued")["tiny"] == 0
    assert gauges(served, names[0]) == generated  # no answer was computed to its end


def test_a_client_that_leaves_before_the_first_part_of_a_stream_ends_its_request():
    """Its connection takes no more yet, as after an earlier answer that it has not read."""
    ended = []

    async def parts():
        yield "data: {}"

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        await asyncio.sleep(60)

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    asyncio.run(_Streamed(parts(), lambda: ended.append(1))(scope, receive, send))
    assert ended == [1]


def test_a_queue_that_is_full_refuses_and_says_when_to_come_back(served):
    answers, at_once = [], threading.Barrier(12)

    def ask():
        with served.client() as http:
            at_once.wait(60)
            answers.append(http.post("/v1/completions", json=HELLO | {"prompt": [5] * 1500, "max_tokens": 150}))

    in_threads([ask] * 12)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert sorted({answer.status_code for answer in answers}) == [200, 429]
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
    assert refused[0].json()["error"]["type"] == "rate_limit_error"


def test_a_slow_reader_holds_up_nobody(served, client):
    host, port = served.url.removeprefix("http://").split(":")
    content = json.dumps(HELLO | {"max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        assert client.completions.create(**HELLO, max_tokens=8).usage.completion_tokens == 8
        eventually(lambda: gauges(served, "accelerant_model_running")["tiny"] == 0)  # though nothing was read
        received = b""
        while b"[DONE]" not in received:
            part = connection.recv(65536)
            assert part
            received += part


def test_a_killed_worker_ends_its_streams_and_serves_the_next_request(served, client):
    stream = client.completions.create(**HELLO, max_tokens=1900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    pids = [
        int(line) for line in os.popen(f"pgrep -P {served.process.pid} -f served_models.worker.*/tiny").read().split()
    ]
    assert len(pids) == 1
    os.kill(pids[0], signal.SIGKILL)
    assert_raises(openai.APIError, "SIGKILL", lambda: list(stream))
    assert client.completions.create(**HELLO, max_tokens=8).usage.completion_tokens == 8
    assert gauges(served, "accelerant_model_restarts_total|accelerant_model_restarts")["tiny"] == 1


def test_metrics_count_tokens_and_times(served, client):
    before = gauges(served, "accelerant_model_generated_tokens_total").get("tiny", 0)
    client.completions.create(**HELLO, max_tokens=10, extra_body={"ignore_eos": True})
    assert gauges(served, "accelerant_model_generated_tokens_total")["tiny"] == before + 10
    for name in ("first_token", "between_tokens"):
        assert gauges(served, f"accelerant_model_{name}_seconds_count")["tiny"] > 0
    with served.client() as http:
        eventually(lambda: "attention_paged" in str(http.get("/ledger").json()["ops"]))
    record = next(one for one in reversed(served.records()) if one["operation"] == "completions")
    assert (record["backend"], record["status"]) == ("cpu", 200)


# --- the page that tries a prompt ------------------------------------------------------------------------------------
def test_the_page_streams_an_answer_and_shows_what_is_wrong(served, client, tmp_path):
    with open_page(f"{served.url}/prompt", tmp_path) as page:
        page.look(1100, 900)
        page.wait("document.getElementById('model').options.length")
        assert page.evaluate("document.getElementById('model').value") == "tiny"
        page.evaluate("document.getElementById('text').value = 'hello'; document.getElementById('tokens').value = 40")
        page.evaluate("document.getElementById('temperature').value = 0")
        page.evaluate("document.getElementById('send').click()")
        page.wait("document.getElementById('figures').textContent")
        expected = client.chat.completions.create(**CHAT, max_tokens=40).choices[0].message.content
        assert page.evaluate("document.getElementById('answer').textContent").split() == expected.split()
        figures = page.evaluate("document.getElementById('figures').textContent")
        count, seconds, rate, first = map(
            float,
            re.fullmatch(
                r"(\d+) tokens after \d+ in ([\d.]+) s, ([\d.]+) tokens per second; the first in (\d+) ms", figures
            ).groups(),
        )
        assert count == 40
        assert count / (seconds + 0.006) - 0.06 < rate < count / (seconds - 0.006) + 0.06  # both are rounded
        assert first / 1000 < seconds + 0.006
        for width, scheme in ((1100, "light"), (390, "dark")):
            page.look(width, 900, scheme)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.evaluate(CONTRAST) == []
            page.picture(PICTURES / f"prompt-{width}-{scheme}.png")
        assert page.problems == []
        page.evaluate("document.getElementById('tokens').value = 5000")
        page.evaluate("document.getElementById('send').click()")
        assert "2,048 tokens" in page.wait("document.getElementById('problem').textContent")


# --- keys, drain -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_keys_guard_the_routes_and_a_drain_ends_streams(tmp_path, served, folders):
    """A second service on the folder of the first one; it ends what has time, and the rest with an error."""
    store = KeyStore(tmp_path / "keys.json")
    tokens = [store.create(name, [scope])[1] for name, scope in (("one", "generate"), ("two", "monitor"))]
    settings = tmp_path / "service.toml"
    settings.write_text("drain_s = 3.0\n")
    given = ["--device", "cpu", "--config", str(settings), "--model", f"other={folders / 'tiny'}", "--int8"]
    second = Server(tmp_path, *given)
    make = lambda key: openai.OpenAI(base_url=f"{second.url}/v1", api_key=key, max_retries=0, timeout=120)  # noqa: E731
    with make(tokens[0]) as client, make(tokens[1]) as monitor, make("wrong") as stranger:
        with pytest.raises(openai.AuthenticationError) as found:
            stranger.completions.create(**HELLO)
        assert found.value.code == "unauthorized"
        assert_raises(openai.PermissionDeniedError, None, monitor.completions.create, **HELLO)
        body = HELLO | {"model": "other", "stream": True, "extra_body": {"ignore_eos": True}}
        short, long = (
            iter(client.completions.create(**body, max_tokens=count, n=n)) for count, n in ((40, 1), (2000, 24))
        )
        assert next(short)
        assert next(long)
        second.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIStatusError) as found:
            eventually(lambda: client.completions.create(**HELLO | {"model": "other"}, max_tokens=1) is None)
        assert (found.value.status_code, found.value.code) == (503, "draining")
        assert [chunk.choices[0].finish_reason for chunk in short][-1] == "length"
        assert_raises(openai.APIError, "server stopped", lambda: list(long))
    assert second.process.wait(timeout=300) == 0  # without a second signal, which would end it at once


def listening(pid):
    """Addresses on which a process takes connections, in hexadecimal: 0100007F is this machine's own."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    lines = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
    ]
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes]


@pytest.mark.slow
def test_a_model_split_over_processes_answers_as_one_process(tmp_path, request):
    """Over gloo in place of NCCL; a killed part ends the streams, and the next request is served."""
    require_module("openai")
    write_llama(tmp_path / "even", spare=2)
    reference = load_model(tmp_path / "even")
    given = ["--device", "cpu", "--gpus", "2", "--model", str(tmp_path / "even")]
    server = Server(tmp_path, *given)
    request.addfinalizer(server.process.kill)  # also of a test that failed
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        prompts = ["hello world", "the quick brown fox" * 30, "a"]
        ask = {"model": "even", "prompt": prompts, "temperature": 0, "max_tokens": 24}
        expected = [greedy(reference, reference[1].encode(text), 24) for text in prompts]
        for _ in range(2):  # computed, and found in the cache
            assert [choice.text for choice in client.completions.create(**ask).choices] == expected
        with pytest.raises(openai.BadRequestError, match="weights of a split model") as found:
            client.completions.create(**ask, extra_body={"ledger": True})
        assert found.value.param == "ledger"
        stream = client.completions.create(**ask | {"max_tokens": 1000}, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        (leader,) = os.popen(f"pgrep -P {server.process.pid} -f served_models.worker").read().split()
        (follower,) = os.popen(f"pgrep -P {leader} -f served_models.worker").read().split()
        assert {*listening(leader), *listening(follower)} == {"0100007F"}
        os.kill(int(follower), signal.SIGKILL)
        assert_raises(openai.APIError, "the worker of model even ended", lambda: list(stream))
        assert [choice.text for choice in client.completions.create(**ask).choices] == expected
        (leader,) = os.popen(f"pgrep -P {server.process.pid} -f served_models.worker").read().split()
        (follower,) = os.popen(f"pgrep -P {leader} -f served_models.worker").read().split()
        os.kill(int(leader), signal.SIGKILL)
        eventually(lambda: not os.path.exists(f"/proc/{follower}"))
    assert server.stop() == 0


# --- fairness --------------------------------------------------------------------------------------------------------
def test_keys_take_turns_and_share_the_queue():
    queue = FairQueue(8)
    for number in range(8):
        assert queue.has_room("loud")
        queue.add("loud", ("loud", number))
    assert not queue.has_room("loud")
    assert queue.has_room("quiet")
    queue.add("quiet", ("quiet", 0))
    queue.add("third", ("third", 0))
    assert queue.remove(("loud", 1))
    assert not queue.remove(("loud", 1))
    taken = []
    while len(queue):
        first = queue.first()
        taken.append(queue.pop())
        assert taken[-1] == first
    assert taken[:4] == [("loud", 0), ("quiet", 0), ("third", 0), ("loud", 2)]
    assert [number for _, number in taken[4:]] == [3, 4, 5, 6, 7]
    assert_raises(IndexError, None, queue.pop)


def test_a_process_ends_with_the_first_of_its_threads(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(threading, "excepthook", _end_process)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    assert ended == [1]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_tokenizer_that_panics_is_an_answer():
    class PanicException(BaseException):
        pass

    class Broken(ChildOfModel):
        def _prepared(self, head):
            raise PanicException

    ours, theirs = socket.socketpair()
    with ours, theirs:
        Broken(theirs, 4)._guarded({"id": 1, "param": None})
        assert b"the prompt failed: PanicException" in ours.recv(1000)


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_request_that_is_cancelled_while_its_prompt_is_prepared_never_waits(cancelled):
    ours, theirs = socket.socketpair()
    started, ready = threading.Event(), threading.Event()

    class Slow(ChildOfModel):
        def _prepared(self, head):
            started.set()
            ready.wait()
            return Waiting(head["id"], "key", [[1]], {})

    with ours, theirs:
        worker = Slow(theirs, 4)
        worker._coming[1] = False
        preparing = threading.Thread(target=worker._guarded, args=({"id": 1, "param": None},))
        preparing.start()
        started.wait()
        if cancelled:
            worker._cancel(1)
        ready.set()
        preparing.join()
        assert (len(worker._queue), len(worker._open), worker._coming) == ((0, 0, {}) if cancelled else (1, 1, {}))
        worker._cancel(1)
        assert (len(worker._queue), len(worker._open)) == (0, 0)
