"""What a Transformer attends to, as a picture, and what its positional encodings are good for.

    python examples/attention_and_positions.py

Trains a pre-norm `nn.Transformer`, exports it with `alignments=True`, and draws the attention that the bundle returns. Two
properties of sinusoidal encodings (Vaswani et al. 2017, section 3.5) are computed and drawn beside it. The exit code is 1
where tokens or attention differ between PyTorch and the bundle, or a property does not hold. Needs matplotlib.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

import tfexport

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DATA = Path(__file__).parent / "data"
SPECIALS = ["<unk>", "<pad>", "<bos>", "<eos>"]
UNK, PAD, BOS, EOS = range(4)
D_MODEL, HEADS, LAYERS, LONGEST = 128, 4, 2, 64


def sinusoids(length: int) -> Tensor:
    """[length, d] in float64: column 2i is sin(p * w_i), column 2i + 1 is cos(p * w_i), with w_i = 10000 ** (-2i / d)."""
    rates = 10000 ** (-torch.arange(0, D_MODEL, 2, dtype=torch.float64) / D_MODEL)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


class Translator(nn.Module):
    """`src` [batch, src] and `tgt` [batch, tgt], padded with PAD, to logits [batch, tgt, vocab]."""

    def __init__(self, src_vocab: int, tgt_vocab: int) -> None:
        super().__init__()
        self.src_embedding, self.tgt_embedding = nn.Embedding(src_vocab, D_MODEL), nn.Embedding(tgt_vocab, D_MODEL)
        self.register_buffer("positions", sinusoids(LONGEST).float())
        sizes = {"num_encoder_layers": LAYERS, "num_decoder_layers": LAYERS, "dim_feedforward": 2 * D_MODEL}
        self.transformer = nn.Transformer(D_MODEL, HEADS, **sizes, dropout=0.1, batch_first=True, norm_first=True)
        self.output = nn.Linear(D_MODEL, tgt_vocab)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        hidden = src == PAD
        x = self.src_embedding(src) * math.sqrt(D_MODEL) + self.positions[: src.shape[1]]
        y = self.tgt_embedding(tgt) * math.sqrt(D_MODEL) + self.positions[: tgt.shape[1]]
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        masks = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden, "tgt_key_padding_mask": tgt == PAD}
        return self.output(self.transformer(x, y, tgt_mask=future, **masks))


@torch.inference_mode()
def greedy(model: Translator, source: list[int]) -> tuple[list[int], Tensor]:
    """The tokens, and the attention [tokens, source] with which each was chosen: the last layer's, the mean of its heads."""
    seen: list[Tensor] = []
    attention = model.transformer.decoder.layers[-1].multihead_attn
    hooks = (
        attention.register_forward_pre_hook(
            lambda _, args, more: (args, {**more, "need_weights": True}), with_kwargs=True
        ),
        attention.register_forward_hook(lambda _, args, result: seen.append(result[1][0, -1])),
    )
    tokens = [BOS]
    while tokens[-1] != EOS and len(tokens) < LONGEST:
        tokens.append(int(model(torch.tensor([source]), torch.tensor([tokens]))[0, -1].argmax()))
    for hook in hooks:
        hook.remove()
    return tokens[1:], torch.stack(seen)


def train(model: Translator, pairs: list[tuple[list[int], list[int]]], steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    for step in range(1, steps + 1):
        sides = zip(*(pairs[i] for i in torch.randint(len(pairs), (48,)).tolist()), strict=True)
        src, tgt = (nn.utils.rnn.pad_sequence(list(map(torch.tensor, ids)), True, PAD) for ids in sides)
        logits = model(src, tgt[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.3f}")


def rotation(shift: int) -> Tensor:
    """The matrix [d, d] that takes the encoding of any position p to that of p + shift: each pair of columns is turned by
    an angle that depends on the shift alone."""
    angles = shift * 10000 ** (-torch.arange(0, D_MODEL, 2, dtype=torch.float64) / D_MODEL)
    turns = [torch.tensor([[a.cos(), a.sin()], [-a.sin(), a.cos()]], dtype=torch.float64) for a in angles]
    return torch.block_diag(*turns)


def check_positions() -> tuple[Tensor, bool]:
    """The dot products of all pairs of positions [length, length], and whether both properties hold."""
    table = sinusoids(LONGEST)
    products = table @ table.T
    # 1. The dot product of two positions depends on their distance alone: sum of cos(distance * w_i).
    spread = max(float(products.diagonal(k).max() - products.diagonal(k).min()) for k in range(LONGEST))
    # 2. A shift is linear: one matrix takes every position to the one `shift` later.
    error = max(
        float((table[:-shift] @ rotation(shift).T - table[shift:]).abs().max()) for shift in range(1, LONGEST // 2)
    )
    print(f"dot products of positions at one distance differ by at most {spread:.1e}")
    print(f"shifting by a matrix gives the positions shifted, within {error:.1e}")
    return products, spread < 1e-9 and error < 1e-9


def draw(path: Path, attention: Tensor, source: list[str], target: list[str], products: Tensor) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    left.imshow(attention, cmap="Greys", vmin=0)
    left.set_xticks(range(len(source)), source, rotation=60, ha="right")
    left.set_yticks(range(len(target)), target)
    left.set_title("attention of the last layer, from the bundle")
    middle.plot(range(LONGEST), products[0])
    middle.set(title="dot product of positions, by distance", xlabel="distance")
    right.imshow(rotation(8), cmap="RdBu", vmin=-1, vmax=1)
    right.set_title("the matrix of a shift by 8 positions")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("build/examples/attention_and_positions"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)

    ids, texts, sizes = {}, {}, []
    for language in ("de", "en"):
        lines = (DATA / f"captions.{language}").read_text(encoding="utf-8").splitlines()
        texts[language] = [re.findall(r"\w+|[^\w\s]", line) for line in lines]
        words = [*SPECIALS, *sorted({word for sentence in texts[language] for word in sentence})]
        (options.out / f"{language}.json").write_text(json.dumps(words), encoding="utf-8")
        ids[language] = [[BOS, *map(words.index, sentence), EOS] for sentence in texts[language]]
        sizes.append(len(words))
    pairs = list(zip(ids["de"], ids["en"], strict=True))

    model = Translator(*sizes)
    train(model, [pair for number, pair in enumerate(pairs) if number % 16], options.steps)
    model.eval()
    torch.save(model.state_dict(), options.out / "model.pt")
    described = {"heads": HEADS, "norm_first": True, "activation": "relu", "embedding_scale": "sqrt"}
    described |= {"source_bos": True, "source_eos": True}
    vocabularies = {"src_vocab": options.out / "de.json", "tgt_vocab": options.out / "en.json"}
    bundle = options.out / "bundle"
    tfexport.export(options.out / "model.pt", bundle, alignments=True, force=True, **described, **vocabularies)

    sentences = [" ".join(words) for words in texts["de"][::16]]
    translations = tfexport.load(bundle).translate(sentences, attention=True, max_length=LONGEST - 1)
    different, largest = 0, 0.0
    for sentence, source, translation in zip(sentences, ids["de"][::16], translations, strict=True):
        tokens, attention = greedy(model, source)
        output = translation.hypotheses[0]
        same = tokens == list(output.ids)
        if same:
            largest = max(largest, float((attention - torch.from_numpy(output.attention)).abs().max()))
        different += not same
        print(f"{'same' if same else 'DIFFERENT'}: {sentence} -> {translation}")
    print(f"{len(sentences)} sentences; tokens of {different} differ between PyTorch and the bundle")
    print(f"attention differs by at most {largest:.1e}")

    products, hold = check_positions()
    shown = translations[0].hypotheses[0]
    source = ["<bos>", *texts["de"][0], "<eos>"]
    draw(options.out / "attention.png", torch.from_numpy(shown.attention), source, list(shown.tokens), products)
    print(f"figure: {options.out / 'attention.png'}")
    return int(different > 0 or largest > 1e-4 or not hold)


if __name__ == "__main__":
    sys.exit(main())
