"""The cluster's broker: one that runs already, or one of our own among the supervised children."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

from cli import checks
from cli.settings import UpSettings
from cli.supervisor import ChildSpec, Supervisor
from shared.errors import StartupError
from shared.nats_server import accepts_connections, find_binary, server_command

START_LIMIT_S = 10.0
LOOK_S = 0.02


class Broker:
    """Where the services meet.

    A broker of our own keeps its port and its store when it is restarted, so that the services find it again.

    Args:
        settings: whether a broker is named.
        supervisor: runs one if not.
        run_dir: its store is removed with this folder.
    """

    NAME: ClassVar[str] = "nats"

    def __init__(self, settings: UpSettings, supervisor: Supervisor, run_dir: Path) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._run_dir = run_dir

    def check(self) -> None:
        """Check what can be known before anything starts.

        Raises:
            StartupError: the named broker does not answer, or there is no binary for one of our own.
        """
        if self._settings.has_own_broker:
            find_binary()
        else:
            checks.check_broker(self._settings.nats_url)

    async def start(self) -> str:
        """Return the URL of a broker that answers.

        Raises:
            StartupError: it does not start.
        """
        if not self._settings.has_own_broker:
            return self._settings.nats_url
        port = checks.find_port("127.0.0.1", 0)
        url = f"nats://127.0.0.1:{port}"
        try:
            command = server_command(self._run_dir / "nats", port)
        except OSError as error:
            raise StartupError(f"cannot write to {self._run_dir} ({error.strerror})", "Set TMPDIR") from error
        await self._supervisor.start(ChildSpec(self.NAME, tuple(command)))
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while not await asyncio.to_thread(accepts_connections, url):
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise StartupError(
                f"nats-server did not start within {START_LIMIT_S:g} s", "Look into its log with --log-dir"
            ) from error
        return url
