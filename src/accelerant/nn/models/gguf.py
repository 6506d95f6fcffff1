"""GGUF files of llama.cpp: metadata and tensors by Hugging Face's names, without trust in any size that a file gives.

Tensors of F32, F16, BF16 and Q8_0 (blocks of 32 integers with a scale in float16) are read; other types are refused by
name. The heads of a Llama's queries and keys are stored with the two halves of the rotation interleaved.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import FormatError, MissingFile, UnsupportedCase
from accelerant.ops.rope import Llama3Scaling, rope_tables
from accelerant.runtime.files import clipped, open_regular

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_METADATA = 1 << 28  # bytes
_MOST_NAMES = 1 << 16  # metadata entries, and tensors
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_TYPES = {0: ("F32", 4, 1), 1: ("F16", 2, 1), 30: ("BF16", 2, 1), 8: ("Q8_0", 34, 32)}
"""Number of a type -> its name, bytes of a block, values of a block."""

_OTHER_TYPES = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4",
}  # fmt: skip
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_FIELDS = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
"""Field of config.json -> key of the metadata after the architecture."""

_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_LARGEST_FACTOR = 1024
_FACTORS = "rope_freqs.weight"  # what Llama 3's scaling divides each frequency by


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of a GGUF file, which is mapped while it is read; `heads` of it are interleaved, 0 for none."""

    path: Path
    shape: tuple[int, ...]
    type: str
    begin: int
    size_bytes: int
    heads: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what `read` returns."""
        return _FLOATS.get(self.type, torch.float32)

    def read(self) -> Tensor:
        """Return the tensor in floating point."""
        mapped = np.memmap(self.path, np.uint8, "r", self.begin, (self.size_bytes,))
        if self.type == "Q8_0":
            blocks = mapped.reshape(-1, 34)
            scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            with np.errstate(invalid="ignore"):  # of a scale that is infinite, which quantizing refuses
                found = torch.from_numpy(blocks[:, 2:].view(np.int8) * scales)
        else:
            found = torch.from_numpy(mapped.copy()).view(self.dtype)
        found = found.reshape(self.shape)
        if self.heads:
            found = found.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).reshape(self.shape)
        return found


class GGUFFile:
    """The metadata and tensors of a GGUF file.

    Attributes:
        fields: as in a config.json of transformers, with "chat_template" if there is one.
        tensors: by their names in transformers, without the prefix of the model.

    Raises:
        MissingFile: no such file.
        FormatError: a file that is truncated or contradicts itself.
        UnsupportedCase: another architecture, type of a tensor, or scaling of the rotation.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(open_regular(path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                head = mmap.mmap(file.fileno(), min(size, _MOST_METADATA), access=mmap.ACCESS_READ) if size else b""
        except FileNotFoundError:
            raise MissingFile(f"{path}: no such file") from None
        except OSError as error:
            raise FormatError(f"cannot read {path}: {error.strerror or error}") from None
        self._reader = _Reader(head, str(path))
        metadata, infos = self._reader.header()
        if (kind := metadata.get("general.architecture")) not in _ARCHITECTURES:
            names = ", ".join(_ARCHITECTURES)
            raise UnsupportedCase(f"{path}: general.architecture must be one of {names}, got {clipped(kind)}")
        stored = self._placed(metadata, infos, size)
        self.fields = _config(metadata, stored, str(path))
        self.tensors = _renamed(stored, self.fields, str(path))

    def _placed(
        self, metadata: Mapping[str, Any], infos: Mapping[str, tuple[tuple[int, ...], int, int]], size: int
    ) -> dict[str, GGUFTensor]:
        """Return the tensors, all of which lie in the file; checked before any is read."""
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= 1 << 16 or align & (align - 1):
            raise FormatError(f"{self.path}: general.alignment must be a power of two, got {clipped(align)}")
        data = -(-self._reader.at // align) * align
        stored: dict[str, GGUFTensor] = {}
        for name, (shape, kind, offset) in infos.items():
            if kind not in _TYPES:
                known = ", ".join(each[0] for each in _TYPES.values())
                raise UnsupportedCase(
                    f"{self.path}: {clipped(name)} is of type {_OTHER_TYPES.get(kind, kind)}, supported are {known}"
                )
            type_, block_bytes, values = _TYPES[kind]
            if not shape or shape[-1] % values:
                raise FormatError(f"{self.path}: {clipped(name)} of {type_} cannot have the shape {clipped(shape)}")
            size_bytes = math.prod(shape) // values * block_bytes
            if offset % align or data + offset + size_bytes > size:
                raise FormatError(
                    f"{self.path} has {size:,} bytes, and {clipped(name)} would be at {data + offset:,}, "
                    f"{size_bytes:,} bytes long"
                )
            stored[name] = GGUFTensor(self.path, shape, type_, data + offset, size_bytes)
        return stored


class _Reader:
    """The header of a GGUF file, each of whose sizes is compared with what is left of it."""

    def __init__(self, data: bytes | mmap.mmap, origin: str) -> None:
        self._data, self._origin, self.at = data, origin, 0

    def header(self) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
        """Return the metadata, and shape (rows first), type and offset of each tensor."""
        if self._bytes(4) != _MAGIC:
            raise FormatError(f"{self._origin} is not a GGUF file")
        if (version := self._number("<I")) not in _VERSIONS:
            raise UnsupportedCase(f"{self._origin}: version {version} of GGUF is not supported, only 2 and 3 are")
        tensors, entries = self._count(), self._count()
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            self._add(metadata, self._string(), lambda: self._value(self._number("<I")))
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            self._add(infos, self._string(), self._info)
        return metadata, infos

    def _add(self, found: dict[str, Any], name: str, read: Any) -> None:
        if name in found:
            raise FormatError(f"{self._origin} has {clipped(name)} twice")
        found[name] = read()

    def _info(self) -> tuple[tuple[int, ...], int, int]:
        if (dimensions := self._number("<I")) > 4:
            raise FormatError(f"{self._origin}: a tensor of {dimensions} dimensions, more than 4")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        return shape, self._number("<I"), self._number("<Q")

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise FormatError(f"{self._origin} ends within its header, or the header is longer than 256 MB")
        self.at += count
        return self._data[self.at - count : self.at]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _count(self) -> int:
        count: int = self._number("<Q")
        if count > _MOST_NAMES:
            raise FormatError(f"{self._origin}: {count:,} tensors or entries of metadata, more than {_MOST_NAMES:,}")
        return count

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise FormatError(f"{self._origin}: metadata of the unknown type {kind}")
        inner, count = self._number("<I"), self._number("<Q")
        if inner in _SCALARS:
            self._bytes(count * struct.calcsize(_SCALARS[inner]))
        elif inner != _STRING or count > (len(self._data) - self.at) // 8:
            raise FormatError(f"{self._origin}: an array of {count:,} values of type {inner}")
        else:
            for _ in range(count):
                self._bytes(self._number("<Q"))
        return f"an array of {count:,} values"  # which no field here is


def _config(metadata: Mapping[str, Any], stored: Mapping[str, GGUFTensor], origin: str) -> dict[str, Any]:
    """Return the fields of config.json that the metadata describe."""
    kind = metadata.get("general.architecture")
    if (embedding := stored.get("token_embd.weight")) is None:
        raise FormatError(f"{origin} lacks 'token_embd.weight'")
    fields: dict[str, Any] = {"model_type": kind, "vocab_size": embedding.shape[0]}
    fields |= {name: metadata[key] for name, end in _FIELDS.items() if (key := f"{kind}.{end}") in metadata}
    for name, end in _FIELDS.items():
        if name not in fields and name != "num_key_value_heads":
            raise FormatError(f"{origin} lacks {kind}.{end}")
    heads = fields["num_attention_heads"]
    width = metadata.get(f"{kind}.attention.key_length")
    if width is None and isinstance(heads, int) and heads > 0 and isinstance(fields["hidden_size"], int):
        width = fields["hidden_size"] // heads
    fields |= {"head_dim": width, "tie_word_embeddings": "output.weight" not in stored, "hidden_act": "silu"}
    for end, allowed in (("rope.dimension_count", width), ("attention.value_length", width), ("expert_count", 0)):
        if metadata.get(f"{kind}.{end}", allowed) != allowed:
            raise UnsupportedCase(f"{origin}: {kind}.{end} must be {allowed}, got {clipped(metadata[f'{kind}.{end}'])}")
    if (scaling := metadata.get(f"{kind}.rope.scaling.type", "none")) != "none":
        raise UnsupportedCase(f"{origin}: {kind}.rope.scaling.type must be 'none', got {clipped(scaling)}")
    base = metadata.get(f"{kind}.rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if _FACTORS in stored:
        rope = _scaled(stored[_FACTORS], base, width, origin)
    window = metadata.get(f"{kind}.attention.sliding_window", 0)
    if kind == "llama" and window:
        fields["model_type"] = "mistral"
    fields |= {
        "rope_parameters": rope, "sliding_window": window or None, "use_sliding_window": bool(window),
        "max_window_layers": 0, "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }  # fmt: skip
    return fields


def _scaled(factors: GGUFTensor, base: Any, width: Any, origin: str) -> dict[str, Any]:
    """Return the rope_parameters whose scaling divides the frequencies by these factors: those of Llama 3.1 to 3.3."""
    given = factors.read().double() if factors.shape == (width // 2 if isinstance(width, int) else 0,) else None
    if given is not None and isinstance(base, float) and base > 0 and 1 <= float(given.max()) < _LARGEST_FACTOR:
        scaling = Llama3Scaling(factor=float(round(float(given.max()))))
        tables = [rope_tables(2, width, base, each, torch.float64) for each in (None, scaling)]
        plain, scaled = (torch.atan2(sin[1], cos[1]) for cos, sin in tables)
        if torch.allclose(plain / scaled, given, rtol=1e-4):
            names = ("factor", "low_freq_factor", "high_freq_factor")
            rope: dict[str, Any] = {name: float(getattr(scaling, name)) for name in names}
            rope |= {"rope_type": "llama3", "rope_theta": base}
            return rope | {"original_max_position_embeddings": scaling.original_context}
    raise UnsupportedCase(f"{origin}: {_FACTORS} are not the factors of Llama 3's scaling")


def _renamed(stored: Mapping[str, GGUFTensor], fields: Mapping[str, Any], origin: str) -> dict[str, GGUFTensor]:
    """Return the tensors by Hugging Face's names, those of interleaved heads marked."""
    heads = {"attn_q": fields["num_attention_heads"], "attn_k": fields.get("num_key_value_heads")}
    interleaved = fields["model_type"] in ("llama", "mistral")
    found: dict[str, GGUFTensor] = {}
    for name, tensor in stored.items():
        layer = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)", name)
        if name in _TOP:
            found[_TOP[name]] = tensor
        elif layer is not None and layer[2] in _LAYER:
            if interleaved and layer[2] in heads:
                count = heads[layer[2]] or heads["attn_q"]
                if not isinstance(count, int) or count < 1 or tensor.shape[0] % (2 * count):
                    raise FormatError(f"{origin}: {name!r} has {tensor.shape[0]} rows, for {clipped(count)} heads")
                tensor = GGUFTensor(tensor.path, tensor.shape, tensor.type, tensor.begin, tensor.size_bytes, count)
            found[f"layers.{int(layer[1])}.{_LAYER[layer[2]]}.{layer[3]}"] = tensor
        elif name != _FACTORS:
            found[f"GGUF's {name}"] = tensor  # which is refused by its name
    return found
