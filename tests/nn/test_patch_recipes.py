"""The recipes of docs/huggingface.md run, and a patched model trains under the Trainer as an unpatched one does."""

import re
from pathlib import Path

import pytest
import torch
from patch_models import make, transformers

import accelerant as acl
from accelerant.errors import ConfigError

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, an optional package")

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
RECIPES = dict(
    zip(
        ("trainer", "accelerate"),
        re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S),
        strict=True,
    )
)


@pytest.mark.slow
def test_the_recipe_with_the_trainer(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(RECIPES["trainer"], str(PAGE), "exec"), names)
    losses = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    assert names["result"].global_step == 12
    assert names["result"].training_loss < 3.2  # log 32 is 3.47
    assert all(torch.isfinite(torch.tensor(losses)))
    assert "that of a guess is 3.47" in capsys.readouterr().out
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "counting")


def test_the_recipe_with_accelerate():
    names = {}
    exec(compile(RECIPES["accelerate"], str(PAGE), "exec"), names)
    losses = names["losses"]
    assert len(losses) == 16
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])


def rows():
    generator = torch.Generator().manual_seed(5)
    return [
        {"input_ids": row, "labels": row.clone()} for row in torch.randint(3, 97, (24, 12), generator=generator)
    ]  # fmt: skip


def trained(model, path, kind=transformers.Trainer, **settings):
    arguments = transformers.TrainingArguments(
        output_dir=str(path), per_device_train_batch_size=3, max_steps=4, learning_rate=1e-3, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, seed=0, **settings,
    )  # fmt: skip
    data = rows()
    trainer = kind(model=model, args=arguments, train_dataset=data, eval_dataset=data[:6])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer, losses, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}, {"label_smoothing_factor": 0.1}],
    ids=["plain", "accumulated", "smoothed"],
)
@pytest.mark.sample(3)
def test_the_trainer_sees_no_difference(settings, tmp_path, capsys):
    _, wanted, wanted_eval = trained(make("llama"), tmp_path, **settings)
    model = make("llama")
    acl.nn.patch(model)
    _, found, found_eval = trained(model, tmp_path, **settings)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert found_eval == pytest.approx(wanted_eval, rel=1e-4)


def test_mixed_precision_and_the_way_back(tmp_path, capsys):
    model = make("gpt2")
    acl.nn.patch(model)
    trainer, losses, _ = trained(model, tmp_path, bf16=True)
    assert len(losses) == 4
    with pytest.raises(ConfigError, match="was replaced after patch"):
        acl.nn.unpatch(model)
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    acl.nn.unpatch(model)
    assert "forward" not in model.__dict__


def test_a_loss_of_ones_own_reads_the_logits_in_mixed_precision(tmp_path, capsys):
    """As a recipe with class weights does; accelerate hands on a copy of the output there, its floats in float32."""

    class Weighted(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            outputs = model(**inputs)
            seen.append(outputs.logits)
            loss = torch.nn.functional.cross_entropy(
                outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
            )
            return (loss, outputs) if return_outputs else loss

    found = {}
    for patched in (False, True):
        model, seen = make("llama"), []
        if patched:
            acl.nn.patch(model)
        _, losses, _ = trained(model, tmp_path, kind=Weighted, bf16=True)
        assert {logits.dtype for logits in seen} == {torch.float32}
        found[patched] = losses
    assert found[True] == pytest.approx(found[False], rel=2e-2)


def test_predictions_have_logits(tmp_path, capsys):
    model = make("llama")
    acl.nn.patch(model)
    trainer, *_ = trained(model, tmp_path)
    assert trainer.predict(rows()[:5]).predictions.shape == (5, 12, 97)
