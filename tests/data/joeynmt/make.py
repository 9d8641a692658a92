"""Makes the folder `model` with JoeyNMT 2.3.0 itself, and what its own search finds with it.

    PYTHONPATH=joeynmt python make.py

Weights are random, norms and biases too; of some random models the one is taken that says most different things of
different sentences, and ends some of them. The position tables of 5000 rows are cut to 40, which keeps the files small.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from joeynmt.config import _check_special_symbols
from joeynmt.model import build_model
from joeynmt.search import search
from joeynmt.vocabulary import Vocabulary

HERE = Path(__file__).parent
N_SOURCE, N_TARGET, N_ROWS, MAX_LENGTH = 25, 22, 40, 11
UNK, PAD, BOS, EOS = range(4)
SEARCHES = ((1, -1.0, 200, 1), (4, 1.0, 200, 1), (4, -1.0, 60, 4), (8, 0.6, 60, 8))
"""Beam, beam_alpha, sentences, hypotheses."""


def stack(layers: int) -> dict[str, Any]:
    sizes = {"num_layers": layers, "num_heads": 3, "hidden_size": 12, "ff_size": 14}
    embeddings = {"embedding_dim": 12, "scale": True, "dropout": 0.0}
    return {
        "type": "transformer",
        **sizes,
        "layer_norm": "pre",
        "activation": "gelu",
        "dropout": 0.1,
        "embeddings": embeddings,
    }


CONFIG = {
    "name": "random",
    "joeynmt_version": "2.3.0",
    "data": {"src": {"lang": "de", "level": "word"}, "trg": {"lang": "en", "level": "word"}},
    "training": {"epochs": 1},
    "testing": {"beam_size": 4, "beam_alpha": 1.0},
    "model": {"tied_embeddings": False, "tied_softmax": False, "encoder": stack(2), "decoder": stack(1)},
}


def randomise(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                noise = 1 + 0.3 * noise if name.endswith("weight") else 0.2 * noise
            elif parameter.ndim == 1:
                noise *= 0.3
            else:
                noise *= (3.0 if "src_trg_att" in name or "output_layer" in name else 1.5) * parameter.shape[1] ** -0.5
            parameter.copy_(noise)
        # JoeyNMT's greedy search may write padding, which a trained model does not.
        model.decoder.layer_norm.bias[0], model.decoder.layer_norm.weight[0] = 10.0, 0.0
        model.decoder.output_layer.weight[:, 0] = 0.0
        model.decoder.output_layer.weight[PAD, 0] = -5.0
    model.eval()


def batch_of(source: list[int]) -> Any:
    """What `search` reads of a batch of one sentence."""
    src = torch.tensor([source])
    told = {"src": src, "src_length": torch.tensor([len(source)]), "src_mask": (src != PAD)[:, None]}
    return SimpleNamespace(**told, has_trg=False, trg_prompt_mask=None)


def found(model: Any, source: list[int], beam: int, alpha: float, kept: int) -> list[tuple[list[int], float]]:
    """Hypotheses and scores, without what fills the list up to `kept`; of greedy search the sum over its tokens."""
    settings = {"max_output_length": MAX_LENGTH, "beam_size": beam, "beam_alpha": alpha, "n_best": kept}
    ids, scores, _ = search(model=model, batch=batch_of(source), return_prob="hyp", **settings)
    if beam == 1:
        return [(ids[0].tolist(), float(scores[0].sum()))]
    hypotheses = [
        (row[: row.index(EOS) + 1] if EOS in row else [token for token in row if token != PAD], float(score))
        for row, (score,) in zip(ids.tolist(), scores, strict=True)
    ]
    return [(tokens, score) for tokens, score in hypotheses if (tokens, score) != ([UNK], -1.0)]


def main() -> None:
    symbols = SimpleNamespace(**_check_special_symbols({}))
    source_words = Vocabulary([f"s{k}" for k in range(4, N_SOURCE)], symbols)
    target_words = Vocabulary([f"t{k}" for k in range(4, N_TARGET)], symbols)
    model = build_model(CONFIG["model"], source_words, target_words)
    for side in (model.encoder, model.decoder):
        side.pe.pe = side.pe.pe[:, :N_ROWS].clone()
    draw = random.Random(3)
    sources = [[*(draw.randrange(4, N_SOURCE) for _ in range(draw.randint(1, 9))), EOS] for _ in range(200)]
    targets = [[BOS, *(draw.randrange(4, N_TARGET) for _ in range(7))] for _ in range(5)]

    def variety(seed: int) -> int:
        randomise(model, seed)
        best = [found(model, source, 1, -1.0, 1)[0][0] for source in sources[:40]]
        ended = sum(tokens[-1] == EOS for tokens in best)
        return len(set(map(tuple, best))) + 2 * min(ended, len(best) - ended, 8)

    randomise(model, max(range(20), key=variety))
    folder = HERE / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    source_words.to_file(folder / "src_vocab.txt")
    target_words.to_file(folder / "trg_vocab.txt")
    content = {"model_state": model.state_dict(), "optimizer_state": {}, "stats_state": {"steps": 1}}
    torch.save(content, folder / "1.ckpt")
    logits, hypotheses = [], []
    for source, target in zip(sources, targets, strict=False):
        batch = batch_of(source)
        mask = torch.ones(1, 1, len(target), dtype=torch.bool)
        with torch.no_grad():
            told = {"src": batch.src, "src_mask": batch.src_mask, "src_length": batch.src_length}
            logits.append(model._encode_decode(**told, trg_input=torch.tensor([target]), trg_mask=mask)[0][0].tolist())
    for beam, alpha, count, kept in SEARCHES:
        lists = [found(model, source, beam, alpha, kept) for source in sources[:count]]
        rounded = [[[tokens, round(score, 6)] for tokens, score in one] for one in lists]
        hypotheses.append({"beam": beam, "penalty": alpha, "nbest": kept, "hypotheses": rounded})
    rounded_logits = [[[round(x, 5) for x in row] for row in one] for one in logits]
    expected = {"sources": sources, "targets": targets, "logits": rounded_logits, "found": hypotheses}
    (HERE / "expected.json").write_text(json.dumps({"model": expected}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
