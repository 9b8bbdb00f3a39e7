# make demo      fetch SmolLM2-135M-Instruct, convert it, decode a prompt
# make test      the quick tests        make test-all   all tests
# The virtual environment is .venv; another Python: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := requirements.txt pyproject.toml

MODEL := checkpoints/SmolLM2-135M-Instruct
# The head that this repository ships; in int8 a level of drafting reads a quarter of the memory.
HEAD := $(firstword $(wildcard assets/*.safetensors))
HEAD_INT8 := $(if $(HEAD),$(MODEL)/draft_int8.safetensors)
# A small tree, on a CPU every row of a forward costs something, and what the text has said before.
TREE := chain:2+lookup:3
PROMPT ?= Explain in three sentences why the sky is blue.

.PHONY: demo test test-all lint

# The same question in fp32 and in int8-dynamic, without and with the head if one ships.
demo: $(MODEL)/talon.safetensors $(MODEL)/talon_int8-dynamic.safetensors $(HEAD_INT8)
	@for file in $(filter %talon.safetensors %dynamic.safetensors,$^); do \
		$(BIN)/python generate.py --checkpoint_path $$file --prompt "$(PROMPT)" || exit; \
		$(if $(HEAD),$(BIN)/python generate.py --checkpoint_path $$file --tree $(TREE) \
			--draft_checkpoint_path $(HEAD_INT8) --highlight --prompt "$(PROMPT)" || exit;) \
	done

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q -m "not slow"

test-all: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(MODEL)/talon.safetensors: convert_hf_checkpoint.py talon/checkpoint.py | $(VENV)/demo.stamp
	$(BIN)/python scripts/get_demo_model.py
	$(BIN)/python convert_hf_checkpoint.py --checkpoint_dir $(MODEL)

$(MODEL)/talon_int8-dynamic.safetensors: $(MODEL)/talon.safetensors
	$(BIN)/python quantize.py --checkpoint_path $< --mode int8-dynamic

$(MODEL)/draft_int8.safetensors: $(HEAD) | $(MODEL)/talon.safetensors
	$(BIN)/python quantize.py --checkpoint_path $< --mode int8 --out $@

# requirements.txt pins torch: installed first, it keeps an extra from pulling in another one.
$(VENV)/base.stamp: $(PACKAGES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: $(PYTHON) is not Python 3.10 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -r requirements.txt
	touch $@

$(VENV)/%.stamp: $(VENV)/base.stamp
	$(BIN)/python -m pip install --quiet -e '.[$*]'
	touch $@
