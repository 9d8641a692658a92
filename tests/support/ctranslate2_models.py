"""Random models in folders that CTranslate2's own converters write, and what CTranslate2 finds with them."""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from makers import marian_models
from makers.paths import DATA
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats.pickled_options import plain, read_inert
from tfexport.search.search import SearchOptions

ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed: pip install ctranslate2")
converters = pytest.importorskip("ctranslate2.converters")

NBest = list[tuple[tuple[str, ...], float]]


def _words_of(checkpoint: Path) -> tuple[list[str], list[str]]:
    found = load_checkpoint(checkpoint, {}).tokenizers
    assert found.source is not None
    assert found.target is not None
    source, target = (side.tokens(range(side.size)) for side in (found.source, found.target))
    return source, target


def opennmt(folder: Path) -> Any:
    """A checkpoint of OpenNMT-py 2, with its vocabularies as lists, which version 3 writes."""
    file = DATA / "opennmt" / "v2.pt"
    content = read_inert(file)
    source, target = _words_of(file)
    content = {
        **{name: content[name] for name in ("model", "generator")},
        "opt": argparse.Namespace(**plain(content["opt"], "opt")),
        "vocab": {"src": source, "tgt": target},
    }
    torch.save(content, folder / "model.pt")
    return converters.OpenNMTPyConverter(str(folder / "model.pt"), unsafe_deserialization=True)


def marian(folder: Path, name: str = "gelu", **random: Any) -> Any:
    options = marian_models.options_of(name)
    arrays = marian_models.random_arrays(name, **({"seed": 6, "end": 3.0} | random))
    model = marian_models.write_folder(folder / "model", arrays, options)
    vocabularies = [str(model / f"vocab.{side}.yml") for side in ("src", "tgt")]
    return converters.MarianConverter(str(model / "model.npz"), vocabularies)


class _FairseqModel:
    """The modules that a state_dict names: what fairseq's own would have at these names, and nothing more."""

    def __init__(self, padding_idx: int):
        self._padding_idx = padding_idx

    def eval(self) -> None:
        pass

    def load_state_dict(self, weights: dict[str, Tensor]) -> None:
        for side in ("encoder", "decoder"):
            tree: dict[str, Any] = {}
            for name, tensor in weights.items():
                *path, last = name.split(".")
                if path[0] == side and "in_proj" not in name:
                    node = tree
                    for part in path[1:]:
                        node = node.setdefault(part, {})
                    node[last] = tensor
            module = _modules(tree)
            module.embed_scale = 1.0
            table = tree["embed_positions"]["weight"]
            module.embed_positions = torch.nn.Embedding.from_pretrained(table, padding_idx=self._padding_idx)
            for absent in ("layernorm_embedding", "project_in_dim", "project_out_dim"):
                setattr(module, absent, None)
            setattr(self, side, module)


def _modules(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if all(name.isdecimal() for name in tree):
        return [_modules(tree[name]) for name in sorted(tree, key=int)]
    return SimpleNamespace(**{"bias": None, **{name: _modules(inner) for name, inner in tree.items()}})


def fairseq(folder: Path) -> Any:
    """A checkpoint of fairseq 0.12. The converter wants fairseq, of which there is a stand-in while it converts."""
    file = DATA / "fairseq" / "args.pt"
    content = read_inert(file)
    weights = content["model"]
    weights["decoder.output_projection.weight"][2] *= 2.5  # so that it ends some
    content = {"args": argparse.Namespace(**plain(content["args"], "args")), "model": weights}
    torch.save(content, folder / "model.pt")
    source, target = (SimpleNamespace(symbols=words) for words in _words_of(file))
    stand_in = ModuleType("fairseq")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("fairseq", None)
    task = SimpleNamespace(source_dictionary=source, target_dictionary=target)
    parts = {
        "models": SimpleNamespace(
            ARCH_MODEL_NAME_REGISTRY={"transformer": "transformer"},
            build_model=lambda args, task: _FairseqModel(padding_idx=1),
        ),
        "tasks": SimpleNamespace(setup_task=lambda args: task),
        "checkpoint_utils": SimpleNamespace(),
    }
    for name, part in parts.items():
        setattr(stand_in, name, part)

    class Converter(converters.FairseqConverter):  # type: ignore[name-defined, misc]
        def _load(self) -> Any:
            with mock.patch.dict(sys.modules, {"fairseq": stand_in}):
                return super()._load()

    return Converter(str(folder / "model.pt"), str(folder), unsafe_deserialization=True)


def hugging_face(folder: Path, name: str) -> Any:
    """A folder of the transformers library, with a tokenizer of whole words."""
    from makers import hugging_face_models

    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    model = hugging_face_models.made(name)
    is_t5 = "t5" in name
    special = ["<pad>", "</s>", "<unk>"] if is_t5 else ["<s>", "<pad>", "</s>", "<unk>"]
    words = [*special, *(f"t{index}" for index in range(len(special), model.config.vocab_size))]
    if is_t5:
        with torch.no_grad():  # the random models are made to like id 2, which is BART's end
            model.shared.weight[2] *= 0.5
            model.lm_head.weight[1] *= 2.5
    else:
        # As their files say, and the converter asks for.
        model.config.normalize_before = name != "bart"
        model.config.normalize_embedding = name in ("bart", "mbart")
    model.save_pretrained(folder / "model")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: k for k, word in enumerate(words)}, "<unk>"))
    own = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"} | ({} if is_t5 else {"bos_token": "<s>"})
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **own).save_pretrained(folder / "model")
    return converters.TransformersConverter(str(folder / "model"))


KINDS: dict[str, Callable[[Path], Any]] = {
    "opennmt": opennmt,
    "marian": marian,
    "fairseq": fairseq,
    "bart": lambda folder: hugging_face(folder, "bart"),
    "t5": lambda folder: hugging_face(folder, "t5-gated"),
}
PRECISIONS = ("float32", "float16", "int8")


def converted(kind: str | Callable[[Path], Any], folder: Path, quantization: str | None = None) -> Path:
    """The folder that CTranslate2's converter writes of a model, beside which it lies."""
    folder.mkdir(parents=True, exist_ok=True)
    converter = (KINDS[kind] if isinstance(kind, str) else kind)(folder)
    converter.convert(str(folder / "ct2"), quantization=quantization)
    return folder / "ct2"


def simple(folder: Path, *, d_model: int = 16) -> Path:
    """A model as the first converters knew it: pre-norm, ReLU, eight heads, and positions that CTranslate2 computes."""
    random = np.random.default_rng(3)
    special = ["<unk>", "<s>", "</s>"]
    source, target = ([*special, *(f"{letter}{index}" for index in range(n))] for letter, n in (("s", 27), ("t", 22)))

    def linear(spec: Any, n_in: int, n_out: int, scale: float = 1.5) -> None:
        spec.weight = (scale * n_in**-0.5 * random.standard_normal((n_out, n_in))).astype(np.float32)
        spec.bias = (0.3 * random.standard_normal(n_out)).astype(np.float32)

    def norm(spec: Any) -> None:
        spec.gamma = (1 + 0.3 * random.standard_normal(d_model)).astype(np.float32)
        spec.beta = (0.2 * random.standard_normal(d_model)).astype(np.float32)

    def attention(spec: Any, *outputs: int) -> None:
        norm(spec.layer_norm)
        for inner, n_out in zip(spec.linear, outputs, strict=True):
            linear(inner, d_model, n_out * d_model, 3.0)

    whole = ctranslate2.specs.TransformerSpec.from_config((2, 2), 8)
    for spec, words in ((whole.encoder.embeddings[0], source), (whole.decoder.embeddings, target)):
        spec.weight = random.standard_normal((len(words), d_model)).astype(np.float32)
    linear(whole.decoder.projection, d_model, len(target), 0.8)
    for stack in (whole.encoder, whole.decoder):
        norm(stack.layer_norm)
        for layer in stack.layer:
            attention(layer.self_attention, 3, 1)
            if stack is whole.decoder:
                attention(layer.attention, 1, 2, 1)
            norm(layer.ffn.layer_norm)
            linear(layer.ffn.linear_0, d_model, 20)
            linear(layer.ffn.linear_1, 20, d_model)
    whole.register_source_vocabulary(source)
    whole.register_target_vocabulary(target)
    whole.validate()
    whole.optimize()
    folder.mkdir(parents=True)
    whole.save(str(folder))
    return folder


def computed_positions(folder: Path, n_positions: int, d_model: int) -> NDArray[np.float32]:
    """The table [positions, d_model] that CTranslate2 adds to embeddings of 0: an encoder of zeros tells it."""
    encoder = ctranslate2.specs.TransformerEncoderSpec(1, 2, no_final_norm=True)
    encoder.embeddings[0].weight = np.zeros((4, d_model), np.float32)
    (layer,) = encoder.layer
    for norm in (layer.self_attention.layer_norm, layer.ffn.layer_norm):
        norm.gamma, norm.beta = np.ones(d_model, np.float32), np.zeros(d_model, np.float32)
    parts = (*layer.self_attention.linear, layer.ffn.linear_0, layer.ffn.linear_1)
    for spec, n_out in zip(parts, (3 * d_model, d_model, d_model, d_model), strict=True):
        spec.weight = np.zeros((n_out, d_model), np.float32)
    whole = ctranslate2.specs.TransformerEncoderModelSpec(encoder)
    whole.register_vocabulary(["<unk>", "<s>", "</s>", "word"])
    whole.validate()
    whole.optimize()
    folder.mkdir()
    whole.save(str(folder))
    found = ctranslate2.Encoder(str(folder), compute_type="float32", intra_threads=1).forward_batch([[3] * n_positions])
    return np.array(found.last_hidden_state)[0]


def sources_of(model: Path, count: int, *, longest: int = 14) -> list[list[str]]:
    """Sentences of words of the source vocabulary without special tokens, which end as a source of the model does."""
    config = settings_of(model)
    file = next(file for file in model.glob("*_vocabulary.json") if file.name.startswith(("shared", "source")))
    words = [word for word in json.loads(file.read_text()) if word[0] != "<"]
    random = np.random.default_rng(7)
    # Of the transformers library's models the input has an end, and the others' has none or gets one.
    needs_end = config["decoder_start_token"] != "<s>" and not config["add_source_eos"]
    return [
        [*(words[index] for index in random.integers(0, len(words), length)), *["</s>"] * needs_end]
        for length in random.integers(1, longest, count)
    ]


def settings_of(model: Path) -> dict[str, Any]:
    """What config.json says."""
    return json.loads((model / "config.json").read_text())


def translated(model: Path, sources: Sequence[Sequence[str]], options: SearchOptions, **more: Any) -> list[NBest]:
    """What CTranslate2 finds in float32, which of a model in 16 or 8 bits are the numbers that these stand for."""
    translator = ctranslate2.Translator(str(model), compute_type="float32", intra_threads=1)
    results = translator.translate_batch(
        [list(source) for source in sources],
        beam_size=options.beam,
        num_hypotheses=options.nbest,
        length_penalty=options.length_penalty,
        min_decoding_length=options.min_length,
        max_decoding_length=options.max_length,
        max_input_length=0,
        return_scores=True,
        **more,
    )
    return [
        [(tuple(tokens), score) for tokens, score in zip(result.hypotheses, result.scores, strict=True)]
        for result in results
    ]
