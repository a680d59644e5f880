"""The plan key: every write takes the next epoch by compare-and-set, so no two planners ever share one.

planner A   claim → 7          begin → 8          advance → refused: superseded, decides nothing from now on
planner B                                claim → 9, with the plan 8 that A has begun

A plan that was begun and is not done is carried over by whoever claims: it is driven on or abandoned, never forgotten.
So is how many instances are wanted.

Every write is one revision of the key, so an epoch far above its revision was made up, or follows one that was. It is
not believed: a claim begins at the revision, and rises where a worker says that it knows a newer one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from shared.errors import StartupError
from shared.messages.base import MAX_EPOCH, MAX_EPOCH_STEP
from shared.messages.plan import PLAN_KEY, Plan, PlanPhase, Step, WantedInstances
from shared.process.log import get_logger
from shared.transport.bus import BusError, KeyValue, WrongRevisionError
from shared.wire import WireError, decode_json, encode_json

_log = get_logger()
MAX_CLAIM_ATTEMPTS = 16
"""Other planners that may win the race for an epoch while this one starts."""


class SupersededError(Exception):
    """Another planner took a newer epoch; this one must not write again."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"another planner holds an epoch newer than {epoch}")
        self.epoch = epoch


class PlanBook:
    """This planner's hold on the plan key. One write at a time: whoever comes meanwhile waits."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket
        self.revision = 0
        """Revision of the last write; a newer one on the key is another planner's."""
        self.plan: Plan | None = None
        """The last plan that this planner wrote."""
        self._doubted = 0
        """Epoch that was found in the key and not believed; 0: none."""
        self._lock = asyncio.Lock()
        self._is_certain = True

    @property
    def epoch(self) -> int:
        """The newest one that this planner holds, or held; 0: none yet."""
        return 0 if self.plan is None else self.plan.epoch

    async def claim(self, reason: str) -> Plan:
        """Take the next epoch, with the plan that is not done yet, or else one that changes nothing.

        Raises:
            StartupError: the key holds something that is no plan, or others were faster every time.
            BusError: the broker does not answer.
        """
        async with self._lock:
            for _ in range(MAX_CLAIM_ATTEMPTS):
                entry = await self._bucket.get(PLAN_KEY)
                if entry is None or entry.value is None:
                    plan = Plan(epoch=self.epoch + 1, reason=reason)
                    claimed = await self._try(plan, None)
                else:
                    plan = self._successor(_read(entry.value), entry.revision, reason)
                    claimed = await self._try(plan, entry.revision)
                if claimed:
                    self._is_certain = True
                    return plan
        raise StartupError(
            f"{MAX_CLAIM_ATTEMPTS} times in a row another planner took the next epoch",
            "Stop the other planners of this cluster, or give this one another --cluster",
        )

    async def rise(self, told: int) -> Plan:
        """Take an epoch above one that a worker has taken, unless this planner has it; the plan stays as it is.

        Args:
            told: the worker's. Who says that it is more than `MAX_EPOCH_STEP` above this planner's is asked again under
                the one that is so far above.

        Raises:
            SupersededError, BusError: as `write`.
        """

        def risen(last: Plan) -> Plan:
            above = told if not told < self._doubted <= told + MAX_EPOCH_STEP else self._doubted  # who wrote that lives
            epoch = min(max(above, last.epoch) + 1, last.epoch + MAX_EPOCH_STEP, MAX_EPOCH)
            return last.model_copy(update={"epoch": epoch})

        _log.warning("epoch_overtaken", epoch=self.epoch, told=told)
        return await self._next(risen)

    async def write(self, lever: str, reason: str) -> Plan:
        """Write under the next epoch which lever is pulled, with nothing for workers to do.

        Raises:
            SupersededError: another planner wrote in between; nothing was written.
            BusError: it may or may not have been written; only a new `claim` makes that certain.
        """
        return await self._next(lambda last: Plan(epoch=last.epoch + 1, lever=lever, reason=reason, wanted=last.wanted))

    async def want(self, wanted: WantedInstances | None) -> Plan:
        """Write under the next epoch how many instances there should be; the plan stays as it is.

        Raises:
            SupersededError, BusError: as `write`.
        """
        return await self._next(lambda last: last.model_copy(update={"epoch": last.epoch + 1, "wanted": wanted}))

    async def begin(self, lever: str, reason: str, steps: tuple[Step, ...]) -> Plan:
        """Write under the next epoch that these steps are being prepared; that epoch names the plan.

        Raises:
            SupersededError, BusError: as `write`.
        """
        begun = partial(Plan, lever=lever, reason=reason, phase=PlanPhase.PREPARING, steps=steps)
        return await self._next(lambda last: begun(epoch=last.epoch + 1, plan_id=last.epoch + 1, wanted=last.wanted))

    async def advance(self, phase: PlanPhase, reason: str) -> Plan:
        """Write under the next epoch how far the plan that was begun is.

        Raises:
            SupersededError, BusError: as `write`.
        """

        def advanced(last: Plan) -> Plan:
            assert last.phase is not PlanPhase.DONE, "something was begun"
            return last.model_copy(update={"epoch": last.epoch + 1, "phase": phase, "reason": reason})

        return await self._next(advanced)

    async def _next(self, succeed: Callable[[Plan], Plan]) -> Plan:
        async with self._lock:
            assert self.plan is not None, "claimed"
            if not self._is_certain:
                raise BusError("an earlier write was not answered, so nobody knows what the plan key holds")
            plan = succeed(self.plan)
            try:
                is_written = await self._try(plan, self.revision)
            except BusError:
                self._is_certain = False
                raise
            if not is_written:
                raise SupersededError(self.plan.epoch)
            return plan

    def _successor(self, last: Plan, revision: int, reason: str) -> Plan:
        """Return the plan that follows one of a revision, as far as that can be believed."""
        if last.epoch > revision + MAX_EPOCH_STEP or last.plan_id > last.epoch:
            _log.warning("epoch_not_believed", epoch=last.epoch, plan=last.plan_id, revision=revision)
            self._doubted = last.epoch
            return Plan(epoch=max(revision, self.epoch) + 1, reason=f"{reason}; the epoch before was not believed")
        if last.phase is PlanPhase.DONE:
            return Plan(epoch=last.epoch + 1, reason=reason, wanted=last.wanted)
        return last.model_copy(update={"epoch": last.epoch + 1})

    async def _try(self, plan: Plan, revision: int | None) -> bool:
        data = encode_json(plan)
        try:
            if revision is None:
                self.revision = await self._bucket.create(PLAN_KEY, data)
            else:
                self.revision = await self._bucket.update(PLAN_KEY, data, revision)
        except WrongRevisionError:
            return False
        self.plan = plan
        return True


def _read(value: bytes) -> Plan:
    try:
        return decode_json(value, Plan)
    except WireError as error:
        raise StartupError(
            f"the key '{PLAN_KEY}' of the plan bucket does not hold a plan: {error}",
            "Epochs must not start again from 1, so nothing was changed; look at it with `nats kv get`",
        ) from error
