"""Text of folders and vocabularies that are SentencePiece models, held against the library and the rules of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES as MBART_50
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as NLLB

from makers.references.pieces import fairseq, pegasus, t5
from makers.tiny import HEADS, SRC_VOCAB, TGT_VOCAB, TinyCheckpoint
from tfexport.bundle.reader import open_bundle
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.translate import Writer, translate
from tfexport.errors import TfexportError, TokenizerError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats.native import Tokenizers
from tfexport.models.toolkits.hugging_face_text import FolderText, read_text
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions
from tfexport.text.tokenizers import TextTokenizer
from tfexport.text.vocabularies import read_vocabulary

sentencepiece = pytest.importorskip("sentencepiece")

LINES = """the cat sat on a mat with dogs and birds
we ate bread in old towns near rivers , 12 ( of 345 ) .
der hund lief über die straße nach hause
日本語 の テキスト です Привет мир"""
T5_IDS = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
ODD = [
    "<s>",
    "</s>",
    "<unk>",
    "<pad>",
    "<extra_id_0>",
    "<mask_1>",
    "<mask>",
    "de_DE",
    "zul_Latn",
    "  ",
    ">>fra<<",
    "▁",
    "cat",
]
TEXT = st.lists(
    st.sampled_from([*ODD, " "])
    | st.sampled_from([*LINES, *"ﬁ①Å☃😀\u3000\u00a0\u200b\x00\x07\u0301\u017f\r\t_<>|"])
    | st.text(max_size=4)
).map("".join)


@cache
def trained(lines: str = LINES, **options: Any) -> bytes:
    """A small model."""
    content = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines.splitlines() * 20),
        model_writer=content,
        minloglevel=2,
        **{"vocab_size": 75, "hard_vocab_limit": False, **options},
    )
    return content.getvalue()


class Kind:
    """A tokenizer class: what its folder has, and what it makes of a text."""

    def __init__(self, model_type: str, file: str, rule: Callable[..., int], options: dict[str, Any], **settings: Any):
        self.model_type, self.file, self.rule, self.options, self.settings = model_type, file, rule, options, settings
        self.own = T5_IDS if options else {"pad_id": 1, "eos_id": 2, "bos_id": 0}

    def write(self, folder: Path, **options: Any) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / self.file).write_bytes(trained(**self.options, **options))
        (folder / "tokenizer_config.json").write_text(json.dumps(self.settings))
        return folder

    def read(self, folder: Path, **options: str) -> FolderText:
        return read_text(folder, self.model_type, self.own, TextOptions(**options))


FAIRSEQ = "sentencepiece.bpe.model"
KINDS = {
    "t5": Kind("t5", "spiece.model", t5, T5_IDS, tokenizer_class="T5Tokenizer"),
    "mt5": Kind("mt5", "spiece.model", t5, T5_IDS, tokenizer_class="MT5Tokenizer"),
    "pegasus": Kind("pegasus", "spiece.model", pegasus, T5_IDS, tokenizer_class="PegasusTokenizerFast"),
    "mbart": Kind(
        "mbart",
        FAIRSEQ,
        partial(fairseq, languages=MBART_50[:25]),
        {},
        tokenizer_class="MBartTokenizer",
        src_lang="de_DE",
    ),
    "mbart-50": Kind(
        "mbart", FAIRSEQ, partial(fairseq, languages=MBART_50), {}, tokenizer_class="MBart50Tokenizer", src_lang="sl_SI"
    ),
    "nllb": Kind(
        "m2m_100", FAIRSEQ, partial(fairseq, languages=NLLB), {}, tokenizer_class="NllbTokenizer", src_lang="zul_Latn"
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_token_has_the_id_that_the_published_models_were_trained_with(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    model = sentencepiece.SentencePieceProcessor(model_proto=trained(**kind.options))
    vocabulary = kind.read(kind.write(tmp_path / "f")).tokenizers.source.inner.get_vocab()
    assert vocabulary == {token: kind.rule(model, token) for token in vocabulary}
    assert sorted(vocabulary.values())[-1] == max(vocabulary.values()) == len(set(vocabulary.values())) - 1
    pieces = {model.id_to_piece(number) for number in range(len(model))}
    assert pieces <= {*vocabulary}


@pytest.fixture(scope="module")
def read_kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FolderText]:
    @cache
    def of(name: str, **options: Any) -> FolderText:
        return KINDS[name].read(KINDS[name].write(tmp_path_factory.mktemp(name) / "f", **options))

    return of


@pytest.mark.parametrize(
    "options", [{}, {"model_type": "bpe"}, {"byte_fallback": True, "vocab_size": 340}, {"lines": "日本 語"}], ids=str
)
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_text_is_split_as_sentencepiece_does_and_comes_back(
    read_kind: Callable[..., FolderText], options: dict[str, Any], text: str
) -> None:
    """Whatever it is; what spells a token of the vocabulary's own is text."""
    for name, kind in KINDS.items():
        tokenizer = read_kind(name, **options).tokenizers.source
        model = sentencepiece.SentencePieceProcessor(model_proto=trained(**kind.options, **options))
        pieces = model.encode(text, out_type=str)
        unknown = kind.rule(model, "<unk>")
        numbers = model.encode(text)
        wanted = [
            unknown if number == model.unk_id() else kind.rule(model, piece)
            for piece, number in zip(pieces, numbers, strict=True)
        ]
        assert tokenizer.encode(text) == wanted
        known = [number for number in numbers if number != model.unk_id()]
        text_back = model.decode(known)
        assert tokenizer.decode(wanted) == (text_back if tokenizer.spaces == "all" else text_back.strip())


@pytest.mark.parametrize("name", ["t5", "pegasus", "mbart", "mbart-50"])
def test_the_library_reads_a_folder_of_a_model_alone_in_the_same_way(name: str, tmp_path: Path) -> None:
    """Version 5 rebuilds these tokenizers from the pieces and their scores."""
    kind = KINDS[name]
    folder = kind.write(tmp_path / "f")
    ours = kind.read(folder)
    (folder / "tokenizer_config.json").unlink()
    class_ = getattr(transformers, kind.settings["tokenizer_class"].removesuffix("Fast"))
    theirs = class_.from_pretrained(folder, src_lang=kind.settings.get("src_lang"))
    source, eos = ours.tokenizers.source, [kind.own["eos_id"]] * ours.fields["source_eos"]
    texts = [*LINES.splitlines(), "a snow☃man, 12 dogs", "the  cat   ran", "x", "12 (345)."]
    texts += ["ﬁ Ünï"] * (name != "mbart")  # whose version 5 forgets to normalise
    for text in texts:
        assert [*source.before, *source.encode(text), *source.after, *eos] == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("name", "settings", "before", "after"),
    [
        ("mbart", {}, [], ["</s>", "fr_XX"]),
        ("mbart-50", {}, ["fr_XX"], []),
        ("nllb", {}, ["fra_Latn"], []),
        ("nllb", {"legacy_behaviour": True}, [], ["</s>", "fra_Latn"]),
        ("t5", {}, [], []),
    ],
)
def test_a_source_has_its_language_where_its_model_learnt_it(
    name: str, settings: dict[str, Any], before: list[str], after: list[str], tmp_path: Path
) -> None:
    kind = KINDS[name]
    folder = kind.write(tmp_path / "f")
    (folder / "tokenizer_config.json").write_text(json.dumps({**kind.settings, **settings}))
    language = next((token for token in (*before, *after) if token != "</s>"), None)
    found = kind.read(folder, **({"source_language": language, "target_language": language} if language else {}))
    source = found.tokenizers.source
    assert (source.tokens(source.before), source.tokens(source.after)) == (before, after)
    assert found.fields["source_eos"] == (not after)
    assert found.language == (None if language is None else source.inner.token_to_id(language))


@pytest.mark.parametrize("languages", [25, 52])
def test_mbart_is_told_from_mbart_50_by_its_size(languages: int, tmp_path: Path) -> None:
    kind = KINDS["mbart"]
    folder = kind.write(tmp_path / "f")
    (folder / "tokenizer_config.json").write_text('{"src_lang": "en_XX"}')
    pieces = len(sentencepiece.SentencePieceProcessor(model_proto=trained()))
    (folder / "config.json").write_text(json.dumps({"vocab_size": pieces + languages + 2}))
    source = kind.read(folder).tokenizers.source
    assert source.size == pieces + languages + 2
    assert bool(source.before) == (languages == 52)


@pytest.mark.parametrize(
    ("name", "file", "content", "note"),
    [
        ("t5", "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}, "tokenizer_class 'LlamaTokenizer'"),
        ("t5", "tokenizer_config.json", {"sp_model_kwargs": {"enable_sampling": True}}, "sp_model_kwargs"),
        ("t5", "added_tokens.json", {"<word>": 190}, "words of its own \\(<word>\\)"),
        ("mbart", "tokenizer_config.json", {"tokenizer_class": "MBartTokenizer"}, "language of its sources"),
        ("mbart", "tokenizer_config.json", {"src_lang": "en_XX"}, "names no tokenizer_class"),
        (
            "nllb",
            "tokenizer_config.json",
            {"src_lang": "eng_Latn", "extra_special_tokens": ["tlh_Latn"]},
            "ids of tlh_Latn",
        ),
    ],
)
def test_what_is_not_known_is_told_and_not_guessed(
    name: str, file: str, content: dict[str, Any], note: str, tmp_path: Path
) -> None:
    kind = KINDS[name]
    folder = kind.write(tmp_path / "f")
    (folder / file).write_text(json.dumps(content))
    found = kind.read(folder)
    assert found.tokenizers.source is None
    assert re.search(note, found.notes[0])
    with pytest.raises(TfexportError, match=note) as caught:
        kind.read(folder, prefix="x")
    assert "\n" not in str(caught.value)


def test_added_tokens_have_the_ids_that_the_folder_tells(tmp_path: Path) -> None:
    """Also where they are others than usual, as in folders of versions that had <mask> before the languages."""
    kind = KINDS["nllb"]
    folder = kind.write(tmp_path / "f")
    pieces = len(sentencepiece.SentencePieceProcessor(model_proto=trained()))
    moved = {str(pieces + 1 + at): {"content": token, "special": True} for at, token in enumerate(["<mask>", *NLLB])}
    (folder / "tokenizer_config.json").write_text(json.dumps({**kind.settings, "added_tokens_decoder": moved}))
    assert kind.read(folder).tokenizers.source.before == (pieces + 1 + 202,)


@pytest.mark.parametrize(
    "content", [{"mask_token": 5}, {"mask_token": [None, True, [1]]}, {"mask_token": {"content": []}}]
)
def test_what_is_no_token_in_a_map_of_tokens_is_passed_over(content: dict[str, Any], tmp_path: Path) -> None:
    folder = KINDS["t5"].write(tmp_path / "f")
    (folder / "special_tokens_map.json").write_text(json.dumps(content))
    assert KINDS["t5"].read(folder).tokenizers.source is not None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("added_tokens.json", {"<x>": -1}),
        ("added_tokens.json", {"<x>": True}),
        ("added_tokens.json", {"<x>": 2**40}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<x>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"3": {"content": []}}}),
        ("tokenizer_config.json", {"extra_ids": 10**12}),
        ("tokenizer_config.json", {"extra_ids": "many"}),
        ("tokenizer_config.json", []),
    ],
)
def test_tokens_without_a_usable_id_are_refused(file: str, content: Any, tmp_path: Path) -> None:
    folder = KINDS["t5"].write(tmp_path / "f")
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(TokenizerError) as caught:
        KINDS["t5"].read(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", [0, 1, 1000])
def test_a_model_that_was_cut_is_refused(cut: int, tmp_path: Path) -> None:
    kind = KINDS["t5"]
    path = kind.write(tmp_path / "f") / kind.file
    path.write_bytes(path.read_bytes()[:cut])
    for read in (lambda: kind.read(path.parent), lambda: read_vocabulary(path)):
        with pytest.raises(TfexportError, match="is not a SentencePiece model") as caught:
            read()
        assert "\n" not in str(caught.value)


# --- as vocabularies of any family


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_a_model_as_a_vocabulary_has_its_own_ids(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "plain.model"
    if not path.exists():
        path.write_bytes(trained())
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = TextTokenizer.from_dict(json.loads(json.dumps(read_vocabulary(path).to_dict())), where="here")
    assert tokenizer.encode(text) == model.encode(text)
    assert tokenizer.decode(model.encode(text)) == model.decode(model.encode(text)).strip()
    assert tokenizer.size == len(model)
    assert [tokenizer.special_id(kind) for kind in ("unk", "bos", "eos", "pad")] == [0, 1, 2, None]


def test_a_checkpoint_is_exported_and_decoded_with_such_vocabularies(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    order = {"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3}
    paths = [tmp_path / "source.spm", tmp_path / "target.model"]
    for path, size in zip(paths, (SRC_VOCAB, TGT_VOCAB), strict=True):
        path.write_bytes(trained("the cat sat on a mat", vocab_size=size, **order))
    tokenizers = Tokenizers(*map(read_vocabulary, paths))
    checkpoint = load_checkpoint(tiny_checkpoint.path, {"n_heads": HEADS}, tokenizers=tokenizers)
    assert (checkpoint.config.unk_id, checkpoint.config.bos_id, checkpoint.config.eos_id) == (0, 2, 3)
    export(checkpoint, tmp_path / "bundle", gate=None)
    bundle = open_bundle(tmp_path / "bundle")
    reader, writer = Reader.of(bundle, None), Writer.of(bundle, None)
    results = list(
        translate(load_runtime("ort-cpu", bundle), reader, [b"the cat", b"", b"\xe2\x98\x83"], SearchOptions())
    )
    assert [result.status == "empty" for result in results] == [False, True, False]
    source, target = (sentencepiece.SentencePieceProcessor(model_file=str(path)) for path in paths)
    assert reader.ids(b"the cat") == [2, *source.encode("the cat"), 3]
    for result in (results[0], results[2]):
        ids = [index if index < len(target) else 0 for index in result.hypotheses[0].ids if index != 3]
        assert writer.line(result) == " ".join(target.decode(ids).split())
