# make train   install hvkeras in .venv, and train a Keras model on two processes
# make test    test each feature once, on real ranks, with Horovod and Open MPI: ten minutes on two slow cores
# make test-all   make test, unless it has just passed, and then all tests that a change must pass
# make check   for daily work: make lint, the quickest unit tests, and one job on each engine
# make lint    ruff, mypy, pyright, import-linter and clang-format
# make docs    build the documentation site in build/docs
# make chart   measure the chart in the README
# make picture   make the report and its screenshot in docs/compare.md
# make wheel   build the wheel for this machine in dist/; make wheels: those of a release, for every Linux, and the source
#              distribution; make test-wheels: build and test them
# make native  build the native engine in the source tree; make sanitize: run its C++ core under the sanitizers
# make release-check   build all files of a release, check them, and install them on every Python of this machine
# make test-arm   test the C++ core for 64-bit ARM, under qemu; make test-gpu: tests that need a GPU (skipped without one)
# make test-trackers   test MLflow, Weights & Biases, TensorBoard, Keras Tuner, Optuna and Orbax, in a separate environment
# make test-keras   run Keras's own tests in each rank of a two-rank job
# make test-next   try the nightly builds of TensorFlow and Keras, in a separate environment
# make import-cost   measure `import hvkeras` and `hvkeras --help`
#
# Each file .venv/.has-* marks a finished step, so that make only repeats outdated ones.
# PYTHON=... selects the Python, FLAVOUR=cpu|cuda|tensorflow the TensorFlow, COMPILER=zig|system the wheel's compiler.

.PHONY: train test test-all test-rest test-newest test-oldest test-cold test-soak test-elastic \
  test-hosts test-stress test-times test-pythons test-python test-wheels test-arm test-gpu test-clusters test-trackers \
  test-keras test-next release-check release-version check lint docs chart picture wheel wheels native sanitize import-cost \
  clean
.DELETE_ON_ERROR:
SHELL := bash
# Otherwise each process of the tests would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
comma := ,

VENV := .venv
OLDEST := .venv-oldest
NEXT := .venv-next
CLUSTERS := .venv-clusters
TRACKERS := .venv-trackers
SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE tools/build_wheel.py \
	tools/manylinux.cmake $(shell find hvkeras backends -type f -not -path '*/__pycache__/*' -not -name '*.so')
TESTED_TENSORFLOW := 2.21
OLDEST_TENSORFLOW := 2.16
OLDEST_KERAS := 3.3
FLAVOUR := $(if $(shell nvidia-smi -L 2>/dev/null),cuda,cpu)
PACKAGE_cpu := tensorflow-cpu
PACKAGE_tensorflow := tensorflow
PACKAGE_cuda := tensorflow[and-cuda]

# -I excludes the checkout's hvkeras/ from sys.path, where it would hide the installed package.
python = $(1)/bin/python -I
pip = $(call python,$(1)) -m pip --disable-pip-version-check install --quiet
# The wheel for this machine: for this Linux (system), for every Linux (zig), or pure Python (system, without a compiler).
# Releases are compiled with Zig, whose first compilation takes three more minutes.
HERE := $(shell uname -m)
COMPILER := system
wheel_here = $$(ls dist/*linux*_$(HERE).whl dist/*-any.whl 2>/dev/null)
# Reinstall the package, but only missing dependencies. All environments use the same wheel.
install_hvkeras = $(call pip,$(1)) --force-reinstall --no-deps $(wheel_here) && $(call pip,$(1)) "$(wheel_here)$(2)"

# Runs a command for each supported Python of this machine, with its $$version and the path $$python.
define on_every_python
for version in 3.10 3.11 3.12 3.13; do \
  python=$$(ls $$(command -v python$$version) ~/.pyenv/versions/$$version.*/bin/python 2>/dev/null | while read -r one; do \
    "$$one" -c 'import ensurepip, venv' 2>/dev/null && echo "$$one" && break; done); \
  if [ -z "$$python" ]; then echo "Python $$version: not on this machine"; continue; fi; \
  echo "Python $$version: $$python"; \
  $(1) || exit 1; done
endef

train: $(VENV)/.has-hvkeras
	$(VENV)/bin/hvkeras run -np 2 $(VENV)/bin/python examples/train.py

# The tier of a test depends on its purpose: no mark, `slow` or `nightly` (see CONTRIBUTING.md).
QUICK := not slow and not nightly
REST := slow and not nightly

# The build of Horovod takes two minutes or more. Meanwhile, the tests that do not need it run.
BUILD_LOG := build/horovod.log
FAILED := $(VENV)/.has-horovod.failed
test:
	+@SECONDS=0; $(MAKE) --no-print-directory -j2 $(VENV)/.has-test-tools && echo "Set up in $$SECONDS s"
	+@rm -f $(FAILED); mkdir -p $(dir $(BUILD_LOG)); \
	  if ! $(MAKE) -q $(VENV)/.has-horovod; then \
	    echo "Building Horovod meanwhile, with its output in $(BUILD_LOG)"; rm -f $(VENV)/.has-horovod; \
	    { $(MAKE) $(VENV)/.has-horovod > $(BUILD_LOG) 2>&1 || touch $(FAILED); } & \
	  fi; \
	  $(VENV)/$(PYTEST) -m "$(QUICK)" --horovod=$(VENV)/.has-horovod; tests=$$?; wait; \
	  if [ -e $(FAILED) ]; then cat $(BUILD_LOG); exit 1; fi; exit $$tests
	@touch $(VENV)/.passed

# More workers than cores, because ranks often wait. Tests that share a launch run on one worker. The crash of a worker
# ends the session, because the others might wait forever.
WORKERS := 4
PYTEST := bin/pytest -n $(WORKERS) --max-worker-restart 0
NEWEST := $(VENV)/.has-hvkeras $(VENV)/.has-test-tools

# If the checkout has just passed `make test`, only the other tests run.
test-all: $(VENV)/.passed
	+$(MAKE) --no-print-directory test-rest

$(VENV)/.passed: $(or $(wildcard $(shell git ls-files -co --exclude-standard 2>/dev/null)),$(SOURCES))
	+$(MAKE) --no-print-directory test

# Tests of torchrun only run in `make test-clusters`, because its package is large.
test-rest: $(NEWEST) $(VENV)/.has-horovod $(VENV)/.has-browser $(OLDEST)/.has-hvkeras $(CLUSTERS)/.has-ray \
  $(CLUSTERS)/.has-slurm $(CLUSTERS)/.has-spark
	$(VENV)/$(PYTEST) -m "$(REST)"
	+$(MAKE) --no-print-directory test-oldest
	+$(MAKE) --no-print-directory test-hosts
	$(CLUSTERS)/bin/pytest tests/clusters

# Both tiers on the newest TensorFlow.
test-newest: $(NEWEST) $(VENV)/.has-horovod $(VENV)/.has-browser
	$(VENV)/$(PYTEST) -m "not nightly"

# The unit tests and a job on each engine, on every supported Python that this machine has.
test-pythons:
	+@$(call on_every_python,$(MAKE) --no-print-directory test-python VENV=.venv-$$version PYTHON=$$python)

test-python: $(NEWEST) $(VENV)/.has-horovod
	$(VENV)/$(PYTEST) -m "$(QUICK)" tests/unit tests/parallel/test_same_training.py

# Tests with the mark `oldest` also run on the oldest TensorFlow, without Horovod and MPI.
test-oldest: $(OLDEST)/.has-hvkeras
	$(OLDEST)/$(PYTEST) -m "oldest and not oldest_nightly" -k "not horovod and not mpirun"

# Nightly builds, without Horovod and MPI: the scripts of the README and of docs/data-parallel.md, batches of all ranks,
# and the tests with the mark `oldest`. To try today's builds, remove the environment first: rm -r .venv-next
test-next: $(NEXT)/.has-hvkeras
	@$(call python,$(NEXT)) -m pip --disable-pip-version-check list | grep -iE '^(hvkeras|tf_nightly|(tf_)?keras-nightly) '
	$(NEXT)/$(PYTEST) -k "README-1 or data-parallel-1" tests/examples
	$(NEXT)/$(PYTEST) -m "$(QUICK)" -k native-2 tests/parallel/test_global_batch.py
	$(NEXT)/$(PYTEST) -m "oldest and not oldest_nightly" -k "not horovod and not mpirun"

# A sample of the tests with cold ranks (new Python processes), to verify that forking makes no difference.
test-cold: $(NEWEST) $(VENV)/.has-horovod
	$(VENV)/$(PYTEST) -m sample --cold

# Real schedulers: Ray, Slurm, Spark and torchrun, in a separate environment.
test-clusters: $(CLUSTERS)/.has-ray $(CLUSTERS)/.has-slurm $(CLUSTERS)/.has-spark $(CLUSTERS)/.has-torch
	$(CLUSTERS)/bin/pytest tests/clusters

# Tests that take minutes, with the mark `nightly`.
test-soak: $(NEWEST) $(VENV)/.has-horovod $(VENV)/.has-browser $(VENV)/.has-keras-suite $(OLDEST)/.has-hvkeras
	$(VENV)/$(PYTEST) -m nightly --ignore tests/hosts
	$(OLDEST)/$(PYTEST) -m "oldest and oldest_nightly" -k "not horovod and not mpirun"

# An elastic job with random failures and membership changes.
MINUTES := 10
BACKEND := native
HOSTS := 0
test-elastic: $(NEWEST)
	$(VENV)/bin/python tools/elastic_soak.py --minutes $(MINUTES) --backend $(BACKEND) --hosts $(HOSTS)

# The native engine between hosts made of network namespaces, as root: its contract on two and three hosts, and faults.
test-hosts: $(NEWEST)
	@command -v nft >/dev/null || tools/system_packages.sh nftables || echo "Tests that need nft are skipped"
	$(VENV)/bin/pytest -rs tests/hosts

# Repeat tests while other processes load all cores: make test-stress TESTS=tests/launch TIMES=3
TESTS := tests/launch
TIMES := 3
test-stress: $(NEWEST) $(VENV)/.has-horovod
	$(VENV)/bin/python tools/stress.py --times $(TIMES) -- $(VENV)/$(PYTEST) -m "not nightly" $(TESTS)

# Print the CPU time of `make test` by activity, and record the durations of groups of tests, which determine their order.
TIER := $(QUICK)
test-times: $(NEWEST) $(VENV)/.has-horovod
	$(VENV)/$(PYTEST) --write-times -m "$(TIER)"

check: lint $(NEWEST)
	$(VENV)/$(PYTEST) -q -m check

# Schemas and the files that they apply to. check-jsonschema contains all of them.
SCHEMAS := vendor.github-workflows=.github/workflows/*.yml custom.github-workflows-require-timeout=.github/workflows/*.yml \
  vendor.github-issue-forms=.github/ISSUE_TEMPLATE/[!c]*.yml vendor.github-issue-config=.github/ISSUE_TEMPLATE/config.yml \
  vendor.citation-file-format=CITATION.cff
check_schema = $(VENV)/bin/check-jsonschema --quiet --builtin-schema $(1)

lint: $(VENV)/.has-lint-tools hvkeras/backends
	$(VENV)/bin/ruff check
	$(VENV)/bin/python -I tools/first_party_imports.py
	$(VENV)/bin/python -I tools/foreign_changes.py
	$(VENV)/bin/mypy -p hvkeras
	$(VENV)/bin/mypy examples tests/harness tests/conftest.py tests/user_code
	PYTHONPATH=. $(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/python -I tools/type_completeness.py
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files '*.cc' '*.h')
	$(foreach schema,$(SCHEMAS),$(call check_schema,$(subst =, ,$(schema))) &&) true

docs: $(VENV)/.has-docs-tools hvkeras/backends
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	@echo build/docs/index.html

# The chart in the README, of the engines and other libraries on this machine; build/speed.json has all times.
CHART_TIME := 25
chart: $(VENV)/.has-test-tools $(VENV)/.has-horovod
	@mkdir -p build
	$(VENV)/bin/hvkeras bench step -np 2 --peers --time $(CHART_TIME) --json build/speed.json --plot docs/speed.png

# The screenshot in docs/compare.md, of a comparison on this machine.
picture: $(VENV)/.has-test-tools $(VENV)/.has-horovod $(VENV)/.has-browser
	PATH="$(abspath $(VENV))/bin:$$PATH" hvkeras compare -np 1,2 --repeat 3 --out build/report python examples/train.py \
	  --epochs 30
	$(VENV)/bin/python tools/picture.py build/report/report.html docs/compare.png

wheel: $(VENV)/.has-wheel
	@echo $(wheel_here)

# The files of a release.
wheels: $(VENV)/.has-zig
	@rm -rf dist
	@for machine in x86_64 aarch64; do \
	  $(call python,$(VENV)) tools/build_wheel.py --machine $$machine dist >/dev/null || exit 1; done
	@$(call python,$(VENV)) -c "from scikit_build_core.build import build_sdist; build_sdist('dist')" >/dev/null
	@touch $(VENV)/.has-wheel
	@ls -s --block-size=1K dist/*

test-wheels:
	+$(MAKE) --no-print-directory wheels
	+$(MAKE) --no-print-directory $(VENV)/.has-test-tools $(VENV)/.has-twine
	$(VENV)/bin/pytest -q tests/unit/test_wheels.py
	$(VENV)/bin/twine check --strict dist/*

# What .github/workflows does for a tag, apart from the tests of a change: the version, the site and the files of the
# release. Each Python of this machine then gets the wheel, and one of them the source distribution, too.
release-check: release-version docs test-wheels test-arm
	@$(call on_every_python,"$$python" -I tools/try_release.py dist/*_$(HERE).whl)
	$(VENV)/bin/python -I tools/try_release.py dist/*.tar.gz

# Prints where the version stands. With TAG=v1.2.3, it must be that of the tag, and have a date in CHANGELOG.md.
release-version:
	@version=$$(sed -n 's/^__version__ = "\(.*\)"$$/\1/p' hvkeras/__init__.py); [ "$${TAG:-v$$version}" = "v$$version" ] && \
	  grep -Hx "version: $$version" CITATION.cff && grep -H "^## $$version, $${TAG:+[0-9]}" CHANGELOG.md || \
	  { echo "hvkeras/__init__.py, CITATION.cff and CHANGELOG.md must have the version of the tag. Received: __version__=$$version," \
	    "TAG=$${TAG:-}. HINT: set them, and with a tag the date in CHANGELOG.md: ## $$version, 2030-12-31"; exit 1; }

# The C++ core for 64-bit ARM, compiled here and run under qemu.
test-arm: $(VENV)/.has-zig
	@command -v qemu-aarch64 >/dev/null && [ -e /usr/aarch64-linux-gnu ] || \
	  tools/system_packages.sh qemu-user libc6-arm64-cross
	@PATH="$(abspath $(VENV))/bin:$$PATH"; cmake -S . -B build/arm -G Ninja -DMACHINE=aarch64 \
	  -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/tools/manylinux.cmake >/dev/null && cmake --build build/arm --target core_test
	QEMU_LD_PREFIX=/usr/aarch64-linux-gnu qemu-aarch64 build/arm/backends/native/core_test check

# Tests that need GPUs; each skipped part prints its reason. Horovod is only built if there is a GPU.
test-gpu: $(VENV)/.has-test-tools $(if $(filter cuda,$(FLAVOUR)),$(VENV)/.has-horovod)
	$(VENV)/bin/pytest -q -rsp tests/gpu

# The pages on trackers and tuners, with their newest releases; all offline.
test-trackers: $(TRACKERS)/.has-hvkeras
	$(TRACKERS)/bin/pytest -q -k trackers tests/trackers tests/examples

# Keras's own tests, which its wheel contains, in each rank of a two-rank job, with every optimizer distributed.
test-keras: $(NEWEST) $(VENV)/.has-horovod $(VENV)/.has-keras-suite
	$(VENV)/bin/pytest -n 2 --max-worker-restart 0 tests/keras_suite

import-cost: $(VENV)/.has-hvkeras
	@$(call python,$(VENV)) tools/import_cost.py

# The native engine in the source tree.
native: $(VENV)/.has-build-tools
	@PATH="$(VENV)/bin:$$PATH"; cmake -S . -B build/native -G Ninja >/dev/null && cmake --build build/native
	@cp build/native/backends/native/libhvkeras_native*.so backends/native/

# The C++ core under ThreadSanitizer and AddressSanitizer, for SECONDS_EACH seconds each.
SECONDS_EACH := 30
sanitize: $(VENV)/.has-build-tools
	@PATH="$(VENV)/bin:$$PATH"; for sanitizers in thread address,undefined; do \
	  cmake -S . -B build/$$sanitizers -G Ninja -DSANITIZER=$$sanitizers >/dev/null && \
	  cmake --build build/$$sanitizers --target core_test && \
	  build/$$sanitizers/backends/native/core_test check $(SECONDS_EACH) || exit 1; done

clean:
	rm -rf build dist .venv-3.* $(VENV) $(OLDEST) $(NEXT) $(CLUSTERS) $(TRACKERS)

$(addsuffix /.has-python,$(VENV) $(OLDEST) $(NEXT) $(CLUSTERS) $(TRACKERS)): %/.has-python: | tools/make_venv.sh
	@tools/make_venv.sh $*
	@touch $@

# tf_keras depends on `tensorflow`, which would overwrite tensorflow-cpu. Therefore it is installed with --no-deps.
$(VENV)/.has-tensorflow $(CLUSTERS)/.has-tensorflow: %/.has-tensorflow: %/.has-python
	@echo "Installing $(PACKAGE_$(FLAVOUR)) $(TESTED_TENSORFLOW) (a large download the first time)"
	@$(call pip,$*) "$(PACKAGE_$(FLAVOUR))==$(TESTED_TENSORFLOW).*"
	@$(call pip,$*) --no-deps "tf_keras==$(TESTED_TENSORFLOW).*"
	@touch $@

$(VENV)/.has-build-tools: $(VENV)/.has-python
	@$(call pip,$(VENV)) "hatch-fancy-pypi-readme>=24" "scikit-build-core>=0.11" "cmake>=3.19,<4" ninja
	@touch $@

# Zig, the compiler for every Linux (80 MB).
$(VENV)/.has-zig: $(VENV)/.has-build-tools
	@$(call pip,$(VENV)) "ziglang==0.16.*"
	@touch $@

# twine checks metadata as PyPI does.
$(VENV)/.has-twine: | $(VENV)/.has-python
	@$(call pip,$(VENV)) "twine>=6.1"
	@touch $@

# Without a compiler, the wheel is pure Python.
$(VENV)/.has-wheel: $(if $(filter zig,$(COMPILER)),$(VENV)/.has-zig,$(VENV)/.has-build-tools) $(SOURCES)
	@echo "Building hvkeras"
	@rm -f dist/*.whl
	@$(call python,$(VENV)) tools/build_wheel.py --compiler $(COMPILER) dist >/dev/null
	@touch $@

$(VENV)/.has-hvkeras: $(VENV)/.has-tensorflow $(VENV)/.has-wheel
	@echo "Installing hvkeras"
	@$(call install_hvkeras,$(VENV),)
	@touch $@

# Includes the requirements of Horovod's build, so that the build does not change packages while tests run.
$(VENV)/.has-test-tools: pyproject.toml | $(VENV)/.has-hvkeras
	@echo "Installing Open MPI, UCX and the test tools"
	@$(call install_hvkeras,$(VENV),[test$(comma)mpi$(comma)hosts$(comma)horovod])
	@touch $@

$(VENV)/.has-horovod: $(VENV)/.has-tensorflow | $(VENV)/.has-test-tools
	@missing=$$(for tool in g++ make; do command -v $$tool >/dev/null || echo $$tool; done); \
	  [ -z "$$missing" ] || tools/system_packages.sh $$missing
	@$(VENV)/bin/hvkeras build-horovod --with-mpi
	@touch $@

# Imports of Keras's tests, in a separate folder at the end of these ranks' sys.path: other tests do not see them.
$(VENV)/.has-keras-suite: | $(VENV)/.has-test-tools
	@echo "Installing the requirements of Keras's tests"
	@$(call pip,$(VENV)) --target $(VENV)/keras_suite grain jax orbax-checkpoint pandas scipy tensorboard
	@touch $@

# Reports are tested in a real browser.
$(VENV)/.has-browser: | $(VENV)/.has-python
	@command -v chromium >/dev/null || tools/system_packages.sh chromium || echo "Tests of reports in a browser are skipped"
	@touch $@

$(VENV)/.has-lint-tools: pyproject.toml | $(VENV)/.has-test-tools
	@$(call install_hvkeras,$(VENV),[lint])
	@touch $@

# The site is built from the sources; hvkeras need not be installed.
$(VENV)/.has-docs-tools: pyproject.toml | $(VENV)/.has-python
	@$(call pip,$(VENV)) $$(sed -n '/^\[dep/q;s/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr -d ',"')
	@touch $@

$(OLDEST)/.has-tensorflow: $(OLDEST)/.has-python
	@echo "Installing tensorflow-cpu $(OLDEST_TENSORFLOW) and Keras $(OLDEST_KERAS)"
	@$(call pip,$(OLDEST)) "tensorflow-cpu==$(OLDEST_TENSORFLOW).*" "keras==$(OLDEST_KERAS).*"
	@$(call pip,$(OLDEST)) --no-deps "tf_keras==$(OLDEST_TENSORFLOW).*"
	@touch $@

$(OLDEST)/.has-hvkeras: $(OLDEST)/.has-tensorflow $(VENV)/.has-wheel
	@$(call install_hvkeras,$(OLDEST),[test])
	@touch $@

$(NEXT)/.has-tensorflow: $(NEXT)/.has-python
	@echo "Installing the nightly builds of TensorFlow and Keras (a large download)"
	@$(call pip,$(NEXT)) tf-nightly keras-nightly tf_keras-nightly
	@touch $@

$(NEXT)/.has-hvkeras: $(NEXT)/.has-tensorflow $(VENV)/.has-wheel
	@$(call install_hvkeras,$(NEXT),[test])
	@touch $@

$(CLUSTERS)/.has-hvkeras: $(CLUSTERS)/.has-tensorflow $(VENV)/.has-wheel
	@$(call install_hvkeras,$(CLUSTERS),[test$(comma)hosts])
	@touch $@

$(CLUSTERS)/.has-ray: $(CLUSTERS)/.has-hvkeras
	@echo "Installing Ray"
	@$(call pip,$(CLUSTERS)) "ray[tune]$$(sed -n 's/^ray = .*"ray\([^"]*\)".*/\1/p' pyproject.toml)"
	@touch $@

# Only for torchrun. PyPI's torch is the build for CUDA; pip prefers a local wheel for CPUs.
$(CLUSTERS)/.has-torch: | $(CLUSTERS)/.has-hvkeras
	@echo "Installing torch"
	@$(call pip,$(CLUSTERS)) "torch==2.13.*"
	@touch $@

# pyspark contains Spark, which needs Java. Estimators write logs if TensorBoard is installed.
$(CLUSTERS)/.has-spark: | $(CLUSTERS)/.has-hvkeras
	@command -v java >/dev/null || tools/system_packages.sh openjdk-17-jre-headless || echo "Tests on Spark are skipped"
	@echo "Installing Spark (a large download the first time)"
	@$(call pip,$(CLUSTERS)) tensorboard $$(sed -n 's/^spark = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d ',"')
	@touch $@

# The tests start Slurm's daemons themselves.
$(CLUSTERS)/.has-slurm: | $(CLUSTERS)/.has-python
	@command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null || \
	  tools/system_packages.sh slurm-wlm munge || echo "Tests on Slurm are skipped"
	@touch $@

$(TRACKERS)/.has-trackers: $(TRACKERS)/.has-python
	@echo "Installing $(PACKAGE_$(FLAVOUR)) $(TESTED_TENSORFLOW), trackers and tuners"
	@$(call pip,$(TRACKERS)) "$(PACKAGE_$(FLAVOUR))==$(TESTED_TENSORFLOW).*" keras-tuner mlflow optuna orbax-checkpoint tensorboard wandb
	@touch $@

$(TRACKERS)/.has-hvkeras: $(TRACKERS)/.has-trackers $(VENV)/.has-wheel
	@$(call install_hvkeras,$(TRACKERS),[test])
	@touch $@

# With this link, mypy, pyright and import-linter find hvkeras.backends in the checkout. Git, the wheel and the source
# distribution exclude it.
hvkeras/backends:
	ln -s ../backends $@
