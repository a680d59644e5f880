"""Stand-ins for the services, so that `sluice up` can be tested by itself: real processes, no model.

Each logs one line when it is ready and one when it was told to stop, into the file named by `TRACE`. The one that
`REFUSES` names would not start; the others say nothing for a minute then.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_COMMON = """
import os, signal, sys, time

def flag(name):
    return sys.argv[sys.argv.index(name) + 1]

def trace(text):
    with open(os.environ["TRACE"], "a") as file:
        file.write(f"{flag('--instance-id')} {text}\\n")

def stop(*_):
    trace("asked")
    time.sleep(float(os.environ.get("STOP_S", "0")))
    trace("ended")
    os._exit(0)

signal.signal(signal.SIGTERM, stop)

if "--check-only" in sys.argv:
    if os.environ.get("REFUSES") == flag("--instance-id"):
        sys.stderr.write("sluice: not with these settings. Use others\\n")
        sys.exit(2)
    time.sleep(60 if "REFUSES" in os.environ else 0)
    sys.exit(0)
"""

_PLAIN = """
from services.common import trace
import signal
trace("up")
signal.pause()
"""

_WORKER = """
import os, sys
from services.common import flag, trace
if os.environ.get("WORKER") == "refuse":
    sys.stderr.write("sluice: too little memory for one request. Use --memory 2GiB\\n")
    sys.exit(2)
if os.environ.get("WORKER") == "crash":
    raise RuntimeError("boom")
import asyncio
from shared.messages.report import WorkerPhase, WorkerReport
from shared.transport.nats_bus import NatsBus
from shared.subjects import Subjects
from shared.wire import encode_json

async def main():
    name = flag("--instance-id")
    login = os.environ.get("SLUICE_WORKER_NATS_USER"), os.environ.get("SLUICE_WORKER_NATS_PASSWORD")
    bus = await NatsBus.connect(flag("--nats-url"), name=name, credentials=login if all(login) else None)
    trace("up")
    number = 0
    while True:
        phase = WorkerPhase.READY if number > 4 else WorkerPhase.LOADING
        report = WorkerReport(worker_id=name, sequence_number=number, phase=phase, progress_text="read")
        await bus.publish(Subjects(flag("--cluster")).report(name), encode_json(report))
        number += 1
        await asyncio.sleep(0.1)

asyncio.run(main())
"""

_DISPATCHER = """
import json, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from services.common import flag, trace

MODELS = {"object": "list", "data": [{"id": flag("--served-model-name"), "object": "model"}]}
REPORT = {"worker_id": "worker-0", "sequence_number": 0, "phase": "ready", "num_blocks": 8, "num_used_blocks": 2}
CLUSTER = {
    "version": 3,
    "kind": "cluster_view",
    "sequence_number": 1,
    "workers": [{"liveness": "alive", "age_s": 0.1, "report": REPORT}],
}
COMMON = {"tier": "default", "worker_id": "worker-0", "state": "streaming", "age_s": 4.2}
OPEN = [
    {"id": "cmpl-alice", "slack_s": 1.5, "qoe": 0.9, "num_output_tokens": 30, **COMMON},
    {"id": "cmpl-bob", "slack_s": 2.5, "qoe": 0.8, "num_output_tokens": 40, **COMMON},
]
REQUESTS = {"dispatcher_id": "dispatcher-0", "counts": [{"tier": "default", "streaming": 2}], "requests": OPEN}
ANSWERS = {"/ready": {}, "/v1/models": MODELS, "/v1/cluster": CLUSTER, "/v1/requests": REQUESTS}

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        answer = ANSWERS.get(self.path)
        self.send_response(200 if answer is not None else 404)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        *before, last = [message["content"] for message in body["messages"]]
        if last == "refuse":
            self.send_response(400)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"message": "The context is full."}}).encode())
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        if last == "break":
            return
        words = ["tick"] * 1000 if last == "slow" else f"{len(before)} before, then {last}".split()
        if last.startswith("which "):
            words = json.dumps(body.get(last[6:])).split()
        try:
            for index, word in enumerate(words):
                self.send({"choices": [{"index": 0, "delta": {"content": word + " "}, "finish_reason": None}]})
                time.sleep(0.02 if last == "slow" else 0)
        except OSError:
            trace(f"client gone, {len(before)} before")
            return
        self.send({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 1 + len(words)}
        self.send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\\n\\n")

    def send(self, chunk):
        common = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        self.wfile.write(b"data: " + json.dumps(common | chunk).encode() + b"\\n\\n")
        self.wfile.flush()

    def log_message(self, *_):
        pass

trace("up")
ThreadingHTTPServer((flag("--host"), int(flag("--port"))), Handler).serve_forever()
"""

DRIVER = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from cli.cluster import children
children.CODE_ROOT = Path(sys.argv.pop(1))
from cli.main import main
main()
"""
"""Runs `sluice` with the services of the folder that is its first argument: `python -c DRIVER FOLDER up …`."""


def write_fake_services(folder: Path) -> Path:
    """Write a package `services` into the folder; return the folder."""
    parts = {"monitor": _PLAIN, "planner": _PLAIN, "worker": _WORKER, "dispatcher": _DISPATCHER}
    for name, code in parts.items():
        package = folder / "services" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(code)
    (folder / "services" / "__init__.py").touch()
    (folder / "services" / "common.py").write_text(_COMMON)
    return folder


def start_fake_dispatcher(folder: Path, port: int, trace: Path) -> subprocess.Popen[bytes]:
    """Start the stand-in for the dispatcher alone."""
    flags = ["--instance-id", "dispatcher-0", "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "services.dispatcher", *flags],
        env={**os.environ, "PYTHONPATH": str(folder), "TRACE": str(trace)},
    )
