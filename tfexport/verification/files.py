"""Compares the files of a bundle with its model, tensor by tensor and setting by setting.

`graph_checks/check.py` compares the graphs with the model. They refer to the weights files, which are compared here. So
rows of tables that no input reads are compared too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tfexport import contract, graph_contract
from tfexport.bundle.reader import GENERATION_CONFIG, MANIFEST, TOKENIZER_FILES, Bundle
from tfexport.bundle.writer import graph_entry
from tfexport.config import ModelConfig
from tfexport.contract import SCREENING_FILE, Precision
from tfexport.dialects import DIALECTS, runtime_dialects
from tfexport.exporter.weights import with_stacked
from tfexport.graph_checks.rounding import EPS
from tfexport.graphs.linear_quantized import quantize
from tfexport.graphs.projections import projections_of
from tfexport.graphs.screening import screening_tensors
from tfexport.models.formats.native import Tokenizers
from tfexport.models.model import EncoderClassifier, Model
from tfexport.models.precision import in_precision
from tfexport.shortlist_contract import shortlist_graphs_of


@dataclass(frozen=True)
class Mismatch:
    """A difference between a bundle's file and its model."""

    file: str
    about: str

    def to_dict(self) -> dict[str, str]:
        """JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.file}: {self.about}"


def weights_mismatches(bundle: Bundle, model: Model) -> list[Mismatch]:
    """Tensors of the weights files that differ from those of the float32 `model`, rounded to the precision of the file.

    Rounding is computed again and compared to the last bit. Sinusoids and the bounds of screening, which are sums, may
    differ in the last bits, because another CPU may compute them differently.
    """
    mismatches: list[Mismatch] = []
    for file in sorted(name for name in bundle.files if name.endswith(".safetensors")):
        try:
            mismatches += _file_mismatches(bundle, model, file)
        except (OSError, ValueError, SafetensorError) as error:
            mismatches.append(Mismatch(file, f"cannot be read: {error}"))
    return mismatches


def _file_mismatches(bundle: Bundle, model: Model, file: str) -> Iterable[Mismatch]:
    if file == SCREENING_FILE:
        return _screening_mismatches(bundle, model)
    precision = next((p for p in contract.PRECISIONS.values() if contract.weights_file(p) == file), None)
    if precision is None:
        return [Mismatch(file, "not a weights file of this version")]
    compared = _quantized_mismatches if precision in contract.QUANTIZED else _half_mismatches
    return compared(bundle, model, precision)


def _half_mismatches(bundle: Bundle, model: Model, precision: Precision) -> Iterator[Mismatch]:
    """The differences of the file of float32, float16 or bfloat16."""
    every = [path for path, _ in model.named_modules()]
    wanted = in_precision(model, precision, every).state_dict()
    file = contract.weights_file(precision)
    tables = {name for name in wanted if name.endswith("positions.table") and model.config.positions in _COMPUTED}
    with safe_open(bundle.directory / file, "pt") as stored:
        names = set(stored.keys())
        wanted = with_stacked(wanted, model.config, precision)
        yield from _names(file, names, wanted)
        for name in sorted(names & wanted.keys()):
            tensor = stored.get_tensor(name)
            if name not in tables:
                yield from _difference(file, name, tensor, wanted[name])
            elif precision == "float32":
                if not _is_close(tensor, wanted[name], EPS["float32"]):
                    yield from _difference(file, name, tensor, wanted[name])
            elif not torch.equal(tensor, _in_float32(bundle, name).to(wanted[name].dtype)):
                yield from _difference(file, name, tensor, wanted[name])


_COMPUTED = ("sinusoidal", "stored")
"""Kinds of positions whose table is computed when a checkpoint is read."""


def _in_float32(bundle: Bundle, name: str) -> Tensor:
    """The float32 tensor that a tensor in half precision was rounded from."""
    with safe_open(bundle.directory / contract.WEIGHTS_FILE, "pt") as stored:
        return stored.get_tensor(name)  # type: ignore[no-any-return]


def _is_close(left: Tensor, right: Tensor, most: float) -> bool:
    same_kind = left.shape == right.shape and left.dtype == right.dtype
    return same_kind and torch.allclose(left.double(), right.double(), rtol=0, atol=most)


def _quantized_mismatches(bundle: Bundle, model: Model, precision: Precision) -> Iterator[Mismatch]:
    file = contract.weights_file(precision)
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    with safe_open(bundle.directory / file, "np") as stored:
        names = set(stored.keys())
        for projection in projections_of(model.config):
            own = {name for name in names if name.rpartition(".")[0] == projection.name}
            if not own:  # the module stays in float32 for a budget: graphs refer to its float32 weights
                continue
            wanted = quantize(weights, [projection], precision)
            yield from _names(file, own, wanted)
            for name in own & wanted.keys():
                yield from _difference(file, name, stored.get_tensor(name), wanted[name])
            names -= own
    if names:
        yield Mismatch(file, f"{sorted(names)[0]} is not a tensor of this model")


BOUNDS = 1e-6
"""Allowed relative difference of the bounds of screening: another CPU may add up these sums in another order."""


def _screening_mismatches(bundle: Bundle, model: Model) -> Iterator[Mismatch]:
    assert not isinstance(model, EncoderClassifier)
    wanted = screening_tensors(model.output_matrix().detach().numpy())
    with safe_open(bundle.directory / SCREENING_FILE, "np") as stored:
        yield from _names(SCREENING_FILE, stored.keys(), wanted)
        for name in sorted(set(stored.keys()) & wanted.keys()):
            tensor = stored.get_tensor(name)
            is_bound = name in ("screening.norm", "screening.error") and tensor.shape == wanted[name].shape
            if not (is_bound and np.allclose(tensor, wanted[name], rtol=BOUNDS, atol=0)):
                yield from _difference(SCREENING_FILE, name, tensor, wanted[name])


def _names(file: str, value: Any, wanted: Mapping[str, Any]) -> Iterator[Mismatch]:
    for name in sorted(set(value) ^ wanted.keys()):
        yield Mismatch(file, f"{name} is {'not a tensor of this model' if name in set(value) else 'missing'}")


def _difference(file: str, name: str, in_bundle: Any, wanted: Any) -> Iterator[Mismatch]:
    if in_bundle.dtype != wanted.dtype or in_bundle.shape != wanted.shape:
        yield Mismatch(
            file, f"{name} is {in_bundle.dtype} {list(in_bundle.shape)}, not {wanted.dtype} {list(wanted.shape)}"
        )
        return
    bits, other = (_bits(tensor) for tensor in (in_bundle, wanted))
    differs = bits != other
    if differs.any():
        rows = np.unique(np.argwhere(differs)[:, 0]) if differs.ndim else np.zeros(1, np.int64)
        yield Mismatch(
            file,
            f"{name} differs from the model's in {int(differs.sum())} of {differs.size} numbers, first in row {rows[0]}",
        )


def _bits(tensor: Tensor | NDArray[Any]) -> NDArray[Any]:
    """Numbers as integers of the same size, so that NaN equals itself, and bfloat16 has a type in NumPy."""
    if isinstance(tensor, Tensor):
        sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        tensor = tensor.detach().contiguous()
        return tensor.view(sizes[tensor.element_size()]).numpy() if tensor.is_floating_point() else tensor.numpy()
    array = np.ascontiguousarray(tensor)
    return array.view(f"i{array.itemsize}") if array.dtype.kind == "f" else array


def config_mismatches(bundle: Bundle, config: ModelConfig) -> list[Mismatch]:
    """Settings of the manifest that differ from those of the checkpoint."""
    bundle_fields, checkpoint_fields = bundle.config.to_dict(), config.to_dict()
    return [
        Mismatch(MANIFEST, f"{name} is {bundle_fields[name]!r}, the checkpoint's is {checkpoint_fields[name]!r}")
        for name in bundle_fields
        if bundle_fields[name] != checkpoint_fields[name]
    ]


def generation_mismatches(bundle: Bundle, generation: Mapping[str, Any] | None) -> list[Mismatch]:
    """Settings of the bundle's search that differ from those of the checkpoint."""
    in_checkpoint = None if generation is None else json.loads(json.dumps(generation))
    ours = None if bundle.generation_config is None else dict(bundle.generation_config)
    if (ours is None) != (in_checkpoint is None):
        return [
            Mismatch(MANIFEST, f"{'lists no' if ours is None else 'lists'} {GENERATION_CONFIG}, unlike the checkpoint")
        ]
    difference = _first_difference(ours, in_checkpoint)
    return [] if difference is None else [Mismatch(GENERATION_CONFIG, f"{difference} is not the checkpoint's")]


def tokenizer_mismatches(bundle: Bundle, tokenizers: Tokenizers) -> tuple[list[Mismatch], list[str]]:
    """Tokenizers of the bundle that differ from the checkpoint's, and the sides for which the checkpoint has none."""
    mismatches, unknown = [], []
    for side, file in TOKENIZER_FILES.items():
        tokenizer, ours = getattr(tokenizers, side), bundle.tokenizer(side)
        if ours is None and tokenizer is None:
            continue
        if tokenizer is None:
            unknown.append(side)
        elif ours is None:
            mismatches.append(Mismatch(MANIFEST, f"has no {side} tokenizer, and the checkpoint has one"))
        elif (difference := _first_difference(ours.to_dict(), json.loads(json.dumps(tokenizer.to_dict())))) is not None:
            mismatches.append(Mismatch(bundle.tokenizers.get(side, file), f"{difference} is not the checkpoint's"))
    return mismatches, unknown


def _first_difference(left: Any, right: Any, where: str = "") -> str | None:
    """The first difference of two JSON values, such as `model.vocab.Hund`."""
    if isinstance(left, dict) and isinstance(right, dict):
        for name in (*left, *(name for name in right if name not in left)):
            here = f"{where}.{name}" if where else str(name)
            if (name in left) != (name in right):
                return here
            if (difference := _first_difference(left[name], right[name], here)) is not None:
                return difference
        return None
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return next((f for i, (a, b) in pairs if (f := _first_difference(a, b, f"{where}[{i}]")) is not None), None)
    return None if left == right else where or "it"


def manifest_mismatches(bundle: Bundle) -> list[Mismatch]:
    """Entries of the manifest about graphs and runtimes that differ from what this version writes."""
    mismatches = []
    specs = graph_specs(bundle)
    keys = Counter((graph.role, graph.precision, graph.dialect) for graph in bundle.graphs)
    for graph in bundle.graphs:
        spec = specs.get((graph.role, graph.precision, graph.dialect))
        if spec is None:
            mismatches.append(Mismatch(MANIFEST, f"lists {graph.file}, a graph that this model does not have"))
        elif spec.file != graph.file:
            mismatches.append(Mismatch(MANIFEST, f"says that {graph.file} is the graph {spec.file}"))
    for key, count in keys.items():
        if key in specs and count > 1:
            mismatches.append(Mismatch(MANIFEST, f"lists the graph {specs[key].file} {count} times"))
    for together in _written_together(bundle):
        files = {(spec.role, spec.precision, spec.dialect): spec.file for spec in together}
        lacking = files.keys() - keys.keys()
        if lacking != files.keys():
            missing = sorted(files[key] for key in lacking)
            mismatches += [Mismatch(MANIFEST, f"does not list the graph {file}") for file in missing]
    dialects = runtime_dialects([specs[key] for key in keys if key in specs])
    for runtime in dialects.keys() - bundle.dialects.keys():
        mismatches.append(Mismatch(MANIFEST, f"does not say which dialects {runtime} runs"))
    for side in bundle.tokenizers.keys() - TOKENIZER_FILES.keys():
        mismatches.append(Mismatch(MANIFEST, f"has a tokenizer of {side!r}, which is neither source nor target"))
    for precision in bundle.in_float32.keys() - bundle.precisions:
        mismatches.append(Mismatch(MANIFEST, f"has a budget of {precision}, a precision without graphs"))
    for runtime, chosen in bundle.dialects.items():
        if dict(chosen) != dialects.get(runtime):
            mismatches.append(
                Mismatch(MANIFEST, f"gives {runtime} the dialects {dict(chosen)}, not {dialects.get(runtime)}")
            )
    return [*mismatches, *_entry_mismatches(bundle, specs)]


def _entry_mismatches(bundle: Bundle, specs: Mapping[tuple[str, str, str], contract.GraphSpec]) -> Iterator[Mismatch]:
    """The tensors and the float32 islands of graphs in the manifest that differ from those that this version writes.

    They are read from the file, because `Bundle` leaves them out: nothing decodes with them, but other programs may.
    """
    manifest = json.loads((bundle.directory / MANIFEST).read_text(encoding="utf-8"))
    for entry in manifest["graphs"]:
        role, precision, dialect, file = (str(entry[name]) for name in ("role", "precision", "dialect", "file"))
        spec = specs.get((role, precision, dialect))
        if spec is None or spec.file != file:  # reported by `manifest_mismatches`
            continue
        difference = _first_difference(entry, json.loads(json.dumps(graph_entry(spec, bundle.config))))
        if difference is not None:
            yield Mismatch(MANIFEST, f"the entry of {file} differs from this version's in {difference}")


def graph_specs(bundle: Bundle) -> dict[tuple[str, str, str], contract.GraphSpec]:
    """All graphs that a bundle of this model may contain, by role, precision and dialect."""
    specs = (spec for together in _written_together(bundle) for spec in together)
    return {(spec.role, spec.precision, spec.dialect): spec for spec in specs}


def _written_together(bundle: Bundle) -> Iterator[Sequence[contract.GraphSpec]]:
    """The graphs that a bundle of this model may contain, in groups. A bundle contains all graphs of a group or none."""
    config = bundle.config
    for precision in bundle.precisions:
        for dialect in DIALECTS:
            yield graph_contract.graphs_of(config, precision, dialect)
            yield graph_contract.attention_graphs_of(config, precision, dialect)
        yield shortlist_graphs_of(config, precision)
