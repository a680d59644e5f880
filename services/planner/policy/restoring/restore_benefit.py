"""Brings a group back when it has cost more than to restore it and drop again: a ski-rental.

    stalls, seconds, since what the group wants fits its members without drop
            ┤                     ╱ rent: what requests lose while the group stands
      price ┼┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄╱┄┄┄┄┄┄┄┄┄
            ┤           ╭──────╯
            ┤  ╭────────╯       │              due: the rent exceeds the price, and it has fit for `restore_hold_s`;
            └──┴────────────────┴───────►       or it has fit, and had nothing to do, for `restore_hold_s`
               fits             due

Per second a group of s stages costs

    rent  = (n + q) · max(0, 1 - thpt(s) / (s · thpt(1)))       n running, q queued requests

the part of a drop's price (`price`) that grows with time. What it costs to restore it, and to drop the same again, if a
burst came at once:

    price = n · remap + n · load · lost                         parameters are loaded beside serving
          + n · remap + n · T                                   it parts, and stands still while KV moves
          + n · remap + T · (n + 1) / 2                         the drop, as `price` has it
    load  = max over members of what it lacks, bytes / its link
    lost  = 1 - room beside the whole model / room of the group; 1 where it is loaded in one step, with a stall
    T     = until the KV in use is where it is needed, from instances that share it evenly (`price.kv_times_s`)

With n requests both are near proportional to n, so a group that holds little KV is due soon and one that holds much
later, whatever n. Two stages of Qwen2.5-14B on A800s lose 6 %, and load for 0.59 s with 27 % less room: 100 requests
with 300 000 tokens (T = 0.59 s) are due after 106 s / 6 = 18 s, with 100 000 tokens after 47 s / 6 = 8 s, for which
the hold of 10 s stands.

Without requests there is no rent, and what waits for a restore then is the next burst only; so a group that has nothing
to do for the hold is due as well. Both wait for the hold, whichever comes first: a lull in which the price is 0 for a
moment is no calm. The account begins anew when it does not fit, a member is throttled, its members change, or nobody
sees it. A restore that is followed by a drop within `restore_again_s` was wrong: the price of the next one, for groups
of any of these workers, doubles, up to `MAX_FACTOR` times; a drop after a longer time makes up for it.

Pure reducer: facts in, decisions out; time is an argument, seconds of one monotonic clock. Source: KunServe v2, section
4.4, restores by use alone; that it is done by what it costs is the project's own design. Rent or buy, and that paying
the price in rent first costs at most twice the optimum: Karlin et al., "Competitive snoopy caching", 1988.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from services.planner.policy.levers.price import Merges, kv_times_s, prices_s
from services.planner.policy.patience import ROUNDING_S, PatienceParams
from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams, InstanceFacts, expected_tokens, groups_of
from services.planner.policy.restoring.fits_alone import may_part
from services.planner.policy.restoring.loaded_layers import can_load
from services.planner.policy.restoring.restore import missing_bytes
from shared.ids import WorkerId

MAX_FACTOR = 64.0
"""How many times dearer restores get, however often they are followed by a drop."""


@dataclass(frozen=True, slots=True)
class RestorePrice:
    """Seconds of stalls, summed over requests."""

    load_s: float
    part_s: float
    drop_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.load_s + self.part_s + self.drop_s


def rent_per_s(facts: ClusterFacts, members: Sequence[InstanceFacts]) -> float:
    """Return what a group costs its requests, seconds of stalls per second; a size beyond the profile does no more."""
    size, throughput = len(members), facts.throughput
    loss = max(1 - throughput[min(size, len(throughput)) - 1] / (size * throughput[0]), 0.0)
    return loss * sum(member.num_running + member.num_queued for member in members)


def restore_price(
    facts: ClusterFacts, members: Sequence[InstanceFacts], drop: DropParams, *, beside: bool
) -> RestorePrice:
    """Return what it costs to restore a group and to drop the same again.

    Args:
        facts: of the cluster.
        members: all of the group; with the KV that its leader reports.
        drop: what a drop's price is made of.
        beside: whether parameters are loaded beside serving where the members can.
    """
    running = sum(member.num_running for member in members)
    merges = _drop_again(facts, members)
    times_s = kv_times_s(facts.model, drop.kv, merges)
    again = prices_s(drop, merges, times_s)
    remap_s = running * drop.remap_s
    return RestorePrice(
        load_s=(remap_s if beside else 0.0)
        + running * _load_s(facts, members) * _lost_ratio(facts, members, beside=beside),
        part_s=remap_s + running * float(times_s[0]),
        drop_s=float(again[0, 0] + again[1, 0]),
    )


def _load_s(facts: ClusterFacts, members: Sequence[InstanceFacts]) -> float:
    """Return in how many seconds the last member has what it lacks; an unknown link takes none."""
    links = [(missing_bytes(facts.model, member), member.link_bytes_per_s) for member in members]
    return max((num_bytes / link for num_bytes, link in links if link > 0), default=0.0)


def _lost_ratio(facts: ClusterFacts, members: Sequence[InstanceFacts], *, beside: bool) -> float:
    """Return the share of the group's room that is missing while it loads; 1 where it stands still."""
    if not (beside and can_load(facts.model, members)):
        return 1.0
    rule = CapacityRule(facts.model)
    room = rule.group_blocks(members)
    return max(1 - rule.group_blocks(members, facts.model.all_layers) / room, 0.0) if room else 1.0


def _drop_again(facts: ClusterFacts, members: Sequence[InstanceFacts]) -> Merges:
    """Return the group as it would form from whole instances that share its KV evenly; [1] and [1, s]."""
    size, throughput = len(members), facts.throughput
    used = sum(member.used_tokens for member in members)
    after = throughput[min(size, len(throughput)) - 1]
    token_s = max(member.token_s for member in members) * throughput[0] / after
    return Merges(
        running=np.array([sum(member.num_running for member in members)]),
        queued=np.array([sum(member.num_queued for member in members)]),
        throughput_before=np.array([size * throughput[0]]),
        throughput_after=np.array([after]),
        own_tokens=np.array([[used // size + (i < used % size) for i in range(size)]]),
        all_tokens=np.array([used]),
        held=np.full((1, size), facts.model.num_layers),
        kept=np.array([[len(member.layers) for member in members]]),
        link_bytes_per_s=np.array([[member.link_bytes_per_s for member in members]]),
        token_s=np.array([token_s]),
    )


@dataclass(slots=True)
class _Account:
    """What one group has cost since it fits."""

    members: tuple[WorkerId, ...]
    since_s: float
    seen_s: float
    idle_s: float
    """Since when it has nothing to do, as far as anybody has seen."""
    rent_s: float = 0.0
    rent_per_s: float = 0.0
    """As of the last look; it is paid until the next one."""

    def pay(self, rent_per_s: float, now_s: float, *, is_busy: bool) -> None:
        """Pay the rent since the last look, and note what it is from now on."""
        self.rent_s += self.rent_per_s * max(now_s - self.seen_s, 0.0)
        self.rent_per_s, self.seen_s = rent_per_s, now_s
        if is_busy:
            self.idle_s = now_s


@dataclass(slots=True)
class _Past:
    """What became of the restores of one worker."""

    restored_s: float
    factor: float = 1.0


class BenefitWatch:
    """Follows what groups cost that fit their members without drop."""

    def __init__(self, params: PatienceParams, drop: DropParams) -> None:
        self._params = params
        self._drop = drop
        self._accounts: dict[str, _Account] = {}
        self._past: dict[WorkerId, _Past] = {}
        self._why: dict[str, str] = {}

    def apply(self, facts: ClusterFacts, now_s: float) -> tuple[str, ...]:
        """Take the facts of this moment; return the groups that are due for a restore, sorted.

        A group that lacks layers is none of them: its members become whole by themselves.
        """
        accounts, self._accounts, self._why = self._accounts, {}, {}
        rule = CapacityRule(facts.model)
        self._forget_gone(facts)
        for name, members in groups_of(facts).items():
            if not may_part(self._params, rule, members):
                continue
            ids = tuple(member.instance_id for member in members)
            account = accounts.get(name)
            if account is None or account.members != ids:
                account = _Account(ids, now_s, now_s, now_s)
            is_busy = any(member.num_running or member.num_queued for member in members)
            account.pay(rent_per_s(facts, members), now_s, is_busy=is_busy)
            self._accounts[name] = account
            self._judge(facts, rule, name, members, account)
        return tuple(sorted(self._why))

    def forget(self, group_ids: Iterable[str] | None = None) -> None:
        """Begin anew with these groups, None: with all: what was seen so far does not count."""
        for name in list(self._accounts) if group_ids is None else group_ids:
            self._accounts.pop(name, None)

    def why(self, group_id: str) -> str:
        """Return in words why this group was due when `apply` returned last; empty: it was not."""
        return self._why.get(group_id, "")

    def note_restore(self, worker_ids: Iterable[WorkerId], now_s: float) -> None:
        """Learn which workers became whole just now."""
        for worker_id in worker_ids:
            past = self._past.setdefault(worker_id, _Past(now_s))
            past.restored_s = now_s

    def note_drop(self, worker_ids: Iterable[WorkerId], now_s: float) -> None:
        """Learn which workers have dropped parameters just now; who was restored a moment ago is dearer from now on."""
        for worker_id in worker_ids:
            past = self._past.get(worker_id)
            if past is None:
                continue
            if now_s - past.restored_s <= self._params.restore_again_s + ROUNDING_S:
                past.factor = min(2 * past.factor, MAX_FACTOR)
            else:
                del self._past[worker_id]

    def _forget_gone(self, facts: ClusterFacts) -> None:
        """Keep what is known of workers that are there, once most of it is of others; one may be gone for a moment."""
        if len(self._past) > 2 * len(facts.instances):
            present = dict.fromkeys(each.instance_id for each in facts.instances)
            self._past = {name: past for name, past in self._past.items() if name in present}

    def _judge(
        self,
        facts: ClusterFacts,
        rule: CapacityRule,
        name: str,
        members: Sequence[InstanceFacts],
        account: _Account,
    ) -> None:
        """Note why a group is due, if it is."""
        hold_s, now_s = self._params.restore_hold_s - ROUNDING_S, account.seen_s
        if now_s - account.since_s < hold_s:
            return
        factor = max((self._past[each].factor for each in account.members if each in self._past), default=1.0)
        price = restore_price(facts, members, self._drop, beside=self._params.restore_beside)
        price_s = factor * price.total_s
        if account.rent_s > price_s:
            dearer = f" ({factor:g} times, after drops that followed)" if factor > 1 else ""
            what = f"it has cost {account.rent_s:.2f} s of stalls, to restore and drop again {price_s:.2f} s{dearer}"
        elif now_s - account.idle_s >= hold_s:
            what = f"it had nothing to do for {now_s - account.idle_s:.1f} s"
        else:
            return
        wanted, room = expected_tokens(members, self._params.fit_horizon_s), rule.tokens(rule.whole_blocks(members))
        self._why[name] = (
            f"by benefit: {what}; for {now_s - account.since_s:.1f} s what it wants fits without drop, now {wanted} of "
            f"{room} tokens with the growth of {self._params.fit_horizon_s:g} s"
        )
