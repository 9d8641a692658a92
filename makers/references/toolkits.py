"""Beam search as fairseq, Marian and JoeyNMT document it, for one sentence, in plain Python: what the profiles are held
against where the toolkit itself cannot be installed.

Nothing here is shared with the search under test: hypotheses are tuples, and a step is a sort of all continuations.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Ids = tuple[int, ...]
NextLogProbs = Callable[[list[Ids]], list[list[float]]]
"""The tokens of outputs so far, all of one length -> for each, the log-probability of every token that may follow."""
NBest = list[tuple[Ids, float]]
"""Best first: the tokens, with eos where it came, and the score."""


def continuations(model: NextLogProbs, live: NBest, *, never: set[int], only: int | None = None) -> NBest:
    """Every token after every live hypothesis, best sum first; without `never`, and `only` one token if it is said."""
    found = [
        ((*tokens, token), total + log_prob)
        for (tokens, total), log_probs in zip(live, model([tokens for tokens, _ in live]), strict=True)
        for token, log_prob in enumerate(log_probs)
        if token not in never and only in (None, token) and log_prob > -math.inf
    ]
    return sorted(found, key=lambda hypothesis: -hypothesis[1])


def fairseq(
    model: NextLogProbs, *, eos: int, pad: int, beam: int, max_len: int, min_len: int = 1, lenpen: float = 1.0
) -> NBest:
    """`fairseq-generate --beam --lenpen --min-len --max-len-b`, where max_len counts the tokens before eos.

    - pad is never chosen, eos not before min_len tokens, and nothing but eos after max_len of them;
    - of the 2 * beam best continuations, those among the first `beam` that end in eos are finished, as long as there are
      fewer than `beam` finished ones, and the best `beam` of those without eos are continued;
    - a sentence is done with `beam` finished hypotheses;
    - the score is the sum of the log-probabilities, eos included, / (number of tokens, eos included) ** lenpen.
    """
    live: NBest = [((), 0.0)]
    finished: NBest = []
    for step in range(max_len + 1):
        never = {pad, eos} if step < min_len else {pad}
        candidates = continuations(model, live, never=never, only=eos if step == max_len else None)[: 2 * beam]
        for tokens, total in candidates[:beam]:
            if tokens[-1] == eos and len(finished) < beam:
                finished.append((tokens, total / (step + 1) ** lenpen))
        if len(finished) == beam:
            break
        live = [hypothesis for hypothesis in candidates if hypothesis[0][-1] != eos][:beam]
    return sorted(finished, key=lambda hypothesis: -hypothesis[1])


def marian(model: NextLogProbs, *, eos: int, unk: int, beam: int, max_length: int, normalize: float = 0.0) -> NBest:
    """`marian-decoder --beam-size --normalize`, with the limit that --max-length-factor sets.

    - the unknown word is never chosen (no --allow-unk);
    - the beam holds `beam` hypotheses less those that are finished: a finished one gives no place free;
    - a sentence is done when none is live; at the limit those that are live are finished as they are;
    - the score is the sum of the log-probabilities, eos included, / (number of tokens, eos included) ** normalize.
    """
    live: NBest = [((), 0.0)]
    finished: NBest = []
    width = beam
    for length in range(1, max_length + 1):
        best = continuations(model, live, never={unk})[:width]
        live = [hypothesis for hypothesis in best if hypothesis[0][-1] != eos]
        ended = best if length == max_length else [found for found in best if found[0][-1] == eos]
        finished += [(tokens, total / length**normalize) for tokens, total in ended]
        width = len(live)
        if not live:
            break
    return sorted(finished, key=lambda hypothesis: -hypothesis[1])


def joeynmt(
    model: NextLogProbs,
    *,
    eos: int,
    never: set[int],
    beam: int,
    max_output_length: int,
    beam_alpha: float = -1.0,
    min_output_length: int = 1,
) -> NBest:
    """`testing` of a JoeyNMT configuration: beam_size, beam_alpha, max_output_length and min_output_length.

    - bos, pad, separator and language tags (`never`) do not come, and eos not in the first min_output_length steps;
    - the best `beam` continuations are the next beam, in this order, also those that end in eos: what follows eos competes;
    - where a continuation's only eos is its last token, it is an output, as is at the limit one without any;
    - a sentence is done when each place of the beam has held an eos that had just come, at some step;
    - the score is the sum of the log-probabilities, eos included, / ((5 + number of tokens) / 6) ** beam_alpha where
      beam_alpha is above 0, and the sum elsewhere.
    """
    live: NBest = [((), 0.0)]
    finished: NBest = []
    ended: set[int] = set()
    for length in range(1, max_output_length + 1):
        live = continuations(model, live, never=never | {eos} if length <= min_output_length else never)[:beam]
        for place, (tokens, total) in enumerate(live):
            if tokens[-1] == eos:
                ended.add(place)
            if eos not in tokens[:-1] and (tokens[-1] == eos or length == max_output_length):
                finished.append((tokens, total / ((5 + length) / 6) ** max(beam_alpha, 0.0)))
        if len(ended) == beam:
            break
    return sorted(finished, key=lambda hypothesis: -hypothesis[1])
