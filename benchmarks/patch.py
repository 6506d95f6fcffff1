"""Hugging Face models before and after accelerant.nn.patch: the time and the memory of a training step.

    python -m benchmarks.patch --model gpt2 --against compile --against liger

Each model has its usual shape and random weights, in bfloat16, without dropout, so that all runners compute the same.
The runners are the model as it is ("eager"), patched ("accelerant"), under torch.compile ("compile") and with Liger's
kernels ("liger", where it has the model). Each starts from the same weights and the same batch; its loss and the norm
of its gradients are compared with eager's before anything is timed.

torch.compile takes most of a minute for each whole model; `--compile-layers` measures it on models of fewer layers,
with the other runners on the same models. On a CPU the shapes are tiny: the suite then only shows that it runs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from accelerant.bench.record import Row
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, check_names, option
from accelerant.bench.timer import Timing, back_to_back_ms
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, MissingDependency, UnsupportedCase
from accelerant.nn import patch
from accelerant.runtime.provider import ComputeDevice

__all__ = ["MODELS", "PEERS", "ModelShape", "PatchSuite"]

_RUNNERS = ("eager", "accelerant", "compile", "liger")
"""In the order in which they run: Liger changes transformers' modules, which are restored afterwards."""

PEERS = ("compile", "liger")

_OVER_EAGER, _OVER_PEERS = 1.2, 1.0
"""Targets on an H200, as multiples of the speed of eager and of the fastest peer."""

_LOSS_TOLERANCE, _NORM_TOLERANCE = 5e-3, 3e-2
"""Relative, in bfloat16: of the loss, and of the norm of all gradients."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's shape and batch.

    Attributes:
        family: transformers' model type.
        kind: the class's name in transformers.
        config: arguments of its config.
        batch, tokens: batch and length of a step; the patches of an image count as tokens.
        aims: whether there is a target.
        tiny: arguments of the config that a CPU gets in addition.
        depth: the config's name for the number of layers.
    """

    family: str
    kind: str
    config: dict[str, Any]
    batch: int
    tokens: int
    aims: bool = False
    tiny: dict[str, Any] | None = None
    depth: str = "num_hidden_layers"

    def with_layers(self, layers: int) -> ModelShape:
        """Return the model with another number of layers."""
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


MODELS: dict[str, ModelShape] = {
    "gpt2": ModelShape(
        "gpt2", "GPT2LMHeadModel", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, 16, 1024, True,
        _TINY_GPT2, "n_layer",
    ),
    "llama-1b": ModelShape(
        "llama", "LlamaForCausalLM", _decoder(128256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True), 4, 2048, True,
        _TINY,
    ),
    "qwen2-0.5b": ModelShape(
        "qwen2", "Qwen2ForCausalLM", _decoder(151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True), 4, 2048, True,
        _TINY,
    ),
    "qwen3-0.6b": ModelShape(
        "qwen3", "Qwen3ForCausalLM",
        _decoder(151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True), 4, 2048, True, _TINY,
    ),
    "mistral-7b-8": ModelShape(
        "mistral", "MistralForCausalLM", _decoder(32768, 4096, 14336, 8, 32, 8, sliding_window=None), 4, 2048,
        False, _TINY,
    ),  # 8 layers of its 32
    "bert-base": ModelShape(
        "bert", "BertForMaskedLM", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, 32, 512, False,
        {name: value for name, value in _TINY.items() if name not in ("num_key_value_heads", "head_dim")},
    ),
    "vit-base": ModelShape("vit", "ViTForImageClassification", {"num_labels": 1000}, 128, 197, False, _TINY_VIT),
}  # fmt: skip


@dataclass(frozen=True)
class PatchSuite(Suite):
    """Measure a training step of Hugging Face models as they are, patched, compiled and with Liger: time and memory."""

    name = "patch"
    examples = ("", "--model gpt2 --against compile", "--out folder --max-seconds 120", "--out folder --resume")

    model: tuple[str, ...] = option((), f"Only this model of {', '.join(MODELS)}; may be repeated.")
    against: tuple[str, ...] = option(PEERS, "Peers besides eager: compile, liger, or none.", same=True)
    compile_layers: int = option(
        0, "Compile models of N layers, and measure all runners on those too; 0: whole models.", metavar="N", min=0,
        same=True,
    )  # fmt: skip
    budget_s: float = option(0.5, "Seconds of steps behind each figure.", min=0.0, same=True)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite.

        Raises:
            ConfigError: an unknown model or peer.
            MissingDependency: transformers is not installed.
        """
        check_names("--model", "model", self.model, tuple(MODELS))
        check_names("--against", "peer", self.against, PEERS)
        try:
            importlib.import_module("transformers")
        except ModuleNotFoundError:
            raise MissingDependency("transformers", "huggingface", "benchmarks.patch") from None
        return self

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each model, and for each model of fewer layers."""
        names, layers = self.model or tuple(MODELS), self.compile_layers
        every = ("eager", "accelerant", *self.against)
        whole = tuple(runner for runner in every if runner != "compile" or not layers)
        shapes = [(name, MODELS[name], whole) for name in names]
        if layers and "compile" in every:
            text = f"with {layers} layer{'s' if layers > 1 else ''}"
            shapes += [(f"{name} {text}", MODELS[name].with_layers(layers), every) for name in names]
        return [
            SuiteCase(f"{title}, {', '.join(runners)}", functools.partial(self._measure, title, model, runners))
            for title, model, runners in shapes
        ]

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of one of the models."""
        return row.suite == self.name and (not self.model or row.op.split()[0] in self.model)

    def _measure(self, title: str, model: ModelShape, runners: Sequence[str], run: SuiteRun) -> None:
        steps = _measure_steps(title, model, runners, self.budget_s, run)
        run.add(*_rows(title, model, steps, run))


# --- a model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StepFigures:
    """A runner's loss and gradient norm, and the times and peaks of forward and backward and with the optimizer."""

    loss: float
    norm: float
    times: tuple[Timing, ...]
    peaks: tuple[int, ...]


def _measure_steps(
    title: str, model: ModelShape, runners: Sequence[str], budget_s: float, run: SuiteRun
) -> dict[str, _StepFigures | str]:
    """Return each runner's figures, or why it has none.

    Raises:
        AccelerantError: a patched model computes something else.
    """
    where = run.torch_device
    steps: dict[str, _StepFigures | str] = {}
    for runner in (runner for runner in _RUNNERS if runner in runners):
        run.progress(f"{title}: {runner}")
        try:
            steps[runner] = _measured(model, runner, where, budget_s)
            _compare(title, runner, steps)
        except torch.OutOfMemoryError:
            steps[runner] = "out of memory"
        except UnsupportedCase as error:
            if runner == "accelerant":
                raise
            steps[runner] = str(error)
        finally:
            gc.collect()
            if run.gpu:
                torch.cuda.empty_cache()
    return steps


def _measured(model: ModelShape, runner: str, where: torch.device, budget_s: float) -> _StepFigures:
    """Measure a runner's step; nothing holds its model on return, which the next one's peak would count."""
    with _warm_step(model, runner, where, *_sizes(model, where)) as ready:
        return ready.measure(budget_s)


def _sizes(model: ModelShape, where: torch.device) -> tuple[int, int]:
    return (model.batch, model.tokens) if where.type == "cuda" else (2, 16)


def _rows(title: str, model: ModelShape, steps: dict[str, _StepFigures | str], run: SuiteRun) -> list[Row]:
    """Return each runner's two rows, and the patched model's speed over eager's."""
    batch, tokens = _sizes(model, run.torch_device)
    case = f"{batch} x {tokens} bfloat16"
    cases = (f"{case} forward, backward", f"{case} forward, backward, AdamW")
    aims = run.is_model("H200") and model.aims
    rows: list[Row] = []
    for runner, step in steps.items():
        base = Row("patch", title, "", runner, "patched" if runner == "accelerant" else runner)
        if isinstance(step, str):
            rows += [replace(base, case=case, note=step) for case in cases]
            continue
        target = _OVER_PEERS if aims and runner == "accelerant" else None
        for case, timing, peak in zip(cases, step.times, step.peaks, strict=True):
            note = (
                f"{batch * tokens / timing.p50_ms * 1e3:,.0f} tokens/s; the peak holds the weights too; first loss "
                f"{step.loss:.5f}, norm of the gradients {step.norm:.5f}"
            )
            rows.append(replace(base.timed(timing), case=case, peak_bytes=peak or None, target_x=target, note=note))
    eager, ours = steps.get("eager"), steps.get("accelerant")
    if isinstance(eager, _StepFigures) and isinstance(ours, _StepFigures):
        note = f"asked: {_OVER_EAGER:.2f} x" if aims else ""
        for case, old, new in zip(cases, eager.times, ours.times, strict=True):
            row = Row(
                "patch", f"{title} over eager", case, "accelerant", "eager / patched", "x", better="higher", note=note
            )
            rows.append(row.timed(old.over(new)))
    return rows


def _compare(title: str, runner: str, steps: dict[str, _StepFigures | str]) -> None:
    """Raise for other results than eager's: AccelerantError for ours, UnsupportedCase for a peer."""
    step, eager = steps[runner], steps["eager"]
    if isinstance(step, str) or isinstance(eager, str):
        return
    for name, value, expected, tolerance in (
        ("loss", step.loss, eager.loss, _LOSS_TOLERANCE),
        ("norm of the gradients", step.norm, eager.norm, _NORM_TOLERANCE),
    ):
        if not abs(value - expected) <= tolerance * abs(expected):
            kind = AccelerantError if runner == "accelerant" else UnsupportedCase
            raise kind(f"{title}, {runner}: the {name} is {value:.5g}, eager's {expected:.5g}")


@dataclass(frozen=True, slots=True)
class _WarmStep:
    """A runner after its first step: the calls of forward and backward, and with the optimizer."""

    loss: float
    norm: float
    calls: tuple[Callable[[], object], ...]
    where: torch.device

    def measure(self, budget_s: float) -> _StepFigures:
        """Measure the calls' times, several back to back as in training, and their peaks."""
        times = tuple(back_to_back_ms(call, self.where, budget_s=budget_s) for call in self.calls)
        return _StepFigures(self.loss, self.norm, times, tuple(_peak(call, self.where) for call in self.calls))


@contextlib.contextmanager
def _warm_step(model: ModelShape, runner: str, where: torch.device, batch: int, tokens: int) -> Iterator[_WarmStep]:
    """Build a runner and make a step, which compiles."""
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
        yield _WarmStep(float(loss), float(norms.norm()), (step, whole), where)


def _peak(call: Callable[[], object], where: torch.device) -> int:
    """Return the peak bytes of a call, weights included; 0 on a CPU."""
    if where.type != "cuda":
        return 0
    torch.cuda.synchronize(where)
    torch.cuda.reset_peak_memory_stats(where)
    call()
    torch.cuda.synchronize(where)
    return torch.cuda.max_memory_allocated(where)


# --- runners ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _built(model: ModelShape, runner: str, where: torch.device) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yield a model in training mode, with the same weights each time, and its function; then restore transformers."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    kind = getattr(transformers, model.kind)
    settings = model.config if where.type == "cuda" else model.config | (model.tiny or {})
    module_of = sys.modules[kind.__module__]
    before = dict(vars(module_of))
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
        vars(module_of).update(before)


def _apply_liger(family: str, module: nn.Module) -> None:
    """Apply Liger's kernels to a model; raises UnsupportedCase where it is absent or has no such model."""
    try:
        liger = importlib.import_module("liger_kernel.transformers")
    except Exception as error:  # noqa: BLE001 - a library that does not load counts as absent; the row says why
        raise UnsupportedCase(f"liger-kernel cannot be used here: {type(error).__name__}: {error}") from None
    apply = getattr(liger, f"apply_liger_kernel_to_{family}", None)
    if apply is None:
        raise UnsupportedCase(f"liger-kernel has no {family}")
    apply(model=module)


def _inputs(model: ModelShape, module: nn.Module, where: torch.device, batch: int, tokens: int) -> dict[str, Tensor]:
    config: Any = module.config
    generator = torch.Generator(device="cpu").manual_seed(1)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator).to(where)

    if model.family == "vit":
        size = config.image_size
        images = torch.randn(batch, 3, size, size, generator=generator).to(where, torch.bfloat16)
        return {"pixel_values": images, "labels": draw(config.num_labels, batch)}
    ids = draw(config.vocab_size, batch, tokens)
    return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    run_command(PatchSuite)
