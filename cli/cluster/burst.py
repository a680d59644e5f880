"""`sluice demo --burst`: more readers than KV memory has room for until layers are dropped, and what readers saw of it.

    readers come ──► KV short ──► layers dropped ──► few readers come ──► layers back ──► all have read to the end
                        events of planner and workers, as they happen; KV and readers in the live line

Memory is chosen so that KV is small beside the layers: half of what they take, and no more than `MAX_KV_TOKENS`.
"""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from cli.answer import start_answer
from cli.cluster.children import has_cpu_kernels
from cli.cluster.cluster import Cluster, choose_sizes, run_cluster
from cli.cluster.settings import UpSettings
from cli.console import Console
from cli.conversation import Pacing
from cli.exit_codes import DONE, FAILED, CommandError
from cli.model import find_model
from cli.pull import show_progress
from shared.errors import StartupError
from shared.messages.event import Event
from shared.messages.report import WorkerReport
from shared.model_sizes import ITEM_BYTES, read_sizes
from shared.process.tasks import TaskOwner, ends_before
from shared.subjects import Subjects
from shared.transport.bus import Message
from shared.wire import WireError, decode_json
from sluice_client.async_client import AsyncSluiceClient
from sluice_client.errors import SluiceClientError
from sluice_client.params import ChatMessage

DEFAULTS: Final = {"workers": 2, "port": 0, "system": "kunserve", "max_model_len": 512, "host_memory": 0}
"""Where it differs from `sluice up`."""
MAX_KV_TOKENS: Final = 3072
"""Of each worker: more would take too long to fill."""
MAX_TOKENS: Final = 256
"""Of an answer."""
ROWS: Final = 32
"""Requests in a step."""
MANY: Final = 2.5
"""Tokens that readers want at a time, over those that KV memory has room for, until layers are dropped."""
FEW: Final = 0.25
"""The same from then on."""
MAX_READERS: Final = 400
LOOK_S: Final = 0.25
LINE_S: Final = 5.0
"""Between two lines that say how it stands, where there is no live one."""
DROP_LIMIT_S: Final = 60.0
"""In which layers are dropped, or are not."""
END_LIMIT_S: Final = 90.0
"""From the drop to the end: whoever reads on then is not waited for."""
TOLD: Final = frozenset(
    {
        "plan_preparing",
        "plan_done",
        "plan_failed",
        "kv_exchange_begun",
        "kv_exchange_ended",
        "kv_parted",
        "parameter_load_begun",
        "parameter_load_ended",
        "worker_dead",
    }
)
"""Events that are shown."""


def worker_env(page_bytes: int) -> dict[str, str]:
    """Return what workers are told besides: small steps, and pages so small that a layer has many."""
    values = {"page_bytes": page_bytes, "max_batch_tokens": 2 * ROWS, "max_batch_rows": ROWS}
    return {f"SLUICE_WORKER_{name.upper()}": str(value) for name, value in values.items()}


def size_burst(named: UpSettings, chosen: UpSettings, folder: Path) -> tuple[UpSettings, dict[str, str]]:
    """Return the settings with memory that a burst fills, unless it was named, and the workers' environment.

    Args:
        named: settings as they were given.
        chosen: the same, with a device and a type.
        folder: of the checkpoint.

    Raises:
        StartupError: the model does not say its sizes as Hugging Face's do, or there is one worker alone.
    """
    if named.workers < 2:
        raise StartupError("a burst needs two copies of the model, of which one can be dropped", "Use --workers 2")
    sizes = read_sizes(folder)
    if not sizes.is_known:
        said = f"{folder.name} does not say its sizes in config.json"
        raise StartupError(said, "Use another model, or without --burst")
    dtype, num_layers = chosen.dtype, sizes.num_layers
    total, item_bytes = sizes.parameter_bytes(dtype), ITEM_BYTES[dtype]
    layer_bytes = max(total - sizes.vocab_size * sizes.hidden_size * item_bytes, num_layers)
    kv_bytes = min(layer_bytes // 2, MAX_KV_TOKENS * sizes.kv_token_bytes(dtype))
    workspace = sizes.workspace_bytes(dtype, 2 * ROWS, ROWS)
    if chosen.device == "cpu" and not has_cpu_kernels():  # torch's attention gathers a layer's KV of all rows
        context = chosen.max_model_len or sizes.max_positions
        workspace += ROWS * context * sizes.kv_token_bytes(dtype) // num_layers
    page_bytes = 2 ** int(math.log2(min(max(layer_bytes // num_layers // 64, 2**14), 2**21)))
    memory = named.memory or total + workspace + kv_bytes
    return chosen.model_copy(update={"memory": memory}), worker_env(page_bytes)


@dataclass(slots=True)
class BurstReader:
    """Who asks once, and what they went through."""

    has_begun: bool = False
    """Some text has been shown."""
    is_served: bool = False
    """All of the answer has come, or no more will."""
    num_tokens: int = 0
    """Of a whole answer."""
    qoe: float = 1.0
    ttft_s: float = 0.0
    delivered_gap_s: float = 0.0
    """The longest, between two arrivals of text."""
    displayed_gap_s: float = 0.0
    """The longest, between two moments in which text was shown."""
    failure: str = ""


@dataclass(slots=True)
class Sight:
    """What is seen of the cluster."""

    reports: dict[str, WorkerReport] = field(default_factory=dict)
    num_tokens_before: int = 0
    """Of KV memory, before layers were dropped."""
    num_tokens_dropped: int = 0
    """The most, while they were."""
    dropped_s: float | None = None
    restored_s: float | None = None

    def note(self, report: WorkerReport, now_s: float) -> None:
        """Take a worker's report."""
        self.reports[report.worker_id] = report
        if any(each.num_stages > 1 for each in self.reports.values()):
            self.dropped_s = now_s if self.dropped_s is None else self.dropped_s
            self.restored_s = None
            if self._is_settled:
                self.num_tokens_dropped = max(self.num_tokens_dropped, self.num_kv_tokens)
        elif self.dropped_s is None:
            self.num_tokens_before = self.num_kv_tokens
        elif self.restored_s is None:
            self.restored_s = now_s

    @property
    def _is_settled(self) -> bool:
        """Whether as many have said that they are members of a group as leaders have said that there are."""
        reports = self.reports.values()
        return sum(each.stage > 0 for each in reports) == sum(each.num_stages - 1 for each in reports if not each.stage)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that KV memory has room for."""
        return sum(each.num_blocks * each.block_size for each in self.reports.values())

    def describe(self) -> str:
        """Return how full it is, and who holds which layers."""
        reports = sorted(self.reports.items())
        used = sum((each.num_used_blocks + each.num_demanded_blocks) * each.block_size for _, each in reports)
        layers = " ".join(f"{name} {each.layers[0]}-{each.layers[1] - 1}" for name, each in reports)
        return f"KV {used / max(self.num_kv_tokens, 1):4.0%} of {self.num_kv_tokens} tokens · layers {layers}"


class Burst:
    """Readers of one cluster, as many at a time as its memory is to be asked for.

    Args:
        client: connected.
        prompt: what each of them asks.
        pacing: of each answer.
        tasks: owns them.
    """

    def __init__(self, client: AsyncSluiceClient, prompt: str, pacing: Pacing, tasks: TaskOwner) -> None:
        self._client = client
        self._prompt = prompt
        self._pacing = pacing
        self._tasks = tasks
        self.readers: list[BurstReader] = []
        self._reading: list[asyncio.Task[None]] = []

    @property
    def num_reading(self) -> int:
        """Readers to whom text is shown, or will be."""
        return sum(not task.done() for task in self._reading)

    @property
    def num_unserved(self) -> int:
        """Readers whose answer has not come to its end."""
        return sum(not reader.is_served for reader in self.readers)

    def fill(self, num_readers: int) -> None:
        """Have readers come until so many are not served."""
        while self.num_unserved < num_readers and len(self.readers) < MAX_READERS:
            reader = BurstReader()
            self.readers.append(reader)
            self._reading.append(self._tasks.start(self._read(reader, len(self.readers)), name="reader"))

    def describe(self) -> str:
        """Return how many there are, and how they are."""
        begun = [reader for reader in self.readers if reader.has_begun]
        qoe = f" · QoE {sum(reader.qoe for reader in begun) / len(begun):.2f}" if begun else ""
        return f"{self.num_reading} readers, {self.num_unserved} not served{qoe}"

    async def _read(self, reader: BurstReader, number: int) -> None:
        loop = asyncio.get_running_loop()
        messages: list[ChatMessage] = [{"role": "user", "content": f"{self._prompt} ({number})"}]
        answer = start_answer(self._client, messages, self._pacing, max_tokens=MAX_TOKENS)
        shown_s: float | None = None
        try:
            async with answer:
                async for _ in answer:
                    now_s, stats = loop.time(), answer.stats
                    if shown_s is not None:
                        reader.displayed_gap_s = max(reader.displayed_gap_s, now_s - shown_s)
                    shown_s, reader.has_begun, reader.is_served = now_s, True, answer.finish_reason is not None
                    reader.qoe, reader.ttft_s = stats.qoe, stats.ttft_s or 0.0
                    reader.delivered_gap_s = stats.longest_gap_s
        except SluiceClientError as error:
            reader.failure = str(error)
        reader.is_served = True
        reader.num_tokens = int((answer.usage or {}).get("completion_tokens", 0))


async def run_burst(settings: UpSettings, console: Console, prompt: str, pacing: Pacing) -> int:
    """Start a cluster, send it readers, show what happens, and return the exit code.

    Args:
        settings: of the cluster.
        console: where the person looks.
        prompt: what each reader asks.
        pacing: of the answers.

    Raises:
        StartupError: the cluster cannot be started, or not so that a burst fills it.
        CommandError: no layers were dropped.
    """
    model = await asyncio.to_thread(find_model, settings.model, partial(show_progress, console))
    console.end_status()
    settings, worker_env = size_burst(settings, choose_sizes(settings, read_sizes(model.folder))[0], model.folder)

    async def show(cluster: Cluster, stop: asyncio.Event) -> int:
        return await _show(cluster, console, prompt, pacing, stop)

    return await run_cluster(settings, console, show, worker_env)


async def _show(cluster: Cluster, console: Console, prompt: str, pacing: Pacing, stop: asyncio.Event) -> int:
    plan, loop = cluster.plan, asyncio.get_running_loop()
    subjects, sight, began_s = Subjects(plan.settings.cluster), Sight(), loop.time()

    def on_report(message: Message) -> None:
        try:
            sight.note(decode_json(message.data, WorkerReport), loop.time() - began_s)
        except WireError:
            return  # the monitor counts and logs it

    def on_event(message: Message) -> None:
        try:
            event = decode_json(message.data, Event)
        except WireError:
            return
        if event.name in TOLD:
            console.line(f"{loop.time() - began_s:5.1f} s  {event.instance_id}: {event.reason}")

    api_key = plan.settings.api_key or None
    failures: list[object] = []
    tasks = TaskOwner(lambda name, error: failures.append((name, error)))
    talker = AsyncSluiceClient(plan.url, model=plan.model_name, api_key=api_key)
    async with plan.broker.connect("demo") as bus, talker as client:
        await bus.subscribe(subjects.all_reports(), on_report)
        await bus.subscribe(subjects.all_events(), on_event)
        burst = Burst(client, prompt, pacing, tasks)
        try:
            await ends_before(stop, go_on(burst, sight, console, began_s))
        finally:
            console.end_status()
            await tasks.close()
    if failures:
        raise CommandError(f"a reader failed: {failures[0]}", "", FAILED)
    sys.stdout.write("\n".join(["", *describe_burst(burst.readers, sight, pacing), ""]))
    if sight.dropped_s is None and not stop.is_set():
        raise CommandError("no layers were dropped", "See `sluice planner` for why, or use less --memory", FAILED)
    return DONE


async def go_on(burst: Burst, sight: Sight, console: Console, began_s: float) -> None:
    """Have readers come as long as they are to, and return when all is over.

    Args:
        burst: of them.
        sight: kept up to date by others.
        console: for how it stands.
        began_s: when it began, on the loop's clock.
    """
    loop = asyncio.get_running_loop()
    said_s = float("-inf")
    while True:
        now_s = loop.time() - began_s
        if sight.dropped_s is None and now_s > DROP_LIMIT_S:
            return
        if sight.dropped_s is not None and (now_s > sight.dropped_s + END_LIMIT_S):
            return
        if sight.restored_s is not None and not burst.num_reading:
            return
        room = sight.num_tokens_before / MAX_TOKENS
        if sight.restored_s is None:
            burst.fill(math.ceil(room * (MANY if sight.dropped_s is None else FEW)))
        status = f"{now_s:5.1f} s  {sight.describe()} · {burst.describe()}" if sight.reports else ""
        if console.is_terminal:
            console.show_status(status)
        elif status and now_s - said_s >= LINE_S:
            said_s = now_s
            console.line(status)
        await asyncio.sleep(LOOK_S)


def describe_burst(readers: list[BurstReader], sight: Sight, pacing: Pacing) -> list[str]:
    """Return the lines that say how it went."""
    lines = []
    if sight.dropped_s is not None:
        grown = f"KV memory from {sight.num_tokens_before} to {sight.num_tokens_dropped} tokens"
        back = "not restored yet" if sight.restored_s is None else f"restored after {sight.restored_s:.1f} s"
        lines.append(f"layers dropped after {sight.dropped_s:.1f} s, {grown}; {back}")
    begun = [reader for reader in readers if reader.has_begun]
    if begun:
        qoe, tokens = sum(reader.qoe for reader in begun) / len(begun), sum(reader.num_tokens for reader in begun)
        worst, ttft_s = min(reader.qoe for reader in begun), max(reader.ttft_s for reader in begun)
        said = f"QoE {qoe:.2f}, at least {worst:.2f}; first token within {ttft_s:.1f} s"
        lines.append(f"{len(begun)} readers, {tokens} tokens: {said}")
        delivered_s = max(reader.delivered_gap_s for reader in begun)
        displayed_s = max(reader.displayed_gap_s for reader in begun)
        usual = f"a token each {1 / pacing.target.speed_tokens_per_s:.2f} s is reading speed"
        lines.append(f"longest gap: delivered {delivered_s:.2f} s, displayed {displayed_s:.2f} s; {usual}")
    failed = [reader.failure for reader in readers if reader.failure]
    if failed:
        lines.append(f"{len(failed)} of {len(readers)} readers got no whole answer: {failed[0]}")
    return lines
