import functools
import json
import re
import shutil

import pytest
import torch

from accelerant.nn import GPT, GPTConfig, Llama, LlamaConfig
from accelerant.nn.train import load_run, run_training
from accelerant.nn.train.config import PRESETS
from accelerant.nn.train.tokens import train_bpe_on
from accelerant.runtime.files import escaped

CPU = torch.device("cpu")


class Silent:
    """A view of a run."""

    def __getattr__(self, name):
        return lambda *_, **__: None


@pytest.fixture
def sample(command_line):
    return functools.partial(command_line, "sample")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes a finished run of a preset's kind: of bytes, or of a trained BPE."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_text("".join(f"the {n}th line of some text, for learning\n" for n in range(200)))
    small = {"context": 16, "layers": 1, "heads": 2, "width": 16, "steps": 2, "batch_size": 2, "microbatch": 2}
    small |= {"vocab_size": 300, "validation_tokens": 64, "sample_tokens": 4, "predict_memory": False}

    @functools.cache
    def make(name):
        run = PRESETS[name].replaced(**small, data=(str(text),))
        run_training(run, folder / name, CPU, progress=Silent())
        return folder / name

    return make


@pytest.mark.parametrize("name", ["tiny", "rnn", pytest.param("small", marks=pytest.mark.slow)])
def test_a_run_continues_a_prompt(made, sample, name):
    arguments = (made(name), "--prompt", "the 1", "--tokens", 20, "--seed", 3)
    status, output, errors = sample(*arguments)
    assert (status, errors) == (0, "")
    status, text, _ = sample(*arguments, "--json")
    values = json.loads(text)
    assert output == "the 1" + "".join(c if c in "\n\t" else escaped(c) for c in values["text"]) + "\n"
    assert (values["prompt"], values["seed"], values["tokens"]) == ("the 1", 3, 20)
    assert json.loads(sample(*arguments[:-1], 4, "--json")[1])["text"] != values["text"]
    assert sample(made(name), "--tokens", 3)[0] == 0  # without a prompt


def test_likeliest_tokens_are_those_of_the_model(made, sample):
    values = json.loads(sample(made("tiny"), "--prompt", "line", "--tokens", 8, "--temperature", 0, "--json")[1])
    model, tokenizer = load_run(made("tiny"))
    tokens = model.generate(torch.tensor([tokenizer.encode_text("line")]), 8, temperature=0)
    assert values["text"] == tokenizer.decode(tokens[0, 4:].tolist())
    assert not model.training


def test_an_unfinished_run_is_read_from_its_checkpoint(made, tmp_path):
    out = shutil.copytree(made("tiny"), tmp_path / "run")
    wanted = load_run(out)[0].state_dict()
    for name in ("summary.json", "model.safetensors"):
        (out / name).unlink()
    found = load_run(out)[0].state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_hugging_face_folder_continues_a_prompt(tmp_path, sample, kind):
    tokenizer = train_bpe_on(iter(["some words for a tokenizer, and some more"] * 20), 290)
    size = tokenizer.vocab_size
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT(GPTConfig(vocab_size=size, context=32, layers=1, heads=2, width=16))
    else:
        model = Llama(LlamaConfig(vocab_size=size, context=32, layers=1, heads=2, kv_heads=1, width=16, hidden=32))
    model.save_pretrained(tmp_path)
    status, _, errors = sample(tmp_path, "--prompt", "some words")
    assert status == 2
    assert f"cannot read the tokenizer {tmp_path}/tokenizer.json: there is none; write it with transformers" in errors
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    values = json.loads(sample(tmp_path, "--prompt", "some words", "--tokens", 9, "--temperature", 0, "--json")[1])
    given = torch.tensor([tokenizer.encode_text("some words")])
    wanted = model.generate(given, 9, temperature=0)[0, given.shape[1] :].tolist()
    assert values["text"] == tokenizer.decode(wanted)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [wanted[2]]}))
    values = json.loads(sample(tmp_path, "--prompt", "some words", "--tokens", 9, "--temperature", 0, "--json")[1])
    assert values["ended"]
    assert values["text"] == tokenizer.decode(wanted[: wanted.index(wanted[2])])


@pytest.mark.parametrize(("arguments", "message"), [
    (["absent"], "no folder absent: name a run's, or one with config.json and model.safetensors"),
    ([""], "RUN must not be empty"),
    (["."], "holds no model: there is no config.json"),
    (["mamba"], "model_type must be gpt2 or llama or .*, got 'mamba'"),
    ([".", "--temperature", "-1"], "temperature must be 0 or more, got -1.0"),
    ([".", "--top-k", "-1"], "--top-k must be 0 or more, got -1"),
    ([".", "--top-p", "0"], "top_p must be above 0 and at most 1, got 0.0"),
    ([".", "--tokens", str(10**20)], r"--tokens must be below 2\*\*31, got 10{20}"),
    ([".", "--prompt", "caf\udce9"], r"the prompt is not UTF-8 text: 'caf\\udce9'"),
    ([".", "--seed", "-1"], r"--seed must be 0 to 2\*\*63 - 1, got -1"),
    ([".", "--device", "abacus"], "--device must be auto, cuda or cpu, got 'abacus'"),
])  # fmt: skip
def test_bad_input_is_one_line(sample, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    status, output, errors = sample(*arguments)
    assert (status, output) == (2, "")
    assert re.fullmatch(f"accelerant: .*{message}.*\n", errors)


@pytest.mark.parametrize("damage", ["model", "checkpoint", "shape", "absent"])
def test_a_damaged_run_is_refused(made, tmp_path, sample, damage):
    out = shutil.copytree(made("tiny"), tmp_path / "run")
    config = json.loads((out / "config.json").read_text())
    if damage == "model":
        (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-1])
    elif damage == "shape":
        config["model"]["layers"] = 1 << 40
        (out / "config.json").write_text(json.dumps(config))
    else:
        (out / "summary.json").unlink()
        if damage == "absent":
            for name in ("checkpoint.safetensors", "model.safetensors"):
                (out / name).unlink()
        else:
            (out / "checkpoint.safetensors").write_bytes(b"")
    status, output, errors = sample(out)
    assert (status, output, errors.count("\n")) == (2, "", 1)
    assert str(out) in errors
