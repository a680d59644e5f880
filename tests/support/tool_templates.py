"""Chat templates of the families that call tools, written for tests: what each reads of tools and of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from tests.support.text_models import byte_level_json

_END: Final = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_HEAD: Final = (
    "{% if tools %}<|im_start|>system\nYou may call:\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "</tools> as <tool_call>\n{"
    '"name": …, "arguments": …'
    "}\n</tool_call><|im_end|>\n{% endif %}"
)


def _chatml(call: str) -> str:
    return (
        _HEAD + "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
        "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        "{% for c in m.tool_calls %}{% set c = c.function %}" + call + "{% endfor %}{% endif %}<|im_end|>\n"
        "{% endif %}{% endfor %}" + _END
    )


_OPEN: Final = '\n<tool_call>\n{"name": "{{ c.name }}", "arguments": '
HERMES: Final = _chatml(_OPEN + "{{ c.arguments | tojson }}}\n</tool_call>")
"""Wants the value of the arguments, as Qwen2.5's does."""
EITHER: Final = _chatml(
    _OPEN
    + "{% if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}}\n</tool_call>"
)
"""Takes both, as Qwen3's does."""
ITEMS: Final = _chatml(
    "\n<tool_call>{{ c.name }}{% for k, v in c.arguments.items() %}\n{{ k }}={{ v }}{% endfor %}</tool_call>"
)
"""Goes through the members of the arguments."""
LLAMA: Final = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>ipython\n{{ m.content | tojson }}<|im_end|>\n"
    "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}<|im_start|>assistant\n"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{% if tools and m.role == 'user' and loop.first %}"
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}" + _END
)
"""Takes one call in a message, and writes no content beside it."""
MISTRAL: Final = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == asked[-1] %}[AVAILABLE_TOOLS]"
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ c.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]{% elif m.role == 'tool' %}[TOOL_RESULTS]"
    "{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)
NULLS: Final = (
    "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}"
    "[ARGS]{{ c.function.arguments }}{% endfor %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{{ tools }}"
)
"""Writes calls as the text that they are, and only where there is no content."""
PHI: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if tools and loop.first %}<|tool|>"
    "{{ tools | tojson }}<|/tool|>{% endif %}{% if m.tool_calls %}<|tool_call|>[{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]<|/tool_call|>{% endif %}<|im_end|>\n"
    "{% endfor %}" + _END
)
TEMPLATES: Final = {
    "hermes": HERMES,
    "either": EITHER,
    "items": ITEMS,
    "llama3": LLAMA,
    "mistral": MISTRAL,
    "nulls": NULLS,
    "phi": PHI,
}
TAGS: Final = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<|tool_call|>", "<|/tool_call|>"),
)
ADD: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": 'Adds "two" numbers: é < 🦊',
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number", "description": "of <b>"}},
            "required": ["a", "b"],
        },
    },
}


def tool_json(special: Sequence[str] = (), plain: Sequence[str] = ()) -> str:
    """A byte-level BPE with a token for each of these tags, special or not."""
    tokenizer = Tokenizer.from_str(byte_level_json())
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in special])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in plain])
    return str(tokenizer.to_str())
