"""What can be set of the policy `bros`, for ablations."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.types import Value


class BrosSettings(Value):
    """What can be set."""

    group_tokens: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tokens of a group: its limit is so many times that of a token, and the paper names no number."""
    base_rows: Annotated[int, Field(ge=1, le=4096)] = 128
    """Rows of a batch at first, and whenever one would have lasted longer than the least residual."""
    ttft_s: Annotated[float, Field(gt=0)] = 0.4
    """Limit to the first token of requests that named none and have no reader."""
    tpot_s: Annotated[float, Field(gt=0)] = 0.2
    """And per further token; a step may last so long if nobody can be in time any more."""
    swaps_whole: bool = False
    """Who goes to the host takes all of its blocks along."""
    patience_s: Annotated[float, Field(gt=0)] = 60.0
    """The oldest best-effort request here, after it has been the oldest for so long, has the place of who is late."""
