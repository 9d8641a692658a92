"""The definition of the search graphs, sentence by sentence, and inputs for their checks: with many ties, missing
hypotheses, banned tokens, and ends."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from tfexport import contract, graph_contract
from tfexport.config import ModelConfig
from tfexport.graph_checks.cases_portable import Arrays, Case, Outputs
from tfexport.models.model import Model

ROLES = tuple(graph.role for graph in graph_contract.SEARCH_GRAPHS)


def case(graph: contract.GraphSpec, config: ModelConfig, sizes: Mapping[str, int], random: np.random.Generator) -> Case:
    """A random case of a search graph."""
    inputs = random_inputs(graph, config, sizes, random)

    def outputs(model: Model) -> Outputs:
        if graph.role == "best_tokens":
            return {"logits": torch.from_numpy(inputs["logits"])}  # the source of the best tokens
        arrays = greedy_search(inputs) if graph.role == "greedy_search" else beam_search(inputs)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    return Case(inputs, outputs)


def random_inputs(
    graph: contract.GraphSpec, config: ModelConfig, sizes: Mapping[str, int], random: np.random.Generator
) -> Arrays:
    """Inputs of a search graph for `batch` sentences with `beam` hypotheses."""
    batch, beam, cache, vocab = sizes["batch"], sizes["beam"], sizes["cache"], config.tgt_vocab_size
    rows, width = batch * beam, min(vocab, 2 * beam + 2)
    candidates = min(2 * beam, beam * (width - 1))
    if graph.role == "best_tokens":
        logits = random.standard_normal((rows, vocab), dtype=np.float32)
        return {"logits": logits, "places": np.zeros(width, dtype=np.float32)}
    steps = random.integers(0, 3, (rows, width)).cumsum(axis=1)
    ids = np.stack([random.permutation(vocab)[:width] for _ in range(rows)])
    bias = np.zeros(vocab, dtype=np.float32)
    if width > 2:
        bias[ids[0, 0]] = -np.inf
    inputs: Arrays = {"best.log_probs": (-steps / 4).astype(np.float32), "best.ids": ids, "bias": bias}
    if graph.role == "greedy_search":
        return inputs
    scores = -random.integers(0, 3, (batch, beam)).cumsum(axis=1) / 4
    if beam > 2:
        scores[0, 2:] = -np.inf
    leaving = np.zeros(vocab, dtype=np.float32)
    leaving[ids[:, 0][-1]] = -candidates
    return {
        **inputs,
        "scores": scores,
        "mask": random.integers(0, 2, (batch, 1, beam, cache)).astype(bool),
        "first_row": np.arange(batch)[:, None] * beam,
        "slots": np.arange(cache),
        "own": random.integers(0, cache, (beam, 1)),
        "leaving": leaving,
        "order": -np.arange(candidates, dtype=np.float32),
        "found": np.array([width]),
    }


def greedy_search(inputs: Arrays) -> Arrays:
    """The first best token of each row."""
    totals = inputs["best.log_probs"] + inputs["bias"][inputs["best.ids"]]
    place = totals.argmax(axis=1)[:, None]
    return {
        "next.tokens": np.take_along_axis(inputs["best.ids"], place, axis=1),
        "next.log_probs": np.take_along_axis(totals, place, axis=1),
    }


def beam_search(inputs: Arrays) -> Arrays:
    """The best continuations of each sentence. Equal ones are ordered by hypothesis, then by rank among its tokens."""
    batch, beam = inputs["scores"].shape
    shape, grid = (batch, len(inputs["order"])), (batch, beam)
    outputs: Arrays = {
        "candidates.log_probs": np.empty(shape),
        "candidates.parents": np.empty(shape, dtype=np.int64),
        "candidates.tokens": np.empty(shape, dtype=np.int64),
        "next.tokens": np.empty(grid, dtype=np.int64),
        "next.scores": np.empty(grid),
        "next.mask": np.zeros_like(inputs["mask"]),
    }
    for sentence in range(batch):
        ranked = []
        for hypothesis in range(beam):
            row = sentence * beam + hypothesis
            for place, token in enumerate(inputs["best.ids"][row].tolist()):
                log_prob = float(inputs["best.log_probs"][row, place]) + float(inputs["bias"][token])
                ranked.append((-(float(inputs["scores"][sentence, hypothesis]) + log_prob), hypothesis, place, token))
        candidates = sorted(ranked)[: shape[1]]
        going_on = [candidate for candidate in candidates if inputs["leaving"][candidate[3]] == 0][:beam]
        going_on += [candidate for candidate in candidates if candidate not in going_on][: beam - len(going_on)]
        for rank, (negative, parent, _, token) in enumerate(candidates):
            outputs["candidates.log_probs"][sentence, rank] = -negative
            outputs["candidates.parents"][sentence, rank] = parent
            outputs["candidates.tokens"][sentence, rank] = token
        for rank, (negative, parent, _, token) in enumerate(going_on):
            outputs["next.scores"][sentence, rank] = -negative
            outputs["next.tokens"][sentence, rank] = token
            past = inputs["mask"][sentence, 0, parent]
            outputs["next.mask"][sentence, 0, rank] = past | (inputs["slots"] == inputs["own"][rank])
    return outputs
