"""Attention to keys that lie at another worker."""

from __future__ import annotations

from typing import Final

SPLIT_KEYS: Final = 256  # kSplit in native/src/attention_work.h
"""Positions of a split of the context, counted from 0: what one side attends by itself (`attention/remote.py`)."""


class RemoteLostError(Exception):
    """Keys that lie elsewhere cannot be attended any more: whoever has them is gone, or has failed."""
