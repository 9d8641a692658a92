"""Several steps of a search in one launch: the device chooses the tokens, and the host reads a log afterwards.

    push ─> step ─> search ─> step ─> search ─> ... ─> pull      8 steps; one copy each way, one wait
              └─ best ─┘  └─ tokens, scores, mask ─┘

The search graph of a step writes the inputs of the next one. Each step has its own part of the log, so that nothing is
overwritten before it is read. Two masks of a shared cache take turns. The host copies the log, because the next launch may
begin while the host still reads it. A launch is recorded when it runs for the second time: sizes that occur once are not
worth a recording, and work must have run once before it is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import ALIGNMENT, BEST_TOKENS, ITEM_SIZES
from tfexport.runtimes.base import AHEAD, Ahead
from tfexport.runtimes.device import ATTEMPTS, Call, DeviceTensor
from tfexport.runtimes.device_pool import BatchNumber, Mirrored
from tfexport.runtimes.live_rows import LiveRows
from tfexport.runtimes.outputs import Continuations
from tfexport.runtimes.workspace import Executable, SearchGraphs, Workspace

STEPS = np.arange(AHEAD)[:, None]

Spec = tuple[tuple[int, ...], str]


def steps_of(shape: tuple[int, ...], dtype: str) -> Spec:
    """The spec of one tensor [AHEAD, numbers] that holds a tensor of this shape for each step. Each begins aligned."""
    step = ALIGNMENT // ITEM_SIZES[dtype]
    return (AHEAD, -(-math.prod(shape) // step) * step), dtype


def at_step(tensor: DeviceTensor, step: int, shape: tuple[int, ...]) -> DeviceTensor:
    """The tensor of one step in a tensor with the spec of `steps_of`."""
    return DeviceTensor(tensor.address + step * (tensor.nbytes // AHEAD), shape, tensor.dtype)


def every_step(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The arrays of all steps, [AHEAD, *shape], as a view of the mirror of a tensor with the spec of `steps_of`."""
    return array[:, : math.prod(shape)].reshape(AHEAD, *shape)


def slots_needed(filled: int, workspace: Workspace) -> int:
    """The steps for which a cache must have room, for a launch after `filled` tokens. No output has tokens after the largest
    cache."""
    return min(filled + AHEAD, max(workspace.graphs.buckets.cache))


def positions(workspace: Workspace) -> int:
    """The number of positions that steps may have."""
    return min(workspace.config.max_target_length, max(workspace.graphs.buckets.cache))


def tokens_needed(request: Ahead, workspace: Workspace) -> int:
    """The number of best tokens of a row that a search needs: its candidates, and as many as may be banned."""
    wanted = request.candidates + max(map(len, request.banned))
    of_step = min(BEST_TOKENS, workspace.config.tgt_vocab_size)  # the number that the step graph computes
    return of_step if wanted <= of_step else min(wanted, workspace.config.tgt_vocab_size)


class Recording:
    """Work that is recorded when it runs for the second time.

    Args:
        inputs, log: the tensors that the work copies to the device first, and to the host at its end.
    """

    def __init__(self, graphs: SearchGraphs, work: Call, inputs: Mirrored, log: Mirrored):
        self._graphs, self._work = graphs, work
        self.inputs, self.log = inputs, log
        self._runs = 0
        self._recorded: Call | None = None

    def __call__(self) -> None:
        if self._recorded is None and 0 < self._runs <= ATTEMPTS:
            self._recorded = self._graphs.record(self._work, is_last=self._runs == ATTEMPTS)
        self._runs += 1
        (self._recorded or self._work)()


class Tables:
    """The numbers that a search adds to the log-probabilities of tokens, in every step of a launch.

    They are copied to the device when they differ from the numbers of the last launch, which may be another batch's.
    """

    def __init__(self, workspace: Workspace):
        self._vocab = (workspace.config.tgt_vocab_size,)
        tensors = {"bias": steps_of(self._vocab, "float32"), "leaving": (self._vocab, "float32")}
        self._region = workspace.region(None, "search tables", **tensors)
        self._host = workspace.mirrored(self._region, *tensors)
        self._device = workspace.graphs.device
        self._filled: Any = None

    def bias(self, step: int) -> DeviceTensor:
        """-inf for the banned tokens of a step and 0 for others, [vocab] float32."""
        return at_step(self._region["bias"], step, self._vocab)

    @property
    def leaving(self) -> DeviceTensor:
        """Below 0 for the tokens with which a hypothesis leaves the beam, and 0 for others, [vocab] float32."""
        return self._region["leaving"]

    def fill(self, request: Ahead) -> None:
        """Enqueue the copy of the numbers for `request`, if they are not on the device."""
        wanted = (request.banned, request.end_ids, request.candidates)
        if wanted == self._filled:
            return
        self._device.synchronize()  # a launch of another thread may be under way, and its tables not copied yet
        bias = every_step(self._host["bias"], self._vocab)
        bias[:] = 0.0
        for step, banned in enumerate(request.banned):
            bias[step, list(banned)] = -np.inf
        self._host["leaving"][:] = 0.0
        self._host["leaving"][list(request.end_ids)] = -request.candidates
        self._host.push()
        self._filled = wanted


class _Launch:
    """A launch over the buffers of a batch.

    Args:
        step: the step graph.
        tensors: the inputs and outputs of the step graph, as the host binds them for a single step.
        top_k: the number of best tokens of a row that the search needs.
        inputs, log: tensors that are copied to the device before the launch, and to the host after it.
        inner: tensors that stay on the device. Either `inner` or `log` has the `best.log_probs` of each step.
    """

    def __init__(
        self,
        workspace: Workspace,
        batch_number: BatchNumber,
        step: Executable,
        tensors: Mapping[str, DeviceTensor],
        top_k: int,
        *,
        inputs: dict[str, Spec],
        log: dict[str, Spec],
        inner: dict[str, Spec],
    ):
        graphs = workspace.graphs.search
        assert graphs is not None, "the host chooses the tokens"
        # It keeps no workspace, which keeps it.
        self._graphs = graphs
        self._step = step
        self._tensors = dict(tensors)
        self._device, self._last = workspace.graphs.device, positions(workspace) - 1
        rows = tensors["best.ids"].shape[0]
        self._rows, self._top_k = rows, top_k
        self._inputs = workspace.region(batch_number, "launch", **inputs, places=((top_k,), "float32"))
        wide = {"wide.ids": ((rows, top_k), "int64")} if self._is_wide else {}
        self._log = workspace.region(batch_number, "log", **log, **inner, **wide)
        self._tables = workspace.tables(Tables)
        host_inputs, host_log = workspace.mirrored(self._inputs, *inputs), workspace.mirrored(self._log, *log)
        self.recording = Recording(graphs, self._work(host_inputs, host_log), host_inputs, host_log)

    @property
    def _is_wide(self) -> bool:
        """Whether the search needs more best tokens than the step graph computes."""
        return self._top_k > self._tensors["best.ids"].shape[1]

    def _work(self, inputs: Mirrored, log: Mirrored) -> Call:
        """A call that enqueues the launch: one copy, all steps, and one copy."""
        calls = [call for step in range(AHEAD) for call in self._calls(step)]

        def work() -> None:
            inputs.push()
            for call in calls:
                call()
            log.pull()

        return work

    def _calls(self, step: int) -> list[Call]:
        best = {
            "best.log_probs": at_step(self._log["best.log_probs"], step, (self._rows, self._top_k)),
            "best.ids": self._log["wide.ids"] if self._is_wide else self._tensors["best.ids"],
        }
        own_best = {} if self._is_wide else best
        calls = [self._step.bind({**self._tensors, **own_best, **self._step_inputs(step)}, record=False)]
        if self._is_wide:
            logits = {"logits": self._tensors["logits"], "places": self._inputs["places"]}
            calls.append(self._graphs.best_tokens.bind({**logits, **best}, record=False))
        search, tensors = self._search(step)
        bias = {"bias": self._tables.bias(step)}
        return [*calls, search.bind({**best, **bias, **tensors}, record=False)]

    def _step_inputs(self, step: int) -> dict[str, DeviceTensor]:
        raise NotImplementedError

    def _search(self, step: int) -> tuple[Executable, dict[str, DeviceTensor]]:
        raise NotImplementedError

    def _enqueue(self, request: Ahead, filled: int) -> None:
        # Steps after the last position repeat it. Their tokens are in no output.
        self.recording.inputs["position"][:] = np.minimum(STEPS + filled, self._last)
        self._tables.fill(request)
        self.recording()


class GreedyLaunch(_Launch):
    """Steps of a search without a beam, over a cache for each row."""

    def __init__(
        self,
        workspace: Workspace,
        batch_number: BatchNumber,
        step: Executable,
        tensors: Mapping[str, DeviceTensor],
        top_k: int,
    ):
        shape = tensors["tokens"].shape
        inputs = {"tokens": (shape, "int64"), "position": steps_of(shape, tensors["position"].dtype)}
        log = {"next.tokens": steps_of(shape, "int64"), "next.log_probs": steps_of(shape, "float32")}
        inner = {"best.log_probs": steps_of((*shape, top_k), "float32")}
        super().__init__(workspace, batch_number, step, tensors, top_k, inputs=inputs, log=log, inner=inner)
        self.recording.inputs["tokens"][:] = workspace.config.bos_id  # places that were never taken read it
        self._views = [every_step(self.recording.log[name], shape) for name in ("next.tokens", "next.log_probs")]

    def _step_inputs(self, step: int) -> dict[str, DeviceTensor]:
        shape = (self._rows,)
        last = at_step(self._log["next.tokens"], step - 1, shape) if step else self._inputs["tokens"]
        return {"tokens": last, "position": at_step(self._inputs["position"], step, shape)}

    def _search(self, step: int) -> tuple[Executable, dict[str, DeviceTensor]]:
        outputs = {name: at_step(self._log[name], step, (self._rows, 1)) for name in ("next.tokens", "next.log_probs")}
        return self._graphs.greedy_search, outputs

    def begin(self, request: Ahead, filled: int, live: LiveRows) -> None:
        """Enqueue the steps after `filled` tokens of the sentences `live`."""
        self.recording.inputs["tokens"][live.row_index] = request.tokens
        self._enqueue(request, filled)

    def continuations(self, live: LiveRows) -> Continuations:
        """Wait for the steps; returns the best token of each `live` sentence in each step."""
        self._device.synchronize()
        tokens, log_probs = (view[:, live.row_index, None].copy() for view in self._views)
        return Continuations(log_probs.astype(np.float64), np.zeros_like(tokens), tokens)


class BeamLaunch(_Launch):
    """Steps of a beam search, over a cache that the hypotheses of a sentence share.

    Args:
        other: a second mask of the shape of `tensors["mask"]`.
        candidates: the number of continuations of a sentence that are returned.
    """

    def __init__(
        self,
        workspace: Workspace,
        batch_number: BatchNumber,
        step: Executable,
        tensors: Mapping[str, DeviceTensor],
        top_k: int,
        *,
        other: DeviceTensor,
        candidates: int,
    ):
        self._masks = tensors["mask"], other
        self._batch, _, self._beam, self._slots = tensors["mask"].shape
        self._grid, self._listed = (self._batch, self._beam), (self._batch, candidates)
        inputs: dict[str, Spec] = {
            "tokens": (self._grid, "int64"),
            "scores": (self._grid, "float64"),
            "position": steps_of(self._grid, tensors["position"].dtype),
            "slot": steps_of((self._batch,), "int64"),
            "own": steps_of((self._beam, 1), "int64"),
            "first_row": ((self._batch, 1), "int64"),
            "slots": ((self._slots,), "int64"),
            "order": ((candidates,), "float32"),
            "found": ((1,), "int64"),
        }
        dtypes = {"log_probs": "float64", "parents": "int64", "tokens": "int64"}
        log = {f"candidates.{name}": steps_of(self._listed, dtype) for name, dtype in dtypes.items()}
        log["best.log_probs"] = steps_of((self._batch * self._beam, top_k), "float32")
        inner = {"next.tokens": steps_of(self._grid, "int64"), "next.scores": steps_of(self._grid, "float64")}
        super().__init__(workspace, batch_number, step, tensors, top_k, inputs=inputs, log=log, inner=inner)
        host = self.recording.inputs
        host["tokens"][:], host["scores"][:] = workspace.config.bos_id, 0.0  # places that were never taken read them
        host["first_row"][:, 0] = np.arange(self._batch) * self._beam
        host["slots"][:], host["order"][:] = np.arange(self._slots), -np.arange(candidates)
        host["found"][:] = top_k
        host_log = self.recording.log
        self._views = [every_step(host_log[f"candidates.{name}"], self._listed) for name in dtypes]
        self._best = every_step(host_log["best.log_probs"], (self._rows, top_k))[..., 0]
        self._own = every_step(host["own"], (self._beam,))
        self._next = np.arange(self._beam, 2 * self._beam)

    def _step_inputs(self, step: int) -> dict[str, DeviceTensor]:
        last = at_step(self._log["next.tokens"], step - 1, self._grid) if step else self._inputs["tokens"]
        position = at_step(self._inputs["position"], step, self._grid)
        slot = at_step(self._inputs["slot"], step, (self._batch,))
        return {"tokens": last, "position": position, "slot": slot, "mask": self._masks[step % 2]}

    def _search(self, step: int) -> tuple[Executable, dict[str, DeviceTensor]]:
        inputs, log = self._inputs, self._log
        scores = at_step(log["next.scores"], step - 1, self._grid) if step else inputs["scores"]
        names = ("candidates.log_probs", "candidates.parents", "candidates.tokens")
        return self._graphs.beam_search, {
            **{name: inputs[name] for name in ("first_row", "slots", "order", "found")},
            "scores": scores,
            "mask": self._masks[step % 2],
            "own": at_step(inputs["own"], step, (self._beam, 1)),
            "leaving": self._tables.leaving,
            **{name: at_step(log[name], step, self._listed) for name in names},
            "next.tokens": at_step(log["next.tokens"], step, self._grid),
            "next.scores": at_step(log["next.scores"], step, self._grid),
            "next.mask": self._masks[(step + 1) % 2],
        }

    def begin(self, request: Ahead, filled: int, live: LiveRows) -> None:
        """Enqueue the steps after `filled` tokens of the hypotheses of the sentences `live`."""
        inputs = self.recording.inputs
        assert request.log_probs is not None
        inputs["tokens"][live.index] = request.tokens.reshape(-1, self._beam)
        inputs["scores"][live.index] = request.log_probs
        slots = (STEPS + filled) * self._beam
        inputs["slot"][:] = np.minimum(slots, self._slots - self._beam)
        self._own[:] = slots + self._next
        self._enqueue(request, filled)

    def continuations(self, live: LiveRows) -> Continuations:
        """Wait for the steps; returns the best continuations of each `live` sentence in each step."""
        self._device.synchronize()
        # Copies: the next launch overwrites the log.
        log_probs, parents, tokens = (np.array(view[:, live.index], order="C") for view in self._views)
        best = self._best[:, live.row_index]
        if not math.isfinite(best.sum(dtype=np.float64)):
            bad = ~np.isfinite(best).reshape(AHEAD, -1, self._beam).all(axis=2)
            log_probs[bad] = np.nan
        return Continuations(log_probs, parents, tokens)
