"""Systems by name: which exist, which run live, and what a worker needs for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.worker import load
from services.worker.config import ExecutorKind, KernelKind, WorkerSettings
from services.worker.executor import runner as runner_module
from services.worker.executor.kernels import WantedKernels
from services.worker.load import check_start, load_executor
from services.worker.scheduling.registry import SCHEDULERS
from shared.errors import StartupError
from shared.systems import (
    SYSTEMS,
    KvExchange,
    Memory,
    UnknownSystemError,
    find_live_system,
)
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.loading import close_loaded

UNLIMITED = ["oracle", "andes-unlimited"]
VERSIONS = ["kunserve", "kunserve-v1", "kunserve-v2"]
KUNSERVE = [*VERSIONS, "kunserve-sluice"]


def settings(system: str, **changes: Any) -> WorkerSettings:
    """A worker with a modelled device."""
    folder: Path = stored_checkpoint(CheckpointShape())[0]
    defaults: dict[str, Any] = {"memory": 2**20, "executor": ExecutorKind.MODELLED}
    defaults |= {"host_memory": 2**18} if SYSTEMS[system].keeps_on_host else {}
    defaults |= {"nats_user": "worker", "nats_password": "a password of workers"}
    return WorkerSettings(instance_id="w0", model=folder, system=system, **{**defaults, **changes})


def test_systems_have_names_and_schedulers() -> None:
    plain = {"fcfs", "fcfs-chunked", "fcfs-pp", "round-robin", "swap", "migrate", "load-balance", "oracle"}
    assert set(SYSTEMS) == {
        *plain,
        "best-fit",
        "gradient",
        "worst-fit",
        "pack",
        "mell",
        "mell-printed",
        "andes",
        "andes-unlimited",
        "lqsf",
        "sluice",
        "tokenflow",
        "bros",
        "bros-whole",
        "bros-recompute",
        "bros-rr",
        "kunserve",
        "kunserve-v1",
        "kunserve-v2",
        "kunserve-sluice",
    }
    assert all(name == system.name for name, system in SYSTEMS.items())
    assert set(SCHEDULERS) == {system.scheduler for system in SYSTEMS.values()}


def test_only_bounds_have_memory_without_end_and_they_run_nowhere_live() -> None:
    unlimited = [name for name, system in SYSTEMS.items() if system.memory is Memory.UNLIMITED]
    assert unlimited == UNLIMITED
    told = r"simulator only; live there are: .*best-fit, worst-fit, gradient, pack, mell, mell-printed, andes, "
    for name in unlimited:
        with pytest.raises(UnknownSystemError, match=told):
            find_live_system(name)
    for name in sorted(set(SYSTEMS) - set(UNLIMITED)):
        assert find_live_system(name) is SYSTEMS[name]
    with pytest.raises(UnknownSystemError, match="unknown system 'meld'; did you mean 'mell'"):
        find_live_system("meld")


def test_the_static_pipeline_is_fcfs_in_two_stages() -> None:
    assert replace(SYSTEMS["fcfs-pp"], name="fcfs", num_stages=1) == SYSTEMS["fcfs"]
    assert SYSTEMS["fcfs-pp"].num_stages == 2
    assert [name for name, system in SYSTEMS.items() if system.forms_groups] == ["fcfs-pp", *KUNSERVE]


def test_kunserve_differs_from_what_it_is_compared_with_in_dropping_and_in_what_groups_are_scheduled_by() -> None:
    """With one lane `lookahead` is `chunked`, decision for decision (test_policy_lookahead.py)."""
    assert [name for name, system in SYSTEMS.items() if system.drops] == KUNSERVE
    plain = replace(SYSTEMS["kunserve-v2"], name="fcfs-chunked", drops=False, scheduler="chunked")
    assert plain == SYSTEMS["fcfs-chunked"]
    assert SYSTEMS["kunserve"].scheduler == "lookahead"


def test_the_papers_versions_have_one_mode_of_exchange_each_and_kunserve_chooses() -> None:
    assert [SYSTEMS[name].exchange for name in VERSIONS] == ["by-price", "live", "coordinated"]
    assert replace(SYSTEMS["kunserve"], name="kunserve-v2", exchange=KvExchange.COORDINATED) == SYSTEMS["kunserve-v2"]


def test_readers_first_in_groups_is_kunserve_by_another_scheduler_and_its_placement() -> None:
    name, alone = "kunserve-sluice", SYSTEMS["sluice"]
    joined = replace(SYSTEMS["kunserve"], name=name, scheduler=alone.scheduler, placement=alone.placement)
    assert joined == SYSTEMS[name]


def test_the_oracle_differs_from_what_it_is_compared_with_in_memory_alone() -> None:
    oracle, plain, swap = (SYSTEMS[name] for name in ("oracle", "fcfs-chunked", "swap"))
    assert (oracle.scheduler, oracle.placement) == (plain.scheduler, plain.placement)
    assert (swap.scheduler, swap.placement) == (plain.scheduler, plain.placement)
    assert swap == replace(plain, name="swap", swaps=True)


def test_a_live_worker_refuses_the_oracle_by_name() -> None:
    with pytest.raises(StartupError, match="system 'oracle' has unlimited KV memory"):
        check_start(settings("oracle"))


def test_a_bound_on_blocks_is_refused_where_parameters_are_dropped_for_more() -> None:
    for name, system in SYSTEMS.items():
        if name not in {*UNLIMITED, "fcfs-pp"} and not system.drops:
            check_start(settings(name, max_blocks=4))
    with pytest.raises(StartupError, match="but system 'kunserve' drops parameters for more"):
        check_start(settings("kunserve", max_blocks=4))
    check_start(settings("kunserve"))


@pytest.mark.parametrize("executor", [ExecutorKind.TORCH, ExecutorKind.MODELLED])
def test_a_context_of_one_token_is_refused(executor: ExecutorKind) -> None:
    one_slot = {"max_blocks": 1, "block_size": 1}
    for given, said in (({"max_model_len": 1}, "max_model_len"), (one_slot, "max_blocks times block_size")):
        with pytest.raises(StartupError, match=f"{said} is 1, and a request has a token of prompt and one of output"):
            check_start(settings("fcfs-chunked", executor=executor, **given))
    for least in ({"max_model_len": 2}, {"max_blocks": 2, "block_size": 1}):
        check_start(settings("fcfs-chunked", executor=executor, **least))


@pytest.mark.parametrize(
    ("login", "reason"),
    [
        ({}, "which is not set. Set SLUICE_WORKER_NATS_USER and _NATS_PASSWORD_FILE"),
        ({"nats_user": "worker", "nats_password": "short"}, "which has 5 bytes, fewer than 16"),
        ({"nats_url": "nats://worker:p%40ss@h:4222"}, "which has 4 bytes, fewer than 16"),
    ],
)
def test_a_worker_that_others_cannot_know_does_not_start(login: dict[str, str], reason: str) -> None:
    given = {"executor": ExecutorKind.TORCH, "nats_user": "", "nats_password": "", **login}
    with pytest.raises(StartupError, match="know each other by their password at the broker") as caught:
        check_start(settings("kunserve", **given))
    assert reason in str(caught.value)
    assert "p@ss" not in str(caught.value)
    check_start(settings("fcfs-chunked", **given))
    in_url = {**given, "nats_user": "", "nats_url": "nats://worker:a%20password%20of%20workers@h:4222,nats://i:4222"}
    check_start(settings("kunserve", **in_url))
    assert settings("kunserve", **in_url).nats_login() == ("worker", "a password of workers")


def test_asking_a_modelled_worker_makes_no_memory_and_refuses_what_loading_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(load, "ShadowKv")
    for name in ("swap", "fcfs-chunked"):
        load.check_model(settings(name), check_start(settings(name)))
    for wrong, reason in (({"memory": 8}, "--memory holds no KV"), ({"host_memory": 8}, "host_memory holds no KV")):
        with pytest.raises(StartupError, match=reason):
            load.check_model(settings("swap", **wrong), check_start(settings("swap")))
    with pytest.raises(StartupError, match="nowhere"):
        load.check_model(settings("swap", profile="nowhere"), check_start(settings("swap")))


@pytest.mark.parametrize("kind", [ExecutorKind.MODELLED, ExecutorKind.TORCH])
@pytest.mark.parametrize("system", sorted(set(SYSTEMS) - {*UNLIMITED, "bros-recompute"}))
async def test_a_worker_has_the_host_memory_that_it_is_given(system: str, kind: ExecutorKind) -> None:
    """2 layers · 2 (keys, values) · 2 heads · 16 dimensions · 4 bytes · 16 slots are 8 192 bytes; 25 GB/s."""
    chosen = settings(system, executor=kind, memory=2**25, page_bytes=2**16)
    loaded = await load_executor(chosen, check_start(chosen), lambda _done, _what: None)
    host = loaded.executor.capacity.host
    assert host is not None
    assert (host.num_blocks, host.block_kv_bytes) == (2**18 // 8192, 8192)
    assert host.block_copy_s > 0
    assert kind is ExecutorKind.TORCH or host.block_copy_s == pytest.approx(8192 / 25e9)
    assert kind is ExecutorKind.TORCH or loaded.model.cost.token_s > 0  # there it is timed
    await close_loaded(loaded)


@pytest.mark.parametrize("kind", [ExecutorKind.MODELLED, ExecutorKind.TORCH])
@pytest.mark.parametrize("system", ["fcfs-chunked", "kunserve"])
@pytest.mark.parametrize("overlap", [None, False, True])
async def test_a_worker_overlaps_its_steps_if_it_is_told_to(
    kind: ExecutorKind, system: str, *, overlap: bool | None
) -> None:
    """By itself only where the device computes beside the host, as the CPU does not."""
    chosen = settings(system, executor=kind, overlap=overlap, memory=2**25, page_bytes=2**16)
    loaded = await load_executor(chosen, check_start(chosen), lambda _done, _what: None)
    assert (loaded.executor.depth, loaded.executor.num_lanes) == (2 if overlap else 1, 1)
    await close_loaded(loaded)


def test_a_system_of_groups_shares_no_blocks() -> None:
    with pytest.raises(ValueError, match="system 'kunserve' forms groups, where no two requests fill one block"):
        replace(SYSTEMS["kunserve"], shares_blocks=True)
    assert [name for name, system in SYSTEMS.items() if system.shares_blocks] == ["bros"]


@pytest.mark.parametrize("system", ["bros", "bros-whole", "sluice"])
def test_kernels_are_asked_for_blocks_from_the_right_where_there_will_be_any(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[WantedKernels] = []
    monkeypatch.setattr(runner_module, "choose_kernels", lambda wanted, *_: asked.append(wanted))
    chosen = settings(system, executor=ExecutorKind.TORCH, kernels=KernelKind.TORCH, memory=2**25)
    load.check_model(chosen, check_start(chosen))
    assert asked == [WantedKernels("torch", fused=False, from_right=SYSTEMS[system].shares_blocks)]
