"""One message of every kind, each field away from its default, and the files that hold its bytes.

`python -m tests.unit.golden` writes the files anew; a change of them is a change of the protocol, and shows in a diff.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shared.ids import DispatcherId, Incarnation, RequestId, StreamId, WorkerId
from shared.messages.base import ControlMessage
from shared.messages.errand import ErrandRefused
from shared.messages.event import Event
from shared.messages.lease import Renew, Renewed
from shared.messages.owner import Owner
from shared.messages.plan import (
    AbortPlan,
    CommitPlan,
    FormGroup,
    LoadBeside,
    Plan,
    PlanAnswer,
    PlannedStage,
    PlannedWorker,
    PlanPhase,
    PlanState,
    PreparePlan,
    RestoreInstance,
    UnloadBeside,
    WantedInstances,
)
from shared.messages.queue import ListQueued, MoveQueued, QueuedPart, QueueList, QueueMove, QueueMoved
from shared.messages.report import (
    ClusterView,
    ElasticFacts,
    Liveness,
    Move,
    MoveKind,
    WorkerPhase,
    WorkerReport,
    WorkerStatus,
)
from shared.messages.request import (
    Accepted,
    Cancel,
    Cancelled,
    RefusalReason,
    Refused,
    Replay,
    ReplayUnknown,
    Submit,
    Upload,
    Uploaded,
    pack_token_ids,
)
from shared.messages.steps import StepLogPage, StepRecord
from shared.stream_extras import StreamExtra, TokenLogprob, pack_extras
from shared.token_batch import TokenBatch
from shared.types import FinishReason, QoeTarget, RequestClass, SamplingParams
from shared.wire import WireError, encode, encode_json

FOLDER = Path(__file__).parent
_HEX_PER_LINE = 64

_SUBMIT = Submit(
    request_id=RequestId("r-0123"),
    stream=StreamId(4_000_000_000),
    attempt=2,
    dispatcher_id=DispatcherId("d0"),
    incarnation=Incarnation(77),
    prompt=pack_token_ids([1, 2, 70_000, 2**32 - 1]),
    generated=pack_token_ids([9, 8]),
    sampling=SamplingParams(
        max_tokens=200,
        temperature=0.5,
        top_p=0.875,
        top_k=40,
        min_p=0.125,
        presence_penalty=-1.5,
        frequency_penalty=0.25,
        repetition_penalty=1.125,
        logit_bias=((5, -100.0), (70_000, 2.5)),
        seed=-3,
        stop_token_ids=(2, 7),
        ignore_eos=True,
        min_tokens=12,
        logprobs=4,
    ),
    request_class=RequestClass.BEST_EFFORT,
    qoe=QoeTarget(ttft_s=1.5, speed_tokens_per_s=6.25),
    age_s=0.25,
    remaining_s=30.0,
    fork_of=RequestId("r-0122"),
    cache_salt="tenant-7",
    uploaded=(16, 8),
)
_REPORT = WorkerReport(
    worker_id=WorkerId("w0"),
    sequence_number=17,
    phase=WorkerPhase.DRAINING,
    pid=4242,
    host="a-host",
    incarnation=Incarnation(2**47 + 1),
    model="demo",
    device="cpu",
    kernels="native avx2",
    system="fcfs-chunked",
    progress_ratio=0.5,
    progress_text="reading weights",
    max_model_len=2048,
    block_size=16,
    num_blocks=1000,
    num_used_blocks=250,
    num_demanded_blocks=12,
    num_uncomputed_blocks=19,
    num_head_blocks=5,
    num_queued_for_memory=3,
    num_coming_blocks=7,
    moves=(
        Move(
            kind=MoveKind.KV_EXCHANGE,
            num_bytes=9000,
            num_moved_bytes=4500,
            bytes_per_s=1.5e9,
            elapsed_s=0.25,
            num_waiting=2,
            mode="live",
            sources=("w-1", "w0"),
        ),
    ),
    num_layers=8,
    layers=(2, 5),
    resident=(0, 8),
    loaded_ratio=0.75,
    group="w-1",
    stage=1,
    num_stages=3,
    plan_id=6,
    stage_address="a-host:4300",
    elastic=ElasticFacts(
        layer_bytes=(4096, 4097),
        outer_bytes=999,
        first_stage_end=500,
        last_stage_begin=600,
        block_bytes=2048,
        page_bytes=2**21,
        num_pages=4000,
        max_blocks=9000,
        link_bytes_per_s=25e9,
        has_host_copy=True,
    ),
    num_running=3,
    num_waiting=2,
    num_preempted=1,
    max_sequences=64,
    num_steps=9_876,
    token_s=0.0005,
    step_time_s=0.0125,
    tokens_per_s=120.5,
    param_bytes=2**33,
    kv_bytes=2**30,
    reserve_bytes=2**20,
    memory_bytes=2**34,
    num_preemptions_total=4,
    num_prompt_tokens_total=5_000_000_000,
    num_generated_tokens_total=77,
    num_finished_total=8,
    num_prefix_cache_queries_total=4_000_000_000,
    num_prefix_cache_hits_total=3_000,
)
_FORM = FormGroup(
    stages=(
        PlannedStage(
            worker_id=WorkerId("w-1"),
            incarnation=Incarnation(5),
            address="a:1",
            held=(0, 4),
            layers=(0, 2),
        ),
        PlannedStage(
            worker_id=WorkerId("w-2"),
            incarnation=Incarnation(6),
            address="b:2",
            held=(0, 4),
            layers=(2, 4),
        ),
    ),
    num_blocks=512,
)
_MEMBERS = tuple(
    PlannedWorker(worker_id=WorkerId(name), incarnation=Incarnation(7), held=layers)
    for name, layers in (("w-3", (0, 3)), ("w-4", (3, 4)))
)
_STATUS = WorkerStatus(
    liveness=Liveness.SUSPECT,
    age_s=1.75,
    incompatible="2",
    throttled=True,
    throttled_reason="full",
    report=_REPORT,
)

MESSAGES: dict[str, ControlMessage] = {
    "submit": _SUBMIT,
    "accepted": Accepted(request_id=RequestId("r-0123"), attempt=2, incarnation=Incarnation(2**47 + 1), num_output=3),
    "refused": Refused(
        request_id=RequestId("r-0123"),
        reason=RefusalReason.DRAINING,
        detail="shutting down – soon",
        newest_attempt=4,
    ),
    "renew": Renew(
        dispatcher_id=DispatcherId("d0"),
        incarnation=Incarnation(77),
        drop=((RequestId("r-0123"), 2), (RequestId("q"), 1)),
    ),
    "renewed": Renewed(incarnation=Incarnation(2**47 + 1), counter=5_000_000_000, num_sequences=12, step_age_s=0.25),
    "upload": Upload(request_id=RequestId("r-0123"), attempt=2, offset=900_000, data=b"\1\2\3\4"),
    "uploaded": Uploaded(request_id=RequestId("r-0123"), num_bytes=900_004),
    "owner": Owner(worker_id=WorkerId("w0"), attempt=2),
    "cancel": Cancel(request_id=RequestId("r-0123"), attempt=2),
    "cancelled": Cancelled(request_id=RequestId("r-0123"), found=True),
    "replay": Replay(request_id=RequestId("r-0123"), attempt=2, first_index=300),
    "replay_unknown": ReplayUnknown(request_id=RequestId("r-0123"), incarnation=Incarnation(123456789)),
    "worker_report": _REPORT,
    "worker_status": _STATUS,
    "cluster_view": ClusterView(sequence_number=5, workers=(_STATUS,)),
    "step_log": StepLogPage(
        worker_id=WorkerId("w0"),
        max_steps=2048,
        next_step_id=44,
        steps=(
            StepRecord(step_id=41, num_decodes=3, kv_decode_tokens=700, duration_s=0.0125),
            StepRecord(
                step_id=43,
                num_decodes=1,
                kv_decode_tokens=20,
                chunks=((0, 512), (16, 7)),
                duration_s=0.25,
                period_s=0.5,
            ),
        ),
    ),
    "plan": Plan(
        epoch=3,
        lever="drop",
        reason="KV 94 % full",
        plan_id=2,
        phase=PlanPhase.COMMITTING,
        steps=(
            _FORM,
            LoadBeside(stages=_MEMBERS, num_blocks=300),
            UnloadBeside(stages=_MEMBERS, num_blocks=400),
            RestoreInstance(worker=_MEMBERS[1]),
        ),
        wanted=WantedInstances(num_instances=5, num_before=2, lacking_tokens=416, reason="no room"),
    ),
    "prepare_plan": PreparePlan(epoch=2, plan_id=2, step=_FORM, limit_s=2.0),
    "commit_plan": CommitPlan(epoch=3, plan_id=2),
    "abort_plan": AbortPlan(epoch=3, plan_id=2),
    "plan_answer": PlanAnswer(
        worker_id=WorkerId("w-1"),
        plan_id=2,
        state=PlanState.FAILED,
        reason="w-2 did not come",
        newest_epoch=3,
        num_blocks=512,
    ),
    "list_queued": ListQueued(epoch=3, limit=64),
    "queue_list": QueueList(
        requests=(
            QueuedPart(
                request_id=RequestId("r-1"),
                attempt=2,
                request_class=RequestClass.BEST_EFFORT,
                age_s=1.5,
                num_blocks=12,
            ),
        ),
    ),
    "move_queued": MoveQueued(
        epoch=3, moves=(QueueMove(request_id=RequestId("r-1"), attempt=2, target=WorkerId("w-2")),)
    ),
    "queue_moved": QueueMoved(num_moved=1),
    "errand_refused": ErrandRefused(reason="epoch 3 is over"),
    "event": Event(
        name="worker_dead", service="monitor", instance_id="m0", about="w0", reason="no report for 3.2 s (limit 3 s)"
    ),
}

BATCH = TokenBatch(
    worker_id=WorkerId("w0-a1"),
    counter=2**40 + 1,
    stream=np.array([7, 4_000_000_000, 9], dtype=np.uint32),
    attempt=np.array([1, 2, 65_535], dtype=np.uint16),
    first_index=np.array([0, 300, 70_000], dtype=np.uint32),
    count=np.array([1, 2, 0], dtype=np.uint8),
    finish=np.array([FinishReason.NONE, FinishReason.LENGTH, FinishReason.CANCELLED], dtype=np.uint8),
    tokens=np.array([11, 2**32 - 1, 33], dtype=np.uint32),
    extras=pack_extras(
        [
            StreamExtra(0, cached_tokens=64),
            StreamExtra(1, logprobs=(TokenLogprob(-0.5, ((9, -0.25), (2**32 - 1, -0.5))), TokenLogprob(-np.inf))),
        ]
    ),
)


def golden_files() -> dict[str, str]:
    """Return what each golden file must hold."""
    files = {"token_batch.hex": _hex(BATCH.pack())}
    for name, message in MESSAGES.items():
        files[f"{name}.hex"] = _hex(encode(message))
        try:
            files[f"{name}.json"] = encode_json(message).decode() + "\n"
        except WireError:
            continue  # carries bytes: msgpack only
    return files


def read_hex(name: str) -> bytes:
    """Return the bytes of a golden file."""
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text())


def _hex(data: bytes) -> str:
    text = data.hex()
    return "".join(f"{text[i : i + _HEX_PER_LINE]}\n" for i in range(0, len(text), _HEX_PER_LINE))
