"""What a worker can be asked on the bus, and who answers."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.migration.migration import Migration
from services.worker.roles.agent import OrderAgent
from services.worker.serving.admin import Admin
from services.worker.serving.intake import Intake
from services.worker.serving.leases import Leases
from services.worker.serving.step_log import StepLog
from shared.ids import WorkerId
from shared.subjects import Subjects
from shared.transport.bus import Endpoint

_JSON = {"format": "json"}


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Those who answer for one worker."""

    worker_id: WorkerId
    subjects: Subjects
    intake: Intake
    leases: Leases
    admin: Admin
    steps: StepLog
    agent: OrderAgent | None
    """None: the worker's layers cannot be dropped."""
    migration: Migration | None
    """None: other workers cannot reach this one."""

    def all(self) -> list[Endpoint]:
        """Return what is to be served."""
        subjects, worker_id = self.subjects, self.worker_id
        endpoints = [
            Endpoint("submit", subjects.submit(worker_id), self.intake.submit),
            Endpoint("cancel", subjects.cancel(worker_id), self.intake.cancel),
            Endpoint("replay", subjects.replay(worker_id), self.intake.replay),
            Endpoint("renew", subjects.renew(worker_id), self.leases.renew),
            Endpoint("dump", subjects.dump(worker_id), self.admin.dump, metadata=_JSON),
        ]
        if self.admin.end is not None:
            endpoints.append(Endpoint("drain", subjects.drain(worker_id), self.admin.drain, metadata=_JSON))
        if self.agent is not None:
            endpoints.append(Endpoint("plan", subjects.plan(worker_id), self.agent.answer, metadata=_JSON))
        if self.migration is not None:
            endpoints.append(Endpoint("fetch", subjects.fetch(worker_id), self.migration.answer))
        return [*endpoints, Endpoint("steps", subjects.steps(worker_id), self.steps.read, metadata=_JSON)]
