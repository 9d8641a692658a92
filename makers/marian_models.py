"""Random models in Marian's own files, at uneven sizes, as Marian saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

D, FFN, HEADS = 24, 52, 3
SOURCE_WORDS, TARGET_WORDS = 53, 41

_USUAL: dict[str, Any] = {
    "type": "transformer",
    "version": "v1.12.0",
    "dim-emb": D,
    "enc-depth": 2,
    "dec-depth": 3,
    "transformer-heads": HEADS,
    "transformer-dim-ffn": FFN,
    "transformer-ffn-depth": 2,
    "transformer-ffn-activation": "swish",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-no-projection": False,
    "transformer-decoder-autoreg": "self-attention",
    "transformer-guided-alignment-layer": "last",
    "transformer-train-position-embeddings": False,
    "tied-embeddings": False,
    "tied-embeddings-src": False,
    "tied-embeddings-all": False,
    "skip": True,
    "layer-normalization": False,
    "right-left": False,
    "input-types": [],
    "lemma-dim-emb": 0,
}
_PRE_NORM = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
MODELS: dict[str, dict[str, Any]] = {
    "post-norm": {"tied-embeddings-all": True},
    "pre-norm": {**_PRE_NORM, "transformer-ffn-activation": "relu", "transformer-postprocess-emb": "nd"},
    "gelu": {"transformer-ffn-activation": "gelu", "tied-embeddings": True, "enc-depth": 3, "dec-depth": 1},
    "old": {"tied-embeddings-src": True, "output-omit-bias": True, "transformer-ffn-activation": "relu"},
    "tied-layers": {"tied-embeddings": True, "transformer-tied-layers": [1, 1, 3]},
    "trained-positions": {
        **_PRE_NORM,
        "transformer-postprocess-top": "",
        "tied-embeddings-all": True,
        "transformer-train-position-embeddings": True,
    },
}
"""What is not as usual; "old" has its output as [in, out]."""


def options_of(name: str, **more: Any) -> dict[str, Any]:
    options = {**_USUAL, **MODELS[name], **more}
    shared = options["tied-embeddings-all"] or options["tied-embeddings-src"]
    return {**options, "dim-vocabs": [SOURCE_WORDS, SOURCE_WORDS if shared else TARGET_WORDS]}


def random_arrays(name: str, seed: int, *, end: float = 1.5) -> dict[str, NDArray[Any]]:
    """The arrays of a random model; norms and biases too, for ones and zeros would hide a swapped pair.

    Args:
        end: how much likelier the end is than other tokens.
    """
    random = np.random.default_rng(seed)
    options = options_of(name)
    arrays: dict[str, NDArray[Any]] = {}

    def put(name: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> None:
        arrays[name] = (mean + scale * random.standard_normal(shape)).astype(np.float32)

    def norm(name: str, suffix: str) -> None:
        put(f"{name}_ln_scale{suffix}", 1, D, scale=0.3, mean=1.0)
        put(f"{name}_ln_bias{suffix}", 1, D, scale=0.1)

    source, target = options["dim-vocabs"]
    if options["tied-embeddings-all"] or options["tied-embeddings-src"]:
        put("Wemb", source, D, scale=D**-0.5)
    else:
        put("encoder_Wemb", source, D, scale=D**-0.5)
        put("decoder_Wemb", target, D, scale=D**-0.5)
    suffix = "_pre" if options["transformer-preprocess"] else ""
    for side, depth in (("encoder", options["enc-depth"]), ("decoder", options["dec-depth"])):
        for number in range(1, depth + 1):
            layer = f"{side}_l{number}"
            for attention in ("self", "context")[: 1 + (side == "decoder")]:
                for part in "qkvo":
                    # Random layers change a token little: a decoder would say the same again and again, and to all.
                    loud = (3.0 if part in "qk" else 2.5) if not suffix else 1.5 if part in "qk" else 1.0
                    put(f"{layer}_{attention}_W{part}", D, D, scale=D**-0.5 * loud)
                    put(f"{layer}_{attention}_b{part}", 1, D, scale=0.3)
                norm(f"{layer}_{attention}_Wo", suffix)
            put(f"{layer}_ffn_W1", D, FFN, scale=D**-0.5)
            put(f"{layer}_ffn_b1", 1, FFN, scale=0.3)
            put(f"{layer}_ffn_W2", FFN, D, scale=FFN**-0.5)
            put(f"{layer}_ffn_b2", 1, D, scale=0.3)
            norm(f"{layer}_ffn_ffn", suffix)
        if "n" in options["transformer-postprocess-emb"]:
            norm(f"{side}_emb", "_pre")
        if options["transformer-postprocess-top"]:
            norm(f"{side}_top", "")
    if not (options["tied-embeddings"] or options["tied-embeddings-all"]):
        put("decoder_ff_logit_out_W" if name == "old" else "decoder_ff_logit_out_Wt", D, target, scale=D**-0.5)
        if name != "old":
            arrays["decoder_ff_logit_out_Wt"] = np.ascontiguousarray(arrays["decoder_ff_logit_out_Wt"].T)
    if not options.get("output-omit-bias"):
        put("decoder_ff_logit_out_b", 1, target, scale=0.3)
        arrays["decoder_ff_logit_out_b"][0, 0] += end
    else:
        arrays["decoder_ff_logit_out_W"][:, 0] *= 1 + end
    if options["transformer-train-position-embeddings"]:
        put("Wpos", 30, D, scale=D**-0.5)
    tied = options.get("transformer-tied-layers")
    return {
        name: array
        for name, array in arrays.items()
        if not tied or not name.startswith("decoder_l") or int(name[9]) in tied
    }


def words_of(size: int, stem: str) -> dict[str, int]:
    return {"</s>": 0, "<unk>": 1, **{f"{stem}{index}": index for index in range(2, size)}}


def write_model(path: Path, arrays: dict[str, NDArray[Any]], options: dict[str, Any]) -> Path:
    """Write a model.npz, whose settings are the bytes of a string in C."""
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items())
    np.savez(path, **arrays, **{"special:model.yml": np.frombuffer(text.encode() + b"\0", dtype=np.int8)})
    return path


def write_folder(folder: Path, arrays: dict[str, NDArray[Any]], options: dict[str, Any]) -> Path:
    """A folder as Marian leaves it: the model, vocabularies and the decoder's settings."""
    folder.mkdir(parents=True)
    write_model(folder / "model.npz", arrays, options)
    for name, size, stem in zip(("src", "tgt"), options["dim-vocabs"], ("s", "t"), strict=True):
        words = words_of(size, stem)
        text = "".join(f"{json.dumps(word)}: {index}\n" for word, index in words.items())
        (folder / f"vocab.{name}.yml").write_text(text)
    (folder / "model.npz.decoder.yml").write_text(
        "models:\n  - /home/trainer/model.npz\nvocabs:\n  - /home/trainer/vocab.src.yml\n  - /home/trainer/vocab.tgt.yml\n"
        "beam-size: 6\nnormalize: 1\nword-penalty: 0\n"
    )
    return folder
