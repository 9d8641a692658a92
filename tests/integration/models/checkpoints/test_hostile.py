"""Toolkits' checkpoints that say what no toolkit writes: an error of ours, in little time, memory and text."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from makers import joeynmt_models, marian_models
from makers.paths import DATA
from tests.support.checkpoints import refused
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats.pickled_options import plain, read_inert
from tfexport.models.formats.pickles import read_pickle

LONG = "x" * 100_000
HUGE = 10**12
"""Tables of that size would take terabytes: PyTorch's own error would come out."""


def fairseq(folder: Path, weights: dict[str, Any], **options: Any) -> Path:
    """Without learned positions: their table is computed."""
    content = read_inert(DATA / "fairseq" / "cfg.pt")
    cfg = plain(content["cfg"], "cfg")
    cfg["model"] |= options
    cfg["task"] |= {name: value for name, value in options.items() if name in cfg["task"]}
    torch.save({**content, "cfg": cfg, "model": {**content["model"], **weights}}, folder / "model.pt")
    return folder / "model.pt"


def opennmt(folder: Path, weights: dict[str, Any], vocab: Any = None, **options: Any) -> Path:
    content = read_inert(DATA / "opennmt" / "v3-biases.pt")
    opt = argparse.Namespace(**{**plain(content["opt"], "opt"), **options})
    changed = {**content, "opt": opt, "model": {**content["model"], **weights}, "vocab": vocab or content["vocab"]}
    torch.save(changed, folder / "model.pt")
    return folder / "model.pt"


def marian(folder: Path, weights: dict[str, Any], **options: Any) -> Path:
    arrays = marian_models.random_arrays("pre-norm", 1) | weights
    return marian_models.write_folder(folder / "m", arrays, marian_models.options_of("pre-norm") | options)


def joeynmt(folder: Path, weights: dict[str, Any], **options: Any) -> Path:
    config, state = joeynmt_models.config_of("pre"), joeynmt_models.random_state("pre", 1)
    for side in ("encoder", "decoder"):
        config["model"][side] |= options
        if "hidden_size" in options:
            del state[f"{side}.pe.pe"]
    return joeynmt_models.write_folder(folder / "m", config, state | weights)


SCALAR = torch.tensor(1.0)
EMBEDDING = "decoder.embeddings.make_embedding.emb_luts.0.weight"
TABLE = "encoder.embeddings.make_embedding.pe.pe"
CASES: dict[str, tuple[Callable[..., Path], dict[str, Any], dict[str, Any], str]] = {
    "fairseq, long table": (fairseq, {}, {"max_source_positions": HUGE}, "which no model has"),
    "fairseq, no table": (fairseq, {}, {"max_source_positions": -1}, "which no model has"),
    "fairseq, narrow": (fairseq, {}, dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim"), 2), "which no model"),
    "fairseq, negative": (fairseq, {}, dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim"), -1), "not above 0"),
    "fairseq, path": (fairseq, {}, {"source_lang": "../../x"}, "which is not a language"),
    "fairseq, number": (fairseq, {}, {"source_lang": 7}, "source_lang 7, not a text"),
    "fairseq, tensor": (fairseq, {}, {"adaptive_input": torch.ones(2)}, "adaptive_input <inert torch.Tensor>"),
    "fairseq, scalar": (
        fairseq,
        {"decoder.embed_tokens.weight": SCALAR},
        {},
        "decoder.embed_tokens.weight, which is not a matrix",
    ),
    "fairseq, text": (fairseq, {}, {"encoder_layers": LONG}, "encoder_layers 'xxx"),
    "opennmt, scalar": (opennmt, {EMBEDDING: SCALAR}, {}, f"{EMBEDDING}, which is not a matrix"),
    "opennmt, no table": (opennmt, {TABLE: SCALAR}, {}, f"{TABLE}, which is not a matrix"),
    "opennmt, bias": (opennmt, {"encoder.transformer.0.feed_forward.w_1.weight": SCALAR}, {}, "misshapen"),
    "opennmt, transforms": (opennmt, {}, {"transforms": 3}, "transforms 3, not a list of texts"),
    "opennmt, attention": (opennmt, {}, {"self_attn_type": [LONG]}, "self_attn_type ['xxx"),
    "opennmt, words": (opennmt, {}, {"vocab": ["src", "tgt"]}, "no src vocabulary"),
    "opennmt, half a character": (opennmt, {}, {"vocab": {"src": ["\ud800"]}}, "no src vocabulary"),
    "marian, wide table": (marian, {}, {"dim-emb": HUGE}, "which no model has"),
    "marian, narrow table": (marian, {}, {"dim-emb": 2}, "which no model has"),
    "marian, positions": (
        marian,
        {"Wpos": np.float32(1)},
        {"transformer-train-position-embeddings": True},
        "Wpos, which is not a matrix",
    ),
    "marian, empty": (marian, {"encoder_Wemb": np.zeros((2**40, 0), "f4")}, {}, "does not fit its content"),
    "joeynmt, wide table": (joeynmt, {}, {"hidden_size": HUGE}, "which no model has"),
    "joeynmt, negative": (joeynmt, {}, {"hidden_size": -1}, "not above 0"),
    "joeynmt, no table": (joeynmt, {"encoder.pe.pe": SCALAR}, {}, "encoder.pe.pe, which is not a matrix"),
    "joeynmt, empty table": (
        joeynmt,
        {"encoder.pe.pe": torch.zeros(0, 4, 24)},
        {},
        "encoder.pe.pe, which is not a matrix",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_and_settings_that_no_model_has_are_refused(tmp_path: Path, name: str) -> None:
    write, weights, options, telling = CASES[name]
    path = write(tmp_path, weights, **options)
    message = refused(load_checkpoint, path, {})
    assert telling in message
    assert len(message) < 1000


def test_a_name_too_long_for_a_file_is_the_name_of_none(tmp_path: Path) -> None:
    notes = load_checkpoint(fairseq(tmp_path, {}, source_lang=LONG), {}).notes
    assert any("is not next to it" in note for note in notes)


# --- pickles


def archived(path: Path, raw: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", raw)
    return path


def test_numbers_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    raw = pickle.dumps({"model": {"a": 1}, "args": 1 << 50_000}, 2)
    assert "a number of 50001 bits" in refused(read_inert, archived(tmp_path / "model.pt", raw))


def test_keys_of_storages_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    """A file can nest them too deep for Python to write."""
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    stream = io.BytesIO(path.read_bytes())
    for _ in range(4):
        read_pickle(stream, lambda key, n_bytes: torch.empty(n_bytes, dtype=torch.uint8))
    keys = b"\x80\x02](" + b")" + b"\x85" * 1500 + b"e."
    path.write_bytes(stream.getvalue()[: stream.tell()] + keys)
    assert "its list of storages is not that of its tensors" in refused(read_inert, path)


def test_numbers_are_not_shared_by_any_number_of_tensors(tmp_path: Path) -> None:
    """Each may be copied: a file of megabytes would take many times that."""
    table = torch.randn(50, 4)
    for count, is_read in ((15, True), (20, False)):
        torch.save({str(number): table[:] for number in range(count)}, tmp_path / "model.pt")
        if is_read:
            assert len(read_inert(tmp_path / "model.pt")) == count
        else:
            assert "share their numbers too often" in refused(read_inert, tmp_path / "model.pt")


def packed(path: Path, content: Any) -> Path:
    """A file of torch.save whose members are compressed, which torch.save never does."""
    stored = io.BytesIO()
    torch.save(content, stored)
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    return path


def test_a_small_file_of_many_zeros_is_refused(tmp_path: Path) -> None:
    """It would be a thousand times as large in memory."""
    path = packed(tmp_path / "model.pt", {"encoder.weight": torch.zeros(500, 1000)})
    assert path.stat().st_size < 10_000
    assert "is compressed" in refused(load_checkpoint, path, {})


@pytest.mark.parametrize(
    "opcodes",
    [b"]" * 1_000_000, b"\x8f" * 200_000, b"]" + b"\x94" * 500_000, b"cx\ny\n" + b"2)\x81" * 200_000, b"(" * 2_000_000],
    ids=["lists", "sets", "remembered", "objects", "marks"],
)
@pytest.mark.thorough
def test_values_that_take_far_more_memory_than_their_bytes_are_refused(tmp_path: Path, opcodes: bytes) -> None:
    path = archived(tmp_path / "model.pt", b"\x80\x02" + opcodes + b".")
    assert "cannot be read as a file of torch.save" in refused(load_checkpoint, path, {})


# --- YAML

BOMB = "".join(f"b{k}: &b{k} [{f'*b{k - 1}, ' * 9 if k else 'x'}]\n" for k in range(12))
YAML = {
    "bomb": BOMB,
    "itself": "a: &a {b: *a}\n",
    "call": 'type: !!python/object/apply:os.system ["touch called"]\n',
    "name": "type: !!python/name:os.system\n",
    "deep": f"type: {'[' * 400}{']' * 400}\n",
    "digits": f"dim-emb: {'9' * 100_000}\n",
    "date": "a: !!timestamp y\n",
    "flag": "a: !!bool y\n",
    "number": "a: !!int y\n",
    "fraction": "a: !!float y\n",
    "bytes": "a: !!binary abc\n",
    "no digits": "a: !!int ''\n",
    "month": "a: 2001-99-99\n",
}


@pytest.mark.parametrize("where", ["model.yml", "decoder.yml", "config.yaml"])
@pytest.mark.parametrize("what", YAML)
def test_yaml_that_is_no_settings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = (joeynmt if where == "config.yaml" else marian)(tmp_path, {})
    if where == "model.yml":
        text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in marian_models.options_of("pre-norm").items())
        settings = np.frombuffer((text + YAML[what]).encode(), dtype=np.int8)
        np.savez(folder / "model.npz", **{"special:model.yml": settings}, **marian_models.random_arrays("pre-norm", 1))
    else:
        path = next(folder.glob(f"*{where}"))
        path.write_text(path.read_text() + YAML[what])
    assert "cannot read" in refused(load_checkpoint, folder, {})
    assert not (tmp_path / "called").exists()


def test_a_vocabulary_whose_name_is_too_long_is_not_there(tmp_path: Path) -> None:
    folder = marian(tmp_path, {})
    shutil.copyfile(folder / "vocab.src.yml", folder / "vocab.yml")
    (folder / "model.npz.decoder.yml").write_text(f"vocabs: [{LONG}, {LONG}]\n")
    source = load_checkpoint(folder, {}).tokenizers.source
    assert source is not None
    assert source.tokens([7]) == ["s7"]
