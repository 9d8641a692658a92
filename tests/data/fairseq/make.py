"""Makes the checkpoints in this folder with fairseq 0.12.2 itself, and what it computes and generates with them.

    PYTHONPATH=fairseq-0.12.2 python make.py

needs fairseq 0.12.2, omegaconf 2.0.6, hydra-core 1.0.7 and PyTorch. Each checkpoint is written as another version of fairseq
wrote it. Weights are random, norms and biases too; of forty random models the one is taken that says most different
things of different sentences, and ends some of them.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

HERE = Path(__file__).parent
N_SOURCE, N_TARGET = 23, 19
"""Words in the dictionaries, beside four special tokens."""
PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")
VARIANTS: dict[str, tuple[str, ...]] = {
    "cfg": ("--activation-fn", "gelu"),
    "dictconfig": (*PRE_NORM, "--share-decoder-input-output-embed", "--activation-fn", "gelu_accurate"),
    "args": (*PRE_NORM, "--encoder-learned-pos", "--decoder-learned-pos", "--no-scale-embedding"),
    "fused": ("--layernorm-embedding", "--share-all-embeddings"),
}
MAX_LEN = 11
SEARCHES = ((1, 1.0, 200, 1), (4, 1.0, 200, 1), (8, 0.4, 25, 8))
"""Beams, length penalties, how many sources, and how many hypotheses of each are kept."""


def write_dictionary(path: Path, letter: str, n_words: int) -> None:
    path.write_text("".join(f"{letter}{k} {1000 - k}\n" for k in range(n_words)))


def arguments(variant: tuple[str, ...]) -> Any:
    sizes = {"embed-dim": 12, "ffn-embed-dim": 14, "attention-heads": 3}
    given = [f"--{side}-{name}={size}" for side in ("encoder", "decoder") for name, size in sizes.items()]
    given += ["--encoder-layers=2", "--decoder-layers=1", "--max-source-positions=20", "--max-target-positions=16"]
    command = [".", "--arch=transformer", "--task=translation", "-s", "de", "-t", "en", *given, *variant]
    return options.parse_args_and_arch(options.get_training_parser(), command)


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
                noise *= parameter.shape[1] ** -0.5
                noise *= 3.0 if "out_proj" in name else 2.0 if "attn" in name or "output" in name else 1.0
            parameter.copy_(noise)
    model.eval()


def fused(weights: dict[str, Any]) -> dict[str, Any]:
    """As versions up to 0.6 wrote them: three projections in one matrix, norms by number, no copies of layers."""
    older = {}
    norms = {"encoder": {"self_attn": 0, "final": 1}, "decoder": {"self_attn": 0, "encoder_attn": 1, "final": 2}}
    for name, tensor in weights.items():
        side, _, rest = name.partition(".")
        norm = next((k for norm, k in norms[side].items() if f".{norm}_layer_norm." in rest), None)
        last = name.rsplit(".", 1)[-1]
        if last.startswith(("in_proj_", "out_proj_", "fc1_", "fc2_")) or "k_proj" in name or "v_proj" in name:
            continue
        if "q_proj" in name:
            thirds = [weights[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            older[name.replace("q_proj.", "in_proj_")] = torch.cat(thirds)
        elif norm is not None:
            number = rest.split(".")[1]
            older[f"{side}.layers.{number}.layer_norms.{norm}.{last}"] = tensor
        elif not (name.endswith("output_projection.weight")):
            older[name] = tensor
    return older


def save(name: str, args: Any, cfg: Any, weights: dict[str, Any]) -> None:
    rest = {
        "optimizer_history": [
            {"optimizer_name": "FairseqAdam", "lr_scheduler_state": {"best": None}, "num_updates": 1}
        ],
        "extra_state": {"train_iterator": {"epoch": 2}, "val_loss": 1.5},
    }
    path = HERE / f"{name}.pt"
    if name == "cfg":
        cfg = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
        torch.save({"args": None, "cfg": cfg, "model": weights, **rest}, path)
    elif name == "dictconfig":
        torch.save({"args": None, "cfg": cfg, "model": weights, **rest}, path)
    else:
        weights = fused(weights) if name == "fused" else weights
        torch.save({"args": args, "model": weights, **rest}, path, _use_new_zipfile_serialization=False)


def generate(model: Any, dictionary: Any, sources: list[list[int]], beam: int, penalty: float) -> list[Any]:
    """For each source its hypotheses, best first: tokens with eos, and score."""
    search = SequenceGenerator([model], dictionary, beam_size=beam, max_len_b=MAX_LEN, len_penalty=penalty)
    found = []
    for source in sources:
        sample = {"src_tokens": torch.tensor([source]), "src_lengths": torch.tensor([len(source)])}
        hypotheses = search.generate([model], {"net_input": sample})[0]
        found.append([[one["tokens"].tolist(), round(float(one["score"]), 6)] for one in hypotheses])
    return found


def variety(model: Any, seed: int, dictionary: Any, sources: list[list[int]]) -> int:
    """How many different outputs a random model has, and whether it ends some of them."""
    randomise(model, seed)
    longest = max(map(len, sources))
    padded = torch.tensor([[1] * (longest - len(source)) + source for source in sources])
    search = SequenceGenerator([model], dictionary, beam_size=1, max_len_b=MAX_LEN)
    found = search.generate([model], {"net_input": {"src_tokens": padded, "src_lengths": None}})
    best = [hypotheses[0]["tokens"].tolist() for hypotheses in found]
    ended = sum(len(tokens) <= MAX_LEN for tokens in best)
    return len(set(map(tuple, best))) + 2 * min(ended, len(best) - ended, 40)


def main() -> None:
    os.chdir(HERE)  # so that no checkpoint tells where it was made
    write_dictionary(HERE / "dict.de.txt", "w", N_SOURCE)
    write_dictionary(HERE / "dict.en.txt", "v", N_TARGET)
    expected = {}
    for name, variant in VARIANTS.items():
        args = arguments(variant)
        cfg = convert_namespace_to_omegaconf(args)
        task = tasks.setup_task(cfg.task)
        if name == "fused":  # whose sides share a dictionary
            task.tgt_dict = task.src_dict
        model = task.build_model(cfg.model)
        draw = random.Random(3)
        sources = [[*(draw.randrange(4, N_SOURCE + 4) for _ in range(draw.randint(1, 9))), 2] for _ in range(200)]
        size = len(task.target_dictionary)
        targets = [[2, *(draw.randrange(4, size) for _ in range(7))] for _ in range(5)]
        randomise(model, max(range(40), key=lambda seed: variety(model, seed, task.target_dictionary, sources)))
        save(name, args, cfg, model.state_dict())
        with torch.no_grad():
            logits = [
                model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([target]))[0][0]
                for source, target in zip(sources, targets, strict=False)
            ]
        expected[name] = {
            "sources": sources,
            "targets": targets,
            "logits": [[[round(x, 5) for x in row] for row in one.tolist()] for one in logits],
            "found": [
                {
                    "beam": beam,
                    "penalty": penalty,
                    "hypotheses": [
                        one[:kept] for one in generate(model, task.target_dictionary, sources[:count], beam, penalty)
                    ],
                }
                for beam, penalty, count, kept in SEARCHES
            ],
        }
    (HERE / "expected.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
