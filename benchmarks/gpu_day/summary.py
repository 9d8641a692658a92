"""One page of a day: what became of each stage, and what it found. JSON for programs, Markdown for people."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.plan import Stage
from benchmarks.gpu_day.state import NOT_RUN, State, now, read_json, write_json
from benchmarks.tables import spread_text, table
from tfexport.system.atomic_files import whole_file

JSON, MARKDOWN, ARCHIVE = "summary.json", "summary.md", "results.tar.xz"
MOST = 8 << 20
"""Bytes of a file that the archive takes."""
REHEARSED = (
    "**A rehearsal without a GPU.** It shows that the stages run. PyTorch, Hugging Face and CTranslate2 computed a tiny "
    "model on the CPU, and ort-cuda met stand-ins of CUDA that compute nothing. No number here says anything of a GPU."
)

Record = Mapping[str, Any]
Told = Callable[[Record, bool], list[str]]
"""The lines of what a stage found; in a rehearsal without times."""


def collect(stages: Sequence[Stage], state: State, folder: Path) -> dict[str, Any]:
    """Every stage with its status and its results, as far as they go."""
    entries = []
    for stage in stages:
        known = {"status": NOT_RUN, "reason": "", **state.stages.get(stage.name, {})}
        found = read_json(folder / f"{stage.name}.json")
        entries.append({"name": stage.name, "about": stage.about, **known, "found": found})
    return {"written": now(), "rehearsal": state.rehearsal, "stages": entries}


def write(record: Record, folder: Path) -> None:
    """Write the summary and an archive of all results to `folder`, in the place of older ones."""
    write_json(record, folder / JSON)
    with whole_file(folder / MARKDOWN) as file:
        file.write(markdown(record).encode())
    with whole_file(folder / ARCHIVE) as file, tarfile.open(fileobj=file, mode="w:xz") as archive:
        for path in sorted(folder.rglob("*")):
            own = path.name.startswith(ARCHIVE)
            if path.is_file() and not own and path.stat().st_size <= MOST:
                archive.add(path, arcname=path.relative_to(folder).as_posix())


def markdown(record: Record, *, title: str | None = "A day on a GPU") -> str:
    """The page. Its tables may be pasted or generated into another one, then without a title."""
    stages: Sequence[Record] = record["stages"]
    lines = [f"# {title}", ""] if title else []
    if record["rehearsal"]:
        lines += [REHEARSED, ""]
    rows = [[s["name"], s["about"], s["status"], _seconds(s), s.get("reason") or ""] for s in stages]
    lines += table(["stage", "what it does", "status", "seconds", ""], rows)
    for stage in stages:
        told = _TOLD.get(stage["name"])
        found = stage["found"]
        if told is not None and found:
            try:
                body = told(found, record["rehearsal"])
            except (
                KeyError,
                TypeError,
                ValueError,
                IndexError,
                AttributeError,
            ) as error:  # of a stage that was stopped
                body = [f"Its results cannot be shown: {error!r}. They are in {stage['name']}.json."]
            lines += ["", f"## {stage['name'].replace('-', ' ').capitalize()}", "", *body]
    return "\n".join(lines) + "\n"


def _seconds(stage: Record) -> str:
    taken, limit = stage.get("seconds"), stage.get("limit")
    return "" if limit is None else f"{'' if taken is None else f'{taken:.0f}'} of {limit}"


def _environment(found: Record, _: bool) -> list[str]:
    seen = (found.get("torch") or {}).get("gpu") or {}
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    gpu = found.get("gpu") or {}
    lines = [f"{found['date']}, commit {found['commit'] or 'unknown'}, Python {found['python']}."]
    lines += ["", f"GPU: {seen.get('name', 'none')}. {found['cpu']}, {found['cpus']} CPUs. {versions}."]
    if gpu:
        lines += ["", *table(["nvidia-smi", ""], gpu.items())]
    return lines


def _smoke(found: Record, _: bool) -> list[str]:
    head = [
        "precision",
        "beam",
        "same tokens",
        "best token the same",
        "largest error of a logit",
        "PyTorch's own",
        "passed",
    ]
    rows = []
    for row in found["rows"]:
        cells = [row["precision"], row["beam"]]
        if row["error"]:
            rows.append([*cells, row["error"], "", "", "", "NO"])
        elif row["passed"] is None:
            rows.append([*cells, "not compared", "", "", "", ""])
        else:
            same, best = f"{row['identical']} of {found['sentences']}", f"{row['top1_agree']} of {row['steps']}"
            errors = [_error(row["logits_error"]), _error(row["logits_own"])]
            rows.append([*cells, same, best, *errors, "yes" if row["passed"] else "NO"])
    kernels = sorted({name for row in found["rows"] for name in row.get("attention", [])})
    attention = ["", "Kernels of attention and softmax:", "", *(f"- `{name}`" for name in kernels)] if kernels else []
    return [f"The bundle: {found['bundle']}.", "", *table(head, rows), *attention]


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def _tests(found: Record, _: bool) -> list[str]:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in found.get("counts", {}).items())
    lines = [f'`pytest -m "{found["marks"]}"`: {counts}.']
    reasons = found.get("reasons", {})
    failed = [[name.removeprefix("failed: "), _line(reasons[name])] for name in reasons if name.startswith("failed: ")]
    return [*lines, "", *table(["failed", ""], failed)] if failed else lines


def _line(text: str) -> str:
    return " ".join(text.split())[-200:]


def _export(found: Record, _: bool) -> list[str]:
    told, converted = found["export"], found.get("ctranslate2") or {}
    how = f"{told['seconds']:.0f} s" if not told["code"] else f"exit code {told['code']}: {told['last_line']}"
    lines = [f"`tfexport export` of a checkpoint of {found['checkpoint_mb']:.0f} MB in fp32, fp16 and bf16: {how}."]
    if "bundle" in found:
        lines += ["", f"The bundle has {found['bundle']['mb']:.0f} MB."]
    if converted:
        took = converted["error"] or f"{converted['seconds']:.0f} s"
        lines += ["", f"CTranslate2's converter: {took}."]
    return lines


def _speed(found: Record, rehearsal: bool) -> list[str]:
    ratio = f"ratio to {found.get('ratio_to', 'the first')}"
    head = ["runtime", "precision", "batch", "beam", "tokens/s", "ms a step", ratio]
    rows = []
    for row in found["rows"]:
        cells = [row["runtime"], row["precision"], row["batch"], row["beam"]]
        if row["error"]:
            rows.append([*cells, row["error"], "", ""])
            continue
        numbers = [
            spread_text(row["tokens_per_second"], 0),
            spread_text(row["step_ms"], 3),
            spread_text(row["ratio"], 2),
        ]
        rows.append([*cells, *(["rehearsed", "", ""] if rehearsal else numbers)])
    said = [f"- {name} was left out: {t['said']}" for name, t in found.get("trials", {}).items() if t["code"] != 0]
    left_out = [f"- {found['left_out']}"] if "left_out" in found else []
    about = "Medians, with the 10th and 90th percentile, of rounds that take turns; every output has the same length."
    return [about, "", *table(head, rows), *([""] if said or left_out else []), *said, *left_out]


def _profile(found: Record, rehearsal: bool) -> list[str]:
    head = ["precision", "batch", "beam", "nodes a step", "us a node", "us between nodes", "us in all", "of it busy"]
    head += ["us of the host", "us a step, unwatched", "us a token", "seen by"]
    keys = ("nodes", "node_us", "gap_us", "step_us", "busy_us", "host_us", "host_step_us", "us_a_token")
    rows = []
    for row in found["rows"]:
        numbers = [("rehearsed" if rehearsal and row.get(key) else _number(row.get(key))) for key in keys]
        rows.append([row["precision"], row["batch"], row["beam"], *numbers, row["error"] or row.get("by", "")])
    lines = table(head, rows)
    for row in found["rows"][:2]:
        if row.get("kernels"):
            kernels = [[f"`{k['name']}`", _number(k["a_step"]), _number(k["us_a_step"])] for k in row["kernels"]]
            lines += ["", f"Kernels in {row['precision']}, batch {row['batch']}, beam {row['beam']}:", ""]
            lines += table(["kernel", "runs a step", "us a step"], kernels)
    return [*lines, *(["", f"- {found['left_out']}"] if "left_out" in found else [])]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}".rstrip("0").rstrip(".")


_TOLD: dict[str, Told] = {
    "environment": _environment,
    "smoke": _smoke,
    "tests": _tests,
    "export": _export,
    "speed": _speed,
    "profile": _profile,
    "compiled": _speed,
    "compiled-tests": _tests,
}
