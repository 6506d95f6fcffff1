# ruff: noqa: D102  methods without a docstring are documented in LanguageModel
"""GPT: a decoder-only transformer in GPT-2's form, with learned positions and an output layer tied to the embedding.

logits = norm(blocks(wte[tokens] + wpe[positions])) @ wte^T    (lm_head^T if untied)

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; initialization as in its
section 2.3 (residual projections scaled by 1/sqrt(2 * layers)).
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import ops
from accelerant._renamed import understood_arguments
from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.nn.layers import LayerNorm, Linear, compute_dtype, fuses, has_hooks, is_fusable, lowered
from accelerant.nn.models.hugging_face import Fields, Layout, Part
from accelerant.nn.models.language_model import Cache, LanguageModel, ModelConfig, padded_prompt_length, require_tokens
from accelerant.nn.transformer import MultiHeadAttention, TransformerBlock
from accelerant.ops._per_example import sink_of
from accelerant.ops.cross_entropy import mean_by_torch
from accelerant.ops.decode.steps import append
from accelerant.ops.transformer.block import ColumnSums, fused_embed, tied_loss

_PAD_MULTIPLE = 64  # rows of the vocabulary matrix: tensor cores work on whole tiles


@understood_arguments(
    n_layer="layers", n_head="heads", n_embd="width", n_positions="context", n_ctx="context", block_size="context",
    layer_norm_epsilon="eps", tie_word_embeddings="tied",
)  # fmt: skip
@dataclass(frozen=True, slots=True)
class GPTConfig(ModelConfig):
    """The dimensions of a GPT; the defaults are GPT-2 124M.

    Attributes:
        vocab_size: number of tokens; padded internally to a multiple of 64.
        context: longest sequence, in tokens.
        layers: number of transformer blocks.
        heads: attention heads in each block; divides width.
        width: features of each position.
        bias: whether linear layers and norms have a bias.
        eps: added to the variance in each norm.
        tied: whether the output layer shares the embedding's weight.
    """

    vocab_size: int = 50257
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    bias: bool = True
    eps: float = 1e-5
    tied: bool = True

    def __post_init__(self) -> None:
        self.require_positive("vocab_size", "context", "layers", "heads", "width")
        if self.width % self.heads:
            raise ConfigError(f"GPTConfig.width must be a multiple of heads, got {self.width} and {self.heads}")

    @property
    def padded_vocab_size(self) -> int:
        """The number of rows of the vocabulary matrix in memory."""
        return -(-self.vocab_size // _PAD_MULTIPLE) * _PAD_MULTIPLE


# --- Hugging Face's form ---------------------------------------------------------------------------------------------
def _from_fields(fields: Fields, values: dict[str, Any]) -> GPTConfig:
    fields.require("n_inner", None, 4 * values["width"])
    return GPTConfig(**values)  # dropout rates are ignored


_GPT2_END = 50256  # GPT-2's token at the end of a text, the default of its config


def _more_fields(config: GPTConfig) -> dict[str, Any]:
    if not config.bias:
        raise UnsupportedCase("GPT2LMHeadModel always has biases, this model has none (bias=False)")
    own = {} if config.vocab_size > _GPT2_END else {"bos_token_id": None, "eos_token_id": None}
    return {
        **own, "n_ctx": config.context, "n_inner": None, "activation_function": "gelu_new",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0), "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
    }  # fmt: skip


def _parts(config: GPTConfig) -> dict[str, tuple[Part, ...]]:
    width = config.width
    parts = {
        "wte.weight": Part("wte.weight", (config.vocab_size, width)),
        "wpe.weight": Part("wpe.weight", (config.context, width)),
    }
    for i in range(config.layers):
        block, layer = f"blocks.{i}.", f"h.{i}."
        for name, norm in (("norm_1", "ln_1"), ("norm_2", "ln_2")):
            parts[f"{block}{name}.weight"] = Part(f"{layer}{norm}.weight", (width,))
            parts[f"{block}{name}.bias"] = Part(f"{layer}{norm}.bias", (width,))
        for name, conv, inner, outer in (
            ("attention.qkv", "attn.c_attn", width, 3 * width),
            ("attention.projection", "attn.c_proj", width, width),
            ("mlp.up", "mlp.c_fc", width, 4 * width),
            ("mlp.down", "mlp.c_proj", 4 * width, width),
        ):
            parts[f"{block}{name}.weight"] = Part(f"{layer}{conv}.weight", (inner, outer), transposed=True)
            parts[f"{block}{name}.bias"] = Part(f"{layer}{conv}.bias", (outer,))
    parts["norm.weight"] = Part("ln_f.weight", (width,))
    parts["norm.bias"] = Part("ln_f.bias", (width,))
    if not config.tied:
        parts["lm_head.weight"] = Part("lm_head.weight", (config.vocab_size, width))
    return {name: (part,) for name, part in parts.items()}


LAYOUT = Layout(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    embedding="wte.weight",
    fields={
        "vocab_size": ("vocab_size", 50257), "context": ("n_positions", 1024), "layers": ("n_layer", 12),
        "heads": ("n_head", 12), "width": ("n_embd", 768), "eps": ("layer_norm_epsilon", 1e-5),
        "tied": ("tie_word_embeddings", True),
    },
    required={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,), "is_causal": (True,),
    },
    from_fields=_from_fields,
    more_fields=_more_fields,
    parts=_parts,
    ignored=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),  # masks saved by older versions
)  # fmt: skip


# --- the model -------------------------------------------------------------------------------------------------------
class GPT(LanguageModel):
    """A GPT language model.

    Rows of `wte` (and of `lm_head` if untied) past `vocab_size` are zero, get no gradient, and are left out of
    `state_dict()`.
    """

    _layouts = (LAYOUT,)
    config: GPTConfig
    blocks: Any  # an nn.ModuleList of TransformerBlock

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(
            TransformerBlock(config.width, config.heads, bias=config.bias, eps=config.eps) for _ in range(config.layers)
        )
        self.norm = LayerNorm(config.width, eps=config.eps, bias=config.bias)
        self.lm_head = None if config.tied else Linear(config.width, config.padded_vocab_size, bias=False)
        self.reset_parameters()
        self.register_state_dict_post_hook(_strip_padding)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.register_load_state_dict_pre_hook(_restore_padding)  # type: ignore[no-untyped-call]  # as above

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw initial weights with torch's global generator: GPT-2's, or others in proportion to their deviation."""
        nn.init.normal_(self.wte.weight, std=std)
        nn.init.normal_(self.wpe.weight, std=std / 2)
        if self.lm_head is not None:
            self.lm_head.reset_parameters(std)
        with torch.no_grad():
            self.wte.weight[self.config.vocab_size :].zero_()
            self._output_weight()[self.config.vocab_size :].zero_()
        residual_std = std / math.sqrt(2 * self.config.layers)
        for block in self.blocks:
            block.attention.projection.reset_parameters(residual_std)
            block.mlp.down.reset_parameters(residual_std)
            if std != 0.02:  # otherwise as they were drawn
                block.attention.qkv.reset_parameters(std)
                block.mlp.up.reset_parameters(std)

    def parameter_count(self) -> int:
        """Return the number of trained values without padding."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.width
        return super().parameter_count() - (padding if self.lm_head is None else 2 * padding)

    def _output_weight(self) -> Tensor:
        """Return the output layer's weight, (padded vocabulary, width)."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def hidden(self, idx: Tensor) -> Tensor:
        require_tokens(idx, self.config.context)
        return self._hidden(idx)[0]

    def _hidden(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Return the final features, and the vocabulary matrix for a tied output layer (see Embed)."""
        x, table = self._embedded(idx)
        residual: Tensor | None = None
        sums: ColumnSums | None = None
        for block in self.blocks:
            if type(block) is TransformerBlock and block.fuses(x) and not has_hooks(block):
                x, residual, sums = block.split(x, residual, sums)
            else:
                x, residual, sums = block(x if residual is None else x + residual), None, None
        norm = self.norm
        if residual is None or type(norm) is not LayerNorm or has_hooks(norm):
            return norm(x if residual is None else x + residual), table
        y, _ = ops.add_layer_norm(x, residual, norm.weight, norm.bias, eps=norm.eps)
        return y, table

    def _embedded(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of both embeddings in compute dtype, and the vocabulary matrix."""
        table = self.wte.weight
        dtype = compute_dtype(table)
        if self.positions is None and self._fuses_embeddings(idx):
            return fused_embed(idx, table, self.wpe.weight, dtype)
        positions = torch.arange(idx.shape[1], device=idx.device) if self.positions is None else self.positions
        tokens, places = _looked_up(self.wte, idx), _looked_up(self.wpe, positions)
        return (tokens + places).to(dtype), table

    def _fuses_embeddings(self, idx: Tensor) -> bool:
        """Return whether both embeddings run as one autograd function in place of the modules' forward."""
        table, positions = self.wte.weight, self.wpe.weight
        if not (_is_plain(self.wte) and _is_plain(self.wpe)):
            return False
        return fuses(table, compute_dtype(table)) and is_fusable(idx) and is_fusable(positions)

    def forward(self, idx: Tensor) -> Tensor:
        logits = self._padded_logits(self.hidden(idx))
        return logits[:, : self.config.vocab_size].view(*idx.shape, self.config.vocab_size)

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        self._require_targets(idx, targets)
        hidden, table = self._hidden(idx)
        head = () if self.lm_head is None else (self.lm_head,)
        if fuses(hidden, hidden.dtype, *head) and is_fusable(targets) and is_fusable(table):
            rows = hidden.reshape(-1, self.config.width)
            weight = self._output_weight()
            cast = lowered(weight, hidden.dtype)
            if weight is not self.wte.weight or sink_of(weight) is not None:
                table = weight  # not the table from Embed, where both gradients meet
            return tied_loss(rows, table, cast, targets.reshape(-1), self.config.vocab_size, -100)
        logits = self._padded_logits(hidden)
        if self.config.padded_vocab_size != self.config.vocab_size:
            logits[:, self.config.vocab_size :] = -math.inf  # in place: a slice would copy the largest tensor
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return mean_by_torch(wide, targets.reshape(-1).long())

    # --- decoding ----------------------------------------------------------------------------------------------------
    def can_cache(self) -> bool:
        if any(
            type(block) is not TransformerBlock or type(block.attention) is not MultiHeadAttention or not block.is_gpt2
            for block in self.blocks
        ):
            return False
        called = (self.wte, self.wpe, *self.blocks, *(block.attention for block in self.blocks))
        return not any(map(has_hooks, called))

    def cache_shape(self) -> tuple[int, int, int]:
        return self.config.layers, self.config.heads, self.config.width // self.config.heads

    def prefill(self, idx: Tensor, cache: Cache | None) -> Tensor:
        time = idx.shape[1]
        length = padded_prompt_length(time, self.config.context, cache)
        idx = F.pad(idx, (0, length - time))  # on the right, to which causal attention does not look
        if cache is None:
            return self._next_logits(self.hidden(idx)[:, time - 1])
        x = (self.wte(idx) + self.wpe(torch.arange(length, device=idx.device))).to(self.activation_dtype())
        for layer, block in enumerate(self.blocks):
            attention = block.attention
            heads: Tensor = attention.qkv(block.norm_1(x)).view(*idx.shape, 3, attention.heads, -1)
            q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
            cache.store_prompt(layer, k, v)
            o = ops.attention(q, k, v, causal=True)
            assert isinstance(o, Tensor)  # for the type checker: no log-sum-exp was requested
            x = x + attention.projection(o.transpose(1, 2).reshape(x.shape))
            x = x + block.mlp(block.norm_2(x))
        cache.lengths.fill_(time)
        return self._next_logits(self.norm(x[:, time - 1]))

    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        positions = cache.lengths.clamp(max=self.config.context - 1)
        x = (self.wte(tokens) + self.wpe(positions)).to(self.activation_dtype())
        lengths = cache.lengths + 1
        for block, k, v in zip(self.blocks, cache.k, cache.v, strict=True):
            q = append(block.attention.qkv(block.norm_1(x)), cache.lengths, k, v)
            o = ops.attention_decode(q, k, v, lengths)
            x = x + block.attention.projection(o.flatten(1))
            x = x + block.mlp(block.norm_2(x))
        cache.lengths += 1
        return self._next_logits(self.norm(x))

    def _next_logits(self, hidden: Tensor) -> Tensor:
        return self._padded_logits(hidden)[:, : self.config.vocab_size].float()

    def _padded_logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is not None:
            logits: Tensor = self.lm_head(hidden)
            return logits.reshape(-1, self.config.padded_vocab_size)
        rows = hidden.reshape(-1, self.config.width)
        return ops.linear(rows, self.wte.weight.to(rows.dtype))


def _is_plain(layer: nn.Embedding) -> bool:
    """Return whether an embedding's forward can be replaced by an op."""
    return type(layer) is nn.Embedding and not has_hooks(layer, feeds_sinks=True)


def _looked_up(layer: nn.Embedding, idx: Tensor) -> Tensor:
    rows: Tensor = ops.embedding(idx, layer.weight) if _is_plain(layer) else layer(idx)
    return rows


def _strip_padding(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    assert isinstance(module, GPT)  # for the type checker: registered on GPT alone
    for name in _padded_parameters(module):
        state[prefix + name] = state[prefix + name][: module.config.vocab_size]


def _restore_padding(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    assert isinstance(module, GPT)  # for the type checker: registered on GPT alone
    for name in _padded_parameters(module):
        weight = state.get(prefix + name)
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] == module.config.vocab_size:
            missing = module.config.padded_vocab_size - module.config.vocab_size
            state[prefix + name] = F.pad(weight, (0, 0, 0, missing))


def _padded_parameters(model: GPT) -> tuple[str, ...]:
    """Return the names of the parameters with a row for each token of the vocabulary."""
    return ("wte.weight",) if model.config.tied else ("wte.weight", "lm_head.weight")
