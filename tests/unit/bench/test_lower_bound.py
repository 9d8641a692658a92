"""The least time of a decode, against numbers computed by hand, and what measures the machine."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.support.fakes import tiny_config
from tfexport.bench import machine
from tfexport.bench.lower_bound import (
    ACTIVATION_BYTES,
    PROJECTION_BYTES,
    WEIGHT_BYTES,
    StepSize,
    encoder_work,
    least_seconds,
    lower_bound,
    step_work,
)
from tfexport.bench.machine import Peaks
from tfexport.contract import PRECISIONS

CONFIG = tiny_config(d_model=2, d_ff=3, n_encoder_layers=2, n_decoder_layers=3, tgt_vocab_size=100)
# Of a decoder layer 6 * 2 * 2 + 2 * 2 * 3 = 36 weights, of an encoder layer 4 * 2 * 2 + 2 * 2 * 3 = 28.
DECODER, PROJECTION, ENCODER = 3 * 36, 100 * 2, 2 * 28 + 3 * 2 * 2 * 2


def peaks(bandwidth: float, float32: float, int8: float = 1e30) -> Peaks:
    return Peaks(1, {1: bandwidth}, {"float32": float32, "int8": int8})


@pytest.mark.parametrize(
    ("precision", "weights", "activations"),
    [
        ("float32", 4 * DECODER + 4 * PROJECTION, 4),
        ("float16", 2 * DECODER + 4 * PROJECTION, 2),
        ("bfloat16", 2 * DECODER + 4 * PROJECTION, 2),
        ("int8", DECODER + PROJECTION, 4),
        ("int4", (DECODER + PROJECTION) / 2, 4),
    ],
)
def test_a_step_reads_weights_once_and_keys_and_values_of_each_row(
    precision: str, weights: float, activations: int
) -> None:
    work = step_work(CONFIG, precision, StepSize(rows=20, attended=20 * 18, stored=5 * 21))
    # Keys and values of 3 layers, 2 numbers each: 5 sentences of 7 ids, whose hypotheses have 14 slots.
    assert work.bytes == weights + 2 * 3 * 2 * (5 * (7 + 14)) * activations
    assert work.products == 20 * 2 * (DECODER + PROJECTION)
    # Scores and sums: 2 products of 2 numbers with each of 18 keys and values, 2 operations each, in 3 layers.
    assert work.attention == 20 * 3 * (2 * 2 * 2) * 18


def test_a_mean_step_has_the_mean_of_what_sentences_need() -> None:
    # One sentence of 5 ids to 3 tokens: caches of 1, 2 and 3 slots.
    assert StepSize.mean([5], [3], beam=1, steps=1) == (3, 6 + 7 + 8, 6 + 7 + 8)
    # With a beam of 4: rows 1, 4, 4; slots 1, then one shared and 4 new, then two shared and 4 new.
    assert StepSize.mean([5], [3], beam=4, steps=1) == (9, 6 + 4 * 7 + 4 * 8, 6 + (5 + 1 + 4) + (5 + 2 + 4))
    assert StepSize.mean([5, 2, 9], [3, 1, 0], beam=4, steps=2) == (10 / 2, (66 + 3) / 2, (27 + 3) / 2)


def test_the_encoder_reads_its_weights_and_those_of_cross_keys_and_values() -> None:
    work = encoder_work(CONFIG, "float32", [5, 3])
    assert work.bytes == 4 * ENCODER
    assert work.products == 8 * 2 * ENCODER
    assert work.attention == 2 * (2 * 2 * 2) * (5 * 5 + 3 * 3)


def test_every_precision_of_the_contract_has_its_bytes() -> None:
    assert set(PRECISIONS.values()) <= set(WEIGHT_BYTES) & set(PROJECTION_BYTES) & set(ACTIVATION_BYTES)


def test_the_lower_bound_is_what_takes_longer_of_reading_and_computing() -> None:
    work = step_work(CONFIG, "float32", StepSize(rows=1, attended=2, stored=2))
    operations = work.products + work.attention
    assert least_seconds(work, "float32", peaks(work.bytes / 2, operations)) == (2.0, "memory")
    assert least_seconds(work, "float32", peaks(work.bytes, operations / 3)) == (pytest.approx(3.0), "compute")
    # Quantized weights are multiplied at the int8 peak, activations at that of float32.
    found, bound = least_seconds(work, "int4", peaks(1e30, work.attention, work.products / 4))
    assert (found, bound) == (pytest.approx(5.0), "compute")
    # Nobody knows how fast half precision is multiplied, so only reading bounds it.
    assert least_seconds(work, "float16", peaks(work.bytes, 1e-9)) == (1.0, "memory")


@pytest.mark.parametrize("beam", [1, 3])
def test_a_stream_of_like_lengths_is_the_sum_of_its_steps(beam: int) -> None:
    """Four sentences of 5 ids to 3 tokens each, two at a time: two batches of 3 steps, whose caches have 1, 2, 3 slots."""
    slow_memory, slow_compute = peaks(10.0, 1e30), peaks(1e30, 10.0)
    for machine_peaks in (slow_memory, slow_compute):
        found = lower_bound(CONFIG, "float32", machine_peaks, sources=[5] * 4, outputs=[3] * 4, batch=2, beam=beam)
        sizes = [StepSize.mean([5, 5], [n, n], beam=beam, steps=1) for n in range(4)]  # of the first n steps together
        steps = [
            least_seconds(
                step_work(CONFIG, "float32", StepSize(*(b - a for a, b in zip(*pair, strict=True)))),
                "float32",
                machine_peaks,
            )[0]
            for pair in pairwise(sizes)
        ]
        encoder = least_seconds(encoder_work(CONFIG, "float32", [5, 5]), "float32", machine_peaks)[0]
        assert found.steps == 6
        assert found.encoder_seconds == pytest.approx(2 * encoder)
        assert found.seconds == pytest.approx(2 * (encoder + sum(steps)))
        assert found.step_seconds == pytest.approx(sum(steps) / 3)
        assert found.bound == ("memory" if machine_peaks is slow_memory else "compute")


def test_a_stream_of_mixed_lengths_has_as_many_steps_as_its_tokens_fill() -> None:
    def steps(outputs: list[int], batch: int) -> int:
        return lower_bound(CONFIG, "float32", peaks(1, 1), sources=[5] * 4, outputs=outputs, batch=batch, beam=1).steps

    assert steps([2, 4, 6, 8], 2) == 10
    assert steps([2, 4, 6, 8], 4) == 8  # the longest one's own
    assert steps([2, 4, 6, 9], 2) == 11


def test_what_fits_into_a_cache_is_read_at_its_speed() -> None:
    found = Peaks(1, {100: 50.0, 1000: 20.0, 10000: 5.0}, {})
    assert [found.bandwidth(size) for size in (1, 100, 999, 1000, 9999, 10**9)] == [50, 50, 50, 20, 20, 5]
    # A larger array that was read faster shows that the smaller one can be.
    assert Peaks(1, {100: 50.0, 1000: 60.0, 10000: 5.0}, {}).bandwidth(100) == 60


def test_more_threads_are_never_less() -> None:
    one, two = (
        Peaks(1, {10: 5.0, 20: 3.0}, {"float32": 7.0}),
        Peaks(2, {10: 4.0, 20: 6.0}, {"float32": 5.0, "int8": 9.0}),
    )
    assert two.or_better(one) == Peaks(2, {10: 5.0, 20: 6.0}, {"float32": 7.0, "int8": 9.0})


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_SIZES", (2**20, 2**21))
    found = machine.measure_peaks(2)
    assert found.threads == 2
    assert set(found.read) == {2**20, 2**21}
    assert set(found.operations) == {"float32", "int8"}
    assert min(*found.read.values(), *found.operations.values()) > 1e6
    assert Peaks.from_dict(found.to_dict()) == found


@pytest.mark.parametrize(
    ("dtype", "given", "wanted"), [("float32", np.float32, np.float32), ("int8", np.uint8, np.int32)]
)
def test_the_models_that_measure_multiply(dtype: str, given: type, wanted: type) -> None:
    path = machine.files("tfexport") / "assets" / f"gemm.{dtype}.graph"
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"a": np.full((2, machine.GEMM_SIZE), 3, dtype=given)})
    assert found.dtype == wanted
    assert found.shape == (2, machine.GEMM_SIZE)
    assert (found == 3 * machine.GEMM_SIZE).all()


def test_busy_cpus_are_those_that_are_not_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    monkeypatch.setattr("tfexport.bench.machine.os.cpu_count", lambda: 4)
    assert machine.busy_cpus(0.0) is None
    before, after = "cpu  10 5 5 100 50 0 0 0 7 7\ncpu0 1\n", "cpu  25 5 15 150 75 0 0 0 99 7\ncpu0 1\n"
    (tmp_path / "stat").write_text(before)
    assert machine.busy_cpus(0.0) is None  # no time went by
    monkeypatch.setattr("tfexport.bench.machine.time.sleep", lambda _: (tmp_path / "stat").write_text(after))
    # Of 100 ticks 25 were work, 50 idle and 25 idle with a disk at work: a quarter of 4 CPUs.
    assert machine.busy_cpus(0.0) == 1.0
