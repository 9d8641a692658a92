"""The base model of the paper: exported with all checks, and converted for CTranslate2."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_day import models
from benchmarks.gpu_day.runner import last_line
from benchmarks.gpu_day.stage import Task, main, say
from tfexport.bundle.reader import open_bundle
from tfexport.contract import FLOATS

CTRANSLATE2 = "base.ct2"


def run(task: Task) -> bool:
    """`tfexport export` of a random model of the base size."""
    checkpoint = models.base_checkpoint(task)
    folder, log = models.base_folder(task), task.work / "export.log"
    task.found["checkpoint_mb"] = checkpoint.path.stat().st_size / 1e6
    task.save()
    precisions = ",".join(FLOATS)
    command = [sys.executable, "-m", "tfexport", "export", str(checkpoint.path), "--precision", precisions]
    with log.open("wb") as output:
        begin = time.perf_counter()
        code = subprocess.run(
            [*command, "-o", str(folder), "--force"], stdout=output, stderr=subprocess.STDOUT
        ).returncode
    task.found["export"] = {
        "code": code,
        "seconds": time.perf_counter() - begin,
        "last_line": last_line(log) if code else "",
    }
    say(log.read_text(encoding="utf-8", errors="replace"))
    task.save()
    bundle = models.base(task)  # without checks where this failed: the stages that follow measure all the same
    task.found["bundle"] = _about(folder)
    task.save()
    converted = _convert(task, bundle.directory)
    task.found["ctranslate2"] = converted
    return code == 0 and converted["error"] is None


def _about(folder: Path) -> dict[str, Any]:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"mb": size / 1e6, "graphs": sorted(p.name for p in folder.rglob("*.onnx"))}


def _convert(task: Task, bundle: Path) -> dict[str, Any]:
    from benchmarks.peers.converters import canonical_model, write_ctranslate2

    begin = time.perf_counter()
    try:
        shutil.rmtree(task.work / CTRANSLATE2, ignore_errors=True)
        write_ctranslate2(canonical_model(open_bundle(bundle)), task.work / CTRANSLATE2)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None, "seconds": time.perf_counter() - begin}


if __name__ == "__main__":
    sys.exit(main(run))
