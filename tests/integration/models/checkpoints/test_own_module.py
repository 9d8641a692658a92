"""Checkpoints that are read with the user's own file, from the command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tfexport
from tests.support.commands import command
from tests.support.own_code import CODE, FLAGS, SPECIAL, built, write
from tfexport.bundle.reader import open_bundle
from tfexport.errors import CheckpointError, ConfigError, TfexportError
from tfexport.models.checkpoints.options import ExportedCheckpointOptions
from tfexport.models.checkpoints.own_module import module_of, read_own_module
from tfexport.models.checkpoints.reading import open_checkpoint
from tfexport.models.formats.native import Tokenizers
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, search
from tfexport.text.vocabularies import read_vocabulary
from tfexport.verification.confirmed_reading import open_confirmed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("own"))


def greedy(module: nn.Module, source: list[int]) -> list[int]:
    tokens = [2]
    while len(tokens) < 9 and tokens[-1] != 3:
        with torch.no_grad():
            tokens.append(int(module(torch.tensor([source]), torch.tensor([tokens]))[0, -1].argmax()))
    return [token for token in tokens[1:] if token != 3]


def test_export_and_decode_give_the_tokens_of_the_module(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = built(folder).eval()
    module.load_state_dict(torch.load(folder / "ckpt.pt"))
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randint(4, 21, (n,), generator=generator).tolist() for n in (1, 3, 6, 7, 12, 5)]
    (tmp_path / "in.txt").write_text("".join(f"{' '.join(map(str, source))}\n" for source in sources))
    spec, bundle = f"{folder / 'my_code.py'}:build", tmp_path / "bundle"
    command(capsys, monkeypatch, "export", folder / "ckpt.pt", "--module", spec, *FLAGS, "-o", bundle)
    flags = ("--output-format", "ids", "--max-length", "8")
    output, _ = command(capsys, monkeypatch, "decode", bundle, tmp_path / "in.txt", *flags)
    assert [list(map(int, line.split())) for line in output.splitlines()] == [
        greedy(module, source) for source in sources
    ]
    record = json.loads((tmp_path / "bundle/manifest.json").read_text())["source"]["confirmation"]
    assert record["by"] == "module"
    assert record["about"].startswith(f"{spec}: logits of ")
    assert record["unconfirmed"] == {"bos_id": 2, "eos_id": 3}
    assert open_bundle(tmp_path / "bundle").config.tie_output


def test_expected_outputs_confirm_what_a_module_does_not_show(folder: Path, tmp_path: Path) -> None:
    module = built(folder).eval()
    with torch.no_grad():  # each head attends to few tokens, so that their number matters
        for parameter in module.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    torch.save(module.state_dict(), tmp_path / "ckpt.pt")
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randint(4, 21, (n % 10 + 1,), generator=generator).tolist() for n in range(30)]
    rows = [[" ".join(map(str, ids)) for ids in (source, greedy(module, source))] for source in sources]
    rows = [row for row in rows if {"1", "2"}.isdisjoint(row[1].split())]  # pad and bos are not part of an output
    (tmp_path / "out.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    ids = {"unk": 0, "pad": 1, "bos": 2, "eos": 3, "expect": tmp_path / "out.tsv"}
    options = ExportedCheckpointOptions(module=f"{folder / 'my_code.py'}:build", **ids)
    confirmation = open_confirmed(tmp_path / "ckpt.pt", options, print).confirmation
    assert confirmation.by == "module"
    assert confirmation.about.endswith(f"; {len(rows)} of {len(rows)} expected outputs of out.tsv")
    assert not {*confirmation.unconfirmed} - {"eos_id"}
    (tmp_path / "my_code.py").write_text(CODE.replace("Transformer(16, 2,", "Transformer(16, 4,"))
    options = ExportedCheckpointOptions(module=f"{tmp_path / 'my_code.py'}:build", **ids)
    with pytest.raises(TfexportError, match=r"expected outputs of .*the number of heads"):
        open_confirmed(tmp_path / "ckpt.pt", options, print)


def test_a_live_module_is_confirmed_by_outputs_too(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = built(folder).eval()
    sources = [[source] for source in range(4, 20)]
    rows = [(source, greedy(module, source)) for source in sources]
    lines = ["\t".join(" ".join(map(str, ids)) for ids in row) + "\n" for row in rows if not {1, 2} & {*row[1]}]
    assert len(lines) > 5
    (tmp_path / "out.tsv").write_text("".join(lines))
    ids = {name.removesuffix("_id"): value for name, value in SPECIAL.items()}
    exported = tfexport.export(module, tmp_path / "bundle", expect=tmp_path / "out.tsv", parity=False, **ids)
    assert f"{len(lines)} of {len(lines)} expected outputs" in exported.confirmation.about


def test_a_family_file_is_not_written_over_another_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "my_code.py").write_text(CODE)
    own = module_of(f"{tmp_path / 'my_code.py'}:build")
    with pytest.raises(ConfigError, match=r"my_code\.py exists"):
        read_own_module(folder / "ckpt.pt", own, SPECIAL, family_file=tmp_path / "my_code.py")
    assert (tmp_path / "my_code.py").read_text() == CODE


def test_a_file_runs_as_a_script_without_arguments(folder: Path, tmp_path: Path) -> None:
    parsing = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument({})\nparser.parse_args()\n"
    (tmp_path / "my_code.py").write_text(parsing.format("'--lr'") + CODE)
    assert isinstance(built(tmp_path), nn.Module)
    (tmp_path / "my_code.py").write_text(parsing.format("'data'") + CODE)
    with pytest.raises(ConfigError, match=r"my_code.py, line 4: SystemExit"):
        built(tmp_path)


def test_a_changed_file_runs_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for name in (
        "first",
        "other",
    ):  # of the same size, in the same second: for Python's cache of bytecode the same file
        (tmp_path / "my_code.py").write_text(f"{CODE}\n{name}_build = build\n")
        os.utime(tmp_path / "my_code.py", (1e9, 1e9))
        module_of(f"{tmp_path / 'my_code.py'}:{name}_build")


def test_special_ids_may_be_those_of_the_target_alone(tmp_path: Path) -> None:
    (tmp_path / "my_code.py").write_text(CODE.replace("nn.Embedding(21, 16)", "nn.Embedding(15, 16)"))
    torch.save(built(tmp_path).state_dict(), tmp_path / "ckpt.pt")
    ids = {"unk": 0, "pad": 1, "bos": 2, "eos": 18}
    options = ExportedCheckpointOptions(module=f"{tmp_path / 'my_code.py'}:build", **ids)
    config = open_checkpoint(tmp_path / "ckpt.pt", options, print).config
    assert (config.src_vocab_size, config.eos_id, config.source_eos) == (15, 18, False)


def test_code_that_runs_late_may_import_modules_beside_its_file(tmp_path: Path) -> None:
    adapter = (
        "def call(model, src, tgt):\n    import calling_beside\n    return calling_beside.logits(model, src, tgt)\n"
    )
    (tmp_path / "my_code.py").write_text(CODE + adapter)
    (tmp_path / "calling_beside.py").write_text("def logits(model, src, tgt):\n    return model(src, tgt)\n")
    torch.save(built(tmp_path).state_dict(), tmp_path / "ckpt.pt")
    own = module_of(f"{tmp_path / 'my_code.py'}:build")
    checkpoint = read_own_module(tmp_path / "ckpt.pt", own, SPECIAL)
    assert "called as call(model, src, tgt)" in checkpoint.notes


def with_separate_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"net.{name}": tensor.clone() for name, tensor in state.items()}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "saved",
    [dict, with_separate_names, lambda state: {name: t for name, t in state.items() if name != "tgt.weight"}],
    ids=["plain", "net., tied under both names", "tied under one name"],
)
def test_a_written_family_file_reads_the_checkpoint_without_the_code(folder: Path, tmp_path: Path, saved: Any) -> None:
    torch.save(saved(torch.load(folder / "ckpt.pt")), tmp_path / "ckpt.pt")
    options = {name.removesuffix("_id"): value for name, value in SPECIAL.items()}
    spec, file = f"{folder / 'my_code.py'}:build", tmp_path / "my_family.py"
    first = open_checkpoint(
        tmp_path / "ckpt.pt", ExportedCheckpointOptions(module=spec, write_family=file, **options), print
    )
    again = open_checkpoint(tmp_path / "ckpt.pt", ExportedCheckpointOptions(family=str(file), **options), print)
    assert again.config == first.config
    assert again.weights.keys() == first.weights.keys()
    assert all(torch.equal(tensor, again.weights[name]) for name, tensor in first.weights.items())
    assert (again.family, again.confirmation.by) == ("my_code", "")


SINUSOIDS = """
def places(length):
    angles = torch.arange(length)[:, None] * torch.exp(torch.arange(0, 16, 2) * -(math.log(10000.0) / 16))
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
"""


def test_a_family_file_may_have_positions_that_the_code_computes(folder: Path, tmp_path: Path) -> None:
    code = CODE.replace("self.places.weight[: ids.shape[1]]", "places(ids.shape[1])").replace("bias=False", "bias=True")
    code = code.replace("return self.out(", "return torch.log_softmax(self.out(").replace("**masks))", "**masks)), -1)")
    (tmp_path / "my_code.py").write_text("import math\n" + code + SINUSOIDS)
    torch.manual_seed(4)
    torch.save(built(tmp_path).state_dict(), tmp_path / "ckpt.pt")
    options = {name.removesuffix("_id"): value for name, value in SPECIAL.items()}
    spec, file = f"{tmp_path / 'my_code.py'}:build", tmp_path / "my_family.py"
    own = ExportedCheckpointOptions(module=spec, write_family=file, **options)
    first = open_checkpoint(tmp_path / "ckpt.pt", own, print)
    again = open_checkpoint(tmp_path / "ckpt.pt", ExportedCheckpointOptions(family=str(file), **options), print)
    assert "computed_positions='sinusoidal'" in file.read_text()
    for name, tensor in first.weights.items():
        torch.testing.assert_close(again.weights[name], tensor, rtol=0, atol=1e-6 if "positions" in name else 0)


def test_what_code_computes_goes_into_no_family_file(folder: Path, tmp_path: Path) -> None:
    code = (folder / "my_code.py").read_text()
    code = code.replace("self.places.weight[:", "self.places.weight.flip(0).exp()[:")
    (tmp_path / "own.py").write_text(code)
    options = ExportedCheckpointOptions(
        module=f"{tmp_path / 'own.py'}:build", write_family=tmp_path / "family.py", unk=0, pad=1, bos=2, eos=3
    )
    with pytest.raises(CheckpointError, match=r"computes encoder.positions.table, decoder.positions.table, which"):
        open_checkpoint(folder / "ckpt.pt", options, print)
    assert not (tmp_path / "family.py").exists()
    with pytest.raises(ConfigError, match="Give --module"):
        open_checkpoint(folder / "ckpt.pt", ExportedCheckpointOptions(write_family=tmp_path / "family.py"), print)


def test_a_live_module_is_exported_as_it_is_and_left_alone(folder: Path, tmp_path: Path) -> None:
    module = built(folder).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    ids = {name.removesuffix("_id"): value for name, value in SPECIAL.items()}
    exported = tfexport.export(module, tmp_path / "live", parity=False, **ids)
    assert module.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert {tensor.dtype for tensor in module.state_dict().values()} == {torch.float32}
    assert (exported.confirmation.by, open_bundle(tmp_path / "live").origin.file) == ("module", "Model")
    source = [4, 9, 17, 6]
    runtime = load_runtime("ort-cpu", open_bundle(tmp_path / "live"), threads=1)
    ((hypothesis,),) = search(runtime, [source], SearchOptions(max_length=8))
    assert [token for token in hypothesis.ids if token != 3] == greedy(module.eval(), source)


def test_a_live_module_that_a_copy_is_not_equal_to_is_refused(folder: Path, tmp_path: Path) -> None:
    ids = {name.removesuffix("_id"): value for name, value in SPECIAL.items()}
    module = built(folder)
    kind = type(module)

    class Forgetting(kind):  # type: ignore[misc, valid-type]
        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            return super().forward(src, tgt) * (2 if self.training or hasattr(self, "chosen") else 1)

        def __getstate__(self) -> dict[str, Any]:
            return {name: value for name, value in vars(self).items() if name != "chosen"}

    module.__class__ = Forgetting
    tfexport.export(module.eval(), tmp_path / "bundle", parity=False, **ids)
    module.chosen = True
    with pytest.raises(
        CheckpointError, match=r"a copy of Forgetting .* computes something else than the module itself"
    ):
        tfexport.export(module, tmp_path / "other", **ids)


def test_a_live_module_may_need_the_user_s_call(folder: Path, tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = built(folder)

        def forward(self, *, everything: Any) -> Any:
            return self.inner(*everything)

    ids = {name.removesuffix("_id"): value for name, value in SPECIAL.items()}
    with pytest.raises(CheckpointError, match="add a function `call`"):
        tfexport.export(Wrapped(), tmp_path / "live", **ids)
    ids["parity"] = False
    tfexport.export(Wrapped(), tmp_path / "live", **ids, call=lambda model, src, tgt: model(everything=(src, tgt)))
    with pytest.raises(TfexportError, match="a module has no place"):
        tfexport.export(Wrapped(), **ids)
    with pytest.raises(TfexportError, match="call is for a live module"):
        tfexport.export(folder / "ckpt.pt", call=lambda model, src, tgt: model(src, tgt))
    with pytest.raises(ConfigError, match="Leave them out"):
        tfexport.export(Wrapped(), tmp_path / "other", family="torch", **ids)


def test_parity_reads_the_checkpoint_with_the_code_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ("--module", f"{folder / 'my_code.py'}:build")
    command(capsys, monkeypatch, "export", folder / "ckpt.pt", *spec, *FLAGS, "-o", tmp_path / "bundle", "--no-parity")
    again = ("parity", tmp_path / "bundle", "--checkpoint", folder / "ckpt.pt", "--beam", "1")
    output, _ = command(capsys, monkeypatch, *again, *spec)
    assert output.splitlines()[-1] == "PASSED"
    with pytest.raises(ConfigError, match="Give --module"):
        tfexport.parity(tmp_path / "bundle", checkpoint=folder / "ckpt.pt", beams=(1,))


def test_parity_compares_no_bundle_of_a_named_family_with_the_code(folder: Path, tiny_bundle: Path) -> None:
    """Both readings may be right and have other tensors: an embedding's scale in its weights, biases of zeros."""
    with pytest.raises(TfexportError, match="was exported without --module"):
        tfexport.parity(tiny_bundle, checkpoint=folder / "ckpt.pt", module=f"{folder / 'my_code.py'}:build", beams=(1,))


@pytest.mark.parametrize(
    ("spec", "code", "about"),
    [
        ("absent.py:build", None, "there is no Python file absent.py"),
        ("my_code:build", None, "Give --module FILE.py:NAME"),
        ("own.py:other", "def build(): pass", "own.py has no other"),
        ("own.py", "def build(size): pass", "needs the arguments size"),
        ("own.py", "build = 3", "is int, not a function"),
        ("own.py", "raise KeyError('lost')", r"own.py, line 1: KeyError: 'lost'\. Correct the file"),
    ],
)
def test_files_without_a_module_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, code: str | None, about: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if code is not None:
        Path("own.py").write_text(code)
    with pytest.raises(ConfigError, match=about):
        module_of(spec)


def test_a_function_that_returns_no_module_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build(): return 3")
    with pytest.raises(ConfigError, match="returns int, not an nn"):
        module_of(str(tmp_path / "own.py")).build()


@pytest.mark.parametrize(
    ("hints", "about"),
    [
        ({}, "does not contain pad_id, bos_id, eos_id"),
        ({**SPECIAL, "n_heads": 4}, "n_heads is 2, not 4"),
        ({**SPECIAL, "norm_first": True}, "norm_first is False, not True"),
        ({**SPECIAL, "src_embedding": "src"}, "src_embedding has no effect"),
        ({**SPECIAL, "max_target_length": 13}, "has 12 positions, not 13"),
    ],
)
def test_hints_that_are_missing_or_contradict_the_module_are_refused(folder: Path, hints: Any, about: str) -> None:
    own = module_of(str(folder / "my_code.py"))
    with pytest.raises((ConfigError, CheckpointError), match=about):
        read_own_module(folder / "ckpt.pt", own, hints)


def test_lengths_are_those_of_the_user_for_each_side(folder: Path) -> None:
    hints = {**SPECIAL, "max_source_length": 11, "max_target_length": 7}
    config = read_own_module(folder / "ckpt.pt", module_of(str(folder / "my_code.py")), hints).config
    assert (config.max_source_length, config.max_target_length) == (11, 7)


def test_the_ends_of_sources_are_asked_for_where_text_is_encoded(folder: Path, tmp_path: Path) -> None:
    words = ["<unk>", "<pad>", "<s>", "</s>", *(f"w{n}" for n in range(15))]
    (tmp_path / "words.json").write_text(json.dumps(words))
    vocabulary = read_vocabulary(tmp_path / "words.json")
    own, both = module_of(str(folder / "my_code.py")), Tokenizers(vocabulary, vocabulary)
    with pytest.raises(ConfigError, match="source_bos, source_eos"):
        read_own_module(folder / "ckpt.pt", own, {}, tokenizers=both)
    ends = {"source_bos": False, "source_eos": True}
    checkpoint = read_own_module(folder / "ckpt.pt", own, ends, tokenizers=both)
    assert checkpoint.confirmation.unconfirmed == ends
    assert not checkpoint.config.source_bos
