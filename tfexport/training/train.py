"""Training of the canonical model on parallel text; Lightning runs the loop."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import sacrebleu
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, RichProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import Tensor
from torch.nn import functional as F

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.models.formats import native
from tfexport.models.formats.native import Tokenizers
from tfexport.models.transformer import Transformer
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, search
from tfexport.system.atomic_files import make_folder, whole_file
from tfexport.system.file_locks import lock_folder
from tfexport.system.regular_files import read_text
from tfexport.training.data import Batch, IdPair, TextPair, encode_pairs, loader
from tfexport.training.options import TrainOptions
from tfexport.training.state import Measurements, WholeCheckpoints
from tfexport.training.vocabulary import BPE_SPECIALS, train_bpe, train_words

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model size with a suitable schedule."""

    d_model: int
    n_heads: int
    d_ff: int
    n_layers: int
    dropout: float
    norm_first: bool
    vocab_size: int
    warmup: int
    lr_factor: float


PRESETS = {
    # For experiments: seconds per epoch.
    "tiny": Preset(
        d_model=64, n_heads=4, d_ff=128, n_layers=2, dropout=0.1, norm_first=True, vocab_size=2000, warmup=400,
        lr_factor=1.0,
    ),
    # The embedded default: small data such as Multi30k, on a CPU.
    "small": Preset(
        d_model=192, n_heads=6, d_ff=512, n_layers=3, dropout=0.2, norm_first=True, vocab_size=4000, warmup=2000,
        lr_factor=1.0,
    ),
    # Vaswani et al. 2017, table 3.
    "base": Preset(
        d_model=512, n_heads=8, d_ff=2048, n_layers=6, dropout=0.1, norm_first=False, vocab_size=32000, warmup=4000,
        lr_factor=1.0,
    ),
}  # fmt: skip


def build_tokenizers(texts: Sequence[TextPair], options: TrainOptions) -> Tokenizers:
    """One joint BPE vocabulary, or one word vocabulary for each side."""
    size = options.vocab_size or PRESETS[options.preset].vocab_size
    if options.vocabulary == "bpe":
        joint = train_bpe((side for text in texts for side in text), vocab_size=size, lowercase=options.lowercase)
        return Tokenizers(joint, joint)
    return Tokenizers(
        *(
            train_words(side, min_frequency=options.min_frequency, vocab_size=size, lowercase=options.lowercase)
            for side in zip(*texts, strict=True)
        )
    )


def build_config(tokenizers: Tokenizers, options: TrainOptions) -> ModelConfig:
    """The preset's model for these vocabularies; a joint vocabulary shares all three embedding matrices."""
    assert tokenizers.source is not None
    assert tokenizers.target is not None
    preset = PRESETS[options.preset]
    joint = tokenizers.source is tokenizers.target
    unk, pad, bos, eos = range(len(BPE_SPECIALS))
    return ModelConfig(
        d_model=preset.d_model,
        n_heads=preset.n_heads,
        d_ff=preset.d_ff,
        n_encoder_layers=preset.n_layers,
        n_decoder_layers=preset.n_layers,
        src_vocab_size=tokenizers.source.size,
        tgt_vocab_size=tokenizers.target.size,
        max_source_length=options.max_length,
        max_target_length=options.max_length,
        unk_id=unk,
        pad_id=pad,
        bos_id=bos,
        eos_id=eos,
        norm_first=preset.norm_first,
        final_norm=preset.norm_first,
        tie_source_target=joint,
        tie_output=True,
        embedding_scale=math.sqrt(preset.d_model),
        dropout=preset.dropout,
    )


def noam_factor(step: int, d_model: int, warmup: int) -> float:
    """Learning rate of `step` (from 1): d_model^-0.5 * min(step^-0.5, step * warmup^-1.5) (section 5.3)."""
    return float(d_model**-0.5 * min(step**-0.5, step * warmup**-1.5))


class TranslationTask(lightning.LightningModule):
    """Label-smoothed cross-entropy, the paper's schedule, validation by loss and BLEU."""

    def __init__(self, config: ModelConfig, tokenizers: Tokenizers, options: TrainOptions, validation: list[TextPair]):
        super().__init__()
        self.model = Transformer(config)
        self._tokenizers = tokenizers
        self._options = options
        self._validation = validation

    def _loss(self, batch: Batch, smoothing: float) -> Tensor:
        logits = self.model(batch.src_ids, batch.src_len, batch.tgt_ids[:, :-1])
        real = torch.arange(logits.shape[1], device=logits.device) < batch.tgt_len[:, None] - 1
        return F.cross_entropy(logits[real].float(), batch.tgt_ids[:, 1:][real], label_smoothing=smoothing)

    def on_train_batch_start(self, *_: object) -> None:
        # Each step has its own seed for dropout, so that a resumed training equals an uninterrupted one.
        torch.manual_seed(self._options.seed * 1_000_003 + self.global_step)

    def training_step(self, batch: Batch, _: int) -> Tensor:
        loss = self._loss(batch, self._options.label_smoothing)
        self.log("train_loss", loss, prog_bar=True, on_step=False, on_epoch=True, batch_size=len(batch.src_len))
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        n_tokens = int((batch.tgt_len - 1).sum())
        self.log("val_loss", self._loss(batch, 0.0), prog_bar=True, batch_size=n_tokens)

    def on_validation_epoch_end(self) -> None:
        self.log("val_bleu", self.bleu(), prog_bar=True)

    def bleu(self) -> float:
        """Greedy BLEU (sacrebleu, detokenised) of the validation pairs."""
        source, target = self._tokenizers.source, self._tokenizers.target
        assert source is not None
        assert target is not None
        config = self.model.config
        runtime, options = TorchRuntime(self.model), SearchOptions(max_length_ratio=3.0)
        encoded = [
            ([config.bos_id] * config.source_bos + source.encode(text.source))[: config.max_source_length - 1]
            + [config.eos_id] * config.source_eos
            for text in self._validation
        ]
        order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
        output = [""] * len(encoded)
        for start in range(0, len(order), 64):
            chosen = order[start : start + 64]
            for index, (best,) in zip(chosen, search(runtime, [encoded[i] for i in chosen], options), strict=True):
                output[index] = target.decode([i for i in best.ids if i != config.eos_id])
        references = [text.target.lower() if self._options.lowercase else text.target for text in self._validation]
        return float(sacrebleu.corpus_bleu(output, [references]).score)

    def configure_optimizers(self) -> Any:
        preset = PRESETS[self._options.preset]
        # The paper's Adam; the schedule sets the learning rate.
        optimizer = torch.optim.Adam(self.model.parameters(), lr=preset.lr_factor, betas=(0.9, 0.98), eps=1e-9)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: noam_factor(step + 1, preset.d_model, preset.warmup)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ParallelText(lightning.LightningDataModule):
    """The batches. They are rebuilt in each epoch, only from the seed and the number of the epoch."""

    def __init__(self, train: list[IdPair], validation: list[IdPair], config: ModelConfig, options: TrainOptions):
        super().__init__()
        self._train, self._validation = train, validation
        self._config, self._options = config, options

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch if self.trainer else 0
        seed = (self._options.seed, epoch)
        return loader(self._train, self._config, max_tokens=self._options.max_tokens, seed=seed)

    def val_dataloader(self) -> Any:
        return loader(self._validation, self._config, max_tokens=4 * self._options.max_tokens, seed=None)


def train(
    texts: list[TextPair], validation: list[TextPair], directory: Path, options: TrainOptions, *, resume: bool = False
) -> Path:
    """Train into `directory` and return the model with the best validation BLEU, `directory/model.safetensors`.

    `directory` also contains the state to resume from (`last.ckpt`) and a row of measurements per epoch (`metrics.csv`). The
    process may be killed at any time: every file is complete, and a resumed training has the result of an uninterrupted one.

    Raises:
        TfexportError: the text is empty, the files cannot be written, or `directory` contains another training.
        KeyboardInterrupt, SystemExit: the training was interrupted; the best epoch so far is kept.
    """
    for chatty in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        make_folder(directory)
        with _alone_in(directory):
            return _train(texts, validation, directory, options, resume=resume)
    except OSError as error:
        raise TfexportError(
            f"cannot write the training in {directory}: {error.strerror or error}. Its files are complete: make room or the "
            "folder writable, and continue with --resume."
        ) from error


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Lock the folder: two trainings would overwrite each other's files."""
    lock = None
    try:
        lock = lock_folder(directory)
    except BlockingIOError as error:
        raise TfexportError(
            f"another process trains in {directory}. Wait until it is done, or give another -o."
        ) from error
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _train(
    texts: list[TextPair], validation: list[TextPair], directory: Path, options: TrainOptions, *, resume: bool
) -> Path:
    last, model = directory / "last.ckpt", directory / "model.safetensors"
    if resume and not last.exists():
        log.warning("note: there is no %s to resume from: beginning with the first epoch", last)
        resume = False
    if not resume and last.exists():
        raise TfexportError(f"{directory} already contains a training. Continue it with --resume, or give another -o.")
    if not resume and model.exists():
        raise TfexportError(f"{directory} already contains a model without its training. Move it, or give another -o.")
    _remember_run(directory, texts, validation, options, resume=resume)

    tokenizers = build_tokenizers(texts, options)
    config = build_config(tokenizers, options)
    pairs, held_out = (
        _encode(name, side, tokenizers, config) for name, side in (("training", texts), ("validation", validation))
    )

    lightning.seed_everything(options.seed, verbose=False)
    task = TranslationTask(config, tokenizers, options, validation)
    best = ModelCheckpoint(
        dirpath=directory, filename="best", monitor="val_bleu", mode="max", save_last=True, enable_version_counter=False
    )
    on_terminal = sys.stderr.isatty()
    callbacks = [EMAWeightAveraging(decay=options.ema_decay), Measurements(directory / "metrics.csv"), best]
    if on_terminal:
        callbacks.append(RichProgressBar(console_kwargs={"stderr": True}))
    try:
        trainer = _trainer(options, callbacks, on_terminal)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise TfexportError(
            f"cannot train with these options: {error}. Change --precision or --accelerator."
        ) from error
    with warnings.catch_warnings():
        # Warnings without use for the user: lists in memory need no loader workers, the folder has files on purpose, and
        # Lightning uses deprecated parts of PyTorch.
        for noise in ("many workers", "exists and is not empty", "LeafSpec"):
            warnings.filterwarnings("ignore", f".*{noise}.*")
        data = ParallelText(pairs, held_out, config, options)
        try:
            trainer.fit(task, datamodule=data, ckpt_path=last if resume else None, weights_only=True)
            _save_best(model, config, tokenizers, options)
        except (KeyboardInterrupt, SystemExit) as interruption:
            if last.exists():
                _save_best(model, config, tokenizers, options)
                log.warning("the best epoch so far is in %s; continue with --resume", model)
            else:
                log.warning("interrupted before the end of the first epoch; start again with the same command")
            raise _as_it_was_sent(interruption) from None
    return model


def _as_it_was_sent(interruption: BaseException) -> BaseException:
    """The exception that ended the training, before Lightning replaced it."""
    if isinstance(interruption, SIGTERMException):
        return SystemExit(128 + signal.SIGTERM)
    if isinstance(interruption, SystemExit) and interruption.code == 1:
        return KeyboardInterrupt()
    return interruption


def _trainer(options: TrainOptions, callbacks: list[Any], on_terminal: bool) -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=options.epochs,
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,  # type: ignore[arg-type]
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1,
        logger=False,
        callbacks=callbacks,
        plugins=[WholeCheckpoints()],
        enable_progress_bar=on_terminal,
        enable_model_summary=False,
    )


def _remember_run(
    directory: Path, texts: list[TextPair], validation: list[TextPair], options: TrainOptions, *, resume: bool
) -> None:
    """Record the text and options of a training, or check them when it is resumed.

    Other text gives another vocabulary, which would silently scramble the embeddings. Lightning's state contains its folder.
    """
    free = ("epochs", "accelerator", "weights")  # may change when the training is resumed
    settings = {name: value for name, value in asdict(options).items() if name not in free}
    data = hashlib.sha256(json.dumps([texts, validation]).encode()).hexdigest()
    run = {"options": settings, "data": data, "directory": str(directory.resolve())}
    path = directory / "run.json"
    if not resume:
        with whole_file(path) as file:
            file.write((json.dumps(run, indent=1) + "\n").encode())
        return
    try:
        before = json.loads(read_text(path))
        torch.load(directory / "last.ckpt", map_location="cpu", weights_only=True)
        changed = [name for name in settings if before["options"].get(name) != settings[name]]
        changed += ["text"] * (before["data"] != data)
        moved = before["directory"] != run["directory"]
    except Exception as error:  # a damaged file may raise any error
        raise TfexportError(
            f"the training in {directory} cannot be resumed: {error}. Start again elsewhere."
        ) from error
    if changed:
        raise TfexportError(
            f"{directory} was trained with other {', '.join(changed)}. Resume with the original values."
        )
    if moved:
        raise TfexportError(f"this training began in {before['directory']}. Move the folder back to resume it.")


def _encode(name: str, texts: list[TextPair], tokenizers: Tokenizers, config: ModelConfig) -> list[IdPair]:
    assert tokenizers.source is not None
    assert tokenizers.target is not None
    encoded = encode_pairs(texts, tokenizers.source, tokenizers.target, config)
    if encoded.empty or encoded.too_long:
        log.warning("%s pairs left out: %d with an empty side, %d too long", name, encoded.empty, encoded.too_long)
    if not encoded.pairs:
        raise TfexportError(f"there are no {name} pairs left. Give text, or raise --max-length.")
    return encoded.pairs


def _save_best(path: Path, config: ModelConfig, tokenizers: Tokenizers, options: TrainOptions) -> None:
    state = torch.load(path.with_name("best.ckpt"), map_location="cpu", weights_only=True)["state_dict"]
    weights = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    native.save(path, weights, config, tokenizers, getattr(torch, options.weights))
