"""What a worker's plan agent asks of its device: to hold some layers, and to be a stage of a group.

alone ──lead──► leader: the executor is the whole group's          ──alone──► alone
│ └──join──► member: computes what the leader says, until `on_end`  ──alone──►
                      └─reside─► as before, while parameters of other layers are loaded beside
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.worker.contract.executor import Executor
from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.executor.parameter_load import ParameterLoad
from services.worker.kv_moves.arrivals import Arrivals
from services.worker.kv_moves.placed_kv import PlacedKv
from services.worker.kv_moves.places import GroupPlace, NextShares
from shared.layers import LayerRange
from shared.messages.report import ElasticFacts


@dataclass(frozen=True, slots=True)
class Led:
    """What a leader, or a worker that stands alone, goes on with."""

    executor: Executor
    kept: KeptKv = NOTHING_KEPT
    """Blocks that hold what was computed before the change, from the beginning."""
    arrivals: Arrivals | None = None
    """What is still on its way into other blocks."""
    num_moved_bytes: int = 0
    """That went between the members of a group that has dissolved, or forms, while they served nobody."""


@dataclass(frozen=True, slots=True)
class Parting:
    """A group is dissolved by all of its members together."""

    shares: tuple[KeptKv, ...] = ()
    """The leader says which blocks go to which stage's worker; the others say nothing."""
    there: tuple[PlacedKv, ...] = ()
    """And which of the group's blocks are there already, by `copy_ahead`; none at all: nothing was copied."""


class GroupDevice(Protocol):
    """Memory and model of a worker whose layers can be dropped. Changed only while no step is in flight.

    Whoever calls it has taken all blocks from all sequences before. Of the KV in them only what is named survives: in a
    group that forms each stage gets its layers of it, in one that dissolves each worker all layers of its share.
    """

    @property
    def layers(self) -> LayerRange:
        """Held now."""

    @property
    def resident(self) -> LayerRange:
        """Layers whose parameters have memory here, held or beside those; while they change, those of before."""

    @property
    def loaded_ratio(self) -> float:
        """Share of the resident parameters' bytes that are loaded, 0 to 1.

        It rises while steps run, and stays below 1 if loading fails, which is then tried again by the next `reside`, or
        by `alone`.
        """

    @property
    def load_now(self) -> ParameterLoad | None:
        """How far parameters are that `reside` loads; None: none are, or what else has changed has ended that."""

    @property
    def facts(self) -> ElasticFacts:
        """Sizes of its memory; they never change."""

    @property
    def address(self) -> str:
        """Where other stages connect, `host:port`; empty where all are in one process."""

    def refusal(self, layers: LayerRange) -> str | None:
        """Return why this device cannot come to hold exactly these layers; None if it can."""

    def blocks_beside(self, layers: LayerRange) -> int:
        """Return the KV blocks of the layers that are held, beside the parameters of `layers`, these among them."""

    async def lead(self, place: GroupPlace, on_end: Callable[[str | None], None], kept: KeptKv) -> Led:
        """Drop all but the own layers, connect to the members, and return the group's executor; KV is on its way then.

        The executor before must not be used any more; it need not be closed. The new one is closed by the caller before
        the next change, which ends the pipeline in order.

        Args:
            place: the group.
            on_end: called once on the loop, with the reason, if the pipeline breaks.
            kept: blocks of this worker, or of the group that it leads, whose contents should survive.

        Raises:
            GroupFailedError: the group did not come about; `alone` has to be called.
        """

    async def join(self, place: GroupPlace, on_end: Callable[[str | None], None], kept: KeptKv) -> int:
        """Drop all but the own layers, and compute them for the group's leader from now on.

        Args:
            place: the group.
            on_end: called once on the loop, when the pipeline ends: with the reason if it is broken, None if the leader
                has closed it. Not called after `alone`.
            kept: as for `lead`; nothing for who was a member before.

        Returns:
            KV blocks that this device has for its layers.

        Raises:
            GroupFailedError: the group did not come about; `alone` has to be called.
        """

    async def reside(self, layers: LayerRange, num_blocks: int, *, is_ahead: bool = False) -> int:
        """Hold the parameters of some layers beside the own ones from now on; what the stage computes stays the same.

        What is not loaded yet is loaded beside the steps that come after this call. Blocks keep their contents and
        their addresses, and the executor goes on; the `capacity` that it began with is not changed. Idempotent.

        No KV is on its way, and from now on the caller uses no block with an id of `num_blocks` or above: only as many
        blocks may be left. A stage that is not the first may be in a step of that kind meanwhile. `lead` and `join` end
        the loading and give up what is beside; `alone` loads what is left.

        Args:
            layers: that contain the own ones. Just the own ones: what is beside becomes memory for KV again.
            num_blocks: that there have to be afterwards.
            is_ahead: there is memory for KV of all layers in `blocks_ahead`, so that it can come before the group
                dissolves (`copy_ahead`), and for no more than `num_blocks` of the own ones.

        Returns:
            KV blocks that this device has for its layers then, `num_blocks` or more.

        Raises:
            GroupFailedError: so many do not fit, the system refuses, or there is no group; `alone` has to be called.
        """

    @property
    def most_copied(self) -> int:
        """Blocks that `copy_ahead` moves in one round at most; 0: it moves none."""

    async def copy_ahead(self, next_shares: NextShares | None = None) -> bool:
        """Copy KV of the group that stands to where it will be when the group dissolves, while it serves.

        All of its stages do it at the same time. A block that is copied does not change, and is not reused, until the
        round after it begins. Anything else that changes the device ends it.

        Args:
            next_shares: of the leader: which blocks go to which stage next, at most `most_copied` in all; called on the
                loop when all of the last ones are there. None: this is another stage.

        Returns:
            Whether all that the leader named has been copied. Else what the last round was to move may be there or not.
        """

    def end_copying(self) -> None:
        """Let `copy_ahead` end soon, here and at the other stages, and forget its connections. Idempotent."""

    def blocks_ahead(self, layers: LayerRange, num_blocks: int) -> int:
        """Return of how many blocks a stage on a device like this can have all layers, beside the whole model.

        Args:
            layers: that the stage computes.
            num_blocks: of KV of these that it has; it has all layers of no more, and of no more than `whole_blocks`.
        """

    @property
    def whole_blocks(self) -> int:
        """KV blocks that there is memory for beside the whole model."""

    async def alone(self, parting: Parting | None = None) -> Led:
        """Leave any group, load what is not loaded yet, and return the executor of the whole model. Idempotent.

        Args:
            parting: if the other members of its group do the same now: KV goes to where its sequences go. Who does not
                come in time is not waited for; then KV is lost.

        Raises:
            StartupError: a layer cannot be loaded again; the worker must end.
        """

    async def close(self) -> None:
        """Leave any group and give back memory. Idempotent."""
