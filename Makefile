PY := .venv/bin/python

demo: .venv/ready  ## kill a workflow twice with SIGKILL and watch it finish (SQLite, under 30 seconds)
	$(PY) examples/demo.py

test: .venv/ready  ## all tests; those of the engine in memory and on one real database each
	$(PY) -m tests.suite $(ARGS)

thorough: .venv/ready  ## all tests, on every database that can be had
	$(PY) -m tests.suite --thorough $(ARGS)

check: .venv/ready  ## style, types and the direction of imports
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports

bench: .venv/ready  ## ours, the peers and the raw driver, side by side
	$(PY) -m benchmarks $(ARGS)

torture: .venv/ready  ## ten minutes of kills, stops, steals and cut connections on each database
	$(PY) -m tests.torture $(ARGS)

environments: .venv/ready  ## Galera, poolers, clocks, limits, full disks: each set up for real, and a table of what held
	$(PY) -m environments $(ARGS)

shots: .venv/ready  ## pictures of every page of the viewer, light, dark and as on a phone
	$(PY) -m tests.viewer.screenshots $(or $(ARGS),screenshots)

scale: .venv/ready  ## how quickly pages answer with a million runs in the database
	$(PY) -m tests.scale $(ARGS)

api: ON ?= sqlite,postgres,mysql
api: .venv/ready  ## two thousand cases for each operation of the control API, on every database
	EDDA_API_CASES=2000 EDDA_API_DATABASES=$(ON) nice $(PY) -m pytest -v -n 2 --dist worksteal tests/web/test_api_cases.py tests/web/test_api_hostile.py tests/viewer/test_injection.py $(ARGS)

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

.venv/ready: pyproject.toml constraints.txt
	python3 -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/ready

.PHONY: demo test thorough check bench torture environments shots scale api help
