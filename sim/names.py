"""The error for a name that nobody knows, the same for models, GPUs, lengths and scenarios."""

from __future__ import annotations

from collections.abc import Iterable

from shared.errors import StartupError
from shared.process.config_fields import nearest


def unknown_name(problem: str, name: str, known: Iterable[str], besides: str = "") -> StartupError:
    """Return the error that says what is wrong, names the nearest known name if one is near, and lists them all.

    Args:
        problem: how the sentence begins, `the catalogue has no GPU`.
        name: what was asked for.
        known: what there is.
        besides: what else would have been understood, `fixed ones as 512x128`.
    """
    names = list(known)
    close = nearest(name, names)
    hint = f"Did you mean {close}? " if close else ""
    return StartupError(
        f"{problem} '{name[:80]}'", f"{hint}There are {', '.join(names)}{f', and {besides}' if besides else ''}"
    )
