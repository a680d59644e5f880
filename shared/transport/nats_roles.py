"""Who may say and hear what at the broker: one user per kind of process, with allow-lists of subjects. Pure.

    role         says                                    hears                         key-value buckets
    worker       reports, tokens, answers                what is asked of workers      none
    monitor      views, events, answers                  reports                       view: writes; plan: reads
    planner      plans to workers, events, answers       views                         view: reads; plan: writes
    dispatcher   questions to workers, events, answers   views, tokens                 view: reads; owners: writes
    operator     questions to everybody                  everything of the cluster     reads all

What is not listed is denied, and a denied message is fatal to the service that sent it (`NatsBus`, `on_fatal`).
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


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects that a user may publish and subscribe to; everything else is denied."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    responds: bool
    """Whether it may answer requests on the subject that each of them names."""
    hidden: tuple[str, ...] = ()
    """What it does not hear although `subscribe` allows it."""


def inbox_prefix(role: BrokerRole, instance_id: str) -> str:
    """Return under which subject this process listens for answers."""
    return "_INBOX" if role is BrokerRole.OPERATOR else f"_INBOX.{role}.{instance_id}"


def permissions(role: BrokerRole, cluster: str = "default") -> Permissions:
    """Return what processes of the role may do in the cluster.

    Raises:
        ValueError: the cluster's name cannot be part of a subject.
    """
    subjects = Subjects(cluster)
    if role is BrokerRole.OPERATOR:
        return _operator(subjects)
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
        subjects.plan(_WORKERS),
    ]


def _monitor(subjects: Subjects) -> tuple[list[str], list[str]]:
    view, plan = subjects.view_bucket(), subjects.plan_bucket()
    publish = [subjects.view(), *_open(view), *_write(view), *_open(plan), *_read(plan)]
    asked = [subjects.admin(BrokerRole.MONITOR, ANY, verb) for verb in ("view", "counters")]
    return publish, [subjects.all_reports(), *asked, _inboxes(BrokerRole.MONITOR)]


def _planner(subjects: Subjects) -> tuple[list[str], list[str]]:
    view, plan = subjects.view_bucket(), subjects.plan_bucket()
    publish = [subjects.plan(_WORKERS), *_open(view), *_read(view), *_open(plan), *_read(plan), *_write(plan)]
    return publish, [subjects.view(), *_asked_of_planner(subjects), _inboxes(BrokerRole.PLANNER)]


def _dispatcher(subjects: Subjects) -> tuple[list[str], list[str]]:
    view, owners = subjects.view_bucket(), subjects.owners_bucket()
    publish = [*_requests(subjects), *_open(view), *_read(view), *_open(owners), *_read(owners), *_write(owners)]
    heard = [subjects.view(), subjects.tokens(_DISPATCHERS), subjects.admin(BrokerRole.DISPATCHER, ANY, "dump")]
    return publish, [*heard, _inboxes(BrokerRole.DISPATCHER)]


def _operator(subjects: Subjects) -> Permissions:
    buckets = (subjects.view_bucket(), subjects.plan_bucket(), subjects.owners_bucket())
    asked = [
        subjects.admin(BrokerRole.MONITOR, ANY, "view"),
        subjects.admin(BrokerRole.MONITOR, ANY, "counters"),
        *_asked_of_planner(subjects),
        subjects.admin(BrokerRole.DISPATCHER, ANY, "dump"),
        *_asked_of_workers(subjects),  # also `submit`: `sluice profile` loads a worker
    ]
    lists = ["$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST"]
    reads = [subject for bucket in buckets for subject in (_info(bucket), *_read(bucket))]
    writes = [subject for bucket in buckets for subject in _write(bucket)]
    return Permissions(
        publish=("$SRV.>", *asked, *lists, *reads),
        subscribe=(f"sluice.{subjects.cluster}.>", "$SRV.>", *writes, "_INBOX.>"),
        responds=False,
        hidden=tuple(f"_INBOX.{role}.>" for role in _SERVICES),
    )


_SERVICES: Final = {
    BrokerRole.WORKER: _worker,
    BrokerRole.MONITOR: _monitor,
    BrokerRole.PLANNER: _planner,
    BrokerRole.DISPATCHER: _dispatcher,
}


def _requests(subjects: Subjects) -> list[str]:
    """Return what dispatchers ask workers."""
    asked = (subjects.submit, subjects.cancel, subjects.replay, subjects.renew)
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


def _open(bucket: str) -> list[str]:
    """Return what it takes to find the bucket, or to create it: services start in any order."""
    return [_info(bucket), f"$JS.API.STREAM.CREATE.KV_{bucket}"]


def _read(bucket: str) -> list[str]:
    get = [f"$JS.API.STREAM.MSG.GET.KV_{bucket}", f"$JS.API.DIRECT.GET.KV_{bucket}.>"]
    create = f"$JS.API.CONSUMER.CREATE.KV_{bucket}"
    watch = [create, f"{create}.>", f"$JS.API.CONSUMER.DELETE.KV_{bucket}.*", f"$JS.API.CONSUMER.INFO.KV_{bucket}.*"]
    return [*get, *watch]


def _write(bucket: str) -> list[str]:
    return [f"$KV.{bucket}.>"]
