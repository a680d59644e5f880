"""More instances are asked for, and no more asked for, over a real broker: what an autoscaler and an operator see."""

from __future__ import annotations

from cli.groups.command import run_planner
from tests.integration.test_plan_refusals import NO_GAIN, planning, report


async def test_instances_are_asked_for_while_no_drop_helps_and_given_up_when_demand_fits_again(nats_url: str) -> None:
    """Two of 10 blocks, each wants 3 more, and a drop gains nothing: 96 tokens are one instance."""
    more = (
        report(0, NO_GAIN, is_short=True, num_demanded_blocks=3),
        report(1, NO_GAIN, is_short=True, num_demanded_blocks=3),
    )
    reports = list(more)
    flags = {"nats_url": nats_url, "cluster": "scale"}
    async with planning(nats_url, "scale", reports, max_instances=4, scale_wait_s=1.0, scale_hold_s=1.0) as here:
        lacking = "96 tokens of KV are lacking, an instance has room for 160: 3 instances are wanted"
        await here.told("planner", lacking, name="instances_wanted")
        assert (await here.ask("plan", {}))["instances_wanted"] == 3
        text = await run_planner(flags, as_json=False)
        assert "3 instances are wanted, there are 2" in text
        reports[:] = [report(index, NO_GAIN) for index in range(2)]
        await here.told("planner", "3 instances are no longer wanted", name="instances_suffice")
        assert (await here.ask("plan", {}))["instances_wanted"] is None
        assert "wanted, there are" not in await run_planner(flags, as_json=False)
        assert [each.name for each in here.events if each.name.startswith("instances_")] == [
            "instances_wanted",
            "instances_suffice",
        ]
