"""`accelerant generate` against the model's own generate: text, chat, stops, integers, and unusable folders."""

import functools
import io
import json
import re
import subprocess
import sys

import pytest
import torch
from train_workers import commands

from accelerant.nn import Llama, LlamaConfig, load_model, quantize
from accelerant.nn.models.tokenizer import ModelTokenizer
from accelerant.nn.quantization import LinearInt4
from accelerant.nn.train.tokens import train_bpe_on
from accelerant.runtime.files import escaped

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}a:"


@pytest.fixture
def generate(command_line):
    return functools.partial(command_line, "generate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = train_bpe_on(iter(["some words for a tokenizer, and some more"] * 20), 290)
    torch.manual_seed(0)
    sizes = {"context": 64, "layers": 2, "heads": 4, "kv_heads": 2, "width": 32, "hidden": 48}
    model = Llama(LlamaConfig(vocab_size=tokenizer.vocab_size + tokenizer.vocab_size % 2, **sizes, qk_norm=True))
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer.to_json())
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def wanted(folder, ids, count, *, int8=False):
    model = Llama.from_pretrained(folder)
    if int8:
        quantize(model, skip=())
    return model.generate(torch.tensor([ids]), count, temperature=0)[0, len(ids) :].tolist()


@pytest.mark.parametrize("int8", [False, True])
def test_the_likeliest_tokens_are_those_of_the_model(folder, generate, int8):
    options = ("--max-tokens", 20, "--temperature", 0, *(["--int8"] if int8 else []))
    values = json.loads(generate(folder, "some words", *options, "--json")[1])
    tokenizer = ModelTokenizer(folder)
    ids = tokenizer.encode("some words")
    assert values["text"] == tokenizer.decode(wanted(folder, ids, 20, int8=int8))
    assert (values["tokens"], values["prompt_tokens"], values["finish_reason"]) == (20, len(ids), "length")
    status, output, errors = generate(folder, "some words", *options)
    assert (status, errors) == (0, "")
    assert output == "".join(c if c in "\n\t" else escaped(c) for c in values["text"]) + "\n"


def test_a_message_is_answered_by_the_template(folder, generate):
    values = json.loads(generate(folder, "some", "--chat", "--tokens", 5, "--temperature", 0, "--json")[1])
    tokenizer = ModelTokenizer(folder)
    ids = tokenizer.encode("user: some\na:")
    assert values["text"] == tokenizer.decode(wanted(folder, ids, 5))


def test_a_seed_draws_the_same_text(folder, generate):
    texts = [json.loads(generate(folder, "some", "--seed", seed, "--json")[1])["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_what_ends_a_text(folder, generate):
    tokenizer = ModelTokenizer(folder)
    ids = tokenizer.encode("some words")
    text = tokenizer.decode(wanted(folder, ids, 20))
    options = ("--temperature", 0, "--json")
    values = json.loads(generate(folder, "some words", "--stop", text[5:7], *options)[1])
    assert (values["text"], values["finish_reason"]) == (text[: text.index(text[5:7])], "stop")
    values = json.loads(generate(folder, "some words", *options)[1])  # 256 tokens: as many as the context takes
    assert values["tokens"] == 64 - len(ids)


@pytest.mark.parametrize(("arguments", "message"), [
    (["absent", "a"], r"absent is not a folder: pass one with config\.json"),
    (["mamba", "a"], "model_type must be 'llama' or .*, got 'mamba'"),
    (["GOOD", "word " * 70], "the prompt has .* tokens, and the model reads 64"),
    (["GOOD", "a", "--int8", "--int4"], "--int8 and --int4 exclude each other"),
    (["GOOD", "a", "--stop", ""], "--stop must not be empty"),
    (["GOOD", "a", "--temperature", "-1"], r"temperature must be 0 or more, got -1\.0"),
    (["GOOD", "a", "--top-p", "0"], r"top_p must be above 0 and at most 1, got 0\.0"),
    (["GOOD", "caf\udce9"], r"the prompt is not UTF-8 text: 'caf\\udce9'"),
    (["GOOD", "a", "--device", "abacus"], "--device must be auto, cuda or cpu, got 'abacus'"),
])  # fmt: skip
def test_bad_input_is_one_line(folder, generate, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    status, output, errors = generate(*(folder if each == "GOOD" else each for each in arguments))
    assert (status, output) == (2, "")
    assert re.fullmatch(f"accelerant: .*{message}.*\n", errors)


def test_four_bits(tmp_path, folder, generate):
    torch.manual_seed(0)
    sizes = {"context": 64, "layers": 1, "heads": 4, "kv_heads": 2, "width": 128, "hidden": 128}
    Llama(LlamaConfig(vocab_size=ModelTokenizer(folder).size, **sizes)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    values = json.loads(generate(tmp_path, "some", "--int4", "--tokens", 6, "--temperature", 0, "--json")[1])
    model, tokenizer = load_model(tmp_path, quantize="int4")
    ids = tokenizer.encode("some")
    tokens = model.generate(torch.tensor([ids]), 6, temperature=0)[0, len(ids) :].tolist()
    assert values["text"] == tokenizer.decode(tokens)
    assert isinstance(model.blocks[0].mlp.down, LinearInt4)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--int8"]])
def test_two_processes_answer_as_one(folder, generate, more):
    """The first by our launcher, the second as torchrun starts them."""
    options = (folder, "some words", "--device", "cpu", "--json", "--temperature", 0, "--tokens", 12, *more)
    one = json.loads(generate(*options)[1])
    if more:
        (status, output, errors), (other, *silent) = commands([["generate", *options]] * 2)
        assert (status, other, silent) == (0, 0, ["", ""]), errors
    else:
        command = [sys.executable, "-m", "accelerant", "generate", *map(str, options), "--gpus", "2"]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    two = json.loads(output)
    assert two["text"] == one["text"]
    assert two["tokens"] == 12


def test_a_prompt_of_the_standard_input_is_not_for_several_processes(folder, generate, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("some"))
    status, _, errors = generate(folder, "-", "--gpus", 2, "--device", "cpu")
    assert (status, errors) == (2, "accelerant: --gpus takes the prompt as an argument, not from the standard input\n")
