# shellcheck shell=bash
# What all recipes share. A recipe sets HERE, its own folder, and sources the common.sh of its kind, which sources this.

EXAMPLES="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# ---------------------------------------------------------------------------------------------------- speaking up

say() { printf '== %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

need_command() { command -v "$1" >/dev/null || die "'$1' is not installed: $2."; }

need_module() { "$PYTHON" -c "import $1" 2>/dev/null || die "$PYTHON has no module '$1': $2."; }

need_file() { [ -e "$1" ] || die "$1 is not there: $2."; }

# whole_numbers LEAST NAME...: stops where a variable that is set holds anything else.
whole_numbers() {
    local least=$1 name value
    shift
    for name in "$@"; do
        value=${!name:-$least}
        [[ $value =~ ^(0|[1-9][0-9]*)$ && $value -ge $least ]] ||
            die "$name is '$value'; give a whole number from $least."
    done
}

# --------------------------------------------------------------------------------------------------- Python, fairseq

# The first Python that has fairseq and the plugin: PYTHON, one on PATH, the one that `make install` sets up.
find_python() {
    local python
    for python in ${PYTHON:+"$PYTHON"} python3 python "$EXAMPLES/../.venv/bin/python"; do
        if "$python" -c 'import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' \
            fairseq mega_fairseq 2>/dev/null; then
            command -v "$python"
            return
        fi
        [ "$python" != "${PYTHON:-}" ] || die "PYTHON=$PYTHON has no fairseq and mega_fairseq, or is no Python:" \
            "install them there as the repository's README says, or name another."
    done
    die "no Python here has fairseq and mega_fairseq: run 'make install' in the repository," \
        "or set PYTHON to one that has them."
}

# fairseq's commands, by module name: on PATH they may belong to another Python.
fairseq() {
    local tool=$1
    shift
    "$PYTHON" -m "fairseq_cli.$tool" "$@"
}

# The plugin's folder, for --user-dir: its own command knows it; where that is not installed, Python does.
user_dir() {
    "$(dirname "$PYTHON")/mega-fairseq" user-dir 2>/dev/null ||
        "$PYTHON" -c 'import importlib.util as u; print(u.find_spec("mega_fairseq").submodule_search_locations[0])'
}

# How many GPUs to use: GPUS, or all that torch sees.
count_gpus() { echo "${GPUS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}"; }

# ---------------------------------------------------------------------------------------- the choices of the caller

# Relative paths count from the folder that the script is called from.
absolute() { case $1 in /*) printf '%s\n' "$1" ;; *) printf '%s\n' "$PWD/$1" ;; esac; }

PYTHON=$(find_python)
WORKERS=${WORKERS:-$(getconf _NPROCESSORS_ONLN)}
DATA=$(absolute "${DATA:-$HERE/data}")
DOWNLOADS=$DATA/downloads
whole_numbers 0 GPUS
whole_numbers 1 WORKERS

# ------------------------------------------------------------------------------------------------------ prepare.sh

# step RESULT COMMAND...: have RESULT made, unless it is there. COMMAND is given a temporary path as its last
# argument, which becomes RESULT only when all went well: what was interrupted is done again, what is finished never.
step() {
    local result=$1
    shift
    if [ -e "$result" ]; then
        say "have $result"
        return
    fi
    say "making $result"
    mkdir -p "$(dirname "$result")"
    rm -rf "$result.tmp"
    "$@" "$result.tmp"
    mv "$result.tmp" "$result"
}

# keep FILE COMMAND...: shows what the commands print, and keeps it as FILE once nothing is missing in it.
keep() {
    local file=$1 command
    shift
    for command in "$@"; do "$command"; done | tee "$file.tmp"
    mv "$file.tmp" "$file"
}

# remember RESULT CHOICES: what RESULT is made with. A step is skipped by the name of its result alone, so a call with
# other choices must not take it for its own. What was put there by hand has no note and is taken as it is.
remember() {
    local result=$1 choices=$2 note=$1.choices
    if [ ! -e "$result" ]; then
        mkdir -p "$(dirname "$result")"
        printf '%s\n' "$choices" >"$note"
    elif [ -e "$note" ] && [ "$(cat "$note")" != "$choices" ]; then
        die "$result was made with $(cat "$note"), not with $choices: name another folder with DATA=...," \
            "or remove $(dirname "$result")."
    fi
}

# The last line counts where its end is missing, too.
count_lines() { LC_ALL=C awk 'END {print NR}' <"$1"; }

# fetch URL: into DOWNLOADS, under a temporary name until it is whole; a broken download goes on where it broke off.
# With MIRROR from there, by the same name.
fetch() {
    local url=$1 file
    file=$DOWNLOADS/$(basename "$url")
    [ -z "${MIRROR:-}" ] || url=${MIRROR%/}/$(basename "$url")
    if [ -e "$file" ]; then
        say "have $file"
        return
    fi
    say "downloading $url"
    curl --fail --location --retry 3 --connect-timeout 30 --continue-at - --progress-bar \
        --output "$file.part" "$url" && mv "$file.part" "$file"
}

# dead_links NAME...: stops, with what the caller can do about it.
dead_links() {
    die "could not download $*: run this again if your connection broke off (remove" \
        "$DOWNLOADS/*.part to begin anew); if a link is dead, get the file of that name elsewhere, put it into" \
        "$DOWNLOADS and run this again."
}

# -------------------------------------------------------------------------------------------------------- train.sh

# run_training OPTIONS...: what translation and language modelling have in common. UPDATES, WARMUP, MAX_TOKENS (on one
# GPU at a time), BATCH_TOKENS (in one update, over all GPUs) and PRECISION come from the recipe.
run_training() {
    local gpus devices options
    gpus=$(count_gpus)
    devices=$((gpus > 0 ? gpus : 1))
    options=(
        --user-dir "$(user_dir)" --save-dir "$CHECKPOINTS"
        --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-8
        --lr-scheduler polynomial_decay --power 1 --end-learning-rate 0
        --warmup-updates "$WARMUP" --total-num-update "$UPDATES" --max-update "$UPDATES"
        --max-tokens "$MAX_TOKENS" --update-freq $(((BATCH_TOKENS + MAX_TOKENS * devices - 1) / (MAX_TOKENS * devices)))
        # Any other value drops the last sentences of a batch, in validation too.
        --required-batch-size-multiple 1
        --distributed-world-size "$devices"
        --log-format simple --log-interval 100
    )
    if [ "$gpus" = 0 ]; then
        [ "$PRECISION" != fp16 ] || die "PRECISION=fp16 needs a GPU: use fp32 or bf16."
        options+=(--cpu)
    fi
    case $PRECISION in
    fp32) ;;
    fp16 | bf16) options+=("--$PRECISION") ;;
    *) die "PRECISION=$PRECISION is unknown: say fp32, fp16 or bf16." ;;
    esac
    say "training in $CHECKPOINTS; it goes on from checkpoint_last.pt if that is there"
    fairseq train "$BIN" "${options[@]}" "$@"
}
