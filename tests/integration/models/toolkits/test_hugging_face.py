"""Folders of the transformers library against the library itself: the same logits, the same tokens.

Its models are made here with random weights at uneven sizes, saved by the library, read, exported and decoded. Norms and
biases are random too: ones and zeros would hide a swapped pair.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from makers.hugging_face_models import BART, EOS, MAX_NEW, MODELS, T5, Case, changed, made, sources_of
from makers.tiny import randomised
from tests.support.checkpoints import assert_same_model
from tests.support.text_models import as_in_a_bundle, read_ids, write_pieces
from tfexport.bundle.reader import open_bundle
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.translate import Writer, translate
from tfexport.errors import CheckpointError, TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import inspect_checkpoint, load_checkpoint
from tfexport.models.formats.native import Tokenizers
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, pad
from tfexport.text.sentencepiece import Pieces

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = made(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "model"
    model.save_pretrained(folder)
    checkpoint = load_checkpoint(folder, {})
    export(checkpoint, folder.with_name("bundle"), gate=None)
    return Case(model, folder, checkpoint, open_bundle(folder.with_name("bundle")), sources_of(model, 24))


def logits_of(case: Case) -> tuple[Tensor, Tensor]:
    """Teacher-forced logits [batch, tgt, vocab] of the library and of the canonical model."""
    config = case.checkpoint.config
    ids, lengths = (torch.from_numpy(array) for array in pad(case.sources, config.pad_id))
    random = torch.Generator().manual_seed(2)
    targets = torch.randint(EOS + 1, config.tgt_vocab_size, (len(ids), 11), generator=random)
    targets[:, 0] = config.bos_id
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    with torch.no_grad():
        wanted = case.model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
        return wanted, case.checkpoint.build_model()(ids, lengths, targets)


@pytest.mark.sampled(every=4)
def test_the_library_s_logits(case: Case) -> None:
    wanted, found = logits_of(case)
    assert (wanted - found).abs().max() < 1e-4
    assert wanted.std() > 0.1


@pytest.mark.sampled(every=4)
def test_greedy_tokens_are_the_library_s(case: Case) -> None:
    wanted = case.generated(num_beams=1)
    assert case.decoded(1) == wanted
    assert len({tuple(row) for row in wanted}) >= len(wanted) // 2  # it does not say the same to all
    assert any(row[-1] == case.checkpoint.config.eos_id for row in wanted)


@pytest.mark.sampled(every=4)
def test_beam_tokens_are_the_library_s(case: Case) -> None:
    assert case.decoded(4) == case.generated(num_beams=4, length_penalty=0.0, early_stopping=False)


# --- text


TEXTS = [
    "the cat sat on a mat",
    "über die straße",
    "cat",
    "a snow☃man, 12 dogs",
    "the  cat   ran",
    "<unk> cat",
    "Ünïcode ﬁ",
]
"""With characters that no vocabulary has, and with what text normalisation changes."""


def write_vocabulary(path: Path, first: list[str], pieces: Any, last: tuple[str, ...] = ()) -> None:
    known = [pieces.id_to_piece(index) for index in range(3, pieces.get_piece_size())]
    path.write_text(json.dumps({token: index for index, token in enumerate([*first, *known, *last])}))


def marian_text(folder: Path) -> Any:
    pieces = write_pieces(folder / "source.spm")
    write_pieces(folder / "target.spm")
    write_vocabulary(folder / "vocab.json", ["</s>", "<unk>"], pieces, (">>fra<<", "<pad>"))
    files = [str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")]
    return transformers.MarianTokenizer(*files)


def m2m_100_text(folder: Path) -> Any:
    pieces = write_pieces(folder / "sentencepiece.bpe.model")
    write_vocabulary(folder / "vocab.json", ["<s>", "<pad>", "</s>", "<unk>"], pieces)
    files = [str(folder / name) for name in ("vocab.json", "sentencepiece.bpe.model")]
    return transformers.M2M100Tokenizer(*files, src_lang="de", tgt_lang="en")


def t5_text(folder: Path) -> Any:
    write_pieces(folder / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    return transformers.T5Tokenizer.from_pretrained(folder)


def mbart_text(folder: Path) -> Any:
    write_pieces(folder / "sentencepiece.bpe.model")
    return transformers.MBartTokenizer.from_pretrained(folder, src_lang="de_DE", tgt_lang="en_XX")


def nllb_text(folder: Path) -> Any:
    write_pieces(folder / "sentencepiece.bpe.model")
    languages = {"extra_special_tokens": ["deu_Latn", "eng_Latn", "fra_Latn"]}
    return transformers.NllbTokenizer.from_pretrained(folder, src_lang="deu_Latn", tgt_lang="eng_Latn", **languages)


def mbart_50_text(folder: Path) -> Any:
    write_pieces(folder / "sentencepiece.bpe.model")
    return transformers.MBart50Tokenizer.from_pretrained(folder, src_lang="de_DE", tgt_lang="en_XX")


def pegasus_text(folder: Path) -> Any:
    write_pieces(folder / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    return transformers.PegasusTokenizer.from_pretrained(folder)


def test_pieces_know_the_parts_of_their_text(tmp_path: Path) -> None:
    """An unknown piece too is what the text has there."""
    marian_text(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    pieces = Pieces((tmp_path / "source.spm").read_bytes(), vocabulary, ["</s>"])
    text = ">>fra<< the cat ☃ ran"
    written, ids = pieces.written(text), pieces.encode(text)
    assert len(written) == len(ids)
    assert written[0] == ">>fra<<"
    assert written[ids.index(vocabulary["<unk>"], 1) :][0] == "☃"
    assert "".join(written[1:]) == "thecat☃ran"


TEXT_MODELS = {
    "marian": (marian_text, "MarianMTModel"),
    "m2m_100": (m2m_100_text, "M2M100ForConditionalGeneration"),
    "t5": (t5_text, "T5ForConditionalGeneration"),
    "mbart": (mbart_text, "MBartForConditionalGeneration"),
    "nllb": (nllb_text, "M2M100ForConditionalGeneration"),
    "t5 pieces": (t5_text, "T5ForConditionalGeneration"),
    "mbart-50 pieces": (mbart_50_text, "MBartForConditionalGeneration"),
    "pegasus pieces": (pegasus_text, "PegasusForConditionalGeneration"),
}
"""Those of pieces have a SentencePiece model and no tokenizer.json."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Folders with a tokenizer and a model of its size, by name, and the tokenizers of the library."""
    folders: dict[str, tuple[Path, Any]] = {}

    def of(name: str) -> tuple[Path, Any]:
        if name not in folders:
            folder = tmp_path_factory.mktemp(f"{name}-text")
            write, model = TEXT_MODELS[name]
            tokenizer = write(folder)
            tokenizer.save_pretrained(folder)
            if name.endswith("pieces"):
                (folder / "tokenizer.json").unlink()
            ids = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "eos")}
            sizes = {
                **(T5 if name.startswith("t5") else BART),
                "vocab_size": len(tokenizer) + 108 * (name == "m2m_100"),
            }  # its languages
            sizes |= {f"{kind}_token_id": index for kind, index in ids.items()}
            class_ = getattr(transformers, model)
            config = class_.config_class(**{**sizes, "decoder_start_token_id": ids["eos"]})
            randomised(class_(config)).save_pretrained(folder)
            folders[name] = folder, tokenizer
        return folders[name]

    return of


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_text_has_the_library_s_ids_and_they_its_text(texts: Callable[[str], tuple[Path, Any]], name: str) -> None:
    folder, tokenizer = texts(name)
    checkpoint = as_in_a_bundle(load_checkpoint(folder, {}))
    writer = Writer(checkpoint.config, checkpoint.tokenizers.target, "text")
    # Text that spells a special token is text here: the library makes a token of it.
    for text in (text for text in TEXTS if "<" not in text):
        wanted = tokenizer(text)["input_ids"]
        assert read_ids(checkpoint, text) == wanted
        target = tokenizer(text_target=text)["input_ids"]
        hidden = {checkpoint.config.forced_first_id, *(checkpoint.tokenizers.source.before or ())}
        body = [index for index in target if index not in hidden and not tokenizer.decode([index]).startswith("__")]
        assert writer.text(target) == tokenizer.decode(body, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["t5", "mbart", "nllb", "t5 pieces", "mbart-50 pieces", "pegasus pieces"])
def test_spaces_of_an_output_are_those_of_the_library(texts: Callable[[str], tuple[Path, Any]], name: str) -> None:
    """A model may write a space at an end, or two of them. SentencePiece itself leaves out those at the beginning."""
    folder, tokenizer = texts(name)
    checkpoint = as_in_a_bundle(load_checkpoint(folder, {}))
    writer = Writer(checkpoint.config, checkpoint.tokenizers.target, "text")
    space, word = tokenizer.convert_tokens_to_ids(["▁", "▁the"])
    for ids in ([space, word], [word, space], [word, space, word], [word, word], [space], []):
        row = [*ids, tokenizer.eos_token_id]
        wanted = tokenizer.decode(row, skip_special_tokens=True)
        assert writer.text(row) == (wanted.lstrip() if "pieces" in name else wanted)
    outputs = {tokenizer.decode(row, skip_special_tokens=True) for row in ([space, word], [word, space, word])}
    assert any("  " in text or text != text.strip() for text in outputs)


@pytest.mark.parametrize(
    ("name", "source", "target", "before", "after"),
    [
        ("m2m_100", "fr", "en", ["__fr__"], []),
        ("nllb", "fra_Latn", "eng_Latn", ["fra_Latn"], []),
        ("mbart", "fr_XX", "en_XX", [], ["</s>", "fr_XX"]),
    ],
)
def test_languages_are_those_that_are_said(
    texts: Callable[[str], tuple[Path, Any]], name: str, source: str, target: str, before: list[str], after: list[str]
) -> None:
    folder, tokenizer = texts(name)
    checkpoint = load_checkpoint(folder, {}, text=TextOptions(source, target))
    tokenizer.src_lang = source
    assert read_ids(checkpoint, TEXTS[0]) == tokenizer(TEXTS[0])["input_ids"]
    assert list(checkpoint.tokenizers.source.before) == tokenizer.convert_tokens_to_ids(before)
    assert list(checkpoint.tokenizers.source.after) == tokenizer.convert_tokens_to_ids(after)
    language = tokenizer.convert_tokens_to_ids(target if name != "m2m_100" else f"__{target}__")
    assert checkpoint.config.forced_first_id == language
    again = load_checkpoint(folder, checkpoint.given, family=checkpoint.family)
    assert again.config == checkpoint.config  # as a comparison with the checkpoint reads it


def test_a_prefix_is_put_before_every_source(texts: Callable[[str], tuple[Path, Any]]) -> None:
    folder, tokenizer = texts("t5")
    checkpoint = as_in_a_bundle(load_checkpoint(folder, {}, text=TextOptions(prefix="we ate ")))
    assert read_ids(checkpoint, "bread") == tokenizer("we ate bread")["input_ids"]
    folder, tokenizer = texts("marian")
    checkpoint = load_checkpoint(folder, {}, text=TextOptions(prefix=">>fra<< "))
    assert read_ids(checkpoint, "bread") == tokenizer(">>fra<< bread")["input_ids"]
    own = Tokenizers(checkpoint.tokenizers.source, None)
    with pytest.raises(TfexportError, match="--src-vocab replaces"):
        load_checkpoint(folder, {}, tokenizers=own, text=TextOptions(prefix=">>fra<< "))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("marian", TextOptions()),
        ("nllb", TextOptions("deu_Latn", "eng_Latn")),
        ("t5 pieces", TextOptions()),
        ("mbart-50 pieces", TextOptions("de_DE", "en_XX")),
    ],
)
def test_text_through_a_bundle_is_what_the_library_makes_of_it(
    texts: Callable[[str], tuple[Path, Any]], tmp_path: Path, name: str, options: TextOptions
) -> None:
    folder, tokenizer = texts(name)
    export(load_checkpoint(folder, {}, text=options), tmp_path / "bundle", gate=None)
    bundle = open_bundle(tmp_path / "bundle")
    reader, writer = Reader.of(bundle, None), Writer.of(bundle, None)
    assert (reader.format, writer.format) == ("text", "text")
    lines = [text.encode() for text in TEXTS[:5]]
    found = translate(load_runtime("ort-cpu", bundle), reader, lines, SearchOptions(max_length=MAX_NEW))
    model = getattr(transformers, TEXT_MODELS[name][1]).from_pretrained(folder).eval()
    forced = tokenizer.convert_tokens_to_ids(options.target_language) if options.target_language else None
    tokenizer.src_lang = options.source_language
    for text, result in zip(TEXTS, found, strict=False):
        with torch.no_grad():
            (ids,) = model.generate(
                **tokenizer(text, return_tensors="pt"),
                max_new_tokens=MAX_NEW,
                num_beams=1,
                do_sample=False,
                forced_bos_token_id=forced,
            ).tolist()
        assert list(result.hypotheses[0].ids) == ids[1:]
        assert writer.line(result) == " ".join(tokenizer.decode(ids, skip_special_tokens=True).split())


# --- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "umt5"}, "model_type 'umt5'"),
        ({"model_type": ["bart"]}, r"model_type \['bart'\], which is not supported"),
        (
            {"model_type": "blenderbot-small"},
            "'blenderbot-small', which is not supported: its decoder norms",
        ),
        (
            {"architectures": ["MarianForSequenceClassification"]},
            "MarianForSequenceClassification, which generates no text",
        ),
        ({"activation_function": "mish"}, "activation_function 'mish'"),
        ({"activation_function": ["relu"]}, r"activation_function \['relu'\]"),
        ({"decoder_attention_heads": 1}, "encoder_attention_heads 2 and decoder_attention_heads 1"),
        ({"normalize_before": True}, "normalize_before True"),
        ({"pad_token_id": [1, 2]}, r"pad_token_id \[1, 2\]"),
        ({"eos_token_id": [1, "2"]}, r"eos_token_id \[1, '2'\], not a list of ids"),
        ({"bad_words_ids": [[3, "4"]]}, "bad_words_ids .* not a list of lists of ids"),
        ({"d_model": "26"}, "d_model '26'"),
        ({"quantization_config": {"bits": 8}}, "quantization_config"),
        ({"tie_word_embeddings": False}, "no lm_head.weight"),
        ({"encoder_layers": 3}, r"missing: encoder\.layers\.2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = tmp_path / "marian"
    made("marian").save_pretrained(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    kept = {name: value for name, value in generation.items() if name not in settings}
    (folder / "generation_config.json").write_text(json.dumps(kept))
    with pytest.raises(TfexportError, match=message) as caught:
        load_checkpoint(changed(folder, tmp_path, **settings), {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("t5", {"d_kv": 0}, "d_kv 0"),
        ("t5", {"d_model": 0}, "d_model 0"),
        ("t5", {"relative_attention_max_distance": 2}, "max_distance 2, which does not fit"),
        ("t5", {"relative_attention_max_distance": 10**12}, "max_distance 1000000000000"),
        ("marian", {"max_position_embeddings": 10**9}, "max_position_embeddings 1000000000"),
        ("m2m_100", {"max_position_embeddings": -1}, "max_position_embeddings -1"),
        ("m2m_100", {"d_model": 2}, "d_model 2"),
        ("m2m_100", {"pad_token_id": 2**62}, "pad_token_id"),
    ],
)
def test_sizes_that_no_model_has_are_refused(tmp_path: Path, name: str, settings: dict[str, Any], message: str) -> None:
    """Before they ask for memory."""
    made(name).save_pretrained(tmp_path / name)
    (tmp_path / name / "generation_config.json").unlink()
    with pytest.raises(TfexportError, match=message):
        load_checkpoint(changed(tmp_path / name, tmp_path, **settings), {})


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "x" * 300, "a\0b", 5])
def test_shards_lie_in_the_folder(tmp_path: Path, name: object) -> None:
    made("bart").save_pretrained(tmp_path / "bart", max_shard_size="20KB")
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    index = tmp_path / "bart" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = name
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"no weight_map of file names|which is missing"):
        load_checkpoint(tmp_path / "bart", {})


def test_a_model_of_many_languages_is_told_which_to_write(texts: Callable[[str], tuple[Path, Any]]) -> None:
    def told(name: str, **options: str) -> bool:
        notes = load_checkpoint(texts(name)[0], {}, text=TextOptions(**options)).notes
        return any("--tgt-lang" in note for note in notes)

    assert told("nllb")
    assert told("m2m_100")
    assert not told("nllb", target_language="eng_Latn")
    assert not any(map(told, ("marian", "t5", "t5 pieces", "pegasus pieces")))


def test_settings_that_nothing_reads_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "bart"
    made("bart").save_pretrained(folder)
    found = inspect_checkpoint(changed(folder, tmp_path, rope_theta=1e4, num_beams=5), {})
    assert found.problems == ()
    assert any("rope_theta" in note for note in found.notes)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_a_file_is_refused(tmp_path: Path, missing: str) -> None:
    made("bart").save_pretrained(tmp_path / "bart")
    (tmp_path / "bart" / missing).unlink()
    with pytest.raises(TfexportError, match=missing):
        load_checkpoint(tmp_path / "bart", {})


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_weights_in_shards_and_in_pickles_are_the_same(tmp_path: Path, name: str) -> None:
    model = made(name)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    shutil.copytree(tmp_path / "whole", tmp_path / "pickle")
    (tmp_path / "pickle" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    whole = load_checkpoint(tmp_path / "whole", {})
    for other in ("shards", "pickle"):
        assert_same_model(load_checkpoint(tmp_path / other, {}), whole)


def test_languages_are_for_folders_that_have_them(texts: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    folder, _ = texts("m2m_100")
    with pytest.raises(TfexportError, match="no language 'xx'"):
        load_checkpoint(folder, {}, text=TextOptions("xx"))
    folder, _ = texts("t5")
    with pytest.raises(TfexportError, match="no language before or after a source"):
        load_checkpoint(folder, {}, text=TextOptions("<extra_id_0>"))
    made("bart").save_pretrained(tmp_path / "bart")
    with pytest.raises(TfexportError, match=r"no tokenizer\.json"):
        load_checkpoint(tmp_path / "bart", {}, text=TextOptions(prefix="a"))


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_the_output_is_tied_to_the_shared_embedding(tmp_path: Path, name: str) -> None:
    """Where a file has an embedding of a stack beside the shared one; compared with what the library computes."""
    made(name).save_pretrained(tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    prefix = "" if name == "t5" else "model."
    own = torch.randn(weights[f"{prefix}shared.weight"].shape, generator=torch.Generator().manual_seed(1))
    weights.pop("lm_head.weight", None)
    weights[f"{prefix}decoder.embed_tokens.weight"] = own
    save_file(weights, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    theirs = type(made(name)).from_pretrained(tmp_path / "m").eval()
    checkpoint = load_checkpoint(tmp_path / "m", {})
    case = Case(theirs, tmp_path / "m", checkpoint, None, sources_of(theirs, 4))  # type: ignore[arg-type]
    wanted, found = logits_of(case)
    assert (wanted - found).abs().max() < 1e-4
