"""The classes that accelerant._vllm registers, on vLLM's own; imported with vLLM only.

vLLM lays keys and values of a block side by side, (blocks, key heads, block, 2 D): our ops read and write the halves in
place. Attention that they do not compute (encoders, ALiBi, sinks, quantized caches) stays vLLM's, by layer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from accelerant import ops

calls: Counter[str] = Counter()
"""How often each of our parts ran in this process: "attention", "int8", "int4", "norm"."""


class PagedImpl(CPUAttentionBackendImpl):  # type: ignore[misc]  # vLLM is not seen by the type checker
    """Attention of a layer by ops.attention_paged."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values to the cache; vLLM calls it before forward, unless layers share a cache."""
        if not self._serves():
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        count = len(slot_mapping)
        k_blocks, v_blocks = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        ops.append_paged(key[:count], value[:count], k_blocks, v_blocks, slot_mapping.long())

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, *args: Any, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Compute attention of the cache into output; the arguments are vLLM's."""
        if attn_metadata is None or not self._serves():
            result: Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **options
            )
            return result
        if not attn_metadata.causal:
            raise NotImplementedError("accelerant's attention for vLLM is causal")
        count = attn_metadata.num_actual_tokens
        k_blocks, v_blocks = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        numbers = (attn_metadata.block_table, attn_metadata.seq_lens, attn_metadata.query_start_loc)
        table, lengths, starts = (each.to(torch.int32).contiguous() for each in numbers)
        window = self.sliding_window if self.sliding_window > 0 else None
        o = ops.attention_paged(
            query[:count].view(count, self.num_heads, self.head_size), k_blocks, v_blocks, table, lengths, starts,
            window=window, scale=self.scale, softcap=self.logits_soft_cap or None,
        )  # fmt: skip
        output[:count] = o.view_as(output[:count])
        calls["attention"] += 1
        return output

    def _serves(self) -> bool:
        plain = self.alibi_slopes is None and self.sinks is None and not self.is_fp8_kv_cache
        return plain and self.attn_type == AttentionType.DECODER


class PagedBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's back end of a CPU with our attention; metadata and cache are its own."""

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        """Return the class of a layer's attention."""
        return PagedImpl


class _IntegerLinear(UnquantizedLinearMethod):  # type: ignore[misc]
    """A linear layer whose weight is loaded in floating point and then made integers."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the weight; layers whose inputs are no multiple of 128 have 8 bits."""
        weight = layer.weight.data
        if self.bits == 4 and weight.shape[1] % 128 == 0:
            integers, scale, _ = ops.quantize_int4(weight)
        else:
            integers, scale = ops.quantize_int8(weight)
        layer.weight = torch.nn.Parameter(integers, requires_grad=False)
        layer.register_buffer("scale", scale, persistent=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x times the represented weight, plus bias."""
        if layer.weight.dtype == torch.uint8:
            calls["int4"] += 1
            return ops.linear_int4(x, layer.weight, layer.scale, None, bias)
        calls["int8"] += 1
        return ops.linear_int8(x, layer.weight, layer.scale, bias)


class Int8Config(QuantizationConfig):  # type: ignore[misc]
    """quantization="accelerant_int8": a scale for each output."""

    bits = 8

    @classmethod
    def get_name(cls) -> str:
        """Return the name that `quantization` takes."""
        return f"accelerant_int{cls.bits}"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the dtypes of activations."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least compute capability."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no files: the weights are in floating point."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Int8Config:
        """Return a configuration; it has no settings."""
        return cls()

    def get_quant_method(self, layer: Any, prefix: str) -> _IntegerLinear | None:
        """Return the method of linear layers; the output layer and embeddings stay as they are."""
        return _IntegerLinear(self.bits) if isinstance(layer, LinearBase) else None


class Int4Config(Int8Config):
    """quantization="accelerant_int4": groups of 128 columns."""

    bits = 4


class OwnRMSNorm(RMSNorm):  # type: ignore[misc]
    """vLLM's RMS norm by ops.rms_norm and ops.add_rms_norm, for weights and the whole width."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm of x, or of x plus residual and that sum."""
        weight: Any = getattr(self, "weight", None)
        if self.variance_size_override is not None or not self.has_weight or weight.dtype != x.dtype:
            return super().forward(x, residual)
        calls["norm"] += 1
        if residual is None:
            return ops.rms_norm(x, weight, eps=self.variance_epsilon)
        return ops.add_rms_norm(x, residual, weight, eps=self.variance_epsilon)


def register_layers() -> None:
    """Register the linear methods and the norm."""
    for config in (Int8Config, Int4Config):
        register_quantization_config(config.get_name())(config)
    RMSNorm.register_oot(name="RMSNorm")(OwnRMSNorm)
