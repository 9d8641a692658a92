"""Several steps of a search in one launch: the device chooses the tokens, and the host reads a log afterwards.

    push ─> step ─> search ─> step ─> search ─> ... ─> pull      8 steps; one copy each way, one wait
              └─ best ─┘  └─ tokens, scores, mask ─┘

The search graph of a step writes the inputs of the next one. Each step has places of its own in the log, so that nothing
is overwritten before it was read; masks of a shared cache take turns. The host copies what it reads of the log: the next
launch may begin before the host has done with it. A launch is recorded when it is made a second time:
sizes that come once are not worth it, and work must have run once before it is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import ALIGNMENT, BEST, ITEM_SIZES
from tfexport.runtimes.base import AHEAD, Ahead, Continuations
from tfexport.runtimes.device import ATTEMPTS, Call, DeviceTensor
from tfexport.runtimes.device_pool import Lane, Mirrored
from tfexport.runtimes.live_rows import LiveRows
from tfexport.runtimes.workspace import Executable, SearchGraphs, Workspace

STEPS = np.arange(AHEAD)[:, None]

Spec = tuple[tuple[int, ...], str]


def steps_of(shape: tuple[int, ...], dtype: str) -> Spec:
    """A tensor for each step of a launch, in one tensor [AHEAD, numbers]: each begins aligned."""
    step = ALIGNMENT // ITEM_SIZES[dtype]
    return (AHEAD, -(-math.prod(shape) // step) * step), dtype


def at_step(tensor: DeviceTensor, step: int, shape: tuple[int, ...]) -> DeviceTensor:
    """The tensor of one step in what `steps_of` describes."""
    return DeviceTensor(tensor.address + step * (tensor.nbytes // AHEAD), shape, tensor.dtype)


def every_step(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The arrays of all steps, [AHEAD, *shape], in the mirror of such a tensor."""
    return array[:, : math.prod(shape)].reshape(AHEAD, *shape)


def slots_needed(filled: int, workspace: Workspace) -> int:
    """Slots of a cache that a launch after `filled` tokens takes: what is behind the largest cache is in no output."""
    return min(filled + AHEAD, max(workspace.graphs.buckets.cache))


def positions(workspace: Workspace) -> int:
    """The number of positions that steps may have."""
    return min(workspace.config.max_target_length, max(workspace.graphs.buckets.cache))


def tokens_needed(request: Ahead, workspace: Workspace) -> int:
    """The best tokens of a row that a search needs: more than the candidates where some may not come."""
    wanted = request.candidates + max(map(len, request.banned))
    told = min(BEST, workspace.config.tgt_vocab_size)
    return told if wanted <= told else min(wanted, workspace.config.tgt_vocab_size)


class Recording:
    """Work on given tensors, recorded when it is done a second time."""

    def __init__(self, graphs: SearchGraphs, work: Call, given: Mirrored, log: Mirrored):
        self._graphs, self._work = graphs, work
        self.given, self.log = given, log
        self._runs, self._recorded = 0, None  # type: tuple[int, Call | None]

    def __call__(self) -> None:
        if self._recorded is None and 0 < self._runs <= ATTEMPTS:
            self._recorded = self._graphs.record(self._work, is_last=self._runs == ATTEMPTS)
        self._runs += 1
        (self._recorded or self._work)()


class Tables:
    """What a search adds to the log-probabilities of tokens, in every step of a launch.

    They are pushed where they differ from those of the last launch, whoever made it.
    """

    def __init__(self, workspace: Workspace):
        self._vocab = (workspace.config.tgt_vocab_size,)
        tensors = {"bias": steps_of(self._vocab, "float32"), "leaving": (self._vocab, "float32")}
        self._region = workspace.region(None, "search tables", **tensors)
        self._host = workspace.mirrored(self._region, *tensors)
        self._device = workspace.graphs.device
        self._filled: Any = None

    def bias(self, step: int) -> DeviceTensor:
        """[vocab]"""
        return at_step(self._region["bias"], step, self._vocab)

    @property
    def leaving(self) -> DeviceTensor:
        """[vocab]"""
        return self._region["leaving"]

    def fill(self, request: Ahead) -> None:
        """Enqueue the copy of what `request` needs."""
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
        step: the step graph, and `tensors` its tensors, as the host runs it.
        found: best tokens of a row that the search needs.
        given, log: tensors that are copied to the device before the launch and to the host after it.
        inner: others. These or those of `log` have the `best.log_probs` of each step.
    """

    def __init__(
        self,
        workspace: Workspace,
        lane: Lane,
        step: Executable,
        tensors: Mapping[str, DeviceTensor],
        found: int,
        *,
        given: dict[str, Spec],
        log: dict[str, Spec],
        inner: dict[str, Spec],
    ):
        graphs = workspace.graphs.search
        assert graphs is not None, "the host chooses the tokens"
        # It keeps no workspace, which keeps it.
        self._graphs, self._step, self._tensors = graphs, step, dict(tensors)
        self._device, self._last = workspace.graphs.device, positions(workspace) - 1
        rows = tensors["best.ids"].shape[0]
        self._rows, self._found = rows, found
        self._given = workspace.region(lane, "given", **given, places=((found,), "float32"))
        wide = {"wide.ids": ((rows, found), "int64")} if self._is_wide else {}
        self._log = workspace.region(lane, "log", **log, **inner, **wide)
        self._tables = workspace.tables(Tables)
        host_given, host_log = workspace.mirrored(self._given, *given), workspace.mirrored(self._log, *log)
        self.recording = Recording(graphs, self._work(host_given, host_log), host_given, host_log)

    @property
    def _is_wide(self) -> bool:
        return self._found > self._tensors["best.ids"].shape[1]

    def _work(self, given: Mirrored, log: Mirrored) -> Call:
        """All that is enqueued."""
        calls = [call for step in range(AHEAD) for call in self._calls(step)]

        def work() -> None:
            given.push()
            for call in calls:
                call()
            log.pull()

        return work

    def _calls(self, step: int) -> list[Call]:
        best = {
            "best.log_probs": at_step(self._log["best.log_probs"], step, (self._rows, self._found)),
            "best.ids": self._log["wide.ids"] if self._is_wide else self._tensors["best.ids"],
        }
        told = {} if self._is_wide else best
        calls = [self._step.bind({**self._tensors, **told, **self._step_inputs(step)}, record=False)]
        if self._is_wide:
            logits = {"logits": self._tensors["logits"], "places": self._given["places"]}
            calls.append(self._graphs.best_tokens.bind({**logits, **best}, record=False))
        search, tensors = self._search(step)
        bias = {"bias": self._tables.bias(step)}
        return [*calls, search.bind({**best, **bias, **tensors}, record=False)]

    def _step_inputs(self, step: int) -> dict[str, DeviceTensor]:
        raise NotImplementedError

    def _search(self, step: int) -> tuple[Executable, dict[str, DeviceTensor]]:
        raise NotImplementedError

    def _enqueue(self, request: Ahead, filled: int) -> None:
        # Behind the last position the steps repeat it: their tokens are in no output.
        self.recording.given["position"][:] = np.minimum(STEPS + filled, self._last)
        self._tables.fill(request)
        self.recording()


class GreedyLaunch(_Launch):
    """Steps of a search without a beam, over a cache for each row."""

    def __init__(
        self,
        workspace: Workspace,
        lane: Lane,
        step: Executable,
        tensors: Mapping[str, DeviceTensor],
        found: int,
    ):
        shape = tensors["tokens"].shape
        given = {"tokens": (shape, "int64"), "position": steps_of(shape, tensors["position"].dtype)}
        log = {"next.tokens": steps_of(shape, "int64"), "next.log_probs": steps_of(shape, "float32")}
        inner = {"best.log_probs": steps_of((*shape, found), "float32")}
        super().__init__(workspace, lane, step, tensors, found, given=given, log=log, inner=inner)
        self.recording.given["tokens"][:] = workspace.config.bos_id  # read by places that were never taken
        self._views = [every_step(self.recording.log[name], shape) for name in ("next.tokens", "next.log_probs")]

    def _step_inputs(self, step: int) -> dict[str, DeviceTensor]:
        shape = (self._rows,)
        last = at_step(self._log["next.tokens"], step - 1, shape) if step else self._given["tokens"]
        return {"tokens": last, "position": at_step(self._given["position"], step, shape)}

    def _search(self, step: int) -> tuple[Executable, dict[str, DeviceTensor]]:
        outputs = {name: at_step(self._log[name], step, (self._rows, 1)) for name in ("next.tokens", "next.log_probs")}
        return self._graphs.greedy_search, outputs

    def begin(self, request: Ahead, filled: int, live: LiveRows) -> None:
        """Enqueue the steps after `filled` tokens of the sentences in the places `live`."""
        self.recording.given["tokens"][live.row_index] = request.tokens
        self._enqueue(request, filled)

    def found(self, live: LiveRows) -> Continuations:
        """Wait for the steps; the best token of each of `live` in each of them."""
        self._device.synchronize()
        tokens, log_probs = (view[:, live.row_index, None].copy() for view in self._views)
        return Continuations(log_probs.astype(np.float64), np.zeros_like(tokens), tokens)


class BeamLaunch(_Launch):
    """Steps of a beam search, over a cache that the hypotheses of a sentence share.

    Args:
        other: a mask like that of `tensors`.
        candidates: continuations of a sentence to tell.
    """

    def __init__(
        self,
        workspace: Workspace,
        lane: Lane,
        step: Executable,
        tensors: Mapping[str, DeviceTensor],
        found: int,
        *,
        other: DeviceTensor,
        candidates: int,
    ):
        self._masks = tensors["mask"], other
        self._batch, _, self._beam, self._slots = tensors["mask"].shape
        self._grid, self._listed = (self._batch, self._beam), (self._batch, candidates)
        given: dict[str, Spec] = {
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
        log["best.log_probs"] = steps_of((self._batch * self._beam, found), "float32")
        inner = {"next.tokens": steps_of(self._grid, "int64"), "next.scores": steps_of(self._grid, "float64")}
        super().__init__(workspace, lane, step, tensors, found, given=given, log=log, inner=inner)
        host = self.recording.given
        host["tokens"][:], host["scores"][:] = workspace.config.bos_id, 0.0  # read by places that were never taken
        host["first_row"][:, 0] = np.arange(self._batch) * self._beam
        host["slots"][:], host["order"][:], host["found"][:] = np.arange(self._slots), -np.arange(candidates), found
        told = self.recording.log
        self._views = [every_step(told[f"candidates.{name}"], self._listed) for name in dtypes]
        self._best = every_step(told["best.log_probs"], (self._rows, found))[..., 0]
        self._own = every_step(host["own"], (self._beam,))
        self._next = np.arange(self._beam, 2 * self._beam)

    def _step_inputs(self, step: int) -> dict[str, DeviceTensor]:
        last = at_step(self._log["next.tokens"], step - 1, self._grid) if step else self._given["tokens"]
        position = at_step(self._given["position"], step, self._grid)
        slot = at_step(self._given["slot"], step, (self._batch,))
        return {"tokens": last, "position": position, "slot": slot, "mask": self._masks[step % 2]}

    def _search(self, step: int) -> tuple[Executable, dict[str, DeviceTensor]]:
        given, log = self._given, self._log
        scores = at_step(log["next.scores"], step - 1, self._grid) if step else given["scores"]
        names = ("candidates.log_probs", "candidates.parents", "candidates.tokens")
        return self._graphs.beam_search, {
            **{name: given[name] for name in ("first_row", "slots", "order", "found")},
            "scores": scores,
            "mask": self._masks[step % 2],
            "own": at_step(given["own"], step, (self._beam, 1)),
            "leaving": self._tables.leaving,
            **{name: at_step(log[name], step, self._listed) for name in names},
            "next.tokens": at_step(log["next.tokens"], step, self._grid),
            "next.scores": at_step(log["next.scores"], step, self._grid),
            "next.mask": self._masks[(step + 1) % 2],
        }

    def begin(self, request: Ahead, filled: int, live: LiveRows) -> None:
        """Enqueue the steps after `filled` tokens of the hypotheses of the sentences in the places `live`."""
        given = self.recording.given
        assert request.log_probs is not None
        given["tokens"][live.index] = request.tokens.reshape(-1, self._beam)
        given["scores"][live.index] = request.log_probs
        slots = (STEPS + filled) * self._beam
        given["slot"][:] = np.minimum(slots, self._slots - self._beam)
        self._own[:] = slots + self._next
        self._enqueue(request, filled)

    def found(self, live: LiveRows) -> Continuations:
        """Wait for the steps; the best continuations of the sentences in the places `live` in each of them."""
        self._device.synchronize()
        # Copies: the next launch overwrites the log.
        log_probs, parents, tokens = (np.array(view[:, live.index], order="C") for view in self._views)
        found, best = Continuations(log_probs, parents, tokens), self._best[:, live.row_index]
        if not math.isfinite(best.sum(dtype=np.float64)):
            bad = ~np.isfinite(best).reshape(AHEAD, -1, self._beam).all(axis=2)
            found.log_probs[bad] = np.nan
        return found
