"""Random requests to every address of the server, made of its OpenAPI description.

    python -m fuzz.server.openapi [--requests 10000] [--seed 0]

Schemathesis makes requests that fit the description and others that do not, and looks at each answer: the status and its
body are as the description says, and so are content types and headers. The application runs in this process. The exit code
is 1 where an answer is wrong, or takes longer than `SLOWEST` seconds.

Not checked: that every request that fits is answered (options may contradict each other), and that every one that does not
is refused (LibreTranslate reads no unknown fields). Server errors that are described, 503 and 504, are answers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import schemathesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from makers.applications import application
from makers.serving_bundle import words, write_bundle
from makers.tiny import HINTS, SRC_VOCAB, tiny_classifier
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats.native import Tokenizers

SLOWEST = 30
AT_ONCE = 500
"""Requests to all addresses together, before those to the first are other ones."""
NAMES = ("de-en", "classes")
EXCLUDED = [not_a_server_error, positive_data_acceptance, negative_data_rejection]


def bundles(folder: Path) -> dict[str, Path]:
    """A translation model and a classifier, small and random."""
    torch.save(tiny_classifier().state_dict(), folder / "classifier.pt")
    tokenizers = Tokenizers(words("s", SRC_VOCAB), None)
    classifier = load_checkpoint(folder / "classifier.pt", HINTS, tokenizers=tokenizers)
    return {
        NAMES[0]: write_bundle(folder, with_words=True).directory,
        NAMES[1]: export(classifier, folder / "classes", gate=None).directory,
    }


def _to_a_bundle(case: Any, name: str) -> None:
    """Let a request ask for a bundle that there is: few random names are one."""
    if case.path_parameters and "name" in case.path_parameters:
        case.path_parameters["name"] = name
    if isinstance(case.body, dict) and case.path.startswith("/v1/"):
        case.body["model"] = name
        case.body.pop("source", None)
        case.body.pop("target", None)
    elif isinstance(case.body, dict) and case.path == "/translate":
        case.body["source"], case.body["target"] = "de", "en"


def check(app: Any, requests: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Answers by status, and what is wrong with some."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [found.ok() for found in schema.get_all_operations()]
    counts: Counter[str] = Counter()
    problems: list[str] = []
    bodies = sum(bool(one.body) for one in operations)
    for operation in operations:
        # Most of what may go wrong is in bodies.
        share = requests * 9 // 10 // bodies if operation.body else requests // 10 // (len(operations) - bodies)
        modes = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]

        @seeded(seed)
        @settings(
            max_examples=max(1, share),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=st.one_of(modes), name=st.sampled_from([None, NAMES[0], NAMES[0], NAMES[1]]))
        def ask(case: Any, name: str | None) -> None:
            if name is not None:
                _to_a_bundle(case, name)
            began = time.monotonic()
            try:
                response = case.call()
                counts[str(response.status_code)] += 1
                case.validate_response(response, excluded_checks=EXCLUDED)
            except FailureGroup as failures:
                problems.extend(f"{case.method} {case.path}: {one}" for one in failures.exceptions)
            except Exception as error:
                problems.append(f"{case.method} {case.path}: {error!r} of {case.body!r}"[:1000])
            if time.monotonic() - began > SLOWEST:
                problems.append(
                    f"{case.method} {case.path} took {time.monotonic() - began:.0f} s: {case.body!r}"[:1000]
                )

        try:
            ask()
        except Exception as error:  # of the generator: a mode has nothing to vary where there are no parameters
            print(f"{operation.label}: {error!r}"[:300])
    return counts, problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random requests to every address of the server.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, application(bundles(Path(folder))) as app:
        counts, bad = Counter[str](), 0
        for start in range(0, options.requests, AT_ONCE):
            more, problems = check(app, min(AT_ONCE, options.requests - start), options.seed + start)
            counts, bad = counts + more, bad + len(problems)
            for problem, times in Counter(problems).most_common(20):
                print(f"{times} times: {problem}\n", flush=True)
            statuses = ", ".join(f"{count} of {status}" for status, count in sorted(counts.items()))
            seconds = time.monotonic() - began
            print(f"{counts.total()} requests: {statuses}; {bad} problems; {seconds:.0f} s", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
