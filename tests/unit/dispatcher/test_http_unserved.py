"""What is said of URLs that nothing answers: by hand, and as a library and LiteLLM's router take it."""

from __future__ import annotations

import re
from pathlib import Path

import openai
import pytest

from services.dispatcher.http.unserved import no_such_url, wrong_method

SERVED = [
    *("/v1/chat/completions", "/v1/completions", "/v1/tokenize", "/tokenize", "/v1/ws", "/v1/models", "/v1/requests"),
    *("/live", "/health", "/metrics"),
]
OPENAI = [
    *("/v1/responses", "/v1/responses/resp_1/cancel", "/v1/conversations", "/v1/embeddings", "/v1/images/generations"),
    *("/v1/images/edits", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/files", "/v1/files/file-1/content"),
    *("/v1/uploads", "/v1/batches", "/v1/batches/batch_1", "/v1/fine_tuning/jobs", "/v1/assistants", "/v1/threads"),
    *("/v1/threads/t/messages", "/v1/vector_stores", "/v1/containers", "/v1/moderations", "/v1/realtime", "/v1/videos"),
    *("/v1/realtime/sessions", "/v1/evals", "/v1/chat/completions/chatcmpl-1", "/v1/chat/completions/c/messages"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/complete"),
    *("/v1/rerank", "/v1/score", "/v1/pooling", "/v1/classify", "/rerank", "/embeddings", "/v1/v1/responses"),
]
MEANT = {
    "/chat/completions": "/v1/chat/completions",
    "/v1/v1/chat/completions": "/v1/chat/completions",
    "/v1/chat/completions/": "/v1/chat/completions",
    "//v1/chat/completions": "/v1/chat/completions",
    "/v1/chat/completions/chat/completions": "/v1/chat/completions",
    "/openai/deployments/tiny/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/models": "/v1/models",
    "/api/v1/models/": "/v1/models",
    "/ws": "/v1/ws",
    "/api/tokenize": "/v1/tokenize",
    "/v1/health": "/health",
}


@pytest.mark.parametrize("path", OPENAI)
def test_what_others_serve_is_a_400_that_says_what_to_do(path: str) -> None:
    error = no_such_url(path, SERVED)
    assert (error.status, error.code, error.type) == (400, "unsupported_url", "invalid_request_error")
    assert "not served" in error.message or "not stored" in error.message


def test_each_path_of_openai_s_package_is_served_or_known() -> None:
    sources = (Path(openai.__file__).parent / "resources").rglob("*.py")
    paths = {path for source in sources for path in re.findall(r'"(/[a-z_]+[^"\s]*)"', source.read_text())}
    assert len(paths) > 100
    paths = {path.removeprefix("/v1").partition("?")[0] for path in paths}
    unknown = {path for path in paths if no_such_url(f"/v1{path}", SERVED).code != "unsupported_url"}
    assert unknown == {"/chat/completions", "/completions", "/models", "/models/{model}"}, "which have a route"


@pytest.mark.parametrize(("path", "meant"), MEANT.items())
def test_a_path_that_is_nearly_right_is_a_404_that_names_the_right_one(path: str, meant: str) -> None:
    error = no_such_url(path, SERVED)
    assert (error.status, error.code) == (404, "unknown_url")
    assert f"Did you mean {meant}?" in error.message
    assert ("A base URL ends in /v1" in error.message) == meant.startswith("/v1/")


@pytest.mark.parametrize("path", ["/", "", "/v1", "/v1/", "/v1/nothing", "/v1/chat", "/completions/x", "/" * 8000])
def test_of_any_other_path_it_is_said_where_chat_is(path: str) -> None:
    error = no_such_url(path, SERVED)
    assert (error.status, error.code) == (404, "unknown_url")
    assert error.message.endswith("Chat is at /v1/chat/completions.")


def test_a_handshake_is_told_where_the_websocket_is() -> None:
    assert "Did you mean /v1/ws?" in no_such_url("/chat", SERVED, is_handshake=True).message
    assert "/v1/ws" in no_such_url("/v1/realtime", SERVED, is_handshake=True).message
    error = wrong_method(["POST"], is_handshake=True)
    assert (error.status, error.headers) == (405, {"Allow": "POST"})
    assert error.message == "Use POST here. A WebSocket is opened at /v1/ws."
    assert wrong_method(["GET", "HEAD"]).message == "Use GET, HEAD here."
