"""patch on a GPU: our kernels inside transformers' models, in bfloat16."""

from collections import Counter

import pytest
import torch
from patch_models import FAMILIES, batch, make, outcome

import accelerant as acl
from accelerant.config import override
from accelerant.runtime.streams.graphs import ahead_of_capture

pytestmark = pytest.mark.gpu

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
"""Heads of 64, and rows that begin on 16-byte boundaries: what the kernels for Hopper take."""


def wide(family):
    settings = (
        WIDE
        if family == "vit"
        else WIDE | {"max_position_embeddings": 256}
        if family == "bert"
        else WIDE | {"max_position_embeddings": 256, "num_key_value_heads": 2}
    )
    if family == "gpt2":
        settings = {"n_embd": 256, "n_head": 4, "n_positions": 256}
    if family == "qwen3":
        settings |= {"head_dim": 64}
    if family == "mistral":
        settings |= {"sliding_window": 48}
    return make(family, **settings).cuda()


def inputs_of(family, dtype=torch.bfloat16):
    found = batch(family, 2, 128) if family != "bert" else batch(family, 2, 64)
    return {k: v.cuda().to(dtype) if v.is_floating_point() else v.cuda() for k, v in found.items()}


def distance(found, truth):
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def assert_no_worse(found, plain, truth):
    """Logits and gradients of two models in bfloat16 against those in float64."""
    assert distance(found[1], truth[1]) <= 1.5 * distance(plain[1], truth[1]) + 1e-4
    for name, gradient in truth[2].items():
        assert distance(found[2][name], gradient) <= 2 * distance(plain[2][name], gradient) + 5e-3, name


def both(model, family, **more):
    """The truth, and the unpatched model in bfloat16."""
    truth = outcome(model.double(), inputs_of(family, torch.float64) | more)
    return truth, outcome(model.to(torch.bfloat16), inputs_of(family) | more)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_further_from_the_truth_than_unpatched(family):
    model = wide(family)
    truth, plain = both(model, family)
    report = acl.nn.patch(model)
    with override(fallback="forbid"), ahead_of_capture():
        patched = outcome(model, inputs_of(family))
    assert not report.fallbacks
    assert_no_worse(patched, plain, truth)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_under_autocast(family):
    """Each runs as one function, in the dtypes of the model unpatched, and no further from the truth."""
    model = wide(family)
    truth = outcome(model.double(), inputs_of(family, torch.float64))
    model.float()
    with torch.autocast("cuda", torch.bfloat16):
        plain = outcome(model, inputs_of(family, torch.float32))
        report = acl.nn.patch(model)
        with ahead_of_capture():
            patched = outcome(model, inputs_of(family, torch.float32))
    assert not report.fallbacks  # of attention that is called apart
    assert [each.dtype for each in patched[:2]] == [each.dtype for each in plain[:2]]
    assert_no_worse(patched, plain, truth)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_small_layers_are_torchs_unless_captured(family):
    """Dropout of attention prevents fused blocks; their layers then cost the host more than torch's."""
    name = {"gpt2": "attn_pdrop", "qwen3": "attention_dropout"}[family]
    model = make(family, **{name: 0.1}).cuda()
    inputs = {key: value.cuda() for key, value in batch(family).items()}
    acl.nn.patch(model, loss=False, graph=False)
    before = calls_by_op()
    outcome(model, inputs)
    assert set(calls_by_op() - before) <= {"cross_entropy_fwd", "cross_entropy_bwd"}  # the loss of the whole model
    with ahead_of_capture():
        outcome(model, inputs)
    assert sum((calls_by_op() - before).values()) >= 8


def calls_by_op():
    counted = Counter()
    for record in acl.ledger().records():
        counted[record.op] += record.calls
    return counted


_ENCODER = ("attention_fwd", "attention_packed_bwd", "add_layer_norm_fwd", "linear_gelu_fwd", "block_norm_bwd", "dgelu")
_OPS = {
    "llama": ("attention_fwd", "attention_bwd", "rope_fwd", "swiglu_fwd", "add_rms_norm_fwd", "rms_norm_fwd"),
    "gpt2": (*_ENCODER[:-1], "linear_dz"),
    "bert": _ENCODER,
    "vit": _ENCODER,
}


@pytest.mark.parametrize("family", _OPS)
def test_our_kernels_are_what_runs(family):
    model, inputs = wide(family).to(torch.bfloat16), inputs_of(family)
    acl.nn.patch(model)
    with ahead_of_capture():
        outcome(model, inputs)
        before = calls_by_op()
        outcome(model, inputs)
    calls = calls_by_op() - before
    for op in _OPS[family]:
        assert calls[op] >= 2, op
    assert calls["linear_cross_entropy_fwd"] == (family != "vit")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_of_gradients(family):
    """A block that ran as one function is computed again by our ops: torch's attention has no second derivative."""
    model = wide(family)
    acl.nn.patch(model)
    x = torch.randn(2, 16, 256, device="cuda", requires_grad=True)
    (dx,) = torch.autograd.grad(model.model(inputs_embeds=x).last_hidden_state.square().sum(), x, create_graph=True)
    dx.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.model.layers.parameters())


@pytest.mark.parametrize("kind", ["left", "right", "holes", "ones"])
def test_padding_is_exact_everywhere(kind):
    model, inputs = wide("llama"), inputs_of("llama")
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, {"left": slice(30), "right": slice(90, None), "holes": slice(20, 90, 3), "ones": slice(0)}[kind]] = 0
    truth, plain = both(model, "llama", attention_mask=mask)
    report = acl.nn.patch(model)
    with ahead_of_capture():
        patched = outcome(model, inputs | {"attention_mask": mask})
    assert not report.fallbacks
    assert_no_worse(patched, plain, truth)


def gradients(model, family, side, dtype):
    """The gradients of each parameter for batches of several lengths, padded on one side, at the same weights."""
    found = []
    for number, length in enumerate((97, 160, 123, 201, 77, 250)):
        inputs = {name: x.cuda() for name, x in batch(family, 4, length, seed=number).items()}
        kept = torch.arange(length - 50, length + 1, 16)[:, None]
        places = torch.arange(length) if side == "right" else torch.arange(length).flip(0)
        mask = (places < kept).cuda()
        inputs["labels"][~mask] = -100
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = model(**inputs, attention_mask=mask.long()).loss
        loss.backward()
        found.append({name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None})
        model.zero_grad()
    return found


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", sorted({*FAMILIES, "gemma3", "roberta", "modernbert"} - {"vit"}))
def test_gradients_of_padded_batches_of_any_length_are_as_near_to_float32(family, side):
    """From graphs, too. Losses after some steps would tell less: training enlarges any difference."""
    model = wide(family)
    truth, plain = (gradients(model, family, side, dtype) for dtype in (None, torch.bfloat16))
    report = acl.nn.patch(model, graph=True)
    runs = [gradients(model, family, side, torch.bfloat16) for _ in range(3)]
    assert report.graphs["replayed"] >= 6

    def apart(one, other, name):
        return sum(float((a[name] - b[name]).double().square().sum()) for a, b in zip(one, other, strict=True)) ** 0.5

    for run in runs:
        assert [step.keys() for step in run] == [step.keys() for step in truth]
        for name, gradient in truth[0].items():
            rounding = 1e-6 * float(gradient.norm())
            assert apart(run, truth, name) <= 1.5 * apart(plain, truth, name) + rounding, name


def test_logits_take_no_memory():
    model = make("gpt2", vocab_size=50257, n_embd=256, n_head=4, n_positions=512).cuda().to(torch.bfloat16)
    ids = torch.randint(3, 50257, (8, 512), device="cuda")

    def peak():
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        return torch.cuda.max_memory_allocated()

    before = peak()
    acl.nn.patch(model)
    whole = ids.numel() * 50257 * 4
    assert peak() < before - whole  # at least the float32 logits are gone


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_compiled(family):
    model = wide(family)
    truth, plain = both(model, family)
    acl.nn.patch(model)
    model.zero_grad()
    output = torch.compile(model, fullgraph=True)(**inputs_of(family))
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_no_worse((output.loss, plain[1], gradients), plain, truth)  # the graph makes no logits
