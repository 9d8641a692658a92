"""Inputs on which errors about checkpoints give advice. Each function makes one in the working folder."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from makers import hugging_face_models, torch_models
from makers.paths import ROOT
from makers.tiny import tiny_transformer, write_tiny_checkpoint
from tests.support import own_code
from tests.support.checkpoints import QUERY, weights_of
from tests.support.ctranslate2_models import simple


class Saved:
    """A model whose `state_dict()` is this."""

    def __init__(self, weights: Mapping[str, Any]):
        self._weights = dict(weights)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._weights)


def file(content: Callable[[dict[str, Tensor]], Any], name: str = "model.pt") -> Callable[[], Saved]:
    """Save what is made of the weights of a model of the tutorial."""

    def make() -> Saved:
        weights = weights_of("tutorial")
        torch.save(made := content(weights), name)
        return Saved(made if isinstance(made, dict) and QUERY in made else weights)

    return make


def family(name: str) -> Callable[[], None]:
    return lambda: torch.save(weights_of(name), "model.pt")


def torch_model(name: str, change: Callable[[Any], object] = lambda model: None) -> Callable[[], None]:
    def make() -> None:
        torch.save(torch_models.made(name, change).state_dict(), "model.pt")
        words = ["<unk>", "<pad>", "<s>", "</s>", *map(str, range(4, torch_models.SRC_VOCAB))]
        Path("words.json").write_text(json.dumps(words))

    return make


def shards(folder: str, config: str = "", *, absent: bool = False) -> Callable[[], None]:
    def make() -> None:
        weights = {name: tensor.clone() for name, tensor in weights_of("tutorial").items()}
        places = {name: f"model-0000{1 + (k % 2)}-of-00002.safetensors" for k, name in enumerate(weights)}
        Path(folder).mkdir()
        for shard in [*{*places.values()}][absent:]:
            save_file({name: weights[name] for name in weights if places[name] == shard}, Path(folder, shard))
        Path(folder, "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        if config:
            Path(folder, "config.json").write_text(config)

    return make


def folder(name: str, **files: bytes | str | None) -> Callable[[], Saved]:
    """A folder with these files; the names have `__` for a dot, and None stands for weights of the tutorial."""

    def make() -> Saved:
        Path(name).mkdir(parents=True)
        for file, content in files.items():
            path = Path(name, file.replace("__", "."))
            if content is None:
                save_file({k: v.clone() for k, v in weights_of("tutorial").items()}, path)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return Saved(weights_of("tutorial"))

    return make


def hugging_face(name: str) -> Callable[[], None]:
    return lambda: hugging_face_models.made("marian").save_pretrained(name)


def words() -> None:
    write_tiny_checkpoint(Path())
    Path("tiny.pt").rename("model.pt")


def differing_words() -> None:
    """The special tokens of the target vocabulary have other ids than those of the source vocabulary."""
    words()
    target = json.loads(Path("tgt.json").read_text())
    Path("other.json").write_text(json.dumps([target[1], target[0], *target[2:]]))


def own_family(change: Callable[[str], str] = str, extra: Mapping[str, Tensor] | None = None) -> Callable[[], None]:
    """The example of a family file with a change, and its checkpoint."""

    def make() -> None:
        for name in ("my_model.py", "my_family.py", "make_checkpoint.py"):
            shutil.copy(ROOT / "examples" / name, name)
        code = Path("make_checkpoint.py").read_text()
        exec(compile(code, "make_checkpoint.py", "exec"), {"__name__": "example"})
        Path("model.pt").write_bytes(Path("ckpt.pt").read_bytes())
        if extra:
            torch.save({**torch.load("model.pt", weights_only=True), **extra}, "model.pt")
        before = Path("my_family.py").read_text()
        after = change(before)
        assert change is str or after != before
        Path("my_family.py").write_text(after)

    return make


def without(*fields: str) -> Callable[[str], str]:
    return lambda text: "\n".join(
        line for line in text.splitlines() if not line.strip().startswith(tuple(f'"{name}":' for name in fields))
    )


def two(weights: dict[str, Tensor]) -> dict[str, Any]:
    return {"net": weights, "ema": {name: tensor + 1 for name, tensor in weights.items()}}


def parts(suffix: str) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    def split(weights: dict[str, Tensor]) -> dict[str, Any]:
        sides = ("encoder", "decoder")
        return {"epoch": 3} | {
            f"{side}{suffix}": {
                name.removeprefix(f"{side}."): t for name, t in weights.items() if name.startswith(side)
            }
            for side in sides
        }

    return split


def argos() -> None:
    simple(Path("argos/translate-de_en/model"))
    for name in ("de-en.argosmodel", "de-en.zip"):
        with ZipFile(name, "w") as archive:
            for path in sorted(Path("argos").rglob("*")):
                archive.write(path, path.relative_to("argos"))


def script() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(
            tiny_transformer(), (torch.tensor([[2, 5, 3]]), torch.tensor([[2, 5]])), check_trace=False
        ).save("model.pt")


def rms(model: Any) -> None:
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.LayerNorm):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, nn.RMSNorm(torch_models.D, eps=1e-6))


def with_json(content: str) -> Callable[[], None]:
    def make() -> None:
        words()
        Path("settings.json").write_text(content)

    return make


def same_rows(model: Any) -> None:
    """The source embedding has as many rows as the target's, to which the output layer is tied."""
    model.src_tok_emb.embedding = nn.Embedding(torch_models.TGT_VOCAB, torch_models.D)
    model.generator.weight = model.tgt_tok_emb.embedding.weight


def code_of_its_own() -> None:
    own_code.write(Path())
    Path("ckpt.pt").rename("model.pt")
