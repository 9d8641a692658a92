"""Marian's own files: against a naive model written from Marian's sources, and against CTranslate2, which reads them too."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from makers.marian_models import (
    MODELS,
    D,
    options_of,
    random_arrays,
    words_of,
    write_folder,
    write_model,
)
from makers.references.decode import beam as naive_beam
from makers.references.decode import greedy
from makers.references.marian import Marian, sinusoids
from makers.tiny import randomised
from tests.support.checkpoints import refused
from tests.support.text_models import as_in_a_bundle, read_ids, write_pieces
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.decoding.translate import Writer
from tfexport.errors import TfexportError, TokenizerError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import Checkpoint, inspect_checkpoint, load_checkpoint
from tfexport.models.formats.native import Tokenizers
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.runtimes import load_runtime
from tfexport.search.search import Hypothesis, SearchOptions, search
from tfexport.text.tokenizers import word_tokenizer
from tfexport.text.vocabularies import read_vocabulary, vocabulary_words

EOS, UNK, LIMIT = 0, 1, 12
RANDOM: dict[str, dict[str, Any]] = {
    "post-norm": {"seed": 5, "end": 3.0},
    "pre-norm": {"seed": 4, "end": 1.5},
    "gelu": {"seed": 6, "end": 3.0},
    "old": {"seed": 6, "end": 1.5},
    "tied-layers": {"seed": 8, "end": 3.0},
    "trained-positions": {"seed": 4, "end": 1.5},
}
"""Models that say different things of different sentences, and end some of them."""


@dataclass(frozen=True)
class Case:
    """A random model of Marian, the naive model of its arrays, and what became of it."""

    name: str
    folder: Path
    naive: Marian
    checkpoint: Checkpoint
    bundle: Bundle

    def found(self, sources: list[list[int]], options: SearchOptions) -> list[list[Hypothesis]]:
        return search(load_runtime("ort-cpu", self.bundle), sources, options)


def sources_of(count: int, size: int = 41) -> list[list[int]]:
    """Sentences of all lengths that end in eos."""
    random = np.random.default_rng(7)
    return [[*random.integers(2, size, length).tolist(), EOS] for length in random.integers(1, 15, count)]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    cases: dict[str, Case] = {}

    def of(name: str) -> Case:
        if name not in cases:
            arrays, options = random_arrays(name, **RANDOM[name]), options_of(name)
            folder = write_folder(tmp_path_factory.mktemp(name) / "model", arrays, options)
            checkpoint = load_checkpoint(folder, {})
            bundle = export(checkpoint, folder.with_name("bundle"), gate=None).directory
            cases[name] = Case(name, folder, Marian(arrays, options), checkpoint, open_bundle(bundle))
        return cases[name]

    return of


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_naive_model(case_of: Callable[[str], Case], name: str) -> None:
    case = case_of(name)
    config = case.checkpoint.config
    model = case.checkpoint.build_model()
    random = np.random.default_rng(1)
    for source in sources_of(6):
        target = torch.tensor([[config.bos_id, *random.integers(0, config.tgt_vocab_size - 1, 10)]])
        ids = torch.tensor([source])
        with torch.no_grad():
            found = model(ids, torch.tensor([len(source)]), target)
        wanted = case.naive(ids, target)
        assert (wanted - found[..., :-1]).abs().max() < 1e-4
        assert wanted.std() > 0.3
        # The token that Marian does not have takes nothing from the others.
        probabilities = (wanted.log_softmax(-1) - found.log_softmax(-1)[..., :-1]).abs()
        assert probabilities.max() < 1e-4


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_naive_model(case_of: Callable[[str], Case], name: str) -> None:
    case = case_of(name)
    sources = sources_of(12)
    model: Any = lambda ids, prefix: case.naive(ids, prefix)  # noqa: E731
    found = [list(hypotheses[0].ids) for hypotheses in case.found(sources, SearchOptions(max_length=LIMIT))]
    bos = case.checkpoint.config.bos_id
    assert found == [greedy(model, source, bos=bos, eos=EOS, max_length=LIMIT) for source in sources]
    assert len({tuple(row) for row in found}) > 3
    options = SearchOptions(beam=4, nbest=4, max_length=LIMIT, length_penalty=0.6)
    for source, hypotheses in zip(sources[:4], case.found(sources[:4], options), strict=True):
        wanted = naive_beam(model, source, bos=bos, eos=EOS, max_length=LIMIT, beam=4, length_penalty=0.6)
        assert [list(h.ids) for h in hypotheses] == [ids for ids, _ in wanted]
        assert [h.score for h in hypotheses] == pytest.approx([score for _, score in wanted], abs=1e-4)


def test_the_sinusoids_are_marian_s_in_every_row(case_of: Callable[[str], Case]) -> None:
    table = case_of("post-norm").checkpoint.weights["encoder.positions.table"]
    assert table.shape == (1000, D)
    assert np.abs(table.numpy() - sinusoids(1000, D)).max() < 1e-4  # Marian's angles are of float32


def translated(case: Case, tmp_path: Path, sources: list[list[int]], options: SearchOptions) -> list[Any]:
    """What CTranslate2 finds, as ids without eos, and the scores.

    Its converter has the sinusoids of the paper, not Marian's: it gets Marian's as a table of positions, which it scales
    embeddings with as without one.
    """
    converters = pytest.importorskip("ctranslate2.converters")
    import ctranslate2

    settings = options_of(case.name)
    arrays = {**random_arrays(case.name, **RANDOM[case.name]), "Wpos": sinusoids(100, D).astype(np.float32)}
    model = write_model(tmp_path / "model.npz", arrays, settings)
    vocabularies = [str(case.folder / f"vocab.{side}.yml") for side in ("src", "tgt")]
    converters.MarianConverter(str(model), vocabularies).convert(str(tmp_path / "ct2"))
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), compute_type="float32", intra_threads=1)
    words, targets = list(words_of(settings["dim-vocabs"][0], "s")), words_of(settings["dim-vocabs"][1], "t")
    results = translator.translate_batch(
        [[words[index] for index in source[:-1]] for source in sources],
        beam_size=options.beam,
        num_hypotheses=options.nbest,
        length_penalty=options.length_penalty,
        max_decoding_length=options.max_length,
        max_input_length=0,
        return_scores=True,
    )
    return [
        [(tuple(targets[token] for token in h), score) for h, score in zip(r.hypotheses, r.scores, strict=True)]
        for r in results
    ]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("name", ["post-norm", "pre-norm", "gelu", "old"])
def test_ctranslate2_reads_the_same_from_the_same_file(
    case_of: Callable[[str], Case], tmp_path: Path, name: str, beam: int
) -> None:
    case, sources = case_of(name), sources_of(50)
    options = SearchOptions.for_profile("opennmt", beam=beam, nbest=beam, max_length=LIMIT)
    wanted = translated(case, tmp_path, sources, options)
    found = case.found(sources, options)
    for hypotheses, theirs in zip(found, wanted, strict=True):
        assert [h.ids[:-1] if h.finished else h.ids for h in hypotheses] == [ids for ids, _ in theirs]
        assert [h.score for h in hypotheses] == pytest.approx([score for _, score in theirs], abs=1e-3)
    assert 0.2 < np.mean([h.finished for hypotheses in found for h in hypotheses]) < 1.0
    assert len({tuple(h.ids for h in hypotheses) for hypotheses in found}) > 5


@pytest.fixture(scope="module")
def hugging_face_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A random MarianMT in a folder of the transformers library, and its tokens by id.

    As in Marian, padding is zeros that the decoder begins with, and no token: its logit takes nothing from the others.
    """
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("marianmt")
    pieces = write_pieces(folder / "source.spm")
    write_pieces(folder / "target.spm")
    known = [pieces.id_to_piece(index) for index in range(3, pieces.get_piece_size())]
    tokens = ["</s>", "<unk>", *known, "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    files = [str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")]
    transformers.MarianTokenizer(*files).save_pretrained(folder)
    pad = len(tokens) - 1
    config = transformers.MarianConfig(
        vocab_size=len(tokens),
        d_model=26,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=52,
        decoder_ffn_dim=52,
        max_position_embeddings=40,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=pad,
        eos_token_id=EOS,
        decoder_start_token_id=pad,
        bad_words_ids=[[pad]],
    )
    torch.manual_seed(3)
    model = randomised(transformers.MarianMTModel(config), seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn" in name and name.endswith("proj.weight"):
                parameter *= 3.0
        model.model.shared.weight[pad] = 0.0
        model.final_logits_bias.normal_(std=0.3)
        model.final_logits_bias[0, [EOS, pad]] = torch.tensor([2.0, -100.0])
    model.save_pretrained(folder)
    return folder, tokens


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("beam", [1, 4])
def test_ctranslate2_reads_the_same_from_the_same_folder(
    hugging_face_folder: tuple[Path, list[str]], tmp_path: Path, beam: int
) -> None:
    converters = pytest.importorskip("ctranslate2.converters")
    import ctranslate2

    folder, tokens = hugging_face_folder
    converters.TransformersConverter(str(folder)).convert(str(tmp_path / "ct2"))
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), compute_type="float32", intra_threads=1)
    sources = sources_of(200, len(tokens) - 1)
    options = SearchOptions.for_profile("opennmt", beam=beam, nbest=beam, max_length=LIMIT)
    results = translator.translate_batch(
        [[tokens[index] for index in source] for source in sources],
        beam_size=beam,
        num_hypotheses=beam,
        length_penalty=options.length_penalty,
        max_decoding_length=LIMIT,
        max_input_length=0,
        return_scores=True,
    )
    bundle = open_bundle(export(load_checkpoint(folder, {}), tmp_path / "bundle", gate=None).directory)
    found = search(load_runtime("ort-cpu", bundle), sources, options)
    ties = 0  # sentences
    for hypotheses, result in zip(found, results, strict=True):
        ours = [[tokens[index] for index in (h.ids[:-1] if h.finished else h.ids)] for h in hypotheses]
        assert [h.score for h in hypotheses] == pytest.approx(result.scores, abs=1e-3)
        # This model repeats itself, so that hypotheses compete whose scores differ in their last bits alone. Which one is
        # kept depends on the order in which a CPU adds, and one that was let go may have ended 1e-5 ahead.
        others = [index for index, (one, other) in enumerate(zip(ours, result.hypotheses, strict=True)) if one != other]
        for index in others:
            assert hypotheses[index].score == pytest.approx(result.scores[index], abs=2e-5)
        ties += bool(others)
    assert ties <= 4
    assert len({tuple(h.ids for h in hypotheses) for hypotheses in found}) > 8
    assert 0.2 < np.mean([h.finished for hypotheses in found for h in hypotheses]) < 1.0


# --- text


def texts() -> list[str]:
    return ["the cat sat on a mat", "über die straße", "cat", "a snow☃man, 12 dogs", "the  cat   ran", "Ünïcode ﬁ"]


@pytest.fixture(scope="module")
def with_pieces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with one SentencePiece model for both sides, as Marian trains them, and the model's processor."""
    folder = tmp_path_factory.mktemp("pieces")
    pieces = write_pieces(folder / "vocab.spm", bos_id=-1, eos_id=0, unk_id=1)
    arrays, options = random_arrays("post-norm", 1), options_of("post-norm")
    size = pieces.get_piece_size()
    arrays["Wemb"], arrays["decoder_ff_logit_out_b"] = arrays["Wemb"][:size], arrays["decoder_ff_logit_out_b"][:, :size]
    write_model(folder / "model.npz", arrays, {**options, "dim-vocabs": [size, size]})
    return folder, pieces


def test_pieces_have_their_own_ids(with_pieces: tuple[Path, Any]) -> None:
    folder, pieces = with_pieces
    checkpoint = as_in_a_bundle(load_checkpoint(folder, {}))
    writer = Writer(checkpoint.config, checkpoint.tokenizers.target, "text")
    for text in texts():
        wanted = [*pieces.encode(text), EOS]
        assert read_ids(checkpoint, text) == wanted
        assert writer.text(wanted) == " ".join(pieces.decode(wanted[:-1]).split())
    given = load_checkpoint(
        folder / "model.npz", {}, tokenizers=Tokenizers(*[read_vocabulary(folder / "vocab.spm")] * 2)
    )
    assert read_ids(given, texts()[0]) == read_ids(checkpoint, texts()[0])


def test_pieces_with_the_ids_of_a_list_of_words(tmp_path: Path) -> None:
    """As OPUS-MT has it: two SentencePiece models, one list, and a language before the text."""
    source, target = (write_pieces(tmp_path / f"{side}.spm") for side in ("source", "target"))
    known = [source.id_to_piece(index) for index in range(3, source.get_piece_size())]
    words = ["</s>", "<unk>", *known, ">>fra<<"]
    lines = "".join(f"{json.dumps(word)}: {index}\n" for index, word in enumerate(words))
    (tmp_path / "opus.vocab.yml").write_text(lines, encoding="utf-8")
    (tmp_path / "decoder.yml").write_text(
        "relative-paths: true\nmodels: [opus.npz]\nvocabs: [opus.vocab.yml, opus.vocab.yml]\nbeam-size: 6\nnormalize: 1\n"
    )
    write_model(tmp_path / "opus.npz", random_arrays("post-norm", 1), options_of("post-norm"))
    checkpoint = as_in_a_bundle(load_checkpoint(tmp_path, {}, text=TextOptions(prefix=">>fra<< ")))
    for text in texts():
        pieces = [words.index(piece) if piece in words else UNK for piece in source.encode(text, out_type=str)]
        assert read_ids(checkpoint, text) == [words.index(">>fra<<"), *pieces, EOS]
    text = target.decode(target.encode(texts()[0], out_type=str))
    ids = [words.index(piece) for piece in target.encode(texts()[0], out_type=str)]
    assert Writer(checkpoint.config, checkpoint.tokenizers.target, "text").text([*ids, EOS]) == text
    assert any("beam-size 6, normalize 1" in note for note in load_checkpoint(tmp_path, {}).notes)


def test_words_are_those_of_the_vocabularies_that_the_decoder_s_settings_name(case_of: Callable[[str], Case]) -> None:
    checkpoint = as_in_a_bundle(case_of("pre-norm").checkpoint)
    assert read_ids(checkpoint, "s7 s9  s52 t3") == [7, 9, 52, UNK, EOS]
    assert Writer(checkpoint.config, checkpoint.tokenizers.target, "text").text([40, 2, EOS]) == "t40 t2"
    assert "beam-size 6" in checkpoint.notes[0]


WORDS = {
    "</s>": 0,
    "<unk>": 1,
    "no": 2,
    "1": 3,
    "~": 4,
    '"': 5,
    "<<": 6,
    "\x01": 7,
    "\u2028": 8,
    "'": 9,
    "😀": 10,
    "a b": 11,
}


def test_a_vocabulary_in_yaml_is_of_words_whatever_they_spell(tmp_path: Path) -> None:
    path = tmp_path / "vocab.yml"
    path.write_text(
        '"</s>": 0\n<unk>: 1\nno: 2\n1: 3\n~: 4\n"\\"": 5\n<<: 6\n"\\x01": 7\n\u2028: 8\n'
        "'''': 9\n\"😀\": 10\n? a b\n: 11\n",
        encoding="utf-8",
    )
    assert vocabulary_words(path) == WORDS
    for content, message in (
        ("a: 0\na: 1\n", "'a' twice"),
        ("a: 0\nb: 0\n", "an id twice"),
        ("a: x\n", "'x' is not an id"),
        ("a: [0]\n", "more than words"),
        ("a: &x 0\nb: *x\n", "more than words"),
        ("[" * 100_000, "more than words"),
        ("a: 0: 1", "line 1"),
        ("", "no words"),
    ):
        path.write_text(content)
        with pytest.raises(TokenizerError, match=message) as caught:
            vocabulary_words(path)
        assert "\n" not in str(caught.value)


def test_without_vocabularies_the_ids_are_marian_s(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.npz", random_arrays("post-norm", 1), options_of("post-norm"))
    checkpoint = load_checkpoint(path, {})
    assert (checkpoint.config.eos_id, checkpoint.config.unk_id, checkpoint.config.bos_id) == (EOS, UNK, 53)
    assert "no vocabularies" in checkpoint.notes[0]
    assert checkpoint.config.suppressed_ids == (53,)


def test_without_vocabularies_the_user_knows_the_ids(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.npz", random_arrays("post-norm", 1), options_of("post-norm"))
    assert load_checkpoint(path, {"eos_id": 5, "pad_id": 5}).config.eos_id == 5
    with pytest.raises(TfexportError, match="n_heads is"):
        load_checkpoint(path, {"n_heads": 1})
    words = word_tokenizer({"</s>": 0, "<unk>": 1, "a": 2})
    notes = load_checkpoint(path, {}, tokenizers=Tokenizers(words, words)).notes
    assert not any("no vocabularies" in note for note in notes)


def test_vocabularies_of_other_sizes_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, random_arrays("gelu", 1), options_of("gelu"))
    source, target = (folder / f"vocab.{side}.yml" for side in ("src", "tgt"))
    contents = source.read_text(), target.read_text()
    assert not any("vocab" in note and "rows" in note for note in load_checkpoint(folder, {}).notes)
    target.write_text("".join(contents[1].splitlines(True)[:10]))
    assert any(note.startswith("the target vocabulary has 10 words") for note in load_checkpoint(folder, {}).notes)
    source.write_text(contents[1])
    target.write_text(contents[0])
    notes = " ".join(load_checkpoint(folder, {}).notes)
    assert "are unknown" in notes
    assert "the source vocabulary has" in notes


# --- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "s2s"}, "type 's2s'"),
        ({"transformer-decoder-autoreg": "rnn"}, "transformer-decoder-autoreg 'rnn'"),
        ({"transformer-decoder-autoreg": "average-attention"}, "average-attention"),
        ({"transformer-no-projection": True}, "transformer-no-projection True"),
        ({"transformer-ffn-depth": 3}, "transformer-ffn-depth 3"),
        ({"transformer-decoder-dim-ffn": 99}, "transformer-decoder-dim-ffn 99"),
        ({"transformer-ffn-activation": "tanh"}, "transformer-ffn-activation 'tanh'"),
        ({"transformer-preprocess": "n"}, "transformer-preprocess 'n' and transformer-postprocess 'an'"),
        ({"transformer-postprocess": "dhn"}, "transformer-postprocess 'hn'"),
        ({"transformer-postprocess-top": "an"}, "transformer-postprocess-top 'an'"),
        ({"transformer-tied-layers": [1, 9, 1]}, "transformer-tied-layers"),
        ({"lemma-dim-emb": 8}, "lemma-dim-emb 8"),
        ({"right-left": True}, "right-left True"),
        ({"input-types": ["class", "sequence"]}, "input-types"),
        ({"dim-vocabs": [9, 9, 9]}, "several encoders"),
        ({"enc-depth": 10**9}, "enc-depth"),
        ({"enc-depth": 3}, r"missing: encoder_l3_"),
        ({"dim-emb": "24"}, "dim-emb '24'"),
        ({"tied-embeddings-all": False}, "has no encoder_Wemb"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    path = write_model(tmp_path / "model.npz", random_arrays("post-norm", 1), {**options_of("post-norm"), **settings})
    with pytest.raises(TfexportError, match=message) as caught:
        load_checkpoint(path, {})
    assert "\n" not in str(caught.value)


def test_settings_that_nothing_reads_are_told(tmp_path: Path) -> None:
    options = {**options_of("post-norm"), "transformer-alibi": True}
    found = inspect_checkpoint(write_model(tmp_path / "model.npz", random_arrays("post-norm", 1), options), {})
    assert found.problems == ()
    assert any("transformer-alibi" in note for note in found.notes)


def test_positions_are_trained_where_file_and_settings_say_so(tmp_path: Path) -> None:
    arrays, options = random_arrays("trained-positions", 1), options_of("trained-positions")
    told = "transformer-train-position-embeddings"
    path = write_model(tmp_path / "model.npz", arrays, {**options, told: False})
    assert f"has {told} false" in refused(load_checkpoint, path, {})
    table = arrays.pop("Wpos")
    write_model(path, arrays, options)
    checkpoint = load_checkpoint(path, {})
    assert checkpoint.config.positions == "stored"
    assert any("no Wpos" in note for note in checkpoint.notes)
    write_model(path, {**arrays, "Wpos": table}, {**options, told: False, "transformer-train-positions": True})
    assert load_checkpoint(path, {}).config.positions == "learned"


def test_which_model_of_a_folder(tmp_path: Path) -> None:
    arrays, options = random_arrays("post-norm", 1), options_of("post-norm")
    for name in ("model.best-bleu.npz", "model.iter1000.npz", "model.npz.optimizer.npz"):
        write_model(tmp_path / name, arrays, options)
    assert "model.best-bleu.npz, model.iter1000.npz. Give the path" in refused(load_checkpoint, tmp_path, {})
    write_model(tmp_path / "model.npz", arrays, options)
    load_checkpoint(tmp_path, {})
    (tmp_path / "decoder.yml").write_text("models: [model.npz, model.best-bleu.npz]\n")
    assert "an ensemble" in refused(load_checkpoint, tmp_path, {})
    assert "knows no languages" in refused(load_checkpoint, tmp_path / "model.npz", {}, text=TextOptions("de"))


def archive(*members: tuple[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in members:
            file.writestr(name, content)
    return buffer.getvalue()


def header(shape: str, descr: str = "'<f4'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a zip", "cannot be read as an .npz"),
        (archive(("a.npy", header("(10000000000,)") + b"\0" * 8)), "header of a.npy does not fit"),
        (archive(("a.npy", header("(-2, -1)") + b"\0" * 8)), "does not fit"),
        (archive(("a.npy", header("(1,)", "'|O'") + b"\0" * 8)), "does not fit"),
        (archive(("a.npy", header("(5000000,)") + b"\0" * 20_000_000)), "4 times as large"),
        (archive(("a.npy", header("(2,)") + b"\0" * 8)), "no special:model.yml"),
        (archive(("a.npy", header("(2,)") + b"\0" * 8), compression=zipfile.ZIP_LZMA), "packed in a way"),
        (archive(("special:model.yml.npy", header("(4,)", "'|i1'") + b"- a\0")), "not a mapping"),
        (archive(("special:model.yml.npy", header("(16,)", "'|i1'") + b"a: &x 1\nb: *x \n\0")), "aliases"),
        (archive(("special:model.yml.npy", header("(20,)", "'|i1'") + b"!!python/name:os.x 1")), "cannot read"),
    ],
)
def test_a_damaged_or_hostile_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.npz"
    path.write_bytes(content)
    assert message in refused(load_checkpoint, path, {})


def test_weights_in_integers_are_refused(tmp_path: Path) -> None:
    arrays = random_arrays("post-norm", 1)
    arrays["encoder_l1_self_Wq"] = arrays["encoder_l1_self_Wq"].astype(np.int8)
    path = write_model(tmp_path / "model.npz", arrays, options_of("post-norm"))
    assert "encoder_l1_self_Wq as int8" in refused(load_checkpoint, path, {})
