"""The tools of a request: what the model may call, and whether it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    definition: Mapping[str, Any]
    """As a chat template reads it: `{"type": "function", "function": {"name": …, "parameters": …}}`."""
    is_strict: bool = False
    """The arguments of a call have to match the schema."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema of the arguments."""
        schema: Mapping[str, Any] = self.definition["function"]["parameters"]
        return schema


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools, unless it has none or forbids to call them."""

    tools: Sequence[Tool]
    """At least one."""
    is_required: bool = False
    """The answer is one call at least."""
    named: str | None = None
    """The only one that may be called; required then."""
    is_parallel: bool = True
    """An answer may have several calls."""

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called."""
        return [tool for tool in self.tools if self.named in (None, tool.name)]

    def definitions(self) -> list[Mapping[str, Any]]:
        """Return all tools as a chat template reads them."""
        return [tool.definition for tool in self.tools]
