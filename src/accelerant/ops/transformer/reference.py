"""The transformer block and its parts in plain PyTorch, in any dtype and differentiable any number of times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from accelerant.ops.attention.reference import attention_reference


class BlockSpec(NamedTuple):
    """The configuration of a transformer block.

    Attributes:
        eps: added to the variance in the first and in the second norm.
        causal: whether a position attends to no later one.
        window: how many positions back attention reaches; -1 for all.
        scale: of the attention scores; None for 1 / sqrt(head width).
        approximate: form of GELU, "tanh" or "none".
        post_norm: whether norms follow the residual additions (BERT) or precede the branches (GPT-2, ViT).
        joined: whether a pre-norm block returns one tensor, the sum of its last branch and the residual stream.
    """

    heads: int
    eps: tuple[float, float]
    causal: bool = True
    window: int = -1
    scale: float | None = None
    approximate: str = "tanh"
    post_norm: bool = False
    joined: bool = False


def packed_attention_reference(qkv: Tensor, causal: bool, window: int, scale: float | None) -> Tensor:
    """Return the self-attention of q, k and v packed as (B, T, 3, H, D): (B, T, H D)."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    o = attention_reference(q, k, v, causal=causal, scale=scale, window=None if window < 0 else window)
    assert isinstance(o, Tensor)  # for the type checker: no log-sum-exp was requested
    return o.transpose(1, 2).flatten(2)


def mlp_reference(x: Tensor, params: Sequence[Tensor | None], approximate: str = "tanh") -> Tensor:
    """Return down(gelu(up(x))); `params` are the weight and bias of up and of down, in any dtype."""
    up, up_bias, down, down_bias = (None if param is None else param.to(x.dtype) for param in params)
    assert up is not None and down is not None  # noqa: PT018  for the type checker
    return functional.linear(
        functional.gelu(functional.linear(x, up, up_bias), approximate=approximate), down, down_bias
    )


def block_reference(x: Tensor, spec: BlockSpec, params: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Apply a transformer block.

    Pre-norm (GPT-2, ViT):  s = x + projection(attention(qkv(norm_1(x))))    y = down(gelu(up(norm_2(s))))
    Post-norm (BERT):       h = norm_1(x + projection(attention(qkv(x))))    y = norm_2(h + down(gelu(up(h))))

    Args:
        x: (B, T, W).
        params: weight and bias of norm_1, qkv, projection, norm_2, up and down, in any dtype; a bias may be None.

    Returns:
        y and s; (y + s, None) if `spec.joined`, (y, None) in post-norm.

    Source: Radford et al. 2019, section 2.3; Devlin et al. 2019, arXiv:1810.04805, section 3; Vaswani et al. 2017,
    arXiv:1706.03762, equation 1.
    """
    n1, c1, qkv, c2, projection, c3, n2, c4 = (None if param is None else param.to(x.dtype) for param in params[:8])
    assert qkv is not None and projection is not None  # noqa: PT018  for the type checker
    B, T, W = x.shape

    def attention(y: Tensor) -> Tensor:
        heads = functional.linear(y, qkv, c2).view(B, T, 3, spec.heads, W // spec.heads)
        o = packed_attention_reference(heads, spec.causal, spec.window, spec.scale)
        return functional.linear(o, projection, c3)

    if spec.post_norm:
        h = functional.layer_norm(x + attention(x), (W,), n1, c1, spec.eps[0])
        y = h + mlp_reference(h, params[8:], spec.approximate)
        return functional.layer_norm(y, (W,), n2, c4, spec.eps[1]), None
    s = x + attention(functional.layer_norm(x, (W,), n1, c1, spec.eps[0]))
    y = mlp_reference(functional.layer_norm(s, (W,), n2, c4, spec.eps[1]), params[8:], spec.approximate)
    return (y + s, None) if spec.joined else (y, s)
