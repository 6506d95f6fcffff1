"""A language model and its tokenizer from a folder, with weights in integers made while they are read."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from accelerant.nn.layers import dtype_of
from accelerant.nn.models import hugging_face
from accelerant.nn.models.llama import Llama
from accelerant.nn.models.tokenizer import ModelTokenizer


def load_model(
    path: str | os.PathLike[str], *, device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None, quantize: str | None = None,
) -> tuple[Llama, ModelTokenizer]:  # fmt: skip
    """Read a Llama, Qwen2, Qwen3 or Mistral, and its tokenizer, from a folder in Hugging Face's format.

    Names, shapes and dtypes of all tensors are checked first. They are then read one by one to the device; with
    `quantize` the weights of the linear layers are rounded a few rows at a time, so that the peak of memory is the
    quantized model and a part of one tensor.

    Args:
        path: folder with config.json, tokenizer.json, and model.safetensors or its shards and their index; or a GGUF
            file of F32, F16, BF16 or Q8_0, with tokenizer.json beside it.
        device: of the model; None for the CPU.
        dtype: of what is not quantized, and of activations, or its name; None for that of the embedding in the file,
            float32 for Q8_0.
        quantize: "int8" for linear layers in 8-bit integers, the output layer included unless it is tied; "int4" for
            4 bits, but for the output layer and inputs that are no multiple of 128; None for none.

    Returns:
        the model, whose parameters need no gradient, and the tokenizer.

    Raises:
        ConfigError: no such folder, or another value of quantize.
        FormatError: a missing, truncated or malformed file, a tensor that is missing, unexpected or of another shape.
            Names the file or tensor.
        UnsupportedCase: another architecture, or a field of config.json, which is named, asks for what is not here.
    """
    source = hugging_face.described(path, Llama._layouts)  # names an unsupported model before its tokenizer is read
    folder = Path(path)
    tokenizer = ModelTokenizer(folder) if folder.is_dir() else ModelTokenizer(folder.parent, source.fields)
    model = hugging_face.built(Llama, source, dtype_of(dtype), device, quantize)
    return model.eval().requires_grad_(False), tokenizer
