"""The cluster's broker: one that runs already, or one of our own among the supervised children.

Our own has a user per role, with passwords that are made for the run and reach each child by its environment. The
set-up user's stays here: its buckets are made before the children start, and again when the broker comes back without.
It says over HTTP, under a path that nobody else knows, whether its store still works: a bucket that once met a full
disk takes nothing more until the broker is started anew.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from cli.cluster import checks
from cli.cluster.settings import UpSettings
from cli.cluster.supervisor import ChildSpec, Supervisor
from cli.exit_codes import UNREACHABLE, CommandError
from cli.http import ask
from shared.errors import StartupError
from shared.process.tasks import TaskOwner
from shared.reading import parse_json
from shared.subjects import Subjects
from shared.transport.buckets import keep_buckets, make_buckets
from shared.transport.bus import BusError
from shared.transport.nats_bus import NatsBus, NoBrokerError, without_credentials
from shared.transport.nats_config import new_password, new_passwords
from shared.transport.nats_roles import BrokerRole, inbox_prefix
from shared.transport.nats_server import accepts_connections, find_binary, server_command

START_LIMIT_S = 10.0
LOOK_S = 0.02
CARE_PERIOD_S = 1.0
"""Pause between two looks at the store."""
RESTART_GAP_S = 10.0
"""After a restart for the store's sake, until the next look: each makes streams wait for a moment. It doubles while
restarts do not help."""
MAX_RESTART_GAP_S = 600.0
ROOM_BYTES = 1024**2
"""What must fit on the disk before a broker is restarted for it."""


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """Where the broker is, and who is let in."""

    url: str
    """Without user and password: flags can be read by everybody on the machine."""
    passwords: Mapping[BrokerRole, str] = field(default_factory=dict)
    """Of each role's user; empty for a broker that is not ours."""
    login: tuple[str, str] | None = None
    """User and password for this process, at a broker that is not ours."""
    is_in_url: bool = False
    """Whether `login` was taken from the URL; otherwise children find theirs where this process did."""
    is_guess: bool = False
    """Whether nobody has named it, and no cluster runs here."""

    @property
    def operator(self) -> tuple[str, str] | None:
        """User and password for people and their tools."""
        return (BrokerRole.OPERATOR, self.passwords[BrokerRole.OPERATOR]) if self.passwords else self.login

    @property
    def operator_url(self) -> str:
        """What a person gives to `nats --server`."""
        if self.operator is None:
            return self.url
        user, password = (quote(text, safe="") for text in self.operator)
        return ",".join(one.replace("://", f"://{user}:{password}@", 1) for one in self.url.split(","))

    @asynccontextmanager
    async def connect(self, tool: str, on_fatal: Callable[[BusError], None] | None = None) -> AsyncIterator[NatsBus]:
        """Connect one of the tools of `sluice` as the operator, for as long as the block lasts.

        Raises:
            NoBrokerError, CommandError: there is none; the latter, if nobody has named one.
        """
        try:
            bus = await NatsBus.connect(self.url, name=f"sluice-{tool}", credentials=self.operator, on_fatal=on_fatal)
        except NoBrokerError as error:
            if not self.is_guess:
                raise
            hint = "Start one with `sluice up`, or name another's broker with --nats-url"
            raise CommandError("no cluster runs here", hint, UNREACHABLE, "nothing_answers") from error
        try:
            yield bus
        finally:
            await bus.close()

    def env(self, role: BrokerRole) -> dict[str, str]:
        """Return the variables from which a child of this role takes its user and password."""
        if self.passwords:  # the strongest variables: a cluster's own broker knows no other users
            prefix, login = f"SLUICE_{role.upper()}_", (role.value, self.passwords[role])
        elif self.login is not None and self.is_in_url:
            prefix, login = "SLUICE_", self.login
        else:
            return {}
        return {f"{prefix}NATS_USER": login[0], f"{prefix}NATS_PASSWORD": login[1]}


def named_broker(settings: UpSettings) -> BrokerAccess:
    """Return how to reach the broker that the settings name.

    Raises:
        ConfigError: the password cannot be read.
    """
    login = settings.nats_login()
    if login is None or settings.nats_credentials() is not None:
        return BrokerAccess(settings.nats_url, login=login, is_guess=settings.has_own_broker)
    return BrokerAccess(without_credentials(settings.nats_url), login=login, is_in_url=True)


class Broker:
    """Where the services meet.

    A broker of our own keeps its port and its store when it is restarted, so that the services find it again.

    Args:
        settings: whether a broker is named.
        supervisor: runs one if not.
        run_dir: its store is removed with this folder.
        show: takes one line for the person: that its store has failed, that it is started anew for that.
    """

    NAME: ClassVar[str] = "nats"

    def __init__(
        self, settings: UpSettings, supervisor: Supervisor, run_dir: Path, show: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._run_dir = run_dir
        self._show = show
        self._tasks = TaskOwner()
        self._setup: NatsBus | None = None
        self._monitoring_url = ""

    def check(self) -> BrokerAccess:
        """Return who will be let in, after checking what can be known before anything starts.

        Raises:
            StartupError: the named broker does not answer, or there is no binary, or no disk, for one of our own.
        """
        if not self._settings.has_own_broker:
            checks.check_broker(self._settings.nats_url)
            return named_broker(self._settings)
        find_binary()
        if not has_room(self._run_dir):
            hint = "Set TMPDIR to where there is some"
            raise StartupError(f"there is no room on the disk of {self._run_dir}", hint, "disk_full")
        return BrokerAccess("nats://127.0.0.1", new_passwords())

    async def start(self, access: BrokerAccess, promised_port: int) -> BrokerAccess:
        """Return how to reach a broker that answers; one of our own listens at ports that are chosen now.

        Args:
            access: of `check`.
            promised_port: at which the dispatcher will listen.

        Raises:
            StartupError: it does not start.
        """
        if not self._settings.has_own_broker:
            return access
        port = checks.find_port("127.0.0.1", 0, [promised_port])
        monitoring_port = checks.find_port("127.0.0.1", 0, [promised_port, port])
        self._monitoring_url = f"http://127.0.0.1:{monitoring_port}/{new_password()}"
        access = replace(access, url=f"nats://127.0.0.1:{port}")
        try:
            command = server_command(
                self._run_dir / "nats", port, access.passwords, self._settings.cluster, self._monitoring_url
            )
        except OSError as error:
            raise StartupError(f"cannot write to {self._run_dir} ({error.strerror})", "Set TMPDIR") from error
        await self._supervisor.start(ChildSpec(self.NAME, tuple(command), needed_as=self.NAME, excuse=self.excuse))
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while not await asyncio.to_thread(accepts_connections, access.url):
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise StartupError(
                f"nats-server did not start within {START_LIMIT_S:g} s", "Look into its log with --log-dir"
            ) from error
        await self._set_up(access)
        self._tasks.start(self._care(), name="broker")
        return access

    async def close(self) -> None:
        """Look after buckets and store no more. The broker itself is the supervisor's. Idempotent."""
        await self._tasks.close()
        if self._setup is not None:
            await self._setup.close()

    async def _set_up(self, access: BrokerAccess) -> None:
        role, subjects = BrokerRole.SETUP, Subjects(self._settings.cluster)
        bus = self._setup = await NatsBus.connect(
            access.url,
            name="sluice-setup",
            inbox_prefix=inbox_prefix(role, "up"),
            credentials=(role, access.passwords[role]),
        )
        try:
            await make_buckets(bus, subjects)
        except BusError as error:
            raise StartupError(
                f"the broker's buckets cannot be made: {error}", "Set TMPDIR to where there is room"
            ) from error
        self._tasks.start(keep_buckets(bus, subjects), name="buckets")

    async def _care(self) -> None:
        """Restart a broker whose store has failed as soon as there is room for one; until cancelled."""
        told, gap_s = "", RESTART_GAP_S
        while True:
            await asyncio.sleep(CARE_PERIOD_S)
            problem = await self._find_problem()
            can_mend = bool(problem) and await asyncio.to_thread(has_room, self._run_dir)
            failed = f"the broker's store has failed ({problem})"
            if can_mend:
                self._show(f"{failed}; there is room on its disk, so the broker is started anew")
                self._supervisor.restart(self.NAME)
                await asyncio.sleep(gap_s)
                gap_s = min(2 * gap_s, MAX_RESTART_GAP_S)
                problem = ""
            elif problem and not told:
                self._show(f"{failed}; views and plans are not kept until there is room on its disk")
            elif not problem:
                gap_s = RESTART_GAP_S
            told = problem

    async def _find_problem(self) -> str:
        """Return what the broker says is wrong with its store; "" if nothing, or if it says nothing."""
        try:
            answer = await ask(f"{self._monitoring_url}/healthz")
            return str(parse_json(answer.body)["error"]) if answer.status == 503 else ""
        except (CommandError, ValueError, KeyError, TypeError):  # it is not there, or begins: another matter
            return ""

    def excuse(self) -> str:
        """Return why it is nobody's fault now that a child fails: without a disk there may be no broker; "": it is."""
        return "" if has_room(self._run_dir) else "the disk is full"


def has_room(folder: Path) -> bool:
    """Return whether a file of some size can be written there; what counts may be blocks, inodes or a quota."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM_BYTES))
            file.flush()
    except OSError:
        return False
    return True
