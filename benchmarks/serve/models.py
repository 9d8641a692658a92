"""The models that are served: a trained one, and the same one at the size of "Attention Is All You Need".

Each is a bundle in float32 and int8, with the folders of the other engines beside it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.base_model import BASE
from benchmarks.peers.converters import canonical_model, write_ctranslate2, write_hugging_face
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats import native
from tfexport.models.transformer import Transformer
from tfexport.text.tokenizers import TextTokenizer

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT.parent / "shared" / "checkpoints" / "tutorial-de-en"
EMBEDDED = ROOT / "tfexport" / "assets" / "de-en.safetensors"
TUTORIAL_FLAGS = ("--heads", "8", "--src-tokenizer", "spacy:de", "--lowercase")
"""What the file of the tutorial model does not say."""

_LAYER = re.compile(r"(?P<stack>encoder|decoder)\.layers\.(?P<number>\d+)\.(?P<rest>.+)")


def prepare(folder: Path) -> list[Path]:
    """Bundles `small` and `base` in `folder`, of the tutorial model where there is one, else of the embedded model. What is
    there already is kept.
    """
    small, base = folder / "small", folder / "base"
    if not small.exists():
        _export_small(small)
    if not base.exists():
        bundle = open_bundle(small)
        model = canonical_model(bundle)
        config, weights = widened(model.config, model.state_dict())
        tokenizers = native.Tokenizers(*(_tokenizer(bundle, side) for side in ("source", "target")))
        native.save(folder / "base.safetensors", weights, config, tokenizers, torch.float32)
        export(load_checkpoint(folder / "base.safetensors", {}), base, precisions=("int8",), gate=None)
    for bundle_folder in (small, base):
        _write_peers(open_bundle(bundle_folder))
    return [small, base]


def _export_small(directory: Path) -> None:
    given = [str(EMBEDDED)]
    if TUTORIAL.is_dir():
        given = [str(TUTORIAL / "model.pt"), *TUTORIAL_FLAGS]
        given += [f"--{side}-vocab={TUTORIAL / f'{side}_vocab.json'}" for side in ("src", "tgt")]
    command = [sys.executable, "-m", "tfexport", "export", *given, "-o", str(directory), "--precision", "fp32,int8"]
    subprocess.run(command, check=True)


def _tokenizer(bundle: Bundle, side: str) -> TextTokenizer:
    found = bundle.tokenizer(side)
    assert found is not None
    return found


def _write_peers(bundle: Bundle) -> None:
    model, name = canonical_model(bundle), bundle.directory.name
    for suffix, write in (("ct2", write_ctranslate2), ("hf", write_hugging_face)):
        folder = bundle.directory.with_name(f"{name}.{suffix}")
        try:
            if not folder.exists():
                write(model, folder)
        except TfexportError as error:
            print(f"{name}: {error}", flush=True)


def widened(config: ModelConfig, weights: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A model of the base size or a little more that computes what a smaller one does, but for rounding.

    So its outputs end where text ends, though it was not trained: random weights decode endless repetitions. Each feature
    stands there several times, side by side, and products with it are divided by that number. Layers that are added change
    nothing, as their sublayers add zeros. Their products take as long as any.
    """
    times = -(-BASE.d_model // config.d_model)
    hidden = -(-BASE.d_ff // config.d_ff)
    layers = {"encoder": config.n_encoder_layers, "decoder": config.n_decoder_layers}
    wanted = {"encoder": BASE.n_encoder_layers, "decoder": BASE.n_decoder_layers}
    found = {name: _wide(name, tensor, config, times, hidden) for name, tensor in weights.items()}
    for name, tensor in list(found.items()):
        place = _LAYER.fullmatch(name)
        if place is None or int(place["number"]) != layers[place["stack"]] - 1:
            continue
        stack, rest = place["stack"], place["rest"]
        for number in range(layers[stack], wanted[stack]):
            adds = rest.startswith(("self_attention.output", "cross_attention.output", "feed_forward.output"))
            found[f"{stack}.layers.{number}.{rest}"] = torch.zeros_like(tensor) if adds else tensor.clone()
    if not config.norm_first:
        _normalise_once(found, layers, wanted)
    if config.tie_output:  # the matrix is that of the embeddings, which is not divided
        for part in ("weight", "bias"):
            found[f"decoder.norm.{part}"] /= times
    size = {"d_model": times * config.d_model, "d_ff": hidden * config.d_ff}
    kept = {**size, "positions": "learned", "position_offset": 0}
    # The scale of embeddings is the root of their number, as other engines have it; the table makes up for it.
    if config.embedding_scale == config.d_model**0.5 and not config.tie_output:
        kept["embedding_scale"] = size["d_model"] ** 0.5
        for stack in layers:
            found[f"{stack}.tokens.weight"] /= times**0.5
    return replace(config, n_encoder_layers=wanted["encoder"], n_decoder_layers=wanted["decoder"], **kept), found


def _wide(name: str, tensor: Tensor, config: ModelConfig, times: int, hidden: int) -> Tensor:
    outputs = hidden if ".feed_forward.hidden." in name else times
    inputs = hidden if ".feed_forward.output." in name else times
    if name == "output_bias":
        return tensor.clone()
    if name == "output_weight":
        return tensor.repeat_interleave(times, 1) / times
    if name.endswith((".tokens.weight", ".positions.table")):
        return tensor.repeat_interleave(times, 1)
    if tensor.ndim == 2:
        tensor = tensor.repeat_interleave(inputs, 1) / inputs
    tensor = tensor.repeat_interleave(outputs, 0)
    # A query times a key is `times` as large, of which the attention's own scale takes the root.
    return tensor / times**0.5 if ".query." in name else tensor


def _normalise_once(found: dict[str, Tensor], layers: Mapping[str, int], wanted: Mapping[str, int]) -> None:
    """Let added layers of post-norm get and give features that are normalised; the last has the weights of the norm."""
    for stack, last in (("encoder", 1), ("decoder", 2)):
        for number in range(layers[stack] - 1, wanted[stack]):
            for norm in range(last + 1):
                name = f"{stack}.layers.{number}.norms.{norm}"
                is_last = norm == last
                if number == layers[stack] - 1 and not is_last:
                    continue
                if is_last and number == wanted[stack] - 1:
                    continue
                found[f"{name}.weight"] = torch.ones_like(found[f"{name}.weight"])
                found[f"{name}.bias"] = torch.zeros_like(found[f"{name}.bias"])


def model_of(config: ModelConfig, weights: Mapping[str, Tensor]) -> Transformer:
    """A model with these weights, for tests."""
    model = Transformer(config)
    model.load_state_dict(dict(weights))
    return model.eval()
