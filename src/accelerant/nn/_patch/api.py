"""patch and unpatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from accelerant.errors import ConfigError
from accelerant.nn._patch.attention import register
from accelerant.nn._patch.known import unknown
from accelerant.nn._patch.report import Changed, LeftAlone, PatchReport
from accelerant.nn._patch.rules import FAMILIES, RULES, Options, Plan, leaf_reason
from accelerant.nn._patch.swaps import MARK, NAME, RECORD, Record

__all__ = ["patch", "unpatch"]

_PADDING = ("exact", "skip")

_REPLICATE = "_replicate_for_data_parallel"
"""What nn.DataParallel calls on each module, to copy it: the copy's forward would be bound to the module itself."""


def patch(model: nn.Module, *, loss: bool, padding: str, embedding: bool) -> PatchReport:
    """See accelerant.nn.patch."""
    from transformers import PreTrainedModel

    if padding not in _PADDING:
        raise ConfigError(f"padding must be 'exact' or 'skip', got {padding!r}")
    record: Record | None = getattr(model, RECORD, None)
    if record is not None:
        return record.report
    if not isinstance(model, nn.Module) or not any(isinstance(each, PreTrainedModel) for each in model.modules()):
        raise ConfigError(
            f"patch takes a model of transformers, or a module that holds one, got {type(model).__name__}"
        )
    if hasattr(model, "_orig_mod"):
        raise ConfigError("patch the model before torch.compile: what is compiled does not change any more")
    options = Options(loss, padding, embedding)
    record = Record(PatchReport(type(model).__name__))
    plans = list(_plans(model, options, record.report))
    configs = {id(config): config for _, config, plan in plans if plan.attention}
    register()
    for module, _, plan in plans:
        mark = record.mark(module, padding)
        mark.attention = mark.attention or plan.attention
        mark.options |= plan.options or {}
        if plan.forward is not None:
            record.swap(module, plan.forward)
    for config in configs.values():
        record.configs.append(config)
        config._attn_implementation_internal = NAME
    model.__dict__[RECORD] = record
    model.__dict__[_REPLICATE] = _refuse_replica
    return record.report


def unpatch(model: nn.Module) -> None:
    """See accelerant.nn.unpatch."""
    record: Record | None = getattr(model, RECORD, None)
    if record is None:
        return
    record.check()
    record.undo()
    del model.__dict__[RECORD], model.__dict__[_REPLICATE]


def _refuse_replica() -> None:
    raise ConfigError(
        "nn.DataParallel cannot copy a patched model: use DistributedDataParallel (accelerate launch or torchrun; the "
        "Trainer takes DataParallel where one process sees several GPUs)"
    )


def _plans(model: nn.Module, options: Options, report: PatchReport) -> Iterator[tuple[nn.Module, Any, Plan]]:
    """Each module that changes, the config of its model, and how; the report gets all of them."""
    for name, module, config in _walk(model):
        leaf = next(module.children(), None) is None
        found: Plan | str | None
        if config is None or config.model_type not in FAMILIES:
            kind = (
                ""
                if config is None
                else f": its model_type is {config.model_type!r}, patch knows {', '.join(FAMILIES)}"
            )
            found = f"is in no model that patch knows{kind}" if leaf else None
        else:
            found = _plan(module, config, options)
            if found is None and leaf:
                found = leaf_reason(module)
        kind = type(module).__name__
        if isinstance(found, Plan):
            report.changed += [Changed(name, kind, *change) for change in found.changes]
            report.notes += [note for note in found.notes if note not in report.notes]
            yield module, config, found
        elif found is not None:
            report.left.append(LeftAlone(name, kind, found))


def _plan(module: nn.Module, config: Any, options: Options) -> Plan | str | None:
    """What a rule says: a plan, a reason against it, or None where there is no rule."""
    kind = type(module)
    path = f"{kind.__module__}:{kind.__qualname__}"
    rule = RULES.get(path)
    if rule is None:
        parent = next((base for base in kind.__mro__[1:] if f"{base.__module__}:{base.__qualname__}" in RULES), None)
        return None if parent is None else f"is a subclass of {parent.__name__}, whose forward may be another"
    if MARK in module.__dict__:
        return "is patched already"
    if "forward" in module.__dict__:
        return "its forward was replaced by another library"
    for function in (f"{path}.forward", *rule.needs):
        refused = unknown(function)
        if refused:
            return refused
    return rule.plan(module, config, options)


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Every module once, with the config of the innermost model of transformers that it is in."""
    from transformers import PreTrainedModel

    seen: set[int] = set()

    def visit(name: str, module: nn.Module, config: Any) -> Iterator[tuple[str, nn.Module, Any]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if isinstance(module, PreTrainedModel):
            config = module.config
        yield name, module, config
        for part, child in module.named_children():
            yield from visit(f"{name}.{part}" if name else part, child, config)

    return visit("", model, None)
