"""Runs the application under Ray Serve on this machine, until stdin ends: `python -m tests.support.ray_driver PORT JSON`.

A line on stdin asks for the counters of a replica, which are printed as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile

import ray
from ray import serve

from tfexport.serving.ray import Arguments, app


def main(port: int, arguments: dict[str, object]) -> None:
    # Not in the folder of a test, whose name may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=2,
            object_store_memory=80_000_000,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            handle = serve.run(app(Arguments(**arguments)))
            print("ready", flush=True)
            for _ in sys.stdin:
                print(json.dumps(handle.metrics.remote().result()), flush=True)
            serve.shutdown()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
