"""GPT-2 weights to and from transformers, and what is refused of a checkpoint."""

import functools
import itertools
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from accelerant.errors import ConfigError, FormatError, UnsupportedCase
from accelerant.nn import GPT, GPTConfig
from processes import printed
from refusals import assert_raises

transformers = pytest.importorskip("transformers")

CONFIG = GPTConfig(vocab_size=70, context=16, layers=2, heads=2, width=16, eps=1e-3)


def theirs(cls="GPT2LMHeadModel", **changes):
    torch.manual_seed(0)
    fields = {
        "vocab_size": 70, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "layer_norm_epsilon": 1e-3,
        "initializer_range": 0.3,
    } | changes  # fmt: skip
    model = getattr(transformers, cls)(transformers.GPT2Config(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def tokens(*shape):
    return torch.randint(70, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path):
    theirs().save_pretrained(tmp_path)
    return tmp_path


# --- parity ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", [{}, {"activation_function": "gelu_pytorch_tanh"}, {"n_inner": 64}])
def test_logits_are_transformers(changes):
    other = theirs(**changes)
    model = GPT.from_pretrained(other)
    assert model.config == CONFIG
    idx = tokens(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(idx), other(idx).logits, rtol=0, atol=1e-4)


def test_the_dtype_is_the_embeddings_not_a_masks(folder):
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({"h.0.attn.bias": torch.ones(1, 1, 16, 16)} | tensors, folder / "model.safetensors")
    assert {p.dtype for p in GPT.from_pretrained(folder).parameters()} == {torch.bfloat16}


def test_weights_are_its_own():
    other = theirs()
    model = GPT.from_pretrained(other)
    before = other.transformer.wte.weight.clone()
    model.wte.weight.data += 1
    assert torch.equal(other.transformer.wte.weight, before)
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in model.parameters())


def test_padding_of_the_vocabulary_is_not_seen(folder):
    model = GPT.from_pretrained(folder)
    assert model.wte.weight.shape[0] == 128
    assert torch.count_nonzero(model.wte.weight[70:]) == 0
    assert model(tokens(1, 4)).shape[-1] == 70
    model.save_pretrained(folder / "again")
    assert load_file(folder / "again" / "model.safetensors")["transformer.wte.weight"].shape == (70, 16)


def test_folders_go_both_ways(folder, tmp_path):
    other = theirs()
    model = GPT.from_pretrained(folder)
    idx = tokens(2, 10)
    with torch.no_grad():
        expected = other(idx).logits
        torch.testing.assert_close(model(idx), expected, rtol=0, atol=1e-4)
        model.save_pretrained(tmp_path / "ours")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert type(again) is transformers.GPT2LMHeadModel
        torch.testing.assert_close(again.eval()(idx).logits, expected, rtol=0, atol=1e-5)


def test_an_output_layer_of_its_own(tmp_path):
    other = theirs(tie_word_embeddings=False)
    model = GPT.from_pretrained(other)
    assert not model.config.tied
    assert model.lm_head.weight.shape == (128, 16)
    assert model.parameter_count() == sum(each.numel() for each in other.parameters())
    idx = tokens(2, 10)
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    copy = GPT(model.config)
    copy.load_state_dict(model.state_dict())
    assert model.state_dict()["lm_head.weight"].shape == (70, 16)
    with torch.no_grad():
        expected = other(idx).logits
        for each in (model(idx), again(idx).logits, copy(idx)):
            torch.testing.assert_close(each, expected, rtol=0, atol=1e-4)
    loss = model.loss(idx[:, :-1], idx[:, 1:])
    wanted = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert torch.count_nonzero(model.lm_head.weight.grad[70:]) == 0
    prompt = tokens(2, 4)
    theirs_greedy = other.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(model.generate(prompt, 8, temperature=0), theirs_greedy)


def test_the_bare_model_fits_too(tmp_path):
    """As the first GPT-2 files are: no prefix, no head, and masks that nobody needs."""
    other = theirs("GPT2Model")
    other.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "wte.weight" in tensors
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    model = GPT.from_pretrained(tmp_path)
    idx = tokens(2, 9)
    with torch.no_grad():
        expected = other(idx).last_hidden_state @ other.wte.weight.T
        torch.testing.assert_close(model(idx), expected, rtol=0, atol=1e-4)


def test_greedy_tokens_are_transformers():
    other = theirs()
    prompt = tokens(3, 4)
    expected = other.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(GPT.from_pretrained(other).generate(prompt, 12, temperature=0), expected)


def test_shards_replace_a_single_file(folder):
    model = GPT.from_pretrained(folder)
    model.save_pretrained(folder, max_shard_bytes=8000)
    files = {path.name for path in folder.glob("model*")}
    assert "model.safetensors" not in files
    assert len(files) > 3
    assert torch.equal(GPT.from_pretrained(folder)(tokens(1, 5)), model(tokens(1, 5)))
    with torch.no_grad():
        again = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
        torch.testing.assert_close(again(tokens(1, 5)).logits, model(tokens(1, 5)), rtol=0, atol=1e-4)
    model.save_pretrained(folder)
    assert {path.name for path in folder.glob("model*")} == {"model.safetensors"}


def test_saving_keeps_other_files(folder):
    for name in ("model_ema.safetensors", "model-00001-of-00009.safetensors"):
        (folder / name).write_bytes(b"kept or not")
    GPT.from_pretrained(folder).save_pretrained(folder)
    assert {path.name for path in folder.glob("model*")} == {"model.safetensors", "model_ema.safetensors"}


# --- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"activation_function": "gelu"}, UnsupportedCase,
     "activation_function must be 'gelu_new' or 'gelu_pytorch_tanh', got 'gelu'"),
    ({"scale_attn_weights": False}, UnsupportedCase, "scale_attn_weights must be True, got False"),
    ({"scale_attn_by_inverse_layer_idx": True}, UnsupportedCase, "scale_attn_by_inverse_layer_idx must be False"),
    ({"reorder_and_upcast_attn": True}, UnsupportedCase, "reorder_and_upcast_attn must be False"),
    ({"n_inner": 40}, UnsupportedCase, "n_inner must be None or 64, got 40"),
    ({"is_causal": False}, UnsupportedCase, "is_causal must be True, got False"),
    ({"model_type": "bert"}, UnsupportedCase, "model_type must be 'gpt2', got 'bert'"),
    ({"n_embd": "16"}, FormatError, "n_embd must be an integer, got '16'"),
    ({"n_layer": True}, FormatError, "n_layer must be an integer, got True"),
    ({"layer_norm_epsilon": None}, FormatError, "layer_norm_epsilon must be a finite number, got None"),
    ({"layer_norm_epsilon": float("nan")}, FormatError, "layer_norm_epsilon must be a finite number, got nan"),
    ({"layer_norm_epsilon": 10**400}, FormatError,
     "must be a finite number, got 0xda763fc8cb9ff9e5... .an integer of 1,329 bits"),
    ({"n_layer": 10**12}, FormatError, "tensors, too few for the 1000000000000 layers of its config"),
])  # fmt: skip
def test_options_that_are_not_supported_and_fields_of_another_type_are_named(folder, changes, error, words):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert_raises(error, words, GPT.from_pretrained, folder)


def change(folder, by):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    by(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(("by", "words"), [
    (lambda t: t.pop("transformer.h.1.attn.c_attn.weight"), r"lacks 'h\.1\.attn\.c_attn\.weight'"),
    (lambda t: t.update({"transformer.h.2.ln_1.weight": torch.ones(16)}), r"has 'h\.2\.ln_1\.weight', which"),
    (lambda t: t.update({"transformer.wpe.weight": torch.ones(15, 16)}),
     r"'transformer\.wpe\.weight' must be \(16, 16\), got \(15, 16\)"),
    (lambda t: t.update({"transformer.h.0.mlp.c_fc.weight": torch.ones(64, 16)}),
     r"c_fc\.weight' must be \(16, 64\), got \(64, 16\)"),
    (lambda t: t.update({"transformer.ln_f.bias": torch.ones(16, dtype=torch.int8)}),
     r"ln_f\.bias' must be floating point, got I8"),
    (lambda t: t.update({"lm_head.weight": torch.ones(70, 16)}), r"'lm_head\.weight' differs from 'wte\.weight'"),
    (lambda t: t.update({"lm_head.weight": torch.ones(70, 16, dtype=torch.int8)}), r"'lm_head\.weight' differs from"),
    (lambda t: t.update({"h.0.ln_1.bias": torch.ones(16)}),
     r"has both 'h\.0\.ln_1\.bias' and 'transformer\.h\.0\.ln_1\.bias'"),
])  # fmt: skip
def test_a_wrong_tensor_is_named(folder, by, words):
    change(folder, by)
    assert_raises(FormatError, words, GPT.from_pretrained, folder)


@pytest.mark.parametrize("kept", [0, 5, 200, -100])
def test_a_torn_file_is_refused(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert_raises(FormatError, "is not a complete safetensors file", GPT.from_pretrained, folder)


def test_a_pickle_is_never_read(folder):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    (folder / "model.safetensors").unlink()
    torch.save(Trap(), folder / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"pytorch_model\.bin: a pickle may execute arbitrary code and is not read"):
        GPT.from_pretrained(folder)


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("shard_bytes", [8000, 1 << 30])
def test_a_save_that_ends_half_way_leaves_the_model_of_before(folder, shard_bytes, monkeypatch):
    """As if killed at each call that changes the disk; then there is the old model, the new one, or an error."""
    before, after = GPT.from_pretrained(folder), GPT.from_pretrained(folder)
    with torch.no_grad():
        for weight in after.parameters():
            weight += 1.0
    before.save_pretrained(folder, max_shard_bytes=shard_bytes)
    found = []
    for calls in itertools.count():
        left = iter(range(calls))

        def changes(change, *args, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return change(*args)

        with monkeypatch.context() as patch:
            for name in ("replace", "unlink", "fsync"):
                patch.setattr(os, name, functools.partial(changes, getattr(os, name)))
            try:
                after.save_pretrained(folder, max_shard_bytes=shard_bytes)
            except KeyboardInterrupt:
                pass
            else:
                break
        try:
            loaded = GPT.from_pretrained(folder)
        except (ConfigError, FormatError):
            found.append("refused")
        else:
            shifts = {
                float((new - old).detach().mean().round())
                for new, old in zip(loaded.parameters(), before.parameters(), strict=True)
            }
            assert len(shifts) == 1
            found.append(shifts.pop())
        before.save_pretrained(folder, max_shard_bytes=shard_bytes)
        for leftover in folder.glob(".*.tmp"):  # else removed at some of the calls that are counted
            leftover.unlink()
    assert found == sorted(found, key=[0.0, "refused", 1.0].index)
    assert found[0] == 0.0
    assert ("refused" in found) == (shard_bytes == 8000)


def test_shards_are_checked(folder):
    GPT.from_pretrained(folder).save_pretrained(folder, max_shard_bytes=8000)
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    name, file = next(iter(whole["weight_map"].items()))
    for weight_map, words in (
        (whole["weight_map"] | {name: "../other.safetensors"}, "is not the name of a file in this folder"),
        (whole["weight_map"] | {name: ".."}, "is not the name of a file in this folder"),
        (whole["weight_map"] | {name: ""}, "is not the name of a file in this folder"),
        (whole["weight_map"] | {name: "x" * 5000}, r"'xxx.{10,80} is not the name of a file in this folder"),
        (whole["weight_map"] | {name: "model-9.safetensors"}, "no such file, though the index names it"),
        (whole["weight_map"] | {"h.9": file}, r"lacks 'h\.9', which the index lists"),
        ([], "weight_map must be an object"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert_raises(FormatError, words, GPT.from_pretrained, folder)
    index.write_text("{")
    assert_raises(FormatError, "is not valid JSON", GPT.from_pretrained, folder)
    index.write_text(json.dumps(whole))
    (folder / file).unlink()
    assert_raises(FormatError, "no such file", GPT.from_pretrained, folder)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a folder: .* nothing is downloaded"):
        GPT.from_pretrained("openai-community/gpt2")
    assert_raises(FormatError, r"config\.json: no such file", GPT.from_pretrained, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert_raises(FormatError, r"has neither model\.safetensors nor", GPT.from_pretrained, tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert_raises(FormatError, "must hold an object, got list", GPT.from_pretrained, tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert_raises(FormatError, "is not valid JSON", GPT.from_pretrained, tmp_path)
    assert_raises(ConfigError, "Linear has no config", lambda: GPT.from_pretrained(torch.nn.Linear(2, 2)))


def test_what_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(UnsupportedCase, match=r"cannot represent|always has biases"):
        GPT(GPTConfig(vocab_size=70, context=8, layers=1, heads=2, width=16, bias=False)).save_pretrained(
            tmp_path / "a"
        )
    with pytest.raises(ConfigError, match="max_shard_bytes must be at least 1, got 0"):
        GPT(CONFIG).save_pretrained(tmp_path / "a", max_shard_bytes=0)
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_transformers_is_not_needed(folder):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        f"from accelerant.nn import GPT; GPT.from_pretrained({str(folder)!r}); print('loaded')"
    )
    assert printed(code) == "loaded\n"
