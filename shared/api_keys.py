"""API keys as everybody here agrees on them: how one is made and hashed, what it may do, which tier it may ask for.

A key is random enough (256 bits) that its plain SHA-256 tells nothing about it, so files hold digests only.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from enum import IntEnum, StrEnum
from typing import Final

KEY_PREFIX: Final = "sk-sluice-"
"""How a key begins, so that people and scanners of code recognise one."""
MAX_KEYS_BYTES: Final = 4 * 1024 * 1024
"""Largest file of keys."""
_RANDOM_BYTES: Final = 32
_KEY: Final = re.compile(r"[!-~]{16,512}\Z")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z")
TENANT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


class Scope(StrEnum):
    """What a key may do."""

    INFER = "infer"  # ask for answers, count tokens, list models
    BATCH = "batch"  # files and batches
    ADMIN = "admin"  # change the cluster
    METRICS = "metrics"  # read metrics and the state of the cluster


class Tier(IntEnum):
    """How urgent a request may be; ordered."""

    FLEX = 0
    DEFAULT = 1
    PRIORITY = 2

    @property
    def label(self) -> str:
        """The name that clients use."""
        return self.name.lower()

    @property
    def is_best_effort(self) -> bool:
        """Nobody waits for it (BROS's second class): it has what real-time work, all other tiers, leaves."""
        return self is Tier.FLEX


def make_key() -> str:
    """Return a new key; nobody can guess it, and nobody can read it out of its digest."""
    return KEY_PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def check_key(key: str) -> str:
    """Return a key that somebody chose, or "" for none.

    Raises:
        ValueError: it is none; the text says what is allowed, and not what was given.
    """
    if key and not _KEY.match(key):
        raise ValueError("this is no key (allowed: 16 to 512 letters, digits and other ASCII signs, no spaces)")
    return key


def check_digest(text: str) -> str:
    """Return what `hash_key` returned.

    Raises:
        ValueError: it is no digest; the text says what is allowed.
    """
    if not _DIGEST.match(text):
        raise ValueError("this is no SHA-256 (allowed: 64 hexadecimal digits, in small letters)")
    return text


def hash_key(key: str) -> str:
    """Return what a file holds of a key: its SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
