"""Text through the whole cluster, over HTTP, against the reference implementation: alone, and under memory pressure."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from shared.process.config import parse_size
from shared.subjects import Subjects
from shared.transport.nats_bus import NatsBus
from tests.support.checkpoints import CheckpointShape, greedy_text, stored_checkpoint
from tests.support.cluster import Cluster, cluster
from tests.support.group_changes import ENV
from tests.support.processes import LIMIT_S, sluice, wait_until
from tests.support.seeds import first_of
from tests.support.waiting import rounds
from tests.unit.worker.models.test_model_oracle import MIN_MARGIN, NUM_TOKENS, SHAPES

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

T = TypeVar("T")
NAMES = (
    "group of 2",
    "phi3, partial rotary, window",
    "group of 1, tied",
    "group of 4, wide heads",
    "group of 8, three layers",
)
LENGTHS = (3, 150, 4, 90, 5, 6, 64, 7, 8, 77, 9, 12)
MAX_BLOCKS = 14
"""The longest sequence needs all of them (150 + 64 tokens in blocks of 16). Three short ones that run together begin
with one block each and end with five each, so one of them is preempted."""
ENDLESS: dict[str, Any] = {"structured_outputs": {"regex": "[a-z ]+~{400}"}}
"""Holds an answer to what has no end before `max_tokens`."""
WAYS: tuple[dict[str, Any], ...] = (
    {"n": 2},
    {},
    {"presence_penalty": 0.7, "frequency_penalty": 0.7},
    {"logprobs": 3, "qoe": {"ttft_s": 0.1, "speed_tokens_per_s": 10_000}},
    {**ENDLESS, "logprobs": 1},
)
"""Of asking, by turns."""
BLOCK_KV_BYTES = 8192
"""Of the smallest checkpoint: 2 layers · 2 (keys, values) · 2 heads · 16 dimensions · 4 bytes · 16 slots."""
AT_ONCE = {"SLUICE_WORKER_REPORT_PERIOD_S": "0.05", "SLUICE_MONITOR_VIEW_PERIOD_S": "0.05"}
"""What a round of requests holds is known to the planner before the round is over."""
MOST_TOKENS = 240
"""Of an answer that outlasts the others: while it is alone, whole instances have room for what there is."""
MAX_ROUNDS = 5
"""How the requests arrive is not ours to say; so often may they be sent until a preemption has been seen."""


def draw_prompt(rng: random.Random, shape: CheckpointShape, length: int) -> list[int]:
    return [rng.randrange(3, shape.vocab_size) for _ in range(length)]


def clear_prompts(shape: CheckpointShape, reference: PreTrainedModel) -> tuple[list[list[int]], list[list[int]]]:
    """Draw prompts whose greedy text has no near-tie (`MIN_MARGIN`), and return them with that text."""
    rng = random.Random(1)
    chosen, texts = [], []
    for length in LENGTHS:
        for _ in range(20):
            prompt = draw_prompt(rng, shape, length)
            text, margin = greedy_with_margin(reference, prompt)
            if margin > MIN_MARGIN:
                chosen.append(prompt)
                texts.append(text)
                break
    assert len(chosen) == len(LENGTHS), "the checkpoint has near-ties everywhere: draw its weights wider"
    return chosen, texts


def greedy_with_margin(reference: PreTrainedModel, prompt: list[int]) -> tuple[list[int], float]:
    """Return the reference's greedy text, and the smallest distance of its two best logits along it."""
    text = greedy_text(reference, prompt, NUM_TOKENS)
    with torch.inference_mode():
        top = reference(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].topk(2).values
    return text, float((top[:, 0] - top[:, 1]).min())


def crowded_cluster(folder: Path, *flags: str) -> AbstractContextManager[Cluster]:
    """One worker with memory for the longest sequence and no more."""
    flags = ("--model", str(folder), "--served-model-name", "checkpoint", "--memory", "256MiB", *flags)
    return cluster(*flags, "--workers", "1", "--threads", "1", env={"SLUICE_WORKER_MAX_BLOCKS": str(MAX_BLOCKS)})


def dropping_cluster(folder: Path, system: str, host_memory: str) -> AbstractContextManager[Cluster]:
    """Two workers that the planner leaves alone, each with KV for a few of the requests; it knows what they hold."""
    sizes = ("--max-model-len", "256", "--memory", "5300KiB", "--host-memory", host_memory)
    flags = ("--system", system, "--deterministic", "--workers", "2", "--threads", "1")
    env = {**ENV, **AT_ONCE, "SLUICE_PLANNER_DROP_HOLD_S": "3600", "SLUICE_WORKER_PAGE_BYTES": "4096"}
    return cluster("--model", str(folder), "--served-model-name", "checkpoint", *flags, *sizes, env=env)


def ready_pids(running: Cluster) -> set[int]:
    return {report["pid"] for report in running.reports() if report["phase"] == "ready"}


def complete(running: Cluster, prompt: list[int], **how: Any) -> str:
    return str(choices_of(running, prompt, **how)[0]["text"])


def choices_of(running: Cluster, prompt: list[int], **how: Any) -> list[dict[str, Any]]:
    body = {"model": "checkpoint", "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, **how}
    answer = running.post("/v1/completions", body)
    choices: list[dict[str, Any]] = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    assert len(choices) == how.get("n", 1)
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert answer["usage"]["completion_tokens"] == body["max_tokens"] * len(choices)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    return choices


def num_tokens(length: int) -> int:
    """Return how many tokens answer a prompt of so many where groups change: the shortest ones get the most."""
    return MOST_TOKENS if length == min(LENGTHS) else NUM_TOKENS


def check_under_pressure(running: Cluster, work: Sequence[Callable[[], T]], texts: list[T], *counted: str) -> None:
    """Ask for everything at once until a sequence was preempted meanwhile; the texts are the same each time.

    Args:
        counted: further numbers of the reports that have grown by then.
    """
    names = ("num_preemptions_total", *counted)
    before = [running.total(name) for name in names]
    for _ in rounds(f"{names} grow", MAX_ROUNDS):
        with ThreadPoolExecutor(len(work)) as pool:
            assert list(pool.map(lambda ask: ask(), work)) == texts
        running.wait_until_idle()
        if all(running.total(name) > count for name, count in zip(names, before, strict=True)):
            return


def is_done_meanwhile(running: Cluster, work: Sequence[Callable[[], T]], texts: list[T], command: str) -> bool:
    """Ask for everything at once, and return whether a command was done before the last answer; the texts are the same.

    Nothing is done before the first answer.
    """
    with ThreadPoolExecutor(len(work)) as pool:
        asked, is_done = [pool.submit(ask) for ask in work], False
        wait(asked, return_when=FIRST_COMPLETED)
        while not is_done and not all(each.done() for each in asked):  # they may hold too much just now
            if command.startswith("chaos"):
                is_done = sluice(*command.split(), "--nats-url", running.nats_url).returncode == 0
            else:
                is_done = asyncio.run(is_done_by_planner(running, command))
        assert [each.result() for each in asked] == texts
    running.wait_until_idle()
    return is_done


async def is_done_by_planner(running: Cluster, verb: str) -> bool:
    """Ask the planner at once: `sluice drop` and `sluice restore` take most of a round to start and to find it."""
    bus = await NatsBus.connect(running.nats_url, name="test")
    try:
        answer = await bus.request(Subjects().admin("planner", "planner", verb), b"", timeout_s=LIMIT_S)
        return bool(json.loads(answer)["done"])
    finally:
        await bus.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", first_of(NAMES, in_ci=1))
def test_greedy_text_over_http_equals_the_references(name: str) -> None:
    shape = SHAPES[name]
    folder, reference = stored_checkpoint(shape)
    batch, token_ids = clear_prompts(shape, reference)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids]
    with crowded_cluster(folder) as running:
        work = [partial(complete, running, prompt, temperature=0) for prompt in batch]
        assert [ask() for ask in work[:3]] == texts[:3]
        check_under_pressure(running, work, texts)


COMPUTED_AGAIN = ("0", "num_recomputed_tokens_total", "num_brought_back_tokens_total")
BROUGHT_BACK = ("4MiB", "num_brought_back_tokens_total", "num_given_up_tokens_total")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("system", "host_memory", "counted", "never"),
    first_of(
        [
            ("bros", *BROUGHT_BACK),
            ("fcfs-chunked", *COMPUTED_AGAIN),
            *((system, *COMPUTED_AGAIN) for system in ("bros-recompute", "bros-rr")),
            *((system, *BROUGHT_BACK) for system in ("andes", "bros-whole")),
        ],
        in_ci=1,
    ),
)
def test_deterministic_text_does_not_depend_on_the_batch(
    system: str, host_memory: str, counted: str, never: str
) -> None:
    """Sampled text from a model with near-ties: byte-equal alone, in a full batch, and after preemptions.

    So are log-probabilities, both texts of two, and those with penalties for what was said before; with best effort
    among them, which fills its blocks from the other end with `bros`.
    """
    tiers = cycle(("flex", "default", "default"))
    shape, rng = CheckpointShape(seed=5, weight_std=0.03), random.Random(1)
    folder, _ = stored_checkpoint(shape)
    flags = ("--deterministic", "--host-memory", host_memory, "--system", system)
    with crowded_cluster(folder, *flags) as running:
        work = [
            partial(
                choices_of,
                running,
                draw_prompt(rng, shape, length),
                temperature=1.0,
                seed=length,
                service_tier=next(tiers),
                **way,
            )
            for length, way in zip(LENGTHS, cycle(WAYS), strict=False)
        ]
        alone = [ask() for ask in work]
        assert running.total("num_host_blocks") == parse_size(host_memory) // BLOCK_KV_BYTES
        check_under_pressure(running, work, alone, counted)
        assert running.total(never) == running.total("num_used_host_blocks") == 0
        texts = [choice["text"] for choices in alone for choice in choices]
        assert len(set(texts)) == len(texts)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("host_memory", "counted"),
    first_of([("8MiB", "num_brought_back_tokens_total"), ("0", "num_recomputed_tokens_total")], in_ci=1),
    ids=["brought back from the host", "computed again"],
)
def test_deterministic_text_in_a_group_does_not_depend_on_which_readers_give_way(
    host_memory: str, counted: str
) -> None:
    """The group forms at rest, so that whoever gives way does so there; it dissolves under load."""
    shape, rng = CheckpointShape(seed=5, weight_std=0.03, num_layers=4), random.Random(1)
    folder, _ = stored_checkpoint(shape)
    speeds = cycle((3.0, 8.0, 19.0))
    with dropping_cluster(folder, "kunserve-sluice", host_memory) as running:
        work = [
            partial(
                complete,
                running,
                draw_prompt(rng, shape, length),
                temperature=1.0,
                seed=number,
                max_tokens=num_tokens(length),
                qoe={"ttft_s": 0.5, "speed_tokens_per_s": next(speeds)},
            )
            for number, length in enumerate(2 * LENGTHS)
        ]
        alone = [ask() for ask in work]
        assert sluice("drop", "--nats-url", running.nats_url).returncode == 0
        running.wait_for_reports()
        check_under_pressure(running, work, alone, counted)
        assert {report["num_stages"] for report in running.reports()} == {2}
        for _ in rounds("the group dissolves meanwhile", 3 * MAX_ROUNDS):
            if is_done_meanwhile(running, work, alone, "restore"):
                break


@pytest.mark.timeout(360)
@pytest.mark.parametrize("system", first_of(["kunserve", "kunserve-sluice"], in_ci=1))
def test_text_is_the_same_by_way_of_the_host_and_through_groups_that_form_break_and_dissolve(system: str) -> None:
    """Groups by hand, one of whose workers is killed while it is in one, and comes back."""
    shape, rng = CheckpointShape(seed=5, weight_std=0.03, num_layers=4), random.Random(1)
    folder, _ = stored_checkpoint(shape)
    with dropping_cluster(folder, system, "8MiB") as running:
        work = [
            partial(
                complete,
                running,
                draw_prompt(rng, shape, length),
                temperature=1.0,
                seed=number,
                max_tokens=num_tokens(length),
                **(ENDLESS if number % 3 == 2 else {}),
            )
            for number, length in enumerate(2 * LENGTHS)
        ]
        alone = [ask() for ask in work]
        to_do, num_back = ["drop", "chaos kill worker-1", "drop", "restore", "drop", "restore"], 0
        for _ in rounds("groups form, break and dissolve, and KV is brought back from the host", 3 * MAX_ROUNDS):
            is_done = is_done_meanwhile(running, work, alone, to_do[0])
            num_back = max(num_back, running.total("num_brought_back_tokens_total"))
            wait_until(lambda: len(ready_pids(running)) == 2, "who was killed serves again", LIMIT_S)
            to_do = to_do[is_done:]
            if not to_do:
                if num_back:
                    break
                to_do = ["drop", "restore"]
        assert running.total("num_used_host_blocks") == 0


def start_anew(running: Cluster, worker_id: str) -> None:
    before = ready_pids(running)
    assert sluice("chaos", "kill", worker_id, "--nats-url", running.nats_url).returncode == 0
    wait_until(lambda: bool(ready_pids(running) - before), f"{worker_id} serves again", LIMIT_S)


@pytest.mark.timeout(180)
def test_a_worker_with_other_weights_under_the_same_name_serves_and_joins_no_group(tmp_path: Path) -> None:
    """The folder's weights are replaced, and one worker is started anew: no layer and no KV goes from one to the other.

    With the old ones again both are a group.
    """
    shape = CheckpointShape(seed=5, num_layers=4)
    folder, _ = stored_checkpoint(shape)
    others, _ = stored_checkpoint(replace(shape, seed=6))
    served = tmp_path / "served"
    shutil.copytree(folder, served)
    with dropping_cluster(served, "kunserve", "0") as running:
        ask = partial(complete, running, draw_prompt(random.Random(1), shape, 9), temperature=1.0, seed=1)
        text = ask()
        for weights in (others, folder):
            shutil.copyfile(weights / "model.safetensors", tmp_path / "new")
            (tmp_path / "new").rename(served / "model.safetensors")
            start_anew(running, "worker-1")
            done = sluice("drop", "--nats-url", running.nats_url)
            assert ("worker-1 takes part in no plan: the parameters of its model" in done.stderr) == (weights == others)
            assert done.returncode == (weights == others), done.stderr
        running.wait_for_reports()
        assert {report["num_stages"] for report in running.reports()} == {2}
        assert ask() == text
