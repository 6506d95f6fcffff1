"""Hugging Face models onto our ops, in place; see patch and unpatch. transformers is imported when they are called."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from accelerant.errors import MissingDependency
from accelerant.nn._patch.report import Changed, LeftAlone, PatchReport

__all__ = ["Changed", "LeftAlone", "PatchReport", "patch", "unpatch"]


def patch(model: nn.Module, *, loss: bool = True, padding: str = "exact", embedding: bool = True) -> PatchReport:
    """Put a Hugging Face model onto Accelerant's ops, in place.

    Attention (through transformers' AttentionInterface), norms with the residual before them, activations, MLPs, rotary
    embeddings, token embeddings and the loss of GPT-2, Llama, Qwen2, Qwen3, Mistral, BERT and ViT. Methods are replaced
    on the modules of this model and on no class. Parameters, buffers and the keys of the state_dict stay. What is not
    known for sure stays too: a class or forward that is none of transformers 5.17 to 5.23, an activation or eps other
    than the config's, a layer with adapters; the report says so.

    Args:
        model: a model of transformers, or a module that holds one (before DDP, fully_shard and torch.compile). A
            patched one stays as it is, whatever the options.
        loss: in training, with labels, compute a language model's loss without its logits. output.logits then makes
            them when it is read. False: with logits that exist whole.
        padding: "exact": where a mask has padding, attention goes to torch, and the result is the unpatched model's
            everywhere. "skip": it stays on our kernels; tokens see no padding, and what comes out at padded positions
            means nothing (as with FlashAttention in transformers).
        embedding: whether token and position embeddings change too.

    Returns:
        every module that changed, or was left alone, and why; it counts what attention could not serve later on.

    Raises:
        MissingDependency: transformers is not installed.
        ConfigError: model holds no model of transformers, or is compiled; padding is neither of the two.

    Outputs and gradients equal the unpatched model's within the tolerance of the dtype. The model's config then names
    "accelerant" as its attention; other models that share the config compute what they did before.
    """
    report: PatchReport = _api().patch(model, loss=loss, padding=padding, embedding=embedding)
    return report


def unpatch(model: nn.Module) -> None:
    """Undo patch: the model computes bit for bit what it did before. A model that is not patched stays as it is.

    Raises:
        MissingDependency: transformers is not installed.
        ConfigError: another library has replaced a patched forward since; nothing was changed.
    """
    _api().unpatch(model)


def _api() -> Any:
    try:
        importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingDependency("transformers", "huggingface", "accelerant.nn.patch") from None
    return importlib.import_module("accelerant.nn._patch.api")
