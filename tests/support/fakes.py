"""A runtime without a model: logits are a pure function of one sentence and its tokens so far.

So a row that is swapped, dropped too early or fed another row's token gives other logits, and the search other ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.runtimes.base import BaseRuntime, Capabilities, Capacity
from tfexport.runtimes.outputs import (
    Argmax,
    ArgmaxRequest,
    Best,
    BestRequest,
    FloatArray,
    IntArray,
    StepOutput,
    StepRequest,
    best_from_logits,
)

Ids = tuple[int, ...]
Model = Callable[[Ids, Ids], FloatArray]
"""(source ids of one sentence, its tokens so far without bos) -> logits [vocab], float32."""

PAD, BOS, EOS = 0, 1, 2


def tiny_config(**changes: object) -> ModelConfig:
    """A valid configuration, of which a search reads the special ids and the limits only."""
    fields: dict[str, object] = {
        "d_model": 2,
        "n_heads": 1,
        "d_ff": 2,
        "n_encoder_layers": 1,
        "n_decoder_layers": 1,
        "src_vocab_size": 100,
        "tgt_vocab_size": 100,
        "max_source_length": 50,
        "max_target_length": 50,
        "unk_id": -1,
        "pad_id": PAD,
        "bos_id": BOS,
        "eos_id": EOS,
    }
    return ModelConfig.from_dict({**fields, **changes})


def random_model(seed: int, vocab: int, *, spread: float = 2.0) -> Model:
    """Logits that look random, but are always the same for the same sentence and tokens."""

    def logits(source: Ids, tokens: Ids) -> FloatArray:
        random = np.random.default_rng([seed, len(source), *source, *tokens])
        return (spread * random.standard_normal(vocab)).astype(np.float32)

    return logits


def tied_model(seed: int, vocab: int) -> Model:
    """Logits with ties everywhere: some tokens share all probability evenly.

    Their number is a power of two: sums of logarithms of such numbers are as equal as the products they stand for,
    whoever computes them.
    """

    def logits(source: Ids, tokens: Ids) -> FloatArray:
        random = np.random.default_rng([seed, len(source), *source, *tokens])
        possible = 2 ** random.integers(1, int(np.log2(vocab)) + 1)
        row = np.full(vocab, -np.inf, dtype=np.float32)
        row[random.permutation(vocab)[:possible]] = 0.0
        return row

    return logits


def echo_model(vocab: int, eos: int = EOS) -> Model:
    """Says its source, up to the first eos, and then eos; of wrong tokens it likes the lower more."""

    def logits(source: Ids, tokens: Ids) -> FloatArray:
        row = np.linspace(1.0, 0.0, vocab, dtype=np.float32)
        row[source[len(tokens)] if len(tokens) < len(source) else eos] = 10.0
        return row

    return logits


def constant_model(logits: Sequence[float]) -> Model:
    """The same logits whatever came before."""
    return lambda source, tokens: np.array(logits, dtype=np.float32)


ATTENTION_LAYERS, ATTENTION_HEADS = 2, 3


def attention_of(source: Ids, tokens: Ids) -> FloatArray:
    """Cross-attention [layers, heads, source ids] that looks random, but is the same for the same sentence and tokens."""
    random = np.random.default_rng([7, len(source), *source, *tokens])
    return random.dirichlet(np.full(len(source), 0.3), (ATTENTION_LAYERS, ATTENTION_HEADS)).astype(np.float32)


class ScriptedState:
    """Sources of `batch` sentences and the tokens of `batch` * `beam` rows, bos included."""

    def __init__(self, sources: list[Ids], prefixes: list[Ids], beam: int, *, tells: bool = False):
        assert len(prefixes) == len(sources) * beam
        self.sources, self.prefixes, self.beam, self.tells = sources, prefixes, beam, tells
        self.spent = False

    @property
    def attention(self) -> FloatArray:
        """Of the tokens that came last; what lies behind a source is 9, which nobody may read."""
        assert self.tells, "nobody asked for it"
        assert not self.spent
        told = np.full((ATTENTION_LAYERS, self.rows, ATTENTION_HEADS, max(map(len, self.sources)) + 1), 9.0, np.float32)
        for row, prefix in enumerate(self.prefixes):
            source = self.sources[row // self.beam]
            told[:, row, :, : len(source)] = attention_of(source, prefix[1:])
        return told

    @property
    def rows(self) -> int:
        return len(self.prefixes)

    @property
    def cross(self) -> list[FloatArray]:
        return []

    def select(self, rows: IntArray) -> ScriptedState:
        self.spend()
        groups = np.asarray(rows).reshape(-1, self.beam)
        sentences = groups // self.beam
        assert (sentences == sentences[:, :1]).all(), f"rows {rows} mix sentences"
        assert len(set(sentences[:, 0])) == len(sentences), f"rows {rows} repeat sentences"
        return ScriptedState(
            [self.sources[sentence] for sentence in sentences[:, 0]],
            [self.prefixes[row] for row in rows],
            self.beam,
            tells=self.tells,
        )

    def spend(self) -> None:
        """A real runtime may have written the next state over this one, so nobody may use it twice."""
        assert not self.spent, "this state was already stepped or selected"
        self.spent = True


class ScriptedRuntime(BaseRuntime):
    """Runs a `Model` through the whole `Runtime` protocol, checks how it is used, and notes the rows of each step."""

    name = "scripted"
    precision: Precision = "float32"

    def __init__(self, model: Model, config: ModelConfig):
        self.config = config
        self.capacity = Capacity.of_model(config)
        self.rows: list[list[int]] = []
        """For every search, the rows of each of its steps."""
        self._model = model

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> ScriptedState:
        assert src_ids.dtype == src_len.dtype == np.int64
        assert src_ids.shape == (len(src_len), src_len.max())
        assert src_len.min() > 0, "a source without ids has nothing to attend to"
        assert beam > 0
        for row, length in zip(src_ids, src_len, strict=True):
            assert (row[length:] == self.config.pad_id).all()
        sources = [tuple(row[:length].tolist()) for row, length in zip(src_ids, src_len, strict=True)]
        self.rows.append([])
        return ScriptedState(sources, [()] * (len(sources) * beam), beam, tells=attention)

    def step(self, state: ScriptedState, tokens: IntArray) -> tuple[FloatArray, ScriptedState]:
        state.spend()
        assert tokens.dtype == np.int64
        assert tokens.shape == (state.rows,)
        prefixes = [(*prefix, token) for prefix, token in zip(state.prefixes, tokens.tolist(), strict=True)]
        assert all(prefix[0] == self.config.bos_id for prefix in prefixes)
        assert len(prefixes[0]) <= self.config.max_target_length, "more tokens than the model has positions"
        logits = [self._model(state.sources[row // state.beam], prefix[1:]) for row, prefix in enumerate(prefixes)]
        self.rows[-1].append(state.rows)
        return np.stack(logits), ScriptedState(state.sources, prefixes, state.beam, tells=state.tells)

    def best(self, state: ScriptedState, tokens: IntArray, count: int) -> tuple[Best, ScriptedState]:
        logits, state = self.step(state, tokens)
        return best_from_logits(logits, count), state


class JoiningState(ScriptedState):
    """A `JoiningState` of the runtimes: sentences begin at idle places, at any step, and a step changes it in place."""

    def __init__(self, sources: list[Ids], prefixes: list[Ids], beam: int, *, tells: bool = False):
        super().__init__(sources, prefixes, beam, tells=tells)
        self.is_idle = [False] * len(sources)

    def put(self, places: IntArray, other: JoiningState) -> None:
        assert other.beam == self.beam
        other.spend()
        for place in places.tolist():
            assert place <= len(self.sources), "a gap before the place"
            if place == len(self.sources):
                self.sources.append(())
                self.prefixes += [()] * self.beam
                self.is_idle.append(True)
            assert self.is_idle[place], f"place {place} is in use"
        for place, source in zip(places.tolist(), other.sources, strict=True):
            self._write(place, source)

    def _write(self, place: int, source: Ids) -> None:
        self.sources[place], self.is_idle[place] = source, False
        self.prefixes[place * self.beam : (place + 1) * self.beam] = [()] * self.beam

    def idle(self, places: IntArray) -> None:
        for place in places.tolist():
            assert not self.is_idle[place]
            self.is_idle[place] = True

    def select(self, rows: IntArray) -> JoiningState:
        found = super().select(rows)
        state = JoiningState(found.sources, found.prefixes, self.beam, tells=self.tells)
        state.is_idle = [self.is_idle[row // self.beam] for row in rows[:: self.beam].tolist()]
        return state


class JoiningRuntime(ScriptedRuntime):
    """A `ScriptedRuntime` whose states join.

    Args:
        kind: of its states.
    """

    capabilities = Capabilities(argmax=True, joins=True)

    def __init__(self, model: Model, config: ModelConfig, kind: type[JoiningState] = JoiningState):
        super().__init__(model, config)
        self._kind = kind

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> JoiningState:
        state = super().encode(src_ids, src_len, beam=beam, attention=attention)
        return self._kind(state.sources, state.prefixes, beam, tells=attention)

    def step(self, state: ScriptedState, tokens: IntArray) -> tuple[FloatArray, JoiningState]:
        assert isinstance(state, JoiningState)
        live = [not state.is_idle[row // state.beam] for row in range(state.rows)]
        logits = np.full((state.rows, self.config.tgt_vocab_size), np.nan, dtype=np.float32)  # which nobody may read
        for row in np.flatnonzero(live).tolist():
            state.prefixes[row] = (*state.prefixes[row], int(tokens[row]))
            assert len(state.prefixes[row]) <= self.config.max_target_length
            logits[row] = self._model(state.sources[row // state.beam], state.prefixes[row][1:])
        self.rows[-1].append(sum(live))
        return logits, state

    def best(self, state: Any, tokens: IntArray, count: int) -> tuple[Best, Any]:
        logits, state = self.step(state, tokens)
        return _best(logits, count), state

    def argmax(self, state: Any, tokens: IntArray, banned: Sequence[int]) -> tuple[Argmax, Any]:
        [output], state = self.shared_step(state, tokens, [ArgmaxRequest(tuple(banned))])
        assert isinstance(output, Argmax)
        return output, state

    def shared_step(
        self, state: Any, tokens: IntArray, requests: Sequence[StepRequest]
    ) -> tuple[list[StepOutput], Any]:
        logits, state = self.step(state, tokens)
        outputs: list[StepOutput] = []
        for request in requests:
            if isinstance(request, ArgmaxRequest):
                allowed = logits.copy()
                allowed[:, list(request.banned)] = -np.inf
                ids = allowed.argmax(axis=1)[:, None]
                outputs.append(Argmax(np.take_along_axis(allowed, ids, axis=1), ids))
            else:
                outputs.append(_best(logits, request.count) if isinstance(request, BestRequest) else logits)
        return outputs, state


def _best(logits: FloatArray, count: int) -> Best:
    """`best_from_logits` of the rows that are not idle."""
    count = min(count, logits.shape[1])
    live = np.isfinite(logits).any(axis=1)
    found = Best(np.full((len(logits), count), np.nan), np.zeros((len(logits), count), dtype=np.int64))
    some = best_from_logits(logits[live], count)
    found.log_probs[live], found.ids[live] = some
    return found


LOGITS = np.array([1.0, 3.0, 0.0, 2.0, -1.0, 2.5])


def sampling_distribution(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, logits: NDArray[np.float64] = LOGITS
) -> NDArray[np.float64]:
    """The distribution over the tokens of `logits`, from the definitions: Holtzman et al. 2020, section 3.1 and 5."""
    probabilities = np.exp(logits / temperature)
    probabilities /= probabilities.sum()
    best_first = sorted(range(len(logits)), key=lambda token: -probabilities[token])
    if top_k:
        probabilities[best_first[top_k:]] = 0
        probabilities /= probabilities.sum()
    kept, total = [], 0.0
    for token in best_first:
        if total < top_p:  # the smallest set that has at least top_p
            kept.append(token)
            total += probabilities[token]
    probabilities[[token for token in best_first if token not in kept]] = 0
    return probabilities / probabilities.sum()
