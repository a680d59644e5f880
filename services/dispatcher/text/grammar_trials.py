"""Grammars that wait for their trial: the child process that tries them, whose turn it is, and what is known already.

One is tried at a time, and tenants take turns, so that nobody's costly ones hold up another's for longer than one
takes. What came of a grammar is remembered by its digest: an agent's schema is tried once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from services.dispatcher.text.grammar_trial import LENGTH
from shared.process.log import get_logger

MAX_WAITING: Final = 64
"""Grammars that wait, of all tenants."""
MAX_TENANT_WAITING: Final = 16
"""Of them, those of one tenant."""
MAX_KNOWN: Final = 256
"""Grammars of which it is remembered what came of them; the one that was asked for longest ago is forgotten first."""
WALL_LIMIT_S: Final = 30.0
"""For one grammar, or the start of the child: a machine that is that busy answers nobody in time."""
CHILD: Final = ("-m", "services.dispatcher.text.grammar_trial")
"""What the interpreter runs."""
_ROOT: Final = Path(__file__).parents[3]

_log = get_logger()


class TrialsFullError(Exception):
    """As many grammars wait as may; the caller answers 429."""


class NoTrialsError(Exception):
    """No grammar can be tried over this model's vocabulary; the text says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a grammar."""

    reason: str = ""
    """Why it is none, in the library's words; empty: it compiles, and something matches it."""
    is_costly: bool = False
    """It took too much time or memory."""
    is_coerced: bool = False
    """Its `oneOf` is taken as `anyOf`."""
    converted: bytes | None = None
    """It in words that workers understand; None: they understand it as it is."""


class _ChildLostError(Exception):
    """The child ended, or did not answer."""


class GrammarTrials:
    """The only owner of the child process, which starts with the first grammar.

    Args:
        model_dir: the model's folder.
        vocab_size: of the model.
        eos_token_id: an end token of the model.
    """

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_id: int) -> None:
        self._arguments = (str(model_dir.absolute()), str(vocab_size), str(eos_token_id))
        self._child: asyncio.subprocess.Process | None = None
        self._lines: OrderedDict[str, deque[bytes]] = OrderedDict()
        self._pending: dict[bytes, asyncio.Future[Verdict]] = {}
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._has_some = asyncio.Event()
        self._hopeless: NoTrialsError | None = None

    async def verdict(self, grammar: bytes, tenant: str) -> Verdict:
        """Return what came of the grammar, in this trial or an earlier one.

        Args:
            grammar: as llguidance takes it, or GBNF.
            tenant: who waits for it.

        Raises:
            TrialsFullError: nothing was started.
            NoTrialsError: nothing can be tried.
        """
        if self._hopeless is not None:
            raise self._hopeless
        digest = sha256(grammar).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
            return self._known[digest]
        future = self._pending.get(digest)
        if future is None:
            future = self._enter(digest, grammar, tenant)
        return await asyncio.shield(future)

    def _enter(self, digest: bytes, grammar: bytes, tenant: str) -> asyncio.Future[Verdict]:
        line = self._lines.get(tenant, ())
        if len(line) >= MAX_TENANT_WAITING or sum(map(len, self._lines.values())) >= MAX_WAITING:
            raise TrialsFullError
        self._lines.setdefault(tenant, deque()).append(grammar)
        future = self._pending[digest] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_look_at)
        self._has_some.set()
        return future

    async def run_forever(self) -> None:
        """Try what waits, one after the other; a task of the dispatcher. The child ends with it."""
        try:
            while True:
                await self._has_some.wait()
                await self._settle(self._next())
        finally:
            for future in self._pending.values():
                future.set_exception(TrialsFullError())
            await self._end_child()

    def _next(self) -> bytes:
        """Return the next tenant's next grammar; the tenant goes behind the others."""
        tenant, line = self._lines.popitem(last=False)
        grammar = line.popleft()
        if line:
            self._lines[tenant] = line
        elif not self._lines:
            self._has_some.clear()
        return grammar

    async def _settle(self, grammar: bytes) -> None:
        digest = sha256(grammar).digest()
        try:
            verdict = await self._try(grammar)
        except (NoTrialsError, TrialsFullError) as error:
            self._pending.pop(digest).set_exception(error)
            return
        self._known[digest] = verdict
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        self._pending.pop(digest).set_result(verdict)

    async def _try(self, grammar: bytes) -> Verdict:
        for _ in range(2):  # a child may have ended since the last one, by somebody else's hand
            try:
                outcome = await self._ask(grammar)
            except _ChildLostError:
                _log.warning("grammar_trial_lost", meaning="the process that tries grammars ended; another one starts")
                await self._end_child()
                continue
            if outcome is None:
                return Verdict(is_costly=True)
            converted = outcome.get("grammar")
            return Verdict(
                reason=outcome.get("reason", ""),
                is_coerced=outcome.get("coerced", False),
                converted=None if converted is None else converted.encode(),
            )
        raise TrialsFullError

    async def _ask(self, grammar: bytes) -> dict[str, Any] | None:
        """Return the outcome; None if the trial took too much."""
        child = self._child
        if child is None or child.returncode is not None:
            child = await self._start()
        assert child.stdin is not None, "it has a pipe"
        child.stdin.write(LENGTH.pack(len(grammar)) + grammar)
        data = await self._read(child)
        return json.loads(data) if data else None

    async def _start(self) -> asyncio.subprocess.Process:
        child = self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, *CHILD, *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=_ROOT,
            env={},  # there are passwords in ours
            start_new_session=True,
        )
        greeting = json.loads(await self._read(child))
        if "reason" in greeting:
            await self._end_child()
            self._hopeless = NoTrialsError(greeting["reason"])
            _log.warning("no_grammars", reason=greeting["reason"], meaning="requests for answers of a form are refused")
            raise self._hopeless
        return child

    async def _read(self, child: asyncio.subprocess.Process) -> bytes:
        assert child.stdout is not None, "it has a pipe"
        try:
            async with asyncio.timeout(WALL_LIMIT_S):
                (size,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
                return await child.stdout.readexactly(size)
        except (asyncio.IncompleteReadError, TimeoutError, OSError):
            raise _ChildLostError from None

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.communicate()


def _look_at(future: asyncio.Future[Verdict]) -> None:
    """Note the outcome as seen: whoever waited may be gone."""
    if not future.cancelled():
        future.exception()
