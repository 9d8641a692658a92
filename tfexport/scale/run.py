"""A run over a corpus with Ray Data: files -> shards -> actors -> files.

A task for each input file reads shards, and a pool of actors computes and writes them. A shard is one row of the dataset, so
it stays whole however Ray splits blocks. An output file gets its name when it is complete. The name tells which rows it has,
so a shard that is written twice replaces itself, and the driver finds missing rows at the end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pyarrow as pa

from tfexport.errors import TfexportError
from tfexport.scale.attempts import Attempts, rows_of
from tfexport.scale.cluster import connect, quiet_ray_data
from tfexport.scale.manifest import Manifest, RunFolder, Task
from tfexport.scale.options import ClusterOptions
from tfexport.scale.records import Done, Record, changed_inputs, read_record, recorded, verified
from tfexport.scale.row_function import RowFunction
from tfexport.scale.rows import texts, written
from tfexport.scale.shards import Input, Shard, gaps, read_shards
from tfexport.scale.storage import Stamp
from tfexport.system.processes import leave_out_of_collections

_log = logging.getLogger(__name__)

READERS = 4
"""The number of files that are read at once. Reading needs less than one CPU, because decoding takes far longer."""
SHARDS_OF_AN_ACTOR = 2
"""The number of shards that an actor holds: one waits while the other is decoded."""


def read_files(batch: Mapping[str, Any], manifest: Manifest, done: Mapping[Shard, str]) -> Iterator[pa.Table]:
    """A function for Ray Data: the shards of input files that are not done, each as one row with its table in Arrow's stream
    format.

    It reads a file twice: first for its sha256, which every part needs, then for its rows. An error is a row too, because
    Ray changes the messages of exceptions and drops their causes.

    Args:
        batch: the numbers of input files, in the column `file`.
        done: the shards that are done, each with the sha256 of its input file.
    """
    for file in map(int, batch["file"]):
        try:
            source = manifest.inputs[file]
            sha256 = source.sha256({value for shard, value in done.items() if shard.file == file})
            for shard, table in read_shards(source, file, manifest.rows_per_shard, done.keys()):
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, table.schema) as stream:
                    stream.write_table(table)
                yield _row(shard, sink.getvalue().to_pybytes(), sha256)
        except TfexportError as error:
            yield _row(Shard(file, 0, 0), error=str(error))


def _row(shard: Shard, data: bytes = b"", input_sha256: str = "", *, error: str = "") -> pa.Table:
    numbers = {"file": [shard.file], "first": [shard.first], "rows": [shard.rows]}
    about = {"input_sha256": [input_sha256], "error": [error]}
    return pa.table({**numbers, "data": pa.array([data], pa.large_binary()), **about})


@dataclass(frozen=True)
class Driver:
    """The process that starts the actors of a run."""

    name: str
    """The name in the markers of its actors; see `attempts.py`."""
    began: Stamp | None
    """The stamp of the manifest's file at the start of the run."""

    @classmethod
    def of(cls, output: RunFolder) -> Driver:
        return cls(secrets.token_hex(4), output.manifest.stamp())


class ShardWriter:
    """The class of an actor: computes and writes shards. The first shard loads the bundle."""

    def __init__(self, manifest: Manifest, output: RunFolder, task: Task, driver: Driver):
        self._manifest, self._output = manifest, output
        self._task, self._driver = task, driver

    @cached_property
    def _function(self) -> RowFunction:
        function = self._task.load()
        leave_out_of_collections()  # Ray's modules alone make hundreds of thousands of objects, which an actor keeps
        return function

    def __call__(self, batch: pa.Table) -> pa.Table:
        return pa.Table.from_pylist([self._done(row) for row in batch.to_pylist()])

    def _done(self, row: Mapping[str, Any]) -> dict[str, Any]:
        shard, error = Shard(row["file"], row["first"], row["rows"]), row["error"]
        statuses: Mapping[str, int] = {}
        try:
            statuses = self.write(shard, row["data"], row["input_sha256"]) if shard.rows else {}
        except TfexportError as problem:
            error = str(problem)
        except OSError as problem:
            about = problem.strerror or str(problem)
            error = f"cannot write {self._output.part(shard).uri}: {about}. Make room, then go on with --resume."
        numbers = {"file": shard.file, "first": shard.first, "rows": shard.rows}
        return {**numbers, "statuses": json.dumps(dict(statuses)), "error": error}

    def write(self, shard: Shard, data: bytes, input_sha256: str) -> Mapping[str, int]:
        """Write a shard if it is not done, and return the number of its rows of each status.

        Args:
            data: the table of the shard, in Arrow's stream format.
            input_sha256: the sha256 of its input file.

        Raises:
            TfexportError: another run has begun in the folder.
        """
        part = self._output.part(shard)
        attempts = Attempts(self._output.attempts / part.name, self._driver.name)
        record = read_record(self._output, shard) if part.stamp() is not None else None
        if record is None:
            source = self._manifest.inputs[shard.file]
            table = pa.ipc.open_stream(data).read_all()
            function = self._function
            values = texts(table, source.format, function.reads)
            rows = rows_of(function, values, f"{shard.file}:{shard.first}", attempts)
            statuses = dict(Counter(row.status for row in rows))
            content = written(shard, table, rows, function, source=source.format, output=self._output.format)
            record = Record(shard, statuses, hashlib.sha256(content).hexdigest(), input_sha256)
            part.write(content, before=partial(self._write, record))
        attempts.remove()
        return record.statuses

    def _write(self, record: Record) -> None:
        """Write the record of a part before the part gets its name, if the folder still has this run."""
        record.write(self._output, before=self._require_own_run)
        self._require_own_run()  # the record may have been on its way for long

    def _require_own_run(self) -> None:
        # An actor outlives a killed driver for some seconds. A run without parts may have been replaced meanwhile.
        if self._driver.began != self._output.manifest.stamp():
            raise TfexportError(f"another run has begun in {self._output.folder.uri}. Give another folder.")


def run(manifest: Manifest, output: RunFolder, task: Task, cluster: ClusterOptions) -> Generator[Done]:
    """Compute all shards that are not done, and write the summary. Yields each shard after it is written.

    Damaged parts are computed again, with a warning. The generator must end or be closed before `disconnect`.

    Raises:
        TfexportError: an input cannot be read or has changed, an output cannot be written, or a part is missing at the end.
    """
    import ray

    output.remove_partial()
    was_connected, before = ray.is_initialized(), list(verified(output))
    done = {record.shard: record.input_sha256 for record in before}  # a part without a record is computed again
    yield from before
    totals: dict[int, int] = {}
    if not was_connected:
        connect(cluster.address)
    actors = _actors(cluster, task)
    with closing(_results(_dataset(manifest, output, task, cluster, actors, done))) as results:
        for row in results:
            if row["error"]:
                raise TfexportError(row["error"])
            shard = Shard(row["file"], row["first"], row["rows"])
            if not shard.rows:
                totals[shard.file] = shard.first
            else:
                yield Done(shard, json.loads(row["statuses"]))
    if not was_connected:
        ray.shutdown()  # at the exit of the process, Ray first waits half a second for messages that are not printed here
    _complete(manifest, output, totals)


def _complete(manifest: Manifest, output: RunFolder, totals: dict[int, int]) -> None:
    """Write the summary of a run.

    Args:
        totals: the number of rows of each input.

    Raises:
        TfexportError: a part is missing, or an input changed while it was read.
    """
    unread = [f"input {file} was not read" for file in range(len(manifest.inputs)) if file not in totals]
    if problems := [*unread, *gaps(output.done(), totals)]:
        raise TfexportError(f"the output is not complete: {'; '.join(problems[:3])}. Run it again with --resume.")
    statuses: Counter[str] = Counter()
    parts = list(recorded(output))
    if changed := changed_inputs(parts):
        uri = manifest.inputs[changed[0]].place.uri
        raise TfexportError(f"{uri} was changed while it was read. Begin anew, in another folder, when it is complete.")
    for part in parts:
        statuses.update(part.statuses)
    summary = {"rows": sum(totals.values()), "parts": len(parts), "statuses": dict(sorted(statuses.items()))}
    output.summary.write(json.dumps(summary, indent=1).encode())
    output.attempts.remove()


def _actors(cluster: ClusterOptions, task: Task) -> int:
    """The number of actors.

    Raises:
        TfexportError: the cluster has no room for one.
    """
    import ray

    may_grow = cluster.address is not None and cluster.actors is not None
    room = _room(ray.cluster_resources(), int(task.options["threads"]), cluster.gpus, may_grow=may_grow)
    return cluster.actors or room


def _dataset(
    manifest: Manifest, output: RunFolder, task: Task, cluster: ClusterOptions, actors: int, done: Mapping[Shard, str]
) -> Any:
    import ray

    quiet_ray_data()
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = 1  # a block for each shard: actors take blocks
    context.target_min_block_size = 0
    context.memory_usage_poll_interval_s = None  # for statistics alone: 5 ms of each second of an actor
    context.execution_options.resource_limits = context.execution_options.resource_limits.copy(
        object_store_memory=cluster.buffer_mib << 20
    )
    files = ray.data.from_items(
        [{"file": n} for n in range(len(manifest.inputs))], override_num_blocks=len(manifest.inputs)
    )
    # Readers wait for disks, and reserve no CPU: else a machine of N CPUs would have room for N - 1 actors.
    reading = {"manifest": manifest, "done": done}
    readers = ray.data.TaskPoolStrategy(size=min(READERS, len(manifest.inputs)))
    shards = files.map_batches(read_files, fn_kwargs=reading, batch_size=1, num_cpus=0, compute=readers)
    return shards.map_batches(
        ShardWriter,
        fn_constructor_args=(manifest, output, task, Driver.of(output)),
        batch_size=1,
        batch_format="pyarrow",
        num_cpus=int(task.options["threads"]),
        num_gpus=cluster.gpus or None,
        compute=ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=SHARDS_OF_AN_ACTOR),
    )


def _results(dataset: Any) -> Generator[Mapping[str, Any]]:
    """The rows of a dataset as they are computed."""
    for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        yield from batch.to_pylist()


def _room(resources: Mapping[str, float], threads: int, gpus: float, *, may_grow: bool) -> int:
    """The number of actors that a cluster has room for.

    Args:
        may_grow: machines may come later. A cluster without room then gets a warning instead of an error.

    Raises:
        TfexportError: there is no room for one. Ray would wait for ever.
    """
    cpus, own_gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    room = int(min(cpus // threads, own_gpus / gpus + 1e-9 if gpus else math.inf))  # 1 // 0.2 is 4
    if room < 1:
        about = f"the cluster has no room for an actor: it has {cpus:g} CPUs and {own_gpus:g} GPUs"
        if not may_grow:
            raise TfexportError(f"{about}. Ask for fewer --threads or --gpus.")
        _log.warning("warning: %s. The run waits for machines.", about)
    return room


def inputs_of(places: list[Any], columns: Mapping[str, str]) -> list[Input]:
    """The input files at these places, checked.

    Args:
        columns: the names of the columns with the texts, by the flags that give them.

    Raises:
        TfexportError: a file cannot be read or lacks a column, or the files have different formats.
    """
    with ThreadPoolExecutor(16) as pool:
        files = list(pool.map(Input.of, places))
        list(pool.map(lambda file: file.require_columns(columns), files))
    formats = {file.format: file for file in files}
    if len(formats) > 1:
        first, second = list(formats.values())[:2]
        raise TfexportError(
            f"{first.place.uri} is {first.format}, {second.place.uri} is {second.format}. Give inputs of one format."
        )
    return files
