# ruff: noqa: D102  GradientContribution documents the methods of its subclasses
"""One backward pass: contributions to per-example gradients by parameter, and their weighted sums at its end.

Memory for B examples of T positions, s bytes a value: factors of a matrix's gradient (`Rows`) B T (N + K) s, formed
gradients (`Dense`) B times the parameter, gradients of an embedding's rows (`Lookup`) B T D in float32.

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
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from accelerant.errors import ShapeError, UnsupportedCase
from accelerant.ops._launch import add_product
from accelerant.ops.transformer import scaled
from accelerant.privacy.dp.clipping import launch
from accelerant.privacy.dp.clipping.launch import Gram, bounded, chunks, margin, unresolved, wide
from accelerant.runtime.dispatch.race import Tuned


class GradientContribution(ABC):
    """A part of one parameter's per-example gradients."""

    __slots__ = ()
    of: ClassVar[str]  # the name of the field that holds the gradients, or one of their factors

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the gradients or their factors: under autocast not that of the parameter."""
        held: Tensor = getattr(self, self.of)
        return held.dtype

    @property
    def formed(self) -> bool:
        """Whether the gradients are formed, so that norms are of the very numbers that are summed."""
        return False

    @abstractmethod
    def bound(self) -> Tensor:
        """Return squared norms of the gradients, (B,), or of upper bounds that cover the rounding of `total`."""

    def terms(self) -> Tensor | Gram:
        """Return terms of `bound`, (B, n), or what `launch.bounded` takes them of."""
        return self.bound()[:, None]

    @abstractmethod
    def dense(self) -> Dense:
        """Form the gradients."""

    def prefers_ghost(self) -> bool:
        """Return whether norms of the factors, and a product for the sum, cost less than to form the gradients."""
        return False

    def chosen(self, norms: str) -> GradientContribution:
        """Return this contribution or its formed gradients, by "ghost", "instantiate" or "auto", the cheaper one."""
        ghost = self.formed or norms == "ghost" or (norms == "auto" and self.prefers_ghost())
        return self if ghost else self.dense()

    @abstractmethod
    def total(self, weights: Tensor, drop: Tensor | None, shape: torch.Size) -> Tensor:
        """Return the sum of weights[i] times gradient i, in float32 or better; where drop[i], exactly 0, NaN or not."""

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
    """Return whether the ghost norm over T positions is faster than to form, keep and sum B gradients (N, K)."""
    small, large = _OPERATIONS_PER_BYTE.get(device, _OPERATIONS_PER_BYTE["cpu"])
    per_byte = small if B * N * K * itemsize <= _CACHED_BYTES else large
    return per_byte * N * K * itemsize >= 2.0 * T * T * (N + K)


_NORMS: Tuned[str] = Tuned(
    "clip_norm",
    default=lambda B, T, N, K, itemsize: "ghost" if prefers_ghost(B, T, N, K, itemsize, "cuda") else "instantiate",
    candidates=lambda *sizes: ("ghost", "instantiate"),
)  # The norm of a linear map's gradients on a GPU: by the rule, or by the result of a race of both, sums included


@dataclass(slots=True)
class Rows(GradientContribution):
    """A matrix's gradient by its factors: a (B, T, K), g (B, T, N); example i's is g_i^T a_i.

    If `consumed`, nothing reads g after the sum, so that dropped examples may be cleared in place.
    """

    of: ClassVar = "a"
    a: Tensor
    g: Tensor
    consumed: bool = True

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
        """Return both factors, (N, B T) and (B T, K), in bfloat16 where float32 sums them, else in float32."""
        low = launch.low_product(self.a.dtype, self.a.device)
        dtype = torch.bfloat16 if low else launch.weighted_dtype(wide(self.a.dtype), self.g)
        weights = weights.to(dtype) if dtype == torch.float64 else weights
        a, g = launch.factors(self.a, self.g, weights, drop, dtype, consumed=self.consumed)
        return g.flatten(0, 1).t(), a.flatten(0, 1)


@dataclass(slots=True)
class Dense(GradientContribution):
    """Formed per-example gradients, (B, ...).

    Terms of their squared norms, (B, n), if `known`, are yet to be multiplied by the square of `factor`.
    """

    of: ClassVar = "each"
    each: Tensor
    known: Tensor | None = None
    factor: Tensor | None = None

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
class Lookup(GradientContribution):
    """An embedding's gradient: tokens (B, T), g (B, T, D); row v of example i's is the sum of g where the token is v.

    If `distinct`, no token repeats within an example, except with rows of 0: then g is the gradient itself.
    """

    of: ClassVar = "g"
    tokens: Tensor
    g: Tensor
    V: int
    distinct: bool = False

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

    def chosen(self, norms: str) -> GradientContribution:
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
    """Return sum_t e_it . (sum_s G_is[token t] A_is) of gradients of an embedding and a tied output, (B,) float64."""
    (B, T, D), S = lookup.g.shape, rows.g.shape[1]
    products = torch.empty(B, dtype=torch.float64, device=lookup.g.device)
    for part in chunks(B, 2 * (T * S + T * D + S * D)):
        tokens = lookup.tokens[part, None, :].expand(-1, S, -1)
        scores = torch.gather(rows.g[part], 2, tokens).to(products.dtype)  # (b, S, T)
        mixed = torch.bmm(scores.mT, rows.a[part].to(products.dtype))
        products[part] = (mixed * lookup.g[part].to(products.dtype)).sum((1, 2))
    return products


def merged(contributions: list[GradientContribution]) -> list[GradientContribution]:
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


# --- the pass ---------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class ClippingGroup:
    """Parameters that are clipped by one norm, in the model's order: sums over them have the same bits in each run."""

    name: str
    parameters: dict[int, torch.nn.Parameter]
    bound: float
    limit: Tensor


@dataclass(slots=True)
class ClippingSettings:
    """The settings that all passes of a clipper share; `sums` by their parameter's identity, None for its .grad."""

    names: Mapping[int, str]
    groups: Sequence[ClippingGroup]
    norms: str
    mean: bool
    sums: dict[int, Tensor] | None = None
    group_of: Mapping[int, ClippingGroup] = field(init=False)

    def __post_init__(self) -> None:
        self.group_of = {parameter: group for group in self.groups for parameter in group.parameters}


@dataclass(slots=True)
class _PendingGradient:
    """A parameter's contributions, how many have arrived, and the terms of their squared norm once they are known."""

    contributions: list[GradientContribution] = field(default_factory=list)
    arrived: int = 0
    squares: Tensor | Gram | None = None


class BackwardPass:
    """Collects contributions; computes norms and adds the weighted sums to the gradients when all are there.

    `clipped`: by group, norms of per-example gradients and the factors that clipped them, (B,) each. `formed`: whether
    every norm was taken of the very gradients that were summed. `nonfinite`: how many examples were left out for a norm
    that is not finite; set by `finish`.
    """

    def __init__(
        self, task: int, plan: ClippingSettings, expected: Mapping[int, int], mask: Tensor | None, scale: float | Tensor
    ) -> None:
        self.task = task
        self.clipped: dict[str, tuple[Tensor, Tensor]] = {}
        self.formed = True
        self.nonfinite: Tensor | None = None
        self._examples: int | None = None
        self._left_out: Tensor | None = None
        self._plan, self._expected, self._mask, self._loss_scale = plan, dict(expected), mask, scale
        self._shares: dict[int, _PendingGradient] = {}

    def add(self, parameter: Tensor, contribution: GradientContribution, examples: int) -> None:
        """Take a contribution; ShapeError if it is of other examples, UnsupportedCase if its layer was clipped."""
        key, plan = id(parameter), self._plan
        if self._examples is None:
            self._examples = examples
            if self._mask is not None and self._mask.shape != (examples,):
                raise ShapeError(f"mask must be ({examples},), one for each example, got {tuple(self._mask.shape)}")
        elif self._examples != examples:
            raise ShapeError(
                f"all layers must see the same examples: {plan.names[key]} had {examples} in its first dimension, "
                f"layers after it {self._examples}"
            )
        group, by_layer = plan.group_of[key], len(plan.groups) > 1
        if group.name in self.clipped:
            raise UnsupportedCase(
                f"{plan.names[key]} got another contribution after its layer was clipped; forward passes that were "
                'dropped or recomputed do that: take clipping="flat"'
            )
        if by_layer and isinstance(contribution, Rows):
            contribution.consumed = False  # the layer's input gradient may be computed after its sum
        share = self._shares.setdefault(key, _PendingGradient())
        share.contributions.append(contribution)
        share.arrived += 1
        share.squares = None
        if share.arrived == self._expected.get(key, 0) and (by_layer or _small_gradients(share) is None):
            self._settle(share)
            if by_layer and all(self._is_settled(other) for other in group.parameters):
                self._sum(group)

    def finish(self) -> None:
        """Sum the remaining groups."""
        for group in self._plan.groups:
            if group.name not in self.clipped and any(key in self._shares for key in group.parameters):
                self._sum(group)
        if self._left_out is not None:
            self.nonfinite = self._left_out.sum()

    def _is_settled(self, key: int) -> bool:
        share = self._shares.get(key)
        return not self._expected.get(key, 0) if share is None else share.squares is not None

    def _settle(self, share: _PendingGradient) -> None:
        """Merge the contributions, form them where that costs less, and compute the squared norm."""
        parts = [part.chosen(self._plan.norms) for part in merged(share.contributions)]
        match parts:
            case [part]:
                squares = part.terms()
            case [Rows() as rows, Lookup() as lookup]:  # a table tied to an output layer
                squares = rows.terms(lookup)
            case _:
                parts = merged(parts)
                squares = parts[0].terms()
        share.contributions, share.squares = parts, squares

    def _sum(self, group: ClippingGroup) -> None:
        """Clip a group: norms, factors, and the weighted sums into .grad."""
        shares = {key: self._shares.pop(key) for key in group.parameters if key in self._shares}
        bundles = _bundled(shares)
        for share in shares.values():
            if share.squares is None:
                self._settle(share)
        terms = [share.squares for share in shares.values()] + [bundle.terms() for bundle, _ in bundles]
        grams = [each for each in terms if isinstance(each, Gram)]
        known = [each for each in terms if isinstance(each, Tensor)] + ([bounded(grams)] if grams else [])
        each = [part for share in shares.values() for part in share.contributions] + [bundle for bundle, _ in bundles]
        dtype = torch.float64 if all(part.dtype == torch.float64 for part in each) else torch.float32
        total = torch.cat(known, 1).sum(1, dtype=torch.float64)
        scale = (total.shape[0] if self._plan.mean else 1.0) / self._loss_scale
        lengths = total.sqrt() * scale  # a root of float32 squares would be 0 for small norms
        norms = lengths.to(dtype)
        drop = ~torch.isfinite(total.to(dtype)) | ~torch.isfinite(norms)  # in float32, large ones overflow: left out
        left_out = drop
        if self._mask is not None:
            counted = self._mask.to(device=drop.device, dtype=torch.bool)
            left_out, drop = drop & counted, drop | ~counted
        self._left_out = left_out if self._left_out is None else self._left_out | left_out
        lost = unresolved(dtype, sum(parameter.numel() for parameter in group.parameters.values()))
        above = (total + lost).sqrt() * scale * (1.0 + margin(dtype, norms.device))
        factors = (group.limit.to(norms.device) / above).clamp_(max=1.0).masked_fill_(drop, 0.0).to(dtype)
        weights = factors * scale
        self.clipped[group.name] = norms, factors
        # 0 times a number is 0: only values that are not finite need clearing; a CPU can look whether there are any.
        unsafe = drop if drop.device.type != "cpu" or not bool(torch.isfinite(norms).all()) else None
        for key, share in shares.items():
            parameter = group.parameters[key]
            for part in share.contributions:
                self.formed = self.formed and part.formed
                self._add_total(parameter, part, weights.to(wide(parameter.dtype)), unsafe)
            share.contributions.clear()
        for bundle, keys in bundles:
            sums = bundle.total(weights.to(wide(bundle.each.dtype)), unsafe, bundle.each.shape[1:])
            self._add_bundle(sums, [group.parameters[key] for key in keys])

    def _added_to(self, parameter: torch.nn.Parameter) -> Tensor | None:
        """Return the sum that this pass adds to, None if there is none yet."""
        sums = self._plan.sums
        return parameter.grad if sums is None else sums.get(id(parameter))

    def _begin_sum(self, parameter: torch.nn.Parameter, total: Tensor) -> None:
        if self._plan.sums is None:
            parameter.grad = total
        else:
            self._plan.sums[id(parameter)] = total

    def _add_bundle(self, sums: Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Add each part of sums (P,) to its parameter's sum."""
        parts = sums.split([parameter.numel() for parameter in parameters])
        gradients, added = [], []
        for parameter, part in zip(parameters, parts, strict=True):
            shaped = part.view(parameter.shape).to(parameter.dtype)
            if (grad := self._added_to(parameter)) is None:
                self._begin_sum(parameter, shaped.clone())  # memory of its own
            else:
                gradients.append(grad)
                added.append(shaped)
        if gradients:
            torch._foreach_add_(gradients, added)

    def _add_total(
        self, parameter: torch.nn.Parameter, part: GradientContribution, weights: Tensor, drop: Tensor | None
    ) -> None:
        grad = self._added_to(parameter)
        if grad is None:
            self._begin_sum(parameter, part.total(weights, drop, parameter.shape).to(parameter.dtype))
        elif grad.dtype == weights.dtype and grad.is_contiguous():
            part.add_to(grad, weights, drop)
        else:
            grad.add_(part.total(weights, drop, parameter.shape))


_SMALL = 8192  # values of a parameter whose formed gradients are bundled with others', at most


def _small_gradients(share: _PendingGradient) -> Tensor | None:
    """Return the formed gradients of a parameter that has no others, and few values: a bias, a norm's scale."""
    match share.contributions:
        case [Dense(each, known=None, factor=None)] if each.shape[1:].numel() <= _SMALL:
            return each
    return None


def _bundled(shares: dict[int, _PendingGradient]) -> list[tuple[Dense, list[int]]]:
    """Remove the small unsettled shares and concatenate them, one bundle per dtype, with the parameters' keys."""
    by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
    for key, share in shares.items():
        if share.squares is None and (each := _small_gradients(share)) is not None:
            by_dtype.setdefault(each.dtype, {})[key] = each
    bundles = []
    for parts in by_dtype.values():
        if len(parts) > 1:
            flat = [part.reshape(part.shape[0], part.shape[1:].numel()) for part in parts.values()]
            bundles.append((Dense(torch.cat(flat, 1)), list(parts)))
            for key in parts:
                del shares[key]
    return bundles


def makes_gradient(parameter: Tensor) -> bool:
    """Return whether the running pass makes a parameter's gradient; UnsupportedCase for one within another pass."""
    if torch.is_grad_enabled():
        raise UnsupportedCase(
            "per-example clipping cannot be differentiated: call backward() without create_graph=True, or detach() the "
            "clipper for such a term"
        )
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            raise UnsupportedCase(
                "checkpoint(use_reentrant=True) runs a backward pass of its own, in which other layers' norms are not "
                "known: take use_reentrant=False"
            )
        frame = frame.f_back
    try:
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad: "a leaf node was passed"
        return False
