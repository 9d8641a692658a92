"""Vocabularies, codes and languages are recorded by an export, and a comparison reads the checkpoint with them again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from makers.ort_bundles import CONFIG, random_model
from makers.tiny import IDS, SRC_VOCAB, TGT_VOCAB, TinyCheckpoint
from tfexport.bundle.reader import open_bundle
from tfexport.errors import TfexportError, TokenizerError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.options import TextSettings
from tfexport.models.checkpoints.reading import read_with_text
from tfexport.models.formats import native
from tfexport.text.vocabularies import read_vocabulary
from tfexport.verification.parity import Reference, check

HINTS = {"n_heads": 3}
CODES = "#version: 0.2\nd e</w>\n"


@pytest.fixture
def folder(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    """A checkpoint with its vocabularies in a folder beside it, and codes."""
    (tmp_path / "models").mkdir()
    (tmp_path / "text").mkdir()
    shutil.copy(tiny_checkpoint.path, tmp_path / "models" / "tiny.pt")
    shutil.copy(tiny_checkpoint.src_vocab, tmp_path / "text" / "src.json")
    shutil.copy(tiny_checkpoint.tgt_vocab, tmp_path / "text" / "tgt.json")
    (tmp_path / "text" / "codes").write_text(CODES)
    return tmp_path


def settings_of(folder: Path, **more: Any) -> TextSettings:
    return TextSettings(src_vocab=folder / "text" / "src.json", tgt_vocab=folder / "text" / "tgt.json", **more)


# --- what is recorded


def test_only_what_was_said_is_recorded(folder: Path) -> None:
    checkpoint = folder / "models" / "tiny.pt"
    assert TextSettings().recorded(checkpoint) == {}
    assert TextSettings(src_lang="de", prefix=">>en<< ").recorded(checkpoint) == {"src_lang": "de", "prefix": ">>en<< "}
    assert settings_of(folder, lowercase=True).recorded(checkpoint) == {
        "src_vocab": "../text/src.json",
        "tgt_vocab": "../text/tgt.json",
        "lowercase": True,
    }


def test_files_are_recorded_from_the_checkpoint_on_wherever_the_command_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "text")
    said = TextSettings(src_vocab=Path("src.json"), tgt_bpe=Path("codes"))
    wanted = {"src_vocab": "../text/src.json", "tgt_bpe": "../text/codes"}
    assert said.recorded(Path("../models/tiny.pt")) == wanted
    assert said.recorded(folder / "models" / "tiny.pt") == wanted


def test_a_bundle_has_them(folder: Path) -> None:
    checkpoint = folder / "models" / "tiny.pt"
    loaded = read_with_text(checkpoint, HINTS, text=settings_of(folder, src_bpe=folder / "text" / "codes"))
    assert loaded.tokenizers.source is not None
    assert loaded.tokenizers.source.to_dict()["codes"] == CODES
    bundle = open_bundle(export(loaded, folder / "bundle", gate=None).directory)
    wanted = {"src_vocab": "../text/src.json", "tgt_vocab": "../text/tgt.json", "src_bpe": "../text/codes"}
    assert bundle.origin.text == wanted
    assert json.loads((folder / "bundle" / "manifest.json").read_text())["source"]["text"] == wanted


def test_a_manifest_of_an_earlier_version_tells_none(own_bundle: Path) -> None:
    path = own_bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["source"]["text"]
    path.write_text(json.dumps(manifest))
    assert open_bundle(own_bundle).origin.text == {}


# --- what is read again


RECORDED = {"src_vocab": "../text/src.json", "tgt_vocab": "../text/tgt.json", "lowercase": True, "src_lang": "de"}


def test_what_was_recorded_is_said_again(folder: Path) -> None:
    checkpoint = folder / "models" / "tiny.pt"
    said, lost = TextSettings().or_recorded(RECORDED, checkpoint)
    assert lost == []
    assert (said.lowercase, said.src_lang, said.tgt_lang) == (True, "de", None)
    assert said.src_vocab is not None
    assert said.src_vocab.samefile(folder / "text" / "src.json")
    assert said.recorded(checkpoint) == RECORDED  # of a bundle that is made of it
    assert TextSettings().or_recorded({}, checkpoint) == (TextSettings(), [])


def test_what_is_said_now_comes_first(folder: Path) -> None:
    other = folder / "other.json"
    now = TextSettings(src_vocab=other, src_lang="fr", tgt_lang="en")
    said, lost = now.or_recorded(RECORDED, folder / "models" / "tiny.pt")
    assert (said.src_vocab, said.src_lang, said.tgt_lang, said.lowercase) == (other, "fr", "en", True)
    assert said.tgt_vocab is not None
    assert lost == []


def test_the_folder_may_move_as_a_whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    there = Path(shutil.copytree(folder, tmp_path_factory.mktemp("elsewhere") / "there"))
    shutil.rmtree(folder)
    said, lost = TextSettings().or_recorded(RECORDED, there / "models" / "tiny.pt")
    assert lost == []
    assert said.src_vocab is not None
    assert said.src_vocab.is_file()


@pytest.mark.parametrize("side", ["src", "tgt"])
def test_files_that_are_no_longer_there_are_told(folder: Path, side: str) -> None:
    """And what they were used with is not said again: the checkpoint can be read without."""
    checkpoint = folder / "models" / "tiny.pt"
    codes = {"src_bpe": "../text/codes", "tgt_bpe": "../text/codes"}
    (folder / "text" / f"{side}.json").unlink()
    said, lost = TextSettings().or_recorded({**RECORDED, **codes}, checkpoint)
    assert lost == [f"--{side}-vocab {folder / 'models' / '..' / 'text' / f'{side}.json'}"]
    assert said.src_lang == "de"
    if side == "src":
        assert (said.src_vocab, said.lowercase, said.src_bpe) == (None, False, None)
        assert said.tgt_bpe is not None
    else:
        assert (said.tgt_vocab, said.tgt_bpe) == (None, None)
        assert (said.lowercase, said.src_bpe is None) == (True, False)
    hints = {**HINTS, "pad_id": 1, "bos_id": 2, "eos_id": 3}
    loaded = read_with_text(checkpoint, hints, text=replace(said, src_lang=None))
    assert (loaded.tokenizers.source is None, loaded.tokenizers.target is None) == (side == "src", side == "tgt")


def test_codes_of_a_vocabulary_in_the_checkpoint_are_read_again(folder: Path) -> None:
    """Checkpoints that bring their words are given codes alone."""
    model = random_model(CONFIG)
    assert (CONFIG.src_vocab_size, CONFIG.tgt_vocab_size) == (SRC_VOCAB, TGT_VOCAB)
    words = native.Tokenizers(*(read_vocabulary(folder / "text" / f"{side}.json") for side in ("src", "tgt")))
    checkpoint = folder / "models" / "model.safetensors"
    native.save(checkpoint, model.state_dict(), CONFIG, words, torch.float32)
    codes = folder / "text" / "codes"
    loaded = read_with_text(checkpoint, {}, text=TextSettings(src_bpe=codes, tgt_bpe=codes))
    bundle = export(loaded, folder / "bundle", gate=None).directory
    recorded = open_bundle(bundle).origin.text
    assert recorded == {"src_bpe": "../text/codes", "tgt_bpe": "../text/codes"}
    text, lost = TextSettings().or_recorded(recorded, checkpoint)
    assert lost == []
    reference = Reference(checkpoint, load=partial(read_with_text, text=text))
    comparison = check(bundle, None, ["torch"], checkpoint=reference, max_length=4, say=lambda _: None)
    assert comparison.mismatches == []
    plain = check(bundle, None, ["torch"], checkpoint=checkpoint, max_length=4, say=lambda _: None)
    assert [found.file for found in plain.mismatches] == ["source_tokenizer.json", "target_tokenizer.json"]


def test_what_is_said_now_of_nothing_is_an_error(folder: Path) -> None:
    checkpoint = folder / "models" / "tiny.pt"
    with pytest.raises(TfexportError, match="Give --src-vocab too"):
        read_with_text(checkpoint, HINTS, text=TextSettings(lowercase=True).or_recorded({}, checkpoint)[0])
    (folder / "text" / "src.json").unlink()
    said, _ = TextSettings(src_bpe=folder / "text" / "codes").or_recorded(RECORDED, checkpoint)
    with pytest.raises(TokenizerError, match="Give --src-vocab"):
        read_with_text(checkpoint, {**HINTS, **IDS}, text=replace(said, src_lang=None))


# --- parity, which reads it again


def test_parity_reads_a_checkpoint_as_the_export_read_it(folder: Path) -> None:
    checkpoint = folder / "models" / "tiny.pt"
    bundle = export(
        read_with_text(checkpoint, HINTS, text=settings_of(folder, lowercase=True)), folder / "bundle", gate=None
    ).directory
    notes: list[str] = []

    def mismatches(**changes: Any) -> list[str]:
        notes.clear()
        text, _ = TextSettings(**changes).or_recorded(open_bundle(bundle).origin.text, checkpoint)
        reference = Reference(checkpoint, load=partial(read_with_text, text=text))
        found = check(bundle, None, ["torch"], checkpoint=reference, say=notes.append, max_length=4)
        return [mismatch.file for mismatch in found.mismatches]

    assert mismatches() == []
    assert not any("tokenizer" in note for note in notes)
    words = json.loads((folder / "text" / "src.json").read_text())
    (folder / "other.json").write_text(
        json.dumps(words[:-1] if isinstance(words, list) else dict(list(words.items())[:-1]))
    )
    assert mismatches(src_vocab=folder / "other.json") == ["source_tokenizer.json", "manifest.json"]  # and fewer
    (folder / "text" / "tgt.json").unlink()
    assert mismatches() == []
    assert [note for note in notes if "the target tokenizer is not compared" in note]
