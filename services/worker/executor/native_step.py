"""A forward pass by the worker's own kernels: all layers of a step and the head in one call.

Each token's results depend on its own sequence alone, to the bit: every product sums in one order whatever the number
of rows, and attention folds fixed splits of the context. So this pass is the deterministic one as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.attention.base import RaggedRows
from services.worker.attention.native_paged import rows_args
from services.worker.attention.remote import RemoteKeys, RemoteRows, new_states
from services.worker.contract.arrays import F64, I32, I64
from services.worker.contract.batch import Batch
from services.worker.contract.remote import RemoteLostError
from services.worker.executor.step_threads import StepThreads, step_work
from services.worker.memory.kv_cache import KVCache
from services.worker.models.rope import RopeTable
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ModelWeights, ParameterBuffer
from services.worker.native.library import NativeLibrary, NotGivenError
from services.worker.native.structures import FAR_CALL, FarArgs, LayerArgs, ModelArgs, StepArgs
from services.worker.sampling.scoring import Scores

GROWTH_TOKENS = 128
"""Workspace grows by multiples of this."""
ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}
"""Numbers of `enum Activation` in src/model.h."""


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Buffers for steps of at most `num_tokens` tokens."""

    num_tokens: int
    hidden: torch.Tensor
    normed: torch.Tensor
    heads: torch.Tensor
    attended: torch.Tensor
    inner: torch.Tensor

    @classmethod
    def make(cls, spec: ModelSpec, num_tokens: int, dtype: torch.dtype) -> _Workspace:
        hidden, heads = spec.hidden_size, spec.q_size + 2 * spec.kv_size
        widths = (hidden, hidden, heads, spec.q_size, spec.intermediate_size)
        return cls(num_tokens, *(torch.empty((num_tokens, width), dtype=dtype) for width in widths))


class _FarStep:
    """A step's rows some of whose keys lie elsewhere, as the library reads them, and what it calls for them.

    Args:
        spec: the model.
        remote: those keys.
        rows: of the step.
        num_rows: of the whole step.
        queries: of the layer that is being computed.
    """

    def __init__(
        self,
        spec: ModelSpec,
        remote: RemoteKeys,
        rows: RemoteRows,
        num_rows: int,
        queries: Callable[[], torch.Tensor],
    ) -> None:
        self._remote = remote
        self._rows = rows
        self._queries = queries
        self._tokens = torch.from_numpy(rows.tokens)
        self._states = new_states(len(rows.tokens), spec.num_heads, spec.head_dim)
        self._columns = np.zeros((3, num_rows), dtype=np.int32)
        self._columns[0] = -1
        self._columns[:, rows.place] = rows.rows.first_token, rows.first, rows.end
        self.failure: Exception = RemoteLostError("it was not said why")
        """Why a call has failed."""
        state, first, end = (column.ctypes.data for column in self._columns)
        self.args = FarArgs(state, first, end, self._states.data_ptr(), FAR_CALL(self._ask), FAR_CALL(self._take))

    def _ask(self, layer: int) -> int:
        return self._attempt(lambda: self._remote.ask(self._rows, layer, self._queries()[self._tokens], self._states))

    def _take(self, _layer: int) -> int:
        return self._attempt(self._remote.take)

    def _attempt(self, call: Callable[[], None]) -> int:
        """Call, and keep what it raises: no exception could pass through the library."""
        try:
            call()
        except Exception as error:  # raised again behind the library's call
            self.failure = error
            return 1
        return 0


class NativeForward:
    """Layers of the model, those of the cache, on the CPU.

    Args:
        rope: angles of every position that may occur.
        threads: that steps may take.
    """

    def __init__(
        self,
        library: NativeLibrary,
        spec: ModelSpec,
        weights: ModelWeights,
        rope: RopeTable,
        cache: KVCache,
        threads: StepThreads,
    ) -> None:
        self.cache = cache
        self._threads = threads
        self._library = library
        self._spec = spec
        self._weights = weights
        self._rope = rope
        self._dtype = cache.keys[0].dtype
        self._layers = (LayerArgs * spec.num_layers)(
            *(
                _layer_args(spec, weights.layers[i], cache, i) if i in cache.layers else LayerArgs()
                for i in range(spec.num_layers)
            )
        )
        self._model = self._model_args()
        self._workspace = _Workspace.make(spec, 1, self._dtype)
        self.remote: RemoteKeys | None = None
        """Keys that lie elsewhere; see `ForwardPass`."""
        self.part_seconds: F64 | None = None
        """[len(PARTS)] seconds that the parts of the steps have taken, added up; None: not timed."""
        self._step = self._step_args()
        self._logits = torch.empty((0, spec.vocab_size))

    def run(self, batch: Batch, tables: I32, sampled: I64, hidden: torch.Tensor | None = None) -> Scores:
        """Compute a step up to the logits; see `ForwardPass`.

        The logits' buffer is kept: fresh memory of its size costs more in page faults than a look at all of it.
        """
        return self._run(batch, tables, sampled, hidden)

    def advance(self, batch: Batch, tables: I32, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a step's layers here; see `ForwardPass`."""
        self._run(batch, tables, np.empty(0, dtype=np.int64), hidden)
        return self._workspace.hidden[: len(batch.tokens)].clone()

    def _run(self, batch: Batch, tables: I32, sampled: I64, hidden: torch.Tensor | None) -> Scores:
        plan = rows_args(batch.num_tokens, batch.start, tables, batch.rows)
        far = self._far_of(batch, tables)
        tokens = np.ascontiguousarray(batch.tokens, dtype=np.int32)
        finite = np.empty(len(batch.rows), dtype=np.bool_)
        largest = np.empty(len(sampled), dtype=np.int64)
        logits = self._logits_of(len(sampled))
        step = self._step_of(plan.args.num_tokens)
        step.embed = int(hidden is None)
        if hidden is not None:
            self._workspace.hidden[: plan.args.num_tokens] = hidden
        step.rows = plan.args
        step.num_threads = self._num_threads(batch, len(sampled))
        step.tokens, step.finite = tokens.ctypes.data, finite.ctypes.data
        step.num_sampled, step.sampled = len(sampled), sampled.ctypes.data
        step.logits, step.largest = logits.data_ptr(), largest.ctypes.data
        step.seconds = None if self.part_seconds is None else self.part_seconds.ctypes.data
        step.far = None if far is None else ctypes.pointer(far.args)
        self._model.num_blocks = self.cache.num_blocks  # it may have changed since the last step
        try:
            self._library.forward(ctypes.byref(self._model), ctypes.byref(step))
        except NotGivenError:
            assert far is not None, "only what lies elsewhere is not given"
            raise far.failure from None
        finally:
            step.far = None
        del plan, tokens  # they lived until here: `step` points into them
        return Scores(torch.from_numpy(finite), logits, torch.from_numpy(largest))

    def _num_threads(self, batch: Batch, num_sampled: int) -> int:
        ends = batch.start + batch.num_tokens
        num_keys = int(np.dot(batch.num_tokens.astype(np.int64), ends))
        work = step_work(self._spec, len(self.cache.layers), len(batch.tokens), num_keys, num_sampled)
        return self._threads.of_step(work)

    def _far_of(self, batch: Batch, tables: I32) -> _FarStep | None:
        """Return what the library needs for rows some of whose keys lie elsewhere; None: there are none."""
        if self.remote is None:
            return None
        rows = self.remote.rows_of(RaggedRows(batch.num_tokens, batch.start, tables[batch.rows]))
        return None if rows is None else _FarStep(self._spec, self.remote, rows, len(batch.rows), self._queries)

    def _queries(self) -> torch.Tensor:
        """Return [num_tokens, num_heads, head_dim] of the layer that is being computed; a view."""
        spec, heads = self._spec, self._workspace.heads
        queries: torch.Tensor = heads[:, : spec.q_size].unflatten(1, (spec.num_heads, spec.head_dim))
        return queries

    def _logits_of(self, num_rows: int) -> torch.Tensor:
        """Return room for the logits of so many rows."""
        if self._logits.shape[0] < num_rows:
            self._logits = torch.empty((0, 0))  # the old buffer goes before the new one comes
            self._logits = torch.empty((num_rows, self._spec.vocab_size), dtype=torch.float32)
        return self._logits[:num_rows]

    def _step_of(self, num_tokens: int) -> StepArgs:
        """Return the arguments of a step, with workspace that is large enough; before it grows, the old one goes."""
        if self._workspace.num_tokens < num_tokens:
            self._workspace = _Workspace.make(self._spec, 1, self._dtype)
            self._workspace = _Workspace.make(self._spec, -(-num_tokens // GROWTH_TOKENS) * GROWTH_TOKENS, self._dtype)
            self._step = self._step_args()
        return self._step

    def _step_args(self) -> StepArgs:
        space = self._workspace
        return StepArgs(
            embed=1,
            first_layer=self.cache.layers[0],
            last_layer=self.cache.layers[-1] + 1,
            hidden=space.hidden.data_ptr(),
            normed=space.normed.data_ptr(),
            heads=space.heads.data_ptr(),
            attended=space.attended.data_ptr(),
            inner=space.inner.data_ptr(),
        )

    def _model_args(self) -> ModelArgs:
        spec, outer = self._spec, self._weights.outer
        return ModelArgs(
            is_bf16=int(self._dtype == torch.bfloat16),
            layer_norm=int(spec.norm_kind == "layer"),
            activation=ACTIVATIONS[spec.activation],
            gated=int(spec.gated_mlp),
            hidden=spec.hidden_size,
            inner=spec.intermediate_size,
            vocab=spec.vocab_size,
            num_layers=spec.num_layers,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.rotary_dim,
            block_size=self.cache.block_size,
            num_blocks=self.cache.num_blocks,
            num_positions=self._rope.cos.shape[0],
            norm_eps=spec.norm_eps,
            scale=spec.head_dim**-0.5,
            embedding=_pointer(outer, "embedding"),
            position_embedding=_positions_pointer(spec, outer),
            norm=_pointer(outer, "norm"),
            norm_bias=_pointer(outer, "norm_bias"),
            head=_pointer(outer, "embedding" if spec.tied_embeddings else "head"),
            cos=self._rope.cos.data_ptr(),
            sin=self._rope.sin.data_ptr(),
            layers=self._layers,
        )


def _layer_args(spec: ModelSpec, weights: ParameterBuffer, cache: KVCache, layer: int) -> LayerArgs:
    places = {part.name.replace("gate_up", "up"): weights[part.name].data_ptr() for part in weights.parts}
    return LayerArgs(
        **places,
        keys=cache.keys[layer].data_ptr(),
        values=cache.values[layer].data_ptr(),
        window=spec.windows[layer] or 0,
    )


def _positions_pointer(spec: ModelSpec, outer: ParameterBuffer) -> int | None:
    """Return where the learned embedding of position 0 lies."""
    table = outer.get("positions")
    return None if table is None else table[spec.position_offset].data_ptr()


def _pointer(weights: ParameterBuffer, name: str) -> int | None:
    part = weights.get(name)
    return None if part is None else part.data_ptr()
