"""The graphs of the dialect `ort-cuda`: the operators that they have, and steps over caches that they write in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file

from makers.ort_bundles import CONFIG, random_model
from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.contract import GraphSpec, Precision
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.weights import write_variant, write_weights
from tfexport.graph_checks.session import session_of
from tfexport.models.transformer import Transformer
from tfexport.runtimes.pytorch import TorchRuntime

Emitted = dict[str, tuple[GraphSpec, onnx.GraphProto]]
Emit = Callable[..., Emitted]
LAYERS = CONFIG.n_decoder_layers


def write(model: Transformer, folder: Path, precision: Precision, keep: tuple[str, ...] = ()) -> Emitted:
    write_weights(model, "float32", folder)
    write_variant(model, precision, folder, keep)
    graphs = write_graphs(model.config, precision, folder, keep, dialects=("ort-cuda",))
    return {spec.role: (spec, onnx.load(folder / spec.file, load_external_data=False).graph) for spec in graphs}


@pytest.fixture
def emit(tmp_path: Path) -> Emit:
    """Write the graphs of `CONFIG` with changes."""

    def made(precision: Precision = "float16", keep: tuple[str, ...] = (), **changes: Any) -> Emitted:
        return write(random_model(CONFIG.replace(**changes)), tmp_path, precision, keep)

    return made


def operators(graph: onnx.GraphProto, path: str = "") -> Counter[str]:
    """The operators that compute more than shapes, of nodes whose names begin so."""
    free = ("Reshape", "Unsqueeze", "Squeeze")
    return Counter(
        node.op_type
        for node in graph.node
        if node.name.startswith(path) and not node.name.startswith(contract.SHAPE_NODE) and node.op_type not in free
    )


# --- the operators


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_greedy_step_has_16_nodes_a_layer(emit: Emit, precision: Precision) -> None:
    """Six projections, of which three add their bias with the sum and norm after them; then two attentions and a ReLU."""
    graph = emit(precision)["decoder_step"][1]
    one_layer = Counter(Gemm=6, SkipLayerNormalization=3, GroupQueryAttention=1, Attention=1, Relu=1)
    assert operators(graph, "decoder.layers.0") == operators(graph, "decoder.layers.1") == one_layer
    rest = Counter(Gather=2, Add=1, Cast=1, Gemm=1, TopK=1, LogSoftmax=1, GatherElements=1)
    assert operators(graph) == rest + one_layer + one_layer
    with_bias = [node.name for node in graph.node if node.op_type == "Gemm" and len(node.input) == 3]
    assert len(with_bias) == 3 * LAYERS


def test_a_beam_step_copies_no_keys_or_values(emit: Emit) -> None:
    graph = emit()["beam_step"][1]
    one_layer = Counter(Gemm=6, SkipLayerNormalization=3, Split=1, TensorScatter=2, Attention=2, Relu=1)
    assert operators(graph, "decoder.layers.0") == one_layer
    assert operators(graph)["Where"] == 1  # the mask of all layers
    assert not operators(graph)["Transpose"]


def test_float32_has_the_standard_form_of_greedy_attention(emit: Emit) -> None:
    """The CUDA provider has GroupQueryAttention in half precision alone."""
    graph = emit("float32")["decoder_step"][1]
    own = operators(graph, "decoder.layers.0.self_attention/")
    assert own == Counter(Split=1, TensorScatter=2, Attention=1)


@pytest.mark.parametrize(
    "changes", [{"d_model": 36}, {"d_head": 264}, {"positions": "relative", "max_distance": 4}], ids=str
)
def test_heads_that_group_query_attention_does_not_take_have_the_standard_form(
    emit: Emit, changes: dict[str, Any]
) -> None:
    graph = emit(**changes)["decoder_step"][1]
    assert operators(graph)["GroupQueryAttention"] == 0
    assert operators(graph)["TensorScatter"] == 2 * LAYERS


@pytest.mark.parametrize(
    ("changes", "operator", "is_contrib"),
    [
        ({"activation": "gelu"}, "BiasGelu", True),
        ({"activation": "gelu", "feed_forward_bias": False}, "Gelu", False),
        ({"activation": "gelu_tanh"}, "FastGelu", True),
        ({"activation": "silu"}, "QuickGelu", True),
        ({"norm": "rms"}, "SkipSimplifiedLayerNormalization", True),
    ],
    ids=str,
)
def test_fused_operators_of_other_models(emit: Emit, changes: dict[str, Any], operator: str, is_contrib: bool) -> None:
    graph = emit(**changes)["decoder_step"][1]
    found = [node for node in graph.node if node.op_type == operator]
    assert len(found) == (3 if "norm" in changes else 1) * LAYERS
    assert {node.domain for node in found} == {"com.microsoft" if is_contrib else ""}


def test_around_modules_that_stay_in_float32_the_form_is_standard(emit: Emit) -> None:
    keep = ("decoder.layers.0", "decoder.layers.1.self_attention", "decoder.layers.1.self_attention.key")
    graph = emit(keep=keep)["decoder_step"][1]
    assert "SkipLayerNormalization" not in operators(graph, "decoder.layers.0.norms")
    assert operators(graph, "decoder.layers.0.norms")["LayerNormalization"] == 3
    assert operators(graph, "decoder.layers.0.self_attention/")["GroupQueryAttention"] == 1
    assert operators(graph, "decoder.layers.1.self_attention/")["GroupQueryAttention"] == 0
    assert operators(graph, "decoder.layers.1.self_attention.key/")["Gemm"] == 1


def test_query_key_and_value_are_one_tensor_of_the_weights_file(emit: Emit, tmp_path: Path) -> None:
    spec, graph = emit()["decoder_step"]
    stored = load_file(tmp_path / contract.weights_file(spec.precision))
    name = "decoder.layers.0.self_attention.query_key_value.weight"
    assert stored[name].shape == (3 * CONFIG.d_model, CONFIG.d_model)
    assert name in {tensor.name for tensor in graph.initializer}
    assert not [name for name in stored if ".self_attention.key." in name and name.startswith("decoder.")]
    portable = write_graphs(CONFIG, "float16", tmp_path, dialects=("onnx24",))
    step = onnx.load(tmp_path / portable[1].file, load_external_data=False).graph
    places = {
        tensor.name: int(entry.value)
        for tensor in step.initializer
        for entry in tensor.external_data
        if entry.key == "offset"
    }
    first = "decoder.layers.0.self_attention"
    size = CONFIG.d_model**2 * 2
    assert places[f"{first}.key.weight"] - places[f"{first}.query.weight"] == size
    assert places[f"{first}.value.weight"] - places[f"{first}.key.weight"] == size


# --- searches


class Steps:
    """A step graph on ONNX Runtime's CPU provider, with caches that it writes in place."""

    def __init__(self, folder: Path, graphs: Emitted, role: contract.Role, config: ModelConfig):
        self.spec, _ = graphs[role]
        self._session = session_of(folder / self.spec.file, folder)
        self._encoder = session_of(folder / graphs["encoder"][0].file, folder)
        self._config = config
        self.values: dict[str, onnxruntime.OrtValue] = {}

    def encode(self, src_ids: NDArray[np.int64], src_len: NDArray[np.int64]) -> None:
        names = contract.cache_names(self._config, "cross")
        given = {"src_ids": onnxruntime.OrtValue.ortvalue_from_numpy(src_ids)}
        given["src_len"] = self.values["src_len"] = onnxruntime.OrtValue.ortvalue_from_numpy(src_len)
        self.values |= dict(zip(names, self._encoder.run_with_ort_values(names, given), strict=True))

    def empty_cache(self, *shape: int) -> None:
        dtype = np.dtype(self.spec.precision)
        for name in contract.cache_names(self._config, "past"):
            self.values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype))

    def run(self, **inputs: NDArray[Any]) -> dict[str, NDArray[Any]]:
        binding = self._session.io_binding()
        given = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
        for tensor in self.spec.inputs:
            binding.bind_ortvalue_input(tensor.name, given.get(tensor.name) or self.values[tensor.name])
        for past, present in self.spec.caches.items():
            binding.bind_ortvalue_output(present, self.values[past])
        told = ("logits", "best.log_probs", "best.ids")
        for name in told:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        # In the order in which they were bound: caches first.
        return dict(zip(told, (value.numpy() for value in binding.get_outputs()[-len(told) :]), strict=True))


LENGTHS = np.array([3, 5, 1])
STEPS = 6
TOLERANCE = {"float32": 2e-5, "float16": 0.03}


@pytest.fixture(params=["float32", "float16"])
def precision(request: pytest.FixtureRequest) -> Precision:
    return request.param


def require_best(found: dict[str, NDArray[Any]]) -> None:
    logits = found["logits"].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    wanted = np.sort(log_probs, axis=1)[:, ::-1][:, : contract.BEST_TOKENS]
    assert np.abs(found["best.log_probs"] - wanted).max() < 1e-5
    assert np.abs(np.take_along_axis(log_probs, found["best.ids"], axis=1) - wanted).max() < 1e-5


@pytest.mark.parametrize(
    "changes", [{}, {"d_model": 36, "norm": "rms", "positions": "relative", "max_distance": 3}], ids=str
)
def test_greedy_steps_in_place_are_the_forward_without_a_cache(
    tmp_path: Path, precision: Precision, changes: dict[str, Any]
) -> None:
    """Rows at different positions, in one cache that is longer than any of them."""
    config = CONFIG.replace(**changes)
    model, random = random_model(config), np.random.default_rng(0)
    steps = Steps(tmp_path, write(model, tmp_path, precision), "decoder_step", config)
    src_ids = random.integers(4, config.src_vocab_size, (len(LENGTHS), LENGTHS.max()))
    tokens = random.integers(4, config.tgt_vocab_size, (len(LENGTHS), STEPS))
    wanted = TorchRuntime(model).teacher_forced(src_ids, LENGTHS, tokens)
    steps.encode(src_ids, LENGTHS)
    steps.empty_cache(len(LENGTHS), config.n_heads, STEPS + 3, config.head_dim)
    position = np.zeros(len(LENGTHS), np.int32)
    for turn in range(STEPS + 2):  # the second sentence begins two steps later
        at = np.clip(turn - np.array([0, 2, 0]), 0, STEPS - 1)
        rows = np.arange(len(LENGTHS))
        found = steps.run(tokens=tokens[rows, at], position=position)
        assert np.abs(found["logits"] - wanted[rows, at]).max() < TOLERANCE[precision]
        require_best(found)
        position = np.clip(turn + 1 - np.array([0, 2, 0]), 0, STEPS - 1).astype(np.int32)


@pytest.mark.parametrize(
    "changes", [{}, {"d_model": 36, "norm": "rms", "positions": "relative", "max_distance": 3}], ids=str
)
def test_beam_steps_in_place_follow_the_ancestors_of_each_hypothesis(
    tmp_path: Path, precision: Precision, changes: dict[str, Any]
) -> None:
    config, beam = CONFIG.replace(**changes), 3
    model, random = random_model(config), np.random.default_rng(0)
    steps = Steps(tmp_path, write(model, tmp_path, precision), "beam_step", config)
    batch = len(LENGTHS)
    src_ids = random.integers(4, config.src_vocab_size, (batch, LENGTHS.max()))
    steps.encode(src_ids, LENGTHS)
    size = STEPS * beam + 2
    steps.empty_cache(batch, size, config.d_attention)
    mask = np.zeros((batch, 1, beam, size), bool)
    history = np.zeros((batch, beam, 0), np.int64)
    for step in range(STEPS):
        parents = random.integers(0, beam, (batch, beam))  # some beams die, others have several children
        history = np.take_along_axis(history, parents[:, :, None], axis=1)
        mask = np.take_along_axis(mask, parents[:, None, :, None], axis=2)
        tokens = random.integers(4, config.tgt_vocab_size, (batch, beam))
        history = np.concatenate([history, tokens[:, :, None]], axis=2)
        slot = np.full(batch, step * beam)
        mask[:, 0, np.arange(beam), step * beam + np.arange(beam)] = True
        found = steps.run(tokens=tokens, position=np.full((batch, beam), step, np.int32), slot=slot, mask=mask)
        each = np.repeat(np.arange(batch), beam)
        wanted = TorchRuntime(model).teacher_forced(src_ids[each], LENGTHS[each], history.reshape(batch * beam, -1))
        assert np.abs(found["logits"] - wanted[:, -1]).max() < TOLERANCE[precision]
        require_best(found)
