"""The block and its pieces in plain PyTorch, in whatever dtype comes; differentiable as often as one likes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["block_reference", "dgelu_reference", "embed_reference"]


def block_reference(
    s: Tensor, heads: int, eps: tuple[float, float], params: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor]:
    """The pre-norm block of GPT-2: the last branch and the residual stream that it is to be added to.

    s1 = s + projection(attention(qkv(norm_1(s))))    branch = down(gelu(up(norm_2(s1))))

    Args:
        s: (B, T, W).
        heads: divides W.
        eps: of the two norms.
        params: weight and bias of norm_1, qkv, projection, norm_2, up and down, in any dtype.

    Source: Radford et al. 2019, section 2.3; Vaswani et al. 2017, arXiv:1706.03762, equation 1.
    """
    low = tuple(None if param is None else param.to(s.dtype) for param in params)
    n1, c1, qkv, c2, projection, c3, n2, c4, up, c5, down, c6 = low
    assert qkv is not None and projection is not None and up is not None and down is not None  # noqa: PT018  one fact
    B, T, W = s.shape
    y = functional.layer_norm(s, (W,), n1, c1, eps[0])
    q, k, v = functional.linear(y, qkv, c2).view(B, T, 3, heads, W // heads).permute(2, 0, 3, 1, 4).unbind(0)
    scores = (q @ k.transpose(-1, -2)) * (W // heads) ** -0.5
    later = torch.ones(T, T, dtype=torch.bool, device=s.device).triu(1)
    mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
    s = s + functional.linear(mixed.transpose(1, 2).reshape(B, T, W), projection, c3)
    hidden = functional.gelu(
        functional.linear(functional.layer_norm(s, (W,), n2, c4, eps[1]), up, c5), approximate="tanh"
    )
    return functional.linear(hidden, down, c6), s


def dgelu_reference(dy: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of z through the tanh-approximated gelu, gelu(z), and the sums of the gradient's columns."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        a = functional.gelu(z, approximate="tanh")
        (dz,) = torch.autograd.grad(a, z, dy)
    return dz, a.detach(), dz.sum(0)


def embed_reference(tokens: Tensor, table: Tensor, places: Tensor) -> Tensor:
    """Rows of the table by the tokens (B, T), plus the first T rows of places."""
    return table[tokens] + places[: tokens.shape[1]]
