"""How many expected outputs tell the settings of a checkpoint, and how long the search for them takes.

    python -m benchmarks.checkpoints.expected_outputs [--steps 800] [--without-base]

Two classes are trained on a task that reverses its source and exchanges its words: `torch.nn.Transformer` as in the
translation tutorial on pytorch.org, and the Annotated Transformer. Their own greedy loops print the outputs, without bos and
eos of sources. All combinations of the settings that tfexport tries are compared with them, line by line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.paths import RESULTS
from makers.references.annotated import AnnotatedTransformer
from makers.references.decode import greedy
from tfexport.bench.machine import facts
from tfexport.errors import TfexportError
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.checkpoints.options import ExportedCheckpointOptions
from tfexport.models.families.family import SOURCE_ENDS
from tfexport.models.formats.native import Tokenizers
from tfexport.verification.confirmed_reading import open_confirmed
from tfexport.verification.expected_outputs import encoded, read_lines
from tfexport.verification.settings_search import Search, axes_of

PAD, BOS, EOS, VOCAB, D, HEADS, D_FF, LAYERS, LENGTH = 1, 2, 3, 37, 32, 4, 64, 2, 40
LINES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
IDS = {"unk_id": 0, "pad_id": PAD, "bos_id": BOS, "eos_id": EOS}
Module = Callable[[Tensor, Tensor], Tensor]
"""(src_ids [batch, src], tgt_ids [batch, tgt]) -> logits [batch, tgt, vocab]"""


class Tutorial(nn.Module):
    """The tutorial's class: post-norm, ReLU, embeddings times sqrt(d_model), sinusoids in a buffer."""

    def __init__(self, d_model: int, heads: int, layers: int, d_ff: int, vocab: int):
        super().__init__()
        self.transformer = nn.Transformer(d_model, heads, layers, layers, d_ff, 0.0, batch_first=True)
        self.src_tok_emb, self.tgt_tok_emb = nn.Embedding(vocab, d_model), nn.Embedding(vocab, d_model)
        self.generator = nn.Linear(d_model, vocab)
        rates = torch.exp(-torch.arange(0, d_model, 2) * math.log(10000) / d_model)
        angles = torch.arange(LENGTH)[:, None] * rates
        self.register_buffer("pos_embedding", torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[None])

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        source, target = (
            table(ids) * math.sqrt(table.embedding_dim) + self.pos_embedding[:, : ids.shape[1]]
            for table, ids in ((self.src_tok_emb, src), (self.tgt_tok_emb, tgt))
        )
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        hidden = src == PAD
        states = self.transformer(
            source, target, tgt_mask=future, src_key_padding_mask=hidden, memory_key_padding_mask=hidden
        )
        return self.generator(states)


def annotated() -> nn.Module:
    sizes = {"d_model": D, "n_heads": HEADS, "d_ffn": D_FF, "n_encoder_layers": LAYERS, "n_decoder_layers": LAYERS}
    model = AnnotatedTransformer(src_vocab=VOCAB, tgt_vocab=VOCAB, max_len=LENGTH, pad_id=PAD, **sizes)
    for parameter in model.parameters():  # as the original does
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return model


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "torch.nn.Transformer (tutorial)": lambda: Tutorial(D, HEADS, LAYERS, D_FF, VOCAB),
    "Annotated Transformer": annotated,
}


def pairs(count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Random sources, and their words reversed and exchanged."""
    generator, found = random.Random(seed), []
    for _ in range(count):
        source = [generator.randint(4, VOCAB - 1) for _ in range(generator.randint(2, 9))]
        found.append((source, [(word * 7 + 3) % (VOCAB - 4) + 4 for word in source[::-1]]))
    return found


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])


def trained(model: nn.Module, steps: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(steps):
        batch = pairs(48, step)
        source = padded([[BOS, *source, EOS] for source, _ in batch])
        target = padded([[BOS, *target, EOS] for _, target in batch])
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def write(file: Path, sources: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], *, bare: bool) -> None:
    """A file of expected outputs; `bare` leaves out bos and eos of sources."""
    lines = []
    for source, output in zip(sources, outputs, strict=True):
        shown = source[1:-1] if bare else source
        lines.append(f"{' '.join(map(str, shown))}\t{' '.join(map(str, output))}\n")
    file.write_text("".join(lines), encoding="utf-8")


def left_by_lines(path: Path, file: Path) -> dict[str, Any]:
    """The combinations of all settings that are left after some lines, and the settings that they differ in."""
    hints = {"n_heads": HEADS, "norm_first": False, "activation": "relu", "embedding_scale": "sqrt", **IDS}
    if path.stem.startswith("Annotated"):
        hints = {"n_heads": HEADS, **IDS}
    loaded = load_checkpoint(path, hints)
    examples = encoded(file, read_lines(file), loaded.config, Tokenizers(None, None))
    names = ("norm_first", "activation", "embedding_scale", "n_heads", "norm_eps", *SOURCE_ENDS)
    known = {name: getattr(loaded.config, name) for name in names}
    search = Search(loaded.config, lambda structure: loaded, axes_of(loaded.config, known, (), examples), examples)
    begin = time.perf_counter()
    first = {
        combination: next(search.differences(combination), None)
        for combination in itertools.product(*(axis.values for axis in search.axes))
    }
    seconds = time.perf_counter() - begin
    rows = []
    for count in LINES:
        left = [combination for combination, wrong in first.items() if wrong is None or wrong.line > count]
        rows.append({"lines": count, "left": len(left), "open": search.varied(left)})
    return {"combinations": len(first), "seconds": seconds, "rows": rows}


def timed(path: Path, file: Path, **given: Any) -> dict[str, Any]:
    """The time of a reading with expected outputs, and what it says."""
    notes: list[str] = []
    options = ExportedCheckpointOptions(expect=file, pad=PAD, bos=BOS, eos=EOS, **given)
    begin = time.perf_counter()
    try:
        confirmation = open_confirmed(path, options, notes.append).confirmation
        said = {"by": confirmation.by, "unconfirmed": dict(confirmation.unconfirmed)}
    except TfexportError as error:
        said = {"error": str(error).replace(str(file), file.name)}
    return {"seconds": time.perf_counter() - begin, **said}


def of_program(name: str, folder: Path, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    begin = time.perf_counter()
    model = trained(PROGRAMS[name](), steps)
    print(f"{name}: trained in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    path, file, whole = folder / f"{name}.pt", folder / f"{name}.tsv", folder / f"{name} whole.tsv"
    torch.save(model.state_dict(), path)
    examples = pairs(max(LINES), 10**6)
    sources = [[BOS, *source, EOS] for source, _ in examples]
    outputs = [greedy(model, source, bos=BOS, eos=EOS, max_length=15) for source in sources]
    solved = sum(output == [*target, EOS] for output, (_, target) in zip(outputs, examples, strict=True))
    write(file, sources, outputs, bare=True)
    write(whole, sources[:32], outputs[:32], bare=False)
    right = {"heads": HEADS} if name.startswith("Annotated") else {
        "heads": HEADS, "norm_first": False, "activation": "relu", "embedding_scale": "sqrt"
    }  # fmt: skip
    result = left_by_lines(path, file)
    result |= {
        "name": name,
        "solved": solved,
        "steps": steps,
        "missing": timed(path, whole),
        "given": timed(path, whole, **right),
    }
    result["wrong"] = timed(path, whole, **{**right, "heads": 8})
    return result


def base_size(folder: Path) -> dict[str, Any]:
    """Times for a random model of the paper's base size, of 56 million parameters."""
    torch.manual_seed(0)
    model = Tutorial(512, 8, 6, 2048, 8000).eval()
    with torch.no_grad():  # else all outputs are the same
        for name, parameter in model.named_parameters():
            parameter *= 3.0 if "multihead_attn.out_proj.weight" in name else 1.0
    path, file = folder / "base.pt", folder / "base.tsv"
    torch.save(model.state_dict(), path)
    generator = random.Random(0)
    sources = [[BOS, *[generator.randint(4, 7999) for _ in range(12)], EOS] for _ in range(32)]
    target = torch.full((32, 1), BOS)
    with torch.no_grad():
        for _ in range(12):
            target = torch.cat([target, model(torch.tensor(sources), target)[:, -1:].argmax(-1)], 1)
    write(file, sources, target[:, 1:].tolist(), bare=False)
    right = {"heads": 8, "norm_first": False, "activation": "relu", "embedding_scale": "sqrt"}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"base: {len(set(map(tuple, target.tolist())))} different outputs", file=sys.stderr)
    return {
        "parameters": parameters,
        "missing": timed(path, file),
        "given": timed(path, file, **right),
        "wrong": timed(path, file, **{**right, "activation": "gelu"}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--without-base", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = {
            "machine": facts(),
            "programs": [of_program(program, folder, chosen.steps) for program in PROGRAMS],
            "base": None if chosen.without_base else base_size(folder),
        }
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    (RESULTS / "expected_outputs.json").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
