"""The search of a Hugging Face folder: `generate` with nothing but its generation_config.json, and
`decode --search-profile hf` without other flags give the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tfexport
from makers.hugging_face_models import EOS, PAD, changed, made, sources_of
from tests.support.commands import Run, one_error
from tfexport.bundle.reader import MANIFEST, open_bundle
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.search.search import pad
from tfexport.verification.files import generation_mismatches

pytest.importorskip("transformers")

BATCH = 50

BAD = [[9, 11], [12], [30, 31, 32], [15, 16], [20, 21]]
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "marian": [
        {"num_beams": 4, "length_penalty": 0.6, "max_length": 16, "forced_eos_token_id": EOS},
        {"num_beams": 6, "early_stopping": True, "max_length": 24, "bad_words_ids": [[PAD], *BAD]},
        {"max_new_tokens": 12, "min_new_tokens": 3, "repetition_penalty": 1.4},
    ],
    "bart": [
        {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never", "no_repeat_ngram_size": 3, "max_length": 22},
        # Without padding: in a batch the library counts it as tokens of the source.
        {"num_beams": 3, "min_length": 6, "encoder_no_repeat_ngram_size": 2, "bad_words_ids": [[PAD]]},
        {"num_beams": 5, "num_return_sequences": 3, "forced_bos_token_id": 0, "forced_eos_token_id": EOS},
    ],
    "mbart": [
        {"num_beams": 5, "eos_token_id": [EOS, 9, 14], "max_new_tokens": 15, "early_stopping": True},
        {
            "eos_token_id": [EOS, 33],
            "suppress_tokens": [17, 25, 30],
            "begin_suppress_tokens": [8, EOS],
            "max_length": 18,
        },
        {},
    ],
    "pegasus": [
        {"num_beams": 8, "length_penalty": 0.8, "max_length": 20, "min_length": 4, "repetition_penalty": 0.8},
        {"num_beams": 2, "bad_words_ids": BAD, "no_repeat_ngram_size": 2, "forced_eos_token_id": EOS},
        {"no_repeat_ngram_size": 1, "max_length": 15},
    ],
    "m2m_100": [
        {"num_beams": 5, "max_length": 20, "begin_suppress_tokens": [EOS, 11, 12], "early_stopping": "never"},
        {"forced_bos_token_id": 19, "min_length": 8, "max_new_tokens": 14, "bad_words_ids": [[PAD], *BAD]},
        {"num_beams": 4, "length_penalty": -0.5, "sequence_bias": [[[9], -3.0], [[9, 11], 2.5], [[30, 31], 4.0]]},
    ],
    "t5": [
        {"num_beams": 4, "max_length": 20, "length_penalty": 1.5, "early_stopping": True, "repetition_penalty": 1.2},
        {"num_beams": 4, "eos_token_id": [1, 7], "bad_words_ids": [[0], *BAD], "min_new_tokens": 2},
        {"sequence_bias": [[[9], -2.0], [[12, 30], 3.0]], "encoder_no_repeat_ngram_size": 3},
    ],
}
"""generation_config.json beside the special tokens, of models of six kinds."""


def saved(name: str, folder: Path, settings: dict[str, Any]) -> Any:
    """A random model with its folder; generation_config.json has `settings` alone beside special tokens."""
    model = made(name)
    model.generation_config.bad_words_ids = None
    model.generation_config.num_beams = None
    for setting, value in settings.items():
        setattr(model.generation_config, setting, value)
    model.save_pretrained(folder)
    return model


def generated(model: Any, sources: list[list[int]]) -> list[list[list[int]]]:
    """The outputs of each source, to the token that ends it."""
    config = model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    limit = (config.max_new_tokens + 1 if config.max_new_tokens else config.max_length) or 21
    count = config.num_return_sequences or 1
    found = []
    for start in range(0, len(sources), BATCH):
        ids, lengths = pad(sources[start : start + BATCH], model.config.pad_token_id)
        mask = torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]
        with torch.no_grad():
            rows = model.generate(input_ids=torch.from_numpy(ids), attention_mask=mask.long()).tolist()
        found += [cut(row[1:limit], ends) for row in rows]
    return [found[at : at + count] for at in range(0, len(found), count)]


def cut(row: list[int], ends: list[int]) -> list[int]:
    place = next((place for place, index in enumerate(row) if index in ends), len(row))
    return row[: place + 1]


def compare(name: str, number: int, count: int, tmp_path: Path, run: Run) -> list[list[list[int]]]:
    settings = CONFIGS[name][number]
    model = saved(name, tmp_path / "model", settings)
    sources = sources_of(model, count)
    wanted = generated(model, sources)
    export(load_checkpoint(tmp_path / "model", {}), tmp_path / "bundle", gate=None)
    lines = "".join(f"{' '.join(map(str, source))}\n" for source in sources).encode()
    flags = ("--input-format", "ids", "--output-format", "ids", "--threads", "1", "--workers", "1")
    done = run("decode", tmp_path / "bundle", "--search-profile", "hf", *flags, stdin=lines)
    found = [[[int(index) for index in one.split()] for one in line.split("\t")] for line in done.lines]
    assert sum(one == other for one, other in zip(found, wanted, strict=True)) == count
    (note,) = [line for line in done.stderr.splitlines() if "generation_config.json gives" in line]
    assert "not supported" not in done.stderr
    assert "max_length" in note
    return found


@pytest.mark.parametrize(("name", "number"), [("marian", 1), ("mbart", 0), ("m2m_100", 1)])
def test_a_bundle_searches_as_its_folder_says(name: str, number: int, tmp_path: Path, run: Run) -> None:
    compare(name, number, 20, tmp_path, run)


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", CONFIGS)
def test_200_of_200_sentences_are_those_of_generate(name: str, number: int, tmp_path: Path, run: Run) -> None:
    found = compare(name, number, 200, tmp_path, run)
    assert len({tuple(outputs[0]) for outputs in found}) > 40  # it does not say the same to all


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose library searches with a beam, and with what tfexport has not."""
    folder = tmp_path_factory.mktemp("kept")
    saved("bart", folder / "model", {"num_beams": 3, "max_length": 12, "num_return_sequences": 2})
    path = folder / "model" / "generation_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "typical_p": 0.9, "colour": "red", "guidance_scale": 1})
    )
    export(load_checkpoint(folder / "model", {}), folder / "bundle", gate=None)
    return folder / "bundle"


LINES = b"5 9 30 2\n44 2\n8 8 17 2\n"


def test_the_bundle_keeps_the_file_and_its_manifest_lists_it(bundle: Path, tmp_path: Path) -> None:
    content = json.loads((bundle / "generation_config.json").read_text())
    assert content == json.loads((bundle.parent / "model" / "generation_config.json").read_text())
    assert open_bundle(bundle).generation_config == content
    assert "generation_config.json" in json.loads((bundle / MANIFEST).read_text())["files"]


def test_flags_come_first_also_those_that_are_tfexports_defaults(bundle: Path, run: Run) -> None:
    flags = ("--threads", "1", "--search-profile", "hf")
    taken = run("decode", bundle, *flags, stdin=LINES)
    assert {line.count("\t") for line in taken.lines} == {1}
    notes = taken.stderr.splitlines()
    assert (
        "note: generation_config.json gives beam 3, max_length 12, nbest 2; options that you give take precedence"
        in notes
    )
    assert "note: generation_config.json has settings that are not supported: typical_p 0.9, colour red" in notes
    one = run("decode", bundle, *flags, "--beam", "1", stdin=LINES)
    assert "generation_config.json gives max_length 12;" in one.stderr
    assert {line.count("\t") for line in one.lines} == {0}
    plain = run("decode", bundle, "--threads", "1", stdin=LINES)
    assert "generation_config.json" not in plain.stderr
    long = run("decode", bundle, *flags, "--max-length", "30", "--nbest", "1", stdin=LINES)
    lengths = [max(len(line.split("\t")[0].split()) for line in outcome.lines) for outcome in (taken, long)]
    assert lengths[0] <= 11 < lengths[1]
    sampled = run("decode", bundle, *flags, "--samples", "1", "--seed", "3", stdin=LINES)
    assert "top_k 50" in sampled.stderr
    assert sampled.code == 0


def test_python_takes_the_same(bundle: Path, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    model = tfexport.load(bundle, threads=1)
    sources = [[int(index) for index in line.split()] for line in LINES.decode().splitlines()]
    with caplog.at_level("INFO", "tfexport"):
        found = model.translate_ids(sources, profile="hf")
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "generation_config.json gives beam 3, max_length 12, nbest 2",
        "generation_config.json has settings that are not supported: typical_p 0.9, colour red",
    ]
    lines = run("decode", bundle, "--threads", "1", "--search-profile", "hf", stdin=LINES).lines
    assert ["\t".join(" ".join(map(str, one.ids)) for one in result.hypotheses) for result in found] == lines


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": "4"}, "beam is '4'"),
        ({"max_new_tokens": 2.5}, "max_new_tokens 2.5, not a whole number"),
        ({"forced_eos_token_id": "x"}, "forced_eos_token_id"),
        ({"early_stopping": 3}, "early_stopping is 3"),
    ],
)
def test_a_setting_of_another_type_is_named(bundle: Path, settings: dict[str, Any], message: str) -> None:
    from tfexport.decoding.generation_config import generation_defaults
    from tfexport.errors import TfexportError

    with pytest.raises(TfexportError, match=rf"generation_config.json of this bundle.*{message}"):
        generation_defaults(settings, open_bundle(bundle).config)


def test_lengths_of_the_profile_count_the_start_token(bundle: Path, run: Run) -> None:
    flags = ("--threads", "1", "--search-profile", "hf", "--beam", "1")
    for length in (2, 5):
        lines = run("decode", bundle, *flags, "--max-length", length, stdin=LINES).lines
        assert {len(line.split()) for line in lines} == {length - 1}
    assert "counts the start token" in one_error(run("decode", bundle, *flags, "--max-length", "1", stdin=LINES))


def test_parity_compares_the_file_with_the_checkpoint_s(bundle: Path) -> None:
    opened = open_bundle(bundle)
    checkpoint = load_checkpoint(bundle.parent / "model", {})
    assert generation_mismatches(opened, checkpoint.generation) == []
    other = {**(checkpoint.generation or {}), "num_beams": 5}
    assert [str(found) for found in generation_mismatches(opened, other)] == [
        "generation_config.json: num_beams is not the checkpoint's"
    ]
    assert len(generation_mismatches(opened, None)) == 1


def test_an_older_folder_says_it_in_config_json(tmp_path: Path) -> None:
    saved("bart", tmp_path / "model", {})
    (tmp_path / "model" / "generation_config.json").unlink()
    assert load_checkpoint(tmp_path / "model", {}).generation is None
    folder = changed(tmp_path / "model", tmp_path, num_beams=4, max_length=30, suppress_tokens=[7])
    assert load_checkpoint(folder, {}).generation == {
        **{"num_beams": 4, "max_length": 30},
        **{"suppress_tokens": [7], "eos_token_id": EOS},
    }
