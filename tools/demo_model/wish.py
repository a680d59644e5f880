"""What a wish consists of. Every string is a template (`template.py`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trouble:
    """One way for a wish to fail, and its remedy.

    Attributes:
        text: a sentence that starts with "But".
        tool: the noun of the thing that helps.
        remedy: a sentence in which hero and friend ("they") use the tool.
    """

    text: str
    tool: str
    remedy: str


@dataclass(frozen=True)
class Wish:
    """A wish and the middle of every story about it.

    Attributes:
        to: what follows "wanted to"; unique.
        dream: a sentence on why the hero wants it.
        attempt: a sentence on the first try, after "One sunny morning ".
        troubles: one of them happens.
        joy: the sentence when it works out.
    """

    to: str
    dream: str
    attempt: str
    troubles: tuple[Trouble, ...]
    joy: str
