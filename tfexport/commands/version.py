"""`tfexport version`: the installed packages, the runtimes that work here, and why others do not."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as version_of
from typing import Any

from tfexport.commands.console import working
from tfexport.commands.flags import AsJson
from tfexport.errors import TfexportError
from tfexport.system.json_text import json_text
from tfexport.system.processes import cpu_name, instruction_sets, usable_cpus
from tfexport.system.version import version as own_version

SECONDS = 120
"""The largest number of seconds of a process, for a machine that reads PyTorch from a slow disk."""


def version(as_json: AsJson = False) -> None:
    """Print the version, the runtimes that can be used here, and whether the kernels are in use; if not, why.

    A bug report should contain the output of `tfexport version --json`.
    """
    if as_json:
        print(json_text({**facts(), **checks()}, indent=1))
        return
    print("\n".join(about_machine(facts())), flush=True)  # the checks import PyTorch, which takes seconds
    with working("looking for runtimes"):
        record = checks()
    print("\n".join(about_checks(record)))


def facts() -> dict[str, Any]:
    """The versions and the CPU, which are known without importing a library."""
    return {
        "tfexport": own_version(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {"name": cpu_name(), "usable": usable_cpus(), "instruction_sets": list(instruction_sets())},
        "packages": packages(),
    }


def checks() -> dict[str, Any]:
    """The runtimes that can be used here, and the state of the kernels."""
    runtimes = checked()
    kernels = runtimes.pop("kernels", {"state": "unknown", "reason": "no check of them was made"})
    return {"runtimes": runtimes, "kernels": kernels}


def checked() -> dict[str, dict[str, Any]]:
    """The findings of separate processes about each runtime and the `kernels`; see `tfexport/runtimes/availability.py`.

    One process runs all checks, so that each library is imported once. If a check ends its process, the next process skips
    this check.
    """
    results: dict[str, dict[str, Any]] = {}
    while True:
        waiting, lost = _check(results)
        if not waiting:
            return results
        results[waiting] = {"available": False, "state": "unknown", "reason": lost, "libraries": {}}


def _check(results: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """Add the remaining results of a process. Returns the check in which the process ended, and the reason."""
    command = [sys.executable, "-m", "tfexport.runtimes.availability", *results]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
        output, lost = done.stdout, _ending(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        output, lost = error.stdout or b"", f"there was no answer within {SECONDS} seconds"
    waiting = ""
    for line in output.decode(errors="replace").splitlines():
        if line.startswith('{"checking": '):  # libraries may print other lines
            waiting = json.loads(line)["checking"]
        elif line.startswith('{"name": '):
            result = json.loads(line)
            results[result.pop("name")] = result
            waiting = ""
    if not output and lost:
        raise TfexportError(f"tfexport cannot be imported in a separate process: {lost}. Install tfexport again.")
    return waiting, lost


def _ending(code: int, messages: bytes) -> str:
    """The reason why a process ended early; empty if it did not."""
    if code == 0:
        return ""
    last = messages.decode(errors="replace").strip().splitlines()[-1:]
    how = f"signal {-code} ended its process" if code < 0 else "its process failed"
    return ": ".join([how, *last])


def packages() -> dict[str, str]:
    """The installed packages among those that tfexport and its extras name, with their versions."""
    try:
        wanted = requires("tfexport") or []
    except PackageNotFoundError:
        return {}
    versions = {}
    for requirement in wanted:
        if name := re.match(r"[A-Za-z0-9._-]+", requirement):
            try:
                versions[name[0]] = version_of(name[0])
            except PackageNotFoundError:
                continue
    return dict(sorted(versions.items()))


def about_machine(record: Mapping[str, Any]) -> list[str]:
    """`facts()` as lines of text."""
    cpu = record["cpu"]
    sets = ", ".join(cpu["instruction_sets"]) or "instruction sets not known"
    return [
        f"tfexport {record['tfexport']}",
        f"python {record['python']} on {record['system']}",
        f"cpu: {cpu['name'] or 'unknown'}, {cpu['usable']} usable; {sets}",
    ]


def about_checks(record: Mapping[str, Any]) -> list[str]:
    """`checks()` as lines of text."""
    lines = ["runtimes:"]
    width = max(map(len, record["runtimes"]))
    for name, runtime in record["runtimes"].items():
        libraries = ", ".join(f"{library} {number}" for library, number in runtime["libraries"].items())
        state = libraries if runtime["available"] else f"not available: {runtime['reason']}"
        lines.append(f"  {name:<{width}}  {state}")
    return [*lines, *_about_kernels(record["kernels"])]


def _about_kernels(kernels: Mapping[str, Any]) -> list[str]:
    if kernels["state"] != "ready":
        build = kernels.get("build", {})
        details = build.get("details", []) if build.get("reason") == "compile-error" else []
        reason = f"kernels: not in use, as {kernels['reason']}. {kernels.get('remedy', '')}".rstrip()
        return [reason, *(f"  {line}" for line in details)]
    compiler = kernels["build"].get("compiler")
    sets = ", ".join(kernels["instruction_sets"]) or "instruction sets not known"
    lines = [f"kernels: in use, {sets}{f'; built by {compiler}' if compiler else ''}"]
    if not kernels["matrix_products"]:
        lines.append("  matrix products are computed by ONNX Runtime: their kernels need AVX2, or a 64-bit ARM")
    return lines
