"""The functions patch and unpatch, and compilation of a Hugging Face model's kernels ahead of its process.

transformers is optional, and used only for a model that contains one of its own.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from accelerant.config import override
from accelerant.errors import CompileError, ConfigError, MissingDependency
from accelerant.nn.patching import plain
from accelerant.nn.patching.forms import Options, Replacement
from accelerant.nn.patching.record import RECORD, Changed, LeftAlone, PatchRecord, PatchReport
from accelerant.runtime.compilation import background

_USUAL_STEP = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}

_with_fused_steps: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_seen_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_step_hook: Any = None  # torch's handle, while there are patched models

_PADDING = ("exact", "skip")
_POLL_S = 0.05
_LANGUAGE_MODELS = ("MaskedLM", "CausalLM", "Seq2SeqLM")

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
    loss on our ops, where that is large and faster, and other models only calls of 0.1 s or more. Nothing is measured,
    and all runs on our ops, with graph=True and with the settings `deterministic` and `race = "off"`.

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
        _fuse_steps(model)
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
    owner = next(each for each in model.modules() if each.__dict__.get(RECORD) is record)  # a wrapper hands it on
    _leave_steps(owner)
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


def _fuse_steps(model: nn.Module) -> None:
    """Let optimizers of the models' parameters alone take torch's fused kernels, from their first step on.

    torch's usual step takes a kernel for each of its parts, as much time as the replays of a small model.
    """
    global _step_hook
    _with_fused_steps.add(model)
    _step_hook = _step_hook or register_optimizer_step_pre_hook(_before_step)


def _leave_steps(model: nn.Module) -> None:
    """Leave the optimizers of a model alone that have not made a step yet."""
    global _step_hook
    _with_fused_steps.discard(model)
    if not _with_fused_steps and _step_hook is not None:
        _step_hook.remove()
        _step_hook = None


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _seen_optimizers or torch.compiler.is_compiling():
        return
    _seen_optimizers.add(optimizer)
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not optimizer.state:
        ours = {id(param) for model in _with_fused_steps for param in model.parameters()}
        for group in optimizer.param_groups:
            usual = _USUAL_STEP.items() <= group.items() and not isinstance(group["lr"], Tensor)
            if usual and all(id(x) in ours and _is_plain(x) for x in group["params"]):
                group["fused"] = True


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.is_cuda and x.is_floating_point()


def model_of(name: str, device: torch.device) -> nn.Module:
    """Return a model of transformers with random weights: of a folder's config.json, or of a type's default config."""
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency("transformers", "huggingface", "--model") from error
    try:
        folder = Path(name).is_dir()
        config = transformers.AutoConfig.from_pretrained(name) if folder else transformers.AutoConfig.for_model(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {name}: {error}") from error
    kinds: list[Any] = [getattr(transformers, each, None) for each in getattr(config, "architectures", None) or ()]
    mappings = (getattr(transformers, f"AutoModelFor{each}")._model_mapping for each in _LANGUAGE_MODELS)
    kinds += [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    for kind in filter(None, kinds):
        if {"input_ids", "labels"} <= inspect.signature(kind.forward).parameters.keys():
            with device:
                model: nn.Module = kind._from_config(config)
            return model.train()
    raise ConfigError(f"--model {name}: {type(config).__name__} has no language model that takes input_ids and labels")


def compile_kernels(
    model: nn.Module, batch: int, tokens: int, low: torch.dtype | None, progress: Callable[[str], None] = lambda _: None
) -> list[str]:  # fmt: skip
    """Patch a language model and compile the kernels of its training step and of its evaluation on its device.

    `low` is the dtype of autocast, None for none. Returns the names of the kernels that were not in the disk cache;
    raises CompileError if the child processes fail.
    """
    patch(model, graph=False)
    background.start()
    before = len(background.asked()[0])
    with override(race="off"):  # calls run on our ops, without a comparison
        for train in (True, False):
            while _misses(model.train(train), torch.zeros(batch, tokens, dtype=torch.long), low):
                while (found := background.asked())[1]:
                    total = len(found[0]) - before
                    progress(f"compiled: {total - found[1]} of {total} kernels")
                    time.sleep(_POLL_S)
                if not background.is_ready():  # which warns of the reason
                    raise CompileError(f"the kernels of {type(model).__name__} are not compiled")
    if next(model.parameters()).is_cuda:
        importlib.import_module("accelerant.nn.patching.choice").remember(model)
    return background.asked()[0][before:]


def _misses(model: nn.Module, ids: torch.Tensor, low: torch.dtype | None) -> int:
    """Run a step, an evaluation if the model is not in training mode; return how many operations lacked kernels."""
    device, before = next(model.parameters()).device, background.misses()
    ids = ids.to(device)
    with torch.autocast(device.type, low, enabled=low is not None), torch.set_grad_enabled(model.training):
        loss = model(input_ids=ids, labels=ids)["loss"]
    if model.training:
        loss.backward()
        model.zero_grad()
    return background.misses() - before
