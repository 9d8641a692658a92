"""The reference models are right by themselves: names, masks, causality, and searches."""

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from makers.references.annotated import AnnotatedTransformer, StdNorm
from makers.references.base import BaseTransformer, sinusoids
from makers.references.decode import beam, greedy, next_log_probs
from makers.references.per_head import PerHeadTransformer, sinusoid_table
from makers.references.tutorial import TutorialClassifier, TutorialTransformer

PAD, BOS, EOS = 1, 2, 3
SIZES = {"d_model": 8, "n_heads": 2, "d_ffn": 12, "max_len": 20, "pad_id": PAD}
ENCODER, DECODER = {"n_encoder_layers": 2}, {"n_decoder_layers": 3}
VOCABS = {"src_vocab": 11, "tgt_vocab": 13}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "tutorial": lambda: TutorialTransformer(**VOCABS, **SIZES, **ENCODER, **DECODER),
    "annotated": lambda: AnnotatedTransformer(**VOCABS, **SIZES, **ENCODER, **DECODER),
    "per-head": lambda: PerHeadTransformer(**VOCABS, **SIZES, **ENCODER, **DECODER),
    "base": lambda: BaseTransformer(vocab=13, **SIZES, **ENCODER, **DECODER),
    "classifier": lambda: TutorialClassifier(src_vocab=11, n_classes=5, **SIZES, **ENCODER),
}
TRANSLATORS = [name for name in MODELS if name != "classifier"]

# One encoder layer and one decoder layer of two heads.
# S, T: vocabularies, D: d, H: d / heads, F: ffn, L: max_len, C: classes.
LAYOUTS = {
    "tutorial": """
        encoder.tok_embedding.weight S,D
        encoder.pos_embedding.weight L,D
        encoder.layers.0.self_attention.fc_q.{weight,bias} D,D
        encoder.layers.0.self_attention.fc_k.{weight,bias} D,D
        encoder.layers.0.self_attention.fc_v.{weight,bias} D,D
        encoder.layers.0.self_attention.fc_o.{weight,bias} D,D
        encoder.layers.0.self_attn_layer_norm.{weight,bias} D
        encoder.layers.0.positionwise_feedforward.fc_1.{weight,bias} F,D
        encoder.layers.0.positionwise_feedforward.fc_2.{weight,bias} D,F
        encoder.layers.0.ff_layer_norm.{weight,bias} D
        decoder.tok_embedding.weight T,D
        decoder.pos_embedding.weight L,D
        decoder.layers.0.self_attention.fc_q.{weight,bias} D,D
        decoder.layers.0.self_attention.fc_k.{weight,bias} D,D
        decoder.layers.0.self_attention.fc_v.{weight,bias} D,D
        decoder.layers.0.self_attention.fc_o.{weight,bias} D,D
        decoder.layers.0.self_attn_layer_norm.{weight,bias} D
        decoder.layers.0.encoder_attention.fc_q.{weight,bias} D,D
        decoder.layers.0.encoder_attention.fc_k.{weight,bias} D,D
        decoder.layers.0.encoder_attention.fc_v.{weight,bias} D,D
        decoder.layers.0.encoder_attention.fc_o.{weight,bias} D,D
        decoder.layers.0.enc_attn_layer_norm.{weight,bias} D
        decoder.layers.0.positionwise_feedforward.fc_1.{weight,bias} F,D
        decoder.layers.0.positionwise_feedforward.fc_2.{weight,bias} D,F
        decoder.layers.0.ff_layer_norm.{weight,bias} D
        decoder.fc_out.{weight,bias} T,D
    """,
    "classifier": """
        encoder.tok_embedding.weight S,D
        encoder.pos_embedding.weight L,D
        encoder.layers.0.self_attention.fc_q.{weight,bias} D,D
        encoder.layers.0.self_attention.fc_k.{weight,bias} D,D
        encoder.layers.0.self_attention.fc_v.{weight,bias} D,D
        encoder.layers.0.self_attention.fc_o.{weight,bias} D,D
        encoder.layers.0.self_attn_layer_norm.{weight,bias} D
        encoder.layers.0.positionwise_feedforward.fc_1.{weight,bias} F,D
        encoder.layers.0.positionwise_feedforward.fc_2.{weight,bias} D,F
        encoder.layers.0.ff_layer_norm.{weight,bias} D
        fc_out.{weight,bias} C,D
    """,
    "annotated": """
        src_embed.0.lut.weight S,D
        src_embed.1.pe 1,L,D
        tgt_embed.0.lut.weight T,D
        tgt_embed.1.pe 1,L,D
        encoder.layers.0.self_attn.linears.0.{weight,bias} D,D
        encoder.layers.0.self_attn.linears.1.{weight,bias} D,D
        encoder.layers.0.self_attn.linears.2.{weight,bias} D,D
        encoder.layers.0.self_attn.linears.3.{weight,bias} D,D
        encoder.layers.0.feed_forward.w_1.{weight,bias} F,D
        encoder.layers.0.feed_forward.w_2.{weight,bias} D,F
        encoder.layers.0.sublayer.0.norm.{a_2,b_2} D
        encoder.layers.0.sublayer.1.norm.{a_2,b_2} D
        encoder.norm.{a_2,b_2} D
        decoder.layers.0.self_attn.linears.0.{weight,bias} D,D
        decoder.layers.0.self_attn.linears.1.{weight,bias} D,D
        decoder.layers.0.self_attn.linears.2.{weight,bias} D,D
        decoder.layers.0.self_attn.linears.3.{weight,bias} D,D
        decoder.layers.0.src_attn.linears.0.{weight,bias} D,D
        decoder.layers.0.src_attn.linears.1.{weight,bias} D,D
        decoder.layers.0.src_attn.linears.2.{weight,bias} D,D
        decoder.layers.0.src_attn.linears.3.{weight,bias} D,D
        decoder.layers.0.feed_forward.w_1.{weight,bias} F,D
        decoder.layers.0.feed_forward.w_2.{weight,bias} D,F
        decoder.layers.0.sublayer.0.norm.{a_2,b_2} D
        decoder.layers.0.sublayer.1.norm.{a_2,b_2} D
        decoder.layers.0.sublayer.2.norm.{a_2,b_2} D
        decoder.norm.{a_2,b_2} D
        generator.proj.{weight,bias} T,D
    """,
    "per-head": """
        encoder.token_embedding.weight S,D
        encoder.pos_embedding.weight L+1,D
        encoder.encoder_layers.0.layer_norm.{weight,bias} D
        encoder.encoder_layers.0.self_attention.attentions.0.{q_w,k_w,v_w}.weight H,D
        encoder.encoder_layers.0.self_attention.attentions.1.{q_w,k_w,v_w}.weight H,D
        encoder.encoder_layers.0.self_attention.o_w.weight D,D
        encoder.encoder_layers.0.position_wise_ffn.conv1.{weight,bias} F,D,1
        encoder.encoder_layers.0.position_wise_ffn.conv2.{weight,bias} D,F,1
        encoder.layer_norm.{weight,bias} D
        decoder.token_embedding.weight T,D
        decoder.pos_embedding.weight L+1,D
        decoder.decoder_layers.0.layer_norm.{weight,bias} D
        decoder.decoder_layers.0.self_attention.attentions.0.{q_w,k_w,v_w}.weight H,D
        decoder.decoder_layers.0.self_attention.attentions.1.{q_w,k_w,v_w}.weight H,D
        decoder.decoder_layers.0.self_attention.o_w.weight D,D
        decoder.decoder_layers.0.encoder_attention.attentions.0.{q_w,k_w,v_w}.weight H,D
        decoder.decoder_layers.0.encoder_attention.attentions.1.{q_w,k_w,v_w}.weight H,D
        decoder.decoder_layers.0.encoder_attention.o_w.weight D,D
        decoder.decoder_layers.0.position_wise_ffn.conv1.{weight,bias} F,D,1
        decoder.decoder_layers.0.position_wise_ffn.conv2.{weight,bias} D,F,1
        decoder.layer_norm.{weight,bias} D
    """,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second thread, and threads that wait for a busy core cost minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_model(name: str) -> nn.Module:
    """Random norms and biases too: with ones and zeros a swapped pair would go unseen."""
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.requires_grad:
            is_matrix = parameter.dim() > 1
            parameter.data = noise * parameter.shape[1] ** -0.5 if is_matrix else parameter.data + 0.3 * noise
    return model.eval()


def expand(layout: str) -> dict[str, tuple[int, ...]]:
    """{name: shape} of a layout above; of a {weight,bias} pair, the bias takes the first dimension."""
    sizes = {"S": 11, "T": 13, "D": 8, "H": 4, "F": 12, "L": 20, "L+1": 21, "C": 5, "1": 1}
    shapes = {}
    for line in layout.split("\n"):
        if not line.strip():
            continue
        name, dims = line.split()
        shape = tuple(sizes[dim] for dim in dims.split(","))
        before, _, rest = name.partition("{")
        options, _, after = rest.partition("}")
        for option in options.split(","):
            shapes[before + option + after] = shape[:1] if option == "bias" else shape
    return shapes


@pytest.mark.parametrize("name", LAYOUTS)
def test_state_dict_has_exactly_the_names_and_shapes_of_the_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODER, "n_encoder_layers", 1)
    monkeypatch.setitem(DECODER, "n_decoder_layers", 1)
    shapes = {key: tuple(tensor.shape) for key, tensor in MODELS[name]().state_dict().items()}
    assert shapes == expand(LAYOUTS[name])


@pytest.mark.parametrize("name", TRANSLATORS)
def test_a_row_does_not_see_its_padding_nor_the_other_row(name: str) -> None:
    model = random_model(name)
    src = torch.tensor([[2, 5, 6, 3, PAD, PAD, PAD], [2, 4, 7, 8, 9, 10, 3]])
    tgt = torch.tensor([[2, 5, 6, PAD, PAD], [2, 12, 11, 4, 7]])
    with torch.no_grad():
        both = model(src, tgt)
        short, long = model(src[:1, :4], tgt[:1, :3]), model(src[1:], tgt[1:])
    assert both.shape == (2, 5, 13)
    assert both.dtype == torch.float32
    torch.testing.assert_close(both[:1, :3], short, atol=1e-5, rtol=0)
    torch.testing.assert_close(both[1:], long, atol=1e-5, rtol=0)


def test_the_classifier_does_not_see_padding() -> None:
    model = random_model("classifier")
    with torch.no_grad():
        both = model(torch.tensor([[2, 5, 6, 3, PAD, PAD], [2, 4, 7, 8, 9, 3]]))
        short = model(torch.tensor([[2, 5, 6, 3]]))
    assert both.shape == (2, 5)
    torch.testing.assert_close(both[:1], short, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_logits_depend_on_the_past_and_the_source_only(name: str) -> None:
    model = random_model(name)
    src = torch.tensor([[2, 5, 6, 3]])
    with torch.no_grad():
        logits = model(src, torch.tensor([[2, 5, 6, 7, 8]]))
        other_future = model(src, torch.tensor([[2, 5, 6, 9, 10]]))
        other_past = model(src, torch.tensor([[2, 4, 6, 7, 8]]))
        other_source = model(torch.tensor([[2, 5, 7, 3]]), torch.tensor([[2, 5, 6, 7, 8]]))
    torch.testing.assert_close(logits[:, :3], other_future[:, :3], atol=1e-6, rtol=0)
    assert (logits - other_past).abs()[0, 1:].amax(dim=-1).min() > 1e-4
    assert (logits - other_source).abs()[0].amax(dim=-1).min() > 1e-4


@pytest.mark.parametrize(("name", "hidden"), [("tutorial", True), ("per-head", True), ("annotated", False)])
def test_a_pad_among_the_target_tokens_is_hidden_where_the_original_hides_it(name: str, hidden: bool) -> None:
    model = random_model(name)
    embedding = model.tgt_embed[0].lut if name == "annotated" else next(model.decoder.children())
    src, tgt = torch.tensor([[2, 5, 6, 3]]), torch.tensor([[2, PAD, 6, 7]])
    with torch.no_grad():
        before = model(src, tgt)[0, 2:]
        embedding.weight[PAD] *= -2.0  # not a shift: a norm that follows would take it away again
        after = model(src, tgt)[0, 2:]
    # The pad's own logit may move with its embedding, where that is the output matrix too.
    others = [token for token in range(13) if token != PAD]
    assert torch.allclose(before[:, others], after[:, others], atol=1e-6) == hidden


def test_base_agrees_with_the_layers_of_pytorch() -> None:
    model = random_model("base")
    options = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": True}
    src, tgt = torch.tensor([[2, 5, 6, 3, PAD], [2, 4, 7, 8, 3]]), torch.tensor([[2, 5, 6], [2, 4, 7]])
    hide, future = src == PAD, torch.ones(3, 3, dtype=torch.bool).triu(diagonal=1)

    def copied(theirs: nn.Module, ours: nn.Module) -> nn.Module:
        attentions = {"self_attn": ours.self_attention, "multihead_attn": getattr(ours, "cross_attention", None)}
        norms = [ours.self_norm, *([ours.cross_norm] if attentions["multihead_attn"] else []), ours.ffn_norm]
        state = {}
        for kind in ("weight", "bias"):
            state |= {f"norm{i}.{kind}": getattr(norm, kind) for i, norm in enumerate(norms, start=1)}
            state |= {f"linear1.{kind}": getattr(ours.feed_forward.inner, kind)}
            state |= {f"linear2.{kind}": getattr(ours.feed_forward.outer, kind)}
            for name, attention in attentions.items():
                if attention:
                    packed = [getattr(linear, kind) for linear in (attention.q, attention.k, attention.v)]
                    state |= {f"{name}.in_proj_{kind}": torch.cat(packed)}
                    state |= {f"{name}.out_proj.{kind}": getattr(attention.out, kind)}
        theirs.load_state_dict(state)
        return theirs

    with torch.no_grad():
        memory, x = model.embed(src), model.embed(tgt)
        for layer in model.encoder:
            memory = copied(nn.TransformerEncoderLayer(8, 2, **options), layer)(memory, src_key_padding_mask=hide)
        for layer in model.decoder:
            theirs = copied(nn.TransformerDecoderLayer(8, 2, **options), layer)
            x = theirs(x, memory, tgt_mask=future, memory_key_padding_mask=hide)
        torch.testing.assert_close(x @ model.embedding.weight.T, model(src, tgt), atol=1e-5, rtol=0)


def test_positions_and_norms_by_their_formulas() -> None:
    for position, column in itertools.product(range(21), range(8)):
        wave = math.sin if column % 2 == 0 else math.cos
        paper = wave(position / 10000 ** (2 * (column // 2) / 8))
        assert sinusoids(21, 8)[position, column].item() == pytest.approx(paper, abs=1e-6)
        if position < 20:
            assert MODELS["annotated"]().src_embed[1].pe[0, position, column].item() == pytest.approx(paper, abs=1e-5)
        per_head = wave(position / 10000 ** (2 * column / 8)) if position else 0.0
        assert sinusoid_table(21, 8)[position, column].item() == pytest.approx(per_head, abs=1e-6)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    expected = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, unbiased=True) + 1e-6)
    torch.testing.assert_close(StdNorm(8)(x), expected)


# --- searches


def scripted(table: dict[tuple[int, ...], list[float]]) -> Callable[[Tensor, Tensor], Tensor]:
    """A model that reads the probabilities of the next token off a table of prefixes (without bos)."""

    def model(src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
        vocab = len(next(iter(table.values())))
        prefixes = [[tuple(row[1 : n + 1]) for n in range(len(row))] for row in tgt_ids.tolist()]
        return torch.tensor([[table.get(prefix, [1 / vocab] * vocab) for prefix in row] for row in prefixes]).log()

    return model


A, B, END = 0, 1, 2


def test_beam_by_hand() -> None:
    model = scripted(
        {
            (): [0.4, 0.35, 0.25],  # eos has rank 2 = beam: dropped
            (A,): [0.3, 0.2, 0.5],  # A eos 0.2 has rank 0: finished
            (B,): [0.5, 0.1, 0.4],  # B A 0.175 lives on; B eos 0.14 has rank 2: dropped
            (B, A): [0.1, 0.1, 0.8],  # 0.14: finished
            (A, A): [0.05, 0.05, 0.9],  # 0.108: finished, but it is the third
        }
    )
    found = beam(model, [0], bos=2, eos=END, max_length=10, beam=2, length_penalty=0.0)
    assert [tokens for tokens, _ in found] == [[A, END], [B, A, END]]
    assert [math.exp(score) for _, score in found] == pytest.approx([0.2, 0.14])
    # With a penalty the longer one is lifted: log(0.14) / (8 / 6) > log(0.2) / (7 / 6).
    found = beam(model, [0], bos=2, eos=END, max_length=3, beam=2, length_penalty=2.0)
    assert found[0] == ([B, A, END], pytest.approx(math.log(0.14) / (8 / 6) ** 2))


def test_equal_sums_go_by_hypothesis_then_by_token() -> None:
    model = scripted({(): [0.45, 0.45, 0.1], (A,): [0.45, 0.45, 0.1], (B,): [0.45, 0.45, 0.1]})
    found = beam(model, [0], bos=2, eos=END, max_length=2, beam=2, length_penalty=1.0)
    assert [tokens for tokens, _ in found] == [[A, A], [A, B]]
    assert greedy(model, [0], bos=2, eos=END, max_length=3) == [A, A, A]


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.5])
def test_a_beam_wide_enough_is_an_exhaustive_search(length_penalty: float) -> None:
    torch.manual_seed(0)
    model = BaseTransformer(vocab=4, d_model=8, n_heads=2, d_ffn=8, n_encoder_layers=1, n_decoder_layers=1, pad_id=0)
    every = []
    for n in (1, 2, 3):
        for tokens in itertools.product(range(4), repeat=n):
            if EOS not in tokens[:-1] and (tokens[-1] == EOS or n == 3):
                steps = [next_log_probs(model, [1, 3], [[BOS, *tokens[:i]]])[0][tokens[i]] for i in range(n)]
                every.append((list(tokens), sum(steps) / ((5 + n) / 6) ** length_penalty))
    every.sort(key=lambda hypothesis: -hypothesis[1])
    found = beam(model, [1, 3], bos=BOS, eos=EOS, max_length=3, beam=100, length_penalty=length_penalty)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in every]
    assert [score for _, score in found] == pytest.approx([score for _, score in every])


@pytest.mark.parametrize("name", TRANSLATORS)
def test_one_beam_without_penalty_is_greedy(name: str) -> None:
    model = random_model(name)
    for src_ids in ([2, 5, 6, 3], [2, 4, 7, 8, 9, 3]):
        found = beam(model, src_ids, bos=BOS, eos=EOS, max_length=12, beam=1, length_penalty=0.0)
        assert [tokens for tokens, _ in found] == [greedy(model, src_ids, bos=BOS, eos=EOS, max_length=12)]
