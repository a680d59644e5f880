"""What can be set of the policy `andes`, for ablations and rivals of its kind."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from shared.types import Value


class Weighing(StrEnum):
    """What a row's gain is divided by."""

    DENSITY = "density"  # memory and the time of its prompt
    GAIN = "gain"  # nothing: least QoE slack first


class Objective(StrEnum):
    """What is to become best over all readers (section 4.2 of the paper)."""

    AVERAGE = "average"
    MAX_MIN = "max-min"  # the worst experience
    PERFECT = "perfect"  # how many experiences are perfect


class AndesSettings(Value):
    """What can be set, for ablations."""

    horizon_s: Annotated[float, Field(gt=0)] = 30.0
    """How far ahead experiences are compared, beyond the prompt of each."""
    keeps: Annotated[float, Field(ge=1)] = 2.0
    """By how much more a row counts that runs: to preempt it and to bring it back costs something."""
    refines: bool = False
    """Somebody gives way only if that gains more than the delay costs all others: the paper's refiner."""
    num_batch_sizes: Annotated[int, Field(ge=1, le=64)] = 4
    """Sizes of the batch that are tried where steps are slower than a reader; 1: as many as fit."""
    holds_s: Annotated[float, Field(ge=0)] = 0.2
    """For so long a decision holds while nothing happens: about as long as somebody reads a token."""
    least_step_s: Annotated[float, Field(gt=0)] = 0.15
    """A step may take so long whatever the slack of readers who are late already."""
    bounds_steps: bool = True
    """Steps end before a reader runs out of text."""
    aging_s: Annotated[float, Field(gt=0)] = 600.0
    """Who has been without text for so long counts as if serving it gained all that there is: else who is late already,
    and so gains little, might wait for ever."""
    keeps_limits: bool = False
    """Serving who can keep its limit (`slo`) so, and only so, gains all that there is."""
    objective: Objective = Objective.AVERAGE
    weighing: Weighing = Weighing.DENSITY
