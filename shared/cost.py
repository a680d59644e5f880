"""How long a step takes: a formula, and its coefficients per model and GPU, for hardware that is not here.

    T = max(g0 + b0·N, g1 + b1·N) + d·KVdec + a·P + era

The first branch of the maximum is bound by reading the weights, the second by computing; decode attention reads KV,
prefill attention computes pairs. A worker that computes fits the same formula to its own steps
(`services/worker/cost/`). Files hold milliseconds, this module seconds.

Source: fitted on 400 random mixed batches that were composed from AIConfigurator's public per-operator measurements
(Apache-2.0). Deviations: none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, ValidationError

from shared.errors import ProfileError
from shared.layers import LayerRange
from shared.process.config_fields import nearest
from shared.reading import InputFile
from shared.types import Value

PROFILES: Final = Path(__file__).parent / "profiles"
"""Folder of the profiles that ship."""
MAX_PROFILE_BYTES: Final = 2**20
"""Largest file of a profile."""
_MS: Final = 1e-3


def prefill_pairs(prefix: int, chunk: int) -> int:
    """Return the query-key pairs of one prefill chunk after a prefix: p·c + (c² + c)/2."""
    return prefix * chunk + (chunk * chunk + chunk) // 2


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients of the formula for one instance, in seconds."""

    g0_s: float
    """Step that reads every weight once: constant part."""
    b0_s: float
    """The same: per token of the batch."""
    g1_s: float
    """Step bound by computing: constant part."""
    b1_s: float
    """The same: per token of the batch."""
    d_s: float
    """Per token of KV that decodes read."""
    a_s: float
    """Per query-key pair of prefill."""
    era_s: float = 0.0
    """CPU overhead per step of the imitated engine: 0 to 0.001 with graphs and an asynchronous scheduler, else 0.003 to
    0.005."""

    def step_s(self, num_tokens: float, kv_decode_tokens: float, prefill_pairs: float) -> float:
        """Return the duration of one step, seconds. The arguments are counts, or averages of them.

        Args:
            num_tokens: N, tokens that the step computes.
            kv_decode_tokens: KVdec, sum of the context lengths of the step's decodes.
            prefill_pairs: P, sum over the step's prefill chunks.
        """
        dense_s = max(self.g0_s + self.b0_s * num_tokens, self.g1_s + self.b1_s * num_tokens)
        return dense_s + self.d_s * kv_decode_tokens + self.a_s * prefill_pairs + self.era_s

    @property
    def token_s(self) -> float:
        """What one more token adds to a large step, attention aside: a fit of one branch has it in the first."""
        return max(self.b0_s, self.b1_s)

    def chunk_s(self, prefix: int, num_tokens: int) -> float:
        """Return the work of a chunk: what it adds to such a step, α·(p·c + (c² + c)/2) + β·c.

        Cutting a prompt neither adds to that nor saves any, so prompts and whole queues have a work too, and equal work
        is equal cost beside equal decodes.

        Source: KunServe, version 2, section 4.3, equation (1), where α = a and β = `token_s`. Deviation: γ is not part
        of it; a microbatch pays it once.
        """
        return self.a_s * prefill_pairs(prefix, num_tokens) + self.token_s * num_tokens

    def largest(self, prefix: int, limit_s: float) -> int:
        """Return the most tokens whose work is at most `limit_s`: α/2·c² + (β + α·(p + 1/2))·c ≤ limit."""
        if limit_s <= 0:
            return 0
        slope = self.token_s + self.a_s * (prefix + 0.5)
        chunk = int(2 * limit_s / (slope + sqrt(slope * slope + 2 * self.a_s * limit_s)))
        if self.chunk_s(prefix, chunk + 1) <= limit_s:
            return chunk + 1
        return chunk - 1 if self.chunk_s(prefix, chunk) > limit_s else chunk


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage of a pipeline adds to a step: the stages of any tiling of the layers add up to the formula.

    Attention (d, a) goes by layers. So does the rest of the computing, where the head counts as `head_layers` layers at
    the last stage; the embedding is a look-up and counts as none. The CPU's overhead (era) is the first stage's: it is
    the leader who schedules.
    """

    whole: CostModel
    """Of the model in one piece."""
    layers: LayerRange
    num_layers: int
    """Of the whole model."""
    head_layers: float = 0.0
    """The head's parameters in those of a layer; raising it makes the last stage slower and the others faster."""

    def __post_init__(self) -> None:
        if self.layers.end > self.num_layers:
            raise ValueError(f"layers {self.layers} of a model of {self.num_layers}")
        if self.head_layers < 0:
            raise ValueError(f"a head of {self.head_layers} layers")

    def step_s(self, num_tokens: int, kv_decode_tokens: int, prefill_pairs: int) -> float:
        """Return how long the stage takes for a step, seconds; arguments as `CostModel.step_s`."""
        whole, size = self.whole, len(self.layers)
        head = self.head_layers if self.layers.end == self.num_layers else 0.0
        dense_s = max(whole.g0_s + whole.b0_s * num_tokens, whole.g1_s + whole.b1_s * num_tokens)
        attention_s = whole.d_s * kv_decode_tokens + whole.a_s * prefill_pairs
        own_s = dense_s * (size + head) / (self.num_layers + self.head_layers) + attention_s * size / self.num_layers
        return own_s + (whole.era_s if self.layers.first == 0 else 0.0)


@dataclass(frozen=True, slots=True)
class Profile:
    """Cost of one model on one kind of instance, with its provenance."""

    name: str
    model: str
    gpu: str
    tp: int
    """GPUs of the instance (tensor parallel)."""
    cost: CostModel
    source: str
    """Where the coefficients come from."""
    mean_error_ratio: float
    """Mean relative error of the fit."""
    p95_error_ratio: float | None = None
    """95th percentile of the relative error, where it is known."""


_Coefficient = Annotated[float, Field(ge=0)]


class _StepMs(Value):
    g0: _Coefficient
    b0: _Coefficient
    g1: _Coefficient = 0.0
    b1: _Coefficient = 0.0
    d: _Coefficient
    a: _Coefficient
    era: _Coefficient = 0.0


class _ProfileFile(Value):
    model: str
    gpu: str
    tp: Annotated[int, Field(ge=1)]
    source: str
    mean_error_percent: _Coefficient
    p95_error_percent: _Coefficient | None = None
    step_ms: _StepMs


def profile_names() -> list[str]:
    """Return the names of the profiles that ship, sorted."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_profile(name_or_path: str | Path) -> Profile:
    """Return a profile that ships, by name, or one from a file (anything that ends in `.toml`).

    Raises:
        ProfileError: there is none, or it is malformed.
    """
    is_path = isinstance(name_or_path, Path) or name_or_path.endswith(".toml")
    path = Path(name_or_path) if is_path else PROFILES / f"{name_or_path}.toml"
    if not is_path and str(name_or_path) not in profile_names():
        close = nearest(str(name_or_path), profile_names(), cutoff=0.0)
        raise ProfileError(f"there is no cost profile '{str(name_or_path)[:80]}'", f"Did you mean {close}?")
    return _from_file(path.stem, _read(path))


def profile_toml(profile: Profile) -> str:
    """Return the text of a profile's file, as `load_profile` reads it; coefficients with five significant digits."""
    # a JSON string is a TOML basic string
    lines = [
        f"{name} = {json.dumps(getattr(profile, name), ensure_ascii=False)}"
        for name in ("model", "gpu", "tp", "source")
    ]
    lines.append(f"mean_error_percent = {100 * profile.mean_error_ratio:.2f}")
    if profile.p95_error_ratio is not None:
        lines.append(f"p95_error_percent = {100 * profile.p95_error_ratio:.2f}")
    lines += ["", "# milliseconds per step: max(g0 + b0·N, g1 + b1·N) + d·KVdec + a·P + era", "[step_ms]"]
    lines += [f"{name} = {_toml_ms(getattr(profile.cost, f'{name}_s'))}" for name in _StepMs.model_fields]
    return "\n".join([*lines, ""])


def _toml_ms(seconds: float) -> str:
    text = f"{seconds / _MS:.5g}"
    return text if any(char in text for char in ".e") else f"{text}.0"


def _read(path: Path) -> _ProfileFile:
    document = InputFile(path, MAX_PROFILE_BYTES, "cost profile", kind=ProfileError).read_toml()
    try:
        return _ProfileFile.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProfileError(f"cost profile {path}: {where}: {first['msg']}") from None


def _from_file(name: str, file: _ProfileFile) -> Profile:
    return Profile(
        name=name,
        model=file.model,
        gpu=file.gpu,
        tp=file.tp,
        cost=CostModel(**{f"{name}_s": value * _MS for name, value in file.step_ms}),
        source=file.source,
        mean_error_ratio=file.mean_error_percent / 100,
        p95_error_ratio=None if file.p95_error_percent is None else file.p95_error_percent / 100,
    )
