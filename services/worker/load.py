"""Makes the executor that the settings ask for, off the event loop, with progress.

torch is imported here, inside the functions that need it: a worker with the modelled executor runs without it. What
loads for the CPU is gentle: beside workers that serve it takes the cores that they leave, and of those that they use a
third of a share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from services.worker.build import ServedModel
from services.worker.config import ExecutorKind, KernelKind, LoadFrom, WorkerSettings
from services.worker.contract.executor import Executor, HostMemory
from services.worker.cost.estimate import CostEstimate
from services.worker.cost.fitting import CostFitting
from services.worker.cost.kept import KeptSteps
from services.worker.executor.first_look import RunnerSettings, first_look
from services.worker.memory.budget import bytes_per_block
from services.worker.memory.host_share import HostShare, host_share
from services.worker.migration.kv_link import KvNetwork
from services.worker.modelled.executor import ModelledExecutor
from services.worker.modelled.shadow_kv import ShadowKv, TokenDraw
from services.worker.models.spec import MIN_CONTEXT, TOO_SHORT, ModelSpec, read_spec
from services.worker.off_the_loop import off_the_loop
from services.worker.peers.greeting import MIN_PASSWORD_BYTES, PeerIdentity, cluster_secret
from services.worker.roles.device import GroupDevice
from shared.addresses import host_and_port
from shared.cost import load_profile
from shared.errors import StartupError
from shared.grammars import GrammarError
from shared.ids import NOBODY, Incarnation, WorkerId
from shared.process.log import get_logger
from shared.systems import UnknownSystemError, find_live_system, find_system

if TYPE_CHECKING:
    from services.worker.executor.elastic_model import ElasticModel
    from services.worker.executor.model_runner import ModelInfo, ModelRunner
    from services.worker.executor.runner import LoadedModel
    from services.worker.peers.connect import Peers
    from services.worker.sampling.grammar_cache import GrammarCache

NICENESS: Final = 5
"""Of what loads for the CPU. The threads that it makes have it too, and end with it or are replaced
(`native/src/team.h`); those that torch keeps are made before."""
Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An executor, and what the worker must know of its model."""

    executor: Executor
    model: ServedModel
    device: GroupDevice | None = None
    """Owns the executor's model, and outlives it; None: no layer is ever dropped."""
    network: KvNetwork | None = None
    """The way to the KV of other workers, and theirs here; None: they cannot know each other."""


def check_start(settings: WorkerSettings) -> ModelSpec:
    """Find what is wrong with the settings before any memory is taken.

    Raises:
        StartupError: no such system, no torch, no such model, or a model that is not supported.
    """
    try:
        find_live_system(settings.system)
    except UnknownSystemError as error:
        raise StartupError(str(error), "Choose one with --system") from error
    if settings.max_blocks and find_system(settings.system).forms_groups:
        said = (
            f"max_blocks bounds a memory that does not change, but system '{settings.system}' drops parameters for more"
        )
        raise StartupError(said, "Give less memory instead")
    if settings.executor is ExecutorKind.TORCH:
        if find_spec("torch") is None:
            hint = "Run `make install` in a checkout, or install sluice with its extra 'worker'"
            raise StartupError("workers compute with torch, and it is not installed", hint, "torch_missing")
        _password(settings)
    most_kv = settings.max_blocks * settings.block_size
    for name, num_tokens in (("max_model_len", settings.max_model_len), ("max_blocks times block_size", most_kv)):
        if 0 < num_tokens < MIN_CONTEXT:
            raise StartupError(f"{name} is {num_tokens}, {TOO_SHORT}", f"Give at least {MIN_CONTEXT}")
    spec = read_spec(settings.model)
    if left_out := spec.left_out:
        said = "no answer ends there"
        get_logger().warning("end_tokens_left_out", count=len(left_out), first=left_out[0], meaning=said)
    return spec


def check_model(settings: WorkerSettings, spec: ModelSpec) -> None:
    """Find what else is wrong that can be known without taking memory; torch is loaded only for a GPU or named kernels.

    Args:
        settings: of this worker, whose `check_start` has passed.
        spec: of the model in `settings.model`.

    Raises:
        StartupError: the checkpoint is damaged, or does not fit, or there is no such device, or no such kernels, or
            `host_share` refuses what the settings say of the host's memory.
    """
    if settings.executor is ExecutorKind.MODELLED:
        _modelled_blocks(settings, spec)
        load_profile(settings.profile)
    else:
        first_look(_runner_settings(settings), spec)
    host_share(settings, _block_kv_bytes(settings, spec))
    if settings.executor is ExecutorKind.MODELLED:
        return
    if settings.device != "cpu" or settings.kernels is not KernelKind.AUTO:
        from services.worker.executor.runner import check_compute

        check_compute(_runner_settings(settings), spec)


def _password(settings: WorkerSettings) -> str | None:
    """Return the password at the broker, by which workers know each other; None: there is none that keeps a secret.

    Raises:
        StartupError: likewise, and the system is about workers that know each other.
    """
    login = settings.nats_login()
    num_bytes = len(login[1].encode()) if login is not None else 0
    if login is None or num_bytes < MIN_PASSWORD_BYTES:
        if not find_system(settings.system).forms_groups:
            return None
        have = f"has {num_bytes} bytes, fewer than {MIN_PASSWORD_BYTES}" if login is not None else "is not set"
        said = f"workers of system '{settings.system}' know each other by their password at the broker, which {have}"
        raise StartupError(said, "Set SLUICE_WORKER_NATS_USER and _NATS_PASSWORD_FILE, for all of them the same")
    return login[1]


async def load_executor(
    settings: WorkerSettings, spec: ModelSpec, progress: Progress, incarnation: Incarnation = NOBODY
) -> Loaded:
    """Return the executor, loaded.

    Args:
        settings: of this worker.
        spec: of the model in `settings.model`.
        progress: called on the event loop with the share done (0 to 1) and what is being done.
        incarnation: of this process.

    Raises:
        StartupError: the checkpoint is damaged, or the memory does not suffice.
    """
    host = host_share(settings, _block_kv_bytes(settings, spec))
    by = "setting" if host.is_given else "default"
    get_logger().info("host_memory", num_bytes=host.num_bytes, num_blocks=host.num_blocks, by=by)
    if settings.executor is ExecutorKind.MODELLED:
        return _modelled(settings, spec, host)
    return await _torch(settings, spec, _runner_settings(settings, host.num_bytes), progress, incarnation)


def _modelled(settings: WorkerSettings, spec: ModelSpec, share: HostShare) -> Loaded:
    """Return an executor that takes time and computes nothing; its KV memory is the whole of `memory`."""
    num_blocks, block_kv_bytes = _modelled_blocks(settings, spec), _block_kv_bytes(settings, spec)
    block_copy_s = block_kv_bytes / (settings.host_link_gb_per_s * 1e9)
    host = HostMemory(share.num_blocks, block_kv_bytes, block_copy_s) if share.num_blocks else None
    draw = TokenDraw.of_vocabulary(spec.vocab_size, spec.eos_token_ids, first_id=min(256, spec.vocab_size // 2))
    kv = ShadowKv(num_blocks, settings.block_size, draw, num_host_blocks=share.num_blocks)
    cost = load_profile(settings.profile).cost
    facts = ServedModel(
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_model_len=min(settings.max_model_len or spec.max_positions, num_blocks * settings.block_size),
        kv_bytes=num_blocks * block_kv_bytes,
        cost=CostEstimate(cost),
    )
    return Loaded(ModelledExecutor(cost, kv, host=host, overlaps=bool(settings.overlap)), facts)


def _block_kv_bytes(settings: WorkerSettings, spec: ModelSpec) -> int:
    return bytes_per_block(spec, settings.block_size, settings.dtype)


def _modelled_blocks(settings: WorkerSettings, spec: ModelSpec) -> int:
    """Return the blocks of the modelled KV memory."""
    block_kv_bytes = _block_kv_bytes(settings, spec)
    num_blocks = settings.memory // block_kv_bytes
    if num_blocks * settings.block_size < MIN_CONTEXT:
        raise StartupError(f"--memory holds no KV of two tokens in blocks of {block_kv_bytes} bytes", "Give more")
    return num_blocks


async def _torch(
    settings: WorkerSettings,
    spec: ModelSpec,
    runner_settings: RunnerSettings,
    progress: Progress,
    incarnation: Incarnation,
) -> Loaded:
    loop = asyncio.get_running_loop()

    def report(ratio: float, text: str) -> None:
        loop.call_soon_threadsafe(progress, ratio, text)

    niceness = NICENESS if settings.device == "cpu" else 0
    await off_the_loop(_import_torch, niceness=niceness)
    await off_the_loop(lambda: _make_pool(runner_settings))
    if find_system(settings.system).forms_groups:
        model = await off_the_loop(lambda: _load_elastic(runner_settings, spec, report), niceness=niceness)
        fitting = await off_the_loop(lambda: _tried_elastic(settings, spec, model))
        return await _in_pages(settings, model, fitting, incarnation)
    loaded, digest = await off_the_loop(lambda: _load_whole(runner_settings, spec, report), niceness=niceness)
    fitting = await off_the_loop(lambda: _tried(settings, spec, loaded.runner))
    from services.worker.executor.thread import ThreadExecutor
    from services.worker.migration.socket_network import SocketKvNetwork

    facts = replace(
        _facts(loaded.runner.info, fitting), digest=digest, prepare_grammar=_prepare_of(loaded.opener.grammars)
    )
    peers = await _peers(settings, incarnation, digest)
    network = None if peers is None else SocketKvNetwork(peers, lambda: loaded.cache, lambda: loaded.runner.host)
    return Loaded(ThreadExecutor(loaded.runner, loop), facts, network=network)


def _prepare_of(grammars: GrammarCache | None) -> Callable[[bytes], None]:
    if grammars is not None:
        return grammars.prepare

    def refuse(_grammar: bytes) -> None:
        raise GrammarError("this worker has no tokenizer that grammars can be compiled over")

    return refuse


async def _peers(settings: WorkerSettings, incarnation: Incarnation, digest: str) -> Peers | None:
    """Return this worker among the others; None: it has no password by which they know each other.

    Raises:
        StartupError: nothing can be heard at the address.
    """
    from services.worker.peers.connect import Peers

    password = _password(settings)
    if password is None:
        return None
    secret = await off_the_loop(lambda: cluster_secret(password, settings.cluster))
    identity = PeerIdentity(WorkerId(settings.instance_id), incarnation, secret, digest)
    try:
        return await Peers.open(
            identity,
            settings.stage_host,
            settings.stage_port,
            advertise=settings.stage_address(),
            wait_s=settings.stage_limit_s,
        )
    except OSError as error:
        where = host_and_port(settings.stage_host, settings.stage_port)
        said = f"other workers cannot be heard at {where}: {error.strerror or error}"
        raise StartupError(said, "Set stage_host") from error


async def _in_pages(
    settings: WorkerSettings, model: ElasticModel, fitting: CostFitting, incarnation: Incarnation
) -> Loaded:
    from services.worker.kv_moves.kv_exchanges import ExchangeParams
    from services.worker.migration.socket_network import SocketKvNetwork
    from services.worker.roles.torch_device import TorchGroupDevice

    facts = replace(_facts(model.info, fitting), digest=model.digest, prepare_grammar=_prepare_of(model.grammars))
    try:
        peers = await _peers(settings, incarnation, model.digest)
    except StartupError:
        model.close()
        raise
    assert peers is not None, "its system asks for a password"
    device = TorchGroupDevice(
        model,
        peers,
        ExchangeParams(
            memory_bytes=settings.exchange_memory,
            limit_s=settings.exchange_limit_s,
            bytes_per_s=settings.exchange_gb_per_s * 1e9,
            mode=find_system(settings.system).exchange,
            hands_over=model.device.type == "cuda" if settings.hand_over_pages is None else settings.hand_over_pages,
        ),
        limit_s=settings.stage_limit_s,
        peers_first=settings.load_from is LoadFrom.PEERS,
        cost=facts.cost,
    )
    network = SocketKvNetwork(peers, lambda: model.cache, lambda: model.host)
    return Loaded((await device.alone()).executor, facts, device, network)


def _import_torch() -> None:
    import_module("services.worker.executor.runner")


def _make_pool(settings: RunnerSettings) -> None:
    from services.worker.executor.runner import make_pool

    make_pool(settings)


def _load_whole(settings: RunnerSettings, spec: ModelSpec, report: Progress) -> tuple[LoadedModel, str]:
    """Return the model, and the digest of all that its KV depends on."""
    from services.worker.executor.runner import load_model
    from services.worker.models.digests import digests_of

    loaded = load_model(settings, report, spec)
    return loaded, loaded.digest(digests_of(loaded.opener.weights))


def _load_elastic(settings: RunnerSettings, spec: ModelSpec, report: Progress) -> ElasticModel:
    from services.worker.executor.elastic_model import load_elastic_model

    return load_elastic_model(settings, report, spec)


def _tried_elastic(settings: WorkerSettings, spec: ModelSpec, model: ElasticModel) -> CostFitting:
    runner = model.open()
    fitting = _tried(settings, spec, runner)
    runner.close()
    return fitting


def _tried(settings: WorkerSettings, spec: ModelSpec, runner: ModelRunner) -> CostFitting:
    """Return what fits the cost of a step, which begins with those that are kept and a few that are tried now."""
    from services.worker.executor.cost_key import cost_key
    from services.worker.executor.dry_steps import try_steps

    tried = try_steps(runner, settings.max_batch_rows)
    if settings.costs_kept is None:
        return CostFitting(tried)
    kept = KeptSteps(settings.costs_kept, cost_key(spec, _runner_settings(settings), runner.info))
    return CostFitting([*kept.read(tried), *tried], kept.write)


def _runner_settings(settings: WorkerSettings, host_memory_bytes: int = 0) -> RunnerSettings:
    return RunnerSettings(
        model_dir=settings.model,
        device=settings.device,
        dtype=settings.dtype.value,
        memory_bytes=settings.memory,
        host_memory_bytes=host_memory_bytes,
        block_size=settings.block_size,
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_rows=settings.max_batch_rows,
        max_rows=settings.max_sequences,
        max_model_len=settings.max_model_len or None,
        deterministic=settings.deterministic,
        num_threads=settings.threads or None,
        num_cores=settings.cores or None,
        kernels=settings.kernels.value,
        graphs=settings.graphs,
        fused=settings.fused,
        overlap=settings.overlap,
        page_bytes=settings.page_bytes if find_system(settings.system).forms_groups else None,
        shares_blocks=find_system(settings.system).shares_blocks,
    )


def _facts(info: ModelInfo, fitting: CostFitting) -> ServedModel:
    return ServedModel(
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        max_model_len=info.max_model_len,
        param_bytes=info.param_bytes,
        kv_bytes=info.kv_bytes,
        reserve_bytes=info.reserve_bytes,
        dry_step_s=info.dry_step_s,
        cost=fitting.estimate,
        fitting=fitting,
        kernels=info.kernels,
    )
