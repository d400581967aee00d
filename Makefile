# make demo    serve a small chat model on this machine's CPU, ask it a question, show what was rewritten
# make test    run the tests
# Both make .venv and what else they need, once.

PYTHON ?= python3
PY := .venv/bin/python
CHECKPOINT := .cache/smollm2-135m-instruct

.PHONY: setup checkpoint demo test check bench matrix properties

setup:
	@$(PYTHON) scripts/setup.py

checkpoint: setup
	@$(PY) scripts/make_checkpoint.py $(CHECKPOINT)

demo: checkpoint
	@$(PY) scripts/demo.py

test: checkpoint
	$(PY) -m pytest -n 2 --dist loadfile

check: setup
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: checkpoint
	$(PY) -m bench.cpu

# Every architecture of Transformers on a tiny checkpoint, ours beside vLLM's own backend; ARGS="--only failed" and the like.
matrix: setup
	$(PY) -m tests.serve.matrix --workers 2 $(ARGS); status=$$?; $(PY) -m tests.serve.matrix.coverage && exit $$status

# Two hundred random configs, served and compared with Transformers; ARGS="-k llama" and the like.
properties: setup
	TFBACKEND_EXAMPLES=67 $(PY) -m pytest tests/serve/test_properties.py $(ARGS)
