"""One live stage's part in an exchange of KV: agree on what moves, keep it aside, move it when the layers are there.

    stages                     the leader              stages
    agree   KvOffer ─────────► decides ── KvTable ───► every stage: which of its blocks go where
    read    KV ──► BlockCopies, before its layers and blocks change
    begin   each to each at the same time, a thread for each direction:   copies ──chunks──► socket ──► KV
            what is complete at a stage ──KvProgress──► the leader: what is complete everywhere ──► `arrivals`

The group serves meanwhile, on other blocks. A group that dissolves `move`s its KV before its workers serve.

Whatever goes wrong ends all of this stage's connections, so that the others hear of it; nobody waits for KV that does
not come. Blocks that are not complete everywhere hold anything, and are named nowhere.

Of a *live* lot the stages attend KV where it lies until it has arrived (`remote_attention.py`), so that its sequences
go on at once; if an exchange fails before all of that has come they lack KV in the middle, so the group ends.

The leader gives such blocks to others once its own part is over (`when_over`); a stage may not know yet. So it says so
ahead of the batches that use them (`KvOver`), and then each stage ends its writes (`end_writes`) before it goes on.

Where all stages are on one device, KV can move in the pages where it lies instead; then it is here before the group
begins (`carry_out`).

Source: KunServe v2, section 4.2; live lots: v1, section 4.2. Deviation: KV goes through host memory of a limited size.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial

from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.kv_moves.arrivals import Arrivals, Arrived
from services.worker.kv_moves.kv_messages import pack_offer, pack_table, unpack_offer, unpack_table
from services.worker.kv_moves.kv_progress import Complete
from services.worker.kv_moves.kv_table import KvOffer, KvTable, check_table
from services.worker.kv_moves.kv_traffic import Ears, KvTraffic
from services.worker.kv_moves.kv_wire import KvProgress, KvSocket
from services.worker.kv_moves.remote_attention import RemoteAttention, RemoteParts
from services.worker.memory.block_copies import NUM_SIDES, BlockCopies, copy_blocks, move_blocks, settle
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.page_swap import PagesKeptError
from services.worker.peers.frames import FrameKind
from services.worker.peers.threads import in_thread
from shared.errors import WireError
from shared.layers import LayerRange
from shared.process.log import get_logger
from shared.wire import MAX_MESSAGE_BYTES

Decide = Callable[[Sequence[KvOffer]], KvTable]
_log = get_logger()


class LiveExchange:
    """See the module. `agree`, `read`, then `begin` or `move`: in this order, each once, none at the same time.

    Args:
        stage: this one; 0 leads.
        socks: connections by stage, to all others; owned from now on.
        wanted: by stage: layers after the change.
        block_bytes: of a block's keys in one layer.
        limit_s: after so many seconds `agree` is given up, and again what moves; where a lot is live, after so many
            seconds without a block.
        remote: what live lots need; None: there can be none.
        is_lasting: the connections stay open when all has moved, for another exchange.
    """

    def __init__(  # noqa: PLR0913  limits and kinds by name
        self,
        stage: int,
        socks: Mapping[int, KvSocket],
        wanted: Sequence[LayerRange],
        *,
        block_bytes: int,
        limit_s: float,
        remote: RemoteParts | None = None,
        is_lasting: bool = False,
    ) -> None:
        self._stage = stage
        self._is_lasting = is_lasting
        self._wanted = tuple(wanted)
        self._block_bytes = block_bytes
        self._limit_s = limit_s
        self._table = KvTable(())
        """Nothing, before it is agreed upon, and if it is not."""
        self._copies: dict[int, BlockCopies] = {}
        """By lot."""
        self._has_moved = False
        self._moving: asyncio.Task[None] | None = None
        self._arrived: asyncio.Queue[tuple[KeptKv, int] | None] = asyncio.Queue()
        """Blocks, and how many bytes of them moved."""
        self._complete: Complete | None = None
        """Of the leader, while the group serves."""
        self._cache: KVCache | None = None
        """To which KV comes beside the group's steps."""
        self._remote_parts = remote
        self.remote: RemoteAttention | None = None
        """From `begin` on, if a lot is live: attends what has not arrived."""
        self._last_landed_s = 0.0
        self._is_over = False
        """What `begin` began has ended."""
        self._say_over: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self.failure: str | None = None
        """Why KV does not move, once that is so."""
        self._sockets = {peer: socks[peer] for peer in sorted(socks)}
        self._traffic = KvTraffic(stage, self._sockets, self._wanted, block_bytes)

    @property
    def kept(self) -> KeptKv:
        """What the blocks here hold once all has moved; nothing before, or if it does not."""
        return self._table.kept_at(self._stage) if self._has_moved else NOTHING_KEPT

    @property
    def handed_over(self) -> KeptKv:
        """As `kept`, of what has moved in its pages, before the group began."""
        return self.kept if self.by_pages else NOTHING_KEPT

    @property
    def by_pages(self) -> bool:
        """It was agreed that KV moves in its pages (`hand_over.py`): `carry_out`, and nothing else."""
        return self._table.by_pages

    @property
    def num_blocks(self) -> int:
        """Blocks that move, once that is agreed upon."""
        return sum(len(lot.ids) for lot in self._table.lots)

    @property
    def num_moved_bytes(self) -> int:
        """That went between all stages, once all has; 0 before, or if it did not."""
        return self._wire_bytes if self._has_moved else 0

    @property
    def is_live(self) -> bool:
        """A lot is attended where it lies."""
        return any(lot.is_live for lot in self._table.lots)

    @property
    def lacks_live(self) -> bool:
        """Of the leader: not all has come everywhere that sequences may go on without."""
        complete = self._complete
        if complete is None:
            return self.is_live
        return any(lot.is_live and not complete.is_whole(index) for index, lot in enumerate(self._table.lots))

    async def agree(self, offer: KvOffer, num_blocks: int, decide: Decide) -> None:
        """Learn what moves.

        Args:
            offer: of this stage.
            num_blocks: that it has before the change.
            decide: makes the leader's table of all offers; the others do not call it.
        """

        def work() -> None:
            table = self._decide(offer, decide) if self._stage == 0 else self._ask(offer)
            check_table(table, self._stage, offer, num_blocks, self._wanted)
            self._table = table

        await self._attempt(work)

    def carry_out(self, hand_over: Callable[[KvTable], int]) -> None:
        """Let KV move in its pages, and end all connections. Blocks.

        Args:
            hand_over: returns how many pages it has handed over, or raises `PagesKeptError`: KV is computed again.

        Raises:
            Exception: what else it raises.
        """
        began_s = time.monotonic()
        try:
            num_pages = hand_over(self._table)
            self._has_moved = True
        except PagesKeptError as error:
            self._give_up(str(error))
            return
        finally:
            self.close()
        _log.info(
            "kv_handed_over",
            stage=self._stage,
            num_blocks=self.num_blocks,
            num_pages=num_pages,
            took_s=round(time.monotonic() - began_s, 4),
        )

    def read(self, cache: KVCache) -> None:
        """Keep aside what goes from here, and let what is there already lie at its places. Blocks.

        Afterwards the cache may change.

        Args:
            cache: of the layers and blocks before the change.
        """
        if self.failure is not None:
            return
        try:
            for index, lot in enumerate(self._table.lots):
                if self._stage in lot.sources:
                    self._copies[index] = copy_blocks(cache, lot.ids)
            if self._table.there:
                there = self._table.there[self._stage]
                move_blocks(cache, there.ids, there.places)
        except Exception as error:  # no memory, whatever torch calls it: KV can be computed again
            self._copies.clear()
            self._give_up(f"{type(error).__name__}: {error}")

    async def move(self, cache: KVCache) -> None:
        """Give the others what is theirs, and write what is this stage's. All connections are closed then.

        Args:
            cache: of the layers and blocks after the change.
        """
        await self._move(cache, None)

    def begin(self, cache: KVCache) -> None:
        """As `move`, beside whatever uses other blocks, until all is done or `stop`.

        Args:
            cache: of the layers and blocks after the change; it must not change until `stop` has returned.
        """
        self._begin_remote()
        tell = self._sockets[0].send_progress if self._stage else partial(self._note, 0)
        if self._stage == 0:
            self._complete = Complete(self._table)
        self._cache = cache
        self._moving = self._loop.create_task(self._move(cache, tell), name="kv-exchange")
        self._moving.add_done_callback(lambda _: self._end())

    def when_over(self, say: Callable[[], None]) -> None:
        """Call something on the loop when this stage's part is over, whole or not: nothing is written here any more.

        Args:
            say: called once, before `arrivals` end; at once if the part is over.
        """
        if self._is_over:
            say()
        else:
            self._say_over = say

    def arrivals(self, num_blocks: int) -> Arrivals | None:
        """Return what comes to the whole group, of which this is the leader, after `begin`; None: nothing does.

        Args:
            num_blocks: that there is memory for.
        """
        if self.by_pages or (self._is_over and self.failure is not None):
            return None
        return Arrivals.of(self._table, self._wire_bytes, self._news(num_blocks), num_blocks, num_blocks)

    def end_writes(self) -> None:
        """Let nothing be written here any more: the leader has given blocks that lack KV to others.

        Returns when what was under way is there. After `begin`, in the stage's thread. Idempotent.
        """
        if self.remote is not None:
            self.remote.finish()
        self._traffic.end_writes()
        if self._cache is not None:
            settle(self._cache)

    async def stop(self) -> None:
        """End what is under way, and give back connections and memory. Idempotent."""
        self.shut()
        if self._moving is not None:
            await asyncio.wait([self._moving])
        if self.remote is not None:
            await in_thread(self.remote.close, "remote attention")
        self.close()

    def shut(self) -> None:
        """Let what is under way end soon, and the others hear of it. Idempotent; does not wait."""
        self._traffic.shut()
        if self.remote is not None:
            self.remote.shut()

    def close(self) -> None:
        """Give back connections and memory; nothing is under way. Idempotent."""
        self._copies.clear()
        for sock in self._sockets.values():
            sock.close()
        if self.remote is None and self._remote_parts is not None:
            for unused in self._remote_parts.socks.values():
                unused.close()

    def _begin_remote(self) -> None:
        """Attend for the others, and let them attend for this stage, if a lot is live."""
        if self.is_live and self.failure is None:
            assert self._remote_parts is not None, "a lot is live without connections for it"
            own = self._wanted[self._stage]
            self.remote = RemoteAttention(self._stage, self._table, own, self._copies, self._remote_parts)
            self.remote.begin()

    async def _attempt(self, work: Callable[[], None]) -> None:
        """Do a part of the exchange in a thread, unless an earlier one has failed."""
        if self.failure is not None:
            return
        limit = asyncio.create_task(self._limit(), name="kv-exchange-limit")
        try:
            await in_thread(work, "KV exchange", interrupt=self.shut)
        except Exception as error:  # whatever network, peers and torch come up with: the group goes on without KV
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            limit.cancel()

    async def _limit(self) -> None:
        """Give up after a while; if somebody attends what has not come, after a while in which nothing has."""
        self._last_landed_s = time.monotonic()
        while (left_s := self._last_landed_s + self._limit_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
        self._give_up(f"it took longer than {self._limit_s:g} s")

    def _give_up(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            _log.warning("kv_not_exchanged", stage=self._stage, reason=reason)
        self.shut()

    def _end(self) -> None:
        self._is_over = True
        self._say_over()
        self._arrived.put_nowait(None)

    def _decide(self, own: KvOffer, decide: Decide) -> KvTable:
        offers = [own, *(unpack_offer(_message(sock, FrameKind.KV_OFFER)) for sock in self._sockets.values())]
        table = decide(offers)
        packed = pack_table(table)
        for sock in self._sockets.values():
            sock.send(FrameKind.KV_TABLE, packed)
        return table

    def _ask(self, own: KvOffer) -> KvTable:
        leader = self._sockets[0]
        leader.send(FrameKind.KV_OFFER, pack_offer(own))
        return unpack_table(_message(leader, FrameKind.KV_TABLE))

    async def _news(self, num_blocks: int) -> AsyncIterator[Arrived]:
        while (found := await self._arrived.get()) is not None:
            yield Arrived(found[0], num_blocks, found[1])

    @property
    def _wire_bytes(self) -> int:
        return self._table.wire_bytes(self._wanted, NUM_SIDES * self._block_bytes)

    def _note(self, stage: int, progress: KvProgress) -> None:
        """A stage says what is complete there. In any thread of the leader."""
        if self._complete is None:
            raise WireError(f"stage {stage} tells stage {self._stage}, which does not lead, how far it is")
        found = self._complete.note(stage, progress)
        if found is not None:
            index, first, end = found
            lot = self._table.lots[index]
            num_layers = self._table.link_layers(lot, self._wanted).total
            news = lot.part(first, end), (end - first) * num_layers * NUM_SIDES * self._block_bytes
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear of it
                self._loop.call_soon_threadsafe(self._arrived.put_nowait, news)

    async def _move(self, cache: KVCache, tell: Callable[[KvProgress], None] | None) -> None:
        began_s = time.monotonic()
        await self._attempt(partial(self._move_all, cache, tell))
        if self.failure is None and (self._table.lots or self._table.there):
            _log.info(
                "kv_copied_ahead" if self._is_lasting else "kv_exchanged",
                stage=self._stage,
                num_blocks=len(self._table.kept_at(self._stage)),
                num_moved=self.num_blocks,
                took_s=round(time.monotonic() - began_s, 4),
                num_remote=0 if self.remote is None else self.remote.num_asked,
            )
        if self._is_lasting and self.failure is None:
            self._copies.clear()
        else:
            self.close()

    def _move_all(self, cache: KVCache, tell: Callable[[KvProgress], None] | None) -> None:
        def landed(progress: KvProgress) -> None:
            if self.remote is not None:
                self._last_landed_s = time.monotonic()
                self.remote.landed(progress.lot, progress.count)
            if tell is not None:
                tell(progress)

        ears = Ears(None if tell is None else landed, self._note, self._is_due)
        self._traffic.run(self._table, self._copies, cache, ears)
        self._has_moved = True

    def _is_due(self, peer: int) -> bool:
        return self._complete is not None and self._complete.is_due(peer)


def _message(sock: KvSocket, kind: FrameKind) -> bytes:
    return bytes(sock.receive(kind, max_bytes=MAX_MESSAGE_BYTES).payload)
