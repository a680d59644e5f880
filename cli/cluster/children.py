"""Which processes a cluster on one machine has, and with which flags each is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cli.cluster.broker import BrokerAccess
from cli.cluster.settings import UpSettings
from cli.cluster.supervisor import ChildSpec
from cli.model import Model
from shared.addresses import host_and_port
from shared.process.service_process import CHECK_ONLY
from shared.sizing import num_devices
from shared.transport.nats_roles import BrokerRole

DISPATCHER = "dispatcher"
MONITOR = "monitor"
PLANNER = "planner"
CODE_ROOT = Path(__file__).parents[2]
"""Where the services' packages lie: beside this one."""


def has_cpu_kernels() -> bool:
    """Return whether workers on the CPU compute by compiled kernels, and not by torch's operators."""
    is_wanted = os.environ.get("SLUICE_WORKER_KERNELS") != "torch"
    return is_wanted and any((CODE_ROOT / "services" / "worker" / "native" / "lib").glob("*.so"))


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Everything the children are told."""

    settings: UpSettings
    model: Model
    broker: BrokerAccess
    port: int
    run_dir: Path
    """For what a child leaves to the one after it; removed when the run ends."""
    worker_env: Mapping[str, str] = field(default_factory=dict)
    """Settings of workers that `sluice up` has no flags for."""

    @property
    def nats_url(self) -> str:
        """The broker, as people and their tools reach it."""
        return self.broker.operator_url

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which the model is served; answers carry the first."""
        return self.settings.served_model_name or (self.model.name,)

    @property
    def model_name(self) -> str:
        """The first of them."""
        return self.model_names[0]

    @property
    def url(self) -> str:
        """Where the API is, as seen from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)  # noqa: S104  compared
        return f"http://{host_and_port(host, self.port)}"

    def worker_names(self) -> list[str]:
        """Return the names, and ids, of the workers."""
        return [f"worker-{index}" for index in range(self.settings.workers)]

    def specs(self) -> list[ChildSpec]:
        """Return every child, in the order of their start."""
        workers = [self._worker(index, name) for index, name in enumerate(self.worker_names())]
        planner = self._service(PLANNER, "--system", self.settings.system)
        return [self._service(MONITOR), planner, *workers, self._dispatcher()]

    def checks(self) -> list[ChildSpec]:
        """Return children that only say whether they would start: one of each kind that reads the model."""
        specs = (self._worker(0, self.worker_names()[0]), self._dispatcher())
        return [replace(spec, argv=(*spec.argv, CHECK_ONLY)) for spec in specs]

    def _service(self, name: str, *flags: str, instance_id: str = "") -> ChildSpec:
        settings = self.settings
        common = ("--instance-id", instance_id or name, "--nats-url", self.broker.url, "--cluster", settings.cluster)
        logs = ("--log-level", settings.log_level, "--log-format", "json")
        # -P and PYTHONPATH: a folder named `services` where the person stands must not be taken for ours
        role = BrokerRole(name.split("-")[0])
        python = (sys.executable, "-P", "-m", f"services.{role}")
        path = os.pathsep.join(filter(None, [str(CODE_ROOT), os.environ.get("PYTHONPATH")]))
        return ChildSpec(name, (*python, *common, *logs, *flags), env={"PYTHONPATH": path, **self.broker.env(role)})

    def _worker(self, index: int, name: str) -> ChildSpec:
        settings = self.settings
        flags = ["--model", str(self.model.folder), "--served-model-name", self.model_name]
        flags += ["--device", device_of(settings.device, index, num_devices()), "--dtype", settings.dtype]
        flags += ["--memory", str(settings.memory), "--host-workers", str(settings.workers)]
        flags += [] if settings.host_memory is None else ["--host-memory", str(settings.host_memory)]
        flags += ["--system", settings.system, "--max-model-len", str(settings.max_model_len)]
        flags += ["--drain-limit-s", str(settings.drain_limit_s)]
        flags += ["--threads", str(settings.threads), "--cores", str(settings.cores_per_worker())]
        flags += ["--costs-kept", str(settings.costs_kept)]
        flags += [] if settings.kernels == "auto" else ["--kernels", settings.kernels]
        flags += ["--deterministic"] if settings.deterministic else []
        flags += [] if settings.prefix_caching else ["--no-prefix-caching"]
        flags += [] if settings.graphs else ["--no-graphs"]
        flags += [] if settings.fused else ["--no-fused"]
        flags += [] if settings.overlap is None else ["--overlap" if settings.overlap else "--no-overlap"]
        spec = self._service(name, *flags)
        return replace(spec, env={**spec.env, **self.worker_env}, needed_as="worker")

    def _dispatcher(self) -> ChildSpec:
        settings = self.settings
        flags = ["--host", settings.host, "--port", str(self.port), "--model", str(self.model.folder)]
        flags += ["--served-model-name", ",".join(self.model_names), "--system", settings.system]
        flags += ["--generation-config", settings.generation_config]
        flags += ["--reasoning-parser", settings.reasoning_parser, "--tool-parser", settings.tool_parser]
        flags += ["--drain-limit-s", str(settings.drain_limit_s)]
        if settings.api_keys_file:
            flags += ["--api-keys-file", str(settings.api_keys_file.absolute())]
            flags += ["--api-keys-kept", str(self.run_dir / "keys.toml")]
        flags += ["--allow-no-key"] if settings.allow_no_key else []
        flags += ["--allow-host", ",".join(settings.allow_host)] if settings.allow_host else []
        flags += ["--allow-origin", ",".join(settings.allow_origin)] if settings.allow_origin else []
        spec = self._service(DISPATCHER, *flags, instance_id=f"{DISPATCHER}-0")
        # a key in the flags could be read by everybody on this machine
        key = {"SLUICE_DISPATCHER_API_KEY": settings.api_key} if settings.api_key else {}
        return replace(spec, env={**spec.env, **key}, needed_as=DISPATCHER)


def device_of(device: str, index: int, count: int) -> str:
    """Return the device of the worker of this index: `cuda` means the devices in turn."""
    return f"cuda:{index % count}" if device == "cuda" and count > 1 else device
