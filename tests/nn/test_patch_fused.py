"""patch: blocks as one autograd function, and when they are not."""

import copy
import functools
import sys

import pytest
import torch
from patch_models import CAUSAL, FAMILIES, TIGHT, assert_same, batch, make, outcome, patch_and_compare
from torch import nn

import accelerant as acl
from accelerant.nn.patching import blocks
from accelerant.nn.patching.record import has_hooks


@pytest.fixture
def fused(monkeypatch):
    """How many blocks ran as one function."""
    counted = []
    for function in (blocks.fused_block, blocks.fused_decoder_layer):

        def counting(*arguments, function=function):
            counted.append(function)
            return function(*arguments)

        name = "fused_block" if function is blocks.fused_block else "fused_decoder_layer"
        monkeypatch.setattr(blocks, name, counting)
    return counted


def blocks_of(model):
    """The modules that run as one function each."""
    names = ("GPT2Block", "LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "MistralDecoderLayer")
    return [each for each in model.modules() if type(each).__name__ in (*names, "BertLayer", "ViTLayer")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_is_fused(family, fused):
    model, inputs = make(family), batch(family)
    patch_and_compare(model, inputs)
    assert len(fused) == 2


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_under_autocast_is_fused(family, weights, fused):
    """Dtypes of all hidden states are those of the model unpatched, and the distance to the truth no larger."""
    model, inputs = make(family), batch(family)
    exact = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    truth = outcome(model.double(), exact)
    model.to(weights)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            dtypes = [x.dtype for x in model(**inputs, output_hidden_states=True).hidden_states]
            fused.clear()
            return dtypes, outcome(model, inputs)

    dtypes, plain = step()
    acl.nn.patch(model)
    found, patched = step()
    assert len(fused) == (2 if (family, weights) != ("bert", torch.bfloat16) else 0)  # float32 between its layers
    assert found == dtypes
    assert patched[0].dtype == plain[0].dtype
    for name, gradient in ({"logits": truth[1]} | truth[2]).items():
        pair = (each[1] if name == "logits" else each[2][name] for each in (patched, plain))
        wrong, usual = ((each.double() - gradient).norm() for each in pair)
        if gradient.norm() > 1e-12:  # the bias of keys moves no softmax: what is there is rounding
            assert wrong <= 1.5 * usual + gradient.norm() * 2e-3, name


def test_biases_everywhere(fused):
    model, inputs = make("llama", attention_bias=True, mlp_bias=True), batch("llama")
    patch_and_compare(model, inputs)
    assert len(fused) == 2


@pytest.mark.parametrize(("family", "settings"), [
    ("bert", {"hidden_act": "gelu_new"}),
    ("vit", {"hidden_act": "gelu_new"}),
    ("vit", {"qkv_bias": False}),
    ("gpt2", {"activation_function": "gelu"}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
])  # fmt: skip
def test_other_activations_scales_and_biases(family, settings, fused):
    model, inputs = make(family, **settings), batch(family)
    patch_and_compare(model, inputs)
    assert len(fused) == 2


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("which", ["norms and biases", "all but the first layer's last", "none of the blocks"])
def test_frozen_weights_get_no_gradient(family, which, fused):
    model, inputs = make(family), batch(family)
    for name, parameter in model.named_parameters():
        if which == "norms and biases":
            parameter.requires_grad_(not ("norm" in name.lower() or "ln_" in name or "bias" in name))
        elif which == "none of the blocks":
            parameter.requires_grad_(".0." not in name and ".1." not in name)
        else:
            last = (".0.mlp.c_proj", ".0.mlp.down_proj", ".0.mlp.fc2", ".0.output.dense")
            parameter.requires_grad_(any(part in name for part in last))
    patch_and_compare(model, inputs)
    assert fused


@pytest.mark.parametrize("family", [*CAUSAL, "bert"])
def test_gradients_of_embeddings_and_of_gradients(family, fused):
    model, plain = make(family), make(family, attn_implementation="eager")  # sdpa has no second derivative
    labels = batch(family)["labels"]
    start = torch.randn(2, 13, 48, generator=torch.Generator().manual_seed(2))

    def twice(model):
        x = start.clone().requires_grad_()
        loss = model(inputs_embeds=x, labels=labels).loss
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = loss + dx.square().sum()
        parameters = [p for n, p in model.named_parameters() if "mlp" in n or "intermediate" in n]
        return dx.detach(), *torch.autograd.grad(penalty, parameters)

    acl.nn.patch(model)
    for a, b in zip(twice(model), twice(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert len(fused) == 2


@pytest.mark.parametrize(
    "change", ["cache", "hook", "adapter", "dropout", "no gradient", "evaluation of attention weights"]
)
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "bert", "vit"])
def test_what_is_not_fused(family, change, fused):
    dropouts = {"gpt2": "attn_pdrop", "qwen3": "attention_dropout", "bert": "attention_probs_dropout_prob"}
    settings = {dropouts.get(family, "hidden_dropout_prob"): 0.5} if change == "dropout" else {}
    model, inputs = make(family, **settings), batch(family)
    acl.nn.patch(model)
    block = blocks_of(model)[0]
    inner, last = {"gpt2": ("c_fc", "c_proj"), "qwen3": ("up_proj", "down_proj"), "vit": ("fc1", "fc2")}.get(
        family, ("dense", "dense")
    )
    other = 0
    if change == "cache":
        if family not in ("gpt2", "qwen3"):
            pytest.skip("an encoder has no cache")
        model(**inputs, use_cache=True).loss.backward()
    elif change == "hook":
        seen = []
        getattr(block.intermediate if family == "bert" else block.mlp, inner).register_forward_hook(
            lambda *_: seen.append(1)
        )
        outcome(model, inputs)
        assert seen == [1]
        other = 1
    elif change == "adapter":
        holder = block.output if family == "bert" else block.mlp
        setattr(holder, last, nn.Sequential(getattr(holder, last)))
        outcome(model, inputs)
        other = 1
    elif change == "dropout":
        model(**inputs)
    elif change == "no gradient":
        with torch.no_grad():
            model(**inputs)
    else:
        model.set_attn_implementation("eager")
        assert len(model(**inputs, output_attentions=True).attentions) == 2
    assert len(fused) == other


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "bert", "vit"])
@pytest.mark.parametrize("option", ["causal", "bidirectional", "position_bias"])
def test_options_of_attention_that_a_call_gives_are_obeyed(family, option):
    S = 17 if family == "vit" else 13
    more = {"is_causal": option == "causal"} if option != "position_bias" else {option: torch.randn(1, 1, S, S)}
    model, inputs = make(family), batch(family) | more
    patch_and_compare(model, inputs)


@pytest.mark.parametrize(("family", "name", "part"), [
    ("gpt2", "resid_pdrop", lambda block: block.mlp.dropout),
    ("gpt2", "resid_pdrop", lambda block: block.attn.resid_dropout),
    ("gpt2", "attn_pdrop", lambda block: block.attn),
    ("qwen3", "attention_dropout", lambda block: block.self_attn),
    ("bert", "hidden_dropout_prob", lambda block: block.output.dropout),
    ("bert", "attention_probs_dropout_prob", lambda block: block.attention.self),
    ("vit", "hidden_dropout_prob", lambda block: block.dropout),
    ("vit", "attention_probs_dropout_prob", lambda block: block.attention),
])  # fmt: skip
def test_dropout_follows_its_own_mode_not_the_blocks(family, name, part, fused):
    """Monte Carlo dropout: a model in evaluation whose dropout alone trains."""
    plain, inputs = make(family, **{name: 0.5}).eval(), batch(family)
    part(blocks_of(plain)[0]).training = True
    model = make(family, **{name: 0.5}).eval()
    acl.nn.patch(model)
    part(blocks_of(model)[0]).training = True
    inputs.pop("labels")
    more = {"use_cache": False} if family in CAUSAL else {}
    for each in (plain, model):
        first, second = (each(**inputs, **more).logits for _ in range(2))
        assert not torch.equal(first, second)
    assert len(fused) == 2  # the other block, twice


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_once_asked_for_cost_no_later_step(family, fused):
    """Transformers then leaves hooks on layers and attention for good."""
    plain, model, inputs = make(family), make(family), batch(family)
    acl.nn.patch(model)
    wanted, found = (each(**inputs, output_hidden_states=True).hidden_states for each in (plain, model))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)
    fused.clear()
    assert_same(outcome(model, inputs), outcome(plain, inputs), **TIGHT)
    assert len(fused) == 2
    attention = next(each for each in model.modules() if type(each).__name__.endswith("Attention") and has_hooks(each))
    attention.register_forward_hook(lambda *_: None)
    fused.clear()
    outcome(model, inputs)
    assert len(fused) == 1


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_parts_that_were_exchanged_are_called(family, when, fused):
    class Half(nn.Module):
        def forward(self, x):
            return x * 0.5

    def exchange(model):
        if family == "gpt2":
            first, second = model.transformer.h
            first.mlp.dropout = Half()
            second.attn.resid_dropout = Half()
        elif family == "bert":
            first, second = model.bert.encoder.layer
            first.intermediate.intermediate_act_fn = Half()
            second.output.dropout = Half()
        elif family == "vit":
            first, second = model.vit.layers
            first.mlp = Half()
            second.layernorm_after = Half()
        else:
            first, second = model.model.layers
            first.mlp = Half()
            second.input_layernorm = Half()

    plain, model, inputs = make(family), make(family), batch(family)
    exchange(plain)
    if when == "before":
        exchange(model)
    acl.nn.patch(model)
    if when == "after":
        exchange(model)
    assert_same(outcome(model, inputs), outcome(plain, inputs), **TIGHT)
    assert not fused


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_on_all_modules_are_heard(family, fused):
    kind = "Conv1D" if family == "gpt2" else "Linear"

    def double(module, inputs, output):
        return output * 2 if type(module).__name__ == kind else None

    plain, model, inputs = make(family), make(family), batch(family)
    acl.nn.patch(model)
    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        assert_same(outcome(model, inputs), outcome(plain, inputs), **TIGHT)
    finally:
        handle.remove()
    assert not fused


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_hooks_and_exchanged_parts_come_and_go(family, fused):
    """Whether a block may be one function is found again after each change, not at each call."""
    model, inputs = make(family), batch(family)
    acl.nn.patch(model)
    block = blocks_of(model)[0]
    place, name = {"gpt2": ("mlp", "c_proj"), "bert": ("output", "dense")}.get(family, ("mlp", "down_proj"))
    holder = getattr(block, place)
    part, found = getattr(holder, name), []
    for change in ("none", "hook", "none", "all hooks", "none", "exchanged", "none", "class", "none", "copied"):
        handle = None
        if change == "hook":
            handle = part.register_forward_pre_hook(lambda *_: None)
        elif change == "all hooks":
            handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        setattr(holder, name, nn.Sequential(part) if change == "exchanged" else part)
        part.__class__ = type("Other", (type(part),), {}) if change == "class" else type(part)
        fused.clear()
        outcome(copy.deepcopy(model) if change == "copied" else model, inputs)
        found.append(len(fused))
        part.__class__ = type(part).__mro__[1] if change == "class" else type(part)
        if handle is not None:
            handle.remove()
    assert found == [2, 1, 2, 0, 2, 1, 2, 1, 2, 2]


@pytest.mark.parametrize(("family", "most"), [("gpt2", 60), ("llama", 65), ("bert", 75), ("gpt2 with dropout", 25)])
def test_python_functions_before_a_block_runs_or_is_refused(family, most, monkeypatch):
    """Each costs about 0.3 us a call, in a step that waits for the host."""
    family, _, dropout = family.partition(" with ")
    model = make(family, **({"resid_pdrop": 0.1} if dropout else {}))
    acl.nn.patch(model)
    counted = []

    def counting(*arguments, run, **options):
        def count(frame, event, _):
            if frame.f_code.co_name == "apply":
                sys.setprofile(None)
            counted[-1] += event == "call"

        counted.append(0)
        sys.setprofile(count)
        try:
            return run(*arguments, **options)
        finally:
            sys.setprofile(None)

    for name in ("_fused_block", "_fused_decoder_layer"):
        monkeypatch.setattr(blocks, name, functools.partial(counting, run=getattr(blocks, name)))
    for _ in range(2):  # the first call looks at every module
        model(**batch(family))
    assert 0 < max(counted[2:]) <= most


def test_two_backward_passes(fused):
    model, inputs = make("llama"), batch("llama")
    acl.nn.patch(model)
    loss = model(**inputs).loss
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * first[name])


def test_saved_tensors_go_through_hooks(fused):
    model, inputs = make("llama"), batch("llama")
    acl.nn.patch(model)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        model(**inputs).loss.backward()
    assert len(packed) > 2 * 20
