"""Valid folders of the transformers library and of toolkits, and the readers of the files in them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuzz.files.target import Target

TEXT = "the cat sat on a mat with dogs and birds while we ate bread in old towns near rivers"
SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "activation_function": "relu",
}
T5 = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 24, "num_layers": 1, "num_decoder_layers": 1}


def prepare(folder: Path) -> None:
    """Write the folders `t5`, `marian` and `nllb`, the first with a tokenizer.json and in shards, and those of toolkits."""
    import transformers

    def pieces(path: Path, **options: Any) -> None:
        import sentencepiece

        content = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([TEXT] * 30), model_writer=content, vocab_size=30, minloglevel=2, **options
        )
        path.write_bytes(content.getvalue())

    def save(name: str, model: Any, tokenizer: dict[str, Any]) -> Path:
        path = folder / name
        model.save_pretrained(path)
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        return path

    small = {"normalization_rule_name": "identity"}  # other rules are 240 KB, which would be copied each time
    t5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5, vocab_size=130, decoder_start_token_id=0)
    )
    path = save("t5", model, {"tokenizer_class": "T5Tokenizer", "extra_ids": 100})
    pieces(path / "spiece.model", **t5, **small)
    pieces(folder / "rules.model", **t5)
    pieces(folder / "bpe.model", model_type="bpe", **small)
    shards = folder / "shards"
    model.save_pretrained(shards, max_shard_size="5KB")
    transformers.T5Tokenizer.from_pretrained(path).save_pretrained(shards)

    config = transformers.MarianConfig(
        **SIZES, vocab_size=42, pad_token_id=40, eos_token_id=0, decoder_start_token_id=40
    )
    path = save("marian", transformers.MarianMTModel(config), {"tokenizer_class": "MarianTokenizer"})
    pieces(path / "source.spm", **small)
    shutil.copyfile(path / "source.spm", path / "target.spm")
    words = ["</s>", "<unk>", *(f"▁{word}" for word in TEXT.split()), *"abcdefghijklmnopq▁"]
    vocabulary = {word: at for at, word in enumerate(dict.fromkeys(words))}
    (path / "vocab.json").write_text(json.dumps({**vocabulary, "<pad>": 40}), encoding="utf-8")

    config = transformers.M2M100Config(
        **SIZES, vocab_size=250, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2
    )
    added = {"100": {"content": "<extra>", "special": True, "lstrip": False}}
    settings = {"tokenizer_class": "NllbTokenizer", "src_lang": "deu_Latn", "added_tokens_decoder": added}
    path = save("nllb", transformers.M2M100ForConditionalGeneration(config), settings)
    pieces(path / "sentencepiece.bpe.model", **small)
    for file in ("special_tokens_map.json", "added_tokens.json"):
        (path / file).write_text(
            json.dumps({"additional_special_tokens": ["<extra>"]} if "map" in file else {"<extra>": 100})
        )

    _prepare_toolkits(folder)


def _prepare_toolkits(folder: Path) -> None:
    """The folders `npz`, `opus`, `joeynmt`, `joeynmt-bpe`, `fairseq`, `opennmt`, `opennmt-parts` and `ctranslate2`."""
    from makers import joeynmt_models, marian_models, model_bin
    from makers.paths import DATA
    from tfexport.text.sentencepiece import PieceModel

    options = marian_models.options_of("pre-norm")
    for name in ("npz", "opus"):
        marian_models.write_folder(folder / name, marian_models.random_arrays("pre-norm", 1), options)
    names = PieceModel.read(folder / "marian" / "source.spm").names[3:]
    words = ["</s>", "<unk>", ">>fra<<", *names][: marian_models.SOURCE_WORDS]
    text = "".join(f"{json.dumps(word)}: {index}\n" for index, word in enumerate(words))
    (folder / "opus" / "vocab.src.yml").write_text(text, encoding="utf-8")
    for name in ("source.spm", "target.spm"):
        shutil.copyfile(folder / "marian" / name, folder / "opus" / name)

    config, state = joeynmt_models.config_of("tied"), joeynmt_models.random_state("tied", 1)
    joeynmt_models.write_folder(folder / "joeynmt", config, state)
    codes = {"level": "bpe", "tokenizer_type": "subword-nmt", "tokenizer_cfg": {"codes": "bpe.codes"}}
    pieces = {"level": "bpe", "tokenizer_type": "sentencepiece", "tokenizer_cfg": {"model_file": "bpe.model"}}
    bpe = folder / "joeynmt-bpe"
    joeynmt_models.write_folder(bpe, {**config, "name": bpe.name, "data": {"src": codes, "trg": pieces}}, state)
    (bpe / "bpe.codes").write_text("#version: 0.2\nt h\nth e</w>\n", encoding="utf-8")
    shutil.copyfile(folder / "bpe.model", bpe / "bpe.model")
    (bpe / "trg_vocab.txt").write_text("\n".join(PieceModel.read(bpe / "bpe.model").names), encoding="utf-8")

    for toolkit, model in (("fairseq", "cfg.pt"), ("opennmt", "v3.pt")):
        (folder / toolkit).mkdir()
        shutil.copyfile(DATA / toolkit / model, folder / toolkit / "model.pt")
        for path in (DATA / toolkit).glob("dict.*.txt"):
            shutil.copyfile(path, folder / toolkit / path.name)
    (folder / "opennmt-parts").mkdir()
    for suffix in ("pt", "safetensors"):
        shutil.copyfile(DATA / "opennmt" / f"v3-parts.{suffix}", folder / "opennmt-parts" / f"model.{suffix}")
    model_bin.write_small(folder / "ctranslate2")


def _readers_of_toolkits(folder: Path) -> list[Target]:
    from makers import marian_models, model_bin
    from makers.paths import DATA

    def saved(toolkit: str, *names: str) -> tuple[bytes, ...]:
        return tuple((DATA / toolkit / f"{name}.pt").read_bytes() for name in names)

    def archive(name: str) -> bytes:
        path = folder / f"{name}.npz"
        marian_models.write_model(path, marian_models.random_arrays(name, 1), marian_models.options_of(name))
        return path.read_bytes()

    def of(name: str, file: str, *bases: str, more: tuple[bytes, ...] = (), given: str = "") -> Target:
        return _of(folder, name, file, bases, more, given)

    others = (
        model_bin.small(in_integers=True),
        model_bin.small(relative=True),
        replace(model_bin.small(), version=3),
    )
    bins = tuple(model_bin.to_bytes(content) for content in others)
    archives = tuple(archive(name) for name in ("gelu", "tied-layers", "trained-positions"))
    return [
        of("marian-model", "model.npz", "npz", more=archives),
        of("marian-decoder", "model.npz.decoder.yml", "npz"),
        of("marian-words", "vocab.src.yml", "npz"),
        of("opus-words", "vocab.src.yml", "opus"),
        of("joeynmt-config", "config.yaml", "joeynmt-bpe", "joeynmt"),
        of("joeynmt-words", "trg_vocab.txt", "joeynmt"),
        of("joeynmt-checkpoint", "100.ckpt", "joeynmt"),
        of("fairseq", "model.pt", "fairseq", more=saved("fairseq", "dictconfig", "args", "fused"), given="model.pt"),
        of("fairseq-words", "dict.de.txt", "fairseq", given="model.pt"),
        of("opennmt", "model.pt", "opennmt", more=saved("opennmt", "v1", "v2", "v3-biases"), given="model.pt"),
        of("opennmt-part", "model.safetensors", "opennmt-parts", given="model.pt"),
        of("ctranslate2", "model.bin", "ctranslate2", more=bins),
        of("ctranslate2-config", "config.json", "ctranslate2"),
        of("ctranslate2-words", "shared_vocabulary.json", "ctranslate2"),
    ]


def readers(folder: Path) -> list[Target]:
    """Of one file in a folder, which has the others as they were."""

    def of(name: str, file: str, *bases: str, more: tuple[bytes, ...] = ()) -> Target:
        return _of(folder, name, file, bases, more)

    models = tuple((folder / name).read_bytes() for name in ("rules.model", "bpe.model"))
    shard = sorted((folder / "shards").glob("*.safetensors"))[0].name
    return [
        of("hf-config", "config.json", "t5", "marian", "nllb"),
        of("hf-generation", "generation_config.json", "marian", "t5"),
        of("hf-tokenizer-config", "tokenizer_config.json", "nllb", "t5"),
        of("hf-special-tokens", "special_tokens_map.json", "nllb"),
        of("hf-added-tokens", "added_tokens.json", "nllb"),
        of("hf-vocab", "vocab.json", "marian"),
        of("hf-tokenizer", "tokenizer.json", "shards"),
        of("hf-index", "model.safetensors.index.json", "shards"),
        of("hf-shard", shard, "shards"),
        of("pieces", "spiece.model", "t5", more=models),
        *_readers_of_toolkits(folder),
    ]


def _of(
    folder: Path, name: str, file: str, bases: Sequence[str], more: tuple[bytes, ...] = (), given: str = ""
) -> Target:
    """The reader `name` of a `file` of folders; `given` is the file that a command is given, where it is not the folder."""
    seeds = (*((folder / base / file).read_bytes() for base in bases), *more)
    return Target(name, seeds, _in_folder([folder / base for base in bases], file, given), Path(file).suffix)


def _in_folder(bases: list[Path], file: str, given: str) -> Callable[[Path], None]:
    """Reads a file as that of a folder: of the one among `bases` whose own file it is most like."""
    from tfexport.decoding.line_reader import Reader as LineReader
    from tfexport.decoding.line_reader import Unreadable
    from tfexport.decoding.translate import Writer
    from tfexport.models.checkpoints.load import inspect_checkpoint, load_checkpoint
    from tfexport.text.tokenizers import TextTokenizer
    from tfexport.text.vocabularies import read_vocabulary

    kinds = {base: base.name.encode() for base in bases}

    def read(path: Path) -> None:
        content = path.read_bytes().lower()
        base = next((base for base, kind in kinds.items() if kind in content), bases[0])
        copy = path.parent / "folder"
        shutil.copytree(base, copy)
        shutil.copyfile(path, copy / file)
        if file == "config.json":  # it reads all that loading reads
            inspect_checkpoint(copy, {})
        checkpoint = load_checkpoint(copy / given, {})
        if file.endswith(".index.json"):
            names = json.loads(path.read_bytes())["weight_map"].values()
            if not all((copy / name).is_file() and (copy / name).parent == copy for name in names):
                raise AssertionError("it read a file outside")
        if file.endswith(".model"):
            read_vocabulary(copy / file)
        sides = (checkpoint.tokenizers.source, checkpoint.tokenizers.target)
        source, target = (
            side and TextTokenizer.from_dict(json.loads(json.dumps(side.to_dict())), where="") for side in sides
        )
        if source is None or target is None:
            return
        for line in ("the cat sat", "a\x00 ☃ <s> </s> >>fra<<", "▁▁ <extra_id_0>"):
            try:
                ids = LineReader(checkpoint.config, source, "text").ids(line.encode())
            except Unreadable:
                continue
            if not all(0 <= index < checkpoint.config.src_vocab_size for index in ids):
                raise AssertionError(f"{ids} are not all of the model")
        Writer(checkpoint.config, target, "text").text(list(range(min(60, checkpoint.config.tgt_vocab_size))))

    return read
