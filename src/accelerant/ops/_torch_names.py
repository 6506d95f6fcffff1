"""The argument names of torch's function of the same name, which every op also takes as keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerant.errors import ShapeError

_X = {"input": "x"}
_IN_PLACE: dict[str, object] = {"inplace": False}
_REDUCED: dict[str, object] = {"size_average": None, "reduce": None}

TORCH_NAMES: dict[str, dict[str, str]] = {
    "attention": {"query": "q", "key": "k", "value": "v", "is_causal": "causal", "attn_mask": "mask", "enable_gqa": ""},
    "cross_entropy": {"input": "logits", "target": "targets"},
    "embedding": {"input": "indices"},
    "linear_cross_entropy": {"input": "hidden", "linear_weight": "weight", "target": "targets"},
    **{op: {"input": "a", "other": "b"} for op in ("add", "matmul", "mul")},
    **{op: {**_X, "normalized_shape": ""} for op in ("layer_norm", "rms_norm")},
    **dict.fromkeys(
        ("avg_pool2d", "conv2d", "dropout", "gelu", "log_softmax", "max_pool2d", "relu", "sigmoid", "silu", "softmax",
         "tanh"), _X,
    ),
}  # fmt: skip
"""Op -> torch's name of an argument -> the op's, "" for one that the op infers from the tensors."""

TORCH_ONLY: dict[str, dict[str, object]] = {
    "add": {"alpha": 1, "out": None},
    "attention": {"dropout_p": 0.0},
    "binary_cross_entropy": _REDUCED,
    "binary_cross_entropy_with_logits": _REDUCED,
    "cross_entropy": {"weight": None, **_REDUCED},
    "dropout": _IN_PLACE,
    "embedding": {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False},
    "l1_loss": {"weight": None, **_REDUCED},
    "linear_cross_entropy": {"linear_bias": None, "options": None},
    "mse_loss": {"weight": None, **_REDUCED},
    **{op: {"out": None} for op in ("matmul", "mul", "sigmoid", "tanh")},
    **{op: {"dtype": None, "_stacklevel": 3} for op in ("log_softmax", "softmax")},
    "relu": _IN_PLACE,
    "silu": _IN_PLACE,
}
"""Op -> arguments that only torch's function has -> the one value with which it does what the op does."""


def torch_keywords(op: str) -> frozenset[str]:
    """Return the keywords of torch's function that are not the op's own."""
    return frozenset({*TORCH_NAMES.get(op, ()), *TORCH_ONLY.get(op, ())})


def own_keywords(op: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call by the op's own names.

    Raises:
        TypeError: an argument by both names, or one that only torch's function has, with another value than the op's.
        ShapeError: normalized_shape is not the last dimension of x.
    """
    names, fixed = TORCH_NAMES.get(op, {}), TORCH_ONLY.get(op, {})
    own: dict[str, Any] = {}
    for name, value in options.items():
        if name in fixed:
            if value is not fixed[name] and value != fixed[name]:
                only = f"torch's function has it, here it must be {fixed[name]!r}"
                raise TypeError(f"{op}: got an unexpected keyword argument {name!r}: {only}")
        elif meant := names.get(name, name):
            if meant in own:
                raise TypeError(f"{op}() got {meant}= also by torch's name: give one of the two")
            own[meant] = value
    if "normalized_shape" in options:
        given, shape = options["normalized_shape"], getattr(args[0] if args else own.get("x"), "shape", None)
        sizes = (given,) if isinstance(given, int) else tuple(given)
        if shape is not None and sizes != tuple(shape[-1:]):
            raise ShapeError(
                f"{op} takes the last dimension of x: normalized_shape must be {tuple(shape[-1:])}, got {sizes}"
            )
    return own
