"""The registry of what patch replaces: rules by the class of a layer or the form of its forward, and the known forms.

A form is the statements that forwards of several classes of transformers share. A class that changed between versions,
or whose method another library replaced, has another form and is left alone.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from accelerant.config import similar
from accelerant.errors import ConfigError
from accelerant.nn.patching.record import Forward


# --- rules -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Options:
    """The options of patch that decide which modules change, and the innermost transformers model around the module."""

    loss: bool
    embedding: bool
    model: Any = None


@dataclass(slots=True)
class Replacement:
    """The changes to a module: (kind, op called from now on) for each, and what they need; None keeps what there is.

    `attention` says that it goes through transformers' interface; `options` are settings for the module's mark.
    """

    changes: list[tuple[str, str]]
    forward: Forward | None = None
    loss_function: Forward | None = None
    attention: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


Rule = Callable[[Any, Options], Replacement | str]
"""Returns the plan of a module, or the reason why there is none."""

PLAIN_RULES: dict[type[nn.Module], Rule] = {}
"""Rules of layers of exactly these classes, outside of transformers' models; plain.py adds them."""

RULES: dict[type[nn.Module] | str, Rule] = {}
"""Rules in a model of transformers, by the class or by the form of the class's forward; rules.py adds them."""

_VENDORS = "its product is the vendor library's, which Accelerant uses too"

LEAVES = {
    **dict.fromkeys(("Linear", "NonDynamicallyQuantizableLinear", "Conv1D"), _VENDORS),
    "Conv2d": "the convolution is cuDNN's, which Accelerant uses too",
    "Dropout": "ours draws other random numbers",
    "Identity": "does nothing",
}
"""Why modules without a rule are left alone."""


def why_left(module: nn.Module) -> str | None:
    """Return why a module without a rule is left alone; None for a container."""
    if next(module.children(), None) is not None:
        return None
    return LEAVES.get(type(module).__name__, "there is no replacement for it")


# --- forms -----------------------------------------------------------------------------------------------------------
TESTED = ((5, 17), (5, 24))  # the oldest and the newest transformers whose functions were compared with these forms

FORMS: dict[str, tuple[str, ...]] = {
    # activations and layers
    "gelu_accurate": ("1f9121cf6b0ae2dd",),
    "gelu_fast": ("4caa3bda3218009e",),
    "gelu_new": ("9d0b9dd7175386e1",),
    "gelu": ("618093a6bcb89521",),
    "silu": ("e730f54291b81588",),
    "conv1d": ("2de078e4b215d5ec",),
    # norms
    "rms_norm": ("9635bcd843f309a0", "3152525beceb0d02", "eef4e978a32aa4a4", "b6d7ab076811b6bb"),
    "rms_norm_offset": ("2dad5f5760750e09",),  # scales by 1 + weight
    "rms_norm_offset._norm": ("6dc7d2ba16b4048a",),
    "layer_norm_scale": ("ec976d1bff6235ff",),
    # MLPs
    "mlp_activation_fn": ("13885f42f2bbb7aa",),
    "mlp_activation": ("56b390882f2d9ed4",),
    "mlp_act": ("34ebf93e70130b0e",),
    "mlp_linear_fc": ("2fe27664d995b009",),
    "mlp_up_down": ("81bc4bc569be56c2",),
    "mlp_conv1d": ("41ab05398d2adda7",),
    "mlp_intermediate": ("ab3f9454469ba468",),
    "mlp_feed_forward": ("b4d86b323b652d42",),
    "gated_mlp": ("7d2027d4464e3e71", "0d7b11835db6b508", "f2793fe16ca018bf"),
    "packed_gated_mlp": ("e8d404cbecb96285",),
    # rotary embeddings; the halves of each row of these tables are equal
    "rotary": ("4a8f8b85ee37bd3f", "bc6680d4a77c1be9", "d95cfe37161b6bbb", "92ec8cff28b47c78"),
    "rotary_partial": ("d979b6dc501d84b5", "9af4c6b9d14681cf"),
    "rotate_half": ("7b6c9b425ca04287",),
    "rotary_tables": (
        "4eddbbbe63e2ef48", "25e93363c8e3094f", "8851abe280f0d9fa", "735deb9920dba9d4", "b03d3d9e740110f2",
        "03a15edb21079215", "b833dc83a6e09a90", "7b7e089777a73106", "a3cd60fd7e63f1cf", "7fd65609632f9735",
        "365d5916be0261d4",
    ),
    # attention and layers of whole-layer functions
    "attention_llama": ("865d17a1b6edd273", "38eb7a675fc00c3f", "467d2e0bba2fd378"),
    "attention_qk_norm": ("e0b15d778eecc3a8",),
    "attention_gpt2": ("b3815a1ead7c7886",),
    "attention_bert": ("4d9cb73ac04687c9",),
    "attention_vit": ("a921c8a872957f03",),
    "decoder_layer": ("1a8125909341e389", "d4699009e63a2518"),
    "dropout_decoder_layer": ("df580f10cfd4279e",),
    "sandwich_layer": ("eb03c623c021985a",),
    "clip_layer": ("62e60adf8f7142e8",),
    "gpt2_block": ("c0a1ea7601811039",),
    "vit_layer": ("a462ca28ad994a36",),
    "bert_layer": ("c9f8ef605ef5c212",),
    "bert_layer.feed_forward_chunk": ("d935db5223a7e491",),
    "bert_attention": ("5fac741babed40e0",),
    "bert_output": ("3799d79263d3217e",),
    # losses
    "causal_loss": ("0637640fcbd0cbda",),
    "masked_loss": ("9fa8833cdc284b0d",),
    "fixed_cross_entropy": ("7c2fdd59ca33bb6a",),
    "causal_lm": ("30455d0ea27cee0c", "bc1bb9f5b8f9536d"),
    "causal_lm_experts": ("432df7c168e39470", "0c17611377d78868"),
    "causal_lm_gpt2": ("7485893d9d1fa433", "6b811332f7acd907"),
    "decoder": (
        "dd47fc6dd6ed820a", "a4e04405d94dd416", "a20c59e141641c74", "a8edc21bde744549", "ce4bfe471b568905",
        "444574907a9896e3",
    ),
    "masked_lm_bert": ("9b5ba72bf54eebe4",),
    "masked_lm_bert.head": ("90de951299e89740",),
    "masked_lm_bert.predictions": ("0fbe9980deb512b0",),
}  # fmt: skip
"""Form -> digests of the statements with this effect, in the versions of TESTED.

There are several if models or versions write it differently: rotary tables changed in 5.18 (mps) and 5.19 (broadcast
products in place of a matmul), mixtures of experts in 5.19 (outputs with router logits), the causal models in 5.21
(`logits_to_keep` is sliced by a function, which takes masks too). Norms, MLPs, activations and losses of transformers
4.57 are the same. A dotted name is a part of the form before the dot.
"""

_RENAMED = (
    (re.compile(r"\b(curr(?:ent)?_)?cache\b"), r"\1past_key_values"),  # arguments and fields, in 5.24
    (re.compile(r"(\.update\([^()]*), kwargs=kwargs\)"), r"\1)"),  # the same: of paged caches, which we leave alone
)
"""What later versions write in another way without another effect: pattern, and the text of before."""

_FORM_OF = {digest: form for form, digests in FORMS.items() for digest in digests}


@functools.cache
def fingerprint(function: Callable[..., Any]) -> str:
    """Return a digest of a function's statements without decorators, annotations, docstring, comments and f-strings.

    Names are those that transformers had before it renamed them. OSError or TypeError without a def statement to read.
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
    text = ast.unparse(tree)
    for pattern, before in _RENAMED:
        text = pattern.sub(before, text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def register_form(form: str, function: Callable[..., Any]) -> None:
    """Let patch replace, in this process, each module whose forward has the statements of a function, as one of a form.

    >>> register_form("rms_norm", MyRMSNorm.forward)

    The function must compute what the other functions of the form compute, from attributes of the same names: a
    replacement is chosen by the statements alone. Modules that patch has seen before are recognized from then on, too.

    Raises:
        ConfigError: no form has that name, the function's source is not available, or it has another form.
    """
    try:
        digest = fingerprint(function)
    except (OSError, SyntaxError, TypeError) as error:
        raise ConfigError(f"register_form: {function!r} has no source to compare: {error}") from None
    if form not in FORMS:
        raise ConfigError(f"register_form: there is no form {form!r}{similar(form, FORMS)}")
    if _FORM_OF.setdefault(digest, form) != form:
        raise ConfigError(f"register_form: {function!r} has the form {_FORM_OF[digest]!r}, not {form!r}")


def form_of(function: Any) -> str | None:
    """Return the form of a function; None if it has none or its source is not available."""
    try:
        return _FORM_OF.get(fingerprint(function))
    except (OSError, SyntaxError, TypeError):
        return None


def differs(function: Any, form: str) -> bool:
    """Return whether a function has another form than `form`."""
    return form_of(function) != form


def unknown(path: str, form: str) -> bool:
    """Return whether the function at "package.module:Class.forward" is absent or has another form than `form`."""
    module, _, name = path.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part, None)
    return differs(function, form)
