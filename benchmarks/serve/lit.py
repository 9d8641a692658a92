"""A model behind LitServe, with dynamic batching and the addresses of `tfexport serve`.

    python -m benchmarks.serve.lit ENGINE BUNDLE --port PORT [--precision int8] [--max-batch 32] [--batch-timeout 0.005]

Requests that wait begin together, at most `--max-batch`, when the batch is full or has waited for `--batch-timeout`. They
end together. All engines read text by the bundle's tokenizer and give its text. `ctranslate2` and `transformers` need the
folders BUNDLE.ct2 and BUNDLE.hf of benchmarks/peers/converters.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import litserve  # type: ignore[import-not-found]

import tfexport
from tfexport.bench.peers import CTranslate2Peer, HuggingFacePeer
from tfexport.bundle.reader import open_bundle
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.translate import Writer
from tfexport.search.options import SearchOptions

ENGINES = ("tfexport", "ctranslate2", "transformers")
PATH = "/v1/translate"

Translate = Callable[[list[str], int], list[str]]
"""Texts of sentences, with a beam of so many."""


def engine(name: str, bundle: Path, precision: str, threads: int) -> Translate:
    """A way to translate sentences together."""
    if name == "tfexport":
        model = tfexport.load(bundle, precision=precision, threads=threads)
        return lambda texts, beam: [
            found.text for found in model.translate(texts, beam=beam, batch_size=len(texts), scores=False)
        ]
    peer: CTranslate2Peer | HuggingFacePeer
    if name == "ctranslate2":
        folder = bundle.with_name(f"{bundle.name}.ct2")
        peer = CTranslate2Peer(folder, "int8" if precision == "int8" else "float32", intra_threads=threads)
    else:
        peer = HuggingFacePeer(bundle.with_name(f"{bundle.name}.hf"), threads)
    opened = open_bundle(bundle)
    reader, writer = Reader.of(opened, "text"), Writer.of(opened, "text")

    def together(texts: list[str], beam: int) -> list[str]:
        sources = [reader.ids(text.encode()) for text in texts]
        options = SearchOptions(beam=beam, scores=False)
        return [writer.text(ids) for ids in peer.decode(sources, options, len(texts))]

    return together


class Translation(litserve.LitAPI):  # type: ignore[misc]
    """`/v1/translate` for one sentence in each request, all with the beam of the first."""

    def __init__(self, how: dict[str, Any], **options: Any):
        super().__init__(**options)
        self._how = how

    def setup(self, device: str) -> None:
        self._translate = engine(**self._how)

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # LitServe reads annotations, but not as text
        return request["text"], request.get("beam", 1)

    def batch(self, inputs: list[tuple[str, int]]) -> list[tuple[str, int]]:
        return inputs

    def predict(self, inputs: list[tuple[str, int]]) -> list[str]:
        return self._translate([text for text, _ in inputs], inputs[0][1])

    def unbatch(self, output: list[str]) -> list[str]:
        return output

    def encode_response(self, output):  # type: ignore[no-untyped-def]
        return {"results": [{"status": "ok", "hypotheses": [{"text": output}]}]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A model behind LitServe.")
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of each worker process")
    parser.add_argument("--workers", type=int, default=2, help="processes with a model each")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--batch-timeout", type=float, default=0.005, help="seconds that a batch waits to be full")
    options = parser.parse_args(arguments)
    how = {
        "name": options.engine,
        "bundle": options.bundle,
        "precision": options.precision,
        "threads": options.threads,
    }
    api = Translation(how, max_batch_size=options.max_batch, batch_timeout=options.batch_timeout, api_path=PATH)
    # Its faster queue, and no line in a log for each request.
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=options.workers, fast_queue=True)
    server.run(host="127.0.0.1", port=options.port, generate_client_file=False, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
