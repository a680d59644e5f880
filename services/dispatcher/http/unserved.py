"""What is said of a URL that nothing answers: what to use in its place, or which one was meant. Pure.

    known, not served   /v1/embeddings                  400: the request is in vain, this server is not
    mistaken            /chat/completions, /v1/v1/ws    404 with the path that was meant
    unknown             /v1/nothing                     404

LiteLLM's router takes a deployment out for a while after 401, 402, 404, 408, 429 and all from 500 on, and the SDKs of
OpenAI send what was answered by 501 twice more: so one embedding that is asked for must be a 400. A base URL that is
wrong fails whatever is asked, so there a 404 is right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from services.dispatcher.http.errors import ApiError

SOCKET: Final = "/v1/ws"
_CHAT: Final = "Use /v1/chat/completions"
_STATELESS: Final = f"are not served: nothing is kept between requests. {_CHAT}, with the whole conversation each time."
_ONLY_TEXT: Final = "this server only generates text."
_ONE_BY_ONE: Final = (
    f"are not served. {_CHAT} for each request by itself, with 'service_tier': 'flex' where nobody waits for it."
)
_SENTENCES: Final[dict[str, str]] = {
    "responses": f"Responses are not served. {_CHAT}, to which most libraries can be switched.",
    "conversations": f"Conversations {_STATELESS}",
    "assistants": f"Assistants {_STATELESS}",
    "threads": f"Threads {_STATELESS}",
    "vector_stores": f"Vector stores {_STATELESS}",
    "containers": f"Containers {_STATELESS}",
    "messages": f"Anthropic's messages are not served. {_CHAT}, OpenAI's interface, in their place.",
    "complete": f"Anthropic's completions are not served. {_CHAT}, OpenAI's interface, in their place.",
    "realtime": "Realtime sessions are not served. Use the WebSocket /v1/ws, over which chat is streamed.",
    "files": f"Files {_ONE_BY_ONE}",
    "uploads": f"Uploads {_ONE_BY_ONE}",
    "batches": f"Batches {_ONE_BY_ONE}",
    "embeddings": f"Embeddings are not served: {_ONLY_TEXT}",
    "images": f"Images are not served: {_ONLY_TEXT}",
    "audio": f"Speech and transcriptions are not served: {_ONLY_TEXT}",
    "videos": f"Videos are not served: {_ONLY_TEXT}",
    "moderations": f"Moderations are not served: {_ONLY_TEXT}",
    "rerank": f"Reranking is not served: {_ONLY_TEXT}",
    "score": f"Scores are not served: {_ONLY_TEXT}",
    "pooling": f"Pooling is not served: {_ONLY_TEXT}",
    "classify": f"Classification is not served: {_ONLY_TEXT}",
    "fine_tuning": "Fine-tuning is not served. Train elsewhere, and start a cluster with what comes of it.",
    "evals": f"Evaluations are not served. {_CHAT}, and judge its answers yourself.",
}
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
    if own and own[0] in _SENTENCES:
        return ApiError(400, "unsupported_url", _SENTENCES[own[0]])
    whole = "/" + "/".join(names)
    meant = max((known for known in served if whole.endswith(known.removeprefix("/v1"))), key=len, default="")
    if not meant and tuple(own[:2]) == _STORED:
        return ApiError(400, "unsupported_url", "Answers are not stored here, so there are none to list or change.")
    if is_handshake:
        meant = SOCKET
    hint = f"Did you mean {meant}?" if meant else "Chat is at /v1/chat/completions."
    if meant.startswith("/v1/"):
        hint += " A base URL ends in /v1, and has it once."
    return ApiError(404, "unknown_url", f"There is nothing at this URL. {hint}")


def wrong_method(allowed: Iterable[str], *, is_handshake: bool = False) -> ApiError:
    """Return the error for a path that has a route, but none by this method."""
    methods = ", ".join(allowed)
    hint = f" A WebSocket is opened at {SOCKET}." if is_handshake else ""
    return ApiError(405, "method_not_allowed", f"Use {methods} here.{hint}", headers={"Allow": methods})
