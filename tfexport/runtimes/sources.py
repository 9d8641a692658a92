"""The sources of a batch in buffers: their lengths, and their cross keys and values."""

from __future__ import annotations

from typing import Any

from tfexport.runtimes.device import Call, DeviceTensor, to_float32
from tfexport.runtimes.device_pool import BatchNumber, Mirrored, Region
from tfexport.runtimes.live_rows import fill_sources
from tfexport.runtimes.outputs import FloatArray, IntArray
from tfexport.runtimes.workspace import Workspace


class Sources:
    """The sources of a batch.

    Args:
        length: the number of source ids of the longest source, without the padding of the buffers.
        inputs, mirror: the inputs of the encoder, on the device and on the host.
        cross: the cross keys and values.

    Attributes:
        batch: the number of places.
        padded: the source length of the buffers.
    """

    def __init__(
        self,
        workspace: Workspace,
        batch_number: BatchNumber,
        length: int,
        inputs: Region,
        mirror: Mirrored,
        cross: Region,
    ):
        self.workspace = workspace
        self.batch_number = batch_number
        self.cross = cross
        self._length = length
        self._inputs = inputs
        self._mirror = mirror
        self.batch, self.padded = cross["all"].shape[1], cross["all"].shape[-2]

    @classmethod
    def encode(cls, workspace: Workspace, src_ids: IntArray, src_len: IntArray, beam: int) -> Sources:
        """Encode `src_ids` [sentences, src], of which the first `src_len` [sentences] count, in bucketed buffers."""
        buckets = workspace.graphs.buckets
        batch, src = buckets.batch_for(len(src_len), beam), buckets.src_for(src_ids.shape[1])
        batch_number = workspace.batch_number()
        inputs = workspace.inputs(batch_number, batch, src)
        cross = workspace.blocks(batch_number, "cross", batch, src, flat=workspace.graphs.flat)
        mirror = workspace.mirrored(inputs, "src_len", "src_ids")
        fill_sources(mirror["src_ids"], mirror["src_len"], src_ids, src_len, pad_id=workspace.config.pad_id)
        mirror.push()

        def bound() -> Call:
            return workspace.graphs.encoder.bind({**inputs.tensors, **workspace.named("cross", cross)})

        workspace.made((id(workspace.graphs.encoder), inputs.key, cross.key), bound)()
        return cls(workspace, batch_number, src_ids.shape[1], inputs, mirror, cross)

    @property
    def key(self) -> tuple[Any, ...]:
        """Sources with the same key have the same `tensors`."""
        return self._inputs.key, self.cross.key

    @property
    def tensors(self) -> dict[str, DeviceTensor]:
        """The inputs of a step graph from the sources, by their names."""
        return {"src_len": self._inputs["src_len"], **self.workspace.named("cross", self.cross)}

    @property
    def length(self) -> int:
        return self._length

    def read(self, places: IntArray) -> list[FloatArray]:
        """The cross keys and values of the sentences in `places`, each [sentences, heads, src, head_dim]."""
        mirror = self.workspace.mirror(self.cross["all"])
        mirror.pull()
        self.workspace.graphs.device.synchronize()
        cross = [to_float32(block[places][..., : self._length, :]) for block in mirror.array]
        if self.workspace.graphs.flat:
            heads = self.workspace.config.n_heads
            cross = [block.reshape(*block.shape[:2], heads, -1).swapaxes(1, 2) for block in cross]
        return cross

    def gathered(self, sentences: IntArray, index: DeviceTensor) -> Sources:
        """A copy of the sources at the places `sentences` [batch], in buffers for that batch.

        Args:
            index: `sentences` on the device.
        """
        workspace = self.workspace
        inputs = workspace.inputs(self.batch_number, len(sentences), self.padded)
        mirror = workspace.mirrored(inputs, "src_len")
        mirror["src_len"][:] = self._mirror["src_len"][sentences]
        mirror.push()
        cross = workspace.gather(self.batch_number, "cross", self.cross, index)
        return Sources(workspace, self.batch_number, self._length, inputs, mirror, cross)
