"""Clients that are tried, where they are installed, and what is tried with each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
ENVIRONMENTS: Final = ROOT / ".venv-clients"
RECIPES: Final = ROOT / ".venv-recipes"
PROXY_ENVIRONMENT: Final = ENVIRONMENTS / "proxy"
PROGRAMS: Final = "tests.clients.programs"

ABILITIES: Final = {
    "models": "list of models",
    "chat": "chat, with instructions",
    "stream": "stream, equal to the whole",
    "usage": "usage in a stream",
    "choices": "`n` = 2",
    "logprobs": "log-probabilities",
    "stop": "stop strings",
    "refusal": "a 400 is a typed error with our sentence",
    "unserved": "so is a path not served; chat goes on",
    "retry": "tried again after a 429",
    "timeout": "its own time limit is a typed error",
    "cancel": "a stream left ends the work",
    "thinking": "thinking apart",
    "thinking_stream": "thinking apart in a stream",
    "thinking_off": "thinking switched off",
    "history": "a talk goes on behind thoughts",
    "tools_auto": "tools, `auto`",
    "tools_required": "tools, `required`",
    "tools_named": "tools, a named one",
    "tools_stream": "tool calls in a stream",
    "tool_loop": "a call, its result, an answer",
    "json_schema": "JSON by a schema",
    "json_object": "any JSON object",
    "parse": "typed objects (`parse` and the like)",
    "stream_helper": "its own events of a stream",
}
"""Key of each ability, and what the table calls it."""


@dataclass(frozen=True, slots=True)
class ClientProgram:
    """A client, and the program that tries it."""

    name: str
    """As the table has it."""
    environment: Path
    program: str
    """Module, or file of JavaScript, in `PROGRAMS`."""
    is_quick: bool = True
    """In CI; the others need environments that take longer to make."""
    by_proxy: bool = False

    @property
    def requirements(self) -> str:
        """What is installed, with versions."""
        name = "package.json" if self.program.endswith(".mjs") else "requirements.txt"
        if self.environment == RECIPES:
            return (ROOT / "tests" / "recipes" / name).read_text(encoding="utf-8")
        folder = Path(__file__).parent / "requirements"
        return (folder / f"{self.environment.name}.txt").read_text(encoding="utf-8")

    @property
    def version(self) -> str:
        """Of the client's own package."""
        package = re.escape(self.name.split()[0].strip("`"))
        found = re.search(rf'^\s*"?{package}(?:==|": ")([0-9.]+)', self.requirements, re.MULTILINE)
        assert found is not None, f"{package} is not pinned"
        return found[1]


_AGENTS: Final = ENVIRONMENTS / "agents"
CLIENTS: Final = (
    ClientProgram("openai 2", RECIPES, "openai_sdk"),
    ClientProgram("openai 3", _AGENTS, "openai_sdk"),
    ClientProgram("openai (Node)", RECIPES, "openai_node.mjs"),
    ClientProgram("ai (Vercel)", RECIPES, "ai_sdk.mjs"),
    ClientProgram("langchain-openai", RECIPES, "langchain_chat"),
    ClientProgram("llama-index-llms-openai-like", RECIPES, "llama_index_chat"),
    ClientProgram("litellm", RECIPES, "litellm_sdk"),
    ClientProgram("litellm (proxy)", PROXY_ENVIRONMENT, "openai_sdk", is_quick=False, by_proxy=True),
    ClientProgram("instructor", ENVIRONMENTS / "instructor", "instructor_chat"),
    ClientProgram("pydantic-ai-slim", _AGENTS, "pydantic_ai_agent"),
    ClientProgram("openai-agents", _AGENTS, "openai_agents"),
)
