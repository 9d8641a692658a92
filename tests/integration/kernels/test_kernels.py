"""The kernels: each computes what its function is defined as, refuses what it cannot, and is used where it is built."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from makers.ort_bundles import CONFIG, random_model, random_sources, session_of, write_bundle, write_graphs
from tfexport import kernels
from tfexport.contract import FEWEST_WORDS
from tfexport.dialects import calls_attention_functions
from tfexport.graphs.emitter import FUNCTIONS
from tfexport.graphs.linear_float32 import BLOCK
from tfexport.graphs.linear_quantized import quantize_int8
from tfexport.graphs.screening import CANDIDATES
from tfexport.models.transformer import Transformer
from tfexport.runtimes.ort_cpu.runtime import OrtCpuRuntime
from tfexport.search.search import SearchOptions, search

pytestmark = pytest.mark.skipif(
    kernels.library() is None and shutil.which("c++") is None, reason="there is no C++ compiler here: no kernel was run"
)

Arrays = Mapping[str, NDArray[Any]]

LIBRARY = kernels.library()

TYPES = {
    "float32": TensorProto.FLOAT,
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}

HEADS, DIM = 3, 16
WIDTH = HEADS * DIM


def model_of(head_dim: int = DIM, **changes: Any) -> Transformer:
    return random_model(CONFIG.replace(d_model=HEADS * head_dim, n_heads=HEADS, **changes), seed=5)


@cache
def definitions() -> dict[str, onnx.FunctionProto]:
    """The functions of graphs in float32 and int8, by name."""
    found = {}
    # Only large vocabularies are screened. The rows of attention are flat in float32.
    models = ((model_of(), "int8"), (model_of(tgt_vocab_size=FEWEST_WORDS), "float32"))
    with TemporaryDirectory() as folder:
        for model, precision in models:
            for graph in write_graphs(model, Path(folder), precision):
                proto = onnx.load(Path(folder) / graph.file, load_external_data=False)
                found |= {function.name: function for function in proto.functions}
    return found


def called(name: str, feeds: Arrays, *, kernel: bool, threads: int = 1) -> list[NDArray[Any]]:
    """The outputs of a function: by its kernel, or by its definition."""
    function = definitions()[name]
    graph = helper.make_graph(
        [
            helper.make_node(
                name, list(feeds), list(function.output), domain=FUNCTIONS, **dict.fromkeys(function.attribute, 0.01)
            )
        ],
        name,
        [helper.make_tensor_value_info(n, TYPES[str(array.dtype)], [None] * array.ndim) for n, array in feeds.items()],
        [helper.make_empty_tensor_value_info(output) for output in function.output],
    )
    imports = [helper.make_opsetid(FUNCTIONS, 1), *function.opset_import]
    model = helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    if kernel:
        kernels.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def numbers(seed: int, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def cache_of(seed: int, places: int, slots: int) -> Arrays:
    return {
        "key": numbers(seed + 1, places, HEADS, slots, DIM),
        "value": numbers(seed + 2, places, HEADS, slots, DIM),
    }


def greedy_case(seed: int, places: int, slots: int, queries: int) -> Arrays:
    position = np.random.default_rng(seed).integers(0, slots, places).astype(np.int32)
    total = np.array([position.max() + 1], np.int32)
    return {
        "rows": numbers(seed, places, 3 * WIDTH),
        **cache_of(seed, places, slots),
        "position": position,
        "total": total,
    }


def beam_case(seed: int, places: int, slots: int, queries: int) -> Arrays:
    random = np.random.default_rng(seed)
    slot = random.integers(0, slots + 1, places)
    mask = random.random((places, 1, queries, slots + queries)) < 0.5
    mask &= np.arange(slots + queries) < slot[:, None, None, None]
    for query in range(queries):
        mask[np.arange(places), 0, query, slot + query] = True
    rows = numbers(seed, places * queries, 3 * WIDTH)
    return {"rows": rows, **cache_of(seed, places, slots + queries), "slot": slot, "mask": mask}


def cross_case(seed: int, places: int, slots: int, queries: int) -> Arrays:
    length = np.random.default_rng(seed).integers(1, slots + 1, places).astype(np.int32)
    return {"rows": numbers(seed, places * queries, WIDTH), **cache_of(seed, places, slots), "length": length}


def source_case(seed: int, places: int, slots: int, queries: int) -> Arrays:
    """Of up to 70 tokens a source, of which some are padding."""
    length = np.random.default_rng(seed).integers(1, slots + 1, places).astype(np.int32)
    grid = (places, slots, HEADS, DIM)
    pair = {"key": numbers(seed + 1, *grid), "value": numbers(seed + 2, *grid)}
    return {"query": numbers(seed, places * slots, WIDTH), **pair, "length": length}


def norm_case(seed: int, places: int, slots: int, queries: int) -> Arrays:
    shape = (places, queries, slots)
    pair = {"states": numbers(seed, *shape), "branch": numbers(seed + 1, *shape, scale=3)}
    weights = {"scale": numbers(seed + 2, slots), "bias": numbers(seed + 3, slots)}
    return {**pair, **weights}


def states_case(seed: int, places: int, slots: int, queries: int) -> Arrays:
    return {"states": numbers(seed, places, queries, slots, scale=10 ** (seed % 7 - 3))}


def float_case(seed: int, places: int, slots: int, queries: int) -> Arrays:
    """Of up to 20 rows, 70 inputs and 210 outputs, which are no multiple of a block."""
    states, columns = numbers(seed, places * queries, slots, scale=3), 3 * slots
    blocks = np.pad(numbers(seed + 1, columns, slots), ((0, -columns % BLOCK), (0, 0)))
    blocks = np.ascontiguousarray(blocks.reshape(-1, BLOCK, slots).transpose(0, 2, 1))
    return {"states": states, "weight": blocks, "bias": numbers(seed + 2, columns)}


def blocks_case(seed: int, columns: int, inputs: int) -> Arrays:
    """Weights of a projection, in blocks."""
    matrix = numbers(seed, columns, inputs, scale=10 ** (seed % 5 - 2))
    return {f"weight.{kind}": array for kind, array in quantize_int8(matrix).items()}


def linear_case(seed: int, places: int, slots: int, queries: int) -> Arrays:
    """Of up to 20 rows, 280 inputs and 210 outputs, which are no multiple of a block."""
    states = states_case(seed, places, 4 * slots, queries)["states"]
    columns = 3 * slots
    return {"states": states, **blocks_case(seed, columns, 4 * slots), "bias": numbers(seed + 2, columns)}


def screen_product_case(seed: int, places: int, slots: int, queries: int) -> Arrays:
    rounded = np.random.default_rng(seed).integers(1, 128, (places * queries, 4 * slots)).astype(np.uint8)
    return {"numbers": rounded, **blocks_case(seed, 3 * slots, 4 * slots), "room": numbers(seed + 2, 3 * slots)}


def logits_case(seed: int, places: int, slots: int, queries: int) -> Arrays:
    logits = numbers(seed, places, slots, scale=4)
    if seed % 3 == 0:
        logits = np.round(logits)  # many are equal
    if seed % 4 == 0:
        logits[:, ::3] = -np.inf  # as words are that a shortlist leaves out
        logits[:, -1] = 1
    return {"logits": logits, "count": np.array([min(queries, slots)])}


def banned_case(seed: int, places: int, slots: int, queries: int) -> Arrays:
    logits = logits_case(seed, places, slots, queries)["logits"]
    return {"logits": logits, "banned": np.random.default_rng(seed).permutation(slots)[: min(queries, slots) - 1]}


def screen_states_case(seed: int, places: int, slots: int, queries: int) -> Arrays:
    states = states_case(seed, places, slots, queries)["states"].reshape(-1, slots)
    return {"states": states, "norm": np.abs(numbers(seed + 1, 40)), "error": np.abs(numbers(seed + 2, 40))}


def screen_best_case(seed: int, places: int, slots: int, queries: int) -> Arrays:
    """Bounds that prove the best word, or with every third seed hardly ever do."""
    states, weight = numbers(seed, places, 3 * queries), numbers(seed + 1, CANDIDATES + slots, 3 * queries)
    scale, bias = np.abs(numbers(seed + 2, places, 1)) + 0.1, numbers(seed + 3, len(weight))
    banned = np.arange(len(weight) - 1)[:: 1 + seed % 5] if seed % 2 else np.empty(0, np.int64)
    above = np.abs(numbers(seed + 4, places, len(weight), scale=100 if seed % 3 == 0 else 0.01))
    bounds = (states @ weight.T / scale + above).astype(np.float32)
    return {"bounds": bounds, "scale": scale, "states": states, "weight": weight, "bias": bias, "banned": banned}


CASES = {
    "GreedyAttention": greedy_case,
    "BeamAttention": beam_case,
    "CrossAttention": cross_case,
    "SourceAttention": source_case,
    "ResidualNorm": norm_case,
    "Linear": float_case,
    "LinearRectified": float_case,
    "Int8Linear": linear_case,
    "Int8LinearRectified": linear_case,
    "ScreenStates": screen_states_case,
    "ScreenProduct": screen_product_case,
    "ScreenBest": screen_best_case,
    "BestToken": banned_case,
    "BestTokens": logits_case,
}


def test_every_kernel_has_a_function_and_a_case() -> None:
    assert set(CASES) == set(definitions())
    folder = Path(kernels.__file__).parent
    source = (folder / "operators.h").read_text(encoding="utf-8")
    assert {name for name in CASES if f'{{"{name}"' in source} == set(CASES)
    library = kernels.library()
    assert library is not None, "there is a compiler, and yet the kernels were not built: pip install -e . -v"
    written = max(path.stat().st_mtime for path in folder.iterdir() if path.suffix in (".cpp", ".h"))
    assert library.stat().st_mtime > written, "the kernels are older than their source: pip install -e . -v"


products = pytest.mark.skipif(
    not kernels.has_products(), reason="products have kernels with AVX2 or on a 64-bit ARM alone"
)
PRODUCTS = ("Linear", "LinearRectified", "Int8Linear", "Int8LinearRectified", "ScreenProduct")
"""Functions that have kernels on such CPUs alone; elsewhere their definitions run."""

TARGETS = kernels.supported_instruction_sets(LIBRARY) if LIBRARY is not None else ()
"""The names of the instruction sets that this CPU and the kernels have."""

DEFINED = {
    "GreedyAttention": "2ee1af86",
    "BeamAttention": "d26f0b26",
    "CrossAttention": "f66ea088",
    "SourceAttention": "2f47eec4",
    "ResidualNorm": "241c2106",
    "Linear": "2078fc26",
    "LinearRectified": "393242a1",
    "Int8Linear": "04799797",
    "Int8LinearRectified": "eec8153a",
    "ScreenStates": "7a56ccc1",
    "ScreenProduct": "f20f893a",
    "ScreenBest": "5f7a4f0a",
    "BestToken": "03178fc2",
    "BestTokens": "623b1386",
}
"""A digest of each definition. A kernel takes the place of a definition by its name alone, also of those in bundles that
were exported before: where one of these changes, the function must get another name, or bundles another format.
The order of weights (`BLOCK`, `GROUP`) is not in it, and is of the format too."""


def test_definitions_are_what_their_kernels_stand_for() -> None:
    found = {}
    for name, function in definitions().items():
        nodes = [(node.op_type, node.domain, sorted(map(str, node.attribute))) for node in function.node]
        found[name] = hashlib.sha256(repr((list(function.attribute), nodes)).encode()).hexdigest()[:8]
    assert found == DEFINED


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", CASES)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 70), st.integers(1, 5))
@example(108, 1, 5, 5)  # logits of -inf, and all others banned
@settings(max_examples=40, deadline=None)
def test_a_kernel_computes_what_its_definition_says(
    name: str, seed: int, places: int, slots: int, queries: int
) -> None:
    feeds = CASES[name](seed, places, slots, queries)
    ours, defined = (called(name, feeds, kernel=kernel) for kernel in (True, False))
    if name == "GreedyAttention":  # whose definition leaves open what is behind the new slot
        behind = np.arange(slots) > feeds["position"][:, None, None]  # [places, 1, slots]
        for tensor in (*ours[1:], *defined[1:]):
            tensor[np.broadcast_to(behind, tensor.shape[:3])] = 0
    for found, wanted in zip(ours, defined, strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        if found.dtype == np.float32:
            np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
        else:
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("target", TARGETS[1:] or TARGETS)  # beside the first
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_has_the_same_bits_with_every_instruction_set(
    name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ("Linear", "LinearRectified") and "sse2" in (target, TARGETS[0]):
        pytest.skip("ONNX Runtime computes float32 products here")
    if len(TARGETS) == 1:
        pytest.skip("there are kernels for one instruction set here")
    for seed, places, slots, queries in ((1, 1, 5, 1), (2, 2, 33, 2), (3, 3, 70, 5), (4, 5, 64, 3)):
        feeds = CASES[name](seed, places, slots, queries)
        expected = called(name, feeds, kernel=True)
        monkeypatch.setenv(kernels.ISA, target)
        for actual, wanted in zip(called(name, feeds, kernel=True), expected, strict=True):
            np.testing.assert_array_equal(actual, wanted)
        monkeypatch.delenv(kernels.ISA)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["Int8Linear", "Int8LinearRectified", "Linear", "LinearRectified"])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [*((rows, 260 + 4 * rows, 46 + rows) for rows in range(1, 10)), (13, 8, 145)]
)
def test_products_of_all_tiles(
    name: str, target: str, rows: int, inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers of rows in a tile, and incomplete blocks of outputs."""
    random = np.random.default_rng(rows)
    weight = random.choice([-127, 127, 1, -1], (inputs, outputs)).astype(np.int8)
    _require_product(name, target, random.normal(size=(rows, inputs)).astype(np.float32), weight, monkeypatch)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["Int8Linear", "Int8LinearRectified"])
def test_the_largest_sums_of_products(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.full((65536, 2), 127, np.int8)
    weight[:, 1] = -127
    _require_product(name, target, np.ones((2, 65536), np.float32), weight, monkeypatch)


def _require_product(
    name: str,
    target: str,
    states: NDArray[np.float32],
    weight: NDArray[np.int8],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare the kernel of a product with NumPy's in float64."""
    monkeypatch.setenv(kernels.ISA, target)
    inputs, outputs = weight.shape
    is_int8 = name.startswith("Int8")
    blocks = -(-outputs // BLOCK)
    padded = np.zeros((inputs, blocks * BLOCK), np.int8 if is_int8 else np.float32)
    padded[:, :outputs] = weight
    if is_int8:
        stored = padded.reshape(inputs // 4, 4, blocks, BLOCK).transpose(2, 0, 3, 1)
        feeds = {"states": states, "weight": np.ascontiguousarray(stored), "scale": np.full(outputs, 0.5, np.float32)}
    else:
        stored = padded.reshape(inputs, blocks, BLOCK).transpose(1, 0, 2)
        feeds = {"states": states, "weight": np.ascontiguousarray(stored)}
    feeds["bias"] = numbers(outputs, outputs)
    (actual,) = called(name, feeds, kernel=True)
    exact = states.astype(np.float64)
    if name.endswith("Rectified"):
        exact = np.maximum(exact, 0.0)
    if is_int8:
        largest = 255 if name.endswith("Rectified") else 127
        step = np.abs(exact).max(axis=1, keepdims=True) / largest
        exact = np.rint(exact / np.where(step > 0, step, 1.0)) * step * 0.5
    np.testing.assert_allclose(actual, exact @ weight + feeds["bias"], rtol=1e-4, atol=1e-2)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("head_dim", range(16, 144, 16))
def test_every_size_of_heads_that_there_is_a_kernel_for(head_dim: int, tmp_path: Path) -> None:
    config = model_of(head_dim).config
    assert {calls_attention_functions(config, role) for role in ("encoder", "beam_step")} == {head_dim <= 128}
    _decodes_the_same(model_of(head_dim), tmp_path)


@pytest.mark.parametrize("encoder_head_dim", [DIM, 2 * DIM, DIM // 2])
def test_each_side_has_kernels_for_its_own_heads(encoder_head_dim: int, tmp_path: Path) -> None:
    model = model_of(2 * DIM, n_encoder_heads=2 * HEADS * DIM // encoder_head_dim)
    for precision in ("float32", "int8"):
        graphs = {graph.role: graph.file for graph in write_graphs(model, tmp_path, precision)}
        called = {
            role: {function.name for function in onnx.load(tmp_path / file, load_external_data=False).functions}
            for role, file in graphs.items()
        }
        assert ("SourceAttention" in called["encoder"]) == (encoder_head_dim % 16 == 0)
        assert {"BeamAttention", "CrossAttention"} <= called["beam_step"]
    _decodes_the_same(model, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"norm_first": True}, {"norm": "rms"}, {"final_norm": False}, {"positions": "relative", "max_distance": 9}],
)
def test_search_finds_the_same_with_kernels_and_without(changes: dict[str, Any], tmp_path: Path) -> None:
    _decodes_the_same(model_of(**changes), tmp_path)


def _decodes_the_same(model: Transformer, folder: Path) -> None:
    bundle = write_bundle(model, folder)
    sources = random_sources(model.config, [7, 1, 20, 3, 12, 5])
    found = []
    for wanted in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TFEXPORT_KERNELS", wanted)
            runtime = OrtCpuRuntime(bundle, threads=1)
            every = [
                SearchOptions(max_length=30),
                SearchOptions(max_length=30, scores=False),
                SearchOptions(beam=4, max_length=30),
            ]
            found.append(
                [hypothesis for options in every for line in search(runtime, sources, options) for hypothesis in line]
            )
    ours, plain = found
    assert [hypothesis.ids for hypothesis in ours] == [hypothesis.ids for hypothesis in plain]
    np.testing.assert_allclose([h.score for h in ours], [h.score for h in plain], atol=1e-4)


def _operators(session: onnxruntime.InferenceSession) -> set[str]:
    """The operators of a session that runs, by its own profile."""
    return {
        event["args"]["op_name"]
        for event in json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        if event["name"].endswith("_kernel_time")
    }


def test_sessions_run_the_kernels_where_they_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = write_bundle(model_of(), tmp_path / "bundle", ("float32", "int8"))
    made = onnxruntime.InferenceSession

    def profiled(path: Any, options: onnxruntime.SessionOptions, **more: Any) -> onnxruntime.InferenceSession:
        options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
        return made(path, options, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", profiled)
    seen = {}
    for wanted in ("1", "0"):
        monkeypatch.setenv("TFEXPORT_KERNELS", wanted)
        seen[wanted] = set()
        for precision in ("float32", "int8"):
            runtime = OrtCpuRuntime(bundle, precision=precision, threads=1)  # type: ignore[arg-type]
            for asked in ({}, {"scores": False}, {"beam": 3}):
                search(runtime, random_sources(runtime.config, [4, 6]), SearchOptions(max_length=5, **asked))
            roles = ("encoder", "decoder_step", "greedy_step", "beam_step")
            seen[wanted] |= {name for role in roles for name in _operators(runtime.context.session(role))}
    without = () if kernels.has_products() else PRODUCTS
    assert {name for name in CASES if not name.startswith("Screen") and name not in without} <= seen["1"]
    assert not set(CASES) & seen["0"]
    assert "MultiHeadAttention" in seen["0"]


WRONG_SHAPES = [
    ("GreedyAttention", "rows", (2, 3 * WIDTH + 1)),
    ("GreedyAttention", "rows", (3, 3 * WIDTH)),
    ("GreedyAttention", "key", (2, HEADS, 5, DIM)),
    ("GreedyAttention", "position", (1,)),
    ("BeamAttention", "rows", (3, 3 * WIDTH)),
    ("BeamAttention", "value", (2, HEADS, 8)),
    ("BeamAttention", "slot", (3,)),
    ("BeamAttention", "mask", (2, 1, 2, 7)),
    ("CrossAttention", "rows", (4, WIDTH - 1)),
    ("CrossAttention", "key", (2, HEADS, 0, DIM)),
    ("CrossAttention", "length", (1,)),
    ("ResidualNorm", "branch", (2, 2, 5)),
    ("ResidualNorm", "scale", (5,)),
    ("ResidualNorm", "bias", (7,)),
    ("Linear", "states", (4, 0)),
    ("Linear", "states", (1, 1, 1, 2, 6)),
    ("Linear", "states", (4, 5)),
    ("Linear", "weight", (2, 6, 48)),
    ("Linear", "weight", (1, 6, 47)),
    ("Linear", "weight", (6, 48)),
    ("LinearRectified", "bias", (49,)),
    ("LinearRectified", "bias", (0,)),
    ("Int8Linear", "states", (2, 0)),
    ("Int8Linear", "states", (2, 20)),
    ("Int8Linear", "states", (1, 65540)),
    ("Int8Linear", "weight.int8", (2, 6, 48, 4)),
    ("Int8Linear", "weight.int8", (1, 7, 48, 4)),
    ("Int8Linear", "weight.int8", (1, 6, 4, 48)),
    ("Int8Linear", "weight.scale", (33,)),
    ("Int8LinearRectified", "bias", (17,)),
    ("ScreenProduct", "numbers", (2, 2, 24)),
    ("ScreenProduct", "numbers", (2, 23)),
    ("ScreenProduct", "weight.int8", (1, 6, 192)),
    ("ScreenProduct", "room", (17,)),
    ("SourceAttention", "query", (12, 47)),
    ("SourceAttention", "query", (11, 48)),
    ("SourceAttention", "key", (2, 6, 48)),
    ("SourceAttention", "key", (2, 5, 3, 16)),
    ("SourceAttention", "value", (2, 6, 3, 15)),
    ("SourceAttention", "length", (3,)),
    ("BestTokens", "logits", (2, 3, 2)),
    ("BestTokens", "count", (2,)),
    ("BestToken", "logits", (12,)),
    ("ScreenStates", "states", (12,)),
    ("ScreenStates", "error", (39,)),
    ("ScreenBest", "bounds", (2, 21)),
    ("ScreenBest", "scale", (1, 1)),
    ("ScreenBest", "states", (2, 5)),
    ("ScreenBest", "weight", (21, 6)),
    ("ScreenBest", "bias", (21,)),
]


@pytest.mark.parametrize(
    ("name", "key", "shape"),
    [pytest.param(*wrong, marks=[products] * (wrong[0] in PRODUCTS)) for wrong in WRONG_SHAPES],
)
def test_shapes_that_do_not_fit_are_refused(name: str, key: str, shape: tuple[int, ...]) -> None:
    """A hostile graph may call a kernel with anything of the right types: not a byte is read or written out of bounds."""
    feeds = dict(CASES[name](1, 2, 6, 2))
    feeds[key] = np.resize(feeds[key], shape)
    with pytest.raises(Exception, match=r"(takes|are|is|fit|one|cache|keys)"):
        called(name, feeds, kernel=True)


def test_a_mask_may_have_any_bytes() -> None:
    """NumPy and files may have others than 0 and 1 where they say bool."""
    feeds = dict(CASES["BeamAttention"](1, 2, 30, 2))
    every = np.full(feeds["mask"].shape, 255, np.uint8).view(bool)
    ours, plain = (called("BeamAttention", {**feeds, "mask": m}, kernel=True)[0] for m in (every, np.ones_like(every)))
    np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize(
    ("name", "key", "numbers_of", "message"),
    [
        ("GreedyAttention", "position", -1, "the cache is full"),
        ("GreedyAttention", "position", 6, "the cache is full"),
        ("BeamAttention", "slot", 2**40, "the cache is full"),
        ("BeamAttention", "slot", -1, "the cache is full"),
        ("BeamAttention", "slot", 7, "the cache is full"),  # of 8 slots two hypotheses need two
        ("CrossAttention", "length", 7, "larger than there are keys"),
        ("CrossAttention", "length", -1, "larger than there are keys"),
        ("SourceAttention", "length", 7, "larger than there are tokens"),
        ("SourceAttention", "length", -1, "larger than there are tokens"),
        ("BestTokens", "count", 7, "not so many tokens"),
        ("BestTokens", "count", -1, "not so many tokens"),
        ("BestToken", "banned", 6, "no such token"),
        ("BestToken", "banned", -1, "no such token"),
        ("ScreenBest", "banned", 22, "no such token"),
        ("ScreenBest", "banned", -1, "no such token"),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, key: str, numbers_of: int, message: str) -> None:
    feeds = dict(CASES[name](1, 2, 6, 2))
    feeds[key] = np.full_like(feeds[key], numbers_of)
    with pytest.raises(Exception, match=message):
        called(name, feeds, kernel=True)


@pytest.mark.parametrize("large", [np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("slots", [5, 16])
def test_an_overflow_is_not_hidden(large: float, slots: int) -> None:
    feeds = dict(CASES["CrossAttention"](1, 1, slots, 1))
    feeds["rows"] = np.full_like(feeds["rows"], large)
    feeds["key"] = np.full_like(feeds["key"], -1e5)
    (mixed,) = called("CrossAttention", feeds, kernel=True)
    assert np.isnan(mixed).all()


@pytest.mark.parametrize("large", [np.inf, -np.inf, np.nan])
def test_an_overflow_of_a_source_stays_in_its_head(large: float) -> None:
    feeds = dict(source_case(1, 2, 40, 1))
    feeds["key"] = feeds["key"].copy()
    feeds["key"][0, 0, 1, 0] = large
    (mixed,) = called("SourceAttention", feeds, kernel=True)
    # The least number has no weight where the query is positive.
    assert np.isnan(mixed[:40, DIM : 2 * DIM]).any()
    assert np.isfinite(mixed[40:]).all()
    assert np.isfinite(mixed[:, :DIM]).all()


def test_a_nan_is_not_hidden() -> None:
    feeds = dict(CASES["CrossAttention"](1, 2, 40, 2))
    feeds["key"] = feeds["key"].copy()
    feeds["key"][0, 1, 0, 0] = np.nan
    (mixed,) = called("CrossAttention", feeds, kernel=True)
    assert np.isnan(mixed[:2, DIM : 2 * DIM]).all()
    assert not np.isnan(mixed[2:]).any()
    logits = numbers(0, 2, 70)
    logits[0, 50] = np.nan
    for name, more in (("BestToken", {"banned": np.array([3])}), ("BestTokens", {"count": np.array([2])})):
        scores, _ = called(name, {"logits": logits, **more}, kernel=True)
        assert np.isnan(scores[0]).all()
        assert not np.isnan(scores[1]).any()


@products
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["Int8Linear", "Int8LinearRectified"])
@pytest.mark.parametrize("slots", [1, 11])
def test_rounding_does_not_hide_what_is_no_number(name: str, number: float, slots: int) -> None:
    feeds = dict(linear_case(1, 2, slots, 1))
    feeds["states"][0, 0, 3] = number
    (found,) = called(name, feeds, kernel=True)
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()


@pytest.mark.parametrize("name", ["Linear", "LinearRectified"])
def test_a_nan_in_a_row_is_in_all_of_its_product(name: str) -> None:
    feeds = dict(float_case(1, 3, 20, 1))
    feeds["states"][1, 7] = np.nan
    (found,) = called(name, feeds, kernel=True)
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


BITS = {
    "GreedyAttention": "6ce61ca3",
    "BeamAttention": "e019ef0c",
    "CrossAttention": "4efec932",
    "SourceAttention": "5e8711a8",
    "ResidualNorm": "00bb91e8",
    "ScreenStates": "898e866d",
    "ScreenBest": "661291b6",
}
"""A digest of the result of some random cases, which is the same on all CPUs. Not of `BestTokens`, which calls the system's
logarithm. Where one changes, int8 bundles give other tokens than the version before did."""


@pytest.mark.parametrize("name", BITS)
def test_results_have_the_same_bits_on_all_cpus(name: str) -> None:
    """With other instruction sets, a compiler might add in another order, or fuse a multiplication with an addition."""
    digest = hashlib.sha256()
    for seed in range(5):
        for result in called(name, CASES[name](seed, 3, 37, 2), kernel=True):
            digest.update(result.tobytes())
    assert digest.hexdigest()[:8] == BITS[name]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_attention_of_a_source_is_the_same_by_any_number_of_threads(threads: int) -> None:
    """To the last bit."""
    feeds = source_case(1, 5, 70, 1)
    (found,), (wanted,) = (called("SourceAttention", feeds, kernel=True, threads=number) for number in (threads, 1))
    np.testing.assert_array_equal(found, wanted)


@products
@pytest.mark.parametrize("name", ["Int8Linear", "Int8LinearRectified"])
@pytest.mark.parametrize("seed", range(10))
def test_products_of_8_bits_are_those_of_the_definition_to_the_last_bit(name: str, seed: int) -> None:
    """So that the next activations are rounded alike: int8 decodes the same on CPUs without such kernels."""
    feeds = linear_case(seed, 3, 7 * seed + 1, 2)
    (found,), (wanted,) = (called(name, feeds, kernel=kernel) for kernel in (True, False))
    np.testing.assert_array_equal(found, wanted)


@products
@pytest.mark.parametrize("inputs", [256, 2048])
@pytest.mark.parametrize("places", [1, 9])
def test_the_error_of_a_long_sum_is_that_of_a_short_one(inputs: int, places: int) -> None:
    """In one sum 2048 products would lose 1.4e-6 on average, in sums of 256 it is 3e-7."""
    feeds = dict(float_case(1, places, inputs, 1))
    feeds["states"] /= 3 * np.float32(inputs) ** 0.5
    (found,) = called("Linear", feeds, kernel=True)
    matrix = feeds["weight"].astype(np.float64).transpose(1, 0, 2).reshape(inputs, -1)[:, : 3 * inputs]
    error = found - (feeds["states"].astype(np.float64) @ matrix + feeds["bias"])
    assert np.sqrt((error**2).mean()) < 5e-7


@pytest.mark.parametrize("least", [0, 1e-45, 1e-43])
def test_a_row_of_zeros_and_of_the_least_floats_gives_the_bias(least: float) -> None:
    feeds = dict(linear_case(1, 2, 5, 1))
    feeds["states"][0] = 0
    feeds["states"][0, 0, 3] = least
    (found,) = called("Int8Linear", feeds, kernel=True)
    np.testing.assert_array_equal(found[0, 0], feeds["bias"])


@products
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_products_are_the_same_by_any_number_of_threads_and_with_any_rows_beside_them(threads: int) -> None:
    """To the last bit."""
    eight_bits = {"states": numbers(0, 40, 512), **blocks_case(1, 1000, 512), "bias": numbers(2, 1000)}
    floats = {
        "states": numbers(0, 40, 512),
        "weight": numbers(1, -(-1000 // BLOCK), 512, BLOCK),
        "bias": numbers(2, 1000),
    }
    # With few rows, inputs that a ReLU makes 0 are passed over: here 4 of 5, all, and hardly any of them.
    few, none, most = ({**floats, "states": floats["states"] - np.float32(shift)} for shift in (0.9, 9, -2))
    few["states"][:, 7] = -1
    few["states"][2, 7] = np.nan  # which is not 0, in an input that is passed over but for it
    rectified = [("LinearRectified", feeds) for feeds in (few, none, most)]
    for name, feeds in (("Int8Linear", eight_bits), ("Linear", floats), *rectified):
        (together,) = called(name, feeds, kernel=True, threads=threads)
        for rows in (1, 2, 3, 5, 8, 15):
            (alone,) = called(name, {**feeds, "states": feeds["states"][:rows]}, kernel=True)
            np.testing.assert_array_equal(together[:rows], alone)


def test_the_largest_sums_do_not_overflow() -> None:
    size = 65536
    weights = {
        "weight.int8": np.full((1, size // 4, BLOCK, 4), -127, np.int8),
        "weight.scale": np.ones(BLOCK, np.float32),
    }
    feeds = {"states": np.ones((1, size), np.float32), **weights, "bias": np.zeros(BLOCK, np.float32)}
    for name in ("Int8Linear", "Int8LinearRectified"):
        (found,) = called(name, feeds, kernel=True)
        np.testing.assert_allclose(found, -127.0 * size, rtol=1e-6)


def test_definitions_are_what_other_sessions_run(tmp_path: Path) -> None:
    """Whoever opens a graph with ONNX Runtime alone can run it."""
    for graph in write_graphs(model_of(), tmp_path):
        session_of(tmp_path / graph.file)


@pytest.mark.parametrize("vocab", [128, 129, 300, 1500])
@pytest.mark.parametrize("count", [1, 8, 100])
def test_best_tokens_of_many_are_found_in_order(vocab: int, count: int) -> None:
    logits = np.concatenate(
        [
            numbers(vocab, 3, vocab, scale=4),
            np.round(numbers(count, 3, vocab)),  # where equal ones lie in other parts of the row
            np.sort(numbers(1, 1, vocab)),
            np.sort(numbers(1, 1, vocab))[:, ::-1],
            np.zeros((1, vocab), np.float32),
            np.where(np.arange(vocab) < vocab - 1, -np.inf, 2).astype(np.float32)[None],
        ]
    )
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    log_probs, ids = called("BestTokens", {"logits": logits, "count": np.array([count])}, kernel=True)
    assert (ids == expected).all()
    sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(log_probs, np.take_along_axis(logits, expected, axis=1) - sums, atol=1e-5)
    banned = expected[0, :-1]  # of the first row the best word but one may not come
    left = np.where(np.isin(np.arange(vocab), banned), -np.inf, logits)
    largest, ids = called("BestToken", {"logits": logits, "banned": banned}, kernel=True)
    assert (largest[:, 0] == left.max(axis=1)).all()
    possible = np.isfinite(largest[:, 0])
    assert (ids[:, 0] == left.argmax(axis=1))[possible].all()


@pytest.mark.parametrize("count", [129, 1000, 1500])
def test_many_best_tokens_are_found_in_order(count: int) -> None:
    logits = np.concatenate(
        [numbers(0, 3, 1500, scale=4), np.round(numbers(1, 3, 1500)), np.zeros((1, 1500), np.float32)]
    )
    logits[1, ::2] = -np.inf
    log_probs, ids = called("BestTokens", {"logits": logits, "count": np.array([count])}, kernel=True)
    assert (ids == np.argsort(-logits, axis=1, kind="stable")[:, :count]).all()
    sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(log_probs, np.take_along_axis(logits, ids, axis=1) - sums, atol=1e-5)
    logits[2, 7] = np.nan
    log_probs, ids = called("BestTokens", {"logits": logits, "count": np.array([count])}, kernel=True)
    assert np.isnan(log_probs[2]).all()
    assert len(set(ids[2].tolist())) == count
    assert not np.isnan(log_probs[[0, 1, 3, 4, 5, 6]]).any()


def test_the_best_of_many_banned_words() -> None:
    logits, random = numbers(0, 20, 700), np.random.default_rng(0)
    logits[3, 100] = np.inf
    banned = np.append(random.permutation(700)[:650], 100)
    largest, ids = called("BestToken", {"logits": logits, "banned": banned}, kernel=True)
    left = logits.copy()
    left[:, banned] = -np.inf
    assert (ids[:, 0] == left.argmax(axis=1)).all()
    assert (largest[:, 0] == left.max(axis=1)).all()


def screened_best(
    states: NDArray[Any], weight: NDArray[Any], bounds: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    feeds = {"bounds": bounds, "scale": np.ones((len(states), 1), np.float32), "states": states, "weight": weight}
    more = {"bias": np.zeros(len(weight), np.float32), "banned": np.empty(0, np.int64)}
    best, ids = called("ScreenBest", {**feeds, **more}, kernel=True)
    return best[:, 0], ids[:, 0]


@pytest.mark.parametrize("lost", [np.nan, -np.inf])
def test_bounds_out_of_range_prove_nothing(lost: float) -> None:
    states, weight = numbers(0, 5, 8), numbers(1, 300, 8)
    logits = states @ weight.T
    expected = logits.argmax(axis=1)
    bounds = logits + np.float32(0.01)
    if np.isnan(lost):
        bounds[np.arange(5), expected] = lost
    else:
        bounds[:, np.arange(300) != 150] = lost
    best, ids = screened_best(states, weight, bounds)
    assert (ids == expected).all()
    np.testing.assert_allclose(best, logits.max(axis=1), rtol=1e-5)
