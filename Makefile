PY := .venv/bin/python

demo: .venv/ready  ## kill a workflow twice with SIGKILL and watch it finish (SQLite, under 30 seconds)
	$(PY) examples/demo.py

quick: .venv/ready  ## units, and engine and storage in memory: under two minutes
	$(PY) -m tests.suite --tier quick $(ARGS)

test: .venv/ready  ## all tests but those with crashes, hammers or a browser, on SQLite and one server database
	$(PY) -m tests.suite --tier test $(ARGS)

ci: .venv/ready  ## all tests, on all databases; fewer examples and crash points than thorough
	$(PY) -m tests.suite --tier ci $(ARGS)

thorough: .venv/ready  ## all tests, on all databases, with all examples and crash points
	$(PY) -m tests.suite --tier thorough $(ARGS)

check: .venv/ready  ## style, types, the direction of imports and the vocabulary
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports && $(PY) -m tests.vocabulary

bench: .venv/ready  ## ours, the peers and the raw driver, side by side
	$(PY) -m benchmarks $(ARGS)

faults: .venv/ready  ## ten minutes of kills, stops, steals and cut connections on each database
	$(PY) -m faults $(ARGS)

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

.PHONY: demo quick test ci thorough check bench faults environments shots scale api help
