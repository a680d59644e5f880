"""Which groups are due for a restore by ratio: little used for a while.

A pure reducer: facts in, decisions out; time is an argument. Source: KunServe v2, section 4.4; the other rule is
`restore_benefit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.planner.policy.patience import ROUNDING_S, PatienceParams
from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import ClusterFacts, InstanceFacts, expected_tokens, groups_of
from services.planner.policy.restoring.fits_alone import may_part
from shared.ids import WorkerId


class RatioWatch:
    """Follows which groups are used little."""

    def __init__(self, params: PatienceParams) -> None:
        self._params = params
        self._since_s: dict[str, float] = {}
        self._why: dict[str, str] = {}

    def apply(self, facts: ClusterFacts, now_s: float) -> tuple[str, ...]:
        """Take the facts of this moment; return the groups that are due for a restore, sorted.

        A group that lacks layers is none of them: its members become whole by themselves.
        """
        since_s, self._since_s = self._since_s, {}
        rule = CapacityRule(facts.model)
        groups = groups_of(facts)
        for name, members in groups.items():
            if may_part(self._params, rule, members):
                self._since_s[name] = since_s.get(name, now_s)
        hold_s = self._params.restore_hold_s - ROUNDING_S
        due = sorted(name for name, began_s in self._since_s.items() if now_s - began_s >= hold_s)
        self._why = {name: self._reason(rule, groups[name], now_s - self._since_s[name]) for name in due}
        return tuple(due)

    def forget(self, group_ids: Iterable[str] | None = None) -> None:
        """Begin anew with these groups, None: with all: what was seen so far does not count."""
        for name in list(self._since_s) if group_ids is None else group_ids:
            self._since_s.pop(name, None)

    def _reason(self, rule: CapacityRule, members: Sequence[InstanceFacts], for_s: float) -> str:
        wanted, room = expected_tokens(members, 0.0), rule.tokens(rule.whole_blocks(members))
        ratio = self._params.restore_ratio
        return f"by ratio: it wants {wanted} tokens, and for {for_s:.1f} s less than {ratio:.0%} of {room} without drop"

    def why(self, group_id: str) -> str:
        """Return in words why this group was due when `apply` returned last; empty: it was not."""
        return self._why.get(group_id, "")

    def note_drop(self, worker_ids: Iterable[WorkerId], now_s: float) -> None:
        """Take notice of a drop; this rule learns nothing from it."""

    def note_restore(self, worker_ids: Iterable[WorkerId], now_s: float) -> None:
        """Take notice of a restore; this rule learns nothing from it."""
