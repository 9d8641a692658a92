"""Functions of int8 graphs: the kernels and the definitions have the same bits. So the tokens are the same, too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper

from makers.ort_bundles import CONFIG, outputs_of, random_model, random_sources, write_bundle, write_graphs
from tfexport import kernels
from tfexport.graph_checks.cases_ort import case
from tfexport.graph_checks.session import session_of
from tfexport.graphs.emitter import FUNCTIONS
from tfexport.models.transformer import Transformer
from tfexport.runtimes.ort_cpu.runtime import OrtCpuRuntime
from tfexport.search.search import SearchOptions, search

pytestmark = pytest.mark.skipif(
    kernels.library() is None and shutil.which("c++") is None, reason="there is no C++ compiler here: no kernel was run"
)

Arrays = Mapping[str, NDArray[Any]]
HEADS = 2
TYPES = {"float32": 1, "int32": 6, "int64": 7, "bool": 9}
"""ONNX's numbers of NumPy's types."""


def model_of(head_dim: int, d_model: int = 24) -> Transformer:
    return random_model(CONFIG.replace(d_model=d_model, n_heads=HEADS, d_head=head_dim), seed=5)


@cache
def definitions(head_dim: int, d_model: int) -> dict[str, onnx.FunctionProto]:
    """The functions of int8 graphs, by name."""
    found = {}
    with TemporaryDirectory() as folder:
        for graph in write_graphs(model_of(head_dim, d_model), Path(folder), "int8"):
            proto = onnx.load(Path(folder) / graph.file, load_external_data=False)
            found |= {function.name: function for function in proto.functions}
    return found


def assert_same_bits(name: str, feeds: Arrays, head_dim: int = 16, d_model: int = 24) -> None:
    """All numbers that are not NaN have the same bits, but for the sign of 0. That has no effect on rounded activations."""
    function = definitions(head_dim, d_model)[name]
    call = helper.make_node(
        name, list(feeds), list(function.output), domain=FUNCTIONS, **dict.fromkeys(function.attribute, 0.01)
    )
    given_ = [helper.make_tensor_value_info(n, TYPES[str(array.dtype)], array.shape) for n, array in feeds.items()]
    outputs = [helper.make_empty_tensor_value_info(output) for output in function.output]
    graph = helper.make_graph([call], name, given_, outputs)
    imports = [helper.make_opsetid(FUNCTIONS, 1), *function.opset_import]
    proto = helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=10)
    found = []
    for kernel in (True, False):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        if kernel:
            kernels.register(options)
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found.append(session.run(None, dict(feeds)))
    for ours, defined in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, defined)


def numbers(random: np.random.Generator, scale: float, *shape: int) -> NDArray[np.float32]:
    return (random.normal(size=shape) * scale).astype(np.float32)


def cache_of(random: np.random.Generator, scale: float, *shape: int) -> Arrays:
    return {name: numbers(random, scale, *shape) for name in ("key", "value")}


seeds, scales = st.integers(0, 10_000), st.sampled_from([1e-3, 1.0, 4.0, 30.0])
sizes = st.sampled_from([16, 48, 128]), st.integers(1, 4), st.integers(1, 70), st.integers(1, 5)


@pytest.mark.sampled(every=2)
@given(seeds, scales, st.sampled_from([8, 16, 24, 40, 100, 256]), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_residual_norms_have_the_bits_of_their_kernel(seed: int, scale: float, size: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    states, branch = (numbers(random, scale, rows, 1, size) for _ in range(2))
    weights = {"scale": numbers(random, 1, size), "bias": numbers(random, 1, size)}
    assert_same_bits("ResidualNorm", {"states": states, "branch": branch, **weights}, d_model=size)


@pytest.mark.sampled(every=2)
@given(seeds, scales, *sizes[:3])
@settings(max_examples=20, deadline=None)
def test_greedy_attention_has_the_bits_of_its_kernel(
    seed: int, scale: float, dim: int, places: int, slots: int
) -> None:
    random = np.random.default_rng(seed)
    position = random.integers(0, slots, places).astype(np.int32)
    past = cache_of(random, scale, places, HEADS, slots, dim)
    for tensor in past.values():  # what is not written yet may be any number, and none
        tensor[np.broadcast_to(np.arange(slots) > position[:, None, None], tensor.shape[:3])] = np.nan
    rows = numbers(random, scale, places, 1, 3 * HEADS * dim)
    total = np.array([position.max() + 1], np.int32)
    assert_same_bits("GreedyAttention", {"rows": rows, **past, "position": position, "total": total}, dim)


def steps_of_all_sizes(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with random seeds, scales and sizes, and with the smallest sizes."""
    with_smallest = example(0, 1.0, 16, 1, 1, 1)(settings(max_examples=20, deadline=None)(test))
    decorated: Callable[..., None] = pytest.mark.sampled(every=2)(given(seeds, scales, *sizes)(with_smallest))
    return decorated


@steps_of_all_sizes
def test_beam_attention_has_the_bits_of_its_kernel(
    seed: int, scale: float, dim: int, places: int, slots: int, queries: int
) -> None:
    random = np.random.default_rng(seed)
    slot = random.integers(0, slots + 1, places)
    mask = random.random((places, 1, queries, slots + queries)) < random.choice([0, 0.1, 0.5, 1])
    mask &= np.arange(slots + queries) < slot[:, None, None, None]
    for query in range(queries):
        mask[np.arange(places), 0, query, slot + query] = True
    mask[random.random((places, 1, queries)) < 0.1] = False  # a query that sees nothing
    past = cache_of(random, scale, places, HEADS, slots + queries, dim)
    rows = numbers(random, scale, places, queries, 3 * HEADS * dim)
    assert_same_bits("BeamAttention", {"rows": rows, **past, "slot": slot, "mask": mask}, dim)


@steps_of_all_sizes
def test_cross_attention_has_the_bits_of_its_kernel(
    seed: int, scale: float, dim: int, places: int, slots: int, queries: int
) -> None:
    random = np.random.default_rng(seed)
    length = random.integers(0, slots + 1, places).astype(np.int32)
    keys = cache_of(random, scale, places, HEADS, slots, dim)
    rows = numbers(random, scale, places, queries, HEADS * dim)
    assert_same_bits("CrossAttention", {"rows": rows, **keys, "length": length}, dim)


@pytest.mark.sampled(every=2)
@given(seeds, scales, *sizes[:3])
@example(0, 1.0, 16, 1, 1)
@settings(max_examples=20, deadline=None)
def test_attention_of_a_source_has_the_bits_of_its_kernel(
    seed: int, scale: float, dim: int, places: int, slots: int
) -> None:
    random = np.random.default_rng(seed)
    length = random.integers(0, slots + 1, places).astype(np.int32)
    keys = cache_of(random, scale, places, slots, HEADS, dim)
    query = numbers(random, scale, places, slots, HEADS * dim)
    assert_same_bits("SourceAttention", {"query": query, **keys, "length": length}, dim)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("part", ["rows", "key", "value"])
def test_what_is_no_number_is_the_same(number: float, part: str) -> None:
    random = np.random.default_rng(0)
    feeds = {"rows": numbers(random, 1, 2, 3, HEADS * 16), **cache_of(random, 1, 2, HEADS, 20, 16)}
    feeds[part][0, 1] = number
    feeds[part][1, 0, 0] = number
    assert_same_bits("CrossAttention", {**feeds, "length": np.array([20, 7], np.int32)})


@pytest.mark.parametrize("head_dim", [16, 64])
def test_graphs_have_the_same_bits(tmp_path: Path, head_dim: int) -> None:
    """Only the log-probabilities of beams may differ in the last bit."""
    model = model_of(head_dim)
    for graph in write_graphs(model, tmp_path, "int8"):
        proto = onnx.load(tmp_path / graph.file, load_external_data=False)
        ours, defined = (session_of(proto, tmp_path, with_kernels=kernel) for kernel in (True, False))
        for seed in range(5):
            with torch.inference_mode():
                sizes = {"batch": 3, "beam": 4, "src": 18, "cache": 40, "count": 8}
                inputs = case(model, graph, sizes, np.random.default_rng(seed)).inputs
            found, wanted = (outputs_of(session, inputs) for session in (ours, defined))
            for name in found.keys() - {"best.log_probs"}:
                np.testing.assert_array_equal(found[name], wanted[name], err_msg=f"{graph.file}: {name}")


def test_tokens_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = write_bundle(model_of(16), tmp_path, ("float32", "int8"))
    sources = random_sources(CONFIG, [1, 7, 20, 3, 12, 5] * 5)
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv(kernels.SWITCH, switch)
        runtime = OrtCpuRuntime(bundle, precision="int8", threads=1)
        options = (
            SearchOptions(max_length=60, scores=False),
            SearchOptions(max_length=60),
            SearchOptions(beam=4, max_length=60),
        )
        found.append([h.ids for each in options for line in search(runtime, sources, each) for h in line])
    assert found[0] == found[1]
