"""What a training keeps on disk after every epoch, so that it may be ended at any moment."""

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
    """Writes a checkpoint beside its place first.

    Lightning's own writer uses the folder of temporary files, and copies from there where that is another file system: a
    process killed while it copies has lost the checkpoint before, too.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Raises OSError where it cannot be written; the earlier one stays."""
        content = io.BytesIO()  # PyTorch's writer tells of a full disk as a fault of its own
        torch.save(checkpoint, content)
        with whole_file(Path(path)) as file:
            file.write(content.getbuffer())


class Measurements(lightning.Callback):
    """A CSV file with a row for each epoch.

    The rows are part of the checkpoint, and the file is written anew from them: after any interruption no epoch is missing
    and none is there twice.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(state_dict["rows"])

    def on_train_start(self, trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
        self._write()  # without an epoch that ended and has no checkpoint

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
