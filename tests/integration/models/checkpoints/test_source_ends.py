"""Whether source text has bos and eos: it is asked for, or the tokenizer's own template decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors
from torch import nn

import tfexport
from makers.torch_models import EOS, HEADS, TGT_VOCAB, made
from tests.integration.models.checkpoints.test_asking import BOS, MAX_LENGTH, SOURCES, hints_of, owner_s
from tfexport.bundle.reader import open_bundle
from tfexport.errors import TfexportError
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats.native import Tokenizers
from tfexport.text.tokenizers import word_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")


WORDS = ["<unk>", "<pad>", "<bos>", "<eos>", *(f"word{k}" for k in range(4, TGT_VOCAB))]


def texts() -> list[str]:
    return [" ".join(WORDS[index] for index in source) for source in SOURCES]


def vocabulary(path: Path, *template: str, size: int = TGT_VOCAB) -> Path:
    """A tokenizer.json, with a template if one is given."""
    inner = word_tokenizer({word: index for index, word in enumerate(WORDS[:size])}).inner
    assert isinstance(inner, Tokenizer)
    if template:
        inner.post_processor = processors.TemplateProcessing(
            single=" ".join(template), special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
        )
    inner.save(str(path))
    return path


def translated(folder: Path, **options: Any) -> list[list[int]]:
    given = {"heads": HEADS, "norm_first": False, "activation": "relu", "embedding_scale": "sqrt", "parity": False}
    tfexport.export(folder / "model.pt", folder / "bundle", force=True, **given, **options)
    found = tfexport.load(folder / "bundle").translate(texts(), max_length=MAX_LENGTH)
    return [list(translation.hypotheses[0].ids) for translation in found]


@pytest.fixture
def own(tmp_path: Path) -> nn.Module:
    """A model in `model.pt`."""
    module = made("tutorial")
    torch.save(module.state_dict(), tmp_path / "model.pt")
    return module


def test_ends_of_sources_are_asked_for_where_text_is_read(own: nn.Module, tmp_path: Path) -> None:
    given = {"src_vocab": vocabulary(tmp_path / "words.json")}
    with pytest.raises(
        TfexportError, match=r"contain source_bos, source_eos. Give --source-bos \(or --no-source-bos\) --sou"
    ):
        translated(tmp_path, **given)
    with pytest.raises(TfexportError, match="does not contain source_eos"):
        translated(tmp_path, **given, source_bos=False)
    ends: dict[tuple[bool, bool], list[list[int]]] = {}
    for bos in (False, True):
        for eos in (False, True):
            ends[bos, eos] = translated(tmp_path, **given, source_bos=bos, source_eos=eos)
            assert ends[bos, eos] == owner_s(own, [[BOS] * bos + source + [EOS] * eos for source in SOURCES])
    assert len({str(decoded) for decoded in ends.values()}) == 4
    load_checkpoint(tmp_path / "model.pt", hints_of("tutorial"))  # lines of ids are complete by themselves


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("template", [("$A", "<eos>"), ("<bos>", "$A"), ("<bos>", "$A", "<eos>")])
def test_the_template_of_a_tokenizer_decides(own: nn.Module, tmp_path: Path, template: tuple[str, ...]) -> None:
    given = {"src_vocab": vocabulary(tmp_path / "tokenizer.json", *template)}
    bos, eos = "<bos>" in template, "<eos>" in template
    wanted = owner_s(own, [[BOS] * bos + source + [EOS] * eos for source in SOURCES])
    assert translated(tmp_path, **given) == wanted
    config = open_bundle(tmp_path / "bundle").config
    assert (config.source_bos, config.source_eos) == (False, False)
    # The user's word is stronger.
    assert translated(tmp_path, **given, source_bos=False, source_eos=False) == owner_s(own)
    notes = open_bundle(tmp_path / "bundle").origin.notes
    assert any("the source vocabulary's own template is not used" in note for note in notes)


def test_families_with_code_of_their_own_keep_their_ends(tmp_path: Path, tiny_checkpoint: Any) -> None:
    from makers.tiny import HINTS
    from tfexport.text.vocabularies import read_vocabulary

    tokenizer = read_vocabulary(vocabulary(tmp_path / "tokenizer.json", "$A", "<eos>", size=20))
    loaded = load_checkpoint(tiny_checkpoint.path, HINTS, tokenizers=Tokenizers(tokenizer, None))
    assert (loaded.config.source_bos, loaded.config.source_eos) == (True, True)
    assert loaded.tokenizers.source is not None
    assert (loaded.tokenizers.source.before, loaded.tokenizers.source.after) == ((), ())


def test_a_bundle_with_a_template_is_the_checkpoint_s(own: nn.Module, tmp_path: Path, run: Any) -> None:
    """`parity` reads the checkpoint again, with the vocabulary that the manifest names."""
    del own
    translated(tmp_path, src_vocab=vocabulary(tmp_path / "tokenizer.json", "$A", "<eos>"))
    compared = run("parity", tmp_path / "bundle", "--checkpoint", tmp_path / "model.pt")
    assert compared.code == 0, compared.stderr
