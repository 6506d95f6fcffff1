"""What one backward pass leaves of a parameter's per-example gradients, until their weights are known.

Kept, in bytes for B examples of T positions, s bytes a value:
    Rows    both factors of a matrix's gradient: B T (N + K) s; the inputs are those that autograd would keep anyway
    Dense   per-example gradients that were formed: B times the parameter, in the dtype they were computed in
    Lookup  gradients of an embedding's rows: B T D values of float32, or better
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from accelerant.ops.transformer.ends import scaled
from accelerant.privacy.dp.clipping import launch
from accelerant.privacy.dp.clipping.norms import chunks, prefers_ghost, wide
from accelerant.runtime.dispatch.tuning import Tuned

__all__ = ["WAYS", "Dense", "Lookup", "Piece", "Rows", "cross", "merged"]


class Piece(Protocol):
    """Contributions to one parameter's per-example gradients."""

    @property
    def formed(self) -> bool:
        """Whether per-example gradients were formed, so that norms are of the very numbers that are summed."""

    def squares(self) -> Tensor:
        """The squared norm of each example's gradient, (B,)."""

    def dense(self) -> Dense:
        """The same with the gradients formed."""

    def preferred(self) -> Piece:
        """As it is or formed, whichever costs less from here on."""

    def total(self, weights: Tensor, drop: Tensor | None, shape: torch.Size) -> Tensor:
        """The sum over examples of weights[i] times its gradient, in float32 or better, of a shape.

        Args:
            weights: (B,), 0 where drop is.
            drop: (B,) bool: these examples add exactly 0, whatever they hold; None where there are none.
            shape: of the parameter.
        """

    def add_to(self, grad: Tensor, weights: Tensor, drop: Tensor | None) -> None:
        """Add that sum to a dense gradient of its dtype: float32 or better."""


def _rule(B: int, T: int, N: int, K: int, itemsize: int) -> str:
    return "ghost" if prefers_ghost(B, T, N, K, itemsize, "cuda") else "instantiate"


WAYS: Tuned[str] = Tuned("clip_norm", default=_rule, candidates=lambda *sizes: ("ghost", "instantiate"))
"""On a GPU which norm a linear map's gradients get: by the rule, or what a race of both, sums included, has shown."""


@dataclass(slots=True)
class Rows:
    """A matrix's gradient by its factors: a (B, T, K), g (B, T, N); example i's is g_i^T a_i.

    `done` says that nobody reads g after the sum: then examples that are left out may be cleared where they lie.
    """

    a: Tensor
    g: Tensor
    done: bool = True
    formed: ClassVar[bool] = False

    def sizes(self) -> tuple[int, int, int, int, int, str]:
        """B, T, N, K, bytes of a value, type of device: what the choice between both norms depends on."""
        return (
            self.a.shape[0],
            self.a.shape[1],
            self.g.shape[2],
            self.a.shape[2],
            self.a.element_size(),
            self.a.device.type,
        )

    def squares(self) -> Tensor:
        """By the ghost norm."""
        return launch.ghost_squares(self.a, self.g)

    def dense(self) -> Dense:
        """(B, N, K) in the dtype of the factors."""
        return Dense(*launch.form(self.a, self.g))

    def preferred(self) -> Piece:
        """By the rule; on a GPU by a race of both ways, if there was one."""
        B, T, N, K, itemsize, device = self.sizes()
        if device != "cuda" or T == 1:
            return self if prefers_ghost(B, T, N, K, itemsize, device) else self.dense()

        def run(way: str) -> None:
            piece = self.dense() if way == "instantiate" else self
            piece.squares()
            weights = torch.ones(B, dtype=wide(self.a.dtype), device=self.a.device)
            piece.total(weights, None, torch.Size((N, K)))

        way = WAYS(self.a.device, self.a.dtype, (B, T, N, K, itemsize), run)
        return self if way == "ghost" else self.dense()

    def total(self, weights: Tensor, drop: Tensor | None, shape: torch.Size) -> Tensor:
        """One product over all rows, as an ordinary weight gradient."""
        g, a = self._weighted(weights, drop)
        if a.dtype != wide(a.dtype) and a.is_cuda and torch.version.hip is None:
            return torch.mm(g, a, out_dtype=torch.float32).view(shape)
        return torch.mm(g, a).view(shape)

    def add_to(self, grad: Tensor, weights: Tensor, drop: Tensor | None) -> None:
        """The product adds, where the library's can."""
        if self.a.dtype == grad.dtype or not self.a.is_cuda or torch.version.hip is not None:
            grad.add_(self.total(weights, drop, grad.shape))
            return
        g, a = self._weighted(weights, drop)
        out = grad.view(g.shape[0], a.shape[1])
        torch.ops.aten.addmm.dtype_out(out, g, a, out.dtype, out=out)

    def _weighted(self, weights: Tensor, drop: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both factors of the sum, (N, B T) and (B T, K)."""
        a = launch.scaled(self.a, weights, drop, self.a.dtype)
        g = (launch.clear_ if self.done else launch.cleared)(self.g, drop)
        return g.flatten(0, 1).t(), a.flatten(0, 1)


@dataclass(slots=True)
class Dense:
    """Per-example gradients, (B, ...), and their squared norms where these are known.

    Both are yet to be multiplied by `factor`, a scalar, and the norms by its square; None for 1.
    """

    each: Tensor
    known: Tensor | None = None
    factor: Tensor | None = None
    formed: ClassVar[bool] = True

    def squares(self) -> Tensor:
        """Of the values as they are, and exactly so of what is summed: no product with the factor is rounded."""
        found = launch.squares(self.each) if self.known is None else self.known
        return found if self.factor is None else found * self.factor.to(found.dtype).square()

    def multiplied(self) -> Dense:
        """The same without a factor, in the same memory."""
        return self if self.factor is None else Dense(scaled(self.each, self.factor))

    def dense(self) -> Dense:
        """Itself."""
        return self

    def preferred(self) -> Piece:
        """Itself."""
        return self

    def total(self, weights: Tensor, drop: Tensor | None, shape: torch.Size) -> Tensor:
        """One pass over what is kept."""
        return launch.weighted_sum(self.each, self._weighted(weights), drop).view(shape)

    def add_to(self, grad: Tensor, weights: Tensor, drop: Tensor | None) -> None:
        """The same pass adds."""
        launch.weighted_sum(self.each, self._weighted(weights), drop, grad)

    def _weighted(self, weights: Tensor) -> Tensor:
        return weights if self.factor is None else weights * self.factor.to(weights.dtype)


@dataclass(slots=True)
class Lookup:
    """An embedding's gradient: tokens (B, T), g (B, T, D); row v of example i's sums its g where token v stands.

    `distinct` says that no token stands twice in an example, but for rows of 0: then g is the gradient itself.
    """

    tokens: Tensor
    g: Tensor
    V: int
    distinct: bool = False

    @property
    def formed(self) -> bool:
        """Whether equal tokens' gradients were added."""
        return self.distinct or self.g.shape[1] == 1

    def compact(self) -> Lookup:
        """The same with the gradients of equal tokens of an example added, in float32 or better: distinct."""
        if self.formed:
            return self
        B, T, D = self.g.shape
        numbers, order = torch.sort(self.tokens, dim=1)
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        # Runs of equal tokens are numbered in each example, so that no size depends on the data; numbers that are left
        # over have rows of 0, for token 0.
        runs = begins.cumsum(1) - 1
        tokens = torch.zeros_like(numbers).scatter_(1, runs, numbers)
        at = torch.empty_like(runs).scatter_(1, order, runs + torch.arange(B, device=runs.device)[:, None] * T)
        g = torch.zeros(B * T, D, dtype=wide(self.g.dtype), device=self.g.device)
        launch.add_rows_(g, at, self.g)
        return Lookup(tokens, g.view(B, T, D), self.V, distinct=True)

    def preferred(self) -> Piece:
        """Compact."""
        return self.compact()

    def squares(self) -> Tensor:
        """Of the sums that make up its gradient."""
        return launch.squares(self.compact().g)

    def dense(self) -> Dense:
        """(B, V, D) in float32 or better."""
        B, _, D = self.g.shape
        each = torch.zeros(B, self.V, D, dtype=wide(self.g.dtype), device=self.g.device)
        return self.added(Dense(each))

    def added(self, to: Dense) -> Dense:
        """Add these rows to formed gradients (B, V, D), in place."""
        B, _, D = self.g.shape
        at = self.tokens + torch.arange(B, device=self.tokens.device)[:, None] * self.V
        to.known = None
        to.each.view(B * self.V, D).index_add_(0, at.view(-1), self.g.reshape(-1, D).to(to.each.dtype))
        return to

    def total(self, weights: Tensor, drop: Tensor | None, shape: torch.Size) -> Tensor:
        """Weighted rows, added where their tokens say."""
        found = torch.zeros(shape, dtype=weights.dtype, device=self.g.device)
        self.add_to(found, weights, drop)
        return found

    def add_to(self, grad: Tensor, weights: Tensor, drop: Tensor | None) -> None:
        """Straight to its rows."""
        launch.add_rows_(grad, self.tokens, launch.scaled(self.g, weights, drop, weights.dtype))


def cross(lookup: Lookup, rows: Rows) -> Tensor:
    """The inner product of each example's two gradients of one table, (B,): of an embedding tied to an output layer.

    <E_i, H_i> = sum over t of e_it . (sum over s of G_is[token t] A_is)
    """
    (B, T, D), S = lookup.g.shape, rows.g.shape[1]
    found = torch.empty(B, dtype=wide(lookup.g.dtype), device=lookup.g.device)
    for part in chunks(B, T * S + T * D):
        at = lookup.tokens[part, None, :].expand(-1, S, -1)
        scores = torch.gather(rows.g[part], 2, at).to(found.dtype)  # (b, S, T)
        mixed = torch.bmm(scores.mT, rows.a[part].to(found.dtype))
        found[part] = (mixed * lookup.g[part].to(found.dtype)).sum((1, 2))
    return found


def merged(pieces: list[Piece]) -> list[Piece]:
    """Pieces of one parameter as one of each kind: those of several calls side by side, formed ones summed."""
    rows = [piece for piece in pieces if isinstance(piece, Rows)]
    lookups = [piece for piece in pieces if isinstance(piece, Lookup)]
    others = [piece for piece in pieces if not isinstance(piece, (Rows, Lookup))]
    found: list[Piece] = []
    if rows:
        found.append(rows[0] if len(rows) == 1 else Rows(_beside([r.a for r in rows]), _beside([r.g for r in rows])))
    if lookups:
        first = lookups[0]
        tokens, g = _beside([each.tokens for each in lookups]), _beside([each.g for each in lookups])
        found.append(first if len(lookups) == 1 else Lookup(tokens, g, first.V))
    if not others or len(others) + len(found) == 1:
        return [*others, *found]
    formed = [piece.dense().multiplied() for piece in (*others, *(each for each in found if isinstance(each, Rows)))]
    whole = formed[0] if len(formed) == 1 else Dense(_summed([each.each for each in formed]))
    for lookup in found:
        if isinstance(lookup, Lookup):
            whole = lookup.added(whole)
    return [whole]


def _beside(tensors: list[Tensor]) -> Tensor:
    dtype = tensors[0].dtype
    for other in tensors[1:]:
        dtype = torch.promote_types(dtype, other.dtype)
    return torch.cat([tensor.to(dtype) for tensor in tensors], 1)


def _summed(tensors: list[Tensor]) -> Tensor:
    shape = tensors[0].shape
    dtype = max((tensor.dtype for tensor in tensors), key=lambda dtype: torch.finfo(dtype).bits)
    found = tensors[0].to(dtype, copy=True)
    for other in tensors[1:]:
        found += other.reshape(shape)
    return found
