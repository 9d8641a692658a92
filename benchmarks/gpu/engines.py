"""Build TensorRT for RTX engines ahead of time, on any machine, and list them: `python -m benchmarks.gpu.engines`.

Two models, the embedded default and a random one of 6+6 layers and d_model 512, in every precision, for two GPU
generations and portable. Engines cannot be run without a GPU: this shows that they are built, how long that takes and how
large they are.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from benchmarks.base_model import BASE, random_checkpoint
from tfexport.bundle.reader import Engine
from tfexport.commands.demo import embedded_checkpoint
from tfexport.contract import FLOATS, short_name
from tfexport.exporter.engine_plan import LengthPlan
from tfexport.exporter.engines import build_engines
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import Checkpoint, load_checkpoint

GPUS = ["sm89", "sm120", "portable"]
PLAN = LengthPlan(max_batch=32, max_beam=4, max_source=128, cache=(32, 64))

BASE_MODEL = BASE.replace(max_source_length=256, max_target_length=256)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, help="write the list here too, as JSON")
    out: Path | None = arguments.parse_args().out
    rows: list[dict[str, object]] = []
    for name in ("embedded", "base"):
        # A folder each, since the engines of a model take gigabytes.
        with tempfile.TemporaryDirectory() as temporary:
            checkpoint = _checkpoint(name, Path(temporary))
            print(f"{name}: exporting in {', '.join(FLOATS)}", flush=True)
            directory = export(checkpoint, Path(temporary, name), precisions=list(FLOATS.values())).directory

            def built(engine: Engine, size: int, model: str = name) -> None:
                rows.append(
                    {
                        "model": model,
                        "role": engine.role,
                        "cache": engine.cache,
                        "precision": short_name(engine.precision),
                        "gpu": engine.gpu,
                        "mib": round(size / 2**20, 1),
                        "seconds": engine.seconds,
                    }
                )
                print(f"  {engine.about:<40} {size / 2**20:8.1f} MiB {engine.seconds:6.1f} s", flush=True)

            started = time.monotonic()
            precisions = list(FLOATS.values())
            new = build_engines(directory, PLAN, precisions=precisions, gpus=GPUS, library="tensorrt_rtx", built=built)
            print(
                f"{name}: {len(new)} engines by {new[0].library} {new[0].version} in {time.monotonic() - started:.0f} s"
            )
    if out is not None:
        out.write_text(json.dumps({"version": new[0].version, "engines": rows}, indent=1) + "\n", encoding="utf-8")


def _checkpoint(name: str, folder: Path) -> Checkpoint:
    if name == "base":
        return random_checkpoint(BASE_MODEL, folder / "base.safetensors")
    return load_checkpoint(embedded_checkpoint(), {})


if __name__ == "__main__":
    main()
