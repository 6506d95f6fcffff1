"""Draw the next token of many rows at once, each by its own rules, with results that depend on the row alone.

A row's draw inverts the cumulative distribution at a number that follows from the request's seed and the position of
the token, so that it is the same in any batch. Rows are grouped by how many of the most likely tokens they look at, in
fixed sizes: a sum over 64 candidates is in the same order whatever the others ask for.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence as Many
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.nn.models.language_model import Sampling, argmax, draw

_WIDTHS = (64, 1024)
"""Candidates that rows with top_k look at; those with more, and those with top_p or min_p alone, look at all."""

Tops = list[list[tuple[int, float]]]

_CUDA_ROWS = 64
"""Rows that are summed up at once on a GPU, where the order of a cumulative sum depends on their number."""


class Drawn:
    """The results of a step by row, on their way to the host: reading one waits for it, and for nothing after it."""

    def __init__(self, ids: Tensor, logprobs: Tensor | None = None, top: tuple[Tensor, Tensor] | None = None) -> None:
        self.on_device = ids
        results = (ids, logprobs, *(top or (None, None)))
        self._host = [None if each is None else each.to("cpu", non_blocking=True) for each in results]
        self._copied = torch.cuda.Event() if ids.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def _read(self, at: int) -> list[Any]:
        if self._copied is not None:
            self._copied.synchronize()
        result = self._host[at]
        return [] if result is None else result.tolist()

    @functools.cached_property
    def ids(self) -> list[int]:
        """The tokens; -1 where a row's logits are not finite."""
        return self._read(0)

    @functools.cached_property
    def logprobs(self) -> list[float] | None:
        """Those of the tokens under the model, at temperature 1 and without penalties; None if no row wants them."""
        return None if self._host[1] is None else self._read(1)

    @functools.cached_property
    def top(self) -> Tops | None:
        """For each row the most likely tokens with their log-probabilities, the first ones first."""
        if self._host[1] is None:
            return None
        if self._host[2] is None:
            return [[] for _ in self.ids]
        return [list(zip(*each, strict=True)) for each in zip(self._read(2), self._read(3), strict=True)]


def uniform(seed: int, index: int, position: int) -> float:
    """Return a number from [0, 1), a multiple of 2^-24, that depends on its arguments alone."""
    digest = blake2b(struct.pack("<qqq", seed, index, position), digest_size=4).digest()
    return (int.from_bytes(digest, "little") >> 8) * 2.0**-24


def draw_tokens(
    logits: Tensor, samplings: Many[Sampling], uniforms: Many[float], texts: Many[tuple[np.ndarray, int]],
    top: int | None,
) -> Drawn:  # fmt: skip
    """Draw a token for each row of logits (S, V), float32.

    Args:
        samplings: the rules of each row.
        uniforms: the number of each row, from [0, 1).
        texts: each row's tokens before the one to draw, and how many of them are the prompt; for the penalties.
        top: alternatives whose log-probabilities are wanted; None: none, not even the tokens' own.
    """
    raw = logits = _aligned(logits)
    penalized = [row for row, rules in enumerate(samplings) if rules.penalizes]
    if penalized:
        rows = _index(penalized, logits)
        changed = _penalize(logits[rows], [samplings[row] for row in penalized], [texts[row] for row in penalized])
        logits = logits.index_copy(0, rows, changed)
    groups: dict[int | None, list[int]] = {}
    for row, rules in enumerate(samplings):
        groups.setdefault(_width(rules, logits.shape[-1]), []).append(row)
    if len(groups) == 1:
        ids = _choose(logits, samplings, uniforms, next(iter(groups)))
    else:
        ids = torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
        for width, members in groups.items():
            rows = _index(members, logits)
            ids[rows] = _choose(
                logits[rows], [samplings[row] for row in members], [uniforms[row] for row in members], width
            )
    greedy = [*groups] == [None] and not penalized
    peaks = raw.gather(-1, ids[:, None])[:, 0] if greedy else raw.amax(-1)  # NaN is the largest of its row
    ids = torch.where(peaks - peaks == 0, ids, -1)
    if top is None:
        return Drawn(ids)
    return Drawn(ids, *_scores(raw, ids.clamp(min=0), top))


def score_tokens(logits: Tensor, tokens: np.ndarray, top: int) -> tuple[list[float], Tops] | None:
    """Return the log-probability of a token of each row of logits (S, V), and those of the `top` most likely ones.

    None if a row is not finite.
    """
    if not torch.isfinite(logits.amax(-1)).all():
        return None
    own: list[float] = []
    most: Tops = []
    ids = torch.from_numpy(tokens).to(logits.device)
    for rows in zip(logits.split(_CUDA_ROWS), ids.split(_CUDA_ROWS), strict=True):  # what this takes is not in the plan
        part = Drawn(rows[1], *_scores(_aligned(rows[0]), rows[1], top))
        own, most = own + (part.logprobs or []), most + (part.top or [])
    return own, most


def _scores(logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return the log-probabilities of tokens, and the `top` most likely ones with theirs; None for 0."""
    scores = torch.log_softmax(logits, -1)
    own = scores.gather(-1, ids[:, None])[:, 0]
    if not top:
        return own, None
    most = _ordered(logits, min(top, logits.shape[-1]))
    return own, (most, scores.gather(-1, most))


def _aligned(logits: Tensor) -> Tensor:
    """Return logits whose rows begin at multiples of 16 bytes: a GPU's order of a row's sums depends on it."""
    if logits.is_cuda and logits.shape[-1] % 4:
        return torch.nn.functional.pad(logits, (0, -logits.shape[-1] % 4), value=-torch.inf)
    return logits


def _index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows).to(like.device, non_blocking=True)


def _column(values: Many[float], like: Tensor) -> Tensor:
    """Return numbers as a column of like's dtype and device."""
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)[:, None]


def _width(rules: Sampling, vocabulary: int) -> int | None:
    """Return how many candidates a row looks at in order; 0 for all in any order, None for the first alone."""
    if rules.temperature == 0:
        return None
    if rules.top_k is None:
        return vocabulary if rules.top_p is not None or rules.min_p else 0
    return next((width for width in _WIDTHS if rules.top_k <= width < vocabulary), vocabulary)


def _choose(logits: Tensor, samplings: Many[Sampling], uniforms: Many[float], width: int | None) -> Tensor:
    """Return the tokens of rows that look at the same number of candidates."""
    if width is None:
        return argmax(logits)
    if logits.is_cuda and len(samplings) != _CUDA_ROWS:
        return _choose_in_tiles(logits, samplings, uniforms, width)
    temperatures = [max(rules.temperature, torch.finfo(logits.dtype).tiny) for rules in samplings]
    where = _column(uniforms, logits)[:, 0]
    scaled = (logits - logits.amax(-1, keepdim=True)) / _column(temperatures, logits)
    if not width:
        return draw(torch.softmax(scaled, -1), where)
    ids = _ordered(logits, width)
    probabilities = torch.softmax(scaled.gather(-1, ids), -1)
    ranks = torch.arange(width, device=logits.device)
    probabilities = probabilities * (ranks < _column([rules.top_k or width for rules in samplings], logits))
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = before < _column([2.0 if rules.top_p is None else rules.top_p for rules in samplings], logits)
    kept &= probabilities >= probabilities[:, :1] * _column([rules.min_p for rules in samplings], logits)
    return ids.gather(-1, draw(probabilities * kept, where)[:, None])[:, 0]


def _choose_in_tiles(logits: Tensor, samplings: Many[Sampling], uniforms: Many[float], width: int) -> Tensor:
    """Do the same in tiles of a fixed number of rows, the last of them padded."""
    chosen = []
    for at in range(0, len(samplings), _CUDA_ROWS):
        rows = range(at, min(at + _CUDA_ROWS, len(samplings)))
        padded = [*rows, *[at] * (_CUDA_ROWS - len(rows))]
        part = _choose(
            logits[_index(padded, logits)], [samplings[r] for r in padded], [uniforms[r] for r in padded], width
        )
        chosen.append(part[: len(rows)])
    return torch.cat(chosen)


def _ordered(logits: Tensor, width: int) -> Tensor:
    """Return the `width` most likely tokens in order; of equal ones the first, whatever the width."""
    bits = logits.contiguous().view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32  # in the order of the floats
    keys = keys + torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)
    return logits.shape[-1] - 1 - (keys.topk(width, -1).values & 0xFFFFFFFF)


def _penalize(logits: Tensor, samplings: Many[Sampling], texts: Many[tuple[np.ndarray, int]]) -> Tensor:
    """Return logits after the penalties of each row's tokens so far.

    repetition divides positive logits and multiplies negative ones of all tokens that occurred, in the prompt too;
    presence and frequency are subtracted once, and for each occurrence, of generated tokens.
    """
    rows, vocabulary = logits.shape
    longest = max(len(tokens) for tokens, _ in texts)
    padded = np.full((2, rows, longest), vocabulary, dtype=np.int64)  # a column that is dropped
    for row, (tokens, prompt) in enumerate(texts):
        padded[0, row, : len(tokens)] = tokens
        padded[1, row, prompt : len(tokens)] = tokens[prompt:]
    ids = torch.from_numpy(padded).to(logits.device, non_blocking=True)
    counts = torch.zeros(2, rows, vocabulary + 1, dtype=logits.dtype, device=logits.device)
    occurred, generated = counts.scatter_add_(2, ids, torch.ones_like(ids, dtype=logits.dtype))[..., :vocabulary]
    repetition = _column([rules.repetition_penalty for rules in samplings], logits)
    changed = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(occurred > 0, changed, logits)
    presence = _column([rules.presence_penalty for rules in samplings], logits)
    frequency = _column([rules.frequency_penalty for rules in samplings], logits)
    return logits.sub(presence * (generated > 0)).sub(frequency * generated)
