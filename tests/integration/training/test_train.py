"""Training: it learns, keeps its best epoch, resumes to the same numbers, and gives a checkpoint that exports."""

from __future__ import annotations

import csv
import errno
import math
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training import OPTIONS, PAIRS, options, train
from tfexport.bundle.reader import open_bundle
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.translate import Writer, translate
from tfexport.errors import TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions
from tfexport.system.atomic_files import lock_folder
from tfexport.training.data import TextPair


@pytest.mark.thorough
def test_training_learns_and_its_model_exports(tmp_path: Path) -> None:
    path = train(PAIRS * 4, PAIRS, tmp_path / "run", options(epochs=30, ema_decay=0.9))
    loaded = load_checkpoint(path, {})
    assert loaded.family == "native"
    export(loaded, tmp_path / "bundle")
    bundle = open_bundle(tmp_path / "bundle")
    lines = [pair.source.encode() for pair in PAIRS]
    results = translate(load_runtime("ort-cpu", bundle), Reader.of(bundle, None), lines, SearchOptions(beam=2))
    writer = Writer.of(bundle, None)
    right = sum(writer.line(result) == pair.target for result, pair in zip(results, PAIRS, strict=True))
    assert right >= 0.9 * len(PAIRS)

    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    bleu = [float(row["val_bleu"]) for row in rows if row["val_bleu"]]
    assert len(bleu) == 30
    assert bleu[-1] > 90 > bleu[0]
    assert all(math.isfinite(float(row["train_loss"])) for row in rows if row["train_loss"])


@pytest.mark.thorough
def test_resumed_training_gives_the_numbers_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = load_file(train(PAIRS, PAIRS, tmp_path / "whole", options(epochs=3)))
    train(PAIRS, PAIRS, tmp_path / "parts", options(epochs=1))
    parts = load_file(train(PAIRS, PAIRS, tmp_path / "parts", options(epochs=3), resume=True))
    # Untrained models tie in BLEU, so compare the last state, not the best.
    last = [torch.load(tmp_path / run / "last.ckpt", weights_only=True) for run in ("whole", "parts")]
    assert last[0]["global_step"] == last[1]["global_step"]
    for name, tensor in last[0]["state_dict"].items():
        assert torch.equal(tensor, last[1]["state_dict"][name]), name
    assert whole.keys() == parts.keys()


@pytest.mark.thorough
def test_other_seed_other_weights(tmp_path: Path) -> None:
    runs = [train(PAIRS, PAIRS, tmp_path / str(seed), options(epochs=1, seed=seed)) for seed in (0, 0, 1)[1:]]
    one, other = (load_file(run) for run in runs)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_bpe_shares_one_vocabulary_and_matrix(tmp_path: Path) -> None:
    path = train(PAIRS, PAIRS, tmp_path / "run", options(vocabulary="bpe", vocab_size=300, epochs=1, weights="float16"))
    loaded = load_checkpoint(path, {})
    assert loaded.config.tie_source_target
    assert loaded.config.tie_output
    assert loaded.tokenizers.source is not None
    assert loaded.tokenizers.target is not None
    assert loaded.tokenizers.source.to_dict() == loaded.tokenizers.target.to_dict()
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float16}
    assert all(tensor.dtype == torch.float32 for tensor in loaded.weights.values())


def test_existing_training_is_neither_overwritten_nor_resumed_by_accident(tmp_path: Path) -> None:
    train(PAIRS, PAIRS, tmp_path / "run", options(epochs=1))
    with pytest.raises(TfexportError, match="--resume"):
        train(PAIRS, PAIRS, tmp_path / "run", OPTIONS)
    (tmp_path / "run" / "last.ckpt").unlink()
    for resume in (False, True):
        with pytest.raises(TfexportError, match="already contains a model"):
            train(PAIRS, PAIRS, tmp_path / "run", OPTIONS, resume=resume)


def test_pairs_left_out_are_counted_and_none_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = [*PAIRS, TextPair("", "empty"), TextPair("lang " * 40, "long")]
    train(texts, PAIRS, tmp_path / "run", options(epochs=1))
    assert "training pairs left out: 1 with an empty side, 1 too long" in caplog.text
    with pytest.raises(TfexportError, match="no training pairs left"):
        train([TextPair("", "")], PAIRS, tmp_path / "none", options(epochs=1))


def test_other_text_options_or_folder_cannot_be_resumed(tmp_path: Path) -> None:
    """Other text gives another vocabulary: the same ids would mean other words."""
    train(PAIRS, PAIRS, tmp_path / "run", options(epochs=1))
    with pytest.raises(TfexportError, match="with other text"):
        train(PAIRS[:-1], PAIRS, tmp_path / "run", options(epochs=2), resume=True)
    with pytest.raises(TfexportError, match="other preset, max_tokens"):
        train(PAIRS, PAIRS, tmp_path / "run", options(preset="small", max_tokens=32), resume=True)
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(TfexportError, match=r"began in .*run\. Move the folder back"):
        train(PAIRS, PAIRS, tmp_path / "moved", options(epochs=2), resume=True)
    (tmp_path / "moved" / "last.ckpt").write_bytes(b"cut")
    with pytest.raises(TfexportError, match="cannot be resumed"):
        train(PAIRS, PAIRS, tmp_path / "moved", options(epochs=2), resume=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training of three epochs that nothing has ended."""
    return train(PAIRS, PAIRS, tmp_path_factory.mktemp("whole") / "run", options(epochs=3)).parent


def same(run: Path, whole: Path) -> None:
    """A training that was resumed has ended as an uninterrupted one does, bit for bit."""
    assert (run / "metrics.csv").read_text() == (whole / "metrics.csv").read_text()
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    last = [torch.load(folder / "last.ckpt", weights_only=True) for folder in (run, whole)]
    for part in ("state_dict", "current_model_state"):
        for name, tensor in last[1][part].items():
            assert torch.equal(tensor, last[0][part][name]), name
    assert not list(run.glob("*.partial"))


@contextmanager
def ending(by: Callable[[], object], *, epoch: int, batch: int) -> Iterator[None]:
    """Let something happen after a step of an epoch; both are counted from 0."""
    from tfexport.training.train import TranslationTask

    def hook(self: TranslationTask, outputs: object, data: object, index: int) -> None:
        if (self.current_epoch, index) == (epoch, batch):
            by()

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(TranslationTask, "on_train_batch_end", hook)
        # As `tfexport` does.
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "raised", "code"), [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 143)]
)
def test_a_signal_amid_an_epoch_keeps_the_best_one_and_costs_no_bit(
    tmp_path: Path, whole: Path, caplog: pytest.LogCaptureFixture, number: int, raised: type[BaseException], code: int
) -> None:
    with (
        ending(lambda: os.kill(os.getpid(), number), epoch=1, batch=3),
        pytest.raises((KeyboardInterrupt, SystemExit)) as caught,
    ):
        train(PAIRS, PAIRS, tmp_path / "run", options(epochs=3))
    assert type(caught.value) is raised
    assert getattr(caught.value, "code", None) == code
    assert "continue with --resume" in caplog.text
    assert load_checkpoint(tmp_path / "run" / "model.safetensors", {}).family == "native"
    same(train(PAIRS, PAIRS, tmp_path / "run", options(epochs=3), resume=True).parent, whole)


@pytest.mark.thorough
def test_lightnings_own_way_of_ending_by_a_signal_has_the_same_exit_code(tmp_path: Path) -> None:
    """It takes this way when the exception of our handler was lost, as those are that come up in a destructor."""

    from lightning.pytorch.utilities.exceptions import SIGTERMException

    def end() -> None:
        raise SIGTERMException

    with ending(end, epoch=0, batch=0), pytest.raises(SystemExit) as caught:
        train(PAIRS, PAIRS, tmp_path / "run", OPTIONS)
    assert caught.value.code == 143


@pytest.mark.thorough
@pytest.mark.parametrize("resume", [False, True])
def test_a_training_that_was_ended_before_its_first_checkpoint_begins_again(
    tmp_path: Path, whole: Path, caplog: pytest.LogCaptureFixture, resume: bool
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with ending(interrupt, epoch=0, batch=2), pytest.raises(KeyboardInterrupt):
        train(PAIRS, PAIRS, tmp_path / "run", options(epochs=3))
    assert "start again with the same command" in caplog.text
    same(train(PAIRS, PAIRS, tmp_path / "run", options(epochs=3), resume=resume).parent, whole)
    assert ("beginning with the first epoch" in caplog.text) == resume


@pytest.mark.thorough
@pytest.mark.parametrize("file", ["best.ckpt", "last.ckpt", "metrics.csv", "model.safetensors"])
def test_a_kill_while_a_file_is_written_costs_no_bit(tmp_path: Path, whole: Path, file: str) -> None:
    """The second time that it is written, if it is written more than once."""
    written = []

    def fsync_or_die(real: Callable[[int], None], descriptor: int) -> None:
        written.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if written.count(str(tmp_path / "run" / f"{file}.partial")) == (1 if file == "model.safetensors" else 2):
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    def run() -> None:
        torch.set_num_threads(1)
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(os, "fsync", partial(fsync_or_die, os.fsync))
            train(PAIRS, PAIRS, tmp_path / "run", options(epochs=3))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "run" / f"{file}.partial").exists()
    same(train(PAIRS, PAIRS, tmp_path / "run", options(epochs=3), resume=True).parent, whole)


@pytest.mark.thorough
def test_a_full_disk_is_told_and_the_training_can_be_resumed(tmp_path: Path, whole: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))

    try:
        with ending(fill_the_disk, epoch=1, batch=0), pytest.raises(TfexportError, match=r"File too large.*--resume"):
            train(PAIRS, PAIRS, tmp_path / "run", options(epochs=3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    same(train(PAIRS, PAIRS, tmp_path / "run", options(epochs=3), resume=True).parent, whole)


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tfexport.training.train.whole_file", refuse)
    with pytest.raises(TfexportError, match=r"Read-only file system.*folder writable"):
        train(PAIRS, PAIRS, tmp_path / "run", OPTIONS)
    (tmp_path / "file").write_text("")
    with pytest.raises(TfexportError, match=r"cannot write the training in .*file"):
        train(PAIRS, PAIRS, tmp_path / "file", OPTIONS)


def test_two_trainings_do_not_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    held = lock_folder(tmp_path / "run")
    with pytest.raises(TfexportError, match="another process trains in"):
        train(PAIRS, PAIRS, tmp_path / "run", OPTIONS)
    os.close(held)
    assert not list((tmp_path / "run").iterdir())
