"""A runtime that runs a `torch.nn.Module` anew for every token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from tests.support.fakes import ScriptedRuntime, ScriptedState
from tfexport.config import ModelConfig
from tfexport.runtimes.outputs import FloatArray, IntArray
from tfexport.search.search import pad


class ModuleRuntime(ScriptedRuntime):
    """Runs a user's module over the whole of every target for each token: no cache, its own masks."""

    name = "module"

    def __init__(self, module: nn.Module, config: ModelConfig, *, pad_id: int = 1):
        super().__init__(lambda source, tokens: np.zeros(0, dtype=np.float32), config)
        self.module, self.pad_id = module, pad_id

    def step(self, state: ScriptedState, tokens: IntArray) -> tuple[FloatArray, ScriptedState]:
        prefixes = [(*prefix, token) for prefix, token in zip(state.prefixes, tokens.tolist(), strict=True)]
        sources = [state.sources[row // state.beam] for row in range(state.rows)]
        return self.logits(sources, prefixes)[:, -1], ScriptedState(state.sources, prefixes, state.beam)

    def logits(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> FloatArray:
        """Teacher-forced logits [batch, tgt, vocab] of padded batches."""
        (src_ids, _), (tgt_ids, _) = pad(sources, self.pad_id), pad(targets, self.pad_id)
        with torch.inference_mode():
            return self.module(torch.from_numpy(src_ids), torch.from_numpy(tgt_ids)).numpy()
