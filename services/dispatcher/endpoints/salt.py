"""Whose cached prompts a request may share: those of the same tenant with the same salt, nobody else's.

What a prompt took to its first token tells whether somebody sent it before. So prompts are cached per caller: the salt
is a digest of who calls (the tenant; where no key is asked for, what `Authorization` holds), and of the request's own
`cache_salt` where one key serves several people.
"""

from __future__ import annotations

import hashlib
from typing import Final

from services.dispatcher.endpoints.fields import Fields
from services.dispatcher.http.errors import invalid

MAX_SALT_CHARS: Final = 512
_DIGEST_BYTES: Final = 16


def parse_salt(fields: Fields) -> str:
    """Return the request's own salt; "" if it gives none."""
    salt = fields.text("cache_salt")
    if salt is None:
        return ""
    if not salt:
        raise invalid("string_below_min_length", "cache_salt", "'cache_salt' must not be empty.")
    if len(salt) > MAX_SALT_CHARS:
        message = f"'cache_salt' has at most {MAX_SALT_CHARS} characters."
        raise invalid("string_above_max_length", "cache_salt", message)
    return salt


def cache_salt(identity: str, own_salt: str) -> str:
    """Return `Submit.cache_salt`: the same in every dispatcher; "" for a request without key and salt.

    Args:
        identity: `Grant.identity` of the sender.
        own_salt: from `parse_salt`.
    """
    if not identity and not own_salt:
        return ""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"sluice-salt")
    for part in (identity, own_salt):
        data = part.encode("utf-8", "surrogateescape")
        digest.update(len(data).to_bytes(4, "little") + data)  # lengths: no two pairs read alike
    return digest.hexdigest()
