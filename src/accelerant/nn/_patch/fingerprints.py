"""Digests of the forward methods that our replacements were written for.

A class of transformers may change between versions, and another library may have replaced its method. A method is
replaced only if its statements are exactly those for which the replacement was written.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

__all__ = ["FINGERPRINTS", "fingerprint", "unknown"]

_TRANSFORMERS: dict[str, dict[str, tuple[str, ...]]] = {
    "activations": {
        "AccurateGELUActivation.forward": ("1f9121cf6b0ae2dd",),
        "FastGELUActivation.forward": ("4caa3bda3218009e",),
        "GELUActivation.forward": ("618093a6bcb89521",),
        "GELUTanh.forward": ("618093a6bcb89521",),
        "NewGELUActivation.forward": ("9d0b9dd7175386e1",),
        "SiLUActivation.forward": ("e730f54291b81588",),
    },
    "loss.loss_utils": {"ForCausalLMLoss": ("0637640fcbd0cbda",), "fixed_cross_entropy": ("7c2fdd59ca33bb6a",)},
    "pytorch_utils": {"Conv1D.forward": ("2de078e4b215d5ec",)},
    "models.bert.modeling_bert": {
        "BertAttention.forward": ("5fac741babed40e0",),
        "BertForMaskedLM.forward": ("9b5ba72bf54eebe4",),
        "BertIntermediate.forward": ("ab3f9454469ba468",),
        "BertLMPredictionHead.forward": ("0fbe9980deb512b0",),
        "BertLayer.feed_forward_chunk": ("d935db5223a7e491",),
        "BertLayer.forward": ("c9f8ef605ef5c212",),
        "BertOnlyMLMHead.forward": ("90de951299e89740",),
        "BertOutput.forward": ("3799d79263d3217e",),
        "BertSelfAttention.forward": ("4d9cb73ac04687c9",),
        "BertSelfOutput.forward": ("3799d79263d3217e",),
    },
    "models.gpt2.modeling_gpt2": {
        "GPT2Attention.forward": ("b3815a1ead7c7886",),
        "GPT2Block.forward": ("c0a1ea7601811039",),
        "GPT2LMHeadModel.forward": ("7485893d9d1fa433", "6b811332f7acd907"),
        "GPT2MLP.forward": ("41ab05398d2adda7",),
    },
    "models.vit.modeling_vit": {
        "ViTAttention.forward": ("a921c8a872957f03",),
        "ViTEmbeddings.forward": ("30b221f6bf44c7c2",),
        "ViTLayer.forward": ("a462ca28ad994a36",),
        "ViTMLP.forward": ("13885f42f2bbb7aa",),
    },
}
_LLAMA_TABLES = ("4eddbbbe63e2ef48", "25e93363c8e3094f", "8851abe280f0d9fa")
_QWEN_TABLES = ("735deb9920dba9d4", "b03d3d9e740110f2", "8851abe280f0d9fa")
for _family, _attention, _tables in (
    ("Llama", "865d17a1b6edd273", _LLAMA_TABLES),
    ("Mistral", "38eb7a675fc00c3f", _LLAMA_TABLES),
    ("Qwen2", "467d2e0bba2fd378", _QWEN_TABLES),
    ("Qwen3", "e0b15d778eecc3a8", _QWEN_TABLES),
):
    _TRANSFORMERS[f"models.{_family.lower()}.modeling_{_family.lower()}"] = {
        f"{_family}Attention.forward": (_attention,),
        f"{_family}DecoderLayer.forward": ("1a8125909341e389",),
        f"{_family}ForCausalLM.forward": ("30455d0ea27cee0c", "bc1bb9f5b8f9536d"),
        f"{_family}MLP.forward": ("7d2027d4464e3e71",),
        f"{_family}RMSNorm.forward": ("9635bcd843f309a0",),
        f"{_family}RotaryEmbedding.forward": _tables,
        "apply_rotary_pos_emb": ("4a8f8b85ee37bd3f",),
        "rotate_half": ("7b6c9b425ca04287",),
    }

FINGERPRINTS: dict[str, tuple[str, ...]] = {
    f"transformers.{module}:{name}": digests
    for module, functions in _TRANSFORMERS.items()
    for name, digests in functions.items()
}
"""Function -> digests of its statements in the supported versions, transformers 5.17.0 to 5.23.0.

There are several if it was rewritten to the same effect: rotary tables in 5.18 (mps) and 5.19 (broadcast products in
place of a matmul); the causal models in 5.21 (`logits_to_keep` is sliced by a function, which takes masks too).
"""


@functools.cache
def fingerprint(function: Callable[..., Any]) -> str:
    """Return a digest of a function's statements without decorators, annotations, docstring, comments and f-strings.

    Raises:
        OSError: its source is not available.
        TypeError: it is not a Python function, or is a lambda.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{function!r} was not defined by a def statement")
    tree.decorator_list, tree.returns = [], None
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.JoinedStr):  # unparsed differently by versions of Python
            node.values = []
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def unknown(path: str) -> str | None:
    """Return why the function at "package.module:Class.forward" is not a known one; None if it is."""
    module, _, name = path.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part, None)
    if module.startswith("torch."):  # documented behaviour, the same in every version
        return None if getattr(function, "__module__", None) == module else f"{name} was replaced by another library"
    try:
        digest = fingerprint(function)
    except (OSError, SyntaxError, TypeError) as error:
        return f"the source of {name} cannot be read to check it ({type(error).__name__})"
    if digest in FINGERPRINTS.get(path, ()):
        return None
    return f"{name} is not the one of transformers 5.17 to 5.23 that the replacement was written for"
