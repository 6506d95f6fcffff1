# ruff: noqa: D102  methods without a docstring are documented in LanguageModel
"""Llama and its kin: decoders with rotary positions, grouped-query attention, RMS norms and gated MLPs.

h = embed[tokens];  h += attention(norm(h)), h += mlp(norm(h)) in each block;  logits = norm(h) @ head^T
mlp(x) = (silu(x gate^T) * (x up^T)) down^T

Weights with the same input form one matrix: queries, keys and values in `qkv`, gate and up projections in `gate_up`.
Training then multiplies larger matrices and decoding reads each input once.

Qwen2 adds biases to queries, keys and values, Qwen3 an RMS norm of each head's queries and keys before the rotation,
Mistral a window of visible keys.

Source: Touvron et al. 2023, arXiv:2302.13971, section 2.2; Grattafiori et al. 2024, arXiv:2407.21783, section 3.2;
Jiang et al. 2023, arXiv:2310.06825, section 2; Yang et al. 2024, arXiv:2407.10671, section 2.2.1; Yang et al. 2025,
arXiv:2505.09388, section 2.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from accelerant import ops
from accelerant._renamed import understood_arguments
from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.nn.layers import Linear, RMSNorm, compute_dtype, dtype_of, has_hooks, rms_eps
from accelerant.nn.models.hugging_face import Fields, Layout, Part, built, described
from accelerant.nn.models.language_model import (
    Cache,
    LanguageModel,
    ModelConfig,
    cache_capacity,
    padded_prompt_length,
    require_tokens,
)
from accelerant.nn.models.tokenizer import ModelTokenizer
from accelerant.nn.quantization import LinearInt4, LinearInt8
from accelerant.ops import _invariant
from accelerant.ops.decode.steps import append, linear
from accelerant.ops.linear_int8.op import takes_planes
from accelerant.ops.rope import Llama3Scaling, rope_tables
from accelerant.runtime.files import clipped

if TYPE_CHECKING:
    from accelerant.nn.serving.scheduler import PagedBatch, PagedCache


@understood_arguments(
    num_hidden_layers="layers", num_attention_heads="heads", num_key_value_heads="kv_heads", hidden_size="width",
    intermediate_size="hidden", head_dim="head_width", max_position_embeddings="context", rope_theta="rope_base",
    rms_norm_eps="eps", tie_word_embeddings="tied", sliding_window="window",
)  # fmt: skip
@dataclass(frozen=True, slots=True)
class LlamaConfig(ModelConfig):
    """The dimensions of a Llama; the defaults are Llama 3.1 8B.

    Attributes:
        vocab_size: number of tokens.
        context: longest sequence, in tokens.
        layers: number of transformer blocks.
        heads: query heads in each block.
        kv_heads: heads of keys and values; divides heads.
        width: features of each position.
        hidden: features inside each MLP.
        head_width: features of a head, even; None for width / heads.
        rope_base: base of the rotary frequencies.
        rope_scaling: scaling of the frequencies for a longer context; None for none.
        eps: added to the mean square in each norm.
        tied: whether the output layer shares the embedding's weight.
        qkv_bias: whether queries, keys and values have biases, as in Qwen2.
        qk_norm: whether the queries and keys of each head are normalized before the rotation, as in Qwen3.
        window: number of keys that a query sees, its own included, as in Mistral; None for all of them.
    """

    vocab_size: int = 128256
    context: int = 131072
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    width: int = 4096
    hidden: int = 14336
    head_width: int | None = None
    rope_base: float = 500000.0
    rope_scaling: Llama3Scaling | None = Llama3Scaling()  # noqa: RUF009 - frozen
    eps: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        self.require_positive("vocab_size", "context", "layers", "heads", "kv_heads", "width", "hidden")
        if self.heads % self.kv_heads:
            raise ConfigError(f"LlamaConfig.kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if self.head_width is None and self.width % self.heads:
            raise ConfigError(f"LlamaConfig.width must be a multiple of heads, got {self.width} and {self.heads}")
        if self.head_size % 2 or self.head_size < 2:
            raise ConfigError(f"LlamaConfig: heads must have an even width, got {self.head_size}")
        if self.rope_base <= 0:
            raise ConfigError(f"LlamaConfig.rope_base must be above 0, got {self.rope_base}")
        if not self.eps >= 0:
            raise ConfigError(f"LlamaConfig.eps must be 0 or more, got {self.eps}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"LlamaConfig.window must be at least 1, got {self.window}")

    @property
    def head_size(self) -> int:
        """The number of features of a head."""
        return self.width // self.heads if self.head_width is None else self.head_width


# --- Hugging Face's form ---------------------------------------------------------------------------------------------
_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")  # of a Llama3Scaling, with the same names in config.json
_LONGEST_CONTEXT = 2**24  # the rotary tables have a row for each token


def _from_fields(fields: Fields, values: dict[str, Any], **options: Any) -> LlamaConfig:
    optional = (("kv_heads", "num_key_value_heads", values["heads"]), ("head_width", "head_dim", None))
    for ours, name, default in optional:
        missing = options.pop(ours, default)  # null stands for the first default, in every model type
        default = default if name in fields else missing
        values[ours] = default if fields.get(name) is None else fields.read(name, int)
    if not 1 <= values["context"] <= _LONGEST_CONTEXT:
        raise fields.unsupported("max_position_embeddings", values["context"], f"1 to {_LONGEST_CONTEXT}")
    base, scaling = _rope_settings(fields)
    return LlamaConfig(**values, **options, rope_base=base, rope_scaling=scaling)


def _mistral(fields: Fields, values: dict[str, Any]) -> LlamaConfig:
    window = fields.read("sliding_window", int, 4096) if fields.get("sliding_window", 4096) is not None else None
    return _from_fields(fields, values, window=window, kv_heads=8)


def _qwen(fields: Fields, values: dict[str, Any], **options: Any) -> LlamaConfig:
    """Return the config of a Qwen2 or Qwen3, all of whose layers have the same window or none."""
    window = None
    if fields.read("use_sliding_window", bool, False) and fields.get("sliding_window") is not None:
        full = min(values["layers"], fields.read("max_window_layers", int, 28))
        kinds = {"full_attention"} if full else set()
        kinds |= {"sliding_attention"} if full < values["layers"] else set()
        if (listed := fields.get("layer_types")) is not None:
            kinds = set(map(str, listed)) if isinstance(listed, list) else {clipped(listed)}
        if len(kinds) != 1 or not kinds <= {"full_attention", "sliding_attention"}:
            raise fields.unsupported("layer_types", sorted(kinds), "the same attention in every layer")
        window = fields.read("sliding_window", int) if kinds == {"sliding_attention"} else None
    return _from_fields(fields, values, window=window, **options)


def _rope_settings(fields: Fields) -> tuple[float, Llama3Scaling | None]:
    """Return base and scaling from `rope_parameters`, or `rope_theta` and `rope_scaling` of older files."""
    new = fields.fields("rope_parameters")
    old = fields.fields("rope_scaling")
    rope = new if new is not None else old if old is not None else Fields({}, fields.origin)
    base = rope.read("rope_theta", float, fields.read("rope_theta", float, 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope.require("partial_rotary_factor", 1.0, 1)
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise rope.unsupported("rope_type", kind, "'default' or 'llama3'")
    factors = {name: rope.read(name, float) for name in _FACTORS}
    return base, Llama3Scaling(**factors, original_context=rope.read("original_max_position_embeddings", int))


def _more_fields(config: LlamaConfig) -> dict[str, Any]:
    """Return the fields of config.json, those of rotary embeddings in the new and in the old form."""
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default" if scaling is None else "llama3", "rope_theta": config.rope_base}
    if scaling is not None:
        rope |= {name: getattr(scaling, name) for name in _FACTORS}
        rope["original_max_position_embeddings"] = scaling.original_context
    windowed = config.window is not None
    return {
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_size, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "rope_parameters": rope, "rope_theta": config.rope_base,
        "rope_scaling": None if scaling is None else rope, "sliding_window": config.window,
        "use_sliding_window": windowed, "max_window_layers": 0 if windowed else config.layers,
    }  # fmt: skip


def _parts(config: LlamaConfig) -> dict[str, tuple[Part, ...]]:
    width, hidden, head = config.width, config.hidden, config.head_size
    q, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    block: dict[str, dict[str, tuple[int, ...]]] = {
        "norm_1": {"input_layernorm": (width,)},
        "attention.qkv": {
            "self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
        },
        "attention.projection": {"self_attn.o_proj": (width, q)},
        "norm_2": {"post_attention_layernorm": (width,)},
        "mlp.gate_up": {"mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width)},
        "mlp.down": {"mlp.down_proj": (width, hidden)},
    }  # fmt: skip
    parts: dict[str, tuple[Part, ...]] = {"embed.weight": (Part("embed_tokens.weight", (config.vocab_size, width)),)}
    for i in range(config.layers):
        for ours, theirs in block.items():
            its = tuple(Part(f"layers.{i}.{name}.weight", shape) for name, shape in theirs.items())
            parts[f"blocks.{i}.{ours}.weight"] = its
            if config.qkv_bias and ours == "attention.qkv":
                biases = tuple(Part(f"layers.{i}.{name}.bias", shape[:1]) for name, shape in theirs.items())
                parts[f"blocks.{i}.{ours}.bias"] = biases
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            name = f"layers.{i}.self_attn.{norm}.weight"
            parts[f"blocks.{i}.attention.{norm}.weight"] = (Part(name, (head,)),)
    parts["norm.weight"] = (Part("norm.weight", (width,)),)
    if not config.tied:
        parts["lm_head.weight"] = (Part("lm_head.weight", (config.vocab_size, width)),)
    return parts


_FIELDS: dict[str, tuple[str, int | float | bool]] = {
    "vocab_size": ("vocab_size", 32000), "context": ("max_position_embeddings", 2048),
    "layers": ("num_hidden_layers", 32), "heads": ("num_attention_heads", 32), "width": ("hidden_size", 4096),
    "hidden": ("intermediate_size", 11008), "eps": ("rms_norm_eps", 1e-6), "tied": ("tie_word_embeddings", False),
}  # fmt: skip


def _layout(
    kind: str, architecture: str, from_fields: Callable[..., LlamaConfig], represents: Callable[[Any], bool],
    **defaults: int,
) -> Layout:  # fmt: skip
    """Return the layout of a model type; `defaults` of config.json where they are not Llama's."""
    return Layout(
        model_type=kind,
        architecture=architecture,
        prefix="model.",
        embedding="embed_tokens.weight",
        fields={ours: (name, defaults.get(ours, default)) for ours, (name, default) in _FIELDS.items()},
        required={
            "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "pretraining_tp": (1,),
            "is_causal": (True,), "partial_rotary_factor": (1.0, 1), "quantization_config": (None,),
        },
        from_fields=from_fields,
        represents=represents,
        more_fields=_more_fields,
        parts=_parts,
        ignored=re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),  # tables saved by older versions
    )  # fmt: skip


_QWEN = {"vocab_size": 151936, "hidden": 22016, "context": 32768}
LAYOUTS = (
    _layout(
        "llama", "LlamaForCausalLM", _from_fields,
        lambda c: not c.qkv_bias and not c.qk_norm and c.window is None,
    ),
    _layout(
        "qwen2", "Qwen2ForCausalLM", partial(_qwen, qkv_bias=True, kv_heads=32),
        lambda c: c.qkv_bias and not c.qk_norm, **_QWEN,
    ),
    _layout(
        "qwen3", "Qwen3ForCausalLM", partial(_qwen, qk_norm=True, kv_heads=32, head_width=128),
        lambda c: c.qk_norm and not c.qkv_bias, **_QWEN,
    ),
    _layout(
        "mistral", "MistralForCausalLM", _mistral, lambda c: not c.qkv_bias and not c.qk_norm,
        hidden=14336, context=131072,
    ),
)  # fmt: skip
"""Llama's format and those of its kin."""


# --- the model -------------------------------------------------------------------------------------------------------
class LlamaAttention(nn.Module):
    """Causal attention with rotary positions; each head of keys and values serves heads / kv_heads of queries."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = config.heads, config.kv_heads, config.head_size
        self.window = config.window
        qkv = (config.heads + 2 * config.kv_heads) * self.head_width
        self.qkv = Linear(config.width, qkv, bias=config.qkv_bias)
        self.q_norm = RMSNorm(self.head_width, eps=config.eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_width, eps=config.eps) if config.qk_norm else None
        self.projection = Linear(config.heads * self.head_width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Cache, int] | None = None) -> Tensor:
        """Attend along the second dimension of x (B, T, width); `cache` is a cache and the layer's index in it."""
        q, k, v = (each.transpose(1, 2) for each in self.split(self.qkv(x)))
        q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
        if cache is not None:
            cache[0].store_prompt(cache[1], k, v)
        o = ops.attention(q, k, v, causal=True, window=None if self.window is None else self.window - 1)
        assert isinstance(o, Tensor)  # for the type checker: no log-sum-exp was requested
        y: Tensor = self.projection(o.transpose(1, 2).reshape(*x.shape[:2], self.heads * self.head_width))
        return y

    def split(self, qkv: Tensor, invariant: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (..., heads, head width), of qkv's result, normalized where they are."""
        heads = qkv.unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_width))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        return self._normalized(q, self.q_norm, invariant), self._normalized(k, self.k_norm, invariant), v

    def _normalized(self, x: Tensor, norm: RMSNorm | None, invariant: bool) -> Tensor:
        return _normalized(norm, x, invariant)


class GatedMLP(nn.Module):
    """A gated MLP, down(silu(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * hidden, bias=False)
        self.down = Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to the last dimension of x (..., width)."""
        y: Tensor = self.down(ops.swiglu(self.gate_up(x)))
        return y


class LlamaBlock(nn.Module):
    """The pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    float8_linears: ClassVar[bool] = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(config.width, eps=config.eps)
        self.attention = LlamaAttention(config)
        self.norm_2 = RMSNorm(config.width, eps=config.eps)
        self.mlp = GatedMLP(config.width, config.hidden)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, cache: tuple[Cache, int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Apply the block to x + residual; return the MLP's result and the residual stream to add it to."""
        y, s = _add_norm(x, residual, self.norm_1)
        y, s = _add_norm(self.attention(y, cos, sin, cache), s, self.norm_2)
        return self.mlp(y), s


class Llama(LanguageModel):
    """A Llama, Qwen2, Qwen3 or Mistral; `lm_head` is None if tied to `embed`, the embedding (vocab_size, width)."""

    _layouts = LAYOUTS
    _layers: ClassVar[tuple[type, type]] = (LlamaAttention, GatedMLP)  # of which `decode` computes the same
    config: LlamaConfig
    blocks: Any  # an nn.ModuleList of LlamaBlock
    lm_head: Linear | None

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, eps=config.eps)
        self.lm_head = None if config.tied else Linear(config.width, config.vocab_size, bias=False)
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        nn.init.normal_(self.embed.weight, std=0.02)

    def hidden(self, idx: Tensor) -> Tensor:
        return self._hidden(idx, None)

    def forward(self, idx: Tensor) -> Tensor:
        return self._logits(self.hidden(idx))

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        self._require_targets(idx, targets)
        rows = self.hidden(idx).flatten(0, 1)
        head: nn.Module = self._head()
        if isinstance(head, LinearInt8):  # whose weight is not kept in floating point
            return ops.cross_entropy(self._logits(rows), targets.flatten().long())
        return ops.linear_cross_entropy(rows, self._output_weight().to(rows.dtype), targets.flatten().long())

    # --- decoding ----------------------------------------------------------------------------------------------------
    def can_cache(self) -> bool:
        unmodified = type(self.norm) is RMSNorm and all(
            type(block) is LlamaBlock
            and (type(block.attention), type(block.mlp)) == self._layers
            and type(block.norm_1) is type(block.norm_2) is RMSNorm
            and type(block.attention.q_norm) is type(block.attention.k_norm) in (RMSNorm, type(None))
            for block in self.blocks
        )
        return unmodified and not any(has_hooks(module) for module in self.modules() if module is not self)

    def cache_shape(self) -> tuple[int, int, int]:
        return self.config.layers, self.config.kv_heads, self.config.head_size

    def prefill(self, idx: Tensor, cache: Cache | None) -> Tensor:
        time = idx.shape[1]
        length = padded_prompt_length(time, self.config.context, cache)
        if cache is not None:
            cache.lengths.fill_(time)
        hidden = self._hidden(nn.functional.pad(idx, (0, length - time)), cache)
        return self._logits(hidden[:, time - 1]).float()

    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        dtype = self.activation_dtype()
        s = self.embed(tokens).to(dtype)
        cos, sin = self._rope_tables(s)
        lengths = cache.lengths + 1
        for block, k, v in zip(self.blocks, cache.k, cache.v, strict=True):
            qkv = decode_linear(block.attention.qkv, s, norm=block.norm_1)
            if self.config.qk_norm:
                qkv = torch.cat(block.attention.split(qkv), -2).flatten(1)
            q = append(qkv, cache.lengths, k, v, cos, sin)
            o = ops.attention_decode(q, *_visible(k, v, lengths, self.config.window))
            s = self._joined(block.attention.projection, o.flatten(1), s)
            h = decode_linear(block.mlp.gate_up, s, norm=block.norm_2, gated=True)
            s = self._joined(block.mlp.down, h, s)
        cache.lengths += 1
        return decode_linear(self._head(), s, norm=self.norm).float()

    def forward_paged(self, ids: Tensor, positions: Tensor, cache: PagedCache, batch: PagedBatch) -> Tensor:
        """Append the new tokens of several sequences to a cache in blocks; see accelerant.nn.serving.

        Args:
            ids, positions: (T,), the new tokens of all rows of the batch and where they stand in their sequences.
            cache: written at batch.slots.

        Returns:
            the final normalized features, (T, width).
        """
        s = self.embed(ids)
        s = s.to(compute_dtype(s))
        cos, sin = self._rope_tables(s)
        window, invariant = self.config.window, batch.invariant
        for block, k_blocks, v_blocks in zip(self.blocks, cache.k, cache.v, strict=True):
            qkv = decode_linear(block.attention.qkv, s, norm=block.norm_1, invariant=invariant)
            if self.config.qk_norm:
                qkv = torch.cat(block.attention.split(qkv, invariant), -2).flatten(1)
            q = append(qkv, positions, k_blocks, v_blocks, cos, sin, batch.slots).squeeze(2)
            o = ops.attention_paged(
                q, k_blocks, v_blocks, batch.block_table, batch.lengths, batch.starts, window=window
            )
            s = self._joined(block.attention.projection, o.flatten(1), s, invariant)
            h = decode_linear(block.mlp.gate_up, s, norm=block.norm_2, gated=True, invariant=invariant)
            s = self._joined(block.mlp.down, h, s, invariant)
        return _normalized(self.norm, s, invariant)

    def score(self, hidden: Tensor, *, invariant: bool = False) -> Tensor:
        """Return float32 logits (T, vocab_size) of what follows features (T, width)."""
        return decode_linear(self._head(), hidden, invariant=invariant).float()

    def _joined(self, layer: nn.Module, x: Tensor, residual: Tensor, invariant: bool = False) -> Tensor:
        """Apply a branch's last layer in a decoding step; return the residual stream with its result added."""
        return decode_linear(layer, x, residual=residual, invariant=invariant)

    def _hidden(self, idx: Tensor, cache: Cache | None) -> Tensor:
        require_tokens(idx, self.config.context)
        x = self.embed(idx)
        x = x.to(compute_dtype(x))
        rows = slice(idx.shape[1]) if self.positions is None else self.positions
        cos, sin = (table[rows] for table in self._rope_tables(x))
        residual: Tensor | None = None
        for layer, block in enumerate(self.blocks):
            x, residual = block(x, residual, cos, sin, None if cache is None else (cache, layer))
        return _add_norm(x, residual, self.norm)[0]

    def _head(self) -> Linear | nn.Embedding:
        """Return the module that holds the output layer's weight."""
        return self.embed if self.lm_head is None else self.lm_head

    def _output_weight(self) -> Tensor:
        """Return the output layer's weight, (vocab_size, width)."""
        return self._head().weight

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is not None:
            y: Tensor = self.lm_head(hidden)
            return y
        rows = ops.matmul(hidden.reshape(-1, self.config.width), self.embed.weight.to(hidden.dtype).t())
        return rows.view(*hidden.shape[:-1], self.config.vocab_size)

    def _rope_tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary tables, float32 (float64 for float64), on the device of x; computed once per device.

        They have a row for each slot of a full cache, whose capacity is the context rounded up.
        """
        config = self.config
        key = (x.device, torch.float64 if x.dtype == torch.float64 else torch.float32)
        if (tables := self._tables.get(key)) is None:
            rows = cache_capacity(config.context)
            with torch.inference_mode(False):  # the tables outlive the mode of this call
                cos, sin = rope_tables(rows, config.head_size, config.rope_base, config.rope_scaling, key[1])
                tables = cos.to(x.device), sin.to(x.device)
            if type(tables[0]) is Tensor:  # not a proxy that exists only during tracing
                self._tables[key] = tables
        return tables


def _visible(k: Tensor, v: Tensor, lengths: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys and values that the last token of each sequence sees, and their number."""
    if window is None or window >= k.shape[2]:
        return k, v, lengths
    starts = (lengths - window).clamp(min=0)
    rows = (starts[:, None] + torch.arange(window, device=k.device))[:, None, :, None]
    index = rows.long().expand(-1, k.shape[1], -1, k.shape[3])
    return k.gather(2, index), v.gather(2, index), lengths - starts


def _add_norm(x: Tensor, residual: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and that sum."""
    if residual is None:
        return norm(x), x
    if norm._forward_hooks or norm._forward_pre_hooks:
        s = x + residual
        return norm(s), s
    return ops.add_rms_norm(x, residual, norm.weight, eps=rms_eps(norm, x))


def decode_linear(
    layer: nn.Module, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None, gated: bool = False,
    invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Apply a linear layer of a decoding step with its norm before and its SwiGLU or residual sum after.

    One kernel does all of it, unless the layer is of another class, which may compute something else, or has a bias in
    addition to what follows it. invariant: a row's result has the same bits in any batch.
    """
    forward = type(layer).forward  # of a subclass that only holds its weight in another way, too
    known = forward in (Linear.forward, LinearInt8.forward, LinearInt4.forward) or isinstance(layer, nn.Embedding)
    bias: Tensor | None = getattr(layer, "bias", None)
    weight: Any = None
    scale, zero = None, None
    if isinstance(layer, LinearInt8):
        known = known and not layer.dynamic
        weight, scale = layer.weight_int8, layer.scale
    elif isinstance(layer, LinearInt4):
        weight, scale, zero = layer.weight_int4, layer.scale, layer.zero
    elif known:
        weight = cast("Linear", layer).weight.to(x.dtype)
    gain, eps = (None, 0.0) if norm is None else (norm.weight, rms_eps(norm, x))
    if known and (invariant or _best_exact(x, weight)):
        return _invariant.linear(x, weight, bias, scale, zero, norm=gain, eps=eps, residual=residual, gated=gated)
    if known and weight.dtype != torch.uint8 and (bias is None or (residual is None and not gated)):
        if bias is not None:
            residual = bias.to(x.dtype).expand(x.shape[0], -1).contiguous()
        return linear(x, weight, scale, norm=gain, eps=eps, residual=residual, gated=gated)
    if invariant:
        raise UnsupportedCase(f"a {type(layer).__name__} may compute a row by its batch: use Engine(fast=True)")
    y: Tensor = layer(_normalized(norm, x, False))
    if gated:
        y = ops.swiglu(y)
    return y if residual is None else y + residual


_MANY_ROWS = 128
"""From this many rows on, products of int8 weights are faster in floating point."""


def _best_exact(x: Tensor, weight: Tensor) -> bool:
    """Return whether the products whose rows do not depend on one another are the fastest, too."""
    few = x.is_cuda and x.shape[0] < _MANY_ROWS
    return few and (weight.dtype == torch.uint8 or (weight.dtype == torch.int8 and len(x) > 1 and takes_planes(x)))


def _normalized(norm: RMSNorm | None, x: Tensor, invariant: bool) -> Tensor:
    """Return the norm of x, or x without one. invariant: a row's result has the same bits in any batch."""
    if norm is None:
        return x
    y: Tensor = _invariant.rms_norm(x, norm.weight, rms_eps(norm, x)) if invariant else norm(x)
    return y


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
    source = described(path, Llama._layouts)  # names an unsupported model before its tokenizer is read
    folder = Path(path)
    tokenizer = ModelTokenizer(folder) if folder.is_dir() else ModelTokenizer(folder.parent, source.fields)
    model = built(Llama, source, dtype_of(dtype), device, quantize)
    return model.eval().requires_grad_(False), tokenizer
