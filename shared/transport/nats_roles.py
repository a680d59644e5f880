"""Who may say and hear what at the broker: one user per kind of process, with allow-lists of subjects. Pure.

    role         says                                    hears                         key-value buckets
    worker       reports, tokens, answers                what is asked of workers      none
    monitor      views, events, answers                  reports, queues               view: writes; plan: reads
    planner      plans to workers, events, answers       views                         view: reads; plan: writes
    dispatcher   questions to workers, its queue, answers views, tokens                 view: reads; owners: writes
    operator     questions to everybody                  everything of the cluster     reads all
    setup        nothing                                 nothing                       makes all

What is not listed is denied, and a denied message is fatal to the service that sent it (`NatsBus`, `on_fatal`).
Whoever may make a stream or a consumer can have the broker say anything on any subject (`republish`,
`deliver_subject`): so only the set-up user makes buckets, and nobody has consumers.
Answers go where a request asked for them and nowhere else (`allow_responses`). Each process listens for answers under
an inbox of its role and id, so that no other role can read them. An operator's inboxes are those that NATS tools use
unasked: all but the services'. That takes a list of what is denied, which the server applies to each message; an
allowed `_INBOX.*` alone would let a subscription to `_INBOX.>` pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shared.ids import DispatcherId, WorkerId
from shared.subjects import Subjects

ANY: Final = "*"
_WORKERS: Final = WorkerId(ANY)
_DISPATCHERS: Final = DispatcherId(ANY)


class BrokerRole(StrEnum):
    """A kind of process, and the name of its user at the broker."""

    DISPATCHER = "dispatcher"
    MONITOR = "monitor"
    PLANNER = "planner"
    WORKER = "worker"
    OPERATOR = "operator"
    SETUP = "setup"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects that a user may publish and subscribe to; everything else is denied."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    responds: bool
    """Whether it may answer requests on the subject that each of them names."""
    hidden: tuple[str, ...] = ()
    """What it does not hear although `subscribe` allows it."""


def makes_buckets(user: str | None) -> bool:
    """Return whether this user creates a bucket that is missing.

    At a broker with the roles' users that is the set-up user's to do. Elsewhere (no users, or somebody's own) whoever
    needs a bucket makes it.
    """
    return user == BrokerRole.SETUP or user not in set(BrokerRole)


def inbox_prefix(role: BrokerRole, instance_id: str) -> str:
    """Return under which subject this process listens for answers."""
    return "_INBOX" if role is BrokerRole.OPERATOR else f"_INBOX.{role}.{instance_id}"


def permissions(role: BrokerRole, cluster: str = "default") -> Permissions:
    """Return what processes of the role may do in the cluster.

    Raises:
        ValueError: the cluster's name cannot be part of a subject.
    """
    subjects = Subjects(cluster)
    if role in _TOOLS:
        return _TOOLS[role](subjects)
    publish, subscribe = _SERVICES[role](subjects)
    return Permissions(
        publish=(subjects.event(role, ANY), *publish),
        subscribe=(*_service_protocol(role), *subscribe),
        responds=True,
    )


def _worker(subjects: Subjects) -> tuple[list[str], list[str]]:
    # no inbox: a worker asks nobody
    return [subjects.report(_WORKERS), subjects.tokens(_DISPATCHERS)], [
        *_asked_of_workers(subjects),
        subjects.drain(_WORKERS),
        subjects.plan(_WORKERS),
    ]


def _monitor(subjects: Subjects) -> tuple[list[str], list[str]]:
    view, plan = subjects.view_bucket(), subjects.plan_bucket()
    publish = [subjects.view(), _info(view), _write(view), *_read(plan)]
    asked = [subjects.admin(BrokerRole.MONITOR, ANY, verb) for verb in ("view", "counters")]
    return publish, [subjects.all_reports(), subjects.all_waiting(), _write(plan), *asked, _inboxes(BrokerRole.MONITOR)]


def _planner(subjects: Subjects) -> tuple[list[str], list[str]]:
    view, plan = subjects.view_bucket(), subjects.plan_bucket()
    publish = [subjects.plan(_WORKERS), subjects.fetch(_WORKERS), *_read(view), *_read(plan), _write(plan)]
    heard = [subjects.view(), _write(view), _write(plan), *_asked_of_planner(subjects)]
    return publish, [*heard, _inboxes(BrokerRole.PLANNER)]


def _dispatcher(subjects: Subjects) -> tuple[list[str], list[str]]:
    view, owners, plan = subjects.view_bucket(), subjects.owners_bucket(), subjects.plan_bucket()
    publish = [*_requests(subjects), subjects.waiting(_DISPATCHERS), *_read(view), *_read(plan)]
    publish += [*_read(owners), _write(owners)]
    asked = subjects.admin(BrokerRole.DISPATCHER, ANY, "dump")
    heard = [subjects.view(), _write(view), _write(owners), _write(plan), subjects.tokens(_DISPATCHERS), asked]
    return publish, [*heard, _inboxes(BrokerRole.DISPATCHER)]


def _operator(subjects: Subjects) -> Permissions:
    asked = [
        subjects.admin(BrokerRole.MONITOR, ANY, "view"),
        subjects.admin(BrokerRole.MONITOR, ANY, "counters"),
        *_asked_of_planner(subjects),
        subjects.admin(BrokerRole.DISPATCHER, ANY, "dump"),
        *_asked_of_workers(subjects),  # also `submit`: `sluice profile` loads a worker
        subjects.drain(_WORKERS),
    ]
    reads = [subject for bucket in subjects.buckets() for subject in _read(bucket)]
    writes = [_write(bucket) for bucket in subjects.buckets()]
    return Permissions(
        publish=("$SRV.>", *asked, *reads),
        subscribe=(f"sluice.{subjects.cluster}.>", "$SRV.>", *writes, "_INBOX.>"),
        responds=False,
        hidden=tuple(f"_INBOX.{role}.>" for role in BrokerRole if role is not BrokerRole.OPERATOR),
    )


def _setup(subjects: Subjects) -> Permissions:
    makes = [subject for bucket in subjects.buckets() for subject in (_info(bucket), _create(bucket))]
    return Permissions(publish=tuple(makes), subscribe=(_inboxes(BrokerRole.SETUP),), responds=False)


_SERVICES: Final = {
    BrokerRole.WORKER: _worker,
    BrokerRole.MONITOR: _monitor,
    BrokerRole.PLANNER: _planner,
    BrokerRole.DISPATCHER: _dispatcher,
}
_TOOLS: Final = {BrokerRole.OPERATOR: _operator, BrokerRole.SETUP: _setup}


def _requests(subjects: Subjects) -> list[str]:
    """Return what dispatchers ask workers."""
    asked = (subjects.submit, subjects.cancel, subjects.replay, subjects.renew, subjects.fetch)
    return [subject(_WORKERS) for subject in asked]


def _asked_of_workers(subjects: Subjects) -> list[str]:
    return [*_requests(subjects), subjects.dump(_WORKERS), subjects.steps(_WORKERS)]


def _asked_of_planner(subjects: Subjects) -> list[str]:
    return [subjects.admin(BrokerRole.PLANNER, ANY, verb) for verb in ("plan", "metrics", "drop", "restore")]


def _service_protocol(role: BrokerRole) -> list[str]:
    name = f"sluice-{role}"
    verbs = ("PING", "INFO", "STATS")
    return [f"$SRV.{verb}{rest}" for verb in verbs for rest in ("", f".{name}", f".{name}.{ANY}")]


def _inboxes(role: BrokerRole) -> str:
    return f"{inbox_prefix(role, ANY)}.>"


def _info(bucket: str) -> str:
    return f"$JS.API.STREAM.INFO.KV_{bucket}"


def _create(bucket: str) -> str:
    return f"$JS.API.STREAM.CREATE.KV_{bucket}"


def _read(bucket: str) -> list[str]:
    """Return what it takes to find the bucket and read its entries; who watches also hears `_write`, as hints."""
    return [_info(bucket), f"$JS.API.STREAM.MSG.GET.KV_{bucket}"]


def _write(bucket: str) -> str:
    return f"$KV.{bucket}.>"
