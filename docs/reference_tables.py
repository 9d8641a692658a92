"""The tables of the reference: commands, options, settings, and tensors of graphs."""

from __future__ import annotations

import ast
import dataclasses
import html
import inspect
import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(_PIPE.sub(_escaped, str(cell)) for cell in cells)} |"

    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


_PIPE = re.compile(r"`([^`]*)`|\|")
"""A bar, which ends a cell, and code, which may contain bars."""


def _escaped(part: re.Match[str]) -> str:
    if part[0] == "|":
        return "\\|"
    if "|" not in part[0]:
        return part[0]
    # MkDocs and code hosts escape bars within backticks in different ways.
    return f"<code>{html.escape(part[1], quote=False).replace('|', '&#124;')}</code>"


def commands() -> str:
    """Every command with its arguments and options, in the groups of its `--help-all`."""
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
    name = (parameter.metavar or parameter.name.upper()) + "..." * (parameter.nargs == -1)
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
    tables = [f"**{panel}**\n\n{table(('', 'description'), rows)}" for panel, rows in groups.items()]
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
        text += [f"## {title}", f"For {functions}.", table(head, found)]
    return "\n\n".join(text)


def replica_options() -> str:
    """The arguments of the application for Ray Serve that `tfexport serve` does not have."""
    from tfexport.option import rows
    from tfexport.serving.replica_options import ReplicaOptions

    found = [(f"`{name}`", values, default, help) for name, _, values, default, help in rows(ReplicaOptions)]
    return table(("argument", "values", "default", "description"), found)


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
    return table(("field", "type", "default", "description"), rows)


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
        text += [f"## {title}", table(("graph", "", "tensor", "type", "axes", "description"), rows)]
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
