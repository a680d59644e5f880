"""Training rows: conversations of the grammar as packed token ids, with the positions that count in the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

import torch
from transformers import PreTrainedTokenizerFast

from tools.demo_model.forms import THINK_END
from tools.demo_model.grammar import THOUGHT_END, Conversation, Grammar
from tools.demo_model.tokenizer import ASSISTANT, BOS, END, SPECIAL_TOKENS

ROW_TOKENS = (272, 512, 768)
"""Lengths of rows. A conversation goes into the shortest that holds it, since attention costs less there."""

PLAIN_ONE_IN = 30
"""One in this many documents is a bare answer without roles, so that the model can also continue a plain text."""


NUM_FIRST = 12_000
"""Conversations in the first part of training, which teaches copying."""

FIRST_STORY_ONE_IN = 8
"""One in this many conversations of the first part is of the usual kinds."""

FORM_ONE_IN = 3
"""One in this many conversations asks for a form."""


@dataclass
class Encoded:
    """One document.

    Attributes:
        ids: token ids.
        counts: for each token, whether predicting it counts in the loss: the assistant's words and ends do.
    """

    ids: list[int] = field(default_factory=list)
    counts: list[bool] = field(default_factory=list)

    def add(self, ids: list[int], *, counts: bool) -> None:
        """Append some tokens."""
        self.ids += ids
        self.counts += [counts] * len(ids)


def render_prompt(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> str:
    """Return what the chat template makes of a conversation, up to its last answer."""
    prompt = tokenizer.apply_chat_template(
        conversation.messages[:-1],
        tools=[dict(tool) for tool in conversation.tools] or None,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=conversation.is_thinking,
    )
    return str(prompt)


class Encoder:
    """Turns conversations into token ids by the chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        ids = {token: tokenizer.encode(token, add_special_tokens=False)[0] for token in SPECIAL_TOKENS}
        self._bos, self._assistant, self._end = ids[BOS], ids[ASSISTANT], ids[END]

    def chat(self, conversation: Conversation) -> Encoded:
        """Return the whole conversation."""
        ids = self._text(render_prompt(self._tokenizer, conversation))
        counts = self._is_said(ids)
        if conversation.has_compact_calls:
            counts = [False] * len(ids)
        said = conversation.turns[-1].said
        found = Encoded(ids, counts)
        if conversation.budget_chars is not None:
            thought, _, answer = said.partition(THOUGHT_END)
            found.add(self._text(thought[: conversation.budget_chars] + THINK_END), counts=False)
            said = THOUGHT_END.partition(THINK_END)[2] + answer
        found.add([*self._text(said), self._end], counts=True)
        return found

    def plain(self, text: str) -> Encoded:
        """Return a text without roles."""
        found = Encoded()
        found.add([self._bos], counts=False)
        found.add([*self._text(text), self._end], counts=True)
        return found

    def _is_said(self, prompt: list[int]) -> list[bool]:
        """Return which tokens of a prompt the assistant has said: all but the beginning of what it says next."""
        last = len(prompt) - 1 - prompt[::-1].index(self._assistant)
        found, is_said = [], False
        for index, token in enumerate(prompt):
            found.append(is_said and index < last)
            is_said = (is_said or token == self._assistant) and token != self._end
        return found

    def _text(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True)
class Rows:
    """One batch of packed rows; all tensors are [num_rows, row_tokens].

    Attributes:
        ids: int64.
        positions: int64; start from 0 in each document.
        documents: int64; tokens attend within the same number only.
        targets: int64; the next token where it counts, otherwise -100.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    targets: torch.Tensor

    def attention_bias(self) -> torch.Tensor:
        """Return [num_rows, 1, row_tokens, row_tokens], bfloat16: 0 where a token attends, else very negative.

        A token attends to itself and to earlier tokens of its document.
        """
        same = self.documents[:, :, None] == self.documents[:, None, :]
        return torch.where(torch.tril(same), 0.0, -1e9).to(torch.bfloat16)[:, None]


class Packer:
    """Collects documents of at most `row_tokens` until the next one fits into no row of the batch."""

    def __init__(self, row_tokens: int, batch_tokens: int) -> None:
        self.row_tokens = row_tokens
        self._num_rows = batch_tokens // row_tokens
        self._clear()

    def _clear(self) -> None:
        self._rows: list[list[Encoded]] = [[] for _ in range(self._num_rows)]
        self._free = [self.row_tokens] * self._num_rows

    def add(self, document: Encoded) -> Rows | None:
        """Take a document; return a batch of the documents before it if there is no room left for it."""
        length = len(document.ids)
        full = None
        row = next((row for row, free in enumerate(self._free) if free >= length), None)
        if row is None:
            full, row = self._batch(), 0
            self._clear()
        self._rows[row].append(document)
        self._free[row] -= length
        return full

    def _batch(self) -> Rows:
        shape = (len(self._rows), self.row_tokens)
        ids, positions, targets = (
            torch.zeros(shape, dtype=torch.long),
            torch.zeros(shape, dtype=torch.long),
            torch.full(shape, -100),
        )
        documents = torch.full(shape, -1)
        for row, packed in enumerate(self._rows):
            at = 0
            for number, document in enumerate(packed):
                end = at + len(document.ids)
                tokens = torch.tensor(document.ids)
                ids[row, at:end] = tokens
                positions[row, at:end] = torch.arange(end - at)
                documents[row, at:end] = number
                counts = torch.tensor(document.counts[1:])
                targets[row, at : end - 1] = torch.where(counts, tokens[1:], -100)
                at = end
        return Rows(ids, positions, documents, targets)


def conversations(seed: int) -> Iterator[Conversation]:
    """Yield training conversations without end; the evaluation walks the same stream to prove what was not in it.

    Most of the first ones ask to repeat words: a model that has learned to copy learns the rest several times faster.
    """
    grammar = Grammar(seed)
    for index in count():
        if index < NUM_FIRST and index % FIRST_STORY_ONE_IN != 0:
            yield grammar.echo()
        else:
            yield grammar.form() if index % FORM_ONE_IN == 0 else grammar.conversation()


def batches(tokenizer: PreTrainedTokenizerFast, seed: int, batch_tokens: int) -> Iterator[tuple[int, Rows]]:
    """Yield batches without end, each with the number of conversations used so far; a seed fixes them."""
    encoder = Encoder(tokenizer)
    plain = Random(seed)
    packers = [Packer(row_tokens, batch_tokens) for row_tokens in ROW_TOKENS]
    for used, conversation in enumerate(conversations(seed), start=1):
        bare = plain.randrange(PLAIN_ONE_IN) == 0 and not conversation.tools and not conversation.is_thinking
        document = encoder.plain(conversation.turns[0].answer) if bare else encoder.chat(conversation)
        for packer in packers:
            if len(document.ids) <= packer.row_tokens:
                full = packer.add(document)
                if full is not None:
                    yield used, full
                break
