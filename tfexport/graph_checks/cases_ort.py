"""Inputs for graphs of the dialect `ort`, and the outputs of PyTorch for them.

These graphs have another layout of caches, but are compared with the same model as all other graphs. The cases of the
dialect `ort-cuda` follow from them (`cases_cuda.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tfexport import contract
from tfexport.graph_checks.cases_portable import Arrays, Case, Outputs
from tfexport.graphs.linear_quantized import from_blocks, quantize
from tfexport.graphs.projections import Projection
from tfexport.models.layers import KeyValue
from tfexport.models.model import Model
from tfexport.models.transformer import Transformer
from tfexport.shortlist_contract import LISTED

Steps = dict[tuple[str | int, ...], Case]
"""Cases of one step, by the kind of step and the sizes."""


def case(
    model: Transformer,
    graph: contract.GraphSpec,
    sizes: Mapping[str, int],
    random: np.random.Generator,
    steps: Steps | None = None,
) -> Case:
    """A random case of a graph, with floats in float32. `sizes` has batch, beam, src, cache and count, and is reduced to the
    model's lengths.

    Args:
        steps: cases of this model from other graphs. The case of a step is taken from there or added, because the model has
            to compute its past, which takes as long as the check itself.
    """
    config = model.config
    sizes = {**sizes, "src": min(sizes["src"], config.max_source_length)}
    if graph.role == "encoder":
        sources = _sources(model, sizes, random)
        return Case(sources, lambda model: {"cross": torch.stack(_encoded(_transformer(model), sources))})
    if graph.role == "shortlist":
        ids = _candidates(model, sizes, random)
        return Case({"candidates": ids}, lambda model: _listed_tensors(_transformer(model), graph, ids))
    make, key = (_decoder_case if graph.step == "decoder_step" else _beam_case), (graph.step, *sizes.values())
    if steps is None:
        step = make(model, sizes, random)
    else:
        if key not in steps:
            # From its own generator, so that the draws of a graph do not depend on the graphs before it.
            steps[key] = make(model, sizes, np.random.default_rng([1, *sizes.values()]))
        step = steps[key]
    if graph.role == "greedy_step":
        return _ranked(model, step, _candidates(model, sizes, random))
    if graph.role in contract.SHORTLIST_ROLES.values():
        return _shortlisted(model, graph, step, _candidates(model, sizes, random), random)
    return step


def _ranked(model: Transformer, step: Case, some: NDArray[np.int64]) -> Case:
    """A case of a step that returns the best token that is not banned.

    The tokens `some` and the best ones of all rows are banned, so that the check fails if the graph does not exclude them.
    """
    best = step.outputs(model)["logits"].topk(min(2, model.config.tgt_vocab_size)).indices.numpy()
    banned = np.union1d(some, best)[: model.config.tgt_vocab_size - 1]

    def outputs(model: Model) -> Outputs:
        tensors = step.outputs(model)
        return {**tensors, "logits": tensors["logits"].index_fill(1, torch.from_numpy(banned), -torch.inf)}

    inputs = {name: array for name, array in step.inputs.items() if name != "count"}
    return Case({**inputs, "banned": banned}, outputs)


def _candidates(model: Transformer, sizes: Mapping[str, int], random: np.random.Generator) -> NDArray[np.int64]:
    """Some target ids, sorted."""
    vocab = model.config.tgt_vocab_size
    return np.sort(random.permutation(vocab)[: min(vocab, sizes["count"] + sizes["src"])])


def _listed(model: Transformer, graph: contract.GraphSpec, ids: NDArray[np.int64]) -> Arrays:
    """The tensors of the output projection for these ids, by their names in graphs."""
    rows = model.output_matrix().detach().numpy()[ids]
    arrays: Arrays = {"output_weight": rows}
    if graph.precision == "int8":
        arrays = quantize({"output_weight": rows}, [Projection("output", ("output_weight",), ())], "int8")
        blocks = np.asarray(arrays["output.int8"], np.int8)
        arrays["output.int8"] = np.ascontiguousarray(from_blocks(blocks, *rows.shape).T).view(np.uint8) ^ 128
    if model.output_bias is not None:
        arrays["output_bias"] = model.output_bias.detach().numpy()[ids]
    return {f"{LISTED}{name}": array for name, array in arrays.items()}


def _listed_tensors(model: Transformer, graph: contract.GraphSpec, ids: NDArray[np.int64]) -> Outputs:
    return {name: torch.from_numpy(array) for name, array in _listed(model, graph, ids).items()}


def _shortlisted(
    model: Transformer, graph: contract.GraphSpec, step: Case, ids: NDArray[np.int64], random: np.random.Generator
) -> Case:
    """A case of a step that has candidates instead of the vocabulary."""
    rows = step.inputs["tokens"].size
    # Any finite numbers: the difference of two -inf is NaN.
    left_out = random.standard_normal((rows, len(ids))).astype(np.float32)

    def outputs(model: Model) -> Outputs:
        tensors = step.outputs(model)
        return {**tensors, "logits": tensors["logits"][:, torch.from_numpy(ids)] + torch.from_numpy(left_out)}

    count = np.minimum(step.inputs["count"], len(ids))
    return Case({**step.inputs, **_listed(model, graph, ids), "left_out": left_out, "count": count}, outputs)


def _sources(model: Transformer, sizes: Mapping[str, int], random: np.random.Generator) -> Arrays:
    shape = (sizes["batch"], sizes["src"])
    lengths = random.integers(1, sizes["src"] + 1, sizes["batch"]).astype(np.int32)
    if "least" in sizes:
        lengths[0] = sizes["src"]
    return {"src_ids": random.integers(0, model.config.src_vocab_size, shape), "src_len": lengths}


def _encoded(model: Transformer, sources: Arrays) -> list[Tensor]:
    lengths = torch.from_numpy(sources["src_len"]).long()
    cross = model.encode(torch.from_numpy(sources["src_ids"]), lengths)
    return [tensor for memory in cross for tensor in memory]


def _memory(model: Transformer, sizes: Mapping[str, int], random: np.random.Generator) -> Arrays:
    """`src_len` and the cross keys and values of random sources."""
    sources = _sources(model, sizes, random)
    cross = [_array(model, tensor) for tensor in _encoded(model, sources)]
    return {"src_len": sources["src_len"], **dict(zip(contract.cache_names(model.config, "cross"), cross, strict=True))}


_HALVES = {torch.float16: np.dtype(np.float16), torch.bfloat16: np.dtype(ml_dtypes.bfloat16)}


def _array(model: Transformer, tensor: Tensor) -> NDArray[np.float32]:
    """Numbers rounded to the model's own type, in float32. Within `InFloat64` PyTorch would not round them."""
    own = _HALVES.get(model.encoder.tokens.weight.dtype, np.dtype(np.float32))
    return tensor.double().numpy().astype(own).astype(np.float32)


def _tensor(model: Model, array: NDArray[np.float32]) -> Tensor:
    """Floats in the model's own type."""
    return torch.from_numpy(array).to(model.encoder.tokens.weight.dtype)


MOST_TOKENS = 32
"""The largest number of distinct tokens of a history; longer histories repeat them."""


def _history(model: Transformer, memory: Arrays, slots: int, random: np.random.Generator) -> list[NDArray[np.float32]]:
    """Keys and values [batch, heads, slots, head_dim] of random tokens, as the model computes them."""
    config, lengths = model.config, torch.from_numpy(memory["src_len"]).long()
    cross = _pairs([_tensor(model, memory[name]) for name in contract.cache_names(config, "cross")])
    distinct = min(slots, MOST_TOKENS)
    # Each token is a hypothesis of its sentence, in its own cache. (A shared cache has more slots than the model has
    # positions, and any position can be used.)
    tokens = torch.from_numpy(random.integers(0, config.tgt_vocab_size, (len(lengths), distinct))).flatten()
    once = model.empty_cache(len(tokens), 1)
    _, new = model.step(tokens, torch.zeros_like(tokens), lengths, once, cross)
    again = torch.arange(slots) % distinct if slots else torch.arange(0)
    caches = (tensor.reshape(len(lengths), distinct, *tensor.shape[1:]) for memory in new for tensor in memory)
    # [batch, distinct, heads, 1, head_dim] to [batch, heads, slots, head_dim]
    return [_array(model, tensor[:, :, :, 0].transpose(1, 2)[:, :, again]) for tensor in caches]


def _pairs(tensors: list[Tensor]) -> list[KeyValue]:
    return [KeyValue(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]


def _transformer(model: Model) -> Transformer:
    assert isinstance(model, Transformer), "a classifier has no graphs of this dialect"
    return model


def _step(model: Model, inputs: Arrays, past: list[Tensor]) -> tuple[Outputs, list[Tensor]]:
    """Logits and cross-attention weights of a case, and the new slots of all caches [rows, heads, head_dim]. `past` has the
    caches [rows, heads, slots, head_dim]."""
    model = _transformer(model)
    cross = _pairs([_tensor(model, inputs[name]) for name in contract.cache_names(model.config, "cross")])
    tokens, where = (torch.from_numpy(inputs[name]).long().flatten() for name in ("tokens", "position"))
    lengths = torch.from_numpy(inputs["src_len"]).long()
    logits, present, attention = model.step_with_attention(tokens, where, lengths, _pairs(past), cross)
    rows = torch.arange(len(where))
    new = [tensor[rows, :, where] for cache in present for tensor in cache]
    return {"logits": logits, "attention": attention}, new


def _decoder_case(model: Transformer, sizes: Mapping[str, int], random: np.random.Generator) -> Case:
    """A case with rows at different positions."""
    config, rows = model.config, sizes["batch"]
    cache = min(sizes["cache"], config.max_target_length)
    position = random.integers(min(sizes.get("least", 0), cache - 1), cache, rows).astype(np.int32)
    names, memory = contract.cache_names(config, "past"), _memory(model, sizes, random)
    past = dict(zip(names, _history(model, memory, cache, random), strict=True))
    inputs: Arrays = {
        "tokens": random.integers(0, config.tgt_vocab_size, rows),
        "position": position,
        "total": np.array([position.max() + 1], dtype=np.int32),
        "count": np.array([min(sizes["count"], config.tgt_vocab_size)]),
        **past,
        **memory,
    }

    def outputs(model: Model) -> Outputs:
        old = [_tensor(model, past[name]) for name in names]
        results, new = _step(model, inputs, old)
        index = torch.from_numpy(position).long()
        # Slots behind the filled ones are undefined. With two buffers the operator does not copy them.
        behind = (torch.arange(cache) > index[:, None])[:, None].expand(rows, config.n_heads, cache)
        for name, tensor, slot in zip(contract.cache_names(config, "present"), old, new, strict=True):
            written = tensor.to(slot.dtype, copy=True)
            written[torch.arange(rows), :, index] = slot
            written[behind] = 0
            results[name] = written
        return results

    return Case(inputs, outputs)


def _beam_case(model: Transformer, sizes: Mapping[str, int], random: np.random.Generator) -> Case:
    """A case with hypotheses whose past is scattered in the cache of their sentence."""
    config, batch, beam = model.config, sizes["batch"], sizes["beam"]
    most = config.max_target_length - 1
    slot = beam * int(random.integers(least := sizes.get("least", 0), max(least, sizes["cache"] - 1) + 1))
    position = int(random.integers(min(least, slot, most), min(slot, most) + 1))
    cache = slot + beam + 3
    mask = np.zeros((batch, 1, beam, cache), dtype=bool)
    pasts = np.empty((batch, beam, position), dtype=np.int64)
    for b in range(batch):
        for k in range(beam):
            pasts[b, k] = np.sort(random.choice(slot, position, replace=False))
            mask[b, 0, k, [*pasts[b, k], slot + k]] = True
    names, memory = contract.cache_names(config, "past"), _memory(model, sizes, random)
    past = dict(zip(names, _history(model, memory, cache, random), strict=True))
    inputs: Arrays = {
        "tokens": random.integers(0, config.tgt_vocab_size, (batch, beam)),
        "position": np.full((batch, beam), position, dtype=np.int32),
        "slot": np.full(batch, slot),
        "mask": mask,
        "count": np.array([min(sizes["count"], config.tgt_vocab_size)]),
        **past,
        **memory,
    }

    def outputs(model: Model) -> Outputs:
        own = []
        for name in names:
            # [batch, heads, cache, head_dim] to the past of each hypothesis, and room for one more slot.
            rows = [past[name][b][:, pasts[b, k]] for b in range(batch) for k in range(beam)]
            own.append(torch.nn.functional.pad(_tensor(model, np.stack(rows)), (0, 0, 0, 1)))
        results, new = _step(model, inputs, own)
        for name, old, slots in zip(contract.cache_names(config, "present"), names, new, strict=True):
            written = torch.from_numpy(past[old]).to(slots.dtype, copy=True)
            written[:, :, slot : slot + beam] = slots.reshape(batch, beam, *slots.shape[1:]).transpose(1, 2)
            results[name] = written
        return results

    return Case(inputs, outputs)
