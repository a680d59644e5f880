"""How many threads compute a step on the CPU: one where more do not gain much. Pure.

    multiplications   …      16 M      24 M …
    threads             1     │    2    │    3 …      as many as there are, at most

A thread that helps has to be woken (some 50 µs) and waited for behind every product (a few µs, five times a layer), and
takes a core from whoever else needs one. So each is given at least half a millisecond of work, of which that is a small
part. What is computed does not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.worker.models.spec import ModelSpec

THREAD_WORK: Final = 8_000_000
"""Multiplications of a step for each thread: about half a millisecond."""
SHARED: Final = 4
"""Tokens that take as long as one more reading of the parameters."""


@dataclass(frozen=True, slots=True)
class StepThreads:
    """The threads that a model's steps may take."""

    most: int = 1
    are_given: bool = False
    """Somebody said how many: then every step takes them."""

    @classmethod
    def of(cls, given: int | None, num_cores: int, *, ordered: bool) -> StepThreads:
        """Return the threads of a worker.

        Args:
            given: what somebody said; None: nothing.
            num_cores: that the worker may take.
            ordered: results depend on the number of threads, and must not.
        """
        if given is not None:
            return cls(given, are_given=True)
        return cls(1 if ordered else max(num_cores, 1))

    def of_step(self, multiplications: int) -> int:
        """Return how many threads compute a step with so much work."""
        if self.are_given:
            return self.most
        return max(1, min(multiplications // THREAD_WORK, self.most))


ONE_THREAD: Final = StepThreads()


def layer_work(spec: ModelSpec) -> int:
    """Return the multiplications of a layer's products for one token."""
    attention = spec.hidden_size * 2 * (spec.q_size + spec.kv_size)
    return attention + (3 if spec.gated_mlp else 2) * spec.hidden_size * spec.intermediate_size


def step_work(spec: ModelSpec, num_layers: int, num_tokens: int, num_keys: int, num_sampled: int) -> int:
    """Return a step's work, in multiplications of one token: of more tokens each takes a `1 / SHARED`.

    Args:
        spec: the model.
        num_layers: that are computed here.
        num_tokens: of all rows.
        num_keys: that all of these tokens see together, at most.
        num_sampled: rows whose next token is wanted.
    """
    layers = num_layers * (_shared(num_tokens) * layer_work(spec) + 2 * num_keys * spec.q_size)
    return int(layers + _shared(num_sampled) * spec.vocab_size * spec.hidden_size)


def _shared(count: int) -> float:
    """Return as how many tokens by themselves so many count, which read the same parameters."""
    return 1 + (count - 1) / SHARED if count else 0
