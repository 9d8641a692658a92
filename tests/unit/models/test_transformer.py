"""The canonical model: positions, the cached step, padding and batch invariance, over the options of the config."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tfexport.config import ModelConfig
from tfexport.models.layers import KeyValue, write_cache
from tfexport.models.model import EncoderClassifier
from tfexport.models.positions import sinusoids
from tfexport.models.transformer import Transformer

SMALL = ModelConfig(
    d_model=20,
    n_heads=5,
    d_ff=28,
    n_encoder_layers=2,
    n_decoder_layers=3,
    src_vocab_size=23,
    tgt_vocab_size=19,
    max_source_length=14,
    max_target_length=12,
    unk_id=0,
    pad_id=1,
    bos_id=2,
    eos_id=3,
    embedding_scale=20**0.5,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre-norm": {"norm_first": True, "final_norm": True},
    "post-norm with final norms": {"final_norm": True},
    "one norm a layer": {"norm_first": True, "shared_norm": True, "norm_eps": 1e-6},
    "learned positions": {"positions": "learned", "position_offset": 2},
    "stored positions": {"positions": "stored", "position_offset": 1},
    "convolutions": {"feed_forward": "conv1d", "activation": "gelu"},
    "no biases": {"attention_bias": False, "feed_forward_bias": False},
    "output bias": {"output_bias": True},
    "tied output": {"tie_output": True, "output_bias": True},
    "all tied": {"tie_output": True, "tie_source_target": True, "src_vocab_size": 19},
    "dropout": {"dropout": 0.5},
    "other heads in the encoder": {"n_encoder_heads": 2},
    "other heads and relative positions": {"n_encoder_heads": 4, "positions": "relative", "max_distance": 3},
    "no positions": {"positions": "none"},
    "a final norm in the encoder": {"final_norm": True, "final_norm_in": "encoder"},
    "RMSNorm everywhere": {"norm": "rms", "final_norm": True, "embedding_norm": True, "shared_norm": True},
    "gated": {"norm": "rms", "norm_first": True, "gated": True, "activation": "silu"},
}


def build(**changes: Any) -> Transformer:
    """A random model, norms and biases random too, in evaluation mode."""
    torch.manual_seed(0)
    model = Transformer(SMALL.replace(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batch(config: ModelConfig, *, sentences: int = 3, tgt: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    src_len = torch.tensor([9, 4, 7][:sentences])
    src_ids = torch.randint(config.src_vocab_size, (sentences, 9), generator=generator)
    return src_ids, src_len, torch.randint(config.tgt_vocab_size, (sentences, tgt), generator=generator)


def test_sinusoids_have_one_norm_everywhere() -> None:
    table = sinusoids(5000, 64).double()
    # sin^2 + cos^2 = 1 for each of the 32 frequencies
    assert table.norm(dim=1).numpy() == pytest.approx(np.full(5000, 32**0.5), abs=1e-5)


def test_sinusoids_dot_product_depends_on_distance_and_falls_with_it() -> None:
    table = sinusoids(200, 128).double()
    products = table @ table.T
    for start in (0, 17, 90):
        near = [products[start, start + distance].item() for distance in range(12)]
        assert all(one > other for one, other in itertools.pairwise(near))
    assert products[3, 40].item() == pytest.approx(products[103, 140].item(), abs=1e-4)


def test_sinusoids_are_the_paper_s() -> None:
    table = sinusoids(7, 6)
    for position, i in itertools.product(range(7), range(3)):
        angle = position / 10000 ** (2 * i / 6)
        assert table[position, 2 * i].item() == pytest.approx(np.sin(angle), abs=1e-6)
        assert table[position, 2 * i + 1].item() == pytest.approx(np.cos(angle), abs=1e-6)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_cached_step_equals_full_forward_at_every_position(changes: dict[str, Any]) -> None:
    model = build(**changes)
    src_ids, src_len, tgt_ids = batch(model.config)
    with torch.inference_mode():
        cross = model.encode(src_ids, src_len)
        past = model.empty_cache(rows=3, cache=10)
        for position in range(tgt_ids.shape[1]):
            logits, past = model.step(tgt_ids[:, position], torch.full((3,), position), src_len, past, cross)
            # A new forward over the prefix alone: this also shows that no logit depends on a later token.
            wanted = model(src_ids, src_len, tgt_ids[:, : position + 1])[:, -1]
            assert (logits - wanted).abs().max() < 1e-5


def test_full_length_is_usable() -> None:
    model = build()
    src_ids = torch.randint(23, (1, SMALL.max_source_length))
    tgt_ids = torch.randint(19, (1, SMALL.max_target_length))
    assert model(src_ids, torch.tensor([SMALL.max_source_length]), tgt_ids).isfinite().all()


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_result_depends_on_neither_padding_nor_neighbours(changes: dict[str, Any]) -> None:
    model = build(**changes)
    src_ids, src_len, tgt_ids = batch(model.config)
    with torch.inference_mode():
        together = model(src_ids, src_len, tgt_ids)
        for row, length in enumerate(src_len.tolist()):
            alone = model(src_ids[row : row + 1, :length], src_len[row : row + 1], tgt_ids[row : row + 1])
            assert (together[row] - alone[0]).abs().max() < 1e-5
        garbage = src_ids.clone()
        garbage[1, src_len[1] :] = 0
        assert torch.equal(together[1], model(garbage, src_len, tgt_ids)[1])
        order = torch.tensor([2, 0, 1])
        assert (together[order] - model(src_ids[order], src_len[order], tgt_ids[order])).abs().max() < 1e-5


def test_rows_may_be_at_different_positions() -> None:
    model = build()
    src_ids, src_len, tgt_ids = batch(model.config)
    with torch.inference_mode():
        cross, past = model.encode(src_ids, src_len), model.empty_cache(3, 10)
        for position in range(3):
            _, past = model.step(tgt_ids[:, position], torch.full((3,), position), src_len, past, cross)
        position = torch.tensor([3, 1, 2])  # rows 1 and 2 go back and write a slot again
        logits, _ = model.step(tgt_ids[:, 5], position, src_len, past, cross)
        for row, at in enumerate(position.tolist()):
            prefix = torch.cat([tgt_ids[row, :at], tgt_ids[row, 5:6]])[None]
            wanted = model(src_ids[row : row + 1], src_len[row : row + 1], prefix)[0, -1]
            assert (logits[row] - wanted).abs().max() < 1e-5


def test_beams_share_the_cross_keys_of_their_sentence() -> None:
    model = build()
    src_ids, src_len, _ = batch(model.config)
    beam = 4
    tokens = torch.randint(19, (3 * beam,))
    with torch.inference_mode():
        shared, _ = model.step(
            tokens, torch.zeros(12, dtype=torch.long), src_len, model.empty_cache(12, 5), model.encode(src_ids, src_len)
        )
        repeated_ids, repeated_len = src_ids.repeat_interleave(beam, 0), src_len.repeat_interleave(beam)
        wanted = model(repeated_ids, repeated_len, tokens[:, None])[:, 0]
    assert (shared - wanted).abs().max() < 1e-5


def test_step_leaves_its_input_cache_alone() -> None:
    model = build()
    src_ids, src_len, tgt_ids = batch(model.config)
    past = model.empty_cache(3, 6)
    with torch.inference_mode():
        _, present = model.step(
            tgt_ids[:, 0], torch.zeros(3, dtype=torch.long), src_len, past, model.encode(src_ids, src_len)
        )
    assert not any(tensor.any() for cache in past for tensor in cache)
    assert all(tensor[:, :, 0].any() and not tensor[:, :, 1:].any() for cache in present for tensor in cache)


def test_write_cache_writes_one_slot_a_row() -> None:
    cache, update = torch.zeros(3, 2, 5, 4), torch.randn(3, 2, 1, 4)
    written = write_cache(cache, update, torch.tensor([4, 0, 2]))
    for row, slot in enumerate((4, 0, 2)):
        assert torch.equal(written[row, :, slot], update[row, :, 0])
    assert (written != 0).sum() == update.numel()


def test_attention_maps_are_those_of_the_forward() -> None:
    model = build()
    src_ids, src_len, tgt_ids = batch(model.config)
    with torch.inference_mode():
        logits, maps = model.forward_with_attention(src_ids, src_len, tgt_ids)
        assert torch.equal(logits, model(src_ids, src_len, tgt_ids))
        assert [tuple(weights.shape) for weights in maps] == [(3, 5, 8, 9)] * 3
        assert torch.allclose(maps[0].sum(-1), torch.ones(3, 5, 8), atol=1e-6)
        assert maps[0][1, :, :, 4:].abs().max() == 0  # nothing is attended to after the source's end
        # The maps mix the values to what the attention gives.
        layer, seen = model.decoder.layers[0].cross_attention, torch.randn(3, 8, 20)
        memory = KeyValue(*model.encode(src_ids, src_len)[0])
        mask = (torch.arange(9) < src_len[:, None])[:, None, None]
        mixed = (layer.weights(seen, memory, mask) @ memory.value).transpose(1, 2).flatten(2)
        assert (layer.output(mixed) - layer(seen, memory, mask)).abs().max() < 1e-5


@pytest.mark.parametrize("heads", [1, 2, 4, 10])
def test_the_encoder_has_its_own_heads_and_the_decoder_those_of_the_model(heads: int) -> None:
    model = build(n_encoder_heads=heads)
    attentions = [
        (model.encoder.layers[0].self_attention, heads),
        (model.decoder.layers[0].self_attention, SMALL.n_heads),
        (model.decoder.layers[0].cross_attention, SMALL.n_heads),
    ]
    states = torch.randn(2, 7, SMALL.d_model)
    for ours, count in attentions:
        theirs = torch.nn.MultiheadAttention(SMALL.d_model, count, batch_first=True)
        parts = (ours.query, ours.key, ours.value)
        with torch.no_grad():
            theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
            theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
            theirs.out_proj.load_state_dict(ours.output.state_dict())
            wanted, _ = theirs(states, states, states, need_weights=False)
            got = ours(states, ours.key_value(states), torch.ones(1, 1, 7, 7, dtype=torch.bool))
        assert (got - wanted).abs().max() < 1e-5
    assert model.empty_cache(3, 6)[0].key.shape == (3, SMALL.n_heads, 6, SMALL.head_dim)
    table = build(n_encoder_heads=heads, positions="relative", max_distance=3).state_dict()
    assert table["encoder.positions.table"].shape == (7, heads)
    assert table["decoder.positions.table"].shape == (4, SMALL.n_heads)


def test_a_model_without_positions_is_one_whose_table_is_zero() -> None:
    model, other = build(positions="none"), build(positions="learned")
    weights = model.state_dict()
    assert not [name for name in weights if "positions" in name]
    tables = {name: torch.zeros_like(tensor) for name, tensor in other.state_dict().items() if "positions" in name}
    other.load_state_dict({**weights, **tables})
    given = batch(SMALL)
    with torch.inference_mode():
        assert torch.equal(model(*given), other(*given))


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize(("field", "name"), [("final_norm", "norm"), ("embedding_norm", "embedding_norm")])
def test_a_norm_stands_in_one_stack(side: str, field: str, name: str) -> None:
    model, without = build(**{field: True, f"{field}_in": side, f"{field}_eps": 0.5}), build()
    norms = {name: tensor for name, tensor in model.state_dict().items() if name not in without.state_dict()}
    assert set(norms) == {f"{side}.{name}.weight", f"{side}.{name}.bias"}
    without.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name not in norms})
    norm = torch.nn.LayerNorm(SMALL.d_model, 0.5)
    norm.load_state_dict({name.rpartition(".")[2]: tensor for name, tensor in norms.items()})
    setattr(getattr(without, side), name, norm)
    given = batch(SMALL)
    with torch.inference_mode():
        assert torch.equal(model(*given), without(*given))


def test_dropout_acts_in_training_only() -> None:
    model = build(dropout=0.5)
    src_ids, src_len, tgt_ids = batch(model.config)
    assert torch.equal(model(src_ids, src_len, tgt_ids), model(src_ids, src_len, tgt_ids))
    model.train()
    assert not torch.equal(model(src_ids, src_len, tgt_ids), model(src_ids, src_len, tgt_ids))


def test_classifier_reads_the_first_token_s_state() -> None:
    config = SMALL.replace(n_decoder_layers=0, tgt_vocab_size=0, max_target_length=0, n_classes=4)
    model = EncoderClassifier(config).eval()
    src_ids, src_len, _ = batch(SMALL)
    with torch.inference_mode():
        wanted = model.head(model.encoder(src_ids, src_len)[:, 0])
        assert torch.equal(model(src_ids, src_len), wanted)
        alone = model(src_ids[1:2, :4], src_len[1:2])
        assert (alone[0] - wanted[1]).abs().max() < 1e-5
