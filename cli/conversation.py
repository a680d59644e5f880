"""What has been said between a person and a model, and the commands by which the person changes how it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final, cast, get_args

from sluice_client.pacer import PaceMode
from sluice_client.params import ChatMessage, ChatParams
from sluice_client.qoe import QoeTarget

MAX_MESSAGES: Final = 100
"""Messages that are sent along; older ones are left out."""
PARAMETERS: Final = {"temperature": float, "top_p": float, "max_tokens": int, "seed": int}
"""Of a request, as the API names them, that a person may choose here; the server knows what each may be."""
PACE_MODES: Final[tuple[PaceMode, ...]] = get_args(PaceMode)
HELP: Final = f"""\
/clear             forget what was said; the system prompt stays
/system [TEXT]     show the system prompt, or change it; /system - takes it away
/set [NAME VALUE]  show or change {", ".join(PARAMETERS)}; /set NAME - leaves it to the model
/pace [MODE]       show or change how text is shown: {", ".join(PACE_MODES)}
/bye               leave; so does Ctrl-D
\"\"\"                begins and ends a message of several lines
Ctrl-C stops an answer; the conversation stays"""


@dataclass(frozen=True, slots=True)
class Pacing:
    """How answers are shown in the terminal."""

    mode: PaceMode = "smooth"
    target: QoeTarget = field(default_factory=QoeTarget)
    """Of the reader: text is shown by it if the mode is `reading`, and QoE is measured against it."""


@dataclass(frozen=True, slots=True)
class Talk:
    """How a conversation is held."""

    pacing: Pacing
    system_prompt: str = ""
    """Empty for none."""
    params: ChatParams = field(default_factory=ChatParams)
    """Of each request, some of `PARAMETERS`; what is not there is the model's own default."""


class Conversation:
    """One, with the newest `MAX_MESSAGES` messages.

    Args:
        talk: how it is held.
    """

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self._messages: list[ChatMessage] = []

    def with_next(self, text: str) -> list[ChatMessage]:
        """Return the messages of a request that goes on with this one of the person's, in OpenAI's format."""
        prompt = self.talk.system_prompt
        before: list[ChatMessage] = [{"role": "system", "content": prompt}] if prompt else []
        said: list[ChatMessage] = [*self._messages, {"role": "user", "content": text}]
        return before + said[-MAX_MESSAGES:]

    def add(self, text: str, answer: str) -> None:
        """Take note of a message and its answer; one that got none is as if it had not been said."""
        if answer:
            self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def obey(self, line: str) -> str:
        """Do what a line that begins with / says; return what to tell the person."""
        name, _, rest = line.partition(" ")
        does = {
            "/help": lambda _: HELP,
            "/?": lambda _: HELP,
            "/clear": self._clear,
            "/system": self._system,
            "/set": self._set,
            "/pace": self._pace,
        }.get(name)
        return f"there is no command {name}; /help shows those there are" if does is None else does(rest.strip())

    def _clear(self, _: str) -> str:
        count = len(self._messages)
        self._messages.clear()
        return f"{count} messages are forgotten"

    def _system(self, text: str) -> str:
        if text:
            self.talk = replace(self.talk, system_prompt="" if text == "-" else text)
        return self.talk.system_prompt or "no system prompt"

    def _set(self, text: str) -> str:
        name, _, value = text.partition(" ")
        params: dict[str, Any] = {**self.talk.params}
        if text:
            if name not in PARAMETERS or not value:
                return f"/set NAME VALUE; NAME is one of {', '.join(PARAMETERS)}"
            try:
                params[name] = PARAMETERS[name](value)
            except ValueError:
                if value != "-":
                    return f"{value} is no value of {name}"
                params.pop(name, None)
            self.talk = replace(self.talk, params=cast("ChatParams", params))
        own = "the model's own"
        return "\n".join(f"{each}: {params.get(each, own)}" for each in PARAMETERS)

    def _pace(self, mode: str) -> str:
        chosen = next((each for each in PACE_MODES if each == mode), None)
        if mode and chosen is None:
            return f"/pace MODE; MODE is one of {', '.join(PACE_MODES)}"
        if chosen is not None:
            self.talk = replace(self.talk, pacing=replace(self.talk.pacing, mode=chosen))
        return self.talk.pacing.mode
