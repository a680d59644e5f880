"""`sluice drop` over a real broker with a user per role: the planner is found and asked, nobody is denied anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.exit_codes import FAILED, UNREACHABLE, CommandError
from cli.groups.command import run_verb
from services.monitor.config import MonitorSettings
from services.monitor.service import Monitor
from services.planner.config import PlannerSettings
from services.planner.service import Planner
from shared.subjects import Subjects
from shared.transport.buckets import make_buckets
from shared.transport.nats_bus import NatsBus
from shared.transport.nats_config import new_passwords
from shared.transport.nats_roles import BrokerRole, inbox_prefix
from shared.transport.nats_server import EmbeddedNats
from shared.wire import encode_json
from tests.support.statuses import make_report
from tests.support.waiting import until


async def test_the_planner_is_found_and_its_reason_is_told(tmp_path: Path) -> None:
    passwords, denied = new_passwords(), list[BaseException]()

    async def connect(role: BrokerRole) -> NatsBus:
        credentials = (role.value, passwords[role])
        prefix = inbox_prefix(role, role)
        return await NatsBus.connect(
            url, name=role, inbox_prefix=prefix, credentials=credentials, on_fatal=denied.append
        )

    with EmbeddedNats() as server:
        url = server.start(tmp_path, passwords=passwords)
        flags = {"nats_url": url.replace("://", f"://operator:{passwords[BrokerRole.OPERATOR]}@")}
        with pytest.raises(CommandError, match="no planner answers") as nobody:
            await run_verb("drop", {}, flags, limit_s=5, as_json=False)
        assert nobody.value.code == UNREACHABLE

        roles = (BrokerRole.MONITOR, BrokerRole.PLANNER, BrokerRole.WORKER, BrokerRole.SETUP)
        buses = {role: await connect(role) for role in roles}
        await make_buckets(buses[BrokerRole.SETUP], Subjects())
        monitor = Monitor(MonitorSettings(instance_id="monitor", suspect_after_s=0.2), buses[BrokerRole.MONITOR])
        planner = Planner(PlannerSettings(instance_id="planner", system="kunserve"), buses[BrokerRole.PLANNER])
        await monitor.start()
        await planner.start()
        report = make_report()
        await buses[BrokerRole.WORKER].publish(Subjects().report(report.worker_id), encode_json(report))
        await until(lambda: planner.fresh_view is not None)
        for verb in ("drop", "restore"):
            while True:
                with pytest.raises(CommandError, match=f"no {verb}: ") as refused:
                    await run_verb(verb, {}, flags, limit_s=5, as_json=False)
                if "no fresh view" not in str(refused.value):  # all of them wait for one thread
                    break
            assert "no worker that is ready can drop parameters" in str(refused.value)
            assert refused.value.code == FAILED
        await planner.stop()
        await monitor.stop()
        for bus in buses.values():
            await bus.close()
    assert denied == []
