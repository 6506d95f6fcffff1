"""Names of settings in TrainConfig and RunConfig: those of today, of other libraries, and of before."""

import copy
import inspect
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accelerant.errors import ConfigError, FormatError
from accelerant.nn.train import (
    Callback,
    PrintProgress,
    RunConfig,
    TrainConfig,
    Trainer,
    TrainStep,
    fit,
    load_checkpoint,
    load_corpus,
    preset,
    resume_training,
    run_training,
)
from accelerant.nn.train.objective import learning_rate
from accelerant.runtime.registry import find_device
from refusals import assert_raises


def test_other_names_of_settings_are_understood(tmp_path):
    config = TrainConfig(lr=0.5, output_dir=tmp_path, precision="bf16", reduce_dtype=torch.float32, device=None)
    assert (config.learning_rate, config.out, config.precision) == (0.5, str(tmp_path), "bfloat16")
    assert (config.reduce_dtype, config.device) == ("float32", "auto")
    assert config == TrainConfig(learning_rate=0.5, out=str(tmp_path), precision=torch.bfloat16)
    for name in ("fp16", "half", "float16", torch.float16):
        assert TrainConfig(precision=name).precision == "float16"
    for name in ("fp32", "float", "float32", torch.float32):
        assert TrainConfig(precision=name).precision == "float32"
    assert TrainConfig(device=torch.device("cpu")) == TrainConfig(device="cpu")
    assert TrainConfig(device=find_device("cpu")).device == "cpu"
    assert TrainConfig(max_steps=3, gradient_accumulation_steps=2, batch_size=4).accumulate == 2
    assert preset("tiny").replaced(lr=0.5).training.learning_rate == 0.5
    assert TrainConfig(timeout=9.0).timeout_s == 9.0
    assert TrainConfig(microbatch=8) == TrainConfig(accumulate=4)
    assert TrainConfig(batch_size=12, microbatch=4).microbatch == 4
    assert_raises(ConfigError, "microbatch must divide the batch of 32, got 5", TrainConfig, microbatch=5)
    with pytest.raises(ConfigError, match="accumulate=2 and microbatch=16 say the same: give one"):
        TrainConfig(accumulate=2, microbatch=16)
    with pytest.raises(TypeError, match="got learning_rate= and lr=, which are the same: give one"):
        TrainConfig(lr=0.5, learning_rate=0.5)


@pytest.mark.parametrize(("old", "new"), [("clip", "max_grad_norm"), ("beta1", "betas"), ("folder", "out")])
def test_names_of_settings_of_before_name_those_of_today(old, new):
    with pytest.raises(TypeError, match=rf"TrainConfig\(\) has no argument {old}= any more: it is {new}= now"):
        TrainConfig(**{old: 1.0})
    assert_raises(TypeError, rf"it is {new}= now", lambda: preset("tiny").replaced(**{old: 1.0}))


def test_files_with_names_of_before_are_refused():
    with pytest.raises(FormatError, match="no argument clip= any more: it is max_grad_norm= now"):
        TrainConfig.from_dict({"clip": 2.0})
    today = preset("tiny").to_dict()
    for recipe in ({**today["recipe"], "clip": 2.0}, {**today["recipe"], "max_grad_norm": 0}, 3):
        with pytest.raises(FormatError, match=r"unknown field 'clip'|max_grad_norm must be above 0|not iterable"):
            RunConfig.from_dict({**today, "recipe": recipe})
    for name in ("steps", "max_grad_norm", "patience"):
        assert_raises(FormatError, "number, got False", TrainConfig.from_dict, {name: False})


def test_a_checkpoint_is_resumed_with_the_settings_of_its_training(tmp_path):
    data = torch.randn(16, 3), torch.randn(16, 2)
    config = TrainConfig(steps=2, batch_size=4, out=tmp_path, device="cpu", betas=(0.8, 0.9))
    fit(torch.nn.Linear(3, 2), *data, config, callbacks=[])
    assert load_checkpoint(tmp_path / "checkpoint.safetensors")[1]["config"]["betas"] == [0.8, 0.9]
    for change, said in (
        ({"max_grad_norm": 7.0}, r"max_grad_norm=1\.0, got 7\.0"),
        ({"warmup_steps": 3}, "warmup_steps=None, got 3"),
        ({"betas": (0.7, 0.9)}, r"betas=\[0\.8, 0\.9\], got \[0\.7, 0\.9\]"),
    ):
        with pytest.raises(ConfigError, match=f"was trained with {said}"):
            fit(torch.nn.Linear(3, 2), *data, replace(config, steps=4, **change), resume=True)
    resumed = fit(torch.nn.Linear(3, 2), *data, replace(config, steps=4), resume=True)
    assert (resumed.resumed_from, resumed.steps) == (2, 4)


def test_a_config_is_copied_and_pickled(tmp_path):
    config = TrainConfig(lr=0.5, out=tmp_path, betas=[0.8, 0.9])
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert hash(config) == hash(TrainConfig.from_dict(config.to_dict()))
    assert "learning_rate" in inspect.signature(TrainConfig).parameters


@pytest.mark.parametrize("options", [{"warmup_steps": 3}, {"warmup": 0.3, "warmup_steps": 3}, {"warmup": 0.3}])
def test_the_warm_up_is_a_number_of_steps_or_a_fraction(options):
    config = TrainConfig(learning_rate=3.0, schedule="constant", **options)
    assert [learning_rate(config, 10, step) for step in range(5)] == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert learning_rate(TrainConfig(warmup_steps=0, learning_rate=3.0), 10, 0) == 3.0
    assert_raises(ConfigError, "warmup_steps must be 0 or more, got -1", TrainConfig, warmup_steps=-1)


def test_data_of_a_run_is_a_path_or_several(tmp_path):
    run = preset("tiny")
    assert run.replaced(data=tmp_path).data == run.replaced(data=str(tmp_path)).data == (str(tmp_path),)
    assert run.replaced(data=["a.txt", Path("b.txt")]).data == ("a.txt", "b.txt")
    assert run.replaced(data="stdlib").data == ("stdlib",)
    assert_raises(ConfigError, "data must be a path or several, got 7", run.replaced, data=7)


def test_what_training_makes_says_what_it_is(tmp_path):
    trainer = Trainer(torch.nn.Linear(3, 2), TrainConfig(steps=2, batch_size=4, device="cpu"))
    assert repr(trainer) == "Trainer(Linear of 8 parameters on cpu, AdamW, no run)"
    trainer.fit(torch.randn(8, 3), torch.randn(8, 2))
    assert repr(trainer) == "Trainer(Linear of 8 parameters on cpu, AdamW, 2 of 2 steps)"
    step = TrainStep(trainer.model, trainer.optimizer, trainer.loss, accumulate=2)
    assert repr(step) == "TrainStep(Linear on cpu, AdamW, accumulate=2, eager)"
    assert repr([PrintProgress(2.0), Callback()]) == "[PrintProgress(every_s=2.0), Callback()]"
    (tmp_path / "text.txt").write_text("a line of the text\n" * 50)
    corpus = load_corpus(tmp_path / "text.txt", window_bytes=64)
    assert repr(corpus).endswith(
        f"text.txt': {corpus.train_bytes} bytes to train on, {corpus.held_out_bytes} held out)"
    )
    assert repr(corpus.train[0]) == f"Document('text.txt', {len(corpus.train[0].data)} bytes)"


def test_a_run_needs_no_more_than_its_settings(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"the {n}th line of some text\n" for n in range(200)))
    run = preset("tiny").replaced(
        data=tmp_path / "text.txt", out=tmp_path / "out", steps=1, batch_size=2, microbatch=1, context=16, width=8,
        heads=2, layers=1, validation_tokens=64, sample_tokens=1,
    )  # fmt: skip
    assert run_training(run, device="cpu").summary["out"] == str(tmp_path / "out")
    assert resume_training(tmp_path / "out", "cpu", steps=2).summary["steps"] == 2
    assert_raises(TypeError, r"no argument ledger= any more: it is acl\.ledger\(\) now", run_training, run, ledger=dict)
