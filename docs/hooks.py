"""What the pages of the site take from the code: a line `<!-- generate: NAME -->` becomes the text of a generator.

MkDocs calls `on_page_markdown` and `on_files`. The tests call `expanded`, so that links into generated text are checked too.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = {f"results/{name}.png": RESULTS / f"{name}.png" for name in ("cpu", "growth", "serve_load", "corpus_run")}
"""Pictures that pages show and that do not lie below docs/."""


_MARK = re.compile(r"^<!-- generate: (\S+) -->$", re.MULTILINE)


def expanded(markdown: str) -> str:
    """`markdown` with the text of its generators.

    Raises:
        KeyError: it names a generator that does not exist.
    """
    return _MARK.sub(lambda mark: GENERATORS[mark[1]](), markdown)


def commands() -> str:
    """Every command with its arguments and options, in the groups of its `--help`."""
    import typer

    from tfexport.cli import app

    group: Any = typer.main.get_command(app)
    text = [group.help, _parameters(group, typer.Context(group)), group.epilog]
    for name, command in group.commands.items():
        arguments = [_argument(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
        usage = " ".join(["tfexport", name, "[OPTIONS]", *arguments])
        help = inspect.cleandoc(command.help or "")
        text += [f"## {name}", f"```\n{usage}\n```", help, _parameters(command, typer.Context(command))]
    return "\n\n".join(text)


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).strip("[]")
    return name if parameter.required else f"[{name}]"


def _parameters(command: Any, context: Any) -> str:
    """A table of the arguments and of each group of options."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.params:
        is_argument = parameter.param_type_name == "argument"
        usage, help = parameter.get_help_record(context)
        usage = _argument(parameter) if is_argument else usage
        panel = "Arguments" if is_argument else parameter.rich_help_panel or "Options"
        help = help.replace("[required]", "").strip()
        groups.setdefault(panel, []).append((f"`{usage}`", re.sub(r"\[default: \((.*?)\)", r"[default: \1", help)))
    tables = [f"**{panel}**\n\n{_table(('', 'description'), rows)}" for panel, rows in groups.items()]
    return "\n\n".join(tables)


def keywords() -> str:
    """The options that functions of the Python API take as keyword arguments."""
    from tfexport.decoding.request_options import AlignmentOptions, BatchLimits, KeepOptions
    from tfexport.documents.options import DocumentOptions
    from tfexport.exporter.options import BudgetOptions
    from tfexport.models.checkpoints.options import ExportedCheckpointOptions, ModelOptions, ReferenceOptions
    from tfexport.option import rows
    from tfexport.scale.options import ActorBatches, ClassOptions, ScoreOptions
    from tfexport.scheduling.options import ServingOptions
    from tfexport.search.options import SearchOptions
    from tfexport.verification.options import CompareOptions

    groups = {
        "Options of a search": (
            "`Model.translate`, `iterate`, `translate_ids`, `stream`, `translate_async` and `stream_async`",
            SearchOptions,
        ),
        "Options of documents": ("`Model.translate_document`", DocumentOptions),
        "Options of alignments": (
            "`Model.translate`, `iterate`, `translate_ids` and `translate_async`",
            AlignmentOptions,
        ),
        "Options of copied text": (
            "`Model.translate`, `iterate`, `stream`, `translate_async` and `stream_async`",
            KeepOptions,
        ),
        "Options of batches": ("`Model.translate`, `iterate` and `translate_ids`", BatchLimits),
        "Options of actors": (
            "`tfexport.scale.Translator`, `Scorer` and, without `max_batch_tokens`, `Classifier`",
            ActorBatches,
        ),
        "Options of scores": ("`tfexport.scale.Scorer`", ScoreOptions),
        "Options of classes": ("`tfexport.scale.Classifier`", ClassOptions),
        "Options of a scheduler": ("`Model.serve`", ServingOptions),
        "Options that describe a checkpoint": ("`tfexport.export`", ExportedCheckpointOptions),
        "Options that inspect takes": ("`tfexport.inspect`", ModelOptions),
        "Options of a budget": ("`tfexport.export`, with an `auto-` precision", BudgetOptions),
        "Options of a comparison": ("`tfexport.parity`", CompareOptions),
        "Options to read the checkpoint again": ("`tfexport.parity`, with `checkpoint`", ReferenceOptions),
    }
    text = []
    for title, (functions, group) in groups.items():
        found = [
            (f"`{name}`", f"`{flag}`" if flag else "", values, default, help)
            for name, flag, values, default, help in rows(group)
        ]
        head = ("keyword", "flag", "values", "default", "description")
        text += [f"## {title}", f"For {functions}.", _table(head, found)]
    return "\n\n".join(text)


def replica_options() -> str:
    """The arguments of the application for Ray Serve that `tfexport serve` does not have."""
    from tfexport.option import rows
    from tfexport.serving.replica_options import ReplicaOptions

    found = [(f"`{name}`", values, default, help) for name, _, values, default, help in rows(ReplicaOptions)]
    return _table(("argument", "values", "default", "description"), found)


def public_names() -> str:
    """A mkdocstrings entry for each public name."""
    import tfexport

    names = [name for name in tfexport.__all__ if name != "__version__"]
    functions = sorted(name for name in names if name[0].islower())
    return "\n\n".join(f"::: tfexport.{name}" for name in [*functions, *sorted(set(names) - set(functions))])


def model_fields() -> str:
    """The fields of `ModelConfig`, with their defaults and docstrings."""
    from tfexport import config

    tree = ast.parse(inspect.getsource(config.ModelConfig))
    body = tree.body[0].body  # type: ignore[attr-defined]
    about = {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    rows = [
        (f"`{field.name}`", f"`{field.type}`", _default(field), about.get(field.name, ""))
        for field in dataclasses.fields(config.ModelConfig)
    ]
    return _table(("field", "type", "default", "description"), rows)


def _default(field: dataclasses.Field[Any]) -> str:
    return "required" if field.default is dataclasses.MISSING else f"`{json.dumps(field.default)}`"


def contract() -> str:
    """Every tensor of every graph."""
    from tfexport import graph_contract, shortlist_contract
    from tfexport.config import ModelConfig
    from tfexport.contract import GraphSpec

    some = ModelConfig(
        d_model=64, n_heads=4, d_ff=64, n_encoder_layers=1, n_decoder_layers=1, src_vocab_size=9, tgt_vocab_size=9,
        max_source_length=9, max_target_length=9, unk_id=0, pad_id=1, bos_id=2, eos_id=3, output_bias=True,
    )  # fmt: skip
    sections: dict[str, list[GraphSpec]] = {
        "Portable graphs": [graph_contract.ENCODER, graph_contract.DECODER_STEP, graph_contract.SELECT_ROWS],
        "Search graphs": list(graph_contract.SEARCH_GRAPHS),
        "Graphs for ONNX Runtime on a CPU": [
            *(graph_contract.ORT_ENCODER, graph_contract.ORT_DECODER_STEP),
            *(graph_contract.ORT_BEAM_STEP, graph_contract.ORT_GREEDY_STEP),
        ],
        "Graphs for ONNX Runtime on a GPU": [
            *(graph_contract.CUDA_ENCODER, graph_contract.CUDA_DECODER_STEP, graph_contract.CUDA_BEAM_STEP)
        ],
        "Graphs with attention": [
            *graph_contract.attention_graphs_of(some),
            *graph_contract.attention_graphs_of(some, dialect="ort"),
        ],
        "Graphs for shortlists": [*shortlist_contract.shortlist_graphs_of(some)],
        "Classifier": [graph_contract.ENCODER_CLASSIFIER],
    }
    plain = {graph.role: graph for graph in (graph_contract.DECODER_STEP, graph_contract.ORT_BEAM_STEP)}
    plain_ort = {**plain, "decoder_step": graph_contract.ORT_DECODER_STEP}
    text = []
    for title, graphs in sections.items():
        rows = []
        for graph in graphs:
            same = (plain_ort if graph.dialect == "ort" else plain).get(graph.step)
            rows += _tensors(graph, same if same is not None and same.role != graph.role else None)
        text += [f"## {title}", _table(("graph", "", "tensor", "type", "axes", "description"), rows)]
    return "\n\n".join(text)


def _tensors(graph: Any, same: Any) -> list[tuple[str, ...]]:
    """A row for each tensor of a graph; of one that is a variant of another graph, for those that this one has not."""
    from tfexport import contract

    known: set[tuple[str, tuple[str, ...]]] = set()
    if same is not None:
        known = {(t.name, t.axes) for t in (*same.inputs, *same.outputs)}
        one = contract.expand(same, 1, "float32")
        known |= {(t.name, t.axes) for t in (*one.inputs, *one.outputs)}
    rows = [
        (f"`{graph.file}`", side, f"`{t.name}`", t.dtype, ", ".join(t.axes), t.about)
        for side, tensors in (("in", graph.inputs), ("out", graph.outputs))
        for t in tensors
        if (t.name, t.axes) not in known
    ]
    if same is None:
        return rows
    return [*rows, (f"`{graph.file}`", "", "", "", "", f"the other tensors are those of `{same.file}`")]


def cpu_results() -> str:
    """The matrix of benchmarks/cpu.py."""
    return _cpu(RESULTS / "cpu.json")


def hugging_face_results() -> str:
    return _cpu(RESULTS / "hugging_face" / "cpu.json")


def _cpu(path: Path) -> str:
    from benchmarks import cpu_report

    record = json.loads(path.read_text(encoding="utf-8"))
    cells = [{**cell, "run": record["runs"][cell["run"]]} for cell in record["cells"]]
    return str(cpu_report.markdown(cells))


def serve_results() -> str:
    """The load test of HTTP servers."""
    from benchmarks.serve_load import report

    return report.markdown(json.loads((RESULTS / "serve_load.json").read_text(encoding="utf-8")))


def growth_results() -> str:
    """The sweeps of benchmarks/growth.py."""
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
    """What benchmarks/corpus_capacity.py measured, and what follows for a billion lines."""
    from benchmarks import corpus_capacity

    record = RESULTS / "corpus_capacity.json"
    if not record.exists():
        return "Nothing was measured yet."
    return corpus_capacity.markdown(json.loads(record.read_text(encoding="utf-8")))


def corpus_run() -> str:
    """What benchmarks/corpus_run.py measured."""
    from benchmarks import corpus_run

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
    """What benchmarks/expected_outputs.py measured."""
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
    """What benchmarks/search_host.py measured."""
    from benchmarks.search_host import table

    record = json.loads((RESULTS / "search_host.json").read_text(encoding="utf-8"))
    about = record["machine"]
    return f"{about['cpu']}, {about['date'][:10]}.\n\n{_table(*table(record))}"


def output_projection() -> str:
    """What benchmarks/output_projection.py measured."""
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
    """What benchmarks/step_model.py computes."""
    from benchmarks.step_model import table

    record = json.loads((RESULTS / "cuda_dry.json").read_text(encoding="utf-8"))
    return _table(*table(record["steps"]))


def step_model_measured() -> str:
    """The computed steps beside those of the day on a GPU."""
    from benchmarks.base_model import BASE
    from benchmarks.step_model import measured_table

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


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(_PIPE.sub(_escaped, str(cell)) for cell in cells)} |"

    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


_PIPE = re.compile(r"`[^`]*`|\|")
"""What may look like the end of a cell, and code, within which it does not."""


def _escaped(found: re.Match[str]) -> str:
    return "\\|" if found[0] == "|" else found[0]


def _whole(name: str) -> str:
    """A file at the root of the repository, without its title: the page has its own."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"\A# .*\n", "", text).strip()


GENERATORS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "keywords": keywords,
    "replica-options": replica_options,
    "public-names": public_names,
    "model-fields": model_fields,
    "contract": contract,
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
    "changelog": lambda: _whole("CHANGELOG.md"),
    "security": lambda: _whole("SECURITY.md"),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    return expanded(markdown)


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, path in IMAGES.items():
        files.append(File.generated(config, name, content=path.read_bytes()))
    return files
