"""The simulated side: the same workload on the services' own code, with the coefficients that were fitted."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace

import numpy as np

from benchmarks.fidelity.measurement import LiveRun, Measurement, WorkerFacts
from cli.profile.driver import read_steps
from cli.profile.steps import columns_of, groups_of, overheads_s
from cli.replay.sender import FIRST_TOKEN_ID, VOCAB_SIZE
from shared.cost import CostModel
from shared.cost_fit import Fit, fit_held_out, predict_s
from shared.ids import WorkerId
from shared.messages.steps import StepRecord
from shared.process.log import only_from
from shared.subjects import Subjects
from sim.cluster import ClusterParams, SimCluster
from sim.experiment.records import Recorder, Records
from sim.experiment.run import feed
from sim.virtual_time import run
from sim.worker import SimWorkerParams
from sim.workload.workload import Workload

WORKER_ID = WorkerId("worker-0")
READ_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the simulation is told of the live cluster; nothing of it is taken from the load that it is compared on."""

    fit: Fit
    """Of the steps' durations; without overhead."""
    stretch: float
    """How much longer steps take on average than the fit says, which goes by the typical step: what is held up now and
    then, by whatever else the machine does, makes the mean larger and the fit hardly."""
    overhead_s: float
    """Mean of what the step loop takes between two steps: the cost model's `era_s`."""
    message_s: float
    """Latency of one message, HTTP and text included."""

    @property
    def cost(self) -> CostModel:
        """What a simulated step takes."""
        return replace(stretched(self.fit.cost, self.stretch), era_s=self.overhead_s)


def calibrate(measured: Measurement, seed: int = 0) -> Calibration:
    """Return the calibration by the idle probes and the first load."""
    steps = measured.fitted.steps
    columns = columns_of(steps)
    fit = fit_held_out(columns, groups_of(steps), np.random.default_rng(seed))
    stretch = float(columns.duration_s.sum() / predict_s(fit.cost, columns).sum())
    overhead_s = max(0.0, float(overheads_s(steps).mean()))
    return Calibration(fit, stretch, overhead_s, message_s(measured.idle, overhead_s))


def stretched(cost: CostModel, factor: float) -> CostModel:
    """Return a cost model by which every step takes `factor` times as long."""
    return CostModel(**{name: factor * value for name, value in asdict(cost).items()})


def message_s(idle: LiveRun, overhead_s: float) -> float:
    """Return the latency of one message, in a simulation, that takes an answer as long as the idle server's ways do.

    What lies between a client's request and its first token, less the step itself and the loop's own time, is
    HTTP, tokenizer, broker and wake-ups on the way in and on the way out; a simulation has one message for each.
    """
    steps = np.array([step.duration_s for step in idle.steps])
    ways_s = float(np.median(idle.records.ttft_s)) - float(np.median(steps)) - overhead_s
    return max(0.0, ways_s / 2)


@dataclass(frozen=True, slots=True)
class SimRun:
    """One load on the simulated cluster."""

    records: Records
    steps: tuple[StepRecord, ...]


def simulate(workload: Workload, worker: WorkerFacts, calibration: Calibration) -> SimRun:
    """Return what the simulator says of a workload; the same for the same arguments."""
    params = SimWorkerParams(
        worker_id=WORKER_ID,
        cost=calibration.cost,
        num_blocks=worker.num_blocks,
        block_size=worker.block_size,
        system=worker.system,
        max_model_len=worker.max_model_len,
        max_sequences=worker.max_sequences,
        vocab_size=VOCAB_SIZE,
        first_token_id=FIRST_TOKEN_ID,
    )
    cluster = ClusterParams((params,), worker.system, latency_s=calibration.message_s)
    with only_from("error"):
        return run(_simulate(workload, cluster))


async def _simulate(workload: Workload, params: ClusterParams) -> SimRun:
    recorder = Recorder(workload)
    async with SimCluster(params) as cluster:
        feeding = asyncio.create_task(feed(cluster, workload, recorder), name="feeder")
        bus, steps, next_step_id = cluster.broker.connect("fidelity"), list[StepRecord](), 0
        is_last = False
        while not is_last:
            await asyncio.wait([feeding], timeout=READ_PERIOD_S)
            is_last = feeding.done()
            new, next_step_id = await read_steps(bus, Subjects("default"), WORKER_ID, next_step_id)
            steps += new
        feeding.result()
        await bus.close()
    return SimRun(recorder.records(), tuple(steps))
