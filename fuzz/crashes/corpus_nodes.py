"""A run over a corpus on a Ray cluster of two nodes.

    python -m fuzz.crashes.corpus_nodes BUNDLE TEXT --rows 20000

The text has to be that of `tfexport decode`, and both nodes have to take part. Needs `tfexport[ray]`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from makers.paths import ROOT
from makers.ray_nodes import Nodes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A run over a corpus on two nodes on this machine.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    options = parser.parse_args(arguments)
    every = options.text.read_text(encoding="utf-8").splitlines()
    lines = [every[number % len(every)] for number in range(options.rows)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    seen: list[set[int]] = [set(), set()]
    with tempfile.TemporaryDirectory(prefix="tfx", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        (folder / "in.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        program = [sys.executable, "-m", "tfexport"]
        decode = [*program, "decode", str(options.bundle), str(folder / "in.txt"), "--threads", "1"]
        wanted = subprocess.run(decode, check=True, capture_output=True, encoding="utf-8", env=environment).stdout
        (folder / "ray").mkdir()
        with Nodes(folder / "ray", environment) as nodes:
            own = ["--address", nodes.address, "--actors", "2", "--rows-per-shard", str(max(1, options.rows // 40))]
            command = [*program, "corpus", str(options.bundle), str(folder / "in.txt"), "-o", str(folder / "out"), *own]
            began = time.monotonic()
            with (folder / "log").open("wb") as log:
                driver = subprocess.Popen(nodes.command(0, command), env=nodes.environment, stderr=log)
                while driver.poll() is None:
                    for number, found in enumerate(seen):
                        found.update(nodes.actors(number))
                    time.sleep(0.3)
            seconds, network = time.monotonic() - began, nodes.has_namespaces
        parts = sorted((folder / "out").glob("part-*"))
        same = b"".join(part.read_bytes() for part in parts).decode("utf-8") == wanted
        said = (folder / "log").read_text(encoding="utf-8", errors="replace")[-1000:]
    found = {"exit_code": driver.returncode, "rows": options.rows, "same_text": same, "seconds": round(seconds, 1)}
    print(json.dumps({**found, "actors_of_nodes": [len(one) for one in seen], "namespaces": network}))
    if driver.returncode:
        print(said)
    return 0 if same and driver.returncode == 0 and all(seen) else 1


if __name__ == "__main__":
    sys.exit(main())
