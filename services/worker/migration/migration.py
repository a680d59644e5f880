"""Both sides of live migration at one worker, and what they say of themselves.

Source: Llumnix (OSDI'24): requests move between instances while they run. Mell (section 5) asks the same of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

from pydantic import Field, TypeAdapter

from services.worker.engine.engine import Engine
from services.worker.migration.departures import Departures
from services.worker.migration.fetching import KvFetching
from services.worker.migration.kv_link import KvNetwork
from services.worker.migration.prefix_pulls import PrefixPulls
from services.worker.migration.shared_prefixes import shared_prefixes
from services.worker.serving.closing import Closing
from shared.messages.fetch import Close, Fetch, ListRunning
from shared.messages.report_parts import FetchCount, MigrationPart
from shared.process.tasks import TaskOwner
from shared.transport.bus import Message
from shared.wire import decode_union, encode

_ASKED: Final[TypeAdapter[Fetch | ListRunning | Close]] = TypeAdapter(
    Annotated[Fetch | ListRunning | Close, Field(discriminator="kind")]
)


class Migration:
    """See the module.

    Args:
        engine: of this worker.
        network: the way to others, and theirs here; owned.
        wake: lets its step loop look at the engine again.
        busy: returns why no request leaves or comes now, empty: some may.
        is_open: whether this worker takes requests.
        closing: whether it refuses new ones for a while.
        now: the worker's clock, seconds.
        tasks: owns what is under way.
    """

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        engine: Engine,
        network: KvNetwork,
        *,
        wake: Callable[[], None],
        busy: Callable[[], str],
        is_open: Callable[[], bool],
        closing: Closing,
        now: Callable[[], float],
        tasks: TaskOwner,
    ) -> None:
        never = _why_never(engine)
        self.departures = Departures(engine, wake, lambda: never or busy())
        self.fetching = KvFetching(
            engine,
            network,
            wake=wake,
            refusal=lambda: never or busy() or ("" if is_open() else "it takes no requests"),
            now=now,
            tasks=tasks,
        )
        self.pulls = PrefixPulls(
            engine,
            network,
            self.fetching,
            wake=wake,
            refusal=lambda: never or busy(),
            now=now,
            tasks=tasks,
        )
        self._coming = engine.sharing.coming
        self._engine = engine
        self._network = network
        self._closing = closing

    def start(self) -> None:
        """Let others fetch from here from now on."""
        self._network.serve(self.departures)

    async def answer(self, message: Message) -> bytes:
        """Answer `Fetch` with `Fetched`, once it is over, `ListRunning` with `RunningList`, `Close` with `Closed`."""
        asked = decode_union(message.data, _ASKED)
        if isinstance(asked, ListRunning):
            return encode(self.departures.running(asked))
        if isinstance(asked, Close):
            return encode(self._closing.answer(asked))
        return encode(await self.fetching.fetch(asked))

    def look(self) -> MigrationPart:
        """Return what the worker reports of it."""
        fetching, coming = self.fetching, self._coming
        return MigrationPart(
            closing=self._closing.why,
            shared_prefixes=shared_prefixes(self._engine),
            num_fetching=fetching.num_under_way,
            num_left_total=self.departures.num_left,
            fetches_total=tuple(
                FetchCount(reason=reason, outcome=outcome, count=count)
                for (reason, outcome), count in sorted(fetching.outcomes.items())
            ),
            num_bytes_total=fetching.num_bytes,
            seconds_total=fetching.busy_s,
            num_as_tokens_total=fetching.num_as_tokens,
            num_recomputed_tokens_total=coming.num_recomputed_tokens,
            num_recomputed_total=coming.num_recomputed,
            bytes_per_s=fetching.bytes_per_s,
            pulled_token_s=self.pulls.token_s,
        )

    async def abort(self) -> None:
        """Give up what is under way, both ways: when it returns nothing of the KV is pinned, read or written for it."""
        await self.pulls.stop()
        await self.fetching.stop()
        self.departures.close()
        await self._network.disconnect()

    async def close(self) -> None:
        """As `abort`, for good. Idempotent."""
        await self.abort()
        await self._network.close()


def _why_never(engine: Engine) -> str:
    if not engine.config.prefix_caching:
        return "its blocks have no names: prefix caching is off"
    if engine.config.shares_blocks:
        return "its blocks may be filled from both ends, and names do not say from which"
    return ""
