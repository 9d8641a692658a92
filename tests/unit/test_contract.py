"""The table of all tensors: names of files, types by precision, axes by model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fakes import tiny_config
from tfexport import contract, graph_contract
from tfexport.bundle.writer import float32_islands
from tfexport.dialects import DIALECTS, groups_queries_on_cuda, runtime_dialects

CONFIG = tiny_config(d_model=24, n_heads=3, n_decoder_layers=2, tgt_vocab_size=100)
CLASSIFIER = tiny_config(
    n_classes=5, n_decoder_layers=0, tgt_vocab_size=0, max_target_length=0, bos_id=-1, tie_source_target=False
)
ORT_ROLES = ("encoder", "decoder_step", "beam_step", "greedy_step")
CUDA_ROLES = ("encoder", "decoder_step", "beam_step")
PORTABLE_ROLES = ("encoder", "decoder_step", "select_rows", "greedy_search", "beam_search", "best_tokens")


def every_graph() -> Iterator[contract.GraphSpec]:
    dialects: tuple[contract.Dialect, ...] = tuple(DIALECTS)
    for precision in contract.PRECISIONS.values():
        for dialect in dialects:
            yield from graph_contract.graphs_of(CONFIG, precision, dialect)


def test_a_classifier_has_no_file_of_screening() -> None:
    config = CONFIG.replace(d_model=32, n_heads=4, tgt_vocab_size=2000)
    assert contract.weights_files(config, "float32") == [contract.WEIGHTS_FILE, contract.SCREENING_FILE]
    assert contract.weights_files(CLASSIFIER.replace(d_model=32, tgt_vocab_size=2000), "float32") == [
        contract.WEIGHTS_FILE
    ]


@pytest.mark.parametrize(
    ("precision", "dialect", "files"),
    [
        ("float32", "onnx24", [f"{role}.onnx" for role in PORTABLE_ROLES]),
        ("float16", "onnx24", [f"{role}.fp16.onnx" for role in PORTABLE_ROLES]),
        ("bfloat16", "onnx24", [f"{role}.bf16.onnx" for role in PORTABLE_ROLES]),
        ("float32", "ort", [f"{role}.ort.onnx" for role in ORT_ROLES]),
        ("float32", "ort-cuda", [f"{role}.ort-cuda.onnx" for role in CUDA_ROLES]),
        ("float16", "ort-cuda", [f"{role}.fp16.ort-cuda.onnx" for role in CUDA_ROLES]),
        ("int8", "ort", [f"{role}.int8.ort.onnx" for role in ORT_ROLES]),
        ("int4", "ort", [f"{role}.int4.ort.onnx" for role in ORT_ROLES]),
    ],
)
def test_files_of_the_graphs_of_a_precision_and_dialect(precision: Any, dialect: Any, files: list[str]) -> None:
    graphs = graph_contract.graphs_of(CONFIG, precision, dialect)
    assert [graph.file for graph in graphs] == files
    assert {(graph.precision, graph.dialect) for graph in graphs} == {(precision, dialect)}


@pytest.mark.parametrize(
    ("precision", "dialect"),
    [
        *(("float16", "ort"), ("bfloat16", "ort")),
        *((precision, dialect) for precision in ("int8", "int4") for dialect in ("onnx24", "ort-cuda")),
    ],
)
def test_the_dialect_ort_is_the_only_one_of_quantized_graphs_and_has_no_half_precision(
    precision: Any, dialect: Any
) -> None:
    assert graph_contract.graphs_of(CONFIG, precision, dialect) == ()


@pytest.mark.parametrize(("d_model", "has_one"), [(24, True), (48, True), (12, False), (36, False), (3, False)])
def test_a_greedy_step_in_the_dialect_ort_needs_heads_of_a_multiple_of_8(d_model: int, has_one: bool) -> None:
    graphs = graph_contract.graphs_of(CONFIG.replace(d_model=d_model), "int8", "ort")
    assert [graph.role for graph in graphs] == [
        role for role in ORT_ROLES if has_one or role in ("encoder", "beam_step")
    ]


def test_no_two_graphs_have_one_file() -> None:
    files = [graph.file for graph in every_graph()]
    assert len(files) == len(set(files)) == 18 + 12 + 9


@pytest.mark.parametrize(
    ("precision", "dialect", "file"),
    [
        ("float32", "onnx24", "encoder_classifier.onnx"),
        ("float16", "onnx24", "encoder_classifier.fp16.onnx"),
    ],
)
def test_a_classifier_is_one_graph(precision: Any, dialect: Any, file: str) -> None:
    (graph,) = graph_contract.graphs_of(CLASSIFIER, precision, dialect)
    assert graph.file == file
    assert [tensor.name for tensor in graph.outputs] == ["logits"]
    assert graph_contract.graphs_of(CLASSIFIER, precision, "ort") == ()
    assert graph_contract.graphs_of(CLASSIFIER, "int8", "ort") == ()
    assert graph_contract.graphs_of(CLASSIFIER, precision, "ort-cuda") == ()
    assert contract.shape(graph.outputs[0], CLASSIFIER) == ["batch", 5]


def test_short_names_and_weights_files() -> None:
    shorts = {precision: contract.short_name(precision) for precision in contract.PRECISIONS.values()}
    assert shorts == {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8", "int4": "int4"}
    assert {contract.weights_file(precision) for precision in shorts} == {
        "weights.safetensors",
        "weights.fp16.safetensors",
        "weights.bf16.safetensors",
        "weights.int8.safetensors",
        "weights.int4.safetensors",
    }
    assert contract.weights_file("float32") == contract.WEIGHTS_FILE


def test_tensors_have_the_precision_of_their_graph_and_logits_float32() -> None:
    always = {
        "logits": "float32",
        "best.log_probs": "float32",
        "best.logits": "float32",
        "mask": "bool",
        "total": "int32",
    }
    always |= dict.fromkeys(
        ["src_ids", "src_len", "tokens", "position", "index", "best.ids", "slot", "count", "banned"], "int64"
    )
    # What chooses tokens computes in float64, or in float32, in every precision.
    searches = {
        tensor.name: tensor.dtype for graph in graph_contract.SEARCH_GRAPHS for tensor in graph.inputs + graph.outputs
    }
    always |= {name: dtype for name, dtype in searches.items() if name not in always}
    narrow = {"position": "int32", "src_len": "int32"}  # as ONNX Runtime's own operators take them
    seen = set()
    for graph in every_graph():
        known = always | {"ort": narrow, "ort-cuda": {"position": "int32"}}.get(graph.dialect, {})
        floats = "float32" if graph.precision in ("int8", "int4") else graph.precision
        for tensor in (*graph.inputs, *graph.outputs):
            assert tensor.dtype == known.get(tensor.name, floats), (graph.file, tensor.name)
            seen.add(tensor.name)
    assert set(always) < seen


def test_layers_are_written_out_key_before_value() -> None:
    _, step, *_ = graph_contract.graphs_of(CONFIG)
    names = [tensor.name for tensor in step.inputs]
    past, cross = contract.cache_names(CONFIG, "past"), contract.cache_names(CONFIG, "cross")
    assert past == ["past.0.key", "past.0.value", "past.1.key", "past.1.value"]
    assert names == ["tokens", "position", "src_len", *past, *cross]
    assert [tensor.name for tensor in step.outputs][-4:] == contract.cache_names(CONFIG, "present")
    for role in (
        *graph_contract.graphs_of(CONFIG, "int4", "ort")[1:],
        *graph_contract.graphs_of(CONFIG, "float16", "ort-cuda")[1:],
    ):
        names = [tensor.name for tensor in role.inputs]
        assert names[-8:] == [*past, *cross]
        assert [tensor.name for tensor in role.outputs][-4:] == contract.cache_names(CONFIG, "present")
    assert not [tensor.name for graph in every_graph() for tensor in graph.inputs if "{" in tensor.name]


@pytest.mark.parametrize(("vocab", "best"), [(100, 17), (17, 17), (5, 5)])
def test_there_are_no_more_best_tokens_than_tokens(vocab: int, best: int) -> None:
    config = tiny_config(tgt_vocab_size=vocab)
    _, step, *_ = graph_contract.graphs_of(config)
    shapes = {tensor.name: contract.shape(tensor, config) for tensor in step.outputs}
    assert shapes["best.ids"] == shapes["best.log_probs"] == ["rows", best]
    assert shapes["logits"] == ["rows", vocab]


def test_only_half_precision_graphs_with_logits_have_islands() -> None:
    for graph in every_graph():
        has_one = graph.role in ("decoder_step", "beam_step") and graph.precision in ("float16", "bfloat16")
        assert bool(float32_islands(graph)) == has_one, graph.file


@pytest.mark.parametrize(
    ("changes", "precision", "grouped"),
    [
        ({}, "float16", True),
        ({}, "bfloat16", True),
        ({}, "float32", False),
        ({"d_model": 12}, "float16", False),
        ({"d_head": 256}, "float16", True),
        ({"d_head": 264}, "float16", False),
        ({"positions": "relative", "max_distance": 4}, "float16", False),
    ],
    ids=str,
)
def test_which_heads_group_query_attention_takes_on_cuda(
    changes: dict[str, Any], precision: Any, grouped: bool
) -> None:
    assert groups_queries_on_cuda(CONFIG.replace(**changes), precision) == grouped


@pytest.mark.parametrize("d_model", [2, 6, 24, 96, 256, 300, 512, 1000])
@pytest.mark.parametrize(("precision", "item"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_an_aligned_length_is_the_smallest_that_ends_on_the_alignment(d_model: int, precision: Any, item: int) -> None:
    found = contract.aligned_length(d_model, precision)
    fitting = [length for length in range(1, 257) if length * d_model * item % contract.ALIGNMENT == 0]
    assert found == fitting[0]


def test_each_runtime_takes_the_first_of_its_dialects_that_there_is() -> None:
    everything = list(every_graph())
    found = runtime_dialects(everything)
    assert found["ort-cpu"] == {
        **dict.fromkeys(("float32", "int8", "int4"), "ort"),
        **dict.fromkeys(("float16", "bfloat16"), "onnx24"),
    }
    assert found["ort-cuda"] == dict.fromkeys(("float32", "float16", "bfloat16"), "ort-cuda")
    without = runtime_dialects(graph for graph in everything if graph.dialect != "ort")
    assert without["ort-cpu"] == dict.fromkeys(("float32", "float16", "bfloat16"), "onnx24")
    for runtime in ("ort-cuda", "tensorrt"):
        assert without[runtime] == found[runtime]
    assert runtime_dialects([]) == {"ort-cpu": {}, "ort-cuda": {}, "tensorrt": {}}
