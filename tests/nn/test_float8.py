"""Products in fp8, on a CPU by casting there and back: layers, blocks and steps beside bfloat16."""

import pytest
import torch
from torch import nn

from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.nn import GPT, GPTConfig, Linear, Llama, LlamaConfig, layers, optim
from accelerant.nn.layers import LowWeights, float8_of, float8_weights
from accelerant.nn.train import Callback, TrainConfig, Trainer
from accelerant.nn.train import step as step_module
from accelerant.nn.train import trainer as trainer_module
from accelerant.nn.train.config import RunConfig, preset
from accelerant.nn.train.step import TrainStep
from refusals import assert_raises

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SMALL = GPTConfig(vocab_size=50, context=16, layers=2, heads=2, width=32)


@pytest.fixture
def emulated(monkeypatch):
    """Blocks run as one function, and in fp8, on a CPU too."""
    monkeypatch.setattr(layers, "FUSED", {"cuda", "cpu"})
    for module in (step_module, trainer_module):
        monkeypatch.setattr(module, "require_float8", lambda _device: None)


def model(config=SMALL):
    torch.manual_seed(0)
    return GPT(config)


def tokens(config=SMALL, batch=3):
    torch.manual_seed(1)
    return torch.randint(0, config.vocab_size, (2, batch, config.context)).unbind(0)


def gradients(one, batch, float8):
    low = LowWeights(BF16, float8_weights(one) if float8 else ())
    with low.refreshed(), torch.autocast("cpu", dtype=BF16):
        loss = one.loss(*batch)
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in one.named_parameters()}


@pytest.mark.parametrize("config", [SMALL, GPTConfig(50, 16, 2, 2, 32, bias=False)], ids=["bias", "none"])
def test_gradients_of_a_gpt_beside_bfloat16(config, emulated):
    """A product of e4m3 numbers is 2^-4 off an element at most, and sums of many such errors of both signs less."""
    low, expected = gradients(model(config), tokens(config), False)
    loss, found = gradients(model(config), tokens(config), True)
    assert loss != low
    torch.testing.assert_close(loss, low, rtol=5e-3, atol=0)
    for name, want in expected.items():
        off = (found[name] - want).norm() / want.norm()
        assert off < 0.12, f"{name}: {off:.3f}"
    same = (
        torch.cat([found[name].flatten() for name in found]),
        torch.cat([each.flatten() for each in expected.values()]),
    )
    assert torch.nn.functional.cosine_similarity(*same, dim=0) > 0.998


@pytest.mark.slow
def test_losses_fall_as_in_bfloat16(emulated):
    curves = []
    for precision in (BF16, E4M3):
        one = model()
        step = TrainStep(one, optim.AdamW(one.parameters(), lr=1e-2), one.loss, precision=precision)
        curves.append(torch.stack([step([tokens()], 1e-2).loss for _ in range(25)]))
    assert curves[1][-1] < 0.5 * curves[1][0]
    torch.testing.assert_close(curves[1], curves[0], rtol=0.05, atol=0.05)
    assert not torch.equal(*curves)


def test_weights_are_made_anew_each_step_and_only_in_it(emulated):
    one = model()
    weight = one.blocks[0].mlp.up.weight
    low = LowWeights(BF16, [weight])
    with low.refreshed():
        before = float8_of(weight)
        values = before.q.float() * before.scale[:, None]
        torch.testing.assert_close(values, weight.detach(), rtol=2**-4, atol=2e-6)
        assert torch.equal(before.transposed.float(), before.q.float().t())
    assert float8_of(weight) is None
    with torch.no_grad():
        weight.mul_(3)
    with low.refreshed():
        assert float8_of(weight) is before
        torch.testing.assert_close(before.q.float() * before.scale[:, None], weight.detach(), rtol=2**-4, atol=6e-6)


def test_weights_changed_between_the_passes_are_noticed(emulated):
    one = model()
    low = LowWeights(BF16, float8_weights(one))
    with low.refreshed(), torch.autocast("cpu", dtype=BF16):
        loss = one.loss(*tokens())
    with low.refreshed(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_layers_by_themselves(emulated):
    """A block with a hook inside takes its layers one by one, in fp8 as well."""
    whole, _ = gradients(model(), tokens(), True)
    one = model()
    for block in one.blocks:
        block.mlp.register_forward_hook(lambda *_: None)
    pieces, found = gradients(one, tokens(), True)
    torch.testing.assert_close(pieces, whole, rtol=2e-3, atol=0)
    assert pieces != gradients(one, tokens(), False)[0]
    assert all(grad is not None for grad in found.values())


def test_recomputation_takes_the_same_numbers(emulated):
    from accelerant.nn.train.step import recomputed

    _, expected = gradients(model(), tokens(), True)
    one = model()
    low = LowWeights(BF16, float8_weights(one))
    with recomputed(one, ("blocks.*",)), low.refreshed(), torch.autocast("cpu", dtype=BF16):
        one.loss(*tokens()).backward()
    for name, param in one.named_parameters():
        torch.testing.assert_close(param.grad, expected[name], rtol=2e-2, atol=2e-4)


def test_a_llamas_blocks(emulated):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, context=16, layers=2, heads=4, kv_heads=2, width=32, hidden=64)
    weights = float8_weights(Llama(config))
    assert len(weights) == 4 * config.layers


def test_which_weights():
    one = model()
    found = float8_weights(one)
    assert len(found) == 4 * SMALL.layers
    assert all(each is not one.wte.weight for each in found)


def test_what_is_refused(emulated):
    assert_raises(ConfigError, r"is for the blocks of accelerant\.nn", lambda: float8_weights(nn.Linear(16, 16)))
    with pytest.raises(ConfigError, match=r"multiples of 16; blocks\.0\.attention\.qkv is \(72, 24\)"):
        float8_weights(model(GPTConfig(50, 16, 1, 2, 24)))
    one = model()
    low = LowWeights(BF16, float8_weights(one))
    with low.refreshed(), torch.autocast("cpu", dtype=BF16):
        loss = one.loss(*tokens())
    with pytest.raises(RuntimeError, match="fp8 cannot be differentiated"):
        torch.autograd.grad(loss, [one.blocks[0].mlp.up.weight], create_graph=True)


def test_a_layer_that_would_not_be_in_fp8_says_so():
    layer = Linear(16, 32)
    refused = pytest.raises(UnsupportedCase, match=r"Linear\(16, 32, bias=True\) runs on torch's")
    with LowWeights(BF16, [layer.weight]).refreshed(), torch.autocast("cpu", dtype=BF16), refused:
        layer(torch.randn(3, 16))


def test_a_device_without_fp8_is_refused():
    one = model()
    with pytest.raises(
        ConfigError, match=r"fp8 needs an NVIDIA GPU of compute capability 8\.9 or more, cpu is no NVIDIA"
    ):
        TrainStep(one, optim.AdamW(one.parameters()), one.loss, precision=E4M3)


def fitted(folder="", steps=12, resume=False, stop_at=None):
    torch.manual_seed(0)
    data = torch.randint(0, 50, (40, SMALL.context + 1))
    one = model()
    config = TrainConfig(steps=steps, batch_size=4, precision="fp8", device="cpu", out=folder, evaluations=1)

    class Stop(Callback):
        def before_step(self, trainer, step):
            if step == stop_at:
                trainer.stop("enough")

    trainer = Trainer(one, config, callbacks=[Stop()])
    return trainer.fit(data[:, :-1], data[:, 1:], resume=resume)


@pytest.mark.slow
def test_a_trainer_in_fp8(emulated, tmp_path):
    """A resumed training is the straight one, bit for bit: no scale is remembered."""
    straight = fitted().losses
    assert straight[-1] < straight[0]
    assert len(fitted(str(tmp_path), stop_at=5).losses) == 6
    assert fitted(str(tmp_path), resume=True).losses == straight


def test_a_trainer_refuses_before_anything_is_written(tmp_path):
    config = TrainConfig(precision="fp8", device="cpu", out=str(tmp_path / "run"))
    assert_raises(ConfigError, "fp8 needs an NVIDIA GPU", lambda: Trainer(model(), config))
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_its_precision():
    run = preset("gpt2").replaced(precision="fp8")
    assert "--precision fp8" in run.command("out", "cuda")
    assert RunConfig.from_dict(run.to_dict()) == run
    with pytest.raises(
        ConfigError, match="precision must be auto or float32 or bfloat16 or float16 or fp8, got 'int4'"
    ):
        preset("gpt2").replaced(precision="int4")
