"""The text of one answer while its tokens come: detokenised, cut at a stop string, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from json.encoder import encode_basestring

from services.dispatcher.session.stop_strings import StopMatcher
from services.dispatcher.text.detokenizer import Detokenizer
from shared.types import FinishReason


class AnswerText:
    """Turns tokens into text that may be shown.

    Args:
        detokenizer: a fresh one.
        stops: stop strings.
        shown_stop_ids: stop ids that the request named; any other token that stops the answer (EOS) has no text.
    """

    __slots__ = ("_detokenizer", "_shown_stop_ids", "_stops", "num_tokens", "was_cut")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], shown_stop_ids: Sequence[int]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops) if stops else None
        self._shown_stop_ids = frozenset(shown_stop_ids)
        self.num_tokens = 0
        """Tokens of the answer so far, for the bill: up to the one that completed a stop string."""
        self.was_cut = False
        """A stop string has ended the text."""

    def push(self, token_ids: Sequence[int], finish: FinishReason) -> str:
        """Return the text that becomes visible; "" if it is not decided yet, or the text has been cut."""
        visible = token_ids
        if finish is FinishReason.STOP and token_ids and token_ids[-1] not in self._shown_stop_ids:
            visible = token_ids[:-1]
        if self._stops is None:
            self.num_tokens += len(token_ids)
            text = self._detokenizer.push(visible) if visible else ""
            return text + self._detokenizer.flush() if finish else text
        return self._push_with_stops(self._stops, visible, len(token_ids) - len(visible), finish)

    def _push_with_stops(
        self, stops: StopMatcher, token_ids: Sequence[int], num_hidden: int, finish: FinishReason
    ) -> str:
        texts: list[str] = []
        for token_id in token_ids:  # one by one: the bill ends with the token that completes a stop string
            if self.was_cut:
                return "".join(texts)
            self.num_tokens += 1
            text, self.was_cut = stops.push(self._detokenizer.push((token_id,)))
            texts.append(text)
        if finish and not self.was_cut:
            self.num_tokens += num_hidden
            text, self.was_cut = stops.push(self._detokenizer.flush())
            texts.append(text if self.was_cut else text + stops.flush())
        return "".join(texts)


def json_text(text: str) -> bytes:
    """Return the text as a JSON string in UTF-8; characters that some clients take for ends of lines are escaped."""
    encoded = encode_basestring(text)
    if not encoded.isascii():
        encoded = encoded.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")
    return encoded.encode()
