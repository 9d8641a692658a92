"""The stages of a day: each is a command, `python -m benchmarks.gpu_day.stages.NAME`."""
