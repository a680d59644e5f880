"""What has happened in one engine since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """What happened since the start; only grows."""

    num_steps: int = 0
    """Batches that came back, failed ones included."""
    num_failed_steps: int = 0
    num_preemptions: int = 0
    """Sequences that gave way, by recompute or by swap."""
    num_pauses: int = 0
    """Times that a sequence that had been in a step kept its KV and was left out of the next that the scheduler chose,
    though nothing held it back; however many it was left out of until it went on. Whether it decodes or its prompt was
    begun is the same: it holds memory, and does not move. Where decodes take turns in lanes: left out of a step with
    one of them that had been in a step since."""
    num_opened_blocks: int = 0
    """Blocks of one sequence whose other end another one began to fill."""
    num_met_blocks: int = 0
    """Of these, those in which the two met: one of them went on in another block."""
    num_recomputed_tokens: int = 0
    """Tokens whose KV was computed again after a preemption, because it was not found in the cache: what it cost."""
    num_given_up_tokens: int = 0
    """Of these, tokens whose KV had been on the host: a copy failed, or another executor came and did not get it."""
    num_swap_outs: int = 0
    """Preemptions whose KV moved to host memory."""
    num_swap_ins: int = 0
    """Times that it was brought back."""
    num_brought_back_tokens: int = 0
    """Tokens whose KV came from host memory, back or for the first time; what the device had still is not counted."""
    num_failed_copies: int = 0
    """Copies to the host or back that failed: the KV was computed again."""
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    stalled_s: float = 0.0
    """Seconds that sequences spent without running after they had begun, summed over them: preempted, or swapping."""
    peak_used_blocks: int = 0
    """Most blocks in use in any step; where memory is unlimited, of any memory."""
    peak_demanded_blocks: int = 0
    """Most blocks held and asked for at one time: what would have had to be there for nobody to wait for memory."""
    num_prompt_tokens: int = 0
    """Prompt tokens of the sequences that were admitted, each sequence once."""
    num_prefix_cache_queries: int = 0
    """Of these, the tokens looked up in the prefix cache: all of them while it is on."""
    num_prefix_cache_hits: int = 0
    """Of these, the tokens whose KV was there already."""
    num_generated_tokens: int = 0
    num_finished: int = 0
    """Sequences that ended, for whatever reason."""
    busy_s: float = 0.0
    """Time that the executor spent in the steps that succeeded, by its own clock."""
