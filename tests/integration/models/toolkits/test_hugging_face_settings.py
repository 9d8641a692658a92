"""Search settings that a folder of the transformers library has of its own: the same tokens as its `generate` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from makers.hugging_face_models import EOS, FORCED, MAX_NEW, VOCAB, Case, changed, made, sources_of
from tfexport.bundle.reader import open_bundle
from tfexport.errors import TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, search


def case_of(name: str, folder: Path, **generation: Any) -> Case:
    model = made(name)
    for setting, value in generation.items():
        setattr(model.generation_config, setting, value)
    model.save_pretrained(folder)
    checkpoint = load_checkpoint(folder, {})
    export(checkpoint, folder.with_name("bundle"), gate=None)
    return Case(model, folder, checkpoint, open_bundle(folder.with_name("bundle")), sources_of(model, 100))


@pytest.mark.parametrize("name", ["marian", "m2m_100"])
def test_what_a_folder_says_of_first_and_last_tokens_is_what_its_library_does(name: str, tmp_path: Path) -> None:
    """`m2m_100` forces the first token of all outputs: its `begin` is the one after it."""
    plain = case_of(name, tmp_path / "plain" / "model")
    place = 1 if plain.checkpoint.config.forced_first_id == FORCED else 0
    liked = {EOS, *(ids[place] for ids in plain.generated(num_beams=1))}
    case = case_of(name, tmp_path / "model", begin_suppress_tokens=sorted(liked), forced_eos_token_id=EOS)
    assert case.bundle.config.suppressed_first_ids == tuple(sorted(liked))
    assert any("forced_eos_token_id 2" in note for note in case.checkpoint.notes)
    for beam in (1, 4):
        settings = {} if beam == 1 else {"length_penalty": 1.0, "early_stopping": False}
        wanted = case.generated(num_beams=beam, **settings)
        options = SearchOptions.for_profile("hf", beam=beam, max_length=MAX_NEW + 1, force_eos=True)
        found = search(load_runtime("ort-cpu", case.bundle, threads=1), case.sources, options)
        assert [list(hypotheses[0].ids) for hypotheses in found] == wanted
        assert not {ids[place] for ids in wanted} & liked
        assert all(ids[-1] == EOS for ids in wanted)
        assert any(len(ids) == MAX_NEW for ids in wanted)


@pytest.mark.parametrize("given", [7, "7", [[7]], ["7"], [True]])
def test_first_tokens_that_are_no_ids_are_refused(given: Any, tmp_path: Path) -> None:
    made("bart").save_pretrained(tmp_path / "bart")
    with pytest.raises(TfexportError, match=r"begin_suppress_tokens .* not a list of ids"):
        load_checkpoint(changed(tmp_path / "bart", tmp_path, begin_suppress_tokens=given), {})
    with pytest.raises(TfexportError, match=f"suppressed_first_ids has {VOCAB}, which is not in the target"):
        load_checkpoint(changed(tmp_path / "bart", tmp_path / "other", begin_suppress_tokens=[VOCAB]), {})


def test_only_hf_forces_the_end() -> None:
    with pytest.raises(TfexportError, match="force_eos needs the profile hf"):
        SearchOptions(force_eos=True)
    assert np.isfinite(SearchOptions.for_profile("hf", force_eos=True).length_penalty)
