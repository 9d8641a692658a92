"""TensorRT for RTX engines of random models: how many are built, are refused before that with a reason, or fail.

    python -m fuzz.models.engines [--models 60] [--seed 0] [--gpus sm80,sm89,sm120,portable] [--keep]

Heads of 4 to 128 numbers, odd widths, depths, lengths and vocabularies are drawn at random, in the arithmetic of each
family and in changes of it, in fp32, fp16 and bf16. Before a build in half precision, the graphs as TensorRT gets them and
those of the bundle run on ONNX Runtime's CPU provider: every output has the same bits. With --keep there is fp16 alone, and
random modules of each model stay in float32. The exit code is 1 where an engine fails or a bit differs. No GPU is needed,
and none is used.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fuzz.models.random_models import other_heads, random_model
from makers.engine_bundles import different_outputs, write_bundle
from tfexport import contract, graph_contract
from tfexport.config import ModelConfig
from tfexport.contract import FLOATS
from tfexport.errors import TfexportError
from tfexport.exporter.engine_plan import LengthPlan
from tfexport.exporter.engine_request import EngineRequest
from tfexport.exporter.weights import write_variant
from tfexport.graph_checks.session import HALVES
from tfexport.graphs.portable import modules_in_half
from tfexport.graphs.stored_weights import StoredWeights
from tfexport.models.transformer import Transformer

GPUS = ("sm80", "sm89", "sm120", "portable")

FAMILIES: dict[str, dict[str, Any]] = {
    "tutorial": {},
    "annotated": {"norm_first": True, "final_norm": True, "output_bias": True},
    "per-head": {"shared_norm": True, "feed_forward": "conv1d", "attention_bias": False},
    "torch": {"activation": "gelu", "final_norm": True},
    "marian": {"activation": "silu", "output_bias": True, "tie_source_target": True, "tie_output": True},
    "bart": {"positions": "learned", "position_offset": 2, "embedding_norm": True, "activation": "gelu"},
    "m2m_100": {"norm_first": True, "final_norm": True, "position_offset": 2, "tie_output": True},
    "t5": {
        **{"norm": "rms", "norm_first": True, "final_norm": True, "positions": "relative", "max_distance": 20},
        **{"attention_bias": False, "feed_forward_bias": False, "gated": True, "activation": "gelu_tanh"},
    },
    "classifier": {"n_classes": 3, "n_decoder_layers": 0, "tgt_vocab_size": 0},
}
"""What the arithmetic of each family differs in from that of the paper. `_changes` differ further."""


def random_config(chosen: random.Random, family: str) -> ModelConfig:
    """A small model of this family."""
    heads, head_dim = chosen.choice((1, 2, 3, 4, 5, 8)), chosen.choice((8 * chosen.randint(1, 16), *_odd_heads(chosen)))
    has_own_heads = chosen.random() < 0.3  # d_model need not be what the heads are together
    words = chosen.choice((chosen.randint(6, 60), chosen.randint(1000, 5000)))
    sizes = {
        "d_model": chosen.randint(6, 300) if has_own_heads else heads * head_dim,
        "n_heads": heads,
        "d_head": head_dim if has_own_heads else 0,
        "d_ff": chosen.randint(1, 400),
        "n_encoder_layers": chosen.randint(1, 4),
        "n_decoder_layers": chosen.randint(1, 4),
        "src_vocab_size": words,
        "tgt_vocab_size": words if FAMILIES[family].get("tie_source_target") else chosen.randint(6, 3000),
        "max_source_length": chosen.choice((1, 7, 50, 100, 200)),
        "max_target_length": chosen.choice((1, 9, 50, 100, 200)),
    }
    ids = {"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3}
    config = ModelConfig(**{**sizes, **ids, **FAMILIES[family]})
    return config if config.is_classifier else config.replace(**_changes(chosen, config))


def _changes(chosen: random.Random, config: ModelConfig) -> dict[str, Any]:
    """What a model may have in place of what its family has: nothing for many, and several things for some."""
    changes: dict[str, Any] = {"n_encoder_heads": other_heads(chosen, config.d_attention)}
    if chosen.random() < 0.2:
        changes |= {"positions": "none", "position_offset": 0, "max_distance": 0}
    if chosen.random() < 0.2:
        changes |= {
            "final_norm": True,
            "final_norm_in": chosen.choice(("encoder", "decoder")),
            "final_norm_eps": chosen.choice((0.0, 1e-3)),
        }
    if chosen.random() < 0.2:
        changes |= {"norm": "rms", "embedding_norm": chosen.random() < 0.5}
    if chosen.random() < 0.2:
        changes |= {"embedding_norm": True, "embedding_norm_in": chosen.choice(("encoder", "decoder"))}
    if chosen.random() < 0.2:
        changes |= {"gated": True, "feed_forward": "linear", "activation": chosen.choice(("silu", "gelu_tanh"))}
    return changes


def _odd_heads(chosen: random.Random) -> list[int]:
    """Sizes of heads that are seldom multiples of 8: small ones twice as often."""
    return [chosen.randint(4, 128), chosen.randint(4, 32), chosen.randint(4, 32)]


def random_modules(model: Transformer, chosen: random.Random, folder: Path) -> list[str]:
    """Some of the modules that compute in half precision in the graphs of fp16; `folder` is for weights."""
    folder.mkdir()
    write_variant(model, "float16", folder)
    stored = StoredWeights(folder / contract.weights_file("float16"))
    graphs = graph_contract.graphs_of(model.config, "float16")
    modules = sorted({module for graph in graphs for module in modules_in_half(graph, model.config, stored)})
    return chosen.sample(modules, chosen.randint(1, len(modules)))


def check(
    config: ModelConfig, seed: int, folder: Path, gpus: Sequence[str], *, keep_modules: bool = False
) -> Counter[str]:
    """Counts of what was built, was refused, failed or differed; each fault is printed.

    Args:
        keep_modules: fp16 alone, in which random modules stay in float32.
    """
    plan = LengthPlan(max_batch=8, max_beam=4, max_source=128, cache=(32,))
    found: Counter[str] = Counter()
    requests = {
        (name, gpu): EngineRequest(plan, (FLOATS[name],), (gpu,), "tensorrt_rtx", 8 << 30)
        for name in (("fp16",) if keep_modules else FLOATS)
        for gpu in gpus
    }
    try:
        for request in requests.values():
            request.check(config)
            request.costs(config, lambda _: None)
    except TfexportError as reason:
        print(f"seed {seed}: refused: {reason}", flush=True)
        return Counter({"refused": len(requests)})
    model = random_model(config, seed)
    kept = random_modules(model, random.Random(seed), folder / "modules") if keep_modules else []
    bundle = write_bundle(model, folder / "bundle", {"float16": kept})
    for precision in () if kept else HALVES:  # attention that is written out rounds otherwise
        different = [*different_outputs(bundle, precision, folder / precision)]  # type: ignore[arg-type]
        found["differ"] += bool(different)
        if different:
            print(f"seed {seed}: other bits in {', '.join(different)}\n    {config}", flush=True)
    for (name, gpu), request in requests.items():
        try:
            found["engines"] += len(request.build(bundle.directory, lambda engine, size: None))
            found["built"] += 1
        except Exception as error:  # whatever it is, it comes after the checks
            found["failed"] += 1
            print(f"seed {seed}: {name} for {gpu}: {type(error).__name__}: {error}\n    {config}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Engines of random models.")
    parser.add_argument("--models", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", type=lambda names: names.split(","), default=list(GPUS))
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.models):
        began, family = time.monotonic(), [*FAMILIES][seed % len(FAMILIES)]
        config = random_config(random.Random(seed), family)
        with tempfile.TemporaryDirectory() as temporary:
            found = check(config, seed, Path(temporary), options.gpus, keep_modules=options.keep)
        total += found
        sizes = f"d_model {config.d_model}, {config.n_heads} heads of {config.head_dim}"
        print(f"seed {seed}, {family}, {sizes}: {dict(found)}, {time.monotonic() - began:.0f} s", flush=True)
    precisions = "fp16 with modules in float32" if options.keep else ", ".join(FLOATS)
    print(
        f"{options.models} models for {', '.join(options.gpus)} in {precisions}: {total['built']} built "
        f"({total['engines']} engines), {total['refused']} refused, {total['failed']} failed, {total['differ']} with other "
        "bits"
    )
    return 1 if total["failed"] or total["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
