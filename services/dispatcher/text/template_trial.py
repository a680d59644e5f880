"""A trial of the model's chat template, before this process compiles it: in a child with limits of time and memory.

Jinja's sandbox keeps a template from our objects, not from the processor: nested loops run for days, and
`'a' * 10 ** 9` is computed while the template is compiled. Neither can be stopped in a thread. So a child process
renders conversations of growing length; what it manages in good time is what this model's template may be given.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

from services.dispatcher.text.template import MAX_MESSAGES, ChatTemplate, TemplateRefusalError
from shared.errors import StartupError

CPU_LIMIT_S: Final = 1.0
"""Processor time for all conversations together."""
MEMORY_LIMIT_BYTES: Final = 512 * 1024 * 1024
"""Address space of the child, its interpreter included."""
WALL_LIMIT_S: Final = 60.0
"""For the whole child: a machine that is that busy cannot serve either."""
LENGTHS: Final = (9, 99, 999, 9999)
"""Messages of each conversation; odd, because many templates want the user to have the last word."""
_EXIT_MEMORY: Final = 3
_TEXT: Final = "Once upon a time a little fox lived in the woods, and every day the fox went down to the river. "
_ROOT: Final = Path(__file__).parents[3]


@lru_cache(maxsize=16)
def find_max_messages(source: str, special_tokens: tuple[tuple[str, str], ...], name: str) -> int:
    """Return how many messages the template may be given.

    Args:
        source: Jinja.
        special_tokens: variables such as `bos_token`.
        name: of the template, for the error.

    Raises:
        StartupError: it takes too much for a short conversation already.
    """
    command = [sys.executable, "-m", "services.dispatcher.text.template_trial"]
    task = json.dumps({"source": source, "special_tokens": dict(special_tokens)})
    try:
        child = subprocess.run(  # noqa: S603  our own module
            command, input=task, cwd=_ROOT, capture_output=True, text=True, timeout=WALL_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _unusable(name, f"did not end within {WALL_LIMIT_S:g} s") from None
    if child.returncode == 0:
        return MAX_MESSAGES
    if child.returncode > 0 and child.returncode != _EXIT_MEMORY:
        reason = child.stderr.strip().rpartition("\n")[2][:200]
        raise _unusable(name, f"could not be tried ({reason or f'exit code {child.returncode}'})")
    done = child.stdout.split()
    if not done:
        limits = f"{CPU_LIMIT_S:g} s and {MEMORY_LIMIT_BYTES // 2**20} MiB"
        raise _unusable(name, f"takes more than {limits} for {LENGTHS[0]} messages")
    return int(done[-1])


def _unusable(name: str, reason: str) -> StartupError:
    return StartupError(f"the chat template in {name} {reason}", "Use the template that the model was published with")


def _main() -> None:
    """Read the template from stdin, and write each length that it managed; killed, or `_EXIT_MEMORY`, at a limit."""
    task = json.load(sys.stdin)
    _limit_this_process()
    try:
        _render_all(task["source"], task["special_tokens"])
    except MemoryError:
        sys.exit(_EXIT_MEMORY)
    except StartupError:
        pass  # not a template: the parent says so when it compiles it


def _limit_this_process() -> None:
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        with suppress(ValueError, OSError):  # macOS has no limit of this kind
            resource.setrlimit(kind, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # the default action ends the process, whatever it does


def _render_all(source: str, special_tokens: Mapping[str, str]) -> None:
    template = ChatTemplate(source, special_tokens)
    for length in LENGTHS:
        talk = [{"role": ("user", "assistant")[index % 2], "content": _TEXT} for index in range(length)]
        for said in (talk, talk[:-1]):  # a guard's template wants the assistant to have the last word
            with suppress(TemplateRefusalError):  # it says no, which costs nothing
                template.render(template.in_form(said, add_generation_prompt=True))
                break
        print(length, flush=True)


if __name__ == "__main__":
    _main()
