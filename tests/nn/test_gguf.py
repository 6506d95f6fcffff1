"""GGUF files of llama.cpp's form: the logits of the model that they were made of; what lies in a header is named."""

import json
import struct

import numpy as np
import pytest
import torch

from accelerant.errors import ConfigError, FormatError, MissingFile, UnsupportedCase
from accelerant.nn import Llama, LlamaConfig, load_model
from accelerant.nn.models.gguf import GGUFFile
from accelerant.ops.rope import Llama3Scaling
from refusals import assert_raises

TOKENIZER = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
TEMPLATE = "{{ messages[0].content }}"
TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "BF16": 30}
SIZES = {"vocab_size": 64, "context": 40, "layers": 2, "heads": 4, "kv_heads": 2, "width": 64, "hidden": 96}
FAMILIES = {
    "llama": {"rope_scaling": None},
    "llama of 3.1": {"rope_scaling": Llama3Scaling(), "head_width": 32},
    "mistral": {"rope_scaling": None, "window": 7, "tied": True},
    "qwen2": {"rope_scaling": None, "qkv_bias": True},
    "qwen3": {"rope_scaling": None, "qk_norm": True, "head_width": 32},
}
LAYER = {
    "norm_1": ["attn_norm"], "attention.qkv": ["attn_q", "attn_k", "attn_v"], "attention.projection": ["attn_output"],
    "attention.q_norm": ["attn_q_norm"], "attention.k_norm": ["attn_k_norm"], "norm_2": ["ffn_norm"],
    "mlp.gate_up": ["ffn_gate", "ffn_up"], "mlp.down": ["ffn_down"],
}  # fmt: skip


def drawn(family):
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**SIZES, **FAMILIES[family]))
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def q8_0(x):
    """Return the blocks of a matrix, and the matrix that they stand for."""
    rows = x.reshape(-1, 32)
    scale = (np.abs(rows).max(1) / 127).astype(np.float16)
    q = np.round(rows / np.maximum(scale.astype(np.float32), 1e-8)[:, None]).clip(-127, 127).astype(np.int8)
    data = b"".join(s.tobytes() + each.tobytes() for s, each in zip(scale, q, strict=True))
    return data, (q * scale.astype(np.float32)[:, None]).reshape(x.shape)


def encoded(x, kind):
    """Return the bytes of a float32 array in a type, and the array that they stand for."""
    if kind == "Q8_0" and x.ndim == 2:
        return "Q8_0", *q8_0(x)
    if kind in ("F16", "BF16") and x.ndim == 2:
        y = torch.from_numpy(x.copy()).to(torch.float16 if kind == "F16" else torch.bfloat16)
        return kind, y.view(torch.int16).numpy().tobytes(), y.float().numpy()
    return "F32", x.tobytes(), x


def interleaved(x, heads):
    return np.ascontiguousarray(x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape))


def converted(model, kind):
    """Return the tensors of a model by llama.cpp's names, (type, shape, bytes); the model gets what these stand for."""
    config, found = model.config, {}
    counts = {"attn_q": config.heads, "attn_k": config.kv_heads}
    sizes = {"attn_q": config.heads, "attn_k": config.kv_heads, "attn_v": config.kv_heads}
    tops = {"embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    for name, value in model.state_dict().items():
        array = value.numpy()
        if name in tops:
            names, parts, end = [tops[name]], [array], ""
        else:
            _, layer, path = name.split(".", 2)
            path, _, end = path.rpartition(".")
            names = [f"blk.{layer}.{each}.{end}" for each in LAYER[path]]
            rows = [sizes[each] * config.head_size for each in LAYER[path] if each in sizes] or [
                len(array) // len(names)
            ]
            parts = np.split(array, np.cumsum(rows)[: len(names) - 1])
        back = []
        for each, part in zip(names, parts, strict=True):
            heads = 0 if config.qkv_bias or config.qk_norm else counts.get(each.split(".")[-2], 0)
            type_, data, stands = encoded(interleaved(part, heads) if heads else np.ascontiguousarray(part), kind)
            found[each] = (type_, part.shape, data)
            if heads:
                stands = stands.reshape(heads, -1, 2, *part.shape[1:]).swapaxes(1, 2).reshape(part.shape)
            back.append(stands)
        value.copy_(torch.from_numpy(np.concatenate(back)))
    if config.rope_scaling is not None:
        plain = config.rope_base ** (-torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size)
        factors = (plain / config.rope_scaling.apply(plain)).float().numpy()
        found["rope_freqs.weight"] = ("F32", factors.shape, factors.tobytes())
    return found


def metadata(config, architecture):
    values = {
        "general.architecture": architecture, "block_count": config.layers, "context_length": config.context,
        "embedding_length": config.width, "feed_forward_length": config.hidden, "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads, "attention.layer_norm_rms_epsilon": config.eps,
        "attention.key_length": config.head_size, "rope.freq_base": config.rope_base,
        "tokenizer.chat_template": TEMPLATE, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.tokens": ["a", "b"],
    }  # fmt: skip
    if config.window is not None:
        values["attention.sliding_window"] = config.window
    whole = ("general", "tokenizer")
    return {name if name.startswith(whole) else f"{architecture}.{name}": value for name, value in values.items()}


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def file_of(values, tensors):
    """Return a GGUF file."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    for name, value in values.items():
        out += text(name)
        if isinstance(value, str):
            out += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            out += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        else:
            out += struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
    data = b""
    for name, (kind, shape, content) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        out += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in shape[::-1])
        out += struct.pack("<IQ", TYPES.get(kind, kind), len(data))
        data += content
    return out + b"\0" * (-len(out) % 32) + data


def architecture_of(model):
    return "qwen2" if model.config.qkv_bias else "qwen3" if model.config.qk_norm else "llama"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return tmp_path / "model.gguf"


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model(family, kind, path):
    model = drawn(family)
    tensors = converted(model, kind)
    path.write_bytes(file_of(metadata(model.config, architecture_of(model)), tensors))
    found, tokenizer = load_model(path, dtype="float32")
    assert found.config.rope_scaling == model.config.rope_scaling
    idx = torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found(idx), model(idx), rtol=0, atol=1e-3)  # eps and base are float32 in the file
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.chat_text([{"role": "user", "content": "hi"}]) == "hi"
    quantized, _ = load_model(path, dtype="float32", quantize="int8")
    assert (quantized(idx) - model(idx)).abs().max() < 0.2 * model(idx).abs().max()


def test_files_of_the_package_gguf(path):
    gguf = pytest.importorskip("gguf")
    model = drawn("llama")
    writer = gguf.GGUFWriter(str(path), "llama")
    values = metadata(model.config, "llama")
    for name, value in values.items():
        if isinstance(value, (int, float)):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    for name, (kind, shape, data) in converted(model, "F32").items():
        array = np.frombuffer(data, np.float32).reshape(shape)
        if len(shape) == 2 and kind == "F32":
            blocks = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, _ = load_model(path)
    idx = torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(1))
    assert (found(idx) - model(idx)).abs().max() < 0.1 * model(idx).abs().max()


# --- headers that are not to be trusted ------------------------------------------------------------------------------
@pytest.fixture
def good():
    model = drawn("llama")
    return metadata(model.config, "llama"), converted(model, "Q8_0")


def test_what_is_not_supported_is_named(good, path):
    values, tensors = good
    name = "blk.0.ffn_up.weight"
    cases = [
        ({}, {name: (12, tensors[name][1], tensors[name][2])}, "'blk.0.ffn_up.weight' is of type Q4_K"),
        ({"general.architecture": "gemma"}, {}, "general.architecture must be one of llama, qwen2, qwen3, got 'gemma'"),
        ({"llama.rope.scaling.type": "yarn"}, {}, "rope.scaling.type must be 'none', got 'yarn'"),
        ({"llama.expert_count": 8}, {}, "llama.expert_count must be 0, got 8"),
        ({"llama.rope.dimension_count": 8}, {}, "llama.rope.dimension_count must be 16, got 8"),
        ({}, {"rope_freqs.weight": ("F32", (8,), np.arange(8, dtype=np.float32).tobytes())}, "not the factors"),
    ]
    for more, others, words in cases:
        path.write_bytes(file_of(values | more, tensors | others))
        assert_raises(UnsupportedCase, words, load_model, path)


def test_what_is_missing_is_named(good, path):
    values, tensors = good
    assert_raises(MissingFile, r"model\.gguf", load_model, path)
    whole = file_of(values, tensors)
    for content, words in ((whole[:-1], "would be at"), (b"", "ends within its header"), (whole[:50], "ends within")):
        path.write_bytes(content)
        assert_raises(FormatError, words, load_model, path)
    path.write_bytes(file_of(values, {name: each for name, each in tensors.items() if name != "blk.1.attn_v.weight"}))
    assert_raises(FormatError, r"lacks 'layers\.1\.self_attn\.v_proj\.weight'", load_model, path)
    path.write_bytes(file_of(values, tensors | {"blk.0.more.weight": tensors["blk.0.attn_norm.weight"]}))
    assert_raises(FormatError, r"blk\.0\.more\.weight", load_model, path)
    path.write_bytes(whole)
    (path.parent / "tokenizer.json").unlink()
    assert_raises(FormatError, r"tokenizer\.json", load_model, path)


def test_changed_bytes_end_in_an_error_or_a_model(good, path, rng):
    """Of the header, each time some bytes: nothing but our errors, quickly, and no memory for sizes that are lies."""
    whole = file_of(*good)
    header = whole.index(b"blk.1.ffn_down.weight") + 60
    outcomes = {"read": 0, "refused": 0}
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 8])):
            at = rng.randrange(header)
            kind = rng.random()
            if kind < 0.4:
                changed[at] = rng.randrange(256)
            elif kind < 0.8:
                changed[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]))
            else:
                del changed[at : at + rng.randrange(1, 40)]
        path.write_bytes(changed)
        try:
            load_model(path)
            outcomes["read"] += 1
        except (FormatError, UnsupportedCase, ConfigError):
            outcomes["refused"] += 1
    assert outcomes["read"] > 5
    assert outcomes["refused"] > 100


def test_the_header_alone_is_read(good, path):
    """Tensors are looked at when they are read: a file larger than memory opens."""
    values, tensors = good
    path.write_bytes(file_of(values, tensors))
    file = GGUFFile(path)
    assert file.tensors["layers.0.mlp.up_proj.weight"].shape == (96, 64)
    assert {each.type for each in file.tensors.values()} == {"F32", "Q8_0"}
