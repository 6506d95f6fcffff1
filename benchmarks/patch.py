"""Hugging Face models before and after accelerant.nn.patch: a training step, its time and its memory.

Each model is its usual shape with random weights, in bfloat16, without dropout (so that all runners compute the same).
The runners are the model as it is ("eager"), patched ("accelerant"), under torch.compile ("compile") and with Liger's
kernels ("liger", where it has the model). Each starts from the same weights and the same batch, and its loss and the
norm of its gradients are compared with eager's before anything is timed.

torch.compile takes most of a minute for a whole model, and as long again for each. So it may be measured on models of
fewer layers, beside the other runners on the same: `compile_layers`.

On a CPU the shapes are tiny: the suite then only shows that it runs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accelerant.bench.journal import Journal
from accelerant.bench.pieces import Piece, measure_pieces
from accelerant.bench.record import Environment, Record, Row
from accelerant.bench.timer import Timing, synchronize
from accelerant.errors import AccelerantError, ConfigError, MissingDependency, UnsupportedCase
from accelerant.nn import patch
from accelerant.runtime.provider import ComputeDevice

__all__ = ["MODELS", "RUNNERS", "check_names", "measure", "run"]

RUNNERS = ("eager", "accelerant", "compile", "liger")
"""In the order in which they run: Liger changes transformers' modules, which are put back afterwards."""

_TARGETS_OF, _OVER_EAGER, _OVER_PEERS = "H200", 1.2, 1.0
"""The device that has aims, and how many times eager's and the fastest peer's speed is asked there."""

_SAMPLE_S, _LEAST, _MOST = 0.2, 3, 50
"""Seconds of steps between two waits for the device, and how many such samples at least and at most."""

_LOSS_TOLERANCE, _NORM_TOLERANCE = 5e-3, 3e-2
"""Relative, of bfloat16: of the loss, and of the norm of all gradients."""


@dataclass(frozen=True, slots=True)
class Model:
    """A shape.

    Attributes:
        family: transformers' model type.
        kind: the class's name in transformers.
        config: arguments of its config.
        batch, tokens: of a step; a picture counts as its patches.
        aims: whether there is a speed to reach.
        tiny: what the config gets instead on a CPU.
        depth: what the config calls its number of layers.
    """

    family: str
    kind: str
    config: dict[str, Any]
    batch: int
    tokens: int
    aims: bool = False
    tiny: dict[str, Any] | None = None
    depth: str = "num_hidden_layers"

    def with_layers(self, layers: int) -> Model:
        """Of another depth."""
        depth = {self.depth: layers}
        return replace(self, config=self.config | depth, tiny=(self.tiny or {}) | depth)


_TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_TINY_GPT2 = {"vocab_size": 512, "n_embd": 64, "n_layer": 1, "n_head": 4}
_TINY_VIT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "image_size": 32, "num_labels": 10}


def _decoder(vocab: int, width: int, inner: int, layers: int, heads: int, shared: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": shared, "max_position_embeddings": 4096, **more,
    }  # fmt: skip


MODELS: dict[str, Model] = {
    "gpt2": Model(
        "gpt2", "GPT2LMHeadModel", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, 16, 1024, True,
        _TINY_GPT2, "n_layer",
    ),
    "llama-1b": Model(
        "llama", "LlamaForCausalLM", _decoder(128256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True), 4, 2048, True,
        _TINY,
    ),
    "qwen2-0.5b": Model(
        "qwen2", "Qwen2ForCausalLM", _decoder(151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True), 4, 2048, True,
        _TINY,
    ),
    "qwen3-0.6b": Model(
        "qwen3", "Qwen3ForCausalLM",
        _decoder(151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True), 4, 2048, True, _TINY,
    ),
    "mistral-7b-8": Model(
        "mistral", "MistralForCausalLM", _decoder(32768, 4096, 14336, 8, 32, 8, sliding_window=None), 4, 2048,
        False, _TINY,
    ),  # 8 layers of its 32
    "bert-base": Model(
        "bert", "BertForMaskedLM", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, 32, 512, False,
        {name: value for name, value in _TINY.items() if name not in ("num_key_value_heads", "head_dim")},
    ),
    "vit-base": Model("vit", "ViTForImageClassification", {"num_labels": 1000}, 128, 197, False, _TINY_VIT),
}  # fmt: skip
"""What there is to measure."""


def check_names(names: Sequence[str], runners: Sequence[str]) -> None:
    """Refuse a model or a runner that the suite does not have.

    Raises:
        ConfigError: names it and the ones there are.
    """
    for what, given, known in (("model", names, tuple(MODELS)), ("runner", runners, RUNNERS)):
        for name in given:
            if name not in known:
                raise ConfigError(f"no {what} {name!r} in this suite; it has {', '.join(known)}")


def run(device: ComputeDevice, **options: Any) -> Record:
    """A record of its own; see measure."""
    record = Record(Environment.of(device))
    measure(record, device, **options)
    record.conclude()
    return record


def measure(
    record: Record,
    device: ComputeDevice,
    *,
    names: Sequence[str] = (),
    runners: Sequence[str] = RUNNERS,
    compile_layers: int = 0,
    budget_s: float = 0.5,
    journal: Journal | None = None,
    until: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure into a record.

    Args:
        record: gets rows.
        device: where.
        names: of MODELS; all by default.
        runners: of RUNNERS. "eager" always runs: the others are compared with it.
        compile_layers: 0 to compile whole models. Else torch.compile runs on models of so many layers, and so do the
            other runners once more.
        budget_s: seconds for each figure.
        journal: gets a model's rows as soon as they are there; the models that it has are left out.
        until: the time of time.monotonic() after which no further model is begun.
        progress: told what is measured next.

    Raises:
        ConfigError: a model or runner that there is not.
        MissingDependency: transformers is not installed.
        AccelerantError: a patched model computes something else.
    """
    check_names(names, runners)
    try:
        importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise MissingDependency("transformers", "huggingface", "accelerant bench patch") from None
    where, aims = torch.device(device.torch_device), _TARGETS_OF in device.name
    whole = ("eager", *(each for each in runners if each != "eager" and (each != "compile" or not compile_layers)))
    shapes = [(name, MODELS[name], whole) for name in names or MODELS]
    if compile_layers and "compile" in runners:
        every = ("eager", *(each for each in runners if each != "eager"))
        layers = f"with {compile_layers} layer{'s' if compile_layers > 1 else ''}"
        shapes += [(f"{name} {layers}", MODELS[name].with_layers(compile_layers), every) for name in names or MODELS]
    pieces = [
        Piece(
            "patch",
            f"{title}, {', '.join(asked)}",
            functools.partial(_model, title, model, where, asked, budget_s, aims),
        )
        for title, model, asked in shapes
    ]
    measure_pieces(record, pieces, where=where, journal=journal, until=until, progress=progress)


# --- a model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """What a runner's step gave and took: of forward and backward, and with the optimiser."""

    loss: float
    norm: float
    times: tuple[Timing, ...]
    peaks: tuple[int, ...]


def _model(
    title: str, model: Model, where: torch.device, runners: Sequence[str], budget_s: float, aims: bool, record: Record,
    progress: Callable[[str], None],
) -> None:  # fmt: skip
    """A model's rows."""
    found = _steps(title, model, where, runners, budget_s, progress)
    record.rows += _rows(title, model, where, found, aims)


def _steps(
    title: str, model: Model, where: torch.device, runners: Sequence[str], budget_s: float,
    progress: Callable[[str], None],
) -> dict[str, _Step | str]:  # fmt: skip
    """What each runner did, or why it did nothing."""
    found: dict[str, _Step | str] = {}
    for runner in RUNNERS:
        if runner not in runners:
            continue
        progress(f"{title}: {runner}")
        try:
            found[runner] = _measured(model, runner, where, budget_s)
            _compare(title, runner, found)
        except torch.OutOfMemoryError:
            found[runner] = "out of memory"
        except UnsupportedCase as error:
            if runner == "accelerant":
                raise
            found[runner] = str(error)
        finally:
            _release(where)
    return found


def _measured(model: Model, runner: str, where: torch.device, budget_s: float) -> _Step:
    """A runner's step; when this returns nobody holds its model, which the next one's peak would count."""
    with _ready(model, runner, where, *_sizes(model, where)) as ready:
        return ready.measure(budget_s)


def _sizes(model: Model, where: torch.device) -> tuple[int, int]:
    return (model.batch, model.tokens) if where.type == "cuda" else (2, 16)


def _rows(title: str, model: Model, where: torch.device, found: dict[str, _Step | str], aims: bool) -> list[Row]:
    """Each runner's two rows, and how many times eager's speed the patched model has."""
    batch, tokens = _sizes(model, where)
    case = f"{batch} x {tokens} bfloat16"
    cases = (f"{case} forward, backward", f"{case} forward, backward, AdamW")
    aims = aims and model.aims
    rows: list[Row] = []
    for runner, step in found.items():
        base = Row("patch", title, "", runner, "patched" if runner == "accelerant" else runner)
        if isinstance(step, str):
            rows += [replace(base, case=case, note=step) for case in cases]
            continue
        wanted = _OVER_PEERS if aims and runner == "accelerant" else None
        for case, timing, peak in zip(cases, step.times, step.peaks, strict=True):
            note = (
                f"{batch * tokens / timing.p50_ms * 1e3:,.0f} tokens/s; the peak holds the weights too; first loss "
                f"{step.loss:.5f}, norm of the gradients {step.norm:.5f}"
            )
            rows.append(
                replace(
                    base, case=case, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms, peak_bytes=peak or None,
                    samples=timing.samples, target_x=wanted, note=note,
                )
            )  # fmt: skip
    eager, ours = found.get("eager"), found.get("accelerant")
    if isinstance(eager, _Step) and isinstance(ours, _Step):
        rows += _over_eager(title, cases, eager, ours, aims)
    return rows


def _over_eager(title: str, cases: Sequence[str], eager: _Step, ours: _Step, aims: bool) -> list[Row]:
    rows = []
    for case, old, new in zip(cases, eager.times, ours.times, strict=True):
        gains = (old.p20_ms / new.p80_ms, old.p50_ms / new.p50_ms, old.p80_ms / new.p20_ms)
        note = f"asked: {_OVER_EAGER:.2f} x" if aims else ""
        row = Row("patch", f"{title} over eager", case, "accelerant", "eager / patched", "x", *gains, better="higher")
        rows.append(replace(row, note=note))
    return rows


def _compare(title: str, runner: str, found: dict[str, _Step | str]) -> None:
    """Refuse a runner that computes something else: ours with an error, a peer with a note in its row."""
    step, eager = found[runner], found["eager"]
    if isinstance(step, str) or isinstance(eager, str):
        return
    for what, value, wanted, tolerance in (
        ("loss", step.loss, eager.loss, _LOSS_TOLERANCE),
        ("norm of the gradients", step.norm, eager.norm, _NORM_TOLERANCE),
    ):
        if not abs(value - wanted) <= tolerance * abs(wanted):
            kind = AccelerantError if runner == "accelerant" else UnsupportedCase
            raise kind(f"{title}, {runner}: the {what} is {value:.5g}, eager's {wanted:.5g}")


@dataclass(frozen=True, slots=True)
class _Ready:
    """A runner that has made its first step."""

    loss: float
    norm: float
    calls: tuple[Callable[[], object], ...]
    where: torch.device

    def measure(self, budget_s: float) -> _Step:
        """Time the steps, some back to back as in training, and find each one's peak before the next allocates."""
        times, peaks = zip(
            *((self._paced(call, budget_s), _peak(call, self.where)) for call in self.calls), strict=True
        )
        return _Step(self.loss, self.norm, times, peaks)

    def _paced(self, call: Callable[[], object], budget_s: float) -> Timing:
        """A step's time on the host's clock, where the host queues the next one while the device works."""

        def took(steps: int) -> float:
            synchronize(self.where)
            began = time.perf_counter()
            for _ in range(steps):
                call()
            synchronize(self.where)
            return time.perf_counter() - began

        call()
        steps = max(1, math.ceil(_SAMPLE_S / took(1)))
        samples: list[float] = []
        spent = 0.0
        while len(samples) < _LEAST or (spent < budget_s and len(samples) < _MOST):
            spent += (seconds := took(steps))
            samples.append(seconds / steps * 1e3)
        return Timing.of(samples)


@contextlib.contextmanager
def _ready(model: Model, runner: str, where: torch.device, batch: int, tokens: int) -> Iterator[_Ready]:
    """Build a runner and let it make a step, which compiles whatever there is to compile."""
    with _built(model, runner, where) as (module, call):
        inputs = _inputs(model, module, where, batch, tokens)
        parameters = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.0, fused=True)

        def step() -> Tensor:
            for parameter in parameters:
                parameter.grad = None
            loss: Tensor = call(**inputs)["loss"]
            loss.backward()
            return loss.detach()

        def whole() -> None:
            step()
            optimizer.step()

        try:
            loss = step()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if runner in ("eager", "accelerant"):
                raise
            text = (str(error).splitlines() or [""])[0]
            raise UnsupportedCase(f"{runner} failed: {type(error).__name__}: {text[:120]}") from error
        norms = torch.stack([p.grad.float().norm() for p in parameters if p.grad is not None])
        yield _Ready(float(loss), float(norms.norm()), (step, whole), where)


def _peak(call: Callable[[], object], where: torch.device) -> int:
    """The most memory allocated in a call, weights included, in bytes; 0 where nobody counts."""
    if where.type != "cuda":
        return 0
    torch.cuda.synchronize(where)
    torch.cuda.reset_peak_memory_stats(where)
    call()
    torch.cuda.synchronize(where)
    return torch.cuda.max_memory_allocated(where)


def _release(where: torch.device) -> None:
    """Give back what a runner held, before the next one is measured."""
    gc.collect()
    if where.type == "cuda":
        torch.cuda.empty_cache()


# --- runners ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _built(model: Model, runner: str, where: torch.device) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """A model in training mode, the same weights each time, and what to call; transformers is put back afterwards."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    kind = getattr(transformers, model.kind)
    settings = model.config if where.type == "cuda" else model.config | (model.tiny or {})
    module_of = sys.modules[kind.__module__]
    kept = dict(vars(module_of))
    torch.manual_seed(0)
    with torch.device(where):
        module = kind(kind.config_class(**settings))
    module = module.to(torch.bfloat16).train()
    module.config.use_cache = False
    call: Callable[..., Any] = module
    try:
        if runner == "accelerant":
            patch(module)
        elif runner == "liger":
            _apply_liger(model.family, module)
        elif runner == "compile":
            torch.compiler.reset()
            call = torch.compile(module)
        yield module, call
    finally:
        vars(module_of).update(kept)


def _apply_liger(family: str, module: nn.Module) -> None:
    """Liger's kernels in this model.

    Raises:
        UnsupportedCase: it is absent, does not load, or has no such model.
    """
    try:
        liger = importlib.import_module("liger_kernel.transformers")
    except Exception as error:  # noqa: BLE001 - a library that does not load is as good as absent; the row says why
        raise UnsupportedCase(f"liger-kernel cannot be used here: {type(error).__name__}: {error}") from None
    apply = getattr(liger, f"apply_liger_kernel_to_{family}", None)
    if apply is None:
        raise UnsupportedCase(f"liger-kernel has no {family}")
    apply(model=module)


def _inputs(model: Model, module: nn.Module, where: torch.device, batch: int, tokens: int) -> dict[str, Tensor]:
    config: Any = module.config
    generator = torch.Generator(device="cpu").manual_seed(1)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator).to(where)

    if model.family == "vit":
        size = config.image_size
        pictures = torch.randn(batch, 3, size, size, generator=generator).to(where, torch.bfloat16)
        return {"pixel_values": pictures, "labels": draw(config.num_labels, batch)}
    ids = draw(config.vocab_size, batch, tokens)
    return {"input_ids": ids, "labels": ids}
