"""Checkpoints of fairseq's encoder-decoder Transformers: `args` or `cfg`, weights, and `dict.xx.txt` files next to them.

They are read without fairseq. The arithmetic is that of fairseq 0.12 (`models/transformer`, `modules`), which also reads the
layouts of older versions.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError
from tfexport.models.formats.native import Tokenizers
from tfexport.models.formats.pickled_options import holds, plain, read_inert
from tfexport.models.positions import tensor2tensor_sinusoids
from tfexport.models.toolkits.arguments import Arguments
from tfexport.models.toolkits.hugging_face_layouts import bart_names
from tfexport.models.toolkits.toolkit import (
    TextOptions,
    Toolkit,
    ToolkitCheckpoint,
    check_table,
    not_read,
    require_matrices,
    self_described,
    split_before,
    tie,
)
from tfexport.text.tokenizers import TextTokenizer
from tfexport.text.vocabularies import FAIRSEQ_SPECIALS, read_vocabulary

NAME = "fairseq"
_BOS, _PAD, _EOS, _UNK = range(len(FAIRSEQ_SPECIALS))
"""Special ids of every dictionary. Decoding starts with eos; bos is for other tasks."""
_ARCHITECTURES = re.compile(
    r"transformer(_tiny|_align|_iwslt_\w+|_wmt_\w+|_vaswani_\w+)?|bart_(base|large)|mbart_(base|base_wmt20|large)"
)
"""Architectures that fairseq registers. Others with the same prefix differ: transformer_unidirectional, _xl, _lm."""
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_UNSUPPORTED = (
    *("adaptive_input", "adaptive_softmax_cutoff", "char_inputs", "base_layers", "no_cross_attention"),
    *("cross_self_attention", "no_token_positional_embeddings", "no_decoder_final_norm"),
    *("encoder_layers_to_keep", "decoder_layers_to_keep", "quant_noise_pq", "quant_noise_scalar"),
    *("scale_attn", "scale_fc", "scale_heads", "scale_resids", "encoder_xformers_att_config"),
    *("decoder_xformers_att_config", "simul_type"),
)
"""Options that change a model's arithmetic."""
_BEGINNINGS = ("encoder_", "decoder_", "scale_", "cross_", "adaptive_", "tie_", "layernorm_", "quant_noise_", "base_")
_HARMLESS = """
    encoder_layerdrop decoder_layerdrop encoder_embed_path decoder_embed_path decoder_input_dim decoder_output_dim
    adaptive_softmax_dropout adaptive_softmax_factor tie_adaptive_weights tie_adaptive_proj quant_noise_pq_block_size
    base_sublayers base_shuffle
"""
"""Options of training, of parts that are refused if they are on, and of properties that follow from the weights."""
_TEXT = {"bpe": ("bpe", "_name"), "tokenizer": ("tokenizer", "_name")}
_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")


def _is_fairseq(content: Any) -> bool:
    """Whether a file contains a fairseq model of any kind."""
    if not isinstance(content, Mapping) or not isinstance(content.get("model"), Mapping):
        return False
    if content.get("args") is None and content.get("cfg") is None:
        return False
    # Other programs also save `model` and `args`, but not the history of their optimizers or these names.
    return "optimizer_history" in content or any(".embed_tokens." in str(name) for name in content["model"])


def read(path: Path, options: TextOptions) -> ToolkitCheckpoint:
    """Read the options, weights and dictionaries of a checkpoint.

    Raises:
        CheckpointError: the file cannot be read, or does not contain weights by name.
        ConfigError: an option of the model is not supported.
    """
    content = read_inert(path)
    arguments = _arguments(path, content)
    weights = _weights(path, content["model"])
    fields = _fields(arguments, weights)
    tokenizers, absent = _dictionaries(path, arguments, fields)
    steps = [f"{name} {value}" for name in _TEXT if (value := arguments.get(name))]
    notes = [split_before(" and ".join(steps))] if steps else []
    if options.source_language or options.target_language:
        raise ConfigError(f"{path} is a model of one pair of languages. Leave out --src-lang and --tgt-lang.")
    if options.prefix:
        if tokenizers.source is None:
            raise ConfigError(f"{path} has no dictionary next to it that could read --prefix. Put it there.")
        tokenizers = Tokenizers(tokenizers.source.framed((), (), options.prefix), tokenizers.target)
    family = self_described(
        name=NAME,
        about="fairseq's Transformer",
        renames=_NAMES,
        ignored=_IGNORED,
        notes=(*notes, *not_read(arguments, _BEGINNINGS, _HARMLESS.split())),
    )
    return ToolkitCheckpoint(family, fields, weights, tokenizers, absent=absent)


def _arguments(path: Path, content: Mapping[str, Any]) -> Arguments:
    """The options under their names on the command line, for all versions.

    Up to version 0.9 they are in one Namespace. Later versions have groups, and some models have groups for their stacks.
    """
    if content.get("cfg") is None:
        arguments = plain(content["args"], f"args in {path}")
        return Arguments(f"args in {path}", arguments if isinstance(arguments, dict) else {})
    where = f"cfg in {path}"
    groups = plain(content["cfg"], where)
    if not isinstance(groups, dict) or not isinstance(groups.get("model"), dict):
        raise CheckpointError(f"{where} has no options of a model, but {type(groups).__name__}. Check the file.")

    def resolved(value: Any) -> Any:
        """The value that `${group.name}` refers to."""
        match = _INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        group_value: Any = groups
        for part in match[1].split("."):
            group_value = group_value.get(part) if isinstance(group_value, dict) else None
        return None if group_value == value else group_value

    flat: dict[str, Any] = {}
    task: Any = groups.get("task")
    task = task if isinstance(task, dict) else {}
    for group in (task, groups["model"]):
        for name, value in group.items():
            inner = value if isinstance(value, dict) else {}
            flat |= {f"{name}_{key}": resolved(part) for key, part in inner.items()} or {name: resolved(value)}
    flat["task"], flat["arch"] = task.get("_name"), flat.get("arch") or groups["model"].get("_name")
    for name, (group, key) in _TEXT.items():
        arguments = groups.get(group)
        flat[name] = arguments.get(key) if isinstance(arguments, dict) else arguments
    return Arguments(where, flat)


def _weights(path: Path, tensors: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The weights under the names of fairseq 0.12, converted from older layouts."""
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"the model in {path} has {name!r}, which is not a tensor. Check that it is complete."
            )
        kept = tensor.clone()  # the file may be overwritten later, as a last checkpoint is
        attention, _, part = name.rpartition(".in_proj_")
        if attention.endswith("attn") and kept.ndim and len(kept) % 3 == 0:
            # Up to version 0.6 the three projections are one matrix.
            for letter, third in zip("qkv", kept.chunk(3), strict=True):
                weights[f"{attention}.{letter}_proj.{part}"] = third
        else:
            weights[name] = kept
    return weights


def _fields(arguments: Arguments, weights: dict[str, Tensor]) -> dict[str, Any]:
    """The fields of `ModelConfig`; position tables and output are made explicit in `weights`."""
    architecture, task = str(arguments.get("arch", "transformer")), str(arguments.get("task", "translation"))
    if not _ARCHITECTURES.fullmatch(architecture):
        raise ConfigError(
            f"{arguments.where} has arch {architecture!r}, which is not known to be a Transformer that translates. "
            "transformer and bart are supported, with fairseq's variants of them. If it is one of these under a name of "
            "your own, save the file with arch 'transformer'."
        )
    if task != "translation":
        raise ConfigError(
            f"{arguments.where} has task {task!r}, whose texts have tokens that are not supported. There is "
            "translation; of models of many languages read those that the transformers library has."
        )
    arguments.refuse(*_UNSUPPORTED)
    d_model = arguments.same("encoder_embed_dim", "decoder_embed_dim")
    norm_first = arguments.flag("encoder_normalize_before", False)
    arguments.require({"decoder_normalize_before": norm_first})
    # Versions differ in the norm after the last layer; the weights show whether it exists.
    final_norms = {f"{side}.layer_norm.weight" in weights for side in ("encoder", "decoder")}
    if len(final_norms) > 1:
        raise ConfigError(f"of {arguments.where}, one stack has a final norm and one has none: not supported.")
    lengths = {side: _positions(arguments, weights, side, d_model) for side in ("encoder", "decoder")}
    source, target, output = (
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "decoder.output_projection.weight",
    )
    require_matrices(weights, (source, target), f"the model of {arguments.where}")
    weights.setdefault(output, weights.pop("decoder.embed_out", weights[target]))
    return {
        "d_model": d_model,
        "n_heads": arguments.same("encoder_attention_heads", "decoder_attention_heads"),
        "d_ff": arguments.same("encoder_ffn_embed_dim", "decoder_ffn_embed_dim"),
        "n_encoder_layers": arguments.number("encoder_layers"),
        "n_decoder_layers": arguments.number("decoder_layers"),
        "max_source_length": lengths["encoder"],
        "max_target_length": lengths["decoder"],
        "source_eos": True,
        "activation": arguments.known("activation_fn", arguments.get("activation_fn", "relu"), _ACTIVATIONS),
        "norm_first": norm_first,
        "final_norm": final_norms == {True},
        "embedding_norm": arguments.flag("layernorm_embedding", False),
        "positions": "stored",
        "embedding_scale": 1.0 if arguments.flag("no_scale_embedding", False) else math.sqrt(d_model),
        "unk_id": _UNK,
        "pad_id": _PAD,
        "bos_id": _EOS,
        "eos_id": _EOS,
        "suppressed_ids": (_PAD,),
        **tie(weights, source, target, output),
    }


def _positions(arguments: Arguments, weights: dict[str, Tensor], side: str, d_model: int) -> int:
    """Put the position table of a stack, [length, d_model], into `weights`; returns its length.

    Rows up to that of padding are not positions: token t has row pad + 1 + t.
    """
    name = f"{side}.embed_positions.weight"
    is_learned = arguments.flag(f"{side}_learned_pos", False)
    if is_learned != (name in weights):
        raise ConfigError(
            f"{arguments.where} has {side}_learned_pos {is_learned}, and the model has {name if not is_learned else 'none'}"
            ". Check that both are of one model."
        )
    if is_learned:
        require_matrices(weights, [name], f"the model of {arguments.where}")
        weights[name] = weights[name][_PAD + 1 :]
        return len(weights[name])
    most = "max_source_positions" if side == "encoder" else "max_target_positions"
    length = arguments.number(most, arguments.number("max_positions", 1024))
    check_table(arguments.where, length, d_model)
    weights[name] = tensor2tensor_sinusoids(length, d_model, _PAD)
    return length


def _dictionaries(path: Path, arguments: Arguments, fields: Mapping[str, Any]) -> tuple[Tokenizers, dict[str, str]]:
    """The tokenizers of the dictionaries next to the checkpoint, and the reason for each missing one, by side."""
    dictionaries: list[TextTokenizer | None] = []
    absent = {}
    for side, name, size in (
        ("source", "src", fields["src_vocab_size"]),
        ("target", "tgt", fields["tgt_vocab_size"]),
    ):
        language = arguments.text(f"{side}_lang", name)
        if Path(language).name != language:
            raise ConfigError(
                f"{arguments.where} has {side}_lang {language[:60]!r}, which is not a language. Correct it."
            )
        file = path.with_name(f"dict.{language}.txt")
        tokenizer = read_vocabulary(file) if os.path.isfile(file) else None
        if tokenizer is None:
            absent[side] = f"{file.name} is not next to it: put it there, or give it with --{name}-vocab"
        elif tokenizer.size != size:
            absent[side] = f"{file.name} next to it has {tokenizer.size} words, the model {size}: it was not read"
            tokenizer = None
        dictionaries.append(tokenizer)
    return Tokenizers(*dictionaries), absent


def _old_norms(side: str, count: int) -> dict[str, str]:
    layer = f"{side}.layers.{{i}}"
    return {f"{layer}.layer_norms.{k}.{{p}}": f"{layer}.norms.{k}.{{p}}" for k in range(count)}


_NAMES = {
    **bart_names("encoder", {"self_attn": "self_attention"}),
    **bart_names("decoder", {"self_attn": "self_attention", "encoder_attn": "cross_attention"}),
    **_old_norms("encoder", 2),
    **_old_norms("decoder", 3),
    "decoder.output_projection.weight": "output_weight",
}
_IGNORED = (
    *(f"{side}.{name}" for side in ("encoder", "decoder") for name in ("version", "embed_positions._float_tensor")),
    *(f"{side}.embed_positions.weights" for side in ("encoder", "decoder")),  # a table that is computed
    # Copies that version 0.12 keeps for a fast path.
    *(f"encoder.layers.{{i}}.{name}_{{p}}" for name in ("in_proj", "out_proj", "fc1", "fc2")),
)

TOOLKIT = Toolkit(recognises=lambda path: holds(path, _is_fairseq), read=read, files=lambda path: [path])
