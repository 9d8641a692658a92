# `make demo` and `make test` work on a bare machine: they make their own virtual environment, with pinned versions.
PYTHON ?= python3
VENV ?= .venv

.PHONY: demo test constraints clean

demo: $(VENV)/export.done
	$(VENV)/bin/tfexport demo

test: $(VENV)/dev.done
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n 2 --dist loadfile

$(VENV)/export.done: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[export,cpu]'
	touch $@

$(VENV)/dev.done: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[export,cpu,train,spacy,dev]'
	touch $@

constraints: $(VENV)/dev.done
	(head -1 constraints.txt; $(VENV)/bin/pip freeze --exclude-editable | sed 's/+cpu//') > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info
