"""Who may say and hear what at the broker, as decisions on subjects. tests/integration asks the broker itself."""

from __future__ import annotations

from itertools import product

import pytest

from shared.ids import DispatcherId, WorkerId
from shared.subjects import Subjects
from shared.transport.bus_rules import matches
from shared.transport.nats_roles import Permissions, Role, inbox_prefix, permissions

SUBJECTS = Subjects()
W0, D0 = WorkerId("w0"), DispatcherId("d0")
NUID = "AbCdEfGhIjKlMnOpQrStUv"


def allows(patterns: tuple[str, ...], subject: str) -> bool:
    return any(matches(pattern.split("."), subject.split(".")) for pattern in patterns)


def inboxes(role: Role) -> list[str]:
    """Subjects on which a process of this role waits for answers, as NATS clients make them up."""
    prefix = inbox_prefix(role, "id-0")
    return [f"{prefix}.{NUID}", f"{prefix}.{NUID}.token"]


@pytest.mark.parametrize(
    ("subject", "who"),
    [
        (SUBJECTS.submit(W0), {Role.DISPATCHER, Role.OPERATOR}),
        (SUBJECTS.cancel(W0), {Role.DISPATCHER, Role.OPERATOR}),
        (SUBJECTS.replay(W0), {Role.DISPATCHER, Role.OPERATOR}),
        (SUBJECTS.renew(W0), {Role.DISPATCHER, Role.OPERATOR}),
        (SUBJECTS.dump(W0), {Role.OPERATOR}),
        (SUBJECTS.steps(W0), {Role.OPERATOR}),
        (SUBJECTS.plan(W0), {Role.PLANNER}),
        (SUBJECTS.report(W0), {Role.WORKER}),
        (SUBJECTS.tokens(D0), {Role.WORKER}),
        (SUBJECTS.event("monitor", "m"), {Role.MONITOR}),
        (SUBJECTS.view(), {Role.MONITOR}),
        (SUBJECTS.event("planner", "p"), {Role.PLANNER}),
        (f"$KV.{SUBJECTS.view_bucket()}.cluster", {Role.MONITOR}),
        (f"$KV.{SUBJECTS.plan_bucket()}.plan", {Role.PLANNER}),
        (f"$JS.API.DIRECT.GET.KV_{SUBJECTS.plan_bucket()}.plan", {Role.MONITOR, Role.PLANNER, Role.OPERATOR}),
        (f"$JS.API.STREAM.CREATE.KV_{SUBJECTS.plan_bucket()}", {Role.MONITOR, Role.PLANNER}),
        (SUBJECTS.admin("planner", "p", "drop"), {Role.OPERATOR}),
        (SUBJECTS.admin("planner", "p", "restore"), {Role.OPERATOR}),
        (SUBJECTS.admin("planner", "p", "metrics"), {Role.OPERATOR}),
        (f"$KV.{SUBJECTS.owners_bucket()}.r-1", {Role.DISPATCHER}),
        (f"$JS.API.STREAM.DELETE.KV_{SUBJECTS.view_bucket()}", set()),
        (f"$JS.API.STREAM.PURGE.KV_{SUBJECTS.plan_bucket()}", set()),
        (f"$JS.API.STREAM.UPDATE.KV_{SUBJECTS.plan_bucket()}", set()),
        ("$JS.API.STREAM.CREATE.anything", set()),
        ("$SYS.REQ.SERVER.PING", set()),
        ("$SRV.PING", {Role.OPERATOR}),
        ("sluice.other.worker.w0.submit", set()),
        (f"_INBOX.dispatcher.d0.{NUID}.x", set()),  # answers go out by `allow_responses` alone
        ("anything", set()),
    ],
)
def test_each_subject_is_published_by_these_roles_and_no_other(subject: str, who: set[Role]) -> None:
    assert {role for role in Role if allows(permissions(role).publish, subject)} == who


@pytest.mark.parametrize(
    ("subject", "who"),
    [
        (SUBJECTS.submit(W0), {Role.WORKER, Role.OPERATOR}),
        (SUBJECTS.renew(W0), {Role.WORKER, Role.OPERATOR}),
        (SUBJECTS.plan(W0), {Role.WORKER, Role.OPERATOR}),
        (SUBJECTS.admin("planner", "p", "drop"), {Role.PLANNER, Role.OPERATOR}),
        (SUBJECTS.admin("planner", "p", "restore"), {Role.PLANNER, Role.OPERATOR}),
        (SUBJECTS.admin("planner", "p", "metrics"), {Role.PLANNER, Role.OPERATOR}),
        (SUBJECTS.report(W0), {Role.MONITOR, Role.OPERATOR}),
        (SUBJECTS.tokens(D0), {Role.DISPATCHER, Role.OPERATOR}),
        (SUBJECTS.view(), {Role.DISPATCHER, Role.PLANNER, Role.OPERATOR}),
        (SUBJECTS.event("monitor", "m"), {Role.OPERATOR}),
        ("$SRV.PING", set(Role)),
        ("$SRV.INFO.sluice-worker.w0", {Role.WORKER, Role.OPERATOR}),
        ("sluice.other.worker.w0.report", set()),
        ("$SYS.ACCOUNT.x", set()),
    ],
)
def test_each_subject_is_heard_by_these_roles_and_no_other(subject: str, who: set[Role]) -> None:
    assert {role for role in Role if allows(permissions(role).subscribe, subject)} == who


@pytest.mark.parametrize(("reader", "owner"), list(product(Role, Role)))
def test_no_role_reads_the_inbox_of_another_and_a_worker_has_none(reader: Role, owner: Role) -> None:
    may, allowed = reader is owner and reader is not Role.WORKER, permissions(reader)
    for inbox in inboxes(owner):
        assert (allows(allowed.subscribe, inbox) and not allows(allowed.hidden, inbox)) == may


def test_services_answer_and_operators_do_not() -> None:
    assert {role for role in Role if permissions(role).responds} == set(Role) - {Role.OPERATOR}


def test_nothing_is_allowed_wholesale() -> None:
    def wide(allowed: Permissions) -> list[str]:
        return [subject for subject in (*allowed.publish, *allowed.subscribe) if subject[0] in "*>"]

    assert {role: wide(permissions(role)) for role in Role} == {role: [] for role in Role}


def test_a_cluster_whose_name_is_a_wildcard_is_refused() -> None:
    for name in ("*", ">", "a.b", ""):
        with pytest.raises(ValueError, match="cannot be part of a subject"):
            permissions(Role.WORKER, name)


def test_every_question_to_workers_may_be_asked_by_dispatchers_and_heard_by_workers() -> None:
    """So that a new verb is not forgotten: the subjects say of themselves who talks."""
    asked = {
        getattr(SUBJECTS, name)(W0)
        for name, method in vars(Subjects).items()
        if (method.__doc__ or "").startswith("Request-reply, msgpack")
    }
    assert len(asked) >= 4
    for subject in asked:
        assert allows(permissions(Role.DISPATCHER).publish, subject)
        assert allows(permissions(Role.WORKER).subscribe, subject)
