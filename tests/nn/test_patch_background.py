"""A patched model's first steps on a cold cache: libraries run while child processes compile its kernels for sm_90."""

import re
import time
from functools import partial

import pytest
import torch
from patch_models import assert_same, batch, make, outcome

import accelerant as acl
from accelerant.config import override
from accelerant.errors import ConfigError
from accelerant.nn.patching.api import compile_kernels, model_of
from accelerant.runtime.compilation import background, triton
from accelerant.runtime.compilation.cache import KernelCache
from accelerant.runtime.compilation.cuda import compile_cuda, cuda_key
from accelerant.runtime.dispatch import operations
from refusals import assert_raises

TARGET = "sm_90"


class Device:
    """Launches of kernels for sm_90, by key; each is compiled as CudaProvider does before the interpreter runs it."""

    def __init__(self, monkeypatch):
        self.launched, self.compiled_here = {}, []
        interpret = triton.TritonKernel.launch

        def launch(kernel, grid, args, constants, **options):
            source = kernel.source_of(args, constants, **options)
            try:
                self.load(cuda_key(source, TARGET), source)
            except background.NotCompiledError as error:
                if not error.skips:
                    raise
            if not background.is_missing():
                interpret(kernel, grid, args, constants, **options)

        def compile_here(source, target):
            self.compiled_here.append(source.name)
            return compile_cuda(source, target)

        monkeypatch.setattr(triton.TritonKernel, "launch", launch)
        monkeypatch.setattr(background, "compile_cuda", compile_here)

    def load(self, key, source):
        build = partial(background.binary_of, key, source, TARGET)
        KernelCache().get_or_build(key, build, name=source.name, target=TARGET)
        self.launched[key] = source.name


@pytest.fixture
def device(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    with override(cache_dir=tmp_path):
        for operation in operations().values():
            operation.forget()
        yield Device(monkeypatch)
    for operation in operations().values():
        operation.forget()


def as_in_a_new_process(monkeypatch):
    """Start afresh, with neither plans nor children."""
    if background._compilers is not None:
        background._compilers.close()
    monkeypatch.setattr(background, "_compilers", None)
    for operation in operations().values():
        operation.forget()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.soak)])
def test_nothing_waits_for_a_compiler(family, device, monkeypatch):
    as_in_a_new_process(monkeypatch)
    model, inputs = make(family), batch(family)
    before = outcome(model, inputs)
    acl.nn.patch(model)
    background.start()
    try:
        assert_same(outcome(model, inputs), before, rtol=1e-4, atol=1e-5)
        assert not device.launched
        assert background.misses()
        asked = set(background._compilers._waiting)
        wait_until_ready()
        assert_same(outcome(model, inputs), before, rtol=1e-4, atol=1e-5)
        assert device.launched.keys() == asked, "one step asks for all that the next ones launch"
        assert len(asked) > 10

        as_in_a_new_process(monkeypatch)
        background.start()
        device.launched.clear()
        assert_same(outcome(model, inputs), before, rtol=1e-4, atol=1e-5)
        assert device.launched.keys() == asked
        assert (background.misses(), background._compilers._children) == (0, [])
        assert not device.compiled_here
    finally:
        as_in_a_new_process(monkeypatch)


def wait_until_ready():
    end = time.monotonic() + 300
    while not background.is_ready():
        assert time.monotonic() < end, "not within five minutes"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_kernels_of_a_model_are_compiled_ahead(device, monkeypatch, tmp_path):
    as_in_a_new_process(monkeypatch)
    make("gpt2").config.save_pretrained(tmp_path / "model")
    ahead = model_of(str(tmp_path / "model"), torch.device("cpu"))
    progress = []
    try:
        compiled = compile_kernels(ahead, 2, 16, torch.bfloat16, progress.append)
        assert set(compiled) >= {"attention_bwd_q", "norm_bwd", "embedding_fwd"}
        assert len(compiled) == len(KernelCache().entries())
        assert re.fullmatch(r"compiled: \d+ of \d+ kernels", progress[-1])
        assert not device.compiled_here

        as_in_a_new_process(monkeypatch)
        model = make("gpt2")
        acl.nn.patch(model)
        background.start()
        ids = batch("gpt2", 2, 16)["input_ids"]
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=ids, labels=ids).loss.backward()
        assert background.misses() == 0
    finally:
        as_in_a_new_process(monkeypatch)


def test_a_model_to_compile_for_is_a_folder_or_a_type():
    assert type(model_of("gpt2", torch.device("meta"))).__name__ == "GPT2LMHeadModel"
    assert type(model_of("t5", torch.device("meta"))).__name__ == "T5ForConditionalGeneration"
    assert type(model_of("bert", torch.device("meta"))).__name__ == "BertForMaskedLM"
    assert_raises(ConfigError, "--model vit: ViTConfig has no language model", model_of, "vit", torch.device("meta"))
    assert_raises(ConfigError, r"--model \./nowhere: ", model_of, "./nowhere", torch.device("meta"))
