"""How far back each layer sees, by config.json."""

from __future__ import annotations

from services.worker.models.config_json import ConfigReader
from services.worker.models.families import Family
from shared.errors import StartupError

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_windows(reader: ConfigReader, family: Family, num_layers: int, max_positions: int) -> tuple[int | None, ...]:
    """Return for each layer the keys that a query sees, itself included; None: all of them.

    A window that no sequence can outgrow counts as none.

    Raises:
        StartupError: config.json contradicts itself, or asks by `layer_types` for what this family does not apply.
    """
    window = _window(reader, family)
    sliding = _sliding_layers(reader, family, window, num_layers)
    if window is None or window >= max_positions:
        return (None,) * num_layers
    return tuple(window if slides else None for slides in sliding)


def _window(reader: ConfigReader, family: Family) -> int | None:
    if family.window == "none" or reader.config.get("sliding_window") is None:
        return None
    if family.window == "switched" and not reader.get("use_sliding_window", bool, default=False):
        return None
    return reader.positive("sliding_window")


def _sliding_layers(reader: ConfigReader, family: Family, window: int | None, num_layers: int) -> list[bool]:
    types = _layer_types(reader, num_layers)
    if family.window != "switched":
        if types is not None and any((kind == _SLIDING) != (window is not None) for kind in types):
            raise StartupError(
                f"layer_types of {family.model_type} that contradict sliding_window are not supported",
                "Correct config.json",
            )
        return [window is not None] * num_layers
    if types is None:
        first = reader.get("max_window_layers", int, 0)
        return [window is not None and layer >= first for layer in range(num_layers)]
    if window is None and _SLIDING in types:
        raise reader.error("layer_types", "has sliding_attention, but use_sliding_window and sliding_window give none")
    return [kind == _SLIDING for kind in types]


def _layer_types(reader: ConfigReader, num_layers: int) -> list[str] | None:
    types = reader.config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise reader.error("layer_types", f"is no list of {num_layers} types")
    for kind in types:
        if kind not in (_FULL, _SLIDING):
            raise StartupError(
                f"layers of type {kind!r} (layer_types) are not supported", f"Known: {_FULL}, {_SLIDING}"
            )
    return types
