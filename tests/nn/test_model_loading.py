"""Models of Llama's kin against transformers', from sharded folders, in floating point and in integers."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch

from accelerant import nn as ann
from accelerant.errors import ConfigError, FormatError, MissingFile, UnsupportedCase
from accelerant.nn import Llama
from accelerant.nn.models.language_model import Cache
from accelerant.nn.models.llama import load_model
from accelerant.nn.serving import Engine, Finished, Sampling
from refusals import assert_raises

transformers = pytest.importorskip("transformers")

FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def drawn(family, seed, tied):
    """Return a small model of transformers with drawn dimensions and weights of which every one matters."""
    draw = random.Random(f"{family} {seed}")
    heads, kv_heads = draw.choice([(1, 1), (2, 1), (4, 2), (4, 4), (6, 2)])
    head = draw.choice([2, 6, 8, 16])
    fields = {
        "vocab_size": draw.randrange(20, 99),
        "hidden_size": heads * head,
        "intermediate_size": draw.randrange(3, 60),
        "num_hidden_layers": draw.randrange(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": draw.randrange(40, 90),
        "rms_norm_eps": draw.choice([1e-6, 1e-3]),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([100.0, 1e4, 1e6])},
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    if draw.random() < 0.5:
        fields["rope_parameters"] |= SCALING | {"original_max_position_embeddings": 16}
    if family in ("qwen3", "mistral"):
        fields["head_dim"] = draw.choice([head, 4])
    if family == "mistral":
        fields["sliding_window"] = draw.choice([None, 1, 5, 16, 200])
    if family.startswith("qwen") and draw.random() < 0.5:
        fields |= {"use_sliding_window": True, "sliding_window": draw.choice([1, 5, 16]), "max_window_layers": 0}
    torch.manual_seed(seed)
    name = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**fields)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def saved(model, folder, size="1kB"):
    model.save_pretrained(folder, max_shard_size=size)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folder


TOKENIZER = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}


def tokens(model, *shape):
    return torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))


# --- floating point --------------------------------------------------------------------------------------------------
@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers(family, tied, dtype, tmp_path):
    for seed in range(3):
        theirs = drawn(family, seed, tied)
        folder = saved(theirs.to(dtype), tmp_path / str(seed))
        assert len(list(folder.glob("*.safetensors"))) > 1
        model, _ = load_model(folder)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        idx = tokens(theirs, 2, 40)
        with torch.no_grad():
            expected = theirs.float()(idx).logits
            error = (model(idx).float() - expected).abs().max()
            limit = 1e-4
            if dtype == torch.bfloat16:  # twice the error of transformers in that dtype
                limit = 2 * (theirs.to(dtype)(idx).logits.float() - expected).abs().max() + 1e-2
            assert error <= limit, (family, seed, float(error), float(limit))


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_step_with_the_cache_is_transformers(family):
    for seed in range(4):
        theirs = drawn(family, seed, tied=True)
        model = Llama.from_pretrained(theirs)
        assert model.can_cache()
        for batch in (1, 3):
            idx = tokens(theirs, batch, 30)
            with torch.no_grad():
                expected = theirs(idx).logits
                cache = Cache.empty(model.cache_shape(), batch, 30, torch.float32, idx.device)
                steps = [model.prefill(idx[:, :9], cache), *(model.decode(idx[:, t], cache) for t in range(9, 30))]
            torch.testing.assert_close(torch.stack(steps, 1), expected[:, 8:], rtol=0, atol=1e-4)


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_computes_transformers_logits(family):
    """Log-probabilities of greedy answers, in chunks and steps over keys in blocks."""
    for seed in range(3):
        theirs = drawn(family, seed, tied=False)
        model = Llama.from_pretrained(theirs)
        prompt = tokens(theirs, 1, 17)[0].tolist()
        with Engine(model, 8, 7, block_size=8) as engine:
            answer = engine.submit(prompt, Sampling(temperature=0), max_tokens=20, logprobs=0)
            events = [event for event in answer if not isinstance(event, Finished)]
        idx = torch.tensor([prompt + [event.id for event in events]])
        with torch.no_grad():
            expected = theirs(idx).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found = torch.tensor([event.logprob for event in events])
        torch.testing.assert_close(found, expected.amax(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_and_folders_go_both_ways(family, tmp_path):
    for seed in range(2):
        theirs = drawn(family, seed, tied=bool(seed))
        model = Llama.from_pretrained(theirs)
        idx = tokens(theirs, 2, 12)
        model.loss(idx[:, :-1], idx[:, 1:]).backward()
        assert all(
            parameter.grad.abs().max() > 0 for name, parameter in model.named_parameters() if "norm_" not in name
        )
        model.save_pretrained(tmp_path / str(seed))
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(seed), attn_implementation="eager")
        assert type(again) is type(theirs)
        with torch.no_grad():
            torch.testing.assert_close(again(idx).logits, theirs(idx).logits, rtol=0, atol=1e-5)


# --- integers --------------------------------------------------------------------------------------------------------
@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("family", FAMILIES)
def test_integers_are_those_of_quantize(family, tmp_path, monkeypatch):
    from accelerant.nn.models import hugging_face

    for seed, tied in enumerate((False, True)):
        folder = saved(drawn(family, seed, tied), tmp_path / str(seed))
        whole, _ = load_model(folder)
        expected = ann.quantize(whole, skip=()).model
        monkeypatch.setattr(hugging_face, "_PIECE", 100)  # of a few rows each
        model, _ = load_model(folder, quantize="int8")
        idx = tokens(model, 2, 20)
        assert torch.equal(model(idx), expected(idx))
        for name, buffer in expected.named_buffers():
            assert torch.equal(model.get_buffer(name), buffer), name
        assert torch.equal(
            model.generate(idx, 12, temperature=0), model.generate(idx, 12, temperature=0, use_cache=False)
        )


SPARSE = """
import json, sys, threading, time
from pathlib import Path
from accelerant.nn import LlamaConfig, load_model
from accelerant.nn.models.llama import LAYOUTS

folder, layout = Path(sys.argv[1]), LAYOUTS[0]
config = LlamaConfig(vocab_size=32000, layers=11, width=2048, hidden=5504, heads=16, kv_heads=4)
fields = {name: getattr(config, ours) for ours, (name, _) in layout.fields.items()} | layout.more_fields(config)
(folder / "config.json").write_text(json.dumps(fields | {"model_type": "llama"}))
header, end = {}, 0
for part in (part for parts in layout.parts(config).values() for part in parts):
    begin, end = end, end + 2 * part.shape[0] * (part.shape[1] if len(part.shape) > 1 else 1)
    name = part.name if part.name == "lm_head.weight" else "model." + part.name
    header[name] = {"dtype": "BF16", "shape": part.shape, "data_offsets": [begin, end]}
text = json.dumps(header).encode()
with open(folder / "model.safetensors", "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + end)  # zeros, which take no space on the disk

def resident():  # without the file's pages, which the system takes back when it needs them
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    while True:
        peak[0] = max(peak[0], resident())
        time.sleep(0.005)

before = resident()
peak = [before]
threading.Thread(target=watch, daemon=True).start()
model, _ = load_model(folder, quantize="int8")
size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
print(json.dumps({"file": end, "model": size, "peak": peak[0] - before}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_the_peak_of_memory_is_the_quantized_model_and_a_tensor(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "sparse.py").write_text(SPARSE)
    command = [sys.executable, str(tmp_path / "sparse.py"), str(tmp_path)]
    sizes = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    tensor = 2 * 32000 * 2048
    assert sizes["file"] > 1.5 * sizes["model"] > 2**29
    assert sizes["peak"] < sizes["model"] + tensor + 2**27


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_gpu_gets_the_weights_a_few_rows_at_a_time(quantize, tmp_path):
    """Of Qwen3's kind: the logits of the CPU, from a peak of memory that is the model, a matrix and some rows."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 8192, "context": 256, "layers": 6, "heads": 8, "kv_heads": 2, "width": 1024, "hidden": 4096}
    config = ann.LlamaConfig(**sizes, qk_norm=True, rope_scaling=None)
    Llama(config).bfloat16().save_pretrained(tmp_path, max_shard_bytes=2**25)
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model, _ = load_model(tmp_path, device="cuda", quantize=quantize)
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert torch.cuda.max_memory_allocated() - before < size + 2 * 8192 * 1024 + 2**27
    idx = tokens(model, 2, 40)
    host, _ = load_model(tmp_path, dtype="float32", quantize=quantize)
    expected = host(idx)
    error = (model(idx.cuda()).float().cpu() - expected).abs().max()
    assert error < 0.05 * expected.abs().max()
    greedy = model.generate(idx.cuda(), 20, temperature=0)
    assert greedy.shape == (2, 60)  # by the cache, in a graph: biases, norms of heads and windows are read there
    steps = model(greedy[:, :-1]).float()[:, 39:]
    chosen = steps.gather(-1, greedy[:, 40:, None])[..., 0]
    assert (steps.amax(-1) - chosen).max() < 0.05 * steps.abs().max()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no limits of files")
def test_a_full_disk_hinders_no_quantization(tmp_path):
    """Weights are rounded in memory: not a byte is written, and what caches cannot keep is left out."""
    folder = saved(drawn("llama", 0, tied=False), tmp_path)
    program = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from accelerant.nn import load_model
from accelerant.nn.serving import Engine
for quantize in ("int8", "int4"):
    model, _ = load_model({str(folder)!r}, quantize=quantize)
    with Engine(model, 8) as engine:
        print(len(list(engine.submit([1, 2, 3], max_tokens=4))))
"""
    environment = os.environ | {"ACCELERANT_CACHE_DIR": str(tmp_path / "cache")}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert (ran.returncode, ran.stdout.split()) == (0, ["5", "5"]), ran.stderr


def test_another_kind_of_integers_is_refused(tmp_path):
    folder = saved(drawn("llama", 0, tied=True), tmp_path)
    with pytest.raises(ConfigError, match="quantize must be 'int8', 'int4' or None, got 'int3'"):
        load_model(folder, quantize="int3")


# --- what is refused, before weights are read ------------------------------------------------------------------------
@pytest.fixture
def unread(monkeypatch):
    """Make the reading of a weight fail."""
    from accelerant.nn.models import hugging_face

    def read(self, name):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(hugging_face.Tensors, "read", read)


OTHERS = {
    "architecture": ({"model_type": "mixtral"}, "model_type must be 'llama' or .*, got 'mixtral'"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    "biases elsewhere": ({"attention_bias": True}, "attention_bias must be False, got True"),
    "biases of the MLP": ({"mlp_bias": True}, "mlp_bias must be False, got True"),
    "a part rotated": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
    "quantized by others": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config must be None"),
    "a context without end": ({"max_position_embeddings": 10**12}, "max_position_embeddings must be 1 to"),
    "rope": ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default' or 'llama3', got 'yarn'"),
    "a part rotated, of late": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "partial_rotary_factor must be 1.0",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_a_config_asks_for_is_named(kind, tmp_path, unread):
    changes, words = OTHERS[kind]
    for family in FAMILIES:
        folder = saved(drawn(family, 0, tied=False), tmp_path / family)
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | changes))
        assert_raises(UnsupportedCase, words, load_model, folder)


def test_layers_of_several_kinds_are_named(tmp_path, unread):
    model = drawn("qwen2", 0, tied=False)
    folder = saved(model, tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"use_sliding_window": True, "sliding_window": 4, "layer_types": None, "max_window_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 2}))
    assert_raises(UnsupportedCase, "layer_types must be the same attention in every layer", load_model, folder)


def test_files_that_lie_are_named(tmp_path, unread):
    folder = saved(drawn("qwen3", 0, tied=False), tmp_path)
    shards = sorted(folder.glob("*.safetensors"))
    whole = shards[1].read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    name = next(name for name in header if name != "__metadata__")
    lying = [
        whole[:-1], whole[: 8 + size // 2], whole[:4], b"", (2**60).to_bytes(8, "little") + whole[8:],
    ]  # fmt: skip
    for change in ({"shape": [10**9, 10**9]}, {"data_offsets": [0, 10**15]}, {"dtype": "F8_E4M3"}, {"dtype": "I32"}):
        text = json.dumps(header | {name: header[name] | change}).encode()
        lying.append(len(text).to_bytes(8, "little") + text + whole[8 + size :])
    for content in lying:
        shards[1].write_bytes(content)
        assert_raises(FormatError, f"{shards[1].name}|{name}", load_model, folder)
    shards[1].unlink()
    assert_raises(MissingFile, shards[1].name, load_model, folder)
    (folder / "config.json").unlink()
    assert_raises(MissingFile, r"config\.json", load_model, folder)
    assert_raises(ConfigError, "none is not a folder", load_model, folder / "none")
