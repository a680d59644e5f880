"""How single tokens are written where an answer names them: log-probabilities. Special tokens have a name too."""

from __future__ import annotations

from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Final

from tokenizers import Tokenizer

from services.dispatcher.text.detokenizer import DetokenizerTable

MAX_CACHED: Final = 65_536
"""Tokens whose JSON is kept."""


class TokenNames:
    """Bytes and names by id.

    Args:
        tokenizer: of the model.
        table: made from it.
    """

    def __init__(self, tokenizer: Tokenizer, table: DetokenizerTable) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id: token.content.encode() for token_id, token in added.items() if token.special}
        self._table = table
        self.json_of = lru_cache(MAX_CACHED)(self._json_of)
        """The token's name as a JSON string, ASCII."""
        self.fields_of = lru_cache(MAX_CACHED)(self._fields_of)
        """The members of a JSON object that name the token: `"token":"é","bytes":[195,169]`, ASCII."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's text in UTF-8; it may begin or end within a character."""
        return self._special.get(token_id) or self._table.token_bytes(token_id)

    def name_of(self, token_id: int) -> str:
        r"""Return the token as a text: its own, or `bytes:\xf0\x9f` if it is no whole text (OpenAI's way)."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _json_of(self, token_id: int) -> str:
        return encode_basestring_ascii(self.name_of(token_id))

    def _fields_of(self, token_id: int) -> str:
        values = ",".join([str(byte) for byte in self.bytes_of(token_id)])
        return f'"token":{self._json_of(token_id)},"bytes":[{values}]'
