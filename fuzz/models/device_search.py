"""Random searches that a runtime makes by itself, eight steps at once, beside the same searches on the host.

    python -m fuzz.models.device_search [--models 100] [--searches 20] [--seed 0]

Models are random; some tell equal logits for several tokens. Searches are greedy or have beams up to 16, and differ in
n-best lists, profile, limits, suppressed tokens, prefixes and batches. Every other model decodes on a device that does
nothing before it is waited for.

Half of the models decode in buffers of one size. There tokens and scores have to be the same to the last bit. The others
decode in buffers that grow and shrink, at other steps than on the host, and products have other last bits for other numbers
of rows: scores have to be close, and other tokens have to be as probable as those of the host. So it is with beams that need
more than 17 best tokens, whose log-probabilities the host computes in float64. The exit code is 1 where something differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuzz.models.random_models import random_config, random_model
from makers.ahead import ahead_runtime, late_runtime, on_host
from tfexport.bundle.reader import open_bundle
from tfexport.bundle.writer import write_manifest
from tfexport.config import ModelConfig
from tfexport.contract import BEST_TOKENS
from tfexport.errors import TfexportError
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.weights import write_weights
from tfexport.models.transformer import Transformer
from tfexport.runtimes.buckets import Buckets
from tfexport.search.profiles import PROFILES
from tfexport.search.search import Hypothesis, SearchOptions, Source, search
from tfexport.verification.parity import random_sources


def buckets_of(config: ModelConfig, *, one: bool) -> Buckets:
    """Sizes of buffers: one of each kind, or a few small ones."""
    if one:
        return Buckets((72,), (16,), (config.max_source_length,))
    src = (*(size for size in (5, 12) if size < config.max_source_length), config.max_source_length)
    return Buckets((8, 24, 72), (1, 2, 4, 8, 16), src, shrink=2)


def has_ties(seed: int) -> bool:
    """Whether the model of this seed tells equal logits for several tokens."""
    return seed % 3 == 0


def tied(model: Transformer, seed: int) -> Transformer:
    """`model` with pairs of tokens that it cannot tell apart, so that their logits are equal."""
    generator = np.random.default_rng(seed)
    matrix, bias = model.output_matrix().data, model.output_bias
    for one, other in generator.integers(4, len(matrix), (len(matrix) // 2, 2)).tolist():
        matrix[one] = matrix[other]
        if bias is not None:
            bias.data[one] = bias.data[other]
    return model


def write_model(seed: int, folder: Path) -> Path:
    """A bundle of a random model with at least a few words and positions."""
    chosen = random.Random(seed)
    config = random_config(chosen)
    while config.tgt_vocab_size < 8 or config.max_source_length < 7 or config.max_target_length < 9:
        config = random_config(chosen)
    model = random_model(config, seed)
    if has_ties(seed):
        model = tied(model, seed)
    bundle = folder / "bundle"
    bundle.mkdir()
    write_weights(model, "float32", bundle)
    graphs = write_graphs(config, "float32", bundle)
    write_manifest(bundle, config, graphs, {"source": {"sha256": "", "family": "native", "given": {}}})
    return bundle


def random_options(chosen: random.Random, vocab: int) -> SearchOptions:
    """A search that may run on the device."""
    beam = chosen.choice((1, 1, 2, 3, 4, 5, 8, 9, 12, 16))
    profile = chosen.choice(sorted(set(PROFILES) - {"marian"}))
    given: dict[str, Any] = {
        "beam": beam,
        "nbest": chosen.randint(1, beam),
        "max_length": chosen.choice((2, 5, 13, 30, 60)),
        "token_scores": chosen.random() < 0.3,
    }
    if chosen.random() < 0.3:
        given["max_length_ratio"] = chosen.choice((0.5, 1.0, 1.7))
    if chosen.random() < 0.3:
        given["length_penalty"] = chosen.choice((-0.5, 0.0, 0.8))
    if chosen.random() < 0.3:
        given["min_length"] = chosen.randint(0, given["max_length"] - 1)
    if chosen.random() < 0.3:
        given["suppress"] = tuple(sorted({chosen.randrange(4, vocab) for _ in range(3)}))
    if beam > 1 and profile not in ("joeynmt",) and chosen.random() < 0.2:
        given["patience"] = 2.0
    if chosen.random() < 0.2:
        given["end_tokens"] = (chosen.randrange(4, vocab),)
        given["suppress"] = tuple(set(given.get("suppress", ())) - {*given["end_tokens"]})
    return SearchOptions.for_profile(profile, **given)


def check(seed: int, searches: int, folder: Path) -> list[str]:
    """What differs in `searches` random searches of a random model, in words."""
    chosen = random.Random(seed)
    bundle = write_model(seed, folder)
    make = late_runtime if seed % 2 else ahead_runtime
    config = open_bundle(bundle).config
    one_size = seed % 4 < 2
    runtime = make(bundle, folder, buckets_of(config, one=one_size))
    limit = min(config.max_source_length, 40)
    problems = []
    for number in range(searches):
        options = random_options(chosen, config.tgt_vocab_size)
        plain = [source[:limit] for source in random_sources(config, chosen.randint(1, 9), seed=1000 * seed + number)]
        sources: Sequence[Any] = plain
        if chosen.random() < 0.2:
            sources = [Source(source, prefix=(chosen.randrange(4, config.tgt_vocab_size),)) for source in plain]
        with np.errstate(all="raise", under="ignore"):
            ahead, host = outcome(search, runtime, sources, options), outcome(on_host, runtime, sources, options)
        needed = (2 + len(options.end_tokens)) * options.beam + len(options.suppress) + 4
        log_prob = partial(host_log_prob, runtime, plain, options.end_tokens)
        exact = one_size and needed <= BEST_TOKENS
        if options.profile == "joeynmt" and not exact:
            # A finished hypothesis keeps its place in this beam, so a tie at the edge of the beam may remove it.
            ahead, host = (outputs if isinstance(outputs, str) else best_of(outputs) for outputs in (ahead, host))
        if not same(ahead, host, exact=exact, log_prob=log_prob):
            problems.append(f"seed {seed}, search {number}: {options}\n    ahead {ahead}\n    on the host {host}")
    return problems


def best_of(outputs: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
    """The best hypothesis of each source."""
    return [hypotheses[:1] for hypotheses in outputs]


def outcome(run: Any, runtime: Any, sources: Sequence[Any], options: SearchOptions) -> Any:
    """What a search finds, or the error that it raises."""
    try:
        return run(runtime, sources, options)
    except TfexportError as error:
        return str(error)


def host_log_prob(
    runtime: Any, sources: Sequence[Any], end_tokens: tuple[int, ...], index: int, hypothesis: Hypothesis
) -> float:
    """The log-probability of a hypothesis of a source, from a search on the host that is given all its tokens."""
    given = Source(sources[index], prefix=hypothesis.ids)
    options = SearchOptions(max_length=len(hypothesis.ids), end_tokens=end_tokens)
    return on_host(runtime, [given], options)[0][0].log_prob


def same(ahead: Any, host: Any, *, exact: bool, log_prob: Callable[[int, Hypothesis], float]) -> bool:
    """Whether two outcomes are the same: to the last bit, or as far as scores that are close can tell.

    Scores that are close may change places with each other, and with one that the list or the beam leaves out. So other
    tokens are right if they are as probable as those of the host.

    Args:
        log_prob: computes the log-probability of a hypothesis of the source with this number, as of given tokens: profiles
            differ in what they do with the probability of tokens that a search excludes.
    """
    if exact or isinstance(ahead, str) or isinstance(host, str):
        return bool(ahead == host)
    for number, (left, right) in enumerate(zip(ahead, host, strict=True)):
        if len({h.ids for h in left}) != len(right) or not _are_close(
            [h.score for h in left], [h.score for h in right]
        ):
            return False
        other = [pair for pair in zip(left, right, strict=True) if pair[0].ids != pair[1].ids]
        if not _are_close(*([log_prob(number, pair[side]) for pair in other] for side in (0, 1))):
            return False
    return True


def _are_close(values: list[float], expected: list[float]) -> bool:
    return np.allclose(values, expected, rtol=1e-5, atol=1e-4)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random searches on the device and on the host.")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--searches", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, bad = time.monotonic(), 0
    for seed in range(options.seed, options.seed + options.models):
        with tempfile.TemporaryDirectory() as folder:
            for line in check(seed, options.searches, Path(folder)):
                bad += 1
                print(line, flush=True)
    total = options.models * options.searches
    print(f"{total:,} searches of {options.models} models, {bad} that differ; {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
