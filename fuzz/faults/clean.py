"""Bundles with nothing wrong: small ones of every kind, and checkpoints whose own float32 rounds badly. All are to pass.

The sums of badly rounding models depend on their order: PyTorch's float32 is as far from float64 as the graphs are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fuzz.faults import bases
from fuzz.faults.bases import BUILDERS, Base, write_text
from fuzz.faults.gate import ALL, certified, export, parity, reason, run
from fuzz.models.random_models import random_config, random_model
from tfexport.config import ModelConfig
from tfexport.models.formats import native
from tfexport.models.transformer import Transformer

LINES = 16
LIMIT = 24
"""Tokens of an output; random models hardly ever end."""
RANDOM = 24

Make = Callable[[Path], Base]


@dataclass(frozen=True)
class Clean:
    """A checkpoint with nothing wrong, and the precisions that it is exported in."""

    name: str
    make: Make
    precisions: Sequence[str]


def _sources(config: Any, count: int, seed: int) -> list[list[int]]:
    """Ids as the encoder reads them, without padding."""
    chosen = random.Random(seed)
    ends = [config.eos_id] if config.source_eos else []
    begins = [config.bos_id] if config.source_bos else []
    longest = max(0, min(20, config.max_source_length - len(begins) - len(ends)))
    words = [word for word in range(config.src_vocab_size) if word not in (config.pad_id, config.bos_id, config.eos_id)]
    lengths = [min(longest, 1 + index % 20) for index in range(count)]
    rows = [[*begins, *(chosen.choice(words) for _ in range(length)), *ends] for length in lengths]
    return [row or [words[0]] for row in rows]


def _flags() -> list[str]:
    return ["--input-format", "ids", "--max-length", str(LIMIT)]


def _native(config: ModelConfig, seed: int, change: Callable[[Transformer], None] | None = None) -> Make:
    """Our own file of a random model."""

    def make(folder: Path) -> Base:
        model = random_model(config, seed)
        if change is not None:
            with torch.no_grad():
                change(model)
        path = folder / "model.safetensors"
        native.save(path, model.state_dict(), config, native.Tokenizers(None, None), torch.float32)
        return Base("native", path, write_text(folder / "ids.txt", _sources(config, LINES, seed), None), [], _flags())

    return make


def _times(factor: float) -> Callable[[Transformer], None]:
    """All matrices of layers are so much larger."""

    def change(model: Transformer) -> None:
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.dim() > 1:
                parameter *= factor

    return change


def _sharper(factor: float) -> Callable[[Transformer], None]:
    def change(model: Transformer) -> None:
        for name, parameter in model.named_parameters():
            if "_attention.query." in name:
                parameter *= factor

    return change


def _folder(name: str) -> Make:
    """A folder of the transformers library, as its tests make them."""

    def make(folder: Path) -> Base:
        from makers.hugging_face_models import made, sources_of

        model = made(name)
        model.save_pretrained(folder / "model")
        text = write_text(folder / "ids.txt", sources_of(model, LINES), None)
        return Base(name, folder / "model", text, [], _flags())

    return make


def _torch(name: str) -> Make:
    """A state_dict around torch.nn.Transformer."""

    def make(folder: Path) -> Base:
        from makers.torch_models import HEADS, IDS, LENGTH, MODELS, SRC_VOCAB, TGT_VOCAB, made

        torch.save(made(name).state_dict(), folder / "model.pt")
        hints = {"n_heads": HEADS, **IDS, **MODELS[name].hints}  # type: ignore[attr-defined]
        (folder / "model.json").write_text(json.dumps(hints), encoding="utf-8")
        words = TGT_VOCAB if name == "shared" else SRC_VOCAB
        chosen = random.Random(1)
        rows = [[chosen.randrange(4, words) for _ in range(1 + i % (LENGTH - 4))] for i in range(LINES)]
        return Base(name, folder / "model.pt", write_text(folder / "ids.txt", rows, None), [], _flags())

    return make


USUAL = ModelConfig(
    d_model=32,
    n_heads=2,
    d_ff=64,
    n_encoder_layers=2,
    n_decoder_layers=2,
    src_vocab_size=61,
    tgt_vocab_size=57,
    max_source_length=40,
    max_target_length=40,
    unk_id=0,
    pad_id=1,
    bos_id=2,
    eos_id=3,
    output_bias=True,
)
PRE = USUAL.replace(norm_first=True)
RELATIVE = PRE.replace(
    norm="rms",
    final_norm=True,
    positions="relative",
    max_distance=9,
    attention_bias=False,
    feed_forward_bias=False,
    output_bias=False,
)


def clean() -> Iterator[Clean]:
    """All of them."""
    mixes = (("fp32",), ("fp32", "bf16"), ("fp32", "fp16"), ("fp32", "int8", "int4"))
    for name in BUILDERS:
        yield Clean(f"trained {name}", BUILDERS[name], ALL)
    for seed in range(RANDOM):
        config = random_config(random.Random(1000 + seed))
        yield Clean(f"random {seed}", _native(config, 1000 + seed), mixes[seed % 4])
    deep = {"n_encoder_layers": 5, "n_decoder_layers": 5}
    half = ("fp32", "fp16", "bf16")
    for name, config, change, precisions in (
        ("growing residual", PRE.replace(**deep), _times(4.0), ("fp32",)),
        ("growing residual, larger", PRE.replace(**deep), _times(8.0), ("fp32",)),
        ("growing residual, normed", PRE.replace(final_norm=True, **deep), _times(4.0), ALL),
        ("large weights", USUAL, _times(3.0), ALL),
        ("sharp", USUAL, _sharper(12.0), ("fp32",)),
        ("sharp pre-norm", PRE.replace(final_norm=True), _sharper(20.0), ("fp32",)),
        ("sharp relative", RELATIVE, _sharper(12.0), ("fp32",)),
        ("relative", RELATIVE, None, ALL),
        ("relative gated", RELATIVE.replace(gated=True, activation="gelu_tanh", d_head=12), None, half),
        ("gated silu", PRE.replace(gated=True, activation="silu", final_norm=True), None, ALL),
        ("large vocabulary", USUAL.replace(tgt_vocab_size=5000, d_model=64, n_heads=4), None, ALL),
        ("tied", USUAL.replace(tgt_vocab_size=61, tie_source_target=True, tie_output=True), None, ALL),
        ("embedding norm", USUAL.replace(embedding_norm=True, positions="learned", position_offset=2), None, half),
        (
            "suppressed",
            USUAL.replace(suppressed_ids=(1, 2, 9), suppressed_first_ids=(3,), forced_first_id=5),
            None,
            half,
        ),
        ("wide heads", USUAL.replace(d_head=48), None, half),
        ("deep", USUAL.replace(n_encoder_layers=8, n_decoder_layers=1), None, ALL),
    ):
        yield Clean(name, _native(config, 7, change), precisions)
    for name in ("marian", "bart", "mbart", "pegasus", "m2m_100", "t5", "t5-gated", "mt5"):
        yield Clean(f"transformers {name}", _folder(name), half)
    for name in ("tutorial", "stacks", "shared", "tied"):
        yield Clean(f"torch {name}", _torch(name), ("fp32", "int8"))


def check_clean(work: Path, console: Console) -> int:
    """Export each and compare; returns how many are rejected."""
    table = Table("bundle", "precisions", "parity", box=None)
    bad = exact = 0
    for entry in clean():
        folder = work / "clean" / entry.name.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        base = entry.make(folder if not entry.name.startswith("trained") else _kept(work, entry.name))
        export(base, folder / "bundle", entry.precisions)
        answers = {"all": parity(base, folder / "bundle")}
        if not answers["all"].passed:
            answers = {name: parity(base, folder / "bundle", "--precision", name) for name in entry.precisions}
        wrong = {name: answer for name, answer in answers.items() if not answer.passed}
        bad += bool(wrong)
        exact += "fp32" in wrong
        for name, answer in wrong.items():
            console.print(f"[red]FALSE ALARM[/red] {entry.name} in {name}: {reason(answer)}", highlight=False)
        verdict = f"[red]{', '.join(wrong)}" if wrong else "[green]passed"
        table.add_row(entry.name, ",".join(entry.precisions), verdict)
    console.print(table)
    console.print(f"{table.row_count} clean bundles, {bad} rejected by parity, {exact} of them in fp32")
    return bad


def _kept(work: Path, name: str) -> Path:
    folder = work / name.removeprefix("trained ")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# --- checkpoints that are right and round badly


def _loud(folder: Path) -> Base:
    """A tutorial's model whose logits are so large that float32 is off by 1e-4 and more."""
    base = bases.words(_made(folder / "words"))
    weights = torch.load(base.checkpoint, weights_only=True)
    for name in ("decoder.fc_out.weight", "decoder.fc_out.bias"):
        weights[name] *= LOUDER
    torch.save(weights, folder / "loud.pt")
    return replace(base, name="loud", checkpoint=folder / "loud.pt")


LOUDER = 16.0


def _sharp(folder: Path) -> Base:
    return bases.sharp(folder, sharper=HARDER)


HARDER = 60.0


def _rough(folder: Path) -> Base:
    """A random Marian folder with sharp attention, untrained: its float32 is off by some 5e-4."""
    from makers.hugging_face_models import made, sources_of

    path = folder / "rough"
    if not (path / "config.json").exists():
        model = made("marian")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".q_proj." in name:
                    parameter *= ROUGHER
        model.save_pretrained(path)
        write_text(folder / "ids.txt", sources_of(model, LINES), None)
    return Base("rough", path, folder / "ids.txt", [], _flags())


ROUGHER = 36.0


def _t5_base(folder: Path) -> Base:
    """Of T5-base's size, with random weights as T5 begins with them, and so with unscaled attention."""
    import transformers

    path = folder / "t5-base"
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        sizes = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128}
        config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
        transformers.T5ForConditionalGeneration(config).eval().save_pretrained(path)
        chosen = random.Random(5)
        rows = [[*(chosen.randrange(2, 32000) for _ in range(3 + 2 * i)), 1] for i in range(8)]
        write_text(folder / "ids.txt", rows, None)
    return Base("t5-base", path, folder / "ids.txt", [], ["--input-format", "ids", "--max-length", "12"])


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _own_outputs(base: Base, rows: list[list[int]], limit: int) -> tuple[list[list[int]], float]:
    """What the checkpoint's own code gives greedily, to eos or the limit, and how far its float32 is from float64."""
    if base.name == "loud":
        from makers.references.tutorial import TutorialTransformer

        sizes = {"d_model": 48, "n_heads": 3, "d_ffn": 80, "n_encoder_layers": 2, "n_decoder_layers": 2}
        module = TutorialTransformer(src_vocab=90, tgt_vocab=83, max_len=40, **sizes).eval()
        module.load_state_dict(torch.load(base.checkpoint, weights_only=True))
        begin, end, banned = 2, 3, []

        def logits(row: list[int], output: list[int]) -> torch.Tensor:
            return module(torch.tensor([row]), torch.tensor([output]))[0]
    else:
        import transformers

        module = transformers.AutoModelForSeq2SeqLM.from_pretrained(base.checkpoint).eval()
        begin, end = module.config.decoder_start_token_id, module.config.eos_token_id
        banned = [word for (word,) in module.generation_config.bad_words_ids or []]

        def logits(row: list[int], output: list[int]) -> torch.Tensor:
            return module(input_ids=torch.tensor([row]), decoder_input_ids=torch.tensor([output])).logits[0]

    found, told = [], []
    with torch.inference_mode():
        for row in rows:
            output = [begin]
            while len(output) <= limit and (len(output) == 1 or output[-1] != end):
                last = logits(row, output)[-1].clone()
                last[banned] = -np.inf
                output.append(int(last.argmax()))
            told.append(logits(row, output).double())
            found.append(output)
        module.double()
        errors = [
            (logits(row, output) - was).abs().max().item() for row, output, was in zip(rows, found, told, strict=True)
        ]
    return [output[1:] for output in found], max(errors)


def check_hard(work: Path, console: Console, *, t5_base: bool) -> int:
    """Export, certify and decode each; returns how many fail somewhere."""
    bad = 0
    makes: list[tuple[str, Make]] = [("loud", _loud), ("sharp", _sharp), ("rough", _rough)]
    for name, make in [*makes, *([("t5-base", _t5_base)] if t5_base else [])]:
        folder = _made(work / "hard" / name)
        base = make(folder)
        bundle = folder / "bundle"
        exported = run(["export", str(base.checkpoint), "-o", str(bundle), "--force", *base.export_flags])
        found = {"export": exported.passed}
        said = "" if exported.passed else reason(exported)
        if not exported.passed:
            export(base, bundle, ["fp32"])
        answer = parity(base, bundle)
        found |= {"parity": answer.passed, "certified": certified(bundle, "fp32")}
        said += "" if answer.passed else f" // {reason(answer)}"
        lines = base.text.read_text(encoding="utf-8").splitlines()
        if name == "loud":
            lines = [
                " ".join(map(str, [2, *(int("".join(filter(str.isdigit, word))) for word in line.split()), 3]))
                for line in lines
            ]
        ids = folder / "own.txt"
        ids.write_text("\n".join(lines) + "\n", encoding="utf-8")
        rows = [list(map(int, line.split())) for line in lines]
        limit = 12 if name == "t5-base" else LIMIT
        out = folder / "out.txt"
        flags = ["--input-format", "ids", "--output-format", "ids", "--max-length", str(limit), "-o", str(out)]
        decoded = run(["decode", str(bundle), str(ids), *flags, "--runtime", "ort-cpu", "--threads", "1"])
        outputs, error = _own_outputs(base, rows, limit)
        ours = [list(map(int, line.split())) for line in out.read_text(encoding="utf-8").splitlines()]
        found["decoded"] = decoded.passed and ours == outputs
        same = sum(one == other for one, other in zip(ours, outputs, strict=True))
        marks = ", ".join(f"{what} {'yes' if holds else 'NO'}" for what, holds in found.items())
        console.print(
            f"{name}: its float32 is off by {error:.1e}; {marks} ({same} of {len(rows)} outputs its own). {said}",
            highlight=False,
            markup=False,
        )
        bad += not all(found.values())
    return bad
