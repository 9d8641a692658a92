"""Random models of the transformers library, as folders that it saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from makers.tiny import randomised
from tfexport.bundle.reader import Bundle
from tfexport.models.checkpoints.load import Checkpoint
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, pad, search

transformers = pytest.importorskip("transformers")


VOCAB, LENGTH, MAX_NEW = 53, 40, 14


PAD, EOS = 1, 2


BART = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 52,
    "decoder_ffn_dim": 52,
    "max_position_embeddings": LENGTH,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": 0,
    "forced_eos_token_id": None,
}


FORCED = 7


def marian() -> Any:
    """Two vocabularies, and pad as the first token of the decoder, as OPUS-MT has it."""
    config = transformers.MarianConfig(
        **{**BART, "d_model": 26, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
        activation_function="swish",
        decoder_start_token_id=PAD,
        scale_embedding=True,
        decoder_vocab_size=VOCAB - 6,
        share_encoder_decoder_embeddings=False,
    )
    return transformers.MarianMTModel(config)


def bart() -> Any:
    config = transformers.BartConfig(
        **BART, activation_function="gelu", decoder_start_token_id=EOS, scale_embedding=True
    )
    return transformers.BartForConditionalGeneration(config)


def mbart() -> Any:
    """The first token of the decoder is a language."""
    config = transformers.MBartConfig(**BART, activation_function="gelu_new", decoder_start_token_id=FORCED)
    return transformers.MBartForConditionalGeneration(config)


def pegasus() -> Any:
    config = transformers.PegasusConfig(
        **BART, activation_function="relu", decoder_start_token_id=PAD, scale_embedding=False
    )
    return transformers.PegasusForConditionalGeneration(config)


def plbart() -> Any:
    config = transformers.PLBartConfig(
        **BART, activation_function="gelu", decoder_start_token_id=FORCED, scale_embedding=True
    )
    return transformers.PLBartForConditionalGeneration(config)


def mvp() -> Any:
    config = transformers.MvpConfig(**BART, activation_function="gelu", decoder_start_token_id=EOS)
    return transformers.MvpForConditionalGeneration(config)


def blenderbot() -> Any:
    """Learned positions without an offset."""
    config = transformers.BlenderbotConfig(
        **BART, activation_function="gelu", decoder_start_token_id=1, encoder_no_repeat_ngram_size=0
    )
    return transformers.BlenderbotForConditionalGeneration(config)


def m2m_100() -> Any:
    """The first token of every output is a language."""
    config = transformers.M2M100Config(
        **BART, activation_function="relu", decoder_start_token_id=EOS, scale_embedding=True
    )
    model = transformers.M2M100ForConditionalGeneration(config)
    model.generation_config.forced_bos_token_id = FORCED
    return model


T5 = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "d_kv": 7,
    "num_heads": 3,
    "d_ff": 52,
    "num_layers": 3,  # with fewer than in the decoder, the library's own `generate` fails
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 15,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
"""Heads that are not equal parts of d_model, and distances shorter than the sentences."""


def t5() -> Any:
    """The first version: ReLU, and a tied output that is scaled."""
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, feed_forward_proj="relu"))


def t5_gated() -> Any:
    """Version 1.1: a gate, and an output of its own."""
    sizes = {**T5, "d_kv": 8}
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    model = transformers.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def mt5() -> Any:
    return transformers.MT5ForConditionalGeneration(transformers.MT5Config(**T5))


MODELS: dict[str, Callable[[], Any]] = {
    "marian": marian,
    "bart": bart,
    "mbart": mbart,
    "pegasus": pegasus,
    "plbart": plbart,
    "mvp": mvp,
    "blenderbot": blenderbot,
    "m2m_100": m2m_100,
    "t5": t5,
    "t5-gated": t5_gated,
    "mt5": mt5,
}


SEEDS = {
    "marian": 9,
    "bart": 4,
    "mbart": 5,
    "pegasus": 1,
    "plbart": 4,
    "mvp": 5,
    "blenderbot": 3,
    "m2m_100": 5,
    "t5": 1,
    "t5-gated": 3,
    "mt5": 13,
}
"""Of models that say different things of different sentences, and end some of them."""


def made(name: str) -> Any:
    """A random model of the library, in evaluation mode, that ends some sentences and runs on in others."""
    torch.manual_seed(1)
    model = randomised(MODELS[name](), seed=SEEDS[name])
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Random layers change a token little, and a tied output then repeats it for ever.
            if ("encoder_attn." in parameter_name or "EncDecAttention.o" in parameter_name) and parameter_name.endswith(
                "weight"
            ):
                parameter *= 4.0
            elif parameter_name.endswith("self_attn.out_proj.weight"):
                parameter *= 3.0
            elif (
                parameter_name.endswith(("embed_positions.weight", "attn_layer_norm.weight"))
                and parameter.requires_grad
            ):
                parameter *= 2.0
            elif parameter_name.endswith("norm.bias"):
                parameter *= 0.3
            elif parameter_name.endswith("shared.weight") or "embed_tokens" in parameter_name:
                parameter[EOS] *= 2.0
    if getattr(model, "final_logits_bias", None) is not None:
        model.final_logits_bias.normal_(std=0.5)
        model.final_logits_bias[0, EOS] += 1.0
    # A trained model never gives padding; the library keeps it out by this setting.
    model.generation_config.bad_words_ids = [[model.config.pad_token_id]]
    model.generation_config.num_beams = 1
    return model


@dataclass(frozen=True)
class Case:
    """A model of the library, its folder, and what became of it."""

    model: Any
    folder: Path
    checkpoint: Checkpoint
    bundle: Bundle
    sources: list[list[int]]

    def generated(self, **options: Any) -> list[list[int]]:
        """What the library generates, without the decoder's first token, to eos."""
        ids, lengths = pad(self.sources, self.model.config.pad_token_id)
        mask = torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]
        given = {"input_ids": torch.from_numpy(ids), "attention_mask": mask.long()}
        with torch.no_grad():
            found = self.model.generate(**given, do_sample=False, max_new_tokens=MAX_NEW, **options)
        eos = self.model.config.eos_token_id
        rows = [row.tolist()[1:] for row in found]
        return [row[: row.index(eos) + 1] if eos in row else row[:MAX_NEW] for row in rows]

    def decoded(self, beam: int, runtime: str = "ort-cpu") -> list[list[int]]:
        options = SearchOptions(beam=beam, length_penalty=0.0, max_length=MAX_NEW)
        found = search(load_runtime(runtime, self.bundle), self.sources, options)
        return [list(hypotheses[0].ids) for hypotheses in found]


def sources_of(model: Any, count: int) -> list[list[int]]:
    """Sentences of all lengths, without padding, that end in eos."""
    random = np.random.default_rng(3)
    lengths = random.integers(1, 20, count)
    eos = model.config.eos_token_id
    return [[*random.integers(eos + 1, VOCAB, length).tolist(), eos] for length in lengths]


def changed(folder: Path, tmp_path: Path, **settings: Any) -> Path:
    """A copy of a folder with other settings in its config."""
    copy = Path(shutil.copytree(folder, tmp_path / "changed"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **settings}))
    return copy
