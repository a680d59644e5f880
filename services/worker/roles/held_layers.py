"""What a live device has in memory, and what there could be instead: it answers, and changes nothing."""

from __future__ import annotations

from dataclasses import asdict

from services.worker.executor.elastic_model import ElasticModel
from services.worker.executor.parameter_load import ParameterLoad
from services.worker.kv_moves.places import GroupFailedError, GroupPlace
from shared.layers import LayerRange, check_tiling
from shared.messages.report import ElasticFacts


class HeldLayers:
    """Of one device; the part of a `GroupDevice` that only says something.

    Args:
        model: of the device; not owned.
        link_bytes_per_s: of its link, each way; 0: unknown.
    """

    def __init__(self, model: ElasticModel, link_bytes_per_s: float) -> None:
        self._model = model
        self.facts = ElasticFacts(**asdict(model.facts), link_bytes_per_s=link_bytes_per_s, has_host_copy=True)
        """Sizes of its memory."""
        self.layers = model.layers
        """Held now; while they change, those of before."""
        self.resident = model.resident
        """Layers whose parameters have memory; while they change, those of before."""
        self._closed = False

    @property
    def loaded_ratio(self) -> float:
        """Share of the resident parameters' bytes that are loaded; see `GroupDevice`."""
        return self._model.loaded_ratio

    @property
    def load_now(self) -> ParameterLoad | None:
        """How far parameters are that `reside` loads; see `GroupDevice`."""
        return self._model.load_now

    @property
    def whole_blocks(self) -> int:
        """KV blocks beside the whole model."""
        return self._model.info.capacity.num_blocks

    def blocks_beside(self, layers: LayerRange) -> int:
        """Return the KV blocks of the own layers beside the parameters of some more; see `GroupDevice`."""
        return self._model.blocks_with(self.layers, layers)

    def blocks_ahead(self, layers: LayerRange, num_blocks: int) -> int:
        """Return of how many blocks a stage can have all layers; see `GroupDevice`."""
        return self._model.blocks_ahead(layers, num_blocks)

    def refusal(self, layers: LayerRange) -> str | None:
        """Return why this device cannot come to hold exactly these layers; see `GroupDevice`."""
        if self._closed:
            return "the device is closed"
        try:
            num_blocks = self._model.blocks_with(layers)
        except ValueError as error:
            return str(error)
        info = self._model.info
        if num_blocks * info.capacity.block_size < info.max_model_len:
            return f"with layers {layers} the memory holds {num_blocks} KV blocks, too few for the longest request"
        return None

    def _check(self, place: GroupPlace) -> None:
        try:
            check_tiling([stage.layers for stage in place.stages], self._model.info.num_layers)
        except ValueError as error:
            raise GroupFailedError(str(error)) from None
        if len(place.stages) < 2:
            raise GroupFailedError("a group of one stage is no group")
        if (reason := self.refusal(place.own.layers)) is not None:
            raise GroupFailedError(reason)

    def _note_layers(self) -> None:
        self.layers, self.resident = self._model.layers, self._model.resident
