"""A model of KV memory that notices lost KV: a slot of a block holds a number made from a token and its position.

The next token of a row is drawn from the sum of the slots that its block table names, so the text depends on every
slot of every block. A block that is lost, doubled, freed too early or not copied changes the text; `expected_outputs`
is the text of a sequence whose KV was never touched.

    slot = mix(token, position)          word(row) = sum of the row's slots [0, length), modulo 2^64
    next token = allowed[mix(word, seed) modulo the number of allowed ids], or the tag that ends a thinking

Sums are associative: in a pipeline each stage has the slots of its own layers and adds its share, `layer_weight` times
its sum, to a word per row that rides with the activation; the last stage draws from it. The weights of any tiling of
the layers add up to 1, so the text is that of one worker with all layers, and a slot that is wrong on any stage changes
it.

    word(row) = sum over the stages of layer_weight(stage's layers) · (sum of the row's slots there), modulo 2^64

Sums are kept as running sums per row, and taken anew from the blocks when the table changed other than at its end, and
at random.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.arrays import I32
from services.worker.contract.batch import OWN_SAMPLE, Batch, TableDelta
from services.worker.contract.executor import HostCopy
from services.worker.contract.kept_kv import as_host_id
from services.worker.contract.table_entries import blocks_of, slots_of
from services.worker.modelled.row_sample import RowSample
from services.worker.modelled.thinking import ThinkingBudgets
from shared.layers import LayerRange
from shared.stream_extras import TokenLogprob
from shared.types import Thinking

U64 = NDArray[np.uint64]

# arrays without a dimension: an operation of a short array with one takes half as long as with a scalar
_GOLDEN = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)
_MUL_1 = np.array(0xBF58476D1CE4E5B9, dtype=np.uint64)
_MUL_2 = np.array(0x94D049BB133111EB, dtype=np.uint64)
_1, _27, _30, _31 = (np.array(number, dtype=np.uint64) for number in (1, 27, 30, 31))
_POISON = 0xDEAD_0000_0000_0000
_UNKNOWN = -1


def mix(words: U64, others: U64) -> U64:
    """Return a hash of each pair, [n] (the finalizer of SplitMix64 over a combination of the two)."""
    state: U64 = words * _GOLDEN + (others + _1) * _MUL_2
    state = (state ^ (state >> _30)) * _MUL_1
    state = (state ^ (state >> _27)) * _MUL_2
    result: U64 = state ^ (state >> _31)
    return result


def layer_weight(layers: LayerRange, num_layers: int) -> int:
    """Return what the slots of some layers count for in a row's word, modulo 2^64; 1 for all layers of a model.

    It is the difference of two numbers that belong to the range's borders, so adjacent ranges add up to their union.
    """
    if layers.end > num_layers:
        raise ValueError(f"layers {layers} of a model of {num_layers}")
    return (_border(layers.end, num_layers) - _border(layers.first, num_layers)) % 2**64


def _border(layer: int, num_layers: int) -> int:
    if layer in (0, num_layers):
        return int(layer == num_layers)
    return int(mix(np.array([layer], dtype=np.uint64), np.array([num_layers], dtype=np.uint64))[0])


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """Which ids the model says: an ordinary range without the ids that end a sequence."""

    allowed: I32
    """[num_allowed]"""

    @classmethod
    def of_vocabulary(cls, vocab_size: int, eos_token_ids: tuple[int, ...], first_id: int = 0) -> TokenDraw:
        """Allow [first_id, vocab_size) except the EOS ids."""
        ids = np.arange(first_id, vocab_size, dtype=np.int32)
        allowed = ids[~np.isin(ids, np.array(eos_token_ids, dtype=np.int32))]
        assert allowed.size, "no id is left that the model may say"
        return cls(allowed)

    def draw(self, words: U64, seeds: U64) -> I32:
        """Return the next token of each row, [n]."""
        places = mix(words, seeds) % np.uint64(self.allowed.size)
        tokens: I32 = self.allowed[places.astype(np.intp)]
        return tokens

    def logprob(self, token: int, num_top: int) -> TokenLogprob:
        """Return made-up log-probabilities: the token has 1/2, the allowed ids behind it 1/4, 1/8 and so on."""
        place, size = int(np.searchsorted(self.allowed, token)), self.allowed.size
        ids = [int(self.allowed[(place + i) % size]) for i in range(min(num_top, size))]
        values = [float(np.float32((i + 1) * -np.log(2))) for i in range(len(ids) + 1)]
        return TokenLogprob(values[0], tuple(zip(ids, values, strict=False)))


def expected_outputs(
    prompt: I32,
    generated: I32,
    num_tokens: int,
    seed: int,
    draw: TokenDraw,
    thinking: Thinking | None = None,
) -> I32:
    """Return the first `num_tokens` outputs of a sequence that runs alone, `generated` the first of them."""
    known = np.concatenate([prompt, generated]).astype(np.uint64)
    word = mix(known, np.arange(known.size, dtype=np.uint64)).sum(keepdims=True)
    seeds = _seed_words([seed])
    outputs = generated.tolist()
    while len(outputs) < num_tokens:
        token = draw.draw(word, seeds)
        if thinking is not None and thinking.is_spent(outputs):
            token[:] = thinking.closing_id
        position = np.array([prompt.size + len(outputs)], dtype=np.uint64)
        outputs.append(int(token[0]))
        word = word + mix(token.astype(np.uint64), position)
    return np.array(outputs, dtype=np.int32)


class ShadowKv:
    """The modelled memory of one worker, and the block tables as batches describe them."""

    def __init__(  # noqa: PLR0913  sizes, and what tests and stages choose
        self,
        num_blocks: int,
        block_size: int,
        draw: TokenDraw,
        *,
        num_host_blocks: int = 0,
        verify_ratio: float = 0.01,
        seed: int = 0,
        weight: int = 1,
    ) -> None:
        """Begin with garbage in every block.

        Args:
            num_blocks: blocks with memory.
            block_size: token slots of a block.
            draw: which ids the model says.
            num_host_blocks: blocks of host memory, to which KV may be copied.
            verify_ratio: share of the rows of a step whose running sum is taken anew from the blocks.
            seed: chooses those rows.
            weight: of its layers, by `layer_weight`; 1: all layers are here.
        """
        assert 0 < weight < 2**64, "the slots of no layer, or a weight that is no 64-bit number"
        self._weight = None if weight == 1 else np.uint64(weight)
        self._draw = draw
        self._random = np.random.default_rng(seed)
        self.verify(verify_ratio)
        self._slots: U64 = np.zeros((0, block_size), dtype=np.uint64)
        self._host_slots: U64 = np.full((num_host_blocks, block_size), _POISON, dtype=np.uint64)
        self._table: I32 = np.zeros((1, 1), dtype=np.int32)
        self._any_from_right = False  # some entry has been below 0, see `contract/table_entries.py`
        self._table_length: I32 = np.zeros(1, dtype=np.int32)
        self._sum_length: I32 = np.full(1, _UNKNOWN, dtype=np.int32)  # tokens that the running sum covers
        self._sum: U64 = np.zeros(1, dtype=np.uint64)
        self._seed: U64 = np.zeros(1, dtype=np.uint64)
        self._sample: I32 = np.zeros(1, dtype=np.int32)
        """The newest one of each row."""
        self._known: NDArray[np.bool_] = np.zeros(1, dtype=np.bool_)
        self._elsewhere: dict[int, tuple[ShadowKv, int]] = {}
        """Blocks whose contents still lie in another memory, and where there."""
        self._num_top: dict[int, int] = {}  # rows that ask for log-probabilities
        self._budgets = ThinkingBudgets()
        self.grow(num_blocks)

    def verify(self, ratio: float) -> None:
        """Take the running sums of this share of rows anew from now on, each row with the same chance."""
        self._chosen = RowSample(ratio, self._random)

    @property
    def num_blocks(self) -> int:
        """Blocks with memory."""
        return int(self._slots.shape[0])

    @property
    def block_size(self) -> int:
        """Token slots of a block."""
        return int(self._slots.shape[1])

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory."""
        return int(self._host_slots.shape[0])

    def begin_copy(self, copy: HostCopy) -> None:
        """Fill the target of a copy with garbage: nobody may read it before the copy has ended."""
        if copy.to_host:
            self._host_slots[copy.host] = np.uint64(_POISON)
        else:
            self.poison(copy.device)

    def end_copy(self, copy: HostCopy) -> None:
        """Copy the slots, as the source is now."""
        if copy.to_host:
            self._host_slots[copy.host] = self._slots[copy.device]
        else:
            self._slots[copy.device] = self._host_slots[copy.host]

    def take_from(self, other: ShadowKv, source: I32, target: I32) -> None:
        """Copy blocks [n] of another memory into blocks [n] of this one; the layers need not be the same ones.

        Args:
            other: whose blocks are named as in `KeptKv`.
            source: there.
            target: of the device.
        """
        on_host = source < 0
        slots = other._slots[np.where(on_host, 0, source)]
        slots[on_host] = other._host_slots[as_host_id(source[on_host])]
        self._slots[target] = slots
        if self._elsewhere:
            for block in target.tolist():
                self._elsewhere.pop(block, None)

    def join(self, ids: I32, other: ShadowKv, its: I32) -> None:
        """Have blocks [n] of this memory and [n] of another, each with some layers: where they differ it is garbage."""
        self.poison(ids[(self._slots[ids] != other._slots[its]).any(axis=1)])

    def attend_elsewhere(self, other: ShadowKv, source: I32, target: I32) -> None:
        """Read blocks [n] of another memory wherever blocks [n] of this one are named, until they are taken from it."""
        for block, its in zip(target.tolist(), source.tolist(), strict=True):
            self._elsewhere[block] = (other, its)

    def tokens_elsewhere(self, batch: Batch) -> int:
        """Return how many tokens of a step attend blocks that lie elsewhere, as far as its rows have been taken in."""
        if not self._elsewhere:
            return 0
        return sum(
            count
            for row, count in zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True)
            if row < self._known.size
            and self._known[row]
            and not self._elsewhere.keys().isdisjoint(blocks_of(self._table[row, : self._table_length[row]]).tolist())
        )

    def read_block(self, block: int) -> U64:
        """Return the slots of a block of this memory, named as in `KeptKv`, wherever they lie."""
        if block < 0:
            copied: U64 = self._host_slots[as_host_id(block)]
            return copied
        if block in self._elsewhere:
            other, its = self._elsewhere[block]
            return other.read_block(its)
        slots: U64 = self._slots[block]
        return slots

    def grow(self, num_blocks: int) -> None:
        """Add memory; it holds garbage."""
        known = self.num_blocks
        self._slots = np.concatenate([self._slots, np.zeros((num_blocks - known, self.block_size), dtype=np.uint64)])
        self.poison(np.arange(known, num_blocks, dtype=np.int32))

    def poison(self, ids: I32, *, on_host: bool = False) -> None:
        """Fill blocks with garbage: they are free, or lost their memory."""
        slots = self._host_slots if on_host else self._slots
        slots[ids] = np.uint64(_POISON) + ids[:, None].astype(np.uint64)

    def take_in(self, batch: Batch) -> None:
        """Apply what comes before a step: rows that go and come, copies, changes of block tables."""
        self._known[batch.drops] = False
        for row in batch.drops.tolist() if self._num_top else ():
            self._num_top.pop(row, None)
        self._budgets.take_in(batch)
        for init in batch.admits:
            if init.row >= self._known.size:
                self._make_rows(init.row + 1)
            assert not self._known[init.row], f"row {init.row} is admitted again before it was dropped"
            self._known[init.row] = True
            self._table_length[init.row] = self._sum_length[init.row] = self._sum[init.row] = 0
            self._seed[init.row] = _seed_words([init.sampling.seed])[0]
            if init.sampling.logprobs is not None:
                self._num_top[init.row] = init.sampling.logprobs
        if batch.copies.source.size:
            self._slots[batch.copies.target] = self._slots[batch.copies.source]
        if batch.table_delta.row.size:
            self._change_tables(batch.table_delta)

    def compute(self, batch: Batch) -> I32:
        """Write the KV of a step's tokens and return what is sampled, [n], -1 where nothing is. All layers are here."""
        assert self._weight is None, "a stage has a share of the word, not the word"
        return self.sample(batch, self.share(batch))

    def share(self, batch: Batch) -> U64:
        """Write the KV of a step's tokens, and return what these layers add to the word of each row, [n]."""
        rows = batch.rows.astype(np.intp)
        assert np.count_nonzero(self._known[rows]) == rows.size, "a batch names a row that the executor does not know"
        values = self._write(rows, batch, self._known_tokens(batch))
        in_order = self._sum_length[rows] == batch.start
        if values.size != rows.size:
            values = np.add.reduceat(values, np.cumsum(batch.num_tokens) - batch.num_tokens)
        end = batch.start + batch.num_tokens
        words: U64 = self._sum[rows] + values
        for i in self._chosen.among(in_order):
            words[i] = self._sum_of_blocks(int(rows[i]), int(end[i]))
        self._sum[rows] = words
        self._sum_length[rows] = end
        return words if self._weight is None else words * self._weight

    def _known_tokens(self, batch: Batch) -> I32:
        """Return a step's tokens, with the rows' newest samples where these are meant."""
        ahead = np.flatnonzero(batch.tokens == OWN_SAMPLE)
        if not ahead.size:
            return batch.tokens
        tokens = batch.tokens.copy()
        tokens[ahead] = self._sample[batch.rows[ahead]]  # decodes come first, one token each
        return tokens

    def sample(self, batch: Batch, words: U64) -> I32:
        """Return what is sampled from the whole words of a step's rows, [n], -1 where nothing is."""
        tokens = self._draw.draw(words, self._seed[batch.rows.astype(np.intp)])
        self._budgets.force(batch, tokens)
        self._sample[batch.rows] = tokens
        tokens[~batch.sample] = -1
        return tokens

    def logprobs(self, batch: Batch, tokens: I32) -> dict[int, TokenLogprob] | None:
        """Return the made-up log-probabilities of the sampled rows that ask for them, by place in the batch."""
        if not self._num_top:
            return None
        places = [i for i, row in enumerate(batch.rows.tolist()) if row in self._num_top and tokens[i] >= 0]
        return {i: self._draw.logprob(int(tokens[i]), self._num_top[int(batch.rows[i])]) for i in places} or None

    def spoil(self, batch: Batch) -> None:
        """Leave garbage where a failed step would have written."""
        self._write(batch.rows.astype(np.intp), batch, np.full(batch.tokens.size, -1, dtype=np.int32))

    def _write(self, rows: NDArray[np.intp], batch: Batch, tokens: I32) -> U64:
        positions = batch.start
        if tokens.size != rows.size:
            first = np.cumsum(batch.num_tokens) - batch.num_tokens
            positions = np.repeat(batch.start - first, batch.num_tokens) + np.arange(tokens.size, dtype=np.int32)
            rows = np.repeat(rows, batch.num_tokens)
        index, offset = np.divmod(positions, self.block_size)
        values = mix(tokens.astype(np.uint64), positions.astype(np.uint64))
        entries = self._table[rows, index]
        if self._any_from_right:
            entries, offset = np.divmod(slots_of(entries, positions, self.block_size), self.block_size)
        self._slots[entries, offset] = values
        return values

    def _sum_of_blocks(self, row: int, length: int) -> np.uint64:
        entries = self._table[row, : -(-length // self.block_size)]
        slots = self._slots[blocks_of(entries)]
        if self._elsewhere:
            slots = np.stack([self.read_block(block) for block in blocks_of(entries).tolist()])
        slots[entries < 0] = slots[entries < 0, ::-1]
        return np.uint64(slots.reshape(-1)[:length].sum())

    def _change_tables(self, delta: TableDelta) -> None:
        row, index = delta.row.astype(np.intp), delta.index
        width = int(np.maximum.reduce(index)) + 1
        if width > self._table.shape[1]:
            more = np.zeros((self._table.shape[0], 2 * width - self._table.shape[1]), dtype=np.int32)
            self._table = np.concatenate([self._table, more], axis=1)
        is_known = index < self._table_length[row]
        if np.count_nonzero(is_known):
            self._sum_length[row[is_known]] = _UNKNOWN
        self._table[row, index] = delta.block_id
        self._any_from_right |= int(np.minimum.reduce(delta.block_id)) < 0
        np.maximum.at(self._table_length, row, index + 1)

    def _make_rows(self, num_rows: int) -> None:
        more = 2 * num_rows - self._known.size
        self._table = np.concatenate([self._table, np.zeros((more, self._table.shape[1]), dtype=np.int32)])
        self._sum_length = np.concatenate([self._sum_length, np.full(more, _UNKNOWN, dtype=np.int32)])
        for name in ("_table_length", "_sum", "_seed", "_sample", "_known"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, dtype=column.dtype)]))


def _seed_words(seeds: list[int]) -> U64:
    return np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
