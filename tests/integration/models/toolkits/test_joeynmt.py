"""JoeyNMT's folders against JoeyNMT itself, and a naive model written from its sources; how their text is split."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from makers.joeynmt_models import (
    BOS,
    EOS,
    HEADS,
    MODELS,
    PAD,
    SPECIALS,
    TARGET,
    UNK,
    config_of,
    random_state,
    write_folder,
)
from makers.paths import DATA
from makers.references.decode import beam as naive_beam
from makers.references.decode import greedy
from makers.references.joeynmt import JoeyNMT
from tests.support.checkpoints import assert_same_model, refused
from tests.support.originals import assert_same_logits, assert_same_searches, expected
from tests.support.text_models import as_in_a_bundle, read_ids, write_pieces
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.decoding.translate import Writer
from tfexport.errors import TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import Checkpoint, inspect_checkpoint, load_checkpoint
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.runtimes import load_runtime
from tfexport.search.search import Hypothesis, SearchOptions, search

LIMIT = 12


@dataclass(frozen=True)
class Case:
    folder: Path
    naive: JoeyNMT
    checkpoint: Checkpoint
    bundle: Bundle

    def found(self, sources: list[list[int]], options: SearchOptions) -> list[list[Hypothesis]]:
        return search(load_runtime("ort-cpu", self.bundle), sources, options)


SEEDS = {"pre": 2, "post": 2, "tied": 2}


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    cases: dict[str, Case] = {}

    def of(name: str) -> Case:
        if name not in cases:
            told, state = MODELS[name], random_state(name, SEEDS[name])
            folder = write_folder(tmp_path_factory.mktemp(name) / "model", config_of(name), state)
            naive = JoeyNMT(
                state, heads=HEADS, norm=told["norm"], activation=told["activation"], scale=told.get("scale", True)
            )
            checkpoint = load_checkpoint(folder, {})
            bundle = export(checkpoint, folder.with_name("bundle"), gate=None).directory
            cases[name] = Case(folder, naive, checkpoint, open_bundle(bundle))
        return cases[name]

    return of


def sources_of(count: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [[*random.integers(4, TARGET, length).tolist(), EOS] for length in random.integers(1, 15, count)]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_naive_model(case_of: Callable[[str], Case], name: str) -> None:
    case = case_of(name)
    model = case.checkpoint.build_model()
    random = np.random.default_rng(1)
    for source in sources_of(6):
        ids, target = torch.tensor([source]), torch.tensor([[BOS, *random.integers(0, TARGET, 10)]])
        with torch.no_grad():
            found = model(ids, torch.tensor([len(source)]), target)
        wanted = case.naive(ids, target)
        assert (wanted - found).abs().max() < 1e-4
        assert wanted[..., 4:].std() > 0.3


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_naive_model(case_of: Callable[[str], Case], name: str) -> None:
    case, sources = case_of(name), sources_of(12)
    model: Any = case.naive
    found = [list(hypotheses[0].ids) for hypotheses in case.found(sources, SearchOptions(max_length=LIMIT))]
    assert found == [greedy(model, source, bos=BOS, eos=EOS, max_length=LIMIT) for source in sources]
    assert len({tuple(row) for row in found}) > 3
    options = SearchOptions(beam=4, nbest=4, max_length=LIMIT, length_penalty=1.0)
    for source, hypotheses in zip(sources[:4], case.found(sources[:4], options), strict=True):
        wanted = naive_beam(model, source, bos=BOS, eos=EOS, max_length=LIMIT, beam=4, length_penalty=1.0)
        assert [list(h.ids) for h in hypotheses] == [ids for ids, _ in wanted]
        assert [h.score for h in hypotheses] == pytest.approx([score for _, score in wanted], abs=1e-4)


def test_logits_and_searches_are_joeynmt_s_own(tmp_path: Path) -> None:
    checkpoint, wanted = load_checkpoint(DATA / "joeynmt" / "model", {}), expected("joeynmt")["model"]
    assert_same_logits(checkpoint, wanted)
    assert_same_searches(checkpoint, wanted, tmp_path / "bundle", "joeynmt", 11)
    fewer = [len(hypotheses) < search["nbest"] for search in wanted["found"] for hypotheses in search["hypotheses"]]
    assert sum(fewer) > 10  # sentences that are done with fewer outputs than the beam is wide


def test_what_is_tied_and_what_is_never_generated(case_of: Callable[[str], Case]) -> None:
    configs = {name: case_of(name).checkpoint.config for name in MODELS}
    assert {name: (c.tie_source_target, c.tie_output) for name, c in configs.items()} == {
        name: told["tied"] for name, told in MODELS.items()
    }
    assert {config.suppressed_ids for config in configs.values()} == {(PAD, BOS)}
    assert "beam_size 5, beam_alpha 1.0" in case_of("pre").checkpoint.notes[0]


# --- text


def with_text(folder: Path, words: list[str], **data: Any) -> Checkpoint:
    """A random model whose vocabularies are `words`, with these settings of its text on both sides."""
    config, state = config_of("tied"), random_state("tied", 1)
    for side in ("src", "trg"):
        config["data"][side] |= data
    config["data"]["special_symbols"] = data.pop("special_symbols", {})
    write_folder(folder, config, state)
    for side in ("src", "trg"):
        (folder / f"{side}_vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return as_in_a_bundle(load_checkpoint(folder, {}))


def both_ways(checkpoint: Checkpoint, text: str) -> tuple[list[int], str]:
    ids = read_ids(checkpoint, text)
    return ids, Writer(checkpoint.config, checkpoint.tokenizers.target, "text").text(ids)


def test_words(tmp_path: Path) -> None:
    words = [*SPECIALS, "the", "cat"]
    assert both_ways(with_text(tmp_path / "a", words), "the cat The")[0] == [4, 5, UNK, EOS]
    assert both_ways(with_text(tmp_path / "b", words, lowercase=True), "The cat")[0] == [4, 5, EOS]
    assert both_ways(with_text(tmp_path / "s", words), "the  cat\u00a0The")[0] == [4, UNK, UNK, EOS]
    # A vocabulary of one's own has no special tokens: JoeyNMT puts them first.
    assert both_ways(with_text(tmp_path / "c", ["the", "cat", "the"]), "cat the") == ([5, 4, EOS], "cat the")


def test_characters(tmp_path: Path) -> None:
    checkpoint = with_text(tmp_path / "m", [*SPECIALS, "▁", *"abcä"], level="char")
    assert both_ways(checkpoint, "ab äc") == ([5, 6, 4, 8, 7, EOS], "ab äc")
    assert both_ways(checkpoint, "a☃")[0] == [5, UNK, EOS]


def test_pieces(tmp_path: Path) -> None:
    pieces = write_pieces(tmp_path / "spm.model")
    words = [*SPECIALS, *(pieces.id_to_piece(index) for index in range(3, pieces.get_piece_size()))]
    settings = {"level": "bpe", "tokenizer_type": "sentencepiece", "tokenizer_cfg": {"model_file": "data/spm.model"}}
    folder = tmp_path / "m"
    assert any("SentencePiece model could not be found" in note for note in with_text(folder, words, **settings).notes)
    (tmp_path / "spm.model").rename(folder / "spm.model")
    checkpoint = as_in_a_bundle(load_checkpoint(folder, {}))
    for text in ("the cat sat on a mat", "über die straße"):
        wanted = [words.index(piece) if piece in words else UNK for piece in pieces.encode(text, out_type=str)]
        assert both_ways(checkpoint, text) == ([*wanted, EOS], text)
    # JoeyNMT would not use pieces that the vocabulary lacks.
    (folder / "src_vocab.txt").write_text("\n".join(words[:-1]) + "\n", encoding="utf-8")
    assert any("could not be found or used" in note for note in load_checkpoint(folder, {}).notes)


def test_codes(tmp_path: Path) -> None:
    """The vocabulary lacks `the`, which is split again."""
    pytest.importorskip("subword_nmt")
    words = [*SPECIALS, "th@@", "e", "c@@", "at"]
    settings = {"level": "bpe", "tokenizer_type": "subword-nmt", "tokenizer_cfg": {"codes": "data/codes.txt"}}
    folder = tmp_path / "m"
    with_text(folder, words, **settings)
    (folder / "codes.txt").write_text("#version: 0.2\nt h\nth e</w>\na t</w>\n")
    assert both_ways(as_in_a_bundle(load_checkpoint(folder, {})), "the cat") == ([4, 5, 6, 7, EOS], "the cat")


def test_version_1(tmp_path: Path) -> None:
    """Settings of both sides together, text that was split before, and norms before sublayers without a word of it."""
    config, state = config_of("pre"), random_state("pre", 1)
    for side in ("encoder", "decoder"):
        for name in ("layer_norm", "activation"):
            del config["model"][side][name]
    config["data"] = {"src": "de", "trg": "en", "level": "bpe", "lowercase": False}
    checkpoint = load_checkpoint(write_folder(tmp_path / "m", config, state), {})
    assert_same_model(checkpoint, load_checkpoint(write_folder(tmp_path / "n", config_of("pre"), state), {}))
    assert both_ways(checkpoint, "s7 \t s9")[0] == [7, 9, EOS]


def test_special_symbols(tmp_path: Path) -> None:
    names = {"pad_token": "[PAD]", "pad_id": 1, "unk_token": "[UNK]", "unk_id": 0, "sep_token": "<sep>", "sep_id": 4}
    symbols = {**names, "lang_tags": ["<de>", "<en>"]}
    words = ["[UNK]", "[PAD]", "<s>", "</s>", "<sep>", "<de>", "<en>", "cat"]
    checkpoint = with_text(tmp_path / "m", words, special_symbols=symbols)
    config = checkpoint.config
    assert (config.pad_id, config.unk_id, config.bos_id, config.eos_id) == (1, 0, 2, 3)
    assert config.suppressed_ids == (1, 2, 4, 5, 6)
    assert both_ways(checkpoint, "cat dog")[0] == [7, 0, 3]
    wrong = tmp_path / "wrong"
    config_ = config_of("tied")
    config_["data"]["special_symbols"] = {"eos_id": 7}
    assert "has eos_id 7" in refused(load_checkpoint, write_folder(wrong, config_, random_state("tied", 1)), {})


def test_what_is_not_done_with_text_is_told(tmp_path: Path) -> None:
    settings = {"normalize": True, "tokenizer_cfg": {"pretokenizer": "moses"}}
    notes = " ".join(with_text(tmp_path / "m", [*SPECIALS, "a"], **settings).notes)
    assert "normalise it before" in notes
    assert "split by moses" in notes


def test_without_vocabularies_ids_are_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_of("pre"), random_state("pre", 1))
    (folder / "trg_vocab.txt").unlink()
    checkpoint = load_checkpoint(folder, {})
    assert checkpoint.tokenizers.source is None
    assert "no src_vocab.txt and trg_vocab.txt" in checkpoint.notes[0]
    assert (checkpoint.config.unk_id, checkpoint.config.eos_id) == (UNK, EOS)
    assert "--prefix" in refused(load_checkpoint, folder, {}, text=TextOptions(prefix="a"))


def test_vocabularies_that_were_cut_are_told(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_of("pre"), random_state("pre", 1))
    (folder / "src_vocab.txt").write_text("".join((folder / "src_vocab.txt").read_text().splitlines(True)[:10]))
    assert "the source vocabulary has 10 words, the model's embedding 53 rows" in load_checkpoint(folder, {}).notes


# --- what is refused


@pytest.mark.parametrize(
    ("side", "settings", "message"),
    [
        ("encoder", {"type": "recurrent"}, "type 'recurrent'"),
        ("decoder", {"alpha": 2.0}, "alpha 2.0"),
        ("decoder", {"activation": "tanh"}, "activation 'tanh'"),
        ("decoder", {"activation": "gelu"}, "activation 'relu' for the encoder and 'gelu' for the decoder"),
        ("decoder", {"layer_norm": "post"}, "layer_norm 'pre' for the encoder and 'post' for the decoder"),
        ("decoder", {"num_heads": 4}, "num_heads 3 for the encoder and 4 for the decoder"),
        ("decoder", {"embeddings": {"scale": False}}, "scale of embeddings True for the encoder and False"),
        ("encoder", {"num_layers": 4}, r"missing: encoder\.layers\.3\."),
        ("encoder", {"hidden_size": "24"}, "hidden_size '24'"),
        ("encoder", {"embeddings": 3}, "config.yaml, model, encoder has embeddings 3"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, side: str, settings: dict[str, Any], message: str
) -> None:
    config = copy.deepcopy(config_of("pre"))
    config["model"][side] |= settings
    folder = write_folder(tmp_path / "m", config, random_state("pre", 1))
    with pytest.raises(TfexportError, match=message) as caught:
        load_checkpoint(folder, {})
    assert "\n" not in str(caught.value)


def test_settings_that_nothing_reads_are_told(tmp_path: Path) -> None:
    config = config_of("pre")
    config["model"]["encoder"]["rotary"] = True
    found = inspect_checkpoint(write_folder(tmp_path / "m", config, random_state("pre", 1)), {})
    assert found.problems == ()
    assert any("rotary" in note for note in found.notes)


def test_a_folder_without_its_configuration_is_told(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_of("pre"), random_state("pre", 1))
    (folder / "config.yaml").unlink()
    for path in (folder, folder / "100.ckpt"):
        message = refused(load_checkpoint, path, {})
        assert "JoeyNMT" in message
        assert "config.yaml" in message


def test_which_checkpoint_of_a_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_of("pre"), random_state("pre", 1))
    first = load_checkpoint(folder, {})
    assert_same_model(load_checkpoint(folder / "100.ckpt", {}), first)
    other = write_folder(tmp_path / "other", config_of("pre"), random_state("pre", 2)) / "100.ckpt"
    other.rename(folder / "2000.ckpt")
    assert not torch.equal(load_checkpoint(folder, {}).weights["output_weight"], first.weights["output_weight"])
    (folder / "best.ckpt").symlink_to("100.ckpt")
    assert_same_model(load_checkpoint(folder, {}), first)


@pytest.mark.parametrize("content", [{}, {"model_state": 3}, {"model_state": {"a": 3}}, {"model_state": {}}, [1]])
def test_a_file_that_joeynmt_did_not_save_is_refused(tmp_path: Path, content: Any) -> None:
    folder = write_folder(tmp_path / "m", config_of("pre"), random_state("pre", 1))
    torch.save(content, folder / "100.ckpt")
    assert "100.ckpt has no" in refused(load_checkpoint, folder, {})
    (folder / "100.ckpt").write_bytes(b"PK\x03\x04 not a checkpoint")
    assert "100.ckpt cannot be read" in refused(load_checkpoint, folder, {})
