"""Checkpoints of OpenNMT-py's Transformers, versions 1 to 3: options, vocabularies and weights in one file. Version 3 can
also write the weights to separate files next to it (save_format safetensors).

They are read without OpenNMT-py. The arithmetic is that of version 3.5 (`encoders/transformer.py`,
`decoders/transformer.py`, `modules`), which also reads files of version 2. Files of version 1 have the same layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError
from tfexport.models.formats.files import read_file
from tfexport.models.formats.native import Tokenizers
from tfexport.models.formats.pickled_options import InertObject, holds, plain, read_inert
from tfexport.models.formats.state_dicts import some
from tfexport.models.toolkits.arguments import Arguments
from tfexport.models.toolkits.toolkit import (
    TextOptions,
    Toolkit,
    ToolkitCheckpoint,
    fill_biases,
    not_read,
    require_matrices,
    self_described,
    split_before,
    tie,
)
from tfexport.text.tokenizers import SplitAt, word_tokenizer

NAME = "opennmt-py"
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "silu", "gated-gelu": "gelu"}
_GATED = ("silu", "gated-gelu")
_UNSUPPORTED = (
    *("max_relative_positions", "relative_positions_buckets", "multiquery", "num_kv", "sliding_window", "num_experts"),
    *("parallel_residual", "shared_layer_norm", "copy_attn", "coverage_attn", "aan_useffn", "n_src_feats"),
    *("lora_layers", "lora_embedding", "quant_layers"),
)
"""Options that change a model's arithmetic, or the layout of its weights."""
_BEGINNINGS = ("pos_", "position_", "layer_norm", "norm_", "rotary_", "relative_", "num_", "add_", "self_attn", "attn_")
_HARMLESS = """
    position_encoding_type add_qkvbias add_ffnbias rotary_theta rotary_interleave rotary_dim num_experts_per_tok num_workers
"""
"""Options of training, of parts that are refused if they are on, and of properties that follow from the weights."""
_SPLITTING = ("sentencepiece", "bpe", "onmt_tokenize")
_CHANGING_NOTHING = ("filtertoolong",)
"""Transforms that do not change the texts that they keep."""
_AFFIXES = ("src_prefix", "tgt_prefix", "src_suffix", "tgt_suffix")
_TOKENS = {"unk_id": "<unk>", "pad_id": "<blank>", "eos_id": "</s>"}
_SOURCE, _TARGET = (f"{side}.embeddings.make_embedding.emb_luts.0.weight" for side in ("encoder", "decoder"))
_TABLES = {side: f"{side}.embeddings.make_embedding.pe.pe" for side in ("encoder", "decoder")}
_LAYER_NORM = re.compile(r"(.*\.layer_norm(?:_\d)?)\.([ab])_2")


def _is_opennmt(content: Any) -> bool:
    return isinstance(content, Mapping) and {"opt", "vocab"} <= content.keys()


def read(path: Path, options: TextOptions) -> ToolkitCheckpoint:
    """Read options, vocabularies and weights.

    Raises:
        CheckpointError: a file cannot be read, or lacks something.
        ConfigError: an option of the model is not supported.
    """
    if options.source_language or options.target_language:
        raise ConfigError(f"{path} knows no languages. Leave out --src-lang and --tgt-lang.")
    content = read_inert(path)
    training_options = plain(content["opt"], f"opt in {path}")
    arguments = Arguments(f"opt in {path}", training_options if isinstance(training_options, dict) else {})
    _check(arguments)
    weights = _weights(path, content)
    words = {side: _words(path, content["vocab"], side) for side in ("src", "tgt")}
    start = content["vocab"].get("decoder_start_token") if isinstance(content["vocab"], Mapping) else None
    fields = {
        **_fields(arguments, weights),
        **_special_ids(path, words["tgt"], start if isinstance(start, str) else "<s>"),
        **tie(weights, _SOURCE, _TARGET, "generator.weight"),
    }
    for side, name in (("src", "src_vocab_size"), ("tgt", "tgt_vocab_size")):
        if len(words[side]) != fields[name]:
            raise CheckpointError(
                f"the {side} vocabulary in {path} has {len(words[side])} words, the model {fields[name]}. Check that it "
                "was saved completely."
            )
    # Version 3 splits at spaces, earlier versions at any whitespace (`inputters`).
    split_at: SplitAt = "stripped spaces" if isinstance(dict(content["vocab"])["src"], list) else "whitespace"
    source, target = (
        word_tokenizer({word: k for k, word in enumerate(words[side])}, split_at=split_at) for side in ("src", "tgt")
    )
    family = self_described(
        name=NAME,
        about="OpenNMT-py's Transformer",
        renames=_NAMES,
        notes=(*_notes(arguments), *not_read(arguments, _BEGINNINGS, _HARMLESS.split())),
    )
    return ToolkitCheckpoint(family, fields, weights, Tokenizers(source.framed((), (), options.prefix), target))


def _check(arguments: Arguments) -> None:
    arguments.refuse(*_UNSUPPORTED)
    arguments.require(
        {
            "encoder_type": "transformer",
            "decoder_type": "transformer",
            "model_type": "text",
            "model_task": "seq2seq",
            "position_encoding": True,
            "generator_function": "softmax",
        }
    )
    kind = arguments.get("self_attn_type", "scaled-dot")
    arguments.known("self_attn_type", kind, dict.fromkeys(("scaled-dot", "scaled-dot-flash"), "the same arithmetic"))


def _weights(path: Path, content: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of the model and of its output layer, under the names of version 3."""
    files = [path] if _has_weights(content) else _parts(path)
    tensors = _of_one(path, content) if _has_weights(content) else _of_parts(files)
    where = f"the model in {some([str(file) for file in files])}"
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{where} has {name!r}, which is not a tensor. Check that it is complete.")
        name = str(name).replace("generator.0.", "generator.")  # before version 3 it is the first of several modules
        old = _LAYER_NORM.fullmatch(name)
        # A copy, because the file may be overwritten later.
        weights[f"{old[1]}.{'weight' if old[2] == 'a' else 'bias'}" if old else name] = tensor.clone()
    if "generator.bias" not in weights:
        raise CheckpointError(f"{where} has no generator.bias. Check that it was saved completely.")
    for name in _TABLES.values():
        if name in weights and weights[name].dim() == 3:
            weights[name] = weights[name].flatten(1)  # [length, 1, d_model]
    require_matrices(weights, (_SOURCE, _TARGET, "generator.weight", *_TABLES.values()), where)
    return weights


def _has_weights(content: Any) -> bool:
    return not {"model", "generator"}.isdisjoint(content)


def _of_one(path: Path, content: Mapping[str, Any]) -> dict[Any, Any]:
    """The weights in the file itself."""
    model, generator = content.get("model"), content.get("generator")
    if not isinstance(model, Mapping) or not isinstance(generator, Mapping):
        raise CheckpointError(
            f"{path} has options and vocabularies, and no whole model (`model` and `generator`). Check that it was saved "
            "completely."
        )
    return {**model, **{f"generator.{name}": tensor for name, tensor in generator.items()}}


def _parts(path: Path) -> list[Path]:
    """The weights files of `model.pt`: `model.safetensors`, which OpenNMT-py writes, or `model.00.safetensors` and so on,
    which it reads (`model_saver.py` and `load_safe_state_dict` of version 3.5).

    Raises:
        CheckpointError: both or neither exist, or their numbers are not 0, 1, 2 and so on.
    """
    stem = path.name.removesuffix(".pt")
    beside = sorted(file for file in path.parent.glob("*.safetensors") if file.is_file())
    whole = [file for file in beside if file.name == f"{stem}.safetensors"]
    named = re.compile(re.escape(stem) + r"\.([0-9]{1,9})\.safetensors")
    numbered = sorted((int(match[1]), file) for file in beside if (match := named.fullmatch(file.name)))
    parts = [file for _, file in numbered]
    if whole and parts:
        raise CheckpointError(
            f"the weights of {path} are in {whole[0].name} and in {some([file.name for file in parts])}. Keep only the "
            "right ones."
        )
    numbers = [number for number, _ in numbered]
    if len(set(numbers)) < len(numbers):
        raise CheckpointError(
            f"the weights of {path} are in {some([file.name for file in parts])}, two of which have the same number. Keep "
            "only the right ones."
        )
    absent = next((wanted for wanted, (number, _) in enumerate(numbered) if number != wanted), None)
    if absent is not None:
        raise CheckpointError(
            f"the weights of {path} are in {some([file.name for file in parts])}, and part {absent} is missing. Put "
            f"{stem}.{absent:02d}.safetensors beside it."
        )
    if whole or parts:
        return whole or parts
    others = f" (there is {some([file.name for file in beside], 4)})" if beside else ""
    raise CheckpointError(
        f"{path} has options and vocabularies, and no weights: OpenNMT-py's save_format safetensors puts them into "
        f"{stem}.safetensors or {stem}.00.safetensors and so on beside it{others}. Put them there, or save with save_format "
        "pytorch."
    )


def _of_parts(files: list[Path]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in files:
        part = read_file(file, unwrap=False).weights
        if twice := sorted(weights.keys() & part.keys()):
            raise CheckpointError(
                f"{file} has {twice[0]}, which another part also has. Check where the parts came from."
            )
        weights.update(part)
    return weights


def _files(path: Path) -> list[Path]:
    return [path] if holds(path, _has_weights) else [path, *_parts(path)]


def _fields(arguments: Arguments, weights: dict[str, Tensor]) -> dict[str, Any]:
    """The fields of `ModelConfig`; position tables and biases are made explicit in `weights`."""
    d_model = weights[_SOURCE].shape[-1]
    lengths = {side: len(weights[name]) for side, name in _TABLES.items()}
    activation = arguments.get("pos_ffn_activation_fn", "relu")
    # In version 3, biases in attention and feed-forward are optional; earlier versions always have them.
    attention = fill_biases(weights, r"(.*_attn\.(?:linear_(?:keys|values|query)|final_linear)\.)weight")
    feed_forward = fill_biases(weights, r"(.*\.feed_forward\.w_[123]\.)weight")
    norm = arguments.get("layer_norm", "standard")
    return {
        "d_model": d_model,
        "n_heads": arguments.number("heads"),
        "d_ff": arguments.number("transformer_ff"),
        "n_encoder_layers": arguments.number("enc_layers"),
        "n_decoder_layers": arguments.number("dec_layers"),
        "max_source_length": lengths["encoder"],
        "max_target_length": lengths["decoder"],
        "source_eos": False,
        "activation": arguments.known("pos_ffn_activation_fn", activation, _ACTIVATIONS),
        "gated": activation in _GATED,
        "norm_first": True,
        "final_norm": True,
        "norm": arguments.known("layer_norm", norm, {"standard": "layer", "rms": "rms"}),
        "norm_eps": arguments.get("norm_eps", 1e-6),
        "positions": "stored",
        "attention_bias": attention,
        "feed_forward_bias": feed_forward,
        "output_bias": True,
        "embedding_scale": math.sqrt(d_model),
    }


def _words(path: Path, vocabularies: Any, side: str) -> list[str]:
    """The words of a side in order. Version 3 has a list, earlier versions have objects of torchtext."""
    vocabulary = _entry(vocabularies, side)
    if isinstance(vocabulary, InertObject) and "fields" in vocabulary.attributes:
        fields = vocabulary.attributes["fields"]  # one field for words, others for their features
        if isinstance(fields, list) and len(fields) > 1:
            raise ConfigError(f"the {side} vocabulary in {path} has word features, which are not supported.")
        vocabulary = _entry(fields, side)
    if isinstance(vocabulary, InertObject) and "vocab" in vocabulary.attributes:
        marks = plain(
            {name: vocabulary.attributes.get(name) for name in ("init_token", "eos_token")}, f"vocab in {path}"
        )
        if side == "src" and any(marks.values()):
            raise ConfigError(f"the sources of {path} have {marks}, which is not supported.")
        vocabulary = vocabulary.attributes["vocab"]
    if isinstance(vocabulary, InertObject):
        vocabulary = vocabulary.attributes.get("itos")
    if not isinstance(vocabulary, list) or not vocabulary or not all(map(_is_word, vocabulary)):
        raise CheckpointError(f"{path} has no {side} vocabulary that can be read. Check that it was saved completely.")
    if len(set(vocabulary)) < len(vocabulary):
        raise CheckpointError(f"the {side} vocabulary in {path} has a word twice. Check that it was saved completely.")
    return vocabulary


def _entry(pairs: Any, name: str) -> Any:
    """The value of a name in a dict, or in a list of pairs."""
    if isinstance(pairs, Mapping):
        return pairs.get(name)
    listed = pairs if isinstance(pairs, list | tuple) else ()
    entries = [pair[1] for pair in listed if isinstance(pair, list | tuple) and len(pair) == 2 and pair[0] == name]
    return entries[-1] if entries else None


def _is_word(word: Any) -> bool:
    """Whether a value is valid text: a pickle can contain lone surrogates."""
    return isinstance(word, str) and not any("\ud800" <= character <= "\udfff" for character in word)


def _special_ids(path: Path, target: list[str], start: str) -> dict[str, int]:
    tokens = {**_TOKENS, "bos_id": start}
    absent = [token for token in tokens.values() if token not in target]
    if absent:
        raise ConfigError(f"the tgt vocabulary in {path} has no {', '.join(absent)}, which is not supported.")
    return {name: target.index(token) for name, token in tokens.items()}


def _notes(arguments: Arguments) -> tuple[str, ...]:
    """Notes about the processing of texts before the model read them, for all corpora or for some."""
    corpora: list[Arguments] = []
    if isinstance(arguments.get("data"), dict):  # in version 1 it is a file name, and there are no transforms
        data = arguments.inner("data")
        corpora = [data.inner(name) for name in data.names()]
    transforms = dict.fromkeys(name for settings in (arguments, *corpora) for name in settings.texts("transforms"))
    splitting = [name for name in transforms if name in _SPLITTING]
    others = [name for name in transforms if name not in (*_SPLITTING, *_CHANGING_NOTHING)]
    notes = []
    if splitting:
        models = [str(model) for side in ("src", "tgt") if (model := arguments.get(f"{side}_subword_model"))]
        names = f" ({', '.join(dict.fromkeys(models))})" if models else ""
        notes.append(split_before(", ".join(splitting) + names))
    if others:
        prefixes = dict.fromkeys(
            f"{name} {value!r}" for corpus in corpora for name in _AFFIXES if (value := corpus.get(name))
        )
        names = f" ({', '.join(prefixes)})" if prefixes else ""
        notes.append(
            f"its texts went through {', '.join(others)}{names} in training, which is not done here: do to the input of "
            "`decode` what was done to its sources; a text before every source is --prefix"
        )
    return tuple(notes)


def _names(side: str, layers: str, norms: tuple[str, ...], attentions: Mapping[str, str]) -> dict[str, str]:
    prefix, ours = f"{side}.{layers}.{{i}}", f"{side}.layers.{{i}}"
    parts = (("linear_query", "query"), ("linear_keys", "key"), ("linear_values", "value"), ("final_linear", "output"))
    return {
        f"{side}.embeddings.make_embedding.emb_luts.0.weight": f"{side}.tokens.weight",
        f"{side}.embeddings.make_embedding.pe.pe": f"{side}.positions.table",
        f"{side}.layer_norm.{{p}}": f"{side}.norm.{{p}}",
        **{f"{prefix}.{norm}.{{p}}": f"{ours}.norms.{k}.{{p}}" for k, norm in enumerate(norms)},
        **{
            f"{prefix}.{attention}.{part}.{{p}}": f"{ours}.{name}.{our_part}.{{p}}"
            for attention, name in attentions.items()
            for part, our_part in parts
        },
        **{
            f"{prefix}.feed_forward.{part}.{{p}}": f"{ours}.feed_forward.{name}.{{p}}"
            for part, name in (("w_1", "hidden"), ("w_2", "output"), ("w_3", "gate"))
        },
    }


_NAMES = {
    **_names("encoder", "transformer", ("layer_norm", "feed_forward.layer_norm"), {"self_attn": "self_attention"}),
    **_names(
        "decoder",
        "transformer_layers",
        ("layer_norm_1", "layer_norm_2", "feed_forward.layer_norm"),
        {"self_attn": "self_attention", "context_attn": "cross_attention"},
    ),
    "generator.weight": "output_weight",
    "generator.bias": "output_bias",
}

TOOLKIT = Toolkit(recognises=lambda path: holds(path, _is_opennmt), read=read, files=_files)
