"""JoeyNMT's models: a folder with config.yaml, checkpoints and vocabularies; versions 1 and 2.

Source of the arithmetic: JoeyNMT 2.3, `transformer_layers.py`, `encoders.py`, `decoders.py` and `model.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError
from tfexport.models.formats.pickled_options import holds, read_inert
from tfexport.models.positions import sinusoids
from tfexport.models.toolkits.arguments import Arguments
from tfexport.models.toolkits.joeynmt_text import read_text
from tfexport.models.toolkits.toolkit import (
    TextOptions,
    Toolkit,
    ToolkitCheckpoint,
    check_table,
    require_matrices,
    self_described,
    tie,
)
from tfexport.system.regular_files import open_regular
from tfexport.system.yaml_files import read_settings, read_yaml_file

CONFIG = "config.yaml"
_SECTIONS = re.compile(r"^(data|model|training):", re.MULTILINE)
"""Sections of every JoeyNMT configuration. Few other files have all of them."""
_LENGTH = 5000
"""Number of rows of JoeyNMT's sinusoid table."""
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu"}
_NORMS = {"pre": "pre", "post": "post"}
_EMBEDDINGS = ("src_embed.lut.weight", "trg_embed.lut.weight", "decoder.output_layer.weight")
_HARMLESS = """
    initializer init_gain init_weight bias_initializer init_rnn_orthogonal lstm_forget_gate embed_initializer
    embed_init_gain embed_init_weight init_rnn_weight rnn_initializer tied_embeddings tied_softmax dropout freeze
    rnn_type bidirectional hidden_dropout input_feeding bridge init_hidden attention
"""
"""Settings of training or of recurrent layers, and settings that follow from the weights."""
_READ = ("type", "alpha", "layer_norm", "hidden_size", "num_heads", "ff_size", "num_layers", "embeddings", "activation")
"""Settings of a stack that are used or refused."""
_SEARCH = ("beam_size", "beam_alpha", "alpha", "min_output_length", "max_output_length", "n_best")
_SEARCH_TOO = ("repetition_penalty", "no_repeat_ngram_size", "generate_unk")


def recognises(path: Path) -> bool:
    folder = path if path.is_dir() else path.parent
    try:
        if (folder / "config.json").exists() or not (path.is_dir() or path.suffix == ".ckpt"):
            return False
        if path.is_file() and not (folder / CONFIG).exists():
            return holds(path, _is_joeynmt)
        with open_regular(folder / CONFIG) as file:
            text = file.read(2**20).decode("utf-8", "replace")
            return set(_SECTIONS.findall(text)) == {"data", "model", "training"}
    except OSError:
        return False


def _is_joeynmt(content: Any) -> bool:
    state = content.get("model_state") if isinstance(content, Mapping) else None
    return isinstance(state, Mapping) and any(".src_trg_att." in str(name) for name in state)


def read(path: Path, options: TextOptions) -> ToolkitCheckpoint:
    """Read a checkpoint with its configuration and vocabularies.

    Args:
        path: the folder, whose best or else last checkpoint is read; or a checkpoint in it.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigError: a setting of the model, or an option for languages, is not supported.
        TokenizerError: a vocabulary cannot be read.
        RuntimeUnavailable: a library for YAML, SentencePiece or subword-nmt is not installed.
    """
    file = checkpoint_file(path)
    config = file.parent / CONFIG
    if not config.is_file():
        raise CheckpointError(
            f"{file} is a checkpoint of JoeyNMT, but its configuration {config} is missing. Put the model's own there."
        )
    settings = Arguments(str(config), read_settings(read_yaml_file(config), str(config)))
    weights = _weights(file)
    model = settings.inner("model")
    fields = _fields(model, weights)
    text = read_text(file.parent, settings.inner("data"), options)
    notes = [*text.notes]
    if search := _search(settings.inner("testing")):
        notes.append(
            f"its own search uses {search}; give `decode` the options that you want, and --search-profile joeynmt"
        )
    known = _HARMLESS.split()
    if unread := [name for side in ("encoder", "decoder") for name in model.inner(side).others([*known, *_READ])]:
        notes.append(f"its model has settings that were not read: {', '.join(dict.fromkeys(unread))}")
    family = self_described(
        name="joeynmt",
        about="JoeyNMT (config.yaml, checkpoint and vocabularies)",
        renames=_NAMES,
        notes=tuple(notes),
    )
    return ToolkitCheckpoint(family, {**fields, **text.fields}, weights, text.tokenizers, absent=text.absent)


def checkpoint_file(path: Path) -> Path:
    """The checkpoint at a path: the file itself, or the best or last one of a folder.

    Raises:
        CheckpointError: the folder has no checkpoint.
    """
    if not path.is_dir():
        return path
    if (path / "best.ckpt").is_file():
        return path / "best.ckpt"
    steps = [file for file in path.glob("*.ckpt") if file.stem.isdecimal() and len(file.stem) < 19]
    newest = max(steps, key=lambda file: int(file.stem), default=path / "latest.ckpt")
    if not newest.is_file():
        raise CheckpointError(f"{path} has no checkpoint (best.ckpt, or STEPS.ckpt). Give the path of one.")
    return newest


def _weights(file: Path) -> dict[str, Tensor]:
    content = read_inert(file)
    state = content.get("model_state") if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise CheckpointError(
            f"{file} has no model_state of weights by name, so JoeyNMT did not save it. Check the file."
        )
    weights = {str(name): tensor for name, tensor in state.items()}
    tables = [name for name in (f"{side}.pe.pe" for side in ("encoder", "decoder")) if name in weights]
    for name in tables:
        if weights[name].dim() == 3 and len(weights[name]) == 1:
            weights[name] = weights[name][0]
    require_matrices(weights, (*_EMBEDDINGS, *tables), str(file))
    return weights


def _fields(model: Arguments, weights: dict[str, Tensor]) -> dict[str, Any]:
    sides = {"encoder": model.inner("encoder"), "decoder": model.inner("decoder")}
    encoder, decoder = sides.values()
    for side, settings in sides.items():
        kind = settings.get("type", "recurrent" if side == "encoder" else "transformer")
        if kind != "transformer":
            raise ConfigError(f"{settings.where} has type {kind!r}, and only 'transformer' is supported.")
        settings.require({"alpha": 1.0})
    norm_first = _norm_first(encoder, decoder, weights)

    def same(name: str, *usual: int) -> int:
        sizes = [settings.size(name, number) for settings, number in zip(sides.values(), usual, strict=True)]
        return int(_same(model, name, *sizes))

    d_model = same("hidden_size", 512, 512)
    scales = [settings.inner("embeddings").flag("scale", False) for settings in sides.values()]
    if model.flag("tied_embeddings", False):
        scales[1] = scales[0]  # the target uses the source embeddings
    activations = [
        settings.known("activation", settings.get("activation", "relu"), _ACTIVATIONS) for settings in sides.values()
    ]
    fields = {
        "d_model": d_model,
        "n_heads": same("num_heads", 4, 8),
        "d_ff": same("ff_size", 2048, 2048),
        "n_encoder_layers": encoder.number("num_layers", 8),
        "n_decoder_layers": decoder.number("num_layers", 4),
        "source_eos": True,
        "activation": _same(model, "activation", *activations),
        "norm_first": norm_first,
        "final_norm": _same(model, "a final layer_norm", *(f"{side}.layer_norm.weight" in weights for side in sides)),
        "norm_eps": 1e-6,
        "positions": "stored",
        "embedding_scale": math.sqrt(d_model) if _same(model, "scale of embeddings", *scales) else 1.0,
        **tie(weights, *_EMBEDDINGS),
    }
    for side in ("encoder", "decoder"):
        if f"{side}.pe.pe" not in weights:
            check_table(model.where, _LENGTH, d_model, least=1)
            weights[f"{side}.pe.pe"] = sinusoids(_LENGTH, d_model)
    fields["max_source_length"], fields["max_target_length"] = (len(weights[f"{side}.pe.pe"]) for side in sides)
    return fields


def _norm_first(encoder: Arguments, decoder: Arguments, weights: Mapping[str, Tensor]) -> bool:
    """Whether norms are before sublayers (pre-norm).

    Version 1 has no setting for it and is always pre-norm. Without the setting, version 2 is pre-norm in the encoder and
    post-norm in the decoder. A pre-norm decoder also has a final norm.
    """
    usual = "pre" if "decoder.layer_norm.weight" in weights else "post"
    orders = encoder.get("layer_norm", "pre"), decoder.get("layer_norm", usual)
    return _same(encoder, "layer_norm", *(encoder.known("layer_norm", value, _NORMS) for value in orders)) == "pre"


def _same(where: Arguments, name: str, left: Any, right: Any) -> Any:
    """A value that must be the same in both stacks."""
    if left != right:
        raise ConfigError(
            f"{where.where} has {name} {left!r} for the encoder and {right!r} for the decoder: models whose stacks differ "
            "in it are not supported."
        )
    return left


def _search(testing: Arguments) -> str:
    settings = {name: testing.get(name) for name in (*_SEARCH, *_SEARCH_TOO)}
    return ", ".join(f"{name} {str(value)[:30]}" for name, value in settings.items() if value is not None)


def _layer(side: str, attentions: Mapping[str, str], norms: tuple[str, ...]) -> dict[str, str]:
    layer = f"{side}.layers.{{i}}"
    parts = {"q_layer": "query", "k_layer": "key", "v_layer": "value", "output_layer": "output"}
    return {
        **{
            f"{layer}.{module}.{part}.{{p}}": f"{layer}.{ours}.{name}.{{p}}"
            for module, ours in attentions.items()
            for part, name in parts.items()
        },
        **{f"{layer}.{norm}.{{p}}": f"{layer}.norms.{k}.{{p}}" for k, norm in enumerate(norms)},
        f"{layer}.feed_forward.pwff_layer.0.{{p}}": f"{layer}.feed_forward.hidden.{{p}}",
        f"{layer}.feed_forward.pwff_layer.3.{{p}}": f"{layer}.feed_forward.output.{{p}}",
        f"{side}.layer_norm.{{p}}": f"{side}.norm.{{p}}",
        f"{side}.pe.pe": f"{side}.positions.table",
    }


_NAMES = {
    **dict(zip(_EMBEDDINGS, ("encoder.tokens.weight", "decoder.tokens.weight", "output_weight"), strict=True)),
    **_layer("encoder", {"src_src_att": "self_attention"}, ("layer_norm", "feed_forward.layer_norm")),
    **_layer(
        "decoder",
        {"trg_trg_att": "self_attention", "src_trg_att": "cross_attention"},
        ("x_layer_norm", "dec_layer_norm", "feed_forward.layer_norm"),
    ),
}


TOOLKIT = Toolkit(
    recognises=recognises,
    read=read,
    files=lambda path: [checkpoint_file(path).parent / CONFIG, checkpoint_file(path)],
)
