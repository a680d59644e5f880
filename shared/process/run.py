"""One service process: an event loop, the signals that stop it, and its exit code.

    exit code  meaning
    0          stopped as asked (SIGTERM, SIGINT) or done
    1          crashed: logged with its traceback
    2          refused: one line on stderr says what is wrong and what to do; starting again changes nothing

The first SIGTERM or SIGINT sets the stop event: the service drains and returns. After the first SIGINT the second one
kills the process at once, also when its loop is stuck.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

import uvloop

from shared.errors import StartupError
from shared.process.log import flush_log, get_logger

EXIT_DONE: Final = 0
EXIT_CRASHED: Final = 1
EXIT_REFUSED: Final = 2


def run_service(name: str, main: Callable[[asyncio.Event], Awaitable[None]]) -> NoReturn:
    """Run `main(stop)` on a fresh uvloop until it returns, and exit with the code of the table above.

    Args:
        name: of the service, for the log line of a crash.
        main: builds and runs the service; should return soon after the event is set. It may raise `StartupError`
            (also from loading its configuration) until it serves.
    """
    code = EXIT_DONE
    with refusing_start():
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_main_with_signals(main))
        except StartupError:
            raise
        except Exception:  # the edge of the process: logged, and then it ends
            get_logger().exception("crashed", service=name)
            code = EXIT_CRASHED
    flush_log()
    sys.exit(code)


@contextmanager
def refusing_start() -> Iterator[None]:
    """Turn a `StartupError` of the body into its line on stderr and exit code 2."""
    try:
        yield
    except StartupError as error:
        flush_log()
        with suppress(OSError, ValueError, AttributeError):  # stderr may be closed or missing
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
        sys.exit(EXIT_REFUSED)


async def _main_with_signals(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    await main(stop)
