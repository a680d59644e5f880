"""Settings of the planner: flag > environment > sluice.toml > default (`shared.process.config`)."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from services.planner.balancing import BalancerParams
from services.planner.execution import ExecutionParams
from services.planner.policy.decisions import DeciderParams
from services.planner.policy.levers.drop_lever import DropLever
from services.planner.policy.levers.ladder import LadderParams, Lever
from services.planner.policy.levers.pipeline_lever import PipelineLever
from services.planner.policy.load_balance import balance
from services.planner.policy.moves import MoveRule
from services.planner.policy.observe import ObserveParams, linear_profile
from services.planner.policy.packing.adaptive import ALL_KINDS, MoveKind
from services.planner.policy.packing.by_class import ByClass
from services.planner.policy.packing.consolidation import Consolidation
from services.planner.policy.packing.mell import Mell
from services.planner.policy.packing.mell_printed import PrintedMell
from services.planner.policy.patience import PatienceParams, RestoreBy
from services.planner.policy.plans.drop import DropStrategy
from services.planner.policy.plans.drop_facts import DropParams, KvFate
from services.planner.policy.scale_signal import ScaleParams
from shared.errors import StartupError
from shared.messages.plan import MAX_ASIDE_S, MAX_HOLD_S
from shared.process.config import Host, HostNames, ServiceSettings
from shared.process.config_sources import split_values
from shared.systems import DEFAULT_SYSTEM, Migrates, UnknownSystemError, find_system

_Seconds = Annotated[float, Field(gt=0, le=3600)]


def _split_figures(value: object) -> object:
    return split_values(value) if isinstance(value, str) else value


_Figures = Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(_split_figures), Field(max_length=64)]


class PlannerSettings(ServiceSettings):
    """One planner: the only writer of plans, for as long as its epoch is the newest."""

    system: str = DEFAULT_SYSTEM
    """Named set of policies (`shared.systems`); parameters are dropped only where it says so, or by hand."""
    tick_period_s: _Seconds = 0.5
    """Seconds between two decisions; shorter reacts faster. A worker that runs short is looked at at once."""
    max_view_age_s: _Seconds = 1.5
    """Seconds after which a cluster view is too old to act upon."""
    pressure_ratio: Annotated[float, Field(gt=0, le=100)] = 1.0
    """There is pressure when used and demanded KV blocks are above this share of all; lower acts earlier."""
    max_group_size: Annotated[int, Field(ge=1, le=64)] = 8
    """Most workers of a group; larger frees more memory, and has more idle time in its pipeline."""
    stage_loss_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.06
    """Share of its workers' throughput that a group loses per stage after the first, if it was not profiled."""
    group_throughput: _Figures = ()
    """Measured throughput of a group of 1, 2, 3 … workers, with commas, in any unit; none: by `stage_loss_ratio`."""
    growth_horizon_s: Annotated[float, Field(ge=0, le=60)] = 1.0
    """Seconds ahead for which a drop makes room for what running requests will generate; higher drops more."""
    drop_hold_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """Seconds that a group is expected to last; higher makes slow groups dearer."""
    drop_wait_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """Seconds that a request without room is expected to wait if nothing is dropped; higher pays more for a drop."""
    drop_strategy: DropStrategy = DropStrategy.THROUGHPUT_GREEDY
    """How groups are chosen: `throughput-greedy` keeps them small, `memory-greedy` makes them large, `optimum` tries
    all that there can be, of at most nine workers and groups."""
    restore_by: RestoreBy = RestoreBy.RATIO
    """When a group is restored: `ratio` after its use was below `restore_ratio` for a while, `benefit` when it has cost
    more, since its use fits its workers without drop, than to restore it and drop again."""
    restore_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
    """KV use, over its workers' capacity without drop, below which a group is restored; 0: only by hand."""
    restore_max_ratio: Annotated[float, Field(gt=0, le=1)] = 0.8
    """By benefit, the same with the growth to come; higher restores sooner, with less room for the next burst."""
    restore_horizon_s: Annotated[float, Field(ge=0, le=3600)] = 3.0
    """By benefit: seconds ahead for which growth counts; higher restores later."""
    restore_again_s: Annotated[float, Field(ge=0, le=3600)] = 60.0
    """By benefit: a drop within so many seconds of a restore makes the next restore of these workers twice as dear."""
    restore_hold_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """Seconds that a group's use must stay below that; higher waits longer for the next burst."""
    restore_beside: bool = True
    """Load parameters beside serving before a group is restored; false: in one step, while its requests wait."""
    ahead_wait_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """Seconds that a group which is due, and has too much KV for it to move ahead of the restore, waits until it has
    less, so that nobody stalls; 0: it does not wait."""
    load_stall_s: _Seconds = 30.0
    """Seconds without progress after which such a load is given up, and tried again later; higher waits longer."""
    cooldown_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """Seconds after a restore in which only workers that have been calm since are a reason to drop again."""
    max_instances: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Most instances that are asked for when dropping does not make room enough, with those that there are; 0: more are
    never asked for."""
    scale_wait_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """Seconds for which room must be lacking, where nothing is dropped for it, for more instances to be asked for."""
    scale_window_s: _Seconds = 30.0
    """Seconds over which use must have grown after a drop for more instances to be asked for; higher asks later."""
    scale_hold_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    """Seconds for which demand must fit the instances that there were before they are no longer asked for."""
    rebalance_pause_s: _Seconds = 1.5
    """Seconds between two rounds in which waiting requests go where there is room; reports have to show the last."""
    balance_pause_s: _Seconds = 0.5
    """Seconds between two looks at who is fuller than whom, where running requests move; reports have to show the last
    moves."""
    move_link_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of a worker's link that moves may have, by the rate at which KV came of late: from then on only urgent ones
    go as KV, of requests that leave before memory runs out."""
    moves_as: Literal["adaptive", "kv", "tokens"] | None = None
    """How running requests change their worker: with their KV, as tokens that are computed again, or as whatever links
    and computing have room for; not given: that, where a system packs, else with their KV."""
    batch_per_worker: Annotated[int, Field(ge=0, le=65_536)] = 256
    """Requests that a worker runs well at a time, by its profile, and a group for each of its workers: no more are
    brought there; 0: none ever."""
    retry_s: _Seconds = 2.0
    """Pause, in seconds, after a plan that did not come about; it doubles with each failure in a row."""
    max_retry_s: _Seconds = 60.0
    """Longest such pause."""
    prepare_limit_s: _Seconds = 2.0
    """Seconds for workers to say that they are prepared; readers stand still meanwhile."""
    move_limit_s: Annotated[float, Field(gt=0, le=MAX_ASIDE_S - MAX_HOLD_S)] = 5.0
    """Seconds for the leader of a group that is to load parameters beside to make do with fewer KV blocks, and for the
    members of one that dissolves to copy KV ahead; they serve meanwhile, but nothing else is decided."""
    prepared_limit_s: Annotated[float, Field(gt=0, le=MAX_HOLD_S)] = 5.0
    """Seconds after which a worker that was prepared goes on as it was if it hears nothing; no worker waits for more
    than 5 s."""
    commit_limit_s: _Seconds = 60.0
    """Seconds after which a worker that is alive but does not say that it carried a plan out counts as failed."""
    settle_limit_s: _Seconds = 5.0
    """Seconds that reports may take to show what a plan has changed; nothing else is decided meanwhile."""

    metrics_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Port of `GET /metrics`, without a key; 0: none. On the bus the same text is the planner's `metrics`."""
    metrics_host: Host = "127.0.0.1"
    """Address of `GET /metrics`; another one than this machine's own only inside of a network that you trust."""
    metrics_allow_host: HostNames = ()
    """Names, with commas, by which scrapers may ask there, besides `metrics_host`, addresses and localhost."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        self.execution()
        self.patience()
        self.observation()
        return self

    def execution(self) -> ExecutionParams:
        """Return the limits of carrying a plan out."""
        return ExecutionParams(
            prepare_limit_s=self.prepare_limit_s,
            move_limit_s=self.move_limit_s,
            prepared_limit_s=self.prepared_limit_s,
            commit_limit_s=self.commit_limit_s,
        )

    def patience(self) -> PatienceParams:
        """Return how much patience there is."""
        return PatienceParams(**{field.name: getattr(self, field.name) for field in fields(PatienceParams)})

    def balancer(self) -> BalancerParams:
        """Return how much is moved, and how."""
        packs = find_system(self.system).migrates not in {Migrates.WHEN_SHORT, Migrates.TO_BALANCE}
        moves_as = self.moves_as or ("adaptive" if packs else "kv")
        kinds = ALL_KINDS if moves_as == "adaptive" else frozenset({MoveKind(moves_as)})
        return BalancerParams(self.balance_pause_s, self.move_link_share, kinds, self.patience())

    def observation(self) -> ObserveParams:
        """Return what is known of groups besides what workers report.

        The profile that nobody measured is linear. Its loss is what stages stood idle with long prompts cut by token
        count, as this project's simulation has it: 6.7 % of two stages, 16.0 % of four (docs/design/elastic-memory.md);
        KunServe states no figures.
        """
        profile = self.group_throughput or linear_profile(self.max_group_size, self.stage_loss_ratio)
        return ObserveParams(profile, self.growth_horizon_s)

    def drop(self) -> DropParams:
        """Return what a drop may do, and what its price is made of.

        Workers that say how fast their links are exchange the KV of running requests; others give it up.
        """
        return DropParams(max_group_size=self.max_group_size, hold_s=self.drop_hold_s, kv=KvFate.BY_LINK)

    def deciding(self) -> DeciderParams:
        """Return the parameters of all that is decided."""
        return DeciderParams(
            ladder=LadderParams(self.max_view_age_s, self.pressure_ratio),
            observation=self.observation(),
            patience=self.patience(),
            drop=self.drop(),
            scaling=ScaleParams(self.max_instances, self.scale_wait_s, self.scale_window_s, self.scale_hold_s),
            settle_limit_s=self.settle_limit_s,
        )

    def move_rule(self) -> MoveRule | None:
        """Return what has running requests change their worker; None: nothing but drains."""
        migrates = find_system(self.system).migrates
        if migrates is Migrates.NEVER:
            return None
        if migrates is Migrates.TO_PACK:
            return Consolidation()
        if migrates in {Migrates.BY_CLASS, Migrates.BY_CLASS_PRINTED}:
            return ByClass(Mell if migrates is Migrates.BY_CLASS else PrintedMell)
        return balance(migrates)

    def levers(self) -> tuple[Lever, ...]:
        """Return the ladder of the system.

        Raises:
            StartupError: there is no such system.
        """
        try:
            system = find_system(self.system)
        except UnknownSystemError as error:
            raise StartupError(str(error), "Choose one with --system") from None
        if system.num_stages > 1:
            return (PipelineLever(system.num_stages, self.drop()),)
        if not system.drops:
            return ()
        return (DropLever(self.drop(), self.drop_strategy, wait_s=self.drop_wait_s),)
