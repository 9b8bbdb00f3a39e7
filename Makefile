# make demo      fetch SmolLM2-135M-Instruct, convert it, answer a question in four ways
# make test      the quick tests        make test-all   all tests
# The virtual environment is .venv; another Python: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := requirements.txt pyproject.toml

MODEL := checkpoints/SmolLM2-135M-Instruct
TARGETS := $(MODEL)/talon.safetensors $(MODEL)/talon_int8-dynamic.safetensors
# The head that this repository ships; in int8 a level of drafting reads a quarter of the memory.
HEAD := $(firstword $(wildcard assets/*.safetensors))
HEAD_INT8 := $(if $(HEAD),$(MODEL)/draft_int8.safetensors)
# A small tree, on a CPU every row of a forward costs something, and what the text has said before.
TREES := none $(if $(HEAD),chain:2+lookup:3)
PROMPT ?= Explain in three sentences why the sky is blue.

FORMATS := talon/checkpoint.py $(wildcard talon/formats/*.py)
QUANTISING := quantize.py talon/checkpoint.py talon/kernels/linear.py $(wildcard talon/quantising/*.py)

# Runs a command and shows what it says only if it fails.
QUIETLY := sh -c 'log=$$(mktemp); "$$@" >"$$log" 2>&1; code=$$?; \
	[ $$code = 0 ] || cat "$$log" >&2; rm "$$log"; exit $$code' --

.PHONY: demo test test-all lint

# The same question in fp32 and in int8-dynamic, each without and with the head if one ships.
demo: $(TARGETS) $(HEAD_INT8)
	@for file in $(TARGETS); do for tree in $(TREES); do \
		case $$tree in none) head=none;; *) head=$(HEAD_INT8);; esac; \
		echo "answering with $$file, tree $$tree ..."; \
		$(QUIETLY) $(BIN)/python generate.py --checkpoint_path $$file --tree $$tree \
			--draft_checkpoint_path $$head --prompt "$(PROMPT)" --json $$file.$$tree.json || exit; \
	done; done
	@$(BIN)/python -c "$$TABLE" $(foreach file,$(TARGETS),$(TREES:%=$(file).%.json))

define TABLE
import json, sys
runs = [json.load(open(path)) for path in sys.argv[1:]]
print("\n" + runs[-1]["samples"][0]["text"] + "\n")
print(f"{'weights':14}{'tree':18}{'tokens/s':>10}{'tokens a round':>16}  ids")
plain = {}
for run in runs:
    sample, weights = run["samples"][0], run["quantization"] or run["dtype"]
    same = plain.setdefault(weights, sample["tokens"]) == sample["tokens"]
    print(
        f"{weights:14}{run['tree']:18}{sample['tokens_per_s']:10.1f}"
        f"{sample['acceptance_length']:16.2f}  {'as plain' if same else 'not as plain'}"
    )
endef
export TABLE

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow"

test-all: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(MODEL)/model.safetensors: scripts/get_demo_model.py | $(VENV)/demo.stamp
	@echo "fetching SmolLM2-135M-Instruct (98 MB) ..."
	@$(QUIETLY) $(BIN)/python $<
	@touch $@

$(MODEL)/talon.safetensors: $(MODEL)/model.safetensors convert_hf_checkpoint.py $(FORMATS)
	@echo "converting it ..."
	@$(QUIETLY) $(BIN)/python convert_hf_checkpoint.py --checkpoint_dir $(MODEL)

$(MODEL)/talon_int8-dynamic.safetensors: $(MODEL)/talon.safetensors $(QUANTISING)
	@echo "quantising it to int8-dynamic ..."
	@$(QUIETLY) $(BIN)/python quantize.py --checkpoint_path $< --mode int8-dynamic

$(MODEL)/draft_int8.safetensors: $(HEAD) $(QUANTISING) | $(MODEL)/talon.safetensors
	@echo "quantising its head to int8 ..."
	@$(QUIETLY) $(BIN)/python quantize.py --checkpoint_path $< --mode int8 --out $@

# requirements.txt pins torch: installed first, it keeps an extra from pulling in another one.
$(VENV)/base.stamp: $(PACKAGES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: $(PYTHON) is not Python 3.10 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "installing packages into $(VENV) ..."
	@test -x $(BIN)/python || $(QUIETLY) $(PYTHON) -m venv $(VENV)
	@$(QUIETLY) $(BIN)/python -m pip install -r requirements.txt
	@touch $@

$(VENV)/%.stamp: $(VENV)/base.stamp
	@echo "installing the packages of $* ..."
	@$(QUIETLY) $(BIN)/python -m pip install -e '.[$*]'
	@touch $@
