# ruff: noqa: D102  Contribution documents the methods of its subclasses
"""Contributions to a parameter's per-example gradients, kept until each example's weight is known.

Memory, in bytes for B examples of T positions, s bytes a value:
    Rows    both factors of a matrix's gradient: B T (N + K) s; autograd would keep the inputs anyway
    Dense   formed per-example gradients: B times the parameter, in the dtype they were computed in
    Lookup  gradients of an embedding's rows: B T D values of float32, or better

Squared norms of a matrix's per-example gradients are computed in one of two ways. With inputs A (B, T, K) and output
gradients G (B, T, N), example i's gradient is g_i = G_i^T A_i, (N, K):

    ghost        ||g_i||^2 = sum over t, s of (A_it . A_is) (G_it . G_is):  2 T^2 (N + K) operations more
    instantiate  form all g_i, (B, N, K), and keep them for the weighted sum: written once and read once, or twice
                 where the kernel that forms them does not square them too, as hopper.cu does

Source: Bu, Wang, Zha and Karypis 2022, arXiv:2210.00038, section 2 (book-keeping) and 3.1 (the choice); the ghost norm
is Goodfellow's, arXiv:1510.01799, for T = 1 and Li et al.'s, arXiv:2110.05679, section 4, for any T.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.ops._launch import add_product
from accelerant.ops.transformer.ends import scaled
from accelerant.privacy.dp.clipping import launch
from accelerant.privacy.dp.clipping.launch import Gram, chunks, wide
from accelerant.runtime.dispatch.tuning import Tuned


class Contribution(ABC):
    """A part of one parameter's per-example gradients."""

    __slots__ = ()

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the gradients or their factors: under autocast not that of the parameter."""

    @property
    def formed(self) -> bool:
        """Whether the gradients are formed, so that norms are of the very numbers that are summed."""
        return False

    @abstractmethod
    def bound(self) -> Tensor:
        """Return the squared norm of each example's gradient, (B,), in float32 or better.

        Of gradients that are not formed: the square of an upper bound that covers the rounding of `total` (launch.py).
        """

    def terms(self) -> Tensor | Gram:
        """Return terms of `bound`, (B, n), or what `launch.bounded` takes them of."""
        return self.bound()[:, None]

    @abstractmethod
    def dense(self) -> Dense:
        """Form the gradients."""

    def prefers_ghost(self) -> bool:
        """Return whether norms of the factors, and a product for the sum, cost less than to form the gradients."""
        return False

    def chosen(self, norms: str) -> Contribution:
        """Return this contribution or its formed gradients, by "ghost", "instantiate" or "auto", the cheaper one."""
        ghost = self.formed or norms == "ghost" or (norms == "auto" and self.prefers_ghost())
        return self if ghost else self.dense()

    @abstractmethod
    def total(self, weights: Tensor, drop: Tensor | None, shape: torch.Size) -> Tensor:
        """Return the sum over examples of weights[i] times its gradient, in float32 or better.

        Args:
            drop: (B,) bool: examples that add exactly 0, even if they hold NaN; None for none.
        """

    def add_to(self, grad: Tensor, weights: Tensor, drop: Tensor | None) -> None:
        """Add that sum to a dense gradient of its dtype: float32 or better."""
        grad.add_(self.total(weights, drop, grad.shape))


_OPERATIONS_PER_BYTE = {"cuda": (300.0, 300.0), "cpu": (10.0, 35.0)}
"""Operations that a device does while a byte of g_i is written and read; the second for more than _CACHED_BYTES.

cuda: 600 T/s and 4 TB/s, of an H200 in bfloat16 with hopper.cu: written once, read once. A separate kernel for squares
reads twice, which would make it 450; only sums of 340 to 415 positions (at 768 x 768) would be computed otherwise. cpu:
72 G/s of one core in float32, measured; 0.14 ns a byte, and 0.5 for more than _CACHED_BYTES, in new pages each time."""

_CACHED_BYTES = 16 << 20


def prefers_ghost(B: int, T: int, N: int, K: int, itemsize: int, device: str) -> bool:
    """Return whether the ghost norm over T positions is faster than to form, keep and sum B gradients (N, K).

    Both multiply G_i^T A_i once (the ghost norm in the weighted sum, all examples at once), so that is left out.
    """
    small, large = _OPERATIONS_PER_BYTE.get(device, _OPERATIONS_PER_BYTE["cpu"])
    per_byte = small if B * N * K * itemsize <= _CACHED_BYTES else large
    return per_byte * N * K * itemsize >= 2.0 * T * T * (N + K)


_NORMS: Tuned[str] = Tuned(
    "clip_norm",
    default=lambda B, T, N, K, itemsize: "ghost" if prefers_ghost(B, T, N, K, itemsize, "cuda") else "instantiate",
    candidates=lambda *sizes: ("ghost", "instantiate"),
)
"""The norm of a linear map's gradients on a GPU: by the rule, or by the result of a race of both, sums included."""


@dataclass(slots=True)
class Rows(Contribution):
    """A matrix's gradient by its factors: a (B, T, K), g (B, T, N); example i's is g_i^T a_i.

    Attributes:
        consumed: nothing reads g after the sum, so that dropped examples may be cleared in place.
    """

    a: Tensor
    g: Tensor
    consumed: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return self.a.dtype

    def bound(self) -> Tensor:
        return launch.bounded([self.terms()])[:, 0]

    def terms(self, lookup: Lookup | None = None) -> Gram:
        """Return the terms of the bounds; of the sum of both gradients, where `lookup` is of the same parameter."""
        squares, masses = launch.ghost_terms(self.a, self.g)
        if lookup is not None:
            other = lookup.bound()[:, None].to(squares.dtype)
            twice = cross(lookup, self)[:, None].mul_(2).to(squares.dtype)
            squares, masses = torch.cat((squares, other, twice), 1), torch.cat((masses, other.sqrt()), 1)
        shape = (*self.a.shape[1:], self.g.shape[2])
        return Gram.of(squares, masses, shape, launch.factor_roundoff(self.a.dtype, self.a.device))

    def dense(self) -> Dense:
        return Dense(*launch.form(self.a, self.g))  # in the dtype of the factors

    def prefers_ghost(self) -> bool:
        """Apply the rule; on a GPU the result of a race of both norms, if there was one."""
        a, (B, T, K), N = self.a, self.a.shape, self.g.shape[2]
        sizes = (B, T, N, K, a.element_size())
        if a.device.type != "cuda" or T == 1:
            return prefers_ghost(*sizes, a.device.type)

        def run(norm: str) -> None:
            contribution = self.chosen(norm)
            contribution.bound()
            weights = torch.ones(B, dtype=wide(a.dtype), device=a.device)
            contribution.total(weights, None, torch.Size((N, K)))

        return _NORMS(a.device, a.dtype, sizes, run) == "ghost"

    def total(self, weights: Tensor, drop: Tensor | None, shape: torch.Size) -> Tensor:
        """Multiply all rows at once, as for an ordinary weight gradient."""
        g, a = self._weighted(weights, drop)
        if a.dtype != wide(a.dtype):
            return torch.mm(g, a, out_dtype=torch.float32).view(shape)
        return torch.mm(g, a).view(shape)

    def add_to(self, grad: Tensor, weights: Tensor, drop: Tensor | None) -> None:
        """Add within the product, where the library can."""
        if not launch.low_product(self.a.dtype, self.a.device):
            grad.add_(self.total(weights, drop, grad.shape))
            return
        g, a = self._weighted(weights, drop)
        add_product(grad.view(g.shape[0], a.shape[1]), g, a)

    def _weighted(self, weights: Tensor, drop: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return both factors of the sum, (N, B T) and (B T, K).

        In bfloat16 where products of it are summed in float32: float16 has no room for small weights. Else in float32
        or better, since a sum over examples in 16 bits would be rounded by more than an example adds.
        """
        low = launch.low_product(self.a.dtype, self.a.device)
        dtype = torch.bfloat16 if low else launch.weighted_dtype(wide(self.a.dtype), self.g)
        weights = weights.to(dtype) if dtype == torch.float64 else weights
        a, g = launch.factors(self.a, self.g, weights, drop, dtype, consumed=self.consumed)
        return g.flatten(0, 1).t(), a.flatten(0, 1)


@dataclass(slots=True)
class Dense(Contribution):
    """Formed per-example gradients, (B, ...), and their squared norms where these are known.

    Attributes:
        known: terms of the squared norms, (B, n), yet to be multiplied by the square of `factor`.
    """

    each: Tensor
    known: Tensor | None = None
    factor: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.each.dtype

    @property
    def formed(self) -> bool:
        return True

    def bound(self) -> Tensor:
        return self.terms().sum(1)

    def terms(self) -> Tensor:
        """Return squares of the numbers that are summed: no product with the factor is rounded."""
        squares = launch.squares(self.each)[:, None] if self.known is None else self.known
        return squares if self.factor is None else squares.double() * self.factor.double().square()

    def multiplied(self) -> Dense:
        """Apply the factor, in place."""
        return self if self.factor is None else Dense(scaled(self.each, self.factor))

    def dense(self) -> Dense:
        return self

    def total(self, weights: Tensor, drop: Tensor | None, shape: torch.Size) -> Tensor:
        return launch.weighted_sum(self.each, self._weighted(weights), drop).view(shape)

    def add_to(self, grad: Tensor, weights: Tensor, drop: Tensor | None) -> None:
        """Add in the pass that sums."""
        launch.weighted_sum(self.each, self._weighted(weights), drop, grad)

    def _weighted(self, weights: Tensor) -> Tensor:
        return weights if self.factor is None else weights * self.factor.to(weights.dtype)


@dataclass(slots=True)
class Lookup(Contribution):
    """An embedding's gradient: tokens (B, T), g (B, T, D); row v of example i's is the sum of g where the token is v.

    Attributes:
        V: rows of the table.
        distinct: no token repeats within an example, except with rows of 0: then g is the gradient itself.
    """

    tokens: Tensor
    g: Tensor
    V: int
    distinct: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.g.dtype

    @property
    def formed(self) -> bool:  # then gradients of equal tokens are added
        return self.distinct or self.g.shape[1] == 1

    def compact(self) -> Lookup:
        """Add the gradients of equal tokens of an example, in float32 or better."""
        if self.formed:
            return self
        B, T, D = self.g.shape
        numbers, order = torch.sort(self.tokens, dim=1)
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        # Runs of equal tokens are numbered within each example, so that no size depends on the data; unused numbers
        # have rows of 0, for token 0.
        runs = begins.cumsum(1) - 1
        tokens = torch.zeros_like(numbers).scatter_(1, runs, numbers)
        target = torch.empty_like(runs).scatter_(1, order, runs + torch.arange(B, device=runs.device)[:, None] * T)
        g = torch.zeros(B * T, D, dtype=wide(self.g.dtype), device=self.g.device)
        launch.add_rows_(g, target, self.g)
        return Lookup(tokens, g.view(B, T, D), self.V, distinct=True)

    def chosen(self, norms: str) -> Contribution:
        return self.compact()

    def bound(self) -> Tensor:
        return launch.squares(self.compact().g)

    def dense(self) -> Dense:
        """Form (B, V, D) in float32 or better."""
        B, _, D = self.g.shape
        return self.added(Dense(torch.zeros(B, self.V, D, dtype=wide(self.g.dtype), device=self.g.device)))

    def added(self, to: Dense) -> Dense:
        """Add these rows to formed gradients (B, V, D), in place."""
        B, _, D = self.g.shape
        target = self.tokens + torch.arange(B, device=self.tokens.device)[:, None] * self.V
        to.known = None
        to.each.view(B * self.V, D).index_add_(0, target.view(-1), self.g.reshape(-1, D).to(to.each.dtype))
        return to

    def total(self, weights: Tensor, drop: Tensor | None, shape: torch.Size) -> Tensor:
        table = torch.zeros(shape, dtype=weights.dtype, device=self.g.device)
        self.add_to(table, weights, drop)
        return table

    def add_to(self, grad: Tensor, weights: Tensor, drop: Tensor | None) -> None:
        """Add only to the rows of the tokens."""
        launch.add_rows_(grad, self.tokens, launch.scaled(self.g, weights, drop, weights.dtype))


def cross(lookup: Lookup, rows: Rows) -> Tensor:
    """Return the inner products of each example's two gradients of an embedding tied to an output layer, (B,) float64.

    <E_i, H_i> = sum over t of e_it . (sum over s of G_is[token t] A_is)
    """
    (B, T, D), S = lookup.g.shape, rows.g.shape[1]
    products = torch.empty(B, dtype=torch.float64, device=lookup.g.device)
    for part in chunks(B, 2 * (T * S + T * D + S * D)):
        tokens = lookup.tokens[part, None, :].expand(-1, S, -1)
        scores = torch.gather(rows.g[part], 2, tokens).to(products.dtype)  # (b, S, T)
        mixed = torch.bmm(scores.mT, rows.a[part].to(products.dtype))
        products[part] = (mixed * lookup.g[part].to(products.dtype)).sum((1, 2))
    return products


def merged(contributions: list[Contribution]) -> list[Contribution]:
    """Merge contributions to one parameter into one of each kind: several calls concatenated, formed ones summed."""
    rows = [part for part in contributions if isinstance(part, Rows)]
    lookups = [part for part in contributions if isinstance(part, Lookup)]
    others = [part for part in contributions if not isinstance(part, (Rows, Lookup))]
    if len(rows) > 1:
        rows = [Rows(_concat([part.a for part in rows]), _concat([part.g for part in rows]))]
    if len(lookups) > 1:
        tokens, g = _concat([part.tokens for part in lookups]), _concat([part.g for part in lookups])
        lookups = [Lookup(tokens, g, lookups[0].V)]
    if not others or len(others) + len(rows) + len(lookups) == 1:
        return [*others, *rows, *lookups]
    formed = [part.dense().multiplied() for part in (*others, *rows)]
    whole = formed[0] if len(formed) == 1 else Dense(_summed([part.each for part in formed]))
    for lookup in lookups:
        whole = lookup.added(whole)
    return [whole]


def _concat(tensors: list[Tensor]) -> Tensor:
    """Concatenate along positions, in the promoted dtype."""
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return torch.cat([tensor.to(dtype) for tensor in tensors], 1)


def _summed(tensors: list[Tensor]) -> Tensor:
    shape = tensors[0].shape
    dtype = max((tensor.dtype for tensor in tensors), key=lambda dtype: torch.finfo(dtype).bits)
    total = tensors[0].to(dtype, copy=True)
    for other in tensors[1:]:
        total += other.reshape(shape)
    return total
