"""Where a resumable request runs: key = request id in the owners' bucket, as JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.ids import WorkerId
from shared.messages.base import ControlMessage


class Owner(ControlMessage):
    """For the dispatcher that is asked for the request next. A hint: the worker decides by attempts."""

    kind: Literal["owner"] = "owner"
    worker_id: WorkerId
    attempt: Annotated[int, Field(ge=1)]
