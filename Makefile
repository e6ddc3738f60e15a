# Every target is one call of `python3 -m dtlab`, which works where make is missing too.
# Another Python: make lab PYTHON=python3.12    More arguments: make test ARGS="tests/test_doctor.py -x"
PYTHON ?= python3
DTLAB = $(PYTHON) -m dtlab

.PHONY: help lab tour test doctor test-all notebooks bench peers ui lint clean

help:
	@echo "make lab: JupyterLab on your copies of the lessons   make tour: the course in miniature"
	@echo "make test: the tests, some twenty minutes on two cores   make doctor: what this machine can do"
	@echo "for maintainers: test-all, notebooks, bench, peers, ui, lint, clean"

lab tour test doctor:
	@$(DTLAB) $@ $(ARGS)

test-all:
	@$(DTLAB) test --all $(ARGS)

notebooks:
	@$(DTLAB) run notebooks/build.py $(ARGS)

bench:
	@$(DTLAB) run --extra bench benchmarks/run.py $(ARGS)

peers:
	@$(DTLAB) run --extra peers -m pytest -m peers $(ARGS)

ui:
	@$(DTLAB) test -m ui $(ARGS)

lint:
	@$(DTLAB) run -m ruff check .

# The reader's work/ is never touched
clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
	find dtlab tests -name __pycache__ -prune -exec rm -rf {} +
