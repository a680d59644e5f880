"""Exit codes of `sluice`, and how a failure becomes one line.

0    done, or stopped as asked
1    something failed while it ran; the line says what, and where its log is
2    refused: bad usage, a wrong setting, no URL, a taken port, a missing model …; nothing was left running
3    nothing answers at the URL (`status`, `top`, `chat`, `bench`), or no worker is heard of (`profile`), or no planner
     (`drop`, `restore`), or no cluster runs here, where it is looked for by the bus
130  a second Ctrl-C, of commands that start no cluster the first: stopped at once, without finishing running answers
"""

from __future__ import annotations

from typing import Final

from shared.errors import pointer

DONE: Final = 0
FAILED: Final = 1
REFUSED: Final = 2
UNREACHABLE: Final = 3
KILLED: Final = 130


class CommandError(Exception):
    """A command cannot go on.

    Args:
        message: what is wrong, without its full stop.
        hint: what to do next.
        code: of the table above.
        topic: section of `docs/troubleshooting.md` that says more; "": none does.
    """

    def __init__(self, message: str, hint: str = "", code: int = FAILED, topic: str = "") -> None:
        message, hint = message.strip().rstrip("."), hint.strip().rstrip(".")
        text = f"{message}{'' if message.endswith('?') else '.'} {hint}" if hint else message
        super().__init__("sluice: " + " ".join(text.split()) + pointer(topic))
        self.code = code
        self.message = message
