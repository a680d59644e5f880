"""Asks the planner that is in charge to drop or to restore, and says what became of it."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from typing import Any, Final

from cli.cluster.broker import named_broker
from cli.cluster.settings import load_bus_settings
from cli.exit_codes import FAILED, UNREACHABLE, CommandError
from shared.reading import parse_json
from shared.subjects import Subjects
from shared.transport.bus import Bus, BusError, BusTimeoutError, Message

LOOK_S: Final = 0.5
"""In which every planner has said that it is there."""
ASK_LIMIT_S: Final = 5.0


async def run_verb(
    verb: str, question: Mapping[str, Any], flags: Mapping[str, Any], *, limit_s: float, as_json: bool
) -> str:
    """Return what to print.

    Args:
        verb: `drop` or `restore`.
        question: as the planner's endpoint takes it.
        flags: where the broker is.
        limit_s: seconds to wait for the answer.
        as_json: print it as it is.

    Raises:
        StartupError: there is no broker, or it lets nobody in.
        CommandError: nobody is in charge, or it was not done; says why.
    """
    settings = load_bus_settings(flags)
    async with named_broker(settings).connect(verb) as bus:
        answer = await ask_planner(bus, Subjects(settings.cluster), verb, question, limit_s)
    return json.dumps(answer) if as_json else describe(answer)


async def run_planner(flags: Mapping[str, Any], *, as_json: bool) -> str:
    """Return what the planner in charge decided last, and how many instances it wants.

    Raises:
        StartupError: there is no broker, or it lets nobody in.
        CommandError: nobody is in charge.
    """
    settings = load_bus_settings(flags)
    async with named_broker(settings).connect("planner-status") as bus:
        name, answer = await _find_planner(bus, Subjects(settings.cluster))
    return json.dumps(answer) if as_json else describe_decision(name, answer)


async def ask_planner(
    bus: Bus, subjects: Subjects, verb: str, question: Mapping[str, Any], limit_s: float
) -> dict[str, Any]:
    """Return the answer of the planner that is in charge, once it is done.

    Raises:
        CommandError: nobody is in charge, or it was not done; says why.
    """
    name, _ = await _find_planner(bus, subjects)
    subject = subjects.admin("planner", name, verb)
    try:
        data = await bus.request(subject, json.dumps(question).encode(), timeout_s=limit_s)
    except BusTimeoutError:
        hint = "The planner goes on with it: see `sluice status`, or allow more with --timeout"
        raise CommandError(f"the {verb} was not over within {limit_s:g} s", hint, FAILED) from None
    except BusError as error:
        hint = "Use the planner of the same version"
        raise CommandError(f"planner '{name}' cannot be asked to {verb}: {error}", hint, FAILED) from error
    answer = _read(data, name)
    if not answer["done"]:
        raise CommandError(f"no {verb}: {answer['reason']}", "", FAILED)
    return answer


def describe(answer: Mapping[str, Any]) -> str:
    """Return what was done, in one line."""
    groups = ["+".join(map(str, group)) for group in answer["groups"]]
    what = ", ".join(groups)
    return f"{what} in {answer['latency_s']:.3f} s (plan {answer['plan_id']}): {answer['reason']}"


def describe_decision(name: str, answer: Mapping[str, Any]) -> str:
    """Return what a planner says of itself, in one line, and in a second one what instances it wants."""
    lines = [f"{name}, epoch {answer.get('epoch')}: {answer.get('situation') or 'waiting'}: {answer.get('reason')}"]
    if answer.get("instances_wanted") is not None:
        lines.append(f"instances: {answer.get('instances_reason')}")
    return "\n".join(lines)


async def _find_planner(bus: Bus, subjects: Subjects) -> tuple[str, dict[str, Any]]:
    """Return the id of the planner that nobody has superseded, and what it says of itself."""
    names = await _planners(bus, subjects.cluster)
    for name in names:
        try:
            data = await bus.request(subjects.admin("planner", name, "plan"), b"", timeout_s=ASK_LIMIT_S)
            answer: dict[str, Any] = parse_json(data)
            if not answer.get("superseded", False):
                return name, answer
        except (BusError, ValueError, AttributeError):
            continue
    if names:
        hint = "Start it anew: the newest planner is in charge"
        raise CommandError(f"no planner of cluster '{subjects.cluster}' is in charge", hint, UNREACHABLE, "no_planner")
    hint = "`nats micro ls` shows who is there; name another cluster with --cluster"
    raise CommandError(f"no planner answers in cluster '{subjects.cluster}'", hint, UNREACHABLE, "no_planner")


async def _planners(bus: Bus, cluster: str) -> list[str]:
    """Return the ids of the cluster's planners, sorted."""
    names: dict[str, None] = {}

    def take(message: Message) -> None:
        try:
            fields = parse_json(message.data)
            if fields["metadata"]["cluster"] == cluster:
                names[str(fields["id"])] = None
        except (ValueError, KeyError, TypeError):  # no answer of ours
            return

    inbox = f"_INBOX.sluice-{secrets.token_hex(8)}"
    listening = await bus.subscribe(inbox, take)
    try:
        await bus.publish("$SRV.INFO.sluice-planner", b"", reply=inbox)
        await asyncio.sleep(LOOK_S)
    finally:
        await listening.close()
    return sorted(names)


def _read(data: bytes, name: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = parse_json(data)
        missing = {"done", "reason", "plan_id", "groups", "latency_s"} - set(answer)
    except (ValueError, TypeError) as error:
        raise CommandError(f"planner '{name}' answers in an unknown way", "Use the `sluice` of its version") from error
    if missing:
        raise CommandError(f"planner '{name}' answers in an unknown way", "Use the `sluice` of its version")
    return answer
