"""Errors about checkpoints give advice that works: whoever follows it literally ends with a command that works."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from makers import hugging_face_models, torch_models
from makers.paths import ROOT
from makers.tiny import IDS
from tests.support.advice import User, config_of, missing_in
from tests.support.advice_inputs import (
    Saved,
    argos,
    code_of_its_own,
    differing_words,
    family,
    file,
    folder,
    hugging_face,
    own_family,
    parts,
    rms,
    same_rows,
    script,
    shards,
    torch_model,
    two,
    with_json,
    without,
    words,
)
from tests.support.checkpoints import QUERY, weights_of
from tests.support.commands import Outcome, Run

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]

KNOWS = {
    **{"--heads": "3", "--unk": "0", "--pad": "1", "--bos": "2", "--eos": "3", "--family": "tutorial"},
    **{"--src-vocab": "src.json", "--tgt-vocab": "tgt.json", "--module": "my_code.py:build"},
}
IDS_GIVEN = "--heads 3 --pad 1 --bos 2 --eos 3"
TORCH = {
    **{"tutorial": {"--norm-first": False, "--activation": "relu", "--embedding-scale": "sqrt"}},
    **{"stacks": {"--norm-first": True, "--activation": "gelu", "--embedding-scale": "1"}},
    **{"tied": {"--norm-first": True, "--activation": "relu", "--embedding-scale": "1"}},
    "shared": {
        **{"--norm-first": False, "--activation": "gelu", "--embedding-scale": "sqrt", "--norm": "layer"},
        **{"--max-length": "30", "--positions": "sinusoidal"},
    },
}
OWN = {"--heads": "4", "--pad": "0", "--bos": "1", "--eos": "2"}
OWN_GIVEN = "--family my_family.py --heads 4 --pad 0 --bos 1 --eos 2"


@dataclass(frozen=True)
class Case:
    """An input, the first command and error, and the end that following the advice has."""

    make: Callable[[], Any]
    """Writes the input to the working folder. It may return the trained module, for advice that is code."""
    command: str
    error: str
    """A pattern of the first error."""
    knows: Mapping[str, str | bool | None] = field(default_factory=lambda: KNOWS)
    end: str = ""
    """A pattern of the refusal at the end; empty if a command works at the end."""


MODULE = {**KNOWS, "--heads": "2"}
CASES = {
    # Settings that no file contains.
    **{
        name: Case(family(name), "model.pt", r"does not contain n_heads|does not contain pad_id")
        for name in ("tutorial", "tutorial-classifier", "annotated", "per-head")
    },
    **{
        f"torch {name}": Case(torch_model(name), "model.pt", r"does not contain", {**KNOWS, **TORCH[name]})
        for name in torch_models.MODELS
    },
    "torch rms": Case(
        torch_model("tutorial", rms),
        "model.pt",
        "--norm layer",
        {**KNOWS, **TORCH["tutorial"], "--norm": "rms", "--norm-eps": "1e-6"},
    ),
    "torch text": Case(
        torch_model("tutorial"),
        "model.pt --src-vocab words.json",
        "source_bos",
        {**KNOWS, **TORCH["tutorial"], "--source-bos": False, "--source-eos": True},
    ),
    "torch none": Case(
        torch_model("tutorial", lambda model: setattr(model, "positional_encoding", nn.Identity())),
        "model.pt",
        "rotary positions and ALiBi",
        {**KNOWS, **TORCH["tutorial"], "--positions": "none", "--max-length": "30"},
    ),
    "torch target": Case(
        lambda: torch.save(
            {k: t for k, t in torch_models.made("tutorial", same_rows).state_dict().items() if "tgt_tok_emb" not in k},
            "model.pt",
        ),
        "model.pt",
        "tgt_embedding",
        {**KNOWS, **TORCH["tutorial"], "--tgt-embedding": "generator"},
    ),
    "module": Case(code_of_its_own, "model.pt --module my_code.py:build", "does not contain pad_id", MODULE),
    # Several files, and parts in one.
    "shards folder": Case(shards("m"), "m", "does not contain n_heads"),
    "shards index": Case(shards("m"), "m/model.safetensors.index.json", "does not contain n_heads"),
    "shard": Case(shards("m"), f"m/model-00001-of-00002.safetensors {IDS_GIVEN}", "one of 2 shards. Give their index"),
    "shard missing": Case(shards("m", absent=True), "m", "lists model-.*missing", end="Put it beside the index"),
    "parts": Case(file(parts("")), "model.pt", "does not contain n_heads"),
    "parts with suffix": Case(file(parts("_state_dict")), "model.pt", "does not contain n_heads"),
    "two": Case(file(two), f"model.pt {IDS_GIVEN}", "in 2 places", {**KNOWS, "--key": True}),
    "two parts": Case(file(parts("_net")), f"model.pt {IDS_GIVEN}", "in 2 places"),
    "wrong key": Case(file(two), f"model.pt --key other {IDS_GIVEN}", "no entry 'other'", {**KNOWS, "--key": True}),
    "toolkit key": Case(hugging_face("m"), "m --key net", "one place for its weights"),
    # Tensors that are no plain weights.
    "entries": Case(
        file(lambda w: {**w, "epoch": 3, "lr": 0.1}), f"model.pt {IDS_GIVEN}", "--ignore epoch --ignore lr"
    ),
    "mask": Case(file(lambda w: {**w, "mask": torch.ones(3)}), f"model.pt {IDS_GIVEN}", "unexpected: mask"),
    "quoted": Case(file(lambda w: {**w, "a b": torch.ones(3)}), f"model.pt {IDS_GIVEN}", "--ignore 'a b'"),
    "sparse": Case(file(lambda w: {**w, QUERY: w[QUERY].to_sparse()}), f"model.pt {IDS_GIVEN}", "sparse tensor"),
    "sparse rows": Case(
        file(lambda w: {**w, QUERY: w[QUERY].to_sparse_csr()}), f"model.pt {IDS_GIVEN}", "sparse tensor"
    ),
    "sparse parameter": Case(
        file(lambda w: {**w, QUERY: nn.Parameter(w[QUERY].to_sparse(), requires_grad=False)}),
        f"model.pt {IDS_GIVEN}",
        "sparse tensor",
    ),
    "sparse mask": Case(
        file(lambda w: {**w, "mask": torch.eye(3).to_sparse()}), f"model.pt {IDS_GIVEN}", "sparse tensor"
    ),
    "array": Case(file(lambda w: {**w, QUERY: w[QUERY].numpy()}), f"model.pt {IDS_GIVEN}", "NumPy array"),
    "arrays": Case(file(lambda w: [t.numpy() for t in w.values()]), f"model.pt {IDS_GIVEN}", "no weights by name"),
    "wrong ignore": Case(file(dict), f"model.pt {IDS_GIVEN} --ignore crit.*", "no weight of a name like"),
    # Other formats.
    "adapter": Case(
        folder("m", adapter_config__json="{}"),
        "m",
        "adapter such as LoRA",
        end=r"merge_and_unload\(\)\.save_pretrained",
    ),
    "adapter file": Case(
        file(lambda w: {**w, "encoder.q.lora_A.weight": torch.ones(2, 3)}),
        "model.pt",
        "LoRA adapters",
        end=r"model\.merge_and_unload\(\)",
    ),
    "flax": Case(
        folder("m", config__json='{"model_type": "marian"}', flax_model__msgpack=b"\xdf"),
        "m",
        "only weights of Flax",
        end="from_flax=True",
    ),
    "tensorflow": Case(
        folder("m", config__json='{"model_type": "marian"}', tf_model__h5=b"\x89HDF"),
        "m",
        "only weights of TensorFlow",
        end="from_tf=True",
    ),
    "h5 alone": Case(folder("m", tf_model__h5=b"\x89HDF"), f"m {IDS_GIVEN}", "HDF5 file"),
    "msgpack": Case(
        folder("m", flax_model__msgpack=b"\xdf"), f"m/flax_model.msgpack {IDS_GIVEN}", "checkpoint of Flax"
    ),
    "own model_type": Case(
        folder("m", config__json='{"model_type": "my_nmt"}', model__safetensors=None),
        f"m {IDS_GIVEN}",
        "model_type 'my_nmt'",
    ),
    "own model_type in shards": Case(shards("m", '{"model_type": "my_nmt"}'), f"m {IDS_GIVEN}", "model_type 'my_nmt'"),
    "library's names": Case(
        lambda: torch.save(hugging_face_models.made("marian").state_dict(), "model.pt"),
        "model.pt",
        "libraries transformers",
        end="folder that save_pretrained wrote, with its config.json",
    ),
    "hub": Case(hugging_face("opus-mt-de-en"), "Helsinki-NLP/opus-mt-de-en", "no file or folder Helsinki-NLP"),
    "not the hub": Case(
        lambda: None, "runs/ckpt.pt", "there is no file runs/ckpt.pt", end="Give the path of a checkpoint"
    ),
    "folder inside": Case(hugging_face("m/checkpoint-5"), "m", "Give the folder inside"),
    "other names in a folder": Case(
        lambda: (Path("m").mkdir(), torch.save(weights_of("tutorial"), "m/last.pt")),
        f"m {IDS_GIVEN}",
        "give the path of one",
    ),
    "gzip": Case(
        lambda: (family("tutorial")(), Path("model.pt.gz").write_bytes(gzip.compress(Path("model.pt").read_bytes()))),
        f"model.pt.gz {IDS_GIVEN}",
        "compressed by gzip",
    ),
    "argos": Case(argos, "de-en.argosmodel", "package of Argos", {"--max-length": "30"}),
    "argos zip": Case(argos, "de-en.zip", "zip archive of something else", {"--max-length": "30"}),
    "script": Case(script, f"model.pt {IDS_GIVEN}", "TorchScript archive"),
    "marian binary": Case(
        lambda: Path("m.bin").write_bytes(b"\1" + bytes(99)),
        "m.bin",
        "binary model of Marian",
        end=r"Give the model\.npz",
    ),
    "onnx": Case(
        lambda: Path("m.onnx").write_bytes(b"\x08"), "m.onnx", "ONNX graph", end="Give the checkpoint that it was exp"
    ),
    "gguf": Case(
        lambda: Path("m.gguf").write_bytes(b"GGUF"), "m.gguf", "GGUF", end="Give the checkpoint that it was conv"
    ),
    # Wrong flags.
    "wrong family": Case(words, f"model.pt --family other {IDS_GIVEN}", "Give --family one of"),
    "another family": Case(words, f"model.pt --family annotated {IDS_GIVEN}", "is not of the family annotated"),
    "language": Case(words, f"model.pt --src-lang de {IDS_GIVEN}", "not of a toolkit that knows languages"),
    "embedding": Case(words, f"model.pt --src-embedding a {IDS_GIVEN}", "src_embedding has no effect"),
    "length": Case(words, f"model.pt --max-length 100 {IDS_GIVEN}", "Give at most that"),
    "lower case": Case(words, "model.pt --heads 3 --lowercase", "need --src-vocab"),
    "write family": Case(code_of_its_own, f"model.pt --write-family f.py {IDS_GIVEN}", "Give --module", MODULE),
    "scale": Case(
        torch_model("tutorial"), "model.pt --embedding-scale big", "Give sqrt", {**KNOWS, **TORCH["tutorial"]}
    ),
    "splitter": Case(
        words, "model.pt --heads 3 --src-vocab src.json --tgt-vocab tgt.json --src-tokenizer moses", "Use --src-to"
    ),
    "heads": Case(words, "model.pt --heads 5 --pad 1 --bos 2 --eos 3", "not a multiple of n_heads"),
    "pad": Case(words, "model.pt --heads 3 --pad 99 --bos 2 --eos 3", "pad_id 99 is not in the"),
    "contradiction": Case(hugging_face("m"), "m --heads 5", "says that n_heads is 2, not 5"),
    "vocabulary": Case(
        words, "model.pt --heads 3 --src-vocab tgt.json --tgt-vocab tgt.json", "source vocabulary has ids up to"
    ),
    "no vocabulary": Case(
        words, "model.pt --heads 3 --src-vocab no.json --tgt-vocab tgt.json", "cannot read the vocabulary"
    ),
    "differing vocabularies": Case(
        differing_words,
        "model.pt --heads 3 --src-vocab src.json --tgt-vocab other.json",
        r"--pad N \(the source vocabulary has 1, the target vocabulary 0\)",
    ),
    "unknown field": Case(
        with_json('{"n_head": 3, "pad_id": 1, "bos_id": 2, "eos_id": 3}'),
        "model.pt --config settings.json",
        "unknown field n_head",
    ),
    # Family files.
    "final norm": Case(
        own_family(lambda text: text.replace('"final_norm": True', '"final_norm": False')),
        f"model.pt {OWN_GIVEN}",
        "unexpected: encoder_ln.weight .as encoder.norm.weight.",
    ),
    "embedding norm": Case(
        own_family(lambda text: text.replace('"embedding_norm": True', '"embedding_norm": False')),
        f"model.pt {OWN_GIVEN}",
        "unexpected: encoder_embed_ln",
    ),
    "tied output": Case(
        own_family(lambda text: text.replace('"tie_output": True', '"tie_output": False')),
        f"model.pt {OWN_GIVEN}",
        "missing: output_weight",
    ),
    "layers": Case(
        own_family(lambda text: re.sub(r'("n_decoder_layers": ).*', r"\g<1>1,", text)),
        f"model.pt {OWN_GIVEN}",
        "The names show .n_decoder_layers.: 2",
    ),
    "positions": Case(
        own_family(lambda text: text.replace('"positions": "learned"', '"positions": "none"')),
        f"model.pt {OWN_GIVEN}",
        "The names show .positions.: 'learned'",
    ),
    "buffer": Case(own_family(extra={"steps": torch.ones(1)}), f"model.pt {OWN_GIVEN}", "Put steps into `renames`"),
    "arithmetic": Case(
        own_family(without("norm_first", "activation", "norm_eps")),
        f"model.pt {OWN_GIVEN}",
        "does not contain norm_first",
        {**OWN, "--norm-first": True, "--activation": "gelu", "--norm-eps": "1e-6"},
    ),
    "own ids": Case(own_family(), "model.pt --family my_family.py", "does not contain n_heads", OWN),
}


def error_of(outcome: Outcome) -> str:
    """The error of a command, which is one line."""
    assert outcome.code == 2, outcome.stderr
    (line,) = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


@pytest.mark.parametrize("name", CASES)
def test_following_the_advice_ends_well(name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    made = case.make()
    user = User(["export", *case.command.split()], case.knows, made if isinstance(made, Saved) else None)
    first = ""
    for _ in range(6):
        outcome = run(*user.command, "--no-parity", "--force", "-o", "bundle")
        if outcome.code == 0:
            break
        message = error_of(outcome)
        first = first or message
        if case.end and re.search(case.end, message):
            break
        user.follow(message)
    assert re.search(case.error, first), first
    assert bool(outcome.code) == bool(case.end), outcome.stderr
    assert case.end or (tmp_path / "bundle" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("make", "knows"),
    [
        (family("tutorial"), KNOWS),
        (family("tutorial-classifier"), KNOWS),
        (torch_model("tutorial"), {**KNOWS, **TORCH["tutorial"]}),
        (torch_model("shared"), {**KNOWS, **TORCH["shared"]}),
    ],
)
def test_inspect_and_export_take_the_flags_that_inspect_asks_for(
    make: Callable[[], None], knows: Mapping[str, str | bool], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make()
    user = User(["inspect", "model.pt"], knows)
    for _ in range(3):
        inspected = run(*user.command)
        assert inspected.code == 0, inspected.stderr
        missing_in(inspected.stdout, user)
    assert "\nnot in the file: " not in inspected.stdout
    assert run("export", *user.command[1:], "--no-parity", "-o", "bundle").code == 0


def test_the_fields_of_an_error_may_be_in_a_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    family("tutorial")()
    message = error_of(run("export", "model.pt"))
    Path("settings.json").write_text(config_of(message, {"n_heads": 3, **IDS}))
    assert run("export", "model.pt", "--config", "settings.json", "--no-parity", "-o", "bundle").code == 0


def test_inspect_refuses_the_vocabularies_that_export_refuses(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words()
    given = ("model.pt", "--heads", "3", "--src-vocab", "tgt.json")
    assert error_of(run("inspect", *given)) == error_of(run("export", *given, "--tgt-vocab", "tgt.json"))


def test_few_names_in_common_make_no_family_near(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights = weights_of("tutorial")
    torch.save({f"x{name}" if k else name: tensor for k, (name, tensor) in enumerate(weights.items())}, "far.pt")
    torch.save({name: weights[name] for name in weights if name != "encoder.pos_embedding.weight"}, "near.pt")
    message = error_of(run("export", "far.pt"))
    assert "--module my_code.py:build" in message
    assert "Nearest" not in message
    assert "Nearest is tutorial, " in error_of(run("export", "near.pt"))
