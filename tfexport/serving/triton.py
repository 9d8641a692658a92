"""A bundle as a model repository of Triton Inference Server.

    encoder/        the graphs of the contract, for the server's ONNX Runtime backend: for clients with their own search
    decoder_step/
    translate/      text in, text out: tfexport's decoding loop in the server's Python backend, over a copy of the bundle

An encoder classifier has only `encoder_classifier/`. Files are copies, because ONNX rejects weights whose file has a second
hard link, and would then reject the bundle's weights too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport import contract, graph_contract
from tfexport.bundle.reader import MANIFEST, Bundle
from tfexport.bundle.writer import move_into_place
from tfexport.config import ModelConfig
from tfexport.contract import GraphSpec, Precision, TensorSpec
from tfexport.errors import BundleError, RuntimeUnavailable, TfexportError
from tfexport.runtimes.known import RUNTIMES
from tfexport.search.search import SearchOptions
from tfexport.system.atomic_files import make_folder, partial_folder, sync_tree
from tfexport.system.regular_files import read_text
from tfexport.system.version import version

CONFIG = "config.pbtxt"
VERSION = "1"
TRANSLATE = "translate"
MODEL = Path(__file__).parents[1] / "assets" / "triton_model.py"
HEADER = "# Written by tfexport"
"""The first line of every config.pbtxt. A folder is replaced only if all models in it have this line."""

DATA_TYPES = {"int64": "TYPE_INT64", "float32": "TYPE_FP32", "float16": "TYPE_FP16"}
"""Data types of Triton. bfloat16 is missing because Triton's ONNX Runtime backend cannot load it."""

ENUMS = ("data_type", "kind")
"""The fields whose values are written without quotation marks."""

Message = Mapping[str, Any]
"""A message of protocol buffers: fields by name, a list for a repeated field."""


@dataclass(frozen=True)
class Repository:
    """A model repository on disk."""

    directory: Path
    models: tuple[str, ...]
    notes: tuple[str, ...]
    """Notes for the user, such as models that were left out."""


@dataclass(frozen=True)
class _Model:
    """One model folder of a repository."""

    config: Message
    about: Sequence[str]
    """The lines of the comment above the config."""
    files: Mapping[str, Path]
    """The files of the version's folder, by their names there."""

    def write(self, repository: Path) -> None:
        folder = repository / self.config["name"]
        for name, source in self.files.items():
            target = folder / VERSION / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        comment = [f"{HEADER} {version()}.", *(f"# {line}".rstrip() for line in self.about)]
        text = "\n".join([*comment, "", *_lines(self.config)])
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def write_repository(
    bundle: Bundle,
    directory: Path,
    *,
    runtime: str = "ort-cpu",
    precision: Precision = "float32",
    beam: int = 1,
    length_penalty: float = 0.6,
    max_length: int = 256,
    batch_size: int = 32,
    force: bool = False,
) -> Repository:
    """Write a model repository for a bundle, atomically.

    Args:
        runtime: the runtime of `translate`; with a GPU's runtime, the graphs run on the GPU too.
        precision: the precision of the graphs and of `translate`.
        beam, length_penalty, max_length: options of the search, as in `SearchOptions`.
        batch_size: the number of sentences that `translate` decodes together, and of requests that Triton gives it at once.
        force: replace a repository that this function wrote. Nothing else is ever replaced.

    Raises:
        BundleError: the bundle lacks the requested graphs or has another version, or the folder must not be replaced or
            cannot be written.
        RuntimeUnavailable: the runtime does not exist, or does not support this precision.
        TfexportError: an option of the search is out of range.
    """
    options = SearchOptions(beam=beam, length_penalty=length_penalty, max_length=max_length)
    if batch_size < 1:
        raise TfexportError(f"the batch size is {batch_size}, below 1. Give a larger one.")
    check_request(directory, runtime=runtime, precision=precision, force=force)
    _require_graphs(bundle, runtime, precision)
    on_gpu = RUNTIMES[runtime].gpu
    models, notes = [], []
    for graph in _graphs(bundle, precision):
        if all(tensor.dtype in DATA_TYPES for tensor in (*graph.inputs, *graph.outputs)):
            models.append(_graph_model(bundle, graph, on_gpu))
        else:
            short = contract.short_name(precision)
            notes.append(f"{graph.role} is left out: Triton's ONNX Runtime backend has no {short} tensors")
    if not bundle.config.is_classifier:
        models.append(_translate_model(bundle, runtime, precision, options, batch_size, on_gpu))
    with _new_repository(directory, force=force) as folder:
        for model in models:
            model.write(folder)
    return Repository(directory, tuple(model.config["name"] for model in models), tuple(notes))


def beside(directory: Path) -> Path:
    """The default path of the model repository for the bundle at `directory`."""
    if directory.name in ("", ".."):
        directory = directory.resolve()
    return directory.with_name(f"{directory.name}.triton")


def served_precision(bundle: Bundle, runtime: str) -> Precision:
    """The default precision: for TensorRT that of the engines, as in `load_runtime`."""
    built = {engine.precision for engine in bundle.engines} if runtime == "tensorrt" else set()
    order: tuple[Precision, ...] = ("float16", "bfloat16", "float32")
    return next((precision for precision in order if precision in built), "float32")


def check_request(directory: Path, *, runtime: str, precision: Precision, force: bool) -> None:
    """Raise the errors that `write_repository` would raise for any bundle, before the bundle exists.

    Raises:
        BundleError: the folder must not be replaced.
        RuntimeUnavailable: the runtime does not exist, or does not support this precision.
    """
    if runtime not in RUNTIMES:
        raise RuntimeUnavailable(f"there is no runtime {runtime!r} in this version. Use one of: {', '.join(RUNTIMES)}.")
    if runtime == "ort-cpu" and precision == "bfloat16":
        raise RuntimeUnavailable("ONNX Runtime cannot compute bf16 on the CPU. Use fp32 or fp16, or a GPU's runtime.")
    if precision in contract.QUANTIZED and runtime != "ort-cpu":
        raise RuntimeUnavailable(
            f"{runtime} does not compute in {contract.short_name(precision)}: it is for ort-cpu. Use --runtime ort-cpu, or "
            "--precision fp32."
        )
    _refuse_to_overwrite(directory.resolve(), force)


def _require_graphs(bundle: Bundle, runtime: str, precision: Precision) -> None:
    if runtime != "tensorrt" and precision not in bundle.precisions:
        bundle.graph("encoder", precision, bundle.dialect(runtime, precision))  # its error names the remedy
    if runtime == "tensorrt" and precision not in {engine.precision for engine in bundle.engines}:
        raise BundleError(
            f"{bundle.directory} has no TensorRT {contract.short_name(precision)} engines. Build them with `tfexport "
            "build`, or use ort-cuda."
        )


def _graphs(bundle: Bundle, precision: Precision) -> Iterator[GraphSpec]:
    """The portable graphs that a client needs, each as in the contract.

    Raises:
        BundleError: the bundle has no graphs in this precision, or another version with other tensors wrote it.
    """
    manifest = json.loads(read_text(bundle.directory / MANIFEST))
    described = {entry["file"]: entry for entry in manifest["graphs"]}
    for graph in graph_contract.graphs_of(bundle.config, precision):
        if graph.role in graph_contract.WITHOUT_MODULES:
            continue
        entry = described[bundle.graph(graph.role, precision).name]
        if any(entry.get(side) != tensors for side, tensors in contract.describe(graph, bundle.config).items()):
            raise BundleError(
                f"{bundle.directory / graph.file} has other tensors than this version of tfexport knows. Export the "
                "checkpoint again."
            )
        yield graph


def _graph_model(bundle: Bundle, graph: GraphSpec, on_gpu: bool) -> _Model:
    weights = contract.weights_file(graph.precision)
    path = bundle.graph(graph.role, graph.precision, graph.dialect)
    config = {
        "name": graph.role,
        "backend": "onnxruntime",
        # The first axis is batch for some tensors and rows for others, which Triton's batching cannot express.
        "max_batch_size": 0,
        "input": [_tensor(tensor, bundle.config) for tensor in graph.inputs],
        "output": [_tensor(tensor, bundle.config) for tensor in graph.outputs],
        "instance_group": [{"count": 1, "kind": "KIND_GPU" if on_gpu else "KIND_CPU"}],
    }
    # The graph names the weights without a folder, so they must be next to it.
    return _Model(config, _about_graph(graph, bundle.config), {"model.onnx": path, weights: bundle.directory / weights})


def _tensor(tensor: TensorSpec, config: ModelConfig) -> Message:
    dims = [axis if isinstance(axis, int) else -1 for axis in contract.shape(tensor, config)]
    return {"name": tensor.name, "data_type": DATA_TYPES[tensor.dtype], "dims": dims}


def _translate_model(
    bundle: Bundle, runtime: str, precision: Precision, options: SearchOptions, batch_size: int, on_gpu: bool
) -> _Model:
    parameters = {
        "runtime": runtime,
        "precision": precision,
        "beam": options.beam,
        "length_penalty": options.length_penalty,
        "max_length": options.max_length,
        "batch_size": batch_size,
    }
    lines = {"dims": [-1]}
    # tfexport decodes on the first visible GPU; without a list Triton would start an instance for each GPU.
    gpu = {"kind": "KIND_GPU", "gpus": [0]}
    config = {
        "name": TRANSLATE,
        "backend": "python",
        "max_batch_size": batch_size,
        "dynamic_batching": {},
        "input": [{"name": "TEXT", "data_type": "TYPE_STRING", **lines, "allow_ragged_batch": True}],
        "output": [
            {"name": "TRANSLATION", "data_type": "TYPE_STRING", **lines},
            {"name": "STATUS", "data_type": "TYPE_STRING", **lines},
            {"name": "SCORE", "data_type": "TYPE_FP32", **lines},
        ],
        "instance_group": [{"count": 1, **(gpu if on_gpu else {"kind": "KIND_CPU"})}],
        "parameters": [{"key": key, "value": {"string_value": str(value)}} for key, value in parameters.items()],
    }
    files = {"model.py": MODEL, **{f"bundle/{name}": bundle.directory / name for name in (*bundle.files, MANIFEST)}}
    return _Model(config, _about_translate(runtime), files)


def _about_translate(runtime: str) -> list[str]:
    return [
        "Text in, text out. Needs Triton 24.12 or newer (older ones do not know NumPy 2), and in the server's Python this",
        f"version of tfexport: pip install 'tfexport[{RUNTIMES[runtime].extra}]'",
        "",
        "TEXT is [requests, lines], such as [1, 3] for three lines; TRANSLATION, STATUS and SCORE have its shape.",
        "Requests that wait are decoded together. A line that cannot be decoded gives an empty TRANSLATION and its",
        "STATUS, as `tfexport decode --output-format jsonl` does; `failed` is explained in the server's log.",
    ]


def _about_graph(graph: GraphSpec, config: ModelConfig) -> list[str]:
    """Notes for clients, in addition to names, types and dims."""
    axes = {t.name: ", ".join(map(str, contract.shape(t, config))) for t in graph.inputs}
    about = ["Needs ONNX Runtime 1.31 or newer (opset 24) in the server."]
    if not config.is_classifier:
        about += [
            f"A server that has an older one can load `{TRANSLATE}` alone:",
            f"  tritonserver --model-control-mode=explicit --load-model={TRANSLATE}",
        ]
    about += ["", *(f"{t.name} [{axes[t.name]}]: {t.about}" for t in graph.inputs if t.name in ("src_ids", "src_len"))]
    if graph.role == "decoder_step":
        return [
            *about,
            f"cross.* [{axes['cross.0.key']}]: what the model `encoder` gave, the same in every step",
            "tokens, position [rows]: rows is batch * beam, row = b * beam + k",
            f"past.* [{axes['past.0.key']}]: at first zeros, with a slot for every token to come; then the present.*",
            "  that the step before gave. When beams change places, so must the rows of past.*",
            f"The first step has tokens {config.bos_id} (bos) at position 0, the next the tokens chosen then at position 1,",
            f"and so on until {config.eos_id} (eos).",
            *(
                [f"The first token of an output is {config.forced_first_id} in any case."]
                * (config.forced_first_id >= 0)
            ),
            *([f"Never choose {', '.join(map(str, config.suppressed_ids))}."] * bool(config.suppressed_ids)),
            *(
                [f"Do not begin with {', '.join(map(str, config.suppressed_first_ids))}."]
                * bool(config.suppressed_first_ids)
            ),
        ]
    if config.source_bos:
        about.append(f"A sentence begins with {config.bos_id} (bos).")
    if config.source_eos:
        about.append(f"A sentence ends with {config.eos_id} (eos).")
    return about


def _lines(fields: Message, indent: str = "") -> Iterator[str]:
    """The text form of a protocol buffers message."""
    for name, value in fields.items():
        if isinstance(value, list) and isinstance(value[0], int):
            yield f"{indent}{name}: [ {', '.join(map(str, value))} ]"
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                yield f"{indent}{name} {{"
                yield from _lines(item, f"{indent}  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {item if name in ENUMS else json.dumps(item)}"


@contextmanager
def _new_repository(directory: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder for a repository. It is moved to `directory` when the block succeeds, and removed otherwise."""
    directory = directory.resolve()
    _refuse_to_overwrite(directory, force)
    try:
        make_folder(directory.parent)
        with partial_folder(directory) as outer:
            folder = outer / directory.name  # with ordinary permissions, unlike the outer folder
            folder.mkdir()
            yield folder
            sync_tree(folder)
            move_into_place(folder, directory, lambda: _refuse_to_overwrite(directory, force))
    except OSError as error:
        raise BundleError(
            f"cannot write the model repository {directory}: {error.strerror or error}. Nothing was changed there: make "
            "room, or give another folder with -o."
        ) from error


def _refuse_to_overwrite(directory: Path, force: bool) -> None:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not directory.is_dir() or not all(map(_is_ours, directory.iterdir())):
        raise BundleError(
            f"{directory} exists and holds other things than models that tfexport wrote, so it is not replaced. Give "
            "another folder with -o; a server takes several."
        )
    if not force:
        raise BundleError(f"{directory} exists. Replace it with --force, or give another folder with -o.")


def _is_ours(model: Path) -> bool:
    try:
        return read_text(model / CONFIG).startswith(HEADER)
    except (OSError, ValueError):
        return False
