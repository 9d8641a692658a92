"""`tfexport serve`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tfexport.commands.console import say
from tfexport.commands.help import common_options
from tfexport.commands.signature import with_options
from tfexport.config import ModelConfig
from tfexport.decoding.request_options import RuntimeOptions
from tfexport.errors import TfexportError
from tfexport.option import Given
from tfexport.scheduling.options import ServingOptions
from tfexport.serving.options import ServerOptions
from tfexport.system.processes import usable_cpus

MAX_WAIT = 1.0
"""Seconds that a request may wait for its first step in a server: a wait that people accept, not a measured optimum."""

CPU_SLOTS = 32
"""Slots of each worker on a CPU. In load tests they kept the limits of latency at higher rates than 64 slots did
(docs/results/serve.md)."""


@common_options("--host --port --runtime --precision --workers --slots --keys --rate --cors --reload")
@with_options
def serve(
    bundles: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]DIR", help="Bundles, each under a name or a language pair such as de-en."),
    ],
    *,
    server: ServerOptions,
    runtime: RuntimeOptions,
    threads: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="CPU threads of each worker.")] = 1,
    scheduling: Given[ServingOptions],
) -> None:
    """Serve bundles over HTTP. Answers equal those of `decode`; requests share batches.

    By default the server accepts only connections from this machine; see --host.
    """
    try:
        from tfexport.serving.access.keys import Keys
        from tfexport.serving.catalog import Catalog, CatalogEntry, HowToLoad
        from tfexport.serving.server import run
        from tfexport.verification.certificates import parity_command
    except ModuleNotFoundError as error:
        raise TfexportError(f"{error.name} is not installed. Run pip install 'tfexport[serve]'.") from None
    if server.keys is not None:
        Keys.read(server.keys)  # before the bundles, which take longer to load
    options = ServingOptions(**{**server_defaults(runtime.runtime), **scheduling})
    how = HowToLoad(runtime.runtime, runtime.precision, threads, server.certified, options)
    catalog = Catalog([CatalogEntry.parse(text) for text in bundles], how)
    try:
        for served in catalog.served:
            if served.uncertified:
                say(f"note: {served.uncertified}: {parity_command(served.entry.directory, runtime.runtime)}")
            say(f"note: {served.name}: {about_workers(served.bundle.config, options)}")
        catalog.warm_up()
        run(catalog, server)
    finally:
        catalog.close()


def server_defaults(runtime: str) -> dict[str, Any]:
    """The options of a scheduler whose defaults differ from Python's, because a server has the machine for itself."""
    if runtime == "ort-cpu":  # more slots do not answer more requests on a CPU, and each step takes longer
        return {"max_wait": MAX_WAIT, "workers": usable_cpus(), "slots": CPU_SLOTS}
    return {"max_wait": MAX_WAIT, "workers": 1}


def about_workers(config: ModelConfig, options: ServingOptions) -> str:
    """The workers and the largest size of their caches: keys and values of each token in each layer, in float32."""
    cache = options.cache_tokens * 2 * config.n_decoder_layers * config.d_model * 4
    several = "1 worker" if options.workers == 1 else f"{options.workers} workers"
    return f"{several}, with caches of {cache / 2**20:,.0f} MiB at most (--workers, --cache-tokens)"
