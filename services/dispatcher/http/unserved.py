"""What is said of a URL that nothing answers: what to use in its place, or which one was meant. Pure.

    known, not served   /v1/embeddings                  400: the request is in vain, this server is not
    mistaken            /chat/completions, /v1/v1/ws    404 with the path that was meant
    unknown             /v1/nothing                     404

LiteLLM's proxy takes a deployment out for some seconds after one 404, whatever was asked for, and OpenAI's SDKs send
what was answered by 501 twice more: so an embedding that is asked for must be a 400. A base URL that is wrong fails
each request, so there a 404 is right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from services.dispatcher.http.errors import ApiError

SOCKET: Final = "/v1/ws"
_CHAT: Final = "/v1/chat/completions"
_ONLY_TEXT: Final = "this server only generates text."
_STATELESS: Final = f"nothing is kept between requests. Use {_CHAT}, with the whole conversation each time."
_REASONS: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("responses",), f"use {_CHAT}, to which most libraries can be switched."),
    (("messages", "complete"), f"use {_CHAT}, OpenAI's interface, in place of Anthropic's."),
    (("realtime", "live"), f"use the WebSocket {SOCKET}, over which chat is streamed."),
    (("assistants", "threads", "conversations", "vector_stores", "containers"), _STATELESS),
    (("agents", "chatkit", "skills", "vaults"), _STATELESS),
    (
        ("files", "uploads", "batches"),
        f"send each request by itself to {_CHAT}, with 'service_tier': 'flex' where nobody waits for it.",
    ),
    (("embeddings", "moderations", "rerank", "score", "pooling", "classify"), _ONLY_TEXT),
    (("images", "audio", "videos", "content_provenance_checks"), _ONLY_TEXT),
    (("fine_tuning",), "train elsewhere, and start a cluster with what comes of it."),
    (("evals", "decisions"), f"use {_CHAT}, and judge its answers yourself."),
    (
        ("organization", "projects", "safety", "webhook_endpoints", "webhook_event_types"),
        "there is nothing to administer here. Keys and their limits are in the operator's file.",
    ),
)
_REASON_BY_NAME: Final = {name: reason for names, reason in _REASONS for name in names}
"""By the first name behind `/v1`."""
_STORED: Final = ("chat", "completions")


def no_such_url(path: str, served: Iterable[str], *, is_handshake: bool = False) -> ApiError:
    """Return the error for a path that has no route.

    Args:
        path: decoded.
        served: paths that have one.
        is_handshake: of a WebSocket.
    """
    names = [name for name in path.split("/") if name]
    own = [*names]
    while own and own[0] == "v1":
        del own[0]
    if own and own[0] in _REASON_BY_NAME:
        return ApiError(400, "unsupported_url", f"/v1/{own[0]} is not served: {_REASON_BY_NAME[own[0]]}")
    whole = "/" + "/".join(names)
    meant = max((known for known in served if whole.endswith(known.removeprefix("/v1"))), key=len, default="")
    if not meant and tuple(own[:2]) == _STORED:
        return ApiError(400, "unsupported_url", "Answers are not stored here, so there are none to list or change.")
    if is_handshake:
        meant = SOCKET
    hint = f"Did you mean {meant}?" if meant else f"Chat is at {_CHAT}."
    if meant.startswith("/v1/"):
        hint += " A base URL ends in /v1, and has it once."
    return ApiError(404, "unknown_url", f"There is nothing at this URL. {hint}")


def wrong_method(allowed: Iterable[str], *, is_handshake: bool = False) -> ApiError:
    """Return the error for a path that has a route, but none by this method."""
    methods = ", ".join(allowed)
    hint = f" A WebSocket is opened at {SOCKET}." if is_handshake else ""
    return ApiError(405, "method_not_allowed", f"Use {methods} here.{hint}", headers={"Allow": methods})
