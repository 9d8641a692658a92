"""`make cuda-dry`: run the cases, write what they counted, and fail where a limit is broken.

Where the wheel of the provider or the headers of CUDA are missing, it says so and succeeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.cuda_dry import build
from benchmarks.cuda_dry.report import failures, step_failures, step_table, table

RESULTS = build.ROOT / "benchmarks" / "results" / "cuda_dry.json"


def run_cases(*flags: str) -> dict[str, Any]:
    """Run `cases.py` in a process that meets the stand-ins."""
    command = [sys.executable, "-m", "benchmarks.cuda_dry.cases", *flags]
    done = subprocess.run(
        command, env=build.environment(), cwd=build.ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one case, and write nothing")
    parser.add_argument("--lines", type=int, default=1000, help="lines of text")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON file")
    options = parser.parse_args()
    try:
        build.prepare(download=True)
    except build.Missing as missing:
        print(f"SKIPPED: the dry run of ort-cuda was not done: {missing}")
        return 0
    found = run_cases("--lines", str(options.lines), *(["--short"] if options.short else []))
    for head, cells in (table(found["rows"]), step_table(found["steps"])):
        for line in (head, *cells):
            print(" | ".join(line))
    if not options.short:
        record = {"provider": build.WHEEL, **found}
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    broken = [*failures(found["rows"]), *step_failures(found["steps"]), *found["violations"]]
    for line in broken:
        print(f"FAILED: {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
