"""Subjects: `sluice.<cluster>.<service>.<id>.<verb>`. Built here and nowhere else.

Ids and cluster names are checked when a process starts, so that no user text can become part of a subject.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from shared.ids import DispatcherId, WorkerId

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


OWNER_KEEP_S: Final = 3600.0
"""How long a request's owner is remembered whom nobody forgets: its dispatcher died, its client did not come back."""


def is_token(text: str) -> bool:
    """Return whether the text is 1 to 64 letters, digits, `_` or `-`."""
    return _TOKEN.match(text) is not None


def check_token(text: str) -> str:
    """Return the text if it may be one token of a subject.

    Raises:
        ValueError: empty, longer than 64, or with a character other than letters, digits, `_` and `-`.
    """
    if not is_token(text):
        raise ValueError(f"'{text[:80]}' cannot be part of a subject: use 1 to 64 letters, digits, '_' or '-'")
    return text


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of one cluster."""

    cluster: str = "default"

    def __post_init__(self) -> None:
        check_token(self.cluster)

    def submit(self, worker_id: WorkerId) -> str:
        """Request-reply, msgpack: start (or refuse) a request on this worker."""
        return f"sluice.{self.cluster}.worker.{worker_id}.submit"

    def cancel(self, worker_id: WorkerId) -> str:
        """Request-reply, msgpack: stop a request on this worker."""
        return f"sluice.{self.cluster}.worker.{worker_id}.cancel"

    def replay(self, worker_id: WorkerId) -> str:
        """Request-reply, msgpack in, token batch out: tokens from an index on, again."""
        return f"sluice.{self.cluster}.worker.{worker_id}.replay"

    def renew(self, worker_id: WorkerId) -> str:
        """Request-reply, msgpack: a dispatcher's lease on its sequences at this worker."""
        return f"sluice.{self.cluster}.worker.{worker_id}.renew"

    def fetch(self, worker_id: WorkerId) -> str:
        """Request-reply, msgpack: have this worker fetch a request that another one runs, with its KV."""
        return f"sluice.{self.cluster}.worker.{worker_id}.fetch"

    def drain(self, worker_id: WorkerId) -> str:
        """Request-reply, JSON: have this worker give its requests to others and end, as SIGTERM does."""
        return f"sluice.{self.cluster}.worker.{worker_id}.drain"

    def dump(self, worker_id: WorkerId) -> str:
        """Request-reply, JSON: the worker's state, for operators."""
        return f"sluice.{self.cluster}.worker.{worker_id}.dump"

    def steps(self, worker_id: WorkerId) -> str:
        """Request-reply, JSON: shapes and durations of the worker's last steps, from a step id on."""
        return f"sluice.{self.cluster}.worker.{worker_id}.steps"

    def plan(self, worker_id: WorkerId) -> str:
        """Request-reply, JSON: the planner has this worker prepare, carry out or abandon its part of a plan."""
        return f"sluice.{self.cluster}.worker.{worker_id}.plan"

    def tokens(self, dispatcher_id: DispatcherId) -> str:
        """Publish, packed columns: the new tokens of one step for one dispatcher."""
        return f"sluice.{self.cluster}.dispatcher.{dispatcher_id}.tokens"

    def waiting(self, dispatcher_id: DispatcherId) -> str:
        """Publish, JSON: what waits in a dispatcher, by period while something does."""
        return f"sluice.{self.cluster}.dispatcher.{dispatcher_id}.waiting"

    def all_waiting(self) -> str:
        """What waits in every dispatcher."""
        return f"sluice.{self.cluster}.dispatcher.*.waiting"

    def report(self, worker_id: WorkerId) -> str:
        """Publish, JSON: what a worker holds and does, by period and at once on a change."""
        return f"sluice.{self.cluster}.worker.{worker_id}.report"

    def all_reports(self) -> str:
        """Every worker's reports."""
        return f"sluice.{self.cluster}.worker.*.report"

    def all_events(self) -> str:
        """Every service's events."""
        return f"sluice.{self.cluster}.event.>"

    def event(self, service: str, instance_id: str) -> str:
        """Publish, JSON: something an operator wants to read, with its reason in words."""
        return f"sluice.{self.cluster}.event.{service}.{instance_id}"

    def admin(self, service: str, instance_id: str, verb: str) -> str:
        """Request-reply, JSON: what a service tells operators, and what they have it do.

        `monitor`: view, counters; `planner`: plan, drop, restore; `dispatcher`: dump.
        """
        return f"sluice.{self.cluster}.{service}.{instance_id}.{verb}"

    def view(self) -> str:
        """Publish, JSON: the monitor's view of the cluster, by period and at once on a change."""
        return f"sluice.{self.cluster}.view"

    def view_bucket(self) -> str:
        """Key-value bucket of the monitor: key `cluster` holds the newest view, for those who come later."""
        return f"sluice_{self.cluster}_view"

    def owners_bucket(self) -> str:
        """Key-value bucket of the dispatchers: which worker runs a resumable request, as JSON, by request id."""
        return f"sluice_{self.cluster}_owners"

    def plan_bucket(self) -> str:
        """Key-value bucket of the planner: key `plan` holds the newest plan and its epoch as JSON."""
        return f"sluice_{self.cluster}_plan"

    def buckets(self) -> dict[str, float]:
        """Every bucket of the cluster, and the seconds after which a value there is gone; 0: values stay."""
        return {self.view_bucket(): 0.0, self.plan_bucket(): 0.0, self.owners_bucket(): OWNER_KEEP_S}
