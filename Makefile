# make demo    one prompt decoded plainly, as a chain and as a tree, side by side  (DEMO_ARGS="--plain")
# make app     the same as a page in the browser, drawn as it runs                 (APP_ARGS="--port 8000")
# make test    the tests                                                          (PYTEST_ARGS="-k ngram")
# make lint    ruff, its formatter's check, mypy
# make clean   remove the environment, builds and caches
#
# The first four make a virtual environment when it is missing or out of date: PYTHON, VENV and TORCH say how, see
# scripts/install.sh.   PYTHON=python3.12 make test   TORCH=torch==2.13.0 make test

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
DEMO_ARGS ?=
APP_ARGS ?=
PYTEST_ARGS ?=
export PYTHON VENV TORCH

BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)

.PHONY: help demo app test lint clean
.NOTPARALLEL: # the targets share one environment

help:
	@sed -n 's/^# make/make/p' Makefile

demo:
	@sh scripts/install.sh demo
	$(BIN)/hf-treespec demo $(DEMO_ARGS)

app:
	@sh scripts/install.sh app,quant
	$(BIN)/hf-treespec serve-demo $(APP_ARGS)

test:
	@sh scripts/install.sh app,demo,dev,quant,bench
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint:
	@sh scripts/install.sh app,demo,dev,quant,bench
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find hf_treespec app tests -name __pycache__ -type d -prune -exec rm -rf {} +
