"""What nothing in reached code names and is needed all the same, with the reason; `tools/unreached.py` reads it.

The list may only shrink: an entry that is reached, or that no longer exists, fails the check.
"""

from __future__ import annotations

_OUTSIDE = "a value of a setting: it comes from outside"
_TAP = "on the wire for people: `sluice tap` shows it"
_SOURCE = "says in files of the catalog where their numbers come from"
_LOOP = "asyncio's event loop calls it"
_TESTS = "only tests look at it: nothing else shows that what they provoke has happened"

ALLOWED: dict[str, str] = {
    "benchmarks.load_replay.Instance.num_lost_tokens": "tests hold the benchmark's model to a law of conservation",
    "benchmarks.load_replay.Outcome.num_preempted": "tests hold the benchmark's model to a law of conservation",
    "services.planner.policy.restoring.restore.RestorePlan.load_s": "tests hold to it what the plan says in words",
    "services.planner.policy.restoring.restore.RestorePlan.loads": "tests hold to it what the plan says in words",
    "services.worker.attention.native_paged.NativePlan.held": "keeps alive what the library is given addresses of",
    "services.worker.config.Dtype.BFLOAT16": _OUTSIDE,
    "services.worker.config.KernelKind.FLASHINFER": _OUTSIDE,
    "services.worker.config.KernelKind.NATIVE": _OUTSIDE,
    "services.worker.config.KernelKind.TORCH": _OUTSIDE,
    "services.worker.engine.totals.Totals.num_failed_copies": _TESTS,
    "services.worker.engine.totals.Totals.num_failed_steps": _TESTS,
    "services.worker.engine.totals.Totals.stalled_s": _TESTS,
    "services.worker.engine.totals.Totals.swapped_in_bytes": _TESTS,
    "services.worker.executor.elastic_model.ElasticModel.check_invariants": "tests call it after each change",
    "services.worker.peers.greeting.PeerAnswer.nonce": "a proof is taken over the whole message",
    "services.worker.peers.greeting.PeerHello.nonce": "a proof is taken over the whole message",
    "shared.messages.event.Event.service": _TAP,
    "shared.messages.lease.Renewed.num_sequences": _TAP,
    "shared.messages.lease.Renewed.step_age_s": _TAP,
    "shared.messages.request.Cancelled.found": _TAP,
    "shared.messages.steps.StepLogPage.worker_id": _TAP,
    "shared.transport.bus_rules.BusStats.disconnects": _TESTS,
    "shared.transport.bus_rules.BusStats.handler_errors": _TESTS,
    "shared.transport.memory_router.Delivery.size_bytes": "policies of faults choose by it",
    "shared.transport.memory_router.Delivery.subject": "policies of faults choose by it",
    "shared.transport.nats_server.EmbeddedNats.pid": "tests kill and freeze a broker by it",
    "sim.catalog.facts.CatalogModel.title": _SOURCE,
    "sim.catalog.instance.CatalogInstance.memory_bytes": _SOURCE,
    "sim.catalog.instance.CatalogInstance.provenance": _SOURCE,
    "sim.cluster.SimCluster.undisturbed": "the oracle to which tests hold the texts of a simulated cluster",
    "sim.devices.modelled_network.ModelledNetwork.num_remote_steps": _TESTS,
    "sim.experiment.result.Samples.num_running": _TESTS,
    "sim.virtual_time.VirtualTimeLoop._run_once": _LOOP,
    "sim.virtual_time.VirtualTimeLoop._write_to_self": _LOOP,
    "sim.workload.lengths.Lengths.assumed": _SOURCE,
    "sim.workload.lengths.Lengths.source": _SOURCE,
    "sim.workload.lengths.Lengths.title": _SOURCE,
}
