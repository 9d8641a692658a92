"""Checks in PyTorch, before an export, that a checkpoint matches its family.

The canonical model is compared with itself (steps with a cache with the whole target at once, single sentences with
batches). If a family file has the module that the weights were trained in, the model is also compared with that module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.models.checkpoints.load import Checkpoint, Reading, read_checkpoint
from tfexport.models.checkpoints.recognise import Chosen
from tfexport.models.families.family import SOURCE_ENDS
from tfexport.models.formats.native import Tokenizers
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.models.transformer import Transformer
from tfexport.verification.probe_layers import (
    Layers,
    Sentence,
    compare_layers,
    run_ours,
    run_theirs,
)
from tfexport.verification.probe_pairs import Model
from tfexport.verification.probe_self import Check, classifier_checks, compared, own_checks, padded_batch, run_steps
from tfexport.verification.probe_weights import differing_weights, disturbed

MOST_SENTENCES = 16
_SENTENCES, _TARGET = 6, 24

Sources = Sequence[Sequence[int]]
Reference = Callable[[Mapping[str, Tensor], ModelConfig], nn.Module]


@dataclass(frozen=True)
class Probe:
    """The result of the checks of a checkpoint."""

    path: Path
    family: str
    checks: tuple[Check, ...]
    layers: Layers | None
    """The comparison with the user's own module, if there is one."""

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The result for `json_text`."""
        values = [] if self.layers is None else self.layers.values
        first = None if self.layers is None or self.layers.first is None else vars(self.layers.first)
        return {
            "path": str(self.path),
            "family": self.family,
            "passed": self.passed,
            "checks": [vars(check) for check in self.checks],
            "first": first,
            "values": [vars(value) for value in values],
        }


def probe(
    path: Path,
    hints: Mapping[str, Any],
    *,
    tokenizers: Tokenizers | None = None,
    family: Chosen = None,
    text: TextOptions | None = None,
    sources_of: Callable[[Checkpoint], Sources] | None = None,
    tolerance: float | None = None,
) -> Probe:
    """Check a checkpoint. It is given as for `load_checkpoint`.

    Args:
        sources_of: encoder ids to compare on, at most `MOST_SENTENCES`; by default random ones.
        tolerance: the largest relative difference that passes; by default `probe_layers.TOLERANCE`.

    Raises:
        TfexportError: the file cannot be read, or a setting that it lacks was not given.
    """
    reading = read_checkpoint(path, hints, family, text)
    inspection = reading.inspection(tokenizers)
    if inspection.problems and not inspection.missing:
        return Probe(path, inspection.family, (Check("weights", False, "; ".join(inspection.problems)),), None)
    checkpoint = reading.checkpoint(tokenizers)
    model = checkpoint.build_model()
    sentences = _sentences(model.config, sources_of(checkpoint) if sources_of else None)
    if isinstance(model, Transformer):
        own = own_checks(model, sentences, tolerance)
    else:
        own = classifier_checks(model, sentences, tolerance)
    checks = [*_facts(reading, checkpoint), *own]
    layers = None
    if reading.family is not None and reading.family.reference is not None:
        reference = reading.family.reference
        module_checks, layers = _beside_theirs(model, reading, checkpoint, reference, sentences, tolerance)
        checks += module_checks
    return Probe(path, checkpoint.family, tuple(checks), layers)


def _sentences(config: ModelConfig, sources: Sources | None) -> list[Sentence]:
    """Sources, and random targets that begin with bos; for a classifier the targets are empty."""
    random = np.random.default_rng(0)
    if sources is None:
        longest = min(40, config.max_source_length)
        lengths = [1, longest, *random.integers(1, longest + 1, _SENTENCES - 2).tolist()]
        sources = [_ids(random, config.src_vocab_size, config.pad_id, length) for length in lengths]
    if config.is_classifier:
        return [(source, ()) for source in sources[:MOST_SENTENCES]]
    most = min(_TARGET, config.max_target_length)
    lengths = [most, *random.integers(1, most + 1, len(sources) - 1).tolist()]
    return [
        (source, [config.bos_id, *_ids(random, config.tgt_vocab_size, config.pad_id, length - 1)])
        for source, length in zip(sources[:MOST_SENTENCES], lengths, strict=False)
    ]


def _ids(random: np.random.Generator, vocab: int, pad_id: int, length: int) -> list[int]:
    """Random ids without padding, which the user's module would mask."""
    return [int(i) for i in (random.integers(1, max(vocab, 2), length) + pad_id) % vocab]


def _facts(reading: Reading, checkpoint: Checkpoint) -> Iterator[Check]:
    config, count = checkpoint.config, sum(tensor.numel() for tensor in reading.weights.values())
    yield Check("weights", True, f"{len(reading.weights)} tensors of {count:,} numbers, complete and finite")

    def foreign_name(name: str) -> str:
        return name if reading.family is None else reading.family.foreign_name(name)

    target = "encoder.tokens.weight" if config.tie_source_target else "decoder.tokens.weight"
    embedding = foreign_name("encoder.tokens.weight")
    tied = [f"source and target embeddings are one ({embedding})"] * config.tie_source_target
    tied += [f"the output layer is the target embedding ({foreign_name(target)})"] * config.tie_output
    positions = f"{config.positions}: sources to {config.max_source_length} ids"
    if config.is_classifier:
        yield Check("positions", None, f"{positions}; classify marks longer sources too_long")
    else:
        yield Check(
            "tied weights", None, "; ".join(tied) or "none: source, target and output have matrices of their own"
        )
        yield Check(
            "positions",
            None,
            f"{positions}, outputs to {config.max_target_length} tokens; decode marks longer sources too_long, and ends "
            "longer outputs there (length_limit)",
        )
    assumed = [
        name
        for name in ("n_heads", *(reading.family.asked if reading.family else ()))
        if name not in reading.fields and (name in reading.hints or name not in SOURCE_ENDS)
    ]
    if assumed:
        values = ", ".join(f"{name} {getattr(config, name)}" for name in assumed)
        yield Check("told by you", None, f"{values}: the file does not contain it")
    odd = checkpoint.odd
    wrong = [problem for problem in odd if "_id is" in problem and not reading.describes_text]
    ids = ", ".join(f"{kind} {_id(checkpoint, kind)}" for kind in ("unk", "pad", "bos", "eos"))
    yield Check("special ids", not wrong, "; ".join([ids, *odd]))


def _id(checkpoint: Checkpoint, kind: str) -> str:
    """The id, and whether a vocabulary confirms it."""
    number = getattr(checkpoint.config, f"{kind}_id")
    sides = (checkpoint.tokenizers.source, checkpoint.tokenizers.target)
    in_vocabulary = any(side is not None and side.special_id(kind) == number for side in sides)
    return f"{number if number >= 0 else 'none'}{' (as in the vocabulary)' * in_vocabulary}"


def _beside_theirs(
    model: Model,
    reading: Reading,
    checkpoint: Checkpoint,
    reference: Reference,
    sentences: Sequence[Sentence],
    tolerance: float | None,
) -> tuple[list[Check], Layers | None]:
    """Compare the canonical model with the user's module: weights, layers, prefixes, padded batches."""
    family = reading.family
    assert family is not None
    names = [name for name in reading.weights if not family.ignores(name)]
    # A copy, because `reference` may cache its module.
    user_module = copy.deepcopy(reference(reading.weights, checkpoint.config)).eval()
    name, kind = (
        ("torch.nn", "PyTorch's own layers") if family.reference_as_told else ("reference", type(user_module).__name__)
    )
    changed = differing_weights(user_module, {name: reading.weights[name] for name in names})
    if changed:
        about = (
            f"the module holds other numbers than the file: {', '.join(changed[:3])}. Load the weights in `reference`."
        )
        return [Check(name, False, about)], None
    layers = compare_layers(model, user_module, family, names, sentences, tolerance)
    error, how, where = layers.logits, " alone: with other norms and biases the two could not be made", ""
    noisy = None
    if layers.first is None:
        noisy = _compare_disturbed(reading, checkpoint, reference, user_module, sentences, tolerance)
    if noisy is not None:
        error, how = float(np.maximum(error, noisy.logits)), ", and with random numbers added to norms and biases"
        if noisy.first is not None:
            layers, where = noisy, " with random numbers added to norms and biases (those of the file hide it)"
    first = layers.first
    if first is not None:
        about = f"{first.ours} is the first to differ{where}; in {kind}: {first.theirs}. Usually {first.hint}"
        return [Check(name, False, about, first.error)], layers
    dtype = str(layers.dtype).removeprefix("torch.")
    caveat = ", with what you told of the file, which it cannot check" * family.reference_as_told
    about = (
        f"logits, {len(layers.values) - 1} values within, {len(sentences)} sentences: as {kind} "
        f"{'have' if family.reference_as_told else 'has'} them, in {dtype}{caveat}; weights as they are{how}"
    )
    model, user_module = copy.deepcopy(model).to(layers.dtype), copy.deepcopy(user_module).to(layers.dtype)
    beside = (
        [_prefixes(model, user_module, sentences, name, layers.tolerance)] if isinstance(model, Transformer) else []
    )
    beside.append(_padded_theirs(model, user_module, sentences, name, layers.tolerance))
    return [Check(name, True, about, error), *_narrowed(layers), *beside], layers


def _narrowed(layers: Layers) -> Iterator[Check]:
    """Report user code that computes in float32 whatever the type of its weights: this limits the agreement."""
    if layers.narrow is None:
        return
    about = f"{layers.narrow.place} computes in float32 or less; compared as if it were float64"
    if layers.narrow.effect is not None:
        about += f". Its rounding changes logits by {layers.narrow.effect:.1e}"
    yield Check("float32", None, about, layers.narrow.effect)


def _compare_disturbed(
    reading: Reading,
    checkpoint: Checkpoint,
    reference: Reference,
    user_module: nn.Module,
    sentences: Sequence[Sentence],
    tolerance: float | None,
) -> Layers | None:
    """Compare both models with other norms and biases; None if the module rejects them, or arithmetic fails on them."""
    assert reading.family is not None
    used = {name: tensor for name, tensor in reading.weights.items() if not reading.family.ignores(name)}
    used = disturbed(used)
    weights = {**reading.weights, **used}
    try:
        model = replace(reading, weights=weights).checkpoint(checkpoint.tokenizers).build_model()
        module = reference(weights, checkpoint.config).eval()
        tensors = zip(_tensors(user_module), _tensors(module), strict=True)
        is_taken = any(not torch.equal(before, after) for before, after in tensors)
        if not is_taken or differing_weights(module, used):
            return None
        return compare_layers(model, module, reading.family, list(used), sentences, tolerance)
    except TfexportError:
        return None


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _prefixes(
    model: Transformer, user_module: nn.Module, sentences: Sequence[Sentence], name: str, tolerance: float
) -> Check:
    """Compare steps with a cache with the user's module, which runs again for every token."""
    source, target = max(sentences, key=lambda sentence: len(sentence[1]))
    src_ids, tgt_ids = torch.tensor([source]), torch.tensor([target])
    with torch.inference_mode():
        stepped = run_steps(model, src_ids, torch.tensor([len(source)]), tgt_ids)
    anew = [run_theirs(user_module, src_ids, tgt_ids[:, : n + 1])[:, -1] for n in range(len(target))]
    about = f"{len(target)} cached steps against {name} run again for each"
    return compared("steps", torch.stack(anew, 1), stepped, about, tolerance)


def _padded_theirs(
    model: Model, user_module: nn.Module, sentences: Sequence[Sentence], name: str, tolerance: float
) -> Check:
    """Compare a padded batch in both models. Decoding knows lengths, the user's module masks pad_id."""
    src_ids, src_len = padded_batch([list(source) for source, _ in sentences], model.config)
    tgt_ids, real = None, torch.ones(len(src_ids), dtype=torch.bool)
    if isinstance(model, Transformer):
        tgt_ids, tgt_len = padded_batch([list(target) for _, target in sentences], model.config)
        real = torch.arange(tgt_ids.shape[1]) < tgt_len[:, None]
    with torch.inference_mode():
        own_logits = run_ours(model, src_ids, src_len, tgt_ids)[real]
    return compared(
        "padded batch",
        run_theirs(user_module, src_ids, tgt_ids)[real],
        own_logits,
        f"in both: what the masks of {name} hide is pad_id",
        tolerance,
    )
