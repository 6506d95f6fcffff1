"""Any public op as an operation of the service: its tensors are the inputs, its options the parameters.

The setting `ops` names those that are offered besides the operations of operations.py. Their shapes are computed
without memory, on torch's meta device, so that the server refuses what the op would refuse, and knows the size of the
result. That takes the server an import of torch, which it does without otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ConfigDict, create_model

from accelerant.config import similar
from accelerant.errors import AccelerantError, ConfigError, ShapeError
from accelerant.runtime.files import clipped
from accelerant.service.operations import Arrays, OpSpec, Parameters, Results, TensorSpec, accelerator_on

if TYPE_CHECKING:
    from accelerant.ops.registry import PublicOp
    from accelerant.service.jobs.worker import Context

_FLOATS, _INTEGERS = ("FP32", "FP16", "FP64"), ("INT64", "INT32", "INT8")
_CPU_ELEMENTS_S = 1e7


class OpParameters(Parameters):
    """Options of an op."""

    model_config = ConfigDict(arbitrary_types_allowed=True)  # a type that JSON has no value for keeps its default


def op_spec(name: str) -> OpSpec:
    """Return the operation of a public op, whose outputs are y, y1, ...; ConfigError for a name that is no op's."""
    from accelerant.ops.registry import public_ops

    if name not in public_ops():
        raise ConfigError(f"ops: there is no op {clipped(name)}{similar(name, public_ops())}")
    op = public_ops()[name]
    signature = inspect.signature(op.function, eval_str=True)
    declared = inspect.signature(op.function).parameters.values()
    tensors = {each.name: each for each in declared if str(each.annotation).startswith("Tensor")}
    options: dict[str, Any] = {
        each.name: (each.annotation, ... if each.default is inspect.Parameter.empty else each.default)
        for each in signature.parameters.values()
        if each.name not in tensors
    }

    def shaped(given: Arrays, parameters: Any) -> tuple[Any, ...]:
        return _shaped(op, given, {each: getattr(parameters, each) for each in options})

    def run(given: Arrays, parameters: Any, context: Context) -> Results:
        arguments = {each: given.get(each) for each in tensors} | {each: getattr(parameters, each) for each in options}
        found = getattr(accelerator_on(context.device), name)(**arguments)
        return {f"y{i or ''}": np.asarray(y) for i, y in enumerate(found if isinstance(found, tuple) else (found,))}

    outputs = ("y", "y1") if str(signature.return_annotation).startswith("tuple") else ("y",)
    return OpSpec(
        name, (op.function.__doc__ or "").partition("\n")[0].rstrip("."), "neural", _inputs(op, tensors),
        tuple(TensorSpec(each, (*_FLOATS, *_INTEGERS)) for each in outputs),
        create_model(f"{name}_parameters", __base__=OpParameters, **options), run,
        lambda given, parameters: sum(x.size for x in given.values()) / _CPU_ELEMENTS_S,
        check=lambda given, parameters: [*shaped(given, parameters)].clear(),
        result_bytes=lambda given, parameters: sum(y.nbytes for y in shaped(given, parameters)),
    )  # fmt: skip


def _inputs(op: PublicOp, tensors: Mapping[str, inspect.Parameter]) -> tuple[TensorSpec, ...]:
    """Return an op's inputs: integers where its first sample has them, else floating-point numbers."""
    from accelerant.ops._cases import Indices, Stated

    sample = op.cases.SAMPLES[0].arguments
    integers = {each for each, one in zip(tensors, sample, strict=False) if isinstance(one, (Indices, Stated))}
    return tuple(
        TensorSpec(
            name, _INTEGERS if name in integers else _FLOATS, optional=each.default is not inspect.Parameter.empty
        )
        for name, each in tensors.items()
    )


def _shaped(op: PublicOp, given: Arrays, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the results of a call as tensors without memory; raise what the op raises, or ShapeError."""
    import torch

    metas = {
        name: torch.empty(x.shape, dtype=torch.from_numpy(np.empty(0, x.dtype)).dtype, device="meta")
        for name, x in given.items()
    }
    try:
        with torch.no_grad():
            found = op.function(**metas, **options)
    except AccelerantError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever torch raises for these shapes
        raise ShapeError(f"{op.name}: {(str(error).splitlines() or [type(error).__name__])[0]}") from None
    return found if isinstance(found, tuple) else (found,)
