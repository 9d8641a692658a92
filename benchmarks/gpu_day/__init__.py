"""A day on a bare GPU machine, without a network: one command that runs unattended and loses nothing.

`make gpu-day-pack` packs what such a machine lacks (`pack.py`). `make gpu-day` unpacks it (`unpack.py`) and runs the stages
of `plan.py`, each in a process of its own, under its own limit (`runner.py`, `processes.py`). Every stage writes what it
found while it runs, and `summary.py` makes one page of it. `make gpu-day REHEARSE=1` runs all of it without a GPU, over the
stand-ins of `benchmarks/cuda_dry`.

What starts before the pack is unpacked (`__main__`, `plan`, `runner`, `processes`, `unpack`, `summary`) imports the standard
library alone.
"""
