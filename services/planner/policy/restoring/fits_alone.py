"""Whether the members of a group would have room enough each alone. Pure; both rules of a restore ask it.

Source: KunServe v2, section 4.4, for the share by ratio; that by benefit is the project's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.planner.policy.patience import PatienceParams, RestoreBy
from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import InstanceFacts, expected_tokens, missing_layers
from services.planner.policy.restoring.restore import why_no_room


def may_part(params: PatienceParams, rule: CapacityRule, members: Sequence[InstanceFacts]) -> bool:
    """Return whether these members are a group, none is throttled, and what it wants fits them without drop."""
    if len(members) < 2 or missing_layers(rule.model, members) is not None:
        return False
    return not any(member.throttled for member in members) and fits_alone(params, rule, members)


def fits_alone(params: PatienceParams, rule: CapacityRule, members: Sequence[InstanceFacts]) -> bool:
    """Return whether a group wants less than the share of what its members would have alone that the rule leaves it.

    By benefit each of its requests, too, surely finds a member that takes all of it, none being larger than
    `largest_request_tokens` says.
    """
    if expected_tokens(members, params.fit_horizon_s) >= params.fit_ratio * rule.tokens(rule.whole_blocks(members)):
        return False
    if params.restore_by is RestoreBy.RATIO:
        return True
    return why_no_room(rule, members[0].group, members, largest_request_tokens(rule, members)) is None


def largest_request_tokens(rule: CapacityRule, members: Iterable[InstanceFacts]) -> int:
    """Return what no running request of a group has more of, tokens of KV; at least 1.

    Reports do not say how large the largest one is: it is no longer than the model is served with, and leaves at least
    a block to each of the others.
    """
    largest = 1
    for member in members:
        others_tokens = max(member.num_running - 1, 0) * rule.model.block_size
        bound = max(member.used_tokens - others_tokens, 1)
        largest = max(largest, min(bound, member.max_request_tokens or bound))
    return largest
