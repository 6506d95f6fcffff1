"""patch: a tiny model of every family of transformers equals its unpatched self, and a CUDA graph takes its step.

`python tests/nn/test_patch_every_model.py > table && mv table tests/nn/not_captured.txt` writes the families that no
graph takes, with the reason, and those of which there is no tiny model here.
"""

import functools
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from emulated_device import refusals
from patch_models import assert_same, outcome, transformers
from tiny_models import CASES, inputs_of, tiny
from transformers.integrations import moe

import accelerant as acl
from accelerant.config import override
from accelerant.nn.patching import capture
from accelerant.nn.patching.graphs import EAGER_CALLS

TABLE = Path(__file__).with_name("not_captured.txt")
NO_MODEL = "no tiny model"
IDS = [name for name, _ in CASES]
BFLOAT16 = "torch's grouped products of other dtypes than bfloat16 read offsets on the host"


@functools.cache
def recorded():
    """The version of transformers in the table, and the reason of each of its families."""
    version, *lines = TABLE.read_text().splitlines()
    reasons = (line.partition(": ") for line in lines)
    return version, {name: reason for reason, _, names in reasons for name in names.split(", ")}


def made(name, kind, **settings):
    """A tiny model with its inputs; skips a family of which the table has none."""
    version, reasons = recorded()
    if reasons.get(name) == NO_MODEL:
        pytest.skip(f"no tiny {name} of these sizes and inputs")
    try:
        model = tiny(name, kind, **settings)
        return model, inputs_of(model, kind)
    except Exception as error:
        if version == f"transformers {transformers.__version__}":
            raise
        pytest.skip(f"no tiny {name} of these sizes and inputs ({type(error).__name__}: {error})")


@pytest.mark.soak
@pytest.mark.parametrize(("name", "kind"), CASES, ids=IDS)
def test_it_equals_the_unpatched_model(name, kind):
    model, inputs = made(name, kind)
    cases, ids = [inputs, inputs], inputs.get("input_ids")
    if kind in ("causal", "masked"):
        cases.insert(1, inputs | {"attention_mask": torch.ones_like(ids)})
        cases[1]["attention_mask"][1, -4:] = 0
    before = [outcome(model, each) for each in cases]
    try:
        assert_same(before[0], before[-1], rtol=1e-6, atol=1e-7)
    except AssertionError:
        pytest.skip("it draws random numbers")
    sequences = None
    if kind == "causal":
        try:
            sequences = model.eval().generate(ids[:, :6], max_new_tokens=5, do_sample=False)
        except Exception as error:
            pytest.skip(f"transformers does not generate ({type(error).__name__}: {error})")
    acl.nn.patch(model)
    model.train()
    largest = max(1.0, *(float(g.abs().max()) for each in before for g in (each[1], *each[2].values()) if g.numel()))
    for each, wanted in zip(cases[:-1], before, strict=False):
        assert_same(outcome(model, each), wanted, rtol=2e-5, atol=4e-6 * largest)
    if sequences is not None:
        assert torch.equal(model.eval().generate(ids[:, :6], max_new_tokens=5, do_sample=False), sequences)
    acl.nn.unpatch(model.train())
    assert_same(outcome(model, inputs), before[0])


@pytest.mark.sample(48, 16)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "kind"), CASES, ids=IDS)
def test_a_graph_takes_its_step_or_the_table_says_why_not(name, kind):
    version, reasons = recorded()
    if version != f"transformers {transformers.__version__}":
        pytest.skip(f"the table is of {version}")
    model, inputs = made(name, kind)
    acl.nn.patch(model, graph=False)
    assert "; ".join(refusals(model, inputs)) == reasons.get(name, "")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "kind"), CASES[::3], ids=IDS[::3])
def test_a_gpu_captures_what_the_table_says(name, kind):
    version, reasons = recorded()
    if version != f"transformers {transformers.__version__}":
        pytest.skip(f"the table is of {version}")
    model, inputs = made(name, kind)
    model, inputs = model.to(capture.DEVICE), {name: value.to(capture.DEVICE) for name, value in inputs.items()}
    report = acl.nn.patch(model, graph=True)
    for _ in range(EAGER_CALLS + 3):
        model.zero_grad()
        model(**inputs)["loss"].backward()
    assert bool(report.graphs["captured"]) == (name not in reasons), report.graphs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_experts_in_bfloat16_are_captured(name):
    assert recorded()[1][name] == BFLOAT16  # in float32
    model, inputs = made(name, "causal")
    acl.nn.patch(model.to(torch.bfloat16), graph=False)
    assert not refusals(model, inputs)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_experts_compute_in_the_dtype_of_autocast(name, monkeypatch):
    product, dtypes = moe._grouped_mm, []
    monkeypatch.setattr(
        moe, "_grouped_mm", lambda x, *rest, **kw: dtypes.append(rest[0].dtype) or product(x, *rest, **kw)
    )
    model, inputs = made(name, "causal")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = outcome(model, inputs)
        assert {*dtypes} == {torch.float32}
        acl.nn.patch(model, graph=False)
        dtypes.clear()
        with override(race="off"):
            found = outcome(model, inputs)
    assert {*dtypes} == {torch.bfloat16}
    assert_same(found, wanted, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", ["Gemma3ForConditionalGeneration", "Qwen2AudioForConditionalGeneration"])
def test_packed_sequences_where_the_mask_is_made_before_the_cache_and_after(name):
    model, inputs = made(name, dict(CASES)[name])
    inputs["position_ids"] = torch.cat((torch.arange(4), torch.arange(9))).expand(2, -1)
    wanted = outcome(model, inputs)
    acl.nn.patch(model)
    assert_same(outcome(model, inputs), wanted, rtol=2e-5, atol=4e-6)


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification"])
def test_a_head_that_says_itself_that_no_cache_is_made(head):
    model, inputs = made("T5GemmaForConditionalGeneration", "sequence")
    torch.manual_seed(2)
    model = getattr(transformers, f"T5GemmaFor{head}")(model.config).train()
    inputs["labels"] = torch.tensor([1, 0]) if head.startswith("Sequence") else inputs["input_ids"] % 2
    wanted = outcome(model, inputs)
    acl.nn.patch(model)
    with override(race="off"):
        assert_same(outcome(model, inputs), wanted, rtol=2e-5, atol=4e-6)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"layerdrop": 0.1}, {"mask_time_prob": 0.5, "mask_time_length": 2}])
def test_layers_left_out_and_masks_at_random_are_drawn_on_the_host(settings):
    model, inputs = made("Wav2Vec2ForSequenceClassification", "audio", **settings)
    acl.nn.patch(model, graph=False)
    assert "draws random numbers on the host" in refusals(model, inputs)


def result(model, inputs):
    """The outcome of a step, or the class of the error that it raises."""
    try:
        return outcome(model, inputs)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        return type(error)


def bad(model, inputs):
    """Inputs with an error: labels and tokens out of range, int32 labels, masks longer and shorter, and NaN."""
    wrong = inputs["labels"].clone()
    wrong.view(-1)[-1] = 1_000_000
    yield inputs | {"labels": wrong}
    yield inputs | {"labels": inputs["labels"].int()}
    if "input_ids" in inputs:
        yield inputs | {"input_ids": inputs["input_ids"] + 1_000_000}
        rows, length = inputs["input_ids"].shape
        yield inputs | {"attention_mask": torch.ones(rows, length + 2, dtype=torch.int64)}
        yield inputs | {"attention_mask": torch.ones(rows, length - 1, dtype=torch.int64)}
    else:
        name = next(iter(inputs))
        yield inputs | {name: inputs[name].index_fill(-1, torch.tensor(0), float("nan"))}
    with torch.no_grad():
        next(model.parameters())[:1] = float("nan")
    yield inputs


@pytest.mark.sample(48, 16)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "kind"), CASES, ids=IDS)
def test_bad_input_gives_what_it_gives_without_patch(name, kind):
    found = []
    for patched in (False, True):
        model, inputs = made(name, kind)
        if patched:
            acl.nn.patch(model, graph=False)
        found.append([result(model, each) for each in bad(model, inputs)])
    for plain, ours in zip(*found, strict=True):
        if isinstance(plain, type) or isinstance(ours, type):
            assert plain in getattr(ours, "__mro__", ())
        else:
            torch.testing.assert_close(ours[:2], plain[:2], rtol=1e-4, atol=1e-5, equal_nan=True)
            assert ours[2].keys() == plain[2].keys()


def main():
    """Write the table."""
    families, counts = defaultdict(list), defaultdict(lambda: [0, 0])
    for name, kind in CASES:
        try:
            model = tiny(name, kind)
            inputs = inputs_of(model, kind)
            outcome(model, inputs)
        except Exception:
            families[NO_MODEL].append(name)
            continue
        model = tiny(name, kind)  # the first step of some changes them
        acl.nn.patch(model, graph=False)
        reason = "; ".join(refusals(model, inputs))
        counts[kind][0] += not reason
        counts[kind][1] += 1
        if reason:
            families[reason].append(name)
    print(f"transformers {transformers.__version__}")
    for reason, names in sorted(families.items()):
        print(f"{reason}: {', '.join(sorted(names))}")
    print(*(f"{kind}: {taken} of {tried}" for kind, (taken, tried) in counts.items()), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
