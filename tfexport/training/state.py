"""The files that a training writes after every epoch, so that it may be interrupted at any time."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from tfexport.system.atomic_files import whole_file


class WholeCheckpoints(TorchCheckpointIO):
    """Writes checkpoints atomically, first to a file next to their place.

    Lightning's own writer uses the folder of temporary files, and copies from there if that is another file system. A
    process that is killed during the copy also loses the previous checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Raises OSError if the checkpoint cannot be written; the previous one stays."""
        content = io.BytesIO()  # PyTorch's writer reports a full disk as an internal error
        torch.save(checkpoint, content)
        with whole_file(Path(path)) as file:
            file.write(content.getbuffer())


class Measurements(lightning.Callback):
    """A CSV file with a row for each epoch.

    The rows are part of the checkpoint, and the file is rewritten from them. After any interruption, no epoch is missing or
    repeated.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(state_dict["rows"])

    def on_train_start(self, trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
        self._write()  # removes an epoch that ended without a checkpoint

    def on_train_epoch_end(self, trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
        measured = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        self.rows.append({"epoch": trainer.current_epoch, "steps": trainer.global_step, **measured})
        self._write()

    def _write(self) -> None:
        if not self.rows:
            self.path.unlink(missing_ok=True)
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=list(self.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        with whole_file(self.path) as file:
            file.write(text.getvalue().encode())
