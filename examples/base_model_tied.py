"""The base model of "Attention Is All You Need", in small sizes: one embedding for source, target and output, joint BPE.

    python examples/base_model_tied.py

The layers are those of `torch.nn`. What their state_dict does not contain is said to `tfexport.export`: heads, the place of
the norms, the activation, the scale of the embeddings. Decodes in fp32 and int8, greedy and with a beam, and compares the
greedy tokens in fp32 with PyTorch's. The exit code is 1 where one differs.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F

import tfexport

DATA = Path(__file__).parent / "data"
PAD, BOS, EOS, UNK = range(4)
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]
# The paper's: 512, 8, 2048, 6, 0.1, a vocabulary of 37,000 and 4,000 steps of warm-up.
D_MODEL, HEADS, D_FF, LAYERS, DROPOUT, VOCABULARY, WARMUP = 128, 8, 512, 2, 0.1, 500, 100
LONGEST = 48


def sinusoids(length: int) -> Tensor:
    """[length, d]: section 3.5 of the paper."""
    rates = 10000 ** (-torch.arange(0, D_MODEL, 2) / D_MODEL)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


class BaseModel(nn.Module):
    """`src` [batch, src] and `tgt` [batch, tgt], padded with PAD, to logits [batch, tgt, vocab]."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        sizes = {"d_model": D_MODEL, "nhead": HEADS, "dim_feedforward": D_FF, "dropout": DROPOUT, "batch_first": True}
        # Post-norm, so no norm follows the last layer.
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), LAYERS, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), LAYERS)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        self.embedding = nn.Embedding(vocab, D_MODEL)
        nn.init.normal_(self.embedding.weight, std=D_MODEL**-0.5)
        self.dropout = nn.Dropout(DROPOUT)

    def embed(self, ids: Tensor) -> Tensor:
        return self.dropout(self.embedding(ids) * math.sqrt(D_MODEL) + sinusoids(ids.shape[1]))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        hidden = src == PAD
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        memory = self.encoder(self.embed(src), src_key_padding_mask=hidden)
        states = self.decoder(
            self.embed(tgt), memory, tgt_mask=future, tgt_key_padding_mask=tgt == PAD, memory_key_padding_mask=hidden
        )
        return F.linear(states, self.embedding.weight)


@torch.inference_mode()
def greedy(model: BaseModel, source: list[int]) -> list[int]:
    """The whole prefix anew for every token."""
    tokens = [BOS]
    while tokens[-1] != EOS and len(tokens) <= LONGEST:
        tokens.append(int(model(torch.tensor([source]), torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[1:]


def joint_vocabulary(path: Path) -> Tokenizer:
    """Byte-level BPE of both languages, written to `path`."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(DATA / f"captions.{language}") for language in ("de", "en")], trainer)
    tokenizer.save(str(path))
    return tokenizer


def train(model: BaseModel, pairs: list[tuple[list[int], list[int]]], steps: int) -> None:
    """Section 5.3 and 5.4: Adam, warm-up and then the inverse root of the step, label smoothing."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3 * D_MODEL**-0.5, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) ** -0.5, (step + 1) * WARMUP**-1.5)
    )
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("build/examples/base_model_tied"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)

    tokenizer = joint_vocabulary(options.out / "tokenizer.json")
    german, english = (
        (DATA / f"captions.{language}").read_text(encoding="utf-8").splitlines() for language in ("de", "en")
    )
    # Sources end in eos, targets are between bos and eos.
    sources = [[*encoding.ids, EOS] for encoding in tokenizer.encode_batch(german)]
    targets = [[BOS, *encoding.ids, EOS] for encoding in tokenizer.encode_batch(english)]
    pairs = list(zip(sources, targets, strict=True))
    print(f"{tokenizer.get_vocab_size()} subwords; the longest sentence has {max(map(len, sources + targets))}")

    model = BaseModel(tokenizer.get_vocab_size())
    train(model, [pair for number, pair in enumerate(pairs) if number % 16], options.steps)
    model.eval()
    torch.save(model.state_dict(), options.out / "model.pt")

    tfexport.export(
        options.out / "model.pt",
        options.out / "bundle",
        precision="fp32,int8",
        force=True,
        **{"heads": HEADS, "norm_first": False, "activation": "relu", "embedding_scale": "sqrt"},
        **{"src_embedding": "embedding.weight", "tgt_embedding": "embedding.weight"},
        **{"output_layer": "embedding.weight", "positions": "sinusoidal", "max_length": LONGEST},
        **{"source_bos": False, "source_eos": True},
        **{"src_vocab": options.out / "tokenizer.json", "tgt_vocab": options.out / "tokenizer.json"},
    )

    held_out = german[::16]
    bundles = {name: tfexport.load(options.out / "bundle", precision=name) for name in ("fp32", "int8")}
    found = bundles["fp32"].translate(held_out)
    others = {
        "int8, greedy": bundles["int8"].translate(held_out),
        "fp32, beam 4": bundles["fp32"].translate(held_out, beam=4),
        "int8, beam 4": bundles["int8"].translate(held_out, beam=4),
    }
    different = 0
    for sentence, source, translation in zip(held_out, sources[::16], found, strict=True):
        same = greedy(model, source) == list(translation.hypotheses[0].ids)
        different += not same
        print(f"{'same' if same else 'DIFFERENT'}: {sentence} -> {translation}")
    for name, translations in others.items():
        equal = sum(str(one) == str(other) for one, other in zip(found, translations, strict=True))
        print(f"{name}: {equal} of {len(held_out)} texts are those of fp32, greedy")
    print(f"{len(held_out)} sentences; tokens of {different} differ between PyTorch and the bundle")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
