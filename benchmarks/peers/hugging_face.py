"""The same model in Hugging Face Transformers, as one more peer of the benchmark.

Post-norm models become Marian, pre-norm models with a final norm become Pegasus: the same modules otherwise. Nothing is
downloaded; the model is built from a config and given our weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.errors import TfexportError
from tfexport.models.layers import Attention, FeedForward, Layer
from tfexport.models.transformer import Stack, Transformer
from tfexport.search.search import SearchOptions, pad


def convert(model: Transformer) -> Any:
    """A `MarianMTModel` or `PegasusForConditionalGeneration` that computes what `model` does, in float32 on the CPU.

    Raises:
        ImportError: `transformers` is not installed.
        TfexportError: neither of the two has this arithmetic.
    """
    import transformers  # type: ignore[import-not-found]

    config = model.config
    if not config.has_position_table or config.final_norm_in != "both":
        raise TfexportError(
            "Marian and Pegasus have position tables, and norms after both stacks or none, not positions "
            f"{config.positions} and final_norm_in {config.final_norm_in}. Leave this peer out."
        )
    if config.norm_first != config.final_norm:
        has = "pre-norm without" if config.norm_first else "post-norm with"
        raise TfexportError(
            f"Hugging Face has no {has} a final norm: Marian is post-norm without one, Pegasus pre-norm with one. Leave "
            "this peer out."
        )
    fields = _config_fields(config)
    theirs: Any
    if config.norm_first:
        theirs = transformers.PegasusForConditionalGeneration(transformers.PegasusConfig(**fields))
    else:
        own = {"decoder_vocab_size": config.tgt_vocab_size, "share_encoder_decoder_embeddings": False}
        theirs = transformers.MarianMTModel(transformers.MarianConfig(**fields, **own))
    with torch.no_grad():
        _fill(theirs, model)
    # Not its family's own, which forces eos.
    theirs.generation_config = transformers.GenerationConfig(
        pad_token_id=config.pad_id,
        eos_token_id=config.eos_id,
        decoder_start_token_id=config.bos_id,
    )
    return theirs.eval()


def _config_fields(config: ModelConfig) -> dict[str, Any]:
    """What Marian and Pegasus are told alike. Vocabularies and tying are set with the weights."""
    return {
        "vocab_size": config.tgt_vocab_size,
        "max_position_embeddings": max(config.max_source_length, config.max_target_length),
        "encoder_layers": config.n_encoder_layers,
        "decoder_layers": config.n_decoder_layers,
        "encoder_attention_heads": config.encoder_heads,
        "decoder_attention_heads": config.n_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "d_model": config.d_model,
        "activation_function": config.activation,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.bos_id,
        "forced_eos_token_id": None,
        "tie_word_embeddings": False,
    }


def _fill(theirs: Any, ours: Transformer) -> None:
    """Put our weights into their model; a matrix that we use twice is one there too."""
    config = ours.config
    encoder, decoder = theirs.model.encoder, theirs.model.decoder
    source = _embedding(ours.encoder.tokens.weight)
    target = source if ours.decoder.tokens is None else _embedding(ours.decoder.tokens.weight)
    encoder.embed_tokens, decoder.embed_tokens = source, target
    if hasattr(theirs.model, "shared"):
        theirs.model.shared = target
    theirs.lm_head.weight = target.weight if config.tie_output else nn.Parameter(_copy(ours.output_matrix()))
    if ours.output_bias is not None:
        theirs.final_logits_bias = _copy(ours.output_bias)[None]
    for stack, our_stack in ((encoder, ours.encoder), (decoder, ours.decoder)):
        _fill_stack(stack, our_stack, config)
    for norm in theirs.modules():
        if isinstance(norm, nn.LayerNorm):
            norm.eps = config.norm_eps


def _fill_stack(theirs: Any, ours: Stack, config: ModelConfig) -> None:
    theirs.embed_scale = config.embedding_scale
    assert ours.positions is not None
    theirs.embed_positions.weight = nn.Parameter(
        _copy(ours.positions.table[config.position_offset :]), requires_grad=False
    )
    if isinstance(ours.norm, nn.LayerNorm):
        _fill_norm(theirs.layer_norm, ours.norm)
    for their_layer, layer in zip(theirs.layers, ours.layers, strict=True):  # type: ignore[arg-type]
        assert isinstance(layer, Layer)
        norms = [their_layer.self_attn_layer_norm, their_layer.final_layer_norm]
        _fill_attention(their_layer.self_attn, layer.self_attention)  # type: ignore[arg-type]
        if hasattr(layer, "cross_attention"):
            norms.insert(1, their_layer.encoder_attn_layer_norm)
            _fill_attention(their_layer.encoder_attn, layer.cross_attention)  # type: ignore[arg-type]
        feed_forward = layer.feed_forward
        assert isinstance(feed_forward, FeedForward)
        _fill_linear(their_layer.fc1, feed_forward.hidden)
        _fill_linear(their_layer.fc2, feed_forward.output)
        for index, norm in enumerate(norms):
            _fill_norm(norm, layer.norms[index % len(layer.norms)])


def _fill_attention(theirs: Any, ours: Attention) -> None:
    for name, linear in (("q", ours.query), ("k", ours.key), ("v", ours.value), ("out", ours.output)):
        _fill_linear(getattr(theirs, f"{name}_proj"), linear)


def _fill_linear(theirs: Any, ours: Any) -> None:
    """A Linear, or a Conv1d of kernel 1; where we have no bias theirs is 0."""
    weight = ours.weight.squeeze(-1) if ours.weight.dim() == 3 else ours.weight
    theirs.weight.copy_(weight)
    theirs.bias.copy_(ours.bias if ours.bias is not None else torch.zeros_like(theirs.bias))


def _fill_norm(theirs: Any, ours: Any) -> None:
    theirs.weight.copy_(ours.weight)
    theirs.bias.copy_(ours.bias)


def _embedding(weight: Tensor) -> nn.Embedding:
    return nn.Embedding.from_pretrained(_copy(weight))  # type: ignore[no-untyped-call]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


class HuggingFace:
    """`generate` of a converted model: its default cache, no compilation.

    All weights are in `precision`, the output projection too, as `model.half()` gives it.
    """

    name = "hugging-face"
    steps: tuple[float, ...] = ()
    """`generate` does not tell how long a step takes."""

    def __init__(self, model: Transformer, device: str, precision: Precision):
        self.precision = precision
        self._device, self._config = device, model.config
        self._model = convert(model).to(device=device, dtype=getattr(torch, precision))

    @torch.inference_mode()
    def decode(self, sources: Sequence[Sequence[int]], options: SearchOptions) -> list[tuple[int, ...]]:
        """The best hypothesis of each source, without bos, with eos when it came."""
        ids, lengths = pad(sources, self._config.pad_id)
        src_ids, src_len = torch.from_numpy(ids).to(self._device), torch.from_numpy(lengths).to(self._device)
        compared = {"length_penalty": options.length_penalty} if options.beam > 1 else {}
        found = self._model.generate(
            input_ids=src_ids,
            attention_mask=(torch.arange(src_ids.shape[1], device=self._device) < src_len[:, None]).long(),
            num_beams=options.beam,
            do_sample=False,
            min_new_tokens=options.min_length or None,
            max_new_tokens=min(options.max_length, self._config.max_target_length),
            **compared,
        )
        return [self._until_eos(row) for row in found[:, 1:].tolist()]  # the first is bos

    def _until_eos(self, row: list[int]) -> tuple[int, ...]:
        eos = self._config.eos_id
        return tuple(row[: row.index(eos) + 1] if eos in row else row)
