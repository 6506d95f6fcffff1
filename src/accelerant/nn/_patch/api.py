"""The functions patch and unpatch; transformers is an optional dependency, imported when they are called."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import nn

from accelerant.errors import ConfigError, MissingDependency
from accelerant.nn._patch.record import ATTENTION_NAME, RECORD, Changed, LeftAlone, PatchReport, Record

if TYPE_CHECKING:
    from accelerant.nn._patch.rules import ModulePlan

__all__ = ["patch", "unpatch"]

_PADDING = ("exact", "skip")

_REPLICATE = "_replicate_for_data_parallel"
"""The method that nn.DataParallel calls to copy a module: the copy's forward would be bound to the original."""


def patch(model: nn.Module, *, loss: bool = True, padding: str = "exact", embedding: bool = True) -> PatchReport:
    """Put a Hugging Face model onto Accelerant's ops, in place.

    Replaces attention (through transformers' AttentionInterface), norms with the residual sum before them, activations,
    MLPs, rotary embeddings, token embeddings and the loss, in any model whose modules have a known form: the statements
    of their forward are those that a replacement was written for. Methods are replaced on the modules of this model,
    not on classes. Parameters, buffers and the keys of the state_dict stay. A module is left alone, as the report says,
    if its forward has another form or was replaced, or if it has adapters. Warns if no module changed.

    Args:
        model: a transformers model, or a module that contains one (before DDP, fully_shard and torch.compile). A
            patched model is not changed again, whatever the options.
        loss: in training with labels, compute a language model's loss without materialising its logits; reading
            output.logits computes them. False: always compute all logits.
        padding: "exact": masks with padding go to torch's attention, and results equal the unpatched model's at all
            positions. "skip": they stay on our kernels; tokens do not attend to padding, and results at padded
            positions are undefined (as with FlashAttention in transformers).
        embedding: whether to replace token and position embeddings.

    Returns:
        a report of all modules that changed or were left alone, with reasons; it counts attention fallbacks later on.

    Raises:
        MissingDependency: transformers is not installed.
        ConfigError: model contains no transformers model, or is compiled; an invalid value of padding; a transformers
            that is too old.

    Outputs and gradients equal the unpatched model's within the tolerance of the dtype. The model's config then names
    "accelerant" as its attention; other models that share the config compute what they did before.
    """
    PreTrainedModel, rules = _require_transformers()
    if padding not in _PADDING:
        raise ConfigError(f"padding must be 'exact' or 'skip', got {padding!r}")
    record: Record | None = getattr(model, RECORD, None)
    if record is not None:
        return record.report
    if not isinstance(model, nn.Module) or not any(isinstance(module, PreTrainedModel) for module in model.modules()):
        raise ConfigError(
            f"patch takes a model of transformers, or a module that holds one, got {type(model).__name__}"
        )
    if hasattr(model, "_orig_mod"):
        raise ConfigError("patch the model before torch.compile: a compiled model does not change any more")
    report = PatchReport(type(model).__name__)
    record = Record(report)
    options = rules.Options(loss, embedding)
    planned: list[tuple[nn.Module, ModulePlan]] = []
    models: dict[str, Any] = {}  # by the path of a module: the innermost transformers model that contains it
    for name, module in model.named_modules():
        models[name] = module if isinstance(module, PreTrainedModel) else models.get(name.rpartition(".")[0])
        kind = type(module).__name__
        plan = rules.plan_module(module, models[name], options)
        if isinstance(plan, str):
            report.left.append(LeftAlone(name, kind, plan))
        elif plan is not None:
            report.changed += [Changed(name, kind, *change) for change in plan.changes]
            report.notes += [note for note in plan.notes if note not in report.notes]
            planned.append((module, plan))
    if not report.changed:
        warnings.warn(_why_nothing(report), UserWarning, stacklevel=2)
    rules.register_attention()
    for module, plan in planned:
        mark = record.mark(module, padding)
        mark.attention = mark.attention or plan.attention
        mark.options |= plan.options
        if plan.forward is not None:
            record.replace_forward(module, plan.forward)
        if plan.loss_function is not None:
            record.replace_loss(module, plan.loss_function)
        if plan.attention and not any(module.config is known for known in record.configs):
            config: Any = module.config
            record.configs.append(config)
            config._attn_implementation_internal = ATTENTION_NAME
    model.__dict__[RECORD] = record
    model.__dict__[_REPLICATE] = _refuse_replica
    return report


def unpatch(model: nn.Module) -> None:
    """Undo patch: the model computes bit for bit what it did before. An unpatched model is not changed.

    Raises:
        MissingDependency: transformers is not installed.
        ConfigError: another library has replaced a patched forward since; nothing was changed.
    """
    _require_transformers()
    record: Record | None = getattr(model, RECORD, None)
    if record is None:
        return
    record.check()
    record.undo()
    del model.__dict__[RECORD], model.__dict__[_REPLICATE]


def _why_nothing(report: PatchReport) -> str:
    """Return the sentence that names the model's class and the most frequent reason."""
    reasons = Counter(each.reason for each in report.left if each.module not in ("Linear", "Dropout", "Identity"))
    why = f": {reasons.most_common(1)[0][0]}" if reasons else ""
    return f"accelerant.nn.patch changed nothing in {report.model}{why}"


def _require_transformers() -> tuple[Any, Any]:
    """Return transformers' PreTrainedModel and our module of rules, which needs transformers."""
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingDependency("transformers", "huggingface", "accelerant.nn.patch") from None
    try:
        rules = importlib.import_module("accelerant.nn._patch.rules")
    except ImportError as error:
        found = getattr(transformers, "__version__", "of an unknown version")
        raise ConfigError(
            f"accelerant.nn.patch needs transformers 5.17 or newer, found {found} ({error}): "
            "pip install --upgrade transformers"
        ) from error
    return transformers.PreTrainedModel, rules


def _refuse_replica() -> None:
    raise ConfigError(
        "nn.DataParallel cannot copy a patched model: use DistributedDataParallel (accelerate launch or torchrun; the "
        "Trainer takes DataParallel where one process sees several GPUs)"
    )
