# shellcheck shell=bash
# Shared by all recipes. A script sets HERE, its own folder, and sources the common.sh next to it or one folder up,
# which sources this file.

EXAMPLES="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# ------------------------------------------------------------------------------------------------------------- help

# Prints the comment at the top of the script that was called.
print_help() {
    sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"
    cat <<END

All scripts: PYTHON (the first on PATH with fairseq and this package, else the repository's .venv), OMP_NUM_THREADS (1:
threads per process), WORKERS (all processors: processes that prepare text), GPUS (all; 0 runs on the CPU).
END
}

for argument in "$@"; do
    case $argument in -h | --help)
        print_help
        exit
        ;;
    esac
done

# --------------------------------------------------------------------------------------------------------- messages

say() { printf '== %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# no_arguments ARGUMENT...: for scripts that take none, or no more.
no_arguments() { [ $# = 0 ] || die "$1 is unknown: see --help."; }

need_command() { command -v "$1" >/dev/null || die "'$1' is not installed: $2."; }

need_module() { "$PYTHON" -c "import $1" 2>/dev/null || die "$PYTHON has no module '$1': $2."; }

need_file() { [ -e "$1" ] || die "$1 does not exist: $2."; }

# whole_numbers MINIMUM NAME...: stops if one of these variables is set to anything else.
whole_numbers() {
    local minimum=$1 name value
    shift
    for name in "$@"; do
        value=${!name:-$minimum}
        [[ $value =~ ^(0|[1-9][0-9]*)$ && $value -ge $minimum ]] ||
            die "$name is '$value'; give a whole number from $minimum."
    done
}

# --------------------------------------------------------------------------------------------------- Python, fairseq

# The first Python with fairseq and the plugin: PYTHON, one on PATH, the one that `make install` sets up.
find_python() {
    local python
    for python in ${PYTHON:+"$PYTHON"} python3 python "$EXAMPLES/../.venv/bin/python"; do
        if "$python" -c 'import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' \
            fairseq mega_fairseq 2>/dev/null; then
            command -v "$python"
            return
        fi
        [ "$python" != "${PYTHON:-}" ] || die "PYTHON=$PYTHON cannot import fairseq and mega_fairseq: install them" \
            "there as the repository's README says, or choose another Python."
    done
    die "no Python with fairseq and mega_fairseq was found: run 'make install' in the repository," \
        "or set PYTHON to one that has them."
}

# fairseq's commands by module name: those on PATH may belong to another Python.
fairseq() {
    local tool=$1
    shift
    "$PYTHON" -m "fairseq_cli.$tool" "$@"
}

# The plugin's folder for --user-dir; Python finds it where the mega-fairseq command is not installed.
user_dir() {
    "$(dirname "$PYTHON")/mega-fairseq" user-dir 2>/dev/null ||
        "$PYTHON" -c 'import importlib.util as u; print(u.find_spec("mega_fairseq").submodule_search_locations[0])'
}

# How many GPUs to use: GPUS, or all that torch finds.
count_gpus() { echo "${GPUS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}"; }

# --------------------------------------------------------------------------------------------------------- variables

# With it, Python ignores that a full disk cuts a write short, and a truncated file would look complete.
unset PYTHONUNBUFFERED

# Relative paths are relative to the folder that the script is called from.
absolute() { case $1 in /*) printf '%s\n' "$1" ;; *) printf '%s\n' "$PWD/$1" ;; esac; }

PYTHON=$(find_python)
WORKERS=${WORKERS:-$(getconf _NPROCESSORS_ONLN)}
# By default torch starts a thread per core. On small models, or when other processes use the cores, that can be many
# times slower than a single thread.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# glibc then keeps the memory of large tensors, which it otherwise requests from the kernel in each update.
export MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0} MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-100000000000}
DATA=$(absolute "${DATA:-$HERE/data}")
DOWNLOADS=$DATA/downloads
SCHEDULER=polynomial_decay
whole_numbers 0 GPUS
whole_numbers 1 WORKERS OMP_NUM_THREADS

# claim PATH: keeps a file or folder for this script, and the programs that it starts, until they have ended: two at
# once would write the same files. A script claims one path.
claim() {
    [ "${CLAIMED:-}" != "$1" ] || return 0
    exec 9<"$1"
    "$PYTHON" -c '
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(1)
except OSError:  # some network file systems have no locks
    pass' || die "another script, or a program that it has started, is writing to $1: wait until it has finished."
    CLAIMED=$1
}

claim_folder() {
    mkdir -p "$1"
    claim "$1"
}

# ------------------------------------------------------------------------------------------------------ prepare.sh

# step RESULT COMMAND...: runs COMMAND to make RESULT, unless RESULT exists. COMMAND gets a temporary path as its last
# argument, which is renamed to RESULT on success: an interrupted step is repeated, a finished one is skipped.
step() {
    local result=$1
    shift
    claim_folder "$DATA"
    if [ -e "$result" ]; then
        say "have $result"
        return
    fi
    say "making $result"
    trap explain_failure EXIT # after `||` instead, COMMAND would go on after an error
    mkdir -p "$(dirname "$result")"
    rm -rf "$result.tmp"
    "$@" "$result.tmp"
    [ "$result" != "${REMEMBERED:-}" ] || printf '%s\n' "$SETTINGS" >"$result.choices"
    mv "$result.tmp" "$result"
    trap - EXIT
}

# Says, after what the programs of a failed step have said, that there is no space for another MiB.
explain_failure() {
    local file=$DATA/space.tmp full=
    touch "$file" 2>/dev/null || return # another reason
    head -c 1048576 /dev/zero 2>/dev/null >"$file" || full=yes
    rm -f "$file"
    [ -z "$full" ] || die "the disk of $DATA is full: free some space, and run this again."
}

# keep FILE COMMAND...: prints what the commands print, and saves it as FILE once all of them have succeeded.
keep() {
    local file=$1 command
    shift
    for command in "$@"; do "$command"; done | tee "$file.tmp"
    mv "$file.tmp" "$file"
}

# remember RESULT SETTINGS: `step RESULT` records the settings. This stops if RESULT was made with others, also if it
# was removed since: a step only looks at the name of its result, so those that depend on RESULT would not be made again.
# Without a record, RESULT was put there by hand and is used as it is.
remember() {
    local note=$1.choices place
    claim_folder "$DATA"
    place=$(dirname "$1")
    [ "$place" != "$DATA" ] || place="all of $DATA but its downloads"
    [ ! -s "$note" ] || [ "$(cat "$note")" = "$2" ] ||
        die "$1 was made with $(cat "$note"), not with $2: name another folder with DATA=...," \
            "or remove $place."
    REMEMBERED=$1 SETTINGS=$2
}

# unpack ARCHIVE FOLDER: the content of the only folder of a .tar.xz archive.
unpack() {
    need_command xz "install it with your system's package manager"
    mkdir "$2"
    tar -xJf "$1" -C "$2" --strip-components 1 || die "$1 is truncated or not an archive: replace it."
}

# Counts lines, including a last one without a newline.
count_lines() { LC_ALL=C awk 'END {print NR}' <"$1"; }

# fetch URL: downloads it to DOWNLOADS, or the file of that name from MIRROR. The file has a temporary name until it is
# complete; an interrupted download is resumed.
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

# download_failed NAME...: stops with an error that says what to do.
download_failed() {
    die "could not download $*: run this again if the connection was interrupted (remove" \
        "$DOWNLOADS/*.part to start over); if a link is dead, get the file of that name elsewhere, put it into" \
        "$DOWNLOADS and run this again."
}

# -------------------------------------------------------------------------------------------------------- train.sh

# choose_precision GPUS: sets PRECISION if it is auto. A training that has begun keeps its own. A new one takes bf16 on a
# CPU that multiplies it faster than float32, except with fairseq's models, for which --bf16 means a TPU.
choose_precision() {
    local kept=$CHECKPOINTS/precision
    mkdir -p "$CHECKPOINTS"
    if [ "$PRECISION" = auto ]; then
        PRECISION=fp32
        if [ -s "$kept" ]; then # it is empty if the disk was full
            PRECISION=$(cat "$kept")
        elif [ "$1" = 0 ] && [ ! -e "$CHECKPOINTS/checkpoint_last.pt" ] && [[ ${ARCH:-} != transformer* ]] &&
            "$PYTHON" -c 'from mega_fairseq.cli.cpu import cpu_bf16; cpu_bf16()' 2>/dev/null; then
            PRECISION=bf16
        fi
    fi
    echo "$PRECISION" >"$kept"
}

# run_training UNIT MOST TOTAL OPTIONS...: shared by all recipes. UNIT is --max-tokens, or --batch-size for examples: MOST
# of them are in one batch on one GPU, TOTAL in one update over all GPUs. The recipe sets UPDATES, WARMUP and PRECISION,
# and another SCHEDULER if the learning rate shall not decrease linearly to 0.
run_training() {
    local unit=$1 most=$2 total=$3 gpus devices options
    shift 3
    gpus=$(count_gpus)
    devices=$((gpus > 0 ? gpus : 1))
    # shellcheck disable=SC2153 # CHECKPOINTS is another variable than CHECKPOINT
    options=(
        --user-dir "$(user_dir)" --save-dir "$CHECKPOINTS"
        --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-8
        --warmup-updates "$WARMUP" --max-update "$UPDATES"
        "$unit" "$most" --update-freq $(((total + most * devices - 1) / (most * devices)))
        # With the task `translation`, any other value drops the last sentences of an epoch; our tasks ignore it.
        --required-batch-size-multiple 1
        --distributed-world-size "$devices"
        --log-format simple --log-interval $((gpus > 0 ? 100 : 20))
    )
    if [ "$SCHEDULER" = polynomial_decay ]; then
        options+=(--power 1 --end-learning-rate 0 --total-num-update "$UPDATES")
    fi
    options+=(--lr-scheduler "$SCHEDULER")
    case $PRECISION in
    auto | fp32 | bf16) ;;
    fp16) [ "$gpus" != 0 ] || die "PRECISION=fp16 needs a GPU: use fp32 or bf16." ;;
    *) die "PRECISION=$PRECISION is unknown: use auto, fp32, fp16 or bf16." ;;
    esac
    claim_folder "$CHECKPOINTS"
    choose_precision "$gpus"
    [ "$PRECISION" = fp32 ] || options+=("--$PRECISION")
    if [ "$gpus" = 0 ]; then
        options+=(--cpu)
        say "training on the CPU in $PRECISION with OMP_NUM_THREADS=$OMP_NUM_THREADS"
    fi
    say "training in $CHECKPOINTS; continues from checkpoint_last.pt if there is one"
    fairseq train "$BIN" "${options[@]}" "$@"
}

# ----------------------------------------------------------------------------------------------------- evaluate.sh

# need_trained ARGUMENT...: sets the defaults of CHECKPOINT and SUBSET, and checks that data and checkpoint exist.
need_trained() {
    refuse_subset "$@"
    CHECKPOINT=$(absolute "${CHECKPOINT:-$CHECKPOINTS/checkpoint_best.pt}")
    SUBSET=${SUBSET:-test}
    need_data
    need_file "$CHECKPOINT" "run train.sh first, or name a checkpoint with CHECKPOINT=..."
    mkdir -p "$RESULTS"
}

# refuse_subset ARGUMENT...: the programs would take the subset from an argument, and the scripts would not.
refuse_subset() {
    local argument
    for argument in "$@"; do
        case $argument in --gen | --gen[-=]* | --valid-s* | --sub*)
            die "$argument: name the subset with SUBSET=..."
            ;;
        esac
    done
}

# override SETTINGS ARGUMENT...: sets ARGUMENTS to the arguments, with SETTINGS added to those of --model-overrides, of
# which fairseq takes only the last.
override() {
    local settings=$1 given='{}' all
    shift
    ARGUMENTS=()
    while [ $# -gt 0 ]; do
        case $1 in
        --model-o*=*) given=${1#*=} ;;
        --model-o*)
            given=${2:-}
            [ $# = 1 ] || shift
            ;;
        *) ARGUMENTS+=("$1") ;;
        esac
        shift
    done
    all=$("$PYTHON" -c 'import ast, sys
print({name: value for words in sys.argv[1:] for name, value in ast.literal_eval(words).items()})' \
        "$given" "$settings" 2>/dev/null) ||
        die "--model-overrides is $given: give a dictionary, such as \"{'decoder_chunk_size': 256}\"."
    ARGUMENTS+=(--model-overrides "$all")
}

# begin_result WORD...: sets RESULT, the common prefix of the files of an evaluation with these settings, claims its log,
# and removes the files of an earlier one.
begin_result() {
    RESULT=$RESULTS/$(name_result "$@")
    touch "$RESULT.log.tmp"
    claim "$RESULT.log.tmp"
    rm -f "$RESULT".{txt,log,tsv,json,png}
}

# name_result WORD...: a file name made of the settings of an evaluation.
name_result() {
    local word name=
    for word in "$@"; do [ -z "$word" ] || name+="-${word#--}"; done
    printf '%s\n' "${name#-}" | LC_ALL=C tr -c 'A-Za-z0-9._\n' '-'
}

# The word for CHECKPOINT in such a name: nothing for the default.
checkpoint_word() {
    local word=${CHECKPOINT#"$CHECKPOINTS/"}
    word=${word%.pt}
    [ "$word" = checkpoint_best ] || printf '%s\n' "$word"
}

# keep_scores PREFIX SCORE...: prints the scores and saves them as PREFIX.txt, then gives the complete log its final name.
keep_scores() {
    local prefix=$1
    shift
    keep "$prefix.txt" "$@"
    mv "$prefix.log.tmp" "$prefix.log"
}

# score NAME FORMULA
score() {
    local value
    value=$(LC_ALL=C awk "BEGIN {printf \"%.3f\", $2}")
    printf '%-24s%s\n' "$1:" "$value"
}
