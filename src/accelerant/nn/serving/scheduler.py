"""Blocks of keys and values, the tokens that the next step computes, and its inputs.

A sequence's keys and values lie in blocks of `block_size` tokens, listed in its row of a block table. A full block is
named by a hash of its tokens and of the blocks before it, so that sequences with the same beginning share blocks.
Block 0 belongs to nobody: padding is written there.

A step has a budget of tokens. Sequences that have begun come first, in the order of their arrival, then waiting ones,
for whose whole text there are blocks. A sequence that needs a block when there is none takes it from the one that came
last, which waits again and later computes its tokens once more.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accelerant.nn.models.language_model import Sampling

if TYPE_CHECKING:
    from accelerant.nn.models.language_model import LanguageModel


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The keys and values of all sequences.

    Attributes:
        k, v: for each layer (blocks, block_size, kv_heads, width), contiguous.
    """

    k: list[Tensor]
    v: list[Tensor]

    @classmethod
    def empty(cls, model: LanguageModel, blocks: int, block_size: int) -> PagedCache:
        """Allocate blocks of zeros for a model, on its device and in the dtype of its activations."""
        layers, kv_heads, width = model.cache_shape()
        size, device = (layers, blocks, block_size, kv_heads, width), next(model.parameters()).device
        k, v = (torch.zeros(size, dtype=model.activation_dtype(), device=device).unbind(0) for _ in range(2))
        return cls(list(k), list(v))


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The rows of one step, each some new tokens of a sequence, packed one after another; on the device.

    Attributes:
        starts: (R + 1,) int32, where each row's new tokens begin; None if each row has one.
        block_table: (R, M) int32, the blocks of each row's keys.
        lengths: (R,) int32, each row's keys, those of its new tokens included.
        slots: (T,) int64, where the keys and values of the new tokens go: block * block_size + offset; -1: nowhere.
        invariant: whether a row's results must have the same bits in any batch.
    """

    starts: Tensor | None
    block_table: Tensor
    lengths: Tensor
    slots: Tensor
    invariant: bool


def chain(before: bytes, tokens: np.ndarray) -> bytes:
    """Return the name of a full block: a hash of its tokens and of the name of the block before it."""
    return blake2b(tokens.tobytes(), key=before, digest_size=16).digest()


class BlockPool:
    """The blocks of a cache: who holds them, and which hold the beginning of a text that may come again.

    A block that nobody holds but that has a name keeps its content until it is the oldest one and another is needed.

    Attributes:
        total: blocks that sequences can hold.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))  # of which the last is taken; block 0 is for padding
        self._holders = [0] * (total + 1)
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # named and held by nobody, the oldest first

    @property
    def available(self) -> int:
        """The number of blocks that `take` can give."""
        return len(self._free) + len(self._kept)

    def take(self, count: int) -> list[int] | None:
        """Return so many blocks, held once; None, and nothing is taken, if there are too few."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._kept.popitem(last=False)
                self._forget(block)
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def find(self, names: list[bytes]) -> list[int]:
        """Return the blocks with the longest run of these names from the first on, held once more each."""
        found = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            self._kept.pop(block, None)
            self._holders[block] += 1
            found.append(block)
        return found

    def name(self, block: int, name: bytes) -> None:
        """Let others find a full block by its name, unless another has it already."""
        if name not in self._named and block not in self._names:
            self._names[block], self._named[name] = name, block

    def release(self, blocks: list[int], *, forget: bool = False) -> None:
        """Give blocks back, the last ones to be replaced first. forget: nobody is to find them any more."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if forget:
                self._forget(block)
            if self._holders[block]:
                continue
            if block in self._names:
                self._kept[block] = None
            else:
                self._free.append(block)

    def _forget(self, block: int) -> None:
        name = self._names.pop(block, None)
        if name is not None:
            del self._named[name]


_NGRAM = 3
"""Tokens that must have occurred before for what followed them to be proposed."""

_MOST_SCORED = 256
"""Tokens of prompts that a step scores: each has a row of logits."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A text that grows: one of the `n` of a request.

    Attributes:
        tokens: of which the first `length` are known, int64, but for the last one while it is `drawn`.
        computed: tokens whose keys and values are in the blocks.
        names: of the full blocks so far.
        scored: the prompt's tokens before it have their log-probabilities, or need none.
        named: blocks that others can find.
        drafts: proposed tokens that stand after the known ones.
        drawn: where the device finds the last token, until the host reads it; None: it is known.
    """

    request: Any
    index: int
    tokens: np.ndarray
    prompt: int
    sampling: Sampling
    length: int
    scored: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    named: int = 0
    cached: int = 0
    drafts: int = 0
    drawn: int | None = None
    most_drafts: int = 0
    state: str = "waiting"
    text: Any = None
    _seen: dict[bytes, int] = field(default_factory=dict)
    _noted: int = 0

    @property
    def certain(self) -> int:
        """The number of tokens that the host knows."""
        return self.length - (self.drawn is not None)

    @property
    def full(self) -> bool:
        """Whether there is room for no further token."""
        return self.length == len(self.tokens)

    def propose(self, most: int) -> int:
        """Write up to `most` tokens that followed the last ones before after the known tokens; return their number."""
        for end in range(max(_NGRAM, self._noted), self.length):
            self._seen[self.tokens[end - _NGRAM : end].tobytes()] = end
        self._noted = self.length
        most = min(most, len(self.tokens) - self.length - 1)
        at = self._seen.get(self.tokens[self.length - _NGRAM : self.length].tobytes()) if most > 0 else None
        if at is None:
            return 0
        found = self.tokens[at : min(at + most, self.length)]
        self.tokens[self.length : self.length + len(found)] = found
        return len(found)


@dataclass(slots=True)
class Row:
    """A sequence's part of a step: `count` tokens from `begin` on.

    Attributes:
        samples: of the last tokens, after each of which one is drawn.
        known: of the tokens before these, whose successors in the prompt are scored.
        scores: the event with their log-probabilities; None if they are not finite.
    """

    sequence: Sequence
    begin: int
    count: int
    samples: int
    known: int
    scores: Any = None

    @property
    def first(self) -> int:
        """The position of the first token that is drawn."""
        return self.begin + self.count - self.samples + 1


_LEAST_PROMPT = 16
"""Tokens of prompts that a step computes at least."""

_SHORT_S = 0.01
"""Steps of single tokens that are shorter leave room for any prompt."""


@dataclass(slots=True)
class Pace:
    """Running means of a step's time: without prompts, and what each token of a prompt adds to it."""

    single_s: float = 0.0
    token_s: float = 0.0

    def note(self, rows: list[Row], seconds: float) -> None:
        """Take account of a step."""
        tokens = sum(row.count for row in rows if row.count > 1 + row.sequence.drafts)
        if not tokens:
            self.single_s += (seconds - self.single_s) / (8 if self.single_s else 1)
        elif self.single_s:
            each = max(seconds - self.single_s, 0.0) / tokens
            self.token_s += (each - self.token_s) / (8 if self.token_s else 1)

    def prompt_tokens(self, single: int, others: int, most: int) -> int:
        """Return how many tokens of prompts about double the step of `single` rows, for each one that waits."""
        if not single or not self.token_s or self.single_s < _SHORT_S:
            return most
        return min(most, max(_LEAST_PROMPT, int(self.single_s / self.token_s * (1 + others))))


class Scheduler:
    """The sequences of an engine, and what the next step computes of them."""

    def __init__(
        self, pool: BlockPool, block_size: int, max_batch_tokens: int, speculate: int, pace: Pace | None = None
    ) -> None:
        self.pool, self.block_size, self.budget, self.speculate = pool, block_size, max_batch_tokens, speculate
        self.pace = pace
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of arrival
        self.preemptions = 0
        self.hits = 0
        self.looked_up = 0

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        self.waiting.append(sequence)

    def blocks_of(self, tokens: int) -> int:
        """Return the number of blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def plan(self) -> list[Row]:
        """Return the rows of the next step and hold the blocks that it writes; none if nothing can be done."""
        rows: list[Row] = []
        left, unscored = self.budget, _MOST_SCORED
        share = left // max(1, len(self.running))  # drafts must not take the turn of others
        prompts = self._prompt_tokens()
        for sequence in list(self.running):
            if left < 1:
                break
            if sequence.state != "running" or sequence.full:  # preempted for one that came before it, or at its end
                continue
            missing = sequence.length - sequence.computed
            most = left if missing == 1 else min(left, prompts)
            count = min(missing, most if sequence.scored == sequence.prompt else min(most, unscored))
            if not count or not self._grow(sequence, sequence.computed + count):
                continue
            if self.speculate and missing == 1:
                sequence.drafts = self._drafts(sequence, min(share, left) - 1)
            rows.append(self._row(sequence, count + sequence.drafts))
            left, unscored = left - rows[-1].count, unscored - rows[-1].known
            prompts -= count if missing > 1 else 0
        left = min(left, prompts)
        while left > 0 and unscored > 0 and self.waiting and self._admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            most = left if sequence.scored == sequence.prompt else min(left, unscored)
            rows.append(self._row(sequence, min(sequence.length - sequence.computed, most)))
            left, unscored = left - rows[-1].count, unscored - rows[-1].known
        return rows

    def _prompt_tokens(self) -> int:
        """Return how many tokens of prompts the next step may compute."""
        if self.pace is None:
            return self.budget
        single = sum(each.length - each.computed == 1 for each in self.running)
        return self.pace.prompt_tokens(single, len(self.running) + len(self.waiting) - single - 1, self.budget)

    def _drafts(self, sequence: Sequence, most: int) -> int:
        """Propose tokens for which there are blocks without preempting anyone, and hold those; return their number."""
        drafts = sequence.propose(min(sequence.most_drafts, most))
        needed = self.blocks_of(sequence.length + drafts) - len(sequence.blocks)
        if drafts and needed > 0:
            taken = self.pool.take(needed)
            if taken is None:
                return 0
            sequence.blocks += taken
        return drafts

    def _row(self, sequence: Sequence, count: int) -> Row:
        begin, end = sequence.computed, sequence.computed + count
        samples = 1 + sequence.drafts if end == sequence.length + sequence.drafts else 0
        known = max(0, min(end + 1, sequence.prompt) - max(sequence.scored, begin + 1))
        return Row(sequence, begin, count, samples, known)

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Hold blocks for so many tokens; others that came later are preempted, or the sequence itself."""
        needed = self.blocks_of(tokens) - len(sequence.blocks)
        while needed > 0:
            taken = self.pool.take(needed)
            if taken is not None:
                sequence.blocks += taken
                break
            last = self.running[-1]
            self.preempt(last)
            if last is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it waits, before all others, to compute its tokens again."""
        self.running.remove(sequence)
        self._drop_blocks(sequence)
        sequence.state, sequence.drafts = "waiting", 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _admit(self, sequence: Sequence) -> bool:
        """Hold the blocks of a waiting sequence's whole text, those that exist already included; False if too few."""
        size = self.block_size
        first = sequence.request.sequences[0]
        read = first.scored == first.prompt and first.named >= (first.prompt - 1) // size
        if first is not sequence and first.state == "running" and not read:
            return False  # soon it can share the blocks of the prompt
        while len(sequence.names) < (sequence.length - 1) // size:  # at least one token is computed, for its logits
            self._name_next(sequence)
        shares = sequence.request.prefix_cache and sequence.scored == sequence.prompt
        known = self.pool.find(sequence.names[: (sequence.length - 1) // size]) if shares else []
        taken = self.pool.take(self.blocks_of(sequence.length) - len(known))
        if taken is None:
            self.pool.release(known)
            return False
        sequence.blocks = known + taken
        sequence.named, sequence.computed = len(known), len(known) * size
        if sequence.length == sequence.prompt:
            sequence.cached = sequence.computed
            self.hits += sequence.computed
            self.looked_up += sequence.length
        sequence.state = "running"
        return True

    def _name_next(self, sequence: Sequence) -> None:
        begin = len(sequence.names) * self.block_size
        before = sequence.names[-1] if sequence.names else sequence.request.salt
        sequence.names.append(chain(before, sequence.tokens[begin : begin + self.block_size]))

    def name_blocks(self, sequence: Sequence) -> None:
        """Name the blocks that are full of known tokens."""
        while (sequence.named + 1) * self.block_size <= min(sequence.computed, sequence.certain):
            if sequence.named == len(sequence.names):
                self._name_next(sequence)
            if sequence.request.prefix_cache:
                self.pool.name(sequence.blocks[sequence.named], sequence.names[sequence.named])
            sequence.named += 1

    def _drop_blocks(self, sequence: Sequence, *, forget: bool = False) -> None:
        self.pool.release(sequence.blocks, forget=forget)
        sequence.blocks, sequence.computed, sequence.named = [], 0, 0

    def remove(self, sequence: Sequence, *, forget: bool = False) -> None:
        """End a sequence and give its blocks back. forget: nobody may find them."""
        if sequence.state == "running":
            self.running.remove(sequence)
        elif sequence.state == "waiting":
            self.waiting.remove(sequence)
        sequence.state = "ended"
        self._drop_blocks(sequence, forget=forget)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step: its rows and new tokens, columns of the block table, and the tokens that are scored.

    single: each row has one token, which is scored; rows beyond those of the step are padding, which has no key.
    """

    rows: int
    tokens: int
    columns: int
    scored: int
    single: bool

    @classmethod
    def of(cls, rows: list[Row], *, padded: bool) -> StepShape:
        """Return the sizes of rows. padded: few different ones for steps of single tokens, so that they come again."""
        tokens, columns = sum(row.count for row in rows), max(len(row.sequence.blocks) for row in rows)
        scored = sum(row.known + row.samples for row in rows)
        single = len(rows) == tokens == scored
        if single and padded:
            step = 1 << max(0, (len(rows) - 1).bit_length() - 2)  # at most a quarter more
            count = -(-len(rows) // step) * step
            return cls(count, count, 1 << (columns - 1).bit_length(), count, True)
        return cls(len(rows), tokens, columns, scored, single)

    @property
    def _sizes(self) -> tuple[int, int]:
        """Numbers of 64 and of 32 bits."""
        return 3 * self.tokens + self.scored, self.rows * (self.columns + 2) + 1

    @property
    def words(self) -> int:
        """The size of the buffer in 32-bit words."""
        wide, narrow = self._sizes
        return 2 * wide + narrow

    def fill(self, buffer: np.ndarray, rows: list[Row], block_size: int) -> None:
        """Write the rows to a buffer of int32; a token that only the device knows as `drawn`."""
        split = 2 * self._sizes[0]
        wide, narrow = buffer[:split].view(np.int64), buffer[split:]
        narrow.fill(0)
        ids, positions, slots = wide[: 3 * self.tokens].reshape(3, self.tokens)
        scored = wide[3 * self.tokens :]
        starts, lengths, table = self._narrow(narrow)
        if len(rows) < self.rows:
            wide.fill(0)
            slots.fill(-1)
            starts[len(rows) + 1 :] = np.arange(len(rows) + 1, self.rows + 1)
        at = last = 0
        for r, row in enumerate(rows):
            sequence, begin, end = row.sequence, row.begin, row.begin + row.count
            table[r, : len(sequence.blocks)] = sequence.blocks
            starts[r + 1], lengths[r] = at + row.count, end
            ids[at : at + row.count] = sequence.tokens[begin:end]
            if sequence.drawn is not None and end == sequence.length:
                ids[at + row.count - 1] = sequence.drawn
            if row.count == 1:
                positions[at] = begin
                slots[at] = sequence.blocks[begin // block_size] * block_size + begin % block_size
            else:
                positions[at : at + row.count] = where = np.arange(begin, end)
                slots[at : at + row.count] = table[r, where // block_size].astype(np.int64) * block_size
                slots[at : at + row.count] += where % block_size
            at += row.count
            count = row.known + row.samples
            scored[last : last + count] = np.arange(at - count, at)
            last += count

    def views(self, buffer: Tensor, *, invariant: bool) -> tuple[Tensor, Tensor, PagedBatch, Tensor]:
        """Return tokens, positions, batch and the indices of the scored tokens in a buffer of int32 on the device."""
        split = 2 * self._sizes[0]
        wide, narrow = buffer[:split].view(torch.int64), buffer[split:]
        ids, positions, slots = wide[: 3 * self.tokens].view(3, self.tokens)
        starts, lengths, table = self._narrow(narrow)
        batch = PagedBatch(None if self.single else starts, table, lengths, slots, invariant)
        return ids, positions, batch, wide[3 * self.tokens :]

    def _narrow(self, numbers: Any) -> tuple[Any, Any, Any]:
        """Return starts, lengths and block table as views of an array or tensor."""
        n = self.rows
        return numbers[: n + 1], numbers[n + 1 : 2 * n + 1], numbers[2 * n + 1 :].reshape(n, self.columns)
