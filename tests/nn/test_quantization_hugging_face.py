"""Quantized models of transformers: saved, loaded, and with the adapters of peft."""

import copy

import pytest
import torch
from torch import nn

import accelerant.nn as ann
from accelerant.errors import ConfigError
from refusals import assert_raises

peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

ROUNDED = 0.02  # of the largest logit; 8-bit weights change those of this model by 0.006
IDX = torch.arange(12).view(2, 6)


def llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def difference(found, wanted):
    return float(((found - wanted).abs().max() / wanted.abs().max()).detach())


def is_int8(model):
    return [isinstance(module, ann.LinearInt8) for module in model.modules()].count(True)


# --- saving and loading ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "AutoModelForCausalLM", "ours"])
def test_save_pretrained_loads_everywhere(kind, tmp_path):
    model = llama()
    wanted = model(IDX).logits
    ann.quantize(model)
    found = model(IDX).logits
    assert difference(found, wanted) < ROUNDED
    model.save_pretrained(tmp_path, state_dict=model.state_dict())  # as Trainer does under FSDP
    if kind == "ours":
        loaded = ann.Llama.from_pretrained(tmp_path)
        assert difference(loaded(IDX), found) < 1e-5
        return
    loaded = getattr(transformers, kind).from_pretrained(tmp_path)
    assert difference(loaded(IDX).logits, found) < 1e-5
    ann.quantize(loaded)
    assert difference(loaded(IDX).logits, found) < 1e-5


@pytest.mark.parametrize("way", ["torch", "save_file", "save_model", "pickle"])
def test_a_state_dict_loads_where_it_fits_and_nowhere_else(way, tmp_path):
    model, other, plain = llama(attention_bias=True), llama(attention_bias=True), llama(attention_bias=True)
    ann.quantize(model)
    ann.quantize(other)
    for buffer in other.buffers():
        buffer.zero_() if buffer.dtype == torch.int8 else None
    wanted = model(IDX).logits
    if way == "pickle":
        torch.save(model, tmp_path / "model")
        assert torch.equal(torch.load(tmp_path / "model", weights_only=False)(IDX).logits, wanted)
        assert torch.equal(copy.deepcopy(model)(IDX).logits, wanted)
        return
    if way == "torch":
        torch.save(model.state_dict(), tmp_path / "model")
        state = torch.load(tmp_path / "model")
    else:
        if way == "save_file":
            safetensors.save_file(model.state_dict(), tmp_path / "model")
        else:
            safetensors.save_model(model, str(tmp_path / "model"))
        state = safetensors.load_file(tmp_path / "model")
    other.load_state_dict(state)
    assert torch.equal(other(IDX).logits, wanted)
    before = plain(IDX).logits
    assert_raises(RuntimeError, r"Missing key.*q_proj\.weight", plain.load_state_dict, state)
    report = plain.load_state_dict(state, strict=False)
    assert {name.rpartition(".")[2] for name in report.unexpected_keys} == {"weight_int8", "scale"}
    assert difference(plain(IDX).logits, before) == 0


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}], ids=str)
def test_weights_of_a_plain_model_are_quantised_when_they_are_loaded(options):
    model, plain = llama(), llama()
    wanted = plain(IDX).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    ann.quantize(model)
    model.load_state_dict(plain.state_dict(), **options)
    assert difference(model(IDX).logits, wanted) < ROUNDED
    with torch.no_grad():
        plain.model.layers[0].mlp.up_proj.weight[3, 1] = float("nan")
    with pytest.raises(ConfigError, match="a weight of output 3 is not finite"):
        model.load_state_dict(plain.state_dict(), **options)


# --- adapters --------------------------------------------------------------------------------------------------------
TARGETS = {"target_modules": ["q_proj", "v_proj"]}
METHODS = {
    "lora": peft.LoraConfig(r=4, **TARGETS),
    "dora": peft.LoraConfig(r=4, use_dora=True, **TARGETS),
    "bias": peft.LoraConfig(r=4, bias="all", **TARGETS),
    "modules_to_save": peft.LoraConfig(r=4, modules_to_save=["lm_head"], **TARGETS),
    "embedding": peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt_encoder": peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16
    ),
    **{name: getattr(peft, f"{name}Config")(**TARGETS) for name in ("HRA", "LoHa", "OFT", "UniLora", "Delora")},
}  # fmt: skip


def moved(model):
    """Move what is trained away from its initial values, at which most adapters do nothing."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("first", ["quantize", "peft"])
@pytest.mark.parametrize("method", METHODS)
def test_adapters_are_trained_on_quantised_layers(method, first):
    config = METHODS[method]

    def adapted(model):
        torch.manual_seed(2)
        return moved(peft.get_peft_model(model, copy.deepcopy(config)).eval())

    plain, model = adapted(llama(attention_bias=True)), llama(attention_bias=True)
    if first == "quantize":
        ann.quantize(model)
        model = adapted(model)
    else:
        model = adapted(model)
        report = ann.quantize(model)
        if method == "lora":
            assert report.skipped["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default"] == (
                "it is an adapter"
            )
    assert is_int8(model) == 7
    wanted, found = (each(input_ids=IDX, labels=IDX) for each in (plain, model))
    assert difference(found.logits, wanted.logits) < ROUNDED
    wanted.loss.backward()
    found.loss.backward()
    gradients = [{name: x.grad for name, x in each.named_parameters() if x.requires_grad} for each in (plain, model)]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert (gradient is None) == (gradients[1][name] is None)
        if gradient is not None:
            assert (gradients[1][name] - gradient).norm() <= 0.1 * gradient.norm() + 1e-6
    if method != "prompt_encoder":  # which is no part of a layer
        merged = model.merge_and_unload()
        assert is_int8(merged) == 7
        assert difference(merged(IDX).logits, found.logits) < ROUNDED


def test_layers_that_are_trained_beside_frozen_ones_are_left():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[1].requires_grad_(True)
    report = ann.quantize(model)
    assert report.replaced == ("0",)
    assert report.skipped["1"].startswith("it is trained, and others are frozen")
    assert ann.quantize(model.requires_grad_(False)).skipped == {"0": "it is quantized already"}


def test_trainer_refuses_a_model_without_adapters_and_saves_adapters(tmp_path):
    model = llama()
    ann.quantize(model)
    data = [{"input_ids": IDX[0], "labels": IDX[0]}] * 2
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "max_steps": 1, "learning_rate": 1e-2}
    arguments = transformers.TrainingArguments(str(tmp_path), **options)
    assert_raises(ValueError, "attach trainable adapters", transformers.Trainer, model, arguments, train_dataset=data)
    adapted = peft.get_peft_model(model, METHODS["lora"])
    before = adapted(IDX).logits
    trainer = transformers.Trainer(adapted, arguments, train_dataset=data)
    trainer.train()
    after = adapted.eval()(IDX).logits
    assert difference(after, before) > 0
    trainer.save_model(tmp_path / "adapter")
    again = llama()
    ann.quantize(again)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(IDX).logits, after)


# --- the weight ------------------------------------------------------------------------------------------------------
WRITES = {
    "add_": lambda layer: layer.weight.add_(1.0),
    "data +=": lambda layer: setattr(layer.weight, "data", layer.weight.data.add_(1.0)),
    "data": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1.0),
    "parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight + 1.0)),
    "items": lambda layer: layer.weight.__setitem__(slice(None), layer.weight + 1.0),
    "out": lambda layer: torch.add(layer.weight, 1.0, out=layer.weight),
}


@pytest.mark.parametrize("way", WRITES)
def test_what_is_written_to_the_weight_is_quantised(way):
    linear = nn.Linear(8, 4).bfloat16()
    layer = ann.LinearInt8.from_linear(linear)
    before = layer.weight
    assert before.dtype == torch.bfloat16
    torch.testing.assert_close(before.clone(), linear.weight.detach(), rtol=0, atol=0.005)
    with torch.no_grad():
        WRITES[way](layer)
    torch.testing.assert_close(layer.weight.clone(), (linear.weight.detach() + 1), rtol=0, atol=0.02)
    assert layer.weight_int8.dtype == torch.int8
    assert layer.float().weight.dtype == torch.float32
