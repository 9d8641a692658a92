"""Programs of owners: random models in their own code, and the files of outputs that their own greedy loops print."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from makers.references.annotated import AnnotatedTransformer
from makers.references.decode import greedy
from makers.tiny import randomised
from makers.torch_models import SRC_VOCAB, TGT_VOCAB, made

PAD, BOS, EOS, LIMIT = 1, 2, 3, 8


@dataclass(frozen=True)
class Owner:
    """A model in its owner's code, and its file."""

    model: Callable[[Tensor, Tensor], Tensor]
    path: Path

    def outputs(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        """The outputs for complete sources. Each ends with eos, or at the limit."""
        return [greedy(self.model, list(source), bos=BOS, eos=EOS, max_length=LIMIT) for source in sources]

    def write(self, file: Path, sources: Sequence[Sequence[int]]) -> Path:
        """A file of expected outputs."""
        lines = zip(sources, self.outputs(sources), strict=True)
        file.write_text("".join(f"{said(source)}\t{said(output)}\n" for source, output in lines), encoding="utf-8")
        return file


def said(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def sources(count: int, *, seed: int = 1, bos: bool = True, eos: bool = True) -> list[list[int]]:
    """Random sources of several lengths, as the encoder reads them."""
    generator = random.Random(seed)
    bare = [[generator.randint(4, 36) for _ in range(generator.randint(2, 9))] for _ in range(count)]
    return [[BOS] * bos + ids + [EOS] * eos for ids in bare]


def owner(folder: Path, name: str) -> Owner:
    """The random model of this name: one of `torch_models`, or `annotated`."""
    model = annotated() if name == "annotated" else made(name)
    path = folder / f"{name}.pt"
    torch.save(model.state_dict(), path)
    return Owner(model, path)


def annotated() -> nn.Module:
    """A random Annotated Transformer, whose outputs depend on their sources and never have pad, bos or unk."""
    sizes = {"d_model": 24, "n_heads": 3, "d_ffn": 40, "n_encoder_layers": 2, "n_decoder_layers": 1, "max_len": 30}
    model = AnnotatedTransformer(src_vocab=SRC_VOCAB, tgt_vocab=TGT_VOCAB, pad_id=PAD, **sizes)
    randomised(model, seed=3)
    with torch.no_grad():
        model.generator["proj"].bias[:EOS] = -50.0
        model.generator["proj"].bias[EOS] += 0.5
        for name, parameter in model.named_parameters():
            if "src_attn.linears" in name and name.endswith("weight"):
                parameter *= 2.0
            if "lut" in name:
                parameter *= 0.5
    return model
