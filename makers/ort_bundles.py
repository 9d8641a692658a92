"""Bundles of the dialect `ort` alone, which are emitted in an instant: a test may have one for every model it thinks of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnxruntime
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file

from makers.tiny import randomised
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.bundle.writer import write_manifest
from tfexport.config import Activation, ModelConfig
from tfexport.contract import GraphSpec, Precision
from tfexport.exporter.graphs import write_graphs as write_all_graphs
from tfexport.exporter.weights import write_variant, write_weights
from tfexport.models.model import build_model
from tfexport.models.transformer import Transformer
from tfexport.runtimes.pytorch import TorchRuntime

CONFIG = ModelConfig(
    d_model=24,
    n_heads=3,
    d_ff=40,
    n_encoder_layers=2,
    n_decoder_layers=2,
    src_vocab_size=31,
    tgt_vocab_size=37,
    max_source_length=20,
    max_target_length=90,
    unk_id=0,
    pad_id=1,
    bos_id=2,
    eos_id=3,
)
"""No two sizes alike where that is possible; the head's 8 numbers are what GroupQueryAttention takes."""

Arrays = Mapping[str, NDArray[Any]]


@st.composite
def configs(draw: Callable[..., Any]) -> ModelConfig:
    """Models of every kind of arithmetic, with heads that GroupQueryAttention takes and others."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    n_heads, head_dim = one_of(1, 2, 3), one_of(8, 16, 24, 2, 3, 4, 12)
    source, target = one_of(7, 19), one_of(7, 23)
    tied, has_final_norm, has_embedding_norm, is_gated = (draw(st.booleans()) for _ in range(4))
    positions = one_of("sinusoidal", "learned", "stored", "none")
    return ModelConfig(
        d_model=n_heads * head_dim,
        n_heads=n_heads,
        n_encoder_heads=one_of(0, *(count for count in (1, 2, 3, 6) if n_heads * head_dim % count == 0)),
        d_ff=one_of(1, 5, 32, 40),
        n_encoder_layers=one_of(1, 2, 3),
        n_decoder_layers=one_of(1, 2, 3),
        src_vocab_size=source,
        tgt_vocab_size=source if tied else target,
        max_source_length=one_of(1, 5, 12),
        max_target_length=one_of(1, 2, 5, 12),
        unk_id=0,
        pad_id=1,
        bos_id=2,
        eos_id=3,
        activation=one_of(*get_args(Activation)),
        norm_first=draw(st.booleans()),
        final_norm=has_final_norm,
        final_norm_in=one_of("both", "encoder", "decoder") if has_final_norm else "both",
        shared_norm=draw(st.booleans()),
        norm=one_of("layer", "rms"),
        norm_eps=one_of(1e-5, 1e-2),
        final_norm_eps=one_of(0.0, 1e-1) if has_final_norm else 0.0,
        embedding_norm_eps=one_of(0.0, 1e-1) if has_embedding_norm else 0.0,
        embedding_norm=has_embedding_norm,
        embedding_norm_in=one_of("both", "encoder", "decoder") if has_embedding_norm else "both",
        positions=positions,
        position_offset=0 if positions == "none" else one_of(0, 2),
        feed_forward="linear" if is_gated else one_of("linear", "conv1d"),
        gated=is_gated,
        attention_bias=draw(st.booleans()),
        feed_forward_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        tie_source_target=tied,
        tie_output=draw(st.booleans()),
        embedding_scale=one_of(1.0, 0.5, (n_heads * head_dim) ** 0.5),
    )


ONE_CHANGE = [
    {},
    {"norm_first": True},
    {"norm_first": True, "final_norm": True},
    {"shared_norm": True},
    {"norm_first": True, "shared_norm": True},
    {"final_norm": True},
    {"activation": "gelu"},
    {"feed_forward": "conv1d"},
    {"positions": "learned", "position_offset": 2},
    {"position_offset": 3},
    {"embedding_scale": 24**0.5},
    {"tgt_vocab_size": 31, "tie_source_target": True},
    {"tie_output": True},
    {"tgt_vocab_size": 31, "tie_source_target": True, "tie_output": True},
    {"attention_bias": False},
    {"feed_forward_bias": False},
    {"output_bias": True},
    {"n_heads": 2},
    {"n_heads": 1},
    {"n_encoder_heads": 2},
    {"d_model": 64, "n_heads": 4, "n_encoder_heads": 2},
    {"positions": "none"},
    {"final_norm": True, "final_norm_in": "encoder"},
    {"norm_first": True, "final_norm": True, "final_norm_in": "decoder"},
    {"embedding_norm": True, "embedding_norm_in": "encoder"},
    {"final_norm": True, "final_norm_eps": 0.5, "embedding_norm": True, "embedding_norm_eps": 0.1},
    {"norm_first": True, "final_norm": True, "final_norm_eps": 0.5},
    {"norm": "rms", "embedding_norm": True, "final_norm": True, "feed_forward": "conv1d"},
    {"norm": "rms", "norm_first": True, "shared_norm": True, "gated": True, "activation": "silu"},
    {"d_model": 64, "n_heads": 4},
    {"n_encoder_layers": 1, "n_decoder_layers": 3},
    {"tgt_vocab_size": 4},
    {"max_source_length": 1, "max_target_length": 1},
]
"""What each kind of model changes of `CONFIG`."""


def random_model(config: ModelConfig, *, seed: int = 0) -> Transformer:
    model = randomised(Transformer(config), seed=seed)
    assert isinstance(model, Transformer)
    return model


def write_graphs(model: Transformer, folder: Path, precision: Precision = "float32") -> list[GraphSpec]:
    """The graphs of a precision in the dialect `ort` and what they point to, in `folder`, which is made."""
    return _written(model, folder, precision, dialects=("ort",))


def _written(model: Transformer, folder: Path, precision: Precision, **options: Any) -> list[GraphSpec]:
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(model, "float32", folder)
    if precision != "float32":
        write_variant(model, precision, folder)
    return write_all_graphs(model.config, precision, folder, **options)


def write_bundle(
    model: Transformer, folder: Path, precisions: Sequence[Precision] = ("float32",), **options: Any
) -> Bundle:
    """The bundle of a model, without the checks and the tokenizers of an export.

    Args:
        options: options of `exporter.graphs.write_graphs`. With one of the `dialects` it takes a third of the time.
    """
    graphs = [graph for precision in precisions for graph in _written(model, folder, precision, **options)]
    write_manifest(folder, model.config, graphs, {"source": {"sha256": "", "family": "native", "given": {}}})
    return open_bundle(folder)


def reference_of(bundle: Bundle) -> TorchRuntime:
    """PyTorch on the weights of such a bundle."""
    model = build_model(bundle.config, load_file(bundle.weights))
    assert isinstance(model, Transformer)
    return TorchRuntime(model)


def session_of(path: Path, **options: Any) -> onnxruntime.InferenceSession:
    """A session of one thread, with these attributes of its options."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 3
    for name, value in options.items():
        setattr(settings, name, value)
    return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def outputs_of(session: onnxruntime.InferenceSession, inputs: Arrays) -> dict[str, NDArray[Any]]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(inputs)), strict=True))


def random_sources(config: ModelConfig, lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(4, config.src_vocab_size, length).tolist() for length in lengths]


def with_end(model: Transformer, more: float) -> Transformer:
    """The model with `more` of a liking for eos; with -30 its outputs run to the limit."""
    assert model.output_bias is not None
    with torch.no_grad():
        model.output_bias[model.config.eos_id] += more
    return model
