"""Runs of a Llama: their folders are read by transformers, load_model and load_run alike, and continue exactly."""

import json
import os
import signal

import pytest
import torch

from accelerant.errors import FormatError
from accelerant.nn import Llama, load_model
from accelerant.nn.train import load_run, resume_training, run_training

LLAMA = {"model": "llama", "tokenizer": "bpe", "vocab_size": 300, "width": 24, "heads": 2}


def test_the_folder_of_a_run_is_one_of_transformers(run, tmp_path, cpu, watcher):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "run"
    run_training(run.replaced(**LLAMA, steps=2), out, cpu, progress=watcher())
    model, tokenizer = load_model(out)
    trained, own = load_run(out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    names = transformers.AutoTokenizer.from_pretrained(out)
    for text in ("the 9th line  of\tsome \U0001f600", "日本"):
        ids = tokenizer.encode(text)
        assert ids == own.encode_text(text) == names(text).input_ids
        assert tokenizer.decode(ids) == text
        idx = torch.tensor([ids])[:, : model.config.context]
        with torch.no_grad():
            assert torch.equal(model(idx), trained(idx))
            torch.testing.assert_close(theirs(idx).logits, model(idx), rtol=0, atol=1e-4)
    assert tokenizer.eos_ids == (own.end,) == (theirs.generation_config.eos_token_id,)
    config = json.loads((out / "config.json").read_text())
    assert config["parameters"] == model.parameter_count() == theirs.num_parameters()
    assert type(Llama.from_pretrained(out)) is Llama
    begun = tmp_path / "begun"
    run_training(run.replaced(init_from=str(out), steps=1), begun, cpu, progress=watcher())
    assert load_run(begun)[0].config == model.config


def test_a_run_of_a_llama_continues_exactly(run, tmp_path, cpu, watcher):
    run = run.replaced(**LLAMA)
    run_training(run, tmp_path / "straight", cpu, progress=watcher())
    out = tmp_path / "run"
    run_training(run, out, cpu, progress=watcher(7, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert type(load_run(out)[0]) is Llama
    with pytest.raises(FormatError, match=r"has neither model\.safetensors"):
        load_model(out)
    assert resume_training(out, cpu, progress=watcher()).summary["status"] == "done"
    a, b = (load_run(folder)[0].state_dict() for folder in (out, tmp_path / "straight"))
    assert all(torch.equal(a[name], b[name]) for name in b)
