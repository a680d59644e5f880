"""Parameters of a CUDA device: known by the same digests as in main memory, and lent from one device to another."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import torch

from services.worker.models.digests import PartKey, digest, wrong_parts
from services.worker.models.weights import ModelWeights, ParameterBuffer, Part, buffer_bytes
from services.worker.peers.frames import FrameKind, FrameSocket
from services.worker.peers.greeting import PeerWelcome
from services.worker.peers.link_priority import LinkPriority
from services.worker.roles.parameter_lending import ParameterLender, PeerSource
from shared.layers import LayerRange
from tests.support.gpu import ON_GPU

pytestmark = ON_GPU

CUDA = torch.device("cuda", 0)
PARTS = (Part("qkv", (700, 513), ()), Part("down", (33, 9), ()))


def buffer_of(seed: int) -> ParameterBuffer:
    """Return parts of drawn bytes on the device."""
    drawn = np.random.default_rng(seed).integers(0, 255, buffer_bytes(PARTS, torch.bfloat16), dtype=np.uint8)
    return ParameterBuffer(PARTS, torch.bfloat16, torch.from_numpy(drawn).to(CUDA))


def test_a_digest_is_that_of_the_same_bytes_in_main_memory() -> None:
    buffer = buffer_of(0)
    for part in PARTS:
        assert digest(buffer[part.name]) == digest(buffer[part.name].cpu())
    assert digest(buffer["qkv"]) != digest(buffer_of(1)["qkv"])


@pytest.mark.parametrize("piece_elements", [None, 5000])
def test_parameters_go_from_one_buffer_of_the_device_to_another(piece_elements: int | None) -> None:
    lent, taken = buffer_of(0), buffer_of(1)
    digests: dict[PartKey, bytes] = {(0, part.name): digest(lent[part.name]) for part in PARTS}
    assert wrong_parts(digests, 0, taken) == ["qkv", "down"]
    lender = ParameterLender(ModelWeights(lent.only(()), (lent,)), LinkPriority())
    here, there = socket.socketpair()
    lender.welcome(there, PeerWelcome(num_blocks=1, block_size=16))
    FrameSocket(here).receive(FrameKind.GREETING)
    source = PeerSource("w1", here, LayerRange(0, 1), ())
    assert sum(source.fill(0, taken, piece_elements)) == taken.num_bytes
    assert not wrong_parts(digests, 0, taken)
    source.close()
    lender.close()
