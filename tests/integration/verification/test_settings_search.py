"""The settings that no file holds, from what the owner's own program printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

import tfexport
from makers.paths import ROOT
from makers.tiny import HEADS, TinyCheckpoint, tiny_classifier
from makers.torch_models import TGT_VOCAB
from tests.support.commands import SENTENCES, Run, last_error, naive_text
from tests.support.owners import BOS, EOS, PAD, Owner, owner, said, sources
from tfexport.errors import ConfigError, TfexportError
from tfexport.models.checkpoints.load import Checkpoint
from tfexport.models.checkpoints.options import ExportedCheckpointOptions
from tfexport.models.formats.native import Tokenizers
from tfexport.models.transformer import Transformer
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, search
from tfexport.text.tokenizers import TextTokenizer
from tfexport.verification.confirmed_reading import open_confirmed
from tfexport.verification.expected_decoding import compare_outputs
from tfexport.verification.expected_outputs import Line, encoded, read_lines
from tfexport.verification.settings_search import differences

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")

FLAGS = ("--pad", PAD, "--bos", BOS, "--eos", EOS)
IDS = {"pad": PAD, "bos": BOS, "eos": EOS}
COUNT = 32
Owners = Callable[[str], Owner]
SAID = {
    "tutorial": {"n_heads": 3, "norm_first": False, "activation": "relu", "embedding_scale": "sqrt"},
    "tied": {"n_heads": 3, "norm_first": True, "activation": "relu", "embedding_scale": 1.0},
    "annotated": {"n_heads": 3},
}

GIVEN = {"heads": 3, "norm_first": False, "activation": "relu", "embedding_scale": "sqrt"}
"""The settings of `tutorial`, as options."""


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Owners:
    """Programs by name, each with a file of outputs beside its checkpoint."""
    known: dict[str, Owner] = {}

    def of(name: str) -> Owner:
        if name not in known:
            known[name] = owner(tmp_path_factory.mktemp(name), name)
            known[name].write(known[name].path.with_suffix(".tsv"), sources(COUNT))
        return known[name]

    return of


def read(
    program: Owner,
    notes: list[str] | None = None,
    *,
    expect: Path | None = None,
    ids: dict[str, int] = IDS,
    **given: Any,
) -> Checkpoint:
    """Read a checkpoint with the outputs of its program."""
    options = ExportedCheckpointOptions(expect=expect or program.path.with_suffix(".tsv"), **ids, **given)
    return open_confirmed(program.path, options, ([] if notes is None else notes).append)


def refused(program: Owner, **given: Any) -> str:
    with pytest.raises(TfexportError) as caught:
        read(program, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def first_lines(program: Owner, count: int, file: Path) -> Path:
    lines = program.path.with_suffix(".tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(lines[:count]), encoding="utf-8")
    return file


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", SAID)
def test_missing_settings_come_from_the_outputs(owners: Owners, name: str) -> None:
    program, notes = owners(name), list[str]()
    checkpoint = read(program, notes)
    assert checkpoint.given.items() >= SAID[name].items()
    source, target = torch.tensor(sources(1)), torch.tensor([[BOS, 9, 4, 30]])
    with torch.inference_mode():
        ours = checkpoint.build_model()(source, torch.tensor([source.shape[1]]), target)
        theirs = program.model(source, target)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert checkpoint.confirmation.by == "outputs"
    assert checkpoint.confirmation.about == f"{COUNT} of {COUNT} expected outputs of {name}.tsv"
    assert checkpoint.confirmation.unconfirmed == {"norm_eps": checkpoint.config.norm_eps}
    assert "--heads 3" in notes[0]
    assert f"does not confirm --norm-eps {checkpoint.config.norm_eps}:" in notes[1]


def test_given_settings_that_are_right_are_confirmed(owners: Owners) -> None:
    notes: list[str] = []
    checkpoint = read(owners("tutorial"), notes, source_bos=True, **GIVEN)
    assert checkpoint.confirmation.by == "outputs"
    assert notes[0] == f"note: {COUNT} of {COUNT} expected outputs of tutorial.tsv"


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"activation": "gelu"}, "--activation relu"),
        ({"heads": 4, "norm": "layer"}, "--heads 3"),
        ({**GIVEN, "norm_eps": 0.5}, "--norm-eps 1e-05"),
        ({"norm_first": True, "heads": 4, "embedding_scale": 1.0}, "--no-norm-first --embedding-scale sqrt --heads 3"),
    ],
)
def test_a_wrong_flag_is_refused_and_the_right_one_named(owners: Owners, given: dict[str, Any], right: str) -> None:
    message = refused(owners("tutorial"), **given)
    assert message.endswith(f". Give {right}, which does.")


def test_special_ids_are_asked_for(owners: Owners) -> None:
    """No output can tell them, and the settings that outputs tell are not asked for."""
    with pytest.raises(ConfigError) as caught:
        read(owners("tutorial"), ids={})
    assert "--pad N --bos N --eos N" in str(caught.value)
    assert "--heads" not in str(caught.value)


def test_outputs_that_were_all_cut_do_not_confirm_eos(owners: Owners, tmp_path: Path) -> None:
    lines = owners("tutorial").path.with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    file, cut, notes = tmp_path / "cut.tsv", 4, list[str]()
    columns = [(source, output.split()[:cut]) for source, output in (line.split("\t") for line in lines)]
    file.write_text("".join(f"{source}\t{' '.join(output)}\n" for source, output in columns if len(output) == cut))
    checkpoint = read(owners("tutorial"), notes, expect=file, **GIVEN)
    assert checkpoint.confirmation.unconfirmed["eos_id"] == EOS
    assert any("raise it to confirm eos" in note for note in notes)


def test_few_lines_leave_settings_open(owners: Owners, tmp_path: Path) -> None:
    file = first_lines(owners("tutorial"), 1, tmp_path / "one.tsv")
    message = refused(owners("tutorial"), expect=file)
    assert "--heads 1 or" in message
    assert "32 or more" in message


def test_few_lines_that_leave_nothing_open_confirm_and_ask_for_more(owners: Owners, tmp_path: Path) -> None:
    notes: list[str] = []
    checkpoint = read(owners("tutorial"), notes, expect=first_lines(owners("tutorial"), 12, tmp_path / "few.tsv"))
    assert checkpoint.given.items() >= SAID["tutorial"].items()
    assert checkpoint.confirmation.by == "outputs"
    assert any("has 12 lines. Give 32 or more" in note for note in notes)


def test_few_lines_confirm_only_what_no_other_value_gives(owners: Owners, tmp_path: Path) -> None:
    checkpoint = read(owners("tutorial"), expect=first_lines(owners("tutorial"), 1, tmp_path / "one.tsv"), **GIVEN)
    assert checkpoint.confirmation.by == "outputs"
    assert "n_heads" in checkpoint.confirmation.unconfirmed


def test_the_kinds_of_norms_and_positions_come_from_the_outputs(owners: Owners) -> None:
    """Also: of two activations that no ids tell apart, the one of PyTorch's layers is taken, and stays unconfirmed."""
    checkpoint = read(owners("shared"), max_length=30, heads=3, embedding_scale="sqrt")
    told = {"positions": "sinusoidal", "norm": "layer", "activation": "gelu", "norm_first": False}
    assert checkpoint.given.items() >= told.items()
    assert checkpoint.confirmation.unconfirmed.keys() == {"activation", "norm_eps"}


def test_a_wrong_kind_of_positions_is_refused(owners: Owners) -> None:
    given = {**GIVEN, "activation": "gelu", "positions": "sinusoidal-halves", "norm": "layer"}
    message = refused(owners("shared"), max_length=30, **given)
    assert "Give --positions sinusoidal, which does." in message


def test_a_table_of_another_name_is_asked_for(owners: Owners, tmp_path: Path) -> None:
    state = torch.load(owners("tutorial").path)
    state["where"] = state.pop("positional_encoding.pos_embedding")
    torch.save(state, path := tmp_path / "odd.pt")
    message = refused(
        replace(owners("tutorial"), path=path), expect=owners("tutorial").path.with_suffix(".tsv"), max_length=30
    )
    assert "--positions NAME" in message


def test_bos_and_eos_of_sources_come_from_the_outputs(owners: Owners, tmp_path: Path) -> None:
    """The program adds both, and writes neither."""
    program, ids = owners("tutorial"), sources(COUNT)
    file = tmp_path / "bare.tsv"
    lines = zip(ids, program.outputs(ids), strict=True)
    file.write_text("".join(f"{said(source[1:-1])}\t{said(output)}\n" for source, output in lines), encoding="utf-8")
    notes: list[str] = []
    checkpoint = read(program, notes, expect=file, **GIVEN)
    assert (checkpoint.config.source_bos, checkpoint.config.source_eos) == (True, True)
    assert notes[0].endswith("tell the settings --source-bos")


def test_sources_show_that_a_flag_is_wrong(owners: Owners) -> None:
    assert refused(owners("tutorial"), source_bos=False, **GIVEN).endswith("Give --source-bos, which does.")


def test_other_arithmetic_is_refused(owners: Owners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = owners("annotated")
    monkeypatch.setattr(torch, "relu", torch.tanh)
    file = program.write(tmp_path / "tanh.tsv", sources(COUNT))
    monkeypatch.undo()
    message = refused(program, expect=file)
    assert f"all {COUNT} expected outputs" in message
    assert re.search(rf"Nearest is .*--heads \d+.*: \d+ of {COUNT}; line \d+, token \d+: ", message)
    assert "--module my_code.py:build" in message


def test_one_wrong_line_is_named(owners: Owners, tmp_path: Path) -> None:
    program = owners("tutorial")
    lines = program.path.with_suffix(".tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    source, output = lines[8].rstrip("\n").split("\t")
    first = output.split()[0]
    lines[8] = f"{source}\t{int(first) % 30 + 5} {EOS}\n"
    file = tmp_path / "wrong.tsv"
    file.write_text("".join(lines), encoding="utf-8")
    message = refused(program, expect=file)
    assert f"{COUNT - 1} of {COUNT}; line 9, token 1:" in message
    assert "--heads 3" in message


def test_text_is_compared_with_the_vocabularies(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    sentences = [f"de{first} de{second}" for first in range(4, 30) for second in (7, first)]
    ids = [[int(word.removeprefix("de")) for word in sentence.split()] for sentence in sentences]
    file = tmp_path / "out.tsv"
    lines = zip([*sentences, *SENTENCES], [*ids, *SENTENCES.values()], strict=True)
    file.write_text(
        "".join(f"{sentence}\t{naive_text(tiny_checkpoint.model, ids)}\n" for sentence, ids in lines), encoding="utf-8"
    )
    options = ExportedCheckpointOptions(
        expect=file, src_vocab=tiny_checkpoint.src_vocab, tgt_vocab=tiny_checkpoint.tgt_vocab
    )
    checkpoint = open_confirmed(tiny_checkpoint.path, options, lambda note: None)
    assert checkpoint.config.n_heads == HEADS
    assert checkpoint.confirmation.by == "outputs"


@pytest.fixture
def decoded(owners: Owners) -> tuple[Transformer, list[int], list[int]]:
    """A model as it was read, a source, and the owner's output for it."""
    model = read(owners("annotated"), heads=3).build_model()
    assert isinstance(model, Transformer)
    (source,) = sources(1)
    return model, source, owners("annotated").outputs([source])[0]


def test_text_may_be_spelt_with_other_subwords(decoded: tuple[Transformer, list[int], list[int]]) -> None:
    model, source, output = decoded
    letters = [chr(0x4E00 + index) for index in range(TGT_VOCAB)]
    pair = letters[output[0]], letters[output[1]]
    merged = next(index for index in range(4, TGT_VOCAB) if index not in output)
    vocabulary = {letter: index for index, letter in enumerate(letters) if index != merged} | {"".join(pair): merged}
    inner = Tokenizer(models.BPE(vocabulary, [pair]))
    inner.decoder = decoders.Fuse()
    text = "".join(letters[index] for index in output if index != EOS)
    for expected, is_right in ((text, True), (text[:-1] + letters[5], False)):
        lines = [Line(1, tuple(source), expected)]
        examples = encoded(Path("out.tsv"), lines, model.config, Tokenizers(None, TextTokenizer(inner)))
        assert examples.rows[0].output[0] == merged
        assert (differences(model, examples, examples.rows) == [None]) == is_right


def test_forced_and_suppressed_tokens_are_those_of_a_search(decoded: tuple[Transformer, list[int], list[int]]) -> None:
    model, source, output = decoded
    own = model.config
    options = SearchOptions(beam=1, max_length=6)
    model.config = own.replace(forced_first_id=9, suppressed_ids=(output[0],))
    ((hypothesis,),) = search(TorchRuntime(model), [source], options)
    model.config = model.config.replace(suppressed_first_ids=(hypothesis.ids[1],))
    ((hypothesis,),) = search(TorchRuntime(model), [source], options)
    lines = [Line(1, tuple(source), tuple(hypothesis.ids))]
    examples = encoded(Path("out.tsv"), lines, model.config, Tokenizers(None, None))
    assert differences(model, examples, examples.rows) == [None]
    model.config = own
    assert differences(model, examples, examples.rows) != [None]


def test_the_code_of_the_guide_writes_such_a_file(
    owners: Owners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = owners("tutorial")
    guide = (ROOT / "docs/guides/expected-outputs.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```py\n(.*?)```", guide, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code.replace("100", "12"), {"model": program.model, "sources": sources(COUNT), "BOS": BOS, "EOS": EOS})
    assert read(program, expect=tmp_path / "out.tsv", **GIVEN).confirmation.by == "outputs"


def test_export_takes_a_file_of_outputs(owners: Owners, run: Run, tmp_path: Path) -> None:
    program = owners("tutorial")
    given = ("--expect", program.path.with_suffix(".tsv"), *FLAGS)
    wrong = run("export", program.path, "-o", tmp_path / "no", *given, "--activation", "silu")
    assert "Give --activation relu, which does." in wrong.stderr
    assert wrong.code == 2
    assert not (tmp_path / "no").exists()
    done = run("export", program.path, "-o", tmp_path / "bundle", *given, "--no-parity", "--heads", 3)
    assert done.code == 0, done.stderr
    assert f"{COUNT} of {COUNT} expected outputs" in done.stderr
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["source"]["confirmation"]["by"] == "outputs"
    assert manifest["source"]["given"]["norm_first"] is False


def test_probe_takes_a_file_of_outputs(owners: Owners, run: Run, tmp_path: Path) -> None:
    program = owners("tutorial")
    probed = run("probe", program.path, "--expect", program.path.with_suffix(".tsv"), *FLAGS, "--heads", 3)
    assert probed.code == 0, probed.stderr
    assert f"{COUNT} of {COUNT} expected outputs of tutorial.tsv" in probed.stdout


@pytest.mark.thorough
def test_what_was_exported_decodes_the_outputs(owners: Owners, run: Run, tmp_path: Path) -> None:
    program = owners("annotated")
    given = ("--expect", program.path.with_suffix(".tsv"))
    done = run("export", program.path, "-o", tmp_path / "bundle", *given, *FLAGS)
    assert done.code == 0, done.stderr
    compared = run("parity", tmp_path / "bundle", *given, "--checkpoint", program.path)
    assert compared.code == 0, compared.stdout
    assert f"{COUNT} of {COUNT} expected outputs" in compared.stdout


def test_parity_fails_where_a_runtime_decodes_another_output(tiny_bundle: Path, tmp_path: Path, run: Run) -> None:
    """The first line is right, the second one is not."""
    model = tfexport.load(tiny_bundle)
    first, second = "de5 de6", "de9"
    file = tmp_path / "out.tsv"
    outputs = [model.translate(text).text for text in (first, second)]
    file.write_text(f"{first}\t{outputs[0]}\n{second}\twört4 {outputs[1]}\n", encoding="utf-8")
    failed = run("parity", tiny_bundle, "--expect", file, "--beam", 1, "--max-length", 4, "--no-certify")
    assert failed.code == 1
    assert "1 of 2 expected outputs" in failed.stdout
    assert "line 2, token 1:" in failed.stdout
    assert "FAILED: 1 of 1 comparisons with expected outputs" in failed.stdout


def test_parity_takes_a_file_of_outputs(tiny_bundle: Path, tmp_path: Path) -> None:
    model = tfexport.load(tiny_bundle)
    file = tmp_path / "out.tsv"
    texts = [f"de{word} de{word % 7 + 4}" for word in range(4, 31)]
    file.write_text("".join(f"{text}\t{model.translate(text).text}\n" for text in texts), encoding="utf-8")
    comparison = tfexport.parity(tiny_bundle, expect=file, beams=(1,), max_length=4)
    assert comparison.passed
    (report,) = comparison.expected
    assert (report.right, report.total) == (27, 27)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("is_whole", [True, False])
def test_sources_of_ids_may_be_complete_or_lack_the_ends_of_the_model(
    owners: Owners, tmp_path: Path, is_whole: bool
) -> None:
    program, bare = owners("tutorial"), [source[1:-1] for source in sources(COUNT)]
    outputs = program.outputs(bare if is_whole else sources(COUNT))
    rows = [f"{said(source)}\t{said(output)}\n" for source, output in zip(bare, outputs, strict=True)]
    (file := tmp_path / "bare.tsv").write_text("".join(rows), encoding="utf-8")
    model = read(program, [], source_bos=True, source_eos=True, **GIVEN).build_model()
    assert isinstance(model, Transformer)
    examples = encoded(file, read_lines(file), model.config, Tokenizers(None, None))
    assert compare_outputs(TorchRuntime(model), examples, batch_size=8).passed


def test_a_classifier_has_no_outputs(run: Run, tmp_path: Path) -> None:
    path, file = tmp_path / "classifier.pt", tmp_path / "out.tsv"
    torch.save(tiny_classifier().state_dict(), path)
    file.write_text("5 6\t7\n", encoding="utf-8")
    done = run("export", path, "--expect", file)
    assert "Leave out --expect" in last_error(done)
