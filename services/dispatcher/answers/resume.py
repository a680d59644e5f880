"""A choice of a stream that can be resumed: its events carry ids, and what the client has already is left out.

An answer is resumed by handing all of its tokens to a new reader, whose detokeniser and stop strings see them as those
of the first one did; only what they had shown by then is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from services.dispatcher.answers.event_ids import EventIds, Position
from services.dispatcher.answers.logprobs import LogprobWriter
from services.dispatcher.answers.readers import Streamer
from services.dispatcher.answers.shapes import ChoiceShape
from services.dispatcher.endpoints.call import Choice
from services.dispatcher.http.sse import EventWriter
from services.dispatcher.session.request import FailureCode
from shared.types import FinishReason


class ResumableStreamer(Streamer):
    """A `Streamer` that goes on where another connection was lost.

    Args:
        choice: its own.
        shape: of the choice's events.
        stream: open.
        logprobs: None if nobody asked for them.
        ids: of the stream.
        seen: what the client has of this choice; None: nothing.
    """

    __slots__ = ("_digest", "_ids", "_is_end", "_seen")

    def __init__(
        self,
        choice: Choice,
        shape: ChoiceShape,
        stream: EventWriter,
        logprobs: LogprobWriter | None,
        ids: EventIds,
        seen: Position | None,
    ) -> None:
        super().__init__(choice, shape, stream, logprobs)
        self._ids = ids
        self._seen = seen  # None from the moment on at which everything is new
        self._digest = 0
        self._is_end = False

    def begin(self, now_s: float) -> None:
        """Write what comes before the first token, unless the client has it."""
        if self._seen is None:
            super().begin(now_s)

    def on_tokens(self, token_ids: Sequence[int], finish: FinishReason, now_s: float) -> bool:
        """Take the next tokens (the session's `Reader`)."""
        if self._seen is None:
            return super().on_tokens(token_ids, finish, now_s)
        rest = self._pass_over(self._seen, token_ids, finish)
        if rest is None:
            return not self._text.was_cut
        if self._choice.objection is not None:
            return False
        self._seen = None
        if self._is_end or not (rest or finish):
            return not self._text.was_cut
        return super().on_tokens(rest, finish, now_s)

    def _pass_over(self, seen: Position, token_ids: Sequence[int], finish: FinishReason) -> Sequence[int] | None:
        """Take the tokens whose text the client has; return those after them, or None while there are too few.

        If the answer is another one than the client's, `Choice.objection` says so.
        """
        num_left = seen.num_tokens - self._text.num_tokens
        head, rest = token_ids[:num_left], token_ids[num_left:]
        # a text that had not ended there has its last part still to come, even if nothing but the finish is left
        self._push(head, finish if seen.is_end and not rest else FinishReason.NONE)
        self._drop_shown()
        has_come = self._text.num_tokens == seen.num_tokens and (self._is_end or not seen.is_end)
        if not has_come and not (rest or finish or self._text.was_cut):
            return None
        is_other = not has_come and not self._text.was_cut
        if seen.digest is not None:
            is_other = not has_come or self._digest != seen.digest or self._is_end != seen.is_end
        if is_other:
            self._choice.objection = FailureCode.RESUME_MISMATCH
        return rest

    def _drop_shown(self) -> None:
        self._num_pending = 0
        self._text.take_thoughts()
        self._text.take_calls()
        for index, _ in self._text.take_shown():
            self._choice.opened.take_logprob(index)

    def _push(self, token_ids: Sequence[int], finish: FinishReason) -> str:
        num_before = self._text.num_tokens
        text = super()._push(token_ids, finish)
        taken = token_ids[: self._text.num_tokens - num_before]
        self._digest = crc32(b"".join([token_id.to_bytes(4, "little") for token_id in taken]), self._digest)
        self._is_end = self._is_end or bool(finish) or self._text.was_cut
        return text

    def _send(self, data: bytes, now_s: float) -> None:
        position = Position(self._text.num_tokens, self._digest, self._is_end)
        self._stream.write(self._ids.label(self._choice.index, position) + data, now_s)
