"""Pre-norm with a Linear for each head and Conv1d in the feed-forward, as in Huffon/pytorch-transformer-kor-eng.

    python examples/per_head_conv1d.py

Trains on the sentences of examples/data, exports the state_dict, and compares the tokens of both on sentences that training
has not seen. The exit code is 1 where one differs.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import tfexport

DATA = Path(__file__).parent / "data"
SPECIALS = ["<unk>", "<pad>", "<sos>", "<eos>"]
UNK, PAD, SOS, EOS = range(4)
D_MODEL, HEADS, D_FFN, LAYERS, LONGEST = 128, 4, 256, 2, 24


class SelfAttention(nn.Module):
    """One head, with three matrices of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q_w, self.k_w, self.v_w = (nn.Linear(D_MODEL, D_MODEL // HEADS, bias=False) for _ in range(3))

    def forward(self, query: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        """`query` [batch, q, d], `memory` [batch, k, d] and `hidden` [batch, 1 or q, k] to [batch, q, d / heads]."""
        scores = self.q_w(query) @ self.k_w(memory).transpose(1, 2) / math.sqrt(D_MODEL // HEADS)
        return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ self.v_w(memory)


class MultiHeadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(SelfAttention() for _ in range(HEADS))
        self.o_w = nn.Linear(D_MODEL, D_MODEL, bias=False)

    def forward(self, query: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        return self.o_w(torch.cat([head(query, memory, hidden) for head in self.attentions], dim=-1))


class PositionWiseFeedForward(nn.Module):
    """Convolutions of width 1, which are linear layers over [batch, d, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(D_MODEL, D_FFN, 1), nn.Conv1d(D_FFN, D_MODEL, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.dropout(torch.relu(self.conv1(x.transpose(1, 2))))).transpose(1, 2)


class EncoderLayer(nn.Module):
    """All sublayers share one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(D_MODEL, eps=1e-6)
        self.self_attention = MultiHeadAttention()
        self.position_wise_ffn = PositionWiseFeedForward()

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        normed = self.layer_norm(x)
        x = x + self.self_attention(normed, normed, hidden)
        return x + self.position_wise_ffn(self.layer_norm(x))


class DecoderLayer(EncoderLayer):
    def __init__(self) -> None:
        super().__init__()
        self.encoder_attention = MultiHeadAttention()

    def forward(self, x: Tensor, hidden: Tensor, memory: Tensor, src_hidden: Tensor) -> Tensor:
        normed = self.layer_norm(x)
        x = x + self.self_attention(normed, normed, hidden)
        x = x + self.encoder_attention(self.layer_norm(x), memory, src_hidden)
        return x + self.position_wise_ffn(self.layer_norm(x))


def sinusoids() -> Tensor:
    """Row 0 is for padding. The sine and the cosine of a pair have rates of their own, unlike those of the paper."""
    column = torch.arange(D_MODEL)
    angles = torch.arange(LONGEST + 1)[:, None] / 10000 ** (2 * column / D_MODEL)
    table = torch.where(column % 2 == 0, angles.sin(), angles.cos())
    table[0] = 0
    return table


class Coder(nn.Module):
    """What the encoder and the decoder have in common."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab, D_MODEL, padding_idx=PAD)
        nn.init.normal_(self.token_embedding.weight, std=D_MODEL**-0.5)
        self.pos_embedding = nn.Embedding.from_pretrained(sinusoids(), freeze=True)
        self.layer_norm = nn.LayerNorm(D_MODEL, eps=1e-6)
        self.dropout = nn.Dropout(0.1)

    def embed(self, ids: Tensor) -> Tensor:
        rows = torch.arange(1, ids.shape[1] + 1) * (ids != PAD)
        return self.dropout(self.token_embedding(ids) * math.sqrt(D_MODEL) + self.pos_embedding(rows))


class Transformer(nn.Module):
    """`src` [batch, src] and `tgt` [batch, tgt], padded with PAD, to logits [batch, tgt, vocab]."""

    def __init__(self, src_vocab: int, tgt_vocab: int) -> None:
        super().__init__()
        self.encoder, self.decoder = Coder(src_vocab), Coder(tgt_vocab)
        self.encoder.encoder_layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.decoder.decoder_layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        src_hidden = (src == PAD)[:, None]
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        memory = self.encoder.embed(src)
        for layer in self.encoder.encoder_layers:
            memory = layer(memory, src_hidden)
        memory = self.encoder.layer_norm(memory)
        x = self.decoder.embed(tgt)
        for layer in self.decoder.decoder_layers:
            x = layer(x, (tgt == PAD)[:, None] | future, memory, src_hidden)
        return self.decoder.layer_norm(x) @ self.decoder.token_embedding.weight.T  # the output layer is tied


@torch.inference_mode()
def greedy(model: Transformer, source: list[int]) -> list[int]:
    """The whole prefix anew for every token."""
    tokens = [SOS]
    while tokens[-1] != EOS and len(tokens) <= LONGEST:
        tokens.append(int(model(torch.tensor([source]), torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[1:]


def batch_of(sentences: list[list[int]]) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sentences], batch_first=True, padding_value=PAD)


def train(model: Transformer, pairs: list[tuple[list[int], list[int]]], steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    loss_of = nn.CrossEntropyLoss(ignore_index=PAD)
    for step in range(1, steps + 1):
        chosen = [pairs[i] for i in torch.randint(len(pairs), (48,)).tolist()]
        src = batch_of([source for source, _ in chosen])
        tgt = batch_of([[SOS, *target, EOS] for _, target in chosen])
        loss = loss_of(model(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("build/examples/per_head_conv1d"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)

    # Words and punctuation, a vocabulary for each language, and every 16th pair for the comparison.
    text, ids, sizes = {}, {}, []
    for language in ("de", "en"):
        lines = (DATA / f"captions.{language}").read_text(encoding="utf-8").splitlines()
        text[language] = [re.findall(r"\w+|[^\w\s]", line.lower()) for line in lines]
        vocabulary = [*SPECIALS, *sorted({word for words in text[language] for word in words})]
        (options.out / f"{language}.json").write_text(json.dumps(vocabulary), encoding="utf-8")
        ids[language] = [[vocabulary.index(word) for word in words] for words in text[language]]
        sizes.append(len(vocabulary))
    pairs = list(zip(ids["de"], ids["en"], strict=True))

    model = Transformer(*sizes)
    train(model, [pair for number, pair in enumerate(pairs) if number % 16], options.steps)
    model.eval()
    torch.save(model.state_dict(), options.out / "model.pt")

    # The number of heads is found by the names of the weights, the special tokens by those of the vocabularies.
    vocabularies = {"src_vocab": options.out / "de.json", "tgt_vocab": options.out / "en.json"}
    tfexport.export(options.out / "model.pt", options.out / "bundle", force=True, **vocabularies)
    bundle = tfexport.load(options.out / "bundle")

    sentences = [" ".join(words) for words in text["de"][::16]]
    different = 0
    for (source, _), sentence, found in zip(pairs[::16], sentences, bundle.translate(sentences), strict=True):
        same = greedy(model, source) == list(found.hypotheses[0].ids)
        different += not same
        print(f"{'same' if same else 'DIFFERENT'}: {sentence} -> {found}")
    print(f"{len(sentences)} sentences; tokens of {different} differ between PyTorch and the bundle")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
