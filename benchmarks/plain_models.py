"""Language models as one writes them in plain PyTorch: the peers of ours, with torch's functions only.

Names and order of the parameters are those of nn.GPT and nn.Llama, so that a state_dict fits both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerant.nn import GPT, GPTConfig, LlamaConfig
from accelerant.ops.rope import rope_tables

__all__ = ["PlainGPT", "PlainLlama"]


class PlainGPT(nn.Module):
    """GPT-2.

    Args:
        per_example: look positions up for each example, as Opacus requires; else once for the batch.
    """

    def __init__(self, config: GPTConfig, *, per_example: bool = False) -> None:
        super().__init__()
        self.config, self.per_example = config, per_example
        width, bias = config.width, config.bias
        self.wte = nn.Embedding(config.padded_vocab_size, width)
        self.wpe = nn.Embedding(config.context, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_1": nn.LayerNorm(width, eps=config.eps, bias=bias),
                    "attention": nn.ModuleDict(
                        {"qkv": nn.Linear(width, 3 * width, bias), "projection": nn.Linear(width, width, bias)}
                    ),
                    "norm_2": nn.LayerNorm(width, eps=config.eps, bias=bias),
                    "mlp": nn.ModuleDict(
                        {"up": nn.Linear(width, 4 * width, bias), "down": nn.Linear(4 * width, width, bias)}
                    ),
                }
            )
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(width, eps=config.eps, bias=bias)
        self.lm_head = None if config.tied else nn.Linear(width, config.padded_vocab_size, bias=False)

    @classmethod
    def like(cls, model: GPT, *, per_example: bool = False) -> PlainGPT:
        """Return a plain model with the weights of one of ours, on its device."""
        plain = cls(model.config, per_example=per_example).to(model.wte.weight.device)
        with torch.no_grad():
            for to, parameter in zip(plain.parameters(), model.parameters(), strict=True):
                to.copy_(parameter)
        return plain

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, vocabulary) of tokens (B, T)."""
        B, T = tokens.shape
        positions = torch.arange(T, device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions.repeat(B, 1) if self.per_example else positions)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)  # for the type checker: ModuleList is untyped
            attention, mlp = block["attention"], block["mlp"]
            assert isinstance(attention, nn.ModuleDict) and isinstance(mlp, nn.ModuleDict)  # noqa: PT018  as above
            qkv = attention["qkv"](block["norm_1"](x)).view(B, T, 3, self.config.heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + attention["projection"](mixed.transpose(1, 2).reshape(B, T, -1))
            hidden = functional.gelu(mlp["up"](block["norm_2"](x)), approximate="tanh")
            x = x + mlp["down"](hidden)
        x = self.norm(x)
        y: Tensor = functional.linear(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)
        return y[..., : self.config.vocab_size]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean cross entropy of targets (B, T), or the logits without targets."""
        logits = self.logits(tokens)
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class PlainLlamaBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the unit that is compiled and sharded."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.width, (config.heads + 2 * config.kv_heads) * config.head_size
        self.norm_1 = nn.RMSNorm(width, eps=config.eps)
        self.attention = nn.ModuleDict(
            {"qkv": nn.Linear(width, heads, bias=False),
             "projection": nn.Linear(config.heads * config.head_size, width, bias=False)}
        )  # fmt: skip
        self.norm_2 = nn.RMSNorm(width, eps=config.eps)
        self.mlp = nn.ModuleDict(
            {"gate_up": nn.Linear(width, 2 * config.hidden, bias=False),
             "down": nn.Linear(config.hidden, width, bias=False)}
        )  # fmt: skip

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the block to x (B, T, width), with the tables of the rotary positions (T, head / 2)."""
        B, T = x.shape[:2]
        q, kv = self.config.heads, self.config.kv_heads
        heads = self.attention["qkv"](self.norm_1(x)).view(B, T, q + 2 * kv, -1).transpose(1, 2)
        rotated, v = heads[:, : q + kv], heads[:, q + kv :]
        first, second = rotated.float().chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(v.dtype)
        mixed = functional.scaled_dot_product_attention(
            rotated[:, :q], rotated[:, q:], v, is_causal=True, enable_gqa=True
        )
        x = x + self.attention["projection"](mixed.transpose(1, 2).reshape(B, T, -1))
        gate, up = self.mlp["gate_up"](self.norm_2(x)).chunk(2, -1)
        y: Tensor = x + self.mlp["down"](functional.silu(gate) * up)
        return y


class PlainLlama(nn.Module):
    """A Llama."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(PlainLlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.eps)
        self.lm_head = None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, vocabulary) of tokens (B, T)."""
        if self._tables is None:
            config: Any = self.config
            self._tables = rope_tables(
                config.context, config.head_size, config.rope_base, config.rope_scaling, device=tokens.device
            )
        cos, sin = (table[: tokens.shape[1]].float() for table in self._tables)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        y: Tensor = functional.linear(x, self.embed.weight) if self.lm_head is None else self.lm_head(x)
        return y
