"""Marian's own models: `model.npz`, which contains its settings, with vocabularies and a decoder.yml next to it.

Source of the arithmetic: marian-dev 1.12, `models/transformer.h`, `layers/output.cpp` and `layers/embedding.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError
from tfexport.models.families.family import Family
from tfexport.models.formats.npz import read_npz
from tfexport.models.positions import tensor2tensor_sinusoids
from tfexport.models.toolkits.arguments import Arguments
from tfexport.models.toolkits.marian_text import model_file, read_text, search_note
from tfexport.models.toolkits.toolkit import (
    SIGMOID_GELU,
    TextOptions,
    Toolkit,
    ToolkitCheckpoint,
    add_first_token,
    check_table,
    require_matrices,
    self_described,
)
from tfexport.system.yaml_files import read_settings

_CONFIG = "special:model.yml"
"""The array whose bytes are the model's settings in YAML."""

_LENGTH = 1000
"""Maximum length. Marian's sinusoids are unlimited; this is its default for the longest sentence (--max-length)."""

_ACTIVATIONS = {"relu": "relu", "swish": "silu", "gelu": "silu"}

_NORMS = {
    ("", "an"): {"norm_first": False},
    ("n", "a"): {"norm_first": True},
}
"""transformer-preprocess and -postprocess, without dropout; a adds the residual, n normalises."""


_HARMLESS = """
    version transformer-depth-scaling transformer-guided-alignment-layer guided-alignment transformer-dim-aan
    transformer-aan-depth transformer-aan-activation transformer-aan-nogate dim-rnn enc-cell enc-type enc-cell-depth
    dec-cell dec-cell-base-depth dec-cell-high-depth skip layer-normalization special-vocab bert-train-type-embeddings
    bert-type-vocab-size bert-mask-symbol bert-sep-symbol bert-class-symbol bert-masking-fraction ulr-dim-emb
    ulr-trainable-transformation char-stride char-highway char-conv-filters-num char-conv-filters-widths
    factors-combine transformer-rnn-projection
"""
"""Settings of training, of recurrent, averaging and BERT's layers, and of factored vocabularies, which are not used here."""


@dataclass(frozen=True)
class _Model:
    """The arrays of a file, each taken once, and its settings."""

    path: Path
    arrays: dict[str, NDArray[Any]]
    settings: Arguments

    def take(self, name: str) -> Tensor:
        if name not in self.arrays:
            raise CheckpointError(
                f"{self.path} has no {name}, which its settings need. Check that it was copied completely."
            )
        return _tensor(self.path, name, self.arrays.pop(name))


def read_model(path: Path, options: TextOptions) -> ToolkitCheckpoint:
    """Read a model and the vocabularies next to it.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigError: a setting, or an option for languages, is not supported.
        TokenizerError: a vocabulary cannot be read.
        RuntimeUnavailable: a library for YAML or SentencePiece is not installed.
    """
    file = model_file(path)
    model = _open(file)
    settings = model.settings
    _refuse(settings)
    layers = {side: settings.number(f"{side[:3]}-depth") for side in ("encoder", "decoder")}
    if not all(0 < depth <= 1000 for depth in layers.values()):
        raise ConfigError(f"{settings.where} has enc-depth {layers['encoder']} and dec-depth {layers['decoder']}.")
    kind = settings.text("transformer-ffn-activation", "swish")
    activation = settings.known("transformer-ffn-activation", kind, _ACTIVATIONS)
    weights, sizes = _embeddings(model)
    text = read_text(file, (sizes["src_vocab_size"], sizes["tgt_vocab_size"]), options)
    matrices = [name for name in weights if name not in ("encoder_Wemb", "decoder_ff_logit_out_b")]
    bos_id = add_first_token(weights, matrices, "decoder_ff_logit_out_b", sizes)
    positions, position_notes = _positions(model, weights)
    norms = _norms(settings)
    own = {name: _tensor(file, name, array) for name, array in model.arrays.items()}
    weights |= own | {name: own[other] for name, other in _tied_names(settings, layers["decoder"]) if other in own}
    _arrange(weights, SIGMOID_GELU if kind == "gelu" else 1.0)
    fields = {
        "d_model": settings.number("dim-emb"),
        "n_heads": settings.number("transformer-heads"),
        "d_ff": settings.number("transformer-dim-ffn"),
        "n_encoder_layers": layers["encoder"],
        "n_decoder_layers": layers["decoder"],
        **sizes,
        **positions,
        "unk_id": text.unk_id,
        "eos_id": text.eos_id,
        "pad_id": text.eos_id,  # Marian also pads batches with it
        "bos_id": bos_id,
        "suppressed_ids": (bos_id,),
        "source_eos": True,
        "activation": activation,
        "norm_eps": 1e-6,
        "output_bias": True,
        **norms,
    }
    notes = [*position_notes, *text.notes, *search_note(file)]
    if unread := settings.others(_HARMLESS.split()):
        notes.append(f"its settings have some that were not read: {', '.join(unread)}")
    family = _family(layers, norms["norm_first"], notes)
    return ToolkitCheckpoint(family, fields, weights, text.tokenizers, assumed=text.assumed, absent=text.absent)


def _open(file: Path) -> _Model:
    arrays = read_npz(file)
    if _CONFIG not in arrays:
        raise CheckpointError(
            f"{file} has no {_CONFIG}, so it is not a model that Marian saved. Give the model.npz, not the optimizer's."
        )
    where = f"{_CONFIG} of {file}"
    # The last byte is the terminating 0 of a C string.
    text = arrays.pop(_CONFIG).tobytes().rstrip(b"\0").decode("utf-8", errors="replace")
    return _Model(file, arrays, Arguments(where, read_settings(text, where)))


def _refuse(settings: Arguments) -> None:
    """Refuse settings that the canonical model does not support."""
    settings.require(
        {
            "type": "transformer",
            "transformer-decoder-autoreg": "self-attention",
            "transformer-no-projection": False,
            "transformer-pool": False,
            "transformer-ffn-depth": 2,
            "right-left": False,
            "ulr": False,
            "lemma-dim-emb": 0,
            "lemma-dependency": "",
            "factors-dim-emb": 0,
        }
    )
    for name, alike in (("transformer-decoder-dim-ffn", "transformer-dim-ffn"), ("transformer-decoder-ffn-depth", "")):
        most = settings.number(alike) if alike else 2
        if settings.number(name, 0) not in (0, most):
            raise ConfigError(f"{settings.where} has {name} {settings.number(name)}, and only {most} is supported.")
    kinds = settings.get("input-types", [])
    if not isinstance(kinds, list) or any(kind != "sequence" for kind in kinds):
        raise ConfigError(f"{settings.where} has input-types that are not sequences, which are not supported.")


def _norms(settings: Arguments) -> dict[str, Any]:
    """The places of norms. Dropout (d) is for training."""
    before, after, embedding, top = (
        settings.text(f"transformer-{name}", default).replace("d", "")
        for name, default in (
            ("preprocess", ""),
            ("postprocess", "dan"),
            ("postprocess-emb", "d"),
            ("postprocess-top", ""),
        )
    )
    if (before, after) not in _NORMS:
        raise ConfigError(
            f"{settings.where} has transformer-preprocess {before!r} and transformer-postprocess {after!r}, d left out, "
            "which are not supported. There are '' with 'an', and 'n' with 'a'."
        )
    for name, ops in (("emb", embedding), ("top", top)):
        if ops not in ("", "n"):
            raise ConfigError(f"{settings.where} has transformer-postprocess-{name} {ops!r}, which is not supported.")
    return {**_NORMS[before, after], "embedding_norm": embedding == "n", "final_norm": top == "n"}


def _embeddings(model: _Model) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Each different matrix once, under the name of its first use, and the output bias; also sizes and ties."""
    settings = model.settings
    tied_all = settings.flag("tied-embeddings-all", False)
    tied_sides = settings.flag("tied-embeddings-src", False) or tied_all
    tied_output = settings.flag("tied-embeddings", False) or tied_all
    source = model.take("Wemb" if tied_sides else "encoder_Wemb")
    target = source if tied_sides else model.take("decoder_Wemb")
    weights = {"Wemb" if tied_sides else "encoder_Wemb": source}
    if not tied_sides:
        weights["decoder_Wemb"] = target
    output = "decoder_ff_logit_out"
    if not tied_output:
        # Early models store it as [in, out].
        is_old = f"{output}_W" in model.arrays
        weights[f"{output}_Wt"] = model.take(f"{output}_W").T if is_old else model.take(f"{output}_Wt")
    has_bias = not settings.flag("output-omit-bias", False)
    bias = model.take(f"{output}_b").flatten() if has_bias else torch.zeros(target.shape[0])
    weights[f"{output}_b"] = bias
    require_matrices(weights, [name for name in weights if not name.endswith("_b")], str(model.path))
    sizes = settings.get("dim-vocabs", [])
    if isinstance(sizes, list) and len(sizes) > 2:
        raise ConfigError(f"{settings.where} has {len(sizes)} dim-vocabs: several encoders are not supported.")
    return weights, {
        "src_vocab_size": source.shape[0],
        "tgt_vocab_size": target.shape[0],
        "tie_source_target": tied_sides,
        "tie_output": tied_output,
    }


def _positions(model: _Model, weights: dict[str, Tensor]) -> tuple[dict[str, Any], list[str]]:
    """Put the tables of both sides into `weights`; returns the fields about positions, and notes.

    Trained positions are one table for both sides, and embeddings are then not scaled. Marian reads the setting under
    another name than it saves, so most models with this setting have no trained table and use sinusoids.
    """
    settings, d_model = model.settings, model.settings.number("dim-emb")
    names = ("transformer-train-position-embeddings", "transformer-train-positions")
    is_told = True in {settings.flag(name, False) for name in names}
    is_trained = "Wpos" in model.arrays
    if is_trained and not is_told:
        raise ConfigError(
            f"{model.path} has trained positions (Wpos), and {settings.where} has {names[0]} false. Correct it."
        )
    if is_trained:
        table = model.take("Wpos")
        require_matrices({"Wpos": table}, ["Wpos"], str(model.path))
    else:
        check_table(settings.where, _LENGTH, d_model)
        table = tensor2tensor_sinusoids(_LENGTH, d_model, -1)
    for side in ("encoder", "decoder"):
        weights[f"{side}_Wpos"] = table
    fields = {
        "positions": "learned" if is_trained else "stored",
        "embedding_scale": 1.0 if is_trained else math.sqrt(d_model),
        "max_source_length": table.shape[0],
        "max_target_length": table.shape[0],
    }
    untrained = is_told and not is_trained
    return fields, [f"it has {names[0]}, and no Wpos: its positions are sinusoids, as in Marian then"] * untrained


def _tied_names(settings: Arguments, depth: int) -> Iterator[tuple[str, str]]:
    """The names of decoder weights that are tied to another layer's, with its names (transformer-tied-layers)."""
    tied = settings.get("transformer-tied-layers", [])
    if not tied:
        return
    if not isinstance(tied, list) or len(tied) != depth or any(type(n) is not int or not 0 < n <= depth for n in tied):
        raise ConfigError(f"{settings.where} has transformer-tied-layers that are not {depth} numbers of layers.")
    for number, owner in enumerate(tied, 1):
        for suffix in ("", "_pre"):
            mine, owners = (_layer("decoder", n, suffix) for n in (number, owner))
            yield from zip(mine, owners, strict=True)


def _arrange(weights: dict[str, Tensor], gain: float) -> None:
    """Transpose matrices from [in, out] to [out, in], turn [1, n] into vectors, and fold the activation's `gain`."""
    for name, tensor in weights.items():
        kind = name.rpartition("_")[2]
        if kind in ("Wq", "Wk", "Wv", "Wo", "W1", "W2") and tensor.dim() == 2:
            tensor = tensor.T
        elif kind.startswith("b") or "_ln_" in name:
            tensor = tensor.flatten()
        if "_ffn_" in name and kind in ("W1", "b1"):
            tensor = tensor * gain
        elif "_ffn_" in name and kind == "W2":
            tensor = tensor / gain
        weights[name] = tensor


def _layer(side: str, number: int, suffix: str) -> dict[str, str]:
    """Marian's names of one layer's weights, counted from 1, and tfexport's names; `suffix` is that of its norms."""
    prefix, ours = f"{side}_l{number}", f"{side}.layers.{number - 1}"
    attentions = {"self": "self_attention", **({"context": "cross_attention"} if side == "decoder" else {})}
    parts = {"q": "query", "k": "key", "v": "value", "o": "output"}
    names = {
        f"{prefix}_{attention}_{kind}{part}": f"{ours}.{module}.{parts[part]}.{p}"
        for attention, module in attentions.items()
        for part in parts
        for kind, p in (("W", "weight"), ("b", "bias"))
    }
    names |= {
        f"{prefix}_ffn_{kind}{n}": f"{ours}.feed_forward.{module}.{p}"
        for n, module in ((1, "hidden"), (2, "output"))
        for kind, p in (("W", "weight"), ("b", "bias"))
    }
    norms = [*(f"{attention}_Wo" for attention in attentions), "ffn_ffn"]
    return names | {
        f"{prefix}_{norm}_ln_{kind}{suffix}": f"{ours}.norms.{k}.{p}"
        for k, norm in enumerate(norms)
        for kind, p in (("scale", "weight"), ("bias", "bias"))
    }


def _family(layers: dict[str, int], norm_first: bool, notes: list[str]) -> Family:
    renames = {
        "Wemb": "encoder.tokens.weight",
        "decoder_ff_logit_out_Wt": "output_weight",
        "decoder_ff_logit_out_b": "output_bias",
    }
    for side, depth in layers.items():
        renames |= {f"{side}_Wemb": f"{side}.tokens.weight", f"{side}_Wpos": f"{side}.positions.table"}
        for kind, p in (("scale", "weight"), ("bias", "bias")):
            renames |= {
                f"{side}_emb_ln_{kind}_pre": f"{side}.embedding_norm.{p}",
                f"{side}_top_ln_{kind}": f"{side}.norm.{p}",
            }
        for number in range(1, depth + 1):
            renames |= _layer(side, number, "_pre" if norm_first else "")
    return self_described(
        name="marian",
        about="Marian (model.npz)",
        renames=renames,
        notes=tuple(notes),
    )


def _tensor(path: Path, name: str, array: NDArray[Any]) -> Tensor:
    """Raises: CheckpointError for an array that is not floating-point, such as a matrix of 8-bit integers."""
    if array.dtype.kind != "f":
        raise CheckpointError(
            f"{path} has {name} as {array.dtype}, not in floating point. Give the model before it was quantized."
        )
    return torch.from_numpy(np.asarray(array, dtype=np.float32).copy())


def _is_marian(path: Path) -> bool:
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.glob("*.npz"))
    return path.suffix == ".npz"


TOOLKIT = Toolkit(recognises=_is_marian, read=read_model, files=lambda path: [model_file(path)])
