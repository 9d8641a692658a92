"""Is a checkpoint what its family says? Checked in PyTorch, before anything is exported.

The canonical model is held against itself (a step with its cache against the whole target at once, sentences alone against
sentences beside others) and, where a family file gives it, against the module that the weights were trained in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.errors import CheckpointError, TfexportError
from tfexport.models.checkpoint import Checkpoint, Reading, read_checkpoint
from tfexport.models.native import Tokenizers
from tfexport.models.recognition import Chosen
from tfexport.models.toolkit import TextOptions
from tfexport.models.transformer import KeyValue, Transformer, write_in_place
from tfexport.probe_layers import TOLERANCE, Layers, Sentence, compare_layers, differing_weights, disturbed, run_theirs
from tfexport.search import pad
from tfexport.selfcheck import relative_error

MOST_SENTENCES = 16
_SENTENCES, _TARGET, _STEPS = 6, 24, 24
_MOST_POSITIONS, _MOST_LOGITS = 1024, 2**26
"""Of the one long output: attention over it is quadratic, and its logits are kept."""

_FLOAT16 = 65504.0

Sources = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool | None
    """None where it is only told."""
    about: str
    error: float | None = None
    """The largest relative difference, where numbers were compared."""


@dataclass(frozen=True)
class Probe:
    """What became of a checkpoint."""

    path: Path
    family: str
    checks: tuple[Check, ...]
    layers: Layers | None
    """The comparison with the user's own module, where there is one."""

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; an error that is no number is None."""

        def finite(error: float | None) -> float | None:
            return error if error is not None and np.isfinite(error) else None

        values = [] if self.layers is None else self.layers.values
        first = None if self.layers is None or self.layers.first is None else vars(self.layers.first)
        return {
            "path": str(self.path),
            "family": self.family,
            "passed": self.passed,
            "checks": [{**vars(check), "error": finite(check.error)} for check in self.checks],
            "first": first and {**first, "error": finite(first["error"])},
            "values": [{**vars(value), "error": finite(value.error)} for value in values],
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
    """Check a checkpoint, which is given as to `load_checkpoint`.

    Args:
        sources_of: encoder ids to compare on, at most `MOST_SENTENCES`; by default random ones.
        tolerance: takes the place of those of the comparison with the user's module (`probe_layers.TOLERANCE`).

    Raises:
        TfexportError: the file cannot be read, what it does not tell has not been given, or it is a classifier's.
    """
    reading = read_checkpoint(path, hints, family, text)
    inspection = reading.inspection(tokenizers)
    if inspection.problems and not inspection.missing:
        return Probe(path, inspection.family, (Check("weights", False, "; ".join(inspection.problems)),), None)
    checkpoint = reading.checkpoint(tokenizers)
    model = checkpoint.build_model()
    if not isinstance(model, Transformer):
        raise CheckpointError(f"{path} is an encoder classifier, which has no decoder to check. Export it.")
    sentences = _sentences(model.config, sources_of(checkpoint) if sources_of else None)
    checks = [*_facts(reading, checkpoint), *_own_checks(model, sentences)]
    layers = None
    if reading.family is not None and reading.family.reference is not None:
        reference = reading.family.reference
        found, layers = _beside_theirs(model, reading, checkpoint, reference, sentences, tolerance)
        checks += found
    return Probe(path, checkpoint.family, tuple(checks), layers)


def _sentences(config: ModelConfig, sources: Sources | None) -> list[Sentence]:
    """Sources, and random targets that begin with bos."""
    random = np.random.default_rng(0)
    if sources is None:
        longest = min(40, config.max_source_length)
        lengths = [1, longest, *random.integers(1, longest + 1, _SENTENCES - 2).tolist()]
        sources = [_ids(random, config.src_vocab_size, config.pad_id, length) for length in lengths]
    most = min(_TARGET, config.max_target_length)
    lengths = [most, *random.integers(1, most + 1, len(sources) - 1).tolist()]
    return [
        (source, [config.bos_id, *_ids(random, config.tgt_vocab_size, config.pad_id, length - 1)])
        for source, length in zip(sources[:MOST_SENTENCES], lengths, strict=False)
    ]


def _ids(random: np.random.Generator, vocab: int, pad_id: int, length: int) -> list[int]:
    """Random ids without padding, which the user's module would hide."""
    return [int(i) for i in (random.integers(1, max(vocab, 2), length) + pad_id) % vocab]


def _facts(reading: Reading, checkpoint: Checkpoint) -> Iterator[Check]:
    config, count = checkpoint.config, sum(tensor.numel() for tensor in reading.weights.values())
    yield Check("weights", True, f"{len(reading.weights)} tensors of {count:,} numbers, complete and finite")

    def theirs(name: str) -> str:
        return name if reading.family is None else reading.family.foreign_name(name)

    target = "encoder.tokens.weight" if config.tie_source_target else "decoder.tokens.weight"
    tied = [f"source and target embeddings are one ({theirs('encoder.tokens.weight')})"] * config.tie_source_target
    tied += [f"the output layer is the target embedding ({theirs(target)})"] * config.tie_output
    yield Check("tied weights", None, "; ".join(tied) or "none: source, target and output have matrices of their own")
    yield Check(
        "positions",
        None,
        f"{config.positions}: sources to {config.max_source_length} ids, outputs to {config.max_target_length} tokens; "
        "decode marks longer sources too_long, and ends longer outputs there (length_limit)",
    )
    told = [
        name for name in ("n_heads", *(reading.family.asked if reading.family else ())) if name not in reading.fields
    ]
    if told:
        values = ", ".join(f"{name} {getattr(config, name)}" for name in told)
        yield Check("told by you", None, f"{values}: the file says nothing of it")
    odd = checkpoint.odd
    wrong = [problem for problem in odd if "_id is" in problem and not reading.describes_text]
    ids = ", ".join(f"{kind} {_id(checkpoint, kind)}" for kind in ("unk", "pad", "bos", "eos"))
    yield Check("special ids", not wrong, "; ".join([ids, *odd]))


def _id(checkpoint: Checkpoint, kind: str) -> str:
    """The id, and whether a vocabulary says the same."""
    number = getattr(checkpoint.config, f"{kind}_id")
    sides = (checkpoint.tokenizers.source, checkpoint.tokenizers.target)
    told = any(side is not None and side.special_id(kind) == number for side in sides)
    return f"{number if number >= 0 else 'none'}{' (as in the vocabulary)' * told}"


def _own_checks(model: Transformer, sentences: Sequence[Sentence]) -> Iterator[Check]:
    config = model.config
    sources, targets = [list(source) for source, _ in sentences], [list(target) for _, target in sentences]
    (src_ids, src_len), (tgt_ids, tgt_len) = _padded(sources, config), _padded(targets, config)
    real = torch.arange(tgt_ids.shape[1]) < tgt_len[:, None]
    with torch.inference_mode(), _largest(model) as sizes:
        model(src_ids, src_len, tgt_ids)
    single, model = model, copy.deepcopy(model).double()  # in which what differs is no rounding
    with torch.inference_mode():
        whole = model(src_ids, src_len, tgt_ids)
        stepped = _stepped(model, src_ids, src_len, tgt_ids)
        alone = torch.cat([_alone(model, source, target)[0] for source, target in sentences])
        noisy = torch.where(
            torch.arange(src_ids.shape[1]) < src_len[:, None], src_ids, config.src_vocab_size - 1 - src_ids
        )
        garbage = model(noisy, src_len, tgt_ids)
        beams = _beams(model, src_ids, src_len, tgt_ids)
    yield _compared(
        "cached step", whole[real], stepped[real], f"{int(real.sum())} steps with a cache against whole targets at once"
    )
    yield _longest(model, sentences)
    yield _compared("padding", whole, garbage, "other ids behind the sources")
    yield _compared("batch", alone, whole[real], f"{len(sentences)} sentences each alone against all in one batch")
    yield _compared("beams", *beams, "4 hypotheses over one set of cross keys and values against one for each")
    yield _half_precision(single, sizes)


def _compared(name: str, wanted: Tensor, found: Tensor, about: str) -> Check:
    error = relative_error(wanted, found)
    return Check(name, error <= TOLERANCE[wanted.dtype], about, error)


def _padded(ids: list[list[int]], config: ModelConfig) -> tuple[Tensor, Tensor]:
    padded, lengths = pad(ids, config.pad_id)
    return torch.from_numpy(padded), torch.from_numpy(lengths)


def _alone(model: Transformer, source: Sequence[int], target: Sequence[int]) -> Tensor:
    return model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([target]))


def _stepped(model: Transformer, src_ids: Tensor, src_len: Tensor, tgt_ids: Tensor) -> Tensor:
    cross = model.encode(src_ids, src_len)
    past, logits = model.empty_cache(*tgt_ids.shape), []
    for position, tokens in enumerate(tgt_ids.T):
        places = torch.full_like(tokens, position)
        found, past = model.step(tokens, places, src_len, past, cross, write_in_place)
        logits.append(found)
    return torch.stack(logits, 1)


def _longest(model: Transformer, sentences: Sequence[Sentence]) -> Check:
    """One output of as many tokens as there are positions, from the longest source: steps here and there, and the last.

    The cache is that of the whole target, so that thousands of positions take seconds.
    """
    config = model.config
    most = max(1, min(_MOST_POSITIONS, _MOST_LOGITS // config.tgt_vocab_size))
    n_source, n_target = min(config.max_source_length, most), min(config.max_target_length, most)
    source = max(([*source] for source, _ in sentences), key=len)
    target = max(([*target] for _, target in sentences), key=len)
    source, target = (source * n_source)[:n_source], (target * n_target)[:n_target]
    places = sorted({*np.linspace(0, n_target - 1, _STEPS).astype(int).tolist()})
    src_len = torch.tensor([n_source])
    with torch.inference_mode(), _self_attended(model) as past:
        whole = _alone(model, source, target)[:, places]
    with torch.inference_mode():
        cross = model.encode(torch.tensor([source]), src_len)
        steps = [
            model.step(torch.tensor([target[place]]), torch.tensor([place]), src_len, past, cross)[0]
            for place in places
        ]
    cut = f" (of {config.max_source_length} and {config.max_target_length})"
    is_cut = (n_source, n_target) != (config.max_source_length, config.max_target_length)
    about = (
        f"a source of {n_source} ids; {len(places)} steps throughout {n_target} tokens, the last one too{cut * is_cut}"
    )
    return _compared("longest", whole, torch.stack(steps, 1), about)


@contextmanager
def _self_attended(model: Transformer) -> Iterator[list[KeyValue]]:
    """Within it, the keys and values of the decoder's self-attentions, [1, heads, tgt, head_dim] a layer."""
    past: list[KeyValue] = []
    made: list[Tensor] = []

    def keep(module: nn.Module, given: Any, states: Tensor) -> None:
        made.append(states.reshape(*states.shape[:2], model.config.n_heads, -1).transpose(1, 2))
        if len(made) % 2 == 0:
            past.append(KeyValue(made[-2], made[-1]))

    attentions = [layer.self_attention for layer in model.decoder.layers]
    handles = [layer.register_forward_hook(keep) for each in attentions for layer in (each.key, each.value)]
    try:
        yield past
    finally:
        for handle in handles:
            handle.remove()


def _beams(model: Transformer, src_ids: Tensor, src_len: Tensor, tgt_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of a second token, with cross keys and values of their own for each hypothesis, and with shared ones."""
    beam, rows = 4, 4 * len(src_ids)
    first = torch.full((rows,), model.config.bos_id)
    second = torch.arange(rows) % model.config.tgt_vocab_size
    cross = model.encode(src_ids, src_len)
    repeated = [KeyValue(*(tensor.repeat_interleave(beam, 0) for tensor in memory)) for memory in cross]
    found = []
    for lengths, memory in ((src_len.repeat_interleave(beam), repeated), (src_len, cross)):
        past = model.empty_cache(rows, 2)
        for position, tokens in enumerate((first, second)):
            logits, past = model.step(tokens, torch.full((rows,), position), lengths, past, memory)
        found.append(logits)
    return found[0], found[1]


@contextmanager
def _largest(model: nn.Module) -> Iterator[dict[str, float]]:
    """Within it, the largest number that each module of a model gives, by its path."""
    sizes: dict[str, float] = {}

    def note(path: str, module: nn.Module, given: Any, made: Any) -> None:
        if isinstance(made, Tensor) and made.numel():
            sizes[path] = float(np.maximum(sizes.get(path, 0.0), float(made.abs().max())))

    handles = [module.register_forward_hook(partial(note, path)) for path, module in model.named_modules() if path]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()


def _half_precision(model: Transformer, sizes: Mapping[str, float]) -> Check:
    weights = {name: float(tensor.detach().abs().max()) for name, tensor in model.named_parameters() if tensor.numel()}
    large = [name for name, size in {**weights, **sizes}.items() if not size <= _FLOAT16]
    if large:
        return Check(
            "float16", None, f"overflows in {', '.join(large[:3])}: export in fp32 or bf16, or --precision auto-fp16"
        )
    worst = max(sizes, key=lambda path: sizes[path])
    return Check("float16", None, f"the largest state is {sizes[worst]:.4g} ({worst}): fits, to {_FLOAT16:.0f}")


def _beside_theirs(
    model: Transformer,
    reading: Reading,
    checkpoint: Checkpoint,
    reference: Callable[[Mapping[str, Tensor], ModelConfig], nn.Module],
    sentences: Sequence[Sentence],
    tolerance: float | None,
) -> tuple[list[Check], Layers | None]:
    """The canonical model beside the user's module: weights, layers, prefixes, padded batches."""
    family = reading.family
    assert family is not None
    names = [name for name in reading.weights if not family.ignores(name)]
    theirs = reference(reading.weights, checkpoint.config).eval()
    name, kind = (
        ("torch.nn", "PyTorch's own layers") if family.reference_as_told else ("reference", type(theirs).__name__)
    )
    changed = differing_weights(theirs, {name: reading.weights[name] for name in names})
    if changed:
        about = (
            f"the module holds other numbers than the file: {', '.join(changed[:3])}. Load the weights in `reference`."
        )
        return [Check(name, False, about)], None
    layers = compare_layers(model, theirs, family, names, sentences, tolerance)
    error, how, where = layers.logits, ": its own vectors could not be changed", ""
    if layers.first is None and (pair := _disturbed_pair(reading, checkpoint, reference, theirs, names)):
        noisy = compare_layers(*pair, family, names, sentences, tolerance)
        error, how = float(np.maximum(error, noisy.logits)), ", and with random numbers added to norms and biases"
        if noisy.first is not None:
            layers, where = noisy, f"{how.removeprefix(', and')} (those of the file hide it)"
    first = layers.first
    if first is not None:
        about = f"{first.ours} is the first to differ{where}; in {kind}: {first.theirs}. Usually {first.hint}"
        return [Check(name, False, about, first.error)], layers
    dtype = str(layers.dtype).removeprefix("torch.")
    told = ", with what you told of the file, which it cannot check" * family.reference_as_told
    about = (
        f"logits, {len(layers.values) - 1} values within, {len(sentences)} sentences: as {kind} "
        f"{'have' if family.reference_as_told else 'has'} them, in {dtype}{told}; weights as they are{how}"
    )
    model, theirs = copy.deepcopy(model).to(layers.dtype), copy.deepcopy(theirs).to(layers.dtype)
    beside = [_prefixes(model, theirs, sentences, name), _padded_theirs(model, theirs, sentences, name)]
    return [Check(name, True, about, error), *beside], layers


def _disturbed_pair(
    reading: Reading,
    checkpoint: Checkpoint,
    reference: Callable[[Mapping[str, Tensor], ModelConfig], nn.Module],
    theirs: nn.Module,
    names: Sequence[str],
) -> tuple[Transformer, nn.Module] | None:
    """Both models with other norms and biases; None where the module does not take them, or arithmetic fails on them."""
    weights = {**reading.weights, **disturbed({name: reading.weights[name] for name in names})}
    try:
        model = replace(reading, weights=weights).checkpoint(checkpoint.tokenizers).build_model()
        module = reference(weights, checkpoint.config).eval()
    except TfexportError:
        return None
    states = zip(theirs.state_dict().values(), module.state_dict().values(), strict=True)
    is_taken = any(not torch.equal(before, after) for before, after in states)
    if not is_taken or differing_weights(module, {name: weights[name] for name in names}):
        return None
    assert isinstance(model, Transformer)
    return model, module


def _prefixes(model: Transformer, theirs: nn.Module, sentences: Sequence[Sentence], name: str) -> Check:
    """Steps with a cache against their module, run anew for every token: what decoding is."""
    source, target = max(sentences, key=lambda sentence: len(sentence[1]))
    src_ids, tgt_ids = torch.tensor([source]), torch.tensor([target])
    with torch.inference_mode():
        stepped = _stepped(model, src_ids, torch.tensor([len(source)]), tgt_ids)
    anew = [run_theirs(theirs, src_ids, tgt_ids[:, : n + 1])[:, -1] for n in range(len(target))]
    return _compared(
        "steps", torch.stack(anew, 1), stepped, f"{len(target)} cached steps against {name} run anew for each"
    )


def _padded_theirs(model: Transformer, theirs: nn.Module, sentences: Sequence[Sentence], name: str) -> Check:
    """A padded batch in both; decoding knows lengths, their module looks for pad_id."""
    sources, targets = [list(source) for source, _ in sentences], [list(target) for _, target in sentences]
    (src_ids, src_len), (tgt_ids, tgt_len) = _padded(sources, model.config), _padded(targets, model.config)
    real = torch.arange(tgt_ids.shape[1]) < tgt_len[:, None]
    with torch.inference_mode():
        found = model(src_ids, src_len, tgt_ids)[real]
    return _compared(
        "padded batch",
        run_theirs(theirs, src_ids, tgt_ids)[real],
        found,
        f"in both: what the masks of {name} hide is pad_id",
    )
