"""Random models in JoeyNMT's own files, at uneven sizes, as JoeyNMT saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from makers.references.joeynmt import sinusoids

UNK, PAD, BOS, EOS = range(4)
D, FFN, HEADS, LENGTH = 24, 52, 3, 60
SOURCE, TARGET = 53, 41
SPECIALS = ["<unk>", "<pad>", "<s>", "</s>"]
MODELS: dict[str, dict[str, Any]] = {
    "pre": {"norm": "pre", "activation": "relu", "tied": (False, False), "layers": (3, 2)},
    "post": {"norm": "post", "activation": "gelu", "tied": (False, True), "layers": (1, 2)},
    "tied": {"norm": "pre", "activation": "swish", "tied": (True, True), "layers": (2, 1), "scale": False},
}


def config_of(name: str, **more: Any) -> dict[str, Any]:
    """As JoeyNMT 2 has it."""
    told = {"scale": True, **MODELS[name], **more}

    def stack(layers: int) -> dict[str, Any]:
        return {
            "type": "transformer",
            "num_layers": layers,
            "num_heads": HEADS,
            "hidden_size": D,
            "ff_size": FFN,
            "layer_norm": told["norm"],
            "activation": told["activation"],
            "dropout": 0.1,
            "freeze": False,
            "embeddings": {"embedding_dim": D, "scale": told["scale"], "dropout": 0.0},
        }

    return {
        "name": "random",
        "joeynmt_version": "2.3.0",
        "model_dir": "models/random",
        "data": {"src": {"lang": "de", "level": "word"}, "trg": {"lang": "en", "level": "word"}},
        "training": {"epochs": 1},
        "testing": {"beam_size": 5, "beam_alpha": 1.0},
        "model": {
            "initializer": "xavier_uniform",
            "tied_embeddings": told["tied"][0],
            "tied_softmax": told["tied"][1],
            "encoder": stack(told["layers"][0]),
            "decoder": stack(told["layers"][1]),
        },
    }


def random_state(name: str, seed: int) -> dict[str, Tensor]:
    """Random weights, norms and biases too. Tokens that are never generated have no probability, as in a trained model."""
    told = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}

    def put(name: str, *shape: int, scale: float = 1.0) -> None:
        state[name] = torch.randn(shape, generator=generator) * scale

    def linear(name: str, inner: int, outer: int, loud: float = 1.0) -> None:
        put(f"{name}.weight", outer, inner, scale=loud * inner**-0.5)
        put(f"{name}.bias", outer, scale=0.3)

    def norm(name: str) -> None:
        put(f"{name}.weight", D, scale=0.3)
        state[f"{name}.weight"] += 1.0
        put(f"{name}.bias", D, scale=0.1)

    tied_sides, tied_output = told["tied"]
    put("src_embed.lut.weight", SOURCE, D, scale=D**-0.5 if told.get("scale", True) else 1.0)
    if tied_sides:
        state["trg_embed.lut.weight"] = state["src_embed.lut.weight"]
    else:
        put("trg_embed.lut.weight", TARGET, D, scale=D**-0.5)
    loud = 2.5 if told["norm"] == "post" else 1.3
    sides: dict[str, list[tuple[str, str]]] = {
        "encoder": [("src_src_att", "layer_norm")],
        "decoder": [("trg_trg_att", "x_layer_norm"), ("src_trg_att", "dec_layer_norm")],
    }
    last = ""
    for (side, attentions), layers in zip(sides.items(), told["layers"], strict=True):
        state[f"{side}.pe.pe"] = sinusoids(LENGTH, D)
        for i in range(layers):
            layer = f"{side}.layers.{i}"
            for attention, its_norm in attentions:
                for part in ("k", "v", "q", "output"):
                    linear(f"{layer}.{attention}.{part}_layer", D, D, loud)
                norm(f"{layer}.{its_norm}")
            linear(f"{layer}.feed_forward.pwff_layer.0", D, FFN)
            linear(f"{layer}.feed_forward.pwff_layer.3", FFN, D)
            last = f"{layer}.feed_forward.layer_norm"
            norm(last)
        if told["norm"] == "pre":
            last = f"{side}.layer_norm"
            norm(last)
    output = state["trg_embed.lut.weight"] if tied_output else torch.randn(TARGET, D, generator=generator) * D**-0.5
    state["decoder.output_layer.weight"] = output
    state[f"{last}.bias"][0], state[f"{last}.weight"][0] = 10.0, 0.0
    output[:, 0] = 0.0
    output[[PAD, BOS], 0] = -5.0
    output[EOS] *= 2.0
    return state


def write_folder(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> Path:
    """A folder as JoeyNMT leaves it after training."""
    folder.mkdir(parents=True)
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in config.items()]
    (folder / "config.yaml").write_text("".join(lines))
    content = {
        "model_state": state,
        "optimizer_state": {"state": {}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]},
        "scheduler_state": None,
        "stats_state": {"steps": 100, "best_ckpt_score": np.float64(3.5)},
    }
    torch.save(content, folder / "100.ckpt")
    stems = ("s", "s" if config["model"]["tied_embeddings"] else "t")
    for side, stem in zip(("src", "trg"), stems, strict=True):
        size = len(state[f"{side}_embed.lut.weight"])
        words = [*SPECIALS, *(f"{stem}{index}" for index in range(4, size))]
        (folder / f"{side}_vocab.txt").write_text("\n".join(words) + "\n")
    return folder
