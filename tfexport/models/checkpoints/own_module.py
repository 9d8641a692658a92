"""Reads a checkpoint by running the user's own module: `--module my_code.py:build`, or a live module in Python.

The file that the user names is run, because the user wrote it, as a family file is. Nothing in a checkpoint can name one.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tfexport.config import ModelConfig
from tfexport.confirmation import Confirmation
from tfexport.errors import CheckpointError, ConfigError
from tfexport.models.checkpoints.convert import tie, unshared
from tfexport.models.checkpoints.hints import (
    PARTS,
    asking,
    check_told,
    complete,
    id_problems,
    picked_of,
    size_problems,
)
from tfexport.models.checkpoints.load import Checkpoint
from tfexport.models.checkpoints.options import USAGE
from tfexport.models.checkpoints.user_family import importing_beside, run_file, running
from tfexport.models.checkpoints.written_family import write_family
from tfexport.models.families.family import SOURCE_ENDS
from tfexport.models.formats.files import read_file
from tfexport.models.formats.native import Tokenizers
from tfexport.models.formats.shards import sha256_of, weight_files
from tfexport.models.formats.state_dicts import some
from tfexport.models.live.read import LiveModel, ReadingOptions, computes_the_same, read_module

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
    path: Path | None = None
    """The file with its code, if a file was given."""
    trained: nn.Module | None = None
    """The user's own module with its trained weights, of which `build` gives copies. Then no file is read."""

    @property
    def is_trained(self) -> bool:
        return self.trained is not None

    @classmethod
    def of_live(cls, module: nn.Module, adapter: Callable[..., Tensor] | None) -> OwnModule:
        """A module of a running program. It is copied, because reading changes the parameters."""

        def build() -> nn.Module:
            try:
                return copy.deepcopy(module).cpu()
            except Exception as error:  # whatever the user's class holds
                raise CheckpointError(
                    f"{type(module).__name__} cannot be copied ({error}). Save its state_dict, and export the file with "
                    "module='FILE.py:NAME'."
                ) from error

        return cls(build, type(module).__name__, adapter, trained=module)


def module_of(spec: str) -> OwnModule:
    """The module that a flag names: `FILE.py:NAME`; `build` is the default name.

    Raises:
        ConfigError: the file is missing, fails, or has no such name.
    """
    where, _, name = (spec, "", "build") if spec.endswith(".py") else spec.rpartition(":")
    path = Path(where)
    if not where.endswith(".py") or not path.is_file():
        raise ConfigError(
            f"there is no Python file {where or spec}. Give --module FILE.py:NAME, such as my_code.py:build."
        )
    with running(path):
        code = run_file(path)
    target = getattr(code, name, None)
    if target is None:
        raise ConfigError(
            f"{where} has no {name}. Give --module {where}:NAME, with a function that returns your module."
        )
    return OwnModule(_builder(target, spec, path), spec, getattr(code, "call", None), path)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _builder(target: Any, spec: str, path: Path) -> Callable[[], nn.Module]:
    """A function that returns the module."""
    if isinstance(target, nn.Module):
        return lambda: target
    advice = "Give a function without arguments that returns your module: def build(): return MyModel(...)."
    if not callable(target):
        raise ConfigError(f"{spec} is {type(target).__name__}, not a function or a module. {advice}")
    with running(path):
        parameters = inspect.signature(target).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in _VARIADIC]
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
    path: Path,
    own: OwnModule,
    hints: Mapping[str, Any],
    *,
    tokenizers: Tokenizers | None = None,
    family_file: Path | None = None,
) -> Checkpoint:
    """Read a checkpoint with the user's module: what its `forward` computes, proven in float64.

    Args:
        path: the file with the module's weights; of a trained module only its name.
        hints: special ids, lengths, `source_bos` and `source_eos`, and what selects weights in the file.
        family_file: where to write what was read, as a family file.

    Raises:
        CheckpointError: the weights are not those of the module, or the module computes what tfexport cannot express.
        ConfigError: special ids are missing, or hints contradict the module.
    """
    picked, about = picked_of(hints)
    if idle := [name for name in about if name in PARTS]:
        raise ConfigError(f"--module reads the layers from their use: {', '.join(idle)} has no effect. Leave it out.")
    if family_file is not None and family_file.exists():
        raise ConfigError(f"{family_file} exists. Give another name with --write-family, or remove it.")
    tokenizers = tokenizers or Tokenizers(None, None)
    ids = _ids(path, about, tokenizers)
    module = own.build()
    ignored: tuple[str, ...] = ()
    names: dict[str, tuple[str, ...]] = {}
    if not own.is_trained:
        raw = read_file(path, picked=picked)
        ignored = raw.ignored
        names = load_weights(module, raw.weights, path, own.about)
        del raw  # the module has the weights now
        _check_absent_buffers(own, module, [name for name, kept in names.items() if not kept], path)
    sha256 = _digest(module) if own.is_trained else sha256_of(path, weight_files(path))

    def with_ids(fields: Mapping[str, Any]) -> ModelConfig:
        ends = {"source_eos": ids["eos_id"] < fields["src_vocab_size"]}  # sources of ids may have no special ones
        return ModelConfig.from_dict({**ends, **fields, **ids}, where=own.about)

    lengths = {"encoder": about.get("max_source_length"), "decoder": about.get("max_target_length")}
    options = ReadingOptions(
        pad_id=ids["pad_id"],
        bos_id=ids["bos_id"],
        special_ids=frozenset(ids[name] for name in _IDS),
        with_ids=with_ids,
        vocab=None if tokenizers.target is None else tokenizers.target.size,
        max_lengths={side: length for side, length in lengths.items() if length is not None},  # type: ignore[misc]
        adapter=own.adapter,
    )
    # Its forward and its `call` may import modules when they run.
    with contextlib.nullcontext() if own.path is None else importing_beside(own.path):
        live = read_module(module, options)
        _check_copy(own, live, options)
    check_told(path, live.config.to_dict(), {name: value for name, value in about.items() if name not in ids})
    if family_file is not None:
        write_family(family_file, live, names, path, Path(own.about).name, {**hints, **ids})
    config, weights = tie(live.config, live.weights)
    return Checkpoint(
        path=path,
        sha256=sha256,
        family=FAMILY,
        config=config,
        weights=unshared(weights),
        tokenizers=tokenizers,
        given={**{name: ids[name] for name in _IDS}, **hints},
        family_notes=tuple(live.notes),
        odd=(*size_problems(tokenizers, config), *id_problems(tokenizers, config)),
        ignored=ignored,
        confirmation=_confirmation(own, live, about),
    )


def _check_copy(own: OwnModule, live: LiveModel, options: ReadingOptions) -> None:
    """Raise CheckpointError if the user's own module computes something else than the copy that was read.

    A module in training mode cannot be compared.
    """
    module = own.trained
    if module is None or module.training:
        return
    if not computes_the_same(module, own.build().eval(), live, options):
        raise CheckpointError(
            f"a copy of {own.about} in evaluation mode computes something else than the module itself: its __deepcopy__, "
            "__getstate__ or eval() changes it. Save its state_dict, and export the file with module='FILE.py:NAME'."
        )


def _check_absent_buffers(own: OwnModule, module: nn.Module, absent: Sequence[str], path: Path) -> None:
    """Raise CheckpointError if a tensor that the file lacks has other values each time that the module is built."""
    again = own.build()
    saved, kept = again.state_dict(), module.state_dict()
    differ = [name for name in absent if name in saved and not torch.equal(kept[name], saved[name])]
    others = _unsaved(again)
    differ += [
        name for name, tensor in _unsaved(module).items() if name in others and not _is_same(tensor, others[name])
    ]
    if differ:
        raise CheckpointError(
            f"{path} lacks {differ[0]}, which {own.about} fills at random. Save it with the weights, or set it in the code."
        )


def _unsaved(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module that no state_dict has: buffers that are not persistent, and plain attributes."""
    tensors: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        plain = {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}
        own = {name: part._buffers[name] for name in part._non_persistent_buffers_set}
        tensors |= {
            f"{prefix}.{name}".lstrip("."): value for name, value in {**plain, **own}.items() if value is not None
        }
    return tensors


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    return torch.equal(tensor.nan_to_num(), other.nan_to_num())


def _digest(module: nn.Module) -> str:
    """The sha256 of the names, types, shapes and numbers of a module's state."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _ids(path: Path, about: Mapping[str, Any], tokenizers: Tokenizers) -> dict[str, Any]:
    """The fields that no module computes, from the user and the vocabularies.

    Raises:
        ConfigError: one that matters is missing.
    """
    heads = {"n_heads": 1}  # asked for by default, and read from the module
    fields, missing = complete(None, {}, {**heads, **about}, tokenizers)
    source = tokenizers.source
    # Ids are complete as they are; a tokenizer's own template says what belongs around text.
    if source is not None and not (source.before or source.after):
        missing |= {name: USAGE[name] for name in SOURCE_ENDS if name not in about}
    if missing:
        raise ConfigError(asking(path, missing, None))
    return {name: fields[name] for name in (*_IDS, *SOURCE_ENDS, *_TOKENS) if name in fields}


_TOKENS = ("forced_first_id", "suppressed_ids", "suppressed_first_ids")


def _confirmation(own: OwnModule, live: LiveModel, about: Mapping[str, Any]) -> Confirmation:
    """The module confirms the arithmetic that was compared, but not the tokens that begin and end sequences."""
    proof = live.proof
    return Confirmation(
        by="module",
        about=f"{own.about}: logits of {proof.sequences} sequences in float64 differ by {proof.error:.0e}, all "
        f"{proof.ids:,} ids, lengths to {proof.longest[0]:,} and {proof.longest[1]:,}",
        unconfirmed={
            **{name: about[name] for name in ("bos_id", "eos_id", *SOURCE_ENDS) if name in about},
            **live.doubts,
        },
    )


def load_weights(
    module: nn.Module, weights: Mapping[str, Tensor], path: Path, about: str
) -> dict[str, tuple[str, ...]]:
    """Load a file's weights, without prefixes of wrappers, into a module. A tied tensor needs one of its names.

    Returns:
        The names in the file of each of the module's parameters and buffers; a tied one may have several.

    Raises:
        CheckpointError: the names or shapes are not those of the module.
    """
    if unready := [name for name, tensor in module.named_parameters() if tensor.is_meta or is_lazy(tensor)]:
        raise CheckpointError(
            f"{about} gives no numbers to {some(unready)}. Build the module on the CPU, and call lazy layers once before."
        )
    own, prefix = module.state_dict(), ""
    if not weights.keys() & own.keys():  # all names of the module have a prefix, which was taken for a wrapper's
        prefix = f"{next(iter(own)).partition('.')[0]}."
        weights = {f"{prefix}{name}": tensor for name, tensor in weights.items()}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    addresses = {parameters[name].data_ptr() for name in weights if name in parameters}
    missing = [
        name for name, tensor in parameters.items() if name not in weights and tensor.data_ptr() not in addresses
    ]
    misshapen = [
        f"{name} is {list(tensor.shape)}, not {list(own[name].shape)}"
        for name, tensor in weights.items()
        if name in own and tensor.shape != own[name].shape
    ]
    unexpected = [name for name in weights if name not in own]
    kept: dict[int, str] = {}
    for name in (name for name in weights if name in parameters):
        first = kept.setdefault(parameters[name].data_ptr(), name)
        if weights[name].shape == weights[first].shape and not torch.equal(weights[name], weights[first]):
            raise CheckpointError(
                f"{about} has one tensor for {first} and {name}, and {path} has two. Build the module as in the training, "
                "or leave one of them out with --ignore."
            )
    problems = [
        f"{what}: {some(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the weights in {path} are not those of {about}: {'; '.join(problems)}. Build the module with the arguments of "
            "the training; leave out what belongs to no layer with --ignore."
        )
    module.load_state_dict(dict(weights), strict=False)
    tied = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    return {
        name: tuple(
            other.removeprefix(prefix)
            for other in weights
            if other == name or (name in tied and tied.get(other) == tied[name])
        )
        for name in own
    }
