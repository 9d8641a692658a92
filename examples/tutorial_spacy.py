"""The post-norm Transformer of the sequence-to-sequence tutorial (bentrevett/pytorch-seq2seq, no. 6) with spaCy's words.

    python examples/tutorial_spacy.py

Trains a translator and a classifier over the same encoder, exports both with their vocabularies, and compares the tokens and
the classes on raw sentences that training has not seen. The exit code is 1 where one differs.
"""

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path

import spacy
import torch
from torch import Tensor, nn

import tfexport

DATA = Path(__file__).parent / "data"
SPECIALS = ["<unk>", "<pad>", "<sos>", "<eos>"]
UNK, PAD, SOS, EOS = range(4)
HID_DIM, N_HEADS, PF_DIM, N_LAYERS, DROPOUT, MAX_LENGTH = 128, 8, 256, 2, 0.1, 24
CLASSES = ["one", "several"]


class MultiHeadAttentionLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(HID_DIM, HID_DIM) for _ in range(4))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, query: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """`query` [batch, q, hid], `memory` [batch, k, hid] and `mask` [batch, 1, 1 or q, k] to [batch, q, hid]."""
        projected = (self.fc_q(query), self.fc_k(memory), self.fc_v(memory))
        q, k, v = (states.unflatten(2, (N_HEADS, -1)).transpose(1, 2) for states in projected)
        energy = q @ k.transpose(2, 3) / math.sqrt(HID_DIM // N_HEADS)
        attention = energy.masked_fill(~mask, -1e10).softmax(dim=-1)
        return self.fc_o((self.dropout(attention) @ v).transpose(1, 2).flatten(2))


class PositionwiseFeedforwardLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc_1, self.fc_2 = nn.Linear(HID_DIM, PF_DIM), nn.Linear(PF_DIM, HID_DIM)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_2(self.dropout(torch.relu(self.fc_1(x))))


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn_layer_norm, self.ff_layer_norm = nn.LayerNorm(HID_DIM), nn.LayerNorm(HID_DIM)
        self.self_attention = MultiHeadAttentionLayer()
        self.positionwise_feedforward = PositionwiseFeedforwardLayer()
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, src: Tensor, src_mask: Tensor) -> Tensor:
        src = self.self_attn_layer_norm(src + self.dropout(self.self_attention(src, src, src_mask)))
        return self.ff_layer_norm(src + self.dropout(self.positionwise_feedforward(src)))


class DecoderLayer(EncoderLayer):
    def __init__(self) -> None:
        super().__init__()
        self.enc_attn_layer_norm = nn.LayerNorm(HID_DIM)
        self.encoder_attention = MultiHeadAttentionLayer()

    def forward(self, trg: Tensor, trg_mask: Tensor, enc_src: Tensor, src_mask: Tensor) -> Tensor:
        trg = self.self_attn_layer_norm(trg + self.dropout(self.self_attention(trg, trg, trg_mask)))
        trg = self.enc_attn_layer_norm(trg + self.dropout(self.encoder_attention(trg, enc_src, src_mask)))
        return self.ff_layer_norm(trg + self.dropout(self.positionwise_feedforward(trg)))


class Coder(nn.Module):
    """Token and position embeddings, both learned, and layers."""

    def __init__(self, vocab: int, layer: type[EncoderLayer]) -> None:
        super().__init__()
        self.tok_embedding, self.pos_embedding = nn.Embedding(vocab, HID_DIM), nn.Embedding(MAX_LENGTH, HID_DIM)
        self.layers = nn.ModuleList(layer() for _ in range(N_LAYERS))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, ids: Tensor, *context: Tensor) -> Tensor:
        positions = self.pos_embedding(torch.arange(ids.shape[1]))
        x = self.dropout(self.tok_embedding(ids) * math.sqrt(HID_DIM) + positions)
        for layer in self.layers:
            x = layer(x, *context)
        return x


class Seq2Seq(nn.Module):
    """`src` [batch, src] and `trg` [batch, trg], padded, to logits [batch, trg, vocab]."""

    def __init__(self, src_vocab: int, trg_vocab: int) -> None:
        super().__init__()
        self.encoder, self.decoder = Coder(src_vocab, EncoderLayer), Coder(trg_vocab, DecoderLayer)
        self.decoder.fc_out = nn.Linear(HID_DIM, trg_vocab)

    def forward(self, src: Tensor, trg: Tensor) -> Tensor:
        src_mask = (src != PAD)[:, None, None]
        causal = torch.ones(trg.shape[1], trg.shape[1], dtype=torch.bool).tril()
        trg_mask = (trg != PAD)[:, None, None] & causal
        return self.decoder.fc_out(self.decoder(trg, trg_mask, self.encoder(src, src_mask), src_mask))


class Classifier(nn.Module):
    """The class of a sentence, by the encoder's state of its first token, <sos>."""

    def __init__(self, src_vocab: int) -> None:
        super().__init__()
        self.encoder = Coder(src_vocab, EncoderLayer)
        self.fc_out = nn.Linear(HID_DIM, len(CLASSES))

    def forward(self, src: Tensor) -> Tensor:
        return self.fc_out(self.encoder(src, (src != PAD)[:, None, None])[:, 0])


@torch.inference_mode()
def greedy(model: Seq2Seq, source: list[int]) -> list[int]:
    tokens = [SOS]
    while tokens[-1] != EOS and len(tokens) <= MAX_LENGTH:
        tokens.append(int(model(torch.tensor([source]), torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[1:]


def batch_of(sentences: list[list[int]]) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sentences], batch_first=True, padding_value=PAD)


def train(model: nn.Module, examples: list, steps: int) -> None:
    """`examples` are pairs of a source and a target, or of a source and its class."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    loss_of = nn.CrossEntropyLoss(ignore_index=PAD if isinstance(model, Seq2Seq) else -100)
    for step in range(1, steps + 1):
        sources, targets = zip(*(examples[i] for i in torch.randint(len(examples), (48,)).tolist()), strict=True)
        if isinstance(model, Seq2Seq):
            trg = batch_of(targets)
            loss = loss_of(model(batch_of(sources), trg[:, :-1]).flatten(0, 1), trg[:, 1:].flatten())
        else:
            loss = loss_of(model(batch_of(sources)), torch.tensor(targets))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        if step % 100 == 0 or step == steps:
            print(f"{type(model).__name__}, step {step}: loss {loss.item():.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("build/examples/tutorial_spacy"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)

    # Lower-cased words by spaCy's rules; those that come once are unknown. Every 16th pair is for the comparison.
    lines, ids, sizes = {}, {}, []
    for language in ("de", "en"):
        tokenizer = spacy.blank(language).tokenizer
        lines[language] = (DATA / f"captions.{language}").read_text(encoding="utf-8").splitlines()
        sentences = [[token.text.lower() for token in tokenizer(line)] for line in lines[language]]
        counts = Counter(word for words in sentences for word in words)
        words_of = [*SPECIALS, *(word for word, count in counts.most_common() if count > 1)]
        (options.out / f"{language}.json").write_text(json.dumps(words_of), encoding="utf-8")
        known = {word: number for number, word in enumerate(words_of)}
        ids[language] = [[SOS, *(known.get(word, UNK) for word in words), EOS] for words in sentences]
        sizes.append(len(words_of))
    labels = [int(not line.startswith("Ein")) for line in lines["de"]]
    seen = [number for number in range(len(labels)) if number % 16]

    translator, classifier = Seq2Seq(*sizes), Classifier(sizes[0])
    train(translator, [(ids["de"][n], ids["en"][n]) for n in seen], options.steps)
    train(classifier, [(ids["de"][n], labels[n]) for n in seen], options.steps // 10)
    for name, model in (("translator", translator.eval()), ("classifier", classifier.eval())):
        torch.save(model.state_dict(), options.out / f"{name}.pt")
        # Heads are in no file. The source tokenizer is part of the bundle, so that it reads raw text.
        text = {"src_vocab": options.out / "de.json", "src_tokenizer": "spacy:de", "lowercase": True}
        if name == "translator":
            text["tgt_vocab"] = options.out / "en.json"
        tfexport.export(options.out / f"{name}.pt", options.out / name, heads=N_HEADS, force=True, **text)

    different, held_out = 0, lines["de"][::16]
    translations = tfexport.load(options.out / "translator").translate(held_out)
    classes = tfexport.load_classifier(options.out / "classifier").classify(held_out)
    for sentence, source, translation, found in zip(held_out, ids["de"][::16], translations, classes, strict=True):
        with torch.inference_mode():
            label = int(classifier(torch.tensor([source])).argmax())
        same = greedy(translator, source) == list(translation.hypotheses[0].ids) and label == found.classes[0][0]
        different += not same
        print(f"{'same' if same else 'DIFFERENT'}: {sentence} -> {translation} [{CLASSES[label]}]")
    print(f"{len(held_out)} sentences; tokens or classes of {different} differ between PyTorch and the bundles")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
