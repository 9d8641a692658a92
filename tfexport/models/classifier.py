"""An encoder classifier: the canonical encoder with a linear head on the first token's state."""

from __future__ import annotations

from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.models.transformer import Encoder, initialise


class EncoderClassifier(nn.Module):
    """Classifies source sequences. The config has `n_classes` above 0 and no decoder."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.head = nn.Linear(config.d_model, config.n_classes)
        initialise(self)

    def forward(self, src_ids: Tensor, src_len: Tensor) -> Tensor:
        """Classify `src_ids` [batch, src] of lengths `src_len` [batch]; returns float32 logits [batch, n_classes]."""
        return self.head(self.encoder(src_ids, src_len)[:, 0].to(self.head.weight.dtype)).float()
