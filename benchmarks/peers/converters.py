"""The model of a bundle as other engines read it, with the same weights in float32.

    python -m benchmarks.peers.converters BUNDLE --ctranslate2 DIR --hugging-face DIR
    python -m benchmarks.peers.converters BUNDLE --hugging-face DIR --optimum DIR --optimum-python VENV/bin/python

Optimum exports the Hugging Face folder, so it needs one. It wants an older Transformers than the rest, and is therefore run
by another interpreter (benchmarks/peers/optimum.txt says what to install there); what its export cost is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.peers import hugging_face
from tfexport.bench.peers import TARGET_LIMIT
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.config import Side
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.models.layers import Attention, FeedForward, Layer
from tfexport.models.model import build_model
from tfexport.models.positions import PositionTable
from tfexport.models.transformer import Stack, Transformer

OPTIMUM_REQUIREMENTS = Path(__file__).with_name("optimum.txt")
HUGGING_FACE_EPS = 1e-5
"""Of the norms of Marian and Pegasus; a folder cannot say another one."""


def canonical_model(bundle: Bundle) -> Transformer:
    """The canonical model of a bundle, in float32 on the CPU.

    Raises:
        BundleError: it is a classifier's.
    """
    bundle.graph("decoder_step")
    model = build_model(bundle.config, load_file(bundle.weights))
    assert isinstance(model, Transformer)
    return model.eval()


# CTranslate2


def write_ctranslate2(model: Transformer, directory: Path, *, alignment_layer: int = -1) -> None:
    """Write a CTranslate2 model; int8 weights are made from it when it is loaded.

    Its tokens are our ids as decimal strings. Sources are given as the encoder reads them: nothing is added.

    Args:
        alignment_layer: whose cross-attention it tells, the mean of all heads as ours (its own default is the first head).

    Raises:
        RuntimeUnavailable: CTranslate2 is not installed.
        TfexportError: it has no such arithmetic.
    """
    try:
        from ctranslate2 import specs  # type: ignore[import-not-found]
    except ImportError as error:
        raise RuntimeUnavailable(
            f"CTranslate2 is not installed ({error.name} is missing). Add it with: pip install ctranslate2."
        ) from error

    config = model.config
    if not config.has_position_table:
        raise TfexportError(f"this writes position tables, not positions {config.positions}. Leave this peer out.")
    if config.norm_eps_of("norm") != config.norm_eps:
        raise TfexportError("a CTranslate2 model has one epsilon for all norms. Leave this peer out.")
    activation = specs.Activation.RELU if config.activation == "relu" else specs.Activation.GELU  # the exact one
    # As pre-norm and then changed, because a specification of post-norm has no place for a final norm.
    fields: dict[str, Any] = {"pre_norm": True, "activation": activation}
    without = {side: {"no_final_norm": not config.has_final_norm(side)} for side in get_args(Side)}
    encoder = specs.TransformerEncoderSpec(
        config.n_encoder_layers, config.encoder_heads, **fields, **without["encoder"]
    )
    alignment = {"alignment_layer": alignment_layer, "alignment_heads": 0}
    decoder = specs.TransformerDecoderSpec(
        config.n_decoder_layers, config.n_heads, **alignment, **fields, **without["decoder"]
    )
    (embeddings,) = encoder.embeddings
    embeddings.weight = _array(model.encoder.tokens.weight)
    target = model.encoder.tokens if model.decoder.tokens is None else model.decoder.tokens
    decoder.embeddings.weight = _array(target.weight)
    decoder.projection.weight = _array(model.output_matrix())
    if model.output_bias is not None:
        decoder.projection.bias = _array(model.output_bias)
    for spec, stack in ((encoder, model.encoder), (decoder, model.decoder)):
        spec.pre_norm = config.norm_first
        _ct2_stack(spec, stack)

    whole = specs.TransformerSpec(encoder, decoder)
    whole.register_source_vocabulary([str(index) for index in range(config.src_vocab_size)])
    whole.register_target_vocabulary([str(index) for index in range(config.tgt_vocab_size)])
    bos, eos = str(config.bos_id), str(config.eos_id)
    whole.config.bos_token = whole.config.decoder_start_token = bos
    whole.config.eos_token = eos
    # CTranslate2 wants one that both vocabularies have. It stands for words that are not in them, which no id does.
    in_both = 0 <= config.unk_id < min(config.src_vocab_size, config.tgt_vocab_size)
    whole.config.unk_token = str(config.unk_id if in_both else config.pad_id)
    whole.config.add_source_bos = whole.config.add_source_eos = False
    whole.config.layer_norm_epsilon = config.norm_eps
    whole.config.add_attribute(TARGET_LIMIT, config.max_target_length)
    whole.validate()
    whole.optimize()  # matrices that are equal are stored and held once
    with _new_folder(directory) as folder:
        whole.save(str(folder))


def _ct2_stack(spec: Any, stack: Stack) -> None:
    spec.scale_embeddings = np.float32(stack.scale)
    assert isinstance(stack.positions, PositionTable)
    spec.position_encodings.encodings = _array(stack.positions.table[stack.positions.offset :])
    if isinstance(stack.norm, nn.LayerNorm):
        _ct2_norm(spec.layer_norm, stack.norm)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):  # type: ignore[arg-type]
        assert isinstance(layer, Layer)
        sublayers = [layer_spec.self_attention, layer_spec.ffn]
        own = layer.self_attention
        assert isinstance(own, Attention)
        _ct2_linear(layer_spec.self_attention.linear[0], own.query, own.key, own.value)
        _ct2_linear(layer_spec.self_attention.linear[1], own.output)
        if hasattr(layer, "cross_attention"):
            cross = layer.cross_attention
            assert isinstance(cross, Attention)
            sublayers.insert(1, layer_spec.attention)
            _ct2_linear(layer_spec.attention.linear[0], cross.query)
            _ct2_linear(layer_spec.attention.linear[1], cross.key, cross.value)
            _ct2_linear(layer_spec.attention.linear[2], cross.output)
        feed_forward = layer.feed_forward
        assert isinstance(feed_forward, FeedForward)
        _ct2_linear(layer_spec.ffn.linear_0, feed_forward.hidden)
        _ct2_linear(layer_spec.ffn.linear_1, feed_forward.output)
        for index, sublayer in enumerate(sublayers):
            _ct2_norm(sublayer.layer_norm, layer.norms[index % len(layer.norms)])


def _ct2_linear(spec: Any, *linears: Any) -> None:
    """Linears that read the same states as one, their outputs side by side; a Conv1d of kernel 1 is one too."""
    weights = [linear.weight.squeeze(-1) if linear.weight.dim() == 3 else linear.weight for linear in linears]
    spec.weight = _array(torch.cat(weights))
    if linears[0].bias is not None:
        spec.bias = _array(torch.cat([linear.bias for linear in linears]))


def _ct2_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _array(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().contiguous().numpy()


# Hugging Face


def write_hugging_face(model: Transformer, directory: Path) -> None:
    """Write a folder that `AutoModelForSeq2SeqLM` of Transformers 4 and 5 reads.

    Raises:
        RuntimeUnavailable: Transformers is not installed.
        TfexportError: no model of Hugging Face has this arithmetic, or its folder cannot say it.
    """
    config = model.config
    scales = {1.0: False, math.sqrt(config.d_model): True}
    scaled = next((flag for scale, flag in scales.items() if math.isclose(scale, config.embedding_scale)), None)
    problems = {
        f"norm_eps {config.norm_eps:g}, only {HUGGING_FACE_EPS:g}": config.norm_eps != HUGGING_FACE_EPS,
        "two epsilons of norms": config.norm_eps_of("norm") != config.norm_eps,
        f"embedding_scale {config.embedding_scale:g}, only 1 and sqrt(d_model)": scaled is None,
        "pre-norm with two embedding matrices, Pegasus has one": config.norm_first and not config.tie_source_target,
    }
    found = [problem for problem, present in problems.items() if present]
    if found:
        raise TfexportError(f"a Hugging Face folder cannot say: {'; '.join(found)}. Leave this peer out.")
    try:
        theirs = hugging_face.convert(model)
    except ImportError as error:
        raise RuntimeUnavailable(
            f"Hugging Face is not installed ({error.name} is missing). Add it with: pip install transformers."
        ) from error

    theirs.config.scale_embedding = scaled
    theirs.config.update({TARGET_LIMIT: config.max_target_length, "dropout": 0.0})
    # Cloned: tensors that share memory are left out of the file by rules that depend on the version.
    weights = {name: tensor.detach().clone() for name, tensor in theirs.state_dict().items()}
    for side in ("encoder", "decoder"):
        # One length for both in Hugging Face. What fills the shorter table is never read.
        name = f"model.{side}.embed_positions.weight"
        missing = theirs.config.max_position_embeddings - len(weights[name])
        weights[name] = nn.functional.pad(weights[name], (0, 0, 0, missing))
    _tie(theirs.config, weights, config)
    theirs._keys_to_ignore_on_save = None  # the positions, which Hugging Face would compute again, otherwise ordered
    with _new_folder(directory) as folder:
        theirs.save_pretrained(folder, state_dict=weights)


def _tie(theirs: Any, weights: dict[str, Tensor], config: Any) -> None:
    """Say in their config which matrices are one, and leave only that one in `weights`.

    Where Hugging Face has no such combination the matrix is there twice, which changes no result.
    """
    sides = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"]
    if theirs.model_type == "marian":
        theirs.vocab_size, theirs.decoder_vocab_size = config.src_vocab_size, config.tgt_vocab_size
        theirs.share_encoder_decoder_embeddings = config.tie_source_target and config.tie_output
    theirs.tie_word_embeddings = config.tie_output
    if not config.tie_output:
        return
    del weights["lm_head.weight"]
    if config.tie_source_target:
        weights["model.shared.weight"] = weights[sides[1]]
        for name in sides:
            del weights[name]


# Optimum


@dataclass(frozen=True)
class Cost:
    """What an export took."""

    seconds: float
    """By the clock, start of the interpreter included."""
    memory: int
    """Bytes that the process held at most (maximum resident set size)."""


_OPTIMUM_EXPORT = """
import sys

from optimum.exporters.onnx import main_export
from optimum.utils import NormalizedTextConfig
from torch import nn
from transformers import AutoConfig
from transformers.models.marian.modeling_marian import MarianModel

source, target = sys.argv[1:]
config = AutoConfig.from_pretrained(source)
if config.vocab_size != getattr(config, "decoder_vocab_size", config.vocab_size):
    # Transformers 4 makes the decoder's embeddings as many as the encoder's, and Optimum draws example ids for both sides
    # from one vocabulary.
    plain = MarianModel.__init__

    def initialise(self, config):
        plain(self, config)
        self.decoder.embed_tokens = nn.Embedding(config.decoder_vocab_size, config.d_model, config.pad_token_id)

    MarianModel.__init__ = initialise
    if config.decoder_vocab_size < config.vocab_size:
        NormalizedTextConfig.VOCAB_SIZE = "decoder_vocab_size"
main_export(source, target, task="text2text-generation-with-past", device="cpu", do_validation=False)
"""
"""What Optimum's interpreter runs, which has no tfexport: what `ORTModelForSeq2SeqLM.from_pretrained(export=True)` calls."""


_LAUNCHER = """
import resource, subprocess, sys, time
started = time.monotonic()
code = subprocess.call(sys.argv[1:])
seconds = time.monotonic() - started
print(seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, code)
"""


def export_optimum(hugging_face_folder: Path, directory: Path, python: Path) -> Cost:
    """Optimum's ONNX export of a Hugging Face folder, encoder and decoder with key/value cache, run by `python`.

    Raises:
        TfexportError: it failed, or its interpreter is not there.
    """
    if shutil.which(python) is None:
        raise TfexportError(
            f"{python} cannot be run. Make a virtual environment with the packages of {OPTIMUM_REQUIREMENTS} and give "
            "its interpreter with --optimum-python."
        )
    with _new_folder(directory) as folder:
        code, cost, said = run_measured(
            [str(python), "-c", _OPTIMUM_EXPORT, str(hugging_face_folder.absolute()), str(folder.absolute())]
        )
        if code:
            raise TfexportError(
                f"Optimum's export ended with exit code {code}: {said} Check that {python} has the packages of "
                f"{OPTIMUM_REQUIREMENTS}."
            )
        # Nothing reads the source vocabulary's size here, and beam search takes this one for the number of logits.
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["vocab_size"] = config.get("decoder_vocab_size", config["vocab_size"])
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return cost


def run_measured(command: Sequence[str]) -> tuple[int, Cost, str]:
    """Run `command`, offline and without this environment's packages: its exit code, cost, and last line of output."""
    # By way of a small process: a child is counted with all the memory that its parent held when it was started.
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, *command]
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        launcher,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=True,
        env={**clean, "HF_HUB_OFFLINE": "1"},
    )
    *said, told = done.stdout.strip().splitlines()
    seconds, memory, code = told.split()
    cost = Cost(float(seconds), int(memory) * (1 if sys.platform == "darwin" else 1024))
    return int(code), cost, said[-1].strip() if said else "it said nothing."


@contextmanager
def _new_folder(directory: Path) -> Iterator[Path]:
    """A folder to write into, renamed to `directory` when the block ends well and removed when it does not.

    Raises:
        TfexportError: there is something at `directory` already, or it cannot be written.
    """
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise TfexportError(f"{directory} exists. Remove it, or give another folder.")
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(directory)
    except OSError as error:
        raise TfexportError(
            f"cannot write {directory}: {error.strerror or error}. Make room, or give another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write the model of a bundle for other engines.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--ctranslate2", type=Path, metavar="DIR", help="write a CTranslate2 model there")
    parser.add_argument("--hugging-face", type=Path, metavar="DIR", help="write a Hugging Face folder there")
    parser.add_argument("--optimum", type=Path, metavar="DIR", help="write Optimum's ONNX export there")
    parser.add_argument(
        "--optimum-python",
        type=Path,
        metavar="PATH",
        help="an interpreter with the packages of benchmarks/peers/optimum.txt",
    )
    options = parser.parse_args(arguments)
    if not (options.ctranslate2 or options.hugging_face or options.optimum):
        parser.error("give a folder to write: --ctranslate2, --hugging-face or --optimum")
    if options.optimum and not (options.hugging_face and options.optimum_python):
        parser.error("--optimum exports the folder of --hugging-face, with the interpreter of --optimum-python")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        model = canonical_model(open_bundle(options.bundle))
        if options.ctranslate2:
            write_ctranslate2(model, options.ctranslate2)
            print(f"ctranslate2: {options.ctranslate2}", flush=True)
        if options.hugging_face:
            write_hugging_face(model, options.hugging_face)
            print(f"hugging-face: {options.hugging_face}", flush=True)
        if options.optimum:
            cost = export_optimum(options.hugging_face, options.optimum, options.optimum_python)
            print(
                f"optimum: {options.optimum}, export {cost.seconds:.1f} s, peak memory {cost.memory / 2**20:.0f} MiB",
                flush=True,
            )
    except TfexportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
