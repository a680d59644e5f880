"""The target's side of a migration: it has room, pulls the KV while the source goes on, and then the request itself.

    ASKED     a connection to the source; which full blocks are there?
    RESERVED  blocks for those that are not here, and some for what comes next; those that are here stay
    COPYING   in rounds, until all that the source has computed is here
    LEAVING   the source releases it toward this worker; left out if it is recovered from a worker that is lost
    DONE      its dispatcher submits the next attempt here, which finds its KV; what is reserved is kept for `KEPT_S`

From each of them it may fail (the source refuses or is lost, there is no room, time is over, this worker's layers are
about to change): then nothing is kept, and the request goes on where it is. What has come is a cached prefix.

Source: Llumnix (OSDI'24, section 4.2). Deviations: see `shared/messages/fetch.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from services.worker.contract.kept_kv import KeptKv
from services.worker.engine.demand import count_promised_blocks, count_queued_for_memory
from services.worker.engine.engine import Engine
from services.worker.migration.kv_link import SILENCE_S, KvLink, KvNetwork, KvRate
from services.worker.migration.kv_messages import HasLeft, KvListed, LetGo, ListKv, NotHere, unpack_names
from services.worker.peers.frames import PeerLostError
from services.worker.peers.greeting import PeerRefusedError
from shared.errors import WireError
from shared.ids import RequestId, WorkerId
from shared.messages.fetch import Fetch, Fetched, FetchOutcome, FetchReason
from shared.prefix_names import RunName
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner

MAX_AT_ONCE: Final = 4
"""Requests whose KV comes at a time; others wait for their turn."""
LIMIT_S: Final = 30.0
"""Longest time that one takes, but for the wait for its turn; a connection that is silent is lost before."""
TURN_LIMIT_S: Final = 4.0
"""Longest wait for its turn."""
ROOM_BLOCKS: Final = 3
"""Free blocks for what a request computes next: the rest of its KV, and more."""
POLL_S: Final = 0.01
"""Between looks for what is being computed, or comes for another request that began alike."""
PIECE_BLOCKS: Final = 64
"""Most that is asked for at a time, so that what has come is there if the rest does not come."""
FIRST_BLOCKS: Final = 4
"""Asked for first, and then twice as many each time: how fast a slow link is gets known soon."""
LOST_SILENCE_S: Final = 0.5
"""After which a source that its dispatcher has lost is not waited for: its requests could be computed again instead."""
SILENT_S: Final = 5.0
"""For how long it is asked for nothing more then."""
KEPT_S: Final = 5.0
"""How long KV and room are kept for a request that has been released toward this worker and has not come."""
_log = get_logger()


class _FetchFailedError(Exception):
    """It does not come about; the arguments are outcome and detail."""

    def __init__(self, outcome: FetchOutcome, detail: str = "") -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


class KvFetching:
    """Of one worker.

    Args:
        engine: of this worker.
        network: the way to others.
        wake: lets its step loop look at the engine again.
        refusal: returns why none is fetched now; empty: some may be.
        now: the worker's clock, seconds.
        tasks: owns what is under way.
    """

    def __init__(
        self,
        engine: Engine,
        network: KvNetwork,
        *,
        wake: Callable[[], None],
        refusal: Callable[[], str],
        now: Callable[[], float],
        tasks: TaskOwner,
    ) -> None:
        self.outcomes: Counter[tuple[FetchReason, FetchOutcome]] = Counter()
        """Of all that were asked for since the start."""
        self.num_as_tokens = 0
        """Of these, the ones that were moved without KV."""
        self.num_bytes = 0
        """That have come since the start."""
        self.busy_s = 0.0
        """Seconds for which they were under way."""
        self.rate = KvRate()
        """Over requests of which some has come."""
        self._engine = engine
        self._network = network
        self._wake = wake
        self._refusal = refusal
        self._now = now
        self._tasks = tasks
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._under_way: dict[RequestId, asyncio.Task[Fetched]] = {}
        self._states: dict[RequestId, _Fetch] = {}
        self._silent: dict[WorkerId, float] = {}
        """Lost workers that did not answer: until when they are not asked again."""
        self._kept: dict[RequestId, asyncio.TimerHandle] = {}
        """Requests that are to come: when nothing is kept for them any more."""

    async def fetch(self, asked: Fetch) -> Fetched:
        """Return what came of it, when it is over."""
        if asked.request_id in self._under_way:
            answer = _answered(FetchOutcome.REFUSED, "it is being fetched already")
        else:
            task = self._tasks.start(self._fetch(asked), name=f"fetch-{asked.request_id}")
            self._under_way[asked.request_id] = task
            try:
                answer = await asyncio.shield(task)
            except asyncio.CancelledError:
                if not task.cancelled():
                    raise
                answer = _answered(FetchOutcome.REFUSED, "its layers change, or it is about to stop")
            finally:
                self._under_way.pop(asked.request_id, None)
        self.outcomes[asked.reason, answer.outcome] += 1
        return answer

    def count(self, reason: FetchReason, outcome: FetchOutcome, num_bytes: int, took_s: float) -> None:
        """Count what came otherwise than by a `Fetch`."""
        self.outcomes[reason, outcome] += 1
        self.num_bytes += num_bytes
        self.busy_s += took_s

    @property
    def num_under_way(self) -> int:
        """Requests that come now."""
        return len(self._under_way)

    @property
    def bytes_per_s(self) -> float:
        """See `MigrationPart`."""
        return self.rate.bytes_per_s or max((one.bytes_per_s for one in self._states.values()), default=0.0)

    def state_of(self, request_id: RequestId) -> str:
        """Return how far a request is, in a word; empty: nothing is under way for it, and nothing kept."""
        return self._states[request_id].state if request_id in self._states else ""

    async def stop(self) -> None:
        """End all that are under way, and keep nothing for anybody; nothing is written when it returns."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for request_id in list(self._kept):
            self._keep_no_more(request_id)

    async def _fetch(self, asked: Fetch) -> Fetched:
        self._keep_no_more(asked.request_id)
        began_s, has_turn, has_moved = self._now(), False, False
        one = self._states[asked.request_id] = _Fetch(asked, self._engine, self._wake, self._now)
        try:
            async with asyncio.timeout(TURN_LIMIT_S) as limit, self._turns:
                has_turn = True
                limit.reschedule(asyncio.get_running_loop().time() + LIMIT_S)
                await self._bring(one)
            has_moved = True
            self.num_as_tokens += asked.as_tokens
            answer = _answered(FetchOutcome.MOVED)
        except _FetchFailedError as error:
            answer = _answered(error.outcome, error.detail)
        except (PeerLostError, WireError) as error:
            answer = _answered(FetchOutcome.LOST, str(error))
            if asked.reason is FetchReason.RECOVERY:
                self._note_silence(asked.source)
        except PeerRefusedError as error:
            answer = _answered(FetchOutcome.REFUSED, str(error))
        except TimeoutError:
            outcome = FetchOutcome.LATE if has_turn else FetchOutcome.BUSY
            answer = _answered(outcome, f"after {self._now() - began_s:.3g} s")
        finally:
            if has_moved:
                self._keep(asked.request_id, one.num_computed)
            else:
                del self._states[asked.request_id]
                self._engine.sharing.coming.release(asked.request_id)
                self._wake()
            self.num_bytes += one.num_bytes
            self.busy_s += self._now() - began_s
            self.rate.note(one.bytes_per_s)
        said = answer.outcome.value, answer.detail, one.num_blocks, round(self._now() - began_s, 4)
        names = ("outcome", "detail", "num_blocks", "took_s")
        _log.info("request_fetched", rid=asked.request_id, source=asked.source, **dict(zip(names, said, strict=True)))
        return answer.model_copy(update={"num_blocks": one.num_blocks})

    async def _bring(self, one: _Fetch) -> None:
        if reason := self._refusal():
            raise _FetchFailedError(FetchOutcome.REFUSED, reason)
        if self._engine.registry.newest_row(one.asked.request_id) is not None:
            raise _FetchFailedError(FetchOutcome.REFUSED, "it runs here")
        if count_queued_for_memory(self._engine):
            raise _FetchFailedError(FetchOutcome.FULL, "others wait for memory here")
        if self._engine.table.num_sequences + len(self._states) > self._engine.config.max_sequences:
            raise _FetchFailedError(FetchOutcome.FULL, "it has as many sequences as it takes")
        asked = one.asked
        is_lost = asked.reason is FetchReason.RECOVERY
        if is_lost and self._now() < self._silent.get(asked.source, 0.0):
            raise _FetchFailedError(FetchOutcome.LOST, "it did not answer for another request")
        silence_s = LOST_SILENCE_S if is_lost else SILENCE_S
        link = await self._network.connect(asked.source, asked.source_address, silence_s)
        try:
            await one.bring(link)
        finally:
            await link.close()

    def _note_silence(self, worker_id: WorkerId) -> None:
        """Ask a lost worker for nothing for a while."""
        now_s = self._now()
        self._silent = {each: until_s for each, until_s in self._silent.items() if now_s < until_s}
        self._silent[worker_id] = now_s + SILENT_S

    def _keep(self, request_id: RequestId, num_computed: int) -> None:
        self._engine.sharing.coming.is_whole(request_id, num_computed)
        loop = asyncio.get_running_loop()
        self._kept[request_id] = loop.call_later(KEPT_S, self._keep_no_more, request_id)

    def _keep_no_more(self, request_id: RequestId) -> None:
        timer = self._kept.pop(request_id, None)
        if timer is not None:
            timer.cancel()
            del self._states[request_id]
            self._engine.sharing.coming.release(request_id)
            self._wake()


def _answered(outcome: FetchOutcome, detail: str = "") -> Fetched:
    return Fetched(outcome=outcome, detail=detail[:256])


class _Fetch:
    """One request on its way."""

    def __init__(self, asked: Fetch, engine: Engine, wake: Callable[[], None], now: Callable[[], float]) -> None:
        self.asked = asked
        self.copying_s = 0.0
        """That it took them."""
        self._now = now
        self.num_blocks = self.num_bytes = 0
        """That have come."""
        self.num_computed = 0
        """Tokens whose KV the source had when it was released."""
        self.state = "asked"
        self._engine = engine
        self._wake = wake

    @property
    def bytes_per_s(self) -> float:
        """The rate of the pieces that have come; 0: none has."""
        return self.num_bytes / self.copying_s if self.copying_s else 0.0

    async def bring(self, link: KvLink) -> None:
        """Return once the source has released it; or, of what is recovered, once all KV is here that it has.

        Raises:
            _FetchFailedError: it does not come.
            PeerLostError, WireError: the source is lost, or says what it should not.
        """
        is_lost = self.asked.reason is FetchReason.RECOVERY
        while True:
            names, is_prefilling = await self._list(link)
            if self.asked.as_tokens:
                self._reserve((), len(names) + ROOM_BLOCKS)
                break
            num_came = await self._get_missing(link, names)
            if self._are_here(names) and (is_lost or not (num_came or is_prefilling)):
                break
            if not num_came:
                await asyncio.sleep(POLL_S)  # what lacks is being computed, or comes for another request
        if is_lost:
            self.state, self.num_computed = "done", len(names) * self._engine.config.block_size
            return
        self.state = "leaving"
        left = await link.ask(LetGo())
        if not isinstance(left, HasLeft):
            raise self._failed(left)
        self.state, self.num_computed = "done", 0 if self.asked.as_tokens else left.num_computed

    async def _list(self, link: KvLink) -> tuple[tuple[RunName, ...], bool]:
        listed = await link.ask(ListKv(request_id=self.asked.request_id, attempt=self.asked.attempt))
        if not isinstance(listed, KvListed):
            raise self._failed(listed)
        return unpack_names(listed.names), listed.is_prefilling

    async def _get_missing(self, link: KvLink, names: tuple[RunName, ...]) -> int:
        """Have what is not here and comes for nobody else; return how many blocks came."""
        coming_kv, missing = self._engine.sharing.coming, self._reserve(names, ROOM_BLOCKS)
        first, size = 0, FIRST_BLOCKS
        while first < len(missing):
            piece = missing.only(range(first, min(first + size, len(missing))))
            first, size = first + len(piece), min(2 * size, PIECE_BLOCKS)
            self.state = "copying"
            began_s = self._now()
            self.num_bytes += await link.get(piece)
            self.copying_s += self._now() - began_s
            self.num_blocks += len(piece)
            coming_kv.arrived(piece)
            self._wake()
        return len(missing)

    def _reserve(self, names: tuple[RunName, ...], num_more: int) -> KeptKv:
        """Keep room for blocks and, the first time, for so many more; return which of them have to come."""
        self.state = "reserved"
        promised = count_promised_blocks(self._engine)
        missing = self._engine.sharing.coming.reserve(self.asked.request_id, names, num_more, promised)
        if missing is None:
            raise _FetchFailedError(FetchOutcome.FULL, "its KV finds no room")
        return missing

    def _are_here(self, names: tuple[RunName, ...]) -> bool:
        index = self._engine.blocks.index
        return all(index.get(name) is not None for name in names)

    def _failed(self, said: KvListed | HasLeft | NotHere) -> _FetchFailedError:
        if not isinstance(said, NotHere):
            return _FetchFailedError(FetchOutcome.LOST, f"it says {said.kind}")
        return _FetchFailedError(FetchOutcome.REFUSED if said.is_refused else FetchOutcome.GONE, said.detail)
