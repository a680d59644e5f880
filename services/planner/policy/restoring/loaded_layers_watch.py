"""What is due with each group on its way back to whole instances: a load, the restore, or a step back.

                 due, by ratio or by benefit                     all there, and it still fits
    dropped ────────────── load ──────────────► loading ─► loaded ──────────── restore ──────► whole instances
        ▲                                          │          │
        └──────────────── unload ──────────────────┴──────────┘
          a member is throttled │ it wants more than half way from `fit_ratio` to all of the room that is left │
          nothing was loaded for `load_stall_s` │ a plan ended by half

One with too much KV to move ahead of the restore waits for `ahead_wait_s` until it has less, so that nobody stalls.
After an unload a group has to be used little for the whole hold again, so it loads once per hold at most. One whose
loads have failed `MAX_LOADS` times, or that cannot load beside serving, is restored in one step: in calm every group
becomes whole, whatever its loads do.

Pure reducer: facts in, decisions out; time is an argument, seconds of one monotonic clock. Source: KunServe v1, section
4.2, v2, section 4.4; that a burst ends it, and all the patience, is the project's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from services.planner.policy.patience import ROUNDING_S, Backoff, PatienceParams
from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import ClusterFacts, InstanceFacts, groups_of, wanted_tokens
from services.planner.policy.restoring.fits_alone import fits_alone
from services.planner.policy.restoring.loaded_layers import (
    LoadedLayers,
    fits_ahead,
    loaded_layers_of,
    pipeline_of,
    room_beside,
    why_not_loaded,
)

MAX_LOADS = 3
"""Loads of one group that may fail before it is restored in one step."""


@dataclass(frozen=True, slots=True)
class Due:
    """What is due now, by group; each in the order in which it is to be done."""

    unload: tuple[tuple[str, str], ...] = ()
    """And why."""
    restore: tuple[str, ...] = ()
    load: tuple[str, ...] = ()


@dataclass(slots=True)
class _Progress:
    """How far a group's load has come, and since when it is there."""

    loaded: float
    since_s: float


class LoadedLayersWatch:
    """Follows what groups have beside the layers that they compute with, and what became of their loads."""

    def __init__(self, params: PatienceParams) -> None:
        self._params = params
        self._progress: dict[str, _Progress] = {}
        self._loads = defaultdict[str, Backoff](lambda: Backoff(params))
        self._unloads: dict[str, Backoff] = {}
        self._due_since_s: dict[str, float] = {}
        """Of groups that are due, and nothing is beside."""

    @property
    def max_use_ratio(self) -> float:
        """Share of the room beside the whole model above which a group gives it back: half way from `fit_ratio`.

        Where KV can move ahead, which takes a moment, all of the room.
        """
        return (1 + self._params.fit_ratio) / 2

    def apply(self, facts: ClusterFacts, idle: Collection[str], now_s: float) -> Due:
        """Take the facts of this moment; return what is due.

        Args:
            facts: of the cluster.
            idle: groups that are due for a restore (`RatioWatch`, `BenefitWatch`).
            now_s: this moment.
        """
        rule = CapacityRule(facts.model)
        stages_of = {name: pipeline_of(facts.model, members) for name, members in groups_of(facts).items()}
        groups = {name: stages for name, stages in stages_of.items() if stages}  # who lost a member mends itself
        self._keep_only(groups)
        self._due_since_s = {name: self._due_since_s.get(name, now_s) for name in idle if name in groups}
        unload: list[tuple[str, str]] = []
        restore: list[str] = []
        at_once: list[str] = []
        load: list[str] = []
        for name, stages in sorted(groups.items()):
            loaded = loaded_layers_of(facts.model, stages)
            self._follow(name, loaded, stages, now_s)
            if loaded is LoadedLayers.NOTHING:
                if name in idle and not self._awaits_room_ahead(rule, name, stages, now_s):
                    (load if self._may_load(rule, name, stages) else restore).append(name)
            elif (why := self._why_back(rule, name, loaded, stages, now_s)) is not None:
                unload.append((name, f"{name}: {why}"))
            elif loaded is LoadedLayers.LOADED and fits_alone(self._params, rule, stages):
                at_once.append(name)
            elif name in idle and not self._params.restore_beside:
                restore.append(name)
        return Due(self.unload_now(unload, now_s), tuple(at_once or restore), self._rested(load, now_s))

    def forget(self) -> None:
        """Begin anew to wait: nobody has seen the cluster."""
        self._progress.clear()
        self._due_since_s.clear()

    def loaded(self, group_ids: Iterable[str], now_s: float, *, is_done: bool) -> None:
        """Note what became of the plan by which groups were to load."""
        for name in () if is_done else group_ids:
            self._loads[name].failed(now_s)

    def unloaded(self, group_ids: Iterable[str], now_s: float, *, is_done: bool) -> None:
        """Note what became of the plan by which groups were to give back; the load of one that had stalled failed."""
        for name in group_ids:
            if not is_done:
                self._unloads.setdefault(name, Backoff(self._params)).failed(now_s)
                continue
            self._unloads.pop(name, None)
            if self._has_stalled(name, now_s):
                self._loads[name].failed(now_s)

    def unload_now(self, unload: Sequence[tuple[str, str]], now_s: float) -> tuple[tuple[str, str], ...]:
        """Return which of these groups may be told to give back now, each with the reason.

        All that have not failed to at once; if there are none, one that has, by itself, once its pause is over.
        """
        fresh = tuple((name, why) for name, why in unload if name not in self._unloads)
        tried = [(name, why) for name, why in unload if name in self._unloads]
        rested = [each for each in tried if self._unloads[each[0]].left_s(now_s) <= 0]
        return fresh or tuple(sorted(rested, key=lambda each: self._unloads[each[0]].num_failures)[:1])

    def _keep_only(self, groups: Collection[str]) -> None:
        for memory in (self._progress, self._loads, self._unloads):
            for name in [name for name in memory if name not in groups]:
                del memory[name]

    def _follow(self, name: str, loaded: LoadedLayers, stages: Sequence[InstanceFacts], now_s: float) -> None:
        if loaded is LoadedLayers.LOADED:
            self._loads.pop(name, None)
        if loaded is not LoadedLayers.LOADING:
            self._progress.pop(name, None)
            return
        ratio = sum(stage.loaded_ratio for stage in stages)
        before = self._progress.get(name)
        if before is None or ratio != before.loaded:
            self._progress[name] = _Progress(ratio, now_s)

    def _has_stalled(self, name: str, now_s: float) -> bool:
        progress = self._progress.get(name)
        return progress is not None and now_s - progress.since_s >= self._params.load_stall_s - ROUNDING_S

    def _awaits_room_ahead(self, rule: CapacityRule, name: str, stages: Sequence[InstanceFacts], now_s: float) -> bool:
        """Return whether a group that is due waits until its KV can move ahead of the restore, if it ever can."""
        is_late = now_s - self._due_since_s[name] >= self._params.ahead_wait_s - ROUNDING_S
        if is_late or not all(stage.link_bytes_per_s > 0 for stage in stages):
            return False
        return self._may_load(rule, name, stages) and not fits_ahead(rule, stages, self._params.fit_horizon_s)

    def _may_load(self, rule: CapacityRule, name: str, stages: Sequence[InstanceFacts]) -> bool:
        if not self._params.restore_beside or self._loads[name].num_failures >= MAX_LOADS:
            return False
        return why_not_loaded(rule, name, stages, self._params.fit_ratio, self._params.fit_horizon_s) is None

    def _why_back(
        self, rule: CapacityRule, name: str, loaded: LoadedLayers, stages: Sequence[InstanceFacts], now_s: float
    ) -> str | None:
        """Return why a group is to give back what it has beside, in words; None: it keeps it."""
        if any(stage.throttled for stage in stages):
            return "it runs short of memory"
        wanted, (room, is_ahead) = wanted_tokens(stages), room_beside(rule, stages)
        max_use_ratio = 1.0 if is_ahead else self.max_use_ratio
        if wanted > max_use_ratio * room:
            return f"its requests want {wanted} tokens of KV, over {max_use_ratio:.0%} of the room there is"
        if loaded is LoadedLayers.BY_HALF:
            return "not all of its members have made room for the whole model"
        if self._has_stalled(name, now_s):
            return f"nothing has been loaded for {self._params.load_stall_s:g} s"
        return None

    def _rested(self, load: Sequence[str], now_s: float) -> tuple[str, ...]:
        """Return those whose pause is over, the ones that have failed least first."""
        rested = [name for name in load if self._loads[name].left_s(now_s) <= 0]
        return tuple(sorted(rested, key=lambda name: self._loads[name].num_failures))
