"""Reads a checkpoint by running the user's own module: `--module my_code.py:build`, or a live `nn.Module` in Python.

The file that the user names is run, because the user wrote it, as a family file is. Nothing in a checkpoint can name one.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from tfexport.bundle.reader import file_sha256
from tfexport.config import ModelConfig
from tfexport.errors import CheckpointError, ConfigError
from tfexport.models.checkpoints.confirmation import Confirmation
from tfexport.models.checkpoints.hints import (
    asking,
    check_told,
    complete,
    id_problems,
    picked_of,
    size_problems,
)
from tfexport.models.checkpoints.load import Checkpoint
from tfexport.models.checkpoints.user_family import run_file, running
from tfexport.models.formats.files import read_file
from tfexport.models.formats.native import Tokenizers
from tfexport.models.formats.state_dicts import some
from tfexport.models.live.read import Given, LiveModel, prepared, read_module

FAMILY = "module"
"""The family of checkpoints that were read from a module, in manifests."""
_IDS = ("unk_id", "pad_id", "bos_id", "eos_id")


@dataclass(frozen=True)
class OwnModule:
    """The user's module, or the code that builds it."""

    build: Callable[[], nn.Module]
    about: str
    """Its name, such as `my_code.py:build`."""
    adapter: Callable[..., Tensor] | None = None
    """The user's own `call(model, src, tgt)`."""
    file: Path | None = None


def module_of(spec: str) -> OwnModule:
    """The module that a flag names: `FILE.py:NAME`, `package.module:NAME`; `build` is the default name.

    Raises:
        ConfigError: the file is missing, fails, or has no such name.
    """
    where, _, name = spec.rpartition(":") if ":" in spec and not spec.endswith(".py") else (spec, "", "build")
    path = Path(where)
    if where.endswith(".py"):
        if not path.is_file():
            raise ConfigError(f"there is no file {path}. Give --module FILE.py:NAME, such as my_code.py:build.")
        with running(path):
            code = run_file(path)
    else:
        code = _imported(where, spec)
    target = getattr(code, name, None)
    if target is None:
        raise ConfigError(
            f"{where} has no {name}. Give --module {where}:NAME, with a function that returns your module."
        )
    return OwnModule(_builder(target, spec, path), spec, getattr(code, "call", None), path if path.is_file() else None)


def _imported(where: str, spec: str) -> ModuleType:
    import sys

    sys.path.insert(0, "")
    try:
        return importlib.import_module(where)
    except ImportError as error:
        raise ConfigError(
            f"--module {spec} cannot be imported: {error}. Give FILE.py:NAME, such as my_code.py:build."
        ) from error
    finally:
        sys.path.remove("")


def _builder(target: Any, spec: str, path: Path) -> Callable[[], nn.Module]:
    """A function that returns the module."""
    if isinstance(target, nn.Module):
        return lambda: target
    advice = "Give a function without arguments that returns your module: def build(): return MyModel(...)."
    if not callable(target):
        raise ConfigError(f"{spec} is {type(target).__name__}, not a function or a module. {advice}")
    needed = [p.name for p in inspect.signature(target).parameters.values() if p.default is p.empty and p.kind < 2]
    if needed:
        raise ConfigError(f"{spec} needs the arguments {', '.join(needed)}. {advice}")

    def build() -> nn.Module:
        with running(path):
            module = target()
        if not isinstance(module, nn.Module):
            raise ConfigError(f"{spec} returns {type(module).__name__}, not an nn.Module. {advice}")
        return module

    return build


def read_own_module(
    path: Path | None, own: OwnModule, hints: Mapping[str, Any], *, tokenizers: Tokenizers | None = None
) -> Checkpoint:
    """Read a checkpoint with the user's module: what its `forward` computes, proven in float64.

    Args:
        path: the file with the module's weights; None if the module has them.
        hints: special ids, lengths, `source_bos` and `source_eos`, and what selects weights in the file.

    Raises:
        CheckpointError: the weights are not those of the module, or the module computes what tfexport cannot express.
        ConfigError: special ids are missing, or hints contradict the module.
    """
    picked, about = picked_of(hints)
    tokenizers = tokenizers or Tokenizers(None, None)
    where = path or Path(own.about)
    ids, missing = complete(None, {}, {"n_heads": 1, **about}, tokenizers)
    if missing:
        raise ConfigError(asking(where, missing, None))
    module = own.build()
    ignored: tuple[str, ...] = ()
    if path is None:
        module = copy.deepcopy(prepared(module))
    else:
        raw = read_file(path, picked=picked)
        ignored = raw.ignored
        load_weights(module, raw.weights, path, own.about, raw.metadata)
    ids |= {name: about[name] for name in _TEXT if name in about}

    def config(fields: Mapping[str, Any]) -> ModelConfig:
        ours = {name: value for name, value in ids.items() if name in (*_IDS, *_TEXT)}
        return ModelConfig.from_dict({**fields, **ours}, where=own.about)

    given = Given(
        pad_id=ids["pad_id"],
        special_ids=frozenset(ids[name] for name in _IDS),
        vocab=None if tokenizers.target is None else tokenizers.target.size,
        max_length=about.get("max_source_length"),
        adapter=own.adapter,
        config=config,
    )
    live = read_module(module, given)
    complete_config = config(live.fields)
    check_told(where, live.fields, {name: value for name, value in about.items() if name not in (*_IDS, *_TEXT)})
    odd = (*size_problems(tokenizers, complete_config), *id_problems(tokenizers, complete_config))
    return Checkpoint(
        path=where,
        sha256=_sha256_of(live) if path is None else file_sha256(path),
        family=FAMILY,
        config=complete_config,
        weights=dict(live.weights),
        tokenizers=tokenizers,
        given={**{name: ids[name] for name in _IDS}, **hints},
        family_notes=(f"called as {live.call.about}", *live.notes),
        odd=odd,
        ignored=ignored,
        confirmation=Confirmation(by="module", about=_about(own, live)),
        live=live,
    )


_TEXT = ("source_bos", "source_eos", "forced_first_id", "suppressed_ids", "suppressed_first_ids")
"""Fields that no module computes."""


def _about(own: OwnModule, live: LiveModel) -> str:
    proof = live.proof
    return (
        f"{own.about}: logits of {proof.sequences} sequences in float64 differ by {proof.error:.0e}, all {proof.ids:,} ids, "
        f"lengths to {proof.longest[0]:,} and {proof.longest[1]:,}"
    )


def _sha256_of(live: LiveModel) -> str:
    digest = hashlib.sha256()
    for name in sorted(live.weights):
        digest.update(name.encode())
        digest.update(live.weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def load_weights(
    module: nn.Module, weights: Mapping[str, Tensor], path: Path, about: str, metadata: Mapping[str, str] | None = None
) -> None:
    """Load a file's weights into a module, under any prefix that wrappers gave their names.

    Raises:
        CheckpointError: the names or shapes are not those of the module.
    """
    own = module.state_dict()
    named = _matched(weights, own)
    for dropped, kept in (metadata or {}).items():  # safetensors names tied tensors once
        if dropped in own and dropped not in named and kept in named:
            named[dropped] = named[kept]
    wrong = [
        f"{n} is {list(named[n].shape)}, not {list(own[n].shape)}"
        for n in own
        if n in named and named[n].shape != own[n].shape
    ]
    parameters = dict(module.named_parameters(remove_duplicate=False))
    shared = {parameters[name].data_ptr() for name in named if name in parameters}
    missing = [name for name, tensor in parameters.items() if name not in named and tensor.data_ptr() not in shared]
    unexpected = [name for name in named if name not in own]
    problems = [
        f"{what}: {some(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", wrong))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the weights in {path} are not those of {about}: {'; '.join(problems)}. Build the module with the arguments of "
            "the training; leave out what belongs to no layer with --ignore."
        )
    module.load_state_dict(dict(named), strict=False)


def _matched(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the module's own names: prefixes that only one side has are removed or added."""

    def score(named: Mapping[str, Tensor]) -> int:
        return sum(name in own for name in named)

    ways = [dict(weights)]
    for prefix in {name.partition(".")[0] + "." for name in own if "." in name}:
        ways.append({f"{prefix}{name}": tensor for name, tensor in weights.items()})
    for prefix in {name[: name.index(".") + 1] for name in weights if "." in name}:
        ways.append({name.removeprefix(prefix): tensor for name, tensor in weights.items()})
    return max(ways, key=score)
