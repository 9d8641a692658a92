"""Ways to call a module, which differ in arguments, masks and the form of the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfexport.errors import CheckpointError
from tfexport.models.live.call import WorkingCall, find_call
from tfexport.models.live.ids import Ids

IDS = Ids(0, frozenset((0, 1, 2)), {"encoder": 20, "decoder": 20})
PAD = IDS.pad


class Base(nn.Module):
    """Means of the source's and of earlier target tokens: all that a call depends on, without a Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def encode(self, src: Tensor, keep: Tensor) -> Tensor:
        """The mean [batch, 1, 8] of the tokens that `keep` [batch, src] has."""
        states = self.table(src) * keep[..., None]
        return states.sum(1, keepdim=True) / keep.sum(1)[:, None, None]

    def decode(self, memory: Tensor, tgt: Tensor, keep: Tensor) -> Tensor:
        """Logits from the tokens that `keep` [tgt, tgt] has for each token."""
        return self.out(memory + keep.to(self.table.weight.dtype) @ self.table(tgt))


def causal(tgt: Tensor) -> Tensor:
    return torch.ones(tgt.shape[1], tgt.shape[1]).tril()


class Inside(Base):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.decode(self.encode(src, src != PAD), tgt, causal(tgt))


class LengthFirst(Inside):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return super().forward(src.T, tgt.T).transpose(0, 1)


class TargetFirst(Inside):
    def forward(self, tgt: Tensor, src: Tensor) -> Tensor:
        return super().forward(src, tgt)


class Hidden(Base):
    """Masks of two axes, True where a token is hidden."""

    def forward(self, src: Tensor, trg: Tensor, look_ahead: Any, src_padding_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        assert tgt_mask.dtype == torch.bool
        assert tgt_mask[0, 1]
        return self.decode(self.encode(src, ~src_padding_mask), trg, ~tgt_mask)


class FourAxes(Base):
    """Masks [batch, 1, queries, keys], 1 where a token is read."""

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        assert tgt_mask.dtype == torch.int64
        assert src_mask.shape[1:3] == (1, 1)
        return self.decode(self.encode(src, src_mask[:, 0, 0]), tgt, tgt_mask[0, 0])


class OfTensorFlow(Base):
    """Masks have 1 where a key is hidden, and the decoder's mask of padding is that of the source."""

    def forward(self, inp: Tensor, tar: Tensor, look_ahead_mask: Tensor, dec_padding_mask: Tensor) -> Tensor:
        assert dec_padding_mask.shape == (len(inp), 1, 1, inp.shape[1])
        memory = self.encode(inp, ~dec_padding_mask[:, 0, 0])
        return self.decode(memory, tar, ~look_ahead_mask[0, 0])


class Lengths(Base):
    def forward(self, src: Tensor, tgt: Tensor, src_len: Tensor) -> Tensor:
        return self.decode(self.encode(src, torch.arange(src.shape[1]) < src_len[:, None]), tgt, causal(tgt))


class ShortNames(Base):
    """Lengths whose names tell the side by one letter."""

    def forward(self, x: Tensor, x_len: Tensor, y: Tensor, y_len: Tensor) -> Tensor:
        assert y_len.shape == (len(y),)
        assert int(y_len.max()) == y.shape[1]
        keep = torch.arange(x.shape[1]) < x_len[:, None]
        return self.decode(self.encode(x, keep), y, causal(y))


class OfBatch(Inside):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        memory = self.encode(batch["input_ids"], batch["attention_mask"] == 1)
        return self.decode(memory, batch["decoder_input_ids"], causal(batch["decoder_input_ids"]))


class Shifting(Inside):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return super().forward(src, tgt[:, :-1])


class Flat(Inside):
    def forward(self, src: Tensor, tgt: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return torch.zeros(()), super().forward(src, tgt).flatten(0, 1)


class Idle(Base):
    """The projection is not part of the forward."""

    def decode(self, memory: Tensor, tgt: Tensor, keep: Tensor) -> Tensor:
        return memory + keep.to(self.table.weight.dtype) @ self.table(tgt)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.decode(self.encode(src, src != PAD), tgt, causal(tgt))


class Methods(nn.Module):
    """No forward: the encoder also returns a mask, which the decoder takes back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Base()

    def encode(self, src: Tensor) -> tuple[Tensor, Tensor]:
        keep = src != PAD
        return self.inner.encode(src, keep), keep

    def decode(self, tgt: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        assert mask.shape[0] == len(tgt)
        return self.inner.decode(memory, tgt, causal(tgt))


class SourceAgain(nn.Module):
    """No forward: the decoder takes the source for its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Base()

    def encode(self, src: Tensor) -> Tensor:
        return self.inner.encode(src, src != PAD)

    def decode(self, src: Tensor, memory: Tensor, tar: Tensor) -> Tensor:
        assert src.shape[1] != tar.shape[1]
        return self.inner.decode(memory, tar, causal(tar))


def found(module: nn.Module, **options: Any) -> WorkingCall:
    return find_call(module.double().eval(), IDS, options.pop("vocab", 20), **options)


@pytest.mark.parametrize(
    ("kind", "about"),
    [
        (Inside, "forward(src, tgt), batch first"),
        (LengthFirst, "forward(src, tgt), length first"),
        (TargetFirst, "forward(src, tgt), batch first"),
        (Hidden, "(hide, 2 axes)), batch first"),
        (FourAxes, "(int, 4 axes)), batch first"),
        (OfTensorFlow, "(hide, 4 axes)), batch first"),
        (Lengths, "forward(src, tgt, src_len), batch first"),
        (ShortNames, "forward(x, y, x_len, y_len), batch first"),
        (OfBatch, "with a dict of tensors"),
        (Shifting, "one more target token"),
        (Flat, "forward(src, tgt), batch first"),
        (Idle, "forward(src, tgt), batch first"),
        (Methods, "decode(encode(src), tgt)"),
        (SourceAgain, "decode(encode(src), tgt)"),
    ],
)
def test_each_way_gives_the_logits_of_the_module(kind: type[nn.Module], about: str) -> None:
    torch.manual_seed(0)
    module = kind()
    call = found(module)
    assert about in call.about
    assert call.masks_padding
    base: Any = getattr(module, "inner", module)
    src, tgt = torch.tensor([[5, 6, PAD], [7, 8, 9]]), torch.tensor([[3, 4], [5, 3]])
    memory = base.encode(src, src != PAD)
    expected = base.out(memory + causal(tgt).double() @ base.table(tgt))
    torch.testing.assert_close(call.call(src, tgt), expected)


def test_arguments_that_nobody_knows_are_said() -> None:
    class Styled(Inside):
        def forward(self, src: Tensor, tgt: Tensor, style: Any, tone: Any = None) -> Tensor:  # type: ignore[override]
            return super().forward(src, tgt)

    call = found(Styled())
    assert call.guessed == ("style",)
    assert call.about == "forward(src, tgt, style), batch first, without tone"


def test_a_batch_has_the_default_of_a_name_that_says_nothing() -> None:
    class Headed(OfBatch):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            assert batch.get("head") is None
            assert batch.get("decoder_input_ids") is not None
            return super().forward(batch)

    assert found(Headed()).about.endswith("with a dict of tensors by their names")


def test_a_module_that_reads_padding_is_called_without_it() -> None:
    class Reading(Base):
        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            return self.decode(self.encode(src, torch.ones_like(src)), tgt, causal(tgt))

    assert not found(Reading()).masks_padding


def test_a_forward_that_puts_the_first_target_token_gets_the_other_ones() -> None:
    class Shifting(Base):
        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            tgt = torch.cat([torch.full_like(tgt[:, :1], 2), tgt[:, :-1]], 1)
            return Base.decode(self, Base.encode(self, src, src != PAD), tgt, causal(tgt))

        encode = decode = None  # type: ignore[assignment]

    module = Shifting()
    call = found(module)
    assert call.fixes_start
    src, tgt = torch.tensor([[4, 5, 6]]), torch.tensor([[2, 7, 8]])
    expected = module(src, torch.tensor([[7, 8, 9]]))
    torch.testing.assert_close(call.call(src, tgt), expected)


@pytest.mark.parametrize(
    ("keep", "about"),
    [
        (lambda tgt: causal(tgt) * 0 + 1, "no causal mask"),
        (lambda tgt: causal(tgt) * 0, "the first target token does not change the first logits"),
    ],
    ids=["not causal", "no targets"],
)
def test_what_is_no_decoder_is_refused_with_an_adapter(keep: Any, about: str) -> None:
    class Wrong(Base):
        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            return Base.decode(self, Base.encode(self, src, src != PAD), tgt, keep(tgt))

        encode = decode = None  # type: ignore[assignment]

    with pytest.raises(CheckpointError, match=about) as caught:
        found(Wrong())
    assert "def call(model, src, tgt)" in caught.value.example


def test_an_adapter_is_the_only_way_that_is_tried() -> None:
    def call(model: Any, src: Tensor, tgt: Tensor) -> Tensor:
        return model.decode(model.encode(src, src != PAD), tgt, causal(tgt))

    assert found(Base(), adapter=call).about == "call(model, src, tgt)"
    with pytest.raises(CheckpointError, match=r"`call` of your file does not work with Inside: returns \[3, 6, 8\]"):
        found(Inside(), adapter=lambda model, src, tgt: model.table(src))


class OfSources(Base):
    """A classifier."""

    def forward(self, src: Tensor) -> Tensor:
        return self.out(self.encode(src, src != PAD)[:, 0])


def test_a_classifier_is_led_to_its_page() -> None:
    with pytest.raises(
        CheckpointError, match=r"reads no encoder classifiers: see Encoder classifiers in docs/guides/own"
    ):
        find_call(OfSources().double().eval(), IDS, None)
