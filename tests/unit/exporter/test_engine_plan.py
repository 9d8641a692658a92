"""Length plans: the shapes engines are built for, how a plan is fitted to a model, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.fakes import tiny_config
from tfexport import contract, graph_contract
from tfexport.errors import EngineError
from tfexport.exporter.engine_plan import BUILD_RATE, BUILD_SECONDS, ENGINE_BYTES, LengthPlan, cost, weight_bytes

CONFIG = tiny_config(
    d_model=24,
    n_heads=3,
    d_ff=40,
    n_encoder_layers=2,
    n_decoder_layers=3,
    max_source_length=500,
    max_target_length=400,
)
PLAN = LengthPlan(max_batch=16, max_beam=5, max_source=96, cache=(32, 64))


# --- what can be planned


@pytest.mark.parametrize(
    "sizes", [{"max_batch": 0}, {"max_beam": -1}, {"max_source": 0}, {"cache": (0, 32)}, {"cache": ()}]
)
def test_sizes_below_one_are_refused(sizes: Mapping[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"has a size below 1\. Give sizes above 0\.$"):
        LengthPlan(**sizes)


def test_lengths_of_a_text_give_caches_for_half_for_nine_tenths_and_for_all() -> None:
    lengths = [4] * 50 + [20] * 40 + [60] * 10
    for given in (lengths, lengths[::-1]):
        plan = LengthPlan.for_lengths(given, max_batch=8, max_beam=6)
        # 1.5 * 4 + 10 = 16, 1.5 * 20 + 10 = 40, 1.5 * 60 + 10 = 100, each up to a multiple of 32.
        assert plan == LengthPlan(max_batch=8, max_beam=6, max_source=64, cache=(32, 64, 128))


@pytest.mark.parametrize(
    ("lengths", "source", "cache"),
    [
        ([1], 32, (32,)),
        ([32], 32, (64,)),
        ([33], 64, (64,)),
        ([14, 16], 32, (32, 64)),  # 31 and 34 tokens
        ([5] * 9 + [300], 320, (32, 480)),  # the one long line is not among nine tenths
        ([5] * 8 + [300] * 2, 320, (32, 480)),
        ([5] * 4 + [90] * 5 + [300], 320, (160, 480)),
    ],
)
def test_planned_lengths_hold_what_they_are_planned_for(
    lengths: list[int], source: int, cache: tuple[int, ...]
) -> None:
    plan = LengthPlan.for_lengths(lengths)
    assert plan.max_source == source
    assert plan.cache == cache
    assert max(plan.cache) >= int(1.5 * max(lengths)) + 10


def test_a_text_without_a_line_is_refused() -> None:
    with pytest.raises(EngineError, match=r"no line that can be decoded\. Give typical source text\.$"):
        LengthPlan.for_lengths([])


# --- fitted to a model


@pytest.mark.parametrize(
    ("precision", "step"),
    [("float32", 8), ("float16", 16), ("bfloat16", 16)],  # 24 numbers of 4 or 2 bytes to a multiple of 256
)
def test_lengths_are_aligned(precision: Any, step: int) -> None:
    plan = LengthPlan(max_source=101, cache=(1, 9, 10, 33, 128)).fitted(CONFIG, precision)
    assert plan.max_source == -(-101 // step) * step  # never less than was asked for
    assert plan.cache == tuple(sorted({-(-size // step) * step for size in (1, 9, 10, 33, 128)}))
    item = contract.ITEM_SIZES[precision]
    for length in (plan.max_source, *plan.cache):
        assert CONFIG.d_model * item * length % contract.ALIGNMENT == 0
    assert plan.fitted(CONFIG, precision) == plan


def test_nothing_is_planned_beyond_the_model_s_positions() -> None:
    def fitted(source: int, target: int, cache: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        config = CONFIG.replace(max_source_length=source, max_target_length=target)
        plan = LengthPlan(max_source=128, cache=cache).fitted(config, "float32")
        return plan.max_source, plan.cache

    assert fitted(20, 20, (8, 16, 24, 32, 64)) == (24, (8, 16, 24))  # 24 hold all 20 positions
    assert fitted(128, 24, (8, 16, 24, 32)) == (128, (8, 16, 24))
    assert fitted(1000, 25, (8, 16, 24, 32)) == (128, (8, 16, 24, 32))
    assert fitted(1000, 1000, (8, 16)) == (128, (8, 16))
    assert fitted(1000, 4, (32, 64)) == (128, (32,))


def test_batch_and_beam_are_kept() -> None:
    plan = PLAN.fitted(CONFIG, "float16")
    assert (plan.max_batch, plan.max_beam, plan.max_rows) == (16, 5, 80)


def test_sources_are_padded_beyond_the_positions_where_alignment_needs_it() -> None:
    config = CONFIG.replace(d_model=6, max_source_length=63)
    assert PLAN.fitted(config, "float32").max_source == 64
    assert PLAN.fitted(config, "float16").max_source == 64
    assert PLAN.fitted(config.replace(max_source_length=1), "float16").max_source == 64
    assert PLAN.fitted(config.replace(max_source_length=65), "float16").max_source == 128
    small = LengthPlan(max_source=16, cache=(16,))
    assert small.fitted(config.replace(d_model=66), "float16").max_source == 64


# --- profiles


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("role", ["encoder", "decoder_step", "select_rows"])
def test_a_profile_has_the_shapes_of_every_input(role: str, precision: Any) -> None:
    plan = PLAN.fitted(CONFIG, precision)
    (graph,) = [graph for graph in graph_contract.graphs_of(CONFIG, precision) if graph.role == role]
    profile = plan.profile(graph, CONFIG, 64)
    assert list(profile) == [tensor.name for tensor in graph.inputs]
    sizes: dict[str, list[int]] = {}
    for tensor in graph.inputs:
        shapes = profile[tensor.name]
        assert len(shapes) == 3
        for axis, found in zip(contract.shape(tensor, CONFIG), zip(*shapes, strict=True), strict=True):
            if isinstance(axis, int):
                assert found == (axis, axis, axis)
            else:  # an axis is of one size in all tensors
                assert sizes.setdefault(axis, list(found)) == list(found)
    for found in sizes.values():
        assert 0 < found[0] <= found[1] <= found[2]
    wanted = {
        "encoder": {"batch": [1, 4, 16], "src": [1, 32, 96]},
        "decoder_step": {"batch": [1, 4, 16], "rows": [1, 20, 80], "src": [1, 32, 96], "cache": [64, 64, 64]},
        "select_rows": {
            "blocks": [6, 6, 6],
            "from": [1, 20, 80],
            "rows": [1, 20, 80],
            "width": [24, 24 * 32, 24 * 96],  # of one slot, of the usual cache, of the longest cross keys
        },
    }
    assert sizes == wanted[role]


def test_rows_are_selected_from_the_longest_cache_too() -> None:
    plan = LengthPlan(max_source=32, cache=(32, 256))
    graph = next(graph for graph in graph_contract.graphs_of(CONFIG) if graph.role == "select_rows")
    assert plan.profile(graph, CONFIG, 0)["tensors"][2] == [6, 128, 24 * 256]


@pytest.mark.parametrize("plan", [LengthPlan(max_batch=1, max_beam=1, max_source=8, cache=(8,)), LengthPlan()])
def test_profiles_of_the_smallest_and_of_the_usual_plan_ascend(plan: LengthPlan) -> None:
    for graph in graph_contract.graphs_of(CONFIG):
        if graph.role not in {role for role, _ in plan.jobs()}:
            continue
        for smallest, usual, largest in plan.profile(graph, CONFIG, plan.cache[0]).values():
            assert all(0 < a <= b <= c for a, b, c in zip(smallest, usual, largest, strict=True))


def test_there_is_an_engine_for_every_cache_and_one_for_each_other_role() -> None:
    assert PLAN.jobs() == [("encoder", 0), ("select_rows", 0), ("decoder_step", 32), ("decoder_step", 64)]


# --- costs


def costs(plan: LengthPlan = PLAN, precision: Any = "float16", **options: Any) -> Any:
    defaults = {"n_gpus": 1, "limit": 8 << 30, "library": "tensorrt_rtx"}
    return cost(plan, CONFIG, precision, **{**defaults, **options})


@pytest.mark.parametrize(("precision", "item"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_memory_is_that_of_the_tensors(precision: Any, item: int) -> None:
    memory = PLAN.memory(CONFIG, precision)
    plan, rows, token = PLAN, 80, 2 * 3 * 24 * item  # keys and values of 3 layers
    assert memory["self-attention caches (two sets)"] == 2 * rows * 64 * token
    assert memory["cross keys and values (two sets)"] == 2 * 16 * 96 * token
    assert memory["logits"] == rows * CONFIG.tgt_vocab_size * 4
    assert memory["weights of 2 decoder steps"] == 2 * weight_bytes(CONFIG, precision)["decoder_step"]
    assert memory["workspace"] == plan.workspace(CONFIG)


def test_engines_of_more_gpus_take_more_room_and_time_but_not_more_memory() -> None:
    one, two = costs(), costs(n_gpus=2)
    assert (one.engines, two.engines) == (4, 8)
    weights = weight_bytes(CONFIG, "float16")
    assert one.disk == weights["encoder"] + 2 * weights["decoder_step"] + 3 * ENGINE_BYTES
    assert one.seconds == pytest.approx(4 * BUILD_SECONDS + one.disk / BUILD_RATE)
    assert (two.disk, two.seconds) == (2 * one.disk, pytest.approx(2 * one.seconds))
    assert two.memory == one.memory
    assert one.plan == PLAN.fitted(CONFIG, "float16")


def test_nothing_is_said_of_the_time_that_full_tensorrt_takes() -> None:
    assert costs(library="tensorrt").seconds is None


def test_what_does_not_fit_is_refused_and_says_what_to_lower() -> None:
    needed = sum(costs().memory.values())
    assert costs(limit=needed).limit == needed
    with pytest.raises(EngineError) as caught:
        costs(limit=needed - 1)
    message = str(caught.value)
    assert "\n" not in message
    for flag in ("--max-batch", "--max-beam", "--max-source", "--cache", "--gpu-memory"):
        assert flag in message


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ({"max_batch": 4096, "max_source": 8}, "self-attention caches"),
        ({"max_batch": 4096, "max_beam": 1, "max_source": 496}, "workspace"),
    ],
)
def test_what_does_not_fit_names_what_takes_most(sizes: dict[str, int], part: str) -> None:
    plan = LengthPlan(**{"cache": (400,), **sizes})
    with pytest.raises(EngineError, match=rf"this plan needs about \d+\.\d GiB .* most goes to {part}"):
        costs(plan, "float32", limit=1 << 28)


def test_every_size_of_a_plan_costs_memory() -> None:
    """The flags that the refusal names do lower it."""
    large = LengthPlan(max_batch=256, max_beam=8, max_source=256, cache=(128, 384))
    before = sum(costs(large).memory.values())
    smaller: dict[str, Any] = {"max_batch": 128, "max_beam": 4, "max_source": 128, "cache": (128, 256)}
    for name, size in smaller.items():
        plan = LengthPlan(**{**vars(large), name: size})
        assert sum(costs(plan).memory.values()) < before, name


def test_the_workspace_holds_what_an_encoder_layer_and_a_step_compute() -> None:
    config = CONFIG.replace(tgt_vocab_size=50_000)
    plan = LengthPlan(max_batch=64, max_beam=8, max_source=128, cache=(64,))
    logits = plan.max_rows * config.tgt_vocab_size * 4
    assert plan.workspace(config) >= 4 * logits
    hidden = 64 * 128 * config.d_ff * 4
    scores = 64 * config.n_heads * 128 * 128 * 4
    assert plan.workspace(CONFIG) >= hidden + scores
    assert LengthPlan(max_batch=1).workspace(CONFIG) == 64 << 20
