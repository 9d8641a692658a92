"""Checkpoints that faults are planted into: small, of several kinds, trained enough to end their outputs.

They copy words: the target word of each source word, in order. So outputs depend on every source word,
end in eos, and do not turn on the last bit of a logit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.config import ModelConfig
from tfexport.models.formats import native
from tfexport.models.transformer import Transformer
from tfexport.text.vocabularies import read_vocabulary

SPECIALS = ["<unk>", "<pad>", "<sos>", "<eos>"]
UNK, PAD, BOS, EOS = range(4)
LINES = 24
ACTIVE = 40
"""Words that the text has; the others of a vocabulary are never touched by it."""
LONGEST = 11


@dataclass(frozen=True)
class Base:
    """A checkpoint, text for it, and what the commands have to be told."""

    name: str
    checkpoint: Path
    text: Path
    export_flags: list[str] = field(default_factory=list)
    parity_flags: list[str] = field(default_factory=list)
    vocabulary_flags: list[str] = field(default_factory=list)
    """Given to `parity` too, where it takes them."""


Logits = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of padded sources, their lengths and padded target inputs."""


def sentences(count: int, *, seed: int, first: int = 4, longest: int = LONGEST) -> list[list[int]]:
    """Lists of ids of active words, of all lengths."""
    chosen = random.Random(seed)
    return [[chosen.randrange(first, first + ACTIVE) for _ in range(1 + index % longest)] for index in range(count)]


def copied(word: int) -> int:
    """The target word of a source word: another id, so that sides cannot be mistaken for each other."""
    return 4 + (word - 4) * 7 % ACTIVE


def trained(model: nn.Module, logits: Logits, *, pad: int, bos: int, eos: int, framed: bool, steps: int) -> None:
    """Let `model` learn to copy. `framed` sources begin with bos; all end with eos."""
    model.train()
    first = max(pad, bos, eos, 3) + 1
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        batch = sentences(48, seed=step, first=first)
        sources = [[*([bos] if framed else []), *ids, eos] for ids in batch]
        outputs = [[first - 4 + copied(word - first + 4) for word in ids] + [eos] for ids in batch]
        inputs = [[bos, *output[:-1]] for output in outputs]
        src, tgt, wanted = (_padded(rows, pad) for rows in (sources, inputs, outputs))
        found = logits(src, torch.tensor(list(map(len, sources))), tgt)
        real = torch.arange(wanted.shape[1]) < torch.tensor(list(map(len, outputs)))[:, None]
        loss = F.cross_entropy(found[real], wanted[real], label_smoothing=0.02)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def _padded(rows: list[list[int]], pad: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])


def randomised_ends(model: nn.Module) -> None:
    """Biases and norms that are not ones and zeros: a lost or swapped one is to change numbers."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def vocabularies(folder: Path, source: int, target: int) -> list[str]:
    """Write word lists of these sizes; returns the flags that name them."""
    flags = []
    for side, stem, size in (("src", "wort", source), ("tgt", "word", target)):
        path = folder / f"{side}_vocab.json"
        path.write_text(json.dumps([*SPECIALS, *(f"{stem}{i}" for i in range(4, size))]), encoding="utf-8")
        flags += [f"--{side}-vocab", str(path)]
    return flags


def write_text(path: Path, rows: Iterable[list[int]], stem: str | None) -> Path:
    """Lines of words, the first letter of some in upper case, or of ids where there is no `stem`."""
    lines = [
        " ".join(
            str(word) if stem is None else (stem.title() if (index + place) % 5 == 0 else stem) + str(word)
            for place, word in enumerate(row)
        )
        for index, row in enumerate(rows)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def words(folder: Path, *, steps: int = 700) -> Base:
    """A tutorial's state_dict with JSON vocabularies and text: post-norm, learned positions, ReLU, heads of 16."""
    from makers.references.tutorial import TutorialTransformer

    path, flags = folder / "words.pt", vocabularies(folder, 90, 83)
    if not path.exists():
        torch.manual_seed(1)
        sizes = {"d_model": 48, "n_heads": 3, "d_ffn": 80, "n_encoder_layers": 2, "n_decoder_layers": 2}
        model = TutorialTransformer(src_vocab=90, tgt_vocab=83, max_len=40, pad_id=PAD, **sizes)
        for name, parameter in model.named_parameters():
            if "embedding" in name:
                parameter.data *= 0.2
        randomised_ends(model)
        trained(model, lambda src, _, tgt: model(src, tgt), pad=PAD, bos=BOS, eos=EOS, framed=True, steps=steps)
        torch.save(model.state_dict(), path)
    text = write_text(folder / "words.txt", sentences(LINES, seed=91), "wort")
    return Base("words", path, text, ["--heads", "3", "--lowercase", *flags], vocabulary_flags=[*flags, "--lowercase"])


def screened(folder: Path, *, steps: int = 500) -> Base:
    """Our own file with 1,100 target words: pre-norm, a norm at the end, fewer heads in the encoder, GELU, sinusoids, ties,
    suppressed words; its greedy step screens the vocabulary."""
    path = folder / "screened.safetensors"
    vocabularies(folder, 1060, 1100)
    config = ModelConfig(
        d_model=64,
        n_heads=4,
        n_encoder_heads=2,
        d_ff=96,
        n_encoder_layers=2,
        n_decoder_layers=2,
        src_vocab_size=1060,
        tgt_vocab_size=1100,
        max_source_length=40,
        max_target_length=40,
        unk_id=UNK,
        pad_id=PAD,
        bos_id=BOS,
        eos_id=EOS,
        source_bos=True,
        source_eos=True,
        suppressed_ids=(PAD, BOS),
        suppressed_first_ids=(EOS,),
        norm_first=True,
        final_norm=True,
        norm_eps=1e-6,
        activation="gelu",
        output_bias=True,
        embedding_scale=8.0,
    )
    if not path.exists():
        torch.manual_seed(2)
        model = Transformer(config)
        randomised_ends(model)
        trained(model, model, pad=PAD, bos=BOS, eos=EOS, framed=True, steps=steps)
        sides = (
            read_vocabulary(folder / "src_vocab.json", lowercase=True),
            read_vocabulary(folder / "tgt_vocab.json"),
        )
        native.save(path, model.state_dict(), config, native.Tokenizers(*sides), torch.float32)
    text = write_text(folder / "screened.txt", sentences(LINES, seed=92), "wort")
    return Base("screened", path, text)


MARIAN: dict[str, Any] = {
    "vocab_size": 59,
    "decoder_vocab_size": 53,
    "share_encoder_decoder_embeddings": False,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 1,
    "activation_function": "swish",
    "scale_embedding": True,
}
SHARPER = 12.0
"""By which the sharp model's queries are larger than learned."""


def sharp(folder: Path, *, steps: int = 600, sharper: float = SHARPER) -> Base:
    """A Marian folder of the transformers library whose attention is nearly one key's: its softmax multiplies rounding."""
    import transformers

    path = folder / "sharp"
    if not (path / "config.json").exists():
        torch.manual_seed(3)
        model = transformers.MarianMTModel(transformers.MarianConfig(**MARIAN))
        randomised_ends(model)

        def logits(src: Tensor, lengths: Tensor, tgt: Tensor) -> Tensor:
            mask = (torch.arange(src.shape[1]) < lengths[:, None]).long()
            return model(input_ids=src, attention_mask=mask, decoder_input_ids=tgt, use_cache=False).logits

        # Pad is what the decoder begins with, as OPUS-MT has it.
        trained(model, logits, pad=1, bos=1, eos=2, framed=False, steps=steps)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".q_proj." in name:
                    parameter *= sharper
        model.final_logits_bias.normal_(std=0.2)
        model.generation_config.bad_words_ids = [[1]]
        model.generation_config.num_beams = 1
        model.save_pretrained(path)
    rows = [[*row, 2] for row in sentences(LINES, seed=93)]
    return Base("sharp", path, write_text(folder / "sharp.txt", rows, None), parity_flags=["--input-format", "ids"])


T5: dict[str, Any] = {
    "vocab_size": 59,
    "d_model": 32,
    "d_kv": 8,
    "num_heads": 3,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 15,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}


def relative(folder: Path, *, steps: int = 1500) -> Base:
    """A T5 folder: relative positions, unscaled attention, RMS norms, gated feed-forward, one embedding for both sides."""
    import transformers

    path = folder / "relative"
    if not (path / "config.json").exists():
        torch.manual_seed(4)
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, dropout_rate=0.0))
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

        def logits(src: Tensor, lengths: Tensor, tgt: Tensor) -> Tensor:
            mask = (torch.arange(src.shape[1]) < lengths[:, None]).long()
            return model(input_ids=src, attention_mask=mask, decoder_input_ids=tgt, use_cache=False).logits

        trained(model, logits, pad=0, bos=0, eos=1, framed=False, steps=steps)
        model.save_pretrained(path)
    rows = [[*row, 1] for row in sentences(LINES, seed=94)]
    text = write_text(folder / "relative.txt", rows, None)
    return Base("relative", path, text, parity_flags=["--input-format", "ids", "--max-length", "20"])


def real(folder: Path, shared: Path, *, lines: int = 20) -> Base | None:
    """The tutorial's own German-English checkpoint; None where it is not there."""
    tutorial = shared / "checkpoints" / "tutorial-de-en"
    if not (tutorial / "model.pt").is_file():
        return None
    expected = (tutorial / "greedy.test_2016_flickr.jsonl").read_text(encoding="utf-8").splitlines()[:lines]
    text = write_text(folder / "real.txt", [json.loads(line)["src"] for line in expected], None)
    flags = ["--src-vocab", str(tutorial / "src_vocab.json"), "--tgt-vocab", str(tutorial / "tgt_vocab.json")]
    return Base(
        "real",
        tutorial / "model.pt",
        text,
        ["--heads", "8", "--lowercase", *flags],
        ["--input-format", "ids", "--max-length", "50"],
        [*flags, "--lowercase"],
    )


BUILDERS: dict[str, Callable[[Path], Base]] = {
    "words": words,
    "screened": screened,
    "sharp": sharp,
    "relative": relative,
}
