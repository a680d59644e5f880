"""Runs shapes on one worker, over the bus, as a dispatcher would; and reads the worker's step log."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from typing import Self

import numpy as np

from cli.exit_codes import FAILED, UNREACHABLE, CommandError
from cli.profile.shapes import ProfileShape
from shared.cost import CostModel
from shared.ids import DispatcherId, RequestId, StreamId, WorkerId
from shared.messages.lease import Renew
from shared.messages.report import WorkerPhase, WorkerReport
from shared.messages.request import Accepted, Cancel, Refused, Submit, pack_token_ids
from shared.messages.steps import StepLogPage, StepRecord
from shared.subjects import Subjects
from shared.token_batch import TokenBatch
from shared.transport.bus import Bus, BusError, Message, Subscription
from shared.types import FinishReason, SamplingParams
from shared.wire import WireError, decode, decode_json, encode

RENEW_PERIOD_S = 0.5
REQUEST_LIMIT_S = 5.0
SHAPE_LIMIT_S = 120.0
"""Seconds that one shape may take."""
REPORT_LIMIT_S = 5.0
"""Seconds in which a ready worker must have reported."""
_NO_STEP = 2**62
"""An id that no step has yet."""
MAX_TOKEN_ID = 100
"""Prompts are of ids below this: every vocabulary has them."""


async def find_worker(bus: Bus, subjects: Subjects, worker_id: str = "") -> WorkerReport:
    """Return the report of this worker, or of the first that is ready.

    Raises:
        CommandError: it did not report in time.
    """
    found: asyncio.Future[WorkerReport] = asyncio.get_running_loop().create_future()

    def take(message: Message) -> None:
        try:
            report = decode_json(message.data, WorkerReport)
        except WireError:  # the monitor counts and logs it
            return
        if report.phase is WorkerPhase.READY and worker_id in ("", report.worker_id) and not found.done():
            found.set_result(report)

    listening = await bus.subscribe(subjects.all_reports(), take)
    try:
        return await asyncio.wait_for(found, REPORT_LIMIT_S)
    except TimeoutError as error:
        who = f"worker '{worker_id}'" if worker_id else "any worker"
        message = f"nothing is heard of {who} being ready in cluster '{subjects.cluster}'"
        raise CommandError(message, "See `sluice status`, or name one with --worker", UNREACHABLE) from error
    finally:
        await listening.close()


async def read_steps(
    bus: Bus, subjects: Subjects, worker_id: WorkerId, first_step_id: int
) -> tuple[list[StepRecord], int]:
    """Return a worker's steps from an id on, and the id to go on with.

    Raises:
        CommandError: the worker keeps no step log, or does not answer.
    """
    steps: list[StepRecord] = []
    while True:
        page = await _read_page(bus, subjects, worker_id, first_step_id)
        if not page.max_steps:
            raise CommandError(f"{worker_id} keeps no step log", "Start it with step_log_size above 0", FAILED)
        steps += page.steps
        if page.next_step_id <= first_step_id or not page.steps:
            return steps, max(first_step_id, page.next_step_id)
        first_step_id = page.next_step_id


async def _read_page(bus: Bus, subjects: Subjects, worker_id: WorkerId, first_step_id: int) -> StepLogPage:
    data = await ask_worker(bus, subjects.steps(worker_id), worker_id, str(first_step_id).encode())
    return decode_json(data, StepLogPage)


async def ask_worker(bus: Bus, subject: str, worker_id: WorkerId, data: bytes) -> bytes:
    """Return a worker's answer.

    Raises:
        CommandError: it does not answer.
    """
    try:
        return await bus.request(subject, data, timeout_s=REQUEST_LIMIT_S)
    except BusError as error:
        raise CommandError(f"{worker_id} does not answer: {error}", "See `sluice status`", FAILED) from error


class Driver:
    """Submits requests to one worker and waits for their ends. A context manager; what runs at its end is cancelled.

    Args:
        bus: connected.
        subjects: of the cluster.
        worker_id: whom to load.
        rng: draws the prompts.
    """

    def __init__(self, bus: Bus, subjects: Subjects, worker_id: WorkerId, rng: np.random.Generator) -> None:
        self._bus = bus
        self._subjects = subjects
        self._worker_id = worker_id
        self._rng = rng
        self._id = DispatcherId(f"profile-{uuid.uuid4().hex[:12]}")
        self._num_submitted = 0
        self._running: dict[int, asyncio.Future[FinishReason]] = {}
        self._listening: Subscription | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._listening = await self._bus.subscribe(self._subjects.tokens(self._id), self._on_tokens)
        await self._bus.flush()
        self._renewing = asyncio.create_task(self._renew_forever(), name="renew")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        for stream in list(self._running):
            cancel = Cancel(request_id=self._request_id(stream), attempt=1)
            try:
                await self._bus.request(self._subjects.cancel(self._worker_id), encode(cancel), timeout_s=1.0)
            except BusError:
                break  # the worker is gone, and its sequences with it
        if self._listening is not None:
            await self._listening.close()

    async def _renew_forever(self) -> None:
        """Keep the worker from pausing what it runs for us; whether it answers is seen elsewhere."""
        data = encode(Renew(dispatcher_id=self._id))
        while True:
            await asyncio.sleep(RENEW_PERIOD_S)
            with suppress(BusError):
                await self._bus.request(self._subjects.renew(self._worker_id), data, timeout_s=REQUEST_LIMIT_S)

    async def run(self, shape: ProfileShape) -> bool:
        """Return whether the worker took the shape; then all its requests have ended.

        Raises:
            CommandError: the worker is gone, or does not get on.
        """
        ends: list[asyncio.Future[FinishReason]] = []
        is_taken = True
        for _ in range(shape.num_requests):
            end = await self._submit(shape)
            if end is None:
                is_taken = False
                break
            ends.append(end)
        try:
            async with asyncio.timeout(SHAPE_LIMIT_S):
                reasons = await asyncio.gather(*ends)
        except TimeoutError as error:
            hint = "See whether the worker is busy with other requests, and its log"
            raise CommandError(f"{self._worker_id} did not finish within {SHAPE_LIMIT_S:g} s", hint, FAILED) from error
        return is_taken and all(reason is FinishReason.LENGTH for reason in reasons)

    async def read_steps(self, first_step_id: int) -> tuple[list[StepRecord], int]:
        """See `read_steps`."""
        return await read_steps(self._bus, self._subjects, self._worker_id, first_step_id)

    async def read_cost(self) -> CostModel | None:
        """Return what the worker holds a step to cost just now; None: it does not say.

        Raises:
            CommandError: it does not answer.
        """
        return (await _read_page(self._bus, self._subjects, self._worker_id, _NO_STEP)).cost

    async def _submit(self, shape: ProfileShape) -> asyncio.Future[FinishReason] | None:
        """Return the future end of a request of this shape, or None if the worker refuses it."""
        stream, self._num_submitted = self._num_submitted, self._num_submitted + 1
        submit = Submit(
            request_id=self._request_id(stream),
            stream=StreamId(stream),
            attempt=1,
            dispatcher_id=self._id,
            prompt=pack_token_ids(self._rng.integers(3, MAX_TOKEN_ID, shape.num_prompt)),
            sampling=SamplingParams(max_tokens=shape.num_output, temperature=0.0, ignore_eos=True),
        )
        end: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()
        self._running[stream] = end  # before the answer: tokens may overtake it
        data = await ask_worker(self._bus, self._subjects.submit(self._worker_id), self._worker_id, encode(submit))
        try:
            decode(data, Accepted)
        except WireError:
            decode(data, Refused)
            del self._running[stream]
            return None
        return end

    def _request_id(self, stream: int) -> RequestId:
        return RequestId(f"{self._id}-{stream}")

    def _on_tokens(self, message: Message) -> None:
        batch = TokenBatch.unpack(message.data)
        for stream, finish in zip(batch.stream.tolist(), batch.finish.tolist(), strict=True):
            if finish and (end := self._running.pop(stream, None)) is not None and not end.done():
                end.set_result(FinishReason(finish))
