"""Requests on their way into the engine: submit, cancel, replay. Checks, refuses, and wakes the step loop.

No policy here, and no waiting but for a grammar to be compiled: each handler touches the engine once and answers. A
cancellation may overtake its submission on the bus, so cancelled names are remembered for a while and refused when they
arrive.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, TypeAdapter

from services.worker.engine.best_effort import may_be_sent_back, num_waiting_real_time, parked_best_effort
from services.worker.engine.engine import Engine
from services.worker.engine.stats import count_free_blocks, most_parked, most_waiting
from services.worker.sequences.config import AddRefusal, NewSequence
from services.worker.serving.closing import Closing
from services.worker.serving.emitter import Emitter
from services.worker.serving.leases import Leases
from services.worker.serving.uploads import Uploads
from shared.grammars import GrammarError
from shared.ids import StreamId
from shared.messages.request import (
    Accepted,
    Cancel,
    Cancelled,
    PrefixSource,
    RefusalReason,
    Refused,
    Replay,
    ReplayUnknown,
    Submit,
    Upload,
    Uploaded,
)
from shared.subjects import check_token
from shared.token_batch import stream_batch
from shared.transport.bus import Message
from shared.wire import decode, decode_union, encode

_QUESTIONS: TypeAdapter[Submit | Upload] = TypeAdapter(Annotated[Submit | Upload, Field(discriminator="kind")])
MAX_REMEMBERED = 16_384
"""Requests whose newest attempt is remembered."""
MAX_DETAIL_CHARS = 500
"""Of what the library says of a grammar."""
MAX_TOMBSTONES = 4096
"""Cancellations remembered for submissions that are still on their way."""


class Intake:
    """The engine's door. Every method runs on the event loop, between two steps of the loop's own code.

    Args:
        engine: what it leads to.
        emitter: knows the worker's id.
        leases: of the dispatchers that ask.
        now: the worker's clock.
        wake: the step loop.
        prepare_grammar: takes a while for a grammar, so that its sequences need not, or raises `GrammarError`; None:
            nothing is held to any.
    """

    def __init__(
        self,
        engine: Engine,
        emitter: Emitter,
        leases: Leases,
        now: Callable[[], float],
        wake: Callable[[], None],
        prepare_grammar: Callable[[bytes], None] | None = None,
    ) -> None:
        self._engine = engine
        self._emitter = emitter
        self._leases = leases
        self._now = now
        self._wake = wake
        self._prepare_grammar = prepare_grammar
        self.closing = Closing(now)
        self.on_new: Callable[[int, PrefixSource | None], None] = lambda _row, _source: None
        """Called with each row that has come, and a worker that may have more of its prompt."""
        self._open = False
        self._is_aside = False
        self._uploads = Uploads()
        self._tombstones: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._newest: OrderedDict[str, int] = OrderedDict()

    def open(self) -> None:
        """Take submissions from now on."""
        self._open = True

    def close(self) -> None:
        """Refuse submissions from now on; what runs goes on."""
        self._open = False

    @property
    def is_serving(self) -> bool:
        """Submissions are taken, or would be if the worker were not a stage of another one's group."""
        return self._open

    def stand_aside(self) -> None:
        """Refuse submissions while this worker is a stage of another one's group."""
        self._is_aside = True

    def serve_again(self) -> None:
        """It is no longer."""
        self._is_aside = False

    @property
    def is_open(self) -> bool:
        """Submissions are taken."""
        return self._closed is None

    @property
    def _closed(self) -> RefusalReason | None:
        """Why nothing is taken now; None if something is."""
        if not self._open:
            return RefusalReason.DRAINING
        if self._is_aside:
            return RefusalReason.STAGE
        return RefusalReason.CLOSING if self.closing.why else None

    async def submit(self, message: Message) -> bytes:
        """Answer a `Submit` with `Accepted` or `Refused`, and a part of a long one with `Uploaded`."""
        asked = decode_union(message.data, _QUESTIONS)
        if isinstance(asked, Upload):
            is_refused = self._closed not in {None, RefusalReason.CLOSING}  # what it opens with comes after
            num_bytes = 0 if is_refused else self._uploads.add(asked, self._now())
            return encode(Uploaded(request_id=asked.request_id, num_bytes=num_bytes))
        if asked.sampling.grammar and self._prepare_grammar is not None:
            try:
                await asyncio.to_thread(self._prepare_grammar, asked.sampling.grammar)
            except GrammarError as error:
                detail = error.reason[:MAX_DETAIL_CHARS]
                return encode(Refused(request_id=asked.request_id, reason=RefusalReason.INVALID, detail=detail))
        if asked.reopens:
            self.closing.reopen()
        return encode(self._admit(asked))

    def _admit(self, submit: Submit) -> Accepted | Refused:
        def refuse(reason: RefusalReason, detail: str = "", newest_attempt: int = 0) -> Refused:
            return Refused(
                request_id=submit.request_id,
                reason=reason,
                detail=detail,
                open_worker=self.closing.open_worker if reason is RefusalReason.CLOSING else None,
                num_free_blocks=count_free_blocks(self._engine) if reason is RefusalReason.NO_ROOM else 0,
                newest_attempt=newest_attempt,
            )

        closed, newest = self._closed, self._newest.get(submit.request_id, 0)
        runs_here = (submit.request_id, newest) in self._engine.registry.row_of
        if closed is not None and not (closed is RefusalReason.CLOSING and runs_here):
            return refuse(closed)
        if (submit.request_id, submit.attempt) in self._tombstones:
            return refuse(RefusalReason.CANCELLED, newest_attempt=submit.attempt)
        is_here = (submit.request_id, submit.attempt) in self._engine.registry.row_of
        if submit.attempt < newest or (submit.attempt == newest and not is_here):
            return refuse(RefusalReason.DUPLICATE, newest_attempt=newest)
        if submit.uploaded is not None:
            data = self._uploads.take(submit.request_id, submit.attempt, sum(submit.uploaded))
            if data is None:
                return refuse(RefusalReason.FULL, "not all of its parts are here")
            ids = {"prompt": data[: submit.uploaded[0]], "generated": data[submit.uploaded[0] :]}
            submit = submit.model_copy(update=ids)
        if not submit.prompt or len(submit.prompt) % 4 or len(submit.generated) % 4:
            return refuse(RefusalReason.INVALID, "token ids are not whole u32 values")
        try:
            check_token(submit.dispatcher_id)
        except ValueError as error:
            return refuse(RefusalReason.INVALID, str(error))
        row = self._take(submit, is_here=is_here)
        if isinstance(row, RefusalReason):
            return refuse(row, newest_attempt=newest)
        self._remember(submit)
        self._wake()
        return Accepted(
            request_id=submit.request_id,
            attempt=submit.attempt,
            incarnation=self._leases.incarnation,
            num_output=self._engine.registry.num_outputs(submit.request_id, submit.attempt),
            num_preemptions=int(self._engine.table.num_preemptions[row]),
        )

    def _take(self, submit: Submit, *, is_here: bool) -> int | RefusalReason:
        """Hand it to the engine; who has no token yet and finds as many waiting as may had better wait elsewhere."""
        registry, new = self._engine.registry, self._new_sequence(submit)
        row = registry.hand_over(new)
        if row is not None:
            return row
        if not is_here and self._is_full(new):
            return RefusalReason.FULL
        num_blocks = -(-(new.prompt.size + new.generated.size) // self._engine.config.block_size)
        if submit.needs_room and num_blocks > count_free_blocks(self._engine):  # as if nothing of it were cached
            return RefusalReason.NO_ROOM
        outcome = registry.add(new)
        if outcome is AddRefusal.FULL and not new.tier.is_best_effort:
            sent_back = may_be_sent_back(self._engine)
            if sent_back is not None:  # to its dispatcher, where it waits
                registry.release([sent_back], "")
                outcome = registry.add(new)
        if isinstance(outcome, AddRefusal):
            return RefusalReason(outcome.value)
        if not is_here:
            self.on_new(outcome, submit.prefix)
        return outcome

    def _is_full(self, new: NewSequence) -> bool:
        """Return whether as many wait as may. Best effort counts apart, and also if it has begun: it can wait."""
        engine = self._engine
        if new.tier.is_best_effort:
            return bool(parked_best_effort(engine).size >= most_parked(engine))
        return not new.generated.size and num_waiting_real_time(engine) >= most_waiting(engine)

    def _new_sequence(self, submit: Submit) -> NewSequence:
        now_s = self._now()
        return NewSequence(
            request_id=submit.request_id,
            stream=submit.stream,
            attempt=submit.attempt,
            channel=self._leases.hear(submit.dispatcher_id, submit.incarnation),
            prompt=submit.prompt_ids(),
            generated=submit.generated_ids(),
            sampling=submit.sampling,
            arrival_s=now_s - submit.age_s,
            expires_s=now_s + submit.remaining_s,
            tier=submit.tier,
            slo=submit.slo,
            qoe=submit.qoe,
            displayed=submit.displayed,
            thought_s=submit.thought_s,
            last_token_s=None if submit.token_age_s is None else now_s - submit.token_age_s,
            num_preemptions=submit.num_preemptions,
            fork_of=submit.fork_of,
            cache_salt=submit.cache_salt,
        )

    def _remember(self, submit: Submit) -> None:
        """A copy of this submission, or an older one, may still be on its way."""
        self._newest[submit.request_id] = submit.attempt
        self._newest.move_to_end(submit.request_id)
        while len(self._newest) > MAX_REMEMBERED:
            self._newest.popitem(last=False)

    async def cancel(self, message: Message) -> bytes:
        """Answer a `Cancel`; the KV is free now, or when the step that is running ends."""
        cancel = decode(message.data, Cancel)
        found = self._engine.registry.cancel(cancel.request_id, cancel.attempt)
        if not found:
            self._tombstones[(cancel.request_id, cancel.attempt)] = None
            while len(self._tombstones) > MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)
        self._wake()
        return encode(Cancelled(request_id=cancel.request_id, found=found))

    async def replay(self, message: Message) -> bytes:
        """Answer a `Replay` with a token batch of that one stream (its handle is 0), or with `ReplayUnknown`."""
        replay = decode(message.data, Replay)
        found = self._engine.registry.replay(replay.request_id, replay.attempt, replay.first_index)
        if found is None:
            return encode(ReplayUnknown(request_id=replay.request_id, incarnation=self._leases.incarnation))
        tokens, finish = found
        batch = stream_batch(
            self._emitter.worker_id,
            counter=0,
            stream=StreamId(0),  # the asker knows which stream it asked about
            attempt=replay.attempt,
            first_index=replay.first_index,
            tokens=tokens,
            finish=finish,
            logprobs=self._engine.logprobs.last((replay.request_id, replay.attempt), len(tokens)),
        )
        parts = batch.split(self._emitter.max_payload_bytes)
        return parts[0].pack()  # what does not fit one message is asked for again
