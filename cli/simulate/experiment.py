"""From the flags of `simulate`, `compare` and `plan` to what is run, everything checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from cli.simulate import DEFAULT_SCENARIO
from shared.errors import StartupError
from sim.scenarios.files import load_scenario
from sim.scenarios.load import LoadSpec
from sim.scenarios.parts import FixedReaders, SloSpec, ThinkingLoad
from sim.scenarios.scenario import Scenario

DEFAULT_SHARE: Final = 0.99
"""Of the requests, to be in time where instances are counted."""
_SCENARIO_FLAGS: Final = (
    "model",
    "gpu",
    "tp",
    "era_ms",
    "upscale",
    "lengths",
    "duration_s",
    "warm_up_s",
    "kv_tokens",
    "max_batch_tokens",
    "max_batch_rows",
)
"""Flags that are a scenario's fields."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is run, and what becomes of it."""

    scenario: Scenario
    workload_name: str
    num_requests: tuple[int, ...]
    """By seed, in their order."""
    seeds: tuple[int, ...]
    traces: Path | None
    num_processes: int
    json_file: Path | None
    plot_folder: Path | None
    quiet: bool
    instances_by_slo: bool
    """Whether the number of instances is yet to be found."""
    target_share: float
    max_instances: int


def read_experiment(flags: Mapping[str, Any]) -> Experiment:
    """Return what the flags mean.

    Raises:
        StartupError: something does not exist, does not fit, or contradicts something else.
    """
    scenario = _scenario(flags)
    scenario.instance()  # is there such a model and GPU?
    seeds = tuple(dict.fromkeys(flags["seeds"]))
    workloads = [scenario.workload(seed, flags["traces"]) for seed in seeds]
    if any(not (each.arrival_s >= scenario.warm_up_s).any() for each in workloads):
        what = f"nobody arrives after the warm-up of {scenario.warm_up_s:g} s"
        raise StartupError(what, "Lower it with --warm-up, or give a longer --duration")
    for name in ("json_file", "plot"):
        _check_place(flags.get(name))
    return Experiment(
        scenario=scenario,
        workload_name=workloads[0].name,
        num_requests=tuple(len(each) for each in workloads),
        seeds=seeds,
        traces=flags["traces"],
        num_processes=flags["jobs"],
        json_file=flags["json_file"],
        plot_folder=flags.get("plot"),
        quiet=flags["quiet"],
        instances_by_slo=flags.get("instances") == "auto",
        target_share=(flags["slo"] or {}).get("share", DEFAULT_SHARE),
        max_instances=flags["max_instances"],
    )


def describe(experiment: Experiment) -> dict[str, Any]:
    """Return what was run, in plain values, as the JSON holds it."""
    scenario, instance = experiment.scenario, experiment.scenario.instance()
    return {
        "name": scenario.name,
        "title": scenario.title,
        "paper": scenario.paper,
        "workload": experiment.workload_name,
        "num_requests": list(experiment.num_requests),
        "warm_up_s": scenario.warm_up_s,
        "model": instance.model,
        "gpu": instance.gpu,
        "tp": instance.tp,
        "instances": scenario.instances,
        "kv_tokens": instance.kv_tokens,
        "max_batch_tokens": scenario.max_batch_tokens,
        "max_batch_rows": scenario.max_batch_rows,
        "step_ms": {name.removesuffix("_s"): 1e3 * value for name, value in asdict(instance.cost).items()},
        "reader": None if scenario.reader is None else scenario.reader.model_dump(),
        "thinking": None if scenario.thinking is None else scenario.thinking.model_dump(),
        "slo": None if scenario.slo is None else scenario.slo.model_dump(),
        "best_effort": None if scenario.best_effort is None else scenario.best_effort.model_dump(),
        "best_effort_share": scenario.best_effort_share,
        "variants": {
            name: variant.model_dump(mode="json", exclude_defaults=True) for name, variant in scenario.variants.items()
        },
        "left_open": list(scenario.left_open),
    }


def _scenario(flags: Mapping[str, Any]) -> Scenario:
    other = next((name for name in ("workload", "rate") if flags[name] is not None), None)
    if flags["trace"] is not None and other is not None:
        raise StartupError(f"--trace and --{other} both say when requests arrive", "Give one of them")
    scenario = load_scenario(flags["scenario"] or DEFAULT_SCENARIO)
    if flags["workload"] is not None:
        scenario = _with_load(scenario, load_scenario(flags["workload"]))
    elif flags["trace"] is not None and flags["scenario"] is None:
        scenario = _of_trace(scenario, flags["trace"])
    instances = flags.get("instances")
    changes: dict[str, Any] = {name: flags[name] for name in _SCENARIO_FLAGS}
    scenario = scenario.with_overrides(
        **changes,
        trace=flags["trace"],
        rate_per_s=flags["rate"],
        instances=instances if isinstance(instances, int) else None,
        slo=None if flags["slo"] is None else SloSpec(ttft_s=flags["slo"]["ttft"], tpot_s=flags["slo"]["tpot"]),
    )
    update: dict[str, Any] = {}
    if flags["reader"] is not None:
        reader = flags["reader"]
        update["reader"] = FixedReaders(kind="fixed", ttft_s=reader["ttft"], speed=reader["speed"])
    if flags["thinking"] is not None:
        update["thinking"] = _thinking(flags["thinking"])
    return scenario.model_copy(update=update)


def _thinking(given: Mapping[str, float]) -> ThinkingLoad:
    try:
        return ThinkingLoad(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise StartupError(
            f"--thinking: {first['loc'][0]}: {first['msg']}", "As in --thinking share=0.5,tokens=400"
        ) from None


def _with_load(cluster: Scenario, load: Scenario) -> Scenario:
    """Return the cluster of one scenario under the load of another."""
    update: dict[str, Any] = {name: getattr(load, name) for name in LoadSpec.model_fields}
    name = cluster.name if load.name == cluster.name else f"{cluster.name} under {load.name}"
    return cluster.model_copy(update={**update, "name": name, "left_open": (*cluster.left_open, *load.left_open)})


def _of_trace(cluster: Scenario, trace: Path) -> Scenario:
    """Return the cluster under the whole load of a trace, its own lengths included; nothing of it is from a paper."""
    own: dict[str, Any] = {
        "name": trace.stem,
        "title": "",
        "paper": "",
        "left_open": (),
        "lengths": "trace",
        "lengths_scale": 1.0,
        "upscale": 1.0,
        "duration_s": None,
        "warm_up_s": 0.0,
        "best_effort": None,
        "best_effort_share": 0.0,
    }
    return cluster.model_copy(update=own)


def _check_place(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise StartupError(f"there is no folder {path.parent}", "Name another place")
