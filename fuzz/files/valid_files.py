"""Valid files of every kind, and the readers that they and their mutations are given to."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.files import valid_folders
from fuzz.files.target import Target

WORDS = ["<unk>", "<pad>", "<sos>", "<eos>", *(f"word{index}" for index in range(27))]
PAIR = np.array([[4, 5, 6], [7, 8, 1]]), np.array([3, 2])
"""Two sources and their lengths."""


def prepare(folder: Path) -> None:
    """Write the valid files to `folder`, which `readers` then finds there."""
    import torch

    from makers.ort_bundles import CONFIG, random_model, write_bundle
    from makers.tiny import tiny_transformer
    from makers.torch_models import made
    from tfexport.bundle.reader import open_bundle
    from tfexport.config import ModelConfig
    from tfexport.exporter.pipeline import export
    from tfexport.models.checkpoints.load import load_checkpoint
    from tfexport.models.formats import native
    from tfexport.models.transformer import Transformer
    from tfexport.text.vocabularies import read_vocabulary
    from tfexport.verification.certificates import certify, write_certificates

    vocabulary = folder / "words.json"
    vocabulary.write_text(json.dumps(WORDS), encoding="utf-8")
    config = ModelConfig(
        d_model=16,
        n_heads=2,
        d_ff=24,
        n_encoder_layers=1,
        n_decoder_layers=1,
        src_vocab_size=len(WORDS),
        tgt_vocab_size=len(WORDS),
        max_source_length=20,
        max_target_length=20,
        unk_id=0,
        pad_id=1,
        bos_id=2,
        eos_id=3,
    )
    torch.manual_seed(0)
    tokenizers = native.Tokenizers(read_vocabulary(vocabulary), read_vocabulary(vocabulary))
    safetensors = folder / "model.safetensors"
    native.save(safetensors, Transformer(config).state_dict(), config, tokenizers, torch.float32)
    weights = tiny_transformer().state_dict()
    torch.save(weights, folder / "model.pt")
    torch.save({"model_state_dict": weights, "epoch": 3, "args": {"heads": 2}}, folder / "nested.pt")
    torch.save(weights, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(made("tutorial").state_dict(), folder / "torch.pt")
    exported = open_bundle(export(load_checkpoint(safetensors, {}), folder / "bundle", precisions=("int8",)).directory)
    stamp = certify(exported, "ort-cpu", "float32", [{"beam": 1}], {"sentences": 3}, "bundle")
    write_certificates(exported, [stamp]).replace(folder / "certificates.json")
    larger = CONFIG.replace(
        d_model=64, n_heads=4, d_ff=128, tgt_vocab_size=311
    )  # small matrices are not packed in files
    write_bundle(random_model(larger), folder / "larger")
    _decoded_with_shared_weights(folder / "larger", folder / "cache")
    valid_folders.prepare(folder)


def readers(folder: Path) -> list[Target]:
    """All of them, over the files that `prepare` wrote to `folder`."""
    from makers.tiny import HINTS
    from makers.torch_models import Tutorial
    from tfexport.decoding.alignments import read_dictionary
    from tfexport.models.checkpoints.load import inspect_checkpoint, load_checkpoint, read_hints
    from tfexport.text.tokenizers import TextTokenizer, word_tokenizer
    from tfexport.text.vocabularies import read_vocabulary

    bundle = folder / "bundle"

    def checkpoint(path: Path) -> None:
        hints = {**HINTS, **Tutorial.hints} if path.suffix == ".pt" else {}
        inspect_checkpoint(path, hints)
        load_checkpoint(path, hints)

    def tokenizer(path: Path) -> None:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return
        found = TextTokenizer.from_dict(fields, where=path.name)
        found.decode(found.encode("word1 the <s> ☃"))
        found.tokens([0, 1, 10**6])

    def codes(path: Path) -> None:
        tokenizer = word_tokenizer({"<unk>": 0, "th@@": 1, "e": 2}).with_codes(path, where="here")
        TextTokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())), where="here").encode("the thee ☃ @@ </w>")

    bytes_of = Path.read_bytes
    pieces = json.dumps(read_vocabulary(folder / "bpe.model").to_dict()).encode()
    subwords = b'{"tokenizer": ' + bytes_of(folder / "shards" / "tokenizer.json") + b"}"
    padded = json.loads(subwords)
    padded["tokenizer"]["padding"] = {
        **{"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": 8},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"},
    }
    padded["tokenizer"]["truncation"] = {
        **{"direction": "Right", "max_length": 7, "strategy": "LongestFirst", "stride": 1}
    }
    tokenizers = (bytes_of(bundle / "source_tokenizer.json"), pieces, subwords, json.dumps(padded).encode())
    graphs = [bytes_of(bundle / f"{name}.onnx") for name in ("encoder.ort", "encoder", "decoder_step.ort")]
    dictionary = json.dumps({word: index for index, word in enumerate(WORDS)}).encode()
    vocabularies = (bytes_of(folder / "words.json"), dictionary, "\n".join(WORDS).encode())
    pickles = tuple(bytes_of(folder / name) for name in ("model.pt", "nested.pt", "legacy.pt", "torch.pt"))
    return [
        Target("checkpoint", pickles, checkpoint, ".pt"),
        Target("safetensors", (bytes_of(folder / "model.safetensors"),), checkpoint, ".safetensors"),
        Target("config", (json.dumps({**HINTS, "d_model": 16}).encode(),), read_hints, ".json"),
        Target("vocabulary", vocabularies, read_vocabulary, ".json"),
        Target("yaml-words", (b'"</s>": 0\n<unk>: 1\n? "|"\n: 2\n~: 3\n',), read_vocabulary, ".yml"),
        Target("codes", (b"#version: 0.2\nt h\nth e</w>\n", b"t h\nth e\nthe </w>\n"), codes, ".txt"),
        Target("tokenizer", tokenizers, tokenizer, ".json"),
        Target("manifest", (bytes_of(bundle / "manifest.json"),), _in_bundle(bundle, "manifest.json"), ".json"),
        Target(
            "certificates",
            (bytes_of(folder / "certificates.json"), b"[]"),
            _in_bundle(bundle, "certificates.json"),
            ".json",
        ),
        Target("graph", tuple(graphs), _in_bundle(bundle, "encoder.ort.onnx"), ".onnx"),
        *_readers_of_lines(bundle),
        Target("flags", FLAGS, _flags, ".txt"),
        Target("dictionary", (b"Haus\thouse\n\nder\tthe\nalt\told man\n",), read_dictionary, ".txt"),
        Target("labels", (b"one\ntwo\nthree\n",), _labels, ".txt"),
        _packed(folder / "larger", folder / "cache"),
        *valid_folders.readers(folder),
    ]


def _in_bundle(bundle: Path, name: str) -> Callable[[Path], object]:
    """Reads a file as the file `name` of a bundle, whose manifest has its checksum unless it is the manifest."""
    from tfexport.bundle.reader import file_sha256, open_bundle
    from tfexport.runtimes import load_runtime
    from tfexport.verification.certificates import read_certificates

    names = open_bundle(bundle).files

    def read(path: Path) -> object:
        copy = path.parent / "bundle"
        shutil.copytree(bundle, copy)
        shutil.copyfile(path, copy / name)
        if name in names:
            manifest = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
            manifest["files"][name]["sha256"] = file_sha256(path)
            (copy / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        found = open_bundle(copy)
        read_certificates(found)
        for side in ("source", "target"):
            found.tokenizer(side)
        if name.endswith(".onnx"):
            altered = load_runtime("ort-cpu", found, threads=1)
            altered.best(altered.encode(*PAIR), np.array([2, 2]), 1)
        return found

    return read


def _readers_of_lines(bundle: Path) -> list[Target]:
    """Of what is decoded, of beginnings of outputs, of outputs that are scored, and of a budget's text."""
    from tfexport.bundle.reader import open_bundle
    from tfexport.decoding.line_reader import Reader as LineReader
    from tfexport.decoding.line_reader import TargetReader
    from tfexport.decoding.translate import Writer, scored, translate
    from tfexport.models.checkpoints.load import load_checkpoint
    from tfexport.runtimes import load_runtime
    from tfexport.search.search import SearchOptions
    from tfexport.verification.budget_text import Text

    opened = open_bundle(bundle)
    runtime = load_runtime("ort-cpu", opened, threads=1)
    reader, writer = LineReader.of(opened, None), Writer.of(opened, "jsonl")

    def lines_of(path: Path) -> list[bytes]:
        return path.read_bytes().splitlines(keepends=True)[:50]

    def text(path: Path) -> None:
        _checked(lines_of(path), None)

    def _checked(given: list[bytes], outputs: TargetReader | None) -> None:
        results = list(translate(runtime, reader, given, SearchOptions(max_length=3), outputs=outputs))
        if len(results) != len(given):
            raise AssertionError(f"{len(given)} lines in, {len(results)} out")
        for result in results:
            json.loads(writer.line(result))

    def prefixes(path: Path) -> None:
        given = lines_of(path)
        _checked(given, writer.reader())
        _checked([b"word1 word2\n"] * len(given), writer.reader(lines=given))

    def targets(path: Path) -> None:
        given = lines_of(path)
        for format in ("text", "tokens", "ids"):
            outputs = Writer.of(opened, format).reader(whole=True, lines=given)
            options = SearchOptions(length_penalty=0.0, max_length=20, token_scores=True)
            results = list(translate(runtime, reader, [b"word1"] * len(given), options, outputs=outputs))
            for result in map(scored, results):
                json.dumps(writer.score_record(result))
                if result.hypotheses and len(result.hypotheses[0].token_log_probs) != len(result.hypotheses[0].ids):
                    raise AssertionError("a token has no score")

    def budget(path: Path) -> None:
        given = lines_of(path)[:3]
        checkpoint = load_checkpoint(bundle.parent / "model.safetensors", {})
        Text.read(checkpoint.build_model(), reader, writer, given, given[::-1], lambda _: None)  # type: ignore[arg-type]

    sentences = b"word1 word2 word3\nword4\n\nword5 unknown \xc3\xa4\n" * 3
    columns = b"word1 word2\tword3\nword4\t\n\t\nword5\tword6 <eos>\tword7\n"
    return [
        Target("text", (sentences, b"1 2 3\n"), text, ".txt"),
        Target("prefixes", (columns, b"word1\t4 5\n"), prefixes, ".txt"),
        Target("targets", (sentences, b"4 5 6 3\n3\n"), targets, ".txt"),
        Target("budget", (sentences,), budget, ".txt"),
    ]


FLAGS = (
    b"top1=0.995",
    b"bleu=0.1",
    b"chrf=1e-3",
    b"identical=0.97",
    b"fp32,auto-int8",
    b"1,8,32",
    b"sm89,portable",
    b"4 5 6",
)


def _flags(path: Path) -> None:
    """What flags with a small language of their own say: each of their readers may refuse it."""
    from tfexport.contract import precisions_of
    from tfexport.errors import TfexportError
    from tfexport.exporter.options import EngineOptions
    from tfexport.exporter.pipeline import automatic_precisions
    from tfexport.option import declared, numbers
    from tfexport.verification.budget import Budget

    given = os.fsdecode(path.read_bytes())  # as Python gives what stands on a command line
    languages: list[Callable[[str], object]] = [Budget.parse, precisions_of, automatic_precisions]
    declarations = [found for found in declared(EngineOptions).values() if found.about.parse is not None]
    languages += [partial(found.about.parse, found.flag) for found in declarations if found.about.parse is not None]
    languages.append(lambda text: numbers("--beam", text))
    refused = []
    for read in languages:
        try:
            read(given)
        except TfexportError as error:
            refused.append(error)
    if len(refused) == len(languages):
        raise refused[0]


def _labels(path: Path) -> None:
    from tfexport.decoding.classify import read_labels

    read_labels(path, 3)


PACKED_SOURCES = [[4, 5, 6], [7, 8]]


def _decoded_with_shared_weights(bundle: Path, cache: Path) -> list[Any]:
    from tfexport.bundle.reader import open_bundle
    from tfexport.runtimes import load_runtime
    from tfexport.search.search import SearchOptions, search

    os.environ["XDG_CACHE_HOME"] = str(cache)
    runtime = load_runtime("ort-cpu", open_bundle(bundle), threads=1, share_weights=True)
    return search(runtime, PACKED_SOURCES, SearchOptions(max_length=4))


def _packed(bundle: Path, cache: Path) -> Target:
    """Of packed weights that are kept in files, one of which is what is given; all tokens must stay the same."""
    place = min(path.parent for path in cache.glob("*/packed/*/graph.onnx"))
    seeds = tuple((place / name).read_bytes() for name in ("checksums.json", "graph.onnx"))
    wanted: list[Any] = []

    def read(path: Path) -> None:
        copy = path.parent / "cache"
        shutil.copytree(cache, copy)
        name = "checksums.json" if path.read_bytes()[:1] == b"{" else "graph.onnx"
        shutil.copyfile(path, copy / place.relative_to(cache) / name)
        if not wanted:  # the valid files come first
            wanted.extend(_decoded_with_shared_weights(bundle, cache))
        if _decoded_with_shared_weights(bundle, copy) != wanted:
            raise AssertionError("other tokens or scores")

    return Target("packed", seeds, read)
