"""A trial of grammars, before any worker gets them: in a child process that forks for each, with limits.

The library lets a grammar of a few hundred bytes take seconds and gigabytes, in its own threads of our process, and
one that nothing matches fails only at the first mask. So a child process has the vocabulary, and for each grammar a
copy of it (a fork, which costs no memory until it writes) compiles and makes the first mask. A copy that takes too
much is killed; its memory is gone with it.

    parent ─length, grammar─► child ─fork─► copy: compile, first mask
           ◄─length, JSON──── child ◄─pipe── outcome, or nothing
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO, Final

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from shared.errors import StartupError
from shared.grammars import GrammarCompiler, GrammarError, open_compiler

CPU_LIMIT_S: Final = 0.5
"""Processor time for one grammar."""
MEMORY_LIMIT_BYTES: Final = 256 * 1024 * 1024
"""Address space that a copy may take beyond what it begins with."""
LENGTH: Final = struct.Struct("<I")
"""Of what follows, in bytes."""
_MAX_REASON_CHARS: Final = 300
_NUM_TOKENS: Final = 16
"""That are taken in a trial."""
_STRIDE: Final = 7919
"""Bytes of a mask between where one and the next is looked for."""
_ONE_OF: Final = "oneOf"


def try_grammar(compiler: GrammarCompiler, text: str) -> dict[str, Any]:
    """Return what came of a grammar: `reason` why it is none, or `coerced` and, if it was GBNF, `grammar` in Lark."""
    converted = text
    if not text.startswith("{"):
        try:
            converted = any_to_lark(text)
        except RecursionError:
            return {"reason": "it is nested too deep"}
        except Exception as error:  # the library raises bare Exception, too
            return {"reason": _sentence(str(error))}
    try:
        matcher = compiler.compile(converted.encode())
    except GrammarError as error:
        return {"reason": _sentence(error.reason)}
    matcher.compute_bitmask()
    if matcher.is_error():
        return {"reason": "no answer can match it"}
    _go_on(matcher)
    if matcher.is_error():
        return {"reason": f"it becomes too large behind its first tokens ({_sentence(matcher.get_error())})"}
    outcome: dict[str, Any] = {"coerced": any(_ONE_OF in warning for warning in matcher.get_grammar_warnings())}
    return outcome if converted == text else {**outcome, "grammar": converted}


def _go_on(matcher: LLMatcher) -> None:
    """Take some tokens that are allowed, from all over the vocabulary: what is large may show behind the first."""
    for step in range(_NUM_TOKENS):
        if matcher.is_stopped():
            return
        mask = matcher.compute_bitmask()
        start = step * _STRIDE % max(len(mask), 1)
        rest = (mask[start:] + mask[:start]).lstrip(b"\0")
        if not rest:
            return
        place = (start + len(mask) - len(rest)) % len(mask)
        matcher.consume_token(8 * place + (rest[0] & -rest[0]).bit_length() - 1)


def _sentence(reason: str) -> str:
    """Return the library's words on one line, without its own state."""
    words = " ".join(reason.partition("<state>")[0].split())
    return "".join(char if char.isprintable() else "?" for char in words[:_MAX_REASON_CHARS])


def _main() -> None:
    """Open the vocabulary, say so, and try what comes until the parent is gone."""
    model_dir, vocab_size, eos_token_id = sys.argv[1:]
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    try:
        compiler = open_compiler(Path(model_dir), int(vocab_size), [int(eos_token_id)])
    except (StartupError, ValueError) as error:
        _send(outgoing, json.dumps({"reason": str(error)[:_MAX_REASON_CHARS]}).encode())
        return
    _send(outgoing, b"{}")
    while head := incoming.read(LENGTH.size):
        text = incoming.read(LENGTH.unpack(head)[0]).decode()
        _send(outgoing, _in_a_copy(compiler, text))


def _send(outgoing: BinaryIO, data: bytes) -> None:
    outgoing.write(LENGTH.pack(len(data)) + data)
    outgoing.flush()


def _in_a_copy(compiler: GrammarCompiler, text: str) -> bytes:
    """Return the outcome as JSON; empty if the copy did not come so far."""
    reading, writing = os.pipe()
    copy = os.fork()
    if copy == 0:
        try:
            os.close(reading)
            _limit_this_process()
            outcome = json.dumps(try_grammar(compiler, text)).encode()
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(outcome)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        outcome = pipe.read()
    _, status = os.waitpid(copy, 0)
    return outcome if status == 0 else b""


def _limit_this_process() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # where the library says that it panics
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # the default action ends the process, whatever it does


if __name__ == "__main__":
    _main()
