"""How single tokens are written where an answer names them: log-probabilities. Special tokens have a name too."""

from __future__ import annotations

from tokenizers import Tokenizer

from services.dispatcher.text.detokenizer import DetokenizerTable


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
