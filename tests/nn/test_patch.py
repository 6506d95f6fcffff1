"""patch: parity, the report, what is left alone, unpatch, copies."""

import copy
import dataclasses
import importlib
import inspect
import io
import json
import linecache
import pickle
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from patch_models import (
    CAUSAL,
    FAMILIES,
    ROTARY,
    TIGHT,
    assert_same,
    batch,
    make,
    outcome,
    outcomes_in_bfloat16,
    patch_and_compare,
    transformers,
)
from torch import nn
from transformers import activations, modeling_outputs

import accelerant as acl
from accelerant.errors import ConfigError
from accelerant.nn.patching import api, blocks, rules
from accelerant.nn.patching.forms import form_of
from accelerant.nn.patching.loss import CrossEntropyLoss, causal_loss, masked_loss
from refusals import assert_raises
from requirements import require_module


# --- parity ----------------------------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_stay(family):
    model, inputs = make(family), batch(family)
    before, keys = outcome(model, inputs), list(model.state_dict())
    report = acl.nn.patch(model)
    assert list(model.state_dict()) == keys
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert {"norm", "attention", "mlp", "residual", "activation"} <= report.counts.keys()
    assert report.counts.get("rope", 0) == (2 if family in ROTARY else 0)
    assert not report.fallbacks


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_without_labels_and_in_evaluation(family):
    model, inputs = make(family), batch(family)
    del inputs["labels"]
    wanted = model(**inputs).logits
    acl.nn.patch(model)
    torch.testing.assert_close(model(**inputs).logits, wanted, **TIGHT)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**inputs).logits, wanted, **TIGHT)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_further_from_the_truth_than_unpatched(family):
    truth, plain, patched = outcomes_in_bfloat16(family)
    for name, gradient in truth[2].items():
        floor = gradient.norm() * 2e-3
        wrong, usual = ((each[2][name].double() - gradient).norm() for each in (patched, plain))
        assert wrong <= 2 * usual + floor, name


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "bert"])
def test_under_autocast(family):
    model, inputs = make(family), batch(family)
    with torch.autocast("cpu", torch.bfloat16):
        plain = outcome(model, inputs)
        acl.nn.patch(model)
        patched = outcome(model, inputs)
    assert patched[0].dtype == plain[0].dtype
    assert_same(patched, plain, rtol=5e-2, atol=2e-2)


@pytest.mark.sample(4)
@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize("family", CAUSAL)
def test_the_loss_takes_what_transformers_passes(family, loss):
    model, inputs = make(family), batch(family)
    shifted = torch.roll(inputs["labels"], -1, 1)
    calls = [
        {"num_items_in_batch": torch.tensor(7)},
        {"num_items_in_batch": 5},
        {"ignore_index": 4, "labels": inputs["input_ids"]},
        {"shift_labels": shifted},
        {"logits_to_keep": 13},
        {"attention_mask": torch.ones_like(inputs["input_ids"])},
    ]
    wanted = [outcome(model, inputs | call) for call in calls]
    acl.nn.patch(model, loss=loss)
    for call, each in zip(calls, wanted, strict=True):
        assert_same(outcome(model, inputs | call), each, **TIGHT)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_loss_of_the_users_own_is_called(family):
    model, inputs = make(family), batch(family)
    acl.nn.patch(model)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum() * 0 + 42
    assert model(**inputs).loss == 42
    acl.nn.unpatch(model)
    assert model(**inputs).loss == 42


def test_tuples_and_positional_arguments():
    model, inputs = make("gpt2"), batch("gpt2")
    wanted = model(inputs["input_ids"], labels=inputs["labels"], return_dict=False, use_cache=False)
    acl.nn.patch(model)
    found = model(inputs["input_ids"], labels=inputs["labels"], return_dict=False, use_cache=False)
    assert len(found) == len(wanted) == 2
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", [*CAUSAL, "bert"])
def test_the_signature_stays(family):
    model = make(family)
    before = inspect.signature(model.forward)
    acl.nn.patch(model)
    assert inspect.signature(model.forward) == before


def is_computed(output):
    return not hasattr(output.to_tuple()[1], "source") or output.to_tuple()[1].source._value is not None


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_logits_are_listed_and_computed_when_they_are_read(family):
    model, inputs = make(family), batch(family) | ({} if family == "bert" else {"use_cache": False})
    wanted = model(**inputs)
    acl.nn.patch(model)
    output = model(**inputs)
    assert list(output.keys()) == list(output) == [name for name, _ in output.items()] == list(wanted)
    assert len(output) == len(output.to_tuple()) == len(wanted)
    assert "logits" in output
    assert [field.name for field in dataclasses.fields(output)] == [field.name for field in dataclasses.fields(wanted)]
    listed = dict(output.items())["logits"]
    assert (listed.shape, listed.dtype, listed.requires_grad) == (wanted.logits.shape, wanted.logits.dtype, True)
    assert "computed when read" in repr(output)
    flat, spec = torch.utils._pytree.tree_flatten(output)
    again = torch.utils._pytree.tree_unflatten(flat, spec)  # as hooks of DDP and FSDP do
    assert list(again) == list(output)
    assert not is_computed(output)
    torch.testing.assert_close(again.logits, wanted.logits, **TIGHT)
    assert isinstance(output, type(wanted))
    torch.testing.assert_close(output["logits"], wanted.logits, **TIGHT)
    assert output.logits is output[1]
    assert output.get("logits") is output.logits
    assert type(output.logits) is torch.Tensor
    output.logits = None
    assert output.to_tuple()[0] is output.loss
    assert not any("logits" in note for note in acl.nn.patch(make(family), loss=False).notes)


READS = {
    "attribute": lambda output: output.logits.square(),
    "tuple": lambda output: output.to_tuple()[1].square(),
    "items": lambda output: dict(output)["logits"].float().log_softmax(-1),
    "values": lambda output: F.cross_entropy(
        list(output.values())[1].flatten(0, 1), torch.arange(26), reduction="none"
    ),
    "in place": lambda output: output.to_tuple()[1].mul_(2).square(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_logits_however_they_are_read_have_gradients(family, read):
    model, inputs, found = make(family), batch(family), []
    for _ in range(2):
        model.zero_grad()
        output = model(**inputs)
        (output.loss + READS[read](output).mean()).backward()
        found.append([p.grad for p in model.parameters()])
        acl.nn.patch(model)
    for ours, own in zip(*found, strict=True):
        torch.testing.assert_close(ours, own, **TIGHT)


def test_listed_logits_can_be_written_and_converted():
    model, inputs = make("llama"), batch("llama")
    acl.nn.patch(model)
    wanted = model(**inputs).logits.detach()
    listed = model(**inputs).to_tuple()[1]
    assert listed.detach().tolist() == wanted.tolist()
    assert (listed.detach().numpy() == wanted.numpy()).all()
    assert torch.equal(pickle.loads(pickle.dumps(listed)), wanted)
    assert listed.data_ptr() == listed.source.logits().data_ptr()


def test_logits_are_of_the_weights_of_the_call():
    model, inputs = make("llama"), batch("llama")
    larger = {name: 1.5 * x.detach() for name, x in model.named_parameters()}
    wanted = torch.func.functional_call(model, larger, (), inputs).logits
    acl.nn.patch(model)
    torch.testing.assert_close(torch.func.functional_call(model, larger, (), inputs).logits, wanted, **TIGHT)


def test_a_copy_of_an_output_has_its_logits():
    model, inputs = make("llama"), batch("llama")
    wanted = model(**inputs).logits
    acl.nn.patch(model)
    output = model(**inputs)
    copied = type(output)({name: x.float() for name, x in output.items()})  # as accelerate's convert_to_fp32 makes one
    apart = type(output)(loss=output.loss * 1, logits=output.to_tuple()[1].detach())
    assert not is_computed(output)
    assert copied[0] is copied.loss
    torch.testing.assert_close(copied.logits, wanted, **TIGHT)
    torch.testing.assert_close(apart.logits, wanted.detach(), **TIGHT)
    assert (copied.logits.requires_grad, apart.logits.requires_grad) == (True, False)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**inputs)
    copied = type(output)({name: x.float() for name, x in output.items()})
    assert not is_computed(copied)
    assert (copied.logits.dtype, output.logits.dtype) == (torch.float32, torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(dict(model(**inputs).items()))["logits"], wanted)
    apart.logits = None
    assert apart.logits is None
    assert type(output)(loss=output.loss).to_tuple() == (output.loss,)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_an_output_is_pickled_as_the_models_usual_one(family):
    model = make(family)
    acl.nn.patch(model)
    with torch.no_grad():
        output = model(**batch(family))
    again = pickle.loads(pickle.dumps(output))
    assert type(again) in type(output).__mro__
    assert type(again).__module__ == "transformers.modeling_outputs"
    assert torch.equal(again.logits, output.logits)
    assert torch.equal(again.loss, output.loss)
    assert list(again) == ["loss", "logits"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_on_the_meta_device(family, dtype):
    """Where accelerate and fully_shard make large models, and shapes are tried out."""
    model = make(family).to(dtype)
    acl.nn.patch(model)
    model.to("meta")
    output = model(**{name: x.to("meta") for name, x in batch(family).items()})
    output.loss.backward()
    assert output.logits.shape == (2, 13, model.config.vocab_size)
    assert all(p.grad.is_meta for p in model.parameters() if p.grad is not None)


def test_an_output_is_freed_with_its_last_reference():
    model, inputs = make("llama"), batch("llama")
    acl.nn.patch(model)
    output = model(**inputs)
    source = weakref.ref(output.to_tuple()[1].source)
    copied = type(output)(dict(output.items()))
    del output
    assert copied.logits.shape == (*inputs["input_ids"].shape, 97)
    del copied
    assert source() is None


def test_logits_are_what_they_would_have_been_at_the_forward_pass():
    model, inputs = make("llama"), batch("llama")
    acl.nn.patch(model)
    with torch.no_grad():
        silent = model(**inputs)
    assert not silent.logits.requires_grad
    learning = model(**inputs)
    with torch.no_grad():
        assert learning.logits.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        low = model(**inputs)
    assert low.logits.dtype == torch.bfloat16


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", [causal_loss, masked_loss])
def test_losses_of_given_logits_are_not_rounded_to_their_dtype(loss, dtype):
    usual = transformers.loss.loss_utils
    usual = usual.ForCausalLMLoss if loss is causal_loss else usual.ForMaskedLMLoss
    values, labels = torch.randn(2, 13, 97, generator=torch.Generator().manual_seed(0)), batch("llama")["labels"]
    for options in ({}, {"ignore_index": 5}, {"num_items_in_batch": 3}, {"num_items_in_batch": torch.tensor(3.0)}):
        found = []
        for compute in (loss, usual):
            logits = values.to(dtype, copy=True).requires_grad_()
            given = labels.where(labels >= 0, options.get("ignore_index", -100))
            found.append(compute(logits, given, 97, **options))
            found[-1].backward()
            found.append(logits.grad)
        torch.testing.assert_close(found[0], found[2], rtol=1e-6, atol=0.0)  # and float32
        torch.testing.assert_close(found[1], found[3], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_the_loss_of_classes_has_torchs_options():
    """The class that replaces torch's inside of transformers' forwards of classifiers."""
    z, classes = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2, 4, 2, 1, 3])
    targets = [classes, z.softmax(1)]
    for options in ({}, {"ignore_index": 2}, {"label_smoothing": 0.3}, {"reduction": "sum"}, {"reduction": "none"},
                    {"weight": torch.rand(5)}):  # fmt: skip
        for target in targets[: 1 if "ignore_index" in options else 2]:
            found = []
            for kind in (CrossEntropyLoss, nn.CrossEntropyLoss):
                x = z.clone().requires_grad_()
                found.append(kind(**options)(x, target))
                found[-1].sum().backward()
                found.append(x.grad)
            torch.testing.assert_close(found[:2], found[2:], **TIGHT)


def test_the_loss_of_a_float64_model_is_float32_as_transformers_has_it():
    model, inputs = make("llama").double(), batch("llama")
    before = outcome(model, inputs)
    acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, rtol=1e-5, atol=1e-6)


# Reentrant checkpoints need inputs with gradients, which transformers arranges for tokens alone.
@pytest.mark.parametrize(
    ("family", "reentrant"),
    [("gpt2", True), ("mistral", True), ("bert", True), ("gpt2", False), ("mistral", False), ("vit", False)],
)
def test_gradient_checkpointing(family, reentrant):
    model, inputs = make(family), batch(family)
    before = outcome(model, inputs)
    report = acl.nn.patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert not report.fallbacks


LOOSE = {"rtol": 5e-2, "atol": 3e-2}  # of bfloat16: of single elements


@pytest.mark.sample(7)
@pytest.mark.slow
@pytest.mark.parametrize(("family", "autocast"), [
    ("gpt2", False), ("llama", False), ("qwen3", False), ("vit", False), ("bert", False), ("gpt2", True),
    ("qwen3", True),
])  # fmt: skip
def test_compiles_whole(family, autocast):
    """The graph has no break, and of our ops those alone that the compiler does not beat."""
    model, inputs = make(family, num_hidden_layers=1), batch(family)
    found = set()

    def backend(graph, inputs):
        found.update(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("accelerant"))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def run(call):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = call(**inputs).loss
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    wanted = run(model)
    acl.nn.patch(model)
    loss, gradients = run(torch.compile(model, fullgraph=True, backend=backend))
    assert "accelerant.attention.default" in found
    known = ("attention", "linear_gelu")
    assert found <= {f"accelerant.{name}.default" for name in known}
    tolerance = LOOSE if autocast else TIGHT
    torch.testing.assert_close(loss, wanted[0], **tolerance)
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(gradients[name], gradient, **tolerance)


@pytest.mark.slow
def test_a_compiled_model_has_our_loss_only_where_memory_counts(monkeypatch):
    def traced():
        found = set()

        def backend(graph, _):
            found.update(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("accelerant"))
            return graph.forward

        torch._dynamo.reset()
        model = make("gpt2", num_hidden_layers=1)
        acl.nn.patch(model)
        torch.compile(model, backend=backend, fullgraph=True)(**batch("gpt2")).loss.backward()
        return found

    assert not any("cross_entropy" in op for op in traced())
    monkeypatch.setattr("accelerant.nn.patching.loss.COMPILED", 0)
    assert "accelerant.linear_cross_entropy.default" in traced()


# --- the report ------------------------------------------------------------------------------------------------------
def test_the_report_names_every_leaf_once():
    model = make("gpt2")
    report = acl.nn.patch(model)
    leaves = {name for name, module in model.named_modules() if next(module.children(), None) is None}
    named = [each.name for each in (*report.changed, *report.left)]
    assert leaves <= set(named)
    assert not {each.name for each in report.changed} & {each.name for each in report.left}
    assert report.counts == {
        "loss": 1, "embedding": 2, "residual": 2, "norm": 5, "attention": 2, "mlp": 2, "activation": 2,
    }  # fmt: skip
    table = json.loads(json.dumps(report.to_dict()))
    assert table["model"] == "GPT2LMHeadModel"
    assert table["counts"] == report.counts
    text = str(report)
    assert repr(report) == text
    assert "left alone" in report._repr_html_()
    assert "2 x GPT2MLP" in text
    assert "ops.linear_gelu('tanh')" in text
    assert "Dropout  ours draws other random numbers" in text
    assert "logits are not materialized" in text


def model_with_its_own_loss(loss, use_cache, source=True):
    text = f"""
def forward(self, input_ids=None, labels=None, use_cache=None, return_dict=None):
    hidden = self.embedding(input_ids)
    logits = self.lm_head(hidden)
    return CausalLMOutput(loss={loss}, logits=logits)
"""
    if source:
        linecache.cache[f"<{loss}>"] = len(text), None, text.splitlines(keepends=True), f"<{loss}>"
    names = {"CrossEntropyLoss": nn.CrossEntropyLoss, "CausalLMOutput": modeling_outputs.CausalLMOutput}
    exec(compile(text, f"<{loss if source else None}>", "exec"), names)
    kind = type("Model", (transformers.PreTrainedModel,), {"forward": names["forward"]})
    kind.get_output_embeddings = lambda self: self.lm_head
    config = transformers.PretrainedConfig()
    config.use_cache = use_cache
    model = kind(config)
    model.embedding, model.lm_head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    return model


MEAN = "CrossEntropyLoss()(logits.view(-1, 8), labels.view(-1))"


@pytest.mark.parametrize(("loss", "use_cache", "source", "computes_no_logits"), [
    (MEAN, True, True, True),
    (MEAN, False, True, False),
    (MEAN, True, False, False),
    (f"(logits.register_hook(lambda dy: 2 * dy), {MEAN})[1]", True, True, False),
    (f"{MEAN.replace('logits', 'logits.detach()')} + logits.sum()", True, True, True),
], ids=["mean", "no cache", "no source", "hook", "detached"])  # fmt: skip
def test_a_loss_that_a_model_computes_has_its_gradients(loss, use_cache, source, computes_no_logits):
    model, ids = model_with_its_own_loss(loss, use_cache, source), torch.arange(6).view(2, 3)
    gradients = []
    for patched in (False, True):
        if patched:
            report = acl.nn.patch(model, loss=True)
        model.zero_grad()
        model(ids, ids).loss.backward()
        gradients.append(model.lm_head.weight.grad.clone())
    torch.testing.assert_close(*gradients)
    assert ("ops.linear_cross_entropy" in str(report)) is computes_no_logits


def test_patching_twice_changes_nothing_more():
    model = make("llama")
    report = acl.nn.patch(model)
    count = len(report.changed)
    assert acl.nn.patch(model, loss=False) is report
    assert len(report.changed) == count


COUNTS = {
    "gpt2": {"loss": 1, "embedding": 2, "norm": 5, "residual": 2, "attention": 2, "mlp": 2, "activation": 2},
    "llama": {
        "loss": 1, "embedding": 1, "norm": 5, "residual": 2, "attention": 2, "rope": 2, "mlp": 2, "activation": 2,
    },
    "qwen3": {
        "loss": 1, "embedding": 1, "norm": 9, "residual": 2, "attention": 2, "rope": 2, "mlp": 2, "activation": 2,
    },
    "bert": {
        "loss": 1, "embedding": 3, "norm": 6, "residual": 4, "block": 2, "attention": 2, "mlp": 2, "activation": 3,
    },
    "vit": {"norm": 5, "residual": 2, "attention": 2, "mlp": 2, "activation": 2},
}  # fmt: skip
"""Of two layers, in every version of transformers."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_replacement_was_written_for_this_version(family):
    model = make(family)
    report = acl.nn.patch(model)
    assert not [each for each in report.left if "5.17" in each.reason or "subclass" in each.reason]
    assert not [note for note in report.notes if "5.17" in note]
    assert report.counts == COUNTS.get(family, COUNTS["llama"])
    forms = {form_of(type(each).forward) for each in model.modules()}
    block = {"gpt2": "gpt2_block", "bert": "bert_layer", "vit": "vit_layer"}.get(family, "decoder_layer")
    head = {"gpt2": {"causal_lm_gpt2"}, "bert": {"masked_lm_bert"}, "vit": set()}.get(family, {"causal_lm"})
    assert {block, *head} <= forms


# --- what is left alone ----------------------------------------------------------------------------------------------
UNKNOWN = "its forward is none of those, from transformers 5.17 to 5.24, that a replacement was written for"


def left(report, kind):
    return {each.reason for each in report.left if each.module == kind}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", sorted(activations.ACT2CLS.keys() - {"xielu"}))  # whose weights are bfloat16 alone
def test_every_activation_is_right_or_left_alone(name):
    model, inputs = make("gpt2", activation_function=name), batch("gpt2")
    report = patch_and_compare(model, inputs)
    ours = {"gelu", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate"}
    if name in ours:
        assert report.counts["mlp"] == 2
    else:
        kind = type(model.transformer.h[0].mlp.act).__name__
        assert left(report, "GPT2MLP") == {f"its activation is a {kind}, ours a GELU"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_scale_of_one_plus_weight_is_not_rounded(dtype):
    """Gemma's: 1 + 0.0039 is 1 in bfloat16, which torch and we add in float32."""
    acl.nn.patch(model := make("gemma2", num_hidden_layers=1).to(dtype).requires_grad_(False))
    norm = model.model.norm
    norm.weight.fill_(0.0039)
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).to(dtype)  # torch 2.11 draws zeros in bfloat16
    truth = F.rms_norm(x.double(), (48,), 1.0 + norm.weight.double(), norm.eps)
    ratio = float((norm(x).double() / truth).mean())
    assert abs(ratio - 1) < {torch.float64: 1e-12, torch.float32: 1e-7, torch.bfloat16: 5e-4}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize(
    ("kind", "width"), [("llama", 8), ("llama", 4), ("phi3", 8), ("phi3", 6), ("phi3", 5), ("phi3", 10)]
)
def test_rotary_tables_that_our_rope_does_not_take_go_to_the_model(kind, width, unsqueeze_dim, dtype):
    """Ours are as wide as the heads, or for functions that leave the other features as they are, narrower and even.

    For float64 they are of no lower dtype.
    """
    apply = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}").apply_rotary_pos_emb
    called = []

    def counted(*arguments, **options):
        called.append(1)
        return apply(*arguments, **options)

    ours = blocks.rotary(counted, partial=kind == "phi3")
    shape = (2, 3, 5, 8) if unsqueeze_dim == 1 else (2, 5, 3, 8)
    q, k = torch.randn(2, *shape, dtype=dtype)
    angles = torch.randn(2, 5, (width + 1) // 2).repeat(1, 1, 2)[..., :width]
    cos, sin = angles.cos(), angles.sin()
    if (kind, width) in (("llama", 4), ("phi3", 10)):
        assert_raises(RuntimeError, "size", ours, q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return
    found, wanted = (each(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim) for each in (ours, apply))
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, **TIGHT)
    assert bool(called) == (width == 5 or dtype is torch.float64)


@pytest.mark.parametrize("act", [nn.ReLU(), nn.GELU(), nn.GELU("tanh")])
def test_an_activation_that_is_not_the_configs(act):
    model, inputs = make("gpt2"), batch("gpt2")
    model.transformer.h[0].mlp.act = act
    report = patch_and_compare(model, inputs)
    wrong = isinstance(act, nn.ReLU)
    assert left(report, "GPT2MLP") == ({"its activation is a ReLU, ours a GELU"} if wrong else set())
    assert report.counts["mlp"] == 2 - wrong


def test_a_gate_that_is_not_silu():
    model, inputs = make("llama", hidden_act="gelu"), batch("llama")
    report = patch_and_compare(model, inputs)
    assert left(report, "LlamaMLP") == {"its gate is a GELUActivation, ours a SiLU"}


def test_an_eps_that_is_not_the_configs():
    model, inputs = make("llama"), batch("llama")
    model.model.norm.variance_epsilon = 0.5
    report = patch_and_compare(model, inputs)
    assert report.counts["norm"] == 5  # of the module's own eps


def test_subclasses_and_replaced_forwards():
    model, inputs = make("llama"), batch("llama")
    mlp = model.model.layers[0].mlp

    class Doubled(type(mlp)):
        def forward(self, x):
            return 2 * super().forward(x)

    mlp.__class__ = Doubled
    norm = model.model.layers[1].input_layernorm
    norm.forward = lambda x: 3 * type(norm).forward(norm, x)
    report = patch_and_compare(model, inputs)
    assert left(report, "Doubled") == {"is a subclass of LlamaMLP, whose forward may be another"}
    assert left(report, "LlamaRMSNorm") == {"its forward was replaced by another library"}


def test_a_class_whose_forward_another_library_replaced(monkeypatch):
    def forward(self, hidden_states):
        return hidden_states * self.weight

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaRMSNorm, "forward", forward)
    model, inputs = make("llama"), batch("llama")
    report = patch_and_compare(model, inputs)
    assert "norm" not in report.counts
    assert left(report, "LlamaRMSNorm") == {UNKNOWN}


@pytest.mark.parametrize("changed", ["LlamaRotaryEmbedding", "LlamaDecoderLayer", "LlamaForCausalLM", "LlamaAttention"])
def test_a_class_that_a_later_version_writes_differently_is_reported(monkeypatch, changed):
    """A fusion that is lost is never lost without a word."""
    kind = getattr(transformers.models.llama.modeling_llama, changed)

    def forward(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    original = kind.forward
    if changed != "LlamaAttention":
        monkeypatch.setattr(kind, "forward", forward)
    else:  # without its rotation, which the interface does not have
        module = transformers.models.llama.modeling_llama
        apply = module.apply_rotary_pos_emb
        monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda *args, **kwargs: apply(*args, **kwargs))
    model, inputs = make("llama"), batch("llama")
    report = patch_and_compare(model, inputs)
    rotary = left(report, "LlamaRotaryEmbedding")
    if changed in ("LlamaRotaryEmbedding", "LlamaAttention"):
        assert "rope" not in report.counts
        assert all("the model applies them itself" in reason for reason in rotary)
    else:
        assert rotary == {"computes its tables once a forward pass; ops.rope uses them"}
    if changed == "LlamaDecoderLayer":
        assert left(report, changed) == {f"{UNKNOWN}: its residual sums are not fused with norms"}
    if changed == "LlamaForCausalLM":
        assert left(report, changed) == {f"{UNKNOWN}: its loss is not ours"}


@pytest.mark.parametrize(("tested", "word"), [(((5, 0), (5, 16)), "newer"), (((6, 0), (6, 1)), "older")])
def test_a_version_that_was_not_tested_is_a_note_and_one_warning(monkeypatch, tested, word):
    monkeypatch.setattr(rules, "TESTED", tested)
    monkeypatch.setattr(api, "_WARNED", set())
    note = f"transformers {transformers.__version__} is {word} than the versions that patch was written for"
    with pytest.warns(UserWarning, match=re.escape(note)) as caught:
        reports = [acl.nn.patch(make("llama", num_hidden_layers=1)) for _ in range(2)]
    assert len(caught) == 1
    assert all(note in str(report) for report in reports)
    assert not acl.nn.patch(nn.Sequential(nn.Linear(2, 2), nn.GELU())).notes


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("family", "target"), [("bert", "intermediate.dense"), ("llama", "lm_head"), ("llama", "up_proj")]
)
def test_adapters_of_peft_are_called_not_looked_through(family, target, when):
    """Their gradients stay, too, and what they were merged into."""
    require_module("peft")
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
    plain, inputs = peft.get_peft_model(make(family), config), batch(family)
    wanted = outcome(plain, inputs)
    model = make(family)
    if when == "after":
        acl.nn.patch(model)
    adapted = peft.get_peft_model(model, config)
    adapted.load_state_dict(plain.state_dict())
    if when == "before":
        report = acl.nn.patch(adapted)
        if family == "bert":
            assert left(report, "BertIntermediate") == {"its dense is a peft.tuners.lora.layer.Linear, not a Linear"}
    assert_same(outcome(adapted, inputs), wanted, **TIGHT)
    merged, expected = (each.eval().merge_and_unload() for each in (adapted, plain))
    with torch.no_grad():
        torch.testing.assert_close(merged(**inputs).logits, expected(**inputs).logits, **TIGHT)


@pytest.mark.parametrize(
    "part", ["transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.act", "transformer.h.0.ln_2", "lm_head"]
)
def test_hooks_run(part):
    model, inputs = make("gpt2"), batch("gpt2")
    acl.nn.patch(model)
    seen = []
    model.get_submodule(part).register_forward_hook(lambda *_: seen.append(part))
    model(**inputs)
    assert seen == [part]


def test_other_models_are_untouched():
    first = make("llama")
    second = type(first)(first.config)  # transformers lets models share a config
    inputs = batch("llama")
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, :4] = 0
    before = outcome(second, inputs)
    acl.nn.patch(first)
    assert all("forward" not in module.__dict__ for module in second.modules())
    assert_same(outcome(second, inputs), before)


@pytest.mark.slow
def test_invalid_options_and_compiled_models():
    with pytest.raises(ConfigError, match="padding must be 'exact' or 'skip', got 'maybe'"):
        acl.nn.patch(make("gpt2"), padding="maybe")
    assert_raises(ConfigError, r"before torch\.compile", lambda: acl.nn.patch(torch.compile(make("gpt2"))))


def test_where_nothing_changed_a_warning_names_the_class():
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic")
    with pytest.warns(UserWarning, match=r"^accelerant\.nn\.patch changed nothing in ResNetModel: .*no replacement"):
        report = acl.nn.patch(transformers.ResNetModel(config))
    assert not report.changed


@pytest.mark.parametrize("kind", ["GPT2ForSequenceClassification", "LlamaForTokenClassification", "BertModel"])
def test_other_heads(kind):
    family = next(family for family in FAMILIES if kind.lower().startswith(family))
    config = make(family).config
    config.num_labels = 3
    model = getattr(transformers, kind)(config).eval()  # some heads have dropout
    ids = batch(family)["input_ids"]

    def step():
        model.zero_grad()
        output = model(ids)[0]
        output.square().sum().backward()
        return output.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    wanted, gradients = step()
    report = acl.nn.patch(model)
    assert {"norm", "attention", "mlp", "residual"} <= report.counts.keys()
    found = step()
    torch.testing.assert_close(found[0], wanted, **TIGHT)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[1][name], gradient, **TIGHT)


def test_a_wrapped_model():
    model, inputs = make("gpt2"), batch("gpt2")
    before = outcome(model, inputs)
    holder = nn.ModuleDict({"inner": model})
    report = acl.nn.patch(holder)
    assert report.changed[0].name == "inner"
    assert_same(outcome(model, inputs), before, **TIGHT)
    acl.nn.unpatch(holder)
    assert_same(outcome(model, inputs), before)


# --- undone, copied, pickled -----------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_bit_for_bit(family):
    model, inputs = make(family), batch(family)
    before = outcome(model, inputs)
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    acl.nn.patch(model)
    outcome(model, inputs)
    acl.nn.unpatch(model)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert model.config._attn_implementation == "sdpa"
    assert_same(outcome(model, inputs), before)
    acl.nn.unpatch(model)  # nothing left to undo
    acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)


def test_unpatch_keeps_an_attention_chosen_since():
    model = make("llama")
    acl.nn.patch(model)
    model.set_attn_implementation("eager")
    acl.nn.unpatch(model)
    assert model.config._attn_implementation == "eager"


def test_two_patched_models_with_one_config():
    first = make("llama")
    second, inputs = type(first)(first.config), batch("llama")
    before = outcome(second, inputs)
    for model in (first, second):
        acl.nn.patch(model)
    assert_same(outcome(second, inputs), before, **TIGHT)
    acl.nn.unpatch(first)
    assert_same(outcome(second, inputs), before, **TIGHT)
    acl.nn.unpatch(second)
    assert second.config._attn_implementation == "sdpa"
    assert_same(outcome(second, inputs), before)


def test_unpatch_refuses_what_was_built_upon():
    model = make("llama")
    acl.nn.patch(model)
    patched = model.forward
    model.forward = lambda **inputs: patched(**inputs)
    assert_raises(ConfigError, "the forward of a LlamaForCausalLM was replaced after patch", acl.nn.unpatch, model)
    assert "forward" in model.model.layers[0].mlp.__dict__  # nothing was undone
    model.forward = patched
    acl.nn.unpatch(model)


@pytest.mark.parametrize(
    "family", ["qwen2", *[pytest.param(x, marks=pytest.mark.slow) for x in ("gemma2", "t5", "phi3")]]
)
def test_a_deep_copy_is_patched_and_independent(family):
    model, inputs = make(family), batch(family)
    before = outcome(model, inputs)
    acl.nn.patch(model)
    replaced = [module for module in model.modules() if "forward" in vars(module)]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(outcome(other, inputs), before, **TIGHT)
    acl.nn.unpatch(other)
    assert_same(outcome(other, inputs), before)
    assert len(replaced) > 2
    assert replaced == [module for module in model.modules() if "forward" in vars(module)]


def test_data_parallel_is_refused():
    model = make("llama")
    acl.nn.patch(model)
    assert_raises(ConfigError, "DataParallel cannot copy a patched model", model._replicate_for_data_parallel)
    assert_raises(ConfigError, "DataParallel cannot copy", lambda: copy.deepcopy(model)._replicate_for_data_parallel())
    acl.nn.unpatch(model)
    assert type(model._replicate_for_data_parallel()) is type(model)


@pytest.mark.parametrize("part", ["", "transformer.h.0.mlp"])
def test_pickle_says_what_to_do(part):
    model = make("gpt2")
    acl.nn.patch(model)
    with pytest.raises(ConfigError, match=r"a patched model cannot be pickled: save its state_dict\(\)"):
        pickle.dumps(model.get_submodule(part))
    assert_raises(ConfigError, "cannot be pickled", lambda: torch.save(model, io.BytesIO()))
    acl.nn.unpatch(model)
    pickle.dumps(model)


def test_saved_as_before(tmp_path):
    model, inputs = make("llama"), batch("llama")
    before = outcome(model, inputs)
    acl.nn.patch(model)
    model.save_pretrained(tmp_path)
    assert "accelerant" not in (tmp_path / "config.json").read_text()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).train()
    assert_same(outcome(again, inputs), before)
