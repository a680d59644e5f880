"""What the planner answers people: `plan` and `metrics` at once; `drop` and `restore`, by hand, when they are done.

    {"workers": ["w0", "w1"]}   drop: one group of exactly these; {} or nothing: what is needed, else the best pair
    {"groups": ["w0"]}          restore: these groups, by their leaders; {} or nothing: all
    ◄─ {"done": true, "reason": "…", "plan_id": 8, "groups": [["w0", "w1"]], "latency_s": 0.043}

By hand neither price nor pauses count; what no plan may do is refused all the same. A refusal is an event, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from services.planner.config import PlannerSettings
from services.planner.policy.decisions import Decider
from services.planner.policy.levers.ladder import NO_LEVER, Decision
from services.planner.policy.plans.chosen import plan_chosen
from services.planner.policy.plans.drop import plan_drop, tokens_short
from services.planner.policy.plans.drop_facts import ClusterFacts
from services.planner.policy.plans.drop_plan import DropPlan
from services.planner.policy.plans.intent import Intent, PlanOutcome, intent_of
from services.planner.policy.restoring.loaded_layers import beside_groups
from services.planner.policy.restoring.restore import RestoreRefusal, plan_restore
from services.planner.policy.scale_signal import ScaleWish
from shared.ids import WorkerId
from shared.messages.report import ClusterView
from shared.reading import parse_json
from shared.subjects import Subjects
from shared.transport.bus import Endpoint, Message

MAX_NAMES = 4096
"""Of one question."""
MAX_TOLD = 8
"""Of them in an event."""


_Find = Callable[[ClusterFacts, ClusterView, tuple[str, ...]], Intent]
"""Returns what carries out what is asked of the named ones; raises `RefusedError`."""


class Carrier(Protocol):
    """What the endpoints need of the planner."""

    decision: Decision | None
    superseded: bool
    wish: ScaleWish | None

    @property
    def epoch(self) -> int:
        """The newest epoch that it holds."""

    @property
    def lever_names(self) -> list[str]:
        """The ladder."""

    @property
    def fresh_view(self) -> ClusterView | None:
        """The newest view, if it is young enough to act upon."""

    @property
    def why_busy(self) -> str:
        """Why nothing can be begun now; empty: something can."""

    def render_metrics(self) -> tuple[bytes, str]:
        """Return metrics in Prometheus's text format, and the content type."""

    async def settle(self) -> None:
        """Return when reports show what the last plan has changed."""

    async def carry_out(self, intent: Intent) -> PlanOutcome:
        """Have workers carry something out."""

    async def announce(self, name: str, reason: str) -> None:
        """Tell people what happened."""


class RefusedError(Exception):
    """What a person asks for cannot be; the text says why."""


class PlannerEndpoints:
    """Answers questions of people."""

    def __init__(self, planner: Carrier, decider: Decider, settings: PlannerSettings) -> None:
        self._planner = planner
        self._decider = decider
        self._params = settings.drop()
        self._settings = settings

    def all(self) -> list[Endpoint]:
        """Return every verb."""
        subjects, instance_id = Subjects(self._settings.cluster), self._settings.instance_id
        verbs = {"plan": self.plan, "drop": self.drop, "restore": self.restore}
        return [
            Endpoint(verb, subjects.admin("planner", instance_id, verb), answer, metadata={"format": "json"})
            for verb, answer in verbs.items()
        ] + [Endpoint("metrics", subjects.admin("planner", instance_id, "metrics"), self.metrics)]

    async def plan(self, message: Message) -> bytes:
        """Say what was decided last, and how many instances there should be."""
        del message
        wish, decision = self._planner.wish, self._planner.decision
        answer = {
            "epoch": self._planner.epoch,
            "superseded": self._planner.superseded,
            "levers": self._planner.lever_names,
            "lever": decision.lever if decision is not None else NO_LEVER,
            "situation": decision.situation if decision is not None else None,
            "reason": decision.reason if decision is not None else "no decision yet",
            "instances_wanted": wish.num_instances if wish is not None else None,
            "instances_reason": wish.reason if wish is not None else "",
        }
        return json.dumps(answer).encode()

    async def metrics(self, message: Message) -> bytes:
        """Say what `GET /metrics` would, in Prometheus's text format."""
        del message
        return self._planner.render_metrics()[0]

    async def drop(self, message: Message) -> bytes:
        """Form a group of these workers; of none: what is needed, else the best pair."""

        def find(facts: ClusterFacts, view: ClusterView, names: tuple[str, ...]) -> Intent:
            if names:
                plan = plan_chosen(facts, self._params, [WorkerId(name) for name in names])
            else:
                plan = plan_drop(facts, self._params, max(tokens_short(facts), 1))
            if not isinstance(plan, DropPlan):
                raise RefusedError(plan.reason)
            beside = beside_groups(facts, plan.instance_ids)
            if beside:
                raise RefusedError(f"the group of {beside[0]} loads parameters beside serving; restore it first")
            return intent_of(plan, facts, view)

        return await self._carry_out(message, "drop", "workers", find)

    async def restore(self, message: Message) -> bytes:
        """Make the members of these groups whole instances; of none: of all groups."""

        def find(facts: ClusterFacts, view: ClusterView, names: tuple[str, ...]) -> Intent:
            try:
                plan = plan_restore(facts, names)
            except ValueError as error:
                raise RefusedError(str(error)) from None
            if isinstance(plan, RestoreRefusal):
                raise RefusedError(plan.reason)
            return intent_of(plan, facts, view)

        return await self._carry_out(message, "restore", "groups", find)

    async def _carry_out(self, message: Message, verb: str, key: str, find: _Find) -> bytes:
        names: tuple[str, ...] = ()
        try:
            names = _read_names(message.data, key)
            await self._planner.settle()
            intent = self._find(find, names)
        except RefusedError as error:
            asked = f"{verb} {'+'.join(names[:MAX_TOLD])}" if names else verb
            await self._planner.announce("plan_refused", f"{asked}, asked by hand: {error}")
            return _answer(PlanOutcome(is_done=False, reason=str(error)))
        return _answer(await self._planner.carry_out(intent))

    def _find(self, find: _Find, names: tuple[str, ...]) -> Intent:
        """Return what carries out what is asked, by what is known of the workers now.

        Raises:
            RefusedError: too little is, something is being done, or it cannot be.
        """
        if self._planner.why_busy:
            raise RefusedError(self._planner.why_busy)
        view = self._planner.fresh_view
        if view is None:
            raise RefusedError("no fresh view of the cluster: is the monitor there?")
        seen = self._decider.observe(view, 0.0)
        if seen.snapshot.facts is None:
            raise RefusedError(
                "no worker that is ready can drop parameters; those of `--system kunserve` and `fcfs-pp` can"
            )
        try:
            return find(seen.snapshot.facts, view, names)
        except RefusedError as error:
            without = [left_out(name, reason) for name, reason in seen.left_out[:MAX_TOLD]]
            raise RefusedError("; ".join([str(error), *without])) from None


def left_out(worker_id: WorkerId, reason: str) -> str:
    """Return the sentence of a worker that no plan counts on."""
    return f"{worker_id} takes part in no plan: {reason}"


def _read_names(data: bytes, key: str) -> tuple[str, ...]:
    """Return the names under the key of a JSON object; () if there are none.

    Raises:
        RefusedError: it is something else.
    """
    try:
        fields: Any = parse_json(data) if data.strip() else {}
    except ValueError:
        fields = None
    names = fields.get(key, []) if isinstance(fields, dict) and set(fields) <= {key} else None
    if not isinstance(names, list) or len(names) > MAX_NAMES or not all(isinstance(name, str) for name in names):
        raise RefusedError(f'the question must be {{"{key}": [names]}}, or empty')
    return tuple(dict.fromkeys(names))


def _answer(outcome: PlanOutcome) -> bytes:
    groups = [[worker.worker_id for worker in step.workers] for step in outcome.steps]
    answer = {
        "done": outcome.is_done,
        "reason": outcome.reason,
        "plan_id": outcome.plan_id,
        "groups": groups,
        "latency_s": round(outcome.latency_s, 6),
    }
    return json.dumps(answer).encode()
