# Needs Python 3.11 or newer, make and a package index; everything else is installed into environments of its own:
# .venv holds the core alone (as a user has it), .venv-test what the tests compare with.

PYTHON ?= $(shell for python in python3 python python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
CORE := .venv/bin/python
TEST := .venv-test/bin/python

# The CPU build is small where the index has it; torch goes in first, or transformers may pull a CUDA build.
TORCH := torch==2.13.0
TORCH_FALLBACK := torch>=2.4

DEMO := gpt3-2.7b --device a100-sxm-40gb --dtype fp16 --micro-batch-size 4 --seq-len 2048 --attention unfused

.PHONY: study demo test lint types grid pytest fuzz mutation docs site figure release sbom image space bench clean

# Exit code 1 means that check found something to say, as it should here.
demo: .venv/installed
	@echo 'shapewright check $(DEMO)'
	@.venv/bin/shapewright check $(DEMO) || [ $$? -eq 1 ]

test: lint types pytest

lint: .venv-test/installed
	$(TEST) -m ruff check .
	$(TEST) -m ruff format --check .

types: .venv-test/installed
	$(TEST) -m mypy --strict

# Which answers to a fixed list of questions moved, and by how much, since they were last renewed on purpose.
grid: .venv-test/installed
	$(TEST) scripts/write_regression_grid.py --check

pytest: .venv-test/installed | lint types
	$(TEST) -m pytest

# Hostile files for every reader, for as long as it takes: make fuzz FUZZ="--seed 2 configs=1000000 stores=10000"
FUZZ ?= configs=100000 calibration=10000 devices=10000 stores=5000 parquet=2000 csv=5000 kernels=5000 requests=5000 jobs=10000
fuzz: .venv-test/installed
	$(TEST) tests/fuzz/run.py $(FUZZ)

# Changes of the core that no test notices, by a seeded sample of each package; continues where it was stopped.
mutation: .venv-test/installed
	$(TEST) scripts/mutate.py --seed 0 --count 25

docs: .venv-test/installed
	$(TEST) scripts/write_preset_measures.py
	$(TEST) scripts/write_pages.py
	$(TEST) scripts/write_results.py

# The documentation site, in build/site.
site: .venv-test/installed
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=scripts $(TEST) -m mkdocs build --strict --quiet

# The figures of docs/; matplotlib is for them alone.
figure: .venv-test/installed
	$(TEST) $(PIP_INSTALL) --editable '.[plot]'
	$(TEST) scripts/draw_figures.py

# Some minutes: every row of docs/study.md anew.
study: .venv-test/installed
	$(TEST) scripts/write_study.py --refresh

# Wheel and sdist in dist, installed bare with the lowest and newest dependencies, and each extra alone.
release: .venv-test/installed
	rm -rf dist
	$(TEST) -m hatchling build
	$(TEST) scripts/check_release.py

# What the core installs, as CycloneDX, and known vulnerabilities of it where the package index answers pip-audit.
sbom: .venv/installed
	test -x build/audit/bin/python || $(PYTHON) -m venv build/audit
	build/audit/bin/python $(PIP_INSTALL) cyclonedx-bom pip-audit
	build/audit/bin/cyclonedx-py environment $(CORE) --of JSON -o build/sbom.json
	build/audit/bin/pip-audit --path $$($(CORE) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# The explorer as a container: docker run -p 7860:7860 shapewright, then http://localhost:7860
image:
	docker build --tag shapewright .

# The folder to push to a Space of the Hugging Face hub, which builds the same container.
space:
	rm -rf build/space && mkdir -p build/space
	cp -r Dockerfile .dockerignore pyproject.toml LICENSE src build/space/
	find build/space -name __pycache__ -prune -exec rm -r {} +
	cp space/README.md build/space/

bench: .venv-test/installed
	$(TEST) benchmarks/run.py

clean:
	rm -rf .venv .venv-test build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/installed: pyproject.toml $(shell find src -type f -not -name '*.pyc')
	@test -n "$(PYTHON)" || { echo 'no Python 3.11 or newer found; give one with make PYTHON=/path/to/python' >&2; exit 1; }
	test -x $(CORE) || $(PYTHON) -m venv .venv
	$(CORE) $(PIP_INSTALL) .
	@touch $@

.venv-test/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo 'no Python 3.11 or newer found; give one with make PYTHON=/path/to/python' >&2; exit 1; }
	test -x $(TEST) || $(PYTHON) -m venv .venv-test
	$(TEST) $(PIP_INSTALL) '$(TORCH)' || $(TEST) $(PIP_INSTALL) '$(TORCH_FALLBACK)'
	$(TEST) $(PIP_INSTALL) --editable '.[test]'
	@touch $@
