"""Engines are built by the real TensorRT for RTX, without a GPU; what it would get wrong is refused before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import helper

from makers import engine_bundles, ort_bundles
from makers.tiny import TinyCheckpoint
from tfexport import contract, graph_contract
from tfexport.bundle.reader import Engine, open_bundle
from tfexport.contract import GraphSpec, Precision
from tfexport.errors import BundleError, EngineError
from tfexport.exporter.engine_graphs import freeze_cache
from tfexport.exporter.engine_plan import LengthPlan, Profile
from tfexport.exporter.engines import Builder, attentions, build_engines, check_network, refuse_traps
from tfexport.exporter.pipeline import export
from tfexport.system import disk_cache
from tfexport.system.gpu import Gpu

tensorrt_rtx = pytest.importorskip("tensorrt_rtx", reason="the tensorrt-rtx extra is not installed: nothing was built")

PLAN = LengthPlan(max_batch=4, max_beam=2, max_source=16, cache=(16, 32))


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In all precisions. Not to be changed."""
    directory = tmp_path_factory.mktemp("engine") / "tiny"
    return export(tiny_checkpoint.load(), directory, precisions=["float16", "bfloat16"], gate=None).directory


@pytest.fixture
def own(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "own"))


@pytest.fixture(scope="module")
def builder() -> Builder:
    return Builder("tensorrt_rtx")


def graph_of(bundle: Path, role: str, precision: Precision = "float32") -> GraphSpec:
    config = open_bundle(bundle).config
    return next(graph for graph in graph_contract.graphs_of(config, precision) if graph.role == role)


def model_of(bundle: Path, role: str, *, cache: int = 16) -> onnx.ModelProto:
    model = onnx.load(open_bundle(bundle).graph(role), load_external_data=False)  # type: ignore[arg-type]
    freeze_cache(model, cache)
    return model


def profile_of(bundle: Path, role: str) -> Profile:
    config = open_bundle(bundle).config
    return PLAN.fitted(config, "float32").profile(graph_of(bundle, role), config, 16)


def build(directory: Path, **changes: Any) -> list[Engine]:
    request: dict[str, Any] = {
        "precisions": ["float32"],
        "gpus": ["sm89"],
        "library": "tensorrt_rtx",
        "built": lambda engine, size: None,
    }
    return build_engines(directory, PLAN, **{**request, **changes})


# --- building


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["float16", "float32", "bfloat16"])
def test_engines_are_built_for_gpus_that_are_not_here(own: Path, precision: Precision) -> None:
    told: list[tuple[Engine, int]] = []
    gpus = ["sm89", "sm120", "portable"]
    new = build(own, precisions=[precision], gpus=gpus, built=lambda engine, size: told.append((engine, size)))
    bundle = open_bundle(own)  # verifies every file
    assert list(bundle.engines) == new == [engine for engine, _ in told]
    for gpu in gpus:
        of_gpu = [engine for engine in new if engine.gpu == gpu]
        assert [(e.role, e.cache) for e in of_gpu] == [
            ("encoder", 0),
            ("select_rows", 0),
            ("decoder_step", 16),
            ("decoder_step", 32),
        ]
    for engine, size in told:
        assert (own / engine.file).stat().st_size == size > 10_000
        assert (engine.precision, engine.library, engine.version) == (
            precision,
            "tensorrt_rtx",
            tensorrt_rtx.__version__,
        )
        assert engine.seconds > 0
        assert all(len(shapes) == 3 for shapes in engine.profile.values())


@pytest.mark.thorough
def test_engines_of_other_gpus_and_precisions_stay_and_the_same_ones_are_replaced(own: Path) -> None:
    build(own, gpus=["sm89"])
    build(own, gpus=["sm120"], precisions=["float16"])
    first = {engine.file for engine in open_bundle(own).engines}
    assert len(first) == 8
    smaller = replace(PLAN, cache=(16,))
    build_engines(
        own, smaller, precisions=["float32"], gpus=["sm89"], library="tensorrt_rtx", built=lambda engine, size: None
    )
    engines = {engine.file for engine in open_bundle(own).engines}
    assert first - engines == {"decoder_step.fp32.cache32.sm89.tensorrt_rtx.engine"}
    assert not (own / "decoder_step.fp32.cache32.sm89.tensorrt_rtx.engine").exists()


@pytest.mark.thorough
def test_a_failing_build_leaves_the_bundle_as_it_was(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(own, gpus=["sm89"])
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    calls: list[str] = []

    def fail(self: Builder, path: Path, *rest: Any) -> memoryview:
        calls.append(path.name)
        if len(calls) == 3:
            raise EngineError("TensorRT says no.")
        return memoryview(b"another engine")

    monkeypatch.setattr(Builder, "build", fail)
    with pytest.raises(EngineError, match="says no"):
        build(own, gpus=["sm89"])
    assert {path.name: path.read_bytes() for path in own.iterdir()} == before
    assert [path.name for path in own.parent.iterdir()] == ["own"], "and nothing beside it"


def test_a_precision_that_was_not_exported_names_the_flag(tiny_bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"has no fp16 decoder_step graph .* Export again with --precision fp16"):
        build(tiny_bundle, precisions=["float16"])


def test_a_gpu_that_the_library_does_not_know_is_refused_with_those_it_knows(own: Path) -> None:
    with pytest.raises(
        EngineError, match=r"does not build for sm90\. It knows sm80, .*sm120.* and portable; .*full TensorRT"
    ):
        build(own, gpus=["sm89", "sm90"])
    assert open_bundle(own).engines == ()


def test_float32_products_really_are_missing_on_turing(own: Path, builder: Builder) -> None:
    """If this fails, sm75 may be offered."""
    arguments = (open_bundle(own).graph("decoder_step"), graph_of(own, "decoder_step"), profile_of(own, "decoder_step"))
    with pytest.raises(EngineError, match=r"cannot build decoder_step\.onnx for sm75"):
        builder.build(*arguments, 16, "sm75", 1 << 26)


def test_full_tensorrt_keeps_its_timings(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its API is that of TensorRT for RTX; its libraries are not needed to see what is asked of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    builder = Builder("tensorrt_rtx")
    builder.library = "tensorrt"
    asked: list[bytes] = []
    cleared: list[Any] = []
    settings = SimpleNamespace(
        set_memory_pool_limit=lambda pool, size: None,
        clear_flag=cleared.append,
        add_optimization_profile=lambda shapes: None,
        create_timing_cache=lambda content: asked.append(content) or content,
        set_timing_cache=lambda timings, ignore_mismatch: timings != b"of another GPU",
        get_timing_cache=lambda: SimpleNamespace(serialize=lambda: b"timings"),
    )
    library = builder._builder
    monkeypatch.setattr(
        builder,
        "_builder",
        SimpleNamespace(
            create_network=library.create_network,
            create_optimization_profile=library.create_optimization_profile,
            create_builder_config=lambda: settings,
            build_serialized_network=lambda network, given: b"an engine",
        ),
    )
    monkeypatch.setattr("tfexport.exporter.engines.find_gpu", lambda: Gpu("NVIDIA H100 80GB", "sm90", 80 << 30))
    name = f"timings-{tensorrt_rtx.__version__}-NVIDIA-H100-80GB"
    for before in (None, None, b"of another GPU"):
        if before is not None:
            disk_cache.keep(name, before)
        arguments = (open_bundle(own).graph("encoder"), graph_of(own, "encoder"), profile_of(own, "encoder"), 0, "sm90")
        assert bytes(builder.build(*arguments, 1 << 26)) == b"an engine"
    assert set(cleared) == {tensorrt_rtx.BuilderFlag.TF32}, "float32 means float32"
    assert asked == [b"", b"timings", b"of another GPU", b""]
    assert [path.name for path in disk_cache.folder().iterdir()] == [name]


@pytest.mark.parametrize(
    ("head", "precision", "changes"),
    [
        (20, "float16", {}),
        pytest.param(9, "bfloat16", {"norm_first": True}, marks=pytest.mark.thorough),
        pytest.param(5, "float16", {"positions": "relative", "max_distance": 4}, marks=pytest.mark.thorough),
        pytest.param(22, "float32", {}, marks=pytest.mark.thorough),
    ],
)
def test_heads_and_lengths_of_any_size_are_built(
    head: int, precision: Precision, changes: dict[str, Any], tmp_path: Path
) -> None:
    """TensorRT for RTX 1.7 fails with boolean masks there; sources are padded beyond the 7 positions."""
    config = ort_bundles.CONFIG.replace(d_model=3 * head, max_source_length=7, **changes)
    directory = engine_bundles.write_bundle(ort_bundles.random_model(config), tmp_path / "bundle").directory
    new = build(directory, precisions=[precision], gpus=["sm89"])
    assert {engine.role for engine in new} == {"encoder", "decoder_step", "select_rows"}
    encoder = next(engine for engine in new if engine.role == "encoder")
    assert encoder.profile["src_ids"][2][1] % contract.aligned_length(config.d_attention, precision) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("head", [16, 20])
def test_attention_that_stays_in_float32_is_built(head: int, tmp_path: Path) -> None:
    """Of the self-attention of a step TensorRT for RTX 1.7 would end the process."""
    model = ort_bundles.random_model(ort_bundles.CONFIG.replace(d_model=3 * head))
    keep = [
        f"{layer}_attention" for layer in ("encoder.layers.0.self", "decoder.layers.0.self", "decoder.layers.1.cross")
    ]
    directory = engine_bundles.write_bundle(model, tmp_path / "bundle", {"float16": keep}).directory
    assert {engine.role for engine in build(directory, precisions=["float16"])} == {
        *("encoder", "decoder_step", "select_rows")
    }


@pytest.mark.thorough
def test_boolean_masks_really_are_not_built(builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, `buildable_attention` may go."""
    monkeypatch.setattr("tfexport.exporter.engine_graphs.buildable_attention", lambda model: None)
    config = ort_bundles.CONFIG.replace(d_model=60)
    directory = engine_bundles.write_bundle(ort_bundles.random_model(config), tmp_path / "bundle").directory
    with pytest.raises(EngineError, match=r"cannot build encoder\.fp16\.onnx for sm89: .*MyelinCheckException"):
        build(directory, precisions=["float16"])


# --- the traps, as changes to a graph that is right


def test_the_exported_graphs_have_no_traps(bundle: Path) -> None:
    for role in ("encoder", "decoder_step", "select_rows"):
        refuse_traps(model_of(bundle, role), graph_of(bundle, role))


@pytest.mark.parametrize("knows_lengths", [True, False])
def test_a_dropped_mask_is_found(
    bundle: Path, builder: Builder, knows_lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT 10.15 has none of these attributes, and 10.16 only `num_ranks`."""
    if not knows_lengths:
        for name in ("causal_kind", "key_value_form", "key_value_lengths", "num_ranks", "query_form", "query_lengths"):
            monkeypatch.delattr(tensorrt_rtx.IAttention, name)
    model = model_of(bundle, "encoder")
    without_mask(model)
    network = builder.parse(model, open_bundle(bundle).graph("encoder"))
    with pytest.raises(EngineError, match="dropped the mask of an attention"):
        check_network(builder.trt, network, graph_of(bundle, "encoder"), profile_of(bundle, "encoder"))


def first(model: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == op_type)


def without_mask(model: onnx.ModelProto) -> None:
    first(model, "Attention").input[3] = ""


def with_own_cache(model: onnx.ModelProto) -> None:
    first(model, "Attention").output.extend(["kept.key", "kept.value"])


def copied_after_writing(model: onnx.ModelProto) -> None:
    node = first(model, "TensorScatter")
    present, node.output[0] = node.output[0], "written"
    model.graph.node.append(helper.make_node("Identity", ["written"], [present]))


def gathered_before_writing(model: onnx.ModelProto) -> None:
    node = first(model, "TensorScatter")
    past, node.input[0] = node.input[0], "gathered"
    model.graph.node.insert(0, helper.make_node("Gather", [past, "position"], ["gathered"], axis=0))


def read_beside_writing(model: onnx.ModelProto) -> None:
    past = first(model, "TensorScatter").input[0]
    model.graph.node.append(helper.make_node("ReduceMax", [past], ["largest"]))


def written_along_another_axis(model: onnx.ModelProto) -> None:
    next(attribute for attribute in first(model, "TensorScatter").attribute if attribute.name == "axis").i = -1


def of_open_length(model: onnx.ModelProto) -> None:
    value = next(value for value in model.graph.input if value.name == "past.0.key")
    value.type.tensor_type.shape.dim[2].dim_param = "cache"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_mask, r"Attention_1 has no mask: it would attend to padding"),
        (with_own_cache, r"Attention_1 keeps its own cache, which TensorRT rejects"),
        (copied_after_writing, r"past\.0\.key is not written in place"),
        (gathered_before_writing, r"past\.0\.key is not written in place"),
        (read_beside_writing, r"past\.0\.key is not written in place"),
        (written_along_another_axis, r"past\.0\.key is not written in place"),
        (of_open_length, r"past\.0\.key has no fixed length"),
    ],
)
def test_each_trap_is_refused(bundle: Path, change: Callable[[onnx.ModelProto], None], message: str) -> None:
    model = model_of(bundle, "decoder_step")
    change(model)
    with pytest.raises(EngineError, match=message):
        refuse_traps(model, graph_of(bundle, "decoder_step"))


# --- what the parser made of a graph


def check(bundle: Path, builder: Builder, role: str, profile: Profile, prepare: Callable[[Any], None]) -> None:
    network = builder.parse(model_of(bundle, role), open_bundle(bundle).graph(role))  # type: ignore[arg-type]
    prepare(network)
    check_network(builder.trt, network, graph_of(bundle, role), profile)


def test_a_network_that_is_as_the_contract_says_passes(bundle: Path, builder: Builder) -> None:
    for role in ("encoder", "decoder_step", "select_rows"):
        check(bundle, builder, role, profile_of(bundle, role), lambda network: None)


def test_every_attention_may_be_decomposed(bundle: Path, builder: Builder) -> None:
    def forbid(network: Any) -> None:
        next(attentions(builder.trt, network)).decomposable = False

    with pytest.raises(EngineError, match="may not be decomposed, and float32 has no other kernel"):
        check(bundle, builder, "encoder", profile_of(bundle, "encoder"), forbid)


def test_a_cache_that_the_parser_does_not_update_in_place_is_refused(bundle: Path, builder: Builder) -> None:
    graph = graph_of(bundle, "decoder_step")
    two_more = [
        replace(tensor, name=tensor.name.replace("0", "1"), updates=tensor.updates.replace("0", "1"))
        for tensor in graph.outputs
        if tensor.updates
    ]
    network = builder.parse(model_of(bundle, "decoder_step"), open_bundle(bundle).graph("decoder_step"))
    with pytest.raises(EngineError, match="updates 2 of the 4 caches"):
        check_network(
            builder.trt,
            network,
            replace(graph, outputs=(*graph.outputs, *two_more)),
            profile_of(bundle, "decoder_step"),
        )


def test_other_types_than_the_contracts_are_refused(bundle: Path, builder: Builder) -> None:
    network = builder.parse(model_of(bundle, "encoder"), open_bundle(bundle).graph("encoder"))
    half = graph_of(bundle, "encoder", "float16")
    with pytest.raises(EngineError, match=r"reads other outputs in encoder\.fp16\.onnx than the contract has"):
        check_network(builder.trt, network, half, profile_of(bundle, "encoder"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda profile: profile.pop("src_len"), r"the profile has no shapes for src_len \[-1\]"),
        (lambda profile: profile["src_ids"][2].pop(), r"do not fit src_ids \[-1, -1\]"),
        (lambda profile: profile.update(src_ids=[[1, 8], [4, 4], [4, 16]]), r"do not fit src_ids"),
        (lambda profile: profile.update(src_ids=[[0, 1], [4, 4], [4, 16]]), r"do not fit src_ids"),
        (lambda profile: profile["past.0.key"][1].__setitem__(2, 17), r"do not fit past\.0\.key \[-1, 3, 16, 8\]"),
    ],
    ids=["input-missing", "axis-missing", "usual-below-smallest", "empty", "fixed-axis-changed"],
)
def test_a_profile_that_leaves_an_axis_open_is_refused(
    bundle: Path, builder: Builder, change: Callable[[Any], object], message: str
) -> None:
    profile = profile_of(bundle, "decoder_step") | profile_of(bundle, "encoder")
    change(profile)
    role = "decoder_step" if "past" in message else "encoder"
    with pytest.raises(EngineError, match=message):
        check(bundle, builder, role, profile, lambda network: None)


def test_what_tensorrt_cannot_read_is_told_in_its_words(bundle: Path, builder: Builder) -> None:
    model = model_of(bundle, "encoder")
    first(model, "Relu").op_type = "NoSuchOperator"
    with pytest.raises(
        EngineError, match=r"TensorRT cannot read encoder\.onnx: .*NoSuchOperator.* Upgrade the library"
    ):
        builder.parse(model, open_bundle(bundle).graph("encoder"))
