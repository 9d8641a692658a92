"""The tables of pages that follow from the code and from files of results.

A page has a line `<!-- generated: NAME -->`, the text of that generator, and a line `<!-- end -->`. `make pages` writes the
pages again; a test compares them. `reference_tables.py` has the generators of the reference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs import manifest_schema, python_api, reference_tables
from docs.reference_tables import table as _table

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
SCHEMA = DOCS / "reference" / "manifest.schema.json"

_PART = re.compile(r"(^<!-- generated: (\S+) -->\n).*?(^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def current(markdown: str) -> str:
    """`markdown` with the present text of its generators.

    Raises:
        KeyError: it names a generator that does not exist.
    """
    return _PART.sub(lambda part: f"{part[1]}\n{GENERATORS[part[2]]().strip()}\n\n{part[3]}", markdown)


def main() -> None:
    """Write every page whose generated text has changed, and the schema of manifests."""
    texts = {page: current(page.read_text(encoding="utf-8")) for page in sorted(DOCS.rglob("*.md"))}
    for path, text in {**texts, SCHEMA: manifest_schema.text()}.items():
        if not path.exists() or text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(DOCS.parent))


def cpu_results() -> str:
    """The matrix of benchmarks/cpu/matrix.py."""
    return _cpu(RESULTS / "cpu.json")


def hugging_face_results() -> str:
    return _cpu(RESULTS / "hugging_face" / "cpu.json")


def _cpu(path: Path) -> str:
    from benchmarks.cpu import report as cpu_report

    record = json.loads(path.read_text(encoding="utf-8"))
    cells = [{**cell, "run": record["runs"][cell["run"]]} for cell in record["cells"]]
    return str(cpu_report.markdown(cells))


def serve_results() -> str:
    """The load test of HTTP servers."""
    from benchmarks.serve import report

    return report.markdown(json.loads((RESULTS / "serve_load.json").read_text(encoding="utf-8")))


def growth_results() -> str:
    """The sweeps of benchmarks/cpu/growth.py."""
    record = json.loads((RESULTS / "growth.json").read_text(encoding="utf-8"))
    rows = [
        (
            row["sweep"],
            f"{row['value']:,}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['step_ms']:.2f}",
            f"{1000 * row['floor']['step_seconds']:.2f}",
            f"{row['step_ms'] / 1000 / row['floor']['step_seconds']:.2f}",
            f"{row['memory_mib']:,.0f}",
        )
        for row in record["rows"]
    ]
    head = ("changed", "to", "tokens/s", "ms a step", "least ms a step", "ratio", "MiB")
    base = ", ".join(f"{name} {value:,}" for name, value in record["base"].items())
    return f"{_machine(record['machine'])}\n\nWhere a row changes nothing else: {base}.\n\n{_table(head, rows)}"


def corpus_capacity() -> str:
    """What benchmarks/corpora/capacity.py measured, and what follows for a billion lines."""
    from benchmarks.corpora import capacity as corpus_capacity

    record = RESULTS / "corpus_capacity.json"
    if not record.exists():
        return "Nothing was measured yet."
    return corpus_capacity.markdown(json.loads(record.read_text(encoding="utf-8")))


def corpus_run() -> str:
    """What benchmarks/corpora/run.py measured."""
    from benchmarks.corpora import run as corpus_run

    record = RESULTS / "corpus_run.json"
    if not record.exists():
        return "Nothing was measured yet."
    return corpus_run.markdown(json.loads(record.read_text(encoding="utf-8")))


def cuda_dry_results() -> str:
    """What benchmarks/cuda_dry counted."""
    from benchmarks.cuda_dry.report import table

    record = json.loads((RESULTS / "cuda_dry.json").read_text(encoding="utf-8"))
    return f"Provider: `{record['provider']}`.\n\n{_table(*table(record['rows']))}"


def gpu_day_results() -> str:
    """The summary of a day on a GPU; a rehearsal is none."""
    from benchmarks.gpu_day.state import read_json
    from benchmarks.gpu_day.summary import markdown

    record = read_json(RESULTS / "gpu_day.json")
    if not record or record["rehearsal"]:
        return "There are no results yet: tfexport has not been run on a GPU."
    return str(markdown(record, title=None))


def cuda_dry_steps() -> str:
    """The launches of single steps that benchmarks/cuda_dry counted."""
    from benchmarks.cuda_dry.report import size_table, step_table

    record = json.loads((RESULTS / "cuda_dry.json").read_text(encoding="utf-8"))
    return f"{_table(*step_table(record['steps']))}\n\n{_table(*size_table(record['sizes']))}"


def expected_outputs() -> str:
    """What benchmarks/checkpoints/expected_outputs.py measured."""
    record = json.loads((RESULTS / "expected_outputs.json").read_text(encoding="utf-8"))
    rows = [
        (program["name"], row["lines"], f"{row['left']:,} of {program['combinations']:,}", _still_open(row["open"]))
        for program in record["programs"]
        for row in program["rows"]
    ]
    times = [(f"{program['name']}, tiny", program) for program in record["programs"]]
    if record["base"]:
        times.append((f"base size, {record['base']['parameters'] / 1e6:.0f} million parameters", record["base"]))
    kinds = ("given", "missing", "wrong")
    seconds = [(name, *(f"{facts[kind]['seconds']:.1f} s" for kind in kinds)) for name, facts in times]
    head = ("model", "all settings given", "settings left out", "one flag is wrong")
    return "\n\n".join(
        [
            _table(("model", "lines", "left", "settings still open"), rows),
            "The time of a reading with 32 complete lines, on one thread of a machine that did other work too:",
            _table(head, seconds),
            _machine(record["machine"]),
        ]
    )


def _still_open(settings: dict[str, list[Any]]) -> str:
    return "; ".join(f"`{name}` ({len(values)} values)" for name, values in settings.items()) or "none"


def search_host() -> str:
    """What benchmarks/search/host_time.py measured."""
    from benchmarks.search.host_time import table

    record = json.loads((RESULTS / "search_host.json").read_text(encoding="utf-8"))
    about = record["machine"]
    return f"{about['cpu']}, {about['date'][:10]}.\n\n{_table(*table(record))}"


def output_projection() -> str:
    """What benchmarks/gpu/output_projection.py measured."""
    record = json.loads((RESULTS / "output_projection.json").read_text(encoding="utf-8"))
    head = (
        "precision",
        "projection",
        "best token the same",
        "steps with ties",
        "KL divergence of a step",
        "same sentences",
    )
    rows = [
        (
            *(row["precision"], row["projection"], f"{row['best_token']:.3%}", f"{row['ties']} of {row['steps']:,}"),
            *(f"{row['kl']:.1e}", f"{row['same_beam_1']} of {row['sentences']:,}"),
        )
        for row in record["rows"]
    ]
    return _table(head, rows)


def step_model() -> str:
    """What benchmarks/cuda_dry/step_model.py computes."""
    from benchmarks.cuda_dry.step_model import table

    record = json.loads((RESULTS / "cuda_dry.json").read_text(encoding="utf-8"))
    return _table(*table(record["steps"]))


def step_model_measured() -> str:
    """The computed steps beside those of the day on a GPU."""
    from benchmarks.base_model import BASE
    from benchmarks.cuda_dry.step_model import measured_table

    steps = json.loads((RESULTS / "cuda_dry.json").read_text(encoding="utf-8"))["steps"]
    day = json.loads((RESULTS / "gpu_day.json").read_text(encoding="utf-8"))
    (speed,) = (stage["found"] for stage in day["stages"] if stage["name"] == "speed")
    return _table(*measured_table(steps, speed["rows"], BASE.tgt_vocab_size))


def recorded(name: str) -> str:
    """A page of tables from benchmarks/results/records.json."""
    tables = json.loads((RESULTS / "records.json").read_text(encoding="utf-8"))[name]
    text = []
    for table in tables:
        text += [f"## {table['title']}", table["about"], _table(table["columns"], table["rows"])]
    return "\n\n".join(text)


def _machine(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {found}" for name, found in sorted(facts["versions"].items()) if found)
    return f"{facts['cpu']}, {facts['cpus']} CPUs, {facts['date'][:10]}, Python {facts['python']}; {versions}."


GENERATORS: dict[str, Callable[[], str]] = {
    "commands": reference_tables.commands,
    "keywords": reference_tables.keywords,
    "replica-options": reference_tables.replica_options,
    "public-names": python_api.public_names,
    "corpus-names": python_api.corpus_names,
    "model-fields": reference_tables.model_fields,
    "contract": reference_tables.contract,
    "cpu-results": cpu_results,
    "hugging-face-results": hugging_face_results,
    "serve-results": serve_results,
    "growth-results": growth_results,
    "corpus-capacity": corpus_capacity,
    "corpus-run": corpus_run,
    "cuda-dry-results": cuda_dry_results,
    "gpu-day-results": gpu_day_results,
    "cuda-dry-steps": cuda_dry_steps,
    "step-model": step_model,
    "step-model-measured": step_model_measured,
    "expected-outputs": expected_outputs,
    "search-host": search_host,
    "output-projection": output_projection,
    "gpu-parity": lambda: recorded("gpu"),
    "precision-results": lambda: recorded("precision"),
    "agreement-results": lambda: recorded("agreement"),
    "memory-results": lambda: recorded("memory"),
    "serve-costs": lambda: recorded("serve-costs"),
    "shortlist-results": lambda: recorded("shortlists"),
    "constraint-results": lambda: recorded("constraints"),
}


if __name__ == "__main__":
    main()
