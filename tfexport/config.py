"""`ModelConfig`: the complete, validated description of a model's arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tfexport.errors import ConfigError

_MOST = {
    **dict.fromkeys(("n_encoder_layers", "n_decoder_layers"), 1000),
    **dict.fromkeys(("d_model", "n_heads", "n_encoder_heads", "d_head"), 2**16),
    **dict.fromkeys(("max_source_length", "max_target_length", "position_offset", "max_distance", "d_ff"), 2**20),
    **dict.fromkeys(("src_vocab_size", "tgt_vocab_size", "n_classes"), 2**26),
}
"""Upper bounds, many times the sizes of any model. A file may contain any number, and products of its sizes are computed."""

Positions = Literal["sinusoidal", "learned", "stored", "relative", "none"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Side = Literal["encoder", "decoder"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape and arithmetic of an encoder-decoder Transformer, or of an encoder classifier (`n_classes > 0`).

    The defaults are those of the paper (Vaswani et al. 2017, "Attention Is All You Need", section 3): post-norm,
    ReLU, sinusoidal positions, biases everywhere but in the output layer, embeddings times sqrt(d_model).

    Raises:
        ConfigError: a field is out of range, or two fields contradict each other. The message lists all problems.
    """

    # Sizes.
    d_model: int
    """Size of the embeddings and of the layers' inputs and outputs."""
    n_heads: int
    """Number of attention heads per layer."""
    n_encoder_heads: int = 0
    """Number of heads of the encoder's self-attention, if it is not `n_heads`; else 0. All heads together have the same size
    on both sides, so the encoder's head size differs too."""
    d_ff: int
    """Size of the hidden states of the feed-forward."""
    d_head: int = 0
    """Head size, if it is not d_model / n_heads; else 0. With `n_encoder_heads`, that of the decoder."""
    n_encoder_layers: int
    """Number of encoder layers."""
    n_decoder_layers: int
    """Number of decoder layers; 0 for a classifier."""
    src_vocab_size: int
    """Number of rows of the source embedding."""
    tgt_vocab_size: int
    """Number of rows of the output projection."""
    n_classes: int = 0
    """Number of classes of an encoder classifier, whose `n_decoder_layers` and `tgt_vocab_size` are 0; else 0."""
    max_source_length: int
    """Maximum number of ids that the encoder reads, including bos and eos."""
    max_target_length: int
    """Maximum number of tokens that the decoder reads, including bos. It generates at most as many."""

    # Special ids.
    unk_id: int
    """Id of words outside the vocabulary; -1 if the model has none."""
    pad_id: int
    """Id that pads the sequences of a batch; attention masks it."""
    bos_id: int
    """First id that the decoder reads."""
    eos_id: int
    """Id that ends an output."""
    source_bos: bool = False
    """Whether the encoder's input starts with `bos_id`."""
    source_eos: bool = True
    """Whether the encoder's input ends with `eos_id`."""
    forced_first_id: int = -1
    """First token of every output, regardless of the logits, such as a language; -1 for none."""
    suppressed_ids: tuple[int, ...] = ()
    """Target ids that are never generated."""
    suppressed_first_ids: tuple[int, ...] = ()
    """Target ids that no output starts with (after `forced_first_id`, if set). They may include eos."""

    # Arithmetic.
    activation: Activation = "relu"
    """Activation between the two layers of the feed-forward. `gelu_tanh` is the tanh approximation of GELU, `silu` (Swish)
    is x * sigmoid(x)."""
    norm_first: bool = False
    """Pre-norm, x + sublayer(norm(x)), instead of post-norm, norm(x + sublayer(x))."""
    final_norm: bool = False
    """Whether each stack has another norm after its last layer."""
    final_norm_in: Literal["both", "encoder", "decoder"] = "both"
    """The stacks that have the norm of `final_norm`."""
    shared_norm: bool = False
    """Whether all sublayers of a layer share one LayerNorm."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm. `rms` divides by the root mean square and has no bias (Zhang and Sennrich 2019)."""
    norm_eps: float = 1e-5
    """Added to the variance, or to the mean of squares, before the square root."""
    final_norm_eps: float = 0.0
    """The same for the norm of `final_norm`; 0 for `norm_eps`."""
    embedding_norm_eps: float = 0.0
    """The same for the norm of `embedding_norm`; 0 for `norm_eps`."""
    embedding_norm: bool = False
    """Whether each stack normalises its embeddings, after positions are added, before its first layer."""
    embedding_norm_in: Literal["both", "encoder", "decoder"] = "both"
    """The stacks that have the norm of `embedding_norm`."""
    positions: Positions = "sinusoidal"
    """Kind of positions. `stored` is a frozen table from the checkpoint. `relative` leaves the embeddings unchanged and adds
    a number per head and distance to the scores of self-attention (Raffel et al. 2020, section 2.1). `none` adds nothing."""
    max_distance: int = 0
    """Largest distance of relative positions; larger distances count as this one."""
    position_offset: int = 0
    """Token t uses row t + position_offset of the position table."""
    feed_forward: Literal["linear", "conv1d"] = "linear"
    """Layers of the feed-forward. `conv1d` has kernel size 1: the same arithmetic, with weights [out, in, 1]."""
    gated: bool = False
    """Whether a second projection multiplies the activated hidden states of the feed-forward (Shazeer 2020)."""
    attention_bias: bool = True
    """Whether the projections of attention have a bias."""
    feed_forward_bias: bool = True
    """Whether the layers of the feed-forward have a bias."""
    output_bias: bool = False
    """Whether the output projection has a bias."""
    tie_source_target: bool = False
    """Whether source and target share one embedding matrix."""
    tie_output: bool = False
    """Whether the output projection is the target embedding matrix."""
    embedding_scale: float = 1.0
    """Factor of the embeddings; sqrt(d_model) in the paper."""

    dropout: float = 0.0
    """Dropout in training; exported graphs have none."""

    def __post_init__(self) -> None:
        problems = [*_type_problems(self)] or [*self._problems()]
        if problems:
            raise ConfigError(f"the model configuration is not valid: {'; '.join(problems)}. Correct these fields.")

    def _problems(self) -> list[str]:
        problems = []

        def require(condition: bool, problem: str) -> None:
            if not condition:
                problems.append(problem)

        for name in ("d_model", "n_heads", "d_ff", "n_encoder_layers", "src_vocab_size", "max_source_length"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}, not above 0")
        for name, most in _MOST.items():
            require(getattr(self, name) <= most, f"{name} is {getattr(self, name)}, above {most}")
        heads_fit = self.n_heads <= 0 or self.d_head > 0 or self.d_model % self.n_heads == 0
        require(heads_fit, f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}")
        require(self.n_encoder_heads >= 0, f"n_encoder_heads is {self.n_encoder_heads}, below 0")
        if self.n_encoder_heads > 0 and self.n_heads > 0 and heads_fit:
            all_heads = f"the {self.d_attention} numbers of all heads together"
            is_whole = self.d_attention % self.n_encoder_heads == 0
            require(is_whole, f"{all_heads} are not a multiple of n_encoder_heads {self.n_encoder_heads}")
        if self.n_classes:
            require(self.n_classes > 0, f"n_classes is {self.n_classes}, below 0")
            require(self.n_decoder_layers == 0, "a classifier has n_decoder_layers 0")
            require(not (self.tie_output or self.tie_source_target), "a classifier has no embeddings to tie")
            require(self.n_encoder_heads == 0, "a classifier has no n_encoder_heads: n_heads is its encoder's")
            for name in ("final_norm", "embedding_norm"):
                place = getattr(self, f"{name}_in")
                require(place == "both", f"{name}_in is {place}, and a classifier has one stack")
        else:
            for name in ("n_decoder_layers", "max_target_length"):
                require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}, not above 0")
            require(self.tgt_vocab_size > 1, f"tgt_vocab_size is {self.tgt_vocab_size}, below 2")
            for name in ("bos_id", "eos_id", "pad_id"):
                value = getattr(self, name)
                require(0 <= value < self.tgt_vocab_size, f"{name} {value} is not in the target vocabulary")
            require(
                not self.tie_source_target or self.src_vocab_size == self.tgt_vocab_size,
                f"tied embeddings need vocabularies of one size, not {self.src_vocab_size} and {self.tgt_vocab_size}",
            )
            require(
                -1 <= self.forced_first_id < self.tgt_vocab_size,
                f"forced_first_id {self.forced_first_id} is not in the target vocabulary (-1 is for none)",
            )
            for suppressed in self.suppressed_ids:
                require(
                    0 <= suppressed < self.tgt_vocab_size and suppressed != self.eos_id,
                    f"suppressed_ids has {suppressed}, which is eos or not in the target vocabulary",
                )
            for suppressed in self.suppressed_first_ids:
                require(
                    0 <= suppressed < self.tgt_vocab_size,
                    f"suppressed_first_ids has {suppressed}, which is not in the target vocabulary",
                )
            require(len(self.suppressed_ids) < self.tgt_vocab_size - 1, "suppressed_ids leave nothing to generate")
        for name, needed in (("pad_id", True), ("bos_id", self.source_bos), ("eos_id", self.source_eos)):
            value = getattr(self, name)
            require(not needed or 0 <= value < self.src_vocab_size, f"{name} {value} is not in the source vocabulary")
        unk = self.unk_id
        require(-1 <= unk < self.src_vocab_size, f"unk_id {unk} is not in the source vocabulary (-1 is for none)")
        require(self.d_head >= 0, f"d_head is {self.d_head}, below 0")
        require(
            self.max_distance > 0 if self.positions == "relative" else self.max_distance == 0,
            f"max_distance is {self.max_distance}, and positions are {self.positions}",
        )
        require(
            self.has_position_table or self.position_offset == 0,
            f"position_offset is {self.position_offset}, and positions are {self.positions}, which have no table",
        )
        require(self.positions != "relative" or not self.is_classifier, "a classifier has no relative positions")
        require(not self.gated or self.feed_forward == "linear", "a gated feed_forward is linear")
        for name in ("final_norm", "embedding_norm"):
            is_there, place, eps = (getattr(self, f"{name}{part}") for part in ("", "_in", "_eps"))
            require(is_there or place == "both", f"{name}_in is {place}, and {name} is false")
            require(0 <= eps < 1, f"{name}_eps is {eps}, not in [0, 1)")
            require(is_there or eps == 0, f"{name}_eps is {eps}, and {name} is false")
        require(self.position_offset >= 0, f"position_offset is {self.position_offset}, below 0")
        require(0 <= self.dropout < 1, f"dropout is {self.dropout}, not in [0, 1)")
        require(0 < self.norm_eps < 1, f"norm_eps is {self.norm_eps}, not in (0, 1)")
        require(
            0 < self.embedding_scale < math.inf, f"embedding_scale is {self.embedding_scale}, not above 0 and finite"
        )
        return problems

    @property
    def head_dim(self) -> int:
        """Head size of all attention but that of the encoder; also of cross keys and values."""
        return self.d_head or self.d_model // self.n_heads

    @property
    def encoder_heads(self) -> int:
        """Number of heads of the encoder's self-attention."""
        return self.n_encoder_heads or self.n_heads

    @property
    def encoder_head_dim(self) -> int:
        """Head size of the encoder's self-attention."""
        return self.d_attention // self.encoder_heads

    @property
    def d_attention(self) -> int:
        """Size of all heads of a token together: d_model, except for models with a `d_head`."""
        return self.n_heads * self.head_dim

    @property
    def has_position_table(self) -> bool:
        """Whether position vectors are added to the embeddings. Otherwise any position exists."""
        return self.positions not in ("relative", "none")

    def norm_eps_of(self, path: str) -> float:
        """The epsilon of the norm at the path of a module, such as `encoder.layers.0.norms.1` or `decoder.norm`."""
        own = {"norm": self.final_norm_eps, "embedding_norm": self.embedding_norm_eps}
        return own.get(path.rpartition(".")[2], 0.0) or self.norm_eps

    def has_final_norm(self, side: Side) -> bool:
        """Whether the stack of this side has a norm after its last layer."""
        return self.final_norm and self.final_norm_in in ("both", side)

    def has_embedding_norm(self, side: Side) -> bool:
        """Whether the stack of this side has a norm of its embeddings."""
        return self.embedding_norm and self.embedding_norm_in in ("both", side)

    @property
    def least_parameters(self) -> int:
        """Minimum number of parameters of a model of these sizes: the matrices and tables that a file must contain."""
        layers = self.n_encoder_layers + self.n_decoder_layers
        attentions = self.n_encoder_layers + 2 * self.n_decoder_layers
        own_embedding = not self.tie_source_target and not self.is_classifier
        vocabularies = self.src_vocab_size + own_embedding * self.tgt_vocab_size
        vocabularies += 0 if self.tie_output or self.is_classifier else self.tgt_vocab_size
        positions = self.max_source_length + (0 if self.is_classifier else self.max_target_length)
        tables = positions if self.has_position_table else 0
        attention = 4 * attentions * self.d_attention
        return self.d_model * (vocabularies + 2 * layers * self.d_ff + attention + tables)

    @property
    def is_classifier(self) -> bool:
        return self.n_classes > 0

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields; `from_dict` reads them back."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], *, where: str = "the configuration") -> ModelConfig:
        """Read the fields of `to_dict`.

        Raises:
            ConfigError: a field is missing, unknown, of the wrong type or out of range.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - set(known))
        missing = sorted(
            name for name, field in known.items() if field.default is dataclasses.MISSING and name not in fields
        )
        if unknown or missing:
            parts = [f"unknown: {', '.join(unknown)}"] * bool(unknown) + [f"missing: {', '.join(missing)}"] * bool(
                missing
            )
            raise ConfigError(f"{where} does not describe a model ({'; '.join(parts)}). Correct these fields.")
        given = dict(fields)
        for name in ("suppressed_ids", "suppressed_first_ids"):
            if isinstance(given.get(name), list):  # JSON has lists instead of tuples
                given[name] = tuple(given[name])
        return cls(**given)


@cache
def _types() -> dict[str, Any]:
    """The types of all fields. Python evaluates them again at each call of `get_type_hints`, which takes a millisecond."""
    return get_type_hints(ModelConfig)


def _type_problems(config: ModelConfig) -> list[str]:
    """Fields of the wrong type. JSON may contain a string in place of a number; arithmetic would fail on it."""
    problems = []
    for name, kind in _types().items():
        value = getattr(config, name)
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                problems.append(f"{name} is {value!r}, not one of {', '.join(get_args(kind))}")
        elif kind is float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or (isinstance(value, int) and abs(value) > 10**30):  # Python's integers outgrow floats
                problems.append(f"{name} is {repr(value)[:30]}, not a floating-point number")
        elif get_origin(kind) is tuple:
            if not isinstance(value, tuple) or not all(type(item) is int for item in value):
                problems.append(f"{name} is {repr(value)[:30]}, not a list of int")
        elif type(value) is not kind:
            problems.append(f"{name} is {value!r}, not {kind.__name__}")
    return problems
