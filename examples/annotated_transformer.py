"""The Annotated Transformer (harvardnlp/annotated-transformer), exported with the command line.

    python examples/annotated_transformer.py

Trains with the paper's schedule and label smoothing, runs `tfexport export`, `parity` and `decode`, and compares the tokens
with those of `greedy_decode`. The exit code is 1 where one differs.
"""

import argparse
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

DATA = Path(__file__).parent / "data"
SPECIALS = ["<s>", "</s>", "<blank>", "<unk>"]
BOS, EOS, PAD, UNK = range(4)
N, D_MODEL, D_FF, H, DROPOUT, LONGEST = 2, 128, 256, 8, 0.1, 32


class LayerNorm(nn.Module):
    """Divides by the standard deviation over n - 1, and adds eps outside of the root: not `nn.LayerNorm`."""

    def __init__(self) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(D_MODEL)), nn.Parameter(torch.zeros(D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b_2


class SublayerConnection(nn.Module):
    """A norm, a sublayer, and the residual connection around both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = LayerNorm(), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


class MultiHeadedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(D_MODEL, D_MODEL) for _ in range(4))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, query: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        inputs = zip(self.linears, (query, memory, memory), strict=False)
        q, k, v = (linear(x).unflatten(-1, (H, -1)).transpose(1, 2) for linear, x in inputs)
        scores = q @ k.transpose(-2, -1) / math.sqrt(D_MODEL // H)
        weights = self.dropout(scores.masked_fill(mask.unsqueeze(1) == 0, -1e9).softmax(dim=-1))
        return self.linears[-1]((weights @ v).transpose(1, 2).flatten(2))


class PositionwiseFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_1, self.w_2, self.dropout = nn.Linear(D_MODEL, D_FF), nn.Linear(D_FF, D_MODEL), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.dropout(self.w_1(x).relu()))


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = MultiHeadedAttention(), PositionwiseFeedForward()
        self.sublayer = nn.ModuleList(SublayerConnection() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.src_attn = MultiHeadedAttention(), MultiHeadedAttention()
        self.feed_forward = PositionwiseFeedForward()
        self.sublayer = nn.ModuleList(SublayerConnection() for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor, src_mask: Tensor) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class Stack(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layer() for _ in range(N)), LayerNorm()

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *context)
        return self.norm(x)


class Embeddings(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(vocab, D_MODEL)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lut(ids) * math.sqrt(D_MODEL)


class PositionalEncoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rates = torch.exp(torch.arange(0, D_MODEL, 2) * -(math.log(10000.0) / D_MODEL))
        angles = torch.arange(LONGEST)[:, None] * rates
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[None])
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[:, : x.shape[1]])


class EncoderDecoder(nn.Module):
    """`src` [batch, src] and `tgt` [batch, tgt], padded, to log-probabilities [batch, tgt, vocab]."""

    def __init__(self, src_vocab: int, tgt_vocab: int) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(EncoderLayer), Stack(DecoderLayer)
        self.src_embed = nn.Sequential(Embeddings(src_vocab), PositionalEncoding())
        self.tgt_embed = nn.Sequential(Embeddings(tgt_vocab), PositionalEncoding())
        self.generator = nn.ModuleDict({"proj": nn.Linear(D_MODEL, tgt_vocab)})
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        src_mask = (src != PAD).unsqueeze(-2)
        tgt_mask = (tgt != PAD).unsqueeze(-2) & torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        memory = self.encoder(self.src_embed(src), src_mask)
        states = self.decoder(self.tgt_embed(tgt), tgt_mask, memory, src_mask)
        return self.generator["proj"](states).log_softmax(dim=-1)


@torch.inference_mode()
def greedy_decode(model: EncoderDecoder, source: list[int]) -> list[int]:
    tokens = [BOS]
    while tokens[-1] != EOS and len(tokens) <= LONGEST:
        tokens.append(int(model(torch.tensor([source]), torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[1:]


def train(model: EncoderDecoder, pairs: list[tuple[list[int], list[int]]], steps: int, warmup: int = 100) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3 * D_MODEL**-0.5, betas=(0.9, 0.98), eps=1e-9)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) ** -0.5, (step + 1) * warmup**-1.5))
    smoothed = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    for step in range(1, steps + 1):
        sides = zip(*(pairs[i] for i in torch.randint(len(pairs), (48,)).tolist()), strict=True)
        src, tgt = (nn.utils.rnn.pad_sequence(list(map(torch.tensor, ids)), True, PAD) for ids in sides)
        loss = smoothed(model(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.3f}")


def run(*command: object) -> str:
    """Run a command of tfexport, print it, and return what it prints."""
    words = ["tfexport", *map(str, command)]
    print("$", *words, flush=True)
    return subprocess.run([sys.executable, "-m", *words], check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("build/examples/annotated_transformer"))
    options = parser.parse_args()
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)

    ids, sizes = {}, []
    for language in ("de", "en"):
        lines = (DATA / f"captions.{language}").read_text(encoding="utf-8").splitlines()
        sentences = [re.findall(r"\w+|[^\w\s]", line) for line in lines]
        words = [*SPECIALS, *sorted({word for sentence in sentences for word in sentence})]
        (out / f"vocab.{language}.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
        ids[language] = [[BOS, *map(words.index, sentence), EOS] for sentence in sentences]
        sizes.append(len(words))
        if language == "de":  # every 16th pair is for the comparison
            held_out = [" ".join(sentence) for sentence in sentences[::16]]
    (out / "input.txt").write_text("\n".join(held_out) + "\n", encoding="utf-8")
    pairs = list(zip(ids["de"], ids["en"], strict=True))

    model = EncoderDecoder(*sizes)
    train(model, [pair for number, pair in enumerate(pairs) if number % 16], options.steps)
    torch.save(model.eval().state_dict(), out / "model.pt")

    vocabularies = ("--src-vocab", out / "vocab.de.txt", "--tgt-vocab", out / "vocab.en.txt")
    run("export", out / "model.pt", "-o", out / "bundle", "--heads", H, *vocabularies, "--force")
    print(run("parity", out / "bundle", out / "input.txt"))
    found = run("decode", out / "bundle", out / "input.txt", "--output-format", "ids").splitlines()

    different, words = 0, (out / "vocab.en.txt").read_text(encoding="utf-8").splitlines()
    for sentence, source, line in zip(held_out, ids["de"][::16], found, strict=True):
        tokens = greedy_decode(model, source)
        same = tokens == list(map(int, line.split()))
        different += not same
        print(f"{'same' if same else 'DIFFERENT'}: {sentence} -> {' '.join(words[token] for token in tokens)}")
    print(f"{len(found)} sentences; tokens of {different} differ between PyTorch and the bundle")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
