"""What the clients talk with: a cluster with a small random model, a server that is busy at first, and LiteLLM's proxy.

The model knows nothing, and can all the same do what is tried: thinking is opened by its template and closed by a
budget, and what must be a call or JSON is held to a grammar.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from services.dispatcher.http.errors import error_bytes, failure_error
from services.dispatcher.session.request import FailureCode
from tests.clients.catalogue import PROXY_ENVIRONMENT
from tests.clients.programs.trying import KEY, MODEL
from tests.support.cluster import cluster
from tests.support.ports import free_port

TEMPLATE: Final = """\
{%- if tools %}<|im_start|>system
Call a tool by <tool_call>{"name": …, "arguments": …}</tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% else %}<think>

</think>

{% endif %}{% endif %}"""
"""In the manner of Qwen3's, with thinking off unless it is asked for."""
_SEED: Final = 3
"""Of the weights: its likeliest answer to the question is long, and changes on its way."""
_START_LIMIT_S: Final = 90.0


@dataclass(frozen=True, slots=True)
class Served:
    """Where things are asked."""

    cluster: str
    busy: str
    """Base URLs of the server that is busy at first begin so; each name behind it has a first request of its own."""


def write_model(folder: Path) -> Path:
    """Write a model whose tokenizer has every byte and the tags, and return its folder."""
    from tokenizers import Tokenizer  # loads torch and transformers, which the table does not need

    from tests.support.checkpoints import CheckpointShape, build_model
    from tests.support.text_models import thinking_json, write_model_folder

    source = thinking_json()
    tokenizer = Tokenizer.from_str(source)
    end = tokenizer.token_to_id("<|im_end|>")
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    shape = CheckpointShape(vocab_size=size, max_positions=8192, seed=_SEED, extra={"eos_token_id": end})
    write_model_folder(folder, source, template=TEMPLATE)
    build_model(shape).save_pretrained(folder)
    return folder


@contextmanager
def serving() -> Iterator[Served]:
    """Run the cluster, and the server that is busy at first."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model(Path(folder) / MODEL))
        own = ("--model", model, "--memory", "256MiB", "--threads", "1", "--deterministic")
        with cluster(*own) as found, _busy(found.url) as busy:
            yield Served(found.url, busy)


@contextmanager
def _busy(cluster_url: str) -> Iterator[str]:
    """Run a server that refuses the first request to each path, as a dispatcher with a full queue does."""
    seen: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            name, _, path = self.path.removeprefix("/").partition("/")
            self.close_connection = True
            if name not in seen:
                seen.add(name)
                self.wfile.write(error_bytes(failure_error(FailureCode.QUEUE_FULL), "req_busy"))
                return
            asked = urllib.request.Request(f"{cluster_url}/{path}", body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(asked) as answer:
                    status, answered = answer.status, answer.read()
            except urllib.error.HTTPError as error:
                status, answered = error.code, error.read()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answered)))
            self.end_headers()
            self.wfile.write(answered)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the library's name
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def proxy(served: Served) -> Iterator[str]:
    """Run LiteLLM's proxy in front of the cluster, and give the URL of its interface."""
    port = free_port()
    params = {"model": f"openai/{MODEL}", "api_base": f"{served.cluster}/v1", "api_key": KEY}
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "config.json", Path(folder) / "log"  # JSON is YAML, too
        config.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": params}]}))
        program = str(PROXY_ENVIRONMENT / "bin" / "litellm")
        argv = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        env = {
            "PATH": "/usr/bin:/bin",
            "HOME": folder,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MASTER_KEY": KEY,
        }
        with log.open("w") as written:
            process = subprocess.Popen(argv, cwd=folder, env=env, stdout=written, stderr=subprocess.STDOUT)
        try:
            _wait_for(f"{url}/health/liveliness", process, log)
            yield f"{url}/v1"
        finally:
            process.terminate()
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            urllib.request.urlopen(url).close()
        except OSError:
            is_late = time.monotonic() > end_s or process.poll() is not None
            assert not is_late, f"the proxy does not start:\n{log.read_text()[-4000:]}"
            time.sleep(0.2)
        else:
            return
