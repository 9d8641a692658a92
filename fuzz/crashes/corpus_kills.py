"""Ends a run over a corpus at random moments, and checks what it leaves.

    python -m fuzz.crashes.corpus_kills BUNDLE TEXT --kills 20
    python -m fuzz.crashes.corpus_kills BUNDLE TEXT --kills 20 --nodes

SIGKILL goes to an actor, which Ray starts again, or to the driver with all of its processes, after which the run is resumed.
With --nodes the run is on a cluster of two nodes, see `ray_nodes.py`. Then also the second node is killed with all that runs
on it, and started again after a while; of the driver its own process alone is killed.
At the end every row has to be there once, with the text of `tfexport decode`. Some rows end the process that decodes
them: they have to be set aside, and no other row. Needs `tfexport[ray]`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from makers.paths import ROOT
from makers.processes import descendants, is_actor, kill
from makers.ray_nodes import Nodes

DEADLY = "this row ends its worker"
ROWS_PER_SHARD = 250
PATIENCE = 240.0
"""Seconds without a new part."""

HOOK = f"""
import sys
if "ray" in " ".join(sys.orig_argv):
    import os
    from tfexport.decoding import line_reader
    ids = line_reader.Reader.ids
    def deadly(self, raw):
        if {DEADLY.encode()!r} in raw:
            os.kill(os.getpid(), 9)
        return ids(self, raw)
    line_reader.Reader.ids = deadly
"""
"""In each worker of Ray, as `sitecustomize`: some rows end the process that reads them."""


class Run:
    """The run that is killed.

    Args:
        deadly: some rows end their workers.
    """

    def __init__(self, folder: Path, bundle: Path, text: Path, seed: int, deadly: bool):
        self.output, self._folder, self._random = folder / "out", folder, random.Random(seed)
        self._command = [sys.executable, "-m", "tfexport", "corpus", str(bundle), str(text), "-o", str(self.output)]
        self._command += ["--actors", "2", "--rows-per-shard", str(ROWS_PER_SHARD), "--output-format", "jsonl"]
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        self._environment |= {"RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        if deadly:
            (folder / "hook").mkdir()
            (folder / "hook" / "sitecustomize.py").write_text(textwrap.dedent(HOOK), encoding="utf-8")
            paths.insert(0, str(folder / "hook"))  # Ray starts workers with it
        self._environment["PYTHONPATH"] = os.pathsep.join(paths)
        self.killed: Counter[str] = Counter()
        self.ended_by_node = 0
        """Runs that ended with an error after their node was killed, and were resumed."""
        self._nodes: Nodes | None = None
        self._folder_of_ray = folder / "ray"

    def on_nodes(self) -> Nodes:
        """The cluster that the run is on from now."""
        self._folder_of_ray.mkdir()
        self._nodes = Nodes(self._folder_of_ray, self._environment)
        self._environment = self._nodes.environment
        self._command = self._nodes.command(0, [*self._command, "--address", self._nodes.address])
        return self._nodes

    def complete(self, kills: int) -> None:
        """Run to the end, with so many kills on the way.

        Raises:
            RuntimeError: it does not go on, or ends with an error.
        """
        while True:
            with (self._folder / "log").open("ab") as log:
                driver = subprocess.Popen([*self._command, "--resume"], env=self._environment, stdout=log, stderr=log)
                nodes_before = self.killed["node"]
                while driver.poll() is None and sum(self.killed.values()) < kills:
                    self._kill(driver)
                try:
                    code = self._wait(driver)
                finally:
                    for pid in [*descendants(driver.pid), driver.pid] if driver.poll() is None else []:
                        kill(pid)
            if code == 0:
                return
            if code != -signal.SIGKILL and self.killed["node"] > nodes_before:
                self.ended_by_node += 1
            elif code != -signal.SIGKILL:
                raise RuntimeError(self._said(f"exit code {code}"))

    def _wait(self, driver: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a driver that writes parts; returns its exit code."""
        parts = -1
        while True:
            try:
                return driver.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                before, parts = parts, len(list(self.output.glob("part-*")))
                if parts == before:
                    raise RuntimeError(self._said("it does not go on")) from None

    def _kill(self, driver: subprocess.Popen[bytes]) -> None:
        time.sleep(self._random.uniform(0.1, 4))
        if self._nodes is not None:
            actors = [pid for number in range(2) for pid in self._nodes.actors(number)]
            if actors and self._random.random() < 0.3:
                self._kill_node(self._nodes)
                return
        else:
            actors = [pid for pid in descendants(driver.pid) if is_actor(pid)]
        if actors and self._random.random() < 0.6:
            kill(self._random.choice(actors))
            self.killed["actor"] += 1
        elif self._random.random() < (0.4 if actors else 0.1) and driver.poll() is None:  # Ray takes long to start
            others = descendants(driver.pid)  # known before: afterwards they are nobody's children
            kill(driver.pid)
            for pid in others:
                kill(pid)
            driver.wait()
            self.killed["driver"] += 1

    def _kill_node(self, nodes: Nodes) -> None:
        nodes.kill(1)
        self.killed["node"] += 1
        time.sleep(self._random.uniform(0, 8))
        nodes.start(1)

    def _said(self, about: str) -> str:
        return f"{about}: {(self._folder / 'log').read_text(encoding='utf-8', errors='replace')[-2000:]}"


def problems(output: Path, wanted: list[str], deadly: set[int]) -> list[str]:
    """What of an output is not as it has to be."""
    rows = []
    for part in sorted(output.glob("part-*")):
        rows += [json.loads(line) for line in part.read_bytes().splitlines()]
    found = []
    if [row["id"] for row in rows] != [f"0:{number}" for number in range(len(wanted))]:
        found.append(f"{len(rows)} rows, {len({row['id'] for row in rows})} of them different, of {len(wanted)}")
    aside = {number for number, row in enumerate(rows) if row["status"] == "worker_ended"}
    if aside != deadly:
        found.append(f"rows {sorted(aside)} are set aside, not {sorted(deadly)}")
    other = [
        n for n, (row, text) in enumerate(zip(rows, wanted, strict=False)) if row["text"] != text and n not in deadly
    ]
    if other:
        found.append(f"{len(other)} rows have another text, the first is {other[0]}: {rows[other[0]]}")
    if left := [path.name for path in output.rglob("*.partial")]:
        found.append(f"half-written files are left: {left}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ends a run over a corpus at random moments.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--deadly", type=int, default=0, help="rows that end the process that decodes them")
    parser.add_argument("--nodes", action="store_true", help="on a cluster of two nodes, of which one is killed too")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    every = options.text.read_text(encoding="utf-8").splitlines()
    lines = [every[number % len(every)] for number in range(options.rows)]
    deadly = set(random.Random(options.seed).sample(range(len(lines)), options.deadly))
    with tempfile.TemporaryDirectory(prefix="tfx", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        (folder / "whole").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        decode = [sys.executable, "-m", "tfexport", "decode", str(options.bundle), str(folder / "whole")]
        decoded = subprocess.run([*decode, "--threads", "1"], check=True, capture_output=True, encoding="utf-8")
        marked = [DEADLY if number in deadly else line for number, line in enumerate(lines)]
        (folder / "in.txt").write_text("".join(f"{line}\n" for line in marked), encoding="utf-8")
        run = Run(folder, options.bundle, folder / "in.txt", options.seed, bool(deadly))
        with run.on_nodes() if options.nodes else nullcontext():
            run.complete(options.kills)
        found = problems(run.output, decoded.stdout.splitlines(), deadly)
    if (killed := sum(run.killed.values())) < options.kills:
        found.append(f"the run ended after {killed} of {options.kills} kills: give more --rows")
    print("\n".join(found))
    kills = ", ".join(f"{count} of the {name}" for name, count in sorted(run.killed.items()))
    if run.ended_by_node:
        print(f"{run.ended_by_node} runs ended with an error after a node was killed, and were resumed")
    print(f"kills: {kills or 'none'}; {len(deadly)} deadly rows; {len(lines)} rows, {len(found)} problems; ", end="")
    print(f"seed {options.seed}; {time.monotonic() - began:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
