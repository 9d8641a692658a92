"""Makes `constraints.json`: n-best lists of fairseq's own lexically constrained beam search over these checkpoints.

    git clone --depth 1 --branch v0.12.2 https://github.com/facebookresearch/fairseq
    python -m tests.data.fairseq.make_constraints fairseq

fairseq 0.12.2 does not install on Python 3.11. So three of its files run as they are: `search.py`,
`token_generation_constraints.py` and `sequence_generator.py`. What these import of the rest of fairseq, and do not use here,
is empty. The logits are those of the checkpoints as tfexport reads them, whose logits are fairseq's (`expected.json`), with
a liking for eos: else most outputs of random models end at the limit.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.support.constrained import model_of

HERE = Path(__file__).parent
CHECKPOINTS = ("cfg", "dictconfig", "args", "fused")
ENDS = (0.5, 2.0, 3.5)
"""What is added to the logits of eos."""
BATCHES, BATCH = 5, 8
"""Of each checkpoint and each liking, and how many sentences are decoded together."""
MAX_LEN = 14
"""Tokens before eos; the checkpoints have 16 positions."""
MOST_TOKENS = 11
"""Of all phrases of a sentence."""
BEAMS = (1, 2, 4, 5, 8)


def fairseq_modules(folder: Path) -> tuple[ModuleType, ModuleType]:
    """`token_generation_constraints` and `sequence_generator`."""
    for name, content in {
        "fairseq": {},
        "fairseq.utils": {},
        "fairseq.data": {"data_utils": None},
        "fairseq.models": {"FairseqIncrementalDecoder": type("FairseqIncrementalDecoder", (), {})},
        "fairseq.ngram_repeat_block": {"NGramRepeatBlock": None},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
    sys.modules["fairseq"].utils = sys.modules["fairseq.utils"]  # type: ignore[attr-defined]
    found = []
    for name in ("token_generation_constraints", "search", "sequence_generator"):
        spec = importlib.util.spec_from_file_location(f"fairseq.{name}", folder / "fairseq" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"fairseq.{name}"] = module
        setattr(sys.modules["fairseq"], name, module)
        spec.loader.exec_module(module)
        found.append(module)
    return found[0], found[2]


class Model(torch.nn.Module):
    """A checkpoint in the shape that fairseq's generator calls: sources are its encoder's outputs."""

    def __init__(self, transformer: Any):
        super().__init__()
        self.transformer = transformer
        self.encoder = SimpleNamespace(
            forward_torchscript=lambda net_input: (net_input["src_tokens"], net_input["src_lengths"]),
            reorder_encoder_out=lambda out, order: tuple(part.index_select(0, order) for part in out),
        )
        self.decoder = SimpleNamespace(forward=lambda tokens, encoder_out: (self.transformer(*encoder_out, tokens),))

    def max_decoder_positions(self) -> int:
        return 16

    def get_normalized_probs(self, decoder_out: Any, log_probs: bool, sample: Any) -> Any:
        return decoder_out[0].log_softmax(-1)


class Dictionary:
    """Special ids and the size of a vocabulary."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def pad(self) -> int:
        return 1

    def eos(self) -> int:
        return 2

    def unk(self) -> int:
        return 3


def phrases_of(draw: random.Random, count: int, size: int) -> list[list[int]]:
    """Random phrases: new ones, ones that came, and parts and overlaps of ones that came."""
    found: list[list[int]] = []
    while len(found) < count:
        new = [draw.randrange(4, size) for _ in range(draw.choice((1, 1, 2, 2, 3)))]
        old = draw.choice(found) if found else new
        kind = draw.randrange(6)
        phrase = {0: old, 1: old[: len(old) - 1] or old, 2: [old[-1], *new[:1]], 3: [*old[:1], *new[:2]]}.get(kind, new)
        if sum(map(len, found)) + len(phrase) > MOST_TOKENS:
            return found
        found.append(phrase)
    return found


def main(folder: Path) -> None:
    constraints, generator = fairseq_modules(folder)
    draw, cases, stopped = random.Random(5), list[dict[str, Any]](), 0
    for name, end in product(CHECKPOINTS, ENDS):
        transformer = model_of(name, end)
        config, wanted = transformer.config, len(cases) + BATCHES * BATCH
        dictionary = Dictionary(config.tgt_vocab_size)
        while len(cases) < wanted:
            beam, order = draw.choice(BEAMS), draw.choice(("ordered", "unordered"))
            sources = [
                [*(draw.randrange(4, config.src_vocab_size) for _ in range(draw.randint(1, 9))), 2]
                for _ in range(BATCH)
            ]
            phrases = [phrases_of(draw, draw.randrange(6), config.tgt_vocab_size) for _ in sources]
            longest = max(map(len, sources))
            strategy = generator.search.LexicallyConstrainedBeamSearch(dictionary, order)
            search = generator.SequenceGenerator(
                [Model(transformer)], dictionary, beam_size=beam, max_len_b=MAX_LEN, search_strategy=strategy
            )
            net_input = {
                "src_tokens": torch.tensor([[*source, *[1] * (longest - len(source))] for source in sources]),
                "src_lengths": torch.tensor([len(source) for source in sources]),
            }
            packed = constraints.pack_constraints([[torch.tensor(one) for one in several] for several in phrases])
            try:
                outputs = search.generate([], {"net_input": net_input}, constraints=packed)
            except AssertionError:  # no hypothesis of a sentence ended, though the limit came
                stopped += 1
                continue
            about = {"model": name, "end": end, "order": order, "beam": beam}
            for source, several, hypotheses in zip(sources, phrases, outputs, strict=True):
                nbest = [[one["tokens"].tolist(), round(float(one["score"]), 5)] for one in hypotheses]
                cases.append({**about, "source": source, "phrases": several, "nbest": nbest})
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (HERE / "constraints.json").write_text(f"[\n{lines}\n]\n")
    print(f"{len(cases)} cases; fairseq stopped with an error in {stopped} batches")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
