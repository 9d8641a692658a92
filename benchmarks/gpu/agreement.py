"""Parity of the peers: their tokens against those of PyTorch in float32 on the CPU, their logits against float64.

`tfexport.parity` compares one runtime in one setting. Here are many, so the reference decodes once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.peers.decoders import Peer, RuntimePeer
from tfexport.graph_checks.rounding import Rounding
from tfexport.runtimes.outputs import FloatArray, IntArray
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, pad, search
from tfexport.search.token_rules import log_softmax
from tfexport.verification.reference_outputs import as_inputs
from tfexport.verification.report import LIMITS

BATCH = 32

Outputs = Sequence[tuple[int, ...]]


class Reference:
    """What PyTorch gives on the CPU: tokens for each beam, and logits along its greedy output in float64, with the distance
    of those in float32 from them.

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
        self.runtime, self.pad_id = runtime, runtime.config.pad_id
        self.outputs: dict[int, Outputs] = {
            beam: [
                hypotheses[0].ids
                for batch in _batches(sources, BATCH)
                for hypotheses in search(runtime, batch, self.options(beam))
            ]
            for beam in {1, *beams}
        }
        self.inputs = [[runtime.config.bos_id, *output[:-1]] for output in self.outputs[1]]
        self.logits = self._forced(runtime.in_float64(), self.outputs[1])
        """Of a sentence: [tokens, vocab]."""
        own = self._forced(runtime.in_float32(), self.outputs[1])
        self.own = [np.abs(one - exact).max(axis=-1) for one, exact in zip(own, self.logits, strict=True)]
        """The largest distance of a logit in float32: [tokens]."""

    def _forced(self, runtime: TorchRuntime, outputs: Outputs) -> list[FloatArray]:
        found: list[FloatArray] = []
        for start in range(0, len(outputs), BATCH):
            part = slice(start, start + BATCH)
            tgt_ids, tgt_len = as_inputs(runtime.config, outputs[part])
            forced = runtime.teacher_forced(*pad(self.sources[part], self.pad_id), tgt_ids)
            found += [row[:length] for row, length in zip(forced, tgt_len, strict=True)]
        return found

    def losses(self, outputs: Outputs, beam: int) -> list[float]:
        """By how much PyTorch prefers its own output of each sentence, in nats a token."""

        def means(outputs: Outputs) -> list[float]:
            logits = self._forced(self.runtime, outputs)
            return [
                float(log_softmax(rows)[np.arange(len(ids)), list(ids)].mean())
                for rows, ids in zip(logits, outputs, strict=True)
            ]

        wanted = self.outputs[beam]
        if list(outputs) == list(wanted):
            return [0.0] * len(wanted)
        return [one - other for one, other in zip(means(wanted), means(outputs), strict=True)]

    def options(self, beam: int) -> SearchOptions:
        return SearchOptions(beam=beam, max_length=self.max_length)


def agreement(peer: Peer, reference: Reference, batch: int, beam: int) -> dict[str, Any]:
    """One row of the parity table: how far `peer` agrees with `reference` in batches of `batch`.

    Logits are compared teacher-forced, with the same tokens for every beam of a sentence. A peer that has no step of its
    own is compared by its tokens alone. It passes within the limits of `tfexport parity`: in float32 those of rounding, and
    with the same tokens.
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
    if peer.precision == "float32":
        passed = errors.holds("float32") and agree == steps and row["identical"] == row["sentences"]
    else:
        losses = reference.losses(found, beam)
        passed = bool(
            np.isfinite(errors.error)
            and agree >= limits.top1 * steps
            and np.mean(losses) <= limits.loss
            and max(losses) <= limits.furthest
        )
    largest = errors.error if np.isfinite(errors.error) else "not finite"  # JSON has no NaN
    return {**row, "logits_max_error": largest, "top1_agree": agree, "steps": steps, "passed": passed}


def _forced(peer: RuntimePeer, reference: Reference, batch: int, beam: int) -> tuple[Rounding, int, int]:
    """Errors of all logits, steps with the reference's best token, and steps."""
    errors, agree, steps = Rounding(), 0, 0
    for start in range(0, len(reference.sources), batch):
        part = slice(start, start + batch)
        tgt_ids, tgt_len = pad(reference.inputs[part], reference.pad_id)
        tokens, lengths = np.repeat(tgt_ids, beam, axis=0), np.repeat(tgt_len, beam)
        state = peer.runtime.encode(*pad(reference.sources[part], reference.pad_id), beam=beam)
        for position in range(tokens.shape[1]):
            got, state = peer.runtime.step(state, tokens[:, position])
            live = np.flatnonzero(position < lengths)
            wanted = _at(reference.logits[part], live // beam, position)
            own = max(float(reference.own[part][sentence][position]) for sentence in live // beam)
            errors.add(float(np.abs(wanted - got[live]).max()), own, float(np.abs(wanted).max()))
            agree += int((wanted.argmax(-1) == got[live].argmax(-1)).sum())
            steps += len(live)
    return errors, agree, steps


def _at(logits: Sequence[FloatArray], sentences: IntArray, position: int) -> FloatArray:
    return np.stack([logits[sentence][position] for sentence in sentences])


def _batches(sources: Sequence[Sequence[int]], size: int) -> Iterator[Sequence[Sequence[int]]]:
    for start in range(0, len(sources), size):
        yield sources[start : start + size]
