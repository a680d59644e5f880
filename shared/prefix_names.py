"""Names of token runs: the same in every process, so that a dispatcher can ask which worker holds a prefix.

A full block is named by everything that its KV depends on: the salt, and every token from the sequence's first to the
block's last. So equal names mean equal KV.

    name(block 0) = hash(hash(salt), tokens of block 0)      name(block i) = hash(name(block i - 1), tokens of block i)

The hash is BLAKE2b with 128 bits: nobody can make two prompts with one name.
"""

from __future__ import annotations

from hashlib import blake2b

RunName = bytes
"""16 bytes; names a block's tokens and all before them."""

_NAME_BYTES = 16
_MARK_BYTES = 4
NUM_MARKS = 2 ** (8 * _MARK_BYTES)
_TOKEN_BYTES = 4


def root_name(salt: str) -> RunName:
    """Return the name of the empty run."""
    return blake2b(salt.encode(), digest_size=_NAME_BYTES).digest()


def mark_of(name: RunName) -> int:
    """Return the number below `NUM_MARKS` by which sketches list a name; some names have the same, by chance."""
    return int.from_bytes(name[:_MARK_BYTES], "little")


def following_names(before: RunName, tokens: bytes, block_size: int) -> list[RunName]:
    """Return the names of the full blocks that follow a run; a rest of less than a block has none.

    Args:
        before: the run.
        tokens: ids, little-endian, 32 bits each.
        block_size: tokens of a block.
    """
    step = _TOKEN_BYTES * block_size
    names: list[RunName] = []
    for begin in range(0, len(tokens) - step + 1, step):
        before = blake2b(before + tokens[begin : begin + step], digest_size=_NAME_BYTES).digest()
        names.append(before)
    return names
