"""Folders that CTranslate2's converters write: model.bin, config.json and vocabularies.

Source of the arithmetic: CTranslate2 4.8, `layers/transformer.cc`, `layers/attention.cc` and `layers/common.cc`. Its
`specs/transformer_spec.py` defines the variables. A variable that is not read is refused by name.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError
from tfexport.models.families.family import Family, count_indices
from tfexport.models.formats.files import MARIAN_BINARY
from tfexport.models.formats.model_bin import ModelBin, read_model_bin
from tfexport.models.formats.state_dicts import some
from tfexport.models.positions import tensor2tensor_sinusoids
from tfexport.models.toolkits.arguments import Arguments
from tfexport.models.toolkits.ctranslate2_names import (
    BIAS,
    DISTANCES,
    MEANINGS,
    OUTPUT,
    SIDES,
    SOURCE,
    TABLES,
    TARGET,
    renamed,
    variables,
)
from tfexport.models.toolkits.ctranslate2_text import CONFIG, moved_to_config, read_config, read_text
from tfexport.models.toolkits.toolkit import (
    SIGMOID_GELU,
    TextOptions,
    Toolkit,
    ToolkitCheckpoint,
    add_first_token,
    check_table,
    fill_biases,
    require_matrices,
    self_described,
    tie,
)
from tfexport.system.regular_files import open_regular

MODEL = "model.bin"
_SPEC, _REVISION = "TransformerSpec", 7
_OLD_HEADS = {"": 8, "TransformerBase": 8, "TransformerBig": 16}
"""Number of heads of the layouts of the first two revisions, by name."""
_RELU, _GELU_TANH, _SWISH, _GELU, _GELU_SIGMOID = range(5)
_ACTIVATIONS = {_RELU: "relu", _GELU_TANH: "gelu_tanh", _SWISH: "silu", _GELU: "gelu", _GELU_SIGMOID: "silu"}

_VOCABULARIES = tuple(f"{side}_vocabulary.{kind}" for side in ("shared", "source") for kind in ("json", "txt"))
"""Vocabulary files. Each folder has one of them."""

_HARMLESS = ("embeddings_merge", "alignment_layer", "alignment_heads")
"""Attributes for alignments and for several features."""
_OFF = ("alibi", "alibi_use_positive_positions", "scale_alibi", "multi_query_attention", "multi_query")
"""Attributes that are only supported if they are 0."""


class _Model:
    """The weights of a file, which are changed in place, and its attributes. Each attribute is read or refused."""

    def __init__(self, path: Path, model: ModelBin):
        self.path, self.weights = path, dict(model.weights)
        self._attributes, self._texts = dict(model.attributes), model.texts
        if model.revision == 1:
            self.weights = {renamed(name): tensor for name, tensor in self.weights.items()}
            self._attributes = {renamed(name): value for name, value in self._attributes.items()}
        for side in SIDES:
            # Before revision 5, attributes of both stacks were stored once.
            for name in ("num_heads", "pre_norm", "activation", "embeddings_merge"):
                if model.revision < 5 and name in self._attributes:
                    self._attributes[f"{side}/{name}"] = self._attributes[name]
            if model.revision < 3:
                self._attributes[f"{side}/num_heads"] = _OLD_HEADS.get(model.spec, 8)
        first = "encoder/embeddings_0/weight"  # with several features
        if first in self.weights and SOURCE not in self.weights:
            self.weights[SOURCE] = self.weights.pop(first)
        self._old = model.revision < 5
        self._read: set[str] = set()

    def attribute(self, name: str, default: float | None = None) -> int | float | None:
        self._read.add(name)
        return self._attributes.get(name, default)

    def alike(self, name: str, default: float | None = None) -> int | float | None:
        """An attribute that both stacks must share."""
        values = [self.attribute(f"{side}/{name}", default) for side in SIDES]
        if values[0] != values[1]:
            raise ConfigError(
                f"{self.path} has encoder/{name} {values[0]} and decoder/{name} {values[1]}: models whose stacks differ "
                "in it are not supported."
            )
        return values[0]

    def rows(self, name: str) -> int:
        """Number of rows of a required matrix."""
        require_matrices(self.weights, [name], str(self.path))
        return self.weights[name].shape[0]

    def refuse_unread(self, family: Family) -> None:
        """Raise ConfigError if variables were not read: the model computes something else."""
        common = ("num_heads", "pre_norm", "activation") if self._old else ()
        known = {*self._read, *common} | {
            name
            for name, value in self._attributes.items()
            if (kind := name.rpartition("/")[2]) in _HARMLESS or (kind in _OFF and not value)
        }
        others = [name for name in (*self._attributes, *self._texts) if name not in known and not moved_to_config(name)]
        unread = [*(name for name in self.weights if not family.known(name)), *others]
        if unread:
            meant = dict.fromkeys(said for name in unread for part, said in MEANINGS.items() if part in name)
            features = f" ({', '.join(meant)})" if meant else ""
            raise ConfigError(f"{self.path} has {some(sorted(unread), 4)}{features}, which is not supported.")


def read_folder(path: Path, options: TextOptions) -> ToolkitCheckpoint:
    """Read a model with its configuration and vocabularies; `path` is the folder, or the model.bin in it.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigError: the model is of another kind, or a variable, setting or option is not supported.
        TokenizerError: a vocabulary cannot be read.
    """
    file = _model_file(path)
    content = read_model_bin(file, lambda spec, revision: _check_spec(file, spec, revision))
    config = read_config(file.parent, content)
    if config.get("quantization_type"):
        raise ConfigError(
            f"{config.where} has quantization_type {config.get('quantization_type')}: weights of 4 bits (AWQ) are not "
            "supported. Convert the model again without them."
        )
    model = _Model(file, content)
    weights = model.weights
    require_matrices(weights, (SOURCE, TARGET, OUTPUT), str(file))
    _fold_output_scale(model)
    sizes = tie(weights, SOURCE, TARGET, OUTPUT)
    starts_with_zeros = bool(model.attribute("decoder/start_from_zero_embedding"))
    text = read_text(file.parent, config, sizes, options, starts_with_zeros=starts_with_zeros)
    fields = {**_fields(model, config), **text.fields}
    if starts_with_zeros:
        weights.setdefault(BIAS, torch.zeros(sizes["tgt_vocab_size"]))
        target = SOURCE if sizes["tie_source_target"] else TARGET
        matrices = [target, *([OUTPUT] * (not sizes["tie_output"]))]
        fields["bos_id"] = add_first_token(weights, matrices, BIAS, sizes)
        fields["suppressed_ids"] = (fields["bos_id"],)
    fields |= {**sizes, "output_bias": BIAS in weights}
    notes = [*text.notes, *_notes(model, config)]
    family = self_described(
        name="ctranslate2", about="CTranslate2 (model.bin, TransformerSpec)", renames=variables(), notes=tuple(notes)
    )
    model.refuse_unread(family)
    lengths = ("max_source_length", "max_target_length")
    return ToolkitCheckpoint(
        _asking(family, tuple(name for name in lengths if name not in fields)),
        fields,
        weights,
        text.tokenizers,
        assumed=text.assumed,
    )


def _model_file(path: Path) -> Path:
    return path / MODEL if path.is_dir() else path


def _check_spec(file: Path, spec: str, revision: int) -> None:
    if spec != _SPEC and spec not in _OLD_HEADS:
        raise ConfigError(
            f"{file} is of CTranslate2's layout {spec[:60]!r}, which is not supported: encoder-decoder models for text are, "
            f"{_SPEC}."
        )
    if not 1 <= revision <= _REVISION:
        raise ConfigError(
            f"{file} is of revision {revision} of CTranslate2's layout {_SPEC}, and revisions up to {_REVISION} are "
            "supported. Convert the model with an earlier CTranslate2."
        )


def _asking(family: Family, lengths: tuple[str, ...]) -> Family:
    """The family of a model with unlimited positions, which asks for maximum lengths."""
    return replace(family, asked=lengths, computed_positions=_sinusoids)


def _sinusoids(n_positions: int, d_model: int) -> Tensor:
    """The sinusoids that CTranslate2 computes for a model without a table: sines, then cosines, from position 1."""
    check_table(f"a length of {n_positions}", n_positions, d_model)
    if d_model % 2:
        raise ConfigError(f"CTranslate2 computes no positions for an uneven d_model, {d_model}. Check the model.")
    return tensor2tensor_sinusoids(n_positions, d_model, 0)


def _fields(model: _Model, config: Arguments) -> dict[str, Any]:
    """Fields of `ModelConfig`, except vocabularies and special ids. Scales are folded into the weights."""
    weights, where = model.weights, str(model.path)
    d_model, n_heads = weights[SOURCE].shape[1], model.alike("num_heads")
    if not isinstance(n_heads, int) or n_heads < 1:
        raise CheckpointError(
            f"{where} has no number of heads (encoder/num_heads). Check that it was copied completely."
        )
    inner = model.rows("encoder/layer_0/self_attention/linear_0/weight") // 3
    activation = model.alike("activation", _RELU)
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"{where} has encoder/activation {activation}, which is not supported (tanh, sigmoid).")
    _fold_queries(model, n_heads, d_model)
    if activation == _GELU_SIGMOID:
        _fold_gelu(weights)
    has_beta = "encoder/layer_0/ffn/layer_norm/beta" in weights
    return {
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": inner // n_heads if inner != d_model else 0,
        "d_ff": model.rows("encoder/layer_0/ffn/linear_0/weight"),
        **{
            f"n_{side}_layers": count_indices(weights, f"{side}/layer_{{i}}/self_attention/linear_0/weight")
            for side in SIDES
        },
        "activation": _ACTIVATIONS[int(activation)],
        "gated": "encoder/layer_0/ffn/linear_0_noact/weight" in weights,
        "norm_first": bool(model.alike("pre_norm", 1)),
        "final_norm": "encoder/layer_norm/gamma" in weights,
        "norm": "layer" if has_beta else "rms",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5 if has_beta else 1e-6),
        "embedding_norm": "encoder/layernorm_embedding/gamma" in weights,
        "embedding_scale": _embedding_scale(model, d_model),
        "attention_bias": fill_biases(weights, r"(.*attention/linear_\d/)weight"),
        "feed_forward_bias": fill_biases(weights, r"(.*/ffn/linear_\d(?:_noact)?/)weight"),
        **_positions(model),
    }


def _embedding_scale(model: _Model, d_model: int) -> float:
    """The factor of embeddings: a flag for sqrt(d_model), or a number."""
    old = model.alike("embeddings/multiply_by_sqrt_depth", 1)
    scale = model.alike("scale_embeddings", old)
    if isinstance(scale, int):
        return math.sqrt(d_model) if scale else 1.0
    return float(scale or 0.0)


def _fold_queries(model: _Model, n_heads: int, d_model: int) -> None:
    """Multiply queries by the ratio of their scale to that of the paper, head_dim ** -0.5."""
    for name in list(model.weights):
        match = _QUERIES.fullmatch(name)
        if not match or model.weights[name].dim() != 2:
            continue
        inner = model.rows(name) // (3 if match[2] == "self_attention" else 1)
        head_dim = model.attribute(f"{match[1]}/head_dim", d_model // n_heads)
        kv_heads = model.attribute(f"{match[1]}/num_heads_kv", n_heads)
        if kv_heads != n_heads:
            raise ConfigError(f"{model.path} has {match[1]}/num_heads_kv {kv_heads}, and only {n_heads} is supported.")
        if not isinstance(head_dim, int) or head_dim < 1:
            raise ConfigError(f"{model.path} has {match[1]}/head_dim {head_dim}, not above 0 and whole.")
        scale = model.attribute(f"{match[1]}/queries_scale", head_dim**-0.5)
        factor = float(scale or 0.0) * math.sqrt(inner / n_heads)
        if not math.isclose(factor, 1.0, rel_tol=1e-6):
            for part in (name, f"{match[1]}/linear_0/bias"):
                if part in model.weights:
                    scaled = model.weights[part].clone()
                    scaled[:inner] *= factor
                    model.weights[part] = scaled


_QUERIES = re.compile(r"((?:encoder|decoder)/layer_\d+/(self_attention|attention))/linear_0/weight")


def _fold_gelu(weights: dict[str, Tensor]) -> None:
    """Convert the activation x * sigmoid(1.702 * x) to Swish."""
    for name, tensor in weights.items():
        if re.fullmatch(r".*/ffn/linear_0/(weight|bias)", name):
            weights[name] = tensor * SIGMOID_GELU
        elif name.endswith("/ffn/linear_1/weight"):
            weights[name] = tensor / SIGMOID_GELU


def _fold_output_scale(model: _Model) -> None:
    """Fold the scale before the output projection into the norm before it, or into the projection itself."""
    scale = model.attribute("decoder/scale_outputs")
    if scale is None:
        return
    norm = [f"decoder/layer_norm/{part}" for part in ("gamma", "beta")]
    for name in [name for name in norm if name in model.weights] or [OUTPUT]:
        model.weights[name] = model.weights[name] * scale


_FARTHEST = 1_000_000
"""Maximum distance that an attribute may request."""


def _positions(model: _Model) -> dict[str, Any]:
    """The fields about positions; tables of buckets become tables of distances in `weights`."""
    weights = model.weights
    if not any(DISTANCES in name for name in weights):
        lengths = zip(("max_source_length", "max_target_length"), TABLES, strict=True)
        limits = {name: model.rows(table) for name, table in lengths if table in weights}
        return {"positions": "stored", **limits}
    if beside := [table for table in TABLES if table in weights]:
        raise ConfigError(f"{model.path} has {beside[0]} and {DISTANCES}; only one of them is supported.")
    max_distance = None
    for side in SIDES:
        first = f"{side}/layer_0/self_attention/"
        layers = count_indices(weights, f"{side}/layer_{{i}}/self_attention/linear_0/weight")
        if f"{first}{DISTANCES}" not in weights:
            raise CheckpointError(f"{model.path} has no {first}{DISTANCES}. Check that it was saved completely.")
        table = weights[f"{first}{DISTANCES}"]
        for number in range(layers):
            layer = f"{side}/layer_{number}/self_attention/"
            distance = model.attribute(f"{layer}relative_attention_max_distance")
            max_distance = distance if max_distance is None else max_distance
            own = weights.pop(f"{layer}{DISTANCES}", None)
            if own is None or distance != max_distance or not torch.equal(own, table):
                raise ConfigError(
                    f"{model.path} has another {DISTANCES} in {layer[:-1]} than in {first[:-1]}, which is not supported."
                )
        weights[f"{first}{DISTANCES}"] = _by_distance(model.path, table, max_distance, both_ways=side == "encoder")
    return {"positions": "relative", "max_distance": max_distance}


def _by_distance(path: Path, buckets: Tensor, max_distance: float | None, *, both_ways: bool) -> Tensor:
    """Convert a table of buckets [buckets, heads] to an equivalent table of distances, as in `DistanceTable`.

    The computation is in float32 and truncates after the addition, as in `get_relative_position_bucket`, so that the buckets
    have the same limits.
    """
    n = len(buckets) // 2 if both_ways else len(buckets)
    exact = n // 2
    if not isinstance(max_distance, int) or buckets.dim() != 2 or not 0 < exact < max_distance <= _FARTHEST:
        raise ConfigError(
            f"{path} has relative_attention_max_distance {max_distance}, which does not fit a {DISTANCES} of "
            f"{list(buckets.shape)}. Check that it was copied completely."
        )
    distance = np.arange(-max_distance if both_ways else 0, max_distance + 1)  # of the query from the key
    far = np.abs(distance)
    single = np.float32
    ratio = np.maximum(far, 1).astype(single) / single(exact)
    growth = np.log(ratio) / np.log(single(max_distance) / single(exact)) * single(n - exact)
    bucket = np.where(far < exact, far, np.minimum((single(exact) + growth).astype(np.int64), n - 1))
    return buckets[torch.from_numpy(bucket + n * (distance < 0))]


def _notes(model: _Model, config: Arguments) -> list[str]:
    notes = []
    layer, heads = (model.attribute(f"decoder/alignment_{what}") for what in ("layer", "heads"))
    if layer is not None and layer != -1:
        notes.append(
            f"CTranslate2 aligns by {heads or 'all'} heads of decoder layer {layer}: give --alignment-layer {layer}, which "
            "uses the mean of all heads"
        )
    unread = config.others(("multi_query_attention", "bos_token"))
    if unread:
        notes.append(f"{CONFIG} has settings that were not read: {', '.join(unread)}")
    return notes


def _is_ctranslate2(path: Path) -> bool:
    """Whether a folder has a model.bin that starts with a small number (PyTorch's files start with large ones), or the
    vocabularies of a model.bin that is missing or damaged."""
    file = _model_file(path)
    if file.name == MODEL and any((file.parent / name).is_file() for name in _VOCABULARIES):
        return True
    try:
        with open_regular(file) as stream:
            head = stream.read(8)
            return file.name == MODEL and int.from_bytes(head[:4], "little") < 2**16 and head != MARIAN_BINARY
    except OSError:
        return False


def _files(path: Path) -> list[Path]:
    file = _model_file(path)
    return [file, *(other for other in (file.parent / CONFIG,) if other.is_file())]


TOOLKIT = Toolkit(recognises=_is_ctranslate2, read=read_folder, files=_files)
