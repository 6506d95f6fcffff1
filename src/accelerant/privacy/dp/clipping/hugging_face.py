"""Layers of transformers, known by what their source says (accelerant.nn's fingerprints)."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from accelerant.nn._patch.known import fingerprint, unknown
from accelerant.ops._per_example import PerExampleSink
from accelerant.privacy.dp.clipping import functions
from accelerant.privacy.dp.clipping.layers import NAMED, Forward, Kind, batch_of

__all__ = ["register"]

_RMS_NORMS = ("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3")

_VIT = "transformers.models.vit.modeling_vit:ViTEmbeddings.forward"
_VIT_FINGERPRINTS = ("30b221f6bf44c7c2",)
"""Of transformers 5.17."""


def _conv1d(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        x, examples = batch_of(x, sink, module)
        return functions.linear(x, module.weight, module.bias, sink, examples, turned=True)

    return forward


def _rms_norm(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(hidden_states: Tensor) -> Tensor:
        x, _ = batch_of(hidden_states, sink, module)
        wide = x.float()
        y = (wide * (wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()).to(x.dtype)
        dtype = module.weight.dtype if module.weight.dtype == y.dtype else _promoted(module.weight, y)
        return functions.scale_shift(y, module.weight, None, (x.dim() - 1,), sink, dtype)

    return forward


def _promoted(a: Tensor, b: Tensor) -> Any:
    return (a.new_empty(0) * b.new_empty(0)).dtype


def _vit_embeddings(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    """Its tokens and positions, (1, ...), are used as if there were one for each example: so there is."""

    def forward(pixel_values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own = dict(module._parameters)
        try:
            for name, each in own.items():
                if sink.wants(each):
                    module._parameters[name] = functions.expanded(each, sink, pixel_values.shape[0], inside=True)
            y: Tensor = plain(pixel_values, *args, **kwargs)
            return y
        finally:
            module._parameters.update(own)

    return forward


def _unknown_vit(path: str) -> str | None:
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name.partition(".")[0]).forward
    try:
        return None if fingerprint(function) in _VIT_FINGERPRINTS else f"{name} is not the one of transformers 5.17"
    except (OSError, SyntaxError, TypeError):
        return f"the source of {name} cannot be read"


def register() -> None:
    """Make them known, without importing transformers."""
    NAMED["transformers.pytorch_utils:Conv1D.forward"] = Kind(_conv1d), unknown
    for folder, name in _RMS_NORMS:
        NAMED[f"transformers.models.{folder}.modeling_{folder}:{name}RMSNorm.forward"] = Kind(_rms_norm), unknown
    NAMED[_VIT] = Kind(_vit_embeddings), _unknown_vit
