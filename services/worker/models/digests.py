"""What the bytes of every parameter are known by, so that parameters that come back are those that went.

    load ──► digest of each part, by (layer, name)          a part that comes back, from wherever ──► the same digest?
                 └──► digest of the model                    another worker's layers and KV        ──► the same digest?

A digest is of the bytes as they lie in memory: type, stacking and order included. Instances of one model and type have
the same ones. Deviation: KunServe names no check of parameters that are pulled from another instance, nor of the model
that the other stages of a group have loaded under the same name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import torch

from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ModelWeights, ParameterBuffer
from shared.host import count_cores

DIGEST_BYTES: Final = 16
MAX_THREADS: Final = 8
_PIECE_BYTES: Final = 16 * 2**20
"""Of what is on a device and is copied to be read."""

PartKey = tuple[int | None, str]
"""Layer, None: outside of the layers; and name of the part."""


def digest(part: torch.Tensor) -> bytes:
    """Return the digest [DIGEST_BYTES] of a contiguous tensor's bytes. The interpreter is free meanwhile."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    flat = part.reshape(-1).view(torch.uint8)
    step = len(flat) if flat.device.type == "cpu" else _PIECE_BYTES
    for first in range(0, len(flat), max(step, 1)):
        found.update(flat[first : first + step].cpu().numpy().data)
    return found.digest()


def digests_of(weights: ModelWeights) -> dict[PartKey, bytes]:
    """Return the digests of all parts of a model, which several threads read."""
    buffers: dict[int | None, ParameterBuffer] = {None: weights.outer, **dict(enumerate(weights.layers))}
    keys = [(layer, part.name) for layer, buffer in buffers.items() for part in buffer.parts]
    num_threads = count_cores(MAX_THREADS)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="digest") as threads:
        found = threads.map(lambda key: digest(buffers[key[0]][key[1]]), keys)
        return dict(zip(keys, found, strict=True))


def model_digest(spec: ModelSpec, digests: Mapping[PartKey, bytes], *more: str) -> str:
    """Return what workers have in common of whom one can go on with another's layers and KV, in hexadecimal digits.

    Args:
        spec: of the model; which tokens end a text, and what its folder has besides, does not count.
        digests: of all of its parts.
        more: what else KV depends on, and how it lies in memory.
    """
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    found.update(repr((replace(spec, eos_token_ids=(), left_out=()), more)).encode())
    for layer, name in sorted(digests, key=repr):
        found.update(f"{layer} {name} ".encode() + digests[layer, name])
    return found.hexdigest()


def wrong_parts(digests: Mapping[PartKey, bytes], layer: int | None, buffer: ParameterBuffer) -> list[str]:
    """Return the names of the parts whose bytes are not those that were loaded first.

    Args:
        digests: of `digests_of`.
        layer: of the buffer; None: outside of the layers.
        buffer: with memory behind its parts.
    """
    return [part.name for part in buffer.parts if digest(buffer[part.name]) != digests[layer, part.name]]
