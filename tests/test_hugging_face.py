"""Folders of the transformers library against the library itself: the same logits, the same tokens.

Its models are made here with random weights at uneven sizes, saved by the library, read, exported and decoded. Norms and
biases are random too: ones and zeros would hide a swapped pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import randomised
from torch import Tensor

from tfexport.bundle import Bundle, open_bundle
from tfexport.export import export
from tfexport.models.checkpoint import Checkpoint, load_checkpoint
from tfexport.runtimes import load_runtime
from tfexport.search import SearchOptions, pad, search

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
    "m2m_100": m2m_100,
    "t5": t5,
    "t5-gated": t5_gated,
    "mt5": mt5,
}


SEEDS = {"marian": 9, "bart": 4, "mbart": 5, "pegasus": 1, "m2m_100": 5, "t5": 1, "t5-gated": 3, "mt5": 13}
"""Of models that say different things of different sentences, and end some of them."""


def made(name: str, seed: int | None = None) -> Any:
    """A random model of the library, in evaluation mode, that ends some sentences and runs on in others."""
    torch.manual_seed(1)
    model = randomised(MODELS[name](), seed=SEEDS[name] if seed is None else seed)
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


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = made(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "model"
    model.save_pretrained(folder)
    checkpoint = load_checkpoint(folder, {})
    export(checkpoint, folder.with_name("bundle"))
    return Case(model, folder, checkpoint, open_bundle(folder.with_name("bundle")), sources_of(model, 24))


def logits_of(case: Case) -> tuple[Tensor, Tensor]:
    """Teacher-forced logits [batch, tgt, vocab] of the library and of the canonical model."""
    config = case.checkpoint.config
    ids, lengths = (torch.from_numpy(array) for array in pad(case.sources, config.pad_id))
    random = torch.Generator().manual_seed(2)
    targets = torch.randint(EOS + 1, config.tgt_vocab_size, (len(ids), 11), generator=random)
    targets[:, 0] = config.bos_id
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    with torch.no_grad():
        wanted = case.model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
        return wanted, case.checkpoint.build_model()(ids, lengths, targets)


def test_the_library_s_logits(case: Case) -> None:
    wanted, found = logits_of(case)
    assert (wanted - found).abs().max() < 1e-4
    assert wanted.std() > 0.1


def test_greedy_tokens_are_the_library_s(case: Case) -> None:
    wanted = case.generated(num_beams=1)
    assert case.decoded(1) == wanted
    assert len({tuple(row) for row in wanted}) >= len(wanted) // 2  # it does not say the same to all
    assert any(row[-1] == case.checkpoint.config.eos_id for row in wanted)


def test_beam_tokens_are_the_library_s(case: Case) -> None:
    assert case.decoded(4) == case.generated(num_beams=4, length_penalty=0.0, early_stopping=False)
