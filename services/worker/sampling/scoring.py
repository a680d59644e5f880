"""What a step says of its rows, from its last hidden states and the head's products, and how torch finds it out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.sampling.draw import finite_largest


@dataclass(frozen=True, slots=True)
class Scores:
    """What a step says of its rows, valid until the next step; on the device, which may not have computed it yet."""

    finite: torch.Tensor
    """[n] bool, whether the hidden state of each row's last token is made of numbers"""
    logits: torch.Tensor
    """[k, vocab_size] float32 of the sampled rows; the owner may change them"""
    largest: torch.Tensor
    """[k] int64, id of the largest logit of each sampled row, the lowest id on a tie; vocab_size for a row with a logit
    that is not a number or infinitely large"""

    @classmethod
    def empty(cls, num_rows: int, num_sampled: int, vocab_size: int, device: torch.device) -> Scores:
        """Return memory for scores of so many rows."""
        return cls(
            finite=torch.empty(num_rows, dtype=torch.bool, device=device),
            logits=torch.empty((num_sampled, vocab_size), dtype=torch.float32, device=device),
            largest=torch.empty(num_sampled, dtype=torch.int64, device=device),
        )

    def first(self, num_rows: int) -> Scores:
        """Return those of the first rows, all of which are sampled."""
        return Scores(self.finite[:num_rows], self.logits[:num_rows], self.largest[:num_rows])


class Scoring:
    """Finds out what a step says of its rows, by torch's operators, on any device."""

    def finite(self, hidden: torch.Tensor, last: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """Return [n] bool, whether hidden states are made of numbers.

        Args:
            hidden: [t, hidden_size] behind the last layer.
            last: [n] int64, the tokens that are looked at.
            into: [n] bool, for the result; None: new memory.
        """
        finite = torch.isfinite(hidden.index_select(0, last).sum(dim=-1, dtype=torch.float32))
        return finite if into is None else into.copy_(finite)

    def largest(
        self, products: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `logits` and `largest` of the sampled rows; see `Scores`.

        Args:
            products: [k, vocab_size] of the head, in the model's type; k may be 0.
            into: [k, vocab_size] float32 and [k] int64, for the result; None: new memory.
        """
        if into is None:
            logits = products.float()
            return logits, finite_largest(logits)
        into[0].copy_(products)
        return into[0], into[1].copy_(finite_largest(into[0]))
