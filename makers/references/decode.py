"""Naive greedy and beam search for one sentence: the whole model is run anew for every prefix."""

from collections.abc import Callable

import torch
from torch import Tensor

Model = Callable[[Tensor, Tensor], Tensor]
"""(src_ids [n, src], tgt_ids [n, tgt]) -> logits [n, tgt, vocab]"""


def next_log_probs(model: Model, src_ids: list[int], prefixes: list[list[int]]) -> list[list[float]]:
    """The log-probability of every token after each prefix, in float64. Prefixes start with bos and have one length."""
    with torch.no_grad():
        logits = model(torch.tensor([src_ids] * len(prefixes)), torch.tensor(prefixes))
        if len(logits) < len(prefixes):  # a scripted model that takes one sequence at a time
            logits = torch.cat([model(torch.tensor([src_ids]), torch.tensor([prefix])) for prefix in prefixes])
    return torch.log_softmax(logits[:, -1].double(), dim=-1).tolist()


def greedy(model: Model, src_ids: list[int], *, bos: int, eos: int, max_length: int) -> list[int]:
    """The most probable next token (the lowest id of equals), until eos or until there are max_length tokens.

    The result leaves bos out, and ends in eos if eos came.
    """
    tokens: list[int] = []
    while len(tokens) < max_length and eos not in tokens:
        [log_probs] = next_log_probs(model, src_ids, [[bos, *tokens]])
        tokens.append(log_probs.index(max(log_probs)))
    return tokens


def beam(
    model: Model, src_ids: list[int], *, bos: int, eos: int, max_length: int, beam: int, length_penalty: float
) -> list[tuple[list[int], float]]:
    """The n-best list, n = beam, best first: (tokens without bos, score).

    The score of n tokens, eos counted, is the sum of their log-probabilities / ((5 + n) / 6) ** length_penalty.
    A hypothesis that max_length cut short has no eos, and is scored all the same.
    """

    def score(total: float, n: int) -> float:
        return total / ((5 + n) / 6) ** length_penalty

    live: list[tuple[list[int], float]] = [([], 0.0)]  # (tokens, sum of log-probabilities)
    finished: list[tuple[list[int], float]] = []  # (tokens, score), best first, at most `beam`
    for n in range(1, max_length + 1):
        found = next_log_probs(model, src_ids, [[bos, *tokens] for tokens, _ in live])
        candidates = [
            (total + log_prob, index, token)
            for index, ((_, total), log_probs) in enumerate(zip(live, found, strict=True))
            for token, log_prob in enumerate(log_probs)
        ]
        # Highest sum first; of equal sums, the lower live hypothesis first, then the lower token.
        candidates.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))

        continued: list[tuple[list[int], float]] = []
        for rank, (total, index, token) in enumerate(candidates[: 2 * beam]):
            tokens = [*live[index][0], token]
            if token != eos and len(continued) < beam:
                continued.append((tokens, total))
            elif token == eos and rank < beam:
                finished.append((tokens, score(total, n)))
        live = continued
        if n == max_length:
            finished += [(tokens, score(total, n)) for tokens, total in live]
        finished.sort(key=lambda hypothesis: -hypothesis[1])  # stable: of equals, the one that was there first
        finished = finished[:beam]

        # The first live hypothesis has the highest sum, and all of them have the same length.
        if len(finished) == beam and score(live[0][1], n) <= finished[-1][1]:
            break
    return finished
