"""Parity of the peers: their tokens and logits against the float32 PyTorch reference on the CPU.

`tfexport.parity` compares one runtime in one setting. Here are many, so the reference decodes once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from peers import Peer, RuntimePeer

from tfexport.parity_report import LIMITS, Errors
from tfexport.runtimes.base import FloatArray, IntArray
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search import SearchOptions, pad, search

BATCH = 32

Outputs = Sequence[tuple[int, ...]]


class Reference:
    """What PyTorch gives in float32 on the CPU: tokens for each beam, and logits along its greedy output.

    Args:
        bleu: the score of outputs, where there are human translations.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        sources: Sequence[Sequence[int]],
        beams: Sequence[int],
        max_length: int,
        bleu: Callable[[Outputs], float] | None = None,
    ):
        self.sources, self.max_length, self.bleu = sources, max_length, bleu
        self.bos_id, self.pad_id = runtime.config.bos_id, runtime.config.pad_id
        self.outputs: dict[int, Outputs] = {
            beam: [
                hypotheses[0].ids
                for batch in _batches(sources, BATCH)
                for hypotheses in search(runtime, batch, self.options(beam))
            ]
            for beam in {1, *beams}
        }
        self.inputs = [[self.bos_id, *output[:-1]] for output in self.outputs[1]]
        self.logits: list[FloatArray] = []  # of a sentence: [tokens, vocab]
        for start in range(0, len(sources), BATCH):
            inputs = self.inputs[start : start + BATCH]
            tgt_ids, tgt_len = pad(inputs, self.pad_id)
            forced = runtime.teacher_forced(*pad(sources[start : start + BATCH], self.pad_id), tgt_ids)
            self.logits += [row[:length] for row, length in zip(forced, tgt_len, strict=True)]

    def options(self, beam: int) -> SearchOptions:
        return SearchOptions(beam=beam, max_length=self.max_length)


def agreement(peer: Peer, reference: Reference, batch: int, beam: int) -> dict[str, Any]:
    """One row of the parity table: how far `peer` agrees with `reference` in batches of `batch`.

    Logits are compared teacher-forced, with the same tokens for every beam of a sentence. A peer that has no step of its
    own is compared by its tokens alone.
    """
    found = [ids for part in _batches(reference.sources, batch) for ids in peer.decode(part, reference.options(beam))]
    wanted = reference.outputs[beam]
    row: dict[str, Any] = {
        "identical": sum(one == other for one, other in zip(found, wanted, strict=True)),
        "sentences": len(wanted),
        "bleu": reference.bleu(found) if reference.bleu else None,
        "bleu_reference": reference.bleu(wanted) if reference.bleu else None,
    }
    if not isinstance(peer, RuntimePeer):
        return {**row, "logits_max_error": None, "top1_agree": None, "steps": None, "passed": None}
    errors, agree, steps = _forced(peer, reference, batch, beam)
    limits = LIMITS[peer.precision]
    passed = (
        errors.max <= limits.error
        and agree >= limits.top1 * steps
        and row["identical"] >= limits.identical * row["sentences"]
    )
    largest = errors.max if np.isfinite(errors.max) else "not finite"  # JSON has no NaN
    return {**row, "logits_max_error": largest, "top1_agree": agree, "steps": steps, "passed": passed}


def _forced(peer: RuntimePeer, reference: Reference, batch: int, beam: int) -> tuple[Errors, int, int]:
    """Errors of all logits, steps with the reference's best token, and steps."""
    errors, agree, steps = Errors(), 0, 0
    for start in range(0, len(reference.sources), batch):
        part = slice(start, start + batch)
        tgt_ids, tgt_len = pad(reference.inputs[part], reference.pad_id)
        tokens, lengths = np.repeat(tgt_ids, beam, axis=0), np.repeat(tgt_len, beam)
        state = peer.runtime.encode(*pad(reference.sources[part], reference.pad_id), beam=beam)
        for position in range(tokens.shape[1]):
            got, state = peer.runtime.step(state, tokens[:, position])
            live = np.flatnonzero(position < lengths)
            wanted = _at(reference.logits[part], live // beam, position)
            errors.add(wanted, got[live])
            agree += int((wanted.argmax(-1) == got[live].argmax(-1)).sum())
            steps += len(live)
    return errors, agree, steps


def _at(logits: Sequence[FloatArray], sentences: IntArray, position: int) -> FloatArray:
    return np.stack([logits[sentence][position] for sentence in sentences])


def _batches(sources: Sequence[Sequence[int]], size: int) -> Iterator[Sequence[Sequence[int]]]:
    for start in range(0, len(sources), size):
        yield sources[start : start + size]
