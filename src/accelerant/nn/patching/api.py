"""The functions patch and unpatch; transformers is optional, and used only for a model that contains one of its own."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import Counter
from typing import Any

from torch import nn

from accelerant.errors import ConfigError
from accelerant.nn.patching import optimizer, plain
from accelerant.nn.patching.forms import Options, Replacement
from accelerant.nn.patching.record import RECORD, Changed, LeftAlone, PatchRecord, PatchReport

_PADDING = ("exact", "skip")

_REPLICATE = "_replicate_for_data_parallel"
"""The method that nn.DataParallel calls to copy a module: the copy's forward would be bound to the original."""

_WARNED: set[str] = set()  # notes on the version of transformers that this process was warned with


def patch(
    model: nn.Module, *, loss: bool = True, padding: str = "exact", embedding: bool = True,
    graph: bool | None = None,
) -> PatchReport:  # fmt: skip
    """Put a model onto Accelerant's ops, in place: one of Hugging Face, of torch.nn's layers, or both.

    In a model of transformers it replaces attention (through transformers' AttentionInterface), norms with the residual
    sum before them, activations, MLPs, rotary embeddings, token embeddings and the loss, wherever modules have a known
    form: the statements of their forward are those that a replacement was written for. Outside of one it replaces
    layers of exactly torch.nn's classes: LayerNorm, RMSNorm, Softmax, LogSoftmax, GELU, SiLU, Embedding, Dropout, a
    Linear followed by a GELU in a Sequential, MultiheadAttention, TransformerEncoderLayer, TransformerDecoderLayer,
    and the losses CrossEntropyLoss, MSELoss, L1Loss, BCELoss and BCEWithLogitsLoss.

    On an NVIDIA GPU the first calls run as the model was while child processes compile missing kernels. Compilation
    starts after 63 calls or 10 s, or at once if the kernels of such a model have all been compiled before.

    Methods are replaced on the modules of this model, not on classes. Parameters, buffers and the keys of the
    state_dict stay. A module is left alone, as the report says, if its forward has another form or was replaced, or if
    it has adapters; one of torch.nn's also if it is a subclass, or has hooks or parametrizations. Warns if no module
    changed, and once of a version of transformers that is not among those whose forms are known (5.17 to 5.24).

    Args:
        model: any module (before DDP, fully_shard and torch.compile). A patched model is not changed again, whatever
            the options.
        loss: in training with labels, compute a language model's loss without materializing its logits; reading
            output.logits computes them. False: always compute all logits, and leave torch.nn's losses.
        padding: "exact" or "skip", without effect: results with padding equal the unpatched model's at all positions.
        embedding: whether to replace token and position embeddings.
        graph: whether calls run from CUDA graphs: the forward pass as one, in training the backward pass as another,
            captured after three eager calls that differ at most in their length. None: where that makes steps faster,
            for modules of torch, transformers and peft, within a quarter of the free memory. True: always, with a
            warning for calls that cannot be captured. Other calls run eagerly; the report counts them by reason. The
            page on Hugging Face models lists what else differs.

    Returns:
        a report of all modules that changed or were left alone, with reasons; it counts attention fallbacks later on.

    Raises:
        ConfigError: model is no module, or is compiled; an invalid value of padding; a transformers that is too old.

    Each kind of call (training or evaluation, dtype, size) runs on our ops or as the model was, whichever is faster in
    its first calls, up to 18 without CUDA graphs; the report says which. On a CPU a model of transformers has only its
    loss on our ops, where that is faster. Nothing is measured, and all runs on our ops, with graph=True and with the
    settings `deterministic` and `race = "off"`.

    On a GPU a torch.optim.Adam or AdamW of patched parameters alone takes torch's fused kernels, unless it was given
    `foreach`, `fused`, `capturable` or `differentiable`. Outputs and gradients equal the unpatched model's within the
    tolerance of the dtype, but for the random numbers of torch.nn's Dropout. A model without one of transformers can be
    pickled. The config of a transformers model then names "accelerant" as its attention; other models that share the
    config compute what they did before.
    """
    if padding not in _PADDING:
        raise ConfigError(f"padding must be 'exact' or 'skip', got {padding!r}")
    record: PatchRecord | None = getattr(model, RECORD, None)
    if record is not None:
        return record.report
    if not isinstance(model, nn.Module):
        raise ConfigError(f"patch takes a torch.nn.Module, got {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise ConfigError("patch the model before torch.compile: a compiled model does not change any more")
    PreTrainedModel, rules = _transformers_of(model)
    record = PatchRecord(PatchReport(type(model).__name__), plain=rules is None)
    planned = _plans(model, record.report, Options(loss, embedding), PreTrainedModel, rules)
    if rules is not None:
        if (note := rules.version_note()) is not None:
            record.report.notes.append(note)
            _warn_once(note)
        importlib.import_module("accelerant.nn.patching.attention").register()
    if not record.report.changed:
        warnings.warn(_why_nothing(record.report), UserWarning, stacklevel=2)
    for module, plan in planned:
        record.apply(module, plan)
    if graph is not False:
        _add_graphs(model, record, automatic=graph is None)
    if record.graphs is not None or record.report.changed:
        _add_choice(model, record, fixed=graph is True)
        optimizer.add(model)
    model.__dict__[RECORD] = record
    model.__dict__[_REPLICATE] = _refuse_replica
    return record.report


def _warn_once(note: str) -> None:
    if note not in _WARNED:
        _WARNED.add(note)
        warnings.warn(f"accelerant.nn.patch: {note}", UserWarning, stacklevel=3)


def unpatch(model: nn.Module) -> None:
    """Undo patch: the model computes bit for bit what it did before. An unpatched model is not changed.

    Raises:
        ConfigError: another library has replaced a patched forward since; nothing was changed.
    """
    record: PatchRecord | None = getattr(model, RECORD, None)
    if record is None:
        return
    record.check()
    record.undo()
    optimizer.discard(model)
    owner = next(each for each in model.modules() if each.__dict__.get(RECORD) is record)  # a wrapper hands it on
    del owner.__dict__[RECORD], owner.__dict__[_REPLICATE]


def _plans(
    model: nn.Module, report: PatchReport, options: Options, PreTrainedModel: Any, rules: Any
) -> list[tuple[nn.Module, Replacement]]:  # fmt: skip
    """Return the modules to change with their plans, and report them and the others; nothing is changed yet."""
    planned = []
    models: dict[str, Any] = {}  # by the path of a module: the innermost transformers model that contains it
    for name, module in model.named_modules():
        models[name] = module if isinstance(module, PreTrainedModel) else models.get(name.rpartition(".")[0])
        kind, inside = type(module).__name__, models[name]
        plan: Replacement | str | None
        plan = plain.plan_module(module, options) if inside is None else rules.plan_module(module, inside, options)
        if isinstance(plan, str):
            report.left.append(LeftAlone(name, kind, plan))
        elif plan is not None:
            report.changed += [Changed(name, kind, *change) for change in plan.changes]
            report.notes += [note for note in plan.notes if note not in report.notes]
            planned.append((module, plan))
    return planned


def _add_graphs(model: nn.Module, record: PatchRecord, *, automatic: bool) -> None:
    """Let training calls of a model run from CUDA graphs: if `automatic`, where they can be of use."""
    graphs = importlib.import_module("accelerant.nn.patching.graphs")
    if automatic and not graphs.may_capture():
        return
    if automatic and (unknown := graphs.unknown_code(model)) is not None:
        record.report.notes.append(
            f"no CUDA graphs by default: {unknown} may do more than its operations (graph=True captures it)"
        )
        return
    forward, decoding = _forward_of(model, record), None
    if not record.plain:
        generation = importlib.import_module("accelerant.nn.patching.generation")
        decoding = generation.Decoding(forward, record.report)
    record.graphs = graphs.Graphs(forward, record.report, automatic, decoding=decoding)


def _add_choice(model: nn.Module, record: PatchRecord, *, fixed: bool) -> None:
    """Let a model run on our ops or as it was, whichever is faster for each kind of call; if `fixed`, on our ops."""
    choice = importlib.import_module("accelerant.nn.patching.choice")
    record.choice = choice.Choice(_forward_of(model, record), fixed)
    record.forwards = [pair for pair in record.forwards if pair[0] is not model]
    record.replace_forward(model, choice.chosen_forward)


def _forward_of(model: nn.Module, record: PatchRecord) -> Any:
    """Return the function that is a patched model's forward, replaced or not."""
    return next((forward for module, forward in record.forwards if module is model), type(model).forward)


def _why_nothing(report: PatchReport) -> str:
    """Return the sentence that names the model's class and the most frequent reason."""
    reasons = Counter(each.reason for each in report.left if each.module not in ("Linear", "Dropout", "Identity"))
    why = f": {reasons.most_common(1)[0][0]}" if reasons else ""
    return f"accelerant.nn.patch changed nothing in {report.model}{why}"


def _transformers_of(model: nn.Module) -> tuple[Any, Any]:
    """Return transformers' PreTrainedModel and our module of rules for it; ((), None) if the model contains none."""
    kind: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())  # none without a model
    if not any(isinstance(module, kind) for module in model.modules()):
        return (), None
    try:
        rules = importlib.import_module("accelerant.nn.patching.rules")
    except ImportError as error:
        found = getattr(sys.modules.get("transformers"), "__version__", "of an unknown version")
        raise ConfigError(
            f"accelerant.nn.patch needs transformers 5.17 or newer, found {found} ({error}): "
            "pip install --upgrade transformers"
        ) from error
    return kind, rules


def _refuse_replica() -> None:
    raise ConfigError(
        "nn.DataParallel cannot copy a patched model: use DistributedDataParallel (accelerate launch or torchrun; the "
        "Trainer takes DataParallel where one process sees several GPUs)"
    )
