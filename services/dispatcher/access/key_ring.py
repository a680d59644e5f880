"""Keys by digest. Immutable: when the file changes, another ring takes its place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from hmac import compare_digest
from typing import Final

from services.dispatcher.access.grants import Grant
from shared.api_keys import hash_key

MAX_KEY_CHARS: Final = 512
"""A longer one is wrong, unseen."""
_PREFIX_CHARS: Final = 8


class KeyRing:
    """Finds the grant of a key.

    Args:
        grants: by digest (`hash_key`).
    """

    def __init__(self, grants: Mapping[str, Grant]) -> None:
        self._by_prefix: defaultdict[str, list[tuple[str, Grant]]] = defaultdict(list)
        for digest, grant in grants.items():
            self._by_prefix[digest[:_PREFIX_CHARS]].append((digest, grant))
        self._num_keys = len(grants)

    def __len__(self) -> int:
        return self._num_keys

    def find(self, key: str) -> Grant | None:
        """Return the key's grant, None if it is not on the ring.

        Which digests share the first digits shows in the time that this takes; how much more of one agrees does not.
        """
        if len(key) > MAX_KEY_CHARS:
            return None
        digest = hash_key(key)
        found: Grant | None = None
        for known, grant in self._by_prefix.get(digest[:_PREFIX_CHARS], ()):
            if compare_digest(known, digest):
                found = grant
        return found
