"""Commands that run in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cli import main as command
from cli.exit_codes import REFUSED

Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a command that must be refused, and returns the one line that it then writes."""

    def refuse(*argv: str, code: int = REFUSED) -> str:
        assert command.run_command(list(argv)) == code
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        return err

    return refuse
