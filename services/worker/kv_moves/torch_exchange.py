"""One live stage's part in an exchange of KV: agree on what moves, keep it aside, move it when the layers are there.

    stages                     the leader              stages
    agree   KvOffer ─────────► decides ── KvTable ───► every stage: which of its blocks go where
    read    KV ──► BlockCopies, before its layers and blocks change
    begin   each to each at the same time, a thread for each direction:   copies ──chunks──► socket ──► KV
            what is complete at a stage ──KvProgress──► the leader: what is complete everywhere (`kv_progress.py`)

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
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.kv_moves.arrivals import Arrivals
from services.worker.kv_moves.kv_messages import (
    MAX_KV_MESSAGE_BYTES,
    pack_offer,
    pack_table,
    unpack_offer,
    unpack_table,
)
from services.worker.kv_moves.kv_progress import GroupNews
from services.worker.kv_moves.kv_table import KvOffer, KvTable, check_table, move_limit_s
from services.worker.kv_moves.kv_traffic import Ears, KvTraffic
from services.worker.kv_moves.kv_wire import KvProgress, KvSocket
from services.worker.kv_moves.remote_attention import RemoteAttention, RemoteParts
from services.worker.memory.block_copies import NUM_SIDES, BlockCopies, copy_blocks, move_blocks, settle
from services.worker.memory.host_kv import HostKV
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.page_swap import PagesKeptError
from services.worker.peers.frames import FrameKind
from services.worker.peers.threads import in_thread
from shared.layers import LayerRange
from shared.process.log import get_logger

Decide = Callable[[Sequence[KvOffer]], KvTable]
_log = get_logger()


class Undertaking:
    """Parts of an exchange, each in a thread and a limited time: once one has failed, no other one begins.

    Args:
        stage: for the log.
        shut: lets what is under way end soon; in any thread.
    """

    def __init__(self, stage: int, shut: Callable[[], None]) -> None:
        self._stage = stage
        self._shut = shut
        self._begun_s = 0.0
        self.failure: str | None = None
        """Why it has failed, once that is so."""

    async def do(self, work: Callable[[], None], limit_s: float) -> None:
        """Do a part, unless an earlier one has failed; after so many seconds it is given up."""
        if self.failure is not None:
            return
        limit = asyncio.create_task(self._limit(limit_s), name="kv-exchange-limit")
        try:
            await in_thread(work, "KV exchange", interrupt=self._shut)
        except Exception as error:  # whatever network, peers and torch come up with: the group goes on without KV
            self.give_up(f"{type(error).__name__}: {error}")
        finally:
            limit.cancel()

    def give_up(self, reason: str) -> None:
        """Let it fail, if it has not, and what is under way end soon. In any thread."""
        if self.failure is None:
            self.failure = reason
            _log.warning("kv_not_exchanged", stage=self._stage, reason=reason)
        self._shut()

    def extend(self) -> None:
        """Let what is under way take as long as the limit from now on. In any thread."""
        self._begun_s = time.monotonic()

    async def _limit(self, limit_s: float) -> None:
        self.extend()
        while (left_s := self._begun_s + limit_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
        self.give_up(f"it took longer than {limit_s:.3g} s")


class TorchExchange:
    """See the module. `agree`, `read`, then `begin` or `move`: in this order, each once, none at the same time.

    Args:
        stage: this one; 0 leads.
        socks: connections by stage, to all others; owned from now on.
        wanted: by stage: layers after the change.
        block_bytes: of a block's keys in one layer.
        limit_s: after so many seconds `agree` is given up. What moves is so by `move_limit_s`, where a lot is live
            after so many seconds without a block, and never later than that.
        bytes_per_s: of a link, each way; 0: unknown.
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
        bytes_per_s: float = 0.0,
        remote: RemoteParts | None = None,
        is_lasting: bool = False,
    ) -> None:
        self._stage = stage
        self._is_lasting = is_lasting
        self._wanted = tuple(wanted)
        self._pair_bytes = NUM_SIDES * block_bytes
        self._table = KvTable(())
        """Nothing, before it is agreed upon, and if it is not."""
        self._copies: dict[int, BlockCopies] = {}
        """By lot."""
        self._has_moved = False
        self._moving: asyncio.Task[None] | None = None
        self._news = GroupNews(self._table, self._wanted, self._pair_bytes)
        """Of the leader, while the group serves; else of nothing."""
        self._cache: KVCache | None = None
        """To which KV comes beside the group's steps."""
        self._remote_parts = remote
        self.remote: RemoteAttention | None = None
        """From `begin` on, if a lot is live: attends what has not arrived."""
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._bytes_per_s = bytes_per_s
        self._undertaking = Undertaking(stage, self.shut)
        self._sockets = {peer: socks[peer] for peer in sorted(socks)}
        self._traffic = KvTraffic(stage, self._sockets, self._wanted, block_bytes)

    @property
    def failure(self) -> str | None:
        """Why KV does not move, once that is so."""
        return self._undertaking.failure

    @property
    def kept(self) -> KeptKv:
        """What the blocks here hold once all has moved; nothing before, or if it does not."""
        return self._table.kept_at(self._stage) if self._has_moved else NOTHING_KEPT

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
        return self._table.wire_bytes(self._wanted, self._pair_bytes) if self._has_moved else 0

    @property
    def lacks_live(self) -> bool:
        """Of the leader, after `begin`: not all has come everywhere that sequences may go on without."""
        return self._news.lacks_live

    async def agree(self, offer: KvOffer, num_blocks: int, decide: Decide) -> None:
        """Learn what moves.

        Args:
            offer: of this stage.
            num_blocks: that it has before the change.
            decide: makes the leader's table of all offers; the others do not call it.
        """

        def work() -> None:
            table = _ask(self._sockets[0], offer) if self._stage else _decide(self._sockets, offer, decide)
            check_table(table, self._stage, offer, num_blocks, self._wanted)
            self._table = table

        await self._undertaking.do(work, self._limit_s)

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
            self._undertaking.give_up(str(error))
            return
        finally:
            self.close()
        took_s = round(time.monotonic() - began_s, 4)
        _log.info("kv_handed_over", stage=self._stage, num_blocks=self.num_blocks, num_pages=num_pages, took_s=took_s)

    def read(self, cache: KVCache, host: HostKV | None = None) -> None:
        """Keep aside what goes from here, and let what is there already lie at its places. Blocks.

        Afterwards the cache may change.

        Args:
            cache: of the layers and blocks before the change.
            host: of the cache; None: there is none.
        """
        if self.failure is not None:
            return
        try:
            for index, lot in enumerate(self._table.lots):
                if self._stage in lot.sources:
                    self._copies[index] = copy_blocks(cache, lot.ids, host)
            if self._table.there:
                there = self._table.there[self._stage]
                move_blocks(cache, there.ids, there.places)
        except Exception as error:  # no memory, whatever torch calls it: KV can be computed again
            self._copies.clear()
            self._undertaking.give_up(f"{type(error).__name__}: {error}")

    async def move(self, cache: KVCache, tell: Callable[[KvProgress], None] | None = None) -> None:
        """Give the others what is theirs, and write what is this stage's. All connections are closed then.

        Args:
            cache: of the layers and blocks after the change.
            tell: hears of what has landed, and can be read; None: nobody reads before all has.
        """
        began_s = time.monotonic()
        num_bytes = self._table.wire_bytes(self._wanted, self._pair_bytes)
        limit_s = move_limit_s(num_bytes, self._bytes_per_s, self._limit_s)
        await self._undertaking.do(partial(self._move_all, cache, tell), limit_s)
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

    def begin(self, cache: KVCache) -> None:
        """As `move`, beside whatever uses other blocks, until all is done or `stop`.

        Args:
            cache: of the layers and blocks after the change; it must not change until `stop` has returned.
        """
        if self._table.is_live and self.failure is None:
            assert self._remote_parts is not None, "a lot is live without connections for it"
            own = self._wanted[self._stage]
            self.remote = RemoteAttention(self._stage, self._table, own, self._copies, self._remote_parts)
            self.remote.begin()
        if self._stage == 0:
            self._news = GroupNews(self._table, self._wanted, self._pair_bytes)
        tell = self._sockets[0].send_progress if self._stage else partial(self._news.note, 0)
        self._cache = cache
        self._moving = self._loop.create_task(self.move(cache, tell), name="kv-exchange")
        self._moving.add_done_callback(lambda _: self._news.end())

    def when_over(self, say: Callable[[], None]) -> None:
        """Call something on the loop when what `begin` began has ended, whole or not: nothing is written here any more.

        Args:
            say: called once, before `arrivals` end; at once if the part is over.
        """
        assert self._moving is not None, "it has not begun"
        if self._moving.done():
            say()
        else:
            self._moving.add_done_callback(lambda _: say())

    def arrivals(self, num_blocks: int) -> Arrivals | None:
        """Return what comes to the whole group, of which this is the leader, after `begin`; None: nothing does.

        Args:
            num_blocks: that there is memory for.
        """
        is_lost = self._moving is not None and self._moving.done() and self.failure is not None
        return None if is_lost else self._news.arrivals(num_blocks)

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

    def _move_all(self, cache: KVCache, tell: Callable[[KvProgress], None] | None) -> None:
        def landed(progress: KvProgress) -> None:
            if self.remote is not None:
                self._undertaking.extend()  # somebody attends what has not come
                self.remote.landed(progress.lot, progress.count)
            if tell is not None:
                tell(progress)

        ears = Ears(None if tell is None else landed, self._news.note, self._news.is_due)
        self._traffic.run(self._table, self._copies, cache, ears)
        self._has_moved = True


def _decide(socks: Mapping[int, KvSocket], own: KvOffer, decide: Decide) -> KvTable:
    """Return the leader's table of all offers, which all stages know then."""
    offers = [own, *(unpack_offer(_message(sock, FrameKind.KV_OFFER)) for sock in socks.values())]
    table = decide(offers)
    packed = pack_table(table)
    for sock in socks.values():
        sock.send(FrameKind.KV_TABLE, packed)
    return table


def _ask(leader: KvSocket, own: KvOffer) -> KvTable:
    """Return the table that the leader makes, which knows the offer then."""
    leader.send(FrameKind.KV_OFFER, pack_offer(own))
    return unpack_table(_message(leader, FrameKind.KV_TABLE))


def _message(sock: KvSocket, kind: FrameKind) -> bytes:
    return bytes(sock.receive(kind, max_bytes=MAX_KV_MESSAGE_BYTES).payload)
