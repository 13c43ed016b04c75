#!/usr/bin/env bash
# Serves the drafter that lies beside this file; needs no network and writes nothing beside itself.
#
#   bash serve.sh [--log-level debug]
#
# Environment: HOST (0.0.0.0), PORT (8000), MODEL_NAME (submission), PYTHON (python3 on PATH: a 3.12 with torch),
# TMPDIR (/tmp: the wheels are installed there once, and caches live there; where it is full, in /var/tmp or /dev/shm).
# Exit codes: 0 after SIGTERM or SIGINT; 2 for what you can mend, with a sentence; 1 when the server never comes up or
# does not go down. A signal in the first moments, or while bash hands over to Python, ends it as it ends any process.
# A server that ends by a fault is started again, with ever longer pauses (drafter/supervisor.py).
set -u
unset CDPATH
umask 077

say() { printf 'serve.sh: %s\n' "$*" >&2; }
refuse() { say "$*"; exit 2; }

# A signal before the server has started ends what runs, tidies up and leaves.
fresh="" installer=""
leave() {
    if [ -n "$installer" ]; then kill -TERM "$installer" 2>/dev/null; wait "$installer"; fi
    if [ -n "$fresh" ]; then rm -rf -- "$fresh"; fi
    exit 0
}
trap leave TERM INT

here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
case $here in *:*) refuse "Python cannot import from a path with a colon ($here); copy the folder elsewhere" ;; esac
requirements=$here/wheels/requirements.txt
[ -r "$requirements" ] || refuse "$requirements is missing; copy the whole folder again"

python=${PYTHON:-python3}
unset PYTHONHOME PYTHONSTARTUP PYTHONPATH
unset http_proxy https_proxy all_proxy ftp_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY FTP_PROXY
export PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0  # spinning threads starve the rest of a small machine
export HOST=${HOST:-0.0.0.0} PORT=${PORT:-8000} MODEL_NAME=${MODEL_NAME:-submission}
export USER=${USER:-drafter} LOGNAME=${LOGNAME:-drafter}  # there may be no passwd entry to ask

mend="put a Python 3.12 with torch first on PATH, or name one in PYTHON"
command -v -- "$python" >/dev/null || refuse "there is no $python; $mend"
found=$("$python" - "$requirements" <<'PY'
import hashlib, importlib.util, pathlib, sys
torch = "torch" if importlib.util.find_spec("torch") else "no-torch"
digest = hashlib.sha256(pathlib.Path(sys.argv[1]).read_bytes()).hexdigest()[:16]
print("%d.%d" % sys.version_info[:2], torch, digest)
PY
) || refuse "$python does not run; $mend"
read -r version torch digest <<<"$found"
[ "$version" = 3.12 ] || refuse "$python is Python $version; $mend"
[ "$torch" = torch ] || refuse "$python has no torch; $mend"

# Whether a folder can hold programs: compiled libraries do not load from one mounted noexec.
runs_programs() {
    local probe
    probe=$(mktemp -- "$1/draftmill-probe.XXXXXX" 2>/dev/null) || return 1
    printf '#!/bin/sh\nexit 0\n' >"$probe" && chmod 700 "$probe" && "$probe" 2>/dev/null
    local code=$?
    rm -f -- "$probe"
    return "$code"
}

# Whether every file of an installed site is as it was: whoever tidies up temporary folders may have taken some.
whole() { (cd -- "$site" && { [ ! -s .sums ] || sha256sum --check .sums; }) >/dev/null 2>&1 && [ -f "$site/.sums" ]; }

# Installs beside the site and moves it in whole: of two that start at once, one wins and both serve.
# Returns 1 where there is no room.
install_wheels() {
    local words said="" code
    fresh=$(mktemp -d -- "$home/new.XXXXXX" 2>/dev/null) || return 1
    exec {words}< <(PIP_CONFIG_FILE=/dev/null HOME=$home exec "$python" -m pip --isolated install --quiet \
        --disable-pip-version-check --no-input --no-cache-dir --no-index --find-links "$here/wheels" \
        --require-hashes --no-deps --target "$fresh/site" --requirement "$requirements" 2>&1)
    installer=$!
    IFS= read -r -d '' -u "$words" said  # a builtin: a signal ends it at once
    exec {words}<&-
    wait "$installer"
    code=$?
    installer=""
    mkdir -p -- "$fresh/site"  # a list without wheels leaves none
    if [ "$code" = 0 ]; then  # the code of a disk without room is 28
        (cd -- "$fresh/site" && find . -type f -exec sha256sum {} + >../sums && mv ../sums .sums) 2>/dev/null || code=28
    fi
    if [ "$code" = 0 ]; then
        if [ -d "$site" ] && ! whole; then
            say "the wheels in $site are damaged; they are installed anew"
            mv -T -- "$site" "$fresh/damaged" 2>/dev/null
        fi
        mv -T -- "$fresh/site" "$site" 2>/dev/null
    fi
    rm -rf -- "$fresh"
    fresh=""
    case $code,$said in
        0,*) whole || refuse "$site cannot be written; set TMPDIR to another folder" ;;
        28,* | *"No space left"* | *"quota exceeded"*) return 1 ;;
        *) refuse "the wheels in $here/wheels do not install: $(grep -v '^[[:space:]]*$' <<<"${said:-pip said nothing}" |
            tail -n 1)" ;;
    esac
}

# Makes the folder of this user below $base, and the site in it. Returns 1 where there is no room.
settle() {
    home=$base/draftmill-$EUID-$digest
    mkdir -- "$home" 2>/dev/null || [ -e "$home" ] || [ -L "$home" ] || return 1
    if [ -L "$home" ] || [ ! -d "$home" ] || [ ! -O "$home" ]; then
        refuse "$home is not a folder of this user, so it is not trusted; remove it or set TMPDIR to another folder"
    fi
    chmod 700 "$home" || refuse "$home cannot be closed to others; set TMPDIR to another folder"
    find "$home" -maxdepth 1 -name 'new.*' -mmin +60 -exec rm -rf -- {} + 2>/dev/null  # left by what was killed
    site=$home/site
    export TMPDIR=$base
    whole || install_wheels
}

full="" settled=""
for candidate in "${TMPDIR:-/tmp}" /tmp /var/tmp /dev/shm; do
    runs_programs "$candidate" || continue
    base=$(readlink -f -- "$candidate")
    case $base in *:*) refuse "Python cannot import from a path with a colon ($base); set TMPDIR to another" ;; esac
    if settle; then settled=1 && break; fi
    full="$full $base"
done
[ -n "$settled$full" ] ||
    refuse "${TMPDIR:-/tmp} cannot be written to, or not run from; set TMPDIR to a folder of yours"
[ -n "$settled" ] || refuse "there is no room for the wheels in$full; set TMPDIR to a folder with 50 MB to spare"

export XDG_CACHE_HOME=$home/cache TRITON_CACHE_DIR=$home/cache/triton TORCHINDUCTOR_CACHE_DIR=$home/cache/inductor
if [ ! -d "${HOME:-}" ] || [ ! -w "${HOME:-}" ]; then export HOME=$home; fi

PYTHONPATH=$site:$here exec "$python" -m drafter.supervisor --weights "$here" "$@"
