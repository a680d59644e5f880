"""Who may say and hear what at the broker, as decisions on subjects. tests/integration asks the broker itself."""

from __future__ import annotations

from itertools import product

import pytest

from shared.ids import DispatcherId, WorkerId
from shared.subjects import Subjects
from shared.transport.bus_rules import matches
from shared.transport.nats_roles import BrokerRole, Permissions, inbox_prefix, makes_buckets, permissions

SUBJECTS = Subjects()
W0, D0 = WorkerId("w0"), DispatcherId("d0")
NUID = "AbCdEfGhIjKlMnOpQrStUv"


def allows(patterns: tuple[str, ...], subject: str) -> bool:
    return any(matches(pattern.split("."), subject.split(".")) for pattern in patterns)


def inboxes(role: BrokerRole) -> list[str]:
    """Subjects on which a process of this role waits for answers, as NATS clients make them up."""
    prefix = inbox_prefix(role, "id-0")
    return [f"{prefix}.{NUID}", f"{prefix}.{NUID}.token"]


@pytest.mark.parametrize(
    ("subject", "who"),
    [
        (SUBJECTS.submit(W0), {BrokerRole.DISPATCHER, BrokerRole.OPERATOR}),
        (SUBJECTS.cancel(W0), {BrokerRole.DISPATCHER, BrokerRole.OPERATOR}),
        (SUBJECTS.replay(W0), {BrokerRole.DISPATCHER, BrokerRole.OPERATOR}),
        (SUBJECTS.renew(W0), {BrokerRole.DISPATCHER, BrokerRole.OPERATOR}),
        (SUBJECTS.fetch(W0), {BrokerRole.DISPATCHER, BrokerRole.PLANNER, BrokerRole.OPERATOR}),
        (SUBJECTS.drain(W0), {BrokerRole.OPERATOR}),
        (SUBJECTS.dump(W0), {BrokerRole.OPERATOR}),
        (SUBJECTS.steps(W0), {BrokerRole.OPERATOR}),
        (SUBJECTS.plan(W0), {BrokerRole.PLANNER}),
        (SUBJECTS.report(W0), {BrokerRole.WORKER}),
        (SUBJECTS.tokens(D0), {BrokerRole.WORKER}),
        (SUBJECTS.event("monitor", "m"), {BrokerRole.MONITOR}),
        (SUBJECTS.view(), {BrokerRole.MONITOR}),
        (SUBJECTS.event("planner", "p"), {BrokerRole.PLANNER}),
        (f"$KV.{SUBJECTS.view_bucket()}.cluster", {BrokerRole.MONITOR}),
        (f"$KV.{SUBJECTS.plan_bucket()}.plan", {BrokerRole.PLANNER}),
        (
            f"$JS.API.STREAM.MSG.GET.KV_{SUBJECTS.plan_bucket()}",
            {BrokerRole.MONITOR, BrokerRole.PLANNER, BrokerRole.DISPATCHER, BrokerRole.OPERATOR},
        ),
        (f"$JS.API.DIRECT.GET.KV_{SUBJECTS.plan_bucket()}.plan", set()),
        (f"$JS.API.STREAM.CREATE.KV_{SUBJECTS.plan_bucket()}", {BrokerRole.SETUP}),
        (f"$JS.API.CONSUMER.CREATE.KV_{SUBJECTS.plan_bucket()}", set()),
        (f"$JS.API.CONSUMER.CREATE.KV_{SUBJECTS.view_bucket()}.c.$KV.{SUBJECTS.view_bucket()}.>", set()),
        (SUBJECTS.admin("planner", "p", "drop"), {BrokerRole.OPERATOR}),
        (SUBJECTS.admin("planner", "p", "restore"), {BrokerRole.OPERATOR}),
        (SUBJECTS.admin("planner", "p", "metrics"), {BrokerRole.OPERATOR}),
        (f"$KV.{SUBJECTS.owners_bucket()}.r-1", {BrokerRole.DISPATCHER}),
        (f"$JS.API.STREAM.DELETE.KV_{SUBJECTS.view_bucket()}", set()),
        (f"$JS.API.STREAM.PURGE.KV_{SUBJECTS.plan_bucket()}", set()),
        (f"$JS.API.STREAM.UPDATE.KV_{SUBJECTS.plan_bucket()}", set()),
        ("$JS.API.STREAM.CREATE.anything", set()),
        ("$SYS.REQ.SERVER.PING", set()),
        ("$SRV.PING", {BrokerRole.OPERATOR}),
        ("sluice.other.worker.w0.submit", set()),
        (f"_INBOX.dispatcher.d0.{NUID}.x", set()),  # answers go out by `allow_responses` alone
        ("anything", set()),
    ],
)
def test_each_subject_is_published_by_these_roles_and_no_other(subject: str, who: set[BrokerRole]) -> None:
    assert {role for role in BrokerRole if allows(permissions(role).publish, subject)} == who


@pytest.mark.parametrize(
    ("subject", "who"),
    [
        (SUBJECTS.submit(W0), {BrokerRole.WORKER, BrokerRole.OPERATOR}),
        (SUBJECTS.renew(W0), {BrokerRole.WORKER, BrokerRole.OPERATOR}),
        (SUBJECTS.plan(W0), {BrokerRole.WORKER, BrokerRole.OPERATOR}),
        (SUBJECTS.admin("planner", "p", "drop"), {BrokerRole.PLANNER, BrokerRole.OPERATOR}),
        (SUBJECTS.admin("planner", "p", "restore"), {BrokerRole.PLANNER, BrokerRole.OPERATOR}),
        (SUBJECTS.admin("planner", "p", "metrics"), {BrokerRole.PLANNER, BrokerRole.OPERATOR}),
        (SUBJECTS.report(W0), {BrokerRole.MONITOR, BrokerRole.OPERATOR}),
        (SUBJECTS.tokens(D0), {BrokerRole.DISPATCHER, BrokerRole.OPERATOR}),
        (SUBJECTS.view(), {BrokerRole.DISPATCHER, BrokerRole.PLANNER, BrokerRole.OPERATOR}),
        (SUBJECTS.event("monitor", "m"), {BrokerRole.OPERATOR}),
        (f"$KV.{SUBJECTS.plan_bucket()}.plan", set(BrokerRole) - {BrokerRole.WORKER, BrokerRole.SETUP}),
        ("$SRV.PING", set(BrokerRole) - {BrokerRole.SETUP}),
        ("$SRV.INFO.sluice-worker.w0", {BrokerRole.WORKER, BrokerRole.OPERATOR}),
        ("sluice.other.worker.w0.report", set()),
        ("$SYS.ACCOUNT.x", set()),
    ],
)
def test_each_subject_is_heard_by_these_roles_and_no_other(subject: str, who: set[BrokerRole]) -> None:
    assert {role for role in BrokerRole if allows(permissions(role).subscribe, subject)} == who


@pytest.mark.parametrize(("reader", "owner"), list(product(BrokerRole, BrokerRole)))
def test_no_role_reads_the_inbox_of_another_and_a_worker_has_none(reader: BrokerRole, owner: BrokerRole) -> None:
    may, allowed = reader is owner and reader is not BrokerRole.WORKER, permissions(reader)
    for inbox in inboxes(owner):
        assert (allows(allowed.subscribe, inbox) and not allows(allowed.hidden, inbox)) == may


def test_services_answer_and_people_and_the_set_up_do_not() -> None:
    tools = {BrokerRole.OPERATOR, BrokerRole.SETUP}
    assert {role for role in BrokerRole if permissions(role).responds} == set(BrokerRole) - tools


@pytest.mark.parametrize(
    ("user", "makes"),
    [
        (None, True),
        ("", True),
        ("me", True),
        ("setup", True),
        ("worker", False),
        ("planner", False),
        ("operator", False),
    ],
)
def test_buckets_are_made_by_the_set_up_user_and_by_users_that_are_no_role_s(user: str | None, makes: bool) -> None:
    assert makes_buckets(user) == makes


def test_nothing_is_allowed_wholesale() -> None:
    def wide(allowed: Permissions) -> list[str]:
        return [subject for subject in (*allowed.publish, *allowed.subscribe) if subject[0] in "*>"]

    assert {role: wide(permissions(role)) for role in BrokerRole} == {role: [] for role in BrokerRole}


def test_a_cluster_whose_name_is_a_wildcard_is_refused() -> None:
    for name in ("*", ">", "a.b", ""):
        with pytest.raises(ValueError, match="cannot be part of a subject"):
            permissions(BrokerRole.WORKER, name)


def test_every_question_to_workers_may_be_asked_by_dispatchers_and_heard_by_workers() -> None:
    """So that a new verb is not forgotten: the subjects say of themselves who talks."""
    asked = {
        getattr(SUBJECTS, name)(W0)
        for name, method in vars(Subjects).items()
        if (method.__doc__ or "").startswith("Request-reply, msgpack")
    }
    assert len(asked) >= 4
    for subject in asked:
        assert allows(permissions(BrokerRole.DISPATCHER).publish, subject)
        assert allows(permissions(BrokerRole.WORKER).subscribe, subject)
