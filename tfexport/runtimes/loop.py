"""`LoopRuntime`: exported graphs over fixed buffers, for ONNX Runtime on a GPU, TensorRT, and the portable graphs on a CPU.

The loop over steps itself is `steps_of` in `search/search_batch.py`.

A library brings `Graphs`: how to run each graph of the contract on tensors at given addresses. Everything else is here and
in the modules below:

    encode   source ids ──encoder──> cross keys/values, once for a batch (`sources.py`)
    step     tokens ──decoder_step──> logits and best tokens; writes one slot of the cache, in place (`row_state.py`)
    select   before the next step, a beam reorder gathers the cache into a second buffer, and the two take turns (an identity
             moves nothing); where there is a step for a shared cache, it moves rows of a mask (`shared_cache_state.py`);
             finished sentences leave their places empty, until one gather makes a smaller batch
    growth   a full cache is copied into the next larger bucket
    ahead    several steps in one launch, where the library has graphs that choose tokens (`launches.py`)

What both kinds of state have in common is in `batch_state.py`.

On a GPU, batch, source and cache sizes are rounded up to buckets, so that recorded graphs can be replayed. On a CPU
only the cache is. A step allocates only if the cache grows, or if a reorder of beams needs a buffer that the pool does
not have. Several threads may decode over one runtime: they take turns, call by call, because memory, bound tensors and
a GPU's stream are shared.
"""

from __future__ import annotations

from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.runtimes.base import Ahead, BaseRuntime, Capabilities, Capacity
from tfexport.runtimes.live_rows import LiveRows
from tfexport.runtimes.outputs import Best, Continuations, FloatArray, IntArray
from tfexport.runtimes.row_state import RowState
from tfexport.runtimes.shared_cache_state import SharedCacheState
from tfexport.runtimes.sources import Sources
from tfexport.runtimes.workspace import Graphs, Workspace

State = RowState | SharedCacheState


class LoopRuntime(BaseRuntime):
    """A runtime over `Graphs`, in buffers of a few sizes."""

    def __init__(self, name: str, config: ModelConfig, graphs: Graphs):
        self._name = name
        self._graphs = graphs
        self._workspace = Workspace(config, graphs)

    @property
    def name(self) -> str:
        return self._name

    @property
    def config(self) -> ModelConfig:
        return self._workspace.config

    @property
    def precision(self) -> Precision:
        return self._graphs.precision

    @property
    def capacity(self) -> Capacity:
        return self._graphs.buckets.capacity(self.config)

    @property
    def capabilities(self) -> Capabilities:
        ahead = self._graphs.search is not None
        return Capabilities(greedy_ahead=ahead, beam_ahead=ahead and self._graphs.has_beam_step, waits_for_host=ahead)

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> State:
        with self._workspace.lock:
            if attention:
                self._graphs.step(self._graphs.buckets.cache_for(1), attention=True)  # raises if there is none
            sources = Sources.encode(self._workspace, src_ids, src_len, beam)
            live = LiveRows.first(len(src_len), beam)
            if beam > 1 and self._graphs.has_beam_step and not attention:
                return SharedCacheState(sources, live)
            return RowState(sources, live, attention=attention)

    def step(self, state: State, tokens: IntArray) -> tuple[FloatArray, State]:
        return state.step(tokens), state

    def best(self, state: State, tokens: IntArray, count: int) -> tuple[Best, State]:
        return state.best(tokens, count), state

    def search_ahead(self, state: State, request: Ahead) -> tuple[Continuations, State]:
        return state.search_ahead(request), state

    def begin_ahead(self, state: State, request: Ahead, sentences: int) -> None:
        state.begin_ahead(request, sentences)
