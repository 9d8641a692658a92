"""The lengths that TensorRT engines are built for, and an estimate of their cost before the build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.contract import ITEM_SIZES, GraphSpec, Precision, Role
from tfexport.errors import EngineError
from tfexport.models.sizes import cross_matrices, decoder_step_matrices, encoder_matrices, output_matrix

BLOCK = 32
"""Planned lengths are multiples of it."""

ENGINE_BYTES = 5 << 20
"""Size of an engine file of TensorRT for RTX without its weights."""

BUILD_SECONDS, BUILD_RATE = 0.6, 150e6
"""Build time of TensorRT for RTX on two CPU cores: seconds per engine, and bytes of weights per second in addition."""

Profile = dict[str, list[list[int]]]
"""Smallest, usual and largest shape of each input of a graph."""


@dataclass(frozen=True, kw_only=True)
class LengthPlan:
    """The sizes that engines are built for.

    An engine fixes the length of its cache, and each step reads the whole cache. So there are several engines, and decoding
    moves to the next larger cache when one is full.

    Raises:
        EngineError: a size is not above 0.
    """

    max_batch: int = 32
    max_beam: int = 4
    max_source: int = 128
    """Maximum number of source ids, including bos and eos."""
    cache: tuple[int, ...] = (32, 64, 128)
    """Cache sizes in slots, ascending. The last is the length of the longest translation."""

    def __post_init__(self) -> None:
        if min(self.max_batch, self.max_beam, self.max_source, *self.cache, len(self.cache)) < 1:
            raise EngineError("the length plan has a size below 1. Give sizes above 0.")

    @classmethod
    def for_lengths(cls, lengths: Sequence[int], *, max_batch: int = 32, max_beam: int = 4) -> LengthPlan:
        """A plan for texts with sources of these `lengths` in ids.

        The plan assumes that a translation has at most 1.5 times the tokens of its source plus 10. The caches fit the
        translations of half, nine tenths and all of the sources.

        Raises:
            EngineError: there are no lengths.
        """
        if not lengths:
            raise EngineError("the text to plan for has no line that can be decoded. Give typical source text.")
        ordered = sorted(lengths)
        shares = (ordered[ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 1.0))
        cache = sorted({_up(int(1.5 * length) + 10, BLOCK) for length in shares})
        return cls(max_batch=max_batch, max_beam=max_beam, max_source=_up(ordered[-1], BLOCK), cache=tuple(cache))

    @property
    def max_rows(self) -> int:
        return self.max_batch * self.max_beam

    def fitted(self, config: ModelConfig, precision: Precision) -> LengthPlan:
        """This plan limited to the model's positions, with lengths rounded up so that adjacent tensors are aligned.

        Sources may be padded beyond the model's positions (`engine_graphs.longer_positions`); longer ones are not decoded.
        """
        step = contract.aligned_length(config.d_attention, precision)
        source = _up(min(self.max_source, config.max_source_length), step)
        sizes = sorted({_up(size, step) for size in self.cache})
        needed = (
            sum(size < config.max_target_length for size in sizes) + 1
        )  # the first cache for all positions is enough
        return replace(self, max_source=source, cache=tuple(sizes[:needed]))

    def jobs(self) -> list[tuple[Role, int]]:
        """The engines of one precision and GPU, as roles and cache slots."""
        return [("encoder", 0), ("select_rows", 0), *(("decoder_step", size) for size in self.cache)]

    def profile(self, graph: GraphSpec, config: ModelConfig, cache: int) -> Profile:
        """The shapes of the inputs of `graph`; `cache` is fixed."""
        usual_beam = self.max_beam
        sizes = {
            "batch": (1, max(1, self.max_batch // 4), self.max_batch),
            "rows": (1, max(1, self.max_batch // 4) * usual_beam, self.max_rows),
            "src": (1, min(BLOCK, self.max_source), self.max_source),
            "cache": (cache, cache, cache),
        }
        if graph.role == "select_rows":  # over a self-attention cache or over cross keys and values
            widths = [config.d_attention * length for length in (*self.cache, self.max_source)]
            blocks = 2 * config.n_decoder_layers
            sizes |= {
                "blocks": (blocks, blocks, blocks),
                "from": sizes["rows"],
                "width": (config.d_attention, config.d_attention * self.cache[0], max(widths)),
            }
        shapes = {tensor.name: contract.shape(tensor, config) for tensor in graph.inputs}
        return {
            name: [[sizes[axis][which] if isinstance(axis, str) else axis for axis in shape] for which in range(3)]
            for name, shape in shapes.items()
        }

    def workspace(self, config: ModelConfig) -> int:
        """Maximum workspace of an engine in bytes, for intermediate values: four times the size of the largest ones.

        The largest are a feed-forward layer of the encoder and the scores of its attention, or the logits of a step and the
        memory to sort them, in float32.
        """
        tokens = self.max_batch * self.max_source
        encoder = tokens * (config.d_ff + 4 * config.d_model + config.encoder_heads * self.max_source)
        step = 3 * self.max_rows * config.tgt_vocab_size
        return max(64 << 20, 4 * ITEM_SIZES["float32"] * max(encoder, step))

    def memory(self, config: ModelConfig, precision: Precision) -> dict[str, int]:
        """Estimated GPU memory in bytes, by purpose."""
        item = ITEM_SIZES[precision]
        weights = weight_bytes(config, precision)
        token_bytes = 2 * config.n_decoder_layers * config.d_attention * item  # keys and values of one token
        return {
            "weights of the encoder": weights["encoder"],
            f"weights of {len(self.cache)} decoder steps": len(self.cache) * weights["decoder_step"],
            "self-attention caches (two sets)": 2 * self.max_rows * max(self.cache) * token_bytes,
            "cross keys and values (two sets)": 2 * self.max_batch * self.max_source * token_bytes,
            "logits": self.max_rows * config.tgt_vocab_size * ITEM_SIZES["float32"],
            "workspace": self.workspace(config),
        }


@dataclass(frozen=True)
class PlanCost:
    """The cost of the engines of one precision."""

    precision: Precision
    plan: LengthPlan
    """The plan, fitted to the model."""
    memory: dict[str, int]
    limit: int
    """Size of the GPU memory in bytes."""
    engines: int
    disk: int
    """Estimated size of the engine files in bytes."""
    seconds: float | None
    """Estimated time of the whole build; None if it is not known in advance."""


def cost(
    plan: LengthPlan,
    config: ModelConfig,
    precision: Precision,
    *,
    n_gpus: int,
    limit: int,
    library: str,
) -> PlanCost:
    """The cost of building `plan` for `n_gpus` GPU generations.

    Args:
        limit: size of the GPU memory in bytes.
        library: `tensorrt_rtx`, or `tensorrt`, whose build time depends on its timing on the GPU.

    Raises:
        EngineError: the plan does not fit into `limit`.
    """
    fitted = plan.fitted(config, precision)
    memory = fitted.memory(config, precision)
    total = sum(memory.values())
    if total > limit:
        largest = max(memory, key=lambda part: memory[part])
        raise EngineError(
            f"this plan needs about {total / 2**30:.1f} GiB on the GPU, and there are {limit / 2**30:.1f} GiB; most goes "
            f"to {largest} ({memory[largest] / 2**30:.1f} GiB). Lower --max-batch, --max-beam, --max-source or --cache, or "
            "raise --gpu-memory."
        )
    weights = weight_bytes(config, precision)
    jobs = fitted.jobs()
    disk = n_gpus * sum(weights[role] + ENGINE_BYTES for role, _ in jobs if role in weights)
    seconds = len(jobs) * n_gpus * BUILD_SECONDS + disk / BUILD_RATE if library == "tensorrt_rtx" else None
    return PlanCost(precision, fitted, memory, limit, len(jobs) * n_gpus, disk, seconds)


def weight_bytes(config: ModelConfig, precision: Precision) -> dict[str, int]:
    """Bytes of the matrices in the encoder and in a decoder step, with embeddings and positions, without vectors."""
    item, d = ITEM_SIZES[precision], config.d_model
    source, target = (config.max_source_length, config.max_target_length) if config.has_position_table else (0, 0)
    encoder = (config.src_vocab_size + source) * d + encoder_matrices(config) + cross_matrices(config)
    step = (config.tgt_vocab_size + target) * d + decoder_step_matrices(config)
    output = output_matrix(config) * ITEM_SIZES["float32"]
    return {"encoder": encoder * item, "decoder_step": step * item + output}


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
