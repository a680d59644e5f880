"""What workers tell the monitor, and what the monitor makes of it. Both travel as JSON: operators read them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field

from shared.api_keys import Tier
from shared.ids import DispatcherId, Incarnation, WorkerId
from shared.messages.base import ControlMessage, MessagePart
from shared.messages.report_parts import DecodeCost, MigrationPart, PrefixSketch

MAX_WAITING_ROWS: Final = 1024
"""Models and tiers of which a view says how many requests wait."""


SLACK_EDGES_S: Final = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
"""Seconds of text between the buckets of `WorkerReport.slack_rows`: a bucket begins at its edge."""

SlackCount = Annotated[int, Field(ge=0, le=2**31 - 1)]


class WorkerPhase(StrEnum):
    """Where a worker is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class TransferKind(StrEnum):
    """What moves to a worker while it serves."""

    KV_EXCHANGE = "kv_exchange"
    """KV of the workers that have become a group, to the stages that have its layers now."""
    KV_COPY = "kv_copy"
    """KV of a group that is about to dissolve, to the workers where it will be needed."""
    PARAMETER_LOAD = "parameter_load"
    """Parameters of layers that the worker does not compute yet."""


class TransferProgress(MessagePart):
    """One thing on its way, as far as it has come. Of KV the leader of the group tells, of parameters who gets them."""

    kind: TransferKind
    num_bytes: Annotated[int, Field(ge=0)]
    """That go from one worker, or from the host, to another in all; of `kv_copy` as far as is known now."""
    num_moved_bytes: Annotated[int, Field(ge=0)]
    """Of these, what is there."""
    bytes_per_s: Annotated[float, Field(ge=0)] = 0.0
    """Over the last second."""
    elapsed_s: Annotated[float, Field(ge=0)] = 0.0
    """Since it began."""
    num_waiting: Annotated[int, Field(ge=0)] = 0
    """Of `kv_exchange`: sequences that wait for theirs; the worker's `dump` names them."""
    mode: Annotated[str, Field(max_length=16)] = ""
    """Of `kv_exchange`: `coordinated` (sequences wait for their KV), `live` (until then it is attended where it lies),
    or `mixed`: some of either."""
    sources: Annotated[tuple[Annotated[str, Field(max_length=128)], ...], Field(max_length=64)] = ()
    """Where it comes from: ids of workers, `the checkpoint` on the worker's own host."""


class ElasticFacts(MessagePart):
    """Memory of which layers can be dropped: what a planner must know to say how much KV some layers leave room for."""

    layer_bytes: tuple[int, ...]
    """Parameters of each layer of the model, as its buffer takes them."""
    outer_bytes: int
    """Parameters outside the layers: one range of their own."""
    first_stage_end: int
    """The stage that has the first layer needs the outer bytes [0, first_stage_end)."""
    last_stage_begin: int
    """The stage that has the last layer needs the outer bytes [last_stage_begin, outer_bytes)."""
    block_bytes: int
    """Keys of one block in one layer; its values take as much."""
    page_bytes: int
    num_pages: int
    """Budget of parameters and KV together."""
    max_blocks: int
    """Block ids are below this."""
    link_bytes_per_s: float = 0.0
    """At which KV is exchanged with other workers, each way; 0: it does not go along, and is computed again."""
    has_host_copy: bool = False
    """Dropped layers can be loaded again from the memory or the disk of its own host."""


class ProcessFacts(MessagePart):
    """What does not change while a worker's process serves: told once to readers of the view, not with every view."""

    worker_id: WorkerId
    pid: int = 0
    host: str = ""
    incarnation: Incarnation = Incarnation(0)
    """Of the process: in containers every process may have the same pid and host."""
    model: str = ""
    """Name under which the model is served."""
    model_digest: str = ""
    """Of its parameters, their number format, and how KV is computed and lies in a block: only workers that say the
    same go on with each other's layers and KV. Empty if the worker does not say."""
    device: str = ""
    kernels: str = ""
    """What computes the steps: `native <instruction set>`, `attention <instruction set>`, `flashinfer`, `torch` or
    `modelled`."""
    system: str = ""
    """Name of the selected system (`shared.systems`)."""
    max_model_len: int = 0
    """Most tokens of prompt and output together, in tokens."""
    block_size: int = 0
    """Token slots of one KV block."""
    num_layers: int = 0
    """Of the whole model; 0 if the worker does not say."""
    stage_address: str = ""
    """Where other workers connect, `host:port`; empty: only workers of the same process can."""
    elastic: ElasticFacts | None = None
    """None: its parameters cannot be dropped."""
    reserve_bytes: int = 0
    """Measured peak of activations and workspace that the budget keeps free."""
    memory_bytes: int = 0
    """The whole budget (`--memory`)."""


class TierCounts(MessagePart):
    """What one tier has at a worker."""

    tier: Annotated[str, Field(max_length=16)]
    """Name of a `shared.api_keys.Tier`."""
    num_running: Annotated[int, Field(ge=0)]
    num_waiting: Annotated[int, Field(ge=0)]
    """Preempted ones too."""
    num_used_blocks: Annotated[int, Field(ge=0)]
    """KV blocks that its sequences hold; one that several hold counts for each."""


_Count = Annotated[int, Field(ge=0, le=10**9)]


class BestEffortPart(MessagePart):
    """What of a worker's sequences and KV is best effort's (tier `flex`); part of the report's other counts."""

    num_running: _Count = 0
    num_waiting: _Count = 0
    num_preempted: _Count = 0
    max_parked: _Count = 0
    """So many may wait or have given way, at present; the rest waits in dispatchers. 0 if the worker does not say."""
    num_used_blocks: _Count = 0
    """KV blocks that would be free without it."""
    num_demanded_blocks: _Count = 0
    num_uncomputed_blocks: _Count = 0
    """As the report's own, of what is parked, and of what runs."""
    gives_way: bool = False
    """The worker's policy has others come first, and lets them have its blocks: it presses for nothing there."""


class WorkerReport(ProcessFacts, ControlMessage):
    """State of one worker; published by period and at once on a change."""

    kind: Literal["worker_report"] = "worker_report"
    sequence_number: Annotated[int, Field(ge=0)]
    """Grows by one with each report of this process; older reports that arrive late are ignored."""
    phase: WorkerPhase
    progress_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """While loading: share of the bytes read."""
    progress_text: str = ""
    """While loading: what is being done now."""
    num_blocks: int = 0
    """KV blocks in all."""
    num_used_blocks: int = 0
    """KV blocks that sequences hold now."""
    num_demanded_blocks: int = 0
    """Blocks that waiting and preempted sequences need before they can run."""
    num_uncomputed_blocks: int = 0
    """Blocks of KV that is still to be computed: what is left of prompts, of those that run and of those that wait. No
    memory is held for it yet."""
    num_head_blocks: int = 0
    """Of these, the blocks that the next one in line needs, leaving out whose reader has text for longer than a second,
    if the worker's policy lets such ones wait."""
    num_queued_for_memory: int = 0
    """Waiting and preempted sequences that would run if there were KV blocks for them: there is a place for them among
    those that run. Leaves out the same ones."""
    num_slack_blocks: int = 0
    """Of the used blocks, those of sequences whose readers have text for longer than a second, if the worker's policy
    lets such ones give way; they are no demand. Nor are those of best effort that gives way, and of whom it slowed."""
    num_slowed_blocks: int = 0
    """Of these, the blocks of whom best effort has slowed; no demand yet, but what of them becomes one is no rise."""
    num_slack_demanded_blocks: int = 0
    """Of the demanded blocks, those of such sequences."""
    slack_rows: Annotated[tuple[SlackCount, ...], Field(max_length=8)] = ()
    """Sequences that run and have a reader, by how long the reader has text for (`SLACK_EDGES_S`), the latest first;
    empty if the worker does not say."""
    slack_blocks: Annotated[tuple[SlackCount, ...], Field(max_length=8)] = ()
    """KV blocks that these hold; one that several hold counts for each."""
    qoe: Annotated[float | None, Field(ge=0, le=1)] = None
    """Mean of what readers have experienced by now, of all sequences that are here; None: nobody reads."""
    num_coming_blocks: int = 0
    """Blocks whose KV is on its way from other workers of the group; sequences wait for theirs."""
    num_host_blocks: int = 0
    """Blocks of host memory for KV of preempted sequences."""
    num_used_host_blocks: int = 0
    """Of these, the ones that sequences or copies need now."""
    moves: Annotated[tuple[TransferProgress, ...], Field(max_length=8)] = ()
    """What is on its way to it while it serves."""
    layers: tuple[int, int] = (0, 0)
    """First layer that is held and computed here, and one past the last."""
    resident: tuple[int, int] = (0, 0)
    """Layers whose parameters have memory here, computed or not: first, and one past the last; they contain `layers`.
    (0, 0): those of `layers`, and it cannot load others beside serving."""
    loaded_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the bytes of these parameters that are loaded."""
    group: str = ""
    """Id of the worker that leads its pipeline group; empty while it is alone. A leader reports for its whole group: KV
    blocks that every stage has, and all sequences. The other members have none, and nothing is placed on them."""
    stage: int = 0
    """Its place in the group's pipeline; 0 for the leader."""
    num_stages: int = 1
    plan_id: int = 0
    """The last plan that was carried out here; 0: none."""
    num_running: int = 0
    num_runnable: int = 0
    """Sequences that could be in a step now: of those that run the ones that nothing holds back, and while steps are
    held up also of those that wait or were preempted. None while the scheduler finds nobody to run."""
    held: Annotated[str, Field(max_length=128)] = ""
    """Why it makes no steps now, in words: it is prepared for a plan, or carries one out; nothing is placed on it then.
    Empty: it makes steps."""
    is_leaving: bool = False
    """It is told to stop, and as a stage of a group goes on until that is restored, or half of the time is over in
    which it may drain."""
    num_waiting: int = 0
    num_preempted: int = 0
    tiers: Annotated[tuple[TierCounts, ...], Field(max_length=8)] = ()
    """Of each tier of which a sequence is here, the most urgent first; empty while all are of the default tier
    (`counts_by_tier`)."""
    max_sequences: int = 0
    """Sequences that the worker takes at most, running and waiting."""
    max_waiting: int = 0
    """Of these, the ones that may wait at present, by its scheduler; 0 if it does not say. Best effort counts apart."""
    best_effort: BestEffortPart = BestEffortPart()
    migration: MigrationPart = MigrationPart()
    num_steps: int = 0
    """Steps done since the start; a number that stands still while sequences could run means a hang."""
    token_s: float = 0.0
    """Seconds that computing one more token of a prompt takes here, as the worker was when it started: alone. A leader
    computes with all stages of its group. 0 if unknown."""
    decode_cost: DecodeCost = DecodeCost()
    step_time_s: float = 0.0
    """Moving average of a step's duration on the device, seconds."""
    tokens_per_s: float = 0.0
    """Moving average of generated tokens per second."""
    param_bytes: int = 0
    kv_bytes: int = 0
    num_preemptions_total: int = 0
    num_pauses_total: int = 0
    """Times that a sequence kept its KV and was left out of steps that it could have been in."""
    num_recomputed_tokens_total: int = 0
    """Tokens whose KV was computed again after a preemption."""
    num_brought_back_tokens_total: int = 0
    """Tokens whose KV came from host memory instead, back or for another prompt."""
    num_given_up_tokens_total: int = 0
    """Of those computed again, tokens whose KV had been in host memory and was lost there."""
    num_prompt_tokens_total: int = 0
    num_generated_tokens_total: int = 0
    num_finished_total: int = 0
    num_prefix_cache_queries_total: int = 0
    """Prompt tokens looked up in the prefix cache; vLLM's `prefix_cache_queries`."""
    num_prefix_cache_hits_total: int = 0
    """Of these, the ones whose KV was there already; vLLM's `prefix_cache_hits`."""
    prefixes: PrefixSketch | None = None
    """Whose KV is here, in device or host memory; None if the worker does not say."""


def cost_beside_prompts(report: WorkerReport) -> DecodeCost:
    """Return what a step of decodes costs at a worker as long as prompts slow it down as of late."""
    decode_s = report.decode_cost.of(report.num_running, report.num_used_blocks * report.block_size)
    slowed = report.num_running > 0 and report.step_time_s > decode_s > 0
    return report.decode_cost.times(report.step_time_s / decode_s) if slowed else report.decode_cost


def counts_by_tier(report: WorkerReport) -> tuple[TierCounts, ...]:
    """Return what each tier has at the worker, also where the report leaves it out because there is one only."""
    if report.tiers:
        return report.tiers
    parked = report.num_waiting + report.num_preempted
    counts = TierCounts(
        tier=Tier.DEFAULT.label,
        num_running=report.num_running,
        num_waiting=parked,
        num_used_blocks=report.num_used_blocks,
    )
    return (counts,)


class Liveness(StrEnum):
    """The monitor's judgement of a worker, from the age of its last report."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


class WorkerStatus(ControlMessage):
    """One worker as the monitor sees it."""

    liveness: Liveness
    age_s: Annotated[float, Field(ge=0)]
    """Seconds since the last report, when the view was made."""
    incompatible: Annotated[str, Field(max_length=64)] = ""
    """The protocol version of a worker that speaks another one than the monitor; nobody uses it, and its report holds
    its name only. Empty for every other worker."""
    throttled: bool = False
    """It runs short of KV memory, now or within a second; of a group its leader does."""
    throttled_reason: Annotated[str, Field(max_length=512)] = ""
    """By which rule, in words with figures; empty while it is not throttled."""
    report: WorkerReport


class WaitingRequests(MessagePart):
    """Requests of one model and tier that wait in dispatchers: no worker has a place for them."""

    model: Annotated[str, Field(max_length=512)]
    tier: Annotated[str, Field(max_length=16)]
    """Name of a `shared.api_keys.Tier`."""
    num_requests: Annotated[int, Field(ge=0)]
    num_tokens: Annotated[int, Field(ge=0)]
    """KV that they need before they can run: prompts, and outputs so far."""


class DispatcherReport(ControlMessage):
    """What waits in one dispatcher; published by period while something does, and once when nothing does any more."""

    kind: Literal["dispatcher_report"] = "dispatcher_report"
    dispatcher_id: DispatcherId
    waiting: Annotated[tuple[WaitingRequests, ...], Field(max_length=16)] = ()
    """One per tier of which some wait."""


class ClusterView(ControlMessage):
    """The monitor's picture of the cluster; on the way to its readers (`shared.cluster_views`) a part of it."""

    kind: Literal["cluster_view"] = "cluster_view"
    sequence_number: Annotated[int, Field(ge=0)]
    """Grows by one with each view of this monitor process."""
    part: Annotated[int, Field(ge=0)] = 0
    """Which part of the view of that number this is; they come in this order."""
    num_parts: Annotated[int, Field(ge=1)] = 1
    facts: Annotated[tuple[Annotated[str, Field(max_length=32)], ...], Field(max_length=4096)] = ()
    """Names of the pages of facts (`ViewFacts`) that belong to it, in their order; its reports leave these out."""
    waiting: Annotated[tuple[WaitingRequests, ...], Field(max_length=MAX_WAITING_ROWS)] = ()
    """In all dispatchers together, sorted by model and tier; in the first part."""
    num_left_out: Annotated[int, Field(ge=0)] = 0
    """Workers that report and are not in any part, because the monitor has no room for more (`max_workers`)."""
    workers: tuple[WorkerStatus, ...] = ()
    """Sorted by worker id; those of the next part follow."""


class ViewFacts(ControlMessage):
    """A page of the facts of the workers that a view shows."""

    kind: Literal["view_facts"] = "view_facts"
    name: Annotated[str, Field(max_length=32)]
    """Made from what is on it: pages of one name are the same."""
    workers: tuple[ProcessFacts, ...] = ()
